"""History: the one reader of logs. It folds a log into the view of a run that every presenter draws.

Beside the view stand a summary, texts and diagnostics. What opens stores on disk is imported by its path:
`treenail.history.stores`, `treenail.history.store_diagnostics`, and `treenail.history.operations`, with
the operations on stored runs.
"""

from treenail.history.checks import CHECKS, CheckResult, Finding
from treenail.history.diagnostics import DiagnosticsReport, diagnose
from treenail.history.projection import Projection, project
from treenail.history.summary import RunSummary, summarize
from treenail.history.text import TextLine, lines, render_text
from treenail.history.tree import RunTree, read_tree
from treenail.history.view import Item, LiveView, RunView, TurnView, Usage

__all__ = [
    "CHECKS",
    "CheckResult",
    "DiagnosticsReport",
    "Finding",
    "Item",
    "LiveView",
    "Projection",
    "RunSummary",
    "RunTree",
    "RunView",
    "TextLine",
    "TurnView",
    "Usage",
    "diagnose",
    "lines",
    "project",
    "read_tree",
    "render_text",
    "summarize",
]

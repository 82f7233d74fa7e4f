"""Subagents: child sessions under supervision, and the table of how they can end."""

from treenail.subagents.extension import Extension, with_subagents
from treenail.subagents.limits import Allowance, SubagentLimits
from treenail.subagents.outcomes import WaitOutcome
from treenail.subagents.records import SubagentChangesApplied, SubagentCharter, WorkspaceMode
from treenail.subagents.runner import ChildRun, ChildRunner, LoopRunner
from treenail.subagents.states import TRANSITIONS, SubagentStatus
from treenail.subagents.supervision import Subagent, Subagents
from treenail.subagents.tools import subagent_tools

__all__ = [
    "TRANSITIONS",
    "Allowance",
    "ChildRun",
    "ChildRunner",
    "Extension",
    "LoopRunner",
    "Subagent",
    "SubagentChangesApplied",
    "SubagentCharter",
    "SubagentLimits",
    "SubagentStatus",
    "Subagents",
    "WaitOutcome",
    "WorkspaceMode",
    "subagent_tools",
    "with_subagents",
]

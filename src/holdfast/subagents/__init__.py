"""Subagents: child sessions under supervision, and the table of how they can end."""

from holdfast.subagents.extension import Extension, with_subagents
from holdfast.subagents.limits import Allowance, SubagentLimits
from holdfast.subagents.outcomes import WaitOutcome
from holdfast.subagents.records import SubagentChangesApplied, SubagentCharter, WorkspaceMode
from holdfast.subagents.runner import ChildRun, ChildRunner, LoopRunner
from holdfast.subagents.states import TRANSITIONS, SubagentStatus
from holdfast.subagents.supervision import Subagent, Subagents
from holdfast.subagents.tools import subagent_tools

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

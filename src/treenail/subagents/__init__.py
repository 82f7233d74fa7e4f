"""Subagents: child sessions under supervision, and the table of how they can end."""

from treenail.subagents.background import BackgroundTasks
from treenail.subagents.copies import apply_copy
from treenail.subagents.events import (
    WORKSPACE_MODES,
    SubagentChangesApplied,
    SubagentCharter,
    WorkspaceMode,
)
from treenail.subagents.extension import prompt_extended, with_subagents
from treenail.subagents.limits import Allowance, SubagentLimits
from treenail.subagents.outcomes import WaitOutcome
from treenail.subagents.runner import ChildRun, ChildRunner, LoopRunner
from treenail.subagents.states import TRANSITIONS, SubagentStatus, apply_event
from treenail.subagents.subagent import Subagent
from treenail.subagents.supervision import Subagents
from treenail.subagents.tools import subagent_tools

__all__ = [
    "TRANSITIONS",
    "WORKSPACE_MODES",
    "Allowance",
    "BackgroundTasks",
    "ChildRun",
    "ChildRunner",
    "LoopRunner",
    "Subagent",
    "SubagentChangesApplied",
    "SubagentCharter",
    "SubagentLimits",
    "SubagentStatus",
    "Subagents",
    "WaitOutcome",
    "WorkspaceMode",
    "apply_copy",
    "apply_event",
    "prompt_extended",
    "subagent_tools",
    "with_subagents",
]

"""The events that logs keep about subagents, besides `SubagentEvent`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treenail.log import SlicePolicy
from treenail.state import event
from treenail.workspace import FilesystemSnapshot

WorkspaceMode = Literal["shared", "isolated", "read_only"]
"""Where a subagent works: in its parent's workspace, in a copy of it, or in a read-only view of it."""

WORKSPACE_MODES: tuple[WorkspaceMode, ...] = ("shared", "isolated", "read_only")
"""Every workspace mode."""


@event(name="treenail.SubagentCharter", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class SubagentCharter:
    """The first event of a subagent's own log: what is needed to resume it, besides the parent's log.

    Its agent, task and limits are in its parent's log, in the `SubagentEvent` that queued it.
    """

    subagent_id: str
    permission_mode: str = "auto"
    """The mode that it began with. A process that resumes it may be stricter, never laxer."""
    fork_base: FilesystemSnapshot | None = None
    """For an isolated subagent: the boundary of the parent's workspace at which its copy begins."""
    fork_place: str | None = None
    """For an isolated subagent on disk: the directory that holds its changes."""


@event(name="treenail.SubagentChangesApplied", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class SubagentChangesApplied:
    """An isolated subagent's changes were applied to its parent's workspace.

    The event is committed in the same transaction as the files, and rolled back with them.
    """

    subagent_id: str
    child_session_id: str
    applied: tuple[tuple[str, str], ...] = ()
    """Each path and its new fingerprint."""

"""What the logs keep about subagents besides `SubagentEvent`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treenail.log.event import SlicePolicy
from treenail.state.events import event
from treenail.workspace.base import FilesystemSnapshot

WorkspaceMode = Literal["shared", "isolated", "read_only"]
"""Where a subagent works: in its parent's workspace, in a copy of its own, or there without changing it."""

WORKSPACE_MODES: tuple[WorkspaceMode, ...] = ("shared", "isolated", "read_only")


@event(name="treenail.SubagentCharter", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class SubagentCharter:
    """The first event of a subagent's own log: who it is, and what it was allowed.

    Whoever goes on with it in another process goes by this; it may be narrowed there, never widened.
    """

    subagent_id: str
    agent: str
    task: str
    parent_session_id: str
    depth: int
    workspace_mode: str
    timeout_s: float | None
    max_steps: int | None = None
    max_cost_usd: float | None = None
    permission_mode: str = "auto"
    fork_base: FilesystemSnapshot | None = None
    """For an isolated one: the boundary of its parent's workspace at which its copy begins."""
    fork_place: str | None = None
    """For an isolated one on disk: the directory that holds what is its own."""


@event(name="treenail.SubagentChangesApplied", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class SubagentChangesApplied:
    """What an isolated subagent had changed is now in its parent's workspace.

    It is committed with the files, in one transaction, and rolled back with them.
    """

    subagent_id: str
    child_session_id: str
    applied: tuple[tuple[str, str], ...] = ()
    """The paths, and what each of them has become."""

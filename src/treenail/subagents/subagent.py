"""One subagent, as its parent's log describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from treenail.containment import ActiveCall
from treenail.subagents.events import WorkspaceMode
from treenail.subagents.limits import Allowance
from treenail.subagents.states import SubagentStatus
from treenail.subagents.workspaces import ChildWorkspace
from treenail.turns import TurnState

_MAX_LISTED_TASK_CHARS = 200


@dataclass(slots=True, eq=False)
class Subagent:
    """One subagent. Callers read it; only its supervision changes it."""

    id: str
    session_id: UUID
    agent: str
    task: str
    depth: int
    workspace_mode: WorkspaceMode
    allowance: Allowance
    status: SubagentStatus = SubagentStatus.QUEUED
    summary: str = ""
    """Its answer, if it completed."""
    reason: str = ""
    """Why it ended, if it did not complete."""
    next_actions: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    turn_state: TurnState | None = None
    """How its newest turn ended, according to its own log."""
    error_kind: str | None = None
    output: Any = None
    """Its answer as a value, if its turn ran in this process and its agent declares an output type."""
    elapsed_ms: int | None = None
    attempt: int = 1
    retry_of: str | None = None
    call_id: str | None = None
    notes: tuple[str, ...] = ()
    """One sentence for each requested limit that was narrowed."""
    inputs: list[str] = field(default_factory=list)
    """Its task and every later message; each becomes one turn of its session."""
    is_pending: bool = False
    """Whether it has an input that it has not answered yet."""
    is_inherited: bool = False
    """Whether it belongs to the session that this one was forked from."""
    cancel_reason: str = ""
    """Why it was asked to stop, until it has stopped."""
    resumes_turn: bool = field(default=False, repr=False)
    """Whether its next turn continues its last one instead of answering an input."""
    asked_in: ActiveCall | None = field(default=None, repr=False)
    """The contained call that spawned it in this process; its own calls are nested below that call."""
    trace_parent: object = field(default=None, repr=False)
    """The span that its work belongs to."""
    copy_in_memory: ChildWorkspace | None = field(default=None, repr=False)
    """Its workspace, if that exists only as long as this object refers to it."""

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and has no unanswered input."""
        return self.status.is_terminal and not self.is_pending

    def describe(self) -> dict[str, object]:
        """Return its entry in a list of subagents."""
        shown: dict[str, object] = {"id": self.id, "agent": self.agent, "status": self.status.value}
        for name in ("summary", "reason", "elapsed_ms", "next_actions", "notes"):
            value = getattr(self, name)
            if value:
                shown[name] = value
        cut = len(self.task) > _MAX_LISTED_TASK_CHARS
        shown["task"] = self.task[:_MAX_LISTED_TASK_CHARS] + " ..." if cut else self.task
        shown["workspace"] = self.workspace_mode
        shown["session_id"] = str(self.session_id)
        if self.is_pending:
            shown["has_unread_input"] = True
        return shown

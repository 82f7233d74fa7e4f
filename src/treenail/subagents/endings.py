"""How a subagent ended, decided from evidence: the state of its turn and what the supervision saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.subagents.states import SubagentStatus
from treenail.subagents.subagent import Subagent
from treenail.turns.states import TurnState

STATUS_OF_TURN: Mapping[TurnState, SubagentStatus] = {
    TurnState.COMPLETED: SubagentStatus.COMPLETED,
    TurnState.TIMED_OUT: SubagentStatus.TIMED_OUT,
    TurnState.INTERRUPTED: SubagentStatus.CANCELLED,
    TurnState.FAILED: SubagentStatus.FAILED,
    TurnState.PARTIAL_FAILED: SubagentStatus.FAILED,
    TurnState.HELD: SubagentStatus.FAILED,
    TurnState.UNFINISHED: SubagentStatus.FAILED,
}
"""The subagent's status for each state of its turn."""

NO_ANSWER = "(it completed its turn without a text answer)"
"""The summary of a subagent that completed and wrote nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the supervision knows when a subagent's work is over."""

    turn: TurnState
    """The state of its newest turn, from its own log."""
    has_returned: bool
    """Whether its turn returned, instead of being cancelled from outside."""
    details: str = ""
    """What the turn says about its ending."""
    crashed_with: str = ""
    """The error that its task died of, if it did."""
    is_overdue: bool = False
    cancel_reason: str = ""


def ending_of(seen: Seen) -> tuple[SubagentStatus, str]:
    """Return a subagent's status and the reason for it; the reason may be empty."""
    status, details = STATUS_OF_TURN[seen.turn], seen.details
    if seen.crashed_with:
        return SubagentStatus.FAILED, f"it crashed: {seen.crashed_with}"
    if seen.is_overdue:
        return SubagentStatus.TIMED_OUT, "it did not stop when its time was over"
    if status is SubagentStatus.COMPLETED:
        return status, ""
    if not seen.has_returned:
        return SubagentStatus.CANCELLED, seen.cancel_reason or "its parent's run was cancelled"
    if status is SubagentStatus.CANCELLED:
        return status, seen.cancel_reason or details or "its parent's run was stopped"
    if seen.turn is TurnState.HELD:
        return status, f"held: {details or 'a tool call waits for a person'}"
    if seen.turn is TurnState.UNFINISHED:
        return status, details or "its log has no ending"
    if status is SubagentStatus.TIMED_OUT:
        return status, details or "its time was over"
    return status, details


def next_actions(child: Subagent, status: SubagentStatus, turn: TurnState | None) -> tuple[str, ...]:
    """Return what the parent can do about a subagent that did not complete."""
    if status is SubagentStatus.DETACHED:
        inspect = f"inspect its log: treenail show {child.session_id}"
        restart = "start another subagent for the task"
        if child.workspace_mode == "shared":
            return (inspect, f"resume it as a separate run: treenail resume {child.session_id}", restart)
        return (inspect, restart)
    if turn is TurnState.HELD:
        return (f"answer the waiting call in session {child.session_id}", f"resume {child.id}")
    if status is SubagentStatus.TIMED_OUT:
        return (
            f"send {child.id} a smaller task, or start another subagent with more time",
            f"use what it has done so far: session {child.session_id}",
        )
    if status is SubagentStatus.CANCELLED:
        return (f"resume {child.id}, or send it something else",)
    return (f"inspect the log of session {child.session_id}", f"send {child.id} a corrected task")

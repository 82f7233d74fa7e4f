"""How a subagent ended, decided from evidence: the state of its turn and what the supervision saw."""

from __future__ import annotations

from collections.abc import Mapping

from treenail.subagents.states import SubagentStatus
from treenail.subagents.subagent import Subagent
from treenail.turns import TurnResult, TurnState

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

NO_ANSWER = "its turn ended without an answer"
"""Why a subagent has failed whose turn is completed: it has nothing to tell its parent."""


def ending_of(
    turn: TurnState,
    ended: TurnResult | None,
    *,
    answer: str,
    crashed_with: str = "",
    is_overdue: bool = False,
    cancel_reason: str = "",
) -> tuple[SubagentStatus, str]:
    """Return a subagent's status and the reason for it; the reason may be empty.

    `turn` is the state of its newest turn in its own log, `answer` the text that the turn ended with.
    `ended` is what that turn returned; None if it was cancelled from outside.
    """
    details = "" if ended is None else ended.details
    status = STATUS_OF_TURN[turn]
    if crashed_with:
        return SubagentStatus.FAILED, f"it crashed: {crashed_with}"
    if is_overdue:
        return SubagentStatus.TIMED_OUT, "it did not stop when its time was over"
    if status is SubagentStatus.COMPLETED:
        return (status, "") if answer.strip() else (SubagentStatus.FAILED, NO_ANSWER)
    if ended is None:
        return SubagentStatus.CANCELLED, cancel_reason or "its parent's run was cancelled"
    if status is SubagentStatus.CANCELLED:
        return status, cancel_reason or details or "its parent's run was stopped"
    if turn is TurnState.HELD:
        return status, f"held: {details or 'a tool call waits for a person'}"
    if turn is TurnState.UNFINISHED:
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
    if turn is TurnState.COMPLETED:
        return (f"send {child.id} a message that asks for its answer", f"inspect session {child.session_id}")
    if status is SubagentStatus.TIMED_OUT:
        return (
            f"send {child.id} a smaller task, or start another subagent with more time",
            f"use what it has done so far: session {child.session_id}",
        )
    if status is SubagentStatus.CANCELLED:
        return (f"resume {child.id}, or send it something else",)
    return (f"inspect the log of session {child.session_id}", f"send {child.id} a corrected task")

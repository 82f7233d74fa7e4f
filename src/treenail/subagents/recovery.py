"""After a crash: decide from the logs what becomes of each subagent that the process left behind.

What had ended stays as it ended. If only the child's own log knows the ending, that log is believed. What was
queued is queued again. What was running resumes as a session does: finished tools are not run again, and the
time that it has used counts. What cannot resume here is `detached`, with what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

from treenail.children import open_child_session
from treenail.conversation import InnerMessage
from treenail.errors import LeaseHeldError, TreenailError
from treenail.state import ExecutionState, Session
from treenail.subagents.endings import NO_ANSWER, STATUS_OF_TURN, next_actions
from treenail.subagents.events import SubagentCharter
from treenail.subagents.roster import Roster
from treenail.subagents.states import SubagentStatus
from treenail.subagents.subagent import Subagent
from treenail.tools import recover
from treenail.turns import TurnStarted, TurnState, turn_state

SeenMs = Callable[[str], float | None]
"""Says for how long a chain was seen to run by the processes before this one; None if it was never seen."""


def recover_subagents(
    roster: Roster, state: ExecutionState, agents: Container[str], seen_ms: SeenMs
) -> list[Subagent]:
    """Load the roster from the log, settle what cannot run, and return the subagents that can."""
    roster.load()
    waiting = []
    for child in roster.children:
        is_known = child.agent in agents
        if child.is_inherited:
            child.is_pending = False
            if not child.status.is_terminal:
                roster.detach(child, "it belongs to the session that this one was forked from")
        elif child.status is SubagentStatus.RUNNING:
            if _can_resume(roster, state, child, seen_ms, is_known=is_known):
                waiting.append(child)
        elif child.is_pending and is_known:
            waiting.append(child)
        elif child.status is SubagentStatus.QUEUED:
            roster.detach(child, _unknown(child))
    return waiting


def _unknown(child: Subagent) -> str:
    return f"the agent {child.agent!r} is not known here"


def _can_resume(
    roster: Roster, state: ExecutionState, child: Subagent, seen_ms: SeenMs, *, is_known: bool
) -> bool:
    """Settle a subagent that was running when the process died, or return True if it can resume."""
    try:
        roster.session.log.info(child.session_id)
        session = open_child_session(roster.session, child.session_id)
    except LeaseHeldError as error:
        roster.detach(child, f"somebody else is writing its log: {error}")
        return False
    except TreenailError as error:
        roster.detach(child, f"its log cannot be opened: {type(error).__name__}: {error}")
        return False
    with session:
        known_ms = seen_ms(str(child.session_id))
        elapsed_ms = None if known_ms is None else round(known_ms)
        return _settle_or_resume(roster, state, child, session, elapsed_ms, is_known=is_known)


def _settle_or_resume(
    roster: Roster,
    state: ExecutionState,
    child: Subagent,
    session: Session,
    elapsed_ms: int | None,
    *,
    is_known: bool,
) -> bool:
    if child.workspace_mode == "shared":
        # Roll an interrupted call back in any case: it must not hold the workspace that others share.
        recover(ExecutionState(session, state.resources, state.clock))
    seen = turn_state(session)
    begun = len(session[TurnStarted].all())
    if begun and seen is not TurnState.UNFINISHED and begun >= len(child.inputs):
        _settle_from_log(roster, child, session, seen, elapsed_ms)
        return False
    if child.cancel_reason:
        reason, child.cancel_reason = child.cancel_reason, ""
        child.is_pending = False
        roster.move(child, SubagentStatus.CANCELLED, reason=reason, elapsed_ms=elapsed_ms)
        return False
    if not is_known:
        roster.detach(child, _unknown(child))
        return False
    charter = session[SubagentCharter].latest()
    if child.workspace_mode == "isolated" and (charter is None or charter.fork_place is None):
        roster.detach(child, "its isolated workspace was in the memory of the process that died")
        return False
    if charter is not None and charter.fork_place is not None and not Path(charter.fork_place).exists():
        roster.detach(child, f"its isolated workspace, {charter.fork_place}, is not on this machine")
        return False
    roster.remark(child, "reattached", reason="the process that ran it is gone")
    return True


def _settle_from_log(
    roster: Roster, child: Subagent, session: Session, seen: TurnState, elapsed_ms: int | None
) -> None:
    """Record the ending that the child's own log has and the parent's log lacks.

    It ran for at least `elapsed_ms`; the process that knew it better is gone.
    """
    child.turn_state = seen
    child.is_pending = False
    status, answer = STATUS_OF_TURN[seen], last_answer(session)
    if status is SubagentStatus.COMPLETED and answer.strip():
        roster.move(child, status, summary=answer, elapsed_ms=elapsed_ms)
        return
    is_empty = status is SubagentStatus.COMPLETED
    status = SubagentStatus.FAILED if is_empty else status
    roster.move(
        child,
        status,
        reason=(NO_ANSWER if is_empty else f"its log says that its turn was {seen.value}") + _ran(elapsed_ms),
        next_actions=next_actions(child, status, seen),
        elapsed_ms=elapsed_ms,
    )


def _ran(elapsed_ms: int | None) -> str:
    return (
        "; how long it ran is not known" if elapsed_ms is None else f"; it ran for at least {elapsed_ms} ms"
    )


def last_answer(session: Session) -> str:
    """Return the last message of a session if it is the assistant's, else an empty text."""
    last = session[InnerMessage].latest()
    return last.content if last is not None and last.role == "assistant" else ""

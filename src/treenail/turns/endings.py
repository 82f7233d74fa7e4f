"""Writing endings: each one is checked against the table and the log before it is appended."""

from __future__ import annotations

from treenail.errors import IllegalEndingError
from treenail.state import Session, stamped
from treenail.tools import ToolInvoked, ToolStarted
from treenail.turns.derivation import newest_fold
from treenail.turns.states import (
    EVIDENCE,
    Ending,
    PartialText,
    TurnEnded,
    TurnFold,
    TurnState,
    check_ending,
    ending_for,
)


def end_turn(session: Session, turn_id: str, ending: Ending) -> TurnEnded:
    """Append a turn's ending, with the text that was cut off.

    Raises `IllegalEndingError`, and changes nothing, if the table does not allow it or its evidence is not in
    the log. Completing a completed turn again changes nothing.
    """
    fold = newest_fold(session)
    if fold is None or fold.turn_id != turn_id:
        raise IllegalEndingError(
            f"turn {turn_id} is not the newest turn of session {session.session_id}; only that one can end"
        )
    present = fold.derive()
    if present.state is TurnState.COMPLETED and ending.state is TurnState.COMPLETED and present.ended:
        return present.ended
    ended = ending.for_turn(turn_id)
    check_ending(present, ended)
    partial = [PartialText(turn_id, ending.partial_text)] if ending.partial_text else []
    # Derive what the log would show afterwards, before anything is written.
    for seq, each in enumerate((*partial, ended), start=session.head + 1):
        fold.take(seq, turn_id, each)
    missing = fold.derive().missing
    if missing:
        needed = "; ".join(EVIDENCE[name].meaning for name in missing)
        raise IllegalEndingError(
            f"turn {turn_id} cannot end as {ended.state.value}, because its log does not show: {needed}"
        )
    with stamped(turn_id=turn_id):
        session.dispatch_all((*partial, ended))
    return ended


def close_crashed_turn(session: Session) -> TurnEnded | None:
    """Close the newest turn as interrupted by a crash, if its log simply stops.

    Call it after opening a session for writing, before anything else runs there: the session's lease shows
    that nobody else is at work on the turn. Calls that the crash left open stay open; a resume runs them, or
    the next turn closes them. Returns None, and changes nothing, if the turn has an ending, if there is no
    turn, or if the session was forked in the middle of it. A session opened for reading raises
    `ReadOnlyError`.
    """
    fold = newest_fold(session)
    if fold is None or fold.ended is not None or _is_forked(session, fold):
        return None
    details = "the process died before the turn ended, or could not record its ending"
    cut_off = _cut_off(session)
    if cut_off:
        details += f"; a resume rolls back these calls, which were cut off: {', '.join(cut_off)}"
    elif fold.open_calls:
        details += f"; not run yet: {', '.join(call_id for _, call_id in fold.open_calls)}"
    return end_turn(
        session, fold.turn_id, ending_for("crash", details=details, session_id=session.session_id)
    )


def _cut_off(session: Session) -> list[str]:
    """Return the ids of the calls that have a start and no end in the log."""
    ended = {each.attempt_id for each in session[ToolInvoked].all()}
    return [each.call_id for each in session[ToolStarted].all() if each.attempt_id not in ended]


def _is_forked(session: Session, fold: TurnFold) -> bool:
    """Return whether the turn has no ending because the session was copied in the middle of it."""
    copied = session.tags.get("forked_at", "")
    places = [each[0] for each in (fold.started, fold.last) if each is not None]
    return copied.isdecimal() and max(places, default=0) <= int(copied)

"""Runs that workers do: what was asked of them, and what is left to do, as the log tells it.

A person or a program asks for work on a run with `RunSubmitted`. Any worker that holds the run's lease can
then say from the log alone what is next (`work_left`): begin a turn on the task, resume the newest turn, wait
for a person, or nothing. The table of endings decides how a turn stands. Two causes of an interruption do not
end the work: the worker was told to end, or it died.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from treenail.errors import UsageError
from treenail.log import SlicePolicy
from treenail.state import Session, Slice, entry_at, event
from treenail.tools import pending_holds
from treenail.turns.derivation import newest_turn
from treenail.turns.endings import close_crashed_turn
from treenail.turns.states import TurnResumed, TurnStarted, TurnState

_HANDED_ON = ("terminated", "crash")
"""Why a turn was interrupted that another worker continues."""


@event(name="treenail.RunSubmitted", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class RunSubmitted:
    """Workers are asked to work on this run. Its ceilings are in a `CeilingsSet` beside this."""

    agent: str
    """The name that workers know the agent by."""
    task: str
    """What to do; empty to resume the newest turn."""
    by: str = ""


@event(name="treenail.RunCancelled", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class RunCancelled:
    """Somebody wants no more work on this run, until it is submitted again."""

    by: str = ""


@event(name="treenail.RunRefused", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class RunRefused:
    """A worker could not begin a turn, and another attempt would fail in the same way."""

    reason: str


class Left(Enum):
    """What is left to do on a run."""

    BEGIN = "begin"
    """Begin a turn on the newest task."""
    RESUME = "resume"
    """Resume the newest turn."""
    WAIT = "wait"
    """A person has to answer first."""
    NOTHING = "nothing"


def submission_of(session: Session) -> RunSubmitted | None:
    """Return what workers were last asked for; None if they never were."""
    return session[RunSubmitted].latest()


def work_left(session: Session) -> Left:
    """Derive from the log what workers have to do on a run."""
    asked = _newest(session, RunSubmitted)
    if asked == 0 or asked < max(_newest(session, RunCancelled), _newest(session, RunRefused)):
        return Left.NOTHING
    submitted, turn = submission_of(session), newest_turn(session)
    assert submitted is not None
    if asked > max(_newest(session, TurnStarted), _newest(session, TurnResumed)):
        return Left.BEGIN if submitted.task else Left.NOTHING if turn is None else Left.RESUME
    if turn is None or turn.state is TurnState.UNFINISHED:
        return Left.RESUME
    if turn.state is TurnState.HELD:
        return Left.WAIT if pending_holds(session) else Left.RESUME
    is_handed_on = turn.ended is not None and turn.ended.error_kind in _HANDED_ON
    return Left.RESUME if turn.state is TurnState.INTERRUPTED and is_handed_on else Left.NOTHING


def is_waiting(session: Session) -> bool:
    """Say whether workers were asked for something that none of them has begun."""
    asked = _newest(session, RunSubmitted)
    begun = max(_newest(session, TurnStarted), _newest(session, TurnResumed))
    return asked > begun and work_left(session) is not Left.NOTHING


def stopped_before_turn(session: Session) -> RunCancelled | RunRefused | None:
    """Return what stopped a run between its newest submission and a turn on it; None if nothing did."""
    asked = _newest(session, RunSubmitted)
    if asked == 0 or asked < max(_newest(session, TurnStarted), _newest(session, TurnResumed)):
        return None
    refused, cancelled = _newest(session, RunRefused), _newest(session, RunCancelled)
    if max(refused, cancelled) < asked:
        return None
    return session[RunRefused].latest() if refused > cancelled else session[RunCancelled].latest()


def cancel_submitted(session: Session, by: str) -> None:
    """Record that a run is cancelled. A turn whose process died is closed first.

    Raises `UsageError` if there is nothing to cancel.
    """
    if work_left(session) is Left.NOTHING:
        raise UsageError(
            f"run {session.session_id} is not waiting and not at work; there is nothing to cancel"
        )
    close_crashed_turn(session)
    session.dispatch(RunCancelled(by))


def _newest(session: Session, kind: type) -> int:
    """Return the place of the newest event of a kind; 0 if there is none."""
    known: Slice[Any] = session[kind].view()
    return abs(entry_at(known, -1)[1]) if len(known) else 0

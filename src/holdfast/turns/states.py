"""How a turn may end: the one table, and how an ending is derived from the log.

A turn begins with `TurnStarted` and ends with `TurnEnded`. Each ending needs evidence
in the log; without it the turn has not ended that way, whatever was shown on a screen.

    state           evidence that must stand in the log
    completed       a clean assistant message after the turn's start, every tool call answered
    partial_failed  partial text, and the failure that cut it off
    failed          a failure with its kind
    interrupted     a person or a signal stopped it; open calls were rolled back
    timed_out       a time limit, with how much it was
    held            a call waits for a person

A turn whose log simply stops (the process died) has no ending: it is `unfinished`
until somebody opens the session and resumes it or closes it as interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.conversation.messages import InnerMessage
from holdfast.log.event import SlicePolicy
from holdfast.state.events import event
from holdfast.state.session import Session


class TurnState(Enum):
    """How a turn ended, or that it has not."""

    COMPLETED = "completed"
    PARTIAL_FAILED = "partial_failed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed_out"
    HELD = "held"
    UNFINISHED = "unfinished"

    @property
    def is_terminal(self) -> bool:
        """Whether the turn is over. A held turn waits, an unfinished one can be resumed."""
        return self not in (TurnState.HELD, TurnState.UNFINISHED)


@event(name="holdfast.TurnStarted", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A request was taken up."""

    turn_id: str
    evaluation_id: str
    agent: str
    task: str
    provider: str
    model: str
    workspace: str | None = None
    """The directory that the turn works in, so that a resume finds it."""


@event(name="holdfast.TurnEnded", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn's ending, with its cause and what to do next."""

    turn_id: str
    state: TurnState
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()


@event(name="holdfast.PartialText", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class PartialText:
    """What a model had said when its answer was cut off: evidence, never shown to it again."""

    turn_id: str
    text: str


def turn_state(session: Session) -> TurnState:
    """Derive how the session's newest turn ended, from its log."""
    started = session[TurnStarted].latest()
    if started is None:
        return TurnState.UNFINISHED
    ended = session[TurnEnded].latest()
    if ended is None or ended.turn_id != started.turn_id:
        return TurnState.UNFINISHED
    if ended.state is TurnState.COMPLETED and not _has_clean_answer(session, started):
        # The record claims what the conversation does not show: believe the conversation.
        return TurnState.UNFINISHED
    return ended.state


def _has_clean_answer(session: Session, started: TurnStarted) -> bool:
    last = session[InnerMessage].latest()
    return (
        last is not None
        and last.role == "assistant"
        and last.evaluation_id == started.evaluation_id
        and not last.tool_calls
    )

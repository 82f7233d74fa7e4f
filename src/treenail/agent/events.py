"""The events of a run, in order, and from wherever a reader stopped.

Theory of operation
-------------------
A reader gets two sorts of events. Those of the log are the truth: each has a number of its own, every reader
of a run gets the same ones in the same order, and whoever was away asks for those behind the last number that
it saw. Live events, such as pieces of text, are for display: only readers in the process that runs the turn
get them, and nothing repeats them. What they tell ends up in the log: the pieces of an answer as one message.

A live event carries the log's head from the moment when it was published. A reader is first given the log
up to there. A piece of text whose message it has been given already is dropped, so nobody sees a text twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic_core import to_jsonable_python

from treenail.agent.stored import RunStore
from treenail.conversation import InnerMessage
from treenail.log import Envelope, Log, PostgresUrl, Watcher, open_log, watcher_of
from treenail.providers import ReasoningDelta, TextDelta
from treenail.state import Session
from treenail.tools import run_beside
from treenail.turns import (
    LiveEvent,
    StatusChanged,
    ToolCallBegan,
    ToolCallOutput,
    ToolProgressed,
    TurnEnded,
    TurnResumed,
    TurnStarted,
)

_SHOWN = (TextDelta, ReasoningDelta, StatusChanged, ToolCallBegan, ToolCallOutput, ToolProgressed)
"""The live events that a reader is given; of the others, the log has what they tell."""

_LAST = ("done", "error", "interrupted", "held")
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened in a run: `match event.value: case TextDelta(text): ...`."""

    seq: int
    """The log's newest event at this point: a reader that continues `after` it misses nothing."""
    value: object
    """An event of the log, such as `ToolInvoked` or `TurnEnded`, or a live one. It is an `Envelope`
    if its type is not known in this process."""
    is_live: bool = False
    """Whether it is for display only: other readers may not get it."""

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        is_unknown = isinstance(self.value, Envelope)
        data = None if is_unknown else to_jsonable_python(self.value, fallback=str, bytes_mode="base64")
        return {"seq": self.seq, "type": self.type, "is_live": self.is_live, "data": data}

    @property
    def type(self) -> str:
        """The name of the value's type, such as `TurnEnded`."""
        if isinstance(self.value, Envelope):
            return self.value.type.rpartition(".")[2]
        return type(self.value).__name__


class Reading:
    """How far one reader of a run has come."""

    def __init__(self, session: Session, after: int) -> None:
        self._session = session
        self._answered = 0
        """The newest answer of the model that the reader was given."""
        self.seq = after
        self.is_over = False
        """Whether the newest turn that was read has ended."""

    def logged(self, upto: int | None = None) -> Iterator[RunEvent]:
        """Yield what the log has beyond what was read."""
        for envelope, value in self._session.events(after=self.seq, upto=upto):
            self.seq = envelope.seq
            if isinstance(value, InnerMessage) and value.role == "assistant":
                self._answered = envelope.seq
            elif isinstance(value, TurnStarted | TurnResumed | TurnEnded):
                self.is_over = isinstance(value, TurnEnded)
            yield RunEvent(envelope.seq, envelope if value is None else value)

    def live(self, head: int, event: LiveEvent) -> Iterator[RunEvent]:
        """Yield the log up to a live event, and the event itself unless the log has told more by now."""
        is_piece = isinstance(event, TextDelta | ReasoningDelta)
        if head > self.seq:
            yield from self.logged(upto=head)
        is_last = isinstance(event, StatusChanged) and event.status in _LAST  # The log's ending says it.
        if isinstance(event, _SHOWN) and not is_last and not (is_piece and head < self._answered):
            yield RunEvent(self.seq, event, is_live=True)


class Following:
    """The events of a stored run that any process may be writing. Iterate with `for` or `async for`."""

    def __init__(self, store: RunStore, run_id: UUID, after: int, *, wait: bool) -> None:
        self._store, self._run_id, self._after, self._wait = store, run_id, after, wait

    def _opened(self) -> tuple[Log, Session]:
        log = open_log(self._store, must_exist=True)
        return log, Session.open(log, self._run_id, read_only=True)

    def _close(self, log: Log, session: Session) -> None:
        session.close()
        if isinstance(self._store, (str, PostgresUrl)) or hasattr(self._store, "__fspath__"):
            log.close()

    def _reading(self, session: Session) -> Reading:
        reading = Reading(session, 0)
        if self._after:
            for _ in reading.logged():  # How the newest turn stands may have been said before.
                if reading.seq >= self._after:
                    break
            reading.seq = self._after
        return reading

    def __iter__(self) -> Iterator[RunEvent]:
        log, session = self._opened()
        try:
            reading = self._reading(session)
            with closing(watcher_of(log, self._run_id)) as watcher:
                while True:
                    yield from reading.logged()
                    if reading.is_over or not self._wait:
                        return
                    _waited(watcher, reading.seq)
        finally:
            self._close(log, session)

    async def __aiter__(self) -> AsyncIterator[RunEvent]:
        log, session = await run_beside(self._opened)
        try:
            reading = await run_beside(self._reading, session)
            with closing(watcher_of(log, self._run_id)) as watcher:
                while True:
                    for each in await run_beside(lambda: list(reading.logged())):
                        yield each
                    if reading.is_over or not self._wait:
                        return
                    await run_beside(_waited, watcher, reading.seq)
        finally:
            self._close(log, session)


def _waited(watcher: Watcher, seq: int) -> None:
    watcher.wait(seq, _LOOK_EVERY_S)


def follow(store: RunStore, run_id: UUID | str, *, after: int = 0, wait: bool = True) -> Following:
    """Return the events of a stored run behind number `after`, whichever process writes it.

    Iterate with `for` or `async for`. It ends with the turn; without `wait`, with what the log has now. A run
    whose process has died is waited for until one resumes it.
    """
    return Following(store, run_id if isinstance(run_id, UUID) else UUID(run_id), after, wait=wait)

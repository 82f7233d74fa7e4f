"""Types, reducers and stores that the tests of sessions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pydantic
from tests.stores import open_store, store_in

from treenail.log import Draft, Lease, MemoryLog, SlicePolicy
from treenail.state import Append, Replace, Session, event, reducer


@dataclass(frozen=True)
class Note:
    """Working state with nothing declared: its slice is a ledger."""

    text: str


@event(name="kit.Said", policy=SlicePolicy.LOG)
@dataclass(frozen=True)
class Said:
    """History."""

    text: str


@event(name="kit.Peeked", policy=SlicePolicy.CACHE)
@dataclass(frozen=True)
class Peeked:
    """Something that can be computed again."""

    number: int


@dataclass
class Box:
    """A value that can change in place."""

    things: list[int] = field(default_factory=list)


class Page(pydantic.BaseModel):
    """A model that can change in place."""

    title: str
    lines: list[str] = []


@dataclass(frozen=True)
class Add:
    """An event that several reducers listen to."""

    number: int


@dataclass(frozen=True)
class Total:
    """Made by a reducer, working state."""

    value: int


@dataclass(frozen=True)
class Seen:
    """Made by a reducer, history."""

    number: int


@dataclass(frozen=True)
class Last:
    """Made by a reducer, a cache."""

    number: int


@dataclass(frozen=True)
class Tally:
    """A declarative slice."""

    count: int = 0
    boxes: int = 0

    @reducer(on=Add)
    def on_add(self, event: Add) -> Tally:
        return replace(self, count=self.count + 1)

    @reducer(on=Box)
    def on_box(self, event: Box, *, context: Any) -> Replace[Tally]:
        return Replace((replace(self, boxes=self.boxes + len(event.things)),))


def sum_up(slice_: Sequence[Total], event: Add, *, context: Any) -> Replace[Total]:
    latest = slice_[-1].value if slice_ else 0
    return Replace((Total(latest + event.number),))


def note_seen(slice_: Sequence[Seen], event: Add) -> Append[Seen]:
    return Append(Seen(event.number))


def keep_last(slice_: Sequence[Last], event: Add, *, context: Any) -> tuple[Last, ...]:
    return (Last(event.number),)


def keep_box(slice_: Sequence[Box], event: Box, *, context: Any) -> Append[Box]:
    return Append(event)


def equip(session: Session) -> Session:
    """Register the kit's reducers, as a program does right after it opened a session."""
    session[Total].register(Add, sum_up)
    session[Seen].register(Add, note_seen, policy=SlicePolicy.LOG)
    session[Last].register(Add, keep_last, policy=SlicePolicy.CACHE)
    session[Box].register(Box, keep_box)
    session.install(Tally, initial=Tally)
    for each in SLICES:
        session[each]
    return session


SLICES: tuple[type, ...] = (Note, Said, Peeked, Box, Total, Seen, Last, Tally)


class CountingLog(MemoryLog):
    """A log in memory that counts appends, and can be told to refuse them."""

    def __init__(self) -> None:
        super().__init__(heartbeat=False)
        self.batches: list[int] = []
        self.refusal: BaseException | None = None
        self.fails_after_writing = False

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
        if self.refusal is not None and not self.fails_after_writing:
            raise self.refusal
        super().append(lease, drafts, expected_seq=expected_seq)
        self.batches.append(len(drafts))
        if self.refusal is not None:
            raise self.refusal


@contextmanager
def opened_log(kind: str, folder: Path) -> Iterator[Any]:
    """Open one of the stores that sessions are tested on."""
    if kind == "memory":
        with MemoryLog(heartbeat=False) as memory:
            yield memory
    else:
        with open_store(store_in(kind, folder), synchronous="NORMAL", heartbeat=False) as durable:
            yield durable

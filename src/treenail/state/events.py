"""What an event type says about itself, and the events by which slices are set directly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from treenail.codec import register_type, sparse
from treenail.log import Channel, SlicePolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EventSpec:
    """What a type says about itself, once, where it is declared."""

    channel: Channel = Channel.AUDIT
    """Who may see such an event again."""
    policy: SlicePolicy = SlicePolicy.STATE
    """What a rollback does with the slice of this type."""
    captured: bool = False
    """Whether the slice is part of every snapshot, whatever policies were asked for."""
    name: str | None = None
    """The stable name that it was declared with."""
    outlives_prune: bool = False
    """Whether a prune keeps what the slice holds: history that must never be forgotten, such as spend."""
    read: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    """Completes the items when the slice is read, by what follows from the others; nothing is stored."""


_DEFAULT = EventSpec()
_SPECS: dict[type, EventSpec] = {}


def event(
    *,
    name: str | None = None,
    channel: Channel = Channel.AUDIT,
    policy: SlicePolicy = SlicePolicy.STATE,
    captured: bool = False,
    outlives_prune: bool = False,
    aliases: Iterable[str] = (),
    read: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Declare an event type: its stable name, its channel, and its slice's policy.

    A plain dataclass may be dispatched without it: its name is then `module:qualname`, it is kept
    for audit, and its slice is working state.
    """

    def declare(cls: type[T]) -> type[T]:
        register_type(cls, name=name, aliases=aliases)
        _SPECS[cls] = EventSpec(channel, policy, captured, name, outlives_prune, read)
        return cls

    return declare


def spec_of(cls: type) -> EventSpec:
    """Return what a type said about itself, or the defaults."""
    return _SPECS.get(cls, _DEFAULT)


def as_read(cls: type, items: tuple[T, ...]) -> tuple[T, ...]:
    """Return the items of a slice as readers see them."""
    read = _SPECS.get(cls, _DEFAULT).read
    return items if read is None else read(items)


# --- system events: they bypass reducers -----------------------------------------------------------


@event(name="treenail.InitializeSlice", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class InitializeSlice:
    """A slice was set to these items (`session[T].seed(...)`)."""

    slice_type: str
    items: tuple[object, ...]


@event(name="treenail.ClearSlice", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ClearSlice:
    """Items were taken out of a slice: those at `removed`, or all of them.

    A predicate is code and cannot be stored; the positions it chose can.
    """

    slice_type: str
    removed: tuple[int, ...] | None = None


@sparse
@dataclass(frozen=True, slots=True)
class RestoredItem:
    """One item of a restored slice, or a run of events `origin..upto` that are its items."""

    origin: int
    upto: int = 0
    item: object = None

    def events(self) -> range:
        """Return the events that are referred to; none if the item itself is stored."""
        return range(self.origin, (self.upto or self.origin) + 1) if self.origin > 0 else range(0)


@dataclass(frozen=True, slots=True)
class RestoredSlice:
    """What a restore made of one slice: its first `keep` items, and then these."""

    slice_type: str
    keep: int
    items: tuple[RestoredItem, ...] = ()


@event(name="treenail.StateRestored", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class StateRestored:
    """Slices went back to a snapshot. It says what they became, so that folding needs no other source."""

    slices: tuple[RestoredSlice, ...]
    reason: str = "rollback"


@event(name="treenail.AttentionNeeded", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class AttentionNeeded:
    """Something could not be repaired automatically and needs a person."""

    reason: str
    details: tuple[str, ...] = ()
    next_actions: tuple[str, ...] = ()


@event(name="treenail.AttentionResolved", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class AttentionResolved:
    """A person has fixed what needed attention before."""

    note: str
    """What was done about it."""
    by: str = ""
    """Who fixed it."""


SYSTEM_EVENTS = (InitializeSlice, ClearSlice, StateRestored)

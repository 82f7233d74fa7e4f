"""The folded state as bytes beside the log, so that opening need not fold every event.

It is an optimisation and never the truth. It is written in the words of a restore: an item that is an event
is stored as that event's number, so that each message is stored once; only items that a reducer made are
stored as values. A stored state fits a session only if the same reducers are registered in the same order,
because slices are folds of the log by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treenail.codec import Codec
from treenail.errors import DecodeError, SnapshotRestoreError, UsageError
from treenail.log import Envelope
from treenail.state.events import RestoredItem, RestoredSlice
from treenail.state.slices import EMPTY, Entry, Kept, Slice, entries_of, opened, sealed

STORED_VERSION = 2

Read = Callable[[int, int], Iterable[Envelope]]
"""Reads the events of a session: those after the first number, up to the second."""


@dataclass(frozen=True, slots=True)
class Folding:
    """Which reducers a state was made by."""

    reducers: tuple[tuple[str, str, str], ...]
    """Event, slice and reducer by name; in order of registration for each event."""
    policies: tuple[tuple[str, str], ...] = ()
    """The policies that were registered, slice by slice."""

    def lacks(self, other: Folding) -> list[str]:
        """Name the reducers of `other` for which nothing is registered here, as `event -> slice`."""
        mine = {(event, target) for event, target, _ in self.reducers}
        return sorted(
            f"{event} -> {target}" for event, target, _ in other.reducers if (event, target) not in mine
        )


@dataclass(frozen=True, slots=True)
class StoredState:
    """The slices of a session at one place of its log."""

    version: int
    folding: Folding
    pruned_upto: int
    """Events up to here were to be forgotten when it was stored."""
    slices: tuple[RestoredSlice, ...]


def export_state(
    codec: Codec, slices: Mapping[type, Slice[Any]], folding: Folding, *, pruned_upto: int = 0
) -> bytes:
    """Write down the slices. Items from events up to `pruned_upto`, which are gone, as values."""
    stored = tuple(
        RestoredSlice(codec.registry.name_of(slice_type), 0, described(kept, pruned_upto))
        for slice_type, kept in slices.items()
        if len(kept)
    )
    return codec.encode(StoredState(STORED_VERSION, folding, pruned_upto, stored))


def import_state(codec: Codec, payload: bytes) -> StoredState:
    """Read what `export_state` wrote. Raises `CodecError`."""
    state = codec.decode(StoredState, payload)
    if state.version != STORED_VERSION:
        raise DecodeError(f"the stored state has version {state.version}, not {STORED_VERSION}")
    return state


def import_slices(
    codec: Codec, state: StoredState, read: Read, unknown: dict[str, int]
) -> dict[type, Slice[Any]]:
    """Return the slices of a stored state. Raises `CodecError`.

    Slices of types that are not registered are counted in `unknown` and left out.
    """
    known = []
    for each in state.slices:
        if codec.registry.knows(each.slice_type):
            known.append(each)
        else:
            unknown[each.slice_type] = unknown.get(each.slice_type, 0) + len(each.items)
    events = read_values(codec, read, {seq for each in known for item in each.items for seq in item.events()})
    try:
        return {
            (slice_type := codec.registry.resolve(each.slice_type)): rebuilt(
                codec, slice_type, EMPTY, each, events
            )
            for each in known
        }
    except (SnapshotRestoreError, UsageError) as error:
        raise DecodeError(f"the stored state does not fit its log: {error}") from error


# --- slices by reference ---------------------------------------------------------------------------


def described(target: Slice[Any], pruned_upto: int | None, *, keep: int = 0) -> tuple[RestoredItem, ...]:
    """Write down the items of a slice after the first `keep`.

    An item that is an event is named by its number, unless that event is pruned; without
    `pruned_upto` no event can be referred to, and every item is written as a value.
    """
    items: list[RestoredItem] = []
    first = last = 0
    for kept, origin in islice(entries_of(target), keep, None):
        if pruned_upto is None or origin <= pruned_upto:
            items.append(RestoredItem(0 if pruned_upto is None else -abs(origin), item=opened(kept)))
            first = 0
        elif first and origin == last + 1:
            items[-1] = RestoredItem(first, origin)
            last = origin
        else:
            items.append(RestoredItem(origin))
            first = last = origin
    return tuple(items)


def rebuilt(
    codec: Codec,
    slice_type: type,
    before: Slice[Any],
    made: RestoredSlice,
    events: Mapping[int, Any],
    *,
    seq: int = 0,
) -> Slice[Any]:
    """Build a slice again: the first items of `before`, and then what was written down.

    `events` holds the events that it refers to, as a slice keeps them; `seq` is the event that
    brings the slice back. Raises `UsageError` for an item of another type, `SnapshotRestoreError`
    for an event that is not there.
    """
    entries: list[Entry] = list(islice(entries_of(before), made.keep))
    for each in made.items:
        if each.origin <= 0:
            entries.append((seal(codec, slice_type, each.item), each.origin or -seq))
        for origin in each.events():
            kept = events.get(origin)
            if kept is None:
                raise SnapshotRestoreError(f"event {origin}, which it refers to, is no longer in the log")
            check_fits(slice_type, kept.cls if type(kept) is Kept else type(kept))
            entries.append((kept, origin))
    return Slice.of(entries)


def seal(codec: Codec, slice_type: type, item: Any) -> Any:
    """Return what a slice keeps of an item. Raises `UsageError` if it is of another type."""
    check_fits(slice_type, type(item))
    return sealed(codec, item, codec.encode(item))


def check_fits(slice_type: type, kind: type) -> None:
    """Raise `UsageError` unless items of that type may stand in a slice."""
    if not issubclass(kind, slice_type):
        raise UsageError(f"a {kind.__qualname__} cannot stand in the slice of {slice_type.__qualname__}")


def read_values(codec: Codec, read: Read, wanted: set[int]) -> dict[int, Any]:
    """Read events again, each as a slice keeps it; what is not there is left out. Raises `CodecError`."""
    if not wanted:
        return {}
    found: dict[int, Any] = {}
    for envelope in read(min(wanted) - 1, max(wanted)):
        if envelope.seq in wanted:
            value: Any = codec.decode(codec.registry.resolve(envelope.type), envelope.payload)
            found[envelope.seq] = sealed(codec, value, envelope.payload)
    return found

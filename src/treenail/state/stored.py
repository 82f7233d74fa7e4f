"""The folded state as bytes beside the log, so that opening need not fold every event.

It is an optimisation and never the truth. An item that is an event is stored as
that event's number, so that each message is stored once; only items that a reducer
made are stored as values. A stored state fits a session only if the same reducers
are registered in the same order, because slices are folds of the log by these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treenail.codec import Codec, parse_json
from treenail.errors import DecodeError
from treenail.log.event import Envelope
from treenail.state.slices import Entry, Kept, Slice, entries_of, sealed

_VERSION = 1


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


class StoredState:
    """A stored state whose outer form was read. Reading its slices comes later, if it fits."""

    def __init__(self, payload: bytes) -> None:
        data = parse_json(payload)
        if type(data) is not dict or data.get("v") != _VERSION:
            raise DecodeError("the stored state has another version")
        try:
            self.folding = Folding(
                tuple((str(event), str(target), str(by)) for event, target, by in data["reducers"]),
                tuple((str(target), str(policy)) for target, policy in data["policies"]),
            )
            self.pruned_upto = int(data["pruned"])
            """Events up to here were to be forgotten when it was stored."""
            self._slices: list[Any] = data["slices"]
        except (KeyError, TypeError, ValueError) as error:
            raise DecodeError(f"the stored state has another shape: {error!r}") from error

    def slices(
        self, codec: Codec, read: Callable[[int, int], Iterable[Envelope]], unknown: dict[str, int]
    ) -> dict[type, Slice[Any]]:
        """Read the slices back; `read(after, upto)` reads the events that they refer to.

        Slices of types that are not registered are counted in `unknown` and left out. Raises
        `CodecError`.
        """
        try:
            return _import_slices(codec, self._slices, read, unknown)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"the stored state has another shape: {error!r}") from error


def export_state(
    codec: Codec, slices: Mapping[type, Slice[Any]], folding: Folding, *, pruned_upto: int = 0
) -> bytes:
    """Write down the slices. Items from events up to `pruned_upto`, which are gone, as values."""
    name_of = codec.registry.name_of
    out = []
    for slice_type, kept in slices.items():
        if not len(kept):
            continue
        out.append({"t": name_of(slice_type), "e": _exported(codec, kept, pruned_upto)})
    data = {
        "v": _VERSION,
        "reducers": folding.reducers,
        "policies": folding.policies,
        "pruned": pruned_upto,
        "slices": out,
    }
    return json.dumps(data, separators=(",", ":")).encode()


def _exported(codec: Codec, kept: Slice[Any], pruned_upto: int) -> list[Any]:
    """Write items that are events as their numbers, those that follow each other as `[first, last]`."""
    entries: list[Any] = []
    first = last = -1
    for item, origin in entries_of(kept):
        if origin == last + 1 and first > 0:
            last = origin
            continue
        _add_references(entries, first, last)
        first = last = origin if origin > pruned_upto else -1
        if first < 0:
            is_kept = type(item) is Kept
            name = codec.registry.name_of(item.cls if is_kept else type(item))
            fields = parse_json(item.payload) if is_kept else codec.record_to_data(item)
            entries.append({"o": -abs(origin), "t": name, "v": fields})
    _add_references(entries, first, last)
    return entries


def _add_references(entries: list[Any], first: int, last: int) -> None:
    if first > 0:
        entries.append(first if first == last else [first, last])


def _import_slices(
    codec: Codec, data: list[Any], read: Callable[[int, int], Iterable[Envelope]], unknown: dict[str, int]
) -> dict[type, Slice[Any]]:
    known = []
    wanted: set[int] = set()
    for each in data:
        if codec.registry.knows(each["t"]):
            known.append(each)
            wanted.update(_references(each["e"]))
        else:
            unknown[each["t"]] = unknown.get(each["t"], 0) + len(each["e"])
    events = read_values(codec, read, wanted)
    slices: dict[type, Slice[Any]] = {}
    for each in known:
        entries: list[Entry] = []
        for entry in each["e"]:
            if isinstance(entry, dict):
                value: Any = codec.record_from_data(codec.registry.resolve(entry["t"]), entry["v"])
                origin = entry["o"]
                if type(origin) is not int or origin > 0:
                    raise DecodeError(f"the stored state has an item from nowhere: {origin!r}")
                entries.append((sealed(codec, value, codec.encode(value)), origin))
                continue
            for seq in _references((entry,)):
                if seq not in events:
                    raise DecodeError(f"the stored state refers to event {seq}, which is not there")
                entries.append((events[seq], seq))
        slice_type = codec.registry.resolve(each["t"])
        for kept, _ in entries:
            if not issubclass(kept.cls if type(kept) is Kept else type(kept), slice_type):
                raise DecodeError(f"the stored state has a stranger in the slice {each['t']!r}")
        slices[slice_type] = Slice.of(entries)
    return slices


def read_values(
    codec: Codec, read: Callable[[int, int], Iterable[Envelope]], wanted: set[int]
) -> dict[int, Any]:
    """Read events again, each as a slice keeps it; what is not there is left out. Raises `CodecError`."""
    found: dict[int, Any] = {}
    if wanted:
        for envelope in read(min(wanted) - 1, max(wanted)):
            if envelope.seq in wanted:
                value: Any = codec.decode(codec.registry.resolve(envelope.type), envelope.payload)
                found[envelope.seq] = sealed(codec, value, envelope.payload)
    return found


def _references(entries: Iterable[Any]) -> Iterator[int]:
    for entry in entries:
        if isinstance(entry, int):
            yield entry
        elif isinstance(entry, list):
            first, last = entry
            yield from range(first, last + 1)

"""The folded state as bytes beside the log, so that opening need not fold every event.

It is an optimisation and never the truth. An item that is an event is stored as
that event's number, so that each message is stored once; only items that a reducer
made are stored as values. A stored state fits a session only if the same reducers
are registered, because slices are folds of the log by these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.codec import Codec, parse_json
from holdfast.errors import DecodeError
from holdfast.log.event import Envelope
from holdfast.state.slices import Entry, Slice

_VERSION = 1

Pairs = list[list[str]]
"""Which slices listen to which events: `[slice, event]`, sorted."""


def export_state(
    codec: Codec, slices: Mapping[type, Slice[Any]], pairs: Pairs, *, inline_upto: int = 0
) -> bytes:
    """Write down the slices. Items from events up to `inline_upto`, which will be gone, as values."""
    name_of = codec.registry.name_of
    out = []
    for slice_type, kept in slices.items():
        if not len(kept):
            continue
        entries: list[Any] = []
        for item, origin in kept.entries():
            if origin > inline_upto:
                _add_reference(entries, origin)
            else:
                fields = codec.record_to_data(item)
                entries.append({"o": -abs(origin), "t": name_of(type(item)), "v": fields})
        out.append({"t": name_of(slice_type), "e": entries})
    data = {"v": _VERSION, "pairs": pairs, "slices": out}
    return json.dumps(data, separators=(",", ":")).encode()


def _add_reference(entries: list[Any], seq: int) -> None:
    """Add an event's number; numbers that follow each other become one run `[first, last]`."""
    last = entries[-1] if entries else None
    if isinstance(last, list) and last[1] == seq - 1:
        last[1] = seq
    elif isinstance(last, int) and last == seq - 1:
        entries[-1] = [last, seq]
    else:
        entries.append(seq)


def import_state(
    codec: Codec,
    payload: bytes,
    pairs: Pairs,
    read: Callable[[int, int], Iterable[Envelope]],
    unknown: dict[str, int],
    *,
    forced: bool,
) -> dict[type, Slice[Any]] | None:
    """Read slices back, or return None if they do not fit the reducers registered here.

    With `forced` they are taken all the same: the events that they were made of are gone. Slices
    of types that are not registered are counted in `unknown` and left out. Raises `CodecError`.
    """
    data = parse_json(payload)
    if not isinstance(data, dict) or data.get("v") != _VERSION:
        raise DecodeError("the stored state has another version")
    if data.get("pairs") != pairs and not forced:
        return None
    try:
        return _import_slices(codec, data["slices"], read, unknown)
    except (KeyError, TypeError, AttributeError) as error:
        raise DecodeError(f"the stored state has another shape: {error!r}") from error


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
    events: dict[int, tuple[Any, bool]] = {}
    value: Any
    if wanted:
        for envelope in read(min(wanted) - 1, max(wanted)):
            if envelope.seq in wanted:
                value = codec.decode(codec.registry.resolve(envelope.type), envelope.payload)
                events[envelope.seq] = (value, codec.is_immutable(value, envelope.payload))
    slices: dict[type, Slice[Any]] = {}
    for each in known:
        entries: list[Entry] = []
        volatile = False
        for entry in each["e"]:
            if isinstance(entry, dict):
                value = codec.record_from_data(codec.registry.resolve(entry["t"]), entry["v"])
                volatile = volatile or not codec.is_immutable(value, codec.encode(value))
                entries.append((value, entry["o"]))
                continue
            for seq in _references([entry]):
                if seq not in events:
                    raise DecodeError(f"the stored state refers to event {seq}, which is not there")
                value, fixed = events[seq]
                volatile = volatile or not fixed
                entries.append((value, seq))
        slices[codec.registry.resolve(each["t"])] = Slice.of(entries, volatile=volatile)
    return slices


def _references(entries: Iterable[Any]) -> Iterator[int]:
    for entry in entries:
        if isinstance(entry, int):
            yield entry
        elif isinstance(entry, list):
            first, last = entry
            yield from range(first, last + 1)

"""How a durable store keeps the events of one append: packed together, in as few rows as possible.

Theory of operation
-------------------
Events that are appended together mostly speak of the same thing, so they share a row: one entry in
the index, one checksum, one place in a page. A row has the number and the checksum of its last
event; checksums are chained, so that one covers all events of the row. The payload of a row is one
line of JSON with a list for each event (type, time, `rolled_back`, turn, run, trace, length), and
behind it the events' own payloads.

A row of 512 bytes or more is deflated, so that what its events have in common is stored once; a letter
in front says so. Rows can be read without one another: damage to a row does not reach beyond it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from treenail.log.event import Draft, Envelope, chained

MAX_ROW_BYTES = 64 * 1024
"""How many bytes several events in one row have together; a longer event has a row of its own.

Longer rows are not deflated, which would take too long, and no more than this is inflated, whatever
damage promises."""
MIN_DEFLATED_BYTES = 512
"""Shorter rows gain less room than deflating them takes time."""

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DEFLATED = b"z"
_ENTRY_BYTES = 128
"""About how much stands in the first line about an event."""


class Row(NamedTuple):
    """The events of one append, or of a part of it, as they are stored."""

    seq: int
    """The number of the last event."""
    at_us: int
    """The time of the last event."""
    checksum: bytes
    """The checksum of the last event."""
    payload: bytes


def split(drafts: Sequence[Draft]) -> list[Sequence[Draft]]:
    """Divide a batch into what goes into one row each."""
    parts: list[Sequence[Draft]] = []
    start = size = 0
    for place, draft in enumerate(drafts):
        length = len(draft.payload) + _ENTRY_BYTES
        size += length
        if place > start and size > MAX_ROW_BYTES:
            parts.append(drafts[start:place])
            start, size = place, length
    if drafts:
        parts.append(drafts[start:])
    return parts


def pack(drafts: Sequence[Draft]) -> bytes:
    """Return the payload of the row that holds these events."""
    entries = [
        (kind, at_us, bool(rolled_back), turn_id, run_id, trace_id, len(payload))
        for kind, payload, at_us, turn_id, run_id, trace_id, rolled_back in drafts
    ]
    front = _JSON.encode(entries).encode()
    payload = b"".join((front, b"\n", *(each.payload for each in drafts)))
    if MIN_DEFLATED_BYTES <= len(payload) <= MAX_ROW_BYTES:
        # The largest window takes ten times as long to set up as a short row takes to deflate.
        window_bits, memory = (12, 5) if len(payload) <= 4096 else (15, 8)
        deflater = zlib.compressobj(1, zlib.DEFLATED, window_bits, memory)
        deflated = deflater.compress(payload) + deflater.flush()
        if len(deflated) < len(payload):
            return _DEFLATED + deflated
    return payload


def unpack(payload: object) -> list[Draft] | None:
    """Return the events of a row, not yet verified; None if the row makes no sense."""
    if type(payload) is not bytes:
        return None
    whole = _inflated(payload) if payload.startswith(_DEFLATED) else payload
    if whole is None:
        return None
    front, _, rest = whole.partition(b"\n")
    drafts: list[Draft] = []
    place = 0
    try:
        for kind, at_us, rolled_back, turn_id, run_id, trace_id, length in json.loads(front):
            # A negative length would make a short row a very long list.
            if type(length) is not int or not place <= place + length <= len(rest):
                return None
            its = rest[place : place + length]
            drafts.append(Draft(kind, its, at_us, turn_id, run_id, trace_id, rolled_back))
            place += length
    except (ValueError, TypeError, RecursionError):
        return None
    return drafts if drafts and place == len(rest) else None


def _inflated(payload: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        whole = inflater.decompress(payload[len(_DEFLATED) :], MAX_ROW_BYTES + 1)
    except zlib.error:
        return None
    return whole if inflater.eof and not inflater.unused_data else None


def verified(session_id: UUID, previous: bytes, after: int, row: Row) -> list[Envelope] | None:
    """Return the events of the row that follows event `after`; None if they are not what was written.

    `previous` is the checksum of that event.
    """
    drafts = unpack(row.payload)
    if drafts is None or row.seq != after + len(drafts) or row.at_us != drafts[-1].at_us:
        return None
    try:
        events = chained(session_id, previous, after + 1, drafts)
    except (TypeError, ValueError):
        # A damaged row may hold a number where a text was.
        return None
    return events if events[-1].checksum == row.checksum else None

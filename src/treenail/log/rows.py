"""What a row of the table `events` holds: the events of one append, or of a part of it.

Theory of operation
-------------------
Events that are appended together speak mostly of the same thing, so they share a row: one
entry in the index, one checksum, one place in a page. The columns are those of the row's
last event; the ids of turn, run and trace are those of all. The payload begins with the
type, time, `rolled_back` and length of each earlier event, as texts with a NUL behind each,
and one more NUL at the end; a type is never empty and never holds a NUL. Behind that stand
the payloads, the last event's at the end. An event that is alone in its row is stored as it
is. Because checksums are chained, the last event's covers all of them.

A payload that is long enough is then deflated, so that what two events of a row have in
common is stored once. An event that is too long to be deflated has a row of its own; it is
abbreviated if it repeats another such event of the append (`repeats.py`). All other rows
can be read without one another: damage to a row does not reach beyond it, and pruning has
nothing to rewrite but the row that it cuts.

The column `rolled_back` says how to read the payload: it is a sum of the flags below.
Rows of schema versions 1 and 2 have none but the first; version 3 had abbreviated rows of
any length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from uuid import UUID

from treenail.log.event import Draft, Envelope, chained
from treenail.log.repeats import Source, with_repeats, without_repeats

ROLLED_BACK = 1
"""The row's last event was left behind by a rolled back call."""
ABBREVIATED = 2
"""The payload lacks what another row has."""
SEVERAL = 4
"""The payload begins with the events before the last one."""
DEFLATED = 8
"""The payload is deflated."""

_FORMS = frozenset({0, ABBREVIATED, SEVERAL, DEFLATED, SEVERAL + DEFLATED})

_MOST_IN_ROW = 64 * 1024
"""How much several events in one row have together: zlib looks back half as far, and damage costs a row."""
_LEAST_DEFLATED = 1024
"""Shorter payloads gain less room than deflating them takes time."""
_MOST_DEFLATED = 64 * 1024
"""Longer payloads would take too long. More than this is not inflated either, so it must not be lowered."""
_SMALL_BITS = 12
_SMALL = 1 << _SMALL_BITS
"""Up to here a window of this size is enough; clearing the usual one takes longer than deflating."""
_LENGTH_OF_ENTRY = 64
"""About how much is said about an event in front of the payloads."""

EventRow = tuple[int, int, int, str, str | None, str | None, str | None, int, bytes, bytes]
"""position, seq, at_us, type, turn_id, run_id, trace_id, rolled_back, checksum, payload."""


def parts_of(drafts: Sequence[Draft]) -> list[Sequence[Draft]]:
    """Divide a batch into what goes into one row each."""
    parts: list[Sequence[Draft]] = []
    start = size = 0
    for place, draft in enumerate(drafts):
        length = len(draft.payload) + _LENGTH_OF_ENTRY
        size += length
        # The ids are columns, so all events of a row have the same ones.
        if place > start and (size > _MOST_IN_ROW or draft[3:6] != drafts[start][3:6]):
            parts.append(drafts[start:place])
            start, size = place, length
    if drafts:
        parts.append(drafts[start:] if start else drafts)
    return parts


def packed(drafts: Sequence[Draft]) -> list[tuple[Sequence[Draft], int, bytes]]:
    """Return the rows of an append: the events of each, its flags, and its payload."""
    parts = [drafts] if len(drafts) == 1 else parts_of(drafts)
    if len(parts) == 1:
        flags, payload = pack(drafts)
        return [(drafts, flags, payload)]
    rows = []
    before: list[bytes | None] = []
    for part in parts:
        flags, payload = pack(part, before)
        before += [None] * (len(part) - 1)
        before.append(payload if flags in (0, ROLLED_BACK) else None)
        rows.append((part, flags, payload))
    return rows


def pack(part: Sequence[Draft], before: Sequence[bytes | None] = ()) -> tuple[int, bytes]:
    """Return the flags and the payload of the row that holds these events.

    `before` are the payloads of the append's events before these, None for one that is not stored
    as it is.
    """
    _, payload, _, _, _, _, rolled_back = part[-1]
    flags = 1 if rolled_back else 0
    is_alone = len(part) == 1
    if not is_alone:
        front, payloads = "", []
        for kind, its, at_us, _, _, _, its_flag in part[:-1]:
            # Not formatted: a text's class may print something else than its characters.
            front += kind + f"\0{at_us}\0{int(its_flag)}\0{len(its)}\0"
            payloads.append(its)
        payload = b"".join((front.encode(), b"\0", *payloads, payload))
        flags += SEVERAL
    if len(payload) > _MOST_DEFLATED:
        shorter = without_repeats(payload, before) if before and is_alone else None
        return (flags, payload) if shorter is None else (flags + ABBREVIATED, shorter)
    if len(payload) >= _LEAST_DEFLATED:
        deflated = _deflated(payload)
        if len(deflated) < len(payload):
            return flags + DEFLATED, deflated
    return flags, payload


def _deflated(payload: bytes) -> bytes:
    # Negative: without a checksum of its own, for which the event's does as well.
    if len(payload) <= _SMALL:
        deflater = zlib.compressobj(1, zlib.DEFLATED, -_SMALL_BITS, memLevel=5)
    else:
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflater.compress(payload) + deflater.flush()


def unpack(row: EventRow, source: Source) -> list[Draft] | None:
    """Return the events of a row, not yet verified; None if the row makes no sense."""
    _, _, at_us, kind, turn_id, run_id, trace_id, flags, _, payload = row
    if type(payload) is not bytes or type(at_us) is not int or type(flags) is not int:
        return None
    rolled_back, form = flags & ROLLED_BACK, flags & ~ROLLED_BACK
    if form not in _FORMS:
        return None
    whole: bytes | None = payload
    if form & DEFLATED:
        whole = _inflated(payload)
    elif form == ABBREVIATED:
        whole = with_repeats(payload, source)
    if whole is None:
        return None
    if not form & SEVERAL:
        return [Draft(kind, whole, at_us, turn_id, run_id, trace_id, rolled_back == 1)]
    entries, _, rest = whole.partition(b"\0\0")
    drafts: list[Draft] = []
    place = 0
    try:
        values = iter(entries.decode().split("\0"))
        for its_kind, its_us, its_flag, length in zip(values, values, values, values, strict=True):
            end = place + int(length)
            # Lengths that go back and forth would make a short row a very long list.
            if not place <= end <= len(rest):
                return None
            its = rest[place:end]
            drafts.append(Draft(its_kind, its, int(its_us), turn_id, run_id, trace_id, its_flag == "1"))
            place = end
    except ValueError:
        return None
    drafts.append(Draft(kind, rest[place:], at_us, turn_id, run_id, trace_id, rolled_back == 1))
    return drafts


def _inflated(payload: bytes) -> bytes | None:
    # No more than was ever deflated, whatever damage promises.
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        whole = inflater.decompress(payload, _MOST_DEFLATED + 1)
    except zlib.error:
        return None
    return whole if inflater.eof and not inflater.unused_data else None


def verified(
    session_id: UUID, previous: bytes, first: int, row: EventRow, source: Source
) -> list[Envelope] | None:
    """Return the events of a row that begins with number `first`; None if they are not what was written."""
    drafts = unpack(row, source)
    if drafts is None or row[1] != first + len(drafts) - 1:
        return None
    try:
        events = chained(session_id, previous, first, drafts)
    except (TypeError, ValueError):
        # A damaged row may hold a number where a text was.
        return None
    return events if events[-1].checksum == row[8] else None


def first_of(row: EventRow) -> int | None:
    """Return the number of a row's first event, or None if the row makes no sense."""
    seq, flags = row[1], row[7]
    if type(seq) is not int:
        return None
    if flags in (ABBREVIATED, ABBREVIATED + ROLLED_BACK):
        return seq
    drafts = unpack(row, lambda _: None)
    return None if drafts is None else seq - len(drafts) + 1

"""A very long text that an append holds twice is stored once.

Theory of operation
-------------------
A tool's message and the record of its call hold the same text, and both are written in
one append. Where they are short enough to share a row, deflating it sees to that
(`rows.py`). What is longer would take too long to deflate: a long JSON text in a payload
that stands word for word in one of the events right before it, in the same append, is cut
out of the stored payload, which stays the JSON that it was with an empty text in that
place. (Version 3 of the schema did so with payloads of every length.) In front of it stands one line
that says what belongs where: `at:back:start:length`, for each text that was cut out,
separated by commas. So `201:1:25:1000` means: the thousand bytes that begin at byte 25 of
the event before this one belong to byte 201.

Only an event that is stored whole is ever referred to, so one look is enough to put a
payload together again. Checksums are taken over whole payloads, so a text that was lost or
changed elsewhere is noticed here as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

REACH = 4
"""How many events back a text is looked for."""

_LEAST = 128
"""Shorter texts are not worth the line that speaks of them."""
_MOST_SEARCHED = 256 * 1024
"""Longer payloads are stored whole, so that an append takes no time for searching them.

Nothing longer is put together either, whatever damage promises, so it must not be lowered."""

# In what is not JSON, a text that no quote closes reaches up to the end: each byte is looked at once.
_TEXT = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"?', re.DOTALL)

Source = Callable[[int], bytes | None]
"""Returns the payload of the event so many places back, or None if it is not stored whole."""


def without_repeats(payload: bytes, before: Sequence[bytes | None]) -> bytes | None:
    """Return the stored form of a payload that repeats one of those before it; None if it does not.

    `before` ends with the event right before this one; None stands for one that is not stored whole.
    """
    if not _LEAST < len(payload) <= _MOST_SEARCHED:
        return None
    whole = [
        (back, each)
        for back, each in enumerate(reversed(before[-REACH:]), 1)
        if each is not None and _LEAST < len(each) <= _MOST_SEARCHED
    ]
    if not whole:
        return None
    notes, kept, done, length = [], [], 0, 0
    for found in _TEXT.finditer(payload):
        start, end = found.span(1)
        if end - start < _LEAST:
            continue
        text = found[1]
        for back, each in whole:
            place = each.find(text)
            if place >= 0:
                kept.append(payload[done:start])
                length += start - done
                notes.append(b"%d:%d:%d:%d" % (length, back, place, end - start))
                done = end
                break
    if not notes:
        return None
    return b"".join((b",".join(notes), b"\n", *kept, payload[done:]))


def with_repeats(stored: bytes, source: Source) -> bytes | None:
    """Put a payload together again; None if what is stored makes no sense."""
    line, found, cut = stored.partition(b"\n")
    if not found:
        return None
    parts: list[bytes] = []
    done, size = 0, len(cut)
    try:
        for note in line.split(b","):
            at, back, start, length = map(int, note.split(b":"))
            text = source(back) if 1 <= back <= REACH else None
            if text is None or not done <= at <= len(cut) or not 0 <= start <= start + length <= len(text):
                return None
            size += length
            if size > _MOST_SEARCHED:
                return None
            parts += (cut[done:at], text[start : start + length])
            done = at
    except ValueError:
        return None
    return b"".join((*parts, cut[done:]))

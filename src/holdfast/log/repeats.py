"""How a file of schema version 3 stored once what an append said twice; it is still read.

Theory of operation
-------------------
A tool's message and the record of its call hold the same text, and both are written in
one append. A long JSON text in a payload that stood word for word in one of the events
right before it, in the same append, was therefore cut out of the stored payload, which
stayed the JSON that it was with an empty text in that place. In front of it stands one line
that says what belongs where: `at:back:start:length`, for each text that was cut out,
separated by commas. So `201:1:25:1000` means: the thousand bytes that begin at byte 25 of
the event before this one belong to byte 201.

Only an event that is stored whole is ever referred to, so one look is enough to put a
payload together again. Checksums are taken over whole payloads, so a text that was lost or
changed elsewhere is noticed here as well.
"""

from __future__ import annotations

from collections.abc import Callable

REACH = 4
"""How many events back a text may stand."""

Source = Callable[[int], bytes | None]
"""Returns the payload of the event so many places back, or None if it is not stored whole."""


def with_repeats(stored: bytes, source: Source) -> bytes | None:
    """Put a payload together again; None if what is stored makes no sense."""
    line, found, cut = stored.partition(b"\n")
    if not found:
        return None
    parts: list[bytes] = []
    done = 0
    try:
        for note in line.split(b","):
            at, back, start, length = map(int, note.split(b":"))
            text = source(back) if 1 <= back <= REACH else None
            if text is None or not done <= at <= len(cut) or not 0 <= start <= start + length <= len(text):
                return None
            parts += (cut[done:at], text[start : start + length])
            done = at
    except ValueError:
        return None
    return b"".join((*parts, cut[done:]))

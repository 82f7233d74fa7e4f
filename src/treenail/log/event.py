"""What stands in a log: drafts, envelopes, and what an event type says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Channel(Enum):
    """Who may see an event again. The three channels never mix."""

    REPLAY = "replay"
    """The model may see it again."""
    AUDIT = "audit"
    """Kept as evidence, never replayed to the model."""
    LIVE = "live"
    """Published to whoever watches, never logged."""


class SlicePolicy(Enum):
    """What a rollback does with a slice."""

    STATE = "state"
    """Working state: rolled back. The default."""
    LOG = "log"
    """History: preserved during a rollback."""
    CACHE = "cache"
    """Can be rolled back, can be dropped and computed again."""


def to_microseconds(moment: datetime) -> int:
    """Turn an aware time into whole microseconds since 1970, exactly."""
    return (moment - _EPOCH) // _MICROSECOND


def from_microseconds(microseconds: int) -> datetime:
    """Turn microseconds since 1970 back into an aware UTC time."""
    return _EPOCH + timedelta(microseconds=microseconds)


class Draft(NamedTuple):
    """An event on its way into a log; the log gives it its place."""

    type: str
    payload: bytes
    at_us: int
    turn_id: str | None = None
    run_id: str | None = None
    trace_id: str | None = None
    rolled_back: bool = False
    """True for an event that a rolled back call leaves as history: it reaches LOG slices only."""


class Envelope(NamedTuple):
    """One stored event. `payload` is the encoded value; decoding it is the reader's choice."""

    session_id: UUID
    seq: int
    """The place in the session's log: 1, 2, 3 ... without gaps."""
    at_us: int
    type: str
    payload: bytes
    checksum: bytes
    turn_id: str | None = None
    run_id: str | None = None
    trace_id: str | None = None
    rolled_back: bool = False

    @property
    def at(self) -> datetime:
        """The UTC time at which the event was recorded."""
        return from_microseconds(self.at_us)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a log knows about a session without reading its events."""

    session_id: UUID
    created_at: datetime
    parent_id: UUID | None = None
    tags: tuple[tuple[str, str], ...] = ()
    head: int = 0
    """The sequence number of the newest event, 0 if there is none."""
    first: int = 1
    """The sequence number of the oldest event still kept; more than 1 after a prune."""
    owner: str | None = None
    """Who holds the writer's lease, if anybody does."""


GENESIS = b"\0" * 16
"""What the first event's checksum is chained to."""


_new = tuple.__new__
"""Makes a named tuple past its constructor, which checks nothing and takes longer than the rest."""


def chained(session_id: UUID, previous: bytes, first: int, drafts: Sequence[Draft]) -> list[Envelope]:
    """Number events from `first` on, and give each its checksum.

    It is taken over the event's own bytes and its predecessor's checksum. Chaining makes a missing,
    swapped or repeated event as visible as a flipped bit.
    """
    name = session_id.int.to_bytes(16, "big")
    events: list[Envelope] = []
    seq = first
    for kind, payload, at_us, turn_id, run_id, trace_id, flag in drafts:
        words = _words(kind, turn_id, run_id, trace_id)
        head = b"%d|%d|%d|%d|%b" % (seq, at_us, flag, len(payload), words)
        whole = b"".join((previous, name, len(head).to_bytes(4, "big"), head, payload))
        previous = blake2b(whole, digest_size=16).digest()
        rolled_back = bool(flag)
        fields = (session_id, seq, at_us, kind, payload, previous, turn_id, run_id, trace_id, rolled_back)
        events.append(_new(Envelope, fields))
        seq += 1
    return events


def chain_checksum(previous: bytes, session_id: UUID, seq: int, draft: Draft) -> bytes:
    """Compute one event's checksum, chained to its predecessor's."""
    return chained(session_id, previous, seq, (draft,))[0].checksum


@lru_cache(maxsize=256)
def _words(*texts: str | None) -> bytes:
    """Return an event's texts in one, the same for many events.

    Each one's length stands in front of it (-1 for None), so that no two different events share one
    byte string.
    """
    # Joined, not formatted: what SQLite stores is a text's characters, whatever its class prints.
    words = "|".join("-1|None" if each is None else f"{len(each)}|" + each for each in texts)
    return words.encode("utf-8", "surrogatepass")

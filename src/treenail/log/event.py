"""The contents of a log: drafts, envelopes, and what an event type declares about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Channel(Enum):
    """Where an event may be seen again. The three channels never mix."""

    REPLAY = "replay"
    """The model may see it again."""
    AUDIT = "audit"
    """Kept as evidence, never replayed to the model."""
    LIVE = "live"
    """Published to subscribers, never logged."""


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

    @property
    def draft(self) -> Draft:
        """The draft that the event was made from."""
        return Draft(self.type, self.payload, self.at_us, *self[6:])


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
    """The holder of the writer's lease; None if it is free."""


GENESIS = b"\0" * 16
"""The checksum before the first event's, to which that is chained."""


def chained(session_id: UUID, previous: bytes, first: int, drafts: Sequence[Draft]) -> list[Envelope]:
    """Number events from `first` on, and give each its checksum."""
    events: list[Envelope] = []
    for seq, draft in enumerate(drafts, first):
        previous = chain_checksum(previous, session_id, seq, draft)
        kind, payload, at_us, turn_id, run_id, trace_id, rolled_back = draft
        events.append(
            Envelope(
                session_id, seq, at_us, kind, payload, previous, turn_id, run_id, trace_id, bool(rolled_back)
            )
        )
    return events


def chain_checksum(previous: bytes, session_id: UUID, seq: int, draft: Draft) -> bytes:
    """Compute one event's checksum over its own bytes and its predecessor's checksum.

    Chaining makes a missing, swapped or repeated event as visible as a flipped bit.
    """
    kind, payload, at_us, turn_id, run_id, trace_id, rolled_back = draft
    # The length stands in front of each text (-1 for None), so that no two events share one byte string.
    # Joined, not formatted: a store keeps a text's characters, whatever its class prints.
    texts = "|".join(
        "-1|None" if each is None else f"{len(each)}|" + each for each in (kind, turn_id, run_id, trace_id)
    )
    head = f"{seq}|{at_us}|{int(rolled_back)}|{len(payload)}|{texts}".encode("utf-8", "surrogatepass")
    digest = blake2b(previous + session_id.bytes + len(head).to_bytes(4, "big") + head, digest_size=16)
    digest.update(payload)
    return digest.digest()

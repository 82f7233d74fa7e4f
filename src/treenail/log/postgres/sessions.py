"""A session's row with its writer's, and the checksums of what is stored beside events."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

from treenail.log import rules
from treenail.log.event import SessionInfo, from_microseconds


class SessionRow(NamedTuple):
    """What the tables `sessions` and `writers` say about a session."""

    id: UUID
    incarnation: int
    created_us: int
    parent_id: UUID | None
    tags: str
    first_seq: int
    anchor: bytes
    """The checksum of the event before the first one."""
    epoch: int
    owner: str | None
    ttl_us: int
    expires_us: int
    grant_id: UUID | None
    head_seq: int
    head_us: int | None
    head_checksum: bytes
    now_us: int
    """The time when the row was read."""

    @property
    def lease(self) -> rules.LeaseState:
        """The writer's lease."""
        return rules.LeaseState(self.epoch, self.owner, self.ttl_us, self.expires_us)

    @property
    def age(self) -> rules.Age:
        """When the session was last used."""
        used_us = max(self.created_us, self.created_us if self.head_us is None else self.head_us)
        return rules.Age(self.id, self.parent_id, used_us, self.lease.is_live(self.now_us))

    def describe(self) -> SessionInfo:
        """Return what users are told about the session."""
        return SessionInfo(
            self.id,
            from_microseconds(self.created_us),
            parent_id=self.parent_id,
            tags=tuple((name, value) for name, value in json.loads(self.tags)),
            head=self.head_seq,
            first=self.first_seq,
            owner=self.owner if self.lease.is_live(self.now_us) else None,
        )


def checksum_of(kind: bytes, session_id: UUID, number: int, payload: bytes) -> bytes:
    """Compute the checksum of a snapshot or a note; the number is its place or its epoch."""
    digest = blake2b(kind + session_id.bytes + number.to_bytes(8, "big"), digest_size=16)
    digest.update(payload)
    return digest.digest()

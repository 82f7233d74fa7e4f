"""The tables `sessions` and `leases`: what is known about a session, and who may write it.

Each row carries a checksum of its own, because SQLite does not checksum its pages. The row of a lease
also remembers, at every heartbeat and when it is given back, how far the session had come: so events
that the index has lost without a trace are noticed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

from treenail.log import rules
from treenail.log.base import Damage, Lease
from treenail.log.event import GENESIS, SessionInfo, from_microseconds, to_microseconds

_INSERT_SESSION = """
INSERT INTO sessions (session_id, created_us, parent_id, tags, first_seq, anchor, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_INSERT_LEASE = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)"
_COLUMNS = """
SELECT s.key, s.session_id, s.created_us, s.parent_id, s.tags, s.first_seq, s.anchor, s.checksum,
    l.epoch, l.owner, l.ttl_us, l.expires_us, l.head_seq, l.checksum
"""
_FIND = f"{_COLUMNS} FROM sessions AS s LEFT JOIN leases AS l ON l.session_key = s.key WHERE s.session_id = ?"
# The same past the index on session_id, in case it is the index that is damaged.
_SCAN = f"""
{_COLUMNS} FROM sessions AS s NOT INDEXED LEFT JOIN leases AS l ON l.session_key = s.key
WHERE s.session_id = ?
"""
_ALL = f"""
{_COLUMNS} FROM sessions AS s NOT INDEXED LEFT JOIN leases AS l ON l.session_key = s.key
ORDER BY s.created_us, s.key
"""
_INDEXED = "SELECT session_id, key FROM sessions ORDER BY session_id"
_HEAD = "SELECT max(seq) FROM events WHERE session_key = ?"
_UPDATE_LEASE = """
UPDATE leases SET epoch = ?, owner = ?, ttl_us = ?, expires_us = ?, head_seq = ?, checksum = ?
WHERE session_key = ?
"""
_MOVE_FIRST = "UPDATE sessions SET first_seq = ?, anchor = ?, checksum = ? WHERE key = ?"


def _digest(*parts: object) -> bytes:
    # repr puts quotes around texts and bytes, so no two different rows share one spelling.
    return blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Facts(NamedTuple):
    """The columns of a session that its checksum covers."""

    session_id: bytes
    created_us: int
    parent_id: bytes | None
    tags: str
    first_seq: int
    anchor: bytes
    """The checksum of the event before the first one."""

    @property
    def checksum(self) -> bytes:
        """The checksum of the row."""
        return _digest("session", *self)


class SessionRow(NamedTuple):
    """A session's row with its lease, as it stands in the file."""

    key: int
    session_id: bytes
    created_us: int
    parent_id: bytes | None
    tags: str
    first_seq: int
    anchor: bytes
    checksum: bytes
    epoch: int | None
    owner: str | None
    ttl_us: int
    expires_us: int
    head_seq: int
    """How many events the session had when its lease was last written."""
    lease_checksum: bytes

    @property
    def id(self) -> UUID:
        """The session's id."""
        return UUID(bytes=self.session_id)

    @property
    def parent(self) -> UUID | None:
        """The id of the parent session."""
        return None if self.parent_id is None else UUID(bytes=self.parent_id)

    @property
    def lease(self) -> rules.LeaseState:
        """The writer's lease."""
        return rules.LeaseState(self.epoch or 0, self.owner, self.ttl_us, self.expires_us)

    @property
    def facts(self) -> Facts:
        """What the checksum of the session covers."""
        return Facts(*self[1:7])

    def damage(self) -> list[Damage]:
        """List what is wrong with the row and with its lease."""
        found = []
        if not self.is_session_whole:
            found.append(
                Damage("checksum", f"the row of session {self._name} (time, parent, tags) is damaged")
            )
        if not self.is_lease_whole:
            found.append(Damage("checksum", f"the row of the lease on session {self._name} is damaged"))
        return found

    @property
    def is_session_whole(self) -> bool:
        """Whether time, parent, tags and the first event are as they were written."""
        return self.checksum == self.facts.checksum

    @property
    def is_lease_whole(self) -> bool:
        """Whether the lease is as it was written."""
        expected = _digest("lease", self.session_id, *self.lease, self.head_seq)
        return self.epoch is not None and self.lease_checksum == expected

    @property
    def _name(self) -> str:
        return str(self.id) if is_id(self.session_id) else repr(self.session_id)


def is_id(value: object) -> bool:
    """Return whether a stored value can be a session's id, or a checksum."""
    return type(value) is bytes and len(value) == 16


def new_facts(
    session_id: UUID, created_at: datetime, parent_id: UUID | None, tags: Mapping[str, str] | None
) -> Facts:
    """Return what is stored about a new session."""
    text = json.dumps(list((tags or {}).items()), ensure_ascii=False)
    parent = None if parent_id is None else parent_id.bytes
    return Facts(session_id.bytes, to_microseconds(created_at), parent, text, 1, GENESIS)


def insert(connection: sqlite3.Connection, facts: Facts, *, epoch: int = 0) -> int:
    """Write the rows of a session whose lease is free; return its key."""
    key = connection.execute(_INSERT_SESSION, (*facts, facts.checksum)).lastrowid
    assert key is not None
    state = rules.LeaseState(epoch=epoch)
    connection.execute(_INSERT_LEASE, (key, *state, 0, _digest("lease", facts.session_id, *state, 0)))
    return key


def select(connection: sqlite3.Connection, session_id: UUID) -> SessionRow | None:
    """Return the rows of a session as they are, damaged or not; None if there is no such session."""
    for query in (_FIND, _SCAN):
        found = connection.execute(query, (session_id.bytes,)).fetchone()
        if found is not None:
            return SessionRow(*found)
    return None


def find(connection: sqlite3.Connection, session_id: UUID, where: object) -> SessionRow:
    """Return the rows of a session as they are, damaged or not. Raises `SessionNotFoundError`."""
    row = select(connection, session_id)
    if row is None:
        rules.not_found(session_id, str(where))
    return row


def whole(row: SessionRow) -> SessionRow:
    """Refuse a row that is damaged."""
    for damage in row.damage():
        raise sqlite3.DatabaseError(damage.message)
    return row


def all_whole(connection: sqlite3.Connection) -> list[SessionRow]:
    """Return the rows of all sessions, oldest first. Refuse damaged ones."""
    rows = [whole(SessionRow(*found)) for found in connection.execute(_ALL).fetchall()]
    if len(connection.execute(_INDEXED).fetchall()) != len(rows):
        raise sqlite3.DatabaseError("the table of sessions and its index do not hold the same sessions")
    return rows


def index_head(connection: sqlite3.Connection, row: SessionRow) -> int:
    """Return the number of a session's newest event, as the index says."""
    head = connection.execute(_HEAD, (row.key,)).fetchone()[0]
    return head if type(head) is int else row.first_seq - 1


def head_of(connection: sqlite3.Connection, row: SessionRow) -> int:
    """Return the number of a session's newest event. Refuse an index that has lost some."""
    head = index_head(connection, row)
    if head < row.head_seq:
        raise sqlite3.DatabaseError(
            f"session {row.id} had {row.head_seq} events, and its index now leads to {head}"
        )
    return head


def store_lease(connection: sqlite3.Connection, row: SessionRow, state: rules.LeaseState) -> Lease:
    """Write a session's lease, and how far the session has come."""
    head = head_of(connection, row)
    checksum = _digest("lease", row.session_id, *state, head)
    connection.execute(_UPDATE_LEASE, (*state, head, checksum, row.key))
    return state.as_lease(row.id)


def move_first(connection: sqlite3.Connection, row: SessionRow, first: int, anchor: bytes) -> None:
    """Note that a session's events now begin with `first`."""
    row = row._replace(first_seq=first, anchor=anchor)
    connection.execute(_MOVE_FIRST, (first, anchor, row.facts.checksum, row.key))
    store_lease(connection, row, row.lease)


def describe(connection: sqlite3.Connection, row: SessionRow, now_us: int) -> SessionInfo:
    """Return what users are told about a session."""
    return SessionInfo(
        row.id,
        from_microseconds(row.created_us),
        parent_id=row.parent,
        tags=tuple((name, value) for name, value in json.loads(row.tags)),
        head=max(index_head(connection, row), row.head_seq),
        first=row.first_seq,
        owner=row.owner if row.lease.is_live(now_us) else None,
    )

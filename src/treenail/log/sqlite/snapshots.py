"""The table `snapshots`: folded states of sessions, each with a checksum."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from hashlib import blake2b
from uuid import UUID

from treenail.log import rules
from treenail.log.sqlite.failures import readable
from treenail.log.sqlite.sessions import SessionRow

_PUT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)"
_FORGET_OLD = """
DELETE FROM snapshots WHERE session_key = ? AND seq NOT IN
    (SELECT seq FROM snapshots WHERE session_key = ? ORDER BY seq DESC LIMIT ?)
"""
_SEQS = "SELECT seq FROM snapshots WHERE session_key = ? ORDER BY seq DESC"
_AT = "SELECT checksum, payload FROM snapshots WHERE session_key = ? AND seq = ?"


def _checksum(session_id: UUID, seq: int, payload: bytes) -> bytes:
    digest = blake2b(b"snapshot" + session_id.bytes + seq.to_bytes(8, "big"), digest_size=16)
    digest.update(payload)
    return digest.digest()


def put(connection: sqlite3.Connection, key: int, session_id: UUID, seq: int, payload: bytes) -> None:
    """Store a snapshot, and keep the one before to fall back on if this one is damaged."""
    connection.execute(_PUT, (key, seq, _checksum(session_id, seq, payload), payload))
    connection.execute(_FORGET_OLD, (key, key, rules.SNAPSHOTS_KEPT))


def stored(connection: sqlite3.Connection, row: SessionRow) -> Iterator[tuple[int, bytes | None]]:
    """Yield the stored snapshots of a session, newest first, with None for one that is damaged."""
    for (seq,) in list(readable(connection, _SEQS, row.key)):
        if type(seq) is not int or not 0 <= seq < 1 << 63:
            yield 0, None
            continue
        checksum, payload = next(readable(connection, _AT, row.key, seq), (None, None))
        is_whole = type(payload) is bytes and _checksum(row.id, seq, payload) == checksum
        yield seq, payload if is_whole else None


def newest(connection: sqlite3.Connection, row: SessionRow) -> tuple[int, bytes] | None:
    """Return the newest snapshot that is whole, and its place."""
    for seq, payload in stored(connection, row):
        if payload is not None:
            return seq, payload
    return None

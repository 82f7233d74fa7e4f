"""The table `notes`: what each session's writer last noted, with a checksum. One row, overwritten."""

from __future__ import annotations

import sqlite3
from hashlib import blake2b
from uuid import UUID

from treenail.log.base import Note
from treenail.log.sqlite.failures import readable
from treenail.log.sqlite.sessions import SessionRow

_PUT = "INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?)"
_OF = "SELECT epoch, checksum, payload FROM notes WHERE session_key = ?"
_HAS_TABLE = "SELECT 1 FROM sqlite_schema WHERE name = 'notes'"


def _checksum(session_id: UUID, epoch: int, payload: bytes) -> bytes:
    digest = blake2b(b"note" + session_id.bytes + epoch.to_bytes(8, "big"), digest_size=16)
    digest.update(payload)
    return digest.digest()


def put(connection: sqlite3.Connection, key: int, session_id: UUID, note: Note) -> None:
    """Store a note in place of the one before."""
    checksum = _checksum(session_id, note.epoch, note.payload)
    connection.execute(_PUT, (key, note.epoch, checksum, note.payload))


def stored(connection: sqlite3.Connection, row: SessionRow) -> tuple[bool, Note | None]:
    """Return whether a session has a note, and the note unless it is damaged."""
    if connection.execute(_HAS_TABLE).fetchone() is None:
        return False, None  # A file of an older version that is only read.
    for epoch, checksum, payload in readable(connection, _OF, row.key):
        is_whole = type(epoch) is int and 0 <= epoch < 1 << 63 and type(payload) is bytes
        if is_whole and _checksum(row.id, epoch, payload) == checksum:
            return True, Note(epoch, payload)
        return True, None
    return False, None

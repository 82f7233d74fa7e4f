"""Deleting events and sessions so that no byte of them is left.

`secure_delete` overwrites deleted rows, but not the copies of them that rebalancing has left in the gaps
of other pages. So after a deletion the file is rebuilt (`VACUUM`) and the WAL is emptied. The deletion
itself notes, in the table `scrubs`, that this is still to be done.
"""

from __future__ import annotations

import sqlite3
from hashlib import blake2b
from uuid import UUID

from treenail.errors import LogBusyError, LogError
from treenail.log import rules
from treenail.log.rows import pack, verified
from treenail.log.sqlite import events, sessions, snapshots
from treenail.log.sqlite.database import Database, size_of
from treenail.log.sqlite.sessions import SessionRow

_REPLACE_PAYLOAD = "UPDATE events SET payload = ? WHERE session_key = ? AND seq = ?"
_DELETE_EVENTS = "DELETE FROM events WHERE session_key = ? AND seq <= ?"
_DELETE_SNAPSHOTS = "DELETE FROM snapshots WHERE session_key = ? AND seq < ?"
_DELETE_SESSION = (
    "DELETE FROM events WHERE session_key = ?",
    "DELETE FROM snapshots WHERE session_key = ?",
    "DELETE FROM notes WHERE session_key = ?",
    "DELETE FROM leases WHERE session_key = ?",
    "DELETE FROM sessions WHERE key = ?",
)
_LAST_USED = "SELECT at_us FROM events WHERE session_key = ? ORDER BY seq DESC LIMIT 1"
_NOTE_SCRUB = "INSERT INTO scrubs VALUES (?)"
_PENDING_SCRUBS = "SELECT digest FROM scrubs"
_LAST_SCRUB = "SELECT max(rowid) FROM scrubs"
_SCRUBS_DONE = "DELETE FROM scrubs WHERE rowid <= ?"


def prune(connection: sqlite3.Connection, row: SessionRow, upto: int) -> int:
    """Delete a session's events up to `upto`, which a snapshot must cover. Returns how many there were."""
    covered = snapshots.newest(connection, row)
    rules.check_prune(row.id, upto=upto, covered=None if covered is None else covered[0])
    if upto < row.first_seq:
        return 0
    anchor = _cut(connection, row, upto)
    connection.execute(_DELETE_EVENTS, (row.key, upto))
    connection.execute(_DELETE_SNAPSHOTS, (row.key, upto))
    sessions.move_first(connection, row, upto + 1, anchor)
    connection.execute(_NOTE_SCRUB, (_scrub_digest(row.id),))
    return upto + 1 - row.first_seq


def _cut(connection: sqlite3.Connection, row: SessionRow, upto: int) -> bytes:
    """Remove the pruned events from a row that also holds kept ones; return the checksum of event `upto`."""
    start, previous = events.place_before(connection, row, upto)
    if start == upto:
        return previous
    stored = events.next_row(connection, row, upto)
    whole = None if stored is None else verified(row.id, previous, start, stored)
    if stored is None or whole is None:
        raise sqlite3.DatabaseError(f"event {start + 1} of session {row.id} is damaged or missing")
    kept = pack([each.draft for each in whole if each.seq > upto])
    connection.execute(_REPLACE_PAYLOAD, (kept, row.key, stored.seq))
    return whole[upto - start - 1].checksum


def erase(connection: sqlite3.Connection, row: SessionRow) -> None:
    """Delete a session and everything in it."""
    for statement in _DELETE_SESSION:
        connection.execute(statement, (row.key,))
    connection.execute(_NOTE_SCRUB, (_scrub_digest(row.id),))


def is_scrub_pending(connection: sqlite3.Connection, session_id: UUID) -> bool:
    """Return whether this session was deleted and its bytes may still be in the file."""
    return (_scrub_digest(session_id),) in connection.execute(_PENDING_SCRUBS).fetchall()


def ages(connection: sqlite3.Connection, now_us: int) -> list[tuple[SessionRow, rules.Age]]:
    """Return when each session was last used."""
    found = []
    for row in sessions.all_whole(connection):
        last = connection.execute(_LAST_USED, (row.key,)).fetchone()
        used_us = max(row.created_us, last[0] if last else row.created_us)
        found.append((row, rules.Age(row.id, row.parent, used_us, row.lease.is_live(now_us))))
    return found


def scrub(database: Database, what: str) -> None:
    """Leave nothing of deleted rows in the file or in the WAL, or say that something may be left."""

    def rebuild(connection: sqlite3.Connection) -> None:
        upto = connection.execute(_LAST_SCRUB).fetchone()[0]
        connection.execute("VACUUM")
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy or size_of(database.wal_path):
            raise LogBusyError("a reader still needs what is in the WAL")
        # Only now is it true that nothing is left.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_SCRUBS_DONE, (upto or 0,))
        connection.execute("COMMIT")

    try:
        database.maintain("rebuild the file", rebuild)
    except LogError as error:
        problem = (
            f"{what} can no longer be read from the log, but old bytes may still be in {database.path} or "
            f"its -wal: {error}; call scrub() when other readers are gone and there is room on the disk"
        )
        raise (LogBusyError if isinstance(error, LogBusyError) else LogError)(problem) from error


def _scrub_digest(session_id: UUID) -> bytes:
    # Not the id itself: a note about an erased session must not be a trace of it.
    return blake2b(session_id.bytes, digest_size=8, person=b"treenail-scrub").digest()

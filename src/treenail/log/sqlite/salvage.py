"""Copies what is whole in a damaged file into a new one.

The damaged file is read through SQLite, read-only. A session's events are taken as far as their chain of
checksums is whole: first through the index, and where the index leads astray from the table itself, in
the order of positions. A session whose own row is damaged is still known from the index on ids; its
events say where they begin.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from treenail.errors import LogDamagedError, LogError, UsageError
from treenail.log.base import Damage, LogReport
from treenail.log.event import GENESIS
from treenail.log.rows import Row, unpack, verified
from treenail.log.sqlite import events, notes, pots, sessions, snapshots
from treenail.log.sqlite.database import Database
from treenail.log.sqlite.failures import readable
from treenail.log.sqlite.sessions import Facts, SessionRow, is_id

_IDS = (
    "SELECT session_id, key FROM sessions NOT INDEXED",
    "SELECT session_id, key FROM sessions ORDER BY session_id",
)
_SESSION = """
SELECT key, session_id, created_us, parent_id, tags, first_seq, anchor, checksum
FROM sessions WHERE key = ?
"""
_LEASE = "SELECT epoch, owner, ttl_us, expires_us, head_seq, checksum FROM leases WHERE session_key = ?"
_BY_POSITION = """
SELECT seq, at_us, checksum, payload FROM events NOT INDEXED
WHERE session_key = ? AND seq > ? ORDER BY position
"""
# The index alone knows of rows whose page is lost.
_NUMBERS = "SELECT seq FROM events INDEXED BY events_by_session WHERE session_key = ? AND seq > ?"


def salvage(source: Path, target: Path) -> Sequence[LogReport]:
    """Copy everything that is whole, and report for each session how far it is."""
    if target.exists():
        raise UsageError(f"{target} exists already; salvage needs a new file")
    if not source.is_file():
        raise LogError(f"there is no file {source} to salvage")
    old = Database(source, read_only=True)
    try:
        try:
            found = old.read("look for sessions", _find_sessions)
        except LogDamagedError as error:
            raise LogDamagedError(
                f"nothing could be salvaged from {source}: SQLite cannot read it ({error.__cause__}); "
                f"nothing was changed or deleted; restore a backup, or try SQLite's own tool: "
                f"sqlite3 {source} .recover"
            ) from error
        if not found:
            raise LogDamagedError(f"no session was found in {source}; nothing was changed or deleted")
        new = Database(target)
        try:
            old.read("copy pots", lambda source: new.write("copy pots", lambda to: pots.copy(source, to)))
            return [_copy(old, new, session_id, key) for session_id, key in found.items()]
        finally:
            new.close()
    finally:
        old.close()


def _find_sessions(connection: sqlite3.Connection) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for query in _IDS:
        for session_id, key in readable(connection, query):
            if isinstance(session_id, bytes) and is_id(session_id) and isinstance(key, int):
                found.setdefault(session_id, key)
    return found


def _copy(old: Database, new: Database, name: bytes, key: int) -> LogReport:
    """Write one session of the old file into the new one, as far as it is whole."""
    session_id = UUID(bytes=name)

    def work(source: sqlite3.Connection) -> LogReport:
        row = _session(source, name, key)
        damage = row.damage()
        facts = row.facts if row.is_session_whole else _guessed(source, row)
        epoch = row.lease.epoch if row.is_lease_whole else 0
        last = new.write(
            f"copy session {session_id}",
            lambda target: _write(source, target, row, sessions.insert(target, facts, epoch=epoch), facts),
        )
        damage += [
            Damage("snapshot", f"the stored snapshot after event {seq} is damaged", seq)
            for seq, payload in snapshots.stored(source, row)
            if payload is None
        ]
        beyond = {
            each[0] for query in (_NUMBERS, _BY_POSITION) for each in readable(source, query, key, last)
        }
        if beyond or old.damage is not None or (row.is_lease_whole and row.head_seq > last):
            damage.append(
                Damage(
                    "gap",
                    f"event {last + 1} of session {session_id} is damaged or missing; {len(beyond)} rows "
                    f"with events behind it were found and left in the old file",
                    last + 1,
                )
            )
        return LogReport(session_id, last - facts.first_seq + 1, last, tuple(damage))

    return old.read(f"copy session {session_id}", work)


def _session(source: sqlite3.Connection, name: bytes, key: int) -> SessionRow:
    """Return the rows of a session and of its lease, with blanks for what cannot be read."""
    blank = (key, name, 0, None, "[]", 1, GENESIS, b"")
    found = next(readable(source, _SESSION, key), blank)
    lease = next(readable(source, _LEASE, key), (None, None, 0, 0, 0, b""))
    row = SessionRow(*found, *lease)  # Damaged values do not match the checksums.
    return row if row.session_id == name else SessionRow(*blank, *lease)


def _guessed(source: sqlite3.Connection, row: SessionRow) -> Facts:
    """Work out where the events of a session begin whose own row is damaged."""
    seq, _, _, payload = next(readable(source, events.READ, row.key, 0), (0, 0, b"", b""))
    first = seq + 1 - len(unpack(payload) or ()) if isinstance(seq, int) and seq else 1
    anchor = row.anchor if first > 1 and is_id(row.anchor) else GENESIS
    return Facts(row.session_id, 0, None, "[]", first, anchor)


def _write(
    source: sqlite3.Connection, target: sqlite3.Connection, row: SessionRow, key: int, facts: Facts
) -> int:
    """Write a session's rows as far as they are whole; return the number of its last event."""
    last, previous = facts.first_seq - 1, facts.anchor
    for query in (events.READ, _BY_POSITION):
        for found in readable(source, query, row.key, last):
            each = Row(*found)
            if verified(row.id, previous, last, each) is None:
                break
            events.insert(target, key, each)
            last, previous = each.seq, each.checksum
    for seq, payload in reversed(list(snapshots.stored(source, row))):
        if payload is not None and facts.first_seq - 1 <= seq <= last:
            snapshots.put(target, key, row.id, seq, payload)
    note = notes.stored(source, row)[1]
    if note is not None:
        notes.put(target, key, row.id, note)
    return last

"""The table `events`: appending rows and reading them, each one verified.

An append touches no row but the new ones, so its cost does not depend on what is there. Reading goes
through the index `events_by_session`, some rows at a time: a reader that pauses between two events holds
neither a lock nor a place in the WAL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from treenail.errors import LogDamagedError, LogError, SessionNotFoundError
from treenail.log import rules
from treenail.log.base import Lease
from treenail.log.event import Draft, Envelope, chain_checksum
from treenail.log.rows import Row, verified
from treenail.log.sqlite import sessions
from treenail.log.sqlite.database import Database
from treenail.log.sqlite.sessions import SessionRow, is_id

_INSERT = "INSERT INTO events (session_key, seq, at_us, checksum, payload) VALUES (?, ?, ?, ?, ?)"
_WRITER_AND_HEAD = """
SELECT s.key, s.anchor, s.first_seq, l.epoch, l.owner, l.head_seq, e.seq, e.checksum
FROM sessions AS s
JOIN leases AS l ON l.session_key = s.key
LEFT JOIN events AS e
    ON e.session_key = s.key AND e.seq = (SELECT max(seq) FROM events WHERE session_key = s.key)
WHERE s.session_id = ?
"""
READ = """
SELECT seq, at_us, checksum, payload FROM events INDEXED BY events_by_session
WHERE session_key = ? AND seq > ? ORDER BY seq
"""
_LAST_UPTO = """
SELECT seq, checksum FROM events WHERE session_key = ? AND seq <= ? ORDER BY seq DESC LIMIT 1
"""
_UNKNOWN = 1 << 63
"""More than any event's number."""
_CHUNK_ROWS = 512
_CHUNK_BYTES = 4 * 1024 * 1024


def insert(connection: sqlite3.Connection, key: int, row: Row) -> None:
    """Write one row of a session."""
    connection.execute(_INSERT, (key, *row))


def append(
    connection: sqlite3.Connection,
    lease: Lease,
    parts: Sequence[tuple[Sequence[Draft], bytes]],
    expected_seq: int,
    where: object,
) -> None:
    """Write packed events behind a session's end, if the writer counts and expects that end."""
    session_id = lease.session_id
    found = connection.execute(_WRITER_AND_HEAD, (session_id.bytes,)).fetchone()
    if found is None:
        sessions.find(connection, session_id, where)
        raise sqlite3.DatabaseError(f"the row of the lease on session {session_id} is missing")
    key, anchor, first, epoch, owner, witnessed, seq, checksum = found
    rules.check_writer(lease, rules.LeaseState(epoch, owner))
    if seq is None:
        seq, checksum = first - 1, anchor
    if seq < witnessed:
        raise sqlite3.DatabaseError(
            f"session {session_id} had {witnessed} events, and its index now leads to {seq}"
        )
    rules.check_head(lease, expected_seq=expected_seq, head=seq)
    for part, payload in parts:
        for draft in part:
            seq += 1
            checksum = chain_checksum(checksum, session_id, seq, draft)
        insert(connection, key, Row(seq, part[-1].at_us, checksum, payload))


def place_before(connection: sqlite3.Connection, row: SessionRow, seq: int) -> tuple[int, bytes]:
    """Return the number and the checksum of the last event at the end of a row and not behind `seq`."""
    found = connection.execute(_LAST_UPTO, (row.key, seq)).fetchone() if seq >= row.first_seq else None
    return (row.first_seq - 1, row.anchor) if found is None else found


def next_row(connection: sqlite3.Connection, row: SessionRow, after: int) -> Row | None:
    """Return the row that holds event `after + 1`."""
    found = connection.execute(READ, (row.key, after)).fetchone()
    return None if found is None else Row(*found)


def read(database: Database, row: SessionRow, after: int, upto: int | None) -> Iterator[Envelope]:
    """Yield the events with `after < seq <= upto`, in order, each one verified."""
    for events in read_rows(database, row, after, upto):
        for event in events:
            if event.seq > after and (upto is None or event.seq <= upto):
                yield event


def read_rows(
    database: Database, row: SessionRow, after: int, upto: int | None
) -> Iterator[Sequence[Envelope]]:
    """Yield the events of one row after the other, beginning with the row that holds `after + 1`."""
    head = _newest(database, row)
    last = head if upto is None else min(upto, head)
    if max(after, row.first_seq - 1) >= last:
        return
    start, previous = _start(database, row, after)
    seq = start
    while seq < last:
        stored, trouble = _chunk(database, row, seq, last)
        for each in stored:
            events = verified(row.id, previous, seq, each)
            if events is None:
                break
            seq, previous = each.seq, each.checksum
            yield events
        else:
            if stored and trouble is None:
                continue
        _refuse_if_changed(database, row, seq)
        if seq == start >= row.first_seq:
            # The checksum that we started from may be the damaged part: the chain from the beginning tells.
            yield from (each for each in read_rows(database, row, 0, upto) if each[-1].seq > after)
            return
        raise LogDamagedError(
            f"event {seq + 1} of session {row.id} in {database.path} is damaged or missing"
            f"{'' if trouble is None else f' ({trouble})'}; every event up to {seq} is whole and readable, "
            f"and nothing was deleted; SqliteLog.salvage(damaged, into) copies what is whole into a new file",
            last_good_seq=seq,
        )


def _newest(database: Database, row: SessionRow) -> int:
    """Return the newest event's number: by the index, but no less than the lease row remembers."""
    witnessed = row.head_seq if row.is_lease_whole else 0
    for _ in range(2):
        # SQLite may refuse a damaged page beside this session's own once, and pass over it the next time.
        try:
            found = database.read("find the newest event", lambda db: sessions.index_head(db, row))
        except LogDamagedError:
            continue
        return max(found, witnessed)
    return _UNKNOWN  # Reading comes to the damage, and does not take what is before it for everything.


def _start(database: Database, row: SessionRow, after: int) -> tuple[int, bytes]:
    """Return the number and the checksum of the event from which on rows are verified."""
    try:
        seq, checksum = database.read("find an event", lambda db: place_before(db, row, after))
    except LogDamagedError:
        return row.first_seq - 1, row.anchor
    return (seq, checksum) if type(seq) is int and is_id(checksum) else (row.first_seq - 1, row.anchor)


def _chunk(
    database: Database, row: SessionRow, after: int, last: int
) -> tuple[list[Row], LogDamagedError | None]:
    """Fetch the next rows, and the damage that ended them early if there was any."""
    rows: list[Row] = []

    def work(connection: sqlite3.Connection) -> None:
        rows.clear()
        size = 0
        for found in connection.execute(READ, (row.key, after)):
            rows.append(Row(*found))
            size += len(rows[-1].payload) if type(rows[-1].payload) is bytes else 0
            if (
                (type(rows[-1].seq) is int and rows[-1].seq >= last)
                or len(rows) >= _CHUNK_ROWS
                or size >= _CHUNK_BYTES
            ):
                break

    try:
        database.read("read events", work)
    except LogDamagedError as error:
        return rows, error
    return rows, None


def _refuse_if_changed(database: Database, row: SessionRow, seq: int) -> None:
    """Refuse to call it damage if the events were deleted while they were being read."""
    now = database.read("look again", lambda connection: sessions.select(connection, row.id))
    if now is None or now.key != row.key:
        raise SessionNotFoundError(
            f"session {row.id} was erased from {database.path} while it was being read"
        )
    if now.first_seq > row.first_seq and now.first_seq > seq + 1:
        raise LogError(
            f"the events of session {row.id} up to {now.first_seq - 1} were pruned while they were being "
            f"read; begin again from its stored snapshot"
        )

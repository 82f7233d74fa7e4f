"""A log in one SQLite file: durable, shared by processes, readable after damage.

Theory of operation
-------------------
**Writing.** An append is one transaction that checks the writer's epoch and the
session's head, then inserts, then commits (`database.py`). Mostly it is a single
statement: where a session ends is remembered from the append before, and the row is
inserted behind that end if the file still says that it is one, and that the writer is
the one that counts. If not, both are looked up again. With
`synchronous="FULL"` the events are on the disk when the call returns; with
`"NORMAL"` they survive the death of the process but not a power cut. An append
touches no row but the new ones, so its cost does not depend on what is there.

The events of an append share a row (`rows.py`), which has the number and the checksum
of the last of them. They are packed before the transaction begins.

**Damage.** SQLite does not checksum its pages, so the log does it for its rows:
each event's checksum is chained to its predecessor's, and the rows of sessions,
leases and snapshots carry one of their own. Reading goes through the index
`events_by_session` and verifies every event; where the index leads astray, the
table itself is scanned in the order of positions. Events that an index lost
without a trace are noticed because the lease row remembers, at every heartbeat
and when it is given back, how far the session had come. A file whose structure
is damaged is opened for reading only: nothing is repaired in place, nothing is
deleted, and `salvage` copies what is whole into a new file.

**Erasing.** `secure_delete` overwrites deleted rows, but not the copies of them
that rebalancing has left in the gaps of other pages. So after a deletion the
file is rebuilt (`VACUUM`) and the WAL is emptied. The deletion itself notes, in
the table `scrubs`, that this is still to be done.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self
from uuid import UUID

from treenail.clock import Clock, SystemClock
from treenail.errors import (
    LogBusyError,
    LogDamagedError,
    LogError,
    SessionNotFoundError,
    StaleWriterError,
    UsageError,
)
from treenail.log import rules
from treenail.log.base import DEFAULT_LEASE_SECONDS, Finding, Lease, LogReport, StoredSnapshot
from treenail.log.database import Database, refuse_if_open_here, size_of, still_in_use
from treenail.log.event import (
    GENESIS,
    Draft,
    Envelope,
    SessionInfo,
    chained,
    from_microseconds,
    to_microseconds,
)
from treenail.log.lease import LeaseKeeper
from treenail.log.repeats import REACH, with_repeats
from treenail.log.rows import EventRow, first_of, pack, packed, verified
from treenail.log.salvage import Found, Place, Value, Wreck

# --- the queries -------------------------------------------------------------------------------------

INSERT_SESSION = """
INSERT INTO sessions (session_id, created_us, parent_id, tags, first_seq, anchor, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
INSERT_LEASE = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)"

_SESSION_COLUMNS = """
    s.key, s.session_id, s.created_us, s.parent_id, s.tags, s.first_seq, s.anchor, s.checksum,
    l.epoch, l.owner, l.ttl_us, l.expires_us, l.head_seq, l.checksum
"""
FIND_SESSION = f"""
SELECT {_SESSION_COLUMNS}
FROM sessions AS s LEFT JOIN leases AS l ON l.session_key = s.key WHERE s.session_id = ?
"""
# The same past the index on session_id, in case it is the index that is damaged.
SCAN_FOR_SESSION = f"""
SELECT {_SESSION_COLUMNS}
FROM sessions AS s NOT INDEXED LEFT JOIN leases AS l ON l.session_key = s.key WHERE s.session_id = ?
"""
ALL_SESSIONS = f"""
SELECT {_SESSION_COLUMNS}
FROM sessions AS s NOT INDEXED LEFT JOIN leases AS l ON l.session_key = s.key ORDER BY s.created_us, s.key
"""
INDEXED_SESSION_KEYS = "SELECT session_id, key FROM sessions ORDER BY session_id"
HEAD = "SELECT max(seq) FROM events WHERE session_key = ?"
SCAN_FOR_HEAD = "SELECT max(seq) FROM events NOT INDEXED WHERE session_key = ?"
LAST_USED = "SELECT at_us FROM events WHERE session_key = ? ORDER BY seq DESC LIMIT 1"
WRITER_AND_HEAD = """
SELECT s.key, s.anchor, s.first_seq, l.epoch, l.owner, l.head_seq, e.seq, e.checksum
FROM sessions AS s
JOIN leases AS l ON l.session_key = s.key
LEFT JOIN events AS e
    ON e.session_key = s.key AND e.seq = (SELECT max(seq) FROM events WHERE session_key = s.key)
WHERE s.session_id = ?
"""
UPDATE_LEASE = """
UPDATE leases SET epoch = ?, owner = ?, ttl_us = ?, expires_us = ?, head_seq = ?, checksum = ?
WHERE session_key = ?
"""
INSERT_EVENT = """
INSERT INTO events (session_key, seq, at_us, type, turn_id, run_id, trace_id, rolled_back, checksum, payload)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
# Checksums are chained, so the newest event has the one that is remembered only if the session ends with it.
# Otherwise, or if the writer is not the one that counts, the key is NULL and nothing is inserted.
CONTINUE = """
INSERT OR IGNORE INTO events
    (session_key, seq, at_us, type, turn_id, run_id, trace_id, rolled_back, checksum, payload)
VALUES (
    (
        SELECT session_key FROM leases WHERE session_key = ? AND epoch = ? AND owner = ?
        AND ? = (
            SELECT checksum FROM events WHERE session_key = leases.session_key ORDER BY seq DESC LIMIT 1
        )
    ),
    ?, ?, ?, ?, ?, ?, ?, ?, ?
)
"""
_EVENT_COLUMNS = "position, seq, at_us, type, turn_id, run_id, trace_id, rolled_back, checksum, payload"
READ_BY_SEQ = f"""
SELECT {_EVENT_COLUMNS} FROM events INDEXED BY events_by_session
WHERE session_key = ? AND seq > ? ORDER BY seq
"""
READ_BY_POSITION = f"""
SELECT {_EVENT_COLUMNS} FROM events NOT INDEXED
WHERE position > ? AND session_key = ? ORDER BY position
"""
ROW_UPTO = """
SELECT position, seq, checksum FROM events WHERE session_key = ? AND seq <= ? ORDER BY seq DESC LIMIT 1
"""
PAYLOAD_AT = "SELECT rolled_back, payload FROM events WHERE session_key = ? AND seq = ?"
SCAN_FOR_PAYLOAD = "SELECT rolled_back, payload FROM events NOT INDEXED WHERE session_key = ? AND seq = ?"
ABBREVIATED_AFTER = """
SELECT position, seq, payload FROM events
WHERE session_key = ? AND seq > ? AND seq <= ? AND rolled_back IN (2, 3)
"""
WRITE_OUT = "UPDATE events SET payload = ?, rolled_back = rolled_back - 2 WHERE position = ?"
CUT = "UPDATE events SET payload = ?, rolled_back = ? WHERE position = ?"
ROWS_OF_SESSION = "SELECT count(*) FROM events NOT INDEXED WHERE session_key = ?"
PUT_SNAPSHOT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)"
FORGET_SNAPSHOTS = """
DELETE FROM snapshots WHERE session_key = ? AND seq NOT IN
    (SELECT seq FROM snapshots WHERE session_key = ? ORDER BY seq DESC LIMIT ?)
"""
SNAPSHOT_SEQS = "SELECT seq FROM snapshots WHERE session_key = ? ORDER BY seq DESC"
SNAPSHOT_AT = "SELECT checksum, payload FROM snapshots WHERE session_key = ? AND seq = ?"
PRUNE_EVENTS = "DELETE FROM events WHERE session_key = ? AND seq <= ?"
PRUNE_SNAPSHOTS = "DELETE FROM snapshots WHERE session_key = ? AND seq < ?"
MOVE_FIRST = "UPDATE sessions SET first_seq = ?, anchor = ?, checksum = ? WHERE key = ?"
ERASE = (
    "DELETE FROM events WHERE session_key = ?",
    "DELETE FROM snapshots WHERE session_key = ?",
    "DELETE FROM leases WHERE session_key = ?",
    "DELETE FROM sessions WHERE key = ?",
)
NOTE_SCRUB = "INSERT INTO scrubs VALUES (?)"
PENDING_SCRUBS = "SELECT digest FROM scrubs"
SCRUBS_DONE = "DELETE FROM scrubs WHERE rowid <= ?"
LAST_SCRUB = "SELECT max(rowid) FROM scrubs"

_UNKNOWN_HEAD = 1 << 63
"""More than any event's number."""
_MOST_TAILS = 64
"""How many sessions' ends are remembered."""
_CHUNK_ROWS = 512
_CHUNK_BYTES = 4 * 1024 * 1024


class _Row(NamedTuple):
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
    lease_checksum: bytes

    @property
    def lease(self) -> rules.LeaseState:
        return rules.LeaseState(self.epoch or 0, self.owner, self.ttl_us, self.expires_us)

    @property
    def facts(self) -> _Facts:
        return _Facts(
            self.session_id, self.created_us, self.parent_id, self.tags, self.first_seq, self.anchor
        )

    @property
    def is_session_whole(self) -> bool:
        return self.checksum == self.facts.checksum

    @property
    def is_lease_whole(self) -> bool:
        return self.epoch is not None and self.lease_checksum == _lease_checksum(
            self.session_id, self.lease, self.head_seq
        )


class _Tail(NamedTuple):
    """Where a session ends."""

    key: int
    seq: int
    checksum: bytes


def _digest(*parts: object) -> bytes:
    # repr puts quotes around texts and bytes, so no two different rows share one spelling.
    return blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _is_id(value: object) -> bool:
    return type(value) is bytes and len(value) == 16


def _name(session_id: bytes) -> str:
    """Spell a stored session id, whatever damage has made of it."""
    return str(UUID(bytes=session_id)) if _is_id(session_id) else repr(session_id)


class _Facts(NamedTuple):
    """The columns of a session that its checksum covers."""

    session_id: bytes
    created_us: int
    parent_id: bytes | None
    tags: str
    first_seq: int
    anchor: bytes

    @property
    def checksum(self) -> bytes:
        return _digest("session", *self)


def _lease_checksum(session_id: bytes, state: rules.LeaseState, head_seq: int) -> bytes:
    return _digest("lease", session_id, *state, head_seq)


def _snapshot_checksum(session_id: UUID, seq: int, payload: bytes) -> bytes:
    digest = blake2b(b"snapshot" + session_id.bytes + seq.to_bytes(8, "big"), digest_size=16)
    digest.update(payload)
    return digest.digest()


def _scrub_digest(session_id: UUID) -> bytes:
    # Not the id itself: a note about an erased session must not be a trace of it.
    return blake2b(session_id.bytes, digest_size=8, person=b"treenail-scrub").digest()


def _payload_at(connection: sqlite3.Connection, key: int, seq: int, query: str = PAYLOAD_AT) -> bytes | None:
    """Return an event's payload if it is there and stored whole."""
    flags, payload = connection.execute(query, (key, seq)).fetchone() or (0, None)
    return payload if flags in (0, 1) and type(payload) is bytes else None


def _draft(event: Envelope) -> Draft:
    _, _, at_us, kind, payload, _, turn_id, run_id, trace_id, rolled_back = event
    return Draft(kind, payload, at_us, turn_id, run_id, trace_id, rolled_back)


def _stored(wreck: Wreck, places: Sequence[Place], seq: int) -> Iterator[tuple[Place, EventRow]]:
    """Yield the rows at these places of a wreck, whatever they hold, as rows with the number `seq`."""
    for place in places:
        found = wreck.row(place)
        if found is not None and len(found) == 11:
            yield place, (0, seq, *found[3:])  # type: ignore[misc]  # whoever verifies it looks at the types


def _insert(
    connection: sqlite3.Connection,
    key: int,
    seq: int,
    last: Draft,
    flags: int,
    payload: bytes,
    checksum: bytes,
) -> None:
    """Write a row that ends with the event `last`, whose number is `seq`."""
    kind, _, at_us, turn_id, run_id, trace_id, _ = last
    connection.execute(
        INSERT_EVENT, (key, seq, at_us, kind, turn_id, run_id, trace_id, flags, checksum, payload)
    )


class SqliteLog:
    """Keeps sessions in the SQLite file `path`, which is made if it is not there.

    `synchronous` is `"FULL"` (an append survives a power cut) or `"NORMAL"` (it survives the
    death of the process, and costs a tenth). `busy_timeout_s` is how long to wait for other
    processes before `LogBusyError`. With `read_only=True` nothing can be written, and a damaged
    file can be read as far as it is whole. `heartbeat=False` leaves renewing leases to the caller.

    A file whose structure is damaged is opened for reading only; `findings` says what is wrong,
    and every write raises `LogDamagedError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        busy_timeout_s: float = 30.0,
        clock: Clock | None = None,
        read_only: bool = False,
        heartbeat: bool = True,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise UsageError(f'synchronous is "FULL" or "NORMAL", not {synchronous!r}')
        if str(path) in ("", ":memory:"):
            raise UsageError(
                "a SqliteLog needs a file; for a log in memory use treenail.log.memory.MemoryLog"
            )
        self.path = Path(path).absolute()
        """The database file; `-wal` and `-shm` beside it belong to it."""
        self._clock = clock or SystemClock()
        self._database = Database(
            self.path, synchronous=synchronous, busy_timeout_s=busy_timeout_s, read_only=read_only
        )
        self._keeper = LeaseKeeper(self.renew, beat=heartbeat)
        self._tails: dict[int, _Tail] = {}
        self._database.run("open the log", lambda _: None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found wrong with the file as a whole when it was opened; empty if nothing was."""
        return self._database.findings

    def __repr__(self) -> str:
        return f"SqliteLog({str(self.path)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sessions ------------------------------------------------------------------------------------

    def create(
        self,
        session_id: UUID,
        *,
        created_at: datetime,
        parent_id: UUID | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Make an empty session. Raises `UsageError` if it exists."""
        rules.check_created(created_at, tags)
        text = json.dumps(list((tags or {}).items()), ensure_ascii=False)
        parent = None if parent_id is None else parent_id.bytes
        facts = _Facts(session_id.bytes, to_microseconds(created_at), parent, text, 1, GENESIS)

        def work(connection: sqlite3.Connection) -> None:
            if self._select(connection, session_id) is not None:
                raise UsageError(
                    f"session {session_id} exists already in {self.path}; open it, or take a new id"
                )
            self._insert_session(connection, facts)

        self._database.write(f"create session {session_id}", work)

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        now_us = self._now_us()

        def work(connection: sqlite3.Connection) -> SessionInfo:
            row = self._whole(self._find(connection, session_id))
            return self._describe(connection, row, now_us)

        return self._database.run(f"describe session {session_id}", work)

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        now_us = self._now_us()

        def work(connection: sqlite3.Connection) -> Sequence[SessionInfo]:
            rows = self._all_rows(connection)
            return [
                self._describe(connection, row, now_us)
                for row in rows
                if parent_id is None or row.parent_id == parent_id.bytes
            ]

        return self._database.run("list the sessions", work)

    # --- leases --------------------------------------------------------------------------------------

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        The holder is gone when its lease has expired, or when it was a process of this machine
        that no longer runs. Raises `LeaseHeldError` while it lives.
        """

        def work(connection: sqlite3.Connection) -> Lease:
            row = self._whole(self._find(connection, session_id))
            state = rules.grant(session_id, row.lease, owner=owner, ttl_s=ttl_s, now_us=self._now_us())
            return self._store_lease(connection, row, state)

        lease = self._database.write(f"acquire session {session_id}", work)
        self._keeper.hold(lease)
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""

        def work(connection: sqlite3.Connection) -> Lease:
            row = self._whole(self._find(connection, lease.session_id))
            rules.check_writer(lease, row.lease)
            state = row.lease._replace(expires_us=self._now_us() + row.ttl_us)
            return self._store_lease(connection, row, state)

        return self._database.write(f"renew the lease on session {lease.session_id}", work)

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        self._keeper.drop(lease)

        def work(connection: sqlite3.Connection) -> None:
            row = self._select(connection, lease.session_id)
            if row is not None and row.epoch == lease.epoch and row.owner == lease.owner:
                self._store_lease(connection, self._whole(row), rules.LeaseState(epoch=lease.epoch))

        self._database.write(f"release session {lease.session_id}", work)

    # --- events --------------------------------------------------------------------------------------

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> Sequence[Envelope]:
        """Append all drafts after `expected_seq`, in one transaction, or none.

        When this returns, the events are on the disk (`"FULL"`) or with the operating system
        (`"NORMAL"`). Raises `StaleWriterError` if the lease was taken over or if `expected_seq` is
        not the head. After an interrupt, `info().head` says whether the append had been completed.
        """
        rules.check_drafts(drafts)
        if self._keeper.is_lost(lease):
            raise StaleWriterError(
                f"the lease {lease.epoch} on session {lease.session_id} was taken over: a heartbeat was "
                f"refused; nothing was written; open the session again"
            )
        number = lease.session_id.int
        rows = packed(drafts)
        with self._database.lock:
            # Taken away until the commit, so that nothing is believed after a failure.
            tail = self._tails.pop(number, None)
            written = None
            if tail is not None and tail.seq == expected_seq and len(rows) == 1:
                written = self._continue(lease, tail, rows[0])
            batch, tail = written or self._look_and_append(lease, rows, expected_seq)
            if len(self._tails) >= _MOST_TAILS:
                self._tails.clear()
            self._tails[number] = tail
        return batch

    def _continue(
        self, lease: Lease, tail: _Tail, row: tuple[Sequence[Draft], int, bytes]
    ) -> tuple[Sequence[Envelope], _Tail] | None:
        """Write a row behind the end that is remembered; None if the file does not say that it is one."""
        (key, seq, previous), (part, flags, payload) = tail, row
        session_id = lease.session_id
        batch = chained(session_id, previous, seq + 1, part)
        _, seq, at_us, kind, _, checksum, turn_id, run_id, trace_id, _ = batch[-1]
        condition = (key, lease.epoch, lease.owner, previous)
        values = (*condition, seq, at_us, kind, turn_id, run_id, trace_id, flags, checksum, payload)
        if not self._database.write_at_once("append to session", CONTINUE, values, session_id):
            return None
        return batch, _Tail(key, seq, checksum)

    def _look_and_append(
        self, lease: Lease, rows: Sequence[tuple[Sequence[Draft], int, bytes]], expected_seq: int
    ) -> tuple[Sequence[Envelope], _Tail]:
        """Write rows behind the end that the file says, if that is the one that the writer expects."""

        def work(connection: sqlite3.Connection) -> tuple[Sequence[Envelope], _Tail]:
            key, seq, checksum = self._find_tail(connection, lease)
            rules.check_head(lease, expected_seq=expected_seq, head=seq)
            batch: list[Envelope] = []
            for part, flags, stored in rows:
                batch += chained(lease.session_id, checksum, seq + 1, part)
                seq, checksum = seq + len(part), batch[-1].checksum
                _insert(connection, key, seq, part[-1], flags, stored, checksum)
            return batch, _Tail(key, seq, checksum)

        return self._database.write("append to session", work, lease.session_id)

    def _find_tail(self, connection: sqlite3.Connection, lease: Lease) -> _Tail:
        """Look up where a session ends, if its writer is still the one that counts."""
        session_id = lease.session_id
        found = connection.execute(WRITER_AND_HEAD, (session_id.bytes,)).fetchone()
        if found is None:
            self._find(connection, session_id)
            raise self._database.damaged(f"the row of the lease on session {session_id} is missing")
        key, anchor, first, epoch, owner, witnessed, head, checksum = found
        rules.check_writer(lease, rules.LeaseState(epoch, owner))
        if head is None:
            head, checksum = first - 1, anchor
        if head < witnessed:
            raise self._database.damaged(
                f"session {session_id} had {witnessed} events, and its index now leads to {head}"
            )
        return _Tail(key, head, checksum)

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, each one verified.

        It yields what is in the log when reading begins. At the first damaged event it raises
        `LogDamagedError`; everything before was yielded. Raises `SessionNotFoundError`, at once or
        when the session is erased meanwhile.
        """
        row = self._database.run(
            f"read session {session_id}", lambda connection: self._find(connection, session_id)
        )
        row = self._believable(row)
        events = self._read(session_id, row, after, upto)
        if self._database.damage is not None:
            return self._read_damaged(session_id, row, events, after, upto)
        return events

    def _believable(self, row: _Row) -> _Row:
        """Find out where a session begins if the row that says so is damaged: the events can tell."""
        if row.is_session_whole:
            return row
        try:
            stored = self._database.run(
                "find the first event",
                lambda connection: connection.execute(READ_BY_SEQ, (row.key, -1)).fetchone(),
            )
        except LogDamagedError:
            stored = None
        first = (None if stored is None else first_of(stored)) or 1
        anchor = row.anchor if type(row.anchor) is bytes and first != 1 else GENESIS
        return row._replace(first_seq=first, anchor=anchor)

    def _read_damaged(
        self, session_id: UUID, row: _Row, events: Iterator[Envelope], after: int, upto: int | None
    ) -> Iterator[Envelope]:
        """Yield what there is, and do not let it pass for everything."""
        seq = max(after, row.first_seq - 1)
        for event in events:
            seq = event.seq
            yield event
        if upto is None or seq < upto:
            raise LogDamagedError(
                f"session {session_id} in {self.path} can be read up to event {seq}, and newer events may "
                f"be lost: {self._database.damage}; nothing was deleted; SqliteLog.salvage(damaged, into) "
                f"copies what is whole into a new file",
                last_good_seq=seq,
            )

    def _read(self, session_id: UUID, row: _Row, after: int, upto: int | None) -> Iterator[Envelope]:
        for events in self._read_rows(session_id, row, after, upto):
            for event in events:
                if event.seq > after and (upto is None or event.seq <= upto):
                    yield event

    def _read_rows(
        self, session_id: UUID, row: _Row, after: int, upto: int | None, notes: list[Finding] | None = None
    ) -> Iterator[list[Envelope]]:
        """Yield the events of one row after the other, beginning with the row that holds `after + 1`."""
        head = self._head(row)
        last = head if upto is None else min(upto, head)
        if max(after, row.first_seq - 1) >= last:
            return
        anchor = 0, row.first_seq - 1, row.anchor
        position, start, previous = (self._place(row, after) if after >= row.first_seq else None) or anchor
        seq = start
        is_anchored = seq < row.first_seq
        by_index = True
        passed: dict[int, bytes | None] = {}

        def source(back: int) -> bytes | None:
            """Return what the event at hand repeats: mostly it has just been passed."""
            wanted = seq + 1 - back
            return passed[wanted] if wanted in passed else self._whole_payload(row, wanted)

        while seq < last:
            rows, trouble = self._chunk(row, seq, last, position, by_index=by_index)
            good = 0
            for stored in rows:
                if not by_index and type(stored[1]) is int and stored[1] <= seq:
                    position = stored[0]
                    good += 1
                    continue
                events = verified(session_id, previous, seq + 1, stored, source)
                if events is None:
                    break
                position, previous, seq = stored[0], stored[8], stored[1]
                passed[seq] = events[0].payload if stored[7] in (0, 1) else None
                if len(passed) > REACH:
                    del passed[next(iter(passed))]
                good += 1
                yield events
                if seq >= last:
                    return
            if good == len(rows) > 0 and trouble is None:
                continue
            if by_index:
                self._refuse_if_changed(row, session_id, seq)
                # The index or a row is damaged. The table, in the order of positions, has the last word.
                by_index = False
                if notes is not None:
                    notes.append(
                        Finding("unreadable", f"the index does not lead to event {seq + 1}", seq + 1)
                    )
            elif not is_anchored and seq == start:
                # Nothing was verified yet: the checksum that we started from may be the damaged part.
                # Walking there from the beginning either finds the true one or the earlier damage.
                position, seq, previous = anchor
                is_anchored = by_index = True
            else:
                raise self._event_damaged(session_id, seq, trouble)

    def _chunk(
        self, row: _Row, after: int, last: int, position: int, *, by_index: bool
    ) -> tuple[list[EventRow], LogDamagedError | None]:
        """Fetch the next rows, and the damage that ended them early if there was any.

        The statement is finished before anything is handed out: a reader that pauses between
        two events holds neither our lock nor a place in the WAL.
        """
        rows: list[EventRow] = []

        def work(connection: sqlite3.Connection) -> None:
            rows.clear()
            size = 0
            if by_index:
                cursor = connection.execute(READ_BY_SEQ, (row.key, after))
            else:
                cursor = connection.execute(READ_BY_POSITION, (position, row.key))
            try:
                for stored in cursor:
                    rows.append(stored)
                    size += len(stored[9]) if type(stored[9]) is bytes else 0
                    is_last = by_index and type(stored[1]) is int and stored[1] >= last
                    if is_last or len(rows) >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
                        break
            finally:
                cursor.close()

        try:
            self._database.run("read events", work)
        except LogDamagedError as error:
            return rows, error
        return rows, None

    def _whole_payload(self, row: _Row, seq: int) -> bytes | None:
        """Return an event's payload if it is there and stored whole."""
        try:
            return self._database.run(
                "find an event", lambda connection: _payload_at(connection, row.key, seq)
            )
        except LogDamagedError:
            pass
        try:
            return self._database.run(
                "find an event", lambda connection: _payload_at(connection, row.key, seq, SCAN_FOR_PAYLOAD)
            )
        except LogDamagedError:
            return None

    def _head(self, row: _Row) -> int:
        """Return the newest event's number: by the index, but no less than the lease row remembers."""
        witnessed = row.head_seq if row.is_lease_whole else 0

        def by(query: str) -> int:
            found = self._database.run(
                "find the newest event",
                lambda connection: connection.execute(query, (row.key,)).fetchone()[0],
            )
            return max(found if type(found) is int else row.first_seq - 1, witnessed)

        for query in (HEAD, SCAN_FOR_HEAD):
            try:
                return by(query)
            except LogDamagedError:
                continue
        # Nobody knows: whoever reads comes to the damage, and does not take what is before it for everything.
        return _UNKNOWN_HEAD

    def _place(self, row: _Row, seq: int) -> tuple[int, int, bytes] | None:
        """Return position, number and checksum of the last event at the end of a row and not behind `seq`.

        From there the next row is verified. None if there is no such row, or no way to it.
        """
        try:
            found = self._database.run(
                "find an event", lambda connection: connection.execute(ROW_UPTO, (row.key, seq)).fetchone()
            )
        except LogDamagedError:
            return None
        if found is None or type(found[1]) is not int or type(found[2]) is not bytes:
            return None
        return found if found[1] >= row.first_seq else None

    def _refuse_if_changed(self, row: _Row, session_id: UUID, seq: int) -> None:
        """Tell what looks like damage from what somebody has forgotten while we were reading."""
        now = self._database.run("look again", lambda connection: self._select(connection, session_id))
        if now is None or now.key != row.key:
            raise SessionNotFoundError(
                f"session {session_id} was erased from {self.path} while it was being read"
            )
        if now.first_seq > row.first_seq and now.first_seq > seq + 1:
            raise LogError(
                f"the events of session {session_id} up to {now.first_seq - 1} were pruned while they were "
                f"being read; begin again from its stored snapshot"
            )

    def _event_damaged(self, session_id: UUID, seq: int, cause: LogError | None) -> LogDamagedError:
        why = f" ({cause})" if cause is not None else ""
        return LogDamagedError(
            f"event {seq + 1} of session {session_id} in {self.path} is damaged or missing{why}; "
            f"every event up to {seq} is whole and readable, and nothing was deleted; "
            f"SqliteLog.salvage(damaged, into) copies what is whole into a new file",
            last_good_seq=seq,
        )

    # --- stored snapshots ----------------------------------------------------------------------------

    def put_snapshot(self, lease: Lease, seq: int, payload: bytes) -> None:
        """Keep a snapshot of the folded state after event `seq`, in place of older ones.

        The one before is kept as well, to fall back on if this one is damaged.
        """
        checksum = _snapshot_checksum(lease.session_id, max(seq, 0), payload)

        def work(connection: sqlite3.Connection) -> None:
            row = self._writer(connection, lease)
            head = self._index_head(connection, row)
            rules.check_snapshot(lease.session_id, seq, first=row.first_seq, head=head, payload=payload)
            connection.execute(PUT_SNAPSHOT, (row.key, seq, checksum, payload))
            connection.execute(FORGET_SNAPSHOTS, (row.key, row.key, rules.SNAPSHOTS_KEPT))
            self._store_lease(connection, row, row.lease)

        self._database.write(f"store a snapshot of session {lease.session_id}", work)

    def latest_snapshot(self, session_id: UUID) -> StoredSnapshot | None:
        """Return the newest stored snapshot that is whole, or None. A damaged one is passed over."""

        def work(connection: sqlite3.Connection) -> StoredSnapshot | None:
            row = self._find(connection, session_id)
            for seq, payload in self._snapshots(connection, row):
                if payload is not None:
                    return StoredSnapshot(session_id, seq, payload)
            return None

        return self._database.run(f"read the snapshot of session {session_id}", work)

    def _snapshots(self, connection: sqlite3.Connection, row: _Row) -> Iterator[tuple[int, bytes | None]]:
        """Yield the stored snapshots, newest first, with None for one that is damaged."""
        if self._database.version < 2 and connection.execute("PRAGMA user_version").fetchone()[0] < 2:
            # Asked again: a writer may have brought up to date what was opened here for reading.
            return
        try:
            seqs = connection.execute(SNAPSHOT_SEQS, (row.key,)).fetchall()
        except sqlite3.DatabaseError as error:
            self._database.raise_unless_damage(error)
            return
        session_id = UUID(bytes=row.session_id)
        for (seq,) in seqs:
            try:
                found = connection.execute(SNAPSHOT_AT, (row.key, seq)).fetchone()
            except sqlite3.DatabaseError as error:
                self._database.raise_unless_damage(error)
                found = None
            whole = (
                found is not None
                and type(seq) is int
                and type(found[1]) is bytes
                and 0 <= seq < 1 << 63
                and _snapshot_checksum(session_id, seq, found[1]) == found[0]
            )
            yield seq if type(seq) is int else 0, found[1] if whole else None

    # --- forgetting ----------------------------------------------------------------------------------

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Forget the events up to `upto`; a stored snapshot must cover them. Returns how many went.

        No byte of a pruned event stays in the file: it is rebuilt, which takes time in proportion to
        its size. If that last part fails, the error says so, and `scrub()` repeats it.
        """

        def work(connection: sqlite3.Connection) -> int:
            row = self._writer(connection, lease)
            covered = next((seq for seq, data in self._snapshots(connection, row) if data is not None), None)
            rules.check_prune(lease.session_id, upto=upto, covered=covered)
            if upto < row.first_seq:
                return 0
            self._write_out(connection, row, upto)
            anchor = self._cut(connection, row, upto)
            gone = upto + 1 - row.first_seq
            row = row._replace(first_seq=upto + 1, anchor=anchor)
            connection.execute(PRUNE_EVENTS, (row.key, upto))
            connection.execute(PRUNE_SNAPSHOTS, (row.key, upto))
            connection.execute(MOVE_FIRST, (row.first_seq, row.anchor, row.facts.checksum, row.key))
            self._store_lease(connection, row, row.lease)
            connection.execute(NOTE_SCRUB, (_scrub_digest(lease.session_id),))
            return gone

        gone = self._database.write(f"prune session {lease.session_id}", work)
        if gone:
            self._scrub(f"the events of session {lease.session_id} up to {upto}")
        return gone

    def _write_out(self, connection: sqlite3.Connection, row: _Row, upto: int) -> None:
        """Store the events behind a cut whole that repeat what goes."""
        for position, seq, stored in connection.execute(
            ABBREVIATED_AFTER, (row.key, upto, upto + REACH)
        ).fetchall():
            before = {back: _payload_at(connection, row.key, seq - back) for back in range(1, REACH + 1)}
            payload = with_repeats(stored, before.get)
            if payload is None:
                raise self._event_damaged(UUID(bytes=row.session_id), seq - 1, None)
            connection.execute(WRITE_OUT, (payload, position))

    def _cut(self, connection: sqlite3.Connection, row: _Row, upto: int) -> bytes:
        """Take what goes out of a row that holds something that stays; return the last checksum that goes."""
        session_id = UUID(bytes=row.session_id)
        start, previous = row.first_seq - 1, row.anchor
        found = connection.execute(ROW_UPTO, (row.key, upto)).fetchone()
        if found is not None:
            _, start, previous = found
        if start == upto:
            return previous
        stored = connection.execute(READ_BY_SEQ, (row.key, upto)).fetchone()
        events = None if stored is None else verified(session_id, previous, start + 1, stored, lambda _: None)
        if events is None or events[-1].seq <= upto:
            raise self._event_damaged(session_id, start, None)
        rest = [_draft(event) for event in events if event.seq > upto]
        flags, payload = pack(rest)
        connection.execute(CUT, (payload, flags, stored[0]))
        return events[upto - start - 1].checksum

    def erase(self, session_id: UUID) -> None:
        """Forget a session and everything in it. No byte of it stays in the file.

        Raises `LeaseHeldError` while somebody alive is writing it. The file is rebuilt, which takes
        time in proportion to its size. If that last part fails, for instance because another
        process keeps reading an old state of the file, the error says so; call it again then.
        """

        def work(connection: sqlite3.Connection) -> None:
            row = self._select(connection, session_id)
            if row is None:
                if (_scrub_digest(session_id),) in connection.execute(PENDING_SCRUBS).fetchall():
                    return
                rules.not_found(session_id, str(self.path))
            rules.refuse_if_held(session_id, row.lease, self._now_us())
            self._delete(connection, row)

        self._database.write(f"erase session {session_id}", work)
        self._scrub(f"session {session_id}")

    def keep_last(self, count: int) -> Sequence[UUID]:
        """Erase all but the `count` most recently used sessions; returns the ids of those that went.

        A session goes or stays with its children, and stays while somebody is writing any of them.
        """
        return self._erase_chosen(lambda ages: rules.beyond_last(ages, count))

    def prune_sessions(self, older_than: datetime) -> Sequence[UUID]:
        """Erase the sessions that were last used before that time; returns their ids.

        A session goes or stays with its children, and stays while somebody is writing any of them.
        """
        return self._erase_chosen(lambda ages: rules.older_than(ages, older_than))

    def scrub(self) -> None:
        """Rebuild the file and empty its WAL, so that nothing that was ever deleted is left in it.

        `erase` and `prune` do this themselves; call it to repeat it if they reported that they could not.
        """
        self._scrub("what was deleted")

    def _erase_chosen(self, choose: Callable[[Sequence[rules.Age]], Sequence[UUID]]) -> Sequence[UUID]:
        def work(connection: sqlite3.Connection) -> Sequence[UUID]:
            now_us = self._now_us()
            rows = {UUID(bytes=row.session_id): row for row in self._all_rows(connection)}
            ages = []
            for session_id, row in rows.items():
                last = connection.execute(LAST_USED, (row.key,)).fetchone()
                used_us = max(row.created_us, last[0] if last else row.created_us)
                parent_id = None if row.parent_id is None else UUID(bytes=row.parent_id)
                ages.append(rules.Age(session_id, parent_id, used_us, row.lease.is_live(now_us)))
            chosen = choose(ages)
            for session_id in chosen:
                self._delete(connection, rows[session_id])
            return chosen

        chosen = self._database.write("erase old sessions", work)
        if chosen:
            self._scrub(f"{len(chosen)} sessions")
        return chosen

    def _delete(self, connection: sqlite3.Connection, row: _Row) -> None:
        for statement in ERASE:
            connection.execute(statement, (row.key,))
        connection.execute(NOTE_SCRUB, (_scrub_digest(UUID(bytes=row.session_id)),))

    def _scrub(self, what: str) -> None:
        """Leave nothing of deleted rows in the file or in the WAL, or say that something may be left."""

        def rebuild(connection: sqlite3.Connection) -> None:
            upto = connection.execute(LAST_SCRUB).fetchone()[0]
            connection.execute("VACUUM")
            self._empty_wal(connection)
            # Only now is it true that nothing is left.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(SCRUBS_DONE, (upto or 0,))
            connection.execute("COMMIT")

        try:
            self._database.run("rebuild the file", rebuild, writes=True)
        except LogError as error:
            problem = (
                f"{what} can no longer be read from the log, but old bytes may still be in {self.path} or "
                f"its -wal: {error}; call scrub() when other readers are gone and there is room on the disk"
            )
            if isinstance(error, LogBusyError):
                raise LogBusyError(problem) from error
            raise LogError(problem) from error

    def _empty_wal(self, connection: sqlite3.Connection) -> None:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy or size_of(self._database.wal_path):
            raise still_in_use("a reader still needs what is in the WAL")

    # --- checking ------------------------------------------------------------------------------------

    def check(self, session_id: UUID) -> LogReport:
        """Verify every stored event and snapshot of a session. Never raises for damage; never deletes."""
        try:
            row = self._database.run("check", lambda connection: self._find(connection, session_id))
        except LogDamagedError as error:
            return LogReport(session_id, 0, 0, (*self.findings, Finding("unreadable", str(error))))
        findings = list(self.findings)
        if not row.is_session_whole:
            findings.append(
                Finding("checksum", f"the row of session {session_id} (time, parent, tags) is damaged")
            )
        if not row.is_lease_whole:
            findings.append(Finding("checksum", f"the row of the lease on session {session_id} is damaged"))
        row = self._believable(row)
        rows, seq = 0, row.first_seq - 1
        try:
            for events in self._read_rows(session_id, row, 0, None, notes=findings):
                rows, seq = rows + 1, events[-1].seq
        except LogDamagedError as error:
            findings.append(Finding("checksum", str(error), error.last_good_seq + 1))

        def more(connection: sqlite3.Connection) -> None:
            for place, whole in self._snapshots(connection, row):
                if whole is None:
                    findings.append(
                        Finding("snapshot", f"the stored snapshot after event {place} is damaged", place)
                    )
            extra = connection.execute(ROWS_OF_SESSION, (row.key,)).fetchone()[0] - rows
            if extra > 0:
                findings.append(
                    Finding(
                        "orphan",
                        f"{extra} more stored rows with events of session {session_id} cannot be reached",
                        seq + 1,
                    )
                )

        try:
            self._database.run("check", more)
        except LogDamagedError as error:
            findings.append(Finding("unreadable", str(error)))
        return LogReport(session_id, seq + 1 - row.first_seq, seq, tuple(findings))

    @classmethod
    def salvage(cls, damaged: str | os.PathLike[str], into: str | os.PathLike[str]) -> Sequence[LogReport]:
        """Copy everything that is whole from a damaged file into a new one; the old one stays as it is.

        It reads the file page by page, so it finds events that SQLite cannot reach any more. Returns
        one report for each session that was found, saying how far it is whole. The damaged file must
        not be open in this process, and should not be open in any other.
        """
        source, target = Path(damaged).absolute(), Path(into).absolute()
        if target.exists():
            raise UsageError(f"{target} exists already; salvage needs a new file")
        if not source.is_file():
            raise LogError(f"there is no file {source} to salvage")
        refuse_if_open_here(source)
        wreck = Wreck(source)
        try:
            found = wreck.find()
            keys = {row[1]: key for key, row in found.sessions.items()} | found.session_ids
            ids = {session_id: key for session_id, key in keys.items() if _is_id(session_id)}
            if not ids:
                raise LogDamagedError(
                    f"no session was found in {source}; it may not be a log; it was not touched"
                )
            with cls(target, heartbeat=False) as log:
                return [log._import(wreck, found, session_id, key) for session_id, key in ids.items()]
        finally:
            wreck.close()

    def _import(self, wreck: Wreck, found: Found, name: object, key: int) -> LogReport:
        """Write one session from a wreck, as far as it is whole."""
        assert isinstance(name, bytes)
        session_id = UUID(bytes=name)
        findings: list[Finding] = []
        numbered = found.events.get(key, {})
        order = sorted(numbered.keys() | found.indexed.get(key, {}).keys())
        used: set[Place] = set()
        lease = found.leases.get(key, (0, None, 0, 0, 0, b""))
        blank: tuple[Value, ...] = (key, name, 0, None, "[]", 1, GENESIS, b"")
        row = _Row(*found.sessions.get(key, blank), *lease)  # type: ignore[arg-type]  # verified below
        facts = row.facts
        if not row.is_session_whole or row.session_id != name:
            # What cannot be trusted is left out; the events verify themselves.
            findings.append(
                Finding("checksum", f"the row of session {session_id} (time, parent, tags) is damaged")
            )
            firsts = (
                first_of(stored) for seq in order for _, stored in _stored(wreck, found.places(key, seq), seq)
            )
            first = next((each for each in firsts if each is not None), 1)
            facts = _Facts(
                name, 0, None, "[]", first, row.anchor if first > 1 and _is_id(row.anchor) else GENESIS
            )
        if not row.is_lease_whole:
            findings.append(Finding("checksum", f"the row of the lease on session {session_id} is damaged"))
        last = facts.first_seq - 1

        def work(connection: sqlite3.Connection) -> None:
            nonlocal last
            epoch = row.lease.epoch if row.is_lease_whole else 0
            new_key = self._insert_session(connection, facts, epoch=epoch)
            last, previous = facts.first_seq - 1, facts.anchor
            passed: dict[int, bytes] = {}
            # A row is known by its last event, and only its content says with which one it begins.
            for seq in order:
                before = {last + 1 - number: payload for number, payload in passed.items()}
                for place, stored in _stored(wreck, found.places(key, seq), seq):
                    events = verified(session_id, previous, last + 1, stored, before.get)
                    if events is not None:
                        used.add(place)
                        break
                else:
                    continue
                last, previous = seq, events[-1].checksum
                passed[last] = events[-1].payload
                if len(passed) > REACH:
                    del passed[next(iter(passed))]
                part = [_draft(event) for event in events]
                _insert(connection, new_key, last, part[-1], *pack(part), previous)
            for (owner, seq), place in sorted(found.snapshots.items(), key=lambda each: each[0]):
                kept = wreck.row(place) if owner == key and facts.first_seq - 1 <= seq <= last else None
                if kept is None:
                    continue
                state = kept[3]
                if type(state) is bytes and _snapshot_checksum(session_id, seq, state) == kept[2]:
                    connection.execute(PUT_SNAPSHOT, (new_key, seq, kept[2], state))
                else:
                    findings.append(
                        Finding("snapshot", f"the stored snapshot after event {seq} is damaged", seq)
                    )

        self._database.write(f"copy session {session_id}", work)
        beyond = sum(1 for seq, places in numbered.items() if seq > last and used.isdisjoint(places))
        # An index that leads to a row that is not there any more knows of later events as well.
        is_short = any(
            seq > last and position not in found.positions
            for seq, position in found.indexed.get(key, {}).items()
        )
        if beyond or is_short or (row.is_lease_whole and row.head_seq > last):
            findings.append(
                Finding(
                    "gap",
                    f"event {last + 1} of session {session_id} is damaged or missing; {beyond} rows "
                    f"with events behind it were found and left in the old file",
                    last + 1,
                )
            )
        return LogReport(session_id, last - facts.first_seq + 1, last, tuple(findings))

    # --- rows ----------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return to_microseconds(self._clock.now())

    def _select(self, connection: sqlite3.Connection, session_id: UUID) -> _Row | None:
        found, damage = None, None
        try:
            found = connection.execute(FIND_SESSION, (session_id.bytes,)).fetchone()
        except sqlite3.DatabaseError as error:
            self._database.raise_unless_damage(error)
            damage = error
        if found is None:
            found = connection.execute(SCAN_FOR_SESSION, (session_id.bytes,)).fetchone()
        if found is None and damage is not None:
            # Damaged is not the same as not there.
            raise damage
        return None if found is None else _Row(*found)

    def _find(self, connection: sqlite3.Connection, session_id: UUID) -> _Row:
        row = self._select(connection, session_id)
        if row is None:
            rules.not_found(session_id, str(self.path))
        return row

    def _whole(self, row: _Row) -> _Row:
        if not row.is_session_whole:
            raise self._database.damaged(
                f"the row of session {_name(row.session_id)} (time, parent, tags) is damaged"
            )
        if not row.is_lease_whole:
            raise self._database.damaged(
                f"the row of the lease on session {_name(row.session_id)} is damaged"
            )
        return row

    def _all_rows(self, connection: sqlite3.Connection) -> list[_Row]:
        # Both as they are at one moment: somebody else may make a session meanwhile.
        is_own = not connection.in_transaction
        if is_own:
            connection.execute("BEGIN")
        rows = [self._whole(_Row(*found)) for found in connection.execute(ALL_SESSIONS).fetchall()]
        indexed = len(connection.execute(INDEXED_SESSION_KEYS).fetchall())
        if is_own:
            connection.execute("COMMIT")
        if indexed != len(rows):
            raise self._database.damaged("the table of sessions and its index do not hold the same sessions")
        return rows

    def _writer(self, connection: sqlite3.Connection, lease: Lease) -> _Row:
        row = self._whole(self._find(connection, lease.session_id))
        rules.check_writer(lease, row.lease)
        return row

    def _index_head(self, connection: sqlite3.Connection, row: _Row) -> int:
        head = connection.execute(HEAD, (row.key,)).fetchone()[0]
        head = row.first_seq - 1 if head is None else head
        if head < row.head_seq:
            raise self._database.damaged(
                f"session {UUID(bytes=row.session_id)} had {row.head_seq} events, and its index now leads "
                f"to {head}"
            )
        return int(head)

    def _insert_session(self, connection: sqlite3.Connection, facts: _Facts, *, epoch: int = 0) -> int:
        key = connection.execute(INSERT_SESSION, (*facts, facts.checksum)).lastrowid
        assert key is not None
        state = rules.LeaseState(epoch=epoch)
        connection.execute(INSERT_LEASE, (key, *state, 0, _lease_checksum(facts.session_id, state, 0)))
        return key

    def _store_lease(self, connection: sqlite3.Connection, row: _Row, state: rules.LeaseState) -> Lease:
        head = self._index_head(connection, row)
        checksum = _lease_checksum(row.session_id, state, head)
        connection.execute(UPDATE_LEASE, (*state, head, checksum, row.key))
        return Lease(
            UUID(bytes=row.session_id),
            state.epoch,
            state.owner or "",
            state.ttl_us / 1_000_000,
            from_microseconds(state.expires_us),
        )

    def _describe(self, connection: sqlite3.Connection, row: _Row, now_us: int) -> SessionInfo:
        head = connection.execute(HEAD, (row.key,)).fetchone()[0]
        return SessionInfo(
            UUID(bytes=row.session_id),
            from_microseconds(row.created_us),
            parent_id=None if row.parent_id is None else UUID(bytes=row.parent_id),
            tags=tuple((name, value) for name, value in json.loads(row.tags)),
            head=max(row.first_seq - 1 if head is None else head, row.head_seq),
            first=row.first_seq,
            owner=row.owner if row.lease.is_live(now_us) else None,
        )

    # --- connections and transactions ----------------------------------------------------------------

    def close(self) -> None:
        """Release the leases held through this object, and the file."""
        for lease in self._keeper.held():
            try:
                self.release(lease)
            except LogError:
                # A lease that cannot be given back expires; closing must go on.
                continue
        self._keeper.close()
        self._database.close()

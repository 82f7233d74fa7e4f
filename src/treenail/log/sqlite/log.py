"""A log in one SQLite file: durable, shared by processes, readable after damage.

Theory of operation
-------------------
**Writing.** An append is one transaction that checks the writer's epoch and the session's head, then
inserts, then commits (`database.py`, `events.py`). With `synchronous="FULL"` the events are on the disk
when the call returns; with `"NORMAL"` they survive the death of the process but not a power cut. The
events of an append share a row (`rows.py`); they are packed before the transaction begins.

**Damage.** SQLite does not checksum its pages, so the log does it for its rows: each event's checksum is
chained to its predecessor's, and the rows of sessions, leases and snapshots carry one of their own.
Reading verifies every event. A file whose structure is damaged is opened for reading only: nothing is
repaired in place, nothing is deleted, and `salvage` copies what is whole into a new file.

**Deleting.** `retention.py` leaves no byte of what is erased or pruned.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from uuid import UUID

from treenail.clock import Clock, SystemClock
from treenail.errors import LogDamagedError, LogError, StaleWriterError, UsageError
from treenail.log import rows, rules
from treenail.log.base import DEFAULT_LEASE_SECONDS, Damage, Lease, LogReport, Note, StoredSnapshot
from treenail.log.event import Draft, Envelope, SessionInfo, to_microseconds
from treenail.log.lease import LeaseKeeper
from treenail.log.sqlite import events, notes, pots, retention, sessions, snapshots
from treenail.log.sqlite.database import Database
from treenail.log.sqlite.salvage import salvage
from treenail.log.sqlite.sessions import SessionRow

_COUNT_ROWS = "SELECT count(*) FROM events NOT INDEXED WHERE session_key = ?"


class SqliteLog:
    """Keeps sessions in the SQLite file `path`, which is created if it does not exist.

    `synchronous` is `"FULL"` (an append survives a power cut) or `"NORMAL"` (it survives the
    death of the process, and costs a tenth). `busy_timeout_s` is how long to wait for other
    processes before `LogBusyError`. With `read_only=True` nothing can be written, and a damaged
    file can be read as far as it is whole. `heartbeat=False` leaves renewing leases to the caller.

    A file whose structure is damaged is opened for reading only; `damage` says what is wrong,
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
        self.pots = pots.Pots(self._database)
        """Money that the processes that use this file share; see `treenail.containment.SharedPot`."""
        self._database.read("open the log", lambda _: None)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What was found wrong with the file as a whole when it was opened; empty if nothing was."""
        return () if self._database.damage is None else (self._database.damage,)

    def __repr__(self) -> str:
        return f"SqliteLog({str(self.path)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the leases held through this object, and the file."""
        for lease in self._keeper.held():
            try:
                self.release(lease)
            except LogError:
                # A lease that cannot be given back expires, and closing continues.
                continue
        self._keeper.close()
        self._database.close()

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
        facts = sessions.new_facts(session_id, created_at, parent_id, tags)

        def work(connection: sqlite3.Connection) -> None:
            if sessions.select(connection, session_id) is not None:
                raise UsageError(
                    f"session {session_id} exists already in {self.path}; open it, or take a new id"
                )
            sessions.insert(connection, facts)

        self._database.write(f"create session {session_id}", work)

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        now_us = self._now_us()

        def work(connection: sqlite3.Connection) -> SessionInfo:
            row = sessions.whole(self._find(connection, session_id))
            return sessions.describe(connection, row, now_us)

        return self._database.read(f"describe session {session_id}", work)

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        now_us = self._now_us()

        def work(connection: sqlite3.Connection) -> Sequence[SessionInfo]:
            return [
                sessions.describe(connection, row, now_us)
                for row in sessions.all_whole(connection)
                if parent_id is None or row.parent_id == parent_id.bytes
            ]

        return self._database.read("list the sessions", work)

    # --- leases --------------------------------------------------------------------------------------

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        The holder is gone when its lease has expired, or when it was a process of this machine
        that no longer runs. Raises `LeaseHeldError` while it lives.
        """

        def work(connection: sqlite3.Connection) -> Lease:
            row = sessions.whole(self._find(connection, session_id))
            state = rules.grant(session_id, row.lease, owner=owner, ttl_s=ttl_s, now_us=self._now_us())
            return sessions.store_lease(connection, row, state)

        lease = self._database.write(f"acquire session {session_id}", work)
        self._keeper.hold(lease)
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""

        def work(connection: sqlite3.Connection) -> Lease:
            row = self._writer(connection, lease)
            state = row.lease._replace(expires_us=self._now_us() + row.ttl_us)
            return sessions.store_lease(connection, row, state)

        return self._database.write(f"renew the lease on session {lease.session_id}", work)

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        self._keeper.drop(lease)

        def work(connection: sqlite3.Connection) -> None:
            row = sessions.select(connection, lease.session_id)
            if row is not None and (row.epoch, row.owner) == (lease.epoch, lease.owner):
                sessions.store_lease(connection, sessions.whole(row), rules.LeaseState(epoch=lease.epoch))

        self._database.write(f"release session {lease.session_id}", work)

    # --- events --------------------------------------------------------------------------------------

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
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
        parts = [(part, rows.pack(part)) for part in rows.split(drafts)]
        self._database.write(
            f"append to session {lease.session_id}",
            lambda connection: events.append(connection, lease, parts, expected_seq, self.path),
        )

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, each one verified.

        It yields what is in the log when reading begins. At the first damaged event it raises
        `LogDamagedError`; everything before was yielded. Raises `SessionNotFoundError`, at once or
        when the session is erased meanwhile.
        """

        def work(connection: sqlite3.Connection) -> SessionRow:
            row = self._find(connection, session_id)
            if not row.is_session_whole:
                raise sqlite3.DatabaseError(row.damage()[0].message)
            return row

        row = self._database.read(f"read session {session_id}", work)
        found = events.read(self._database, row, after, upto)
        return found if self._database.damage is None else self._read_damaged(row, found, after, upto)

    def _read_damaged(
        self, row: SessionRow, found: Iterator[Envelope], after: int, upto: int | None
    ) -> Iterator[Envelope]:
        """Yield what can be read, then raise: it may not be everything."""
        seq = max(after, row.first_seq - 1)
        for event in found:
            seq = event.seq
            yield event
        if upto is None or seq < upto:
            assert self._database.damage is not None
            raise LogDamagedError(
                f"session {row.id} in {self.path} can be read up to event {seq}, and newer events may be "
                f"lost: {self._database.damage.message}; nothing was deleted; "
                f"SqliteLog.salvage(damaged, into) copies what is whole into a new file",
                last_good_seq=seq,
            )

    # --- stored snapshots ----------------------------------------------------------------------------

    def put_snapshot(self, lease: Lease, seq: int, payload: bytes) -> None:
        """Keep a snapshot of the folded state after event `seq`, in place of older ones.

        The one before is kept as well, to fall back on if this one is damaged.
        """

        def work(connection: sqlite3.Connection) -> None:
            row = self._writer(connection, lease)
            head = sessions.head_of(connection, row)
            rules.check_snapshot(lease.session_id, seq, first=row.first_seq, head=head, payload=payload)
            snapshots.put(connection, row.key, row.id, seq, payload)
            sessions.store_lease(connection, row, row.lease)

        self._database.write(f"store a snapshot of session {lease.session_id}", work)

    def latest_snapshot(self, session_id: UUID) -> StoredSnapshot | None:
        """Return the newest stored snapshot that is whole, or None. Damaged ones are skipped."""

        def work(connection: sqlite3.Connection) -> StoredSnapshot | None:
            found = snapshots.newest(connection, self._find(connection, session_id))
            return None if found is None else StoredSnapshot(session_id, *found)

        return self._database.read(f"read the snapshot of session {session_id}", work)

    # --- notes ---------------------------------------------------------------------------------------

    def put_note(self, lease: Lease, payload: bytes) -> None:
        """Keep a note, in place of the one before. It costs no event, so a heartbeat may write it."""
        rules.check_payload("a note", payload)

        def work(connection: sqlite3.Connection) -> None:
            row = self._writer(connection, lease)
            notes.put(connection, row.key, row.id, Note(lease.epoch, payload))

        self._database.write(f"note something about session {lease.session_id}", work)

    def note(self, session_id: UUID) -> Note | None:
        """Return the note that the session's writers have left, or None. A damaged one is not returned."""

        def work(connection: sqlite3.Connection) -> Note | None:
            return notes.stored(connection, self._find(connection, session_id))[1]

        return self._database.read(f"read the note of session {session_id}", work)

    # --- deleting ------------------------------------------------------------------------------------

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Delete the events up to `upto`; a stored snapshot must cover them. Returns how many there were.

        No byte of a pruned event stays in the file: it is rebuilt, which takes time in proportion to
        its size. If that last part fails, the error says so, and `scrub()` repeats it.
        """
        count = self._database.write(
            f"prune session {lease.session_id}",
            lambda connection: retention.prune(connection, self._writer(connection, lease), upto),
        )
        if count:
            retention.scrub(self._database, f"the events of session {lease.session_id} up to {upto}")
        return count

    def erase(self, session_id: UUID) -> None:
        """Delete a session and everything in it. No byte of it stays in the file.

        Raises `LeaseHeldError` while a living writer holds it. The file is rebuilt, which takes
        time in proportion to its size. If that last part fails, for instance because another
        process keeps reading an old state of the file, the error says so; call it again then.
        """

        def work(connection: sqlite3.Connection) -> None:
            row = sessions.select(connection, session_id)
            if row is not None:
                rules.refuse_if_held(session_id, row.lease, self._now_us())
                retention.erase(connection, row)
            elif not retention.is_scrub_pending(connection, session_id):
                rules.not_found(session_id, str(self.path))

        self._database.write(f"erase session {session_id}", work)
        retention.scrub(self._database, f"session {session_id}")

    def keep_last(self, count: int) -> Sequence[UUID]:
        """Erase all but the `count` most recently used sessions; returns the ids of the erased ones.

        A session is erased or kept together with its children, and kept while any of them is being written.
        """
        return self._erase_chosen(lambda ages: rules.beyond_last(ages, count))

    def prune_sessions(self, older_than: datetime) -> Sequence[UUID]:
        """Erase the sessions that were last used before that time; returns their ids.

        A session is erased or kept together with its children, and kept while any of them is being written.
        """
        return self._erase_chosen(lambda ages: rules.older_than(ages, older_than))

    def _erase_chosen(self, choose: Callable[[Sequence[rules.Age]], Sequence[UUID]]) -> Sequence[UUID]:
        def work(connection: sqlite3.Connection) -> Sequence[UUID]:
            found = retention.ages(connection, self._now_us())
            chosen = choose([age for _, age in found])
            erased = set(chosen)
            for row, _ in found:
                if row.id in erased:
                    retention.erase(connection, row)
            return chosen

        chosen = self._database.write("erase old sessions", work)
        if chosen:
            retention.scrub(self._database, f"{len(chosen)} sessions")
        return chosen

    def scrub(self) -> None:
        """Rebuild the file and empty its WAL, so that nothing that was ever deleted is left in it.

        `erase` and `prune` do this themselves; call it to repeat it if they reported that they could not.
        """
        retention.scrub(self._database, "what was deleted")

    # --- damage --------------------------------------------------------------------------------------

    def check(self, session_id: UUID) -> LogReport:
        """Verify every stored event and snapshot of a session. Never raises for damage; never deletes."""
        damage = list(self.damage)
        try:
            row = self._database.read("check", lambda connection: self._find(connection, session_id))
        except LogDamagedError as error:
            return LogReport(session_id, 0, 0, (*damage, Damage("unreadable", str(error))))
        damage += row.damage()
        if not row.is_session_whole:
            return LogReport(session_id, 0, 0, tuple(damage))
        count, seq = 0, row.first_seq - 1
        try:
            for found in events.read_rows(self._database, row, 0, None):
                count, seq = count + 1, found[-1].seq
        except LogDamagedError as error:
            damage.append(Damage("checksum", str(error), error.last_good_seq + 1))

        def work(connection: sqlite3.Connection) -> None:
            for place, payload in snapshots.stored(connection, row):
                if payload is None:
                    damage.append(
                        Damage("snapshot", f"the stored snapshot after event {place} is damaged", place)
                    )
            if notes.stored(connection, row) == (True, None):
                damage.append(Damage("note", f"the note of session {session_id} is damaged"))
            extra = connection.execute(_COUNT_ROWS, (row.key,)).fetchone()[0] - count
            if extra > 0:
                what = f"{extra} more stored rows with events of session {session_id} cannot be reached"
                damage.append(Damage("orphan", what, seq + 1))

        try:
            self._database.read("check", work)
        except LogDamagedError as error:
            damage.append(Damage("unreadable", str(error)))
        return LogReport(session_id, seq + 1 - row.first_seq, seq, tuple(damage))

    @staticmethod
    def salvage(damaged: str | os.PathLike[str], into: str | os.PathLike[str]) -> Sequence[LogReport]:
        """Copy everything that is whole from a damaged file into a new one; the old one stays as it is.

        Returns one report for each session that was found, saying how far it is whole.
        """
        return salvage(Path(damaged).absolute(), Path(into).absolute())

    # --- parts ---------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return to_microseconds(self._clock.now())

    def _find(self, connection: sqlite3.Connection, session_id: UUID) -> SessionRow:
        return sessions.find(connection, session_id, self.path)

    def _writer(self, connection: sqlite3.Connection, lease: Lease) -> SessionRow:
        row = sessions.whole(self._find(connection, lease.session_id))
        rules.check_writer(lease, row.lease)
        return row

"""A log in a Postgres database: durable, shared by machines.

Theory of operation
-------------------
**Writing.** An append is one statement (`statements.py`). It moves the session's head only for the writer
whose epoch counts and that has seen every event, and inserts only what moved the head. The checksum of the
newest event belongs to the head and is compared as well, so that the writer can chain its events to it
without asking first.

**Lost answers.** If the connection breaks, an append may have been carried out or not (`database.py`). It is
then simply sent again: if it had been carried out, the head does not fit any more, and the event at its
place has the checksum that ours would have. Whatever was still on its way in the old connection is refused,
because the head has moved.

**Time.** Leases expire by the database's clock, which all machines share; whether a process of this machine
has ended is seen here.

**Deleting.** Deleted rows can no longer be read by any query. Their bytes stay in the data files until a
vacuum and in the WAL until it is recycled: that is the server's affair, and no promise is made about it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from uuid import UUID, uuid4

from psycopg.types.numeric import Int8

from treenail.clock import Clock
from treenail.errors import LogDamagedError, LogError, SessionNotFoundError, StaleWriterError, UsageError
from treenail.log import rows, rules
from treenail.log.base import DEFAULT_LEASE_SECONDS, Damage, Lease, LogReport, Note, StoredSnapshot
from treenail.log.event import GENESIS, Draft, Envelope, SessionInfo, chain_checksum, to_microseconds
from treenail.log.lease import LeaseKeeper
from treenail.log.postgres.agenda import PostgresAgenda
from treenail.log.postgres.database import Connection, Database
from treenail.log.postgres.objects import ObjectTable
from treenail.log.postgres.pots import Pots
from treenail.log.postgres.sessions import SessionRow, checksum_of
from treenail.log.postgres.statements import statements
from treenail.log.postgres.watch import PostgresWatcher
from treenail.log.rows import Row
from treenail.log.stores import PostgresUrl, store_named

T = TypeVar("T")

_CHUNK_ROWS = 128
_SNAPSHOT, _NOTE = b"snapshot", b"note"


class PostgresLog:
    """Keeps sessions in a schema of a Postgres database, both of which the URL names.

    `postgresql://user@host/database?schema=NAME`; the schema is `treenail` by default, and is made if it
    does not exist. Other parameters are libpq's, such as `sslmode=verify-full`.

    `retry_s` is how long to wait for a server that restarts, fails over or has no connection left, and
    `answer_timeout_s` for one answer. `max_connections` bounds this object's pool. `create=False` refuses a
    database without runs instead of preparing it. `clock` replaces the database's clock for leases, in
    tests. `heartbeat=False` leaves renewing leases to the caller.
    """

    def __init__(
        self,
        url: str | PostgresUrl,
        *,
        max_connections: int = 8,
        retry_s: float = 30.0,
        answer_timeout_s: float = 30.0,
        create: bool = True,
        clock: Clock | None = None,
        heartbeat: bool = True,
    ) -> None:
        place = store_named(url)
        if not isinstance(place, PostgresUrl):
            raise UsageError("a PostgresLog needs a URL: postgresql://user@host/database")
        self.url = place
        """The database; as text it has no password."""
        self._clock = clock
        self._sql = statements(place.schema)
        self._database = Database(
            place,
            max_connections=max_connections,
            retry_s=retry_s,
            answer_timeout_s=answer_timeout_s,
            create=create,
        )
        self._retry_s = retry_s
        self._keeper = LeaseKeeper(self.renew, beat=heartbeat)
        self._heads: dict[tuple[UUID, int], tuple[int, bytes]] = {}
        """The head of each session as its writer here has left it, by session and epoch."""
        self._heads_lock = threading.Lock()
        self.pots = Pots(self._database, self._sql)
        """Money that the processes that use this schema share; see `treenail.containment.SharedPot`."""
        self.objects = ObjectTable(self._database, self._sql)
        """Files that travel from machine to machine; see `treenail.workspace.Depot`."""
        self.agenda = PostgresAgenda(self._database, self._sql)
        """The runs that workers look after."""
        self._database.run("open the log", lambda connection, _: None)

    def __repr__(self) -> str:
        return f"PostgresLog({str(self.url)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the leases held through this object, and its connections."""
        for lease in self._keeper.held():
            try:
                self.release(lease)
            except LogError:
                # A lease that cannot be given back expires, and closing continues.
                continue
        self._keeper.close()
        self._database.close()

    @property
    def database(self) -> Database:
        """The connections, for an engine that keeps its tables in the same database."""
        return self._database

    def together(self, doing: str, work: Callable[[bool], T]) -> T:
        """Do work whose requests to this database, in this thread, are one transaction: all of them, or none.

        It may be done again from its beginning, and is told then whether an earlier attempt may have been
        carried out. An error says that it was not possible to do `doing`.
        """
        return self._database.together(doing, work)

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
        values = {
            "id": session_id,
            "created_us": Int8(to_microseconds(created_at)),
            "parent_id": parent_id,
            "tags": json.dumps(list((tags or {}).items()), ensure_ascii=False),
            "anchor": GENESIS,
        }

        def work(connection: Connection, doubt: bool) -> None:
            if connection.execute(self._sql["insert_session"], values).fetchone() is not None:
                return
            row = self._select(connection, session_id)
            made = (values["created_us"], parent_id, values["tags"])
            # An earlier attempt whose answer was lost made it, and nobody has used it since.
            if doubt and row is not None and row.epoch == 0 and row[2:5] == made:
                return
            raise UsageError(f"session {session_id} exists already in {self.url}; open it, or take a new id")

        self._database.run(f"create session {session_id}", work)

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        return self._row(session_id).describe()

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        query = self._sql["all" if parent_id is None else "children"]
        values = {"now": self._now(), "parent_id": parent_id}
        found = self._database.run(
            "list the sessions", lambda connection, _: connection.execute(query, values).fetchall()
        )
        return [SessionRow(*each).describe() for each in found]

    # --- leases --------------------------------------------------------------------------------------

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        The holder is gone when its lease has expired by the database's clock, or when it was a process of
        this machine that no longer runs. Raises `LeaseHeldError` while it lives.
        """
        grant_id = uuid4()

        def work(connection: Connection, doubt: bool) -> Lease:
            while True:
                row = self._find(connection, session_id)
                if doubt and row.grant_id == grant_id:
                    return row.lease.as_lease(session_id)
                state = rules.grant(session_id, row.lease, owner=owner, ttl_s=ttl_s, now_us=row.now_us)
                values = {
                    "id": session_id,
                    "epoch": Int8(state.epoch),
                    "owner": owner,
                    "ttl_us": Int8(state.ttl_us),
                    "grant_id": grant_id,
                    "now": self._now(),
                    "old_epoch": Int8(row.epoch),
                    "old_owner": row.owner,
                    "old_expires_us": Int8(row.expires_us),
                }
                granted = connection.execute(self._sql["grant"], values).fetchone()
                if granted is not None:  # Else somebody else was faster, or the holder has just renewed it.
                    self._remember(session_id, state.epoch, granted[1], granted[2])
                    return state._replace(expires_us=granted[0]).as_lease(session_id)

        lease = self._database.run(f"acquire session {session_id}", work)
        self._keeper.hold(lease)
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""

        def work(connection: Connection, doubt: bool) -> Lease:
            values = {**self._fence(lease), "now": self._now()}
            found = connection.execute(self._sql["renew"], values).fetchone()
            if found is None:
                self._refuse(connection, lease)
            return rules.LeaseState(lease.epoch, lease.owner, *found).as_lease(lease.session_id)

        # No longer than until the next heartbeat: other leases are waiting for theirs.
        patience = min(self._retry_s, lease.ttl_s / 3)
        doing = f"renew the lease on session {lease.session_id}"
        return self._database.run(doing, work, retry_s=patience, answer_s=patience)

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        self._keeper.drop(lease)
        with self._heads_lock:
            self._heads.pop((lease.session_id, lease.epoch), None)
        self._database.run(
            f"release session {lease.session_id}",
            lambda connection, _: connection.execute(self._sql["release"], self._fence(lease)),
        )

    # --- events --------------------------------------------------------------------------------------

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
        """Append all drafts after `expected_seq`, in one statement, or none.

        When this returns, the server has committed them. Raises `StaleWriterError` if the lease was taken
        over or if `expected_seq` is not the head. If the connection is lost, the server is asked whether
        they are there; `LogError` if it cannot be asked for `retry_s`.
        """
        rules.check_drafts(drafts)
        if self._keeper.is_lost(lease):
            raise StaleWriterError(
                f"the lease {lease.epoch} on session {lease.session_id} was taken over: a heartbeat was "
                f"refused; nothing was written; open the session again"
            )
        parts = [(part, rows.pack(part)) for part in rows.split(drafts)]
        self._database.run(
            f"append to session {lease.session_id}",
            lambda connection, doubt: self._append(connection, doubt, lease, parts, expected_seq),
        )

    def _append(
        self,
        connection: Connection,
        doubt: bool,
        lease: Lease,
        parts: Sequence[tuple[Sequence[Draft], bytes]],
        expected_seq: int,
    ) -> None:
        head = self._heads.get((lease.session_id, lease.epoch))
        if not parts or head is None or head[0] != expected_seq:
            head = self._checked_head(connection, doubt, lease, parts, expected_seq)
        while head is not None:
            stored = _chained(lease.session_id, head, parts)
            if not stored:
                return
            last = stored[-1]
            values = {
                **self._fence(lease),
                "expected": Int8(head[0]),
                "previous": head[1],
                "last": Int8(last.seq),
                "at_us": Int8(last.at_us),
                "checksum": last.checksum,
                "seqs": [Int8(each.seq) for each in stored],
                "times": [Int8(each.at_us) for each in stored],
                "checksums": [each.checksum for each in stored],
                "payloads": [each.payload for each in stored],
                "channel": channel_of(lease.session_id),
            }
            if connection.execute(self._sql["append"], values).fetchone() is not None:
                self._remember(lease.session_id, lease.epoch, last.seq, last.checksum)
                return
            # Refused; perhaps only because another object has used the lease since.
            head = self._checked_head(connection, doubt, lease, parts, expected_seq)

    def _checked_head(
        self,
        connection: Connection,
        doubt: bool,
        lease: Lease,
        parts: Sequence[tuple[Sequence[Draft], bytes]],
        expected_seq: int,
    ) -> tuple[int, bytes] | None:
        """Return the head that an append continues; None if an earlier attempt has appended it.

        Raises `StaleWriterError` if the writer does not count or expects another head.
        """
        row = self._find(connection, lease.session_id)
        if doubt and row.head_seq > expected_seq and self._is_there(connection, row, parts, expected_seq):
            return None
        rules.check_writer(lease, row.lease)
        rules.check_head(lease, expected_seq=expected_seq, head=row.head_seq)
        return row.head_seq, row.head_checksum

    def _is_there(
        self,
        connection: Connection,
        row: SessionRow,
        parts: Sequence[tuple[Sequence[Draft], bytes]],
        expected_seq: int,
    ) -> bool:
        """Return whether the events behind a place are these, by the checksum of the last one."""
        values = {"id": row.id, "seq": Int8(expected_seq)}
        before = connection.execute(self._sql["checksum_at"], values).fetchone()
        if before is None and expected_seq != row.first_seq - 1:
            return False
        anchor = row.anchor if before is None else before[0]
        last = _chained(row.id, (expected_seq, anchor), parts)[-1]
        values = {"id": row.id, "seq": Int8(last.seq)}
        return connection.execute(self._sql["checksum_at"], values).fetchone() == (last.checksum,)

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, each one verified.

        It yields what is in the log when reading begins. At the first damaged event it raises
        `LogDamagedError`; everything before was yielded. Raises `SessionNotFoundError`, at once or
        when the session is erased meanwhile.
        """
        row = self._row(session_id)
        return self._read(row, after, row.head_seq if upto is None else min(upto, row.head_seq))

    def _read(self, row: SessionRow, after: int, last: int) -> Iterator[Envelope]:
        if max(after, row.first_seq - 1) >= last:
            return
        seq, previous = self._start(row, after)
        while seq < last:
            stored = self._fetch("read", "read events", {"id": row.id, "after": seq, "count": _CHUNK_ROWS})
            for each in stored:
                events = rows.verified(row.id, previous, seq, Row(*each))
                if events is None:
                    break
                seq, previous = each[0], each[2]
                yield from (event for event in events if after < event.seq <= last)
                if seq >= last:
                    return
            else:
                if stored:
                    continue
            self._refuse_if_changed(row, seq)
            raise LogDamagedError(
                f"event {seq + 1} of session {row.id} in {self.url} is damaged or missing; every event up "
                f"to {seq} is whole and readable, nothing was deleted; restore the database from a backup",
                last_good_seq=seq,
            )

    def _start(self, row: SessionRow, after: int) -> tuple[int, bytes]:
        """Return the number and the checksum of the event from which on rows are verified."""
        if after < row.first_seq:
            return row.first_seq - 1, row.anchor
        found = self._fetch("last_upto", "find an event", {"id": row.id, "seq": after})
        return (row.first_seq - 1, row.anchor) if not found else (found[0][0], found[0][1])

    def _refuse_if_changed(self, row: SessionRow, seq: int) -> None:
        """Refuse to call it damage if the events were deleted while they were being read."""
        now = self._database.run("look again", lambda connection, _: self._select(connection, row.id))
        if now is None or now.incarnation != row.incarnation:
            raise SessionNotFoundError(f"session {row.id} was erased from {self.url} while it was being read")
        if now.first_seq > max(row.first_seq, seq + 1):
            raise LogError(
                f"the events of session {row.id} up to {now.first_seq - 1} were pruned while they were being "
                f"read; begin again from its stored snapshot"
            )

    def watcher(self, session_id: UUID) -> PostgresWatcher:
        """Return something that waits for new events of a session; see `treenail.log.watch`."""
        return PostgresWatcher(self._database, self._sql, session_id)

    # --- stored snapshots ----------------------------------------------------------------------------

    def put_snapshot(self, lease: Lease, seq: int, payload: bytes) -> None:
        """Keep a snapshot of the folded state after event `seq`, in place of older ones.

        The one before is kept as well, to fall back on if this one is damaged.
        """

        def work(connection: Connection, doubt: bool) -> None:
            row = self._writer(connection, lease)
            rules.check_snapshot(row.id, seq, first=row.first_seq, head=row.head_seq, payload=payload)
            checksum = checksum_of(_SNAPSHOT, row.id, seq, payload)
            values = {"id": row.id, "seq": seq, "checksum": checksum, "payload": payload}
            connection.execute(self._sql["put_snapshot"], values)
            connection.execute(self._sql["forget_snapshots"], {"id": row.id, "kept": rules.SNAPSHOTS_KEPT})

        self._database.transaction(f"store a snapshot of session {lease.session_id}", work)

    def latest_snapshot(self, session_id: UUID) -> StoredSnapshot | None:
        """Return the newest stored snapshot that is whole, or None. Damaged ones are skipped."""
        self._row(session_id)
        for seq, payload in self._snapshots(session_id):
            if payload is not None:
                return StoredSnapshot(session_id, seq, payload)
        return None

    def _snapshots(self, session_id: UUID) -> list[tuple[int, bytes | None]]:
        """Return the stored snapshots, newest first, with None for one that is damaged."""
        found = self._fetch("snapshots", f"read the snapshot of session {session_id}", {"id": session_id})
        return [
            (seq, payload if checksum_of(_SNAPSHOT, session_id, seq, payload) == checksum else None)
            for seq, checksum, payload in found
        ]

    # --- notes ---------------------------------------------------------------------------------------

    def put_note(self, lease: Lease, payload: bytes) -> None:
        """Keep a note, in place of the one before. It costs no event, so a heartbeat may write it."""
        rules.check_payload("a note", payload)
        checksum = checksum_of(_NOTE, lease.session_id, lease.epoch, payload)
        values = {**self._fence(lease), "checksum": checksum, "payload": payload}

        def work(connection: Connection, doubt: bool) -> None:
            if connection.execute(self._sql["put_note"], values).fetchone() is None:
                self._refuse(connection, lease)

        self._database.run(f"note something about session {lease.session_id}", work)

    def note(self, session_id: UUID) -> Note | None:
        """Return the note that the session's writers have left, or None. A damaged one is not returned."""
        self._row(session_id)
        return self._note(session_id)[1]

    def _note(self, session_id: UUID) -> tuple[bool, Note | None]:
        """Return whether a session has a note, and the note unless it is damaged."""
        for epoch, checksum, payload in self._fetch("note", "read a note", {"id": session_id}):
            is_whole = checksum_of(_NOTE, session_id, epoch, payload) == checksum
            return True, Note(epoch, payload) if is_whole else None
        return False, None

    # --- deleting ------------------------------------------------------------------------------------

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Delete the events up to `upto`; a stored snapshot must cover them. Returns how many there were.

        No query can read them afterwards. The server's files hold their bytes until a vacuum, and its WAL
        until it is recycled.
        """
        counted = 0

        def work(connection: Connection, doubt: bool) -> int:
            nonlocal counted
            row = self._writer(connection, lease)
            if doubt and row.first_seq == upto + 1 and counted:
                return counted  # The attempt whose answer was lost has done it.
            stored = connection.execute(self._sql["snapshots"], {"id": row.id}).fetchall()
            whole = [
                seq
                for seq, checksum, payload in stored
                if checksum_of(_SNAPSHOT, row.id, seq, payload) == checksum
            ]
            rules.check_prune(row.id, upto=upto, covered=max(whole, default=None))
            if upto < row.first_seq:
                return 0
            anchor = self._cut(connection, row, upto)
            values = {"id": row.id, "upto": upto, "first": upto + 1, "anchor": anchor}
            for name in ("prune_events", "prune_snapshots", "move_first"):
                connection.execute(self._sql[name], values)
            counted = upto + 1 - row.first_seq
            return counted

        return self._database.transaction(f"prune session {lease.session_id}", work)

    def _cut(self, connection: Connection, row: SessionRow, upto: int) -> bytes:
        """Remove the pruned events from a row that also holds kept ones; return the checksum of `upto`."""
        found = connection.execute(self._sql["last_upto"], {"id": row.id, "seq": upto}).fetchone()
        start, previous = (row.first_seq - 1, row.anchor) if found is None else found
        if start == upto:
            return bytes(previous)
        values = {"id": row.id, "after": upto, "count": 1}
        stored = connection.execute(self._sql["read"], values).fetchone()
        whole = None if stored is None else rows.verified(row.id, previous, start, Row(*stored))
        if stored is None or whole is None:
            raise LogDamagedError(
                f"event {start + 1} of session {row.id} in {self.url} is damaged or missing; nothing was "
                f"deleted; restore the database from a backup",
                last_good_seq=start,
            )
        kept = rows.pack([each.draft for each in whole if each.seq > upto])
        connection.execute(self._sql["replace_payload"], {"id": row.id, "seq": stored[0], "payload": kept})
        return whole[upto - start - 1].checksum

    def erase(self, session_id: UUID) -> None:
        """Delete a session and everything in it: no query can read it afterwards.

        Raises `LeaseHeldError` while a living writer holds it. The server's files hold its bytes until a
        vacuum, and its WAL, its replicas and its backups for as long as they are kept.
        """

        def work(connection: Connection, doubt: bool) -> None:
            row = self._select(connection, session_id, for_writing=True)
            if row is None:
                if doubt:
                    return
                rules.not_found(session_id, str(self.url))
            rules.refuse_if_held(session_id, row.lease, row.now_us)
            self._erase(connection, [session_id])

        self._database.transaction(f"erase session {session_id}", work)

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
        chosen: list[UUID] = []

        def work(connection: Connection, doubt: bool) -> None:
            found = connection.execute(self._sql["all_for_writing"], {"now": self._now()}).fetchall()
            wanted = choose([SessionRow(*each).age for each in found])
            chosen[:] = [*chosen, *wanted] if doubt else wanted
            self._erase(connection, wanted)

        self._database.transaction("erase old sessions", work)
        return list(dict.fromkeys(chosen))

    def _erase(self, connection: Connection, ids: Sequence[UUID]) -> None:
        connection.execute(self._sql["erase"], {"ids": list(ids)})
        self.objects.release_all(connection, ids)

    # --- damage --------------------------------------------------------------------------------------

    def check(self, session_id: UUID) -> LogReport:
        """Verify every stored event and snapshot of a session. Never raises for damage; never deletes."""
        row = self._row(session_id)
        damage: list[Damage] = []
        count, seq = 0, row.first_seq - 1
        try:
            for event in self._read(row, 0, row.head_seq):
                count, seq = count + 1, event.seq
        except LogDamagedError as error:
            damage.append(Damage("checksum", str(error), error.last_good_seq + 1))
        for place, payload in self._snapshots(session_id):
            if payload is None:
                message = f"the stored snapshot after event {place} is damaged"
                damage.append(Damage("snapshot", message, place))
        if self._note(session_id) == (True, None):
            damage.append(Damage("note", f"the note of session {session_id} is damaged"))
        return LogReport(session_id, count, seq, tuple(damage))

    # --- parts ---------------------------------------------------------------------------------------

    def _now(self) -> Int8 | None:
        """Return the time of the caller's clock; None for the database's."""
        return None if self._clock is None else Int8(to_microseconds(self._clock.now()))

    def _fence(self, lease: Lease) -> dict[str, Any]:
        return {"id": lease.session_id, "epoch": Int8(lease.epoch), "owner": lease.owner}

    def _remember(self, session_id: UUID, epoch: int, seq: int, checksum: bytes) -> None:
        with self._heads_lock:
            self._heads[session_id, epoch] = (seq, checksum)

    def _fetch(self, name: str, doing: str, values: Mapping[str, Any]) -> list[Any]:
        query = self._sql[name]
        return self._database.run(doing, lambda connection, _: connection.execute(query, values).fetchall())

    def _select(
        self, connection: Connection, session_id: UUID, *, for_writing: bool = False
    ) -> SessionRow | None:
        query = self._sql["find_for_writing" if for_writing else "find"]
        found = connection.execute(query, {"id": session_id, "now": self._now()}).fetchone()
        return None if found is None else SessionRow(*found)

    def _find(self, connection: Connection, session_id: UUID, *, for_writing: bool = False) -> SessionRow:
        row = self._select(connection, session_id, for_writing=for_writing)
        if row is None:
            rules.not_found(session_id, str(self.url))
        return row

    def _row(self, session_id: UUID) -> SessionRow:
        return self._database.run(
            f"describe session {session_id}", lambda connection, _: self._find(connection, session_id)
        )

    def _writer(self, connection: Connection, lease: Lease) -> SessionRow:
        row = self._find(connection, lease.session_id, for_writing=True)
        rules.check_writer(lease, row.lease)
        return row

    def _refuse(self, connection: Connection, lease: Lease) -> NoReturn:
        """Say why a writer was fenced off."""
        rules.check_writer(lease, self._find(connection, lease.session_id).lease)
        raise StaleWriterError(
            f"the lease {lease.epoch} on session {lease.session_id} changed hands just now; nothing was "
            f"written; open the session again"
        )


def channel_of(session_id: UUID) -> str:
    """Return the name of the channel on which a session's new events are announced."""
    return f"treenail_{session_id.hex}"


def _chained(
    session_id: UUID, head: tuple[int, bytes], parts: Sequence[tuple[Sequence[Draft], bytes]]
) -> list[Row]:
    """Number packed events behind a head, and give each row its checksum."""
    seq, checksum = head
    stored = []
    for part, payload in parts:
        for draft in part:
            seq += 1
            checksum = chain_checksum(checksum, session_id, seq, draft)
        stored.append(Row(seq, part[-1].at_us, checksum, payload))
    return stored

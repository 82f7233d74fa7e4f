"""A log in memory: it lives as long as its object, and is otherwise like a durable one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self
from uuid import UUID

from treenail.clock import Clock, SystemClock
from treenail.errors import UsageError
from treenail.log import rules
from treenail.log.base import DEFAULT_LEASE_SECONDS, Lease, LogReport, Note, StoredSnapshot
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


class _Session:
    """Everything that is kept about one session."""

    def __init__(
        self, session_id: UUID, created_us: int, parent_id: UUID | None, tags: tuple[tuple[str, str], ...]
    ) -> None:
        self.session_id = session_id
        self.created_us = created_us
        self.parent_id = parent_id
        self.tags = tags
        self.first = 1
        self.anchor = GENESIS
        """The checksum of the event before the first one."""
        self._events: list[Envelope] = []
        """The events that were read, with their checksums."""
        self._unread: list[Draft] = []
        """The events after those. A checksum is computed when somebody reads it."""
        self.snapshots: dict[int, bytes] = {}
        self.note: Note | None = None
        self.lease = rules.LeaseState()

    @property
    def head(self) -> int:
        return self.first - 1 + len(self._events) + len(self._unread)

    def add(self, drafts: Sequence[Draft]) -> None:
        """Keep events behind the newest one."""
        self._unread += drafts

    def events(self) -> list[Envelope]:
        """Return all events, with their checksums."""
        if self._unread:
            previous = self._events[-1].checksum if self._events else self.anchor
            first = self.first + len(self._events)
            self._events += chained(self.session_id, previous, first, self._unread)
            self._unread = []
        return self._events

    def drop(self, upto: int) -> None:
        """Drop the events up to `upto`."""
        count, events = upto + 1 - self.first, self.events()
        self.anchor = events[count - 1].checksum
        self._events = events[count:]
        self.first = upto + 1

    @property
    def used_us(self) -> int:
        newest = (self._unread or self._events)[-1:]
        return max([self.created_us, *(each.at_us for each in newest)])


class MemoryLog:
    """Keeps sessions in this process. It can be used again after `close()`.

    `heartbeat=False` leaves renewing leases to the caller.
    """

    def __init__(self, *, clock: Clock | None = None, heartbeat: bool = True) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._sessions: dict[UUID, _Session] = {}
        # Only this process can ask for a lease: it is renewed when one is asked for, without a thread.
        self._keeper = LeaseKeeper(self.renew, beat=False)
        self._heartbeat = heartbeat

    def __repr__(self) -> str:
        return f"MemoryLog({len(self._sessions)} sessions)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        with self._lock:
            if session_id in self._sessions:
                raise UsageError(
                    f"session {session_id} exists already in this log; open it, or take a new id"
                )
            self._sessions[session_id] = _Session(
                session_id, to_microseconds(created_at), parent_id, tuple((tags or {}).items())
            )

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        with self._lock:
            self._beat()
            return self._describe(self._find(session_id))

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        with self._lock:
            self._beat()
            found = sorted(self._sessions.values(), key=lambda each: each.created_us)
            return [self._describe(each) for each in found if parent_id in (None, each.parent_id)]

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        Raises `LeaseHeldError` while the holder lives.
        """
        with self._lock:
            self._beat()
            stored = self._find(session_id)
            now_us = self._now_us()
            stored.lease = rules.grant(session_id, stored.lease, owner=owner, ttl_s=ttl_s, now_us=now_us)
            lease = stored.lease.as_lease(session_id)
        self._keeper.hold(lease)
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""
        with self._lock:
            stored = self._writable(lease)
            stored.lease = stored.lease._replace(expires_us=self._now_us() + stored.lease.ttl_us)
            return stored.lease.as_lease(lease.session_id)

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        self._keeper.drop(lease)
        with self._lock:
            stored = self._sessions.get(lease.session_id)
            if stored is not None and stored.lease[:2] == (lease.epoch, lease.owner):
                stored.lease = rules.LeaseState(epoch=lease.epoch)

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
        """Append all drafts after `expected_seq`, or none.

        Raises `StaleWriterError` if the lease was taken over or if `expected_seq` is not the head.
        """
        rules.check_drafts(drafts)
        with self._lock:
            stored = self._writable(lease)
            rules.check_head(lease, expected_seq=expected_seq, head=stored.head)
            stored.add(drafts)

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, as they stand when reading begins."""
        with self._lock:
            stored = self._find(session_id)
            stop = None if upto is None else max(upto + 1 - stored.first, 0)
            return iter(stored.events()[max(after + 1 - stored.first, 0) : stop])

    def put_snapshot(self, lease: Lease, seq: int, payload: bytes) -> None:
        """Keep a snapshot of the folded state after event `seq`, in place of older ones."""
        with self._lock:
            stored = self._writable(lease)
            rules.check_snapshot(lease.session_id, seq, first=stored.first, head=stored.head, payload=payload)
            stored.snapshots[seq] = payload
            for old in sorted(stored.snapshots)[: -rules.SNAPSHOTS_KEPT]:
                del stored.snapshots[old]

    def latest_snapshot(self, session_id: UUID) -> StoredSnapshot | None:
        """Return the newest stored snapshot, or None."""
        with self._lock:
            snapshots = self._find(session_id).snapshots
            seq = max(snapshots, default=None)
            return None if seq is None else StoredSnapshot(session_id, seq, snapshots[seq])

    def put_note(self, lease: Lease, payload: bytes) -> None:
        """Keep a note, in place of the one before."""
        rules.check_payload("a note", payload)
        with self._lock:
            self._writable(lease).note = Note(lease.epoch, payload)

    def note(self, session_id: UUID) -> Note | None:
        """Return the note that the session's writers have left, or None."""
        with self._lock:
            return self._find(session_id).note

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Delete the events up to `upto`; a stored snapshot must cover them. Returns how many there were."""
        with self._lock:
            stored = self._writable(lease)
            rules.check_prune(lease.session_id, upto=upto, covered=max(stored.snapshots, default=None))
            count = max(upto - stored.first + 1, 0)
            if count:
                stored.drop(upto)
                stored.snapshots = {seq: data for seq, data in stored.snapshots.items() if seq >= upto}
            return count

    def erase(self, session_id: UUID) -> None:
        """Delete a session and everything in it. Raises `LeaseHeldError` while a living writer holds it."""
        with self._lock:
            self._beat()
            rules.refuse_if_held(session_id, self._find(session_id).lease, self._now_us())
            del self._sessions[session_id]

    def keep_last(self, count: int) -> Sequence[UUID]:
        """Erase all but the `count` most recently used sessions; returns the ids of the erased ones.

        A session is erased or kept together with its children, and kept while any of them is being written.
        """
        with self._lock:
            return self._erase_all(rules.beyond_last(self._ages(), count))

    def prune_sessions(self, older_than: datetime) -> Sequence[UUID]:
        """Erase the sessions that were last used before that time; returns their ids.

        A session is erased or kept together with its children, and kept while any of them is being written.
        """
        with self._lock:
            return self._erase_all(rules.older_than(self._ages(), older_than))

    def check(self, session_id: UUID) -> LogReport:
        """Report on a session. Events in memory cannot be damaged, so the report is always good."""
        with self._lock:
            stored = self._find(session_id)
            return LogReport(session_id, events=stored.head + 1 - stored.first, last_good_seq=stored.head)

    def close(self) -> None:
        """Release the leases held through this object."""
        for lease in self._keeper.held():
            self.release(lease)
        self._keeper.close()

    # --- parts -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self._heartbeat:
            self._keeper.beat()

    def _now_us(self) -> int:
        return to_microseconds(self._clock.now())

    def _find(self, session_id: UUID) -> _Session:
        stored = self._sessions.get(session_id)
        if stored is None:
            rules.not_found(session_id, "this memory log")
        return stored

    def _writable(self, lease: Lease) -> _Session:
        stored = self._find(lease.session_id)
        rules.check_writer(lease, stored.lease)
        return stored

    def _describe(self, stored: _Session) -> SessionInfo:
        return SessionInfo(
            stored.session_id,
            from_microseconds(stored.created_us),
            parent_id=stored.parent_id,
            tags=stored.tags,
            head=stored.head,
            first=stored.first,
            owner=stored.lease.owner if stored.lease.is_live(self._now_us()) else None,
        )

    def _ages(self) -> list[rules.Age]:
        self._beat()
        now_us = self._now_us()
        return [
            rules.Age(stored.session_id, stored.parent_id, stored.used_us, stored.lease.is_live(now_us))
            for stored in self._sessions.values()
        ]

    def _erase_all(self, chosen: Sequence[UUID]) -> Sequence[UUID]:
        for session_id in chosen:
            del self._sessions[session_id]
        return chosen

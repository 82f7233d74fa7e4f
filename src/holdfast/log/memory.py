"""A log in memory: as long-lived as its object, and in every other way like a durable one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, overload
from uuid import UUID

from holdfast.clock import Clock, SystemClock
from holdfast.errors import UsageError
from holdfast.log import rules
from holdfast.log.base import DEFAULT_LEASE_SECONDS, Lease, LogReport, StoredSnapshot
from holdfast.log.event import (
    GENESIS,
    Draft,
    Envelope,
    SessionInfo,
    chain_checksum,
    from_microseconds,
    to_microseconds,
)
from holdfast.log.lease import LeaseKeeper


class _Event:
    """A draft in its place. Few look at an event's checksum: it is computed for those that do."""

    __slots__ = ("_before", "_checksum", "draft", "seq")

    def __init__(self, seq: int, draft: Draft, before: _Event | bytes) -> None:
        self.seq = seq
        self.draft = draft
        self._before = before
        self._checksum: bytes | None = None

    def checksum(self, session_id: UUID) -> bytes:
        """Return the checksum. Those of the events before it are then known too, and let go of."""
        waiting: list[_Event] = []
        each: _Event | bytes = self
        while isinstance(each, _Event):
            if each._checksum is not None:
                each = each._checksum
                break
            waiting.append(each)
            each = each._before
        for event in reversed(waiting):
            each = chain_checksum(each, session_id, event.seq, event.draft)
            event._checksum = event._before = each
        return each

    def envelope(self, session_id: UUID) -> Envelope:
        """Return the event as it is read."""
        kind, payload, at_us, turn_id, run_id, trace_id, rolled_back = self.draft
        return Envelope(
            session_id,
            self.seq,
            at_us,
            kind,
            payload,
            self.checksum(session_id),
            turn_id,
            run_id,
            trace_id,
            bool(rolled_back),
        )


class _Appended(Sequence[Envelope]):
    """What was appended, made for whoever looks."""

    __slots__ = ("_events", "_lock", "_session_id")

    def __init__(self, session_id: UUID, events: Sequence[_Event], lock: threading.RLock) -> None:
        self._session_id = session_id
        self._events = events
        self._lock = lock

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> Envelope: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Envelope]: ...
    def __getitem__(self, index: int | slice) -> Envelope | Sequence[Envelope]:
        with self._lock:
            if isinstance(index, slice):
                return [each.envelope(self._session_id) for each in self._events[index]]
            return self._events[index].envelope(self._session_id)


class _Session:
    """Everything that is kept about one session."""

    __slots__ = ("anchor", "created_us", "events", "first", "lease", "parent_id", "snapshots", "tags")

    def __init__(self, created_us: int, parent_id: UUID | None, tags: tuple[tuple[str, str], ...]) -> None:
        self.created_us = created_us
        self.parent_id = parent_id
        self.tags = tags
        self.first = 1
        # The checksum of the event before the first one kept.
        self.anchor = GENESIS
        self.events: list[_Event] = []
        self.snapshots: dict[int, bytes] = {}
        self.lease = rules.LeaseState()

    @property
    def head(self) -> int:
        return self.first - 1 + len(self.events)

    @property
    def used_us(self) -> int:
        return max(self.created_us, self.events[-1].draft.at_us if self.events else self.created_us)


class MemoryLog:
    """Keeps sessions in this process. What `close()` leaves behind can be used again."""

    def __init__(self, *, clock: Clock | None = None, heartbeat: bool = True) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._sessions: dict[UUID, _Session] = {}
        self._keeper = LeaseKeeper(self.renew, beat=heartbeat)

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
            stored = _Session(to_microseconds(created_at), parent_id, tuple((tags or {}).items()))
            self._sessions[session_id] = stored

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        with self._lock:
            return self._describe(session_id, self._find(session_id))

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        with self._lock:
            chosen = [
                (key, stored)
                for key, stored in self._sessions.items()
                if parent_id is None or stored.parent_id == parent_id
            ]
            chosen.sort(key=lambda pair: pair[1].created_us)
            return [self._describe(key, stored) for key, stored in chosen]

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        Raises `LeaseHeldError` while the holder lives.
        """
        with self._lock:
            stored = self._find(session_id)
            stored.lease = rules.grant(
                session_id, stored.lease, owner=owner, ttl_s=ttl_s, now_us=self._now_us()
            )
            lease = self._lease(session_id, stored.lease)
        self._keeper.hold(lease)
        return lease

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""
        with self._lock:
            stored = self._writable(lease)
            stored.lease = stored.lease._replace(expires_us=self._now_us() + stored.lease.ttl_us)
            return self._lease(lease.session_id, stored.lease)

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        self._keeper.drop(lease)
        with self._lock:
            stored = self._sessions.get(lease.session_id)
            if stored is not None and stored.lease.epoch == lease.epoch:
                stored.lease = rules.LeaseState(epoch=lease.epoch)

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> Sequence[Envelope]:
        """Append all drafts after `expected_seq`, or none. What is returned is made when it is looked at.

        Raises `StaleWriterError` if the lease was taken over or if `expected_seq` is not the head.
        """
        rules.check_drafts(drafts)
        with self._lock:
            stored = self._writable(lease)
            rules.check_head(lease, expected_seq=expected_seq, head=stored.head)
            before = stored.events[-1] if stored.events else stored.anchor
            batch: list[_Event] = []
            for seq, draft in enumerate(drafts, expected_seq + 1):
                before = _Event(seq, draft, before)
                batch.append(before)
            stored.events += batch
            return _Appended(lease.session_id, batch, self._lock)

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, as they stand when reading begins."""
        with self._lock:
            stored = self._find(session_id)
            start = max(after - stored.first + 1, 0)
            stop = len(stored.events) if upto is None else max(upto - stored.first + 1, 0)
            return iter([each.envelope(session_id) for each in stored.events[start:stop]])

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
            if not snapshots:
                return None
            seq = max(snapshots)
            return StoredSnapshot(session_id, seq, snapshots[seq])

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Forget the events up to `upto`; a stored snapshot must cover them. Returns how many went."""
        with self._lock:
            stored = self._writable(lease)
            rules.check_prune(lease.session_id, upto=upto, covered=max(stored.snapshots, default=None))
            count = max(upto - stored.first + 1, 0)
            if count:
                stored.anchor = stored.events[count - 1].checksum(lease.session_id)
                del stored.events[:count]
                if stored.events:
                    stored.events[0].checksum(lease.session_id)  # It lets go of what was before it.
                stored.first = upto + 1
                stored.snapshots = {seq: data for seq, data in stored.snapshots.items() if seq >= upto}
            return count

    def erase(self, session_id: UUID) -> None:
        """Forget a session and everything in it. Raises `LeaseHeldError` while somebody is writing it."""
        with self._lock:
            rules.refuse_if_held(session_id, self._find(session_id).lease, self._now_us())
            del self._sessions[session_id]

    def keep_last(self, count: int) -> Sequence[UUID]:
        """Erase all but the `count` most recently used sessions; returns the ids of those that went.

        A session goes or stays with its children, and stays while somebody is writing any of them.
        """
        with self._lock:
            return self._erase_all(rules.beyond_last(self._ages(), count))

    def prune_sessions(self, older_than: datetime) -> Sequence[UUID]:
        """Erase the sessions that were last used before that time; returns their ids.

        A session goes or stays with its children, and stays while somebody is writing any of them.
        """
        with self._lock:
            return self._erase_all(rules.older_than(self._ages(), older_than))

    def check(self, session_id: UUID) -> LogReport:
        """Verify every stored event of a session. Memory does not decay: the report is always good."""
        with self._lock:
            stored = self._find(session_id)
            return LogReport(session_id, events=len(stored.events), last_good_seq=stored.head)

    def close(self) -> None:
        """Release the leases held through this object."""
        for lease in self._keeper.held():
            self.release(lease)
        self._keeper.close()

    # --- parts -------------------------------------------------------------------------------------

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

    def _lease(self, session_id: UUID, state: rules.LeaseState) -> Lease:
        return Lease(
            session_id,
            state.epoch,
            state.owner or "",
            state.ttl_us / 1_000_000,
            from_microseconds(state.expires_us),
        )

    def _describe(self, session_id: UUID, stored: _Session) -> SessionInfo:
        return SessionInfo(
            session_id,
            from_microseconds(stored.created_us),
            parent_id=stored.parent_id,
            tags=stored.tags,
            head=stored.head,
            first=stored.first,
            owner=stored.lease.owner if stored.lease.is_live(self._now_us()) else None,
        )

    def _ages(self) -> list[rules.Age]:
        now_us = self._now_us()
        return [
            rules.Age(key, stored.parent_id, stored.used_us, stored.lease.is_live(now_us))
            for key, stored in self._sessions.items()
        ]

    def _erase_all(self, chosen: Sequence[UUID]) -> Sequence[UUID]:
        for session_id in chosen:
            del self._sessions[session_id]
        return chosen

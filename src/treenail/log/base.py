"""The protocol of a log: what a store of sessions must do.

Theory of operation
-------------------
A session's log is append-only, gapless and has one writer at a time. A writer
holds a **lease**; each lease has an **epoch** that grows with every hand-over.
An append names its lease and the sequence number it expects to follow; a store
refuses it (`StaleWriterError`) if either is old. That check and the write are
one store transaction, so that a writer that was paused, cut off or replaced
cannot change anything (fencing). All events of one append become visible
together or not at all.

The store knows envelopes, not values: payloads are opaque bytes. It keeps, per
session, at most a few **stored snapshots** of the folded state, which are an
optimisation and never the truth. `prune` deletes old events once a stored
snapshot covers them; `erase` deletes a session with everything that is in it.
Beside its events a session has one **note**, which its writer replaces as often as
it likes: what must be known if it is killed and is not worth an event.

Every method may be called from any thread. `treenail.testing.log.LogConformance`
checks an implementation against these promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable
from uuid import UUID

from treenail.log.event import Draft, Envelope, SessionInfo

DEFAULT_LEASE_SECONDS = 10.0
"""How long a lease lasts without a heartbeat."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one session."""

    session_id: UUID
    epoch: int
    """Grows with every hand-over; an append with an older one is refused."""
    owner: str
    ttl_s: float
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A session's folded state as it was after the event `seq`."""

    session_id: UUID
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """What a session's writer last noted."""

    epoch: int
    """The epoch of the lease that it was written with: another one than mine says whose it is."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a stored session, and where it is."""

    kind: Literal["checksum", "gap", "unreadable", "snapshot", "note", "orphan"]
    message: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class LogReport:
    """The result of checking one session's stored events."""

    session_id: UUID
    events: int
    last_good_seq: int
    """Every event up to here is whole and readable."""
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage


@runtime_checkable
class Log(Protocol):
    """A store of sessions' logs."""

    def create(
        self,
        session_id: UUID,
        *,
        created_at: datetime,
        parent_id: UUID | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Make an empty session. Raises `UsageError` if it exists."""
        ...

    def info(self, session_id: UUID) -> SessionInfo:
        """Describe a session. Raises `SessionNotFoundError`."""
        ...

    def sessions(self, *, parent_id: UUID | None = None) -> Sequence[SessionInfo]:
        """List the sessions, oldest first; with `parent_id`, only its children."""
        ...

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = DEFAULT_LEASE_SECONDS) -> Lease:
        """Take the writer's lease, or take it over if its holder is gone.

        The holder is gone when its lease has expired, or when it was a process of this machine
        that no longer runs. Raises `LeaseHeldError` while it lives.
        """
        ...

    def renew(self, lease: Lease) -> Lease:
        """Heartbeat: extend the lease. Raises `StaleWriterError` if it was taken over."""
        ...

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing a lease that was taken over does nothing."""
        ...

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
        """Append all drafts after `expected_seq`, in one transaction, or none.

        When this returns, the events are as durable as the store promises. Raises `StaleWriterError`
        if the lease was taken over or if `expected_seq` is not the head.
        """
        ...

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        """Yield the events with `after < seq <= upto`, in order, each one verified.

        At the first damaged event it raises `LogDamagedError`; everything before was yielded.
        """
        ...

    def put_snapshot(self, lease: Lease, seq: int, payload: bytes) -> None:
        """Keep a snapshot of the folded state after event `seq`, in place of older ones."""
        ...

    def latest_snapshot(self, session_id: UUID) -> StoredSnapshot | None:
        """Return the newest stored snapshot that is whole, or None. Damaged ones are skipped."""
        ...

    def put_note(self, lease: Lease, payload: bytes) -> None:
        """Keep a note, in place of the one before. It costs no event, so a heartbeat may write it."""
        ...

    def note(self, session_id: UUID) -> Note | None:
        """Return the note that the session's writers have left, or None. A damaged one is not returned."""
        ...

    def prune(self, lease: Lease, *, upto: int) -> int:
        """Delete the events up to `upto`; a stored snapshot must cover them. Returns how many there were.

        Nothing returns them afterwards. What a store promises about their bytes, it says itself.
        """
        ...

    def erase(self, session_id: UUID) -> None:
        """Delete a session and everything in it: nothing returns any of it afterwards.

        What a store promises about its bytes, it says itself: a file is rewritten without them, and a
        database server keeps them in dead rows and in its WAL for a while.
        Raises `LeaseHeldError` while a living writer holds it.
        """
        ...

    def check(self, session_id: UUID) -> LogReport:
        """Verify every stored event and snapshot of a session. Never raises for damage; never deletes."""
        ...

    def close(self) -> None:
        """Release leases held through this object, and the store's handles."""
        ...

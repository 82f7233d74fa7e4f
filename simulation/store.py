"""The log's store, as one process sees it: it may fail, be slow to answer, or outlive its user."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import anyio

from simulation.world import Life
from treenail.errors import LogError, StaleWriterError
from treenail.log import Draft, Lease, MemoryLog

LEASE_S = 10.0


class SimulatedLog:
    """A handle on the world's one store. Everything that is not a write is passed on."""

    def __init__(self, store: MemoryLog, life: Life) -> None:
        self._store = store
        self._life = life
        self._leases: dict[UUID, Lease] = {}

    def __getattr__(self, name: str) -> Any:
        self._life.check()
        return getattr(self._store, name)

    def acquire(self, session_id: UUID, *, owner: str, ttl_s: float = LEASE_S) -> Lease:
        """Take the writer's lease."""
        self._life.check()
        lease = self._store.acquire(session_id, owner=f"{self._life.name}/{len(self._leases)}", ttl_s=LEASE_S)
        self._leases[session_id] = lease
        return lease

    def append(self, lease: Lease, drafts: Sequence[Draft], *, expected_seq: int) -> None:
        """Append, or fail before or after: a full disk, a kill on either side."""
        place = f"append/{drafts[-1].type}"
        self._life.may_die(place)
        if self._life.world.strikes_now("disk full", place, 0.003):
            raise LogError("the disk is full; nothing was written")
        self._store.append(lease, drafts, expected_seq=expected_seq)
        names = " ".join(each.type.removeprefix("treenail.") for each in drafts)
        self._life.world.note(f"{self._life.name} appends {expected_seq + 1} {names}")
        if self._life.world.strikes_now("answer lost", place, 0.005):
            raise LogError("the store did not answer; the events may have been written")
        self._life.may_die(f"{place}/done")

    def put_note(self, lease: Lease, payload: bytes) -> None:
        """Keep a note. A beat in real time has no place in simulated time."""
        if threading.current_thread() is threading.main_thread():
            self._life.check()
            self._store.put_note(lease, payload)

    def release(self, lease: Lease) -> None:
        """Give the lease back."""
        self._life.check()
        self._leases.pop(lease.session_id, None)
        self._store.release(lease)

    def close(self) -> None:
        """Do nothing: the store is the world's."""
        self._life.check()

    async def keep_leases(self) -> None:
        """Renew what this process holds for as long as it runs, as its heartbeat would."""
        while not self._life.is_dead:
            await anyio.sleep(LEASE_S / 3)
            if self._life.is_dead or self._life.is_stopped:
                continue
            for session_id, lease in list(self._leases.items()):
                try:
                    self._leases[session_id] = self._store.renew(lease)
                except StaleWriterError:
                    del self._leases[session_id]

"""MemoryLog: the conformance suite, and when it computes checksums."""

import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from treenail.clock import Clock, new_id
from treenail.errors import LeaseHeldError
from treenail.log import Draft, Lease, Log, MemoryLog
from treenail.testing import FakeClock
from treenail.testing.log import LogConformance


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return MemoryLog(clock=clock, heartbeat=False)

    def reopen(self, log: Log, directory: Path, clock: Clock) -> Log:
        log.close()
        return log


def opened(log: MemoryLog) -> tuple[UUID, Lease]:
    session_id = new_id()
    log.create(session_id, created_at=datetime.now(UTC))
    return session_id, log.acquire(session_id, owner="test")


def test_a_session_is_its_writers_for_as_long_as_the_writer_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that is, and without a thread: nobody takes it over, erases it or calls it free."""
    clock = FakeClock()
    starters: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        starters.append(threading.current_thread())
        start(thread)

    with MemoryLog(clock=clock) as log:
        session_id = new_id()
        log.create(session_id, created_at=clock.now())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", noted)
            lease = log.acquire(session_id, owner="writer")
        assert threading.current_thread() not in starters
        clock.advance(3_600)
        assert log.info(session_id).owner == "writer"
        assert [each.owner for each in log.sessions()] == ["writer"]
        clock.advance(3_600)
        assert log.keep_last(0) == []
        clock.advance(3_600)
        with pytest.raises(LeaseHeldError):
            log.erase(session_id)
        clock.advance(3_600)
        with pytest.raises(LeaseHeldError):
            log.acquire(session_id, owner="thief")
        log.append(lease, [Draft("t", b"x", 1)], expected_seq=0)
        log.release(lease)
        assert log.acquire(session_id, owner="heir").owner == "heir"


def test_nothing_leads_to_a_pruned_event() -> None:
    """The events that stay do not keep the pruned ones alive, although their checksums are chained."""
    log = MemoryLog(heartbeat=False)
    _, lease = opened(log)
    payload = b"secret" * 100
    before = sys.getrefcount(payload)
    log.append(lease, [Draft("t", payload, 1)], expected_seq=0)
    log.append(lease, [Draft("t", b"kept", 2)], expected_seq=1)
    assert sys.getrefcount(payload) > before
    log.put_snapshot(lease, 2, b"")
    log.prune(lease, upto=1)
    assert sys.getrefcount(payload) == before

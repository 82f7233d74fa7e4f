"""The SQLite log passes the conformance suite, through one object and through several."""

from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from treenail.clock import Clock
from treenail.errors import StaleWriterError
from treenail.log import Draft, Lease, Log
from treenail.log.sqlite import SqliteLog
from treenail.testing.log import LogConformance


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return SqliteLog(directory / "log.db", clock=clock, heartbeat=False, synchronous="NORMAL")


def opened(log: SqliteLog) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=datetime.now(UTC))
    return log.acquire(session_id, owner="somebody")


def test_a_writer_whose_lease_was_given_back_elsewhere_writes_nothing(tmp_path: Path) -> None:
    """Through whichever object a lease was taken, given back or taken over: the file decides."""
    with (
        SqliteLog(tmp_path / "log.db", heartbeat=False) as log,
        SqliteLog(tmp_path / "log.db", heartbeat=False) as other,
    ):
        lease = opened(log)
        for seq in range(3):
            log.append(lease, [Draft("event", b"mine", 0)], expected_seq=seq)
        other.release(lease)
        with pytest.raises(StaleWriterError, match="was given back"):
            log.append(lease, [Draft("event", b"late", 0)], expected_seq=3)
        newer = other.acquire(lease.session_id, owner="somebody else")
        with pytest.raises(StaleWriterError, match="was taken over"):
            log.append(lease, [Draft("event", b"late", 0)], expected_seq=3)
        other.append(newer, [Draft("event", b"theirs", 0)], expected_seq=3)
        with pytest.raises(StaleWriterError, match="was taken over"):
            log.append(lease, [Draft("event", b"late", 0)], expected_seq=4)
        assert [each.payload for each in log.read(lease.session_id)] == [b"mine"] * 3 + [b"theirs"]


def test_two_logs_that_take_turns_continue_each_others_events(tmp_path: Path) -> None:
    """One lease may be used through both; every append continues what is in the file."""
    with (
        SqliteLog(tmp_path / "log.db", heartbeat=False) as first,
        SqliteLog(tmp_path / "log.db", heartbeat=False) as second,
    ):
        lease = opened(first)
        logs = (first, second)
        for turn in range(6):
            logs[turn % 2].append(lease, [Draft("event", b"%d" % turn, 0)], expected_seq=turn)
        for log in logs:
            assert [each.payload for each in log.read(lease.session_id)] == [
                b"%d" % turn for turn in range(6)
            ]
            assert log.check(lease.session_id).ok


def test_a_log_behind_a_link_is_one_log(tmp_path: Path) -> None:
    """Its WAL lies beside the file, not beside the link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "log.db")
    with SqliteLog(tmp_path / "link.db", heartbeat=False) as log:
        lease = opened(log)
        log.append(lease, [Draft("event", b"one", 0)], expected_seq=0)
        assert (tmp_path / "real" / "log.db-wal").stat().st_size
        log.release(lease)
        log.erase(lease.session_id)
        assert (tmp_path / "real" / "log.db-wal").stat().st_size < 10_000, "the WAL was not emptied"
        lease = opened(log)
    with SqliteLog(tmp_path / "real" / "log.db", heartbeat=False) as log:
        assert [each.session_id for each in log.sessions()] == [lease.session_id]

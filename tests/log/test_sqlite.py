"""SqliteLog: the conformance suite, and what it remembers between appends."""

import resource
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.clock import Clock
from treenail.errors import SessionNotFoundError, StaleWriterError
from treenail.log import Log
from treenail.log.base import Lease
from treenail.log.event import Draft
from treenail.log.sqlite import SqliteLog
from treenail.testing.log import LogConformance

from .conftest import copy_open


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return SqliteLog(directory / "log.db", clock=clock, heartbeat=False, synchronous="NORMAL")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteLog]:
    with SqliteLog(tmp_path / "log.db", heartbeat=False, synchronous="NORMAL") as made:
        yield made


def opened(log: SqliteLog) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=datetime.now(UTC))
    return log.acquire(session_id, owner="somebody")


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["first", "second", "renewed first"]), st.booleans(), st.booleans())
    )
)
@settings(max_examples=30, deadline=None)
def test_sessions_of_one_log_do_not_mix_up_their_ends(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool, bool]]
) -> None:
    """Whoever appends, through whichever handle of a lease and of the file, finds its own session's end."""
    path = tmp_path_factory.mktemp("logs") / "log.db"
    with (
        SqliteLog(path, heartbeat=False, synchronous="NORMAL") as log,
        SqliteLog(path, heartbeat=False, synchronous="NORMAL") as other,
    ):
        first, second = opened(log), opened(log)
        leases = {"first": first, "second": second, "renewed first": log.renew(first)}
        written: dict[UUID, list[bytes]] = {first.session_id: [], second.session_id: []}
        for number, (name, through_other, after_a_refusal) in enumerate(steps):
            lease, payload = leases[name], str(number).encode()
            mine = written[lease.session_id]
            used = other if through_other else log
            if after_a_refusal:
                with pytest.raises(StaleWriterError):
                    used.append(lease, [Draft("event", b"never", 0)], expected_seq=len(mine) + 1)
            used.append(lease, [Draft("event", payload, 0)], expected_seq=len(mine))
            mine.append(payload)
        for session_id, payloads in written.items():
            assert [each.payload for each in log.read(session_id)] == payloads


def test_a_commit_that_fails_is_not_believed(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an append that was rolled back the next one continues where the session really ends."""
    lease = opened(log)
    log.append(lease, [Draft("event", b"one", 0)], expected_seq=0)
    with monkeypatch.context() as patched:
        # What every part of an append could meet: an interrupt when all is written and nothing committed.
        patched.setattr("treenail.log.sqlite._Tail", interrupt)
        in_two_rows = [Draft("event", b"lost", 0), Draft("event", b"lost", 0, turn_id="turn")]
        with pytest.raises(KeyboardInterrupt):
            log.append(lease, in_two_rows, expected_seq=1)
    log.append(lease, [Draft("event", b"two", 0)], expected_seq=1)
    assert [each.payload for each in log.read(lease.session_id)] == [b"one", b"two"]


def test_an_interrupt_behind_the_commit_takes_nothing_back(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says that the append had been completed, and goes on behind it."""
    lease = opened(log)
    log.append(lease, [Draft("event", b"one", 0)], expected_seq=0)
    with monkeypatch.context() as patched:
        patched.setattr("treenail.log.sqlite._Tail", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append(lease, [Draft("event", b"two", 0)], expected_seq=1)
    assert log.info(lease.session_id).head == 2
    with pytest.raises(StaleWriterError, match="is at event 2"):
        log.append(lease, [Draft("event", b"again", 0)], expected_seq=1)
    log.append(lease, [Draft("event", b"three", 0)], expected_seq=2)
    assert [each.payload for each in log.read(lease.session_id)] == [b"one", b"two", b"three"]


def test_a_writer_whose_lease_was_given_back_elsewhere_writes_nothing(tmp_path: Path) -> None:
    """What a log remembers of a session does not outlive the right to write it."""
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


def test_a_session_in_the_place_of_an_erased_one_gets_none_of_its_events(tmp_path: Path) -> None:
    """The end that is remembered is one session's, also if another one has its key, epoch and length."""
    with (
        SqliteLog(tmp_path / "log.db", heartbeat=False) as log,
        SqliteLog(tmp_path / "log.db", heartbeat=False) as other,
    ):
        lease = opened(log)
        log.append(lease, [Draft("event", b"old", 0)], expected_seq=0)
        other.release(lease)
        other.erase(lease.session_id)
        newer = opened(other)
        other.append(newer, [Draft("event", b"new", 0)], expected_seq=0)
        assert newer.epoch == lease.epoch
        with pytest.raises(SessionNotFoundError):
            log.append(lease, [Draft("event", b"late", 0)], expected_seq=1)
        assert [each.payload for each in log.read(newer.session_id)] == [b"new"]


# --- the room behind the WAL -------------------------------------------------------------------------


def lengths(log: SqliteLog, lease: Lease, count: int) -> list[int]:
    """Append so many events, and return how long the WAL was behind each."""
    wal = Path(f"{log.path.resolve()}-wal")
    head = log.info(lease.session_id).head
    found = []
    for seq in range(head, head + count):
        log.append(lease, [Draft("event", b"x" * 500, seq)], expected_seq=seq)
        found.append(wal.stat().st_size)
    return found


def test_a_wal_that_is_synced_grows_seldom_and_within_bounds(tmp_path: Path) -> None:
    """A sync that makes a new length durable takes longer; most appends need none."""
    with SqliteLog(tmp_path / "log.db", heartbeat=False) as log:
        lease = opened(log)
        found = lengths(log, lease, 1200)
        assert len(set(found)) < 30
        assert found == sorted(found)
        assert max(found) < 5 * 1024 * 1024
        assert log.check(lease.session_id).ok
        assert log.check(lease.session_id).events == 1200


def test_a_wal_that_is_not_synced_is_as_long_as_what_is_in_it(log: SqliteLog) -> None:
    """Zeros for nobody are not written."""
    found = lengths(log, opened(log), 20)
    assert len(set(found)) == 20


def test_a_file_with_room_behind_its_wal_is_whole_after_a_crash(tmp_path: Path) -> None:
    """Room is neither a torn write nor a lost one: everything is there and nothing is found wrong."""
    with SqliteLog(tmp_path / "log.db", heartbeat=False) as log:
        lease = opened(log)
        lengths(log, lease, 40)
        crashed = tmp_path / "crashed"
        crashed.mkdir()
        copy_open(tmp_path / "log.db", crashed / "log.db")
    assert (crashed / "log.db-wal").read_bytes().endswith(bytes(10_000))
    with SqliteLog(crashed / "log.db", heartbeat=False) as log:
        assert log.findings == ()
        assert log.check(lease.session_id).ok
        assert log.info(lease.session_id).head == 40


def test_a_log_behind_a_link_is_one_log(tmp_path: Path) -> None:
    """Its WAL lies beside the file, not beside the link, and is given room there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "log.db")
    with SqliteLog(tmp_path / "link.db", heartbeat=False) as log:
        lease = opened(log)
        assert len(set(lengths(log, lease, 20))) < 10
    with SqliteLog(tmp_path / "real" / "log.db", heartbeat=False) as log:
        assert log.info(lease.session_id).head == 20


def test_a_full_disk_has_no_room_to_spare_and_all_its_room_for_events(tmp_path: Path) -> None:
    """Where zeros do not fit, events that fit are still written."""
    with SqliteLog(tmp_path / "log.db", heartbeat=False) as log:
        lease = opened(log)
        length = first = lengths(log, lease, 1)[0]
        while length == first:  # Until SQLite has used the room up, and has written behind it.
            length = lengths(log, lease, 1)[0]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + 50_000, before[1]))
        try:
            found = lengths(log, lease, 4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(set(found)) == 4
        assert log.check(lease.session_id).ok


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt

"""Forgetting: no byte of what was pruned or erased stays in the file, the WAL or the index of the WAL."""

import sqlite3
from datetime import timedelta
from pathlib import Path
from random import Random
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treenail.clock import new_id
from treenail.errors import LeaseHeldError, LogBusyError, LogError, SessionNotFoundError
from treenail.log import Draft, Lease, MemoryLog, rows, this_process_owner
from treenail.log.sqlite import SqliteLog
from treenail.testing import FakeClock

from .conftest import BIRTH, stored_bytes


@pytest.fixture(autouse=True)
def legible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store everything as it is: deflated, what is left behind could not be searched for."""
    monkeypatch.setattr(rows, "MIN_DEFLATED_BYTES", 1 << 40)


def mark(session: int, part: str) -> bytes:
    """Make a text that occurs nowhere by chance and can be searched for by its session or its part."""
    return b"<kelp-%d:%s>" % (session, part.encode())


def named(number: int) -> UUID:
    """Return the id of a session, the same each time; its bytes occur nowhere by chance either."""
    return uuid5(NAMESPACE_OID, str(number))


def write(log: SqliteLog, number: int, random: Random, *, events: int) -> Lease:
    """Write a session whose every kind of content carries its mark."""
    session_id = named(number)
    text = mark(number, "text").decode()
    log.create(session_id, created_at=BIRTH, tags={text: text})
    lease = log.acquire(session_id, owner=this_process_owner())
    more(log, lease, number, random, events=events)
    return lease


def more(log: SqliteLog, lease: Lease, number: int, random: Random, *, events: int) -> None:
    text = mark(number, "text").decode()
    head = log.info(lease.session_id).head
    while events:
        batch = [
            Draft(text, mark(number, f"{seq}") * random.choice([1, 3, 20, 100, 500]), 1, text, text, text)
            for seq in range(head + 1, head + 1 + random.randint(1, min(events, 4)))
        ]
        log.append(lease, batch, expected_seq=head)
        head += len(batch)
        events -= len(batch)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_nothing_of_an_erased_or_pruned_session_is_left(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After any history of writing, pruning and erasing, while the log is open and after it was closed."""
    random = Random(seed)
    path = tmp_path_factory.mktemp("erase") / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        leases = {number: write(log, number, random, events=random.randrange(1, 25)) for number in range(5)}
        for _ in range(random.randrange(3)):
            number = random.choice(list(leases))
            more(log, leases[number], number, random, events=random.randrange(10))
        pruned: dict[int, int] = {}
        erased: list[int] = []
        for number in random.sample(list(leases), 4):
            lease = leases[number]
            head = log.info(lease.session_id).head
            if random.random() < 0.5:
                log.put_snapshot(lease, head, mark(number, "state") * random.choice([1, 2000]))
                pruned[number] = random.randint(1, head)
                log.prune(lease, upto=pruned[number])
            else:
                log.put_snapshot(lease, head, mark(number, "state"))
                log.release(lease)
                log.erase(lease.session_id)
                erased.append(number)
            seen = stored_bytes(path)
            assert not [each for each in erased if b"<kelp-%d:" % each in seen]
            assert not [
                (each, seq)
                for each, upto in pruned.items()
                if each not in erased
                for seq in range(1, upto + 1)
                if mark(each, f"{seq}") in seen
            ]
            assert not [each for each in erased if named(each).bytes in seen]
        for number, lease in leases.items():
            if number not in erased:
                assert log.check(lease.session_id).ok
    seen = path.read_bytes()
    assert not [each for each in erased if b"<kelp-%d:" % each in seen]


def test_nothing_of_a_deflated_row_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one that goes as a whole nor of one that was cut."""
    monkeypatch.undo()
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        lease = write(log, 0, Random(1), events=0)
        for done in range(0, 12, 3):
            batch = [Draft("t", Random(done + n).randbytes(900).hex().encode(), 1) for n in range(3)]
            log.append(lease, batch, expected_seq=done)
        reader = sqlite3.connect(path)
        stored = [each for (each,) in reader.execute("SELECT payload FROM events ORDER BY seq LIMIT 3")]
        reader.close()
        assert all(len(each) < 3 * 1800 and each[:64] in stored_bytes(path) for each in stored)
        log.put_snapshot(lease, 12, b"state")
        log.prune(lease, upto=8)
        seen = stored_bytes(path)
        # Of the row that was cut its last event stays: what is left of it was deflated anew.
        assert not [n for each in stored for n in range(0, len(each) - 32, 32) if each[n : n + 32] in seen]
        assert log.check(lease.session_id).ok


def test_a_reader_in_the_way_is_reported_and_the_second_attempt_finishes(tmp_path: Path) -> None:
    """While somebody reads an old state its bytes must stay, and the log does not claim otherwise."""
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False, busy_timeout_s=0.3) as log:
        lease = write(log, 0, Random(1), events=10)
        kept = write(log, 1, Random(1), events=10)
        log.release(lease)
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        with pytest.raises(LogBusyError, match=r"old bytes may still be in .*scrub"):
            log.erase(lease.session_id)
        assert mark(0, "text") in stored_bytes(path)
        with pytest.raises(SessionNotFoundError):
            log.info(lease.session_id)
        with pytest.raises(LogBusyError):
            log.erase(lease.session_id)
        reader.close()
        log.erase(lease.session_id)
        assert b"<kelp-0:" not in stored_bytes(path)
        with pytest.raises(SessionNotFoundError):
            log.erase(lease.session_id)
        assert len(list(log.read(kept.session_id))) == 10


def test_what_could_not_be_rebuilt_can_be_rebuilt_later(tmp_path: Path) -> None:
    """Also by another process, after the first one is gone."""
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False, busy_timeout_s=0.1) as log:
        lease = write(log, 0, Random(1), events=10)
        log.put_snapshot(lease, 10, b"state")
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        with pytest.raises(LogBusyError, match="up to 8"):
            log.prune(lease, upto=8)
        assert [event.seq for event in log.read(lease.session_id)] == [9, 10]
    reader.close()
    with SqliteLog(path, heartbeat=False) as log:
        log.scrub()
        seen = stored_bytes(path)
        assert not [seq for seq in range(1, 9) if mark(0, f"{seq}") in seen]
        assert mark(0, "9") in seen


def test_a_reader_of_an_erased_session_is_told(tmp_path: Path) -> None:
    """Half-read sessions that are erased or pruned meanwhile end in a clear error, not in silence."""
    with SqliteLog(tmp_path / "log.db", synchronous="NORMAL", heartbeat=False) as log:
        session_id = new_id()
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        for seq in range(2000):
            log.append(lease, [Draft("t", b"x", 1)], expected_seq=seq)
        for forget, error in (
            (lambda: (log.put_snapshot(lease, 1500, b""), log.prune(lease, upto=1500)), "pruned"),
            (lambda: (log.release(lease), log.erase(session_id)), "erased"),
        ):
            reader = log.read(session_id)
            first = next(reader).seq
            forget()
            if error == "erased" and first > 1:
                # The rest was already fetched with the first event.
                assert len(list(reader)) == 499
                continue
            with pytest.raises(LogError, match=error):
                list(reader)
        assert list(log.sessions()) == []


# --- retention ---------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock):
    log = (
        MemoryLog(clock=clock, heartbeat=False)
        if request.param == "memory"
        else SqliteLog(tmp_path / "log.db", synchronous="NORMAL", heartbeat=False, clock=clock)
    )
    yield log
    log.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(BIRTH)


def day(number: int) -> int:
    return round((BIRTH + timedelta(days=number)).timestamp() * 1_000_000)


def make(
    log: MemoryLog | SqliteLog, created: int, used: int | None = None, parent: UUID | None = None
) -> UUID:
    session_id = new_id()
    log.create(session_id, created_at=BIRTH + timedelta(days=created), parent_id=parent)
    if used is not None:
        lease = log.acquire(session_id, owner="me")
        log.append(lease, [Draft("t", b"x", day(used))], expected_seq=0)
        log.release(lease)
    return session_id


def test_the_most_recently_used_sessions_are_kept(log: MemoryLog | SqliteLog) -> None:
    """Age is when a session was last used, not when it was made."""
    old_but_used, oldest, newest, middle = make(log, 0, 9), make(log, 1), make(log, 5), make(log, 2, 4)
    assert list(log.keep_last(4)) == []
    assert list(log.keep_last(2)) == [oldest, middle]
    assert [info.session_id for info in log.sessions()] == [old_but_used, newest]
    assert list(log.keep_last(0)) == [newest, old_but_used]
    with pytest.raises(ValueError, match="0 or more"):
        log.keep_last(-1)


def test_children_go_and_stay_with_their_parent(log: MemoryLog | SqliteLog) -> None:
    """A run is one thing with its judges and subagents."""
    parent = make(log, 0)
    child = make(log, 1, parent=parent)
    grandchild = make(log, 2, 8, parent=child)
    other = make(log, 5)
    assert list(log.keep_last(1)) == [other]
    assert sorted(log.prune_sessions(BIRTH + timedelta(days=9))) == sorted([parent, child, grandchild])
    assert list(log.sessions()) == []


def test_old_sessions_are_erased_by_age(log: MemoryLog | SqliteLog) -> None:
    """Strictly before the given time."""
    sessions = [make(log, number) for number in range(4)]
    assert list(log.prune_sessions(BIRTH + timedelta(days=2))) == sessions[:2]
    assert [info.session_id for info in log.sessions()] == sessions[2:]


def test_what_is_being_written_is_kept(log: MemoryLog | SqliteLog, clock: FakeClock) -> None:
    """With its family, until the writer is gone."""
    parent = make(log, 0)
    child = make(log, 0, parent=parent)
    lease = log.acquire(child, owner="me")
    assert list(log.keep_last(0)) == []
    assert list(log.prune_sessions(BIRTH + timedelta(days=30))) == []
    with pytest.raises(LeaseHeldError):
        log.erase(child)
    clock.advance(lease.ttl_s)
    assert sorted(log.keep_last(0)) == sorted([parent, child])

"""Attacks on an append: killed writers, writers that are too late, files that are changed under its hands."""

import gc
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from types import FrameType
from uuid import UUID, uuid4

import pytest
from tests.forks import ended, fork

from treenail.errors import LeaseHeldError, LogBusyError, LogDamagedError, LogError, StaleWriterError
from treenail.log import Draft, Lease, Log, MemoryLog
from treenail.log.lease import LeaseKeeper
from treenail.log.sqlite import SqliteLog

from .conftest import BIRTH, copy_open

SESSION = UUID(int=1)


def event(payload: bytes = b"x") -> list[Draft]:
    return [Draft("t", payload, 1)]


def begun(path: Path, events: int = 0) -> tuple[SqliteLog, Lease]:
    """Open a log that waits for the disk, with one session in it."""
    log = SqliteLog(path, heartbeat=False)
    log.create(SESSION, created_at=BIRTH)
    lease = log.acquire(SESSION, owner="me", ttl_s=1000)
    for seq in range(events):
        log.append(lease, event(b"%d" % (seq + 1)), expected_seq=seq)
    return log, lease


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def stock_check(path: Path) -> None:
    """Ask SQLite itself, from another process, whether a file is whole."""
    assert foreign(path, "PRAGMA integrity_check") == ["[('ok',)]"]


def foreign(path: Path, *statements: str) -> list[str]:
    """Run statements in another process that knows nothing of Treenail; returns what each said."""
    code = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
for statement in sys.argv[2:]:
    try:
        print(connection.execute(statement).fetchall())
    except sqlite3.OperationalError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), *statements], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


# --- killed under load -------------------------------------------------------------------------------

WRITER = """
import os, random, sys
from datetime import UTC, datetime
from uuid import UUID
from treenail.log import Draft
from treenail.log.lease import this_process_owner
from treenail.log.sqlite import SqliteLog

number = int(sys.argv[2])
chance = random.Random(number)
log = SqliteLog(sys.argv[1], synchronous="FULL", heartbeat=False)
session_id = UUID(int=100 + number)
log.create(session_id, created_at=datetime.now(UTC))
lease = log.acquire(session_id, owner=this_process_owner())
head = 0
while True:
    count, size = chance.choice([1, 1, 1, 4]), chance.choice([1, 300, 9000])
    batch = [Draft("t", b"%d:" % (head + n + 1) + chance.randbytes(size), 1) for n in range(count)]
    log.append(lease, batch, expected_seq=head)
    head += count
    os.write(1, b"%d\\n" % head)
"""

RACER = """
import os, random, sys
from uuid import UUID
from treenail.errors import LeaseHeldError, StaleWriterError
from treenail.log import Draft
from treenail.log.lease import this_process_owner
from treenail.log.sqlite import SqliteLog

number = int(sys.argv[2])
chance = random.Random(number)
log = SqliteLog(sys.argv[1], synchronous="FULL", heartbeat=False)
owner, session_id = this_process_owner(), UUID(int=1)
while True:
    try:
        lease = log.acquire(session_id, owner=owner, ttl_s=chance.choice([0.0005, 0.003, 0.01]))
    except LeaseHeldError:
        continue
    head = log.info(session_id).head
    for _ in range(chance.randrange(1, 30)):
        try:
            log.append(lease, [Draft("t", b"%d" % number, 1)], expected_seq=head)
        except StaleWriterError as error:
            assert "taken over" in str(error), error
            try:
                log.append(lease, [Draft("t", b"again", 1)], expected_seq=head)
            except StaleWriterError:
                break
            raise SystemExit("a writer that was refused got through at the second attempt")
        (written,) = log.read(session_id, after=head, upto=head + 1)
        head += 1
        os.write(1, b"%d %s\\n" % (head, written.checksum.hex().encode()))
"""

FOREIGNER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
modes = ["TRUNCATE", "PASSIVE", "RESTART"]
print("0", flush=True)
while True:
    for mode in modes:
        try:
            connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError as error:
            assert "locked" in str(error), error
"""


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    """Writers, writers that take one session from each other, and a foreign checkpointer, all killed.

    Each acknowledged event is there, in the place that was acknowledged, for another process and for a
    copy of the files; no place was acknowledged twice.
    """
    path = tmp_path / "log.db"
    with SqliteLog(path, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
    chance = Random(1)
    roles = [WRITER, WRITER, RACER, RACER, FOREIGNER]
    processes = []
    for number, code in enumerate(roles):
        with (tmp_path / f"out{number}").open("wb") as out, (tmp_path / f"err{number}").open("wb") as err:
            processes.append(
                subprocess.Popen([sys.executable, "-c", code, str(path), str(number)], stdout=out, stderr=err)
            )
    outs = [tmp_path / f"out{number}" for number in range(len(roles))]
    pause = threading.Event()
    enough = chance.randrange(1, 300)
    while sum(out.stat().st_size for out in outs[:2]) < enough or not all(out.stat().st_size for out in outs):
        assert all(process.poll() is None for process in processes), [
            (tmp_path / f"err{number}").read_text() for number in range(len(roles))
        ]
        pause.wait(chance.uniform(0.001, 0.02))
    for process in chance.sample(processes, len(processes)):
        process.send_signal(signal.SIGKILL)
        pause.wait(chance.choice([0.0, 0.02]))
    for number, process in enumerate(processes):
        assert process.wait() == -signal.SIGKILL, (tmp_path / f"err{number}").read_text()

    # A line may have been cut off by the kill.
    lines = [out.read_text().split("\n")[:-1] for out in outs]
    heads = {UUID(int=100 + number): int(lines[number][-1]) for number in (0, 1)}
    raced = [line.split() for number in (2, 3) for line in lines[number]]
    places = {int(seq): checksum for seq, checksum in raced}
    assert len(places) == len(raced)
    copy_open(path, tmp_path / "copy.db")
    stock_check(tmp_path / "copy.db")
    for each in (path, tmp_path / "copy.db"):
        with SqliteLog(each, heartbeat=False) as log:
            for session_id, head in heads.items():
                events = list(log.read(session_id))
                assert len(events) >= head
                assert all(found.payload.startswith(b"%d:" % found.seq) for found in events)
            found = {stored.seq: stored.checksum.hex() for stored in log.read(SESSION)}
            assert places.items() <= found.items()
            assert all(log.check(session_id).ok for session_id in (SESSION, *heads))
    stock_check(path)


# --- writers that are too late -----------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "memory"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Log, Log]:
    """Two handles on one log, as two processes have them."""
    if request.param == "memory":
        memory = MemoryLog(heartbeat=False)
        return memory, memory
    return SqliteLog(tmp_path / "log.db", heartbeat=False), SqliteLog(tmp_path / "log.db", heartbeat=False)


def made_anew(first: Log, second: Log) -> tuple[Lease, Lease]:
    """Let a writer's session be erased, and made again under the same id, with the same first event."""
    first.create(SESSION, created_at=BIRTH)
    old = first.acquire(SESSION, owner="old", ttl_s=1e-6)
    first.append(old, event(), expected_seq=0)
    second.erase(SESSION)
    second.create(SESSION, created_at=BIRTH)
    new = second.acquire(SESSION, owner="new", ttl_s=1000)
    second.append(new, event(), expected_seq=0)
    assert old.epoch == new.epoch
    return old, new


def test_the_writer_of_an_erased_session_is_not_that_of_the_one_in_its_place(logs: tuple[Log, Log]) -> None:
    """Its epoch, its place and even the last checksum are those of the new session, and it is refused."""
    first, second = logs
    old, new = made_anew(first, second)
    for _ in range(2):
        with pytest.raises(StaleWriterError, match=r"old .*new"):
            first.append(old, event(b"stale"), expected_seq=1)
    with pytest.raises(StaleWriterError, match="erased"):
        first.renew(old)
    second.append(new, event(b"good"), expected_seq=1)
    assert [stored.payload for stored in first.read(SESSION)] == [b"x", b"good"]
    first.close()
    second.close()


def test_the_writer_of_an_erased_session_gives_nobody_elses_lease_back(logs: tuple[Log, Log]) -> None:
    """Releasing what was lost does nothing: the session stays with who holds it."""
    first, second = logs
    old, new = made_anew(first, second)
    first.release(old)
    with pytest.raises(LeaseHeldError):
        first.acquire(SESSION, owner="third")
    second.append(new, event(), expected_seq=1)
    first.close()
    second.close()


@pytest.mark.parametrize("owner", ["old", "new"])
def test_a_lease_that_was_taken_over_is_refused_before_anything_else_was_written(
    owner: str, logs: tuple[Log, Log]
) -> None:
    """It remembers the right end, and its owner may hold the new lease: the epoch counts."""
    first, second = logs
    first.create(SESSION, created_at=BIRTH)
    old = first.acquire(SESSION, owner="old", ttl_s=1e-6)
    first.append(old, event(b"1"), expected_seq=0)
    new = second.acquire(SESSION, owner=owner, ttl_s=1000)
    for _ in range(2):
        with pytest.raises(StaleWriterError, match="taken over"):
            first.append(old, event(b"stale"), expected_seq=1)
    first.append(new, event(b"2"), expected_seq=1)
    with pytest.raises(StaleWriterError, match="taken over"):
        first.append(old, event(b"stale"), expected_seq=2)
    second.append(new, event(b"3"), expected_seq=2)
    assert [stored.payload for stored in first.read(SESSION)] == [b"1", b"2", b"3"]
    first.close()
    second.close()


def test_a_lease_that_was_lost_does_not_spoil_a_new_one_with_its_number() -> None:
    """What a heartbeat found out about a session is forgotten with it."""
    with MemoryLog(heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        keeper = LeaseKeeper(log.renew, beat=False)
        keeper.hold(lease)
        keeper.lose(lease)
        assert keeper.is_lost(lease)
        keeper.hold(lease)
        assert not keeper.is_lost(lease)


# --- texts -------------------------------------------------------------------------------------------


class Odd(str):
    """Text that prints as something else than its characters, as the members of some enumerations do."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "odd"


def test_a_text_is_checksummed_as_it_is_stored(tmp_path: Path) -> None:
    """A text of another class is read again, and so are later events with the same text."""
    path = tmp_path / "log.db"
    kind = f"started {uuid4()}"  # Nobody has had it checksummed before.
    odd = Odd(kind)
    assert f"{odd}" != kind
    with SqliteLog(path, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, [Draft(odd, b"1", 1, turn_id=odd)], expected_seq=0)
        log.append(lease, [Draft(kind, b"2", 1, turn_id=kind)], expected_seq=1)
        log.append(lease, [Draft(odd, b"3", 1), Draft(odd, b"4", 1)], expected_seq=2)
    code = "import sys, uuid; from treenail.log.sqlite import SqliteLog\n"
    code += "print(SqliteLog(sys.argv[1], read_only=True).check(uuid.UUID(int=1)).ok)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"
    with SqliteLog(path, heartbeat=False) as log:
        assert [stored.type for stored in log.read(SESSION)] == [kind] * 4


# --- files that are changed under its hands ----------------------------------------------------------


def test_a_wal_that_somebody_else_empties_is_written_on(tmp_path: Path) -> None:
    """Whatever a foreign connection makes of the WAL between two appends, none is lost."""
    path = tmp_path / "log.db"
    log, lease = begun(path)
    other = sqlite3.connect(path, isolation_level=None)
    for seq in range(60):
        log.append(lease, event(b"%d" % (seq + 1) * 100), expected_seq=seq)
        for number, mode in ((3, "TRUNCATE"), (5, "RESTART"), (7, "PASSIVE")):
            if seq % number == 0:
                assert other.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0] == 0
    assert wal_of(path).stat().st_size > 0
    other.close()
    stock_check(path)
    log.close()
    with SqliteLog(path, heartbeat=False) as log:
        assert [stored.payload for stored in log.read(SESSION)] == [b"%d" % n * 100 for n in range(1, 61)]


def test_a_foreign_tool_changes_the_journal_only_while_nobody_writes(tmp_path: Path) -> None:
    """It is refused while the log is open, and what it did in between is set right."""
    path = tmp_path / "log.db"
    log, lease = begun(path, 3)
    assert foreign(path, "PRAGMA journal_mode = DELETE") == ["database is locked"]
    assert ended(fork(lambda: None)) == 0  # A fork closes the file until it is used again.
    assert foreign(path, "PRAGMA journal_mode = DELETE", "VACUUM") == ["[('delete',)]", "[]"]
    log.append(lease, event(), expected_seq=3)
    log.append(lease, event(), expected_seq=4)
    assert foreign(path, "PRAGMA journal_mode", "SELECT max(seq) FROM events") == ["[('wal',)]", "[(5,)]"]
    log.close()


@pytest.mark.parametrize("what", ["removed", "replaced", "directory moved", "no directory"])
def test_a_database_that_is_not_in_its_place_is_refused(what: str, tmp_path: Path) -> None:
    """By each further attempt as well."""
    home = tmp_path / "home"
    home.mkdir()
    path = home / "log.db"
    log, lease = begun(path, 3)
    match what:
        case "removed":
            path.unlink()
        case "replaced":
            (home / "new.db").write_bytes(b"")
            (home / "new.db").rename(path)
        case _:
            home.rename(tmp_path / "elsewhere")
            if what == "no directory":
                home.write_text("a file in the place of the directory")
    for _ in range(2):
        with pytest.raises(LogError, match="nothing was written"):
            log.append(lease, event(b"4"), expected_seq=3)
    log.close()


def test_a_row_that_sqlite_refuses_is_never_acknowledged(tmp_path: Path) -> None:
    """A constraint that is in the way is an error of its own, not taken for another end of the session."""
    path = tmp_path / "log.db"
    log, lease = begun(path, 3)
    foreign(path, "CREATE UNIQUE INDEX once ON events (payload)")
    for _ in range(2):
        with pytest.raises(LogDamagedError, match="UNIQUE"):
            log.append(lease, event(b"3"), expected_seq=3)
    log.append(lease, event(b"4"), expected_seq=3)
    assert [stored.payload for stored in log.read(SESSION)] == [b"1", b"2", b"3", b"4"]
    foreign(path, "DROP INDEX once")
    log.append(lease, event(b"3"), expected_seq=4)
    log.close()


def test_a_writer_continues_in_a_file_that_others_have_rebuilt(tmp_path: Path) -> None:
    """Erasing and pruning rebuild the file; a writer finds the end of its session."""
    path = tmp_path / "log.db"
    log, lease = begun(path, 3)
    with SqliteLog(path, heartbeat=False) as other:
        for seq in range(3, 9):
            passing = uuid4()
            other.create(passing, created_at=BIRTH)
            other.erase(passing)
            log.append(lease, event(b"%d" % (seq + 1)), expected_seq=seq)
        other.put_snapshot(lease, 9, b"state")
        assert other.prune(lease, upto=9) == 9
        log.append(lease, event(b"10"), expected_seq=9)
        log.append(lease, event(b"11"), expected_seq=10)
        assert [(stored.seq, stored.payload) for stored in other.read(SESSION)] == [(10, b"10"), (11, b"11")]
        assert other.check(SESSION).ok
    log.close()
    stock_check(path)


# --- no room, no descriptors -------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 100, 4120, 20_000])
def test_where_the_disk_ends_nothing_is_lost(spare: int, tmp_path: Path) -> None:
    """An event that does not fit is refused, and fits later."""
    path = tmp_path / "log.db"
    log, lease = begun(path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    head, refusals = 2, list[str]()
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal_of(path).stat().st_size + spare, before[1]))
    try:
        while len(refusals) < 3:
            try:
                log.append(lease, event(b"%d" % (head + 1)), expected_seq=head)
                head += 1
            except LogError as error:
                refusals.append(str(error))
            assert log.info(SESSION).head == head
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert all("nothing was written" in refusal for refusal in refusals)
    for seq in range(head, head + 20):
        log.append(lease, event(b"%d" % (seq + 1)), expected_seq=seq)
    copy_open(path, tmp_path / "copy.db")
    log.close()
    for each in (path, tmp_path / "copy.db"):
        stock_check(each)
        with SqliteLog(each, heartbeat=False) as log:
            assert log.damage == ()
            assert [stored.payload for stored in log.read(SESSION)] == [
                b"%d" % n for n in range(1, head + 21)
            ]


def open_files(path: Path) -> int:
    """How many files this process has open of a log; other tests' threads may open and close their own."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith(str(path))
    return count


FEW_FILES = """
import os, resource, sys
from uuid import UUID

from treenail.errors import LogError
from treenail.log.sqlite import SqliteLog

# A limit is one of numbers, not of files: the numbers below must not have gaps.
highest = max(int(name) for name in os.listdir("/proc/self/fd"))
while (last := os.open(os.devnull, os.O_RDONLY)) <= highest:
    pass
before = resource.getrlimit(resource.RLIMIT_NOFILE)
for spare in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + spare, before[1]))
    try:
        with SqliteLog(sys.argv[1], heartbeat=False, busy_timeout_s=0.1) as log:
            told = f"served {log.info(UUID(int=1)).head}"
    except LogError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(told)
"""


def test_a_process_that_may_open_few_files_is_told_or_served(tmp_path: Path) -> None:
    """Too few open files is an error that says so."""
    path = tmp_path / "log.db"
    begun(path, 3)[0].close()
    told = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(path)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(told) == 8
    refused = [line for line in told if str(path) in line]
    assert 0 < len(refused) < 8
    assert told[len(refused) :] == ["served 3"] * (8 - len(refused)), "more files were of less use"


def test_a_forgotten_log_keeps_no_file_open(tmp_path: Path) -> None:
    """The system gets its files back when the last reference is gone."""
    path = tmp_path / "log.db"
    begun(path, 3)[0].close()
    log = SqliteLog(path, heartbeat=False)
    assert log.info(SESSION).head == 3
    assert open_files(path) >= 2
    del log
    assert open_files(path) == 0


# --- signals -----------------------------------------------------------------------------------------


def test_a_fork_in_a_signal_handler_disturbs_no_append(tmp_path: Path) -> None:
    """The parent's appends are as they would be without it, wherever the handler came in between."""
    path = tmp_path / "log.db"
    log, lease = begun(path)
    forks = 0

    def handler(_: int, __: FrameType | None) -> None:
        nonlocal forks
        forks += 1
        assert ended(fork(lambda: None)) == 0

    previous = signal.signal(signal.SIGALRM, handler)
    head = 0
    try:
        while forks < 30:
            signal.setitimer(signal.ITIMER_REAL, 0.00002 + 0.00001 * forks)
            log.append(lease, event(b"%d" % (head + 1)), expected_seq=head)
            head += 1
            assert log.info(SESSION).head == head
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    log.close()
    with SqliteLog(path, heartbeat=False) as log:
        assert [stored.payload for stored in log.read(SESSION)] == [b"%d" % n for n in range(1, head + 1)]
    stock_check(path)


def test_what_a_signal_handler_raises_comes_through_as_it_is(tmp_path: Path) -> None:
    """A time-out of the caller's own is not taken for the system's, and the append was all or nothing."""
    path = tmp_path / "log.db"
    log, lease = begun(path)

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError("the caller's")

    previous = signal.signal(signal.SIGALRM, late)
    head, timeouts = 0, list[str]()
    gc.disable()  # What a handler raises in a callback of the collector comes through nowhere.
    try:
        while len(timeouts) < 40:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.00002 + 0.00001 * len(timeouts))
                    log.append(lease, event(b"%d" % (head + 1)), expected_seq=head)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeoutError as error:
                timeouts.append(str(error))
            else:
                assert log.info(SESSION).head == head + 1
            assert log.info(SESSION).head in (head, head + 1)
            head = log.info(SESSION).head
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, previous)
    assert set(timeouts) == {"the caller's"}
    assert [stored.payload for stored in log.read(SESSION)] == [b"%d" % n for n in range(1, head + 1)]
    log.close()
    stock_check(path)


def test_a_signal_handler_that_appends_harms_no_transaction(tmp_path: Path) -> None:
    """It is served, or told that it came in between; nothing that was acknowledged on either side is lost."""
    path = tmp_path / "log.db"
    log, lease = begun(path)
    other = UUID(int=2)
    log.create(other, created_at=BIRTH)
    other_lease = log.acquire(other, owner="me", ttl_s=1000)
    served: list[bytes] = []
    refused: list[str] = []

    def append(_: int, __: FrameType | None) -> None:
        payload = b"%d" % (len(served) + 1) * 500
        try:
            log.append(other_lease, event(payload), expected_seq=len(served))
            served.append(payload)
        except LogBusyError as error:
            refused.append(str(error))

    previous = signal.signal(signal.SIGALRM, append)
    try:
        for seq in range(100):
            signal.setitimer(signal.ITIMER_REAL, 0.00001 * (seq % 30 + 1))
            log.renew(lease)
            log.append(lease, event(b"%d" % (seq + 1) * 500), expected_seq=seq)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert all("in a transaction" in refusal for refusal in refused)
    log.close()
    with SqliteLog(path, heartbeat=False) as log:
        assert [stored.payload for stored in log.read(other)] == served
        assert [stored.payload for stored in log.read(SESSION)] == [b"%d" % n * 500 for n in range(1, 101)]
    stock_check(path)

"""Several processes, forks, interrupts and migrations on one file."""

import os
import queue
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from tests.forks import ended, fork, in_child

from treenail.clock import FixedClock, new_id
from treenail.errors import LeaseHeldError, LogBusyError, LogError, StaleWriterError, UsageError
from treenail.log import Draft, Lease, MemoryLog, Note, this_process_owner
from treenail.log.lease import LeaseKeeper, owner_is_alive
from treenail.log.sqlite import SqliteLog, migrations
from treenail.testing import FakeClock

from .conftest import BIRTH

SESSION = UUID(int=1)


def event(payload: bytes = b"x") -> list[Draft]:
    return [Draft("t", payload, 1)]


def run(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- many processes ----------------------------------------------------------------------------------

FIRST_START = """
import sys
from uuid import uuid4
from datetime import datetime, UTC
from treenail.log import Draft
from treenail.log.lease import this_process_owner
from treenail.log.sqlite import SqliteLog

print("ready", flush=True)
sys.stdin.readline()
with SqliteLog(sys.argv[1]) as log:
    session_id = uuid4()
    log.create(session_id, created_at=datetime.now(UTC))
    lease = log.acquire(session_id, owner=this_process_owner())
    for seq in range(20):
        log.append(lease, [Draft("t", b"%d" % seq, 1)], expected_seq=seq)
    assert len(log.sessions()) >= 1
"""


def test_ten_processes_open_a_new_file_at_the_same_moment(tmp_path: Path) -> None:
    """All of them succeed, and everything that they write is there."""
    path = tmp_path / "log.db"
    processes = [run(FIRST_START, path) for _ in range(10)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    with SqliteLog(path) as log:
        sessions = log.sessions()
        assert [info.head for info in sessions] == [20] * 10
        for info in sessions:
            assert [e.payload for e in log.read(info.session_id)] == [b"%d" % n for n in range(20)]


def test_a_file_that_is_migrated_while_it_is_looked_at_is_not_taken_for_a_foreign_one(tmp_path: Path) -> None:
    """Its identity and its tables are read at one moment: before the migration, or after it."""
    path = tmp_path / "log.db"
    slow = sqlite3.connect(path, isolation_level=None)
    slow.execute("PRAGMA journal_mode = WAL")
    quick = sqlite3.connect(path, isolation_level=None)
    slow.set_trace_callback(lambda sql: migrations.migrate(quick, path) if "user_version" in sql else None)
    assert migrations.version_of(slow, path) == 0
    assert migrations.version_of(slow, path) == migrations.LATEST
    slow.close()
    quick.close()


HOLD = """
import sys
from uuid import UUID
from treenail.log.lease import this_process_owner
from treenail.log.sqlite import SqliteLog

log = SqliteLog(sys.argv[1])
lease = log.acquire(UUID(int=1), owner=this_process_owner(), ttl_s=3600)
print(lease.epoch, flush=True)
sys.stdin.readline()
"""


def test_a_killed_writer_is_replaced_at_once(tmp_path: Path) -> None:
    """While it lives it is respected; when its process is gone nobody waits for the lease to expire."""
    path = tmp_path / "log.db"
    with SqliteLog(path) as log:
        log.create(SESSION, created_at=BIRTH)
        holder = run(HOLD, path)
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        with pytest.raises(LeaseHeldError) as refusal:
            log.acquire(SESSION, owner=this_process_owner())
        assert owner_is_alive(refusal.value.owner or "") is True
        told = rf"process {holder.pid} \(`.*python.*`, running since 20..-..-.. ..:..:.. UTC\)"
        assert re.match(told, refusal.value.holder)
        holder.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        # Not yet reaped: a zombie has ended all the same.
        assert owner_is_alive(refusal.value.owner or "") is False
        lease = log.acquire(SESSION, owner=this_process_owner())
        assert lease.epoch == 2
        holder.communicate()
        log.append(lease, event(), expected_seq=0)
        assert log.info(SESSION).head == 1


def test_a_locked_file_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    """A write waits as long as it is told to, then says what waited for what; afterwards all is well."""
    path = tmp_path / "log.db"
    with SqliteLog(path, busy_timeout_s=0.3, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogBusyError, match=r"append to session .*log\.db.*0\.3 s"):
            log.append(lease, event(), expected_seq=0)
        assert list(log.read(SESSION)) == []
        other.execute("COMMIT")
        log.append(lease, event(), expected_seq=0)
        other.close()
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=lambda: log.append(lease, event(), expected_seq=1))
        writer.start()
        with SqliteLog(path, read_only=True) as reader:
            assert len(list(reader.read(SESSION))) == 1
        other.execute("COMMIT")
        writer.join()
        other.close()
        assert log.info(SESSION).head == 2


# --- forks -------------------------------------------------------------------------------------------


def test_a_forked_child_writes_its_own_session(tmp_path: Path) -> None:
    """Both sides go on with the same object, and neither loses a commit to the other."""
    log = SqliteLog(tmp_path / "log.db")
    log.create(SESSION, created_at=BIRTH)
    lease = log.acquire(SESSION, owner=this_process_owner())
    log.append(lease, event(b"before"), expected_seq=0)
    child_session = new_id()
    ready, go = os.pipe(), os.pipe()

    def work() -> None:
        log.create(child_session, created_at=BIRTH)
        mine = log.acquire(child_session, owner=this_process_owner())
        log.append(mine, event(b"1"), expected_seq=0)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        # The parent has closed the file by now. Its close must not take ours away.
        log.append(mine, event(b"2"), expected_seq=1)
        assert len(list(log.read(SESSION))) == 2
        log.close()

    child = fork(work)
    os.read(ready[0], 1)
    log.append(lease, event(b"after"), expected_seq=1)
    log.close()
    os.write(go[1], b"x")
    assert ended(child) == 0
    for end in (*ready, *go):
        os.close(end)
    with SqliteLog(tmp_path / "log.db") as again:
        assert [e.payload for e in again.read(SESSION)] == [b"before", b"after"]
        assert [e.payload for e in again.read(child_session)] == [b"1", b"2"]


def test_a_child_that_closes_its_copy_leaves_the_parents_lease_alone(tmp_path: Path) -> None:
    """Leases belong to the process that took them."""
    with SqliteLog(tmp_path / "log.db") as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner=this_process_owner())
        in_child(log.close)
        assert log.info(SESSION).owner == lease.owner
        log.append(lease, event(), expected_seq=0)
        assert log.info(SESSION).head == 1


def test_a_fork_waits_for_a_transaction_under_way(tmp_path: Path) -> None:
    """While threads append, children are forked that read whole batches only."""
    with SqliteLog(tmp_path / "log.db", synchronous="NORMAL") as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner=this_process_owner())
        stop, at_work = threading.Event(), threading.Event()
        # Enough to be at it while a child is made, and no more: a slow child is not to make the log longer.
        batches = threading.Semaphore(0)
        head = 0

        def write() -> None:
            nonlocal head
            while batches.acquire() and not stop.is_set():
                log.append(lease, event() * 3, expected_seq=head)
                head += 3
                at_work.set()

        def look() -> None:
            assert len(list(log.read(SESSION))) % 3 == 0
            log.close()

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(10):
            at_work.clear()
            batches.release(200)
            assert at_work.wait(60)
            in_child(look)
        stop.set()
        batches.release()
        writer.join()
        assert len(list(log.read(SESSION))) == head > 0
        assert log.check(SESSION).ok


# --- interrupts --------------------------------------------------------------------------------------

INTERRUPTED = """
import gc, random, signal, sys, time
from uuid import UUID
from treenail.log import Draft
from treenail.log.sqlite import SqliteLog

def strike(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, strike)
log = SqliteLog(sys.argv[1], synchronous="NORMAL", heartbeat=False)
lease = log.acquire(UUID(int=1), owner="me", ttl_s=3600)
head = hits = 0
quickest = 1.0
for _ in range(20):
    began = time.perf_counter()
    log.append(lease, [Draft("t", b"%d" % (head + n), 1) for n in (1, 2, 3)], expected_seq=head)
    quickest = min(quickest, time.perf_counter() - began)
    head += 3
gc.disable()  # What a handler raises in a callback of the collector comes through nowhere.
while hits < 200:
    try:
        # From the beginning of an append to some appends later, on a machine of any pace.
        signal.setitimer(signal.ITIMER_REAL, quickest * random.uniform(0.1, 5))
        # Many more than the timer lasts for: an interrupt that was lost in a destructor is not waited for.
        for _ in range(200):
            log.append(lease, [Draft("t", b"%d" % (head + n), 1) for n in (1, 2, 3)], expected_seq=head)
            head += 3
    except KeyboardInterrupt:
        hits += 1
    # Between the commit and the return an interrupt may come too late to stop the append.
    now = log.info(UUID(int=1)).head
    assert now in (head, head + 3), (now, head)
    head = now
print(head)
log.close()
"""


def test_an_interrupt_leaves_all_or_nothing_and_a_usable_log(tmp_path: Path) -> None:
    """Two hundred interrupts at random moments of appending, without opening the log again."""
    path = tmp_path / "log.db"
    with SqliteLog(path) as log:
        log.create(SESSION, created_at=BIRTH)
    process = run(INTERRUPTED, path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with SqliteLog(path) as log:
        payloads = [e.payload for e in log.read(SESSION)]
        assert payloads == [b"%d" % n for n in range(1, int(output) + 1)]
        assert len(payloads) > 60


# --- heartbeats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_keeper_renews_and_remembers_what_it_lost(kind: str, tmp_path: Path) -> None:
    """A heartbeat extends every held lease; a refused one makes the next append fail at once."""
    path = tmp_path / "log.db"
    log = MemoryLog(heartbeat=False) if kind == "memory" else SqliteLog(path, heartbeat=False)
    log.create(SESSION, created_at=BIRTH)
    keeper = LeaseKeeper(log.renew, beat=False)
    lease = log.acquire(SESSION, owner=this_process_owner())
    keeper.hold(lease)
    keeper.beat()
    (renewed,) = keeper.held()
    assert renewed.expires_at > lease.expires_at
    log.release(lease)
    log.acquire(SESSION, owner="somebody else")
    assert not keeper.is_lost(lease)
    keeper.beat()
    assert keeper.is_lost(lease)
    assert keeper.held() == ()
    keeper.close()
    log.close()


def test_the_thread_beats_by_itself_and_ends_with_the_log(tmp_path: Path) -> None:
    """A lease that lasts a fraction of a second is kept for as long as the log is open."""
    # The thread beats in real time; what has expired is a matter of this clock, whatever the machine's pace.
    clock = FakeClock()
    beats: queue.SimpleQueue[Lease] = queue.SimpleQueue()
    keepers: set[threading.Thread] = set()

    class Watched(SqliteLog):
        def renew(self, lease):
            renewed = super().renew(lease)
            keepers.add(threading.current_thread())
            beats.put(renewed)
            return renewed

    log = Watched(tmp_path / "log.db", clock=clock)
    log.create(SESSION, created_at=BIRTH)
    lease = log.acquire(SESSION, owner="not a process", ttl_s=0.3)
    for _ in range(4):
        while beats.get(timeout=60).expires_at < clock.now() + timedelta(seconds=0.25):
            pass  # A beat of before the clock's last step.
        clock.advance(0.2)
    # It would have expired without them.
    with pytest.raises(LeaseHeldError):
        log.acquire(SESSION, owner="other")
    log.append(lease, event(), expected_seq=0)
    (keeper,) = keepers
    assert keeper.name == "treenail-lease-keeper"
    log.close()
    keeper.join(60)
    assert not keeper.is_alive()


def test_a_lost_lease_fails_fast(tmp_path: Path) -> None:
    """After a refused heartbeat the writer is refused without asking the file."""
    beaten = threading.Event()

    class Watched(SqliteLog):
        def renew(self, lease):
            try:
                return super().renew(lease)
            except StaleWriterError:
                beaten.set()
                raise

    path = tmp_path / "log.db"
    with Watched(path) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="not a process", ttl_s=0.5)
        later = FixedClock(datetime.now(UTC) + timedelta(hours=1))
        with SqliteLog(path, clock=later, heartbeat=False) as thief:
            thief.acquire(SESSION, owner="thief")
            assert beaten.wait(timeout=60)
            with pytest.raises(StaleWriterError, match="taken over"):
                log.append(lease, event(), expected_seq=0)
            assert thief.info(SESSION).head == 0


def test_a_forgotten_log_does_not_beat_for_ever(tmp_path: Path) -> None:
    """A process that neither closes its log nor waits for it ends, and its lease is free at once."""
    path = tmp_path / "log.db"
    with SqliteLog(path) as log:
        log.create(SESSION, created_at=BIRTH)
    code = HOLD.replace("sys.stdin.readline()", "")
    process = run(code, path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with SqliteLog(path) as log:
        assert log.acquire(SESSION, owner=this_process_owner()).epoch == 2


@pytest.mark.parametrize("owner", ["", "somebody", "treenail/a/b/c/d/e", "treenail/other/1/1/1/aa"])
def test_an_owner_from_elsewhere_cannot_be_judged(owner: str) -> None:
    """Then only the expiry of its lease counts."""
    assert owner_is_alive(owner) is None


def test_a_recycled_process_id_is_not_the_same_process() -> None:
    """The moment when the process began tells them apart."""
    parts = this_process_owner().split("/")
    assert owner_is_alive("/".join(parts)) is True
    parts[4] = str(int(parts[4]) - 1)
    assert owner_is_alive("/".join(parts)) is False
    assert this_process_owner() != this_process_owner()


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    """Closing twice is fine, using it is not."""
    log = SqliteLog(tmp_path / "log.db")
    log.close()
    log.close()
    with pytest.raises(UsageError, match="closed"):
        log.sessions()


# --- migrations --------------------------------------------------------------------------------------


NEXT = "CREATE TABLE more (thing TEXT)"


def make_latest(path: Path) -> bytes:
    """Make a file as the latest schema leaves it, with a session of three events."""
    with SqliteLog(path, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, [Draft("t", b"%d" % n, 1) for n in range(3)], expected_seq=0)
    return path.read_bytes()


def know_next_version(monkeypatch: pytest.MonkeyPatch) -> int:
    newest = migrations.LATEST + 1
    monkeypatch.setattr(migrations, "MIGRATIONS", {**migrations.MIGRATIONS, newest: (NEXT,)})
    monkeypatch.setattr(migrations, "LATEST", newest)
    return newest


def version_in(path: Path) -> int:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone()[0] in (0, migrations.APPLICATION_ID)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


def test_a_file_of_an_older_version_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events stay; read-only means that it is not migrated either."""
    path = tmp_path / "log.db"
    before = make_latest(path)
    newest = know_next_version(monkeypatch)
    with SqliteLog(path, read_only=True) as log:
        assert len(list(log.read(SESSION))) == 3
        assert log.check(SESSION).ok
    assert path.read_bytes() == before
    with SqliteLog(path, heartbeat=False) as log:
        assert [event.payload for event in log.read(SESSION)] == [b"0", b"1", b"2"]
        log.append(log.acquire(SESSION, owner="me"), [Draft("t", b"3", 1)], expected_seq=3)
    assert version_in(path) == newest


def test_a_file_of_the_first_version_is_read_and_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no notes and no pots: read-only there are none, and after an upgrade there can be."""
    path = tmp_path / "log.db"
    with monkeypatch.context() as first:
        first.setattr(migrations, "MIGRATIONS", {1: migrations.MIGRATIONS[1]})
        first.setattr(migrations, "LATEST", 1)
        make_latest(path)
    assert version_in(path) == 1
    with SqliteLog(path, read_only=True) as log:
        assert log.note(SESSION) is None
        assert log.check(SESSION).ok
    assert [each.events for each in SqliteLog.salvage(path, tmp_path / "salvaged.db")] == [3]
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.put_note(lease, b"busy")
        assert log.pots.reserve("team", 1, 1) is not None
        assert log.note(SESSION) == Note(lease.epoch, b"busy")


MIGRATE_AND_DIE = """
import os, signal, sys
from treenail.log.sqlite import SqliteLog, migrations

class Statements(tuple):
    def __iter__(self):
        for statement in tuple.__iter__(self):
            yield statement
        os.kill(os.getpid(), signal.SIGKILL)

known = {**migrations.MIGRATIONS, migrations.LATEST + 1: ("CREATE TABLE more (thing TEXT)",)}
migrations.LATEST = int(sys.argv[2]) + 1
migrations.MIGRATIONS = {n: Statements(each) if n == migrations.LATEST else each for n, each in known.items()}
SqliteLog(sys.argv[1])
"""


@pytest.mark.parametrize("start", [0, migrations.LATEST])
def test_a_migration_that_was_killed_is_repeated(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its last statement and its commit, it has not happened; the next start does it."""
    path = tmp_path / "log.db"
    if start:
        make_latest(path)
    process = run(MIGRATE_AND_DIE, path, str(start))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    assert version_in(path) == start
    newest = know_next_version(monkeypatch)
    with SqliteLog(path, heartbeat=False) as log:
        assert [info.head for info in log.sessions()] == [3] * bool(start)
    assert version_in(path) == newest


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is in the way is reported; the file stays as it was."""
    path = tmp_path / "log.db"
    make_latest(path)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE more (theirs)")
    connection.close()
    before = path.read_bytes()
    know_next_version(monkeypatch)
    with pytest.raises(LogError, match="more"):
        SqliteLog(path)
    assert path.read_bytes() == before


def test_importing_the_door_needs_no_driver() -> None:
    """Only who uses SQLite pays for it."""
    code = "import sys, treenail.log, treenail.log.memory; sys.exit('sqlite3' in sys.modules)"
    process = run(code)
    process.communicate(timeout=60)
    assert process.returncode == 0

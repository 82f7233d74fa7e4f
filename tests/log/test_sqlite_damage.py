"""Damaged files: what is whole stays readable, what is not is said, and nothing is deleted."""

import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from treenail.clock import FixedClock
from treenail.errors import LogDamagedError, LogError, LogVersionError, ReadOnlyError, UsageError
from treenail.log import Draft, Envelope, this_process_owner
from treenail.log.sqlite import SqliteLog
from treenail.log.sqlite.migrations import APPLICATION_ID, LATEST

from .conftest import BIRTH, History, append_some, copy_open, describe

# The few pages with structure are as likely to be hit as all the pages with events.
places = st.integers(0, 10**6) | st.integers(0, 12 * 4096) | st.integers(0, 100)
many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def read_all(log: SqliteLog, session_id: UUID) -> tuple[list[Envelope], LogError | None]:
    """Read until the end or the damage."""
    events = []
    try:
        for event in log.read(session_id):
            events.append(event)
    except LogError as error:
        return events, error
    return events, None


def judge(path: Path, history: History) -> None:
    """Check the law: everything as it was written, or a clear error behind a true prefix."""
    try:
        log = SqliteLog(path, heartbeat=False, busy_timeout_s=2)
    except LogError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert str(path) in refusal
        return
    with log:
        for session_id, written in history.events.items():
            events, error = read_all(log, session_id)
            assert events == written[: len(events)]
            if error is None:
                assert len(events) == len(written)
            elif isinstance(error, LogDamagedError) and events:
                assert error.last_good_seq == events[-1].seq
            report = log.check(session_id)
            assert report.ok <= (error is None)
            try:
                assert log.info(session_id) == history.infos[session_id] or log.damage
                snapshot = log.latest_snapshot(session_id)
            except LogError:
                continue
            whole = history.snapshots[session_id]
            assert snapshot in (None, whole) or (whole and snapshot.seq < whole.seq)


# --- single bytes ------------------------------------------------------------------------------------


@many
@given(place=places, change=st.integers(1, 255))
@example(place=36189, change=128)  # a page beside a session that is whole: reading and checking agree
def test_a_flipped_byte_never_yields_wrong_data(
    place: int, change: int, closed_history: History, tmp_path: Path
) -> None:
    """Wherever one byte changes: everything reads as written, or a clear error follows a true prefix."""
    content = bytearray(closed_history.database)
    content[place % len(content)] ^= change
    judge(closed_history.put(tmp_path / "log.db", database=bytes(content)), closed_history)


@many
@given(place=places, change=st.integers(1, 255))
def test_a_flipped_byte_in_the_wal_never_yields_wrong_data(
    place: int, change: int, crashed_history: History, tmp_path: Path
) -> None:
    """SQLite drops what stands behind it; what it keeps is a true prefix, or is reported as damaged."""
    frames = bytearray(crashed_history.wal)
    frames[place % len(frames)] ^= change
    path = crashed_history.put(tmp_path / "log.db", wal=bytes(frames))
    with SqliteLog(path, heartbeat=False) as log:
        for session_id, written in crashed_history.events.items():
            events, _ = read_all(log, session_id)
            assert events == written[: len(events)]


def test_a_damaged_payload_is_named(closed_history: History, tmp_path: Path) -> None:
    """The error says which event of which session in which file, and what to do; all before it is read."""
    session_id, written = next(iter(closed_history.events.items()))
    victim = next(event for event in written[10:] if len(event.payload) == 300)
    content = bytearray(closed_history.database)
    content[content.index(victim.payload) + 100] ^= 1
    path = closed_history.put(tmp_path / "log.db", database=bytes(content))
    with SqliteLog(path, heartbeat=False) as log:
        events, error = read_all(log, session_id)
        assert [event.seq for event in events] == list(range(1, victim.seq))
        assert isinstance(error, LogDamagedError)
        assert error.last_good_seq == victim.seq - 1
        for part in (str(session_id), f"event {victim.seq} ", str(path), "salvage"):
            assert part in str(error)
        report = log.check(session_id)
        assert (report.ok, report.last_good_seq) == (False, victim.seq - 1)
        assert victim.seq in [found.seq for found in report.damage]
        for other in closed_history.events.keys() - {session_id}:
            assert read_all(log, other) == (closed_history.events[other], None)
            assert log.check(other).ok
        # Reading behind the damage is possible, and begins with the damage if asked to.
        assert [event.seq for event in log.read(session_id, after=victim.seq)] == [
            event.seq for event in written[victim.seq :]
        ]


def test_a_damaged_checksum_is_blamed_on_its_own_append(closed_history: History, tmp_path: Path) -> None:
    """Reading from behind an append whose checksum is damaged says how far the log is whole."""
    session_id, written = next(iter(closed_history.events.items()))
    content = bytearray(closed_history.database)
    # Of the events of an append only the last one's checksum is stored.
    stored = [each for each in written if each.checksum in content]
    before, victim = stored[10:12]
    content[content.index(victim.checksum)] ^= 1
    path = closed_history.put(tmp_path / "log.db", database=bytes(content))
    with SqliteLog(path, heartbeat=False) as log:
        with pytest.raises(LogDamagedError) as error:
            list(log.read(session_id, after=victim.seq))
        assert error.value.last_good_seq == before.seq


@pytest.mark.parametrize("also", ["nothing", "lease", "events"])
def test_a_damaged_index_loses_nothing_silently(also: str, tmp_path: Path) -> None:
    """Reading stops there, and salvage reads the table instead, which has all that the writer had written."""
    path = tmp_path / "log.db"
    with SqliteLog(tmp_path / "open.db", synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        for n in range(500):
            log.append(lease, [Draft("t", b"%d" % n, 1)], expected_seq=n)
        events = list(log.read(session_id))
        copy_open(tmp_path / "open.db", path)
    connection = sqlite3.connect(path)
    roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_schema").fetchall())
    if also == "lease":
        connection.execute("UPDATE leases SET ttl_us = ttl_us + 1")
        connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with path.open("r+b") as stream:
        for name in ("events_by_session", "events")[: 2 if also == "events" else 1]:
            stream.seek((roots[name] - 1) * 4096)
            stream.write(b"\xff" * 4096)
    with SqliteLog(path, heartbeat=False) as log:
        found, error = read_all(log, session_id)
        assert found == []
        assert isinstance(error, LogDamagedError)
        assert not log.check(session_id).ok
        with pytest.raises(LogDamagedError, match="salvage"):
            log.renew(lease)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.events == (0 if also == "events" else 500)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert list(log.read(session_id)) == events[: report.events]


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    """The one before it is used, then none; the report names it."""
    path = tmp_path / "log.db"
    with SqliteLog(path, heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        log.append(lease, [Draft("t", b"x", 1)] * 3, expected_seq=0)
        log.put_snapshot(lease, 1, b"the older state")
        log.put_snapshot(lease, 3, b"the newer state")
    for damaged, found in ((b"the newer state", 1), (b"the older state", None)):
        path.write_bytes(path.read_bytes().replace(damaged, b"THE" + damaged[3:]))
        with SqliteLog(path, heartbeat=False) as log:
            snapshot = log.latest_snapshot(session_id)
            assert (snapshot and snapshot.seq) == found
            assert "snapshot" in [found.kind for found in log.check(session_id).damage]
            assert len(list(log.read(session_id))) == 3


# --- cut files ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=places)
def test_a_cut_file_is_read_as_far_as_it_goes(place: int, closed_history: History, tmp_path: Path) -> None:
    """At any length: a true prefix, then an error; writing is refused; the file is not touched."""
    length = place % (len(closed_history.database) - 1) + 1
    path = closed_history.put(tmp_path / "log.db", database=closed_history.database[:length])
    judge(path, closed_history)
    assert path.read_bytes() == closed_history.database[:length]


def test_a_file_that_lost_its_end_lost_only_its_newest_events(tmp_path: Path) -> None:
    """Half of the file holds about half of the events."""
    random = Random(6)
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        for done in range(0, 3000, 50):
            batch = [Draft("t", random.randbytes(1000), 1) for _ in range(50)]
            log.append(lease, batch, expected_seq=done)
        events = list(log.read(session_id))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with SqliteLog(path, heartbeat=False) as log:
        assert log.damage
        got, error = read_all(log, session_id)
        assert isinstance(error, LogDamagedError)
        assert got == events[: len(got)]
        assert not log.check(session_id).ok
        with pytest.raises(LogDamagedError, match="salvage"):
            log.acquire(session_id, owner="me")
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.events >= 1400
    assert not report.ok
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert list(log.read(session_id)) == events[: report.events]
    assert path.read_bytes() == content[: len(content) // 2]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=places, garbage=st.binary(max_size=100) | st.just(b"\0" * 5000))
def test_a_torn_wal_is_cut_back_to_the_last_whole_append(
    place: int, garbage: bytes, crashed_history: History, tmp_path: Path
) -> None:
    """Cut anywhere, or followed by garbage: whole appends remain, and the log can be written again."""
    frames = crashed_history.wal[: place % len(crashed_history.wal)] + garbage
    path = crashed_history.put(tmp_path / "log.db", wal=frames)
    later = FixedClock(datetime.now(UTC) + timedelta(days=1))
    with SqliteLog(path, heartbeat=False, synchronous="NORMAL", clock=later) as log:
        for session_id, written in crashed_history.events.items():
            events, error = read_all(log, session_id)
            assert error is None
            assert events == written[: len(events)]
            lease = log.acquire(session_id, owner="the next one")
            append_some(log, lease, Random(1), 2)
            assert len(list(log.read(session_id))) == len(events) + 2


def test_a_wal_without_its_database_is_not_thrown_away(crashed_history: History, tmp_path: Path) -> None:
    """SQLite would delete it. The log refuses and touches nothing."""
    path = crashed_history.put(tmp_path / "log.db", database=b"")
    for remove in (False, True):
        if remove:
            path.unlink()
        with pytest.raises(LogDamagedError, match=r"log\.db-wal"):
            SqliteLog(path)
        assert (tmp_path / "log.db-wal").read_bytes() == crashed_history.wal


# --- files that are not ours -------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"hello\n", b"\0" * 4096, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    """With a message that names it."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"notes\.txt"):
        SqliteLog(path)
    assert path.read_bytes() == content


def test_a_file_of_another_application_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Even if it is a SQLite file in WAL mode."""
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(LogError, match="another application"):
            SqliteLog(path, read_only=read_only)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_and_left_alone(crashed_history: History, tmp_path: Path) -> None:
    """Also with commits that are only in its WAL: not a byte of either file changes."""
    path = crashed_history.put(tmp_path / "log.db")
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {LATEST + 1}")
    copy_open(path, tmp_path / "newer.db")
    connection.close()
    newer = tmp_path / "newer.db"
    before = newer.read_bytes(), (tmp_path / "newer.db-wal").read_bytes()
    with pytest.raises(LogVersionError, match=f"version {LATEST + 1}"):
        SqliteLog(newer)
    assert (newer.read_bytes(), (tmp_path / "newer.db-wal").read_bytes()) == before


def test_an_empty_file_becomes_a_log(tmp_path: Path) -> None:
    """As `touch` or a temporary file leaves it; but there is nothing to read in it."""
    path = tmp_path / "log.db"
    path.touch()
    with pytest.raises(LogError, match="empty"):
        SqliteLog(path, read_only=True)
    with SqliteLog(path) as log:
        assert list(log.sessions()) == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (LATEST,)
    connection.close()


def test_a_missing_file_is_not_made_by_looking(tmp_path: Path) -> None:
    """Read-only means read-only; a missing directory is named."""
    with pytest.raises(LogError, match="no such file"):
        SqliteLog(tmp_path / "log.db", read_only=True)
    with pytest.raises(LogError, match="directory"):
        SqliteLog(tmp_path / "missing" / "log.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_sqlite_log_needs_a_file(path: str) -> None:
    """A log in memory is another class."""
    with pytest.raises(UsageError, match="MemoryLog"):
        SqliteLog(path)


def test_a_log_that_is_read_only_refuses_to_write(closed_history: History, tmp_path: Path) -> None:
    """Everything can be read, nothing can be changed."""
    path = closed_history.put(tmp_path / "log.db")
    with SqliteLog(path, read_only=True) as log:
        found = describe(log, History())
        assert (found.events, found.snapshots) == (closed_history.events, closed_history.snapshots)
        session_id = next(iter(closed_history.events))
        for attempt in (
            lambda: log.create(UUID(int=5), created_at=BIRTH),
            lambda: log.acquire(session_id, owner="me"),
            lambda: log.erase(session_id),
            log.scrub,
        ):
            with pytest.raises(ReadOnlyError, match="read_only"):
                attempt()
    assert path.read_bytes() == closed_history.database


def test_a_file_that_is_taken_away_is_not_written_to(tmp_path: Path) -> None:
    """An append into a deleted file would be lost without a word."""
    path = tmp_path / "log.db"
    log = SqliteLog(path, heartbeat=False)
    log.create(UUID(int=1), created_at=BIRTH)
    lease = log.acquire(UUID(int=1), owner="me")
    path.rename(tmp_path / "elsewhere.db")
    with pytest.raises(LogError, match="removed or replaced"):
        log.append(lease, [Draft("t", b"x", 1)], expected_seq=0)
    (tmp_path / "elsewhere.db").rename(path)
    log.append(lease, [Draft("t", b"x", 1)], expected_seq=0)
    assert log.info(UUID(int=1)).head == 1
    log.close()


# --- salvage -----------------------------------------------------------------------------------------


def test_salvage_copies_what_is_whole(closed_history: History, tmp_path: Path) -> None:
    """Up to the damage for one session, everything for the others; the old file is not touched."""
    session_id, written = next(iter(closed_history.events.items()))
    victim = next(event for event in written[10:] if len(event.payload) == 300)
    content = bytearray(closed_history.database)
    content[content.index(victim.payload)] ^= 1
    path = closed_history.put(tmp_path / "log.db", database=bytes(content))
    reports = {report.session_id: report for report in SqliteLog.salvage(path, tmp_path / "new.db")}
    assert {key: report.ok for key, report in reports.items()} == {
        key: key != session_id for key in closed_history.events
    }
    assert reports[session_id].last_good_seq == victim.seq - 1
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        for key, events in closed_history.events.items():
            whole = victim.seq - 1 if key == session_id else len(events)
            assert list(log.read(key)) == events[:whole]
            assert log.check(key).ok
            assert log.info(key).tags == closed_history.infos[key].tags
            append_some(log, log.acquire(key, owner="me"), Random(2), 1)
    assert path.read_bytes() == bytes(content)


def test_salvage_says_what_is_missing_of_a_killed_writers_session(tmp_path: Path) -> None:
    """Its lease does not know of the newest events, and their row is gone; the index still leads there."""
    path = tmp_path / "log.db"
    session_id = UUID(int=1)
    with SqliteLog(tmp_path / "open.db", synchronous="NORMAL", heartbeat=False) as log:
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        for seq in range(40):
            log.append(lease, [Draft("t", Random(seq).randbytes(500), 1)], expected_seq=seq)
        copy_open(tmp_path / "open.db", path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    page = content.index(Random(39).randbytes(500)) // 4096
    content[page * 4096 : (page + 1) * 4096] = bytes(4096)
    path.write_bytes(content)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert 20 < report.last_good_seq < 40
    assert [(found.kind, found.seq) for found in report.damage] == [("gap", report.last_good_seq + 1)]


def test_salvage_writes_to_a_new_file_only(closed_history: History, tmp_path: Path) -> None:
    """Never over something; a file that SQLite cannot read is reported, with what can still be tried."""
    path = closed_history.put(tmp_path / "log.db")
    with pytest.raises(UsageError, match="exists"):
        SqliteLog.salvage(path, path)
    (tmp_path / "junk").write_bytes(os.urandom(50_000))
    with pytest.raises(LogDamagedError, match=r"sqlite3 .*junk \.recover"):
        SqliteLog.salvage(tmp_path / "junk", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


# --- a full disk -------------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
from uuid import UUID
from treenail.errors import LogError
from treenail.log import Draft
from treenail.log.sqlite import SqliteLog

path = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = SqliteLog(path, heartbeat=False)
session_id = UUID(int=1)
lease = log.acquire(session_id, owner="me", ttl_s=1000)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
head, failures = log.info(session_id).head, 0
while failures < 3:
    try:
        log.append(lease, [Draft("t", b"%d" % (head + n) * 5000, 1) for n in (1, 2)], expected_seq=head)
        head += 2
    except LogError as error:
        assert "append" in str(error) and path in str(error) and "nothing was written" in str(error), error
        assert log.info(session_id).head == head
        failures += 1
print(head)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.append(lease, [Draft("t", b"there is room again", 1)], expected_seq=head)
assert [event.seq for event in log.read(session_id)] == list(range(1, head + 2))
log.close()
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The append says what happened, nothing of it is there, and there is no need to open the log again."""
    path = tmp_path / "log.db"
    with SqliteLog(path, heartbeat=False) as log:
        log.create(UUID(int=1), created_at=BIRTH)
        log.release(log.acquire(UUID(int=1), owner=this_process_owner()))
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    head = int(result.stdout)
    assert head > 10
    with SqliteLog(path, heartbeat=False) as log:
        payloads = [event.payload for event in log.read(UUID(int=1))]
        assert payloads == [*(b"%d" % n * 5000 for n in range(1, head + 1)), b"there is room again"]
        assert log.check(UUID(int=1)).ok

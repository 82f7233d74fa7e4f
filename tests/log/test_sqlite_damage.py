"""Damaged files: what is whole stays readable, what is not is said, and nothing is deleted."""

import functools
import os
import sqlite3
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treenail.clock import FixedClock
from treenail.errors import LogDamagedError, LogError, LogVersionError, ReadOnlyError, UsageError
from treenail.log import Draft, Envelope
from treenail.log.lease import this_process_owner
from treenail.log.migrations import APPLICATION_ID, LATEST
from treenail.log.salvage import PAGE, Wreck
from treenail.log.sqlite import SqliteLog

from .conftest import BIRTH, History, append_some, copy_open, describe

# The few pages with structure are as likely to be hit as all the pages with events.
places = st.integers(0, 10**6) | st.integers(0, 12 * 4096) | st.integers(0, 100)
many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


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
                torn = any("not whole" in finding.message for finding in log.findings)
                assert len(events) == len(written) or torn
            elif isinstance(error, LogDamagedError) and events:
                assert error.last_good_seq == events[-1].seq
            report = log.check(session_id)
            assert report.ok <= (error is None)
            try:
                assert log.info(session_id) == history.infos[session_id] or log.findings
                snapshot = log.latest_snapshot(session_id)
            except LogError:
                continue
            whole = history.snapshots[session_id]
            assert snapshot in (None, whole) or (whole and snapshot.seq < whole.seq)


# --- single bytes ------------------------------------------------------------------------------------


@many
@given(place=places, change=st.integers(1, 255))
def test_a_flipped_byte_never_yields_wrong_data(
    place: int, change: int, closed_history: History, tmp_path: Path
) -> None:
    """Wherever one byte changes: everything reads as written, or a clear error follows a true prefix."""
    content = bytearray(closed_history.database)
    content[place % len(content)] ^= change
    judge(closed_history.put(tmp_path / "log.db", database=bytes(content)), closed_history)


@many
@given(place=places, change=st.integers(1, 255))
def test_a_flipped_byte_in_the_wal_never_loses_commits_silently(
    place: int, change: int, crashed_history: History, tmp_path: Path
) -> None:
    """SQLite alone would drop every later commit without a word."""
    frames = bytearray(crashed_history.wal)
    frames[place % len(frames)] ^= change
    judge(crashed_history.put(tmp_path / "log.db", wal=bytes(frames)), crashed_history)


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
        assert victim.seq in [finding.seq for finding in report.findings]
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


def test_a_damaged_index_costs_nothing_but_time(tmp_path: Path) -> None:
    """The table is read in the order of positions instead, and the report says so."""
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        events = [log.append(lease, [Draft("t", b"%d" % n, 1)], expected_seq=n)[0] for n in range(2000)]
    connection = sqlite3.connect(path)
    root = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'events_by_session'"
    ).fetchone()[0]
    connection.close()
    with path.open("r+b") as stream:
        stream.seek((root - 1) * 4096)
        stream.write(os.urandom(4096))
    with SqliteLog(path, heartbeat=False) as log:
        assert read_all(log, session_id) == (events, None)
        assert list(log.read(session_id, after=1990)) == events[1990:]
        report = log.check(session_id)
        assert (report.ok, report.events, report.last_good_seq) == (False, 2000, 2000)
        assert any("index" in finding.message for finding in report.findings)
        with pytest.raises(LogDamagedError):
            log.acquire(session_id, owner="me")


@pytest.mark.parametrize("also", ["nothing", "lease", "events"])
def test_a_damaged_index_of_a_killed_writer_loses_nothing_silently(also: str, tmp_path: Path) -> None:
    """The lease knows how far the session had come at its last heartbeat; that does not pass for its end."""
    path = tmp_path / "log.db"
    with SqliteLog(tmp_path / "open.db", synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        events = list(log.append(lease, [Draft("t", b"%d" % n, 1) for n in range(50)], expected_seq=0))
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
        assert found == ([] if also == "events" else events)
        assert isinstance(error, LogDamagedError) == (also == "events")
        assert not log.check(session_id).ok


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
            assert "snapshot" in [finding.kind for finding in log.check(session_id).findings]
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
    """Half of the file holds about half of the events, and they can be had, though SQLite reaches none."""
    random = Random(6)
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        events: list[Envelope] = []
        for _ in range(60):
            batch = [Draft("t", random.randbytes(1000), 1) for _ in range(50)]
            events += log.append(lease, batch, expected_seq=len(events))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with SqliteLog(path, heartbeat=False) as log:
        assert log.findings
        got, error = read_all(log, session_id)
        assert isinstance(error, LogDamagedError)
        assert got == events[: len(got)]
        assert not log.check(session_id).ok
        with pytest.raises(LogDamagedError, match="salvage"):
            log.acquire(session_id, owner="me")
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.events > 1400
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


def test_room_behind_a_wal_hides_nothing_from_a_salvage(crashed_history: History, tmp_path: Path) -> None:
    """A WAL that lost its beginning gives back as much with a lot of zeros behind it as without."""
    wal = bytes(32) + crashed_history.wal[32:]
    found = {}
    for name, room in (("short", b""), ("roomy", bytes(4 * len(wal)))):
        path = crashed_history.put(tmp_path / f"{name}.db", wal=wal + room)
        with SqliteLog(path, read_only=True, heartbeat=False) as log:
            said = [each.message.replace(name, "") for each in log.findings]
        SqliteLog.salvage(path, tmp_path / f"{name}-saved.db")
        with SqliteLog(tmp_path / f"{name}-saved.db", heartbeat=False) as log:
            found[name] = said, {each: read_all(log, each)[0] for each in crashed_history.events}
    assert found["roomy"] == found["short"]
    assert "completed writes" in found["roomy"][0][0]
    assert found["roomy"][1] == crashed_history.events


def test_a_damaged_wal_is_kept(crashed_history: History, tmp_path: Path) -> None:
    """Opening, reading and closing leave every byte of it, so that somebody can still look at it."""
    frames = bytearray(crashed_history.wal)
    frames[32 + 24 + 2000] ^= 0xFF
    path = crashed_history.put(tmp_path / "log.db", wal=bytes(frames))
    with SqliteLog(path, heartbeat=False) as log:
        assert "completed writes" in log.findings[0].message
        for session_id in crashed_history.events:
            assert isinstance(read_all(log, session_id)[1], LogError)
        with pytest.raises(LogDamagedError):
            log.create(UUID(int=99), created_at=BIRTH)
    assert (tmp_path / "log.db-wal").read_bytes() == bytes(frames)
    assert path.read_bytes() == crashed_history.database


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


@pytest.mark.parametrize("rebuilt", [False, True])
def test_salvage_reads_past_a_damaged_first_page(tmp_path: Path, rebuilt: bool) -> None:
    """Through the first page SQLite finds everything else; a log can do without it."""
    path = tmp_path / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        session_id = UUID(int=1)
        log.create(session_id, created_at=BIRTH, tags={"a": "b"})
        lease = log.acquire(session_id, owner="me")
        events = list(log.append(lease, [Draft("t", b"%d" % n * 50, 1) for n in range(500)], expected_seq=0))
        log.put_snapshot(lease, 400, b"state")
        if rebuilt:
            log.scrub()
    content = os.urandom(4096) + path.read_bytes()[4096:]
    path.write_bytes(content)
    with pytest.raises(LogDamagedError):
        SqliteLog(path)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert (report.events, report.last_good_seq, report.ok) == (500, 500, True)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert list(log.read(session_id)) == events
        assert log.info(session_id).tags == (("a", "b"),)
        snapshot = log.latest_snapshot(session_id)
        assert snapshot is not None and snapshot.payload == b"state"
    assert path.read_bytes() == content
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log.db", "new.db"]


def test_salvage_passes_over_an_event_whose_number_is_none(tmp_path: Path) -> None:
    """One changed byte says that the number is a text; the other events are copied."""
    path = tmp_path / "log.db"
    session_id = UUID(int=1)
    with SqliteLog(path, heartbeat=False) as log:
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        for seq in range(4):
            log.append(lease, [Draft("type", b"%d" % seq, 1)], expected_seq=seq)
    content = path.read_bytes()
    # The header of the last event's record: its length, then the kinds of position, session, number (one
    # byte), time, type, three ids, flags, checksum and payload.
    header = b"\x0c\0\x09\x01\x09\x15\0\0\0\x08\x2c\x0e"
    assert content.count(header) == 3
    path.write_bytes(content.replace(header, header[:3] + b"\x0d" + header[4:], 1))
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert (report.last_good_seq, report.ok) == (3, False)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert [event.payload for event in log.read(session_id)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("column", "value"), [("seq", 40), ("seq", 9), ("session_key", 3)], ids=["number", "taken", "session"]
)
def test_salvage_finds_a_row_whose_own_number_is_damaged(column: str, value: int, tmp_path: Path) -> None:
    """Whoever reads finds it through the index, so salvage has no less."""
    path = tmp_path / "log.db"
    session_id = UUID(int=1)
    with SqliteLog(path, heartbeat=False) as log:
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        events = [
            event
            for seq in range(0, 12, 3)
            for event in log.append(lease, [Draft("t", b"x", 1)] * 3, expected_seq=seq)
        ]
    connection = sqlite3.connect(path, isolation_level=None)
    # While nobody knows of the index, it stays as it is.
    connection.execute("PRAGMA writable_schema = ON")
    schema = connection.execute("SELECT * FROM sqlite_schema WHERE name = 'events_by_session'").fetchone()
    connection.execute("DELETE FROM sqlite_schema WHERE name = 'events_by_session'")
    connection.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE events SET {column} = ? WHERE seq = 6", (value,))
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", schema)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with SqliteLog(path, heartbeat=False) as log:
        assert list(log.read(session_id)) == events
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert (report.events, report.ok) == (12, True)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert list(log.read(session_id)) == events


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
    wreck = Wreck(path)
    (place,) = wreck.find().events[1][40]
    wreck.close()
    content = bytearray(path.read_bytes())
    content[place.image * PAGE : (place.image + 1) * PAGE] = bytes(PAGE)
    path.write_bytes(content)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert 20 < report.last_good_seq < 40
    assert [(finding.kind, finding.seq) for finding in report.findings] == [("gap", report.last_good_seq + 1)]


def test_salvage_is_not_led_round_in_circles(tmp_path: Path) -> None:
    """A row that says it is very long, in pages that follow each other in a circle, takes no memory."""
    path = tmp_path / "log.db"
    session_id = UUID(int=1)
    with SqliteLog(path, heartbeat=False) as log:
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="me")
        log.append(lease, [Draft("t", Random(1).randbytes(2_500_000), 1)], expected_seq=0)
        log.append(lease, [Draft("t", b"x", 1)], expected_seq=1)
    wreck = Wreck(path)
    (place,) = wreck.find().events[1][1]
    wreck.close()
    content = bytearray(path.read_bytes())
    start = place.image * PAGE + place.offset
    # Four bytes say how long the row is. As long as can be said, with as much of it in this page as before.
    assert all(byte & 0x80 for byte in content[start : start + 3])
    size = functools.reduce(lambda value, byte: value << 7 | byte & 0x7F, content[start : start + 4], 0)
    size += ((1 << 28) - 1 - size) // (PAGE - 4) * (PAGE - 4)
    for place_of_byte, shift in enumerate((21, 14, 7, 0), start):
        content[place_of_byte] = size >> shift & 0x7F | (0x80 if shift else 0)
    # Every page of the row is followed by itself.
    for page in range(place.image * PAGE + PAGE, len(content), PAGE):
        if int.from_bytes(content[page : page + 4], "big") == page // PAGE + 2:
            content[page : page + 4] = (page // PAGE + 1).to_bytes(4, "big")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert (report.last_good_seq, report.ok) == (0, False)


def test_salvage_writes_to_a_new_file_only(closed_history: History, tmp_path: Path) -> None:
    """Never over something, never from a file that is open here; what is no log is said to be none."""
    path = closed_history.put(tmp_path / "log.db")
    with pytest.raises(UsageError, match="exists"):
        SqliteLog.salvage(path, path)
    with SqliteLog(path, heartbeat=False), pytest.raises(UsageError, match="open in this process"):
        SqliteLog.salvage(path, tmp_path / "new.db")
    (tmp_path / "junk").write_bytes(os.urandom(50_000))
    with pytest.raises(LogDamagedError, match="no session"):
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

"""An append that need not be synced makes none unsynced that must be.

SQLite syncs a commit or not as its connection is set when the commit is made. What is watched here are the
statements that SQLite itself reports.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import LogBusyError, StaleWriterError
from treenail.log import Draft, Lease, database
from treenail.log.sqlite import SqliteLog

from .conftest import BIRTH, stored_bytes

DEEDS = ("synced", "unsynced", "unsynced, large", "stale", "cut off", "renew", "snapshot", "other", "fork")


class Watch:
    """Tells for each statement that changes the file how the connection is set at that moment."""

    def __init__(self, log: SqliteLog, level: str) -> None:
        self.log = log
        self.level = level
        self.writes: list[str] = []
        self.texts: list[str] = []
        self.connection: sqlite3.Connection | None = None
        self.follow()

    def follow(self) -> None:
        """Watch the connection that there is now; a new one is set as the log was opened."""
        connection = self.log._database._connection
        if connection is not self.connection and connection is not None:
            connection.set_trace_callback(self.seen)
            self.level = connection.execute("PRAGMA synchronous").fetchone()[0]
            self.level = {1: "NORMAL", 2: "FULL"}[int(self.level)]
            self.connection = connection

    def seen(self, statement: str) -> None:
        if match := re.match(r"PRAGMA synchronous = (\w+)", statement):
            self.level = match[1]
        elif re.match(r"\s*(INSERT|UPDATE|DELETE|COMMIT)", statement):
            self.writes.append(self.level)
            self.texts.append(statement)

    def taken(self) -> list[str]:
        """Return the levels of the writes since the last time."""
        taken, self.writes, self.texts = self.writes, [], []
        return taken


def drafts(size: int = 10) -> list[Draft]:
    return [Draft("t", b"x" * size, 1)]


def opened(path: Path, **how: Any) -> tuple[SqliteLog, Lease]:
    log = SqliteLog(path, heartbeat=False, **how)
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)
    lease = log.acquire(session_id, owner="me", ttl_s=1000)
    # The WAL has room from here on: making some is a write as well.
    for seq in range(5):
        log.append(lease, drafts(), expected_seq=seq)
    return log, lease


@given(st.lists(st.sampled_from(DEEDS), min_size=1, max_size=12))
def test_whatever_came_before_what_must_be_synced_is(deeds: list[str]) -> None:
    """Appends, heartbeats, snapshots, other sessions, after refusals, interrupts and a new connection."""
    with TemporaryDirectory() as directory:
        log, lease = opened(Path(directory) / "log.db")
        watch = Watch(log, "FULL")
        head = 5
        with log:
            for deed in [*deeds, "synced"]:
                if deed == "synced":
                    log.append(lease, drafts(), expected_seq=head)
                elif deed.startswith("unsynced"):
                    log.append(
                        lease, drafts(10 if deed == "unsynced" else 9_000), expected_seq=head, synced=False
                    )
                elif deed == "stale":
                    with pytest.raises(StaleWriterError):
                        log.append(lease, drafts(), expected_seq=head + 1, synced=False)
                elif deed == "cut off":
                    # As an interrupt right after the switch leaves it.
                    database = log._database
                    database._is_relaxed = True
                    assert database._connection is not None
                    database._connection.executescript("PRAGMA synchronous = NORMAL")
                elif deed == "renew":
                    log.renew(lease)
                elif deed == "snapshot":
                    log.put_snapshot(lease, head, b"state")
                elif deed == "other":
                    other = uuid4()
                    log.create(other, created_at=BIRTH)
                    log.append(log.acquire(other, owner="me"), drafts(), expected_seq=0)
                else:
                    log._database._disconnect()  # As before a fork.
                    log.info(lease.session_id)
                    watch.follow()
                head += deed in ("synced", "unsynced", "unsynced, large")
                levels = set(watch.taken())
                assert levels <= {"FULL"} or (deed.startswith("unsynced") and levels == {"NORMAL"}), deed
            assert log.info(lease.session_id).head == head


def test_an_append_that_need_not_be_synced_is_not(tmp_path: Path) -> None:
    """That is what it is for."""
    log, lease = opened(tmp_path / "log.db")
    watch = Watch(log, "FULL")
    with log:
        log.append(lease, drafts(), expected_seq=5, synced=False)
        assert watch.taken() == ["NORMAL"]
        log.append(lease, drafts(), expected_seq=6)
        assert set(watch.taken()) == {"FULL"}


def test_a_log_that_never_waits_stays_so(tmp_path: Path) -> None:
    """An append that is not synced anyway makes nobody wait afterwards."""
    log, lease = opened(tmp_path / "log.db", synchronous="NORMAL")
    watch = Watch(log, "NORMAL")
    with log:
        log.append(lease, drafts(), expected_seq=5, synced=False)
        log.append(lease, drafts(), expected_seq=6)
        log.renew(lease)
        assert set(watch.taken()) == {"NORMAL"}


# --- one at a time -----------------------------------------------------------------------------------


def test_one_write_at_a_time_is_on_its_way_to_the_disk(tmp_path: Path) -> None:
    """Behind one that is not synced, the next one waits for both, even if it need not be synced either."""
    log, lease = opened(tmp_path / "log.db")
    watch = Watch(log, "FULL")
    with log:
        for seq in range(5, 13):
            log.append(lease, drafts(), expected_seq=seq, synced=False)
        levels = watch.taken()
        assert levels.count("NORMAL") > 2
        assert ("NORMAL", "NORMAL") not in pairwise(levels)
        log.append(lease, drafts(), expected_seq=13)
        log.append(lease, drafts(), expected_seq=14, synced=False)
        assert watch.taken()[-1] == "NORMAL"
        with pytest.raises(StaleWriterError):
            log.append(lease, drafts(), expected_seq=14)  # It writes nothing, so it makes nothing durable.
        watch.taken()
        log.append(lease, drafts(), expected_seq=15, synced=False)
        assert set(watch.taken()) == {"FULL"}


def test_behind_what_others_have_written_every_write_is_synced(tmp_path: Path) -> None:
    """Nobody knows whether they have waited for the disk."""
    log, lease = opened(tmp_path / "log.db")
    watch = Watch(log, "FULL")
    with log, SqliteLog(tmp_path / "log.db", heartbeat=False) as other:
        mine = uuid4()
        other.create(mine, created_at=BIRTH)
        its = other.acquire(mine, owner="me", ttl_s=1000)
        for seq in range(20):  # Each makes room when the other has, until the WAL has all that it gets.
            other.append(its, drafts(), expected_seq=seq)
            log.append(lease, drafts(), expected_seq=5 + seq)
        watch.taken()
        for turn in range(4):
            other.append(its, drafts(), expected_seq=20 + turn, synced=False)
            log.append(lease, drafts(), expected_seq=25 + 2 * turn, synced=False)
            assert watch.taken() == ["FULL"]
            log.append(lease, drafts(), expected_seq=26 + 2 * turn, synced=False)
            assert watch.taken() == ["NORMAL"]


# --- in between --------------------------------------------------------------------------------------


class Between:
    """Runs an append that need not be synced before the nth line of what the database does."""

    def __init__(self, log: SqliteLog, lease: Lease, at: int) -> None:
        self.log = log
        self.lease = lease
        self.at = at
        self.seen = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Between | None:
        if frame.f_code.co_filename != database.__file__:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                sys.settrace(None)
                with suppress(LogBusyError):
                    head = self.log.info(self.lease.session_id).head
                    self.log.append(self.lease, drafts(), expected_seq=head, synced=False)
        return self


@pytest.mark.parametrize("deed", ["append", "renew"])
def test_an_append_in_a_signal_handler_leaves_no_write_unsynced(tmp_path: Path, deed: str) -> None:
    """Wherever it comes in between: what must be synced is."""
    log, lease = opened(tmp_path / "log.db")
    other = uuid4()
    log.create(other, created_at=BIRTH)
    its = log.acquire(other, owner="me", ttl_s=1000)
    log.append(its, drafts(), expected_seq=0)
    watch = Watch(log, "FULL")
    before = sys.gettrace()
    at = 0
    is_hit = True
    with log:
        while is_hit:
            at += 1
            head = log.info(lease.session_id).head
            log.append(lease, drafts(), expected_seq=head)
            watch.taken()
            between = Between(log, its, at)
            sys.settrace(between)
            try:
                if deed == "append":
                    log.append(lease, [Draft("must be synced", b"x", 1)], expected_seq=head + 1)
                else:
                    log.renew(lease)
            finally:
                sys.settrace(before)
            is_hit = between.place != ""
            texts = watch.texts
            mine = [
                level
                for level, text in zip(watch.taken(), texts, strict=True)
                if ("must be synced" in text if deed == "append" else re.match("UPDATE|COMMIT", text.strip()))
            ]
            assert mine, between.place
            assert set(mine) == {"FULL"}, between.place
    assert at > 10


class Interrupt:
    """Raises `KeyboardInterrupt` at the nth moment at which the interpreter would look for a signal."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename == database.__file__ and event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{frame.f_code.co_name}, line {frame.f_lineno} ({event})"
                raise KeyboardInterrupt


def test_an_interrupt_leaves_no_later_write_unsynced(tmp_path: Path) -> None:
    """Wherever an append that need not be synced is cut off: the next one waits for the disk."""
    log, lease = opened(tmp_path / "log.db")
    watch = Watch(log, "FULL")
    at = 0
    is_cut = True
    before = sys.getprofile()
    with log:
        while is_cut:
            at += 1
            head = log.info(lease.session_id).head
            log.append(lease, drafts(), expected_seq=head)
            interrupt = Interrupt(at)
            sys.setprofile(interrupt)
            try:
                with suppress(KeyboardInterrupt):
                    log.append(lease, drafts(), expected_seq=head + 1, synced=False)
            finally:
                sys.setprofile(before)
            is_cut = interrupt.place != ""
            watch.follow()
            watch.taken()
            log.append(lease, drafts(), expected_seq=log.info(lease.session_id).head)
            assert set(watch.taken()) == {"FULL"}, interrupt.place
    assert at > 10


# --- what a power cut leaves -------------------------------------------------------------------------

BLOCK = 4096


def wal_bytes(path: Path) -> bytes:
    """Return what is in a log's WAL, read by another process: this one has locks."""
    return subprocess.run(["cat", f"{path}-wal"], check=True, capture_output=True).stdout


CHECKPOINT = """
import sqlite3, sys
busy, _, _ = sqlite3.connect(sys.argv[1]).execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
assert not busy
"""


@pytest.mark.parametrize("behind", ["room", "an earlier generation"])
@pytest.mark.parametrize("size", [20, 1_500])
def test_a_power_cut_leaves_a_log_that_can_be_written(tmp_path: Path, behind: str, size: int) -> None:
    """Whichever blocks of the last write, and of the one before it that was not synced, reached the disk."""
    path = tmp_path / "log.db"
    log, lease = opened(path)
    random = Random(size)
    head = 5

    def append(synced: bool = True) -> None:
        nonlocal head
        log.append(lease, [Draft("t", random.randbytes(size), 1)], expected_seq=head, synced=synced)
        head += 1

    if behind != "room":
        for _ in range(10):
            append()
        subprocess.run([sys.executable, "-c", CHECKPOINT, str(path)], check=True)
    before = after = b""
    while not len(before) == len(after) > 0:  # Else room was made, which is a write of its own.
        append()
        before, database_file = wal_bytes(path), stored_bytes(path)[: path.stat().st_size]
        append(synced=False)
        append()
        after = wal_bytes(path)
    log.close()
    blocks = [at for at in range(0, len(after), BLOCK) if before[at : at + BLOCK] != after[at : at + BLOCK]]
    heads = set[int]()
    for written in random.sample(range(1 << len(blocks)), min(1 << len(blocks), 40)):
        wal = bytearray(before)
        for number, at in enumerate(blocks):
            if written >> number & 1:
                wal[at : at + BLOCK] = after[at : at + BLOCK]
        copy = tmp_path / f"{written}.db"
        copy.write_bytes(database_file)
        copy.with_name(f"{copy.name}-wal").write_bytes(wal)
        with SqliteLog(copy, heartbeat=False) as left:
            found = left.info(lease.session_id).head
            left.append(lease, drafts(), expected_seq=found)
            assert left.check(lease.session_id).last_good_seq == found + 1
        heads.add(found)
    assert head - 2 in heads
    assert heads <= {head - 2, head - 1, head}

"""An append that need not be synced makes none unsynced that must be.

SQLite syncs a commit or not as its connection is set when the commit is made. What is watched here are the
statements that SQLite itself reports.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StaleWriterError
from holdfast.log import Draft, Lease
from holdfast.log.sqlite import SqliteLog

from .conftest import BIRTH

DEEDS = ("synced", "unsynced", "unsynced, large", "stale", "cut off", "renew", "snapshot", "other", "fork")


class Watch:
    """Tells for each statement that changes the file how the connection is set at that moment."""

    def __init__(self, log: SqliteLog, level: str) -> None:
        self.log = log
        self.level = level
        self.writes: list[str] = []
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

    def taken(self) -> list[str]:
        """Return the levels of the writes since the last time."""
        taken, self.writes = self.writes, []
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

"""What the tests of the SQLite log share: a file with a history, and a way to look at bytes."""

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from treenail.log import Draft, Envelope, Lease, SessionInfo, this_process_owner
from treenail.log.base import StoredSnapshot
from treenail.log.sqlite import SqliteLog

BIRTH = datetime(2026, 1, 1, tzinfo=UTC)


class History:
    """A log's files as bytes, and everything that was written to them."""

    def __init__(self) -> None:
        self.database = b""
        self.wal = b""
        self.events: dict[UUID, list[Envelope]] = {}
        self.infos: dict[UUID, SessionInfo] = {}
        self.snapshots: dict[UUID, StoredSnapshot | None] = {}

    def __repr__(self) -> str:
        return f"History({len(self.database)} bytes and {len(self.wal)} in the WAL)"

    def put(self, path: Path, *, database: bytes | None = None, wal: bytes | None = None) -> Path:
        """Write the files, or changed ones in their place."""
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(self.database if database is None else database)
        frames = self.wal if wal is None else wal
        if frames:
            path.with_name(path.name + "-wal").write_bytes(frames)
        return path


def stored_bytes(path: Path) -> bytes:
    """Return everything in the log's files, also while they are open.

    Another process reads them: closing a descriptor here would drop this process's locks on the file.
    """
    files = [
        each for each in (path, *(path.with_name(path.name + s) for s in ("-wal", "-shm"))) if each.exists()
    ]
    return subprocess.run(["cat", *map(str, files)], check=True, capture_output=True).stdout


def copy_open(path: Path, target: Path) -> None:
    """Copy an open log's files as a crash at this moment would leave them."""
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            subprocess.run(["cp", str(source), str(target.with_name(target.name + suffix))], check=True)


def fill(log: SqliteLog, random: Random, sessions: int, appends: int) -> list[Lease]:
    """Write interleaved sessions with payloads of many sizes, snapshots and a pruned part."""
    leases = []
    for number in range(sessions):
        session_id = UUID(int=random.getrandbits(128))
        log.create(session_id, created_at=BIRTH, tags={"name": f"session {number}"})
        leases.append(log.acquire(session_id, owner=this_process_owner()))
    for lease in random.choices(leases, k=appends):
        append_some(log, lease, random, random.choice([1, 1, 2, 3]))
    for lease, part in zip(leases[:2], (1, 2), strict=True):
        head = log.info(lease.session_id).head
        log.put_snapshot(lease, head // part, b"state" * 300)
    log.prune(leases[1], upto=log.info(leases[1].session_id).head // 3)
    return leases


def append_some(log: SqliteLog, lease: Lease, random: Random, count: int) -> Sequence[Envelope]:
    """Append a batch of events of many sizes."""
    sizes = [0, 5, 40, 300, 1000, 1024, 5000]
    batch = [
        Draft("test.Event", random.randbytes(random.choice(sizes)), 10**15, "turn", "run")
        for _ in range(count)
    ]
    if count > 1:
        # What an append says twice is stored once.
        said = b'"%s"' % random.randbytes(random.choice([40, 400])).hex().encode()
        batch = [each._replace(payload=each.payload + said) for each in batch]
    head = log.info(lease.session_id).head
    log.append(lease, batch, expected_seq=head)
    return list(log.read(lease.session_id, after=head))


def describe(log: SqliteLog, history: History) -> History:
    """Take down everything that is in a log."""
    for info in log.sessions():
        history.events[info.session_id] = list(log.read(info.session_id))
        history.infos[info.session_id] = info
        history.snapshots[info.session_id] = log.latest_snapshot(info.session_id)
    return history


@pytest.fixture(scope="session")
def closed_history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A log that was closed in peace: one file."""
    path = tmp_path_factory.mktemp("closed") / "log.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        fill(log, Random(7), sessions=3, appends=120)
    with SqliteLog(path, heartbeat=False) as log:
        history = describe(log, History())
    history.database = path.read_bytes()
    return history


@pytest.fixture(scope="session")
def crashed_history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A log that was open at its last moment: much of it is only in the WAL."""
    directory = tmp_path_factory.mktemp("crashed")
    with SqliteLog(directory / "log.db", synchronous="NORMAL", heartbeat=False) as log:
        random = Random(8)
        leases = fill(log, random, sessions=3, appends=20)
        for lease in leases * 8:
            append_some(log, lease, random, 2)
        for lease in leases:
            log.release(lease)
        history = describe(log, History())
        copy_open(directory / "log.db", directory / "copy.db")
    history.database = (directory / "copy.db").read_bytes()
    history.wal = (directory / "copy.db-wal").read_bytes()
    return history

"""What a tool call costs beyond its commits, and that it does not grow with the calls before it.

The floor is measured in the same run, in turns with ours: raw SQLite commits of as many rows and bytes as
the call's own, on the same disk, into a file that does not grow any more.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from holdfast.log.event import Draft
from holdfast.log.lease import this_process_owner
from holdfast.log.sqlite import SqliteLog
from holdfast.state import ExecutionState, ResourceRegistry, Session
from holdfast.tools import Tool, ToolCall, ToolContext, ToolRunner, tool
from holdfast.workspace import Filesystem
from holdfast.workspace.host import HostFilesystem

Row = tuple[str, float, float | None, float | None, float | None]
"""Name, measured, floor, ratio, target; times in microseconds."""

ALLOWED_US = 300.0
"""What a call may take beyond its commits."""

INSERT = "INSERT INTO events (payload) VALUES (?)"


@tool
def nothing(*, context: ToolContext) -> str:
    """Do nothing, with the right to do something."""
    return "done"


@tool(effects="none")
def looks(*, context: ToolContext) -> str:
    """Do nothing."""
    return "done"


class Bench:
    """A session in a SQLite file and a workspace on disk, and beside it a raw SQLite file."""

    def __init__(self, directory: Path, *, synchronous: Any = "FULL", files: int = 100) -> None:
        directory.mkdir()
        root = directory / "workspace"
        root.mkdir()
        for number in range(files):
            (root / f"file{number}.txt").write_text("content\n")
        self.log = SqliteLog(directory / "log.db", synchronous=synchronous, heartbeat=False)
        self.filesystem = HostFilesystem(root, store=directory / "store")
        resources = ResourceRegistry.build({Filesystem: self.filesystem})
        state = ExecutionState(Session(log=self.log), resources)
        self.runner = ToolRunner(state, {each.name: each for each in (nothing, looks)}, "bench", "bench")
        self.raw = sqlite3.connect(directory / "raw.db", isolation_level=None)
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
        # The WAL is brought to its full length first: syncing a file that grows is no floor.
        self.raw.execute("PRAGMA synchronous = OFF")
        self.commit([[400]] * 1_100)
        self.raw.execute(f"PRAGMA synchronous = {synchronous}")
        self.calls = 0
        other = uuid4()
        self.log.create(other, created_at=datetime.now(UTC))
        self.lease = self.log.acquire(other, owner=this_process_owner())
        self.seq = 0

    def batches(self, one: Tool[Any, Any]) -> list[list[Draft]]:
        """Make a call and return what it committed, so that the floor commits as much."""
        seen: list[list[Draft]] = []
        append = self.log.append

        def watched(lease: Any, drafts: Sequence[Draft], *, expected_seq: int) -> Any:
            seen.append(list(drafts))
            return append(lease, drafts, expected_seq=expected_seq)

        # Watched for one call only: what is measured is the log as it is.
        self.log.append = watched  # type: ignore[method-assign] # it only looks
        try:
            self.call(one)
        finally:
            del self.log.append
        return seen

    def call(self, one: Tool[Any, Any]) -> None:
        self.calls += 1
        result = self.runner.execute(ToolCall(f"call_{self.calls:024}", one.name))
        assert result.success, result.message

    def commit(self, batches: Sequence[Sequence[int]]) -> None:
        for sizes in batches:
            self.raw.execute("BEGIN IMMEDIATE")
            for size in sizes:
                self.raw.execute(INSERT, (b"x" * size,))
            self.raw.execute("COMMIT")

    def append(self, batches: Sequence[Sequence[Draft]]) -> None:
        """Append as much as a call does straight to the log: with checksums and the check of the writer."""
        for drafts in batches:
            self.log.append(self.lease, drafts, expected_seq=self.seq)
            self.seq += len(drafts)

    def close(self) -> None:
        self.runner.execution_state.session.close()
        self.log.close()
        self.filesystem.close()
        self.raw.close()


def timed(work: Callable[[], object], count: int) -> list[float]:
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        spent.append((time.perf_counter() - start) * 1e6)
    return spent


def beyond(ours: Sequence[float], floor: Sequence[float]) -> float:
    """What ours takes more than the floor right after it: a slow moment of the disk is slow for both."""
    return median([one - other for one, other in zip(ours, floor, strict=True)])


def beyond_commits(directory: Path, one: Tool[Any, Any], commits: int, count: int) -> Iterator[Row]:
    """One call and its commits, in turns with the same commits on raw SQLite."""
    bench = Bench(directory / one.name)
    bench.call(one)
    drafts = bench.batches(one)
    batches = [[len(each.payload) for each in batch] for batch in drafts]
    assert len(batches) == commits, f"a call made {len(batches)} commits"
    ours: list[float] = []
    floor: list[float] = []
    log: list[float] = []
    busy: list[float] = []
    raw: list[float] = []
    for _ in range(count):
        began = time.process_time()
        ours += timed(lambda: bench.call(one), 1)
        between = time.process_time()
        floor += timed(lambda: bench.commit(batches), 1)
        busy.append((between - began) * 1e6)
        raw.append((time.process_time() - between) * 1e6)
        log += timed(lambda: bench.append(drafts), 1)
    bench.close()
    middle, least = median(ours), median(floor)
    name = f"tool call, effects={one.effects}: beyond its {commits} commit(s), share of {ALLOWED_US:.0f} us"
    yield name, middle, least, beyond(ours, floor) / ALLOWED_US, 1.0
    part = f"  of which the log's own part, share of {ALLOWED_US:.0f} us"
    yield part, median(log), least, beyond(log, floor) / ALLOWED_US, None
    part = f"  of which time of the processor, share of {ALLOWED_US:.0f} us"
    yield part, median(busy), median(raw), beyond(busy, raw) / ALLOWED_US, None


def flatness(directory: Path, count: int) -> Iterator[Row]:
    """The last tenth of many calls against the first, without waiting for the disk."""
    bench = Bench(directory / "flat", synchronous="NORMAL")
    spent = timed(lambda: bench.call(nothing), count)
    bench.close()
    tenth = count // 10
    first, last = median(spent[:tenth]), median(spent[-tenth:])
    yield f"tool call: the last tenth of {count:,} against the first (us)", last, first, last / first, 1.3


def rows(quick: bool) -> Iterator[Row]:
    """Measure calls; each row is a name, our figure, the floor, the ratio, the target."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as place:
        directory = Path(place)
        yield from beyond_commits(directory, nothing, 2, 200 if quick else 2_000)
        yield from beyond_commits(directory, looks, 1, 200 if quick else 2_000)
        yield from flatness(directory, 1_000 if quick else 10_000)

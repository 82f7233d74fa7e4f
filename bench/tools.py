"""What a tool call costs beyond its commits, and that it does not grow with the calls before it.

The floor is measured in the same run, in turns with ours: raw SQLite commits of as many rows and bytes as
the call's own, on the same disk, into a file that does not grow any more. Each commit comes right after a
call, as a call's own commits come after other work: right behind another commit it would be about a
quarter quicker, which is shown as well.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from treenail.log.event import Draft
from treenail.log.lease import this_process_owner
from treenail.log.sqlite import SqliteLog
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolContext, ToolRunner, tool
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

Row = tuple[str, float, float | None, float | None, float | None]
"""Name, measured, floor, ratio, target; times in microseconds."""

ALLOWED_US = 300.0
"""What a call may take beyond its commits."""

INSERT = "INSERT INTO events (payload) VALUES (?)"


@tool
def nothing(*, context: ToolContext) -> str:
    """Do nothing, with the right to do something in the workspace."""
    return "done"


@tool(effects="external")
def acts(*, context: ToolContext) -> str:
    """Do nothing, with the right to do anything."""
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
        self.runner = ToolRunner(
            state, {each.name: each for each in (nothing, acts, looks)}, "bench", "bench"
        )
        self.raw = sqlite3.connect(directory / "raw.db", isolation_level=None)
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
        # The WAL is brought to its full length first: syncing a file that grows is no floor.
        self.raw.execute("PRAGMA synchronous = OFF")
        for _ in range(1_100):
            self.commit([400])
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

    def commit(self, sizes: Sequence[int]) -> None:
        self.raw.execute("BEGIN IMMEDIATE")
        for size in sizes:
            self.raw.execute(INSERT, (b"x" * size,))
        self.raw.execute("COMMIT")

    def append(self, drafts: Sequence[Draft]) -> None:
        """Append as a call does, but straight to the log: with checksums and the check of the writer."""
        self.log.append(self.lease, drafts, expected_seq=self.seq)
        self.seq += len(drafts)

    def close(self) -> None:
        self.runner.execution_state.session.close()
        self.log.close()
        self.filesystem.close()
        self.raw.close()


def timed(work: Callable[[], object]) -> float:
    """Return how long it took, in microseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def beyond_commits(directory: Path, one: Tool[Any, Any], commits: int, count: int) -> Iterator[Row]:
    """A call and its commits, in turns with the same commits on raw SQLite."""
    bench = Bench(directory / one.name)
    bench.call(one)
    batches = [([len(each.payload) for each in drafts], drafts) for drafts in bench.batches(one)]
    assert len(batches) == commits, f"a call made {len(batches)} commits"
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(count):
        calls = busy = floor = log = 0.0
        for sizes, drafts in batches:
            bench.call(one)
            log += timed(partial(bench.append, drafts))
            began = time.process_time()
            calls += timed(lambda: bench.call(one)) / commits
            busy += (time.process_time() - began) * 1e6 / commits
            floor += timed(partial(bench.commit, sizes))
        in_one_go = timed(lambda: [bench.commit(sizes) for sizes, _ in batches])
        figures = {
            "calls": calls,
            "busy": busy,
            "floor": floor,
            "log": log,
            "in one go": in_one_go,
        }
        for name, figure in figures.items():
            spent[name].append(figure)
    bench.close()

    def row(what: str, ours: str, floor: str, target: float | None = None) -> Row:
        # What ours takes more than the floor right after it: a slow moment of the disk is slow for both.
        more = median([one - other for one, other in zip(spent[ours], spent[floor], strict=True)])
        name = f"{what}, share of {ALLOWED_US:.0f} us"
        return name, median(spent[ours]), median(spent[floor]), more / ALLOWED_US, target

    yield row(f"tool call, effects={one.effects}: beyond {commits} synced commit(s)", "calls", "floor", 1.0)
    if commits > 1:
        yield row("  beyond commits of which one comes right behind the other", "calls", "in one go")
    yield row("  of which the log's own part", "log", "floor")
    yield "  time of the processor, all in all (us)", median(spent["busy"]), None, None, None


def flatness(directory: Path, count: int) -> Iterator[Row]:
    """The last tenth of many calls against the first, without waiting for the disk."""
    bench = Bench(directory / "flat", synchronous="NORMAL")
    spent = [timed(lambda: bench.call(nothing)) for _ in range(count)]
    bench.close()
    tenth = count // 10
    first, last = median(spent[:tenth]), median(spent[-tenth:])
    yield f"tool call: the last tenth of {count:,} against the first (us)", last, first, last / first, 1.3


def rows(quick: bool) -> Iterator[Row]:
    """Measure calls; each row is a name, our figure, the floor, the ratio, the target."""
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as place:
        directory = Path(place)
        yield from beyond_commits(directory, nothing, 2, 200 if quick else 2_000)
        yield from beyond_commits(directory, acts, 2, 200 if quick else 2_000)
        yield from beyond_commits(directory, looks, 1, 200 if quick else 2_000)
        yield from flatness(directory, 1_000 if quick else 10_000)

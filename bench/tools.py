"""What a tool call costs beside its commits, and that it does not grow with the calls before it.

The floor is measured in the same run, in turns with ours: as many commits of raw SQLite on the same disk.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.report import Row, Size
from treenail.log.sqlite import SqliteLog
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolContext, ToolRunner, tool
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

COMMIT = "INSERT INTO events (payload) VALUES (?)"
PAYLOAD = b"x" * 400
FILES = 100


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


COMMITS = {nothing: 2, acts: 2, looks: 1}
"""A call that may change something is announced before it runs; one that may not is only recorded."""


class Bench:
    """A session in a SQLite file and a workspace on disk, and beside it a raw SQLite file."""

    def __init__(self, directory: Path, *, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> None:
        root = directory / "workspace"
        root.mkdir(parents=True)
        for number in range(FILES):
            (root / f"file{number}.txt").write_text("content\n")
        self.log = SqliteLog(directory / "log.db", synchronous=synchronous, heartbeat=False)
        self.filesystem = HostFilesystem(root, store=directory / "store")
        self.session = Session(log=self.log)
        state = ExecutionState(self.session, ResourceRegistry.build({Filesystem: self.filesystem}))
        self.runner = ToolRunner(state, {each.name: each for each in COMMITS}, "bench", "bench")
        self.raw = sqlite3.connect(directory / "raw.db", isolation_level=None)
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute(f"PRAGMA synchronous = {synchronous}")
        self.raw.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
        self.calls = 0

    def call(self, one: Tool[Any, Any]) -> None:
        self.calls += 1
        result = self.runner.execute(ToolCall(f"call_{self.calls:024}", one.name))
        assert result.success, result.message

    def commit(self, count: int) -> None:
        for _ in range(count):
            self.raw.execute(COMMIT, (PAYLOAD,))

    def close(self) -> None:
        self.session.close()
        self.log.close()
        self.filesystem.close()
        self.raw.close()


def timed(work: Callable[[], object]) -> float:
    """Return how long it took, in microseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def beside_commits(directory: Path, one: Tool[Any, Any], count: int) -> Iterator[Row]:
    """A call, in turns with as many commits on raw SQLite as it makes."""
    bench = Bench(directory / one.name)
    bench.call(one)
    commits = COMMITS[one]
    pairs, busy = [], []
    for _ in range(count):
        began = time.process_time()
        call = timed(lambda: bench.call(one))
        busy.append((time.process_time() - began) * 1e6)
        pairs.append((call, timed(lambda: bench.commit(commits))))
    bench.close()
    ours, floor = (median(each) for each in zip(*pairs, strict=True))
    name = f"tool call, effects={one.effects}"
    yield Row(f"{name}, beside {commits} synced commit{'s' * (commits > 1)} (us)", ours, floor, ours / floor)
    yield Row(f"{name}, CPU (us)", median(busy))


def flatness(directory: Path, count: int) -> Iterator[Row]:
    """The last tenth of many calls against the first, without waiting for the disk."""
    bench = Bench(directory / "flat", synchronous="NORMAL")
    spent = [timed(lambda: bench.call(nothing)) for _ in range(count)]
    bench.close()
    tenth = count // 10
    first, last = median(spent[:tenth]), median(spent[-tenth:])
    yield Row(
        f"tool call: the last tenth of {count:,} against the first (us)", last, first, last / first, 1.3
    )


def rows(size: Size) -> Iterator[Row]:
    """Measure a call of each kind, and many calls in one session."""
    calls, many = {Size.FULL: (2_000, 10_000), Size.QUICK: (200, 1_000), Size.LEAST: (5, 50)}[size]
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as place:
        for one in COMMITS:
            yield from beside_commits(Path(place), one, calls)
        yield from flatness(Path(place), many)

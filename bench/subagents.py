"""A hundred subagents at once: what each costs, that none is forgotten, and what a waiting one holds.

The peer of a subagent is the same turn without supervision: a session and a loop, one after another. Both
sides use the scripted model, which answers at once, so that what is measured is the work around it. The peer
of an isolated workspace is a copy of the tree, and its floor is a walk over it.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import anyio

from bench.report import Row, Size
from treenail.agent import Agent
from treenail.containment import Limits
from treenail.conversation import SubagentEvent
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, SubagentLimits, Subagents
from treenail.tools import tool
from treenail.turns import InnerLoop, contain
from treenail.workspace import Filesystem, InMemoryFilesystem, IsolatedFilesystem, isolate
from treenail.workspace.host import HostFilesystem

CHILDREN = 100


@tool(effects="none")
def look(path: str) -> str:
    """Look at something."""
    return f"there is nothing at {path}"


AGENT = Agent("worker", tools=(look,), retry=None)
SCRIPT = ScriptedProvider([Answer("", [("look", {"path": "x"})]), "nothing to see"])


def parent(directory: Path | None) -> ExecutionState:
    log = MemoryLog(heartbeat=False) if directory is None else SqliteLog(directory / "runs.db")
    return ExecutionState(Session(log=log), ResourceRegistry.build({Filesystem: InMemoryFilesystem()}))


def supervised(state: ExecutionState, threads: int) -> Subagents:
    limits = SubagentLimits(max_threads=threads, max_children=10 * CHILDREN)
    return Subagents(state, [AGENT], runner=LoopRunner(SCRIPT), limits=limits)


async def at_once(state: ExecutionState, count: int, threads: int) -> float:
    """Return the seconds that so many subagents took, from the first wish to the last ending."""
    async with supervised(state, threads) as subagents:
        began = time.perf_counter()
        for number in range(count):
            subagents.spawn("worker", f"look {number}")
        outcome = await subagents.wait()
        took = time.perf_counter() - began
    assert outcome.counts["completed"] == count, outcome.summary
    return took


async def one_by_one(state: ExecutionState, count: int) -> float:
    """Return the seconds that the same turns take without supervision."""
    log = state.session.log
    began = time.perf_counter()
    for number in range(count):
        with Session(log=log) as session:
            own = ExecutionState(session, state.resources)
            loop = InnerLoop(
                own, SCRIPT, AGENT.prompt, agent="worker", containment=contain(session, Limits(max_steps=99))
            )
            await loop.run(f"look {number}")
            assert loop.containment is not None
            loop.containment.close()
    return time.perf_counter() - began


def times(directory: Path | None, count: int, threads: int, rounds: int) -> tuple[float, float]:
    """Return the best milliseconds per child, supervised and not; rounds of both alternate."""
    ours, theirs = [], []
    for number in range(rounds):
        place = None if directory is None else directory / f"{threads}-{number}"
        if place is not None:
            place.mkdir()
        ours.append(anyio.run(at_once, parent(place), count, threads))
        if place is not None:
            (place / "plain").mkdir()
        theirs.append(anyio.run(one_by_one, parent(None if place is None else place / "plain"), count))
    return min(ours) / count * 1e3, min(theirs) / count * 1e3


def order(count: int, threads: int) -> tuple[int, int]:
    """Return how many children ran at once at most, and how many were overtaken in the queue."""
    state = parent(None)
    anyio.run(at_once, state, count, threads)
    running = most = 0
    queued: list[str] = []
    started: list[str] = []
    for _, event in state.session.events():
        if isinstance(event, SubagentEvent):
            running += (event.event == "started") - (event.event == "finished")
            most = max(most, running)
            if event.event == "queued":
                queued.append(event.subagent_id)
            elif event.event == "started":
                started.append(event.subagent_id)
    return most, sum(one != other for one, other in zip(queued, started, strict=True))


def memory(count: int) -> float:
    """Return the kilobytes that a waiting child holds, its event in the parent's log included."""

    async def measure() -> float:
        state = parent(None)
        async with supervised(state, 1) as subagents:
            subagents.spawn("worker", "warm up")
            await subagents.wait()
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(count):
                subagents.spawn("worker", f"look {number}")
            gc.collect()
            waiting = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            await subagents.wait()
        return waiting / count / 1024

    return anyio.run(measure)


def make_tree(directory: Path, count: int) -> None:
    for number in range(count):
        folder = directory / f"d{number // 100}"
        if number % 100 == 0:
            folder.mkdir()
        (folder / f"f{number}.txt").write_text(f"the content of file {number}\n" * 4)


def walk(directory: Path) -> int:
    seen = 0
    pending = [os.fspath(directory)]
    while pending:
        with os.scandir(pending.pop()) as listing:
            for entry in listing:
                entry.stat(follow_symlinks=False)
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return seen


def copies(directory: Path, count: int) -> Iterator[Row]:
    """Measure isolated workspaces of a large tree."""
    root = directory / "tree"
    root.mkdir()
    make_tree(root, count)
    walk(root)
    floor = []
    for _ in range(3):
        began = time.perf_counter()
        walk(root)
        floor.append((time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    shutil.copytree(root, directory / "copied")
    copied = (time.perf_counter() - began) * 1e3
    base = HostFilesystem(root, store=directory / "store")
    forks, works = [], []
    for number in range(5):
        began = time.perf_counter()
        copy = isolate(base, place=directory / f"fork-{number}")
        forks.append((time.perf_counter() - began) * 1e3)
        assert isinstance(copy, IsolatedFilesystem)
        began = time.perf_counter()
        call = copy.begin("call")
        for each in range(3):
            copy.write(f"d{each}/f{each}.txt", "changed")
        call.prepare()
        call.finish()
        assert len(copy.changes()) >= 3
        works.append((time.perf_counter() - began) * 1e3)
        copy.close()
    fork = statistics.median(forks)
    label = f"{count:,} files"
    yield Row(f"isolated workspace of {label}: fork, ms, to a walk", fork, min(floor), fork / min(floor))
    yield Row(f"isolated workspace of {label}: fork, ms, to a copy of the tree", fork, copied, fork / copied)
    work = statistics.median(works)
    yield Row(f"isolated workspace of {label}: a call with 3 files and its diff, ms", work)
    copy = isolate(base, place=directory / "foreign")
    assert isinstance(copy, IsolatedFilesystem)
    began = time.perf_counter()
    call = copy.begin("command", foreign=True)
    out = (time.perf_counter() - began) * 1e3
    call.rollback()
    copy.close()
    base.close()
    yield Row(f"isolated workspace of {label}: first command without layers, ms", out, copied, out / copied)


def rows(size: Size) -> Iterator[Row]:
    """Yield every row; `quick` uses small sizes."""
    quick = size.is_small
    count = 10 if quick else CHILDREN
    rounds = 1 if quick else 2
    ours, theirs = times(None, count, count, rounds)
    yield Row(f"{count} subagents at once in memory, ms each, to one by one", ours, theirs, ours / theirs)
    ours, theirs = times(None, count, 6, rounds)
    yield Row(
        f"{count} subagents, 6 at a time, in memory, ms each, to one by one",
        ours,
        theirs,
        ours / theirs,
    )
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = times(Path(directory), count, count, rounds)
        yield Row(f"{count} subagents at once on SQLite, ms each, to one by one", ours, theirs, ours / theirs)
    most, overtaken = order(count, 6)
    yield Row(f"{count} subagents, 6 allowed at once: most that ran", most, 6, most / 6, 1.0)
    yield Row(f"{count} subagents: overtaken in the queue", overtaken, 0, float(overtaken), 0.0)
    waiting = memory(count)
    yield Row("memory per waiting subagent with its line in the log, KB", waiting)
    with tempfile.TemporaryDirectory() as directory:
        yield from copies(Path(directory), 500 if quick else 50_000)

"""What the log costs on Postgres: appends and tool calls, beside a commit and LangGraph's delta saver.

A server of its own, with fsync on, on the same disk for everybody. A durable tool call is measured in appends
of the same run, one before each call: what a millisecond is worth differs between machines and moments.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import psycopg
from tests.postgres import Kit, Server

from bench.log import begin, draft, timed
from bench.loop import Fake, find_peers, langgraph, look
from bench.report import POSTGRES_CALL, Row, Size
from treenail import Agent, TurnState
from treenail.log.postgres import PostgresLog
from treenail.providers import ModelEvent, ModelRequest
from treenail.workspace import begin_with_directory, check_out

KILOBYTE = random.Random(1).randbytes(1024)
WRITERS = 8
APPENDS_A_CALL = 2.5
DELTA = "LangGraph, PostgresSaver with delta channels"


@contextmanager
def server() -> Iterator[Server]:
    """Start a server that is as durable as Postgres is by default."""
    top = Path(tempfile.mkdtemp(prefix="treenail-bench-postgres-"))
    kit = Kit(top)
    kit.make()
    made = Server(kit, "bench", settings={"fsync": "on"})
    try:
        made.start()
        yield made
    finally:
        made.remove()
        shutil.rmtree(top, ignore_errors=True)


def url_of(at: Server) -> str:
    return at.url(schema=f"b{uuid4().hex}")


def appends(at: Server, count: int) -> Iterator[Row]:
    """One event of 1 KB per append, beside one row of 1 KB per commit, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    with PostgresLog(url_of(at), heartbeat=False) as log, psycopg.connect(at.url(), autocommit=True) as raw:
        raw.execute("CREATE TABLE raw (id bigint GENERATED ALWAYS AS IDENTITY, payload bytea)")
        raw.prepare_threshold = 0
        lease = begin(log)
        for base in range(0, count, 10):
            theirs += timed(lambda _: raw.execute("INSERT INTO raw (payload) VALUES (%b)", (KILOBYTE,)), 10)
            ours += timed(lambda n, base=base: log.append(lease, [draft()], expected_seq=base + n), 10)
        raw.execute("DROP TABLE raw")
    mine, floor = median(ours), median(theirs)
    yield Row("append of 1 KB vs a raw INSERT and commit (us, median)", mine, floor, mine / floor)


def writers(at: Server, count: int) -> Row:
    """Appends a second with many writers, each on a session of its own, beside one writer."""
    rates = []
    for many in (1, WRITERS):
        with PostgresLog(url_of(at), heartbeat=False, max_connections=many) as log:
            leases = [begin(log) for _ in range(many)]
            for lease in leases:
                log.append(lease, [draft()], expected_seq=0)

            def write(lease: Any, log: PostgresLog = log) -> None:
                for seq in range(1, count):
                    log.append(lease, [draft()], expected_seq=seq)

            threads = [threading.Thread(target=write, args=(each,)) for each in leases]
            began = time.perf_counter()
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            rates.append(many * (count - 1) / (time.perf_counter() - began))
    return Row(f"appends a second, {WRITERS} writers beside one", rates[1], rates[0], rates[1] / rates[0])


class Appending(Fake):
    """Our fake model, which appends to another session before each answer, and tells how long that took."""

    def __init__(self, calls: int, append: Callable[[int], object]) -> None:
        super().__init__(calls, time.perf_counter)
        self.appends: list[float] = []
        self.asked: list[float] = []
        self._append = append

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.asked.append(time.perf_counter())
        self.appends += timed(lambda _: self._append(len(self.asked) - 1), 1)
        async for each in super().stream(request):
            yield each

    def calls_us(self) -> list[float]:
        """How long each call took, without the appends beside it."""
        return [(asked - marked) * 1e6 for marked, asked in zip(self.marks, self.asked[1:], strict=False)]


def ours(at: Server, calls: int) -> tuple[float, float]:
    """Run the loop; return what a call took, and what an append took beside it, both in us."""
    agent = Agent("bench", instructions="You look.", tools=(look,), max_iterations=calls + 2)
    assert agent.prompt.template.descriptor.tools
    with PostgresLog(url_of(at), heartbeat=False) as log:
        lease = begin(log)
        provider = Appending(calls, lambda n: log.append(lease, [draft()], expected_seq=n))
        run = agent.run("Look", provider=provider, store=log)
        assert run.state is TurnState.COMPLETED, run.result.details
        run.close()
    return median(provider.calls_us()), median(provider.appends)


def theirs(at: Server, calls: int) -> float:
    """Run LangGraph's loop; return what a call took, in us."""
    from langgraph.checkpoint.postgres import PostgresSaver

    with PostgresSaver.from_conn_string(at.url()) as saver:
        saver.setup()
        marks = langgraph(calls, None, delta=True, saver=saver).marks
    return median(after - before for before, after in pairwise(marks)) * 1e6


def calls(at: Server, count: int, tries: int, with_peer: bool) -> Iterator[Row]:
    """Tool calls of a whole loop, in appends of the same run, and beside LangGraph."""
    measured, peers = [], []
    for _ in range(tries):
        measured.append(ours(at, count))
        if with_peer:
            peers.append(theirs(at, count))
    best = min(measured, key=lambda each: each[0] / each[1])
    name = f"tool call, {count:,} calls (us, median), in appends"
    yield Row(name, *best, best[0] / best[1], None if tries == 1 else APPENDS_A_CALL, POSTGRES_CALL)
    if peers:
        mine, peer = min(measured)[0], min(peers)
        yield Row(f"tool call, {count:,} calls (us, median) vs {DELTA}", mine, peer, mine / peer)


def takeovers(at: Server, count: int) -> Iterator[Row]:
    """Take a run over on another machine, cold and with an older copy, beside a plain copy of the files."""
    top = Path(tempfile.mkdtemp(prefix="treenail-bench-travel-"))
    try:
        for number in range(count):
            place = top / "project" / f"d{number // 100}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"f{number}.txt").write_bytes(random.Random(number).randbytes(1024))
        began = time.perf_counter()
        shutil.copytree(top / "project", top / "copy")
        floor = time.perf_counter() - began
        with PostgresLog(url_of(at), heartbeat=False) as log:
            run_id, depot = uuid4(), log.objects
            began = time.perf_counter()
            boundary = begin_with_directory(depot, run_id, top / "project").snapshot
            yield _seconds(f"files that travel: sending {count:,} files vs a copy (s)", began, floor)
            began = time.perf_counter()
            with check_out(depot, run_id, boundary, top / "one") as files:
                yield _seconds(f"take-over, {count:,} files, cold vs a copy (s)", began, floor)
                held = files.begin("call")
                for number in range(3):
                    files.write(f"d0/f{number}.txt", "changed")
                began = time.perf_counter()
                boundary = held.prepare()
                took = time.perf_counter() - began
                held.finish()
            yield Row(
                "a call that changes three files: to its boundary in the depot (ms)", took * 1e3, None, None
            )
            check_out(depot, run_id, boundary, top / "two").close()
            with check_out(depot, run_id, boundary, top / "one") as files:
                held = files.begin("again")
                files.write("d1/new.txt", "new")
                boundary = held.prepare()
                held.finish()
            began = time.perf_counter()
            check_out(depot, run_id, boundary, top / "two").close()
            yield _seconds(f"take-over, {count:,} files, warm (one call behind) vs a copy (s)", began, floor)
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _seconds(name: str, began: float, floor: float) -> Row:
    took = time.perf_counter() - began
    return Row(name, took, floor, took / floor)


def rows(size: Size) -> Iterator[Row]:
    """Measure appends and tool calls on a server."""
    find_peers()
    count = {Size.FULL: 1_000, Size.QUICK: 300, Size.LEAST: 10}[size]
    with_peer = size is not Size.LEAST and importlib.util.find_spec("langgraph") is not None
    with server() as at:
        yield from appends(at, count)
        yield writers(at, count // 2)
        yield from calls(at, count // 2, 1 if size is Size.LEAST else 3, with_peer)
        yield from takeovers(at, {Size.FULL: 10_000, Size.QUICK: 10_000, Size.LEAST: 200}[size])

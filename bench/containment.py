"""What a contained call costs beyond the call, against a peer that does the same job in the same run.

The peer is `veronica-core`: install the `bench` extra, or point `TREENAIL_BENCH_PEER` at a directory that has
it. Both sides are given the same ceilings and the same call: a function that does nothing. Rounds of both
alternate, and the best of each counts, so that a busy machine slows both down alike.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from bench.report import CONTAINED_CALL, Row, Size
from treenail.containment import (
    ExecutionConfig,
    ExecutionContext,
    JsonlJournal,
    Limits,
    WrapOptions,
)

CEILINGS = {"max_cost_usd": 1e6, "max_steps": 10**9, "max_retries_total": 1000, "timeout_ms": 0}


def nothing() -> None:
    return None


def peer_module() -> object | None:
    folder = os.environ.get("TREENAIL_BENCH_PEER")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module("veronica_core.containment")
    except ImportError:
        return None


def in_threads(call: Callable[[], object], calls: int, threads: int) -> float:
    """Return the microseconds that one call took when so many threads made them."""
    if threads == 1:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls * 1e6
    barrier = threading.Barrier(threads + 1)

    def run() -> None:
        barrier.wait()
        for _ in range(calls // threads):
            call()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - began) / calls * 1e6


def ours(method: str) -> Callable[[], object]:
    context = ExecutionContext(ExecutionConfig(**CEILINGS))  # type: ignore[arg-type]  # the names come from a table
    wrap, options = getattr(context, method), WrapOptions(operation_name="nothing")
    return lambda: wrap(nothing, options)


def theirs(peer: object, method: str) -> Callable[[], object]:
    context = peer.ExecutionContext(config=peer.ExecutionConfig(**CEILINGS))  # type: ignore[attr-defined]  # a module that is passed around
    options = peer.WrapOptions(operation_name="nothing")  # type: ignore[attr-defined]  # a module that is passed around
    wrap = getattr(context, method)
    return lambda: wrap(nothing, options)


def rows(size: Size) -> Iterator[Row]:
    """Measure contained calls of a function that does nothing."""
    # Many short rounds: the best one is one in which nobody else had the processor.
    calls, rounds = {Size.FULL: (1_600, 25), Size.QUICK: (800, 3), Size.LEAST: (80, 1)}[size]
    peer = None if size is Size.LEAST else peer_module()
    for method in ("wrap_llm_call", "wrap_tool_call"):
        for threads in (1, 8):
            name = f"{method} of a no-op, {threads} thread{'s' if threads > 1 else ''} (us) vs veronica-core"
            if peer is None:
                best = min(in_threads(ours(method), calls, threads) for _ in range(rounds))
                yield Row(name, best, "not run")
                continue
            measured = [
                (
                    in_threads(ours(method), calls, threads),
                    in_threads(theirs(peer, method), calls, threads),
                )
                for _ in range(rounds)
            ]
            mine, other = min(pair[0] for pair in measured), min(pair[1] for pair in measured)
            if threads == 1:
                yield Row(name, mine, other, mine / other, 0.3, CONTAINED_CALL)
            else:
                yield Row(name, mine, other, mine / other)
    yield stoppable_row(100, rounds * 2)
    yield handoff_row(100, rounds * 2)
    yield async_row(calls, rounds)
    yield snapshot_row(10_000 if size.is_small else 100_000)
    yield journal_row(200 if size is Size.FULL else 40)


def stoppable_row(calls: int, rounds: int) -> Row:
    """A call that can be stopped runs on a worker thread: compare with a contained call on a thread pool.

    Both hand the work to another thread and back, which alone costs several times what an unstoppable call
    does: that is why a synchronous call without any timeout stays on its caller's thread.
    """
    stoppable = ExecutionContext(Limits(timeout=3600.0))
    plain = ExecutionContext(Limits(max_steps=10**9))
    with ThreadPoolExecutor(1) as pool:
        pairs = [
            (
                in_threads(lambda: stoppable.wrap_tool_call(nothing), calls, 1),
                in_threads(lambda: pool.submit(plain.wrap_tool_call, nothing).result(), calls, 1),
            )
            for _ in range(rounds)
        ]
    stoppable.close()
    mine, floor = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return Row("stoppable call of a no-op (us) vs a contained call on an executor", mine, floor, mine / floor)


def handoff_row(calls: int, rounds: int) -> Row:
    """What it would cost to release callers by default: two locks between two threads, and nothing else."""
    plain = ExecutionContext(Limits(max_steps=10**9))
    there, back = threading.Lock(), threading.Lock()
    there.acquire()
    back.acquire()
    is_over = False

    def serve() -> None:
        while True:
            there.acquire()
            if is_over:
                return
            back.release()

    def ping() -> None:
        there.release()
        back.acquire()

    server = threading.Thread(target=serve)
    server.start()
    pairs = [
        (in_threads(lambda: plain.wrap_tool_call(nothing), calls, 1), in_threads(ping, calls, 1))
        for _ in range(rounds)
    ]
    is_over = True
    there.release()
    server.join()
    mine, floor = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return Row(
        "call on its caller's thread (us) vs a bare handoff to a thread and back",
        mine,
        floor,
        mine / floor,
    )


def async_row(calls: int, rounds: int) -> Row:
    """An async call in its own cancel scope: compare with the standard library's `asyncio.timeout`."""
    context = ExecutionContext(Limits(max_steps=10**9))

    async def empty() -> None:
        return None

    async def measure(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            await call()  # type: ignore[misc]  # each call is awaitable
        return (time.perf_counter() - began) / calls * 1e6

    async def floor_call() -> None:
        async with asyncio.timeout(3600):
            await empty()

    async def both() -> tuple[float, float]:
        mine = [await measure(lambda: context.acall_llm(empty)) for _ in range(rounds)]
        floor = [await measure(floor_call) for _ in range(rounds)]
        return min(mine), min(floor)

    mine, floor = asyncio.run(both())
    return Row("acall_llm of an empty coroutine (us) vs asyncio.timeout", mine, floor, mine / floor)


def snapshot_row(many: int) -> Row:
    """A snapshot of a long chain costs what one of a short chain costs."""

    def cost(nodes: int) -> float:
        context = ExecutionContext(Limits())
        for _ in range(nodes):
            context.wrap_tool_call(nothing)
        return min(in_threads(context.get_snapshot, 200, 1) for _ in range(5))

    small, large = cost(100), cost(many)
    return Row(f"get_snapshot at {many:,} nodes (us) vs at 100", large, small, large / small, 2.0)


def journal_row(calls: int) -> Row:
    """A durable call writes two lines of JSON: compare with two such lines, encoded, appended and synced."""
    record = {
        "id": "x" * 60,
        "lineage": ["y" * 36],
        "operation": "z" * 100,
        "cost_usd": 0.0,
        "elapsed_ms": 1.5,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = os.open(Path(folder) / "floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def floor_call() -> None:
            for _ in range(2):
                line = json.dumps({**record, "at": datetime.now(UTC).isoformat()}) + "\n"
                os.write(file, line.encode())
                os.fdatasync(file)

        with JsonlJournal(Path(folder) / "ledger.jsonl") as journal:
            context = ExecutionContext(Limits(max_cost_usd=1e6), journal=journal)
            # Short rounds: what else writes to the disk slows both sides of some of them down.
            pairs = [
                (
                    in_threads(lambda: context.wrap_tool_call(nothing), calls // 20, 1),
                    in_threads(floor_call, calls // 20, 1),
                )
                for _ in range(20)
            ]
        os.close(file)
    mine, floor = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return Row("journalled call (us) vs two lines of JSON, synced", mine, floor, mine / floor)

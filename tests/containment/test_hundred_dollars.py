"""A loop that would cost 100 USD stops at 1.00 USD: alone, with eight children, and over three restarts."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import anyio

from treenail.containment import (
    CallUsage,
    Decision,
    ExecutionContext,
    Limits,
    Price,
    Reserved,
    StaticPrices,
    WrapOptions,
    fold,
    read_journal,
)

# One call is 10,000 output tokens at 1 USD per million: a cent. 10,000 of them would cost 100 USD.
PRICES = StaticPrices({"model": Price(0.0, 1.0)})
OPTIONS = WrapOptions("agent_step", model="model", input_tokens=0, max_output_tokens=10_000)
CALLS = 10_000
LIMITS = Limits(max_cost_usd=1.00)


def test_the_loop_stops_at_one_dollar() -> None:
    """Exactly the hundred calls that a dollar pays for are dispatched, and not one more."""
    ctx = ExecutionContext(LIMITS, prices=PRICES)
    made = 0

    def call_model() -> CallUsage:
        nonlocal made
        made += 1
        return CallUsage(0, 10_000)

    decision = Decision.ALLOW
    for _ in range(CALLS):
        decision = ctx.wrap_llm_call(call_model, OPTIONS)
        if decision is Decision.HALT:
            break
    assert (decision, made) == (Decision.HALT, 100)
    snapshot = ctx.get_snapshot()
    assert (snapshot.cost_usd_accumulated, snapshot.stop_reason) == (1.0, "budget_exceeded")


async def test_eight_children_stop_at_one_dollar_together() -> None:
    """Eight parallel children that would each go on for ever dispatch a hundred calls between them."""
    parent = ExecutionContext(LIMITS, prices=PRICES)
    made = 0

    async def call_model() -> CallUsage:
        nonlocal made
        made += 1
        await anyio.lowlevel.checkpoint()
        return CallUsage(0, 10_000)

    children = [parent.spawn_child() for _ in range(8)]

    async def run(child: ExecutionContext) -> None:
        for _ in range(CALLS):
            if (await child.acall_llm(call_model, OPTIONS)).decision is Decision.HALT:
                return

    async with anyio.create_task_group() as tasks:
        for child in children:
            tasks.start_soon(run, child)
    assert made == 100
    assert parent.get_snapshot().cost_usd_accumulated == 1.0
    # A child that came while the last cents were only reserved was refused for that one call; asked again,
    # every one of them and their parent have ended for good, each with a record of its own.
    for ctx in (parent, *children):
        assert ctx.wrap_llm_call(lambda: None, OPTIONS) is Decision.HALT
        told = [event.event_type for event in ctx.get_snapshot().events]
        assert told == ["budget_exceeded"]


def test_eight_children_in_threads_stop_at_one_dollar_together() -> None:
    """The same with threads, with calls that turn out dearer than estimated now and then."""
    parent = ExecutionContext(LIMITS, prices=PRICES)
    dispatched: list[float] = []

    def run(child: ExecutionContext) -> None:
        def call_model() -> CallUsage:
            snapshot = parent.get_snapshot()
            dispatched.append(snapshot.cost_usd_accumulated + snapshot.cost_usd_reserved)
            return CallUsage(0, 11_000)

        while child.wrap_llm_call(call_model, OPTIONS) is not Decision.HALT:
            pass

    threads = [threading.Thread(target=run, args=(parent.spawn_child(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    spent = parent.get_snapshot().cost_usd_accumulated
    # Each call was estimated at a cent and cost 1.1; only the calls in flight at the end can have gone over.
    assert 0.98 < spent <= 1.0 + 8 * 0.001
    assert len(dispatched) == round(spent / 0.011)


RUN = """
import os, signal, sys
from treenail.containment import *

path, calls_before_the_kill = sys.argv[1], int(sys.argv[2])
ctx = ExecutionContext.resume(
    Limits(max_cost_usd=1.00),
    read_journal(path),
    metadata=ChainMetadata("request", "run"),
    prices=StaticPrices({"model": Price(0.0, 1.0)}),
    journal=JsonlJournal(path),
)
options = WrapOptions("agent_step", model="model", input_tokens=0, max_output_tokens=10_000)
made = 0

def call_model():
    global made
    made += 1
    if made == calls_before_the_kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return CallUsage(0, 10_000)

for _ in range(10_000):
    if ctx.wrap_llm_call(call_model, options) is Decision.HALT:
        break
print(made, ctx.get_snapshot().cost_usd_accumulated, ctx.stop_reason)
"""


def test_the_loop_stops_at_one_dollar_over_three_restarts(tmp_path: Path) -> None:
    """Killed in the middle of a call three times, the run still dispatches a hundred calls in all."""
    path = tmp_path / "ledger.jsonl"
    for calls in (10, 20, 30):
        killed = subprocess.run([sys.executable, "-c", RUN, str(path), str(calls)], check=False)
        assert killed.returncode == -9
    last = subprocess.run(
        [sys.executable, "-c", RUN, str(path), "-1"], check=True, capture_output=True, text=True
    )
    assert last.stdout == "40 1.0 budget_exceeded\n"
    events = read_journal(path)
    assert sum(isinstance(event, Reserved) for event in events) == 100
    assert (fold(events)["run"].steps, fold(events)["run"].unsettled) == (100, 3)

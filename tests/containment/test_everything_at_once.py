"""Everything together: threads, tasks, children, retries, further attempts and cancellation at any moment."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from treenail.containment import (
    BudgetWindowHook,
    CircuitBreaker,
    Decision,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    LedgerEvent,
    Limits,
    Reserved,
    ShieldPipeline,
    ToolCallContext,
    WrapOptions,
    fold,
)
from treenail.containment.breaker import CircuitState
from treenail.containment.pots import LocalBudgetBackend
from treenail.testing import FakeClock

CENTS = 60
RETRIES = 40


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Mix:
    """Callers of every kind on one run, and what they really did."""

    def __init__(self, seed: int) -> None:
        self.journal: list[LedgerEvent] = []
        self.lock = threading.Lock()
        self.dispatched = 0
        self.seed = seed
        self.root = ExecutionContext(
            Limits(max_cost_usd=CENTS / 100, max_steps=10 * CENTS, max_retries=RETRIES),
            ShieldPipeline(BudgetWindowHook(100_000)),
            circuit_breaker=CircuitBreaker(100_000),
            journal=self.write,
        )

    def write(self, event: LedgerEvent) -> None:
        with self.lock:
            self.journal.append(event)

    def began(self) -> None:
        with self.lock:
            self.dispatched += 1

    def thread(self, number: int) -> None:
        chance = random.Random(f"{self.seed} thread {number}")
        chain = self.root.spawn_child() if number % 2 else self.root
        if number % 4 == 3:
            chain = chain.spawn_child(Limits(max_steps=CENTS))

        def callee() -> None:
            self.began()
            if chance.random() < 0.2:
                raise OSError("no")

        for _ in range(CENTS):
            options = WrapOptions(
                cost_estimate_hint=0.01,
                retry_policy_override=chance.choice([None, 0, 2]),
                timeout_ms=chance.choice([None, 60_000]),
            )
            outcome = chain.call_llm(callee, options)
            if outcome.decision is Decision.RETRY:
                chain.call_llm(callee, replace(options, retry_of=outcome))

    async def task(self, number: int) -> None:
        chance = random.Random(f"{self.seed} task {number}")
        chain = self.root.spawn_child()

        async def callee() -> None:
            self.began()
            for _ in range(chance.randrange(4)):
                await anyio.lowlevel.checkpoint()
            if chance.random() < 0.2:
                raise OSError("no")

        async def cancel(scope: anyio.CancelScope) -> None:
            for _ in range(chance.randrange(6)):
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        for _ in range(CENTS // 4):
            async with anyio.create_task_group() as group:
                if chance.random() < 0.4:
                    group.start_soon(cancel, group.cancel_scope)
                await chain.acall_llm(callee, WrapOptions(cost_estimate_hint=0.01))

    def loop(self) -> None:
        async def tasks() -> None:
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(self.task, number)

        anyio.run(tasks)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_calls_in_whatever_way_the_books_balance(
    seed: int, at_once: Callable[[int, Callable[[int], None]], list[None]]
) -> None:
    """No ceiling is passed, no reservation stays open, and the journal says what the run says."""
    mix = Mix(seed)
    at_once(8, lambda number: mix.loop() if number > 5 else mix.thread(number))
    snapshot = mix.root.get_snapshot()
    told = fold(mix.journal)[mix.root.chain_id]
    assert snapshot.cost_usd_accumulated <= CENTS / 100
    assert snapshot.retries_used <= RETRIES
    assert mix.dispatched <= snapshot.step_count
    assert sum(isinstance(event, Reserved) for event in mix.journal) == snapshot.step_count == told.steps
    assert (told.cost_pico / 1e12, told.retries) == (snapshot.cost_usd_accumulated, snapshot.retries_used)
    assert (snapshot.cost_usd_reserved, told.unsettled) == (0.0, 0)
    assert snapshot.graph_summary is not None
    assert snapshot.graph_summary.running == 0
    # It is a stop that ended it: everybody had more to do.
    assert mix.root.stop_reason in ("budget_exceeded", "provider_error", "retry_budget_exceeded")


class Slow:
    """Lets a call wait a moment first."""

    def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan:
        return DegradePlan(delay_ms=1)


@pytest.mark.parametrize("moment", range(12))
async def test_a_call_that_is_cancelled_at_any_moment_holds_nothing(moment: int, clock: FakeClock) -> None:
    """Neither money of the run, nor of a shared pot, nor a probe slot, nor a place in a window."""
    pot, breaker = LocalBudgetBackend(), CircuitBreaker(1, 1e-9)
    window = BudgetWindowHook(1000)
    ctx = ExecutionContext(
        ExecutionConfig(1.0, 100, 100, 0, budget_backend=pot),
        ShieldPipeline(hooks=[window, Slow()]),
        circuit_breaker=breaker,
        clock=clock,
    )
    breaker.record_failure()
    assert breaker.state is CircuitState.HALF_OPEN
    dispatched = 0

    async def callee() -> None:
        nonlocal dispatched
        dispatched += 1
        await anyio.lowlevel.checkpoint()
        raise OSError("no")

    async def cancel(scope: anyio.CancelScope) -> None:
        for _ in range(moment):
            clock.advance(0.001)
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cancel, group.cancel_scope)
        await ctx.acall_llm(callee, WrapOptions(cost_estimate_hint=0.01, retry_policy_override=3))
        group.cancel_scope.cancel()
    snapshot = ctx.get_snapshot()
    assert (snapshot.cost_usd_reserved, pot.get_reserved()) == (0.0, 0.0)
    assert snapshot.cost_usd_accumulated == pytest.approx(pot.get()) == pytest.approx(0.01 * dispatched)
    assert snapshot.graph_summary is not None
    assert snapshot.graph_summary.running == 0
    assert snapshot.step_count == dispatched
    assert window.before_llm_call(ToolCallContext("r")) is None
    assert window.last_reason.startswith(f"{dispatched} of")
    assert breaker.acquire() is not None

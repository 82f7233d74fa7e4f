"""Retries that the caller makes itself: each attempt is a call, and its failure pays for the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    BudgetWindowHook,
    CallOutcome,
    ChainMetadata,
    CircuitBreaker,
    Decision,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    LedgerEvent,
    LoopPolicy,
    Reserved,
    RetryTaken,
    Settled,
    ShieldPipeline,
    TokenBudgetHook,
    ToolCallContext,
    WrapOptions,
    current_call,
    fold,
)
from treenail.containment.breaker import CircuitState
from treenail.containment.pots import LocalBudgetBackend
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
CENT = WrapOptions("ask", cost_estimate_hint=0.01, will_retry=True)


class Stubborn:
    """A caller that tries again until it succeeds or is refused, and counts what was really dispatched."""

    def __init__(self, failures: int = 10**9) -> None:
        self.failures = failures
        self.dispatched = 0

    def fn(self) -> str:
        self.dispatched += 1
        if self.dispatched <= self.failures:
            raise ConnectionError(f"attempt {self.dispatched}")
        return "at last"

    def ask(self, ctx: ExecutionContext, options: WrapOptions = CENT) -> CallOutcome[str]:
        outcome = ctx.call_llm(self.fn, options)
        while outcome.decision is Decision.RETRY:
            options = replace(options, retry_of=outcome)
            outcome = ctx.call_llm(self.fn, options)
        return outcome


def stops(ctx: ExecutionContext) -> list[str]:
    return [event.event_type for event in ctx.get_snapshot().events if event.hook == "ExecutionContext"]


def test_every_attempt_is_a_step_and_every_failure_a_retry(config: Config) -> None:
    """Two failures and a success are three steps and two retries, each at its reservation."""
    ctx = ExecutionContext(config())
    assert Stubborn(2).ask(ctx).value == "at last"
    snapshot = ctx.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used) == (3, 2)
    assert (snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (0.03, 0.0)
    assert [node.status for node in snapshot.nodes] == ["error", "error", "ok"]


@pytest.mark.parametrize(
    ("limits", "dispatched", "reason"),
    [
        ({"max_steps": 3}, 3, "step_limit_exceeded"),
        ({"max_retries_total": 2}, 3, "provider_error"),
        ({"max_cost_usd": 0.035}, 3, "budget_exceeded"),
    ],
)
def test_a_used_up_ceiling_refuses_the_next_attempt(
    limits: dict[str, Any], dispatched: int, reason: str, config: Config
) -> None:
    """The unit that a failure took pays for one attempt more; the reason is told of once."""
    ctx = ExecutionContext(config(**limits))
    caller = Stubborn()
    outcome = caller.ask(ctx)
    assert caller.dispatched == dispatched
    assert (outcome.decision, outcome.stop_reason) == (Decision.HALT, reason)
    assert stops(ctx) == [reason]
    assert not ctx.call_llm(lambda: None, CENT).ok


@given(
    steps=st.integers(1, 12),
    retries=st.integers(1, 12),
    cents=st.integers(1, 12),
    failures=st.lists(st.integers(0, 6), min_size=1, max_size=6),
)
def test_attempts_never_exceed_any_ceiling(steps: int, retries: int, cents: int, failures: list[int]) -> None:
    """Whatever fails how often: attempts stay within steps and money, and further attempts within retries."""
    ctx = ExecutionContext(
        ExecutionConfig(max_cost_usd=cents / 100, max_steps=steps, max_retries_total=retries, timeout_ms=0)
    )
    callers = [Stubborn(each) for each in failures]
    for each in callers:
        each.ask(ctx)
    dispatched = sum(each.dispatched for each in callers)
    snapshot = ctx.get_snapshot()
    assert dispatched <= min(steps, cents)
    assert dispatched - sum(each.dispatched > 0 for each in callers) <= retries
    assert (snapshot.step_count, snapshot.retries_used <= retries) == (dispatched, True)
    assert snapshot.cost_usd_accumulated == pytest.approx(dispatched / 100)
    assert snapshot.cost_usd_reserved == 0.0


@pytest.mark.parametrize(
    ("limits", "exactly"),
    [({"max_steps": 64 + 20}, 20), ({"max_retries_total": 20}, 20), ({"max_cost_usd": 0.84}, 20)],
    ids=["steps", "retries", "money"],
)
def test_of_64_threads_exactly_n_further_attempts_pass(
    limits: dict[str, Any], exactly: int, config: Config, at_once: Any
) -> None:
    """All have begun their first attempt before any fails; then as many pass as there is room."""
    ctx = ExecutionContext(config(**limits))
    barrier = threading.Barrier(64)
    dispatched: list[int] = []

    def work(number: int) -> None:
        def first() -> None:
            barrier.wait(30)
            raise OSError("no")

        def again() -> None:
            dispatched.append(number)
            raise OSError("no")

        outcome = ctx.call_llm(first, CENT)
        while outcome.decision is Decision.RETRY:
            outcome = ctx.call_llm(again, replace(CENT, retry_of=outcome))

    at_once(64, work)
    assert len(dispatched) == exactly
    assert ctx.get_snapshot().step_count == 64 + exactly


def test_a_child_takes_its_attempts_from_its_parent(config: Config) -> None:
    """A parent's retries bound a child's attempts, and both end with their own records."""
    parent = ExecutionContext(config(max_retries_total=2))
    child = parent.spawn_child()
    caller = Stubborn()
    assert caller.ask(child).stop_reason == "provider_error"
    assert caller.dispatched == 3
    assert (stops(parent), stops(child)) == (["provider_error"], ["provider_error"])


def test_a_child_with_retries_of_its_own_still_spends_the_parents_steps_and_money(config: Config) -> None:
    """Its attempts leave the parent's retries alone, now and after a restart; nothing else is its own."""
    journal: list[LedgerEvent] = []
    parent = ExecutionContext(
        config(max_retries_total=2, max_steps=5), metadata=ChainMetadata("r", "run"), journal=journal.append
    )
    caller = Stubborn()
    assert caller.ask(parent.spawn_child(onlooker=True)).stop_reason == "step_limit_exceeded"
    assert caller.dispatched == 5
    snapshot = parent.get_snapshot()
    assert (snapshot.retries_used, snapshot.cost_usd_accumulated) == (0, 0.05)
    assert (fold(journal)["run"].retries, fold(journal)["run"].steps) == (0, 5)


# --- whether to wait -------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay_s", "reason"), [(9.0, "timeout"), (8.0, None)])
def test_a_wait_that_would_pass_the_deadline_is_not_begun(
    config: Config, clock: FakeClock, delay_s: float, reason: str | None
) -> None:
    """9 of 10 seconds are left: 8 of them may be waited, 9 may not; the chain itself is not over."""
    ctx = ExecutionContext(config(timeout_ms=10_000), clock=clock)
    clock.advance(1)
    refused = ctx.refuses_retry("llm", CENT, delay_s)
    assert (None if refused is None else refused.reason) == reason
    assert not ctx.cancellation_token.is_cancelled


@pytest.mark.parametrize(("delay_s", "waits"), [(0.0, False), (4.9, False), (5.0, True), (9.0, True)])
def test_nobody_waits_for_a_circuit_that_stays_open(
    config: Config, clock: FakeClock, delay_s: float, waits: bool
) -> None:
    """The failure opens it for 5 s: a shorter wait is refused before it begins, a longer one is not."""
    breaker = CircuitBreaker(1, recovery_timeout=5, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    outcome = ctx.call_llm(Stubborn().fn, CENT)
    refused = ctx.refuses_retry("llm", replace(CENT, retry_of=outcome), delay_s)
    assert (None if refused is None else refused.reason) == (None if waits else "circuit_open")


def test_a_ceiling_that_is_reached_is_known_before_the_wait(config: Config) -> None:
    ctx = ExecutionContext(config(max_steps=1))
    outcome = ctx.call_llm(Stubborn().fn, CENT)
    refused = ctx.refuses_retry("llm", replace(CENT, retry_of=outcome), 60.0)
    assert refused is not None
    assert refused.reason == "step_limit_exceeded"
    assert stops(ctx) == ["step_limit_exceeded"]


# --- guards ----------------------------------------------------------------------------------------


def test_the_breaker_sees_every_attempt(config: Config) -> None:
    """Two failures open the circuit, so the third attempt is refused."""
    breaker = CircuitBreaker(2)
    ctx = ExecutionContext(config(), circuit_breaker=breaker)
    caller = Stubborn()
    assert caller.ask(ctx).stop_reason == "circuit_open"
    assert (caller.dispatched, breaker.state) == (2, CircuitState.OPEN)


def test_a_window_counts_attempts_and_can_refuse_one(config: Config) -> None:
    """Three calls fit into the window: the first attempt and two more."""
    ctx = ExecutionContext(config(), ShieldPipeline(BudgetWindowHook(max_calls=3)))
    caller = Stubborn()
    assert caller.ask(ctx).stop_reason == "provider_rate_limit"
    assert (caller.dispatched, stops(ctx)) == (3, ["provider_rate_limit"])


def test_only_a_retry_hook_forbids_another_attempt(config: Config) -> None:
    """Its answer is the call's decision; the pipeline's default for errors is not meant for this caller."""

    class Never:
        def on_error(self, ctx: ToolCallContext, err: BaseException) -> Decision:
            return Decision.QUARANTINE

    caller = Stubborn()
    assert (
        caller.ask(ExecutionContext(config(), ShieldPipeline(retry=Never()))).decision is Decision.QUARANTINE
    )
    assert caller.dispatched == 1
    assert Stubborn(2).ask(ExecutionContext(config(), ShieldPipeline())).ok


def test_what_was_made_less_stays_so_for_the_next_attempt(config: Config) -> None:
    """The failed attempt's plan and the error hook's together are the next attempt's, without the delay."""
    plans: list[DegradePlan | None] = []

    class Once:
        calls = 0

        def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan | None:
            self.calls += 1
            return DegradePlan(model="small") if self.calls == 1 else None

        def on_error(self, ctx: ToolCallContext, err: BaseException) -> DegradePlan:
            return DegradePlan(max_output_tokens=10, delay_ms=60_000)

    def callee() -> str:
        call = current_call()
        assert call is not None
        plans.append(call.plan)
        if len(plans) == 1:
            raise OSError("no")
        return "yes"

    hook = Once()
    ctx = ExecutionContext(config(on_unknown_price="warn"), ShieldPipeline(hook, retry=hook))
    options = WrapOptions(model="big", will_retry=True)
    failed = ctx.call_llm(callee, options)
    assert failed.next_plan is not None
    assert failed.next_plan.delay_ms == 60_000
    assert ctx.call_llm(callee, replace(options, retry_of=failed)).ok
    first, second = plans
    assert first is not None
    assert second is not None
    assert (first.model, second.model, second.max_output_tokens) == ("small", "small", 10)
    assert second.delay_ms == 0


def test_a_token_budget_reserves_each_attempt_once(config: Config) -> None:
    """A failed attempt's reservation is dropped before the next one is made."""
    tokens = TokenBudgetHook(max_output_tokens=100, degrade_threshold=1.0)
    ctx = ExecutionContext(config(), ShieldPipeline(tokens))
    assert Stubborn(3).ask(ctx, WrapOptions("ask", max_output_tokens=100, will_retry=True)).ok


def test_shared_money_is_drawn_for_each_attempt(config: Config) -> None:
    """A pot pays for three attempts, and refuses the fourth."""
    pot = LocalBudgetBackend()
    ctx = ExecutionContext(config(max_cost_usd=0.03, budget_backend=pot))
    caller = Stubborn()
    assert caller.ask(ctx).stop_reason == "budget_exceeded"
    assert (caller.dispatched, pot.get(), pot.get_reserved()) == (3, 0.03, 0.0)


def test_attempts_are_not_a_loop(config: Config) -> None:
    """Loop detection is about what a run asks for, not about how often a provider fails."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=2))
    assert Stubborn(5).ask(ctx).ok


def test_a_restart_knows_of_every_attempt(config: Config) -> None:
    """Cut off in the third attempt: three steps, two retries, and the third counts at its reservation."""
    journal: list[LedgerEvent] = []
    ctx = ExecutionContext(config(), metadata=ChainMetadata("r", "run"), journal=journal.append)
    Stubborn(2).ask(ctx)
    written = journal[:-1]
    kinds = [type(event) for event in written]
    assert kinds == [Reserved, Settled, RetryTaken, Reserved, Settled, RetryTaken, Reserved]
    spent = fold(written)["run"]
    assert (spent.steps, spent.retries, spent.unsettled) == (3, 2, 1)
    again = ExecutionContext.resume(config(max_steps=3), written)
    snapshot = again.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used, snapshot.cost_usd_accumulated) == (3, 2, 0.03)
    # Each failure is one event of its own, so that counting events twice counts nothing twice.
    assert fold([*written, *written])["run"] == spent

"""Inside a contained model call every attempt is booked, and the run's limits bound the attempts."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.providers.test_retrying import Attempts, HastyClock, transient

from treenail.clock import SystemClock
from treenail.containment import (
    CallOutcome,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    Price,
    ShieldPipeline,
    StaticPrices,
    WrapOptions,
    current_call,
)
from treenail.conversation.replay import ReplayItem
from treenail.errors import ModelCallError, UsageError
from treenail.providers.answer import CollectedAnswer, Collector
from treenail.providers.base import ModelEvent, ModelRequest, Stopped, TextDelta, UsageReported
from treenail.providers.retrying import Retried, Retrying, RetryPolicy
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.providers.usage import report_usage
from treenail.state.budget import TokenUsage
from treenail.testing import FakeClock

REQUEST = ModelRequest((ReplayItem("user", "hi"),))
PATIENT = RetryPolicy(attempts=1000, base_s=0.0, cap_s=0.0, total_s=1e6)
CENT = WrapOptions("ask", cost_estimate_hint=0.01)


async def ask(
    ctx: ExecutionContext, provider: Retrying, options: WrapOptions = CENT
) -> CallOutcome[CollectedAnswer]:
    """Make one contained model call, as the loop does."""

    async def call() -> CollectedAnswer:
        collector, contained = Collector(), current_call()
        assert contained is not None
        try:
            async with aclosing(provider.stream(REQUEST)) as events:
                async for each in events:
                    collector.add(each)
        finally:
            report_usage(contained, collector.usage)
        return collector.answer()

    return await ctx.acall_llm(call, options)


def asked(ctx: ExecutionContext, provider: Retrying) -> CallOutcome[CollectedAnswer]:
    return anyio.run(ask, ctx, provider)


def failing(times: int) -> Attempts:
    failures: list[list[ModelEvent | Exception]] = [[transient()] for _ in range(times)]
    return Attempts(*failures, [TextDelta("yes"), Stopped("end")])


def test_each_attempt_is_a_step_and_a_retry_of_the_run() -> None:
    ctx = ExecutionContext(Limits(max_steps=10, max_retries=10, max_cost_usd=1.0))
    outcome = asked(ctx, Retrying(failing(3), PATIENT, clock=HastyClock()))
    snapshot = ctx.get_snapshot()
    assert outcome.ok
    assert (snapshot.step_count, snapshot.retries_used) == (4, 3)
    assert snapshot.cost_usd_accumulated == pytest.approx(0.04)
    assert [node.parent_id for node in snapshot.nodes[1:]] == [outcome.node.node_id] * 3


@given(
    failures=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    steps=st.integers(1, 12),
    retries=st.integers(1, 12),
)
def test_attempts_never_exceed_steps_and_retries(failures: list[int], steps: int, retries: int) -> None:
    """Whatever fails how often: no more attempts than steps, no more further attempts than retries."""
    ctx = ExecutionContext(Limits(max_steps=steps, max_retries=retries))
    providers = [failing(each) for each in failures]

    async def all_of_them() -> list[CallOutcome[CollectedAnswer]]:
        return [await ask(ctx, Retrying(each, PATIENT, clock=HastyClock())) for each in providers]

    outcomes = anyio.run(all_of_them)
    attempts = sum(each.calls for each in providers)
    begun = sum(each.was_dispatched for each in outcomes)
    snapshot = ctx.get_snapshot()
    assert attempts <= steps
    assert attempts - begun <= retries
    assert (snapshot.step_count, snapshot.retries_used <= retries) == (attempts, True)


@pytest.mark.parametrize("limits", [{"max_retries": 20}, {"max_steps": 84}], ids=["retries", "steps"])
def test_of_64_tasks_exactly_n_further_attempts_are_made(limits: dict[str, int]) -> None:
    ctx = ExecutionContext(Limits(**limits))  # type: ignore[arg-type] # the test names the fields
    providers = [Attempts([transient()]) for _ in range(64)]

    class Together(HastyClock):
        """Nobody comes back from a first wait before everybody has begun it."""

        async def async_sleep(self, seconds: float) -> None:
            self.slept.append(seconds)
            while sum(each.calls > 0 for each in providers) < 64:
                await anyio.lowlevel.checkpoint()

    async def main() -> None:
        clock = Together()
        async with anyio.create_task_group() as tasks:
            for each in providers:
                tasks.start_soon(ask, ctx, Retrying(each, PATIENT, clock=clock))

    anyio.run(main)
    assert sum(each.calls for each in providers) == 64 + 20


@pytest.mark.parametrize(
    ("limits", "reason", "calls"),
    [
        ({"max_steps": 3}, "step_limit_exceeded", 3),
        ({"max_retries": 3}, "provider_error", 4),
        ({"max_cost_usd": 0.025}, "budget_exceeded", 2),
    ],
)
def test_it_ends_with_the_classified_error_and_the_reason(
    limits: dict[str, Any], reason: str, calls: int
) -> None:
    """The provider's own error, of its own class and kind, and beside it which limit it was."""
    ctx = ExecutionContext(Limits(**limits))
    provider = Attempts([transient()])
    outcome = asked(ctx, Retrying(provider, PATIENT, clock=HastyClock()))
    error = outcome.error
    assert isinstance(error, ModelCallError)
    assert (error.kind, error.attempts, error.stop_reason) == ("transient", calls, reason)
    assert (outcome.stop_reason, provider.calls, provider.closed) == (reason, calls, calls)
    assert [each.event_type for each in ctx.get_snapshot().events] == [reason]


def test_a_wait_that_would_pass_the_runs_deadline_is_not_begun() -> None:
    clock = FakeClock()
    ctx = ExecutionContext(Limits(timeout=5.0), clock=clock)
    heard: list[Retried] = []
    policy = RetryPolicy(base_s=20.0, cap_s=20.0, total_s=600.0)
    provider = Attempts([transient()])
    outcome = asked(ctx, Retrying(provider, policy, clock=clock, on_retry=heard.append))
    assert isinstance(outcome.error, ModelCallError)
    assert (outcome.error.stop_reason, provider.calls, heard) == ("timeout", 1, [])


def test_a_wait_that_would_pass_a_cancel_scope_is_not_begun() -> None:
    """A deadline of whoever waits for the call counts as well: the error comes at once."""
    provider = Attempts([transient()])
    retrying = Retrying(provider, RetryPolicy(base_s=60.0, cap_s=60.0, total_s=600.0), clock=SystemClock())

    async def main() -> ModelCallError | None:
        with anyio.fail_after(20):
            try:
                async with aclosing(retrying.stream(REQUEST)) as events:
                    async for _ in events:
                        pass
            except ModelCallError as error:
                return error
        return None

    assert anyio.run(main) is not None
    assert provider.calls == 1


def test_what_failed_attempts_report_is_booked_once() -> None:
    """0.002 and 0.004 were reported, and the third attempt's 0.008: no more and no less is spent."""
    provider = Attempts(
        [UsageReported(TokenUsage(10, 1), 0.002), transient()],
        [UsageReported(TokenUsage(10, 1), 0.004), transient()],
        [UsageReported(TokenUsage(10, 1), 0.001), UsageReported(TokenUsage(10, 5), 0.008), Stopped("end")],
    )
    ctx = ExecutionContext(Limits(max_cost_usd=1.0))
    outcome = asked(ctx, Retrying(provider, PATIENT, clock=HastyClock()))
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.014)
    assert outcome.value is not None
    assert outcome.value.cost_usd == pytest.approx(0.014)
    assert outcome.value.usage == TokenUsage(30, 7)


def test_an_attempt_that_reports_nothing_costs_its_reservation() -> None:
    """The first reported 0.002; the second, which nobody heard of, costs the cent that was reserved."""
    provider = Attempts([UsageReported(TokenUsage(10, 1), 0.002), transient()], [transient()])
    ctx = ExecutionContext(Limits(max_cost_usd=1.0))
    asked(ctx, Retrying(provider, RetryPolicy(attempts=2, base_s=0), clock=HastyClock()))
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.012)


def test_a_last_failure_that_is_not_retried_takes_a_retry_of_the_run() -> None:
    """Each failure is one: two that were followed by another attempt, and the last."""
    ctx = ExecutionContext(Limits(max_retries=10))
    asked(ctx, Retrying(Attempts([transient()]), RetryPolicy(attempts=3, base_s=0), clock=HastyClock()))
    assert ctx.get_snapshot().retries_used == 3


def test_a_plan_for_a_further_attempt_is_followed() -> None:
    """After the first failure the shield wants a smaller model; it is asked, and its price counts."""
    models: list[str | None] = []

    def first(request: ModelRequest) -> Answer:
        models.append(request.model)
        if len(models) == 1:
            return Answer(error=transient())
        return Answer("yes", usage=TokenUsage(1000, 1000))

    class SmallerAfterAFailure:
        calls = 0

        def before_llm_call(self, ctx: object) -> DegradePlan | None:
            self.calls += 1
            return DegradePlan(model="small") if self.calls > 1 else None

    class OneCallAtATime(ScriptedProvider):
        def estimate_usd(self, request: ModelRequest) -> float | None:
            return None

    prices = StaticPrices({"big": Price(10.0, 10.0), "small": Price(1.0, 1.0)})
    ctx = ExecutionContext(
        ExecutionConfig(1.0, None, None, 0), ShieldPipeline(SmallerAfterAFailure()), prices=prices
    )
    provider = Retrying(OneCallAtATime([first], model="big"), PATIENT, clock=HastyClock())
    options = WrapOptions("ask", model="big", input_tokens=1000, max_output_tokens=1000)
    outcome = anyio.run(ask, ctx, provider, options)
    assert models == [None, "small"]
    assert outcome.value is not None
    assert outcome.value.model == "small"
    # The failed attempt at what was reserved for the big model, the other at what it really used.
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.02 + 0.002)


def test_a_tools_call_is_not_a_models() -> None:
    """A tool that calls a model by itself, outside of a model call, is one call to the containment."""
    ctx = ExecutionContext(Limits(max_steps=1))
    retrying = Retrying(failing(3), PATIENT, clock=HastyClock())

    async def handler() -> None:
        async with aclosing(retrying.stream(REQUEST)) as events:
            async for _ in events:
                pass

    outcome = anyio.run(ctx.acall_tool, handler)
    assert (outcome.ok, ctx.get_snapshot().step_count) == (True, 1)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "1", None])
@pytest.mark.parametrize("field", ["attempts", "base_s", "cap_s", "total_s"])
def test_a_policy_takes_numbers_that_make_sense(field: str, value: Any) -> None:
    """Others are refused with the name of the field; a wait may be 0, and somebody must make a call."""
    with pytest.raises(UsageError, match=f"RetryPolicy.{field}"):
        RetryPolicy(**{field: value})
    with pytest.raises(UsageError, match=r"RetryPolicy\.attempts"):
        RetryPolicy(attempts=0)
    assert RetryPolicy(base_s=0, cap_s=0, total_s=0).attempts == 5

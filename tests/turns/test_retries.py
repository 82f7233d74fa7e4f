"""A turn asks the model again after a failure that may pass, and the run's limits bound the attempts."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent
from treenail.clock import SystemClock
from treenail.containment import ExecutionContext, Limits
from treenail.conversation import ProviderUsage
from treenail.errors import ModelCallError, ThrottleError, UsageError
from treenail.providers import (
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.state import ExecutionState, Session, TokenUsage
from treenail.testing import FakeClock
from treenail.tools import ToolCall
from treenail.turns import InnerLoop, RetryPolicy, StatusChanged, TurnResult, TurnState

PATIENT = RetryPolicy(attempts=1000, base_s=0.0, cap_s=0.0, total_s=1e6)
AGENT = Agent("tester")


class HastyClock(FakeClock):
    """Sleeping moves the clock at once."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def async_sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await anyio.lowlevel.checkpoint()


class Attempts:
    """A provider that plays a list of events and errors per call."""

    name = "attempts"
    model = "m"

    def __init__(self, *attempts: list[ModelEvent | Exception]) -> None:
        self._attempts = attempts
        self.calls = 0
        self.closed = 0

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.01

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.calls += 1
        try:
            for each in self._attempts[min(self.calls, len(self._attempts)) - 1]:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.closed += 1


def transient() -> ModelCallError:
    return ModelCallError("later", kind="transient", retryable=True)


GOOD: list[ModelEvent | Exception] = [TextDelta("yes"), Stopped("end")]


def failing(times: int) -> Attempts:
    failures: list[list[ModelEvent | Exception]] = [[transient()] for _ in range(times)]
    return Attempts(*failures, GOOD)


def loop(
    provider: Attempts,
    retry: RetryPolicy | None = None,
    containment: ExecutionContext | None = None,
    **more: Any,
) -> InnerLoop:
    clock = more.pop("clock", None) or HastyClock()
    state = ExecutionState(Session(clock=clock), clock=clock)
    return InnerLoop(state, provider, AGENT.prompt, retry=retry, containment=containment, **more)


def run(provider: Attempts, retry: RetryPolicy | None = None, **more: Any) -> TurnResult:
    return anyio.run(loop(provider, retry or RetryPolicy(), **more).run, "go")


def error_of(result: TurnResult) -> ModelCallError:
    assert isinstance(result.error, ModelCallError)
    return result.error


# --- how often and how long --------------------------------------------------------------------------


def test_it_gives_up_after_the_attempts_it_was_given() -> None:
    provider, clock = Attempts([transient()]), HastyClock()
    result = run(provider, RetryPolicy(attempts=4), clock=clock)
    assert (provider.calls, provider.closed, len(clock.slept)) == (4, 4, 3)
    assert (error_of(result).attempts, result.state) == (4, TurnState.FAILED)


@given(st.integers(1, 100), st.floats(0, 60), st.floats(0, 600), st.integers())
def test_waits_grow_twofold_up_to_the_cap_with_chance(
    failures: int, base_s: float, cap_s: float, seed: int
) -> None:
    """Never more than the cap, never less than half of what was computed."""
    policy = RetryPolicy(base_s=base_s, cap_s=cap_s)
    full = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    assert full / 2 <= policy.delay_s(failures, random.Random(seed)) <= full


@pytest.mark.parametrize("total_s", [0.0, 3.0, 60.0])
def test_all_waits_together_stay_within_the_total_time(total_s: float) -> None:
    clock = HastyClock()
    run(Attempts([transient()]), RetryPolicy(attempts=50, base_s=0.7, cap_s=5, total_s=total_s), clock=clock)
    assert sum(clock.slept) <= total_s + 1e-9


def test_a_wait_that_does_not_fit_is_not_begun() -> None:
    """The provider asks for more than there is: the error comes at once, and says how long it would take."""
    throttled = ThrottleError("slow", kind="rate_limit", retry_after=timedelta(seconds=31))
    provider, clock = Attempts([throttled]), HastyClock()
    assert run(provider, RetryPolicy(total_s=30), clock=clock).error is throttled
    assert (provider.calls, clock.slept) == (1, [])


def test_the_providers_own_wait_is_never_undercut() -> None:
    throttled = ThrottleError("slow", kind="rate_limit", retry_after=timedelta(seconds=9))
    clock = HastyClock()
    assert run(Attempts([throttled], GOOD), clock=clock).text == "yes"
    assert clock.slept == [9.0]


def test_a_wait_that_would_pass_a_cancel_scope_is_not_begun() -> None:
    """A deadline of the turn's caller counts as well: the error comes at once."""
    provider = Attempts([transient()])
    patient = RetryPolicy(base_s=60.0, cap_s=60.0, total_s=600.0)

    async def main() -> TurnResult:
        with anyio.fail_after(20):
            return await loop(provider, patient, clock=SystemClock()).run("go")

    assert error_of(anyio.run(main)).attempts == 1


def test_cancelling_in_a_wait_ends_it() -> None:
    clock, provider = FakeClock(), Attempts([transient()])

    async def main() -> bool:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loop(provider, RetryPolicy(), clock=clock).run, "go")
                while not clock.sleepers:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        return scope.cancelled_caught

    assert anyio.run(main)
    assert (provider.calls, provider.closed, clock.sleepers) == (1, 1, 0)


@pytest.mark.parametrize("value", [-1, float("nan"), True, "1"])
@pytest.mark.parametrize("field", ["attempts", "base_s"])
def test_a_policy_takes_numbers_that_make_sense(field: str, value: Any) -> None:
    """Others are refused with the name of the field; a wait may be 0, and there is at least one attempt."""
    with pytest.raises(UsageError, match=f"RetryPolicy.{field}"):
        RetryPolicy(**{field: value})
    with pytest.raises(UsageError, match=r"RetryPolicy\.attempts"):
        RetryPolicy(attempts=0)
    assert RetryPolicy(base_s=0, cap_s=0, total_s=0).attempts == 5


# --- what was seen and what was used -----------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [TextDelta("so"), ReasoningDelta("hm"), ToolCallRequested(ToolCall("1", "x"))], ids=type
)
def test_what_was_seen_is_not_started_over(first: ModelEvent) -> None:
    """Text, thought or a call: it was shown already."""
    provider = Attempts([first, transient()], GOOD)
    result = run(provider)
    assert provider.calls == 1
    assert error_of(result).partial == ("so" if isinstance(first, TextDelta) else "")


def test_failed_attempts_are_counted_in_usage_and_cost() -> None:
    """Each attempt that reported something is in the log, the failed ones as cut off."""
    provider = Attempts(
        [UsageReported(TokenUsage(10, 1), 0.5), transient()],
        [UsageReported(TokenUsage(10, 1), 0.5), UsageReported(TokenUsage(10, 5), 0.75), *GOOD],
    )
    turn = loop(provider, RetryPolicy())
    assert anyio.run(turn.run, "go").text == "yes"
    used = turn.state.session[ProviderUsage].all()
    assert [(each.cost_usd, each.stop_reason) for each in used] == [(0.5, "cut_off"), (0.75, "end")]


def test_a_wait_is_shown_with_its_reason() -> None:
    seen: list[object] = []
    run(failing(2), RetryPolicy(base_s=1.0), watch=seen.append)
    waits = [each.detail for each in seen if isinstance(each, StatusChanged) and each.status == "waiting"]
    assert [detail.split(":")[0] for detail in waits] == ["attempt 1 failed", "attempt 2 failed"]


# --- inside the containment --------------------------------------------------------------------------


def test_each_attempt_is_a_step_and_each_failure_a_retry_of_the_run() -> None:
    context = ExecutionContext(Limits(max_steps=10, max_retries=10, max_cost_usd=1.0))
    assert run(failing(3), PATIENT, containment=context).text == "yes"
    snapshot = context.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used) == (4, 3)
    assert snapshot.cost_usd_accumulated == pytest.approx(0.04)
    assert [node.status for node in snapshot.nodes] == ["error", "error", "error", "ok"]


@given(
    failures=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    steps=st.integers(1, 12),
    retries=st.integers(1, 12),
)
def test_attempts_never_exceed_steps_and_retries(failures: list[int], steps: int, retries: int) -> None:
    """Whatever fails how often: no more attempts than steps, no more further attempts than retries."""
    context = ExecutionContext(Limits(max_steps=steps, max_retries=retries))
    providers = [failing(each) for each in failures]

    async def all_of_them() -> None:
        for each in providers:
            await loop(each, PATIENT, context).run("go")

    anyio.run(all_of_them)
    attempts = sum(each.calls for each in providers)
    begun = sum(each.calls > 0 for each in providers)
    snapshot = context.get_snapshot()
    assert attempts <= steps
    assert attempts - begun <= retries
    assert (snapshot.step_count, snapshot.retries_used <= retries) == (attempts, True)


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
    context = ExecutionContext(Limits(**limits))
    provider, clock = Attempts([transient()]), HastyClock()
    result = run(provider, PATIENT, containment=context, clock=clock)
    error = error_of(result)
    assert (error.kind, error.attempts, error.stop_reason) == ("transient", calls, reason)
    assert (result.error_kind, provider.calls, provider.closed) == (reason, calls, calls)
    assert len(clock.slept) == calls - 1
    assert [each.event_type for each in context.get_snapshot().events] == [reason]


def test_a_wait_that_would_pass_the_runs_deadline_is_not_begun() -> None:
    clock = HastyClock()
    context = ExecutionContext(Limits(timeout=5.0), clock=clock)
    patient = RetryPolicy(base_s=20.0, cap_s=20.0, total_s=600.0)
    provider = Attempts([transient()])
    error = error_of(run(provider, patient, containment=context, clock=clock))
    assert (error.stop_reason, provider.calls, clock.slept) == ("timeout", 1, [])


def test_what_failed_attempts_report_is_booked_once() -> None:
    """0.002 and 0.004 were reported, and the third attempt's 0.008: no more and no less is spent."""
    provider = Attempts(
        [UsageReported(TokenUsage(10, 1), 0.002), transient()],
        [UsageReported(TokenUsage(10, 1), 0.004), transient()],
        [UsageReported(TokenUsage(10, 1), 0.001), UsageReported(TokenUsage(10, 5), 0.008), *GOOD],
    )
    context = ExecutionContext(Limits(max_cost_usd=1.0))
    assert run(provider, PATIENT, containment=context).text == "yes"
    assert context.get_snapshot().cost_usd_accumulated == pytest.approx(0.014)


def test_an_attempt_that_reports_nothing_costs_its_reservation() -> None:
    """The first reported 0.002; the second, of which nothing is known, costs the cent that was reserved."""
    provider = Attempts([UsageReported(TokenUsage(10, 1), 0.002), transient()], [transient()])
    context = ExecutionContext(Limits(max_cost_usd=1.0))
    run(provider, RetryPolicy(attempts=2, base_s=0), containment=context)
    assert context.get_snapshot().cost_usd_accumulated == pytest.approx(0.012)


def test_a_last_failure_that_is_not_retried_takes_a_retry_of_the_run() -> None:
    """Each failure is one: two that were followed by another attempt, and the last."""
    context = ExecutionContext(Limits(max_retries=10))
    run(Attempts([transient()]), RetryPolicy(attempts=3, base_s=0), containment=context)
    assert context.get_snapshot().retries_used == 3

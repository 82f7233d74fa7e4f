"""Trying again: how often, how long, and when not."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import ModelCallError, ThrottleError, UsageError
from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.providers.retrying import Retried, Retrying, RetryPolicy
from treenail.state.budget import TokenUsage
from treenail.testing import FakeClock
from treenail.tools.tool import ToolCall

REQUEST = ModelRequest(())


class HastyClock(FakeClock):
    """Sleeping moves the clock at once."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def async_sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)


class Attempts:
    """A provider that plays a list of events and errors per call."""

    name = "attempts"
    model = "m"

    def __init__(self, *attempts: list[ModelEvent | Exception]) -> None:
        self._attempts = attempts
        self.calls = 0
        self.closed = 0

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.25

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


def play(provider: Retrying) -> tuple[list[ModelEvent], ModelCallError | None]:
    seen: list[ModelEvent] = []

    async def call() -> ModelCallError | None:
        try:
            async with aclosing(provider.stream(REQUEST)) as events:
                async for each in events:
                    seen.append(each)
        except ModelCallError as error:
            return error
        return None

    return seen, anyio.run(call)


def test_it_gives_up_after_the_attempts_it_was_given() -> None:
    provider, clock = Attempts([transient()]), HastyClock()
    seen, error = play(Retrying(provider, RetryPolicy(attempts=4), clock=clock))
    assert (seen, provider.calls, provider.closed, len(clock.slept)) == ([], 4, 4, 3)
    assert error is not None
    assert error.attempts == 4


@given(st.integers(1, 100), st.floats(0, 60), st.floats(0, 600), st.integers())
def test_waits_grow_twofold_up_to_the_cap_with_chance(
    failures: int, base_s: float, cap_s: float, seed: int
) -> None:
    """Never more than the cap, never less than half of what was computed."""
    policy = RetryPolicy(base_s=base_s, cap_s=cap_s)
    full = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    assert full / 2 <= policy.delay_s(failures, random.Random(seed)) <= full


@given(st.floats(0.01, 5), st.floats(0.01, 20), st.floats(0, 60), st.integers())
def test_all_waits_together_stay_within_the_total_time(
    base_s: float, cap_s: float, total_s: float, seed: int
) -> None:
    clock = HastyClock()
    policy = RetryPolicy(attempts=50, base_s=base_s, cap_s=cap_s, total_s=total_s)
    play(Retrying(Attempts([transient()]), policy, clock=clock, rng=random.Random(seed)))
    assert sum(clock.slept) <= total_s + 1e-9


def test_a_wait_that_does_not_fit_is_not_begun() -> None:
    """The provider asks for more than there is: the error comes at once, and says how long it would take."""
    throttled = ThrottleError("slow", kind="rate_limit", retry_after=timedelta(seconds=31))
    provider, clock = Attempts([throttled]), HastyClock()
    _, error = play(Retrying(provider, RetryPolicy(total_s=30), clock=clock))
    assert error is throttled
    assert (provider.calls, clock.slept) == (1, [])


def test_the_providers_own_wait_is_never_undercut() -> None:
    throttled = ThrottleError("slow", kind="rate_limit", retry_after=timedelta(seconds=9))
    clock = HastyClock()
    seen, error = play(Retrying(Attempts([throttled], [Stopped("end")]), clock=clock))
    assert (seen, error, clock.slept) == ([Stopped("end")], None, [9.0])


@pytest.mark.parametrize(
    "first", [TextDelta("so"), ReasoningDelta("hm"), ToolCallRequested(ToolCall("1", "x"))], ids=type
)
def test_what_was_seen_is_not_started_over(first: ModelEvent) -> None:
    """Text, thought or a call: whoever listened has seen it."""
    provider = Attempts([first, transient()], [Stopped("end")])
    seen, error = play(Retrying(provider, clock=HastyClock()))
    assert (seen, provider.calls) == ([first], 1)
    assert error is not None
    assert error.partial == ("so" if isinstance(first, TextDelta) else "")


def test_failed_attempts_are_counted_in_usage_and_cost() -> None:
    """What was spent was spent, also by an attempt that failed."""
    provider = Attempts(
        [UsageReported(TokenUsage(10, 1), 0.5, 2), transient()],
        [UsageReported(TokenUsage(10, 1), 0.5, 2), UsageReported(TokenUsage(10, 5), 0.75, 3), Stopped("end")],
    )
    seen, error = play(Retrying(provider, clock=HastyClock()))
    assert error is None
    assert seen[-2] == UsageReported(TokenUsage(20, 6), 1.25, 5)


def test_an_unknown_cost_stays_unknown_in_sum() -> None:
    provider = Attempts(
        [UsageReported(TokenUsage(10, 1), None), transient()],
        [UsageReported(TokenUsage(10, 1), 0.5), Stopped("end")],
    )
    seen, _ = play(Retrying(provider, clock=HastyClock()))
    assert seen[-2] == UsageReported(TokenUsage(20, 2), None)


def test_whoever_asked_hears_of_each_attempt_that_is_repeated() -> None:
    heard: list[Retried] = []
    clock = HastyClock()
    provider = Attempts([transient()], [transient()], [Stopped("end")])
    play(Retrying(provider, clock=clock, on_retry=heard.append))
    assert [each.attempt for each in heard] == [1, 2]
    assert [each.delay_s for each in heard] == clock.slept


def test_it_is_the_provider_within_by_name_model_and_price() -> None:
    provider = Retrying(Attempts())
    assert (provider.name, provider.model, provider.estimate_usd(REQUEST)) == ("attempts", "m", 0.25)


def test_cancelling_in_a_pause_ends_it() -> None:
    """A pause is no place where a deadline does not reach."""
    clock = FakeClock()
    provider = Attempts([transient()])

    async def main() -> bool:
        retrying = Retrying(provider, clock=clock)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def listen() -> None:
                    async with aclosing(retrying.stream(REQUEST)) as events:
                        async for _ in events:
                            pass

                tasks.start_soon(listen)
                while not clock.sleepers:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        return scope.cancelled_caught

    assert anyio.run(main)
    assert (provider.calls, provider.closed, clock.sleepers) == (1, 1, 0)


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"base_s": -1}, {"cap_s": float("inf")}, {"total_s": float("nan")}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]  # what is wrong is the point

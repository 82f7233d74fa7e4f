"""A run that spends unusually fast is reported while there is still time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treenail.containment import CallUsage, Decision, ExecutionConfig, ExecutionContext, WrapOptions
from treenail.containment.rates import RatePolicy
from treenail.errors import UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]


def warnings(ctx: ExecutionContext) -> list[str]:
    return [event.event_type for event in ctx.get_snapshot().events if event.hook == "RateWatch"]


def test_fast_spending_is_told_of_once_until_it_slows_down(config: Config, clock: FakeClock) -> None:
    """More than a dollar a minute warns once; when the rate has fallen and risen again, it warns again."""
    ctx = ExecutionContext(config(), clock=clock, rates=RatePolicy(max_usd_per_minute=1.0))
    half = WrapOptions(cost_estimate_hint=0.5)
    for _ in range(2):
        ctx.wrap_llm_call(lambda: None, half)
    assert warnings(ctx) == []
    for _ in range(3):
        assert ctx.wrap_llm_call(lambda: None, half) is Decision.ALLOW
    assert warnings(ctx) == ["cost_rate"]
    clock.advance(60)
    ctx.wrap_llm_call(lambda: None, half)
    assert warnings(ctx) == ["cost_rate"]
    for _ in range(2):
        ctx.wrap_llm_call(lambda: None, half)
    assert warnings(ctx) == ["cost_rate", "cost_rate"]


def test_fast_tokens_are_told_of_children_included(config: Config, clock: FakeClock) -> None:
    """Tokens of children count towards the rate of the chain that set the policy."""
    policy = RatePolicy(max_tokens_per_minute=1000, window_seconds=30)
    ctx = ExecutionContext(config(), clock=clock, rates=policy)
    child = ctx.spawn_child()
    ctx.wrap_llm_call(lambda: CallUsage(100, 200))
    assert (warnings(ctx), warnings(child)) == ([], [])
    child.wrap_llm_call(lambda: CallUsage(100, 101))
    (event,) = child.get_snapshot().events
    assert (event.event_type, event.decision) == ("token_velocity", Decision.ALLOW)
    assert event.reason == "1002 tokens a minute; 1000 are expected"


def test_a_policy_must_watch_something() -> None:
    """A policy without a rate is a mistake."""
    with pytest.raises(UsageError, match="max_usd_per_minute or max_tokens_per_minute"):
        RatePolicy()

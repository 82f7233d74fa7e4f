"""Ceilings take positive finite numbers of the right type, and count money exactly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    BudgetWindowHook,
    CallUsage,
    CircuitBreaker,
    ExecutionConfig,
    Limits,
    LoopPolicy,
    WrapOptions,
)
from treenail.containment.limits import to_pico, to_usd
from treenail.errors import UsageError

GOOD = {"max_cost_usd": 1.0, "max_steps": 10, "max_retries_total": 3, "timeout_ms": 1000}
NEVER = [-1, -0.5, math.nan, math.inf, -math.inf, True, False, "5", [1], b"1"]


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize("bad", NEVER, ids=repr)
def test_a_bad_ceiling_is_refused_by_name(field: str, bad: object) -> None:
    """Negative, NaN, infinite, boolean and string values are refused, and the message names the field."""
    with pytest.raises(UsageError, match=f"ExecutionConfig.{field}"):
        ExecutionConfig(**{**GOOD, field: bad})  # type: ignore[arg-type]  # what is wrong is the point


@pytest.mark.parametrize("field", ["max_cost_usd", "max_steps", "max_retries_total"])
def test_zero_is_no_ceiling(field: str) -> None:
    """Zero is refused: a chain that may do nothing is a mistake, and no ceiling is written None."""
    with pytest.raises(UsageError, match=f"{field} must be finite and greater than zero"):
        ExecutionConfig(**{**GOOD, field: 0})  # type: ignore[arg-type]  # what is wrong is the point
    assert getattr(ExecutionConfig(**{**GOOD, field: None}), field) is None  # type: ignore[arg-type]  # the names come from the test's data


def test_a_timeout_of_zero_means_none() -> None:
    """`timeout_ms=0` is the one zero that is meant."""
    assert ExecutionConfig(**{**GOOD, "timeout_ms": 0}).timeout_ms == 0  # type: ignore[arg-type]  # the names come from the test's data


@pytest.mark.parametrize("field", ["max_steps", "max_retries_total", "timeout_ms"])
def test_counts_are_whole_numbers(field: str) -> None:
    """A float is refused where a count is meant, even if it is whole."""
    with pytest.raises(UsageError, match=f"{field} must be a whole number"):
        ExecutionConfig(**{**GOOD, field: 2.0})  # type: ignore[arg-type]  # what is wrong is the point


@pytest.mark.parametrize("field", ["max_cost_usd", "max_steps", "max_retries", "timeout"])
@pytest.mark.parametrize("bad", [*NEVER, 0], ids=repr)
def test_the_short_form_refuses_the_same(field: str, bad: object) -> None:
    """`Limits` names its own field, not the one that it becomes."""
    with pytest.raises(UsageError, match=f"Limits.{field} "):
        Limits(**{field: bad})  # type: ignore[arg-type]  # what is wrong is the point


def test_the_short_form_becomes_the_long_one() -> None:
    """What is left out has no ceiling, and seconds become milliseconds."""
    assert Limits(max_cost_usd=0.5, max_retries=2, timeout=1.5).to_config() == ExecutionConfig(
        max_cost_usd=0.5, max_steps=None, max_retries_total=2, timeout_ms=1500
    )
    assert Limits().to_config() == ExecutionConfig(None, None, None, 0)


def test_a_timeout_too_short_for_a_millisecond_is_still_one() -> None:
    """Rounding never lifts a ceiling."""
    assert Limits(timeout=0.0001).to_config().timeout_ms == 1


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: WrapOptions(cost_estimate_hint=-0.1), "WrapOptions.cost_estimate_hint"),
        (lambda: WrapOptions(cost_estimate_hint=math.nan), "WrapOptions.cost_estimate_hint"),
        (lambda: WrapOptions(timeout_ms=0), "WrapOptions.timeout_ms"),
        (lambda: WrapOptions(timeout_ms=True), "WrapOptions.timeout_ms"),
        (lambda: WrapOptions(retry_policy_override=-1), "WrapOptions.retry_policy_override"),
        (lambda: WrapOptions(max_output_tokens=0), "WrapOptions.max_output_tokens"),
        (lambda: BudgetWindowHook(0), "BudgetWindowHook.max_calls"),
        (lambda: BudgetWindowHook(1, math.inf), "BudgetWindowHook.window_seconds"),
        (lambda: BudgetWindowHook(1, degrade_threshold=1.5), "BudgetWindowHook.degrade_threshold"),
        (lambda: CircuitBreaker(failure_threshold=0), "CircuitBreaker.failure_threshold"),
        (lambda: CircuitBreaker(recovery_timeout=-1), "CircuitBreaker.recovery_timeout"),
        (lambda: LoopPolicy(tool_repeats=1), "LoopPolicy.tool_repeats"),
        (lambda: CallUsage(input_tokens=-1), "CallUsage.input_tokens"),
        (lambda: ExecutionConfig(1.0, 1, 1, 0, on_unknown_price="ask"), "on_unknown_price"),  # type: ignore[arg-type]  # what is wrong is the point
    ],
)
def test_every_setting_is_checked_by_name(make: object, field: str) -> None:
    """Options, hooks, breakers and policies refuse bad settings as the ceilings do."""
    with pytest.raises(UsageError, match=field):
        make()  # type: ignore[operator]  # each case makes something


@given(st.lists(st.integers(0, 10_000_000), max_size=50))
def test_adding_prices_is_exact(micro_usd: list[int]) -> None:
    """The sum of many prices is the price of them all: no binary fraction is lost on the way."""
    assert sum(to_pico(amount / 1_000_000) for amount in micro_usd) == to_pico(sum(micro_usd) / 1_000_000)


@given(st.floats(0, 1e6, allow_nan=False))
def test_money_survives_the_way_in_and_out(usd: float) -> None:
    """What was stored is what is read, to a millionth of a millionth."""
    assert abs(to_usd(to_pico(usd)) - usd) <= 1e-12 + usd * 1e-15

"""Budgets: ceilings are exact, spend is never lost and never refunded."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.clock import FixedClock
from treenail.codec import codec
from treenail.errors import BudgetExceededError, DeadlineExceededError, UsageError
from treenail.log import SlicePolicy
from treenail.state import (
    Budget,
    BudgetRemaining,
    BudgetSnapshot,
    BudgetTracker,
    Deadline,
    ResourceRegistry,
    Snapshotable,
    TokenUsage,
)
from treenail.state.budget import BudgetEntry

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)

counts = st.none() | st.integers(0, 10**9)
usages = st.builds(TokenUsage, counts, counts, counts, counts)
costs = st.none() | st.floats(0, 1e6)
reports = st.lists(st.tuples(st.sampled_from("abcd"), usages, costs), max_size=12)


def at(moment: datetime) -> FixedClock:
    return FixedClock(moment)


def tracker_after(made: list[tuple[str, TokenUsage, float | None]]) -> BudgetTracker:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    for evaluation_id, usage, cost_usd in made:
        tracker.record_cumulative(evaluation_id, usage, cost_usd)
    return tracker


# --- usage ---------------------------------------------------------------------------------------------


def test_the_total_is_input_and_output_only() -> None:
    """Cached tokens are part of the input, reasoning tokens of the output."""
    usage = TokenUsage(input_tokens=100, output_tokens=20, cached_tokens=80, reasoning_tokens=15)
    assert usage.total == usage.total_tokens == 120
    assert TokenUsage(input_tokens=7).total == 7
    assert TokenUsage(cached_tokens=5).total is None


@given(usages, usages, usages)
def test_usage_adds_up(a: TokenUsage, b: TokenUsage, c: TokenUsage) -> None:
    """Addition is associative and commutative, and nothing is its zero."""
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + TokenUsage() == a
    assert ((a + b).total or 0) == (a.total or 0) + (b.total or 0)


@pytest.mark.parametrize("value", [-1, True, 1.5, "7"])
def test_a_count_that_is_none_is_refused_with_its_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"TokenUsage\.cached_tokens"):
        TokenUsage(cached_tokens=value)  # type: ignore[arg-type]  # what is wrong is the point


# --- deadlines -----------------------------------------------------------------------------------------


def test_a_deadline_counts_down_to_below_zero() -> None:
    started = Deadline(NOON, NOON - 10 * SECOND, at(NOON - 4 * SECOND))
    assert started.at == started.expires_at == NOON
    assert started.remaining() == 4 * SECOND
    assert started.elapsed() == 6 * SECOND
    assert not started.passed()
    late = Deadline(NOON, clock=at(NOON + 3 * SECOND))
    assert late.remaining() == -3 * SECOND
    assert late.elapsed() == timedelta(0)
    assert late.passed()


def test_the_moment_itself_is_past_the_deadline() -> None:
    assert Deadline(NOON, clock=at(NOON)).passed()
    assert not Deadline(NOON, clock=at(NOON - timedelta(microseconds=1))).passed()


def test_raise_if_passed_names_the_work_and_the_delay() -> None:
    Deadline(NOON, clock=at(NOON - SECOND)).raise_if_passed("rename")
    with pytest.raises(DeadlineExceededError, match=r"rename: .*passed 90 s ago"):
        Deadline(NOON, clock=at(NOON + 90 * SECOND)).raise_if_passed("rename")


def test_create_demands_a_second() -> None:
    assert Deadline.create(NOON + SECOND, clock=at(NOON)).remaining() == SECOND
    with pytest.raises(UsageError, match=r"at least 1 s ahead.*0\.5 s from now"):
        Deadline.create(NOON + SECOND / 2, clock=at(NOON))
    with pytest.raises(UsageError, match="at least 1 s ahead"):
        Deadline.create(NOON - SECOND, clock=at(NOON))


@pytest.mark.parametrize(
    "make",
    [Deadline, Deadline.create, lambda naive: Deadline(NOON, naive)],
    ids=["constructor", "create", "started_at"],
)
def test_a_time_without_a_timezone_is_refused(make: Callable[[datetime], Deadline]) -> None:
    with pytest.raises(UsageError, match="needs a timezone"):
        make(datetime(2026, 5, 1, 12))


def test_deriving_from_a_deadline_that_is_almost_over_does_not_raise() -> None:
    """The earlier of two deadlines is found by `at`, whatever their timezones."""
    parent = Deadline(NOON + SECOND / 10, clock=at(NOON))
    limit = Deadline.after(30 * SECOND, clock=at(NOON.astimezone(timezone(timedelta(hours=5)))))
    assert limit.started_at == NOON
    assert limit.remaining() == 30 * SECOND
    assert min(parent, limit, key=lambda deadline: deadline.at) is parent


def test_two_deadlines_for_the_same_time_are_equal_whatever_clock_they_read() -> None:
    assert Deadline(NOON, NOON, at(NOON)) == Deadline(NOON, NOON)


# --- budgets -------------------------------------------------------------------------------------------


def test_a_budget_without_any_ceiling_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one ceiling"):
        Budget()


@pytest.mark.parametrize("name", ["max_total_tokens", "max_input_tokens", "max_output_tokens"])
@pytest.mark.parametrize("value", [0, -5, True, 1.5, math.nan, "10"])
def test_a_token_ceiling_must_be_a_positive_whole_number(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"Budget\.{name}"):
        Budget(**{name: value})  # type: ignore[arg-type]  # what is wrong is the point


@pytest.mark.parametrize("value", [0, -0.1, True, math.nan, math.inf, "1"])
def test_a_cost_ceiling_must_be_a_positive_finite_number(value: object) -> None:
    with pytest.raises(UsageError, match=r"Budget\.max_cost_usd"):
        Budget(max_cost_usd=value)  # type: ignore[arg-type]  # what is wrong is the point


# --- the tracker ---------------------------------------------------------------------------------------


def test_a_report_replaces_the_earlier_one_of_the_same_evaluation() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    tracker.record_cumulative("a", TokenUsage(10, 1), 0.25)
    tracker.record_cumulative("b", TokenUsage(5, 5))
    tracker.record_cumulative("a", TokenUsage(30, 3), 0.5)
    assert tracker.consumed == TokenUsage(35, 8)
    assert tracker.consumed_cost_usd == 0.5


def test_an_unknown_cost_does_not_forget_a_known_one() -> None:
    tracker = BudgetTracker(Budget(max_cost_usd=1))
    tracker.record_cumulative("a", TokenUsage(10, 1), 0.25)
    tracker.record_cumulative("a", TokenUsage(20, 2))
    assert tracker.consumed_cost_usd == 0.25


@pytest.mark.parametrize("cost", [-0.01, math.nan, math.inf, True])
def test_a_cost_that_is_none_is_refused_and_nothing_is_recorded(cost: float) -> None:
    tracker = BudgetTracker(Budget(max_cost_usd=1))
    with pytest.raises(UsageError, match="cost_usd"):
        tracker.record_cumulative("a", TokenUsage(1, 1), cost)
    assert tracker.snapshot() == BudgetSnapshot()


@pytest.mark.parametrize(
    ("budget", "dimension"),
    [
        (Budget(max_input_tokens=9), "input"),
        (Budget(max_output_tokens=4), "output"),
        (Budget(max_total_tokens=14), "total"),
        (Budget(max_cost_usd=0.49), "cost"),
        (Budget(deadline=Deadline(NOON, clock=at(NOON))), "deadline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_than_a_ceiling_is_an_error_that_says_which(budget: Budget, dimension: str) -> None:
    tracker = BudgetTracker(budget)
    tracker.record_cumulative("a", TokenUsage(10, 5), 0.5)
    with pytest.raises(BudgetExceededError) as caught:
        tracker.check()
    assert caught.value.exceeded_dimension == dimension
    assert caught.value.budget is budget
    assert caught.value.consumed == TokenUsage(10, 5)


def test_exactly_a_ceiling_is_allowed() -> None:
    tracker = BudgetTracker(
        Budget(
            deadline=Deadline(NOON, clock=at(NOON - SECOND)),
            max_total_tokens=15,
            max_input_tokens=10,
            max_output_tokens=5,
            max_cost_usd=0.5,
        )
    )
    tracker.record_cumulative("a", TokenUsage(10, 5), 0.5)
    tracker.check()
    assert tracker.remaining() == BudgetRemaining(SECOND, 0, 0, 0, 0.0)


def test_dimes_do_not_add_up_to_more_than_themselves() -> None:
    """Three times 0.1 is 0.30000000000000004 in floats, and not more than 0.3 to a person."""
    tracker = BudgetTracker(Budget(max_cost_usd=0.3))
    for evaluation_id in "abc":
        tracker.record_cumulative(evaluation_id, TokenUsage(), 0.1)
    tracker.check()
    tracker.record_cumulative("d", TokenUsage(), 0.000001)
    with pytest.raises(BudgetExceededError, match=r"USD of 0\.3"):
        tracker.check()


def test_the_order_of_dimensions_is_deadline_input_output_total_cost() -> None:
    """When several are passed, the first in that order is named."""
    ceilings: list[tuple[str, dict[str, object]]] = [
        ("deadline", {"deadline": Deadline(NOON, clock=at(NOON))}),
        ("input", {"max_input_tokens": 1}),
        ("output", {"max_output_tokens": 1}),
        ("total", {"max_total_tokens": 1}),
        ("cost", {"max_cost_usd": 0.01}),
    ]
    while ceilings:
        budget = Budget(**{name: value for _, each in ceilings for name, value in each.items()})  # type: ignore[arg-type]  # the names come from the test's data
        tracker = BudgetTracker(budget)
        tracker.record_cumulative("a", TokenUsage(2, 2), 1.0)
        with pytest.raises(BudgetExceededError) as caught:
            tracker.check()
        assert caught.value.exceeded_dimension == ceilings.pop(0)[0]


def test_what_is_left_goes_below_zero_and_is_none_without_a_ceiling() -> None:
    tracker = BudgetTracker(Budget(max_input_tokens=8, max_cost_usd=1.0))
    assert tracker.remaining() == BudgetRemaining(input_tokens=8, cost_usd=1.0)
    tracker.record_cumulative("a", TokenUsage(10, 5), 0.25)
    assert tracker.remaining() == BudgetRemaining(input_tokens=-2, cost_usd=0.75)


def test_threads_lose_nothing() -> None:
    """64 threads, each with reports about an evaluation of its own and about shared ones."""
    threads, rounds = 64, 50
    barrier = threading.Barrier(threads)
    tracker = BudgetTracker(Budget(max_total_tokens=1))

    def spend(number: int) -> None:
        barrier.wait()
        for step in range(1, rounds + 1):
            tracker.record_cumulative(f"own-{number}", TokenUsage(step, 2 * step), step / 4)
            tracker.record_cumulative(f"step-{number}-{step}", TokenUsage(1, 0), 0.5)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(spend, range(threads)))
    assert tracker.consumed == TokenUsage(threads * (rounds + rounds), threads * 2 * rounds)
    assert tracker.consumed_cost_usd == threads * (rounds / 4 + rounds * 0.5)


# --- snapshots: a restart knows, a rollback does not refund --------------------------------------------


def test_a_tracker_is_a_resource_that_a_rollback_does_not_refund() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    registry = ResourceRegistry.build({BudgetTracker: tracker})
    assert isinstance(tracker, Snapshotable)
    assert registry.snapshotable_resources() == {BudgetTracker: tracker}
    assert registry.policy_of(BudgetTracker) is SlicePolicy.LOG
    before = tracker.snapshot(tag="pre:call")
    tracker.record_cumulative("a", TokenUsage(100, 50), 0.1)
    tracker.restore(before)
    assert tracker.consumed == TokenUsage(100, 50)


@given(reports)
def test_a_restarted_process_knows_what_was_spent(
    made: list[tuple[str, TokenUsage, float | None]],
) -> None:
    """A snapshot survives JSON, and a fresh tracker that restores it equals the old one."""
    old = tracker_after(made)
    stored = codec.decode(BudgetSnapshot, codec.encode(old.snapshot()))
    assert stored == old.snapshot()
    fresh = BudgetTracker(old.budget)
    fresh.restore(stored)
    assert fresh.snapshot() == old.snapshot()
    assert fresh.consumed == old.consumed
    assert fresh.consumed_cost_usd == old.consumed_cost_usd
    assert dict(stored.usage) == {entry.evaluation_id: entry.usage for entry in stored.entries}


@pytest.mark.parametrize(
    "damaged", ['{"input_tokens": -5}', '{"input_tokens": 5}, "cost_usd": -1.0'], ids=["tokens", "cost"]
)
def test_a_stored_figure_below_nothing_is_refused_and_changes_nothing(damaged: str) -> None:
    """It would be a refund."""
    raw = (
        f'{{"entries": [{{"evaluation_id": "a", "usage": {{"input_tokens": 9}}}},'
        f' {{"evaluation_id": "b", "usage": {damaged}}}]}}'
    )
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    with pytest.raises(UsageError):
        tracker.restore(codec.decode(BudgetSnapshot, raw))
    assert tracker.snapshot() == BudgetSnapshot()


def joined(*snapshots: BudgetSnapshot) -> dict[str, BudgetEntry]:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    for snapshot in snapshots:
        tracker.restore(snapshot)
    return {entry.evaluation_id: entry for entry in tracker.snapshot().entries}


@given(reports, reports, reports)
def test_restoring_is_a_join(
    a: list[tuple[str, TokenUsage, float | None]],
    b: list[tuple[str, TokenUsage, float | None]],
    c: list[tuple[str, TokenUsage, float | None]],
) -> None:
    """However often and in whichever order snapshots arrive, the outcome is the same."""
    x, y, z = (tracker_after(made).snapshot() for made in (a, b, c))
    assert joined(x, y, z) == joined(z, x, y, y, x)


@given(reports, reports)
def test_restoring_never_lowers_any_figure(
    a: list[tuple[str, TokenUsage, float | None]], b: list[tuple[str, TokenUsage, float | None]]
) -> None:
    tracker = tracker_after(a)
    before, before_cost = tracker.consumed, tracker.consumed_cost_usd
    tracker.restore(tracker_after(b).snapshot())
    after = tracker.consumed
    assert (after.input_tokens or 0) >= (before.input_tokens or 0)
    assert (after.output_tokens or 0) >= (before.output_tokens or 0)
    assert (after.cached_tokens or 0) >= (before.cached_tokens or 0)
    assert (after.reasoning_tokens or 0) >= (before.reasoning_tokens or 0)
    assert tracker.consumed_cost_usd >= before_cost

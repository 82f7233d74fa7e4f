"""The ceilings hold whatever the calls do and however many make them at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    Reserved,
    WrapOptions,
    current_call,
)

MANY = 64
Config = Callable[..., ExecutionConfig]
AtOnce = Callable[[int, Callable[[int], Any]], list[Any]]


class Flaky(Exception):
    """What the calls in these tests fail with."""


def fail() -> None:
    raise Flaky("no luck")


# --- exactly N, in threads and in tasks -----------------------------------------------------------------


def test_sixty_four_threads_share_exactly_n_steps(config: Config, at_once: AtOnce) -> None:
    """Of 64 threads against a limit of 10 steps, exactly 10 are let through."""
    ctx = ExecutionContext(config(max_steps=10))
    made: list[int] = []
    decisions = at_once(MANY, lambda n: ctx.wrap_tool_call(lambda: made.append(n)))
    assert Counter(decisions) == {Decision.ALLOW: 10, Decision.HALT: MANY - 10}
    assert len(made) == ctx.get_snapshot().step_count == 10


def test_sixty_four_threads_share_exactly_n_dollars(config: Config, at_once: AtOnce) -> None:
    """Of 64 threads that each need ten cents of 0.70 USD, exactly 7 are let through."""
    ctx = ExecutionContext(config(max_cost_usd=0.70))
    made: list[int] = []
    options = WrapOptions(cost_estimate_hint=0.10)
    decisions = at_once(MANY, lambda n: ctx.wrap_llm_call(lambda: made.append(n), options))
    assert Counter(decisions) == {Decision.ALLOW: 7, Decision.HALT: MANY - 7}
    assert len(made) == 7
    assert ctx.get_snapshot().cost_usd_accumulated == 0.70


def test_sixty_four_threads_share_exactly_n_retries(config: Config, at_once: AtOnce) -> None:
    """All 64 calls fail at the same time; exactly 5 of them get one of the 5 retries."""
    ctx = ExecutionContext(config(max_retries_total=5))
    barrier = threading.Barrier(MANY)

    def fail_together() -> None:
        barrier.wait(30)
        raise Flaky

    decisions = at_once(MANY, lambda _: ctx.wrap_llm_call(fail_together))
    assert Counter(decisions) == {Decision.RETRY: 5, Decision.HALT: MANY - 5}
    assert ctx.get_snapshot().retries_used == 5


def test_sixty_four_threads_make_exactly_n_second_attempts(config: Config, at_once: AtOnce) -> None:
    """When the containment itself retries, the threads together make exactly 5 second attempts."""
    ctx = ExecutionContext(config(max_retries_total=5))
    barrier = threading.Barrier(MANY)
    second: list[int] = []

    def work(number: int) -> Decision:
        def attempt() -> None:
            if current_call().attempt == 1:  # type: ignore[union-attr]  # inside a call there is one
                barrier.wait(30)
                raise Flaky
            second.append(number)

        return ctx.wrap_llm_call(attempt, WrapOptions(retry_policy_override=1))

    decisions = at_once(MANY, work)
    assert Counter(decisions) == {Decision.ALLOW: 5, Decision.HALT: MANY - 5}
    assert len(second) == ctx.get_snapshot().retries_used == 5


@pytest.mark.parametrize(
    ("limits", "options", "through"),
    [
        ({"max_steps": 10}, WrapOptions(), 10),
        ({"max_cost_usd": 0.70}, WrapOptions(cost_estimate_hint=0.10), 7),
    ],
    ids=["steps", "money"],
)
async def test_sixty_four_tasks_share_exactly_n(
    config: Config, limits: dict[str, Any], options: WrapOptions, through: int
) -> None:
    """The same holds for 64 tasks that are all under way together."""
    ctx = ExecutionContext(config(**limits))
    made: list[int] = []
    decisions: list[Decision] = []
    gate = anyio.Event()

    async def one(number: int) -> None:
        async def call() -> None:
            made.append(number)
            await gate.wait()

        decisions.append((await ctx.acall_llm(call, options)).decision)

    async with anyio.create_task_group() as tasks:
        for number in range(MANY):
            tasks.start_soon(one, number)
        await anyio.wait_all_tasks_blocked()
        assert len(made) == through
        gate.set()
    assert Counter(decisions) == {Decision.ALLOW: through, Decision.HALT: MANY - through}


async def test_sixty_four_tasks_share_exactly_n_retries(config: Config) -> None:
    """Of 64 tasks that fail together, exactly 5 get a retry."""
    ctx = ExecutionContext(config(max_retries_total=5))
    gate = anyio.Event()
    decisions: list[Decision] = []

    async def call() -> None:
        await gate.wait()
        raise Flaky

    async def one() -> None:
        decisions.append((await ctx.acall_llm(call)).decision)

    async with anyio.create_task_group() as tasks:
        for _ in range(MANY):
            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert Counter(decisions) == {Decision.RETRY: 5, Decision.HALT: MANY - 5}
    assert ctx.get_snapshot().retries_used == 5


class Overtaken:
    """A lock whose first holder, on letting it go, is overtaken: another caller runs from start to end."""

    def __init__(self, overtake: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._overtake: Callable[[], None] | None = overtake

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        overtake, self._overtake = self._overtake, None
        if overtake is not None:
            overtake()


@pytest.mark.parametrize(
    ("limits", "options"),
    [({"max_steps": 1}, WrapOptions()), ({"max_cost_usd": 1.0}, WrapOptions(cost_estimate_hint=1.0))],
    ids=["steps", "money"],
)
def test_checking_and_booking_are_one_step(
    config: Config, limits: dict[str, Any], options: WrapOptions
) -> None:
    """A caller that is overtaken as soon as it lets the ledger go has already booked what it asked for.

    If the check and the booking were separate steps, the second caller would come between them here, find the
    last place free as well, and both would be let through.
    """
    ctx = ExecutionContext(config(**limits))
    decisions: list[Decision] = []

    def call() -> None:
        decisions.append(ctx.wrap_tool_call(lambda: None, options))

    def overtake() -> None:
        second = threading.Thread(target=call)
        second.start()
        second.join(60)

    ctx._ledger.lock = Overtaken(overtake)  # type: ignore[assignment]  # a lock that is overtaken
    call()
    assert decisions == [Decision.HALT, Decision.ALLOW], "the second ends first, and must be refused"


# --- the ceilings as laws -------------------------------------------------------------------------------


class Bill:
    """A response that says what it cost."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


def cost_of(bill: object) -> float:
    assert isinstance(bill, Bill)
    return bill.cents / 100


calls = st.tuples(
    st.sampled_from(["ok", "fail", "report and fail"]),
    st.integers(0, 40),  # reserved, in cents
    st.integers(0, 60),  # real, in cents
)


@given(
    attempts=st.lists(calls, max_size=40),
    max_cents=st.integers(1, 300),
    max_steps=st.integers(1, 30),
    max_retries=st.integers(1, 10),
)
def test_no_sequence_of_calls_gets_past_a_ceiling(
    attempts: list[tuple[str, int, int]], max_cents: int, max_steps: int, max_retries: int
) -> None:
    """A call is dispatched if and only if an exact model of the ceilings allows it; it costs what it cost."""
    ctx = ExecutionContext(
        ExecutionConfig(
            max_cost_usd=max_cents / 100, max_steps=max_steps, max_retries_total=max_retries, timeout_ms=0
        )
    )
    spent = steps = retries = 0
    for fate, reserved, real in attempts:
        dispatched: list[bool] = []

        def call(fate: str = fate, real: int = real, dispatched: list[bool] = dispatched) -> Bill:
            dispatched.append(True)
            if fate == "report and fail":
                current_call().report(cost_usd=real / 100)  # type: ignore[union-attr]  # inside a call there is one
            if fate != "ok":
                raise Flaky
            return Bill(real)

        options = WrapOptions(cost_estimate_hint=reserved / 100, cost_of=cost_of)
        decision = ctx.wrap_llm_call(call, options)
        fits = spent < max_cents and spent + reserved <= max_cents
        allowed = fits and steps < max_steps and retries < max_retries
        assert bool(dispatched) == allowed
        if not allowed:
            assert decision is Decision.HALT
            continue
        steps += 1
        spent += reserved if fate == "fail" else real
        if fate == "ok":
            assert decision is Decision.ALLOW
        else:
            retries += 1
            assert decision is Decision.RETRY
    snapshot = ctx.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used) == (steps, retries)
    assert snapshot.cost_usd_accumulated == pytest.approx(spent / 100, abs=1e-9)
    assert snapshot.cost_usd_reserved == 0


def test_a_reservation_counts_while_its_call_is_under_way(config: Config) -> None:
    """Money that a running call may spend is not there for others, even if it turns out not to be spent."""
    ctx = ExecutionContext(config(max_cost_usd=1.0))
    inner: list[Decision] = []

    def dear() -> float:
        inner.append(ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.3)))
        return 0.1

    options = WrapOptions(cost_estimate_hint=0.8, cost_of=lambda cost: cost)  # type: ignore[arg-type,return-value]  # the result is the cost
    assert ctx.wrap_llm_call(dear, options) is Decision.ALLOW
    assert inner == [Decision.HALT]
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.3)) is Decision.ALLOW


def test_a_call_that_costs_more_than_reserved_is_charged_in_full(config: Config) -> None:
    """Real cost is a fact: it may exceed the ceiling once, and then nothing more is dispatched."""
    ctx = ExecutionContext(config(max_cost_usd=1.0))
    options = WrapOptions(cost_estimate_hint=0.1, cost_of=lambda _: 2.5)
    assert ctx.call_llm(lambda: "dear", options).node.cost_usd == 2.5
    assert ctx.get_snapshot().cost_usd_accumulated == 2.5
    assert ctx.wrap_tool_call(lambda: None) is Decision.HALT


def test_a_failed_call_is_not_refunded(config: Config) -> None:
    """A call that failed without saying what it cost is charged what was reserved."""
    ctx = ExecutionContext(config())
    ctx.wrap_llm_call(fail, WrapOptions(cost_estimate_hint=0.4))
    assert ctx.get_snapshot().cost_usd_accumulated == 0.4


def test_reported_costs_add_up_and_win(config: Config) -> None:
    """What the called function reports is charged, also if it then fails."""
    ctx = ExecutionContext(config())

    def call() -> None:
        current_call().report(cost_usd=0.25)  # type: ignore[union-attr]  # inside a call there is one
        current_call().report(cost_usd=0.50)  # type: ignore[union-attr]  # inside a call there is one
        raise Flaky

    assert ctx.call_llm(call, WrapOptions(cost_estimate_hint=9.0)).node.cost_usd == 0.75


@pytest.mark.parametrize("bad", [float("nan"), -1.0, "3", None])
def test_a_cost_that_cannot_be_read_is_the_reservation(config: Config, bad: Any) -> None:
    """A nonsensical answer of `cost_of` is recorded, and the reservation is charged in its place."""
    ctx = ExecutionContext(config())
    ctx.wrap_llm_call(lambda: "x", WrapOptions(cost_estimate_hint=0.2, cost_of=lambda _: bad))
    snapshot = ctx.get_snapshot()
    assert snapshot.cost_usd_accumulated == 0.2
    assert [event.event_type for event in snapshot.events] == ["cost_unknown"]


def test_reconciliation_hears_both_amounts(config: Config) -> None:
    """The callback gets what was reserved and what was spent; an error in it changes nothing."""
    heard: list[tuple[float, float]] = []

    def listen(reserved: float, real: float) -> None:
        heard.append((reserved, real))
        raise Flaky

    ctx = ExecutionContext(config())
    options = WrapOptions(cost_estimate_hint=0.2, cost_of=lambda _: 0.3, reconciliation_callback=listen)
    assert ctx.wrap_llm_call(lambda: "x", options) is Decision.ALLOW
    assert heard == [(0.2, 0.3)]


def test_a_reservation_is_journalled_before_its_call(config: Config) -> None:
    """When the function runs, the journal already knows of it; a journal that fails keeps it from running."""
    order: list[str] = []
    ctx = ExecutionContext(config(), journal=lambda event: order.append(type(event).__name__))
    ctx.wrap_llm_call(lambda: order.append("call"))
    assert order == ["Reserved", "call", "Settled"]

    def full_disk(event: object) -> None:
        if isinstance(event, Reserved):
            raise OSError("no space left")

    broken = ExecutionContext(config(), journal=full_disk)
    with pytest.raises(OSError, match="no space left"):
        broken.wrap_llm_call(lambda: order.append("never"))
    assert "never" not in order
    assert [node.status for node in broken.get_snapshot().nodes] == ["error"]


def test_limits_work_as_they_are(at_once: AtOnce) -> None:
    """The short form is taken wherever the long one is, and what it leaves out is not limited."""
    ctx = ExecutionContext(Limits(max_steps=3))
    assert [ctx.wrap_tool_call(lambda: None) for _ in range(4)] == [Decision.ALLOW] * 3 + [Decision.HALT]
    free = ExecutionContext(Limits())
    assert {free.wrap_llm_call(fail) for _ in range(50)} == {Decision.RETRY}

"""What callers, hooks, clocks and journals do wrong costs them their call, and nobody else anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.forks import in_child

from treenail.containment import (
    BudgetWindowHook,
    ChainStopped,
    CircuitBreaker,
    Decision,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    LedgerEvent,
    Limits,
    Reserved,
    ShieldPipeline,
    TokenBudgetHook,
    WrapOptions,
)
from treenail.containment.breaker import CircuitState
from treenail.containment.journal import event_from_json, event_to_json
from treenail.containment.pots import LocalBudgetBackend
from treenail.errors import UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
WAIT_S = 60.0


class Mute(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail() -> None:
    raise OSError("no luck")


# --- errors whose text cannot be had --------------------------------------------------------------------


def fail_mutely(*_: object) -> Any:
    raise Mute


class MuteHook:
    """A hook that fails without a text."""

    before_llm_call = staticmethod(fail_mutely)


@pytest.mark.parametrize(
    ("context", "fn", "options", "status"),
    [
        ({"circuit_breaker": CircuitBreaker()}, fail_mutely, WrapOptions(), "error"),
        ({"pipeline": ShieldPipeline()}, fail_mutely, WrapOptions(), "error"),
        ({"pipeline": ShieldPipeline(pre_dispatch=MuteHook())}, fail, WrapOptions(), "halted"),
        ({}, int, WrapOptions(cost_of=fail_mutely, cost_estimate_hint=0.1), "ok"),
    ],
    ids=["last retry", "shield", "hook", "cost"],
)
def test_an_error_without_a_text_is_an_error_like_any_other(
    config: Config, context: dict[str, Any], fn: Callable[[], Any], options: WrapOptions, status: str
) -> None:
    """An exception whose `__str__` raises ends its call with its own class and nothing stays reserved."""
    ctx = ExecutionContext(config(max_retries_total=1), **context)
    outcome = ctx.call_llm(fn, options)
    assert outcome.node.status == status
    assert isinstance(outcome.error, Mute) == (status == "error")
    assert ctx.get_snapshot().cost_usd_reserved == 0


# --- guards that break ----------------------------------------------------------------------------------


def test_a_predicate_that_fails_gives_the_probe_slot_back(config: Config, clock: FakeClock) -> None:
    """The failure counts, its caller sees the call's own error, and the next probe finds the slot free."""
    breaker = CircuitBreaker(1, 10.0, fail_mutely, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    assert isinstance(ctx.call_llm(fail).error, OSError)
    assert breaker.state is CircuitState.OPEN
    clock.advance(10)
    assert isinstance(ctx.call_llm(fail).error, OSError)
    assert breaker.state is CircuitState.OPEN
    clock.advance(10)
    assert ctx.call_llm(int).decision is Decision.ALLOW


def test_a_governor_that_answers_nonsense_has_not_allowed_the_call(config: Config) -> None:
    """Whatever is not a policy's decision is a refusal, as an error is."""

    class Absent:
        def check(self, context: object) -> Any:
            return None

    ctx = ExecutionContext(config(), memory_governor=Absent())
    assert ctx.wrap_llm_call(fail) is Decision.HALT


def test_an_interrupt_before_the_dispatch_leaves_the_window_as_it_was(config: Config) -> None:
    """A call that is interrupted while it waits out its delay was not made, and nobody counts it."""
    window, tokens = BudgetWindowHook(max_calls=1), TokenBudgetHook(max_output_tokens=100)

    class Slow:
        def before_llm_call(self, ctx: object) -> DegradePlan:
            return DegradePlan(delay_ms=1000)

    class Interrupted(FakeClock):
        def call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
            raise KeyboardInterrupt

    options = WrapOptions(max_output_tokens=100)
    shield = ShieldPipeline(pre_dispatch=[window, tokens, Slow()])
    ctx = ExecutionContext(config(), shield, clock=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        ctx.wrap_llm_call(int, options)
    again = ExecutionContext(config(), ShieldPipeline(pre_dispatch=[window, tokens]))
    assert again.call_llm(int, options).ok


# --- journals that break --------------------------------------------------------------------------------


def test_a_journal_that_cannot_write_leaves_the_guards_as_they_were(config: Config) -> None:
    """A call that could not be journalled is not dispatched, so it takes no place in a window."""
    window, broken = BudgetWindowHook(max_calls=1, degrade_threshold=1.0), [True]

    def journal(event: LedgerEvent) -> None:
        if broken[0]:
            fail()

    ctx = ExecutionContext(config(), ShieldPipeline(pre_dispatch=window), journal=journal)
    with pytest.raises(OSError, match="no luck"):
        ctx.call_llm(int)
    broken[0] = False
    assert ctx.call_llm(int).decision is Decision.ALLOW


def test_a_reservation_that_could_not_be_written_is_not_charged(config: Config) -> None:
    """The call is not made, so it is neither money nor a step, here and above; the next one is counted."""
    broken = [True]

    def journal(event: object) -> None:
        if broken and isinstance(event, Reserved):
            raise OSError("the disk is full")

    pot = LocalBudgetBackend()
    parent = ExecutionContext(config(max_cost_usd=1.0, budget_backend=pot), journal=journal)
    child = parent.spawn_child(Limits(max_steps=1))
    dear = WrapOptions("ask", cost_estimate_hint=0.6)
    made: list[int] = []
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is full"):
            child.call_llm(lambda: made.append(1), dear)
    for chain in (parent, child):
        snapshot = chain.get_snapshot()
        assert (snapshot.step_count, snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (0, 0, 0)
    assert {node.attempts for node in child.get_snapshot().nodes} == {0}
    assert (pot.get(), pot.get_reserved(), made) == (0.0, 0.0, [])
    broken.clear()
    assert child.call_llm(lambda: made.append(1), dear).ok
    assert (parent.get_snapshot().cost_usd_accumulated, pot.get(), made) == (0.6, 0.6, [1])


@pytest.mark.parametrize("stop", ["abort", "step limit"])
def test_a_stop_that_cannot_be_journalled_holds(config: Config, stop: str) -> None:
    """`abort()` raises nothing and a refusal is HALT, whatever the journal does."""

    def journal(event: LedgerEvent) -> None:
        if isinstance(event, ChainStopped):
            fail()

    ctx = ExecutionContext(config(max_steps=1), journal=journal)
    assert ctx.call_tool(int).ok
    if stop == "abort":
        ctx.abort("enough")
    assert ctx.wrap_tool_call(int) is Decision.HALT
    assert ctx.stop_reason == ("aborted" if stop == "abort" else "step_limit_exceeded")


def test_whoever_blocks_at_one_timeout_holds_up_no_other(config: Config) -> None:
    """A listener or a journal that never returns keeps no other chain from being stopped in time."""
    release, is_blocked = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        is_blocked.set()
        release.wait(WAIT_S)

    first = ExecutionContext(config(timeout_ms=1), journal=block)
    try:
        assert is_blocked.wait(WAIT_S / 2)
        assert first.stop_reason == "timeout"
        second = ExecutionContext(config(timeout_ms=1))
        assert second.cancellation_token.wait(WAIT_S / 2)
    finally:
        release.set()


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("cost_usd", -5.0),
        ("cost_usd", "1"),
        ("cost_usd", None),
        ("cost_usd", float("nan")),
        ("elapsed_ms", -1.0),
        ("elapsed_above_ms", (-1.0,)),
        ("elapsed_above_ms", (1.0, 2.0)),
        ("lineage", ()),
        ("lineage", (1, 2)),
        ("reservation_id", None),
    ],
)
def test_an_event_that_would_give_something_back_is_refused(
    clock: FakeClock, field: str, bad: object
) -> None:
    """A damaged line cannot refund money or time, and cannot hide a call."""
    good = Reserved("n:1", ("root", "child"), "n", "llm", "think", 0.25, clock.now(), 10.0, (20.0,))
    assert event_from_json(event_to_json(good)) == good
    with pytest.raises(UsageError, match="not a ledger event"):
        event_from_json(event_to_json(replace(good, **{field: bad})))  # type: ignore[arg-type]  # what is wrong is the point


def test_a_parent_resumes_with_its_own_time(config: Config, clock: FakeClock) -> None:
    """Only a child made calls; the parent had been running for longer, and goes on from there."""
    events: list[LedgerEvent] = []
    parent = ExecutionContext(config(), clock=clock, journal=events.append)
    clock.advance(50)
    child = parent.spawn_child()
    clock.advance(1)
    assert child.call_llm(int).ok
    resumed = ExecutionContext.resume(config(), events, clock=clock)
    assert resumed.get_snapshot().elapsed_ms == 51_000
    again = resumed.spawn_child(metadata=child.metadata)
    assert again.get_snapshot().elapsed_ms == 1_000


# --- numbers and types that nobody should hand in -------------------------------------------------------

HUGE = 10**400


@pytest.mark.parametrize("field", ["max_cost_usd", "max_steps", "max_retries_total", "timeout_ms"])
def test_a_number_too_large_for_a_float_is_refused_by_name(config: Config, field: str) -> None:
    """It is refused as other nonsense is, and does not surface as an overflow somewhere else."""
    with pytest.raises(UsageError, match=f"ExecutionConfig.{field} must be finite"):
        config(**{field: HUGE})


def test_the_largest_numbers_work(config: Config) -> None:
    """A ceiling that no one can reach is a ceiling; what is more than it is refused."""
    most = sys.float_info.max
    ctx = ExecutionContext(config(max_cost_usd=most, timeout_ms=int(most)))
    assert ctx.call_llm(int, WrapOptions(cost_estimate_hint=most / 2)).ok
    assert ctx.call_llm(int, WrapOptions(cost_estimate_hint=most)).stop_reason == "budget_exceeded"
    assert Limits(timeout=most).to_config().timeout_ms > 0


def test_a_timeout_beyond_what_the_platform_can_wait_for_kills_no_timer(config: Config) -> None:
    """A chain that may run for ten million years keeps no other timer from firing."""
    forever = ExecutionContext(config(timeout_ms=10**20))
    soon = ExecutionContext(config(timeout_ms=1))
    assert soon.cancellation_token.wait(WAIT_S)
    assert forever.stop_reason is None


@pytest.mark.parametrize("bad", [None, {}, "1 USD", 5], ids=repr)
def test_ceilings_of_the_wrong_type_are_refused_by_name(bad: Any) -> None:
    """The first line that is wrong says so, not the first call."""
    with pytest.raises(UsageError, match=r"ExecutionContext\.config"):
        ExecutionContext(bad)


def test_a_call_of_the_wrong_type_is_refused(config: Config) -> None:
    """What is no function, and options that are none, are the caller's mistake and no step."""
    ctx = ExecutionContext(config())
    with pytest.raises(UsageError, match="fn must be a function"):
        ctx.wrap_llm_call(None)  # type: ignore[arg-type]  # what is wrong is the point
    with pytest.raises(UsageError, match="options must be WrapOptions"):
        ctx.wrap_llm_call(int, {"operation_name": "x"})  # type: ignore[arg-type]  # what is wrong is the point
    assert ctx.get_snapshot().step_count == 0


def test_a_clock_that_is_set_back_gives_no_time_away(config: Config) -> None:
    """A chain has never run for less than no time, in a snapshot or in the journal."""

    class Adjusted(FakeClock):
        offset = 0.0

        def monotonic(self) -> float:
            return super().monotonic() - self.offset

    events: list[LedgerEvent] = []
    clock = Adjusted()
    ctx = ExecutionContext(config(), clock=clock, journal=events.append)
    clock.offset = 5000.0
    assert ctx.call_llm(int).ok
    assert ctx.get_snapshot().elapsed_ms == 0
    assert [event.elapsed_ms for event in events] == [0, 0]


# --- work that escapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["call", "acall"])
@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_generator_is_not_counted_as_done(config: Config, face: str, kind: str) -> None:
    """Its work would happen outside of the call, so it is refused; what was reserved for it is charged."""

    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    ctx = ExecutionContext(config())
    fn: Any = generator if kind == "generator" else async_generator
    options = WrapOptions(cost_estimate_hint=0.5)

    async def acall() -> None:
        await ctx.acall_llm(fn, options)

    with pytest.raises(UsageError, match="generator"):
        anyio.run(acall) if face == "acall" else ctx.call_llm(fn, options)
    assert ctx.get_snapshot().cost_usd_accumulated == 0.5
    assert ctx.get_snapshot().nodes[0].status == "error"


@pytest.mark.parametrize("face", ["call", "acall"])
def test_a_call_stopped_before_it_began_is_not_begun(config: Config, face: str) -> None:
    """An abort after the booking and before the dispatch: the function is not called and costs nothing."""

    def journal(event: LedgerEvent) -> None:
        if isinstance(event, Reserved):
            ctx.abort("while it was being booked")

    ran: list[bool] = []

    async def work() -> None:
        ran.append(True)

    async def acall() -> Any:
        return await ctx.acall_llm(work, options)

    ctx = ExecutionContext(config(), journal=journal)
    options = WrapOptions(cost_estimate_hint=0.5)
    outcome = anyio.run(acall) if face == "acall" else ctx.call_llm(lambda: ran.append(True), options)
    assert (outcome.node.status, outcome.stop_reason, ran) == ("aborted", "aborted", [])
    assert ctx.get_snapshot().cost_usd_accumulated == 0


def test_every_pot_on_the_way_up_is_charged(config: Config) -> None:
    """A child that brings a pot of its own still draws from its parent's, and may not go past either."""
    ours, theirs = LocalBudgetBackend(), LocalBudgetBackend()
    parent = ExecutionContext(config(max_cost_usd=1.0, budget_backend=ours))
    child = parent.spawn_child(config(max_cost_usd=5.0, budget_backend=theirs))
    options = WrapOptions(cost_estimate_hint=0.4)
    ours.add(0.5)
    assert child.call_llm(int, options).ok
    assert (ours.get(), theirs.get()) == (0.9, 0.4)
    assert child.call_llm(int, options).stop_reason == "budget_exceeded"
    assert (ours.get_reserved(), theirs.get_reserved()) == (0, 0)


@pytest.mark.parametrize("whose", ["its own", "its child's"])
def test_a_deadline_outlives_the_context_that_set_it(config: Config, clock: FakeClock, whose: str) -> None:
    """A call made after the context was left, or by a child that outlives it, is still stopped in time."""
    with ExecutionContext(config(timeout_ms=200), clock=clock) as parent:
        child = parent.spawn_child()
    deaf = threading.Event()
    try:
        chain = parent if whose == "its own" else child
        outcome = chain.call_tool(lambda: (clock.advance(0.2), deaf.wait(WAIT_S)))
        assert not deaf.is_set()
    finally:
        deaf.set()
    assert outcome.node.status == "timeout"
    assert [event.event_type for event in chain.get_snapshot().events] == ["timeout"]


def test_a_forked_process_has_workers_and_timers_of_its_own(config: Config) -> None:
    """Threads do not survive a fork; a context made afterwards works, and its timeouts fire."""
    assert ExecutionContext(config(timeout_ms=60_000)).call_llm(int).ok

    def work() -> None:
        # Held by a name: a context that the collector takes disarms its timer.
        short = ExecutionContext(config(timeout_ms=1))
        assert ExecutionContext(config(timeout_ms=60_000)).call_llm(int).ok
        assert short.cancellation_token.wait(WAIT_S)

    in_child(work)

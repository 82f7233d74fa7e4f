"""Circuit breakers open, probe and close, are shared by chains, and never wedge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    CircuitBreaker,
    CircuitBreakers,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    PolicyContext,
    PolicyDecision,
    PolicyPipeline,
    WrapOptions,
    current_call,
)
from treenail.containment.breaker import CircuitState
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
ASK = PolicyContext()


class Flaky(Exception):
    """What the calls in these tests fail with."""


def fail() -> None:
    raise Flaky("no luck")


def opened(clock: FakeClock, **settings: Any) -> CircuitBreaker:
    breaker = CircuitBreaker(failure_threshold=2, recovery_timeout=60, clock=clock, **settings)
    breaker.record_failure()
    breaker.record_failure()
    assert breaker.state is CircuitState.OPEN
    return breaker


def test_it_opens_after_failures_in_a_row(clock: FakeClock) -> None:
    """A success in between starts the count again."""
    breaker = CircuitBreaker(failure_threshold=2, clock=clock)
    breaker.record_failure()
    breaker.record_success()
    breaker.record_failure()
    assert breaker.state is CircuitState.CLOSED
    breaker.record_failure()
    assert breaker.state is CircuitState.OPEN
    denied = breaker.check(ASK)
    assert (denied.allowed, denied.policy_type) == (False, "circuit_breaker")
    assert "60.0 s" in denied.reason


def test_it_lets_one_probe_through_after_a_while(clock: FakeClock) -> None:
    """After the recovery time one call is allowed; its success closes the circuit, its failure opens it."""
    breaker = opened(clock)
    clock.advance(60)
    assert breaker.check(ASK).allowed
    assert not breaker.check(ASK).allowed
    breaker.record_failure()
    assert breaker.state is CircuitState.OPEN
    clock.advance(60)
    assert breaker.check(ASK).allowed
    breaker.record_success()
    assert breaker.state is CircuitState.CLOSED


def test_success_is_ignored_while_open(clock: FakeClock) -> None:
    """A call from before the circuit opened does not close it."""
    breaker = opened(clock)
    breaker.record_success()
    assert breaker.state is CircuitState.OPEN


def test_half_open_with_many_threads_lets_one_through(clock: FakeClock, at_once: Any) -> None:
    """Of 64 threads that ask a half-open breaker at once, one gets the probe."""
    breaker = opened(clock)
    clock.advance(60)
    permits = at_once(64, lambda _: breaker.acquire())
    assert sum(permit is not None for permit in permits) == 1


def test_only_errors_that_count_open_it(clock: FakeClock) -> None:
    """The predicate says which errors are the provider's; the others free a probe and change nothing."""
    breaker = opened(clock, failure_predicate=lambda error: isinstance(error, OSError))
    clock.advance(60)
    assert breaker.check(ASK).allowed
    breaker.record_failure(ValueError("mine"))
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.check(ASK).allowed
    breaker.record_failure(OSError("theirs"))
    assert breaker.state is CircuitState.OPEN


def test_a_probe_that_never_reports_is_forgotten(clock: FakeClock) -> None:
    """A caller that took the probe and died cannot wedge the breaker; its late report is ignored."""
    breaker = opened(clock)
    clock.advance(60)
    lost = breaker.acquire()
    assert lost is not None
    assert breaker.acquire() is None
    clock.advance(60)
    probe = breaker.acquire()
    assert probe is not None
    lost.fail(Flaky())
    assert breaker.state is CircuitState.HALF_OPEN
    probe.succeed()
    assert breaker.state is CircuitState.CLOSED


def test_an_old_call_does_not_speak_for_the_probe(clock: FakeClock) -> None:
    """A call that began before the circuit opened and ends during the probe changes nothing."""
    breaker = CircuitBreaker(failure_threshold=1, recovery_timeout=60, clock=clock)
    old = breaker.acquire()
    breaker.record_failure()
    clock.advance(60)
    probe = breaker.acquire()
    assert old is not None
    assert probe is not None
    old.succeed()
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.acquire() is None
    probe.fail(Flaky())
    assert breaker.state is CircuitState.OPEN


moves = st.lists(st.sampled_from(["acquire", "succeed", "fail", "release", "wait"]), max_size=60)


@given(moves=moves, threshold=st.integers(1, 4))
def test_no_history_wedges_it(moves: list[str], threshold: int) -> None:
    """Whatever happened, a breaker whose callers are gone lets a probe through within two recovery times."""
    clock = FakeClock()
    breaker = CircuitBreaker(threshold, recovery_timeout=10, clock=clock)
    held: list[Any] = []
    for move in moves:
        if move == "acquire":
            permit = breaker.acquire()
            if breaker.state is CircuitState.OPEN:
                assert permit is None
            held.append(permit)
        elif move == "wait":
            clock.advance(4)
        elif held:
            permit = held.pop()
            if permit is not None:
                getattr(permit, move)()
    clock.advance(20)
    assert breaker.acquire() is not None


# --- in a chain -----------------------------------------------------------------------------------------


def test_chains_share_a_breaker(config: Config, clock: FakeClock) -> None:
    """What fails in one chain is not asked again by another."""
    breaker = CircuitBreaker(failure_threshold=2, clock=clock)
    one = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    other = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    one.wrap_llm_call(fail)
    other.wrap_llm_call(fail)
    assert one.wrap_llm_call(lambda: None) is Decision.HALT
    assert other.call_llm(lambda: None).stop_reason == "circuit_open"
    clock.advance(60)
    assert other.wrap_llm_call(lambda: None) is Decision.ALLOW
    assert one.wrap_llm_call(lambda: None) is Decision.ALLOW


def test_each_provider_and_tool_has_its_own(config: Config) -> None:
    """A tool that fails does not keep others from being called."""
    ctx = ExecutionContext(config(), circuit_breaker=CircuitBreakers(failure_threshold=1))
    search, fetch = WrapOptions("search"), WrapOptions("fetch")
    ctx.wrap_tool_call(fail, search)
    assert ctx.wrap_tool_call(lambda: None, search) is Decision.HALT
    assert ctx.wrap_tool_call(lambda: None, fetch) is Decision.ALLOW
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(entity_id="search")) is Decision.HALT


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ending", ["halted by a ceiling", "interrupted", "journal fails"])
def test_a_probe_slot_is_given_back_however_its_call_ends(
    ending: str, config: Config, clock: FakeClock
) -> None:
    """A probe that told nothing about the provider frees the slot for the next one."""
    breaker = opened(clock)
    clock.advance(60)

    def journal(event: object) -> None:
        if ending == "journal fails":
            raise OSError("disk full")

    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock, journal=journal)
    if ending == "halted by a ceiling":
        ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=99_999))
    else:
        with pytest.raises((KeyboardInterrupt, OSError)):
            ctx.wrap_llm_call(interrupt)
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.acquire() is not None


def test_an_aborted_probe_is_given_back(config: Config, clock: FakeClock) -> None:
    """Aborting the chain that holds the probe says nothing about the provider."""
    breaker = opened(clock)
    clock.advance(60)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    ctx.wrap_llm_call(lambda: ctx.abort("stop"))
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.acquire() is not None


def test_a_timed_out_call_counts_as_a_failure(config: Config, clock: FakeClock) -> None:
    """A provider that does not answer in time is failing."""
    breaker = CircuitBreaker(failure_threshold=1, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)

    def hang() -> None:
        clock.advance(1)
        current_call().token.wait(60)  # type: ignore[union-attr]  # inside a call there is one

    ctx.wrap_llm_call(hang, WrapOptions(timeout_ms=1000))
    assert breaker.state is CircuitState.OPEN


def test_a_probe_in_one_thread_halts_the_others(config: Config, clock: FakeClock) -> None:
    """While the probe is under way, other calls are refused; when it succeeds, they go through again."""
    breaker = opened(clock)
    clock.advance(60)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: ctx.wrap_llm_call(lambda: (inside.set(), leave.wait(60))))
    thread.start()
    assert inside.wait(60)
    assert ctx.wrap_llm_call(lambda: None) is Decision.HALT
    leave.set()
    thread.join(60)
    assert ctx.wrap_llm_call(lambda: None) is Decision.ALLOW


# --- policies -------------------------------------------------------------------------------------------


class Governor:
    """A policy that gives one answer."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.asked: list[PolicyContext] = []

    def check(self, context: PolicyContext) -> PolicyDecision:
        self.asked.append(context)
        return PolicyDecision(self.allowed, policy_type="memory", reason="too much memory")


def test_a_governor_is_asked_before_the_dispatch(config: Config) -> None:
    """A denial halts the call, is recorded under the governor's name, and costs no step."""
    governor = Governor(False)
    ctx = ExecutionContext(config(), memory_governor=governor)
    assert ctx.wrap_tool_call(lambda: None, WrapOptions("op")) is Decision.HALT
    (event,) = ctx.get_snapshot().events
    assert (event.event_type, event.hook, event.reason) == ("memory", "Governor", "too much memory")
    assert ctx.get_snapshot().step_count == 0
    assert (governor.asked[0].entity_id, governor.asked[0].chain_id) == ("op", ctx.chain_id)


def test_a_governor_that_raises_has_not_allowed_the_call(config: Config) -> None:
    """A policy that cannot answer counts as a denial."""

    class Broken:
        def check(self, context: PolicyContext) -> PolicyDecision:
            raise Flaky

    ctx = ExecutionContext(config(), memory_governor=Broken())
    assert ctx.wrap_tool_call(lambda: None) is Decision.HALT
    assert "Flaky" in ctx.get_snapshot().events[0].reason


def test_policies_together_are_a_conjunction() -> None:
    """The first denial is the answer, and nobody after it is asked."""
    yes, no, last = Governor(True), Governor(False), Governor(True)
    assert not PolicyPipeline([yes, no, last]).check(ASK).allowed
    assert last.asked == []
    assert PolicyPipeline([yes, last]).check(ASK).allowed

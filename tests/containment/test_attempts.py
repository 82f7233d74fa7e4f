"""A function that tries again within one contained call books every further attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    BudgetWindowHook,
    CallOutcome,
    ChainMetadata,
    CircuitBreaker,
    CircuitState,
    Decision,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    LocalBudgetBackend,
    LoopPolicy,
    ShieldPipeline,
    TokenBudgetHook,
    ToolCallContext,
    WrapOptions,
    current_call,
    fold,
)
from treenail.containment.ledger import LedgerEvent, Reserved, RetryTaken, Settled
from treenail.errors import CallRefused, UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
CENT = WrapOptions("ask", cost_estimate_hint=0.01)


class Stubborn:
    """A callee that tries again until it succeeds or is refused, and counts what it really dispatched."""

    def __init__(self, failures: int = 10**9, *, costs: tuple[float, ...] = (), delay_s: float = 0.0) -> None:
        self.failures = failures
        self.costs = costs
        self.delay_s = delay_s
        self.dispatched = 0
        self.waited: list[float] = []
        self.refused: CallRefused | None = None
        self._lock = threading.Lock()

    def __call__(self) -> str:
        call = current_call()
        assert call is not None
        mine = 0
        while True:
            with self._lock:
                self.dispatched += 1
            mine += 1
            if mine <= len(self.costs):
                call.report(cost_usd=self.costs[mine - 1])
            if mine > self.failures:
                return "at last"
            error = ConnectionError(f"attempt {mine}")
            try:
                self.waited.append(call.end_attempt(error, delay_s=self.delay_s))
                call.begin_attempt()
            except CallRefused as refused:
                self.refused = refused
                raise error from None


def stops(ctx: ExecutionContext) -> list[str]:
    return [event.event_type for event in ctx.get_snapshot().events if event.hook == "ExecutionContext"]


def test_every_attempt_is_a_step_a_retry_and_money(config: Config) -> None:
    """Two failures and a success are three steps and two retries, each at its reservation."""
    ctx = ExecutionContext(config())
    outcome = ctx.call_llm(Stubborn(2), CENT)
    snapshot = ctx.get_snapshot()
    assert (outcome.value, outcome.decision) == ("at last", Decision.ALLOW)
    assert (snapshot.step_count, snapshot.retries_used) == (3, 2)
    assert snapshot.cost_usd_accumulated == 0.03
    assert snapshot.cost_usd_reserved == 0.0
    assert (outcome.node.retries_used, outcome.node.attempts) == (2, 1)


def test_each_attempt_is_a_node_below_the_first(config: Config) -> None:
    """The first attempt is the call's own node; the others hang below it, with their own ends and costs."""
    ctx = ExecutionContext(config())
    outcome = ctx.call_llm(Stubborn(2, costs=(0.002, 0.004, 0.008)), CENT)
    first, second, third = ctx.get_snapshot().nodes
    assert first == outcome.node
    assert [node.parent_id for node in (first, second, third)] == [None, first.node_id, first.node_id]
    assert [node.status for node in (first, second, third)] == ["ok", "error", "ok"]
    assert [node.cost_usd for node in (first, second, third)] == [0.002, 0.004, 0.008]
    assert {node.operation_name for node in (first, second, third)} == {"ask"}
    assert all(node.end_ts is not None for node in (first, second, third))


def test_a_failed_attempt_of_which_nothing_is_known_costs_its_reservation(config: Config) -> None:
    """The second attempt reports nothing: a cent. What the others reported is what they cost."""
    ctx = ExecutionContext(config())
    costs = iter([0.001, None, 0.003])

    def flaky() -> str:
        call = current_call()
        assert call is not None
        for attempt in (1, 2, 3):
            cost = next(costs)
            if cost is not None:
                call.report(cost_usd=cost)
            if attempt < 3:
                call.end_attempt(OSError("no"))
                call.begin_attempt()
        return "yes"

    assert ctx.call_llm(flaky, CENT).ok
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.014)


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
    """The call ends with its own error and the chain's reason; the reason is told of once."""
    ctx = ExecutionContext(config(**limits))
    callee = Stubborn()
    outcome = ctx.call_llm(callee, CENT)
    assert callee.dispatched == dispatched
    assert callee.refused is not None
    assert callee.refused.stop_reason == reason
    assert isinstance(outcome.error, ConnectionError)
    assert (outcome.decision, outcome.stop_reason, outcome.node.status) == (Decision.HALT, reason, "error")
    assert f"attempt {dispatched}" in outcome.detail
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
    callees = [Stubborn(each) for each in failures]
    outcomes: list[CallOutcome[str]] = [ctx.call_llm(each, CENT) for each in callees]
    dispatched = sum(each.dispatched for each in callees)
    snapshot = ctx.get_snapshot()
    begun = sum(outcome.was_dispatched for outcome in outcomes)
    assert dispatched <= min(steps, cents)
    assert dispatched - begun <= retries
    assert snapshot.step_count == dispatched
    assert snapshot.retries_used <= retries
    assert snapshot.cost_usd_accumulated == pytest.approx(dispatched / 100)
    assert snapshot.cost_usd_reserved == 0.0
    assert all(node.status != "running" for node in snapshot.nodes)


@pytest.mark.parametrize(
    ("limits", "exactly"),
    [({"max_steps": 64 + 20}, 20), ({"max_retries_total": 20}, 20), ({"max_cost_usd": 0.84}, 20)],
    ids=["steps", "retries", "money"],
)
def test_of_64_threads_exactly_n_further_attempts_pass(
    limits: dict[str, Any], exactly: int, config: Config, at_once: Any
) -> None:
    """All have made their first attempt before any tries again; then as many pass as there is room."""
    ctx = ExecutionContext(config(**limits))
    barrier = threading.Barrier(64)
    again: list[int] = []

    def work(number: int) -> None:
        def callee() -> None:
            call = current_call()
            assert call is not None
            barrier.wait(30)
            while True:
                error = OSError("no")
                try:
                    call.end_attempt(error)
                    call.begin_attempt()
                except CallRefused:
                    raise error from None
                again.append(number)

        ctx.call_llm(callee, CENT)

    at_once(64, work)
    assert len(again) == exactly
    assert ctx.get_snapshot().step_count == 64 + exactly


async def test_of_64_tasks_exactly_n_further_attempts_pass(config: Config) -> None:
    """The same with tasks that wait between asking and booking: the booking decides."""
    ctx = ExecutionContext(config(max_retries_total=20))
    begun = 0
    again = 0

    async def callee() -> None:
        nonlocal begun, again
        call = current_call()
        assert call is not None
        begun += 1
        while begun < 64:
            await anyio.lowlevel.checkpoint()
        while True:
            error = OSError("no")
            try:
                call.end_attempt(error)
                await anyio.lowlevel.checkpoint()
                call.begin_attempt()
            except CallRefused:
                raise error from None
            again += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(ctx.acall_llm, callee, CENT)
    assert again == 20
    assert stops(ctx) == ["provider_error"]


def test_a_child_takes_its_attempts_from_its_parent(config: Config) -> None:
    """A parent's retries bound a child's attempts, and both end with their own records."""
    parent = ExecutionContext(config(max_retries_total=2))
    child = parent.spawn_child()
    callee = Stubborn()
    assert child.call_llm(callee).stop_reason == "provider_error"
    assert callee.dispatched == 3
    assert (stops(parent), stops(child)) == (["provider_error"], ["provider_error"])
    assert parent.get_snapshot().step_count == 3


def test_a_child_with_retries_of_its_own_still_spends_the_parents_steps_and_money(config: Config) -> None:
    """Its attempts leave the parent's retries alone, now and after a restart; nothing else is its own."""
    journal: list[LedgerEvent] = []
    parent = ExecutionContext(
        config(max_retries_total=2, max_steps=5), metadata=ChainMetadata("r", "run"), journal=journal.append
    )
    judge = parent.spawn_child(onlooker=True)
    callee = Stubborn()
    assert judge.call_llm(callee, CENT).stop_reason == "step_limit_exceeded"
    assert callee.dispatched == 5
    snapshot = parent.get_snapshot()
    assert (snapshot.retries_used, snapshot.cost_usd_accumulated) == (0, 0.05)
    assert (fold(journal)["run"].retries, fold(journal)["run"].steps) == (0, 5)


# --- time ------------------------------------------------------------------------------------------


def test_a_wait_that_would_pass_the_deadline_is_not_begun(config: Config, clock: FakeClock) -> None:
    """There are 9 of 10 seconds left and the next attempt is due in 9: the error comes at once."""
    ctx = ExecutionContext(config(timeout_ms=10_000), clock=clock)
    clock.advance(1)
    callee = Stubborn(delay_s=9.0)
    outcome = ctx.call_llm(callee, CENT)
    assert (callee.dispatched, callee.waited) == (1, [])
    assert (outcome.stop_reason, outcome.node.status) == ("timeout", "error")
    assert stops(ctx) == ["timeout"]
    assert not ctx.cancellation_token.is_cancelled


def test_a_wait_that_fits_is_let(config: Config, clock: FakeClock) -> None:
    """8 of the 9 seconds that are left may be waited."""
    ctx = ExecutionContext(config(timeout_ms=10_000), clock=clock)
    clock.advance(1)
    callee = Stubborn(1, delay_s=8.0)
    assert ctx.call_llm(callee, CENT).value == "at last"
    assert callee.waited == [8.0]


def test_the_calls_own_time_bounds_the_wait_too(config: Config, clock: FakeClock) -> None:
    """A call that may take 500 ms does not wait for 600."""
    ctx = ExecutionContext(config(), clock=clock)
    callee = Stubborn(delay_s=0.6)
    outcome = ctx.call_llm(callee, WrapOptions("ask", timeout_ms=500))
    assert (callee.dispatched, outcome.stop_reason) == (1, "timeout")


@pytest.mark.parametrize("fate", ["call", "chain", "abort", "interrupt"])
async def test_what_stops_a_further_attempt_closes_it_with_its_call(
    fate: str, config: Config, clock: FakeClock
) -> None:
    """Both nodes end alike, both attempts count at their reservations, and nothing stays reserved."""
    ctx = ExecutionContext(config(timeout_ms=5000 if fate == "chain" else 0), clock=clock)

    async def callee() -> None:
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"))
        call.begin_attempt()
        if fate == "interrupt":
            raise KeyboardInterrupt
        if fate == "abort":
            ctx.abort("enough")
        else:
            clock.advance(5)
        await anyio.sleep_forever()

    options = WrapOptions("ask", cost_estimate_hint=0.01, timeout_ms=2000 if fate == "call" else None)
    if fate == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            await ctx.acall_llm(callee, options)
    else:
        await ctx.acall_llm(callee, options)
    snapshot = ctx.get_snapshot()
    ended = "timeout" if fate in ("call", "chain") else "aborted"
    assert [node.status for node in snapshot.nodes] == [ended, ended]
    assert (snapshot.step_count, snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (2, 0.02, 0.0)
    assert snapshot.graph_summary.running == 0


def test_an_aborted_chain_lets_no_attempt_through(config: Config) -> None:
    """Aborted between the failure and the wait's end: refused as aborted, nothing booked."""
    ctx = ExecutionContext(config())

    def callee() -> None:
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"))
        ctx.abort("enough")
        with pytest.raises(CallRefused) as refused:
            call.begin_attempt()
        assert refused.value.stop_reason == "aborted"

    assert ctx.call_llm(callee).node.status == "aborted"
    assert ctx.get_snapshot().step_count == 1


def test_a_function_that_was_left_behind_books_nothing_more(config: Config) -> None:
    """Its caller was released by a timeout of the call; the chain goes on, but not for this function."""
    clock = FakeClock()
    ctx = ExecutionContext(config(), clock=clock)
    released, refused = threading.Event(), threading.Event()

    def callee() -> None:
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"))
        clock.advance(1)
        assert released.wait(30)
        try:
            call.begin_attempt()
        except CallRefused:
            refused.set()

    outcome = ctx.call_llm(callee, WrapOptions("ask", timeout_ms=500, cost_estimate_hint=0.01))
    assert outcome.node.status == "timeout"
    released.set()
    assert refused.wait(30)
    snapshot = ctx.get_snapshot()
    assert (snapshot.step_count, snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (1, 0.01, 0)
    assert ctx.call_llm(lambda: "on").ok


async def test_cancelling_the_wait_gives_the_guards_their_places_back(config: Config) -> None:
    """An attempt that was asked for and never begun is in no window, and is no step."""
    window = BudgetWindowHook(max_calls=2, degrade_threshold=1.0)
    ctx = ExecutionContext(config(), ShieldPipeline(window))

    async def callee() -> None:
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"))
        scope.cancel()
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        await ctx.acall_llm(callee)
    assert ctx.get_snapshot().step_count == 1
    assert (ctx.wrap_llm_call(lambda: None), ctx.wrap_llm_call(lambda: None)) == (
        Decision.ALLOW,
        Decision.HALT,
    )


# --- guards ----------------------------------------------------------------------------------------


def test_the_breaker_sees_every_attempt(config: Config) -> None:
    """Two failures open the circuit, so the third attempt is refused; the call ends as `circuit_open`."""
    breaker = CircuitBreaker(2)
    ctx = ExecutionContext(config(), circuit_breaker=breaker)
    callee = Stubborn()
    assert ctx.call_llm(callee).stop_reason == "circuit_open"
    assert (callee.dispatched, breaker.state) == (2, CircuitState.OPEN)


@pytest.mark.parametrize(("delay_s", "goes_on"), [(0.0, False), (4.9, False), (5.0, True), (9.0, True)])
def test_nobody_waits_for_a_circuit_that_stays_open(
    config: Config, clock: FakeClock, delay_s: float, goes_on: bool
) -> None:
    """The failure opens it for 5 s: a shorter wait is refused before it begins, a longer one is not."""
    breaker = CircuitBreaker(1, recovery_timeout=5, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    went_on: list[float] = []

    def callee() -> None:
        call = current_call()
        assert call is not None
        waited = call.end_attempt(OSError("no"), delay_s=delay_s)
        went_on.append(waited)
        clock.advance(waited)
        call.begin_attempt()

    outcome = ctx.call_llm(callee)
    assert went_on == ([delay_s] if goes_on else [])
    assert outcome.stop_reason == (None if goes_on else "circuit_open")


def test_an_attempt_that_succeeds_closes_the_count(config: Config) -> None:
    """A failure followed by a success within the call leaves no failures in a row."""
    breaker = CircuitBreaker(2)
    ctx = ExecutionContext(config(), circuit_breaker=breaker)
    assert ctx.call_llm(Stubborn(1)).ok
    assert (breaker.failure_count, breaker.state) == (0, CircuitState.CLOSED)


def test_a_probe_slot_is_released_when_an_attempt_is_stopped(config: Config, clock: FakeClock) -> None:
    """The circuit is half open, the probe is a further attempt, and the chain is aborted during it."""
    breaker = CircuitBreaker(1, recovery_timeout=5, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)

    def callee() -> None:
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"), delay_s=5)
        clock.advance(5)
        call.begin_attempt()
        assert breaker.acquire() is None
        ctx.abort("stop")

    assert ctx.call_llm(callee).node.status == "aborted"
    assert breaker.acquire() is not None


def test_a_window_counts_attempts_and_can_refuse_one(config: Config) -> None:
    """Three calls fit into the window: the first attempt and two more."""
    ctx = ExecutionContext(config(), ShieldPipeline(BudgetWindowHook(max_calls=3)))
    callee = Stubborn()
    assert ctx.call_llm(callee).stop_reason == "provider_rate_limit"
    assert callee.dispatched == 3
    assert stops(ctx) == ["provider_rate_limit"]


def test_a_retry_hook_can_forbid_another_attempt(config: Config) -> None:
    """What the hook says after the error is the call's decision, and it is asked once."""
    asked: list[str] = []

    class Never:
        def on_error(self, ctx: ToolCallContext, err: BaseException) -> Decision:
            asked.append(str(err))
            return Decision.QUARANTINE

    ctx = ExecutionContext(config(), ShieldPipeline(retry=Never()))
    callee = Stubborn()
    outcome = ctx.call_llm(callee)
    assert (callee.dispatched, outcome.decision) == (1, Decision.QUARANTINE)
    assert asked == ["attempt 1"]


def test_a_retry_hook_can_ask_for_a_longer_wait(config: Config) -> None:
    """The longer of both waits is waited."""

    class Later:
        def on_error(self, ctx: ToolCallContext, err: BaseException) -> DegradePlan:
            return DegradePlan(delay_ms=1500)

    ctx = ExecutionContext(config(), ShieldPipeline(retry=Later()))
    callee = Stubborn(1, delay_s=1.0)
    assert ctx.call_llm(callee).ok
    assert callee.waited == [1.5]


def test_a_further_attempt_may_be_degraded(config: Config) -> None:
    """The shield is asked about each attempt, and the callee sees the newest plan."""
    plans: list[DegradePlan | None] = []

    class SmallerAfterAFailure:
        calls = 0

        def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan | None:
            self.calls += 1
            return DegradePlan(model="small", delay_ms=2000) if self.calls > 1 else None

    def callee() -> None:
        call = current_call()
        assert call is not None
        plans.append(call.plan)
        assert call.end_attempt(OSError("no"), delay_s=0.5) == 2.0
        call.begin_attempt()
        plans.append(call.plan)

    ctx = ExecutionContext(config(on_unknown_price="warn"), ShieldPipeline(SmallerAfterAFailure()))
    ctx.call_llm(callee, WrapOptions(model="big")).unwrap()
    assert [plan.model if plan else None for plan in plans] == [None, "small"]


def test_a_token_budget_reserves_each_attempt_once(config: Config) -> None:
    """A failed attempt's reservation is dropped before the next one is made."""
    tokens = TokenBudgetHook(max_output_tokens=100, degrade_threshold=1.0)
    ctx = ExecutionContext(config(), ShieldPipeline(tokens))
    assert ctx.call_llm(Stubborn(3), WrapOptions("ask", max_output_tokens=100)).ok


def test_shared_money_is_drawn_for_each_attempt(config: Config) -> None:
    """A pot pays for three attempts, and refuses the fourth."""
    pot = LocalBudgetBackend()
    ctx = ExecutionContext(config(max_cost_usd=0.03, budget_backend=pot))
    callee = Stubborn()
    assert ctx.call_llm(callee, CENT).stop_reason == "budget_exceeded"
    assert (callee.dispatched, pot.get(), pot.get_reserved()) == (3, 0.03, 0.0)


def test_attempts_are_no_loop(config: Config) -> None:
    """Loop detection is about what a run asks for, not about how often a provider fails."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=2))
    assert ctx.call_llm(Stubborn(5), CENT).ok


# --- the ledger ------------------------------------------------------------------------------------


def test_a_restart_knows_of_every_attempt(config: Config) -> None:
    """Cut off in the third attempt: three steps, two retries, and the third counts at its reservation."""
    journal: list[LedgerEvent] = []

    class Killed(BaseException):
        pass

    def callee() -> None:
        call = current_call()
        assert call is not None
        for _ in range(2):
            call.report(cost_usd=0.001)
            call.end_attempt(OSError("no"))
            call.begin_attempt()
        written.extend(journal)
        raise Killed

    written: list[LedgerEvent] = []
    ctx = ExecutionContext(config(), metadata=ChainMetadata("r", "run"), journal=journal.append)
    with pytest.raises(Killed):
        ctx.call_llm(callee, CENT)
    kinds = [type(event) for event in written]
    assert kinds == [Reserved, Settled, RetryTaken, Reserved, Settled, RetryTaken, Reserved]
    spent = fold(written)["run"]
    assert (spent.steps, spent.retries, spent.unsettled) == (3, 2, 1)
    again = ExecutionContext.resume(config(max_steps=3), written)
    snapshot = again.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used) == (3, 2)
    assert snapshot.cost_usd_accumulated == pytest.approx(0.012)
    assert again.call_llm(lambda: None).stop_reason == "step_limit_exceeded"
    # Each failure is one event of its own, so that counting events twice counts nothing twice.
    assert fold([*written, *written])["run"] == spent


def test_a_journal_that_cannot_write_keeps_the_attempt_from_being_made(config: Config) -> None:
    """The error is the callee's to see; nothing stays reserved and no probe slot stays taken."""
    journal: list[LedgerEvent] = []

    def write(event: LedgerEvent) -> None:
        journal.append(event)
        if isinstance(event, Reserved) and sum(isinstance(each, Reserved) for each in journal) == 2:
            raise OSError("disk full")

    breaker = CircuitBreaker(1)
    ctx = ExecutionContext(config(), journal=write, circuit_breaker=breaker)

    def callee() -> None:
        call = current_call()
        assert call is not None
        breaker.reset()
        try:
            call.end_attempt(ValueError("no"))
        except CallRefused:
            breaker.reset()
            call.end_attempt(ValueError("no"))
        call.begin_attempt()

    outcome = ctx.call_llm(callee, CENT)
    assert not outcome.ok
    snapshot = ctx.get_snapshot()
    assert snapshot.cost_usd_reserved == 0.0
    assert all(node.status != "running" for node in snapshot.nodes)


def test_the_two_steps_come_in_turn(config: Config) -> None:
    """Ending twice, or beginning without having ended, is the callee's mistake."""
    ctx = ExecutionContext(config())

    def callee() -> None:
        call = current_call()
        assert call is not None
        with pytest.raises(UsageError, match="end the one before it first"):
            call.begin_attempt()
        call.end_attempt(OSError("no"))
        with pytest.raises(UsageError, match="begin one before you end it"):
            call.end_attempt(OSError("no"))
        call.begin_attempt()
        assert call.attempt == 2
        for wrong in (-1.0, float("nan"), True):
            with pytest.raises(UsageError, match="delay_s"):
                call.end_attempt(OSError("no"), delay_s=wrong)

    ctx.call_llm(callee).unwrap()


def test_the_containments_own_retries_go_on_after_the_functions(config: Config) -> None:
    """`retry_policy_override` dispatches the whole function again, and its attempts begin anew."""
    ctx = ExecutionContext(config())
    rounds = 0

    def callee() -> str:
        nonlocal rounds
        rounds += 1
        call = current_call()
        assert call is not None
        call.end_attempt(OSError("no"))
        call.begin_attempt()
        if rounds == 1:
            raise OSError("no, again")
        return "yes"

    outcome = ctx.call_llm(callee, WrapOptions("ask", retry_policy_override=5))
    snapshot = ctx.get_snapshot()
    assert (outcome.value, rounds) == ("yes", 2)
    assert (snapshot.step_count, snapshot.retries_used) == (4, 3)

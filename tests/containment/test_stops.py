"""How calls and chains end: each stop has its reason, its record, its status, and is told of once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from treenail.containment import (
    BudgetWindowHook,
    ChainMetadata,
    CircuitBreaker,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    SafetyEvent,
    ShieldPipeline,
    StopReason,
    WrapOptions,
    current_call,
)
from treenail.containment import chain as chain_module
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    UsageError,
)
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]


class Flaky(Exception):
    """What the calls in these tests fail with."""


def fail() -> None:
    raise Flaky("no luck")


def stops(ctx: ExecutionContext) -> list[str]:
    """Return the stop reasons that the chain itself has told of, in order."""
    return [event.event_type for event in ctx.get_snapshot().events if event.hook == "ExecutionContext"]


# --- the eight reasons ----------------------------------------------------------------------------------


def by_budget(config: Config, clock: FakeClock) -> ExecutionContext:
    ctx = ExecutionContext(config(max_cost_usd=0.1), clock=clock)
    ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.1))
    return ctx


def by_retries(config: Config, clock: FakeClock) -> ExecutionContext:
    ctx = ExecutionContext(config(max_retries_total=1), clock=clock)
    assert ctx.wrap_llm_call(fail) is Decision.RETRY
    return ctx


def by_circuit(config: Config, clock: FakeClock) -> ExecutionContext:
    breaker = CircuitBreaker(failure_threshold=1, clock=clock)
    ctx = ExecutionContext(config(), circuit_breaker=breaker, clock=clock)
    assert ctx.wrap_llm_call(fail) is Decision.RETRY
    return ctx


def by_steps(config: Config, clock: FakeClock) -> ExecutionContext:
    ctx = ExecutionContext(config(max_steps=1), clock=clock)
    ctx.wrap_llm_call(lambda: None)
    return ctx


def by_time(config: Config, clock: FakeClock) -> ExecutionContext:
    ctx = ExecutionContext(config(timeout_ms=1000), clock=clock)
    clock.advance(1.0)
    return ctx


def by_abort(config: Config, clock: FakeClock) -> ExecutionContext:
    ctx = ExecutionContext(config(), clock=clock)
    ctx.abort("the user pressed stop")
    return ctx


def by_window(config: Config, clock: FakeClock) -> ExecutionContext:
    pipeline = ShieldPipeline(BudgetWindowHook(1, degrade_threshold=1.0, clock=clock), clock=clock)
    ctx = ExecutionContext(config(), pipeline, clock=clock)
    ctx.wrap_llm_call(lambda: None)
    return ctx


def by_provider(config: Config, clock: FakeClock) -> ExecutionContext:
    breaker = CircuitBreaker(failure_threshold=50, clock=clock)
    ctx = ExecutionContext(config(max_retries_total=1), circuit_breaker=breaker, clock=clock)
    assert ctx.wrap_llm_call(fail) is Decision.HALT
    return ctx


MAKERS = {
    "budget_exceeded": by_budget,
    "retry_budget_exceeded": by_retries,
    "circuit_open": by_circuit,
    "step_limit_exceeded": by_steps,
    "timeout": by_time,
    "aborted": by_abort,
    "provider_rate_limit": by_window,
    "provider_error": by_provider,
}


def test_there_are_eight_reasons() -> None:
    """The reasons are the requirement's, in its spelling."""
    assert {reason.value for reason in StopReason} == set(MAKERS)


@pytest.mark.parametrize("reason", MAKERS)
def test_each_reason_is_told_of_once(reason: str, config: Config, clock: FakeClock) -> None:
    """The chain emits the reason with its own name as the hook, once, however often it refuses; and HALTs."""
    ctx = MAKERS[reason](config, clock)
    ran: list[int] = []
    for _ in range(3):
        assert ctx.wrap_llm_call(lambda: ran.append(1)) is Decision.HALT
    assert ran == []
    told = [event for event in ctx.get_snapshot().events if event.event_type == reason]
    assert [(event.hook, event.decision) for event in told] == [("ExecutionContext", Decision.HALT)]
    assert told[0].reason
    assert told[0].ts == clock.now()


@pytest.mark.parametrize("reason", sorted(set(MAKERS) - {"provider_error"}))
def test_a_refused_call_names_its_reason(reason: str, config: Config, clock: FakeClock) -> None:
    """The outcome and the snapshot say why, and the node is halted and cost nothing."""
    ctx = MAKERS[reason](config, clock)
    outcome = ctx.call_llm(lambda: "never")
    assert (outcome.stop_reason, outcome.value, outcome.error) == (reason, None, None)
    assert (outcome.node.status, outcome.node.attempts, outcome.node.cost_usd) == ("halted", 0, 0.0)
    assert not outcome.was_dispatched
    assert ctx.get_snapshot().stop_reason == reason
    assert ctx.stop_reason == reason


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("budget_exceeded", BudgetExceededError),
        ("timeout", DeadlineExceededError),
        ("aborted", CancelledByToken),
        ("step_limit_exceeded", CallRefused),
        ("circuit_open", CallRefused),
    ],
)
def test_unwrap_raises_what_the_stop_amounts_to(
    reason: str, error: type[Exception], config: Config, clock: FakeClock
) -> None:
    """`unwrap()` turns a refusal into the exception that fits it, with the reason in its text."""
    with pytest.raises(error, match=reason):
        MAKERS[reason](config, clock).call_llm(lambda: "never").unwrap()


def test_a_provider_that_drains_the_retries_halts_its_last_call(config: Config) -> None:
    """The failure that uses up the retries is a provider error; what follows is refused for the retries."""
    ctx = ExecutionContext(config(max_retries_total=2), circuit_breaker=CircuitBreaker(50))
    assert [ctx.wrap_llm_call(fail) for _ in range(3)] == [Decision.RETRY, Decision.HALT, Decision.HALT]
    assert stops(ctx) == ["provider_error", "retry_budget_exceeded"]
    assert ctx.get_snapshot().step_count == 2


def test_a_passing_stop_is_told_of_again_after_a_call_went_through(config: Config, clock: FakeClock) -> None:
    """A full window that emptied and filled again is two stops."""
    ctx = by_window(config, clock)
    ctx.wrap_llm_call(lambda: None)
    clock.advance(60)
    assert ctx.wrap_llm_call(lambda: None) is Decision.ALLOW
    assert ctx.stop_reason is None
    ctx.wrap_llm_call(lambda: None)
    assert stops(ctx) == ["provider_rate_limit", "provider_rate_limit"]


def test_a_call_too_dear_leaves_room_for_a_cheaper_one(config: Config) -> None:
    """A call that does not fit is refused without ending a chain that still has money."""
    ctx = ExecutionContext(config(max_cost_usd=1.0))
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=1.5)) is Decision.HALT
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.5)) is Decision.ALLOW
    assert stops(ctx) == ["budget_exceeded"]


def test_the_state_before_the_stop_is_kept(config: Config) -> None:
    """The snapshot of the moment before the first stop is there to be read afterwards."""
    ctx = ExecutionContext(config(max_steps=2))
    for _ in range(4):
        ctx.wrap_llm_call(lambda: None)
    assert ctx.stop_snapshot is not None
    assert [node.status for node in ctx.stop_snapshot.nodes] == ["ok", "ok"]
    assert ctx.stop_snapshot.stop_reason is None
    assert len(ctx.get_snapshot().nodes) == 4


# --- abort and its reason -------------------------------------------------------------------------------


def test_abort_keeps_its_first_reason(config: Config) -> None:
    """Aborting twice, or after a timeout, changes nothing."""
    ctx = ExecutionContext(config())
    ctx.abort("first")
    ctx.abort("second")
    snapshot = ctx.get_snapshot()
    assert (snapshot.aborted, snapshot.abort_reason) == (True, "first")
    assert stops(ctx) == ["aborted"]


def test_a_limit_is_no_abort_but_has_a_reason(config: Config) -> None:
    """`aborted` is for `abort()`; `abort_reason` also names the limit that ended a chain."""
    ctx = ExecutionContext(config(max_steps=1))
    assert ctx.get_snapshot().abort_reason is None
    ctx.wrap_llm_call(lambda: None)
    ctx.wrap_llm_call(lambda: None)
    snapshot = ctx.get_snapshot()
    assert (snapshot.aborted, snapshot.abort_reason) == (False, "step_limit_exceeded")


def test_leaving_by_an_interrupt_aborts(config: Config) -> None:
    """Ctrl-C through the `with` block cancels the chain's token; an ordinary error does not."""
    with pytest.raises(KeyboardInterrupt), ExecutionContext(config()) as ctx:
        raise KeyboardInterrupt
    assert ctx.cancellation_token.reason == "aborted"
    with pytest.raises(Flaky), ExecutionContext(config()) as other:
        raise Flaky
    assert not other.cancellation_token.is_cancelled


# --- outcomes of a call ---------------------------------------------------------------------------------


def test_an_outcome_carries_the_value(config: Config) -> None:
    """No closure is needed to get a result out."""
    outcome = ExecutionContext(config()).call_tool(lambda: {"answer": 42}, WrapOptions(operation_name="ask"))
    assert outcome.unwrap() == {"answer": 42}
    assert (outcome.decision, outcome.node.status, outcome.node.kind) == (Decision.ALLOW, "ok", "tool")
    assert outcome.node.operation_name == "ask"


def test_an_error_keeps_its_class(config: Config) -> None:
    """The exception itself is in the outcome, and `unwrap` raises it."""
    outcome = ExecutionContext(config()).call_llm(fail)
    assert (outcome.decision, outcome.node.status) == (Decision.RETRY, "error")
    with pytest.raises(Flaky, match="no luck"):
        outcome.unwrap()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_through_recorded(config: Config, interrupt: type[BaseException]) -> None:
    """An interrupt is raised again, its node is aborted, and its reservation is charged."""
    ctx = ExecutionContext(config())

    def call() -> None:
        raise interrupt

    with pytest.raises(interrupt):
        ctx.call_tool(call, WrapOptions(cost_estimate_hint=0.1))
    snapshot = ctx.get_snapshot()
    assert [node.status for node in snapshot.nodes] == ["aborted"]
    assert (snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (0.1, 0)
    assert snapshot.retries_used == 0


async def test_a_cancelled_task_passes_through_recorded(config: Config) -> None:
    """Cancellation from outside ends the call as aborted and goes on to whoever asked for it."""
    ctx = ExecutionContext(config())
    with anyio.move_on_after(0) as scope:
        await ctx.acall_llm(anyio.sleep_forever)
    assert scope.cancelled_caught
    assert [node.status for node in ctx.get_snapshot().nodes] == ["aborted"]


def test_a_partial_result_survives_and_is_found_by_node_id(config: Config, clock: FakeClock) -> None:
    """What a stopped call had produced is in its outcome and under its node id."""
    ctx = ExecutionContext(config(), clock=clock)
    inside = threading.Event()

    def stream() -> None:
        call = current_call()
        assert call is not None
        call.partial.append("once upon ")
        call.partial.append("a time")
        inside.set()
        call.token.wait(60)

    waiting = threading.Thread(target=lambda: (inside.wait(60), ctx.abort("enough")))
    waiting.start()
    outcome = ctx.call_llm(stream, WrapOptions(stoppable=True))
    waiting.join(60)
    assert (outcome.partial, outcome.node.status) == ("once upon a time", "aborted")
    assert ctx.get_partial(outcome.node.node_id) == "once upon a time"
    assert ctx.get_partial("no-such-node") is None


# --- coroutines -----------------------------------------------------------------------------------------


async def answer() -> str:
    await anyio.lowlevel.checkpoint()
    return "awaited"


@pytest.mark.parametrize("fn", [answer, lambda: answer()], ids=["coroutine function", "returns a coroutine"])
@pytest.mark.parametrize("stoppable", [False, True])
def test_the_sync_face_drives_a_coroutine(config: Config, fn: Callable[[], Any], stoppable: bool) -> None:
    """A coroutine handed to the synchronous face is run to its end, never counted as done unrun."""
    outcome = ExecutionContext(config()).call_llm(fn, WrapOptions(stoppable=stoppable))
    assert outcome.value == "awaited"


async def test_the_sync_face_refuses_a_coroutine_inside_a_loop(config: Config) -> None:
    """Driving it would block the loop, so it is refused, costs nothing, and says what to use instead."""
    ctx = ExecutionContext(config())
    with pytest.raises(UsageError, match=r"await context\.acall_tool"):
        ctx.call_tool(answer, WrapOptions(cost_estimate_hint=0.5))
    snapshot = ctx.get_snapshot()
    assert [node.status for node in snapshot.nodes] == ["error"]
    assert (snapshot.cost_usd_accumulated, snapshot.retries_used) == (0, 0)


@pytest.mark.parametrize(
    "fn", [answer, lambda: answer(), lambda: "awaited"], ids=["coroutine function", "coroutine", "plain"]
)
async def test_the_async_face_takes_anything(config: Config, fn: Callable[[], Any]) -> None:
    """Coroutine functions, functions that return awaitables, and plain functions all give their value."""
    outcome = await ExecutionContext(config()).acall_tool(fn)
    assert outcome.unwrap() == "awaited"


async def test_the_async_face_takes_an_object_with_an_async_call(config: Config) -> None:
    """A callable object whose `__call__` is a coroutine function is called where the loop runs."""

    class Client:
        async def __call__(self) -> int:
            return threading.get_ident()

    outcome = await ExecutionContext(config()).acall_llm(Client())
    assert outcome.value == threading.get_ident()


async def test_a_plain_function_does_not_block_the_loop(config: Config) -> None:
    """While a blocking function runs, other tasks of the loop go on."""
    ctx = ExecutionContext(config())
    release = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ctx.acall_tool, lambda: release.wait(60))
        await anyio.wait_all_tasks_blocked()
        release.set()
    assert [node.status for node in ctx.get_snapshot().nodes] == ["ok"]


# --- per-call retries -----------------------------------------------------------------------------------


def test_the_containment_retries_when_asked_to(config: Config) -> None:
    """`retry_policy_override=2` makes up to three attempts; each is a step, each retry is counted."""
    ctx = ExecutionContext(config())
    attempts: list[int] = []

    def third_time_lucky() -> str:
        attempts.append(current_call().attempt)  # type: ignore[union-attr]  # inside a call there is one
        if len(attempts) < 3:
            raise Flaky
        return "lucky"

    outcome = ctx.call_llm(third_time_lucky, WrapOptions(retry_policy_override=2, cost_estimate_hint=0.1))
    assert (outcome.value, outcome.error, attempts) == ("lucky", None, [1, 2, 3])
    assert (outcome.node.retries_used, outcome.node.attempts) == (2, 3)
    assert outcome.node.cost_usd == 0.3
    assert (ctx.get_snapshot().step_count, ctx.get_snapshot().retries_used) == (3, 2)


def test_a_call_may_forbid_its_retries(config: Config) -> None:
    """With `retry_policy_override=0` a failure halts that call and takes nothing from the chain's retries."""
    ctx = ExecutionContext(config(max_retries_total=1))
    assert ctx.wrap_llm_call(fail, WrapOptions(retry_policy_override=0)) is Decision.HALT
    assert ctx.get_snapshot().retries_used == 0
    assert ctx.wrap_llm_call(lambda: None) is Decision.ALLOW


def test_a_calls_own_retries_stay_within_the_chains(config: Config) -> None:
    """Asking for ten retries when the chain has two makes three attempts and ends as a provider error."""
    ctx = ExecutionContext(config(max_retries_total=2))
    outcome = ctx.call_llm(fail, WrapOptions(retry_policy_override=10))
    assert (outcome.decision, outcome.stop_reason) == (Decision.HALT, "provider_error")
    assert (outcome.node.attempts, outcome.node.retries_used) == (3, 2)
    assert isinstance(outcome.error, Flaky)


def test_retries_stay_within_the_steps(config: Config) -> None:
    """A retry is a step: with two steps left there are two attempts, and the call stays failed."""
    ctx = ExecutionContext(config(max_steps=2))
    outcome = ctx.call_llm(fail, WrapOptions(retry_policy_override=10))
    assert (outcome.node.attempts, outcome.node.status) == (2, "error")
    assert outcome.stop_reason == "step_limit_exceeded"
    assert isinstance(outcome.error, Flaky)


# --- records --------------------------------------------------------------------------------------------


def test_events_of_the_caller_are_kept(config: Config) -> None:
    """`record_event` puts the caller's own events among the chain's."""
    ctx = ExecutionContext(config())
    mine = SafetyEvent("my_check", Decision.DEGRADE, "looks odd", hook="MyHook", request_id="r")
    ctx.record_event(mine)
    assert list(ctx.get_snapshot().events) == [mine]


def test_chain_events_name_the_chain(config: Config) -> None:
    """A stop carries the request id and the chain id of the metadata."""
    metadata = ChainMetadata(request_id="req-1", chain_id="chain-1")
    ctx = ExecutionContext(config(max_steps=1), metadata=metadata)
    ctx.wrap_llm_call(lambda: None)
    ctx.wrap_llm_call(lambda: None)
    (event,) = ctx.get_snapshot().events
    assert (event.request_id, event.metadata["chain_id"]) == ("req-1", "chain-1")


def test_a_caller_that_ignores_halt_does_not_fill_the_memory(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused calls are kept up to a ceiling and counted beyond it; calls that run are always kept."""
    monkeypatch.setattr(chain_module, "MAX_BLOCKED_NODES", 5)
    ctx = ExecutionContext(config(max_cost_usd=1.0))
    for _ in range(20):
        ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=2.0))
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(operation_name="small")) is Decision.ALLOW
    snapshot = ctx.get_snapshot()
    assert (len(snapshot.nodes), snapshot.graph_summary.blocked) == (6, 20)
    assert snapshot.nodes[-1].operation_name == "small"


def test_metrics_hear_of_every_call(config: Config) -> None:
    """Each node is recorded when it ends; a metrics error is logged and changes nothing."""
    heard: list[str] = []

    class Broken:
        def record_call(self, node: Any) -> None:
            heard.append(node.status)
            raise Flaky

    ctx = ExecutionContext(config(max_steps=2), metrics=Broken())
    ctx.wrap_llm_call(lambda: None)
    ctx.wrap_llm_call(fail)
    ctx.wrap_llm_call(lambda: None)
    assert heard == ["ok", "error", "halted"]

"""What a run's limits and its shield do to the model calls of a turn."""

from __future__ import annotations

import threading

import anyio
import pytest

from treenail import Agent, Limits, TurnState, tool
from treenail.containment import (
    CircuitBreaker,
    DegradePlan,
    EgressBoundaryHook,
    ExecutionConfig,
    ExecutionContext,
    Price,
    RetryTaken,
    SafetyEvent,
    ShieldPipeline,
    StaticPrices,
    ToolCallContext,
)
from treenail.conversation import ProviderUsage
from treenail.errors import ModelCallError
from treenail.providers import ModelRequest, Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, Scripted, ScriptedProvider
from treenail.state import ExecutionState, Session, TokenUsage
from treenail.testing.wire import WireServer
from treenail.tools import ToolContext
from treenail.turns import InnerLoop, RetryPolicy, TurnResult, contain, turn_state
from treenail.turns.ledger import ledger_of

AT_ONCE = RetryPolicy(attempts=50, base_s=0.0, cap_s=0.0)


@tool(effects="none")
def look() -> str:
    """Look at something long."""
    return "x" * 3000


def failed(times: int, then: Scripted = "done", *, cost_usd: float | None = None) -> Scripted:
    """An answer that fails so often before it comes."""
    calls = 0

    def answer(request: ModelRequest) -> Answer:
        nonlocal calls
        calls += 1
        if calls <= times:
            return Answer(error=ModelCallError("busy", kind="transient", retryable=True), cost_usd=cost_usd)
        told = then(request) if callable(then) else then
        return Answer(told, cost_usd=cost_usd) if isinstance(told, str) else told

    return answer


class Priceless(ScriptedProvider):
    """A scripted model that leaves prices to the containment's table."""

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return None


def loop(session: Session, provider: Provider, containment: ExecutionContext, *tools: object) -> InnerLoop:
    agent = Agent("worker", tools=tools)  # type: ignore[arg-type] # tools of any kind
    return InnerLoop(ExecutionState(session), provider, agent.prompt, containment=containment, retry=AT_ONCE)


def run(session: Session, provider: Provider, containment: ExecutionContext, *tools: object) -> TurnResult:
    return anyio.run(loop(session, provider, containment, *tools).run, "go")


def test_a_providers_attempts_are_the_runs_steps_and_retries() -> None:
    session = Session()
    context = contain(session, Limits(max_steps=10, max_retries=10))
    result = run(session, Priceless([failed(3)]), context)
    assert result.state is TurnState.COMPLETED
    assert (context.get_snapshot().step_count, context.get_snapshot().retries_used) == (4, 3)
    again = contain(session, Limits(max_steps=10, max_retries=10)).get_snapshot()
    assert (again.step_count, again.retries_used) == (4, 3)
    assert sum(isinstance(each, RetryTaken) for each in ledger_of(session)) == 3


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (Limits(max_steps=3), "step_limit_exceeded"),
        (Limits(max_retries=3), "provider_error"),
    ],
)
def test_a_limit_that_refuses_an_attempt_is_the_turns_ending(limits: Limits, kind: str) -> None:
    """The ending is the limit's, its details have the provider's error, and it is told of once."""
    session = Session()
    result = run(session, Priceless([failed(40)]), contain(session, limits))
    assert (result.state, result.error_kind) == (TurnState.FAILED, kind)
    assert "busy" in result.details
    assert result.next_actions
    assert [each.event_type for each in session[SafetyEvent].all()] == [kind]


def test_a_failing_provider_cannot_spend_more_than_the_ceiling() -> None:
    """Every attempt is reserved at 0.30: three fit into a dollar, whatever the policy would allow."""
    session = Session()
    calls = 0

    class Counted(ScriptedProvider):
        def estimate_usd(self, request: ModelRequest) -> float | None:
            return 0.30

        def stream(self, request: ModelRequest):  # type: ignore[no-untyped-def] # as the base class has it
            nonlocal calls
            calls += 1
            return super().stream(request)

    result = run(session, Counted([failed(40)]), contain(session, Limits(max_cost_usd=1.0)))
    assert (calls, result.error_kind) == (3, "budget_exceeded")
    assert contain(session, Limits()).get_snapshot().cost_usd_accumulated == pytest.approx(0.90)


class Shrink:
    """A hook that degrades every model call as it is told."""

    def __init__(self, plan: DegradePlan) -> None:
        self.plan = plan

    def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan:
        return self.plan


PRICES = StaticPrices({"big": Price(10.0, 10.0), "small": Price(1.0, 1.0)})


def test_a_smaller_model_is_really_asked_recorded_and_paid_for() -> None:
    seen: list[ModelRequest] = []

    def answer(request: ModelRequest) -> Answer:
        seen.append(request)
        return Answer("done", usage=TokenUsage(1000, 1000))

    session = Session()
    context = contain(
        session,
        ExecutionConfig(1.0, None, None, 0),
        pipeline=ShieldPipeline(Shrink(DegradePlan(model="small", max_output_tokens=700))),
        prices=PRICES,
    )
    assert run(session, Priceless([answer], model="big"), context).state is TurnState.COMPLETED
    assert [(each.model, each.max_output_tokens) for each in seen] == [("small", 700)]
    usage = session[ProviderUsage].latest()
    assert usage is not None
    assert usage.model == "small"
    assert usage.notes == (
        "degraded: small was asked instead of big",
        "degraded: at most 700 tokens were asked for",
    )
    # 2,000 tokens at the small model's price.
    assert context.get_snapshot().cost_usd_accumulated == pytest.approx(0.002)


def test_a_degraded_run_goes_on_where_the_dear_model_would_not_fit() -> None:
    """A cent is left. The dear model's call would be reserved at more; the small one's is not."""
    session = Session()
    shield = ShieldPipeline(Shrink(DegradePlan(model="small")))
    context = contain(session, Limits(max_cost_usd=0.01), pipeline=shield, prices=PRICES)
    with WireServer([Answer("done", usage=TokenUsage(100, 100))]) as server:
        provider = OpenAI(
            "big", base_url=server.openai_url, api_key="k", prices=PRICES, max_output_tokens=4000
        )
        result = run(session, provider, context)
        models = [each.body["model"] for each in server.requests]
    assert (result.state, models) == (TurnState.COMPLETED, ["small"])
    assert context.get_snapshot().cost_usd_accumulated == pytest.approx(0.0002)


def test_a_trimmed_context_is_sent_and_noted_and_the_log_keeps_everything() -> None:
    """The third answer sees the task and the newest exchange; the conversation in the log is whole."""
    seen: list[list[str]] = []

    def answer(calls: int) -> Scripted:
        def told(request: ModelRequest) -> Answer:
            seen.append([each.role for each in request.items])
            return Answer("", [("look", {})]) if calls else Answer("done")

        return told

    session = Session()
    shield = ShieldPipeline(Shrink(DegradePlan(trim_to_tokens=1500)))
    context = contain(session, Limits(max_steps=20), pipeline=shield)
    result = run(session, Priceless([answer(1), answer(1), answer(0)]), context, look)
    assert result.state is TurnState.COMPLETED
    assert seen[1] == ["system", "user", "assistant", "tool"]
    assert seen[2] == ["system", "user", "assistant", "tool"]
    usages = session[ProviderUsage].all()
    assert [each.extends_previous for each in usages] == [True, True, False]
    assert usages[2].notes == ("degraded: 2 of 6 items were not sent",)
    assert usages[2].input_items == 4


def test_a_delay_is_waited_by_the_containment() -> None:
    """The plan's delay passes before the model is asked, and an abort would end it."""
    session = Session()
    shield = ShieldPipeline(Shrink(DegradePlan(delay_ms=60_000)))
    context = contain(session, Limits(max_steps=20), pipeline=shield)
    worker = loop(session, ScriptedProvider(["done"]), context)

    async def both() -> TurnResult:
        results: list[TurnResult] = []

        async def go() -> None:
            results.append(await worker.run("go"))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await anyio.wait_all_tasks_blocked()
                context.abort("no patience")
        return results[0]

    result = anyio.run(both)
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")
    assert context.get_snapshot().step_count == 0


def test_a_sync_tool_that_ignores_its_token_does_not_hold_up_the_turn() -> None:
    """Without any timeout, and with a handler that never looks: an abort ends the turn all the same."""
    let_go, tokens = threading.Event(), []

    @tool(effects="none")
    def deaf(*, context: ToolContext) -> str:
        """Listen to nobody."""
        tokens.append(context.cancellation)
        started.set()
        let_go.wait(30)
        return "late"

    started = threading.Event()
    session = Session()
    context = contain(session, Limits(max_steps=20))
    worker = loop(session, ScriptedProvider([Answer("", [("deaf", {})]), "done"]), context, deaf)

    def abort_soon() -> None:
        started.wait(30)
        context.abort("enough")

    async def go() -> TurnResult:
        with anyio.fail_after(60):
            return await worker.run("go")

    aborting = threading.Thread(target=abort_soon)
    aborting.start()
    result = anyio.run(go)
    assert not let_go.is_set()
    let_go.set()
    aborting.join(60)
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")
    assert [each.is_cancelled for each in tokens] == [True]


@pytest.mark.parametrize("contained", [True, False])
def test_a_providers_own_bug_is_an_ending(contained: bool) -> None:
    """A provider that raises what no provider should ends the turn as a bug, with its text, and is booked."""

    def answer(request: ModelRequest) -> Answer:
        raise ValueError("not even wrong")

    session = Session()
    context = contain(session, Limits(max_steps=20)) if contained else None
    agent = Agent("worker")
    worker = InnerLoop(ExecutionState(session), Priceless([answer]), agent.prompt, containment=context)
    result = anyio.run(worker.run, "go")
    assert (result.state, result.error_kind) == (TurnState.FAILED, "bug")
    assert "not even wrong" in result.details
    assert turn_state(session) is TurnState.FAILED
    if context is not None:
        assert context.get_snapshot().step_count == 1


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
def test_the_shield_decides_where_model_calls_go(vendor: str, allowed: bool) -> None:
    """A host that is not allowed is not called: no request arrives, nothing is spent, no retry is taken."""
    hook = EgressBoundaryHook(["127.0.0.1" if allowed else "api.example.com"])
    breaker = CircuitBreaker(1)
    session = Session()
    context = contain(
        session,
        Limits(max_cost_usd=1.0),
        pipeline=ShieldPipeline(egress=hook),
        circuit_breaker=breaker,
        prices=StaticPrices({"m": Price(1.0, 1.0)}),
    )
    with WireServer(["done"]) as server:
        provider: Provider = (
            OpenAI("m", base_url=server.openai_url, api_key="k")
            if vendor == "openai"
            else Anthropic("m", base_url=server.anthropic_url, api_key="k")
        )
        result = run(session, provider, context)
        arrived = len(server.requests)
    if allowed:
        assert (result.state, arrived) == (TurnState.COMPLETED, 1)
        return
    assert (result.state, result.error_kind, arrived) == (TurnState.FAILED, "halted", 0)
    assert "not an allowed host" in result.details
    snapshot = context.get_snapshot()
    assert (snapshot.cost_usd_accumulated, snapshot.retries_used) == (0.0, 0)
    assert [each.event_type for each in session[SafetyEvent].all()] == ["egress"]
    assert breaker.failure_count == 0

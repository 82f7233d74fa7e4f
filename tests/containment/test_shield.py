"""The shield: hooks in order at each boundary, plans that degrade, and hooks that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, time
from typing import Any

import pytest
from tests.delegates import PassesOn

from treenail.containment import (
    AdaptiveBudgetHook,
    BudgetWindowHook,
    CallUsage,
    ChainMetadata,
    CircuitBreaker,
    Decision,
    DegradationLadder,
    DegradePlan,
    EgressBoundaryHook,
    ExecutionConfig,
    ExecutionContext,
    InputCompressionHook,
    Limits,
    Price,
    SafeModeHook,
    SafetyEvent,
    ShieldPipeline,
    StaticPrices,
    TimeAwarePolicy,
    TokenBudgetHook,
    ToolCallContext,
    WrapOptions,
    current_call,
)
from treenail.containment.hooks import DegradationConfig
from treenail.errors import CallRefused, UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
CTX = ToolCallContext(request_id="r")


class Says:
    """A hook that gives the same answer everywhere and remembers what it was asked."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    def _reply(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def before_llm_call(self, ctx: ToolCallContext) -> Any:
        return self._reply("llm", ctx)

    def before_tool_call(self, ctx: ToolCallContext) -> Any:
        return self._reply("tool", ctx)

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Any:
        return self._reply("egress", url, method)

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Any:
        return self._reply("error", err)

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Any:
        return self._reply("charge", cost_usd)


class Flaky(Exception):
    """What the calls in these tests fail with."""


def fail() -> None:
    raise Flaky("no luck")


# --- the pipeline by itself -----------------------------------------------------------------------------


def test_an_empty_pipeline_allows() -> None:
    """Without hooks everything is allowed, but an error is answered with the policy, HALT by default."""
    pipeline = ShieldPipeline()
    assert pipeline.before_llm_call(CTX) is Decision.ALLOW
    assert pipeline.before_tool_call(CTX) is Decision.ALLOW
    assert pipeline.before_egress(CTX, "http://x", "GET") is Decision.ALLOW
    assert pipeline.before_charge(CTX, 1.0) is Decision.ALLOW
    assert pipeline.on_error(CTX, Flaky()) is Decision.HALT
    assert ShieldPipeline(on_error_policy=Decision.RETRY).on_error(CTX, Flaky()) is Decision.RETRY
    assert [event.event_type for event in pipeline.get_events()] == ["on_error_policy"]


def test_a_retry_hook_that_defers_allows() -> None:
    """Once there is a retry hook, the policy is not asked."""
    assert ShieldPipeline(retry=Says(None)).on_error(CTX, Flaky()) is Decision.ALLOW


def test_hooks_are_asked_in_order_until_one_blocks() -> None:
    """The first that blocks decides; those after it are not asked."""
    first, second, third = Says(None), Says(Decision.QUARANTINE), Says(Decision.HALT)
    pipeline = ShieldPipeline(pre_dispatch=[first, second, third])
    assert pipeline.before_llm_call(CTX) is Decision.QUARANTINE
    assert (len(first.asked), len(second.asked), third.asked) == (1, 1, [])
    (event,) = pipeline.get_events()
    assert (event.decision, event.hook, event.request_id) == (Decision.QUARANTINE, "Says", "r")


def test_degrading_hooks_add_up_to_one_plan() -> None:
    """Each point of the plan is the narrowest that was asked for."""
    pipeline = ShieldPipeline(
        [
            Says(DegradePlan(model="small", trim_to_tokens=500, delay_ms=10)),
            Says(Decision.DEGRADE),
            Says(DegradePlan(trim_to_tokens=900, max_output_tokens=50, delay_ms=40)),
        ]
    )
    verdict = pipeline.judge("before_llm_call", CTX)
    assert verdict.decision is Decision.DEGRADE
    assert verdict.plan is not None
    plan = verdict.plan
    assert (plan.model, plan.trim_to_tokens, plan.max_output_tokens, plan.delay_ms) == ("small", 500, 50, 40)
    assert not verdict.is_blocking


@pytest.mark.parametrize(("mode", "decision"), [("closed", Decision.HALT), ("open", Decision.ALLOW)])
@pytest.mark.parametrize("answer", [Flaky("broken hook"), "HALT", True], ids=["raises", "string", "bool"])
def test_a_broken_hook_fails_as_configured(mode: Any, decision: Decision, answer: Any) -> None:
    """A hook that raises, or answers nonsense, fails closed or open, and is recorded either way."""
    pipeline = ShieldPipeline(Says(answer), on_hook_failure=mode)
    assert pipeline.before_llm_call(CTX) is decision
    (event,) = pipeline.get_events()
    assert (event.event_type, event.decision, event.hook) == ("hook_failed", decision, "Says")


def test_a_hook_must_fit_its_boundary() -> None:
    """Installing an object without the boundary's method is refused, naming the argument."""
    with pytest.raises(UsageError, match="egress="):
        ShieldPipeline(egress=SafetyEvent("x", Decision.HALT, "", "y"))
    with pytest.raises(UsageError, match="none of the hook methods"):
        ShieldPipeline(hooks=[object()])


def test_events_are_capped() -> None:
    """Only the newest thousand events are kept."""
    pipeline = ShieldPipeline(Says(Decision.HALT))
    for number in range(1005):
        pipeline.before_llm_call(ToolCallContext(request_id=str(number)))
    events = pipeline.get_events()
    assert (len(events), events[0].request_id) == (1000, "5")


# --- the pipeline in a chain ----------------------------------------------------------------------------


def test_a_hook_is_told_who_calls_what(config: Config) -> None:
    """The context names the request, the user, the node, the operation, the model, the cost and the chain."""
    hook = Says()
    metadata = ChainMetadata("req", "chain", "org", "team", "svc", "user", "m", {"env": "prod"})
    prices = StaticPrices({"m": Price(1.0, 1.0)})
    ctx = ExecutionContext(config(), ShieldPipeline(hook), metadata, prices=prices)
    outcome = ctx.call_llm(
        lambda: None, WrapOptions("op", cost_estimate_hint=0.5, input_tokens=7, max_output_tokens=9)
    )
    told = hook.asked[0][1]
    assert (told.request_id, told.user_id, told.session_id) == ("req", "user", outcome.node.node_id)
    assert (told.tool_name, told.model, told.tokens_in, told.tokens_out) == ("op", "m", 7, 9)
    assert told.cost_usd == 0.5
    expected = {"chain_id": "chain", "org_id": "org", "team": "team", "service": "svc", "env": "prod"}
    assert expected.items() <= told.metadata.items()


@pytest.mark.parametrize("decision", [Decision.HALT, Decision.QUARANTINE, Decision.QUEUE, Decision.RETRY])
def test_a_blocking_hook_forwards_its_decision(config: Config, decision: Decision) -> None:
    """The call is not made, is no step, and its decision is the hook's; the event is among the chain's."""
    ran: list[int] = []
    ctx = ExecutionContext(config(), ShieldPipeline(pre_dispatch=Says(decision)))
    assert ctx.wrap_llm_call(lambda: ran.append(1)) is decision
    snapshot = ctx.get_snapshot()
    assert (ran, snapshot.step_count, snapshot.nodes[0].status) == ([], 0, "halted")
    assert [event.hook for event in snapshot.events] == ["Says"]
    assert ctx.wrap_tool_call(lambda: ran.append(1)) is Decision.ALLOW


def test_the_shield_is_not_asked_past_a_ceiling(config: Config) -> None:
    """A call that a ceiling forbids never reaches the hooks."""
    hook = Says()
    ctx = ExecutionContext(config(max_steps=1), ShieldPipeline(hook))
    ctx.wrap_llm_call(lambda: None)
    ctx.wrap_llm_call(lambda: None)
    assert len(hook.asked) == 1


def test_a_degraded_call_goes_through_with_its_plan(config: Config) -> None:
    """DEGRADE does not block: the function runs, sees the plan, and the decision says so."""
    plan = DegradePlan(model="small", trim_to_tokens=100)
    ctx = ExecutionContext(config(), ShieldPipeline(Says(plan)))
    hinted = WrapOptions(cost_estimate_hint=0.1)
    outcome = ctx.call_llm(lambda: current_call().plan, hinted)  # type: ignore[union-attr]  # inside a call there is one
    assert outcome.ok
    assert (outcome.decision, outcome.node.status) == (Decision.DEGRADE, "ok")
    assert outcome.value is not None
    assert (outcome.value.model, outcome.value.trim_to_tokens) == ("small", 100)
    assert outcome.plan == outcome.value


def test_a_degraded_call_reserves_what_the_smaller_model_costs(config: Config) -> None:
    """The reservation is made for the plan, not for what was asked first."""
    charged = Says()
    prices = StaticPrices({"big": Price(100.0, 100.0), "small": Price(1.0, 1.0)})
    pipeline = ShieldPipeline(Says(DegradePlan(model="small")), budget=charged)
    ctx = ExecutionContext(config(), pipeline, prices=prices)
    ctx.wrap_llm_call(lambda: None, WrapOptions(model="big", input_tokens=0, max_output_tokens=1_000_000))
    assert charged.asked == [("charge", 1.0)]
    assert ctx.get_snapshot().cost_usd_accumulated == 1.0


def test_a_delay_is_waited_out_on_the_chains_clock(config: Config, clock: FakeClock) -> None:
    """The containment waits for as long as the plan says before it dispatches."""
    ctx = ExecutionContext(config(), ShieldPipeline(Says(DegradePlan(delay_ms=2000))), clock=clock)
    started: list[float] = []
    thread = threading.Thread(target=lambda: ctx.wrap_llm_call(lambda: started.append(clock.monotonic())))
    thread.start()
    clock.wait_for_timers(1)
    clock.advance(1.9)
    assert started == []
    clock.advance(0.1)
    thread.join(60)
    assert started == [2.0]


async def test_a_delay_ends_with_the_chain(config: Config, clock: FakeClock) -> None:
    """A call that waits out a delay when the chain is aborted is refused, and never made."""
    ctx = ExecutionContext(config(), ShieldPipeline(Says(DegradePlan(delay_ms=2000))), clock=clock)
    thread = threading.Thread(target=lambda: (clock.wait_for_timers(1), ctx.abort("stop")))
    thread.start()
    outcome = await ctx.acall_llm(lambda: "never")
    thread.join(60)
    assert (outcome.was_dispatched, outcome.stop_reason) == (False, "aborted")


def test_a_charge_hook_judges_the_reservation_before_the_call(config: Config) -> None:
    """A refused charge keeps the call from being made."""
    ran: list[int] = []
    ctx = ExecutionContext(config(), ShieldPipeline(budget=Says(Decision.HALT)))
    assert ctx.wrap_llm_call(lambda: ran.append(1), WrapOptions(cost_estimate_hint=0.5)) is Decision.HALT
    assert ran == []


def test_a_charge_hook_sees_every_dollar_once(config: Config) -> None:
    """It judges the reservation, and afterwards only what the real cost exceeds it by."""
    hook = Says()
    ctx = ExecutionContext(config(), ShieldPipeline(budget=hook))
    ctx.wrap_llm_call(lambda: "x", WrapOptions(cost_estimate_hint=0.25, cost_of=lambda _: 0.75))
    ctx.wrap_llm_call(lambda: "x", WrapOptions(cost_estimate_hint=0.5, cost_of=lambda _: 0.25))
    assert hook.asked == [("charge", 0.25), ("charge", 0.5), ("charge", 0.5)]


def test_a_charge_refused_afterwards_is_settled_and_halts_the_next_call(config: Config) -> None:
    """Spent money is spent: it is booked whatever the hook says, and the refusal halts what follows."""

    class NoMore:
        def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Decision | None:
            return Decision.HALT if cost_usd > 1 else None

    ctx = ExecutionContext(config(), ShieldPipeline(budget=NoMore()))
    dear = ctx.call_llm(lambda: "x", WrapOptions(cost_of=lambda _: 5.0))
    assert (dear.decision, dear.node.cost_usd) == (Decision.ALLOW, 5.0)
    outcome = ctx.call_llm(lambda: "never")
    assert (outcome.decision, outcome.stop_reason) == (Decision.HALT, "budget_exceeded")


def test_the_shield_answers_errors(config: Config) -> None:
    """A retry hook's decision is returned; without a hook the policy is; a deferring hook leaves RETRY."""
    for pipeline, expected in [
        (ShieldPipeline(retry=Says(Decision.QUARANTINE)), Decision.QUARANTINE),
        (ShieldPipeline(), Decision.HALT),
        (ShieldPipeline(retry=Says(None)), Decision.RETRY),
        (ShieldPipeline(on_error_policy=Decision.RETRY), Decision.RETRY),
    ]:
        ctx = ExecutionContext(config(), pipeline)
        assert ctx.wrap_llm_call(fail) is expected
        assert ctx.get_snapshot().retries_used == 1


def test_a_retry_hook_can_slow_retries_down(config: Config, clock: FakeClock) -> None:
    """A plan with a delay as the answer to an error is waited out before the next attempt."""
    ctx = ExecutionContext(config(), ShieldPipeline(retry=Says(DegradePlan(delay_ms=500))), clock=clock)
    at: list[float] = []

    def once() -> None:
        at.append(clock.monotonic())
        if len(at) == 1:
            raise Flaky

    options = WrapOptions(retry_policy_override=1)
    thread = threading.Thread(target=lambda: ctx.wrap_llm_call(once, options))
    thread.start()
    clock.wait_for_timers(1)
    clock.advance(0.5)
    thread.join(60)
    assert at == [0.0, 0.5]


def test_egress_is_checked_in_the_chain(config: Config) -> None:
    """Requests go to allowed hosts only; a blocked one is among the chain's events."""
    hook = EgressBoundaryHook(["*.example.com", "api.test"], methods=["GET", "post"])
    ctx = ExecutionContext(config(), ShieldPipeline(egress=hook))
    assert ctx.check_egress("https://a.example.com/x") is Decision.ALLOW
    assert ctx.check_egress("https://API.TEST:8443/x", "POST") is Decision.ALLOW
    assert ctx.check_egress("https://api.test/x", "DELETE") is Decision.HALT
    assert ctx.check_egress("https://example.com.evil.org/") is Decision.HALT
    assert ctx.check_egress("not a url") is Decision.HALT
    assert len(ctx.get_snapshot().events) == 3


def test_a_pipeline_is_shared_without_mixing_events(config: Config) -> None:
    """Two chains with one pipeline each see only their own events."""
    pipeline = ShieldPipeline(Says(Decision.HALT))
    one, other = ExecutionContext(config(), pipeline), ExecutionContext(config(), pipeline)
    one.wrap_llm_call(lambda: None)
    assert (len(one.get_snapshot().events), len(other.get_snapshot().events)) == (1, 0)


def test_a_halt_by_default_has_its_event(config: Config) -> None:
    """By `on_error_policy`, and because a call's own retries are used up: each says why, at its node."""

    def fail() -> None:
        raise OSError("no")

    shielded = ExecutionContext(config(), ShieldPipeline())
    halted = shielded.call_llm(fail)
    retried = ExecutionContext(config())
    given_up = retried.call_llm(fail, WrapOptions("ask", retry_policy_override=1))
    for context, outcome, kind in (
        (shielded, halted, "on_error_policy"),
        (retried, given_up, "call_retries_exhausted"),
    ):
        assert outcome.decision is Decision.HALT
        (event,) = context.get_snapshot().events
        assert (event.event_type, event.decision) == (kind, Decision.HALT)
        assert "OSError: no" in event.reason
        assert event.metadata["node_id"] == outcome.node.node_id


# --- the hooks ------------------------------------------------------------------------------------------


def test_a_window_degrades_and_then_halts(clock: FakeClock) -> None:
    """From 80 % of the calls on it degrades; at 100 % it halts; and it empties as time passes."""
    hook = BudgetWindowHook(10, window_seconds=60, clock=clock)
    answers = [ShieldPipeline(hook).before_llm_call(CTX) for _ in range(12)]
    assert answers == [Decision.ALLOW] * 8 + [Decision.DEGRADE] * 2 + [Decision.HALT] * 2
    clock.advance(59.9)
    assert hook.before_llm_call(CTX) is Decision.HALT
    clock.advance(0.1)
    assert hook.before_llm_call(CTX) is None


def test_blocked_attempts_do_not_fill_the_window(config: Config, clock: FakeClock) -> None:
    """Calls that the window itself, a later hook or an open circuit blocked leave no trace in it."""
    window = BudgetWindowHook(3, degrade_threshold=1.0, clock=clock)
    later = Says(Decision.HALT)
    breaker = CircuitBreaker(1, clock=clock)
    ctx = ExecutionContext(config(), ShieldPipeline([window, later]), circuit_breaker=breaker, clock=clock)
    for _ in range(10):
        ctx.wrap_llm_call(lambda: None)
    later.answer = None
    breaker.record_failure()
    for _ in range(10):
        assert ctx.wrap_llm_call(lambda: None) is Decision.HALT
    breaker.reset()
    assert [ctx.wrap_llm_call(lambda: None) for _ in range(4)] == [Decision.ALLOW] * 3 + [Decision.HALT]


def test_a_place_that_is_given_back_is_ones_own(clock: FakeClock) -> None:
    """A call that was admitted long ago and is not made frees its own place, not that of a newer call."""
    window = BudgetWindowHook(2, window_seconds=60, degrade_threshold=1.0, clock=clock)
    old, new = ToolCallContext("r", session_id="old"), ToolCallContext("r", session_id="new")
    assert window.before_llm_call(old) is None
    clock.advance(50)
    assert window.before_llm_call(new) is None
    window.release(old)
    clock.advance(20)
    # The newer call was made 20 s ago: one place is left, not two.
    answers = [window.before_llm_call(ToolCallContext("r", session_id=f"{n}")) for n in range(2)]
    assert answers == [None, Decision.HALT]


def test_a_delayed_call_keeps_its_place_and_counts_from_when_it_is_made(
    config: Config, clock: FakeClock
) -> None:
    """At most `max_calls` in any window, also if a plan makes a call wait for longer than the window."""
    window = BudgetWindowHook(1, window_seconds=10, degrade_threshold=1.0, clock=clock)
    delay = Says(DegradePlan(delay_ms=15_000))
    ctx = ExecutionContext(config(), ShieldPipeline([window, delay]), clock=clock)
    other = ExecutionContext(config(), ShieldPipeline(window), clock=clock)
    made: list[tuple[str, float]] = []

    def call(name: str) -> None:
        made.append((name, clock.monotonic()))

    waiting = threading.Thread(target=ctx.wrap_llm_call, args=[lambda: call("delayed")])
    waiting.start()
    clock.wait_for_timers(1)
    began = clock.monotonic()
    clock.advance(12)  # beyond the window, and still waiting: its place is held
    assert other.wrap_llm_call(lambda: call("too early")) is Decision.HALT
    clock.advance(3)
    waiting.join(30)
    clock.advance(9)
    assert other.wrap_llm_call(lambda: call("too early")) is Decision.HALT
    clock.advance(1)
    assert other.wrap_llm_call(lambda: call("next")) is Decision.ALLOW
    assert [(name, at - began) for name, at in made] == [("delayed", 15), ("next", 25)]


def test_a_window_is_exact_among_threads(at_once: Any) -> None:
    """64 threads against a window of 10 let 10 through."""
    hook = BudgetWindowHook(10, degrade_threshold=1.0)
    answers = at_once(64, lambda _: hook.before_llm_call(CTX))
    assert answers.count(None) == 10


def test_safe_mode_stops_tools_and_calls_alike(config: Config) -> None:
    """Wherever it was mentioned, safe mode stops calls, tools, requests and retries, until it is off."""
    hook = SafeModeHook()
    ctx = ExecutionContext(config(), ShieldPipeline(pre_dispatch=hook))
    assert ctx.wrap_llm_call(lambda: None) is Decision.HALT
    assert ctx.wrap_tool_call(lambda: None) is Decision.HALT
    assert ctx.check_egress("http://x.test") is Decision.HALT
    hook.disable()
    assert ctx.wrap_tool_call(lambda: None) is Decision.ALLOW

    def break_down() -> None:
        hook.enable()
        raise Flaky

    assert ctx.wrap_tool_call(break_down) is Decision.HALT
    assert hook.enabled


def test_a_token_budget_counts_what_calls_use(config: Config) -> None:
    """Usage counts, or what was asked for if it is not known; a failed call's does not."""
    hook = TokenBudgetHook(max_output_tokens=100, max_total_tokens=1000)
    ctx = ExecutionContext(config(), ShieldPipeline(hooks=[hook]))
    options = WrapOptions(max_output_tokens=60, input_tokens=10)
    ctx.wrap_llm_call(lambda: {"usage": {"input_tokens": 10, "output_tokens": 40}}, options)
    assert (hook.output_total, hook.input_total) == (40, 10)
    assert ctx.wrap_llm_call(fail, options) is Decision.HALT  # the pipeline's policy for errors
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(max_output_tokens=61)) is Decision.HALT
    assert ctx.wrap_llm_call(lambda: None, options) is Decision.ALLOW
    assert hook.output_total == 100
    assert ctx.wrap_llm_call(lambda: None) is Decision.HALT


def test_a_token_budget_degrades_near_its_end() -> None:
    """From 80 % on, the plan allows the tokens that are left."""
    hook = TokenBudgetHook(max_output_tokens=100)
    hook.record_usage(output_tokens=85)
    assert hook.before_llm_call(CTX) == DegradePlan(max_output_tokens=15)


def test_long_inputs_are_compressed_and_far_too_long_ones_halted() -> None:
    """The plan asks for the threshold."""
    hook = InputCompressionHook(100, 200)
    assert hook.before_llm_call(ToolCallContext("r", tokens_in=99)) is None
    plan = hook.before_llm_call(ToolCallContext("r", tokens_in=100))
    assert isinstance(plan, DegradePlan)
    assert plan.trim_to_tokens == 100
    assert hook.before_llm_call(ToolCallContext("r", tokens_in=200)) is Decision.HALT
    with pytest.raises(UsageError, match="halt_threshold_tokens"):
        InputCompressionHook(100, 50)


def test_nights_and_weekends_get_a_smaller_window(clock: FakeClock) -> None:
    """The share goes by local time: work, off hours, weekend."""
    policy = TimeAwarePolicy(weekend_multiplier=0.5, offhour_multiplier=0.8)
    assert policy.get_multiplier(datetime(2026, 11, 11, 12, tzinfo=UTC)) == 1.0
    assert policy.get_multiplier(datetime(2026, 11, 11, 18, tzinfo=UTC)) == 0.8
    assert policy.get_multiplier(datetime(2026, 11, 14, 12, tzinfo=UTC)) == 0.5
    night = FakeClock(datetime(2026, 11, 11, 3, tzinfo=UTC))
    hook = BudgetWindowHook(
        10, degrade_threshold=1.0, clock=night, schedule=TimeAwarePolicy(offhour_multiplier=0.8, clock=night)
    )
    assert [hook.before_llm_call(CTX) for _ in range(9)].count(None) == 8
    with pytest.raises(UsageError, match="work_end"):
        TimeAwarePolicy(work_start=time(18), work_end=time(9))


def test_an_adaptive_ceiling_tightens_and_loosens(clock: FakeClock) -> None:
    """Three incidents in the window tighten it step by step to a floor; a quiet window loosens it again."""
    hook = AdaptiveBudgetHook(100, window_seconds=60, clock=clock)
    incident = SafetyEvent("budget_exceeded", Decision.HALT, "", "ExecutionContext")
    hook.feed_events([incident, incident, SafetyEvent("other", Decision.HALT, "", "x")])
    assert hook.adjust() == 100
    hook.feed_events([incident])
    assert [hook.adjust() for _ in range(3)] == [90, 80, 80]
    clock.advance(61)
    assert hook.adjust() == 85
    assert [hook.before_llm_call(CTX) for _ in range(86)].count(None) == 85


@pytest.mark.parametrize(
    ("spent", "plan"),
    [
        (0.79, None),
        (0.80, ("small", None, 0)),
        (0.85, ("small", 4000, 0)),
        (0.90, ("small", 4000, 1000)),
    ],
)
def test_the_ladder_goes_down_rung_by_rung(config: Config, spent: float, plan: Any) -> None:
    """At 80, 85 and 90 % of the money: a smaller model, a shorter context, a slower pace."""
    ladder = DegradationLadder(DegradationConfig(model_map={"big": "small"}))
    seen: list[DegradePlan | None] = []

    class Watch:
        def before_llm_call(self, ctx: ToolCallContext) -> None:
            answer = ladder.before_llm_call(ctx)
            assert answer is None or isinstance(answer, DegradePlan)
            seen.append(answer)

    prices = StaticPrices({"big": Price(1.0, 1.0)})
    ctx = ExecutionContext(config(max_cost_usd=1.0), ShieldPipeline(Watch()), prices=prices)
    ctx.wrap_tool_call(lambda: None, WrapOptions(cost_estimate_hint=spent))
    options = WrapOptions(model="big", cost_estimate_hint=0.01)
    ctx.wrap_llm_call(lambda: CallUsage(), options)
    got = seen[0]
    assert plan == (None if got is None else (got.model, got.trim_to_tokens, got.delay_ms))


def test_a_hook_that_passes_requests_on_is_told_what_the_one_behind_it_would_be() -> None:
    class Behind:
        def __init__(self) -> None:
            self.told: list[object] = []

        def after_llm_call(self, ctx: ToolCallContext, response: object) -> None:
            self.told.append(response)

    behind = Behind()
    hook: Any = PassesOn(behind)
    ExecutionContext(Limits(max_steps=5), ShieldPipeline(hooks=[hook])).call_llm(lambda: "made")
    assert behind.told == ["made"]


# --- hooks that hang ----------------------------------------------------------------------------------


class Hanging:
    """A hook that does not come back until the test lets it."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def before_llm_call(self, ctx: ToolCallContext) -> Decision | None:
        self.let_go.wait(30)
        return None

    after_llm_call = on_error = before_charge = lambda self, ctx, *rest: self.before_llm_call(ctx)


@pytest.mark.parametrize(("on_failure", "made"), [("closed", False), ("open", True)])
@pytest.mark.parametrize("boundary", ["pre_dispatch", "budget"])
def test_a_hook_that_hangs_is_a_hook_that_failed(boundary: str, on_failure: Any, made: bool) -> None:
    """Its caller goes on after the time that it has, closed or open as configured; it is recorded."""
    hook = Hanging()
    given: Any = {boundary: hook}
    shield = ShieldPipeline(**given, on_hook_failure=on_failure, hook_timeout_ms=20)
    ctx = ExecutionContext(Limits(max_steps=5), shield)
    outcome = ctx.call_llm(lambda: "made")
    hook.let_go.set()
    assert outcome.ok is made
    failures = [event for event in ctx.get_snapshot().events if event.event_type == "hook_failed"]
    assert failures
    assert "has not answered within 20 ms" in failures[0].reason


def test_a_retry_hook_that_hangs_does_not_hold_up_the_failure() -> None:
    """The call failed, and its caller hears of it."""
    hook = Hanging()
    ctx = ExecutionContext(Limits(max_steps=5), ShieldPipeline(retry=hook, hook_timeout_ms=20))

    def fail() -> None:
        raise OSError("no")

    outcome = ctx.call_llm(fail)
    hook.let_go.set()
    assert isinstance(outcome.error, OSError)
    assert outcome.decision is Decision.HALT


def test_the_time_of_a_hook_is_on_the_shields_clock() -> None:
    """A clock that stands still gives a hook all the time; a second later it has had it."""
    clock = FakeClock()
    hook = Hanging()

    class Slow:
        is_slow = False

        def before_llm_call(self, ctx: ToolCallContext) -> Decision:
            if self.is_slow:
                clock.advance(1)
                hook.let_go.wait(30)
            return Decision.ALLOW

    slow = Slow()
    shield = ShieldPipeline(slow, hook_timeout_ms=1000, clock=clock)
    ctx = ExecutionContext(Limits(max_steps=5), shield, clock=clock)
    assert ctx.call_llm(lambda: None).ok
    slow.is_slow = True
    assert ctx.call_llm(lambda: None).decision is Decision.HALT
    hook.let_go.set()


@pytest.mark.parametrize("wrong", [0, -5, 1.5, True, "20"])
def test_a_hooks_time_is_a_positive_whole_number(wrong: Any) -> None:
    with pytest.raises(UsageError, match="hook_timeout_ms"):
        ShieldPipeline(hook_timeout_ms=wrong)


def test_a_request_that_may_not_leave_halts_its_call() -> None:
    """The call is halted, not failed: no retry is taken, and its breaker hears nothing about the provider."""
    breaker = CircuitBreaker(1)
    shield = ShieldPipeline(egress=EgressBoundaryHook(["api.example.com"]))
    ctx = ExecutionContext(Limits(max_retries=1), shield, circuit_breaker=breaker)
    asked: list[str] = []

    def handler(url: str) -> str:
        call = current_call()
        assert call is not None
        call.check_egress(url, "POST")
        asked.append(url)
        return "sent"

    assert ctx.call_tool(lambda: handler("https://api.example.com/v1")).value == "sent"
    outcome = ctx.call_tool(lambda: handler("https://elsewhere.example/"))
    assert (outcome.node.status, outcome.decision) == ("halted", Decision.HALT)
    assert isinstance(outcome.error, CallRefused)
    assert "not an allowed host" in outcome.detail
    assert (asked, ctx.get_snapshot().retries_used) == (["https://api.example.com/v1"], 0)
    assert breaker.failure_count == 0
    assert ctx.call_tool(lambda: "goes on").ok


@pytest.mark.parametrize("says", [0.02, "nothing"])
def test_a_call_that_is_degraded_reserves_what_it_then_costs(says: Any) -> None:
    """0.05 USD are left: too little for the call as it was asked for, enough for a smaller one."""

    class Smaller:
        def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan:
            return DegradePlan(model="small")

    ctx = ExecutionContext(Limits(max_cost_usd=0.05), ShieldPipeline(Smaller()))
    options = WrapOptions(
        "ask",
        cost_estimate_hint=0.2,
        estimate_degraded=None if says == "nothing" else lambda plan: says if plan.model == "small" else 9.0,
    )
    outcome = ctx.call_llm(lambda: "made", options)
    if says == 0.02:
        assert (outcome.decision, outcome.node.cost_usd) == (Decision.DEGRADE, 0.02)
    else:
        assert outcome.stop_reason == "budget_exceeded"


def test_a_refused_dear_call_leaves_no_trace_in_the_window() -> None:
    """The shield was asked, because it might have made the call cheaper; it takes its count back."""
    window = BudgetWindowHook(max_calls=2, degrade_threshold=1.0)
    ctx = ExecutionContext(Limits(max_cost_usd=0.05), ShieldPipeline(window))
    for _ in range(5):
        refused = ctx.call_llm(lambda: None, WrapOptions(cost_estimate_hint=1.0))
        assert refused.stop_reason == "budget_exceeded"
    assert ctx.call_llm(lambda: None, WrapOptions(cost_estimate_hint=0.01)).ok

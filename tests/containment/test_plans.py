"""Plans to make a call with less: who may ask for one, what they may say, and what it then costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from treenail.containment import (
    CallUsage,
    CircuitBreakers,
    Decision,
    DegradePlan,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    Price,
    ShieldPipeline,
    StaticPrices,
    ToolCallContext,
    WrapOptions,
    current_call,
)
from treenail.containment.breaker import CircuitState
from treenail.errors import UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]

# 1,000 tokens of output cost a cent with the big model, and a tenth of it with the small one.
PRICES = StaticPrices({"big": Price(0.0, 10.0), "small": Price(0.0, 1.0)})
OPTIONS = WrapOptions("ask", model="big", input_tokens=0, max_output_tokens=1000)
SMALL = DegradePlan(model="small")


class Always:
    """Answers every question of the boundaries that it is put at with one plan."""

    def __init__(self, plan: DegradePlan | None) -> None:
        self.plan = plan
        self.charges: list[float] = []

    def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan | None:
        return self.plan

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> DegradePlan | None:
        self.charges.append(cost_usd)
        return self.plan

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> DegradePlan | None:
        return self.plan


def model_now() -> str | None:
    """The model that the plan of the present attempt names."""
    call = current_call()
    assert call is not None
    return None if call.plan is None else call.plan.model


# --- every boundary --------------------------------------------------------------------------------------


def test_a_charge_hook_degrades_the_call_that_it_judges(config: Config) -> None:
    """It sees what the call as asked for would cost; what is reserved is what the smaller model costs."""
    hook = Always(SMALL)
    ctx = ExecutionContext(config(), ShieldPipeline(budget=hook), prices=PRICES)
    seen: list[tuple[str | None, float]] = []
    outcome = ctx.call_llm(lambda: seen.append((model_now(), ctx.get_snapshot().cost_usd_reserved)), OPTIONS)
    assert outcome.decision is Decision.DEGRADE
    assert (seen, hook.charges) == ([("small", 0.001)], [0.01])


def test_a_charge_hooks_delay_is_waited(config: Config, clock: FakeClock) -> None:
    """Before the dispatch, like any other plan's."""
    shield = ShieldPipeline(budget=Always(DegradePlan(delay_ms=2000)))
    ctx = ExecutionContext(config(), shield, clock=clock)
    started: list[float] = []
    thread = threading.Thread(target=lambda: ctx.wrap_llm_call(lambda: started.append(clock.monotonic())))
    thread.start()
    clock.wait_for_timers(1)
    clock.advance(2.0)
    thread.join(60)
    assert started == [2.0]


def test_what_a_charge_hook_makes_affordable_is_made() -> None:
    """Two tenths of a cent are left: too little for the big model, enough for two calls of the small one."""
    shield = ShieldPipeline(budget=Always(SMALL))
    ctx = ExecutionContext(Limits(max_cost_usd=0.002), shield, prices=PRICES)
    decisions = [ctx.wrap_llm_call(lambda: CallUsage(0, 1000), OPTIONS) for _ in range(3)]
    assert decisions == [Decision.DEGRADE, Decision.DEGRADE, Decision.HALT]
    assert ctx.get_snapshot().cost_usd_accumulated == 0.002


def test_an_error_hooks_plan_is_the_next_attempts(config: Config) -> None:
    """The containment itself tries again, with less and at the smaller price."""
    ctx = ExecutionContext(config(), ShieldPipeline(retry=Always(SMALL)), prices=PRICES)
    models: list[str | None] = []

    def callee() -> CallUsage:
        models.append(model_now())
        if len(models) == 1:
            raise OSError("no")
        return CallUsage(0, 1000)

    retried = WrapOptions("ask", model="big", input_tokens=0, max_output_tokens=1000, retry_policy_override=1)
    outcome = ctx.call_llm(callee, retried)
    assert (outcome.decision, models) == (Decision.DEGRADE, [None, "small"])
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.01 + 0.001)


def test_what_was_made_less_for_one_attempt_stays_so_for_the_next(config: Config, clock: FakeClock) -> None:
    """A retry keeps the plan of the attempt before; its price and its circuit are those of the plan's model.

    The delay is not kept: it was for that attempt.
    """
    hook = Always(None)
    breakers = CircuitBreakers(2, clock=clock)
    ctx = ExecutionContext(
        config(), ShieldPipeline(retry=hook), prices=PRICES, circuit_breaker=breakers, clock=clock
    )
    models: list[str | None] = []
    plans = iter((None, DegradePlan(model="small", delay_ms=3000), None))

    def callee() -> CallUsage:
        models.append(model_now())
        if len(models) < 4:
            hook.plan = next(plans)
            raise OSError("no")
        return CallUsage(0, 1000)

    outcome = ctx.call_llm(callee, replace(OPTIONS, will_retry=True))
    while outcome.decision is Decision.RETRY:
        outcome = ctx.call_llm(callee, replace(OPTIONS, will_retry=True, retry_of=outcome))
    assert (outcome.decision, models) == (Decision.DEGRADE, [None, None, "small", "small"])
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(0.01 + 0.01 + 0.001 + 0.001)
    assert breakers.get("big").state is CircuitState.OPEN
    assert breakers.get("small").state is CircuitState.CLOSED


def test_a_reason_is_said_once() -> None:
    """However many hooks, or attempts, say the same."""
    plan = DegradePlan(model="small", reason="late")
    assert plan.merged(plan).reason == "late"
    assert plan.merged(DegradePlan(reason="dear")).reason == "late; dear"


# --- what a plan may say -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["delay_ms", "max_output_tokens", "trim_to_tokens"])
@pytest.mark.parametrize("value", [-1, True, 1.5, float("nan"), float("inf"), "1"])
def test_a_senseless_plan_is_refused_by_name(field: str, value: Any) -> None:
    """Numbers of the right type only; nobody waits for minus five milliseconds."""
    with pytest.raises(UsageError, match=f"DegradePlan.{field}"):
        DegradePlan(**{field: value})


@pytest.mark.parametrize("name", ["", 3])
def test_a_plans_model_is_a_name(name: Any) -> None:
    """And not the empty one."""
    with pytest.raises(UsageError, match=r"DegradePlan\.model"):
        DegradePlan(model=name)


def test_a_hook_that_makes_a_senseless_plan_has_failed(config: Config) -> None:
    """It is answered as configured, and recorded; nothing of it reaches the call."""

    class Confused:
        def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan:
            return DegradePlan(delay_ms=-5)

    ctx = ExecutionContext(config(), ShieldPipeline(Confused(), on_hook_failure="open"))
    assert ctx.wrap_llm_call(lambda: None) is Decision.ALLOW
    assert [event.event_type for event in ctx.get_snapshot().events] == ["hook_failed"]


class Unspeakable:
    """Blocks, and breaks when it is asked for its name, its reason or the reason for its stop."""

    stop_reason = "because"

    @property
    def last_reason(self) -> str:
        raise OSError("gone")

    @property
    def event_type(self) -> str:
        raise OSError("gone")

    def before_llm_call(self, ctx: ToolCallContext) -> Decision:
        return Decision.HALT


def test_a_hook_that_cannot_say_why_blocks_all_the_same(config: Config) -> None:
    """Its decision stands, and its own word for a stop is none of the eight."""
    ctx = ExecutionContext(config(), ShieldPipeline(Unspeakable()))
    outcome = ctx.call_llm(lambda: "never")
    assert (outcome.decision, outcome.was_dispatched, outcome.stop_reason) == (Decision.HALT, False, None)
    assert [event.hook for event in ctx.get_snapshot().events] == ["Unspeakable"]
    assert ctx.stop_reason is None


# --- what it costs -----------------------------------------------------------------------------------------


def asked(says: float | None, *, hint: float = 0.01, is_free: bool = False) -> WrapOptions:
    """A call of somebody who knows the big model's price, and may or may not know the small one's."""
    return WrapOptions(
        "ask",
        model="big",
        cost_estimate_hint=hint,
        is_free=is_free,
        input_tokens=0,
        max_output_tokens=1000,
        estimate_degraded=lambda plan: says,
    )


def test_a_degraded_model_without_a_price_halts_under_a_ceiling() -> None:
    """That the big model's price is known says nothing about the other one's."""
    ctx = ExecutionContext(Limits(max_cost_usd=1.0), ShieldPipeline(Always(SMALL)), prices=StaticPrices({}))
    outcome = ctx.call_llm(lambda: "never", asked(None))
    assert (outcome.decision, outcome.was_dispatched) == (Decision.HALT, False)
    assert [event.event_type for event in ctx.get_snapshot().events][-1] == "price_unknown"


def test_a_price_that_the_caller_does_not_know_the_table_may() -> None:
    """The table's price is reserved and charged."""
    ctx = ExecutionContext(Limits(max_cost_usd=0.001), ShieldPipeline(Always(SMALL)), prices=PRICES)
    outcome = ctx.call_llm(lambda: CallUsage(0, 1000), asked(None))
    assert (outcome.decision, outcome.node.cost_usd) == (Decision.DEGRADE, 0.001)


def test_the_same_model_with_less_keeps_its_hint() -> None:
    """A caller who cannot say what a shorter answer costs has said what a long one costs at most."""
    shorter = ShieldPipeline(Always(DegradePlan(max_output_tokens=10)))
    ctx = ExecutionContext(Limits(max_cost_usd=1.0), shorter, prices=StaticPrices({}))
    outcome = ctx.call_llm(lambda: "made", asked(None))
    assert (outcome.decision, outcome.node.cost_usd) == (Decision.DEGRADE, 0.01)


@pytest.mark.parametrize("says", [0.001, None])
def test_what_stands_in_for_a_free_model_is_not_free(says: float | None) -> None:
    """A local model costs nothing; the one that is asked instead is reserved and charged."""
    ctx = ExecutionContext(Limits(max_cost_usd=0.0005), ShieldPipeline(Always(SMALL)), prices=PRICES)
    outcome = ctx.call_llm(lambda: "never", asked(says, hint=0.0, is_free=True))
    assert (outcome.stop_reason, outcome.was_dispatched) == ("budget_exceeded", False)

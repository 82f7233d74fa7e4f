"""A degraded request is really made with less, and counted for the model that was really asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treenail.containment import DegradePlan, Price, StaticPrices
from treenail.conversation import ReasoningPart, ReplayItem
from treenail.providers import ModelRequest, Provider, ReasoningBlock, UsageReported, degraded
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import TokenUsage
from treenail.testing.provider import outcome_of
from treenail.testing.wire import WireServer

THOUGHT = ReasoningPart("big", "scripted", {"thought": "hm"})
OWN = ReasoningPart("small", "scripted", {"thought": "ah"})
ITEMS = (
    ReplayItem("system", "S"),
    ReplayItem("user", "x" * 3000),
    ReplayItem("assistant", "said", parts=(THOUGHT, OWN)),
    ReplayItem("user", "go on"),
)
PRICES = StaticPrices({"big": Price(10.0, 10.0), "small": Price(1.0, 1.0)})

VENDORS: dict[str, Callable[[WireServer], Provider]] = {
    "openai.responses": lambda server: OpenAI(
        "big", base_url=server.openai_url, api_key="k", prices=PRICES, max_output_tokens=4000
    ),
    "openai.chat": lambda server: OpenAI(
        "big", api="chat", base_url=server.openai_url, api_key="k", prices=PRICES, max_output_tokens=4000
    ),
    "anthropic.messages": lambda server: Anthropic(
        "big",
        base_url=server.anthropic_url,
        api_key="k",
        prices=PRICES,
        max_output_tokens=4000,
        thinking=2000,
    ),
}
MOST = {"openai.responses": "max_output_tokens", "openai.chat": "max_completion_tokens"}


def test_without_a_plan_nothing_changes() -> None:
    request = ModelRequest(ITEMS)
    assert degraded(request, None, model="big") == (request, ())
    assert degraded(request, DegradePlan(delay_ms=5), model="big") == (request, ())


def test_another_model_gets_only_thoughts_of_its_own() -> None:
    request, notes = degraded(ModelRequest(ITEMS), DegradePlan(model="small"), model="big")
    assert request.model == "small"
    assert [each.parts for each in request.items] == [(), (), (OWN,), ()]
    assert notes == ("degraded: small was asked instead of big",)


def test_the_same_model_is_no_degradation() -> None:
    assert degraded(ModelRequest(ITEMS), DegradePlan(model="big"), model="big") == (ModelRequest(ITEMS), ())


def test_a_longer_answer_than_was_asked_for_is_never_asked_for() -> None:
    plan = DegradePlan(max_output_tokens=500)
    assert degraded(ModelRequest(ITEMS, max_output_tokens=100), plan, model="big")[0].max_output_tokens == 100
    request, notes = degraded(ModelRequest(ITEMS), plan, model="big")
    assert (request.max_output_tokens, len(notes)) == (500, 1)


def test_the_context_is_trimmed_to_what_is_left_beside_the_tools() -> None:
    """1,200 tokens are 3,600 bytes; with 900 for the tools, only 900 bytes are left for the conversation."""
    plan = DegradePlan(trim_to_tokens=1200)
    request, notes = degraded(ModelRequest(ITEMS), plan, model="big")
    assert (tuple(request.items), notes) == (ITEMS, ())
    request, notes = degraded(ModelRequest(ITEMS), plan, model="big", other_tokens=900)
    assert [each.role for each in request.items] == ["system", "user"]
    assert notes == ("degraded: 2 of 4 items were not sent",)


@pytest.mark.parametrize("name", VENDORS)
def test_vendors_ask_and_price_the_model_that_the_request_names(name: str) -> None:
    """The body says it, the usage is priced for it, and the provider itself is unchanged afterwards."""
    usage = TokenUsage(input_tokens=1000, output_tokens=1000)
    plain = ModelRequest((ReplayItem("user", "hi"),))
    asked = ModelRequest((ReplayItem("user", "hi"),), model="small", max_output_tokens=300)
    with WireServer([Answer("one", usage=usage), Answer("two", usage=usage)]) as server:
        provider = VENDORS[name](server)
        estimates = provider.estimate_usd(asked), provider.estimate_usd(plain)
        small, big = outcome_of(provider, asked), outcome_of(provider, plain)
        bodies: list[Any] = [each.body for each in server.requests]
    assert [each["model"] for each in bodies] == ["small", "big"]
    assert [each[MOST.get(name, "max_tokens")] for each in bodies] == [300, 4000]
    assert small.answer.cost_usd == pytest.approx(0.002)
    assert big.answer.cost_usd == pytest.approx(0.02)
    assert (small.answer.model, big.answer.model, provider.model) == ("small", "big", "big")
    assert None not in estimates
    assert estimates[0] < estimates[1] / 50  # type: ignore[operator] # none of them is None
    if name == "anthropic.messages":
        # 300 tokens have no room for the least that may be thought.
        assert ("thinking" in bodies[0], bodies[1]["thinking"]["budget_tokens"]) == (False, 2000)


def test_thoughts_shrink_with_the_answer() -> None:
    with WireServer(["hi"]) as server:
        provider = VENDORS["anthropic.messages"](server)
        outcome_of(provider, ModelRequest((ReplayItem("user", "hi"),), max_output_tokens=1500))
        body = server.requests[0].body
    assert (body["max_tokens"], body["thinking"]["budget_tokens"]) == (1500, 1499)


def test_a_scripted_models_thoughts_and_usage_are_the_asked_ones() -> None:
    provider = ScriptedProvider([Answer("hi", thoughts=["hm"])], model="big")
    events = outcome_of(provider, ModelRequest((ReplayItem("user", "hi"),), model="small")).events
    assert [each.part.model for each in events if isinstance(each, ReasoningBlock)] == ["small"]
    assert [each.model for each in events if isinstance(each, UsageReported)] == ["small"]

"""Prices: from usage, from estimates, from tables, and when nobody knows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import date
from types import SimpleNamespace
from typing import Any

import genai_prices
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    CallUsage,
    ChainMetadata,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    FirstKnown,
    Limits,
    Price,
    StaticPrices,
    WrapOptions,
    current_call,
    estimate_tokens,
    usage_of,
)
from treenail.containment.pricing import FALLBACK_PRICE, PackagedPrices
from treenail.errors import UsageError

Config = Callable[..., ExecutionConfig]

OPENAI_CHAT = {
    "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 80},
        "completion_tokens_details": {"reasoning_tokens": 30},
    }
}
OPENAI_RESPONSES = {
    "usage": {
        "input_tokens": 100,
        "output_tokens": 50,
        "input_tokens_details": {"cached_tokens": 80},
        "output_tokens_details": {"reasoning_tokens": 30},
    }
}
ANTHROPIC = {
    "usage": {
        "input_tokens": 20,
        "output_tokens": 50,
        "cache_read_input_tokens": 80,
        "cache_creation_input_tokens": 10,
        "output_tokens_details": {"thinking_tokens": 30},
    }
}
LITELLM_ON_ANTHROPIC = {
    "usage": {
        "prompt_tokens": 110,
        "completion_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 80},
        "completion_tokens_details": {"reasoning_tokens": 30},
        "cache_read_input_tokens": 80,
        "cache_creation_input_tokens": 10,
    }
}


def as_objects(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_objects(item) for key, item in value.items()})
    return value


@pytest.mark.parametrize("shape", [lambda value: value, as_objects], ids=["mapping", "object"])
@pytest.mark.parametrize(
    ("response", "usage"),
    [
        (OPENAI_CHAT, CallUsage(100, 50, cached_input_tokens=80, reasoning_tokens=30)),
        (OPENAI_RESPONSES, CallUsage(100, 50, cached_input_tokens=80, reasoning_tokens=30)),
        (ANTHROPIC, CallUsage(110, 50, 80, cache_write_tokens=10, reasoning_tokens=30)),
        (LITELLM_ON_ANTHROPIC, CallUsage(110, 50, 80, cache_write_tokens=10, reasoning_tokens=30)),
        ({"input_tokens": 3, "output_tokens": 4}, CallUsage(3, 4)),
    ],
    ids=["chat", "responses", "messages", "litellm", "bare"],
)
def test_vendors_usage_gets_one_meaning(response: Any, usage: CallUsage, shape: Any) -> None:
    """Input counts all input and output all output, whichever way a vendor reports its cache."""
    assert usage_of(shape(response)) == usage


@pytest.mark.parametrize("value", [None, "text", 3, {}, {"usage": None}, {"usage": {"input_tokens": "3"}}])
def test_a_value_without_usage_has_none(value: Any) -> None:
    """Nothing is guessed from a value that carries no usage."""
    assert usage_of(value) is None


def test_usage_must_add_up() -> None:
    """Cached tokens are part of the input and reasoning tokens part of the output."""
    with pytest.raises(UsageError, match="input_tokens"):
        CallUsage(input_tokens=5, cached_input_tokens=6)
    with pytest.raises(UsageError, match="output_tokens"):
        CallUsage(output_tokens=5, reasoning_tokens=6)


def test_each_kind_of_token_has_its_price() -> None:
    """Cached input, cache writes and reasoning are charged at their own prices if they have them."""
    usage = CallUsage(
        1_000_000,
        1_000_000,
        cached_input_tokens=500_000,
        cache_write_tokens=100_000,
        reasoning_tokens=250_000,
    )
    assert Price(2.0, 8.0).cost_usd(usage) == 10.0
    full = Price(2.0, 8.0, cached_input_per_mtok=0.5, cache_write_per_mtok=3.0, reasoning_per_mtok=4.0)
    assert full.cost_usd(usage) == pytest.approx(0.4 * 2 + 0.5 * 0.5 + 0.1 * 3 + 0.75 * 8 + 0.25 * 4)


def test_the_packaged_table_knows_common_models() -> None:
    """A well-known model has a price, its cached input is cheaper, and an invented one has none."""
    table = PackagedPrices()
    plain = table.cost_usd("gpt-4o", CallUsage(1000, 100))
    cached = table.cost_usd("gpt-4o", CallUsage(1000, 100, cached_input_tokens=1000))
    assert plain is not None
    assert cached is not None
    assert 0 < cached < plain
    assert table.cost_usd("no-such-model-at-all", CallUsage(1, 1)) is None


@pytest.mark.parametrize(
    "model",
    [
        "claude-haiku-4-5",
        "claude-haiku-4-5-20251001",
        "Claude-Opus-4-5",
        "gpt-5-mini",
        "gpt-5.2-20251211",
        "o3",
        "gemini-2.5-pro",
        "mistral-large-latest",
        "grok-4",
    ],
)
@pytest.mark.parametrize("input_tokens", [1000, 300_000])
def test_the_packaged_table_agrees_with_its_source(model: str, input_tokens: int) -> None:
    """Names, prices of cached tokens and tiers for long input mean the same in both tables."""
    usage = CallUsage(input_tokens, 100, cached_input_tokens=500, cache_write_tokens=50)
    cost = PackagedPrices().cost_usd(model, usage)
    assert cost is not None
    source = genai_prices.calc_price(
        genai_prices.Usage(
            input_tokens=input_tokens, output_tokens=100, cache_read_tokens=500, cache_write_tokens=50
        ),
        model,
    )
    assert cost == pytest.approx(float(source.total_price), rel=1e-9)


def test_the_packaged_table_says_how_old_it_is() -> None:
    """It carries its date and its source, and knows the context windows of models."""
    table = PackagedPrices()
    assert date.fromisoformat(table.date) >= date(2026, 1, 1)
    assert table.source.startswith("genai-prices ")
    assert table.context_window("claude-sonnet-4-5") is not None
    assert table.context_window("no-such-model-at-all") is None


def test_genai_prices_is_not_needed_at_run_time() -> None:
    """A priced call under a ceiling in USD uses the packaged table."""
    code = (
        "import sys\n"
        "from treenail.containment import ExecutionContext, Limits, WrapOptions\n"
        "made = ExecutionContext(Limits(max_cost_usd=1.0)).call_llm(lambda: 1, WrapOptions(model='gpt-4o'))\n"
        "assert made.ok\n"
        "assert 'genai_prices' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_table_that_knows_answers() -> None:
    """Own prices go before the maintained ones."""
    mine = StaticPrices({"mine": Price(1.0, 1.0)})
    table = FirstKnown(mine, StaticPrices({"mine": Price(9.0, 9.0), "theirs": Price(2.0, 2.0)}))
    million = CallUsage(1_000_000)
    assert (table.cost_usd("mine", million), table.cost_usd("theirs", million)) == (1.0, 2.0)
    assert table.cost_usd("nobody's", million) is None


@given(st.text(max_size=200), st.text(max_size=200))
def test_estimates_grow_with_the_request(one: str, other: str) -> None:
    """A longer request is never estimated smaller, and messages cost more than their texts."""
    assert estimate_tokens(one + other) <= estimate_tokens(one) + estimate_tokens(other)
    assert estimate_tokens(one + other) >= max(estimate_tokens(one), estimate_tokens(other))
    assert estimate_tokens([{"role": "user", "content": one}]) > estimate_tokens(one)


# --- in a chain -----------------------------------------------------------------------------------------

PRICES = StaticPrices({"m": Price(input_per_mtok=1.0, output_per_mtok=10.0)})


def test_the_estimate_comes_from_the_requests_size(config: Config) -> None:
    """Input size and all the output that may be asked for are reserved, then replaced by the real cost."""
    reserved: list[float] = []
    ctx = ExecutionContext(config(), prices=PRICES)

    def call() -> Any:
        reserved.append(ctx.get_snapshot().cost_usd_reserved)
        return {"usage": {"input_tokens": 1000, "output_tokens": 100}}

    ctx.wrap_llm_call(call, WrapOptions(model="m", request="x" * 3000, max_output_tokens=1000))
    assert reserved == [pytest.approx((1000 * 1.0 + 1000 * 10.0) / 1e6)]
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx((1000 * 1.0 + 100 * 10.0) / 1e6)


def test_the_chains_model_prices_its_calls(config: Config) -> None:
    """A call that names no model is priced as the chain's; a tool call is not."""
    metadata = ChainMetadata("r", "c", model="m")
    ctx = ExecutionContext(config(), metadata=metadata, prices=PRICES)
    ctx.wrap_llm_call(lambda: CallUsage(0, 1000))
    ctx.wrap_tool_call(lambda: CallUsage(0, 1000))
    assert [node.cost_usd for node in ctx.get_snapshot().nodes] == [0.01, 0.0]


def test_usage_can_be_reported_from_within(config: Config) -> None:
    """Usage that a call reports before it fails is what it is charged for."""
    ctx = ExecutionContext(config(), prices=PRICES)

    def call() -> None:
        current_call().report(usage=CallUsage(0, 100))  # type: ignore[union-attr]  # inside a call there is one
        current_call().report(usage=CallUsage(0, 200))  # type: ignore[union-attr]  # inside a call there is one
        raise OSError

    outcome = ctx.call_llm(call, WrapOptions(model="m", max_output_tokens=100_000))
    assert outcome.node.cost_usd == pytest.approx(0.003)


def test_a_response_hint_stands_in_for_the_value(config: Config) -> None:
    """Usage is read from the hint if the value carries none."""
    ctx = ExecutionContext(config(), prices=PRICES)
    outcome = ctx.call_llm(lambda: "text", WrapOptions(model="m", response_hint=CallUsage(0, 100)))
    assert outcome.node.cost_usd == pytest.approx(0.001)


def test_an_unknown_price_halts_under_a_ceiling(config: Config) -> None:
    """A model without a price is not called while money is limited, and the message says what to do."""
    ctx = ExecutionContext(config(), prices=PRICES)
    outcome = ctx.call_llm(lambda: "never", WrapOptions(model="mystery"))
    assert (outcome.decision, outcome.was_dispatched) == (Decision.HALT, False)
    assert "'mystery'" in outcome.detail
    assert "cost_estimate_hint" in outcome.detail
    assert [event.event_type for event in ctx.get_snapshot().events] == ["price_unknown"]


def test_an_unknown_price_is_nothing_without_a_ceiling() -> None:
    """Where money is not limited, prices do not matter."""
    ctx = ExecutionContext(Limits(max_steps=5), prices=PRICES)
    assert ctx.wrap_llm_call(lambda: None, WrapOptions(model="mystery")) is Decision.ALLOW


def test_a_hint_is_a_price(config: Config) -> None:
    """A caller who says what the call costs needs no table."""
    ctx = ExecutionContext(config(), prices=PRICES)
    options = WrapOptions(model="mystery", cost_estimate_hint=0.5)
    assert ctx.wrap_llm_call(lambda: CallUsage(1, 1), options) is Decision.ALLOW
    assert ctx.get_snapshot().cost_usd_accumulated == 0.5


def test_an_unknown_price_can_be_let_through_with_a_warning(config: Config) -> None:
    """With "warn" it is told of once per model and not counted."""
    ctx = ExecutionContext(config(on_unknown_price="warn"), prices=PRICES)
    for _ in range(3):
        assert ctx.wrap_llm_call(lambda: CallUsage(9, 9), WrapOptions(model="mystery")) is Decision.ALLOW
    snapshot = ctx.get_snapshot()
    assert snapshot.cost_usd_accumulated == 0
    assert [(event.event_type, event.decision) for event in snapshot.events] == [
        ("price_unknown", Decision.ALLOW)
    ]


def test_an_unknown_price_can_be_estimated(config: Config) -> None:
    """With "estimate" the fallback price is charged, and the ceiling holds."""
    ctx = ExecutionContext(
        config(on_unknown_price="estimate", max_cost_usd=1.0),
        prices=PRICES,
    )
    options = WrapOptions(model="mystery", max_output_tokens=4000)
    decisions = [ctx.wrap_llm_call(lambda: CallUsage(0, 4000), options) for _ in range(5)]
    assert decisions == [Decision.ALLOW] * 3 + [Decision.HALT] * 2
    assert ctx.get_snapshot().cost_usd_accumulated == pytest.approx(
        3 * 4000 * FALLBACK_PRICE.output_per_mtok / 1e6
    )


def test_a_child_cannot_loosen_what_an_unknown_price_means(config: Config) -> None:
    """The strictest answer in the line applies."""
    ctx = ExecutionContext(config(), prices=PRICES)
    child = ctx.spawn_child(Limits(max_cost_usd=0.5, on_unknown_price="warn"))
    assert child.wrap_llm_call(lambda: None, WrapOptions(model="mystery")) is Decision.HALT


def test_the_packaged_table_is_the_default(config: Config) -> None:
    """A known model under a ceiling is priced without any setting."""
    ctx = ExecutionContext(config())
    outcome = ctx.call_llm(lambda: CallUsage(1000, 1000), WrapOptions(model="gpt-4o", max_output_tokens=1000))
    assert outcome.node.cost_usd == PackagedPrices().cost_usd("gpt-4o", CallUsage(1000, 1000))


class Table:
    """A price table that says what it is told to, whatever that is."""

    def __init__(self, *says: Any) -> None:
        self.says = list(says)

    def cost_usd(self, model: str, usage: CallUsage) -> Any:
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said


NONSENSE = [-5.0, float("nan"), float("inf"), True, "1", OSError("the table is gone")]


@pytest.mark.parametrize("said", NONSENSE, ids=repr)
def test_a_price_that_makes_no_sense_is_not_known(said: Any) -> None:
    """No table can give money back: the call is refused as one to a model without a price is."""
    ctx = ExecutionContext(Limits(max_cost_usd=1.0), prices=Table(said))
    outcome = ctx.call_llm(lambda: "never", WrapOptions("ask", model="m", input_tokens=1))
    assert (outcome.decision, outcome.was_dispatched) == (Decision.HALT, False)
    told = [event.reason for event in ctx.get_snapshot().events if event.event_type == "price_unknown"]
    assert "the price table failed" in told[0]
    assert ctx.remaining_usd == 1.0


@pytest.mark.parametrize("said", [*NONSENSE, None], ids=repr)
def test_a_table_that_forgets_a_price_makes_no_call_free(said: Any) -> None:
    """It knew the price before the call and does not after it: what was reserved is charged."""
    ctx = ExecutionContext(Limits(max_cost_usd=1.0), prices=Table(0.25, 0.25, said))
    outcome = ctx.call_llm(lambda: CallUsage(10, 10), WrapOptions("ask", model="m", input_tokens=1))
    assert (outcome.decision, outcome.node.cost_usd) == (Decision.ALLOW, 0.25)

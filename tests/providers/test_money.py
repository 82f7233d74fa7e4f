"""Money on the wire: each request allows what was reserved, and what the server counts is booked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from treenail import Agent, Limits, Run, TurnState, tool
from treenail.containment import (
    DEFAULT_MAX_OUTPUT_TOKENS,
    MIN_OUTPUT_TOKENS,
    CallUsage,
    Price,
    Reserved,
    Settled,
    StaticPrices,
    usual_output_tokens,
)
from treenail.conversation import ProviderUsage, ReplayItem
from treenail.errors import UsageError
from treenail.providers import ModelRequest, Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.state import TokenUsage
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import Broken, Fault, Step, WireRequest, WireServer
from treenail.turns import RetryPolicy
from treenail.turns.ledger import ledger_of

CEILING = 0.15
_REQUEST = ModelRequest((ReplayItem("user", "Hi"),))
PRICE = Price(2.0, 10.0, cached_input_per_mtok=0.5, cache_write_per_mtok=4.0, reasoning_per_mtok=12.0)
PRICES = StaticPrices({"a-model": PRICE})
UNBOUNDED = 100_000
"""What the model writes if nothing bounds it."""

Make = Callable[..., Provider]
KEY = "sk-test-0123456789"

VENDORS: dict[str, Make] = {
    "openai.responses": lambda url, **more: OpenAI("a-model", base_url=f"{url}/v1", api_key=KEY, **more),
    "openai.chat": lambda url, **more: OpenAI(
        "a-model", api="chat", base_url=f"{url}/v1", api_key=KEY, **more
    ),
    "anthropic.messages": lambda url, **more: Anthropic("a-model", base_url=url, api_key=KEY, **more),
    "litellm.openai": lambda url, **more: LiteLLM(
        "openai/a-model", base_url=f"{url}/v1", api_key=KEY, **more
    ),
    "litellm.anthropic": lambda url, **more: LiteLLM("anthropic/a-model", base_url=url, api_key=KEY, **more),
}
every_vendor = pytest.mark.parametrize("name", [*VENDORS, "claude.agent"])


@dataclass
class Bill:
    """A server that takes all that it is allowed, and keeps its own count."""

    steps: list[Callable[[Bill, WireRequest], Step]]
    owed: list[float] = field(default_factory=list)
    allowed: list[int | None] = field(default_factory=list)

    def __call__(self, request: WireRequest) -> Step:
        self.allowed.append(request.allowed_output)
        return self.steps.pop(0)(self, request)

    def greedy(self, request: WireRequest, **more: Any) -> Answer:
        """Use every token: half of the input from the cache, a quarter to it, most of the output thought."""
        into = len(json.dumps(request.body)) // 4
        out = request.allowed_output or UNBOUNDED
        usage = CallUsage(into, out, into // 2, into // 4, out - out // 4)
        self.owed.append(PRICE.cost_usd(usage))
        return Answer(
            "",
            [("again", {})],
            usage=TokenUsage(into, out, usage.cached_input_tokens, usage.reasoning_tokens),
            cache_write_tokens=usage.cache_write_tokens,
            **more,
        )

    def refuses(self, request: WireRequest) -> Fault:
        """An error in place of an answer is not billed."""
        self.owed.append(0.0)
        return Fault("overloaded")

    def does_not_say(self, request: WireRequest) -> Answer:
        """The answer is whole and billed, but the client is not told how much it was."""
        self.greedy(request)
        return Answer("", [("again", {})], usage=TokenUsage())

    def breaks(self, request: WireRequest) -> Broken:
        """The connection breaks in the middle of a billed answer."""
        self.greedy(request)
        return Broken(Answer("one\ntwo\n"), "cut", after=1)


@tool(effects="none")
def again() -> str:
    """Work on."""
    return "more to do"


AGENT = Agent("worker", tools=[again], retry=RetryPolicy(attempts=3, base_s=0.001, cap_s=0.001, total_s=60))


@contextmanager
def provided(name: str, script: Callable[[WireRequest], Step], home: Path, **more: Any) -> Iterator[Provider]:
    more = {"prices": PRICES, **more}
    if name != "claude.agent":
        with WireServer(script) as server:
            yield VENDORS[name](server.url, **more)
        return
    with ClaudeWireServer(script) as server:
        yield ClaudeAgent("a-model", base_url=server.url, api_key=KEY, env=claude_environment(home), **more)


def worked(name: str, bill: Bill, home: Path, *, limit: float = CEILING, **more: Any) -> Run:
    with provided(name, bill, home, **more) as provider:
        return AGENT.run(
            "Go on until the money is spent", provider=provider, limits=Limits(max_cost_usd=limit)
        )


def booked(run: Run) -> tuple[list[float], list[float]]:
    """What was reserved and what was settled for each model call, in order."""
    events = ledger_of(run.execution_state.session)
    calls = [each for each in events if isinstance(each, Reserved) and each.kind == "llm"]
    settled = {each.reservation_id: each.cost_usd for each in events if isinstance(each, Settled)}
    return [each.cost_usd for each in calls], [settled[each.reservation_id] for each in calls]


@every_vendor
def test_reserved_allowed_and_booked_are_what_the_server_counts(name: str, tmp_path: Path) -> None:
    """However greedy the model is: each request allows what was reserved, and the ceiling holds."""
    bill = Bill([Bill.refuses, Bill.greedy, Bill.greedy, Bill.greedy, Bill.greedy])
    run = worked(name, bill, tmp_path)
    reserved, spent = booked(run)
    assert spent == pytest.approx(bill.owed)
    assert all(have >= cost for have, cost in zip(reserved, spent, strict=True))
    assert sum(bill.owed) <= CEILING
    # The first two may be as long as a model of which nothing is known writes; the last one is what is left.
    most = DEFAULT_MAX_OUTPUT_TOKENS
    assert bill.allowed[:2] == [most, most]
    shorter = bill.allowed[2:]
    assert shorter and all(MIN_OUTPUT_TOKENS <= (each or UNBOUNDED) < most for each in shorter)
    assert (run.state, run.result.error_kind) == (TurnState.FAILED, "budget_exceeded")
    # Money is left, but not for an answer of use.
    assert CEILING - sum(spent) < PRICE.cost_usd(CallUsage(20_000, MIN_OUTPUT_TOKENS))


@every_vendor
@pytest.mark.parametrize("how", ["does_not_say", "breaks"])
def test_an_answer_that_is_not_counted_costs_what_was_reserved(name: str, how: str, tmp_path: Path) -> None:
    """A stream without its usage, or without its end: nobody knows less than the reservation."""
    bill = Bill([getattr(Bill, how), Bill.greedy])
    run = worked(name, bill, tmp_path)
    reserved, spent = booked(run)
    assert spent[0] == reserved[0] >= bill.owed[0]
    assert sum(bill.owed) <= sum(spent) <= CEILING


@pytest.mark.parametrize("name", VENDORS)
def test_a_request_that_never_left_costs_nothing(name: str, tmp_path: Path) -> None:
    """Nobody listens there."""
    provider = VENDORS[name]("http://127.0.0.1:9", prices=PRICES)
    run = Agent("worker", retry=None).run("Hi", provider=provider, limits=Limits(max_cost_usd=CEILING))
    assert run.state is TurnState.FAILED
    assert booked(run)[1] == [0.0]


def test_the_bound_is_the_models_and_can_be_changed() -> None:
    """A model that reasons may write much by default, an old one what it can, an unknown one some."""
    assert usual_output_tokens("gpt-5") == usual_output_tokens("claude-sonnet-4-5") == 32_000
    assert usual_output_tokens("gpt-4-turbo") == 4_096
    assert usual_output_tokens("gpt-4o") == 16_384
    assert usual_output_tokens("nobody-knows-me") == DEFAULT_MAX_OUTPUT_TOKENS
    assert LiteLLM("openai/gpt-5").arguments(_REQUEST)["max_tokens"] == 32_000
    assert OpenAI("gpt-5", api_key="k").responses_body(_REQUEST)["max_output_tokens"] == 32_000
    assert OpenAI("gpt-5", api_key="k", max_output_tokens=50_000).output_bound(_REQUEST) == 50_000
    assert Anthropic("claude-opus-4-5", api_key="k").messages_body(_REQUEST)["max_tokens"] == 32_000


def test_each_server_is_told_the_bound_by_a_name_that_it_knows() -> None:
    """OpenAI refuses the old name, servers of others may know no other, and `extra` settles it."""
    theirs = OpenAI("gpt-5", api="chat", api_key="k").chat_body(_REQUEST)
    assert (theirs["max_completion_tokens"], "max_tokens" in theirs) == (32_000, False)
    other = OpenAI("a-model", api="chat", base_url="http://127.0.0.1:9/v1").chat_body(_REQUEST)
    assert other["max_completion_tokens"] == other["max_tokens"] == DEFAULT_MAX_OUTPUT_TOKENS
    said = OpenAI("a-model", api="chat", base_url="http://127.0.0.1:9/v1", extra={"max_tokens": 77})
    assert said.chat_body(_REQUEST)["max_tokens"] == said.output_bound(_REQUEST) == 77
    assert "max_completion_tokens" not in said.chat_body(_REQUEST)
    with pytest.raises(UsageError, match="only one answer"):
        OpenAI("a-model", api_key="k", extra={"n": 4})


def test_what_cannot_be_bounded_is_refused_under_a_ceiling_in_usd(tmp_path: Path) -> None:
    """A vendor that takes no bound, or runs tools of its own: like an unknown price, unless one says so."""
    bill = Bill([Bill.greedy])
    with WireServer(bill) as server:
        searches = Anthropic(
            "a-model",
            base_url=server.url,
            api_key=KEY,
            prices=PRICES,
            extra={"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        )
        run = AGENT.run("Hi", provider=searches, limits=Limits(max_cost_usd=CEILING))
        assert (run.state, server.requests) == (TurnState.FAILED, ())
        assert "nothing bounds what a call of 'a-model' may cost" in (run.result.details)
        warned = Limits(max_cost_usd=CEILING, on_unknown_price="warn", max_steps=1)
        AGENT.run("Hi", provider=searches, limits=warned)
        assert len(server.requests) == 1
    assert not LiteLLM("chatgpt/gpt-5.4").bounds_output
    assert LiteLLM("anthropic/claude-sonnet-4-5").bounds_output


def test_a_log_tells_that_an_answer_had_to_be_short(tmp_path: Path) -> None:
    """Cut by the money, not by the model: the note and the error say so."""
    script = [Answer("half an ans", stop="length", usage=TokenUsage(10, 2000))]
    with WireServer(script) as server:
        provider = VENDORS["openai.chat"](server.url, prices=PRICES)
        run = AGENT.run("Hi", provider=provider, limits=Limits(max_cost_usd=0.03))
    (used,) = run.execution_state.session[ProviderUsage].all()
    allowed = server.requests[0].allowed_output
    assert allowed is not None and allowed < 3000
    note = f"the rest of the money pays for an answer of {allowed} tokens"
    assert note in used.notes
    assert (run.state, run.result.error_kind) == (TurnState.PARTIAL_FAILED, "truncated")
    assert note in (run.result.details)

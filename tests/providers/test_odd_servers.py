"""Servers that contradict themselves, or count in their own way: half an answer is neither done nor cheap."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from treenail import Agent, Limits, Run, TurnState, tool
from treenail.containment import Price, Reserved, Settled, StaticPrices
from treenail.errors import UsageError
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.turns.ledger import ledger_of

PRICES = StaticPrices({"m": Price(1.0, 10.0)})
LIMITS = Limits(max_cost_usd=0.05)
Events = Sequence[Mapping[str, Any]]


@contextmanager
def serving(*answers: Events) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer each request with the next list of events, as they are. Yields the address and the requests."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for each in answers[min(len(asked), len(answers)) - 1]:
                name = f"event: {each['type']}\n" if "type" in each else ""
                self.wfile.write(f"{name}data: {json.dumps(each)}\n\n".encode())
            if not any("type" in each for each in answers[0]):
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def run_of(provider: Provider, **more: Any) -> Run:
    return Agent("worker", tools=[act], retry=None).run("Hi", provider=provider, **more)


RAN: list[int] = []


@tool(effects="none")
def act() -> str:
    """Act."""
    RAN.append(1)
    return "done"


def chat(*finishes: Any, usage: Any = None) -> Events:
    said = [{"id": "c", "choices": [{"index": 0, "delta": {"content": "half"}}]}]
    said += [{"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": each}]} for each in finishes]
    return said if usage is None else [*said, {"id": "c", "choices": [], "usage": usage}]


def responses(event: str, items: Sequence[Any] = (), **more: Any) -> Events:
    delta = {"item_id": "i", "output_index": 0, "content_index": 0, "logprobs": [], "delta": "half"}
    whole = {
        "id": "r",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": [],
        "tools": [],
        **more,
    }
    done = [{"type": "response.output_item.done", "output_index": 0, "item": each} for each in items]
    return [
        {"type": "response.output_text.delta", **delta},
        *done,
        {"type": event, "response": {"parallel_tool_calls": True, "tool_choice": "auto", **whole}},
    ]


def paused(number: int) -> list[dict[str, Any]]:
    """The blocks of a vendor's own search."""
    use = {"type": "server_tool_use", "id": f"s{number}", "name": "web_search", "input": {"query": "kelp"}}
    return [use, {"type": "web_search_tool_result", "tool_use_id": f"s{number}", "content": []}]


def messages(blocks: Sequence[Any], stop: str) -> Events:
    start = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**start, "usage": {"input_tokens": 1, "output_tokens": 1}}}
    ]
    for index, block in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events.append({"type": "content_block_stop", "index": index})
    ended = {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 5}}
    return [*events, ended, {"type": "message_stop"}]


@pytest.mark.parametrize("finishes", [["error", "stop"], [7], ["length", "stop"]], ids=str)
def test_a_bad_end_is_not_made_good_by_a_later_word(finishes: list[Any]) -> None:
    """Nor is a word that is no word a failure of ours."""
    with serving(chat(*finishes)) as (url, _):
        ended = run_of(OpenAI("m", api="chat", base_url=url))
    assert ended.state is TurnState.PARTIAL_FAILED
    assert ended.result.error_kind in ("broken_off", "truncated")


def test_an_error_inside_the_choice_is_one_whatever_its_end_says() -> None:
    """Its message is what a person reads."""
    failed = {"delta": {}, "finish_reason": "stop", "error": {"code": 502, "message": "the model is gone"}}
    with serving([*chat(), {"id": "c", "choices": [{"index": 0, **failed}]}]) as (url, _):
        ended = run_of(OpenAI("m", api="chat", base_url=url))
    assert ended.state is TurnState.PARTIAL_FAILED
    assert "the model is gone" in str(ended.result.error)


CUT = {"id": "i", "status": "incomplete"}
CUT_CALL = {"type": "function_call", "call_id": "c", "name": "act", "arguments": "{}", **CUT}
CUT_TEXT = {"type": "message", "role": "assistant", "content": [], **CUT}


@pytest.mark.parametrize(
    "events",
    [
        responses("response.incomplete", status="completed"),
        responses(
            "response.completed", status="completed", incomplete_details={"reason": "max_output_tokens"}
        ),
        responses("response.completed", status="completed", error={"code": "server_error", "message": "no"}),
        responses("response.completed", [CUT_TEXT], status="completed"),
        responses("response.completed", [CUT_CALL], status="completed"),
    ],
    ids=["event", "details", "error", "text", "call"],
)
def test_an_answer_that_anything_calls_incomplete_is_not_complete(events: Events) -> None:
    RAN.clear()
    with serving(events) as (url, _):
        ended = run_of(OpenAI("m", base_url=url))
    assert (ended.state, RAN) == (TurnState.PARTIAL_FAILED, [])


def test_a_pause_without_a_word_goes_on_from_its_blocks() -> None:
    """A vendor that was paused in a search of its own gets the search back, and does not begin again."""
    said = [{"type": "text", "text": "Found."}]
    answers = messages(paused(1), "pause_turn"), messages(paused(2), "pause_turn"), messages(said, "end_turn")
    with serving(*answers) as (url, asked):
        ended = run_of(Anthropic("m", base_url=url, api_key="k"))
    assert (ended.state, ended.output) == (TurnState.COMPLETED, "Found.")
    assert [each["messages"][1:] for each in asked[1:]] == [
        [{"role": "assistant", "content": paused(1)}],
        [{"role": "assistant", "content": [*paused(1), *paused(2)]}],
    ]


# --- money ---------------------------------------------------------------------------------------------


def booked(run: Run) -> tuple[float, float]:
    events = ledger_of(run.execution_state.session)
    (reserved,) = (each.cost_usd for each in events if isinstance(each, Reserved))
    (settled,) = (each.cost_usd for each in events if isinstance(each, Settled))
    return reserved, settled


@pytest.mark.parametrize("name", ["openai", "litellm"])
def test_reasoning_that_is_counted_beside_the_answer_is_paid_for(name: str) -> None:
    """Some vendors leave it out of `completion_tokens`."""
    details = {"completion_tokens_details": {"reasoning_tokens": 4000}}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 4015, **details}
    with serving(chat("stop", usage=usage)) as (url, _):
        provider: Provider = OpenAI("m", api="chat", base_url=url, prices=PRICES)
        if name == "litellm":
            provider = LiteLLM("openai/m", base_url=url, api_key="k", prices=PRICES)
        assert booked(run_of(provider, limits=LIMITS))[1] == pytest.approx((10 + 4005 * 10) / 1e6)


@pytest.mark.parametrize("completion", [{}, {"completion_tokens": None}, {"completion_tokens": 0}], ids=str)
def test_an_answer_for_which_no_output_is_counted_costs_what_was_reserved(completion: Any) -> None:
    with serving(chat("stop", usage={"prompt_tokens": 10, **completion})) as (url, _):
        run = run_of(OpenAI("m", api="chat", base_url=url, prices=PRICES), limits=LIMITS)
    reserved, settled = booked(run)
    assert settled == reserved > 0.04


@pytest.mark.parametrize(
    "extra",
    [
        {"web_search_options": {}},
        {"search_parameters": {"mode": "on"}},
        {"models": ["a-dear-one"]},
        {"previous_response_id": "r"},
        {"service_tier": "priority"},
        {"extra_body": {"plugins": [{"id": "web"}]}},
    ],
    ids=lambda each: next(iter(each)),
)
def test_a_field_that_may_cost_more_than_the_answer_makes_it_unbounded(extra: dict[str, Any]) -> None:
    """An empty mapping of options is how OpenAI's search is switched on."""
    assert not LiteLLM("openai/m", extra=extra).bounds_output
    assert not OpenAI("m", api_key="k", extra=extra).bounds_output
    assert OpenAI("m", api_key="k", extra={"service_tier": "flex", "tools": []}).bounds_output


def test_input_that_is_cached_for_an_hour_is_dearer_than_is_known() -> None:
    """It costs twice as much as plain input; the table has the price of five minutes."""
    for ttl, is_bounded in (("1h", False), ("5m", True)):
        extra = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        assert Anthropic("m", api_key="k", extra=extra).bounds_output is is_bounded
        assert LiteLLM("anthropic/m", extra=extra).bounds_output is is_bounded


def test_no_field_changes_what_was_priced() -> None:
    """Neither the model, nor the length of the answer, nor how often the vendor is asked."""
    with pytest.raises(UsageError, match="model"):
        OpenAI("m", api_key="k", extra={"model": "a-dear-one"})
    for name in ("num_retries", "max_retries", "fallbacks"):
        with pytest.raises(UsageError, match=name):
            LiteLLM("openai/m", extra={name: 3})
    with serving(chat("stop")) as (url, asked):
        nested = {"extra_body": {"max_tokens": 99_999, "seed": 1}}
        run_of(LiteLLM("openai/m", base_url=url, api_key="k", prices=PRICES, extra=nested), limits=LIMITS)
    assert asked[0]["max_tokens"] < 5_000
    assert asked[0]["seed"] == 1

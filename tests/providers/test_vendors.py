"""What is particular to the providers on vendors' SDKs: bodies, thoughts, prices, secrets, connections."""

from __future__ import annotations

import json
import logging
import socket
import traceback
from collections.abc import Callable
from typing import Any

import anthropic
import anyio
import openai
import pytest

from treenail.containment import CallUsage, Price, StaticPrices
from treenail.conversation import ReasoningPart, ReplayCall, ReplayItem
from treenail.errors import ModelCallError, UsageError
from treenail.providers import ModelRequest, Provider, ReasoningBlock, TextDelta, UsageReported
from treenail.providers.anthropic import Anthropic
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.providers.wire_formats import (
    PHASE_KEY,
    fits_strict,
    json_arguments,
    mark_cached,
    to_anthropic,
    to_openai_responses,
    wire_id,
    wire_name,
)
from treenail.state import TokenUsage
from treenail.testing.provider import CALCULATOR, double, outcome_of
from treenail.testing.wire import Broken, Fault, Step, WireServer

SECRET = "sk-test-0123456789abcdefghijkl"
Make = Callable[..., Provider]

VENDORS: dict[str, Make] = {
    "openai.responses": lambda server, **more: OpenAI(
        "a-model", base_url=server.openai_url, api_key=SECRET, **more
    ),
    "openai.chat": lambda server, **more: OpenAI(
        "a-model", api="chat", base_url=server.openai_url, api_key=SECRET, **more
    ),
    "anthropic.messages": lambda server, **more: Anthropic(
        "a-model", base_url=server.anthropic_url, api_key=SECRET, **more
    ),
    "litellm.chat": lambda server, **more: LiteLLM(
        "openai/a-model", base_url=server.openai_url, api_key=SECRET, **more
    ),
    "litellm.anthropic": lambda server, **more: LiteLLM(
        "anthropic/a-model", base_url=server.anthropic_url, api_key=SECRET, **more
    ),
}

every_vendor = pytest.mark.parametrize("make", VENDORS.values(), ids=VENDORS.keys())


# --- usage and cost ------------------------------------------------------------------------------------


@every_vendor
def test_usage_and_cost_count_cached_written_and_thought_tokens(make: Make) -> None:
    """The vendors' three ways to count are one here, and the cost is by the table."""
    usage = TokenUsage(input_tokens=1000, output_tokens=100, cached_tokens=600, reasoning_tokens=40)
    price = Price(2.0, 10.0, cached_input_per_mtok=0.5, cache_write_per_mtok=4.0)
    with WireServer([Answer("hi", usage=usage, cache_write_tokens=300)]) as server:
        outcome = outcome_of(make(server, prices=StaticPrices({"a-model": price})))
    answer = outcome.answer
    assert (answer.usage, answer.cache_write_tokens) == (usage, 300)
    # 100 plain at 2, 600 cached at 0.5, 300 written at 4, 100 out at 10, per million.
    assert answer.cost_usd == pytest.approx((100 * 2 + 600 * 0.5 + 300 * 4 + 100 * 10) / 1e6)


@every_vendor
def test_a_cost_that_nobody_knows_is_not_made_up(make: Make) -> None:
    with WireServer(["hi"]) as server:
        provider = make(server, prices=StaticPrices({}))
        assert outcome_of(provider).answer.cost_usd is None
    assert provider.estimate_usd(ModelRequest((ReplayItem("user", "hi"),))) is None


def test_the_maintained_table_is_used_unless_another_is_given() -> None:
    """A known model has a price without any table of one's own."""
    provider = OpenAI("gpt-4o", base_url="http://127.0.0.1:9/v1", max_output_tokens=1000)
    estimate = provider.estimate_usd(ModelRequest((ReplayItem("user", "hello " * 1000),)))
    assert estimate is not None
    assert 0.001 < estimate < 1.0


@every_vendor
def test_an_estimate_is_not_less_than_what_the_call_can_cost(make: Make) -> None:
    """It counts all input, tools included, and all output that may come."""
    prices = StaticPrices({"a-model": Price(1.0, 10.0)})
    with WireServer([]) as server:
        provider = make(server, prices=prices, max_output_tokens=500)
        bare = provider.estimate_usd(ModelRequest((ReplayItem("user", "x" * 3000),)))
        with_tool = provider.estimate_usd(ModelRequest((ReplayItem("user", "x" * 3000),), tools=(double,)))
    assert bare is not None
    assert with_tool is not None
    assert with_tool > bare >= (1000 * 1.0 + 500 * 10.0) / 1e6


def test_what_a_broken_call_has_used_is_reported_where_the_vendor_says_it() -> None:
    """Anthropic counts the input at the start: it is known also if the answer breaks off."""
    usage = TokenUsage(input_tokens=77, output_tokens=9)
    with WireServer([Broken(Answer("a\nb\n", usage=usage), "cut", after=1)]) as server:
        outcome = outcome_of(VENDORS["anthropic.messages"](server))
    reports = [each for each in outcome.events if isinstance(each, UsageReported)]
    assert reports[-1].usage.input_tokens == 77
    assert outcome.error is not None


# --- secrets -------------------------------------------------------------------------------------------


@every_vendor
@pytest.mark.parametrize(
    "step",
    [
        Fault("unauthorized", message=f"Incorrect API key provided: {SECRET}"),
        Fault("server_error", message=f"boom {SECRET} boom"),
        Fault("drop"),
        Broken(Answer("a\nb\n"), "cut"),
        Broken(Answer("a\nb\n"), "error"),
    ],
    ids=["unauthorized", "server_error", "drop", "cut", "error"],
)
def test_the_key_is_in_no_error_no_trace_and_no_log(
    make: Make, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the text, not in anything that a traceback finds behind it, not at any log level."""
    caplog.set_level(logging.DEBUG)
    with WireServer([step]) as server:
        provider = make(server)
        error = outcome_of(provider).error
        assert server.requests[0].headers.get("authorization", "[redacted]") == "[redacted]"
        assert server.requests[0].headers.get("x-api-key", "[redacted]") == "[redacted]"
        assert SECRET not in repr(server.requests)
    assert error is not None
    assert SECRET not in "".join(traceback.format_exception(error))
    assert SECRET not in repr(vars(error))
    assert error.__cause__ is None
    assert error.__context__ is None
    assert SECRET not in repr(provider)
    assert SECRET not in caplog.text


# --- clients and connections ---------------------------------------------------------------------------


@every_vendor
def test_calls_in_one_loop_share_a_connection(make: Make) -> None:
    with WireServer(["one", "two", "three"]) as server:
        provider = make(server)

        async def ask() -> list[str]:
            request = ModelRequest((ReplayItem("user", "hi"),))
            return [
                each.text
                for _ in range(3)
                async for each in provider.stream(request)
                if isinstance(each, TextDelta)
            ]

        assert anyio.run(ask) == ["one", "two", "three"]
        assert server.connections == 1


@every_vendor
def test_the_sdk_does_not_retry_on_its_own(make: Make) -> None:
    with WireServer([Fault("server_error"), "never"]) as server:
        assert outcome_of(make(server)).error is not None
        assert len(server.requests) == 1


def test_a_client_of_ones_own_is_used_and_left_open() -> None:
    """It is the caller's: it keeps its settings, and nobody else closes it. It does not retry either."""
    with WireServer([Fault("server_error"), "hi"]) as server:

        async def ask() -> str:
            async with openai.AsyncOpenAI(api_key=SECRET, base_url=server.openai_url) as client:
                provider = OpenAI("a-model", client=client)
                request = ModelRequest((ReplayItem("user", "hi"),))
                with pytest.raises(ModelCallError):
                    async for _ in provider.stream(request):
                        pass
                return "".join(
                    [each.text async for each in provider.stream(request) if isinstance(each, TextDelta)]
                )

        assert anyio.run(ask) == "hi"


def test_mistakes_are_found_when_the_provider_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        OpenAI("a-model")
    with pytest.raises(UsageError, match="responses"):
        OpenAI("a-model", api="completions", api_key="k")  # type: ignore[arg-type]  # what is wrong is the point
    with pytest.raises(UsageError, match="client"):
        OpenAI("a-model", client=openai.AsyncOpenAI(api_key="k"), base_url="http://127.0.0.1:9")
    with pytest.raises(UsageError, match="client"):
        Anthropic("a-model", client=anthropic.AsyncAnthropic(api_key="k"), api_key="k")
    with pytest.raises(UsageError, match="1024"):
        Anthropic("a-model", thinking=100)


def test_a_server_of_ones_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with WireServer(["none of your business"]) as server:
        outcome = outcome_of(OpenAI("a-model", api="chat", base_url=server.openai_url))
    assert outcome.answer.text == "none of your business"


def test_no_key_at_all_is_an_authentication_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(tmp_path))
    with WireServer(["never"]) as server:
        error = outcome_of(Anthropic("a-model", base_url=server.anthropic_url)).error
        assert server.requests == ()
    assert error is not None
    assert error.kind == "authentication"
    assert "ANTHROPIC_API_KEY" in str(error)


def test_nobody_listening_is_a_connection_failure() -> None:
    error = outcome_of(OpenAI("a-model", base_url="http://127.0.0.1:9/v1", api_key="k")).error
    assert error is not None
    assert (error.kind, error.retryable) == ("connection", True)


# --- bodies --------------------------------------------------------------------------------------------


def test_settings_reach_the_wire() -> None:
    """Each in the interface's own words; `extra` passes the rest."""
    request = ModelRequest((ReplayItem("system", "S"), ReplayItem("user", "U")), tools=(double,))
    extra = {"tool_choice": "required"}
    responses = OpenAI(
        "m", api_key="k", max_output_tokens=9, temperature=0.5, reasoning_effort="low", extra=extra
    ).responses_body(request)
    assert responses["instructions"] == "S"
    assert responses["max_output_tokens"] == 9
    assert responses["reasoning"]["effort"] == "low"
    assert (responses["temperature"], responses["tool_choice"]) == (0.5, "required")
    assert (responses["store"], responses["include"]) == (False, ["reasoning.encrypted_content"])
    chat = OpenAI(
        "m",
        api="chat",
        api_key="k",
        max_output_tokens=9,
        temperature=0.5,
        reasoning_effort="low",
        extra=extra,
    ).chat_body(request)
    assert (chat["max_completion_tokens"], chat["reasoning_effort"], chat["tool_choice"]) == (
        9,
        "low",
        "required",
    )
    assert chat["tools"][0]["function"]["parameters"] == dict(double.parameters_schema)
    messages = Anthropic(
        "m", api_key="k", max_output_tokens=5000, thinking=2000, effort="low", cache=False, temperature=0.5
    ).messages_body(request)
    assert messages["system"] == "S"
    assert messages["max_tokens"] == 5000
    assert messages["thinking"] == {"type": "enabled", "budget_tokens": 2000}
    assert messages["output_config"] == {"effort": "low"}
    assert messages["temperature"] == 0.5
    adaptive = Anthropic("m", api_key="k", thinking="adaptive").messages_body(request)
    assert adaptive["thinking"] == {"type": "adaptive"}


def test_the_stable_beginning_is_marked_for_the_cache() -> None:
    """The system text with the tools, the end of the request before, and the end of this one."""
    call = ReplayCall("c1", "double", "{}")
    items = [
        ReplayItem("system", "S"),
        ReplayItem("user", "one"),
        ReplayItem("assistant", "", calls=(call,)),
        ReplayItem("tool", "ok", call_id="c1"),
        ReplayItem("assistant", "so"),
        ReplayItem("user", "two"),
    ]
    system, messages = mark_cached(*to_anthropic(items))
    mark = {"type": "ephemeral"}
    assert system == [{"type": "text", "text": "S", "cache_control": mark}]
    marked = [place for place, each in enumerate(messages) if "cache_control" in each["content"][-1]]
    assert marked == [2, 4]
    # The marks move on, and nothing else does: what was sent before is sent again.
    stripped = [
        {**each, "content": [{k: v for k, v in b.items() if k != "cache_control"} for b in each["content"]]}
        for each in messages
    ]
    assert stripped == to_anthropic(items)[1]


def test_a_schema_is_strict_only_where_that_is_safe() -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert fits_strict(closed)
    assert not fits_strict({**closed, "required": []})
    assert not fits_strict({**closed, "additionalProperties": True})
    assert not fits_strict({**closed, "properties": {"a": {"type": "string", "pattern": "x"}}})
    assert not fits_strict({"type": "array", "items": {**closed, "required": []}})


def test_thoughts_between_text_and_calls_go_back_in_their_place() -> None:
    """A provider checks the order in which it wrote them."""
    thought = [{"type": "thinking", "thinking": str(n), "signature": str(n)} for n in range(3)]
    parts = (
        ReasoningPart("m", "d", thought[0]),
        ReasoningPart("m", "d", thought[1], after_text=4),
        ReasoningPart("m", "d", thought[2], after_text=8, after_calls=1),
    )
    calls = (ReplayCall("a", "double", '{"number": 1}'), ReplayCall("b", "double", "{}"))
    item = ReplayItem("assistant", "one two ", calls=calls, parts=parts)
    _, (message,) = to_anthropic([item])
    assert message["content"] == [
        thought[0],
        {"type": "text", "text": "one "},
        thought[1],
        {"type": "text", "text": "two "},
        {"type": "tool_use", "id": "a", "name": "double", "input": {"number": 1}},
        thought[2],
        {"type": "tool_use", "id": "b", "name": "double", "input": {}},
    ]


def test_a_failed_call_is_told_in_the_field_that_the_interface_has_for_it() -> None:
    """Only a failure is marked, so that what was sent before stays the same."""
    calls = (ReplayCall("a", "double", "{}"), ReplayCall("b", "double", "{}"))
    items = [
        ReplayItem("user", "x"),
        ReplayItem("assistant", "", calls=calls),
        ReplayItem("tool", "no", call_id="a", is_error=True),
        ReplayItem("tool", "2", call_id="b"),
    ]
    _, messages = to_anthropic(items)
    assert messages[-1]["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "b", "content": "2"},
    ]


def test_a_failed_call_of_a_run_is_marked_on_the_wire() -> None:
    """From the tool's exception through the log to the provider."""
    steps = [Answer("", [("write_and_fail", {"path": "a"}), ("double", {"number": 2})]), Answer("Oh.")]
    with WireServer(steps) as server:
        run = CALCULATOR.run("?", provider=VENDORS["anthropic.messages"](server))
        results = server.requests[-1].body["messages"][-1]["content"]
    assert run.output == "Oh."
    assert [each.get("is_error", False) for each in results] == [True, False]


def test_the_phase_of_a_message_goes_back_with_it() -> None:
    """It is kept beside the thoughts, and never sent as one."""
    parts = (
        ReasoningPart("m", "d", {PHASE_KEY: "commentary"}),
        ReasoningPart("m", "d", {PHASE_KEY: "final_answer"}, after_text=5),
    )
    _, out = to_openai_responses([ReplayItem("assistant", "look: done", parts=parts)])
    assert [(each["phase"], each["content"][0]["text"]) for each in out] == [
        ("commentary", "look:"),
        ("final_answer", " done"),
    ]


def test_odd_names_and_ids_are_replaced_by_something_that_is_taken() -> None:
    """By their own content alone, so that a call and its result stay a pair and the bytes stay the same."""
    assert (wire_name("double"), wire_name("no such tool!"), wire_name("")) == (
        "double",
        "no_such_tool_",
        "unnamed",
    )
    assert len(wire_name("x" * 100)) == 64
    assert wire_id("call_1") == "call_1"
    assert wire_id("a:b") == wire_id("a:b") != wire_id("a/b")
    assert len(wire_id("x" * 100)) <= 64


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]", "{", "", "1" * 5000]
)
def test_arguments_that_are_no_json_object_are_sent_as_an_empty_one(text: str) -> None:
    assert json_arguments(ReplayCall("a", "t", text)) == "{}"


# --- odd servers ---------------------------------------------------------------------------------------


@every_vendor
def test_half_characters_become_whole_ones(make: Make) -> None:
    """A lone half is replaced, so that the text can be stored, shown and sent."""
    with WireServer([Answer("a\ud83d b\n")]) as server:
        outcome = outcome_of(make(server))
    assert outcome.answer.text == "a\N{REPLACEMENT CHARACTER} b\n"


def test_a_thought_that_was_cut_off_is_not_kept() -> None:
    """Without its signature the provider would refuse it."""
    step = Broken(Answer("never\n", thoughts=["first", "second"]), "cut", after=2)
    with WireServer([step]) as server:
        outcome = outcome_of(VENDORS["anthropic.messages"](server))
    kept = [each.part.payload["thinking"] for each in outcome.events if isinstance(each, ReasoningBlock)]
    assert kept == ["first", "second"]
    with WireServer([Broken(Answer("never\n", thoughts=["first", "second"]), "cut", after=1)]) as server:
        outcome = outcome_of(VENDORS["anthropic.messages"](server))
    kept = [each.part.payload["thinking"] for each in outcome.events if isinstance(each, ReasoningBlock)]
    assert kept == ["first"]


@pytest.mark.parametrize("api", ["openai.chat", "openai.responses", "anthropic.messages"])
def test_answers_in_one_piece_are_what_the_sdks_expect(api: str) -> None:
    """The server can be asked without a stream as well."""
    answer = Answer("hi", [("double", {"number": 1})], usage=TokenUsage(5, 6, 1, 2))
    with WireServer([answer]) as server:
        if api == "anthropic.messages":
            with anthropic.Anthropic(api_key="k", base_url=server.anthropic_url) as client:
                message = client.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]
                )
            got = (message.content[0].text, message.content[1].input, message.usage.output_tokens)
        else:
            with openai.OpenAI(api_key="k", base_url=server.openai_url) as client:
                if api == "openai.chat":
                    chat = client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "x"}]
                    )
                    said = chat.choices[0].message
                    arguments = said.tool_calls[0].function.arguments
                    got = (said.content, json.loads(arguments), chat.usage.completion_tokens)
                else:
                    items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
                    response = client.responses.create(model="m", input=items)
                    arguments = json.loads(response.output[1].arguments)
                    got = (response.output_text, arguments, response.usage.output_tokens)
    assert got == ("hi", {"number": 1}, 6)


@every_vendor
def test_a_stream_that_falls_silent_is_given_up(make: Make) -> None:
    """After the time that was set; what was said until then is kept."""
    with WireServer([Broken(Answer("one\ntwo\n"), "hang", after=1)]) as server:
        error = outcome_of(make(server, timeout_s=2.0)).error
        assert server.requests[0].wait_closed()
    assert error is not None
    assert (error.kind, error.retryable, error.partial) == ("connection", True, "one\n")


@every_vendor
def test_a_slow_stream_is_waited_for(make: Make) -> None:
    with WireServer([Broken(Answer("one\ntwo\n"), "hang", after=1)]) as server:
        provider = make(server)

        async def listen() -> list[str]:
            seen = []
            async for each in provider.stream(ModelRequest((ReplayItem("user", "hi"),))):
                if isinstance(each, TextDelta):
                    seen.append(each.text)
                    server.release()
            return seen

        assert anyio.run(listen) == ["one\n", "two\n"]
        assert not server.requests[0].wait_closed()


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"POST /v1/messages HTTP/1.1\r\ncontent-length: x\r\n\r\n"]
)
def test_the_server_survives_what_is_no_request(sent: bytes) -> None:
    with WireServer(["still here"]) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
            raw.sendall(sent)
            assert raw.recv(1) == b""
        assert outcome_of(VENDORS["openai.chat"](server)).answer.text == "still here"


def test_the_server_refuses_what_a_provider_would_refuse() -> None:
    """A call without its result is a 400, as with the real thing."""
    calls = (ReplayCall("a", "double", "{}"),)
    request = ModelRequest((ReplayItem("user", "x"), ReplayItem("assistant", "", calls=calls)))
    for make in VENDORS.values():
        with WireServer(["never"]) as server:
            error = outcome_of(make(server), request).error
        assert error is not None
        assert error.kind == "bad_request"


def test_prices_are_by_call_usage() -> None:
    """The table is asked with normalised numbers: cached and written tokens are part of the input."""
    asked: list[CallUsage] = []

    class Table:
        def cost_usd(self, model: str, usage: CallUsage) -> float | None:
            asked.append(usage)
            return 1.5

    usage = TokenUsage(1000, 100, 600, 40)
    for make in VENDORS.values():
        with WireServer([Answer("hi", usage=usage, cache_write_tokens=300)]) as server:
            assert outcome_of(make(server, prices=Table())).answer.cost_usd == 1.5
        assert asked[-1] == CallUsage(1000, 100, 600, 300, 40)

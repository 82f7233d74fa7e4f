"""The providers against a server that is not ours: aimock, from npm, which imitates the vendors' interfaces.

Our own wire server and our providers were written by the same hands, and could be wrong in the same way.
`make test` installs this one below `.venv`. It runs in its strict mode, in which it refuses what no script of
its expects and what breaks the rules for blocks of thought, and it wants a key.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from treenail import Agent, Run, TurnState
from treenail.conversation import ReasoningPart, ToolCallRecord
from treenail.errors import ThrottleError
from treenail.providers import ModelRequest, Provider, ReasoningBlock, ReasoningDelta, Stopped, TextDelta
from treenail.providers.anthropic import Anthropic
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.state import TokenUsage
from treenail.testing.provider import CALCULATOR, CUT_KINDS, outcome_of, request_of, said
from treenail.testing.wire import WireServer
from treenail.turns import RetryPolicy

CLI = Path(sys.prefix) / "npm" / "node_modules" / "@copilotkit" / "aimock" / "dist" / "cli.js"
KEY = "a-key-of-a-stranger"
START_TIMEOUT_S = 60.0


# --- who is asked --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A provider, and what the server does not have on its interface."""

    make: Callable[[str, str], Provider]
    """From the server's address and a key."""
    counts: bool = True
    """The server reports the usage that a fixture sets."""
    can_stop_early: bool = True
    """The server reports the reason to stop that a fixture sets."""
    reads_all: bool = True
    """The server understands results as they come: it does not know all spellings that the vendor takes."""


def _litellm_on_anthropic(url: str, key: str, **extra: Any) -> Provider:
    return LiteLLM("anthropic/claude-sonnet-4-6", base_url=url, api_key=key, extra=extra)


ROUTES: dict[str, Route] = {
    "openai.responses": Route(lambda url, key: OpenAI("gpt-5", base_url=f"{url}/v1", api_key=key)),
    "openai.chat": Route(lambda url, key: OpenAI("gpt-5", api="chat", base_url=f"{url}/v1", api_key=key)),
    "anthropic.messages": Route(
        lambda url, key: Anthropic("claude-sonnet-4-6", base_url=url, api_key=key),
    ),
    "litellm.openai": Route(lambda url, key: LiteLLM("openai/gpt-5", base_url=f"{url}/v1", api_key=key)),
    "litellm.anthropic": Route(_litellm_on_anthropic),
    "litellm.gemini": Route(
        lambda url, key: LiteLLM("gemini/gemini-2.5-pro", base_url=f"{url}/v1beta", api_key=key),
        # LiteLLM writes `function_response`, which the vendor takes like `functionResponse`.
        reads_all=False,
    ),
    "litellm.ollama": Route(
        lambda url, key: LiteLLM("ollama_chat/qwen3", base_url=url, api_key=key),
        counts=False,
        can_stop_early=False,
    ),
}
READERS = [name for name, route in ROUTES.items() if route.reads_all]
THINKING = {"type": "enabled", "budget_tokens": 2000}
THINKERS: dict[str, Callable[[str], Provider]] = {
    "anthropic.messages": lambda url: Anthropic(
        "claude-sonnet-4-6", base_url=url, api_key=KEY, thinking=THINKING
    ),
    "litellm.anthropic": lambda url: _litellm_on_anthropic(url, KEY, thinking=THINKING),
}
"""Those that are made to think: then the server is strict about what goes back."""


# --- what is answered ----------------------------------------------------------------------------------

ANSWER = "Kelp grows half a metre a day, and it is no plant at all."
USAGE = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}
OVERFLOWS = {
    # As each vendor words it; the server takes any text.
    "openai": {"message": "This model's maximum context length is 8192.", "code": "context_length_exceeded"},
    "anthropic": {"message": "prompt is too long: 210000 tokens > 200000 maximum"},
    "gemini": {"message": "The input token count (2000000) exceeds the maximum number of tokens allowed."},
}


def _calls(*numbers: int) -> list[dict[str, Any]]:
    return [{"name": "double", "arguments": {"number": number}} for number in numbers]


def _failure(status: int, kind: str, message: str = "Not now.", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}, "status": status, **more}


def fixtures() -> Iterator[dict[str, Any]]:
    """Yield what the server is to say, by what the user says."""
    yield {"match": {"userMessage": "Tell me"}, "response": {"content": ANSWER, "usage": USAGE}}
    one = {"content": "Let me see.", "toolCalls": _calls(21)}
    yield {"match": {"userMessage": "Double one", "hasToolResult": False}, "response": one}
    yield {
        "match": {"userMessage": "Double one", "toolResultContains": "42"},
        "response": {"content": "It is 42."},
    }
    yield {
        "match": {"userMessage": "Double two", "hasToolResult": False},
        "response": {"toolCalls": _calls(21, 4), "usage": USAGE},
    }
    yield {
        "match": {"userMessage": "Double two", "hasToolResult": True},
        "response": {"content": "42 and 8."},
    }
    thoughtful = {
        "toolCalls": _calls(3),
        "reasoning": "Twice three, hm.",
        "reasoningSignature": "signed-by-a-stranger",
        "redactedThinking": ["b3BhcXVl"],
    }
    yield {"match": {"userMessage": "Think", "hasToolResult": False}, "response": thoughtful}
    plain = {"toolCalls": _calls(3), "reasoning": "Twice three, hm."}
    yield {"match": {"userMessage": "Ponder"}, "response": plain}
    yield {"match": {"userMessage": "Think", "hasToolResult": True}, "response": {"content": "6"}}
    yield {
        "match": {"userMessage": "A ship", "responseFormat": "json_schema"},
        "response": {"content": {"name": "Kelp"}},
    }
    yield {
        "match": {"userMessage": "Too much"},
        "response": _failure(429, "rate_limit_error", retryAfter=7),
    }
    yield {"match": {"userMessage": "Fall over"}, "response": _failure(500, "server_error")}
    yield {
        "match": {"userMessage": "Fail inside"},
        "response": {"content": ANSWER, "finishReason": "content_filter"},
    }
    yield {"match": {"userMessage": "Stop early"}, "response": {"content": ANSWER, "finishReason": "length"}}
    # Without a pause between them the pieces would be lost together with the connection.
    yield {
        "match": {"userMessage": "Break off"},
        "response": {"content": ANSWER},
        "chunkSize": 5,
        "latency": 10,
        "truncateAfterChunks": 8,
    }
    for vendor, error in OVERFLOWS.items():
        yield {
            "match": {"userMessage": f"Overflow {vendor}"},
            "response": {"error": {"type": "invalid_request_error", **error}, "status": 400},
        }
    for name in ROUTES:
        steps = [
            _failure(429, "rate_limit_error", retryAfter=0),
            _failure(503, "overloaded_error"),
            {"content": "Third time lucky."},
        ]
        for place, step in enumerate(steps):
            yield {"match": {"userMessage": f"Patience, {name}!", "sequenceIndex": place}, "response": step}
    for place, answer in enumerate(({"toolCalls": _calls(21, 4)}, {"content": "42 and 8."})):
        yield {"match": {"model": "gemini-2.5-pro", "sequenceIndex": place}, "response": answer}


# --- the server ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """The server, and what it saw."""

    url: str

    def provider(self, name: str, key: str = KEY) -> Provider:
        return ROUTES[name].make(self.url, key)

    def newest(self, marker: str) -> list[dict[str, Any]]:
        """Return the newest conversation that holds a text, as the server understood it."""
        request = urllib.request.Request(
            f"{self.url}/__aimock/journal", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request) as answer:
            entries = json.load(answer)
        found = [each["body"]["messages"] for each in entries if marker in json.dumps(each["body"])]
        newest: list[dict[str, Any]] = found[-1]
        return newest


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    """A server that is not ours, on a free port of the loopback."""
    node = shutil.which("node")
    assert node is not None, "node is not there: install it (20.15 or newer), then run `make test`"
    assert CLI.exists(), f"there is no server at {CLI}: run `make test` once, which installs it"
    script = tmp_path_factory.mktemp("foreign") / "fixtures.json"
    script.write_text(json.dumps({"fixtures": list(fixtures())}))
    command = [node, str(CLI), "-h", "127.0.0.1", "-p", "0", "-f", str(script), "--strict"]
    with subprocess.Popen(
        [*command, "--validate-on-load"],
        env={**os.environ, "AIMOCK_API_KEYS": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        killer = threading.Timer(START_TIMEOUT_S, server.kill)
        killer.start()
        told: list[str] = []
        url = ""
        for line in server.stdout:
            told.append(line)
            if (found := re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)) is not None:
                url = found[1]
                break
        killer.cancel()
        assert url, f"the server did not start: {''.join(told)}"
        # What it still has to say is read, so that it never waits for a reader.
        reader = threading.Thread(target=told.extend, args=(server.stdout,), daemon=True)
        reader.start()
        try:
            address = urlsplit(url)
            socket.create_connection((address.hostname, address.port), START_TIMEOUT_S).close()
            yield Foreign(url)
        finally:
            server.terminate()
            try:
                server.wait(START_TIMEOUT_S)
            finally:
                server.kill()
                reader.join(START_TIMEOUT_S)


def asked(provider: Provider, text: str, **fields: Any) -> Any:
    request = request_of(said("system", "Be brief."), said("user", text), provider=provider, **fields)
    return outcome_of(provider, request)


# --- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTES)
def test_an_answer_streams_from_a_foreign_server(foreign: Foreign, name: str) -> None:
    """In pieces, with one end, and with the numbers that the server gave."""
    outcome = asked(foreign.provider(name), "Tell me of kelp")
    assert outcome.error is None
    pieces = [each.text for each in outcome.events if isinstance(each, TextDelta)]
    assert len(pieces) > 1
    assert "".join(pieces) == ANSWER
    assert outcome.events[-1] == Stopped("end")
    assert sum(isinstance(each, Stopped) for each in outcome.events) == 1
    if ROUTES[name].counts:
        assert outcome.answer.usage == TokenUsage(120, 30, cached_tokens=0, reasoning_tokens=0)


def completed(run: Run, output: str) -> list[str]:
    """Check that a run is done, and return its results."""
    assert (run.state, run.output) == (TurnState.COMPLETED, output), run.result.details
    assert all(call.success for call in run.tool_calls)
    return [each.content for each in run.messages if each.role == "tool"]


@pytest.mark.parametrize("name", READERS)
def test_a_tool_call_goes_through_a_whole_turn(foreign: Foreign, name: str) -> None:
    """The call comes behind its text, and the foreign server finds the result where it belongs."""
    run = CALCULATOR.run(f"Double one number ({name})", provider=foreign.provider(name))
    assert completed(run, "It is 42.") == ["42"]
    (first, _) = [each for each in run.messages if each.role == "assistant"]
    assert (first.content, [call.name for call in first.tool_calls]) == ("Let me see.", ["double"])


@pytest.mark.parametrize("name", READERS)
def test_parallel_calls_have_their_own_results(foreign: Foreign, name: str) -> None:
    """Each result stands behind the calls and names its own, as the foreign server reads it."""
    text = f"Double two numbers ({name})"
    provider = foreign.provider(name)
    # Calls without effects run at the same time, and end in whatever order they end.
    assert sorted(completed(CALCULATOR.run(text, provider=provider), "42 and 8.")) == ["42", "8"]
    seen = foreign.newest(text)
    calls = [call for each in seen for call in each.get("tool_calls") or ()]
    assert [json.loads(call["function"]["arguments"])["number"] for call in calls] == [21, 4]
    results = [each for each in seen if each["role"] == "tool"]
    if name == "litellm.ollama":  # That interface has no ids: results are told apart by their order.
        assert [each["content"] for each in results] == ["42", "8"]
        return
    by_call = {each["tool_call_id"]: each["content"] for each in results}
    assert [by_call[call["id"]] for call in calls] == ["42", "8"]


def test_results_stand_in_the_order_of_their_calls_where_there_are_no_ids(foreign: Foreign) -> None:
    """In whatever order they came."""
    provider = foreign.provider("litellm.ollama")
    calls = (ToolCallRecord("a", "double", '{"number": 21}'), ToolCallRecord("b", "double", '{"number": 4}'))
    asked = request_of(
        said("user", "Double two numbers, backwards"),
        said("assistant", tool_calls=calls),
        said("tool", "8", tool_call_id="b", tool_name="double"),
        said("tool", "42", tool_call_id="a", tool_name="double"),
        provider=provider,
    )
    assert outcome_of(provider, asked).answer.text == "42 and 8."
    seen = foreign.newest("Double two numbers, backwards")
    assert [each["content"] for each in seen if each["role"] == "tool"] == ["42", "8"]


def test_a_turn_on_a_wire_of_another_kind(foreign: Foreign) -> None:
    """Gemini's, with parallel calls: the server does not read what LiteLLM sends there, so it counts."""
    run = CALCULATOR.run("Two numbers", provider=foreign.provider("litellm.gemini"))
    assert sorted(completed(run, "42 and 8.")) == ["42", "8"]


@pytest.mark.parametrize("name", ["openai.chat", "litellm.openai"])
def test_a_schema_is_asked_for_as_the_interface_wants_it(foreign: Foreign, name: str) -> None:
    """The server has an answer only for a request that carries a schema in the field for it."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    outcome = asked(foreign.provider(name), "A ship", output_schema=schema)
    assert outcome.error is None
    assert json.loads(outcome.answer.text) == {"name": "Kelp"}


# --- thoughts ------------------------------------------------------------------------------------------


def thoughts(run: Run) -> list[ReasoningPart]:
    return [part for each in run.messages for part in each.parts if isinstance(part, ReasoningPart)]


@pytest.mark.parametrize("name", THINKERS)
def test_signed_and_redacted_thoughts_go_back(foreign: Foreign, name: str) -> None:
    """The server refuses a turn that goes on without them in front, unsigned, or emptied."""
    run = CALCULATOR.run("Think of three", provider=THINKERS[name](foreign.url))
    assert completed(run, "6") == ["6"]
    kept = json.dumps([part.payload for part in thoughts(run)])
    assert all(each in kept for each in ("Twice three, hm.", "signed-by-a-stranger", "b3BhcXVl"))


class Insisting(Anthropic):
    """Asks for thoughts whatever the conversation holds."""

    def messages_body(self, request: ModelRequest) -> dict[str, Any]:
        return {**super().messages_body(request), "thinking": THINKING}


@pytest.mark.parametrize("insisting", [False, True])
@pytest.mark.parametrize("whose", ["foreign", "ours"])
def test_a_turn_that_another_model_began_goes_on_without_thoughts(
    foreign: Foreign, whose: str, insisting: bool
) -> None:
    """Its thoughts stay at home, and whoever asked for new ones in the middle would be refused."""
    made = Insisting if insisting else Anthropic
    with WireServer(["6"]) as server:
        url = server.url if whose == "ours" else foreign.url
        provider = made("claude-sonnet-4-6", base_url=url, api_key=KEY, thinking=THINKING)
        outcome = outcome_of(provider, begun_elsewhere(provider))
    if not insisting:
        assert outcome.error is None
        assert outcome.answer.text == "6"
        return
    assert outcome.error is not None
    assert outcome.error.kind == "bad_request"
    assert "thought" in str(outcome.error) or "`thinking`" in str(outcome.error)


def begun_elsewhere(provider: Provider) -> ModelRequest:
    """Make the request of a turn whose first call another model made."""
    call = ToolCallRecord("toolu_1", "double", '{"number": 3}')
    return request_of(
        said("user", "Think of three"),
        said("assistant", tool_calls=(call,)),
        said("tool", "6", tool_call_id="toolu_1", tool_name="double"),
        provider=provider,
    )


@pytest.mark.parametrize("name", ["openai.responses", "openai.chat", "litellm.openai"])
def test_thoughts_are_heard_and_kept(foreign: Foreign, name: str) -> None:
    """On OpenAI's interfaces, too; Responses' come with what only the vendor can read."""
    provider = foreign.provider(name)
    outcome = asked(provider, "Think of three")
    heard = "".join(each.text for each in outcome.events if isinstance(each, ReasoningDelta))
    assert heard == "Twice three, hm."
    (block,) = [each.part for each in outcome.events if isinstance(each, ReasoningBlock)]
    if name == "openai.responses":
        assert block.payload["encrypted_content"]
    assert completed(CALCULATOR.run("Think of three", provider=provider), "6") == ["6"]


# --- two servers ---------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Ponder three"}
INTERFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": [USER], "store": False},
    "/v1/messages": {"messages": [USER], "max_tokens": 100},
}


def streamed(url: str, path: str) -> list[dict[str, Any]]:
    """Ask a server, and return the events of its answer."""
    body = {"model": "o4", "stream": True, **INTERFACES[path]}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def kind_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        choices = [(sorted(each["delta"]), each["finish_reason"]) for each in event["choices"]]
        return f"{event['object']} {choices}"
    inner = event.get("delta") or event.get("item") or event.get("content_block")
    what = inner.get("type") if isinstance(inner, dict) else None
    return f"{event['type']} {what} {event.get('index', event.get('output_index'))}"


def told(events: list[dict[str, Any]]) -> list[tuple[str, set[str]]]:
    """Return what an answer consists of: kinds of events with their fields, however it is cut into pieces."""
    found: list[tuple[str, set[str]]] = []
    for each in events:
        kind = kind_of(each)
        # It may come anywhere, and thoughts have no place of their own on Chat Completions.
        if (
            each.get("type") != "ping"
            and "reasoning_content" not in kind
            and [kind] != [k for k, _ in found[-1:]]
        ):
            found.append((kind, set(each)))
    return found


@pytest.mark.parametrize("path", INTERFACES)
def test_our_own_server_says_what_the_foreign_one_says(foreign: Foreign, path: str) -> None:
    """The same events in the same order, and each with at least the same fields."""
    answer = Answer("", [("double", {"number": 3})], thoughts=["Twice three, hm."])
    with WireServer([answer]) as server:
        ours = told(streamed(server.url, path))
    theirs = told(streamed(foreign.url, path))
    assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
    assert [kind for (kind, fields), (_, wanted) in zip(ours, theirs, strict=True) if wanted - fields] == []


# --- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTES)
def test_a_throttled_call_says_how_long_to_wait(foreign: Foreign, name: str) -> None:
    """As the foreign server's Retry-After has it."""
    error = asked(foreign.provider(name), "Too much").error
    assert isinstance(error, ThrottleError)
    assert error.retry_after is not None
    assert (error.kind, error.retryable, error.retry_after.total_seconds()) == ("rate_limit", True, 7.0)


@pytest.mark.parametrize("name", ROUTES)
def test_a_servers_failure_is_one_for_the_moment(foreign: Foreign, name: str) -> None:
    """And says nothing of the key."""
    error = asked(foreign.provider(name), "Fall over").error
    assert error is not None
    assert (error.kind, error.retryable, error.partial) == ("transient", True, "")
    assert KEY not in str(error)


@pytest.mark.parametrize("name", ROUTES)
def test_patience_gets_an_answer(foreign: Foreign, name: str) -> None:
    """Throttled, overloaded, answered: one clean answer of three calls."""
    agent = Agent("patient", retry=RetryPolicy(attempts=3, base_s=0.001))
    run = agent.run(f"Patience, {name}!", provider=foreign.provider(name))
    assert run.output == "Third time lucky."


@pytest.mark.parametrize("name", ROUTES)
def test_a_stream_that_breaks_keeps_what_was_said(foreign: Foreign, name: str) -> None:
    """The beginning of the answer is in the error, and no end was seen."""
    outcome = asked(foreign.provider(name), "Break off")
    assert outcome.error is not None
    assert outcome.error.kind in CUT_KINDS
    assert 0 < len(outcome.error.partial) < len(ANSWER)
    assert ANSWER.startswith(outcome.error.partial)
    assert not any(isinstance(each, Stopped) for each in outcome.events)


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.can_stop_early])
def test_an_answer_that_reached_its_limit_says_so(foreign: Foreign, name: str) -> None:
    """It is not taken for a whole one."""
    outcome = asked(foreign.provider(name), "Stop early")
    assert outcome.events[-1] == Stopped("length")


def test_an_answer_that_failed_inside_is_none(foreign: Foreign) -> None:
    """On Responses the foreign server ends each answer as a completed one, also one that it calls failed."""
    outcome = asked(foreign.provider("openai.responses"), "Fail inside")
    assert outcome.error is not None
    assert outcome.error.partial == ANSWER
    assert not any(isinstance(each, Stopped) for each in outcome.events)


@pytest.mark.parametrize("name", ROUTES)
def test_a_conversation_that_does_not_fit_is_told_apart(foreign: Foreign, name: str) -> None:
    """From other bad requests, in each vendor's own words."""
    vendor = next((each for each in OVERFLOWS if each in name), "openai")
    error = asked(foreign.provider(name), f"Overflow {vendor}").error
    assert error is not None
    assert (error.kind, error.retryable) == ("context_too_long", False)


@pytest.mark.parametrize("name", ROUTES)
def test_a_wrong_key_is_told_apart(foreign: Foreign, name: str) -> None:
    """The key goes where the interface wants it: with the right one everything else here works."""
    error = asked(foreign.provider(name, "another-key-altogether"), "Tell me of kelp").error
    assert error is not None
    assert (error.kind, error.retryable) == ("authentication", False)
    assert "another-key-altogether" not in str(error)

"""How answers end on the wire: only a word on the adapter's own list of good ends completes a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treenail import Agent, TurnState, tool
from treenail.conversation import ReplayCall, ReplayItem
from treenail.log.sqlite import SqliteLog
from treenail.providers import ReasoningBlock, UsageReported
from treenail.providers.anthropic import Anthropic
from treenail.providers.anthropic_answer import AnthropicAnswer
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.providers.wire_formats import to_anthropic, to_openai_chat
from treenail.state import TokenUsage
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import Broken, Step, WireServer
from treenail.testing.wire_rules import openai_chat_violations

KEY = "sk-test-0123456789"
VENDORS: dict[str, Any] = {
    "openai.responses": lambda url: OpenAI("a-model", base_url=f"{url}/v1", api_key=KEY),
    "openai.chat": lambda url: OpenAI("a-model", api="chat", base_url=f"{url}/v1", api_key=KEY),
    "anthropic.messages": lambda url: Anthropic("a-model", base_url=url, api_key=KEY),
    "litellm.openai": lambda url: LiteLLM("openai/a-model", base_url=f"{url}/v1", api_key=KEY),
    "litellm.deepseek": lambda url: LiteLLM("deepseek/a-model", base_url=f"{url}/v1", api_key=KEY),
    "litellm.anthropic": lambda url: LiteLLM("anthropic/a-model", base_url=url, api_key=KEY),
}
WORDS = ("insufficient_system_resource", "error", "network_error", "a_new_one")


def said_by(name: str, step: Step, home: Path) -> Any:
    if name == "claude.agent":
        with ClaudeWireServer([step]) as server:
            provider: Any = ClaudeAgent(
                "a-model", base_url=server.url, api_key=KEY, env=claude_environment(home)
            )
            return Agent("worker", retry=None).run("Hi", provider=provider).result
    with WireServer([step]) as server:
        return Agent("worker", retry=None).run("Hi", provider=VENDORS[name](server.url)).result


@pytest.mark.parametrize("name", [*VENDORS, "claude.agent"])
def test_a_word_that_is_not_a_good_end_completes_nothing(name: str, tmp_path: Path) -> None:
    """Half an answer is `partial_failed`, none at all is `failed`, and the vendor's word is the evidence."""
    for word in WORDS if name != "claude.agent" else WORDS[-1:]:
        half = said_by(name, Answer("half an ans", stop="broken_off", stop_said=word), tmp_path)
        assert half.state is TurnState.PARTIAL_FAILED, word
        assert word in half.details
        assert half.text == "" or "half an ans" in half.text
        none = said_by(name, Answer("", stop="broken_off", stop_said=word), tmp_path)
        assert none.state is TurnState.FAILED, word


@pytest.mark.parametrize("name", [*VENDORS, "claude.agent"])
def test_an_end_without_a_reason_completes_nothing(name: str, tmp_path: Path) -> None:
    """As if the vendor had hung up: `message_stop` without `message_delta`, `[DONE]` without a finish."""
    ended = said_by(name, Broken(Answer("half an ans"), "unsaid"), tmp_path)
    assert ended.state is TurnState.PARTIAL_FAILED
    assert ended.error_kind == "connection"


@pytest.mark.parametrize("name", ["openai.chat", "anthropic.messages", "litellm.openai"])
def test_calls_of_an_answer_that_was_not_finished_are_not_run(name: str) -> None:
    """Nobody knows whether their arguments are whole."""
    ran: list[int] = []

    @tool
    def act() -> str:
        """Act."""
        ran.append(1)
        return "done"

    with WireServer([Answer("", [("act", {})], stop="broken_off", stop_said="network_error")]) as server:
        run = Agent("worker", tools=[act], retry=None).run("Hi", provider=VENDORS[name](server.url))
    assert (run.state, ran) == (TurnState.FAILED, [])


def test_a_vendor_that_wants_tools_and_names_none_is_not_done() -> None:
    """The words of an answer without a call do not make up for the call."""
    for name in ("openai.chat", "anthropic.messages", "litellm.openai", "litellm.anthropic"):
        ended = said_by(name, Answer("I will", stop="tools"), Path())
        assert ended.state is TurnState.PARTIAL_FAILED


# --- pauses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["anthropic.messages", "litellm.anthropic", "claude.agent"])
def test_a_pause_is_asked_to_go_on(name: str, tmp_path: Path) -> None:
    """The answer is what was said before the pause and after it."""
    script = [Answer("one, ", stop="paused"), Answer("two.")]
    if name == "claude.agent":
        with ClaudeWireServer(script) as server:
            provider: Any = ClaudeAgent(
                "a-model", base_url=server.url, api_key=KEY, env=claude_environment(tmp_path)
            )
            run = Agent("worker").run("Count", provider=provider)
    else:
        with WireServer(script) as server:
            run = Agent("worker").run("Count", provider=VENDORS[name](server.url))
    assert (run.state, run.output) == (TurnState.COMPLETED, "one, two.")
    assert len(server.requests) == 2
    assert "one," in str(server.requests[1].body["messages"])
    assert [each.violations for each in server.requests] == [(), ()]


KILLED = """
import os, signal, sys
from treenail import Agent
from treenail.providers.anthropic import Anthropic
provider = Anthropic("a-model", base_url=sys.argv[1], api_key="k")
asked = provider.stream
def stream(request):
    if request.answers_so_far:
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(request)
provider.stream = stream
Agent("worker").run("Count", provider=provider, store=sys.argv[2])
"""


def test_a_run_that_was_killed_in_a_pause_is_not_taken_for_done(tmp_path: Path) -> None:
    """The log says that its newest answer was paused, so the resumed run asks on."""
    store = tmp_path / "runs.db"
    with WireServer([Answer("one, ", stop="paused"), Answer("two.")], by_conversation=True) as server:
        died = subprocess.run(
            [sys.executable, "-c", KILLED, server.url, str(store)], capture_output=True, check=False
        )
        assert died.returncode == -signal.SIGKILL, died.stderr
        with SqliteLog(store) as log:
            (run_id,) = (each.session_id for each in log.sessions())
        run = Agent("worker").resume(
            store, run_id, provider=Anthropic("a-model", base_url=server.url, api_key="k")
        )
    assert (run.state, run.output) == (TurnState.COMPLETED, "one, two.")


def test_what_a_vendors_own_tools_brought_goes_back_unchanged() -> None:
    """A paused answer is continued from its own blocks, in their order."""
    events: list[Any] = [{"type": "message_start", "message": {"usage": {}}}]
    use = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "srv_1",
        "content": [{"encrypted_content": "x"}],
    }
    query = {"type": "input_json_delta", "partial_json": '{"query": "kelp"}'}
    text = {"type": "text_delta", "text": "Look: "}
    for block, delta in (({"type": "text", "text": ""}, text), (use, query), (found, None)):
        events.append({"type": "content_block_start", "content_block": block})
        if delta is not None:
            events.append({"type": "content_block_delta", "delta": delta})
        events.append({"type": "content_block_stop"})
    reading = AnthropicAnswer("m", "anthropic.messages", lambda *_, **__: UsageReported(TokenUsage()))
    seen = [each for event in events for each in reading.take(event)]
    parts = tuple(each.part for each in seen if isinstance(each, ReasoningBlock))
    item = ReplayItem("assistant", "Look: ", parts=parts)
    _, messages = to_anthropic([ReplayItem("user", "find kelp"), item])
    assert messages[-1]["content"] == [
        {"type": "text", "text": "Look: "},
        {**use, "input": {"query": "kelp"}},
        found,
    ]


# --- ids -----------------------------------------------------------------------------------------------


def test_long_call_ids_are_mapped_for_chat_completions_the_same_way_each_time() -> None:
    """It takes at most 40 characters; call and result keep each other."""
    ids = ["x" * 40, "y" * 41, "y" * 42, "toolu_" + "z" * 58, "é"]
    items: list[ReplayItem] = [ReplayItem("user", "go")]
    for each in ids:
        items.append(ReplayItem("assistant", "", calls=(ReplayCall(each, "act", "{}"),)))
        items.append(ReplayItem("tool", "done", call_id=each))
    messages = to_openai_chat(items)
    assert openai_chat_violations(messages) == []
    sent = [each["tool_calls"][0]["id"] for each in messages if each.get("tool_calls")]
    assert sent == [each["tool_call_id"] for each in messages if each["role"] == "tool"]
    assert sent[0] == ids[0]
    assert len(set(sent)) == len(ids) and all(len(each) <= 40 for each in sent)
    assert messages == to_openai_chat(items)
    long = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [
        {"id": "y" * 41, "function": {"name": "act", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "y" * 41, "content": "ok"}]  # fmt: skip
    assert "more than 40" in openai_chat_violations(long)[0]

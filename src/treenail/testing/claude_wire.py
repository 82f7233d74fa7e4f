"""A Messages server that the Claude CLI accepts, answering from a script.

The CLI does not send what a plain client of the interface sends: it puts reminders of its own into
the conversation (also as messages of the role `system`), merges what a person said with what was cut
off, marks its own places for the cache, and knows our tools by longer names. `ClaudeWireServer` takes
all of that, and is as strict as `WireServer` about the rest: results behind their calls, thoughts
unchanged. The same scripts can be played on both.

`claude_environment` keeps the CLI on this machine and out of the user's own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treenail.providers.scripted import Answer
from treenail.testing.wire import Api, Broken, Fault, Step, WireRequest, WireServer, violations_of
from treenail.tools import ToolCall

SYNTHETIC = "No response requested."
"""What the CLI makes its model say when it resumes a conversation that was cut off."""


def claude_environment(home: Path) -> dict[str, str]:
    """Return what the CLI's environment needs to be alone: a home of its own, and no proxies."""
    return {
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "HTTP_PROXY": "",
        "HTTPS_PROXY": "",
        "http_proxy": "",
        "https_proxy": "",
        "NO_PROXY": "127.0.0.1,localhost",
    }


class ClaudeWireServer(WireServer):
    """A model server for the Claude CLI. A script names our tools by their own names."""

    def _read(self, api: Api, body: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
        # The CLI asks for thoughts by itself, and a script need not have any.
        plain = {**body, "messages": list(_merged(body.get("messages") or ())), "thinking": None}
        answers = sum(
            message["role"] == "assistant" and _text(message) != SYNTHETIC for message in plain["messages"]
        )
        return answers, tuple(violations_of(api, plain))

    def _step(self, request: WireRequest) -> Step:
        step = super()._step(request)
        if isinstance(step, (Fault, str)):
            return step
        long_names = {
            name.rpartition("__")[2]: name
            for name in (str(each.get("name")) for each in request.body.get("tools", ()))
            if name.startswith("mcp__")
        }
        if isinstance(step, Broken):
            return replace(step, answer=_renamed(step.answer, long_names))
        return _renamed(step, long_names)


def _renamed(answer: Answer, names: Mapping[str, str]) -> Answer:
    calls: list[ToolCall | tuple[str, Mapping[str, Any]]] = []
    for call in answer.calls:
        if isinstance(call, ToolCall):
            calls.append(ToolCall(call.id, names.get(call.name, call.name), call.arguments))
        else:
            calls.append((names.get(call[0], call[0]), call[1]))
    return replace(answer, calls=calls)


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _text(message: Mapping[str, Any]) -> str:
    return "".join(str(each.get("text", "")) for each in _blocks(message))


def _merged(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave out the CLI's own words, and join messages of one role: results first, as the rules want them."""
    current: dict[str, Any] | None = None
    for message in messages:
        if message.get("role") == "system":
            continue
        if current is not None and current["role"] == message["role"]:
            current["content"] += _blocks(message)
            continue
        if current is not None:
            yield _in_order(current)
        current = {"role": message["role"], "content": _blocks(message)}
    if current is not None:
        yield _in_order(current)


def _in_order(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "user":
        message["content"].sort(key=lambda block: block.get("type") != "tool_result")
    return message

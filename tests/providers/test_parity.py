"""The same script of tool calls, failures included, ends the same on every provider."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from treenail import Agent, Run, TurnState, tool
from treenail.providers import Provider, VendorSession
from treenail.providers.anthropic import Anthropic
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import TokenUsage
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import WireServer
from treenail.tools import ToolCall


@tool
def write(path: str, text: str, *, context: Any) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool
def spoil(path: str, *, context: Any) -> str:
    """Write a file and fail."""
    context.filesystem.write(path, "spoiled")
    raise RuntimeError("the pen broke")


@tool(effects="none")
def count(word: str) -> int:
    """Count letters."""
    return len(word)


WRITER = Agent("writer", instructions="You write.", tools=(write, spoil, count))

USAGE = TokenUsage(input_tokens=100, output_tokens=20, cached_tokens=60, reasoning_tokens=5)

SCRIPT = [
    Answer(text, calls, usage=USAGE)
    for text, calls in [
        # One at a time: calls without effects run in parallel, and end in whatever order they end.
        ("Counting.\nA word.", [("count", {"word": "kelp"})]),
        ("", [("write", {"path": "a.txt", "text": "ä\n"}), ("write", {"path": "d/b.txt", "text": "b"})]),
        ("", [("spoil", {"path": "a.txt"}), ("spoil", {"path": "c.txt"})]),
        ("", [("write", {"path": "../out.txt", "text": "no"}), ("nosuch", {"x": 1})]),
        ("", [ToolCall("odd", "write", '{"path": "e.txt"'), ToolCall("odd", "count", '{"word": 5}')]),
        ("", [("write", {"path": "a.txt", "text": "better\n"})]),
        ("All written.", []),
    ]
]


@contextmanager
def opened(name: str, home: Path) -> Iterator[Provider]:
    if name == "scripted":
        yield ScriptedProvider(SCRIPT)
        return
    if name == "claude.agent":
        with ClaudeWireServer(SCRIPT) as server:
            yield ClaudeAgent("a-model", base_url=server.url, api_key="k", env=claude_environment(home))
        return
    with WireServer(SCRIPT) as server:
        if name == "anthropic.messages":
            yield Anthropic("a-model", base_url=server.anthropic_url, api_key="k")
        elif name == "litellm.openai":
            yield LiteLLM("openai/a-model", base_url=server.openai_url, api_key="k")
        elif name == "litellm.anthropic":
            yield LiteLLM("anthropic/a-model", base_url=server.anthropic_url, api_key="k")
        else:
            api = "chat" if name == "openai.chat" else "responses"
            yield OpenAI("a-model", api=api, base_url=server.openai_url, api_key="k")  # type: ignore[arg-type]  # one of the two, from a parameter


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


ID = re.compile(r"\b(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{16,40})\b")
PROVIDER_FIELDS = {
    "provider",
    "model",
    "cost_usd",
    "adapter",
    "elapsed_ms",
    "workspace",
}
"""What may differ: who answered, at what price and how fast; and where the run was."""


def plain(value: Any) -> Any:
    """Turn an event into data that does not depend on ids, times or the provider."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: plain(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.name not in PROVIDER_FIELDS
        }
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items() if key not in PROVIDER_FIELDS}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, UUID):
        return "<id>"
    if isinstance(value, datetime):
        return "<time>"
    return ID.sub("<id>", value) if isinstance(value, str) else value


def story(run: Run) -> list[tuple[str, Any]]:
    events = run.execution_state.session.events()
    # A vendor's loop keeps a conversation of its own, and says which one.
    return [
        (envelope.type, plain(value)) for envelope, value in events if not isinstance(value, VendorSession)
    ]


def played(name: str, where: Path) -> tuple[Run, dict[str, bytes]]:
    root = where / name
    root.mkdir()
    with opened(name, where) as provider:
        run = WRITER.run("Write", provider=provider, workspace=root, store=where / f"{name}.db")
    return run, files(root)


@pytest.mark.parametrize(
    "name",
    [
        "openai.responses",
        "openai.chat",
        "anthropic.messages",
        "litellm.openai",
        "litellm.anthropic",
        "claude.agent",
    ],
)
def test_a_script_ends_the_same_on_every_provider(name: str, tmp_path: Path) -> None:
    """Equal answers, equal files, equal logs but for the provider's own fields."""
    expected, expected_files = played("scripted", tmp_path)
    run, written = played(name, tmp_path)
    with expected, run:
        assert expected.state is TurnState.COMPLETED
        assert expected_files == {"a.txt": b"better\n", "d/b.txt": b"b"}
        assert written == expected_files
        assert (run.state, run.output) == (expected.state, expected.output)
        assert [(c.name, c.success) for c in run.tool_calls] == [
            (c.name, c.success) for c in expected.tool_calls
        ]
        assert story(run) == story(expected)
        snapshots = [each.execution_state.session.snapshot() for each in (run, expected)]
        assert plain(snapshots[0].slices) == plain(snapshots[1].slices)

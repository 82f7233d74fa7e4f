"""Pictures and long results of tools, over the wire of every provider, a vendor's own loop included."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from treenail import Agent, TurnState, tool
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import Step, WireRequest, WireServer
from treenail.turns import MAX_SHOWN_CHARS


def _chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))


DOT = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + _chunk(b"IEND", b"")
)
"""A red dot: a real picture, which a vendor's program may open."""

LONG = "word " * 30_000


@tool(effects="none")
def draw() -> bytes:
    """Draw a dot."""
    return DOT


@tool(effects="none")
def talk() -> str:
    """Talk at length."""
    return LONG


@contextmanager
def opened(name: str, script: Callable[[WireRequest], Step], home: Path) -> Iterator[tuple[Provider, Any]]:
    if name == "claude.agent":
        with ClaudeWireServer(script) as server:
            yield (
                ClaudeAgent("a-model", base_url=server.url, api_key="k", env=claude_environment(home)),
                server,
            )
        return
    with WireServer(script) as server:
        if name == "anthropic.messages":
            yield Anthropic("a-model", base_url=server.anthropic_url, api_key="k"), server
        else:
            api: Any = name.removeprefix("openai.")
            yield OpenAI("a-model", api=api, base_url=server.openai_url, api_key="k"), server


@pytest.mark.parametrize("name", ["openai.chat", "openai.responses", "anthropic.messages", "claude.agent"])
def test_the_model_is_sent_the_picture_and_the_cut_text_and_reads_on(name: str, tmp_path: Path) -> None:
    sent: list[str] = []
    last_page = {"call_id": "", "start": len(LONG) - 10}

    def script(request: WireRequest) -> Step:
        sent.append(json.dumps(request.body, ensure_ascii=False))
        if len(sent) == 1:
            return Answer("", [("draw", {}), ("talk", {})])
        if len(sent) == 2:
            said = sent[1].partition("read_result(call_id=")[2]
            last_page["call_id"] = said.partition(",")[0].strip("'\\\"")
            return Answer("", [("read_result", last_page)])
        return Answer("It is red.")

    with opened(name, script, tmp_path) as (provider, server):
        run = Agent("painter", tools=(draw, talk), retry=None).run("Draw", provider=provider)
        assert [each.violations for each in server.requests if each.violations] == []
    assert (run.state, run.output) == (TurnState.COMPLETED, "It is red."), run.result
    assert b64encode(DOT).decode() in sent[1]
    assert LONG[:MAX_SHOWN_CHARS] in sent[1]
    assert LONG[: MAX_SHOWN_CHARS + 10] not in sent[1]
    assert "read_result" not in sent[0]
    assert [each.content for each in run.messages if each.role == "tool"][-1] == LONG[-10:]
    run.close()

"""What is particular to LiteLLM: its import, its pieces of thought, its names of models."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from treenail.containment import CallUsage, Price, StaticPrices
from treenail.conversation import ReplayItem
from treenail.errors import UsageError
from treenail.providers import ModelRequest
from treenail.providers.litellm import LiteLLM, _Thoughts
from treenail.providers.scripted import Answer
from treenail.testing.provider import double, outcome_of
from treenail.testing.wire import Broken, WireServer

OFFLINE = """
import socket
def refused(*_, **__): raise SystemExit("the import went to the network")
socket.socket.connect = socket.getaddrinfo = refused
import treenail.providers.litellm
print("imported")
"""


def test_importing_the_provider_needs_no_network() -> None:
    """LiteLLM would fetch a table of prices while it is imported."""
    ran = subprocess.run(
        [sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "imported\n"), ran.stderr


def test_under_trio_it_says_what_it_needs() -> None:
    """It is written for asyncio; a call must not look like a broken connection that is worth another try."""

    async def ask() -> None:
        provider = LiteLLM("openai/a-model", base_url="http://127.0.0.1:9/v1", api_key="k")
        with pytest.raises(UsageError, match="asyncio"):
            await anext(provider.stream(ModelRequest((ReplayItem("user", "hi"),))))

    anyio.run(ask, backend="trio")


def piece(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def test_signed_thoughts_are_put_together_and_one_without_its_signature_stays_out() -> None:
    """A vendor that signs its thoughts wants them back whole, and takes none that was cut off."""
    thoughts = _Thoughts()
    for block in (
        {"type": "thinking", "thinking": "a"},
        {"type": "thinking", "thinking": "b"},
        {"type": "thinking", "thinking": "", "signature": "s1"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "cut"},
    ):
        thoughts.add(piece(thinking_blocks=[block], reasoning_content=block.get("thinking")))
    assert thoughts.payload() == {
        "reasoning_content": "abcut",
        "thinking_blocks": [
            {"type": "thinking", "thinking": "ab", "signature": "s1"},
            {"type": "redacted_thinking", "data": "x"},
        ],
    }


def test_a_price_is_found_with_and_without_the_vendors_name() -> None:
    usage = CallUsage(input_tokens=1_000_000)
    for known in ("openai/a-model", "a-model"):
        provider = LiteLLM("openai/a-model", prices=StaticPrices({known: Price(2.0, 0.0)}))
        assert provider._price(usage) == 2.0
    assert LiteLLM("openai/a-model", prices=StaticPrices({"other": Price(2.0, 0.0)}))._price(usage) is None


def test_settings_reach_litellm_and_the_key_is_not_among_them() -> None:
    request = ModelRequest((ReplayItem("system", "S"), ReplayItem("user", "U")), tools=(double,))
    asked = LiteLLM(
        "openai/m",
        api_key="k",
        base_url="http://127.0.0.1:9/v1",
        max_output_tokens=9,
        temperature=0.5,
        timeout_s=3.0,
        extra={"tool_choice": "required"},
    ).arguments(request)
    assert (asked["max_tokens"], asked["temperature"], asked["timeout"]) == (9, 0.5, 3.0)
    assert (asked["max_retries"], asked["num_retries"], asked["tool_choice"]) == (0, 0, "required")
    assert asked["tools"][0]["function"]["name"] == "double"
    assert "k" not in asked.values()


def test_usage_that_the_vendor_did_not_report_is_not_made_up() -> None:
    """LiteLLM counts by itself if nobody else does; that is a guess, and would look like a fact."""
    with WireServer([Broken(Answer("one\ntwo\n"), "ended", after=1)]) as server:
        outcome = outcome_of(LiteLLM("openai/a-model", base_url=server.openai_url, api_key="k"))
    assert outcome.answer.usage.total is None
    assert outcome.error is not None
    assert outcome.error.partial == "one\n"

"""A run that began on one provider goes on with any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treenail import Agent, TurnState, tool
from treenail.log import MemoryLog
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.testing.wire import Fault, Step, WireServer

APIS = ("openai.responses", "openai.chat", "anthropic.messages", "litellm.chat")
THOUGHT = "Nobody else may read this thought."


@tool
def note(line: str, *, context: Any) -> str:
    """Add a line to the notes."""
    context.filesystem.write("notes.txt", line + "\n", mode="append")
    return f"noted {line}"


NOTER = Agent("noter", instructions="You take notes.", tools=(note,), retry=None)
FIRST = Answer("First.", [("note", {"line": "one"}), ("note", {"line": "two"})], thoughts=[THOUGHT])


def provider_of(api: str, server: WireServer, model: str) -> Provider:
    if api == "anthropic.messages":
        return Anthropic(model, base_url=server.anthropic_url, api_key="k")
    if api == "litellm.chat":
        return LiteLLM(f"openai/{model}", base_url=server.openai_url, api_key="k")
    return OpenAI(model, api=api.split(".")[1], base_url=server.openai_url, api_key="k")  # type: ignore[arg-type]  # one of the two, from a parameter


# What LiteLLM does with pydantic is its own affair: it warns inside of its calls.
@pytest.mark.filterwarnings("ignore:Item:UserWarning", "ignore:Accessing the 'model:DeprecationWarning")
@pytest.mark.parametrize("second", APIS)
@pytest.mark.parametrize("first", APIS)
def test_another_provider_goes_on_with_a_run_that_failed(first: str, second: str, tmp_path: Path) -> None:
    """It is sent the conversation in its own words, no other's thoughts, and no call is run twice."""
    log = MemoryLog()
    steps: list[Step] = [FIRST, Fault("authentication")]
    with WireServer(steps) as server:
        begun = NOTER.run(
            "Take notes", provider=provider_of(first, server, "a-model"), store=log, workspace=tmp_path
        )
        assert begun.state is TurnState.FAILED
        begun.close()
    with WireServer([Answer("Noted.")]) as server:
        provider = provider_of(second, server, "another-model")
        with NOTER.resume(log, begun.id, provider=provider, workspace=tmp_path) as run:
            assert (run.state, run.output) == (TurnState.COMPLETED, "Noted."), run.result.details
        (request,) = server.requests
    assert request.violations == ()
    sent = json.dumps(request.body)
    assert all(text in sent for text in ("Take notes", "First.", "noted one", "noted two"))
    assert THOUGHT not in sent
    assert (tmp_path / "notes.txt").read_text() == "one\ntwo\n"

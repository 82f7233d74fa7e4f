"""A key that a run is given is nowhere in what the run leaves behind, whichever provider it is on."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treenail import TurnState, telemetry
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.telemetry.otel import OpenTelemetry
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.provider import CALCULATOR
from treenail.testing.wire import Fault, Step, WireServer

# Nothing in it looks like a key: it must be known as one.
SECRET = "quite ordinary words 4711"

STEPS: list[Step] = [
    Answer("Doubling.", [("double", {"number": 2})]),
    Fault("unauthorized", message=f"we know nobody with the key {SECRET} here"),
]


@contextmanager
def opened(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    if name == "claude.agent":
        with ClaudeWireServer(STEPS) as server:
            env = claude_environment(home)
            yield ClaudeAgent("a-model", base_url=server.url, api_key=SECRET, env=env)
        return
    with WireServer(STEPS) as server:
        if name == "openai.responses":
            yield OpenAI("a-model", base_url=server.openai_url, api_key=SECRET)
        elif name == "openai.chat":
            yield OpenAI("a-model", api="chat", base_url=server.openai_url, api_key=SECRET)
        elif name == "anthropic.messages":
            yield Anthropic("a-model", base_url=server.anthropic_url, api_key=SECRET)
        elif name == "litellm.openai":
            yield LiteLLM("openai/a-model", base_url=server.openai_url, api_key=SECRET)
        elif name == "litellm.anthropic":
            yield LiteLLM("anthropic/a-model", base_url=server.anthropic_url, api_key=SECRET)
        else:
            # Found by the SDK itself, and never told to the provider.
            monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
            if name == "anthropic.environment":
                yield Anthropic("a-model", base_url=server.anthropic_url)
            else:
                yield LiteLLM("anthropic/a-model", base_url=server.anthropic_url)


@pytest.mark.parametrize(
    "name",
    [
        "openai.responses",
        "openai.chat",
        "anthropic.messages",
        "anthropic.environment",
        "litellm.openai",
        "litellm.anthropic",
        "litellm.environment",
        "claude.agent",
    ],
)
def test_a_key_is_in_nothing_that_a_run_leaves_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the store's bytes, spans, metrics, logs of any level, the ending or its exception."""
    caplog.set_level(logging.DEBUG)
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    telemetry.use(OpenTelemetry(tracing, MeterProvider([metrics])))
    store = tmp_path / "store" / "runs.db"
    store.parent.mkdir()
    try:
        with (
            opened(name, tmp_path, monkeypatch) as provider,
            CALCULATOR.run("Double 2", provider=provider, store=store) as run,
        ):
            assert run.state is TurnState.FAILED
            assert (run.result.error_kind, run.tool_calls[0].success) == ("authentication", True)
            error = run.result.error
            told = (run.result.details, *run.next_actions, repr(provider), repr(run.messages))
    finally:
        telemetry.use(None)
    assert error is not None
    assert "we know nobody" in str(error)
    exported = "".join(each.to_json() for each in spans.get_finished_spans())
    assert "chat a-model" in exported.replace("openai/", "").replace("anthropic/", "")
    measured = metrics.get_metrics_data()
    left = {
        "store": b"".join(each.read_bytes() for each in store.parent.rglob("*") if each.is_file()).decode(
            errors="replace"
        ),
        "spans": exported,
        "metrics": "" if measured is None else measured.to_json(),
        "logs": caplog.text,
        "ending": "\n".join(told),
        "exception": "".join(traceback.format_exception(error)) + repr(vars(error)),
    }
    assert [where for where, text in left.items() if SECRET in text] == []

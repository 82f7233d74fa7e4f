"""What telemetry is told about a turn, with the names of the conventions for generative AI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from uuid import UUID

from treenail import telemetry
from treenail.clock import Clock
from treenail.providers.answer import CollectedAnswer, Collector
from treenail.state.run_context import RunContext
from treenail.telemetry import Span
from treenail.telemetry.base import NO_SPAN
from treenail.tools.tool import ToolCall

_NOBODY: AbstractContextManager[object] = nullcontext()


def _vendor(provider: str) -> str:
    """Return a provider's name as the conventions know it: whose model it is, not how it is called."""
    vendor = provider.partition(".")[0]
    return "anthropic" if vendor == "claude" else vendor


def turn_span(
    agent: str, session_id: UUID, provider: str, model: str, run_context: RunContext | None
) -> AbstractContextManager[tuple[Span, RunContext | None]]:
    """Watch a turn. Its run context gets the ids of the span, so that the log and the trace can be joined."""
    if telemetry.is_on():
        return _turn_span(agent, session_id, provider, model, run_context)
    return nullcontext((NO_SPAN, run_context))


@contextmanager
def _turn_span(
    agent: str, session_id: UUID, provider: str, model: str, run_context: RunContext | None
) -> Iterator[tuple[Span, RunContext | None]]:
    with (
        telemetry.span(
            f"invoke_agent {agent}",
            gen_ai__operation__name="invoke_agent",
            gen_ai__agent__name=agent,
            gen_ai__conversation__id=str(session_id),
            gen_ai__provider__name=_vendor(provider),
            gen_ai__request__model=model,
        ) as span,
        telemetry.bind(session_id=str(session_id), trace_id=span.trace_id, span_id=span.span_id),
    ):
        context = run_context
        if span.trace_id is not None:
            context = replace(
                run_context or RunContext.new(session_id=session_id),
                trace_id=span.trace_id,
                span_id=span.span_id,
            )
        yield span, context


def turn_ended(span: Span, state: str, kind: str | None) -> None:
    """Say how a turn ended."""
    if telemetry.is_on():
        span.set("treenail.turn.state", state)
        if state != "completed":
            span.fail(kind or state)
        telemetry.record("treenail.turns", 1, treenail__turn__state=state, error__type=kind)


def model_span(
    provider: str, model: str, clock: Clock, collector: Collector
) -> AbstractContextManager[object]:
    """Watch a model call, whose answer is collected meanwhile."""
    return _model_span(provider, model, clock, collector) if telemetry.is_on() else _NOBODY


@contextmanager
def _model_span(provider: str, model: str, clock: Clock, collector: Collector) -> Iterator[None]:
    began = clock.monotonic()
    about = {
        "gen_ai__operation__name": "chat",
        "gen_ai__provider__name": _vendor(provider),
        "gen_ai__request__model": model,
    }
    failed: str | None = None
    with telemetry.span(f"chat {model}", **about, gen_ai__request__stream=True) as span:
        try:
            yield
        except BaseException as error:
            failed = type(error).__qualname__
            raise
        finally:
            elapsed = clock.monotonic() - began
            telemetry.record("gen_ai.client.operation.duration", elapsed, **about, error__type=failed)
            _tell_usage(span, collector.answer(), about)


def _tell_usage(span: Span, answer: CollectedAnswer, about: dict[str, str]) -> None:
    usage = answer.usage
    span.set("gen_ai.response.finish_reasons", (answer.stop,))
    span.set("gen_ai.usage.input_tokens", usage.input_tokens)
    span.set("gen_ai.usage.output_tokens", usage.output_tokens)
    span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    span.set("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens)
    span.set("treenail.cost_usd", answer.cost_usd)
    for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
        if tokens is not None:
            telemetry.record("gen_ai.client.token.usage", tokens, **about, gen_ai__token__type=kind)
    if answer.cost_usd is not None:
        telemetry.record("treenail.cost", answer.cost_usd, **about)


@contextmanager
def tool_span(call: ToolCall, clock: Clock) -> Iterator[Span]:
    """Watch a tool call, its commit or rollback included."""
    began = clock.monotonic()
    try:
        with telemetry.span(
            f"execute_tool {call.name}",
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name=call.name,
            gen_ai__tool__call__id=call.id,
            gen_ai__tool__type="function",
        ) as span:
            yield span
    finally:
        elapsed = clock.monotonic() - began
        telemetry.record("treenail.tool.duration", elapsed, gen_ai__tool__name=call.name)


def tool_failed(span: Span, call: ToolCall) -> None:
    """Say that a call failed and was rolled back."""
    span.fail("tool_error")
    telemetry.record("treenail.tool.rollbacks", 1, gen_ai__tool__name=call.name)

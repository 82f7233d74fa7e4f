"""The spans and measurements of a turn, named after the conventions for generative AI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from uuid import UUID

from treenail import telemetry
from treenail.clock import Clock
from treenail.providers import CollectedAnswer, Collector
from treenail.state import RunContext
from treenail.telemetry import Span
from treenail.tools import ToolCall


def _vendor(provider: str) -> str:
    """Return a provider's name as the conventions know it: whose model it is, not how it is called."""
    vendor = provider.partition(".")[0]
    return "anthropic" if vendor == "claude" else vendor


@dataclass(slots=True)
class TurnSpan:
    """The span of a turn, and the run context whose ids join the log and the trace."""

    span: Span
    run_context: RunContext | None

    def ended(self, state: str, kind: str | None) -> None:
        """Record how the turn ended."""
        self.span.set("treenail.turn.state", state)
        if state != "completed":
            self.span.fail(kind or state)
        telemetry.record("treenail.turns", 1, treenail__turn__state=state, error__type=kind)


@contextmanager
def turn_span(
    agent: str, session_id: UUID, provider: str, model: str, run_context: RunContext | None
) -> Iterator[TurnSpan]:
    """Put a turn into a span."""
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
        yield TurnSpan(span, context)


@contextmanager
def model_span(provider: str, model: str, clock: Clock, collector: Collector) -> Iterator[None]:
    """Put a model call into a span, while its answer is collected."""
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
            _record_usage(span, collector.answer(), about)


def _record_usage(span: Span, answer: CollectedAnswer, about: dict[str, str]) -> None:
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


@dataclass(slots=True)
class ToolSpan:
    """The span of a tool call."""

    span: Span
    name: str

    def ended(self, *, success: bool) -> None:
        """Record whether the call was kept or rolled back."""
        if not success:
            self.span.fail("tool_error")
            telemetry.record("treenail.tool.rollbacks", 1, gen_ai__tool__name=self.name)


@contextmanager
def tool_span(call: ToolCall, clock: Clock) -> Iterator[ToolSpan]:
    """Put a tool call, its commit or rollback included, into a span."""
    began = clock.monotonic()
    try:
        with telemetry.span(
            f"execute_tool {call.name}",
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name=call.name,
            gen_ai__tool__call__id=call.id,
            gen_ai__tool__type="function",
        ) as span:
            yield ToolSpan(span, call.name)
    finally:
        elapsed = clock.monotonic() - began
        telemetry.record("treenail.tool.duration", elapsed, gen_ai__tool__name=call.name)

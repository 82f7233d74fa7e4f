"""Telemetry on OpenTelemetry, with the names of its conventions for generative AI.

Needs the extra `otel`. `instrument()` uses the tracer and meter providers that the program has configured:

    from treenail.telemetry.otel import instrument

    instrument()
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Histogram, MeterProvider
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from treenail import telemetry
from treenail.telemetry import Attribute, OpenSpan, Span

# The boundaries that the conventions advise: with the default ones every call falls into one bucket.
_SECONDS = tuple(0.01 * 2**each for each in range(14))
_TOKENS = tuple(4**each for each in range(14))

_HISTOGRAMS = {
    "gen_ai.client.token.usage": ("{token}", "Tokens of one model call, by their type.", _TOKENS),
    "gen_ai.client.operation.duration": ("s", "How long an operation took.", _SECONDS),
    "treenail.tool.duration": ("s", "How long a tool call took, with its commit or rollback.", _SECONDS),
    "treenail.judge.duration": ("s", "How long a judge took.", _SECONDS),
    "treenail.nested.token.usage": ("{token}", "Tokens of one nested evaluation, by their type.", _TOKENS),
    "treenail.nested.duration": ("s", "How long a nested evaluation took.", _SECONDS),
    "treenail.subagent.duration": ("s", "How long a subagent worked.", _SECONDS),
}
_COUNTERS = {
    "treenail.cost": ("USD", "Money spent on model calls."),
    "treenail.tool.rollbacks": ("{call}", "Tool calls that were rolled back."),
    "treenail.turns": ("{turn}", "Turns, by how they ended."),
    "treenail.judgements": ("{judgement}", "Judgements, by their result."),
    "treenail.nested.cost": ("USD", "Money spent on nested evaluations; a part of treenail.cost."),
    "treenail.subagents": ("{subagent}", "Subagents, by how they ended."),
}

_CLIENT_OPERATIONS = ("chat",)
"""Operations that call a remote service."""


class OpenTelemetry:
    """Sends spans and measurements to an OpenTelemetry tracer and meter."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        version = importlib.metadata.version("treenail")
        self._tracer = trace.get_tracer("treenail", version, tracer_provider)
        meter = metrics.get_meter("treenail", version, meter_provider)
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(
                name, unit=unit, description=about, explicit_bucket_boundaries_advisory=bounds
            )
            for name, (unit, about, bounds) in _HISTOGRAMS.items()
        }
        self._counters: dict[str, Counter] = {
            name: meter.create_counter(name, unit=unit, description=about)
            for name, (unit, about) in _COUNTERS.items()
        }

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
        """Begin a span below the current one."""
        with self._tracer.start_as_current_span(
            name,
            kind=_kind(name),
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as begun:
            watched = _Watched(begun)
            try:
                yield watched
            except BaseException as error:
                # The message may quote what a model or a tool said; the kind is enough to find the log.
                watched.fail(type(error).__qualname__)
                raise

    def begin(self, name: str, attributes: Mapping[str, Attribute]) -> OpenSpan:
        """Begin a span below the current one, without making it the current one."""
        return _Watched(self._tracer.start_span(name, kind=_kind(name), attributes=dict(attributes)))

    def here(self) -> object:
        """Return the context that the current span is in."""
        return context.get_current()

    @contextmanager
    def under(self, place: object) -> Iterator[None]:
        """Make a context the current one."""
        if not isinstance(place, Context):
            raise TypeError(f"{place!r} is not a place in a trace")
        token = context.attach(place)
        try:
            yield
        finally:
            context.detach(token)

    def record(self, name: str, value: float, attributes: Mapping[str, Attribute]) -> None:
        """Record a measurement; an unknown name is ignored."""
        if name in self._histograms:
            self._histograms[name].record(value, dict(attributes))
        elif name in self._counters:
            self._counters[name].add(value, dict(attributes))


class _Watched:
    """An OpenTelemetry span behind the `Span` protocol."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        ids = span.get_span_context()
        self.trace_id: str | None = f"{ids.trace_id:032x}" if ids.is_valid else None
        self.span_id: str | None = f"{ids.span_id:016x}" if ids.is_valid else None

    @property
    def place(self) -> object:
        """The context in which this span is the current one."""
        return trace.set_span_in_context(self._span)

    def end(self) -> None:
        """End the span."""
        self._span.end()

    def set(self, name: str, value: Attribute | None) -> None:
        """Set an attribute."""
        if value is not None:
            self._span.set_attribute(name, value)

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message or kind))


def _kind(name: str) -> SpanKind:
    return SpanKind.CLIENT if name.partition(" ")[0] in _CLIENT_OPERATIONS else SpanKind.INTERNAL


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Send the telemetry of this process to OpenTelemetry."""
    telemetry.use(OpenTelemetry(tracer_provider, meter_provider))

"""Telemetry on OpenTelemetry, with the names of its conventions for generative AI.

Needs the extra `otel`. `instrument()` uses the providers that the program has configured:

    from holdfast.telemetry.otel import instrument

    instrument()
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import metrics, trace
from opentelemetry.metrics import Counter, Histogram, MeterProvider
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from holdfast import telemetry
from holdfast.telemetry import Attribute, Span

_HISTOGRAMS = {
    "gen_ai.client.token.usage": ("{token}", "Tokens of one model call, by their type."),
    "gen_ai.client.operation.duration": ("s", "How long an operation took."),
    "holdfast.tool.duration": ("s", "How long a tool call took, with its commit or rollback."),
}
_COUNTERS = {
    "holdfast.cost": ("USD", "Money spent on model calls."),
    "holdfast.tool.rollbacks": ("{call}", "Tool calls that were rolled back."),
    "holdfast.turns": ("{turn}", "Turns, by how they ended."),
    "holdfast.judgements": ("{judgement}", "Judges that were asked, by what came of it."),
}

_CLIENT_OPERATIONS = ("chat",)
"""Spans that are calls of somebody else's service."""


class OpenTelemetry:
    """Gives what it hears to an OpenTelemetry tracer and meter."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        version = importlib.metadata.version("holdfast")
        self._tracer = trace.get_tracer("holdfast", version, tracer_provider)
        meter = metrics.get_meter("holdfast", version, meter_provider)
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit=unit, description=about)
            for name, (unit, about) in _HISTOGRAMS.items()
        }
        self._counters: dict[str, Counter] = {
            name: meter.create_counter(name, unit=unit, description=about)
            for name, (unit, about) in _COUNTERS.items()
        }

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
        """Begin a span below the current one."""
        operation = name.partition(" ")[0]
        kind = SpanKind.CLIENT if operation in _CLIENT_OPERATIONS else SpanKind.INTERNAL
        with self._tracer.start_as_current_span(
            name,
            kind=kind,
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

    def record(self, name: str, value: float, attributes: Mapping[str, Attribute]) -> None:
        """Take a measurement; an unknown one is left alone."""
        if name in self._histograms:
            self._histograms[name].record(value, dict(attributes))
        elif name in self._counters:
            self._counters[name].add(value, dict(attributes))


class _Watched:
    """An OpenTelemetry span as the rooms know it."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id: str | None = f"{context.trace_id:032x}" if context.is_valid else None
        self.span_id: str | None = f"{context.span_id:016x}" if context.is_valid else None

    def set(self, name: str, value: Attribute | None) -> None:
        """Set an attribute."""
        if value is not None:
            self._span.set_attribute(name, value)

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message or kind))


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Let OpenTelemetry listen to everything in this process."""
    telemetry.use(OpenTelemetry(tracer_provider, meter_provider))

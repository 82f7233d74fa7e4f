"""What the tests of telemetry share: the real SDK, exporting to memory."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treenail import telemetry
from treenail.telemetry.otel import OpenTelemetry


class Seen:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        telemetry.use(OpenTelemetry(provider, MeterProvider([self.reader])))

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda each: each.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans if each.name == name]

    def tree(self) -> list[tuple[str, str | None]]:
        """Each span's name with its parent's, in the order in which they began."""
        names = {each.context.span_id: each.name for each in self.spans}
        return [(each.name, names.get(each.parent.span_id) if each.parent else None) for each in self.spans]

    def total(self, name: str, **attributes: object) -> float:
        """The sum of a counter, or the count of a histogram's sum, over matching points."""
        return sum(
            getattr(point, "sum", None) or getattr(point, "value", 0.0)
            for point in self.points(name)
            if attributes.items() <= dict(point.attributes).items()
        )

    def points(self, name: str) -> list:
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in ([] if data is None else data.resource_metrics)
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

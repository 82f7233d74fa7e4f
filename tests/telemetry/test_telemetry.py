"""Telemetry listens, and never takes part."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treenail import telemetry
from treenail.telemetry import JsonFormatter, base, bind
from treenail.telemetry.otel import OpenTelemetry


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use(OpenTelemetry(provider, MeterProvider()))
    yield exporter
    telemetry.use(None)


def test_nobody_listens_unless_asked_and_then_nothing_is_made() -> None:
    """The same object every time: no span, no allocation, no ids."""
    assert not telemetry.is_on()
    first, second = telemetry.span("chat", a__b=1), telemetry.span("chat", a__b=2)
    assert first is second
    with first as span:
        span.set("x", 1)
        span.fail("kind")
        assert span.trace_id is None
    assert telemetry.begin("step a") is telemetry.under(None) is first
    assert telemetry.here() is None
    telemetry.begin("step a").end()


def test_without_a_listener_no_package_is_imported_for_it() -> None:
    code = "import treenail.turns, sys; print('opentelemetry' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "False"


def test_spans_within_a_span_are_its_children(exported: InMemorySpanExporter) -> None:
    with telemetry.span("invoke_agent a", gen_ai__agent__name="a") as outer, telemetry.span("chat m"):
        pass
    inner, parent = exported.get_finished_spans()
    assert (inner.name, parent.name) == ("chat m", "invoke_agent a")
    assert inner.parent is not None
    assert f"{inner.parent.span_id:016x}" == outer.span_id
    assert f"{parent.context.trace_id:032x}" == outer.trace_id
    assert dict(parent.attributes or {}) == {"gen_ai.agent.name": "a"}


def test_an_error_passes_through_and_only_its_kind_is_told(exported: InMemorySpanExporter) -> None:
    """What an error says may quote a file or a key; the log has it, the trace does not."""
    with pytest.raises(ValueError, match="secret"), telemetry.span("execute_tool t"):
        raise ValueError("secret")
    (span,) = exported.get_finished_spans()
    assert not span.status.is_ok
    assert "secret" not in span.to_json()
    assert (span.attributes or {})["error.type"] == "ValueError"


def test_work_that_is_done_elsewhere_takes_its_place_along(exported: InMemorySpanExporter) -> None:
    """In another thread, long after the span that it belongs to has ended."""
    with telemetry.span("invoke_agent a") as asked:
        place = telemetry.here()
        step = telemetry.begin("step b", attempt=1)
        assert telemetry.here() == place

    def work() -> None:
        with telemetry.under(place), telemetry.span("subagent c"):
            pass
        with telemetry.under(step.place), telemetry.span("subagent d"):
            pass
        with telemetry.span("nowhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    step.fail("late")
    step.end()
    step.end()
    step.set("too", "late")
    spans = {each.name: each for each in exported.get_finished_spans()}
    assert sorted(spans) == ["invoke_agent a", "nowhere", "step b", "subagent c", "subagent d"]
    for child, parent in (
        ("step b", asked.span_id), ("subagent c", asked.span_id), ("subagent d", step.span_id),
    ):  # fmt: skip
        above = spans[child].parent
        assert above is not None
        assert f"{above.span_id:016x}" == parent
    assert spans["nowhere"].parent is None
    assert (spans["step b"].attributes or {})["error.type"] == "late"


def test_a_place_of_another_listener_is_no_place(exported: InMemorySpanExporter) -> None:
    with telemetry.under("elsewhere"), telemetry.span("chat m"):
        pass
    (span,) = exported.get_finished_spans()
    assert span.parent is None


class BrokenSpan:
    """A span that fails whatever it is told."""

    trace_id = span_id = None
    place = "here"

    def set(self, name: str, value: object) -> None:
        raise RuntimeError("nothing is taken")

    def fail(self, kind: str, message: str = "") -> None:
        raise RuntimeError("nothing fails")

    def end(self) -> None:
        raise RuntimeError("nothing ends")


class Broken:
    """A listener that fails wherever it can."""

    def __init__(self, *, at: str) -> None:
        self.at = at

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, telemetry.Attribute]) -> Iterator[telemetry.Span]:
        if self.at == "begin":
            raise RuntimeError("no span")
        yield BrokenSpan() if self.at == "set" else base._NO_SPAN
        if self.at == "end":
            raise RuntimeError("no end")

    def begin(self, name: str, attributes: Mapping[str, telemetry.Attribute]) -> telemetry.OpenSpan:
        if self.at == "begin":
            raise RuntimeError("no span")
        return BrokenSpan()

    def here(self) -> object:
        if self.at == "here":
            raise RuntimeError("nowhere")
        return "here"

    @contextmanager
    def under(self, place: object) -> Iterator[None]:
        if self.at == "begin":
            raise RuntimeError("no place")
        yield
        if self.at == "end":
            raise RuntimeError("no way back")

    def record(self, name: str, value: float, attributes: Mapping[str, telemetry.Attribute]) -> None:
        raise RuntimeError("no measurement")


@pytest.mark.parametrize("at", ["begin", "end", "record", "set", "here"])
def test_a_listener_that_fails_changes_nothing_for_the_work(at: str) -> None:
    telemetry.use(Broken(at=at))
    try:
        with telemetry.under(telemetry.here() or "here"), telemetry.span("chat m") as span:
            span.set("a", 1)
            span.fail("kind")
            step = telemetry.begin("step a")
            step.set("a", 1)
            step.end()
            done = True
        telemetry.record("treenail.cost", 1.0)
    finally:
        telemetry.use(None)
    assert done


def test_a_listener_that_fails_does_not_hide_the_works_own_error() -> None:
    telemetry.use(Broken(at="end"))
    try:
        with pytest.raises(KeyError, match="mine"), telemetry.span("chat m"):
            raise KeyError("mine")
    finally:
        telemetry.use(None)


def test_measurements_carry_their_names_units_and_attributes() -> None:
    reader = InMemoryMetricReader()
    telemetry.use(OpenTelemetry(TracerProvider(), MeterProvider([reader])))
    try:
        telemetry.record("gen_ai.client.token.usage", 120, gen_ai__token__type="input")
        telemetry.record("treenail.cost", 0.25, gen_ai__request__model="m")
        telemetry.record("treenail.cost", 0.25, gen_ai__request__model="m")
        telemetry.record("no.such.measurement", 1)
    finally:
        telemetry.use(None)
    data = reader.get_metrics_data()
    found = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found.keys() == {"gen_ai.client.token.usage", "treenail.cost"}
    assert found["treenail.cost"].unit == "USD"
    (cost,) = found["treenail.cost"].data.data_points
    assert cost.value == pytest.approx(0.5)


def test_a_log_line_is_json_with_what_is_bound_and_what_is_extra() -> None:
    record = logging.LogRecord("treenail.turns", logging.WARNING, "f", 1, "slow: %s", ("x",), None)
    record.attempt = 2
    with bind(session_id="s1", turn_id=None), bind(turn_id="t1"):
        line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "slow: x"
    assert (line["session_id"], line["turn_id"], line["attempt"], line["level"]) == ("s1", "t1", 2, "warning")
    assert "session_id" not in json.loads(JsonFormatter().format(record))


def test_a_log_line_of_an_error_is_still_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("l", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["error"] == "ValueError"

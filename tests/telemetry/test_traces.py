"""A run through the real OpenTelemetry SDK is a tree: the turn, its model calls, its tools, its judges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import Agent, TurnState, telemetry, tool
from holdfast.judges import LLMCompletionVerifier
from holdfast.prompt import PromptExecuted
from holdfast.providers.scripted import Answer, ScriptedProvider
from holdfast.state import TokenUsage
from holdfast.telemetry.otel import OpenTelemetry
from holdfast.tools.events import ToolInvoked
from holdfast.turns import ModelAdapter


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

    def tree(self) -> list[tuple[str, str | None]]:
        """Each span's name with its parent's, in the order in which they began."""
        names = {each.context.span_id: each.name for each in self.spans}
        return [(each.name, names.get(each.parent.span_id) if each.parent else None) for each in self.spans]

    def total(self, name: str, **attributes: object) -> float:
        """The sum of a counter, or the count of a histogram's sum, over matching points."""
        found = 0.0
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        if attributes.items() <= dict(point.attributes).items():
                            found += getattr(point, "sum", None) or getattr(point, "value", 0.0)
        return found


@pytest.fixture
def seen() -> Iterator[Seen]:
    yield Seen()
    telemetry.use(None)


@tool(effects="none")
def look() -> str:
    """Look."""
    return "nothing"


@tool(effects="workspace")
def spoil(*, context) -> str:
    """Write and fail."""
    context.filesystem.write("a.txt", "x")
    raise RuntimeError("secret text of a file")


SCRIPT = [
    Answer("", [("look", {}), ("spoil", {})], usage=TokenUsage(100, 20), cost_usd=0.01),
    Answer("done", usage=TokenUsage(200, 10), cost_usd=0.02),
]


def test_a_turn_has_its_model_calls_and_tools_below_it(seen: Seen) -> None:
    with Agent("worker", tools=(look, spoil)).run("go", provider=ScriptedProvider(SCRIPT)) as run:
        assert run.state is TurnState.COMPLETED
    assert seen.tree() == [
        ("invoke_agent worker", None),
        ("chat scripted", "invoke_agent worker"),
        ("execute_tool look", "invoke_agent worker"),
        ("execute_tool spoil", "invoke_agent worker"),
        ("chat scripted", "invoke_agent worker"),
    ]
    turn, chat, looked, spoilt, _ = seen.spans
    assert (chat.attributes or {})["gen_ai.usage.input_tokens"] == 100
    assert (chat.attributes or {})["gen_ai.response.finish_reasons"] == ("tools",)
    assert looked.status.is_ok
    assert not spoilt.status.is_ok
    assert (turn.attributes or {})["gen_ai.conversation.id"] == str(run.id)


def test_what_tools_and_people_say_is_not_exported(seen: Seen) -> None:
    with Agent("worker", "the instructions", tools=(look, spoil)).run(
        "the task", provider=ScriptedProvider(SCRIPT)
    ):
        pass
    text = "".join(each.to_json() for each in seen.spans)
    for word in ("secret text", "the instructions", "the task"):
        assert word not in text


def test_tokens_money_rollbacks_and_endings_are_counted(seen: Seen) -> None:
    with Agent("worker", tools=(look, spoil)).run("go", provider=ScriptedProvider(SCRIPT)):
        pass
    assert seen.total("gen_ai.client.token.usage", **{"gen_ai.token.type": "input"}) == 300
    assert seen.total("gen_ai.client.token.usage", **{"gen_ai.token.type": "output"}) == 30
    assert seen.total("holdfast.cost") == pytest.approx(0.03)
    assert seen.total("holdfast.tool.rollbacks") == 1
    assert seen.total("holdfast.turns", **{"holdfast.turn.state": "completed"}) == 1


def test_a_turn_that_fails_is_a_failed_span_with_its_kind(seen: Seen) -> None:
    endless = ScriptedProvider([Answer("", [("look", {})])], repeat=True)
    with Agent("worker", tools=(look,), max_iterations=2).run("go", provider=endless) as run:
        assert run.state is TurnState.FAILED
    (turn,) = [each for each in seen.spans if each.name == "invoke_agent worker"]
    assert not turn.status.is_ok
    assert (turn.attributes or {})["error.type"] == "iteration_cap"


def test_a_judges_evaluation_hangs_below_the_turn_that_it_judges(seen: Seen) -> None:
    """One trace: the check is a span under the execution, and the evaluation that it asks for is below it."""
    verdict = '{"complete": true, "explanation": "all there", "missing": []}'
    judge = ModelAdapter(ScriptedProvider([verdict], repeat=True, model="judge-model"))
    agent = Agent("worker", tools=(look,), completion=LLMCompletionVerifier(adapter=judge))
    with agent.run("go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"])) as run:
        assert run.state is TurnState.COMPLETED
        executed = run.execution_state.session[PromptExecuted].latest()
        looked = run.execution_state.session[ToolInvoked].latest()
    tree = dict(reversed(seen.tree()))
    assert tree["invoke_agent worker"] is None
    assert tree["judge LLMCompletionVerifier"] == "invoke_agent worker"
    (nested,) = [name for name in tree if name.startswith("invoke_agent") and name != "invoke_agent worker"]
    assert tree[nested] == "judge LLMCompletionVerifier"
    assert tree["chat judge-model"] == nested
    assert len({each.context.trace_id for each in seen.spans}) == 1
    # The log carries the ids of the spans, so that an event leads to its trace.
    (turn,) = [each for each in seen.spans if each.name == "invoke_agent worker"]
    for recorded in (executed, looked):
        assert recorded.run_context.trace_id == f"{turn.context.trace_id:032x}"
        assert recorded.run_context.span_id == f"{turn.context.span_id:016x}"

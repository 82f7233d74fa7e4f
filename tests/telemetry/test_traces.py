"""A run through the real OpenTelemetry SDK is a tree: the turn, its model calls, its tools, its judges."""

from __future__ import annotations

import gc
import io
import json
import logging
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from telemetry_kit import Seen

from treenail import Agent, TurnState, telemetry, tool
from treenail.errors import ThrottleError
from treenail.judges import (
    FeedbackProviderConfig,
    FeedbackTrigger,
    LLMCompletionVerifier,
    LLMTrajectoryFeedback,
    NestedEvaluator,
    trajectory_prompt,
)
from treenail.prompt import PromptExecuted
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import TokenUsage
from treenail.telemetry import JsonFormatter
from treenail.telemetry.otel import OpenTelemetry
from treenail.tools import ToolInvoked
from treenail.turns import ModelAdapter


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
    assert seen.total("treenail.cost") == pytest.approx(0.03)
    assert seen.total("treenail.tool.rollbacks") == 1
    assert seen.total("treenail.turns", **{"treenail.turn.state": "completed"}) == 1


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


VERDICT = '{"complete": true, "explanation": "all there", "missing": []}'


def test_the_seeds_picture_is_in_a_file_of_exported_spans(tmp_path) -> None:
    """The parent's execution, its tools, the check below it, and the check's own execution below that."""
    place = tmp_path / "spans.jsonl"
    judge = ModelAdapter(ScriptedProvider([VERDICT], repeat=True, model="judge-model"))
    agent = Agent("parent", tools=(look,), completion=LLMCompletionVerifier(adapter=judge))
    with place.open("w") as out:
        provider = TracerProvider()
        exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        telemetry.use(OpenTelemetry(provider))
        try:
            agent.run("go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"])).close()
        finally:
            telemetry.use(None)
    spans = {each["context"]["span_id"]: each for each in map(json.loads, place.read_text().splitlines())}

    def path(span: dict[str, Any]) -> str:
        above = spans.get(span["parent_id"])
        return span["name"] if above is None else f"{path(above)} > {span['name']}"

    check = "invoke_agent parent > judge LLMCompletionVerifier"
    assert sorted(map(path, spans.values())) == sorted(
        [
            "invoke_agent parent",
            "invoke_agent parent > chat scripted",
            "invoke_agent parent > execute_tool look",
            "invoke_agent parent > chat scripted",
            check,
            f"{check} > invoke_agent completion",
            f"{check} > invoke_agent completion > chat judge-model",
        ]
    )


def test_a_plain_judge_on_a_thread_of_its_own_has_its_spans_below_the_turn(seen: Seen) -> None:
    """It evaluates in the run's loop, from a worker thread; the trace follows it there and back."""
    judge = ModelAdapter(ScriptedProvider(['{"on_track": true, "summary": "fine"}'], model="judge-model"))

    class Plain:
        name = "plain"

        def should_run(self, *, context) -> bool:
            return True

        def provide(self, *, context) -> None:
            values = dict.fromkeys(("task_description", "current_plan", "recent_actions", "files"), "x")
            prompt = trajectory_prompt().with_variables(**values)
            nested = NestedEvaluator(judge, prompt=prompt, context=context.create_nested_context())
            assert nested.evaluate().success

    watch = FeedbackProviderConfig(Plain(), FeedbackTrigger(every_n_calls=1))
    run = Agent("worker", tools=(look,), feedback=[watch]).run(
        "go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"])
    )
    run.close()
    tree = dict(seen.tree())
    assert tree["judge plain"] == "invoke_agent worker"
    assert tree["invoke_agent trajectory"] == "judge plain"
    assert tree["chat judge-model"] == "invoke_agent trajectory"


def test_what_judges_use_find_and_fail_at_is_measured(seen: Seen) -> None:
    found = '{"on_track": false, "summary": "in circles", "severity": "caution"}'
    judge = ModelAdapter(
        ScriptedProvider([Answer(found, usage=TokenUsage(50, 5), cost_usd=0.25)], model="judge-model")
    )
    down = ModelAdapter(
        ScriptedProvider([Answer(error=ThrottleError("slow down", kind="rate_limit"))], repeat=True),
        retry=None,
    )
    watch = FeedbackProviderConfig(
        LLMTrajectoryFeedback(judge, min_tool_calls=1), FeedbackTrigger(every_n_calls=1)
    )
    agent = Agent("worker", tools=(look,), feedback=[watch], completion=LLMCompletionVerifier(adapter=down))
    agent.run("go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"])).close()
    by_judge = {"gen_ai.evaluation.name": "LLMTrajectoryFeedback"}
    own = {**by_judge, "treenail.nested.budget": "own"}
    assert seen.total("treenail.nested.token.usage", **own, **{"gen_ai.token.type": "input"}) == 50
    assert seen.total("treenail.nested.token.usage", **own, **{"gen_ai.token.type": "output"}) == 5
    assert seen.total("treenail.nested.cost", **own) == pytest.approx(0.25)
    assert seen.total("treenail.judgements", **by_judge, **{"gen_ai.evaluation.score.label": "caution"}) == 1
    failed = {"gen_ai.evaluation.name": "LLMCompletionVerifier", "error.type": "NestedEvaluationError"}
    assert seen.total("treenail.judgements", **failed) == 1
    (nested,) = [
        each for each in seen.points("treenail.nested.duration") if each.attributes.get("error.type")
    ]
    assert nested.attributes["error.type"] == "throttled"
    assert {each.attributes["gen_ai.evaluation.name"] for each in seen.points("treenail.judge.duration")} == {
        "LLMTrajectoryFeedback",
        "LLMCompletionVerifier",
    }
    (span,) = seen.named("judge LLMTrajectoryFeedback")
    assert (span.attributes or {})["gen_ai.evaluation.score.label"] == "caution"
    # A failed model call is a failed operation, by its kind.
    assert {
        each.attributes.get("error.type") for each in seen.points("gen_ai.client.operation.duration")
    } == {
        None,
        "ThrottleError",
    }


def test_every_name_of_the_conventions_is_one_that_they_know(seen: Seen) -> None:
    judge = ModelAdapter(ScriptedProvider([VERDICT], repeat=True))
    agent = Agent("worker", tools=(look, spoil), completion=LLMCompletionVerifier(adapter=judge))
    agent.run("go", provider=ScriptedProvider(SCRIPT)).close()
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    said = {name for each in seen.spans for name in each.attributes or {}}
    for metric in ("gen_ai.client.token.usage", "gen_ai.client.operation.duration", "treenail.judgements"):
        said |= {name for point in seen.points(metric) for name in point.attributes}
    assert {name for name in said if not name.startswith("treenail.")} - known <= {"error.type"}
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {(each.attributes or {}).get("gen_ai.operation.name", "chat") for each in seen.spans} <= operations


def test_seconds_and_tokens_are_told_apart_in_buckets(seen: Seen) -> None:
    """Calls of 20 ms and of 20 s do not fall into one bucket, nor do 100 and 200 tokens' neighbours."""
    with Agent("worker", tools=(look, spoil)).run("go", provider=ScriptedProvider(SCRIPT)):
        pass
    (duration, *_) = seen.points("gen_ai.client.operation.duration")
    assert duration.explicit_bounds[0] == pytest.approx(0.01)
    assert duration.explicit_bounds[-1] == pytest.approx(81.92)
    (tokens, *_) = seen.points("gen_ai.client.token.usage")
    assert tokens.explicit_bounds[:4] == (1, 4, 16, 64)
    assert tokens.explicit_bounds[-1] == 67_108_864


def test_a_nested_call_is_a_line_of_the_log_with_fields_for_machines() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("treenail.judges")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    judge = ModelAdapter(ScriptedProvider([Answer(VERDICT, usage=TokenUsage(50, 5))]))
    agent = Agent("worker", completion=LLMCompletionVerifier(adapter=judge))
    try:
        run = agent.run("go", provider=ScriptedProvider(["done"]))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    (line,) = map(json.loads, out.getvalue().splitlines())
    (child,) = run.execution_state.session.children
    expected = {
        "level": "info",
        "judge": "LLMCompletionVerifier",
        "prompt_name": "completion",
        "nested_session_id": str(child.session_id),
        "nested_depth": 1,
        "nested_input_tokens": 50,
        "nested_output_tokens": 5,
        "nested_error_kind": "",
    }
    assert expected.items() <= line.items()
    run.close()


def test_a_judge_that_fails_is_a_warning_with_its_reason() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # a handler that keeps what it hears
    logger = logging.getLogger("treenail.judges")
    logger.addHandler(handler)
    try:
        run = Agent(
            "worker",
            completion=LLMCompletionVerifier(
                adapter=ModelAdapter(ScriptedProvider(["nonsense"], repeat=True))
            ),
        ).run("go", provider=ScriptedProvider(["done"]))
    finally:
        logger.removeHandler(handler)
    said = [vars(each) for each in records]
    assert [each["levelname"] for each in said] == ["WARNING", "WARNING"]
    assert said[0]["nested_error_kind"] == "output"
    assert (said[1]["judge_kind"], said[1]["judge_outcome"], said[1]["judge_reason"]) == (
        "completion", "failed", "output",
    )  # fmt: skip
    assert said[1]["judged_session_id"] == str(run.id)
    run.close()


def test_without_a_listener_a_run_makes_no_span_and_takes_no_measurement() -> None:
    """Of the room of telemetry, only no-ops run, and what binds the session's id to log lines."""
    seen: set[str] = set()

    def watch(frame: Any, event: str, arg: object) -> None:
        if event == "call" and "/treenail/telemetry/" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_name)

    judge = ModelAdapter(ScriptedProvider([VERDICT], repeat=True))
    agent = Agent("worker", tools=(look, spoil), completion=LLMCompletionVerifier(adapter=judge))
    provider = ScriptedProvider(SCRIPT)
    gc.disable()  # What other tests have left is not finalised in the middle of this.
    sys.setprofile(watch)
    try:
        run = agent.run("go", provider=provider)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert run.state is TurnState.COMPLETED
    no_ops = {"is_on", "span", "record", "__enter__", "__exit__", "set", "fail"}
    assert seen <= no_ops | {"bind", "<dictcomp>"}
    assert "is_on" in seen
    run.close()

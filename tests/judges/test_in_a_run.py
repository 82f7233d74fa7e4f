"""Judges in whole runs, on the real loop with a scripted model: as a user writes them."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from treenail import Agent, Limits, ResourceRegistry, Session, tool
from treenail.containment import fold
from treenail.conversation import InnerMessage, ProviderUsage
from treenail.errors import BudgetExceededError, DeadlineExceededError, PromptEvaluationError, ThrottleError
from treenail.history import erase_run
from treenail.judges import (
    CommandChecker,
    CompletionChecked,
    CompletionVerdict,
    Feedback,
    FeedbackContext,
    FeedbackProviderConfig,
    FeedbackTrigger,
    FileOutputChecker,
    JudgeEvent,
    LLMCompletionVerifier,
    LLMTrajectoryFeedback,
    NestedEvaluated,
    NestedEvaluator,
    NestedExecutionConfig,
    NestedExecutionContext,
    StaticFeedback,
    TaskCompletionContext,
    TaskCompletionResult,
    TrajectoryAssessment,
    completion_prompt,
    derive_nested_deadline,
    nested_usage,
)
from treenail.log import rows
from treenail.log.sqlite import SqliteLog
from treenail.prompt import MarkdownSection, Prompt, PromptExecuted, PromptTemplate
from treenail.providers import ModelRequest, ProviderAdapter
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Budget, BudgetTracker, ExecutionState, RunContext, iter_sessions_bottom_up
from treenail.tools import ToolContext
from treenail.turns import ModelAdapter, TurnEnded, TurnState, turn_state
from treenail.turns.ledger import ledger_of
from treenail.workspace import Filesystem, InMemoryFilesystem

logger = logging.getLogger("tests.judges")


@tool(effects="workspace")
def write_file(path: str, text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


def write(path: str) -> Answer:
    return Answer(calls=[("write_file", {"path": path, "text": "x"})])


def template(**more: Any) -> PromptTemplate[Any]:
    return PromptTemplate(
        ns="tests",
        key="work",
        sections=[MarkdownSection("Work", template="Do it.", tools=[write_file])],
        **more,
    )


def state() -> ExecutionState:
    return ExecutionState(Session(), ResourceRegistry.build({Filesystem: InMemoryFilesystem()}))


def said(session: Session) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in session[InnerMessage].all()]


def judge(*answers: dict[str, Any] | Answer | Exception) -> ModelAdapter:
    """An adapter whose model answers each new question with the next of these, and an old one as before."""
    waiting = iter(answers)
    given: dict[str, dict[str, Any] | Answer | Exception] = {}

    def react(request: ModelRequest) -> Answer | str:
        asked = str(request.items)
        if asked not in given:
            given[asked] = next(waiting)
        answer = given[asked]
        if isinstance(answer, Exception):
            return Answer(error=answer)
        return answer if isinstance(answer, Answer) else json.dumps(answer)

    return ModelAdapter(ScriptedProvider([react] * 8), retry=None)


# --- the seed's two reference providers, as a user writes them -----------------------------------------


@dataclass(frozen=True)
class SeedTrajectoryFeedback:
    """Feedback provider using LLM to evaluate agent trajectory."""

    adapter: ProviderAdapter
    evaluation_prompt: Prompt[TrajectoryAssessment]

    @property
    def name(self) -> str:
        return "LLMTrajectoryFeedback"

    def should_run(self, *, context: FeedbackContext) -> bool:
        return context.tool_call_count >= 2

    def provide(self, *, context: FeedbackContext) -> Feedback:
        nested = NestedExecutionContext(
            parent_session=context.session,
            deadline=derive_nested_deadline(context.deadline),
            budget=Budget(max_total_tokens=500),
        )
        prompt = self.evaluation_prompt.with_variables(
            recent_actions="\n".join(each.name for each in context.recent_tool_calls(10)),
            current_plan="none",
        )
        try:
            result = NestedEvaluator(self.adapter, prompt=prompt, context=nested).evaluate()
            if result.success and result.output:
                return Feedback(
                    provider_name=self.name, summary=result.output.summary, severity=result.output.severity
                )
        except DeadlineExceededError:
            pass  # Skip feedback, don't block parent
        except Exception as error:  # noqa: BLE001 - the seed's way
            logger.warning("feedback.nested_evaluation_failed: %s", error)
        return Feedback(provider_name=self.name, summary="Trajectory assessment unavailable", severity="info")


class SeedCompletionVerifier:
    """Verify task completion using LLM judgment."""

    def __init__(self, verification_prompt: Prompt[CompletionVerdict], *, share_budget: bool = True) -> None:
        self._prompt = verification_prompt
        self._share_budget = share_budget

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        if context.adapter is None:
            return TaskCompletionResult.ok("No adapter for verification")
        nested = NestedExecutionContext(
            parent_session=context.session,
            deadline=derive_nested_deadline(None, timedelta(seconds=15)),
            budget=None if self._share_budget else Budget(max_total_tokens=500),
            resource_overrides={Filesystem: context.filesystem} if context.filesystem else {},
        )
        prompt = self._prompt.with_variables(
            task_description=context.task,
            tentative_output=context.tentative_output,
            stop_reason=context.stop_reason,
        )
        try:
            result = NestedEvaluator(context.adapter, prompt=prompt, context=nested).evaluate()
        except (DeadlineExceededError, BudgetExceededError):
            return TaskCompletionResult.ok("Verification skipped (resource limit)")
        if result.success and result.output:
            verdict = result.output
            if verdict.complete:
                return TaskCompletionResult.ok(verdict.explanation)
            return TaskCompletionResult.incomplete(verdict.explanation)
        return TaskCompletionResult.ok("Verification inconclusive")


TRAJECTORY = Prompt[TrajectoryAssessment](
    ns="t",
    key="trajectory",
    sections=[MarkdownSection("Judge", template="Plan: $current_plan\nActions: $recent_actions")],
)
COMPLETION = Prompt[CompletionVerdict](
    ns="t",
    key="completion",
    sections=[MarkdownSection("Judge", template="$task_description $tentative_output $stop_reason")],
)


def test_the_seeds_reference_provider_runs_as_it_is_written() -> None:
    asks: list[str] = []

    def answer(request: ModelRequest) -> str:
        asks.append(str(request.items))
        return json.dumps({"on_track": False, "summary": "You repeat yourself.", "severity": "caution"})

    prompt = Prompt(
        template(
            feedback_providers=(
                FeedbackProviderConfig(
                    provider=SeedTrajectoryFeedback(ModelAdapter(ScriptedProvider([answer])), TRAJECTORY),
                    trigger=FeedbackTrigger(every_n_calls=2),
                ),
            ),
            nested_execution_config=NestedExecutionConfig(max_nested_duration=timedelta(seconds=15)),
        )
    )
    working = state()
    adapter = ModelAdapter(ScriptedProvider([write("a"), write("b"), "done"]))
    assert adapter.evaluate(prompt, state=working, request="do it").text == "done"
    session = working.session
    (feedback,) = session[Feedback].all()
    assert (feedback.summary, feedback.severity, feedback.call_index) == (
        "You repeat yourself.",
        "caution",
        2,
    )
    assert ("user", feedback.render()) in said(session)
    assert "write_file" in asks[0]
    (done,) = session[NestedEvaluated].all()
    assert (done.success, done.budget) == (True, "own")


def test_the_seeds_reference_verifier_runs_as_it_is_written() -> None:
    judging = judge(
        {"complete": False, "explanation": "Where are the tests?"}, {"complete": True, "explanation": "ok"}
    )
    prompt = Prompt(
        template(
            task_completion_checker=SeedCompletionVerifier(COMPLETION),
            nested_execution_config=NestedExecutionConfig(adapter=judging),
        )
    )
    working = state()
    tracker = BudgetTracker(Budget(max_total_tokens=100_000))
    adapter = ModelAdapter(ScriptedProvider(["done", write("test"), "really done"]))
    response = adapter.evaluate(prompt, state=working, request="do it", budget_tracker=tracker)
    assert response.text == "really done"
    session = working.session
    assert [each.complete for each in session[CompletionChecked].all()] == [False, True]
    assert any("Where are the tests?" in text for role, text in said(session) if role == "user")
    # Three calls of the run and two of its judge, at 120 tokens each: counted apart, in one tracker.
    assert tracker.consumed.total == 5 * 120
    assert nested_usage(session).shared.total == 2 * 120
    apart = [used.total for name, used in tracker.snapshot().usage.items() if name.startswith("nested:")]
    assert sum(each or 0 for each in apart) == 2 * 120


# --- feedback in the loop ------------------------------------------------------------------------------


def test_feedback_comes_behind_the_results_and_keeps_what_was_sent_as_a_prefix() -> None:
    inputs: list[tuple[Any, ...]] = []

    def seen(answer: Answer | str) -> Callable[[ModelRequest], Any]:
        def react(request: ModelRequest) -> Any:
            inputs.append(tuple(request.items))
            return answer

        return react

    reminder = FeedbackProviderConfig(StaticFeedback("Run the tests."), FeedbackTrigger(every_n_calls=1))
    working = state()
    provider = ScriptedProvider([seen(write("a")), seen(write("b")), seen("done")])
    ModelAdapter(provider).evaluate(Prompt(template(feedback_providers=[reminder])), state=working)
    for earlier, later in itertools.pairwise(inputs):
        assert later[: len(earlier)] == earlier
    roles = [role for role, _ in said(working.session)]
    assert roles == ["system", "assistant", "tool", "user", "assistant", "tool", "user", "assistant"]
    assert all(each.extends_previous for each in working.session[ProviderUsage].all())


def test_a_model_judges_the_trajectory_of_an_agent() -> None:
    working = judge(
        {
            "on_track": False,
            "summary": "You write files nobody asked for.",
            "severity": "warning",
            "observations": [
                {"category": "scope", "description": "three files", "evidence": "write_file(c)"}
            ],
            "suggestions": ["Stop writing files."],
        }
    )
    agent = Agent(
        "writer",
        tools=[write_file],
        feedback=[
            FeedbackProviderConfig(
                LLMTrajectoryFeedback(working, min_tool_calls=3), FeedbackTrigger(every_n_calls=3)
            )
        ],
    )
    run = agent.run("Write one file", provider=ScriptedProvider([write("a"), write("b"), write("c"), "ok"]))
    assert run.state is TurnState.COMPLETED
    (feedback,) = run.execution_state.session[Feedback].all()
    assert feedback.suggestions == ("Stop writing files.",)
    assert feedback.observations[0].category == "scope"
    run.close()


def test_an_agent_is_judged_by_its_own_model_if_nobody_names_another() -> None:
    """The run's provider answers the judge as well: each conversation has its own place in the script."""

    def react(request: ModelRequest) -> Any:
        if "says that its task is done" in str(request.items[0]):
            return json.dumps({"complete": True, "explanation": "fine"})
        return "done"

    agent = Agent("one", completion=LLMCompletionVerifier())
    run = agent.run("Say done", provider=ScriptedProvider([react]))
    assert (run.state, run.output) == (TurnState.COMPLETED, "done")
    (done,) = run.execution_state.session[NestedEvaluated].all()
    assert done.success
    run.close()


# --- completion in the loop ----------------------------------------------------------------------------


def test_a_refused_run_goes_on_until_the_work_is_there() -> None:
    agent = Agent("writer", tools=[write_file], completion=FileOutputChecker(["out.txt"]))
    run = agent.run("Write out.txt", provider=ScriptedProvider(["done", write("out.txt"), "now it is"]))
    assert (run.state, run.output) == (TurnState.COMPLETED, "now it is")
    session = run.execution_state.session
    assert [each.complete for each in session[CompletionChecked].all()] == [False, True]
    run.close()


def test_a_run_that_is_refused_too_often_ends_incomplete_and_never_completed() -> None:
    agent = Agent("idler", completion=FileOutputChecker(["out.txt"]))
    run = agent.run("Write out.txt", provider=ScriptedProvider(["done", "done!", "done!!", "never asked"]))
    session = run.execution_state.session
    assert run.state is TurnState.PARTIAL_FAILED
    assert run.result.error_kind == "incomplete"
    assert "out.txt" in run.result.details
    assert run.next_actions
    assert turn_state(session) is TurnState.PARTIAL_FAILED
    assert len(session[CompletionChecked]) == 3
    assert session[TurnEnded].latest() is not None
    run.close()


def test_an_evaluation_that_is_refused_too_often_raises() -> None:
    working = state()
    prompt = Prompt(template(task_completion_checker=FileOutputChecker(["out.txt"])))
    with pytest.raises(PromptEvaluationError, match="incomplete"):
        ModelAdapter(ScriptedProvider(["1", "2", "3"])).evaluate(prompt, state=working)


def test_a_run_that_died_before_its_check_is_checked_when_it_is_resumed(tmp_path: Path) -> None:
    """The answer is in the log, the verdict is not: a resume asks for it before anything is completed."""
    store = tmp_path / "runs.db"

    class Dies:
        def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
            raise AssertionError("not reached: acheck is used")

        async def acheck(self, context: TaskCompletionContext) -> TaskCompletionResult:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Agent("writer", tools=[write_file], completion=Dies()).run(
            "Write out.txt", provider=ScriptedProvider(["done"]), store=store
        )
    log = SqliteLog(store)
    (run_id,) = [each.session_id for each in log.sessions()]
    log.close()
    agent = Agent("writer", tools=[write_file], completion=FileOutputChecker(["out.txt"]))
    run = agent.resume(
        store, run_id, provider=ScriptedProvider(["done", write("out.txt"), "now"]),
        workspace=InMemoryFilesystem(),
    )  # fmt: skip
    assert (run.state, run.output) == (TurnState.COMPLETED, "now")
    run.close()


def test_a_command_checks_the_work_and_leaves_the_workspace_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    agent = Agent(
        "writer", tools=[write_file], completion=CommandChecker("echo junk > junk; test -f out.txt")
    )
    run = agent.run(
        "Write out.txt",
        provider=ScriptedProvider(["done", write("out.txt"), "now"]),
        workspace=root,
        store=tmp_path / "runs.db",
    )
    assert run.state is TurnState.COMPLETED
    assert sorted(each.name for each in root.iterdir()) == ["out.txt"]
    run.close()


# --- errors, budgets, traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["open", "closed"])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ThrottleError("slow down", kind="rate_limit"), "throttled"),
        (Answer("nonsense"), "output"),
        (ConnectionResetError("gone"), "crashed"),
    ],
)
def test_a_judge_that_cannot_answer_decides_nothing_and_is_on_record(
    how: Any, answer: Answer | Exception, reason: str
) -> None:
    judging = judge(*[answer] * 20)
    agent = Agent(
        "one",
        completion=LLMCompletionVerifier(adapter=judging),
        nested=NestedExecutionConfig(on_completion_failure=how, max_completion_checks=2),
    )
    run = agent.run("Say done", provider=ScriptedProvider(["done", "done"]))
    expected = TurnState.COMPLETED if how == "open" else TurnState.PARTIAL_FAILED
    assert run.state is expected
    events = run.execution_state.session[JudgeEvent].all()
    assert {each.outcome for each in events} == {"failed"}
    assert all(each.failed_closed is (how == "closed") for each in events)
    kinds = {each.error_kind for each in run.execution_state.session[NestedEvaluated].all()}
    assert kinds == {reason}
    run.close()


def test_a_judge_that_keeps_failing_does_not_use_up_the_retries_of_the_run(tmp_path: Path) -> None:
    """Neither now nor for whoever resumes the run."""
    failing = judge(ThrottleError("slow down", kind="rate_limit"), *[Answer("nonsense")] * 20)
    watcher = FeedbackProviderConfig(
        LLMTrajectoryFeedback(failing, min_tool_calls=1), FeedbackTrigger(every_n_calls=1)
    )
    agent = Agent("writer", tools=[write_file], feedback=[watcher])
    script: list[Any] = [*(write(name) for name in "abcd"), "done"]
    run = agent.run(
        "Write", provider=ScriptedProvider(script), limits=Limits(max_retries=1), store=tmp_path / "runs.db"
    )
    assert run.state is TurnState.COMPLETED
    session = run.execution_state.session
    assert [each.outcome for each in session[JudgeEvent].all()] == ["failed"] * 4
    assert fold(ledger_of(session))[str(run.id)].retries == 0
    run.close()


def test_a_judge_with_a_budget_of_its_own_that_runs_out_harms_nobody() -> None:
    judging = judge(Answer(json.dumps({"complete": False, "explanation": "no"})))
    verifier = LLMCompletionVerifier(adapter=judging, share_budget=False, budget=Budget(max_total_tokens=10))
    run = Agent("one", completion=verifier).run("Say done", provider=ScriptedProvider(["done"]))
    assert run.state is TurnState.COMPLETED
    session = run.execution_state.session
    assert session[JudgeEvent].all()[0].reason == "budget"
    assert session[NestedEvaluated].all()[0].usage is not None
    run.close()


def test_the_money_of_a_judge_is_the_runs_money() -> None:
    judging = judge(Answer(json.dumps({"complete": True, "explanation": "ok"}), cost_usd=0.25))
    agent = Agent("one", completion=LLMCompletionVerifier(adapter=judging))
    run = agent.run(
        "Say done",
        provider=ScriptedProvider([Answer("done", cost_usd=0.5)]),
        limits=Limits(max_cost_usd=10.0, on_unknown_price="warn"),
    )
    assert run.state is TurnState.COMPLETED
    assert nested_usage(run.execution_state.session).cost_usd == 0.25
    run.close()


def test_the_trace_of_a_judge_hangs_below_the_runs() -> None:
    context = RunContext.new()
    working = state()
    prompt = Prompt(template(task_completion_checker=LLMCompletionVerifier()))

    def react(request: ModelRequest) -> Any:
        is_judge = "says that its task is done" in str(request.items[0])
        return json.dumps({"complete": True, "explanation": "ok"}) if is_judge else "done"

    ModelAdapter(ScriptedProvider([react])).evaluate(prompt, state=working, run_context=context)
    (child,) = working.session.children
    assert list(iter_sessions_bottom_up(working.session)) == [child, working.session]
    inner = child[PromptExecuted].latest()
    assert inner is not None
    assert inner.run_context is not None
    assert inner.run_context.trace_id == context.trace_id
    assert inner.run_context.parent_span_id == context.span_id
    assert inner.run_context.run_id != context.run_id
    assert inner.run_context.session_id == child.session_id
    outer = working.session[PromptExecuted].latest()
    assert outer is not None
    assert outer.run_context == context


def test_a_judge_whose_prompt_has_judges_of_its_own_is_not_judged_in_turn() -> None:
    """The seed's anti-pattern: nesting ends at the first level, and says so."""

    def react(request: ModelRequest) -> Any:
        is_judge = "says that its task is done" in str(request.items[0])
        return json.dumps({"complete": True, "explanation": "ok"}) if is_judge else "done"

    plain = completion_prompt()
    recursive = Prompt(
        PromptTemplate[CompletionVerdict](
            ns=plain.ns,
            key=plain.key,
            sections=plain.template.sections,
            task_completion_checker=LLMCompletionVerifier(),
        )
    )
    working = state()
    prompt = Prompt(template(task_completion_checker=LLMCompletionVerifier(recursive)))
    ModelAdapter(ScriptedProvider([react])).evaluate(prompt, state=working)
    (child,) = working.session.children
    assert child.children == ()
    (event,) = child[JudgeEvent].all()
    assert event.reason == "depth"


def test_what_a_judge_was_asked_and_said_can_be_read_in_the_store_afterwards(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    judging = judge({"complete": True, "explanation": "all there"})
    agent = Agent("one", completion=LLMCompletionVerifier(adapter=judging))
    run = agent.run("Say done", provider=ScriptedProvider(["done"]), store=store)
    (done,) = run.execution_state.session[NestedEvaluated].all()
    run.close()
    log = SqliteLog(store)
    assert done.child_session_id is not None
    inside = Session.open(log, done.child_session_id, read_only=True)
    assert inside.parent_id == run.id
    assert inside[CompletionVerdict].all() == (CompletionVerdict(True, "all there"),)
    assert "Say done" in inside[InnerMessage].all()[0].content
    log.close()


def test_a_run_that_is_erased_takes_what_its_judges_were_shown_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Deflated, what is left behind could not be searched for.
    monkeypatch.setattr(rows, "MIN_DEFLATED_BYTES", 1 << 40)
    store = tmp_path / "runs.db"
    judging = judge({"complete": True, "explanation": "all there"})
    agent = Agent("one", completion=LLMCompletionVerifier(adapter=judging))
    run = agent.run("Say the word xylophone", provider=ScriptedProvider(["done"]), store=store)
    run.close()
    assert b"xylophone" in store.read_bytes()
    erase_run(store, run.id)
    log = SqliteLog(store)
    assert not log.sessions()
    log.close()
    assert b"xylophone" not in b"".join(each.read_bytes() for each in tmp_path.iterdir() if each.is_file())

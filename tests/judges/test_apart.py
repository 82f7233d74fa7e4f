"""What a judge does stays with the judge: its failures, its sessions, its depth; and rounds begun anew."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import anyio
from judges_kit import Verdict, answering, judge_prompt

from treenail import Agent, ResourceRegistry, Session, tool
from treenail.containment import CircuitBreaker, Limits, LoopPolicy, SafetyEvent
from treenail.containment.breaker import CircuitState
from treenail.errors import ThrottleError
from treenail.history import diagnose
from treenail.judges import (
    CompletionChecked,
    FeedbackProviderConfig,
    FeedbackTrigger,
    FileOutputChecker,
    JudgeEvent,
    LLMTrajectoryFeedback,
    NestedEvaluator,
    NestedExecutionConfig,
    NestedExecutionContext,
)
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, nested_session
from treenail.state.core import MAX_CLOSED_CHILDREN
from treenail.subagents import LoopRunner, Subagents
from treenail.tools import ToolContext
from treenail.turns import ModelAdapter, TurnState, contain
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

GOOD = Verdict(True)


@tool(effects="none")
def look(at: int) -> str:
    """Look."""
    return f"seen {at}"


@tool(effects="workspace")
def write_file(path: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "x")
    return f"wrote {path}"


def looks(count: int) -> list[Any]:
    return [*(Answer(calls=[("look", {"at": each})]) for each in range(count)), "done"]


def watched(adapter: Any) -> FeedbackProviderConfig:
    return FeedbackProviderConfig(
        LLMTrajectoryFeedback(adapter, min_tool_calls=1), FeedbackTrigger(every_n_calls=1)
    )


# --- guards --------------------------------------------------------------------------------------------


def test_a_judge_that_keeps_failing_opens_no_circuit_and_makes_no_loop_of_the_run() -> None:
    """Eight judgements fail in a row, under a breaker of two and a loop policy of three: the run goes on."""
    breaker = CircuitBreaker(2)
    working = ExecutionState(Session(), ResourceRegistry.build({Filesystem: InMemoryFilesystem()}))
    failing = ScriptedProvider([Answer(error=ThrottleError("slow down", kind="rate_limit"))] * 40)
    agent = Agent("worker", tools=(look,), feedback=[watched(ModelAdapter(failing, retry=None))])
    with contain(
        working.session,
        Limits(max_depth=0),
        circuit_breaker=breaker,
        loops=LoopPolicy(llm_repeats=3, halt_repeats=20),
    ) as limits:
        answer = ModelAdapter(ScriptedProvider(looks(8))).evaluate(
            agent.prompt, state=working, containment=limits, request="look around"
        )
    assert answer.text == "done"
    assert [each.outcome for each in working.session[JudgeEvent].all()] == ["failed"] * 8
    assert (breaker.state, breaker.failure_count) == (CircuitState.CLOSED, 0)
    told = [each.event_type for each in working.session[SafetyEvent].all()]
    assert "depth_exceeded" not in told
    assert "loop_detected" not in told


def test_an_evaluation_that_is_asked_for_directly_tells_the_runs_circuit_nothing() -> None:
    """Whoever evaluates without a round of judges, as from a tool, with the run's own limits in hand."""
    breaker = CircuitBreaker(1)
    parent = Session()
    failing = ScriptedProvider([Answer(error=ThrottleError("slow down", kind="rate_limit"))] * 4)
    with contain(parent, Limits(max_depth=0), circuit_breaker=breaker) as limits:
        context = NestedExecutionContext(parent_session=parent, containment=limits)
        adapter = ModelAdapter(failing, retry=None)
        result = NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
    assert result.error is not None
    assert result.error.kind == "throttled"
    assert breaker.state is CircuitState.CLOSED


def test_an_open_circuit_stops_a_judge_and_not_the_run_when_it_fails_open() -> None:
    breaker = CircuitBreaker(1)
    parent = Session()
    breaker.record_failure()
    adapter = ModelAdapter(ScriptedProvider(['{"good": true}']), retry=None)
    with contain(parent, Limits(), circuit_breaker=breaker) as limits:
        context = NestedExecutionContext(parent_session=parent, containment=limits)
        result = NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
    assert result.error is not None
    assert "circuit" in str(result.error)


# --- memory --------------------------------------------------------------------------------------------


def test_a_run_of_many_judgements_holds_few_of_their_sessions() -> None:
    """However many there were: open ones and the newest. The log lists all of them."""
    parent = Session()
    context = NestedExecutionContext(parent_session=parent)
    adapter = answering(GOOD)
    gone: list[weakref.ref[Session]] = []
    for _ in range(10 * MAX_CLOSED_CHILDREN):
        assert NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate().success
        gone.append(weakref.ref(adapter.seen.pop().session))
    gc.collect()
    assert len(parent.children) == MAX_CLOSED_CHILDREN
    assert len(parent.snapshot().children_ids) == MAX_CLOSED_CHILDREN
    assert sum(each() is not None for each in gone) == MAX_CLOSED_CHILDREN
    ids = [each.session_id for each in parent.log.sessions(parent_id=parent.session_id)]
    assert len(ids) == 10 * MAX_CLOSED_CHILDREN
    assert [each.session_id for each in parent.children] == ids[-MAX_CLOSED_CHILDREN:]


def test_children_that_are_open_are_held_whatever_their_number() -> None:
    parent = Session()
    made = [nested_session(parent) for _ in range(2 * MAX_CLOSED_CHILDREN)]
    assert parent.children == tuple(made)
    for each in made:
        each.close()
    nested_session(parent)
    assert len(parent.children) == MAX_CLOSED_CHILDREN


# --- depth ---------------------------------------------------------------------------------------------


def test_depth_is_known_to_whoever_opens_the_session_in_another_process(tmp_path: Path) -> None:
    """Neither the containment nor the context of the first process is there: the session itself tells."""
    log = SqliteLog(tmp_path / "runs.db")
    adapter = answering(GOOD)
    config = NestedExecutionConfig(max_nesting_depth=2)
    first = NestedEvaluator(
        adapter,
        prompt=judge_prompt(),
        context=NestedExecutionContext(parent_session=Session(log=log), config=config),
    ).evaluate()
    assert first.child_run_context is not None
    inside: Any = first.child_run_context.session_id
    # A subagent of the judge, and a workflow's session below that one.
    judged = Session.open(log, inside)
    subagent = nested_session(judged)
    below = nested_session(subagent)
    ids = [each.session_id for each in (judged, subagent, below)]
    for each in (below, subagent, judged):
        each.close()
    log.close()

    log = SqliteLog(tmp_path / "runs.db")
    wide = NestedExecutionConfig(max_nesting_depth=9)
    for session_id in ids:
        with Session.open(log, session_id) as again:
            context = NestedExecutionContext(parent_session=again, config=wide)
            second = NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
            assert second.success
            assert second.child_run_context is not None
            third_of: Any = second.child_run_context.session_id
        with Session.open(log, third_of) as deepest:
            context = NestedExecutionContext(parent_session=deepest, config=wide)
            third = NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
            assert third.error is not None
            assert third.error.kind == "depth"
    log.close()


def test_a_subagent_of_a_judge_is_as_deep_as_the_judge() -> None:
    """Its session has the judge's depth in the log, and a judge that looks at it is refused."""
    log = MemoryLog()
    adapter = answering(GOOD)
    parent = Session(log=log)
    context = NestedExecutionContext(parent_session=parent)
    done = NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
    assert done.child_run_context is not None
    judged = Session.open(log, done.child_run_context.session_id)  # type: ignore[arg-type]  # it has one

    async def go() -> Any:
        provider = ScriptedProvider(["done"])
        async with Subagents(ExecutionState(judged), (Agent("helper"),), runner=LoopRunner(provider)) as many:
            child = many.spawn("helper", "help")
            await many.wait()
            return child.session_id

    with Session.open(log, anyio.run(go), read_only=True) as helper:
        asked = NestedEvaluator(
            adapter, prompt=judge_prompt(), context=NestedExecutionContext(parent_session=helper)
        ).evaluate()
    assert asked.error is not None
    assert asked.error.kind == "depth"


def test_a_tag_that_says_nothing_sensible_about_depth_is_ignored() -> None:
    parent = Session(tags={"family.nesting_depth": "deep", "family.max_nesting_depth": "-1"})
    context = NestedExecutionContext(parent_session=parent)
    assert NestedEvaluator(answering(GOOD), prompt=judge_prompt(), context=context).evaluate().success


# --- another round -------------------------------------------------------------------------------------


def refused_three_times(store: Path, root: Path) -> Any:
    agent = Agent("writer", tools=(write_file,), completion=FileOutputChecker(["out.txt"]))
    run = agent.run(
        "Write out.txt",
        provider=ScriptedProvider(["a", "b", "c"]),
        store=store,
        workspace=HostFilesystem(root),
    )
    assert (run.state, run.result.error_kind) == (TurnState.PARTIAL_FAILED, "incomplete")
    run.close()
    return agent, run.id


def test_who_resumes_an_incomplete_run_gives_it_another_round(tmp_path: Path) -> None:
    """It is checked first, for somebody may have mended the matter; then the model hears what is missing."""
    root = tmp_path / "files"
    root.mkdir()
    agent, run_id = refused_three_times(tmp_path / "runs.db", root)
    heard: list[str] = []

    def works(request: ModelRequest) -> Any:
        heard.append(str(request.items[-1]))
        return Answer(calls=[("write_file", {"path": "out.txt"})])

    script = ["", "", "", works, "now it is there"]
    run = agent.resume(
        tmp_path / "runs.db", run_id, provider=ScriptedProvider(script), workspace=HostFilesystem(root)
    )
    assert (run.state, run.output) == (TurnState.COMPLETED, "now it is there")
    (told,) = heard
    assert "out.txt" in told
    assert 'attempt="1 of 3"' in told
    checks = run.execution_state.session[CompletionChecked].all()
    assert [(each.complete, each.attempt) for each in checks] == [
        (False, 1), (False, 2), (False, 3), (False, 1), (True, 2),
    ]  # fmt: skip
    assert diagnose(run.execution_state.session).ok
    run.close()


def test_a_run_whose_matter_was_mended_by_hand_is_complete_without_asking_the_model(tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    agent, run_id = refused_three_times(tmp_path / "runs.db", root)
    (root / "out.txt").write_text("by hand")
    run = agent.resume(
        tmp_path / "runs.db", run_id, provider=ScriptedProvider([]), workspace=HostFilesystem(root)
    )
    assert (run.state, run.output) == (TurnState.COMPLETED, "c")
    run.close()


def test_another_round_is_as_bounded_as_the_first(tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    agent, run_id = refused_three_times(tmp_path / "runs.db", root)
    checks = answers = 3
    for _ in range(2):
        script = ["?"] * answers + ["still done", "still", "never asked"]
        run = agent.resume(
            tmp_path / "runs.db", run_id, provider=ScriptedProvider(script), workspace=HostFilesystem(root)
        )
        assert (run.state, run.result.error_kind) == (TurnState.PARTIAL_FAILED, "incomplete")
        # The answer that was there is refused, and then the two that the model gives.
        checks, answers = checks + 3, answers + 2
        assert len(run.execution_state.session[CompletionChecked]) == checks
        assert [each.content for each in run.messages if each.role == "assistant"][-1] == "still"
        run.close()

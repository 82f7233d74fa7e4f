"""A workflow ends as its steps did, and its steps as their evidence says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from workflows_kit import WORKER, Model, run, says, states, step, steps, writes

from treenail.conversation import SubagentEvent
from treenail.errors import UsageError
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner
from treenail.testing.clock import FakeClock
from treenail.tools import PermissionMode, Permissions, answer_hold, pending_holds
from treenail.workflows import (
    StepSpec,
    StepState,
    Workflow,
    WorkflowEvent,
    WorkflowResult,
    WorkflowSpec,
    WorkflowState,
    answer_step,
    record_of,
    rerun_steps,
    resume_workflow,
    run_workflow,
)
from treenail.workspace import Filesystem, InMemoryFilesystem


def run_on(clock: FakeClock, spec: WorkflowSpec, model: Model) -> WorkflowResult:
    """Run a workflow on a clock that the model has in its hands."""
    resources = ResourceRegistry.build({Filesystem: InMemoryFilesystem()})
    state = ExecutionState(Session(clock=clock), resources, clock)
    return anyio.run(Workflow(state, [WORKER], LoopRunner(model)).run, spec)


def test_a_diamond_runs_in_order_and_its_files_come_together() -> None:
    files = InMemoryFilesystem()
    spec = steps(
        step("a"),
        step("b", "a", write_set=("b/**",)),
        step("c", "a", write_set=("c/**",)),
        step("d", "b", "c"),
    )
    seen: list[str] = []

    def check(request: ModelRequest) -> Answer:
        seen.append(str(request.items[0].role))
        return Answer("", [("get", {"path": "b/x"}), ("get", {"path": "c/x"})])

    model = Model(a=writes("a/x", "A"), b=writes("b/x", "B"), c=writes("c/x", "C"), d=[check, says()])
    result = run(spec, model, workspace=files)
    assert result.state is WorkflowState.COMPLETED, result.to_data()
    assert result.ok
    assert [files.read(f"{each}/x").content for each in "abc"] == ["A", "B", "C"]
    assert model.asked.index("a") < model.asked.index("b") < model.asked.index("d")
    assert model.asked.index("c") < model.asked.index("d")
    assert "done" in model.tasks["d"], "a step is told what the ones before it have left"


def test_a_claim_is_not_enough_the_files_that_it_names_must_be_there() -> None:
    spec = steps(step("a"), step("b", "a"))
    result = run(spec, Model(a=[says(artifacts=["report.md"])]))
    assert states(result) == {"a": "partial", "b": "held"}
    assert result.state is WorkflowState.PARTIAL
    assert not result.ok
    checkpoint = result.step("a").checkpoint
    assert checkpoint is not None
    assert checkpoint.reason == "artifact_missing"
    assert "report.md" in checkpoint.known_limitations[0]


def test_artifacts_are_known_by_what_is_in_them() -> None:
    import hashlib

    result = run(steps(step("a")), Model(a=writes("r.md", "text", artifacts=["r.md"])))
    checkpoint = result.step("a").checkpoint
    assert checkpoint is not None
    (artifact,) = checkpoint.artifacts
    assert (artifact.path, artifact.sha256) == ("r.md", hashlib.sha256(b"text").hexdigest())
    data = checkpoint.to_data()
    assert (data["version"], data["dependent_safe"]) == (2, True)


@pytest.mark.parametrize("status", ["partial", "failed", "held", "needs_orchestrator"])
def test_a_dependent_of_a_step_that_is_not_ready_never_starts(status: str) -> None:
    model = Model(a=[says(status)])
    result = run(steps(step("a"), step("b", "a")), model)
    assert "b" not in model.asked
    assert result.step("b").reason == "dependency_not_checkpoint_ready"
    assert not result.ok
    expected = {"partial": "partial", "failed": "failed", "held": "held", "needs_orchestrator": "held"}
    assert result.state.value == expected[status]
    assert result.next_actions


def test_an_answer_that_is_no_outcome_is_not_ready() -> None:
    result = run(steps(step("a")), Model(a=["all done, trust me"]))
    assert states(result) == {"a": "failed"}
    assert result.state is WorkflowState.FAILED


def test_a_value_must_fit_its_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    good = run(steps(step("a", output=schema)), Model(a=[says(payload_json='{"n": 3}')]))
    assert good.ok
    for bad in ("", "{", '{"n": "x"}', "{}"):
        result = run(steps(step("a", output=schema)), Model(a=[says(payload_json=bad)]))
        assert states(result) == {"a": "failed"}, bad


def test_what_is_written_outside_the_write_set_is_not_taken() -> None:
    files = InMemoryFilesystem()
    result = run(steps(step("a", write_set=("src/**",))), Model(a=writes("other.txt")), workspace=files)
    assert states(result) == {"a": "needs_orchestrator"}
    assert not files.exists("other.txt")
    shared = run(
        steps(step("a", write_set=("src/**",), workspace="shared")), Model(a=writes("o.txt")), workspace=files
    )
    assert states(shared) == {"a": "needs_orchestrator"}


def test_an_optional_step_keeps_nothing_from_being_complete() -> None:
    result = run(steps(step("a"), step("b", required=False)), Model(b=[says("failed")]))
    assert result.ok
    assert states(result) == {"a": "checkpoint_ready", "b": "failed"}


def test_a_step_is_tried_again_as_often_as_it_may() -> None:
    tries: list[int] = []

    def flaky(request: ModelRequest) -> str:
        tries.append(1)
        return says("failed" if len(tries) < 3 else "checkpoint_ready")

    assert run(steps(step("a", retries=2)), Model(a=[flaky])).ok
    assert len(tries) == 3
    tries.clear()
    assert states(run(steps(step("a", retries=1)), Model(a=[flaky]))) == {"a": "failed"}


def test_a_step_that_reads_cannot_write() -> None:
    files = InMemoryFilesystem()
    result = run(steps(step("a", posture="read")), Model(a=writes("x.txt")), workspace=files)
    assert result.ok, "it said that it is ready, and nothing was written"
    assert not files.exists("x.txt")


def test_changes_wait_for_the_step_that_applies_them() -> None:
    files = InMemoryFilesystem()
    seen: list[bool] = []

    def look(request: ModelRequest) -> str:
        seen.append(files.exists("a.txt"))
        return says()

    spec = steps(
        step("a", auto_apply=False),
        step("review", "a", posture="read"),
        StepSpec(id="merge", posture="apply", depends_on=("a", "review"), apply_from=("a",)),
    )
    result = run(spec, Model(a=writes("a.txt"), review=[look]), workspace=files)
    assert result.ok, result.to_data()
    assert seen == [False]
    assert files.read("a.txt").content == "x"


def test_a_conflict_is_somebodys_decision_and_nothing_is_half_applied() -> None:
    files = InMemoryFilesystem()

    def meddle(request: ModelRequest) -> Answer:
        files.write("a.txt", "somebody else's")
        return Answer(
            "", [("put", {"path": "b.txt", "text": "y"}), ("put", {"path": "a.txt", "text": "mine"})]
        )

    result = run(steps(step("a")), Model(a=[meddle, says()]), workspace=files)
    assert states(result) == {"a": "needs_orchestrator"}
    assert result.state is WorkflowState.HELD
    assert files.read("a.txt").content == "somebody else's"
    assert not files.exists("b.txt")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteLog]:
    """A log on disk, where the workspace's history and the steps' copies are kept beside it."""
    with SqliteLog(tmp_path / "runs.db") as log:
        yield log


def durable(
    spec: WorkflowSpec, model: Model, log: SqliteLog, **more: Any
) -> tuple[WorkflowResult, Callable[..., Any]]:
    work = log.path.with_name("work")
    work.mkdir()
    result = run_workflow(spec, [WORKER], provider=model, store=log, workspace=work, **more)

    def again(provider: Model, **options: Any) -> WorkflowResult:
        return resume_workflow(log, result.session_id, [WORKER], provider=provider, **options)

    return result, again


def test_a_failed_step_is_run_again_and_what_was_ready_is_not(tmp_path: Path, log: SqliteLog) -> None:
    spec = steps(step("a"), step("b", "a"), step("c", "b"))
    result, again = durable(spec, Model(a=writes("a.txt"), b=[says("failed")]), log)
    assert states(result) == {"a": "checkpoint_ready", "b": "failed", "c": "held"}
    model = Model()
    resumed = again(model, before=rerun_steps)
    assert resumed.ok, resumed.to_data()
    assert sorted(model.asked) == ["b", "c"]
    assert (tmp_path / "work/a.txt").read_text() == "x"
    assert again(Model()).ok, "resuming what is complete changes nothing"


def test_a_person_decides_about_a_step_and_the_rest_goes_on(log: SqliteLog) -> None:
    result, again = durable(steps(step("a"), step("b", "a")), Model(a=[says("needs_orchestrator")]), log)
    assert result.state is WorkflowState.HELD
    resumed = again(Model(), before=lambda s: answer_step(s, "a", ready=True, note="looked at it"))
    assert resumed.ok
    checkpoint = resumed.step("a").checkpoint
    assert checkpoint is not None
    assert checkpoint.verified_by == "person"


def test_a_held_call_is_answered_and_its_step_goes_on(tmp_path: Path, log: SqliteLog) -> None:
    spec = steps(step("a", workspace="shared"), step("b", "a"))
    asking = Permissions(PermissionMode.ASK)
    result, again = durable(spec, Model(a=writes("a.txt")), log, permissions=asking)
    assert result.state is WorkflowState.HELD, result.to_data()
    assert states(result)["a"] == "held"
    (child,) = [each for each in log.sessions() if dict(each.tags).get("agent") == "agent"]
    with Session.open(log, child.session_id) as session:
        (hold,) = pending_holds(session)
        answer_hold(session, hold.call_id, approved=True)
    resumed = again(Model(a=writes("a.txt")), permissions=Permissions())
    assert resumed.ok, resumed.to_data()
    assert (tmp_path / "work/a.txt").read_text() == "x"


def test_the_workflows_time_is_over_for_all_of_it(tmp_path: Path) -> None:
    clock = FakeClock()

    class Slow(Model):
        async def stream(self, request: ModelRequest):
            if self._next(request).text.startswith("slow"):
                clock.advance(1)
                await anyio.sleep_forever()
            async for each in super().stream(request):
                yield each

    spec = steps(step("a"), step("b", "a"), step("c", "b"), timeout_s=1.0)
    result = run_on(clock, spec, Slow(b=["slow"]))
    assert states(result) == {"a": "checkpoint_ready", "b": "timed_out", "c": "held"}
    assert result.state is WorkflowState.TIMED_OUT
    assert result.step("c").reason == "workflow_timeout"
    assert [each.step_id for each in result.usable_checkpoints] == ["a"]


def test_a_step_that_times_out_is_not_a_failure_like_others() -> None:
    clock = FakeClock()

    class Slow(Model):
        async def stream(self, request: ModelRequest):
            clock.advance(0.3)
            await anyio.sleep_forever()
            yield

    result = run_on(clock, steps(step("a", timeout_s=0.3)), Slow())
    assert states(result) == {"a": "timed_out"}
    assert result.state is WorkflowState.TIMED_OUT


def test_conflicting_writers_never_run_together_and_others_do() -> None:
    running: set[str] = set()
    together: set[frozenset[str]] = set()
    others_run = anyio.Event()

    class Watching(Model):
        async def stream(self, request: ModelRequest):
            task = next(each.text for each in request.items if each.role == "user").split()[0]
            running.add(task)
            together.add(frozenset(running))
            if task == "a":
                with anyio.fail_after(60):
                    await others_run.wait()
                for _ in range(100):  # Whoever may come in beside it has the time to.
                    await anyio.lowlevel.checkpoint()
            elif task == "c":
                others_run.set()
            together.add(frozenset(running))
            running.discard(task)
            async for each in super().stream(request):
                yield each

    spec = steps(
        step("a", write_set=("src/*.py",)),
        step("b", write_set=("src/util.*",)),
        step("c", write_set=("docs/**",)),
    )
    assert run(spec, Watching()).ok
    pairs = {frozenset(pair) for seen in together for pair in [(x, y) for x in seen for y in seen if x != y]}
    assert frozenset({"a", "b"}) not in pairs
    assert frozenset({"a", "c"}) in pairs


def test_unknown_agents_and_second_workflows_are_refused_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match="wants the agent 'nobody'"):
        run(steps(step("a", agent="nobody")), Model())
    with pytest.raises(UsageError, match="holds no workflow"):
        record_of(Session())


def test_every_move_is_in_the_log(log: SqliteLog) -> None:
    result, _ = durable(steps(step("a"), step("b", "a")), Model(b=[says("partial")]), log)
    with Session.open(log, result_id(result), read_only=True) as session:
        kinds = [each.kind for each in session[WorkflowEvent].all()]
        children = {each.subagent_id for each in session[SubagentEvent].all()}
        record = record_of(session)
    assert kinds == [
        "workflow_started",
        "step_scheduled",
        "checkpoint_decided",
        "step_scheduled",
        "checkpoint_decided",
        "workflow_finished",
    ]
    assert len(children) == 2
    assert record.state is WorkflowState.PARTIAL
    assert record.steps["b"].state is StepState.PARTIAL


def result_id(result: WorkflowResult) -> Any:
    from uuid import UUID

    return UUID(result.session_id)


def test_the_blocking_faces_are_refused_inside_an_event_loop() -> None:
    """In words, and before anything was opened."""

    async def inside() -> None:
        with pytest.raises(UsageError, match="would block the event loop"):
            run(steps(step("a")), Model())

    anyio.run(inside)

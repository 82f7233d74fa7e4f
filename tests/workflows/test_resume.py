"""Workflows that are stopped, answered, run again, or run by a model go on, and do nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from workflows_kit import WORKER, Model, run, says, states, step, steps, writes

from treenail import Agent, TurnState
from treenail.agent import close_state, open_state
from treenail.containment import Limits
from treenail.conversation import SubagentEvent
from treenail.errors import IllegalMoveError, UsageError
from treenail.history import diagnose
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, SubagentLimits
from treenail.testing.clock import FakeClock
from treenail.turns import TurnStarted, ceilings_of, contain
from treenail.workflows import (
    StepSpec,
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
    with_workflows,
)
from treenail.workflows.checkpoints import newest_answer
from treenail.workflows.documents import spec_from_data
from treenail.workspace import Filesystem, InMemoryFilesystem


class Durable:
    """A workflow on a store and in a directory, which can be gone on with."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "runs.db"
        self.work = directory / "work"
        self.work.mkdir()
        self.id = ""

    def run(self, spec: WorkflowSpec, model: Model, **more: Any) -> WorkflowResult:
        result = run_workflow(spec, [WORKER], provider=model, store=self.store, workspace=self.work, **more)
        self.id = result.session_id
        return result

    def again(self, model: Model, **more: Any) -> WorkflowResult:
        return resume_workflow(self.store, self.id, [WORKER], provider=model, **more)

    @contextmanager
    def opened(self, *, read_only: bool = True) -> Iterator[Session]:
        log = SqliteLog(self.store)
        session = Session.open(log, UUID(self.id), read_only=read_only)
        yield session
        session.close()
        log.close()

    def children(self) -> list[UUID]:
        log = SqliteLog(self.store)
        found = [each.session_id for each in log.sessions() if each.parent_id is not None]
        log.close()
        return found

    def by_hand(self, main: Callable[[ExecutionState, str | None], Any]) -> Any:
        """Run something on a new session of the store, as a program of one's own would."""
        session = Session(log=SqliteLog(self.store))
        self.id = str(session.session_id)
        state, root = open_state(session, self.work, self.store)
        try:
            return anyio.run(main, state, root)
        finally:
            close_state(state, self.store)

    def files(self) -> dict[str, str]:
        found = [each for each in self.work.rglob("*") if each.is_file()]
        return {str(each.relative_to(self.work)): each.read_text() for each in found}


@pytest.fixture
def durable(tmp_path: Path) -> Durable:
    return Durable(tmp_path)


def test_a_resume_is_held_to_the_ceiling_of_before_until_another_is_given(durable: Durable) -> None:
    """One that was raised stays raised for whoever goes on without a word about it."""
    spec = steps(step("a"), step("b", "a"), step("c", "b"))

    def failed_again(session: Session) -> None:
        rerun_steps(session, None)

    def ceiling() -> Limits | None:
        with durable.opened() as session:
            return ceilings_of(session)

    assert not durable.run(spec, Model(), ceiling=Limits(max_steps=1)).ok
    assert not durable.again(Model(), before=failed_again).ok
    assert ceiling() == Limits(max_steps=1)
    assert not durable.again(Model(), before=failed_again, ceiling=Limits(max_steps=2)).ok
    assert ceiling() == Limits(max_steps=2)
    assert not durable.again(Model(), before=failed_again).ok
    assert durable.again(Model(), before=failed_again, ceiling=Limits(max_steps=50)).ok


# --- a person's word -------------------------------------------------------------------------------


def test_what_a_person_calls_ready_is_applied_before_others_build_on_it(durable: Durable) -> None:
    """A copy with files outside the write set waits for somebody; a yes brings it home."""
    spec = steps(step("a", write_set=("src/**",)), step("b", "a", posture="read"))
    assert durable.run(spec, Model(a=writes("other.txt"))).state is WorkflowState.HELD
    assert durable.files() == {}
    seen: list[bool] = []

    def look(request: ModelRequest) -> str:
        seen.append((durable.work / "other.txt").exists())
        return says()

    resumed = durable.again(Model(b=[look]), before=lambda s: answer_step(s, "a", ready=True))
    assert resumed.ok, resumed.to_data()
    assert seen == [True]
    assert durable.files() == {"other.txt": "x"}


def test_a_person_may_call_a_step_ready_without_its_changes(durable: Durable) -> None:
    durable.run(steps(step("a")), Model(a=writes("a.txt", status="needs_orchestrator")))
    assert durable.again(Model(), before=lambda s: answer_step(s, "a", ready=True, apply=False)).ok
    assert durable.files() == {}


def test_a_conflict_that_was_resolved_by_hand_is_not_applied_over_it(durable: Durable) -> None:
    def meddle(request: ModelRequest) -> str:
        (durable.work / "a.txt").write_text("theirs")
        return says()

    first = durable.run(steps(step("a")), Model(a=[writes("a.txt", "ours")[0], meddle]))
    checkpoint = first.step("a").checkpoint
    assert checkpoint is not None
    assert (checkpoint.status, checkpoint.reason) == ("needs_orchestrator", "conflict")
    (durable.work / "a.txt").write_text("merged")
    assert durable.again(Model(), before=lambda s: answer_step(s, "a", ready=True)).ok
    assert durable.files() == {"a.txt": "merged"}


def test_a_yes_that_cannot_be_applied_is_asked_about_again(durable: Durable) -> None:
    """Nothing is built on a step that a person called ready if its changes are in conflict by now."""
    durable.run(steps(step("a"), step("b", "a")), Model(a=writes("a.txt", status="partial")))
    (durable.work / "a.txt").write_text("theirs")
    model = Model()
    resumed = durable.again(model, before=lambda s: answer_step(s, "a", ready=True))
    assert states(resumed) == {"a": "needs_orchestrator", "b": "held"}
    assert model.asked == []
    assert durable.files() == {"a.txt": "theirs"}


def test_what_was_answered_is_not_complete_before_it_is_resumed(durable: Durable) -> None:
    durable.run(steps(step("a")), Model(a=[says("partial")]))
    with durable.opened(read_only=False) as session:
        answer_step(session, "a", ready=True)
        assert record_of(session).state is WorkflowState.INTERRUPTED
        with pytest.raises(UsageError, match="already"):
            answer_step(session, "a", ready=True)
        with pytest.raises(IllegalMoveError, match="cannot become failed"):
            answer_step(session, "a", ready=False)
    assert durable.again(Model()).ok


def test_a_person_may_say_that_a_step_has_failed(durable: Durable) -> None:
    durable.run(steps(step("a"), step("b", "a")), Model(a=[says("needs_orchestrator")]))
    resumed = durable.again(Model(), before=lambda s: answer_step(s, "a", ready=False, note="no use"))
    assert states(resumed) == {"a": "failed", "b": "held"}
    assert resumed.state is WorkflowState.FAILED


# --- running again ---------------------------------------------------------------------------------


def test_a_complete_workflow_can_have_a_step_run_again(durable: Durable) -> None:
    spec = steps(step("a"), step("b", "a"), step("c", write_set=("c/**",)))
    first = durable.run(spec, Model(a=writes("a.txt", "one"), b=writes("b.txt", "one"), c=writes("c/c.txt")))
    assert first.ok
    model = Model(a=writes("a.txt", "two"), b=writes("b.txt", "two"))
    resumed = durable.again(model, before=lambda s: rerun_steps(s, ["a"]))
    assert resumed.ok
    assert set(model.asked) == {"a", "b"}, "what depends on it is run again, and nothing else"
    assert durable.files() == {"a.txt": "two", "b.txt": "two", "c/c.txt": "x"}
    assert durable.again(Model()).ok


def test_a_step_that_is_run_again_has_its_retries_again(durable: Durable) -> None:
    tries: list[int] = []

    def flaky(request: ModelRequest) -> str:
        tries.append(1)
        return says("checkpoint_ready" if len(tries) == 4 else "failed")

    assert states(durable.run(steps(step("a", retries=1)), Model(a=[flaky]))) == {"a": "failed"}
    assert len(tries) == 2
    assert durable.again(Model(a=[flaky]), before=rerun_steps).ok
    assert len(tries) == 4


def test_what_an_earlier_try_wrote_outside_its_write_set_counts() -> None:
    """In a shared workspace a failed try's files are still there: the next try does not hide them."""
    tries: list[int] = []

    def first(request: ModelRequest) -> Answer:
        tries.append(1)
        stray = "stray.txt" if len(tries) == 1 else "src/x"
        return Answer("", [("put", {"path": stray, "text": "x"})])

    def then(request: ModelRequest) -> str:
        return says("failed" if len(tries) == 1 else "checkpoint_ready")

    spec = steps(step("a", workspace="shared", write_set=("src/**",), retries=1))
    result = run(spec, Model(a=[first, then]))
    assert states(result) == {"a": "needs_orchestrator"}
    checkpoint = result.step("a").checkpoint
    assert checkpoint is not None
    assert "stray.txt" in checkpoint.known_limitations[0]


def test_the_log_says_why_a_step_was_tried_again(durable: Durable) -> None:
    tries: list[int] = []

    def flaky(request: ModelRequest) -> str:
        tries.append(1)
        return says("failed" if len(tries) == 1 else "checkpoint_ready", "the disk was full")

    assert durable.run(steps(step("a", retries=1)), Model(a=[flaky])).ok
    with durable.opened() as session:
        (again,) = [each for each in session[WorkflowEvent].all() if each.attempt == 2]
    assert again.reason == "retried: the disk was full"


# --- stopped ---------------------------------------------------------------------------------------


class Stopping(Model):
    """Stops the world when a step begins; `stop` says how."""

    def __init__(self, at: str, stop: Any, **scripts: Any) -> None:
        super().__init__(**scripts)
        self._at, self._stop = at, stop

    async def stream(self, request: ModelRequest):
        async for each in super().stream(request):
            yield each
        if self.asked[-1] == self._at and request.answers_so_far == 0:
            self._stop()
            await anyio.sleep_forever()


def cancelled_run(
    durable: Durable, spec: WorkflowSpec, model_of: Callable[[Any], Model], **more: Any
) -> dict[str, str]:
    """Run a workflow whose scope is cancelled from inside. Returns how its subagents ended."""

    async def main(state: ExecutionState, root: str | None) -> dict[str, str]:
        with anyio.CancelScope() as scope:
            runner = LoopRunner(model_of(scope.cancel))
            await Workflow(state, [WORKER], runner, workspace=root, **more).run(spec)
        assert scope.cancelled_caught
        return {each.subagent_id: each.event for each in state.session[SubagentEvent].all()}

    ended: dict[str, str] = durable.by_hand(main)
    return ended


def test_a_workflow_that_is_cancelled_is_interrupted_and_goes_on(durable: Durable) -> None:
    """Neither failed nor forgotten: the steps that ran and those in the queue go on, finished ones stay."""
    apart = {each: step(each, "a", write_set=(f"{each}/**",)) for each in "bcd"}
    spec = steps(step("a", write_set=("a/**",)), *apart.values(), step("e", "b", "c", "d"), max_concurrency=3)
    scripts = {each: writes(f"{each}/x", each) for each in "abcde"}
    limits = {"limits": SubagentLimits(max_threads=1)}
    cancelled_run(durable, spec, lambda stop: Stopping("b", stop, **scripts))
    with durable.opened() as session:
        record = record_of(session)
        report = diagnose(session)
    assert record.state is WorkflowState.INTERRUPTED
    assert not record.state.is_terminal
    assert record.steps["a"].state.value == "checkpoint_ready"
    check = next(each for each in report.checks if each.id == "workflow_events")
    assert check.status == "warning"
    model = Model(**scripts)
    resumed = durable.again(model, **limits)
    assert resumed.ok, resumed.to_data()
    assert "a" not in model.asked
    assert durable.files() == {f"{each}/x": each for each in "abcde"}


def test_what_waited_in_the_queue_when_it_was_stopped_is_run_later(durable: Durable) -> None:
    spec = steps(step("a", write_set=("a/**",)), step("b", write_set=("b/**",)), max_concurrency=2)
    scripts = {each: writes(f"{each}/x") for each in "ab"}
    limits = SubagentLimits(max_threads=1)
    ends = cancelled_run(durable, spec, lambda stop: Stopping("a", stop, **scripts), limits=limits)
    assert sorted(ends.values()) == ["cancelled", "closed"]
    assert durable.again(Model(**scripts)).ok
    assert durable.files() == {"a/x": "x", "b/x": "x"}


def test_an_aborted_chain_interrupts_the_workflow(durable: Durable) -> None:
    """Whoever aborts the parent's containment stops the workflow: its steps did not fail."""

    async def main(state: ExecutionState, root: str | None) -> WorkflowResult:
        above = contain(state.session, Limits())
        runner = LoopRunner(Stopping("a", lambda: above.abort("the operator said stop"), a=writes("a.txt")))
        workflow = Workflow(state, [WORKER], runner, workspace=root, containment=above)
        return await workflow.run(steps(step("a")))

    result = durable.by_hand(main)
    assert result.state is WorkflowState.INTERRUPTED
    assert "stop" in result.reason
    assert states(result) == {"a": "running"}
    assert durable.again(Model(a=writes("a.txt"))).ok
    assert durable.files() == {"a.txt": "x"}


def test_time_that_was_used_before_an_interrupt_is_gone_and_time_in_between_is_not() -> None:
    """Twenty seconds of work, a night off, and fifteen seconds more are thirty-five seconds."""
    clock, log, files = FakeClock(), MemoryLog(), InMemoryFilesystem()
    spec = steps(step("a", workspace="shared"), step("b", "a"), step("c", "b"), timeout_s=30)

    def takes(seconds: float) -> Any:
        def work(request: ModelRequest) -> str:
            clock.advance(seconds)
            return says()

        return work

    def go(model: Callable[[Any], Model], session: Session) -> WorkflowResult | None:
        state = ExecutionState(session, ResourceRegistry.build({Filesystem: files}), clock)

        async def main() -> WorkflowResult | None:
            with anyio.CancelScope() as scope:
                workflow = Workflow(state, [WORKER], LoopRunner(model(scope.cancel)))
                return await (
                    workflow.run(spec) if not session[WorkflowEvent].latest() else workflow.resume()
                )
            return None

        try:
            return anyio.run(main)
        finally:
            session.close()

    first = Session(log=log, clock=clock)
    assert go(lambda stop: Stopping("a", stop, a=[takes(20)]), first) is None
    clock.advance(12 * 3600)
    second = Session.open(log, first.session_id, clock=clock)
    result = go(lambda _: Model(b=[takes(15)]), second)
    assert result is not None
    assert result.elapsed_s == pytest.approx(35)
    assert states(result) == {"a": "checkpoint_ready", "b": "checkpoint_ready", "c": "held"}
    assert result.state is WorkflowState.TIMED_OUT
    third = Session.open(log, first.session_id, clock=clock, read_only=True)
    (resumed,) = [each for each in third[WorkflowEvent].all() if each.kind == "workflow_resumed"]
    assert resumed.used_s == pytest.approx(20)


def test_a_workflow_whose_time_is_over_starts_nothing_more() -> None:
    clock, files = FakeClock(), InMemoryFilesystem()
    state = ExecutionState(Session(clock=clock), ResourceRegistry.build({Filesystem: files}), clock)

    def watch(event: WorkflowEvent) -> None:
        if event.kind == "checkpoint_decided" and event.step_id == "a":
            clock.advance(100)

    model = Model()
    spec = steps(step("a"), step("b", "a"), step("c", required=False, write_set=("c",)), timeout_s=60)
    workflow = Workflow(state, [WORKER], LoopRunner(model), watch=watch)
    result = anyio.run(workflow.run, spec)
    assert "b" not in model.asked
    assert states(result)["b"] == "held"
    assert result.step("b").reason == "workflow_timeout"
    assert result.state is WorkflowState.TIMED_OUT
    again = anyio.run(workflow.resume)
    assert again.ok, "whoever resumes one that had ended gives it its time anew"


# --- files and readers -----------------------------------------------------------------------------


def test_changes_do_not_arrive_while_another_step_reads_them(durable: Durable) -> None:
    """A copy may be worked on beside a reader; it comes home when the reader is done."""
    (durable.work / "a.txt").write_text("old")
    reading, wrote = anyio.Event(), anyio.Event()
    seen: list[str] = []

    class Careful(Model):
        async def stream(self, request: ModelRequest):
            task = next(each.text for each in request.items if each.role == "user").split()[0]
            if task == "reader":
                reading.set()
                seen.append((durable.work / "a.txt").read_text())
                await wrote.wait()
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                seen.append((durable.work / "a.txt").read_text())
            elif request.answers_so_far == 0:
                await reading.wait()
            else:
                wrote.set()
            async for each in super().stream(request):
                yield each

    spec = steps(step("reader", posture="read"), step("writer"))
    assert durable.run(spec, Careful(writer=writes("a.txt", "new"))).ok
    assert seen == ["old", "old"]
    assert durable.files() == {"a.txt": "new"}


def test_several_copies_are_applied_together_or_not_at_all(durable: Durable) -> None:
    def meddle(request: ModelRequest) -> str:
        (durable.work / "b.txt").write_text("theirs")
        return says()

    spec = steps(
        step("a", auto_apply=False, write_set=("a.txt",)),
        step("b", auto_apply=False, write_set=("b.txt",)),
        StepSpec(id="merge", posture="apply", depends_on=("a", "b"), apply_from=("a", "b")),
        step("after", "merge"),
    )
    result = durable.run(spec, Model(a=writes("a.txt"), b=[writes("b.txt", "ours")[0], meddle]))
    assert states(result)["merge"] == "needs_orchestrator"
    assert result.state is WorkflowState.HELD
    assert durable.files() == {"b.txt": "theirs"}, "a's copy was not in conflict, and is not applied alone"
    (durable.work / "b.txt").unlink()
    resumed = durable.again(Model(), before=lambda s: rerun_steps(s, ["merge"]))
    assert resumed.ok, resumed.to_data()
    assert durable.files() == {"a.txt": "x", "b.txt": "ours"}


def test_a_step_that_applies_brings_home_only_what_it_may(durable: Durable) -> None:
    spec = steps(
        step("a", auto_apply=False),
        StepSpec(id="merge", posture="apply", depends_on=("a",), apply_from=("a",), write_set=("docs/**",)),
    )
    result = durable.run(spec, Model(a=writes("src/x")))
    assert states(result) == {"a": "checkpoint_ready", "merge": "needs_orchestrator"}
    assert durable.files() == {}


def test_steps_without_a_workspace_need_none() -> None:
    result = run_workflow(steps(step("a"), step("b", "a")), [WORKER], provider=Model())
    assert result.ok, result.to_data()


# --- values ----------------------------------------------------------------------------------------


@dataclass
class Found:
    names: list[str]
    count: int = 0


def test_a_value_may_be_asked_for_as_a_type_and_comes_back_as_one() -> None:
    spec = steps(step("a", output=Found), step("b", "a"))
    good = run(spec, Model(a=[says(payload_json='{"names": ["x"], "count": 1}')]))
    assert good.ok, good.to_data()
    assert good.value("a", Found) == Found(["x"], 1)
    assert good.value("a") == {"names": ["x"], "count": 1}
    assert good.value("b") is None
    bad = run(spec, Model(a=[says(payload_json='{"names": "x"}')]))
    assert states(bad) == {"a": "failed", "b": "held"}
    assert spec_from_data(spec.to_data()) == spec, "a specification in the log needs no type"


def test_only_the_newest_turns_answer_counts(durable: Durable) -> None:
    """A subagent that was sent something more and did not answer that is not ready by what it said before."""
    assert durable.run(steps(step("a")), Model(a=writes("a.txt"))).ok
    (durable.id,) = map(str, durable.children())
    with durable.opened(read_only=False) as session:
        assert newest_answer(session) is not None
        session.dispatch(TurnStarted("another", "e", "agent", "more", "p", "m"))
        assert newest_answer(session) is None


# --- limits ----------------------------------------------------------------------------------------


def test_the_operators_limits_are_kept_whatever_the_workflow_says() -> None:
    spec = steps(step("a"), step("b"), step("c"))
    with pytest.raises(UsageError, match="3 steps for agents"):
        run(spec, Model(), limits=SubagentLimits(max_children=2))
    with pytest.raises(UsageError, match="depth"):
        run(spec, Model(), limits=SubagentLimits(max_depth=0))
    tries: list[int] = []

    def fails(request: ModelRequest) -> str:
        tries.append(1)
        return says("failed")

    result = run(steps(step("a", retries=50)), Model(a=[fails]), limits=SubagentLimits(max_children=3))
    assert states(result) == {"a": "failed"}
    assert len(tries) == 3


# --- for a model -----------------------------------------------------------------------------------

WORKFLOW = {
    "id": "w",
    "steps": [
        {"id": "a", "task": "a it", "write_set": ["a/**"]},
        {"id": "b", "task": "b it", "depends_on": ["a"], "workspace": "shared", "write_set": ["b/**"]},
    ],
}


class Boss(Model):
    """The boss runs a workflow and then answers with what it was told; steps have scripts of their own."""

    def _next(self, request: ModelRequest) -> Answer:
        if not any("You lead" in each.text for each in request.items):
            return super()._next(request)
        if request.answers_so_far == 0:
            return Answer("", [("run_workflow", {"workflow": WORKFLOW})])
        return Answer(request.items[-1].text)


LEAD = Agent("lead", "You lead.", extensions=(with_workflows([WORKER]),), retry=None)


def test_a_model_runs_a_workflow_and_is_told_how_each_step_stands(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    model = Boss(a=writes("a/x"), b=writes("b/x", status="partial", summary="half of it"))
    with LEAD.run("go", provider=model, workspace=tmp_path / "work", store=tmp_path / "runs.db") as done:
        assert done.state is TurnState.COMPLETED
        assert not done.tool_calls[0].success, "a workflow that is not complete is no success"
        assert "a is checkpoint_ready" in done.text
        assert "b is partial: half of it" in done.text
    assert (tmp_path / "work/a/x").read_text() == "x"


def test_a_model_cannot_run_a_workflow_beyond_its_operators_limits(tmp_path: Path) -> None:
    lead = Agent(
        "lead", "You lead.", extensions=(with_workflows([WORKER], limits=SubagentLimits(max_children=1)),)
    )
    with lead.run("go", provider=Boss(), workspace=InMemoryFilesystem()) as done:
        assert "the operator allows 1" in done.text


def test_a_workflow_that_makes_no_sense_is_explained_to_the_model() -> None:
    class Confused(Boss):
        def _next(self, request: ModelRequest) -> Answer:
            if request.answers_so_far == 0:
                spec = {"id": "w", "steps": [{"id": "a", "task": "x", "depends_on": ["z"]}]}
                return Answer("", [("run_workflow", {"workflow": spec})])
            return Answer(request.items[-1].text)

    with LEAD.run("go", provider=Confused(), workspace=InMemoryFilesystem()) as done:
        assert "there is no step 'z'" in done.text


def test_a_result_is_json() -> None:
    result = run(steps(step("a"), step("b", "a")), Model(b=[says("partial")]))
    data = json.loads(json.dumps(result.to_data()))
    assert (data["ok"], data["status"], data["proof_states"]) == (False, "partial", ["partial_outcome_ready"])
    assert data["usable_checkpoints"] == ["a", "b"]
    assert data["partial_steps"] == ["b"]
    assert any("--rerun b" in each for each in data["safe_next_actions"])

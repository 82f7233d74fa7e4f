"""A workflow that is killed at any event of any of its sessions ends as if nothing had happened.

It is a diamond: a step in the shared workspace, then one on a copy beside one on a copy that another step
applies, then one more in the shared workspace. Every step adds lines to files, so that whatever is done
twice, or lost, is seen in them. The process is killed right after the n-th append to the store, whoever
made it; another process goes on. The same is done with a workflow that a model runs as a tool.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from dying import DyingLog, Kind, dies_after, dying_in, keep_in, runs_in, worth_a_kill
from tests.forks import ProcessKilled, in_child
from tests.stores import STORES

from treenail import Agent, tool
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, SubagentChangesApplied
from treenail.tools import boundaries, recover
from treenail.turns import InnerLoop, TurnStarted, TurnState, turn_state
from treenail.workflows import (
    StepSpec,
    Workflow,
    WorkflowEvent,
    WorkflowSpec,
    WorkflowState,
    record_of,
    rerun_steps,
    with_workflows,
)
from treenail.workflows.events import fold_workflow
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem


@tool
def add_line(path: str, text: str, *, context) -> str:
    """Add a line to a file."""
    context.filesystem.write(path, text + "\n", mode="append")
    return "added"


WORKER = Agent("agent", tools=(add_line,), retry=None)
READY = json.dumps({"status": "checkpoint_ready", "summary": "done"})
LINES = {
    "top": [("top.txt", "t")],
    "left": [("left.txt", "l"), ("top.txt", "l")],
    "right": [("right/new.txt", "r")],
    "bottom": [("top.txt", "b")],
}
SPEC = WorkflowSpec(
    id="diamond",
    steps=(
        StepSpec(id="top", task="top", workspace="shared", write_set=("top.txt",)),
        StepSpec(id="left", task="left", depends_on=("top",), write_set=("left.txt", "top.txt")),
        StepSpec(id="right", task="right", depends_on=("top",), write_set=("right/**",), auto_apply=False),
        StepSpec(id="merge", posture="apply", depends_on=("right",), apply_from=("right",)),
        StepSpec(id="bottom", task="bottom", depends_on=("left", "merge"), workspace="shared"),
    ),
)
RESULT = {"top.txt": "t\nl\nb\n", "left.txt": "l\n", "right/new.txt": "r\n"}
SHARES = 2
"""In how many tests the kills are done, so that they can run side by side."""


class Steps(ScriptedProvider):
    """Adds the lines of a step, one call each, and says that it is ready; the lead runs the workflow."""

    def _next(self, request: ModelRequest) -> Answer:
        said = next(each.text for each in request.items if each.role == "user")
        done = request.answers_so_far
        if said == "lead":
            spec = {"workflow": SPEC.to_data()}
            return Answer("all done") if done else Answer("", [("run_workflow", spec)])
        lines = LINES[said.split()[0]]
        if done >= len(lines):
            return Answer(READY)
        path, text = lines[done]
        return Answer("", [("add_line", {"path": path, "text": text})])


def opened(directory: Path, log: Any) -> ExecutionState:
    roots = [each.session_id for each in log.sessions() if each.parent_id is None]
    session = Session.open(log, roots[0]) if roots else Session(log=log)
    filesystem = HostFilesystem(directory / "work", store=directory / "files")
    state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}))
    recover(state)
    return state


async def engine(state: ExecutionState) -> bool:
    """Run the workflow by itself, or go on with it."""
    workflow = Workflow(state, [WORKER], LoopRunner(Steps([])))
    begun = state.session[WorkflowEvent].latest() is not None
    return (await (workflow.resume() if begun else workflow.run(SPEC))).ok


async def lead(state: ExecutionState) -> bool:
    """Let a model run the workflow, or go on with its turn."""
    agent = Agent("lead", retry=None)
    loop = InnerLoop(state, Steps([]), agent.prompt, agent="lead")
    begun = state.session[TurnStarted].latest() is not None
    async with with_workflows([WORKER])(loop):
        return (await (loop.resume() if begun else loop.run("lead"))).state is TurnState.COMPLETED


WAYS = {"engine": engine, "lead": lead}


def run(directory: Path, way: str, number: int) -> list[Kind]:
    dies_after(number)
    state = opened(directory, dying_in(directory))
    assert anyio.run(WAYS[way], state)
    return DyingLog.kinds


def prepared(directory: Path, store: str = "sqlite") -> Path:
    (directory / "work").mkdir(parents=True)
    keep_in(directory, store)
    return directory


def workflow_session(log: Any) -> Session | None:
    for each in log.sessions():
        session = Session.open(log, each.session_id, read_only=True)
        if session[WorkflowEvent].latest() is not None:
            return session
    return None


def decided(directory: Path) -> dict[UUID, int]:
    """The sessions of the steps that were ready when the process died, and how long their logs were."""
    with runs_in(directory) as log:
        session = workflow_session(log)
        if session is None:
            return {}
        record = record_of(session)
        if not any(each.kind == "workflow_finished" for each in session[WorkflowEvent].all()):
            assert record.state is WorkflowState.RUNNING, "nothing is called an ending before it is one"
        ready = [each.checkpoint for each in record.steps.values() if each.checkpoint is not None]
        ids = [UUID(each.child_session_id) for each in ready if each.child_session_id]
        return {each: log.info(each).head for each in ids}


def check(directory: Path) -> None:
    """The files are right, and each step, each call and each applied copy is there once."""
    work = directory / "work"
    found = {str(each.relative_to(work)): each.read_text() for each in work.rglob("*") if each.is_file()}
    assert found == RESULT
    with runs_in(directory) as log:
        session = workflow_session(log)
        assert session is not None
        events = session[WorkflowEvent].all()
        assert fold_workflow(events).state is WorkflowState.COMPLETED
        assert Counter(each.kind for each in events)["workflow_finished"] == 1
        decisions = Counter(each.step_id for each in events if each.kind == "checkpoint_decided")
        assert decisions == Counter(each.id for each in SPEC.steps)
        applied = Counter(each.subagent_id for each in session[SubagentChangesApplied].all())
        assert sorted(applied.values()) == [1, 1]
        children = [each for each in log.sessions() if each.parent_id == session.session_id]
        assert len(children) == len(LINES)
        calls = 0
        for each in children:
            own = Session.open(log, each.session_id, read_only=True)
            assert turn_state(own) is TurnState.COMPLETED
            assert len(own[TurnStarted].all()) == 1
            calls += sum(call.success for call in boundaries(own))
        # A call that was cut off is rolled back and made again: it succeeds once.
        assert calls == sum(map(len, LINES.values()))


def kill_and_go_on(directory: Path, way: str, number: int) -> bool:
    """Kill a run at an append and let another process go on. False if it had ended before."""
    prepared(directory)
    try:
        in_child(lambda: run(directory, way, number))
    except ProcessKilled:
        killed = True
    else:
        killed = False
    before = decided(directory)
    in_child(lambda: run(directory, way, 0))
    check(directory)
    with runs_in(directory) as log:
        for session_id, head in before.items():
            assert log.info(session_id).head == head, "a step that was ready was touched again"
    return killed


@pytest.mark.parametrize("share", range(SHARES))
def test_a_killed_workflow_goes_on_wherever_it_was(base: Path, share: int) -> None:
    """After a kill at each kind of append, the same files come out, and each step's effects once."""
    kinds = in_child(lambda: run(prepared(base / "whole"), "engine", 0))
    check(base / "whole")
    numbers = worth_a_kill(kinds)[share::SHARES]
    killed = [kill_and_go_on(base / f"at-{each}", "engine", each) for each in numbers]
    # Steps run side by side: another order may need an append less.
    assert killed.count(False) <= 2


def test_a_model_whose_workflow_was_killed_goes_on_with_it(base: Path) -> None:
    """The call that asked for the workflow finds it again: nothing is begun a second time."""
    kinds = in_child(lambda: run(prepared(base / "whole"), "lead", 0))
    check(base / "whole")
    for number in range(3, len(kinds), 18):
        kill_and_go_on(base / f"at-{number}", "lead", number)


@pytest.mark.parametrize("store", STORES)
def test_a_workflow_that_is_killed_again_and_again_ends_all_the_same(base: Path, store: str) -> None:
    """Each process does fifteen appends and dies; together they do each thing once."""
    directory = prepared(base / "often", store)
    deaths = 0
    while True:
        try:
            in_child(lambda: run(directory, "engine", 15))
        except ProcessKilled:
            deaths += 1
            assert deaths < 30
        else:
            break
    assert deaths > 4
    check(directory)


def test_a_step_that_somebody_else_is_writing_waits_for_a_decision(base: Path) -> None:
    """A step that cannot be taken up again is neither failed nor run twice: somebody decides."""
    directory = prepared(base / "held")
    with pytest.raises(ProcessKilled):
        # In the middle of the first step's work.
        in_child(lambda: run(directory, "engine", 10))
    with runs_in(directory) as log:
        (child,) = [each.session_id for each in log.sessions() if each.parent_id is not None]
        somebody = Session.open(log, child)

        def go_on(*rerun: str) -> dict[str, tuple[str, str]]:
            state = opened(directory, runs_in(directory))
            if rerun:
                rerun_steps(state.session, rerun)
            anyio.run(engine, state)
            steps = record_of(state.session).steps
            return {
                name: (each.state.value, "" if each.checkpoint is None else each.checkpoint.reason)
                for name, each in steps.items()
            }

        assert in_child(go_on)["top"] == ("needs_orchestrator", "detached")
        somebody.close()
    assert in_child(lambda: go_on("top"))["bottom"] == ("checkpoint_ready", "")
    with runs_in(directory) as log:
        session = workflow_session(log)
        assert session is not None
        assert record_of(session).steps["top"].attempt == 2

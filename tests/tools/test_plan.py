"""Plans: working state that the model keeps with four tools."""

from __future__ import annotations

from typing import Any

import pytest
from tools_kit import World

from treenail.log import SlicePolicy
from treenail.state import ExecutionState, Session
from treenail.tools import (
    PLAN_TOOLS,
    Plan,
    SetupPlan,
    ToolCall,
    ToolContext,
    ToolRunner,
    UpdateStep,
    WorkspaceDigest,
    plan_reducer,
    tool,
)
from treenail.tools.plan import AddStep, PlanStep, SetPlanStatus, install_plan, setup_plan, update_step


def call(world: World, name: str, **arguments: Any) -> Any:
    return world.runner(*PLAN_TOOLS).execute(ToolCall("c1", name, arguments))


def test_the_examples_of_the_specification_work() -> None:
    """A reducer registered by hand, a seeded plan, a snapshot, a broadcast and a rollback."""
    session = Session()
    for each in (SetupPlan, AddStep, UpdateStep, SetPlanStatus):
        session[Plan].register(each, plan_reducer, policy=SlicePolicy.STATE)
    session[Plan].seed(Plan(objective="test", status="active", steps=(PlanStep(1, "first"),)))
    snapshot = session.snapshot()
    session.broadcast(UpdateStep(1, status="done"))
    assert session[Plan].latest() == Plan("test", "completed", (PlanStep(1, "first", "done"),))
    session.rollback(snapshot)
    assert session[Plan].latest() == Plan("test", "active", (PlanStep(1, "first"),))


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "declared"])
def test_events_make_a_plan(by_hand: bool) -> None:
    """Reducers that are declared and those registered by hand do the same."""
    session = Session()
    if by_hand:
        for each in (SetupPlan, AddStep, UpdateStep, SetPlanStatus):
            session[Plan].register(each, plan_reducer)
    else:
        install_plan(session)
        install_plan(session)
    session.dispatch(AddStep("too early"))
    session.dispatch(SetPlanStatus("completed"))
    session.dispatch(UpdateStep(1, "done"))
    assert session[Plan].all() == ()
    session.dispatch(SetupPlan("ship it", ("build", "test")))
    session.dispatch(AddStep("deploy"))
    session.dispatch(AddStep("deploy again", step_id=3))
    session.dispatch(UpdateStep(1, "done"))
    session.dispatch(UpdateStep(2, "in_progress", note="slow"))
    session.dispatch(UpdateStep(9, "done"))
    assert session[Plan].all() == (
        Plan(
            "ship it",
            "active",
            (
                PlanStep(1, "build", "done"),
                PlanStep(2, "test", "in_progress", "slow"),
                PlanStep(3, "deploy"),
            ),
        ),
    )
    session.dispatch(SetPlanStatus("abandoned"))
    assert session[Plan].latest().status == "abandoned"  # type: ignore[union-attr] # there is one
    session.dispatch(SetupPlan("again", ("start",)))
    assert session[Plan].all() == (Plan("again", "active", (PlanStep(1, "start"),)),)


def test_a_model_works_through_a_plan(world: World) -> None:
    """Each tool answers with the plan as it stands, and a reopened session has it."""
    result = call(world, "setup_plan", objective="Fix it", steps=["Find", "Mend"])
    assert result.success
    assert result.message == (
        "Objective: Fix it\nPlan: active, 0 of 2 steps over\n1. [pending] Find\n2. [pending] Mend"
    )
    call(world, "update_step", step=1, status="in_progress")
    call(world, "update_step", step=1, status="done", note="in the parser")
    call(world, "add_step", title="Test")
    call(world, "update_step", step=2, status="skipped", title="Mend all")
    result = call(world, "update_step", step=3, status="done")
    assert result.message == (
        "Objective: Fix it\nPlan: completed, 3 of 3 steps over\n1. [done] Find (in the parser)\n"
        "2. [skipped] Mend all\n3. [done] Test"
    )
    world.reopen()
    install_plan(world.session)
    assert call(world, "read_plan").message == result.message
    assert world.outcomes() == ["ok"] * 7


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("setup_plan", {"objective": " ", "steps": ["a"]}, "The objective is empty"),
        ("setup_plan", {"objective": "a", "steps": []}, "at least one step"),
        ("setup_plan", {"objective": "a", "steps": ["a", ""]}, "The step is empty"),
        ("setup_plan", {"objective": "a", "steps": ["a"] * 101}, "has 101 steps; use at most 100"),
        ("setup_plan", {"objective": "a" * 501, "steps": ["a"]}, "501 characters; use at most 500"),
        ("add_step", {"title": ""}, "The title is empty"),
        ("update_step", {"step": 7, "status": "done"}, "There is no step 7. The steps are: 1, 2."),
        ("update_step", {"step": 1}, "Nothing to update"),
        ("update_step", {"step": 1, "note": "n" * 501}, "501 characters"),
        ("update_step", {"step": 1, "status": "finished"}, "status: Input should be 'pending'"),
    ],
)
def test_what_makes_no_sense_is_explained_and_changes_nothing(
    small_world: World, name: str, arguments: dict[str, Any], problem: str
) -> None:
    call(small_world, "setup_plan", objective="o", steps=["a", "b"])
    before = small_world.session[Plan].all()
    result = call(small_world, name, **arguments)
    assert not result.success
    assert problem in result.message
    assert small_world.session[Plan].all() == before


@pytest.mark.parametrize(("name", "arguments"), [("add_step", {"title": "x"}), ("update_step", {"step": 1})])
def test_without_a_plan_the_model_is_told_to_make_one(
    small_world: World, name: str, arguments: dict[str, Any]
) -> None:
    small_world.session[Plan].clear()
    result = call(small_world, name, **arguments)
    assert (result.success, result.message) == (False, "There is no plan yet. Make one with setup_plan.")
    assert call(small_world, "read_plan").message == "There is no plan yet. Make one with setup_plan."


def test_a_failed_call_leaves_the_plan_as_it_was(world: World) -> None:
    @tool(prepare=install_plan)
    def replans(*, context: ToolContext) -> str:
        """Plan and fail."""
        context.session.dispatch(SetupPlan("other", ("x",)))
        raise ValueError("no")

    before = world.session[Plan].all()
    assert not world.run(replans).success
    assert world.session[Plan].all() == before


def test_the_examples_of_the_tools_are_true() -> None:
    """What the model is shown is what it would get."""
    session = Session()
    runner = ToolRunner(ExecutionState(session), {each.name: each for each in PLAN_TOOLS})
    (first,), (second,) = setup_plan.examples, update_step.examples
    made = runner.execute(
        ToolCall("c1", "setup_plan", {"objective": first.input.objective, "steps": list(first.input.steps)})
    )
    assert made.message == first.output
    made = runner.execute(
        ToolCall("c2", "update_step", {"step": second.input.step, "status": second.input.status})
    )
    assert made.message == second.output


def test_a_digest_of_the_workspace_is_a_cache() -> None:
    """A rollback leaves it alone, and dropping the caches drops it."""
    session = Session()
    session.dispatch(WorkspaceDigest("a small project"))
    assert session.policy_of(WorkspaceDigest) is SlicePolicy.CACHE
    assert session.policy_of(Plan) is SlicePolicy.STATE
    session.drop_caches()
    assert session[WorkspaceDigest].all() == ()

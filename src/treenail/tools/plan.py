"""An agent's working memory: its plan, and digests of its workspace.

The plan is working state: a failed call leaves it unchanged. Events change it (`SetupPlan`, `AddStep`,
`UpdateStep`, `SetPlanStatus`); the tools dispatch them, and so may programs. An event that does not apply,
such as one for a missing step, changes nothing; the tools report that to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from treenail.log import SlicePolicy
from treenail.state import Extend, Replace, Session, Slice, SliceOp, declared_reducers, event, reducer
from treenail.tools.context import ToolContext
from treenail.tools.tool import ReadyTool, Tool, ToolExample, ToolResult, described

PlanStatus = Literal["active", "completed", "abandoned"]
"""The status of a plan."""

StepStatus = Literal["pending", "in_progress", "done", "blocked", "skipped"]
"""The status of one step."""

MAX_STEPS = 100
"""The most steps that a plan may have."""

MAX_TITLE_CHARS = 500
"""The longest objective, step or note."""

_OVER: frozenset[StepStatus] = frozenset({"done", "skipped"})


# --- the events ------------------------------------------------------------------------------------


@event(name="treenail.SetupPlan")
@dataclass(frozen=True, slots=True)
class SetupPlan:
    """A new plan replaces any earlier one."""

    objective: str
    steps: tuple[str, ...] = ()


@event(name="treenail.AddStep")
@dataclass(frozen=True, slots=True)
class AddStep:
    """One more step, at the end."""

    title: str
    step_id: int | None = None
    """Its number; the next free one if None. A number that exists already adds nothing."""


@event(name="treenail.UpdateStep")
@dataclass(frozen=True, slots=True)
class UpdateStep:
    """A step has a new status, title or note; fields that are None keep their value."""

    step_id: int
    status: StepStatus | None = None
    title: str | None = None
    note: str | None = None


@event(name="treenail.SetPlanStatus")
@dataclass(frozen=True, slots=True)
class SetPlanStatus:
    """The plan was completed, abandoned or reactivated."""

    status: PlanStatus


# --- the slice -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan."""

    step_id: int
    title: str
    status: StepStatus = "pending"
    note: str = ""
    """A remark, such as a finding or a reason."""


@event(name="treenail.Plan", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class Plan:
    """What an agent intends to do, and its progress."""

    objective: str
    status: PlanStatus = "active"
    steps: tuple[PlanStep, ...] = ()

    def step(self, step_id: int) -> PlanStep | None:
        """Return a step by its number, or None."""
        return next((each for each in self.steps if each.step_id == step_id), None)

    def render(self) -> str:
        """Write the plan for the model."""
        over = sum(each.status in _OVER for each in self.steps)
        lines = [
            f"Objective: {self.objective}",
            f"Plan: {self.status}, {over} of {len(self.steps)} steps over",
        ]
        for each in self.steps:
            note = f" ({each.note})" if each.note else ""
            lines.append(f"{each.step_id}. [{each.status.replace('_', ' ')}] {each.title}{note}")
        return "\n".join(lines)

    @reducer(on=SetupPlan)
    def _set_up(self, setup: SetupPlan) -> Replace[Plan]:
        steps = tuple(PlanStep(number, title) for number, title in enumerate(setup.steps, start=1))
        return Replace((Plan(setup.objective, "active", steps),))

    @reducer(on=AddStep)
    def _add(self, added: AddStep) -> SliceOp[Plan]:
        taken = [each.step_id for each in self.steps]
        number = max(taken, default=0) + 1 if added.step_id is None else added.step_id
        if self is _NO_PLAN or number in taken:
            return _NOTHING
        return self._with((*self.steps, PlanStep(number, added.title)))

    @reducer(on=UpdateStep)
    def _update(self, update: UpdateStep) -> SliceOp[Plan]:
        before = self.step(update.step_id)
        if before is None:
            return _NOTHING
        changes: dict[str, Any] = {"title": update.title, "status": update.status, "note": update.note}
        after = replace(before, **{name: new for name, new in changes.items() if new is not None})
        return self._with(tuple(after if each is before else each for each in self.steps))

    @reducer(on=SetPlanStatus)
    def _set_status(self, change: SetPlanStatus) -> SliceOp[Plan]:
        return _NOTHING if self is _NO_PLAN else Replace((replace(self, status=change.status),))

    def _with(self, steps: tuple[PlanStep, ...]) -> Replace[Plan]:
        """A plan whose steps are all over is completed; one with something left to do is not."""
        is_over = all(each.status in _OVER for each in steps)
        return Replace((replace(self, steps=steps, status="completed" if is_over else "active"),))


_NO_PLAN = Plan("")
_NOTHING: Extend[Plan] = Extend(())


def install_plan(session: Session) -> None:
    """Let a session keep a plan. Runners do this for the plan tools; calling it again is harmless."""
    session.install(Plan, initial=lambda: _NO_PLAN)


def plan_reducer(plans: Slice[Plan], change: Any, *, context: Any = None) -> SliceOp[Plan]:
    """Apply an event to the plan; for `session[Plan].register(SetupPlan, plan_reducer)`."""
    method = declared_reducers(Plan).get(type(change))
    if method is None:
        return _NOTHING
    current = plans.latest()
    made: SliceOp[Plan] = method(_NO_PLAN if current is None else current, change)
    return made


@event(name="treenail.WorkspaceDigest", policy=SlicePolicy.CACHE)
@dataclass(frozen=True, slots=True)
class WorkspaceDigest:
    """A summary of the workspace or of a part of it. It can be recomputed, so a rollback may drop it."""

    body: str
    key: str = ""
    """The part that it summarises; empty for the whole."""
    created_at: datetime | None = None


# --- the tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetupPlanParams:
    """What `setup_plan` takes."""

    objective: str = described("What is to be achieved, in one sentence.")
    steps: tuple[str, ...] = described("The steps in order, each one thing that can be checked off.")


@dataclass(frozen=True, slots=True)
class AddStepParams:
    """What `add_step` takes."""

    title: str = described("What is to be done in this step.")


@dataclass(frozen=True, slots=True)
class UpdateStepParams:
    """What `update_step` takes."""

    step: int = described("The number of the step, as read_plan shows it.")
    status: StepStatus | None = described(  # noqa: RUF009 - makes a dataclass field
        "Its new status; leave out to keep it.", default=None
    )
    title: str | None = described("A new title; leave out to keep it.", default=None)
    note: str | None = described("A finding or a reason in a few words; leave out to keep it.", default=None)


_NO_PLAN_YET = "There is no plan yet. Make one with setup_plan."


def _shown(context: ToolContext) -> ToolResult[Any]:
    plan = context.session[Plan].latest()
    return ToolResult.ok(message=_NO_PLAN_YET if plan is None else plan.render())


def _problem_in(what: str, texts: Sequence[str | None], *, may_be_empty: bool = False) -> str | None:
    """Return what is wrong with a text from the model, or None."""
    for text in texts:
        if text is not None and not text.strip() and not may_be_empty:
            return f"The {what} is empty; say what it is."
        if text is not None and len(text) > MAX_TITLE_CHARS:
            return f"The {what} has {len(text)} characters; use at most {MAX_TITLE_CHARS}."
    return None


def _changed(context: ToolContext, change: object, problem: str | None) -> ToolResult[Any]:
    """Dispatch a change and show the plan, unless there is a problem with the request."""
    if problem is not None:
        return ToolResult.error(problem)
    context.session.dispatch(change)
    return _shown(context)


def _setup_plan(params: SetupPlanParams, *, context: ToolContext) -> ToolResult[Any]:
    problem = _problem_in("objective", [params.objective]) or _problem_in("step", params.steps)
    if not params.steps:
        problem = problem or "A plan needs at least one step."
    if len(params.steps) > MAX_STEPS:
        problem = problem or f"The plan has {len(params.steps)} steps; use at most {MAX_STEPS}."
    return _changed(context, SetupPlan(params.objective, params.steps), problem)


def _add_step(params: AddStepParams, *, context: ToolContext) -> ToolResult[Any]:
    plan = context.session[Plan].latest()
    if plan is None:
        return ToolResult.error(_NO_PLAN_YET)
    problem = _problem_in("title", [params.title])
    if len(plan.steps) >= MAX_STEPS:
        problem = (
            problem or f"The plan has {MAX_STEPS} steps, the most possible. Make a new one with setup_plan."
        )
    number = max((each.step_id for each in plan.steps), default=0) + 1
    return _changed(context, AddStep(params.title, number), problem)


def _update_step(params: UpdateStepParams, *, context: ToolContext) -> ToolResult[Any]:
    plan = context.session[Plan].latest()
    if plan is None:
        return ToolResult.error(_NO_PLAN_YET)
    problem = None
    if plan.step(params.step) is None:
        known = ", ".join(str(each.step_id) for each in plan.steps) or "none"
        problem = f"There is no step {params.step}. The steps are: {known}."
    elif params.status is None and params.title is None and params.note is None:
        problem = "Nothing to update: give a status, a title or a note."
    problem = problem or _problem_in("title", [params.title])
    problem = problem or _problem_in("note", [params.note], may_be_empty=True)
    update = UpdateStep(params.step, params.status, params.title, params.note)
    return _changed(context, update, problem)


def _read_plan(params: None, *, context: ToolContext) -> ToolResult[Any]:
    return _shown(context)


setup_plan: Tool[SetupPlanParams, str] = ReadyTool[SetupPlanParams, str](
    name="setup_plan",
    description=(
        "Write down what you intend to do, before work that takes more than a few steps. It replaces any "
        "earlier plan."
    ),
    handler=_setup_plan,
    is_note=True,
    prepare=install_plan,
    examples=(
        ToolExample(
            "Plan a fix",
            SetupPlanParams("Fix the crash on empty input", ("Reproduce it in a test", "Fix it")),
            "Objective: Fix the crash on empty input\nPlan: active, 0 of 2 steps over\n"
            "1. [pending] Reproduce it in a test\n2. [pending] Fix it",
        ),
    ),
)
"""Makes a plan."""

add_step: Tool[AddStepParams, str] = ReadyTool[AddStepParams, str](
    name="add_step",
    description="Add a step to the end of the plan, when you find that more needs to be done.",
    handler=_add_step,
    is_note=True,
    prepare=install_plan,
)
"""Adds a step to the plan."""

update_step: Tool[UpdateStepParams, str] = ReadyTool[UpdateStepParams, str](
    name="update_step",
    description=(
        "Update a step of the plan: in_progress when you begin it, done when it is checked, blocked "
        "or skipped with a note that says why."
    ),
    handler=_update_step,
    is_note=True,
    prepare=install_plan,
    examples=(
        ToolExample(
            "A step is done",
            UpdateStepParams(1, "done"),
            "Objective: Fix the crash on empty input\nPlan: active, 1 of 2 steps over\n"
            "1. [done] Reproduce it in a test\n2. [pending] Fix it",
        ),
    ),
)
"""Changes a step of the plan."""

read_plan: Tool[None, str] = ReadyTool[None, str](
    name="read_plan",
    description="Read the plan: the objective, and the status of each step.",
    handler=_read_plan,
    effects="none",
    prepare=install_plan,
)
"""Shows the plan."""

PLAN_TOOLS: tuple[Tool[Any, Any], ...] = (setup_plan, add_step, update_step, read_plan)
"""The tools for plans."""

"""How a workflow may end: the one table, and how an ending is derived from its steps.

Theory of operation
-------------------
A workflow has no ending of its own. It ends as its steps did, and these as their evidence says. The first row
whose condition holds decides; `ok` is `completed` and nothing else. An optional step that is not ready keeps
nothing from being complete; it is listed all the same.

    state        when
    completed    every required step is checkpoint_ready
    held         a step that counts is held or needs a decision: somebody must act before it can go on
    timed_out    a step that counts ran out of time, or the whole workflow did
    partial      not complete, but some step left something that can be used
    failed       nothing can be used without running something again

A step counts if it is required, or if a required step that is not ready waits for it, directly or not.

Two states are no endings: `running`, and `interrupted` for one that was stopped on the way, or that somebody
has changed since it ended (a step was answered, or is to run again). Both go on when they are resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import pydantic  # Each of its names is loaded when it is first used, and not all programs use one.

from treenail.errors import IllegalMoveError, UsageError
from treenail.workflows.outcomes import Checkpoint
from treenail.workflows.spec import WorkflowSpec

T = TypeVar("T")


class WorkflowState(Enum):
    """How a workflow ended, or that it has not."""

    COMPLETED = "completed"
    PARTIAL = "partial"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    HELD = "held"
    RUNNING = "running"
    INTERRUPTED = "interrupted"

    @property
    def is_terminal(self) -> bool:
        """Whether it is over. A held one waits for somebody."""
        return self not in (WorkflowState.RUNNING, WorkflowState.INTERRUPTED)


class StepState(Enum):
    """How a step stands."""

    PENDING = "pending"
    RUNNING = "running"
    READY = "checkpoint_ready"
    PARTIAL = "partial"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    HELD = "held"
    NEEDS_ORCHESTRATOR = "needs_orchestrator"

    @property
    def is_ended(self) -> bool:
        """Whether nothing more happens to it by itself."""
        return self not in (StepState.PENDING, StepState.RUNNING)


STEP_TRANSITIONS: Mapping[StepState, frozenset[StepState]] = {
    StepState.PENDING: frozenset({StepState.RUNNING, StepState.HELD}),
    # From running to running: another try.
    StepState.RUNNING: frozenset(set(StepState) - {StepState.PENDING}),
    # A person may look at a step that is not ready, and decide; a step that is run again is pending.
    # What a person calls ready may turn out to be in conflict when its changes are to be applied.
    StepState.READY: frozenset({StepState.PENDING, StepState.NEEDS_ORCHESTRATOR}),
    StepState.PARTIAL: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
    StepState.FAILED: frozenset({StepState.PENDING, StepState.READY}),
    StepState.TIMED_OUT: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
    StepState.HELD: frozenset({StepState.PENDING, StepState.RUNNING, StepState.READY, StepState.FAILED}),
    StepState.NEEDS_ORCHESTRATOR: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
}
"""What may become of a step."""


def check_step_move(step_id: str, before: StepState, after: StepState) -> None:
    """Raise `IllegalMoveError` if a step must not move so; nothing has changed then."""
    if after not in STEP_TRANSITIONS[before]:
        may = ", ".join(sorted(each.value for each in STEP_TRANSITIONS[before]))
        raise IllegalMoveError(
            f"the step {step_id!r} is {before.value} and cannot become {after.value}; it may become: {may}"
        )


def step_state(checkpoint: Checkpoint) -> StepState:
    """Return how a step stands that has ended with this checkpoint."""
    if checkpoint.timed_out and not checkpoint.dependent_safe:
        return StepState.TIMED_OUT
    return StepState(checkpoint.status)


@dataclass(frozen=True, slots=True)
class StepView:
    """One step, as the log tells it."""

    step_id: str
    state: StepState = StepState.PENDING
    attempt: int = 0
    subagent_id: str = ""
    checkpoint: Checkpoint | None = None
    reason: str = ""
    """Why it is held without having run: `dependency_not_checkpoint_ready` or `workflow_timeout`."""
    tries: tuple[str, ...] = ()
    """The subagents that have tried it, since a person last asked for it to be run again."""


def derive_workflow(
    spec: WorkflowSpec, steps: Mapping[str, StepView], *, is_over: bool, timed_out: bool = False
) -> WorkflowState:
    """Return the state of a workflow from its steps. It is pure: the same steps, the same state."""
    if not is_over:
        return WorkflowState.RUNNING
    if all(steps[each.id].state is StepState.READY for each in spec.steps if each.required):
        return WorkflowState.COMPLETED
    counting = _counting(spec, steps)
    states = {each.state for each in counting}
    if any(
        each.state is StepState.NEEDS_ORCHESTRATOR or (each.state is StepState.HELD and not each.reason)
        for each in counting
    ):
        return WorkflowState.HELD
    if timed_out or StepState.TIMED_OUT in states:
        return WorkflowState.TIMED_OUT
    if any(each.checkpoint is not None and each.checkpoint.is_usable for each in steps.values()):
        return WorkflowState.PARTIAL
    return WorkflowState.FAILED


def _counting(spec: WorkflowSpec, steps: Mapping[str, StepView]) -> list[StepView]:
    """Return the steps that keep the workflow from being complete, or that such a step waits for."""
    waiting = [
        each.id for each in spec.steps if each.required and steps[each.id].state is not StepState.READY
    ]
    needs = {each.id: each.depends_on for each in spec.steps}
    found: set[str] = set()
    while waiting:
        now = waiting.pop()
        if now not in found:
            found.add(now)
            waiting.extend(needs[now])
    return [steps[each] for each in needs if each in found]


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """What came of a workflow, as its log tells it."""

    workflow_id: str
    name: str
    session_id: str
    state: WorkflowState
    steps: tuple[StepView, ...]
    waves: tuple[tuple[str, ...], ...] = ()
    next_actions: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    """How long it was at work, in all processes that had a part in it."""
    reason: str = ""
    """Why it was stopped, if it is interrupted."""

    @property
    def ok(self) -> bool:
        """Whether every required step is ready: full completion, and nothing less."""
        return self.state is WorkflowState.COMPLETED

    @property
    def proof_states(self) -> tuple[str, ...]:
        """What the result can be used as."""
        if self.ok:
            return ("completion_ready",)
        return ("partial_outcome_ready",) if self.usable_checkpoints else ()

    @property
    def usable_checkpoints(self) -> tuple[Checkpoint, ...]:
        """What can be built on or used."""
        found = [each.checkpoint for each in self.steps if each.checkpoint is not None]
        return tuple(each for each in found if each.is_usable)

    def steps_in(self, *states: StepState) -> tuple[str, ...]:
        """Return the ids of the steps that stand so."""
        return tuple(each.step_id for each in self.steps if each.state in states)

    def step(self, step_id: str) -> StepView:
        """Return a step."""
        for each in self.steps:
            if each.step_id == step_id:
                return each
        raise UsageError(f"the workflow {self.workflow_id!r} has no step {step_id!r}")

    def value(self, step_id: str, kind: type[T] | None = None) -> Any:
        """Return the value that a step left, as JSON data or as a value of `kind`; None if it left none."""
        checkpoint = self.step(step_id).checkpoint
        if checkpoint is None or not checkpoint.payload_json:
            return None
        return (
            checkpoint.value
            if kind is None
            else pydantic.TypeAdapter(kind).validate_json(checkpoint.payload_json)
        )

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "workflow_id": self.workflow_id,
            "name": self.name,
            "session": self.session_id,
            "ok": self.ok,
            "status": self.state.value,
            "proof_states": list(self.proof_states),
            "waves": [list(each) for each in self.waves],
            "steps": [_view_data(each) for each in self.steps],
            "usable_checkpoints": [each.step_id for each in self.usable_checkpoints],
            "held_steps": list(self.steps_in(StepState.HELD)),
            "failed_steps": list(self.steps_in(StepState.FAILED)),
            "timeout_steps": list(self.steps_in(StepState.TIMED_OUT)),
            "partial_steps": list(self.steps_in(StepState.PARTIAL)),
            "needs_orchestrator_steps": list(self.steps_in(StepState.NEEDS_ORCHESTRATOR)),
            "safe_next_actions": list(self.next_actions),
            "elapsed_s": self.elapsed_s,
            "reason": self.reason,
            "summary": summary_of(self.steps),
        }


def summary_of(steps: Sequence[StepView]) -> dict[str, int]:
    """Count the steps by how they stand."""
    counts: dict[str, int] = {}
    for each in steps:
        counts[each.state.value] = counts.get(each.state.value, 0) + 1
    return counts


def _view_data(view: StepView) -> dict[str, Any]:
    return {
        "id": view.step_id,
        "status": view.state.value,
        "attempt": view.attempt,
        "subagent": view.subagent_id,
        "reason": view.reason,
        "checkpoint": None if view.checkpoint is None else view.checkpoint.to_data(),
    }

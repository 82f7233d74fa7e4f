"""The states of a workflow and its steps: the tables, and how an ending is derived from the steps.

Theory of operation
-------------------
The ending of a workflow is derived from its steps, and theirs from evidence. The first row whose condition
holds decides; only `completed` is `ok`. An optional step that is not ready does not prevent completion.

    state        when
    completed    every required step is checkpoint_ready
    held         a step that counts is held or needs a decision: a person must act before it can resume
    timed_out    a step that counts timed out, or the whole workflow did
    partial      not complete, but some step left a result that can be used
    failed       nothing can be used without running something again

A step counts if it is required, or if a required step that is not ready depends on it, directly or
indirectly.

Two states are not endings: `running`, and `interrupted`, for a workflow that was stopped, or that a person
has changed since it ended (a step was answered, or is to run again). Both continue when they are resumed.
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
    """The state of a workflow."""

    COMPLETED = "completed"
    PARTIAL = "partial"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    HELD = "held"
    RUNNING = "running"
    INTERRUPTED = "interrupted"

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended. A held one waits for a person."""
        return self not in (WorkflowState.RUNNING, WorkflowState.INTERRUPTED)


class StepState(Enum):
    """The state of a step."""

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
        """Whether it has ended."""
        return self not in (StepState.PENDING, StepState.RUNNING)


STEP_TRANSITIONS: Mapping[StepState, frozenset[StepState]] = {
    StepState.PENDING: frozenset({StepState.RUNNING, StepState.HELD}),
    # From running to running: another attempt.
    StepState.RUNNING: frozenset(set(StepState) - {StepState.PENDING}),
    # A person may decide about a step that is not ready. A step to be run again is pending.
    # A step that a person called ready may turn out to be in conflict when its changes are applied.
    StepState.READY: frozenset({StepState.PENDING, StepState.NEEDS_ORCHESTRATOR}),
    StepState.PARTIAL: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
    StepState.FAILED: frozenset({StepState.PENDING, StepState.READY}),
    StepState.TIMED_OUT: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
    StepState.HELD: frozenset({StepState.PENDING, StepState.RUNNING, StepState.READY, StepState.FAILED}),
    StepState.NEEDS_ORCHESTRATOR: frozenset({StepState.PENDING, StepState.READY, StepState.FAILED}),
}
"""Every legal move of a step."""


def check_step_move(step_id: str, before: StepState, after: StepState) -> None:
    """Raise `IllegalMoveError` unless the table has the move."""
    if after not in STEP_TRANSITIONS[before]:
        may = ", ".join(sorted(each.value for each in STEP_TRANSITIONS[before]))
        raise IllegalMoveError(
            f"the step {step_id!r} is {before.value} and cannot become {after.value}; it can become: {may}"
        )


def step_state(checkpoint: Checkpoint) -> StepState:
    """Return the state of a step that ended with this checkpoint."""
    if checkpoint.timed_out and not checkpoint.dependent_safe:
        return StepState.TIMED_OUT
    return StepState(checkpoint.status)


@dataclass(frozen=True, slots=True)
class StepView:
    """One step, as the log has it."""

    step_id: str
    state: StepState = StepState.PENDING
    attempt: int = 0
    subagent_id: str = ""
    checkpoint: Checkpoint | None = None
    reason: str = ""
    """Why it is held without having run: `dependency_not_checkpoint_ready` or `workflow_timeout`."""
    tries: tuple[str, ...] = ()
    """The subagents that have tried it since it was last reset."""


def derive_workflow(
    spec: WorkflowSpec, steps: Mapping[str, StepView], *, is_over: bool, timed_out: bool = False
) -> WorkflowState:
    """Return the state of a workflow, from its steps alone."""
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
    """Return the required steps that are not ready, and all steps that these depend on."""
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
    """The result of a workflow, as its log has it."""

    workflow_id: str
    name: str
    session_id: str
    state: WorkflowState
    steps: tuple[StepView, ...]
    waves: tuple[tuple[str, ...], ...] = ()
    next_actions: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    """How long it ran, in all processes together."""
    reason: str = ""
    """Why it was interrupted, if it was."""

    @property
    def ok(self) -> bool:
        """Whether every required step is ready. Partial work is not `ok`."""
        return self.state is WorkflowState.COMPLETED

    @property
    def proof_states(self) -> tuple[str, ...]:
        """`completion_ready`, `partial_outcome_ready`, or nothing."""
        if self.ok:
            return ("completion_ready",)
        return ("partial_outcome_ready",) if self.usable_checkpoints else ()

    @property
    def usable_checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that are ready or partial."""
        found = [each.checkpoint for each in self.steps if each.checkpoint is not None]
        return tuple(each for each in found if each.is_usable)

    def steps_in(self, *states: StepState) -> tuple[str, ...]:
        """Return the ids of the steps in these states."""
        return tuple(each.step_id for each in self.steps if each.state in states)

    def step(self, step_id: str) -> StepView:
        """Return a step. Raises `UsageError` for an unknown id."""
        for each in self.steps:
            if each.step_id == step_id:
                return each
        raise UsageError(f"the workflow {self.workflow_id!r} has no step {step_id!r}")

    def value(self, step_id: str, kind: type[T] | None = None) -> Any:
        """Return a step's value, as JSON data or as a `kind`; None if it has none."""
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
    """Count the steps by their states."""
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

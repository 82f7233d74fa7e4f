"""The events of a workflow, which are audit only, and the fold of them into its record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from treenail.errors import UsageError
from treenail.log import Channel, SlicePolicy
from treenail.state import Session, event
from treenail.workflows.outcomes import Checkpoint
from treenail.workflows.spec import WorkflowSpec
from treenail.workflows.states import StepState, StepView, WorkflowState, check_step_move, step_state

WorkflowEventKind = Literal[
    "workflow_started",
    "workflow_resumed",
    "step_scheduled",
    "checkpoint_decided",
    "step_held",
    "step_reset",
    "workflow_interrupted",
    "workflow_finished",
]
"""What happened in a workflow."""


@event(name="treenail.WorkflowEvent", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class WorkflowEvent:
    """Something happened in a workflow."""

    kind: WorkflowEventKind
    workflow_id: str
    workflow_name: str
    created_at: datetime
    step_id: str = ""
    attempt: int = 0
    subagent_id: str = ""
    checkpoint: Checkpoint | None = None
    reason: str = ""
    state: str = ""
    """For `workflow_finished`: the workflow's state."""
    next_actions: tuple[str, ...] = ()
    spec_json: str = ""
    """For `workflow_started`: the specification, so that a resume needs no file."""
    workspace: str = ""
    """For `workflow_started`: the directory that it works in; empty if it is not on disk."""
    used_s: float = 0.0
    """For `workflow_resumed`: how much of the workflow's time was used before."""
    chain_s: float = 0.0
    """For `workflow_resumed`: how long its chain had been running, in all processes, when it was resumed."""

    @property
    def checkpoint_status(self) -> str:
        """For a decision, the state of the step; empty for other events."""
        return "" if self.checkpoint is None else step_state(self.checkpoint).value

    @property
    def status(self) -> str:
        """The state of the step, or of the workflow for an ending; empty if the event does not say."""
        if self.kind == "workflow_interrupted":
            return WorkflowState.INTERRUPTED.value
        return self.checkpoint_status or self.state or ("held" if self.kind == "step_held" else "")


@dataclass(slots=True)
class WorkflowRecord:
    """A workflow, folded from its events."""

    spec: WorkflowSpec
    steps: dict[str, StepView]
    started_at: datetime
    state: WorkflowState = WorkflowState.RUNNING
    next_actions: tuple[str, ...] = ()
    finished_at: datetime | None = None
    resumed_at: datetime | None = None
    used_s: float = 0.0
    """How much of its time was used before it was last resumed."""
    chain_s: float = 0.0
    """How long its chain had been running when it was last resumed."""
    interrupted: str = ""
    """Why it was interrupted, if it was."""

    def take(self, happened: WorkflowEvent) -> None:
        """Fold one more event. An event that does not fit is ignored, so that a fold never fails."""
        if happened.kind == "workflow_resumed":
            self.state, self.finished_at, self.interrupted = WorkflowState.RUNNING, None, ""
            self.resumed_at, self.used_s = happened.created_at, happened.used_s
            self.chain_s = happened.chain_s
            for each, held in self.steps.items():
                if held.state is StepState.HELD and held.reason:
                    self.steps[each] = replace(held, state=StepState.PENDING, reason="")
        elif happened.kind == "workflow_finished":
            self.state = _ending(happened.state)
            self.next_actions, self.finished_at = happened.next_actions, happened.created_at
        elif happened.kind == "workflow_interrupted":
            self.state, self.interrupted = WorkflowState.INTERRUPTED, happened.reason
            self.next_actions, self.finished_at = happened.next_actions, happened.created_at
        elif happened.step_id in self.steps:
            self.steps[happened.step_id] = moved(self.steps[happened.step_id], happened)
            if self.state.is_terminal:
                # A person has changed it since it ended; only a resume can derive its new ending.
                self.state, self.next_actions = WorkflowState.INTERRUPTED, ()


def moved(view: StepView, happened: WorkflowEvent) -> StepView:
    """Return a step after an event about it."""
    match happened.kind:
        case "step_scheduled":
            tries = view.tries
            if happened.subagent_id and happened.subagent_id not in tries:
                tries = (*tries, happened.subagent_id)
            return StepView(
                view.step_id, StepState.RUNNING, happened.attempt, happened.subagent_id, tries=tries
            )
        case "checkpoint_decided" if happened.checkpoint is not None:
            checkpoint = happened.checkpoint
            return replace(view, state=step_state(checkpoint), checkpoint=checkpoint, reason="")
        case "step_held":
            return replace(view, state=StepState.HELD, reason=happened.reason)
        case "step_reset":
            return StepView(view.step_id, attempt=view.attempt)
        case _:
            return view


def _ending(name: str) -> WorkflowState:
    """Return the ending that an event names; an unknown one counts as failed."""
    try:
        return WorkflowState(name)
    except ValueError:
        return WorkflowState.FAILED


def check_event(record: WorkflowRecord, happened: WorkflowEvent) -> None:
    """Raise `IllegalMoveError`, before anything is recorded, if an event is an illegal move of a step."""
    view = record.steps.get(happened.step_id)
    if view is not None:
        after = moved(view, happened).state
        if after is not view.state or after is StepState.RUNNING:
            check_step_move(view.step_id, view.state, after)


def log_event(
    session: Session, record: WorkflowRecord, kind: WorkflowEventKind, **facts: Any
) -> WorkflowEvent:
    """Log an event of a workflow, then let it take effect on its record. An illegal move changes nothing."""
    happened = WorkflowEvent(kind, record.spec.id, record.spec.title, session.clock.now(), **facts)
    check_event(record, happened)
    session.dispatch(happened)
    record.take(happened)
    return happened


def record_of(session: Session) -> WorkflowRecord:
    """Read the workflow of a session. Raises `UsageError` if it has none."""
    return fold_workflow(session[WorkflowEvent].all(), str(session.session_id))


def fold_workflow(events: Iterable[WorkflowEvent], where: str = "this log") -> WorkflowRecord:
    """Fold a workflow from its events. Raises `UsageError` if they do not begin with a start."""
    record: WorkflowRecord | None = None
    for each in events:
        if each.kind == "workflow_started":
            spec = WorkflowSpec.from_data(json.loads(each.spec_json))
            steps = {step.id: StepView(step.id) for step in spec.steps}
            record = WorkflowRecord(spec, steps, each.created_at)
        elif record is not None:
            record.take(each)
    if record is None:
        raise UsageError(f"{where} holds no workflow; begin one first")
    return record


def has_workflow(session: Session) -> bool:
    """Say whether a session has a workflow."""
    return session[WorkflowEvent].latest() is not None

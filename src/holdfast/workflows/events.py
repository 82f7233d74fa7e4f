"""What the log keeps of a workflow, and how its state is folded from it. All of it is audit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from holdfast.errors import UsageError
from holdfast.log.event import Channel, SlicePolicy
from holdfast.state.events import event
from holdfast.state.session import Session
from holdfast.workflows.outcomes import Checkpoint
from holdfast.workflows.spec import WorkflowSpec, spec_from_data
from holdfast.workflows.states import StepState, StepView, WorkflowState, step_state

Kind = Literal[
    "workflow_started",
    "workflow_resumed",
    "step_scheduled",
    "checkpoint_decided",
    "step_held",
    "step_reset",
    "workflow_finished",
]


@event(name="holdfast.WorkflowEvent", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class WorkflowEvent:
    """Something happened in a workflow."""

    kind: Kind
    workflow_id: str
    workflow_name: str
    created_at: datetime
    step_id: str = ""
    attempt: int = 0
    subagent_id: str = ""
    checkpoint: Checkpoint | None = None
    reason: str = ""
    state: str = ""
    """For an ending: the workflow's state."""
    next_actions: tuple[str, ...] = ()
    spec_json: str = ""
    """For the start: the specification, so that a resume needs no file."""
    workspace: str = ""
    """For the start: the directory that it works in; empty for none on disk."""


@dataclass(slots=True)
class WorkflowRecord:
    """A workflow as its events tell it."""

    spec: WorkflowSpec
    steps: dict[str, StepView]
    started_at: datetime
    state: WorkflowState = WorkflowState.RUNNING
    next_actions: tuple[str, ...] = ()
    finished_at: datetime | None = None
    resumed_at: datetime | None = None

    def take(self, happened: WorkflowEvent) -> None:
        """Fold one more event."""
        view = self.steps.get(happened.step_id)
        if happened.kind == "workflow_resumed":
            self.state, self.finished_at = WorkflowState.RUNNING, None
            self.resumed_at = happened.created_at
            for each, held in self.steps.items():
                if held.state is StepState.HELD and held.reason:
                    self.steps[each] = replace(held, state=StepState.PENDING, reason="")
        elif happened.kind == "workflow_finished":
            self.state = WorkflowState(happened.state)
            self.next_actions, self.finished_at = happened.next_actions, happened.created_at
        elif view is None:
            return
        elif happened.kind == "step_scheduled":
            self.steps[view.step_id] = replace(
                view,
                state=StepState.RUNNING,
                attempt=happened.attempt,
                subagent_id=happened.subagent_id,
                checkpoint=None,
                reason="",
            )
        elif happened.kind == "checkpoint_decided" and happened.checkpoint is not None:
            self.steps[view.step_id] = replace(
                view, state=step_state(happened.checkpoint), checkpoint=happened.checkpoint, reason=""
            )
        elif happened.kind == "step_held":
            self.steps[view.step_id] = replace(view, state=StepState.HELD, reason=happened.reason)
        elif happened.kind == "step_reset":
            self.steps[view.step_id] = StepView(view.step_id, attempt=view.attempt)


def record_of(session: Session) -> WorkflowRecord:
    """Read the workflow of a session. Raises `UsageError` if it has none."""
    return fold_workflow(session[WorkflowEvent].all(), str(session.session_id))


def fold_workflow(events: Iterable[WorkflowEvent], where: str = "this log") -> WorkflowRecord:
    """Fold a workflow from its events. Raises `UsageError` if they do not begin with a start."""
    record: WorkflowRecord | None = None
    for each in events:
        if each.kind == "workflow_started":
            spec = spec_from_data(json.loads(each.spec_json), where=f"the workflow in {where}")
            steps = {step.id: StepView(step.id) for step in spec.steps}
            record = WorkflowRecord(spec, steps, each.created_at)
        elif record is not None:
            record.take(each)
    if record is None:
        raise UsageError(f"{where} holds no workflow; begin one first")
    return record


def has_workflow(session: Session) -> bool:
    """Say whether a session is a workflow's."""
    return session[WorkflowEvent].latest() is not None

"""A person's decisions about the steps of a stored workflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treenail.errors import UsageError
from treenail.state import Session
from treenail.workflows.events import log_event, record_of
from treenail.workflows.outcomes import Checkpoint
from treenail.workflows.states import StepState


def answer_step(
    session: Session, step_id: str, *, ready: bool, note: str = "", apply: bool | None = None
) -> None:
    """Decide about a step that is not ready: from now on it counts as ready, or as failed.

    The changes in a ready step's copy are applied when the workflow is resumed, before other steps build on
    them. `apply` says whether to; by default they are applied, except after a conflict, which the person has
    then resolved by hand. Raises `UsageError` for an unknown step, or one that already stands so.
    """
    record = record_of(session)
    step = record.spec.step(step_id)
    view = record.steps[step_id]
    if view.state is (StepState.READY if ready else StepState.FAILED):
        raise UsageError(f"the step {step_id!r} is {view.state.value} already")
    before = view.checkpoint or Checkpoint(step_id, "failed", "")
    if apply is None:
        apply = before.reason != "conflict"
    decided = replace(
        before,
        status="checkpoint_ready" if ready else "failed",
        summary=f"{before.summary}\n{note}".strip() if note else before.summary,
        verified_by="person",
        timed_out=False,
        reason="",
        next_actions=(),
        changes_wanted=ready and apply and step.has_copy and step.auto_apply and bool(view.subagent_id),
    )
    log_event(session, record, "checkpoint_decided", step_id=step_id, checkpoint=decided)


def rerun_steps(session: Session, step_ids: Sequence[str] | None = None) -> tuple[str, ...]:
    """Mark steps to be run again when the workflow is resumed, with every step that depends on them.

    Without ids: every step that failed, timed out or is partial. Returns the ids. Changes that a step has
    already made to the workspace stay there.
    """
    record = record_of(session)
    if step_ids is None:
        again = (StepState.FAILED, StepState.TIMED_OUT, StepState.PARTIAL)
        step_ids = [each for each, view in record.steps.items() if view.state in again]
        if not step_ids:
            raise UsageError("no step has failed, timed out or is partial; there is nothing to run again")
    chosen: set[str] = set()
    for each in step_ids:
        record.spec.step(each)
        if record.steps[each].state is StepState.RUNNING:
            raise UsageError(f"the step {each!r} is still running; resume the workflow first")
        chosen |= {each, *record.spec.dependents_of(each)}
    ordered = tuple(each.id for each in record.spec.steps if each.id in chosen)
    for each in ordered:
        if record.steps[each].state is not StepState.PENDING:
            log_event(session, record, "step_reset", step_id=each)
    return ordered

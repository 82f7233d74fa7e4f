"""The spans of a workflow: one for the whole, and below it one for each attempt at a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from treenail import telemetry
from treenail.telemetry import OpenSpan
from treenail.workflows.spec import StepSpec, WorkflowSpec


class WorkflowTrace:
    """The spans of one workflow. An attempt's span is open until the step is decided or retried."""

    def __init__(self) -> None:
        self._steps: dict[str, OpenSpan] = {}

    @contextmanager
    def whole(self, spec: WorkflowSpec, session_id: UUID) -> Iterator[Callable[[str], None]]:
        """Open the span of the workflow. Call the returned function with the state that it ended in."""
        with telemetry.span(
            f"invoke_workflow {spec.title}",
            gen_ai__operation__name="invoke_workflow",
            gen_ai__workflow__name=spec.title,
            gen_ai__conversation__id=str(session_id),
            treenail__workflow__steps=len(spec.steps),
        ) as span:

            def ended(state: str) -> None:
                span.set("treenail.workflow.state", state)
                if state != "completed":
                    span.fail(state)

            try:
                yield ended
            finally:
                for each in list(self._steps):
                    self.decided(each, "undecided")

    @contextmanager
    def attempt(self, step: StepSpec, attempt: int) -> Iterator[None]:
        """Open the span of an attempt. A subagent that is spawned in the block belongs to it."""
        self.decided(step.id, "retried")
        self._steps[step.id] = span = telemetry.begin(
            f"step {step.id}",
            gen_ai__agent__name=step.agent or None,
            treenail__workflow__step=step.id,
            treenail__workflow__attempt=attempt,
        )
        with telemetry.under(span.place):
            yield

    def decided(self, step_id: str, status: str) -> None:
        """Close the span of the newest attempt at a step, if one is open."""
        span = self._steps.pop(step_id, None)
        if span is not None:
            span.set("treenail.workflow.checkpoint_status", status)
            if status != "checkpoint_ready":
                span.fail(status)
            span.end()

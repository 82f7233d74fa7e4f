"""Workflows: steps with dependencies over subagents, and the table of how they can end."""

from holdfast.workflows.engine import Workflow, answer_step, rerun_steps, workflow_result
from holdfast.workflows.events import WorkflowEvent, WorkflowRecord, record_of
from holdfast.workflows.globs import overlaps
from holdfast.workflows.outcomes import Artifact, Checkpoint, StepAnswer
from holdfast.workflows.running import (
    Workflows,
    resume_workflow,
    run_workflow,
    with_workflows,
    workflow_tool,
)
from holdfast.workflows.spec import (
    AgentSpec,
    DryRun,
    StepSpec,
    WorkflowSpec,
    dry_run,
    load_spec,
    spec_from_data,
    spec_schema,
    waves,
)
from holdfast.workflows.states import StepState, StepView, WorkflowResult, WorkflowState, derive_workflow

StepOutcome = StepAnswer
"""What a step returns; the older name of `StepAnswer`."""

__all__ = [
    "AgentSpec",
    "Artifact",
    "Checkpoint",
    "DryRun",
    "StepAnswer",
    "StepOutcome",
    "StepSpec",
    "StepState",
    "StepView",
    "Workflow",
    "WorkflowEvent",
    "WorkflowRecord",
    "WorkflowResult",
    "WorkflowSpec",
    "WorkflowState",
    "Workflows",
    "answer_step",
    "derive_workflow",
    "dry_run",
    "load_spec",
    "overlaps",
    "record_of",
    "rerun_steps",
    "resume_workflow",
    "run_workflow",
    "spec_from_data",
    "spec_schema",
    "waves",
    "with_workflows",
    "workflow_result",
    "workflow_tool",
]

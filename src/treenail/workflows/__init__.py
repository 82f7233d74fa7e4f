"""Workflows: steps with dependencies over subagents, and the table of how they can end."""

from treenail.workflows.engine import Workflow, answer_step, rerun_steps, workflow_result
from treenail.workflows.events import WorkflowEvent, WorkflowRecord, record_of
from treenail.workflows.globs import overlaps
from treenail.workflows.outcomes import Artifact, Checkpoint, StepAnswer
from treenail.workflows.running import (
    Workflows,
    resume_workflow,
    run_workflow,
    with_workflows,
    workflow_tool,
)
from treenail.workflows.spec import (
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
from treenail.workflows.states import StepState, StepView, WorkflowResult, WorkflowState, derive_workflow

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

"""Workflows: steps with dependencies over subagents, and the table of how they can end."""

from treenail.workflows.decisions import answer_step, rerun_steps
from treenail.workflows.documents import load_spec, spec_from_data, spec_schema
from treenail.workflows.events import WorkflowEvent, WorkflowRecord, fold_workflow, record_of
from treenail.workflows.outcomes import Artifact, Checkpoint, StepAnswer
from treenail.workflows.runs import resume_workflow, run_workflow
from treenail.workflows.schedule import DryRun, dry_run, waves
from treenail.workflows.spec import AgentSpec, StepSpec, WorkflowSpec
from treenail.workflows.states import StepState, StepView, WorkflowResult, WorkflowState, derive_workflow
from treenail.workflows.tool import Workflows, with_workflows
from treenail.workflows.workflow import Workflow, workflow_result

__all__ = [
    "AgentSpec",
    "Artifact",
    "Checkpoint",
    "DryRun",
    "StepAnswer",
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
    "fold_workflow",
    "load_spec",
    "record_of",
    "rerun_steps",
    "resume_workflow",
    "run_workflow",
    "spec_from_data",
    "spec_schema",
    "waves",
    "with_workflows",
    "workflow_result",
]

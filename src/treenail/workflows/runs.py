"""Running a stored workflow from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

import anyio

from treenail.agent import Agent, close_state, open_log, open_state
from treenail.containment import Limits
from treenail.errors import UsageError
from treenail.log import Log
from treenail.providers import Provider
from treenail.sandbox import Sandbox
from treenail.state import Session
from treenail.subagents import LoopRunner, SubagentLimits
from treenail.tools import Permissions, is_in_event_loop, recover
from treenail.workflows.events import WorkflowEvent
from treenail.workflows.spec import WorkflowSpec
from treenail.workflows.states import WorkflowResult
from treenail.workflows.workflow import Workflow, check_agents
from treenail.workspace import Filesystem


def run_workflow(
    spec: WorkflowSpec,
    agents: Sequence[Agent] | Mapping[str, Agent],
    *,
    provider: Provider | Callable[[Agent], Provider],
    workspace: str | Path | Filesystem | None = None,
    store: str | Path | Log | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    tags: Mapping[str, str] | None = None,
    sandbox: Sandbox | None = None,
) -> WorkflowResult:
    """Run a workflow to its end, blocking. With a `store` it is durable; see `resume_workflow`.

    `limits` hold for each step, `ceiling` for all of them together.
    """
    _refuse_in_event_loop("run_workflow")
    check_agents(spec, agents)
    session = Session(log=open_log(store), tags={**(tags or {}), "agent": "workflow", "workflow": spec.id})
    state, root = open_state(session, workspace, store, sandbox=sandbox)
    workflow = Workflow(
        state,
        agents,
        LoopRunner(provider),
        limits=limits,
        ceiling=ceiling,
        permissions=permissions or Permissions(),
        workspace=root,
        watch=watch,
    )
    try:
        return anyio.run(workflow.run, spec)
    finally:
        close_state(state, store)


def resume_workflow(
    store: str | Path | Log,
    session_id: UUID | str,
    agents: Sequence[Agent] | Mapping[str, Agent],
    *,
    provider: Provider | Callable[[Agent], Provider],
    workspace: str | Path | Filesystem | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    before: Callable[[Session], object] | None = None,
    sandbox: Sandbox | None = None,
) -> WorkflowResult:
    """Resume a stored workflow, blocking. `before` is called first; it may answer or reset steps."""
    _refuse_in_event_loop("resume_workflow")
    session = Session.open(
        open_log(store, must_exist=True), session_id if isinstance(session_id, UUID) else UUID(session_id)
    )
    try:
        place = workspace if workspace is not None else workspace_of_workflow(session)
        state, root = open_state(session, place, store, sandbox=sandbox)
    except BaseException:
        session.close()
        if isinstance(store, str | Path):
            session.log.close()
        raise
    try:
        recover(state)
        if before is not None:
            before(session)
        workflow = Workflow(
            state,
            agents,
            LoopRunner(provider),
            limits=limits,
            ceiling=ceiling,
            permissions=permissions or Permissions(),
            workspace=root,
            watch=watch,
        )
        return anyio.run(workflow.resume)
    finally:
        close_state(state, store)


def _refuse_in_event_loop(name: str) -> None:
    if is_in_event_loop():
        raise UsageError(
            f"{name} would block the event loop that runs here; await Workflow(...).run or .resume instead"
        )


def workspace_of_workflow(session: Session) -> str | None:
    """Return the directory that a workflow works in, as its log has it; None if it is not on disk."""
    for each in session[WorkflowEvent].all():
        if each.kind == "workflow_started":
            return each.workspace or None
    raise UsageError(f"the session {session.session_id} holds no workflow")

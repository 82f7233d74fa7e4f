"""Running a stored workflow from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from uuid import UUID

import anyio

from treenail.agent import AnyAgent, RunStore, close_state, end_other_writers, open_state
from treenail.containment import Limits
from treenail.errors import UsageError
from treenail.log import PostgresUrl, open_log
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
    agents: Sequence[AnyAgent] | Mapping[str, AnyAgent],
    *,
    provider: Provider | Callable[[AnyAgent], Provider],
    workspace: str | Path | Filesystem | None = None,
    store: RunStore | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    tags: Mapping[str, str] | None = None,
    sandbox: Sandbox | None = None,
    take_over: bool = False,
) -> WorkflowResult:
    """Run a workflow to its end, blocking. With a `store` it is durable; see `resume_workflow`.

    `limits` hold for each step, `ceiling` for all of them together. With `take_over`, a process that writes
    the workspace is killed first.
    """
    _refuse_in_event_loop("run_workflow")
    check_agents(spec, agents)
    log = open_log(store)
    if take_over:
        end_other_writers(log, None, workspace)
    session = Session(log=log, tags={**(tags or {}), "agent": "workflow", "workflow": spec.id})
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
    store: RunStore,
    session_id: UUID | str,
    agents: Sequence[AnyAgent] | Mapping[str, AnyAgent],
    *,
    provider: Provider | Callable[[AnyAgent], Provider],
    workspace: str | Path | Filesystem | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    before: Callable[[Session], object] | None = None,
    sandbox: Sandbox | None = None,
    take_over: bool = False,
) -> WorkflowResult:
    """Resume a stored workflow, blocking. `before` is called first; it may answer or reset steps.

    With `take_over`, the process that writes the workflow or its workspace is killed first.
    """
    _refuse_in_event_loop("resume_workflow")
    log = open_log(store, must_exist=True)
    known = session_id if isinstance(session_id, UUID) else UUID(session_id)
    if take_over:
        if workspace is None:
            with closing(Session.open(log, known, read_only=True)) as seen:
                workspace = workspace_of_workflow(seen)
        end_other_writers(log, known, workspace)
    session = Session.open(log, known)
    try:
        place = workspace if workspace is not None else workspace_of_workflow(session)
        state, root = open_state(session, place, store, sandbox=sandbox)
    except BaseException:
        session.close()
        if isinstance(store, str | Path | PostgresUrl):
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

"""Ways to run a workflow: as a function, and as a tool for a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio

from holdfast.agent import Agent, close_state, open_log, open_state
from holdfast.containment import Limits
from holdfast.errors import UsageError
from holdfast.log.base import Log
from holdfast.prompt.sections import MarkdownSection
from holdfast.providers.base import Provider
from holdfast.state.execution import ExecutionState
from holdfast.state.session import Session, nested_session
from holdfast.subagents import ChildRunner, LoopRunner, SubagentLimits
from holdfast.tools.boundaries import recover
from holdfast.tools.context import ToolContext
from holdfast.tools.policies import Permissions
from holdfast.tools.tool import Tool, ToolResult
from holdfast.turns.turn import InnerLoop
from holdfast.workflows.engine import Workflow, check_agents
from holdfast.workflows.events import WorkflowEvent, has_workflow
from holdfast.workflows.spec import WorkflowSpec, spec_from_data, spec_schema
from holdfast.workflows.states import WorkflowResult
from holdfast.workspace.base import Filesystem

Agents = Sequence[Agent] | Mapping[str, Agent]


def run_workflow(
    spec: WorkflowSpec,
    agents: Agents,
    *,
    provider: Provider | Callable[[Agent], Provider],
    workspace: str | Path | Filesystem | None = None,
    store: str | Path | Log | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    tags: Mapping[str, str] | None = None,
) -> WorkflowResult:
    """Run a workflow to its end, blocking. With a `store` it is durable; see `resume_workflow`.

    `limits` hold for each step, `ceiling` for all of them together.
    """
    check_agents(spec, agents)
    session = Session(log=open_log(store), tags={**(tags or {}), "agent": "workflow", "workflow": spec.id})
    state, root = open_state(session, workspace, store)
    try:
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
        return anyio.run(workflow.run, spec)
    finally:
        close_state(state, store)


def resume_workflow(
    store: str | Path | Log,
    session_id: UUID | str,
    agents: Agents,
    *,
    provider: Provider | Callable[[Agent], Provider],
    workspace: str | Path | Filesystem | None = None,
    limits: SubagentLimits | None = None,
    ceiling: Limits | None = None,
    permissions: Permissions | None = None,
    watch: Callable[[WorkflowEvent], object] | None = None,
    before: Callable[[Session], object] | None = None,
) -> WorkflowResult:
    """Go on with a stored workflow, blocking. `before` may answer steps or let them be run again first."""
    session = Session.open(
        open_log(store, must_exist=True), session_id if isinstance(session_id, UUID) else UUID(session_id)
    )
    try:
        place = workspace if workspace is not None else workspace_of_workflow(session)
        state, root = open_state(session, place, store)
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


def workspace_of_workflow(session: Session) -> str | None:
    """Return the directory that a workflow works in, as its log has it."""
    for each in session[WorkflowEvent].all():
        if each.kind == "workflow_started":
            return each.workspace or None
    raise UsageError(f"the session {session.session_id} holds no workflow")


# --- for a model -----------------------------------------------------------------------------------

Extension = Callable[[InnerLoop], AbstractAsyncContextManager[object]]

_DESCRIPTION = (
    "Run steps with dependencies, each done by an agent of its own, and see what came of each. Independent "
    "steps run side by side. Use it for work that falls into parts; do small things yourself."
)


@dataclass(frozen=True, slots=True)
class RunWorkflow:
    """What `run_workflow` takes."""

    workflow: dict[str, Any] = field(
        metadata={"description": "The workflow: id, steps with id, task, agent, depends_on, posture ..."}
    )


def workflow_tool(
    agents: Agents,
    runner: ChildRunner,
    *,
    limits: SubagentLimits | None = None,
    permissions: Permissions | None = None,
    containment: Any = None,
    depth: int = 0,
) -> Tool[RunWorkflow, str]:
    """Make a tool with which a model runs a workflow. The result says how each step stands.

    The limits are the operator's, and hold for whatever the model writes. Run again after a crash, it goes
    on with the workflow that it had begun.
    """

    async def handle(params: RunWorkflow, *, context: ToolContext) -> ToolResult[str]:
        try:
            spec = spec_from_data(params.workflow)
        except UsageError as error:
            return ToolResult.error(f"The workflow cannot be run: {error}")
        session = _session_for(context, spec)
        try:
            workflow = Workflow(
                ExecutionState(session, context.state.resources, context.state.clock, context.state.rng),
                agents,
                runner,
                limits=limits or SubagentLimits(),
                permissions=permissions or Permissions(),
                containment=containment,
                depth=depth,
            )
            result = await (workflow.resume() if has_workflow(session) else workflow.run(spec))
        except UsageError as error:
            return ToolResult.error(f"The workflow cannot be run: {error}")
        finally:
            session.close()
        text = _described(result)
        return ToolResult.ok(message=text) if result.ok else ToolResult.error(text)

    names = ", ".join(sorted(each.name for each in _given(agents))) or "none"
    return Tool[RunWorkflow, str](
        name="run_workflow",
        description=f"{_DESCRIPTION} Agents: {names}.",
        handler=handle,
        effects="none",
    )


def _given(agents: Agents) -> list[Agent]:
    return list(agents.values() if isinstance(agents, Mapping) else agents)


def _session_for(context: ToolContext, spec: WorkflowSpec) -> Session:
    """Return the session of this call's workflow: the one that an earlier attempt began, or a new one."""
    parent = context.session
    for info in parent.log.sessions(parent_id=parent.session_id):
        if dict(info.tags).get("workflow_call") == context.call_id:
            return Session.open(parent.log, info.session_id, clock=parent.clock)
    tags = {"agent": "workflow", "workflow": spec.id, "workflow_call": context.call_id}
    return nested_session(parent, tags=tags)


def _described(result: WorkflowResult) -> str:
    lines = [f"The workflow {result.name} is {result.state.value}."]
    for each in result.steps:
        said = "" if each.checkpoint is None else f": {each.checkpoint.summary}"
        why = f" ({each.reason})" if each.reason else ""
        lines.append(f"- {each.step_id} is {each.state.value}{why}{said}")
        if each.checkpoint is not None:
            lines += [f"  limitation: {limit}" for limit in each.checkpoint.known_limitations]
    return "\n".join(lines)


def with_workflows(
    agents: Agents,
    *,
    limits: SubagentLimits | None = None,
    provider: Provider | Callable[[Agent], Provider] | None = None,
) -> Extension:
    """Let a loop's model run workflows over these agents, inside the loop's containment and permissions."""

    @asynccontextmanager
    async def extend(loop: InnerLoop) -> AsyncIterator[None]:
        tool = workflow_tool(
            agents,
            LoopRunner(provider if provider is not None else loop.provider),
            limits=limits,
            permissions=loop.permissions,
            containment=loop.containment,
        )
        section: MarkdownSection[Any] = MarkdownSection(
            "Workflows",
            template=f"A workflow is data of this form:\n{json.dumps(spec_schema())}".replace("$", "$$"),
            tools=(tool,),
        )
        before = loop.prompt
        template = before.template
        loop.prompt = type(before)(replace(template, sections=(*template.sections, section)))
        try:
            yield
        finally:
            loop.prompt = before

    return extend

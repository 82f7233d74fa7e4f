"""Ways to run a workflow: as a function, and as a tool for a model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from treenail import telemetry
from treenail.agent import Agent, close_state, open_log, open_state
from treenail.containment import ExecutionContext, Limits
from treenail.errors import UsageError
from treenail.log.base import Log
from treenail.prompt.sections import MarkdownSection
from treenail.prompt.template import Prompt
from treenail.providers.base import Provider
from treenail.state.execution import ExecutionState
from treenail.state.session import Session, nested_session
from treenail.subagents import ChildRunner, LoopRunner, SubagentLimits
from treenail.tools.boundaries import recover
from treenail.tools.context import ToolContext
from treenail.tools.gate import is_in_event_loop
from treenail.tools.policies import Permissions
from treenail.tools.tool import Tool, ToolResult
from treenail.turns.turn import InnerLoop
from treenail.workflows.engine import Workflow, by_name, check_agents
from treenail.workflows.events import WorkflowEvent, has_workflow
from treenail.workflows.spec import WorkflowSpec, spec_from_data, spec_schema
from treenail.workflows.states import WorkflowResult
from treenail.workspace.base import Filesystem

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
    _refuse_in_event_loop("run_workflow")
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
    _refuse_in_event_loop("resume_workflow")
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


def _refuse_in_event_loop(face: str) -> None:
    if is_in_event_loop():
        raise UsageError(f"{face} would block the event loop that runs here; `await Workflow(...)` instead")


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


@dataclass(slots=True, eq=False)
class _Asked:
    """A workflow that a call has asked for."""

    spec: WorkflowSpec
    call_id: str
    place: object = field(default_factory=telemetry.here)
    """Where in the trace it was asked for."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_over: anyio.Event = field(default_factory=anyio.Event)
    result: WorkflowResult | None = None
    error: BaseException | None = None


class Workflows:
    """The workflows that a session's model may run. Enter it (`async with`) for as long as they may run.

    They are child sessions of `state.session`, in its workspace and inside its containment. Each runs in
    a task of its own, so that what it records and spends is no part of the call that asked for it: a call
    that fails takes none of it back. A call that is cancelled interrupts its workflow; the same call, made
    again after a crash, goes on with it.
    """

    def __init__(
        self,
        state: ExecutionState,
        agents: Agents,
        runner: ChildRunner,
        *,
        limits: SubagentLimits | None = None,
        permissions: Permissions | None = None,
        containment: ExecutionContext | None = None,
        depth: int = 0,
    ) -> None:
        self.agents = agents
        self._state = state
        self._runner = runner
        self._limits = limits or SubagentLimits()
        self._permissions = permissions or Permissions()
        self._containment = containment
        self._depth = depth
        self._queue: deque[_Asked] = deque()
        self._wake = anyio.Event()
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Workflows:
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._serve)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.cancel_scope.cancel()
        # What the block raised goes on as it is: a group would wrap it.
        await group.__aexit__(None, None, None)

    async def run(self, spec: WorkflowSpec, call_id: str) -> WorkflowResult:
        """Run a workflow for a call, or go on with the one that the call has begun.

        Raises `UsageError` if it cannot be run; nothing was begun then.
        """
        if self._group is None:
            raise UsageError(
                "workflows need somebody to run them: use them inside `async with Workflows(...)`"
            )
        asked = _Asked(spec, call_id)
        self._queue.append(asked)
        self._wake.set()
        try:
            await asked.is_over.wait()
        except BaseException:
            asked.scope.cancel()
            with anyio.CancelScope(shield=True):
                await asked.is_over.wait()
            raise
        if isinstance(asked.error, Exception):
            raise asked.error
        if asked.result is None:
            # Everything is being stopped, and this call with it: it has no result of its own to give.
            await anyio.sleep_forever()
            raise AssertionError("nothing wakes it but the end")
        return asked.result

    async def _serve(self) -> None:
        while True:
            while self._queue and self._group is not None:
                self._group.start_soon(self._work, self._queue.popleft())
            await self._wake.wait()
            self._wake = anyio.Event()

    async def _work(self, asked: _Asked) -> None:
        try:
            with asked.scope, telemetry.under(asked.place):
                asked.result = await self._run(asked)
        except Exception as error:  # noqa: BLE001  # it is the call's, and is raised there
            asked.error = error
        finally:
            asked.is_over.set()

    async def _run(self, asked: _Asked) -> WorkflowResult:
        state = self._state
        session = self._session_for(asked)
        try:
            workflow = Workflow(
                ExecutionState(session, state.resources, state.clock, state.rng),
                self.agents,
                self._runner,
                limits=self._limits,
                permissions=self._permissions,
                containment=self._containment,
                depth=self._depth,
            )
            return await (workflow.resume() if has_workflow(session) else workflow.run(asked.spec))
        finally:
            session.close()

    def _session_for(self, asked: _Asked) -> Session:
        """Return the session of a call's workflow: the one that an earlier attempt began, or a new one."""
        parent = self._state.session
        for info in parent.log.sessions(parent_id=parent.session_id):
            if dict(info.tags).get("workflow_call") == asked.call_id:
                session = Session.open(parent.log, info.session_id, clock=parent.clock)
                recover(ExecutionState(session, self._state.resources, self._state.clock))
                return session
        tags = {"agent": "workflow", "workflow": asked.spec.id, "workflow_call": asked.call_id}
        return nested_session(parent, tags=tags)


def workflow_tool(workflows: Workflows) -> Tool[RunWorkflow, str]:
    """Make the tool with which a model runs a workflow. The result says how each step stands.

    The limits are the operator's, and hold for whatever the model writes.
    """

    async def handle(params: RunWorkflow, *, context: ToolContext) -> ToolResult[str]:
        try:
            result = await workflows.run(spec_from_data(params.workflow), context.call_id)
        except UsageError as error:
            return ToolResult.error(f"The workflow cannot be run: {error}")
        text = _described(result)
        return ToolResult.ok(message=text) if result.ok else ToolResult.error(text)

    names = ", ".join(sorted(by_name(workflows.agents))) or "none"
    return Tool[RunWorkflow, str](
        name="run_workflow",
        description=f"{_DESCRIPTION} Agents: {names}.",
        handler=handle,
        effects="none",
    )


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
    async def extend(loop: InnerLoop) -> AsyncIterator[Workflows]:
        async with Workflows(
            loop.state,
            agents,
            LoopRunner(provider if provider is not None else loop.provider),
            limits=limits,
            permissions=loop.permissions,
            containment=loop.containment,
        ) as workflows:
            before = loop.prompt
            loop.prompt = _extended(before, workflow_tool(workflows))
            try:
                yield workflows
            finally:
                loop.prompt = before

    return extend


def _extended(prompt: Prompt[Any], tool: Tool[Any, Any]) -> Prompt[Any]:
    """Return a prompt with one section more, which holds the tool."""
    section: MarkdownSection[Any] = MarkdownSection(
        "Workflows",
        template=f"A workflow is data of this form:\n{json.dumps(spec_schema())}".replace("$", "$$"),
        tools=(tool,),
    )
    template = prompt.template
    return type(prompt)(replace(template, sections=(*template.sections, section)))

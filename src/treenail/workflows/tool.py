"""Workflows as a tool for a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio

from treenail import telemetry
from treenail.agent import Agent, Extension
from treenail.children import open_child_session
from treenail.clock import new_id
from treenail.containment import ExecutionContext
from treenail.errors import UsageError
from treenail.prompt.sections import MarkdownSection
from treenail.providers.base import Provider
from treenail.state.execution import ExecutionState
from treenail.state.session import Session
from treenail.subagents import BackgroundTasks, ChildRunner, LoopRunner, SubagentLimits, prompt_extended
from treenail.tools.boundaries import recover
from treenail.tools.context import ToolContext
from treenail.tools.policies import Permissions
from treenail.tools.tool import Tool, ToolResult
from treenail.turns.turn import InnerLoop
from treenail.workflows.documents import spec_from_data, spec_schema
from treenail.workflows.events import has_workflow
from treenail.workflows.spec import WorkflowSpec
from treenail.workflows.states import WorkflowResult
from treenail.workflows.workflow import Workflow, by_name

Agents = Sequence[Agent] | Mapping[str, Agent]

_DESCRIPTION = (
    "Run steps with dependencies, each done by an agent of its own, and see the result of each. Independent "
    "steps run side by side. Use it for work that falls into parts; do small things yourself."
)


@dataclass(frozen=True, slots=True)
class RunWorkflow:
    """The parameters of `run_workflow`."""

    workflow: dict[str, Any] = field(
        metadata={"description": "The workflow: id, steps with id, task, agent, depends_on, posture ..."}
    )


@dataclass(slots=True, eq=False)
class _Request:
    """A workflow that a tool call has asked for."""

    spec: WorkflowSpec
    call_id: str
    trace_parent: object = field(default_factory=telemetry.here)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    is_over: anyio.Event = field(default_factory=anyio.Event)
    result: WorkflowResult | None = None
    error: Exception | None = None


class Workflows:
    """The workflows that a session's model may run. Enter it (`async with`) for as long as they may run.

    They are child sessions of `state.session`, in its workspace and inside its containment. Each runs in
    a background task, so that a failing tool call does not roll back what its workflow has recorded. A
    cancelled call interrupts its workflow; the same call, run again after a crash, resumes it.
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
        self._tasks: BackgroundTasks | None = None

    async def __aenter__(self) -> Workflows:
        self._tasks = await BackgroundTasks().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        await tasks.__aexit__(kind, error, trace)

    async def run(self, spec: WorkflowSpec, call_id: str) -> WorkflowResult:
        """Run a workflow for a tool call, or resume the one that the call has begun.

        Raises `UsageError`, before anything begins, if it cannot be run.
        """
        if self._tasks is None:
            raise UsageError("workflows run in background tasks: use them inside `async with Workflows(...)`")
        request = _Request(spec, call_id)
        self._tasks.start(self._serve, request)
        try:
            await request.is_over.wait()
        except BaseException:
            request.scope.cancel()
            with anyio.CancelScope(shield=True):
                await request.is_over.wait()
            raise
        if request.error is not None:
            raise request.error
        if request.result is None:
            # Everything is being stopped, this call included: it has no result.
            await anyio.sleep_forever()
            raise AssertionError("only a cancellation ends the sleep")
        return request.result

    async def _serve(self, request: _Request) -> None:
        try:
            with request.scope, telemetry.under(request.trace_parent):
                request.result = await self._run(request)
        except Exception as error:  # noqa: BLE001  # it is raised in the call that asked
            request.error = error
        finally:
            request.is_over.set()

    async def _run(self, request: _Request) -> WorkflowResult:
        state = self._state
        with self._session_for(request) as session:
            workflow = Workflow(
                ExecutionState(session, state.resources, state.clock, state.rng),
                self.agents,
                self._runner,
                limits=self._limits,
                permissions=self._permissions,
                containment=self._containment,
                depth=self._depth,
            )
            return await (workflow.resume() if has_workflow(session) else workflow.run(request.spec))

    def _session_for(self, request: _Request) -> Session:
        """Return the session of a call's workflow: the one that an earlier attempt began, or a new one."""
        parent = self._state.session
        for info in parent.log.sessions(parent_id=parent.session_id):
            if dict(info.tags).get("workflow_call") == request.call_id:
                session = open_child_session(parent, info.session_id)
                recover(ExecutionState(session, self._state.resources, self._state.clock))
                return session
        tags = {"agent": "workflow", "workflow": request.spec.id, "workflow_call": request.call_id}
        return open_child_session(parent, new_id(), tags)


def workflow_tool(workflows: Workflows) -> Tool[RunWorkflow, str]:
    """Return the tool with which a model runs a workflow. Its result describes each step.

    The operator's limits hold, whatever the model writes.
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
            schema = json.dumps(spec_schema()).replace("$", "$$")
            section: MarkdownSection[Any] = MarkdownSection(
                "Workflows",
                template=f"A workflow is data of this form:\n{schema}",
                tools=(workflow_tool(workflows),),
            )
            with prompt_extended(loop, section):
                yield workflows

    return extend

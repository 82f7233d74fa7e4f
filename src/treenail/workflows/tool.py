"""Workflows as a tool for a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from treenail import telemetry
from treenail.agent import AnyAgent, Extension
from treenail.children import open_child_session
from treenail.clock import new_id
from treenail.containment import ExecutionContext
from treenail.errors import UsageError
from treenail.prompt import MarkdownSection
from treenail.providers import Provider
from treenail.state import ExecutionState, Session
from treenail.subagents import BackgroundTasks, ChildRunner, LoopRunner, SubagentLimits
from treenail.tools import Permissions, Tool, ToolContext, ToolResult, recover
from treenail.turns import InnerLoop, prompt_extended
from treenail.workflows.documents import spec_from_data, spec_schema
from treenail.workflows.events import has_workflow
from treenail.workflows.spec import WorkflowSpec
from treenail.workflows.states import WorkflowResult
from treenail.workflows.workflow import Workflow, by_name

Agents = Sequence[AnyAgent] | Mapping[str, AnyAgent]


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
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Workflows:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._tasks.__aexit__(*raised)

    async def run(self, spec: WorkflowSpec, call_id: str) -> WorkflowResult:
        """Run a workflow for a tool call, or resume the one that the call has begun.

        Raises `UsageError`, before anything begins, if it cannot be run.
        """
        state, caller = self._state, telemetry.here()

        async def work() -> WorkflowResult:
            with telemetry.under(caller), self._session_for(spec, call_id) as session:
                workflow = Workflow(
                    ExecutionState(session, state.resources, state.clock, state.rng),
                    self.agents,
                    self._runner,
                    limits=self._limits,
                    permissions=self._permissions,
                    containment=self._containment,
                    depth=self._depth,
                )
                return await (workflow.resume() if has_workflow(session) else workflow.run(spec))

        return await self._tasks.run(work)

    def _session_for(self, spec: WorkflowSpec, call_id: str) -> Session:
        """Return the session of a call's workflow: the one that an earlier attempt began, or a new one."""
        parent = self._state.session
        for info in parent.log.sessions(parent_id=parent.session_id):
            if dict(info.tags).get("workflow_call") == call_id:
                session = open_child_session(parent, info.session_id)
                recover(ExecutionState(session, self._state.resources, self._state.clock))
                return session
        tags = {"agent": "workflow", "workflow": spec.id, "workflow_call": call_id}
        return open_child_session(parent, new_id(), tags)


def workflow_tool(workflows: Workflows) -> Tool[Any, Any]:
    """Return the tool with which a model runs a workflow. Its result describes each step.

    The operator's limits hold, whatever the model writes.
    """

    async def run_workflow(workflow: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
        """Run steps with dependencies, each done by an agent of its own, and see the result of each.

        Args:
            workflow: The workflow: id, steps with id, task, agent, depends_on, posture ...
        """
        try:
            result = await workflows.run(spec_from_data(workflow), context.call_id)
        except UsageError as error:
            return ToolResult.error(f"The workflow cannot be run: {error}")
        text = _described(result)
        return ToolResult.ok(message=text) if result.ok else ToolResult.error(text)

    names = ", ".join(sorted(by_name(workflows.agents))) or "none"
    description = (
        "Run steps with dependencies, each done by an agent of its own, and see the result of each. "
        "Independent steps run side by side. Use it for work that falls into parts; do small things "
        f"yourself. Agents: {names}."
    )
    return Tool.wrap(run_workflow, description=description, effects="none")


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
    provider: Provider | Callable[[AnyAgent], Provider] | None = None,
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

"""The seam between the supervision of subagents and the code that runs their turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

from treenail.agent import AnyAgent
from treenail.containment import CancellationToken, ExecutionContext
from treenail.providers import Provider
from treenail.state import ExecutionState
from treenail.tools import Permissions, Tool
from treenail.turns import InnerLoop, ModelAdapter, TurnResult


@dataclass(frozen=True, slots=True)
class ChildRun:
    """One turn of a subagent, ready to be run."""

    agent: AnyAgent
    state: ExecutionState
    task: str | None
    """The input of a new turn; None to resume the turn that the session's log has begun."""
    containment: ExecutionContext
    cancellation: CancellationToken
    permissions: Permissions
    depth: int
    workspace: str | None = None
    """The directory that the turn works in, if it is on disk."""
    extra_tools: tuple[Tool[Any, Any], ...] = field(default=())
    """Tools besides its agent's own: those for subagents of its own, if its depth allows any."""


@runtime_checkable
class ChildRunner(Protocol):
    """Runs one turn of a subagent to its end."""

    async def run(self, run: ChildRun) -> TurnResult:
        """Run the turn. The log of `run.state.session` is the evidence; the result only sums it up."""
        ...


class LoopRunner:
    """Runs subagents in our own loop, with one provider for all or one per agent.

    `deps` are what their tools find as `context.deps`.
    """

    def __init__(self, provider: Provider | Callable[[AnyAgent], Provider], *, deps: object = None) -> None:
        self._provider = provider
        self._deps = deps

    async def run(self, run: ChildRun) -> TurnResult:
        """Run one turn: a new one for a task, or the unfinished one."""
        agent = run.agent
        if run.extra_tools:
            agent = replace(agent, tools=(*agent.own_tools, *agent.sources, *run.extra_tools))
        chosen = self._provider
        # A provider, also a proxy of one, has `stream`; a function that chooses one does not.
        provider = cast("Provider", chosen if hasattr(chosen, "stream") else chosen(run.agent))
        loop = InnerLoop(
            state=run.state,
            provider=provider,
            prompt=agent.prompt,
            agent=agent.name,
            containment=run.containment,
            permissions=run.permissions,
            max_iterations=agent.max_iterations,
            retry=agent.retry,
            cancellation=run.cancellation,
            workspace=run.workspace,
            adapter=ModelAdapter(provider, retry=agent.retry),
            deps=self._deps,
            task=run.task,
        )
        async with agent.equipped(loop):
            return await (loop.resume() if run.task is None else loop.run(run.task))

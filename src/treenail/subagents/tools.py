"""Subagents as tools for a model.

Only `apply_agent` holds the workspace; it is one transaction like any other call. What the model asks for is
narrowed to the operator's limits, and the model is told so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from treenail.errors import WorkspaceConflictError
from treenail.subagents.copies import apply_copy
from treenail.subagents.events import WorkspaceMode
from treenail.subagents.limits import Allowance
from treenail.tools import Tool, ToolContext, ToolResult

if TYPE_CHECKING:
    from treenail.subagents.supervision import Subagents

MAX_SHOWN_DIFF_CHARS = 30_000
"""How much of a diff a model is shown."""

MAX_DESCRIPTION_CHARS = 1_000
"""How long the description of `spawn_agent` may be."""


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The handlers of the tools: their docstrings are what a model reads.

    A refusal (`UsageError`) reaches the model as the call's error.
    """

    subagents: Subagents

    async def spawn_agent(
        self,
        agent: str,
        task: str,
        workspace: WorkspaceMode = "shared",
        timeout_seconds: float | None = None,
        max_steps: int | None = None,
        max_cost_usd: float | None = None,
        *,
        context: ToolContext,
    ) -> ToolResult[str]:
        """Start a subagent: another agent that works on its own task while you continue.

        Args:
            agent: The name of the agent to start.
            task: Everything it needs to know: it does not see this conversation. Say what to do and what to
                report.
            workspace: shared: it works on the same files. isolated: on a copy; its changes come back only
                through apply_agent. read_only: it reads the files and cannot change them.
            timeout_seconds: When to stop it; leave out for the operator's limit, which cannot be exceeded.
            max_steps: How many calls it may make; leave out for the limit.
            max_cost_usd: What it may spend; leave out for the operator's limit.
        """
        # A call that is run again after a crash must not start a second subagent.
        child = self.subagents.spawned_by(context.call_id) if context.is_resume else None
        if child is None:
            allowance = Allowance(timeout_s=timeout_seconds, max_steps=max_steps, max_cost_usd=max_cost_usd)
            child = self.subagents.spawn(
                agent, task, workspace=workspace, allowance=allowance, call_id=context.call_id
            )
        return _as_json(child.describe())

    async def wait_agent(
        self,
        ids: list[str] | None = None,
        timeout_seconds: float | None = None,
        until: Literal["all", "any"] = "all",
    ) -> ToolResult[str]:
        """Wait for subagents and see what is known about them: which completed and what they answered, which
        failed, timed out, were cancelled or detached, which are still running, and what to do next. Only
        status 'completed' means that all of them completed.

        Args:
            ids: Which subagents to wait for; leave out for all.
            timeout_seconds: How long to wait at most; 0 returns at once. Leave out to wait until they have
                ended.
            until: Wait for all of them, or for the first.
        """
        outcome = await self.subagents.wait(ids, timeout_s=timeout_seconds, until=until)
        return ToolResult.ok(message=outcome.render())

    async def send_agent(self, id: str, message: str, *, context: ToolContext) -> ToolResult[str]:
        """Send a subagent a message. A running one reads it after its present turn; one that has ended
        resumes in the same conversation. Use wait_agent for the outcome.

        Args:
            id: The subagent's id, as spawn_agent returned it.
            message: What it should do next. It remembers what it did before.
        """
        if not (context.is_resume and self.subagents.was_sent_by(context.call_id)):
            self.subagents.send(id, message, call_id=context.call_id)
        return _as_json(self.subagents.get(id).describe())

    async def cancel_agent(self, id: str, reason: str = "cancelled by its parent") -> ToolResult[str]:
        """Stop a subagent that is not needed any more. One that has ended stays as it is.

        Args:
            id: The subagent's id, as spawn_agent returned it.
            reason: Why, for the log.
        """
        return _as_json((await self.subagents.cancel(id, reason)).describe())

    async def detach_agent(self, id: str, reason: str = "detached by its parent") -> ToolResult[str]:
        """Let a running subagent continue by itself. You need not wait for it, and will not hear of it again.

        Args:
            id: The subagent's id, as spawn_agent returned it.
            reason: Why, for the log.
        """
        child = self.subagents.get(id)
        if not child.status.is_terminal:
            child = self.subagents.detach(id, reason)
        return _as_json(child.describe())

    async def list_agents(self) -> ToolResult[str]:
        """List every subagent of this session: id, agent, status, task and outcome."""
        return _as_json([each.describe() for each in self.subagents.children])

    async def diff_agent(self, id: str) -> ToolResult[str]:
        """Show what an isolated subagent has changed in its copy of the workspace.

        Args:
            id: The subagent's id, as spawn_agent returned it.
        """
        with self.subagents.copy_of(id) as copy:
            found = copy.diff_since_fork()
        if not found.changes:
            return ToolResult.ok(message=f"{id} has changed nothing.")
        text = found.text
        if len(text) > MAX_SHOWN_DIFF_CHARS:
            text = text[:MAX_SHOWN_DIFF_CHARS] + f"\n[{len(found.changes)} paths differ; the rest was cut]"
        return ToolResult.ok(message=text)

    def apply_agent(self, id: str, *, context: ToolContext) -> ToolResult[str]:
        """Apply all changes of an isolated subagent to this workspace, all or nothing. If paths were changed
        here since its copy was made, nothing is applied and these paths are named.

        Args:
            id: The subagent's id, as spawn_agent returned it.
        """
        try:
            paths = apply_copy(self.subagents, id, context)
        except WorkspaceConflictError as error:
            return ToolResult.error(
                f"{error}. Look at these paths, and either undo the changes here, or tell {id} "
                f"what has changed so that it can adapt: {', '.join(error.paths[:50])}"
            )
        if not paths:
            return ToolResult.ok(message=f"All changes of {id} were applied before.")
        return ToolResult.ok(message=f"Applied {len(paths)} paths of {id}: {', '.join(paths[:100])}")


def subagent_tools(subagents: Subagents) -> tuple[Tool[Any, Any], ...]:
    """Return the tools with which a model starts, awaits, steers and stops subagents."""
    each = _Handlers(subagents)
    steering = (each.wait_agent, each.send_agent, each.cancel_agent, each.detach_agent)
    return (
        Tool.wrap(each.spawn_agent, description=_spawn_description(subagents), effects="none"),
        *(Tool.wrap(handler, effects="none") for handler in (*steering, each.list_agents, each.diff_agent)),
        Tool.wrap(each.apply_agent, effects="workspace"),
    )


def _spawn_description(subagents: Subagents) -> str:
    limits = subagents.limits
    text = (
        "Start a subagent: another agent that works on its own task while you continue. Returns at once "
        f"with its id; use wait_agent for the outcome. At most {limits.max_threads} run at a time, the "
        f"others wait in a queue; each has {limits.timeout_s:g} seconds. Agents: "
    )
    room = MAX_DESCRIPTION_CHARS - len(text)
    names = ", ".join(
        f"{name} ({_first_sentence(each.description)})" for name, each in subagents.agents.items()
    )
    return text + (names if len(names) <= room else ", ".join(subagents.agents)[:room])


def _first_sentence(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line.partition(". ")[0].rstrip(".")[:120]


def _as_json(value: object) -> ToolResult[str]:
    return ToolResult.ok(message=json.dumps(value, ensure_ascii=False))

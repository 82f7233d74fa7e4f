"""Subagents as tools for a model.

Only `apply_agent` holds the workspace; it is one transaction like any other call. What the model asks for is
narrowed to the operator's limits, and the model is told so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from treenail.errors import WorkspaceConflictError
from treenail.subagents.copies import apply_copy
from treenail.subagents.events import WorkspaceMode
from treenail.subagents.limits import Allowance
from treenail.tools.context import ToolContext
from treenail.tools.tool import Tool, ToolExample, ToolResult

if TYPE_CHECKING:
    from treenail.subagents.supervision import Subagents

MAX_SHOWN_DIFF_CHARS = 30_000
"""How much of a diff a model is shown."""

MAX_DESCRIPTION_CHARS = 1_000
"""How long the description of `spawn_agent` may be."""


def _described(text: str, **default: Any) -> Any:
    return field(metadata={"description": text}, **default)


_ID = "The subagent's id, as spawn_agent returned it."


@dataclass(frozen=True, slots=True)
class SpawnAgent:
    """The parameters of `spawn_agent`."""

    agent: str = _described("The name of the agent to start.")
    task: str = _described(
        "Everything it needs to know: it does not see this conversation. Say what to do and what to report."
    )
    workspace: WorkspaceMode = field(
        default="shared",
        metadata={
            "description": "shared: it works on the same files. isolated: on a copy; its changes come back "
            "only through apply_agent. read_only: it reads the files and cannot change them."
        },
    )
    timeout_seconds: float | None = _described(
        "When to stop it; leave out for the operator's limit, which cannot be exceeded.", default=None
    )
    max_steps: int | None = _described("How many calls it may make; leave out for the limit.", default=None)
    max_cost_usd: float | None = _described(
        "What it may spend; leave out for the operator's limit.", default=None
    )


@dataclass(frozen=True, slots=True)
class WaitAgent:
    """The parameters of `wait_agent`."""

    ids: list[str] | None = field(
        default=None, metadata={"description": "Which subagents to wait for; leave out for all."}
    )
    timeout_seconds: float | None = _described(
        "How long to wait at most; 0 returns at once. Leave out to wait until they have ended.", default=None
    )
    until: Literal["all", "any"] = _described("Wait for all of them, or for the first.", default="all")


@dataclass(frozen=True, slots=True)
class SendAgent:
    """The parameters of `send_agent`."""

    id: str = _described(_ID)
    message: str = _described("What it should do next. It remembers what it did before.")


@dataclass(frozen=True, slots=True)
class CancelAgent:
    """The parameters of `cancel_agent`."""

    id: str = _described(_ID)
    reason: str = _described("Why, for the log.", default="cancelled by its parent")


@dataclass(frozen=True, slots=True)
class OneAgent:
    """The parameters of `diff_agent` and `apply_agent`."""

    id: str = _described(_ID)


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The handlers of the tools. A refusal (`UsageError`) reaches the model as the call's error."""

    subagents: Subagents

    async def spawn(self, params: SpawnAgent, *, context: ToolContext) -> ToolResult[str]:
        # A call that is run again after a crash must not start a second subagent.
        child = self.subagents.spawned_by(context.call_id) if context.is_resume else None
        if child is None:
            allowance = Allowance(
                timeout_s=params.timeout_seconds,
                max_steps=params.max_steps,
                max_cost_usd=params.max_cost_usd,
            )
            child = self.subagents.spawn(
                params.agent,
                params.task,
                workspace=params.workspace,
                allowance=allowance,
                call_id=context.call_id,
            )
        return _as_json(child.describe())

    async def wait(self, params: WaitAgent, *, context: ToolContext) -> ToolResult[str]:
        outcome = await self.subagents.wait(params.ids, timeout_s=params.timeout_seconds, until=params.until)
        return ToolResult.ok(message=outcome.render())

    async def send(self, params: SendAgent, *, context: ToolContext) -> ToolResult[str]:
        if not (context.is_resume and self.subagents.was_sent_by(context.call_id)):
            self.subagents.send(params.id, params.message, call_id=context.call_id)
        return _as_json(self.subagents.get(params.id).describe())

    async def cancel(self, params: CancelAgent, *, context: ToolContext) -> ToolResult[str]:
        return _as_json((await self.subagents.cancel(params.id, params.reason)).describe())

    async def list_all(self, params: None, *, context: ToolContext) -> ToolResult[str]:
        return _as_json([each.describe() for each in self.subagents.children])

    async def diff(self, params: OneAgent, *, context: ToolContext) -> ToolResult[str]:
        with self.subagents.copy_of(params.id) as copy:
            found = copy.diff_since_fork()
        if not found.changes:
            return ToolResult.ok(message=f"{params.id} has changed nothing.")
        text = found.text
        if len(text) > MAX_SHOWN_DIFF_CHARS:
            text = text[:MAX_SHOWN_DIFF_CHARS] + f"\n[{len(found.changes)} paths differ; the rest was cut]"
        return ToolResult.ok(message=text)

    def apply(self, params: OneAgent, *, context: ToolContext) -> ToolResult[str]:
        try:
            paths = apply_copy(self.subagents, params.id, context)
        except WorkspaceConflictError as error:
            return ToolResult.error(
                f"{error}. Look at these paths, and either undo the changes here, or tell {params.id} "
                f"what has changed so that it can adapt: {', '.join(error.paths[:50])}"
            )
        if not paths:
            return ToolResult.ok(message=f"All changes of {params.id} were applied before.")
        return ToolResult.ok(message=f"Applied {len(paths)} paths of {params.id}: {', '.join(paths[:100])}")


def subagent_tools(subagents: Subagents) -> tuple[Tool[Any, Any], ...]:
    """Return the tools with which a model starts, awaits, steers and stops subagents."""
    handlers = _Handlers(subagents)
    return (
        Tool[SpawnAgent, str](
            name="spawn_agent",
            description=_spawn_description(subagents),
            handler=handlers.spawn,
            effects="none",
            examples=_spawn_examples(subagents),
        ),
        Tool[WaitAgent, str](
            name="wait_agent",
            description=(
                "Wait for subagents and see what is known about them: which completed and what they "
                "answered, which failed, timed out, were cancelled or detached, which are still running, "
                "and what to do next. Only status 'completed' means that all of them completed."
            ),
            handler=handlers.wait,
            effects="none",
        ),
        Tool[SendAgent, str](
            name="send_agent",
            description=(
                "Send a subagent a message. A running one reads it after its present turn; one that has "
                "ended resumes in the same conversation. Use wait_agent for the outcome."
            ),
            handler=handlers.send,
            effects="none",
        ),
        Tool[CancelAgent, str](
            name="cancel_agent",
            description="Stop a subagent that is not needed any more. One that has ended stays as it is.",
            handler=handlers.cancel,
            effects="none",
        ),
        Tool[None, str](
            name="list_agents",
            description="List every subagent of this session: id, agent, status, task and outcome.",
            handler=handlers.list_all,
            effects="none",
        ),
        Tool[OneAgent, str](
            name="diff_agent",
            description="Show what an isolated subagent has changed in its copy of the workspace.",
            handler=handlers.diff,
            effects="none",
        ),
        Tool[OneAgent, str](
            name="apply_agent",
            description=(
                "Apply all changes of an isolated subagent to this workspace, all or nothing. If paths were "
                "changed here since its copy was made, nothing is applied and these paths are named."
            ),
            handler=handlers.apply,
            effects="workspace",
        ),
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
        f"{name} ({_first_sentence(each.instructions)})" for name, each in subagents.agents.items()
    )
    return text + (names if len(names) <= room else ", ".join(subagents.agents)[:room])


def _spawn_examples(subagents: Subagents) -> tuple[ToolExample[SpawnAgent, str], ...]:
    first = next(iter(subagents.agents), None)
    if first is None:
        return ()
    return (
        ToolExample(
            "Have a question investigated on the side",
            SpawnAgent(first, "Find where the configuration is read. Report file and line.", "read_only"),
            json.dumps({"id": f"{first}-1", "agent": first, "status": "queued"}),
        ),
    )


def _first_sentence(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line.partition(". ")[0].rstrip(".")[:120]


def _as_json(value: object) -> ToolResult[str]:
    return ToolResult.ok(message=json.dumps(value, ensure_ascii=False))

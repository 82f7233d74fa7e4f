"""Subagents as tools for a model.

None of them holds the workspace while it waits, except `apply_agent`, which is one transaction like any
other call. Whatever the model asks for is brought within the operator's limits, and it is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from treenail.errors import UsageError, WorkspaceConflictError
from treenail.subagents.limits import Allowance
from treenail.subagents.records import SubagentChangesApplied, WorkspaceMode
from treenail.tools.context import ToolContext
from treenail.tools.tool import Tool, ToolExample, ToolResult
from treenail.workspace.isolated import apply_changes

if TYPE_CHECKING:
    from treenail.subagents.supervision import Subagents

MAX_SHOWN_DIFF_CHARS = 30_000
"""How much of a diff a model is shown."""

_Answer = ToolResult[str]


def _described(text: str, **default: Any) -> Any:
    return field(metadata={"description": text}, **default)


_ID = "The subagent's id, as spawn_agent returned it."


@dataclass(frozen=True, slots=True)
class SpawnAgent:
    """What `spawn_agent` takes."""

    agent: str = _described("The name of the agent to start.")
    task: str = _described(
        "Everything it needs to know: it does not see this conversation. Say what to do and what to report."
    )
    workspace: WorkspaceMode = field(
        default="shared",
        metadata={
            "description": "shared: it works on the same files. isolated: on a copy; its changes come back "
            "only through apply_agent. read_only: it looks and changes nothing."
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
    """What `wait_agent` takes."""

    ids: list[str] | None = field(
        default=None, metadata={"description": "Which subagents to wait for; leave out for all."}
    )
    timeout_seconds: float | None = _described(
        "How long to wait at most; 0 only looks. Leave out to wait until they have ended.", default=None
    )
    until: Literal["all", "any"] = _described("Wait for all of them, or for the first.", default="all")


@dataclass(frozen=True, slots=True)
class SendAgent:
    """What `send_agent` takes."""

    id: str = _described(_ID)
    message: str = _described("What it should do next. It remembers what it did before.")


@dataclass(frozen=True, slots=True)
class CancelAgent:
    """What `cancel_agent` takes."""

    id: str = _described(_ID)
    reason: str = _described("Why, for whoever reads the log.", default="cancelled by its parent")


@dataclass(frozen=True, slots=True)
class OneAgent:
    """What `diff_agent` and `apply_agent` take."""

    id: str = _described(_ID)


def subagent_tools(subagents: Subagents) -> tuple[Tool[Any, Any], ...]:
    """Make the tools with which a model starts, waits for, steers and stops subagents."""

    async def spawn(params: SpawnAgent, *, context: ToolContext) -> _Answer:
        known = subagents.asked_for_by(context.call_id) if context.is_resume else None
        child = known or subagents.spawn(
            params.agent,
            params.task,
            workspace=params.workspace,
            allowance=Allowance(
                timeout_s=params.timeout_seconds,
                max_steps=params.max_steps,
                max_cost_usd=params.max_cost_usd,
            ),
            call_id=context.call_id,
        )
        return _shown(child.describe())

    async def wait(params: WaitAgent, *, context: ToolContext) -> _Answer:
        outcome = await subagents.wait(params.ids, timeout_s=params.timeout_seconds, until=params.until)
        return ToolResult.ok(message=outcome.render())

    async def send(params: SendAgent, *, context: ToolContext) -> _Answer:
        if not (context.is_resume and subagents.was_sent_by(context.call_id)):
            subagents.send(params.id, params.message, call_id=context.call_id)
        return _shown(subagents.get(params.id).describe())

    async def cancel(params: CancelAgent, *, context: ToolContext) -> _Answer:
        return _shown((await subagents.cancel(params.id, params.reason)).describe())

    async def every(params: None, *, context: ToolContext) -> _Answer:
        return _shown([each.describe() for each in subagents.children])

    async def diff(params: OneAgent, *, context: ToolContext) -> _Answer:
        with subagents.copy_of(params.id) as copy:
            found = copy.diff_since_fork()
        if not found.changes:
            return ToolResult.ok(message=f"{params.id} has changed nothing.")
        text = found.text
        if len(text) > MAX_SHOWN_DIFF_CHARS:
            text = text[:MAX_SHOWN_DIFF_CHARS] + f"\n[{len(found.changes)} paths differ; the rest was cut]"
        return ToolResult.ok(message=text)

    def apply(params: OneAgent, *, context: ToolContext) -> _Answer:
        child = subagents.get(params.id)
        before = [
            each for each in context.session[SubagentChangesApplied].all() if each.subagent_id == child.id
        ]
        applied = {path: mark for each in before for path, mark in each.applied}
        with subagents.copy_of(child.id) as copy:
            changes = copy.changes()
            try:
                paths = apply_changes(context.filesystem, changes, applied)
            except WorkspaceConflictError as error:
                return ToolResult.error(
                    f"{error}. Look at these paths, and either undo the changes here, or send {child.id} "
                    f"what has changed so that it can adapt: {', '.join(error.paths[:50])}"
                )
        marks = tuple((each.path, str(each.after)) for each in changes)
        context.session.dispatch(SubagentChangesApplied(child.id, str(child.session_id), marks))
        if not paths:
            return ToolResult.ok(message=f"There was nothing left to apply of {child.id}.")
        return ToolResult.ok(message=f"Applied {len(paths)} paths of {child.id}: {', '.join(paths[:100])}")

    names = ", ".join(
        f"{name} ({_first_sentence(each.instructions)})" for name, each in subagents.agents.items()
    )
    limits = subagents.limits
    spawning = (
        "Start a subagent: another agent that works on a task of its own while you go on. Returns at once "
        f"with its id; use wait_agent for the outcome. At most {limits.max_threads} work at a time, the "
        f"others wait their turn; each has {limits.timeout_s:g} seconds. Agents: "
    )
    room = 1_000 - len(spawning)
    spawning += names if len(names) <= room else ", ".join(subagents.agents)[:room]
    made: Sequence[Tool[Any, Any]] = (
        Tool[SpawnAgent, str](
            name="spawn_agent",
            description=spawning,
            handler=_explained(spawn),
            effects="none",
            examples=_spawn_examples(subagents),
        ),
        Tool[WaitAgent, str](
            name="wait_agent",
            description=(
                "Wait for subagents and see what is known about them: which completed and what they "
                "answered, which failed, timed out, were cancelled or detached, which are still at work, "
                "and what to do next. Only status 'completed' means that all of them did what they should."
            ),
            handler=_explained(wait),
            effects="none",
        ),
        Tool[SendAgent, str](
            name="send_agent",
            description=(
                "Send a subagent something more. One that works reads it when it is done with what it does; "
                "one that has ended goes on in the same conversation. Use wait_agent for the outcome."
            ),
            handler=_explained(send),
            effects="none",
        ),
        Tool[CancelAgent, str](
            name="cancel_agent",
            description="Stop a subagent that is not needed any more. One that has ended stays as it is.",
            handler=_explained(cancel),
            effects="none",
        ),
        Tool[None, str](
            name="list_agents",
            description="List every subagent of this session: id, agent, status, task and outcome.",
            handler=_explained(every),
            effects="none",
        ),
        Tool[OneAgent, str](
            name="diff_agent",
            description="Show what an isolated subagent has changed in its copy of the workspace.",
            handler=_explained(diff),
            effects="none",
        ),
        Tool[OneAgent, str](
            name="apply_agent",
            description=(
                "Bring everything that an isolated subagent has changed into this workspace, all or nothing. "
                "If paths were changed here since its copy was made, nothing is applied and they are named."
            ),
            handler=_explained_sync(apply),
            effects="workspace",
        ),
    )
    return tuple(made)


def _spawn_examples(subagents: Subagents) -> tuple[ToolExample[SpawnAgent, str], ...]:
    first = next(iter(subagents.agents), None)
    if first is None:
        return ()
    return (
        ToolExample(
            "Have a question looked into on the side",
            SpawnAgent(first, "Find where the configuration is read. Report file and line.", "read_only"),
            json.dumps({"id": f"{first}-1", "agent": first, "status": "queued"}),
        ),
    )


def _first_sentence(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line.partition(". ")[0].rstrip(".")[:120]


def _shown(value: object) -> _Answer:
    return ToolResult.ok(message=json.dumps(value, ensure_ascii=False))


def _explained(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a refusal into an answer that a model can act on."""

    @wraps(handler)
    async def explained(params: Any, *, context: ToolContext) -> _Answer:
        try:
            answer: _Answer = await handler(params, context=context)
            return answer
        except UsageError as error:
            return ToolResult.error(f"{error}")

    return explained


def _explained_sync(handler: Callable[..., _Answer]) -> Callable[..., _Answer]:
    @wraps(handler)
    def explained(params: Any, *, context: ToolContext) -> _Answer:
        try:
            return handler(params, context=context)
        except UsageError as error:
            return ToolResult.error(f"{error}")

    return explained

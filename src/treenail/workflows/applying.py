"""Bringing home what steps have changed in their copies: several copies, one tool call, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from treenail.clock import new_id
from treenail.errors import UsageError, WorkspaceConflictError
from treenail.state.execution import ExecutionState
from treenail.state.session import Session
from treenail.subagents import SubagentChangesApplied, Subagents
from treenail.tools.context import ToolContext
from treenail.tools.policies import PermissionMode, Permissions
from treenail.tools.runner import ToolRunner
from treenail.tools.tool import Tool, ToolCall, ToolResult
from treenail.workflows.globs import matches
from treenail.workspace.isolated import ForkChange, apply_changes

NAME = "apply_steps"


@dataclass(frozen=True, slots=True)
class ApplySteps:
    """Whose changes to apply."""

    ids: list[str]


def is_applied(session: Session, subagent_id: str) -> bool:
    """Say whether what a subagent has changed in its copy is in the workspace already."""
    return any(each.subagent_id == subagent_id for each in session[SubagentChangesApplied].all())


def files_of(changes: Sequence[ForkChange]) -> tuple[str, ...]:
    """Return the paths that were changed. A directory is made or removed for the sake of what is in it."""
    kinds = [({each.before.kind, each.after.kind} - {"absent"}, each.path) for each in changes]
    return tuple(path for kind, path in kinds if "directory" not in kind)


def outside(paths: Sequence[str], globs: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that no glob matches."""
    return tuple(sorted(each for each in paths if not any(matches(each, glob) for glob in globs)))


async def apply_copies(
    state: ExecutionState, subagents: Subagents, ids: Sequence[str], permissions: Permissions
) -> ToolResult[Any]:
    """Apply what these subagents have changed, in the order given, in one transaction.

    What is in the workspace already is not applied again. If a path is no longer what a copy began with,
    the result says which, and nothing is applied. Nobody is asked: whoever asks for each call was asked
    about those that made the changes. Where nothing may be written, this is refused as well.
    """

    def apply(params: ApplySteps, *, context: ToolContext) -> ToolResult[str]:
        brought: list[str] = []
        for each in params.ids:
            if is_applied(context.session, each):
                continue
            try:
                with subagents.copy_of(each) as copy:
                    changes = copy.changes()
                    brought += apply_changes(context.filesystem, changes)
            except (UsageError, WorkspaceConflictError) as error:
                return ToolResult.error(f"what {each} has changed cannot be applied: {error}")
            marks = tuple((change.path, str(change.after)) for change in changes)
            child = str(subagents.get(each).session_id)
            context.session.dispatch(SubagentChangesApplied(each, child, marks))
        return ToolResult.ok(message=f"applied {len(brought)} paths: {', '.join(brought[:100])}")

    tool = Tool[ApplySteps, str](
        name=NAME, description="Apply what steps have changed.", handler=apply, effects="workspace"
    )
    if permissions.mode is PermissionMode.ASK:
        permissions = replace(permissions, mode=PermissionMode.AUTO)
    runner = ToolRunner(state, {NAME: tool}, "workflow", permissions=permissions)
    return await runner.aexecute(ToolCall(f"apply-{new_id().hex}", NAME, {"ids": list(ids)}))

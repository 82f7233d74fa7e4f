"""Applying the copies of several steps to the workspace: one tool call, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from treenail.clock import new_id
from treenail.errors import UsageError, WorkspaceConflictError
from treenail.state import ExecutionState, Session
from treenail.subagents import SubagentChangesApplied, Subagents, apply_copy
from treenail.tools import PermissionMode, Permissions, Tool, ToolCall, ToolContext, ToolResult, ToolRunner
from treenail.workflows.globs import matches
from treenail.workspace import ForkChange

NAME = "apply_steps"


@dataclass(frozen=True, slots=True)
class ApplySteps:
    """The parameters of `apply_steps`."""

    ids: list[str]


def is_applied(session: Session, subagent_id: str) -> bool:
    """Say whether a subagent's changes are already in the workspace."""
    return any(each.subagent_id == subagent_id for each in session[SubagentChangesApplied].all())


def files_of(changes: Sequence[ForkChange]) -> tuple[str, ...]:
    """Return the changed paths without directories, which are made and removed for the files in them."""
    kinds = [({each.before.kind, each.after.kind} - {"absent"}, each.path) for each in changes]
    return tuple(path for kind, path in kinds if "directory" not in kind)


def outside(paths: Sequence[str], globs: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that no glob matches."""
    return tuple(sorted(each for each in paths if not any(matches(each, glob) for glob in globs)))


async def apply_copies(
    state: ExecutionState, subagents: Subagents, ids: Sequence[str], permissions: Permissions
) -> ToolResult[Any]:
    """Apply the changes of these subagents, in the order given, in one transaction.

    Copies that were applied before are skipped. If a path is no longer what a copy began with, the result
    names it, and nothing is applied. No person is asked here, because each call that made the changes was
    asked about. Where nothing may be written, this is refused as well.
    """

    def apply(params: ApplySteps, *, context: ToolContext) -> ToolResult[str]:
        applied: list[str] = []
        for each in params.ids:
            if not is_applied(context.session, each):
                try:
                    applied += apply_copy(subagents, each, context)
                except (UsageError, WorkspaceConflictError) as error:
                    return ToolResult.error(f"the changes of {each} cannot be applied: {error}")
        return ToolResult.ok(message=f"applied {len(applied)} paths: {', '.join(applied[:100])}")

    tool = Tool[ApplySteps, str](
        name=NAME, description="Apply the changes of steps.", handler=apply, effects="workspace"
    )
    if permissions.mode is PermissionMode.ASK:
        permissions = replace(permissions, mode=PermissionMode.AUTO)
    runner = ToolRunner(state, {NAME: tool}, "workflow", permissions=permissions)
    return await runner.aexecute(ToolCall(f"apply-{new_id().hex}", NAME, {"ids": list(ids)}))

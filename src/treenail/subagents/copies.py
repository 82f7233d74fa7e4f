"""Applying the changes of isolated copies to the parent's workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treenail.subagents.events import SubagentChangesApplied
from treenail.tools import ToolContext
from treenail.workspace import apply_changes

if TYPE_CHECKING:
    from treenail.subagents.supervision import Subagents


def apply_copy(subagents: Subagents, subagent_id: str, context: ToolContext) -> list[str]:
    """Apply a subagent's changes inside a tool call, and return the paths that changed.

    Changes that were applied before are skipped. Raises `WorkspaceConflictError`, and applies nothing, if a
    path is no longer what the copy began with. The record of it commits and rolls back with the call.
    """
    child = subagents.get(subagent_id)
    earlier = context.session[SubagentChangesApplied].all()
    applied = {path: mark for each in earlier if each.subagent_id == child.id for path, mark in each.applied}
    with subagents.copy_of(child.id) as copy:
        changes = copy.changes()
        paths = apply_changes(context.filesystem, changes, applied)
    marks = tuple((each.path, str(each.after)) for each in changes)
    context.session.dispatch(SubagentChangesApplied(child.id, str(child.session_id), marks))
    return list(paths)

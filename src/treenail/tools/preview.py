"""What a file tool would change, found out without changing it: it works on a copy in memory."""

from __future__ import annotations

import stat
from dataclasses import replace
from typing import Any

from treenail.errors import ToolValidationError, TreenailError
from treenail.tools.context import ToolContext
from treenail.tools.files import WRITING_TOOLS
from treenail.tools.tool import Tool
from treenail.workspace import Filesystem, InMemoryFilesystem, WorkspaceDiff

MAX_COPIED_BYTES = 8_000_000
"""How much of the workspace is copied for a preview; a call that touches more has none."""

_MAX_COPIED_FILES = 2_000

_HANDLERS = frozenset(each.handler for each in WRITING_TOOLS)


def preview(tool: Tool[Any, Any], arguments: str, context: ToolContext) -> WorkspaceDiff | None:
    """Return what a call of a file tool would change; None if that cannot be known before it runs.

    `context` sees the workspace as it is. The tool's own function runs on a copy of what the call names: what
    is shown is what will happen, without what hooks around it change. A call that would fail changes nothing.
    """
    tool = tool.wraps or tool
    if tool.handler is None or tool.handler not in _HANDLERS:
        return None
    try:
        params = tool.parse(arguments)
        named = [params.path, *([params.target] if hasattr(params, "target") else [])]
        copy = _copied(context.filesystem, named)
        if copy is None:
            return None
        before = copy.snapshot()
        tool.call(params, replace(context, held_filesystem=copy))
        return copy.diff(before)
    except (TreenailError, ToolValidationError, OSError, ValueError):
        return None


def _copied(filesystem: Filesystem, paths: list[str]) -> InMemoryFilesystem | None:
    """Copy what is at these paths into memory; None if it is too much, or a link, which leads elsewhere."""
    copy = InMemoryFilesystem()
    left, waiting, count = MAX_COPIED_BYTES, list(paths), 0
    while waiting:
        path = waiting.pop()
        if not filesystem.exists(path):
            continue
        found, count = filesystem.stat(path), count + 1
        if found.is_link or count > _MAX_COPIED_FILES:
            return None
        if found.is_directory:
            copy.mkdir(path)
            waiting += [each.path for each in filesystem.list(path)]
            continue
        left -= found.size_bytes
        if left < 0 or not found.is_file:
            return None
        copy.write_bytes(path, filesystem.read_bytes(path).content)
        copy.chmod(path, stat.S_IMODE(found.permissions))
    return copy

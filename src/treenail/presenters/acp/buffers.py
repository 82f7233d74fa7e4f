"""Unsaved buffers: what a person has typed in the editor and not saved.

An agent reads them, and is told so: `read_file` shows the buffer where it differs from the file. It never
writes them. A write through the editor could not be undone with its call, so every write goes to the disk,
and one to a file with an unsaved buffer is refused: the model is told of the conflict, and the person keeps
both versions. A command may change such a file all the same; then the person is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from treenail.agent import AnyAgent
from treenail.errors import PathEscapeError
from treenail.tools import PolicyDecision, Tool, ToolContext, ToolResult
from treenail.workspace import Filesystem, InMemoryFilesystem, normalize

Buffers = Callable[[str], str | None]
"""Returns the text that the editor has for a path in the workspace; None if it has none or does not say."""

_PATHS = ("path", "target")


def unsaved(buffers: Buffers, filesystem: Filesystem, path: str) -> str | None:
    """Return the text of a buffer that differs from its file; None if there is no such buffer."""
    try:
        on_disk = filesystem.read_bytes(normalize(path)).content
    except (OSError, ValueError, PathEscapeError):
        return None
    text = buffers(normalize(path))
    return None if text is None or same_text(text, on_disk.decode("utf-8", "replace")) else text


def same_text(buffer: str, file: str) -> bool:
    """Say whether a buffer shows a file. Editors have one kind of line ending, and no byte order mark."""
    return _plain(buffer) == _plain(file)


def _plain(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class UnsavedBufferPolicy:
    """A file whose buffer in the editor has unsaved changes is not written."""

    buffers: Buffers
    name: str = "unsaved_buffer"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Refuse a call with effects that names a file with unsaved changes."""
        if tool.effects == "none":
            return PolicyDecision.allow()
        for each in _PATHS:
            path = getattr(params, each, None)
            if isinstance(path, str) and unsaved(self.buffers, context.filesystem, path) is not None:
                return PolicyDecision.deny(
                    f"Conflict: {path} has unsaved changes in the person's editor, and the file on disk "
                    "differs from them. Nothing was changed. Ask the person to save or discard these "
                    "changes, or work on other files."
                )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Nothing: it has no memory."""


def with_buffers(agent: AnyAgent, buffers: Buffers) -> AnyAgent:
    """Return an agent that reads unsaved buffers, and does not write to files that have them."""
    tools = [_reading(each, buffers) if each.name == "read_file" else each for each in agent.own_tools]
    return replace(
        agent, tools=[*tools, *agent.sources], policies=(*agent.policies, UnsavedBufferPolicy(buffers))
    )


def _reading(tool: Tool[Any, Any], buffers: Buffers) -> Tool[Any, Any]:
    """Return `read_file` as it reads a buffer: the same function on the buffer's text."""
    handler = tool.handler
    assert handler is not None

    @functools.wraps(handler)
    def read(params: Any, *, context: ToolContext) -> Any:
        text = unsaved(buffers, context.filesystem, params.path)
        if text is None:
            return handler(params, context=context)
        copy = InMemoryFilesystem()
        copy.write_bytes(normalize(params.path), text.encode("utf-8", "surrogateescape"))
        result = handler(params, context=replace(context, held_filesystem=copy))
        said = (
            f"[{params.path} has unsaved changes in the person's editor. This is the unsaved text; the file "
            "on disk differs, and cannot be written until the person saves or discards them.]\n"
        )
        return replace(result, message=said + result.message)

    return replace(tool, handler=read)

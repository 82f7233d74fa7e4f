"""The vendor's native tools: tools of ours whose bodies run in the CLI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from treenail.errors import ToolError
from treenail.providers.claude_agent.calls import PendingCall
from treenail.providers.claude_agent.process import Cli
from treenail.tools import Effects, Tool, ToolResult

NATIVE_EFFECTS: Mapping[str, Effects] = {
    "Bash": "workspace",
    "Edit": "workspace",
    "NotebookEdit": "workspace",
    "Write": "workspace",
    "Glob": "none",
    "Grep": "none",
    "Read": "none",
    "WebFetch": "none",
    "WebSearch": "none",
}
"""The vendor's own tools that can be held in a transaction, and what each does."""

_PATHS_OF = {"Write": "file_path", "Edit": "file_path", "NotebookEdit": "notebook_path"}


def native_tool(name: str, handler: Callable[..., Awaitable[ToolResult[str]]]) -> Tool[Any, Any]:
    """Make the tool of ours whose body is a tool of the CLI's."""
    effects = NATIVE_EFFECTS[name]
    return Tool(
        name=name.lower(),
        description=f"The vendor's own tool {name}.",
        handler=handler,
        effects=effects,
        files="any" if effects != "none" else None,
        params_type=dict[str, Any],
    )


async def perform(name: str, pending: PendingCall, cli: Cli) -> ToolResult[str]:
    """Let the CLI run a tool, and wait for its end. If the wait is cut short, the CLI is killed."""
    try:
        known = await cli.processes() if name == "Bash" else None
        pending.released.set()
        await pending.ended.wait()
        if known is not None:
            await cli.end_others(known)
    except BaseException:
        # The files cannot be put back while the tool is at work on them.
        with anyio.CancelScope(shield=True):
            cli.kill()
            await cli.wait()
        raise
    if pending.is_lost:
        raise ToolError(f"{name} was cut off: the process that ran it has ended.")
    return ToolResult(pending.text or "OK", success=pending.succeeded)


def check(name: str, params: Mapping[str, Any], root: Path | None) -> None:
    """Refuse what cannot be undone: work in the background, and files outside the workspace."""
    if params.get("run_in_background"):
        raise ToolError("A command cannot run in the background here: it would outlive its call.")
    key = _PATHS_OF.get(name)
    if key is None or root is None or not isinstance(params.get(key), str):
        return
    path = (root / params[key]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ToolError(f"{params[key]} is outside the workspace {root}; write inside it.")

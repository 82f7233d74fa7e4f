"""A server for the length of a run: connect, pin its tools, add them to the loop, and end it again."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio

from treenail.containment import CancellationToken, threadsafe, wait_finished
from treenail.errors import McpError, UsageError
from treenail.mcp.connection import Connection
from treenail.mcp.pins import McpServerFailed, McpServerPinned, compared, pin_of
from treenail.mcp.sampling import Sampler
from treenail.mcp.server import McpServer
from treenail.mcp.stdio import Place
from treenail.mcp.tools import Progress, ServerTools
from treenail.prompt import MarkdownSection
from treenail.sandbox import Sandbox
from treenail.tools import filesystem_of
from treenail.turns import InnerLoop, ToolProgressed, prompt_extended
from treenail.workspace import sandbox_of


@asynccontextmanager
async def attached(server: McpServer, loop: InnerLoop) -> AsyncIterator[McpServerPinned | None]:
    """Add a server's tools to a loop for the length of the block. Yields the list that is pinned.

    A server that cannot be used is recorded, and told to the model; the run continues without it.
    """
    session = loop.state.session
    with ExitStack() as opened:
        connection = Connection(server, _place(server, loop, opened))
        try:
            pin = pin_of(session, server.name)
            fresh, problem = await _begin(connection, loop.cancellation)
            if fresh is None:
                session.dispatch(McpServerFailed(server.name, problem))
                if server.required:
                    raise McpError(problem)
            elif pin is None:
                pin = fresh
                session.dispatch(pin)
            tools = None
            # Not why: what a server says must not stand where the operator's instructions do.
            text = f"The tools of the server {server.name} are not available in this run."
            if pin is not None:
                sampler = Sampler(server, loop) if server.sampling else None
                tools = ServerTools(connection, pin, sampler, _progress(loop), loop.permissions.approver)
                tools.change = None if fresh is None else compared(pin, fresh.tools)
                text = f"Tools whose names begin with {server.name}__ belong to the server {server.name}."
                text += f" It says about them:\n\n{pin.instructions}" if pin.instructions else ""
            section: MarkdownSection[object] = MarkdownSection(
                f"Tools of {server.name}",
                template=text.replace("$", "$$"),
                tools=() if tools is None else tuple(tools.tools()),
            )
            with prompt_extended(loop, section):
                yield pin
            change = None if tools is None else tools.untold()
            if change is not None:
                session.dispatch(change)
        finally:
            with anyio.CancelScope(shield=True):
                closed = connection.close()
                if closed is not None:
                    await wait_finished(closed)


async def _begin(
    connection: Connection, cancellation: CancellationToken
) -> tuple[McpServerPinned | None, str]:
    """Start a server. Returns its list of tools, or None and what went wrong."""
    with anyio.CancelScope() as scope:
        forget = cancellation.on_cancel(threadsafe(scope.cancel))
        try:
            life = connection.life()
            await wait_finished(life.ready)
            return life.ready.result(), ""
        except McpError as error:
            return None, str(error)
        finally:
            forget()
    return None, f"the run was stopped while the MCP server {connection.server.name} was starting"


def _place(server: McpServer, loop: InnerLoop, opened: ExitStack) -> Place:
    """Return where a server's process works: the run's workspace, or an empty directory."""
    filesystem = filesystem_of(loop.state)
    root = None if filesystem is None else filesystem.host_root
    if root is None or filesystem is None:
        if server.effects == "workspace":
            raise UsageError(
                f"the MCP server {server.name} works on files, and this run has no directory; name one with "
                "workspace=, or leave effects out"
            )
        return Place(
            Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="treenail-mcp-"))), Sandbox()
        )
    return Place(Path(root), sandbox_of(filesystem))


def _progress(loop: InnerLoop) -> Progress | None:
    watch = loop.watch
    if watch is None:
        return None

    def show(call_id: str, done: float, total: float | None, message: str) -> None:
        watch(ToolProgressed(call_id, done, total, message[:500]))

    return show

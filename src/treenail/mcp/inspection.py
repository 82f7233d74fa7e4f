"""A look at a server without a run: start it, list its tools, end it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from treenail.mcp.connection import Connection
from treenail.mcp.effects import ToolEffects, effects_of
from treenail.mcp.pins import McpServerPinned, PinnedTool
from treenail.mcp.server import McpServer
from treenail.mcp.stdio import Place
from treenail.sandbox import Sandbox


class Inspected(NamedTuple):
    """A server as it is now: its list of tools, and what each may change."""

    pin: McpServerPinned
    tools: tuple[tuple[PinnedTool, ToolEffects], ...]


def inspected(server: McpServer, directory: Path, sandbox: Sandbox) -> Inspected:
    """Start a server as a run in this directory would, and return what it lists. Raises `McpError`."""
    connection = Connection(server, Place(directory, sandbox))
    try:
        pin = connection.life().ready.result()
    finally:
        closed = connection.close()
        if closed is not None:
            closed.result()
    return Inspected(pin, tuple((each, effects_of(server, each)) for each in pin.tools))

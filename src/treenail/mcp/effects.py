"""What a server's tool may change, and whether a person is asked before.

The operator's word decides. The server's own hints count only if the operator trusts the server:

    readOnlyHint of a trusted server       effects "none": it may run beside others, and is never asked about
    a server declared "workspace"          effects "workspace": its writes are kept or undone with the call
    everything else                        effects "external": after a crash its outcome is unknown
    ... with idempotentHint, if trusted    ... unless it may simply run again

An external call asks a person, as the protocol has it: a tool destroys unless a hint says that it does not.
"""

from __future__ import annotations

from typing import NamedTuple

from treenail.mcp.pins import PinnedTool
from treenail.mcp.server import McpServer
from treenail.tools import Effects


class ToolEffects(NamedTuple):
    """What a tool may change, whether it may run again, and whether a person is asked before."""

    effects: Effects
    idempotent: bool
    asks: bool


def effects_of(server: McpServer, tool: PinnedTool) -> ToolEffects:
    """Decide what a tool may change."""
    if server.trust and tool.read_only:
        return ToolEffects("none", idempotent=True, asks=False)
    if server.effects == "workspace":
        return ToolEffects("workspace", idempotent=False, asks=server.ask is True)
    destroys = not server.trust or tool.destructive is not False
    asks = destroys if server.ask is None else server.ask
    return ToolEffects("external", idempotent=bool(server.trust and tool.idempotent), asks=asks)

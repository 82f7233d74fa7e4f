"""The MCP servers that an editor names for a session, as sources of tools."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from acp import schema

from treenail.errors import UsageError
from treenail.mcp import MAX_SERVER_NAME, McpServer


def is_available() -> bool:
    """Whether the extra for MCP servers is installed."""
    return importlib.util.find_spec("mcp") is not None


def servers_of(named: Sequence[Any] | None) -> tuple[McpServer, ...]:
    """Return the servers as an agent takes them. Raises `UsageError` for one that cannot be used.

    An editor's servers get what every server gets: the sandbox, and no trust in their hints. Editors also
    read them from a project's files, so nothing in them names a variable of ours.
    """
    found = {each.name: each for each in map(_server, named or ())}
    if len(found) < len(named or ()):
        raise UsageError("two MCP servers have the same name, or names that differ only in signs; rename one")
    return tuple(found.values())


def _server(given: Any) -> McpServer:
    name = re.sub(r"[^a-z0-9]+", "-", given.name.lower())[:MAX_SERVER_NAME].strip("-") or "server"
    if isinstance(given, schema.McpServerStdio):
        env = {each.name: each.value for each in given.env}
        return McpServer(name, command=[given.command, *given.args], env=env)
    if isinstance(given, schema.HttpMcpServer):
        headers = {each.name: each.value for each in given.headers}
        return McpServer(name, url=given.url, headers=headers, literal=True)
    raise UsageError(
        f"the MCP server {given.name!r} cannot be reached from here; use stdio or streamable HTTP for it"
    )

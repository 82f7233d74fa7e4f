"""The MCP servers of the settings: `[mcp.NAME]` in a settings file."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ValidationError

from treenail.errors import UsageError
from treenail.mcp import McpServer, OAuth
from treenail.presenters.cli.settings import Settings, WrittenServer


class _OAuthTable(BaseModel, extra="forbid", strict=True):
    client_id: str = ""
    client_secret: str = ""
    private_key: str = ""
    grant: Literal["authorization_code", "client_credentials"] = "authorization_code"
    scope: str = ""
    issuer: str = ""


class _ServerTable(BaseModel, extra="forbid", strict=True):
    """A table `[mcp.NAME]`: the fields of `McpServer` that are plain values."""

    command: list[str] = []
    url: str = ""
    trust: bool = False
    effects: Literal["external", "workspace"] = "external"
    ask: bool | None = None
    tools: list[str] = []
    env: dict[str, str] = {}
    pass_env: list[str] = []
    allow_network: bool = False
    allow_write: list[str] = []
    allow_read: list[str] = []
    headers: dict[str, str] = {}
    oauth: _OAuthTable | None = None
    timeout: float = 120.0
    start_timeout: float = 30.0
    sampling: bool = False
    required: bool = False
    enabled: bool = True


def server_of(written: WrittenServer) -> McpServer | None:
    """Make a server of its table; None if it is switched off. Raises `UsageError`, which names the file."""
    place = f"[mcp.{written.name}] in {written.source}"
    try:
        table = _ServerTable.model_validate(written.table)
    except ValidationError as error:
        wrong = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        raise UsageError(f"{place}: " + "; ".join(f"{name}: {text}" for name, text in wrong)) from error
    if not table.enabled:
        return None
    fields = table.model_dump(exclude={"enabled", "oauth"})
    try:
        oauth = None if table.oauth is None else OAuth(**table.oauth.model_dump())
        return McpServer(written.name, oauth=oauth, **fields)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def servers_of(settings: Settings) -> list[McpServer]:
    """Return the servers that count: the user's own, and those of an approved project."""
    made = (server_of(each) for each in settings.servers if each.approved)
    return [each for each in made if each is not None]


def server_table(name: str, fields: dict[str, object]) -> str:
    """Write a server's table as TOML."""
    lines = [f"[mcp.{name}]"]
    lines += [
        f"{key} = {_toml(value)}" for key, value in fields.items() if value not in ("", [], {}, None, False)
    ]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    # A JSON text is a TOML text, but for characters that TOML wants escaped as well.
    return json.dumps(value).replace("\x7f", "\\u007f")

"""What a program says about an MCP server: how it is reached, what it may do, and whether it is trusted."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import treenail.mcp
from treenail.errors import UsageError
from treenail.mcp.names import MAX_SERVER_NAME, is_server_name
from treenail.turns import InnerLoop

Login = Callable[[str], Awaitable[str]]
"""Sends a person to an address to log in, and returns the address that they are sent back to."""

BASICS = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""The variables that every server's process has besides the named ones: to find programs, and the locale."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True)
class OAuth:
    """How to log in where a server asks for it. By default a client registers itself and a person logs in."""

    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    private_key: str = field(default="", repr=False)
    """A key in PEM, for a client that signs its requests instead of sending a secret."""
    grant: Literal["authorization_code", "client_credentials"] = "authorization_code"
    """Whether a person logs in, or the client itself with its secret or key."""
    scope: str = ""
    issuer: str = ""
    """The authorization server that knows this client; required for `client_credentials`."""
    client_metadata_url: str = ""
    """An https address that describes the client, for servers that take it in place of a registration."""


@dataclass(frozen=True)
class McpServer:
    """A server of the Model Context Protocol, whose tools an agent may use: `Agent(tools=[McpServer(...)])`.

    Name a `command`, which is started in the sandbox, or a `url`. Each run has a connection of its own.
    """

    name: str
    command: Sequence[str] = ()
    """The program and its arguments. It is started in the workspace."""
    url: str = ""
    """The address of a server that is reached by streamable HTTP."""
    trust: bool = False
    """Whether the server's hints count: which of its tools only read, and which may run again."""
    effects: Literal["external", "workspace"] = "external"
    """What its tools change. `workspace`: files of the workspace and nothing else, so that a failed call is
    undone. Only for a command."""
    ask: bool | None = None
    """Whether a person is asked before a tool with effects runs. None: if it acts outside, unless a trusted
    server says that it destroys nothing."""
    tools: Sequence[str] = ()
    """The tools to use, by the server's own names; all of them if it is empty."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the process."""
    pass_env: Sequence[str] = ()
    """Variables of ours that the process gets as well."""
    allow_network: bool = False
    allow_write: Sequence[str | Path] = ()
    """Directories outside of the workspace that the process may write to."""
    allow_read: Sequence[str | Path] = ()
    """Paths that it may read where others cannot, such as below /tmp."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of each request; `${NAME}` stands for a variable of our environment."""
    literal: bool = False
    """Whether `${NAME}` in a header stands for itself: for headers that somebody else has written."""
    oauth: OAuth | None = None
    login: Login | None = field(default=None, repr=False)
    """Lets a person log in. Without it a server that asks for a login cannot be used."""
    timeout: float = 120.0
    """How many seconds a call may take without a sign of progress."""
    start_timeout: float = 30.0
    """How many seconds the server may take to start."""
    sampling: bool = False
    """Whether the server may ask the run's model. What it costs counts against the run's limits."""
    max_sampling_tokens: int = 2_000
    """How many tokens the model may write for one such request, if the server does not ask for fewer."""
    required: bool = False
    """Whether a run without the server is not worth having: then it does not begin."""

    def __post_init__(self) -> None:
        if not is_server_name(self.name):
            raise UsageError(
                f"{self.name!r} is not a name for an MCP server: use up to {MAX_SERVER_NAME} of a-z and 0-9, "
                "with single '_' or '-' between them"
            )
        if isinstance(self.command, str):
            raise UsageError(f"the command of the MCP server {self.name} must be a list of words")
        if bool(self.command) == bool(self.url):
            raise UsageError(f"the MCP server {self.name} needs a command or a url, one of the two")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc):
            raise UsageError(f"the url of the MCP server {self.name} is not an address: {self.url!r}")
        if self.url and self.effects == "workspace":
            raise UsageError(
                f"the MCP server {self.name} is reached over the network, so what it does cannot be undone "
                "with the workspace; leave effects out"
            )
        if self.effects not in ("external", "workspace"):
            raise UsageError(f"effects of the MCP server {self.name} must be 'external' or 'workspace'")
        if not 0 < self.timeout < 1e6 or not 0 < self.start_timeout < 1e6:
            raise UsageError(f"the timeouts of the MCP server {self.name} must be numbers of seconds above 0")

    @property
    def reached(self) -> str:
        """The program or the address, without what may be secret in it."""
        if self.command:
            return Path(self.command[0]).name
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def environment(self) -> dict[str, str]:
        """Return the variables of the process: the named ones, and nothing that is not needed to start."""
        ours = {name: os.environ[name] for name in (*BASICS, *self.pass_env) if name in os.environ}
        return {**ours, **self.env}

    def request_headers(self) -> dict[str, str]:
        """Return the headers of each request, with our variables in their places."""
        if self.literal:
            return dict(self.headers)
        return {name: _VARIABLE.sub(self._variable, value) for name, value in self.headers.items()}

    def _variable(self, found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if value is None:
            raise UsageError(f"a header of the MCP server {self.name} needs the variable {found[1]}; set it")
        return value

    def secrets(self) -> tuple[str, ...]:
        """Return the values that no message may show."""
        given = [*self.env.values(), *(os.environ.get(name, "") for name in self.pass_env)]
        sent = (
            list(self.headers.values())
            if self.literal
            else [
                _VARIABLE.sub(lambda name: os.environ.get(name[1], ""), each)
                for each in self.headers.values()
            ]
        )
        given += [word for value in sent for word in (value, *value.split())]
        if self.oauth is not None:
            given += [self.oauth.client_secret, self.oauth.private_key]
        return tuple(sorted({each for each in given if len(each) >= 6}, key=len, reverse=True))

    def attached(self, loop: InnerLoop) -> AbstractAsyncContextManager[object]:
        """Connect for the length of a run, and add the tools to its loop."""
        try:
            attached = treenail.mcp.attached  # By the door, which loads the SDK now.
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the MCP server {self.name} needs the package {error.name}; install it: pip install '.[mcp]'"
            ) from error
        return attached(self, loop)

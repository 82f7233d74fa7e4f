"""What the tests of MCP servers share: where the servers are, and runs with a script in place of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treenail import Agent
from treenail.agent import Run
from treenail.mcp import McpServer, McpServerFailed
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import ToolInvoked

NPM = Path(sys.prefix) / "npm" / "node_modules"
NODE = NPM / ".bin" / "node"
FAKE = Path(__file__).with_name("fake_server.py")


def node(package: str) -> list[str]:
    """The command of a public server from npm, with the node that was installed for it."""
    return [str(NODE), str(NPM / "@modelcontextprotocol" / package / "dist" / "index.js")]


def fake(mode: str = "good", **options: Any) -> McpServer:
    """Our own server, which can do what no public one does. Nobody is asked about its calls."""
    name = options.pop("name", "fake")
    command = [sys.executable, "-I", "-S", str(FAKE), mode]
    return McpServer(name, command=command, **{"ask": False, **options})


def calls(*each: tuple[str, dict[str, Any]]) -> list[Any]:
    """A script that makes calls, one after the other, and ends."""
    return [*(Answer(calls=[call]) for call in each), "Done."]


def run(servers: Sequence[McpServer] | McpServer, script: Sequence[Any], **options: Any) -> Run:
    """Run an agent with servers."""
    given = [servers] if isinstance(servers, McpServer) else list(servers)
    agent = Agent("tester", tools=[*options.pop("tools", ()), *given])
    return agent.run("go", provider=ScriptedProvider(list(script)), **options)


def results(run: Run) -> list[str]:
    """What the model was told of its calls."""
    return [each.content for each in run.messages if each.role == "tool"]


def outcomes(run: Run) -> list[str]:
    """How each call ended, as the log has it."""
    return [each.outcome for each in run.execution_state.session[ToolInvoked].all()]


def failures(run: Run) -> list[str]:
    """Why servers could not be used."""
    return [each.reason for each in run.execution_state.session[McpServerFailed].all()]

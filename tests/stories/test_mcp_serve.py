"""`treenail mcp serve`: other programs hand work to runs, by the MCP SDK's client over pipes and sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import ResourceTemplateReference
from tests.stories.terminal import clean_environment, treenail
from tests.stories.test_cli import call, script

from treenail.history import LAST, find_run, opened_run
from treenail.presenters.cli import stores
from treenail.providers.scripted import Answer
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.turns import ceilings_of

ENDED_S = 60.0
"""More than anything here takes: wait_run returns when the run ends."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root


@asynccontextmanager
async def serving(project: Path, model: str, *flags: str) -> AsyncIterator[Client]:
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "treenail", "mcp", "serve", "--model", model, *flags],
        cwd=project,
        env=clean_environment(project),
    )
    async with Client(stdio_client(command)) as client:
        yield client


def on(
    project: Path, model: str, *flags: str
) -> Callable[[Callable[[Client], Coroutine[Any, Any, None]]], None]:
    """Run a story with a client of a server."""

    def go(story: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with serving(project, model, *flags) as client:
                await story(client)

        anyio.run(main)

    return go


async def asked(client: Client, tool: str, **arguments: object) -> Any:
    """Call a tool and return its value; a refusal is an `AssertionError` with its text."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    value = result.structured_content
    return value["result"] if isinstance(value, dict) and set(value) == {"result"} else value


async def refusal(client: Client, tool: str, **arguments: object) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


def writing(project: Path, text: str = "two\n") -> str:
    return script(project, call("write_file", path="a.txt", content=text), {"text": "written"})


def test_work_is_handed_to_a_run_and_taken_back(project: Path) -> None:
    """Start, wait, look, undo; the same key is the same run, whose task runs once."""

    @on(project, writing(project))
    async def _(client: Client) -> None:
        begun = await asked(client, "start_run", task="write a.txt", key="k1")
        ended = await asked(client, "wait_run", run=begun["id"], timeout_s=ENDED_S)
        assert (ended["state"], ended["answer"]) == ("completed", "written")
        assert (project / "a.txt").read_text() == "two\n"
        again = await asked(client, "start_run", task="write a.txt", key="k1")
        assert (again["id"], again["state"]) == (begun["id"], "completed")
        assert [each["id"] for each in await asked(client, "list_runs")] == [begun["id"]]
        assert "-one\n+two" in await asked(client, "diff_run", run=begun["id"][:8])
        told = await client.read_resource(f"treenail://runs/{begun['id']}/timeline")
        assert "write_file" in told.contents[0].text  # type: ignore[union-attr]
        template = ResourceTemplateReference(uri="treenail://runs/{run}/timeline")
        found = await client.complete(template, {"name": "run", "value": begun["id"][:4]})
        assert found.completion.values == [begun["id"]]
        assert await asked(client, "undo_run", run=begun["id"]) == {"undone": ["call_1_1"]}
        assert (project / "a.txt").read_text() == "one\n"

    assert json.loads(treenail("list", "--json", cwd=project).stdout)[0]["state"] == "completed"


def test_a_key_of_another_task_and_an_unknown_run_are_refused(project: Path) -> None:
    @on(project, writing(project))
    async def _(client: Client) -> None:
        await asked(client, "start_run", task="write a.txt", key="k1")
        assert "belongs to another task" in await refusal(client, "start_run", task="other", key="k1")
        assert "no run begins with" in await refusal(client, "get_run", run="ffff")
        assert "greater than 0" in await refusal(client, "start_run", task="t", key="k2", max_cost_usd=-1)


def test_a_call_waits_for_an_answer_that_the_client_passes_on(project: Path) -> None:
    """The hold is in the log; a refusal reaches the model with its note, and an approval runs the call."""
    model = script(
        project,
        call("write_file", path="a.txt", content="no\n"),
        call("write_file", path="a.txt", content="yes\n"),
        {"text": "done"},
    )

    @on(project, model, "--ask")
    async def _(client: Client) -> None:
        run = (await asked(client, "start_run", task="write", key="k"))["id"]
        held = await asked(client, "wait_run", run=run, timeout_s=ENDED_S)
        assert (held["state"], held["holds"][0]["tool"]) == ("held", "write_file")
        await asked(client, "answer_hold", run=run, approved=False, note="rather yes")
        assert (await asked(client, "wait_run", run=run, timeout_s=ENDED_S))["state"] == "held"
        assert (project / "a.txt").read_text() == "one\n"
        await asked(client, "answer_hold", run=run, approved=True)
        ended = await asked(client, "wait_run", run=run, timeout_s=ENDED_S)
        assert (ended["state"], ended["holds"]) == ("completed", [])
        assert (project / "a.txt").read_text() == "yes\n"


def test_a_client_cannot_raise_a_ceiling(project: Path) -> None:
    """The operator's one step holds, whatever the client asks for."""

    @on(project, writing(project), "--max-steps", "1", "--max-cost", "0.5")
    async def _(client: Client) -> None:
        run = (await asked(client, "start_run", task="write", key="k", max_cost_usd=100.0))["id"]
        ended = await asked(client, "wait_run", run=run, timeout_s=ENDED_S)
        assert ended["error_kind"] == "step_limit_exceeded"

    store = stores.store_for(project, None, clean_environment(project))
    with opened_run(store, find_run(store, LAST)) as session:
        ceilings = ceilings_of(session)
    assert ceilings is not None and ceilings.max_cost_usd == 0.5


def test_the_operators_rules_hold_for_the_runs_of_a_client(project: Path) -> None:
    """A rule that denies a call denies it here as well, and options count for runs that others began."""
    settings = project.parent / ".config/treenail"
    settings.mkdir(parents=True)
    (settings / "treenail.toml").write_text('deny = ["write_file: a.txt"]\n')

    @on(project, writing(project))
    async def _(client: Client) -> None:
        run = (await asked(client, "start_run", task="write", key="k"))["id"]
        await asked(client, "wait_run", run=run, timeout_s=ENDED_S)
        assert (project / "a.txt").read_text() == "one\n"

    (settings / "treenail.toml").unlink()
    held = treenail("run", "write", "--ask", "--model", writing(project), cwd=project)
    assert held.returncode == 4

    @on(project, writing(project), "--read-only")
    async def _(client: Client) -> None:
        run = (await asked(client, "answer_hold", run="@last", approved=True))["id"]
        await asked(client, "wait_run", run=run, timeout_s=ENDED_S)
        assert (project / "a.txt").read_text() == "one\n"


def test_a_server_that_stops_interrupts_its_run_and_the_next_one_resumes_it(project: Path) -> None:
    """The client closes the pipe in the middle of a command: finished work stays, and is not done again."""
    outside = project.parent / "outside"
    outside.mkdir()
    model = script(
        project,
        call("write_file", path="a.txt", content="two\n"),
        call(
            "run_command",
            command="echo x >> a.txt; echo at > ../outside/there; sleep 600",
        ),
        {"text": "done"},
    )
    flags = ("--allow-write", "../outside")

    @on(project, model, *flags)
    async def _(client: Client) -> None:
        await asked(client, "start_run", task="write", key="k")
        while not (outside / "there").exists():
            await anyio.lowlevel.checkpoint()
            await client.call_tool("list_runs", {})

    listed = json.loads(treenail("list", "--json", cwd=project).stdout)
    assert [each["state"] for each in listed] == ["interrupted"]
    assert (project / "a.txt").read_text() == "two\n"

    @on(project, model, *flags)
    async def _(client: Client) -> None:
        run = (await asked(client, "start_run", task="write", key="k"))["id"]
        assert run == listed[0]["id"]
        assert (await asked(client, "wait_run", run=run, timeout_s=ENDED_S))["state"] == "completed"
        assert (await asked(client, "undo_run", run=run))["undone"] == ["call_1_1"]
        assert (project / "a.txt").read_text() == "one\n"


def test_a_run_that_waits_for_another_one_can_be_cancelled(project: Path) -> None:
    """One works at a time; a cancelled one never begins, and the one at work ends as interrupted."""

    @on(project, script(project, call("run_command", command="sleep 600")))
    async def _(client: Client) -> None:
        first = (await asked(client, "start_run", task="one", key="1"))["id"]
        second = (await asked(client, "start_run", task="two", key="2"))["id"]
        assert (await asked(client, "get_run", run=second))["state"] == "queued"
        assert (await asked(client, "cancel_run", run=second))["state"] == "cancelled"
        assert "under way" in await refusal(client, "undo_run", run=first)
        assert (await asked(client, "cancel_run", run=first))["state"] == "interrupted"

    assert len(json.loads(treenail("list", "--json", cwd=project).stdout)) == 1


def test_http_asks_for_its_token_and_checks_who_asks(project: Path) -> None:
    """Without the token, or from another site's page, nothing is answered; its end interrupts the run."""
    write = call("write_file", path="a.txt", content="two\n")
    model = script(project, write, call("run_command", command="sleep 600"), {"text": "done"})
    process = subprocess.Popen(
        [sys.executable, "-m", "treenail", "mcp", "serve", "--http", "--model", model],
        cwd=project,
        env=clean_environment(project),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("serving ").strip()
        token = process.stderr.readline().removeprefix("token: ").strip()
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        right = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
        with httpx2.Client() as http:
            assert http.post(url, json=ping).status_code == 401
            assert http.post(url, json=ping, headers={"Authorization": "Bearer no"}).status_code == 401
            assert (
                http.post(url, json=ping, headers=right | {"Origin": "http://evil.example"}).status_code
                == 403
            )
            assert http.post(url, json=ping, headers=right | {"Host": "evil.example"}).status_code == 421
        anyio.run(_over_http, url, token)
        assert (project / "a.txt").read_text() == "two\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=ENDED_S)
    finally:
        process.kill()
        process.communicate()
    listed = json.loads(treenail("list", "--json", cwd=project).stdout)
    assert [each["state"] for each in listed] == ["interrupted"]


async def _over_http(url: str, token: str) -> None:
    """Start a run, and leave while its command runs."""
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        run = (await asked(client, "start_run", task="write", key="k"))["id"]
        while "run_command" not in str(await client.read_resource(f"treenail://runs/{run}/timeline")):
            await asked(client, "wait_run", run=run, timeout_s=0.1)


def test_the_claude_cli_hands_work_to_a_run(project: Path, tmp_path: Path) -> None:
    """The vendor's own program starts the server, calls its tools, and reads the true ending."""
    steps = [
        Answer(calls=[("start_run", {"task": "write a.txt", "key": "k"})]),
        Answer(calls=[("wait_run", {"run": "@last", "timeout_s": ENDED_S})]),
        Answer("It is done."),
    ]
    server: Any = {
        "command": sys.executable,
        "args": ["-m", "treenail", "mcp", "serve", "-C", str(project), "--model", writing(project)],
        "env": clean_environment(project),
    }

    async def main(url: str) -> list[Any]:
        options = ClaudeAgentOptions(
            model="a-model",
            mcp_servers={"treenail": server},
            strict_mcp_config=True,
            setting_sources=[],
            allowed_tools=["mcp__treenail__start_run", "mcp__treenail__wait_run"],
            cwd=str(tmp_path),
            env={
                **claude_environment(tmp_path),
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": "a-key",
                "ENABLE_TOOL_SEARCH": "0",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )
        return [each async for each in query(prompt="write a.txt by a run", options=options)]

    with ClaudeWireServer(steps) as wire:
        seen = anyio.run(main, wire.url)
        results = json.dumps([each.body["messages"] for each in wire.requests])
    assert isinstance(seen[-1], ResultMessage) and seen[-1].result == "It is done."
    assert "completed" in results and "written" in results
    assert (project / "a.txt").read_text() == "two\n"


NODE = Path(sys.executable).parent.parent / "npm/node_modules"
NOT_OURS = {
    "logging-set-level": "the server sends no log",
    "tools-call-with-logging": "the server sends no log",
    "resources-subscribe": "a timeline is read, not watched",
    "resources-unsubscribe": "a timeline is read, not watched",
}
"""The scenarios of the suite that do not apply, and why."""


def test_the_conformance_suite_passes_where_it_applies(project: Path) -> None:
    """Its fixtures are registered at our server, and served by our HTTP with the Host and Origin checks."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.stories.mcp_conformance_server", str(project), _script(project)],
        env=clean_environment(project),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        suite = NODE / "@modelcontextprotocol/conformance/dist/index.js"
        done = subprocess.run(
            [NODE / f"node-{_platform()}/bin/node", suite, "server", "--url", url],
            check=False,
            capture_output=True,
            text=True,
            timeout=10 * ENDED_S,
        )
    finally:
        server.kill()
        server.communicate()
    verdicts = {name: mark for mark, name in re.findall(r"^([✓✗]) ([a-z0-9-]+):", done.stdout, re.M)}
    assert len(verdicts) == 30, done.stdout
    assert {name for name, mark in verdicts.items() if mark == "✗"} == set(NOT_OURS)


def _script(project: Path) -> str:
    return writing(project).removeprefix("scripted:")


def _platform() -> str:
    return f"{sys.platform}-{'arm64' if os.uname().machine == 'aarch64' else 'x64'}"

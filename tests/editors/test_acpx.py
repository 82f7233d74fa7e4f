"""A client that nobody here wrote: acpx, from npm, on node 22."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.editors.editor import environment, script

MODULES = Path(sys.prefix) / "npm" / "node_modules"
ACPX = [str(MODULES / ".bin" / "node"), str(MODULES / "acpx" / "dist" / "cli.js")]

SCRIPTS: dict[str, Any] = {
    "write": [
        {
            "text": "I write it.",
            "calls": [{"name": "write_file", "arguments": {"path": "a.txt", "content": "new\n"}}],
        },
        "All done.",
    ],
    "fail": [],
    "sleep": [
        "Ready.",
        {"calls": [{"name": "run_command", "arguments": {"command": "sleep 600"}}]},
        "Loaded again.",
    ],
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    # acpx leaves a process behind that owns the session, and that process an agent.
    for pid in [*agents(tmp_path), *owners(tmp_path)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def owners(home: Path) -> list[int]:
    return [json.loads(each.read_text())["pid"] for each in (home / ".acpx" / "queues").glob("*.lock")]


def agents(home: Path) -> list[int]:
    """Return the processes of `treenail acp` that this test's acpx has started."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            words = (each / "cmdline").read_bytes().split(b"\0") if each.name.isdecimal() else []
        except OSError:
            continue
        if b"acp" in words and any(str(home).encode() in word for word in words):
            found.append(int(each.name))
    return found


class Client:
    """acpx in a directory of its own, so that several can work at once."""

    def __init__(self, home: Path, name: str, *options: str) -> None:
        self.home, self.ws = home, home / name
        self.ws.mkdir()
        (self.ws / "a.txt").write_text("old\n")
        model = script(home / f"{name}.json", SCRIPTS)
        self.agent = shlex.join([sys.executable, "-m", "treenail", "acp", "--model", model, *options])

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*ACPX, "--agent", self.agent, *arguments],
            cwd=self.ws,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        return finished(self.start(*arguments))


def finished(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    """Wait for a client; return its exit code, and the messages that it sent and got."""
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def answers(messages: list[dict[str, Any]]) -> list[Any]:
    """Return the stop reasons and the errors of turns in an exchange."""
    return [
        each["result"]["stopReason"] if "result" in each else each["error"]
        for each in messages
        if "stopReason" in (each.get("result") or {}) or "state" in (each.get("error") or {}).get("data", {})
    ]


def test_a_client_that_others_wrote_sees_each_outcome(home: Path) -> None:
    """An answer, a failure, a limit, an approval and a denial: each is told once, and as what it is."""
    strict = ("--format", "json", "--json-strict")
    cases = {
        "approved": (("--ask",), ("--approve-all", *strict, "exec", "write")),
        "denied": (("--ask",), ("--deny-all", *strict, "exec", "write")),
        "limited": (("--auto", "--max-steps", "1"), (*strict, "exec", "write")),
        "failed": (("--auto",), (*strict, "exec", "fail")),
    }
    started = {}
    for name, (options, arguments) in cases.items():
        client = Client(home, name, *options)
        started[name] = (client, client.start(*arguments))
    ended = {name: (client, *finished(process)) for name, (client, process) in started.items()}
    codes = {name: code for name, (_, code, _) in ended.items()}
    assert codes == {"approved": 0, "denied": 5, "limited": 0, "failed": 1}
    told = {name: answers(messages) for name, (_, _, messages) in ended.items()}
    [failure] = told.pop("failed")
    assert told == {"approved": ["end_turn"], "denied": ["end_turn"], "limited": ["max_turn_requests"]}
    assert failure["code"] == -32603
    assert failure["data"]["state"] == "failed"
    assert failure["data"]["kind"] == "provider_error"
    assert failure["data"]["next_actions"][0].startswith("treenail resume ")
    files = {name: (client.ws / "a.txt").read_text() for name, (client, _, _) in ended.items()}
    assert files == {"approved": "new\n", "denied": "old\n", "limited": "old\n", "failed": "old\n"}


def test_a_session_of_that_client_is_cancelled_and_loaded_after_a_kill(home: Path) -> None:
    """The client cancels, and later loads the same session in a new process: the old one was killed."""
    client = Client(home, "session", "--auto")
    assert client.run("sessions", "new")[0] == 0
    code, messages = client.run("--format", "json", "prompt", "sleep")
    assert (code, answers(messages)) == (0, ["end_turn"])
    [session] = {
        each["params"]["sessionId"] for each in messages if "sessionId" in (each.get("params") or {})
    }
    waiting = client.start("--format", "json", "prompt", "sleep now")
    try:
        assert waiting.stdout is not None
        for line in waiting.stdout:
            if '"in_progress"' in line:
                break
        assert client.run("cancel")[0] == 0
    except BaseException:
        waiting.kill()
        raise
    finally:
        code, messages = finished(waiting)
    assert (code, answers(messages)) == (0, ["cancelled"])
    [agent] = agents(home)
    os.kill(agent, signal.SIGKILL)
    code, messages = client.run("--format", "json", "prompt", "again")
    assert (code, answers(messages)) == (0, ["end_turn"])
    loads = [each for each in messages if each.get("method") == "session/load"]
    assert [each["params"]["sessionId"] for each in loads] == [session]
    assert "Loaded again." in json.dumps(messages)

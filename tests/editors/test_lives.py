"""Editors that die, processes that are killed, and runs that go on elsewhere."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.editors.editor import Refused, editor, environment, script

WRITE = {"calls": [{"name": "write_file", "arguments": {"path": "a.txt", "content": "new\n"}}]}
SLEEP = {"calls": [{"name": "run_command", "arguments": {"command": "echo up > started; sleep 600"}}]}
ALLOW = {"outcome": {"outcome": "selected", "optionId": "allow"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "a.txt").write_text("old\n")
    return tmp_path / "ws"


def treenail(home: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treenail", *arguments],
        cwd=cwd,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def state_of(home: Path, ws: Path) -> str:
    [run] = json.loads(treenail(home, ws, "list", "--json").stdout)
    return f"{run['state']} {run['reason']}".strip()


def test_a_question_outlives_the_process(home: Path, ws: Path) -> None:
    """After a kill the session is loaded, the question is asked again, and the answer resumes the run."""
    model = script(home / "s.json", [{"text": "I write."} | WRITE, "Done."])
    with editor(home, "--model", model, "--ask") as zed:
        zed.initialize()
        session = zed.new(ws)
        zed.answers["session/request_permission"] = lambda params: None
        zed.begin_prompt(session, "write it")
        zed.wait_for(lambda e: e.asked)
        zed.process.kill()
        zed.process.wait()
    assert state_of(home, ws) == "held hold"
    assert (ws / "a.txt").read_text() == "old\n"
    with editor(home, "--model", model, "--ask") as again:
        again.initialize()
        again.answers["session/request_permission"] = lambda params: ALLOW
        again.request("session/load", sessionId=session, cwd=str(ws), mcpServers=[])
        assert again.of("tool_call")[0]["status"] == "pending"
        again.wait_for(lambda e: "Done." in e.said())
        [question] = again.asked
        assert question["params"]["toolCall"]["toolCallId"] == again.of("tool_call")[0]["toolCallId"]
        # The next prompt waits for the end of what the answer has resumed.
        with pytest.raises(Refused, match="provider_error"):
            again.prompt(session, "one more than the script has")
    assert (ws / "a.txt").read_text() == "new\n"


def test_a_mode_that_a_person_chose_holds_after_a_restart(home: Path, ws: Path) -> None:
    """In the editor, whatever the settings say, and for the command line that resumes the run."""
    model = script(home / "s.json", ["Ready.", WRITE, "Refused.", WRITE, "Refused again."])
    with editor(home, "--model", model, "--auto") as zed:
        zed.initialize()
        session = zed.new(ws)
        zed.prompt(session, "hello")
        zed.request("session/set_mode", sessionId=session, modeId="read-only")
    with editor(home, "--model", model, "--auto") as again:
        again.initialize()
        loaded = again.request("session/load", sessionId=session, cwd=str(ws), mcpServers=[])
        assert loaded["modes"]["currentModeId"] == "read-only"
        again.prompt(session, "write")
        assert again.of("tool_call_update")[-1]["status"] == "failed"
    assert "Refused again." in treenail(home, ws, "run", "--continue", "write").stdout
    assert (ws / "a.txt").read_text() == "old\n"


FAKE = {
    "name": "fake",
    "command": sys.executable,
    "args": ["-I", "-S", str(Path(__file__).parents[1] / "mcp_client" / "fake_server.py"), "good"],
    "env": [],
}


@pytest.mark.parametrize("then", ["cancels", "leaves"])
def test_a_question_of_a_server_that_is_not_answered_leaves_an_unknown_outcome(
    home: Path, ws: Path, then: str
) -> None:
    """The server had begun the call: it is not made again, and the model is told."""
    pay = {"calls": [{"name": "fake__ask", "arguments": {"url": True}}]}
    model = script(home / "s.json", [pay, "I look first."])
    with editor(home, "--model", model, "--auto") as zed:
        zed.initialize()
        # The permission is given, the server's question is left open.
        zed.answers["session/request_permission"] = lambda params: ALLOW if len(zed.asked) == 1 else None
        session = zed.request("session/new", cwd=str(ws), mcpServers=[FAKE])["sessionId"]
        answer = zed.begin_prompt(session, "pay")
        zed.wait_for(lambda e: len(e.asked) == 2)
        if then == "cancels":
            zed.notify("session/cancel", sessionId=session)
            assert answer()["stopReason"] == "cancelled"
        assert zed.process.stdin is not None
        zed.process.stdin.close()
        assert zed.process.wait(timeout=240) == 0
    assert state_of(home, ws) == "interrupted cancelled"
    resumed = treenail(home, ws, "resume", session)
    assert "I look first." in resumed.stdout, resumed.stderr
    shown = treenail(home, ws, "show", session).stdout
    assert "The outcome of fake__ask is unknown" in shown


@pytest.mark.parametrize("end", ["closes its pipes", "is told to end"])
def test_an_editor_that_leaves_interrupts_the_turn(home: Path, ws: Path, end: str) -> None:
    """The command is ended, the log has the ending, and the command line resumes the run."""
    model = script(home / "s.json", [SLEEP, "Awake."])
    with editor(home, "--model", model) as zed:
        zed.initialize()
        session = zed.new(ws)
        answer = zed.begin_prompt(session, "sleep")
        zed.wait_for(lambda e: e.of("tool_call"))
        if end == "closes its pipes":
            assert zed.process.stdin is not None
            zed.process.stdin.close()
            assert answer()["stopReason"] == "cancelled"
        else:
            zed.process.send_signal(signal.SIGTERM)
            with pytest.raises(Refused, match="terminated"):
                answer()
        assert zed.process.wait(timeout=240) == 0
    kind = "cancelled" if end == "closes its pipes" else "terminated"
    assert state_of(home, ws) == f"interrupted {kind}"
    assert not (ws / "started").exists()
    script(home / "s.json", [{"text": "I do not sleep again."} | WRITE, "Resumed."])
    resumed = treenail(home, ws, "resume", session, "--read-only")
    assert "Resumed." in resumed.stdout, resumed.stderr


@pytest.mark.parametrize("then", ["cancels", "leaves"])
def test_a_prompt_can_be_stopped_from_its_first_moment(home: Path, ws: Path, then: str) -> None:
    """Both messages arrive at once; nothing is changed, and nothing is called completed."""
    model = script(home / "s.json", [WRITE, "Written."])
    with editor(home, "--model", model, "--auto") as zed:
        zed.initialize()
        session = zed.new(ws)
        zed.wait_for(lambda e: e.of("available_commands_update"))
        before = (ws / "a.txt").read_text()
        prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "write"}]}
        lines = [{"id": 900, "method": "session/prompt", "params": prompt}]
        if then == "cancels":
            lines.append({"method": "session/cancel", "params": {"sessionId": session}})
        assert zed.process.stdin is not None
        answer = zed.expect(900)
        zed.process.stdin.write(
            b"".join(json.dumps({"jsonrpc": "2.0"} | each).encode() + b"\n" for each in lines)
        )
        zed.process.stdin.flush()
        if then == "cancels":
            assert answer()["stopReason"] == "cancelled"
        zed.process.stdin.close()
        assert zed.process.wait(timeout=240) == 0
    assert (ws / "a.txt").read_text() == before
    assert "completed" not in state_of(home, ws)


def test_an_editor_that_is_killed_interrupts_the_turn(home: Path, ws: Path) -> None:
    """SIGKILL of the editor: its end of the pipes closes, and nothing else tells the agent."""
    model = script(home / "s.json", [SLEEP, "Awake."])
    program = (
        "import json, subprocess, sys\n"
        "agent = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(agent.pid, flush=True)\n"
        "def send(number, method, params):\n"
        "    line = {'jsonrpc': '2.0', 'id': number, 'method': method, 'params': params}\n"
        "    agent.stdin.write(json.dumps(line).encode() + b'\\n'); agent.stdin.flush()\n"
        "send(1, 'initialize', {'protocolVersion': 1})\n"
        "send(2, 'session/new', {'cwd': sys.argv[1], 'mcpServers': []})\n"
        "for line in agent.stdout:\n"
        "    said = json.loads(line)\n"
        "    if said.get('id') == 2:\n"
        "        id = said['result']['sessionId']\n"
        "        send(3, 'session/prompt', {'sessionId': id, 'prompt': [{'type': 'text', 'text': 'go'}]})\n"
        "    if 'tool_call' in line.decode():\n"
        "        print('running', flush=True)\n"
    )
    agent = [sys.executable, "-m", "treenail", "acp", "--model", model]
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(ws), *agent],
        stdout=subprocess.PIPE,
        env=environment(home),
        text=True,
    )
    try:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert killed.stdout.readline() == "running\n"
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
    wait_for_end(pid)
    assert state_of(home, ws) == "interrupted cancelled"


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is not our child; a descriptor of it becomes readable."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 240)[0], "the agent outlives its editor"
    finally:
        os.close(descriptor)


def test_a_run_of_the_command_line_is_continued_in_an_editor_and_back(home: Path, ws: Path) -> None:
    """It is one run, with one history; while one of the two writes it, the other is told who does."""
    model = script(home / "s.json", {"first": ["From the terminal.", "From the editor.", SLEEP, "x"]})
    assert treenail(home, ws, "run", "first", "--model", model).returncode == 0
    [run] = json.loads(treenail(home, ws, "list", "--json").stdout)
    with editor(home) as zed:
        zed.initialize()
        [listed] = zed.request("session/list", cwd=str(ws))["sessions"]
        assert (listed["sessionId"], listed["title"]) == (run["id"], "first")
        zed.request("session/load", sessionId=run["id"], cwd=str(ws), mcpServers=[])
        assert zed.said() == "From the terminal."
        assert zed.prompt(run["id"], "and now")["stopReason"] == "end_turn"
        answer = zed.begin_prompt(run["id"], "sleep")
        zed.wait_for(lambda e: e.of("tool_call"))
        refused = treenail(home, ws, "resume", run["id"])
        assert refused.returncode != 0
        assert f"process {zed.process.pid}" in refused.stderr
        with editor(home) as other:
            other.initialize()
            other.request("session/load", sessionId=run["id"], cwd=str(ws), mcpServers=[])
            with pytest.raises(Refused, match=f"process {zed.process.pid}"):
                other.prompt(run["id"], "me too")
        zed.notify("session/cancel", sessionId=run["id"])
        assert answer()["stopReason"] == "cancelled"
    shown = treenail(home, ws, "show", run["id"]).stdout
    assert "From the editor." in shown
    script(home / "s.json", {"first": ["From the terminal.", "From the editor.", {"text": "-"} | WRITE, "y"]})
    assert "y" in treenail(home, ws, "resume", run["id"], "--read-only").stdout


def test_a_question_that_two_editors_ask_is_answered_once(home: Path, ws: Path) -> None:
    """The second answer is refused, and says what to do; the call runs once."""
    model = script(home / "s.json", [{"text": "I write."} | WRITE, "Done."])
    answered = threading.Event()
    with editor(home, "--model", model, "--ask") as first, editor(home, "--model", model, "--ask") as second:
        first.initialize()
        session = first.new(ws)
        first.answers["session/request_permission"] = lambda params: answered.wait(240) and ALLOW
        answer = first.begin_prompt(session, "write it")
        first.wait_for(lambda e: e.asked)
        second.initialize()
        second.answers["session/request_permission"] = lambda params: ALLOW
        second.request("session/load", sessionId=session, cwd=str(ws), mcpServers=[])
        second.wait_for(lambda e: "Done." in e.said())
        answered.set()
        with pytest.raises(Refused, match="answered elsewhere; load the session again"):
            answer()
    assert state_of(home, ws) == "completed"
    assert (ws / "a.txt").read_text() == "new\n"


def test_nothing_but_the_protocol_reaches_the_output(home: Path, ws: Path) -> None:
    """A tool that prints, a library, a program that it starts, and one that reads the input."""
    agent = home / "printing.py"
    agent.write_text(
        "import os, subprocess, sys\n"
        "from treenail import Agent, tool\n"
        "print('loaded')\n"
        "@tool(effects='none')\n"
        "def shout() -> str:\n"
        '    """Print in every way."""\n'
        "    print('print')\n"
        "    sys.stdout.write('write')\n"
        "    sys.stdout.flush()\n"
        "    sys.__stdout__.write('original')\n"
        "    os.write(1, b'descriptor')\n"
        "    subprocess.run(['sh', '-c', 'echo child; cat'])\n"
        "    return 'read: ' + repr(sys.stdin.read())\n"
        "agent = Agent('loud', tools=[shout])\n"
    )
    model = script(home / "s.json", [{"calls": [{"name": "shout", "arguments": {}}]}, "Quiet."])
    with editor(home, "--model", model, "--agent", f"{agent}:agent") as zed:
        zed.initialize()
        assert zed.prompt(zed.new(ws), "shout")["stopReason"] == "end_turn"
        assert zed.garbage == []
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in zed.lines)
        assert "read: ''" in json.dumps(zed.of("tool_call_update")[-1])


def test_a_tool_that_asks_for_itself_is_asked_about_in_every_mode(home: Path, ws: Path) -> None:
    """Such as one that its MCP server calls destructive: "auto" does not run it unasked."""
    agent = home / "asking.py"
    agent.write_text(
        "from treenail import Agent, tool\n"
        "@tool(effects='external', asks=True)\n"
        "def launch() -> str:\n"
        '    """Launch."""\n'
        "    return 'launched'\n"
        "agent = Agent('careful', tools=[launch])\n"
    )
    model = script(home / "s.json", [{"calls": [{"name": "launch", "arguments": {}}]}, "Over."])
    with editor(home, "--model", model, "--agent", f"{agent}:agent", "--auto") as zed:
        zed.initialize()
        zed.answers["session/request_permission"] = lambda params: {
            "outcome": {"outcome": "selected", "optionId": "reject"}
        }
        assert zed.prompt(zed.new(ws), "launch")["stopReason"] == "end_turn"
        assert len(zed.asked) == 1
        assert zed.of("tool_call_update")[-1]["status"] == "failed"


def test_a_line_that_is_not_json_is_answered_and_survived(home: Path, ws: Path) -> None:
    """So is a line that is JSON and not a message."""
    with editor(home, "--model", script(home / "s.json", ["Fine."])) as zed:
        assert zed.process.stdin is not None
        zed.process.stdin.write(b"not json\n[]\n\n5\n")
        zed.process.stdin.flush()
        zed.wait_for(lambda e: len(e.errors) == 3)
        assert {each["code"] for each in zed.errors} == {-32700}
        zed.initialize()
        assert zed.prompt(zed.new(ws), "go")["stopReason"] == "end_turn"


def test_a_missing_key_is_an_authentication_that_an_editor_can_show(home: Path, ws: Path) -> None:
    """The session is refused with the protocol's own error, and says which variable to set."""
    with editor(home) as zed:
        methods = zed.initialize()["authMethods"]
        with pytest.raises(Refused, match="API_KEY") as refused:
            zed.new(ws)
        assert refused.value.code == -32000
        with pytest.raises(Refused, match="API_KEY"):
            zed.request("authenticate", methodId=methods[0]["id"])


def test_always_is_remembered_for_the_project(home: Path, ws: Path) -> None:
    """The rule is in the user's settings, not in the project, and the next call asks nobody."""
    model = script(home / "s.json", {"a": [WRITE, "1"], "b": [WRITE, "2"]})
    with editor(home, "--model", model, "--ask") as zed:
        zed.initialize()
        zed.answers["session/request_permission"] = lambda params: {
            "outcome": {"outcome": "selected", "optionId": "always"}
        }
        zed.prompt(zed.new(ws), "a")
        options: Any = zed.asked[0]["params"]["options"]
        assert options[1]["name"] == "Always allow write_file: a.txt"
        zed.prompt(zed.new(ws), "b")
        assert len(zed.asked) == 1
    assert sorted(each.name for each in ws.iterdir()) == ["a.txt"]


def test_a_missing_extra_is_one_line_that_says_what_to_install(home: Path, ws: Path) -> None:
    """The SDK is imported only by this command."""
    program = (
        "import sys\n"
        "sys.modules['acp'] = None\n"
        "sys.argv = ['treenail', 'acp']\n"
        "from treenail.presenters.cli.main import main\n"
        "main()\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ws,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.count("\n") == 1
    assert "pip install '.[acp]'" in said.stderr

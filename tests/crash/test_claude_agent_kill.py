"""The process of a turn on the vendor's loop is killed: its CLI dies with it, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from claude_child import NOTER, provider_of

from treenail import Run, TurnState
from treenail.log.sqlite import SqliteLog
from treenail.providers import VendorSession
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.claude_wire import ClaudeWireServer
from treenail.tools import ToolInvoked

CHILD = Path(__file__).with_name("claude_child.py")


def started(server: ClaudeWireServer, where: Path, lives_for: int = 0) -> subprocess.Popen[bytes]:
    for each in ("home", "files"):
        (where / each).mkdir()
    command = [sys.executable, "-W", "error", str(CHILD), server.url, str(where), str(lives_for)]
    return subprocess.Popen(command)


def resumed(server: ClaudeWireServer, where: Path) -> Run:
    log = SqliteLog(where / "runs.db")
    run_id = log.sessions()[0].session_id
    log.close()
    return NOTER.resume(where / "runs.db", run_id, provider=provider_of(server.url, where))


def newest(server: ClaudeWireServer) -> str:
    return json.dumps(server.requests[-1].body["messages"])


TWO_NOTES = Answer("First.", [("note", {"line": "one"}), ("note", {"line": "two"})])


BOUNDARIES = {
    1: "after the start",
    2: "after the answer",
    3: "between two calls",
    4: "after the calls",
    5: "before the ending",
}


@pytest.mark.parametrize("lives_for", BOUNDARIES, ids=BOUNDARIES.values())
def test_a_killed_turn_is_resumed_and_no_finished_tool_is_run_twice(tmp_path: Path, lives_for: int) -> None:
    """SIGKILL, then another process: each note is taken once, and the model is told what really happened."""
    with ClaudeWireServer([TWO_NOTES, "Noted."]) as server:
        child = started(server, tmp_path, lives_for)
        assert child.wait(60) == -signal.SIGKILL
        with resumed(server, tmp_path) as run:
            assert (run.state, run.output) == (TurnState.COMPLETED, "Noted."), run.result.details
            ends = run.execution_state.session[ToolInvoked].all()
            assert [each.success for each in ends] == [True, True]
            roles = [each.role for each in run.messages]
            assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
            vendors = len(run.execution_state.session[VendorSession].all())
        assert [each.violations for each in server.requests] == [()] * len(server.requests)
        # The vendor's own conversation goes on if it has our newest answer; one that was killed too early
        # has not, and then a new one is told everything.
        assert all(text in newest(server) for text in ("First.", "noted one", "noted two"))
        assert vendors == (2 if "began elsewhere" in newest(server) else 1)
    assert (tmp_path / "files" / "notes.txt").read_text() == "one\ntwo\n"


def test_a_native_tool_dies_with_the_process_and_leaves_nothing(tmp_path: Path) -> None:
    """The CLI and the command that it ran are gone before the files are put back; the model is told."""
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    # The command holds the pipe open as long as anything of it lives.
    forever = "while :; do sleep 0.05; echo x >> late.txt; done"
    command = f"echo half > half.txt; exec 9>{pipe}; echo on >&9; ({forever})"
    script = [
        Answer("First.", [("note", {"line": "one"}), ("Bash", {"command": command})]),
        Answer("Noted."),
    ]
    with ClaudeWireServer(script) as server:
        child = started(server, tmp_path)
        with pipe.open("rb") as alive:
            assert alive.readline() == b"on\n"
            child.kill()
            child.wait(60)
            with resumed(server, tmp_path) as run:
                # The other end is closed: nothing holds it any more.
                assert alive.read() == b""
                assert (run.state, run.output) == (TurnState.COMPLETED, "Noted."), run.result.details
                told = [each.content for each in run.messages if each.role == "tool"]
                assert told[0] == "noted one"
                assert "cut off" in told[1]
        assert "cut off" in newest(server)
    files = {each.name: each.read_text() for each in (tmp_path / "files").iterdir()}
    assert files == {"notes.txt": "one\n"}


def test_another_provider_goes_on_with_a_killed_turn(tmp_path: Path) -> None:
    """The log is the truth, and belongs to nobody's loop."""
    with ClaudeWireServer([TWO_NOTES]) as server:
        child = started(server, tmp_path, 3)
        assert child.wait(60) == -signal.SIGKILL
    log = SqliteLog(tmp_path / "runs.db")
    provider = ScriptedProvider(["never", "Noted by another."])
    with NOTER.resume(
        log, log.sessions()[0].session_id, provider=provider, workspace=tmp_path / "files"
    ) as run:
        assert (run.state, run.output) == (TurnState.COMPLETED, "Noted by another.")
    assert (tmp_path / "files" / "notes.txt").read_text() == "one\ntwo\n"

"""The shell tool: commands in the workspace, and what the model is told of them."""

import inspect
import json
import os
import socket
import threading
from datetime import timedelta

import anyio
import pytest

from treenail.containment import CancellationToken
from treenail.errors import CancelledByToken, DeadlineExceededError, UsageError
from treenail.sandbox import Grants, Sandbox
from treenail.state import Deadline, ExecutionState, ResourceRegistry, Session
from treenail.testing.clock import FakeClock
from treenail.tools import CommandRan, ToolCall, ToolContext, ToolRunner, ToolStarted, shell_tool
from treenail.tools.shell import MAX_OUTPUT_BYTES, RunCommand, run_command
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem


@pytest.fixture
def workspace(tmp_path):
    root = tmp_path / "workspace"
    root.mkdir()
    return HostFilesystem(root, store=tmp_path / "store")


def context_of(filesystem, *, clock=None, **parts) -> ToolContext:
    resources = ResourceRegistry.build({Filesystem: filesystem})
    state = ExecutionState(session=Session(), resources=resources, **({"clock": clock} if clock else {}))
    return ToolContext(state, **parts)


def call(filesystem, *, tool=run_command, context=None, **arguments):
    """Call the tool as a model does, with JSON arguments."""
    context = context or context_of(filesystem)

    async def main():
        return await tool.call(tool.parse(json.dumps(arguments)), context)

    return anyio.run(main)


def test_it_says_what_it_is():
    """A foreign process on the workspace, run asynchronously, with examples that it accepts."""
    assert (run_command.effects, run_command.is_foreign, run_command.is_async) == ("workspace", True, True)
    for schema in run_command.parameters_schema["properties"].values():
        assert schema["description"]
    for example in run_command.examples:
        assert isinstance(example.input, RunCommand)
    assert inspect.iscoroutinefunction(run_command.handler)


def test_a_command_runs_in_the_workspace(workspace):
    """It sees the files, and its own files appear."""
    workspace.write("in.txt", "hello\n")
    result = call(workspace, command="cat in.txt; echo more > out.txt")
    assert result.success
    assert result.message.startswith("Exit code 0 after ")
    assert "--- output ---\nhello" in result.message
    assert workspace.read("out.txt").content == "more\n"


def test_it_can_run_in_a_directory(workspace):
    """Relative to the root."""
    workspace.mkdir("sub/dir")
    assert "/sub/dir" in call(workspace, command="pwd", directory="sub/dir").message


@pytest.mark.parametrize(
    ("directory", "says"),
    [
        ("..", "'..'"),
        ("/tmp", "absolute"),
        ("missing", "no such directory"),
        ("file.txt", "no such directory"),
        ("out", "outside"),
    ],
)
def test_it_runs_nowhere_else(workspace, directory, says):
    """A directory that is missing, or not in the workspace, is refused with a reason."""
    workspace.write("file.txt", "x")
    os.symlink("/", workspace.host_root / "out")
    result = call(workspace, command="touch trace", directory=directory)
    assert not result.success
    assert says in result.message


def test_an_exit_code_is_a_result(workspace):
    """A command that says no has still run: its output is shown and its files stay."""
    result = call(workspace, command="echo out; echo err >&2; touch made; exit 7")
    assert result.success
    assert result.message.startswith("Exit code 7 after ")
    assert "--- output ---\nout\n--- errors ---\nerr" in result.message
    assert workspace.exists("made")


def test_an_exit_code_can_be_a_failure(workspace):
    """If the operator wants it so: then the call fails, which rolls it back."""
    tool = shell_tool(undo_on_failure=True)
    result = call(workspace, tool=tool, command="echo why; exit 7")
    assert not result.success
    assert "Exit code 7" in result.message
    assert "why" in result.message
    assert "undone" in result.message
    assert call(workspace, tool=tool, command="true").success


def test_a_signal_is_named(workspace):
    """As such."""
    assert "ended by signal 9" in call(workspace, command="kill -9 $$").message


def test_silence_is_said(workspace):
    """No output is an answer, too."""
    assert "It wrote nothing." in call(workspace, command="true").message


def test_output_is_bounded(workspace):
    """Megabytes become a beginning, an end, and advice."""
    command = (
        "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last; yes err | head -n 900000 >&2"
    )
    result = call(workspace, command=command)
    assert len(result.message) < 2 * MAX_OUTPUT_BYTES + 1_000
    assert "first\nxxx" in result.message
    assert "\nlast\n" in result.message
    assert "bytes left out" in result.message
    assert "write it to a file" in result.message


def test_background_processes_are_mentioned(workspace):
    """The model learns that they were stopped."""
    os.mkfifo(workspace.host_root / "never")
    result = call(workspace, command="cat never & echo started")
    assert "left 1 processes running in the background; they were stopped" in result.message


def test_secrets_are_not_passed_on(workspace, monkeypatch):
    """Unless the operator allows one by name."""
    monkeypatch.setenv("HUSH_TOKEN", "one")
    monkeypatch.setenv("OPEN_TOKEN", "two")
    tool = shell_tool(allow_env=["OPEN_TOKEN"], env={"EXTRA": "three"})
    result = call(workspace, tool=tool, command='echo "[$HUSH_TOKEN][$OPEN_TOKEN][$EXTRA]"')
    assert "[][two][three]" in result.message


def test_a_timeout_fails_the_call(workspace):
    """The clock of the run decides; the answer says what happened and what to do."""
    os.mkfifo(workspace.host_root / "ready")
    os.mkfifo(workspace.host_root / "never")
    clock = FakeClock()

    def when_ready():
        (workspace.host_root / "ready").read_bytes()
        clock.advance(301)

    thread = threading.Thread(target=when_ready)
    thread.start()
    context = context_of(workspace, clock=clock)
    result = call(
        workspace, context=context, command="echo so far; echo > ready; cat never", timeout_seconds=300
    )
    thread.join()
    assert not result.success
    assert "stopped after 300 s" in result.message
    assert "so far" in result.message
    assert "undone" in result.message
    assert "timeout_seconds" in result.message


def test_a_deadline_is_earlier_than_a_timeout(workspace):
    """The run's deadline stops the command, and is reported as what it is."""
    os.mkfifo(workspace.host_root / "ready")
    os.mkfifo(workspace.host_root / "never")
    clock = FakeClock()

    def when_ready():
        (workspace.host_root / "ready").read_bytes()
        clock.advance(11)

    thread = threading.Thread(target=when_ready)
    thread.start()
    context = context_of(workspace, clock=clock, deadline=Deadline.after(timedelta(seconds=10), clock=clock))
    with pytest.raises(DeadlineExceededError):
        call(workspace, context=context, command="echo > ready; cat never")
    thread.join()


def test_a_cancelled_call_raises(workspace):
    """When nothing of the command is left."""
    os.mkfifo(workspace.host_root / "ready")
    os.mkfifo(workspace.host_root / "never")
    token = CancellationToken()

    def when_ready():
        (workspace.host_root / "ready").read_bytes()
        token.cancel(detail="by the user")

    thread = threading.Thread(target=when_ready)
    thread.start()
    with pytest.raises(CancelledByToken, match="by the user"):
        call(workspace, context=context_of(workspace, cancellation=token), command="echo > ready; cat never")
    thread.join()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"command": "  "}, "empty"),
        ({"command": "true", "timeout_seconds": 0}, "timeout_seconds"),
        ({"command": "true", "timeout_seconds": 1_000_000}, "timeout_seconds"),
    ],
)
def test_senseless_requests_are_refused(workspace, arguments, says):
    """With a sentence for the model."""
    result = call(workspace, **arguments)
    assert not result.success
    assert says in result.message


def test_a_workspace_in_memory_has_no_commands():
    """There is no directory for a process to work in; nor does a read-only view give one."""
    result = call(InMemoryFilesystem(), command="true")
    assert not result.success
    assert "not on disk" in result.message


def test_a_view_has_no_commands(workspace):
    """A command could write."""
    result = call(workspace.read_only_view(), command="touch trace")
    assert not result.success
    assert "read-only" in result.message
    assert not workspace.exists("trace")


@pytest.mark.parametrize("timeout_s", [0, -1, 10**9])
def test_the_operators_limits_must_make_sense(timeout_s):
    """A tool without a real timeout is not made."""
    with pytest.raises(UsageError, match="timeout_s"):
        shell_tool(timeout_s=timeout_s)


def test_a_foreign_call_is_rolled_back_with_what_the_command_did(workspace):
    """The tool's declaration and the workspace fit together: files that a command made, changed and
    deleted are as they were."""
    workspace.write("keep.txt", "old")
    workspace.write("gone.txt", "old")
    held = workspace.begin("call-1", tool_name=run_command.name, foreign=run_command.is_foreign)
    call(workspace, command="echo new > keep.txt; rm gone.txt; mkdir d; echo x > d/made; chmod 700 keep.txt")
    assert workspace.read("keep.txt").content == "new\n"
    held.rollback()
    assert workspace.read("keep.txt").content == "old"
    assert workspace.read("gone.txt").content == "old"
    assert not workspace.exists("d")


@pytest.mark.parametrize("kind", ["a socket", "a directory"])
def test_a_command_that_may_use_a_socket_acts_outside(tmp_path, kind):
    """What is behind a socket cannot be undone, so the call is external; a directory changes nothing."""
    granted = tmp_path / "granted"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "a socket":
            server.bind(str(granted))
        else:
            granted.mkdir()
        sandbox = Sandbox(grants=Grants(write=(granted,)))
        (tmp_path / "work").mkdir()
        with HostFilesystem(tmp_path / "work", store=tmp_path / "store", sandbox=sandbox) as workspace:
            session = Session()
            state = ExecutionState(session, ResourceRegistry.build({Filesystem: workspace}))
            runner = ToolRunner(state, {"run_command": run_command})
            assert runner.execute(ToolCall("c1", "run_command", {"command": "true"})).success
    (started,) = session[ToolStarted].all()
    assert started.effects == ("external" if kind == "a socket" else "workspace")
    (ran,) = session[CommandRan].all()
    assert ran.confinement == f"bubblewrap, no network, may write {granted}"

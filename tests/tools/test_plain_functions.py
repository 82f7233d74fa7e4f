"""A plain function that writes with `open` is a transaction like every other call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from treenail import Agent, tool
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolContext, ToolRunner, ToolStarted, handlers
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    (made / "a.txt").write_text("original")
    return made


def state_in(root: Path) -> ExecutionState:
    files: Any = HostFilesystem(root, store=root.parent / "store")
    return ExecutionState(Session(), ResourceRegistry.build({Filesystem: files}))


def test_what_a_function_wrote_with_open_is_undone_when_it_raises(root: Path) -> None:
    """Nobody told Treenail about files: the function takes no context and declares nothing."""

    @tool
    def rewrite(text: str) -> str:
        """Rewrite the file."""
        (root / "a.txt").write_text(text)
        (root / "new").mkdir()
        (root / "new/b.txt").write_text(text)
        if text == "bad":
            raise ValueError("half way")
        return "done"

    model = ScriptedProvider(
        [Answer(calls=[("rewrite", {"text": "bad"})]), Answer(calls=[("rewrite", {"text": "good"})]), "Done."]
    )
    with Agent("writer", tools=[rewrite]).run("go", provider=model, workspace=root) as run:
        failed, kept = run.tool_calls
        assert not failed.success and kept.success
        assert {each.path for each in kept.diff().changes} == {"a.txt", "new", "new/b.txt"}
    assert (root / "a.txt").read_text() == "good"


def test_it_leaves_no_trace_and_names_what_it_took_away(root: Path) -> None:
    state = state_in(root)

    def scribble() -> str:
        """Scribble."""
        (root / "b.txt").write_text("half")
        os.chmod(root / "a.txt", 0o600)
        raise RuntimeError("no")

    result = ToolRunner(state, {"scribble": Tool.wrap(scribble)}).execute(ToolCall("c1", "scribble"))
    assert not result.success and "b.txt" in result.message and "treenail recover" in result.message
    assert sorted(os.listdir(root)) == ["a.txt"]
    assert (root / "a.txt").stat().st_mode & 0o777 != 0o600


async def _async_writer(root: Path) -> None:
    (root / "b.txt").write_text("half")
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("options", "takes_context", "scanned"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"files": "any"}, True, True),
        ({"files": "context"}, False, False),
        ({"effects": "external"}, False, False),
        ({"effects": "none"}, False, False),
    ],
)
def test_only_a_call_that_may_write_past_us_is_scanned(
    root: Path, options: dict[str, Any], takes_context: bool, scanned: bool
) -> None:
    """`files="any"` has a tool with a context scanned; `files="context"` spares a function without one."""

    def plain() -> str:
        """Do it."""
        return "done"

    def with_context(*, context: ToolContext) -> str:
        """Do it."""
        return "done"

    made = Tool.wrap(with_context if takes_context else plain, name="it", **options)
    assert made.is_foreign == scanned
    state = state_in(root)
    assert ToolRunner(state, {"it": made}).execute(ToolCall("c1", "it")).success
    assert [each.foreign for each in state.session[ToolStarted].all()] == (
        [] if made.effects == "none" else [scanned]
    )


def test_a_killed_function_is_undone_by_the_next_process(root: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a plain function; the resume puts its files back and runs it again."""
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, signal, sys
            from treenail import Agent, tool
            from treenail.history import find_run
            from treenail.providers.scripted import Answer, ScriptedProvider

            root = pathlib.Path({str(root)!r})

            @tool
            def rewrite() -> str:
                "Rewrite the file."
                found = (root / "a.txt").read_text()
                (root / "a.txt").write_text("half way")
                (root / "b.txt").write_text("half way")
                if sys.argv[1] == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            agent, store = Agent("writer", tools=[rewrite]), {str(tmp_path / "runs.db")!r}
            model = ScriptedProvider([Answer(calls=[("rewrite", {{}})]), "Done."])
            if sys.argv[1] == "die":
                agent.run("go", provider=model, workspace=root, store=store)
            else:
                run_id = find_run(pathlib.Path(store), "@last")
                with agent.resume(store, run_id, provider=model) as run:
                    print(run.state.value, [each.content for each in run.messages if each.role == "tool"])
            """
        )
    )
    died = subprocess.run([sys.executable, script, "die"], check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (root / "a.txt").read_text() == "half way"
    again = subprocess.run([sys.executable, script, "resume"], check=False, capture_output=True, text=True)
    assert again.stdout == "completed ['original']\n", again.stderr


def test_a_function_that_does_not_stop_is_waited_for_only_so_long(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no token to look at. What it wrote so far is undone, and the result says that it still runs."""
    monkeypatch.setattr(handlers, "GRACE_S", 0.01)
    running, over = threading.Event(), threading.Event()

    @tool
    def hangs() -> str:
        """Write, and hang."""
        (root / "b.txt").write_text("half")
        running.set()
        over.wait(60)
        return "never"

    state = state_in(root)
    told: list[str] = []

    async def main() -> None:
        runner = ToolRunner(state, {"hangs": hangs})
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: runner.aexecute(
                    ToolCall("c1", "hangs"), record=lambda result: told.append(result.message) or ()
                )
            )
            await anyio.to_thread.run_sync(running.wait, 30)
            group.cancel_scope.cancel()

    try:
        anyio.run(main)
    finally:
        over.set()
    assert sorted(os.listdir(root)) == ["a.txt"]
    assert "did not stop" in told[-1]


def test_an_async_function_without_a_context_is_caught_as_well(root: Path) -> None:
    @tool
    async def scribble() -> str:
        """Scribble."""
        await _async_writer(root)
        return "never"

    result = ToolRunner(state_in(root), {"scribble": scribble}).execute(ToolCall("c1", "scribble"))
    assert not result.success
    assert sorted(os.listdir(root)) == ["a.txt"]


def test_a_file_name_cannot_steer_the_terminal_it_is_named_on(root: Path) -> None:
    """What a model's command calls its files is shown escaped wherever an undo names them."""
    name = "evil\x1b]0;owned\x07[red].txt"

    @tool
    def scribble() -> str:
        """Scribble."""
        (root / name).write_text("x")
        raise RuntimeError("no")

    result = ToolRunner(state_in(root), {"scribble": scribble}).execute(ToolCall("c1", "scribble"))
    assert "evil\\x1b" in result.message and "\x1b" not in result.message

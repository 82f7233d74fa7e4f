"""After a power cut in the middle of a call the run resumes.

The victim is killed in the middle of a call that has changed the workspace. Then its log is put back to
what it held after its last append, which is the most that a power cut can take away, while the workspace
keeps everything: its journal is synced before each change.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from treenail import Agent, tool
from treenail.errors import SessionNotFoundError, UsageError
from treenail.history import erase_run
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import ToolCall, ToolContext, ToolInvoked, ToolRunner, ToolStarted, recover
from treenail.turns import InnerLoop, TurnState
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

BEFORE = {"kept.txt": "kept\n", "changed.txt": "before\n", "deleted.txt": "still there\n"}
AFTER = {"kept.txt": "kept\n", "changed.txt": "after\n", "new/file.txt": "new\n"}


def change(context: ToolContext) -> str:
    files = context.filesystem
    assert files.read("changed.txt").content == "before\n", "the call found what its first attempt had left"
    files.write("changed.txt", "after\n")
    files.delete("deleted.txt")
    files.mkdir("new", parents=True)
    files.write("new/file.txt", "new\n")
    if os.environ.get("TREENAIL_TEST_VICTIM"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "changed"


@tool(effects="workspace")
def changes(*, context: ToolContext) -> str:
    """Change the workspace."""
    return change(context)


@tool(effects="workspace")
def warms_up(*, context: ToolContext) -> str:
    """Change the workspace, and live."""
    context.filesystem.write("kept.txt", "kept\n")
    return "done"


@tool(effects="external")
def acts(*, context: ToolContext) -> str:
    """Change the workspace, and perhaps the world."""
    return change(context)


AGENT = Agent("cut", tools=(changes, acts))


def script(name: str) -> ScriptedProvider:
    return ScriptedProvider([Answer("", [(name, {})]), "done"])


class CutLog(SqliteLog):
    """Keeps a copy of what is on the disk for sure."""

    def append(self, lease, drafts, *, expected_seq):
        super().append(lease, drafts, expected_seq=expected_seq)
        for suffix in ("", "-wal"):
            # By another process: closing a file that SQLite has open drops its locks.
            source = self.path.with_name(self.path.name + suffix)
            target = self.path.parent / "synced" / source.name
            subprocess.run(["cp", str(source), str(target)], check=True)


def contents(root: Path) -> dict[str, str]:
    return {str(each.relative_to(root)): each.read_text() for each in root.rglob("*") if each.is_file()}


def cut_off(directory: Path, name: str) -> SqliteLog:
    """Let a process die in a call, cut its power, and open what is left."""
    work = directory / "work"
    work.mkdir()
    (directory / "synced").mkdir()
    for path, content in BEFORE.items():
        (work / path).write_text(content)
    command = [sys.executable, __file__, str(directory), name]
    victim = subprocess.run(command, check=False, timeout=60, env={**os.environ, "TREENAIL_TEST_VICTIM": "1"})
    assert victim.returncode == -signal.SIGKILL
    assert contents(work) == AFTER, "the victim was to die after its changes"
    for each in ("runs.db", "runs.db-wal", "runs.db-shm"):
        (directory / each).unlink(missing_ok=True)
        if (directory / "synced" / each).exists():
            shutil.copy(directory / "synced" / each, directory / each)
    return SqliteLog(directory / "runs.db", heartbeat=False)


def loop_over(session: Session, directory: Path, name: str) -> InnerLoop:
    line = f"session-{session.session_id}"
    filesystem = HostFilesystem(
        directory / "work", store=directory / "runs.db.files", line=line, durable=True
    )
    return InnerLoop(
        state=ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem})),
        provider=script(name),
        prompt=AGENT.prompt,
        workspace=str(directory / "work"),
    )


def test_a_call_that_a_power_cut_interrupts_is_undone_and_made_again(tmp_path: Path) -> None:
    """The resumed run makes the call on the workspace as it was before."""
    log = cut_off(tmp_path, "changes")
    (info,) = log.sessions()
    log.close()
    with AGENT.resume(tmp_path / "runs.db", info.session_id, provider=script("changes")) as run:
        assert run.state is TurnState.COMPLETED
        invoked = run.execution_state.session[ToolInvoked].all()
        assert [(each.call_id, each.success) for each in invoked] == [("call_1_1", False), ("call_1_1", True)]
    assert contents(tmp_path / "work") == AFTER


def test_a_call_that_may_have_acted_outside_is_never_forgotten(tmp_path: Path) -> None:
    """Its start is on the disk before it acts: it is not made again, and the model is told."""
    log = cut_off(tmp_path, "acts")
    (info,) = log.sessions()
    with log, Session.open(log, info.session_id) as session:
        assert [each.tool_name for each in session[ToolStarted].all()] == ["acts"]
    with AGENT.resume(tmp_path / "runs.db", info.session_id, provider=script("acts")) as run:
        assert run.state is TurnState.COMPLETED
        invoked = run.execution_state.session[ToolInvoked].all()
        assert {(each.call_id, each.outcome) for each in invoked} == {("call_1_1", "unknown")}
    assert contents(tmp_path / "work") == BEFORE


@pytest.mark.parametrize("name", ["changes", "acts"])
def test_another_request_begins_on_a_clean_workspace(tmp_path: Path, name: str) -> None:
    """Also who does not resume the run finds nothing half done."""
    log = cut_off(tmp_path, name)
    (info,) = log.sessions()
    with log, Session.open(log, info.session_id) as session:
        loop = loop_over(session, tmp_path, name)
        loop.provider = ScriptedProvider(["nothing to do"])
        anyio.run(loop.run, "what is there?")
    assert contents(tmp_path / "work") == BEFORE


def test_a_call_whose_id_was_used_before_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Some providers use an id again: how the first call ended says nothing of the second."""
    log = cut_off(tmp_path, "used again")
    (info,) = log.sessions()
    with log, Session.open(log, info.session_id) as session:
        assert [each.name for each in session[ToolInvoked].all() if each.success] == ["warms_up"]
        (recovered,) = recover(loop_over(session, tmp_path, "changes").state)
        assert (recovered.call_id, recovered.outcome) == ("call_1", "rolled_back")
    assert contents(tmp_path / "work") == BEFORE


def test_a_run_is_not_erased_over_a_call_that_was_cut_off(tmp_path: Path) -> None:
    """What the call has changed can be undone only as long as the run is there."""
    log = cut_off(tmp_path, "changes")
    (info,) = log.sessions()
    log.close()
    store, work = tmp_path / "runs.db", tmp_path / "work"
    with pytest.raises(UsageError, match=rf"'call_1_1' of run {info.session_id} .*nothing was erased"):
        erase_run(store, info.session_id)
    assert contents(work) == AFTER
    with AGENT.resume(store, info.session_id, provider=ScriptedProvider(["never mind"])):
        pass
    erase_run(store, info.session_id)
    with pytest.raises(SessionNotFoundError):
        erase_run(store, info.session_id)


def test_a_call_that_was_cut_off_can_be_abandoned(tmp_path: Path) -> None:
    """Then the workspace is left as it is, as erasing always does."""
    log = cut_off(tmp_path, "changes")
    (info,) = log.sessions()
    log.close()
    erase_run(tmp_path / "runs.db", info.session_id, abandon=True)
    assert contents(tmp_path / "work") == AFTER


def main(directory: Path, name: str) -> None:
    session = Session(log=CutLog(directory / "runs.db"), tags={"agent": "cut"})
    loop = loop_over(session, directory, name)
    if name == "used again":
        runner = ToolRunner(loop.state, {each.name: each for each in (warms_up, changes)})
        runner.execute(ToolCall("call_1", "warms_up"))
        runner.execute(ToolCall("call_1", "changes"))
    anyio.run(loop.run, "change something")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

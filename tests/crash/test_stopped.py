"""A process is stopped at every file operation of a call; another one takes over; the first one is continued.

The promise: the files are the second one's, always.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.crash.killing import END, EVERY_MOMENT, Disk, Moment, Watch, moments, stopped
from tests.forks import ended, in_child

from treenail import tool
from treenail.agent import close_state, end_other_writers, open_state, reopened
from treenail.log.sqlite import SqliteLog
from treenail.state import Session
from treenail.tools import SessionForked, ToolCall, ToolContext, ToolRunner, filesystem_of, shell_tool
from treenail.workspace import writer_for_turn

NOBODY = 65534
STOPS = {0: 10, NOBODY: 4}
"""How many moments of each script are tried, as root and as an ordinary user."""

PATHS = ("a.txt", "deleted.txt", "moved.txt", "new/file.txt", "target.txt")
THEIRS = dict.fromkeys(PATHS, "B\n")


@tool(effects="workspace")
def change(fail: bool, *, context: ToolContext) -> str:
    """Change files in each way that there is."""
    files = context.filesystem
    files.write("a.txt", "A\n")
    files.write("new/file.txt", "A\n")
    files.delete("deleted.txt")
    files.move("moved.txt", "target.txt")
    files.chmod("a.txt", 0o600)
    if fail:
        raise ValueError("undo it all")
    return "done"


@tool(effects="workspace")
def change_by_hand(fail: bool) -> str:
    """Change files past the context, and fail: the whole tree is looked at, and everything goes back."""
    root = Path(os.environ["STOPPED_ROOT"])
    (root / "a.txt").write_text("A\n")
    (root / "new").mkdir()
    (root / "new/file.txt").write_text("A\n")
    (root / "deleted.txt").unlink()
    (root / "moved.txt").rename(root / "target.txt")
    raise ValueError("undo it all")


@tool(effects="workspace")
def take(*, context: ToolContext) -> str:
    """Write all of the files."""
    for each in PATHS:
        context.filesystem.write(each, "B\n")
    return "done"


COMMAND = "set -e; mkdir new; echo A > a.txt; echo A > new/file.txt; rm deleted.txt; mv moved.txt target.txt"
SCRIPTS = {
    "kept": ("change", {"fail": False}),
    "undone": ("change", {"fail": True}),
    "undone by scan": ("change_by_hand", {"fail": True}),
    "command": ("run_command", {"command": COMMAND}),
}


class World:
    """A workspace, a store, and the runs in it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "workspace"
        self.store = base / "runs.db"
        self.first = self.second = UUID(int=0)

    def make(self, uid: int) -> None:
        """Make it anew, as a user."""
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir()
        os.chown(self.base, uid, uid)
        self.first, self.second = in_child(lambda: self._made(uid))

    def _made(self, uid: int) -> tuple[UUID, UUID]:
        os.setuid(uid)
        self.root.mkdir()
        for name in ("a.txt", "deleted.txt", "moved.txt"):
            (self.root / name).write_text("original\n")
        log = SqliteLog(self.store)
        runs = []
        for _ in range(2):
            session = Session(log=log)
            session.dispatch(SessionForked("", 0, "", "before", str(self.root)))
            runs.append(session.session_id)
            session.close()
        log.close()
        return runs[0], runs[1]

    def work(self, script: str, uid: int) -> Callable[[Watch], None]:
        """Return the work of the first process: one call."""
        name, arguments = SCRIPTS[script]

        def run(watch: Watch) -> None:
            os.setuid(uid)
            os.environ["STOPPED_ROOT"] = str(self.root)
            with reopened(self.store, self.first) as state:
                tools = {each.name: each for each in (change, change_by_hand, shell_tool())}
                runner = ToolRunner(state, tools)
                with watch(), writer_for_turn(filesystem_of(state)):
                    runner.execute(ToolCall("call-a", name, arguments))

        return run

    def resume(self, uid: int) -> None:
        """Take the first run over, and make a call in it."""
        os.setuid(uid)
        with reopened(self.store, self.first, take_over=True) as state:
            assert ToolRunner(state, {"take": take}).execute(ToolCall("call-b", "take", {})).success

    def run_other(self, uid: int) -> None:
        """Make a call in another run on the same workspace."""
        os.setuid(uid)
        log = SqliteLog(self.store)
        end_other_writers(log, self.second)
        state, _ = open_state(Session.open(log, self.second), self.root, self.store)
        assert ToolRunner(state, {"take": take}).execute(ToolCall("call-b", "take", {})).success
        close_state(state, self.store)

    def recover(self, uid: int) -> None:
        """Undo what the first process left."""
        os.setuid(uid)
        with reopened(self.store, self.first):
            pass

    def files(self) -> dict[str, str]:
        """Return what is in the workspace."""
        # A scan that was cut off may leave a half-written file until its own run is resumed.
        found = (each for each in self.root.rglob("*") if each.is_file() and not each.name.endswith("-0.tmp"))
        return {each.relative_to(self.root).as_posix(): each.read_text() for each in found}


@pytest.fixture
def world() -> Iterator[World]:
    # Not below pytest's own directory, which only root may enter.
    base = Path(tempfile.mkdtemp(prefix="treenail-stopped-"))
    base.chmod(0o755)
    yield World(base / "world")
    shutil.rmtree(base)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("uid", STOPS, ids=("root", "nobody"))
def test_what_a_stopped_process_had_begun_never_reaches_the_files_of_its_successor(
    world: World, script: str, uid: int
) -> None:
    """Stopped at any file operation of a call that is kept or undone; then it is replaced, and continued.

    Its successor resumes its run, or works in another run on the same files. The latter does not end a
    process that has not begun to write, or is done: that one finds its target taken, and undoes its own call.
    If it was ended, its run still has a call to undo, which leaves alone what the other run wrote.
    """
    for number, moment in enumerate(_moments(world, script, uid)):
        world.make(uid)
        child = stopped(world.work(script, uid), moment, Disk([world.base]))
        assert child is not None, f"never came: {moment}"
        is_resume = number % 2 == 0
        in_child(lambda: world.resume(uid) if is_resume else world.run_other(uid))  # noqa: B023  # called here
        os.kill(child, signal.SIGCONT)
        assert ended(child) in ((-signal.SIGKILL,) if is_resume else (-signal.SIGKILL, 0)), moment
        if not is_resume and script != "undone by scan":
            in_child(lambda: world.recover(uid))
        assert world.files() == THEIRS, moment


def _moments(world: World, script: str, uid: int) -> list[Moment]:
    world.make(uid)
    unread = [str(world.store), str(world.base / "runs.db.files/treenail/writer-")]
    found, _ = moments(world.work(script, uid), Disk([world.base], unread))
    found = [each for each in found if each.when != "within" and each != END]
    assert len(found) > 10
    return found if EVERY_MOMENT else found[:: -(-len(found) // STOPS[uid])]

"""One workspace, one writing process: who may write, who is refused, what a replaced writer can still do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.forks import ended, fork, in_child

from treenail.errors import StaleWorkspaceError, WorkspaceBusyError
from treenail.workspace import end_other_writer
from treenail.workspace.host import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    (made / "a.txt").write_text("original\n")
    return made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def process(work: Callable[[Callable[[], None]], object]) -> Iterator[int]:
    """Run a process that does the work up to where it calls what it is given; it is stopped there."""
    read, write = os.pipe()

    def ready() -> None:
        os.write(write, b".")
        os.kill(os.getpid(), signal.SIGSTOP)

    child = fork(lambda: work(ready))
    os.close(write)
    try:
        assert os.read(read, 1) == b"."
        os.waitpid(child, os.WUNTRACED)
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        ended(child)


def hold(root: Path, store: Path, line: str = "a") -> Callable[[Callable[[], None]], None]:
    """Return the work of a process that writes a file in a call and is stopped before the call's end."""

    def work(ready: Callable[[], None]) -> None:
        fs = HostFilesystem(root, store=store, line=line)
        call = fs.begin("call", tool_name="write")
        fs.write("a.txt", "A\n")
        ready()
        call.finish()

    return work


def test_a_stopped_process_keeps_the_workspace_and_the_next_one_is_told_who_it_is(
    root: Path, store: Path
) -> None:
    """Another run is refused too, before it changes anything; reading needs nobody's leave."""
    with process(hold(root, store)) as pid, HostFilesystem(root, store=store, line="b") as fs:
        with pytest.raises(
            WorkspaceBusyError, match=rf"process {pid} \(which is stopped\).*since 20\d\d-"
        ) as no:
            fs.begin("call")
        assert no.value.since and f"/{pid}/" in no.value.owner and "--take-over" in str(no.value)
        with pytest.raises(WorkspaceBusyError):
            fs.write("b.txt", "B")
        with pytest.raises(WorkspaceBusyError):
            fs.snapshot(scan=True)
        assert fs.read("a.txt").content == "A\n"
        assert [each.path for each in fs.list()] == ["a.txt"]
        fs.snapshot()


def test_taking_over_ends_the_process_first(root: Path, store: Path) -> None:
    """Afterwards the other one is dead, and its call can be undone."""
    with process(hold(root, store)) as pid, HostFilesystem(root, store=store, line="a") as fs:
        assert end_other_writer(store, root)
        assert not end_other_writer(store, root)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
        fs.recover("call", committed=False)
        assert fs.read("a.txt").content == "original\n"


def test_a_process_that_dies_or_ends_its_call_leaves_the_workspace_free(root: Path, store: Path) -> None:
    """Only a living process keeps it, and only as long as it needs it."""
    with process(hold(root, store)) as pid:
        os.kill(pid, signal.SIGCONT)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0
        with HostFilesystem(root, store=store, line="b") as fs:
            fs.write("a.txt", "B\n")
    with process(hold(root, store)) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with HostFilesystem(root, store=store, line="b") as fs:
            fs.write("a.txt", "B\n")


def test_a_turn_keeps_the_workspace_from_its_first_change_to_its_end(root: Path, store: Path) -> None:
    """Not before, not after, and not while a person is waited for."""

    def is_free() -> bool:
        def can_write() -> bool:
            with HostFilesystem(root, store=store, line="b") as other:
                try:
                    other.write("b.txt", "B")
                except WorkspaceBusyError:
                    return False
                return True

        return in_child(can_write)

    with HostFilesystem(root, store=store, line="a") as fs:
        with fs.turn():
            fs.read("a.txt")
            assert is_free()
            with fs.turn():  # A child's.
                fs.begin("one").finish()
            assert not is_free()
            fs.rest()
            assert is_free()
            fs.write("a.txt", "A\n")
            assert not is_free()
            call = fs.begin("two")
            fs.rest()
            assert not is_free()
            call.finish()
            assert not is_free()
        assert is_free()
        fs.write("a.txt", "again\n")
        assert is_free()
        call = fs.begin("three")
        assert not is_free()
        call.rollback()
        assert is_free()


def test_all_objects_of_a_process_share_the_workspace(root: Path, store: Path) -> None:
    """Two runs of one process write side by side; the last of them to end gives the workspace back."""

    def is_refused() -> bool:
        with HostFilesystem(root, store=store, line="c") as other:
            try:
                other.begin("call")
            except WorkspaceBusyError:
                return True
            return False

    with (
        HostFilesystem(root, store=store, line="a") as one,
        HostFilesystem(root, store=store, line="b") as two,
    ):
        first, second = one.begin("call"), two.begin("call")
        one.write("a.txt", "one\n")
        two.write("b.txt", "two\n")
        first.finish()
        assert in_child(is_refused)
        second.finish()
        assert not in_child(is_refused)


def test_a_forked_child_neither_keeps_the_workspace_nor_writes_to_it(root: Path, store: Path) -> None:
    """The lock belongs to the process that took it, whatever descriptors others have inherited."""
    with HostFilesystem(root, store=store) as fs:
        call = fs.begin("call")

        def writes() -> str:
            try:
                fs.write("a.txt", "child\n")
            except StaleWorkspaceError as error:
                return str(error)
            return "it wrote"

        assert "not the writer" in in_child(writes)
        call.rollback()

    read, write = os.pipe()

    def with_child() -> None:
        def tell() -> None:
            os.write(write, b"%d\n" % fork(signal.pause))
            signal.pause()

        hold(root, store)(tell)

    parent = fork(with_child)
    child = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    ended(parent)
    try:
        with HostFilesystem(root, store=store, line="b") as fs:
            fs.write("b.txt", "B")
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_writer_whose_epoch_is_old_changes_and_undoes_nothing_more(root: Path, store: Path) -> None:
    """Here the lock was lost to another machine, as a network filesystem may lose it."""
    fs = HostFilesystem(root, store=store)
    call = fs.begin("call")
    fs.write("a.txt", "A\n")
    stream = fs.open_write("b.txt")
    stream.write(b"late")
    [record] = (store / "treenail").glob("writer-*")
    newer = json.loads(record.read_text()) | {"epoch": 99, "owner": "treenail/other/1/2/3/4"}
    record.write_text(json.dumps(newer) + "\n")
    (root / "a.txt").write_text("B\n")
    for change in (
        lambda: fs.write("a.txt", "late"),
        lambda: fs.delete("a.txt"),
        lambda: fs.move("a.txt", "c.txt"),
        lambda: fs.mkdir("d"),
        lambda: fs.chmod("a.txt", 0o600),
        lambda: fs.symlink("e", "a.txt"),
        lambda: fs.restore(call.base),
        stream.close,
        call.prepare,
        call.rollback,
        call.finish,
        fs.check_epoch,
    ):
        with pytest.raises(StaleWorkspaceError, match="another container or machine has become its writer"):
            change()
    fs.close()
    assert {each.name: each.read_text() for each in root.iterdir()} == {"a.txt": "B\n"}
    assert json.loads(record.read_text()) == newer
    with HostFilesystem(root, store=store) as again:
        again.recover("call", committed=False)
        assert again.read("a.txt").content == "B\n"
        assert json.loads(record.read_text())["epoch"] == 100


def test_a_layer_is_not_applied_by_a_writer_whose_epoch_is_old(root: Path, store: Path) -> None:
    """What the command did stays in the layer, which is dropped."""
    fs = HostFilesystem(root, store=store)
    call = fs.undo.begin("call", tool_name="run_command", foreign=False)
    layer = call.open_layer()
    assert not isinstance(layer, str), layer
    (Path(layer.upper) / "a.txt").write_text("from the command\n")
    [record] = (store / "treenail").glob("writer-*")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"epoch": 99}) + "\n")
    for end in (call.prepare, call.rollback):
        with pytest.raises(StaleWorkspaceError):
            end()
    fs.close()
    assert (root / "a.txt").read_text() == "original\n"


def test_a_process_that_cannot_be_ended_is_not_taken_over(root: Path, store: Path) -> None:
    """An ordinary user is told to end root's process, and nothing changes hands."""
    if os.getuid() != 0:
        pytest.fail("run the tests as root: this one changes the user")
    with process(hold(root, store)) as pid:
        for each in (root, store, *store.rglob("*")):
            os.chmod(each, 0o777)
        for each in root.parents[:-1]:
            os.chmod(each, each.stat().st_mode | 0o755)

        def as_nobody() -> str:
            os.setuid(65534)
            try:
                end_other_writer(store, root)
            except WorkspaceBusyError as error:
                return str(error)
            return "it was ended"

        assert f"process {pid} (which is stopped)" in (said := in_child(as_nobody))
        assert "could not be ended (Operation not permitted)" in said
        assert os.path.exists(f"/proc/{pid}")

"""Undoing where it is hard: directories of others, hard links, great depth, a full disk, our own names."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from host_kit import as_nobody, look_at
from tests.forks import ProcessKilled, in_child

from treenail.workspace.host import HostFilesystem
from treenail.workspace.scan import MAX_SCAN_DEPTH


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


# --- whose directory it is --------------------------------------------------------------------------


def test_a_directory_of_another_users_breaks_no_undo(public_path: Path) -> None:
    """A container left a private directory of root's in the workspace of an ordinary user."""
    root = public_path / "workspace"
    (root / "theirs/inside").mkdir(parents=True)
    (root / "theirs/inside/file").write_text("root's")
    (root / "theirs").chmod(0o700)
    (root / "listed").mkdir()
    (root / "listed/file").write_text("root's")
    (root / "listed").chmod(0o744)
    root.chmod(0o777)

    def work() -> tuple[tuple[str, ...], list[str], str]:
        with HostFilesystem(root, store=public_path / "s") as fs:
            (root / "a.txt").write_text("original")
            for number in range(2):
                call = fs.begin(f"call-{number}", tool_name="run_command", foreign=True)
                (root / "a.txt").write_text("changed")
                (root / "new").mkdir()
                (root / "new/b.txt").write_text("new")
                report = call.rollback()
                assert not report.conflicts
            uncovered = call.base.uncovered
            fs.fork(fs.snapshot(), public_path / "fork").close()
        return uncovered, sorted(os.listdir(root)), (root / "a.txt").read_text()

    uncovered, names, content = as_nobody(work)
    assert [sentence.split(" is not covered")[0] for sentence in uncovered] == ["listed", "theirs"]
    assert (names, content) == (["a.txt", "listed", "theirs"], "original")
    assert stat.S_IMODE((root / "theirs").stat().st_mode) == 0o700
    assert (root / "theirs/inside/file").read_text() == "root's"


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o300, 0o400])
def test_ones_own_closed_directory_keeps_its_mode(public_path: Path, mode: int) -> None:
    """A directory that its owner closed is closed after an undo as well."""

    def work() -> tuple[int, list[str]]:
        root = public_path / "workspace"
        (root / "closed").mkdir(parents=True)
        (root / "closed/inside").write_text("x")
        (root / "closed").chmod(mode)
        with HostFilesystem(root, store=public_path / "s") as fs:
            call = fs.begin("call", foreign=True)
            (root / "new.txt").write_text("new")
            call.rollback()
        found = stat.S_IMODE((root / "closed").stat().st_mode), sorted(os.listdir(root))
        (root / "closed").chmod(0o700)
        return found

    assert as_nobody(work) == (mode, ["closed"])


def test_a_directory_that_a_command_closed_is_opened_again(public_path: Path) -> None:
    """What a failing command made unreadable, old or new, is put back or removed."""

    def work() -> dict[bytes, tuple[object, ...]]:
        root = public_path / "workspace"
        (root / "old").mkdir(parents=True)
        (root / "old").chmod(0o755)
        (root / "old/file").write_text("x")
        with HostFilesystem(root, store=public_path / "s") as fs:
            before = look_at(root)
            call = fs.begin("call", foreign=True)
            (root / "old/file").write_text("changed")
            (root / "old").chmod(0o400)
            (root / "new").mkdir()
            (root / "new/file").write_text("new")
            (root / "new/file").chmod(0)
            (root / "new").chmod(0)
            report = call.rollback()
            assert set(report.kept) == {"old/file", "new/file"}
        assert look_at(root) == before
        return before

    assert as_nobody(work)


# --- hard links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("one",), ("d/two",), ("one", "d/two"), ("d/two", "one")])
def test_chmod_of_a_file_with_two_names_is_undone(
    fs: HostFilesystem, root: Path, names: tuple[str, ...]
) -> None:
    """Both names show the old bits again, whichever was changed, and are still one file."""
    (root / "d").mkdir()
    (root / "one").write_text("x")
    (root / "one").chmod(0o640)
    os.link(root / "one", root / "d/two")
    call = fs.begin("call")
    for number, name in enumerate(names):
        fs.chmod(name, 0o600 + number)
    report = call.rollback()
    assert not report.conflicts
    assert (root / "one").samefile(root / "d/two")
    assert stat.S_IMODE((root / "one").stat().st_mode) == 0o640


def test_chmod_of_a_file_with_a_name_elsewhere_is_undone(
    fs: HostFilesystem, root: Path, tmp_path: Path
) -> None:
    """Also in a command, where the other name lies outside of the workspace."""
    (tmp_path / "outside").write_text("x")
    (tmp_path / "outside").chmod(0o640)
    os.link(tmp_path / "outside", root / "inside")
    for foreign in (False, True):
        call = fs.begin("call", foreign=foreign)
        (root / "inside").chmod(0o600) if foreign else fs.chmod("inside", 0o600)
        call.rollback()
        assert (root / "inside").samefile(tmp_path / "outside")
        assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == 0o640


def test_a_link_that_a_command_put_in_place_of_a_file_does_not_spread_its_bits(
    fs: HostFilesystem, root: Path
) -> None:
    """A file was replaced by another name of an equal one with other bits: that one keeps them."""
    (root / "a").write_text("same")
    (root / "a").chmod(0o644)
    (root / "b").write_text("same")
    (root / "b").chmod(0o600)
    before = look_at(root)
    call = fs.begin("call", foreign=True)
    (root / "a").unlink()
    os.link(root / "b", root / "a")
    call.rollback()
    assert look_at(root) == before
    assert not (root / "a").samefile(root / "b")


# --- great depth ------------------------------------------------------------------------------------


def test_directories_of_any_depth_are_removed(fs: HostFilesystem, root: Path) -> None:
    """A failing command made hundreds of nested directories with a file at the end."""
    (root / "a.txt").write_text("original")
    before = look_at(root)
    call = fs.begin("call", foreign=True)
    depth = 2 * MAX_SCAN_DEPTH + 7
    here = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    report = call.rollback()
    assert look_at(root) == before
    assert report.kept == ("/".join(["d"] * depth + ["file"]),)


def test_what_an_undo_cannot_reach_is_named(fs: HostFilesystem, root: Path) -> None:
    """A command that was kept made directories that are deeper than a scan goes."""
    (root / "a.txt").write_text("original")
    call = fs.begin("call", foreign=True)
    (root / "a.txt").write_text("changed")
    innermost = "/".join(["d"] * (MAX_SCAN_DEPTH + 10))
    os.makedirs(root / innermost)
    call.prepare()
    call.finish()
    report = fs.restore(replace(call.base, scanned=False))
    assert (root / "a.txt").read_text() == "original"
    assert not report.conflicts
    assert len(report.notes) == 1
    left, _, why = report.notes[0].partition(" was left: ")
    assert "not kept" in why
    assert (root / left).is_dir() and (root / left / "d").is_dir()


# --- special files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["layer", "scan"])
def test_a_pipe_that_a_command_made_is_no_obstacle(fs: HostFilesystem, root: Path, way: str) -> None:
    """It goes with the call that made it, and a redo says that it is not brought back."""
    (root / "a.txt").write_text("original")
    bases = []
    for number in (1, 2):
        call = fs.begin(f"call-{number}", tool_name="run_command", foreign=way == "scan")
        bases.append(replace(call.base, scanned=False))
        layer = None if way == "scan" else fs.open_layer()
        assert not isinstance(layer, str), layer
        place = root if layer is None else Path(layer.upper)
        (place / "a.txt").write_text(f"changed {number}")
        os.mkfifo(place / f"pipe-{number}")
        call.prepare()
        call.finish()
    after = fs.snapshot()
    assert fs.restore(bases[1]).conflicts == ()
    assert sorted(os.listdir(root)) == ["a.txt", "pipe-1"]
    assert fs.restore(bases[0]).conflicts == ()
    assert sorted(os.listdir(root)) == ["a.txt"]
    assert (root / "a.txt").read_text() == "original"
    notes = fs.restore(replace(after, scanned=False)).notes
    assert [each.partition(":")[0] for each in sorted(notes)] == [
        "pipe-1 was not brought back",
        "pipe-2 was not brought back",
    ]
    assert (root / "a.txt").read_text() == "changed 2"


# --- a full disk ------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A disk of a given size: a write fails when workspace and store would hold more than that."""
    write = os.write

    def used() -> int:
        return sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())

    def limit(size: int) -> None:
        def bounded(descriptor: int, data: bytes) -> int:
            if used() + len(data) > size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", bounded)

    return limit


@pytest.mark.parametrize("foreign", [False, True], ids=["plain", "command"])
def test_a_full_disk_does_not_stop_an_undo_that_frees_room(
    fs: HostFilesystem, root: Path, disk: Callable[[int], None], foreign: bool
) -> None:
    """A call filled the disk to the last byte, and is undone all the same."""
    (root / "old.txt").write_text("original" * 1000)
    (root / "note.txt").write_text("a note")
    before = look_at(root)
    call = fs.begin("call", foreign=foreign)
    if foreign:
        (root / "old.txt").write_text("changed" * 10_000)
        (root / "note.txt").write_text("a longer note of a person's")
        (root / "fill.bin").write_bytes(b"x" * 500_000)
    else:
        fs.write("old.txt", "changed" * 10_000)
        fs.write_bytes("fill.bin", b"x" * 500_000)
    disk(sum(each.stat().st_size for each in root.parent.rglob("*") if each.is_file()))
    report = call.rollback()
    assert look_at(root) == before
    if foreign:
        assert report.lost == ("fill.bin",)
        assert set(report.kept) == {"old.txt", "note.txt"}, "what fits once the largest file is gone is kept"


# --- names like ours --------------------------------------------------------------------------------


def test_a_file_that_is_named_like_our_temporary_ones_is_a_file_like_others(
    fs: HostFilesystem, root: Path, tmp_path: Path
) -> None:
    """It is listed, read, written, moved, kept by a snapshot, undone, and left alone by a recovery."""
    stream = fs.open_write("a.txt")
    (ours,) = os.listdir(root)
    stream.close()
    for name in (
        ".treenail-mine.tmp",
        ".treenail-.tmp",
        ".treenail-0123456789abcdef-1.tmp",
        f"{ours[:-8]}x-9.tmp",
    ):
        (root / name).write_text("original")
        assert name in [entry.name for entry in fs.list()]
        before = look_at(root)
        snapshot = fs.snapshot(scan=True)
        for foreign in (False, True):
            call = fs.begin("call", foreign=foreign)
            fs.write(name, "changed")
            fs.write(f"d/{name}", "made")
            call.rollback()
            assert look_at(root) == before
        call = fs.begin("command", foreign=True)
        (root / name).unlink()
        assert call.rollback().restored == (name,)
        assert look_at(root) == before
        fs.delete(name)
        fs.restore(snapshot)
        assert look_at(root) == before
        with fs.fork(snapshot, tmp_path / f"fork{name}") as fork:
            assert fork.read(name).content == "original"
        fs.delete(name)


def test_a_half_written_file_of_a_dead_process_is_removed_and_a_persons_is_not(
    root: Path, tmp_path: Path
) -> None:
    """A recovery knows the temporary files of the call that it undoes by the call's journal."""

    def die() -> None:
        fs = HostFilesystem(root, store=tmp_path / "store")
        fs.begin("call-1")
        fs.write("a.txt", "by the call")
        stream = fs.open_write("b.txt")
        stream.write(b"half")
        (root / ".treenail-mine.tmp").write_text("mine")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessKilled):
        in_child(die)
    assert len(os.listdir(root)) == 3
    with HostFilesystem(root, store=tmp_path / "store") as later:
        assert [entry.name for entry in later.list()] == [".treenail-mine.tmp", "a.txt"]
        later.recover("call-1", committed=False)
    assert os.listdir(root) == [".treenail-mine.tmp"]

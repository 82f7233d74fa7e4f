"""Replaced files come back as themselves, if that is proven; and nothing of that outlives its use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_kit import as_nobody, look_at

from treenail.workspace.history import sweep
from treenail.workspace.host import HostFilesystem
from treenail.workspace.originals import MAX_ORIGINALS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


def kept(tmp_path: Path) -> list[Path]:
    """Return the replaced files that have a name in the store."""
    directory = tmp_path / "store/treenail/main/originals"
    return sorted(directory.iterdir()) if directory.is_dir() else []


def make(path: Path, content: str = "before") -> os.stat_result:
    """Make a file with bits and a time of its own."""
    path.write_text(content)
    path.chmod(0o640)
    os.utime(path, ns=(10**18, 10**18))
    return path.stat()


Change = Callable[[HostFilesystem], object]


def stream(fs: HostFilesystem) -> None:
    with fs.open_write("a.txt") as file:
        file.write(b"streamed")


def write_and_delete(fs: HostFilesystem) -> None:
    fs.write("a.txt", "during")
    fs.delete("a.txt")


CHANGES: dict[str, Change] = {
    "written": lambda fs: fs.write("a.txt", "during"),
    "written twice": lambda fs: (fs.write("a.txt", "during"), fs.write("a.txt", "and again")),
    "appended to": lambda fs: fs.write("a.txt", "more", mode="append"),
    "streamed": stream,
    "written and deleted": write_and_delete,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_rollback_puts_the_very_file_back(
    fs: HostFilesystem, root: Path, tmp_path: Path, change: Change
) -> None:
    """It is the same inode, with its bits, its time, its content, and no second name."""
    before = make(root / "a.txt")
    call = fs.begin("call")
    change(fs)
    assert (root / "a.txt").exists() is (change is not write_and_delete)
    call.rollback()
    after = (root / "a.txt").stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 1)
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (root / "a.txt").read_text() == "before"
    fs.close()
    assert kept(tmp_path) == []


def test_restores_go_back_and_forth_with_the_same_two_files(fs: HostFilesystem, root: Path) -> None:
    """What a restore replaces is kept in turn."""
    make(root / "a.txt")
    inodes = {"before": (root / "a.txt").stat().st_ino}
    first = fs.snapshot()
    fs.write("a.txt", "during")
    inodes["during"] = (root / "a.txt").stat().st_ino
    second = fs.snapshot()
    for snapshot, content in [(first, "before"), (second, "during")] * 3:
        fs.restore(snapshot)
        assert (root / "a.txt").read_text() == content
        status = (root / "a.txt").stat()
        assert (status.st_ino, status.st_nlink) == (inodes[content], 1)


def test_a_file_that_was_written_to_meanwhile_is_not_put_back(fs: HostFilesystem, root: Path) -> None:
    """Somebody who had it open has changed it: the content that was kept counts."""
    before = make(root / "a.txt")
    with open(root / "a.txt", "r+") as file:
        call = fs.begin("call")
        fs.write("a.txt", "during")
        file.write("forged")
    assert call.rollback().conflicts == ()
    assert (root / "a.txt").read_text() == "before"
    after = (root / "a.txt").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_bits_and_times_that_were_changed_meanwhile_are_put_right(fs: HostFilesystem, root: Path) -> None:
    """A descriptor is enough to change those, too."""
    before = make(root / "a.txt")
    with open(root / "a.txt", "rb") as file:
        call = fs.begin("call")
        fs.write("a.txt", "during")
        os.fchmod(file.fileno(), 0o777)
        os.utime(file.fileno(), ns=(5, 5))
    call.rollback()
    after = (root / "a.txt").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_a_file_with_another_name_is_not_kept(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """The other name keeps the file to itself."""
    make(root / "a.txt")
    os.link(root / "a.txt", tmp_path / "other.txt")
    call = fs.begin("call")
    fs.write("a.txt", "during")
    assert kept(tmp_path) == []
    call.rollback()
    assert (root / "a.txt").read_text() == "before"
    assert not os.path.samefile(root / "a.txt", tmp_path / "other.txt")


def test_a_file_that_got_another_name_meanwhile_is_not_put_back(
    fs: HostFilesystem, root: Path, tmp_path: Path
) -> None:
    """A file that somebody else has taken hold of is theirs."""
    make(root / "a.txt")
    call = fs.begin("call")
    fs.write("a.txt", "during")
    (original,) = kept(tmp_path)
    os.link(original, tmp_path / "other.txt")
    call.rollback()
    assert (root / "a.txt").read_text() == "before"
    assert not os.path.samefile(root / "a.txt", tmp_path / "other.txt")
    assert (tmp_path / "other.txt").stat().st_nlink == 1


def test_only_so_many_are_kept(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """The oldest go first, and everything is put back all the same."""
    count = MAX_ORIGINALS + 8
    for number in range(count):
        make(root / f"{number}.txt", f"before {number}")
    before = look_at(root, times=True)
    call = fs.begin("call")
    for number in range(count):
        fs.write(f"{number}.txt", "during")
    assert len(kept(tmp_path)) == MAX_ORIGINALS
    call.rollback()
    assert look_at(root, times=True) == before
    assert len(kept(tmp_path)) <= MAX_ORIGINALS


def test_the_next_process_clears_up(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """What a process has left that was killed is neither used nor kept."""
    make(root / "a.txt")
    fs.begin("call")
    fs.write("a.txt", "during")
    assert len(kept(tmp_path)) == 1
    with HostFilesystem(root, store=tmp_path / "store") as later:
        assert kept(tmp_path) == []
        later.recover("call", committed=False)
        assert (root / "a.txt").read_text() == "before"


def test_a_sweep_takes_them_along(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """Content that is to be erased is not left under another name."""
    make(root / "a.txt")
    call = fs.begin("call")
    fs.write("a.txt", "during")
    call.prepare()
    call.finish()
    assert len(kept(tmp_path)) == 1
    sweep(tmp_path / "store")
    assert kept(tmp_path) == []
    fs.restore(call.base)
    assert (root / "a.txt").read_text() == "before"


def test_whatever_fails_a_new_file_is_made(root: Path, tmp_path: Path) -> None:
    """Where no second name can be given, a rollback does without."""
    make(root / "a.txt")
    (tmp_path / "store/treenail/main").mkdir(parents=True)
    (tmp_path / "store/treenail/main/originals").write_text("in the way")
    before = look_at(root, times=True)
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        call = fs.begin("call")
        fs.write("a.txt", "during")
        call.rollback()
    assert look_at(root, times=True) == before


def test_a_write_that_fails_leaves_no_second_name(public_path: Path) -> None:
    """A file that was not replaced after all is as it was."""

    def work() -> tuple[bool, int, int]:
        base = public_path / "nobody"
        (base / "workspace/closed").mkdir(parents=True)
        make(base / "workspace/closed/a.txt")
        (base / "workspace/closed").chmod(0o555)
        with HostFilesystem(base / "workspace", store=base / "store") as fs:
            fs.begin("call")
            try:
                fs.write("closed/a.txt", "during")
            except PermissionError:
                refused = True
            else:
                refused = False
            names = len(os.listdir(base / "store/treenail/main/originals"))
            return refused, names, (base / "workspace/closed/a.txt").stat().st_nlink

    assert as_nobody(work) == (True, 0, 1)


def test_with_power_cuts_in_mind_files_are_written(root: Path, tmp_path: Path) -> None:
    """A durable workspace keeps no second names: what it puts back, it syncs."""
    make(root / "a.txt")
    with HostFilesystem(root, store=tmp_path / "store", durable=True) as fs:
        call = fs.begin("call")
        fs.write("a.txt", "during")
        assert kept(tmp_path) == []
        call.rollback()
        assert (root / "a.txt").read_text() == "before"

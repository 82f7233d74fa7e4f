"""A workspace that travels: checked out on each machine, as the log's last boundary says."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from treenail.testing.depot import MemoryDepot
from treenail.workspace import Checkout, FilesystemSnapshot, begin_with_directory, check_out


def tree(root: Path) -> dict[str, tuple[str, int, bytes]]:
    """Everything below a directory: kind, permission bits, and content or target."""
    found: dict[str, tuple[str, int, bytes]] = {}
    for path in sorted(root.rglob("*")):
        name, mode = path.relative_to(root).as_posix(), path.lstat().st_mode & 0o777
        if path.is_symlink():
            found[name] = ("link", 0, os.fsencode(os.readlink(path)))
        elif path.is_dir():
            found[name] = ("directory", mode, b"")
        else:
            found[name] = ("file", mode, path.read_bytes())
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o750)
    (root / "a.txt").write_text("one\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "secret").write_text("x")
    (root / "secret").chmod(0o600)
    (root / "src" / "deep" / "b.bin").write_bytes(bytes(range(256)))
    (root / "src" / "large.bin").write_bytes(os.urandom(3 * 1024 * 1024 + 5))
    (root / "link").symlink_to("a.txt")
    (root / "nothing").write_bytes(b"")
    return root


@pytest.fixture
def depot() -> MemoryDepot:
    return MemoryDepot()


def out(depot: MemoryDepot, run: UUID, boundary: FilesystemSnapshot, machine: Path) -> Checkout:
    return check_out(depot, run, boundary, machine)


def call(files: Checkout, call_id: str, **contents: str) -> FilesystemSnapshot:
    held = files.begin(call_id)
    for name, content in contents.items():
        files.write(name, content)
    after = held.prepare()
    held.finish()
    return after


def test_a_directory_begins_a_run_and_is_checked_out_whole(
    depot: MemoryDepot, project: Path, tmp_path: Path
) -> None:
    """Content, bits, links, empty directories and times; the directory itself is as it was."""
    before, run = tree(project), uuid4()
    origin = begin_with_directory(depot, run, project)
    with out(depot, run, origin.snapshot, tmp_path / "one") as files:
        assert tree(Path(files.root)) == before == tree(project)
        assert (Path(files.root) / "a.txt").stat().st_mtime_ns == (project / "a.txt").stat().st_mtime_ns


def test_another_machine_continues_where_the_log_is(
    depot: MemoryDepot, project: Path, tmp_path: Path
) -> None:
    """Two machines in turns; each brings its older copy up to date, and the history is one."""
    run = uuid4()
    boundary = begin_with_directory(depot, run, project).snapshot
    first = boundary
    for turn in range(6):
        with out(depot, run, boundary, tmp_path / f"machine-{turn % 2}") as files:
            assert turn == 0 or files.read("count").content == str(turn - 1)
            boundary = call(files, f"call-{turn}", count=str(turn), **{f"f{turn}": "new"})
            shown = {each.path for each in files.diff(first, boundary).changes}
            assert shown == {"count", *(f"f{each}" for each in range(turn + 1))}
    with out(depot, run, boundary, tmp_path / "third") as files:
        files.restore(first)
        assert tree(Path(files.root)) == tree(project)


def test_what_a_lost_process_did_is_only_in_its_own_copy(
    depot: MemoryDepot, project: Path, tmp_path: Path
) -> None:
    """One that was replaced in the middle of a call: neither copy has anything of the other."""
    run = uuid4()
    origin = begin_with_directory(depot, run, project).snapshot
    stopped = out(depot, run, origin, tmp_path / "machine")
    stopped.begin("lost")
    stopped.write("a.txt", "half")
    os.mkfifo(Path(stopped.root) / "pipe")
    with out(depot, run, origin, tmp_path / "machine") as files:
        assert files.root != stopped.root
        assert tree(Path(files.root)) == tree(project)
        boundary = call(files, "kept", b="2")
    stopped.write("a.txt", "more")
    own = stopped.root
    stopped.close()
    with out(depot, run, boundary, tmp_path / "machine") as files:
        assert files.root == own
        assert files.read("a.txt").content == "one\n" and files.read("b").content == "2"
        assert not (Path(files.root) / "pipe").exists()
        assert list(files.unfinished()) == []


def test_a_call_sends_what_it_changed(depot: MemoryDepot, project: Path, tmp_path: Path) -> None:
    """Three contents, the trees above them, the commit and the record."""
    run = uuid4()
    origin = begin_with_directory(depot, run, project).snapshot
    with out(depot, run, origin, tmp_path / "one") as files:
        depot.sent.clear()
        call(files, "three", **{"a.txt": "1", "src/x": "2", "src/deep/y": "3"})
        assert len(depot.sent) == 3 + 3 + 1 + 1
        depot.sent.clear()
        call(files, "nothing")
        assert depot.sent == []


def test_the_same_directory_is_sent_once(depot: MemoryDepot, project: Path) -> None:
    begin_with_directory(depot, uuid4(), project)
    depot.sent.clear()
    begin_with_directory(depot, uuid4(), project)
    assert depot.sent == []

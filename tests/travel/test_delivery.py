"""What becomes of the files: a patch that git applies, a branch that git reads."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest
from tests.travel.test_checkouts import tree
from tests.travel.test_origins import git

from treenail.errors import UsageError
from treenail.testing.depot import MemoryDepot
from treenail.workspace import (
    Checkout,
    FilesystemSnapshot,
    WorkspaceOrigin,
    begin_with_commit,
    check_out,
    make_branch,
    make_patch,
)


@pytest.fixture
def depot() -> MemoryDepot:
    return MemoryDepot()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "sub").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    (root / "a.txt").write_text("one\ntwo\n")
    (root / "gone").write_text("no newline at the end")
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "picture").write_bytes(bytes(range(256)) * 20)
    (root / "crlf").write_bytes(b"a\r\nb\r\n")
    (root / "link").symlink_to("a.txt")
    (root / "was a link").symlink_to("a.txt")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return root


def changed(files: Checkout) -> FilesystemSnapshot:
    held = files.begin("one", tool_name="edit")
    files.write("a.txt", "one\n2\nthree")
    files.delete("gone")
    files.chmod("sub/run.sh", 0o755)
    files.write_bytes("picture", bytes(range(255, -1, -1)) * 21)
    files.write_bytes("crlf", b"a\r\nB\r\nc\rd\n")
    files.delete("was a link")
    files.write("was a link", "a file now\n")
    files.write('new/täb\t"quoted"', "x\n")
    files.write_bytes("new/empty", b"")
    after = held.prepare()
    held.finish()
    return after


@pytest.fixture
def run(
    depot: MemoryDepot, repository: Path, tmp_path: Path
) -> tuple[WorkspaceOrigin, FilesystemSnapshot, dict[str, tuple[str, int, bytes]]]:
    run_id = uuid4()
    origin = begin_with_commit(depot, run_id, str(repository), "main")
    with check_out(depot, run_id, origin.snapshot, tmp_path / "machine") as files:
        changed(files)
        held = files.begin("two", tool_name="more")
        files.write("sub/x", "y")
        files.mkdir("nothing in it")
        files.mkdir(".git")
        files.write(".git/config", "[core]\n\tfsmonitor = touch ran\n")
        newest = held.prepare()
        held.finish()
        found = tree(Path(files.root))
    return origin, newest, found


def files_in(found: dict[str, tuple[str, int, bytes]]) -> dict[str, tuple[str, bool, bytes]]:
    return {
        path: (kind, bool(mode & 0o100), content)
        for path, (kind, mode, content) in found.items()
        if kind != "directory" and not path.startswith(".git")
    }


Made = tuple[WorkspaceOrigin, FilesystemSnapshot, dict[str, tuple[str, int, bytes]]]


def test_git_applies_the_patch(depot: MemoryDepot, repository: Path, run: Made, tmp_path: Path) -> None:
    """Texts, pictures, bits, links and odd names: after it the files are those of the run; and back."""
    origin, newest, found = run
    before = files_in(tree(repository))
    patch = make_patch(depot, origin.snapshot, newest)
    without_git = b"".join(
        part
        for part in (b"diff --git" + each for each in patch.split(b"diff --git")[1:])
        if b" a/.git/" not in part
    )
    (tmp_path / "run.patch").write_bytes(without_git)
    git(repository, "apply", str(tmp_path / "run.patch"))
    assert files_in(tree(repository)) == files_in(found)
    git(repository, "apply", "-R", str(tmp_path / "run.patch"))
    assert files_in(tree(repository)) == before
    assert make_patch(depot, newest, newest) == b""


def test_a_branch_has_a_commit_for_each_call(
    depot: MemoryDepot, repository: Path, run: Made, tmp_path: Path
) -> None:
    """On top of the commit that the run began with; nothing else of the repository changes."""
    origin, newest, found = run
    before, index = tree(repository), (repository / ".git" / "index").read_bytes()
    commit = make_branch(depot, origin, newest, repository, "agent/run-1")
    assert {path: each for path, each in tree(repository).items() if not path.startswith(".git")} == {
        path: each for path, each in before.items() if not path.startswith(".git")
    }
    assert (repository / ".git" / "index").read_bytes() == index
    git(repository, "fsck", "--strict")
    assert git(repository, "rev-parse", "agent/run-1") == commit
    subjects = git(repository, "log", "--format=%s", f"{origin.commit}..agent/run-1").split("\n")
    assert len(subjects) == 2 and "edit" in subjects[1] and "more" in subjects[0]
    git(repository, "worktree", "add", "-q", str(tmp_path / "out"), "agent/run-1")
    checked = files_in({path: each for path, each in tree(tmp_path / "out").items() if path != ".git"})
    assert checked == files_in(found)


@pytest.mark.parametrize("name", ["main", "../x", "a..b", "-x", "a/.b", "x.lock", "", "a b", "@{1}"])
def test_a_branch_that_cannot_be_made_is_one_clear_error(
    depot: MemoryDepot, repository: Path, run: Made, name: str
) -> None:
    before = sorted(os.listdir(repository / ".git"))
    git(repository, "pack-refs", "--all")
    with pytest.raises(UsageError):
        make_branch(depot, *run[:2], repository, name)
    assert sorted({*os.listdir(repository / ".git")} - {"packed-refs"}) == before


def test_a_repository_without_the_origin_is_refused(depot: MemoryDepot, run: Made, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="not a git repository"):
        make_branch(depot, *run[:2], other, "x")
    git(other, "init", "-q")
    with pytest.raises(UsageError, match="does not have the commit"):
        make_branch(depot, *run[:2], other, "x")

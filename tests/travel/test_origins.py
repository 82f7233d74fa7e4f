"""Where a workspace that travels begins: a commit of a git repository, or a tar."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from uuid import uuid4

import pytest
from tests.travel.test_checkouts import tree

from treenail.errors import UsageError
from treenail.testing.depot import MemoryDepot
from treenail.workspace import begin_with_commit, begin_with_directory, begin_with_tar, write_tree


def git(directory: Path, *arguments: str) -> str:
    names = {
        f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    ran = subprocess.run(
        ["git", *arguments],
        cwd=directory,
        env={**os.environ, **names},
        check=True,
        capture_output=True,
        text=True,
    )
    return ran.stdout.strip()


@pytest.fixture
def depot() -> MemoryDepot:
    return MemoryDepot()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that would run code, if it were asked to check out, to filter or to call a hook."""
    root = tmp_path / "repository"
    (root / "sub").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    (root / "a.txt").write_text("one\n")
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "link").symlink_to("sub/run.sh")
    (root / "large.bin").write_bytes(os.urandom(2 * 1024 * 1024))
    (root / "naïve\n").write_text("odd\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    (root / ".gitattributes").write_text("*.txt filter=evil\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "two")
    touch = f"touch {tmp_path / 'ran'}"
    git(root, "config", "filter.evil.smudge", touch)
    git(root, "config", "core.fsmonitor", touch)
    git(root, "config", "uploadpack.packObjectsHook", touch)
    for name in ("post-checkout", "reference-transaction", "post-merge"):
        hook = root / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\n{touch}\n")
        hook.chmod(0o755)
    return root


def test_a_commit_begins_a_run_and_nothing_of_its_repository_runs(
    depot: MemoryDepot, repository: Path, tmp_path: Path
) -> None:
    """By its id or by a branch, from a path or a URL: the same files as git has, the same origin."""
    head, first = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "HEAD~1")
    origin = begin_with_commit(depot, uuid4(), f"file://{repository}", head)
    assert origin.commit == head and head in origin.source
    assert (
        begin_with_commit(depot, uuid4(), str(repository), "main").snapshot.record == origin.snapshot.record
    )
    write_tree(depot, origin.snapshot, tmp_path / "out")
    expected = {
        path: each
        for path, each in tree(repository).items()
        if not path.startswith(".git/") and path != ".git"
    }
    found = tree(tmp_path / "out")
    assert {path: each[::2] for path, each in found.items()} == {
        path: each[::2] for path, each in expected.items()
    }
    assert found["sub/run.sh"][1] == 0o755
    older = begin_with_commit(depot, uuid4(), f"file://{repository}", first)
    write_tree(depot, older.snapshot, tmp_path / "older")
    assert not (tmp_path / "older" / ".gitattributes").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("url", "commit"),
    [
        ("--upload-pack=touch x", "main"),
        ("ext::touch x", "main"),
        ("", "main"),
        ("{}", "-x"),
        ("{}", "nothing"),
        ("{}", "0" * 40),
    ],
)
def test_what_is_no_commit_is_one_clear_error(
    depot: MemoryDepot, repository: Path, url: str, commit: str
) -> None:
    with pytest.raises(UsageError):
        begin_with_commit(depot, uuid4(), url.format(repository), commit)
    assert depot.objects == {}


def test_a_login_in_an_address_is_not_shown(depot: MemoryDepot) -> None:
    with pytest.raises(UsageError) as caught:
        begin_with_commit(depot, uuid4(), "http://me:hunter2@127.0.0.1:1/x.git", "main")
    assert "hunter2" not in str(caught.value)


def packed(place: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(place, "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return place


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


def test_a_tar_begins_a_run(depot: MemoryDepot, tmp_path: Path) -> None:
    """Files, directories, links of both kinds, and bits; set-id bits do not travel."""
    tar = packed(
        tmp_path / "x.tgz",
        (member("./a/b.txt"), b"one"),
        (member("a/run", mode=0o4755), b"two"),
        (member("again", tarfile.LNKTYPE, "a/b.txt"), b""),
        (member("link", tarfile.SYMTYPE, "a/b.txt"), b""),
        (member("empty", tarfile.DIRTYPE, mode=0o750), b""),
        (member("big"), bytes(1_500_000)),
    )
    origin = begin_with_tar(depot, uuid4(), tar)
    write_tree(depot, origin.snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == {
        "a": ("directory", 0o755, b""),
        "a/b.txt": ("file", 0o644, b"one"),
        "a/run": ("file", 0o755, b"two"),
        "again": ("file", 0o644, b"one"),
        "big": ("file", 0o644, bytes(1_500_000)),
        "empty": ("directory", 0o750, b""),
        "link": ("link", 0, b"a/b.txt"),
    }


@pytest.mark.parametrize(
    "bad",
    [
        [(member("../x"), b"")],
        [(member("/etc/x"), b"")],
        [(member("a/../../x"), b"")],
        [(member("l", tarfile.SYMTYPE, "/etc/passwd"), b"")],
        [(member("a/l", tarfile.SYMTYPE, "../../x"), b"")],
        [(member("l", tarfile.LNKTYPE, "../x"), b"")],
        [(member("d", tarfile.SYMTYPE, "a"), b""), (member("d/x"), b"")],
        [(member("p", tarfile.FIFOTYPE), b"")],
        [(member("c", tarfile.CHRTYPE), b"")],
        [(member("f"), b"x"), (member("f/x"), b"")],
    ],
    ids=[
        "up",
        "absolute",
        "up inside",
        "link out",
        "link up",
        "hard link out",
        "through a link",
        "pipe",
        "device",
        "below a file",
    ],
)
def test_no_path_of_a_tar_leaves_the_workspace(
    depot: MemoryDepot, tmp_path: Path, bad: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    """The whole tar is refused, and nothing is kept."""
    tar = packed(tmp_path / "x.tgz", (member("good"), b"1"), *bad)
    with pytest.raises(UsageError):
        begin_with_tar(depot, uuid4(), tar)
    assert depot.objects == {}


def test_what_is_no_tar_is_one_clear_error(depot: MemoryDepot, tmp_path: Path) -> None:
    whole = packed(tmp_path / "x.tgz", (member("a"), os.urandom(100_000))).read_bytes()
    for content in (b"", b"no tar at all", whole[: len(whole) // 2]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UsageError, match="cannot be read as a tar"):
            begin_with_tar(depot, uuid4(), tmp_path / "bad")
    with pytest.raises(UsageError, match="cannot be read as a tar"):
        begin_with_tar(depot, uuid4(), tmp_path / "missing")


def test_what_cannot_travel_is_said_before_anything_is_sent(depot: MemoryDepot, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    os.mkfifo(tmp_path / "project" / "pipe")
    with pytest.raises(UsageError, match="pipe in"):
        begin_with_directory(depot, uuid4(), tmp_path / "project")
    begin_with_directory(depot, uuid4(), tmp_path / "project", exclude=["pipe"])

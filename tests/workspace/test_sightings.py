"""A directory in which everything was as known is compared as a whole, and nothing hides in that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_kit import look_at

from treenail.workspace.host import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


def later(path: Path, change: Callable[[], object]) -> None:
    """Repeat a change until the clock of the filesystem has moved on from what a file says."""
    before = os.lstat(path).st_ctime_ns
    change()
    while os.lstat(path).st_ctime_ns == before:
        change()


def forge(root: Path) -> None:
    def change() -> None:
        (root / "d/a").write_text("B")
        os.utime(root / "d/a", ns=(7, 7))

    later(root / "d/a", change)


def swap(root: Path) -> None:
    os.rename(root / "d/a", root / "d/x")
    os.rename(root / "d/b", root / "d/a")
    os.rename(root / "d/x", root / "d/b")


def replace_by_link(root: Path) -> None:
    (root / "d/a").unlink()
    (root / "d/a").symlink_to("b")


OUTSIDE: dict[str, Callable[[Path], object]] = {
    "same size and time": forge,
    "two names swapped": swap,
    "a new file": lambda root: (root / "d/new").write_text("new"),
    "a file gone": lambda root: (root / "d/b").unlink(),
    "other bits": lambda root: later(root / "d/a", lambda: (root / "d/a").chmod(0o777)),
    "a link for a file": replace_by_link,
    "a file below": lambda root: (root / "d/deep/new").write_text("new"),
    "a directory gone": lambda root: (root / "d/deep").rmdir(),
    "bits of a directory": lambda root: later(root / "d/deep", lambda: (root / "d/deep").chmod(0o700)),
}


@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE)
def test_a_directory_that_was_seen_twice_is_still_looked_at(
    fs: HostFilesystem, root: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often everything was as known: what a process changes is found, and rolled back."""
    # Files that are seconds old are no longer read again.
    monkeypatch.setattr("treenail.workspace.manifest.RACY_NS", -(10**12))
    (root / "d/deep").mkdir(parents=True)
    for name in "ab":
        (root / "d" / name).write_text(name.upper())
        os.utime(root / "d" / name, ns=(7, 7))
    for _ in range(3):
        fs.snapshot(scan=True)
    assert set(fs._manifest().sightings) == {"", "d", "d/deep"}
    before = look_at(root, times=True)
    call = fs.begin("call", foreign=True)
    change(root)
    assert look_at(root, times=True) != before
    call.rollback()
    assert look_at(root, times=True) == before
    committed = fs.begin("again", foreign=True)
    change(root)
    committed.prepare()
    committed.finish()
    assert {entry.path for entry in fs.diff(committed.base).changes} != set()
    fs.restore(committed.base)
    assert look_at(root, times=True) == before

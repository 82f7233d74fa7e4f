"""An isolated copy is a workspace like any other, and the other one does not notice it."""

from __future__ import annotations

from pathlib import Path

from holdfast.testing.filesystem import FilesystemConformance, LinkConformance
from holdfast.workspace.base import Filesystem
from holdfast.workspace.host import HostFilesystem
from holdfast.workspace.isolated import IsolatedFilesystem, isolate


def copy_of(directory: Path, files: dict[str, str] | None = None) -> IsolatedFilesystem:
    (directory / "base").mkdir()
    base = HostFilesystem(directory / "base", store=directory / "store")
    for path, text in (files or {}).items():
        base.write(path, text)
    made = isolate(base, place=directory / "copy")
    assert isinstance(made, IsolatedFilesystem)
    return made


class _Isolated:
    def make_filesystem(self, directory: Path) -> Filesystem:
        return copy_of(directory)

    def reopen(self, filesystem: Filesystem) -> Filesystem:
        assert isinstance(filesystem, IsolatedFilesystem)
        past = filesystem._overlay.past
        again = isolate(past._host, snapshot=filesystem.snapshot_at_fork, place=filesystem._place)
        filesystem.close()
        return again

    def close(self, filesystem: Filesystem) -> None:
        assert isinstance(filesystem, IsolatedFilesystem)
        filesystem.close()
        filesystem._overlay.past._host.close()

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        assert isinstance(filesystem, IsolatedFilesystem)
        filesystem.symlink(path, target)


class TestCopyOfNothing(_Isolated, FilesystemConformance):
    """A copy of an empty workspace passes the suite."""


class TestCopyThatWasEmptied(_Isolated, FilesystemConformance):
    """A copy passes the suite also where it hides what the other workspace has at the same paths."""

    def make_filesystem(self, directory: Path) -> Filesystem:
        made = copy_of(directory, {"a/b.txt": "old\n", "a/c/d.txt": "old\n", "x": "old", "notes.md": "old"})
        for entry in made.list():
            made.delete(entry.path, recursive=True)
        return made


class TestLinksInACopy(_Isolated, LinkConformance):
    """Links in a copy are links."""

"""InMemoryFilesystem: the conformance suite, and what it promises beyond it."""

from pathlib import Path

from holdfast.testing.filesystem import FilesystemConformance, LinkConformance
from holdfast.workspace import Filesystem, InMemoryFilesystem


class TestConformance(FilesystemConformance):
    def make_filesystem(self, directory: Path) -> Filesystem:
        return InMemoryFilesystem()


class TestLinks(LinkConformance):
    def make_filesystem(self, directory: Path) -> Filesystem:
        return InMemoryFilesystem()

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        assert isinstance(filesystem, InMemoryFilesystem)
        filesystem.symlink(path, target)

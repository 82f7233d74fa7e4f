"""HostFilesystem keeps every promise of the filesystem protocol."""

from __future__ import annotations

import os
from pathlib import Path

from treenail.testing.filesystem import FilesystemConformance, LinkConformance
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem


def _make(directory: Path) -> HostFilesystem:
    root = directory / "workspace"
    root.mkdir()
    return HostFilesystem(root, store=directory / "store")


class TestHostFilesystem(FilesystemConformance):
    def make_filesystem(self, directory: Path) -> HostFilesystem:
        return _make(directory)

    def reopen(self, filesystem: Filesystem) -> HostFilesystem:
        assert isinstance(filesystem, HostFilesystem)
        return HostFilesystem(filesystem.root, store=filesystem.store_path)

    def close(self, filesystem: Filesystem) -> None:
        assert isinstance(filesystem, HostFilesystem)
        filesystem.close()


class TestHostLinks(LinkConformance):
    def make_filesystem(self, directory: Path) -> HostFilesystem:
        return _make(directory)

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        os.symlink(target, os.path.join(filesystem.root, path))

    def close(self, filesystem: Filesystem) -> None:
        assert isinstance(filesystem, HostFilesystem)
        filesystem.close()

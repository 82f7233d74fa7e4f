"""What comparing two trees and copying between them needs: the half of `Filesystem` without boundaries.

Every `Filesystem` is a `Tree`, and so is the inside of an isolated copy, which has no boundaries of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, Protocol

from treenail.workspace.base import FileEntry, FileStat, WriteMode
from treenail.workspace.paths import encode


class Tree(Protocol):
    """Files below a root, to be looked at and changed. See `Filesystem` for what each operation promises."""

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        ...

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        ...

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        ...

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads."""
        ...

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed."""
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        ...

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory."""
        ...


def below(tree: Tree, directory: str) -> Iterator[str]:
    """Yield every path below a directory, each after the directory that holds it."""
    for entry in tree.list(directory):
        yield entry.path
        if entry.is_directory:
            yield from below(tree, entry.path)


def target_of(link: FileStat) -> bytes:
    """Return where a link leads, as the bytes that the disk knows."""
    return encode(link.link_target or "")


def set_permissions(tree: Tree, path: str, permissions: int) -> None:
    """Give a file or directory its permission bits, unless it has them: each change is recorded."""
    if tree.stat(path).permissions != permissions:
        tree.chmod(path, permissions)

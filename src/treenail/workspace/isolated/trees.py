"""What comparing two trees and copying between them needs.

A tree is a `Filesystem`, or the inside of an isolated copy, which has no boundaries of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from treenail.workspace.base import FileStat, Filesystem
from treenail.workspace.paths import encode
from treenail.workspace.virtual import VirtualTree

Tree: TypeAlias = Filesystem | VirtualTree


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

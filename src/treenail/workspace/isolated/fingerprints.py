"""What is at a path, in a form that can be compared and kept."""

from __future__ import annotations

import hashlib
from typing import BinaryIO, NamedTuple

from treenail.workspace.base import FileStat
from treenail.workspace.isolated.trees import Tree, target_of
from treenail.workspace.manifest import State, StateKind
from treenail.workspace.packs import CHUNK_BYTES, hash_object


class Fingerprint(NamedTuple):
    """What is at a path: its kind, its permission bits and an id of its content."""

    kind: str
    """`absent`, `file`, `directory`, `link`, or `other` for what cannot be kept."""
    permissions: int = 0
    content: str = ""
    """The id that git gives to a file's content or a link's target, in hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.permissions:o}:{self.content}"


NOTHING = Fingerprint("absent")


def fingerprint(filesystem: Tree, path: str) -> Fingerprint:
    """Say what is at a path of a workspace now."""
    status = _status(filesystem, path)
    kind = _kind(status)
    if status is None or kind == "other":
        return Fingerprint(kind)
    if kind == "link":
        return Fingerprint("link", 0, hash_object("blob", target_of(status)).hex())
    if kind == "directory":
        return Fingerprint("directory", status.permissions)
    with filesystem.open_read(path) as stream:
        return Fingerprint("file", status.permissions, _blob_id(stream, status.size_bytes))


def kind_at(filesystem: Tree, path: str) -> StateKind:
    """Say of which kind what is at a path is, without reading it."""
    return _kind(_status(filesystem, path))


def fingerprint_of(state: State) -> Fingerprint:
    """Say what a recorded state is the state of."""
    if state.kind == "link":
        return Fingerprint("link", 0, state.oid.hex())
    if state.kind == "directory":
        return Fingerprint("directory", state.mode & 0o777)
    if state.kind == "file":
        return Fingerprint("file", state.mode & 0o777, state.oid.hex())
    return Fingerprint(state.kind)


def _status(filesystem: Tree, path: str) -> FileStat | None:
    try:
        return filesystem.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _kind(status: FileStat | None) -> StateKind:
    if status is None:
        return "absent"
    if status.is_link:
        return "link"
    if status.is_directory:
        return "directory"
    return "file" if status.is_file else "other"


def _blob_id(stream: BinaryIO, size: int) -> str:
    """Return git's id of a stream's content without loading it."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()

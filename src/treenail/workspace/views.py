"""A view of a filesystem that cannot change it.

Every operation of `Filesystem` is here. Those that read are passed on; those that change anything,
boundaries included (a snapshot writes objects or takes memory, and `begin` holds the workspace), are
refused with `ReadOnlyError`. The view hands out neither the filesystem behind it nor the directory on
the host's disk, where a process could write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, NoReturn, TextIO, TypeVar

from treenail.errors import ReadOnlyError
from treenail.workspace.base import (
    MAX_GREP_MATCHES,
    MAX_READ_LINES,
    FileEntry,
    FileStat,
    Filesystem,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
    WriteMode,
    WriteResult,
)
from treenail.workspace.virtual import VirtualTree

Behind = TypeVar("Behind", bound="Filesystem | VirtualTree")


class PassedReads(Generic[Behind]):
    """The reads of `Filesystem`, passed on to the tree that a function returns."""

    __slots__ = ("_behind",)

    def __init__(self, behind: Callable[[], Behind]) -> None:
        self._behind = behind

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all. Line endings are kept as they are."""
        return self._behind().read(path, offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        return self._behind().read_bytes(path, offset=offset, limit=limit)

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        return self._behind().exists(path)

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        return self._behind().stat(path)

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        return self._behind().list(path)

    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted. `**` crosses directories; links are not followed."""
        return self._behind().glob(pattern, path=path)

    def grep(
        self,
        pattern: str,
        *,
        path: str = ".",
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        return self._behind().grep(pattern, path=path, glob=glob, max_matches=max_matches)

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads."""
        return self._behind().open_read(path)

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads."""
        return self._behind().open_text(path)


class ReadOnlyFilesystem(PassedReads[Filesystem]):
    """Shows another filesystem, live, and refuses every change with `ReadOnlyError`."""

    __slots__ = ()

    def __init__(self, filesystem: Filesystem) -> None:
        # Behind a function, so that no attribute of the view is something that can be written to.
        super().__init__(lambda: filesystem)

    def __repr__(self) -> str:
        return f"<read-only view of {self._behind()!r}>"

    @property
    def root(self) -> str:
        """The root as shown to people and tools."""
        return self._behind().root

    @property
    def read_only(self) -> bool:
        """True: every changing operation is refused."""
        return True

    @property
    def host_root(self) -> Path | None:
        """None: a process that works in the directory could change it."""
        return None

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        return self._behind().diff(before, after)

    def unfinished(self) -> Sequence[str]:
        """List the calls that a crash left open, oldest first."""
        return self._behind().unfinished()

    def read_only_view(self) -> Filesystem:
        """Return this view: it is read-only already."""
        return self

    # --- changing is refused ---

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Refuse."""
        _refuse(f"write {path!r}")

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Refuse."""
        _refuse(f"write {path!r}")

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Refuse."""
        _refuse(f"delete {path!r}")

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Refuse."""
        _refuse(f"move {source!r} to {target!r}")

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Refuse."""
        _refuse(f"make the directory {path!r}")

    def chmod(self, path: str, permissions: int) -> None:
        """Refuse."""
        _refuse(f"change the permissions of {path!r}")

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Refuse."""
        _refuse(f"open {path!r} for writing")

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Refuse: a boundary is stored by the filesystem behind."""
        _refuse("take a snapshot")

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Refuse."""
        _refuse(f"restore the snapshot {snapshot.snapshot_id}")

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Refuse."""
        _refuse(f"begin the tool call {call_id!r}")

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """Refuse."""
        _refuse(f"recover the tool call {call_id!r}")


def _refuse(what: str) -> NoReturn:
    raise ReadOnlyError(
        f"cannot {what}: this is a read-only view of the workspace; "
        f"use the workspace itself where changes are meant"
    )

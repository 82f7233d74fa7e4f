"""The workspace seam: what a filesystem must do, and how a tool call holds it.

Theory of operation
-------------------
A `Filesystem` is a tree below a root that no path can leave. Paths are relative,
with `/` between segments, whatever the host uses. Ordinary failures are the
standard library's `OSError` family (`FileNotFoundError`, `IsADirectoryError`,
`FileExistsError`, `PermissionError` ...) and `ValueError` for arguments that
make no sense; leaving the root is `PathEscapeError`.

A tool call holds the workspace in two phases, because the log and not the
workspace decides whether a call has happened:

1. `begin(call_id)` opens a `WorkspaceCall`. From now on each path's prior state
   is kept, durably, before the first write to it.
2. `prepare()` writes the boundary after the call (objects, manifest) and keeps
   the undo information.
3. The runner appends the call's events to the log. That append is the commit.
4. `finish()` forgets the undo information. `rollback()` instead of 2 to 4 puts
   back exactly what the call changed.

After a crash, `unfinished()` lists the calls whose undo information is still
there, and `recover(call_id, committed=...)` ends each of them the way the log
says: finished if the log has the commit, rolled back if it has not.

A call that lets a foreign process loose on the tree says so
(`begin(..., foreign=True)`): the tree is scanned before and after, and every
difference belongs to the call. Nobody can tell whose each one is, so whatever
its rollback takes away is first kept in the private history, and reported.
Otherwise only writes through this protocol belong to it, and whatever else
changed on disk is somebody else's and is left alone: reported as a conflict if
it is in the way, never overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, TextIO, cast, runtime_checkable
from uuid import UUID

from treenail.codec import sparse
from treenail.sandbox import Sandbox
from treenail.workspace.equivalence import TreeKey

if TYPE_CHECKING:
    from treenail.workspace.layers import CommandLayer

WriteMode = Literal["create", "overwrite", "append"]
"""`create` fails if the file exists, `overwrite` replaces it, `append` adds to its end."""

ChangeKind = Literal["added", "modified", "deleted", "mode", "type"]
"""What happened to a path; `type` is a swap, such as a directory for a link."""

MAX_READ_LINES = 2_000
"""How many lines `read` returns when no limit is given."""

MAX_GREP_MATCHES = 1_000
"""How many matches `grep` returns when no limit is given."""

MAX_CONVENIENCE_BYTES = 32 * 1024 * 1024
"""What `read` and `read_bytes` load at once at most; larger files are streamed with `open_read`."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Lines of a text file."""

    content: str
    path: str
    total_lines: int
    offset: int
    limit: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ReadBytesResult:
    """Bytes of a file."""

    content: bytes
    path: str
    size_bytes: int
    offset: int
    limit: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write did."""

    path: str
    bytes_written: int
    mode: WriteMode


@dataclass(frozen=True, slots=True)
class FileStat:
    """What is at a path. Links are described, not followed."""

    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int
    is_link: bool = False
    link_target: str | None = None
    permissions: int = 0o644
    """The permission bits (`0o777`), without the type."""
    modified_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class GlobMatch:
    """One path that a pattern matched."""

    path: str
    is_file: bool


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """One line that a regular expression matched; columns count from zero within the line."""

    path: str
    line_number: int
    line_content: str
    match_start: int
    match_end: int


@sparse
@dataclass(frozen=True, slots=True)
class FilesystemSnapshot:
    """A boundary in the life of a workspace, to which it can go back.

    A snapshot with `scanned` covers the whole tree; one without covers what was written through
    the filesystem's own operations, which is all that such a snapshot promises to bring back.
    `uncovered` lists what a budget or an unreadable path kept out, one sentence each: an empty
    tuple is a promise that nothing is missing.
    """

    snapshot_id: UUID
    created_at: datetime
    commit_ref: str
    root_path: str
    git_dir: str | None = None
    tag: str | None = None
    scanned: bool = False
    uncovered: tuple[str, ...] = ()
    content: str = field(default="", compare=False, repr=False)
    """The tree itself, if the snapshot was made to travel; see `InMemoryFilesystem.portable`."""
    record: str = ""
    """The record of the boundary in a depot, if the workspace travels; see `treenail.workspace.travel`."""

    def equivalence_key(self) -> object:
        """What two boundaries share if they have the same tree, whatever happened between them."""
        return TreeKey(self.commit_ref, self.git_dir)


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs between two boundaries."""

    path: str
    kind: ChangeKind
    before_size: int | None = None
    after_size: int | None = None

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory that was made, removed or given other permissions: it has no size."""
        return self.before_size is None and self.after_size is None


@dataclass(frozen=True, slots=True)
class WorkspaceDiff:
    """What differs between two boundaries, path by path, and as unified text."""

    changes: tuple[Change, ...]
    text: str
    """A unified diff; a binary or very large file is named with its sizes instead of shown."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore or a rollback did.

    `conflicts` are paths that somebody else had changed meanwhile; they were left as found. `kept` are
    paths that it took away without knowing whose they were: what was there is in the private history. `lost`
    are the files among them for which a full disk had no room there.
    """

    restored: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    kept: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@runtime_checkable
class WorkspaceCall(Protocol):
    """One tool call's hold on a workspace. See the module's theory of operation."""

    @property
    def call_id(self) -> str:
        """The tool call that holds the workspace."""
        ...

    @property
    def base(self) -> FilesystemSnapshot:
        """The boundary before the call."""
        ...

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call; the call can still be rolled back."""
        ...

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        ...

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        ...


class LayeredFilesystem(Protocol):
    """A filesystem on disk on which a command of the open call can work on a layer of its own."""

    @property
    def open_call(self) -> WorkspaceCall | None:
        """The call that holds the workspace."""
        ...

    def open_layer(self, *, elsewhere: bool = False) -> CommandLayer | str:
        """Open a layer over the tree, or say why there can be none; the call's end applies or drops it.

        `elsewhere` puts it on a filesystem in memory, for a store on one that cannot hold layers.
        """
        ...

    def drop_layer(self) -> None:
        """Forget what the command on the layer did."""
        ...

    def keep_caches(self, names: Collection[str]) -> None:
        """Apply what the command on the layer did in cache directories; the rest of it is to be dropped.

        Those are the directories with these names, and those with a CACHEDIR.TAG.
        """
        ...

    def capture(self) -> None:
        """Scan the tree, for a command that works on the tree itself."""
        ...


def layered(filesystem: object) -> LayeredFilesystem | None:
    """Return a filesystem as one with layers, or None if it has none. A view of one has what it has."""
    return cast("LayeredFilesystem", filesystem) if hasattr(filesystem, "open_layer") else None


@runtime_checkable
class Filesystem(Protocol):
    """A tree of files below a root that no path can leave."""

    @property
    def root(self) -> str:
        """The root as shown to people and tools: a host path, or `/` in memory."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every changing operation is refused with `ReadOnlyError`."""
        ...

    @property
    def host_root(self) -> Path | None:
        """The directory on the host's disk where a process can work, or None if there is none."""
        ...

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all. Line endings are kept as they are."""
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        ...

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        ...

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        ...

    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted. `**` crosses directories; links are not followed."""
        ...

    def grep(
        self,
        pattern: str,
        *,
        path: str = ".",
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        ...

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        ...

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory."""
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        ...

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory."""
        ...

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads."""
        ...

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed."""
        ...

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads."""
        ...

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        ...

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary. With `scan`, it covers changes made past this object, too."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary. A `scanned` one brings the whole tree back; see `FilesystemSnapshot`.

        Raises `WorkspaceConflictError` before anything is changed if somebody else's edits are in
        the way of a restore that is not scanned.
        """
        ...

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        ...

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call."""
        ...

    def unfinished(self) -> Sequence[str]:
        """List the calls that a crash left open, oldest first."""
        ...

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended."""
        ...


def sandbox_of(filesystem: Filesystem) -> Sandbox:
    """Return how commands that work in a filesystem are confined; by the default if it does not say."""
    found = getattr(filesystem, "sandbox", None)
    return found if isinstance(found, Sandbox) else Sandbox()

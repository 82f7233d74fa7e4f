"""The files: one disk for all processes and people, and a `Filesystem` on it for each process.

The disk keeps, per open call, what each path held before the call's first write to it. It also keeps the
history of all writes with their authors, which is what the oracle believes.
"""

from __future__ import annotations

import errno
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from simulation.world import Life, World
from treenail.clock import new_id
from treenail.errors import StaleWorkspaceError, WorkspaceBusyError, WorkspaceError
from treenail.workspace import Filesystem, FilesystemSnapshot, WorkspaceDiff
from treenail.workspace.base import FileEntry, FileStat, RestoreReport
from treenail.workspace.views import ReadOnlyFilesystem
from treenail.workspace.virtual import VirtualTree


@dataclass(frozen=True, slots=True)
class Written:
    """One write to the disk."""

    path: str
    content: bytes | None
    """None if the path was removed."""
    author: str
    """A person, or the name of a call in the workspace."""


@dataclass
class OpenCall:
    """A call that holds the workspace: it survives its process."""

    call_id: str
    author: str
    """The attempt at the call that writes: a call that was undone may run again."""
    before: dict[str, bytes | None] = field(default_factory=dict)
    wrote: dict[str, bytes | None] = field(default_factory=dict)
    """What the call itself last put at each path."""


@dataclass
class Disk:
    """What is on the disk of the one machine."""

    world: World
    files: dict[str, bytes] = field(default_factory=dict)
    history: list[Written] = field(default_factory=list)
    open_call: OpenCall | None = None
    begun: Counter[str] = field(default_factory=Counter)
    """How often each call has begun."""
    epoch: int = 0
    writer: Life | None = None
    """The process that may write. A dead one has lost it; a stopped one keeps it."""

    def put(self, path: str, content: bytes | None, author: str) -> None:
        """Write or remove a file."""
        if content is None:
            self.files.pop(path, None)
        else:
            self.files[path] = content
        self.history.append(Written(path, content, author))
        self.world.note(f"{author} writes {path}: {content!r}")

    def attempt(self, call_id: str) -> str:
        """Name the newest attempt at a call."""
        return f"{call_id}#{self.begun[call_id]}"

    def undo(self, call: OpenCall) -> RestoreReport:
        """Put back what a call changed and nobody has changed since."""
        restored, conflicts = [], []
        for path, content in call.before.items():
            if self.files.get(path) != call.wrote.get(path):
                conflicts.append(path)
                continue
            restored.append(path)
            if content is None:
                self.files.pop(path, None)
            else:
                self.files[path] = content
        self.world.note(f"{call.call_id} is undone: {restored}")
        return RestoreReport(restored=tuple(restored), conflicts=tuple(conflicts))


class SimulatedFilesystem(VirtualTree):
    """The disk, as one process sees it."""

    root = "/"
    read_only = False
    host_root: Path | None = None

    def __init__(self, disk: Disk, life: Life) -> None:
        super().__init__()
        self._disk = disk
        self._life = life
        self._epoch = 0
        self._turns = 0

    # --- who may write -----------------------------------------------------------------------------

    def turn(self) -> SimulatedFilesystem:
        """Span a turn: the writer's place is given back at its end."""
        return self

    def __enter__(self) -> SimulatedFilesystem:
        self._turns += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._turns -= 1
        if self._turns == 0:
            self.rest()

    def rest(self) -> None:
        """Let another process write."""
        if not self._life.is_dead and self._disk.writer is self._life:
            self._disk.writer = None

    def _take(self) -> None:
        disk = self._disk
        self._life.check()
        if disk.writer is self._life and self._epoch == disk.epoch:
            return
        if disk.writer is not None and not disk.writer.is_dead and disk.writer is not self._life:
            raise WorkspaceBusyError(
                f"{disk.writer.name} is writing to the workspace", owner=disk.writer.name
            )
        disk.epoch += 1
        self._epoch, disk.writer = disk.epoch, self._life

    def _check_writer(self) -> None:
        self._life.check()
        if self._disk.writer is not self._life or self._epoch != self._disk.epoch:
            raise StaleWorkspaceError(f"{self._life.name} is not the writer any more; nothing was changed")

    # --- the steps of the tree ---------------------------------------------------------------------

    def status(self, path: str) -> FileStat | None:
        """Describe what is at a path."""
        content = self._disk.files.get(path)
        if content is not None:
            return FileStat(path, is_file=True, is_directory=False, size_bytes=len(content))
        if path == "." or any(each.startswith(f"{path}/") for each in self._disk.files):
            return FileStat(path, is_file=False, is_directory=True, size_bytes=0, permissions=0o755)
        return None

    def entries(self, path: str) -> Mapping[str, FileEntry]:
        """Return what is in a directory."""
        start = "" if path == "." else f"{path}/"
        found: dict[str, FileEntry] = {}
        for each in sorted(self._disk.files):
            if each.startswith(start):
                name, _, rest = each[len(start) :].partition("/")
                found.setdefault(name, FileEntry(name, start + name, not rest, bool(rest)))
        return found

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        return io.BytesIO(self._disk.files[path])

    def put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        """Write a file: the disk may be full, and a kill may leave half of it."""
        call = self._held(path)
        world = self._life.world
        self.may_fill("file")
        if world.strikes_now("torn write", "file", 0.006):
            self._write(call, path, content[: len(content) // 2])
            self._life.kill()
        self._life.may_die("file")
        self._write(call, path, content)
        self._life.may_die("file/done")

    def remove(self, path: str) -> None:
        """Remove a file, or all files below a directory."""
        for each in [each for each in self._disk.files if each == path or each.startswith(f"{path}/")]:
            call = self._held(each)
            self._life.may_die("remove")
            self._write(call, each, None)

    def rename(self, path: str, to: str) -> None:
        """Move a file."""
        content = self._disk.files[path]
        self.put_file(to, content, None)
        self.remove(path)

    def put_directory(self, path: str) -> None:
        """Do nothing: a directory is there as soon as something is in it."""

    def put_link(self, path: str, target: str) -> None:
        """Refuse: there are no links here."""
        raise OSError(errno.EPERM, "there are no links on this disk", path)

    def set_permissions(self, path: str, permissions: int) -> None:
        """Do nothing: files have no permission bits here."""

    def _held(self, path: str) -> OpenCall:
        self._check_writer()
        call = self._disk.open_call
        if call is None:
            raise WorkspaceError(f"{path} is written outside of a call")
        call.before.setdefault(path, self._disk.files.get(path))
        return call

    def _write(self, call: OpenCall, path: str, content: bytes | None) -> None:
        self._life.check()
        call.wrote[path] = content
        self._disk.put(path, content, call.author)

    # --- boundaries --------------------------------------------------------------------------------

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary."""
        return FilesystemSnapshot(
            new_id(), self._life.world.clock.now(), str(len(self._disk.history)), "/", tag=tag
        )

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Refuse: nothing in the simulation goes back to a boundary by itself."""
        raise WorkspaceError("the simulation restores no snapshots")

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say nothing of differences: the oracle knows them."""
        return WorkspaceDiff((), "")

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> SimulatedCall:
        """Hold the workspace for one call."""
        self._take()
        self._life.may_die("begin")
        if self._disk.open_call is not None:
            raise WorkspaceError(
                f"{self._disk.open_call.call_id} holds the workspace; {call_id} cannot begin"
            )
        self._disk.begun[call_id] += 1
        self._disk.open_call = OpenCall(call_id, self._disk.attempt(call_id))
        self._life.may_die("begin/done")
        return SimulatedCall(self, self._disk.open_call, self.snapshot(tag=tool_name))

    def unfinished(self) -> Sequence[str]:
        """List the call that a crash left open."""
        return [] if self._disk.open_call is None else [self._disk.open_call.call_id]

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended."""
        self._take()
        self._life.may_die("recover", 0.05)
        call = self._disk.open_call
        if call is None or call.call_id != call_id:
            raise WorkspaceError(f"{call_id} is not open")
        report = RestoreReport() if committed else self._disk.undo(call)
        self._disk.open_call = None
        self._life.may_die("recover/done", 0.05)
        return report

    def end(self, call: OpenCall, *, undo: bool) -> RestoreReport:
        """End the open call."""
        self._check_writer()
        if self._disk.open_call is not call:
            return RestoreReport()
        self._life.may_die("undo" if undo else "finish")
        report = self._disk.undo(call) if undo else RestoreReport()
        self._disk.open_call = None
        return report

    def check(self) -> None:
        """Raise `StaleWorkspaceError` if another process has become the writer."""
        self._check_writer()

    def may_die(self, place: str) -> None:
        """Be killed here, if the seed says so."""
        self._life.may_die(place)

    def may_fill(self, place: str) -> None:
        """Fail as a full disk does, if the seed says so."""
        if self._life.world.strikes_now("disk full", place, 0.01):
            raise OSError(errno.ENOSPC, "no space left on device")

    def read_only_view(self) -> Filesystem:
        """Return a view that cannot change anything."""
        return ReadOnlyFilesystem(self)


@dataclass
class SimulatedCall:
    """One call's hold on the workspace."""

    filesystem: SimulatedFilesystem
    call: OpenCall
    base: FilesystemSnapshot

    @property
    def call_id(self) -> str:
        """The call that holds the workspace."""
        return self.call.call_id

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call."""
        self.filesystem.check()
        self.filesystem.may_fill("prepare")
        self.filesystem.may_die("prepare")
        return self.filesystem.snapshot()

    def finish(self) -> None:
        """Forget how to undo the call."""
        self.filesystem.end(self.call, undo=False)

    def rollback(self) -> RestoreReport:
        """Put back what the call changed."""
        return self.filesystem.end(self.call, undo=True)


def expected_files(disk: Disk, committed: set[str], people: set[str]) -> dict[str, bytes]:
    """Return what the files must be: what people and committed calls wrote last, in order."""
    files: dict[str, bytes] = {}
    for each in disk.history:
        if each.author in people or each.author in committed:
            if each.content is None:
                files.pop(each.path, None)
            else:
                files[each.path] = each.content
    return files


def workspace_name(session_id: UUID, call_id: str) -> str:
    """Return the name of a call in the workspace, as the runner makes it."""
    return f"{call_id}@{session_id}"

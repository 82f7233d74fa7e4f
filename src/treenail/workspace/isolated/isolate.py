"""One way to a copy of a workspace of either kind: on disk, or in memory."""

from __future__ import annotations

import os

from treenail.errors import UsageError
from treenail.workspace.base import Filesystem, FilesystemSnapshot, WorkspaceDiff
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.changes import ForkChange
from treenail.workspace.isolated.filesystem import IsolatedFilesystem
from treenail.workspace.isolated.fingerprints import fingerprint
from treenail.workspace.memory import InMemoryFilesystem


class IsolatedMemory(InMemoryFilesystem):
    """A copy of a workspace in memory that knows where it began."""

    def __init__(self, base: InMemoryFilesystem, snapshot: FilesystemSnapshot) -> None:
        super().__init__(forked_from=(base, snapshot))
        self.snapshot_at_fork = snapshot
        """The boundary of the other workspace at which this one began."""

    def changes(self) -> tuple[ForkChange, ...]:
        """Return what this copy has changed since it began, by path."""
        then = self.fork(self.snapshot_at_fork)
        found = []
        for each in self.diff(self.snapshot_at_fork).changes:
            before, after = fingerprint(then, each.path), fingerprint(self, each.path)
            if before != after:
                found.append(ForkChange(each.path, before, after, self))
        return tuple(found)

    def diff_since_fork(self) -> WorkspaceDiff:
        """Show what this copy has changed since it began."""
        return self.diff(self.snapshot_at_fork)

    def discard(self) -> None:
        """Do nothing: memory is freed with the copy."""


def isolate(
    base: Filesystem,
    *,
    snapshot: FilesystemSnapshot | None = None,
    place: str | os.PathLike[str] | None = None,
) -> IsolatedFilesystem | IsolatedMemory:
    """Make a copy of a workspace that goes its own way from a boundary on; by default, from now.

    A workspace on disk needs a `place` for what the copy will change; the same place, with the same
    boundary, is the same copy again. Raises `UsageError` for a workspace that cannot be copied.
    """
    if isinstance(base, InMemoryFilesystem):
        return IsolatedMemory(base, snapshot or quiet_boundary(base, tag="fork"))
    if isinstance(base, HostFilesystem):
        if place is None:
            raise UsageError("a copy of a workspace on disk needs a place for what it changes")
        return IsolatedFilesystem(base, snapshot or quiet_boundary(base, tag="fork"), place)
    raise UsageError(f"{base!r} cannot be copied: only workspaces in memory and on disk can, not their views")


def quiet_boundary(filesystem: Filesystem, *, tag: str | None = None) -> FilesystemSnapshot:
    """Return a boundary of a workspace that no open call is part of: where it was before that call."""
    call = filesystem.open_call if isinstance(filesystem, HostFilesystem | InMemoryFilesystem) else None
    return filesystem.snapshot(tag=tag) if call is None else call.base

"""Where a subagent works: with its parent, in a copy of its own, or reading only.

- `shared`: the parent's own filesystem object, so that both stand before one gate: their effects come one
  after the other, and each call is rolled back alone.
- `isolated`: a copy that begins where the parent's workspace was when the subagent started, without the
  calls that were under way. See `treenail.workspace.isolated`. What it changes stays there until somebody
  applies it.
- `read_only`: a view; tools with effects are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from treenail.errors import UsageError
from treenail.state.execution import ExecutionState
from treenail.subagents.records import SubagentCharter, WorkspaceMode
from treenail.tools.context import filesystem_of
from treenail.workspace.base import Filesystem, FilesystemSnapshot
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated import IsolatedFilesystem, IsolatedMemory, isolate, quiet_boundary
from treenail.workspace.memory import InMemoryFilesystem

Copy = IsolatedFilesystem | IsolatedMemory
"""A copy of a workspace that knows what it has changed."""


_SHOWN_PATHS = 20
"""How many changed paths are named in an ending's event."""


@dataclass(frozen=True, slots=True)
class ChildWorkspace:
    """A subagent's workspace while it is open."""

    filesystem: Filesystem | None
    root: str | None = None
    """The directory on disk, if the subagent works in one directly."""
    copy: Copy | None = None
    fork_base: FilesystemSnapshot | None = None
    fork_place: Path | None = None

    @property
    def must_be_held(self) -> bool:
        """Whether it is gone when nobody holds it."""
        return isinstance(self.copy, IsolatedMemory)

    def artifacts(self, subagent_id: str) -> tuple[str, ...]:
        """Name what is left behind for the parent: the changes of a copy."""
        if self.copy is None:
            return ()
        paths = [each.path for each in self.copy.changes()]
        if not paths:
            return ()
        shown = ", ".join(paths[:_SHOWN_PATHS]) + (" ..." if len(paths) > _SHOWN_PATHS else "")
        return (f"changes of {subagent_id}, not applied yet: {len(paths)} paths ({shown})",)

    def rest(self) -> None:
        """Let go of what can be opened again."""
        if isinstance(self.copy, IsolatedFilesystem):
            self.copy.close()


def open_workspace(
    state: ExecutionState,
    mode: WorkspaceMode,
    *,
    session_id: UUID,
    charter: SubagentCharter | None = None,
    held: ChildWorkspace | None = None,
    isolated_in: Path | None = None,
) -> ChildWorkspace:
    """Open the workspace of a subagent, the same one again if its charter or `held` says which.

    Raises `UsageError` if there is none to be had.
    """
    base = filesystem_of(state)
    if held is not None:
        return held
    if base is None:
        if mode == "isolated":
            raise UsageError("the parent has no workspace that could be copied")
        return ChildWorkspace(None)
    if mode == "read_only":
        return ChildWorkspace(base.read_only_view(), root=base.root)
    if mode == "shared":
        return ChildWorkspace(base, root=None if base.host_root is None else str(base.host_root))
    if isinstance(base, InMemoryFilesystem):
        if charter is not None:
            raise UsageError("its copy of the workspace was in the memory of a process that is gone")
        made = isolate(base)
        return ChildWorkspace(made, copy=made, fork_base=made.snapshot_at_fork)
    if not isinstance(base, HostFilesystem):
        raise UsageError(f"the parent's workspace {base!r} cannot be copied; share it, or read it only")
    boundary = charter.fork_base if charter is not None else quiet_boundary(base, tag="fork")
    if charter is not None and charter.fork_place is not None:
        place = Path(charter.fork_place)
    else:
        place = (isolated_in or _beside(base)) / str(session_id)
    copy = isolate(base, snapshot=boundary, place=place)
    return ChildWorkspace(copy, copy=copy, fork_base=boundary, fork_place=place)


def _beside(base: HostFilesystem) -> Path:
    """Return the directory for copies: in the private store, where nobody takes them for a workspace."""
    store = base.store_path
    assert store is not None, "a boundary was taken, so there is a store"
    return store / "isolated"

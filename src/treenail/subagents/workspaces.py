"""Where a subagent works: in its parent's workspace, in a copy of it, or in a read-only view of it.

- `shared`: the parent's own filesystem object. Calls with effects run one after the other through one gate,
  and each is rolled back alone.
- `isolated`: a copy that begins where the parent's workspace was when the subagent started, without the
  calls that were under way. See `treenail.workspace.isolated`. Its changes stay there until they are applied.
- `read_only`: a view; tools with effects are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from treenail.errors import UsageError
from treenail.state import ExecutionState, Session
from treenail.subagents.events import SubagentCharter, WorkspaceMode
from treenail.tools import filesystem_of
from treenail.workspace import (
    Filesystem,
    FilesystemSnapshot,
    InMemoryFilesystem,
    IsolatedFilesystem,
    IsolatedMemory,
    isolate,
    quiet_boundary,
)
from treenail.workspace.host import HostFilesystem

WorkspaceCopy = IsolatedFilesystem | IsolatedMemory
"""A copy of a workspace that knows its own changes."""

_SHOWN_PATHS = 20
"""How many changed paths an ending's event names."""


@dataclass(frozen=True, slots=True)
class ChildWorkspace:
    """A subagent's workspace while it is open."""

    filesystem: Filesystem | None
    root: str | None = None
    """The directory on disk, if the subagent works in one directly."""
    copy: WorkspaceCopy | None = None
    fork_base: FilesystemSnapshot | None = None
    fork_place: Path | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether it is a copy that exists only in this process."""
        return isinstance(self.copy, IsolatedMemory)

    def artifacts(self, subagent_id: str) -> tuple[str, ...]:
        """Describe what is left for the parent: the changes in a copy."""
        paths = [] if self.copy is None else [each.path for each in self.copy.changes()]
        if not paths:
            return ()
        shown = ", ".join(paths[:_SHOWN_PATHS]) + (" ..." if len(paths) > _SHOWN_PATHS else "")
        return (f"changes of {subagent_id}, not applied yet: {len(paths)} paths ({shown})",)

    def release(self) -> None:
        """Close what can be opened again."""
        if isinstance(self.copy, IsolatedFilesystem):
            self.copy.close()


def open_workspace(
    state: ExecutionState,
    mode: WorkspaceMode,
    *,
    session_id: UUID,
    charter: SubagentCharter | None = None,
) -> ChildWorkspace:
    """Open the workspace of a subagent; the same one again, if it has a charter.

    Raises `UsageError` if that is not possible.
    """
    base = filesystem_of(state)
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
        raise UsageError(f"the parent's workspace {base!r} cannot be copied; share it, or use read_only")
    boundary = charter.fork_base if charter is not None else quiet_boundary(base, tag="fork")
    if charter is not None and charter.fork_place is not None:
        place = Path(charter.fork_place)
    else:
        assert base.store_path is not None, "a boundary was taken, so there is a store"
        # In the private store, where it cannot be mistaken for a workspace.
        place = base.store_path / "isolated" / str(session_id)
    copy = isolate(base, snapshot=boundary, place=place)
    return ChildWorkspace(copy, copy=copy, fork_base=boundary, fork_place=place)


@contextmanager
def open_copy(
    state: ExecutionState,
    subagent_id: str,
    session_id: UUID,
    mode: WorkspaceMode,
) -> Iterator[WorkspaceCopy]:
    """Open the copy of a subagent that has ended. Raises `UsageError` if it has none, or it was deleted."""
    if mode != "isolated":
        raise UsageError(
            f"{subagent_id} works in a {mode} workspace; only an isolated one has changes of its own"
        )
    with Session.open(state.session.log, session_id, read_only=True) as session:
        charter = session[SubagentCharter].latest()
    if charter is None:
        raise UsageError(f"{subagent_id} never started, so there is no copy of the workspace")
    # Opening it would make an empty directory, which would look like a copy without changes.
    if charter.fork_place is not None and not Path(charter.fork_place).exists():
        raise UsageError(
            f"the copy of the workspace that {subagent_id} worked in, {charter.fork_place}, is gone"
        )
    workspace = open_workspace(state, "isolated", session_id=session_id, charter=charter)
    assert workspace.copy is not None
    try:
        yield workspace.copy
    finally:
        workspace.release()

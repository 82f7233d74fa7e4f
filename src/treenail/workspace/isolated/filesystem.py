"""The copy of a workspace on disk, put together: the overlay, and the scratch tree during foreign calls.

See `treenail.workspace.isolated` for the theory of operation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import BinaryIO

from treenail.clock import WallClock
from treenail.errors import PathEscapeError
from treenail.sandbox import Sandbox
from treenail.workspace.base import (
    Filesystem,
    FilesystemSnapshot,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
    WriteMode,
    WriteResult,
)
from treenail.workspace.diffs import describe
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.changes import ForkChange, diff_of
from treenail.workspace.isolated.commands import CopyLayer
from treenail.workspace.isolated.differences import differences
from treenail.workspace.isolated.fingerprints import NOTHING, Fingerprint, fingerprint
from treenail.workspace.isolated.notes import own_paths
from treenail.workspace.isolated.overlay import Overlay
from treenail.workspace.isolated.past import Past
from treenail.workspace.isolated.scratch import ScratchTree
from treenail.workspace.layers import CommandLayer, drop_left_layers, is_inside, memory_place, why_not
from treenail.workspace.views import PassedReads, ReadOnlyFilesystem


class IsolatedFilesystem(PassedReads[Overlay | HostFilesystem]):
    """A workspace of its own that began at a boundary of another one, on disk.

    `base` is the other workspace, `snapshot` a boundary of its history, and `place` the directory for what
    belongs to this one alone: it is made if it is not there, and found again after a restart. Nothing of
    `base` is ever changed through this object.
    """

    def __init__(
        self,
        base: HostFilesystem,
        snapshot: FilesystemSnapshot,
        place: str | os.PathLike[str],
        *,
        clock: WallClock | None = None,
    ) -> None:
        self._place = Path(place)
        self.snapshot_at_fork = snapshot
        """The boundary of the other workspace at which this one began."""
        (self._place / "layer").mkdir(parents=True, exist_ok=True)
        layer = HostFilesystem(self._place / "layer", store=self._place / "store", clock=clock)
        self._base = base
        self._overlay = Overlay(Past(base, snapshot), layer)
        self._scratch = ScratchTree(self._overlay, self._place, clock)
        self._layer: CopyLayer | None = None
        """What a command of the open call works on."""
        drop_left_layers(str(self._place / "layers"))
        # While a foreign call is open, operations go to the scratch tree.
        super().__init__(lambda: self._scratch.in_use or self._overlay)

    def __repr__(self) -> str:
        return f"<IsolatedFilesystem {str(self._place)!r}>"

    def close(self) -> None:
        """Let go of files. The copy stays where it is."""
        self._overlay.layer.close()
        self._scratch.close()

    def discard(self) -> None:
        """Remove everything that belongs to this copy alone."""
        self.close()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def root(self) -> str:
        """The root as shown to people and tools: the scratch tree if a process can be there, else `/`."""
        scratch = self._scratch.in_use
        return "/" if scratch is None else scratch.root

    @property
    def read_only(self) -> bool:
        """False."""
        return False

    @property
    def host_root(self) -> Path | None:
        """The directory where a process can work, during a foreign call; otherwise None."""
        scratch = self._scratch.in_use
        return None if scratch is None else scratch.host_root

    @property
    def sandbox(self) -> Sandbox:
        """How commands that work here are confined: as in the other workspace."""
        return self._base.sandbox

    # --- changing: see `Filesystem` ---

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        return self._behind().write(path, content, mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""
        return self._behind().write_bytes(path, content, mode=mode, create_parents=create_parents)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        self._behind().delete(path, recursive=recursive)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory. Outside of foreign calls, what is moved is copied."""
        self._behind().move(source, target, overwrite=overwrite)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        self._behind().mkdir(path, parents=parents, exist_ok=exist_ok)

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        self._behind().chmod(path, permissions)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link, as a process on disk could. The target is checked when it is followed."""
        self._behind().symlink(path, target)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed."""
        return self._behind().open_write(path, mode=mode, create_parents=create_parents)

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        return ReadOnlyFilesystem(self)

    # --- boundaries ---

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary. It always covers the whole tree, which can change only through this object."""
        with self._overlay.lock:
            self._scratch.absorb()
            return self._overlay.layer.snapshot(tag=tag, scan=scan)

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary of this copy."""
        with self._overlay.lock:
            self._scratch.absorb()
            report = self._overlay.restore(snapshot)
            if self._scratch.in_use is not None:
                self._scratch.bring_up()
            return report

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries of this copy, or between one and now."""
        with self._overlay.lock:
            self._scratch.absorb()
            return describe(differences(self._overlay, before, after))

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call. A foreign one has the tree written out first."""
        with self._overlay.lock:
            call = self._overlay.layer.begin(call_id, tool_name=tool_name, foreign=False)
            try:
                if foreign:
                    self._scratch.begin()
            except BaseException:
                call.rollback()
                raise
            return _IsolatedCall(self, call)

    @property
    def open_call(self) -> WorkspaceCall | None:
        """The call that holds this copy."""
        return self._overlay.layer.open_call

    def open_layer(self, *, elsewhere: bool = False) -> CommandLayer | str:
        """Open a layer for a command of the open call, or say why there can be none."""
        with self._overlay.lock:
            base, place = self._base, str(self._place / "layers")
            if elsewhere or is_inside(base.root, place):
                place = memory_place(place)
            refusal = why_not(base.root, place)
            if refusal is not None:
                return refusal
            unlike = self._overlay.unlike_host()
            if unlike is None:
                return "another command works in the original workspace itself"
            layer = CommandLayer(base.undo.tree, place, private=base.undo.private)
            try:
                self._layer = CopyLayer(self._overlay, layer, unlike)
            except BaseException:
                layer.drop()
                raise
            return layer

    def drop_layer(self) -> None:
        """Forget what the command on the open call's layer did."""
        with self._overlay.lock:
            layer, self._layer = self._layer, None
            if layer is not None:
                layer.layer.drop()

    def keep_caches(self, names: Collection[str]) -> None:
        """Do nothing: what a check leaves in a copy is of no use to the next."""

    def capture(self) -> None:
        """Write the tree out, for a command of the open call that works on a directory."""
        with self._overlay.lock:
            self._scratch.begin()

    def _settle(self) -> None:
        """Take what a command has done into the layer of the copy."""
        if self._layer is not None:
            self._layer.absorb()
            self.drop_layer()
        self._scratch.settle()

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open, oldest first: those that a crash left, and this object's own."""
        return self._overlay.layer.unfinished()

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended."""
        with self._overlay.lock:
            report = self._overlay.layer.recover(call_id, committed=committed)
            self._ended(undone=not committed)
            return RestoreReport(own_paths(report.restored), report.conflicts, report.notes)

    # --- what comes back ---

    def changes(self) -> tuple[ForkChange, ...]:
        """Return what this copy has changed since it began, by path."""
        with self._overlay.lock:
            self._scratch.absorb()
            found = []
            for path in sorted(self._overlay.changed_paths()):
                before = self._overlay.before(path)
                after = self._fingerprint(path)
                if before != after:
                    found.append(ForkChange(path, before, after, self))
            return tuple(found)

    def diff_since_fork(self) -> WorkspaceDiff:
        """Show what this copy has changed since it began."""
        with self._overlay.lock:
            return diff_of(self.changes(), self._overlay.content_before)

    # --- inside ---

    def _fingerprint(self, path: str) -> Fingerprint:
        try:
            return fingerprint(self, path)
        except PathEscapeError:
            return NOTHING

    def _ended(self, *, undone: bool) -> tuple[str, ...]:
        """A call is over: the layer is what counts. Returns what was put back in the scratch tree."""
        if undone:
            self._overlay.load_notes()
        return self._scratch.end(undone=undone)


class _IsolatedCall:
    """One tool call's hold on an isolated workspace."""

    def __init__(self, filesystem: IsolatedFilesystem, call: WorkspaceCall) -> None:
        self._filesystem = filesystem
        self._call = call

    @property
    def call_id(self) -> str:
        """The tool call that holds the workspace."""
        return self._call.call_id

    @property
    def base(self) -> FilesystemSnapshot:
        """The boundary before the call."""
        return self._call.base

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call; the call can still be rolled back."""
        with self._filesystem._overlay.lock:
            self._filesystem._settle()
            return self._call.prepare()

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        with self._filesystem._overlay.lock:
            self._filesystem._settle()
            self._call.finish()
            self._filesystem._ended(undone=False)

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        with self._filesystem._overlay.lock:
            self._filesystem.drop_layer()
            is_open = self.call_id in self._filesystem.unfinished()
            report = self._call.rollback()
            undone = self._filesystem._ended(undone=True) if is_open else ()
            return RestoreReport(own_paths((*report.restored, *undone)), report.conflicts, report.notes)

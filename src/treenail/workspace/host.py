"""A workspace on disk whose every change can be undone.

Theory of operation
-------------------
A `HostFilesystem` is put together from three parts, each with its own theory in its own file:

- `files.py` reads and changes files, and never leaves the root (`rooted.py`).
- `undo.py` records each change before it is made, and takes back a call (`calls.py`) or a stretch of history.
  A scan (`survey.py`) finds what a foreign process changed.
- `history.py` keeps the boundaries: one git commit per tool call in a private store. Git's index and work
  tree are never used; the workspace's own `.git` is content like any other.

**Two speeds.** Writes through this object are journalled, so a boundary costs what was changed and not
what is there. A scan (`snapshot(scan=True)`, `begin(foreign=True)`) looks at everything, and from then on
everything is known.

**What survives a crash.** A SIGKILL between any two system calls leaves either no journal (the call has
not begun or is over) or a journal that `recover` can end either way; ending is repeatable. With
`durable=True` the same holds for a power cut: journal, objects and files are synced in order.

**Whose change is it?** In a plain call, what the journal says. A path that holds neither what was there
before nor what the call wrote was changed by somebody else: it is left alone and reported. In a foreign
call every difference between the two scans belongs to the call; since some of them may be a person's, a
rollback first keeps whatever it takes away (`kept`, `bring_back`).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from treenail.clock import SystemClock, WallClock, new_id
from treenail.errors import UsageError, WorkspaceError
from treenail.sandbox import Sandbox
from treenail.workspace.base import (
    Filesystem,
    FilesystemSnapshot,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
)
from treenail.workspace.calls import HostCall
from treenail.workspace.files import Files
from treenail.workspace.history import check_line_name
from treenail.workspace.kept import KeptFiles
from treenail.workspace.layers import CommandLayer
from treenail.workspace.manifest import ABSENT, TEMPORARY_PREFIX, TEMPORARY_SUFFIX, State, is_within, same
from treenail.workspace.paths import ROOT, fail
from treenail.workspace.restorer import ReportBuilder, Restorer
from treenail.workspace.rooted import RootedDirectory, copy_tree
from treenail.workspace.scan import Exclusions, SnapshotLimits
from treenail.workspace.travel.publishing import Publisher
from treenail.workspace.undo import Undo
from treenail.workspace.views import ReadOnlyFilesystem


class HostFilesystem(Files):
    """A directory on disk as a workspace.

    `root` must exist. `store` is the directory of the private store; it is made when first needed. Without
    one, a temporary store is used and removed on `close()`: then nothing outlives the process. `line` names
    this workspace's history in the store, so that several can share one. `exclude` are patterns of paths
    that scans neither capture nor delete (see `Exclusions`); what is written through this object is
    undone wherever it is. `limits` bound a scan. `durable` makes calls survive a power cut, not only the
    end of the process. `sandbox` says how commands that work here are confined. `publisher` puts boundaries
    into a depot, for a workspace that travels. `_root` is another spelling of `root`.

    All operations may be used from several threads. Among the processes that share a store, one at a time is
    the workspace's writer (`writer.py`): from a turn's first change to its end (`turn`), or for one call or
    change outside of turns. Others can read; a change of theirs raises `WorkspaceBusyError`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        _root: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        line: str = "main",
        read_only: bool = False,
        exclude: Iterable[str] = (),
        limits: SnapshotLimits | None = None,
        durable: bool = False,
        clock: WallClock | None = None,
        sandbox: Sandbox | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        given = root if root is not None else _root
        if given is None:
            raise UsageError("a HostFilesystem needs the directory to work in: HostFilesystem(root)")
        check_line_name(line)
        tree = RootedDirectory(os.fspath(given))
        if not os.path.isdir(tree.path):
            kind = errno.ENOTDIR if os.path.exists(tree.path) else errno.ENOENT
            fail(kind, "the workspace root is not an existing directory; make it first", os.fspath(given))
        self._exclusions = Exclusions(exclude)
        self._limits = limits if limits is not None else SnapshotLimits()
        self._clock: WallClock = clock if clock is not None else SystemClock()
        undo = Undo(
            tree,
            store=None if store is None else os.path.realpath(os.fspath(store)),
            line=line,
            exclusions=self._exclusions,
            limits=self._limits,
            durable=durable,
            read_only=read_only,
            clock=self._clock,
            publisher=publisher,
        )
        self._sandbox = sandbox or Sandbox()
        super().__init__(tree, undo, durable=durable)

    def __repr__(self) -> str:
        return f"<HostFilesystem {self._tree.path!r}>"

    def __enter__(self) -> HostFilesystem:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files, and remove the store if it is a temporary one. A call that is open stays open."""
        with self._lock:
            self.undo.close()

    @property
    def root(self) -> str:
        """The directory on disk, as an absolute path."""
        return self._tree.path

    @property
    def read_only(self) -> bool:
        """Whether every changing operation is refused with `ReadOnlyError`."""
        return self.undo.read_only

    @property
    def host_root(self) -> Path | None:
        """The directory where a process can work, or None if this filesystem is read-only."""
        return None if self.undo.read_only else Path(self._tree.path)

    @property
    def store_path(self) -> Path | None:
        """The private store, a bare git repository, or None if none was needed yet."""
        return None if self.undo.store_path is None else Path(self.undo.store_path)

    @property
    def sandbox(self) -> Sandbox:
        """How commands that work here are confined. They do not see the private store."""
        return self._sandbox.hiding([self.store_path])

    @property
    def open_call(self) -> WorkspaceCall | None:
        """The call that holds the workspace through this object."""
        return self.undo.call

    def turn(self) -> AbstractContextManager[None]:
        """Span a turn: the first change in the block makes this process the writer, until the block ends."""
        return self.undo.turn()

    def rest(self) -> None:
        """Let another process write while a person is waited for; the next change takes it back."""
        self.undo.rest()

    def check_epoch(self) -> None:
        """Raise `StaleWorkspaceError` if another process has become the writer since this one was."""
        with self._lock:
            self.undo.check_epoch()

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        return ReadOnlyFilesystem(self)

    def pack(self) -> Path | None:
        """Let git see the history up to the newest boundary, and return the store.

        That happens by itself from time to time and when this object is closed; in between, git's view may
        be some boundaries old. Nothing else depends on it.
        """
        with self._lock:
            self.undo.pack()
            return self.store_path

    # --- boundaries --------------------------------------------------------------------------------

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary. With `scan`, it covers changes made past this object, too."""
        with self._lock:
            return self.undo.snapshot(tag=tag, scan=scan)

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary, forward ones included. A `scanned` one brings the whole tree back.

        Raises `SnapshotMismatchError` if the boundary is not in this workspace's history, and
        `WorkspaceConflictError` before anything is changed if somebody else's edits are in the way of a
        restore that is not scanned.
        """
        with self._lock:
            return self.undo.restore(snapshot)

    def preview_restore(self, snapshot: FilesystemSnapshot) -> WorkspaceDiff:
        """Say what `restore` would change, or raise the error that it would raise."""
        with self._lock:
            return self.undo.preview(snapshot)

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        with self._lock:
            return self.undo.diff(before, after)

    def changed_paths(self, before: FilesystemSnapshot, after: FilesystemSnapshot) -> Sequence[str]:
        """Return the paths that differ between two boundaries, without reading what is in them."""
        with self._lock:
            states = self.undo.states_between(before, after)
        return sorted(path for path, (first, last) in states.items() if not same(first, last))

    def files_at(self, snapshot: FilesystemSnapshot) -> Sequence[str]:
        """Return the paths of the files and links that are known of a boundary, sorted.

        These are the files that were written through the workspace by then, and after a scan all of them.
        """
        with self._lock:
            self.undo.position(snapshot)
            return sorted(self.undo.opened().files_of(snapshot.commit_ref))

    def read_at(self, snapshot: FilesystemSnapshot, path: str) -> bytes:
        """Return a file as it was at a boundary, or a link's target. Raises `FileNotFoundError`."""
        with self._lock:
            self.undo.position(snapshot)
            return self.undo.opened().read_of(snapshot.commit_ref, path)

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call.

        Raises `WorkspaceError` while another call holds it, or one that a crash left open is not recovered.
        """
        with self._lock:
            return self.undo.begin(call_id, tool_name=tool_name, foreign=foreign)

    def open_layer(self, *, elsewhere: bool = False) -> CommandLayer | str:
        """Open a layer over the tree for a command of the open call, or say why there can be none.

        `elsewhere` puts it on a filesystem in memory, for a store on one that cannot hold layers.
        """
        with self._lock:
            return self._held().open_layer(elsewhere=elsewhere)

    def drop_layer(self) -> None:
        """Forget what the command on the open call's layer did."""
        with self._lock:
            self._held().drop_layer()

    def keep_caches(self, names: Collection[str]) -> None:
        """Apply what the command on the layer did in cache directories; the rest of it is to be dropped.

        Those are the directories with these names, and those with a CACHEDIR.TAG.
        """
        with self._lock:
            self._held().keep_caches(names)

    def capture(self) -> None:
        """Scan the tree, for a command of the open call that works on the tree itself."""
        with self._lock:
            self._held().capture()

    def _held(self) -> HostCall:
        if self.undo.call is None:
            raise WorkspaceError("no call holds the workspace; a command needs one: begin it first")
        return self.undo.call

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open, oldest first: those that a crash left, and this object's own."""
        with self._lock:
            return self.undo.unfinished()

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended.

        A call that is already over needs nothing and says so in the report's notes: recovering may itself be
        cut off by a crash, and is then repeated.
        """
        with self._lock:
            return self.undo.recover(call_id, committed=committed)

    def kept(self) -> Sequence[KeptFiles]:
        """Return what undos have taken away without knowing whose it was, oldest first."""
        with self._lock:
            return self.undo.opened().kept()

    def bring_back(self, kept: KeptFiles, under: str = ROOT) -> RestoreReport:
        """Bring back what an undo has kept, or the part of it at or below a path.

        What is there now is kept in its turn.
        """
        files = {path: state for path, state in kept.files if under == ROOT or is_within(path, {under: ""})}
        with self._lock:
            return self.undo.bring_back(files, kept.call_id)

    def copy_kept(self, kept: KeptFiles, into: str | os.PathLike[str], under: str = ROOT) -> Sequence[str]:
        """Write what an undo has kept into another directory, where nothing is replaced; return the paths."""
        undo = self.undo.opened()
        tree, report = RootedDirectory(os.fspath(into)), ReportBuilder()
        plan = {path: state for path, state in kept.files if under == ROOT or is_within(path, {under: ""})}
        for path in tuple(plan):
            while path := path.rpartition("/")[0]:
                plan.setdefault(path, State("directory", 0o755))
        Restorer(tree, undo.objects, new_id().hex, report, sync=False).apply(
            plan, dict.fromkeys(plan, ABSENT)
        )
        if report.conflicts:
            fail(errno.EEXIST, "something is there already; name an empty directory", report.conflicts[0])
        return sorted(report.restored)

    def fork(self, snapshot: FilesystemSnapshot, into: str | os.PathLike[str]) -> HostFilesystem:
        """Make a workspace of its own, in a new directory, that begins at a boundary of this one.

        `into` must not exist yet, or be an empty directory; it appears complete or not at all. The fork
        has a temporary store; open its directory with a store of your own to keep its history. Files that
        are outside of what was kept (excluded ones, those of an unscanned boundary that nobody touched) are
        copied as they are now; pipes, sockets and devices are left out.
        """
        with self._lock:
            undo = self.undo
            undo.require_writable()
            if undo.call is not None:
                raise WorkspaceError(
                    f"the call {undo.call.call_id!r} holds the workspace; fork it when the call is over"
                )
            undo.position(snapshot)
            with undo.changing(), undo.opened().held():
                undo.flush_ambient()
                if snapshot.scanned:
                    undo.survey().boundary()
                plan, current, _ = undo.way_back(snapshot, {}, strict=False)
                target = self._copy_into(os.path.realpath(os.fspath(into)), plan, current)
            return HostFilesystem(
                target,
                exclude=self._exclusions.patterns,
                limits=self._limits,
                durable=self._durable,
                clock=self._clock,
                sandbox=self._sandbox,
            )

    def _copy_into(self, target: str, plan: Mapping[str, State], current: Mapping[str, State]) -> str:
        """Copy the tree beside a target, bring the copy to a plan's goals, and move it into place."""
        inside = os.path.commonpath((target, self._tree.path))
        if inside in (target, self._tree.path):
            raise UsageError(f"the fork {target} and the workspace {self._tree.path} would hold one another")
        owner = new_id().hex
        beside = os.path.join(os.path.dirname(target), f"{TEMPORARY_PREFIX}{owner}{TEMPORARY_SUFFIX}")
        os.mkdir(beside, 0o700)
        try:
            self.copy_out(beside)
            objects = self.undo.opened().objects
            restorer = Restorer(RootedDirectory(beside), objects, owner, ReportBuilder(), sync=self._durable)
            restorer.apply(plan, current)
            os.chmod(beside, stat.S_IMODE(os.stat(self._tree.path).st_mode))
            # Onto an empty directory or onto nothing; anything else is refused.
            os.rename(beside, target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return target

    def copy_out(self, directory: str | os.PathLike[str]) -> None:
        """Copy the tree, as it is now, into an empty directory."""
        source = self._tree.open_for_listing()
        destination = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            copy_tree(source, destination, skip=self.undo.private, is_temporary=self.undo.is_temporary)
        finally:
            os.close(source)
            os.close(destination)

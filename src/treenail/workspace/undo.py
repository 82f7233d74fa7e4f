"""What makes the changes of a workspace on disk undoable: journals, boundaries and restores.

Theory of operation
-------------------
Each change is written to a journal before it is made: to the open call's (`calls.py`), or else to the
*ambient* journal, which collects what is written outside of calls since the last boundary. A boundary turns a
journal into an entry of the history's line. Going back to a boundary folds the entries after it into a plan,
and `Restorer` carries the plan out, itself under a journal.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from treenail.clock import WallClock, new_id
from treenail.errors import (
    ObjectStoreError,
    ReadOnlyError,
    SnapshotMismatchError,
    StaleWorkspaceError,
    UsageError,
    WorkspaceBusyError,
    WorkspaceConflictError,
    WorkspaceError,
)
from treenail.workspace.base import FilesystemSnapshot, RestoreReport, WorkspaceDiff
from treenail.workspace.calls import HostCall, edited_since
from treenail.workspace.diffs import MAX_SHOWN_BYTES, describe, shown_path
from treenail.workspace.disk import FULL, sync_directory
from treenail.workspace.history import History, line_names, writer_path
from treenail.workspace.journal import Journal, JournalKind
from treenail.workspace.kept import KeptReason
from treenail.workspace.layers import drop_left_layers
from treenail.workspace.line import LineEntry, LineFile, fold
from treenail.workspace.manifest import (
    ABSENT,
    ANY,
    TEMPORARY_PREFIX,
    TEMPORARY_SUFFIX,
    Manifest,
    PathChange,
    State,
    StateKind,
    is_same_thing,
    is_within,
    same,
    temporary_owner,
)
from treenail.workspace.paths import ROOT, fail
from treenail.workspace.restorer import ReportBuilder, Restorer
from treenail.workspace.rooted import Place, RootedDirectory, change_mode, look, open_directory
from treenail.workspace.scan import Exclusions, SnapshotLimits
from treenail.workspace.survey import Survey
from treenail.workspace.travel.publishing import Publisher
from treenail.workspace.writer import WriterLock, writer_lock

_logger = logging.getLogger("treenail.workspace")

_MAX_WATCHED = 64
"""How many replaced files are held open until their call ends."""

MAX_NAMED_UNCOVERED = 100
"""How many uncovered paths a snapshot names one by one; the rest are counted."""


class Undo:
    """Records the changes of one workspace, takes its boundaries and goes back to them.

    The store is made when it is first needed. Without a `store` it is a temporary one that `close` removes.
    """

    def __init__(
        self,
        tree: RootedDirectory,
        *,
        store: str | None,
        line: str,
        exclusions: Exclusions,
        limits: SnapshotLimits,
        durable: bool,
        read_only: bool,
        clock: WallClock,
        publisher: Publisher | None = None,
    ) -> None:
        self.tree = tree
        self._publisher = publisher
        self.lock = threading.RLock()
        self.store_path = store
        self.history: History | None = None
        """The history, if the store was needed yet; `opened` makes it."""
        self.call: HostCall | None = None
        """The call that holds the workspace."""
        self._line_name = line
        self._exclusions = exclusions
        self._limits = limits
        self._durable = durable
        self.read_only = read_only
        self._clock = clock
        self._ambient: Journal | None = None
        self._writer: WriterLock | None = None
        """Who may write, across processes; None for a store that only this process knows."""
        self._is_writer = False
        self._epoch = 0
        self._turns = 0
        self._changes = 0
        """How many turns, and changes outside of turns, are under way."""
        self._instance = secrets.token_hex(8)
        self._left = ""
        """The journal that a crash left, by whose id its half-written files are known."""
        self._serial = 0
        self._watched: list[tuple[str, int, os.stat_result]] = []
        """Files that the open call has replaced: the path, a descriptor, and how they were then."""
        self._cleanup: Callable[[], object] | None = None
        self.private = self._private_path()
        """The store's path in the workspace, if it is in there."""
        if store is not None and os.path.exists(os.path.join(store, "HEAD")):
            self.opened()

    # --- the store ---------------------------------------------------------------------------------

    def opened(self) -> History:
        """Return the history; the store is made if need be."""
        if self.history is None:
            if self.store_path is None:
                self.store_path = os.path.realpath(tempfile.mkdtemp(prefix="treenail-workspace-"))
                self.private = self._private_path()
                self._cleanup = weakref.finalize(self, _remove_store, self.store_path, os.getpid())
            self.history = History(
                self.store_path,
                self._line_name,
                durable=self._durable,
                clock=self._clock,
                depot=None if self._publisher is None else self._publisher.depot,
            )
            if not self.read_only:
                self._ambient = self.history.load_ambient()
                journal = self._left_journal()
                in_use = () if journal is None else [str(note.get("directory")) for note in journal.notes]
                drop_left_layers(self.history.layers_path, in_use)
                if self._cleanup is None and self._writer is None:
                    path = writer_path(self.store_path, self.tree.path)
                    self._writer = writer_lock(path, self.tree.path)
                if self._left_restore() is not None:
                    # Another process may be in the middle of it.
                    with suppress(WorkspaceBusyError), self.changing():
                        self._clear_up()
        return self.history

    def _left_restore(self) -> Journal | None:
        journal = self._left_journal() if self.call is None else None
        return journal if journal is not None and journal.kind == "restore" else None

    def _clear_up(self) -> None:
        """End a restore that a crash left."""
        journal = self._left_restore()
        if journal is not None:
            call = self._adopt(journal)
            if journal.prepared:
                call.finish()
            else:
                call.rollback()

    def close(self) -> None:
        """Let go of files, and remove the store if it is a temporary one. A call that is open stays open."""
        if self.call is not None:
            self.call.journal.close()
        if self.history is not None and self._cleanup is None and not self.read_only:
            try:
                self.pack()
            except (WorkspaceBusyError, StaleWorkspaceError):
                pass  # The process that writes there packs it.
            except (OSError, ObjectStoreError) as error:
                # Nothing is lost: the next handle finds what is not packed in the spool.
                _logger.warning("%s could not be packed: %s", self.store_path, error)
        self.call = None
        self._turns = 0
        self.rest()
        self.detach()
        if self._cleanup is not None:
            self._cleanup()
            self._cleanup = self.store_path = None

    def detach(self) -> None:
        """Let go of the history."""
        if self._ambient is not None:
            self._ambient.close()
        if self.history is not None:
            self.history.close()
        self._ambient = self.history = None

    def pack(self) -> None:
        """Let git see the history up to the newest boundary."""
        if self.history is not None and not self.read_only:
            with self.changing(), self.opened().held():
                self.opened().pack()

    def survey(self) -> Survey:
        """Return what looks at the whole workspace."""
        return Survey(
            self.tree, self.opened(), self._exclusions, self._limits, self.private, self.is_temporary
        )

    def is_temporary(self, name: str) -> bool:
        """Say whether a name is that of a half-written file of ours."""
        owner = temporary_owner(name)
        if not owner:
            return False
        ambient = "" if self._ambient is None else self._ambient.id
        return owner in (self._instance, self._left, ambient, "" if self.call is None else self.call.owner)

    def discard_temporaries(self, journal: Journal, paths: Iterable[str]) -> None:
        """Remove half-written files of a journal from the directories that it has worked in."""
        for directory in {path.rpartition("/")[0] for path in (*paths, *journal.temporaries)}:
            try:
                with self.tree.strict(f"{directory}/{ROOT}" if directory else ROOT) as place:
                    descriptor = open_directory(place, directory)
                    try:
                        for name in os.listdir(descriptor):
                            if temporary_owner(name) == journal.id:
                                os.unlink(name, dir_fd=descriptor)
                    finally:
                        os.close(descriptor)
            except (FileNotFoundError, NotADirectoryError):
                continue

    def is_excluded(self, path: str) -> bool:
        """Say whether the operator has excluded a path from what is kept."""
        return self._exclusions.covers(path, directory=False)

    def may_keep(self, size: int) -> bool:
        """Say whether a file of a size may be kept in the history."""
        return size <= self._limits.max_file_bytes

    def is_private(self, path: str) -> bool:
        """Say whether a path lies in the store."""
        return self.private is not None and is_within(path, {self.private: ""})

    def _private_path(self) -> str | None:
        if self.store_path is None:
            return None
        relative = os.path.relpath(self.store_path, self.tree.path)
        if relative == ROOT or self.tree.path.startswith(self.store_path + "/"):
            raise UsageError(
                f"the store {self.store_path} holds the workspace {self.tree.path}; "
                f"put it beside the workspace, or into a directory of its own below it"
            )
        return None if relative.startswith("../") else relative

    # --- one writer (`writer.py`) ----------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Span a change of the workspace or of its history: only the workspace's writer may make one.

        Raises `WorkspaceBusyError` while another process is the writer. Outside of a turn or a call the
        workspace is given back at the end.
        """
        with self.lock:
            self.require_writable()
            self._changes += 1
            try:
                self._become_writer()
                yield
            finally:
                self._changes -= 1
                self._let_go()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Span a turn: its first change makes this process the writer, its end releases that."""
        with self.lock:
            self._turns += 1
        try:
            yield
        finally:
            with self.lock:
                self._turns = max(self._turns - 1, 0)
                self._let_go()

    def rest(self) -> None:
        """Let another process write, also in the middle of a turn; not in the middle of a call."""
        with self.lock:
            if self.call is None and not self._changes and self._is_writer and self._writer is not None:
                self._is_writer = False
                self._writer.give_back()

    def check_epoch(self) -> None:
        """Raise `StaleWorkspaceError` if another process has become the writer since this one was."""
        if self._is_writer and self._writer is not None:
            self._writer.check()

    def _become_writer(self) -> None:
        if self._is_writer:
            self.check_epoch()
            return
        if self.store_path is not None:
            self.opened()
        if self._writer is None or self._is_writer:
            return
        before, self._epoch, known = *self._writer.take(), self._epoch
        self._is_writer = True
        if before != known:
            # Another process may have written the history since it was read here.
            self.detach()
            self.opened()

    def _let_go(self) -> None:
        if not self._turns:
            self.rest()

    # --- recording changes: the door for `Files` -----------------------------------------------------

    def require_writable(self) -> None:
        """Raise `ReadOnlyError` if the workspace was opened to be looked at only."""
        if self.read_only:
            raise ReadOnlyError(f"the workspace {self.tree.path} is read-only; nothing was changed")

    def journal(self) -> Journal | None:
        """Return the journal that a change belongs to.

        That is the open call's, or else the one that collects changes since the last boundary. Before
        the first boundary there is nothing to go back to, and nothing is kept.
        """
        self.require_writable()
        if self.call is not None:
            return self.call.journal
        head = None if self.history is None else self.history.line.head
        if self._ambient is None and self.history is not None and head is not None:
            self.history.end_recorded_ambient()
            self._ambient = Journal(
                self.history.ambient_path, secrets.token_hex(8), "ambient", head.commit, durable=self._durable
            )
            self._ambient.start()
        return self._ambient

    def keep(self, place: Place) -> State:
        """Return what is at a place before it is changed; at the first change its content is stored.

        Without a journal nothing is stored, and only the kind is looked at.
        """
        journal, kind = self.journal(), _kind(place.lstat())
        if journal is None:
            return State(kind)
        last = journal.last_state(place.path)
        if last is not None and last.kind == kind:
            return last
        # Not touched yet, or an intended change failed: look, and keep what is there.
        state = look(place, self.opened().objects)
        if state.kind == "other":
            fail(
                errno.EACCES,
                "this is neither a file nor a directory nor a link, and cannot be kept",
                place.path,
            )
        return state

    def intend(self, changes: Iterable[PathChange]) -> None:
        """Write down what is about to be changed; what `keep` found is on disk before.

        A file that is being written is removed by a rollback, so it is not put back by one either.
        """
        journal = self.journal()
        self.check_epoch()
        if journal is not None:
            self.opened().objects.flush()
            journal.intend(
                change for change in changes if not self.is_temporary(change.path.rpartition("/")[2])
            )

    def intend_temporary(self, path: str) -> str:
        """Return a name for a file that is about to be written for a path; a recovery knows it."""
        journal = self.journal()
        if journal is not None:
            journal.intend_temporary(path)
        return self.temporary_name()

    def temporary_name(self) -> str:
        """Return a new name for a temporary file beside a path that the journal knows."""
        journal = self.journal()
        self._serial += 1
        owner = self._instance if journal is None else journal.id
        return f"{TEMPORARY_PREFIX}{owner}-{self._serial:x}{TEMPORARY_SUFFIX}"

    def watch(self, place: Place, before: State) -> None:
        """Remember a file that is about to be replaced: a program may be about to save into it."""
        if self.call is None or before.kind != "file" or len(self._watched) >= _MAX_WATCHED:
            return
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(place.name, flags, dir_fd=place.descriptor)
        except OSError:
            return
        self._watched.append((place.path, descriptor, os.fstat(descriptor)))

    def keep_late_writes(self, call_id: str, tool_name: str) -> None:
        """Keep what a program has written into files that it had open while the call replaced them."""
        found: list[tuple[str, State]] = []
        watched, self._watched = self._watched, []
        for path, descriptor, before in watched:
            try:
                now = os.fstat(descriptor)
                is_gone = now.st_nlink == 0
                if is_gone and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    content = self.opened().objects.write_descriptor(descriptor, now.st_size)
                    if content is not None:
                        mode = stat.S_IMODE(now.st_mode)
                        found.append((path, State("file", mode, content, now.st_size, now.st_mtime_ns)))
            finally:
                os.close(descriptor)
        if found:
            self.opened().keep(found, root=self.tree.path, call_id=call_id, tool_name=tool_name)
            shown = ", ".join(shown_path(path) for path, _ in found)
            _logger.warning("%s was written to while it was replaced; `treenail recover` has it", shown)

    # --- looking at the history and the tree ---------------------------------------------------------

    def head(self) -> LineEntry:
        """Return the newest boundary of the line."""
        return self.opened().head(self.tree.path)

    def newest(self) -> LineEntry:
        """Return the newest boundary, one that was taken inside the open call included."""
        return self.call.segments[-1] if self.call is not None and self.call.segments else self.head()

    def entries(self) -> list[LineEntry]:
        """Return the whole history, with the boundaries taken inside an open call at its end."""
        entries = [] if self.history is None else self.history.line.entries
        return entries if self.call is None else [*entries, *self.call.segments]

    def position(self, snapshot: FilesystemSnapshot) -> int:
        """Return where a snapshot is in `entries`. Raises `SnapshotMismatchError` if it is not there."""
        position = None if self.history is None else self.history.line.position(snapshot.commit_ref)
        if position is not None:
            return position
        segments = () if self.call is None else self.call.segments
        for number, segment in enumerate(segments):
            if segment.commit == snapshot.commit_ref:
                return len(self.opened().line) + number
        raise SnapshotMismatchError(
            f"the snapshot {snapshot.snapshot_id} ({snapshot.root_path}, "
            f"{snapshot.created_at.isoformat()}) is not in the history {self._line_name!r} of this "
            f"workspace: it was taken elsewhere, or inside a call that was rolled back; nothing was changed"
        )

    def snapshot_at(
        self, entry: LineEntry, tag: str | None, manifest: Manifest | None = None
    ) -> FilesystemSnapshot:
        """Return a snapshot of a boundary; with the `manifest` of a scan, it covers the whole tree.

        If the workspace travels, the boundary is in the depot when this returns.
        """
        record = ""
        if self._publisher is not None:
            record = self._publisher.publish(self.opened(), self.entries(), entry)
        return FilesystemSnapshot(
            snapshot_id=new_id(),
            created_at=self._clock.now(),
            commit_ref=entry.commit,
            root_path=self.tree.path,
            git_dir=self.store_path,
            tag=tag,
            scanned=manifest is not None,
            uncovered=() if manifest is None else _sentences(manifest.uncovered),
            record=record,
        )

    def other_names(self, path: str, status: os.stat_result) -> list[tuple[str, State]]:
        """Return the paths of the open journal, and their states, that are other names of a file."""
        journal = self.journal()
        found = []
        for other in () if journal is None else journal.first_states():
            if other != path:
                with suppress(FileNotFoundError, NotADirectoryError), self.tree.strict(other) as place:
                    there = place.lstat()
                    if there is not None and os.path.samestat(there, status):
                        found.append((other, self.keep(place)))
        return found

    def open_journal(self) -> Journal | None:
        """Return the journal that collects changes right now, if there is one."""
        return self._ambient if self.call is None else self.call.journal

    def look(self, path: str, *, keep: bool) -> State:
        """Return what is at a path; with `keep`, its content is stored."""
        try:
            with self.tree.strict(path) as place:
                return look(place, self.opened().objects if keep else None)
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        except OSError as error:
            if error.errno == errno.ELOOP:
                return ABSENT
            raise

    def changes_of(self, journal: Journal, known: Sequence[PathChange] = ()) -> list[PathChange]:
        """Return what a journal's paths have become since its last boundary; new content is stored.

        What paths have become that a layer has just changed is `known`.
        """
        changes: list[PathChange] = []
        told = {change.path: change.after for change in known}
        for path, before in journal.first_states(journal.segment_start).items():
            if path in told:
                if not same(before, told[path]):
                    changes.append(PathChange(path, before, told[path]))
                continue
            after = self.look(path, keep=True)
            if not same(before, after):
                changes.append(PathChange(path, before, after))
        if self._durable:
            for directory in {path.rpartition("/")[0] for path, _, _ in changes}:
                try:
                    sync_directory(os.path.join(self.tree.path, directory))
                except (FileNotFoundError, NotADirectoryError):
                    pass
        return changes

    # --- boundaries --------------------------------------------------------------------------------

    def snapshot(self, *, tag: str | None, scan: bool) -> FilesystemSnapshot:
        """Take a boundary. With `scan`, it covers changes made past the workspace, too."""
        self.require_writable()
        with self._changing_if(scan or self._is_touched), self.opened().held():
            if self.call is not None:
                return self.call.snapshot(tag, scan=scan)
            self.flush_ambient()
            manifest = self.survey().boundary() if scan else None
            return self.snapshot_at(self.head(), tag, manifest)

    @property
    def _is_touched(self) -> bool:
        journal = self.open_journal()
        return journal is not None and journal.touched

    def _changing_if(self, is_change: bool) -> AbstractContextManager[None]:
        """Looking needs no writer: naming the newest boundary changes nothing."""
        return self.changing() if is_change else nullcontext()

    def flush_ambient(self) -> dict[str, State]:
        """Make a boundary of what was written outside of calls since the last one.

        Returns what was found at the paths that changed.
        """
        journal = self._ambient
        if journal is None or not journal.touched:
            return {}
        history = self.opened()
        changes = self.changes_of(journal)
        if changes:
            commit = history.commit(changes, "Written outside of tool calls", parent=self.head().commit)
            edited = edited_since(journal, changes)
            history.append(LineEntry("ambient", commit, tuple(changes), journal.id, edited))
        journal.end()
        self._ambient = None
        return {path: after for path, _, after in changes}

    def states_between(
        self, before: FilesystemSnapshot, after: FilesystemSnapshot | None
    ) -> dict[str, tuple[State, State]]:
        """Return both states of each path that may differ between two boundaries, or between one and now."""
        start = self.position(before)
        if after is None:
            return self._states_now(before, start)
        end = self.position(after)
        low, high = min(start, end), max(start, end)
        steps = fold(self.entries()[low + 1 : high + 1], outside=before.scanned or after.scanned)
        if start > end:
            return {path: (step.last, step.first) for path, step in steps.items()}
        return {path: (step.first, step.last) for path, step in steps.items()}

    def _states_now(self, before: FilesystemSnapshot, start: int) -> dict[str, tuple[State, State]]:
        steps = fold(self.entries()[start + 1 :], outside=before.scanned)
        firsts = {path: step.first for path, step in steps.items()}
        journal = self.open_journal()
        if journal is not None:
            for path, first in journal.first_states(journal.segment_start).items():
                firsts.setdefault(path, first)
        found = {path: (first, self.look(path, keep=True)) for path, first in firsts.items()}
        if before.scanned:
            survey = self.survey()
            manifest = survey.manifest() if self.call is None else self.call.working_manifest()
            for path, known, now in survey.sort_out(manifest, survey.scan(manifest, keep=True))[0]:
                found[path] = (firsts.get(path, known), now)
        return found

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        states = self.states_between(before, after)
        version = self.opened().version
        self.opened().objects.fetch(
            each.oid for pair in states.values() for each in pair if each.oid and each.size <= MAX_SHOWN_BYTES
        )
        return describe((path, version(first), version(last)) for path, (first, last) in states.items())

    # --- calls -------------------------------------------------------------------------------------

    def begin(self, call_id: str, *, tool_name: str, foreign: bool) -> HostCall:
        """Hold the workspace for one tool call."""
        self.require_writable()
        if not call_id:
            raise UsageError("a call needs an id; pass the tool call's own")
        with self.changing():
            return self._begin(call_id, tool_name=tool_name, foreign=foreign)

    def _begin(self, call_id: str, *, tool_name: str, foreign: bool) -> HostCall:
        if self.call is not None:
            raise WorkspaceError(
                f"the call {self.call.call_id!r} holds the workspace, so {call_id!r} cannot begin; "
                f"finish it or roll it back first"
            )
        history = self.opened()
        left = self._left_journal()
        if left is not None and left.kind == "call":
            raise WorkspaceError(
                f"the call {left.call_id!r} was left open by a crash, so {call_id!r} cannot begin; "
                f"recover({left.call_id!r}, committed=...) first"
            )
        history.hold()
        try:
            self.flush_ambient()
            manifest = self.survey().boundary() if foreign else None
            base = self.snapshot_at(self.head(), tool_name or None, manifest)
            journal = self.start_journal("call", call_id, base, foreign=True) if foreign else None
        except BaseException:
            history.release()
            raise
        self.call = HostCall(self, call_id, base, journal)
        return self.call

    def release(self, call: HostCall) -> None:
        """Let go of the workspace: the call is over."""
        assert self.call is call
        self.call = None
        self.opened().release()
        self._let_go()

    def start_journal(
        self, kind: JournalKind, call_id: str, base: FilesystemSnapshot, *, foreign: bool
    ) -> Journal:
        """Start the journal of what begins at a boundary; the boundary's tag is the tool's name."""
        journal = Journal(
            self.opened().call_path,
            secrets.token_hex(8),
            kind,
            base.commit_ref,
            call_id,
            base.tag or "",
            foreign,
            self._durable,
        )
        if foreign or kind != "call":
            # A plain call's is written with its first record: before, nothing is to undo.
            journal.start()
        return journal

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open, oldest first: those that a crash left, and this object's own."""
        journal = self._left_journal() if self.call is None else self.call.journal
        return [] if journal is None or journal.kind != "call" else [journal.call_id]

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended."""
        self.require_writable()
        if call_id not in self.unfinished():
            return RestoreReport(notes=(f"the call {call_id!r} is not open here; there was nothing to do",))
        with self.changing():
            call = self.call
            if call is None:
                journal = self._left_journal()
                if journal is None or journal.call_id != call_id:
                    return RestoreReport(notes=(f"the call {call_id!r} was ended by another process",))
                call = self._adopt(journal)
            if committed:
                call.finish()
                return RestoreReport()
            return call.rollback()

    def _left_journal(self) -> Journal | None:
        """Return the journal of a call or restore that a crash left, if any."""
        if self.history is None:
            return None
        journal = Journal.load(self.history.call_path, durable=self._durable)
        self._left = "" if journal is None else journal.id
        return journal

    def _adopt(self, journal: Journal) -> HostCall:
        """Take over a call that a crash left."""
        history = self.opened()
        history.hold()
        base = history.line.position(journal.base)
        entry = history.line.entries[base] if base is not None else self.head()
        self.call = HostCall(
            self, journal.call_id, self.snapshot_at(entry, journal.tool_name or None), journal
        )
        return self.call

    # --- going back --------------------------------------------------------------------------------

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary, forward ones included. A `scanned` one brings the whole tree back."""
        self.require_writable()
        self.position(snapshot)
        with self.changing(), self.opened().held():
            fresh: dict[str, State] = {}
            if self.call is not None:
                self.call.snapshot(None, scan=snapshot.scanned)
            else:
                fresh = self.flush_ambient()
                if snapshot.scanned:
                    self.survey().boundary()
            plan, current, notes = self.way_back(snapshot, fresh)
            report = ReportBuilder(notes=notes)
            label = f"to {snapshot.commit_ref[:12]}"
            self._keep_unproven(plan, current, label, "restored", report)
            if plan and self.call is not None:
                self._intend_plan(plan, current)
                self.apply(plan, current, self.call.journal.id, report)
            elif plan:
                self._apply_as_restore(label, plan, current, report)
        return report.build()

    def preview(self, snapshot: FilesystemSnapshot) -> WorkspaceDiff:
        """Say what a restore would change, or raise the error that it would raise."""
        plan, current, _ = self.way_back(snapshot, {})
        version = self.opened().version
        return describe((path, version(current[path]), version(goal)) for path, goal in plan.items())

    def bring_back(self, files: Mapping[str, State], call_id: str) -> RestoreReport:
        """Bring back what an undo has kept. What is there now is kept in its turn."""
        self.require_writable()
        if self.call is not None:
            raise WorkspaceError(
                f"the call {self.call.call_id!r} holds the workspace; bring files back when it is over"
            )
        with self.changing(), self.opened().held():
            self.flush_ambient()
            goals = dict(files)
            for path, state in files.items():
                directory = path.rpartition("/")[0]
                while directory and directory not in goals and state.kind != "absent":
                    if self.look(directory, keep=False).kind != "directory":
                        goals[directory] = State("directory", 0o755)
                    directory = directory.rpartition("/")[0]
            current = {path: self.look(path, keep=True) for path in goals}
            plan = {path: goal for path, goal in goals.items() if not same(current[path], goal)}
            report = ReportBuilder()
            self._keep_unproven(plan, current, call_id, "recovered", report)
            if plan:
                self._apply_as_restore(f"of {call_id}", plan, current, report)
        return report.build()

    def _keep_unproven(
        self,
        plan: Mapping[str, State],
        current: Mapping[str, State],
        call_id: str,
        reason: KeptReason,
        report: ReportBuilder,
    ) -> None:
        """Keep what a restore is about to change, where no journal says that a call of ours wrote it.

        The content is in the store already: making the plan stored it. What a redo has brought back
        is as unproven as it was before.
        """
        proven: dict[str, bool] = {}
        unproven: set[tuple[str, bytes]] = set()
        for entry in self.entries():
            for path, _, after in entry.changes:
                if entry.scanned or path in entry.edited:
                    unproven.add((path, after.oid))
                proven[path] = (path, after.oid) not in unproven
        files = [
            (path, current[path])
            for path in plan
            if current[path].kind in ("file", "link") and not proven.get(path, False)
        ]
        if files:
            kept = self.opened().keep(files, root=self.tree.path, call_id=call_id, reason=reason)
            report.kept |= set(kept.paths)

    def way_back(
        self, snapshot: FilesystemSnapshot, fresh: Mapping[str, State], *, strict: bool = True
    ) -> tuple[dict[str, State], dict[str, State], list[str]]:
        """Return the goal of each path that differs from a boundary, what is there now, and remarks.

        `fresh` has what was found at paths a moment ago.

        Raises `WorkspaceConflictError` if somebody else's edits are in the way, unless it is not `strict`.
        """
        history = self.opened()
        after = self.entries()[self.position(snapshot) + 1 :]
        if snapshot.scanned and any(entry.baseline for entry in after):
            raise SnapshotMismatchError(
                f"the manifest that belongs to the snapshot {snapshot.snapshot_id} was lost from "
                f"{self.store_path}, so the whole tree cannot be brought back to it; its files are still in "
                f"commit {snapshot.commit_ref[:12]} there"
            )
        uncovered = self._uncovered_at(snapshot) if snapshot.scanned else {}
        plan: dict[str, State] = {}
        current: dict[str, State] = {}
        conflicts: list[str] = []
        notes: list[str] = []
        for path, step in fold(after, outside=snapshot.scanned).items():
            if is_within(path, uncovered) and not history.is_known(snapshot.commit_ref, path):
                continue
            now = fresh[path] if path in fresh else self.look(path, keep=True)
            if same(now, step.first):
                continue
            if step.first.kind == "other":
                left = "was not brought back" if now.kind == "absent" else "was left as it is"
                notes.append(f"{shown_path(path)} {left}: it could not be kept at that boundary")
                continue
            if not snapshot.scanned and step.last.kind == "other" and now.kind == "file":
                notes.append(f"{shown_path(path)} was left as it is: it could not be kept after its call")
                continue
            if not snapshot.scanned and (step.broken or not is_same_thing(now, step.last)):
                conflicts.append(path)
            plan[path] = step.first
            current[path] = now
        if conflicts and strict:
            raise WorkspaceConflictError(
                f"somebody else changed {', '.join(map(shown_path, sorted(conflicts)[:10]))}"
                f"{' and more' if len(conflicts) > 10 else ''} since; nothing was restored: put that aside, "
                f"or back as it was, and try again",
                paths=sorted(conflicts),
            )
        return plan, current, notes

    def _uncovered_at(self, snapshot: FilesystemSnapshot) -> dict[str, str]:
        """Return what the scan of a boundary could not keep; one that found nothing new left no boundary."""
        for entry in reversed(self.entries()[: self.position(snapshot) + 1]):
            if entry.scanned:
                return dict(entry.uncovered)
        return {}

    def _apply_as_restore(
        self,
        label: str,
        plan: Mapping[str, State],
        current: Mapping[str, State],
        report: ReportBuilder,
    ) -> None:
        """Restore under a journal of its own, so that a crash or an error leaves all or nothing."""
        base = self.snapshot_at(self.head(), "restore")
        journal = self.start_journal("restore", label, base, foreign=False)
        call = HostCall(self, journal.call_id, base, journal)
        self.opened().hold()
        self.call = call
        try:
            self._intend_plan(plan, current)
            self.apply(plan, current, journal.id, report)
            missed = set(report.conflicts)
            changes = [
                PathChange(path, current[path], goal) for path, goal in plan.items() if path not in missed
            ]
            call.take_segment(changes, prepared=True)
        except BaseException:
            call.rollback()
            raise
        call.finish()

    def _intend_plan(self, plan: Mapping[str, State], current: Mapping[str, State]) -> None:
        """Write down that paths will be brought to their goals.

        A path on its way there may have the goal's content without its bits and owner. Where a directory
        replaces something else, or the other way round, nothing is there in between.
        """
        changes: list[PathChange] = []
        for path, goal in plan.items():
            before = current[path]
            if "directory" in (before.kind, goal.kind) and before.kind != goal.kind:
                changes.append(PathChange(path, before, ABSENT))
                before = ABSENT
            changes.append(PathChange(path, before, goal._replace(mode=ANY, uid=ANY, gid=ANY)))
        self.intend(changes)

    def apply(
        self,
        plan: Mapping[str, State],
        current: Mapping[str, State],
        owner: str,
        report: ReportBuilder,
        *,
        is_original: Callable[[str, int], bool] = lambda path, inode: False,
    ) -> None:
        """Bring each path to its goal; see `restorer.py`."""
        self.check_epoch()
        objects = self.opened().objects
        objects.fetch(goal.oid for goal in plan.values() if goal.oid)
        restorer = Restorer(self.tree, objects, owner, report, sync=self._durable, is_original=is_original)
        restorer.apply(plan, current)

    def written_by_others(self, since_ns: int) -> dict[str, State]:
        """Return what calls of the store's other lines, written to since then, have last made of each path.

        Several runs may work in one directory, one after the other; each has a line of its own.
        """
        history, found = self.opened(), dict[str, State]()
        for name in line_names(history.store_path):
            path = os.path.join(os.path.dirname(history.directory), name, "line")
            if name == self._line_name or not os.path.exists(path) or os.stat(path).st_mtime_ns < since_ns:
                continue
            for entry in LineFile(path, durable=False).entries:
                if entry.kind != "scan":
                    found.update((change.path, change.after) for change in entry.changes)
        return found

    # --- what an undo takes away --------------------------------------------------------------------

    def set_aside(
        self, paths: Mapping[str, State], call_id: str, tool_name: str, report: ReportBuilder
    ) -> dict[str, State]:
        """Keep what is at paths that an undo is about to change, and return it; see `History.keep`.

        If the disk is too full, the largest of them are removed until there is room: otherwise nothing could
        be undone, and the disk would stay full. The report names them.
        """
        # A scan has seen all that there is to a directory.
        found = {path: state for path, state in paths.items() if state.kind == "directory"}
        while True:
            try:
                for path in paths:
                    if path in found:
                        continue
                    try:
                        found[path] = self._look_hard(path)
                    except OSError as error:
                        if error.errno != errno.EBUSY:
                            raise
                        # It keeps changing, and every process of the call has ended.
                        report.conflicts.append(path)
                        found[path] = ABSENT
                files = [
                    (path, state) for path, state in found.items() if state.kind not in ("absent", "other")
                ]
                if files:
                    kept = self.opened().keep(
                        files, root=self.tree.path, call_id=call_id, tool_name=tool_name
                    )
                    report.kept |= set(kept.paths)
                return found
            except OSError as error:
                if error.errno not in FULL:
                    raise
                largest = self._remove_largest(paths)
                if largest is None:
                    raise
                state = found.get(largest)
                if state is None or self.opened().objects.unstage(state.oid):
                    # Others with the same content are looked at again.
                    found = {
                        path: each for path, each in found.items() if state is None or each.oid != state.oid
                    }
                    found[largest] = ABSENT
                    report.lost.append(largest)

    def _look_hard(self, path: str) -> State:
        """Return what is at a path and store its content, even if its bits forbid its owner to read it."""
        try:
            return self.look(path, keep=True)
        except PermissionError:
            with self.tree.strict(path) as place:
                status = place.lstat()
                if status is None:
                    return ABSENT
                change_mode(place, stat.S_IMODE(status.st_mode) | stat.S_IRUSR)
            return self.look(path, keep=True)._replace(mode=stat.S_IMODE(status.st_mode))

    def _remove_largest(self, paths: Iterable[str]) -> str | None:
        """Remove the largest file of these, to make room; return it, or None if none holds anything."""
        sizes: dict[str, int] = {}
        for path in paths:
            try:
                with self.tree.strict(path) as place:
                    status = place.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if status is not None and stat.S_ISREG(status.st_mode):
                sizes[path] = status.st_blocks
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is None or not sizes[largest]:
            return None
        with self.tree.strict(largest) as place:
            os.unlink(place.name, dir_fd=place.descriptor)
        return largest


def _kind(status: os.stat_result | None) -> StateKind:
    if status is None:
        return "absent"
    if stat.S_ISDIR(status.st_mode):
        return "directory"
    if stat.S_ISLNK(status.st_mode):
        return "link"
    return "file" if stat.S_ISREG(status.st_mode) else "other"


def _sentences(uncovered: Mapping[str, str]) -> tuple[str, ...]:
    named = [
        f"{path or ROOT} is not covered: {reason}"
        for path, reason in sorted(uncovered.items())[:MAX_NAMED_UNCOVERED]
    ]
    if len(uncovered) > len(named):
        named.append(f"{len(uncovered) - len(named)} more paths are not covered")
    return tuple(named)


def _remove_store(path: str, owner: int) -> None:
    # A forked child must not take its parent's store away when it ends.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)

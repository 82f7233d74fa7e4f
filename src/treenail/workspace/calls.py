"""One tool call's hold on a workspace on disk, and how the call is undone."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treenail.errors import WorkspaceConflictError, WorkspaceError
from treenail.workspace.applying import AppliedLayer, conflict
from treenail.workspace.base import FilesystemSnapshot, RestoreReport
from treenail.workspace.history import one_line
from treenail.workspace.journal import Journal
from treenail.workspace.layers import CommandLayer, is_inside, memory_place, why_not
from treenail.workspace.line import EntryKind, LineEntry
from treenail.workspace.manifest import (
    ABSENT,
    Manifest,
    PathChange,
    State,
    is_same_thing,
    same,
    temporary_owner,
)
from treenail.workspace.restorer import ReportBuilder
from treenail.workspace.rooted import discard

if TYPE_CHECKING:
    from treenail.workspace.undo import Undo

_logger = logging.getLogger("treenail.workspace")


class HostCall:
    """One tool call's hold on a workspace on disk.

    A boundary that is taken inside a call is a *segment* of its journal; it counts when the call does.
    """

    def __init__(
        self, undo: Undo, call_id: str, base: FilesystemSnapshot, journal: Journal | None = None
    ) -> None:
        self._undo = undo
        self.call_id = call_id
        """The tool call that holds the workspace."""
        self.base = base
        """The boundary before the call."""
        self._journal = journal
        self._finished = False
        self._working: Manifest | None = None
        self._layer: CommandLayer | None = None
        """What a command of the call works on; its changes are applied when the call is prepared."""
        self._applied = None if journal is None else AppliedLayer.left_by(undo, journal)
        self._is_scanned = journal is not None and journal.foreign
        """Whether the tree was scanned before the call began."""

    @property
    def journal(self) -> Journal:
        """How to undo the call; a plain one has no journal until somebody asks for it."""
        if self._journal is None:
            self._journal = self._undo.start_journal("call", self.call_id, self.base, foreign=False)
        return self._journal

    @property
    def owner(self) -> str:
        """By what the call's half-written files are known."""
        return "" if self._journal is None else self._journal.id

    @property
    def segments(self) -> Sequence[LineEntry]:
        """The boundaries that were taken inside the call."""
        return () if self._journal is None else self._journal.segments

    # --- ending the call ---------------------------------------------------------------------------

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call; the call can still be rolled back."""
        with self._undo.lock:
            self._require_open("prepared")
            self._undo.check_epoch()
            known = self._apply_layer()
            if self._is_idle:
                return self.base
            manifest = None
            if self.journal.foreign:
                manifest = self._take_foreign_segment(prepared=True)
                if not self.journal.segments:
                    return self.base
            else:
                self.take_segment(self._undo.changes_of(self.journal, known), prepared=True)
            return self._undo.snapshot_at(
                self.journal.segments[-1], self.base.tag, manifest if self._is_scanned else None
            )

    @property
    def _is_idle(self) -> bool:
        """Whether the call has not touched anything, so that its boundary is the one before it."""
        journal = self._journal
        return journal is None or (
            journal.kind == "call" and not (journal.foreign or journal.touched or journal.segments)
        )

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        with self._undo.lock:
            if self._finished:
                return
            self._require_open("finished")
            self._undo.check_epoch()
            history = self._undo.opened()
            journal = self._journal
            if journal is not None:
                if not self._is_idle and (not journal.prepared or journal.touched):
                    self.prepare()
                for entry in journal.segments:
                    history.append(entry)
                self._drop_layer(late=True)
                journal.end()
            if self._working is not None:
                history.adopt_manifest(self._working)
            self._finished = True
            self._drop_layer()
            self._undo.keep_late_writes(self.call_id, self.base.tag or "")
            self._undo.release(self)

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        with self._undo.lock:
            if self._undo.call is not self:
                if self._finished:
                    raise WorkspaceError(
                        f"the call {self.call_id!r} is finished and cannot be rolled back; "
                        f"restore its base snapshot instead"
                    )
                return RestoreReport()
            self._undo.check_epoch()
            report = ReportBuilder()
            if self.journal.foreign:
                self._undo_everything(report)
            elif self._applied is not None:
                self._take_back(self._applied, report)
            else:
                self._undo_paths(report)
            if report.conflicts:
                report.notes.append(self._keep_conflicts(report.conflicts))
            self._drop_layer()
            self._undo.keep_late_writes(self.call_id, self.base.tag or "")
            self.journal.end()
            self._undo.release(self)
            return report.build()

    def _require_open(self, participle: str) -> None:
        if self._undo.call is not self:
            raise WorkspaceError(f"the call {self.call_id!r} has ended and cannot be {participle}")

    # --- a command of the call ---------------------------------------------------------------------

    def open_layer(self, *, elsewhere: bool = False) -> CommandLayer | str:
        """Open a layer for a command, or say why there can be none. Its changes are applied by `prepare`."""
        with self._undo.lock:
            self._require_open("given a layer")
            place = self._undo.opened().layers_path
            if elsewhere or is_inside(self._undo.tree.path, place):
                place = memory_place(place)
            refusal = why_not(self._undo.tree.path, place)
            if refusal is not None:
                return refusal
            if self._layer is not None or self.journal.foreign:
                raise WorkspaceError(
                    f"the call {self.call_id!r} has a command already, and can have one only"
                )
            self._layer = CommandLayer(self._undo.tree, place, private=self._undo.private)
            return self._layer

    def drop_layer(self) -> None:
        """Forget what the command on the call's layer did. Calling it again does nothing."""
        with self._undo.lock:
            if self._applied is None:
                self._drop_layer()

    def keep_caches(self, names: Collection[str]) -> None:
        """Apply what the command on the layer did in cache directories, and nothing else; for good.

        Those are the directories with these names, and those with a CACHEDIR.TAG. What somebody else changed
        meanwhile stays. No history is kept of caches.
        """
        with self._undo.lock:
            layer = self._layer
            if layer is None or self._applied is not None:
                return
            moves = layer.cache_moves(names)
            if not moves:
                return
            self._undo.check_epoch()
            self._applied = AppliedLayer.of(self._undo, self.journal, layer, moves)
            try:
                self._applied.intend_unkept()
                self._applied.perform()
                self._applied.settle()
            except (OSError, WorkspaceConflictError) as error:
                _logger.info("the caches of %s were not kept: %s", self.call_id, error)

    def capture(self) -> None:
        """Scan the tree: from here on every change of it belongs to the call, as in a foreign one."""
        with self._undo.lock:
            self._require_open("scanned")
            journal = self.journal
            if journal.foreign:
                return
            if journal.touched or journal.segments or self._layer is not None:
                raise WorkspaceError(
                    f"the call {self.call_id!r} has changed files already; begin it as foreign"
                )
            self._undo.survey().boundary()
            self.base = self._undo.snapshot_at(self._undo.head(), self.base.tag)
            self._journal = self._undo.start_journal("call", self.call_id, self.base, foreign=True)

    def _apply_layer(self) -> list[PathChange]:
        """Apply the layer, whole or not at all; return what it changed."""
        layer = self._layer
        if layer is None or self._applied is not None:
            return []
        reading = layer.read()
        applied = AppliedLayer.of(self._undo, self.journal, layer, reading.needed)
        brought = None
        try:
            if reading.conflicts:
                raise conflict(reading.conflicts)
            if not applied.moves:
                return []
            self._applied = applied
            changes = applied.intend()
            brought = [(path, after) for path, _, after in changes if after.kind != "other"]
            applied.perform()
        except WorkspaceConflictError:
            # What the command did is kept for a person.
            files = applied.brought() if brought is None else brought
            if files:
                root, tool_name = self._undo.tree.path, self.base.tag or ""
                self._undo.opened().keep(
                    files, root=root, call_id=self.call_id, tool_name=tool_name, reason="conflict"
                )
            raise
        return changes

    def _take_back(self, applied: AppliedLayer, report: ReportBuilder) -> None:
        """Undo the application of a layer, and what was written through the workspace beside it."""
        own_paths = [path for path in self.journal.own_states() if not applied.covers(path)]
        self._undo_paths(report, [*applied.take_back(report), *own_paths])
        applied.settle()

    def _drop_layer(self, *, late: bool = False) -> None:
        layer, applied = self._layer, self._applied
        self._layer = self._applied = None
        if applied is not None:
            if late:
                self._keep_late_writes(applied)
            applied.drop()
        if layer is not None:
            layer.drop()

    def _keep_late_writes(self, applied: AppliedLayer) -> None:
        """Keep what a program that had a file open has written into it after it was replaced."""
        late = applied.written_since()
        if late:
            root, tool_name = self._undo.tree.path, self.base.tag or ""
            self._undo.opened().keep(late, root=root, call_id=self.call_id, tool_name=tool_name)
            shown = ", ".join(path for path, _ in late)
            _logger.warning("%s was written to while it was replaced; `treenail recover` has it", shown)

    # --- boundaries inside the call ----------------------------------------------------------------

    def snapshot(self, tag: str | None, *, scan: bool) -> FilesystemSnapshot:
        """Take a boundary inside the call."""
        journal = self.journal
        manifest: Manifest | None = None
        if journal.foreign:
            manifest = self._take_foreign_segment(prepared=False)
        else:
            if journal.touched:
                self.take_segment(self._undo.changes_of(journal), prepared=False)
            if scan:
                manifest = self._take_scan_segment()
        return self._undo.snapshot_at(self._undo.newest(), tag, manifest)

    def take_segment(self, changes: Sequence[PathChange], *, prepared: bool) -> None:
        """Make a boundary of changes that were made through the workspace."""
        journal = self.journal
        kind: EntryKind = "call" if journal.kind == "call" else "restore"
        edited = edited_since(journal, changes)
        entry = LineEntry(kind, self._commit(changes), tuple(changes), journal.id, edited)
        journal.mark(entry, prepared=prepared)

    def _take_scan_segment(self) -> Manifest:
        """Make a boundary of what somebody else changed while a plain call was open."""
        with self._learning() as manifest:
            survey = self._undo.survey()
            survey.catch_up(manifest, self._undo.entries())
            entry = survey.find(manifest, self._undo.newest().commit)
            if entry is not None:
                self.journal.mark(entry, prepared=False)
                manifest.position = len(self._undo.entries())
        return manifest

    def _take_foreign_segment(self, *, prepared: bool) -> Manifest:
        """Make a boundary of everything that a foreign call changed since the last one."""
        journal = self.journal
        survey = self._undo.survey()
        with self._learning() as manifest:
            uncovered = manifest.uncovered
            changes, seen = survey.take(manifest)
            found = {change.path for change in changes}
            # What was written through the workspace where scans do not look belongs to the call as well.
            changes += [
                change
                for change in self._undo.changes_of(journal)
                if change.path not in found and survey.is_beyond(manifest, change.path)
            ]
            is_as_before = not (changes or seen or journal.segments) and manifest.uncovered == uncovered
            if prepared and is_as_before:
                journal.mark_unchanged()
                return manifest
            entry = LineEntry(
                "call",
                self._commit(changes, seen),
                tuple(changes),
                journal.id,
                scanned=True,
                uncovered=tuple(manifest.uncovered.items()),
            )
            journal.mark(entry, prepared=prepared)
            manifest.position = len(self._undo.entries())
        return manifest

    def working_manifest(self) -> Manifest:
        """Return the manifest that grows inside the call; the one before it is kept for a rollback."""
        if self._working is None:
            self._working = self._undo.survey().manifest().copy()
        return self._working

    @contextmanager
    def _learning(self) -> Iterator[Manifest]:
        """Yield the call's manifest; what was learned in a block that fails is forgotten."""
        try:
            yield self.working_manifest()
        except BaseException:
            self._working = None
            raise

    def _commit(self, changes: Sequence[PathChange], seen: Sequence[PathChange] = ()) -> str:
        name, call_id = one_line(self.journal.tool_name), one_line(self.call_id)
        return self._undo.opened().commit(
            changes,
            f"{name} ({call_id})" if name else call_id,
            parent=self._undo.newest().commit,
            body=f"Tool: {name or '-'}\nCall: {call_id}",
            seen=seen,
        )

    # --- undoing the call --------------------------------------------------------------------------

    def _undo_paths(self, report: ReportBuilder, paths: Iterable[str] | None = None) -> None:
        """Put back what the journal says, where what is there is what the call left."""
        journal = self.journal
        plan: dict[str, State] = {}
        current: dict[str, State] = {}
        wanted = None if paths is None else set(paths)
        half_way = journal.undoing
        journal.begin_undo()
        own_states = journal.own_states()
        for path, states in own_states.items():
            if wanted is not None and path not in wanted:
                continue
            now = self._undo.look(path, keep=False)
            if not any(same(now, state) or (half_way and _is_half_way(now, state)) for state in states):
                report.conflicts.append(path)
            elif not same(now, states[0]) or now.mtime_ns != states[0].mtime_ns:
                plan[path] = states[0]
                current[path] = now
        self._undo.discard_temporaries(journal, own_states)
        # Through the workspace a file keeps its inode only if nothing but its bits changed.
        self._undo.apply(plan, current, journal.id, report, is_original=lambda path, inode: True)

    def _undo_everything(self, report: ReportBuilder) -> None:
        """Put back every difference between the tree and what it was when a foreign call began."""
        tree, journal, survey = self._undo.tree, self.journal, self._undo.survey()
        manifest = survey.manifest()
        _restore_root(tree.path, manifest.root_mode)
        scan = survey.scan(manifest, keep=False)
        for path in scan.temporaries:
            if temporary_owner(path.rpartition("/")[2]) == journal.id:
                with tree.strict(path) as place:
                    discard(place, place.name)
        differences = [*scan.differences, *scan.touched]
        plan = {path: before for path, before, _ in differences}
        current = {path: after for path, _, after in differences}
        own_states = journal.own_states()
        beyond = [path for path in own_states if survey.is_beyond(manifest, path)]
        self._undo_paths(report, [path for path in beyond if path not in plan])
        for path, state in self._undo.written_by_others(journal.started_ns).items():
            if path in plan and same(self._undo.look(path, keep=False), state):
                # Another run wrote it since the process of this call died.
                report.conflicts.append(path)
        # The rest may be the process's, or a person's who saved something meanwhile.
        unproven = {
            change.path: change.after
            for change in scan.differences
            if change.path not in report.conflicts and not _is_own(change, own_states)
        }
        current |= self._undo.set_aside(unproven, self.call_id, journal.tool_name, report)
        self._undo.apply(plan, current, journal.id, report, is_original=manifest.is_at)
        if scan.root_mode != manifest.root_mode:
            os.chmod(tree.path, manifest.root_mode)
        for path in plan:
            # It is a new file with the old content: the next scan has to look at it.
            manifest.distrust(path)

    def _keep_conflicts(self, conflicts: Sequence[str]) -> str:
        """Make what was there before the call reachable, since it was not put back."""
        history, head = self._undo.opened(), self._undo.head()
        firsts = self.journal.first_states()
        seen = [PathChange(path, ABSENT, firsts[path]) for path in conflicts if path in firsts]
        subject = f"Not put back by the rollback of {self.call_id}"
        commit = history.commit((), subject, parent=head.commit, seen=seen)
        history.append(LineEntry("call", commit, (), self.journal.id))
        return f"what was there before the call is in commit {commit[:12]} of {history.store_path}"


def edited_since(journal: Journal, changes: Iterable[PathChange]) -> tuple[str, ...]:
    """Return the changed paths that are not as the journal's call has last made them."""
    found = []
    for path, _, after in changes:
        last = journal.last_state(path)
        if last is not None and not is_same_thing(last, after):
            found.append(path)
    return tuple(found)


def _is_own(change: PathChange, own_states: Mapping[str, Sequence[State]]) -> bool:
    """Say whether what is at a path is what the call itself wrote there through the workspace."""
    return any(same(change.after, state) for state in own_states.get(change.path, ()))


def _is_half_way(now: State, goal: State) -> bool:
    """Say whether a path may be on its way back: nothing there yet, or bits and owner still to come."""
    return now.kind == "absent" or (now.kind == goal.kind and now.oid == goal.oid)


def _restore_root(path: str, mode: int) -> None:
    """Make the root a directory again if a foreign process removed or replaced it."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        os.makedirs(path)
    else:
        if stat.S_ISDIR(status.st_mode):
            return
        os.unlink(path)
        os.mkdir(path)
    os.chmod(path, mode)

"""Applying a layer to its workspace, whole or not at all, and taking that back.

Theory of operation
-------------------
The old and the new of a path change places in one step (`RENAMEEXCHANGE`): the new is in the workspace,
the old where the new was. So a reader sees the one or the other, nothing is copied, and undoing is the same
step again: the very file that was there comes back, with its other names and its times.

1. `intend`: what is there and what will be there goes to the object store, and then, with the moves, to the
   call's journal. From here on a crash is undone when the workspace is next opened.
2. `perform`: each path is moved, and what came out is compared with what was expected. If it is not that,
   somebody was quicker: the move is taken back, with all others, and the call is a conflict. Each move done
   is noted in the journal, with the inode and the ctime that it left in the workspace.
3. The log commits the call, the journal ends, and the layer is dropped, the old files with it.

**Taking back** looks at what is in the workspace. Only what is still the inode and the ctime that was
applied goes away; anything else is somebody's who was there since, and it stays and is reported. A move
that was not noted (the crash came right behind it) is known by its inode and by what was written about it.

Where the layer is on another filesystem than the workspace, the new is first copied into a directory of the
workspace that scans do not see, and moved from there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treenail.errors import WorkspaceConflictError
from treenail.workspace.layers import CommandLayer, Mark, Move, remove_tree, strip, walk
from treenail.workspace.manifest import (
    ABSENT,
    OTHER,
    TEMPORARY_PREFIX,
    TEMPORARY_SUFFIX,
    PathChange,
    State,
    is_within,
    same,
)
from treenail.workspace.restorer import ReportBuilder
from treenail.workspace.rooted import (
    EXCHANGE,
    NOREPLACE,
    Place,
    RootedDirectory,
    chmod_at,
    look,
    own,
    rename_at,
)

if TYPE_CHECKING:
    from treenail.workspace.journal import Journal
    from treenail.workspace.undo import Undo

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAMED = 10


@dataclass(slots=True)
class AppliedLayer:
    """The moves of one layer in one call's journal: performed, or taken back."""

    undo: Undo
    journal: Journal
    directory: str
    """The layer's own directory."""
    base: str
    """The directory that the moves' sources are below: the layer's own, or a copy on the workspace's disk."""
    marker_ns: int
    moves: Sequence[Move] = ()
    applied: dict[int, int] = field(default_factory=dict)
    """The ctime of each inode that was moved into the workspace; the names of one file share it."""

    is_settled: bool = False
    """Whether everything was taken back, so that only the layer is left to drop."""

    # --- doing -------------------------------------------------------------------------------------

    @classmethod
    def of(cls, undo: Undo, journal: Journal, layer: CommandLayer, moves: Sequence[Move]) -> AppliedLayer:
        """Have moves ready; nothing has happened yet."""
        return cls(undo, journal, layer.directory, layer.directory, layer.marker_ns, moves)

    def brought(self) -> list[tuple[str, State]]:
        """Return what the moves would bring, by path; its content is stored. Removed paths are absent."""
        found: list[tuple[str, State]] = []
        for move in self.moves:
            if move.kind == "take":
                found.append((move.path, ABSENT))
            elif move.kind != "dress":
                found += self._states(RootedDirectory(self.base), move.source, move.path).items()
        return [(path, state) for path, state in found if state.kind != "other"]

    def covers(self, path: str) -> bool:
        """Say whether a path is one that the layer changes."""
        return is_within(path, {move.path: "" for move in self.moves if move.kind != "dress"}) or any(
            move.path == path for move in self.moves
        )

    def intend(self) -> list[PathChange]:
        """Keep what the moves replace and what they bring, and write them down; return the changes.

        Raises `WorkspaceConflictError` if somebody has just removed what is to be replaced.
        """
        self._stage()
        changes: list[PathChange] = []
        for move in self.moves:
            try:
                changes += self._changes(move)
            except (FileNotFoundError, NotADirectoryError):
                raise conflict([move.path]) from None
        if self.journal.durable:
            self._sync()
        self.undo.intend(changes)
        self._note()
        return changes

    def _sync(self) -> None:
        """Make what the moves bring survive a power cut."""
        base = RootedDirectory(self.base)
        for move in self.moves:
            if move.kind == "dress" or move.after is None:
                continue
            below = walk(base, move.source) if stat.S_ISDIR(move.after.mode) else ()
            for path, mode in (
                (move.source, move.after.mode),
                *((path, each.st_mode) for path, each in below),
            ):
                if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                    with base.strict(path) as place:
                        _sync_one(place)

    def intend_unkept(self) -> None:
        """Write the moves down without keeping what they replace and bring, as for caches."""
        self._stage()
        self._note()

    def _stage(self) -> None:
        """Copy what the moves bring to the workspace's filesystem, if it is not there."""
        if os.stat(self.directory).st_dev == os.stat(self.undo.tree.path).st_dev:
            return
        name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        moves, self.moves = self.moves, ()
        self.base = os.path.join(self.undo.tree.path, name)
        self._note()
        os.mkdir(self.base, 0o700)
        links: dict[int, str] = {}
        staged: list[Move] = []
        for number, move in enumerate(moves):
            after = move.after
            if move.kind != "dress" and after is not None:
                target = os.path.join(self.base, str(number))
                _copy(os.path.join(self.directory, move.source), target, links)
                after = after._replace(inode=os.lstat(target).st_ino)
            staged.append(move._replace(source=str(number), after=after))
        self.moves = staged

    def _note(self) -> None:
        record = {
            "type": "layer",
            "directory": self.directory,
            "base": self.base,
            "marker_ns": self.marker_ns,
            "moves": list(self.moves),
            "settled": self.is_settled,
        }
        self.journal.note(record)

    def _changes(self, move: Move) -> Iterator[PathChange]:
        if move.kind == "dress":
            assert move.before is not None
            assert move.after is not None
            one, other = _directory(move.before), _directory(move.after)
            if not same(one, other):
                yield PathChange(move.path, one, other)
            return
        before = {} if move.before is None else self._states(self.undo.tree, move.path, move.path)
        after = {} if move.after is None else self._states(RootedDirectory(self.base), move.source, move.path)
        for path in sorted({*before, *after}):
            one, other = before.get(path, ABSENT), after.get(path, ABSENT)
            if not same(one, other):
                yield PathChange(path, one, other)

    def _states(self, tree: RootedDirectory, path: str, name: str) -> dict[str, State]:
        """Return the state of a path and of everything below it, by their names there."""
        undo = self.undo
        if undo.is_excluded(name):
            return {}
        states = {name: self._state(tree, path)}
        if states[name].kind == "directory":
            for below, _ in walk(tree, path):
                known = name + below[len(path) :]
                if not undo.is_excluded(known):
                    states[known] = self._state(tree, below)
        return states

    def _state(self, tree: RootedDirectory, path: str) -> State:
        """Return the state of a path; its content is stored. What may not be read is not kept."""
        with tree.strict(path) as place:
            status = place.lstat()
            if status is not None and stat.S_ISREG(status.st_mode) and not self.undo.may_keep(status.st_size):
                return OTHER
            try:
                return look(place, self.undo.opened().objects)
            except PermissionError:
                return OTHER

    def perform(self) -> None:
        """Make the moves. Raises `WorkspaceConflictError` if somebody was quicker: `take_back` then."""
        for move in self.moves:
            if move.kind == "dress":
                self._relax(self.undo.tree, move.path, move.before)
        for move in self.moves:
            if move.kind != "dress":
                self._perform(move)
        for move in reversed(self.moves):
            if move.kind == "dress":
                self._dress(move, move.after)
        if self.journal.durable:
            for directory in {move.path.rpartition("/")[0] for move in self.moves}:
                with self.undo.tree.strict(f"{directory}/." if directory else ".") as place:
                    _sync_one(place)

    def _perform(self, move: Move) -> None:
        base, tree = RootedDirectory(self.base), self.undo.tree
        if move.after is not None:
            strip(base, move.source)
            self._relax(base, move.source, move.after)
        self._relax(tree, move.path, move.before)
        try:
            with base.strict(move.source) as source, tree.strict(move.path) as place:
                _move(move, source, place)
                if move.before is not None and not self._is_as_seen(base, move):
                    _move(move, source, place, back=True)
                    back = source.lstat()
                    ours = None if move.after is None else move.after.inode
                    if move.kind == "swap" and back is not None and back.st_ino != ours:
                        # They have saved once more meanwhile: that is the newest, and stays.
                        _move(move, source, place)
                    raise conflict([move.path])
                if move.after is not None:
                    self._tighten(place, move.after)
                    self._note_moved(place)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise conflict([move.path]) from None

    def _note_moved(self, place: Place) -> None:
        status = os.stat(place.name, dir_fd=place.descriptor, follow_symlinks=False)
        self.applied[status.st_ino] = status.st_ctime_ns
        self.journal.note(
            {"type": "moved", "inode": status.st_ino, "ctime_ns": status.st_ctime_ns}, sync=False
        )

    def _is_as_seen(self, base: RootedDirectory, move: Move) -> bool:
        """Say whether what came out of the workspace is what was looked at before."""
        with base.strict(move.source) as place:
            status = place.lstat()
        return (
            status is not None
            and _is(status, move.before)
            and not any(
                below.st_ctime_ns >= self.marker_ns for below in self._below(base, move.source, status)
            )
        )

    @staticmethod
    def _below(tree: RootedDirectory, path: str, status: os.stat_result) -> Iterator[os.stat_result]:
        if stat.S_ISDIR(status.st_mode):
            yield from (below for _, below in walk(tree, path))

    def _relax(self, tree: RootedDirectory, path: str, mark: Mark | None) -> None:
        """Let the owner of a directory write to it, which moving it or something inside it needs."""
        if mark is not None and _is_tight(mark):
            try:
                with tree.strict(path) as place:
                    status = place.lstat()
                    if status is not None and status.st_ino == mark.inode:
                        chmod_at(place.descriptor, place.name, stat.S_IMODE(mark.mode) | 0o700)
            except (FileNotFoundError, NotADirectoryError):
                pass

    def _tighten(self, place: Place, mark: Mark) -> None:
        if _is_tight(mark):
            chmod_at(place.descriptor, place.name, stat.S_IMODE(mark.mode))

    def _dress(self, move: Move, goal: Mark | None) -> None:
        """Give a merged directory its bits and its owner, and its time unless somebody else was in it."""
        assert move.before is not None
        assert goal is not None
        try:
            with self.undo.tree.strict(move.path) as place:
                descriptor = os.open(place.name, _DIRECTORY_FLAGS, dir_fd=place.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            status = os.fstat(descriptor)
            if status.st_ino != move.before.inode:
                return
            own(descriptor, goal.uid, goal.gid)
            if stat.S_IMODE(status.st_mode) != stat.S_IMODE(goal.mode):
                os.fchmod(descriptor, stat.S_IMODE(goal.mode))
            if move.before.mtime_ns < self.marker_ns:
                os.utime(descriptor, ns=(status.st_atime_ns, goal.mtime_ns))
        finally:
            os.close(descriptor)

    # --- undoing -----------------------------------------------------------------------------------

    @classmethod
    def left_by(cls, undo: Undo, journal: Journal) -> AppliedLayer | None:
        """Return what a crash left in a journal, if a layer was being applied."""
        found: AppliedLayer | None = None
        for record in journal.notes:
            if record["type"] == "layer":
                moves = [_loaded(raw) for raw in record["moves"]]
                found = cls(undo, journal, record["directory"], record["base"], record["marker_ns"], moves)
                found.is_settled = record["settled"]
            elif record["type"] == "moved" and found is not None:
                found.applied[record["inode"]] = record["ctime_ns"]
        return found

    def take_back(self, report: ReportBuilder) -> list[str]:
        """Put back every path that is still as it was applied; the others are conflicts of the report.

        Returns the paths of directories into which somebody else has put something: those are for the object
        store to put back, one by one. Repeating this is safe.
        """
        if self.is_settled:
            return []
        left: list[str] = []
        dresses = [move for move in self.moves if move.kind == "dress"]
        for move in dresses:
            self._relax(self.undo.tree, move.path, move.before)
            if move.before is not None and move.after is not None:
                self._relax(self.undo.tree, move.path, move.after._replace(inode=move.before.inode))
        for move in reversed(self.moves):
            if move.kind != "dress":
                left += self._take_back(move, report)
        for move in reversed(dresses):
            self._dress(move, move.before)
        return left

    def _take_back(self, move: Move, report: ReportBuilder) -> list[str]:
        base, tree = RootedDirectory(self.base), self.undo.tree
        try:
            with base.strict(move.source) as source, tree.strict(move.path) as place:
                now, there = place.lstat(), source.lstat()
                if now is not None and move.before is not None and now.st_ino == move.before.inode:
                    self._tighten(place, move.before)  # it has not moved yet, or is back already
                    return []
                if now is None and move.before is None:
                    return []
                if move.after is None:
                    is_ours = now is None and there is not None
                else:
                    is_ours = now is not None and self._is_as_applied(move, now)
                    if now is not None and now.st_ino == move.after.inode and stat.S_ISDIR(now.st_mode):
                        theirs = self._theirs(move, now)
                        if theirs or not is_ours:
                            report.conflicts += theirs
                            return self._paths_of(move, theirs)
                if not is_ours:
                    report.conflicts.append(move.path)
                    return []
                if now is not None and move.after is not None:
                    self._relax(tree, move.path, move.after)
                _move(move, source, place, back=True)
                if move.before is not None:
                    self._tighten(place, move.before)
                if move.after is not None:
                    self._note_moved(source)
                report.restored.add(move.path)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            report.conflicts.append(move.path)
        return []

    def _is_as_applied(self, move: Move, now: os.stat_result) -> bool:
        assert move.after is not None
        applied = self.applied.get(move.after.inode)
        names = sum(other.after is not None and other.after.inode == move.after.inode for other in self.moves)
        # Moving one name of a file moves the ctime of all.
        if applied is not None and names == 1:
            return (now.st_ino, now.st_ctime_ns) == (move.after.inode, applied)
        return _is(now, move.after)

    def _theirs(self, move: Move, now: os.stat_result) -> list[str]:
        """Name what somebody else has put into a directory since it was applied, or changed in it."""
        since = self.applied.get(now.st_ino, now.st_ctime_ns)
        return [path for path, below in walk(self.undo.tree, move.path) if below.st_ctime_ns > since]

    def _paths_of(self, move: Move, theirs: Sequence[str]) -> list[str]:
        prefix, known = f"{move.path}/", set(theirs)
        return [
            path
            for path in self.journal.own_states()
            if (path == move.path or path.startswith(prefix)) and path not in known
        ]

    # --- the end -----------------------------------------------------------------------------------

    def written_since(self) -> list[tuple[str, State]]:
        """Return what a program that had replaced files open has written into them since; it is stored."""
        found = []
        base = RootedDirectory(self.base)
        for move in self.moves:
            if move.kind == "dress" or move.before is None:
                continue
            try:
                with base.strict(move.source) as place:
                    status = place.lstat()
                    if status is not None and stat.S_ISREG(move.before.mode) and not _is(status, move.before):
                        found.append((move.path, look(place, self.undo.opened().objects)))
                if status is None or not stat.S_ISDIR(move.before.mode):
                    continue
                for path, below in walk(base, move.source):
                    if stat.S_ISREG(below.st_mode) and below.st_ctime_ns >= self.marker_ns:
                        with base.strict(path) as place:
                            state = look(place, self.undo.opened().objects)
                        found.append((move.path + path[len(move.source) :], state))
            except FileNotFoundError:
                pass  # a crash came while the layer was dropped
        return found

    def settle(self) -> None:
        """Write down that everything was taken back."""
        self.is_settled = True
        self._note()

    def drop(self) -> None:
        """Remove the layer, and its copy on the workspace's disk. Repeating this is safe."""
        for directory in {self.base, self.directory}:
            remove_tree(directory)


def conflict(paths: Sequence[str]) -> WorkspaceConflictError:
    """Return the error that says which paths somebody else changed."""
    named = sorted(set(paths))
    more = len(named) - _MAX_NAMED
    shown = ", ".join(named[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return WorkspaceConflictError(
        f"somebody else changed {shown} while the command ran; nothing of the command was applied",
        paths=named,
    )


def _loaded(raw: list[Any]) -> Move:
    kind, path, source, before, after = raw
    return Move(
        kind, path, source, None if before is None else Mark(*before), None if after is None else Mark(*after)
    )


def _is(status: os.stat_result, mark: Mark | None) -> bool:
    """Say whether a file is the one that was looked at, and unchanged; a directory may have been relaxed."""
    if mark is None or status.st_ino != mark.inode or status.st_mtime_ns != mark.mtime_ns:
        return False
    relaxed = 0o700 if stat.S_ISDIR(mark.mode) else 0
    return (status.st_mode | relaxed, status.st_uid, status.st_gid) == (
        mark.mode | relaxed,
        mark.uid,
        mark.gid,
    ) and (stat.S_ISDIR(mark.mode) or status.st_size == mark.size)


def _is_tight(mark: Mark) -> bool:
    return os.geteuid() != 0 and stat.S_ISDIR(mark.mode) and mark.mode & 0o700 != 0o700


def _directory(mark: Mark) -> State:
    return State("directory", stat.S_IMODE(mark.mode), uid=mark.uid, gid=mark.gid)


def _move(move: Move, source: Place, place: Place, *, back: bool = False) -> None:
    """Let the old and the new of a path change places, or take that back."""
    if move.kind == "swap":
        rename_at(source, place, EXCHANGE)
    elif (move.kind == "put") is not back:
        rename_at(source, place, NOREPLACE)
    else:
        rename_at(place, source, NOREPLACE)


def _sync_one(place: Place) -> None:
    """Flush a file or a directory; one that may not be read is left to the system."""
    try:
        descriptor = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.descriptor)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(source: str, target: str, links: dict[int, str]) -> None:
    """Copy a file or a tree with its bits, owners, times and attributes; names of one file stay that."""
    status = os.lstat(source)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(target, 0o700)
        for name in os.listdir(source):
            _copy(os.path.join(source, name), os.path.join(target, name), links)
    elif status.st_nlink > 1 and status.st_ino in links:
        os.link(links[status.st_ino], target, follow_symlinks=False)
        return
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(source, target)
    else:
        os.mknod(target, status.st_mode)
    links[status.st_ino] = target
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(source, target, follow_symlinks=False)

"""Bringing paths to their goals.

Theory of operation
-------------------
A plan gives the goal of each path. It is carried out in three passes. What is in the way goes first, deepest
first; then directories and content come, outermost first; permission bits of directories come last, because
they may forbid what comes before. A file takes its place in one step (temporary file and rename), so that a
reader sees the old file or the new one.

Each step looks at what is there before it acts and does nothing if the goal is reached. So a restore that
was cut off by a crash is completed by applying the same plan again. No step follows a link, and a directory
is removed only if it is empty: what somebody else put into it stays, and is reported. So does a file that is
not the one that the plan was made for: somebody saved it a moment ago.

On a full disk, what is to be replaced goes before what replaces it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from treenail.workspace.base import RestoreReport
from treenail.workspace.diffs import shown_path
from treenail.workspace.disk import FULL
from treenail.workspace.manifest import ABSENT, ANY, TEMPORARY_PREFIX, TEMPORARY_SUFFIX, State, same
from treenail.workspace.objects import ObjectStore
from treenail.workspace.paths import ROOT
from treenail.workspace.rooted import (
    Place,
    RootedDirectory,
    change_mode,
    discard,
    dress,
    open_directory,
    own,
    put_file,
    put_link,
    remove_seen,
)

_ONE_STEP = ("file", "link")
_ONE_STEP_FROM = ("file", "link", "absent")


@dataclass(slots=True)
class ReportBuilder:
    """What a restore or a rollback has done so far, for its report."""

    restored: set[str] = field(default_factory=set)
    conflicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)

    def build(self, notes: Iterable[str] = ()) -> RestoreReport:
        """Return the report for the caller."""
        return RestoreReport(
            restored=tuple(sorted(self.restored)),
            conflicts=tuple(sorted(set(self.conflicts))),
            notes=(*self.notes, *notes),
            kept=tuple(sorted(self.kept - set(self.conflicts))),
            lost=tuple(sorted(self.lost)),
        )


class Restorer:
    """Brings the paths of one tree to their goals.

    `owner` is in the names of temporary files, so that a recovery knows them. `is_original` says whether
    the inode at a path is the one that was there before: then its bits are corrected in place, for all of
    its names.
    """

    def __init__(
        self,
        tree: RootedDirectory,
        objects: ObjectStore,
        owner: str,
        report: ReportBuilder,
        *,
        sync: bool,
        is_original: Callable[[str, int], bool] = lambda path, inode: False,
    ) -> None:
        self._tree = tree
        self._objects = objects
        self._temporary = f"{TEMPORARY_PREFIX}{owner}-0{TEMPORARY_SUFFIX}"
        self._report = report
        self._sync = sync
        self._is_original = is_original
        self._linked: set[str] = set()
        self._not_empty: list[str] = []
        self._relaxed: dict[str, int] = {}

    def apply(self, plan: Mapping[str, State], current: Mapping[str, State]) -> None:
        """Bring each path of a plan to its goal, given what is there now."""
        inward = sorted(plan, key=lambda path: path.count("/"))
        try:
            for path in reversed(inward):
                if path in self._report.conflicts:
                    continue
                # A file or link takes the place of another in one step.
                if plan[path].kind not in _ONE_STEP or current[path].kind not in _ONE_STEP_FROM:
                    clear = partial(self._clear, goal=plan[path], current=current[path])
                    self._attempt(path, clear, missing_is_fine=True)
            wanted = [path for path in inward if plan[path].kind != "absent"]
            short = [path for path in wanted if not self._put_path(path, plan[path], current[path])]
            for path in short:
                # There is no room for both: the history has what is there.
                self._attempt(path, partial(self._vacate, current=current[path]), missing_is_fine=True)
            for path in short:
                self._put_path(path, plan[path], ABSENT, last_try=True)
            for path in reversed(tuple(plan)):
                # Names of one file were changed one after the other; the first one knows how it was.
                if path in self._linked:
                    self._attempt(path, partial(self._redress_linked, goal=plan[path]), missing_is_fine=True)
            for path in reversed(inward):
                if plan[path].kind == "directory" and path not in self._report.conflicts:
                    self._attempt(path, partial(self._dress_directory, goal=plan[path]), missing_is_fine=True)
                    self._relaxed.pop(path, None)
        finally:
            self._tighten()

    def _tighten(self) -> None:
        """Take back the permissions that were needed on the way."""
        for path, mode in reversed(self._relaxed.items()):
            try:
                with self._tree.strict(path) as place:
                    change_mode(place, mode)
            except (FileNotFoundError, NotADirectoryError):
                continue

    def _put_path(self, path: str, goal: State, current: State, *, last_try: bool = False) -> bool:
        """Bring one path to its goal; say whether there was room for it."""
        if path in self._report.conflicts:
            return True
        try:
            self._attempt(path, partial(self._put, goal=goal, current=current), missing_is_fine=False)
        except OSError as error:
            if last_try or error.errno not in FULL:
                raise
            return False
        return True

    def _vacate(self, place: Place, current: State) -> None:
        if self._is_as_seen(place, place.lstat(), current):
            os.unlink(place.name, dir_fd=place.descriptor)

    def _is_as_seen(self, place: Place, status: os.stat_result | None, current: State) -> bool:
        """Say whether a path holds what the plan was made for; what somebody saved since is a conflict."""
        if status is None or _is_what_was_seen(status, current):
            return True
        self._report.conflicts.append(place.path)
        return False

    def _clear(self, place: Place, goal: State, current: State) -> None:
        status = place.lstat()
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            if goal.kind == "directory":
                return
            try:
                os.rmdir(place.name, dir_fd=place.descriptor)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                if goal.kind == "absent":
                    self._left(place.path)
                else:
                    self._report.conflicts.append(place.path)
                return
            self._report.restored.add(place.path)
        elif goal.kind in ("absent", "directory") and self._is_as_seen(place, status, current):
            if current.kind not in _ONE_STEP:
                os.unlink(place.name, dir_fd=place.descriptor)
            elif not remove_seen(place, self._temporary, current):
                self._report.conflicts.append(place.path)
                return
            self._report.restored.add(place.path)

    def _left(self, path: str) -> None:
        """Note a directory that is not empty; of nested ones only the innermost, which comes first."""
        if not any(each.startswith(f"{path}/") for each in self._not_empty):
            self._report.notes.append(
                f"{shown_path(path)} was left: files are in it that are somebody else's, or were not kept"
            )
        self._not_empty.append(path)

    def _put(self, place: Place, goal: State, current: State) -> None:
        if goal.kind == "directory":
            if place.lstat() is None:
                os.mkdir(place.name, 0o700, dir_fd=place.descriptor)
                self._report.restored.add(place.path)
            return
        if not self._is_as_seen(place, place.lstat(), current):
            return
        seen = ABSENT if current.kind == "directory" else current  # a directory has gone before
        if goal.kind == "link":
            if same(current, goal):
                return
            target = self._objects.read_blob(goal.oid)
            is_put = self._afresh(place, lambda: put_link(place, self._temporary, target, seen=seen))
        elif current.kind == "file" and current.oid == goal.oid and self._redress(place, goal):
            if same(current, goal):
                # Only its time was restored; to a reader nothing had changed.
                return
            is_put = True
        else:
            is_put = self._afresh(
                place,
                lambda: put_file(
                    place,
                    self._temporary,
                    self._objects.stream_blob(goal.oid, goal.size),
                    like=goal,
                    sync=self._sync,
                    seen=seen,
                ),
            )
        if is_put:
            self._report.restored.add(place.path)
        else:
            self._report.conflicts.append(place.path)

    def _afresh(self, place: Place, put: Callable[[], bool]) -> bool:
        """Put something in place, over a temporary file that a crash may have left."""
        try:
            return put()
        except FileExistsError:
            discard(place, self._temporary)
            return put()

    def _redress(self, place: Place, goal: State) -> bool:
        """Correct bits, owner and time of a file in place; say whether that could be done."""
        try:
            descriptor = os.open(
                place.name,
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                dir_fd=place.descriptor,
            )
        except OSError:
            return False
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return False
            if status.st_nlink > 1:
                # Its other names share bits and times. If it was put here meanwhile, they must not change.
                if not self._is_original(place.path, status.st_ino):
                    return False
                self._linked.add(place.path)
            dress(descriptor, goal)
        except PermissionError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _redress_linked(self, place: Place, goal: State) -> None:
        self._redress(place, goal)

    def _dress_directory(self, place: Place, goal: State) -> None:
        status = place.lstat()
        if status is None or not stat.S_ISDIR(status.st_mode):
            return
        if (goal.uid, goal.gid) != (status.st_uid, status.st_gid):
            descriptor = open_directory(place, place.path)
            try:
                own(descriptor, goal.uid, goal.gid)
            finally:
                os.close(descriptor)
        if goal.mode not in (ANY, stat.S_IMODE(status.st_mode)):
            change_mode(place, goal.mode)
            self._report.restored.add(place.path)

    def _attempt(self, path: str, step: Callable[[Place], None], *, missing_is_fine: bool) -> None:
        for relaxed in (False, True):
            try:
                with self._tree.strict(path) as place:
                    step(place)
                return
            except PermissionError:
                if relaxed or not self._relax(path.rpartition("/")[0] or ROOT):
                    raise
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                # Somebody else removed or replaced the directory that it belongs in.
                if not missing_is_fine:
                    self._report.conflicts.append(path)
                return

    def _relax(self, directory: str) -> bool:
        """Let the owner write to a directory whose bits forbid it, for as long as this takes."""
        with self._tree.strict(directory) as place:
            status = place.lstat()
            if status is None or status.st_mode & 0o700 == 0o700:
                return False
            mode = stat.S_IMODE(status.st_mode)
            try:
                change_mode(place, mode | 0o700)
            except PermissionError:
                # Somebody else's directory: what is in it is not ours to change.
                return False
            self._relaxed[directory] = mode
        return True


def _is_what_was_seen(status: os.stat_result, seen: State) -> bool:
    mode = status.st_mode
    if seen.kind == "file":
        is_same_time = seen.mtime_ns in (0, status.st_mtime_ns)
        return stat.S_ISREG(mode) and status.st_size == seen.size and is_same_time
    if seen.kind == "link":
        return stat.S_ISLNK(mode)
    if seen.kind == "directory":
        return stat.S_ISDIR(mode)
    return seen.kind == "other" and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))

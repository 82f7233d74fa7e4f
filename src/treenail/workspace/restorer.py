"""Bringing paths to their goals.

Theory of operation
-------------------
A plan gives the goal of each path. It is carried out in three passes. What is in the way goes first, deepest
first; then directories and content come, outermost first; permission bits of directories come last, because
they may forbid what comes before. A file takes its place in one step (temporary file and rename), so that a
reader sees the old file or the new one.

Each step looks at what is there before it acts and does nothing if the goal is reached. So a restore that
was cut off by a crash is completed by applying the same plan again. No step follows a link, and a directory
is removed only if it is empty: what somebody else put into it stays, and is reported.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from treenail.workspace.base import RestoreReport
from treenail.workspace.manifest import ANY, TEMPORARY_PREFIX, TEMPORARY_SUFFIX, State, same
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
)

_ONE_STEP = ("file", "link")
_ONE_STEP_FROM = ("file", "link", "absent")


@dataclass(slots=True)
class ReportBuilder:
    """What a restore or a rollback has done so far, for its report."""

    restored: set[str] = field(default_factory=set)
    conflicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self, notes: Iterable[str] = ()) -> RestoreReport:
        """Return the report for the caller."""
        return RestoreReport(
            restored=tuple(sorted(self.restored)),
            conflicts=tuple(sorted(set(self.conflicts))),
            notes=(*self.notes, *notes),
        )


class Restorer:
    """Brings the paths of one tree to their goals.

    `owner` is in the names of temporary files, so that a recovery knows them.
    """

    def __init__(
        self, tree: RootedDirectory, objects: ObjectStore, owner: str, report: ReportBuilder, *, sync: bool
    ) -> None:
        self._tree = tree
        self._objects = objects
        self._temporary = f"{TEMPORARY_PREFIX}{owner}-0{TEMPORARY_SUFFIX}"
        self._report = report
        self._sync = sync
        self._relaxed: dict[str, int] = {}

    def apply(self, plan: Mapping[str, State], current: Mapping[str, State]) -> None:
        """Bring each path of a plan to its goal, given what is there now."""
        inward = sorted(plan, key=lambda path: path.count("/"))
        try:
            for path in reversed(inward):
                # A file or link takes the place of another in one step.
                if plan[path].kind not in _ONE_STEP or current[path].kind not in _ONE_STEP_FROM:
                    self._attempt(path, partial(self._clear, goal=plan[path]), missing_is_fine=True)
            for path in inward:
                if plan[path].kind != "absent" and path not in self._report.conflicts:
                    put = partial(self._put, goal=plan[path], current=current[path])
                    self._attempt(path, put, missing_is_fine=False)
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

    def _clear(self, place: Place, goal: State) -> None:
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
                    self._report.notes.append(f"{place.path} was left: somebody else's files are in it")
                else:
                    self._report.conflicts.append(place.path)
                return
            self._report.restored.add(place.path)
        elif goal.kind in ("absent", "directory"):
            os.unlink(place.name, dir_fd=place.descriptor)
            self._report.restored.add(place.path)

    def _put(self, place: Place, goal: State, current: State) -> None:
        if goal.kind == "directory":
            if place.lstat() is None:
                os.mkdir(place.name, 0o700, dir_fd=place.descriptor)
                self._report.restored.add(place.path)
            return
        if goal.kind == "link":
            if same(current, goal):
                return
            target = self._objects.read_blob(goal.oid)
            self._afresh(place, lambda: put_link(place, self._temporary, target))
        elif current.kind == "file" and current.oid == goal.oid and self._redress(place, goal, current):
            if same(current, goal):
                # Only its time was put right; to a reader nothing had changed.
                return
        else:
            self._afresh(
                place,
                lambda: put_file(
                    place,
                    self._temporary,
                    self._objects.stream_blob(goal.oid, goal.size),
                    like=goal,
                    sync=self._sync,
                ),
            )
        self._report.restored.add(place.path)

    def _afresh(self, place: Place, put: Callable[[], None]) -> None:
        """Put something in place, over a temporary file that a crash may have left."""
        try:
            put()
        except FileExistsError:
            discard(place, self._temporary)
            put()

    def _redress(self, place: Place, goal: State, current: State) -> bool:
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
            # A hard link shares bits and times with its other names, which the call did not change.
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                return False
            dress(descriptor, goal)
        except PermissionError:
            return False
        finally:
            os.close(descriptor)
        return True

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
            self._relaxed[directory] = stat.S_IMODE(status.st_mode)
            change_mode(place, stat.S_IMODE(status.st_mode) | 0o700)
        return True

"""Reading and changing files below the root of a workspace on disk.

Every change is announced before it is made: `Undo.keep` stores what is there, and `Undo.intend` writes
down what will be. A file is written beside its place (a draft) and takes it in one step.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import BinaryIO

from treenail.errors import PathEscapeError, WorkspaceConflictError
from treenail.workspace.base import FileEntry, FileStat, WriteMode, WriteResult
from treenail.workspace.diffs import shown_path
from treenail.workspace.disk import write_all
from treenail.workspace.manifest import (
    ABSENT,
    ANY,
    PathChange,
    State,
    is_within,
)
from treenail.workspace.objects import hash_descriptor
from treenail.workspace.operations import CommonOperations
from treenail.workspace.packs import CHUNK_BYTES, hash_object
from treenail.workspace.paths import MAX_DEPTH, ROOT, fail, join, normalize, split
from treenail.workspace.rooted import (
    Place,
    RootedDirectory,
    change_mode,
    create_temporary,
    discard,
    dress,
    naming,
    open_directory,
    open_file,
    remove_seen,
    replace_seen,
    take_place,
)
from treenail.workspace.streams import Draft, WriteStream, closed_too_late
from treenail.workspace.undo import Undo


class Files(CommonOperations):
    """The files below one root. Every change is recorded by an `Undo` before it is made."""

    def __init__(self, tree: RootedDirectory, undo: Undo, *, durable: bool) -> None:
        self._tree = tree
        self.undo = undo
        """Records changes and takes them back."""
        self._durable = durable
        self._lock = undo.lock

    # --- reading -----------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        try:
            with self._walk(normalize(path), follow=False) as place:
                return place.lstat() is not None
        except PathEscapeError:
            raise
        except OSError:  # a file in the way, or links in a circle: nothing can be there
            return False

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        path = normalize(path)
        with self._walk(path, follow=False) as place, naming(path):
            status = _existing(place, path)
            is_link = stat.S_ISLNK(status.st_mode)
            is_directory = stat.S_ISDIR(status.st_mode)
            return FileStat(
                path=path,
                is_file=stat.S_ISREG(status.st_mode),
                is_directory=is_directory,
                size_bytes=0 if is_directory else status.st_size,
                is_link=is_link,
                link_target=os.readlink(place.name, dir_fd=place.descriptor) if is_link else None,
                permissions=status.st_mode & 0o777,
                modified_at=datetime.fromtimestamp(status.st_mtime, UTC),
            )

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        path = normalize(path)
        with self._walk(path, follow=True) as place:
            _existing(place, path)
            descriptor = open_directory(place, path)
            try:
                with os.scandir(descriptor) as listing:
                    entries = [
                        FileEntry(
                            name=item.name,
                            path=join(path, item.name),
                            is_file=item.is_file(follow_symlinks=False),
                            is_directory=item.is_dir(follow_symlinks=False),
                            is_link=item.is_symlink(),
                        )
                        for item in listing
                        if not self.undo.is_temporary(item.name)
                        and join(place.path, item.name) != self.undo.private
                    ]
            finally:
                os.close(descriptor)
        entries.sort(key=lambda entry: entry.name)
        return entries

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads; a later write does not disturb the stream."""
        path = normalize(path)
        with self._walk(path, follow=True) as place:
            return open(open_file(place, path), "rb")

    def _walk(self, path: str, *, follow: bool) -> Place:
        place = self._tree.walk(path, follow=follow)
        if self.undo.is_private(join(place.path, "/".join(place.rest) or ROOT)):
            place.__exit__()
            raise PathEscapeError(
                f"the path {path!r} is in Treenail's own store, which is not part of the workspace"
            )
        return place

    # --- changing ----------------------------------------------------------------------------------

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part.

        The file is replaced, not written into: another hard link to it keeps the old content.
        """
        path = normalize(path)
        with self.undo.changing(), self._draft(path, mode, create_parents) as draft:
            draft.write(content)
            draft.publish()
        return WriteResult(path=path, bytes_written=len(content), mode=mode)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed.

        A stream that is left by an exception, or never closed, changes nothing. One that was opened
        in a tool call cannot be closed after it: the call has ended, and would be changed afterwards.
        """
        with self.undo.changing():
            return WriteStream(self._draft(normalize(path), mode, create_parents))

    def _draft(self, path: str, mode: WriteMode, create_parents: bool) -> FileDraft:
        """Start to write a file; in mode `append`, after a copy of what is there."""
        place, status = self._destination(path, mode, create_parents)
        try:
            draft = FileDraft(self.undo, place, path, status, durable=self._durable)
        except BaseException:
            place.__exit__()
            raise
        try:
            if mode == "append" and status is not None:
                with open(open_file(place, path), "rb") as source:
                    shutil.copyfileobj(source, draft, CHUNK_BYTES)
        except BaseException:
            draft.close()
            raise
        return draft

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        path = normalize(path)
        with self.undo.changing(), self._walk(path, follow=False) as place, naming(path):
            self._refuse_root(place, path, "deleted")
            _existing(place, path)
            self._refuse_holding_store(place.path, path)
            found = self._collect(place, recursive=recursive)
            self.undo.intend(PathChange(name, before, ABSENT) for name, before in found)
            for name, before in found:
                with self._tree.strict(name) as item:
                    if before.kind == "directory":
                        os.rmdir(item.name, dir_fd=item.descriptor)
                    elif not before.oid:
                        os.unlink(item.name, dir_fd=item.descriptor)
                    elif not remove_seen(item, self.undo.temporary_name(), before):
                        raise _quicker(name)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory, with the rules of POSIX `rename` about what may replace what.

        The target's directory must exist. What is at the target is replaced only if `overwrite`.
        """
        source, target = normalize(source), normalize(target)
        with (
            self.undo.changing(),
            self._walk(source, follow=False) as origin,
            self._walk(target, follow=False) as goal,
        ):
            self._refuse_root(origin, source, "moved")
            self._refuse_root(goal, target, "replaced")
            with naming(source):
                moved = _existing(origin, source)
                self._refuse_holding_store(origin.path, source)
            with naming(target):
                there = goal.lstat()
                if goal.rest:
                    fail(errno.ENOENT, "the directory to move to does not exist; make it first", target)
                if there is not None and not overwrite:
                    fail(
                        errno.EEXIST, "something is there already; pass overwrite=True to replace it", target
                    )
                if goal.path == origin.path:
                    return
                if goal.path.startswith(origin.path + "/"):
                    fail(errno.EINVAL, f"cannot move the directory {source!r} into itself", target)
                self._check_replaceable(goal, moved, there, target)
            with naming(source):
                replaced = self._intend_move(origin, goal)
            with naming(target):
                if replaced.kind in ("directory", "other") or (there is not None and not replaced.oid):
                    os.rename(
                        origin.name, goal.name, src_dir_fd=origin.descriptor, dst_dir_fd=goal.descriptor
                    )
                elif not replace_seen(origin, goal, replaced):
                    raise _quicker(target)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        path = normalize(path)
        with self.undo.changing(), self._walk(path, follow=False) as place:
            status = place.lstat()
            if status is not None:
                if stat.S_ISLNK(status.st_mode):
                    # A link to a directory counts as one; a link to anything else is in the way.
                    with self._walk(path, follow=True) as behind:
                        status = behind.lstat() or status
                if exist_ok and stat.S_ISDIR(status.st_mode):
                    return
                fail(errno.EEXIST, "something is there already", path)
            if place.rest and not parents:
                fail(errno.ENOENT, "the parent directory does not exist; pass parents=True to make it", path)
            self._make_directories(place, (place.name, *place.rest), path).__exit__()

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        path = normalize(path)
        if not 0 <= permissions <= 0o777:
            raise ValueError(f"the permissions {permissions:#o} are not between 0 and 0o777")
        with self.undo.changing(), self._walk(path, follow=True) as place, naming(path):
            status = _existing(place, path)
            changed = [(place.path, self.undo.keep(place))]
            if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                changed += self.undo.other_names(place.path, status)
            self.undo.intend(
                PathChange(name, before, before._replace(mode=permissions)) for name, before in changed
            )
            change_mode(place, permissions)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link. The target is checked when it is followed."""
        path = normalize(path)
        if not target or "\0" in target:
            raise ValueError(f"the link target {target!r} is empty or holds a NUL character")
        raw = os.fsencode(target)
        with self.undo.changing(), self._destination(path, "create", True)[0] as place, naming(path):
            after = State("link", 0o777, hash_object("blob", raw), len(raw))
            self.undo.intend([PathChange(place.path, self.undo.keep(place), after)])
            os.symlink(target, place.name, dir_fd=place.descriptor)

    # --- inside ------------------------------------------------------------------------------------

    def _refuse_root(self, place: Place, path: str, verb: str) -> None:
        if place.path == ROOT:
            raise ValueError(f"the workspace root {path!r} cannot be {verb}; name something below it")

    def _refuse_holding_store(self, canonical: str, path: str) -> None:
        if self.undo.private is not None and is_within(self.undo.private, {canonical: ""}):
            fail(errno.EACCES, "the directory holds Treenail's own store and stays where it is", path)

    @staticmethod
    def _check_replaceable(
        goal: Place, moved: os.stat_result, there: os.stat_result | None, target: str
    ) -> None:
        if there is None:
            return
        from_directory, to_directory = stat.S_ISDIR(moved.st_mode), stat.S_ISDIR(there.st_mode)
        if to_directory and not from_directory:
            fail(errno.EISDIR, "a directory is there; delete it first", target)
        if from_directory and not to_directory:
            fail(errno.ENOTDIR, "a directory cannot replace what is there; delete it first", target)
        if to_directory:
            descriptor = open_directory(goal, target)
            try:
                if os.listdir(descriptor):
                    fail(errno.ENOTEMPTY, "the directory to replace is not empty; delete it first", target)
            finally:
                os.close(descriptor)

    def _destination(
        self, path: str, mode: WriteMode, create_parents: bool
    ) -> tuple[Place, os.stat_result | None]:
        """Return the place where a file will be put, its parents made, and what is there now."""
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"the mode is {mode!r}; it must be 'create', 'overwrite' or 'append'")
        # A new file must not appear at the end of a link: `create` looks at the link itself.
        place = self._walk(path, follow=mode != "create")
        try:
            with naming(path):
                if place.rest:
                    if not create_parents:
                        fail(
                            errno.ENOENT,
                            "the parent directory does not exist; pass create_parents=True",
                            path,
                        )
                    *parents, name = (place.name, *place.rest)
                    inner = self._make_directories(place, parents, path)
                    place.__exit__()
                    place = Place(inner.descriptor, name, join(inner.path, name))
                status = place.lstat()
                if status is not None:
                    if stat.S_ISDIR(status.st_mode):
                        fail(errno.EISDIR, "this is a directory; choose a file name below it", path)
                    if mode == "create":
                        fail(errno.EEXIST, "the file exists; write with mode='overwrite' to replace it", path)
                    if not stat.S_ISREG(status.st_mode):
                        fail(errno.EACCES, "this is not a regular file; devices and pipes are refused", path)
            return place, status
        except BaseException:
            place.__exit__()
            raise

    def _make_directories(self, place: Place, names: Sequence[str], path: str) -> Place:
        """Make nested directories from a place on; return the innermost as an open place."""
        if len(split(place.path)) + len(names) > MAX_DEPTH + 1:
            fail(errno.ENAMETOOLONG, f"the tree would be more than {MAX_DEPTH} levels deep", path)
        parent = "/".join(split(place.path)[:-1]) or ROOT
        full, changes = parent, []
        for name in names:
            full = join(full, name)
            changes.append(PathChange(full, ABSENT, State("directory")))
        self.undo.intend(changes)
        descriptor = os.dup(place.descriptor)
        try:
            with naming(path):
                for name in names:
                    try:
                        os.mkdir(name, dir_fd=descriptor)
                    except FileExistsError:
                        # Somebody else made it a moment ago; a link in its place is refused below.
                        pass
                    below = os.open(
                        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor
                    )
                    os.close(descriptor)
                    descriptor = below
        except BaseException:
            os.close(descriptor)
            raise
        return Place(descriptor, ROOT, full)

    def _collect(self, place: Place, *, recursive: bool) -> builtins.list[tuple[str, State]]:
        """Return everything at and below a place, deepest first, with its state, which is kept."""
        state = self.undo.keep(place)
        found: builtins.list[tuple[str, State]] = []
        if state.kind == "directory":
            descriptor = open_directory(place, place.path)
            try:
                names = sorted(os.listdir(descriptor))
                if names and not recursive:
                    fail(
                        errno.ENOTEMPTY,
                        "the directory is not empty; delete it with recursive=True",
                        place.path,
                    )
                for name in names:
                    child = Place(descriptor, name, join(place.path, name))
                    found += self._collect(child, recursive=True)
            finally:
                os.close(descriptor)
        found.append((place.path, state))
        return found

    def _intend_move(self, origin: Place, goal: Place) -> State:
        """Write down what a move changes; return what it replaces."""
        changes: builtins.list[PathChange] = []
        replaced = self.undo.keep(goal)
        for path, before in self._collect(origin, recursive=True):
            there = goal.path + path[len(origin.path) :]
            if path == origin.path and replaced.oid:
                # The two change places first.
                changes.append(PathChange(path, before, replaced))
                changes.append(PathChange(path, replaced, ABSENT))
            else:
                changes.append(PathChange(path, before, ABSENT))
            changes.append(PathChange(there, replaced if there == goal.path else ABSENT, before))
        self.undo.intend(changes)
        return replaced


class FileDraft(Draft):
    """A file that is being written beside its place, and takes it when it is published. It owns the place."""

    def __init__(
        self, undo: Undo, place: Place, path: str, status: os.stat_result | None, *, durable: bool
    ) -> None:
        self.name = path
        self._undo = undo
        self._place = place
        self._status = status
        self._durable = durable
        self._call = undo.call
        self._is_published = False
        self._descriptor = -1
        self._temporary = undo.intend_temporary(place.path)
        with naming(path):
            self._descriptor = create_temporary(place, self._temporary, 0o666 if status is None else 0o600)

    def write(self, data: object, /) -> int:
        """Add to the end."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer
        with naming(self.name):
            write_all(self._descriptor, view)
        return len(view)

    def publish(self) -> None:
        """Let the file take its place."""
        undo, place = self._undo, self._place
        with undo.changing(), naming(self.name):
            if undo.call is not self._call:
                raise closed_too_late(self.name)
            if self._status is not None:
                dress(self._descriptor, self._status)
            if self._durable:
                os.fsync(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            size = os.fstat(self._descriptor).st_size
            content = hash_descriptor(self._descriptor, size)
            permissions = ANY if self._status is None else stat.S_IMODE(self._status.st_mode)
            after = State("file", permissions, content or b"", size)
            before = undo.keep(place)
            undo.intend([PathChange(place.path, before, after)])
            if before.kind != "absent" and not before.oid:
                take_place(place, self._temporary)  # nothing is kept here, so nothing can be compared
            else:
                undo.watch(place, before)
                if not replace_seen(Place(place.descriptor, self._temporary, place.path), place, before):
                    raise _quicker(place.path)
            self._is_published = True

    def close(self) -> None:
        """Remove the temporary file, unless it was published."""
        if self.closed:
            return
        super().close()
        if self._descriptor != -1:
            if not self._is_published:
                discard(self._place, self._temporary)
            os.close(self._descriptor)
        self._place.__exit__()


def _existing(place: Place, path: str) -> os.stat_result:
    status = place.lstat()
    if status is None:
        fail(errno.ENOENT, "no such file or directory", path)
    return status


def _quicker(path: str) -> WorkspaceConflictError:
    return WorkspaceConflictError(
        f"somebody else changed {shown_path(path)} a moment ago, and that was left alone; "
        f"look at it and try again",
        paths=[path],
    )

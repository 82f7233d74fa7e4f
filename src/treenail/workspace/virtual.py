"""A tree that is not a directory on disk: paths are walked here, and operations are built on a few steps.

A subclass knows what is at a path without links (`status`, `entries`, `open`) and how to change it
(`put_file` and the like). Walking links, refusing what makes no sense, and streams are written once, here.
"""

from __future__ import annotations

import builtins
import errno
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from treenail.errors import PathEscapeError
from treenail.workspace.base import FileEntry, FileStat, WriteMode, WriteResult
from treenail.workspace.operations import CommonOperations
from treenail.workspace.paths import MAX_DEPTH, MAX_LINKS, ROOT, fail, is_below, join, normalize, split
from treenail.workspace.streams import Draft, WriteStream, closed_too_late

MAX_TOTAL_BYTES = 1024 * 1024 * 1024
"""What all files together may hold, unless the tree says otherwise; a stream holds no more either."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a path leads: its one spelling without links, what is there, and how much of it is missing."""

    path: str
    status: FileStat | None
    missing: int = 0


class VirtualTree(CommonOperations):
    """The operations of `Filesystem` on a tree that is given by a few steps."""

    max_stream_bytes = MAX_TOTAL_BYTES

    def __init__(self) -> None:
        self.lock = threading.RLock()

    # --- the steps of a subclass; their paths are normalised and have no links in them ---------------

    @abstractmethod
    def status(self, path: str) -> FileStat | None:
        """Describe what is at a path; None if nothing is."""

    @abstractmethod
    def entries(self, path: str) -> Mapping[str, FileEntry]:
        """Return what is in a directory, by name."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        """Write a file, with the directories that lead to it."""

    @abstractmethod
    def put_directory(self, path: str) -> None:
        """Make a directory, with those that lead to it."""

    @abstractmethod
    def put_link(self, path: str, target: str) -> None:
        """Make a link, with the directories that lead to it."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove what is at a path, with everything below it."""

    @abstractmethod
    def rename(self, path: str, to: str) -> None:
        """Move what is at a path, with everything below it, to where nothing or something replaceable is."""

    @abstractmethod
    def set_permissions(self, path: str, permissions: int) -> None:
        """Change the permission bits of a file or directory."""

    @abstractmethod
    def unfinished(self) -> Sequence[str]:
        """List the calls that are open."""

    # --- walking -----------------------------------------------------------------------------------

    def _locate(self, path: str, *, follow: bool) -> Location:
        """Walk a normalised path; links on the way are followed, one at its end if `follow`.

        What is missing is returned as such; a file in the way, a loop and an escape are errors.
        """
        pending = list(reversed(split(path)))
        done: builtins.list[str] = []
        here = self.status(ROOT)
        links = 0
        while pending:
            if here is not None and not here.is_directory:
                fail(errno.ENOTDIR, f"{'/'.join(done)!r} is not a directory", path)
            name = pending.pop()
            if name == "..":  # from a link's target: paths themselves hold none
                if not done:
                    raise PathEscapeError(
                        f"the path {path!r} leads out of the workspace through a link; "
                        f"use paths that stay below the workspace root"
                    )
                done.pop()
                here = self.status("/".join(done) or ROOT)
                continue
            child = self.status("/".join((*done, name)))
            if child is None:
                rest = (name, *reversed(pending))
                if ".." in rest:
                    fail(errno.ENOENT, "no such file or directory", path)
                return Location("/".join((*done, *rest)), None, missing=len(rest))
            if child.is_link and (pending or follow):
                links += 1
                target = child.link_target or ""
                if links > MAX_LINKS:
                    fail(errno.ELOOP, "the links on this path lead in a circle", path)
                if target.startswith("/"):
                    raise PathEscapeError(
                        f"the path {path!r} leads through a link to {target!r}, out of the workspace; "
                        f"use paths that stay below the workspace root"
                    )
                pending.extend(each for each in reversed(target.split("/")) if each not in ("", "."))
                continue
            done.append(name)
            here = child
        return Location("/".join(done) or ROOT, here)

    def _existing(self, path: str, *, follow: bool) -> tuple[str, FileStat]:
        location = self._locate(path, follow=follow)
        if location.status is None:
            fail(errno.ENOENT, "no such file or directory", path)
        return location.path, location.status

    def _writable(self, path: str, mode: WriteMode, create_parents: bool) -> Location:
        """Find where a write goes, or refuse it."""
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"the mode is {mode!r}; it must be 'create', 'overwrite' or 'append'")
        # A new file must not appear at the end of a link: `create` looks at the link itself.
        location = self._locate(path, follow=mode != "create")
        if location.status is not None and location.status.is_directory:
            fail(errno.EISDIR, "this is a directory; choose a file name below it", path)
        if location.status is not None and mode == "create":
            fail(errno.EEXIST, "the file exists; write with mode='overwrite' to replace it", path)
        if location.missing > 1 and not create_parents:
            fail(errno.ENOENT, "the parent directory does not exist; pass create_parents=True", path)
        _check_depth(len(split(location.path)), path)
        return location

    def _height(self, path: str, *, is_directory: bool) -> int:
        """Say how many levels there are below a path."""
        below = self.entries(path).items() if is_directory else ()
        heights = (1 + self._height(join(path, name), is_directory=each.is_directory) for name, each in below)
        return max(heights, default=0)

    # --- reading: see `Filesystem` -----------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        try:
            with self.lock:
                return self._locate(normalize(path), follow=False).status is not None
        except PathEscapeError:
            raise
        except OSError:  # a file in the way, or links in a circle: nothing can be there
            return False

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        path = normalize(path)
        with self.lock:
            _, found = self._existing(path, follow=False)
        return found if found.path == path else replace(found, path=path)

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        path = normalize(path)
        with self.lock:
            where, status = self._existing(path, follow=True)
            if not status.is_directory:
                fail(errno.ENOTDIR, "this is not a directory", path)
            found = self.entries(where)
        return [
            FileEntry(name, join(path, name), each.is_file, each.is_directory, each.is_link)
            for name, each in sorted(found.items())
        ]

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads; it shows the content of this moment, whatever is written later."""
        path = normalize(path)
        with self.lock:
            where, status = self._existing(path, follow=True)
            if status.is_directory:
                fail(errno.EISDIR, "this is a directory, not a file", path)
            return self.open(where)

    # --- changing: see `Filesystem` ----------------------------------------------------------------

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""
        path = normalize(path)
        data = bytes(content)
        with self.lock:
            location = self._writable(path, mode, create_parents)
            whole, permissions = data, None
            if location.status is not None:
                permissions = location.status.permissions
                if mode == "append":
                    with self.open(location.path) as stream:
                        whole = stream.read() + data
            self.put_file(location.path, whole, permissions)
        return WriteResult(path=path, bytes_written=len(data), mode=mode)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed.

        A stream that is left by an exception, or never closed, changes nothing. One that was opened
        in a tool call cannot be closed after it: the call has ended, and would be changed afterwards.
        """
        path = normalize(path)
        with self.lock:
            self._writable(path, mode, create_parents)
            calls = self.unfinished()

        def publish(content: bytes) -> None:
            with self.lock:
                if self.unfinished() != calls:
                    raise closed_too_late(path)
                self.write_bytes(path, content, mode=mode, create_parents=create_parents)

        return WriteStream(MemoryDraft(path, publish, self.max_stream_bytes))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        path = normalize(path)
        with self.lock:
            where, status = self._existing(path, follow=False)
            _refuse_root(where, path, "deleted")
            if status.is_directory and not recursive and self.entries(where):
                fail(errno.ENOTEMPTY, "the directory is not empty; delete it with recursive=True", path)
            self.remove(where)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory, with the rules of POSIX `rename` about what may replace what.

        The target's directory must exist. What is at the target is replaced only if `overwrite`.
        """
        source, target = normalize(source), normalize(target)
        with self.lock:
            origin, status = self._existing(source, follow=False)
            goal = self._locate(target, follow=False)
            there = goal.status
            _refuse_root(origin, source, "moved")
            _refuse_root(goal.path, target, "replaced")
            if goal.missing > 1:
                fail(errno.ENOENT, "the directory to move to does not exist; make it first", target)
            if there is not None and not overwrite:
                fail(errno.EEXIST, "something is there already; pass overwrite=True to replace it", target)
            if goal.path == origin:
                return
            if is_below(goal.path, origin):
                fail(errno.EINVAL, f"cannot move the directory {source!r} into itself", target)
            if there is not None and there.is_directory and not status.is_directory:
                fail(errno.EISDIR, "a directory is there; delete it first", target)
            if status.is_directory and there is not None and not there.is_directory:
                fail(errno.ENOTDIR, "a directory cannot replace what is there; delete it first", target)
            if there is not None and there.is_directory and self.entries(goal.path):
                fail(errno.ENOTEMPTY, "the directory to replace is not empty; delete it first", target)
            height = self._height(origin, is_directory=status.is_directory)
            _check_depth(len(split(goal.path)) + height, target)
            self.rename(origin, goal.path)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        path = normalize(path)
        with self.lock:
            location = self._locate(path, follow=False)
            there = location.status
            if there is not None and there.is_link:
                # A link to a directory counts as one; a link to anything else is in the way.
                there = self._locate(path, follow=True).status or there
            if there is not None:
                if exist_ok and there.is_directory:
                    return
                fail(errno.EEXIST, "something is there already", path)
            if location.missing > 1 and not parents:
                fail(errno.ENOENT, "the parent directory does not exist; pass parents=True to make it", path)
            _check_depth(len(split(location.path)), path)
            self.put_directory(location.path)

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        path = normalize(path)
        if not 0 <= permissions <= 0o777:
            raise ValueError(f"the permissions {permissions:#o} are not between 0 and 0o777")
        with self.lock:
            where, _ = self._existing(path, follow=True)
            self.set_permissions(where, permissions)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link, as a process on disk could. The target is checked when it is followed."""
        path = normalize(path)
        if not target or "\0" in target:
            raise ValueError(f"the link target {target!r} is empty or holds a NUL character")
        with self.lock:
            location = self._locate(path, follow=False)
            if location.status is not None:
                fail(errno.EEXIST, "something is there already", path)
            _check_depth(len(split(location.path)), path)
            self.put_link(location.path, target)


def _check_depth(depth: int, path: str) -> None:
    # Paths are limited where they are spelled; links and moves can still lead deeper.
    if depth > MAX_DEPTH:
        fail(errno.ENAMETOOLONG, f"the tree would be {depth} levels deep; at most {MAX_DEPTH} fit", path)


def _refuse_root(canonical: str, path: str, participle: str) -> None:
    if canonical == ROOT:
        raise ValueError(f"the workspace root {path!r} cannot be {participle}; name something below it")


class MemoryDraft(Draft):
    """A file that is being written in memory."""

    def __init__(self, path: str, publish: Callable[[bytes], None], max_bytes: int) -> None:
        self.name = path
        self._put = publish
        self._max_bytes = max_bytes
        self._content = bytearray()

    def write(self, data: object, /) -> int:
        """Add bytes to the content that will appear."""
        before = len(self._content)
        self._content += memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer
        if len(self._content) > self._max_bytes:
            fail(errno.ENOSPC, f"more than {self._max_bytes} bytes do not fit; the stream is lost", self.name)
        return len(self._content) - before

    def publish(self) -> None:
        """Let the content appear."""
        self._put(bytes(self._content))

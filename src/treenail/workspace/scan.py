"""A walk over a directory tree that finds what somebody changed.

Theory of operation
-------------------
A scan walks the tree and compares what `lstat` says with the manifest. An entry whose whole stat tuple is as
before is unchanged and is not opened; everything else is read and hashed.

- A forged mtime hides nothing: ctime is in the tuple, and only the kernel sets it.
- Timestamps move in ticks. A file that was written in the same tick in which it was scanned could be
  written again without any trace in its tuple. So an entry as new as the scan itself (`RACY_NS`) is kept
  without its ctime and is read again next time.
- The walk goes from directory descriptor to directory descriptor and never follows a link.
- The manifest is not changed by a scan. The scan says what would change (`updates`), because whether the
  new knowledge counts is decided later, when a tool call is committed.

What a scan cannot or may not keep (special files, files it may not read, what is over budget) is
*uncovered*: named, and never touched by a restore. What the operator excludes is not even looked at.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treenail.workspace.manifest import (
    ABSENT,
    OTHER,
    Entry,
    Manifest,
    PathChange,
    same,
    state_of,
)
from treenail.workspace.objects import ObjectStore, hash_descriptor
from treenail.workspace.packs import hash_object
from treenail.workspace.rooted import chmod_at
from treenail.workspace.search import GlobPattern, compile_glob

RACY_NS = 100_000_000
"""An entry changed less than this before a scan began is read again by the next one."""

MAX_SCAN_DEPTH = 200
"""Directories nested deeper are uncovered: one descriptor is held per level. The look before a rollback
begins anew from there, because what a failed command has made goes however deep it is."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_ATTEMPTS = 3
_TYPE_MASK = 0o170000


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """What a scan may spend. What is over a limit is left out, and the snapshot says so."""

    max_files: int = 1_000_000
    max_bytes: int = 16 * 1024**3
    """The content that one scan may read and keep, in bytes."""
    max_file_bytes: int = 2 * 1024**3
    max_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_files", "max_bytes", "max_file_bytes", "max_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a limit must be greater than zero")


class Exclusions:
    """The operator's choice of what is neither captured nor deleted.

    A pattern without a slash matches a name at any depth (`node_modules`, `*.log`); with a slash
    it is a path from the root (`build/cache`, `docs/**/*.pdf`; a leading slash is allowed). A trailing
    slash matches directories alone. What is below an excluded directory is excluded. There is no
    negation, and a file in the workspace is never asked.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled: list[GlobPattern] = []
        for pattern in self.patterns:
            if pattern.startswith("!"):
                raise ValueError(f"the exclude pattern {pattern!r} negates, which is not supported")
            rooted = "/" in pattern.rstrip("/")
            self._compiled.append(compile_glob(pattern.lstrip("/") if rooted else f"**/{pattern}"))

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def match(self, path: str, *, directory: bool) -> bool:
        """Say whether a path is excluded itself; its parents are the caller's to ask about."""
        return any(
            pattern.matches(path) for pattern in self._compiled if directory or not pattern.directories_only
        )

    def covers(self, path: str, *, directory: bool) -> bool:
        """Say whether a path or one of its parents is excluded."""
        if not self.patterns or not path:
            return False
        parts = path.split("/")
        return any(
            self.match("/".join(parts[:count]), directory=directory or count < len(parts))
            for count in range(1, len(parts) + 1)
        )


class Scan:
    """One walk over a tree, compared with a manifest. `run` it once, then read its findings.

    With a `store`, new content is kept there; without one, content is only compared, special and
    over-sized files count as differences, and limits do not apply: that is the look before a
    rollback, which also opens known directories that were made unreadable since.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        store: ObjectStore | None,
        exclusions: Exclusions,
        private: str | None,
        limits: SnapshotLimits,
        is_temporary: Callable[[str], bool],
    ) -> None:
        self.differences: list[PathChange] = []
        self.touched: list[PathChange] = []
        """Files whose content is as before, but whose times are not."""
        self.updates: dict[str, dict[str, Entry] | None] = {}
        self.uncovered: dict[str, str] = {}
        self.temporaries: list[str] = []
        """Our own half-written files, by path."""
        self.root_mode = manifest.root_mode
        self._manifest = manifest
        self._known = manifest.directories
        self._store = store
        self._exclusions = exclusions
        self._private = private
        self._limits = limits
        self._is_temporary = is_temporary
        self._first = store is not None and not manifest.directories
        self._files = 0
        self._bytes_left = limits.max_bytes
        self._racy_from = 0
        self._deadline = 0.0
        self._over: str | None = None
        self._deep: list[str] = []
        """Directories at which the walk begins anew."""

    def run(self, root: int) -> None:
        """Walk the tree below an open directory, which stays open."""
        self._racy_from = time.time_ns() - RACY_NS
        self._deadline = time.monotonic() + self._limits.max_seconds
        self.root_mode = stat.S_IMODE(os.fstat(root).st_mode)
        self._walk(root, "", 0)
        while self._deep:
            path = self._deep.pop()
            descriptor = _open_below(root, path)
            try:
                self._walk(descriptor, path, 0)
            finally:
                os.close(descriptor)

    # --- the walk ----------------------------------------------------------------------------------

    def _walk(self, descriptor: int, path: str, depth: int) -> None:
        prefix = path + "/" if path else ""
        known = self._known.get(path)
        fresh: dict[str, Entry] = {} if known is None else dict(known)
        missing = set(fresh)
        children: list[str] = []
        with os.scandir(descriptor) as listing:
            for item in listing:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except PermissionError:
                    # Names may be read here, and nothing else.
                    self._uncover(path, "it may not be read")
                    return
                name = item.name
                old = fresh.get(name)
                if old is None and not self._is_wanted(path, prefix + name, name, status):
                    continue
                missing.discard(name)
                self._files += 1
                if status.st_mode & _TYPE_MASK == stat.S_IFDIR:
                    children.append(name)
                if old is not None and _is_unchanged(old, status):
                    continue
                new = self._look(descriptor, prefix + name, name, old, status)
                if new is None:
                    fresh.pop(name, None)
                else:
                    fresh[name] = new
        for name in missing:
            self._gone(prefix + name, fresh.pop(name))
        if fresh != known:
            self.updates[path] = fresh
        if self._over is None and time.monotonic() > self._deadline:
            self._stop(f"the limit of {self._limits.max_seconds:g} seconds was reached")
        for name in children:
            self._child(descriptor, prefix + name, name, depth)

    def _is_wanted(self, directory: str, path: str, name: str, status: os.stat_result) -> bool:
        """Say whether something that is not known is to be looked at."""
        if path == self._private:
            return False
        if self._is_temporary(name):
            self.temporaries.append(path)
            return False
        if self._exclusions and self._exclusions.match(path, directory=stat.S_ISDIR(status.st_mode)):
            return False
        if self._over is None and self._files >= self._limits.max_files:
            self._stop(f"the limit of {self._limits.max_files} files was reached")
        if self._over is not None:
            self._uncover(directory, self._over)
            return False
        return True

    def _child(self, parent: int, path: str, name: str, depth: int) -> None:
        if self._over is not None and path not in self._known:
            self._uncover(path, self._over)
            return
        if depth >= MAX_SCAN_DEPTH:
            if self._store is None and not self._manifest.is_uncovered(path):
                self._deep.append(path)
            else:
                self._uncover(path, f"it is nested deeper than {MAX_SCAN_DEPTH} directories")
            return
        try:
            if self._store is None:
                self._reopen(parent, path, name)
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        except PermissionError:
            self._uncover(path, "it may not be read")
            return
        except OSError:
            # It was there a moment ago: somebody is changing the tree under the scan.
            self._uncover(path, "it changed while it was being read")
            return
        try:
            self._walk(descriptor, path, depth + 1)
        finally:
            os.close(descriptor)

    def _reopen(self, parent: int, path: str, name: str) -> None:
        """Let the owner read a directory whose bits forbid it since the manifest was made.

        One that could not be read then is left as it is, and so is what somebody else owns.
        """
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if status.st_mode & 0o500 == 0o500 or self._manifest.is_uncovered(path):
            return
        known = self._manifest.get(path)
        mode = 0o700 if known is None else known[0] & 0o7777
        if mode & 0o500 == 0o500:
            chmod_at(parent, name, mode | 0o700)

    def _stop(self, reason: str) -> None:
        if self._store is not None:
            self._over = reason

    def _uncover(self, path: str, reason: str) -> None:
        self.uncovered[path] = reason

    # --- one path ----------------------------------------------------------------------------------

    def _look(
        self, directory: int, path: str, name: str, old: Entry | None, status: os.stat_result
    ) -> Entry | None:
        """Return the entry of a path that is new or whose stat tuple changed, and note what changed."""
        kind = status.st_mode & _TYPE_MASK
        before = state_of(old)
        if old is not None and before.kind == "directory" and kind != stat.S_IFDIR:
            self._gone_below(path)
        new: Entry | None
        if kind == stat.S_IFDIR:
            new = (status.st_mode, 0, 0, 0, 0, status.st_uid, status.st_gid, b"")
        elif kind == stat.S_IFREG:
            new = self._file(directory, path, name, old, status)
        elif kind == stat.S_IFLNK:
            new = self._link(directory, path, name, status)
        else:
            self._uncover(path, "it is neither a file nor a directory nor a link")
            new = None
        if new is None:
            # A file that cannot be kept must not be deleted either, unless a call that made it is undone.
            deletable = self._store is None or kind != stat.S_IFREG
            if old is not None or (deletable and not self._first and not self._manifest.is_uncovered(path)):
                self.differences.append(PathChange(path, before, OTHER))
            return None
        if self._first:
            # Everything is new, and nothing of it is a change.
            return new
        after = state_of(new)
        if old is None:
            if self._store is not None or not self._manifest.is_uncovered(path):
                self.differences.append(PathChange(path, ABSENT, after))
        elif not same(before, after):
            self.differences.append(PathChange(path, before, after))
        elif after.kind == "file" and before.mtime_ns != after.mtime_ns:
            self.touched.append(PathChange(path, before, after))
        return new

    def _gone(self, path: str, entry: Entry) -> None:
        if entry[0] & _TYPE_MASK == stat.S_IFDIR:
            self._gone_below(path)
        self.differences.append(PathChange(path, state_of(entry), ABSENT))

    def _gone_below(self, path: str) -> None:
        self.updates[path] = None
        for name, entry in self._known.get(path, {}).items():
            self._gone(f"{path}/{name}", entry)

    def _file(
        self, directory: int, path: str, name: str, old: Entry | None, status: os.stat_result
    ) -> Entry | None:
        size = status.st_size
        if self._store is None and old is None:
            # About to be removed: what is in it does not matter.
            return self._entry(status, b"")
        if self._store is not None:
            if size > self._limits.max_file_bytes:
                self._uncover(path, f"it has {size} bytes, over the limit of {self._limits.max_file_bytes}")
                return None
            if size > self._bytes_left:
                self._uncover(path, f"the limit of {self._limits.max_bytes} bytes was reached")
                return None
            self._bytes_left -= size
        try:
            for _ in range(_READ_ATTEMPTS):
                descriptor = os.open(name, _READ_FLAGS, dir_fd=directory)
                try:
                    status = os.fstat(descriptor)
                    if status.st_mode & _TYPE_MASK != stat.S_IFREG:
                        break
                    store = self._store
                    read = hash_descriptor if store is None else store.write_descriptor
                    oid = read(descriptor, status.st_size)
                finally:
                    os.close(descriptor)
                if oid is not None:
                    return self._entry(status, oid)
        except PermissionError:
            self._uncover(path, "it may not be read")
            return None
        except OSError as error:
            self._uncover(path, f"it could not be read: {error.strerror}")
            return None
        self._uncover(path, "it kept changing while it was being read")
        return None

    def _link(self, directory: int, path: str, name: str, status: os.stat_result) -> Entry | None:
        try:
            target = os.fsencode(os.readlink(name, dir_fd=directory))
        except OSError as error:
            self._uncover(path, f"the link could not be read: {error.strerror}")
            return None
        store = self._store
        return self._entry(
            status, hash_object("blob", target) if store is None else store.write("blob", target)
        )

    def _entry(self, status: os.stat_result, oid: bytes) -> Entry:
        ctime_ns = status.st_ctime_ns
        racy = ctime_ns >= self._racy_from or status.st_mtime_ns >= self._racy_from
        return (
            status.st_mode,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            0 if racy else ctime_ns,
            status.st_uid,
            status.st_gid,
            oid,
        )


def _open_below(root: int, path: str) -> int:
    """Open a directory, however deep it is."""
    descriptor = os.dup(root)
    for name in path.split("/"):
        try:
            below = os.open(name, _DIRECTORY_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _is_unchanged(old: Entry, status: os.stat_result) -> bool:
    """Say whether a path is as it was, by its stat tuple; a directory's names and times do not count."""
    if status.st_mode & _TYPE_MASK == stat.S_IFDIR:
        return (old[0], old[5], old[6]) == (status.st_mode, status.st_uid, status.st_gid)
    # With inode and ctime the same, so are type, bits and owner: only the kernel sets ctime.
    return (
        old[4] == status.st_ctime_ns
        and old[1] == status.st_ino
        and old[3] == status.st_mtime_ns
        and old[2] == status.st_size
    )

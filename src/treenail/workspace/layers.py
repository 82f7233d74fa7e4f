"""The layer that a command works on: opening it, reading what the command did, and dropping it.

Theory of operation
-------------------
A layer is the upper directory of an overlay that only the command sees (`treenail.sandbox` mounts it). The
workspace itself is not touched while the command runs. Afterwards the upper directory says what was done:

- a file or link in it was written anew or copied up before it was changed;
- a device with the number 0 stands for something that was removed;
- a directory that is marked as opaque hides the workspace's own; any other one is merged with it.

`read` turns that into *moves*, one per path. Moves are disjoint: none lies below another, except that a
merged directory is *dressed* (bits, owner, time) after the moves inside it.

**Whose change is it?** When the layer is opened, a marker is made on the workspace's filesystem. Only the
kernel sets a ctime, so whatever has one that is not older than the marker's was changed by somebody else
meanwhile. Each path that a move replaces or removes is looked at, and everything below a directory. What
the command only read does not matter.

Applying the moves, and undoing that, is in `applying.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from treenail.errors import WorkspaceError
from treenail.workspace.manifest import is_within
from treenail.workspace.paths import ROOT, join
from treenail.workspace.rooted import RootedDirectory, chmod_at

MoveKind = Literal["put", "swap", "take", "dress"]
"""Something new; something in the place of something else; a removal; a merged directory's bits and times."""

_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAMESPACES = ("trusted.overlay.", "user.overlay.")
"""Where an overlay keeps its notes: mounted by root, or in a user namespace."""

_MEMORY = "/dev/shm"
_TICK_S = 0.02
"""No kernel's clock for files stands still for longer."""

_MAX_DEPTH = 50
"""How many directories are held open at once while a tree is removed."""


class Mark(NamedTuple):
    """What tells one file from another, and whether it was changed, without reading it."""

    inode: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int


class Move(NamedTuple):
    """One path that a layer changes."""

    kind: MoveKind
    path: str
    source: str
    """Where the new is before the move and the old after it, below the directory `Reading.base`."""
    before: Mark | None
    after: Mark | None


@dataclass(slots=True)
class Reading:
    """What a command did on its layer."""

    moves: list[Move] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    """Paths that somebody else changed since the layer was opened."""
    linked: list[str] = field(default_factory=list)
    """Files with several names that were changed under one of them; on a layer the others do not follow."""

    @property
    def needed(self) -> list[Move]:
        """The moves; none if nothing has changed, not even the time of a directory."""
        is_idle = all(move.kind == "dress" and _is_dressed(move) for move in self.moves)
        return [] if is_idle else self.moves


class CommandLayer:
    """A layer over a workspace, for one command. `lower`, `upper`, `work` and `options` are for the mount."""

    def __init__(self, tree: RootedDirectory, place: str, *, private: str | None = None) -> None:
        self._tree = tree
        self._private = {} if private is None else {private: ""}
        directory = os.path.join(place, secrets.token_hex(8))
        self.directory = directory
        while True:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._lock = _locked(directory, wait=True)
            # Another process may have taken it for one that was left, before it was locked.
            if os.path.isdir(directory):
                break
            os.close(self._lock)
        self.lower = tree.path
        self.upper = os.path.join(directory, "upper")
        self.work = os.path.join(directory, "work")
        for name in (self.upper, self.work):
            os.mkdir(name, 0o700)
        status = os.stat(tree.path)
        # The command sees the bits and the owner of the upper root as those of its workspace.
        if os.geteuid() == 0:
            os.chown(self.upper, status.st_uid, status.st_gid)
        os.chmod(self.upper, stat.S_IMODE(status.st_mode))
        os.utime(self.upper, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._origins: dict[str, int] = {}
        """The inodes that new files were copied up from, by path."""
        self._seen: set[int] = set()
        """The inodes that the moves replace or remove."""
        self._several: dict[str, os.stat_result] = {}
        """Those of their paths whose files have other names as well."""
        self._found: dict[str, os.stat_result] = {}
        """The merged directories as the command left them."""
        self.options = ("index=on",) if os.geteuid() == 0 else ()
        """With an index, which only root can have, a layer knows which files with several names it copied."""
        self.marker_ns = _marker(tree.path)
        """Whatever has a ctime that is not older than this was changed since."""

    def drop(self) -> None:
        """Remove the layer with all that is in it. Calling it again does nothing."""
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1
        remove_tree(self.directory)
        place = os.path.dirname(self.directory)
        if os.path.dirname(place) == _MEMORY:
            with suppress(OSError):  # another layer is in it
                os.rmdir(place)

    # --- reading -----------------------------------------------------------------------------------

    def read(self) -> Reading:
        """Return what the command did, and what stands in the way of applying it."""
        reading = Reading()
        self._origins.clear()
        self._several.clear()
        self._seen.clear()
        upper = RootedDirectory(self.upper)
        pending = [ROOT]
        while pending:
            path = pending.pop()
            status, above = _opened(upper, path)
            # Opening may have needed other bits: what counts is what the command left.
            status = self._found.setdefault(path, status)
            try:
                below = self._tree_directory(path)
                if below is None:
                    reading.conflicts.append(path)
                    continue
                try:
                    before = os.fstat(below)
                    # Moved or given other bits by somebody else; a file that they saved in it is fine.
                    if before.st_ctime_ns >= self.marker_ns > before.st_mtime_ns:
                        reading.conflicts.append(path)
                    reading.moves.append(Move("dress", path, "", _mark(before), _mark(status)))
                    if before.st_ctime_ns >= self.marker_ns and _dress(before) != _dress(status):
                        reading.conflicts.append(path)
                    for name in sorted(os.listdir(above)):
                        place = name if path == ROOT else join(path, name)
                        if is_within(place, self._private):
                            continue
                        if self._read_one(reading, above, below, name, place):
                            pending.append(place)
                finally:
                    os.close(below)
            finally:
                os.close(above)
        # What was copied up is still there, unless the command moved it: then its old place is in here.
        reading.conflicts += [path for path, inode in self._origins.items() if inode not in (0, *self._seen)]
        reading.linked = self._linked(reading)
        return reading

    def cache_moves(self, names: Collection[str]) -> list[Move]:
        """Return the moves in cache directories: those with these names, and those with a CACHEDIR.TAG."""
        reading = self.read()
        wanted = {name.strip("/") for name in names}
        known: dict[str, bool] = {}

        def is_cache(path: str) -> bool:
            if path not in known:
                is_named = path.rpartition("/")[2] in wanted
                known[path] = (is_named and self._is_directory(path)) or any(
                    _is_tagged(os.path.join(root, path)) for root in (self.upper, self.lower)
                )
            return known[path]

        return [
            move
            for move in reading.moves
            if move.kind != "dress"
            and any(is_cache(above) for above in _and_above(move.path))
            and not any(is_within(path, {move.path: ""}) for path in reading.conflicts)
        ]

    def _is_directory(self, path: str) -> bool:
        return any(
            os.path.isdir(place) and not os.path.islink(place)
            for place in (os.path.join(self.upper, path), os.path.join(self.lower, path))
        )

    def _read_one(self, reading: Reading, above: int, below: int, name: str, path: str) -> bool:
        """Add the move for one path; return whether it is a merged directory, to be read next."""
        new = os.stat(name, dir_fd=above, follow_symlinks=False)
        old = _lstat(name, below)
        source = f"upper/{path}"
        if stat.S_ISCHR(new.st_mode) and new.st_rdev == 0:
            if old is None:
                reading.conflicts.append(path)
            else:
                os.makedirs(os.path.join(self.directory, "out"), mode=0o700, exist_ok=True)
                reading.moves.append(Move("take", path, f"out/{len(reading.moves)}", _mark(old), None))
                reading.conflicts += self._changed(path, old)
            return False
        origin = _note(above, name, "origin")
        if stat.S_ISDIR(new.st_mode) and _note(above, name, "opaque") is None:
            if old is not None and stat.S_ISDIR(old.st_mode):
                return True
            if origin is not None:
                reading.conflicts.append(path)
                reading.moves.append(Move("put", path, source, None, _mark(new)))
                return False
        if old is None:
            reading.moves.append(Move("put", path, source, None, _mark(new)))
            if origin is not None and not stat.S_ISDIR(new.st_mode):
                self._origins[path] = _inode_in(origin)
            return False
        reading.moves.append(Move("swap", path, source, _mark(old), _mark(new)))
        reading.conflicts += self._changed(path, old)
        return False

    def _tree_directory(self, path: str) -> int | None:
        """Open a directory of the workspace to look into; None if somebody else removed or replaced it."""
        try:
            with self._tree.strict(path) as place:
                flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(place.name, flags, dir_fd=place.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _changed(self, path: str, status: os.stat_result) -> list[str]:
        """Name what was changed at a path and below it since the layer was opened."""
        self._see(path, status)
        changed = [path] if status.st_ctime_ns >= self.marker_ns else []
        if stat.S_ISDIR(status.st_mode):
            for below, found in walk(self._tree, path):
                self._see(below, found)
                if found.st_ctime_ns >= self.marker_ns:
                    changed.append(below)
        return changed

    def _see(self, path: str, status: os.stat_result) -> None:
        self._seen.add(status.st_ino)
        if status.st_nlink > 1 and stat.S_ISREG(status.st_mode) and not self._is_cached(path):
            self._several[path] = status

    def _is_cached(self, path: str) -> bool:
        """Say whether a path lies in a cache, where builds replace results that have several names."""
        return any(_is_tagged(os.path.join(self.lower, above)) for above in _and_above(path))

    def _linked(self, reading: Reading) -> list[str]:
        """Name the files with several names that were changed or moved, as far as that can be told."""
        if not self._several:
            return []
        index = os.path.join(self.work, "index")
        if os.path.isdir(index):
            upper, found = RootedDirectory(self.upper), self._changed_and_removed(index)
            for path, status in walk(upper, ROOT):
                if stat.S_ISREG(status.st_mode):
                    with upper.strict(path) as place:
                        if _note(place.descriptor, place.name, "nlink") is not None:
                            found.append(path)
            return found
        # Without an index a copy of one looks like a new file.
        return list(self._several) if any(move.kind in ("put", "swap") for move in reading.moves) else []

    def _changed_and_removed(self, index: str) -> list[str]:
        """Name the files with several names that were changed by one that was removed then.

        The index has a copy of each such file, changed or not; this one has no other name in the layer.
        """
        before = {status.st_ino: (path, _mark(status)) for path, status in self._several.items()}
        found = []
        descriptor = os.open(index, _LIST_FLAGS)
        try:
            for name in os.listdir(descriptor):
                now = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(now.st_mode) and now.st_nlink == 1:
                    inode = _inode_in(_note(descriptor, name, "origin") or b"")
                    path, old = before.get(inode, ("", None))
                    if inode == 0:
                        found.append("a removed file")
                    elif old is not None and old[1:] != _mark(now)[1:]:
                        found.append(path)
        finally:
            os.close(descriptor)
        return found


def why_not(root: str, place: str) -> str | None:
    """Say why no layer can be opened over a workspace, as far as that can be told without mounting one."""
    if sys.platform != "linux":
        return "there are no overlays on this system"
    if is_inside(root, place):
        return f"{place} lies inside of the workspace"
    prefix = root.rstrip("/") + "/"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            points = [line.split(" ", 5)[4] for line in mounts]
    except OSError as error:
        return f"the list of mounts cannot be read: {error}"
    for point in points:
        if point.startswith(prefix):
            # An overlay shows the directory below the mount, not what is mounted there.
            return f"something is mounted inside of the workspace, at {_unescaped(point)}"
    return None


def is_inside(root: str, place: str) -> bool:
    """Say whether a place lies in a directory."""
    return os.path.commonpath((root, place)) == root


def memory_place(place: str) -> str:
    """Return a directory in memory that takes another one's layers; the system bounds its size.

    Raises `WorkspaceError` if it belongs to somebody else.
    """
    name = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
    directory = os.path.join(_MEMORY, f"treenail-{os.geteuid()}-{name}")
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise WorkspaceError(f"{directory} belongs to somebody else; remove it first") from None
        drop_left_layers(directory)
    except OSError as error:
        raise WorkspaceError(f"no layer can be made in {_MEMORY}: {error.strerror}") from error
    return directory


def _unescaped(point: str) -> str:
    return point.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def drop_left_layers(place: str, in_use: Collection[str] = ()) -> None:
    """Remove the layers in a place that no living process holds, except those of a journal."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return
    for directory in {os.path.join(place, name) for name in names} - set(in_use):
        try:
            lock = _locked(directory, wait=False)
        except BlockingIOError:
            continue
        try:
            remove_tree(directory)
        finally:
            os.close(lock)


def _locked(directory: str, *, wait: bool) -> int:
    """Lock a layer's directory. The kernel releases the lock when the process ends."""
    descriptor = os.open(directory, _LIST_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def walk(tree: RootedDirectory, path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below a directory, outermost first. What goes meanwhile is left out."""
    pending = [path]
    while pending:
        here = pending.pop()
        try:
            _, descriptor = _opened(tree, here, relax=False)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            for name in sorted(os.listdir(descriptor)):
                status = _lstat(name, descriptor)
                if status is None:
                    continue
                below = join(here, name)
                yield below, status
                if stat.S_ISDIR(status.st_mode):
                    pending.append(below)
        finally:
            os.close(descriptor)


def strip(tree: RootedDirectory, path: str) -> None:
    """Remove what an overlay has noted on a path and everything below it. Times of files stay."""
    with tree.strict(path) as place:
        status = place.lstat()
        _strip_one(place.descriptor, place.name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        for below, _ in walk(tree, path):
            with tree.strict(below) as place:
                _strip_one(place.descriptor, place.name)


def _strip_one(directory: int, name: str) -> None:
    path = f"/proc/self/fd/{directory}/{name}"
    for each in os.listxattr(path, follow_symlinks=False):
        if each.startswith(_NAMESPACES):
            try:
                os.removexattr(path, each, follow_symlinks=False)
            except PermissionError:
                mode = stat.S_IMODE(os.lstat(path).st_mode)
                chmod_at(directory, name, mode | 0o200)
                os.removexattr(path, each, follow_symlinks=False)
                chmod_at(directory, name, mode)


def remove_tree(path: str) -> None:
    """Remove a directory with all that is in it, whatever its bits and however deep. None is fine."""
    try:
        os.chmod(path, 0o700)
        top = os.open(path, _LIST_FLAGS)
    except FileNotFoundError:
        return
    try:
        # What lies too deep comes back to the top under another name.
        while _empty(top, top, 0):
            pass
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(descriptor: int, top: int, depth: int) -> bool:
    """Remove what is in a directory; say whether something was brought to the top."""
    lifted = False
    with os.scandir(descriptor) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=descriptor)
            continue
        with suppress(OSError):  # it is not empty
            os.rmdir(name, dir_fd=descriptor)
            continue
        chmod_at(descriptor, name, 0o700)
        if depth >= _MAX_DEPTH:
            os.rename(name, secrets.token_hex(16), src_dir_fd=descriptor, dst_dir_fd=top)
            lifted = True
            continue
        below = os.open(name, _LIST_FLAGS, dir_fd=descriptor)
        try:
            lifted = _empty(below, top, depth + 1) or lifted
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=descriptor)
    return lifted


def _marker(root: str) -> int:
    """Return a time that is later than every change so far, and not later than any change to come.

    Both by the clock of the workspace's filesystem. That clock may stand still for a tick; the file has no
    name, so that the workspace does not change.
    """
    try:
        descriptor = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        name = os.path.join(root, f".treenail-{secrets.token_hex(8)}.tmp")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(name)
    try:
        first = os.fstat(descriptor).st_ctime_ns
        give_up_at = time.monotonic() + _TICK_S
        while True:
            os.fchmod(descriptor, 0o600)
            now = os.fstat(descriptor).st_ctime_ns
            if now > first or time.monotonic() > give_up_at:
                return now
            time.sleep(0.0005)
    finally:
        os.close(descriptor)


def _opened(tree: RootedDirectory, path: str, *, relax: bool = True) -> tuple[os.stat_result, int]:
    """Open a directory for listing, with its status; `relax` opens one of our own whose bits forbid it."""
    with tree.strict(path) as place:
        status = os.stat(place.name, dir_fd=place.descriptor, follow_symlinks=False)
        if relax and status.st_mode & 0o700 != 0o700 and os.geteuid() != 0:
            chmod_at(place.descriptor, place.name, stat.S_IMODE(status.st_mode) | 0o700)
        return status, os.open(place.name, _LIST_FLAGS, dir_fd=place.descriptor)


def _lstat(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _note(directory: int, name: str, note: str) -> bytes | None:
    """Return what an overlay has noted on a path, or None."""
    path = f"/proc/self/fd/{directory}/{name}"
    for each in os.listxattr(path, follow_symlinks=False):
        if each.startswith(_NAMESPACES) and each.endswith(f".{note}"):
            try:
                return os.getxattr(path, each, follow_symlinks=False)
            except PermissionError:  # the file's own bits forbid it
                return b""
    return None


def _inode_in(origin: bytes) -> int:
    """Return the inode that a file was copied up from, or 0 if it cannot be told."""
    kind, handle = origin[4:5], origin[21:]
    if kind == b"\x01" and len(handle) == 8:  # ext4 and most others: inode, generation
        return int.from_bytes(handle[:4], sys.byteorder)
    if kind == b"\x01" and len(handle) == 12:  # tmpfs: generation, inode
        return int.from_bytes(handle[4:], sys.byteorder)
    if kind in (b"\x81", b"\x4d"):  # xfs, btrfs
        return int.from_bytes(handle[:8], sys.byteorder)
    return 0


def _mark(status: os.stat_result) -> Mark:
    return Mark(
        status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns
    )


def _is_tagged(directory: str) -> bool:
    """Say whether a directory calls itself a cache."""
    return os.path.isfile(os.path.join(directory, "CACHEDIR.TAG"))


def _and_above(path: str) -> Iterator[str]:
    """Yield a path and the directories above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _is_dressed(move: Move) -> bool:
    one, other = move.before, move.after
    return (
        one is not None
        and other is not None
        and (one.mode, one.uid, one.gid, one.mtime_ns) == (other.mode, other.uid, other.gid, other.mtime_ns)
    )


def _dress(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mode, status.st_uid, status.st_gid

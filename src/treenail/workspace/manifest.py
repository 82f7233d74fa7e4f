"""What is in a directory tree: states, the manifest of a whole tree, and the scan that keeps it true.

Theory of operation
-------------------
A *manifest* has, for every path of a tree, its type, permission bits, owner, size, times, inode and the
id of its content. A *scan* walks the tree and compares what `lstat` says with the manifest. An entry
whose whole stat tuple is as before is unchanged and is not opened; everything else is read and hashed.

- A forged mtime is no disguise: ctime is in the tuple, and only the kernel sets it.
- Timestamps move in ticks. A file that was written in the same tick in which it was scanned could be
  written again without any trace in its tuple. So an entry as new as the scan itself (`RACY_NS`) is kept
  without its ctime and is read again next time.
- The walk goes from directory descriptor to directory descriptor and never follows a link.
- The manifest is not changed by a scan. The scan says what would change (`updates`), because whether the
  new knowledge counts is decided later, when a tool call is committed.

Looking at a directory's entries is the cost of a tool call that runs a shell command. So a directory in
which everything was as known is remembered in the shape in which it was seen (`Sighting`), and the next scan
compares it as a whole; only if that does not match is one entry compared after the other.

What a scan cannot or may not keep (special files, files it may not read, what is over budget) is
*uncovered*: named, and never touched by a restore. What the operator excludes is not even looked at.
"""

from __future__ import annotations

import gc
import marshal
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from treenail.workspace.objects import (
    EMPTY_TREE,
    LARGE_BYTES,
    MODE_EXECUTABLE,
    MODE_FILE,
    MODE_LINK,
    MODE_TREE,
    ObjectStore,
    PackWriter,
    TreeEntry,
    hash_descriptor,
    object_id,
    read_exactly,
)
from treenail.workspace.search import GlobPattern, compile_glob
from treenail.workspace.spool import ObjectKind, sync_directory

Kind = Literal["absent", "file", "directory", "link", "other"]

ANY = -1
"""Stands for a mode or an owner that is not known, and agrees with every other."""

RACY_NS = 100_000_000
"""An entry changed less than this before a scan began is read again by the next one."""

MAX_SCAN_DEPTH = 200
"""Directories nested deeper are uncovered: one descriptor is held per level."""

TEMPORARY_PREFIX = ".treenail-"
TEMPORARY_SUFFIX = ".tmp"

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_ATTEMPTS = 3
_TYPE_MASK = 0o170000
_DIRECTORY = 0o040000
_GIT_FILE = b"%o" % MODE_FILE
_GIT_EXECUTABLE = b"%o" % MODE_EXECUTABLE
_MARSHAL_VERSION = 4
_MANIFEST_MAGIC = b"treenail manifest 1\n"


class State(NamedTuple):
    """What is at a path. `other` is something that is not kept: a special file, or one over budget."""

    kind: Kind
    mode: int = ANY
    """The permission bits, `0o7777`."""
    oid: bytes = b""
    """The blob with a file's content or a link's target."""
    size: int = 0
    mtime_ns: int = 0
    uid: int = ANY
    gid: int = ANY


ABSENT = State("absent")
OTHER = State("other")

Entry = tuple[int, int, int, int, int, int, int, bytes]
"""A path in a manifest: st_mode, inode, size, mtime_ns, ctime_ns, uid, gid, blob id.

A plain tuple, because a scan compares tens of thousands of them. A ctime of 0 means: read it again.
"""


_fingerprint = attrgetter("st_ctime_ns", "st_ino", "st_mtime_ns", "st_size")


class Sighting(NamedTuple):
    """A directory in which a scan found everything as known, as the next scan should see it again."""

    entries: dict[str, Entry]
    """What was known. It counts only as long as just this is known, the very same dictionary."""
    names: list[str]
    """In the order of the directory."""
    fingerprints: list[tuple[int, int, int, int]]
    children: list[str]


def is_temporary(name: str) -> bool:
    """Say whether a name is one of ours for files that are being written."""
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)


def same(one: State, other: State) -> bool:
    """Say whether two states are the same for a restore: type, content, permission bits and owner."""
    if one.kind != other.kind:
        return False
    if one.kind == "absent":
        return True
    if one.kind == "other":
        return False
    if one.oid != other.oid:
        return False
    return (
        (one.kind == "link" or one.mode == other.mode or ANY in (one.mode, other.mode))
        and (one.uid == other.uid or ANY in (one.uid, other.uid))
        and (one.gid == other.gid or ANY in (one.gid, other.gid))
    )


def state_of(entry: Entry | None) -> State:
    """Return the state that a manifest's entry stands for."""
    if entry is None:
        return ABSENT
    mode, _, size, mtime_ns, _, uid, gid, oid = entry
    permissions = mode & 0o7777
    kind = mode & _TYPE_MASK
    if kind == _DIRECTORY:
        return State("directory", permissions, b"", 0, 0, uid, gid)
    if kind == stat.S_IFREG:
        return State("file", permissions, oid, size, mtime_ns, uid, gid)
    if kind == stat.S_IFLNK:
        return State("link", 0o777, oid, size, mtime_ns, uid, gid)
    return OTHER


def entry_of(state: State) -> Entry | None:
    """Return a manifest entry for a state; it has no stat tuple, so the next scan reads the path."""
    kinds = {"directory": _DIRECTORY, "file": stat.S_IFREG, "link": stat.S_IFLNK}
    kind = kinds.get(state.kind)
    if kind is None:
        return None
    mode = kind | (state.mode if state.mode != ANY else 0)
    return (mode, 0, state.size, state.mtime_ns, 0, state.uid, state.gid, state.oid)


def tree_entry(state: State) -> TreeEntry | None:
    """Return how git spells a state; an empty directory is an empty tree."""
    if state.kind == "directory":
        return TreeEntry(MODE_TREE, b"")
    if state.kind == "link":
        return TreeEntry(MODE_LINK, state.oid)
    if state.kind == "file":
        return TreeEntry(MODE_EXECUTABLE if state.mode & stat.S_IXUSR else MODE_FILE, state.oid)
    return None


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
        self._names: list[tuple[GlobPattern, bool]] = []
        self._paths: list[tuple[GlobPattern, bool]] = []
        for pattern in self.patterns:
            if pattern.startswith("!"):
                raise ValueError(f"the exclude pattern {pattern!r} negates, which is not supported")
            body = pattern.strip("/")
            rooted = "/" in pattern.rstrip("/")
            compiled = (compile_glob(body), pattern.endswith("/"))
            (self._paths if rooted else self._names).append(compiled)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def match(self, path: str, name: str, *, directory: bool) -> bool:
        """Say whether a path is excluded itself; its parents are the caller's to ask about."""
        for pattern, directories_only in self._names:
            if (directory or not directories_only) and pattern.matches(name):
                return True
        for pattern, directories_only in self._paths:
            if (directory or not directories_only) and pattern.matches(path):
                return True
        return False

    def covers(self, path: str, *, directory: bool) -> bool:
        """Say whether a path or one of its parents is excluded."""
        if not self.patterns or not path:
            return False
        parts = path.split("/")
        return any(
            self.match("/".join(parts[: count + 1]), part, directory=directory or count + 1 < len(parts))
            for count, part in enumerate(parts)
        )


class Manifest:
    """Everything known about a tree. Directories are keyed by path, the root is the empty text."""

    def __init__(self) -> None:
        self.directories: dict[str, dict[str, Entry]] = {}
        self.uncovered: dict[str, str] = {}
        """Paths that are not kept, and why; what is below them is not kept either."""
        self.position = 0
        """How many boundaries of the line are already in here."""
        self.root_mode = 0o755
        self.baseline_missing = False
        """Whether no scan has looked at the tree yet."""
        self.sightings: dict[str, Sighting] = {}
        """Directories that were last seen as they are known. Not kept on disk."""

    def copy(self) -> Manifest:
        """Return a manifest that can be changed on its own; entries are shared, because none ever changes."""
        other = Manifest()
        other.directories = dict(self.directories)
        other.uncovered = self.uncovered
        other.position = self.position
        other.root_mode = self.root_mode
        other.baseline_missing = self.baseline_missing
        # Each of them says by itself whether it counts, so both may use and change them.
        other.sightings = self.sightings
        return other

    def get(self, path: str) -> Entry | None:
        """Return what is known about a path."""
        directory, _, name = path.rpartition("/")
        entries = self.directories.get(directory)
        return None if entries is None else entries.get(name)

    def learn(self, path: str, state: State) -> str:
        """Take a state in that was not seen by a scan; return the directory that changed."""
        directory, _, name = path.rpartition("/")
        entry = entry_of(state)
        # Copies of a manifest share these dictionaries, so they are replaced and not changed.
        entries = dict(self.directories.get(directory, {}))
        self.directories[directory] = entries
        if entry is None:
            entries.pop(name, None)
            self.forget_below(path)
        else:
            entries[name] = entry
            if state.kind == "directory":
                self.directories.setdefault(path, {})
            else:
                self.forget_below(path)
        return directory

    def learn_again(self, path: str, entry: Entry) -> str:
        """Have the next scan look at a path whatever its stat tuple says; return its directory."""
        directory, _, name = path.rpartition("/")
        mode, _, size, mtime_ns, _, uid, gid, oid = entry
        if mode & _TYPE_MASK != _DIRECTORY:
            entries = dict(self.directories[directory])
            entries[name] = (mode, 0, size, mtime_ns, 0, uid, gid, oid)
            self.directories[directory] = entries
        return directory

    def forget_below(self, path: str) -> None:
        """Drop what is known about everything below a path."""
        if path in self.directories:
            prefix = path + "/"
            for known in [key for key in self.directories if key == path or key.startswith(prefix)]:
                del self.directories[known]
                self.sightings.pop(known, None)

    def apply(self, updates: Mapping[str, dict[str, Entry] | None], uncovered: dict[str, str]) -> None:
        """Make a scan's findings the present knowledge."""
        for path, entries in updates.items():
            if entries is None:
                self.directories.pop(path, None)
                self.sightings.pop(path, None)
            else:
                self.directories[path] = entries
        self.uncovered = uncovered

    def is_uncovered(self, path: str) -> bool:
        """Say whether a path is not kept, itself or because of a directory above it."""
        return is_within(path, self.uncovered)


def is_within(path: str, prefixes: Mapping[str, object]) -> bool:
    """Say whether a path is one of the prefixes or lies below one."""
    if not prefixes:
        return False
    if "" in prefixes or path in prefixes:
        return True
    cut = path.rfind("/")
    while cut != -1:
        path = path[:cut]
        if path in prefixes:
            return True
        cut = path.rfind("/")
    return False


class ManifestFile:
    """A manifest on disk: a whole one, followed by the directories that changed since.

    It is appended to, so that keeping it costs what has changed. A torn or damaged end is
    ignored: what it would have said is found again by the next scan.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._base_directories = 0
        self._appended = 0

    def load(self) -> Manifest | None:
        """Read the manifest, or None if there is none that can be read."""
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if not data.startswith(_MANIFEST_MAGIC):
            return None
        manifest: Manifest | None = None
        offset = len(_MANIFEST_MAGIC)
        self._appended = 0
        while offset + 12 <= len(data):
            size = int.from_bytes(data[offset : offset + 8], "big")
            body = memoryview(data)[offset + 12 : offset + 12 + size]
            checksum = int.from_bytes(data[offset + 8 : offset + 12], "big")
            if len(body) != size or zlib.crc32(body) != checksum:
                break
            position, root_mode, uncovered, directories = marshal.loads(body)
            if manifest is None:
                manifest = Manifest()
                self._base_directories = len(directories)
            else:
                self._appended += len(directories)
            manifest.apply(directories, uncovered)
            manifest.position = position
            manifest.root_mode = root_mode
            offset += 12 + size
        if offset != len(data):
            # Appending behind a torn end would hide what is appended.
            self._base_directories = 0
        return manifest

    def save(self, manifest: Manifest, dirty: Iterable[str], *, durable: bool) -> None:
        """Keep the manifest, given which directories changed since it was last saved or loaded."""
        changed = set(dirty)
        if self._base_directories and self._appended + len(changed) <= self._base_directories:
            directories = {path: manifest.directories.get(path) for path in changed}
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            try:
                descriptor = os.open(self._path, flags)
            except FileNotFoundError:
                self._base_directories = 0
            else:
                try:
                    _write(descriptor, self._frame(manifest, directories), durable=durable)
                finally:
                    os.close(descriptor)
                self._appended += len(changed)
                return
        temporary = f"{self._path}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            whole: dict[str, dict[str, Entry] | None] = {**manifest.directories}
            _write(descriptor, _MANIFEST_MAGIC + self._frame(manifest, whole), durable=durable)
        finally:
            os.close(descriptor)
        os.rename(temporary, self._path)
        if durable:
            sync_directory(os.path.dirname(self._path))
        self._base_directories = max(1, len(manifest.directories))
        self._appended = 0

    @staticmethod
    def _frame(manifest: Manifest, directories: Mapping[str, dict[str, Entry] | None]) -> bytes:
        body = marshal.dumps(
            (manifest.position, manifest.root_mode, manifest.uncovered, dict(directories)), _MARSHAL_VERSION
        )
        return len(body).to_bytes(8, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def _write(descriptor: int, data: bytes, *, durable: bool) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    if durable:
        os.fsync(descriptor)


class Difference(NamedTuple):
    """A path where a scan found something else than the manifest says."""

    path: str
    before: State
    after: State


class Scan:
    """One walk over a tree, compared with a manifest. `run` it once, then read its findings.

    With a `store`, new content is kept there; without one, content is only compared, special and
    over-sized files count as differences, and limits do not apply: that is the look before a
    rollback. `repair` opens known directories that were made unreadable since.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        store: ObjectStore | None,
        exclusions: Exclusions,
        private: Mapping[str, frozenset[str]],
        limits: SnapshotLimits,
        repair: bool = False,
    ) -> None:
        self.differences: list[Difference] = []
        self.touched: list[Difference] = []
        """Files whose content is as before, but whose times are not."""
        self.updates: dict[str, dict[str, Entry] | None] = {}
        self.uncovered: dict[str, str] = {}
        self.temporaries: list[str] = []
        """Our own half-written files, by path."""
        self.root_mode = manifest.root_mode
        self._manifest = manifest
        self._known = manifest.directories
        self._sightings = manifest.sightings
        self._store = store
        self._exclusions = exclusions
        self._private = private
        self._limits = limits
        self._repair = repair
        self._first = store is not None and not manifest.directories
        self._pack: PackWriter | None = None
        self._max_captured = min(limits.max_file_bytes, LARGE_BYTES - 1)
        """Larger files do not take the shortest way into a pack."""
        self._walk = self._directory
        self._files = 0
        self._bytes_left = limits.max_bytes
        self._racy_from = 0
        self._deadline = 0.0
        self._over: str | None = None

    def run(self, root: int, conclude: Callable[[], None] | None = None) -> None:
        """Walk the tree below an open directory, which stays open.

        A first scan puts all content into one pack; `conclude` may draw its conclusions from the findings
        while that pack is being completed.
        """
        self._racy_from = time.time_ns() - RACY_NS
        self._deadline = time.monotonic() + self._limits.max_seconds
        self.root_mode = stat.S_IMODE(os.fstat(root).st_mode)
        if not self._first or self._store is None:
            self._walk(root, "", 0)
            return
        self._walk = self._first_directory
        with _without_collections(), self._store.bulk() as pack:
            self._pack = pack
            self._walk(root, "", 0)
            pack.seal()
            if conclude is not None:
                conclude()

    # --- the walk ----------------------------------------------------------------------------------

    def _directory(self, descriptor: int, path: str, depth: int) -> None:
        with os.scandir(descriptor) as listing:
            items = list(listing)
        known = self._known.get(path)
        sighting = self._sightings.get(path)
        if sighting is not None and sighting.entries is known and _is_seen_again(items, sighting):
            children = sighting.children
            self._files += len(items)
        else:
            children = self._compare(descriptor, path, known, items)
        if self._over is None and time.monotonic() > self._deadline:
            self._stop(f"the limit of {self._limits.max_seconds:g} seconds was reached")
        prefix = path + "/" if path else ""
        for name in children:
            self._child(descriptor, prefix + name, name, depth)

    def _compare(
        self, descriptor: int, path: str, known: dict[str, Entry] | None, items: list[os.DirEntry[str]]
    ) -> list[str]:
        """Compare a directory with what is known, one entry after the other; return its directories."""
        entries: dict[str, Entry] = known if known is not None else {}
        lookup = entries.get
        children: list[str] = []
        unusual: list[tuple[str, os.stat_result, Entry | None]] = []
        seen = 0
        for item in items:
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            name = item.name
            old = lookup(name)
            if old is None:
                unusual.append((name, status, None))
            elif (
                # With inode and ctime the same, so are type, bits and owner: only the kernel sets ctime.
                old[4] == status.st_ctime_ns
                and old[1] == status.st_ino
                and old[3] == status.st_mtime_ns
                and old[2] == status.st_size
            ):
                seen += 1
            else:
                seen += 1
                mode = status.st_mode
                if mode & 0o170000 == 0o040000:
                    children.append(name)
                    if old[0] == mode and old[5] == status.st_uid and old[6] == status.st_gid:
                        continue
                unusual.append((name, status, old))
        self._files += seen
        if unusual or known is None or seen != len(entries):
            self._differing(descriptor, path, known, unusual, children, seen)
        elif seen == len(items):
            names = [item.name for item in items]
            fingerprints = [_fingerprint(item.stat(follow_symlinks=False)) for item in items]
            self._sightings[path] = Sighting(known, names, fingerprints, children)
        return children

    def _differing(
        self,
        descriptor: int,
        path: str,
        known: dict[str, Entry] | None,
        unusual: list[tuple[str, os.stat_result, Entry | None]],
        children: list[str],
        seen: int,
    ) -> None:
        """Look closer at a directory where something is new, gone, or not as it was."""
        prefix = path + "/" if path else ""
        fresh = {} if known is None else known.copy()
        for name, status, old in unusual:
            if old is None:
                if not self._is_wanted(path, prefix + name, name, status):
                    continue
                self._files += 1
                if stat.S_ISDIR(status.st_mode):
                    children.append(name)
            new = self._look(descriptor, prefix + name, name, old, status)
            if new is None:
                fresh.pop(name, None)
            else:
                fresh[name] = new
        if known is not None and seen != len(known):
            for name in known.keys() - set(os.listdir(descriptor)):
                self._gone(prefix + name, fresh.pop(name))
        if fresh != known:
            self.updates[path] = fresh

    def _is_wanted(self, directory: str, path: str, name: str, status: os.stat_result) -> bool:
        """Say whether something that is not known is to be looked at."""
        if name in self._private.get(directory, ()):
            return False
        if is_temporary(name):
            self.temporaries.append(path)
            return False
        if self._exclusions and self._exclusions.match(path, name, directory=stat.S_ISDIR(status.st_mode)):
            return False
        if self._over is None and self._files >= self._limits.max_files:
            self._stop(f"the limit of {self._limits.max_files} files was reached")
        if self._over is not None:
            self._uncover(directory, self._over)
            return False
        return True

    def _first_directory(self, descriptor: int, path: str, depth: int) -> None:
        """Do the same for a tree of which nothing is known: everything is read, nothing is compared."""
        prefix = path + "/" if path else ""
        private = self._private.get(path, frozenset())
        exclusions = self._exclusions if self._exclusions else None
        max_files = self._limits.max_files
        capture = self._capture
        children: list[str] = []
        entries: dict[str, Entry] = {}
        with os.scandir(descriptor) as listing:
            for item in listing:
                name = item.name
                if name in private or (name[0] == "." and is_temporary(name)):
                    continue
                if exclusions is not None and exclusions.match(
                    prefix + name, name, directory=item.is_dir(follow_symlinks=False)
                ):
                    continue
                if self._files >= max_files and self._over is None:
                    self._stop(f"the limit of {max_files} files was reached")
                if self._over is not None:
                    self._uncover(path, self._over)
                    continue
                self._files += 1
                if item.is_file(follow_symlinks=False):
                    # Opening it tells what `lstat` would.
                    entry = capture(descriptor, prefix, name)
                else:
                    status = item.stat(follow_symlinks=False)
                    entry = self._look(descriptor, prefix + name, name, None, status)
                    if stat.S_ISDIR(status.st_mode):
                        children.append(name)
                if entry is not None:
                    entries[name] = entry
        self.updates[path] = entries
        if self._over is None and time.monotonic() > self._deadline:
            self._stop(f"the limit of {self._limits.max_seconds:g} seconds was reached")
        for name in children:
            self._child(descriptor, prefix + name, name, depth)

    def _child(self, parent: int, path: str, name: str, depth: int) -> None:
        if self._over is not None and path not in self._known:
            self._uncover(path, self._over)
            return
        if depth >= MAX_SCAN_DEPTH:
            self._uncover(path, f"it is nested deeper than {MAX_SCAN_DEPTH} directories")
            return
        try:
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        except PermissionError:
            if not (self._repair and self._reopen(parent, path, name)):
                self._uncover(path, "it may not be read")
                return
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        except OSError:
            # It was there a moment ago: somebody is changing the tree under the scan.
            self._uncover(path, "it changed while it was being read")
            return
        try:
            self._walk(descriptor, path, depth + 1)
        finally:
            os.close(descriptor)

    def _reopen(self, parent: int, path: str, name: str) -> bool:
        known = self._manifest.get(path)
        if known is None:
            return False
        chmod_at(parent, name, known[0] & 0o7777 | 0o700)
        return True

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
        if old is not None and before.kind == "directory" and kind != _DIRECTORY:
            self._gone_below(path)
        new: Entry | None
        if kind == _DIRECTORY:
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
                self.differences.append(Difference(path, before, OTHER))
            return None
        if self._first:
            # Everything is new, and nothing of it is a change.
            return new
        after = state_of(new)
        if old is None:
            if self._store is not None or not self._manifest.is_uncovered(path):
                self.differences.append(Difference(path, ABSENT, after))
        elif not same(before, after):
            self.differences.append(Difference(path, before, after))
        elif after.kind == "file" and before.mtime_ns != after.mtime_ns:
            self.touched.append(Difference(path, before, after))
        return new

    def _gone(self, path: str, entry: Entry) -> None:
        if entry[0] & _TYPE_MASK == _DIRECTORY:
            self._gone_below(path)
        self.differences.append(Difference(path, state_of(entry), ABSENT))

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
                    oid = self._content(descriptor, status.st_size)
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

    def _capture(self, directory: int, prefix: str, name: str) -> Entry | None:
        """Read and keep a file of a first scan: `_file` on the shortest way, for there are many."""
        pack = self._pack
        try:
            descriptor = os.open(name, _READ_FLAGS, dir_fd=directory)
        except OSError as error:
            self._uncover(prefix + name, f"it could not be read: {error.strerror}")
            return None
        try:
            status = os.fstat(descriptor)
            mode, size = status.st_mode, status.st_size
            if size <= self._max_captured and size <= self._bytes_left and mode & 0o170000 == 0o100000:
                data = os.read(descriptor, size + 1)
                if len(data) == size and pack is not None:
                    self._bytes_left -= size
                    ctime_ns, mtime_ns = status.st_ctime_ns, status.st_mtime_ns
                    if ctime_ns >= self._racy_from or mtime_ns >= self._racy_from:
                        ctime_ns = 0
                    oid = pack.add("blob", data)
                    return (mode, status.st_ino, size, mtime_ns, ctime_ns, status.st_uid, status.st_gid, oid)
        finally:
            os.close(descriptor)
        return self._file(directory, prefix + name, name, None, status)

    def _link(self, directory: int, path: str, name: str, status: os.stat_result) -> Entry | None:
        try:
            target = os.fsencode(os.readlink(name, dir_fd=directory))
        except OSError as error:
            self._uncover(path, f"the link could not be read: {error.strerror}")
            return None
        return self._entry(status, self._keep(target))

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

    def _content(self, descriptor: int, size: int) -> bytes | None:
        if self._store is None:
            return hash_descriptor(descriptor, size)
        if size >= LARGE_BYTES:
            return self._store.write_descriptor(descriptor, size)
        data = read_exactly(descriptor, size)
        return None if data is None else self._keep(data)

    def _keep(self, data: bytes) -> bytes:
        if self._store is None:
            return object_id("blob", data)
        if self._pack is None:
            return self._store.write("blob", data)
        return self._pack.add("blob", data)


def _is_seen_again(items: list[os.DirEntry[str]], sighting: Sighting) -> bool:
    """Say whether a directory is as it was seen, to every name and every stat tuple."""
    if len(items) != len(sighting.names):
        return False
    try:
        fingerprints = [_fingerprint(item.stat(follow_symlinks=False)) for item in items]
    except FileNotFoundError:
        return False
    return fingerprints == sighting.fingerprints and [item.name for item in items] == sighting.names


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage in a block that only makes things to be kept.

    A first capture makes several objects per file, none of which can be garbage; looking at all of them
    again and again is a tenth of its time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def write_trees(manifest: Manifest, add: Callable[[ObjectKind, bytes], bytes]) -> bytes:
    """Store every directory of a manifest as a tree and return the root's id."""
    trees: dict[str, bytes] = {}
    # What `os.fsencode` does, for many.
    encoding, errors = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
    # Deepest first, so that the trees below a directory are known when it is its turn.
    for path in sorted(manifest.directories, key=lambda path: path.count("/") + bool(path), reverse=True):
        prefix = path + "/" if path else ""
        # What `encode_tree` does, for many: sorted by name, a directory's as if it ended in a slash.
        lines: list[tuple[bytes, bytes]] = []
        for name, entry in manifest.directories[path].items():
            mode, oid = entry[0], entry[7]
            raw = name.encode(encoding, errors)
            kind = mode & 0o170000
            if kind == 0o100000:
                lines.append((raw, b"%b %b\0%b" % (_GIT_EXECUTABLE if mode & 0o100 else _GIT_FILE, raw, oid)))
            elif kind == stat.S_IFLNK:
                lines.append((raw, b"%o %b\0%b" % (MODE_LINK, raw, oid)))
            else:
                below = trees.get(prefix + name)
                # A directory that could not be read is known by name alone.
                oid = below if below is not None else add("tree", b"")
                lines.append((raw + b"/", b"%o %b\0%b" % (MODE_TREE, raw, oid)))
        lines.sort()
        trees[path] = add("tree", b"".join([line for _, line in lines]))
    return trees.get("", EMPTY_TREE)


def patch_tree(store: ObjectStore, root: bytes, edits: Sequence[tuple[str, TreeEntry | None]]) -> bytes:
    """Return the tree that has the edits made; only the directories on their paths are written.

    An edit with `MODE_TREE` says that there is a directory, whatever is in it; None removes a name
    with everything below it.
    """
    # A trie of directories: each node holds the edits of its own names and the nodes below.
    top: _Node = ({}, {})
    for path, entry in edits:
        *parents, name = os.fsencode(path).split(b"/")
        node = top
        for part in parents:
            node = node[1].setdefault(part, ({}, {}))
        node[0][name] = entry
    return _patch(store, root, top)


_Node = tuple[dict[bytes, TreeEntry | None], dict[bytes, "_Node"]]


def _patch(store: ObjectStore, tree: bytes, node: _Node) -> bytes:
    entries = store.read_tree(tree)
    changed: dict[bytes, TreeEntry] | None = None
    names, below = node
    for name in names.keys() | below.keys():
        present = entries.get(name)
        wanted = names[name] if name in names else TreeEntry(MODE_TREE, b"")
        if wanted is not None and wanted.mode == MODE_TREE:
            start = present.oid if present is not None and present.mode == MODE_TREE else EMPTY_TREE
            if name in below:
                oid = _patch(store, start, below[name])
            else:
                oid = start if start != EMPTY_TREE else store.write("tree", b"")
            if name not in names and present is None and not _adds(below[name]):
                # Something was removed below a directory that was never known: there is nothing to say.
                continue
            wanted = TreeEntry(MODE_TREE, oid)
        if wanted != present:
            if changed is None:
                changed = dict(entries)
            if wanted is None:
                changed.pop(name, None)
            else:
                changed[name] = wanted
    return tree if changed is None else store.write_tree(changed)


def _adds(node: _Node) -> bool:
    """Say whether any edit in a trie puts something there."""
    return any(entry is not None for entry in node[0].values()) or any(map(_adds, node[1].values()))


def chmod_at(directory: int, name: str, mode: int) -> None:
    """Set permission bits without following a link and without needing to read the file."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            return
        if hasattr(os, "O_PATH"):
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        else:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)

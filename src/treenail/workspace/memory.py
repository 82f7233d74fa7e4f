"""A filesystem in memory whose snapshots are free.

Theory of operation
-------------------
The tree is made of values that never change: files, links, and directories that map names to other
values. A write builds new directories along the path to what it changes, shares everything else with
the tree before, and then swaps the root in one assignment. So

- a snapshot keeps a reference to the root, and a restore puts it back: both are O(1);
- a search that took the root sees one consistent tree, whatever a writer does meanwhile;
- two trees are compared by walking down only where they are not the same object.

A write costs O(depth + entries of the directories on the path), because a directory is a plain `dict`
that is copied when it changes. A persistent hash map would make that O(depth * log entries), and every
read slower; copying a dict of a thousand names takes microseconds, and directories of an agent's
workspace are rarely larger. Many files are loaded at once by the constructor, which copies nothing.

Each value carries a digest of its content that is computed when it is made. A directory's digest is a
sum over its entries, so that changing one entry does not hash the others again. The digest of the root
is a snapshot's `commit_ref`: equal trees have equal references, modification times apart.

Nothing outlives the process, except in a snapshot that was made to travel (`portable`), which carries the
tree. A call that is open when the process dies needs no undoing, because the tree is gone with it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, ClassVar
from uuid import UUID

from treenail.clock import SystemClock, WallClock, new_id
from treenail.errors import SnapshotMismatchError, UsageError, WorkspaceError
from treenail.workspace.base import (
    MAX_GREP_MATCHES,
    FileEntry,
    FileStat,
    Filesystem,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
)
from treenail.workspace.diffs import Version, describe
from treenail.workspace.paths import ROOT, encode, fail, join, normalize, split
from treenail.workspace.views import ReadOnlyFilesystem
from treenail.workspace.virtual import MAX_TOTAL_BYTES, VirtualTree

MAX_ENTRIES = 1_000_000
"""How many files, directories and links there may be, unless the constructor says otherwise."""

MAX_SNAPSHOTS = 10_000
"""How many snapshots are held, unless the constructor says otherwise; the oldest are forgotten first."""

MAX_PORTABLE_BYTES = 16 * 1024 * 1024
"""How much content a snapshot carries into another process."""

_DIGEST_BYTES = 20
_MAX_PACKED_BYTES = 4 * MAX_PORTABLE_BYTES
_DIGEST_MODULUS = 1 << (8 * _DIGEST_BYTES)
_FILE_PERMISSIONS = 0o644
_DIRECTORY_PERMISSIONS = 0o755
_LINK_PERMISSIONS = 0o777


# --- the values that a tree is made of -------------------------------------------------------------


def _digest(*parts: bytes) -> int:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return int.from_bytes(state.digest(), "big")


def _digest_bytes(digest: int) -> bytes:
    return digest.to_bytes(_DIGEST_BYTES, "big")


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is never changed: a write makes another."""

    content: bytes
    permissions: int
    modified_at: datetime
    digest: int

    @classmethod
    def make(cls, content: bytes, permissions: int, modified_at: datetime) -> _File:
        digest = _digest(b"file", permissions.to_bytes(2, "big"), content)
        return cls(content, permissions, modified_at, digest)

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def with_permissions(self, permissions: int) -> _File:
        return self.make(self.content, permissions, self.modified_at)


@dataclass(frozen=True, slots=True)
class _Link:
    """A symbolic link."""

    target: str
    modified_at: datetime
    digest: int

    @property
    def size_bytes(self) -> int:
        return len(encode(self.target))

    @classmethod
    def make(cls, target: str, modified_at: datetime) -> _Link:
        return cls(target, modified_at, _digest(b"link", encode(target)))


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory. `entries` is never changed after the directory is made."""

    entries: Mapping[str, _Node]
    permissions: int
    modified_at: datetime
    entries_digest: int = 0
    total_bytes: int = 0
    total_entries: int = 0
    size_bytes: ClassVar[int] = 0

    @classmethod
    def make(cls, entries: Mapping[str, _Node], permissions: int, modified_at: datetime) -> _Directory:
        return cls(
            entries=entries,
            permissions=permissions,
            modified_at=modified_at,
            entries_digest=sum(_entry_digest(*entry) for entry in entries.items()) % _DIGEST_MODULUS,
            total_bytes=sum(map(_total_bytes, entries.values())),
            total_entries=sum(map(_total_entries, entries.values())),
        )

    @property
    def digest(self) -> int:
        return _digest(b"directory", self.permissions.to_bytes(2, "big"), _digest_bytes(self.entries_digest))

    def with_entry(self, name: str, node: _Node | None, modified_at: datetime) -> _Directory:
        """Return a directory where `name` is `node`, or is not there if that is None."""
        entries = dict(self.entries)
        before = entries.pop(name, None)
        digest, size, count = self.entries_digest, self.total_bytes, self.total_entries
        if before is not None:
            digest -= _entry_digest(name, before)
            size -= _total_bytes(before)
            count -= _total_entries(before)
        if node is not None:
            entries[name] = node
            digest += _entry_digest(name, node)
            size += _total_bytes(node)
            count += _total_entries(node)
        return _Directory(
            entries=entries,
            permissions=self.permissions,
            # A directory is modified when its names change, not when what they stand for does.
            modified_at=self.modified_at if before is not None and node is not None else modified_at,
            entries_digest=digest % _DIGEST_MODULUS,
            total_bytes=size,
            total_entries=count,
        )

    def with_permissions(self, permissions: int) -> _Directory:
        return replace(self, permissions=permissions)


_Node = _File | _Link | _Directory


def _entry_digest(name: str, node: _Node) -> int:
    return _digest(encode(name), _digest_bytes(node.digest))


def _total_bytes(node: _Node) -> int:
    if isinstance(node, _Directory):
        return node.total_bytes
    return len(node.content) if isinstance(node, _File) else 0


def _total_entries(node: _Node) -> int:
    return 1 + (node.total_entries if isinstance(node, _Directory) else 0)


def _put(
    directory: _Directory, segments: Sequence[str], node: _Node | None, modified_at: datetime
) -> _Directory:
    """Return the tree where the path is `node`; directories that are missing on the way are made.

    Every directory on the way that exists must be one: the links are resolved.
    """
    name, *rest = segments
    if rest:
        child = directory.entries.get(name)
        if child is None:
            child = _Directory({}, _DIRECTORY_PERMISSIONS, modified_at)
        assert isinstance(child, _Directory)
        node = _put(child, rest, node, modified_at)
    return directory.with_entry(name, node, modified_at)


# --- the filesystem --------------------------------------------------------------------------------


class InMemoryFilesystem(VirtualTree):
    """A workspace that lives in this process, with O(1) snapshots.

    `files` are the first files, by path; text is stored as UTF-8. All operations may be used from
    several threads. Permission bits are kept and shown, and not enforced. What the files hold together
    is bounded by `max_total_bytes`, how many entries there are by `max_entries` (`OSError`, ENOSPC), and
    the snapshots held by `max_snapshots`: older ones are forgotten and can no longer be restored.
    `forked_from` is a filesystem and a snapshot of it to begin at, with its clock and limits.
    """

    def __init__(
        self,
        files: Mapping[str, str | bytes] | None = None,
        *,
        clock: WallClock | None = None,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        max_entries: int = MAX_ENTRIES,
        max_snapshots: int = MAX_SNAPSHOTS,
        forked_from: tuple[InMemoryFilesystem, FilesystemSnapshot] | None = None,
    ) -> None:
        super().__init__()
        if forked_from is not None:
            base, snapshot = forked_from
            clock, max_snapshots = base._clock, base._max_snapshots
            max_total_bytes, max_entries = base._max_total_bytes, base._max_entries
        for name, limit in (
            ("max_total_bytes", max_total_bytes),
            ("max_entries", max_entries),
            ("max_snapshots", max_snapshots),
        ):
            if limit < 1:
                raise UsageError(f"{name} is {limit}; it must be at least 1")
        self._clock: WallClock = clock if clock is not None else SystemClock()
        self._max_total_bytes: int = max_total_bytes
        self.max_stream_bytes = max_total_bytes
        self._max_entries: int = max_entries
        self._max_snapshots: int = max_snapshots
        self._held: OrderedDict[UUID, _Directory] = OrderedDict()
        self._call: _MemoryCall | None = None
        self._root = _Directory({}, _DIRECTORY_PERMISSIONS, self._clock.now())
        if files:
            self._set_root(_load(files, self._clock.now()), ROOT)
        if forked_from is not None:
            with base.lock:
                self._root = self._held[snapshot.snapshot_id] = base._held_root(snapshot)

    def __repr__(self) -> str:
        root = self._root
        return f"<InMemoryFilesystem: {root.total_entries} entries, {root.total_bytes} bytes>"

    @property
    def root(self) -> str:
        """The root as shown to people and tools: `/`."""
        return "/"

    @property
    def read_only(self) -> bool:
        """False; `read_only_view` returns a view that cannot change the tree."""
        return False

    @property
    def host_root(self) -> Path | None:
        """None: there is no directory on disk where a process could work."""
        return None

    @property
    def open_call(self) -> WorkspaceCall | None:
        """The call that holds the workspace."""
        return self._call

    # --- the steps of `VirtualTree` ---

    def _node(self, path: str) -> _Node | None:
        """Return what is at a path without links."""
        node: _Node | None = self._root
        for name in split(path):
            node = node.entries.get(name) if isinstance(node, _Directory) else None
        return node

    def status(self, path: str) -> FileStat | None:
        """Describe what is at a path without links; None if nothing is."""
        node = self._node(path)
        if node is None:
            return None
        return FileStat(
            path=path,
            is_file=isinstance(node, _File),
            is_directory=isinstance(node, _Directory),
            size_bytes=node.size_bytes,
            is_link=isinstance(node, _Link),
            link_target=node.target if isinstance(node, _Link) else None,
            permissions=_LINK_PERMISSIONS if isinstance(node, _Link) else node.permissions,
            modified_at=node.modified_at,
        )

    def entries(self, path: str) -> Mapping[str, FileEntry]:
        """Return what is in a directory, by name."""
        directory = self._node(path)
        assert isinstance(directory, _Directory)
        return {
            name: FileEntry(
                name=name,
                path=join(path, name),
                is_file=isinstance(node, _File),
                is_directory=isinstance(node, _Directory),
                is_link=isinstance(node, _Link),
            )
            for name, node in directory.entries.items()
        }

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        file = self._node(path)
        assert isinstance(file, _File)
        # A reader around the buffer, because the buffer alone would accept writes that go nowhere.
        return io.BufferedReader(io.BytesIO(file.content))

    def put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        """Write a file, with the directories that lead to it."""
        bits = _FILE_PERMISSIONS if permissions is None else permissions
        self._put_node(path, _File.make(content, bits, self._clock.now()))

    def put_directory(self, path: str) -> None:
        """Make a directory, with those that lead to it."""
        self._put_node(path, _Directory({}, _DIRECTORY_PERMISSIONS, self._clock.now()))

    def put_link(self, path: str, target: str) -> None:
        """Make a link, with the directories that lead to it."""
        self._put_node(path, _Link.make(target, self._clock.now()))

    def remove(self, path: str) -> None:
        """Remove what is at a path, with everything below it."""
        self._root = _put(self._root, split(path), None, self._clock.now())

    def rename(self, path: str, to: str) -> None:
        """Move what is at a path, with everything below it."""
        now = self._clock.now()
        without = _put(self._root, split(path), None, now)
        self._set_root(_put(without, split(to), self._node(path), now), to)

    def set_permissions(self, path: str, permissions: int) -> None:
        """Change the permission bits of a file or directory."""
        node = self._node(path)
        assert isinstance(node, _File | _Directory)
        changed = node.with_permissions(permissions)
        if path != ROOT:
            self._root = _put(self._root, split(path), changed, self._clock.now())
        else:
            assert isinstance(changed, _Directory)
            self._root = changed

    def _put_node(self, path: str, node: _Node) -> None:
        self._set_root(_put(self._root, split(path), node, self._clock.now()), path)

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted; the whole search sees the tree of this moment."""
        return super(InMemoryFilesystem, copy(self)).glob(pattern, path=path)

    def grep(
        self,
        pattern: str,
        *,
        path: str = ROOT,
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression; the whole search sees the tree of this moment."""
        return super(InMemoryFilesystem, copy(self)).grep(
            pattern, path=path, glob=glob, max_matches=max_matches
        )

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        return ReadOnlyFilesystem(self)

    # --- boundaries ---

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary, in O(1). It always covers the whole tree, with `scan` or without."""
        with self.lock:
            return self._hold(self._root, tag)

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary. The swap is O(1); the report costs as much as differs.

        Raises `SnapshotMismatchError` if this filesystem does not hold the snapshot.
        """
        with self.lock:
            root = self._held_root(snapshot)
            before, self._root = self._root, root
        return RestoreReport(restored=tuple(sorted(path for path, _, _ in _differences(before, root))))

    def portable(self, snapshot: FilesystemSnapshot) -> FilesystemSnapshot:
        """Return a snapshot with the tree in it, which a filesystem in another process can restore.

        Raises `UsageError` if the files hold more than `MAX_PORTABLE_BYTES`.
        """
        with self.lock:
            root = self._held.get(snapshot.snapshot_id)
        if root is None:
            return snapshot
        if root.total_bytes > MAX_PORTABLE_BYTES:
            raise UsageError(
                f"the files in memory hold {root.total_bytes} bytes, and a snapshot carries at most "
                f"{MAX_PORTABLE_BYTES} into another process; use a HostFilesystem, which keeps them on disk"
            )
        return replace(snapshot, content=_packed(root))

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        with self.lock:
            old = self._held_root(before)
            new = self._root if after is None else self._held_root(after)
        return describe(_differences(old, new))

    def fork(self, snapshot: FilesystemSnapshot) -> InMemoryFilesystem:
        """Return a filesystem of its own that begins at a boundary of this one.

        They share what neither has changed. The fork holds the snapshot, so it can go back to it and
        show what it has changed since.
        """
        return InMemoryFilesystem(forked_from=(self, snapshot))

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call.

        `foreign` makes no difference: no other process can reach the tree. Raises `WorkspaceError`
        while another call holds it.
        """
        if not call_id:
            raise UsageError("a call needs an id; pass the tool call's own")
        with self.lock:
            if self._call is not None:
                raise WorkspaceError(
                    f"the call {self._call.call_id!r} holds the workspace, so {call_id!r} cannot begin; "
                    f"finish it or roll it back first"
                )
            self._call = _MemoryCall(self, call_id, self._hold(self._root, tool_name or None), self._root)
            return self._call

    def unfinished(self) -> Sequence[str]:
        """List the call that is open in this object, if any. A new object has none."""
        call = self._call
        return [] if call is None else [call.call_id]

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End an open call, the way the log says it ended."""
        with self.lock:
            call = self._call
            if call is None or call.call_id != call_id:
                raise WorkspaceError(
                    f"there is no open call {call_id!r} to recover; unfinished() lists those that are"
                )
            if committed:
                call.finish()
                return RestoreReport()
            return call.rollback()

    # --- inside ---

    def _set_root(self, root: _Directory, path: str) -> None:
        if root.total_bytes > max(self._max_total_bytes, self._root.total_bytes):
            fail(
                errno.ENOSPC,
                f"the workspace would hold {root.total_bytes} bytes; at most {self._max_total_bytes} fit",
                path,
            )
        if root.total_entries > max(self._max_entries, self._root.total_entries):
            fail(
                errno.ENOSPC,
                f"the workspace would have {root.total_entries} entries; at most {self._max_entries} fit",
                path,
            )
        self._root = root

    def _hold(self, root: _Directory, tag: str | None) -> FilesystemSnapshot:
        snapshot = FilesystemSnapshot(
            snapshot_id=new_id(),
            created_at=self._clock.now(),
            commit_ref=_digest_bytes(root.digest).hex(),
            root_path=self.root,
            tag=tag,
            scanned=True,
        )
        self._keep(snapshot, root)
        return snapshot

    def _keep(self, snapshot: FilesystemSnapshot, root: _Directory) -> None:
        """Hold a snapshot's tree as the newest one."""
        self._held[snapshot.snapshot_id] = root
        self._held.move_to_end(snapshot.snapshot_id)
        if len(self._held) > self._max_snapshots:
            self._held.popitem(last=False)

    def _held_root(self, snapshot: FilesystemSnapshot) -> _Directory:
        root = self._held.get(snapshot.snapshot_id)
        if root is None and snapshot.content:
            root = _unpacked(snapshot)
            self._keep(snapshot, root)
        if root is None:
            raise SnapshotMismatchError(
                f"this in-memory filesystem does not hold the snapshot {snapshot.snapshot_id} "
                f"({snapshot.root_path}, {snapshot.created_at.isoformat()}): it was taken by another "
                f"filesystem or in an earlier process, or is older than the last {self._max_snapshots}; "
                f"nothing was changed"
            )
        return root


class _MemoryCall:
    """One tool call's hold on the tree. The tree before it is kept until the call ends."""

    __slots__ = ("_base", "_call_id", "_filesystem", "_finished", "_root")

    def __init__(
        self, filesystem: InMemoryFilesystem, call_id: str, base: FilesystemSnapshot, root: _Directory
    ) -> None:
        self._filesystem = filesystem
        self._call_id = call_id
        self._base = base
        self._root = root
        self._finished = False

    @property
    def call_id(self) -> str:
        """The tool call that holds the workspace."""
        return self._call_id

    @property
    def base(self) -> FilesystemSnapshot:
        """The boundary before the call."""
        return self._base

    def prepare(self) -> FilesystemSnapshot:
        """Take the boundary after the call; the call can still be rolled back."""
        with self._filesystem.lock:
            self._require_open("prepared")
            if self._filesystem._root is self._root:
                # Nothing was touched: the boundary after the call is the one before it.
                self._filesystem._keep(self._base, self._root)
                return self._base
            return self._filesystem._hold(self._filesystem._root, self._base.tag)

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        with self._filesystem.lock:
            if self._finished:
                return
            self._require_open("finished")
            self._finished = True
            self._filesystem._call = None

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        with self._filesystem.lock:
            if self._filesystem._call is not self:
                if self._finished:
                    raise WorkspaceError(
                        f"the call {self._call_id!r} is finished and cannot be rolled back; "
                        f"restore its base snapshot instead"
                    )
                return RestoreReport()
            self._filesystem._call = None
            before, self._filesystem._root = self._filesystem._root, self._root
        paths = (path for path, _, _ in _differences(before, self._root))
        return RestoreReport(restored=tuple(sorted(paths)))

    def _require_open(self, verb: str) -> None:
        if self._filesystem._call is not self:
            raise WorkspaceError(f"the call {self._call_id!r} has ended and cannot be {verb}")


def _load(files: Mapping[str, str | bytes], now: datetime) -> _Directory:
    """Build a tree in one pass, without copying a directory for each file in it."""
    tree: dict[str, object] = {}
    for given, content in files.items():
        path = normalize(given)
        segments = split(path)
        if not segments:
            raise ValueError(f"the path {given!r} is the workspace root, which cannot be a file")
        directory = tree
        for segment in segments[:-1]:
            child = directory.setdefault(segment, {})
            if not isinstance(child, dict):
                fail(errno.ENOTDIR, f"{segment!r} is a file in the same set of files", path)
            directory = child
        if segments[-1] in directory:
            fail(errno.EEXIST, "the set of files names this path twice", path)
        data = content.encode("utf-8") if isinstance(content, str) else bytes(content)
        directory[segments[-1]] = _File.make(data, _FILE_PERMISSIONS, now)
    return _freeze(tree, now)


def _freeze(tree: dict[str, object], now: datetime) -> _Directory:
    entries: dict[str, _Node] = {}
    for name, child in tree.items():
        if isinstance(child, dict):
            entries[name] = _freeze(child, now)
        else:
            assert isinstance(child, _File)
            entries[name] = child
    return _Directory.make(entries, _DIRECTORY_PERMISSIONS, now)


def _packed(root: _Directory) -> str:
    """Write a tree as text, compressed JSON in base 64: each path with its kind, bits, time, and content."""
    nodes: list[tuple[str, str, int, str, str]] = []
    pending: list[tuple[str, _Node]] = [(ROOT, root)]
    while pending:
        path, node = pending.pop()
        when = node.modified_at.isoformat()
        if isinstance(node, _Directory):
            nodes.append((path, "directory", node.permissions, when, ""))
            pending.extend((join(path, name), child) for name, child in node.entries.items())
        elif isinstance(node, _Link):
            nodes.append((path, "link", 0, when, node.target))
        else:
            nodes.append((path, "file", node.permissions, when, base64.b64encode(node.content).decode()))
    text = json.dumps(nodes, separators=(",", ":")).encode("ascii")
    return base64.b64encode(zlib.compress(text)).decode("ascii")


def _unpacked(snapshot: FilesystemSnapshot) -> _Directory:
    """Read what `_packed` wrote. Raises `SnapshotMismatchError` if it is not the snapshot's tree."""
    below: dict[str, dict[str, _Node]] = {}
    node: _Node | None = None
    try:
        packed = base64.b64decode(snapshot.content)
        text = zlib.decompressobj().decompress(packed, _MAX_PACKED_BYTES)
        # A directory comes before what is in it, so backwards it comes when all of that is there.
        for path, kind, permissions, when, held in reversed(json.loads(text)):
            at = datetime.fromisoformat(when)
            if kind == "directory":
                node = _Directory.make(below.pop(path, {}), permissions, at)
            elif kind == "link":
                node = _Link.make(held, at)
            else:
                node = _File.make(base64.b64decode(held), permissions, at)
            if path == ROOT:
                break
            above, _, name = normalize(path).rpartition("/")
            below.setdefault(above or ROOT, {})[name] = node
    except (zlib.error, OSError, ValueError, TypeError) as error:
        raise SnapshotMismatchError(
            f"the content of the snapshot {snapshot.snapshot_id} cannot be read: {error}; nothing was changed"
        ) from error
    if not isinstance(node, _Directory) or _digest_bytes(node.digest).hex() != snapshot.commit_ref:
        raise SnapshotMismatchError(
            f"the content of the snapshot {snapshot.snapshot_id} is damaged; nothing was changed"
        )
    return node


def _differences(
    before: _Directory, after: _Directory
) -> Iterator[tuple[str, Version | None, Version | None]]:
    """Walk two trees side by side, going down only where they differ."""
    if before.permissions != after.permissions:
        yield ROOT, _version(before), _version(after)
    pending: list[tuple[str, _Node | None, _Node | None]] = [(ROOT, before, after)]
    while pending:
        path, old, new = pending.pop()
        if old is new or (old is not None and new is not None and old.digest == new.digest):
            continue
        if path != ROOT:
            old_version, new_version = _version(old), _version(new)
            if old_version != new_version:
                yield path, old_version, new_version
        old_entries = old.entries if isinstance(old, _Directory) else {}
        new_entries = new.entries if isinstance(new, _Directory) else {}
        for name in old_entries.keys() | new_entries.keys():
            pending.append((join(path, name), old_entries.get(name), new_entries.get(name)))


def _version(node: _Node | None) -> Version | None:
    if node is None:
        return None
    if isinstance(node, _Directory):
        return Version(kind="directory", permissions=node.permissions)
    if isinstance(node, _Link):
        target = encode(node.target)
        return Version("link", _LINK_PERMISSIONS, len(target), target)
    return Version("file", node.permissions, len(node.content), node.content)

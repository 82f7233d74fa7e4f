"""What is known about a directory tree: the state of a path, and the manifest of a whole tree.

A *manifest* has, for every path of a tree, its type, permission bits, owner, size, times, inode and the
id of its content. A scan (`scan.py`) compares it with what is on disk.
"""

from __future__ import annotations

import marshal
import stat
from collections.abc import Mapping
from typing import Literal, NamedTuple

from treenail.workspace.disk import decode_records, encode_record, read_file, replace_file

StateKind = Literal["absent", "file", "directory", "link", "other"]

ANY = -1
"""Stands for a mode or an owner that is not known, and agrees with every other."""

TEMPORARY_PREFIX = ".treenail-"
TEMPORARY_SUFFIX = ".tmp"

_TYPE_MASK = 0o170000
_MARSHAL_VERSION = 4
_MAGIC = b"treenail manifest 2\n"


class State(NamedTuple):
    """What is at a path. `other` is something that is not kept: a special file, or one over budget."""

    kind: StateKind
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


class PathChange(NamedTuple):
    """A path whose state is not what it was."""

    path: str
    before: State
    after: State


Entry = tuple[int, int, int, int, int, int, int, bytes]
"""A path in a manifest: st_mode, inode, size, mtime_ns, ctime_ns, uid, gid, blob id.

A plain tuple, because a manifest has tens of thousands of them. A ctime of 0 means: read it again.
"""


def temporary_owner(name: str) -> str | None:
    """Return whose temporary file a name may be; None if it cannot be one.

    Only an owner that is known makes it one: everybody may give such a name to a file of their own.
    """
    if not (name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)):
        return None
    return name[len(TEMPORARY_PREFIX) : -len(TEMPORARY_SUFFIX)].rpartition("-")[0]


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


def is_same_thing(one: State, other: State) -> bool:
    """Say whether two states are the same as far as can be told: of a special file nothing is kept."""
    return same(one, other) or one.kind == other.kind == "other"


def state_of(entry: Entry | None) -> State:
    """Return the state that a manifest's entry stands for."""
    if entry is None:
        return ABSENT
    mode, _, size, mtime_ns, _, uid, gid, oid = entry
    permissions = mode & 0o7777
    kind = mode & _TYPE_MASK
    if kind == stat.S_IFDIR:
        return State("directory", permissions, b"", 0, 0, uid, gid)
    if kind == stat.S_IFREG:
        return State("file", permissions, oid, size, mtime_ns, uid, gid)
    if kind == stat.S_IFLNK:
        return State("link", 0o777, oid, size, mtime_ns, uid, gid)
    return OTHER


def entry_of(state: State) -> Entry | None:
    """Return a manifest entry for a state; it has no stat tuple, so the next scan reads the path."""
    kinds = {"directory": stat.S_IFDIR, "file": stat.S_IFREG, "link": stat.S_IFLNK}
    kind = kinds.get(state.kind)
    if kind is None:
        return None
    mode = kind | (state.mode if state.mode != ANY else 0)
    return (mode, 0, state.size, state.mtime_ns, 0, state.uid, state.gid, state.oid)


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
        self.unsaved = False
        """Whether it differs from what was last loaded or saved."""

    def copy(self) -> Manifest:
        """Return a manifest that can be changed on its own; entries are shared, because none ever changes."""
        other = Manifest()
        other.directories = dict(self.directories)
        other.uncovered = self.uncovered
        other.position = self.position
        other.root_mode = self.root_mode
        other.baseline_missing = self.baseline_missing
        other.unsaved = self.unsaved
        return other

    def get(self, path: str) -> Entry | None:
        """Return what is known about a path."""
        directory, _, name = path.rpartition("/")
        entries = self.directories.get(directory)
        return None if entries is None else entries.get(name)

    def is_at(self, path: str, inode: int) -> bool:
        """Say whether an inode is the one that a path is known to have."""
        entry = self.get(path)
        return entry is not None and entry[1] == inode

    def learn(self, path: str, state: State) -> None:
        """Take a state in that was not seen by a scan."""
        self.unsaved = True
        directory, _, name = path.rpartition("/")
        entry = entry_of(state)
        # Copies of a manifest share these dictionaries, so they are replaced and not changed.
        entries = dict(self.directories.get(directory, {}))
        self.directories[directory] = entries
        if entry is None:
            entries.pop(name, None)
            self._forget_below(path)
        else:
            entries[name] = entry
            if state.kind == "directory":
                self.directories.setdefault(path, {})
            else:
                self._forget_below(path)

    def distrust(self, path: str) -> None:
        """Have the next scan look at a path whatever its stat tuple says."""
        entry = self.get(path)
        if entry is None:
            return
        directory, _, name = path.rpartition("/")
        mode, _, size, mtime_ns, _, uid, gid, oid = entry
        if mode & _TYPE_MASK != stat.S_IFDIR:
            entries = dict(self.directories[directory])
            entries[name] = (mode, 0, size, mtime_ns, 0, uid, gid, oid)
            self.directories[directory] = entries
            self.unsaved = True

    def _forget_below(self, path: str) -> None:
        if path in self.directories:
            prefix = path + "/"
            for known in [key for key in self.directories if key == path or key.startswith(prefix)]:
                del self.directories[known]

    def apply(self, updates: Mapping[str, dict[str, Entry] | None], uncovered: dict[str, str]) -> None:
        """Make a scan's findings the present knowledge."""
        self.unsaved = self.unsaved or bool(updates) or uncovered != self.uncovered
        for path, entries in updates.items():
            if entries is None:
                self.directories.pop(path, None)
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


def load_manifest(path: str) -> Manifest | None:
    """Read a manifest, or None if there is none that can be read: then the tree is scanned anew."""
    data = read_file(path)
    if data is None or not data.startswith(_MAGIC):
        return None
    for _, payload in decode_records(data, len(_MAGIC)):
        manifest = Manifest()
        manifest.position, manifest.root_mode, manifest.uncovered, manifest.directories = marshal.loads(
            payload
        )
        return manifest
    return None


def save_manifest(path: str, manifest: Manifest, *, durable: bool) -> None:
    """Keep a manifest on disk."""
    fields = (manifest.position, manifest.root_mode, manifest.uncovered, manifest.directories)
    content = _MAGIC + encode_record(marshal.dumps(fields, _MARSHAL_VERSION))
    replace_file(path, content, durable=durable, mode=0o600)
    manifest.unsaved = False

"""What becomes of the files of a run that travels: a patch, or a branch of a git repository.

Git is not run, and neither its index nor a work tree is touched: objects and one ref are written.
"""

from __future__ import annotations

import base64
import difflib
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from treenail.errors import UsageError
from treenail.workspace.base import FilesystemSnapshot
from treenail.workspace.diffs import is_binary
from treenail.workspace.disk import write_new_file
from treenail.workspace.manifest import State
from treenail.workspace.objects import MODE_TREE, ObjectStore, TreeEntry, encode_commit, encode_tree
from treenail.workspace.packs import ObjectKind, hash_object, write_pack
from treenail.workspace.travel.depot import Depot
from treenail.workspace.travel.origins import WorkspaceOrigin
from treenail.workspace.travel.records import read_line, tree_of

_NO_OBJECT = "0" * 40
_PACK_BYTES = 64 * 1024 * 1024
_BRANCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_OWN_NAME = re.compile(r"\.git[ .]*(:.*)?|git~\d+", re.IGNORECASE | re.DOTALL)
"""Names that git refuses in a tree on one system or another: they would be taken for a repository."""


def make_patch(depot: Depot, first: FilesystemSnapshot, last: FilesystemSnapshot) -> bytes:
    """Return the difference of two boundaries as a patch that `git apply` takes; it has no directories."""
    with tempfile.TemporaryDirectory(prefix="treenail-patch-") as name:
        objects = ObjectStore(name, depot=depot)
        objects.create()
        before, after = (
            tree_of(entry for _, entry in read_line(bytes.fromhex(each.record), objects.read_blobs))
            for each in (first, last)
        )
        changed = [
            path
            for path in sorted({*before, *after})
            if _kind(before.get(path)) != _kind(after.get(path)) or _oid(before, path) != _oid(after, path)
        ]
        objects.fetch(oid for path in changed for oid in (_oid(before, path), _oid(after, path)) if oid)
        parts: list[bytes] = []
        for path in changed:
            old, new = _file(before.get(path)), _file(after.get(path))
            if old is not None and new is not None and old.kind != new.kind:
                parts += (*_change(objects, path, old, None), *_change(objects, path, None, new))
            elif old is not None or new is not None:
                parts += _change(objects, path, old, new)
        return b"".join(parts)


def _file(state: State | None) -> State | None:
    return state if state is not None and state.kind in ("file", "link") else None


def _kind(state: State | None) -> str:
    """Return the mode that git has for a state; empty for what it does not keep."""
    if state is None or state.kind not in ("file", "link"):
        return ""
    if state.kind == "link":
        return "120000"
    return "100755" if state.mode & stat.S_IXUSR else "100644"


def _oid(tree: Mapping[str, State], path: str) -> bytes:
    found = _file(tree.get(path))
    return b"" if found is None else found.oid


def _change(objects: ObjectStore, path: str, old: State | None, new: State | None) -> Iterator[bytes]:
    one, two = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    yield b"diff --git %b %b\n" % (one, two)
    modes = _kind(old), _kind(new)
    if old is None:
        yield f"new file mode {modes[1]}\n".encode()
    elif new is None:
        yield f"deleted file mode {modes[0]}\n".encode()
    elif modes[0] != modes[1]:
        yield f"old mode {modes[0]}\nnew mode {modes[1]}\n".encode()
    ids = [each.oid.hex() if each is not None else _NO_OBJECT for each in (old, new)]
    if ids[0] == ids[1]:
        return
    yield f"index {ids[0]}..{ids[1]}{f' {modes[0]}' if modes[0] == modes[1] else ''}\n".encode()
    contents = [b"" if each is None else objects.read_blob(each.oid) for each in (old, new)]
    if any(map(is_binary, contents)):
        yield b"GIT binary patch\n"
        yield from _literal(contents[1])
        yield from _literal(contents[0])
        return
    lines = [_lines(each) for each in contents]
    found = difflib.diff_bytes(difflib.unified_diff, lines[0], lines[1], b"", b"", lineterm=b"\n")
    for number, line in enumerate(found):
        if number == 0:
            yield b"--- %b\n" % (one if old is not None else b"/dev/null")
        elif number == 1:
            yield b"+++ %b\n" % (two if new is not None else b"/dev/null")
        else:
            yield line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _lines(content: bytes) -> list[bytes]:
    """Split at line feeds alone, as git does."""
    parts = content.split(b"\n")
    return [each + b"\n" for each in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _literal(content: bytes) -> Iterator[bytes]:
    yield b"literal %d\n" % len(content)
    packed = zlib.compress(content)
    for start in range(0, len(packed), 52):
        some = packed[start : start + 52]
        length = chr(ord("A") + len(some) - 1 if len(some) <= 26 else ord("a") + len(some) - 27)
        yield length.encode() + base64.b85encode(some, pad=True) + b"\n"
    yield b"\n"


def _quoted(path: str) -> bytes:
    raw = os.fsencode(path)
    if all(0x20 <= each < 0x7F and each not in b'"\\' for each in raw):
        return raw
    named = {0x22: b'\\"', 0x5C: b"\\\\", 0x0A: b"\\n", 0x09: b"\\t"}
    shown = (named.get(each) or (bytes((each,)) if 0x20 <= each < 0x7F else b"\\%03o" % each) for each in raw)
    return b'"' + b"".join(shown) + b'"'


# --- a branch --------------------------------------------------------------------------------------------


def make_branch(
    depot: Depot, origin: WorkspaceOrigin, newest: FilesystemSnapshot, repository: Path, branch: str
) -> str:
    """Write a workspace's history into a git repository, as a new branch; return its last commit.

    A boundary is a commit. The first one follows the commit that the run began with, if it did. Empty
    directories are left out, as git does, and so is what git would take for a repository of its own.
    """
    common = _git_directory(repository)
    ref = _new_ref(common, branch)
    if origin.commit and not ObjectStore(common).contains(bytes.fromhex(origin.commit)):
        raise UsageError(
            f"{repository} does not have the commit {origin.commit} that the run began with; "
            f"fetch it there first"
        )
    with tempfile.TemporaryDirectory(prefix="treenail-branch-") as name:
        objects = ObjectStore(name, depot=depot)
        objects.create()
        writing = _Branch(objects, common)
        tip, tree = b"", b""
        first = bytes.fromhex(origin.snapshot.commit_ref)
        if origin.commit:
            tip, tree = bytes.fromhex(origin.commit), writing.clean(objects.commit_tree(first))
        for commit in _commits(objects, bytes.fromhex(newest.commit_ref)):
            cleaned = writing.clean(objects.commit_tree(commit))
            if cleaned == tree and tip:
                continue
            data = objects.read(commit)[1]
            message = data.partition(b"\n\n")[2].decode("utf-8", "replace").rstrip("\n")
            parents = (tip,) if tip else ()
            timestamp = int(data.partition(b"\ncommitter ")[2].split(b"\n")[0].split()[-2])
            tip, tree = writing.commit(cleaned, parents, message, timestamp), cleaned
        writing.flush()
    ref.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_new_file(f"{ref}.lock", tip.hex().encode() + b"\n", durable=True, mode=0o644)
        os.link(f"{ref}.lock", ref)
    except FileExistsError:
        raise UsageError(f"the branch {branch} of {repository} is there already; name another one") from None
    finally:
        Path(f"{ref}.lock").unlink(missing_ok=True)
    return tip.hex()


def _git_directory(repository: Path) -> Path:
    """Return the directory that has a repository's objects and branches."""
    place = repository / ".git"
    if place.is_file():
        place = repository / place.read_text().removeprefix("gitdir:").strip()
    elif not place.is_dir():
        place = repository
    if not (place / "HEAD").exists():
        raise UsageError(f"{repository} is not a git repository; name one, or make it with `git init`")
    shared = place / "commondir"
    common = (place / shared.read_text().strip()).resolve() if shared.exists() else place
    config = (common / "config").read_text() if (common / "config").exists() else ""
    if re.search(r"^\s*(objectformat\s*=\s*sha256|refstorage\s*=\s*reftable)", config, re.I | re.M):
        raise UsageError(
            f"{repository} keeps objects or refs in a form that is not written here; use a patch"
        )
    return common


def _new_ref(common: Path, branch: str) -> Path:
    if (
        not _BRANCH.fullmatch(branch)
        or ".." in branch
        or branch.endswith((".", ".lock"))
        or ".lock/" in branch
    ):
        raise UsageError(f"{branch!r} cannot be the name of a branch; use letters, digits, '-', '_' and '/'")
    ref, packed = common / "refs" / "heads" / branch, common / "packed-refs"
    taken = packed.read_text("utf-8", "replace") if packed.exists() else ""
    if ref.exists() or re.search(rf" refs/heads/{re.escape(branch)}$", taken, re.MULTILINE):
        raise UsageError(f"the branch {branch} of {common} is there already; name another one")
    return ref


def _commits(objects: ObjectStore, newest: bytes) -> list[bytes]:
    """Return the commits of a line, oldest first."""
    found = [newest]
    while parents := objects.parents(found[-1]):
        found.append(parents[0])
    return found[::-1]


class _Branch:
    """Objects on their way into somebody's repository."""

    def __init__(self, objects: ObjectStore, common: Path) -> None:
        self._objects = objects
        self._packs = os.fspath(common / "objects" / "pack")
        self._batch: dict[bytes, tuple[ObjectKind, bytes]] = {}
        self._bytes = 0
        self._cleaned: dict[bytes, bytes] = {}
        self._written: set[bytes] = set()

    def clean(self, tree: bytes) -> bytes:
        """Write a tree as git would have it, with everything below; return its id."""
        if tree not in self._cleaned:
            entries: dict[bytes, TreeEntry] = {}
            contents: list[bytes] = []
            for name, (mode, oid) in self._objects.read_tree(tree).items():
                if _OWN_NAME.fullmatch(os.fsdecode(name)):
                    continue
                if mode != MODE_TREE:
                    entries[name] = TreeEntry(mode, oid)
                    contents.append(oid)
                elif below := self.clean(oid):
                    entries[name] = TreeEntry(mode, below)
            self._objects.fetch(each for each in contents if each not in self._written)
            for oid in contents:
                if oid not in self._written:
                    self._add("blob", self._objects.read_blob(oid))
            self._cleaned[tree] = self._add("tree", encode_tree(entries)) if entries else b""
        return self._cleaned[tree]

    def commit(self, tree: bytes, parents: tuple[bytes, ...], message: str, timestamp: int) -> bytes:
        """Write a commit; return its id."""
        tree = tree or self._add("tree", b"")
        return self._add("commit", encode_commit(tree, parents, message, timestamp=timestamp))

    def _add(self, kind: ObjectKind, data: bytes) -> bytes:
        oid = hash_object(kind, data)
        if oid not in self._written:
            self._written.add(oid)
            self._batch[oid] = (kind, data)
            self._bytes += len(data)
            if self._bytes > _PACK_BYTES:
                self.flush()
        return oid

    def flush(self) -> None:
        """Write what has come together as a pack."""
        if self._batch:
            os.makedirs(self._packs, exist_ok=True)
            write_pack(self._packs, self._batch, durable=True, compress=True)
        self._batch, self._bytes = {}, 0

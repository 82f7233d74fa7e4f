"""A private git object store, written and read without running git.

Theory of operation
-------------------
The store is a bare git repository that people can look at (`git --git-dir=... log -p`), but nothing
here runs git: objects are files whose format is simple, and writing them ourselves is
faster than starting a process, needs no index, and makes each step visible to the crash tests.

- Small objects are *staged*: held in memory until `flush` puts all of them on disk. A store with a *spool*
  (`spool.py`) appends them to that one file, and `pack` makes a git pack of it now and then; git sees what is
  in packs. Without a spool, or if there is much of it, each flush writes a pack.
- Large content (`LARGE_BYTES` and more) is a *loose* object, a file named by its id, streamed and stored.
- When many small packs have come together they are merged into one, with its content compressed. In a
  fresh pack, content is stored as it is: compressing thousands of small files costs more than reading them.

Git is never run. Somebody may run `git gc` here: the store's configuration keeps git from writing what only
git can read (deltas, packed refs).

Object ids are 20 raw bytes here. Content that is read back is checked against the id that it was asked by.

The store of a checkout (`treenail.workspace.travel`) has a part of the objects; it gets the others from a
depot when they are needed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from treenail.errors import ObjectStoreError
from treenail.workspace.disk import (
    make_directory,
    read_file,
    replace_file,
    sync_directory,
    unlink_if_there,
    write_all,
)
from treenail.workspace.packs import CHUNK_BYTES, ObjectKind, Pack, hash_object, write_pack
from treenail.workspace.spool import Spool
from treenail.workspace.travel.depot import (
    Depot,
    damaged,
    pieces_of,
    read_object,
    read_pieces,
    unpacked,
)

LARGE_BYTES = 1024 * 1024
"""Content of this size and more is streamed and never held in memory whole."""

MODE_FILE = 0o100644
MODE_EXECUTABLE = 0o100755
MODE_LINK = 0o120000
MODE_TREE = 0o040000
_MODE_SUBMODULE = 0o160000

MAX_STAGED_BYTES = 64 * 1024 * 1024
"""When more than this is staged, it is written without waiting for `flush`."""

MAX_SPOOLED_BYTES = 4 * 1024 * 1024
"""The spool is also in memory; beyond this size it is made a pack."""

MAX_SMALL_PACKS = 48
"""When there are this many small packs, they are merged."""

_SMALL_PACK_OBJECTS = 1_000
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tbare = true
[gc]
\tauto = 0
\tpackRefs = false
\twriteCommitGraph = false
\taggressiveWindow = 0
[pack]
\twindow = 0
"""
"""Git never collects garbage here by itself, and what it writes when asked to can be read without git."""
_MAX_CACHED_TREES = 512


class TreeEntry(NamedTuple):
    """One name in a tree: git's mode and the id of the blob or tree."""

    mode: int
    oid: bytes


EMPTY_TREE = hash_object("tree", b"")


def hash_descriptor(descriptor: int, size: int) -> bytes | None:
    """Return the blob id of an open file, or None if it did not hold `size` bytes to its end."""
    sha = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in _chunks(descriptor, size):
        if chunk is None:
            return None
        sha.update(chunk)
    return sha.digest()


def _chunks(descriptor: int, size: int) -> Iterator[bytes | None]:
    """Yield the content of an open file in parts; None, at the end, if it did not hold just `size` bytes."""
    left = size
    while left:
        chunk = os.read(descriptor, min(left, CHUNK_BYTES))
        if not chunk:
            yield None
            return
        left -= len(chunk)
        yield chunk
    if os.read(descriptor, 1):
        yield None


def encode_tree(entries: Mapping[bytes, TreeEntry]) -> bytes:
    """Return the content of a tree object; git sorts a directory as if its name ended in a slash."""
    lines = [
        (name + b"/" if mode == MODE_TREE else name, b"%o %b\0%b" % (mode, name, oid))
        for name, (mode, oid) in entries.items()
    ]
    lines.sort()
    return b"".join([line for _, line in lines])


def decode_tree(data: bytes) -> dict[bytes, TreeEntry]:
    """Return the names of a tree object's content."""
    entries: dict[bytes, TreeEntry] = {}
    position = 0
    while position < len(data):
        space = data.index(b" ", position)
        end = data.index(b"\0", space)
        entries[data[space + 1 : end]] = TreeEntry(int(data[position:space], 8), data[end + 1 : end + 21])
        position = end + 21
    return entries


def encode_commit(tree: bytes, parents: Iterable[bytes], message: str, *, timestamp: int) -> bytes:
    """Return the content of a commit object."""
    lines = [b"tree " + tree.hex().encode()]
    lines += [b"parent " + parent.hex().encode() for parent in parents]
    who = b"Treenail <treenail@localhost> %d +0000" % timestamp
    lines += [b"author " + who, b"committer " + who, b"", message.encode("utf-8", "backslashreplace")]
    return b"\n".join(lines) + b"\n"


class ObjectStore:
    """Git objects and refs below one directory.

    `durable` makes every flushed object survive a power cut; without it, objects survive the end of the
    process, however sudden. `spool` is the file that collects what is flushed until `pack`; it belongs to
    one writer. `depot` has what is missing here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durable: bool = False,
        spool: str | None = None,
        depot: Depot | None = None,
    ) -> None:
        self.path = Path(path)
        self.durable = durable
        self._depot = depot
        self._spool = None if spool is None else Spool(spool, durable=durable)
        self._objects = os.path.join(self.path, "objects")
        self._pack_directory = os.path.join(self._objects, "pack")
        self._packs: dict[str, Pack] = {}
        self._trees: dict[bytes, dict[bytes, TreeEntry]] = {}
        self._staged: dict[bytes, tuple[ObjectKind, bytes]] = {}
        self._staged_bytes = 0

    # --- the repository and its refs ---------------------------------------------------------------

    def create(self, *, head: str = "main") -> None:
        """Make the directory a bare repository, unless it is one. Safe to repeat after a crash."""
        if self.exists:
            self._list_packs()
            return
        path = os.fspath(self.path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        for part in ("objects", "objects/pack", "refs"):
            make_directory(f"{path}/{part}")
        # HEAD comes last: a directory with HEAD is complete.
        for name, content in (("config", _CONFIG), ("HEAD", f"ref: refs/heads/{head}\n")):
            replace_file(f"{path}/{name}", content.encode(), durable=self.durable, mode=0o600)

    @property
    def exists(self) -> bool:
        """Whether `create` has been completed here."""
        return os.path.exists(os.path.join(self.path, "HEAD"))

    def read_ref(self, name: str) -> str | None:
        """Return the commit (as text) that a ref such as `refs/heads/main` stands for."""
        raw = read_file(os.path.join(self.path, name))
        return None if raw is None else raw.decode("ascii").strip()

    def write_ref(self, name: str, commit: str) -> None:
        """Let a ref stand for a commit."""
        target = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        replace_file(target, commit.encode() + b"\n", durable=self.durable, mode=0o600)

    def delete_ref(self, name: str) -> None:
        """Forget a ref; one that does not exist is fine."""
        unlink_if_there(os.path.join(self.path, name))

    def refs(self) -> dict[str, str]:
        """Return every ref and its commit."""
        return {
            path.relative_to(self.path).as_posix(): path.read_text("ascii").strip()
            for path in (self.path / "refs").rglob("*")
            if path.is_file() and not path.name.startswith("tmp_")
        }

    def forget(self) -> None:
        """Drop what was remembered about the store's content, because somebody else has changed it."""
        if self._spool is not None:
            self._spool.forget()
        self._trees.clear()
        self._packs.clear()

    # --- writing -----------------------------------------------------------------------------------

    def write(self, kind: ObjectKind, data: bytes) -> bytes:
        """Take an object in and return its id. It is on disk after the next `flush`."""
        oid = hash_object(kind, data)
        if self._pending(oid) is None and self._find_in_packs(oid) is None:
            self._staged[oid] = (kind, data)
            self._staged_bytes += len(data)
            if self._staged_bytes > MAX_STAGED_BYTES:
                self.flush()
        return oid

    def write_descriptor(self, descriptor: int, size: int) -> bytes | None:
        """Store an open file's content as a blob, streaming it.

        Returns None, and stores nothing, if the file did not hold `size` bytes to its end: somebody
        is writing to it.
        """
        if size < LARGE_BYTES:
            data = read_exactly(descriptor, size)
            return None if data is None else self.write("blob", data)
        return self._write_loose("blob", size, _chunks(descriptor, size))

    def write_stream(self, size: int, chunks: Iterable[bytes | None]) -> bytes | None:
        """Store a blob from its parts; return None, and store nothing, if None is among them."""
        if size >= LARGE_BYTES:
            return self._write_loose("blob", size, chunks)
        parts = list(chunks)
        return None if None in parts else self.write("blob", b"".join(each for each in parts if each))

    def _write_loose(self, kind: ObjectKind, size: int, chunks: Iterable[bytes | None]) -> bytes | None:
        """Store a large object from its parts; None in place of one says that there is no whole."""
        temporary = os.path.join(self._objects, f"tmp_obj_{secrets.token_hex(8)}")
        header = b"%b %d\0" % (kind.encode(), size)
        sha = hashlib.sha1(header, usedforsecurity=False)
        packer = zlib.compressobj(0)
        output = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        is_complete = True
        try:
            write_all(output, packer.compress(header))
            for chunk in chunks:
                if chunk is None:
                    is_complete = False
                    break
                sha.update(chunk)
                write_all(output, packer.compress(chunk))
            write_all(output, packer.flush())
            if self.durable:
                os.fsync(output)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(output)
        oid = sha.digest()
        if not is_complete or self.contains(oid):
            os.unlink(temporary)
            return oid if is_complete else None
        self._place(temporary, oid)
        return oid

    def write_tree(self, entries: dict[bytes, TreeEntry]) -> bytes:
        """Store a tree. The dictionary belongs to the store from now on."""
        oid = self.write("tree", encode_tree(entries))
        self._remember_tree(oid, entries)
        return oid

    def write_commit(self, tree: bytes, parents: Iterable[bytes], message: str, *, timestamp: int) -> bytes:
        """Store a commit and return its id."""
        return self.write("commit", encode_commit(tree, parents, message, timestamp=timestamp))

    def flush(self) -> None:
        """Put what is staged on disk."""
        if not self._staged:
            return
        if self._spool is not None and self._staged_bytes <= MAX_SPOOLED_BYTES:
            self._spool.append(self._staged)
        else:
            self._write_pack(self._staged)
        self._staged.clear()
        self._staged_bytes = 0

    def unstage(self, oid: bytes) -> bool:
        """Forget an object that is not on disk yet; say whether there was one."""
        staged = self._staged.pop(oid, None)
        self._staged_bytes -= 0 if staged is None else len(staged[1])
        return staged is not None

    @property
    def is_due(self) -> bool:
        """Whether enough has come together to be packed."""
        return self._spool is not None and self._spool.size > MAX_SPOOLED_BYTES

    def pack(self) -> bool:
        """Make a pack of what is spooled, for git to see; say whether the whole spool is in packs now.

        A crash leaves it as it was, or done.
        """
        if self._spool is None or not self._spool.objects:
            return True
        self._write_pack(self._spool.objects)
        return self._spool.clear()

    def _write_pack(self, objects: Mapping[bytes, tuple[ObjectKind, bytes]]) -> None:
        write_pack(self._pack_directory, objects, durable=self.durable)
        self._list_packs()
        self._merge_small_packs()

    def _place(self, temporary: str, oid: bytes) -> None:
        """Give a loose object its name."""
        target = self._loose_path(oid)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(temporary, target)
        if self.durable:
            sync_directory(os.path.dirname(target))
            sync_directory(self._objects)

    # --- reading -----------------------------------------------------------------------------------

    def contains(self, oid: bytes) -> bool:
        """Say whether the object is stored here."""
        return (
            self._pending(oid) is not None
            or os.path.exists(self._loose_path(oid))
            or self._find_packed(oid) is not None
        )

    def read(self, oid: bytes) -> tuple[ObjectKind, bytes]:
        """Return an object's kind and content. Raises `ObjectStoreError` if it is missing or damaged."""
        found = self._pending(oid) or self._read_packed(oid) or self._read_loose(oid)
        if found is None and self._depot is not None:
            found = read_object(self._depot, oid)
        if found is None:
            raise ObjectStoreError(f"the object {oid.hex()} is missing from {self.path}")
        if hash_object(*found) != oid:
            raise ObjectStoreError(
                f"the object {oid.hex()} in {self.path} is damaged: its content does not match its name; "
                f"run git fsck there to see what else is affected"
            )
        return found

    def read_blob(self, oid: bytes) -> bytes:
        """Return a blob's content, whole."""
        return self._read_as("blob", oid)

    def _read_as(self, wanted: ObjectKind, oid: bytes) -> bytes:
        kind, data = self.read(oid)
        if kind != wanted:
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is a {kind}, not a {wanted}")
        return data

    def stream_blob(self, oid: bytes, size: int) -> Iterator[bytes]:
        """Yield a blob's content in parts; large content is not held in memory whole.

        The last part comes only if the content as a whole matches the id, so that a caller that writes
        the parts to a temporary file learns of damage in time.
        """
        if size >= LARGE_BYTES:
            self.fetch([oid])
        if size < LARGE_BYTES or not os.path.exists(self._loose_path(oid)):
            yield self.read_blob(oid)
            return
        held = b""
        sha = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for chunk in self._stream_loose(oid):
            sha.update(chunk)
            if held:
                yield held
            held = chunk
        if sha.digest() != oid:
            raise ObjectStoreError(
                f"the object {oid.hex()} in {self.path} is damaged: its content does not match its name"
            )
        yield held

    def large_size(self, oid: bytes) -> int | None:
        """Return the size of a large blob that is here to be streamed; None for any other object."""
        try:
            with open(self._loose_path(oid), "rb") as file:
                head = zlib.decompressobj().decompress(file.read(64), 32)
        except (OSError, zlib.error):
            return None
        kind, _, rest = head.partition(b" ")
        size = rest.partition(b"\0")[0]
        return int(size) if kind == b"blob" and size.isdigit() else None

    def read_tree(self, oid: bytes) -> Mapping[bytes, TreeEntry]:
        """Return a tree's names."""
        entries = self._trees.get(oid)
        if entries is None:
            entries = {} if oid == EMPTY_TREE else decode_tree(self._read_as("tree", oid))
            self._remember_tree(oid, entries)
        return entries

    def _remember_tree(self, oid: bytes, entries: dict[bytes, TreeEntry]) -> None:
        if len(self._trees) >= _MAX_CACHED_TREES:
            self._trees.clear()
        self._trees[oid] = entries

    def commit_tree(self, commit: bytes) -> bytes:
        """Return the tree of a commit."""
        return self._commit_fields(commit)[0]

    def parents(self, commit: bytes) -> list[bytes]:
        """Return the commits before a commit."""
        return self._commit_fields(commit)[1]

    def _commit_fields(self, commit: bytes) -> tuple[bytes, list[bytes]]:
        """Return the tree and the parents of a commit."""
        lines = self._read_as("commit", commit).split(b"\n\n", 1)[0].split(b"\n")
        tree = bytes.fromhex(lines[0].removeprefix(b"tree ").decode("ascii"))
        parents = [bytes.fromhex(line[7:].decode("ascii")) for line in lines if line.startswith(b"parent ")]
        return tree, parents

    def _pending(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        """Return an object that is staged or spooled."""
        found = self._staged.get(oid)
        if found is None and self._spool is not None:
            found = self._spool.objects.get(oid)
        return found

    def _loose_path(self, oid: bytes) -> str:
        text = oid.hex()
        return os.path.join(self._objects, text[:2], text[2:])

    def _read_loose(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        raw = read_file(self._loose_path(oid))
        if raw is None:
            return None
        try:
            header, _, data = zlib.decompress(raw).partition(b"\0")
        except zlib.error as error:
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is damaged: {error}") from error
        return _as_kind(header.split(b" ", 1)[0]), data

    def _stream_loose(self, oid: bytes) -> Iterator[bytes]:
        unpacker = zlib.decompressobj()
        is_header = True
        with open(self._loose_path(oid), "rb") as file:
            try:
                while raw := file.read(CHUNK_BYTES):
                    data = unpacker.decompress(raw)
                    if is_header and data:
                        # The header is far shorter than a chunk, so it is whole in the first one.
                        data = data[data.index(b"\0") + 1 :]
                        is_header = False
                    if data:
                        yield data
            except zlib.error as error:
                raise ObjectStoreError(
                    f"the object {oid.hex()} in {self.path} is damaged: {error}"
                ) from error

    # --- what is elsewhere -------------------------------------------------------------------------

    def fetch(self, ids: Iterable[bytes]) -> None:
        """Have objects here that are needed soon, so that they are not got from the depot one by one."""
        if self._depot is None:
            return
        missing = {oid for oid in ids if not self.contains(oid)}
        for oid, payload in self._depot.get(missing) if missing else ():
            cut = pieces_of(self._depot, oid, payload)
            if cut is None:
                kind, data = unpacked(self._depot, oid, payload)
                self.write(kind, data)
            elif self._write_loose(cut[0], cut[1], read_pieces(self._depot, cut[2])) != oid:
                raise damaged(self._depot, oid)
        self.flush()

    def read_blobs(self, ids: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the content of blobs by their ids."""
        wanted = set(ids)
        self.fetch(wanted)
        return {oid: self.read_blob(oid) for oid in wanted}

    def added(self, commit: bytes, since: bytes | None) -> Iterator[bytes]:
        """Yield the ids of what a commit needs and an earlier one of its line does not."""
        while commit != since:
            tree, parents = self._commit_fields(commit)
            before = self.commit_tree(parents[0]) if parents else None
            yield commit
            yield from self._added_below(tree, before)
            if not parents:
                return
            commit = parents[0]

    def _added_below(self, tree: bytes, before: bytes | None) -> Iterator[bytes]:
        if tree == before:
            return
        yield tree
        known = {} if before is None else self.read_tree(before)
        for name, entry in self.read_tree(tree).items():
            old = known.get(name)
            if entry.mode == MODE_TREE:
                is_tree = old is not None and old.mode == MODE_TREE
                yield from self._added_below(entry.oid, old.oid if old is not None and is_tree else None)
            elif entry.mode != _MODE_SUBMODULE and (old is None or old.oid != entry.oid):
                yield entry.oid

    # --- packs -------------------------------------------------------------------------------------

    def _list_packs(self) -> None:
        """Look for packs that came or went."""
        names = {
            name
            for name in os.listdir(self._pack_directory)
            if name.startswith("pack-") and name.endswith(".idx")
        }
        for gone in self._packs.keys() - names:
            del self._packs[gone]
        for name in names - self._packs.keys():
            self._packs[name] = Pack(os.path.join(self._pack_directory, name))

    def _find_in_packs(self, oid: bytes) -> tuple[Pack, int] | None:
        """Look for an object in the packs that are known."""
        for pack in self._packs.values():
            try:
                offset = pack.find(oid)
            except FileNotFoundError:
                continue
            if offset is not None:
                return pack, offset
        return None

    def _find_packed(self, oid: bytes) -> tuple[Pack, int] | None:
        found = self._find_in_packs(oid)
        if found is None:
            self._list_packs()
            found = self._find_in_packs(oid)
        return found

    def _read_packed(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        for _ in range(2):
            found = self._find_packed(oid)
            if found is None:
                return None
            try:
                return found[0].read(found[1])
            except FileNotFoundError:
                # Another process has just merged it into another pack.
                self._packs.clear()
        return None

    def _merge_small_packs(self) -> None:
        """Put many small packs together into one, so that neither we nor git search in hundreds."""
        try:
            small = {name: pack for name, pack in self._packs.items() if len(pack) < _SMALL_PACK_OBJECTS}
            if len(small) >= MAX_SMALL_PACKS:
                self._replace_packs(small, None)
        except (ObjectStoreError, FileNotFoundError):
            # Damage is reported when the object is read; until then many packs are only slow.
            # And a pack that is gone was merged by another process at the same time.
            self._list_packs()

    def _replace_packs(self, packs: Mapping[str, Pack], kept: Container[bytes] | None) -> None:
        """Write the objects of some packs (or those to be kept) into new ones, and then remove those."""
        written: set[str] = set()
        batch: dict[bytes, tuple[ObjectKind, bytes]] = {}
        size = 0
        for oid in {oid for pack in packs.values() for oid in pack.ids() if kept is None or oid in kept}:
            batch[oid] = self.read(oid)
            size += len(batch[oid][1])
            if size > MAX_STAGED_BYTES:
                written.add(write_pack(self._pack_directory, batch, durable=self.durable, compress=True))
                batch, size = {}, 0
        if batch:
            written.add(write_pack(self._pack_directory, batch, durable=self.durable, compress=True))
        for name, pack in packs.items():
            if name not in written:
                pack.delete()
        self._list_packs()

    # --- retention ---------------------------------------------------------------------------------

    def sweep(self, roots: Iterable[bytes]) -> int:
        """Remove every object that cannot be reached from the roots; return how many.

        Afterwards their content is no longer in any file of the store. No other process may write to
        the store meanwhile. A crash leaves the store whole; repeating the sweep completes it.
        """
        wanted = self.reachable(roots)
        removed = 0
        for directory, _, names in os.walk(self._objects):
            prefix = os.path.basename(directory)
            for name in names:
                if name.startswith("tmp_"):
                    os.unlink(os.path.join(directory, name))
                elif len(prefix) == 2 and bytes.fromhex(prefix + name) not in wanted:
                    os.unlink(os.path.join(directory, name))
                    removed += 1
        self._list_packs()
        for name, pack in list(self._packs.items()):
            unwanted = sum(oid not in wanted for oid in pack.ids())
            if unwanted:
                # The kept objects are readable at every moment: the new pack is complete before the old
                # one goes.
                self._replace_packs({name: pack}, wanted)
                removed += unwanted
        self.forget()
        return removed

    def reachable(self, roots: Iterable[bytes]) -> set[bytes]:
        """Return the ids of the roots and of everything that they refer to."""
        seen: set[bytes] = set()
        pending = list(roots)
        while pending:
            oid = pending.pop()
            if oid in seen or (oid == EMPTY_TREE and not self.contains(oid)):
                continue
            seen.add(oid)
            kind, data = self.read(oid)
            if kind == "commit":
                tree, parents = self._commit_fields(oid)
                pending.append(tree)
                pending.extend(parents)
            elif kind == "tree":
                for entry in decode_tree(data).values():
                    if entry.mode == MODE_TREE:
                        pending.append(entry.oid)
                    elif entry.mode != _MODE_SUBMODULE:
                        # Blobs have nothing below them: reading them would be wasted.
                        seen.add(entry.oid)
        return seen


def read_exactly(descriptor: int, size: int) -> bytes | None:
    """Read a file that should hold `size` bytes to its end; None if it does not."""
    parts: list[bytes] = []
    for chunk in _chunks(descriptor, size):
        if chunk is None:
            return None
        parts.append(chunk)
    return b"".join(parts)


def _as_kind(text: bytes) -> ObjectKind:
    kinds: tuple[ObjectKind, ...] = ("blob", "tree", "commit", "tag")
    for kind in kinds:
        if kind.encode() == text:
            return kind
    raise ObjectStoreError(f"{text!r} is not a kind of git object; the store is damaged")

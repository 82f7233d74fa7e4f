"""A private git object store, written and read without git.

Theory of operation
-------------------
The store is a bare git repository that people can look at (`git --git-dir=... log -p`), but nothing
here runs git to write it: objects are files whose format is simple, and writing them ourselves is
faster than starting a process, needs no index, and makes each step visible to the crash tests.

- Small objects are *staged*: held in memory until `flush` puts all of them on disk. Who needs an object
  before that (an undo journal does) keeps its own copy.
- Making files is what costs time. So a store with a *spool* (`spool.py`) appends what is flushed to that
  one file, and `pack` makes a pack of it now and then: a file with many objects and an index beside it.
  Git sees what is in packs. Without a spool, each flush writes a pack.
- When many small packs have come together they are merged into one, with its content compressed.
- The content of a first capture goes into a pack straight away; its trees are spooled. In that pack, and in
  a fresh small one, content is stored and not deflated: compressing thousands of small files costs more
  than reading them. `git gc` in the store makes it small at any time.
- Large content (`LARGE_BYTES` and more) is a *loose* object, a file named by its id, streamed and stored.

Every file is written under a temporary name and renamed, so that a name stands for a whole file. An index
comes after its pack, because without one the pack does not count.

Whatever git itself wrote meanwhile (`git gc` packs with deltas) is read through `git cat-file` with
GIT_DIR set to this store, which touches no work tree. That is the only use of git.

Object ids are 20 raw bytes here. Nothing trusts a name alone: content read back is checked against the
id that it was asked by.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
import subprocess
import threading
import zlib
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from zlib import adler32

from treenail.errors import ObjectStoreError
from treenail.workspace.spool import ObjectKind, Spool, sync_directory, write_all

LARGE_BYTES = 1024 * 1024
"""Content of this size and more is streamed and never held in memory whole."""

CHUNK_BYTES = 1024 * 1024
"""How much is read at once when streaming."""

MODE_FILE = 0o100644
MODE_EXECUTABLE = 0o100755
MODE_LINK = 0o120000
MODE_TREE = 0o040000
_MODE_SUBMODULE = 0o160000

MAX_STAGED_BYTES = 16 * 1024 * 1024
"""When more than this is staged, it is written without waiting for `flush`."""

MAX_SPOOLED_BYTES = 4 * 1024 * 1024
"""What is spooled is in memory, too; beyond this it is made a pack."""

MAX_SPOOLED_RECORDS = 64
"""How many flushes may be out of git's sight."""

MAX_PACKS_PER_TIER = 48
"""When there are this many packs of about the same size, they are merged."""

_TIERS = (range(128), range(128, 8_192))
"""How many objects the packs have that are merged with each other; larger ones stay."""
_MAX_REMEMBERED = 200_000
_FAST_LEVEL = 1
_STORED_LEVEL = 0
_TREE_CACHE_ENTRIES = 512
_STORED_BLOCK_BYTES = 65_535
_SPILL_BYTES = 256 * 1024
"""What a pack collects before it is written; memory that is used again soon costs less than new memory."""
_MAPPED_BYTES = 64 * 1024 * 1024
"""How much of a pack is mapped at once for its checksum."""
_MAX_PACK_BYTES = 1 << 30
"""A pack that is this long is completed and the next one begun: offsets are short in an index of ours."""
_PACK_KINDS: dict[int, ObjectKind] = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_PACK_NUMBERS: dict[ObjectKind, int] = {kind: number for number, kind in _PACK_KINDS.items()}
_FILE_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_OBJECT_HEADS: dict[ObjectKind, bytes] = {kind: kind.encode() + b" %d\0" for kind in _PACK_NUMBERS}
"""What an object's id is made of before its content, without its size."""
_GIT_SUFFIXES = (".rev", ".bitmap", ".mtimes", ".keep")
"""What git may put beside a pack."""
_SINGLE_BYTES = [bytes((value,)) for value in range(256)]
_stored_head = struct.Struct("<6BHH").pack
"""What an object begins with in a pack if its content is one stored block: its kind and size, for which
three bytes are enough, and the beginning of the block."""
_stored_tail = struct.Struct(">I").pack
_index_row = struct.Struct(">I20s").pack
_INDEX_MAGIC = b"\xfftOc\0\0\0\2"
"""What an index of the second version begins with."""
_two_counts = struct.Struct(">II").unpack_from
_one_count = struct.Struct(">I").unpack_from


class TreeEntry(NamedTuple):
    """One name in a tree: git's mode and the id of the blob or tree."""

    mode: int
    oid: bytes


class _Hash:
    """The id of an object whose content arrives in parts."""

    __slots__ = ("_sha",)

    def __init__(self, kind: ObjectKind, size: int) -> None:
        self._sha = hashlib.sha1(b"%s %d\0" % (kind.encode(), size), usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha.update(data)

    def digest(self) -> bytes:
        return self._sha.digest()


def object_id(kind: ObjectKind, data: bytes) -> bytes:
    """Return the id that git gives to this content."""
    return hashlib.sha1(_OBJECT_HEADS[kind] % len(data) + data, usedforsecurity=False).digest()


def hash_descriptor(descriptor: int, size: int) -> bytes | None:
    """Return the blob id of an open file, or None if it did not hold `size` bytes to its end."""
    sha = _Hash("blob", size)
    left = size
    while left:
        chunk = os.read(descriptor, min(left, CHUNK_BYTES))
        if not chunk:
            return None
        sha.update(chunk)
        left -= len(chunk)
    if os.read(descriptor, 1):
        return None
    return sha.digest()


EMPTY_TREE = object_id("tree", b"")


def encode_tree(entries: dict[bytes, TreeEntry]) -> bytes:
    """Return the content of a tree object; git sorts a directory as if its name ended in a slash."""
    lines = [
        (name + b"/" if mode == MODE_TREE else name, b"%o %b\0%b" % (mode, name, oid))
        for name, (mode, oid) in entries.items()
    ]
    lines.sort()
    return b"".join([line for _, line in lines])


def encode_commit(tree: bytes, parents: Iterable[bytes], message: str, *, timestamp: int) -> bytes:
    """Return the content of a commit object."""
    lines = [b"tree " + tree.hex().encode()]
    lines += [b"parent " + parent.hex().encode() for parent in parents]
    who = b"Treenail <treenail@localhost> %d +0000" % timestamp
    lines += [b"author " + who, b"committer " + who, b"", message.encode("utf-8", "backslashreplace")]
    return b"\n".join(lines) + b"\n"


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


class ObjectStore:
    """Git objects below one directory.

    `durable` makes every object survive a power cut before its id is returned; without it, objects
    survive the end of the process, however sudden. `spool` is the file that collects what is flushed
    until `pack`; it belongs to one writer.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durable: bool = False, spool: str | None = None
    ) -> None:
        self.path = Path(path)
        self.durable = durable
        self._spool = None if spool is None else Spool(spool, durable=durable)
        self._objects = os.path.join(self.path, "objects")
        self._packs: dict[str, _Pack] = {}
        self._packs_stamp: tuple[int, int] | None = None
        self._trees: dict[bytes, dict[bytes, TreeEntry]] = {}
        self._present: set[bytes] = set()
        self._staged: dict[bytes, tuple[ObjectKind, bytes]] = {}
        self._staged_bytes = 0
        self._newest_commit: tuple[bytes, bytes] | None = None

    # --- the repository ----------------------------------------------------------------------------

    def create(self, *, head: str = "main") -> None:
        """Make the directory a bare repository, unless it is one. Safe to repeat after a crash."""
        if self.exists:
            return
        path = os.fspath(self.path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        for part in ("objects", "objects/pack", "refs"):
            make_directory(f"{path}/{part}")
        # HEAD comes last: a directory with HEAD is complete.
        files = {
            # Somebody's automatic gc must not run in the middle of a call.
            "config": "[core]\n\trepositoryformatversion = 0\n\tbare = true\n[gc]\n\tauto = 0\n",
            "HEAD": f"ref: refs/heads/{head}\n",
        }
        for name, content in files.items():
            target = f"{path}/{name}"
            if not os.path.exists(target):
                self._replace_file(target, content.encode())

    @property
    def exists(self) -> bool:
        """Whether `create` has been completed here."""
        return os.path.exists(os.path.join(self.path, "HEAD"))

    def read_ref(self, name: str) -> str | None:
        """Return the commit (as text) that a ref such as `refs/heads/main` stands for."""
        try:
            text = (self.path / name).read_text("ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            return self._packed_refs().get(name)
        return text or None

    def write_ref(self, name: str, commit: str) -> None:
        """Let a ref stand for a commit."""
        target = os.path.join(self.path, name)
        content = commit.encode() + b"\n"
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            self._replace_file(target, content)
            return
        try:
            # Every commit is as long as the one before, and a few bytes are written in one step, which
            # is far cheaper than replacing the file. Nothing but people's git depends on it.
            os.pwrite(descriptor, content, 0)
            if self.durable:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def delete_ref(self, name: str) -> None:
        """Forget a ref; one that is not there is fine."""
        packed = self._packed_refs()
        if packed.pop(name, None) is not None:
            lines = [f"{commit} {ref}\n" for ref, commit in sorted(packed.items())]
            self._replace_file(os.path.join(self.path, "packed-refs"), "".join(lines).encode())
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            pass

    def refs(self) -> dict[str, str]:
        """Return every ref and its commit."""
        found = self._packed_refs()
        base = self.path / "refs"
        for directory, _, names in os.walk(base):
            for name in names:
                full = Path(directory) / name
                if not name.startswith("tmp_"):
                    found[full.relative_to(self.path).as_posix()] = full.read_text("ascii").strip()
        return found

    def _packed_refs(self) -> dict[str, str]:
        try:
            text = (self.path / "packed-refs").read_text("ascii")
        except FileNotFoundError:
            return {}
        lines = (line.split(" ", 1) for line in text.splitlines() if line[:1] not in ("#", "^", ""))
        return {ref: commit for commit, ref in lines}

    def _replace_file(self, target: str, content: bytes) -> None:
        directory = os.path.dirname(target)
        temporary = os.path.join(directory, f"tmp_{secrets.token_hex(8)}")
        _write_new(temporary, content, mode=0o600, durable=self.durable)
        os.rename(temporary, target)
        if self.durable:
            sync_directory(directory)

    def forget(self) -> None:
        """Drop what was remembered about the store's content, because somebody else has changed it."""
        if self._spool is not None:
            self._spool.forget()
        self._present.clear()
        self._trees.clear()
        self._packs.clear()
        self._packs_stamp = None

    # --- writing -----------------------------------------------------------------------------------

    def write(self, kind: ObjectKind, data: bytes) -> bytes:
        """Take an object in and return its id. A small one is on disk after the next `flush`."""
        oid = object_id(kind, data)
        if oid in self._staged or oid in self._present:
            return oid
        if len(data) >= LARGE_BYTES:
            if not self.contains(oid):
                header = b"%s %d\0" % (kind.encode(), len(data))
                self._write_loose(oid, zlib.compress(header + data, _STORED_LEVEL))
            return oid
        self._staged[oid] = (kind, data)
        self._staged_bytes += len(data)
        if self._staged_bytes > MAX_STAGED_BYTES:
            self.flush()
        return oid

    def staged(self, oid: bytes) -> bytes | None:
        """Return the content of an object that is in memory alone, or None if it is on disk."""
        found = self._staged.get(oid)
        return None if found is None else found[1]

    def flush(self) -> None:
        """Put what is staged on disk."""
        if not self._staged:
            return
        if self._spool is not None and self._staged_bytes <= MAX_SPOOLED_BYTES:
            self._spool.append(self._staged)
        else:
            self._write_pack(self._staged)
        self._remember(self._staged)
        self.unstage()

    @property
    def is_packed(self) -> bool:
        """Whether everything that is on disk is where git sees it."""
        return self._spool is None or not self._spool.objects

    @property
    def is_due(self) -> bool:
        """Whether enough has come together to be packed."""
        spool = self._spool
        return spool is not None and (spool.records >= MAX_SPOOLED_RECORDS or spool.size > MAX_SPOOLED_BYTES)

    def pack(self) -> bool:
        """Make a pack of what is spooled, for git to see; say whether everything of the spool is in packs.

        A crash leaves it as it was, or done.
        """
        if self._spool is None or not self._spool.objects:
            return True
        self._write_pack(self._spool.objects)
        return self._spool.clear()

    def _write_pack(self, objects: Mapping[bytes, tuple[ObjectKind, bytes]]) -> None:
        with self.bulk() as pack:
            for oid, (kind, data) in objects.items():
                pack.add(kind, data, oid=oid)
        self._merge_small_packs()

    def unstage(self) -> None:
        """Forget what is staged, because nothing refers to it any more."""
        self._staged.clear()
        self._staged_bytes = 0

    def _remember(self, oids: Iterable[bytes]) -> None:
        if len(self._present) > _MAX_REMEMBERED:
            self._present.clear()
        self._present.update(oids)

    def write_descriptor(self, descriptor: int, size: int) -> bytes | None:
        """Store an open file's content as a blob, streaming it.

        Returns None, and stores nothing, if the file did not hold `size` bytes to its end: somebody
        is writing to it.
        """
        if size < LARGE_BYTES:
            data = read_exactly(descriptor, size)
            return None if data is None else self.write("blob", data)
        temporary = os.path.join(self._objects, f"tmp_obj_{secrets.token_hex(8)}")
        sha = _Hash("blob", size)
        packer = zlib.compressobj(_STORED_LEVEL)
        left = size
        output = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            write_all(output, packer.compress(b"blob %d\0" % size))
            while left:
                chunk = os.read(descriptor, min(left, CHUNK_BYTES))
                if not chunk:
                    break
                sha.update(chunk)
                write_all(output, packer.compress(chunk))
                left -= len(chunk)
            complete = left == 0 and not os.read(descriptor, 1)
            if complete:
                write_all(output, packer.flush())
                if self.durable:
                    os.fsync(output)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(output)
        oid = sha.digest()
        if not complete or self.contains(oid):
            os.unlink(temporary)
            return oid if complete else None
        self._place(temporary, oid)
        return oid

    def write_tree(self, entries: dict[bytes, TreeEntry]) -> bytes:
        """Store a tree. The dictionary belongs to the store from now on."""
        oid = self.write("tree", encode_tree(entries))
        self._remember_tree(oid, entries)
        return oid

    def write_commit(self, tree: bytes, parents: Iterable[bytes], message: str, *, timestamp: int) -> bytes:
        """Store a commit and return its id."""
        oid = self.write("commit", encode_commit(tree, parents, message, timestamp=timestamp))
        self._newest_commit = (oid, tree)
        return oid

    def bulk(self, *, compress: bool = False) -> PackWriter:
        """Start a pack that takes many objects at once."""
        return PackWriter(self, compress=compress)

    def _write_loose(self, oid: bytes, content: bytes) -> None:
        temporary = os.path.join(self._objects, f"tmp_obj_{secrets.token_hex(8)}")
        _write_new(temporary, content, durable=self.durable)
        self._place(temporary, oid)

    def _place(self, temporary: str, oid: bytes) -> None:
        text = oid.hex()
        directory = os.path.join(self._objects, text[:2])
        try:
            os.rename(temporary, os.path.join(directory, text[2:]))
        except FileNotFoundError:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            os.rename(temporary, os.path.join(directory, text[2:]))
        if self.durable:
            sync_directory(directory)
            sync_directory(self._objects)
        self._remember((oid,))

    # --- reading -----------------------------------------------------------------------------------

    def contains(self, oid: bytes) -> bool:
        """Say whether the object is stored here."""
        if oid in self._present or oid in self._staged or self._spooled(oid) is not None:
            return True
        if os.path.exists(self._loose_path(oid)) or self._find_packed(oid) is not None:
            self._remember((oid,))
            return True
        return False

    def packed_ids(self) -> set[bytes]:
        """Return the id of every object in the packs that are known so far."""
        return {oid for pack in self._packs.values() for oid in pack.ids()}

    def read(self, oid: bytes) -> tuple[ObjectKind, bytes]:
        """Return an object's kind and content. Raises `ObjectStoreError` if it is missing or damaged."""
        staged = self._staged.get(oid)
        if staged is not None:
            return staged
        found = (
            self._spooled(oid) or self._read_packed(oid) or self._read_loose(oid) or self._read_with_git(oid)
        )
        if object_id(*found) != oid:
            raise ObjectStoreError(
                f"the object {oid.hex()} in {self.path} is damaged: its content does not match its name; "
                f"run git fsck there to see what else is affected"
            )
        return found

    def _spooled(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        return None if self._spool is None else self._spool.objects.get(oid)

    def read_blob(self, oid: bytes) -> bytes:
        """Return a blob's content, whole."""
        kind, data = self.read(oid)
        if kind != "blob":
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is a {kind}, not a blob")
        return data

    def stream_blob(self, oid: bytes, size: int) -> Iterator[bytes]:
        """Yield a blob's content in parts; large content is never in memory whole.

        The last part comes only if the content as a whole matches the id, so that whoever writes the
        parts to a temporary file knows in time.
        """
        if size < LARGE_BYTES:
            yield self.read_blob(oid)
            return
        held = b""
        sha = _Hash("blob", size)
        for chunk in self._stream_large(oid):
            sha.update(chunk)
            if held:
                yield held
            held = chunk
        if sha.digest() != oid:
            raise ObjectStoreError(
                f"the object {oid.hex()} in {self.path} is damaged: its content does not match its name"
            )
        yield held

    def read_tree(self, oid: bytes) -> dict[bytes, TreeEntry]:
        """Return a tree's names. Callers must not change the dictionary; they copy it."""
        entries = self._trees.get(oid)
        if entries is None:
            if oid == EMPTY_TREE:
                return {}
            kind, data = self.read(oid)
            if kind != "tree":
                raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is a {kind}, not a tree")
            entries = decode_tree(data)
            self._remember_tree(oid, entries)
        return entries

    def commit_tree(self, commit: bytes) -> bytes:
        """Return the tree of a commit."""
        newest = self._newest_commit
        if newest is not None and newest[0] == commit:
            return newest[1]
        return self._commit_fields(commit)[0]

    def commit_parents(self, commit: bytes) -> list[bytes]:
        """Return the parents of a commit."""
        return self._commit_fields(commit)[1]

    def _commit_fields(self, commit: bytes) -> tuple[bytes, list[bytes]]:
        kind, data = self.read(commit)
        if kind != "commit":
            raise ObjectStoreError(f"the object {commit.hex()} in {self.path} is a {kind}, not a commit")
        lines = data.split(b"\n\n", 1)[0].split(b"\n")
        tree = bytes.fromhex(lines[0].removeprefix(b"tree ").decode("ascii"))
        parents = [bytes.fromhex(line[7:].decode("ascii")) for line in lines if line.startswith(b"parent ")]
        return tree, parents

    def _remember_tree(self, oid: bytes, entries: dict[bytes, TreeEntry]) -> None:
        if len(self._trees) >= _TREE_CACHE_ENTRIES:
            # Oldest first; insertion order is close enough to use order for a chain of directories.
            del self._trees[next(iter(self._trees))]
        self._trees[oid] = entries

    def _loose_path(self, oid: bytes) -> str:
        text = oid.hex()
        return os.path.join(self._objects, text[:2], text[2:])

    def _read_loose(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        try:
            descriptor = os.open(self._loose_path(oid), _FILE_FLAGS)
        except FileNotFoundError:
            return None
        try:
            raw = read_exactly(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        try:
            content = zlib.decompress(raw or b"")
            header, _, data = content.partition(b"\0")
            kind = header.split(b" ", 1)[0].decode("ascii")
        except (zlib.error, UnicodeDecodeError) as error:
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is damaged: {error}") from error
        return _as_kind(kind), data

    def _stream_large(self, oid: bytes) -> Iterator[bytes]:
        try:
            descriptor = os.open(self._loose_path(oid), _FILE_FLAGS)
        except FileNotFoundError:
            found = self._read_packed(oid)
            if found is not None:
                yield found[1]
            else:
                yield from self._stream_with_git(oid)
            return
        try:
            unpacker = zlib.decompressobj()
            header_done = False
            while raw := os.read(descriptor, CHUNK_BYTES):
                data = unpacker.decompress(raw)
                if not header_done and data:
                    # The header is far shorter than a chunk, so it is whole in the first one.
                    data = data[data.index(b"\0") + 1 :]
                    header_done = True
                if data:
                    yield data
        except zlib.error as error:
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is damaged: {error}") from error
        finally:
            os.close(descriptor)

    # --- packs -------------------------------------------------------------------------------------

    def _refresh_packs(self) -> bool:
        """Look for packs that came or went; say whether there may be any."""
        directory = os.path.join(self._objects, "pack")
        status = os.stat(directory)
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._packs_stamp:
            return False
        self._packs_stamp = stamp
        names = {name for name in os.listdir(directory) if name.startswith("pack-") and name.endswith(".idx")}
        for gone in self._packs.keys() - names:
            del self._packs[gone]
        for name in names - self._packs.keys():
            self._packs[name] = _Pack(os.path.join(directory, name))
        return True

    def _find_packed(self, oid: bytes) -> tuple[_Pack, int] | None:
        for refreshed in (False, True):
            if refreshed:
                # Somebody may have packed or merged since; directory times move in ticks, so list it.
                self._packs_stamp = None
                self._refresh_packs()
            # The newest packs are the likeliest.
            for pack in reversed(self._packs.values()):
                try:
                    offset = pack.find(oid)
                except FileNotFoundError:
                    continue
                if offset is not None:
                    return pack, offset
        return None

    def note_pack(self, index_path: str, index: bytes) -> None:
        """Take note of a pack that was just written here."""
        self._packs[os.path.basename(index_path)] = _Pack(index_path, index)

    def _read_packed(self, oid: bytes) -> tuple[ObjectKind, bytes] | None:
        for _ in range(2):
            found = self._find_packed(oid)
            if found is None:
                return None
            try:
                return found[0].read(found[1])
            except FileNotFoundError:
                # Merged into another pack a moment ago.
                self._packs.clear()
        return None

    def _merge_small_packs(self) -> None:
        """Put many small packs together into one, so that neither we nor git search in hundreds."""
        if len(self._packs) < MAX_PACKS_PER_TIER:
            return
        try:
            for tier in _TIERS:
                packs = {name: pack for name, pack in self._packs.items() if pack.count in tier}
                if len(packs) >= MAX_PACKS_PER_TIER:
                    self._replace_packs(packs, None)
        except (ObjectStoreError, FileNotFoundError):
            # Damage is reported to whoever asks for the object; until then many packs are only slow.
            # And a pack that is gone was merged by another process at the same time.
            self._packs_stamp = None
            self._refresh_packs()

    def _replace_packs(self, packs: Mapping[str, _Pack], kept: Container[bytes] | None) -> None:
        """Write the objects of some packs (or those to be kept) into a new one, and then remove those."""
        with self.bulk(compress=True) as writer:
            for pack in packs.values():
                for oid, found in pack.objects():
                    if kept is None or oid in kept:
                        kind, data = found if found is not None else self._read_with_git(oid)
                        if object_id(kind, data) != oid:
                            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} is damaged")
                        writer.add(kind, data, oid=oid)
        directory = os.path.join(self._objects, "pack")
        for name in packs:
            if name in writer.index_names:
                continue
            # The index goes first: a pack without one does not count.
            for suffix in (".idx", ".pack", *_GIT_SUFFIXES):
                _unlink_if_there(os.path.join(directory, name.removesuffix(".idx") + suffix))
            self._packs.pop(name, None)

    # --- git, for what only git can read -------------------------------------------------------------

    def _git(self, *arguments: str) -> subprocess.Popen[bytes]:
        # A clean environment and no configuration but the store's own: nothing that a workspace or a
        # user's account names is run.
        environment = {
            "GIT_DIR": os.fspath(self.path),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
        }
        try:
            return subprocess.Popen(
                ["git", *arguments],
                env=environment,
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise ObjectStoreError(
                f"an object in {self.path} is packed in a way that only git can read; install git"
            ) from None

    def _read_with_git(self, oid: bytes) -> tuple[ObjectKind, bytes]:
        with self._git("cat-file", "-t", oid.hex()) as process:
            kind, _ = process.communicate()
        if process.returncode != 0:
            raise ObjectStoreError(f"the object {oid.hex()} is missing from {self.path}, or cannot be read")
        name = kind.decode("ascii").strip()
        with self._git("cat-file", name, oid.hex()) as process:
            data, _ = process.communicate()
        if process.returncode != 0:
            raise ObjectStoreError(f"the object {oid.hex()} in {self.path} cannot be read, not even by git")
        return _as_kind(name), data

    def _stream_with_git(self, oid: bytes) -> Iterator[bytes]:
        with self._git("cat-file", "blob", oid.hex()) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(CHUNK_BYTES):
                yield chunk
        if process.returncode != 0:
            raise ObjectStoreError(f"the object {oid.hex()} is missing from {self.path}, or cannot be read")

    # --- retention ---------------------------------------------------------------------------------

    def sweep(self, roots: Iterable[bytes]) -> int:
        """Remove every object that cannot be reached from the roots; return how many.

        Afterwards their content is no longer in any file of the store. Nobody else may write to the
        store meanwhile. A crash leaves the store whole; repeating the sweep completes it.
        """
        wanted = self._reachable(roots)
        removed = 0
        for prefix in os.listdir(self._objects):
            if len(prefix) != 2:
                if prefix.startswith("tmp_"):
                    os.unlink(os.path.join(self._objects, prefix))
                continue
            directory = os.path.join(self._objects, prefix)
            for rest in os.listdir(directory):
                if rest.startswith("tmp_") or bytes.fromhex(prefix + rest) not in wanted:
                    os.unlink(os.path.join(directory, rest))
                    removed += 1
        self._packs_stamp = None
        self._refresh_packs()
        for name, pack in list(self._packs.items()):
            ids = pack.ids()
            unwanted = sum(oid not in wanted for oid in ids)
            if not unwanted:
                continue
            # The kept objects are readable at every moment: the new pack is complete before the old
            # one goes.
            self._replace_packs({name: pack}, wanted)
            removed += unwanted
        self._drop_git_caches()
        self.forget()
        return removed

    def _drop_git_caches(self) -> None:
        """Remove what git derived from objects that may be gone, and temporary files of writers killed."""
        for name in ("info/commit-graph", "pack/multi-pack-index"):
            _unlink_if_there(os.path.join(self._objects, name))
        graphs = os.path.join(self._objects, "info/commit-graphs")
        if os.path.isdir(graphs):
            for name in os.listdir(graphs):
                os.unlink(os.path.join(graphs, name))
        packs = os.path.join(self._objects, "pack")
        for name in os.listdir(packs):
            if name.startswith("tmp_"):
                os.unlink(os.path.join(packs, name))

    def _reachable(self, roots: Iterable[bytes]) -> set[bytes]:
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
    data = os.read(descriptor, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    total = len(data)
    while data and total <= size:
        data = os.read(descriptor, size + 1 - total)
        parts.append(data)
        total += len(data)
    return b"".join(parts) if total == size else None


def make_directory(path: str) -> None:
    """Make a private directory, unless there is one."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def _as_kind(text: str) -> ObjectKind:
    for kind in _PACK_NUMBERS:
        if kind == text:
            return kind
    raise ObjectStoreError(f"{text!r} is not a kind of git object; the store is damaged")


def _write_new(path: str, content: bytes, *, durable: bool, mode: int = 0o400) -> None:
    """Write a file that is not there yet; one that cannot be completed is removed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(descriptor, content)
        if durable:
            os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _entry_head(number: int, size: int) -> bytes:
    """Return what an object begins with in a pack: its kind and size."""
    head = bytearray()
    byte, rest = (number << 4) | (size & 15), size >> 4
    while rest:
        head.append(byte | 0x80)
        byte, rest = rest & 0x7F, rest >> 7
    head.append(byte)
    return bytes(head)


class PackWriter:
    """Collects objects into a pack, which appears in the store as a whole when the block ends.

    Used as a context manager; on an exception it does not appear. Very much content makes several packs.

    The index is in git's first format, which has no checksum of every object. Content is checked against
    its id whenever it is read, so one more checksum would be work for nothing.
    """

    def __init__(self, store: ObjectStore, *, compress: bool) -> None:
        self.index_names: set[str] = set()
        """The names of the indexes that were written so far."""
        self._store = store
        self._compress = compress
        self._directory = os.path.join(store.path, "objects", "pack")
        self._entries: dict[bytes, int] = {}
        """Where each object is; 0 until it is written."""
        self._pending: list[tuple[bytes, ObjectKind, bytes]] = []
        self._pending_bytes = 0
        self._offset = 12
        self._output = -1
        self._temporary = ""
        self._checksum: _Checksum | None = None

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._let_go()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, kind: ObjectKind, data: bytes, *, oid: bytes | None = None) -> bytes:
        """Take an object in and return its id.

        Without an `oid`, an object that the store already has in a known pack is left out.
        """
        if oid is None:
            sha = hashlib.sha1(_OBJECT_HEADS[kind] % len(data), usedforsecurity=False)
            sha.update(data)
            oid = sha.digest()
            if oid in self._known:
                return oid
        if oid not in self._entries:
            self._entries[oid] = 0
            self._pending.append((oid, kind, data))
            self._pending_bytes += len(data)
            if self._pending_bytes >= _SPILL_BYTES:
                self._spill()
                if self._offset >= _MAX_PACK_BYTES:
                    self._begin_next()
        return oid

    def _begin_next(self) -> None:
        self._finish()
        self._known.update(self._entries)
        self._entries = {}
        self._offset = 12

    def _let_go(self) -> None:
        """Close the pack; one that is not complete is removed."""
        if self._checksum is not None:
            self._checksum.join()
            self._checksum = None
        if self._output != -1:
            os.close(self._output)
            self._output = -1
        if self._temporary:
            _unlink_if_there(self._temporary)
            self._temporary = ""

    @cached_property
    def _known(self) -> set[bytes]:
        """What is in packs already."""
        return self._store.packed_ids()

    def _spill(self) -> None:
        if self._output == -1:
            self._temporary = os.path.join(self._directory, f"tmp_pack_{secrets.token_hex(8)}")
            self._output = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            write_all(self._output, bytes(12))
        write_all(self._output, self._spell())

    def _spell(self) -> bytes:
        """Return what was collected as it stands in the pack, and note where each object is."""
        entries, offset = self._entries, self._offset
        parts: list[bytes] = []
        for oid, kind, content in self._pending:
            size, number = len(content), _PACK_NUMBERS[kind]
            if self._compress or size > _STORED_BLOCK_BYTES:
                level = _FAST_LEVEL if self._compress else _STORED_LEVEL
                head, body, tail = _entry_head(number, size), zlib.compress(content, level), b""
            else:
                # One stored block, spelled out: setting up a compressor costs more than the copy.
                first, second, third = 0x80 | number << 4 | size & 15, 0x80 | size >> 4 & 0x7F, size >> 11
                head = _stored_head(first, second, third, 0x78, 1, 1, size, size ^ 0xFFFF)
                body, tail = content, _stored_tail(adler32(content))
            parts += (head, body, tail)
            entries[oid] = offset
            offset += len(head) + len(body) + len(tail)
        self._offset = offset
        self._pending.clear()
        self._pending_bytes = 0
        return b"".join(parts)

    def seal(self) -> None:
        """Take no more objects. A large pack's checksum is taken from now on, beside what the caller does."""
        if self._output != -1 and self._checksum is None:
            self._spill()
            # How many there are is known only now, so the checksum takes a second, cached look.
            os.pwrite(self._output, self._header(), 0)
            self._checksum = _Checksum(self._output, self._offset)

    def _header(self) -> bytes:
        return struct.pack(">4sII", b"PACK", 2, len(self._entries))

    def _finish(self) -> None:
        if not self._entries:
            return
        self.seal()
        if self._checksum is None:
            # It fits into one write.
            content = self._header() + self._spell()
            index = self._index()
            checksum = hashlib.sha1(content, usedforsecurity=False).digest()
            self._temporary = os.path.join(self._directory, f"tmp_pack_{secrets.token_hex(8)}")
            _write_new(self._temporary, content + checksum, durable=self._store.durable)
        else:
            index = self._index()
            checksum = self._checksum.digest()
            write_all(self._output, checksum)
            if self._store.durable:
                os.fsync(self._output)
        index += checksum
        index += hashlib.sha1(index, usedforsecurity=False).digest()
        stem = os.path.join(self._directory, f"pack-{checksum.hex()}")
        index_temporary = os.path.join(self._directory, f"tmp_idx_{secrets.token_hex(8)}")
        _write_new(index_temporary, index, durable=self._store.durable)
        # The index appears last: without it the pack does not count.
        os.rename(self._temporary, stem + ".pack")
        self._temporary = ""
        os.rename(index_temporary, stem + ".idx")
        if self._store.durable:
            sync_directory(self._directory)
        self._let_go()
        self.index_names.add(f"pack-{checksum.hex()}.idx")
        self._store.note_pack(stem + ".idx", index)

    def _index(self) -> bytes:
        """Return the pack's index, up to the two checksums at its end."""
        entries = self._entries
        oids = sorted(entries)
        # How many ids begin with each byte or a smaller one.
        fan_out = [bisect_left(oids, _SINGLE_BYTES[first]) for first in range(1, 256)]
        rows = [_index_row(entries[oid], oid) for oid in oids]
        return struct.pack(">256I", *fan_out, len(oids)) + b"".join(rows)


class _Checksum:
    """The checksum of an open file's beginning, taken in a thread of its own.

    The file is mapped, and not read part by part, because a thread that comes back for the next part waits
    for the interpreter, which is what the other one needs.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._sha = hashlib.sha1(usedforsecurity=False)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="treenail-checksum")
        try:
            self._thread.start()
        except RuntimeError:
            # There are too many threads already, or the interpreter is ending: whoever waits does the work.
            self._thread = None

    def _run(self) -> None:
        try:
            for start in range(0, self._size, _MAPPED_BYTES):
                length = min(_MAPPED_BYTES, self._size - start)
                flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ
                with mmap.mmap(self._descriptor, length, flags, access, offset=start) as part:
                    self._sha.update(part)
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            self._error = error

    def join(self) -> None:
        """Wait until the file is not needed any more."""
        if self._thread is not None:
            self._thread.join()

    def digest(self) -> bytes:
        """Wait for the checksum and return it."""
        if self._thread is None:
            self._run()
        self.join()
        if self._error is not None:
            raise self._error
        return self._sha.digest()


class _Pack:
    """One pack and its index, read on demand."""

    def __init__(self, index_path: str, index: bytes = b"") -> None:
        self._index_path = index_path
        self._pack_path = index_path.removesuffix(".idx") + ".pack"
        self._index = b""
        self._count = self._counts = self._ids = self._step = 0
        if index:
            self._take(index)

    @property
    def count(self) -> int:
        """How many objects there are in the pack."""
        self._load()
        return self._count

    def _load(self) -> bytes:
        if not self._index:
            with open(self._index_path, "rb") as file:
                self._take(file.read())
        return self._index

    def _take(self, index: bytes) -> None:
        """Find out where things are in the index: ours are of the first version, and git's of the second."""
        if index[:8] == _INDEX_MAGIC:
            # All ids, all checksums, all offsets.
            self._counts, self._ids, self._step, row = 8, 8 + 1024, 20, 28
        else:
            # Each id follows its offset.
            self._counts, self._ids, self._step, row = 0, 1024 + 4, 24, 24
        head = self._counts + 1024
        if len(index) >= head:
            (self._count,) = _one_count(index, head - 4)
        if len(index) < head + self._count * row + 40:
            raise ObjectStoreError(f"{self._index_path} is damaged, or not a pack index of version 1 or 2")
        self._index = index

    def ids(self) -> list[bytes]:
        """Return the id of every object in the pack."""
        index = self._load()
        return [self._id(index, number) for number in range(self._count)]

    def _id(self, index: bytes, number: int) -> bytes:
        start = self._ids + number * self._step
        return index[start : start + 20]

    def find(self, oid: bytes) -> int | None:
        """Return where the object starts in the pack, or None."""
        index = self._index or self._load()
        counts, first = self._counts, oid[0]
        low, high = _two_counts(index, counts + first * 4 - 4) if first else (0, _one_count(index, counts)[0])
        if low == high:
            return None
        number = bisect_left(range(high), oid, lo=low, key=lambda position: self._id(index, position))
        if number == high or self._id(index, number) != oid:
            return None
        if not counts:
            return int(_one_count(index, self._ids + number * self._step - 4)[0])
        table = self._ids + self._count * 24
        (offset,) = _one_count(index, table + number * 4)
        if offset & 0x80000000:
            (offset,) = struct.unpack_from(">Q", index, table + self._count * 4 + (offset & 0x7FFFFFFF) * 8)
        return int(offset)

    def objects(self) -> Iterator[tuple[bytes, tuple[ObjectKind, bytes] | None]]:
        """Yield every object in the order in which they are in the file, as `read` returns them."""
        offsets = {oid: self.find(oid) or 0 for oid in self.ids()}
        for oid, offset in sorted(offsets.items(), key=lambda item: item[1]):
            yield oid, self.read(offset)

    def read(self, offset: int) -> tuple[ObjectKind, bytes] | None:
        """Return the object at an offset, or None if it is a delta, which is left to git."""
        descriptor = os.open(self._pack_path, _FILE_FLAGS)
        try:
            raw = os.pread(descriptor, 8192, offset)
            byte = raw[0]
            kind = _PACK_KINDS.get((byte >> 4) & 7)
            if kind is None:
                return None
            size = byte & 15
            shift, position = 4, 1
            while byte & 0x80:
                byte = raw[position]
                size |= (byte & 0x7F) << shift
                shift += 7
                position += 1
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(raw[position:])
            while len(data) < size:
                offset += len(raw)
                raw = os.pread(descriptor, max(CHUNK_BYTES, size), offset)
                if not raw:
                    raise ObjectStoreError(f"{self._pack_path} ends in the middle of an object")
                data += unpacker.decompress(raw)
        except (zlib.error, IndexError) as error:
            raise ObjectStoreError(f"{self._pack_path} is damaged: {error}") from error
        finally:
            os.close(descriptor)
        if len(data) != size:
            raise ObjectStoreError(
                f"{self._pack_path} is damaged: an object has {len(data)} bytes, not {size}"
            )
        return kind, data

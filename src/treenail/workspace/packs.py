"""Git packs: files that hold many objects, each with an index beside it.

A pack is written under a temporary name and renamed, and its index comes last, because a pack without an
index does not count. The reader checks content against its id.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, Literal

from treenail.errors import ObjectStoreError
from treenail.workspace.disk import sync_directory, unlink_if_there, write_new_file

ObjectKind = Literal["blob", "tree", "commit", "tag"]

CHUNK_BYTES = 1024 * 1024
"""How much is read at once when streaming."""

MAX_PACK_BYTES = 1 << 30
"""A pack that is this long is completed and the next one begun, so that offsets stay short."""

_PACK_KINDS: dict[int, ObjectKind] = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_PACK_NUMBERS: dict[ObjectKind, int] = {kind: number for number, kind in _PACK_KINDS.items()}
_INDEX_MAGIC = b"\xfftOc\0\0\0\2"
"""The start of an index of version 2, the only version that is written and read here."""
_TABLE = len(_INDEX_MAGIC) + 1024
"""Where the sorted ids begin in an index."""
_GIT_SUFFIXES = (".rev", ".bitmap", ".mtimes", ".keep")
"""What git may put beside a pack."""


def hash_object(kind: ObjectKind, data: bytes) -> bytes:
    """Return the id that git gives to this content."""
    head = b"%b %d\0" % (kind.encode(), len(data))
    return hashlib.sha1(head + data, usedforsecurity=False).digest()


class PackWriter:
    """Collects objects into a pack, which appears in its directory as a whole when the block ends.

    Used as a context manager; on an exception nothing appears. Very much content makes several packs.
    `compress` deflates content; without it, content is stored as it is.
    """

    def __init__(self, directory: str, *, durable: bool, compress: bool = False) -> None:
        self.index_names: set[str] = set()
        """The names of the indexes that were written so far."""
        self._directory = directory
        self._durable = durable
        self._level = 1 if compress else 0
        self._written: set[bytes] = set()
        """The objects of the packs that are complete."""
        self._entries: dict[bytes, tuple[int, int]] = {}
        """Where each object of the present pack starts, and its checksum there."""
        self._offset = 0
        self._output: BinaryIO | None = None
        self._temporary = ""

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            if self._output is not None:
                unlink_if_there(self._temporary)
                with suppress(OSError):  # The disk may be too full for what is still in its buffer.
                    self._output.close()

    def add(self, oid: bytes, kind: ObjectKind, data: bytes) -> None:
        """Take an object in, unless this writer has it already."""
        if oid in self._entries or oid in self._written:
            return
        if self._offset >= MAX_PACK_BYTES:
            self._complete()
        output = self._output or self._begin()
        entry = _entry_head(_PACK_NUMBERS[kind], len(data)) + zlib.compress(data, self._level)
        output.write(entry)
        self._entries[oid] = (self._offset, zlib.crc32(entry))
        self._offset += len(entry)

    def _begin(self) -> BinaryIO:
        self._temporary = os.path.join(self._directory, f"tmp_pack_{secrets.token_hex(8)}")
        output = self._output = open(self._temporary, "x+b", CHUNK_BYTES)  # noqa: SIM115  # closed by `__exit__`
        os.fchmod(output.fileno(), 0o400)
        output.write(bytes(12))
        self._offset = 12
        return output

    def _complete(self) -> None:
        """Let the present pack appear, if there is one."""
        output = self._output
        if output is None:
            return
        # How many objects there are is known only now, so the checksum needs a second look at the file.
        output.seek(0)
        output.write(struct.pack(">4sII", b"PACK", 2, len(self._entries)))
        output.seek(0)
        sha = hashlib.sha1(usedforsecurity=False)
        while chunk := output.read(CHUNK_BYTES):
            sha.update(chunk)
        checksum = sha.digest()
        output.write(checksum)
        output.flush()
        if self._durable:
            os.fsync(output.fileno())
        name = f"pack-{checksum.hex()}"
        index_temporary = os.path.join(self._directory, f"tmp_idx_{secrets.token_hex(8)}")
        write_new_file(index_temporary, self._index(checksum), durable=self._durable)
        os.rename(self._temporary, os.path.join(self._directory, f"{name}.pack"))
        os.rename(index_temporary, os.path.join(self._directory, f"{name}.idx"))
        if self._durable:
            sync_directory(self._directory)
        output.close()
        self._output = None
        self.index_names.add(f"{name}.idx")
        self._written.update(self._entries)
        self._entries = {}

    def _index(self, checksum: bytes) -> bytes:
        oids = sorted(self._entries)
        # How many ids begin with each byte or a smaller one.
        fan_out = [bisect_left(oids, bytes((first,))) for first in range(1, 256)]
        places = [self._entries[oid] for oid in oids]
        index = b"".join(
            (
                _INDEX_MAGIC,
                struct.pack(">256I", *fan_out, len(oids)),
                *oids,
                *(crc.to_bytes(4, "big") for _, crc in places),
                *(offset.to_bytes(4, "big") for offset, _ in places),
                checksum,
            )
        )
        return index + hashlib.sha1(index, usedforsecurity=False).digest()


def _entry_head(number: int, size: int) -> bytes:
    """Return what an object begins with in a pack: its kind and size."""
    head = bytearray()
    byte, rest = (number << 4) | (size & 15), size >> 4
    while rest:
        head.append(byte | 0x80)
        byte, rest = rest & 0x7F, rest >> 7
    head.append(byte)
    return bytes(head)


class Pack:
    """One pack and its index, read on demand."""

    def __init__(self, index_path: str) -> None:
        self._index_path = index_path
        self._pack_path = index_path.removesuffix(".idx") + ".pack"
        self._index = b""

    def __len__(self) -> int:
        index = self._load()
        return int.from_bytes(index[_TABLE - 4 : _TABLE], "big")

    def _load(self) -> bytes:
        if not self._index:
            with open(self._index_path, "rb") as file:
                index = file.read()
            count = int.from_bytes(index[_TABLE - 4 : _TABLE], "big")
            if index[:8] != _INDEX_MAGIC or len(index) < _TABLE + count * 28 + 40:
                raise ObjectStoreError(f"{self._index_path} is damaged, or not a pack index of version 2")
            self._index = index
        return self._index

    def _id(self, number: int) -> bytes:
        start = _TABLE + number * 20
        return self._index[start : start + 20]

    def ids(self) -> list[bytes]:
        """Return the id of every object in the pack."""
        return [self._id(number) for number in range(len(self))]

    def find(self, oid: bytes) -> int | None:
        """Return where the object starts in the pack, or None."""
        count = len(self)
        number = bisect_left(range(count), oid, key=self._id)
        if number == count or self._id(number) != oid:
            return None
        table = _TABLE + count * 24
        (offset,) = struct.unpack_from(">I", self._index, table + number * 4)
        if offset & 0x80000000:
            (offset,) = struct.unpack_from(">Q", self._index, table + count * 4 + (offset & 0x7FFFFFFF) * 8)
        return int(offset)

    def objects(self) -> Iterator[tuple[bytes, tuple[ObjectKind, bytes] | None]]:
        """Yield every object, as `read` returns it."""
        for oid in self.ids():
            yield oid, self.read(self.find(oid) or 0)

    def read(self, offset: int) -> tuple[ObjectKind, bytes] | None:
        """Return the object at an offset, or None if it is a delta, which only git can read."""
        with open(self._pack_path, "rb") as file:
            file.seek(offset)
            try:
                byte = file.read(1)[0]
                kind = _PACK_KINDS.get((byte >> 4) & 7)
                if kind is None:
                    return None
                size, shift = byte & 15, 4
                while byte & 0x80:
                    byte = file.read(1)[0]
                    size |= (byte & 0x7F) << shift
                    shift += 7
                unpacker = zlib.decompressobj()
                parts: list[bytes] = []
                while not unpacker.eof:
                    raw = file.read(max(8192, min(size, CHUNK_BYTES)))
                    if not raw:
                        raise ObjectStoreError(f"{self._pack_path} ends in the middle of an object")
                    parts.append(unpacker.decompress(raw))
                data = b"".join(parts)
            except (zlib.error, IndexError) as error:
                raise ObjectStoreError(f"{self._pack_path} is damaged: {error}") from error
        if len(data) != size:
            raise ObjectStoreError(
                f"{self._pack_path} is damaged: an object has {len(data)} bytes, not {size}"
            )
        return kind, data

    def delete(self) -> None:
        """Remove the pack. Its index goes first, because a pack without one does not count."""
        stem = self._index_path.removesuffix(".idx")
        for suffix in (".idx", ".pack", *_GIT_SUFFIXES):
            unlink_if_there(stem + suffix)

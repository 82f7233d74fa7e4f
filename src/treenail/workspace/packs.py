"""Git packs: files that hold many objects, each with an index beside it.

A pack is written under a temporary name and renamed, and its index comes last, because a pack without an
index does not count. Packs here hold no deltas; the configuration of the store keeps git from making any.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal

from treenail.errors import ObjectStoreError
from treenail.workspace.disk import replace_file, unlink_if_there

ObjectKind = Literal["blob", "tree", "commit", "tag"]

CHUNK_BYTES = 1024 * 1024
"""How much is read at once when streaming."""

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


def write_pack(
    directory: str,
    objects: Mapping[bytes, tuple[ObjectKind, bytes]],
    *,
    durable: bool,
    compress: bool = False,
) -> str:
    """Write a pack and return the name of its index; `compress` deflates content instead of storing it.

    The pack is put together in memory. It appears as a whole, or not at all.
    """
    places: dict[bytes, tuple[int, int]] = {}
    parts = [struct.pack(">4sII", b"PACK", 2, len(objects))]
    offset = len(parts[0])
    for oid, (kind, data) in objects.items():
        entry = _entry_head(_PACK_NUMBERS[kind], len(data)) + zlib.compress(data, int(compress))
        places[oid] = (offset, zlib.crc32(entry))
        parts.append(entry)
        offset += len(entry)
    content = b"".join(parts)
    checksum = hashlib.sha1(content, usedforsecurity=False).digest()
    name = f"pack-{checksum.hex()}.idx"
    stem = os.path.join(directory, name.removesuffix(".idx"))
    if os.path.exists(f"{stem}.idx"):
        return name
    # The pack comes first: one without an index does not count.
    replace_file(f"{stem}.pack", content + checksum, durable=durable)
    try:
        replace_file(f"{stem}.idx", _index(places, checksum), durable=durable)
    except BaseException:
        unlink_if_there(f"{stem}.pack")
        raise
    return name


def _index(places: Mapping[bytes, tuple[int, int]], checksum: bytes) -> bytes:
    oids = sorted(places)
    # How many ids begin with each byte or a smaller one.
    fan_out = [bisect_left(oids, bytes((first,))) for first in range(1, 256)]
    index = b"".join(
        (
            _INDEX_MAGIC,
            struct.pack(">256I", *fan_out, len(oids)),
            *oids,
            *(places[oid][1].to_bytes(4, "big") for oid in oids),
            *(places[oid][0].to_bytes(4, "big") for oid in oids),
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

    def read(self, offset: int) -> tuple[ObjectKind, bytes]:
        """Return the object at an offset."""
        with open(self._pack_path, "rb") as file:
            file.seek(offset)
            try:
                byte = file.read(1)[0]
                kind = _PACK_KINDS.get((byte >> 4) & 7)
                if kind is None:
                    raise ObjectStoreError(
                        f"{self._pack_path} holds deltas, which only git reads; "
                        f"run git repack -adf --window=0 in that store"
                    )
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

"""Small objects on their way into a pack.

Theory of operation
-------------------
Making a file costs more than writing into one, on some filesystems a hundred times more. So what a call
leaves behind is appended to one file, the spool, and becomes a pack when enough has come together. Each
append is one checksummed record with all objects of a boundary. A record that a crash cut off does not
count; nothing refers to it yet. What is spooled is also held in memory, because what was just written is
what is asked for next.

Packing is: write the pack, then empty the spool. A crash in between leaves objects in both, which does no
harm. An emptied spool keeps its file and gets a new mark at its beginning. By that mark somebody who still
remembers what was in it (another handle on the same line) sees that it is in a pack now.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Literal

from treenail.errors import ObjectStoreError

ObjectKind = Literal["blob", "tree", "commit", "tag"]

MAX_RECORD_BYTES = 1 << 31
"""A longer record is taken for damage."""

_HEAD_BYTES = 8
_MAGIC = b"treenail spool 1\n"
_MARK_BYTES = 8
_START = len(_MAGIC) + _MARK_BYTES
_KINDS: tuple[ObjectKind, ...] = ("blob", "tree", "commit", "tag")
_NUMBERS = {kind: bytes((number,)) for number, kind in enumerate(_KINDS)}
_OBJECT_HEAD_BYTES = 25


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of the data, however many calls it takes."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def frame(payload: bytes) -> bytes:
    """Wrap a record's content with its length and checksum."""
    return b"%b%b%b" % (len(payload).to_bytes(4, "big"), zlib.crc32(payload).to_bytes(4, "big"), payload)


def frames(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record with the offset behind it; stop at the first that is torn or damaged."""
    while offset + _HEAD_BYTES <= len(data):
        size = int.from_bytes(data[offset : offset + 4], "big")
        start, end = offset + _HEAD_BYTES, offset + _HEAD_BYTES + size
        if size > MAX_RECORD_BYTES or end > len(data):
            return
        payload = data[start:end]
        if zlib.crc32(payload) != int.from_bytes(data[offset + 4 : offset + 8], "big"):
            return
        offset = end
        yield offset, payload


class Spool:
    """The objects of one line that are on disk and in no pack yet. One writer at a time."""

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._objects: dict[bytes, tuple[ObjectKind, bytes]] | None = None
        self._head = b""
        self._end = 0
        self._records = 0

    @property
    def objects(self) -> Mapping[bytes, tuple[ObjectKind, bytes]]:
        """What is spooled, by id; read from disk at first use. Whoever reads checks ids against content."""
        if self._objects is None:
            self._load()
        assert self._objects is not None
        return self._objects

    @property
    def records(self) -> int:
        """How many appends there were since it was last emptied."""
        return self._records

    @property
    def size(self) -> int:
        """How many bytes there are in the file."""
        return self._end

    def forget(self) -> None:
        """Drop what is in memory: the file counts."""
        self._objects = None

    def _load(self) -> None:
        self._objects, self._head, self._end, self._records = {}, b"", 0, 0
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return
        if len(data) < _START:
            # A crash cut off its very beginning: nothing was in it yet.
            return
        if not data.startswith(_MAGIC):
            raise ObjectStoreError(
                f"{self._path} was written by a newer Treenail or is damaged; use this store with that one"
            )
        self._head, self._end = data[:_START], _START
        for end, payload in frames(data, _START):
            self._records += 1
            self._end = end
            position = 0
            while position < len(payload):
                start = position + _OBJECT_HEAD_BYTES
                size = int.from_bytes(payload[start - 4 : start], "big")
                kind = _KINDS[payload[position]]
                self._objects[payload[position + 1 : position + 21]] = (kind, payload[start : start + size])
                position = start + size

    def append(self, batch: Mapping[bytes, tuple[ObjectKind, bytes]]) -> None:
        """Put objects on disk, all of them or none."""
        parts: list[bytes] = []
        for oid, (kind, data) in batch.items():
            parts += (_NUMBERS[kind], oid, len(data).to_bytes(4, "big"), data)
        payload = frame(b"".join(parts))
        _ = self.objects
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._is_as_remembered(descriptor):
                # Another handle on this line has packed what is remembered here, or added to it.
                self._load()
                # Whatever is still behind the end was torn by a crash.
                os.ftruncate(descriptor, self._end)
            is_new = not self._head
            if is_new:
                self._head = _MAGIC + secrets.token_bytes(_MARK_BYTES)
                payload = self._head + payload
            os.lseek(descriptor, self._end, os.SEEK_SET)
            write_all(descriptor, payload)
            if self._durable:
                os.fsync(descriptor)
        except BaseException:
            # It may have been written in part, or whole: the file counts.
            self._objects = None
            raise
        finally:
            os.close(descriptor)
        if is_new and self._durable:
            sync_directory(os.path.dirname(self._path))
        self._end += len(payload)
        self._records += 1
        assert self._objects is not None
        self._objects.update(batch)

    def _is_as_remembered(self, descriptor: int) -> bool:
        return os.fstat(descriptor).st_size == self._end and os.pread(descriptor, _START, 0) == self._head

    def clear(self) -> bool:
        """Empty the spool, because everything that is remembered of it is in a pack.

        Says whether that was done: what another handle has added since is not in a pack yet.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            packed = self._head, self._end
            if not self._is_as_remembered(descriptor):
                self._load()
            is_ours = (self._head, self._end) == packed
            if is_ours:
                # Not to nothing: a file that is emptied is flushed to disk when it is closed next time.
                os.pwrite(descriptor, _MAGIC + secrets.token_bytes(_MARK_BYTES), 0)
                os.ftruncate(descriptor, _START)
        finally:
            os.close(descriptor)
        self._objects = None
        return is_ours

"""Small objects on their way into a pack.

Theory of operation
-------------------
Making a file costs more than writing into one, on some filesystems a hundred times more. So the objects of
a boundary are appended to one file, the spool, and become a pack when enough have come together or when the
store is closed. Each object is one checksummed record; a record that a crash cut off does not count, and
nothing refers to it yet. The spooled objects are also held in memory.

Packing is: write the pack, then empty the spool. A crash in between leaves objects in both, which does no
harm. An emptied spool keeps its file and gets a new mark at its beginning, by which another handle on the
same spool sees that what it remembers is in a pack now.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from treenail.errors import ObjectStoreError
from treenail.workspace.disk import decode_records, encode_record, read_file, sync_directory, write_all
from treenail.workspace.packs import ObjectKind, hash_object

_MAGIC = b"treenail spool 2\n"
_MARK_BYTES = 8
_START = len(_MAGIC) + _MARK_BYTES
_KINDS: tuple[ObjectKind, ...] = ("blob", "tree", "commit", "tag")


class Spool:
    """The objects of one line that are on disk and not in a pack yet. One writer at a time."""

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._objects: dict[bytes, tuple[ObjectKind, bytes]] | None = None
        self._head = b""
        self._end = 0

    @property
    def objects(self) -> Mapping[bytes, tuple[ObjectKind, bytes]]:
        """The spooled objects by id; read from disk at first use."""
        return self._load() if self._objects is None else self._objects

    @property
    def size(self) -> int:
        """How many bytes there are in the file."""
        return self._end

    def forget(self) -> None:
        """Drop what is in memory: the file counts."""
        self._objects = None

    def _load(self) -> dict[bytes, tuple[ObjectKind, bytes]]:
        objects: dict[bytes, tuple[ObjectKind, bytes]] = {}
        self._objects, self._head, self._end = objects, b"", 0
        data = read_file(self._path) or b""
        if len(data) < _START:
            # A crash cut off its very beginning: nothing was in it yet.
            return objects
        if not data.startswith(_MAGIC):
            raise ObjectStoreError(
                f"{self._path} is damaged, or was written by another version of Treenail; "
                f"use this store with that version"
            )
        self._head, self._end = data[:_START], _START
        for end, payload in decode_records(data, _START):
            kind, content = _KINDS[payload[0]], payload[1:]
            objects[hash_object(kind, content)] = (kind, content)
            self._end = end
        return objects

    def append(self, batch: Mapping[bytes, tuple[ObjectKind, bytes]]) -> None:
        """Put objects on disk."""
        payload = b"".join(
            encode_record(bytes((_KINDS.index(kind),)) + data) for kind, data in batch.values()
        )
        objects = self._load() if self._objects is None else self._objects
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._is_as_remembered(descriptor):
                # Another handle on this line has packed what is remembered here, or added to it.
                objects = self._load()
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
        objects.update(batch)

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
                os.pwrite(descriptor, _MAGIC + secrets.token_bytes(_MARK_BYTES), 0)
                os.ftruncate(descriptor, _START)
        finally:
            os.close(descriptor)
        self._objects = None
        return is_ours

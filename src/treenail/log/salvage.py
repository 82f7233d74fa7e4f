"""Gets every whole event out of a damaged SQLite file, without SQLite.

Theory of operation
-------------------
SQLite finds rows through the first page and through inner pages of trees. When
one of those is damaged or cut off, whole rows behind it cannot be reached,
although every byte of them is there. Here each page is looked at by itself: a
page that holds rows says so, and a row says how long it is and which values it
has. A row is recognised by its shape and believed because of its checksum, so
it does not matter how it was found. Of the WAL every page image up to its last
commit mark is looked at as well, also behind a damaged one.

What is found is put in order again by the chain of checksums: a session is
whole up to the first event whose predecessor's checksum does not lead to it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from treenail.log import wal

PAGE = 4096
"""The page size of every log file."""

_TABLE_LEAF, _INDEX_LEAF = 0x0D, 0x0A
_OVERFLOW_ROOM = PAGE - 4
_MOST_LOCAL = {_TABLE_LEAF: PAGE - 35, _INDEX_LEAF: (PAGE - 12) * 64 // 255 - 23}
_LEAST_LOCAL = (PAGE - 12) * 32 // 255 - 23
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value = int | float | str | bytes | None
Row = tuple[Value, ...]


class _Broken(Exception):
    """A row that cannot be decoded."""


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for step in range(9):
        if place + step >= len(data):
            raise _Broken
        byte = data[place + step]
        if step == 8:
            return (value << 8) | byte, place + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, place + step + 1
    raise _Broken


def _values(record: bytes) -> Row:
    """Decode a record: a header with the types, then the values."""
    size, place = _varint(record, 0)
    kinds = []
    while place < size:
        kind, place = _varint(record, place)
        kinds.append(kind)
    values: list[Value] = []
    place = size
    for kind in kinds:
        if kind in (0, 8, 9):
            values.append({0: None, 8: 0, 9: 1}[kind])
            continue
        if kind in _INTEGER_BYTES or kind == 7:
            length = _INTEGER_BYTES.get(kind, 8)
        elif kind >= 12:
            length = (kind - 12) // 2
        else:
            raise _Broken
        data = record[place : place + length]
        if len(data) != length:
            raise _Broken
        place += length
        if kind == 7:
            values.append(struct.unpack(">d", data)[0])
        elif kind < 12:
            values.append(int.from_bytes(data, "big", signed=True))
        elif kind % 2 == 0:
            values.append(data)
        else:
            try:
                values.append(data.decode("utf-8"))
            except UnicodeDecodeError:
                raise _Broken from None
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row begins: in which page image, at which byte of it."""

    image: int
    offset: int
    kind: int


@dataclass(slots=True)
class Found:
    """What was found in a file, by kind. Later images replace earlier ones, events excepted."""

    sessions: dict[int, Row] = field(default_factory=dict)
    session_ids: dict[bytes, int] = field(default_factory=dict)
    leases: dict[int, Row] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], Place] = field(default_factory=dict)
    events: dict[int, dict[int, list[Place]]] = field(default_factory=dict)
    """By session and number, as the rows themselves say."""
    indexed: dict[int, dict[int, int]] = field(default_factory=dict)
    """The positions of events by session and number, as the index says."""
    positions: dict[int, list[Place]] = field(default_factory=dict)
    """Where the rows of events are, by position."""

    def places(self, key: int, seq: int) -> list[Place]:
        """Return where the row with that number may be: a row whose own number is damaged is in the index."""
        own = self.events.get(key, {}).get(seq, [])
        position = self.indexed.get(key, {}).get(seq)
        return list(dict.fromkeys(own + ([] if position is None else self.positions.get(position, []))))


def _is_digest(value: Value) -> bool:
    return isinstance(value, bytes) and len(value) == 16


class Wreck:
    """A damaged database file and its WAL, read page by page.

    No connection of this process may be open on the file: closing it here would drop its locks.
    """

    def __init__(self, path: Path) -> None:
        self._database: BinaryIO = path.open("rb")
        self._frames: BinaryIO | None = None
        self._images: list[tuple[BinaryIO, int]] = []
        self._newest: dict[int, int] = {}
        for number in range(-(-os.fstat(self._database.fileno()).st_size // PAGE)):
            self._newest[number + 1] = len(self._images)
            self._images.append((self._database, number * PAGE))
        wal_path = Path(f"{os.path.realpath(path)}-wal")
        if wal_path.exists():
            self._frames = wal_path.open("rb")
            for number, offset in wal.page_images(self._frames):
                self._newest[number] = len(self._images)
                self._images.append((self._frames, offset))

    def close(self) -> None:
        """Close the files."""
        self._database.close()
        if self._frames is not None:
            self._frames.close()

    def find(self) -> Found:
        """Look at every page for rows that could be ours."""
        found = Found()
        for image in range(len(self._images)):
            page = self._page(image)
            # The first page begins with the file's own header of 100 bytes.
            for start in (0, 100):
                if len(page) > start + 8 and page[start] in (_TABLE_LEAF, _INDEX_LEAF):
                    self._sort_in(found, image, page, start)
        return found

    def _sort_in(self, found: Found, image: int, page: bytes, start: int) -> None:
        count = int.from_bytes(page[start + 3 : start + 5], "big")
        for number in range(min(count, PAGE // 4)):
            pointer = start + 8 + 2 * number
            offset = int.from_bytes(page[pointer : pointer + 2], "big")
            place = Place(image, offset, page[start])
            try:
                rowid, record, size = self._local(place, page)
                # Short rows are decoded at once; of the others only the first few values are needed.
                row = _values(record) if len(record) == size else None
                if page[start] == _INDEX_LEAF:
                    match row:
                        case (bytes(session_id), int(key)):
                            found.session_ids[session_id] = key
                        case (int(key), int(seq), int(position)):
                            found.indexed.setdefault(key, {})[seq] = position
                elif row and len(row) == 8 and _is_digest(row[1]):
                    found.sessions[rowid] = (rowid, *row[1:])
                elif row and len(row) == 7 and _is_digest(row[6]):
                    found.leases[rowid] = row[1:]
                else:
                    self._sort_in_by_head(found, place, rowid, record)
            except _Broken:
                continue

    def _sort_in_by_head(self, found: Found, place: Place, rowid: int, record: bytes) -> None:
        kinds, keys = _head(record)
        if len(kinds) == 11 and kinds[0] == 0 and len(keys) == 3:
            found.positions.setdefault(rowid, []).append(place)
            found.events.setdefault(keys[1], {}).setdefault(keys[2], []).append(place)
        elif len(kinds) == 4:
            found.snapshots[keys[0], keys[1]] = place

    def row(self, place: Place) -> Row | None:
        """Read a row, or None if it cannot be read."""
        try:
            return _values(self._record(place))
        except _Broken:
            return None

    def _page(self, image: int) -> bytes:
        stream, offset = self._images[image]
        stream.seek(offset)
        return stream.read(PAGE)

    def _local(self, place: Place, page: bytes) -> tuple[int, bytes, int]:
        """Return a row's number, the part of its record in this page, and the record's whole size."""
        size, start = _varint(page, place.offset)
        rowid = 0
        if place.kind == _TABLE_LEAF:
            rowid, start = _varint(page, start)
        local = size
        if size > _MOST_LOCAL[place.kind]:
            local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % _OVERFLOW_ROOM
            if local > _MOST_LOCAL[place.kind]:
                local = _LEAST_LOCAL
        record = page[start : start + local]
        # No row is longer than all pages together; a chain of pages that leads back to itself would be.
        if len(record) != local or size > len(self._newest) * PAGE:
            raise _Broken
        return rowid, record, size

    def _record(self, place: Place) -> bytes:
        page = self._page(place.image)
        _, record, size = self._local(place, page)
        if len(record) == size:
            return record
        _, start = _varint(page, place.offset)
        _, start = _varint(page, start)
        start += len(record)
        follow = int.from_bytes(page[start : start + 4], "big")
        parts, length = [record], len(record)
        while length < size:
            image = self._newest.get(follow)
            data = b"" if image is None else self._page(image)
            if len(data) < PAGE:
                raise _Broken
            follow = int.from_bytes(data[:4], "big")
            parts.append(data[4 : 4 + size - length])
            length += len(parts[-1])
        return b"".join(parts)


def _head(record: bytes) -> tuple[list[int], list[int]]:
    """Return a record's types and its first three values, which are numbers in every table that is big."""
    size, place = _varint(record, 0)
    kinds: list[int] = []
    while place < size:
        kind, place = _varint(record, place)
        kinds.append(kind)
        if len(kinds) > 11:
            raise _Broken
    keys: list[int] = []
    place = size
    for kind in kinds[:3]:
        if kind in (0, 8, 9):
            keys.append(1 if kind == 9 else 0)
        elif kind in _INTEGER_BYTES:
            keys.append(int.from_bytes(record[place : place + _INTEGER_BYTES[kind]], "big", signed=True))
            place += _INTEGER_BYTES[kind]
        elif len(keys) == 2:
            break
        else:
            raise _Broken
    return kinds, keys

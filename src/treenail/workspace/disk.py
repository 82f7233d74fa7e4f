"""Small steps on disk that several files of this room share: whole writes, syncs, and checksummed records.

A file of records is only ever appended to. A record that a crash cut off fails its length or its checksum
and is ignored, together with everything behind it.
"""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from collections.abc import Iterator

MAX_RECORD_BYTES = 1 << 31
"""A longer record is taken for damage."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk."""

_HEAD_BYTES = 8


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of the data, however many calls it takes."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def write_new_file(path: str, content: bytes, *, durable: bool, mode: int = 0o400) -> None:
    """Write a file that does not exist yet; one that cannot be completed is removed."""
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


def replace_file(path: str, content: bytes, *, durable: bool, mode: int = 0o400) -> None:
    """Put a file in place with new content, in one step."""
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f"tmp_{secrets.token_hex(8)}")
    write_new_file(temporary, content, mode=mode, durable=durable)
    os.rename(temporary, path)
    if durable:
        sync_directory(directory)


def read_file(path: str) -> bytes | None:
    """Return a file's content, or None if there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def unlink_if_there(path: str) -> None:
    """Remove a file; one that does not exist is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Make a private directory, unless it exists."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def encode_record(payload: bytes) -> bytes:
    """Wrap a record's content with its length and checksum."""
    return b"%b%b%b" % (len(payload).to_bytes(4, "big"), zlib.crc32(payload).to_bytes(4, "big"), payload)


def append_record(path: str, payload: bytes, *, durable: bool) -> None:
    """Append a record to a file; what a crash tore at its end is overwritten."""
    data = read_file(path)
    end = max((offset for offset, _ in decode_records(data or b"")), default=0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        write_all(descriptor, encode_record(payload))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if durable and data is None:
        sync_directory(os.path.dirname(path))


def decode_records(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
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

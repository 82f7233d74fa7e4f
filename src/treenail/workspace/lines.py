"""What a line is, for every filesystem: the same to `read`, to `grep` and to `diff`.

A line ends at `\\n` and nowhere else, so that line 7 of a search is line 7 of a read. A `\\r` before it
belongs to the line's ending. (`str.splitlines` also breaks at form feeds and Unicode separators,
which editors and compilers do not count.)
"""

from __future__ import annotations

import errno

from treenail.workspace.base import MAX_CONVENIENCE_BYTES, ReadResult


def split_lines(text: str) -> list[str]:
    """Cut text into lines that keep their endings; joined, they are the text again."""
    lines = text.split("\n")
    last = lines.pop()
    lines = [line + "\n" for line in lines]
    if last:
        lines.append(last)
    return lines


def check_range(offset: int, limit: int) -> None:
    """Refuse an offset or a limit that makes no sense, with `ValueError`."""
    if offset < 0:
        raise ValueError(f"the offset is {offset}; it counts from 0 and cannot be negative")
    if limit < -1:
        raise ValueError(f"the limit is {limit}; it must be 0 or more, or -1 for everything")


def check_loadable(path: str, size_bytes: int) -> None:
    """Refuse to load more than `MAX_CONVENIENCE_BYTES` at once, with `OSError` (EFBIG)."""
    if size_bytes > MAX_CONVENIENCE_BYTES:
        raise OSError(
            errno.EFBIG,
            f"{size_bytes} bytes are more than the {MAX_CONVENIENCE_BYTES} that are loaded at once; "
            f"stream the file with open_read, or read a part with read_bytes(offset=, limit=)",
            path,
        )


def read_lines(path: str, content: bytes, *, offset: int, limit: int) -> ReadResult:
    """Choose lines of a whole file's content. Raises `ValueError` if it is not UTF-8."""
    check_range(offset, limit)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); "
            f"read it with read_bytes"
        ) from None
    lines = split_lines(text)
    end = len(lines) if limit == -1 else min(len(lines), offset + limit)
    return ReadResult(
        content="".join(lines[offset:end]),
        path=path,
        total_lines=len(lines),
        offset=offset,
        limit=limit,
        truncated=end < len(lines),
    )

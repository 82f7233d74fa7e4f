"""Differences between two boundaries, as text for people and models.

The text is in the unified format that `patch` and code review know. What would not help a reader is
named with its sizes instead of shown: binary content, very large files, and whatever comes after the
whole text has reached its limit.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from treenail.workspace.base import Change, ChangeKind, WorkspaceDiff
from treenail.workspace.lines import split_lines

MAX_SHOWN_BYTES = 256 * 1024
"""A larger file is named, not shown."""

MAX_SHOWN_LINES = 5_000
"""A file with more lines is named, not shown: comparing lines takes time that grows with their square."""

MAX_DIFF_CHARS = 1_000_000
"""The longest text of one diff; the changes that do not fit are counted, and listed in `changes`."""

_BINARY_PROBE_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class Version:
    """What was at a path at one boundary.

    `content` is a file's bytes or a link's target; it may be None for a file that is not worth
    loading (see `MAX_SHOWN_BYTES`), and for a directory. `identity` tells two contents apart without
    loading them: equal identities promise equal contents.
    """

    kind: Literal["file", "directory", "link"]
    permissions: int
    size_bytes: int = 0
    content: bytes | None = None
    identity: object = None


def compare(path: str, before: Version | None, after: Version | None) -> Change | None:
    """Say how a path differs, or None if it does not. Modification times do not count."""
    if before is None and after is None:
        return None
    if before is None or after is None:
        kind: ChangeKind = "added" if before is None else "deleted"
    elif before.kind != after.kind:
        kind = "type"
    elif _content_differs(before, after):
        kind = "modified"
    elif before.permissions != after.permissions and before.kind != "link":
        kind = "mode"
    else:
        return None
    return Change(path=path, kind=kind, before_size=_size(before), after_size=_size(after))


def describe(items: Iterable[tuple[str, Version | None, Version | None]]) -> WorkspaceDiff:
    """Turn pairs of versions into a diff, sorted by path; pairs that do not differ are left out."""
    changes: list[Change] = []
    parts: list[str] = []
    shown_chars = left_out = 0
    for path, before, after in sorted(items, key=lambda item: item[0]):
        change = compare(path, before, after)
        if change is None:
            continue
        changes.append(change)
        part = _change_text(path, before, after) if left_out == 0 else ""
        if left_out or shown_chars + len(part) > MAX_DIFF_CHARS:
            left_out += 1
            continue
        shown_chars += len(part)
        parts.append(part)
    if left_out:
        parts.append(f"... and {left_out} more changed paths, left out of this text\n")
    return WorkspaceDiff(changes=tuple(changes), text="".join(parts))


def unified_text(path: str, before: bytes | None, after: bytes | None) -> str:
    """Return the unified diff of two contents; None stands for a file that is not there.

    Equal contents give an empty text. Binary or very large contents are named with their sizes.
    """
    if before == after:
        return ""
    return _content_text(
        path,
        before,
        after,
        before_size=None if before is None else len(before),
        after_size=None if after is None else len(after),
    )


def is_binary(content: bytes) -> bool:
    """Say whether content is not text: a NUL among its first bytes, as git and grep decide it."""
    return b"\0" in content[:_BINARY_PROBE_BYTES]


def _content_differs(before: Version, after: Version) -> bool:
    if before.kind == "directory":
        return False
    if before.identity is not None and after.identity is not None:
        return before.identity != after.identity
    return before.size_bytes != after.size_bytes or before.content != after.content


def _size(version: Version | None) -> int | None:
    return None if version is None or version.kind == "directory" else version.size_bytes


def _change_text(path: str, before: Version | None, after: Version | None) -> str:
    if before is not None and after is not None and before.kind != after.kind:
        return f"Changed from {_noun(before)} to {_noun(after)}: {shown_path(path)}\n"
    version = after if after is not None else before
    assert version is not None
    if version.kind != "file":
        return _special_text(path, before, after)
    head = ""
    if before is not None and after is not None and before.permissions != after.permissions:
        head = f"Mode of {shown_path(path)}: {before.permissions:04o} -> {after.permissions:04o}\n"
        if not _content_differs(before, after):
            return head
    return head + _content_text(
        path,
        None if before is None else before.content,
        None if after is None else after.content,
        before_size=_size(before),
        after_size=_size(after),
    )


def _special_text(path: str, before: Version | None, after: Version | None) -> str:
    shown = shown_path(path)
    if before is None and after is not None:
        return f"New {_noun(after)}: {shown}\n"
    if after is None and before is not None:
        return f"Deleted {_noun(before)}: {shown}\n"
    assert before is not None
    assert after is not None
    if before.kind == "link":
        return f"Link {shown} now leads to {_target(after)} instead of {_target(before)}\n"
    return f"Mode of {shown}: {before.permissions:04o} -> {after.permissions:04o}\n"


def _noun(version: Version) -> str:
    if version.kind == "directory":
        return "directory"
    if version.kind == "link":
        return f"link to {_target(version)}"
    executable = "executable " if version.permissions & stat.S_IXUSR else ""
    return f"{executable}file ({version.size_bytes} bytes)"


def _target(version: Version) -> str:
    return shown_path((version.content or b"?").decode("utf-8", "replace"))


def _content_text(
    path: str, before: bytes | None, after: bytes | None, *, before_size: int | None, after_size: int | None
) -> str:
    sizes = _sizes(before_size, after_size)
    largest = max(before_size or 0, after_size or 0)
    not_loaded = (before is None and before_size is not None) or (after is None and after_size is not None)
    if largest > MAX_SHOWN_BYTES or not_loaded:
        return f"Large file {shown_path(path)} {sizes}\n"
    if is_binary(before or b"") or is_binary(after or b""):
        return f"Binary file {shown_path(path)} {sizes}\n"
    old = split_lines((before or b"").decode("utf-8", "replace"))
    new = split_lines((after or b"").decode("utf-8", "replace"))
    if max(len(old), len(new)) > MAX_SHOWN_LINES:
        return f"Large file {shown_path(path)} {sizes}\n"
    name = shown_path(path)
    header = [
        "--- /dev/null\n" if before is None else f"--- a/{name}\n",
        "+++ /dev/null\n" if after is None else f"+++ b/{name}\n",
    ]
    # difflib writes its own two header lines; they are replaced, because an absent file has no name.
    body = list(difflib.unified_diff(old, new))[2:]
    if not body and before is not None and after is not None:
        # Different bytes that read the same as text: one of them is not UTF-8.
        return f"Binary file {name} {sizes}\n"
    return "".join(header) + "".join(_terminated(line) for line in body)


def _terminated(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _sizes(before_size: int | None, after_size: int | None) -> str:
    if before_size is None:
        return f"added ({after_size} bytes)"
    if after_size is None:
        return f"deleted ({before_size} bytes)"
    return f"changed ({before_size} -> {after_size} bytes)"


def shown_path(path: str) -> str:
    """Write a path on one line, whatever it holds: control characters and odd bytes are escaped."""
    if path.isprintable():
        return path
    return path.encode("unicode_escape").decode("ascii")


_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")

DiffPart = Literal["head", "hunk", "added", "removed", "same"]
"""What a line of a unified diff is."""


def diff_lines(diff: str) -> Iterator[tuple[DiffPart, str]]:
    """Read a unified diff line by line. A removed line that looks like a heading is a removed line."""
    old = new = 0  # What is left of the hunk.
    for line in diff.removesuffix("\n").split("\n"):
        if old > 0 or new > 0:
            part: DiffPart = {"+": "added", "-": "removed"}.get(line[:1], "same")  # type: ignore[assignment]  # mypy reads the texts as str
            if not line.startswith("\\"):
                old, new = old - (part != "added"), new - (part != "removed")
            yield part, line
        elif hunk := _HUNK.match(line):
            old, new = int(hunk[1] or 1), int(hunk[2] or 1)
            yield "hunk", line
        else:
            yield "head", line


def changed_lines(diff: str) -> tuple[int, int]:
    """Count the lines that a unified diff adds and removes."""
    parts = [part for part, _ in diff_lines(diff)]
    return parts.count("added"), parts.count("removed")

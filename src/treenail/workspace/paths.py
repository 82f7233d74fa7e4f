"""The rules for workspace paths, shared by every filesystem.

A workspace path is text: relative, `/` between segments, `.` for the root. What
a name on disk holds that is not UTF-8 travels in the text by surrogate escapes
(PEP 383), so that every name has exactly one spelling here and comes back as
the same bytes.

These rules are about spelling alone. Whether a path leaves the root by a link is
for the filesystem that walks it to decide.
"""

from __future__ import annotations

from typing import NoReturn

from treenail.errors import PathEscapeError

ROOT = "."
"""The spelling of the root itself."""

MAX_SEGMENT_BYTES = 255
"""The longest name of one path segment, in bytes: what common filesystems allow."""

MAX_DEPTH = 64
"""How many segments a path may have."""

MAX_LINKS = 40
"""How many links one path may lead through: what Linux allows."""

MAX_PATTERN_CHARS = 4_096
"""The longest glob pattern."""


def encode(text: str) -> bytes:
    """Turn a path into the bytes that the disk knows it by.

    Raises `ValueError` for text that no name on disk can be spelled with.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"the path {text!r} holds characters that no file name can hold: {error}") from None


def encode_content(path: str, text: str) -> bytes:
    """Turn the text for a file into UTF-8. Raises `ValueError` that names the path and the character."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text for {path!r} cannot be written as UTF-8: character {error.start} is a lone surrogate"
        ) from None


def decode(name: bytes) -> str:
    """Turn bytes from the disk into path text; `encode` gives the same bytes back."""
    return name.decode("utf-8", "surrogateescape")


def normalize(path: str) -> str:
    """Return the one spelling of a path: no empty or `.` segments, no trailing slash, `.` for the root.

    Raises `PathEscapeError` for an absolute path or one with a `..` segment, and `ValueError`
    for a NUL, a segment longer than `MAX_SEGMENT_BYTES` or a path deeper than `MAX_DEPTH`.
    """
    if "\0" in path:
        raise ValueError(f"the path {path!r} holds a NUL character, which no file name can hold")
    if path.startswith("/"):
        raise PathEscapeError(
            f"the path {path!r} is absolute; workspace paths are relative to the workspace root"
        )
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if ".." in segments:
        raise PathEscapeError(
            f"the path {path!r} has a '..' segment; name the path from the workspace root instead"
        )
    if len(segments) > MAX_DEPTH:
        raise ValueError(
            f"the path {path[:80]!r}... is {len(segments)} segments deep; at most {MAX_DEPTH} are allowed"
        )
    for segment in segments:
        # Cheap test first: a segment of n characters has at most 4n bytes.
        if len(segment) * 4 > MAX_SEGMENT_BYTES or not segment.isascii():
            size = len(encode(segment))
            if size > MAX_SEGMENT_BYTES:
                raise ValueError(
                    f"the path segment {segment[:40]!r}... is {size} bytes long; "
                    f"at most {MAX_SEGMENT_BYTES} are allowed"
                )
    return "/".join(segments) or ROOT


def split(path: str) -> tuple[str, ...]:
    """Return the segments of a normalised path; the root has none."""
    return () if path == ROOT else tuple(path.split("/"))


def parent(path: str) -> str:
    """Return the directory that holds a normalised path; the root's parent is the root."""
    return path.rpartition("/")[0] or ROOT


def name(path: str) -> str:
    """Return the last segment of a normalised path; the root's name is `.`."""
    return path.rpartition("/")[2]


def join(directory: str, child: str) -> str:
    """Put a normalised relative path below a normalised directory."""
    if directory == ROOT:
        return child
    if child == ROOT:
        return directory
    return f"{directory}/{child}"


def is_below(path: str, directory: str) -> bool:
    """Say whether a normalised path lies strictly below a normalised directory."""
    if directory == ROOT:
        return path != ROOT
    return path.startswith(directory + "/")


def fail(number: int, reason: str, path: str) -> NoReturn:
    """Raise the `OSError` that belongs to an error number, such as `FileNotFoundError`."""
    raise OSError(number, reason, path)

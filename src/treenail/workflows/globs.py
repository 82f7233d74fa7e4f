"""Glob patterns as sets of paths: which paths match, and whether two patterns have a path in common.

`src/**` and `*/util.py` overlap; `src/*.py` and `src/*.md` do not. A pattern is a sequence of segments: `**`
stands for any number of segments, and within a segment `*` stands for any characters and `?` for one. Both
levels ask the same question about two sequences, which `_meet` answers by following both at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from treenail.errors import UsageError

MAX_PATTERN_CHARS = 512


def check_glob(pattern: str) -> str:
    """Return a valid pattern, or raise `UsageError` that says what is wrong with it."""
    if not pattern or len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"{pattern[:40]!r} is not a glob: it is empty, or longer than {MAX_PATTERN_CHARS}")
    if pattern.startswith("/") or "\\" in pattern or "\0" in pattern:
        raise UsageError(f"{pattern!r} must be relative to the workspace, with forward slashes")
    if "[" in pattern:
        raise UsageError(f"{pattern!r} has a [, and classes of characters are not supported; use ? or *")
    for segment in pattern.split("/"):
        if segment in ("", ".", ".."):
            raise UsageError(f"{pattern!r} has the segment {segment!r}; write a plain relative path")
        if "**" in segment and segment != "**":
            raise UsageError(f"{pattern!r} has ** inside a segment; it must stand alone: src/**/x")
    return pattern


def matches(path: str, pattern: str) -> bool:
    """Say whether a path matches a pattern."""
    return _compiled(pattern).fullmatch(path) is not None


def overlaps(first: str, second: str) -> bool:
    """Say whether some path matches both patterns."""
    return _meet(_segments(first), _segments(second), "**", _names_meet)


def _segments(pattern: str) -> tuple[str, ...]:
    """Return a pattern's segments. `a/**` is everything below `a`, and `a` is not below itself."""
    segments = pattern.split("/")
    return (*segments[:-1], "*", "**") if segments[-1] == "**" else tuple(segments)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    tokens = {"/**": "(?:/[^/]+)*", "**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*$|\*|\?)", "/".join(_segments(pattern)))
    return re.compile("".join(tokens.get(part, re.escape(part)) for part in parts), re.DOTALL)


@lru_cache(maxsize=4096)
def _names_meet(first: str, second: str) -> bool:
    """Say whether some name matches both segments."""
    return _meet(first, second, "*", lambda one, other: one == other or "?" in (one, other), at_least=1)


def _meet(
    first: Sequence[str],
    second: Sequence[str],
    wildcard: str,
    meet: Callable[[str, str], bool],
    *,
    at_least: int = 0,
) -> bool:
    """Say whether two sequences can stand for the same one, of at least that length.

    The wildcard stands for any number of elements; other elements meet or do not. A state is a place in each
    sequence and whether an element has been read.
    """
    seen: set[tuple[int, int, bool]] = set()
    waiting = [(0, 0, at_least == 0)]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        i, j, enough = state
        if i == len(first) and j == len(second):
            if enough:
                return True
            continue
        one = first[i] if i < len(first) else None
        other = second[j] if j < len(second) else None
        if one == wildcard:
            waiting.append((i + 1, j, enough))
        if other == wildcard:
            waiting.append((i, j + 1, enough))
        if one is None or other is None:
            continue
        # Both read one element: a wildcard stays where it is.
        if wildcard in (one, other) or meet(one, other):
            waiting.append((i + (one != wildcard), j + (other != wildcard), True))
    return False

"""Do two glob patterns have a path in common?

Patterns are compared as the sets of paths that they stand for, not as text: `src/**` and `*/util.py` overlap,
`src/*.py` and `src/*.md` do not. A pattern is a sequence of segments; `**` stands for any number of segments,
and within a segment `*` stands for any characters, `?` for one, `[abc]` or `[a-z]` for one of several (with a
`!` first for none of them). Both levels are the same question about two small automata, answered by following
both at once and remembering where one has been.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from treenail.errors import UsageError

T = TypeVar("T")

MAX_PATTERN_CHARS = 512
_SPANS = "**"


@dataclass(frozen=True, slots=True)
class _Any:
    """Any run of characters."""


@dataclass(frozen=True, slots=True)
class _One:
    """One character: of these, or not of these."""

    chars: frozenset[str] | None
    negated: bool = False

    def meets(self, other: _One) -> bool:
        """Whether some character is both."""
        if self.chars is None or other.chars is None:
            return not (self.chars == frozenset() or other.chars == frozenset())
        if self.negated and other.negated:
            return True  # There are more characters than two classes can leave out.
        if self.negated or other.negated:
            wanted, left_out = (other, self) if self.negated else (self, other)
            return bool((wanted.chars or frozenset()) - (left_out.chars or frozenset()))
        return bool(self.chars & other.chars)


_ANY = _Any()
_Piece = _Any | _One


def check_glob(pattern: str) -> str:
    """Return a pattern that can be used, or raise `UsageError` that says what is wrong with it."""
    if not pattern or len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"{pattern[:40]!r} is no glob: it is empty, or longer than {MAX_PATTERN_CHARS}")
    if pattern.startswith("/") or "\\" in pattern or "\0" in pattern:
        raise UsageError(f"{pattern!r} must be relative to the workspace, with forward slashes")
    for segment in pattern.split("/"):
        if segment in ("", ".", ".."):
            raise UsageError(f"{pattern!r} has the segment {segment!r}; write a plain relative path")
        if "**" in segment and segment != "**":
            raise UsageError(f"{pattern!r} has ** inside a segment; it must stand alone: src/**/x")
        _pieces(segment)
    return pattern


def overlaps(first: str, second: str) -> bool:
    """Say whether some path matches both patterns."""
    return _meet(
        _split(first),
        _split(second),
        lambda segment: segment == _SPANS,
        _segments_meet,
    )


def matches(path: str, pattern: str) -> bool:
    """Say whether a path matches a pattern."""
    return _compiled(pattern).fullmatch(path) is not None


def _split(pattern: str) -> tuple[str, ...]:
    """Return a pattern's segments. `a/**` is everything below `a`, and `a` is not below itself."""
    segments = pattern.split("/")
    return (*segments[:-1], "*", _SPANS) if segments[-1] == _SPANS else tuple(segments)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    segments = _split(pattern)
    ends_open = segments[-1] == _SPANS
    named = segments[:-1] if ends_open else segments
    parts: list[str] = []
    for place, segment in enumerate(named):
        if segment == _SPANS:
            parts.append("(?:[^/]+/)*")
        else:
            parts.append("".join(map(_as_regex, _pieces(segment))))
            parts.append("/" if place < len(named) - 1 else "")
    return re.compile("".join(parts) + ("(?:/[^/]+)*" if ends_open else ""), re.DOTALL)


def _as_regex(piece: _Piece) -> str:
    if isinstance(piece, _Any):
        return "[^/]*"
    if piece.chars is None:
        return "[^/]"
    inside = "".join(map(re.escape, sorted(piece.chars)))
    return f"[^/{inside}]" if piece.negated else f"[{inside}]"


@lru_cache(maxsize=4096)
def _pieces(segment: str) -> tuple[_Piece, ...]:
    found: list[_Piece] = []
    place = 0
    while place < len(segment):
        char = segment[place]
        if char == "*":
            if not found or found[-1] is not _ANY:
                found.append(_ANY)
            place += 1
        elif char == "?":
            found.append(_One(None))
            place += 1
        elif char == "[":
            end = segment.find("]", place + 2)
            if end < 0:
                raise UsageError(f"the glob segment {segment!r} has a [ without its ]")
            found.append(_class(segment[place + 1 : end], segment))
            place = end + 1
        else:
            found.append(_One(frozenset(char)))
            place += 1
    return tuple(found)


def _class(text: str, segment: str) -> _One:
    negated = text[0] in "!^"
    text = text[1:] if negated else text
    chars: set[str] = set()
    place = 0
    while place < len(text):
        if place + 2 < len(text) and text[place + 1] == "-":
            low, high = ord(text[place]), ord(text[place + 2])
            if low > high or high - low > 0x1000:
                raise UsageError(f"the glob segment {segment!r} has a range that cannot be used")
            chars.update(map(chr, range(low, high + 1)))
            place += 3
        else:
            chars.add(text[place])
            place += 1
    chars.discard("/")
    if not chars and not negated:
        raise UsageError(f"the glob segment {segment!r} has a class without characters")
    return _One(frozenset(chars), negated)


@lru_cache(maxsize=4096)
def _segments_meet(first: str, second: str) -> bool:
    """Say whether some name, which is not empty, matches both segments."""

    def meets(one: _Piece, other: _Piece) -> bool:
        assert isinstance(one, _One)
        assert isinstance(other, _One)
        return one.meets(other)

    return _meet(_pieces(first), _pieces(second), lambda piece: piece is _ANY, meets, needs_one=True)


def _meet(
    first: Sequence[T],
    second: Sequence[T],
    spans: Callable[[T], bool],
    meets: Callable[[T, T], bool],
    *,
    needs_one: bool = False,
) -> bool:
    """Follow two patterns at once: is there a word that both accept?

    An element that spans stands for any number of letters. With `needs_one` the word is not empty.
    """
    seen: set[tuple[int, int, bool]] = set()
    waiting = [(0, 0, not needs_one)]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        i, j, fed = state
        if i == len(first) and j == len(second):
            if fed:
                return True
            continue
        one = first[i] if i < len(first) else None
        other = second[j] if j < len(second) else None
        if one is not None and spans(one):
            waiting.append((i + 1, j, fed))
            if other is not None and not spans(other):
                waiting.append((i, j + 1, True))
            elif other is not None:
                waiting.append((i, j, True))
        if other is not None and spans(other):
            waiting.append((i, j + 1, fed))
            if one is not None and not spans(one):
                waiting.append((i + 1, j, True))
        if (
            one is not None
            and other is not None
            and not spans(one)
            and not spans(other)
            and meets(one, other)
        ):
            waiting.append((i + 1, j + 1, True))
    return False

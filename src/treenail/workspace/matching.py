"""Regular expressions from a model, matched without letting one freeze the process.

Theory of operation
-------------------
Python's `re` backtracks and holds the interpreter while it does: `(a+)+b` on thirty characters of
text stops every thread of the process, deadlines and cancellation included, and nothing inside the
process can end it. So only a pattern without any repetition or alternative is matched here. Any other is
matched by a child process that runs nothing but `re`, with a time limit for the search as a whole: when the
time is over the child is killed and the search ends in `TimeoutError`. The child costs a few hundredths of a
second per batch of lines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

MAX_LINE_CHARS = 4_096
"""Only this much of a line is searched and shown."""

MAX_PATTERN_CHARS = 1_000
"""The longest regular expression."""

MAX_MATCHING_SECONDS = 10.0
"""How long the patterns that may run away can take, for one search."""

_BACKTRACKING = frozenset("*+?{|")
"""A pattern with none of these characters takes time in proportion to the text."""

_CHILD = """
import json, re, sys
pattern, lines = json.load(sys.stdin)
found = ((index, re.search(pattern, line)) for index, line in enumerate(lines))
print(json.dumps([(index, *match.span()) for index, match in found if match]))
"""


class LineMatch(NamedTuple):
    """Where a line matched; `line` is its place in the batch, from zero."""

    line: int
    start: int
    end: int


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression, or raise `ValueError` that says what is wrong and where."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(
            f"the regular expression is {len(pattern)} characters long; at most {MAX_PATTERN_CHARS} "
            f"are allowed: search for a distinctive part of it"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise ValueError(
            f"the regular expression {pattern!r} is not valid{where}: {error.msg}; "
            f"put a backslash before characters that are meant literally"
        ) from None
    except (OverflowError, RecursionError, Warning) as error:  # warnings, where they are errors
        raise ValueError(f"the regular expression {pattern[:80]!r} cannot be used: {error}") from None


class LineMatcher:
    """Finds the first match of a pattern in each line; `timeout_s` bounds its work in child processes."""

    def __init__(self, pattern: str, *, timeout_s: float = MAX_MATCHING_SECONDS) -> None:
        self._compiled = compile_pattern(pattern)
        self._pattern = pattern
        self._timeout_s = timeout_s
        self._left_s = timeout_s

    def find(self, lines: Sequence[str]) -> list[LineMatch]:
        """Return the lines that match, in order. Lines hold no line endings."""
        shown = [line[:MAX_LINE_CHARS] for line in lines]
        if not _BACKTRACKING.isdisjoint(self._pattern):
            return self._find_in_child(shown)
        found = ((index, self._compiled.search(line)) for index, line in enumerate(shown))
        return [LineMatch(index, *match.span()) for index, match in found if match is not None]

    def _find_in_child(self, lines: Sequence[str]) -> list[LineMatch]:
        started = time.monotonic()
        try:
            # Isolated and without site packages: the child starts fast and runs no code but the above.
            child = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=json.dumps([self._pattern, lines]).encode("ascii"),
                capture_output=True,
                timeout=max(0.0, self._left_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._left_s = 0.0
            raise TimeoutError(
                f"the regular expression {self._pattern!r} was still running after "
                f"{self._timeout_s:g} s; nested or repeated repetitions such as (a+)+ take "
                f"exponential time: simplify the pattern, or search fewer files"
            ) from None
        self._left_s -= time.monotonic() - started
        if child.returncode != 0:
            raise OSError(f"the process that matched {self._pattern!r} ended unexpectedly")
        return [LineMatch(*match) for match in json.loads(child.stdout)]

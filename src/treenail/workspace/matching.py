"""Regular expressions from a model, matched without letting one freeze the process.

Theory of operation
-------------------
Python's `re` backtracks and holds the interpreter while it does: `(a+)+b` on thirty characters of
text stops every thread of the process, deadlines and cancellation included, and nothing inside the
process can end it. So a pattern is sorted by its spelling, before it is used:

- A pattern with at most one repetition, and no alternative beside it, takes at worst quadratic time
  in the length of a line; lines are cut at `MAX_LINE_CHARS`, so that is milliseconds. It is matched here.
- Any other pattern is matched by a child process that runs nothing but `re`, with a time limit for
  the search as a whole. When the time is over the child is killed and the search ends in
  `TimeoutError`. The child costs a few hundredths of a second, once per search.

The sorting is by counting characters, on purpose: it needs no knowledge of `re`'s internals and errs
towards the child, where a wrong guess costs a little time and never a hang.
"""

from __future__ import annotations

import json
import re
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

MAX_LINE_CHARS = 4_096
"""Only this much of a line is searched and shown."""

MAX_PATTERN_CHARS = 1_000
"""The longest regular expression."""

MAX_MATCHING_SECONDS = 10.0
"""How long the patterns that may run away can take, for one search."""


class LineMatch(NamedTuple):
    """Where a line matched; `line` is its place in the batch, from zero."""

    line: int
    start: int
    end: int


class LineMatcher(Protocol):
    """Finds the first match in each line of a batch."""

    def find(self, lines: Sequence[str]) -> list[LineMatch]:
        """Return the lines that match, in order. Lines hold no line endings."""
        ...


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


def may_run_away(pattern: str) -> bool:
    """Say whether matching the pattern might take more than quadratic time.

    True may be wrong, false may not.
    """
    repetitions = 0
    alternatives = False
    backreferences = False
    index = 0
    in_class = False
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            backreferences = backreferences or pattern[index + 1 : index + 2].isdigit()
            index += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            # A `]` that comes first, or first after `^`, is a member and does not close the class.
            index += 1 if pattern[index + 1 : index + 2] == "^" else 0
            index += 1 if pattern[index + 1 : index + 2] == "]" else 0
        elif char == "(" and pattern[index + 1 : index + 2] == "?":
            backreferences = backreferences or pattern[index + 2 : index + 4] == "P="
            index += 1
        elif char in "*+?{":
            repetitions += 1
        elif char == "|":
            alternatives = True
        index += 1
    return repetitions > 1 or (repetitions == 1 and (alternatives or backreferences))


@contextmanager
def open_matcher(pattern: str, *, timeout_s: float = MAX_MATCHING_SECONDS) -> Iterator[LineMatcher]:
    """Open a matcher for one search. `timeout_s` bounds all of its work on a pattern that may run away."""
    compiled = compile_pattern(pattern)
    if not may_run_away(pattern):
        yield _HereMatcher(compiled)
        return
    child = _ChildMatcher(pattern, timeout_s)
    try:
        yield child
    finally:
        child.close()


class _HereMatcher:
    """Matches in this process."""

    def __init__(self, compiled: re.Pattern[str]) -> None:
        self._search = compiled.search

    def find(self, lines: Sequence[str]) -> list[LineMatch]:
        found = []
        for index, line in enumerate(lines):
            match = self._search(line[:MAX_LINE_CHARS])
            if match is not None:
                found.append(LineMatch(index, match.start(), match.end()))
        return found


# The child reads frames (length, then that many bytes) and answers each with a frame: first the
# pattern, then batches of lines. It ends when its input ends.
_CHILD = """
import json, re, struct, sys
source, sink = sys.stdin.buffer, sys.stdout.buffer
def receive():
    head = source.read(4)
    if len(head) < 4:
        sys.exit(0)
    return source.read(struct.unpack("<I", head)[0])
search = re.compile(receive().decode("utf-8", "surrogatepass")).search
while True:
    found = []
    for index, line in enumerate(receive().decode("utf-8", "surrogatepass").split("\\n")):
        match = search(line)
        if match is not None:
            found.append((index, match.start(), match.end()))
    answer = json.dumps(found).encode()
    sink.write(struct.pack("<I", len(answer)) + answer)
    sink.flush()
"""


class _ChildMatcher:
    """Matches in a process that can be killed."""

    def __init__(self, pattern: str, timeout_s: float) -> None:
        self._pattern = pattern
        self._timeout_s = timeout_s
        self._left_s = timeout_s
        # Isolated and without site packages: the child starts fast and runs no code but the above.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # what a buffer had taken in already, a selector would wait for in vain
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._send(pattern)

    def find(self, lines: Sequence[str]) -> list[LineMatch]:
        if not lines:
            return []
        started = time.monotonic()
        self._send("\n".join(line[:MAX_LINE_CHARS] for line in lines))
        (length,) = struct.unpack("<I", self._receive(4, started))
        found = json.loads(self._receive(length, started))
        self._left_s -= time.monotonic() - started
        return [LineMatch(*match) for match in found]

    def close(self) -> None:
        self._process.kill()
        self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _send(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        # The child takes in a whole frame before it works on it, so this cannot block for long.
        frame = memoryview(struct.pack("<I", len(data)) + data)
        while frame:
            frame = frame[self._stdin.write(frame) :]

    def _receive(self, count: int, started: float) -> bytes:
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while len(received) < count:
                left_s = self._left_s - (time.monotonic() - started)
                if left_s <= 0 or not selector.select(left_s):
                    raise TimeoutError(
                        f"the regular expression {self._pattern!r} was still running after "
                        f"{self._timeout_s:g} s; nested or repeated repetitions such as (a+)+ take "
                        f"exponential time: simplify the pattern, or search fewer files"
                    )
                chunk = self._stdout.read(count - len(received))
                if not chunk:
                    raise OSError(f"the process that matched {self._pattern!r} ended unexpectedly")
                received += chunk
        return received

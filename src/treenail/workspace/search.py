"""Finding paths and lines, the same way in every filesystem.

A filesystem lends its eyes, a function that lists a directory and one that opens a file, and gets
back results that do not depend on how it stores its tree.

A glob pattern is a path whose segments may hold `*` (any characters), `?` (one character) and
`[abc]`, `[a-z]`, `[!abc]` (one of, none of); `{one,two}` stands for either; a segment `**` crosses any
number of directories, none included, and at the end of a pattern it is everything below. A trailing
`/` matches directories alone. Names that begin with a dot are matched like any other. Matching is by
sets of positions, never by backtracking, so no pattern is slow.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import BinaryIO

from treenail.errors import PathEscapeError
from treenail.workspace.base import MAX_GREP_MATCHES, FileEntry, GlobMatch, GrepMatch
from treenail.workspace.matching import MAX_LINE_CHARS, LineMatcher
from treenail.workspace.paths import MAX_PATTERN_CHARS, ROOT, join, split

MAX_ALTERNATIVES = 64
"""How many patterns the braces of one pattern may stand for."""

_CHUNK_BYTES = 1024 * 1024
_BATCH_CHARS = 2 * 1024 * 1024
_BINARY_PROBE_BYTES = 8_192
_WILD = frozenset("*?[")

ListDirectory = Callable[[str], Iterable[FileEntry]]
"""Lists one directory, given by its normalised path."""

OpenFile = Callable[[str], BinaryIO]
"""Opens one file, given by its normalised path."""

_Position = tuple[int, int]
"""An alternative, and how many of its segments are matched."""


# --- glob ------------------------------------------------------------------------------------------


class GlobPattern:
    """A compiled glob pattern. See the module for what it may hold; `compile_glob` makes it."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.directories_only = pattern.endswith("/")
        self._alternatives = [_segments(pattern, choice) for choice in _expand_braces(pattern)]

    def matches(self, path: str) -> bool:
        """Say whether a normalised path, relative to where the pattern applies, matches as a whole."""
        positions = self.start()
        for name in split(path):
            positions = self.step(positions, name)
        return path != ROOT and self.accepts(positions)

    def start(self) -> frozenset[_Position]:
        """Return the positions before the first segment."""
        return self._settle({(number, 0) for number in range(len(self._alternatives))})

    def step(self, positions: frozenset[_Position], name: str) -> frozenset[_Position]:
        """Return the positions after one more segment; none left means that nothing below can match."""
        after: set[_Position] = set()
        for number, done in positions:
            segments = self._alternatives[number]
            if done == len(segments):
                continue
            segment = segments[done]
            if segment is None:
                after.add((number, done))
                if done == len(segments) - 1:
                    after.add((number, done + 1))
            elif segment(name):
                after.add((number, done + 1))
        return self._settle(after)

    def accepts(self, positions: frozenset[_Position]) -> bool:
        """Say whether what was stepped over is a match."""
        return any(done == len(self._alternatives[number]) for number, done in positions)

    def may_continue(self, positions: frozenset[_Position]) -> bool:
        """Say whether something below what was stepped over may match."""
        return any(done < len(self._alternatives[number]) for number, done in positions)

    def _settle(self, positions: set[_Position]) -> frozenset[_Position]:
        # `**` may stand for no directory at all, except at the end, where it needs something to match.
        settled: set[_Position] = set()
        for number, done in positions:
            segments = self._alternatives[number]
            position = done
            settled.add((number, position))
            while position < len(segments) - 1 and segments[position] is None:
                position += 1
                settled.add((number, position))
        return frozenset(settled)


@lru_cache(maxsize=256)
def compile_glob(pattern: str) -> GlobPattern:
    """Compile a glob pattern.

    Raises `PathEscapeError` for an absolute pattern or one with `..`, and `ValueError` for one that
    is empty, too long, or whose braces stand for too much.
    """
    return GlobPattern(pattern)


def _segments(pattern: str, choice: str) -> list[Callable[[str], object] | None]:
    """Compile one brace-free choice; None stands for `**`."""
    if "\0" in choice:
        raise ValueError(f"the glob pattern {pattern!r} holds a NUL character, which no file name can hold")
    if choice.startswith("/"):
        raise PathEscapeError(
            f"the glob pattern {pattern!r} is absolute; patterns are relative to the workspace root"
        )
    segments: list[Callable[[str], object] | None] = []
    for segment in choice.split("/"):
        if segment == "..":
            raise PathEscapeError(
                f"the glob pattern {pattern!r} has a '..' segment; name the directory instead"
            )
        if segment in ("", "."):
            continue
        if segment == "**":
            # Runs of `**` mean the same as one.
            if not segments or segments[-1] is not None:
                segments.append(None)
        elif _WILD.isdisjoint(segment):
            segments.append(segment.__eq__)
        else:
            # The standard translation of one segment matches without backtracking over stars.
            segments.append(re.compile(fnmatch.translate(segment)).match)
    if not segments:
        raise ValueError(
            f"the glob pattern {pattern!r} names nothing; use '*' for the entries of a directory"
        )
    return segments


def _expand_braces(pattern: str) -> list[str]:
    """Return the patterns that the innermost-first expansion of `{a,b}` gives, in order."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(
            f"the glob pattern is {len(pattern)} characters long; at most {MAX_PATTERN_CHARS} are allowed"
        )
    pending, done = [pattern], []
    while pending:
        choice = pending.pop()
        brace = re.search(r"\{([^{}]*,[^{}]*)\}", choice)
        if brace is None:
            done.append(choice)
        else:
            head, tail = choice[: brace.start()], choice[brace.end() :]
            pending.extend(head + option + tail for option in reversed(brace.group(1).split(",")))
        if len(pending) + len(done) > MAX_ALTERNATIVES:
            raise ValueError(
                f"the braces of the glob pattern {pattern!r} stand for more than {MAX_ALTERNATIVES} patterns"
            )
    return done


def glob_tree(list_directory: ListDirectory, pattern: str, *, path: str = ROOT) -> list[GlobMatch]:
    """Match the paths below a normalised directory, sorted by path. Links are matched, not followed."""
    glob = compile_glob(pattern)
    found: list[GlobMatch] = []
    pending = [(path, glob.start())]
    while pending:
        directory, positions = pending.pop()
        for entry in _list(list_directory, directory, strict=directory == path):
            after = glob.step(positions, entry.name)
            if glob.accepts(after) and (entry.is_directory or not glob.directories_only):
                found.append(GlobMatch(path=join(directory, entry.name), is_file=entry.is_file))
            if entry.is_directory and glob.may_continue(after):
                pending.append((join(directory, entry.name), after))
    found.sort(key=lambda match: match.path)
    return found


def _list(list_directory: ListDirectory, directory: str, *, strict: bool) -> Iterable[FileEntry]:
    """List a directory; below the starting point, one that vanished or is closed to us is empty."""
    try:
        return list_directory(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if strict:
            raise
        return ()


# --- grep ------------------------------------------------------------------------------------------


def grep_tree(
    list_directory: ListDirectory,
    open_file: OpenFile,
    pattern: str,
    *,
    path: str = ROOT,
    is_file: bool = False,
    glob: str | None = None,
    max_matches: int = MAX_GREP_MATCHES,
) -> list[GrepMatch]:
    """Search the files below a normalised directory, or one file (`is_file`), line by line.

    A `glob` without a slash is matched with names at any depth, one with a slash with paths relative
    to `path`. Binary files (a NUL among the first bytes) and files that cannot be opened are skipped;
    text that is not UTF-8 is searched with its odd bytes replaced; a line counts up to
    `MAX_LINE_CHARS`. Raises `ValueError` for an expression that is not valid, and `TimeoutError` for
    one that runs away.
    """
    if max_matches < 1:
        raise ValueError(f"max_matches is {max_matches}; at least one match must be asked for")
    # The expression is checked before the tree is walked: the caller's mistake is reported first.
    matcher = LineMatcher(pattern)
    if is_file:
        paths = [path]
    else:
        wanted = "**" if glob is None else glob if "/" in glob else f"**/{glob}"
        paths = [match.path for match in glob_tree(list_directory, wanted, path=path) if match.is_file]
    return list(islice(_grep_files(paths, open_file, matcher, strict=is_file), max_matches))


def _grep_files(
    paths: Sequence[str], open_file: OpenFile, matcher: LineMatcher, *, strict: bool
) -> Iterator[GrepMatch]:
    # Lines of many small files go to the matcher together, because it may be another process.
    # `origins` says where each run of lines came from: (its place in the batch, path, line number).
    lines: list[str] = []
    origins: list[tuple[int, str, int]] = []
    size = 0
    for path in paths:
        try:
            stream = open_file(path)
        except OSError:
            if strict:
                raise
            continue
        number = 1
        with stream:
            for run in _line_runs(stream):
                origins.append((len(lines), path, number))
                lines += run
                number += len(run)
                size += sum(map(len, run)) + len(run)
                if size >= _BATCH_CHARS:
                    yield from _match_batch(lines, origins, matcher)
                    lines, origins, size = [], [], 0
    if lines:
        yield from _match_batch(lines, origins, matcher)


def _match_batch(
    lines: list[str], origins: list[tuple[int, str, int]], matcher: LineMatcher
) -> Iterator[GrepMatch]:
    place = 0
    for match in matcher.find(lines):
        while place + 1 < len(origins) and origins[place + 1][0] <= match.line:
            place += 1
        start, path, number = origins[place]
        yield GrepMatch(
            path=path,
            line_number=number + match.line - start,
            line_content=lines[match.line],
            match_start=match.start,
            match_end=match.end,
        )


def _line_runs(stream: BinaryIO) -> Iterator[list[str]]:
    """Cut a text file into lists of lines without endings, each line cut at `MAX_LINE_CHARS`.

    Memory stays bounded however large the file or a line of it is. A binary file has no lines.
    """
    # A character of UTF-8 has at most four bytes, so this much of a line is enough of it.
    keep = MAX_LINE_CHARS * 4
    chunk = stream.read(_CHUNK_BYTES)
    if b"\0" in chunk[:_BINARY_PROBE_BYTES]:
        return
    open_line = b""
    while chunk:
        *complete, rest = chunk.split(b"\n")
        if complete:
            complete[0] = open_line + complete[0]
            yield [_shown(line[:keep]) for line in complete]
            open_line = rest[:keep]
        elif len(open_line) < keep:
            open_line = (open_line + rest)[:keep]
        # A `\r` that ends an over-long line is beyond what is kept, as is the rest of the line.
        chunk = stream.read(_CHUNK_BYTES)
    if open_line:
        yield [_shown(open_line)]


def _shown(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")[:MAX_LINE_CHARS]

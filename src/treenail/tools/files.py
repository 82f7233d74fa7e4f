"""Tools for files: read, write, edit, list, find, search, delete, move.

Each answers in text that a model can act on. Long answers are cut, and say how to see the rest. A mistake
(a missing file, text that does not match) is a failed result that says what is there instead. Paths are
relative to the workspace root.

Searches leave out names that begin with a dot (`.git`, `.venv`, `.env`), unless the request includes them.
Searches and listings leave out what `.gitignore` and `.treenailignore` ignore, likewise. A file that is named
by its path can always be read.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from treenail.errors import PathEscapeError, ReadOnlyError
from treenail.tools.context import ToolContext
from treenail.tools.tool import Effects, ReadyTool, Tool, ToolExample, ToolResult, described
from treenail.workspace import (
    Filesystem,
    GrepMatch,
    VisibleTree,
    compile_pattern,
    glob_tree,
    grep_tree,
    is_binary,
    normalize,
    parent,
    split_lines,
    unified_text,
)
from treenail.workspace import name as last_segment

MAX_RESULT_CHARS = 30_000
"""The longest answer of any of these tools, without its notes."""

MAX_LINE_CHARS = 2_000
"""The longest line that `read_file` shows whole."""

MAX_MATCH_CHARS = 300
"""The longest line that `grep_files` shows whole."""

MAX_READ_LINES = 1_000
"""How many lines `read_file` shows at once."""

MAX_ENTRIES = 500
"""How many paths `list_directory` and `glob_files` show at once."""

MAX_MATCHES = 200
"""How many matches `grep_files` shows at once."""

_MAX_COMPARED_LINES = 5_000
_MAX_DIFF_CHARS = 4_000

_Answer = ToolResult[str]


_MAX_NAMED_MATCHES = 20
"""How many places a refused edit names."""

_PATH = "Path relative to the workspace root, such as src/app.py."

_INCLUDE_IGNORED = "Also show what .gitignore and .treenailignore ignore."


# --- mistakes --------------------------------------------------------------------------------------


def _file_tool(
    effects: Effects, description: str, *examples: ToolExample[Any, str]
) -> Callable[[Callable[..., _Answer]], Tool[Any, str]]:
    """Make a tool of a handler; errors of the filesystem become failed results that a model can act on."""

    def make(handler: Callable[..., _Answer]) -> Tool[Any, str]:
        @functools.wraps(handler)
        def explained(params: Any, *, context: ToolContext) -> _Answer:
            try:
                return handler(params, context=context)
            except ReadOnlyError:
                return ToolResult.error("The workspace is read-only here; nothing was changed.")
            except FileNotFoundError as error:
                return ToolResult.error(_not_found(context.filesystem, str(error.filename or "")))
            except (PathEscapeError, ValueError) as error:
                return ToolResult.error(f"{_sentence(error)} Nothing was changed.")
            except OSError as error:
                path = f"{error.filename}: " if error.filename else ""
                return ToolResult.error(f"{path}{error.strerror or error}. Nothing was changed.")

        return ReadyTool(
            name=handler.__name__,
            description=description,
            handler=explained,
            effects=effects,
            examples=examples,
        )

    return make


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _not_found(filesystem: Filesystem, path: str) -> str:
    """Return a message for a path without a file, with similar names that exist."""
    text = f"There is nothing at {path!r}."
    try:
        directory = parent(normalize(path))
        names = [entry.name for entry in filesystem.list(directory)]
    except (OSError, ValueError):
        return f"{text} Its directory does not exist either; list_directory shows what is there."
    close = difflib.get_close_matches(last_segment(path), names[:_MAX_COMPARED_LINES], n=3)
    if close:
        prefix = "" if directory == "." else f"{directory}/"
        return f"{text} Did you mean {' or '.join(prefix + each for each in close)}?"
    return f"{text} list_directory shows what is in {directory!r}."


# --- read_file -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadFile:
    """What `read_file` takes."""

    path: str = described(_PATH)
    start_line: int = described("First line to show; lines count from 1.", default=1)
    max_lines: int = described(f"How many lines to show, at most {MAX_READ_LINES}.", default=MAX_READ_LINES)


@_file_tool(
    "none",
    "Read a text file. Each line is shown with its number and a tab before it, which are not part of "
    f"the file. At most {MAX_READ_LINES} lines are shown at once: continue with start_line. Read a file "
    "before you edit it.",
    ToolExample("Read a file", ReadFile("src/app.py"), "     1\timport sys\n     2\tprint(sys.argv)\n"),
    ToolExample("Continue at line 200", ReadFile("notes.md", 200, 50), "   200\t## Later\n"),
)
def read_file(params: ReadFile, *, context: ToolContext) -> _Answer:
    """Show a text file with line numbers."""
    if params.start_line < 1 or params.max_lines < 1:
        return ToolResult.error("start_line and max_lines count from 1; both must be at least 1.")
    filesystem = context.filesystem
    with filesystem.open_read(params.path) as stream:
        lines = _numbered_lines(stream, params.start_line, min(params.max_lines, MAX_READ_LINES))
    if lines is None:
        # The size of the file that is read, not of a link to it.
        size = filesystem.read_bytes(params.path, limit=0).size_bytes
        return ToolResult.error(
            f"{params.path} is a binary file of {size} bytes; it cannot be shown as text."
        )
    shown, next_line, ended_at = lines
    if not shown:
        if ended_at == 0:
            return ToolResult.ok(message=f"{params.path} is empty.")
        return ToolResult.error(
            f"{params.path} has {ended_at} lines; line {params.start_line} is after its end."
        )
    text = "".join(shown)
    if next_line is not None:
        text += f"[{params.path} continues; see more with start_line={next_line}]"
    return ToolResult.ok(message=text)


def _numbered_lines(
    stream: BinaryIO, start_line: int, max_lines: int
) -> tuple[list[str], int | None, int] | None:
    """Return numbered lines, the next line to read if there are more, and the file's last line.

    None if the file is binary. Only part of one line is held in memory at a time.
    """
    if is_binary(stream.read(8_192)):
        return None
    stream.seek(0)
    shown: list[str] = []
    total_chars = number = 0
    # A character of UTF-8 has at most four bytes.
    while raw := stream.readline(MAX_LINE_CHARS * 4 + 2):
        cut_bytes = 0
        while not raw.endswith(b"\n") and (rest := stream.readline(1_048_576)):
            cut_bytes += len(rest.removesuffix(b"\n"))
            if rest.endswith(b"\n"):
                break
        number += 1
        if number < start_line:
            continue
        if len(shown) == max_lines or total_chars > MAX_RESULT_CHARS:
            return shown, number, number
        line = raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
        if cut_bytes or len(line) > MAX_LINE_CHARS:
            left = cut_bytes + len(line[MAX_LINE_CHARS:].encode())
            line = f"{line[:MAX_LINE_CHARS]} [line cut here: {left} more bytes]"
        shown.append(f"{number:>6}\t{line}\n")
        total_chars += len(shown[-1])
    return shown, None, number


# --- write_file ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteFile:
    """What `write_file` takes."""

    path: str = described(_PATH)
    content: str = described("The whole text to write.")
    mode: Literal["overwrite", "create", "append"] = described(
        "overwrite replaces or creates the file, create fails if it exists, append adds to its end.",
        default="overwrite",
    )


@_file_tool(
    "workspace",
    "Write a text file, whole. Missing directories are created. To change part of an existing file, use "
    "edit_file: it is shorter and safer.",
    ToolExample(
        "Create a file",
        WriteFile("docs/plan.md", "# Plan\n", "create"),
        "Created docs/plan.md: 1 lines, 7 bytes.",
    ),
)
def write_file(params: WriteFile, *, context: ToolContext) -> _Answer:
    """Write, create or append to a text file."""
    filesystem = context.filesystem
    existed = filesystem.exists(params.path)
    result = filesystem.write(params.path, params.content, mode=params.mode)
    lines = len(split_lines(params.content))
    what = f"{lines} lines, {result.bytes_written} bytes"
    if params.mode == "append":
        return ToolResult.ok(message=f"Added {what} to the end of {result.path}.")
    verb = "Replaced the content of" if existed else "Created"
    return ToolResult.ok(message=f"{verb} {result.path}: {what}.")


# --- edit_file -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EditFile:
    """What `edit_file` takes."""

    path: str = described(_PATH)
    old_text: str = described(
        "The exact text to replace, with its indentation and line breaks, without line numbers. It must be "
        "unique in the file: include lines around it if necessary."
    )
    new_text: str = described("The text to put in its place; empty to delete it.")
    replace_all: bool = described(
        "Replace every occurrence; otherwise there must be exactly one.", default=False
    )


@_file_tool(
    "workspace",
    "Change part of a text file: replace old_text with new_text. old_text must be exactly what is in the "
    "file, spaces and line breaks included, and occur once, unless replace_all is true. The answer shows "
    "the change as a diff.",
    ToolExample(
        "Change one line",
        EditFile("app.py", "DEBUG = True\n", "DEBUG = False\n"),
        "Replaced once in app.py:\n--- a/app.py\n+++ b/app.py\n@@ -1 +1 @@\n-DEBUG = True\n+DEBUG = False\n",
    ),
    ToolExample(
        "Rename everywhere in a file",
        EditFile("app.py", "colour", "color", replace_all=True),
        "Replaced 3 times in app.py:\n--- a/app.py\n+++ b/app.py\n@@ -1,3 +1,3 @@\n...",
    ),
)
def edit_file(params: EditFile, *, context: ToolContext) -> _Answer:
    """Replace exact text in a file, and show the change."""
    if not params.old_text:
        return ToolResult.error("old_text is empty. To write a new file or a whole file, use write_file.")
    if params.old_text == params.new_text:
        return ToolResult.error("old_text and new_text are the same, so nothing would change.")
    filesystem = context.filesystem
    before = filesystem.read_bytes(params.path).content
    try:
        text = before.decode("utf-8")
    except UnicodeDecodeError:
        return ToolResult.error(f"{params.path} is not UTF-8 text, so it cannot be edited as text.")
    old, new = params.old_text, params.new_text
    if old not in text and "\r\n" in text and "\r\n" not in old:
        # The file has Windows line endings, which a model does not see.
        old = old.replace("\n", "\r\n")
    count = text.count(old)
    if count == 0:
        return ToolResult.error(_no_match(params.path, text, params.old_text))
    if not params.replace_all:
        starts = _starts(text, old)
        if len(starts) > 1:
            return ToolResult.error(_several_matches(params.path, text, starts, max(count, len(starts))))
    if "\r" not in params.old_text:
        new = _with_endings_of(old if "\n" in old else text, new)
    if old == new:
        return ToolResult.error("old_text and new_text are the same, so nothing would change.")
    after = text.replace(old, new)
    filesystem.write_bytes(params.path, after.encode("utf-8"))
    diff = unified_text(normalize(params.path), before, after.encode("utf-8"))
    if len(diff) > _MAX_DIFF_CHARS:
        diff = diff[:_MAX_DIFF_CHARS] + "\n[... the rest of the diff is not shown]"
    times = "once" if count == 1 else f"{count} times"
    return ToolResult.ok(message=f"Replaced {times} in {params.path}:\n{diff}")


def _starts(text: str, old: str) -> list[int]:
    """Return where a text begins, also where it overlaps itself: "aa" begins twice in "aaa"."""
    found: list[int] = []
    position = text.find(old)
    while position != -1 and len(found) < _MAX_NAMED_MATCHES:
        found.append(position)
        position = text.find(old, position + 1)
    return found


def _with_endings_of(text: str, new: str) -> str:
    """Return a replacement with the line endings of a text: of most lines, if it has both kinds."""
    windows = text.count("\r\n")
    others = text.count("\n") - windows
    if not windows and not others:
        return new
    plain = new.replace("\r\n", "\n")
    return plain.replace("\n", "\r\n") if windows > others else plain


def _several_matches(path: str, text: str, starts: Sequence[int], count: int) -> str:
    numbers = dict.fromkeys(text.count("\n", 0, each) + 1 for each in starts)
    where = ", ".join(map(str, numbers)) + (", ..." if count > len(starts) else "")
    return (
        f"old_text occurs {count} times in {path}, beginning at lines {where}. Nothing was changed. Include "
        "more of the lines around the one you mean, or set replace_all to true to replace all of them."
    )


def _no_match(path: str, text: str, old: str) -> str:
    """Return a message for text that does not occur, with the most similar lines of the file."""
    message = f"old_text does not occur in {path}. Nothing was changed."
    wanted, lines = old.splitlines(), text.splitlines()
    if _squeeze(old) and _squeeze(old) in _squeeze(text):
        message += " It differs only in spaces, tabs or line breaks: copy them exactly."
    nearest = _nearest(wanted, lines[:_MAX_COMPARED_LINES])
    if nearest is None:
        return f"{message} No line in it is similar; read the file again with read_file."
    first = max(0, nearest - 1)
    last = min(len(lines), nearest + len(wanted[:20]) + 1)
    shown = "\n".join(f"{n + 1:>6}\t{lines[n][:MAX_MATCH_CHARS]}" for n in range(first, last))
    return f"{message} The most similar lines are:\n{shown}"


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _nearest(wanted: Sequence[str], lines: Sequence[str]) -> int | None:
    """Return the line at which a block of lines fits best, or None if none is similar."""
    plain = [line.strip() for line in lines]
    for offset, line in enumerate(wanted):
        # Very short lines, such as brackets, occur everywhere.
        if len(line.strip()) < 3:
            continue
        close = difflib.get_close_matches(line.strip()[:MAX_MATCH_CHARS], plain, n=5, cutoff=0.6)
        if not close:
            continue
        places = [n for n, each in enumerate(plain) if each in close and n - offset >= 0]
        if places:
            return max(places, key=lambda n: (_likeness(wanted, plain, n - offset), -n)) - offset
        return plain.index(close[0])
    return None


def _likeness(wanted: Sequence[str], plain: Sequence[str], start: int) -> float:
    here = plain[start : start + len(wanted)]
    return sum(
        difflib.SequenceMatcher(None, mine.strip()[:MAX_MATCH_CHARS], theirs[:MAX_MATCH_CHARS]).ratio()
        for mine, theirs in zip(wanted[:20], here, strict=False)
    )


# --- list_directory --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListDirectory:
    """What `list_directory` takes."""

    path: str = described("Directory relative to the workspace root; '.' is the root.", default=".")
    skip: int = described("How many entries to skip, to see more of a long directory.", default=0)
    include_ignored: bool = described(_INCLUDE_IGNORED, default=False)


@_file_tool(
    "none",
    "List a directory, one entry per line: directories end with '/', files show their size, links their "
    "target. Hidden entries are shown, ignored ones (.gitignore, .treenailignore) are only counted. To find "
    "files at any depth, use glob_files.",
    ToolExample("List the root", ListDirectory(), "README.md (1204 bytes)\nsrc/\n"),
)
def list_directory(params: ListDirectory, *, context: ToolContext) -> _Answer:
    """List one directory."""
    filesystem = context.filesystem
    tree = VisibleTree(filesystem, include_ignored=params.include_ignored, include_hidden=True)
    entries = list(tree.list(normalize(params.path)))
    note = _left_out(tree)
    if not entries:
        return ToolResult.ok(message=note or f"{params.path} is empty.")

    def shown() -> Iterable[str]:
        for entry in entries[params.skip :]:
            if entry.is_directory:
                yield f"{entry.name}/"
                continue
            stat = filesystem.stat(entry.path)
            yield (
                f"{entry.name} -> {stat.link_target}"
                if stat.is_link
                else f"{entry.name} ({stat.size_bytes} bytes)"
            )

    return _page(shown(), params.skip, len(entries), "entries", note)


def _fitting(lines: Iterable[str], max_lines: int) -> Sequence[str]:
    """Return the first lines, as many as an answer may have."""
    kept: list[str] = []
    size = 0
    for line in itertools.islice(lines, max_lines):
        size += len(line) + 1
        if size > MAX_RESULT_CHARS:
            break
        kept.append(line)
    return kept


def _page(lines: Iterable[str], skip: int, total: int, noun: str, extra: str = "") -> _Answer:
    """Show as many lines as fit, and say how to see the others."""
    if skip < 0:
        return ToolResult.error("skip must be 0 or more.")
    if skip >= total:
        return ToolResult.error(f"There are {total} {noun}, so skip={skip} shows none; use a smaller one.")
    kept = _fitting(lines, MAX_ENTRIES)
    text = "\n".join(kept) + "\n"
    after = skip + len(kept)
    if after < total:
        text += (
            f"[{noun} {skip + 1} to {after} of {total}; see more with skip={after}, or narrow the request]\n"
        )
    return ToolResult.ok(message=text + extra)


# --- glob_files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GlobFiles:
    """What `glob_files` takes."""

    pattern: str = described("Such as **/*.py, src/*.{js,ts} or docs/**; ** crosses directories.")
    path: str = described("Directory to search.", default=".")
    include_hidden: bool = described("Also show names that begin with a dot.", default=False)
    include_ignored: bool = described(_INCLUDE_IGNORED, default=False)
    skip: int = described("How many matches to skip, to see more of many.", default=0)


@_file_tool(
    "none",
    "Find files and directories by name. ** crosses directories, * and ? stay within a name, [abc] is "
    "one of these characters, {a,b} is either. Answers with paths, sorted; directories end with '/'. "
    "Hidden names are left out unless the pattern names one or include_hidden is true; what .gitignore "
    "ignores is left out unless include_ignored is true.",
    ToolExample("Find Python files", GlobFiles("**/*.py"), "setup.py\nsrc/app.py\n"),
)
def glob_files(params: GlobFiles, *, context: ToolContext) -> _Answer:
    """Find paths by pattern."""
    tree = _searched(context.filesystem, params, params.pattern, params.path)
    matches = glob_tree(tree.list, params.pattern, path=normalize(params.path))
    if not matches:
        return ToolResult.ok(
            message=f"Nothing matches {params.pattern!r} in {params.path!r}.\n{_left_out(tree)}".strip()
        )
    stat = context.filesystem.stat
    lines = (
        match.path + ("" if match.is_file or not stat(match.path).is_directory else "/")
        for match in matches[params.skip :]
    )
    return _page(lines, params.skip, len(matches), "matches")


def _searched(filesystem: Filesystem, params: GlobFiles | GrepFiles, *requests: str) -> VisibleTree:
    """Return what to search. Hidden names belong to it if the request itself names one."""
    named = any(
        segment.startswith(".") and segment not in (".", "..")
        for request in requests
        for segment in request.replace("{", "/").replace(",", "/").split("/")
    )
    return VisibleTree(
        filesystem, include_ignored=params.include_ignored, include_hidden=params.include_hidden or named
    )


def _left_out(tree: VisibleTree) -> str:
    """Say how many entries were not looked at, and how to see them."""
    counts = {"ignored": tree.left_out.ignored, "hidden": tree.left_out.hidden}
    said = [f"{count} {kind} (see with include_{kind})" for kind, count in counts.items() if count]
    return f"[entries left out: {', '.join(said)}]\n" if said else ""


# --- grep_files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrepFiles:
    """What `grep_files` takes."""

    pattern: str = described("A regular expression, in Python's syntax, matched line by line.")
    path: str = described("File or directory to search.", default=".")
    glob: str | None = described("Only search files that match, such as *.py or src/**/*.ts.", default=None)
    ignore_case: bool = described("Match upper and lower case alike.", default=False)
    include_hidden: bool = described("Also search names that begin with a dot.", default=False)
    include_ignored: bool = described(
        "Also search what .gitignore and .treenailignore ignore.", default=False
    )
    max_matches: int = described(f"How many matches to show, at most {MAX_MATCHES}.", default=100)


@_file_tool(
    "none",
    "Search the text of files for a regular expression. Answers with path:line: text, in path order. "
    "Binary files are skipped; hidden ones too, unless path or glob names one or include_hidden is true, "
    "and what .gitignore ignores, unless path leads into it or include_ignored is true. "
    "A backslash makes a special character literal.",
    ToolExample(
        "Find where a function is defined",
        GrepFiles(r"def handle_\w+", glob="*.py"),
        "src/app.py:12: def handle_request(event):\n",
    ),
)
def grep_files(params: GrepFiles, *, context: ToolContext) -> _Answer:
    """Search the lines of files."""
    if params.max_matches < 1:
        return ToolResult.error("max_matches must be at least 1.")
    compile_pattern(params.pattern)
    pattern = f"(?i){params.pattern}" if params.ignore_case else params.pattern
    limit = min(params.max_matches, MAX_MATCHES)
    filesystem, path = context.filesystem, normalize(params.path)
    tree = _searched(filesystem, params, params.path, params.glob or "")
    try:
        filesystem.list(path)
        is_file = False
    except NotADirectoryError:
        is_file = True
    matches = grep_tree(
        tree.list,
        filesystem.open_read,
        pattern,
        path=path,
        is_file=is_file,
        glob=params.glob,
        max_matches=limit + 1,
    )
    if not matches:
        return ToolResult.ok(
            message=f"No line matches {params.pattern!r} in {params.path!r}.\n{_left_out(tree)}".strip()
        )
    shown = (f"{match.path}:{match.line_number}: {_around(match)}" for match in matches)
    lines = _fitting(shown, limit)
    text = "\n".join(lines) + "\n"
    if len(lines) < len(matches):
        text += (
            f"[the first {len(lines)} matches; there are more: narrow the pattern, the path or the glob]\n"
        )
    return ToolResult.ok(message=text)


def _around(match: GrepMatch) -> str:
    """Return the line of a match; of a long line, the part around the match."""
    line = match.line_content
    if len(line) <= MAX_MATCH_CHARS:
        return line
    start = max(0, min(match.match_start - MAX_MATCH_CHARS // 3, len(line) - MAX_MATCH_CHARS))
    end = start + MAX_MATCH_CHARS
    return ("..." if start else "") + line[start:end] + ("..." if end < len(line) else "")


# --- delete_file, move_file ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """What `delete_file` takes."""

    path: str = described(_PATH)
    recursive: bool = described("Delete a directory with everything in it.", default=False)


@_file_tool(
    "workspace",
    "Delete a file, a link or an empty directory; with recursive, a directory and everything in it. A "
    "link is deleted itself, not its target.",
    ToolExample("Delete a file", DeleteFile("old.txt"), "Deleted the file old.txt."),
)
def delete_file(params: DeleteFile, *, context: ToolContext) -> _Answer:
    """Delete a file or a directory."""
    filesystem = context.filesystem
    stat = filesystem.stat(params.path)
    if stat.is_directory and not params.recursive and filesystem.list(params.path):
        count = len(filesystem.list(params.path))
        return ToolResult.error(
            f"{params.path} is a directory with {count} entries. Set recursive to true to delete all of it."
        )
    filesystem.delete(params.path, recursive=params.recursive)
    noun = "link" if stat.is_link else "directory" if stat.is_directory else "file"
    return ToolResult.ok(message=f"Deleted the {noun} {stat.path}.")


@dataclass(frozen=True, slots=True)
class MoveFile:
    """What `move_file` takes."""

    path: str = described("What to move, relative to the workspace root.")
    target: str = described("The new path, including the name, not only the directory.")
    overwrite: bool = described("Replace a file that is at the target.", default=False)


@_file_tool(
    "workspace",
    "Move or rename a file, a link or a directory. Missing directories of the target are created.",
    ToolExample("Rename a file", MoveFile("a.txt", "docs/b.txt"), "Moved a.txt to docs/b.txt."),
)
def move_file(params: MoveFile, *, context: ToolContext) -> _Answer:
    """Move or rename."""
    filesystem = context.filesystem
    filesystem.stat(params.path)  # raises for a wrong path before a directory is created
    target = normalize(params.target)
    if not params.overwrite and filesystem.exists(target):
        hint = (
            f" To move it into that directory, use target={target}/{last_segment(normalize(params.path))}."
            if filesystem.stat(target).is_directory
            else " Set overwrite to true to replace it."
        )
        return ToolResult.error(f"{target} already exists.{hint} Nothing was changed.")
    filesystem.mkdir(parent(target))
    filesystem.move(params.path, target, overwrite=params.overwrite)
    return ToolResult.ok(message=f"Moved {normalize(params.path)} to {target}.")


READING_TOOLS: tuple[Tool[Any, str], ...] = (read_file, list_directory, glob_files, grep_files)
"""The tools that only read."""

WRITING_TOOLS: tuple[Tool[Any, str], ...] = (write_file, edit_file, delete_file, move_file)
"""The tools that change the workspace."""

FILE_TOOLS: tuple[Tool[Any, str], ...] = READING_TOOLS + WRITING_TOOLS
"""All tools for files."""

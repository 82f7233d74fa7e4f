"""The conformance suite for filesystems: every promise of `treenail.workspace.Filesystem`, as tests.

To run it on an implementation of your own, subclass in a pytest module:

```python
from treenail.testing.filesystem import FilesystemConformance, LinkConformance

class TestMyFilesystem(FilesystemConformance):
    def make_filesystem(self, directory):
        return MyFilesystem(...)

class TestMyLinks(LinkConformance):              # if links can exist in it
    def make_filesystem(self, directory): ...
    def make_link(self, filesystem, path, target): ...
```

The suite looks at a filesystem through the protocol alone. It needs `pytest` and `hypothesis`.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from treenail.clock import new_id
from treenail.errors import PathEscapeError, ReadOnlyError, SnapshotMismatchError, WorkspaceError
from treenail.workspace import (
    MAX_CONVENIENCE_BYTES,
    MAX_READ_LINES,
    Filesystem,
    FilesystemSnapshot,
    WorkspaceCall,
    WriteMode,
)

ESCAPES = ("..", "../outside", "a/../../outside", "/etc/passwd", "/", "a/..")
"""Spellings that are refused with `PathEscapeError`, whatever is in the tree."""

PATH_OPERATIONS: Mapping[str, Callable[[Filesystem, str], object]] = {
    "read": lambda fs, path: fs.read(path),
    "read_bytes": lambda fs, path: fs.read_bytes(path),
    "exists": lambda fs, path: fs.exists(path),
    "stat": lambda fs, path: fs.stat(path),
    "list": lambda fs, path: fs.list(path),
    "glob": lambda fs, path: fs.glob("*", path=path),
    "grep": lambda fs, path: fs.grep("x", path=path),
    "write": lambda fs, path: fs.write(path, "x"),
    "write_bytes": lambda fs, path: fs.write_bytes(path, b"x"),
    "delete": lambda fs, path: fs.delete(path, recursive=True),
    "move from": lambda fs, path: fs.move(path, "elsewhere"),
    "move to": lambda fs, path: fs.move("a/b.txt", path, overwrite=True),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "chmod": lambda fs, path: fs.chmod(path, 0o600),
    "open_read": lambda fs, path: fs.open_read(path),
    "open_text": lambda fs, path: fs.open_text(path),
    "open_write": lambda fs, path: fs.open_write(path),
}
"""Each operation that takes a path, made with it."""


def _stream(filesystem: Filesystem, path: str, content: bytes) -> None:
    with filesystem.open_write(path) as stream:
        stream.write(content)


def _delete_everything(filesystem: Filesystem) -> None:
    for entry in filesystem.list():
        filesystem.delete(entry.path, recursive=True)


def _file_to_directory(filesystem: Filesystem) -> None:
    filesystem.delete("a.txt")
    filesystem.write("a.txt/inside", "x")


def _directory_to_file(filesystem: Filesystem) -> None:
    filesystem.delete("dir", recursive=True)
    filesystem.write("dir", "x")


def _many_changes(filesystem: Filesystem) -> None:
    filesystem.write("a.txt", "1")
    filesystem.delete("a.txt")
    filesystem.mkdir("a.txt")
    filesystem.delete("a.txt")
    filesystem.write("a.txt", "2")
    filesystem.chmod("a.txt", 0o600)


Operation = Callable[[Filesystem], object]

CHANGES: Mapping[str, Operation] = {
    "write": lambda fs: fs.write("a.txt", "changed"),
    "append": lambda fs: fs.write("a.txt", "more", mode="append"),
    "create": lambda fs: fs.write("new/deep/file.txt", "new", mode="create"),
    "stream": lambda fs: _stream(fs, "a.txt", b"changed"),
    "delete a file": lambda fs: fs.delete("a.txt"),
    "delete a directory": lambda fs: fs.delete("dir", recursive=True),
    "delete an empty directory": lambda fs: fs.delete("empty"),
    "delete everything": _delete_everything,
    "move a file": lambda fs: fs.move("a.txt", "moved.txt"),
    "move over a file": lambda fs: fs.move("a.txt", "dir/b.txt", overwrite=True),
    "move a directory": lambda fs: fs.move("dir", "moved"),
    "mkdir": lambda fs: fs.mkdir("made/deep"),
    "chmod": lambda fs: fs.chmod("a.txt", 0o755),
    "chmod a directory": lambda fs: fs.chmod("dir", 0o700),
    "a file becomes a directory": _file_to_directory,
    "a directory becomes a file": _directory_to_file,
    "many changes of one path": _many_changes,
}
"""Ways to change the tree that `populate` makes."""


_UNKNOWN_MODE: Any = "truncate"
_NO_ROOT = (OSError, ValueError)


def _refusals() -> Iterator[tuple[type[Exception] | tuple[type[Exception], ...], str, Operation]]:
    yield FileExistsError, "create over a file", lambda fs: fs.write("a.txt", "x", mode="create")
    yield FileExistsError, "create by stream", lambda fs: fs.open_write("a.txt", mode="create")
    yield FileExistsError, "move over a file", lambda fs: fs.move("a.txt", "dir/b.txt")
    yield FileExistsError, "mkdir again", lambda fs: fs.mkdir("dir", exist_ok=False)
    yield FileExistsError, "mkdir over a file", lambda fs: fs.mkdir("a.txt")
    yield FileNotFoundError, "write without parents", lambda fs: fs.write("p/q", "x", create_parents=False)
    yield FileNotFoundError, "stream without parents", lambda fs: fs.open_write("p/q", create_parents=False)
    yield FileNotFoundError, "move without parents", lambda fs: fs.move("a.txt", "missing/a.txt")
    yield FileNotFoundError, "mkdir without parents", lambda fs: fs.mkdir("x/y", parents=False)
    yield ValueError, "an unknown mode", lambda fs: fs.write("new", "x", mode=_UNKNOWN_MODE)
    yield ValueError, "an unknown mode by stream", lambda fs: fs.open_write("new", mode=_UNKNOWN_MODE)
    yield ValueError, "text that is not Unicode", lambda fs: fs.write("new", "\ud800")
    yield ValueError, "a negative offset", lambda fs: fs.read("a.txt", offset=-1)
    yield ValueError, "a negative limit", lambda fs: fs.read("a.txt", limit=-2)
    yield ValueError, "a negative offset in bytes", lambda fs: fs.read_bytes("a.txt", offset=-1)
    yield ValueError, "a negative limit in bytes", lambda fs: fs.read_bytes("a.txt", limit=-2)
    yield ValueError, "an empty glob", lambda fs: fs.glob("")
    yield ValueError, "an invalid expression", lambda fs: fs.grep("abc(def")
    yield ValueError, "chmod below zero", lambda fs: fs.chmod("a.txt", -1)
    yield ValueError, "chmod with set-user-id", lambda fs: fs.chmod("a.txt", 0o4755)
    yield ValueError, "chmod with type bits", lambda fs: fs.chmod("a.txt", 0o100644)
    yield PathEscapeError, "an absolute glob", lambda fs: fs.glob("/etc/*")
    yield PathEscapeError, "a glob that leaves the root", lambda fs: fs.glob("a/../*")
    yield IsADirectoryError, "read a directory", lambda fs: fs.read("dir")
    yield IsADirectoryError, "read a directory's bytes", lambda fs: fs.read_bytes("dir")
    yield IsADirectoryError, "stream a directory", lambda fs: fs.open_read("dir")
    yield IsADirectoryError, "stream a directory as text", lambda fs: fs.open_text("dir")
    yield IsADirectoryError, "write a directory", lambda fs: fs.write("dir", "x")
    yield IsADirectoryError, "append to a directory", lambda fs: fs.write("dir", "x", mode="append")
    yield IsADirectoryError, "write a directory by stream", lambda fs: fs.open_write("dir")
    yield IsADirectoryError, "write the root", lambda fs: fs.write(".", "x")
    yield IsADirectoryError, "move a file over one", lambda fs: fs.move("a.txt", "empty", overwrite=True)
    yield NotADirectoryError, "move one over a file", lambda fs: fs.move("dir", "a.txt", overwrite=True)
    yield NotADirectoryError, "list a file", lambda fs: fs.list("a.txt")
    yield NotADirectoryError, "glob in a file", lambda fs: fs.glob("*", path="a.txt")
    yield NotADirectoryError, "read below a file", lambda fs: fs.read("a.txt/b")
    yield NotADirectoryError, "stat below a file", lambda fs: fs.stat("a.txt/b")
    yield NotADirectoryError, "write below a file", lambda fs: fs.write("a.txt/b", "x")
    yield NotADirectoryError, "write far below a file", lambda fs: fs.write("a.txt/b/c", "x")
    yield NotADirectoryError, "stream below a file", lambda fs: fs.open_write("a.txt/b")
    yield NotADirectoryError, "mkdir below a file", lambda fs: fs.mkdir("a.txt/b")
    yield NotADirectoryError, "delete below a file", lambda fs: fs.delete("a.txt/b")
    yield OSError, "move over a full directory", lambda fs: fs.move("empty", "dir", overwrite=True)
    yield _NO_ROOT, "delete the root", lambda fs: fs.delete(".")
    yield _NO_ROOT, "delete the root and all", lambda fs: fs.delete(".", recursive=True)
    yield _NO_ROOT, "move the root", lambda fs: fs.move(".", "dir/root")
    yield _NO_ROOT, "move over the root", lambda fs: fs.move("a.txt", ".", overwrite=True)
    yield _NO_ROOT, "move into itself", lambda fs: fs.move("dir", "dir/sub/dir")


REFUSALS = {name: (error, operation) for error, name, operation in _refusals()}
"""What is refused in the tree that `populate` makes, with the error."""

MISSING_ALLOWED = frozenset({"exists", "write", "write_bytes", "mkdir", "open_write", "move to"})
"""The operations of `PATH_OPERATIONS` that may be given a path where nothing is."""


def populate(filesystem: Filesystem) -> None:
    """Make the small tree that many of the tests begin with."""
    filesystem.write("a.txt", "one\ntwo\n")
    filesystem.write_bytes("dir/b.txt", b"\x00\x01binary\xff")
    filesystem.write("dir/sub/run.sh", "#!/bin/sh\n")
    filesystem.chmod("dir/sub/run.sh", 0o755)
    filesystem.mkdir("empty")


def tree(filesystem: Filesystem) -> dict[str, tuple[str, int, bytes | str | None]]:
    """Return everything that is in a filesystem, by path: type, permission bits, content or target."""
    found: dict[str, tuple[str, int, bytes | str | None]] = {}
    pending = ["."]
    while pending:
        for entry in filesystem.list(pending.pop()):
            stat = filesystem.stat(entry.path)
            if stat.is_link:
                found[entry.path] = ("link", 0, stat.link_target)
            elif stat.is_directory:
                found[entry.path] = ("directory", stat.permissions, None)
                pending.append(entry.path)
            else:
                content = filesystem.read_bytes(entry.path).content
                found[entry.path] = ("file", stat.permissions, content)
    return found


class _Harness:
    """What a subclass provides."""

    def make_filesystem(self, directory: Path) -> Filesystem:
        """Return a new, empty filesystem. It may use `directory`, which is new and empty, as it likes."""
        raise NotImplementedError("a conformance suite needs make_filesystem(directory)")

    def reopen(self, filesystem: Filesystem) -> Filesystem:
        """Return the filesystem as the next process would open it, the first one having been killed.

        The same object, unless the implementation is durable.
        """
        return filesystem

    def close(self, filesystem: Filesystem) -> None:
        """Release what `make_filesystem` or `reopen` took; nothing by default."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[Filesystem]:
        """Provide an empty filesystem for one test."""
        filesystem = self.make_filesystem(tmp_path)
        yield filesystem
        self.close(filesystem)


class ContentConformance(_Harness):
    """What is written is read, in every mode, and refusals say why."""

    def test_it_is_a_filesystem(self, fs: Filesystem) -> None:
        """It has every operation of the protocol, can be written to, and says where it is."""
        assert isinstance(fs, Filesystem)
        assert fs.read_only is False
        assert fs.root
        assert fs.host_root is None or fs.host_root.is_dir()

    def test_a_new_one_is_empty(self, fs: Filesystem) -> None:
        """The root exists, is a directory, and holds nothing."""
        assert fs.exists(".")
        assert fs.stat(".").is_directory
        assert list(fs.list()) == []
        assert list(fs.glob("**")) == []
        assert list(fs.unfinished()) == []

    def test_what_is_written_is_read(self, fs: Filesystem) -> None:
        """Text comes back as it was written, and the result says what was done."""
        result = fs.write("dir/note.txt", "żółw\n")
        assert (result.path, result.bytes_written, result.mode) == ("dir/note.txt", 8, "overwrite")
        assert fs.read("dir/note.txt").content == "żółw\n"
        assert fs.read_bytes("dir/note.txt").content == "żółw\n".encode()
        added = fs.write("dir/note.txt", "more", mode="append")
        assert (added.bytes_written, added.mode) == (4, "append")
        fs.write("empty.txt", "")
        assert (fs.read("empty.txt").content, fs.read("empty.txt").total_lines) == ("", 0)

    def test_line_endings_are_kept(self, fs: Filesystem) -> None:
        """Nothing translates line endings, in any way of reading or writing."""
        text = "unix\nwindows\r\nold mac\rform feed\x0cseparator\u2028end"
        fs.write("a.txt", text)
        assert fs.read_bytes("a.txt").content == text.encode()
        result = fs.read("a.txt")
        assert result.content == text
        assert result.total_lines == 3, "a line ends at \\n and nowhere else"
        with fs.open_text("a.txt") as stream:
            assert stream.read() == text

    def test_any_bytes_are_kept(self, fs: Filesystem) -> None:
        """Bytes come back as they were written, whatever they are."""
        content = bytes(range(256)) * 3
        assert fs.write_bytes("blob", content).bytes_written == len(content)
        assert fs.read_bytes("blob").content == content
        assert fs.stat("blob").size_bytes == len(content)

    @pytest.mark.parametrize(
        ("offset", "limit", "digits", "truncated"),
        [
            (0, -1, "01234", False),
            (0, 2, "01", True),
            (1, 3, "123", True),
            (3, 2, "34", False),
            (4, 100, "4", False),
            (5, 10, "", False),
            (99, -1, "", False),
            (0, 0, "", True),
        ],
    )
    def test_reading_chooses_a_range(
        self, fs: Filesystem, offset: int, limit: int, digits: str, truncated: bool
    ) -> None:
        """`offset` and `limit` count lines, or bytes; `truncated` says whether more follows."""
        fs.write("a.txt", "0\n1\n2\n3\n4")
        fs.write_bytes("a.bin", b"01234")
        text = fs.read("a.txt", offset=offset, limit=limit)
        blob = fs.read_bytes("a.bin", offset=offset, limit=limit)
        assert text.content == "".join(f"{digit}\n" for digit in digits).replace("4\n", "4")
        assert blob.content == digits.encode()
        assert text.truncated == blob.truncated == truncated
        assert (text.total_lines, text.offset, text.limit) == (5, offset, limit)
        assert (blob.size_bytes, blob.offset, blob.limit) == (5, offset, limit)

    def test_read_is_bounded_by_default(self, fs: Filesystem) -> None:
        """A long file is cut after the default number of lines, and the result says so."""
        fs.write("long.txt", "x\n" * (MAX_READ_LINES + 1))
        result = fs.read("long.txt")
        assert result.content == "x\n" * MAX_READ_LINES
        assert result.truncated
        assert result.total_lines == MAX_READ_LINES + 1

    def test_read_refuses_what_is_not_text(self, fs: Filesystem) -> None:
        """Bytes that are not UTF-8 are a ValueError that names the file, never mangled text."""
        fs.write_bytes("latin.txt", b"caf\xe9")
        with pytest.raises(ValueError, match=r"latin\.txt"):
            fs.read("latin.txt")

    def test_large_files_are_streamed(self, fs: Filesystem) -> None:
        """What is too large to load at once can be read in parts and as a stream."""
        chunk = b"0123456789abcdef" * 65_536
        with fs.open_write("large.bin") as stream:
            for _ in range(MAX_CONVENIENCE_BYTES // len(chunk)):
                stream.write(chunk)
            stream.write(b"end")
        size = fs.stat("large.bin").size_bytes
        assert size == MAX_CONVENIENCE_BYTES + 3
        with pytest.raises(OSError, match="open_read") as caught:
            fs.read_bytes("large.bin")
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="open_read"):
            fs.read("large.bin")
        assert fs.read_bytes("large.bin", offset=size - 4, limit=10).content == b"fend"
        with fs.open_read("large.bin") as stream:
            assert stream.read(16) == b"0123456789abcdef"

    def test_overwrite_keeps_permission_bits(self, fs: Filesystem) -> None:
        """A script stays executable when its text is replaced."""
        fs.write("run.sh", "one")
        fs.chmod("run.sh", 0o755)
        fs.write("run.sh", "two")
        assert fs.stat("run.sh").permissions == 0o755
        fs.write("run.sh", "three", mode="append")
        assert fs.stat("run.sh").permissions == 0o755
        _stream(fs, "run.sh", b"four")
        assert fs.stat("run.sh").permissions == 0o755

    @pytest.mark.parametrize("refusal", sorted(REFUSALS))
    def test_a_refusal_has_its_error_and_changes_nothing(self, fs: Filesystem, refusal: str) -> None:
        """What cannot be done is refused with the error that says why, and the tree is as it was."""
        error, operation = REFUSALS[refusal]
        populate(fs)
        before = tree(fs)
        with pytest.raises(error):
            operation(fs)
        assert tree(fs) == before

    @pytest.mark.parametrize("name", sorted(PATH_OPERATIONS.keys() - MISSING_ALLOWED))
    def test_what_is_missing_is_reported(self, fs: Filesystem, name: str) -> None:
        """Using a path where nothing is raises FileNotFoundError that names it."""
        fs.mkdir("a")
        with pytest.raises(FileNotFoundError, match="a/missing"):
            PATH_OPERATIONS[name](fs, "a/missing")


class PathConformance(_Harness):
    """No path leaves the root, and each place has one spelling."""

    @pytest.mark.parametrize("name", sorted(PATH_OPERATIONS))
    def test_no_path_leaves_the_root(self, fs: Filesystem, name: str) -> None:
        """An absolute path, or one with `..`, is refused by every operation, and changes nothing."""
        fs.write("a/b.txt", "x")
        before = tree(fs)
        for path in ESCAPES:
            with pytest.raises(PathEscapeError):
                PATH_OPERATIONS[name](fs, path)
        assert tree(fs) == before

    @pytest.mark.parametrize("name", sorted(PATH_OPERATIONS))
    def test_a_path_without_meaning_is_refused(self, fs: Filesystem, name: str) -> None:
        """A NUL, or a name that no disk could hold, is a ValueError in every operation."""
        fs.write("a/b.txt", "x")
        for path in ("nul\0byte", "n" * 300, "/".join("d" * 300)):
            with pytest.raises(ValueError, match=r"path"):
                PATH_OPERATIONS[name](fs, path)

    def test_one_place_has_one_spelling(self, fs: Filesystem) -> None:
        """`.` segments, doubled and trailing slashes do not matter, and results use the plain spelling."""
        fs.write("./dir//note.txt", "x")
        assert fs.write("dir/./note.txt", "y").path == "dir/note.txt"
        assert fs.read("dir///note.txt").path == "dir/note.txt"
        assert fs.stat("./dir/").path == "dir"
        assert [entry.path for entry in fs.list("./dir/")] == ["dir/note.txt"]
        assert [match.path for match in fs.glob("*.txt", path="dir/")] == ["dir/note.txt"]

    def test_odd_names_are_ordinary(self, fs: Filesystem) -> None:
        """Spaces, quotes, wildcards, leading dashes, newlines and other scripts may be in names."""
        names = [
            " ",
            "-rf",
            "...",
            "*",
            "[a]",
            "a\nb",
            "quote'\"",
            "żółw",
            "日本",
            "back\\slash",
            "~",
            "$HOME",
        ]
        for name in names:
            fs.write(f"odd/{name}", name)
        assert [entry.name for entry in fs.list("odd")] == sorted(names)
        for name in names:
            assert fs.read(f"odd/{name}").content == name


class SearchConformance(_Harness):
    """Looking, listing, glob and grep."""

    def test_stat_describes(self, fs: Filesystem) -> None:
        """A file has a size and a time with a zone; a directory is one; neither is a link."""
        fs.write("dir/a.txt", "12345")
        file, directory = fs.stat("dir/a.txt"), fs.stat("dir")
        assert (file.path, file.is_file, file.is_directory, file.is_link) == ("dir/a.txt", True, False, False)
        assert file.size_bytes == 5
        assert file.modified_at is not None
        assert file.modified_at.tzinfo is not None
        assert (directory.is_file, directory.is_directory, directory.is_link) == (False, True, False)
        assert file.link_target is None
        assert fs.exists("dir")
        assert fs.exists("dir/a.txt")
        assert not fs.exists("other/a.txt")

    def test_list_is_sorted_and_one_level_deep(self, fs: Filesystem) -> None:
        """Entries come by name, hidden ones too, with their paths from the root."""
        for path in ("b/two.txt", "b/.hidden", "b/One.txt", "b/sub/deep.txt", "a.txt"):
            fs.write(path, "x")
        entries = fs.list("b")
        assert [entry.name for entry in entries] == [".hidden", "One.txt", "sub", "two.txt"]
        assert [entry.path for entry in entries] == ["b/.hidden", "b/One.txt", "b/sub", "b/two.txt"]
        assert [entry.is_directory for entry in entries] == [False, False, True, False]
        assert [entry.is_file for entry in entries] == [True, True, False, True]
        assert [entry.name for entry in fs.list()] == ["a.txt", "b"]

    @pytest.mark.parametrize(
        ("pattern", "paths"),
        [
            ("*", [".env", "README.md", "docs", "src"]),
            ("*.md", ["README.md"]),
            ("**", [*sorted([".env", "README.md", "docs", "docs/a.md", "docs/b.txt", "src", "src/main.py"]),
                    "src/pkg", "src/pkg/.cache", "src/pkg/.cache/c.py", "src/pkg/m1.py", "src/pkg/m2.py"]),
            ("**/*.py", ["src/main.py", "src/pkg/.cache/c.py", "src/pkg/m1.py", "src/pkg/m2.py"]),
            ("**/*.md", ["README.md", "docs/a.md"]),
            ("src/*.py", ["src/main.py"]),
            ("src/**/*.py", ["src/main.py", "src/pkg/.cache/c.py", "src/pkg/m1.py", "src/pkg/m2.py"]),
            ("src/**", ["src/main.py", "src/pkg", "src/pkg/.cache", "src/pkg/.cache/c.py", "src/pkg/m1.py",
                        "src/pkg/m2.py"]),
            ("**/m?.py", ["src/pkg/m1.py", "src/pkg/m2.py"]),
            ("**/m[2-9].py", ["src/pkg/m2.py"]),
            ("**/m[!2].py", ["src/pkg/m1.py"]),
            ("**/*.{md,txt}", ["README.md", "docs/a.md", "docs/b.txt"]),
            ("src/**/", ["src/pkg", "src/pkg/.cache"]),
            ("readme.md", []),
            (".*", [".env"]),
            ("*/*/*/c.py", ["src/pkg/.cache/c.py"]),
        ],
    )  # fmt: skip
    def test_glob_matches(self, fs: Filesystem, pattern: str, paths: Sequence[str]) -> None:
        """Each pattern finds these paths, sorted, directories and hidden names included."""
        for path in (
            "README.md", ".env", "docs/a.md", "docs/b.txt", "src/main.py", "src/pkg/m1.py",
            "src/pkg/m2.py", "src/pkg/.cache/c.py",
        ):  # fmt: skip
            fs.write(path, "x")
        matches = fs.glob(pattern)
        assert [match.path for match in matches] == list(paths)
        assert [match.is_file for match in matches] == [fs.stat(path).is_file for path in paths]

    def test_glob_starts_where_it_is_told(self, fs: Filesystem) -> None:
        """`path` is where the pattern begins; results are still spelled from the root."""
        for path in ("src/a.py", "src/pkg/b.py", "c.py"):
            fs.write(path, "x")
        assert [m.path for m in fs.glob("**/*.py", path="src")] == ["src/a.py", "src/pkg/b.py"]
        assert [m.path for m in fs.glob("*.py", path="src")] == ["src/a.py"]

    def test_grep_finds_lines(self, fs: Filesystem) -> None:
        """Matches come in path and line order, with the line, its number, and where it matched."""
        fs.write("b.txt", "nothing\nfind me here\r\nfind twice: find\n")
        fs.write("a/z.txt", "find")
        found = [(m.path, m.line_number, m.line_content, m.match_start, m.match_end) for m in fs.grep("find")]
        assert found == [
            ("a/z.txt", 1, "find", 0, 4),
            ("b.txt", 2, "find me here", 0, 4),
            ("b.txt", 3, "find twice: find", 0, 4),
        ]

    def test_grep_takes_regular_expressions(self, fs: Filesystem) -> None:
        """Anchors see lines; groups, classes and flags work; columns show the match."""
        fs.write("a.py", "def one():\n    return 1\n\nclass Two: pass\n")
        (match,) = fs.grep(r"^\s+return\s+(\d+)$")
        assert match.line_content[match.match_start : match.match_end] == "    return 1"
        assert [m.line_number for m in fs.grep(r"(?i)CLASS|def")] == [1, 4]
        assert [m.line_number for m in fs.grep(r"^$")] == [3]

    def test_grep_can_be_narrowed(self, fs: Filesystem) -> None:
        """By directory, by file, by names at any depth, and by paths below the directory."""
        for path in ("x.py", "x.md", "src/x.py", "src/deep/x.py", "src/deep/x.md"):
            fs.write(path, "hit\n")

        def paths(**how: Any) -> list[str]:
            return [match.path for match in fs.grep("hit", **how)]

        assert paths() == ["src/deep/x.md", "src/deep/x.py", "src/x.py", "x.md", "x.py"]
        assert paths(path="src") == ["src/deep/x.md", "src/deep/x.py", "src/x.py"]
        assert paths(path="src/x.py") == ["src/x.py"]
        assert paths(glob="*.py") == ["src/deep/x.py", "src/x.py", "x.py"]
        assert paths(path="src", glob="deep/*.md") == ["src/deep/x.md"]

    def test_grep_skips_binary_files(self, fs: Filesystem) -> None:
        """A file with a NUL near its beginning is not text; odd bytes alone do not hide a file."""
        fs.write_bytes("binary", b"\x00needle\n")
        fs.write_bytes("latin.txt", b"caf\xe9 needle\n")
        (match,) = fs.grep("needle")
        assert match.path == "latin.txt"
        assert match.line_content[match.match_start : match.match_end] == "needle"

    def test_grep_is_bounded(self, fs: Filesystem) -> None:
        """It stops at `max_matches`, in order; a very long line is cut, not returned whole."""
        fs.write("a.txt", "hit\n" * 50)
        fs.write("b.txt", "hit " + "x" * 1_000_000)
        assert [m.line_number for m in fs.grep("hit", max_matches=3)] == [1, 2, 3]
        (long,) = fs.grep("hit", path="b.txt")
        assert len(long.line_content) < 20_000
        with pytest.raises(ValueError, match="max_matches"):
            fs.grep("hit", max_matches=0)


class ChangeConformance(_Harness):
    """Deleting, moving, making directories, permission bits and streams."""

    def test_delete_refuses_a_full_directory(self, fs: Filesystem) -> None:
        """A directory with content is deleted only with `recursive`; the error is ENOTEMPTY."""
        populate(fs)
        before = tree(fs)
        with pytest.raises(OSError, match=r"empty|ENOTEMPTY") as caught:
            fs.delete("dir")
        assert caught.value.errno == errno.ENOTEMPTY
        assert tree(fs) == before

    def test_move_renames(self, fs: Filesystem) -> None:
        """A file or a directory is at its new path with content and bits, and no longer at its old."""
        populate(fs)
        before = tree(fs)
        fs.move("a.txt", "dir/renamed.txt")
        fs.move("dir/sub", "sub2")
        after = tree(fs)
        assert after["dir/renamed.txt"] == before["a.txt"]
        assert after["sub2/run.sh"] == before["dir/sub/run.sh"]
        assert not fs.exists("a.txt")
        assert not fs.exists("dir/sub")

    @pytest.mark.parametrize("permissions", [0o644, 0o600, 0o755, 0o400])
    def test_chmod_sets_the_bits(self, fs: Filesystem, permissions: int) -> None:
        """The bits are those of the last chmod, and the content stays."""
        fs.write("a.txt", "x")
        fs.chmod("a.txt", permissions)
        assert fs.stat("a.txt").permissions == permissions
        assert fs.stat("a.txt").size_bytes == 1

    def test_streams_read(self, fs: Filesystem) -> None:
        """Bytes and text can be read piece by piece, and seeking works."""
        fs.write("a.txt", "zażółć\ngęślą\n")
        with fs.open_read("a.txt") as stream:
            assert stream.read(2) == b"za"
            stream.seek(0)
            assert stream.read() == "zażółć\ngęślą\n".encode()
        with fs.open_text("a.txt") as text:
            assert list(text) == ["zażółć\n", "gęślą\n"]

    def test_a_read_stream_does_not_write(self, fs: Filesystem) -> None:
        """A stream for reading refuses writes."""
        fs.write("a.txt", "x")
        with fs.open_read("a.txt") as stream, pytest.raises(OSError, match=r".*"):
            stream.write(b"y")
        assert fs.read("a.txt").content == "x"

    def test_a_stream_appears_when_closed(self, fs: Filesystem) -> None:
        """Until then readers see the old content; closing twice does nothing more."""
        fs.write("a.txt", "old")
        stream = fs.open_write("a.txt")
        stream.write(b"ne")
        stream.write(b"w")
        assert fs.read("a.txt").content == "old"
        stream.close()
        assert fs.read("a.txt").content == "new"
        fs.write("a.txt", "newer")
        stream.close()
        assert fs.read("a.txt").content == "newer"

    @pytest.mark.parametrize(
        ("mode", "content"),
        [("overwrite", b"streamed"), ("append", b"old streamed"), ("create", b"streamed")],
    )
    def test_streams_have_modes(self, fs: Filesystem, mode: WriteMode, content: bytes) -> None:
        """A stream overwrites, appends or creates, parents included."""
        path = "new/file.txt" if mode == "create" else "a.txt"
        fs.write("a.txt", "old ")
        with fs.open_write(path, mode=mode) as stream:
            stream.write(b"streamed")
        assert fs.read_bytes(path).content == content

    def test_a_failed_stream_leaves_no_trace(self, fs: Filesystem) -> None:
        """An exception inside the `with` block discards what was written so far."""
        fs.write("a.txt", "old")

        def fail_half_way(path: str) -> None:
            with fs.open_write(path) as stream:
                stream.write(b"a part")
                raise RuntimeError("half way")

        for path in ("a.txt", "new/file.txt"):
            with pytest.raises(RuntimeError, match="half way"):
                fail_half_way(path)
        assert fs.read("a.txt").content == "old"
        assert not fs.exists("new/file.txt")
        assert [m.path for m in fs.glob("**") if m.is_file] == ["a.txt"]


class BoundaryConformance(_Harness):
    """Snapshots, restores and diffs."""

    @pytest.mark.parametrize("scan", [False, True])
    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_restore_undoes(self, fs: Filesystem, change: str, scan: bool) -> None:
        """After any change, the tree goes back to the boundary: types, bits and content."""
        populate(fs)
        before = tree(fs)
        snapshot = fs.snapshot(tag="before", scan=scan)
        CHANGES[change](fs)
        assert tree(fs) != before
        report = fs.restore(snapshot)
        assert tree(fs) == before
        assert report.restored
        assert report.conflicts == ()

    def test_a_snapshot_is_plain_data(self, fs: Filesystem) -> None:
        """A copy made from its fields works as well; it says when and under which tag it was taken."""
        fs.write("a.txt", "old")
        snapshot = fs.snapshot(tag="mine")
        assert snapshot.tag == "mine"
        assert snapshot.created_at.tzinfo is not None
        assert snapshot.commit_ref
        copy = FilesystemSnapshot(**dataclasses.asdict(snapshot))
        fs.write("a.txt", "new")
        fs.restore(copy)
        assert fs.read("a.txt").content == "old"

    def test_a_strange_snapshot_is_refused(self, fs: Filesystem) -> None:
        """A snapshot that this filesystem never took is SnapshotMismatchError, and nothing changes."""
        populate(fs)
        before = tree(fs)
        strange = dataclasses.replace(fs.snapshot(), snapshot_id=new_id(), commit_ref="0" * 40)
        fs.write("a.txt", "after")
        after = tree(fs)
        assert after != before
        with pytest.raises(SnapshotMismatchError):
            fs.restore(strange)
        with pytest.raises(SnapshotMismatchError):
            fs.diff(strange)
        assert tree(fs) == after

    def test_diff_names_what_changed(self, fs: Filesystem) -> None:
        """Each changed path is listed once, sorted, with its kind and sizes."""
        populate(fs)
        fs.write("same.txt", "same")
        before = fs.snapshot()
        fs.write("a.txt", "one\nTWO\n")
        fs.delete("dir/b.txt")
        fs.chmod("dir/sub/run.sh", 0o644)
        fs.write("new.txt", "123")
        fs.delete("empty")
        fs.write("empty", "a file now")
        after = fs.snapshot()
        for diff in (fs.diff(before, after), fs.diff(before)):
            assert [(c.path, c.kind) for c in diff.changes] == [
                ("a.txt", "modified"),
                ("dir/b.txt", "deleted"),
                ("dir/sub/run.sh", "mode"),
                ("empty", "type"),
                ("new.txt", "added"),
            ]
            sizes = {c.path: (c.before_size, c.after_size) for c in diff.changes}
            assert sizes["a.txt"] == (8, 8)
            assert sizes["dir/b.txt"] == (9, None)
            assert sizes["new.txt"] == (None, 3)

    def test_diff_shows_text(self, fs: Filesystem) -> None:
        """The text is a unified diff; binary content is named with its sizes, never shown."""
        populate(fs)
        before = fs.snapshot()
        fs.write("a.txt", "one\nTWO\n")
        fs.write_bytes("dir/b.txt", b"\x00")
        text = fs.diff(before).text
        assert "--- a/a.txt\n+++ b/a.txt\n" in text
        assert "\n one\n-two\n+TWO\n" in text
        assert "\x00" not in text
        assert re.search(r"dir/b\.txt.*9.*1", text)

    def test_diff_of_nothing_is_empty(self, fs: Filesystem) -> None:
        """Equal boundaries differ in nothing, also if the same bytes were written again."""
        populate(fs)
        before = fs.snapshot()
        fs.write("a.txt", "other")
        fs.write("a.txt", "one\ntwo\n")
        diff = fs.diff(before, fs.snapshot())
        assert (diff.changes, diff.text) == ((), "")

    def test_diff_has_a_direction(self, fs: Filesystem) -> None:
        """Swapping the boundaries swaps what was added and what was deleted."""
        first = fs.snapshot()
        fs.write("new.txt", "x\n")
        second = fs.snapshot()
        assert [c.kind for c in fs.diff(first, second).changes] == ["added"]
        assert [c.kind for c in fs.diff(second, first).changes] == ["deleted"]
        assert "+x" in fs.diff(first, second).text
        assert "-x" in fs.diff(second, first).text


class CallConformance(_Harness):
    """A tool call is kept or undone as a whole, also by the process after a crash."""

    def _begun(self, fs: Filesystem, change: str, *, foreign: bool) -> tuple[WorkspaceCall, object, object]:
        """Begin a call that makes a change; return it with the trees before and after."""
        populate(fs)
        before = tree(fs)
        call = fs.begin("call-1", tool_name="tool", foreign=foreign)
        assert isinstance(call, WorkspaceCall)
        CHANGES[change](fs)
        return call, before, tree(fs)

    @contextmanager
    def _reopened(self, fs: Filesystem) -> Iterator[Filesystem]:
        reopened = self.reopen(fs)
        yield reopened
        if reopened is not fs:
            self.close(reopened)

    def _check_ended(self, fs: Filesystem, *boundaries: tuple[FilesystemSnapshot, object]) -> None:
        """Check that no call is open, that the boundaries can be restored, and that a call can begin."""
        assert list(fs.unfinished()) == []
        for snapshot, expected in boundaries:
            fs.restore(snapshot)
            assert tree(fs) == expected
        fs.begin("call-2").rollback()

    @pytest.mark.parametrize("how", ["plain", "foreign"])
    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_rollback_undoes_a_call(self, fs: Filesystem, change: str, how: str) -> None:
        """Whatever the call changed is as it was, also after `prepare`; the report names the paths."""
        call, before, _ = self._begun(fs, change, foreign=how == "foreign")
        if how == "foreign":
            call.prepare()
        report = call.rollback()
        assert tree(fs) == before
        assert report.restored
        assert report.conflicts == ()
        self._check_ended(fs)

    @pytest.mark.parametrize("foreign", [False, True])
    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_finish_keeps_a_call(self, fs: Filesystem, change: str, foreign: bool) -> None:
        """What the call changed stays; its boundaries are before and after; another call may begin."""
        call, before, after = self._begun(fs, change, foreign=foreign)
        boundary = call.prepare()
        call.finish()
        assert tree(fs) == after
        assert fs.diff(call.base, boundary).changes
        self._check_ended(fs, (call.base, before), (boundary, after))

    def test_a_call_that_changes_nothing(self, fs: Filesystem) -> None:
        """It has equal boundaries, and its rollback restores nothing."""
        populate(fs)
        call = fs.begin("call-1")
        assert call.call_id == "call-1"
        assert fs.diff(call.base, call.prepare()).changes == ()
        call.finish()
        assert call.base.created_at.tzinfo is not None
        other = fs.begin("call-2")
        assert other.rollback().restored == ()

    def test_rollback_happens_once(self, fs: Filesystem) -> None:
        """A second rollback does nothing, also to what was written in between."""
        fs.write("a.txt", "before")
        call = fs.begin("call-1")
        fs.write("a.txt", "during")
        call.rollback()
        fs.write("a.txt", "after")
        assert call.rollback().restored == ()
        assert fs.read("a.txt").content == "after"

    def test_one_call_at_a_time(self, fs: Filesystem) -> None:
        """While a call holds the workspace, another cannot begin, and the first is not disturbed."""
        fs.write("a.txt", "before")
        call = fs.begin("call-1")
        fs.write("a.txt", "during")
        with pytest.raises(WorkspaceError, match="call-1"):
            fs.begin("call-2")
        call.rollback()
        assert fs.read("a.txt").content == "before"

    def test_a_stream_does_not_outlive_its_call(self, fs: Filesystem) -> None:
        """A stream that a failed call left open cannot write into the workspace afterwards."""
        fs.write("a.txt", "before")
        call = fs.begin("call-1")
        stream = fs.open_write("a.txt")
        stream.write(b"too late")
        call.rollback()
        with pytest.raises(WorkspaceError, match=r"a\.txt"):
            stream.close()
        assert fs.read("a.txt").content == "before"

    @pytest.mark.parametrize(("foreign", "prepared"), [(False, True), (True, False)])
    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_recover_rolls_back(self, fs: Filesystem, change: str, foreign: bool, prepared: bool) -> None:
        """A call that the log has not committed is undone, as if it had never begun."""
        call, before, _ = self._begun(fs, change, foreign=foreign)
        if prepared:
            call.prepare()
        with self._reopened(fs) as reopened:
            assert list(reopened.unfinished()) == ["call-1"]
            assert reopened.recover("call-1", committed=False).conflicts == ()
            assert tree(reopened) == before
            self._check_ended(reopened)

    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_recover_finishes(self, fs: Filesystem, change: str) -> None:
        """A call that the log has committed is kept; its boundaries can be gone back to."""
        call, before, after = self._begun(fs, change, foreign=False)
        boundary = call.prepare()
        with self._reopened(fs) as reopened:
            assert list(reopened.unfinished()) == ["call-1"]
            reopened.recover("call-1", committed=True)
            assert tree(reopened) == after
            self._check_ended(reopened, (call.base, before), (boundary, after))

    def test_ended_calls_are_not_unfinished(self, fs: Filesystem) -> None:
        """What was finished or rolled back needs no recovery."""
        fs.write("a.txt", "before")
        kept = fs.begin("kept")
        fs.write("a.txt", "kept")
        kept.prepare()
        kept.finish()
        undone = fs.begin("undone")
        fs.write("a.txt", "undone")
        undone.rollback()
        with self._reopened(fs) as reopened:
            assert list(reopened.unfinished()) == []
            assert reopened.read("a.txt").content == "kept"


class ViewConformance(_Harness):
    """The read-only view shows the tree and refuses every change."""

    @pytest.mark.parametrize("change", sorted(CHANGES))
    def test_a_view_refuses_changes(self, fs: Filesystem, change: str) -> None:
        """Every way to change the tree is ReadOnlyError through the view."""
        populate(fs)
        before = tree(fs)
        view = fs.read_only_view()
        with pytest.raises(ReadOnlyError):
            CHANGES[change](view)
        assert tree(fs) == before

    def test_a_view_refuses_boundaries(self, fs: Filesystem) -> None:
        """It cannot hold, snapshot, restore or recover the workspace either."""
        populate(fs)
        snapshot = fs.snapshot()
        fs.write("a.txt", "new")
        view = fs.read_only_view()
        refused: list[Callable[[], object]] = [
            lambda: view.begin("call-1"),
            lambda: view.snapshot(),
            lambda: view.snapshot(scan=True),
            lambda: view.restore(snapshot),
            lambda: view.recover("call-1", committed=False),
        ]
        for operation in refused:
            with pytest.raises(ReadOnlyError):
                operation()
        assert fs.read("a.txt").content == "new"
        assert list(fs.unfinished()) == []

    def test_a_view_shows_the_tree(self, fs: Filesystem) -> None:
        """It reads what the filesystem holds, now and later, and says that it is read-only."""
        populate(fs)
        view = fs.read_only_view()
        assert isinstance(view, Filesystem)
        assert view.read_only is True
        assert view.host_root is None
        assert view.root == fs.root
        assert tree(view) == tree(fs)
        before = fs.snapshot()
        fs.write("a.txt", "later\n")
        assert view.read("a.txt").content == "later\n"
        assert [m.path for m in view.grep("later")] == ["a.txt"]
        assert [c.path for c in view.diff(before).changes] == ["a.txt"]
        assert view.read_only_view().read_only is True


class FilesystemConformance(
    ContentConformance,
    PathConformance,
    SearchConformance,
    ChangeConformance,
    BoundaryConformance,
    CallConformance,
    ViewConformance,
):
    """Every promise of the protocol that does not need links."""

    def test_it_behaves_like_a_dictionary(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Any sequence of changes, boundaries and calls does to it what it does to a plain dictionary."""

        def make() -> Filesystem:
            return self.make_filesystem(tmp_path_factory.mktemp("filesystem"))

        run_state_machine_as_test(
            state_machine(make, self.close),
            settings=settings(
                max_examples=30,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class LinkConformance(_Harness):
    """What a filesystem in which symbolic links can exist promises about them."""

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        """Make a symbolic link at `path`; its directory exists."""
        raise NotImplementedError("the link suite needs make_link(filesystem, path, target)")

    def test_a_link_is_described(self, fs: Filesystem) -> None:
        """`stat` and `list` show the link itself, with its target, whatever is there."""
        fs.write("a.txt", "x")
        self.make_link(fs, "good", "a.txt")
        self.make_link(fs, "dangling", "nowhere")
        for name, target in (("good", "a.txt"), ("dangling", "nowhere")):
            stat = fs.stat(name)
            assert (stat.is_link, stat.link_target) == (True, target)
            assert (stat.is_file, stat.is_directory) == (False, False)
            assert fs.exists(name)
        assert [(e.name, e.is_link, e.is_file) for e in fs.list()] == [
            ("a.txt", False, True),
            ("dangling", True, False),
            ("good", True, False),
        ]

    def test_links_inside_are_followed(self, fs: Filesystem) -> None:
        """Reading and writing through links reaches what they lead to, also through several."""
        fs.write("dir/a.txt", "x")
        self.make_link(fs, "to-dir", "dir")
        self.make_link(fs, "dir/up", "../dir/a.txt")
        self.make_link(fs, "again", "to-dir/up")
        assert fs.read("to-dir/a.txt").content == "x"
        assert fs.read("again").content == "x"
        assert [e.path for e in fs.list("to-dir")] == ["to-dir/a.txt", "to-dir/up"]
        fs.write("again", "written")
        assert fs.read("dir/a.txt").content == "written"
        assert fs.stat("again").is_link, "the link is still one"
        fs.write("to-dir/new.txt", "new")
        assert fs.read("dir/new.txt").content == "new"

    @pytest.mark.parametrize(
        "target", ["..", "../outside", "/etc", "dir/../../outside", "dir/../../../etc/passwd"]
    )
    def test_links_do_not_lead_out(self, fs: Filesystem, target: str) -> None:
        """What is behind a link that leaves the root can be neither seen nor changed."""
        fs.write("a/b.txt", "x")
        fs.mkdir("dir")
        self.make_link(fs, "out", target)
        before = tree(fs)
        follows_links = ("read_bytes", "list", "glob", "grep", "write", "chmod")
        for name, operation in PATH_OPERATIONS.items():
            for path in ("out/x", "out/x/y", *(("out",) if name in follows_links else ())):
                with pytest.raises(PathEscapeError):
                    operation(fs, path)
        assert tree(fs) == before

    def test_loops_are_detected(self, fs: Filesystem) -> None:
        """Links in a circle are an OSError, not a hang; they can be deleted."""
        self.make_link(fs, "one", "two")
        self.make_link(fs, "two", "one")
        for operation in (
            lambda: fs.read("one"),
            lambda: fs.list("one"),
            lambda: fs.write("two", "x"),
            lambda: fs.read("one/below"),
        ):
            with pytest.raises(OSError, match=r".") as caught:
                operation()
            assert caught.value.errno == errno.ELOOP
        fs.delete("one")
        assert [e.name for e in fs.list()] == ["two"]

    def test_searches_do_not_follow_links(self, fs: Filesystem) -> None:
        """A link is matched by name; nothing below or behind it is searched, so nothing is found twice."""
        fs.write("dir/a.txt", "needle")
        self.make_link(fs, "dir/self", ".")
        self.make_link(fs, "other", "dir")
        self.make_link(fs, "file", "dir/a.txt")
        assert [m.path for m in fs.glob("**")] == ["dir", "dir/a.txt", "dir/self", "file", "other"]
        assert [m.path for m in fs.glob("**/*.txt")] == ["dir/a.txt"]
        assert [m.path for m in fs.grep("needle")] == ["dir/a.txt"]

    def test_deleting_and_moving_touch_the_link_alone(self, fs: Filesystem) -> None:
        """What a link leads to stays when the link is deleted or moved."""
        fs.write("dir/a.txt", "x")
        self.make_link(fs, "to-dir", "dir")
        self.make_link(fs, "out", "/etc")
        fs.move("to-dir", "renamed")
        assert fs.stat("renamed").link_target == "dir"
        fs.delete("renamed", recursive=True)
        fs.delete("out", recursive=True)
        assert [m.path for m in fs.glob("**")] == ["dir", "dir/a.txt"]

    def test_recursive_deletion_stops_at_links(self, fs: Filesystem) -> None:
        """Deleting a directory deletes the links in it, not what they lead to."""
        fs.write("keep/a.txt", "x")
        fs.mkdir("gone")
        self.make_link(fs, "gone/link", "../keep")
        fs.delete("gone", recursive=True)
        assert fs.read("keep/a.txt").content == "x"
        assert not fs.exists("gone")

    def test_create_does_not_write_through_a_link(self, fs: Filesystem) -> None:
        """Mode `create` finds a link in the way, even one that leads nowhere."""
        self.make_link(fs, "dangling", "nowhere")
        with pytest.raises(FileExistsError):
            fs.write("dangling", "x", mode="create")
        assert not fs.exists("nowhere")

    @pytest.mark.parametrize("kind", ["snapshot", "rollback"])
    def test_links_are_restored(self, fs: Filesystem, kind: Literal["snapshot", "rollback"]) -> None:
        """Links that were deleted, replaced, moved or written through are as they were."""
        fs.write("dir/a.txt", "x")
        self.make_link(fs, "dangling", "nowhere")
        self.make_link(fs, "to-dir", "dir")
        self.make_link(fs, "to-file", "dir/a.txt")
        self.make_link(fs, "outside", "/etc")
        before = tree(fs)
        if kind == "snapshot":
            snapshot = fs.snapshot(scan=True)
            undo: Callable[[], object] = partial(fs.restore, snapshot)
        else:
            undo = fs.begin("call-1").rollback
        fs.delete("dangling")
        fs.write("to-dir/a.txt", "through the link")
        fs.move("to-dir", "moved")
        fs.write("to-dir", "a file where the link was")
        fs.delete("to-file")
        fs.mkdir("to-file")
        fs.delete("outside")
        assert tree(fs) != before
        undo()
        assert tree(fs) == before


# --- the reference model ---------------------------------------------------------------------------


class Model:
    """The least that behaves like a filesystem: paths to bytes, or to None for a directory.

    Each operation returns whether it was allowed, and changes nothing if it was not.
    """

    def __init__(self) -> None:
        self.entries: dict[str, bytes | None] = {}

    def write(self, path: str, content: bytes, mode: WriteMode) -> bool:
        """Write a file, making its parents."""
        exists = path in self.entries
        if self._blocked(path) or (exists and (self.entries[path] is None or mode == "create")):
            return False
        self._make_parents(path)
        old = (self.entries.get(path) or b"") if mode == "append" else b""
        self.entries[path] = old + content
        return True

    def delete(self, path: str, recursive: bool) -> bool:
        """Delete a file or directory."""
        below = self._below(path)
        if path not in self.entries or (below and not recursive):
            return False
        for gone in [path, *below]:
            del self.entries[gone]
        return True

    def move(self, source: str, target: str, overwrite: bool) -> bool:
        """Rename, with the rules of POSIX."""
        if source not in self.entries or self._blocked(target):
            return False
        parent = target.rpartition("/")[0]
        if parent and parent not in self.entries:
            return False
        if target in self.entries and not overwrite:
            return False
        if source == target:
            return True
        if target.startswith(source + "/"):
            return False
        if target in self.entries:
            same_type = (self.entries[source] is None) == (self.entries[target] is None)
            if not same_type or self._below(target):
                return False
        moved = {target + path[len(source) :]: self.entries[path] for path in [source, *self._below(source)]}
        self.delete(source, recursive=True)
        self.entries.update(moved)
        return True

    def mkdir(self, path: str) -> bool:
        """Make a directory and its parents."""
        if self._blocked(path) or self.entries.get(path) is not None:
            return False
        self._make_parents(path)
        self.entries[path] = None
        return True

    def _parents(self, path: str) -> list[str]:
        parts = path.split("/")
        return ["/".join(parts[:count]) for count in range(1, len(parts))]

    def _below(self, path: str) -> list[str]:
        return [other for other in self.entries if other.startswith(path + "/")]

    def _blocked(self, path: str) -> bool:
        return any(self.entries.get(parent) is not None for parent in self._parents(path))

    def _make_parents(self, path: str) -> None:
        for parent in self._parents(path):
            self.entries[parent] = None


def state_machine(
    make: Callable[[], Filesystem], close: Callable[[Filesystem], None] = lambda filesystem: None
) -> type[RuleBasedStateMachine]:
    """Return a Hypothesis state machine that drives a filesystem and a `Model` side by side.

    It writes, deletes, moves, takes and restores boundaries, and opens, finishes and rolls back tool
    calls; after each step both hold the same, and both allowed or refused the same.
    """
    names = st.sampled_from(["a", "b", ".c", "d e"])
    paths = st.lists(names, min_size=1, max_size=3).map("/".join)
    contents = st.sampled_from([b"", b"x", b"one\ntwo\n", b"\x00\xff", b"long" * 100])
    modes: st.SearchStrategy[WriteMode] = st.sampled_from(("create", "overwrite", "append"))

    class FilesystemMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.fs = make()
            self.model = Model()
            self.boundaries: list[tuple[FilesystemSnapshot, dict[str, bytes | None]]] = []
            self.call: WorkspaceCall | None = None
            self.before_call: dict[str, bytes | None] = {}
            self.calls = 0

        def teardown(self) -> None:
            close(self.fs)

        def _same(self, allowed: bool, operation: Callable[[], object]) -> None:
            if allowed:
                operation()
            else:
                with pytest.raises((OSError, ValueError)):
                    operation()

        @rule(path=paths, content=contents, mode=modes, streamed=st.booleans())
        def write(self, path: str, content: bytes, mode: WriteMode, streamed: bool) -> None:
            def stream() -> None:
                with self.fs.open_write(path, mode=mode) as opened:
                    opened.write(content)

            allowed = self.model.write(path, content, mode)
            self._same(allowed, stream if streamed else lambda: self.fs.write_bytes(path, content, mode=mode))

        @rule(path=paths, recursive=st.booleans())
        def delete(self, path: str, recursive: bool) -> None:
            allowed = self.model.delete(path, recursive)
            self._same(allowed, lambda: self.fs.delete(path, recursive=recursive))

        @rule(old=paths, new=paths, overwrite=st.booleans())
        def move(self, old: str, new: str, overwrite: bool) -> None:
            allowed = self.model.move(old, new, overwrite)
            self._same(allowed, lambda: self.fs.move(old, new, overwrite=overwrite))

        @rule(path=paths)
        def mkdir(self, path: str) -> None:
            allowed = self.model.mkdir(path)
            self._same(allowed, lambda: self.fs.mkdir(path))

        @precondition(lambda self: self.call is None)
        @rule(scan=st.booleans())
        def snapshot(self, scan: bool) -> None:
            self.boundaries.append((self.fs.snapshot(scan=scan), dict(self.model.entries)))

        @precondition(lambda self: self.call is None and self.boundaries)
        @rule(data=st.data())
        def restore(self, data: st.DataObject) -> None:
            snapshot, entries = data.draw(st.sampled_from(self.boundaries))
            self.fs.restore(snapshot)
            self.model.entries = dict(entries)

        @precondition(lambda self: self.boundaries)
        @rule(data=st.data())
        def diff(self, data: st.DataObject) -> None:
            snapshot, entries = data.draw(st.sampled_from(self.boundaries))
            kinds = {change.path: change.kind for change in self.fs.diff(snapshot).changes}
            assert kinds == _expected_kinds(entries, self.model.entries)

        @precondition(lambda self: self.call is None)
        @rule(foreign=st.booleans())
        def begin(self, foreign: bool) -> None:
            self.calls += 1
            self.call = self.fs.begin(f"call-{self.calls}", foreign=foreign)
            self.before_call = dict(self.model.entries)

        @precondition(lambda self: self.call is not None)
        @rule(prepared=st.booleans())
        def rollback(self, prepared: bool) -> None:
            assert self.call is not None
            if prepared:
                self.call.prepare()
            self.call.rollback()
            self.call = None
            self.model.entries = self.before_call

        @precondition(lambda self: self.call is not None)
        @rule()
        def finish(self) -> None:
            assert self.call is not None
            self.boundaries.append((self.call.base, self.before_call))
            self.boundaries.append((self.call.prepare(), dict(self.model.entries)))
            self.call.finish()
            self.call = None

        @invariant()
        def holds_the_same(self) -> None:
            held = {
                path: None if kind == "directory" else content
                for path, (kind, _, content) in tree(self.fs).items()
            }
            assert held == self.model.entries
            assert [match.path for match in self.fs.glob("**")] == sorted(self.model.entries)

    return FilesystemMachine


def _expected_kinds(before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for path in before.keys() | after.keys():
        if path not in before:
            kinds[path] = "added"
        elif path not in after:
            kinds[path] = "deleted"
        elif (before[path] is None) != (after[path] is None):
            kinds[path] = "type"
        elif before[path] != after[path]:
            kinds[path] = "modified"
    return kinds

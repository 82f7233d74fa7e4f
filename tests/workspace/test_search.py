"""Globs and searches: the rules that every filesystem shares."""

import fnmatch
import io
import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.errors import PathEscapeError
from treenail.workspace import FileEntry, InMemoryFilesystem, compile_pattern
from treenail.workspace.matching import MAX_LINE_CHARS, MAX_PATTERN_CHARS, LineMatcher
from treenail.workspace.search import MAX_ALTERNATIVES, compile_glob, glob_tree, grep_tree


def grep(content: bytes, pattern: str, **how):
    """Search one file named f."""
    return grep_tree(
        lambda path: [], lambda path: io.BytesIO(content), pattern, path="f", is_file=True, **how
    )


def find_forever(matcher: LineMatcher, lines: list[str]) -> None:
    while True:
        matcher.find(lines)


class TestGlob:
    @pytest.mark.parametrize(
        ("pattern", "path", "matches"),
        [
            ("a", "a", True),
            ("a", "b", False),
            ("a", "a/a", False),
            ("*", "a", True),
            ("*", ".a", True),
            ("*", "a/b", False),
            ("?", "a", True),
            ("?", "ab", False),
            ("[abc]", "b", True),
            ("[a-c]x", "bx", True),
            ("[!a-c]x", "bx", False),
            ("[!a-c]x", "dx", True),
            ("[]]", "]", True),
            ("[", "[", True),
            ("[a", "[a", True),
            ("**", "a/b/c", True),
            ("**/c", "c", True),
            ("**/c", "a/b/c", True),
            ("a/**", "a", False),
            ("a/**", "a/b/c", True),
            ("a/**/c", "a/c", True),
            ("a/**/c", "a/b/b/c", True),
            ("a/**/c", "a/b/c/d", False),
            ("**/**/c", "c", True),
            ("**/a/**/b/**", "x/a/y/b/z", True),
            ("**/a/**/b/**", "x/a/y/b", False),
            ("a**b", "axxb", True),
            ("a**b", "a/b", False),
            ("./a/./b", "a/b", True),
            ("a//b", "a/b", True),
            ("{a,b}", "a", True),
            ("{a,b}/c", "b/c", True),
            ("{a,b/c}.py", "b/c.py", True),
            ("x{a,{b,c}}y", "xcy", True),
            ("{a}", "{a}", True),
            ("*.{py,md}", "x.txt", False),
            ("A", "a", False),
            ("a\nb", "a\nb", True),
            ("*", "a\nb", True),
        ],
    )
    def test_patterns_match(self, pattern, path, matches):
        """The whole path has to match, segment by segment."""
        assert compile_glob(pattern).matches(path) is matches

    @pytest.mark.parametrize(
        ("pattern", "error"),
        [
            ("", ValueError),
            (".", ValueError),
            ("/", PathEscapeError),
            ("/a", PathEscapeError),
            ("../a", PathEscapeError),
            ("a/..", PathEscapeError),
            ("{a,/b}", PathEscapeError),
            ("{a,..}/b", PathEscapeError),
            ("a\0", ValueError),
            ("a" * 5_000, ValueError),
            ("{a,b}" * 10, ValueError),
        ],
    )
    def test_senseless_patterns_are_refused(self, pattern, error):
        """The text names the pattern, or what is wrong with it."""
        with pytest.raises(error, match="glob pattern"):
            compile_glob(pattern)

    def test_braces_are_bounded(self):
        """As many alternatives as allowed work, one more does not."""
        names = [str(number) for number in range(MAX_ALTERNATIVES)]
        assert compile_glob("{" + ",".join(names) + "}").matches("63")
        with pytest.raises(ValueError, match=str(MAX_ALTERNATIVES)):
            compile_glob("{" + ",".join([*names, "more"]) + "}")

    @given(
        pattern=st.text(alphabet="ab*?[]!-.", min_size=1, max_size=8).filter(
            lambda p: p not in (".", "..") and "**" not in p
        ),
        name=st.text(alphabet="ab.-]", min_size=1, max_size=8).filter(lambda n: n not in (".", "..")),
    )
    def test_a_segment_matches_as_the_shell_does(self, pattern, name):
        """Within one segment the standard library's rules hold, letter for letter."""
        assert compile_glob(pattern).matches(name) == fnmatch.fnmatchcase(name, pattern)

    @given(
        segments=st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=4),
        path=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5),
    )
    def test_double_stars_are_any_number_of_directories(self, segments, path):
        """A pattern matches if some choice of lengths for its `**` matches one by one."""

        def matches(pattern, names):
            if not pattern:
                return not names
            if pattern[0] == "**":
                shortest = 1 if len(pattern) == 1 else 0
                return any(matches(pattern[1:], names[n:]) for n in range(shortest, len(names) + 1))
            return bool(names) and pattern[0] in ("*", names[0]) and matches(pattern[1:], names[1:])

        # A run of `**` means one of them.
        plain = [
            segment
            for key, group in itertools.groupby(segments)
            for segment in ([key] if key == "**" else list(group))
        ]
        assert compile_glob("/".join(segments)).matches("/".join(path)) == matches(plain, path)

    def test_no_pattern_is_slow(self):
        """Patterns that make backtracking matchers hang are answered at once."""
        started = time.thread_time()  # Work, not waiting for others to do theirs.
        assert not compile_glob("*a" * 100 + "b").matches("a" * 250)
        assert not compile_glob("**/a/" * 30 + "b").matches("/".join("a" * 60))
        assert time.thread_time() - started < 1

    def test_directories_that_cannot_match_are_not_listed(self):
        """A search looks only where something can be found."""
        fs = InMemoryFilesystem({"src/a/x.py": "", "src/b/y.py": "", "docs/deep/z.md": ""})
        listed = []

        def list_directory(path):
            listed.append(path)
            return fs.list(path)

        assert [match.path for match in glob_tree(list_directory, "src/*/x.py")] == ["src/a/x.py"]
        assert sorted(listed) == [".", "src", "src/a", "src/b"]

    @pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError, PermissionError])
    def test_a_directory_that_vanishes_is_empty(self, error):
        """Somebody may change the tree during a search; only the starting point must be there."""

        def list_directory(path):
            if path == ".":
                return [FileEntry("gone", "gone", is_file=False, is_directory=True)]
            raise error(path)

        assert [match.path for match in glob_tree(list_directory, "**")] == ["gone"]
        with pytest.raises(error):
            glob_tree(list_directory, "**", path="gone")


class TestGrep:
    @given(
        lines=st.lists(st.text(alphabet="ab \r\x0b\x0c\u2028é", max_size=6), max_size=6),
        final_newline=st.booleans(),
    )
    def test_line_numbers_are_those_of_read(self, lines, final_newline):
        """Line n of a search is the line that read(offset=n-1, limit=1) returns."""
        text = "\n".join(lines) + ("\n" if final_newline else "")
        fs = InMemoryFilesystem({"f": text})
        for match in fs.grep("a"):
            line = fs.read("f", offset=match.line_number - 1, limit=1).content
            assert line.removesuffix("\n").removesuffix("\r") == match.line_content
            assert match.line_content[match.match_start : match.match_end] == "a"
        expected = [n for n, line in enumerate(text.split("\n"), 1) if "a" in line]
        assert [match.line_number for match in fs.grep("a")] == expected

    def test_lines_across_chunks_are_whole(self):
        """Where the file is cut for reading does not show in the results."""
        line = b"x" * 1_000 + b"needle"
        content = b"\n".join([line] * 3_000)
        matches = grep(content, "needle", max_matches=10_000)
        assert [match.line_number for match in matches] == list(range(1, 3_001))
        assert {match.line_content for match in matches} == {line.decode()}

    def test_long_lines_are_cut(self):
        """What is beyond the limit of a line is neither searched nor shown; the next line is."""
        long = b"a" * (MAX_LINE_CHARS - 3) + b"end" + b"needle" + b"z" * 3_000_000
        matches = grep(long + b"\nneedle\n", "needle|end")
        assert [(match.line_number, match.match_start) for match in matches] == [
            (1, MAX_LINE_CHARS - 3),
            (2, 0),
        ]
        assert len(matches[0].line_content) == MAX_LINE_CHARS

    def test_a_character_is_not_cut_in_two(self):
        """A long line of multi-byte characters is cut between them."""
        (match,) = grep("é".encode() * 10_000, "é")
        assert match.line_content == "é" * MAX_LINE_CHARS

    @pytest.mark.parametrize(
        ("content", "found"),
        [(b"\0needle", 0), (b"x" * 8_191 + b"\0\nneedle", 0), (b"x" * 8_192 + b"\0\nneedle", 1), (b"", 0)],
    )
    def test_binary_is_decided_by_the_beginning(self, content, found):
        """A NUL within the first 8,192 bytes, as git decides."""
        assert len(grep(content, "needle")) == found

    def test_one_match_per_line(self):
        """The first of several matches in a line is reported."""
        (match,) = grep(b"xx ab ab", "ab")
        assert (match.match_start, match.match_end) == (3, 5)

    def test_files_that_cannot_be_opened_are_skipped(self):
        """In a search of a directory; a file that is searched alone must be readable."""
        entries = [FileEntry(name, name, is_file=True, is_directory=False) for name in ("bad", "good")]

        def open_file(path):
            if path == "bad":
                raise PermissionError(path)
            return io.BytesIO(b"hit")

        assert [m.path for m in grep_tree(lambda path: entries, open_file, "hit")] == ["good"]
        with pytest.raises(PermissionError):
            grep_tree(lambda path: entries, open_file, "hit", path="bad", is_file=True)

    def test_it_stops_reading_when_it_has_enough(self):
        """Files after the last wanted match are not opened, once a batch is full."""
        entries = [FileEntry(f"{n:03}", f"{n:03}", is_file=True, is_directory=False) for n in range(100)]
        opened = []

        def open_file(path):
            opened.append(path)
            return io.BytesIO(b"hit\n" * 600_000)

        assert len(grep_tree(lambda path: entries, open_file, "hit", max_matches=5)) == 5
        assert opened == ["000"]

    @pytest.mark.parametrize(
        ("pattern", "position"), [("(", 0), ("a(b", 1), ("[z", 0), ("a**", 2), ("*", 0), ("(?P<1>x)", 4)]
    )
    def test_invalid_expressions_say_where(self, pattern, position):
        """A ValueError with the position, before any file is opened."""

        def open_file(path):
            raise AssertionError("opened a file for an expression that is not valid")

        with pytest.raises(ValueError, match=f"position {position}"):
            grep_tree(lambda path: [], open_file, pattern, path="f", is_file=True)

    def test_an_over_long_expression_is_refused(self):
        """There is a limit, and the text says which."""
        with pytest.raises(ValueError, match=str(MAX_PATTERN_CHARS)):
            compile_pattern("a" * (MAX_PATTERN_CHARS + 1))


class TestRunaways:
    @pytest.mark.parametrize(
        ("pattern", "line"), [("needle", "a needle"), (r"\bimport\s", "import x"), (r"(?i:todo)", "ToDo")]
    )
    def test_patterns_of_both_kinds_match(self, pattern, line):
        """Whether a pattern is matched here or in a child process is not to be seen."""
        assert len(LineMatcher(pattern).find(["nothing", line])) == 1

    def test_an_expression_that_python_warns_about_is_refused_where_warnings_are_errors(self):
        """It is the caller's mistake, reported like the others."""
        with pytest.raises(ValueError, match="nested set"):
            compile_pattern("[[a]")

    @pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(a|aa)+$"])
    def test_a_runaway_is_stopped(self, pattern):
        """The search ends in TimeoutError that names the pattern; this process is not held up."""
        started = time.thread_time()
        with pytest.raises(TimeoutError, match=re.escape(pattern)):
            LineMatcher(pattern, timeout_s=0.2).find(["a" * 200 + "!"])
        assert time.thread_time() - started < 1

    def test_time_is_counted_over_the_whole_search(self):
        """Many slow lines together use up the time, even if each alone would not."""
        lines = ["a" * 18 + "!"] * 10
        with pytest.raises(TimeoutError):
            find_forever(LineMatcher(r"(a+)+b", timeout_s=0.3), lines)

    @settings(max_examples=10, deadline=None)
    @given(
        lines=st.lists(st.text(alphabet=st.characters(exclude_characters="\n"), max_size=20), max_size=5),
    )
    def test_both_ways_of_matching_agree(self, lines):
        """A pattern gives the same matches in the other process as here."""
        pattern = r"(\w)(\w+)?"
        found = [tuple(match) for match in LineMatcher(pattern).find(lines)]
        expected = [
            (index, *match.span()) for index, line in enumerate(lines) if (match := re.search(pattern, line))
        ]
        assert found == expected

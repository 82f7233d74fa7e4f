"""Diffs as text: what is shown, what is only named, and that the text can be trusted."""

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.workspace import is_binary, split_lines, unified_text
from treenail.workspace.diffs import (
    MAX_DIFF_CHARS,
    MAX_SHOWN_BYTES,
    MAX_SHOWN_LINES,
    Version,
    compare,
    describe,
)


def file(content: bytes, permissions: int = 0o644) -> Version:
    return Version("file", permissions, len(content), content)


def link(target: bytes) -> Version:
    return Version("link", 0o777, len(target), target)


DIRECTORY = Version("directory", 0o755)


class TestUnifiedText:
    def test_changed_lines_are_shown(self):
        """In the format that patch and review tools read, with three lines of context."""
        before = b"1\n2\n3\n4\n5\n6\n7\n"
        after = b"1\n2\n3\n4\nfive\n6\n7\n"
        assert unified_text("dir/a.txt", before, after) == (
            "--- a/dir/a.txt\n+++ b/dir/a.txt\n@@ -2,6 +2,6 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n"
        )

    def test_added_and_deleted_files_have_no_other_side(self):
        """The absent side is /dev/null."""
        assert unified_text("a", None, b"x\n") == "--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+x\n"
        assert unified_text("a", b"x\n", None) == "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"

    def test_a_missing_final_newline_is_marked(self):
        """Both sides of such a line are told apart."""
        assert unified_text("a", b"x", b"x\n") == (
            "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+x\n"
        )

    def test_equal_contents_have_no_diff(self):
        """Nothing changed, nothing shown."""
        assert unified_text("a", b"x", b"x") == ""
        assert unified_text("a", None, None) == ""

    def test_an_empty_file_can_be_added(self):
        """It is named even though no line is shown."""
        assert unified_text("a", None, b"") == "--- /dev/null\n+++ b/a\n"

    def test_binary_files_are_named(self):
        """With both sizes, and never shown."""
        assert unified_text("a.bin", b"\x00\x01", b"\x00") == "Binary file a.bin changed (2 -> 1 bytes)\n"
        assert unified_text("a.bin", None, b"\x00") == "Binary file a.bin added (1 bytes)\n"
        assert unified_text("a.bin", b"\x00", None) == "Binary file a.bin deleted (1 bytes)\n"

    def test_text_that_became_binary_is_named(self):
        """One binary side is enough."""
        assert unified_text("a", b"text\n", b"\x00").startswith("Binary file a changed")

    def test_large_files_are_named(self):
        """By size and by number of lines."""
        large = b"x" * (MAX_SHOWN_BYTES + 1)
        assert unified_text("a", b"", large) == f"Large file a changed (0 -> {len(large)} bytes)\n"
        many = b"\n" * (MAX_SHOWN_LINES + 1)
        assert unified_text("a", many, b"") == f"Large file a changed ({len(many)} -> 0 bytes)\n"

    def test_different_bytes_are_never_shown_as_equal(self):
        """Contents that differ only in bytes that are not UTF-8 are named as binary."""
        assert unified_text("a", b"\xff\n", b"\xfe\n") == "Binary file a changed (2 -> 2 bytes)\n"

    def test_carriage_returns_are_differences(self):
        """A change of line endings is seen."""
        assert unified_text("a", b"x\r\n", b"x\n") == "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\r\n+x\n"

    def test_a_strange_name_stays_on_one_line(self):
        """Nothing in a path can forge a line of the diff."""
        text = unified_text("a\n+++ b/evil", b"1\n", b"2\n")
        assert text.splitlines()[0] == "--- a/a\\n+++ b/evil"
        assert text.splitlines()[1] == "+++ b/a\\n+++ b/evil"
        assert "\\udcff" in unified_text("\udcff", b"1\n", b"2\n")

    @settings(max_examples=30, deadline=None)
    @given(before=st.text(alphabet="ab\n", max_size=12), after=st.text(alphabet="ab\n", max_size=12))
    def test_the_text_leads_from_one_content_to_the_other(self, tmp_path_factory, before, after):
        """`patch` turns the content before into the content after."""
        if shutil.which("patch") is None:  # the reader below is the check where patch is not installed
            assert apply(before, unified_text("f", before.encode(), after.encode())) == after
            return
        directory = tmp_path_factory.mktemp("patch")
        target = directory / "f"
        target.write_bytes(before.encode())
        text = unified_text("f", before.encode(), after.encode())
        if text:
            subprocess.run(
                ["patch", "-p1", "--posix", "--no-backup-if-mismatch", "f"],
                input=text.encode(), cwd=directory, check=True, capture_output=True,
            )  # fmt: skip
        # patch may remove a file that becomes empty.
        assert (target.read_text() if target.exists() else "") == after


def apply(before: str, text: str) -> str:
    """Read a unified diff by hand: keep and add lines, hunk by hunk."""
    if not text:
        return before
    old, new, position = split_lines(before), [], 0
    lines = text.split("\n")[2:-1]
    for index, line in enumerate(lines):
        if line.startswith("@@"):
            start, _, count = line.split()[1][1:].partition(",")
            begin = int(start) if count == "0" else int(start) - 1
            new += old[position:begin]
            position = begin
            continue
        if line.startswith("\\"):
            continue
        ending = "" if lines[index + 1 : index + 2] == ["\\ No newline at end of file"] else "\n"
        if line[0] in "-+ ":
            body = line[1:] + ending
            if line[0] in "- ":
                assert old[position] == body
                position += 1
            if line[0] in "+ ":
                new.append(body)
    return "".join(new + old[position:])


class TestCompare:
    @pytest.mark.parametrize(
        ("before", "after", "kind"),
        [
            (None, file(b"x"), "added"),
            (file(b"x"), None, "deleted"),
            (file(b"x"), file(b"y"), "modified"),
            (file(b"x"), file(b"x", 0o755), "mode"),
            (file(b"x"), file(b"y", 0o755), "modified"),
            (file(b"x"), DIRECTORY, "type"),
            (DIRECTORY, link(b"x"), "type"),
            (link(b"a"), link(b"b"), "modified"),
            (DIRECTORY, Version("directory", 0o700), "mode"),
        ],
    )
    def test_each_kind_of_change_has_a_name(self, before, after, kind):
        """Content wins over bits; another type wins over both."""
        change = compare("p", before, after)
        assert change is not None
        assert (change.path, change.kind) == ("p", kind)

    @pytest.mark.parametrize("same", [file(b"x"), DIRECTORY, link(b"x"), None])
    def test_no_change_is_none(self, same):
        """Equal versions do not differ."""
        assert compare("p", same, same) is None

    def test_identities_stand_for_content(self):
        """Large files are compared without loading them."""
        one = Version("file", 0o644, 10**9, None, identity="aaa")
        assert compare("p", one, Version("file", 0o644, 10**9, None, identity="aaa")) is None
        change = compare("p", one, Version("file", 0o644, 10**9, None, identity="bbb"))
        assert change is not None
        assert (change.kind, change.before_size, change.after_size) == ("modified", 10**9, 10**9)


class TestDescribe:
    def test_changes_are_sorted_and_equal_pairs_left_out(self):
        """One entry per changed path, by path."""
        diff = describe([("b", None, file(b"")), ("a", file(b"1"), file(b"2")), ("c", DIRECTORY, DIRECTORY)])
        assert [change.path for change in diff.changes] == ["a", "b"]

    def test_what_has_no_lines_gets_a_sentence(self):
        """Directories, links, bits and changes of type are told in words."""
        diff = describe(
            [
                ("1", None, DIRECTORY),
                ("2", DIRECTORY, None),
                ("3", file(b"x"), file(b"x", 0o755)),
                ("4", link(b"old"), link(b"new")),
                ("5", file(b"12"), link(b"there")),
                ("6", None, link(b"there")),
                ("7", DIRECTORY, Version("directory", 0o700)),
                ("8", DIRECTORY, file(b"#!", 0o755)),
            ]
        )
        assert diff.text.splitlines() == [
            "New directory: 1",
            "Deleted directory: 2",
            "Mode of 3: 0644 -> 0755",
            "Link 4 now leads to new instead of old",
            "Changed from file (2 bytes) to link to there: 5",
            "New link to there: 6",
            "Mode of 7: 0755 -> 0700",
            "Changed from directory to executable file (2 bytes): 8",
        ]

    def test_content_and_bits_are_both_told(self):
        """A file that changed in both ways shows both."""
        text = describe([("a", file(b"1\n"), file(b"2\n", 0o755))]).text
        assert text.startswith("Mode of a: 0644 -> 0755\n--- a/a\n")

    def test_a_file_that_was_not_loaded_is_named(self):
        """A version without content has sizes to tell."""
        diff = describe([("big", None, Version("file", 0o644, 5_000_000, None, identity="x"))])
        assert diff.text == "Large file big added (5000000 bytes)\n"

    def test_the_whole_text_is_bounded(self):
        """What does not fit is counted in the text and still listed in the changes."""
        content = b"x" * 80 + b"\n"
        items = [(f"{n:05}", None, file(content * 2_000)) for n in range(20)]
        diff = describe(items)
        assert len(diff.text) < MAX_DIFF_CHARS + 200
        assert len(diff.changes) == 20
        shown = diff.text.count("+++ b/")
        assert 0 < shown < 20
        assert f"and {20 - shown} more changed paths" in diff.text


@pytest.mark.parametrize(("content", "binary"), [(b"", False), (b"\xff", False), (b"a\0", True)])
def test_binary_is_a_nul_near_the_beginning(content, binary):
    """The rule of git and grep."""
    assert is_binary(content) is binary


@given(st.text(alphabet="a\n\r\x0b\x0c\x1c\u2028"))
def test_lines_join_to_the_text(text):
    """Nothing is lost by cutting; every line but the last ends with a newline, and has no other."""
    lines = split_lines(text)
    assert "".join(lines) == text
    assert all(line.endswith("\n") for line in lines[:-1])
    assert all("\n" not in line[:-1] for line in lines)

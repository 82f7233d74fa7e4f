"""The tools for files: what they do, what they say, and that they never say too much."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.testing.filesystem import tree
from treenail.tools import FILE_TOOLS, READING_TOOLS, ToolContext, files
from treenail.tools.files import MAX_RESULT_CHARS, WRITING_TOOLS
from treenail.workspace import Filesystem, InMemoryFilesystem

LONGEST_ANSWER = MAX_RESULT_CHARS + 3_000
"""The limit, plus the last line and the notes."""


def call(filesystem, tool, **arguments):
    """Call a tool as a model does, with JSON arguments."""
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({Filesystem: filesystem}))
    return tool.call(tool.parse(json.dumps(arguments)), ToolContext(state))


def ok(filesystem, tool, **arguments) -> str:
    result = call(filesystem, tool, **arguments)
    assert result.success, result.message
    return result.render()


def error(filesystem, tool, **arguments) -> str:
    """Call a tool that must fail, and must have changed nothing; return what it says."""
    before = tree(filesystem)
    result = call(filesystem, tool, **arguments)
    assert not result.success, result.message
    assert tree(filesystem) == before
    return result.render()


class TestAll:
    @pytest.mark.parametrize("tool", FILE_TOOLS, ids=lambda tool: tool.name)
    def test_a_model_is_told_what_it_needs(self, tool):
        """A description, every parameter explained, and an example that the tool itself accepts."""
        assert len(tool.description) > 60
        for name, schema in tool.parameters_schema["properties"].items():
            assert len(schema["description"]) > 15, name
        assert tool.examples
        for example in tool.examples:
            arguments = {name: getattr(example.input, name) for name in tool.parameters_schema["properties"]}
            assert tool.parse(json.dumps(arguments)) == example.input

    def test_effects_are_told_truly(self):
        """Looking has none; changing has some; no name is used twice."""
        assert {tool.effects for tool in READING_TOOLS} == {"none"}
        assert {tool.effects for tool in WRITING_TOOLS} == {"workspace"}
        assert not any(tool.is_foreign for tool in FILE_TOOLS)
        assert len({tool.name for tool in FILE_TOOLS}) == len(FILE_TOOLS) == 8

    @pytest.mark.parametrize("tool", READING_TOOLS, ids=lambda tool: tool.name)
    def test_reading_tools_work_on_a_view(self, tool):
        """They need no right to write."""
        view = InMemoryFilesystem({"a.txt": "needle\n"}).read_only_view()
        arguments = {
            "read_file": {"path": "a.txt"},
            "list_directory": {},
            "glob_files": {"pattern": "*"},
            "grep_files": {"pattern": "needle"},
        }[tool.name]
        text = ok(view, tool, **arguments)
        assert "a.txt" in text or "needle" in text

    @pytest.mark.parametrize(
        ("tool", "arguments"),
        [
            (files.write_file, {"path": "b.txt", "content": "x"}),
            (files.edit_file, {"path": "a.txt", "old_text": "x", "new_text": "y"}),
            (files.delete_file, {"path": "a.txt"}),
            (files.move_file, {"path": "a.txt", "target": "b.txt"}),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_writing_tools_say_that_a_view_is_read_only(self, tool, arguments):
        """A plain sentence instead of an exception."""
        assert "read-only" in error(InMemoryFilesystem({"a.txt": "x"}).read_only_view(), tool, **arguments)

    @pytest.mark.parametrize(
        ("tool", "arguments"),
        [
            (files.read_file, {"path": "../secret"}),
            (files.write_file, {"path": "/etc/passwd", "content": "x"}),
            (files.edit_file, {"path": "../x", "old_text": "a", "new_text": "b"}),
            (files.list_directory, {"path": ".."}),
            (files.glob_files, {"pattern": "../*"}),
            (files.grep_files, {"pattern": "x", "path": "/etc"}),
            (files.delete_file, {"path": "a/../../b"}),
            (files.move_file, {"path": "a.txt", "target": "../b"}),
            (files.move_file, {"path": "../a", "target": "b"}),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_nothing_outside_can_be_named(self, tool, arguments):
        """The answer says how paths are written."""
        text = error(InMemoryFilesystem({"a.txt": "x"}), tool, **arguments)
        assert "workspace root" in text or "absolute" in text or "'..'" in text

    @pytest.mark.parametrize("tool", [files.read_file, files.delete_file], ids=lambda tool: tool.name)
    def test_a_mistyped_name_is_corrected(self, tool):
        """What is near is offered, with its whole path."""
        fs = InMemoryFilesystem({"src/handlers.py": "x", "src/models.py": "y"})
        assert "Did you mean src/handlers.py?" in error(fs, tool, path="src/handler.py")
        assert "list_directory" in error(fs, tool, path="src/zzz")
        assert "does not exist either" in error(fs, tool, path="source/handlers.py")


class TestReadFile:
    def test_lines_have_numbers(self):
        """A number, a tab, the line; line endings are not shown."""
        fs = InMemoryFilesystem({"a.txt": "one\r\n\ttwo\nthree"})
        assert ok(fs, files.read_file, path="a.txt") == "     1\tone\n     2\t\ttwo\n     3\tthree\n"

    def test_a_part_can_be_read(self):
        """From a line, so many of them, with a note on how to go on."""
        fs = InMemoryFilesystem({"a.txt": "".join(f"line {n}\n" for n in range(1, 101))})
        text = ok(fs, files.read_file, path="a.txt", start_line=10, max_lines=2)
        assert text == "    10\tline 10\n    11\tline 11\n[a.txt continues; see more with start_line=12]"
        assert ok(fs, files.read_file, path="a.txt", start_line=100) == "   100\tline 100\n"

    def test_following_the_notes_reads_everything_once(self):
        """A long file is read to its end, whole, in parts that are each small."""
        lines = [f"{n} " + "x" * (n % 300) for n in range(5_000)]
        fs = InMemoryFilesystem({"long.txt": "\n".join(lines)})
        seen, start = [], 1
        while True:
            text = ok(fs, files.read_file, path="long.txt", start_line=start)
            assert len(text) <= LONGEST_ANSWER
            note = text.rpartition("start_line=")
            seen += [line.split("\t", 1)[1] for line in text.splitlines() if "\t" in line]
            if not note[1]:
                break
            start = int(note[2].rstrip("]"))
        assert seen == lines

    def test_long_lines_are_cut(self):
        """A minified file does not flood the model; what is left out is counted."""
        fs = InMemoryFilesystem({"min.js": "a" * 10_000_000 + "\nnext\n"})
        text = ok(fs, files.read_file, path="min.js")
        assert len(text) < 3_000
        assert "[line cut here: 9998000 more bytes]" in text
        assert text.endswith("     2\tnext\n")

    @given(text=st.text(alphabet="aé😀", min_size=1_990, max_size=2_010))
    def test_cut_lines_keep_whole_characters(self, text):
        """Nothing is cut in the middle of a character."""
        shown = ok(InMemoryFilesystem({"f": text}), files.read_file, path="f")
        assert "\ufffd" not in shown
        assert text[:1_990] in shown

    def test_a_file_too_large_to_load_is_read_in_part(self):
        """Larger than what is loaded at once: still read, line by line."""
        fs = InMemoryFilesystem({"big.log": b"0123456789\n" * 4_000_000})
        text = ok(fs, files.read_file, path="big.log", start_line=3_999_999, max_lines=10)
        assert text == "3999999\t0123456789\n4000000\t0123456789\n"

    def test_binary_files_are_named(self):
        """With their size, and not shown."""
        fs = InMemoryFilesystem({"a.bin": b"\x00" * 70})
        assert "binary file of 70 bytes" in error(fs, files.read_file, path="a.bin")

    def test_odd_bytes_are_replaced(self):
        """Text in another encoding can be read for the most part."""
        fs = InMemoryFilesystem({"a.txt": b"caf\xe9\n"})
        assert ok(fs, files.read_file, path="a.txt") == "     1\tcaf\ufffd\n"

    def test_empty_and_after_the_end(self):
        """Both are told apart."""
        fs = InMemoryFilesystem({"empty": "", "two": "1\n2\n"})
        assert "is empty" in ok(fs, files.read_file, path="empty")
        assert "has 2 lines" in error(fs, files.read_file, path="two", start_line=3)

    @pytest.mark.parametrize("arguments", [{"start_line": 0}, {"max_lines": 0}, {"start_line": -1}])
    def test_senseless_ranges_are_refused(self, arguments):
        """Lines count from one."""
        assert "at least 1" in error(InMemoryFilesystem({"a": "x"}), files.read_file, path="a", **arguments)

    def test_a_directory_is_not_read(self):
        """The answer says what it is."""
        assert "directory" in error(InMemoryFilesystem({"d/a": "x"}), files.read_file, path="d")


class TestWriteFile:
    def test_it_writes(self):
        """New, replaced and appended are told apart, with sizes."""
        fs = InMemoryFilesystem()
        assert ok(fs, files.write_file, path="a/b.txt", content="1\n2\n") == (
            "Created a/b.txt: 2 lines, 4 bytes."
        )
        assert "Replaced" in ok(fs, files.write_file, path="a/b.txt", content="x")
        assert "Added 1 lines, 1 bytes" in ok(
            fs, files.write_file, path="a/b.txt", content="y", mode="append"
        )
        assert fs.read("a/b.txt").content == "xy"

    def test_create_does_not_replace(self):
        """The answer says how to."""
        fs = InMemoryFilesystem({"a": "x"})
        assert "overwrite" in error(fs, files.write_file, path="a", content="y", mode="create")


class TestEditFile:
    def test_it_replaces_exactly(self):
        """The only occurrence, and the change is shown as a diff."""
        fs = InMemoryFilesystem({"a.py": "x = 1\ny = 2\n"})
        text = ok(fs, files.edit_file, path="a.py", old_text="y = 2", new_text="y = 3")
        assert fs.read("a.py").content == "x = 1\ny = 3\n"
        assert text.startswith("Replaced once in a.py:\n--- a/a.py\n")
        assert "-y = 2\n+y = 3\n" in text

    @given(
        before=st.text(alphabet="ab\n", max_size=10),
        old=st.text(alphabet="ab\n", min_size=1, max_size=3),
        new=st.text(alphabet="abc\n", max_size=3),
        every=st.booleans(),
    )
    def test_it_replaces_what_it_says_or_nothing(self, before, old, new, every):
        """One occurrence, or all if asked; otherwise the file is as it was."""
        fs = InMemoryFilesystem({"f": before})
        result = call(fs, files.edit_file, path="f", old_text=old, new_text=new, replace_all=every)
        count = before.count(old)
        allowed = old != new and (count == 1 or (every and count > 1))
        assert result.success is allowed
        assert fs.read("f", limit=-1).content == (before.replace(old, new) if allowed else before)

    def test_several_matches_are_listed(self):
        """With their lines, and both ways out."""
        fs = InMemoryFilesystem({"a.py": "pass\nx\npass\nif y: pass\n"})
        text = error(fs, files.edit_file, path="a.py", old_text="pass", new_text="return")
        assert "occurs 3 times in a.py, beginning at lines 1, 3, 4." in text
        assert "replace_all" in text
        assert "Replaced 3 times" in ok(
            fs, files.edit_file, path="a.py", old_text="pass", new_text="return", replace_all=True
        )

    def test_very_many_matches_are_counted(self):
        """Only the first lines are listed."""
        fs = InMemoryFilesystem({"a": "x\n" * 100_000})
        text = error(fs, files.edit_file, path="a", old_text="x", new_text="y")
        assert "occurs 100000 times" in text
        assert "19, 20, ..." in text
        assert len(text) < 500

    def test_no_match_shows_the_nearest_lines(self):
        """With numbers and what is around, so that the next try can succeed."""
        source = "import os\n\ndef handle_request(event):\n    return event.body\n\ndef other():\n    pass\n"
        fs = InMemoryFilesystem({"a.py": source})
        text = error(
            fs,
            files.edit_file,
            path="a.py",
            old_text="def handle_requests(event):\n    return event.text\n",
            new_text="x",
        )
        assert "does not occur in a.py" in text
        assert "     3\tdef handle_request(event):\n     4\t    return event.body" in text

    def test_the_block_that_fits_best_is_shown(self):
        """Where one line of a block is in several places, the others decide."""
        source = "\n".join(f"def f{n}():\n    value = {n}\n    return value\n" for n in range(50))
        fs = InMemoryFilesystem({"a.py": source})
        old = "    return value\n\ndef f37():\n    value = 'x'\n"
        text = error(fs, files.edit_file, path="a.py", old_text=old, new_text="y")
        assert "def f37():" in text
        assert "def f3():" not in text

    @pytest.mark.parametrize("old", ["def f():\n  return 1\n", "def f():\n\treturn 1\n", "def  f():"])
    def test_wrong_spaces_are_named(self, old):
        """The most common mistake has its own sentence."""
        fs = InMemoryFilesystem({"a.py": "def f():\n    return 1\n"})
        assert "spaces, tabs or line breaks" in error(
            fs, files.edit_file, path="a.py", old_text=old, new_text=""
        )

    def test_nothing_similar_is_said_so(self):
        """Without lines that would mislead."""
        fs = InMemoryFilesystem({"a.py": "x = 1\n"})
        text = error(fs, files.edit_file, path="a.py", old_text="completely different", new_text="")
        assert "read the file again" in text

    def test_windows_line_endings_are_kept(self):
        """A model that sees and sends plain line breaks can edit such a file."""
        fs = InMemoryFilesystem({"a.txt": "one\r\ntwo\r\nthree\r\n"})
        ok(fs, files.edit_file, path="a.txt", old_text="one\ntwo\n", new_text="1\n2\n")
        assert fs.read("a.txt").content == "1\r\n2\r\nthree\r\n"

    @pytest.mark.parametrize(
        ("before", "old", "new", "after"),
        [
            ("one\r\ntwo\r\n", "one", "1\n1.5", "1\r\n1.5\r\ntwo\r\n"),
            ("one\ntwo\n", "one", "1\r\n1.5", "1\n1.5\ntwo\n"),
            ("one\r\ntwo\nthree\nfour\n", "one\ntwo", "1\n2", "1\r\n2\nthree\nfour\n"),
            ("one\r\ntwo\r\n", "one\r\n", "one\n", "one\ntwo\r\n"),
            ("alone", "alone", "1\r\n2", "1\r\n2"),
        ],
        ids=["windows", "unix", "mixed", "on purpose", "no lines yet"],
    )
    def test_a_replacement_of_several_lines_takes_the_files_endings(self, before, old, new, after):
        """Also where the replaced text is part of one line, and does not show them."""
        fs = InMemoryFilesystem({"a.txt": before})
        ok(fs, files.edit_file, path="a.txt", old_text=old, new_text=new)
        assert fs.read_bytes("a.txt").content.decode() == after

    def test_a_text_that_overlaps_itself_is_ambiguous(self):
        """In "aaa" there are two places where "aa" begins; the model has to say which one it means."""
        fs = InMemoryFilesystem({"a.txt": "x = aaa\n"})
        text = error(fs, files.edit_file, path="a.txt", old_text="aa", new_text="b")
        assert "occurs 2 times" in text
        ok(fs, files.edit_file, path="a.txt", old_text="aa", new_text="b", replace_all=True)
        assert fs.read("a.txt").content == "x = ba\n"

    @pytest.mark.parametrize(
        ("old", "new", "says"), [("", "x", "write_file"), ("same", "same", "nothing would change")]
    )
    def test_senseless_edits_are_refused(self, old, new, says):
        """The answer says what to do instead."""
        fs = InMemoryFilesystem({"a": "same"})
        assert says in error(fs, files.edit_file, path="a", old_text=old, new_text=new)

    def test_what_is_not_text_is_not_edited(self):
        """Bytes that are not UTF-8 would be damaged."""
        fs = InMemoryFilesystem({"a": b"x\xff"})
        assert "not UTF-8" in error(fs, files.edit_file, path="a", old_text="x", new_text="y")

    def test_permission_bits_stay(self):
        """An edited script is still executable."""
        fs = InMemoryFilesystem({"run.sh": "echo a\n"})
        fs.chmod("run.sh", 0o755)
        ok(fs, files.edit_file, path="run.sh", old_text="a", new_text="b")
        assert fs.stat("run.sh").permissions == 0o755

    def test_a_large_change_is_shown_in_part(self):
        """The diff in the answer is bounded; the change is not."""
        fs = InMemoryFilesystem({"a": "x\n" * 3_000})
        text = ok(fs, files.edit_file, path="a", old_text="x", new_text="y", replace_all=True)
        assert len(text) < 5_000
        assert fs.read("a", limit=-1).content == "y\n" * 3_000


class TestListDirectory:
    def test_entries_are_told_apart(self):
        """Directories, files with sizes, links with targets, hidden ones too."""
        fs = InMemoryFilesystem({"b.txt": "12345", "a/x": "", ".env": ""})
        fs.symlink("c", "b.txt")
        assert ok(fs, files.list_directory) == ".env (0 bytes)\na/\nb.txt (5 bytes)\nc -> b.txt\n"

    def test_an_empty_directory_is_said_so(self):
        """A sentence instead of nothing."""
        assert ok(InMemoryFilesystem(), files.list_directory) == ". is empty."

    def test_a_file_is_not_listed(self):
        """The answer says why."""
        assert "not a directory" in error(InMemoryFilesystem({"a": ""}), files.list_directory, path="a")

    def test_a_huge_directory_does_not_flood(self):
        """2,000 entries: a first page, the total, and how to see the next."""
        fs = InMemoryFilesystem({f"{n:06}": "" for n in range(2_000)})
        text = ok(fs, files.list_directory)
        assert len(text) < LONGEST_ANSWER
        assert "of 2000; see more with skip=500" in text
        second = ok(fs, files.list_directory, skip=500)
        assert second.startswith("000500 (0 bytes)\n")
        last = ok(fs, files.list_directory, skip=1_999)
        assert last == "001999 (0 bytes)\n"

    @pytest.mark.parametrize("skip", [-1, 2, 99])
    def test_skipping_too_much_is_refused(self, skip):
        """The answer says how many there are."""
        assert "skip" in error(InMemoryFilesystem({"a": "", "b": ""}), files.list_directory, skip=skip)


class TestGlobFiles:
    def test_paths_are_found(self):
        """Sorted; directories end with a slash."""
        fs = InMemoryFilesystem({"src/a.py": "", "src/pkg/b.py": "", "c.md": ""})
        assert ok(fs, files.glob_files, pattern="**/*.py") == "src/a.py\nsrc/pkg/b.py\n"
        assert ok(fs, files.glob_files, pattern="*") == "c.md\nsrc/\n"
        assert ok(fs, files.glob_files, pattern="*", path="src") == "src/a.py\nsrc/pkg/\n"

    def test_hidden_names_are_left_out(self):
        """Unless asked for, or named by the request."""
        fs = InMemoryFilesystem(
            {".venv/a.py": "", "src/.cache/b.py": "", "src/c.py": "", ".github/d.yml": ""}
        )
        text = ok(fs, files.glob_files, pattern="**/*.py")
        assert text == "src/c.py\n"
        assert ok(fs, files.glob_files, pattern="**/*.py", include_hidden=True).count(".py") == 3
        assert ok(fs, files.glob_files, pattern=".github/*") == ".github/d.yml\n"
        assert ok(fs, files.glob_files, pattern="*", path=".github") == ".github/d.yml\n"

    def test_nothing_found_is_said_so(self):
        """Hidden matches are mentioned even then."""
        fs = InMemoryFilesystem({".a/x.py": ""})
        assert "Nothing matches" in ok(fs, files.glob_files, pattern="*.md")
        assert "1 hidden (see with include_hidden)" in ok(fs, files.glob_files, pattern="**/*.py")

    def test_many_matches_come_in_pages(self):
        """As many as fit, and how to see the next."""
        fs = InMemoryFilesystem({f"d/{n:05}.txt": "" for n in range(1_200)})
        text = ok(fs, files.glob_files, pattern="**/*.txt")
        assert "matches 1 to 500 of 1200; see more with skip=500" in text
        assert ok(fs, files.glob_files, pattern="**/*.txt", skip=1_000).count(".txt") == 200


class TestIgnored:
    """`.gitignore` and `.treenailignore` are heeded, and each tool has a way to ask for all."""

    @pytest.fixture
    def fs(self):
        return InMemoryFilesystem(
            {
                ".git/HEAD": "",
                ".gitignore": "node_modules/\n*.log\n!keep.log\n",
                ".treenailignore": "fixtures/\n",
                "node_modules/x/index.js": "hit\n",
                "fixtures/big.js": "hit\n",
                "a.log": "hit\n",
                "keep.log": "hit\n",
                "src/index.js": "hit\n",
            }
        )

    def test_listing_leaves_them_out_and_counts_them(self, fs):
        text = ok(fs, files.list_directory)
        assert "node_modules" not in text and "fixtures" not in text and "keep.log" in text
        assert "3 ignored (see with include_ignored)" in text
        assert "node_modules/\n" in ok(fs, files.list_directory, include_ignored=True)

    def test_searches_leave_them_out(self, fs):
        assert ok(fs, files.glob_files, pattern="**/*.js") == "src/index.js\n"
        assert ok(fs, files.grep_files, pattern="hit") == "keep.log:1: hit\nsrc/index.js:1: hit\n"
        assert "3 ignored" in ok(fs, files.grep_files, pattern="nowhere")
        assert ok(fs, files.glob_files, pattern="**/*.js", include_ignored=True).count(".js") == 3
        assert ok(fs, files.grep_files, pattern="hit", include_ignored=True).count("hit") == 5

    def test_a_path_that_leads_into_them_is_searched(self, fs):
        assert (
            ok(fs, files.grep_files, pattern="hit", path="node_modules") == "node_modules/x/index.js:1: hit\n"
        )
        assert ok(fs, files.grep_files, pattern="hit", path="a.log") == "a.log:1: hit\n"
        assert "hit" in ok(fs, files.read_file, path="fixtures/big.js")


class TestGrepFiles:
    def test_lines_are_found(self):
        """Path, line number, text."""
        fs = InMemoryFilesystem({"a.py": "x\ndef f(): pass\n", "b/c.py": "def g(): pass\n"})
        assert (
            ok(fs, files.grep_files, pattern=r"def \w+") == "a.py:2: def f(): pass\nb/c.py:1: def g(): pass\n"
        )

    def test_case_can_be_ignored(self):
        """Also for patterns that set flags themselves."""
        fs = InMemoryFilesystem({"a": "TODO\ntodo\n"})
        assert ok(fs, files.grep_files, pattern="todo") == "a:2: todo\n"
        assert ok(fs, files.grep_files, pattern="todo", ignore_case=True) == "a:1: TODO\na:2: todo\n"
        assert ok(fs, files.grep_files, pattern="(?s)todo", ignore_case=True).count("\n") == 2

    def test_hidden_files_do_not_hide_the_others(self):
        """Thousands of matches in a hidden directory, which sorts first, leave room for the visible ones."""
        fs = InMemoryFilesystem({".venv/big.py": "hit\n" * 10_000, "src/a.py": "hit\n"})
        text = ok(fs, files.grep_files, pattern="hit")
        assert text.startswith("src/a.py:1: hit\n")
        assert ".venv/big.py:1" in ok(fs, files.grep_files, pattern="hit", include_hidden=True)
        assert ".venv/big.py:1" in ok(fs, files.grep_files, pattern="hit", path=".venv")

    def test_many_matches_are_bounded(self):
        """The first ones, and advice."""
        fs = InMemoryFilesystem({"a": "hit\n" * 5_000})
        text = ok(fs, files.grep_files, pattern="hit", max_matches=10)
        assert text.count(": hit") == 10
        assert "the first 10 matches; there are more" in text
        assert (
            ok(fs, files.grep_files, pattern="hit", max_matches=100_000).count(": hit") == files.MAX_MATCHES
        )

    def test_long_lines_show_the_match(self):
        """A piece of the line with the match in it."""
        fs = InMemoryFilesystem({"min.js": "a" * 3_000 + "needle" + "b" * 100_000})
        text = ok(fs, files.grep_files, pattern="needle")
        assert "needle" in text
        assert "..." in text
        assert len(text) < 400

    def test_the_whole_answer_is_bounded(self):
        """Many long lines do not add up to a flood."""
        fs = InMemoryFilesystem({f"{n:03}": "hit " + "x" * 1_000 for n in range(300)})
        assert len(ok(fs, files.grep_files, pattern="hit", max_matches=200)) < LONGEST_ANSWER

    def test_a_bad_expression_is_explained(self):
        """With the position in the model's own pattern."""
        fs = InMemoryFilesystem({"a": "x"})
        assert "position 0" in error(fs, files.grep_files, pattern="(x", ignore_case=True)
        assert "at least 1" in error(fs, files.grep_files, pattern="x", max_matches=0)

    def test_nothing_found_is_said_so(self):
        """As a success: that is an answer, too."""
        assert "No line matches" in ok(InMemoryFilesystem({"a": "x"}), files.grep_files, pattern="y")


class TestDeleteAndMove:
    def test_delete(self):
        """Files, links and empty directories; the answer says which it was."""
        fs = InMemoryFilesystem({"a": "", "keep": ""})
        fs.mkdir("d")
        fs.symlink("l", "keep")
        assert ok(fs, files.delete_file, path="a") == "Deleted the file a."
        assert ok(fs, files.delete_file, path="d") == "Deleted the directory d."
        assert ok(fs, files.delete_file, path="l") == "Deleted the link l."
        assert list(tree(fs)) == ["keep"]

    def test_a_full_directory_needs_recursive(self):
        """The answer says how much is in it."""
        fs = InMemoryFilesystem({"d/a": "", "d/b": ""})
        assert "2 entries" in error(fs, files.delete_file, path="d")
        ok(fs, files.delete_file, path="d", recursive=True)
        assert tree(fs) == {}

    def test_the_root_is_not_deleted(self):
        """Not even recursively."""
        assert "root" in error(InMemoryFilesystem({"a": ""}), files.delete_file, path=".", recursive=True)

    def test_move(self):
        """Directories of the target are made."""
        fs = InMemoryFilesystem({"a": "x"})
        assert ok(fs, files.move_file, path="a", target="new/dir/b") == "Moved a to new/dir/b."
        assert fs.read("new/dir/b").content == "x"

    def test_a_taken_target_is_explained(self):
        """How to replace a file, or how to move into a directory."""
        fs = InMemoryFilesystem({"a": "x", "b": "y", "d/c": "z"})
        assert "overwrite" in error(fs, files.move_file, path="a", target="b")
        assert "target=d/a" in error(fs, files.move_file, path="a", target="d")
        ok(fs, files.move_file, path="a", target="b", overwrite=True)
        assert fs.read("b").content == "x"

    def test_a_missing_source_makes_no_directories(self):
        """Nothing is left behind by a mistake."""
        assert "nothing at 'zz'" in error(
            InMemoryFilesystem({"a": ""}), files.move_file, path="zz", target="n/z"
        )

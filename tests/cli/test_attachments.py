"""What a message names with an at sign, and what a paste becomes in the line."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treenail.errors import UsageError
from treenail.presenters.cli.attachments import (
    MAX_TEXT_BYTES,
    all_images,
    at_path,
    compose,
    fenced,
    image_type,
    named_paths,
    with_escapes,
)
from treenail.presenters.cli.line_editor import MAX_HISTORY_BYTES, Pastes, ProjectHistory
from treenail.presenters.cli.slash_commands import is_command


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("see @a.py and (@b/c.py), @d.", ["a.py", "b/c.py", "d."]),
        ('@"two words" @"two words"', ["two words"]),
        (r"me@host.org \@plain a@b", []),
        ("@", []),
        ("@@twice", []),
    ],
)
def test_an_at_sign_names_a_file_where_it_begins_a_word(typed: str, names: list[str]) -> None:
    assert named_paths(typed) == names


@given(st.text(st.characters(blacklist_characters='"\n/', blacklist_categories=["Cs", "Cc"]), min_size=1))
def test_a_path_is_written_so_that_it_is_read_again(path: str) -> None:
    assert named_paths(f"x {at_path(path)} y") == [path]


def test_a_full_stop_behind_a_path_belongs_to_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    assert compose([("look at @a.py.", False)], tmp_path).text == "look at @a.py.\n\na.py:\n```\nx\n```"


def test_all_files_together_have_a_bound(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("x" * (MAX_TEXT_BYTES // 2 - 1))
    compose([("@a @b", False)], tmp_path)
    with pytest.raises(UsageError, match="@c is too long"):
        compose([("@a @b @c", False)], tmp_path)


def test_a_directory_is_listed(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "a.py").touch()
    assert compose([("@src", False)], tmp_path).text == "@src\n\nsrc/ contains:\na.py\ndeep/"


def test_a_directory_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))  # Nothing can be opened.
    try:
        with pytest.raises(UsageError, match=r"@src cannot be listed .*; nothing was sent"):
            compose([("@src", False)], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_image_in_the_home_of_nobody_is_said() -> None:
    with pytest.raises(UsageError, match="there is no such user"):
        all_images(["~nosuchuser/a.png"])


def test_what_was_pasted_names_nothing_and_is_not_changed(tmp_path: Path) -> None:
    assert compose([("see ", False), ("@x \\@y", True)], tmp_path).text == "see @x \\@y"
    (tmp_path / "there").touch()
    assert with_escapes("@there\n@nowhere", tmp_path, is_first=True) == "@there\n\\@nowhere"


@pytest.mark.parametrize("pasted", ["!rm x", " !rm x", "/quit", "/undo now", "!", "@nowhere !x"])
def test_what_was_pasted_runs_nothing_and_arrives_as_it_was(tmp_path: Path, pasted: str) -> None:
    """Nothing at its beginning is a command of the chat, or the person's own."""
    shown = with_escapes(pasted, tmp_path, is_first=True)
    assert not shown.lstrip().startswith(("!", "/"))
    assert compose([(shown, False)], tmp_path).text == pasted.strip()


@given(st.text())
def test_no_file_ends_its_own_fence(text: str) -> None:
    fence, *_, last = fenced(text).split("\n")
    assert fence == last
    assert fence not in text


_PASTED = st.lists(st.text() | st.text('@!/\\"ab \n'), max_size=4)
_TYPED = st.text(st.characters(exclude_characters="[@\\"), max_size=20)


@given(_PASTED, _TYPED)
@example(["/"], "")
@example(["//"], "")
@example(["\\@x", "\\!x", "\\/x/y"], "")
@example(['@"a @b"'], "")
def test_a_paste_is_sent_as_it_was_also_when_its_line_is_sent_again(texts: list[str], between: str) -> None:
    """A line that comes back from the history holds its pastes in full; they still name and run nothing."""
    pastes = Pastes()
    texts = [each + "\n" * 10 for each in texts]
    line = between.join(pastes.fold(each) for each in texts)
    sent = between.join(texts).strip()
    assert compose(pastes.pieces(line), Path("/nowhere")).text == sent
    again = pastes.unfold(line)
    assert not again.lstrip().startswith("!") or between.lstrip().startswith("!")
    assert not is_command(again.strip()) or between.lstrip().startswith("/")
    assert compose([(again, False)], Path("/nowhere")).text == sent


def test_the_history_is_bounded_and_keeps_what_is_newest(tmp_path: Path) -> None:
    file = tmp_path / "typed"
    file.write_text("\n".join(f"# time\n+line {each}" for each in range(100_000)) + "\n")
    assert file.stat().st_size > MAX_HISTORY_BYTES
    history = ProjectHistory(file, Pastes())
    assert file.stat().st_size <= MAX_HISTORY_BYTES
    assert next(iter(history.load_history_strings())) == "line 99999"


def test_pictures_are_known_by_their_first_bytes() -> None:
    assert image_type(b"\xff\xd8\xff\xe0") == "image/jpeg"
    assert image_type(b"RIFF\0\0\0\0WEBPVP8 ") == "image/webp"
    assert image_type(b"GIF89a") == "image/gif"
    assert image_type(b"<svg>") is None

"""Somebody saves a file at the very moment in which it is replaced, removed or put back: theirs stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treenail.errors import WorkspaceConflictError
from treenail.workspace import rooted
from treenail.workspace.host import HostFilesystem
from treenail.workspace.restorer import Restorer
from treenail.workspace.undo import Undo

SAVED = "a person's\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    (made / "a.txt").write_text("original\n")
    (made / "b.txt").write_text("other\n")
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


def in_place(path: Path) -> None:
    path.write_text(SAVED)


def by_rename(path: Path) -> None:
    (path.parent.parent / "new").write_text(SAVED)
    (path.parent.parent / "new").rename(path)


SAVES = pytest.mark.parametrize("save", [in_place, by_rename])


@SAVES
def test_a_save_between_two_writes_of_one_call_stays(
    fs: HostFilesystem, root: Path, save: Callable[[Path], None]
) -> None:
    """Whatever becomes of the call; and it is reported."""
    call = fs.begin("call", tool_name="tool")
    fs.write("a.txt", "first\n")
    save(root / "a.txt")
    with pytest.raises(WorkspaceConflictError, match=r"a\.txt"):
        fs.write("a.txt", "second\n")
    assert (root / "a.txt").read_text() == SAVED
    assert call.rollback().conflicts == ("a.txt",)
    assert (root / "a.txt").read_text() == SAVED
    assert sorted(os.listdir(root)) == ["a.txt", "b.txt"]


CHANGES: dict[str, Callable[[HostFilesystem], object]] = {
    "write": lambda fs: fs.write("a.txt", "the call's\n"),
    "append": lambda fs: fs.write("a.txt", "the call's\n", mode="append"),
    "delete": lambda fs: fs.delete("a.txt"),
    "move": lambda fs: fs.move("b.txt", "a.txt", overwrite=True),
}


@SAVES
@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_save_while_a_file_is_replaced_or_removed_stays(
    fs: HostFilesystem,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    can_exchange: bool,
    save: Callable[[Path], None],
) -> None:
    """It came after the look at what was there, so the history does not have it; also on a plain system."""
    intend = Undo.intend

    def intend_and_save(undo: Undo, changes: object) -> None:
        intend(undo, changes)  # type: ignore[arg-type]
        save(root / "a.txt")

    call = fs.begin("call", tool_name="tool")
    if not can_exchange:
        monkeypatch.setattr(rooted, "_LIBC", None)
    with monkeypatch.context() as patched:
        patched.setattr(Undo, "intend", intend_and_save)
        with pytest.raises(WorkspaceConflictError, match=r"a\.txt"):
            CHANGES[change](fs)
    assert (root / "a.txt").read_text() == SAVED
    assert "a.txt" in call.rollback().conflicts
    assert (root / "a.txt").read_text() == SAVED
    assert (root / "b.txt").read_text() == "other\n"
    assert sorted(os.listdir(root)) == ["a.txt", "b.txt"]


def test_a_new_file_that_somebody_makes_a_moment_before_stays(
    fs: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend = Undo.intend

    def intend_and_save(undo: Undo, changes: object) -> None:
        intend(undo, changes)  # type: ignore[arg-type]
        (root / "new.txt").write_text(SAVED)

    call = fs.begin("call", tool_name="tool")
    with monkeypatch.context() as patched:
        patched.setattr(Undo, "intend", intend_and_save)
        with pytest.raises(WorkspaceConflictError):
            fs.write("new.txt", "the call's\n")
    call.rollback()
    assert (root / "new.txt").read_text() == SAVED


def test_what_a_program_saves_into_a_file_that_was_just_replaced_is_kept(
    fs: HostFilesystem, root: Path
) -> None:
    """It had opened the file before, so its bytes go where no path leads."""
    call = fs.begin("call", tool_name="write_file")
    with open(root / "a.txt", "r+") as editor:
        fs.write("a.txt", "the call's\n")
        editor.write(SAVED)
    call.prepare()
    call.finish()
    [kept] = fs.kept()
    assert kept.paths == ("a.txt",)
    fs.bring_back(kept)
    assert (root / "a.txt").read_text().startswith(SAVED)


@SAVES
@pytest.mark.parametrize("created", [False, True])
def test_a_save_at_the_moment_of_an_undo_stays(
    fs: HostFilesystem,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    created: bool,
    save: Callable[[Path], None],
) -> None:
    """Between the last look at a file and the step that puts the old one back, or removes a new one."""
    path = root / ("new.txt" if created else "a.txt")
    is_as_seen = Restorer._is_as_seen

    def look_and_save(restorer: Restorer, place: object, status: object, current: object) -> bool:
        answer = is_as_seen(restorer, place, status, current)  # type: ignore[arg-type]
        save(path)
        return answer

    call = fs.begin("call", tool_name="run_command", foreign=True)
    path.write_text("the command's\n")
    monkeypatch.setattr(Restorer, "_is_as_seen", look_and_save)
    assert call.rollback().conflicts == (path.name,)
    assert path.read_text() == SAVED

"""What an undo takes away without knowing whose it is: kept first, reported, and brought back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from host_kit import git, look_at

from treenail.workspace import sweep
from treenail.workspace.base import RestoreReport
from treenail.workspace.host import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


def undone_with_a_persons_edits(fs: HostFilesystem, root: Path) -> RestoreReport:
    """A person saves one file and makes others while a command runs, which is then undone."""
    (root / "notes.txt").write_text("mine\n")
    (root / "gone.txt").write_text("the person deletes this\n")
    call = fs.begin("call-1", tool_name="run_command", foreign=True)
    (root / "built.o").write_text("the command's\n")
    (root / "notes.txt").write_text("mine, and hours of work\n")
    (root / "drafts").mkdir()
    (root / "drafts/one.txt").write_text("a new draft\n")
    (root / "drafts/one.txt").chmod(0o600)
    (root / "drafts/link").symlink_to("one.txt")
    (root / "gone.txt").unlink()
    return call.rollback()


def test_what_an_undo_takes_away_is_reported_and_can_be_brought_back(fs: HostFilesystem, root: Path) -> None:
    """An edit saved while a command ran is not lost when the command is undone."""
    report = undone_with_a_persons_edits(fs, root)
    assert (root / "notes.txt").read_text() == "mine\n"
    assert not (root / "drafts").exists() and not (root / "built.o").exists()
    assert set(report.kept) == {"notes.txt", "built.o", "drafts/one.txt", "drafts/link"}
    assert not report.conflicts
    [kept] = fs.kept()
    assert (kept.call_id, kept.tool_name, kept.root) == ("call-1", "run_command", str(root))
    fs.bring_back(kept, "drafts")
    assert (root / "drafts/one.txt").read_text() == "a new draft\n"
    assert (root / "drafts/one.txt").stat().st_mode & 0o777 == 0o600
    assert (root / "drafts/link").readlink() == Path("one.txt")
    assert not (root / "built.o").exists()
    fs.bring_back(kept)
    assert (root / "notes.txt").read_text() == "mine, and hours of work\n"
    assert (root / "built.o").exists()


def test_what_is_there_is_kept_before_something_is_brought_back_over_it(
    fs: HostFilesystem, root: Path
) -> None:
    """Bringing back loses nothing either: the version it replaces can be had the same way."""
    undone_with_a_persons_edits(fs, root)
    (root / "notes.txt").write_text("written since\n")
    report = fs.bring_back(fs.kept()[0], "notes.txt")
    assert report.kept == ("notes.txt",)
    assert (root / "notes.txt").read_text() == "mine, and hours of work\n"
    fs.bring_back(fs.kept()[-1])
    assert (root / "notes.txt").read_text() == "written since\n"


def test_files_can_be_brought_back_into_another_directory(
    fs: HostFilesystem, root: Path, tmp_path: Path
) -> None:
    """The workspace is left alone, and nothing is replaced in the other place either."""
    undone_with_a_persons_edits(fs, root)
    before, other = look_at(root), tmp_path / "other"
    other.mkdir()
    fs.copy_kept(fs.kept()[0], other, "drafts")
    assert (other / "drafts/one.txt").read_text() == "a new draft\n"
    with pytest.raises(FileExistsError):
        fs.copy_kept(fs.kept()[0], other, "drafts")
    assert look_at(root) == before


def test_a_recovery_after_a_kill_keeps_what_it_takes_away(root: Path, tmp_path: Path) -> None:
    """A person edits after the process died in a command; the next one undoes the command and keeps it."""
    (root / "a.txt").write_text("original")
    dead = HostFilesystem(root, store=tmp_path / "store")
    dead.begin("call-1", tool_name="run_command", foreign=True)
    (root / "a.txt").write_text("the person's")
    (root / "new.txt").write_text("the person's, too")
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        report = fs.recover("call-1", committed=False)
        assert set(report.kept) == {"a.txt", "new.txt"}
        fs.bring_back(fs.kept()[-1])
    assert (root / "a.txt").read_text() == "the person's"
    assert (root / "new.txt").read_text() == "the person's, too"


def test_going_back_to_a_boundary_keeps_what_no_call_wrote(fs: HostFilesystem, root: Path) -> None:
    """A person's rollback over later edits of somebody else's keeps those edits, and not the call's own."""
    (root / "a.txt").write_text("original")
    before = fs.snapshot(scan=True)
    call = fs.begin("call-1", tool_name="write_file")
    fs.write("own.txt", "by the call")
    call.prepare()
    call.finish()
    (root / "a.txt").write_text("edited by hand")
    report = fs.restore(before)
    assert (root / "a.txt").read_text() == "original" and not (root / "own.txt").exists()
    assert report.kept == ("a.txt",)
    fs.bring_back(fs.kept()[-1])
    assert (root / "a.txt").read_text() == "edited by hand"


def test_what_was_brought_back_is_kept_again(fs: HostFilesystem, root: Path) -> None:
    """Going back, forward and back again names the files of unknown origin each time."""
    (root / "a.txt").write_text("original")
    call = fs.begin("call-1", tool_name="run_command", foreign=True)
    (root / "mine.txt").write_text("the person's, while the command ran")
    call.prepare()
    call.finish()
    before, after = replace(call.base, scanned=False), replace(fs.snapshot(), scanned=False)
    for _ in range(2):
        assert fs.restore(before).kept == ("mine.txt",)
        assert fs.restore(after).kept == ()
    assert (root / "mine.txt").read_text() == "the person's, while the command ran"


def test_what_the_call_itself_wrote_is_not_kept(fs: HostFilesystem, root: Path) -> None:
    """A failed write of an agent's is no person's work: a plain call keeps nothing."""
    (root / "a.txt").write_text("original")
    call = fs.begin("call-1")
    fs.write("a.txt", "by the call")
    assert call.rollback().kept == ()
    call = fs.begin("call-2", foreign=True)
    fs.write("a.txt", "by the call, through the workspace")
    (root / "b.txt").write_text("past the workspace")
    assert call.rollback().kept == ("b.txt",)


def test_a_file_saved_during_the_undo_is_left_alone(
    fs: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the deed somebody saves: theirs stays, and is reported."""
    (root / "a.txt").write_text("original")
    (root / "b.txt").write_text("original")
    call = fs.begin("call-1", foreign=True)
    for name in ("a.txt", "b.txt", "c.txt"):
        (root / name).write_text("by the command")
    apply = fs.undo.apply

    def saved_meanwhile(*arguments: object, **keywords: object) -> None:
        (root / "a.txt").write_text("saved at the last moment")
        (root / "c.txt").write_text("this one as well")
        apply(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(fs.undo, "apply", saved_meanwhile)
    report = call.rollback()
    assert set(report.conflicts) == {"a.txt", "c.txt"} and report.kept == ("b.txt",)
    assert (root / "a.txt").read_text() == "saved at the last moment"
    assert (root / "b.txt").read_text() == "original"
    assert (root / "c.txt").read_text() == "this one as well"


def test_kept_files_survive_a_sweep_and_git_can_show_them(fs: HostFilesystem, root: Path) -> None:
    undone_with_a_persons_edits(fs, root)
    store = fs.pack()
    assert store is not None
    assert "hours of work" in git(store, "show", "refs/kept/main:notes.txt")
    sweep(store)
    fs.bring_back(fs.kept()[0])
    assert (root / "notes.txt").read_text() == "mine, and hours of work\n"
    sweep(store, [])
    assert not os.path.exists(store / "refs/kept/main")


def test_what_another_run_wrote_since_is_left_alone(root: Path, tmp_path: Path) -> None:
    """A run died in a command, another worked in the same directory and completed; the first is undone."""
    store = tmp_path / "store"
    (root / "a.txt").write_text("original")
    dead = HostFilesystem(root, store=store, line="dead")
    dead.begin("call-1", tool_name="run_command", foreign=True)
    (root / "half.o").write_text("of the dead command")
    (root / "a.txt").write_text("of the dead command")
    with HostFilesystem(root, store=store, line="other") as other:
        plain = other.begin("call-2", tool_name="write_file")
        other.write("a.txt", "the other run's")
        other.write("d/b.txt", "the other run's")
        plain.prepare()
        plain.finish()
        command = other.begin("call-3", tool_name="run_command", foreign=True)
        (root / "c.txt").write_text("the other run's command's")
        command.prepare()
        command.finish()
    with HostFilesystem(root, store=store, line="dead") as fs:
        report = fs.recover("call-1", committed=False)
    assert set(report.conflicts) == {"a.txt", "c.txt", "d", "d/b.txt"}
    assert report.kept == ("half.o",)
    assert (root / "a.txt").read_text() == "the other run's"
    assert (root / "d/b.txt").read_text() == "the other run's"
    assert (root / "c.txt").read_text() == "the other run's command's"
    assert not (root / "half.o").exists()

"""An isolated copy is a workspace like any other, and the other one does not notice it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from treenail.errors import UsageError, WorkspaceConflictError
from treenail.testing.filesystem import FilesystemConformance, LinkConformance, tree
from treenail.workspace import (
    Filesystem,
    InMemoryFilesystem,
    IsolatedFilesystem,
    apply_changes,
    fingerprint,
    isolate,
)
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated import conflicts_with
from treenail.workspace.isolated.changes import mirror
from treenail.workspace.paths import MAX_DEPTH


def copy_of(directory: Path, files: dict[str, str] | None = None) -> IsolatedFilesystem:
    (directory / "base").mkdir()
    base = HostFilesystem(directory / "base", store=directory / "store")
    for path, text in (files or {}).items():
        base.write(path, text)
    made = isolate(base, place=directory / "copy")
    assert isinstance(made, IsolatedFilesystem)
    return made


class _Isolated:
    def make_filesystem(self, directory: Path) -> Filesystem:
        return copy_of(directory)

    def reopen(self, filesystem: Filesystem) -> Filesystem:
        assert isinstance(filesystem, IsolatedFilesystem)
        past = filesystem._overlay.past
        again = isolate(past.host, snapshot=filesystem.snapshot_at_fork, place=filesystem._place)
        filesystem.close()
        return again

    def close(self, filesystem: Filesystem) -> None:
        assert isinstance(filesystem, IsolatedFilesystem)
        filesystem.close()
        filesystem._overlay.past.host.close()

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        assert isinstance(filesystem, IsolatedFilesystem)
        filesystem.symlink(path, target)


class TestCopyOfNothing(_Isolated, FilesystemConformance):
    """A copy of an empty workspace passes the suite."""


class TestCopyThatWasEmptied(_Isolated, FilesystemConformance):
    """A copy passes the suite also where it hides what the other workspace has at the same paths."""

    def make_filesystem(self, directory: Path) -> Filesystem:
        made = copy_of(directory, {"a/b.txt": "old\n", "a/c/d.txt": "old\n", "x": "old", "notes.md": "old"})
        for entry in made.list():
            made.delete(entry.path, recursive=True)
        return made


class TestLinksInACopy(_Isolated, LinkConformance):
    """Links in a copy are links."""


# --- laws: a copy on disk is a copy in memory ------------------------------------------------------------

PATHS = ["a", "b", "d/a", "d/b", "d/e/a", "d", "d/e"]
OPERATIONS = st.tuples(
    st.sampled_from(["base", "copy"]),
    st.sampled_from(["write", "delete", "move", "mkdir", "chmod", "boundary", "call", "foreign"]),
    st.sampled_from(PATHS),
    st.sampled_from(PATHS),
)


def do(filesystem: Filesystem, what: str, path: str, other: str, number: int) -> str:
    """Do one thing; say how it went, so that two filesystems can be compared."""
    try:
        if what == "write":
            filesystem.write(path, f"{number}\n")
        elif what == "delete":
            filesystem.delete(path, recursive=True)
        elif what == "move":
            filesystem.move(path, other, overwrite=True)
        elif what == "mkdir":
            filesystem.mkdir(path)
        elif what == "chmod":
            filesystem.chmod(path, 0o700)
        elif what == "boundary":
            filesystem.snapshot()
        else:
            call = filesystem.begin(f"call-{number}", foreign=what == "foreign")
            did = do(filesystem, "write" if number % 2 else "delete", path, other, number)
            if number % 3:
                call.prepare()
                call.finish()
            else:
                call.rollback()
            return did
    except (OSError, ValueError):
        # Which of two reasons is named first is not part of the law.
        return "refused"
    return "done"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    before=st.lists(OPERATIONS, max_size=6),
    steps=st.lists(OPERATIONS, max_size=14),
)
@example(
    before=[("base", "write", "d/b", "a")],
    steps=[
        ("base", "delete", "d", "a"),
        ("copy", "write", "d/a", "a"),
        ("base", "write", "d", "a"),
    ],
)
def test_a_copy_on_disk_does_what_a_copy_in_memory_does(
    tmp_path_factory: pytest.TempPathFactory, before: list[Any], steps: list[Any]
) -> None:
    """Whatever both sides do afterwards, they do not see each other; and what comes back is the same."""
    directory = tmp_path_factory.mktemp("law")
    (directory / "base").mkdir()
    with HostFilesystem(directory / "base", store=directory / "store") as base:
        model = InMemoryFilesystem()
        for number, (_, what, path, other) in enumerate(before):
            assert do(base, what, path, other, number) == do(model, what, path, other, number)
        copy, twin = isolate(base, place=directory / "copy"), isolate(model)
        for number, (side, what, path, other) in enumerate(steps):
            real, ideal = (base, model) if side == "base" else (copy, twin)
            assert do(real, what, path, other, number) == do(ideal, what, path, other, number)
            assert tree(copy) == tree(twin)
            assert tree(base) == tree(model)
        mine, ours = copy.changes(), twin.changes()
        assert [(each.path, each.before, each.after) for each in mine] == [
            (each.path, each.before, each.after) for each in ours
        ]
        conflicts = conflicts_with(model, ours)
        assert conflicts_with(base, mine) == conflicts
        if conflicts:
            with pytest.raises(WorkspaceConflictError):
                apply_changes(base, mine)
            assert tree(base) == tree(model)
        else:
            call = base.begin("apply")
            assert apply_changes(base, mine) == apply_changes(model, ours)
            call.finish()
            assert tree(base) == tree(model)
            for each in mine:
                assert fingerprint(base, each.path) == each.after
        again = isolate(base, snapshot=copy.snapshot_at_fork, place=directory / "copy")
        assert tree(again) == tree(twin)
        copy.close()
        again.close()


def test_what_a_foreign_process_does_to_the_other_workspace_does_not_show(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"a.txt": "old\n", "d/b.txt": "old\n"})
    base = copy._overlay.past.host
    call = base.begin("a command", foreign=True)
    (tmp_path / "base" / "a.txt").write_text("by the process\n")
    (tmp_path / "base" / "new.txt").write_text("by the process\n")
    (tmp_path / "base" / "d" / "b.txt").unlink()
    assert copy.read("a.txt").content == "old\n"
    assert [each.path for each in copy.glob("**/*.txt")] == ["a.txt", "d/b.txt"]
    call.prepare()
    call.finish()
    assert copy.read("a.txt").content == "old\n"
    assert copy.read("d/b.txt").content == "old\n"
    assert not copy.exists("new.txt")
    assert copy.changes() == ()


def test_an_edit_past_both_of_them_is_a_conflict_where_the_copy_has_written(tmp_path: Path) -> None:
    """What an editor did to the original after the copy had changed the path is not lost."""
    copy = copy_of(tmp_path, {"a.txt": "old\n"})
    copy.write("a.txt", "mine\n")
    (tmp_path / "base" / "a.txt").write_text("by an editor\n")
    base = copy._overlay.past.host
    assert conflicts_with(base, copy.changes()) == ("a.txt",)
    assert (tmp_path / "base" / "a.txt").read_text() == "by an editor\n"


def test_a_process_works_in_a_real_directory_only_while_its_call_is_open(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"a.txt": "old\n"})
    assert copy.host_root is None
    call = copy.begin("a command", foreign=True)
    root = copy.host_root
    assert root is not None
    assert (root / "a.txt").read_text() == "old\n"
    (root / "a.txt").write_text("new\n")
    (root / "sub").mkdir()
    (root / "sub" / "c").symlink_to("../a.txt")
    call.prepare()
    call.finish()
    assert copy.host_root is None
    assert copy.read("sub/c").content == "new\n"
    assert (tmp_path / "base" / "a.txt").read_text() == "old\n"
    again = copy.begin("another", foreign=True)
    (root / "a.txt").unlink()
    again.rollback()
    assert copy.read("a.txt").content == "new\n"


def test_a_copy_is_found_again_and_can_be_thrown_away(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"a.txt": "old\n"})
    base = copy._overlay.past.host
    copy.delete("a.txt")
    copy.write("b.txt", "new\n")
    copy.close()
    again = isolate(base, snapshot=copy.snapshot_at_fork, place=tmp_path / "copy")
    assert [(each.path, each.after.kind) for each in again.changes()] == [
        ("a.txt", "absent"),
        ("b.txt", "file"),
    ]
    again.discard()
    assert not (tmp_path / "copy").exists()
    assert base.read("a.txt").content == "old\n"


def test_only_a_workspace_itself_can_be_copied(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a place"):
        isolate(HostFilesystem(tmp_path))
    with pytest.raises(UsageError, match="not their views"):
        isolate(InMemoryFilesystem().read_only_view())


def test_the_past_stays_what_it_was_however_often_the_original_changes(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"a.txt": "old\n"})
    base = copy._overlay.past.host
    for text in ("first\n", "second\n"):
        call = base.begin(f"call-{text.strip()}")
        base.write("a.txt", text)
        call.prepare()
        call.finish()
    assert copy.read("a.txt").content == "old\n"
    base.delete("a.txt")
    base.mkdir("a.txt")
    assert copy.read("a.txt").content == "old\n"


def test_a_directory_that_is_made_anew_does_not_show_what_was_in_the_old_one(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"d/a.txt": "old\n", "d/e/b.txt": "old\n"})
    copy.delete("d", recursive=True)
    copy.mkdir("d")
    assert list(copy.list("d")) == []
    copy.write("d/e/c.txt", "new\n")
    assert [each.path for each in copy.glob("**/*.txt")] == ["d/e/c.txt"]
    assert {each.path: each.after.kind for each in copy.changes()} == {
        "d/a.txt": "absent",
        "d/e/b.txt": "absent",
        "d/e/c.txt": "file",
    }


def test_what_a_path_was_is_noted_at_the_first_change_and_not_at_a_later_one(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"a.txt": "old\n"})
    copy.write("a.txt", "mine\n")
    (tmp_path / "base" / "a.txt").write_text("by an editor\n")
    copy.delete("a.txt")
    assert conflicts_with(copy._overlay.past.host, copy.changes()) == ("a.txt",)


def test_what_somebody_put_into_a_directory_that_is_to_go_is_a_conflict(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"d/a.txt": "old\n"})
    base = copy._overlay.past.host
    copy.delete("d", recursive=True)
    base.write("d/new.txt", "keep me\n")
    assert conflicts_with(base, copy.changes()) == ("d/new.txt",)
    with pytest.raises(WorkspaceConflictError) as refused:
        apply_changes(base, copy.changes())
    assert refused.value.paths == ("d/new.txt",)
    assert base.read("d/a.txt").content == "old\n"


def test_a_diff_names_each_path_once_however_often_it_was_hidden(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"d/a.txt": "old\n", "d/e/b.txt": "old\n"})
    start = copy.snapshot()
    copy.delete("d/e", recursive=True)
    copy.delete("d", recursive=True)
    assert [(each.path, each.kind) for each in copy.diff(start).changes] == [
        ("d", "deleted"),
        ("d/a.txt", "deleted"),
        ("d/e", "deleted"),
        ("d/e/b.txt", "deleted"),
    ]


def test_a_command_sees_what_a_call_before_it_has_undone(tmp_path: Path) -> None:
    """The directory of commands follows the copy, also where that went back without a command."""
    copy = copy_of(tmp_path, {"a.txt": "old\n", "d/b.txt": "old\n"})
    copy.begin("a first command", foreign=True).finish()
    start = copy.snapshot()
    copy.write("a.txt", "new\n")
    undone = copy.begin("undone")
    copy.delete("d", recursive=True)
    copy.write("c/new.txt", "new\n")
    undone.rollback()
    copy.begin("a command", foreign=True)
    assert copy.host_root is not None
    seen = {path.name: path.read_text() for path in copy.host_root.rglob("*.txt")}
    assert seen == {"a.txt": "new\n", "b.txt": "old\n"}
    copy.restore(start)
    assert (copy.host_root / "a.txt").read_text() == "old\n"


@pytest.mark.parametrize("instead", ["a file", "a link"])
def test_what_somebody_put_in_the_place_of_a_directory_is_a_conflict(tmp_path: Path, instead: str) -> None:
    """A file that the copy has made in it would have no place to go to, or end up somewhere else."""
    copy = copy_of(tmp_path, {"d/e/a.txt": "old\n", "elsewhere/a.txt": "old\n"})
    base = copy._overlay.past.host
    copy.write("d/e/new.txt", "new\n")
    base.delete("d", recursive=True)
    if instead == "a file":
        base.write("d", "keep me\n")
    else:
        base.symlink("d", "elsewhere")
    before = tree(base)
    with pytest.raises(WorkspaceConflictError) as refused:
        apply_changes(base, copy.changes())
    assert refused.value.paths == ("d",)
    assert tree(base) == before


def test_a_move_that_would_make_the_tree_too_deep_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    deep = "/".join("d" * (MAX_DEPTH - 2))
    copy = copy_of(tmp_path, {f"{deep}/a.txt": "old\n", "e/f/g/h.txt": "old\n"})
    before = tree(copy)
    with pytest.raises(OSError, match="levels deep") as refused:
        copy.move("e", f"{deep}/e")
    assert refused.value.errno == errno.ENAMETOOLONG
    assert tree(copy) == before
    copy.move("e/f/g", f"{deep}/g")
    assert copy.read(f"{deep}/g/h.txt").content == "old\n"


def test_a_command_does_not_see_what_was_in_a_directory_before_it_was_made_anew(tmp_path: Path) -> None:
    copy = copy_of(tmp_path, {"d/a.txt": "old\n", "d/e/b.txt": "old\n"})
    copy.begin("a first command", foreign=True).finish()
    copy.delete("d", recursive=True)
    copy.mkdir("d/e")
    copy.begin("a command", foreign=True)
    assert copy.host_root is not None
    assert sorted(path.name for path in copy.host_root.rglob("*")) == ["d", "e"]


def test_a_mirrored_directory_comes_with_what_is_in_it_and_goes_with_what_was() -> None:
    source = InMemoryFilesystem(
        {"d/a.txt": "a\n", "d/e/b.txt": "b\n", "x": "was a directory\n", "kept": "other"}
    )
    target = InMemoryFilesystem({"d": "was a file\n", "x/y/z.txt": "z\n", "kept": "mine"})
    mirror(source, target, ["d", "x"])
    source.delete("kept")
    target.delete("kept")
    assert tree(target) == tree(source)

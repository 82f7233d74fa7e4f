"""A command on a layer: the workspace is not touched until the layer is applied, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from host_kit import as_nobody, look_at
from layer_kit import fill, layers_in, on_layer
from tests.forks import in_child

from treenail.errors import WorkspaceConflictError, WorkspaceError
from treenail.workspace.applying import AppliedLayer
from treenail.workspace.host import HostFilesystem
from treenail.workspace.layers import CommandLayer, Move, remove_tree
from treenail.workspace.restorer import ReportBuilder
from treenail.workspace.rooted import RootedDirectory

EVERYTHING = (
    "echo 2 > a; rm b; rm -r d/e; mkdir d/e; echo new > d/e/n; mkdir -p n/m; echo 3 > n/m/f; ln -sfn b l; "
    "chmod 600 d/x; mv d/y d/moved; chmod 750 d; ln a also"
)
"""A script with every kind of change."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    fill(place)
    return place


@pytest.fixture(params=["beside", "elsewhere"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A private store on the workspace's filesystem, and one on another: then layers are copied."""
    if request.param == "beside":
        yield tmp_path / "store"
        return
    with TemporaryDirectory(dir="/dev/shm", prefix="treenail-test-") as name:
        assert os.stat(name).st_dev != os.stat(tmp_path).st_dev
        yield Path(name) / "store"


def test_a_kept_layer_is_what_the_command_did(root: Path, store: Path) -> None:
    """Nothing before it is kept; then all of it, with times, and without what the overlay noted."""
    before = look_at(root, times=True)
    with HostFilesystem(root, store=store) as fs:
        call = fs.begin("call", tool_name="shell")
        on_layer(fs, f"{EVERYTHING}; touch -d 2001-02-03 d/x")
        assert look_at(root, times=True) == before
        after = call.prepare()
        call.finish()
        changed = {(each.path, each.kind) for each in fs.diff(call.base, after).changes}
    assert (root / "a").read_text() == "2\n"
    assert (root / "a").samefile(root / "also")
    assert sorted(os.listdir(root / "d/e")) == ["n"]
    assert (root / "n/m/f").read_text() == "3\n"
    assert os.readlink(root / "l") == "b"
    assert (root / "d/x").stat().st_mtime < 1e9
    assert {
        ("b", "deleted"),
        ("d/e/n", "added"),
        ("a", "modified"),
        ("d/x", "mode"),
        ("d", "mode"),
    } <= changed
    assert not any(
        "overlay" in each for path in root.rglob("*") for each in os.listxattr(path, follow_symlinks=False)
    )
    assert layers_in(store) == []
    assert not list(root.glob(".treenail-*"))


def test_an_undone_layer_leaves_no_trace(root: Path, store: Path) -> None:
    """Dropped before it is applied, or taken back after: the very files are there again, with their times."""
    before = look_at(root, times=True)
    inodes = {path: path.lstat().st_ino for path in root.rglob("*")}
    with HostFilesystem(root, store=store) as fs:
        for is_applied in (False, True):
            call = fs.begin(f"call-{is_applied}")
            on_layer(fs, EVERYTHING)
            if is_applied:
                call.prepare()
            report = call.rollback()
            assert report.conflicts == ()
            assert look_at(root, times=True) == before
            assert {path: path.lstat().st_ino for path in root.rglob("*")} == inodes
    assert layers_in(store) == []
    assert not list(root.glob(".treenail-*"))


def save_by_rename(path: Path) -> None:
    """Save as most editors do."""
    path.with_name("saved.tmp").write_text("a person's\n")
    os.rename(path.with_name("saved.tmp"), path)


def write_in_place(path: Path) -> None:
    path.write_text("a person's\n")


CONFLICTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "saved in place": ("echo 2 > a", lambda root: write_in_place(root / "a"), "a"),
    "saved by rename": ("echo 2 > a", lambda root: save_by_rename(root / "a"), "a"),
    "saved where it is removed": ("rm a", lambda root: write_in_place(root / "a"), "a"),
    "other bits": ("echo 2 > a", lambda root: (root / "a").chmod(0o640), "a"),
    "removed": ("echo 2 > a", lambda root: (root / "a").unlink(), "a"),
    "removed by both": ("rm a", lambda root: (root / "a").unlink(), "a"),
    "new in the same place": ("echo 2 > new", lambda root: write_in_place(root / "new"), "new"),
    "new in a removed directory": ("rm -r d", lambda root: write_in_place(root / "d/e/theirs"), "d/e"),
    "saved in a removed directory": ("rm -r d", lambda root: write_in_place(root / "d/e/z"), "d/e/z"),
    "saved in a replaced directory": (
        "rm -r d; mkdir d; echo > d/n",
        lambda root: write_in_place(root / "d/x"),
        "d/x",
    ),
    "directory moved away": ("echo 2 > d/x", lambda root: os.rename(root / "d", root / "elsewhere"), "d"),
    "directory replaced": (
        "echo 2 > d/x",
        lambda root: (os.rename(root / "d", root / "old"), (root / "d").symlink_to("old")),
        "d",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_somebody_changed_meanwhile_is_a_conflict(name: str, root: Path, tmp_path: Path) -> None:
    """Nothing is applied, the error names the path, and the command's files can be fetched."""
    script, person, path = CONFLICTS[name]
    store = tmp_path / "store"
    with HostFilesystem(root, store=store) as fs:
        call = fs.begin("call", tool_name="shell")
        on_layer(fs, f"echo other > b; {script}")
        person(root)
        theirs = look_at(root, times=True)
        with pytest.raises(WorkspaceConflictError) as raised:
            call.prepare()
        assert path in raised.value.paths
        assert call.rollback().conflicts == ()
        assert look_at(root, times=True) == theirs
        kept = fs.undo.opened().kept()
    assert [each.reason for each in kept] == ["conflict"]
    assert "b" in kept[0].paths
    assert layers_in(store) == []


def test_what_the_command_only_read_may_have_changed(root: Path, tmp_path: Path) -> None:
    """A person's file stays, also beside one of the command's, and the command's are applied."""
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        call = fs.begin("call")
        on_layer(fs, "cat a b d/* > sum 2>/dev/null || true; echo 2 > d/x")
        save_by_rename(root / "a")
        write_in_place(root / "d/y")
        write_in_place(root / "d/theirs")
        call.prepare()
        call.finish()
    assert [(root / each).read_text() for each in ("a", "d/y", "d/theirs")] == ["a person's\n"] * 3
    assert (root / "d/x").read_text() == "2\n"


@pytest.mark.parametrize("save", [write_in_place, save_by_rename])
def test_somebody_who_saves_while_a_layer_is_applied_wins(
    save: Callable[[Path], None], root: Path, store: Path
) -> None:
    """Between the look and the exchange: what comes out is not what was expected, and all is taken back."""
    with HostFilesystem(root, store=store) as fs:
        call = fs.begin("call")
        layer = on_layer(fs, EVERYTHING)
        applied = AppliedLayer.of(fs.undo, fs.undo.call.journal, layer, layer.read().moves)  # type: ignore[union-attr]  # open
        applied.intend()
        save(root / "d/x")
        theirs = {path: each for path, each in look_at(root, times=True).items() if b".treenail" not in path}
        with pytest.raises(WorkspaceConflictError, match="d/x"):
            applied.perform()
        report = ReportBuilder()
        assert applied.take_back(report) == []
        applied.drop()
        assert look_at(root, times=True) == theirs
        call.rollback()


def test_recovery_leaves_what_a_person_changed_since(root: Path, store: Path) -> None:
    """Killed after applying and before the commit: still the inode and ctime that was applied, or theirs."""

    def die_applied() -> None:
        fs = HostFilesystem(root, store=store)
        call = fs.begin("call")
        on_layer(
            fs, "echo 2 > a; echo 2 > b; echo 2 > d/x; rm d/y; mkdir -p n/m; echo 1 > n/m/f; echo 1 > n/g"
        )
        call.prepare()

    in_child(die_applied)
    before = {"b": "1 b\n", "d/y": "1 d/y\n"}
    write_in_place(root / "a")
    os.utime(root / "d/x")
    write_in_place(root / "n/m/theirs")
    with HostFilesystem(root, store=store) as fs:
        report = fs.recover("call", committed=False)
    assert set(report.conflicts) == {"a", "d/x", "n/m", "n/m/theirs"}
    assert (root / "a").read_text() == "a person's\n"
    assert (root / "d/x").read_text() == "2\n"
    assert {name: (root / name).read_text() for name in before} == before
    assert sorted(path.name for path in (root / "n").rglob("*")) == ["m", "theirs"]
    assert layers_in(store) == []


def test_what_a_program_writes_into_a_replaced_file_is_kept(root: Path, tmp_path: Path) -> None:
    """It had the file open; the name leads to the command's file by then."""
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        call = fs.begin("call")
        on_layer(fs, "echo 2 > a")
        with (root / "a").open("a") as late:
            call.prepare()
            late.write("late\n")
            late.flush()
            call.finish()
        (kept,) = fs.undo.opened().kept()
        ((path, state),) = kept.files
        assert path == "a"
        assert fs.undo.opened().objects.read_blob(state.oid) == b"1 a\nlate\n"


def test_what_a_program_writes_into_a_removed_directory_is_kept(root: Path, tmp_path: Path) -> None:
    """It works in the directory, or had a file in it open, while the command's layer is applied."""
    (root / "sub").mkdir()
    (root / "sub/open").write_text("1\n")
    (root / "sub/still").write_text("not changed\n")
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        call = fs.begin("call")
        on_layer(fs, "rm -r sub")
        inside = os.open(root / "sub", os.O_RDONLY)
        with (root / "sub/open").open("a") as late:
            call.prepare()
            late.write("late\n")
            late.flush()
            os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=inside))
            call.finish()
        os.close(inside)
        (kept,) = fs.undo.opened().kept()
        found = {path: fs.undo.opened().objects.read_blob(state.oid) for path, state in kept.files}
        assert found == {"sub/open": b"1\nlate\n", "sub/new": b""}


def test_somebody_who_saves_twice_while_a_layer_is_applied_has_the_newest(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once before the step that puts the command's file in place, and once before it is taken back."""

    def save(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(root / "a")

    is_as_seen, perform = AppliedLayer._is_as_seen, AppliedLayer._perform

    def saved_before(applied: AppliedLayer, move: Move) -> None:
        save("first")
        perform(applied, move)

    def saved_again(applied: AppliedLayer, base: RootedDirectory, move: Move) -> bool:
        answer = is_as_seen(applied, base, move)
        save("second")
        return answer

    with HostFilesystem(root, store=tmp_path / "store") as fs:
        call = fs.begin("call")
        on_layer(fs, "echo 2 > a")
        monkeypatch.setattr(AppliedLayer, "_perform", saved_before)
        monkeypatch.setattr(AppliedLayer, "_is_as_seen", saved_again)
        with pytest.raises(WorkspaceConflictError):
            call.prepare()
        call.rollback()
    assert (root / "a").read_text() == "second"


def test_files_with_several_names_are_reported(root: Path, tmp_path: Path) -> None:
    """On a layer the other names do not follow a change, so the command has to run without one."""
    os.link(root / "a", root / "same")
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        fs.begin("call")
        layer = on_layer(fs, "echo 2 > a; rm b")
        assert layer.read().linked == ["a"]
        fs.drop_layer()
        fs.capture()
        (root / "a").write_text("3\n")
        assert fs.undo.call is not None
        fs.undo.call.rollback()
    assert (root / "same").read_text() == "1 a\n"


def test_a_dead_process_leaves_a_layer_that_nobody_applies(root: Path, tmp_path: Path) -> None:
    """It is dropped by the next one; the layer of a living process stays."""
    store = tmp_path / "store"
    in_child(lambda: _open_one(root, store))
    assert len(layers_in(store)) == 1
    with HostFilesystem(root, store=store, line="main") as fs:
        assert list(fs.unfinished()) == []
        assert layers_in(store) == []
        call = fs.begin("call")
        fs.open_layer()
        (own,) = layers_in(store)
        in_child(lambda: HostFilesystem(root, store=store).undo.opened())
        assert layers_in(store) == [own]
        call.rollback()


def _open_one(root: Path, store: Path) -> None:
    fs = HostFilesystem(root, store=store)
    fs.begin("call")
    on_layer(fs, "echo 2 > a")


def test_a_layer_over_its_own_store_is_elsewhere(root: Path) -> None:
    """An overlay cannot lie in what it is over, so the layer is in memory, and applied by copying."""
    with HostFilesystem(root, store=root / ".store") as fs:
        call = fs.begin("call")
        layer = on_layer(fs, "echo 2 > a; echo 3 > .store/HEAD")
        assert os.path.commonpath((layer.directory, root)) == "/"
        call.prepare()
        call.finish()
        assert not os.path.exists(layer.directory)
    assert (root / "a").read_text() == "2\n"
    assert (root / ".store/HEAD").read_text() != "3\n"


def test_a_call_has_one_command(root: Path, tmp_path: Path) -> None:
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        fs.begin("call")
        assert isinstance(fs.open_layer(), CommandLayer)
        with pytest.raises(WorkspaceError, match="one only"):
            fs.open_layer()


def test_an_ordinary_user_can_drop_what_a_command_locked(public_path: Path) -> None:
    """Directories without any bits, and very deep ones."""

    def make_and_remove() -> None:
        top = public_path / "top"
        place = top
        top.mkdir()
        for _ in range(300):
            place = place / "d"
            place.mkdir()
        (place / "file").write_text("x")
        place.chmod(0)
        (top / "locked").mkdir(mode=0)
        remove_tree(str(top))
        assert not top.exists()

    as_nobody(make_and_remove)

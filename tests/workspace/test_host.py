"""Workspaces on disk: what leaves no trace, what cannot escape, and what is never touched."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_kit import as_nobody, git, look_at

from treenail.errors import (
    PathEscapeError,
    ReadOnlyError,
    SnapshotMismatchError,
    UsageError,
    WorkspaceConflictError,
    WorkspaceError,
)
from treenail.workspace import objects, sweep
from treenail.workspace.host import HostFilesystem, SnapshotLimits
from treenail.workspace.objects import ObjectStore
from treenail.workspace.rooted import Place
from treenail.workspace.scan import Exclusions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture
def fs(root: Path, tmp_path: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=tmp_path / "store") as made:
        yield made


def reopened(fs: HostFilesystem) -> HostFilesystem:
    """Return the workspace as a later process sees it."""
    return HostFilesystem(fs.root, store=fs.store_path)


def user_repository(root: Path) -> None:
    """Make a real repository with a commit, hooks, and configuration that names code to run."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "GIT_AUTHOR_NAME": "u",
        "GIT_AUTHOR_EMAIL": "u@x",
        "GIT_COMMITTER_NAME": "u",
        "GIT_COMMITTER_EMAIL": "u@x",
    }

    def run(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True)

    run("init", "-q")
    (root / "tracked.txt").write_text("tracked\n")
    run("add", "tracked.txt")
    run("commit", "-q", "-m", "first")
    (root / ".gitattributes").write_text("*.txt filter=evil\n")
    hook = f"touch {root.parent}/was-run"
    with open(root / ".git/config", "a") as config:
        config.write(
            f'[core]\n\tfsmonitor = "{hook}"\n[filter "evil"]\n\tclean = "{hook}"\n\tsmudge = "{hook}"\n'
        )
    (root / ".git/hooks/post-checkout").write_text(f"#!/bin/sh\n{hook}\n")
    (root / ".git/hooks/post-checkout").chmod(0o755)


# --- foreign calls: a process is let loose on the tree ---------------------------------------------


def build(root: Path) -> None:
    """Make a tree of everything that is easy to get wrong."""
    user_repository(root)
    (root / ".gitignore").write_text("ignored/\n*.log\n")
    (root / "ignored").mkdir()
    (root / "ignored/secret.log").write_text("ignored content\n")
    (root / "empty/deeper").mkdir(parents=True)
    (root / "private").mkdir(mode=0o700)
    (root / "private/key").write_text("key")
    (root / "private/key").chmod(0o600)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "crlf.txt").write_bytes(b"one\r\ntwo\rthree\n")
    (root / "large.bin").write_bytes(os.urandom(3 * 1024 * 1024))
    (root / "dir").mkdir()
    (root / "dir/file").write_text("in dir")
    (root / "links").mkdir()
    (root / "links/inside").symlink_to("../dir/file")
    (root / "links/to-dir").symlink_to("../dir")
    (root / "links/outside").symlink_to("/etc/passwd")
    (root / "links/dangling").symlink_to("nowhere")
    (root / "nested").mkdir()
    user_repository(root / "nested")
    with open(os.path.join(os.fsencode(root), b"latin-\xe9.txt"), "wb") as file:
        file.write(b"\xe9")
    os.mkdir(os.path.join(os.fsencode(root), b"dir-\xff"))


def forge(root: Path) -> None:
    """Change a file to another of the same size and put its time back."""
    path = root / "dir/file"
    status = path.stat()
    path.write_text("IN DIR")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap_to_link(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    shutil.rmtree(root / "dir")
    (root / "dir").symlink_to(outside)


def delete_everything(root: Path) -> None:
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def replace_root(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir(mode=0o700)
    (root / "other").write_text("another tree")


def root_becomes_link(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    root.rename(elsewhere)
    root.symlink_to(elsewhere)
    (elsewhere / "dir/file").unlink()


def rewrite_history(root: Path) -> None:
    (root / ".git/HEAD").write_text("ref: refs/heads/hijacked\n")
    shutil.rmtree(root / ".git/refs")
    (root / "nested/.git/index").unlink()


def rename_undecodable(root: Path) -> None:
    raw = os.fsencode(root)
    os.rename(os.path.join(raw, b"latin-\xe9.txt"), os.path.join(raw, b"dir-\xff", b"\xfe\xfd"))


FOREIGN_CHANGES: dict[str, Callable[[Path], object]] = {
    "an ignored file": lambda root: (root / "ignored/secret.log").write_text("changed"),
    "an ignored directory": lambda root: shutil.rmtree(root / "ignored"),
    "an empty directory": lambda root: shutil.rmtree(root / "empty"),
    "a new empty directory": lambda root: (root / "empty/new/newer").mkdir(parents=True),
    "an exec bit": lambda root: (root / "run.sh").chmod(0o644),
    "group bits": lambda root: (root / "private/key").chmod(0o664),
    "bits of a directory": lambda root: (root / "private").chmod(0o755),
    "line endings": lambda root: (root / "crlf.txt").write_bytes(b"one\ntwo\nthree\n"),
    "the same size with a forged time": forge,
    "a large binary file": lambda root: (root / "large.bin").write_bytes(b"x" * (2 * 1024 * 1024)),
    "a link's target": lambda root: (
        (root / "links/inside").unlink(),
        (root / "links/inside").symlink_to("x"),
    ),
    "what a link leads to": lambda root: (root / "links/to-dir/file").write_text("through"),
    "a link becomes a file": lambda root: (
        (root / "links/outside").unlink(),
        (root / "links/outside").write_text("x"),
    ),
    "a directory becomes a file": lambda root: (shutil.rmtree(root / "dir"), (root / "dir").write_text("x")),
    "a directory becomes a link": swap_to_link,
    "a file becomes a directory": lambda root: (
        (root / "run.sh").unlink(),
        (root / "run.sh/x").mkdir(parents=True),
    ),
    "a pipe where a file was": lambda root: ((root / "run.sh").unlink(), os.mkfifo(root / "run.sh")),
    "a new pipe": lambda root: os.mkfifo(root / "pipe"),
    "the user's repository": rewrite_history,
    "a nested repository": lambda root: shutil.rmtree(root / "nested/.git"),
    "names that are not UTF-8": rename_undecodable,
    "everything is deleted": delete_everything,
    "the root is replaced": replace_root,
    "the root becomes a link": root_becomes_link,
    "an unreadable directory": lambda root: (root / "dir").chmod(0),
    "everything is touched": lambda root: [os.utime(path, ns=(1, 1)) for path in root.rglob("*.txt")],
}


@pytest.mark.parametrize("change", list(FOREIGN_CHANGES))
def test_a_foreign_call_that_fails_leaves_no_trace(fs: HostFilesystem, root: Path, change: str) -> None:
    """Bytes, bits, links, names and times are as they were, whatever the process did."""
    build(root)
    before = look_at(root, times=True)
    call = fs.begin("call", tool_name="shell", foreign=True)
    assert call.base.uncovered == ()
    FOREIGN_CHANGES[change](root)
    report = call.rollback()
    assert look_at(root, times=True) == before
    assert not root.is_symlink()
    assert report.conflicts == ()
    assert not (root.parent / "was-run").exists()


@pytest.mark.parametrize("change", list(FOREIGN_CHANGES))
def test_a_scanned_boundary_brings_the_whole_tree_back(fs: HostFilesystem, root: Path, change: str) -> None:
    """So does restoring a scanned snapshot, in a later process; going forward again works as well."""
    build(root)
    before = look_at(root)
    snapshot = fs.snapshot(scan=True)
    FOREIGN_CHANGES[change](root)
    if root.is_symlink():
        # The root itself is the operator's; it has to be there to be opened.
        target = root.resolve()
        root.unlink()
        target.rename(root)
    after = look_at(root)
    with reopened(fs) as later:
        changed = later.snapshot(scan=True)
        later.restore(snapshot)
        assert look_at(root) == before
        later.restore(changed)
        pipes = {path: entry for path, entry in after.items() if entry[0] == "special"}
        kept = {path: entry for path, entry in after.items() if path not in pipes}
        if b"run.sh" not in pipes:
            assert {path: entry for path, entry in look_at(root).items() if path not in pipes} == kept
    assert not (root.parent / "was-run").exists()


def test_a_foreign_call_is_committed_whole(fs: HostFilesystem, root: Path) -> None:
    """What the process did is the call's difference, in our own words and in git's."""
    build(root)
    call = fs.begin("call-7", tool_name="shell", foreign=True)
    (root / "dir/file").write_text("in dir, changed\n")
    (root / "ignored/new.log").write_text("new\n")
    (root / "run.sh").chmod(0o644)
    boundary = call.prepare()
    call.finish()
    changes = {change.path: change.kind for change in fs.diff(call.base, boundary).changes}
    assert changes == {"dir/file": "modified", "ignored/new.log": "added", "run.sh": "mode"}
    shown = git(fs.pack(), "log", "-1", "-p", "--format=%s%n%b", "main")
    assert "shell (call-7)" in shown
    assert "+in dir, changed" in shown
    assert "old mode 100755" in shown
    assert "ignored/new.log" in shown


def test_the_users_repository_is_never_touched(fs: HostFilesystem, root: Path) -> None:
    """Snapshots, calls and restores leave `.git` byte-identical, times included."""
    build(root)
    before = {path: entry for path, entry in look_at(root, times=True).items() if b".git/" in path}
    snapshot = fs.snapshot(scan=True)
    call = fs.begin("call", foreign=True)
    (root / "tracked.txt").write_text("changed\n")
    call.prepare()
    call.finish()
    fs.restore(snapshot)
    fs.begin("other", foreign=True).rollback()
    after = {path: entry for path, entry in look_at(root, times=True).items() if b".git/" in path}
    assert len(before) > 20
    assert after == before


def test_a_foreign_call_in_a_later_process_is_undone(fs: HostFilesystem, root: Path) -> None:
    """After a crash, the manifest on disk is enough to bring the tree back."""
    build(root)
    before = look_at(root, times=True)
    fs.begin("call", foreign=True)
    delete_everything(root)
    fs.write("through/api.txt", "x")
    with reopened(fs) as later:
        assert list(later.unfinished()) == ["call"]
        later.recover("call", committed=False)
        assert later.recover("call", committed=False).restored == ()
    assert look_at(root, times=True) == before


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the files that scans read."""
    names: list[str] = []
    real = ObjectStore.write_descriptor

    def content(self: ObjectStore, descriptor: int, size: int) -> bytes | None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return real(self, descriptor, size)

    monkeypatch.setattr(ObjectStore, "write_descriptor", content)
    return names


def test_unchanged_files_are_not_read_again(
    fs: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch, files_read: list[str]
) -> None:
    """A later process reads what changed, and nothing else."""
    for number in range(20):
        (root / f"{number}.txt").write_text(str(number))
    # As if the files were older than the clock's ticks.
    monkeypatch.setattr("treenail.workspace.scan.RACY_NS", -(10**12))
    fs.snapshot(scan=True)
    files_read.clear()
    (root / "7.txt").write_text("seven")
    with reopened(fs) as later:
        later.snapshot(scan=True)
        later.snapshot(scan=True)
    assert files_read == ["7.txt"]


def test_a_file_as_new_as_the_scan_is_read_again(
    fs: HostFilesystem, root: Path, files_read: list[str]
) -> None:
    """A second change within a clock tick cannot hide behind a stat tuple that stays the same."""
    (root / "new.txt").write_text("one")
    before = fs.snapshot(scan=True)
    files_read.clear()
    with reopened(fs) as later:
        later.snapshot(scan=True)
        assert files_read == ["new.txt"]
    (root / "new.txt").write_text("two")
    assert [change.path for change in fs.diff(before).changes] == ["new.txt"]


# --- plain calls: only what was written through the filesystem ---------------------------------------


def test_somebody_elses_edit_is_left_alone(fs: HostFilesystem, root: Path) -> None:
    """A rollback reports a path that others changed meanwhile, keeps their content, and ours in the store."""
    (root / "mine.txt").write_text("before")
    (root / "theirs.txt").write_text("before, theirs\n")
    call = fs.begin("call", tool_name="edit")
    fs.write("mine.txt", "during")
    fs.write("theirs.txt", "during")
    fs.write("made/by-call.txt", "x")
    (root / "theirs.txt").write_text("edited by a person")
    (root / "made/by-person.txt").write_text("a person's file")
    report = call.rollback()
    assert report.conflicts == ("theirs.txt",)
    assert report.restored == ("made/by-call.txt", "mine.txt")
    assert look_at(root) == {
        b"mine.txt": ("file", 0o644, b"before"),
        b"theirs.txt": ("file", 0o644, b"edited by a person"),
        b"made": ("directory", 0o755),
        b"made/by-person.txt": ("file", 0o644, b"a person's file"),
    }
    assert any("made" in note for note in report.notes)
    commit = next(note for note in report.notes if "commit" in note).split("commit ")[1][:12]
    assert git(fs.pack(), "show", f"{commit}:theirs.txt") == "before, theirs\n"


def test_others_files_are_not_part_of_a_plain_call(fs: HostFilesystem, root: Path) -> None:
    """What a plain call did not write is not rolled back."""
    (root / "a.txt").write_text("a")
    call = fs.begin("call")
    fs.write("b.txt", "b")
    (root / "a.txt").write_text("edited meanwhile")
    (root / "c.txt").write_text("made meanwhile")
    call.rollback()
    assert sorted(os.listdir(root)) == ["a.txt", "c.txt"]
    assert (root / "a.txt").read_text() == "edited meanwhile"


def test_restoring_over_an_edit_is_refused_before_anything_changes(fs: HostFilesystem, root: Path) -> None:
    """A restore that is not scanned raises and changes nothing if somebody's edits are in the way."""
    (root / "a.txt").write_text("a")
    (root / "b.txt").write_text("b")
    snapshot = fs.snapshot()
    fs.write("a.txt", "ours")
    fs.write("b.txt", "ours")
    (root / "b.txt").write_text("theirs")
    with pytest.raises(WorkspaceConflictError, match=r"b\.txt") as caught:
        fs.restore(snapshot)
    assert caught.value.paths == ("b.txt",)
    assert (root / "a.txt").read_text() == "ours"
    assert (root / "b.txt").read_text() == "theirs"


def test_an_edit_between_two_calls_is_in_the_way_too(fs: HostFilesystem, root: Path) -> None:
    """Going back past somebody's edit, on top of which a call has written, is a conflict."""
    (root / "a.txt").write_text("start")
    snapshot = fs.snapshot()
    fs.write("a.txt", "first")
    fs.snapshot()
    (root / "a.txt").write_text("a person's edit")
    fs.write("a.txt", "second")
    with pytest.raises(WorkspaceConflictError):
        fs.restore(snapshot)
    assert (root / "a.txt").read_text() == "second"


def test_the_first_touch_of_a_file_shows_as_a_change(fs: HostFilesystem, root: Path) -> None:
    """In git's log, a file that was there before the first call is modified by it and not added."""
    (root / "src").mkdir()
    (root / "src/a.py").write_text("one\ntwo\n")
    call = fs.begin("call-1", tool_name="edit")
    fs.write("src/a.py", "one\nTWO\n")
    boundary = call.prepare()
    call.finish()
    shown = git(fs.pack(), "log", "-1", "-p", "--format=%s", "main")
    assert shown.startswith("edit (call-1)")
    assert "-two\n+TWO\n" in shown
    assert [change.kind for change in fs.diff(call.base, boundary).changes] == ["modified"]


def test_each_call_is_a_commit(fs: HostFilesystem) -> None:
    """A call that touched nothing costs none, and a rolled back call is none."""
    for number in range(3):
        call = fs.begin(f"call-{number}", tool_name="tool")
        if number:
            fs.write("a.txt", str(number))
        assert (call.prepare().commit_ref == call.base.commit_ref) is (number == 0)
        call.finish()
    fs.begin("undone", tool_name="tool").rollback()
    subjects = git(fs.pack(), "log", "--format=%s", "main").splitlines()
    assert [subject for subject in subjects if subject.startswith("tool")] == [
        "tool (call-2)",
        "tool (call-1)",
    ]


@pytest.mark.parametrize("durable", [False, True])
def test_a_call_that_touches_nothing_writes_nothing(root: Path, tmp_path: Path, durable: bool) -> None:
    """Neither in the workspace nor in the store is a file changed by it, but the one that says who writes."""

    def traces() -> set[tuple[str, int, int, int]]:
        found = [path for place in (root, tmp_path / "store") for path in (place, *place.rglob("*"))]
        stats = [(str(path), path.lstat()) for path in found if not path.name.startswith("writer-")]
        return {(path, status.st_ino, status.st_ctime_ns, status.st_size) for path, status in stats}

    with HostFilesystem(root, store=tmp_path / "store", durable=durable) as fs:
        _write_and_commit(fs, 1)
        before = traces()
        call = fs.begin("idle", tool_name="tool")
        assert fs.read("a.txt").content == "content 1\n"
        assert call.prepare() is call.base
        assert traces() == before
        call.finish()
        assert traces() == before
        fs.begin("undone", tool_name="tool").rollback()
        assert traces() == before
        assert fs.unfinished() == []


def test_a_boundary_costs_what_changed(fs: HostFilesystem, root: Path) -> None:
    """A plain call in a tree of many files lists no directory and reads no file that it does not touch."""
    for number in range(50):
        (root / f"d{number}").mkdir()
        (root / f"d{number}/f.txt").write_text("x")
    fs.snapshot(scan=True)
    opened: list[str] = []
    sys_audit = _Audit(opened, str(root))
    with sys_audit:
        call = fs.begin("call")
        fs.write("d7/f.txt", "y")
        call.prepare()
        call.finish()
    assert opened == []


class _Audit:
    """Collects the directories below a root that are listed while it is entered."""

    _active: list[_Audit] = []
    _installed = False

    def __init__(self, found: list[str], root: str) -> None:
        self.found = found
        self.root = root

    def __enter__(self) -> _Audit:
        if not _Audit._installed:
            sys.addaudithook(_Audit._hook)
            _Audit._installed = True
        _Audit._active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _Audit._active.remove(self)

    @staticmethod
    def _hook(event: str, arguments: tuple[object, ...]) -> None:
        if _Audit._active and event in ("os.scandir", "os.listdir"):
            path = arguments[0]
            shown = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            for audit in list(_Audit._active):
                if shown.startswith(audit.root):
                    audit.found.append(shown)


def test_mtimes_come_back(fs: HostFilesystem, root: Path) -> None:
    """A file that is put back has its old time, so that build tools do not see it as new."""
    (root / "a.txt").write_text("a")
    os.utime(root / "a.txt", ns=(10**18, 10**18))
    call = fs.begin("call")
    fs.write("a.txt", "changed")
    fs.write("a.txt", "a")
    call.rollback()
    assert (root / "a.txt").stat().st_mtime_ns == 10**18


def test_boundaries_inside_a_call(fs: HostFilesystem, root: Path) -> None:
    """A tool may take snapshots and go back to them; the call as a whole can still be undone."""
    (root / "a.txt").write_text("start")
    call = fs.begin("call")
    fs.write("a.txt", "one")
    inner = fs.snapshot()
    fs.write("a.txt", "two")
    fs.write("b.txt", "b")
    fs.restore(inner)
    assert (root / "a.txt").read_text() == "one"
    assert not (root / "b.txt").exists()
    fs.restore(call.base)
    assert (root / "a.txt").read_text() == "start"
    fs.restore(inner)
    assert (root / "a.txt").read_text() == "one"
    call.rollback()
    assert look_at(root) == {b"a.txt": ("file", 0o644, b"start")}
    with pytest.raises(SnapshotMismatchError):
        fs.restore(inner)


def test_inner_boundaries_of_a_finished_call_stay(fs: HostFilesystem, root: Path) -> None:
    """Once the call is finished, a later process can go back to a boundary inside it."""
    call = fs.begin("call")
    fs.write("a.txt", "one")
    inner = fs.snapshot()
    fs.write("a.txt", "two")
    call.prepare()
    call.finish()
    with reopened(fs) as later:
        later.restore(inner)
        assert (root / "a.txt").read_text() == "one"


def test_writes_outside_of_calls_can_be_undone_later(fs: HostFilesystem, root: Path) -> None:
    """What is written between two boundaries goes back with the first, also in a later process."""
    (root / "a.txt").write_text("start")
    snapshot = fs.snapshot(tag="before-edit")
    fs.write("a.txt", "edited outside of calls")
    with reopened(fs) as later:
        later.write("b.txt", "more")
        later.restore(snapshot)
    assert look_at(root) == {b"a.txt": ("file", 0o644, b"start")}


def test_a_crash_that_is_not_recovered_blocks_the_next_call(fs: HostFilesystem) -> None:
    """A call that was left open must be ended first."""
    fs.begin("lost")
    fs.write("half.txt", "half")
    with reopened(fs) as later:
        with pytest.raises(WorkspaceError, match="lost"):
            later.begin("next")
        later.recover("lost", committed=False)
        later.begin("next").rollback()


# --- nothing escapes -------------------------------------------------------------------------------


def test_a_link_swapped_in_after_the_check_does_not_win(
    fs: HostFilesystem, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and opening, a file becomes a link to the outside: it is not read."""
    (tmp_path / "secret").write_text("secret")
    (root / "a.txt").write_text("harmless")
    real = Place.lstat

    def lstat_then_swap(self: Place) -> os.stat_result | None:
        status = real(self)
        if (root / "a.txt").is_file() and not (root / "a.txt").is_symlink():
            (root / "a.txt").unlink()
            (root / "a.txt").symlink_to(tmp_path / "secret")
        return status

    monkeypatch.setattr(Place, "lstat", lstat_then_swap)
    with pytest.raises(OSError, match=r"a\.txt") as caught:
        fs.read("a.txt")
    assert caught.value.errno == errno.ELOOP


def test_a_directory_swapped_for_a_link_during_a_write_does_not_win(
    fs: HostFilesystem, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory becomes a link to the outside while a file in it is written: nothing appears outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "dir").mkdir()
    fs.snapshot()
    real = Place.lstat

    def lstat_then_swap(self: Place) -> os.stat_result | None:
        status = real(self)
        if (root / "dir").is_dir() and not (root / "dir").is_symlink():
            (root / "dir").rename(root / "moved")
            (root / "dir").symlink_to(outside)
        return status

    monkeypatch.setattr(Place, "lstat", lstat_then_swap)
    fs.write("dir/file.txt", "x")
    assert list(outside.iterdir()) == []
    assert (root / "moved/file.txt").read_text() == "x"


def test_a_rollback_does_not_write_through_a_link(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """A directory that was replaced by a link to the outside is reported; what is outside stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("outside")
    (root / "dir").mkdir()
    (root / "dir/a.txt").write_text("inside")
    call = fs.begin("call")
    fs.write("dir/a.txt", "changed")
    (root / "dir").rename(root / "moved")
    (root / "dir").symlink_to(outside)
    report = call.rollback()
    assert report.conflicts == ("dir/a.txt",)
    assert (outside / "a.txt").read_text() == "outside"


def test_special_files_are_refused(fs: HostFilesystem, root: Path) -> None:
    """Pipes, sockets and devices are neither read nor written nor deleted, and never block."""
    os.mkfifo(root / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "socket"))
    listener.close()
    names = ["pipe", "socket"]
    if os.geteuid() == 0:
        os.mknod(root / "device", 0o666 | 0o020000, os.makedev(1, 5))
        names.append("device")
    fs.snapshot()
    for name in names:
        for operation in (fs.read, fs.read_bytes, fs.open_read, fs.open_text, fs.open_write, fs.delete):
            with pytest.raises(PermissionError, match=name):
                operation(name)
        with pytest.raises(PermissionError, match=name):
            fs.write(name, "x")
        with pytest.raises(PermissionError, match=name):
            fs.move(name, "elsewhere")
    assert sorted(os.listdir(root)) == sorted(names)
    assert len(fs.snapshot(scan=True).uncovered) == len(names)


def test_process_links_do_not_lead_out(fs: HostFilesystem, root: Path) -> None:
    """Links of /proc are text here; what they stand for is not reached."""
    (root / "cwd").symlink_to("/proc/self/cwd")
    (root / "fd").symlink_to("/proc/self/fd")
    for path in ("cwd", "cwd/x", "fd/0"):
        with pytest.raises(PathEscapeError):
            fs.open_read(path)
        with pytest.raises(PathEscapeError):
            fs.write(path, "x")


def test_a_hard_link_elsewhere_is_not_written_to(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """Writing, changing bits back and rolling back replace the name inside; the other name keeps its file."""
    (tmp_path / "outside.txt").write_text("outside")
    os.link(tmp_path / "outside.txt", root / "inside.txt")
    call = fs.begin("call")
    fs.write("inside.txt", "changed")
    fs.write("inside.txt", "again", mode="append")
    assert (tmp_path / "outside.txt").read_text() == "outside"
    call.rollback()
    assert (root / "inside.txt").read_text() == "outside"
    assert (tmp_path / "outside.txt").read_text() == "outside"


def test_a_link_with_an_absolute_target_inside_is_followed(fs: HostFilesystem, root: Path) -> None:
    """An absolute link is fine if it leads into the workspace."""
    (root / "dir").mkdir()
    (root / "dir/a.txt").write_text("x")
    (root / "link").symlink_to(root / "dir")
    assert fs.read("link/a.txt").content == "x"


def test_the_store_is_not_part_of_the_workspace(root: Path) -> None:
    """A store inside the root is invisible, unreachable, and neither captured nor removed."""
    with HostFilesystem(root, store=root / ".treenail") as fs:
        fs.write("a.txt", "a")
        snapshot = fs.snapshot(scan=True)
        assert snapshot.uncovered == ()
        assert [entry.name for entry in fs.list()] == ["a.txt"]
        assert [match.path for match in fs.glob("**")] == ["a.txt"]
        for path in (".treenail", ".treenail/HEAD", ".treenail/treenail/main/line"):
            with pytest.raises(PathEscapeError):
                fs.exists(path)
            with pytest.raises(PathEscapeError):
                fs.write(path, "x")
        call = fs.begin("call", foreign=True)
        (root / "b.txt").write_text("b")
        call.rollback()
        fs.restore(snapshot)
        assert "treenail" not in git(fs.pack(), "ls-tree", "-r", "--name-only", "main")
    assert sorted(os.listdir(root)) == [".treenail", "a.txt"]


def test_a_store_cannot_hold_its_workspace(tmp_path: Path) -> None:
    """The other way round is refused."""
    (tmp_path / "store/workspace").mkdir(parents=True)
    for root in (tmp_path / "store", tmp_path / "store/workspace"):
        with pytest.raises(UsageError, match="store"):
            HostFilesystem(root, store=tmp_path / "store")


def test_what_is_being_written_is_invisible(fs: HostFilesystem, root: Path) -> None:
    """It has a name that tools do not see and that snapshots leave out."""
    stream = fs.open_write("a.txt")
    stream.write(b"half")
    (name,) = os.listdir(root)
    assert name.startswith(".treenail-")
    assert list(fs.list()) == []
    assert list(fs.glob("**")) == []
    fs.snapshot(scan=True)
    assert git(fs.pack(), "ls-tree", "-r", "--name-only", "main") == ""
    stream.close()
    assert os.listdir(root) == ["a.txt"]


# --- what is not covered ---------------------------------------------------------------------------


def test_excluded_paths_are_neither_captured_nor_deleted(root: Path, tmp_path: Path) -> None:
    """The operator's patterns, and no file in the workspace, say what is left out."""
    (root / "node_modules/pkg").mkdir(parents=True)
    (root / "node_modules/pkg/index.js").write_text("original")
    (root / "build").mkdir()
    (root / "build/keep.txt").write_text("kept")
    (root / "a.log").write_text("log")
    with HostFilesystem(root, store=tmp_path / "s", exclude=["node_modules/", "*.log", "/build/cache"]) as fs:
        snapshot = fs.snapshot(scan=True)
        call = fs.begin("call", foreign=True)
        (root / "node_modules/pkg/index.js").write_text("changed")
        (root / "node_modules/new.js").write_text("new")
        (root / "a.log").write_text("more log")
        (root / "build/cache").mkdir()
        (root / "build/cache/object").write_text("cached")
        (root / "build/keep.txt").write_text("changed")
        (root / "new/deep").mkdir(parents=True)
        (root / "new/deep/x.log").write_text("in a new directory")
        report = call.rollback()
        fs.restore(snapshot)
        assert (root / "node_modules/pkg/index.js").read_text() == "changed"
        assert (root / "node_modules/new.js").exists()
        assert (root / "a.log").read_text() == "more log"
        assert (root / "build/cache/object").exists()
        assert (root / "build/keep.txt").read_text() == "kept"
        assert (root / "new/deep/x.log").exists()
        assert any("new/deep" in note for note in report.notes)
        listed = git(fs.pack(), "ls-tree", "-r", "--name-only", snapshot.commit_ref)
        assert listed == "build/keep.txt\n"


def test_what_is_written_through_the_filesystem_is_undone_even_if_excluded(
    root: Path, tmp_path: Path
) -> None:
    """Exclusion is about scans: a call's own writes belong to the call wherever they are."""
    (root / "a.log").write_text("log")
    with HostFilesystem(root, store=tmp_path / "s", exclude=["*.log"]) as fs:
        for foreign in (False, True):
            call = fs.begin("call", foreign=foreign)
            fs.write("a.log", "changed")
            fs.write("b.log", "made")
            call.rollback()
            assert look_at(root) == {b"a.log": ("file", 0o644, b"log")}


@pytest.mark.parametrize(
    ("pattern", "path", "directory", "excluded"),
    [
        ("*.log", "a/b/x.log", False, True),
        ("*.log", "x.log/y", False, True),
        ("cache/", "a/cache", True, True),
        ("cache/", "a/cache", False, False),
        ("/a/*.c", "a/x.c", False, True),
        ("a/*.c", "b/a/x.c", False, False),
        ("docs/**/x", "docs/1/2/x", False, True),
    ],
)
def test_exclude_patterns(pattern: str, path: str, directory: bool, excluded: bool) -> None:
    """Names match anywhere, paths match from the root, a trailing slash means directories."""
    assert Exclusions([pattern]).covers(path, directory=directory) is excluded


def test_negated_exclude_patterns_are_refused() -> None:
    """What looks like it would include something again is an error, not silently something else."""
    with pytest.raises(ValueError, match="negates"):
        Exclusions(["!important.log"])


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SnapshotLimits(max_files=5), "5 files"),
        (SnapshotLimits(max_bytes=100), "100 bytes"),
        (SnapshotLimits(max_file_bytes=50), "limit of 50"),
        (SnapshotLimits(max_seconds=1e-9), "seconds"),
    ],
)
def test_over_budget_is_said_and_what_is_not_covered_is_left_alone(
    root: Path, tmp_path: Path, limits: SnapshotLimits, reason: str
) -> None:
    """A scan over its limits says what is missing; a rollback touches none of that."""
    for number in range(10):
        (root / f"d{number}").mkdir()
        (root / f"d{number}/file.txt").write_text("x" * (60 if number % 2 else 10))
    with HostFilesystem(root, store=tmp_path / "s", limits=limits) as fs:
        call = fs.begin("call", foreign=True)
        assert any(reason in sentence for sentence in call.base.uncovered)
        kept = set(git(fs.pack(), "ls-tree", "-r", "--name-only", "main").split())
        assert kept < {f"d{number}/file.txt" for number in range(10)}
        for number in range(10):
            (root / f"d{number}/file.txt").write_text("changed")
        call.rollback()
        for number in range(10):
            path = f"d{number}/file.txt"
            assert ((root / path).read_text() == "changed") is (path not in kept)


def test_limits_must_make_sense() -> None:
    """A limit of zero would cover nothing."""
    with pytest.raises(ValueError, match="max_files"):
        SnapshotLimits(max_files=0)


def test_what_may_not_be_read_is_named(public_path: Path) -> None:
    """A file or directory that this process may not read is uncovered, and stays as it is."""

    def work() -> tuple[tuple[str, ...], list[str], str]:
        root = public_path / "workspace"
        root.mkdir()
        (root / "secret").write_text("secret")
        (root / "secret").chmod(0)
        (root / "closed").mkdir()
        (root / "closed/inside").write_text("x")
        (root / "closed").chmod(0)
        (root / "open").mkdir()
        (root / "open/file").write_text("x")
        with HostFilesystem(root, store=public_path / "s") as fs:
            call = fs.begin("call", foreign=True)
            (root / "open/file").chmod(0)
            (root / "open/new").write_text("x")
            (root / "open").chmod(0o500)
            call.rollback()
            with pytest.raises(PermissionError):
                fs.read("secret")
            uncovered = call.base.uncovered
        (root / "closed").chmod(0o700)
        return uncovered, sorted(os.listdir(root / "open")), (root / "open/file").read_text()

    uncovered, names, content = as_nobody(work)
    assert [sentence.split(" is not covered")[0] for sentence in uncovered] == ["closed", "secret"]
    assert (names, content) == (["file"], "x")


# --- life of the object ----------------------------------------------------------------------------


def test_a_temporary_store_goes_with_the_object(root: Path) -> None:
    """Without a store everything works, nothing is made before it is needed, and nothing stays."""
    with HostFilesystem(_root=str(root)) as fs:
        fs.write("config.py", "DEBUG = True")
        assert fs.store_path is None
        snapshot = fs.snapshot(tag="before-edit")
        store = fs.store_path
        assert store is not None
        assert store.is_dir()
        fs.write("config.py", "DEBUG = False")
        fs.restore(snapshot)
        assert fs.read("config.py").content == "DEBUG = True"
    assert not store.exists()
    assert os.listdir(root) == ["config.py"]


def test_read_only_means_it(root: Path, tmp_path: Path) -> None:
    """Everything that changes the tree or its history is refused, and no store is made."""
    (root / "a.txt").write_text("a")
    fs = HostFilesystem(root, store=tmp_path / "s", read_only=True)
    for operation in (
        lambda: fs.write("a.txt", "x"),
        lambda: fs.delete("a.txt"),
        lambda: fs.mkdir("d"),
        lambda: fs.move("a.txt", "b"),
        lambda: fs.chmod("a.txt", 0o600),
        lambda: fs.symlink("l", "a.txt"),
        lambda: fs.open_write("b"),
        lambda: fs.snapshot(),
        lambda: fs.begin("call"),
    ):
        with pytest.raises(ReadOnlyError):
            operation()
    assert fs.read("a.txt").content == "a"
    assert fs.host_root is None
    assert not (tmp_path / "s").exists()


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    """The root is the operator's: it is not made up."""
    with pytest.raises(FileNotFoundError, match="make it first"):
        HostFilesystem(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        HostFilesystem(tmp_path / "file")


@pytest.mark.parametrize("line", ["", "..", "a/b", "-x", "x.lock", ".hidden", "a..b", "x" * 101])
def test_line_names_are_checked(root: Path, line: str) -> None:
    """A line is a branch and a directory, and must be good as both."""
    with pytest.raises(UsageError, match="line"):
        HostFilesystem(root, line=line)


def test_durable_calls_do_the_same(root: Path, tmp_path: Path) -> None:
    """Syncing changes when things are on disk, and nothing else."""
    (root / "a.txt").write_text("a")
    with HostFilesystem(root, store=tmp_path / "s", durable=True) as fs:
        call = fs.begin("one")
        fs.write("a.txt", "b")
        fs.write("new/c.txt", "c")
        call.rollback()
        assert look_at(root) == {b"a.txt": ("file", 0o644, b"a")}
        call = fs.begin("two", foreign=True)
        (root / "a.txt").write_text("b")
        call.prepare()
        call.finish()
        fs.restore(call.base)
        assert (root / "a.txt").read_text() == "a"


def test_history_survives_git_gc(fs: HostFilesystem, root: Path) -> None:
    """Somebody may run `git gc` in the private store; boundaries can still be gone back to."""
    snapshots = []
    for number in range(6):
        fs.write("a.txt", "line\n" * 500 + str(number))
        snapshots.append(fs.snapshot())
    git(fs.pack(), "gc", "--quiet", "--prune=now")
    with reopened(fs) as later:
        for number in (3, 0, 5):
            later.restore(snapshots[number])
            assert (root / "a.txt").read_text().endswith(f"line\n{number}")
        later.begin("call").rollback()


def test_damage_at_the_end_of_the_line_is_not_fatal(fs: HostFilesystem, root: Path) -> None:
    """A torn record at the end of the history is as if it had never been begun."""
    first = fs.snapshot()
    fs.write("a.txt", "one")
    second = fs.snapshot()
    line = fs.store_path / "treenail/main/line"  # type: ignore[operator]  # this one has a store
    with open(line, "ab") as file:
        file.write(b"\0\0\0\x50torn")
    with reopened(fs) as later:
        later.restore(first)
        assert not (root / "a.txt").exists()
        later.restore(second)
        assert (root / "a.txt").read_text() == "one"


@pytest.mark.parametrize("how", ["first scan", "later scan", "foreign call", "plain call"])
def test_a_full_disk_loses_nothing(
    fs: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If a boundary cannot be written, the error says so; afterwards everything works and can be undone."""
    (root / "a.txt").write_text("start")
    base = fs.snapshot(scan=how != "first scan")
    call = fs.begin("call", foreign=how == "foreign call") if how.endswith("call") else None
    if how == "plain call":
        fs.write("a.txt", "changed")
    else:
        (root / "a.txt").write_text("changed")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        full()

    with monkeypatch.context() as patch:
        patch.setattr("treenail.workspace.objects.write_pack", full)
        patch.setattr("treenail.workspace.spool.write_all", half)
        with pytest.raises(OSError, match="No space"):
            call.prepare() if call is not None else fs.snapshot(scan=True)
    if call is not None:
        call.prepare()
        call.finish()
        fs.restore(base)
        assert (root / "a.txt").read_text() == "start"
    else:
        changed = fs.snapshot(scan=True)
        (root / "a.txt").write_text("changed again")
        fs.restore(changed)
        assert (root / "a.txt").read_text() == "changed"
    with reopened(fs) as later:
        assert later.snapshot(scan=True).uncovered == ()
    # What the failed try had made ready may be there as well, and nothing leads to it.
    assert git(fs.pack(), "fsck", "--full", "--no-dangling") == ""


# --- what git sees ---------------------------------------------------------------------------------


def _write_and_commit(fs: HostFilesystem, number: int) -> None:
    call = fs.begin(f"call-{number}", tool_name="write")
    fs.write("a.txt", f"content {number}\n")
    call.prepare()
    call.finish()


def test_git_sees_everything_once_it_is_packed_or_closed(fs: HostFilesystem, root: Path) -> None:
    """Each call is a commit in git's log, whether the workspace is still open or not."""
    _write_and_commit(fs, 1)
    assert git(fs.pack(), "log", "-1", "--format=%s", "main") == "write (call-1)\n"
    _write_and_commit(fs, 2)
    store = fs.store_path
    fs.close()
    assert git(store, "log", "-1", "--format=%s", "main") == "write (call-2)\n"
    assert git(store, "show", "main:a.txt") == "content 2\n"
    assert git(store, "fsck", "--full", "--strict") == ""


def test_git_is_never_far_behind(fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that is never closed is packed by itself when enough has come together."""
    monkeypatch.setattr(objects, "MAX_SPOOLED_BYTES", 10_000)
    for number in range(60):
        _write_and_commit(fs, number)
    shown = git(fs.store_path, "log", "-1", "--format=%s", "main")
    assert shown in {f"write (call-{number})\n" for number in range(20, 60)}
    assert git(fs.store_path, "fsck", "--full", "--strict") == ""


def test_what_is_not_packed_is_found_by_the_next(fs: HostFilesystem, root: Path) -> None:
    """A process that ends without closing loses no boundary."""
    before = fs.snapshot()
    for number in range(3):
        _write_and_commit(fs, number)
    with reopened(fs) as later:
        later.restore(before)
        assert not (root / "a.txt").exists()


def test_two_handles_on_one_line_take_nothing_from_each_other(fs: HostFilesystem, root: Path) -> None:
    """A handle that is closed late removes nothing that another has written since."""
    before = fs.snapshot()
    _write_and_commit(fs, 1)
    later = reopened(fs)
    _write_and_commit(later, 2)
    fs.close()
    _write_and_commit(later, 3)
    with reopened(later) as last:
        last.restore(before)
        assert not (root / "a.txt").exists()
    later.close()
    assert git(later.store_path, "fsck", "--full", "--strict") == ""


# --- forks, lines, retention -----------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, True])
def test_a_fork_begins_at_a_boundary(fs: HostFilesystem, root: Path, tmp_path: Path, scan: bool) -> None:
    """It has the tree of that boundary in a directory of its own; neither sees what the other does."""
    build(root)
    before = look_at(root)
    boundary = fs.snapshot(scan=scan)
    call = fs.begin("call", foreign=scan)
    fs.write("dir/file", "changed")
    fs.delete("links", recursive=True)
    fs.write("new/file", "new")
    call.prepare()
    call.finish()
    after = look_at(root)
    with fs.fork(boundary, tmp_path / "fork") as fork:
        assert look_at(tmp_path / "fork") == before
        assert look_at(root) == after
        other = fork.begin("in the fork")
        fork.write("dir/file", "forked")
        other.prepare()
        other.finish()
        assert (root / "dir/file").read_text() == "changed"
        assert fork.store_path != fs.store_path
        fork.restore(other.base)
        assert look_at(tmp_path / "fork") == before
    fs.restore(boundary)
    assert look_at(root) == before


def test_a_fork_does_not_take_a_place_that_is_taken(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """A directory with content, and the workspace itself, are refused, and nothing is left."""
    fs.write("a.txt", "a")
    boundary = fs.snapshot()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    with pytest.raises(OSError, match="not empty"):
        fs.fork(boundary, tmp_path / "full")
    with pytest.raises(UsageError):
        fs.fork(boundary, root / "inside")
    assert sorted(os.listdir(tmp_path)) == ["full", "store", "workspace"]


def test_erasing_a_line_takes_its_content_along(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """What only the erased history had is in no file of the store; the other line is as it was."""
    secret = os.urandom(2_000)
    (root / "shared.txt").write_text("shared")
    shared = fs.snapshot(scan=True)
    with _second_line(fs, tmp_path / "second", "other") as second:
        (tmp_path / "second/shared.txt").write_text("shared")
        call = second.begin("call", foreign=True)
        (tmp_path / "second/secret.bin").write_bytes(secret)
        call.prepare()
        call.finish()
        undone = second.begin("undone")
        second.delete("secret.bin")
        undone.prepare()
        undone.finish()
    assert _is_in_store(fs, secret)
    assert sweep(_store(fs), ["main"]) > 0
    assert not _is_in_store(fs, secret)
    assert "other" not in git(fs.pack(), "branch")
    fs.write("shared.txt", "changed")
    fs.restore(shared)
    assert (root / "shared.txt").read_text() == "shared"
    assert git(fs.pack(), "fsck", "--full") == ""


def test_an_open_call_keeps_the_store_from_being_swept(fs: HostFilesystem, root: Path) -> None:
    """Nothing that a call may need to undo itself is swept away under it."""
    (root / "a.txt").write_text("before")
    call = fs.begin("call")
    fs.write("a.txt", "during")
    with pytest.raises(WorkspaceError, match="open call"):
        sweep(_store(fs))
    call.rollback()
    assert (root / "a.txt").read_text() == "before"
    assert sweep(_store(fs)) >= 0


def test_what_somebody_else_has_swept_away_is_stored_again(
    fs: HostFilesystem, root: Path, tmp_path: Path
) -> None:
    """Whoever remembers that content is in the store notices that a sweep has taken it."""
    content = "x" * 100_000
    (tmp_path / "elsewhere").mkdir()
    with HostFilesystem(tmp_path / "elsewhere", store=fs.store_path, line="other") as other:
        kept = other.begin("theirs")
        other.write("b.txt", content)
        kept.prepare()
        kept.finish()
    dropped = fs.begin("dropped")
    fs.write("a.txt", content)
    dropped.prepare()
    dropped.rollback()
    assert sweep(_store(fs), ["main"]) > 0
    call = fs.begin("call")
    fs.write("a.txt", content)
    after = call.prepare()
    call.finish()
    fs.write("a.txt", "later")
    fs.restore(after)
    assert (root / "a.txt").read_text() == content
    assert git(fs.pack(), "fsck", "--full") == ""


def test_a_crashed_call_can_be_undone_after_a_sweep(fs: HostFilesystem, root: Path) -> None:
    """What a journal would put back counts as needed."""
    (root / "a.txt").write_text("before")
    (root / "large.bin").write_bytes(b"x" * 2_000_000)
    fs.begin("call")
    fs.write("a.txt", "during")
    fs.delete("large.bin")
    fs.close()
    with HostFilesystem(root, store=root.parent / "store") as later:
        sweep(_store(later))
        later.recover("call", committed=False)
    assert (root / "a.txt").read_text() == "before"
    assert (root / "large.bin").stat().st_size == 2_000_000


def test_sweeping_with_kept_lines_erases_the_others(fs: HostFilesystem, root: Path, tmp_path: Path) -> None:
    """`keep_lines` names what stays."""
    fs.write("a.txt", "a")
    fs.snapshot(scan=True)
    for line in ("one", "two"):
        with _second_line(fs, tmp_path / line, line) as other:
            other.snapshot(scan=True)
    sweep(_store(fs), ["main", "two"])
    assert sorted(git(fs.pack(), "branch", "--format=%(refname:short)").split()) == ["main", "two"]


def _store(fs: HostFilesystem) -> Path:
    assert fs.store_path is not None
    return fs.store_path


def _second_line(fs: HostFilesystem, root: Path, line: str) -> HostFilesystem:
    """Open another workspace, whose history is in the same store."""
    root.mkdir()
    return HostFilesystem(root, store=fs.store_path, line=line)


def _is_in_store(fs: HostFilesystem, content: bytes) -> bool:
    assert fs.store_path is not None
    return any(content in path.read_bytes() for path in fs.store_path.rglob("*") if path.is_file())


def test_calls_that_change_nothing_share_their_boundary(fs: HostFilesystem) -> None:
    """What was written between or inside calls moves it; going back to a shared one still works."""
    fs.write("a.txt", "one")
    first = fs.begin("c1", tool_name="edit")
    assert first.prepare() is first.base
    first.finish()
    second = fs.begin("c2", tool_name="edit")
    assert second.base.commit_ref == first.base.commit_ref
    fs.write("a.txt", "two")
    second.rollback()
    third = fs.begin("c3", tool_name="edit")
    fs.write("a.txt", "three")
    third.prepare()
    third.finish()
    fourth = fs.begin("c4", tool_name="edit")
    fourth.finish()
    assert fourth.base.commit_ref != first.base.commit_ref
    fs.write("a.txt", "outside")
    fifth = fs.begin("c5", tool_name="edit")
    fifth.finish()
    assert fifth.base.commit_ref != fourth.base.commit_ref
    other = fs.begin("c6", tool_name="look")
    other.finish()
    assert (other.base.tag, other.base.commit_ref) == ("look", fifth.base.commit_ref)
    fs.restore(second.base)
    assert fs.read("a.txt").content == "one"

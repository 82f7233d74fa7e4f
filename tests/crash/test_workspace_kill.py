"""A process that is killed at any file operation leaves a workspace that recovery ends exactly.

A scenario is a script over a small tree, run in a process that is killed (`killing.py` finds the moments by
itself). Then the next process recovers: it ends the open call the way the scenario's log says. What is there
must be what was there before the call, or what is there after it: bytes, permission bits and links, and the
files' times where nothing has happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from killing import Disk, Watch, killed, moments, sample
from tests.forks import ProcessKilled, in_child

from treenail.clock import new_id
from treenail.workspace import FilesystemSnapshot, objects
from treenail.workspace.host import HostFilesystem

Tree = dict[str, tuple[object, ...]]


def look_at(root: Path) -> Tree:
    """Return everything below a directory: type, bits, content or target, and times of files."""
    found: Tree = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            key = os.path.relpath(path, root)
            if stat.S_ISLNK(status.st_mode):
                found[key] = ("link", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[key] = ("directory", stat.S_IMODE(status.st_mode))
            else:
                content = Path(path).read_bytes()
                found[key] = ("file", stat.S_IMODE(status.st_mode), content, status.st_mtime_ns)
    return found


def without_times(tree: Tree) -> Tree:
    """Leave the times out: what a call writes anew has a new time each time."""
    return {path: entry[:3] for path, entry in tree.items()}


class Bench:
    """A workspace, its store, and the log that decides whether a call has happened."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "workspace"
        self.store = base / "store"
        self.log = base / "log"

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store)

    def commit(self) -> None:
        """Write the log's commit record: from here on the call has happened."""
        os.close(os.open(self.log, os.O_CREAT | os.O_WRONLY))

    def remember(self, snapshot: FilesystemSnapshot) -> None:
        (self.base / "snapshot").write_text(f"{snapshot.commit_ref} {int(snapshot.scanned)}")

    def remembered(self, fs: HostFilesystem) -> FilesystemSnapshot:
        """Return the snapshot that the setup took, as a later process knows it."""
        commit, scanned = (self.base / "snapshot").read_text().split()
        return FilesystemSnapshot(new_id(), fs._clock.now(), commit, fs.root, scanned=scanned == "1")

    def recover(self) -> None:
        """Do what the next process does, before anything else."""
        with self.open() as fs:
            for call_id in fs.unfinished():
                report = fs.recover(call_id, committed=self.log.exists())
                assert report.conflicts == ()
            assert list(fs.unfinished()) == []


KILLS = 40
"""At how many moments each scenario is killed, if there are more; see `killing.sample`."""

Start = Callable[[Bench], None]
Script = Callable[[Bench, Watch], None]
"""What is killed, somewhere inside `with watch():`."""


# --- what is there, and what happens to it ---------------------------------------------------------


def build(root: Path) -> None:
    """Make the tree that every scenario begins with, a repository of the user's in it."""
    (root / "src/deep/er").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o750)
    (root / ".git/objects").mkdir(parents=True)
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (root / "a.txt").write_text("one\r\ntwo\n")
    (root / "b.bin").write_bytes(bytes(range(256)) * 20)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    for number in range(2):
        (root / f"src/deep/er/{number}.txt").write_text(f"number {number}\n")
    (root / "src/link").symlink_to("deep/er/0.txt")
    (root / "log.txt").write_text("log\n")
    for number, path in enumerate(sorted(root.rglob("*"))):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(10**18 + number, 10**18 + number))


def change_through_api(fs: HostFilesystem) -> None:
    """Use every changing operation."""
    fs.write("a.txt", "changed\n")
    fs.write("a.txt", "changed again\n")
    fs.write("new/dir/file.txt", "new\n")
    fs.write("log.txt", "more\n", mode="append")
    fs.delete("b.bin")
    fs.delete("src/deep", recursive=True)
    fs.move("run.sh", "moved.sh")
    fs.move("new", "src/deep")
    fs.mkdir("made/deep")
    fs.chmod("empty", 0o700)
    fs.chmod("a.txt", 0o600)
    fs.delete("src/link")
    fs.symlink("src/link", "../a.txt")
    with fs.open_write("stream.bin") as stream:
        stream.write(b"streamed" * 1000)


def change_from_outside(root: Path) -> None:
    """Do what a shell command might do, past the filesystem."""
    (root / "a.txt").write_text("foreign\n")
    (root / "new").mkdir()
    (root / "new/file").write_text("x")
    shutil.rmtree(root / "src")
    (root / "src").symlink_to("new")
    (root / "run.sh").chmod(0o644)
    (root / "empty").rmdir()
    (root / "empty").write_text("now a file")
    (root / ".git/HEAD").write_text("ref: refs/heads/other\n")
    (root / "log.txt").write_text("lag\n")
    os.utime(root / "log.txt", ns=(5, 5))
    os.rename(root / "b.bin", root / "new/b.bin")


# --- where a scenario starts -----------------------------------------------------------------------


def nothing_before(bench: Bench) -> None:
    """A directory that Treenail has never seen."""


def one_call_before(bench: Bench) -> None:
    """A finished call, so that a store and a history exist."""
    with bench.open() as fs:
        bench.remember(fs.snapshot())
        call = fs.begin("earlier", tool_name="setup")
        fs.write("log.txt", "earlier\n", mode="append")
        fs.write("src/deep/er/1.txt", "earlier\n")
        call.prepare()
        call.finish()


def scan_before(bench: Bench) -> None:
    """A workspace that is known whole."""
    with bench.open() as fs:
        bench.remember(fs.snapshot(scan=True))


def outside_changes_before(bench: Bench) -> None:
    """A workspace that is known whole, and was changed by others since."""
    scan_before(bench)
    change_from_outside(bench.root)


def writes_before(bench: Bench) -> None:
    """A boundary, and writes through the filesystem since."""
    with bench.open() as fs:
        bench.remember(fs.snapshot())
        change_through_api(fs)


def crash_before(script: Script, *, committed: bool) -> Start:
    """What a process left that was killed when it was about to commit, or had just done so."""

    def start(bench: Bench) -> None:
        one_call_before(bench)

        def run() -> None:
            bench.commit = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]  # a kill in its place
            script(bench, nullcontext)

        with pytest.raises(ProcessKilled):
            in_child(run)
        if committed:
            bench.commit()

    return start


# --- what is killed --------------------------------------------------------------------------------


def call(bench: Bench, watch: Watch) -> None:
    with watch():
        fs = bench.open()
        held = fs.begin("call", tool_name="tool")
        change_through_api(fs)
        held.prepare()
        bench.commit()
        held.finish()


def rollback(bench: Bench, watch: Watch) -> None:
    fs = bench.open()
    held = fs.begin("call", tool_name="tool")
    change_through_api(fs)
    held.prepare()
    with watch():
        held.rollback()


def foreign_call(bench: Bench, watch: Watch) -> None:
    with watch():
        fs = bench.open()
        held = fs.begin("call", tool_name="shell", foreign=True)
        change_from_outside(bench.root)
        fs.write("through-api.txt", "too\n")
        held.prepare()
        bench.commit()
        held.finish()


def foreign_rollback(bench: Bench, watch: Watch) -> None:
    fs = bench.open()
    held = fs.begin("call", tool_name="shell", foreign=True)
    change_from_outside(bench.root)
    fs.write("through-api.txt", "too\n")
    with watch():
        held.rollback()


def restore_inside_a_call(bench: Bench, watch: Watch) -> None:
    fs = bench.open()
    held = fs.begin("call", tool_name="tool")
    fs.write("a.txt", "first\n")
    inner = fs.snapshot()
    change_through_api(fs)
    with watch():
        fs.restore(inner)
        held.prepare()
        bench.commit()
        held.finish()


def merge_of_packs(bench: Bench, watch: Watch) -> None:
    objects.MAX_SMALL_PACKS = 2
    fs = bench.open()
    held = fs.begin("call", tool_name="tool")
    change_through_api(fs)
    with watch():
        held.prepare()
        bench.commit()
        held.finish()
        fs.close()


def recovery(bench: Bench, watch: Watch) -> None:
    with watch():
        bench.recover()


def restore(bench: Bench, watch: Watch) -> None:
    with watch():
        fs = bench.open()
        fs.restore(bench.remembered(fs))


SCENARIOS: dict[str, tuple[Start, Script]] = {
    "the first call": (nothing_before, call),
    "a call": (one_call_before, call),
    "a restore inside a call": (one_call_before, restore_inside_a_call),
    "a merge of packs": (one_call_before, merge_of_packs),
    "a rollback": (one_call_before, rollback),
    "the first foreign call": (nothing_before, foreign_call),
    "a foreign call": (scan_before, foreign_call),
    "a foreign rollback": (one_call_before, foreign_rollback),
    "recovery of a call": (crash_before(call, committed=False), recovery),
    "recovery of a committed call": (crash_before(call, committed=True), recovery),
    "recovery of a foreign call": (crash_before(foreign_call, committed=False), recovery),
    "recovery of a committed foreign call": (crash_before(foreign_call, committed=True), recovery),
    "a restore": (writes_before, restore),
    "a scanned restore": (outside_changes_before, restore),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_kill_at_any_moment_leaves_one_side_or_the_other(name: str, base: Path) -> None:
    """After recovery the tree is what it was or what it was to become, and the workspace works on."""
    start, script = SCENARIOS[name]
    template = Bench(base / "template")
    template.root.mkdir(parents=True)
    build(template.root)
    start(template)
    before = look_at(template.root)

    def fresh() -> Bench:
        bench = Bench(base / "bench")
        shutil.rmtree(bench.base, ignore_errors=True)
        shutil.copytree(template.base, bench.base, symlinks=True)
        return bench

    bench = fresh()
    in_child(partial(script, bench, nullcontext))
    after = look_at(bench.root)
    disk = Disk([bench.base])
    found, _ = moments(partial(script, fresh()), disk)
    # A write can be cut off in the middle; a rename that puts a longer file in place cannot.
    found = [moment for moment in found if moment.when != "within" or "write" in moment.function]
    assert len(found) > 3, "next to no moments were found"
    sides = set()
    for moment in sample(found, KILLS):
        bench = fresh()
        assert killed(partial(script, bench), moment, disk), f"never came: {moment}"
        try:
            bench.recover()
            sides.add(_judge(bench, script, before, after))
        except Exception as error:
            error.add_note(f"killed {moment}")
            raise
    assert sides <= {"before", "after"}
    assert _fsck(bench.store) == ""


def _judge(bench: Bench, script: Script, before: Tree, after: Tree) -> str:
    """Check what a recovered workspace holds, and that it can be used; return which side it is."""
    found = look_at(bench.root)
    if script is recovery:
        side = "after"
    elif script is restore:
        side = "before" if without_times(found) == without_times(before) else "after"
    else:
        side = "after" if bench.log.exists() else "before"
    if side == "before":
        assert found == before
    else:
        assert without_times(found) == without_times(after)
    with bench.open() as fs:
        held = fs.begin("next")
        fs.write("next.txt", "next")
        held.rollback()
        fs.snapshot(scan=True)
        _read_history(fs)
    assert look_at(bench.root) == found
    return side


def _read_history(fs: HostFilesystem) -> None:
    """Read every object that any boundary needs; a missing or damaged one is an error."""
    history = fs.undo.opened()
    commits = {bytes.fromhex(entry.commit) for entry in history.line.entries}
    for oid in history.objects.reachable(commits):
        history.objects.read(oid)


def _fsck(store: Path) -> str:
    result = subprocess.run(
        ["git", "--git-dir", str(store), "fsck", "--full", "--no-dangling"],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in result.stderr.splitlines() if "hasDotgit" not in line]
    return "\n".join(complaints) if result.returncode else ""

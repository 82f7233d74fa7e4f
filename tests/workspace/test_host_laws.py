"""The laws of workspaces on disk, for any sequence of operations."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from host_kit import Tree, look_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treenail.workspace import FilesystemSnapshot
from treenail.workspace.host import HostFilesystem

Operation = tuple[str, str, str, int]
"""A verb, a path, another path, and a number that stands for content or bits."""

NAMES = st.sampled_from(["a", "b", "sub", "sub/a", "sub/b", "sub/deep/a", "x y", "\udcff\udcfe"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["write", "append", "delete", "mkdir", "move", "chmod", "symlink", "stream", "forge"]
        ),
        NAMES,
        NAMES,
        st.integers(0, 5),
    ),
    max_size=12,
)
RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
MODES = (0o644, 0o755, 0o600, 0o700, 0o444, 0o666)


def through_api(fs: HostFilesystem, operations: Sequence[Operation]) -> None:
    """Do what can be done through the filesystem; what it refuses changes nothing."""
    for verb, path, other, number in operations:
        actions: dict[str, Callable[[], object]] = {
            "write": lambda p=path, n=number: fs.write_bytes(p, b"content %d\r\n" % n * n),
            "append": lambda p=path, n=number: fs.write_bytes(p, b"more %d" % n, mode="append"),
            "delete": lambda p=path: fs.delete(p, recursive=True),
            "mkdir": lambda p=path: fs.mkdir(p),
            "move": lambda p=path, o=other, n=number: fs.move(p, o, overwrite=n % 2 == 0),
            "chmod": lambda p=path, n=number: fs.chmod(p, MODES[n]),
            "symlink": lambda p=path, o=other: fs.symlink(p, o),
            "stream": lambda p=path, n=number: _stream(fs, p, n),
            "forge": lambda p=path, n=number: fs.write_bytes(p, b"forged %d" % n),
        }
        try:
            actions[verb]()
        except OSError:
            continue


def _stream(fs: HostFilesystem, path: str, number: int) -> None:
    with fs.open_write(path) as stream:
        stream.write(b"streamed %d" % number)


def from_outside(root: Path, operations: Sequence[Operation]) -> None:
    """Do the like with plain calls into the operating system, as a foreign process would."""
    for verb, name, other, number in operations:
        path, target = os.path.join(root, name), os.path.join(root, other)
        try:
            if verb in ("write", "stream"):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                Path(path).write_bytes(b"content %d\r\n" % number * number)
            elif verb == "append":
                with open(path, "ab") as file:
                    file.write(b"more")
            elif verb == "delete":
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            elif verb == "mkdir":
                os.makedirs(path)
            elif verb == "move":
                os.rename(path, target)
            elif verb == "chmod":
                os.chmod(path, MODES[number] | (0o700 if os.path.isdir(path) else 0))
            elif verb == "symlink":
                os.symlink(other, path)
            else:
                status = os.stat(path)
                data = Path(path).read_bytes()
                Path(path).write_bytes(bytes(byte ^ 1 for byte in data))
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        except OSError:
            continue


class World:
    """A workspace on disk for one example, removed afterwards."""

    def __init__(self, before: Sequence[Operation]) -> None:
        self._directory = tempfile.TemporaryDirectory(
            dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
        base = Path(self._directory.name)
        self.root = base / "workspace"
        self.root.mkdir()
        from_outside(self.root, before)
        self.fs = HostFilesystem(self.root, store=base / "store")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.fs.close()
        self._directory.cleanup()

    def reopen(self) -> None:
        """Go on as the next process would after a crash."""
        self.fs = HostFilesystem(self.root, store=self.fs.store_path)

    def look(self, *, times: bool = False) -> Tree:
        return look_at(self.root, times=times)


@RELAXED
@given(before=OPERATIONS, during=OPERATIONS, prepared=st.booleans(), crash=st.booleans())
def test_a_call_that_is_rolled_back_leaves_no_trace(
    before: list[Operation], during: list[Operation], prepared: bool, crash: bool
) -> None:
    """Bytes, bits, links and times are as they were, in this process or in the next."""
    with World(before) as world:
        tree = world.look(times=True)
        call = world.fs.begin("call")
        through_api(world.fs, during)
        if prepared:
            call.prepare()
        if crash:
            world.reopen()
            report = world.fs.recover("call", committed=False)
        else:
            report = call.rollback()
        assert report.conflicts == ()
        assert world.look(times=True) == tree


@RELAXED
@given(before=OPERATIONS, during=OPERATIONS, through=OPERATIONS, crash=st.booleans())
def test_a_foreign_call_that_is_rolled_back_leaves_no_trace(
    before: list[Operation], during: list[Operation], through: list[Operation], crash: bool
) -> None:
    """The same holds when a process was let loose on the tree, and the filesystem was used as well."""
    with World(before) as world:
        tree = world.look(times=True)
        call = world.fs.begin("call", foreign=True)
        from_outside(world.root, during)
        through_api(world.fs, through)
        if crash:
            world.reopen()
            report = world.fs.recover("call", committed=False)
        else:
            report = call.rollback()
        assert report.conflicts == ()
        assert world.look(times=True) == tree


@RELAXED
@given(before=OPERATIONS, during=OPERATIONS, crash=st.booleans())
def test_whatever_an_undo_takes_away_is_kept(
    before: list[Operation], during: list[Operation], crash: bool
) -> None:
    """Each file and link that was there before the undo and is not afterwards is in the history."""
    with World(before) as world, tempfile.TemporaryDirectory() as other:
        call = world.fs.begin("call", foreign=True)
        from_outside(world.root, during)
        tree = world.look()
        if crash:
            world.reopen()
            report = world.fs.recover("call", committed=False)
        else:
            report = call.rollback()
        after = world.look()
        lost = {
            path: found
            for path, found in tree.items()
            if found[0] in ("file", "link") and after.get(path) != found
        }
        assert {os.fsencode(path) for path in report.kept} >= lost.keys()
        for kept in world.fs.kept():
            world.fs.copy_kept(kept, other)
        back = look_at(Path(other))
        assert {path: back.get(path) for path in lost} == lost


@RELAXED
@given(
    before=OPERATIONS,
    calls=st.lists(st.tuples(OPERATIONS, st.booleans(), st.booleans()), max_size=4),
)
def test_only_finished_calls_have_happened(
    before: list[Operation], calls: list[tuple[list[Operation], bool, bool]]
) -> None:
    """The tree is as if the calls that were rolled back had never been; every boundary can be returned to."""
    with World(before) as world:
        boundaries: list[tuple[FilesystemSnapshot, Tree]] = []
        for number, (operations, foreign, keep) in enumerate(calls):
            tree = world.look()
            call = world.fs.begin(f"call {number}", foreign=foreign)
            if foreign:
                from_outside(world.root, operations)
            else:
                through_api(world.fs, operations)
            if keep:
                tree = world.look()
                boundaries.append((call.prepare(), tree))
                call.finish()
            else:
                call.rollback()
            assert world.look() == tree
        for boundary, tree in [*reversed(boundaries), *boundaries]:
            world.fs.restore(boundary)
            assert world.look() == tree


@RELAXED
@given(before=OPERATIONS, steps=st.lists(OPERATIONS, min_size=1, max_size=3))
def test_scanned_boundaries_return_whatever_was_done(
    before: list[Operation], steps: list[list[Operation]]
) -> None:
    """Any scanned boundary can be gone back to from any other, in any order, in a later process too."""
    with World(before) as world:
        boundaries = [(world.fs.snapshot(scan=True), world.look())]
        for operations in steps:
            from_outside(world.root, operations)
            boundaries.append((world.fs.snapshot(scan=True), world.look()))
        from_outside(world.root, steps[0])
        world.reopen()
        for snapshot, tree in [*reversed(boundaries), *boundaries]:
            world.fs.restore(snapshot)
            assert world.look() == tree


@RELAXED
@given(before=OPERATIONS, during=OPERATIONS)
def test_a_difference_is_empty_exactly_if_nothing_differs(
    before: list[Operation], during: list[Operation]
) -> None:
    """The paths that a diff names are those that differ, between boundaries and between one and now."""
    with World(before) as world:
        first, tree = world.fs.snapshot(scan=True), world.look()
        from_outside(world.root, during)
        now = world.look()
        differing = {
            os.fsdecode(path) for path in tree.keys() | now.keys() if tree.get(path) != now.get(path)
        }
        assert {change.path for change in world.fs.diff(first).changes} == differing
        second = world.fs.snapshot(scan=True)
        assert {change.path for change in world.fs.diff(first, second).changes} == differing
        assert {change.path for change in world.fs.diff(second, first).changes} == differing

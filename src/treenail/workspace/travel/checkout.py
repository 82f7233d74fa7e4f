"""Checkouts: a machine's own copy of a workspace that travels, made from a boundary in the depot.

Theory of operation
-------------------
A run may have several checkouts on a machine, numbered from 0. A process locks the first that is free and
has it until it ends: one that is stopped keeps its own, and whoever takes the run over makes another.

A checkout is brought up to date by comparing. The records say what every path is at the boundary, and a scan
says what is there; what differs is fetched and put in place. Nothing that is there counts: what a call that
was cut off has left, or a process that had lost the run, is taken away. So a checkout that is killed half way
is simply compared again.

The scan trusts what it knows by inode and ctime, unless the machine was restarted since: a power cut may
leave a file with the right times and without its content.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from treenail.clock import WallClock, new_id
from treenail.errors import UsageError, WorkspaceError
from treenail.sandbox import Sandbox
from treenail.workspace.base import FilesystemSnapshot
from treenail.workspace.disk import replace_file
from treenail.workspace.history import History
from treenail.workspace.host import HostFilesystem
from treenail.workspace.line import LineEntry
from treenail.workspace.manifest import ABSENT, Entry, Manifest, State, load_manifest, same, state_of
from treenail.workspace.paths import ROOT
from treenail.workspace.restorer import ReportBuilder, Restorer
from treenail.workspace.rooted import RootedDirectory, look
from treenail.workspace.scan import RACY_NS, Exclusions, Scan, SnapshotLimits
from treenail.workspace.travel.depot import Depot
from treenail.workspace.travel.publishing import Publisher
from treenail.workspace.travel.records import number_of, read_line, tree_of

LINE = "main"
_MAX_CHECKOUTS = 100
_ATTEMPTS = 3


class Checkout(HostFilesystem):
    """A workspace that travels, in a directory of this machine's own. Get one with `check_out`."""

    def __init__(self, slot: Slot, publisher: Publisher, **options: object) -> None:
        super().__init__(slot.tree, store=slot.store, line=LINE, publisher=publisher, **options)  # type: ignore[arg-type]
        self._slot = slot

    def close(self) -> None:
        """Let go of the directory; it stays, for whoever works on the run here next."""
        super().close()
        self._slot.free()


class Slot:
    """One of a machine's directories for a run's checkouts, locked by this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tree = directory / "tree"
        self.store = directory / "store"
        self._descriptor = -1

    def take(self) -> bool:
        """Lock it; say whether it was free."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.directory / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        if not is_there:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def free(self) -> None:
        """Let another process have it. Freeing it again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor != -1:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete it, while it is locked."""
        for each in self.directory.iterdir():
            if each.name != "lock":
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        (self.directory / "lock").unlink()
        self.free()
        try:
            self.directory.rmdir()
        except OSError:
            pass  # Another process has just begun to use it.


def _free_slot(directory: Path) -> Slot:
    for number in range(_MAX_CHECKOUTS):
        slot = Slot(directory / str(number))
        if slot.take():
            return slot
    raise WorkspaceError(
        f"all {_MAX_CHECKOUTS} checkouts in {directory} are in use; end some of their processes"
    )


def check_out(
    depot: Depot,
    holder: UUID,
    boundary: FilesystemSnapshot,
    directory: Path,
    *,
    exclude: Iterable[str] = (),
    limits: SnapshotLimits | None = None,
    clock: WallClock | None = None,
    sandbox: Sandbox | None = None,
    quiet: Callable[[Path], object] = lambda tree: None,
) -> Checkout:
    """Make the workspace of a run as it is at a boundary, in a directory of this machine's own.

    `directory` is for the checkouts of this machine; each run has its own below it. `quiet` is called with
    the tree before it is compared: it waits for what an ended process may have left running there.
    """
    slot = _free_slot(directory / str(holder))
    try:
        return _checked_out(
            slot,
            depot,
            holder,
            boundary,
            Exclusions(exclude),
            limits or SnapshotLimits(),
            clock,
            sandbox,
            quiet,
        )
    except BaseException:
        slot.free()
        raise


def newest_of(depot: Depot, boundaries: Sequence[FilesystemSnapshot]) -> FilesystemSnapshot:
    """Return the newest of several boundaries of one line."""
    if len(boundaries) == 1:
        return boundaries[0]
    return max(boundaries, key=lambda each: number_of(depot, each.record))


def open_history(depot: Depot, boundary: FilesystemSnapshot) -> HostFilesystem:
    """Open the history of a workspace up to a boundary, to compare boundaries; there are no files."""
    slot = Slot(Path(tempfile.mkdtemp(prefix="treenail-history-")))
    try:
        slot.take()
        slot.tree.mkdir()
        history, line = _read_history(slot, depot, boundary, None)
        history.replace([entry for _, entry in line], Manifest())
        history.close()
        return _History(slot, Publisher(depot, UUID(int=0), _published(line)), read_only=True)
    except BaseException:
        slot.remove()
        raise


class _History(Checkout):
    def close(self) -> None:
        """Remove what was read."""
        super().close()
        shutil.rmtree(self._slot.directory, ignore_errors=True)


def write_tree(depot: Depot, boundary: FilesystemSnapshot, directory: Path) -> None:
    """Write the files of a boundary into a directory, which must be empty or not there yet."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} is not empty; name a new or an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="treenail-fetch-") as name:
        history, line = _read_history(Slot(Path(name)), depot, boundary, None)
        try:
            goal = tree_of(entry for _, entry in line)
            tree = RootedDirectory(os.fspath(directory))
            _bring_up(tree, history, goal, Manifest(), Exclusions(()), SnapshotLimits(), attempts=1)
        finally:
            history.close()


def _read_history(
    slot: Slot, depot: Depot, boundary: FilesystemSnapshot, clock: WallClock | None
) -> tuple[History, list[tuple[bytes, LineEntry]]]:
    history = History(os.fspath(slot.store), LINE, durable=False, clock=clock, depot=depot)
    try:
        return history, read_line(bytes.fromhex(boundary.record), history.objects.read_blobs)
    except BaseException:
        history.close()
        raise


def _published(line: Sequence[tuple[bytes, LineEntry]]) -> list[tuple[str, bytes]]:
    return [(entry.commit, record) for record, entry in line]


def remove_checkouts(directory: Path, run_id: UUID) -> None:
    """Delete a run's checkouts on this machine; those that a process has are left to it."""
    for each in (directory / str(run_id)).glob("*"):
        slot = Slot(each)
        if slot.take():
            slot.remove()
    try:
        (directory / str(run_id)).rmdir()
    except OSError:
        pass


def _checked_out(
    slot: Slot,
    depot: Depot,
    holder: UUID,
    boundary: FilesystemSnapshot,
    exclusions: Exclusions,
    limits: SnapshotLimits,
    clock: WallClock | None,
    sandbox: Sandbox | None,
    quiet: Callable[[Path], object],
) -> Checkout:
    slot.tree.mkdir(exist_ok=True, mode=0o755)
    quiet(slot.tree)
    history, line = _read_history(slot, depot, boundary, clock)
    try:
        entries = [entry for _, entry in line]
        goal = tree_of(entries)
        known = load_manifest(history.manifest_path) if _is_same_boot(slot.directory / "boot") else None
        manifest = _bring_up(
            RootedDirectory(os.fspath(slot.tree)), history, goal, known or Manifest(), exclusions, limits
        )
        history.replace(entries, manifest)
    finally:
        history.close()
    publisher = Publisher(depot, holder, _published(line))
    return Checkout(slot, publisher, exclude=exclusions.patterns, limits=limits, clock=clock, sandbox=sandbox)


def _is_same_boot(mark: Path) -> bool:
    """Say whether the machine has not been restarted since this was last asked about a checkout."""
    try:
        now = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return False
    try:
        if mark.read_bytes() == now:
            return True
    except OSError:
        pass
    replace_file(os.fspath(mark), now, durable=False, mode=0o600)
    return False


def _bring_up(
    tree: RootedDirectory,
    history: History,
    goal: Mapping[str, State],
    manifest: Manifest,
    exclusions: Exclusions,
    limits: SnapshotLimits,
    *,
    attempts: int = _ATTEMPTS,
) -> Manifest:
    """Make a tree what it should be; return what is known about it then."""
    for attempt in range(attempts):
        if attempt:
            # Something is there that cannot be compared, or something is still at work.
            manifest = Manifest()
        if attempt == _ATTEMPTS - 1:
            shutil.rmtree(tree.path)
            os.mkdir(tree.path)
        os.chmod(tree.path, 0o700)
        current = _look(tree, goal, manifest, exclusions, limits)
        plan = {
            path: goal.get(path, ABSENT) for path in current if not _is_right(current[path], goal.get(path))
        }
        report = ReportBuilder()
        if plan:
            history.objects.fetch(
                state.oid for path, state in plan.items() if state.oid and state.oid != current[path].oid
            )
            Restorer(tree, history.objects, new_id().hex, report, sync=False).apply(plan, current)
        if not report.conflicts and not report.notes:
            root = goal.get(ROOT, State("directory", 0o755))
            os.chmod(tree.path, root.mode)
            return _known(tree, goal, root.mode, exclusions) if plan else manifest
    raise WorkspaceError(
        f"the checkout {tree.path} changes while it is brought up to date; end whatever writes there"
    )


def _is_right(current: State, wanted: State | None) -> bool:
    if wanted is None:
        return current.kind == "absent"
    return same(current, wanted) and (wanted.kind != "file" or current.mtime_ns == wanted.mtime_ns)


def _look(
    tree: RootedDirectory,
    goal: Mapping[str, State],
    manifest: Manifest,
    exclusions: Exclusions,
    limits: SnapshotLimits,
) -> dict[str, State]:
    """Return what is at every path of a tree, and at those where something should be."""
    scan = Scan(
        manifest,
        store=None,
        exclusions=exclusions,
        private=None,
        limits=limits,
        is_temporary=lambda name: False,
    )
    descriptor = tree.open_for_listing()
    try:
        scan.run(descriptor)
    finally:
        os.close(descriptor)
    manifest.apply(scan.updates, {})
    found = {
        f"{directory}/{name}" if directory else name: state_of(entry)
        for directory, entries in manifest.directories.items()
        for name, entry in entries.items()
    }
    found |= {path: after for path, _, after in scan.differences if after.kind == "other"}
    for path in goal.keys() - found.keys() - {ROOT}:
        found[path] = _state_at(tree, path) if exclusions.covers(path, directory=False) else ABSENT
    return found


def _state_at(tree: RootedDirectory, path: str) -> State:
    try:
        with tree.strict(path) as place:
            return look(place, None)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT


def _known(
    tree: RootedDirectory, goal: Mapping[str, State], root_mode: int, exclusions: Exclusions
) -> Manifest:
    """Return the manifest of a tree that was just made what it should be."""
    manifest = Manifest()
    manifest.root_mode = root_mode
    racy_from = time.time_ns() - RACY_NS

    def walk(descriptor: int, directory: str) -> None:
        entries: dict[str, Entry] = {}
        manifest.directories[directory] = entries
        with os.scandir(descriptor) as listing:
            found = [(each.name, each.stat(follow_symlinks=False)) for each in listing]
        for name, status in found:
            path = f"{directory}/{name}" if directory else name
            is_directory = stat.S_ISDIR(status.st_mode)
            wanted = goal.get(path)
            if wanted is None or exclusions.covers(path, directory=is_directory):
                continue
            if is_directory:
                entries[name] = (status.st_mode, 0, 0, 0, 0, status.st_uid, status.st_gid, b"")
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                try:
                    walk(below, path)
                finally:
                    os.close(below)
                continue
            ctime_ns = 0 if status.st_ctime_ns >= racy_from else status.st_ctime_ns
            entries[name] = (
                status.st_mode,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                ctime_ns,
                status.st_uid,
                status.st_gid,
                wanted.oid,
            )

    descriptor = tree.open_for_listing()
    try:
        walk(descriptor, "")
    finally:
        os.close(descriptor)
    return manifest

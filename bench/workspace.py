"""What a boundary of a workspace on disk costs, beside what it cannot cost less than, and beside git.

Every figure is in milliseconds and the best of several tries, taken in turns with as many of its floor or
peer, so that whatever else the machine does meanwhile disturbs both alike. Trees are removed only at the very
end: making files is slow for a while after many were removed.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.report import SNAPSHOT, Row, Size
from treenail.workspace import WorkspaceCall
from treenail.workspace.host import HostFilesystem

FILES_PER_DIRECTORY = 20
DIRECTORIES_PER_PARENT = 25
MAX_API_MS = 5.0
"""A boundary, three changes through the filesystem and the way back, whatever the size of the tree."""
MAX_GROWTH = 1.5
"""How much more it may take in a large tree than in a small one: it is flat."""


def rows(size: Size) -> Iterator[Row]:
    """Measure trees of several sizes."""
    base = tempfile.mkdtemp(prefix="treenail-bench-")
    try:
        counts = (1_000,) if size.is_small else (1_000, 10_000, 50_000)
        trees = [(count, _tree(os.path.join(base, str(count)), count)) for count in counts]
        # What was just written is as new as the scan, and would be read twice.
        time.sleep(0.3)
        smallest: float | None = None
        for count, tree in trees:
            store = os.path.join(base, f"store-{count}")
            yield from _first_capture(count, tree, store)
            line = SNAPSHOT if count == 50_000 else ""
            through_api = list(_through_api(count, tree, store, base, line))
            yield from through_api
            best = through_api[0].ours
            if smallest is None:
                smallest = best
            else:
                name = f"the same, beside a tree of {counts[0]:,} files"
                yield Row(name, best, smallest, best / smallest, MAX_GROWTH, line)
            yield from _foreign(count, tree, store)
    finally:
        shutil.rmtree(base)


def _tree(root: str, files: int) -> str:
    generator = random.Random(files)
    for number in range(files):
        directory = number // FILES_PER_DIRECTORY
        path = f"{root}/p{directory // DIRECTORIES_PER_PARENT}/d{directory % DIRECTORIES_PER_PARENT}"
        if number % FILES_PER_DIRECTORY == 0:
            os.makedirs(path)
        with open(f"{path}/f{number % FILES_PER_DIRECTORY}.py", "wb") as file:
            file.write(generator.randbytes(generator.randint(200, 4_000)))
    return root


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1_000


# --- the first look at a tree ----------------------------------------------------------------------


def _first_capture(size: int, tree: str, store: str) -> Iterator[Row]:
    tries = 15 if size <= 1_000 else 6 if size <= 10_000 else 3
    floors, ours, copies, empty = [], [], [], []
    for number in range(tries):
        floors.append(_timed(lambda: _read_and_hash(tree)))
        target = store if number == 0 else f"{store}-{number}"
        with HostFilesystem(tree, store=target) as fs:
            ours.append(_timed(lambda: fs.snapshot(scan=True)))
        with HostFilesystem(tree, store=f"{store}-empty-{number}") as fs:
            empty.append(_timed(fs.snapshot))
        copies.append(_timed(partial(_read_hash_and_copy, tree, f"{store}-copy-{number}")))
    name = f"first snapshot of {size:,} files"
    yield Row(f"{name} / reading and hashing each once", min(ours), min(floors), min(ours) / min(floors))
    yield Row(f"{name} / the same, and one copy kept", min(ours), min(copies), min(ours) / min(copies))
    yield Row(
        "  of which making the store, once for a workspace",
        min(empty),
        min(ours),
        min(empty) / min(ours),
    )


def _read_and_hash(path: str) -> None:
    with os.scandir(path) as listing:
        for entry in listing:
            if entry.is_dir(follow_symlinks=False):
                _read_and_hash(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    hashlib.sha1(file.read(), usedforsecurity=False).digest()


def _read_hash_and_copy(tree: str, target: str) -> None:
    """Look at, read, hash and copy every file, into one file: what keeping costs at the very least."""
    known: dict[str, tuple[os.stat_result, bytes]] = {}
    with open(target, "wb", buffering=1024 * 1024) as output:
        for path in _files(tree):
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                content = file.read()
            known[path] = (status, hashlib.sha1(content, usedforsecurity=False).digest())
            output.write(content)


def _files(path: str) -> Iterator[str]:
    with os.scandir(path) as listing:
        for entry in listing:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry.path


# --- changes through the filesystem ----------------------------------------------------------------


def _changed_paths(round_: int) -> list[str]:
    return [f"p{(round_ + number) % 2}/d{number * 7}/f{(round_ + number) % 20}.py" for number in range(3)]


def _through_api(size: int, tree: str, store: str, base: str, line: str) -> Iterator[Row]:
    ours, raw, peer = [], [], []
    git = _Git(tree, os.path.join(base, f"git-{size}"))
    git.snapshot()
    with HostFilesystem(tree, store=store) as fs:
        for number in range(30):
            paths = _changed_paths(number)
            ours.append(_timed(partial(_api_cycle, fs, paths)))
            raw.append(_timed(partial(_replace_raw, tree, paths * 2)))
            if number < 3:
                peer.append(_timed(partial(_git_cycle, git, tree, paths)))
    best = min(ours)
    name = f"snapshot + 3 writes + restore, {size:,} files"
    yield Row(f"{name} / {MAX_API_MS:g} ms", best, MAX_API_MS, best / MAX_API_MS, 1.0, line)
    yield Row(f"{name} / replacing 6 files with nothing kept", best, min(raw), best / min(raw))
    yield Row(f"{name} / git add -A, write-tree, read-tree -u", best, min(peer), best / min(peer))


def _api_cycle(fs: HostFilesystem, paths: list[str]) -> None:
    snapshot = fs.snapshot()
    for path in paths:
        fs.write(path, "changed by a tool\n")
    fs.restore(snapshot)


def _replace_raw(tree: str, paths: list[str]) -> None:
    """Replace files, each in one step: what is left of the work when nothing is kept."""
    for path in paths:
        full = os.path.join(tree, path)
        with open(full, "rb") as file:
            content = file.read()
        descriptor = os.open(f"{full}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)
        os.rename(f"{full}.new", full)


class _Git:
    """What one would do with git alone, on a repository beside the tree."""

    def __init__(self, tree: str, directory: str) -> None:
        self._environment = {
            **os.environ,
            "GIT_DIR": directory,
            "GIT_WORK_TREE": tree,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self._tree = tree
        self.run("init", "-q")

    def run(self, *arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments],
            env=self._environment,
            cwd=self._tree,
            check=True,
            capture_output=True,
            text=True,
        )
        return result.stdout.strip()

    def snapshot(self) -> str:
        self.run("add", "-A")
        return self.run("write-tree")

    def restore(self, tree: str) -> None:
        # The kindest way: what the index knows to be unchanged is not written again.
        self.run("read-tree", "--reset", "-u", tree)


def _git_cycle(git: _Git, tree: str, paths: list[str]) -> None:
    before = git.snapshot()
    saved = {}
    for path in paths:
        with open(os.path.join(tree, path), "r+b") as file:
            saved[path] = file.read()
            file.write(b"changed")
    git.snapshot()
    git.restore(before)


# --- around a shell command ------------------------------------------------------------------------


def _foreign(size: int, tree: str, store: str) -> Iterator[Row]:
    begins, commits, rollbacks, raw = [], [], [], []
    walks: dict[str, list[float]] = {"begin": [], "commit": [], "rollback": []}
    with HostFilesystem(tree, store=store) as fs:
        fs.snapshot(scan=True)
        for number in range(40 if size <= 1_000 else 16):
            walks["begin"].append(_timed(lambda: _walk(tree)))
            began = time.perf_counter()
            call = fs.begin(f"call-{number}", tool_name="shell", foreign=True)
            begins.append((time.perf_counter() - began) * 1_000)
            for path in _changed_paths(number):
                with open(os.path.join(tree, path), "wb") as file:
                    file.write(b"changed by a command %d\n" % number)
            if number % 2:
                raw.append(_timed(partial(_replace_raw, tree, _changed_paths(number))))
                rollbacks.append(_timed(call.rollback))
                walks["rollback"].append(_timed(lambda: _walk(tree)))
            else:
                commits.append(_timed(partial(_commit, call)))
                walks["commit"].append(_timed(lambda: _walk(tree)))
    replaced = min(walks["rollback"]) + min(raw)
    for name, taken, floor_name, floor in (
        ("before a shell command", begins, "scandir + stat walk", min(walks["begin"])),
        ("committing 3 files after it", commits, "scandir + stat walk", min(walks["commit"])),
        ("rolling 3 files back after it", rollbacks, "walk and replacing 3 files", replaced),
    ):
        yield Row(f"{name}, {size:,} files / {floor_name}", min(taken), floor, min(taken) / floor)


def _commit(call: WorkspaceCall) -> None:
    call.prepare()
    call.finish()


def _walk(path: str) -> None:
    with os.scandir(path) as listing:
        for entry in listing:
            entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                _walk(entry.path)

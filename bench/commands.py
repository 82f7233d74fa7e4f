"""What a command on a layer costs, beside bubblewrap on a bare overlay, in small trees and large ones.

Ours and the bare one alternate, and the best of each counts. The bare one mounts an overlay and starts `true`
in bubblewrap; ours also holds the workspace, hides secrets, filters system calls, reads what was changed and
drops the layer. Systems of this kind report 10.8 ms for a checkpoint and 1.9 ms for a rollback (DeltaBox, on
other machines); theirs hold processes as well, ours only files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.report import Row, Size
from treenail.sandbox import Layer, probe
from treenail.tools.process import run_command
from treenail.workspace import CommandLayer, IsolatedFilesystem, isolate
from treenail.workspace.host import HostFilesystem

MAX_TO_BARE = 1.5
MAX_GROWTH = 1.2
BARE = (
    'mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work$3" bare "$1" && exec bwrap '
    '--ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --bind "$1" "$1" --unshare-all '
    '--die-with-parent --new-session --chdir "$1" true'
)


def rows(size: Size) -> Iterator[Row]:
    """Measure small and large trees."""
    if not probe().confines:
        yield Row(f"commands: {probe().text}", "not measured")
        return
    base = Path(tempfile.mkdtemp(prefix="treenail-bench-"))
    rounds = 3 if size is Size.LEAST else 10 if size.is_small else 40
    try:
        smallest: float | None = None
        for count in (100,) if size is Size.LEAST else (1_000,) if size.is_small else (1_000, 50_000):
            tree = _tree(base / str(count), count)
            with HostFilesystem(tree, store=base / f"store-{count}") as fs:
                ours, bare = _beside(fs, base, rounds)
                label = f"{count:,} files"
                yield Row(
                    f"`true` on a layer, {label}, ms / bwrap on an overlay",
                    ours,
                    bare,
                    ours / bare,
                    MAX_TO_BARE,
                )
                if smallest is None:
                    smallest = ours
                else:
                    yield Row("the same, beside 1,000 files", ours, smallest, ours / smallest, MAX_GROWTH)
                yield from _steps(fs, label, rounds)
                yield from _copy(fs, base / f"copy-{count}", label)
    finally:
        shutil.rmtree(base)


def _tree(root: Path, count: int) -> Path:
    for number in range(count):
        directory = root / f"d{number // 100}"
        if number % 100 == 0:
            directory.mkdir(parents=True)
        (directory / f"f{number}.txt").write_text(f"the content of file {number}\n" * 4)
    return root


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _layer(fs: HostFilesystem) -> Layer:
    layer = fs.open_layer()
    assert isinstance(layer, CommandLayer), layer
    return Layer(Path(layer.lower), Path(layer.upper), Path(layer.work), layer.options)


def _ours(fs: HostFilesystem) -> None:
    call = fs.begin("call")
    root = Path(fs.root)
    run_command(["true"], cwd=root, sandbox=fs.sandbox, workspace=root, layer=_layer(fs))
    call.prepare()
    call.finish()


def _bare(root: str, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place) as name:
        for each in ("upper", "work"):
            os.mkdir(os.path.join(name, each))
        user, option = ([], "") if os.geteuid() == 0 else (["--user", "--map-root-user"], ",userxattr")
        subprocess.run(
            ["unshare", *user, "--mount", "sh", "-c", BARE, "sh", root, name, option],
            check=True,
            stdin=subprocess.DEVNULL,
        )


def _beside(fs: HostFilesystem, place: Path, rounds: int) -> tuple[float, float]:
    ours, bare = [], []
    for _ in range(rounds):
        ours.append(_timed(lambda: _ours(fs)))
        bare.append(_timed(lambda: _bare(fs.root, place)))
    return min(ours), min(bare)


def _steps(fs: HostFilesystem, label: str, rounds: int) -> Iterator[Row]:
    """Yield what opening a layer, dropping one and applying four changes cost, without the command."""
    opens, drops, applies = [], [], []
    for number in range(rounds):
        call = fs.begin(f"drop-{number}")
        opens.append(_timed(fs.open_layer))
        drops.append(_timed(call.rollback))
        call = fs.begin(f"keep-{number}")
        upper = _layer(fs).upper
        for each in range(4):
            (upper / f"new{each}").write_text(f"round {number}\n")
        applies.append(_timed(call.prepare))
        call.finish()
    yield Row(f"opening a layer, {label}, ms / a published checkpoint", min(opens), 10.8, min(opens) / 10.8)
    yield Row(f"dropping it, {label}, ms / a published rollback", min(drops), 1.9, min(drops) / 1.9)
    yield Row(f"listing and applying 4 changes, {label}, ms", min(applies))


def _copy(fs: HostFilesystem, place: Path, label: str) -> Iterator[Row]:
    """Yield what the first command in a subagent's copy waits for, beside writing the tree out."""
    copy = isolate(fs, place=place)
    assert isinstance(copy, IsolatedFilesystem)
    call = copy.begin("layer")
    opened = _timed(copy.open_layer)
    call.rollback()
    written = _timed(lambda: shutil.copytree(fs.root, place / "written"))
    copy.close()
    name = f"first command in a copy of {label}: its layer, ms / writing it out"
    yield Row(name, opened, written, opened / written)

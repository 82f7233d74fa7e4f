"""A process that is killed at any step of applying a layer leaves a workspace that recovery ends exactly.

The command has run before: what is killed is the keeping of its layer, or the taking back. After recovery
every path is what it was, down to the inode, or what the command made of it; which of them, the log says.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from killing import Disk, Watch, killed, moments, sample
from test_workspace_kill import Bench, Tree, build, look_at, without_times
from tests.forks import in_child

from treenail.workspace.host import HostFilesystem
from treenail.workspace.layers import CommandLayer

sys.path.insert(0, str(Path(__file__).parents[1] / "workspace"))

from layer_kit import layers_in

KILLS = 12
"""At how many moments the other scenarios are killed; see `killing.sample`."""


def command(fs: HostFilesystem) -> None:
    """Leave in a layer what a command with every kind of change leaves there; see `test_layers.py`."""
    layer = fs.open_layer()
    assert isinstance(layer, CommandLayer)
    lower, upper = Path(layer.lower), Path(layer.upper)
    for directory in ("src", "empty"):
        (upper / directory).mkdir()
        shutil.copystat(lower / directory, upper / directory)
    (upper / "empty").chmod(0o700)
    (upper / "a.txt").write_text("changed\n")
    os.link(upper / "a.txt", upper / "also")
    for removed in ("b.bin", "run.sh"):
        os.mknod(upper / removed, stat.S_IFCHR, 0)
    shutil.copy2(lower / "run.sh", upper / "moved.sh")
    (upper / "src/deep").mkdir()
    os.setxattr(upper / "src/deep", "user.overlay.opaque", b"y")
    (upper / "src/deep/n").write_text("new\n")
    (upper / "src/link").symlink_to("../a.txt")
    (upper / "made/deep").mkdir(parents=True)
    (upper / "made/deep/er").write_text("1\n")
    (upper / "log.txt").write_text("log\nmore\n")
    os.setxattr(upper / "log.txt", "user.overlay.origin", b"")
    os.utime(upper / "log.txt", ns=(5, 5))


@pytest.fixture(params=["beside", "elsewhere"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where the store is: on the workspace's filesystem, or on another, so that the layer is copied."""
    if request.param == "beside":
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm", prefix="treenail-test-") as name:
        (tmp_path / "elsewhere").symlink_to(name)
        yield tmp_path


def opened(bench: Bench) -> HostFilesystem:
    elsewhere = bench.base.parent / "elsewhere"
    return HostFilesystem(bench.root, store=elsewhere / "store" if elsewhere.exists() else bench.store)


def keep(bench: Bench, watch: Watch) -> None:
    fs = opened(bench)
    call = fs.begin("call", tool_name="shell")
    command(fs)
    with watch():
        call.prepare()
        bench.commit()
        call.finish()


def take_back(bench: Bench, watch: Watch) -> None:
    fs = opened(bench)
    call = fs.begin("call", tool_name="shell")
    command(fs)
    call.prepare()
    with watch():
        call.rollback()


def recovery(bench: Bench, watch: Watch) -> None:
    in_child(lambda: _apply_and_end(bench))
    with watch():
        _recover(bench)


def _apply_and_end(bench: Bench) -> None:
    fs = opened(bench)
    call = fs.begin("call", tool_name="shell")
    command(fs)
    call.prepare()


def _recover(bench: Bench) -> None:
    with opened(bench) as fs:
        for call_id in fs.unfinished():
            assert fs.recover(call_id, committed=bench.log.exists()).conflicts == ()
        assert list(fs.unfinished()) == []


@pytest.mark.parametrize("script", [keep, take_back, recovery])
def test_a_kill_while_a_layer_is_applied_leaves_one_side_or_the_other(
    script: Callable[[Bench, Watch], None], base: Path
) -> None:
    """Nothing in between, nothing of the layer left, and what was put back is the file that was there."""
    template = base / "template"
    (template / "workspace").mkdir(parents=True)
    build(template / "workspace")

    def fresh() -> Bench:
        bench = Bench(base / "bench")
        for place in (bench.base, base / "elsewhere" / "store"):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, bench.base, symlinks=True)
        return bench

    bench = fresh()
    in_child(partial(keep, bench, nullcontext))
    after = look_at(bench.root)
    disk = Disk([each for each in (base / "bench", base / "elsewhere") if each.exists()])
    found, _ = moments(partial(script, fresh()), disk)
    found = [moment for moment in found if moment.when != "within" or "write" in moment.function]
    assert len(found) > 10, "next to no moments were found"
    is_main = script is keep and not (base / "elsewhere").exists()
    for moment in found if is_main else sample(found, KILLS):
        bench = fresh()
        before, inodes = look_at(bench.root), _inodes(bench.root)
        assert killed(partial(script, bench), moment, disk), f"never came: {moment}"
        try:
            _recover(bench)
            _judge(bench, before, inodes, after)
        except Exception as error:
            error.add_note(f"killed {moment}")
            raise


def _inodes(root: Path) -> dict[str, int]:
    return {os.path.relpath(path, root): path.lstat().st_ino for path in root.rglob("*")}


def _judge(bench: Bench, before: Tree, inodes: dict[str, int], after: Tree) -> None:
    found = look_at(bench.root)
    if bench.log.exists():
        assert without_times(found) == without_times(after)
        assert found["log.txt"] == after["log.txt"]
    else:
        assert found == before
        assert _inodes(bench.root) == inodes
    with opened(bench) as fs:
        assert layers_in(Path(fs.store_path or "")) == []
        call = fs.begin("next")
        layer = fs.open_layer()
        assert isinstance(layer, CommandLayer)
        Path(layer.upper, "next.txt").write_text("next")
        call.prepare()
        call.rollback()
    assert look_at(bench.root) == found

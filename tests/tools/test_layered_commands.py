"""The shell tool on a layer: it does what a plain run does, and has no layer where that is not so."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from tests.forks import in_child

from treenail.sandbox import Grants, Sandbox
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolInvoked, ToolResult, ToolRunner, shell_tool
from treenail.tools.events import CommandRan
from treenail.tools.shell import run_command
from treenail.workspace import Filesystem, isolate
from treenail.workspace.host import HostFilesystem

SCRIPTS = int(os.environ.get("TREENAIL_SCRIPTS", "200"))
"""How many random scripts are compared; set it to try thousands."""

NAMES = ["a", "b", "d", "d/x", "d/y", "d/e", "d/e/z", "n", "n/m", "l", "r", "r/f", "h1", "h2", "p q"]
STEPS = [
    "echo {r} > '{p}'",
    "echo {r} >> '{p}'",
    "rm -f '{p}'",
    "rm -rf '{p}'",
    "mkdir -p '{p}'",
    "mv '{p}' '{q}'",
    # Not into itself: what is copied then depends on the order of the directory.
    "case $(realpath -m '{q}')/ in $(realpath -m '{p}')/*) ;; *) cp -r '{p}' '{q}' ;; esac",
    "ln -sfn '{p}' '{q}'",
    "ln '{p}' '{q}'",
    "chmod 600 '{p}'",
    "chmod 755 '{p}'",
    "chmod 500 '{p}'",
    "touch '{p}'",
    "touch -d 2001-01-0{r} '{p}'",
    "truncate -s 3 '{p}'",
    "sed -i s/1/2/ '{p}'",
    "mkfifo '{p}'",
    "rm -rf '{p}'; mkdir '{p}'; echo {r} > '{p}/new'",
    "rm -rf '{p}'; ln -s /nowhere '{p}'",
    'python3 -c \'import os; os.rename("{p}", "{q}")\'',
]


def fill(root: Path) -> None:
    """Make the tree that every script begins with: a directory that is closed, a file with two names."""
    (root / "d/e").mkdir(parents=True)
    (root / "r").mkdir()
    for name in ("a", "b", "d/x", "d/y", "d/e/z", "r/f", "h1"):
        (root / name).write_text(f"1 {name}\n")
        os.utime(root / name, (10**9, 10**9))
    os.link(root / "h1", root / "h2")
    (root / "l").symlink_to("a")
    (root / "r").chmod(0o555)


def look_at(root: Path) -> dict[str, object]:
    """Return what is in a directory: types, bits, content, old times, and which names are one file's."""
    found: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for place, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = Path(place, name)
            key = str(path.relative_to(root))
            try:
                status = path.lstat()
            except PermissionError:
                found[key] = "closed"
                continue
            entry: list[object] = [oct(status.st_mode)]
            if stat.S_ISLNK(status.st_mode):
                entry.append(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                readable = os.access(path, os.R_OK)
                old = status.st_mtime if status.st_mtime < 1.5e9 else None
                entry += [path.read_bytes() if readable else "closed", old]
                entry.append(inodes.setdefault(status.st_ino, key))
            found[key] = tuple(entry)
    return found


class Shell:
    """The tool in a session of its own."""

    def __init__(
        self,
        root: Path,
        store: Path,
        sandbox: Sandbox | None = None,
        filesystem: Any = None,
        tool: Tool[Any, Any] = run_command,
    ) -> None:
        self.filesystem = filesystem or HostFilesystem(root, store=store, sandbox=sandbox)
        self._tool = tool
        self.state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: self.filesystem}))
        self._count = 0

    def __call__(self, command: str, **arguments: str) -> ToolResult[object]:
        self._count += 1
        runner = ToolRunner(self.state, {"run_command": self._tool}, "prompt", "adapter")
        wanted = {"command": command, **arguments}
        return runner.execute(ToolCall(f"call-{self._count}", "run_command", wanted))

    @property
    def ran(self) -> CommandRan:
        return self.state.session[CommandRan].all()[-1]

    @property
    def outcome(self) -> str:
        return self.state.session[ToolInvoked].all()[-1].outcome


def compare(seed: int, count: int, *, is_root: bool) -> dict[str, int]:
    """Run random scripts directly and as the tool, in two trees that begin alike; count the ways."""
    if not is_root and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    dice, ways = random.Random(seed), {"layer": 0, "scan": 0}
    with TemporaryDirectory(prefix="treenail-equal-", ignore_cleanup_errors=True) as name:
        for number in range(count):
            script = "; ".join(
                dice.choice(STEPS).format(p=dice.choice(NAMES), q=dice.choice(NAMES), r=dice.randint(1, 9))
                for _ in range(dice.randint(1, 6))
            )
            base = Path(name, str(number))
            direct, root = base / "direct", base / "layered"
            for each in (direct, root):
                each.mkdir(parents=True)
                fill(each)
            subprocess.run(
                ["bash", "-c", script], cwd=direct, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            shell = Shell(root, base / "store")
            result = shell(script)
            ways[shell.ran.way] += 1
            assert result.success, (script, result.message)
            assert look_at(root) == look_at(direct), (script, shell.ran, result.message)
            shell.filesystem.close()
    return ways


@pytest.mark.parametrize("is_root", [True, False], ids=["root", "nobody"])
def test_a_command_on_a_layer_is_the_command_itself(is_root: bool) -> None:
    """Random scripts, applied, leave what they leave when they are run directly."""
    ways = in_child(lambda: compare(1 if is_root else 2, SCRIPTS // 2, is_root=is_root))
    assert ways["layer"] > ways["scan"] * 2, ways


# --- what is different on a layer ----------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    fill(place)
    return place


@pytest.mark.parametrize(
    ("command", "because"),
    [
        ("git init -q . && git add d && git mv d moved", "a directory was to be renamed"),
        ("echo 2 > h1", "other names"),
        ("echo 2 > h1; rm h1", "other names"),
    ],
    ids=["a directory is renamed", "a file has two names", "of which one is removed"],
)
def test_a_command_runs_again_where_a_layer_is_not_like_a_directory(
    command: str, because: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had done nothing to anybody; that it ran without a layer is logged."""
    shell = Shell(root, tmp_path / "store")
    assert shell(command).success
    assert shell.ran.way == "scan"
    assert because in shell.ran.because
    assert because in caplog.text
    assert (root / "moved").is_dir() or (root / "h2").read_text() == "2\n"


def test_removing_one_of_two_names_needs_no_second_run(root: Path, tmp_path: Path) -> None:
    shell = Shell(root, tmp_path / "store")
    assert shell("rm h1").success
    assert (shell.ran.way, shell.ran.because) == ("layer", "")
    assert (root / "h2").read_text() == "1 h1\n" and not (root / "h1").exists()


def test_a_command_that_may_act_outside_is_not_run_again(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    sandbox = Sandbox(grants=Grants(write=(tmp_path / "outside",)))
    shell = Shell(root, tmp_path / "store", sandbox)
    result = shell(f"echo once >> {tmp_path}/outside/count; echo 2 > h1")
    assert (tmp_path / "outside/count").read_text() == "once\n"
    assert (shell.ran.way, shell.outcome) == ("layer", "ok")
    assert "not run again" in shell.ran.because
    assert "h1, h2 has other names" in result.message or "h1 has other names" in result.message


def test_a_file_of_an_unknown_group_is_no_obstacle() -> None:
    """An ordinary user's layer does not know other groups, and refuses to copy such a file."""
    with TemporaryDirectory(prefix="treenail-public-") as name:
        os.chmod(name, 0o777)
        _change_a_file_of_an_unknown_group(Path(name))


def _change_a_file_of_an_unknown_group(public_path: Path) -> None:
    root = public_path / "workspace"
    root.mkdir()
    (root / "shared").write_text("1\n")
    (root / "shared").chmod(0o666)
    for path, uid in ((root, 65534), (root / "shared", 65534)):
        os.chown(path, uid, 12345)

    def as_nobody() -> tuple[str, str]:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        shell = Shell(root, public_path / "store")
        shell("chmod 600 shared; echo 2 >> shared")
        return shell.ran.way, shell.ran.because

    if os.geteuid() == 0:
        way, because = in_child(as_nobody)
        assert way == "scan" and "user or group" in because
        assert (root / "shared").read_text() == "1\n2\n"


ON_AN_OVERLAY = """
import os, sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from test_layered_commands import Shell, fill
place = Path({place!r})
(place / "workspace").mkdir()
fill(place / "workspace")
shell = Shell(place / "workspace", place / "store")
shell("echo 2 > a; rm b; mkdir n; echo 3 > n/f; ln a also")
root = place / "workspace"
print(shell.ran.way, shell.outcome, (root / "n/f").read_text().strip(), os.path.exists(root / "b"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an overlay for others to see needs root")
def test_in_a_container_the_layer_is_in_memory(tmp_path: Path) -> None:
    """An overlay cannot hold another one's upper directory; a container's root is one."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    script = ON_AN_OVERLAY.format(
        tests=str(Path(__file__).parent), root=str(Path(__file__).parents[2]), place=str(tmp_path / "merged")
    )
    mount = (
        'cd "$1" && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work container merged && '
        'exec "$2" -c "$3"'
    )
    words = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.stdout == "layer ok 3 False\n", done.stderr


def test_a_call_without_effects_sees_the_workspace_as_it_was(root: Path, tmp_path: Path) -> None:
    """While a command works on its layer, nobody sees what it does."""
    up, down = tmp_path / "up", tmp_path / "down"
    os.mkfifo(up)
    os.mkfifo(down)
    shell = Shell(root, tmp_path / "store", Sandbox(grants=Grants(write=(up, down))))
    seen: list[object] = []

    def look() -> None:
        up.read_text()
        seen.append(shell.filesystem.read_only_view().read("a").content)
        seen.append((root / "a").read_text())
        down.write_text("go on\n")

    looking = threading.Thread(target=look)
    looking.start()
    assert shell(f"echo 2 > a; rm -r d; echo begun > {up}; read x < {down}").success
    looking.join(60)
    assert seen == ["1 a\n", "1 a\n"]
    assert (root / "a").read_text() == "2\n"


# --- in a subagent's copy --------------------------------------------------------------------------------


def shown(filesystem: Filesystem) -> dict[str, object]:
    """Return what a workspace shows: types, bits, content."""
    found: dict[str, object] = {}
    for each in filesystem.glob("**/*"):
        status = filesystem.stat(each.path)
        bits = oct(status.permissions)
        if status.is_link:
            found[each.path] = ("link", status.link_target)
        elif status.is_directory:
            found[each.path] = ("directory", bits)
        elif status.is_file:
            found[each.path] = ("file", bits, filesystem.read_bytes(each.path).content)
    return found


def change(filesystem: Filesystem) -> None:
    """Do what a copy may have done before its command."""
    filesystem.write("a", "changed\n")
    filesystem.write("only/here/f", "new\n")
    filesystem.delete("b")
    filesystem.delete("d/e", recursive=True)
    filesystem.write("d/e", "a file now\n")


def test_a_command_in_a_copy_works_on_what_the_copy_shows(root: Path, tmp_path: Path) -> None:
    """The copy's own changes, and the rest as it was at the boundary; the original is not touched."""
    base = HostFilesystem(root, store=tmp_path / "store")
    copy = isolate(base, place=tmp_path / "copy")
    change(copy)
    base.write("d/x", "after the boundary\n")
    base.delete("d/y")
    base.write("late", "after the boundary\n")
    before = look_at(root)
    shell = Shell(root, tmp_path / "store", filesystem=copy)
    command = "cat a d/x d/y d/e f; ls; test ! -e ../../b; echo 2 >> f; rm -r ../../d; echo 3 > ../../a; pwd"
    result = shell(command, directory="only/here")
    assert shell.ran.way == "layer", shell.ran
    assert result.success, result.message
    assert "late" not in shell("ls").message
    assert copy.read("only/here/f").content == "new\n2\n"
    assert copy.read("a").content == "3\n"
    assert not copy.exists("d")
    assert look_at(root) == before
    kinds = {each.path: each.after.kind for each in copy.changes()}
    assert kinds == {
        "a": "file",
        "b": "absent",
        "d": "absent",
        "d/e": "absent",
        "d/e/z": "absent",
        "d/x": "absent",
        "d/y": "absent",
        "only": "directory",
        "only/here": "directory",
        "only/here/f": "file",
    }


def test_a_failed_command_leaves_a_copy_as_it_was(root: Path, tmp_path: Path) -> None:
    copy = isolate(HostFilesystem(root, store=tmp_path / "store"), place=tmp_path / "copy")
    change(copy)
    before = shown(copy)
    shell = Shell(root, tmp_path / "store", filesystem=copy, tool=shell_tool(undo_on_failure=True))
    assert not shell("rm -rf *; echo x > y; exit 1").success
    assert shown(copy) == before
    assert not list((tmp_path / "copy/layers").iterdir())


def test_a_command_in_a_copy_is_the_command_itself(tmp_path: Path) -> None:
    """Random scripts, on a copy that has changes of its own, leave what they leave when run directly."""
    dice = random.Random(3)
    for number in range(max(10, SCRIPTS // 20)):
        script = "; ".join(
            dice.choice(STEPS).format(p=dice.choice(NAMES), q=dice.choice(NAMES), r=dice.randint(1, 9))
            for _ in range(dice.randint(1, 6))
        )
        base = tmp_path / str(number)
        for name in ("direct", "root"):
            (base / name).mkdir(parents=True)
            fill(base / name)
            (base / name / "h2").unlink()
        direct = HostFilesystem(base / "direct", store=base / "direct-store")
        copy = isolate(HostFilesystem(base / "root", store=base / "store"), place=base / "copy")
        for each in (direct, copy):
            change(each)
        subprocess.run(
            ["bash", "-c", script],
            cwd=direct.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        shell = Shell(base / "root", base / "store", filesystem=copy)
        shell(script)
        assert shown(copy) == shown(direct), (script, shell.ran)


def test_a_conflict_is_told_by_path(root: Path, tmp_path: Path) -> None:
    """The call fails as `conflict`; what the model reads names the paths, and has the command's output."""
    up, down = tmp_path / "up", tmp_path / "down"
    os.mkfifo(up)
    os.mkfifo(down)
    shell = Shell(root, tmp_path / "store", Sandbox(grants=Grants(write=(up, down))))

    def person() -> None:
        up.read_text()
        (root / "d/x").write_text("a person's\n")
        down.write_text("go on\n")

    async def both() -> ToolResult[object]:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, person)
            return await anyio.to_thread.run_sync(
                lambda: shell(f"echo begun > {up}; read x < {down}; cat d/x; echo 2 > d/x; echo 2 > a")
            )

    result = anyio.run(both)
    assert not result.success
    assert shell.outcome == "conflict"
    assert "d/x" in result.message and "treenail recover" in result.message
    assert shell.state.session[ToolInvoked].all()[-1].conflicts == ("d/x",)
    assert (root / "d/x").read_text() == "a person's\n"
    assert (root / "a").read_text() == "1 a\n"
    (kept,) = shell.filesystem.kept()
    assert {"a", "d/x"} == set(kept.paths)

"""What a command changes lands in its layer or in its workspace, and nothing does if it must not begin."""

import os
import subprocess
from pathlib import Path

import pytest

from treenail.errors import SandboxError
from treenail.sandbox import Layer, confined


def run(command: str, workspace: Path, layer: Layer | None = None) -> subprocess.CompletedProcess[str]:
    with confined(["/bin/sh", "-c", command], workspace, workspace=workspace, layer=layer) as line:
        return subprocess.run(
            line.argv,
            check=False,
            pass_fds=line.descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


@pytest.mark.parametrize("name", ["plain", "a,b:c\\d 'e\" $f"])
def test_what_a_command_changes_lands_in_its_layer(tmp_path, name):
    """Whatever the directory is called."""
    lower, upper, work = (tmp_path / each / name for each in ("lower", "upper", "work"))
    for each in (lower, upper, work):
        each.mkdir(parents=True)
    (lower / "kept").write_text("before")
    ran = run("cat kept; echo after > kept; echo new > made", lower, Layer(lower, upper, work))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "before", "")
    assert {each.name: each.read_text() for each in lower.iterdir()} == {"kept": "before"}
    assert {each.name: each.read_text() for each in upper.iterdir()} == {"kept": "after\n", "made": "new\n"}


def test_without_a_layer_a_command_writes_to_the_workspace(tmp_path):
    """And nowhere else."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    ran = run("echo new > made; echo out > ../out; ls /proc/self/fd", workspace)
    assert (workspace / "made").read_text() == "new\n"
    assert os.listdir(tmp_path) == ["workspace"]
    assert ran.stdout.split() == ["0", "1", "2", "3"], "no descriptor leads out of the sandbox"


def test_a_command_whose_starter_died_does_not_begin(tmp_path):
    """It waits for a word that is sent when its sandbox is tied to its starter; without it, it ends."""
    argv = ["touch", "begun"]
    with confined(argv, tmp_path, workspace=tmp_path, waits=True) as line:
        ran = subprocess.run(line.argv, check=False, pass_fds=line.descriptors, stdin=subprocess.DEVNULL)
    assert ran.returncode == 125
    assert os.listdir(tmp_path) == []


def test_the_whole_system_is_not_a_workspace():
    """Nothing would be left to keep out."""
    with (
        pytest.raises(SandboxError, match="the whole system"),
        confined(["true"], Path("/"), workspace=Path("/")),
    ):
        pass


def test_what_this_python_imports_is_there_also_if_it_lies_in_tmp(tmp_path, monkeypatch):
    """A checkout in `/tmp` runs its own interpreter; the rest of `/tmp` is empty to it."""
    workspace, library, other = (tmp_path / name for name in ("workspace", "library", "other"))
    for each in (workspace, library, other):
        each.mkdir()
        (each / "it.py").write_text("it = 1\n")
    monkeypatch.syspath_prepend(library)
    ran = run(f"cat {library}/it.py; ls {other}; touch {library}/new", workspace)
    assert ran.stdout == "it = 1\n"
    assert ran.stderr.count("No such file") == 1
    assert not (library / "new").exists()

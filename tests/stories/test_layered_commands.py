"""A person saves files while an agent's command runs on a layer: their files are never touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, treenail

SAVED = "def add(a, b):\n    return a + b  # an hour of work\n"

WAIT = "touch begun; until grep -q saved signal; do sleep 0.05; done"
"""Runs until the person has saved: what is saved in place is seen through the layer."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (root / "signal").write_text("not yet\n")
    return root


def started(project: Path, *arguments: str, calls: list[dict[str, object]], shows: str) -> Terminal:
    """Start a run whose command has begun, on its layer, when this returns."""
    file = project.parent / "script.json"
    wanted = [{"name": "run_command", "arguments": each} for each in calls]
    file.write_text(json.dumps([*([{"calls": wanted}] if wanted else []), "done"]))
    terminal = Terminal("run", "go", "--model", f"scripted:{file}", *arguments, cwd=project)
    terminal.wait_for(shows)
    while not list(project.parent.glob("project-state/**/layers/*/upper/begun")):
        terminal.wait_for("s · Ctrl-C")
    return terminal


def save(project: Path) -> None:
    """Save a file as editors do, and another in place; make a new one."""
    (project / "calc.py~").write_text(SAVED)
    os.rename(project / "calc.py~", project / "calc.py")
    (project / "ideas").mkdir()
    (project / "ideas/new.txt").write_text("a new file")
    (project / "signal").write_text("saved\n")


def assert_saved(project: Path) -> None:
    assert (project / "calc.py").read_text() == SAVED
    assert (project / "ideas/new.txt").read_text() == "a new file"
    assert (project / "signal").read_text() == "saved\n"
    assert not list(project.parent.glob("project-state/**/layers/*")), "the layer was not dropped"


def test_a_save_while_a_check_runs_stays(project: Path) -> None:
    """The check passes, the run is completed, and nothing of the check is left but its cache."""
    check = f"{WAIT}; mkdir -p .pytest_cache/v; touch .pytest_cache/v/kept"
    with started(project, "--check", check, calls=[], shows="s · Ctrl-C") as terminal:
        save(project)
        assert terminal.end() == 0, terminal.text
    assert_saved(project)
    assert not (project / "begun").exists()
    assert (project / ".pytest_cache/v/kept").exists()


def test_a_save_while_a_command_is_interrupted_stays(project: Path) -> None:
    call = {"command": "touch begun; rm -rf ideas calc.py; sleep 600"}
    with started(project, calls=[call], shows="● run_command") as terminal:
        save(project)
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
    assert_saved(project)
    assert not (project / "begun").exists()


def test_a_save_while_a_command_times_out_stays(project: Path) -> None:
    call = {"command": "touch begun; rm -rf ideas calc.py; sleep 600", "timeout_seconds": 3}
    with started(project, calls=[call], shows="● run_command") as terminal:
        save(project)
        assert terminal.end() == 0, terminal.text
    assert_saved(project)
    assert not (project / "begun").exists()


def test_a_save_after_a_kill_stays_when_the_run_is_resumed(project: Path) -> None:
    """The process is dead and the person edits. Nothing has to be undone, and the command runs again."""
    call = {
        "command": "touch begun; grep -q saved signal && exit; echo agent > calc.py; rm -rf ideas; sleep 600"
    }
    with started(project, calls=[call], shows="● run_command") as terminal:
        terminal.kill()
    assert "a - b" in (project / "calc.py").read_text()
    save(project)
    again = treenail("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert_saved(project)
    assert (project / "begun").exists(), "the command ran again"


def test_a_command_that_changed_what_a_person_saved_is_a_conflict(project: Path) -> None:
    """Nothing of it is applied, everybody is told, and its files can be fetched."""
    call = {"command": f"{WAIT}; echo agent > calc.py; echo agent > other.py"}
    with started(project, calls=[call], shows="● run_command") as terminal:
        save(project)
        assert terminal.end() == 0, terminal.text
    assert_saved(project)
    assert not (project / "other.py").exists()
    shown = json.loads(treenail("show", "--json", cwd=project).stdout)
    assert "conflict" in json.dumps(shown)
    assert "calc.py" in treenail("show", cwd=project).stdout
    into = project.parent / "fetched"
    [kept] = shown["kept"]
    fetched = treenail("recover", kept["call"], "--into", str(into), cwd=project)
    assert fetched.returncode == 0, fetched.stderr
    assert (into / "calc.py").read_text() == (into / "other.py").read_text() == "agent\n"
    assert_saved(project)


def test_the_doctor_says_which_way_commands_work(project: Path) -> None:
    assert "commands work on a layer" in treenail("doctor", cwd=project).stdout
    without = treenail("doctor", cwd=project, env={"TREENAIL_SANDBOX": "off"}).stdout
    assert "between two scans: the sandbox is off" in without

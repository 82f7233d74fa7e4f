"""A person saves files while an agent's command works on the same tree, and loses none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, treenail

SCAN = {"TREENAIL_SANDBOX": "off"}
"""Commands work on the tree itself, and a scan finds what changed."""

SAVED = "def add(a, b):\n    return a + b  # an hour of work\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return root


def started(project: Path, command: str, **arguments: object) -> Terminal:
    """Start a run whose command has begun when this returns."""
    wait = {"calls": [{"name": "run_command", "arguments": {"command": command, **arguments}}]}
    file = project.parent / "script.json"
    file.write_text(json.dumps([wait, "done"]))
    terminal = Terminal("run", "go", "--model", f"scripted:{file}", cwd=project, env=SCAN)
    terminal.wait_for("● run_command")
    while not (project / "begun").exists():
        terminal.wait_for("s · Ctrl-C")
    return terminal


def save(project: Path) -> None:
    (project / "calc.py").write_text(SAVED)
    (project / "ideas").mkdir()
    (project / "ideas/new.txt").write_text("a new file")


def brought_back(project: Path) -> None:
    """Everything is listed, and comes back: one path from the directory it is in, then the whole call."""
    shown = treenail("show", cwd=project).stdout
    assert "calc.py" in shown and "ideas/new.txt" in shown and "treenail recover" in shown
    [kept] = json.loads(treenail("show", "--json", cwd=project).stdout)["kept"]
    assert {"calc.py", "ideas/new.txt"} <= set(kept["paths"])
    back = treenail("recover", "calc.py", cwd=project)
    assert back.returncode == 0, back.stderr
    assert (project / "calc.py").read_text() == SAVED
    back = treenail("recover", kept["call"], cwd=project)
    assert back.returncode == 0, back.stderr
    assert (project / "ideas/new.txt").read_text() == "a new file"


def test_a_save_while_a_command_is_interrupted_is_not_lost(project: Path) -> None:
    with started(project, "touch begun; sleep 600") as terminal:
        save(project)
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
        assert "calc.py" in terminal.text
    assert "a - b" in (project / "calc.py").read_text(), "the command was undone"
    assert not (project / "begun").exists()
    brought_back(project)


def test_a_save_while_a_command_times_out_is_not_lost(project: Path) -> None:
    """On a slow machine the save may come after the undo; then the file simply stays."""
    with started(project, "touch begun; sleep 600", timeout_seconds=3) as terminal:
        save(project)
        assert terminal.end() == 0, terminal.text
    if (project / "calc.py").read_text() != SAVED:
        assert "calc.py" in treenail("show", cwd=project).stdout
        assert treenail("recover", "calc.py", cwd=project).returncode == 0
    assert (project / "calc.py").read_text() == SAVED


def test_a_save_after_a_kill_is_not_lost_by_the_resume(project: Path) -> None:
    """The process is dead, the person edits, and the resume undoes the command of the dead process."""
    with started(project, "touch begun; [ -e ../go ] || sleep 600") as terminal:
        terminal.kill()
    save(project)
    (project.parent / "go").touch()
    again = treenail("resume", cwd=project, env=SCAN)
    assert again.returncode == 0, again.stderr
    assert (project / "begun").exists(), "the command ran again"
    brought_back(project)


def test_a_save_while_a_check_runs_is_not_lost(project: Path) -> None:
    """The check passes, what it changed is undone, and the person's edit with it: named, and kept."""
    file = project.parent / "script.json"
    file.write_text(json.dumps(["done"]))
    check = "touch begun; until [ -e ../go ]; do sleep 0.1; done"
    arguments = ("run", "go", "--model", f"scripted:{file}", "--check", check)
    with Terminal(*arguments, cwd=project, env=SCAN) as terminal:
        while not (project / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        save(project)
        (project.parent / "go").touch()
        assert terminal.end() == 0, terminal.text
        assert "calc.py" in terminal.text
    assert "✓ 0 calls" in terminal.text
    assert "a - b" in (project / "calc.py").read_text()
    brought_back(project)


def test_a_path_that_no_undo_took_away_is_said_to_be_unknown(project: Path) -> None:
    with started(project, "touch begun; sleep 600") as terminal:
        save(project)
        terminal.type("\x03")
        terminal.end()
    refused = treenail("recover", "nothing.txt", cwd=project)
    assert refused.returncode == 2
    assert "calc.py" in refused.stderr
    into = project.parent / "elsewhere"
    assert treenail("recover", "ideas", "--into", str(into), cwd=project).returncode == 0
    assert (into / "ideas/new.txt").read_text() == "a new file"
    assert not (project / "ideas").exists()


def test_each_version_that_was_kept_can_be_brought_back(project: Path) -> None:
    """Also an older one, although two runs have calls with one id, and both took the same path away."""
    for version in ("one", "two"):
        with started(project, "touch begun; sleep 600") as terminal:
            (project / "calc.py").write_text(f"version {version}\n")
            terminal.type("\x03")
            assert terminal.end() == 130, terminal.text
    listed = treenail("recover", cwd=project).stdout
    names = [line.rpartition(" ")[2] for line in listed.splitlines()]
    assert len(set(names)) == 2, listed
    for name, version in zip(names, ("one", "two"), strict=True):
        back = treenail("recover", name, cwd=project)
        assert back.returncode == 0, back.stderr
        assert (project / "calc.py").read_text() == f"version {version}\n"


@pytest.mark.parametrize("command", [("rollback",), ("undo", "--yes")], ids=lambda each: each[0])
def test_a_rollback_says_what_it_kept_of_a_person(project: Path, command: tuple[str, ...]) -> None:
    """A save while a command ran that was kept is part of what the scan found; going back names it."""
    with started(project, "touch begun; while [ ! -e go ]; do sleep 0.1; done") as terminal:
        save(project)
        (project / "go").touch()
        assert terminal.end() == 0, terminal.text
    done = treenail(*command, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "a - b" in (project / "calc.py").read_text()
    assert "kept, because you may have written them yourself: " in done.stdout
    assert "calc.py" in (told := done.stdout.partition("kept, because")[2]) and "ideas/new.txt" in told
    name = treenail("recover", cwd=project).stdout.rpartition("recover ")[2].strip()
    assert treenail("recover", name, cwd=project).returncode == 0
    assert (project / "calc.py").read_text() == SAVED
    assert (project / "ideas/new.txt").read_text() == "a new file"

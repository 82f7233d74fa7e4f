"""The demo does what it says, and what it prints is in the log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.stories.terminal import Terminal


def treenail(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treenail", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_the_demo_survives_a_kill_undoes_a_failure_and_holds_the_budget() -> None:
    shown = treenail("demo", "--fast")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "the process ended with SIGKILL" in shown.stdout
    assert "the run is completed" in shown.stdout
    assert "rolled back" in shown.stdout
    assert "what rename_symbol left in the files when it raised: nothing" in shown.stdout
    assert "judge   sent back" in shown.stdout
    assert "judge   may stop" in shown.stdout
    assert "budget_exceeded" in shown.stdout
    command = re.search(r"treenail (show [0-9a-f]{8} --store \S+)", shown.stdout)
    assert command is not None
    again = treenail(*command.group(1).split())
    assert again.returncode == 0, again.stderr
    assert "completed" in again.stdout
    listed = treenail("list", "--store", command.group(1).split()[-1])
    assert [line.split()[3] for line in listed.stdout.splitlines()[1:]] == ["completed", "failed"]


def test_a_missing_store_is_one_clear_sentence() -> None:
    shown = treenail("show", "abc", "--store", "/nowhere/runs.db")
    assert shown.returncode != 0
    assert "/nowhere/runs.db does not exist" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_demo_is_told_in_a_terminal(tmp_path: Path) -> None:
    """In a real terminal, with colours and pauses left out: the same scenes, and exit code 0."""
    project = tmp_path / "anywhere"
    project.mkdir()
    with Terminal("demo", "--fast", cwd=project) as terminal:
        assert terminal.end() == 0, terminal.text
        for scene in ("SIGKILL", "The timeline", "sent back", "budget_exceeded", "Look at it yourself"):
            assert scene in terminal.text
    assert list(project.iterdir()) == [], "it works in a scratch directory"

"""The tutorial can be repeated step by step, as it is printed, and its last command works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stories.terminal import clean_environment

from treenail.providers.scripted import Answer
from treenail.testing.wire import WireServer

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
STEPS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "tutorial"
    made.mkdir()
    return made


def done(place: Path, *command: str, **environ: str) -> str:
    """Run a command as a reader does, and return what it prints."""
    if command[0] == "treenail":
        command = (sys.executable, "-m", *command)
    ran = subprocess.run(
        command,
        cwd=place,
        env={**clean_environment(place), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def test_every_step_can_be_repeated_and_every_command_works(place: Path) -> None:
    assert len(STEPS) == 4 and len(COMMANDS) == 5
    for number, step in enumerate(STEPS, start=1):
        file = "worker.py" if "CommandChecker" in step else f"step{number}.py"
        (place / file).write_text(step)
        first, again = (done(place, sys.executable, file) for _ in range(2))
        assert first == again != "", f"step {number} says something else the second time"
        for said in re.findall(r"print.*\)  # (.*)$", step, re.MULTILINE):
            assert said in first
        if "runs.db" in step:
            printed = [done(place, *shlex.split(command)) for command in COMMANDS[:4]]
            assert all(printed) and "webmaster" in printed[0] and "<h1>Kelp</h1>" in printed[2]
            assert not (place / "site" / "index.html").exists()
            assert done(place, sys.executable, file) == first
    write = Answer("", [("write_file", {"path": "answer.txt", "content": "42\n"})])
    with WireServer([write, "It is written."]) as server:
        key = {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": server.anthropic_url}
        assert "It is written." in done(place, *shlex.split(COMMANDS[4]), **key)
    assert (place / "answer.txt").read_text() == "42\n"

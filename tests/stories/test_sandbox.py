"""The sandbox as people meet it: what is asked, what is refused, and what they are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, clean_environment, treenail

CAGE = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--"]
"""Makes a machine on which nothing can be confined, as Docker's default profile does."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    return root


def script(project: Path, *commands: str) -> str:
    answers = [{"calls": [{"name": "run_command", "arguments": {"command": each}}]} for each in commands]
    file = project.parent / f"script-{len(list(project.parent.iterdir()))}.json"
    file.write_text(json.dumps([*answers, "done"]))
    return f"scripted:{file}"


def caged(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `treenail` where nothing can be confined, without a terminal."""
    return subprocess.run(
        [*CAGE, sys.executable, "-m", "treenail", *arguments],
        cwd=project,
        env=clean_environment(project),
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def confinements(project: Path) -> list[tuple[str, list[str]]]:
    events = treenail("export", cwd=project).stdout.splitlines()
    found = [each for each in map(json.loads, events) if "CommandRan" in str(each.get("type"))]
    return [(each["payload"]["confinement"], each["payload"].get("refused", [])) for each in found]


def test_without_a_sandbox_commands_are_refused(project: Path) -> None:
    """No command runs openly by itself: not in `auto`, not in `require`; the flag is named, and it works."""
    model = script(project, "touch made")
    ran = caged(project, "run", "go", "--model", model)
    assert "--sandbox off" in ran.stderr
    assert not (project / "made").exists()
    refused = caged(project, "run", "go", "--model", model, "--sandbox", "require")
    assert refused.returncode == 2 and "--sandbox off" in refused.stderr
    looked = caged(project, "doctor")
    assert "NO  sandbox" in looked.stdout and "not confined" in looked.stdout
    assert confinements(project) == [("refused", ["command"])]
    assert caged(project, "run", "go", "--model", model, "--sandbox", "off").returncode == 0
    assert (project / "made").exists()
    assert confinements(project) == [("none", [])]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_person_at_a_terminal_is_asked_once(project: Path, answer: str) -> None:
    """Before anything runs; what they allow holds for the run and its resumes."""
    with Terminal(
        "run", "go", "--model", script(project, "touch one", "touch two"), cwd=project, before=CAGE
    ) as terminal:
        terminal.wait_for(r"not confined[\s\S]*\[y/N\]")
        terminal.type(answer + "\n")
        assert terminal.end() == 0, terminal.text
        assert terminal.text.count("[y/N]") == 1
        assert ("--sandbox off" in terminal.text) == (answer == "n")
    assert (project / "one").exists() == (project / "two").exists() == (answer == "y")


def test_what_held_and_what_was_refused_is_in_the_log(project: Path) -> None:
    """The model is told not to try again, the person which flag allows it."""
    outside = Path(project.parent, "outside")
    outside.mkdir()
    commands = [
        "echo x > /usr/evil",
        "perl -MSocket -e 'inet_aton(q(example.com)) or die q(Could not resolve)'",
        "true",
    ]
    ran = treenail("run", "go", "--model", script(project, *commands), cwd=project)
    assert ran.returncode == 0
    assert "allow a directory with --allow-write DIR" in ran.stderr
    assert "allow it with --allow-network" in ran.stderr
    assert confinements(project) == [
        ("bubblewrap, no network", ["write"]),
        ("bubblewrap, no network", ["network"]),
        ("bubblewrap, no network", []),
    ]
    told = treenail("replay", "--json", cwd=project).stdout
    assert "do not try again" in told and "--allow-network" in told
    flags = ("--allow-network", "--allow-write", str(outside))
    model = script(project, f"touch {outside}/made")
    assert treenail("run", "go", "--model", model, *flags, cwd=project).returncode == 0
    assert (outside / "made").exists()
    assert confinements(project) == [(f"bubblewrap, network, may write {outside}", [])]


def test_the_doctor_says_what_confines_commands(project: Path) -> None:
    said = treenail("doctor", cwd=project).stdout
    assert "ok  sandbox          bubblewrap" in said
    assert "off (the variable" in treenail("doctor", cwd=project, env={"TREENAIL_SANDBOX": "off"}).stdout


def test_a_cloned_project_runs_nothing_by_being_opened(project: Path) -> None:
    """Without a terminal it is refused; a person is asked, and their approval is for that content."""
    evil = project.parent / "evil"
    (project / "treenail.toml").write_text(f'check = "touch {evil}"\nallow_write = ["{project.parent}"]\n')
    model = script(project, "true")
    refused = treenail("run", "go", "--model", model, cwd=project)
    assert refused.returncode == 2
    assert "treenail config approve" in refused.stderr and "check" in refused.stderr
    assert "not approved: allow_write, check" in treenail("doctor", cwd=project).stdout
    with Terminal("run", "go", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"wants to set[\s\S]*touch[\s\S]*\[y/N\]")
        terminal.type("n\n")
        assert terminal.end() == 2
    assert not evil.exists()
    assert treenail("config", "approve", cwd=project).returncode == 0
    assert treenail("run", "go", "--model", model, cwd=project).returncode == 0
    assert evil.exists()
    evil.unlink()
    widen = script(project, "echo 'sandbox = \"off\"' >> treenail.toml")
    assert treenail("run", "go", "--model", widen, cwd=project).returncode == 0
    assert "sandbox" in treenail("run", "go", "--model", model, cwd=project).stderr, (
        "an agent cannot widen its cage"
    )

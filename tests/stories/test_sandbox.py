"""The sandbox as people meet it: what is asked, what is refused, and what they are told."""

from __future__ import annotations

import errno
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, clean_environment, treenail

NO_NAMESPACES = "exec bwrap --dev-bind / / --unshare-user --disable-userns --cap-drop ALL"
CAGE = ["sh", "-c", f'{NO_NAMESPACES} -- "$@"', "sh"]
"""Makes a machine on which there are no namespaces, as Docker's default profile does."""


def cage(project: Path) -> list[str]:
    """Make a machine on which nothing can be confined: it has no Landlock either."""
    steps = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, 444),
        (0x06, 0, 0, 0x00050000 | errno.ENOSYS),
        (0x06, 0, 0, 0x7FFF0000),
    )
    rules = project.parent / "no-landlock"
    rules.write_bytes(b"".join(struct.pack("=HBBI", *each) for each in steps))
    return ["sh", "-c", f'rules=$1; shift; {NO_NAMESPACES} --seccomp 9 -- "$@" 9<"$rules"', "sh", str(rules)]


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
        [*cage(project), sys.executable, "-m", "treenail", *arguments],
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


def test_without_namespaces_landlock_confines_commands_and_is_called_by_its_name(project: Path) -> None:
    """In `auto` alone: the doctor and the log say that it is the weaker one, and a failed call is undone."""
    (project / "a.txt").write_text("a person's")
    model = script(project, "echo x > a.txt; sleep 1000", "echo made > made; echo x > ../outside")
    file = Path(model.removeprefix("scripted:"))
    file.write_text(file.read_text().replace('sleep 1000"', 'sleep 1000", "timeout_seconds": 1'))

    def treenail_there(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CAGE, sys.executable, "-m", "treenail", *arguments],
            cwd=project,
            env=clean_environment(project),
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    refused = treenail_there("run", "go", "--model", model, "--sandbox", "require")
    assert refused.returncode == 2 and "weaker than bubblewrap" in refused.stderr
    assert "ok  sandbox          Landlock, which is weaker" in treenail_there("doctor").stdout
    assert treenail_there("run", "go", "--model", model).returncode == 0
    held = "landlock (modes and times outside are open), no network"
    assert confinements(project) == [(held, []), (held, ["write"])]
    assert (project / "a.txt").read_text() == "a person's", "the first command ran out of time"
    assert (project / "made").exists() and not (project.parent / "outside").exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_person_at_a_terminal_is_asked_once(project: Path, answer: str) -> None:
    """Before anything runs; what they allow holds for the run and its resumes."""
    with Terminal(
        "run", "go", "--model", script(project, "touch one", "touch two"), cwd=project, before=cage(project)
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

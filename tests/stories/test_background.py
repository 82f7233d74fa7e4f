"""Processes beside an agent: the real command, real sandboxes, real kills."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.stories.terminal import clean_environment, treenail

from treenail.providers.scripted import Answer
from treenail.testing.wire import Broken, WireServer

KEYS = {"OPENAI_API_KEY": "k"}

WATCHER = """
import pathlib, sys, time
print(sys.argv[0], flush=True)
for path in ("evil.txt", "build/made.txt"):
    try:
        pathlib.Path(path).write_text("x")
        print("wrote", path, flush=True)
    except OSError as error:
        print("refused", path, flush=True)
seen = None
while True:
    now = pathlib.Path("watched.txt").read_text()
    if now != seen:
        print("saw", now, flush=True)
        seen = now
    time.sleep(0.02)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "watched.txt").write_text("one")
    (root / f"watch-{uuid.uuid4().hex}.py").write_text(WATCHER)
    return root


def script(project: Path) -> str:
    return next(project.glob("watch-*.py")).name


def running(project: Path) -> list[int]:
    """The processes whose command line has the project's script in it."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes()
        except OSError:
            continue
        if script(project).encode() in words:
            found.append(int(each.name))
    return found


def flags(server: WireServer) -> tuple[str, ...]:
    return ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn")


def results(request) -> list[str]:
    return [str(each["content"]) for each in request.body["messages"] if each["role"] == "tool"]


def start(project: Path) -> Answer:
    return Answer("", [("start_process", {"command": f"{sys.executable} -B {script(project)}"})])


def test_a_process_sees_edits_and_writes_only_where_it_may(project: Path) -> None:
    """It notices edits, cannot write to the workspace but in a named directory, and ends with the run."""
    answers = [
        start(project),
        Answer("", [("write_file", {"path": "watched.txt", "content": "two"})]),
        Answer("", [("wait_process", {"process": "p1", "until": "saw two"})]),
        Answer("", [("read_process", {"process": "p9"})]),
        Answer("Done."),
    ]
    with WireServer(answers, by_conversation=True) as server:
        ran = treenail("run", "go", *flags(server), "--background-write", "build", cwd=project, env=KEYS)
        assert ran.returncode == 0, ran.stderr
        told = results(server.requests[-1])
    assert "only in build, which no undo touches" in told[0]
    seen = "".join(told)
    assert "refused evil.txt" in seen and "wrote build/made.txt" in seen
    assert "saw two" in told[2] and "is running" in told[2]
    assert "There is no process 'p9'" in told[3]
    assert not (project / "evil.txt").exists() and not running(project)
    assert "which no undo touches" in treenail("show", cwd=project).stdout
    assert treenail("undo", "--yes", cwd=project).returncode == 0
    assert (project / "watched.txt").read_text() == "one"
    assert (project / "build" / "made.txt").read_text() == "x"


def test_a_process_is_stopped_and_one_that_fails_is_told(project: Path) -> None:
    answers = [
        start(project),
        Answer("", [("stop_process", {"process": "p1"}), ("start_process", {"command": "echo no; exit 3"})]),
        Answer("Done."),
    ]
    with WireServer(answers, by_conversation=True) as server:
        assert treenail("run", "go", *flags(server), cwd=project, env=KEYS).returncode == 0
        told = results(server.requests[-1])
    assert "can write nowhere in it" in told[0]
    assert "p1 was stopped" in told[1]
    assert "p2 has ended with exit code 3" in told[2] and "no" in told[2]


def test_a_kill_ends_the_processes_and_a_resume_tells_the_model(project: Path) -> None:
    """SIGKILL of the program: the kernel ends them; the next request says that they are gone, once."""

    def answer(request):
        done = len(results(request))
        if done == 0:
            return start(project)
        told = json.dumps(request.body["messages"])
        return Answer("Done.") if "processes-ended" in told else Broken(Answer("Wait."), "hang", 0)

    with WireServer(answer) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "treenail", "run", "go", *flags(server)],
            cwd=project,
            env={**clean_environment(project), **KEYS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            server.wait_for_requests(2)
            alive = [os.pidfd_open(each) for each in running(project)]
            assert alive
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for each in alive:
            assert select.select([each], [], [], 60)[0]
            os.close(each)
        ran = treenail("resume", cwd=project, env=KEYS)
        assert ran.returncode == 0, ran.stderr
        assert "has ended" in ran.stderr
        said = [each for each in server.requests[-1].body["messages"] if "processes-ended" in str(each)]
    assert len(said) == 1 and script(project) in str(said[0])
    assert not running(project)


def test_without_a_sandbox_nothing_is_started(project: Path) -> None:
    with WireServer([start(project), Answer("Done.")], by_conversation=True) as server:
        assert (
            treenail("run", "go", *flags(server), "--sandbox", "off", cwd=project, env=KEYS).returncode == 0
        )
        assert "need the sandbox" in results(server.requests[-1])[0]


@pytest.mark.parametrize("name", ["../outside", "/etc", ".git", "link"])
def test_only_a_directory_of_the_workspace_can_be_opened(project: Path, name: str) -> None:
    """Not one outside, not git's, not by a link."""
    (project.parent / "outside").mkdir()
    (project / "link").symlink_to(project.parent / "outside")
    with WireServer([start(project), Answer("Done.")], by_conversation=True) as server:
        ran = treenail("run", "go", *flags(server), "--background-write", name, cwd=project, env=KEYS)
        if name == "link":
            assert "a link leads to it" in results(server.requests[-1])[0]
        else:
            assert ran.returncode == 2 and "not a directory inside the workspace" in ran.stderr
    assert not list((project.parent / "outside").iterdir())


def test_in_a_chat_a_process_lives_on_into_the_next_turn(project: Path) -> None:
    """It ends with the chat, and nobody is told in between that it is gone."""
    answers = [
        start(project),
        Answer("One."),
        Answer("", [("read_process", {"process": "p1"})]),
        Answer("Two."),
    ]
    with WireServer(answers, by_conversation=True) as server:
        ran = treenail("chat", *flags(server), cwd=project, env=KEYS, stdin="first\nsecond\n")
        assert ran.returncode == 0, ran.stderr
        assert "p1 is running" in results(server.requests[-1])[-1]
        assert "processes-ended" not in str(server.requests[-1].body)
    assert not running(project)

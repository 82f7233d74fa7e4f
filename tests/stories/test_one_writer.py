"""One process writes to a directory at a time: whoever comes second is told, and may take over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stories.terminal import LIMIT_S, Terminal, clean_environment, treenail
from tests.stories.test_undo import files, project, script, write

__all__ = ["project"]


STOPPING = """
import signal, threading
from treenail import Agent, tool

@tool(effects="workspace")
def change(*, context):
    "Change a file and stop in the middle, the first time."
    context.filesystem.write("a.txt", "A")
    context.filesystem.write("new.txt", "A")
    if not context.is_resume:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    context.filesystem.write("a.txt", "changed")
    return "changed"

agent = Agent("stopping", tools=[change])
"""

FLOW = """
id: flow
name: A flow
agents:
  writer:
    instructions: You write.
    tools: [files]
steps:
  - id: only
    task: only write
    agent: writer
    write_set: ["**"]
"""


@pytest.mark.parametrize("way", ["resume", "run"])
def test_a_stopped_process_is_named_and_replaced_only_by_a_take_over(project: Path, way: str) -> None:
    """Its successor resumes its run, or starts another in the same directory; then it is continued."""
    agent = project.parent / "agent.py"
    agent.write_text(STOPPING)
    change = {"calls": [{"name": "change", "arguments": {}}]}
    first = subprocess.Popen(
        [
            *(sys.executable, "-m", "treenail", "run", "go"),
            *("--agent", str(agent), "--model", script(project, change, "Done.")),
        ],
        cwd=project,
        env=clean_environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Nothing that ends beside it continues it.
    )
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        model = script(project, *(write(name, "B\n") for name in ("a.txt", "new.txt")), "Done.")
        command = ("resume",) if way == "resume" else ("run", "go", "--model", model)
        refused = treenail(*command, cwd=project)
        assert refused.returncode == 1
        assert f"process {first.pid}" in refused.stderr
        assert "--take-over" in refused.stderr
        assert (project / "a.txt").read_text() == "A"
        # The run that was refused is there, too: only the older one can be resumed like this.
        if way == "run":
            assert f"process {first.pid} (which is stopped)" in refused.stderr
            assert "since 20" in refused.stderr
            command = ("resume", "@last", "--take-over")
        taken = treenail(*command, *(() if way == "run" else ("--take-over",)), cwd=project)
        assert taken.returncode == 0, taken.stderr
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    if way == "resume":
        assert files(project) == {"a.txt": "changed", "new.txt": "A", "mine.txt": "mine\n"}
    else:
        assert files(project) == {"a.txt": "B\n", "new.txt": "B\n", "mine.txt": "mine\n"}


def test_a_workflow_takes_over_from_a_stopped_process(project: Path) -> None:
    """Without the flag it writes nothing and says who is in the way; with it, its files stand."""
    agent = project.parent / "agent.py"
    agent.write_text(STOPPING)
    (project.parent / "flow.yaml").write_text(FLOW)
    steps = project.parent / "steps.json"
    ready = json.dumps({"status": "checkpoint_ready", "summary": "done"})
    steps.write_text(json.dumps({"only": [write("a.txt", "B\n"), ready, write("a.txt", "B\n"), ready]}))
    change = {"calls": [{"name": "change", "arguments": {}}]}
    model = script(project, change, "Done.")
    first = subprocess.Popen(
        [*(sys.executable, "-m", "treenail", "run", "go"), "--agent", str(agent), "--model", model],
        cwd=project,
        env=clean_environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        flow = ("workflow", "run", "../flow.yaml", "--model", f"scripted:{steps}")
        refused = treenail(*flow, cwd=project)
        assert refused.returncode != 0
        assert "--take-over" in refused.stderr + refused.stdout
        assert (project / "a.txt").read_text() == "A"
        taken = treenail(*flow, "--take-over", cwd=project)
        assert taken.returncode == 0, taken.stderr
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    assert (project / "a.txt").read_text() == "B\n"


def test_whoever_is_asked_keeps_nobody_from_writing(project: Path) -> None:
    """While a person thinks about a second call, another run works; then the first one goes on."""
    model = script(project, write("a.txt", "A"), write("c.txt", "A"), "Done.")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"write_file[\s\S]*\[y\]es")
        terminal.type("y\n")
        terminal.wait_for(r"c\.txt[\s\S]*\[y\]es")
        assert (project / "a.txt").read_text() == "A"
        other = treenail("run", "go", "--model", script(project, write("b.txt", "B"), "Done."), cwd=project)
        assert other.returncode == 0, other.stderr
        terminal.type("y\n")
        assert terminal.end() == 0, terminal.text
    assert files(project) == {"a.txt": "A", "b.txt": "B", "c.txt": "A", "mine.txt": "mine\n"}


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_command_of_a_replaced_process_writes_nothing_more(project: Path, sandbox: str) -> None:
    """Its process was stopped in the middle of it: on a layer of its own, or in the directory itself."""
    loop = {"command": "while :; do echo half > a.txt; done"}
    model = script(project, {"calls": [{"name": "run_command", "arguments": loop}]}, "Done.")
    first = subprocess.Popen(
        [sys.executable, "-m", "treenail", "run", "go", "--sandbox", sandbox, "--model", model],
        cwd=project,
        env=clean_environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not _is_writing(project) or (sandbox == "off" and (project / "a.txt").read_text() == "one\n"):
            assert first.poll() is None
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        model = script(project, write("a.txt", "B\n"), "Done.")
        taken = treenail("run", "go", "--take-over", "--sandbox", sandbox, "--model", model, cwd=project)
        assert taken.returncode == 0, taken.stderr
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        first.kill()
        first.wait()
    assert files(project) == {"a.txt": "B\n", "mine.txt": "mine\n"}


def _is_writing(project: Path) -> bool:
    """Say whether some process is the writer of the project's files."""
    records = project.with_name(f"{project.name}-state").glob("treenail/*/runs.db.files/treenail/writer-*")
    return any('"owner": "treenail' in each.read_text() for each in records)

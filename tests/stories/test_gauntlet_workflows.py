"""The gauntlet, workflows: all five endings on the running system, judged by the logs alone.

Each workflow is a file that `treenail workflow run` takes up, in a process of its own, on a SQLite store.
What the contract wants as evidence is then looked for in the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.stories.terminal import Terminal, clean_environment, treenail

from treenail.conversation import SubagentEvent, replay
from treenail.history import diagnose
from treenail.log.sqlite import SqliteLog
from treenail.state import Session
from treenail.turns import TurnState, turn_state
from treenail.workflows import WorkflowEvent, record_of
from treenail.workflows.events import WorkflowRecord

DIAMOND = """\
id: release
name: The release
agents:
  writer:
    instructions: You write.
    tools: [files]
steps:
  - id: plan
    task: plan the release
    posture: read
    agent: writer
  - id: code
    task: code the release
    agent: writer
    depends_on: [plan]
    write_set: ["src/**"]
  - id: docs
    task: docs of the release
    agent: writer
    depends_on: [plan]
    write_set: ["docs/**"]
  - id: check
    task: check the release
    posture: read
    depends_on: [code, docs]
"""


def says(status: str = "checkpoint_ready", summary: str = "done", **more: Any) -> str:
    return json.dumps({"status": status, "summary": summary, **more})


def writes(path: str, text: str, **more: Any) -> list[Any]:
    return [{"calls": [{"name": "write_file", "arguments": {"path": path, "content": text}}]}, says(**more)]


READY: dict[str, list[Any]] = {
    "plan": [says(summary="the plan is made")],
    "code": writes("src/main.py", "print(1)\n", artifacts=["src/main.py"]),
    "docs": writes("docs/index.md", "# hello\n"),
    "check": [says()],
}


class Project:
    """A directory with a workflow, a script for each of its steps, and a store beside it."""

    def __init__(self, directory: Path) -> None:
        self.work = directory / "project"
        self.work.mkdir()
        self.store = directory / "runs.db"
        (directory / "flow.yaml").write_text(DIAMOND)
        self.options = ("--store", str(self.store), "--json")

    def script(self, **steps: list[Any]) -> str:
        path = self.work.parent / "script.json"
        path.write_text(json.dumps({**READY, **steps}))
        return f"scripted:{path}"

    def run(self, *more: str, spec: str = "", **steps: list[Any]) -> tuple[int, dict[str, Any]]:
        if spec:
            (self.work.parent / "flow.yaml").write_text(spec)
        return self._said("workflow", "run", "../flow.yaml", "--model", self.script(**steps), *more)

    def resume(self, *more: str, **steps: list[Any]) -> tuple[int, dict[str, Any]]:
        self.script(**steps)
        return self._said("workflow", "resume", "@last", *more)

    def _said(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        done = treenail(*arguments, *self.options, cwd=self.work)
        assert "Traceback" not in done.stderr, done.stderr
        lines = [json.loads(each) for each in done.stdout.splitlines()]
        assert lines, done.stderr
        assert lines[-1]["event"] == "ended"
        assert lines[-1]["exit_code"] == done.returncode
        return done.returncode, lines[-1]

    def logs(self) -> tuple[WorkflowRecord, list[WorkflowEvent], list[SubagentEvent], dict[str, TurnState]]:
        """What the store has: the workflow, its events, those of its subagents, and how their turns ended."""
        with SqliteLog(self.store) as log:
            (root,) = [each.session_id for each in log.sessions() if each.parent_id is None]
            session = Session.open(log, root, read_only=True)
            events = list(session[WorkflowEvent].all())
            children = list(session[SubagentEvent].all())
            turns = {
                each.subagent_id: turn_state(Session.open(log, UUID(each.child_session_id), read_only=True))
                for each in children
                if each.status not in ("queued", "closed")
            }
            assert not any("WorkflowEvent" in str(each) for each in replay(session).items), "it is audit"
            report = diagnose(session)
            statuses = {each.id: each.status for each in report.checks if each.id.startswith("workflow")}
            is_ready = all(
                each.state.value == "checkpoint_ready" for each in record_of(session).steps.values()
            )
            assert statuses["workflow_checkpoints"] == ("passed" if is_ready else "warning")
            return record_of(session), events, children, turns


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_full_completion(project: Project) -> None:
    """Every step is ready by its own turn's evidence, and the files of the copies are in the workspace."""
    code, said = project.run()
    assert (code, said["status"], said["ok"], said["proof_states"]) == (
        0,
        "completed",
        True,
        ["completion_ready"],
    )
    record, events, children, turns = project.logs()
    assert record.state.value == "completed"
    assert set(turns.values()) == {TurnState.COMPLETED}
    assert {each.event for each in children if each.status == "completed"} == {"finished"}
    assert events[-1].kind == "workflow_finished"
    decided = [each.checkpoint for each in events if each.kind == "checkpoint_decided"]
    assert all(each is not None and each.dependent_safe for each in decided)
    assert (project.work / "docs/index.md").read_text() == "# hello\n"
    code_step = record.steps["code"].checkpoint
    assert code_step is not None
    (artifact,) = code_step.artifacts
    assert artifact.sha256 == hashlib.sha256((project.work / "src/main.py").read_bytes()).hexdigest()
    assert treenail("workflow", "status", "--store", str(project.store), cwd=project.work).returncode == 0


def test_a_partial_outcome_says_what_is_usable_and_what_to_do(project: Project) -> None:
    code, said = project.run(docs=writes("docs/index.md", "#", status="partial", summary="half"))
    assert (code, said["status"], said["ok"]) == (3, "partial", False)
    assert said["proof_states"] == ["partial_outcome_ready"]
    assert said["usable_checkpoints"] == ["plan", "code", "docs"]
    assert said["partial_steps"] == ["docs"]
    assert said["held_steps"] == ["check"]
    record, events, children, _ = project.logs()
    assert record.state.value == "partial"
    (held,) = [each for each in events if each.kind == "step_held"]
    assert (held.step_id, held.reason) == ("check", "dependency_not_checkpoint_ready")
    assert len({each.subagent_id for each in children}) == 3, "the dependent was never begun"
    assert not (project.work / "docs").exists(), "a partial copy is not applied"
    assert (project.work / "src/main.py").exists()
    assert treenail("workflow", "status", "--store", str(project.store), cwd=project.work).returncode == 3
    # The advice is a command that works.
    advice = next(each for each in said["safe_next_actions"] if "--rerun docs" in each)
    again = treenail(*shlex.split(advice)[1:], cwd=project.work)
    assert again.returncode == 3, "the script says the same again"
    code, said = project.resume("--rerun", "failed")
    assert (code, said["status"]) == (0, "completed")
    assert (project.work / "docs/index.md").read_text() == "# hello\n"


def test_held_until_a_person_decides(project: Project) -> None:
    """A copy with files outside its write set waits; a yes applies it, and the rest goes on."""
    code, said = project.run(code=writes("elsewhere.txt", "x"))
    assert (code, said["status"]) == (4, "held")
    assert said["needs_orchestrator_steps"] == ["code"]
    record, _, _, turns = project.logs()
    assert record.state.value == "held"
    assert set(turns.values()) == {TurnState.COMPLETED}, "the turn was well; the step was not"
    assert not (project.work / "elsewhere.txt").exists()
    shown = treenail("workflow", "status", "--store", str(project.store), cwd=project.work)
    assert "it wrote outside its write set: elsewhere.txt" in shown.stdout
    assert "--ready code" in shown.stdout
    code, said = project.resume("--ready", "code", "--note", "that is fine")
    assert (code, said["status"]) == (0, "completed")
    assert (project.work / "elsewhere.txt").read_text() == "x"
    record, events, _, _ = project.logs()
    checkpoint = record.steps["code"].checkpoint
    assert checkpoint is not None
    assert checkpoint.verified_by == "person"
    assert "that is fine" in checkpoint.summary
    assert [each.kind for each in events].count("workflow_finished") == 2


def test_held_by_a_call_that_waits_for_a_person(project: Project) -> None:
    """With --ask a call waits durably in its step's own session; its answer lets that step go on."""
    code, said = project.run("--ask")
    assert (code, said["status"]) == (4, "held")
    assert sorted(said["held_steps"]) == ["check", "code", "docs"]
    record, _, children, turns = project.logs()
    assert record.state.value == "held"
    assert sorted(each.value for each in turns.values()) == ["completed", "held", "held"]
    for each in sorted({each.child_session_id for each in children if each.agent == "writer"}):
        listed = treenail("hold", "list", each, *project.options, cwd=project.work)
        if "write_file" in listed.stdout:
            answered = treenail("hold", "answer", each, "--yes", *project.options, cwd=project.work)
            assert answered.returncode == 0, answered.stderr
    code, said = project.resume()
    assert (code, said["status"]) == (0, "completed"), said
    assert (project.work / "src/main.py").read_text() == "print(1)\n"
    assert (project.work / "docs/index.md").read_text() == "# hello\n"


SLOW = """\
id: slow
steps:
  - {id: quick, task: code it, write_set: ["src/**"]}
  - {id: slow, task: sleep a while, depends_on: [quick], timeout_s: 1, workspace: shared}
  - {id: after, task: check it, depends_on: [slow], posture: read}
"""
SLEEP = [{"calls": [{"name": "run_command", "arguments": {"command": "sleep 600"}}]}, says()]


def test_timed_out(project: Project) -> None:
    code, said = project.run(spec=SLOW, sleep=SLEEP)
    assert (code, said["status"], said["ok"]) == (5, "timed_out", False)
    assert said["timeout_steps"] == ["slow"]
    assert said["usable_checkpoints"] == ["quick"]
    record, _, children, turns = project.logs()
    assert record.state.value == "timed_out"
    (late,) = [each for each in children if each.status == "timed_out"]
    assert late.timeout_ms == 1000
    assert late.elapsed_ms is not None
    assert late.elapsed_ms >= 1000
    assert late.reason
    assert late.next_actions
    assert turns[late.subagent_id] is TurnState.TIMED_OUT
    checkpoint = record.steps["slow"].checkpoint
    assert checkpoint is not None
    assert checkpoint.timed_out


def test_failed(project: Project) -> None:
    """A claim without an answer, and nothing to use: it failed, and the log says why and what to do."""
    spec = "id: w\nsteps:\n  - {id: a, task: a it, retries: 1}\n  - {id: b, task: b it, depends_on: [a]}\n"
    code, said = project.run(spec=spec, **{"a it": [says("failed", "there is nothing to do")]})
    assert (code, said["status"]) == (1, "failed")
    assert said["failed_steps"] == ["a"]
    assert said["usable_checkpoints"] == []
    assert said["safe_next_actions"]
    record, events, children, _ = project.logs()
    assert record.state.value == "failed"
    assert record.steps["a"].attempt == 2, "it was tried again once"
    assert [each.reason for each in events if each.attempt == 2] == ["retried: there is nothing to do"]
    assert len({each.subagent_id for each in children}) == 2
    code, said = project.resume("--rerun", "a", **{"a it": [says()], "b it": [says()]})
    assert (code, said["status"]) == (0, "completed")


WAITS = "[ -e go ] || sleep 600; echo done >> done.txt"
WAIT = [{"calls": [{"name": "run_command", "arguments": {"command": WAITS}}]}, says()]
"""A step that ends when a file is there."""


def test_killed_and_gone_on_with(project: Project) -> None:
    """After SIGKILL in the middle of a step the workflow is neither done nor lost."""
    (project.work.parent / "flow.yaml").write_text(SLOW.replace("timeout_s: 1", "timeout_s: 600"))
    script = project.script(sleep=WAIT)
    command = [sys.executable, "-m", "treenail", "workflow", "run", "../flow.yaml", "--model", script]
    with subprocess.Popen(
        [*command, *project.options],
        cwd=project.work,
        env=clean_environment(project.work),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("step_id") == "slow":
                break
        os.killpg(process.pid, signal.SIGKILL)
    shown = treenail("workflow", "status", *project.options, cwd=project.work)
    assert shown.returncode == 130
    assert json.loads(shown.stdout)["status"] == "running"
    (project.work / "go").touch()
    code, said = project.resume(sleep=WAIT)
    assert (code, said["status"]) == (0, "completed"), said
    _, events, _, _ = project.logs()
    assert [each.step_id for each in events if each.kind == "checkpoint_decided"] == [
        "quick",
        "slow",
        "after",
    ]


def test_ctrl_c_interrupts_a_workflow_and_it_goes_on(project: Project) -> None:
    (project.work.parent / "flow.yaml").write_text(SLOW.replace("timeout_s: 1", "timeout_s: 600"))
    script = project.script(sleep=WAIT)
    arguments = ("workflow", "run", "../flow.yaml", "--model", script, "--store", str(project.store))
    with Terminal(*arguments, cwd=project.work) as terminal:
        terminal.wait_for("● slow")
        terminal.type("\x03")
        terminal.wait_for("interrupted workflow")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
    record, events, _, _ = project.logs()
    assert record.state.value == "interrupted"
    assert events[-1].kind == "workflow_interrupted"
    (project.work / "go").touch()
    code, said = project.resume(sleep=WAIT)
    assert (code, said["status"]) == (0, "completed"), said
    record, _, _, _ = project.logs()
    assert {each.attempt for each in record.steps.values()} == {1}


def test_a_dry_run_shows_waves_and_runs_nothing(project: Project) -> None:
    """It needs no model, makes no store and touches nothing."""
    spec = DIAMOND.replace('["docs/**"]', '["src/*.md", "docs/**"]').replace('["src/**"]', '["src/**"]')
    (project.work.parent / "flow.yaml").write_text(spec)
    shown = treenail("workflow", "run", "../flow.yaml", "--dry-run", cwd=project.work)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        "wave 1: plan (writer, read)",
        "wave 2: code (writer, write)",
        "wave 3: docs (writer, write)",
        "wave 4: check (agent, read)",
        "never together: code and docs, because both write src/** and src/*.md",
    ]
    assert not project.store.exists()
    assert list(project.work.iterdir()) == []
    data = json.loads(
        treenail("workflow", "run", "../flow.yaml", "--dry-run", "--json", cwd=project.work).stdout
    )
    assert data["waves"] == [["plan"], ["code"], ["docs"], ["check"]]


def test_what_is_wrong_in_a_file_is_told_with_its_place(project: Project) -> None:
    for wrong, told in {
        "id: w\nsteps: [{id: a, task: x, depends_on: [z]}]": "(a).depends_on[0]: there is no step 'z'",
        "id: w\nsteps: [{id: a, task: x, agent: nobody}]": "wants the agent 'nobody'",
        "id: w\nagents: {x: {instructions: y, tools: [z]}}\nsteps: [{id: a, task: x}]": "tools.0: Input",
        "id: [": "is not valid YAML",
    }.items():
        (project.work.parent / "flow.yaml").write_text(wrong)
        done = treenail("workflow", "run", "../flow.yaml", "--model", project.script(), cwd=project.work)
        assert done.returncode == 2, done.stdout
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_the_other_commands_know_a_workflow_when_they_see_one(project: Project) -> None:
    project.run(docs=[says("failed", "no")])
    store = ("--store", str(project.store))
    listed = treenail("list", *store, cwd=project.work).stdout
    assert "partial" in listed
    assert "The release" in listed
    shown = treenail("show", *store, cwd=project.work).stdout
    assert "checkpoint_decided" in shown
    found = json.loads(treenail("diagnose", *project.options, cwd=project.work).stdout)
    checks = {each["id"]: each["status"] for each in found["checks"]}
    assert checks["log"] == "passed", "every event can be read"
    assert (checks["workflow_events"], checks["workflow_checkpoints"]) == ("passed", "warning")
    resumed = treenail("resume", *store, cwd=project.work)
    assert resumed.returncode == 2
    assert "treenail workflow resume" in resumed.stderr
    no_workflow = treenail("workflow", "resume", "--ready", "nobody", *store, cwd=project.work)
    assert no_workflow.returncode == 2
    assert "has no step 'nobody'" in no_workflow.stderr

"""People at a terminal: the real command in a real pty, on real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, clean_environment, holdfast

from holdfast.providers.scripted import Answer
from holdfast.testing.wire import WireServer

FIX = [
    {"text": "I look first.\n", "calls": [{"name": "read_file", "arguments": {"path": "calc.py"}}]},
    {
        "text": "The sign is wrong.\n",
        "calls": [
            {"name": "edit_file", "arguments": {"path": "calc.py", "old_text": "a - b", "new_text": "a + b"}}
        ],
    },
    {"calls": [{"name": "run_command", "arguments": {"command": "python -B test_calc.py"}}]},
    "Done: add adds now, and its test passes.",
]


def python_first() -> dict[str, str]:
    """An environment in which `python` is the one that runs the tests."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with a failing test, and scripts beside it."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (root / "test_calc.py").write_text("from calc import add\n\nassert add(1, 2) == 3\nprint('fine')\n")
    return root


def script(project: Path, *answers: object) -> str:
    file = project.parent / f"script-{len(list(project.parent.iterdir()))}.json"
    file.write_text(json.dumps(answers))
    return f"scripted:{file}"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def listed(project: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(holdfast("list", "--json", cwd=project).stdout)
    return found


def test_a_failing_test_is_mended_and_the_exit_code_says_so(project: Path) -> None:
    """Task in, working code out; every step is in the log and can be looked at."""
    model = script(project, *FIX)
    with Terminal("run", "make the test pass", "--model", model, cwd=project, env=python_first()) as terminal:
        assert terminal.end() == 0, terminal.text
        shown = terminal.text
    assert "a + b" in (project / "calc.py").read_text()
    for piece in ("I look first.", "● edit_file", "✓", "Done: add adds now", "completed run"):
        assert piece in shown, shown
    assert "a + b" in holdfast("diff", cwd=project).stdout
    told = holdfast("show", cwd=project)
    assert "edit_file kept" in told.stdout
    assert listed(project)[0]["state"] == "completed"


def test_nothing_is_kept_in_the_project_itself(project: Path) -> None:
    before = {each.name for each in project.iterdir()}
    assert holdfast("run", "x", "--model", script(project, "hi"), cwd=project).returncode == 0
    assert {each.name for each in project.iterdir()} == before


def test_piped_output_is_the_answer_and_the_rest_goes_to_the_error_stream(project: Path) -> None:
    ran = holdfast("run", "make it pass", "--model", script(project, *FIX), cwd=project, env=python_first())
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "Done: add adds now, and its test passes."
    assert "edit_file" not in ran.stdout
    assert "edit_file" in ran.stderr
    assert "\x1b" not in ran.stdout + ran.stderr


def test_machines_get_one_json_object_a_line(project: Path) -> None:
    ran = holdfast("run", "go", "--json", "--model", script(project, *FIX), cwd=project, env=python_first())
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    names = [each["event"] for each in events]
    assert "text_delta" in names
    assert names.count("tool_call_finished") == 3
    assert events[-1]["event"] == "ended"
    assert (events[-1]["state"], events[-1]["exit_code"]) == ("completed", 0)


def test_output_that_nobody_reads_any_more_does_not_stop_the_run(project: Path) -> None:
    model = script(project, {**FIX[1], "text": "a long line\n" * 5000}, "done")
    command = f"{sys.executable} -m holdfast run go --model {model} | head -n 1"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=project,
        env=clean_environment(project),
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout == "a long line\n"
    assert "Traceback" not in ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    assert listed(project)[0]["state"] == "completed"


def test_ctrl_c_ends_the_turn_durably_and_resume_goes_on(project: Path) -> None:
    wait = call("run_command", command="touch begun; sleep 60; touch never")
    model = script(project, wait, "done")
    with Terminal("run", "wait", "--model", model, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
        assert "interrupted" in terminal.text
        assert "holdfast resume" in terminal.text
    assert not (project / "begun").exists(), "what the command had done was undone"
    assert listed(project)[0]["state"] == "interrupted"
    again = holdfast("resume", "@last", cwd=project)
    assert again.returncode == 0, again.stderr
    assert listed(project)[0]["state"] == "completed"


def test_a_killed_run_is_resumed_where_it_stopped(project: Path) -> None:
    """SIGKILL in the middle of a command; the edit before it is not made twice."""
    wait = call("run_command", command="touch begun; [ -e ../go ] || sleep 60")
    model = script(project, FIX[1], wait, "done")
    with Terminal("run", "go", "--model", model, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        terminal.kill()
    assert listed(project)[0]["state"] == "unfinished"
    (project.parent / "go").touch()
    again = holdfast("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    shown = holdfast("show", cwd=project).stdout
    assert shown.count("edit_file kept") == 1
    assert "run_command interrupted, rolled back" in shown
    assert "run_command kept" in shown


def test_a_person_is_asked_and_what_they_say_counts(project: Path) -> None:
    model = script(project, FIX[1], call("write_file", path="b.txt", content="x"), "done")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"edit_file[\s\S]*run it\?")
        terminal.type("y\n")
        terminal.wait_for(r"write_file[\s\S]*run it\?")
        terminal.type("n\n")
        assert terminal.end() == 0, terminal.text
    assert "a + b" in (project / "calc.py").read_text()
    assert not (project / "b.txt").exists()


def test_without_a_terminal_a_question_waits_and_can_be_answered_later(project: Path) -> None:
    ran = holdfast("run", "go", "--ask", "--model", script(project, FIX[1], "done"), cwd=project)
    assert ran.returncode == 4, ran.stderr
    assert "a - b" in (project / "calc.py").read_text()
    (hold,) = json.loads(holdfast("hold", "list", "--json", cwd=project).stdout)
    assert hold["tool"] == "edit_file"
    assert holdfast("hold", "answer", "@last", "--yes", cwd=project).returncode == 0
    again = holdfast("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert "a + b" in (project / "calc.py").read_text()


def test_read_only_refuses_every_change(project: Path) -> None:
    ran = holdfast("run", "go", "--read-only", "--model", script(project, FIX[1], "could not"), cwd=project)
    assert ran.returncode == 0
    assert "a - b" in (project / "calc.py").read_text()


def test_the_budget_stops_a_runaway_with_its_own_exit_code(project: Path) -> None:
    thought = {**call("list_directory"), "cost_usd": 0.4}
    ran = holdfast("run", "go", "--max-cost", "1.0", "--model", script(project, *[thought] * 9), cwd=project)
    assert ran.returncode == 6, ran.stderr
    assert "budget_exceeded" in ran.stderr
    steps = holdfast("run", "go", "--max-steps", "3", "--model", script(project, *[thought] * 9), cwd=project)
    assert steps.returncode == 6
    assert "step_limit_exceeded" in steps.stderr


def test_a_check_that_fails_sends_the_agent_back(project: Path) -> None:
    model = script(project, "Done already.", FIX[1], "Done now.")
    check = ("--check", "python -B test_calc.py")
    ran = holdfast("run", "go", *check, "--model", model, cwd=project, env=python_first())
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    assert "sent back" in holdfast("show", cwd=project).stdout


def test_a_check_that_never_passes_is_no_success(project: Path) -> None:
    ran = holdfast("run", "go", "--check", "false", "--model", script(project, *["Done."] * 9), cwd=project)
    assert ran.returncode == 3, ran.stderr
    assert "incomplete" in ran.stderr


def test_a_run_is_rolled_back_to_before_a_call(project: Path) -> None:
    write = call("write_file", path="new.txt", content="x")
    assert (
        holdfast("run", "go", "--model", script(project, FIX[1], write, "done"), cwd=project).returncode == 0
    )
    assert (project / "new.txt").exists()
    back = holdfast("rollback", "@last", "--call", "1", cwd=project)
    assert back.returncode == 0, back.stderr
    assert "a - b" in (project / "calc.py").read_text()
    assert not (project / "new.txt").exists()


def test_a_fork_goes_its_own_way_in_its_own_directory(project: Path) -> None:
    model = script(project, FIX[1], call("write_file", path="new.txt", content="x"), "done")
    assert holdfast("run", "go", "--model", model, cwd=project).returncode == 0
    forked = holdfast("fork", "../other", "--call", "2", "--json", cwd=project)
    assert forked.returncode == 0, forked.stderr
    other = project.parent / "other"
    assert "a + b" in (other / "calc.py").read_text()
    assert not (other / "new.txt").exists()
    run = json.loads(forked.stdout)["run"]
    again = holdfast("resume", run, "--model", model, cwd=project)
    assert again.returncode == 0, again.stderr
    assert (other / "new.txt").read_text() == "x"


def test_several_turns_of_one_chat_are_one_run(project: Path) -> None:
    model = script(project, "first answer", FIX[1], "second answer")
    with Terminal("chat", "--model", model, cwd=project) as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for(r"first answer[\s\S]*completed[\s\S]*> ")
        terminal.type("two\n")
        terminal.wait_for(r"second answer[\s\S]*completed[\s\S]*> ")
        terminal.type("\n")
        assert terminal.end() == 0, terminal.text
    (run,) = listed(project)
    assert run["task"] == "two"
    assert "a + b" in (project / "calc.py").read_text()


def test_no_model_is_a_clear_message_and_the_demo_is_offered(project: Path) -> None:
    ran = holdfast("run", "go", cwd=project)
    assert ran.returncode == 2
    assert "OPENAI_API_KEY" in ran.stderr
    assert "holdfast demo" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "go", "--max-cost", "-1"), "--max-cost"),
        (("run", "go", "--ask", "--read-only"), "one of"),
        (("run", "  "), "say what is to be done"),
        (("run", "go", "--agent", "none.toml"), "no agent file"),
        (("show", "zzz"), "there are no runs"),
        (("resume",), "there are no runs"),
        (("hold", "answer"), "--yes or --no"),
        (("run", "go", "-C", "nowhere"), "no directory"),
    ],
)
def test_bad_commands_are_refused_in_one_sentence(
    project: Path, arguments: tuple[str, ...], told: str
) -> None:
    ran = holdfast(*arguments, cwd=project, env={"OPENAI_API_KEY": "k"})
    assert ran.returncode == 2, ran.stderr
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr


def test_bad_configuration_names_file_and_setting(project: Path) -> None:
    (project / "holdfast.toml").write_text("max_costs = 3\n")
    ran = holdfast("run", "go", cwd=project)
    assert ran.returncode == 2
    assert "holdfast.toml" in ran.stderr
    assert "did you mean max_cost" in ran.stderr
    assert "max_costs" in holdfast("doctor", cwd=project).stdout


def test_a_directory_that_cannot_be_written_still_lets_an_agent_read(project: Path) -> None:
    """As root every directory can be written; then the run is only shown to work."""
    project.chmod(0o555)
    try:
        model = script(project, call("read_file", path="calc.py"), "read it")
        ran = holdfast("run", "go", "--read-only", "--model", model, cwd=project)
        assert ran.returncode == 0, ran.stderr
    finally:
        project.chmod(0o755)


def test_a_store_on_a_full_disk_is_an_error_and_nothing_is_half_done(project: Path) -> None:
    """/dev/full takes no byte: the run never begins, and says why."""
    ran = holdfast("run", "go", "--store", "/dev/full/runs.db", "--model", script(project, "hi"), cwd=project)
    assert ran.returncode == 2
    assert "/dev/full" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_workspace_of_ten_thousand_files_is_no_trouble(project: Path) -> None:
    for folder in range(100):
        (project / f"d{folder}").mkdir()
        for number in range(100):
            (project / f"d{folder}" / f"f{number}.txt").write_text("x")
    make = call("run_command", command="echo y > d7/f7.txt; rm d8/f8.txt")
    ran = holdfast("run", "go", "--model", script(project, make, "done"), cwd=project)
    assert ran.returncode == 0, ran.stderr
    diff = json.loads(holdfast("diff", "--json", cwd=project).stdout)
    assert sorted(each["path"] for each in diff["changes"]) == ["d7/f7.txt", "d8/f8.txt"]
    assert holdfast("rollback", cwd=project).returncode == 0
    assert (project / "d7/f7.txt").read_text() == "x"
    assert (project / "d8/f8.txt").exists()


def test_an_agent_of_ones_own_runs_with_all_of_it(project: Path) -> None:
    (project.parent / "mine.py").write_text(
        "from holdfast import Agent, tool\n\n\n"
        "@tool(effects='workspace')\ndef stamp(*, context) -> str:\n"
        "    '''Leave a stamp.'''\n    context.filesystem.write('stamp.txt', 'x')\n    return 'stamped'\n\n\n"
        "agent = Agent('stamper', tools=(stamp,))\n"
    )
    agent = str(project.parent / "mine.py") + ":agent"
    ran = holdfast(
        "run", "go", "--agent", agent, "--model", script(project, call("stamp"), "done"), cwd=project
    )
    assert ran.returncode == 0, ran.stderr
    assert (project / "stamp.txt").exists()
    assert listed(project)[0]["agent"] == "stamper"


def test_a_run_is_exported_pruned_and_erased(project: Path) -> None:
    assert (
        holdfast("run", "a secret task", "--model", script(project, FIX[1], "done"), cwd=project).returncode
        == 0
    )
    lines = [json.loads(line) for line in holdfast("export", cwd=project).stdout.splitlines()]
    assert lines[0]["format"] == "holdfast-export-1"
    assert [each["seq"] for each in lines[1:]] == list(range(1, len(lines)))
    assert "a secret task" in json.dumps(lines)
    pruned = holdfast("prune", "@last", "--keep-last", "3", "--json", cwd=project)
    assert json.loads(pruned.stdout)["forgotten_events"] > 3
    assert holdfast("erase", "@last", cwd=project).returncode == 2, "without a terminal it must be said twice"
    assert holdfast("erase", "@last", "--yes", cwd=project).returncode == 0
    assert listed(project) == []
    kept = b"".join(
        each.read_bytes() for each in (project.parent / "project-state").rglob("*") if each.is_file()
    )
    assert b"a secret task" not in kept


def test_replay_and_diagnose_say_what_the_log_says(project: Path) -> None:
    assert holdfast("run", "go", "--model", script(project, FIX[1], "done"), cwd=project).returncode == 0
    seen = json.loads(holdfast("replay", "--json", cwd=project).stdout)
    assert [each["role"] for each in seen["items"]] == ["system", "user", "assistant", "tool", "assistant"]
    report = holdfast("diagnose", "--json", cwd=project)
    assert report.returncode == 0, report.stdout
    assert json.loads(report.stdout)["status"] in ("ready", "ready_with_warnings")


def test_every_command_has_help_with_an_example(project: Path) -> None:
    said = holdfast("--help", cwd=project).stdout
    commands = [line.split()[0] for line in said.split("Commands:")[1].splitlines() if line.startswith("  ")]
    assert {"run", "resume", "chat", "list", "show", "diff", "rollback", "fork", "replay"} <= set(commands)
    for each in set(commands) - {"demo", "version", "hold", "config", "workflow", "Try"}:
        assert "Example: holdfast " + each in " ".join(
            holdfast(each, "--help", cwd=project).stdout.split()
        ), each


def test_sigterm_ends_the_turn_as_interrupted(project: Path) -> None:
    model = script(project, call("run_command", command="touch begun; sleep 60"), "done")
    with Terminal("run", "wait", "--model", model, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.end() != 0
    assert listed(project)[0]["state"] == "interrupted"
    assert not (project / "begun").exists()


@pytest.mark.parametrize("api", ["openai.responses", "openai.chat", "anthropic.messages"])
def test_the_same_task_is_solved_over_the_wire(project: Path, api: str) -> None:
    """The real SDK over a real socket; the model has no known price, which the person accepts."""
    answers = [
        each
        if isinstance(each, str)
        else Answer(
            str(each.get("text", "")),
            [(made["name"], made["arguments"]) for made in each["calls"]],  # type: ignore[index,attr-defined]
        )
        for each in FIX
    ]
    with WireServer(answers, by_conversation=True) as server:
        if api == "anthropic.messages":
            server_flags = ("--model", "anthropic/a-model", "--base-url", server.anthropic_url)
        else:
            name = api.partition(".")[2]
            server_flags = ("--model", "openai/a-model", "--base-url", server.openai_url, "--api", name)
        keys = {"OPENAI_API_KEY": "sk-secret", "ANTHROPIC_API_KEY": "sk-secret", **python_first()}
        ran = holdfast("run", "go", *server_flags, "--unknown-price", "warn", cwd=project, env=keys)
        assert [each.violations for each in server.requests if each.violations] == []
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    state = project.parent / "project-state"
    kept = b"".join(each.read_bytes() for each in state.rglob("*") if each.is_file())
    assert b"sk-secret" not in kept + ran.stdout.encode() + ran.stderr.encode()

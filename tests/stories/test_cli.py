"""People at a terminal: the real command in a real pty, on real files."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.stories.emulator import Emulated
from tests.stories.terminal import Terminal, clean_environment, treenail

from treenail import Agent, Limits
from treenail.history import opened_log, summarize
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli import stores
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.testing.wire import WireRequest, WireServer
from treenail.tools.files import read_file
from treenail.turns import ceilings_of

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
    (tmp_path / "outside").mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (root / "test_calc.py").write_text("from calc import add\n\nassert add(1, 2) == 3\nprint('fine')\n")
    return root


OUTSIDE = ("--allow-write", "../outside")
"""Lets commands tell where they are: what they do in the workspace is not seen before they have ended."""


def script(project: Path, *answers: object) -> str:
    file = project.parent / f"script-{len(list(project.parent.iterdir()))}.json"
    file.write_text(json.dumps(answers))
    return f"scripted:{file}"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def listed(project: Path) -> list[dict[str, object]]:
    """What `treenail list --json` would print, read in this process: it is asked for often."""
    store = stores.store_for(project, None, clean_environment(project))
    with opened_log(store) as log:
        return [summarize(log, each).to_data() for each in log.sessions() if each.parent_id is None]


def test_a_failing_test_is_mended_and_the_exit_code_says_so(project: Path) -> None:
    """Task in, working code out; every step is in the log and can be looked at."""
    model = script(project, *FIX)
    with Terminal("run", "make the test pass", "--model", model, cwd=project, env=python_first()) as terminal:
        assert terminal.end() == 0, terminal.text
        shown = terminal.text
    assert "a + b" in (project / "calc.py").read_text()
    for piece in ("I look first.", "● edit_file", "✓", "Done: add adds now", "✓ 1 file +1 \u22121 · 3 calls"):
        assert piece in shown, shown
    assert "a + b" in treenail("diff", cwd=project).stdout
    told = treenail("show", cwd=project)
    assert "edit_file kept" in told.stdout
    assert json.loads(treenail("list", "--json", cwd=project).stdout) == listed(project)
    assert listed(project)[0]["state"] == "completed"


def test_nothing_is_kept_in_the_project_itself(project: Path) -> None:
    before = {each.name for each in project.iterdir()}
    assert treenail("run", "x", "--model", script(project, "hi"), cwd=project).returncode == 0
    assert {each.name for each in project.iterdir()} == before


def test_piped_output_is_the_answer_and_the_rest_goes_to_the_error_stream(project: Path) -> None:
    ran = treenail("run", "make it pass", "--model", script(project, *FIX), cwd=project, env=python_first())
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "Done: add adds now, and its test passes."
    assert "edit_file" not in ran.stdout
    assert "edit_file" in ran.stderr
    assert "\x1b" not in ran.stdout + ran.stderr


def test_machines_get_one_json_object_a_line(project: Path) -> None:
    ran = treenail("run", "go", "--json", "--model", script(project, *FIX), cwd=project, env=python_first())
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    names = [each["event"] for each in events]
    assert "text_delta" in names
    assert names.count("tool_call_finished") == 3
    assert events[-1]["event"] == "ended"
    assert (events[-1]["state"], events[-1]["exit_code"]) == ("completed", 0)


def test_output_that_nobody_reads_any_more_does_not_stop_the_run(project: Path) -> None:
    model = script(project, {**FIX[1], "text": "a long line\n" * 5000}, "done")
    command = f"{sys.executable} -m treenail run go --model {model} | head -n 1"
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
    wait = call("run_command", command="touch made ../outside/begun; sleep 600; touch never")
    model = script(project, wait, "done")
    with Terminal("run", "wait", "--model", model, *OUTSIDE, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project.parent / "outside" / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        terminal.type("\x03")
        assert terminal.end() == 130, terminal.text
        assert "interrupted" in terminal.text
        assert "treenail resume" in terminal.text
    assert not (project / "made").exists(), "what the command had done was undone"
    assert listed(project)[0]["state"] == "interrupted"
    again = treenail("resume", "@last", cwd=project)
    assert again.returncode == 0, again.stderr
    assert listed(project)[0]["state"] == "completed"


def test_a_killed_run_is_resumed_where_it_stopped(project: Path) -> None:
    """SIGKILL in the middle of a command; the edit before it is not made twice."""
    wait = call("run_command", command="touch made ../outside/begun; [ -e ../outside/go ] || sleep 600")
    model = script(project, FIX[1], wait, "done")
    with Terminal("run", "go", "--model", model, *OUTSIDE, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project.parent / "outside" / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        terminal.kill()
    assert listed(project)[0]["state"] == "unfinished"
    (project.parent / "outside" / "go").touch()
    again = treenail("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    shown = treenail("show", cwd=project).stdout
    assert shown.count("edit_file kept") == 1
    assert "run_command interrupted, rolled back" in shown
    assert "run_command kept" in shown


def test_a_person_is_asked_and_what_they_say_counts(project: Path) -> None:
    model = script(project, FIX[1], call("write_file", path="b.txt", content="x"), "done")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"edit_file[\s\S]*\[y\]es")
        terminal.type("y\n")
        terminal.wait_for(r"write_file[\s\S]*\[y\]es")
        terminal.type("n\n")
        assert terminal.end() == 0, terminal.text
    assert "a + b" in (project / "calc.py").read_text()
    assert not (project / "b.txt").exists()


def test_without_a_terminal_a_question_waits_and_can_be_answered_later(project: Path) -> None:
    ran = treenail("run", "go", "--ask", "--model", script(project, FIX[1], "done"), cwd=project)
    assert ran.returncode == 4, ran.stderr
    assert "a - b" in (project / "calc.py").read_text()
    (hold,) = json.loads(treenail("hold", "list", "--json", cwd=project).stdout)
    assert hold["tool"] == "edit_file"
    assert treenail("hold", "answer", "@last", "--yes", cwd=project).returncode == 0
    again = treenail("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert "a + b" in (project / "calc.py").read_text()


def test_read_only_refuses_every_change(project: Path) -> None:
    ran = treenail("run", "go", "--read-only", "--model", script(project, FIX[1], "could not"), cwd=project)
    assert ran.returncode == 0
    assert "a - b" in (project / "calc.py").read_text()


def test_the_budget_stops_a_runaway_with_its_own_exit_code(project: Path) -> None:
    thought = {**call("list_directory"), "cost_usd": 0.4}
    ran = treenail("run", "go", "--max-cost", "1.0", "--model", script(project, *[thought] * 9), cwd=project)
    assert ran.returncode == 6, ran.stderr
    assert "budget_exceeded" in ran.stderr
    steps = treenail("run", "go", "--max-steps", "3", "--model", script(project, *[thought] * 9), cwd=project)
    assert steps.returncode == 6
    assert "step_limit_exceeded" in steps.stderr


def test_a_check_that_fails_sends_the_agent_back(project: Path) -> None:
    model = script(project, "Done already.", FIX[1], "Done now.")
    check = ("--check", "python -B test_calc.py")
    ran = treenail("run", "go", *check, "--model", model, cwd=project, env=python_first())
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    assert "sent back" in treenail("show", cwd=project).stdout


def test_a_check_that_never_passes_is_no_success(project: Path) -> None:
    ran = treenail("run", "go", "--check", "false", "--model", script(project, *["Done."] * 9), cwd=project)
    assert ran.returncode == 3, ran.stderr
    assert "incomplete" in ran.stderr


def test_a_run_is_rolled_back_to_before_a_call(project: Path) -> None:
    write = call("write_file", path="new.txt", content="x")
    assert (
        treenail("run", "go", "--model", script(project, FIX[1], write, "done"), cwd=project).returncode == 0
    )
    assert (project / "new.txt").exists()
    back = treenail("rollback", "@last", "--call", "1", cwd=project)
    assert back.returncode == 0, back.stderr
    assert "a - b" in (project / "calc.py").read_text()
    assert not (project / "new.txt").exists()


def test_a_fork_goes_its_own_way_in_its_own_directory(project: Path) -> None:
    model = script(project, FIX[1], call("write_file", path="new.txt", content="x"), "done")
    assert treenail("run", "go", "--model", model, cwd=project).returncode == 0
    forked = treenail("fork", "../other", "--call", "2", "--json", cwd=project)
    assert forked.returncode == 0, forked.stderr
    other = project.parent / "other"
    assert "a + b" in (other / "calc.py").read_text()
    assert not (other / "new.txt").exists()
    run = json.loads(forked.stdout)["run"]
    again = treenail("resume", run, "--model", model, cwd=project)
    assert again.returncode == 0, again.stderr
    assert (other / "new.txt").read_text() == "x"


def test_several_turns_of_one_chat_are_one_run(project: Path) -> None:
    model = script(project, "first answer", FIX[1], "second answer")
    with Emulated("chat", "--model", model, cwd=project) as terminal:
        terminal.see_line()
        terminal.send("one")
        terminal.see("first answer")
        terminal.see_line()
        terminal.send("two")
        terminal.see("second answer")
        terminal.see_line()
        terminal.type("\x04")
        assert terminal.end() == 0, terminal.text
    (run,) = listed(project)
    assert run["task"] == "two"
    assert "a + b" in (project / "calc.py").read_text()


def test_no_model_is_a_clear_message_and_the_demo_is_offered(project: Path) -> None:
    ran = treenail("run", "go", cwd=project)
    assert ran.returncode == 2
    assert "OPENAI_API_KEY" in ran.stderr
    assert "treenail demo" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_bad_configuration_names_file_and_setting(project: Path) -> None:
    (project / "treenail.toml").write_text("max_costs = 3\n")
    ran = treenail("run", "go", cwd=project)
    assert ran.returncode == 2
    assert "treenail.toml" in ran.stderr
    assert "did you mean max_cost" in ran.stderr
    assert "max_costs" in treenail("doctor", cwd=project).stdout


def unprivileged() -> list[str]:
    """What stands before a command that is to be refused what its user may not do, even root."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


def test_a_directory_that_cannot_be_written_can_still_be_read(project: Path) -> None:
    """The refused write is told to the model, and the run goes on; doctor says it beforehand."""
    calls = [call("read_file", path="calc.py"), call("write_file", path="new.txt", content="x")]
    model = script(project, *calls, "I could only read.")
    project.chmod(0o555)
    try:
        python = [*unprivileged(), sys.executable, "-m", "treenail"]
        ran = quietly([*python, "run", "go", "--model", model], project)
        looked = quietly([*python, "doctor"], project)
    finally:
        project.chmod(0o755)
    assert ran.returncode == 0, ran.stderr
    assert "new.txt: Permission denied. Nothing was changed." in ran.stderr
    assert "cannot be written" in looked.stdout


def test_a_store_that_cannot_be_written_can_still_be_looked_at(project: Path) -> None:
    model = script(project, "hi")
    assert treenail("run", "go", "--store", "../kept/runs.db", "--model", model, cwd=project).returncode == 0
    kept = project.parent / "kept"
    kept.chmod(0o555)
    (kept / "runs.db").chmod(0o444)
    try:
        python = [*unprivileged(), sys.executable, "-m", "treenail"]
        shown = quietly([*python, "show", "--store", "../kept/runs.db"], project)
        refused = quietly([*python, "run", "go", "--store", "../kept/runs.db", "--model", "x"], project)
    finally:
        kept.chmod(0o755)
    assert shown.returncode == 0, shown.stderr
    assert "completed" in shown.stdout
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "--store" in refused.stderr


def quietly(
    command: list[str], cwd: Path, preexec: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(cwd),
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=preexec,  # no thread holds a lock here
    )


def test_a_disk_that_is_full_in_the_middle_costs_nothing_but_time(project: Path) -> None:
    """The log cannot take a large answer; nothing is half done, and with room again the run goes on."""
    model = script(project, FIX[1], call("write_file", path="big.txt", content="x" * 2_000_000), "done")

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    command = [sys.executable, "-m", "treenail", "run", "go", "--model", model]
    ran = quietly(command, project, little_room)
    assert ran.returncode == 1
    assert "check the disk and its free space" in ran.stderr
    assert "treenail resume" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (project / "big.txt").exists()
    again = treenail("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert (project / "big.txt").stat().st_size == 2_000_000
    assert treenail("show", cwd=project).stdout.count("edit_file kept") == 1


def test_what_is_whole_in_a_damaged_store_is_told_and_saved(project: Path) -> None:
    model = script(project, FIX[1], "done")
    assert treenail("run", "go", "--store", "../runs.db", "--model", model, cwd=project).returncode == 0
    store = project.parent / "runs.db"
    data = bytearray(store.read_bytes())
    # The index of the events, and the leases.
    data[4096 * 4 : 4096 * 6] = b"\xde" * (4096 * 2)
    store.write_bytes(data)
    listed = treenail("list", "--store", "../runs.db", cwd=project)
    assert listed.returncode == 1
    assert "treenail salvage" in listed.stderr
    assert len(listed.stderr.splitlines()) == 1
    found = treenail("diagnose", "--store", "../runs.db", cwd=project)
    assert found.returncode == 1
    assert "the store is damaged" in found.stdout
    saved = treenail("salvage", "../whole.db", "--store", "../runs.db", "--json", cwd=project)
    assert saved.returncode == 0, saved.stderr
    assert len(json.loads(saved.stdout)["sessions"]) == 1
    assert "edit_file" in treenail("show", "--store", "../whole.db", cwd=project).stdout
    assert store.read_bytes() == bytes(data), "the damaged file is as it was"


def test_a_run_that_somebody_writes_is_not_disturbed(project: Path) -> None:
    model = script(project, call("run_command", command="touch made ../outside/begun; sleep 600"), "done")
    with Terminal("run", "wait", "--model", model, *OUTSIDE, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project.parent / "outside" / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        assert listed(project)[0]["state"] == "running"
        for each in (("resume", "@last"), ("rollback",), ("erase", "@last", "--yes")):
            ran = treenail(*each, cwd=project)
            assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
            assert f"process {terminal.process.pid} (`" in ran.stderr
            assert re.search(
                r"-m treenail run wait .*running since 20.* UTC\) is writing this run", ran.stderr
            )
        terminal.type("\x03")
        assert terminal.end() == 130


def test_ctrl_c_twice_leaves_at_once(project: Path) -> None:
    """A command that takes no hint does not keep anybody waiting; the log is whole afterwards."""
    stubborn = "trap '' INT TERM; touch made ../outside/begun; while :; do read -t 5 x < /dev/zero; done"
    with Terminal(
        "run", "go", "--model", script(project, call("run_command", command=stubborn)), *OUTSIDE, cwd=project
    ) as terminal:
        terminal.wait_for("● run_command")
        while not (project.parent / "outside" / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        terminal.type("\x03")
        terminal.type("\x03")
        assert terminal.end() != 0
        assert "Traceback" not in terminal.text
    assert listed(project)[0]["state"] in ("interrupted", "unfinished")
    assert treenail("rollback", cwd=project).returncode in (0, 2)
    assert not (project / "made").exists()


def test_the_line_below_shows_that_the_run_is_alive(project: Path) -> None:
    """While one tool works, its name stands there and the seconds go on."""
    wait = call("run_command", command="until [ -e ../outside/go ]; do read -t 0.05 x < /dev/zero; done")
    told = ("run", "go", "--model", script(project, wait, "done"), *OUTSIDE)
    with Terminal(*told, cwd=project) as terminal:
        line = r"run_command[\s\S]* · step 1 of 200 · (?!{} s)(\d+) s · Ctrl-C stops"
        first = re.search(line.format("no"), terminal.wait_for(line.format("no")))
        assert first is not None
        then = re.search(line.format(first[1]), terminal.wait_for(line.format(first[1])))
        assert then is not None
        assert int(then[1]) > int(first[1])
        (project.parent / "outside" / "go").touch()
        assert terminal.end() == 0, terminal.text


def test_a_resumed_run_keeps_its_ceilings_until_others_are_given(project: Path) -> None:
    model = script(project, FIX[0], FIX[1], "done")
    assert treenail("run", "go", "--max-steps", "2", "--model", model, cwd=project).returncode == 6
    again = treenail("resume", cwd=project)
    assert again.returncode == 6, again.stderr
    assert "--max-steps <more>" in again.stderr
    assert treenail("resume", "--max-steps", "20", cwd=project).returncode == 0
    assert "a + b" in (project / "calc.py").read_text()


def test_a_ceiling_that_was_raised_stays_raised(project: Path) -> None:
    """The next resume need not be told again; who raised it is shown."""
    model = script(project, FIX[0], FIX[1], "done")
    assert treenail("run", "go", "--max-steps", "2", "--model", model, cwd=project).returncode == 6
    assert treenail("resume", "--max-steps", "20", "--ask", cwd=project).returncode == 4
    assert treenail("hold", "answer", "--yes", cwd=project).returncode == 0
    again = treenail("resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert "a + b" in (project / "calc.py").read_text()
    shown = [line for line in treenail("show", cwd=project).stdout.splitlines() if "ceilings: " in line]
    assert ["2 steps" in shown[0], "20 steps" in shown[1], len(shown)] == [True, True, 2]
    assert all("set by" in each for each in shown)


def test_ceilings_that_a_program_has_set_hold_on_the_command_line_too(project: Path) -> None:
    """Also those that no option can say."""
    limits = Limits(max_steps=1, max_depth=0, on_unknown_price="estimate")
    with Agent("begun", tools=(read_file,)).run(
        "go",
        provider=ScriptedProvider([Answer("", [("read_file", {"path": "calc.py"})], cost_usd=0.01)]),
        store=project / "runs.db",
        workspace=project,
        limits=limits,
    ) as run:
        assert run.result.error_kind == "step_limit_exceeded"
    (project.parent / "begun.toml").write_text('name = "begun"\ninstructions = "Go on."\ntools = ["files"]\n')
    model = script(project, "unheard", "done")
    told = ("--agent", "../begun.toml", "--model", model, "--store", "runs.db", "--max-steps", "9")
    ran = treenail("resume", *told, cwd=project)
    assert ran.returncode == 0, ran.stderr
    with SqliteLog(project / "runs.db") as log:
        now = ceilings_of(Session.open(log, run.id, read_only=True))
    assert now is not None
    assert (now.max_steps, now.max_depth, now.on_unknown_price) == (9, 0, "estimate")


def test_an_agent_file_brings_its_limits_and_its_judges(project: Path) -> None:
    (project.parent / "fixer.toml").write_text(
        'name = "fixer"\ninstructions = "You mend."\ntools = ["files"]\n'
        '[limits]\nmax_steps = 4\n[judges]\ncheck = "grep -q a.+.b calc.py"\n'
    )
    model = script(project, "Done already.", FIX[1], "Done now.", "Done now.")
    ran = treenail("run", "go", "--agent", "../fixer.toml", "--model", model, cwd=project)
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    endless = script(project, *[FIX[0]] * 9)
    assert treenail("run", "go", "--agent", "../fixer.toml", "--model", endless, cwd=project).returncode == 6


def test_a_resume_with_another_agent_is_refused_and_harms_nothing(project: Path) -> None:
    file = project.parent / "one.toml"
    file.write_text('name = "one"\ninstructions = "x"\n')
    model = script(project, FIX[1], "done")
    stopped = treenail(
        "run", "go", "--agent", "../one.toml", "--max-steps", "1", "--model", model, cwd=project
    )
    assert stopped.returncode == 6
    file.write_text('name = "two"\ninstructions = "y"\n')
    refused = treenail("resume", "--max-steps", "9", cwd=project)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr
    file.write_text('name = "one"\ninstructions = "x, said better"\n')
    assert treenail("resume", "--max-steps", "9", cwd=project).returncode == 0
    assert "a + b" in (project / "calc.py").read_text()


def test_a_model_judges_the_work_before_it_may_end(project: Path) -> None:
    """The judge is asked over the same wire; it sends the agent back once, and `show` has its session."""

    def answer(request: WireRequest) -> Answer:
        text = json.dumps(request.body)
        if not request.body.get("tools"):  # A judge has none.
            done = "edit_file" in text
            return Answer(json.dumps({"complete": done, "explanation": "It adds." if done else "Mend it."}))
        if "Mend it." not in text:
            return Answer("I think that it is fine.")
        if "+++ b/calc.py" not in text:
            return Answer("", [("edit_file", {"path": "calc.py", "old_text": "a - b", "new_text": "a + b"})])
        return Answer("Mended.")

    with WireServer(answer) as server:
        flags = ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn", "--judge")
        ran = treenail("run", "go", *flags, cwd=project, env={"OPENAI_API_KEY": "k"})
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    told = json.loads(treenail("show", "--json", cwd=project).stdout)
    verdicts = [each["is_good"] for each in told["turns"][0]["items"] if each["kind"] == "check"]
    assert verdicts == [False, True]
    assert [each["agent"] for each in told["children"]] == ["judge completion"] * 2


def test_a_judge_that_cannot_judge_is_no_success(project: Path) -> None:
    ran = treenail("run", "go", "--judge", "--model", script(project, *["Fine."] * 9), cwd=project)
    assert ran.returncode not in (0, 2), ran.stderr
    assert listed(project)[0]["state"] != "completed"


def test_a_chat_reads_lines_and_writes_json_for_machines(project: Path) -> None:
    model = script(project, "one", "two")
    ran = treenail("chat", "--json", "--model", model, cwd=project, stdin="first\nsecond\n")
    ended = [each for each in map(json.loads, ran.stdout.splitlines()) if each["event"] == "ended"]
    assert [each["text"] for each in ended] == ["one", "two"]
    assert len({each["run"] for each in ended}) == 1


def test_what_is_offered_can_be_pasted_where_one_is(project: Path) -> None:
    """A run in another directory has its store elsewhere; the commands name it."""
    other = project.parent
    ran = treenail("run", "go", "-C", str(project), "--model", script(project, FIX[1], "done"), cwd=other)
    offered = ran.stderr.partition("undo: treenail ")[2].split()
    assert offered[:2] == ["undo", "--store"], ran.stderr
    undone = treenail(*offered, "--yes", cwd=other)
    assert undone.returncode == 0, undone.stderr
    assert "a - b" in (project / "calc.py").read_text()


def test_a_shell_completes_commands_and_runs(project: Path) -> None:
    assert treenail("run", "go", "--model", script(project, "hi"), cwd=project).returncode == 0
    short = str(listed(project)[0]["id"])[:8]

    def completed(typed: str) -> list[str]:
        env = {"_TREENAIL_COMPLETE": "bash_complete", "COMP_WORDS": typed}
        env["COMP_CWORD"] = str(len(typed.split(" ")) - 1)
        command = [str(Path(sys.executable).with_name("treenail"))]
        said = subprocess.run(
            command,
            cwd=project,
            env={**clean_environment(project), **env},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return [line.removeprefix("plain,") for line in said.stdout.split()]

    assert completed("treenail res") == ["resume"]
    assert completed("treenail show ") == ["@last", short]


def test_help_is_quick_because_it_loads_nothing_that_runs(project: Path) -> None:
    code = (
        "import sys\nsys.argv = ['treenail', '--help']\nfrom treenail.presenters.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print(sorted(sys.modules))\n"
    )
    ran = quietly([sys.executable, "-c", code], project)
    assert "Commands:" in ran.stdout
    for heavy in ("pydantic", "anyio", "rich.console", "sqlite3", "treenail.agent", "asyncio"):
        assert f"'{heavy}'" not in ran.stdout, heavy


def test_a_store_on_a_full_disk_is_an_error_and_nothing_is_half_done(project: Path) -> None:
    """/dev/full takes no byte: the run never begins, and says why."""
    ran = treenail("run", "go", "--store", "/dev/full/runs.db", "--model", script(project, "hi"), cwd=project)
    assert ran.returncode == 2
    assert "/dev/full" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_workspace_of_ten_thousand_files_is_no_trouble(project: Path) -> None:
    for folder in range(100):
        (project / f"d{folder}").mkdir()
        for number in range(100):
            (project / f"d{folder}" / f"f{number}.txt").write_text("x")
    make = call("run_command", command="echo y > d7/f7.txt; rm d8/f8.txt")
    ran = treenail("run", "go", "--model", script(project, make, "done"), cwd=project)
    assert ran.returncode == 0, ran.stderr
    diff = json.loads(treenail("diff", "--json", cwd=project).stdout)
    assert sorted(each["path"] for each in diff["changes"]) == ["d7/f7.txt", "d8/f8.txt"]
    assert treenail("rollback", cwd=project).returncode == 0
    assert (project / "d7/f7.txt").read_text() == "x"
    assert (project / "d8/f8.txt").exists()


def test_an_agent_of_ones_own_runs_with_all_of_it(project: Path) -> None:
    (project.parent / "mine.py").write_text(
        "from treenail import Agent, tool\n\n\n"
        "@tool(effects='workspace')\ndef stamp(*, context) -> str:\n"
        "    '''Leave a stamp.'''\n    context.filesystem.write('stamp.txt', 'x')\n    return 'stamped'\n\n\n"
        "agent = Agent('stamper', tools=(stamp,))\n"
    )
    agent = str(project.parent / "mine.py") + ":agent"
    ran = treenail(
        "run", "go", "--agent", agent, "--model", script(project, call("stamp"), "done"), cwd=project
    )
    assert ran.returncode == 0, ran.stderr
    assert (project / "stamp.txt").exists()
    assert listed(project)[0]["agent"] == "stamper"


def test_a_run_is_exported_pruned_and_erased(project: Path) -> None:
    assert (
        treenail("run", "a secret task", "--model", script(project, FIX[1], "done"), cwd=project).returncode
        == 0
    )
    lines = [json.loads(line) for line in treenail("export", cwd=project).stdout.splitlines()]
    assert lines[0]["format"] == "treenail-export-1"
    assert [each["seq"] for each in lines[1:]] == list(range(1, len(lines)))
    assert "a secret task" in json.dumps(lines)
    pruned = treenail("prune", "@last", "--keep-last", "3", "--json", cwd=project)
    assert json.loads(pruned.stdout)["forgotten_events"] > 3
    assert treenail("erase", "@last", cwd=project).returncode == 2, "without a terminal it must be said twice"
    assert treenail("erase", "@last", "--yes", cwd=project).returncode == 0
    assert listed(project) == []
    kept = b"".join(
        each.read_bytes() for each in (project.parent / "project-state").rglob("*") if each.is_file()
    )
    assert b"a secret task" not in kept


def test_replay_and_diagnose_say_what_the_log_says(project: Path) -> None:
    assert treenail("run", "go", "--model", script(project, FIX[1], "done"), cwd=project).returncode == 0
    seen = json.loads(treenail("replay", "--json", cwd=project).stdout)
    assert [each["role"] for each in seen["items"]] == ["system", "user", "assistant", "tool", "assistant"]
    report = treenail("diagnose", "--json", cwd=project)
    assert report.returncode == 0, report.stdout
    assert json.loads(report.stdout)["status"] in ("ready", "ready_with_warnings")


def test_sigterm_ends_the_turn_as_interrupted(project: Path) -> None:
    model = script(project, call("run_command", command="touch made ../outside/begun; sleep 600"), "done")
    with Terminal("run", "wait", "--model", model, *OUTSIDE, cwd=project) as terminal:
        terminal.wait_for("● run_command")
        while not (project.parent / "outside" / "begun").exists():
            terminal.wait_for("s · Ctrl-C")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.end() != 0
    assert listed(project)[0]["state"] == "interrupted"
    assert not (project / "made").exists()


@pytest.mark.parametrize("api", ["openai.responses", "openai.chat", "anthropic.messages"])
def test_the_same_task_is_solved_over_the_wire(project: Path, api: str) -> None:
    """The real SDK over a real socket; the model has no known price, which the person accepts."""
    answers = [
        each
        if isinstance(each, str)
        else Answer(
            str(each.get("text", "")),
            [(made["name"], made["arguments"]) for made in each["calls"]],  # type: ignore[index,attr-defined]  # those that are no text have calls
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
        ran = treenail("run", "go", *server_flags, "--unknown-price", "warn", cwd=project, env=keys)
        assert [each.violations for each in server.requests if each.violations] == []
    assert ran.returncode == 0, ran.stderr
    assert "a + b" in (project / "calc.py").read_text()
    state = project.parent / "project-state"
    kept = b"".join(each.read_bytes() for each in state.rglob("*") if each.is_file())
    assert b"sk-secret" not in kept + ran.stdout.encode() + ran.stderr.encode()

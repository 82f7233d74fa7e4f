"""The screen in a real terminal: questions before effects, foreign text, narrow and odd terminals."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pyte
import pytest
from tests.stories.terminal import Terminal, clean_environment, treenail

from treenail.history import find_run, opened_run
from treenail.presenters.cli import stores
from treenail.tools import HoldAnswered, ToolInvoked

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x1b[8mhidden\rover"


def script(project: Path, *answers: object) -> str:
    file = project.parent / f"script-{len(list(project.parent.iterdir()))}.json"
    file.write_text(json.dumps(answers))
    return f"scripted:{file}"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"calls": [{"name": name, "arguments": arguments}]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return root


def shown(terminal: Terminal, columns: int, rows: int = 40) -> list[str]:
    """What stands on the screen at the end, after every cursor movement."""
    screen = pyte.HistoryScreen(columns, rows, history=5_000)
    pyte.Stream(screen).feed(terminal.written)
    above = ["".join(line[x].data for x in range(columns)).rstrip() for line in screen.history.top]
    return [line for line in (*above, *(each.rstrip() for each in screen.display)) if line]


def events(project: Path, kind: type) -> list[object]:
    store = stores.store_for(project, None, clean_environment(project))
    with opened_run(store, find_run(store, "@last")) as session:
        return list(session[kind].all())


def test_all_of_a_command_is_seen_before_a_yes_is_taken(project: Path) -> None:
    """A command longer than the screen is paged to its end; keys typed before the question answer nothing."""
    lines = [f"echo part {number}" for number in range(60)]
    command = "\n".join(["touch made", *lines, "echo the end; touch evil"])
    model = script(project, call("run_command", command=command), "done")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.type("yyyy")
        terminal.wait_for(r"more lines: space shows more")
        assert "touch evil" not in terminal.text
        terminal.type("y")
        terminal.wait_for(r"touch evil[\s\S]*\[y\]es")
        assert not (project / "made").exists()
        terminal.type("y")
        assert terminal.end() == 0, terminal.text
    assert all(f"echo part {number}\n" in terminal.text for number in range(60))
    assert (project / "evil").exists()


def test_an_edit_is_shown_as_a_diff_and_a_no_can_have_a_reason(project: Path) -> None:
    edit = call("edit_file", path="calc.py", old_text="a - b", new_text="a + b")
    model = script(project, edit, "I leave it.")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        seen = terminal.wait_for(r"\[y\]es  \[n\]o, say why  \[d\]iff  \[e\]dit  \[a\]lways: edit_file: ")
        assert re.search(r"edit_file calc\.py \+1 −1[\s\S]*-    return a - b\s+\+    return a \+ b", seen)  # noqa: RUF001
        terminal.type("n")
        terminal.wait_for("why")
        terminal.type("not in this file\r")
        assert terminal.end() == 0, terminal.text
    assert "a - b" in (project / "calc.py").read_text()
    (ended,) = events(project, ToolInvoked)
    assert isinstance(ended, ToolInvoked)
    assert (ended.outcome, "not in this file" in ended.result.message) == ("denied", True)


def test_a_person_changes_a_command_and_the_log_and_the_model_know(project: Path) -> None:
    """`e` opens the editor; what comes out is asked about again, runs, is recorded, and the model is told."""
    editor = project.parent / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/wrong/right/ "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    model = script(project, call("run_command", command="touch wrong"), "done")
    env = {"EDITOR": str(editor)}
    with Terminal("run", "go", "--ask", "--model", model, cwd=project, env=env) as terminal:
        terminal.wait_for(r"\$ touch wrong[\s\S]*\[e\]dit")
        terminal.type("e")
        terminal.wait_for(r"with your changes[\s\S]*\$ touch right[\s\S]*\[e\]dit")
        terminal.type("y")
        assert terminal.end() == 0, terminal.text
    assert (project / "right").exists()
    assert not (project / "wrong").exists()
    (answer,) = events(project, HoldAnswered)
    assert isinstance(answer, HoldAnswered)
    assert json.loads(answer.arguments or "")["command"] == "touch right"
    (ended,) = events(project, ToolInvoked)
    assert isinstance(ended, ToolInvoked)
    assert ended.params["command"] == "touch right"
    assert ended.result.message.startswith("A person changed the arguments")


def test_a_changed_command_survives_a_kill_and_nobody_is_asked_again(project: Path) -> None:
    """The changed arguments are in the log before the command runs: a resume without a person runs these."""
    outside = project.parent / "outside"
    outside.mkdir()
    editor = project.parent / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/wrong/right/ "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    wait = "touch ../outside/begun wrong; until [ -e ../outside/go ]; do read -t 0.05 x < /dev/zero; done"
    model = script(project, call("run_command", command=wait), "done")
    flags = ("--ask", "--allow-write", "../outside", "--model", model)
    with Terminal("run", "go", *flags, cwd=project, env={"EDITOR": str(editor)}) as terminal:
        terminal.wait_for(r"wrong[\s\S]*\[e\]dit")
        terminal.type("e")
        terminal.wait_for(r"with your changes[\s\S]*right[\s\S]*\[e\]dit")
        terminal.type("y")
        while not (outside / "begun").exists():
            terminal.wait_for(r"step 1 of 200 · \d+ s")
        terminal.kill()
    (outside / "go").touch()
    again = treenail("resume", "@last", cwd=project)
    assert again.returncode == 0, again.stderr
    assert (project / "right").exists()
    assert not (project / "wrong").exists()


def test_always_allows_such_calls_from_then_on(project: Path) -> None:
    """The rule is shown before, and Enter confirms it: another key takes it back."""
    one = {"name": "edit_file", "arguments": {"path": "calc.py", "old_text": "a - b", "new_text": "a + b"}}
    two = {"name": "edit_file", "arguments": {"path": "calc.py", "old_text": "a + b", "new_text": "b + a"}}
    model = script(project, {"calls": [one]}, {"calls": [two]}, "done")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"\[a\]lways: edit_file: calc\.py")
        terminal.type("a")
        terminal.wait_for(r"always edit_file: calc\.py\? Enter confirms")
        terminal.type("x")
        terminal.wait_for(r"confirms[\s\S]*\[a\]lways")
        assert "a - b" in (project / "calc.py").read_text()
        terminal.type("a")
        terminal.wait_for(r"confirms[\s\S]*confirms")
        terminal.type("\r")
        assert terminal.end() == 0, terminal.text
    assert terminal.text.count("say why") == 2
    assert "b + a" in (project / "calc.py").read_text()
    assert list(project.iterdir()) == [project / "calc.py"], "the rule is not in the project"


def test_always_is_offered_where_the_rule_can_be_kept_and_a_rule_that_is_not_kept_costs_no_call(
    project: Path,
) -> None:
    model = script(project, call("write_file", path="b.txt", content="x"), "done")
    inside = {"XDG_CONFIG_HOME": str(project / "config")}
    with Terminal("run", "go", "--ask", "--model", model, cwd=project, env=inside) as terminal:
        terminal.wait_for(r"\[e\]dit")
        terminal.type("a")
        terminal.wait_for(r"\[e\]dit[\s\S]*\[e\]dit")
        terminal.type("n")
        terminal.wait_for("why")
        terminal.type("\r")
        assert terminal.end() == 0, terminal.text
    assert "lways" not in terminal.text
    assert not (project / "b.txt").exists()
    (project.parent / "file").touch()  # No directory can be made below it.
    broken = {"XDG_CONFIG_HOME": str(project.parent / "file")}
    with Terminal("run", "go", "--ask", "--model", model, cwd=project, env=broken) as terminal:
        terminal.wait_for(r"\[a\]lways")
        terminal.type("a")
        terminal.wait_for("Enter confirms")
        terminal.type("\r")
        assert terminal.end() == 0, terminal.text
    assert "the rule is not kept, and the call runs this once" in terminal.text
    assert "Traceback" not in terminal.text
    assert (project / "b.txt").exists()


def test_ctrl_c_at_a_question_is_no_and_the_turn_continues(project: Path) -> None:
    model = script(project, call("write_file", path="b.txt", content="x"), "fine without it")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"\[y\]es")
        terminal.type("\x03")
        assert terminal.end() == 0, terminal.text
    assert "fine without it" in terminal.text
    assert not (project / "b.txt").exists()


def test_a_held_call_waits_and_is_not_undone(project: Path) -> None:
    model = script(project, call("write_file", path="b.txt", content="x"), "done")
    with Terminal("run", "go", "--ask", "--model", model, cwd=project) as terminal:
        terminal.wait_for(r"\[y\]es")
        terminal.type("\x04")  # nobody answers
        assert terminal.end() == 4, terminal.text
    assert "○ write_file b.txt · waits for a person" in terminal.text
    assert "undone" not in terminal.text


def test_nothing_that_others_wrote_commands_the_terminal(project: Path) -> None:
    """Not in an answer, a file's name, a tool's name, an argument or an output; not in any command."""
    name = f"bad{EVIL}name.txt"
    calls = [
        {"name": "write_file", "arguments": {"path": name, "content": f"{EVIL}\n"}},
        {"name": f"tool{EVIL}", "arguments": {}},
        {"name": "run_command", "arguments": {"command": f"cat bad*; printf '{EVIL}'; exit 3"}},
    ]
    model = script(project, {"text": f"# {EVIL}\n\n&#27;]0;owned&#7;", "calls": calls}, f"{EVIL} done")
    env = {"NO_COLOR": ""}
    commands = [
        ("run", f"task {EVIL}", "--model", model),
        *((each,) for each in ("list", "show", "diff", "diagnose", "replay")),
        ("diff", "--json"),
        ("export", "--json"),
        ("hold", "list"),
        ("show", f"x{EVIL}"),
        ("undo", "--yes"),
    ]
    for each in commands:
        with Terminal(*each, cwd=project, env=env) as terminal:
            terminal.end()
        written = re.sub(r"\x1b\[(?:[0-9;]*m|K|J|[0-9]*A|\?2026[hl])", "", terminal.written)
        found = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", written)
        assert found is None, (each, written[max(found.start() - 80, 0) : found.end() + 20])
        assert "\x1b[8m" not in terminal.written, (each, "a colour of others hides text")
        if each[0] != "run":
            assert not re.search(r"\r(?![\r\n])", written), (each, "a line is overwritten")
        if each[0] == "run":
            assert "\\x1b]0;owned\\x07" in written


@pytest.mark.parametrize(
    ("columns", "env"),
    [
        (60, {}),
        (60, {"NO_COLOR": ""}),
        (100, {"TERM": "dumb"}),
        (80, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}),
    ],
    ids=["narrow", "narrow in colour", "dumb", "ascii"],
)
def test_each_terminal_shows_what_it_can(project: Path, columns: int, env: dict[str, str]) -> None:
    """Every line fits, nothing is left of the live area, and the end says what to do."""
    text = "A **long** answer with 宽字符 wide characters " * 6 + "\n\n- one\n- two\n"
    bad = {"name": "run_command", "arguments": {"command": "echo " + "long " * 40 + "; exit 3"}}
    edit = {"name": "edit_file", "arguments": {"path": "calc.py", "old_text": "a - b", "new_text": "a + b"}}
    model = script(project, {"text": text, "calls": [bad, edit]}, "Done.")
    with Terminal("run", "go", "--model", model, cwd=project, columns=columns, env=env) as terminal:
        assert terminal.end() == 0, terminal.text
    lines = shown(terminal, columns)
    assert "Traceback" not in terminal.text
    assert not [line for line in lines if "Ctrl-C stops" in line or "thinking" in line]
    assert " ".join(" ".join(lines).split()).count("wide characters") == 6
    failed = next(line for line in lines if "run_command" in line)
    assert failed.rstrip().endswith("exit code 3")
    told = " ".join(lines[-2:])
    assert re.search(r"1 file \+1 .+1 .* 2 calls .* undo: treenail undo", told), told
    if env.get("TERM") == "dumb":
        assert "\x1b" not in terminal.written
    if "PYTHONIOENCODING" in env:
        assert terminal.written.isascii()
        assert "* edit_file calc.py +1 -1" in terminal.text
    if env == {}:
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]", terminal.written), "NO_COLOR is set"


def test_a_window_that_becomes_narrower_shows_the_footer_once(project: Path) -> None:
    go = project.parent / "outside"
    go.mkdir()
    wait = call("run_command", command="until [ -e ../outside/go ]; do read -t 0.05 x < /dev/zero; done")
    told = ("run", "go", "--allow-write", "../outside", "--model", script(project, wait, "done"))
    with Terminal(*told, cwd=project, columns=100) as terminal:
        terminal.wait_for("s · Ctrl-C stops")
        before = len(terminal.written)
        terminal.resize(60)
        terminal.wait_for(r"step 1 of 200 · \d+ s(?! · Ctrl)")
        drawn = terminal.written[before:]
        (go / "go").touch()
        assert terminal.end() == 0, terminal.text
    # The two lines of the area took two rows each in the narrower window, and all of them are erased.
    assert "\x1b[3A" in drawn, drawn
    assert all(len(line.rstrip()) <= 60 for line in drawn.split("\n") if "\x1b" not in line)


def test_ids_that_are_printed_name_their_runs_in_a_narrow_window(project: Path) -> None:
    assert treenail("run", "a task " * 30, "--model", script(project, "hi"), cwd=project).returncode == 0
    with Terminal("list", cwd=project, columns=60) as terminal:
        assert terminal.end() == 0
    printed = terminal.text.splitlines()[1].split()[0]
    assert re.fullmatch("[0-9a-f]{8}", printed), terminal.text
    assert treenail("show", printed, cwd=project).returncode == 0

"""A person types: the chat in a real pty with a terminal emulator, and a model server on a real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.stories.emulator import CTRL_C, ESC, TAB, UP, Emulated, pasted
from tests.stories.terminal import clean_environment, treenail

from treenail.history import opened_log, summarize
from treenail.presenters.cli import stores
from treenail.providers.scripted import Answer
from treenail.testing.wire import Broken, WireServer

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f000500"
    "01ffa2f4e00c0000000049454e44ae426082"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return root


def flags(server: WireServer, model: str = "openai/a-model") -> tuple[str, ...]:
    named = ("--model", model, "--base-url", server.openai_url, "--api", "chat")
    return (*named, "--unknown-price", "warn")


def said(server: WireServer, number: int = -1) -> list[Any]:
    """The person's messages in a request."""
    return [each["content"] for each in server.requests[number].body["messages"] if each["role"] == "user"]


def states(project: Path) -> list[str]:
    store = stores.store_for(project, None, clean_environment(project))
    with opened_log(store) as log:
        return [summarize(log, each).state for each in log.sessions() if each.parent_id is None]


def call(name: str, **arguments: object) -> Answer:
    return Answer(calls=[(name, arguments)])


def test_a_paste_is_one_message_and_is_sent_whole(project: Path) -> None:
    """Blank lines, commands and at signs in it do nothing. New lines can be typed, too."""
    code = "@property\n\n!touch ../outside/never\n" + "\n".join(f"line {each}" for each in range(117))
    with (
        WireServer(["one", "two", "three"]) as server,
        Emulated("chat", *flags(server), cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.type("explain " + pasted(code.replace("\n", "\r")))
        terminal.see_line("explain [pasted 120 lines]")
        terminal.send(" please")
        terminal.see(r"> explain \[pasted 120 lines\] please\n[\s\S]*one")
        terminal.see_line()
        terminal.send(pasted("@cached\ndef f(): ...") + " me@host")
        terminal.see("two")
        terminal.see_line()
        terminal.type("a\\\rb" + ESC + "\rc")
        terminal.see("> a\n  b\n  c\n")
        terminal.send("")
        terminal.see("three")
        assert said(server) == [f"explain {code} please", "@cached\ndef f(): ... me@host", "a\nb\nc"]
    assert not list((project.parent / "outside").iterdir())


def test_a_paste_runs_nothing_also_when_it_is_recalled(project: Path) -> None:
    """Whatever it begins with, it is a message; Up and Enter send the same message again."""
    short = "!touch ../outside/short\n\nexplain this cell of a notebook"
    long = "\n".join(["!touch ../outside/long", "@calc.py", "@property", *("line" for _ in range(9))])
    with (
        WireServer(["one", "two", "three", "four", "five"]) as server,
        Emulated("chat", *flags(server), cwd=project) as terminal,
    ):
        for answer, typed in (
            ("one", pasted(short)),
            ("two", UP),
            ("three", pasted(long)),
            ("four", UP),
            ("five", pasted("/quit")),
        ):
            terminal.see_line()
            terminal.type(typed)
            terminal.see(r"(?m)^> (\\|\[pasted)[^\n]+\n((  [^\n]*)?\n)*[^\n]*/help$")
            terminal.send("")
            terminal.see(rf"(?m)^{answer}$")
        assert said(server) == [short, short, long, long, "/quit"]
    assert not list((project.parent / "outside").iterdir())


def test_files_and_pictures_go_along_with_a_message(project: Path) -> None:
    """A path that is missing, outside or too large is said, nothing is sent, and the line stays."""
    (project / "shot.png").write_bytes(PNG)
    (project / "two words.txt").write_text("```\nnot the end\n")
    (project.parent / "secret").write_text("secret")
    (project / "link").symlink_to(project.parent / "secret")
    (project / "large.txt").write_text("x" * 300_000)
    (project / "raw").write_bytes(b"\0\1")
    with WireServer(["done"]) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        for wrong, why in (
            ("missing.py", "there is no file missing.py"),
            ("../secret", "outside"),
            ("link", "outside"),
            ("large.txt", "too large"),
            ("raw", "neither text nor an image"),
        ):
            terminal.see_line()
            terminal.send(f"see @{wrong}")
            terminal.see(why)
            terminal.see_line(f"see @{wrong}")
            terminal.type(CTRL_C)
        terminal.see_line()
        terminal.send('mend @calc.py, like @shot.png and @"two words.txt". Not \\@that')
        terminal.see("done")
        (content,) = said(server)
        assert len(server.requests) == 1
    text, picture = content
    assert text["text"].startswith('mend @calc.py, like @shot.png and @"two words.txt". Not @that\n\n')
    assert "calc.py:\n```\ndef add(a, b):\n    return a - b\n```" in text["text"]
    assert "two words.txt:\n````\n```\nnot the end\n````" in text["text"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert "secret" not in text["text"]


def test_tab_completes_commands_their_arguments_and_paths(project: Path) -> None:
    """What the project ignores is not offered; a path with blanks is quoted."""
    (project / ".git").mkdir()
    (project / ".gitignore").write_text("build/\n")
    (project / "build").mkdir()
    (project / "build" / "calculated.txt").touch()
    (project / "a name.txt").touch()
    answers = [call("write_file", path="new.txt", content="x"), "made"]
    with WireServer(answers) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        terminal.see_line()
        terminal.send("make it")
        terminal.see("made")
        for typed, completed in (
            ("/cont", "/context"),
            ("/model openai/gpt-6-l", "/model openai/gpt-6-luna"),
            ("/permissions r", "/permissions read_only"),
            ("/diff c", "/diff call_1_1"),
            ("fix @cal", "fix @calc.py"),
            ("fix @a", 'fix @"a name.txt"'),
            ("fix @build/c", "fix @build/c"),
        ):
            terminal.see_line()
            terminal.type(typed)
            terminal.see_line(typed)
            terminal.type(TAB)
            terminal.see(rf"(?m)^> {re.escape(completed)}$")
            terminal.type(CTRL_C)


def test_a_command_of_ones_own_is_shown_to_the_model_with_the_next_message(project: Path) -> None:
    """It has the person's rights, not the sandbox's, and its escape sequences do not reach the terminal."""
    with WireServer(["I see"]) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        terminal.see_line()
        terminal.send("!touch ../outside/mine; printf 'a\\033[2Jb\\n'; exit 3")
        terminal.see(r"a\\x1b\[2Jb")
        terminal.see("with your next message")
        terminal.see_line()
        terminal.send("!sleep 600")
        terminal.type(CTRL_C)
        terminal.see("(?s)with your next message.*with your next message")
        terminal.send("what now?")
        terminal.see("I see")
        (text,) = said(server)
    assert (project.parent / "outside" / "mine").exists()
    assert text.startswith("what now?\n\nI ran this command myself (exit code 3):\n```\n$ touch")
    assert "a\x1b[2Jb" in text
    assert "ended by signal 2" in text
    assert "exit code 3" in treenail("export", cwd=project).stdout


def test_what_is_typed_meanwhile_is_queued_for_the_next_step(project: Path) -> None:
    """The turn takes it before its next request; what waits is shown, and Up edits it."""
    wait = "touch ../outside/begun; while [ ! -e ../outside/go ]; do sleep 0.05; done"
    outside = project.parent / "outside"
    hanging = Broken(Answer("both\ndone"), how="hang")
    answers = [call("run_command", command=wait), hanging, "third"]
    with (
        WireServer(answers) as server,
        Emulated("chat", *flags(server), "--allow-write", "../outside", cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.send("go")
        terminal.until((outside / "begun").exists)
        terminal.send("and the docs")
        terminal.send("and a tset")
        terminal.see(r"queued: and the docs\nqueued: and a tset  \(Up edits it\)\n>\n")
        terminal.type(UP)
        terminal.see(r"queued: and the docs  \(Up edits it\)\n> and a tset\n")
        terminal.type("\x7f" * 4)
        (outside / "go").touch()
        terminal.see("> and the docs\n")
        server.wait_for_requests(2)
        terminal.send("test")  # The turn asks no more: it becomes the next one.
        terminal.see("queued: and a test")
        server.release()
        terminal.see("(?s)done.*> and a test\n.*third")
        assert said(server, 1) == ["go", "and the docs"]
        assert server.requests[1].body["messages"][-1]["role"] == "user"
        assert said(server, 2) == ["go", "and the docs", "and a test"]
        assert [each.violations for each in server.requests] == [()] * 3
    shown = treenail("show", cwd=project).stdout
    assert re.search(r"person +and the docs", shown)


def test_a_message_that_is_taken_back_keeps_what_it_carries(project: Path) -> None:
    """Its pictures and what the person's own commands said go along when it is sent after all."""
    (project / "shot.png").write_bytes(PNG)
    hanging = Broken(Answer("first"), how="hang")
    with (
        WireServer(["zero", hanging, "second"]) as server,
        Emulated("chat", *flags(server), cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.send("hello")
        terminal.see("zero")
        terminal.see_line()
        terminal.send("go")
        server.wait_for_requests(2)
        terminal.send("!echo from a command")
        terminal.see("with your next message")
        terminal.send("look at @shot.png")
        terminal.see("queued: look at @shot.png")
        terminal.type(UP)
        terminal.see(r"(?m)^> look at @shot\.png$")
        terminal.send(" again")
        terminal.see("queued: look at @shot.png again")
        terminal.type(ESC)  # A turn that is stopped gives back what waits.
        terminal.see("interrupted")
        terminal.see_line("look at @shot.png again")
        terminal.send("")
        terminal.see("second")
        text, picture = said(server)[-1]
    assert text["text"].startswith("look at @shot.png again")
    assert text["text"].count("I ran this command myself") == 1
    assert picture["image_url"]["url"].startswith("data:image/png")


def test_a_first_turn_has_a_diff_and_a_stubborn_command_does_not_keep_the_person(project: Path) -> None:
    hanging = Broken(Answer("done"), how="hang")
    answers = [call("write_file", path="a.txt", content="new line\n"), hanging]
    stubborn = "!trap '' INT; touch ../outside/begun; while :; do sleep 0.1; done"
    with WireServer(answers) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        terminal.see_line()
        terminal.send("go")
        server.wait_for_requests(2)
        terminal.send("/diff")
        terminal.see(r"\+new line")
        terminal.send(stubborn)
        terminal.until((project.parent / "outside" / "begun").exists)
        terminal.send("/quit")
        terminal.end()
    assert states(project) == ["interrupted"]


def test_a_letter_of_a_sentence_is_not_an_answer(project: Path) -> None:
    """A question comes while the person types: nothing runs and no rule is kept before they mean it."""
    hanging = Broken(call("write_file", path="src/a.txt", content="x"), how="hang")
    with (
        WireServer([hanging, "done"]) as server,
        Emulated("chat", *flags(server), "--ask", cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.send("go")
        server.wait_for_requests(1)
        terminal.type("we ")
        terminal.see(r"(?m)^> we$")
        server.release()
        terminal.see(r"\[a\]lways: write_file: src/\*\*")
        terminal.type("also")
        terminal.see(r"(?s)\[e\]dit.*\[e\]dit")
        terminal.type("y")
        terminal.see(r"yes\? Enter confirms")
        terminal.type("e")
        terminal.see(r"(?s)\[e\]dit.*\[e\]dit.*\[e\]dit")
        assert not (project / "src").exists()
        terminal.type("y")
        terminal.see("(?s)Enter confirms.*Enter confirms")
        terminal.type("\r")
        terminal.see("done")
        terminal.see_line("we")
    assert (project / "src" / "a.txt").exists()
    assert not list(project.parent.glob(".config/treenail/projects/*.toml"))


def test_ctrl_c_and_esc_stop_refuse_clear_and_leave(project: Path) -> None:
    wait = "touch made ../outside/begun; sleep 600"
    outside = project.parent / "outside"
    answers = [
        call("write_file", path="a.txt", content="x"),
        call("run_command", command=wait),
        call("run_command", command=wait.replace("begun", "again")),
        "never",
    ]
    with (
        WireServer(answers) as server,
        Emulated("chat", *flags(server), "--allow-write", "../outside", "--ask", cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.send("write")
        terminal.see(r"\[y\]es")
        terminal.type(CTRL_C)  # A question: no.
        terminal.see(r"(?s)refused.*\[y\]es")
        terminal.type("y")
        terminal.until((outside / "begun").exists)
        terminal.type("queued" + "\r")
        terminal.see("queued: queued")
        terminal.type(ESC)  # A turn: it is interrupted, and what waited goes back into the line.
        terminal.see("interrupted")
        terminal.see_line("queued")
        assert states(project) == ["interrupted"]
        terminal.type(CTRL_C)  # A line: it is cleared.
        terminal.see_line()
        terminal.send("again")
        terminal.see(r"(?s)interrupted.*\[y\]es")
        terminal.type("y")
        terminal.until((outside / "again").exists)
        os.kill(terminal.process.pid, signal.SIGINT)  # What another terminal sends does the same.
        terminal.see("(?s)interrupted.*interrupted")
        terminal.see_line()
        terminal.type(CTRL_C)  # An empty line: twice, it leaves.
        terminal.see("Ctrl-C again leaves")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
    assert "continue with: treenail chat --run" in terminal.text
    assert not (project / "a.txt").exists()
    assert not (project / "made").exists()


STUBBORN = """
import time
from pathlib import Path
from treenail import Agent, tool

@tool(effects="workspace")
async def dig(*, context) -> str:
    "Dig."
    context.filesystem.write("hole", "deep")
    Path("../outside/begun").touch()
    time.sleep(600)  # In the event loop of the turn, which hears of nothing meanwhile.

agent = Agent("stubborn", tools=[dig])
"""


def test_a_tool_that_ignores_the_interrupt_does_not_keep_the_person(project: Path) -> None:
    """A second Ctrl-C leaves at once, and the next command undoes what the tool had done."""
    (project.parent / "stubborn.py").write_text(STUBBORN)
    agent = ("--agent", "../stubborn.py")
    with (
        WireServer([call("dig"), "done"]) as server,
        Emulated("chat", *flags(server), *agent, cwd=project) as terminal,
    ):
        terminal.see_line()
        terminal.send("dig")
        terminal.until((project.parent / "outside" / "begun").exists)
        assert (project / "hole").exists()
        terminal.type(CTRL_C)
        terminal.see("stopping")
        terminal.until(lambda: terminal.type(CTRL_C) or "left in the middle" in terminal.shown)
        assert terminal.end() == 130
        assert "continue with: treenail resume" in terminal.text
        found = treenail("rollback", "--json", cwd=project)
        assert not (project / "hole").exists(), found.stderr
    assert states(project) in (["interrupted"], ["unfinished"])


def test_commands_with_a_slash_do_what_the_command_line_does(project: Path) -> None:
    (project / "AGENTS.md").write_text("Be brief.\n")
    edit = call("edit_file", path="calc.py", old_text="a - b", new_text="a + b")
    answers = [edit, "mended", "hello from another"]
    with WireServer(answers) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        terminal.see_line()
        terminal.send("/undo")
        terminal.see("there is none yet")
        terminal.send("/mdoel")
        terminal.see("did you mean /model")
        terminal.send("mend it")
        terminal.see("mended")
        terminal.see_line()
        terminal.send("/diff")
        terminal.see(r"\+    return a \+ b")
        terminal.send("/undo all")
        terminal.see(r"undo 1 change of run .*\[y/N\]")
        terminal.send("y")
        terminal.see("undone: edit_file")
        assert "a - b" in (project / "calc.py").read_text()
        terminal.see_line()
        terminal.send("/redo")
        terminal.see("stand again")
        assert "a + b" in (project / "calc.py").read_text()
        terminal.see_line()
        terminal.send("/fork call_1_1")
        terminal.see(r"starts before edit_file")
        assert "a - b" in (project.parent / "project-fork-1" / "calc.py").read_text()
        terminal.see_line()
        terminal.send("/resume")
        terminal.see(r"Which run\?\n> 1 .*\n +2 ")
        terminal.type(ESC)
        terminal.see_line()
        terminal.send("/permissions ask")
        terminal.see("permissions: ask, asks before effects")
        terminal.see_line()
        terminal.send("/model openai/another")
        terminal.see("another answers from the next turn on")
        terminal.send("who are you?")
        terminal.see("hello from another")
        assert server.requests[-1].body["model"] == "another"
        terminal.see(r"\n>\nanother ·[^\n]* asks before effects · /help")
        terminal.send("/compact")
        terminal.see("are a summary now")
        terminal.see(
            r"about [\d,]+ tokens[^\n]*\n.*\d  instructions\n.*\d  AGENTS.md\n.*\d  descriptions of tools"
        )
        terminal.see(r"\n>\nanother ·[^\n]* asks before effects · /help")
        terminal.send("/quit")
        assert terminal.end() == 0


def test_undo_takes_back_one_turn_after_the_other(project: Path) -> None:
    """A turn that changed no file is passed over; /redo takes the last undo back."""
    answers = [
        call("write_file", path="a.txt", content="a\n"),
        Answer("made a"),
        Answer(calls=[("write_file", {"path": name, "content": "b"}) for name in ("b.txt", "c.txt")]),
        Answer("made b and c"),
        Answer("nothing to do"),
    ]
    with WireServer(answers) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        for said_, seen in (("one", "made a"), ("two", "made b and c"), ("three", "nothing to do")):
            terminal.see_line()
            terminal.send(said_)
            terminal.see(seen)
        assert "undo: /undo" in terminal.shown
        for left in (["a.txt"], []):
            terminal.see_line()
            terminal.send("/undo")
            terminal.see(r"undo \d changes? of run [^\n]*\[y/N\][^\n]*$")
            terminal.send("y")
            terminal.until(lambda left=left: [each.name for each in project.glob("*.txt")] == left)
        terminal.see_line()
        terminal.send("/undo")
        terminal.see("no call of this run stands")
        terminal.see_line()
        terminal.send("/redo")
        terminal.see("stand again")
    assert [each.name for each in project.glob("*.txt")] == ["a.txt"]


def test_an_error_of_the_system_is_a_line_and_the_chat_continues(project: Path) -> None:
    """Also for a home that nobody has; files are counted without the directories around them."""
    answers = [call("write_file", path="new/deep/a.txt", content="a\n"), "made", "still here"]
    with WireServer(answers) as server, Emulated("chat", *flags(server), cwd=project) as terminal:
        terminal.see_line()
        terminal.send("make it")
        terminal.see(r"made[\s\S]*[^\d]1 file \+1 .*undo: ")
        for command, seen in (
            ("/fork call_1_1 /proc/1/nope", r"nope: \[Errno \d+\] .*the chat continues"),
            ("/fork call_1_1 ~nosuchuser/x", "~nosuchuser/x: there is no such user"),
        ):
            terminal.see_line()
            terminal.send(command)
            terminal.see(seen)
        terminal.see_line()
        terminal.send("are you there?")
        terminal.see("still here")
        terminal.see_line()
        terminal.send("/quit")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_a_hostile_file_commands_no_terminal_in_the_chat(project: Path) -> None:
    """No title, cleared screen, hidden text or overwritten line, in any command that shows the file."""
    evil = "a\x1b]0;owned\x07\x1b[2J\x1b[8mhidden\rover"
    name = "bad\x1b[8mname\x1b[2J.txt"
    answers = [call("write_file", path=name, content=f"{evil}\n"), "made"]
    with (
        WireServer(answers) as server,
        Emulated("chat", *flags(server), cwd=project, env={"NO_COLOR": ""}) as terminal,
    ):
        terminal.see_line()
        terminal.send("make it")
        terminal.see("made")
        for command, seen in (
            ("/diff", r"\+a\\x1b\]0;owned\\x07\\x1b\[2J\\x1b\[8mhidden\\rover"),
            ("/undo", r"\-a\\x1b\]0;owned\\x07\\x1b\[2J\\x1b\[8mhidden\\rover[\s\S]*\[y/N\]"),
            ("/redo", "stand again"),
            ("/fork call_1_1", "starts before write_file"),
            ("/undo call_1_1", "files and state are as they were before"),
        ):
            terminal.see_line()
            terminal.send(command)
            terminal.see(seen)
            if command == "/undo":
                terminal.send("y")
                terminal.see("undone: write_file")
        terminal.see_line()
        terminal.send("/quit")
        assert terminal.end() == 0
    for sequence in ("\x1b]0;", "\x1b[2J", "\x1b[8m", "\rover"):
        assert sequence not in terminal.written
    assert "\x1b[31m" in terminal.written or "\x1b[1m" in terminal.written, "our own colours pass"


def test_what_was_typed_is_remembered_for_this_project_alone(project: Path) -> None:
    """In a file that only its user can read; a line that begins with a blank is not kept."""
    other = project.parent / "other"
    other.mkdir()
    env = {"XDG_STATE_HOME": str(project.parent / "state")}
    with WireServer(["a", "b", "c"]) as server:
        with Emulated("chat", *flags(server), cwd=project, env=env) as terminal:
            terminal.see_line()
            terminal.send("first " + pasted("x\n" * 20))
            terminal.see_line()
            terminal.see("(?m)^a$")
            terminal.send(" hidden")
            terminal.see("(?m)^b$")
            terminal.see_line()
            terminal.type("\x04")
            assert terminal.end() == 0
        (kept,) = (project.parent / "state").rglob("typed")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert "hidden" not in kept.read_text()
        with Emulated("chat", *flags(server), cwd=other, env=env) as terminal:
            terminal.see_line()
            terminal.type(UP)
            terminal.send("new")
            terminal.see("(?m)^c$")
            assert said(server) == ["new"]
        with Emulated("chat", *flags(server), cwd=project, env=env) as terminal:
            terminal.see_line()
            terminal.type(UP)
            terminal.see("> first x\n  x\n  x\n")


def test_a_run_is_picked_from_a_list_and_a_finished_one_says_so(project: Path) -> None:
    """Without a terminal the one that waits is resumed; of several, a list says how to name one."""
    file = project.parent / "script.json"
    read = {"calls": [{"name": "read_file", "arguments": {"path": "calc.py"}}], "cost_usd": 0.25}
    file.write_text(json.dumps([read, "done", "docs"]))
    model = ("--model", f"scripted:{file}")
    for task in ("the first task", "the second task"):
        assert treenail("run", task, *model, "--max-steps", "1", cwd=project).returncode == 6
    several = treenail("resume", cwd=project)
    assert several.returncode == 2
    assert "2 runs can be resumed; name one: treenail resume" in several.stderr
    assert re.search(r"just now +failed +\$0.25 +the first task", several.stderr)
    with Emulated("resume", "--max-steps", "9", cwd=project) as terminal:
        terminal.see(r"(?s)> 1 .*the second task\n +2 .*the first task")
        terminal.type("\x1b[B")
        terminal.see("> 2 .*the first task")
        terminal.type("\r")
        assert terminal.end() == 0
    assert states(project) == ["completed", "failed"]
    assert treenail("resume", "--max-steps", "9", cwd=project).returncode == 0
    with Emulated("resume", cwd=project) as terminal:
        terminal.see("Which run")
        terminal.type(ESC)
        assert terminal.end() == 0
    again = treenail("resume", "@last", cwd=project)
    assert again.returncode == 0
    assert "is finished: the second task\n  treenail chat --run" in again.stderr
    # One more word to the newest run of this directory, in one shot.
    assert treenail("run", "--continue", "and now the docs", cwd=project).stdout == "docs\n"
    assert len(states(project)) == 2
    elsewhere = treenail("run", "--continue", "x", *model, cwd=project.parent / "outside")
    assert "start one" in elsewhere.stderr


def test_the_command_alone_opens_a_chat_and_with_a_task_runs_it(project: Path) -> None:
    (project / "shot.png").write_bytes(PNG)
    with WireServer(["one", "two"]) as server:
        env = {"TREENAIL_MODEL": "openai/a-model", "TREENAIL_BASE_URL": server.openai_url}
        env |= {"TREENAIL_API": "chat", "TREENAIL_UNKNOWN_PRICE": "warn"}
        with Emulated("--image", "shot.png", cwd=project, env=env) as terminal:
            terminal.see_line()
            terminal.send("hello")
            terminal.see("(?m)^one$")
            terminal.see_line()
            os.kill(terminal.process.pid, signal.SIGTERM)
            assert terminal.end() == 128 + signal.SIGTERM
        assert said(server)[0][1]["type"] == "image_url"
        ran = treenail("what is it?", "--image", "shot.png", cwd=project, env=env)
        assert ran.stdout == "two\n"
        ((text, picture),) = said(server)
        assert (text["text"], picture["type"]) == ("what is it?", "image_url")
        blind = treenail("what is it?", "--image", "shot.png", "--model", "o3-mini", cwd=project, env=env)
        assert (blind.returncode, len(server.requests)) == (2, 2)
        assert "o3-mini takes no images" in blind.stderr
    slip = treenail("lsit", cwd=project)
    assert slip.returncode == 2
    assert "did you mean `treenail list`? Else, to run it as a task: treenail run lsit" in slip.stderr
    assert "treenail run 'fix the test'" in treenail("fix", "the", "test", cwd=project).stderr
    assert "Usage: treenail" in treenail(cwd=project).stderr

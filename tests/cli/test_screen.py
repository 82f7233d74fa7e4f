"""What a person, a pipe and a machine see of a run."""

from __future__ import annotations

import io
import json
import re
import threading
from time import process_time

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from treenail.conversation import ContextPressure
from treenail.history import LiveView, live_text
from treenail.presenters.cli.approval import Answer, Question
from treenail.presenters.cli.footer import footer, idle_footer
from treenail.presenters.cli.markdown import MarkdownStream
from treenail.presenters.cli.screen import JsonScreen, PlainScreen, Screen, watching
from treenail.presenters.cli.terminal_screen import TerminalScreen
from treenail.presenters.cli.tool_lines import plan_lines
from treenail.printable import printable, printable_line
from treenail.providers import TextDelta
from treenail.tools import PermissionRequest
from treenail.turns import (
    FeedbackGiven,
    Lagged,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    ToolCallBegan,
    ToolCallFinished,
    ToolCallOutput,
    TurnFinished,
    TurnState,
    UsageChanged,
)

WORDS = st.text(st.sampled_from("ab \n"), min_size=1, max_size=12)


@given(pieces=st.lists(WORDS, max_size=8))
def test_a_pipe_gets_the_text_as_it_was_said(pieces: list[str]) -> None:
    """However the answer is cut into pieces, the output is the answer, and ends with a line's end."""
    out, err = io.StringIO(), io.StringIO()
    screen = PlainScreen(out, err)
    for each in pieces:
        screen.show(TextDelta(each))
    screen.close()
    said = "".join(pieces)
    assert out.getvalue() == said + ("\n" if said and not said.endswith("\n") else "")
    assert err.getvalue() == ""


@given(pieces=st.lists(WORDS, max_size=8))
def test_a_machine_gets_one_object_a_line(pieces: list[str]) -> None:
    out = io.StringIO()
    screen = JsonScreen(out)
    for each in pieces:
        screen.show(TextDelta(each))
    screen.show(UsageChanged(steps=1))
    lines = [json.loads(line) for line in out.getvalue().split("\n")[:-1]]
    assert [each["text"] for each in lines[:-1]] == pieces
    assert lines[-1]["event"] == "usage_changed"


def emulated(written: str, *, columns: int = 60, rows: int = 40) -> list[str]:
    """What a terminal shows of what was written to it, line by line, without blank ones."""
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def test_a_terminal_shows_each_line_once_and_no_markup_is_read_from_it() -> None:
    shown = io.StringIO()
    screen = TerminalScreen(Console(file=shown, force_terminal=True, width=60))
    for each in ("one [bold]", "two[/]\nthr", "ee"):
        screen.show(TextDelta(each))
    screen.show(ToolCallBegan("c1", "look", "{}"))
    screen.show(ToolCallFinished("c1", "look", False))
    screen.close()
    assert emulated(shown.getvalue()) == [
        "one [bold]two[/]",
        "three",
        "✗ look · failed, undone",
    ]


def test_the_words_of_a_judge_are_shown_without_what_the_model_needs_around_them() -> None:
    said = '<completion_check checker="c" attempt="1 of 3">\nNot yet: a test fails.\n</completion_check>'
    assert live_text(FeedbackGiven("judges", said, "caution")) == "  ⚖ caution: Not yet: a test fails."


def test_a_question_comes_after_everything_that_led_to_it() -> None:
    """The screen has shown what was published before, however slow it is."""

    class Slow(Screen):
        shown = ""

        def show(self, seen: LiveEvent | Lagged) -> None:
            threading.Event().wait(0.01)
            self.shown += seen.text if isinstance(seen, TextDelta) else ""

    screen = Slow()
    with watching(screen) as feed:
        for letter in "what led to it":
            feed.publish(TextDelta(letter))
        screen.caught_up()
        assert screen.shown == "what led to it"


BLOCKS = st.lists(
    st.sampled_from(
        [
            "# Title",
            "a *paragraph*\nof two lines",
            "- one\n- two",
            "```py\nx = 1\n\ny = 2\n```",
            "| a |\n|---|\n| b |",
            "> said",
            "---",
        ]
    ),
    max_size=6,
)


@settings(max_examples=40)
@given(blocks=BLOCKS, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_blocks_are_printed_once_each_however_the_text_arrives(blocks: list[str], cuts: list[int]) -> None:
    """What was printed block by block is what would be printed of the whole text."""
    text = "\n\n".join(blocks)
    stream, printed, at, turn = MarkdownStream(), [], 0, 0
    while at < len(text):
        piece = text[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        printed.append(stream.add(piece))
    printed.append(stream.rest())
    assert "".join(printed).split() == text.split()
    console = Console(file=io.StringIO(), width=60, color_system=None)
    shown = [line for each in printed for line in stream.lines(console, 60, each) if line]
    assert shown == [line for line in stream.lines(console, 60, text) if line]


def test_a_long_block_costs_little_while_it_arrives_and_fits_the_screen() -> None:
    """Two thousand lines of one block are not parsed two thousand times, and only their end is drawn."""
    stream = MarkdownStream()
    began = process_time()
    for number in range(2_000):
        assert stream.add(f"- item {number}\n") == ""
    console = Console(file=io.StringIO(), width=60, color_system=None)
    lines = stream.lines(console, 60)
    assert lines[-1].endswith("item 1999")
    assert len(lines) < 1_000
    assert process_time() - began < 8


@pytest.mark.parametrize("tag", ["<b>bold</b>", "<!-- a comment -->", "<div>\nin it\n</div>"])
def test_a_tag_hides_nothing(tag: str) -> None:
    stream = MarkdownStream()
    console = Console(file=io.StringIO(), width=60, color_system=None)
    assert "".join("".join(stream.lines(console, 60, tag)).split()) == "".join(tag.split())


@given(text=st.text())
def test_printable_text_only_prints(text: str) -> None:
    shown = printable(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    shown.encode("utf-8")
    assert printable(shown) == shown
    assert "\n" not in printable_line(text)


def test_a_footer_leaves_out_what_matters_least() -> None:
    used = UsageChanged(3, 100, 0.03, 41.0, "a-model", 0.03, 2.0, 200)
    view = LiveView(
        status="running_tools", usage=used, pressure=ContextPressure("none", 0.12, 24_000, 200_000)
    )
    assert footer(view, 100) == "a-model · 12% context · $0.03 of $2.00 · step 3 of 200 · 41 s"
    assert footer(view, 40) == "12% context · $0.03 of $2.00 · 41 s"
    assert footer(view, 14) == "$0.03 of $2.00"
    idle = "a-model · 12% context · $0.03 of $2.00 · asks before effects · /help"
    assert idle_footer("a-model", "asks before effects", view, 80) == idle
    assert idle_footer("a-model", "asks before effects", None, 20) == "a-model · /help"
    assert [cell_len(footer(view, width)) <= width for width in range(1, 80)].count(False) == 0


def test_parallel_calls_keep_their_names_and_a_failure_is_folded() -> None:
    shown = io.StringIO()
    screen = TerminalScreen(Console(file=shown, force_terminal=True, width=60, color_system="standard"))
    for name in ("first", "second"):
        screen.show(ToolCallBegan(name, f"{name}_tool", '{"path": "a.txt"}'))
    assert [line.split()[1] for line in map(plain, screen.under_way(60, 20))] == ["first_tool", "second_tool"]
    output = "Exit code 3 after 0.1 s.\n--- output ---\n" + "".join(f"line {each}\n" for each in range(30))
    screen.show(ToolCallFinished("second", "second_tool", True, "", 10.0, "ok", 3, tail=output))
    screen.show(ToolCallFinished("first", "first_tool", False, "", 10.0, "held"))
    screen.close()
    lines = emulated(shown.getvalue())
    assert lines[0] == "✗ second_tool a.txt · exit code 3"
    assert lines[-1] == "○ first_tool a.txt · waits for a person"
    assert [line.strip() for line in lines[2:-1]] == [f"line {each}" for each in range(24, 30)]
    assert "\x1b[31m" in shown.getvalue(), "a failure is red"


def test_a_running_command_shows_its_last_line_and_waiting_for_a_person_is_not_its_time() -> None:
    shown = io.StringIO()

    def slow(question: Question, request: PermissionRequest) -> Answer:
        threading.Event().wait(0.5)
        return Answer("yes")

    console = Console(file=shown, force_terminal=True, width=60)
    screen = TerminalScreen(console, asks=True, asker=slow)
    screen.show(ToolCallBegan("c1", "run_command", '{"command": "make"}'))
    screen.ask(PermissionRequest("c1", "run_command", '{"command": "make"}', "workspace"))
    screen.show(ToolCallOutput("c1", "one\ntwo \x1b[2J"))
    screen.show(ToolCallOutput("c1", "\n\n"))
    assert [plain(line) for line in screen.under_way(60, 20)] == [
        "● run_command make",
        r"    two \x1b[2J",
    ]
    screen.show(ToolCallFinished("c1", "run_command", True, "", 1_400.0))
    screen.close()
    assert emulated(shown.getvalue()) == ["● run_command make"], "1.4 s, of which half a second was waiting"


def test_a_plan_of_an_earlier_turn_is_not_shown_again() -> None:
    """It stands below while it has open steps; at the end only a plan is printed that this turn changed."""
    done, begun = PlanEntry("look", "done"), PlanEntry("mend", "in_progress")
    for before, calls, under_way, printed in (
        ((done,), False, [], []),
        ((done, begun), False, ["  ✓ look", "  ▸ mend"], []),
        ((done,), True, ["  ✓ look", "  ▸ mend"], ["  ✓ look", "  ▸ mend"]),
    ):
        shown = io.StringIO()
        screen = TerminalScreen(Console(file=shown, force_terminal=True, width=60))
        screen.show(PlanChanged(before))
        if calls:
            screen.show(ToolCallBegan("c1", "setup_plan", "{}"))
            screen.show(ToolCallFinished("c1", "setup_plan", True))
            screen.show(PlanChanged((done, begun)))
        assert [plain(line) for line in screen.under_way(60, 20)] == under_way
        screen.show(TurnFinished("t1", TurnState.COMPLETED))
        screen.close()
        assert emulated(shown.getvalue()) == printed


def plain(line: str) -> str:
    return Text.from_ansi(line).plain


def test_a_plan_is_a_checklist_around_the_current_step() -> None:
    steps = [PlanEntry(f"step {each}", "done" if each < 10 else "pending") for each in range(20)]
    lines = [each.plain for each in plan_lines(steps, 4)]
    assert lines == ["  ✓ step 8", "  ✓ step 9", "  ○ step 10", "  ○ step 11"]

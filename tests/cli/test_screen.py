"""What a person, a pipe and a machine see of a run."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from treenail.history import live_text
from treenail.presenters.cli.screen import JsonScreen, PlainScreen, TerminalScreen
from treenail.providers import TextDelta
from treenail.turns import FeedbackGiven, ToolCallBegan, ToolCallFinished, UsageChanged

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


def test_a_terminal_shows_each_line_once_and_no_markup_is_read_from_it() -> None:
    shown = io.StringIO()
    screen = TerminalScreen(Console(file=shown, force_terminal=False, width=60))
    for each in ("one [bold]", "two[/]\nthr", "ee"):
        screen.show(TextDelta(each))
    screen.show(ToolCallBegan("c1", "look", "{}"))
    screen.show(ToolCallFinished("c1", "look", False))
    screen.close()
    lines = [line for line in shown.getvalue().splitlines() if line and " · " not in line]
    assert lines == ["one [bold]two[/]", "three", "● look {}", "  ✗ undone: it was stopped"]


def test_the_words_of_a_judge_are_shown_without_what_the_model_needs_around_them() -> None:
    said = '<completion_check checker="c" attempt="1 of 3">\nNot yet: a test fails.\n</completion_check>'
    assert live_text(FeedbackGiven("judges", said, "caution")) == "  ⚖ caution: Not yet: a test fails."

"""An answer is put together whatever a model does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent, TurnState, tool
from treenail.conversation import ReasoningPart
from treenail.providers import (
    CollectedAnswer,
    Collector,
    ModelEvent,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.providers import answer as answers
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.providers.vendor import Mender
from treenail.state import TokenUsage
from treenail.tools import ToolCall


def collected(*events: ModelEvent) -> CollectedAnswer:
    collector = Collector()
    for each in events:
        collector.add(each)
    return collector.answer()


def call(call_id: str, name: str = "t", arguments: str = "{}") -> ToolCallRequested:
    return ToolCallRequested(ToolCall(call_id, name, arguments))


events = st.lists(
    st.builds(TextDelta, st.text(max_size=5))
    | st.builds(ReasoningDelta, st.text(max_size=5))
    | st.builds(
        lambda i, n, a: call(i, n, a), st.sampled_from(["", "a", "a-2", "b"]), st.text(max_size=5), st.text()
    )
    | st.builds(lambda n: UsageReported(TokenUsage(n, n)), st.integers(0, 9))
    | st.builds(lambda n: ReasoningBlock(ReasoningPart("m", "d", {"n": n})), st.integers())
    | st.builds(Stopped, st.sampled_from(["end", "tools", "length", "filtered", "refused"])),
    max_size=30,
)


@given(events)
def test_whatever_comes_can_be_run_and_recorded(stream: list[ModelEvent]) -> None:
    """All text in order, every call once with an id of its own, the last usage and the last end."""
    answer = collected(*stream)
    assert answer.text == "".join(each.text for each in stream if isinstance(each, TextDelta))
    asked = [each.call for each in stream if isinstance(each, ToolCallRequested)]
    assert [(c.name, c.arguments) for c in answer.calls] == [(c.name, c.arguments) for c in asked]
    ids = [c.id for c in answer.calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    usages = [each.usage for each in stream if isinstance(each, UsageReported)]
    assert answer.usage == (usages[-1] if usages else TokenUsage())
    assert answer.is_complete == any(isinstance(each, Stopped) for each in stream)


def test_an_id_that_comes_twice_is_numbered_and_noted() -> None:
    answer = collected(call("a"), call("a"), call("a-2"), Stopped("tools"))
    assert [each.id for each in answer.calls] == ["a", "a-2", "a-2-2"]
    assert len(answer.notes) == 2
    assert "'a' came twice" in answer.notes[0]


def test_more_than_the_limit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_CALLS", 3)
    monkeypatch.setattr(answers, "MAX_TEXT_CHARS", 10)
    monkeypatch.setattr(answers, "MAX_REASONING_BLOCKS", 1)
    thought = ReasoningBlock(ReasoningPart("m", "d", {}))
    stream = [TextDelta("12345678"), TextDelta("9012"), TextDelta("x"), thought, thought]
    answer = collected(*stream, *(call(str(each)) for each in range(5)), Stopped("end"))
    assert (answer.text, len(answer.calls), len(answer.parts)) == ("1234567890", 3, 1)
    assert answer.stop == "length"
    assert [note.split(" ")[0] for note in answer.notes] == ["the", "2", "1"]
    assert "3 were dropped" in answer.notes[0]


def test_arguments_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ARGUMENTS_CHARS", 10)
    answer = collected(call("a", arguments="1" * 8), call("b", arguments="1" * 8), call("c", arguments="12"))
    assert [each.id for each in answer.calls] == ["a", "c"]
    assert answer.notes == ("1 tool calls beyond what one answer may ask for were dropped",)


def test_notes_have_a_limit_too() -> None:
    answer = collected(*(call("a") for _ in range(100)), Stopped("tools"))
    assert len(answer.notes) == answers.MAX_NOTES + 1
    assert answer.notes[-1] == f"{99 - answers.MAX_NOTES} other calls had their ids repaired"


@given(st.text(st.characters(), max_size=20), st.lists(st.integers(0, 80), max_size=6))
def test_characters_split_anywhere_come_out_whole(text: str, cuts: list[int]) -> None:
    """However a server cuts its text into halves of surrogate pairs."""
    halves = text.encode("utf-16-le", "surrogatepass")
    places = sorted({0, len(halves), *(2 * cut for cut in cuts if 2 * cut < len(halves))})
    pieces = [
        "".join(chr(int.from_bytes(halves[i : i + 2], "little")) for i in range(start, end, 2))
        for start, end in pairwise(places)
    ]
    mender = Mender()
    whole = "".join(mender.feed(piece) for piece in pieces) + mender.flush()
    whole.encode()
    assert whole == text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@tool(effects="none")
def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def test_a_run_makes_a_thousand_calls_of_one_answer() -> None:
    """Each once, in order, in one turn."""
    calls = [("double", {"number": each}) for each in range(1000)]
    agent = Agent("calculator", tools=(double,))
    run = agent.run("?", provider=ScriptedProvider([Answer("", calls), Answer("Done.")]))
    assert (run.state, run.output) == (TurnState.COMPLETED, "Done.")
    results = [each.content for each in run.messages if each.role == "tool"]
    assert results == [str(2 * each) for each in range(1000)]

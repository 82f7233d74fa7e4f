"""One view for every screen: watched live or rebuilt from the log, it is the same, and it flatters nobody."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent, tool
from treenail.codec import FrozenDict
from treenail.containment import Limits
from treenail.conversation import (
    ContextPressure,
    HistoryCompacted,
    InnerMessage,
    ProviderUsage,
    SubagentEvent,
    ToolCallRecord,
)
from treenail.errors import ModelCallError
from treenail.history import RunView, project, read_tree
from treenail.history.projection import Projection
from treenail.history.text import render_text
from treenail.history.view import Item
from treenail.judges import CompletionChecked, Feedback, JudgeEvent, NestedEvaluated
from treenail.log import MemoryLog
from treenail.providers import ReasoningDelta, TextDelta
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import AttentionNeeded, Session, TokenUsage, stamped
from treenail.tools import (
    HoldAnswered,
    PermissionMode,
    Permissions,
    ToolHeld,
    ToolInvoked,
    ToolResult,
    ToolStarted,
    answer_hold,
)
from treenail.turns import (
    Lagged,
    LiveFeed,
    PartialText,
    PlanChanged,
    PlanEntry,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    TurnEnded,
    TurnFinished,
    TurnResumed,
    TurnStarted,
    TurnState,
    UsageChanged,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@tool
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


@tool
def spoil(*, context) -> str:
    """Fail half-way."""
    context.filesystem.write("notes.txt", "spoilt\n", mode="append")
    raise RuntimeError("half-way")


AGENT = Agent("tester", tools=(note, spoil))


def started(turn: str = "t") -> TurnStarted:
    return TurnStarted(turn, f"e-{turn}", "agent", "the task", "p", "m")


def said(
    role: str, *calls: str, result_of: str | None = None, text: str = "text", turn: str = "t"
) -> InnerMessage:
    return InnerMessage(
        role,  # type: ignore[arg-type]  # the tests name roles in words
        text,
        f"e-{turn}",
        0,
        tool_calls=tuple(ToolCallRecord(each, "look", "{}") for each in calls),
        tool_call_id=result_of,
        created_at=NOW,
    )


def invoked(session: Session, call: str, *, ok: bool = True) -> ToolInvoked:
    result: ToolResult[object] = ToolResult.ok(None, "fine") if ok else ToolResult.error("bad")
    outcome = "ok" if ok else "failed"
    return ToolInvoked(
        "", "", "look", FrozenDict(), result,
        session.session_id, NOW, None, call, attempt_id=call, outcome=outcome  # type: ignore[arg-type]  # any text
    )  # fmt: skip


def view_of(*events: object) -> RunView:
    session = Session()
    session.dispatch_all(events)
    return project(session)


def items(view: RunView, kind: str) -> list[Item]:
    return [each for turn in view.turns for each in turn.items if each.kind == kind]


# --- the law ------------------------------------------------------------------------------------------------

TURNS = ["t0", "t1"]

live_events: st.SearchStrategy[object] = st.one_of(
    st.builds(TextDelta, st.sampled_from(["a", "b"])),
    st.builds(ReasoningDelta, st.just("r")),
    st.builds(
        StatusChanged,
        st.sampled_from(["thinking", "running_tools", "done"]),
        st.sampled_from(TURNS),
        st.integers(0, 3),
    ),
    st.builds(ToolCallBegan, st.sampled_from(["c", "d"]), st.just("look"), st.just("{}")),
    st.builds(ToolCallFinished, st.sampled_from(["c", "d"]), st.just("look"), st.booleans()),
    st.just(PlanChanged((PlanEntry("x"),))),
    st.just(ContextPressure("warning", 0.85, 85, 100)),
    st.just(UsageChanged(1, 2, 0.1, 3.0)),
    st.builds(Lagged, st.integers(1, 5)),
    st.builds(TurnFinished, st.sampled_from(TURNS), st.just(TurnState.FAILED)),
)


def log_events(session: Session, turn: str) -> st.SearchStrategy[object]:
    return st.one_of(
        st.just(said("user", turn=turn)),
        st.just(said("assistant", turn=turn)),
        st.just(said("assistant", "c", "d", turn=turn)),
        st.just(said("assistant", "c", "c", turn=turn)),
        st.just(said("tool", result_of="c", turn=turn)),
        st.just(ToolStarted("c", "c", "look", "workspace")),
        st.builds(lambda ok: invoked(session, "c", ok=ok), st.booleans()),
        st.just(PartialText(turn, "ha")),
        st.just(TurnResumed(turn)),
        st.just(TurnEnded(turn, TurnState.FAILED, "transient", "no", ("go",))),
        st.just(ToolHeld("c", "look", "{}", "?", NOW, hold_id="h")),
        st.just(HoldAnswered("c", approved=True, hold_id="h")),
        st.just(ProviderUsage("p", "m", 1, TokenUsage(3, 4), 0.5)),
        st.just(SubagentEvent("started", "a-1", "s", "a", "x", "running")),
        st.just(SubagentEvent("finished", "a-1", "s", "a", "x", "completed", summary="done")),
        st.just(Feedback("judge", "hm")),
        st.just(HistoryCompacted("sum", 1, 1, "deterministic", "manual")),
    )


@given(data=st.data())
def test_what_was_watched_is_what_is_rebuilt(data: st.DataObject) -> None:
    """Whatever came live, lost, late or in the wrong moment: after the turn's end the two views are equal."""
    session = Session()
    watched = Projection()
    for turn in TURNS[: data.draw(st.integers(1, 2), label="turns")]:
        for event in [
            started(turn),
            *data.draw(st.lists(log_events(session, turn), max_size=8), label="log"),
            TurnEnded(turn, TurnState.FAILED, "bug", "no", ("go",)),
        ]:
            with stamped(turn_id=turn):
                session.dispatch(event)
            for live in data.draw(st.lists(live_events, max_size=3), label="live"):
                if data.draw(st.booleans(), label="catch up"):
                    watched.catch_up(session)
                watched.add_live(live)  # type: ignore[arg-type]  # the strategy makes live events
        watched.catch_up(session)
        # What comes late, after the ending was read.
        watched.add_live(StatusChanged("thinking", turn, 1))
        for live in data.draw(st.lists(live_events, max_size=3), label="late"):
            if not isinstance(live, StatusChanged | TurnFinished):
                watched.add_live(live)  # type: ignore[arg-type]  # the strategy makes live events
        assert watched.view() == project(session)
        assert watched.view().live is None


@pytest.mark.parametrize(
    "answers",
    [
        [Answer("thinking", [("note", {"text": "one"}), ("spoil", {})]), "all done"],
        [Answer("half an ans", error=ModelCallError("cut", kind="connection"))],
        [Answer(error=ModelCallError("no", kind="authentication"))],
    ],
    ids=["completed", "partial", "failed"],
)
@pytest.mark.parametrize("pace", [1, 3, 1000])
def test_a_real_run_that_was_watched_is_what_is_rebuilt(answers: list[Answer | str], pace: int) -> None:
    """The screen reads the log at every event, now and then, or only at the end."""
    feed, watched = LiveFeed(), Projection()
    screen = feed.subscribe()
    with AGENT.run("go", provider=ScriptedProvider(answers), watch=feed.publish) as run:
        session = run.execution_state.session
        feed.close()
        for number, each in enumerate(screen):
            watched.add_live(each)
            if number % pace == 0:
                watched.catch_up(session, upto=min(watched.seq + 2, session.head))
        assert watched.catch_up(session).view() == project(session)


# --- while it runs ------------------------------------------------------------------------------------------


def test_text_streams_until_the_log_has_it() -> None:
    """Deltas are shown as being written; the answer takes their place and nothing is shown twice."""
    session, watched = Session(), Projection()
    session.dispatch_all((started(), said("user")))
    watched.catch_up(session)
    for each in (StatusChanged("thinking", "t", 1), TextDelta("hel"), ReasoningDelta("hm"), TextDelta("lo")):
        watched.add_live(each)
    live = watched.view().live
    assert live is not None
    assert (live.status, live.text, live.reasoning) == ("thinking", "hello", "hm")
    session.dispatch(said("assistant", text="hello"))
    watched.catch_up(session)
    watched.add_live(TextDelta("lo"))
    live = watched.view().live
    assert live is not None
    assert live.text == ""
    assert [each.text for each in items(watched.view(), "draft")] == ["hello"]


def test_a_tool_runs_until_the_log_has_its_end() -> None:
    """A call is pending, runs, and is kept or not; the live side never says more than the log in the end."""
    session, watched = Session(), Projection()
    session.dispatch_all((started(), said("assistant", "c")))
    watched.catch_up(session)
    assert items(watched.view(), "tool")[0].status == "pending"
    watched.add_live(StatusChanged("running_tools", "t", 1))
    watched.add_live(ToolCallBegan("c", "look", "{}"))
    live = watched.view().live
    assert live is not None
    assert [each.call_id for each in live.running] == ["c"]
    session.dispatch(ToolStarted("c", "c", "look", "workspace"))
    assert items(watched.catch_up(session).view(), "tool")[0].status == "running"
    session.dispatch_all((invoked(session, "c"), said("tool", result_of="c", text="seen")))
    view = watched.catch_up(session).view()
    assert (items(view, "tool")[0].status, items(view, "tool")[0].text) == ("kept", "seen")
    assert view.live is not None
    assert view.live.running == ()


# --- nothing flatters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (TurnEnded("t", TurnState.COMPLETED), "answer"),
        (None, "draft"),
        (TurnEnded("t", TurnState.PARTIAL_FAILED, "incomplete", "x", ("y",)), "partial"),
        (TurnEnded("t", TurnState.FAILED, "bug", "x", ("y",)), "partial"),
        (TurnEnded("t", TurnState.INTERRUPTED, "crash", "x", ("y",)), "partial"),
        (TurnEnded("t", TurnState.TIMED_OUT, "deadline", "x", ("y",)), "partial"),
    ],
)
def test_only_a_completed_turn_shows_its_text_as_an_answer(ending: TurnEnded | None, kind: str) -> None:
    """The same words are a draft while the turn is open, and partial when it failed."""
    events: Sequence[object] = (
        started(),
        said("user"),
        said("assistant"),
        *([] if ending is None else [ending]),
    )
    view = view_of(*events)
    assert [each.kind for each in view.turns[0].items if each.text == "text" and each.kind != "user"] == [
        kind
    ]
    assert view.answer == ("text" if kind == "answer" else None)


def test_an_ending_without_evidence_is_not_shown_as_completed() -> None:
    """The record claims it, the log does not show it, and the screen says so."""
    view = view_of(started(), said("user"), TurnEnded("t", TurnState.COMPLETED))
    assert view.state is TurnState.UNFINISHED
    assert items(view, "ending")[0].status == "unfinished"
    assert "lacks evidence: clean_answer" in render_text(view)


def test_text_that_was_cut_off_is_partial_and_never_an_answer() -> None:
    """It is there to be read, marked as what it is."""
    script = ScriptedProvider([Answer("half an ans", error=ModelCallError("cut", kind="connection"))])
    with AGENT.run("go", provider=script) as run:
        view = project(run.execution_state.session)
    assert [each.text for each in items(view, "partial")] == ["half an ans"]
    assert (view.state, view.answer) == (TurnState.PARTIAL_FAILED, None)
    text = render_text(view)
    assert "!! partial   not an answer, cut off: half an ans" in text
    assert f"next      treenail resume {run.id}" in text


# --- what is in it ------------------------------------------------------------------------------------------


def test_a_run_with_tools_shows_what_was_kept_and_what_was_undone(tmp_path: Path) -> None:
    """Each call with its outcome and a way to its diff; usage and cost are summed up."""
    script = ScriptedProvider(
        [
            Answer("I write.", [("note", {"text": "one"}), ("spoil", {})], cost_usd=0.25),
            Answer("done", cost_usd=0.25),
        ]
    )
    with AGENT.run("go", provider=script, workspace=tmp_path, limits=Limits(max_cost_usd=5.0)) as run:
        view = project(run.execution_state.session)
    kept, undone = items(view, "tool")
    assert (kept.title, kept.status, kept.is_good, kept.text) == ("note", "kept", True, "noted")
    assert kept.diff == kept.call_id == "call_1_1"
    assert (undone.title, undone.status, undone.is_good) == ("spoil", "failed", False)
    assert [each.kind for each in view.turns[0].items if each.kind != "ceilings"] == [
        "user",
        "model",
        "text",
        "tool",
        "tool",
        "model",
        "answer",
        "ending",
    ]
    assert (view.usage.model_calls, view.usage.cost_usd) == (2, 0.5)
    assert view.turns[0].task == "go"


def test_a_hold_is_a_question_until_it_is_answered(tmp_path: Path) -> None:
    """Held, answered and resumed: one item for the question, and both endings in the history."""
    log, asking = MemoryLog(), Permissions(PermissionMode.ASK)
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "done"])
    with AGENT.run("go", provider=script, store=log, permissions=asking) as run:
        session = run.execution_state.session
        view = project(session)
        assert (view.state, items(view, "hold")[0].status) == (TurnState.HELD, "waiting")
        answer_hold(session, "call_1_1", approved=True)
        assert items(project(session), "hold")[0].status == "approved"
    with AGENT.resume(log, run.id, provider=script, permissions=asking) as again:
        view = project(again.execution_state.session)
    assert [each.status for each in items(view, "ending")] == ["held", "completed"]
    assert view.answer == "done"


def test_judges_children_compactions_and_trouble_have_their_items() -> None:
    """Whatever a person would ask about is there, good or not."""
    view = view_of(
        started(),
        Feedback("critic", "look again", severity="warning"),
        CompletionChecked("tests", False, "two are red"),
        JudgeEvent("critic", "feedback", "failed", "timeout"),
        NestedEvaluated("critic", "p", "a", None, True, usage=TokenUsage(5, 6), cost_usd=0.01),
        HistoryCompacted("what was", 1, 2, "deterministic", "pressure"),
        SubagentEvent("started", "a-1", "s", "helper", "x", "running"),
        SubagentEvent(
            "timed_out", "a-1", "s", "helper", "x", "timed_out", reason="late", next_actions=("retry",)
        ),
        AttentionNeeded("stuck", ("a.txt",), ("look",)),
    )
    found = [(each.kind, each.status, each.is_good) for each in view.turns[0].items]
    assert found == [
        ("feedback", "warning", False),
        ("check", "incomplete", False),
        ("judge", "failed", False),
        ("compaction", "", True),
        ("subagent", "timed_out", False),
        ("attention", "", False),
    ]
    assert [(each.subagent_id, each.status) for each in view.subagents] == [("a-1", "timed_out")]
    assert (view.judges_usage.model_calls, view.judges_usage.cost_usd) == (1, 0.01)


def test_a_call_id_that_is_used_twice_makes_two_calls() -> None:
    """Each result goes to the oldest call that waits for one."""
    session = Session()
    session.dispatch_all(
        (started(), said("assistant", "c"), invoked(session, "c"), said("tool", result_of="c", text="1"))
    )
    session.dispatch_all(
        (said("assistant", "c"), invoked(session, "c", ok=False), said("tool", result_of="c", text="2"))
    )
    found = [(each.status, each.text) for each in items(project(session), "tool")]
    assert found == [("kept", "1"), ("failed", "2")]


def test_child_sessions_are_shown_below_their_parent() -> None:
    """The tree is read from the store."""
    log = MemoryLog()
    parent = Session(log=log)
    child = Session(log=log, parent=parent)
    child.dispatch(started("below"))
    parent.dispatch(started("above"))
    tree = read_tree(log, parent.session_id)
    assert [each.view.session_id for each in tree.children] == [str(child.session_id)]
    assert [each.summary.state for each in (tree, *tree.children)] == ["running", "running"]
    assert read_tree(log, parent.session_id, depth=0).children == ()
    assert json.loads(json.dumps(tree.to_data()))["children"][0]["task"] == "the task"


def test_a_view_is_plain_data_and_a_prefix_of_a_log_is_shown_as_it_was() -> None:
    """JSON holds all of it, at every event of a run."""
    script = ScriptedProvider([Answer("", [("note", {"text": "one"}), ("spoil", {})]), "done"])
    with AGENT.run("go", provider=script) as run:
        session = run.execution_state.session
        for upto in range(session.head + 1):
            past = Session.open(session.log, session.session_id, read_only=True, upto=upto)
            data = json.loads(json.dumps(project(past).to_data()))
            assert data["seq"] == upto
            assert (data["state"] == "completed") == (upto == session.head)
            assert (data["answer"] is not None) == (upto == session.head)
        assert data["turns"][0]["items"][-1]["kind"] == "ending"

"""Endings are what the log shows: one table decides, and no truncated log reads as completed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args
from uuid import UUID

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent, tool
from treenail.codec import FrozenDict
from treenail.containment import StopReason
from treenail.conversation import (
    InnerMessage,
    ToolCallRecord,
    enable_inner_message_recording,
    inner_message_append,
)
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    HoldRequired,
    IllegalEndingError,
    ModelCallError,
    OutputParseError,
    PromptEvaluationError,
    PromptRenderError,
    ReadOnlyError,
    RestoreFailedError,
    ThrottleError,
    UsageError,
)
from treenail.history import diagnose, project
from treenail.log import Envelope, MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers.errors import FailureKind
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, Session, Snapshot, stamped
from treenail.tools import HoldAnswered, ToolHeld, ToolInvoked, ToolResult, ToolStarted
from treenail.turns import (
    EVIDENCE,
    InnerLoop,
    PartialText,
    TurnEnded,
    TurnResumed,
    TurnStarted,
    TurnState,
    close_crashed_turn,
    derive_turn,
    end_turn,
    ending_for,
    newest_turn,
    turn_state,
)
from treenail.turns.states import CAUSES, ENDINGS, Ending

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = Path(__file__).parents[2] / "docs" / "endings.md"


def started(turn: str = "t", evaluation: str = "") -> TurnStarted:
    return TurnStarted(turn, evaluation or f"e-{turn}", "agent", "task", "p", "m")


def said(role: str, *calls: str, result_of: str | None = None, turn: str = "t") -> InnerMessage:
    return InnerMessage(
        role,  # type: ignore[arg-type]  # the tests name roles in words
        "text",
        f"e-{turn}",
        0,
        tool_calls=tuple(ToolCallRecord(each, "look", "{}") for each in calls),
        tool_call_id=result_of,
        created_at=NOW,
    )


def begun(call: str) -> ToolStarted:
    return ToolStarted(call, f"attempt-{call}", "look", "workspace")


def over(session: Session, call: str) -> ToolInvoked:
    return ToolInvoked(
        "",
        "",
        "look",
        FrozenDict(),
        ToolResult.ok(None),
        session.session_id,
        NOW,
        None,
        call,
        attempt_id=f"attempt-{call}",
    )


def session_of(*events: object) -> Session:
    session = Session()
    session.dispatch_all(events)
    return session


def events_of(session: Session) -> list[str]:
    return [envelope.type for envelope, _ in session.events()]


# --- the table is whole ---------------------------------------------------------------------------------


def test_every_state_has_a_row_and_every_row_names_evidence_that_exists() -> None:
    """Nothing outside the table can be an ending."""
    assert set(ENDINGS) == set(TurnState)
    assert {name for each in ENDINGS.values() for name in each.evidence} <= set(EVIDENCE)
    assert set(EVIDENCE) == {name for each in ENDINGS.values() for name in each.evidence}


def test_no_cause_ends_a_turn_as_completed_or_unfinished() -> None:
    """A stop is never a success, and never nothing."""
    for each in CAUSES.values():
        assert not {each.state, each.with_text} & {TurnState.COMPLETED, TurnState.UNFINISHED}
        assert each.next_actions, each.kind


def test_only_completed_is_final_and_only_an_unfinished_turn_can_end() -> None:
    """Whatever else stopped can be resumed, which makes it unfinished again."""
    for state, rule in ENDINGS.items():
        if state is TurnState.COMPLETED:
            assert rule.then == ()
        elif state is TurnState.UNFINISHED:
            assert set(rule.then) == set(TurnState) - {TurnState.UNFINISHED}
        else:
            assert rule.then == (TurnState.UNFINISHED,)


def test_every_stop_reason_of_the_containment_is_a_cause() -> None:
    """All eight of them, each with its own kind."""
    assert len(StopReason) == 8
    for each in StopReason:
        assert ending_for(str(each)).error_kind == each


def endings_page() -> str:
    """Render the tables as Markdown, for `docs/endings.md`."""
    lines = [
        "| state | meaning | evidence in the log | without it | may become | shown as |",
        "|" + "---|" * 6,
    ]
    for each in ENDINGS.values():
        evidence = "; ".join(EVIDENCE[name].meaning for name in each.evidence)
        then = ", ".join(f"`{state.value}`" for state in each.then) or "nothing: it is final"
        lines.append(
            f"| `{each.state.value}` | {each.meaning} | {evidence} | `{each.otherwise.value}` | {then} "
            f"| {each.shown_as} |"
        )
    lines += ["", "| kind | cause | ends as | with text | next |", "|" + "---|" * 5]
    for cause in CAUSES.values():
        actions = "; ".join(f"`{each}`" if "treenail" in each else each for each in cause.next_actions)
        lines.append(
            f"| `{cause.kind}` | {cause.meaning} | `{cause.state.value}` | `{cause.with_text.value}` "
            f"| {actions} |"
        )
    lines += ["", "```mermaid", "stateDiagram-v2", "    [*] --> unfinished"]
    for each in ENDINGS.values():
        lines += [f"    {each.state.value} --> {state.value}" for state in each.then]
        if not each.then:
            lines.append(f"    {each.state.value} --> [*]")
    return "\n".join([*lines, "```", ""])


def test_the_page_shows_the_table_as_it_is() -> None:
    """docs/endings.md is what endings_page() writes; paste that between the marks when this fails."""
    match = re.search(r"<!-- endings -->\n(.*)<!-- /endings -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert match is not None
    assert match[1].strip() == endings_page().strip()


# --- from a cause to an ending --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "half an ans"], ids=["without text", "with text"])
@pytest.mark.parametrize("kind", [each for each in get_args(FailureKind) if each != "throttled"])
def test_each_failure_of_a_provider_keeps_its_kind(kind: str, text: str) -> None:
    """With text it is partial, without it is plain; the text is kept either way."""
    ending = ending_for(ModelCallError("no", kind=kind, partial=text), session_id="S")
    assert ending.error_kind == kind
    assert ending.state is (TurnState.PARTIAL_FAILED if text else TurnState.FAILED)
    assert (ending.partial_text, ending.details) == (text, "no")
    assert "treenail resume S" in ending.next_actions


@pytest.mark.parametrize(
    ("cause", "stop_reason", "state", "kind"),
    [
        (ThrottleError("slow", kind="rate_limit"), None, TurnState.FAILED, "rate_limit"),
        (ThrottleError("slow", kind="quota_exhausted"), None, TurnState.FAILED, "quota_exhausted"),
        (ThrottleError("slow", kind="timeout"), None, TurnState.FAILED, "throttle_timeout"),
        (ThrottleError("slow", kind="unknown"), None, TurnState.FAILED, "throttled"),
        (ModelCallError("no", kind="connection"), "provider_error", TurnState.FAILED, "provider_error"),
        (ModelCallError("no", kind="hold"), None, TurnState.FAILED, "provider_error"),
        (PromptEvaluationError("no"), None, TurnState.FAILED, "provider_error"),
        (PromptEvaluationError("late", phase="tool"), None, TurnState.TIMED_OUT, "deadline"),
        (PromptEvaluationError("spent", phase="budget"), None, TurnState.FAILED, "budget_exceeded"),
        (OutputParseError("no"), None, TurnState.PARTIAL_FAILED, "output_parse"),
        (PromptRenderError("no"), None, TurnState.FAILED, "configuration_error"),
        (UsageError("no"), None, TurnState.FAILED, "configuration_error"),
        (CallRefused("no", stop_reason="circuit_open"), None, TurnState.FAILED, "circuit_open"),
        (CallRefused("no", stop_reason="timeout"), None, TurnState.TIMED_OUT, "timeout"),
        (CallRefused("no"), None, TurnState.FAILED, "halted"),
        (BudgetExceededError("no", exceeded_dimension="total"), None, TurnState.FAILED, "budget_exceeded"),
        (BudgetExceededError("no", exceeded_dimension="deadline"), None, TurnState.TIMED_OUT, "deadline"),
        (DeadlineExceededError("late"), None, TurnState.TIMED_OUT, "deadline"),
        (DeadlineExceededError("late"), "timeout", TurnState.TIMED_OUT, "timeout"),
        (CancelledByToken("stop"), None, TurnState.INTERRUPTED, "aborted"),
        (CancelledByToken("stop"), "timeout", TurnState.TIMED_OUT, "timeout"),
        (CancelledByToken("stop"), "interrupt", TurnState.INTERRUPTED, "interrupt"),
        (CancelledByToken("stop"), "terminated", TurnState.INTERRUPTED, "terminated"),
        (KeyboardInterrupt(), None, TurnState.INTERRUPTED, "interrupt"),
        (KeyboardInterrupt(), "terminated", TurnState.INTERRUPTED, "terminated"),
        (SystemExit(), None, TurnState.INTERRUPTED, "cancelled"),
        (HoldRequired("c", "look"), None, TurnState.HELD, "hold"),
        (RestoreFailedError("stuck"), None, TurnState.FAILED, "restore_failed"),
        (ZeroDivisionError("oops"), None, TurnState.FAILED, "bug"),
        ("iteration_cap", None, TurnState.FAILED, "iteration_cap"),
        ("incomplete", None, TurnState.PARTIAL_FAILED, "incomplete"),
        ("crash", None, TurnState.INTERRUPTED, "crash"),
    ],
)
def test_every_cause_has_its_own_ending(
    cause: BaseException | str, stop_reason: str | None, state: TurnState, kind: str
) -> None:
    """The table decides, whoever asks."""
    ending = ending_for(cause, stop_reason=stop_reason)
    assert (ending.state, ending.error_kind) == (state, kind)
    assert ending.details
    assert ending.next_actions


def test_a_cancellation_that_nobody_explains_is_cancelled() -> None:
    """It is told apart from Ctrl-C and from an abort."""

    async def cancelled() -> Ending:
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class() as error:
                ending = ending_for(error)
                raise
        return ending

    assert anyio.run(cancelled).error_kind == "cancelled"


def test_a_bug_is_named_and_a_hold_says_which_call_to_answer() -> None:
    """What a person needs to find it stands in the ending."""
    assert ending_for(ZeroDivisionError("oops")).details == "ZeroDivisionError: oops"
    held = ending_for(HoldRequired("call-7", "look", reason="may it?"), session_id="S")
    assert held.next_actions[0] == "treenail hold answer S --call call-7 --yes"
    assert "may it?" in held.details


def test_an_unknown_cause_is_refused() -> None:
    """A kind that is not in the table ends nothing."""
    with pytest.raises(UsageError, match="'tired' is not a cause"):
        ending_for("tired")


# --- evidence -------------------------------------------------------------------------------------------


ANSWERED = (started(), said("user"), said("assistant", "c"), said("tool", result_of="c"), said("assistant"))


@pytest.mark.parametrize(
    ("events", "ended", "state", "missing"),
    [
        (ANSWERED, TurnEnded("t", TurnState.COMPLETED), TurnState.COMPLETED, ()),
        (
            (started(), said("user")),
            TurnEnded("t", TurnState.COMPLETED),
            TurnState.UNFINISHED,
            ("clean_answer",),
        ),
        (
            (started(), said("assistant", "c"), said("assistant")),
            TurnEnded("t", TurnState.COMPLETED),
            TurnState.UNFINISHED,
            ("answered_calls",),
        ),
        (
            (started(), said("assistant", "c", "c"), said("tool", result_of="c"), said("assistant")),
            TurnEnded("t", TurnState.COMPLETED),
            TurnState.UNFINISHED,
            ("answered_calls",),
        ),
        (
            (started(),),
            TurnEnded("t", TurnState.PARTIAL_FAILED, "transient", "x"),
            TurnState.FAILED,
            ("text",),
        ),
        (
            (*ANSWERED, PartialText("t", "hal")),
            TurnEnded("t", TurnState.PARTIAL_FAILED, "transient", "x"),
            TurnState.PARTIAL_FAILED,
            (),
        ),
        (
            ANSWERED,
            TurnEnded("t", TurnState.PARTIAL_FAILED, "incomplete", "x"),
            TurnState.PARTIAL_FAILED,
            (),
        ),
        (
            ANSWERED,
            TurnEnded("t", TurnState.PARTIAL_FAILED, "transient", "x"),
            TurnState.FAILED,
            ("text",),
        ),
        ((started(),), TurnEnded("t", TurnState.FAILED), TurnState.FAILED, ("kind",)),
        ((started(),), TurnEnded("t", TurnState.HELD, "hold"), TurnState.UNFINISHED, ("hold",)),
        (
            (started(), ToolHeld("c", "look", "{}", "may it?", NOW)),
            TurnEnded("t", TurnState.HELD, "hold"),
            TurnState.HELD,
            (),
        ),
        (
            (started(),),
            TurnEnded("t", TurnState.TIMED_OUT, "deadline"),
            TurnState.TIMED_OUT,
            ("next_actions",),
        ),
        ((started(),), TurnEnded("other", TurnState.FAILED, "bug"), TurnState.UNFINISHED, ()),
    ],
)
def test_a_claim_is_believed_as_far_as_its_evidence_goes(
    events: Sequence[object], ended: TurnEnded, state: TurnState, missing: tuple[str, ...]
) -> None:
    """What is missing is named, and the turn is what the log does show."""
    derived = newest_turn(session_of(*events, ended))
    assert derived is not None
    assert (derived.state, derived.missing) == (state, missing)


def test_the_evidence_names_the_events_that_show_it() -> None:
    """Sequence numbers lead a person to the place in the log."""
    derived = newest_turn(session_of(*ANSWERED, TurnEnded("t", TurnState.COMPLETED)))
    assert derived is not None
    assert derived.evidence == {"start": (1,), "ending": (6,), "clean_answer": (5,), "answered_calls": ()}
    assert derived.is_as_claimed


@pytest.mark.parametrize(
    "goes_on",
    [TurnResumed("t"), said("tool", result_of="c"), said("assistant"), said("user")],
    ids=["resumed", "tool", "assistant", "user"],
)
def test_a_turn_that_goes_on_after_its_ending_is_unfinished_again(goes_on: object) -> None:
    """An ending counts only while nothing of its turn comes after it."""
    session = session_of(started(), said("assistant", "c"), TurnEnded("t", TurnState.FAILED, "transient"))
    assert turn_state(session) is TurnState.FAILED
    session.dispatch(goes_on)
    assert turn_state(session) is TurnState.UNFINISHED


def test_what_others_write_after_an_ending_does_not_reopen_it() -> None:
    """An answer to a hold, a recovered call, and a later turn that closes an orphan: the turn is over."""
    session = session_of(started(), said("assistant", "c"), ToolHeld("c", "look", "{}", "may it?", NOW))
    session.dispatch(TurnEnded("t", TurnState.HELD, "hold"))
    session.dispatch(HoldAnswered("c", approved=True))
    session.dispatch(over(session, "other"))
    with stamped(turn_id="next"):
        session.dispatch(said("tool", result_of="c"))
    assert turn_state(session) is TurnState.HELD


def test_the_newest_turn_counts_and_older_ones_can_be_asked_for() -> None:
    """A failed turn stays failed when a later one completes."""
    second = (
        started("u"),
        said("user", turn="u"),
        said("assistant", turn="u"),
        TurnEnded("u", TurnState.COMPLETED),
    )
    session = session_of(started(), TurnEnded("t", TurnState.FAILED, "bug"), *second)
    assert turn_state(session) is TurnState.COMPLETED
    assert derive_turn(session.events(), "t").state is TurnState.FAILED
    assert derive_turn(session.events(), "nobody").missing == ("start",)
    assert turn_state(Session()) is TurnState.UNFINISHED


def test_a_conversation_that_came_out_of_a_snapshot_is_evidence_as_well() -> None:
    """A session that took over a conversation has its messages, though not as events."""
    session = session_of(started(), said("user"), said("assistant"))
    twin = session.clone()
    assert turn_state(twin) is TurnState.UNFINISHED
    end_turn(twin, "t", ending_for(None))
    assert turn_state(twin) is TurnState.COMPLETED
    assert turn_state(twin.clone()) is TurnState.COMPLETED


@pytest.mark.parametrize("then", ["resumed", "as it is"])
def test_what_a_snapshot_brought_reads_the_same_everywhere(then: str) -> None:
    """The state, the view and the report agree on a conversation that has no events of its own here."""
    session = session_of(started(), said("user"), said("assistant", "c"), said("tool", result_of="c"))
    session.dispatch_all([said("assistant"), TurnEnded("t", TurnState.COMPLETED)])
    twin = Session()
    twin[InnerMessage].register(InnerMessage, inner_message_append)
    if then == "resumed":
        # The snapshot of a run has its messages; the turn that takes them up begins after them.
        twin.rollback(Snapshot.from_json(session.snapshot().to_json()))
        assert project(twin).answer is None
        assert diagnose(twin).check("turn_completion").classification == "taken_over"
        twin.dispatch_all([started("u", "e-t"), TurnEnded("u", TurnState.COMPLETED)])
    else:
        twin = session.clone()
    view, report = project(twin), diagnose(twin)
    assert turn_state(twin) is view.state is TurnState.COMPLETED
    assert view.answer == "text"
    kinds = [each.kind for each in view.turns[-1].items]
    assert kinds == ["restored", "user", "text", "tool", "answer", "ending"]
    assert len(view.turns) == 1
    assert (report.status, report.check("tool_pairing").status) == ("ready", "passed")


def test_a_message_that_is_dispatched_again_with_another_status_tells_nothing_new() -> None:
    """Marking a call as completed neither asks for it again nor reopens the turn."""
    asked = said("assistant", "c")
    marked = replace(asked, tool_calls=(replace(asked.tool_calls[0], status="completed"),))
    answer = said("assistant")
    session = session_of(started(), said("user"), asked, said("tool", result_of="c"), marked, answer)
    end_turn(session, "t", ending_for(None))
    session.dispatch(answer)
    assert turn_state(session) is project(session).state is TurnState.COMPLETED
    kinds = [each.kind for each in project(session).turns[0].items]
    assert kinds == ["user", "text", "tool", "answer", "ending"]


# --- asking costs what was logged since -----------------------------------------------------------------


class Counting(MemoryLog):
    """A log that counts the events that are read from it."""

    count = 0

    def read(self, session_id: UUID, *, after: int = 0, upto: int | None = None) -> Iterator[Envelope]:
        for each in super().read(session_id, after=after, upto=upto):
            self.count += 1
            yield each


def test_asking_how_a_turn_stands_reads_each_of_its_events_once() -> None:
    """However long the turn is: whoever asks again, and whoever ends it, reads what came since."""
    log = Counting()
    session = Session(log=log)
    session.dispatch_all([started("s"), *(said("user", turn="s") for _ in range(50))])
    session.dispatch_all([started(), *(said("user") for _ in range(100))])
    assert turn_state(session) is TurnState.UNFINISHED
    # The turn's own, and nothing of the turn before.
    assert log.count == 101
    session.dispatch(said("assistant"))
    end_turn(session, "t", ending_for(None))
    assert turn_state(session) is TurnState.COMPLETED
    assert log.count == 101 + 2


def test_a_turn_that_runs_ends_without_reading_its_log_again() -> None:
    """Every event is read once on its way to the model, and the ending reads the newest ones only."""

    @tool(effects="none")
    def look() -> str:
        """Look."""
        return "seen"

    rounds = 40
    script = [Answer("", [("look", {})]) for _ in range(rounds)]
    log = Counting()
    session = Session(log=log)
    prompt = Agent("looker", tools=[look]).prompt
    provider = ScriptedProvider([*script, Answer("half", error=ModelCallError("cut"))])
    loop = InnerLoop(ExecutionState(session), provider, prompt)
    assert anyio.run(loop.run, "go").state is TurnState.PARTIAL_FAILED
    assert session.head > 4 * rounds
    assert log.count <= session.head + 10


# --- no prefix is completed -----------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str | None, object]]:
    """Logs of one to three turns, with every kind of event in nearly any order, stamped or not."""
    events: list[tuple[str | None, object]] = []
    for number in range(draw(st.integers(1, 3))):
        turn = f"t{number}"
        stamp = turn if draw(st.booleans()) else None
        states = st.sampled_from([each for each in TurnState if each is not TurnState.UNFINISHED])
        one: st.SearchStrategy[object] = st.one_of(
            st.builds(said, st.just("assistant"), turn=st.just(turn)),
            st.builds(said, st.just("assistant"), st.just("c"), turn=st.just(turn)),
            st.builds(said, st.just("tool"), result_of=st.just("c"), turn=st.just(turn)),
            st.builds(said, st.just("user"), turn=st.just(turn)),
            st.just(PartialText(turn, "hal")),
            st.just(TurnResumed(turn)),
            st.just(begun("c")),
            st.just(over(Session(), "c")),
            st.just(ToolHeld("c", "look", "{}", "may it?", NOW)),
            st.builds(
                TurnEnded,
                st.just(turn),
                states,
                st.sampled_from([None, "transient", "hold", "incomplete", "nonsense"]),
                next_actions=st.sampled_from([(), ("go",)]),
            ),
        )
        body = [started(turn), *draw(st.lists(one, max_size=12))]
        if draw(st.booleans()):
            body += [said("assistant", turn=turn), TurnEnded(turn, TurnState.COMPLETED)]
        events += [(stamp, each) for each in body]
    return events


def model_says_completed(events: Sequence[tuple[str | None, object]]) -> bool:
    """The law in other words: the newest turn's last word is its completed ending, after a clean answer."""
    begin = max(place for place, (_, each) in enumerate(events) if isinstance(each, TurnStarted))
    stamp, start = events[begin]
    words: list[object] = []
    waiting = 0
    for _, each in events[begin + 1 :]:
        goes_on = isinstance(each, ToolStarted) and stamp is not None
        if isinstance(each, InnerMessage | TurnEnded | TurnResumed) or goes_on:
            words.append(each)
        if isinstance(each, InnerMessage):
            waiting += len(each.tool_calls) - (each.role == "tool" and waiting > 0)
    talk = [each for each in words if isinstance(each, InnerMessage)]
    return (
        isinstance(start, TurnStarted)
        and bool(talk)
        and (talk[-1].role, talk[-1].tool_calls, waiting) == ("assistant", (), 0)
        and isinstance(words[-1], TurnEnded)
        and (words[-1].turn_id, words[-1].state) == (start.turn_id, TurnState.COMPLETED)
    )


@given(events=histories(), data=st.data())
def test_following_a_turn_and_reading_it_anew_say_the_same(
    events: list[tuple[str | None, object]], data: st.DataObject
) -> None:
    """Whenever it is asked in between, also after the log was taken over by another session."""
    session = Session()
    for stamp, each in events:
        with stamped(turn_id=stamp):
            session.dispatch(each)
        if data.draw(st.booleans(), "asked"):
            newest_turn(session)
        if data.draw(st.integers(0, 9), "moved") == 0:
            session = session.clone()
    anew = Session.open(session.log, session.session_id, read_only=True)
    assert newest_turn(session) == newest_turn(anew)
    (*_, newest) = session[TurnStarted].all()
    assert newest_turn(session) == derive_turn(session.events(), newest.turn_id)
    view = project(session)
    assert view.state is turn_state(session)
    assert diagnose(anew).turns[-1]["state"] == turn_state(anew).value


@given(events=histories())
def test_a_log_cut_off_at_any_event_is_completed_only_with_the_whole_evidence(
    events: list[tuple[str | None, object]],
) -> None:
    """At every cut, of every log: completed means that the newest turn's ending and answer are before it."""
    session = Session()
    for stamp, each in events:
        with stamped(turn_id=stamp):
            session.dispatch(each)
    for cut in range(1, len(events) + 1):
        past = Session.open(session.log, session.session_id, read_only=True, upto=cut)
        assert (turn_state(past) is TurnState.COMPLETED) == model_says_completed(events[:cut])


# --- ending a turn --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        ((started(), said("user")), Ending(TurnState.COMPLETED)),
        ((started(),), Ending(TurnState.UNFINISHED)),
        ((started(),), Ending(TurnState.HELD, "hold")),
        ((started(),), Ending(TurnState.PARTIAL_FAILED, "transient")),
        ((started(),), Ending(TurnState.FAILED, "hold")),
        ((started(),), Ending(TurnState.FAILED)),
        ((started(),), Ending(TurnState.TIMED_OUT, "deadline")),
        (ANSWERED, Ending(TurnState.COMPLETED, "bug")),
        ((started(), TurnEnded("t", TurnState.FAILED, "bug")), Ending(TurnState.INTERRUPTED, "aborted")),
        ((*ANSWERED, TurnEnded("t", TurnState.COMPLETED)), Ending(TurnState.FAILED, "bug")),
        ((), Ending(TurnState.FAILED, "bug")),
        ((started("other"),), Ending(TurnState.FAILED, "bug")),
    ],
)
def test_an_illegal_ending_is_one_clear_error_and_changes_nothing(
    events: Sequence[object], ending: Ending
) -> None:
    """Wrong move, wrong cause or no evidence: the log is as it was."""
    session = session_of(*events)
    before = session.head
    with pytest.raises(IllegalEndingError, match="turn t "):
        end_turn(session, "t", ending)
    assert session.head == before


def test_an_ending_and_its_text_are_one_append_and_derive_to_what_was_asked() -> None:
    """The partial text stands right before the ending that needs it."""
    session = session_of(started(), said("user"))
    ended = end_turn(session, "t", ending_for(ModelCallError("cut", kind="connection"), said="half"))
    assert events_of(session)[-2:] == ["treenail.PartialText", "treenail.TurnEnded"]
    assert turn_state(session) is ended.state is TurnState.PARTIAL_FAILED


def test_ending_a_completed_turn_as_completed_again_changes_nothing() -> None:
    """A resume of a run that is done finds it done."""
    session = session_of(*ANSWERED)
    first = end_turn(session, "t", ending_for(None))
    head = session.head
    assert end_turn(session, "t", ending_for(None)) == first
    assert session.head == head


@given(cause=st.sampled_from(sorted(CAUSES)), text=st.sampled_from(["", "half"]))
def test_every_cause_can_end_a_turn_that_has_its_evidence(cause: str, text: str) -> None:
    """No row of the table is out of reach, and what was asked for is what is derived."""
    session = session_of(*ANSWERED, ToolHeld("c", "look", "{}", "may it?", NOW))
    ended = end_turn(session, "t", ending_for(cause, said=text))
    assert turn_state(session) is ended.state
    assert ended.error_kind == cause
    session.dispatch(TurnResumed("t"))
    end_turn(session, "t", ending_for(None))
    assert turn_state(session) is TurnState.COMPLETED


# --- crashes --------------------------------------------------------------------------------------------


def test_whoever_opens_the_session_next_closes_what_a_crash_left(tmp_path: Path) -> None:
    """The log says interrupted, by a crash, with the calls that were cut off; a resume may still go on."""
    log = SqliteLog(tmp_path / "runs.db")
    dead = Session(log=log)
    dead.dispatch_all((started(), said("user"), said("assistant", "c"), begun("c")))
    dead.close()
    with Session.open(log, dead.session_id) as session:
        ended = close_crashed_turn(session)
        assert ended is not None
        assert (ended.state, ended.error_kind) == (TurnState.INTERRUPTED, "crash")
        assert "cut off: c" in ended.details
        assert f"treenail resume {session.session_id}" in ended.next_actions
        assert turn_state(session) is TurnState.INTERRUPTED
        assert close_crashed_turn(session) is None
        session.dispatch(TurnResumed("t"))
        assert turn_state(session) is TurnState.UNFINISHED
    log.close()


def test_a_turn_that_has_an_ending_is_no_crash() -> None:
    """Nothing is written for a session without turns, or with one that ended or waits."""
    for events in (
        (),
        (*ANSWERED, TurnEnded("t", TurnState.COMPLETED)),
        (started(), TurnEnded("t", TurnState.FAILED, "bug")),
        (started(), ToolHeld("c", "look", "{}", "?", NOW), TurnEnded("t", TurnState.HELD, "hold")),
    ):
        session = session_of(*events)
        head = session.head
        assert close_crashed_turn(session) is None
        assert session.head == head


def test_a_fork_in_the_middle_of_a_turn_is_no_crash_until_it_has_gone_on() -> None:
    """The copy has no ending because it was cut there; what it does itself can crash like any other."""
    session = session_of(started(), said("user"), said("assistant", "c"))
    twin = session.fork(at=2)
    assert close_crashed_turn(twin) is None
    twin.dispatch(said("assistant", "d"))
    assert close_crashed_turn(twin) is not None


def test_a_resume_and_a_new_turn_write_down_the_crash_before_they_go_on() -> None:
    """Whoever opens the session next says what became of the turn, and then goes on."""
    agent = Agent("agent")
    for goes_on in ("resume", "run"):
        log = MemoryLog()
        dead = Session(log=log)
        enable_inner_message_recording(dead)
        dead.dispatch_all((TurnStarted("t", "e-t", "agent", "task", "p", "m"), said("user")))
        dead.close()
        script = ScriptedProvider(["done"])
        if goes_on == "resume":
            run = agent.resume(log, dead.session_id, provider=script)
        else:
            run = agent.run("more", provider=script, store=log, run_id=dead.session_id)
        with run:
            endings = [(e.state, e.error_kind) for e in run.execution_state.session[TurnEnded].all()]
        assert endings == [(TurnState.INTERRUPTED, "crash"), (TurnState.COMPLETED, None)]


def test_a_crashed_turn_cannot_be_closed_by_a_reader_or_while_its_writer_lives() -> None:
    """Only who holds the lease knows that nobody is at work."""
    log = MemoryLog()
    session = Session(log=log)
    session.dispatch(started())
    reader = Session.open(log, session.session_id, read_only=True)
    with pytest.raises(ReadOnlyError):
        close_crashed_turn(reader)
    assert events_of(session) == ["treenail.TurnStarted"]

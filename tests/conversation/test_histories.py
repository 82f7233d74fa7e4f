"""Whole histories, as sessions write them: every prefix can be sent, and what was sent stays a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conversation_kit import NOW, said, session_of, violations
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treenail.conversation import (
    ORPHAN_TEXT,
    BranchSummary,
    HistoryCompacted,
    InnerMessage,
    ProviderUsage,
    ReasoningPart,
    Replayer,
    SubagentEvent,
    ToolCallRecord,
    branch_summary,
    inspect_replay,
    replay,
)
from treenail.conversation.compaction import plan_session
from treenail.conversation.replay import BEGIN_TEXT, UNREADABLE_REASON
from treenail.log import Draft, MemoryLog, this_process_owner
from treenail.state import Session, TokenUsage
from treenail.tools import ToolHeld, ToolStarted
from treenail.turns import PartialText, TurnEnded, TurnState

MODEL, DIALECT = "m", "d"


@dataclass
class History:
    """Writes a session as a loop does, from a list of things that happen to it."""

    session: Session = field(default_factory=session_of)
    sequence: int = 0
    waiting: list[str] = field(default_factory=list)
    sent: list[tuple[int, list[bytes], int]] = field(default_factory=list)
    """What was sent, after which event, and how many breaks there had been."""

    def message(self, message: InnerMessage) -> None:
        self.session.dispatch(replace(message, sequence=self.sequence))
        self.sequence += 1

    def ask(self) -> bool:
        """Send what is there, if a loop would: the calls before are answered."""
        if self.waiting:
            return False
        replayed = replay(self.session, model=MODEL, dialect=DIALECT)
        # A system text alone is sent with a word of ours, in whose place the first request comes.
        items = [each.canonical() for each in replayed.items if (each.text, each.seq) != (BEGIN_TEXT, 0)]
        self.sent.append((self.session.head, items, len(replayed.breaks)))
        self.session.dispatch(ProviderUsage("p", MODEL, 1, TokenUsage(input_tokens=100)))
        return True

    # .. what can happen ..

    def turn(self, text: str) -> None:
        for each in self.waiting:
            self.message(said("tool", ORPHAN_TEXT, result_of=each))
        self.waiting.clear()
        self.message(said("system", "You help."))
        self.message(said("user", text))

    def answer(self, calls: int) -> None:
        if self.sequence and self.ask():
            ids = [f"call_{place}" for place in range(calls)]
            thought = ReasoningPart(MODEL, DIALECT, {"type": "thinking", "thinking": "x"})
            records = tuple(ToolCallRecord(each, "look", '{"path": "a.py"}') for each in ids)
            self.message(
                replace(
                    said("assistant", "" if calls else "done"),
                    tool_calls=records,
                    parts=(thought,),
                    created_at=NOW,
                )
            )
            self.waiting = ids

    def result(self, text: str) -> None:
        if self.waiting:
            call_id = self.waiting.pop()
            self.session.dispatch(ToolStarted(call_id, "a", "look", "workspace"))
            self.message(said("tool", text, result_of=call_id))

    def hold(self, _: str) -> None:
        if self.waiting:
            self.session.dispatch(ToolHeld(self.waiting[-1], "look", "{}", "may it?", NOW))
            self.session.dispatch(TurnEnded("t", TurnState.HELD, "hold"))

    def fail(self, text: str) -> None:
        if self.sequence and self.ask():
            self.session.dispatch(PartialText("t", text or "half"))
            self.session.dispatch(TurnEnded("t", TurnState.PARTIAL_FAILED, "provider_error"))

    def child(self, event: str) -> None:
        self.session.dispatch(SubagentEvent(event, "s", "c", "helper", "dig", event, summary="found"))

    def compact(self, tail: int) -> None:
        plan = plan_session(self.session, keep_tail=tail)
        if plan is not None:
            self.session.dispatch(plan.event(plan.summary(2_000), "pressure"))

    def fork(self, back: int) -> None:
        at = max(self.session.head - back, 0)
        other = self.session
        self.session = other.fork(at=at)
        told = branch_summary(other, at)
        self.sent = [each for each in self.sent if each[0] <= at]
        pending: list[str] = []
        for each in self.session[InnerMessage].all():
            if each.role == "tool":
                pending.remove(each.tool_call_id or "")
            elif each.role == "assistant":
                pending = [call.call_id for call in each.tool_calls]
        self.waiting = pending
        if told is not None:
            self.session.dispatch(told)


_text = st.sampled_from(["", "a", "b\nc"])
_happenings = st.one_of(
    st.tuples(st.just("turn"), _text),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("result"), _text),
    st.tuples(st.just("result"), _text),
    st.tuples(st.just("hold"), _text),
    st.tuples(st.just("fail"), _text),
    st.tuples(st.just("child"), st.sampled_from(["started", "finished", "timed_out", "failed", "detached"])),
    st.tuples(st.just("compact"), st.integers(0, 6)),
    st.tuples(st.just("fork"), st.integers(0, 8)),
)


def written(happenings: list[tuple[str, object]]) -> History:
    history = History()
    for what, with_ in happenings:
        getattr(history, what)(with_)
    return history


@settings(max_examples=150)
@given(st.lists(_happenings, min_size=3, max_size=25))
def test_a_crash_after_any_event_leaves_input_that_every_provider_takes(happenings: list) -> None:
    """The log is cut after each event in turn: what is folded from the rest is valid and says so."""
    session = written(happenings).session
    growing = Replayer(MODEL, DIALECT)
    for seq in range(1, session.head + 1):
        growing.catch_up(session, upto=seq)
        cut = replay(session, upto=seq, model=MODEL, dialect=DIALECT)
        assert growing.input() == cut, "folding on and folding anew agree"
        assert not cut.items or (cut.is_sendable and violations(cut.items) == [])


@settings(max_examples=150)
@given(st.lists(_happenings, min_size=3, max_size=25))
@example([("answer", 3), ("result", ""), ("turn", ""), ("fork", 2), ("fork", 6), ("fail", ""), ("turn", "")])
@example([("fork", 1), ("fail", ""), ("turn", "")])
def test_what_a_loop_sent_is_a_prefix_of_what_it_sends_next(happenings: list) -> None:
    """To the byte, over failures, holds, crashes, forks and subagents; only a reported break ends it."""
    history = written([("turn", "go"), *happenings])
    history.ask()
    for (_, before, breaks), (_, after, later) in zip(history.sent, history.sent[1:], strict=False):
        if breaks == later:
            assert after[: len(before)] == before
    # Nothing but a compaction is an excuse; a fork from before the first message gets its system text late.
    made = replay(history.session, model=MODEL, dialect=DIALECT)
    excuses = [each for each in made.breaks if "another system text" not in each]
    assert len(excuses) == len(history.session[HistoryCompacted].all())
    assert len(made.breaks) - len(excuses) <= 1


@settings(max_examples=60)
@given(st.lists(_happenings, min_size=3, max_size=25))
def test_an_inspection_accounts_for_every_event(happenings: list) -> None:
    """Each event of the log is an item, or is left out for a reason."""
    session = written(happenings).session
    seen = inspect_replay(session, model=MODEL, dialect=DIALECT)
    accounted = {each.seq for each in seen.items} | {each.seq for each in seen.left_out}
    # An earlier summary is what a newer one took the place of.
    assert accounted >= set(range(1, session.head + 1))
    assert sum(seen.left_out_counts.values()) == len(seen.left_out)


@settings(max_examples=60)
@given(st.lists(_happenings, min_size=3, max_size=25), st.integers(0, 6))
def test_a_compaction_never_leaves_a_call_without_its_result(happenings: list, tail: int) -> None:
    """At any time, with any tail: no result is made up for a call that has one."""
    history = written(happenings)
    before = replay(history.session)
    history.compact(tail)
    after = replay(history.session)
    assert set(after.synthetic) <= set(before.synthetic)
    assert [e for e in after.items if e.role == "system"] == [e for e in before.items if e.role == "system"]
    assert violations(after.items) == [] or not after.items


def test_a_fork_is_told_what_the_other_branch_did_and_only_that() -> None:
    history = History(Session(log=MemoryLog()))
    history.turn("first")
    history.answer(1)
    history.result("before the fork")
    at = history.session.head
    history.answer(1)
    history.result("after the fork")
    told = branch_summary(history.session, at)
    assert isinstance(told, BranchSummary)
    assert (told.from_seq, told.to_seq) == (at + 1, history.session.head)
    assert "after the fork" in told.summary
    assert "before the fork" not in told.summary
    assert branch_summary(history.session, history.session.head) is None


def test_the_newest_compaction_alone_counts() -> None:
    history = History()
    for place in range(6):
        history.turn(f"request {place}")
        history.answer(0)
    history.compact(4)
    history.compact(2)
    seen = inspect_replay(history.session)
    assert len(seen.compactions) == 2
    assert sum(each.text.startswith("<summary>") for each in seen.items) == 1
    assert isinstance(seen.compactions[-1], HistoryCompacted)


@settings(max_examples=60)
@given(st.lists(_happenings, min_size=3, max_size=25), st.integers(0, 20))
def test_what_a_prune_leaves_can_be_sent_and_forked(happenings: list, keep: int) -> None:
    """Old events are forgotten: what is left is valid, in the session itself, in a fork and in a clone."""
    session = written(happenings).session
    session.prune(keep_last=keep)
    for each in (session, session.fork(), session.clone()):
        left = replay(each)
        assert not left.items or (left.is_sendable and violations(left.items) == [])
        texts = [item.text for item in left.items]
        assert set(texts) >= {
            m.content for m in session[InnerMessage].all() if m.role == "user" and m.content
        } or (any("<summary>" in text for text in texts))


def test_a_fork_of_a_pruned_session_keeps_its_summary() -> None:
    """The events that the summary stands for are gone in both; the summary is not."""
    history = History()
    for place in range(8):
        history.turn(f"request {place}")
        history.answer(0)
    history.compact(4)
    history.session.prune(keep_last=12)
    fork = history.session.fork()
    assert [each.text for each in replay(fork).items if each.text.startswith("<summary>")]
    assert violations(replay(fork).items) == []


def test_a_message_that_cannot_be_read_is_left_out_for_that_reason() -> None:
    """A log of another version, or a damaged one: what is whole is sent."""
    session = session_of(said("user", "whole"))
    session.close()
    lease = session.log.acquire(session.session_id, owner=this_process_owner(), ttl_s=30)
    session.log.append(lease, [Draft("treenail.InnerMessage", b'{"role": 7}', 0)], expected_seq=1)
    replayed = replay(session)
    assert [each.text for each in replayed.items] == ["whole"]
    assert [(each.seq, each.reason) for each in replayed.left_out] == [(2, UNREADABLE_REASON)]

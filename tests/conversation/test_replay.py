"""What a provider is sent is valid, stable, and made of the clean conversation alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conversation_kit import (
    NOW,
    asked,
    fold,
    long_conversation,
    said,
    sent,
    session_of,
    texts,
    violations,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.conversation import (
    ORPHAN_TEXT,
    BranchSummary,
    ContextPressure,
    HistoryCompacted,
    ImagePart,
    InnerMessage,
    ProviderUsage,
    ReasoningPart,
    Replay,
    ReplayCall,
    Replayer,
    ReplayItem,
    SubagentEvent,
    ToolCallRecord,
    enable_inner_message_recording,
    replay,
)
from treenail.conversation.replay import AUDIT_REASON, BEGIN_TEXT
from treenail.providers.wire_formats import to_anthropic, to_openai_chat, to_openai_responses
from treenail.state import Session, Snapshot, TokenUsage
from treenail.tools import ToolStarted
from treenail.turns import PartialText, TurnEnded, TurnState

AUDIT = [
    ProviderUsage("p", "m", 1, TokenUsage(input_tokens=1)),
    TurnEnded("t", TurnState.FAILED, "provider_error", "x"),
    PartialText("t", "half an answer"),
    ToolStarted("c1", "a1", "look", "workspace"),
]


def ended(event: str, **fields) -> SubagentEvent:
    return SubagentEvent(event, "s1", "child", "helper", "look", event, summary="FOUND", **fields)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (said("user", "u"), "user:u"),
        (said("assistant", "a"), "assistant:a"),
        (HistoryCompacted("s", 1, 2, "deterministic", "manual"), "user:<summary>\ns\n</summary>"),
        (BranchSummary("b", "o", 1, 2), "user:<branch-summary>\nb\n</branch-summary>"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else "",
)
def test_the_table_what_is_replayed(event: object, line: str) -> None:
    """The seed's first row: conversation, compactions and branch summaries reach the provider."""
    assert texts(fold(said("system", "s"), said("user", "before"), event))[-1] == line


@pytest.mark.parametrize("event", ["finished", "failed", "cancelled", "timed_out"])
def test_the_table_endings_of_subagents_are_replayed(event: str) -> None:
    last = fold(said("user"), ended(event)).items[-1]
    assert last.role == "user"
    assert last.text.startswith("<subagent>")
    assert "FOUND" in last.text


@pytest.mark.parametrize("event", ["queued", "started", "detached", "closed", "retried"])
def test_the_table_other_news_of_subagents_is_audit(event: str) -> None:
    """It does not change the prefix; it is counted as left out."""
    replayed = fold(said("user"), ended(event), said("assistant"))
    assert sent(replayed) == sent(fold(said("user"), said("assistant")))
    assert [(each.seq, each.reason) for each in replayed.left_out] == [(2, AUDIT_REASON)]


@pytest.mark.parametrize("event", AUDIT, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("place", range(5))
def test_the_table_audit_never_enters_wherever_it_stands(event: object, place: int) -> None:
    """The seed's second row, at each place, between a call and its result as well."""
    clean = [said("system"), said("user"), said("assistant", "", "c1"), said("tool", result_of="c1")]
    noisy = [*clean[:place], event, *clean[place:]]
    assert sent(fold(*noisy)) == sent(fold(*clean))
    assert fold(*noisy).prefix_hash() == fold(*clean).prefix_hash()
    assert fold(*noisy).breaks == ()


def test_the_table_live_events_never_reach_the_log() -> None:
    """The seed's third row: what is only shown has no place in history."""
    session = session_of(said("user"))
    session.dispatch(ContextPressure("critical", 0.95, 95, 100))
    assert session.head == 1
    assert len(replay(session).left_out) == 0


def test_news_of_a_subagent_waits_until_the_calls_have_their_results() -> None:
    replayed = fold(
        said("user"),
        said("assistant", "", "c1", "c2"),
        said("tool", "r1", result_of="c1"),
        ended("finished"),
        BranchSummary("b", "o", 1, 2),
        said("tool", "r2", result_of="c2"),
        said("assistant", "done"),
    )
    assert [each.role for each in replayed.items] == [
        "user", "assistant", "tool", "tool", "user", "user", "assistant",
    ]  # fmt: skip
    assert replayed.synthetic == ()
    assert violations(replayed.items) == []


def test_a_prompt_without_a_request_is_begun_with_a_word() -> None:
    """A prompt alone, and an answer to it, are input that every provider takes, and stay a prefix."""
    alone = fold(said("system", "Solve it."))
    assert texts(alone) == ["system:Solve it.", f"user:{BEGIN_TEXT}"]
    answered = fold(said("system", "Solve it."), said("assistant", "Solved."))
    assert sent(answered)[:2] == sent(alone)
    further = fold(said("system", "Solve it."), said("assistant", "Solved."), said("user", "More."))
    assert sent(further)[:3] == sent(answered)
    for each in (alone, answered, further):
        assert each.is_sendable
        assert violations(each.items) == []
    assert not fold().is_sendable


def test_audit_events_never_change_what_is_sent() -> None:
    """Between every two messages something is logged; what is sent is the same, to the byte."""
    clean = [said("system"), said("user"), said("assistant", "", "c1"), said("tool", result_of="c1")]
    noisy = [each for pair in zip(clean, AUDIT, strict=True) for each in pair]
    assert [each.canonical() for each in fold(*noisy).items] == [
        each.canonical() for each in fold(*clean).items
    ]
    assert fold(*noisy).prefix_hash() == fold(*clean).prefix_hash()
    assert [each.seq for each in fold(*noisy).left_out] == [2, 4, 6, 8]


def test_replayed_events_are_sent() -> None:
    """The seed's table, the other rows: messages, pairs, the newest compaction, branch summaries."""
    replayed = fold(
        said("system", "s"),
        said("user", "old"),
        HistoryCompacted("first", 1, 2, "deterministic", "manual"),
        said("user", "newer"),
        HistoryCompacted("second", 1, 4, "deterministic", "manual"),
        BranchSummary("tried that", "other", 1, 9),
        said("user", "newest"),
    )
    assert texts(replayed) == [
        "system:s",
        "user:<summary>\nsecond\n</summary>",
        "user:<branch-summary>\ntried that\n</branch-summary>",
        "user:newest",
    ]
    assert len(replayed.breaks) == 2


def test_an_orphan_gets_a_synthetic_result_and_the_log_stays_as_it_is() -> None:
    replayed = fold(said("user"), said("assistant", "", "c1", "c2"), said("tool", "r", result_of="c2"))
    assert texts(replayed) == ["user:text", "assistant:", "tool:r", f"tool:{ORPHAN_TEXT}"]
    assert replayed.synthetic == ("c1",)


def test_a_result_that_nobody_asked_for_is_left_out_and_reported() -> None:
    replayed = fold(said("user"), said("tool", "r", result_of="c9"))
    assert texts(replayed) == ["user:text"]
    assert "no open call" in replayed.left_out[0].reason


def test_thoughts_go_back_only_to_the_model_that_had_them() -> None:
    thought = ReasoningPart(
        "m1", "anthropic.messages", {"type": "thinking", "thinking": "x", "signature": "s"}
    )
    log = [said("user"), said("assistant", "a", parts=(thought,))]
    same = fold(*log, model="m1", dialect="anthropic.messages")
    assert same.items[1].parts == (thought,)
    assert to_anthropic(same.items)[1][1]["content"][0] == dict(thought.payload)
    for model, dialect in (("m2", "anthropic.messages"), ("m1", "openai.responses"), (None, None)):
        assert fold(*log, model=model, dialect=dialect).items[1].parts == ()


def test_pictures_reach_every_wire() -> None:
    picture = ImagePart("image/png", data=b"\x89PNG")
    items = fold(said("user", "look", parts=(picture,))).items
    assert to_openai_chat(items)[0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert to_openai_responses(items)[1][0]["content"][1]["type"] == "input_image"
    assert to_anthropic(items)[1][0]["content"][1]["source"]["media_type"] == "image/png"


def test_another_system_text_is_a_reported_break_and_the_same_one_is_not() -> None:
    same = fold(said("system", "s"), said("user"), said("system", "s"))
    assert texts(same) == ["system:s", "user:text"]
    assert same.breaks == ()
    other = fold(said("system", "s"), said("user"), said("system", "t"))
    assert texts(other) == ["system:t", "user:text"]
    assert len(other.breaks) == 1


def test_replay_of_a_session_reads_its_log_up_to_an_event() -> None:
    session = Session()
    enable_inner_message_recording(session)
    for each in (said("system"), said("user", "one"), AUDIT[0], said("assistant", "two")):
        session.dispatch(each)
    assert texts(replay(session)) == ["system:text", "user:one", "assistant:two"]
    assert texts(replay(session, upto=2)) == ["system:text", "user:one"]


# --- messages that change, go and come back ----------------------------------------------------------


def test_a_message_that_is_recorded_again_is_sent_once() -> None:
    """The seed marks a call as completed by recording its message again: nothing else is sent for it."""
    first = said("assistant", "", "c1")
    done = replace(first, tool_calls=(replace(first.tool_calls[0], status="completed"),))
    replayed = fold(said("user"), first, said("tool", "r", result_of="c1"), done)
    assert texts(replayed) == ["user:text", "assistant:", "tool:r"]
    assert replayed.breaks == ()
    assert replayed.left_out[-1].seq == 4


def test_a_newer_version_takes_the_place_of_a_message_and_is_a_reported_break() -> None:
    first = said("user", "old")
    replayed = fold(first, said("assistant", "a"), replace(first, content="new"))
    assert texts(replayed) == ["user:new", "assistant:a"]
    assert len(replayed.breaks) == 1
    assert replayed.prefix_hash() == fold(said("user", "new"), said("assistant", "a")).prefix_hash()


def test_a_conversation_that_came_out_of_a_snapshot_is_replayed() -> None:
    """A new session that takes over a checkpoint sends what the old one would have sent."""
    messages = [said("system"), said("user", "go"), said("assistant", "", "c1"), said("tool", result_of="c1")]
    messages = [replace(each, sequence=place) for place, each in enumerate(messages)]
    old = session_of(*messages)
    new = session_of()
    new.mutate().rollback(Snapshot.from_json(old.snapshot().to_json()))
    assert sent(replay(new)) == sent(replay(old))
    assert replay(new).breaks == ()
    new.dispatch(replace(said("assistant", "on"), sequence=4))
    assert texts(replay(new))[-1] == "assistant:on"


def test_a_clone_sends_the_same() -> None:
    old = session_of(*(replace(e, sequence=n) for n, e in enumerate(long_conversation(3))))
    assert sent(replay(old.clone())) == sent(replay(old))


def test_a_cleared_conversation_is_gone_and_one_that_is_rolled_back_to_is_there_again() -> None:
    messages = [replace(said("user", f"m{place}"), sequence=place) for place in range(4)]
    session = session_of(*messages)
    kept = session.snapshot()
    session[InnerMessage].clear(lambda message: message.sequence in (1, 2))
    assert texts(replay(session)) == ["user:m0", "user:m3"]
    assert [each.reason for each in replay(session).left_out] == ["taken back by event 5"] * 2
    session[InnerMessage].clear()
    assert texts(replay(session)) == []
    session.rollback(kept, preserve_logs=False)
    assert texts(replay(session)) == [f"user:m{place}" for place in range(4)]
    assert len(replay(session).breaks) == 2


def test_a_conversation_that_was_set_is_what_is_sent() -> None:
    session = session_of(said("user", "old"))
    session[InnerMessage].seed([replace(said("user", "new"), sequence=0)])
    assert texts(replay(session)) == ["user:new"]


def test_catching_up_sees_whatever_anybody_wrote() -> None:
    session = session_of(said("user", "one"))
    replayer = Replayer()
    replayer.catch_up(session)
    assert texts(replayer.input()) == ["user:one"]
    session.dispatch(ended("finished"))
    session.dispatch(AUDIT[0])
    replayer.catch_up(session)
    replayer.catch_up(session)
    assert len(replayer.input().items) == 2
    assert replayer.seq == session.head
    assert replayer.input() == replay(session)


def test_what_was_summarised_is_counted_as_left_out() -> None:
    replayed = fold(said("user"), said("assistant"), HistoryCompacted("s", 1, 2, "deterministic", "manual"))
    assert [(e.seq, e.reason) for e in replayed.left_out] == [
        (1, "summarised by event 3"),
        (2, "summarised by event 3"),
    ]


def test_an_input_stays_as_it_was_when_the_conversation_goes_on() -> None:
    """Nothing is copied for it, and yet nobody can change it."""
    replayer = Replayer()
    replayer.add(1, said("user", "one"))
    replayer.add(2, AUDIT[0])
    before = replayer.input()
    copies = (tuple(before.items), tuple(before.left_out))
    for seq, event in enumerate([said("assistant", "", "c"), AUDIT[0], said("system", "late")], start=3):
        replayer.add(seq, event)
    replayer.add(9, HistoryCompacted("s", 1, 3, "deterministic", "manual"))
    assert (before.items, before.left_out) == copies
    assert before.items[-1].text == "one"
    assert hash(before.items) == hash(copies[0])


def test_a_provider_that_numbers_its_calls_anew_each_time_costs_no_more() -> None:
    """A thousand calls named call_0 get a thousand ids, each found at once."""

    class Counted(dict[str, int]):
        asked = 0

        def __contains__(self, key: object) -> bool:
            Counted.asked += 1
            return super().__contains__(key)

    replayer = Replayer(_used=Counted())
    replayer.add(1, said("user"))
    for seq in range(1_000):
        replayer.add(seq + 2, asked("call_0"))
    ids = {call.call_id for each in replayer.input().items for call in each.calls}
    assert ids == {"call_0", *(f"call_0-{number}" for number in range(2, 1_001))}
    assert Counted.asked <= 2_000


# --- laws ------------------------------------------------------------------------------------------

_ids = st.sampled_from(["c1", "c2", "c3", ""])
_text = st.sampled_from(["", "a", "b"])
_events = st.one_of(
    st.builds(lambda t: said("system", t), st.sampled_from(["s", "s", "t"])),
    st.builds(lambda t: said("user", t), _text),
    st.builds(lambda t, calls: said("assistant", t, *calls), _text, st.lists(_ids, max_size=3)),
    st.builds(
        lambda bad: InnerMessage(
            "assistant", "", "e", 0, tool_calls=(ToolCallRecord("c1", "look", bad),), created_at=NOW
        ),
        st.sampled_from(["", "[1]", "{", '{"a": 1}', "null"]),
    ),
    st.builds(lambda t, call: said("tool", t, result_of=call), _text, _ids),
    st.sampled_from(AUDIT),
    st.builds(lambda to: HistoryCompacted("sum", 1, to, "deterministic", "manual"), st.integers(0, 12)),
    st.just(BranchSummary("branch", "other", 1, 2)),
    st.builds(
        lambda what: SubagentEvent(what, "s1", "child", "helper", "look", "ended", summary="found it"),
        st.sampled_from(["queued", "started", "finished", "failed", "timed_out", "cancelled", "detached"]),
    ),
)


@settings(max_examples=150)
@given(st.lists(_events, max_size=14))
def test_every_prefix_of_every_log_is_input_that_every_provider_takes(events: list[object]) -> None:
    for end in range(len(events) + 1):
        replayed = fold(*events[:end])
        if not replayed.items:
            continue
        assert replayed.is_sendable
        assert violations(replayed.items) == []


@settings(max_examples=150)
@given(st.lists(_events, max_size=14))
def test_what_was_sent_is_a_prefix_of_what_is_sent_next_until_a_reported_break(events: list[object]) -> None:
    replayer = Replayer()
    before: list[bytes] = []
    breaks = 0
    for seq, event in enumerate(events, start=1):
        replayer.add(seq, event)
        now = replayer.input()
        if len(now.breaks) > breaks:
            breaks, before = len(now.breaks), []
        assert sent(now)[: len(before)] == before
        # What is sent for good: a turn answers or closes its open calls before it asks again, and a
        # prompt without a request is answered, or refused, before anybody says more.
        if not replayer.waiting_calls and now.items[-1:] != (ReplayItem("user", BEGIN_TEXT),):
            before = sent(now)


@given(st.lists(_events, max_size=14))
def test_folding_one_by_one_and_all_at_once_agree(events: list[object]) -> None:
    replayer = Replayer()
    for seq, event in enumerate(events, start=1):
        replayer.add(seq, event)
        replayer.input()
    assert replayer.input() == fold(*events)


@given(st.lists(st.tuples(_events, st.booleans()), max_size=14))
def test_the_hash_of_an_input_is_that_of_its_items_however_it_came_about(
    events: list[tuple[object, bool]],
) -> None:
    """Whoever asks after every event, and whoever asks at the end, gets the same hash and the same size."""
    replayer = Replayer()
    for seq, (event, is_asked) in enumerate(events, start=1):
        replayer.add(seq, event)
        if is_asked:
            now = replayer.input()
            assert now.prefix_hash() == Replay(now.items).prefix_hash()
    now = replayer.input()
    assert now.prefix_hash() == Replay(now.items).prefix_hash()
    assert now.prefix_hash(len(now.items)) == now.prefix_hash()
    assert now.size_bytes == sum(len(each.canonical()) for each in now.items)


@settings(max_examples=300)
@given(
    st.text(alphabet='{}[]":,\\ \n\x01u0d8ntf1eN', max_size=12)
    | st.dictionaries(st.text(max_size=2), st.floats() | st.text(max_size=2), max_size=2).map(json.dumps)
    | st.sampled_from(["", " ", "\ufeff{}", "{}", " {} ", '{"a":"\\ud800"}', '{"a":"\ud800"}', '{"a":NaN}'])
    | st.sampled_from(['{"a":' * depth + "1" + "}" * depth for depth in (100, 300, 100_000)])
)
def test_arguments_are_sent_as_they_are_if_they_are_a_json_object_and_empty_otherwise(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    call = ToolCallRecord("c1", "look", text)
    (item,) = fold(said("user"), replace(asked("c1"), tool_calls=(call,))).items[1:2]
    assert item.calls[0].arguments == (text if is_object else "{}")


# Texts that look like the signs between two texts, so that one item could pass for another.
_tricky = st.text(alphabet="a1 :!,\ud800\n", max_size=4)
_maybe = st.none() | _tricky
_items = st.builds(
    ReplayItem,
    st.sampled_from(["assistant", "tool"]),
    _tricky,
    calls=st.lists(st.builds(ReplayCall, _tricky, _tricky, _tricky), max_size=2).map(tuple),
    call_id=_maybe,
    name=_maybe,
    parts=st.lists(
        st.builds(ImagePart, _tricky, url=_maybe)
        | st.builds(ReasoningPart, _tricky, _tricky, st.dictionaries(_tricky, _tricky, max_size=1)),
        max_size=1,
    ).map(tuple),
    is_error=st.booleans(),
)


@settings(max_examples=300)
@given(st.lists(_items, min_size=2, max_size=6), st.integers(0, 9))
def test_two_items_are_written_alike_only_if_the_same_is_sent(items: list[ReplayItem], seq: int) -> None:
    for one in items:
        assert replace(one, seq=seq).canonical() == one.canonical(), "where it stands is not sent"
        for other in items:
            assert (one.canonical() == other.canonical()) == (replace(one, seq=0) == replace(other, seq=0))


def test_an_input_is_made_once_until_something_is_added() -> None:
    """Whoever looks at how large it is, and whoever sends it, are given one and the same."""
    replayer = Replayer()
    replayer.add(1, said("user", "one"))
    first = replayer.input()
    assert replayer.input() is first
    replayer.add(2, AUDIT[0])
    assert [each.seq for each in replayer.input().left_out] == [2]
    assert list(first.left_out) == []


def test_asking_after_every_message_hashes_every_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn asks before each model call; what was hashed for the call before is not hashed again."""
    hashed = 0
    canonical = ReplayItem.canonical

    def counted(item):
        nonlocal hashed
        hashed += 1
        return canonical(item)

    monkeypatch.setattr(ReplayItem, "canonical", counted)
    replayer = Replayer()
    replayer.add(1, said("system"))
    for seq in range(2, 502):
        replayer.add(seq, said("user" if seq % 2 == 0 else "assistant"))
        assert replayer.input().prefix_hash()
    assert hashed == 501

"""What a provider is sent is valid, stable, and made of the clean conversation alone."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.conversation.events import (
    BranchSummary,
    HistoryCompacted,
    ProviderUsage,
    SubagentEvent,
)
from holdfast.conversation.messages import (
    ImagePart,
    InnerMessage,
    ReasoningPart,
    ToolCallRecord,
    enable_inner_message_recording,
)
from holdfast.conversation.replay import (
    BEGIN_TEXT,
    ORPHAN_TEXT,
    Replay,
    Replayer,
    ReplayItem,
    replay,
    replay_events,
)
from holdfast.providers.translate import to_anthropic, to_openai_chat, to_openai_responses
from holdfast.state import Session, TokenUsage
from holdfast.testing.wire_rules import (
    anthropic_violations,
    openai_chat_violations,
    openai_responses_violations,
)
from holdfast.tools.events import ToolStarted
from holdfast.turns import PartialText, TurnEnded, TurnState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def said(
    role: str, content: str = "text", *calls: str, result_of: str | None = None, **fields
) -> InnerMessage:
    return InnerMessage(
        role,
        content,
        "e",
        0,
        tool_calls=tuple(ToolCallRecord(each, "look", "{}") for each in calls),
        tool_call_id=result_of,
        tool_name="look" if result_of else None,
        created_at=NOW,
        **fields,
    )


def fold(*events: object, **options):
    return replay_events(((seq, each, "") for seq, each in enumerate(events, start=1)), **options)


def sent(replayed) -> list[bytes]:
    return [each.canonical() for each in replayed.items]


def texts(replayed) -> list[str]:
    return [f"{each.role}:{each.text}" for each in replayed.items]


AUDIT = [
    ProviderUsage("p", "m", 1, TokenUsage(input_tokens=1)),
    TurnEnded("t", TurnState.FAILED, "provider_error", "x"),
    PartialText("t", "half an answer"),
    ToolStarted("c1", "a1", "look", "workspace"),
]


def test_audit_events_never_change_what_is_sent() -> None:
    """The seed's table, row by row: usage, failures, partial text and starts stay out."""
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


@settings(max_examples=300)
@given(st.lists(_events, max_size=14))
def test_every_prefix_of_every_log_is_input_that_every_provider_takes(events: list[object]) -> None:
    for end in range(len(events) + 1):
        replayed = fold(*events[:end])
        if not replayed.is_sendable:
            continue
        assert openai_chat_violations(to_openai_chat(replayed.items)) == []
        assert openai_responses_violations(to_openai_responses(replayed.items)[1]) == []
        assert anthropic_violations(to_anthropic(replayed.items)[1]) == []


@settings(max_examples=300)
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


def test_asking_after_every_message_hashes_every_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn asks before each model call; what was hashed for the call before is not hashed again."""
    hashed = 0
    digest_item = sys.modules[Replayer.__module__]._digest_item

    def counted(digest, item):
        nonlocal hashed
        hashed += 1
        return digest_item(digest, item)

    monkeypatch.setattr(sys.modules[Replayer.__module__], "_digest_item", counted)
    replayer = Replayer()
    replayer.add(1, said("system"))
    for seq in range(2, 502):
        replayer.add(seq, said("user" if seq % 2 == 0 else "assistant"))
        assert replayer.input().prefix_hash()
    assert hashed == 501

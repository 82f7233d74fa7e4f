"""The conversation keeps its order, loses nothing, and can be taken over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from treenail.conversation import (
    InnerMessage,
    ToolCallRecord,
    enable_inner_message_recording,
    get_inner_messages,
    get_latest_evaluation_id,
    get_pending_tool_calls,
    inner_message_append,
)
from treenail.log import SlicePolicy
from treenail.log.sqlite import SqliteLog
from treenail.state import InProcessEventBus, Session, Snapshot

START = datetime(2026, 1, 1, tzinfo=UTC)


def message(evaluation: str, sequence: int, role: str = "user", **fields: object) -> InnerMessage:
    at = fields.pop("at", START + timedelta(seconds=sequence))
    return InnerMessage(role, f"{evaluation}:{sequence}", evaluation, sequence, created_at=at, **fields)


def recording() -> Session:
    session = Session()
    enable_inner_message_recording(session)
    return session


def test_the_seeds_checkpoint_and_resume_example_carries_the_conversation(tmp_path: Path) -> None:
    """A snapshot written after each message lets a new session take the conversation over."""
    checkpoint = tmp_path / "checkpoint.json"
    session = Session(bus=InProcessEventBus())
    session.mutate(InnerMessage).register(
        InnerMessage,
        inner_message_append,
    )

    def save_on_change(old, new):
        if len(new) > len(old):
            checkpoint.write_text(session.snapshot().to_json())

    session.observe(InnerMessage, save_on_change)
    first = message("e", 0, "system")
    calls = (ToolCallRecord("c1", "search", "{}"), ToolCallRecord("c2", "search", "{}"))
    second = message("e", 1, "assistant", tool_calls=calls)
    third = message("e", 2, "tool", tool_call_id="c1", tool_name="search")
    for each in (first, second, third):
        session.mutate(InnerMessage).append(each)

    snapshot = Snapshot.from_json(checkpoint.read_text())
    taken_over = Session(bus=InProcessEventBus())
    taken_over.mutate(InnerMessage).register(
        InnerMessage,
        inner_message_append,
    )
    taken_over.mutate().rollback(snapshot)

    answered = replace(second, tool_calls=(replace(calls[0], status="completed"), calls[1]))
    assert taken_over.select_all(InnerMessage) == (first, answered, third)
    assert get_latest_evaluation_id(taken_over) == "e"
    assert [each.call_id for each in get_pending_tool_calls(taken_over, "e")] == ["c2"]


def test_messages_are_single_items_in_a_snapshots_json() -> None:
    session = recording()
    session.dispatch(message("e", 0, "system"))
    session.dispatch(message("e", 1))
    slices = json.loads(session.snapshot().to_json())["slices"]
    assert [each["items"][0]["role"] for each in slices] == ["system"]
    assert [item["sequence"] for item in slices[0]["items"]] == [0, 1]


def test_a_rollback_never_removes_messages() -> None:
    session = recording()
    session.dispatch(message("e", 0))
    snapshot = session.snapshot()
    session.dispatch(message("e", 1))
    session.rollback(snapshot)
    assert len(session[InnerMessage].all()) == 2
    assert session.policy_of(InnerMessage) is SlicePolicy.LOG


def test_an_identical_message_is_ignored_and_a_newer_one_with_its_id_takes_its_place() -> None:
    session = recording()
    call = ToolCallRecord("c1", "search", "{}")
    first = message("e", 0, "assistant", tool_calls=(call,))
    session.dispatch(first)
    session.dispatch(first)
    assert session[InnerMessage].all() == (first,)
    newer = replace(first, tool_calls=(replace(call, status="completed"),))
    session.dispatch(newer)
    assert session[InnerMessage].all() == (newer,)


def test_a_version_of_a_message_with_another_place_is_still_that_message() -> None:
    """Wherever it is moved to, and whatever else was changed in it; there are never two of it."""
    session = recording()
    messages = [message("e", sequence) for sequence in range(3)]
    for each in messages:
        session.dispatch(each)
    moved = replace(messages[0], sequence=9, content="moved")
    session.dispatch(moved)
    assert session[InnerMessage].all() == (*messages[1:], moved)
    assert inner_message_append(tuple(messages), moved, context=None) == (*messages[1:], moved)


def statuses(messages: Iterable[InnerMessage]) -> list[str]:
    return [call.status for each in messages for call in each.tool_calls]


def test_the_status_of_a_call_is_true_whenever_messages_are_read(tmp_path: Path) -> None:
    """Pending until its result comes, then completed or failed: by every way to read, after a restart too."""
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    enable_inner_message_recording(session)
    calls = tuple(ToolCallRecord(each, "search", "{}") for each in ("c1", "c2", "c3"))
    session.dispatch(message("e", 0, "assistant", tool_calls=calls))
    assert statuses(session[InnerMessage].all()) == ["pending"] * 3
    session.dispatch(message("e", 1, "tool", tool_call_id="c2", is_error=True))
    session.dispatch(message("e", 2, "tool", tool_call_id="c1"))
    session.dispatch(message("other", 0, "tool", tool_call_id="c3", at=START + timedelta(hours=1)))
    expected = ["completed", "failed", "pending"]
    session.close()
    with Session.open(log, session.session_id) as again:
        enable_inner_message_recording(again)
        for found in (
            again[InnerMessage].all(),
            again[InnerMessage].where(lambda each: True),
            list(again[InnerMessage]),
            again.select_all(InnerMessage),
            again.query(InnerMessage).all(),
            again.read_only_view()[InnerMessage].all(),
            again.read_only_view().select_all(InnerMessage),
            get_inner_messages(again),
            get_inner_messages(again, "e"),
            again.snapshot().slices[InnerMessage],
            Snapshot.from_json(again.snapshot().to_json()).slices[InnerMessage],
        ):
            assert statuses(found) == expected
        assert [each.call_id for each in get_pending_tool_calls(again, "e")] == ["c3"]
        # Derived, and not stored: the log has what the model said.
        stored = [value for _, value in again.events() if isinstance(value, InnerMessage)]
        assert statuses(stored) == ["pending"] * 3
        assert "completed" not in again.snapshot().to_json()
    log.close()


def test_a_call_id_that_is_used_again_is_settled_once_for_each_result() -> None:
    session = recording()
    call = (ToolCallRecord("c1", "search", "{}"),)
    for sequence, fields in enumerate(
        [
            {"tool_calls": call},
            {"tool_call_id": "c1"},
            {"tool_calls": call},
            {"tool_call_id": "c1", "is_error": True},
        ]
    ):
        session.dispatch(message("e", sequence, "assistant" if "tool_calls" in fields else "tool", **fields))
    assert statuses(session[InnerMessage].all()) == ["completed", "failed"]


def test_pending_calls_derive_from_results_and_not_from_their_status() -> None:
    session = recording()
    done = ToolCallRecord("c1", "search", "{}", status="completed")
    session.dispatch(message("e", 0, "assistant", tool_calls=(done,)))
    assert get_pending_tool_calls(session, "e") == (done,)
    session.dispatch(message("e", 1, "tool", tool_call_id="c1"))
    assert get_pending_tool_calls(session, "e") == ()


def test_a_call_id_that_a_provider_uses_again_is_pending_again() -> None:
    session = recording()
    call = ToolCallRecord("call_0", "search", "{}")
    session.dispatch(message("e", 0, "assistant", tool_calls=(call,)))
    session.dispatch(message("e", 1, "tool", tool_call_id="call_0"))
    session.dispatch(message("e", 2, "assistant", tool_calls=(call,)))
    assert get_pending_tool_calls(session, "e") == (call,)


def test_evaluations_are_ordered_by_the_time_of_their_first_message_not_by_their_id() -> None:
    session = recording()
    session.dispatch(message("zzz", 0, at=START))
    session.dispatch(message("aaa", 0, at=START + timedelta(hours=1)))
    session.dispatch(message("zzz", 1, at=START + timedelta(hours=2)))
    assert [(m.evaluation_id, m.sequence) for m in get_inner_messages(session)] == [
        ("zzz", 0),
        ("zzz", 1),
        ("aaa", 0),
    ]
    assert get_latest_evaluation_id(session) == "aaa"


def test_a_session_without_messages_has_no_evaluation() -> None:
    assert get_latest_evaluation_id(recording()) is None
    assert get_inner_messages(recording()) == ()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), unique=True, max_size=14),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_does_not_matter(places: list[tuple[str, int]], random: object) -> None:
    """However messages arrive, the slice is sorted; and the slice and the plain tuple agree."""
    offset = {"a": 2, "b": 0, "c": 1}
    messages = [
        message(each, sequence, at=START + timedelta(days=offset[each], seconds=sequence))
        for each, sequence in places
    ]
    shuffled = list(messages)
    random.shuffle(shuffled)
    session = recording()
    plain: tuple[InnerMessage, ...] = ()
    for each in shuffled:
        session.dispatch(each)
        plain = inner_message_append(plain, each, context=None)
    first = {
        name: min((m.sequence, m.created_at) for m in messages if m.evaluation_id == name)[1]
        for name in {m.evaluation_id for m in messages}
    }
    expected = sorted(messages, key=lambda m: (first[m.evaluation_id], m.sequence))
    assert get_inner_messages(session) == tuple(expected)
    assert session[InnerMessage].all() == tuple(expected)
    assert plain == tuple(expected)


def test_adding_a_message_in_order_is_one_append_operation_however_long_the_conversation_is() -> None:
    """The reducer answers with `Append`, which costs the same for any length."""
    session = recording()
    for sequence in range(200):
        session.dispatch(message("e", sequence))
    view = session[InnerMessage].view()
    operation = inner_message_append(view, message("e", 200), context=None)
    assert type(operation).__name__ == "Append"
    new_evaluation = inner_message_append(view, message("f", 0, at=START + timedelta(days=1)), context=None)
    assert type(new_evaluation).__name__ == "Append"


def test_message_ids_are_unique_by_default() -> None:
    assert message("e", 0).message_id != message("e", 0).message_id
    fixed = uuid4()
    assert message("e", 0, message_id=fixed).message_id == fixed

"""What a model would see can be looked at offline, with what was left out and why."""

from __future__ import annotations

import json
from pathlib import Path

from conversation_kit import asked, said, session_of

from treenail.conversation import (
    ORPHAN_TEXT,
    HistoryCompacted,
    ImagePart,
    ProviderUsage,
    ReasoningPart,
    SubagentEvent,
    enable_inner_message_recording,
    inspect_replay,
    replay,
)
from treenail.conversation.compaction import compact
from treenail.conversation.replay import AUDIT_REASON
from treenail.log.sqlite import SqliteLog
from treenail.state import Session, TokenUsage
from treenail.turns import PartialText, TurnEnded, TurnState

THOUGHT = ReasoningPart("m", "d", {"type": "thinking"})
LOG = [
    said("system", "You help."),
    said("user", "Look at this.", parts=(ImagePart("image/png", b"1234"),)),
    ProviderUsage("p", "m", 1, TokenUsage(input_tokens=5)),
    said("assistant", "Looking.", "c1", parts=(THOUGHT,)),
    SubagentEvent("started", "s", "c", "helper", "dig", "running"),
    PartialText("t", "half"),
    TurnEnded("t", TurnState.PARTIAL_FAILED, "provider_error"),
]


def test_an_inspection_shows_what_is_sent_and_counts_what_is_not() -> None:
    session = session_of(*LOG)
    seen = inspect_replay(session)
    assert seen.items == replay(session).items
    assert seen.prefix_hash == replay(session).prefix_hash()
    assert seen.left_out_counts == {AUDIT_REASON: 4, "written by m, for it alone": 1}
    assert seen.synthetic == ("c1",)
    assert seen.waiting == ("c1",)
    assert seen.at_seq == len(LOG)
    assert seen.is_sendable
    assert seen.token_estimate > 5


def test_an_inspection_looks_at_any_point_of_the_past() -> None:
    session = session_of(*LOG)
    assert [each.role for each in inspect_replay(session, 2).items] == ["system", "user"]
    assert inspect_replay(session, 2).at_seq == 2
    assert [each.role for each in inspect_replay(session, 0).items] == []
    assert not inspect_replay(session, 0).is_sendable


def test_an_inspection_takes_the_place_of_a_model() -> None:
    """Its own thoughts go back to it, and to nobody else."""
    session = session_of(*LOG)
    assert inspect_replay(session, model="m", dialect="d").items[2].parts == (THOUGHT,)
    assert inspect_replay(session, model="other", dialect="d").items[2].parts == ()


def test_an_inspection_names_compactions_and_breaks() -> None:
    session = session_of(*(said("user" if n % 2 == 0 else "assistant", f"m{n}") for n in range(20)))
    done = compact(session, keep_tail=4)
    seen = inspect_replay(session)
    assert seen.compactions == (done,)
    assert isinstance(done, HistoryCompacted)
    assert len(seen.breaks) == 1
    assert seen.left_out_counts == {"summarised by event 21": 16}
    assert inspect_replay(session, 20).compactions == ()


def test_an_inspection_is_data_and_text() -> None:
    """JSON can hold all of it, and a person can read what matters."""
    seen = inspect_replay(session_of(*LOG), model="m", dialect="d")
    data = json.loads(json.dumps(seen.to_data()))
    assert [each["role"] for each in data["items"]] == ["system", "user", "assistant", "tool"]
    assert data["items"][1]["parts"] == [{"kind": "image", "media_type": "image/png", "bytes": 4}]
    assert data["items"][2]["parts"] == [{"kind": "reasoning", "model": "m", "dialect": "d"}]
    assert data["items"][2]["calls"] == [{"id": "c1", "name": "look", "arguments": "{}"}]
    assert {each["type"] for each in data["left_out"]} == {
        "treenail.ProviderUsage",
        "SubagentEvent",
        "treenail.PartialText",
        "treenail.TurnEnded",
    }
    assert data["prefix_hash"] == seen.prefix_hash
    text = seen.render(max_chars_per_item=30)
    for words in (
        "You help.",
        "Looking. -> look(c1) +1 parts",
        ORPHAN_TEXT[:30],
        "4  kept for audit",
        "waiting",
    ):
        assert words in text
    assert "nothing to send" in inspect_replay(session_of()).render()


def test_a_stored_session_is_inspected_without_its_lease_and_without_being_changed(tmp_path: Path) -> None:
    """Somebody is still writing it; looking costs nobody anything."""
    with SqliteLog(tmp_path / "runs.db") as log:
        writing = Session(log=log)
        enable_inner_message_recording(writing)
        for each in (*LOG, said("tool", "r", result_of="c1"), asked("c2")):
            writing.dispatch(each)
        looking = Session.open(log, writing.session_id, read_only=True)
        before = writing.head
        assert inspect_replay(looking).waiting == ("c2",)
        assert writing.head == before
        writing.close()

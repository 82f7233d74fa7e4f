"""The stream of updates: names of calls, and real diffs."""

from __future__ import annotations

from pathlib import Path

import pytest
from acp import schema
from hypothesis import given
from hypothesis import strategies as st

from treenail.conversation import InnerMessage, ToolCallRecord, enable_inner_message_recording
from treenail.history import project
from treenail.presenters.acp import wire
from treenail.presenters.acp.servers import servers_of
from treenail.presenters.acp.updates import CallShown, before, call_ids, history_updates, hunks_of
from treenail.state import Session
from treenail.turns import TurnStarted
from treenail.workspace import unified_text

LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "-- a/x\n", "++ b/x\n", "@@ -1 +1 @@\n", "\\ x\n", "\r\n", "\n"])
)
TEXTS = st.tuples(LINES, st.sampled_from(["", "end"])).map(lambda each: "".join(each[0]) + each[1])


@given(old=TEXTS, new=TEXTS)
def test_hunks_are_the_places_that_a_call_changed(old: str, new: str) -> None:
    """Each old side is in the old file and each new side in the new one, whatever the lines look like."""
    hunks = list(hunks_of(unified_text("x", old.encode(), new.encode())))
    assert bool(hunks) == (old != new)
    for each in hunks:
        assert each.path == "x"
        assert each.before is not None
        assert each.before in old
        assert each.after in new
    if new.endswith("\n") and old.endswith("\n"):
        assert before(new, "x", hunks) == old


def test_a_new_file_has_no_old_side_and_a_deleted_one_no_new_side() -> None:
    [made] = hunks_of(unified_text("x", None, b"a\nb"))
    assert (made.before, made.after) == (None, "a\nb")
    [gone] = hunks_of(unified_text("x", b"a\nb\n", None))
    assert (gone.path, gone.before, gone.after) == ("x", "a\nb\n", "")


def test_calls_with_one_id_are_different_calls_in_an_editor() -> None:
    """Some providers use an id again; an editor would show the second call as a change of the first."""
    session = Session()
    enable_inner_message_recording(session)
    session.dispatch(TurnStarted("turn", "evaluation", "agent", "task", "scripted", "model"))
    for number in range(2):
        asked = (ToolCallRecord("call_1", "read_file", '{"path": "a"}'),)
        session.dispatch(InnerMessage("assistant", "", "evaluation", 2 * number, tool_calls=asked))
        said = InnerMessage("tool", "text", "evaluation", 2 * number + 1, tool_call_id="call_1")
        session.dispatch(said)
    view = project(session)
    assert sorted(call_ids(view).values()) == ["call_1", "call_1#2"]
    told = [each for each in history_updates(view, lambda item: ()) if isinstance(each, CallShown)]
    assert [each.call_id for each in told] == ["call_1", "call_1#2"]


def test_what_an_editor_says_about_a_server_names_no_variable_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123456")
    header = schema.HttpHeader(name="X", value="${OPENAI_API_KEY}")
    named = schema.HttpMcpServer(type="http", name="far", url="http://far.example/mcp", headers=[header])
    (server,) = servers_of([named])
    assert server.request_headers() == {"X": "${OPENAI_API_KEY}"}
    assert "sk-secret-123456" not in server.secrets()


def test_nothing_in_a_text_ends_its_block() -> None:
    """What a tool answers cannot pretend to be the agent's own words."""
    text = "```\nnot code\n````\n"
    shown = wire.fenced(text)
    fence = shown.partition("\n")[0]
    assert fence not in text
    assert shown == f"{fence}\n{text}\n{fence}"


def test_a_path_that_leads_out_of_the_workspace_is_not_a_place(tmp_path: Path) -> None:
    """An editor that follows the agent opens nothing outside."""
    call = CallShown("c", "read_file", '{"path": "../../etc/passwd"}', "running", is_new=True)
    shown = wire.session_update(call, tmp_path)
    assert getattr(shown, "locations", None) == []

"""Every way in which a turn can end, as an editor is told of it: one true stop reason, or an error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from acp import RequestError

from treenail.conversation import InnerMessage, enable_inner_message_recording
from treenail.history import project
from treenail.presenters.acp import wire
from treenail.presenters.acp.updates import ending_of
from treenail.state import Session
from treenail.tools import ToolHeld
from treenail.turns import TurnStarted, end_turn, ending_for

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("endings.json")
TABLE = (ROOT / "docs/endings.md").read_text("utf-8").partition("| kind |")[2]
KINDS = re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE)
"""The kinds of endings, as the page has them."""


def ended(kind: str, *, said: str = "") -> dict[str, Any]:
    """Write a turn with this ending to a log, and return what an editor is answered."""
    session = Session()
    enable_inner_message_recording(session)
    session.dispatch(TurnStarted("turn", "evaluation", "agent", "task", "scripted", "model"))
    session.dispatch(InnerMessage("user", "task", "evaluation", 0))
    if kind == "hold":
        session.dispatch(ToolHeld("call", "write_file", "{}", "a person is asked", session.clock.now()))
    if kind in ("completed", "incomplete", "output_parse"):
        session.dispatch(InnerMessage("assistant", "an answer", "evaluation", 1))
    if kind != "unfinished":
        cause = None if kind == "completed" else kind
        end_turn(session, "turn", ending_for(cause, said=said, session_id="RUN", call_id="CALL"))
    view = project(session)
    try:
        made = wire.answer(ending_of(view.turns[-1]), view.turns[-1].usage)
    except RequestError as error:
        return {"error": error.to_error_obj()}
    return {"result": made.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)}


def everything() -> dict[str, Any]:
    found = {kind: ended(kind) for kind in ("completed", "unfinished", *KINDS)}
    return found | {f"{kind}, with text": ended(kind, said="partial text") for kind in KINDS}


def test_only_a_completed_turn_is_an_end_turn() -> None:
    """No failure, limit, interruption, timeout or question is told as a clean end."""
    assert len(KINDS) > 30
    clean = [
        name for name, each in everything().items() if each.get("result", {}).get("stopReason") == "end_turn"
    ]
    assert clean == ["completed"]


def test_each_ending_is_answered_as_the_golden_file_says() -> None:
    """One stop reason or one error for each ending, with its state, its kind and what to do next."""
    if os.environ.get("TREENAIL_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(everything(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert everything() == json.loads(GOLDEN.read_text("utf-8"))


STOPS = {
    "completed": "end_turn",
    "cancelled": "cancelled",
    "interrupt": "cancelled",
    "iteration_cap": "max_turn_requests",
    "step_limit_exceeded": "max_turn_requests",
    "budget_exceeded": "max_turn_requests",
    "truncated": "max_tokens",
    "refused": "refusal",
    "content_filtered": "refusal",
}


@pytest.mark.parametrize("kind", ["completed", *KINDS])
def test_an_ending_without_a_stop_reason_is_an_error_that_says_what_to_do(kind: str) -> None:
    """The protocol's words where they are true, else an error with state, kind and next actions."""
    answer = ended(kind)
    if kind in STOPS:
        assert answer["result"]["stopReason"] == STOPS[kind]
        return
    error = answer["error"]
    assert error["code"] == (-32000 if kind == "authentication" else -32603)
    assert error["data"]["kind"] == kind
    assert error["data"]["state"] in ("failed", "partial_failed", "interrupted", "timed_out", "held")
    assert error["data"]["next_actions"]
    assert error["data"]["next_actions"][0] in error["message"]

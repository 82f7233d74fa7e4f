"""`list` and `show` print what the log proves, and only a clean answer is called one."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from treenail.conversation import InnerMessage
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli.main import main
from treenail.state import Session
from treenail.turns import PartialText, TurnEnded, TurnStarted, TurnState

STARTED = TurnStarted("t", "e", "agent", "the task", "p", "m")
ANSWER = InnerMessage("assistant", "forty-two", "e", 1, created_at=datetime(2026, 1, 1, tzinfo=UTC))
COMPLETED = TurnEnded("t", TurnState.COMPLETED)


def failed(state: TurnState, kind: str) -> TurnEnded:
    return TurnEnded("t", state, kind, "why", ("treenail resume x",))


@pytest.mark.parametrize(
    ("events", "state", "line"),
    [
        ((ANSWER, COMPLETED), "completed", "answer  forty-two"),
        ((ANSWER,), "unfinished", "draft   not final: forty-two"),
        ((COMPLETED,), "unfinished", "the log lacks evidence: clean_answer"),
        ((COMPLETED, ANSWER), "unfinished", "draft   not final: forty-two"),
        ((ANSWER, failed(TurnState.FAILED, "bug")), "failed", "partial not an answer: forty-two"),
        (
            (PartialText("t", "forty-"), failed(TurnState.PARTIAL_FAILED, "connection")),
            "partial_failed",
            "partial not an answer, cut off: forty-",
        ),
        (
            (failed(TurnState.PARTIAL_FAILED, "connection"),),
            "failed",
            "the log lacks evidence: text",
        ),
        ((failed(TurnState.HELD, "hold"),), "unfinished", "the log lacks evidence: hold"),
    ],
    ids=[
        "a clean answer",
        "no ending",
        "completed without an answer",
        "an ending that something follows",
        "an answer of a failed turn",
        "text that was cut off",
        "partial without text",
        "held without a question",
    ],
)
def test_a_person_sees_what_the_log_proves(
    events: tuple[object, ...],
    state: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same state in `list`, in `show` and in their JSON, and one word for the same text."""
    store = tmp_path / "runs.db"
    with SqliteLog(store) as log, Session(log=log) as session:
        session.dispatch_all((STARTED, *events))

    def printed(*command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["treenail", *command, "--store", str(store)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    assert json.loads(printed("list", "--json"))[0]["state"] == state
    assert f" {state} " in printed("list")
    shown = printed("show")
    assert f" {state} ·" in shown.splitlines()[0]
    assert line in shown
    data = json.loads(printed("show", "--json"))
    assert (data["state"], data["turns"][0]["state"]) == (state, state)
    assert data["answer"] == ("forty-two" if state == "completed" else None)
    assert ("answer  forty-two" in shown) == (state == "completed")

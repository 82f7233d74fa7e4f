"""What a run needed a person for can be put right, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from treenail.errors import UsageError
from treenail.history.diagnostics import diagnose
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli import changing
from treenail.state import AttentionNeeded, Session


def test_attention_is_resolved_with_a_note_and_only_where_it_is_needed(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    log = SqliteLog(store)
    with Session(log=log) as session:
        session.dispatch(AttentionNeeded("a restore was left half done", ("data.txt",), ("look at it",)))
        run_id = session.session_id
        assert not diagnose(session).ok
    log.close()
    changing.attend(store, run_id, note="restored it by hand", as_json=True)
    log = SqliteLog(store)
    with Session.open(log, run_id, read_only=True) as session:
        assert "attention" not in [each.id for each in diagnose(session).checks if each.status == "failed"]
    log.close()
    with pytest.raises(UsageError, match="nothing in this run needs a person"):
        changing.attend(store, run_id, note="again", as_json=True)

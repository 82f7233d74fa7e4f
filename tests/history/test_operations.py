"""A problem of a run can be marked as fixed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from treenail.errors import UsageError
from treenail.history import attend_run, diagnose
from treenail.log.sqlite import SqliteLog
from treenail.state import AttentionNeeded, Session


def test_attention_is_resolved_with_a_note_and_only_where_it_is_needed(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    log = SqliteLog(store)
    with Session(log=log) as session:
        session.dispatch(AttentionNeeded("a restore was left half done", ("data.txt",), ("look at it",)))
        run_id = session.session_id
        assert not diagnose(session).ok
    log.close()
    attend_run(store, run_id, "restored it by hand")
    log = SqliteLog(store)
    with Session.open(log, run_id, read_only=True) as session:
        assert "attention" not in [each.id for each in diagnose(session).checks if each.status == "failed"]
    log.close()
    with pytest.raises(UsageError, match="nothing in this run needs a person"):
        attend_run(store, run_id, "again")

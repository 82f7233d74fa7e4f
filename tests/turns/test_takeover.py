"""A run has one writer: who comes second is refused while the first lives, and takes over when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.turns.holding_child import HOLDER, SCRIPT

from treenail import TurnState
from treenail.errors import LeaseHeldError
from treenail.history import diagnose, project
from treenail.log.sqlite import SqliteLog
from treenail.providers.anthropic import Anthropic
from treenail.state import Session
from treenail.testing.wire import WireServer
from treenail.turns import TurnResumed, TurnStarted

CHILD = Path(__file__).with_name("holding_child.py")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path, how: signal.Signals) -> None:
    """It changes nothing; it may look. When the first is killed it goes on, on another provider."""
    (tmp_path / "work").mkdir()
    repository = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-W", "error", str(CHILD), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "at work\n"
        if how is signal.SIGSTOP:
            # One that stands still has not gone: its lease is respected until it has run out.
            child.send_signal(how)
        with SqliteLog(tmp_path / "runs.db") as log, WireServer(SCRIPT, by_conversation=True) as server:
            (info,) = log.sessions()
            provider = Anthropic("a-model", base_url=server.anthropic_url, api_key="k")
            held = log.info(info.session_id).head
            with pytest.raises(LeaseHeldError, match=str(info.session_id)):
                HOLDER.resume(log, info.session_id, provider=provider, workspace=tmp_path / "work")
            assert log.info(info.session_id).head == held
            assert server.requests == ()
            looking = Session.open(log, info.session_id, read_only=True)
            assert project(looking).state is TurnState.UNFINISHED
            assert diagnose(looking).check("continuation").classification == "under_way"
            assert (tmp_path / "work" / "notes.txt").read_text() == "one\ntwo\n"

            child.kill()
            child.wait(30)
            # The first process named the store by its path, this one has it open: the files are found.
            with HOLDER.resume(log, info.session_id, provider=provider, workspace=tmp_path / "work") as run:
                assert (run.state, run.output) == (TurnState.COMPLETED, "Noted."), run.result.details
                session = run.execution_state.session
                assert session[TurnStarted].all()[0].provider == "scripted"
                assert [each.provider for each in session[TurnResumed].all()] == ["anthropic.messages"]
            assert [each.violations for each in server.requests] == [()]
        # The call that was cut off was rolled back before it was run again: its line is there once.
        assert (tmp_path / "work" / "notes.txt").read_text() == "one\ntwo\n"
    finally:
        child.kill()
        child.communicate()

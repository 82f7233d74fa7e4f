"""Workers that are killed or stopped in the middle of a call: another continues, and nothing is doubled."""

from __future__ import annotations

import os
import signal
from datetime import datetime

from tests.engine.engine_kit import LEASE_S, Fleet, until
from tests.engine.test_workers import call

from treenail.log import Envelope


def types(fleet: Fleet, run: object) -> list[Envelope]:
    return list(fleet.log.read(run))  # type: ignore[arg-type]


def test_a_worker_killed_in_the_middle_of_a_tool_is_replaced_within_its_lease(fleet: Fleet) -> None:
    """What it had finished is not done again; what it had half done is rolled back, and done once."""
    model = fleet.script([call("say", word="one"), call("stuck"), "Done."])
    first = fleet.worker("--model", model)
    run = fleet.submit("get stuck")
    pid = fleet.wait_for_mark("stuck")
    assert pid == first.pid
    fleet.worker("--model", model)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(60)
    (killed,) = fleet.sql("SELECT clock_timestamp()")[0]
    assert fleet.wait_for(run, "completed", "failed") == "completed"
    resumed: datetime = next(each.at for each in types(fleet, run) if each.type == "treenail.TurnResumed")
    assert (resumed - killed).total_seconds() < LEASE_S + 2
    assert fleet.said() == ["call_1_1 one"]
    assert fleet.log.check(run).ok
    until(lambda: fleet.books()[0][0] == "completed")


def test_a_stopped_worker_that_was_replaced_changes_nothing_when_it_continues(fleet: Fleet) -> None:
    """Neither the log, nor the engine's books, nor what was said outside."""
    model = fleet.script([call("stuck"), call("say", word="two"), "Done."])
    first = fleet.worker("--model", model)
    run = fleet.submit("get stuck")
    fleet.wait_for_mark("stuck")
    os.kill(first.pid, signal.SIGSTOP)
    fleet.worker("--model", model)
    assert fleet.wait_for(run, "completed", "failed") == "completed"
    until(lambda: fleet.books()[0][0] == "completed")
    before = types(fleet, run), fleet.books(), fleet.said()
    os.kill(first.pid, signal.SIGCONT)
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGTERM)
    until(lambda: any(each.get("event") == "worker_draining" for each in fleet.lines(first)))
    assert (types(fleet, run), fleet.books(), fleet.said()) == before

"""Runs that are submitted, and worker processes that do them."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.engine.engine_kit import Fleet, until
from tests.stories.terminal import treenail

from treenail.history import answer_run
from treenail.log import PostgresUrl


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def test_a_submitted_run_is_done_by_a_worker(fleet: Fleet) -> None:
    """The log has it all, the agenda and the engine have nothing left, and each thing is a line of JSON."""
    model = fleet.script([call("say", word="hello"), "Said it."])
    run = fleet.submit("greet")
    assert fleet.state(run) == "submitted"
    worker = fleet.worker("--model", model)
    assert fleet.wait_for(run, "completed", "failed") == "completed"
    assert fleet.said() == ["call_1_1 hello"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert fleet.log.agenda.entry(run) is None
    assert fleet.books() == [("completed", 1)]
    lines = fleet.lines(worker)
    told = [each["event"] for each in lines if each.get("run") == str(run)]
    assert told == ["turn_began", "turn_ended"]
    assert [each["state"] for each in lines if each["event"] == "turn_ended"] == ["completed"]
    assert [each["event"] for each in lines if "run" not in each] == [
        "worker_started",
        "worker_ready",
        "worker_draining",
        "worker_stopped",
    ]


def test_a_held_run_waits_for_an_answer_from_anywhere(fleet: Fleet, tmp_path: Path) -> None:
    """It occupies no worker meanwhile; the answer wakes one, and the call runs once."""
    model = fleet.script([call("say", word="please"), "Said it."])
    fleet.worker("--model", model, "--ask")
    run = fleet.submit("greet")
    fleet.wait_for(run, "held")
    until(lambda: fleet.books() == [("sleeping", 1)])
    assert fleet.said() == []
    answered = treenail("hold", "answer", str(run), "--yes", "--store", fleet.url, cwd=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert fleet.wait_for(run, "completed", "failed") == "completed"
    assert fleet.said() == ["call_1_1 please"]
    until(lambda: fleet.books() == [("completed", 1)])


def test_a_run_that_waits_is_cancelled_at_once(fleet: Fleet, tmp_path: Path) -> None:
    """No worker begins it; it can be submitted again."""
    model = fleet.script({"no": ["Never."], "other": ["Done."]})
    run = fleet.submit("no")
    cancelled = treenail("cancel", str(run), "--store", fleet.url, cwd=tmp_path)
    assert cancelled.returncode == 0, cancelled.stderr
    assert fleet.state(run) == "cancelled"
    assert fleet.log.agenda.entry(run) is None
    worker = fleet.worker("--model", model)
    fleet.wait_for(fleet.submit("other"), "completed")
    assert not [each for each in fleet.lines(worker) if each.get("run") == str(run)]
    again = treenail("resume", str(run), "--store", fleet.url, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    fleet.wait_for(run, "completed")


def test_a_run_at_work_is_cancelled_by_its_worker(fleet: Fleet, tmp_path: Path) -> None:
    """Its turn ends as interrupted, the call in flight is rolled back, and nobody continues it."""
    model = fleet.script([call("stuck"), "Done."])
    fleet.worker("--model", model)
    run = fleet.submit("get stuck")
    fleet.wait_for_mark("stuck")
    cancelled = treenail("cancel", str(run), "--store", fleet.url, cwd=tmp_path)
    assert cancelled.returncode == 0, cancelled.stderr
    assert fleet.wait_for(run, "interrupted", "completed") == "interrupted"
    until(lambda: fleet.log.agenda.entry(run) is None)
    until(lambda: fleet.books() == [("cancelled", 1)])


def test_a_worker_that_is_told_to_end_hands_its_runs_on(fleet: Fleet) -> None:
    """The turn ends durably as interrupted, and another worker resumes it at once."""
    model = fleet.script([call("say", word="one"), call("stuck"), "Done."])
    first = fleet.worker("--model", model, "--drain", "0")
    run = fleet.submit("get stuck")
    fleet.wait_for_mark("stuck")
    second = fleet.worker("--model", model)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    assert fleet.wait_for(run, "completed", "failed") == "completed"
    ended = [each for each in fleet.lines(first) if each["event"] == "turn_ended"]
    assert [(each["state"], each["kind"], each["left"]) for each in ended] == [
        ("interrupted", "terminated", "resume")
    ]
    resumed = [each for each in fleet.lines(second) if each["event"] == "turn_began"]
    assert [each["resumed"] for each in resumed] == [True]
    assert fleet.said() == ["call_1_1 one"]
    until(lambda: fleet.books() == [("completed", 1)])


def test_a_run_that_the_engine_has_lost_is_found_in_the_log(fleet: Fleet) -> None:
    """Its task is deleted behind our back: the sweeper submits it again."""
    model = fleet.script(["Done."])
    run = fleet.submit("be found")
    schema = fleet.log.url.schema
    fleet.sql(f'DELETE FROM absurd."r_{schema}_default"')
    fleet.sql(f'DELETE FROM absurd."t_{schema}_default"')
    worker = fleet.worker("--model", model)
    fleet.wait_for(run, "completed")
    assert [each["runs"] for each in fleet.lines(worker) if each["event"] == "swept"] == [1]


def test_an_answer_that_nobody_was_told_of_is_found_in_the_log(fleet: Fleet) -> None:
    """The process that answered was killed before it could wake anybody."""
    model = fleet.script([call("say", word="please"), "Said it."])
    fleet.worker("--model", model, "--ask")
    run = fleet.submit("greet")
    fleet.wait_for(run, "held")
    answer_run(PostgresUrl.parse(fleet.url), run, approved=True, by="test")
    fleet.wait_for(run, "completed")


def test_a_run_whose_agent_a_worker_does_not_have_waits_for_another(fleet: Fleet) -> None:
    """No name in the log makes a worker load anything."""
    model = fleet.script(["Done."])
    worker = fleet.worker("--model", model)
    run = fleet.submit("who", agent=str(fleet.directory / "agents.py"))
    told = fleet.wait_for_line(worker, "agent_unknown")
    assert told["known"] == ["clerk"]
    assert fleet.state(run) == "submitted"


def test_a_run_that_cannot_begin_ends_with_the_reason(fleet: Fleet) -> None:
    """The model's script is gone: every worker would fail in the same way."""
    model = fleet.script(["Done."])
    worker = fleet.worker("--model", model)
    (fleet.directory / "script.json").unlink()
    run = fleet.submit("begin")
    assert fleet.wait_for(run, "failed", "completed") == "failed"
    assert "cannot be read" in fleet.wait_for_line(worker, "run_refused")["reason"]
    until(lambda: fleet.log.agenda.entry(run) is None)

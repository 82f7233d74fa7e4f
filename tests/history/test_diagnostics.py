"""Diagnostics say what stands in a log, where, and what to do; damage is a report, never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail import Agent, tool
from treenail.clock import FixedClock
from treenail.codec import FrozenDict
from treenail.conversation import InnerMessage, ProviderUsage, SubagentEvent, ToolCallRecord
from treenail.errors import ModelCallError, UsageError
from treenail.history import diagnose, diagnose_store, project
from treenail.history.checks import CHECKS
from treenail.history.diagnostics import NOTHING, DiagnosticsReport
from treenail.history.operations import resolve_attention
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import AttentionNeeded, Session, TokenUsage
from treenail.testing.clock import FakeClock
from treenail.tools import (
    HoldAnswered,
    PermissionMode,
    Permissions,
    ToolHeld,
    ToolInvoked,
    ToolResult,
    ToolStarted,
)
from treenail.turns import PartialText, TurnEnded, TurnStarted, TurnState
from treenail.workflows import Checkpoint, WorkflowEvent

NOW = datetime(2026, 1, 1, tzinfo=UTC)

CONCEPT_IDS = [
    "log",
    "tool_pairing",
    "parent_waits",
    "turn_completion",
    "assistant_canonicalization",
    "turn_failure_evidence",
    "subagent_timeouts",
    "workflow_events",
    "workflow_checkpoints",
    "subagent_terminal_states",
    "subagent_staleness",
    "subagent_manager_runtime",
    "provider_replay",
    "session_tree",
    "continuation",
    "provider_output_truncation",
    "provider_output_completeness",
]


@tool
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


AGENT = Agent("tester", tools=(note,))


def flow(kind: str, step_id: str = "", checkpoint: Checkpoint | None = None) -> WorkflowEvent:
    return WorkflowEvent(kind, "w", "the flow", NOW, step_id, checkpoint=checkpoint)  # type: ignore[arg-type]  # the tests name kinds in words


READY = Checkpoint("one", "checkpoint_ready", "done")


def started(turn: str = "t") -> TurnStarted:
    return TurnStarted(turn, "e", "agent", "task", "p", "m")


def said(role: str, *calls: str, result_of: str | None = None) -> InnerMessage:
    return InnerMessage(
        role,  # type: ignore[arg-type]  # the tests name roles in words
        "text",
        "e",
        0,
        tool_calls=tuple(ToolCallRecord(each, "look", "{}") for each in calls),
        tool_call_id=result_of,
        created_at=NOW,
    )


def child(event: str, status: str, **fields: object) -> SubagentEvent:
    known = {"subagent_id": "a-1", "child_session_id": "c-1", "agent": "a", "task": "x"} | fields
    return SubagentEvent(event, status=status, **known)  # type: ignore[arg-type]  # the tests name fields in words


def used(**fields: object) -> ProviderUsage:
    known = {"provider": "p", "model": "m", "call_index": 1, "usage": TokenUsage(10, 5), "stop_reason": "end"}
    return ProviderUsage(**known | fields)  # type: ignore[arg-type]  # the tests name fields in words


def invoked(outcome: str, *conflicts: str) -> ToolInvoked:
    return ToolInvoked(
        "", "", "look", FrozenDict(), ToolResult.error("x"), Session().session_id, NOW, None, "c",
        attempt_id="a", outcome=outcome, conflicts=conflicts,  # type: ignore[arg-type]  # the tests name outcomes
    )  # fmt: skip


def session_of(*events: object) -> Session:
    session = Session(clock=FixedClock(NOW))
    session.dispatch_all(events)
    return session


def verdict(report: DiagnosticsReport, check_id: str) -> tuple[str, str]:
    check = report.check(check_id)
    return check.status, check.classification


CLEAN = (started(), said("user"), said("assistant", "c"), said("tool", result_of="c"), said("assistant"))
DONE = (*CLEAN, TurnEnded("t", TurnState.COMPLETED))
FAILED = TurnEnded("t", TurnState.FAILED, "transient", "no", ("treenail resume S",))


# --- every check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check_id", "status", "classification", "seqs", "events"),
    [
        ("log", "failed", "empty", [], ()),
        ("log", "passed", "whole", [], DONE),
        ("tool_pairing", "passed", "paired", [], DONE),
        ("tool_pairing", "warning", "pending_call", [2], (started(), said("assistant", "c"))),
        (
            "tool_pairing",
            "failed",
            "orphan_call",
            [2],
            (started(), said("assistant", "c"), started("u"), said("user")),
        ),
        (
            "tool_pairing",
            "warning",
            "unmatched_result",
            [2],
            (started(), said("tool", result_of="x"), said("user")),
        ),
        (
            "tool_pairing",
            "passed",
            "held",
            [2],
            (started(), said("assistant", "c"), ToolHeld("c", "look", "{}", "?", NOW)),
        ),
        ("parent_waits", "passed", NOTHING, [], DONE),
        (
            "parent_waits",
            "warning",
            "left_behind",
            [2],
            (started(), child("started", "running"), *CLEAN[1:], DONE[-1]),
        ),
        (
            "parent_waits",
            "passed",
            "waited",
            [],
            (started(), child("finished", "completed", summary="s"), DONE[-1]),
        ),
        ("turn_completion", "warning", "no_turn", [], (said("user"),)),
        ("turn_completion", "passed", "completed", [], DONE),
        ("turn_completion", "passed", "failed", [], (started(), FAILED)),
        ("turn_completion", "failed", "claim_without_evidence", [2], (started(), DONE[-1])),
        ("assistant_canonicalization", "passed", "clean", [], DONE),
        (
            "assistant_canonicalization",
            "warning",
            "partial_preserved",
            [2],
            (started(), PartialText("t", "ha"), FAILED),
        ),
        ("turn_failure_evidence", "passed", NOTHING, [], DONE),
        ("turn_failure_evidence", "warning", "transient", [2], (started(), FAILED)),
        (
            "turn_failure_evidence",
            "failed",
            "missing_fields",
            [2],
            (started(), TurnEnded("t", TurnState.FAILED, "transient")),
        ),
        ("turn_failure_evidence", "passed", "transient", [2], (started(), FAILED, *DONE)),
        ("subagent_timeouts", "passed", NOTHING, [], DONE),
        (
            "subagent_timeouts",
            "failed",
            "missing_fields",
            [1],
            (child("timed_out", "timed_out", timeout_ms=5),),
        ),
        (
            "subagent_timeouts",
            "warning",
            "timed_out",
            [1],
            (
                child(
                    "timed_out", "timed_out", timeout_ms=5, elapsed_ms=6, reason="late", next_actions=("go",)
                ),
            ),
        ),
        ("workflow_events", "passed", NOTHING, [], DONE),
        ("workflow_events", "warning", "unfinished", [1], (flow("workflow_started"),)),
        (
            "workflow_events",
            "passed",
            "finished",
            [],
            (flow("workflow_started"), flow("workflow_finished")),
        ),
        ("workflow_checkpoints", "warning", "not_ready", [1], (flow("step_scheduled", "one"),)),
        ("workflow_checkpoints", "warning", "not_ready", [1], (flow("step_held", "one"),)),
        (
            "workflow_checkpoints",
            "passed",
            "checkpoint_ready",
            [],
            (
                flow("step_scheduled", "one"),
                flow("checkpoint_decided", "one", READY),
            ),
        ),
        ("subagent_terminal_states", "warning", "at_work", [1], (child("started", "running"),)),
        ("subagent_terminal_states", "failed", "missing_fields", [1], (child("failed", "failed"),)),
        ("subagent_terminal_states", "failed", "missing_fields", [1], (child("finished", "completed"),)),
        (
            "subagent_terminal_states",
            "warning",
            "not_completed",
            [1],
            (child("failed", "failed", reason="no", next_actions=("look",)),),
        ),
        ("subagent_terminal_states", "passed", "over", [], (child("finished", "completed", summary="s"),)),
        ("subagent_staleness", "passed", "fresh", [], (child("started", "running"),)),
        ("subagent_manager_runtime", "passed", "supervised", [], (child("started", "running"),)),
        ("provider_replay", "passed", "balanced", [], DONE),
        ("provider_replay", "warning", "synthetic_results", [None], (said("user"), said("assistant", "c"))),
        ("session_tree", "passed", NOTHING, [], DONE),
        ("session_tree", "warning", "missing_session", [1], (child("started", "running"),)),
        ("continuation", "passed", "completed", [], DONE),
        ("continuation", "warning", "resumable", [], (started(), FAILED)),
        (
            "continuation",
            "warning",
            "held",
            [2],
            (
                started(),
                ToolHeld("c", "look", "{}", "?", NOW),
                TurnEnded("t", TurnState.HELD, "hold", "x", ("y",)),
            ),
        ),
        (
            "continuation",
            "warning",
            "resumable",
            [],
            (
                started(),
                ToolHeld("c", "look", "{}", "?", NOW, hold_id="h"),
                TurnEnded("t", TurnState.HELD, "hold", "x", ("y",)),
                HoldAnswered("c", approved=True, hold_id="h"),
            ),
        ),
        ("provider_output_truncation", "passed", "whole", [], (used(),)),
        ("provider_output_truncation", "warning", "truncated", [1], (used(output_truncated=True),)),
        ("provider_output_completeness", "passed", "whole", [], (used(stop_reason="tools"),)),
        ("provider_output_completeness", "warning", "cut_off", [1], (used(stop_reason="cut_off"),)),
        ("provider_output_completeness", "warning", "repaired", [1], (used(notes=("a call was cut",)),)),
        (
            "workspace",
            "passed",
            "settled",
            [],
            (ToolStarted("c", "a", "look", "workspace"), invoked("failed")),
        ),
        ("workspace", "warning", "unknown_outcome", [1], (invoked("unknown"),)),
        ("workspace", "warning", "conflicts", [1], (invoked("failed", "their.txt"),)),
        ("attention", "failed", "attention_needed", [1], (AttentionNeeded("stuck", ("a",), ("look",)),)),
    ],
)
def test_each_check_says_what_it_found_and_where(
    check_id: str, status: str, classification: str, seqs: list[int | None], events: tuple[object, ...]
) -> None:
    """One log per outcome: status, classification and the sequence numbers of the findings."""
    report = diagnose(session_of(*events))
    assert verdict(report, check_id) == (status, classification)
    assert [each.seq for each in report.check(check_id).findings] == seqs
    if status == "failed":
        assert report.status == "blocked"


def test_the_report_has_every_check_and_is_plain_data() -> None:
    """The ids are those that programs compare, and JSON can hold the whole."""
    report = diagnose(session_of(*DONE))
    assert [each.id for each in report.checks] == list(CHECKS)
    assert set(CONCEPT_IDS) <= set(CHECKS)
    assert (report.status, report.ok) == ("ready", True)
    assert json.loads(json.dumps(report.to_data()))["status"] == "ready"
    assert "nothing to check" in report.render()


def test_a_child_that_nobody_hears_of_is_stale() -> None:
    """Five minutes of silence are looked at; less is not."""
    clock = FakeClock(NOW)
    session = Session(clock=clock)
    session.dispatch(child("started", "running"))
    clock.advance(300)
    assert verdict(diagnose(session), "subagent_staleness") == ("passed", "fresh")
    clock.advance(1)
    assert verdict(diagnose(session), "subagent_staleness") == ("warning", "stale")


def test_a_session_that_nobody_holds_is_crashed_and_its_children_are_unsupervised(tmp_path: Path) -> None:
    """Who holds the lease tells a run under way from one whose process died."""
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    session.dispatch_all((started(), ToolStarted("c", "a", "look", "workspace"), child("started", "running")))
    at_work = diagnose(session)
    assert verdict(at_work, "turn_completion") == ("warning", "under_way")
    assert verdict(at_work, "workspace") == ("warning", "running")
    assert verdict(at_work, "continuation") == ("passed", "under_way")
    session.close()
    died = diagnose(Session.open(log, session.session_id, read_only=True))
    assert verdict(died, "turn_completion") == ("warning", "crashed")
    assert verdict(died, "subagent_manager_runtime") == ("warning", "unsupervised")
    assert verdict(died, "workspace") == ("warning", "cut_off")
    assert f"treenail resume {session.session_id} --store {tmp_path / 'runs.db'}" in died.next_actions
    log.close()


def test_the_tree_knows_parents_and_children(tmp_path: Path) -> None:
    """A child that is in the store is no finding."""
    log = SqliteLog(tmp_path / "runs.db")
    parent = Session(log=log)
    made = Session(log=log, parent=parent)
    parent.dispatch(child("started", "running", child_session_id=str(made.session_id)))
    report = diagnose(parent)
    assert verdict(report, "session_tree") == ("passed", "whole")
    assert [each["session_id"] for each in report.tree["children"]] == [str(made.session_id)]  # type: ignore[attr-defined]  # plain data
    assert verdict(diagnose(made), "session_tree") == ("passed", "whole")
    log.close()


# --- runs that really ran -----------------------------------------------------------------------------------


def test_a_clean_run_is_ready(tmp_path: Path) -> None:
    """Nothing is found where nothing is wrong."""
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "done"])
    with AGENT.run("go", provider=script, workspace=tmp_path, store=tmp_path / "runs.db") as run:
        report = diagnose(run.execution_state.session)
    assert report.status == "ready", report.render()
    assert report.usage["model_calls"] == 2


def test_a_failed_run_says_how_to_go_on(tmp_path: Path) -> None:
    """The commands name the run, so that they can be pasted."""
    script = ScriptedProvider([Answer("half", error=ModelCallError("cut", kind="connection"))])
    with AGENT.run("go", provider=script, store=tmp_path / "runs.db") as run:
        report = diagnose(run.execution_state.session)
        view = project(run.execution_state.session)
    assert report.status == "ready_with_warnings"
    assert verdict(report, "turn_failure_evidence") == ("warning", "connection")
    assert verdict(report, "assistant_canonicalization") == ("warning", "partial_preserved")
    resume = f"treenail resume {run.id} --store {tmp_path / 'runs.db'}"
    assert resume in report.next_actions
    assert resume in run.next_actions
    assert resume in view.turns[-1].next_actions


def test_the_commands_of_a_report_run_as_they_stand_from_anywhere(tmp_path: Path) -> None:
    """Each one that looks is pasted into a shell in another directory, and finds the run in its store."""
    there = tmp_path / "a place with spaces"
    there.mkdir()
    script = ScriptedProvider([Answer("half", error=ModelCallError("cut", kind="connection"))])
    with AGENT.run("go", provider=script, store=there / "runs.db") as run:
        report = diagnose(run.execution_state.session)
    looking = [each for each in report.next_actions if each.split()[1] in ("show", "replay", "diagnose")]
    assert len(looking) >= 2
    for each in looking:
        shell = each.replace("treenail", f"{sys.executable} -m treenail", 1)
        ran = subprocess.run(
            shell, check=False, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        assert str(run.id)[:8] in ran.stdout


def test_what_needed_a_person_is_resolved_by_one(tmp_path: Path) -> None:
    """A session that was marked is blocked until somebody says what was done; the history keeps both."""
    session = Session(log=SqliteLog(tmp_path / "runs.db"))
    session.dispatch_all((*DONE, AttentionNeeded("stuck", ("a.txt",), ("look",))))
    assert resolve_attention(Session(), "nothing to do") is None
    with pytest.raises(UsageError, match="the note is empty"):
        resolve_attention(session, " ")
    assert diagnose(session).status == "blocked"
    assert resolve_attention(session, "put a.txt back by hand", by="kim") is not None
    report = diagnose(session)
    assert report.ok
    assert verdict(report, "attention") == ("passed", "resolved")
    assert "put a.txt back by hand" in report.check("attention").findings[0].message
    session.dispatch(AttentionNeeded("stuck again"))
    assert diagnose(session).status == "blocked"
    items = [each for each in project(session).turns[0].items if each.kind == "attention"]
    shown = [(each.status, each.is_good) for each in items]
    assert shown == [("", False), ("resolved", True), ("", False)]


def test_a_held_run_says_which_call_to_answer(tmp_path: Path) -> None:
    """A held call is not an orphan."""
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "done"])
    with AGENT.run("go", provider=script, permissions=Permissions(PermissionMode.ASK)) as run:
        report = diagnose(run.execution_state.session)
    assert report.ok
    assert verdict(report, "tool_pairing") == ("passed", "held")
    assert f"treenail hold answer {run.id} --call call_1_1 --yes" in report.next_actions


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two runs, closed."""
    place = tmp_path_factory.mktemp("store") / "runs.db"
    for answer in ("done", "also done"):
        script = ScriptedProvider([Answer("", [("note", {"text": "x" * 3000})]), answer])
        with AGENT.run("go", provider=script, store=place):
            pass
    return place


def test_every_prefix_of_a_run_gives_a_report_that_never_says_completed(store: Path) -> None:
    """Whatever a log was cut off at, the checks run and the turn is not taken for done."""
    log = SqliteLog(store)
    info = log.sessions()[0]
    for upto in range(info.head):
        report = diagnose(Session.open(log, info.session_id, read_only=True, upto=upto))
        assert verdict(report, "turn_completion") != ("passed", "completed")
    whole = diagnose(Session.open(log, info.session_id, read_only=True))
    assert verdict(whole, "turn_completion") == ("passed", "completed")
    log.close()


# --- damage -------------------------------------------------------------------------------------------------


def test_a_whole_store_is_reported_session_by_session(store: Path) -> None:
    """Both runs are ready; asked for one, only that one is looked at."""
    reports = diagnose_store(store)
    assert [each.status for each in reports] == ["ready", "ready"]
    log = SqliteLog(store)
    session_id = log.sessions()[1].session_id
    log.close()
    assert [each.session_id for each in diagnose_store(store, session_id)] == [str(session_id)]


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_or_truncated_store_gives_a_report(
    data: st.DataObject, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever bytes are changed or cut off, something is said, and whatever claims to be whole is whole."""
    place = tmp_path_factory.mktemp("damaged") / "runs.db"
    shutil.copyfile(store, place)
    size = place.stat().st_size
    if data.draw(st.booleans(), label="truncate"):
        with place.open("r+b") as file:
            file.truncate(data.draw(st.integers(0, size - 1), label="length"))
    else:
        at = data.draw(st.integers(0, size - 1), label="place")
        with place.open("r+b") as file:
            file.seek(at)
            before = file.read(64)
            file.seek(at)
            file.write(bytes(each ^ 0x5A for each in before))
    reports = diagnose_store(place)
    assert reports
    for each in reports:
        assert each.checks
        assert each.render()
        if each.status == "ready":
            assert each.check("turn_completion").classification == "completed"
        if each.check("log").classification == "damaged":
            assert not each.ok
            assert each.next_actions
    shutil.rmtree(place.parent)


def test_a_file_that_is_no_store_is_a_report_too(tmp_path: Path) -> None:
    """So is one that is empty, or not there; none of them is made into a store."""
    place = tmp_path / "runs.db"
    place.write_bytes(b"not a store" * 1000)
    (report,) = diagnose_store(place)
    assert (report.status, report.check("log").classification) == ("blocked", "damaged")
    assert place.read_bytes() == b"not a store" * 1000
    for missing in (tmp_path / "nothing.db", tmp_path / "empty.db"):
        if missing.name == "empty.db":
            missing.touch()
        (report,) = diagnose_store(missing)
        assert report.status == "blocked"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty.db", "runs.db"]


def test_an_event_of_an_unknown_type_is_a_warning(tmp_path: Path) -> None:
    """It is carried along, and whoever looks is told which one."""
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    session.dispatch_all(DONE)
    from treenail.log import Draft

    lease = session._core.lease
    assert lease is not None
    log.append(lease, [Draft("somebody.Else", b"{}", 0)], expected_seq=session.head)
    session.close()
    report = diagnose(Session.open(log, session.session_id, read_only=True))
    assert verdict(report, "log") == ("warning", "unknown_types")
    assert [each.seq for each in report.check("log").findings] == [7]
    log.close()

"""A turn runs to an ending that its log proves, and goes on after a crash without repeating anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.turns.turn_child import CHILD_AGENT, CHILD_SCRIPT

from treenail import Agent, Limits, TurnState, tool
from treenail.conversation import WITHDRAWN_TEXT, InnerMessage
from treenail.errors import ConversationNotFound, PromptEvaluationError, PromptMismatch, UsageError
from treenail.history import diagnose, project
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.tools import PermissionMode, Permissions, ToolInvoked, answer_hold, pending_holds
from treenail.turns import PartialText, TurnEnded, TurnStarted, turn_state


@tool
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


@tool
def spoil(*, context) -> str:
    """Write a note and fail."""
    context.filesystem.write("notes.txt", "spoilt\n", mode="append")
    raise RuntimeError("half-way")


AGENT = Agent("tester", tools=(note, spoil))


def roles(run) -> list[str]:
    return [each.role for each in run.messages]


def test_a_clean_turn_is_completed_and_its_answer_is_the_output(tmp_path: Path) -> None:
    script = ScriptedProvider([Answer("writing", [("note", {"text": "one"})]), "done"])
    with AGENT.run("go", provider=script, workspace=tmp_path, store=tmp_path / "runs.db") as run:
        assert run.state is TurnState.COMPLETED
        assert run.output == "done"
        assert roles(run) == ["system", "user", "assistant", "tool", "assistant"]
        assert [each.sequence for each in run.messages] == [0, 1, 2, 3, 4]
        assert [each.turn for each in run.messages] == [0, 0, 1, 1, 2]
        assert (tmp_path / "notes.txt").read_text() == "one\n"


def test_a_failed_tool_leaves_no_trace_and_the_model_is_told(tmp_path: Path) -> None:
    script = ScriptedProvider([Answer("", [("note", {"text": "a"}), ("spoil", {})]), "sorry"])
    with AGENT.run("go", provider=script, workspace=tmp_path) as run:
        assert (tmp_path / "notes.txt").read_text() == "a\n"
        told = [each.content for each in run.messages if each.role == "tool"]
        assert told[0] == "noted"
        assert "half-way" in told[1]
        assert [each.success for each in run.tool_calls] == [True, False]


def test_a_provider_that_fails_without_text_ends_the_turn_failed(tmp_path: Path) -> None:
    script = ScriptedProvider([Answer(error=PromptEvaluationError("no route"))])
    with AGENT.run("go", provider=script) as run:
        assert run.state is TurnState.FAILED
        assert run.result.error_kind == "provider_error"
        assert run.text == ""
        assert run.next_actions


def test_text_before_a_failure_is_evidence_and_never_an_answer() -> None:
    script = ScriptedProvider([Answer("half an ans", error=PromptEvaluationError("cut"))])
    with AGENT.run("go", provider=script) as run:
        session = run.execution_state.session
        assert run.state is TurnState.PARTIAL_FAILED
        assert run.text == ""
        assert session[PartialText].latest().text == "half an ans"
        assert roles(run) == ["system", "user"]


def test_a_model_that_never_stops_ends_at_the_iteration_cap() -> None:
    endless = ScriptedProvider([Answer("again", [("note", {"text": "x"})])], repeat=True)
    capped = Agent("tester", tools=(note,), max_iterations=3)
    with capped.run("go", provider=endless) as run:
        assert run.state is TurnState.FAILED
        assert run.result.error_kind == "iteration_cap"
        assert len(run.tool_calls) == 3


def test_the_budget_stops_a_runaway_before_it_is_passed() -> None:
    costly = ScriptedProvider([Answer("hm", [("note", {"text": "x"})], cost_usd=0.30)], repeat=True)
    with AGENT.run("go", provider=costly, limits=Limits(max_cost_usd=1.0)) as run:
        assert run.state is TurnState.FAILED
        assert run.result.error_kind == "budget_exceeded"
        assert len(run.tool_calls) == 3


def test_what_was_spent_is_remembered_by_a_resumed_run(tmp_path: Path) -> None:
    costly = ScriptedProvider([Answer("hm", [("note", {"text": "x"})], cost_usd=0.30)], repeat=True)
    store = tmp_path / "runs.db"
    with AGENT.run("go", provider=costly, store=store, limits=Limits(max_cost_usd=1.0)) as run:
        calls = len(run.tool_calls)
    with AGENT.resume(store, run.id, provider=costly, limits=Limits(max_cost_usd=1.0)) as again:
        assert again.result.error_kind == "budget_exceeded"
        assert len(again.tool_calls) == calls
    with AGENT.resume(store, run.id, provider=costly, limits=Limits(max_cost_usd=1.3)) as more:
        assert len(more.tool_calls) == calls + 1


def test_a_held_call_waits_for_a_person_and_the_answer_resumes_it_alone(tmp_path: Path) -> None:
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "done"])
    asking = Permissions(PermissionMode.ASK)
    store = tmp_path / "runs.db"
    with AGENT.run("go", provider=script, workspace=tmp_path, store=store, permissions=asking) as run:
        assert run.state is TurnState.HELD
        assert not (tmp_path / "notes.txt").exists()
    log = SqliteLog(store)
    with Session.open(log, run.id) as session:
        (held,) = pending_holds(session)
        answer_hold(session, held.call_id, approved=True)
    log.close()
    with AGENT.resume(store, run.id, provider=script, permissions=asking) as resumed:
        assert resumed.state is TurnState.COMPLETED
        assert (tmp_path / "notes.txt").read_text() == "one\n"


def test_a_truncated_log_never_reads_as_completed(tmp_path: Path) -> None:
    """At every prefix of a completed turn's log, only the whole one is completed."""
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "done"])
    with AGENT.run("go", provider=script) as run:
        session = run.execution_state.session
        states = [
            turn_state(Session.open(session.log, session.session_id, read_only=True, upto=seq))
            for seq in range(session.head + 1)
        ]
    assert states[-1] is TurnState.COMPLETED
    assert set(states[:-1]) == {TurnState.UNFINISHED}


def test_an_ending_without_its_evidence_is_not_believed() -> None:
    session = Session()
    session.dispatch(TurnStarted("t", "e", "a", "task", "p", "m"))
    session.dispatch(TurnEnded("t", TurnState.COMPLETED))
    assert turn_state(session) is TurnState.UNFINISHED


def test_resuming_nothing_or_with_another_agent_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    log = SqliteLog(store)
    empty = Session(log=log)
    empty.close()
    log.close()
    with pytest.raises(ConversationNotFound):
        AGENT.resume(store, empty.session_id, provider=ScriptedProvider([]))
    with AGENT.run("go", provider=ScriptedProvider(["done"]), store=store) as run:
        pass
    with pytest.raises(PromptMismatch):
        Agent("other").resume(store, run.id, provider=ScriptedProvider([]))


def test_a_run_in_memory_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has its log, so there is no lease to keep alive."""
    starters: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        starters.append(threading.current_thread())
        start(thread)

    @tool(effects="none")
    async def look() -> str:
        """Look."""
        return "seen"

    script = [Answer("", [("look", {})]), "done"]
    monkeypatch.setattr(threading.Thread, "start", noted)
    with Agent("a", tools=(look,)).run("go", provider=ScriptedProvider(script)) as run:
        assert run.state is TurnState.COMPLETED
    # What other tests have left running may start what it likes.
    assert threading.current_thread() not in starters


def test_a_run_shows_itself_in_one_line() -> None:
    """However much it has said and holds."""
    with Agent("a").run("go", provider=ScriptedProvider(["long " * 10_000])) as run:
        assert repr(run) == f"Run({run.id}, completed)"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two tools named 'note'"):
        Agent("a", tools=(note, note)).run("go", provider=ScriptedProvider(["x"]))


def _start(directory: Path, kill_at: int) -> int:
    command = [sys.executable, str(Path(__file__).with_name("turn_child.py")), str(directory), str(kill_at)]
    return subprocess.run(command, check=False, timeout=60, env={**os.environ}).returncode


def test_after_a_kill_at_any_event_the_resumed_turn_repeats_no_finished_tool(tmp_path: Path) -> None:
    """The process is killed right after each event of the turn in its turn; each run ends the same."""
    whole = tmp_path / "whole"
    whole.mkdir()
    assert _start(whole, 0) == 0
    log = SqliteLog(whole / "runs.db")
    events = log.sessions()[0].head
    log.close()
    expected = (whole / "work" / "notes.txt").read_text()
    assert expected == "first\nsecond\n"

    for kill_at in range(1, events, 3):
        place = tmp_path / f"killed-{kill_at}"
        place.mkdir()
        assert _start(place, kill_at) == -signal.SIGKILL
        log = SqliteLog(place / "runs.db")
        (info,) = log.sessions()
        log.close()
        if kill_at < 3:
            continue  # Not even the request was on disk: there is nothing to resume.
        with CHILD_AGENT.resume(place / "runs.db", info.session_id, provider=CHILD_SCRIPT) as run:
            assert run.state is TurnState.COMPLETED, kill_at
            session = run.execution_state.session
            kept = [each.call_id for each in session[ToolInvoked].all() if each.success]
            assert sorted(kept) == ["call_1_1", "call_2_1"]
            assert [each.role for each in session[InnerMessage].all()] == [
                "system",
                "user",
                "assistant",
                "tool",
                "assistant",
                "tool",
                "assistant",
            ]
        assert (place / "work" / "notes.txt").read_text() == expected


def test_a_second_turn_on_a_session_closes_what_the_first_left_open_and_sees_the_rest(tmp_path: Path) -> None:
    """A new request after a crash: the orphan is answered for good, and the model sees both turns."""
    import anyio

    from treenail.state import ExecutionState, ResourceRegistry
    from treenail.turns import InnerLoop
    from treenail.workspace import Filesystem, InMemoryFilesystem

    seen: list[list[str]] = []

    def look(request):
        seen.append([f"{each.role}:{each.text[:9]}" for each in request.items])
        return "second answer"

    state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: InMemoryFilesystem()}))
    asking = Permissions(PermissionMode.ASK)
    script = ScriptedProvider([Answer("", [("note", {"text": "x"})]), look])

    def loop() -> InnerLoop:
        return InnerLoop(state, script, AGENT.prompt, permissions=asking)

    assert anyio.run(loop().run, "first").state is TurnState.HELD
    assert anyio.run(loop().run, "second").state is TurnState.COMPLETED
    assert seen == [["system:## 1. Ins", "user:first", "assistant:", "tool:This call", "user:second"]]
    results = [each for each in state.session[InnerMessage].all() if each.role == "tool"]
    assert len(results) == 1


def test_erasing_a_run_leaves_no_byte_of_it_in_the_log_or_among_the_kept_files(tmp_path: Path) -> None:
    from treenail.history import erase_run

    secret, other = "the-secret-of-this-run", "the-other-runs-text"
    store, work = tmp_path / "runs.db", tmp_path / "work"
    work.mkdir()
    runs = []
    for text in (secret, other):
        (work / "notes.txt").unlink(missing_ok=True)
        script = ScriptedProvider(
            [Answer("", [("note", {"text": text}), ("note", {"text": "more"})]), "done"]
        )
        with AGENT.run("go", provider=script, workspace=work, store=store) as run:
            runs.append(run.id)

    def bytes_of_the_store() -> bytes:
        places = [tmp_path / f"runs.db{ending}" for ending in ("", "-wal", "-shm")]
        places += [each for each in (tmp_path / "runs.db.files").rglob("*") if each.is_file()]
        return b"".join(each.read_bytes() for each in places if each.exists())

    assert secret.encode() in bytes_of_the_store()
    erase_run(store, runs[0])
    left = bytes_of_the_store()
    assert secret.encode() not in left
    assert other.encode() in left
    log = SqliteLog(store)
    assert [each.session_id for each in log.sessions()] == [runs[1]]
    log.close()


def test_another_request_withdraws_a_question_that_nobody_answered() -> None:
    """The held call is no orphan: the model is told why it was not run, and nobody can answer any more."""
    asking = Permissions(PermissionMode.ASK)
    script = ScriptedProvider([Answer("", [("note", {"text": "one"})]), "as you like"])
    log = MemoryLog()
    with AGENT.run("go", provider=script, permissions=asking, store=log) as run:
        assert run.state is TurnState.HELD
    with AGENT.run("something else", provider=script, permissions=asking, store=log, run_id=run.id) as later:
        assert later.output == "as you like"
        session = later.execution_state.session
        (told,) = [each for each in later.messages if each.role == "tool"]
        assert (told.content, told.is_error) == (WITHDRAWN_TEXT, True)
        assert pending_holds(session) == ()
        with pytest.raises(UsageError, match="no call 'call_1_1' waits"):
            answer_hold(session, "call_1_1", approved=True)
        assert diagnose(session).status == "ready"
        items = {each.kind: each.status for each in project(session).turns[0].items}
        assert (items["tool"], items["hold"]) == ("withdrawn", "refused")


def test_a_runs_limits_may_be_a_containment_with_guards_of_its_own() -> None:
    """A shield, breakers, a loop policy: whatever `contain` takes reaches a run."""
    from treenail.containment import SafeModeHook, ShieldPipeline
    from treenail.turns import contain

    def guarded(session: Session):
        return contain(session, Limits(max_steps=9), pipeline=ShieldPipeline(hooks=[SafeModeHook()]))

    with AGENT.run("go", provider=ScriptedProvider(["hi"]), limits=guarded) as run:
        assert (run.state, run.result.error_kind) == (TurnState.FAILED, "halted")
        assert "safe mode is on" in run.result.details

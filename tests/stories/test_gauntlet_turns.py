"""The gauntlet: every way in which a turn can end, on the running system and a store on disk.

Each story runs an agent to its end, closes everything, and then believes only what another process would
read: the state that the log shows, what the model would see next, what a screen shows, and what diagnostics
say.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import anyio
import pytest

from treenail import Agent, Limits, tool
from treenail.conversation import ProviderUsage, ReplayItem, inspect_replay
from treenail.errors import ModelCallError
from treenail.history import RunView, diagnose, project
from treenail.history.diagnostics import DiagnosticsReport
from treenail.history.text import render_text
from treenail.log import Channel
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli.screen import PlainScreen, watching
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session, spec_of
from treenail.tools import PermissionMode, Permissions
from treenail.turns import (
    InnerLoop,
    PartialText,
    TurnEnded,
    TurnStarted,
    TurnState,
    close_crashed_turn,
    newest_turn,
    turn_state,
)

WAIT_S = 60.0
CHILD = Path(__file__).with_name("gauntlet_child.py")


@tool
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


@tool(effects="none")
async def hang() -> str:
    """Never come back."""
    await anyio.sleep_forever()
    return "never"


AGENT = Agent("gauntlet", instructions="You are thorough.", tools=(note, hang), max_iterations=4)
WRITES = Answer("I write it down.", [("note", {"text": "one"})])


@dataclass(frozen=True)
class Ended:
    """What is left of a run: what its store says to whoever opens it next."""

    state: TurnState
    ended: TurnEnded | None
    view: RunView
    report: DiagnosticsReport
    sent: list[ReplayItem]
    """What the model would see next."""
    stored: dict[int, object | None]
    """The events by their sequence numbers."""
    session_id: UUID


def read_back(store: Path) -> Ended:
    log = SqliteLog(store)
    try:
        (info,) = log.sessions()
        session = Session.open(log, info.session_id, read_only=True)
        derived = newest_turn(session)
        return Ended(
            turn_state(session),
            None if derived is None else derived.ended,
            project(session),
            diagnose(session),
            list(inspect_replay(session).items),
            {envelope.seq: value for envelope, value in session.events()},
            info.session_id,
        )
    finally:
        log.close()


def the_laws_hold(story: Ended) -> None:
    """What is true of every story, however it ended."""
    # The three who look at the log agree.
    assert story.view.state is story.state
    assert story.report.turns[-1]["state"] == story.state.value
    # Only a completed turn shows an answer, and whatever else says what to do.
    assert (story.view.answer is not None) == (story.state is TurnState.COMPLETED)
    if story.state is not TurnState.COMPLETED:
        assert story.report.next_actions
        assert story.ended is None or (
            story.ended.error_kind and story.ended.details and story.ended.next_actions
        )
    # Whatever the model sees comes from an event that may be replayed; no audit event is among them.
    for item in story.sent:
        if item.seq:
            assert spec_of(type(story.stored[item.seq])).channel is Channel.REPLAY
    cut_off = [each.text for each in story.stored.values() if isinstance(each, PartialText)]
    assert not any(text in item.text for text in cut_off for item in story.sent)
    # Nothing of the live channel was ever logged.
    assert all(spec_of(type(each)).channel is not Channel.LIVE for each in story.stored.values())


def run(store: Path, *answers: Answer | str, **options) -> Ended:
    with AGENT.run("Do it", provider=ScriptedProvider(list(answers)), store=store, **options):
        pass
    return read_back(store)


# --- the stories --------------------------------------------------------------------------------------------


def test_clean_completion(tmp_path: Path) -> None:
    """A clean answer after a tool: completed, ready, and the answer is what a screen shows."""
    story = run(tmp_path / "runs.db", WRITES, "All done.", workspace=tmp_path)
    the_laws_hold(story)
    assert (story.state, story.view.answer) == (TurnState.COMPLETED, "All done.")
    assert story.report.status == "ready", story.report.render()
    assert [each.role for each in story.sent] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("kind", ["connection", "transient", "content_filtered"])
def test_stream_error_after_partial_text(tmp_path: Path, kind: str) -> None:
    """The text is evidence, marked as partial everywhere; the model never sees it again."""
    cut = Answer("The answer is fourty", error=ModelCallError("the stream broke", kind=kind))
    story = run(tmp_path / "runs.db", WRITES, cut)
    the_laws_hold(story)
    assert story.state is TurnState.PARTIAL_FAILED
    assert story.ended is not None
    assert story.ended.error_kind == kind
    assert [each.text for each in story.view.turns[0].items if each.kind == "partial"] == [
        "The answer is fourty"
    ]
    assert "fourty" not in "".join(each.text for each in story.sent)
    assert "not an answer, cut off: The answer is fourty" in render_text(story.view)
    assert story.report.check("assistant_canonicalization").classification == "partial_preserved"


def test_stream_error_without_text(tmp_path: Path) -> None:
    """A failure, and no trace of an answer."""
    story = run(tmp_path / "runs.db", Answer(error=ModelCallError("no key", kind="authentication")))
    the_laws_hold(story)
    assert (story.state, [each.role for each in story.sent]) == (TurnState.FAILED, ["system", "user"])


@contextmanager
def at_work(place: Path, where: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a process of its own, and wait until it is in the middle of something."""
    (place / "work").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, str(CHILD), str(place), port, where]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            server.settimeout(WAIT_S)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(WAIT_S)
                assert connection.recv(16) == b"at work"
                yield process
                process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("where", ["model", "tool"])
@pytest.mark.parametrize(
    ("signum", "kind"),
    [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "terminated")],
    ids=["SIGINT", "SIGTERM"],
)
def test_interrupted_by_a_signal(tmp_path: Path, signum: signal.Signals, kind: str, where: str) -> None:
    """Ctrl-C and SIGTERM end the turn durably, in the middle of an answer or of a tool."""
    with at_work(tmp_path, where) as process:
        process.send_signal(signum)
    assert process.returncode == -signum
    story = read_back(tmp_path / "runs.db")
    the_laws_hold(story)
    assert story.state is TurnState.INTERRUPTED
    assert story.ended is not None
    assert story.ended.error_kind == kind
    assert f"treenail resume {story.session_id} --store {tmp_path / 'runs.db'}" in story.report.next_actions
    assert not (tmp_path / "work" / "half.txt").exists()


def test_killed_and_closed_by_whoever_opens_it_next(tmp_path: Path) -> None:
    """SIGKILL leaves no ending; it reads as unfinished until somebody closes or resumes it."""
    with at_work(tmp_path, "tool") as process:
        process.kill()
    crashed = read_back(tmp_path / "runs.db")
    the_laws_hold(crashed)
    assert (crashed.state, crashed.ended) == (TurnState.UNFINISHED, None)
    assert crashed.report.check("turn_completion").classification == "crashed"
    log = SqliteLog(tmp_path / "runs.db")
    with Session.open(log, crashed.session_id) as session:
        close_crashed_turn(session)
    log.close()
    story = read_back(tmp_path / "runs.db")
    the_laws_hold(story)
    assert story.ended is not None
    assert (story.state, story.ended.error_kind) == (TurnState.INTERRUPTED, "crash")


@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_timed_out(tmp_path: Path, limit: str) -> None:
    """A run's time limit and a turn's deadline are told apart, and neither is a failure of the model."""
    store = tmp_path / "runs.db"
    stuck = Answer("I wait.", [("hang", {})])
    if limit == "timeout":
        story = run(store, stuck, limits=Limits(timeout=0.3))
    else:
        with_deadline(store, stuck)
        story = read_back(store)
    the_laws_hold(story)
    assert story.ended is not None
    assert (story.state, story.ended.error_kind) == (TurnState.TIMED_OUT, limit)


def with_deadline(store: Path, *answers: Answer) -> None:
    from treenail.state import Deadline, ExecutionState

    log = SqliteLog(store)
    now = datetime.now(UTC)
    with Session(log=log) as session:
        loop = InnerLoop(
            ExecutionState(session), ScriptedProvider(list(answers)), AGENT.prompt, "gauntlet",
            deadline=Deadline(now + timedelta(seconds=0.3), now),
        )  # fmt: skip
        anyio.run(loop.run, "Do it")
    log.close()


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (Limits(max_steps=3), "step_limit_exceeded"),
        (Limits(max_cost_usd=0.25), "budget_exceeded"),
        (None, "iteration_cap"),
    ],
    ids=["steps", "money", "iterations"],
)
def test_stopped_by_a_ceiling(tmp_path: Path, limits: Limits | None, kind: str) -> None:
    """A runaway ends as a failure of the ceiling's own kind, never as completed."""
    again = Answer("Again.", [("note", {"text": "x"})], cost_usd=0.10)
    with AGENT.run(
        "Do it", provider=ScriptedProvider([again], repeat=True), store=tmp_path / "runs.db", limits=limits
    ):
        pass
    story = read_back(tmp_path / "runs.db")
    the_laws_hold(story)
    assert story.ended is not None
    assert (story.state, story.ended.error_kind) == (TurnState.FAILED, kind)


def test_held_for_a_person(tmp_path: Path) -> None:
    """The run waits; the question is on the screen, and the command that answers it in the report."""
    story = run(tmp_path / "runs.db", WRITES, "done", permissions=Permissions(PermissionMode.ASK))
    the_laws_hold(story)
    assert story.state is TurnState.HELD
    assert [each.title for each in story.view.turns[0].items if each.kind == "hold"] == ["note"]
    answer = f"treenail hold answer {story.session_id} --call call_1_1 --yes --store {tmp_path / 'runs.db'}"
    assert answer in story.report.next_actions


def test_a_bug_is_an_ending_of_its_own(tmp_path: Path) -> None:
    """Something that nobody foresaw is recorded with its name."""

    def broken(request: object) -> str:
        raise ZeroDivisionError("in the provider")

    story = run(tmp_path / "runs.db", broken)  # type: ignore[arg-type]  # a script may compute its answers
    the_laws_hold(story)
    assert story.ended is not None
    assert (story.state, story.ended.error_kind) == (TurnState.FAILED, "bug")
    assert "ZeroDivisionError: in the provider" in story.ended.details


# --- replay and projection ----------------------------------------------------------------------------------


def test_audit_events_never_enter_what_a_provider_is_sent(tmp_path: Path) -> None:
    """Failures, partial text and usage pile up over three attempts; the input stays the same to the byte."""
    store = tmp_path / "runs.db"
    cut = Answer("half", error=ModelCallError("broke", kind="connection"))
    first = run(store, cut)
    before = [each.canonical() for each in first.sent]
    for _ in range(2):
        with AGENT.resume(store, first.session_id, provider=ScriptedProvider([cut])):
            pass
        story = read_back(store)
        the_laws_hold(story)
        assert [each.canonical() for each in story.sent] == before
    log = SqliteLog(store)
    session = Session.open(log, first.session_id, read_only=True)
    inspected = inspect_replay(session)
    audit = {
        envelope.seq
        for envelope, value in session.events()
        if isinstance(value, TurnStarted | TurnEnded | PartialText | ProviderUsage)
    }
    assert audit
    assert audit <= {each.seq for each in inspected.left_out}
    assert not audit & {each.seq for each in inspected.items}
    log.close()


def test_no_prefix_of_any_story_reads_as_completed(tmp_path: Path) -> None:
    """Every log of a real run, cut off at every event: only the whole one of a clean turn is completed."""
    stories = [
        [WRITES, "All done."],
        [WRITES, Answer("ha", error=ModelCallError("x"))],
        [Answer(error=ModelCallError("x"))],
    ]
    for number, answers in enumerate(stories):
        store = tmp_path / f"{number}.db"
        whole = run(store, *answers)
        log = SqliteLog(store)
        head = log.info(whole.session_id).head
        for upto in range(head + 1):
            past = Session.open(log, whole.session_id, read_only=True, upto=upto)
            is_completed = turn_state(past) is TurnState.COMPLETED
            assert is_completed == (upto == head and number == 0)
            assert (project(past).answer is not None) == is_completed
            assert (diagnose(past).turns[-1:] or [{"state": ""}])[0]["state"] != "completed" or is_completed
        log.close()


def test_a_screen_that_dies_in_the_middle_harms_nothing(tmp_path: Path) -> None:
    """One screen breaks, one never reads; the run completes, and its view is rebuilt from the log."""
    shown: list[object] = []

    class Broken(PlainScreen):
        def show(self, seen: object) -> None:
            shown.append(seen)
            raise BrokenPipeError

    with watching(Broken(sys.stdout, sys.stderr)) as feed:
        idle = feed.subscribe(capacity=1)
        story = run(tmp_path / "runs.db", WRITES, "All done.", watch=feed.publish)
    the_laws_hold(story)
    assert story.view.answer == "All done."
    assert len(shown) == 1
    assert idle.get_nowait() is not None

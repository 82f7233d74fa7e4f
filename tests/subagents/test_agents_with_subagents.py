"""An agent that is given subagents: the tools, the supervision, and forgetting all of it again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from treenail import Agent, TurnState, tool
from treenail.conversation import SubagentEvent
from treenail.history import erase_run
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.subagents import with_subagents
from treenail.turns import turn_state


@tool(effects="workspace")
def note(text: str, *, context: Any) -> str:
    """Write a note."""
    context.filesystem.write("note.txt", text)
    return "noted"


WORKER = Agent("worker", "You take notes.", tools=(note,))


class Model(ScriptedProvider):
    """The boss hands the work on; the worker does it."""

    def _next(self, request: ModelRequest) -> Answer:
        said = request.items[0].text
        if "You take notes" in said:
            done = request.answers_so_far > 0
            return Answer("noted it") if done else Answer("", [("note", {"text": "a private matter"})])
        spawn = Answer("", [("spawn_agent", {"agent": "worker", "task": "note it", "workspace": "isolated"})])
        script = [
            spawn,
            Answer("", [("wait_agent", {})]),
            Answer("", [("apply_agent", {"id": "worker-1"})]),
            Answer("done"),
        ]
        return script[request.answers_so_far]


BOSS = Agent("boss", "You hand work on.", extensions=(with_subagents([WORKER]),))


def test_an_agent_hands_work_on_and_brings_it_home(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with BOSS.run("go", provider=Model([]), workspace=tmp_path / "work", store=tmp_path / "runs.db") as run:
        assert run.state is TurnState.COMPLETED, run.result
        events = [each.event for each in run.execution_state.session[SubagentEvent].all()]
    assert events[0] == "queued"
    assert events[-1] == "finished"
    assert (tmp_path / "work/note.txt").read_text() == "a private matter"


def test_erasing_a_run_forgets_its_subagents_and_their_copies(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    store = tmp_path / "runs.db"
    with BOSS.run("go", provider=Model([]), workspace=tmp_path / "work", store=store) as run:
        pass
    erase_run(store, run.id)
    log = SqliteLog(store)
    assert log.sessions() == []
    log.close()
    (tmp_path / "work/note.txt").unlink()
    kept = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert b"a private matter" not in kept


@tool(effects="none")
async def press_ctrl_c() -> str:
    """Do what a person does who has seen enough."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupt_in_a_childs_task_leaves_evidence_of_the_child(tmp_path: Path, backend: str) -> None:
    """Trio raises Ctrl-C in whichever task runs: the parent's log says what became of the child in it."""

    class Impatient(Model):
        def _next(self, request: ModelRequest) -> Answer:
            if "You take notes" in request.items[0].text:
                return Answer("", [("press_ctrl_c", {})])
            return super()._next(request)

    worker = Agent("worker", "You take notes.", tools=(press_ctrl_c,))
    boss = Agent("boss", "You hand work on.", extensions=(with_subagents([worker]),))
    (tmp_path / "work").mkdir()
    log = SqliteLog(tmp_path / "runs.db")

    async def main() -> None:
        await boss.arun("go", provider=Impatient([]), workspace=tmp_path / "work", store=log)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
            anyio.run(main, backend=backend)
    finally:
        # An interrupt that no signal has brought ends asyncio's loop before the turn, which then puts back
        # that loop's handler; the next test is not to have it.
        signal.signal(signal.SIGINT, handler)
    told: list[str] = []
    for each in log.sessions():
        with Session.open(log, each.session_id) as session:
            told += [event.event for event in session[SubagentEvent].all()]
            assert turn_state(session) is TurnState.INTERRUPTED
    assert told[-1] == "cancelled"
    log.close()

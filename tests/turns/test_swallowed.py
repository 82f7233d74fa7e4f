"""The first Ctrl-C ends a turn, also if a tool or a judge catches its cancellation and goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from tests.turns import stubborn_child

from treenail import Agent, TurnState, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.tools import ToolInvoked
from treenail.turns import TurnEnded, turn_state

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("who", stubborn_child.FIRST)
def test_one_interrupt_is_enough(who: str, tmp_path: Path) -> None:
    """The turn ends when the stubborn one returns; what a tool changed is undone, and a resume goes on."""
    store, work = tmp_path / "runs.db", tmp_path / "work"
    work.mkdir()
    child = subprocess.Popen(
        [sys.executable, stubborn_child.__file__, who, str(store), str(work)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=60)
    assert said == "swallowed\n", "it was caught, and the turn did not go on"
    assert child.returncode == -signal.SIGINT
    with SqliteLog(store) as log:
        run_id = log.sessions()[0].session_id
        with Session.open(log, run_id, read_only=True) as session:
            assert turn_state(session) is TurnState.INTERRUPTED
            assert [each.error_kind for each in session[TurnEnded].all()] == ["interrupt"]
            outcomes = [each.outcome for each in session[ToolInvoked].all()]
    assert outcomes == ["ok" if who in ("a check", "feedback") else "interrupted"]
    assert not (work / "half.txt").exists()
    calm = Agent("stubborn", tools=stubborn_child.agent(who).tools)
    with calm.resume(store, run_id, provider=ScriptedProvider(stubborn_child.script(who))) as run:
        assert run.state is TurnState.COMPLETED


async def own_timeout() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(60)


async def own_scope() -> None:
    with anyio.move_on_after(0):
        await anyio.sleep(60)


async def own_scope_caught() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        with suppress(asyncio.CancelledError):
            await anyio.sleep(60)


async def own_task() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def own_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60)).cancel()


@pytest.mark.parametrize("takes_context", [True, False])
@pytest.mark.parametrize("body", [own_timeout, own_scope, own_scope_caught, own_task, own_group])
def test_a_tool_may_cancel_what_is_its_own(body: object, takes_context: bool) -> None:
    """A cancellation that a tool has made, and has taken back, is nobody else's."""
    if takes_context:

        @tool
        async def work(*, context: object) -> str:
            """Work."""
            await body()  # type: ignore[operator]  # one of the functions above
            return "done"
    else:

        @tool
        async def work() -> str:
            """Work."""
            await body()  # type: ignore[operator]  # one of the functions above
            return "done"

    script = ScriptedProvider([Answer("", [("work", {})]), "done"])
    with Agent("worker", tools=(work,)).run("go", provider=script) as run:
        assert [each.success for each in run.tool_calls] == [True]
        assert run.state is TurnState.COMPLETED


def test_a_cancellation_from_before_the_turn_is_no_cause() -> None:
    """Whoever runs an agent in a task that was cancelled, and has decided to go on, may."""

    @tool
    async def work() -> str:
        """Work."""
        return "done"

    async def main() -> TurnState:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        script = ScriptedProvider([Answer("", [("work", {})]), "done"])
        with await Agent("worker", tools=(work,)).arun("go", provider=script) as run:
            return run.state

    assert asyncio.run(main()) is TurnState.COMPLETED

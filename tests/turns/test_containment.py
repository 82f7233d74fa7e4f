"""Ceilings hold for a whole run, over restarts, and each stop is an ending of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from treenail import Agent, Limits, TurnState, tool
from treenail.containment import (
    BudgetWindowHook,
    CircuitBreaker,
    ExecutionContext,
    SafetyEvent,
    ShieldPipeline,
)
from treenail.errors import PromptEvaluationError
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelEvent, ModelRequest, Stopped, TextDelta
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, Session
from treenail.testing import FakeClock
from treenail.turns import InnerLoop, TurnResult, contain
from treenail.turns.ledger import ledger_of

CHILD = Path(__file__).with_name("spending_child.py")


def test_a_run_that_would_cost_100_usd_stops_at_1_usd_over_three_kills(tmp_path: Path) -> None:
    """Each process is killed in the middle of a call; that call counts, and the next process knows."""

    def process(die_at: int, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(CHILD), str(tmp_path), str(die_at), *more]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert process(4).returncode == -signal.SIGKILL
    log = SqliteLog(tmp_path / "runs.db")
    run_id = str(log.sessions()[0].session_id)
    log.close()
    assert process(3, run_id).returncode == -signal.SIGKILL
    assert process(5, run_id).returncode == -signal.SIGKILL
    last = process(0, run_id)
    assert last.stdout.strip() == "budget_exceeded", last.stderr
    calls = (tmp_path / "tally.txt").read_text().splitlines()
    # 14 calls of $0.07 are $0.98; a fifteenth would pass the ceiling.
    assert len(calls) == 14


@tool(effects="none")
def ponder() -> str:
    """Think."""
    return "hm"


THINKER = Agent("thinker", tools=(ponder,))
ENDLESS = ScriptedProvider([Answer("hm", [("ponder", {})], cost_usd=0.01)], repeat=True)


def turn(containment_of, provider=ENDLESS, clock=None) -> tuple[TurnResult, Session]:
    session = Session(clock=clock)
    loop = InnerLoop(ExecutionState(session), provider, THINKER.prompt)
    loop.containment = containment_of(session)
    return anyio.run(loop.run, "go"), session


class HangingProvider:
    """A model that says something, takes its time and never ends."""

    name = "hanging"
    model = "hanging"

    def __init__(self, takes_time: Callable[[], object] = lambda: None) -> None:
        self.takes_time = takes_time
        self.closed = False

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        try:
            yield TextDelta("thinking ")
            self.takes_time()
            await anyio.sleep_forever()
            yield Stopped("end")
        finally:
            self.closed = True


def test_too_many_steps_fail_the_turn_with_the_reason() -> None:
    result, session = turn(lambda s: contain(s, Limits(max_steps=5)))
    assert (result.state, result.error_kind) == (TurnState.FAILED, "step_limit_exceeded")
    assert [each.event_type for each in session[SafetyEvent].all()] == ["step_limit_exceeded"]
    assert session[SafetyEvent].latest().hook == "ExecutionContext"


def test_a_timeout_cancels_the_call_in_flight_and_is_a_timed_out_turn() -> None:
    clock = FakeClock()
    hanging = HangingProvider(lambda: clock.advance(2.0))
    result, session = turn(lambda s: contain(s, Limits(timeout=1.0)), hanging, clock)
    assert (result.state, result.error_kind) == (TurnState.TIMED_OUT, "timeout")
    assert hanging.closed
    assert "timeout" in {each.event_type for each in session[SafetyEvent].all()}


def test_an_abort_from_outside_interrupts_the_turn() -> None:
    hanging = HangingProvider()
    session = Session()
    loop = InnerLoop(ExecutionState(session), hanging, Agent("thinker").prompt)
    context: ExecutionContext = contain(session, Limits(max_steps=5))
    loop.containment = context

    async def both() -> TurnResult:
        results: list[TurnResult] = []

        async def run() -> None:
            results.append(await loop.run("go"))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            context.abort("enough")
        return results[0]

    result = anyio.run(both)
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")
    assert hanging.closed


def test_an_open_circuit_fails_the_turn_with_its_own_reason() -> None:
    breaker = CircuitBreaker(failure_threshold=1)
    failing = ScriptedProvider([Answer(error=PromptEvaluationError("down"))])
    first, _ = turn(lambda s: contain(s, Limits(max_steps=9), circuit_breaker=breaker), failing)
    assert first.error_kind == "provider_error"
    second, _ = turn(lambda s: contain(s, Limits(max_steps=9), circuit_breaker=breaker))
    assert (second.state, second.error_kind) == (TurnState.FAILED, "circuit_open")


def test_a_call_window_fails_the_turn_as_rate_limited() -> None:
    pipeline = ShieldPipeline(pre_dispatch=BudgetWindowHook(max_calls=3))
    result, _ = turn(lambda s: contain(s, Limits(max_steps=99), pipeline=pipeline))
    assert (result.state, result.error_kind) == (TurnState.FAILED, "provider_rate_limit")


def test_retries_are_a_budget_of_the_whole_run() -> None:
    """Two failures are allowed, over all attempts; the third attempt is not even made."""
    failing = ScriptedProvider([Answer(error=PromptEvaluationError("down"))])
    session = Session()

    def loop() -> InnerLoop:
        made = InnerLoop(ExecutionState(session), failing, Agent("thinker").prompt)
        made.containment = contain(session, Limits(max_steps=99, max_retries=2))
        return made

    endings = [anyio.run(loop().run, "go"), anyio.run(loop().resume), anyio.run(loop().resume)]
    assert [each.error_kind for each in endings] == [
        "provider_error",
        "provider_error",
        "retry_budget_exceeded",
    ]


def test_no_stop_ends_in_completed() -> None:
    """Whatever ceiling is hit first, the turn is not completed."""
    for limits in (Limits(max_steps=1), Limits(max_cost_usd=0.015), Limits(timeout=0.0001)):
        result, _ = turn(lambda s, limits=limits: contain(s, limits))
        assert result.state is not TurnState.COMPLETED
        assert result.next_actions


def test_the_ledger_is_history_that_no_rollback_refunds() -> None:
    session = Session()
    context = contain(session, Limits(max_cost_usd=1.0))
    before = session.snapshot()
    loop = InnerLoop(
        ExecutionState(session), ScriptedProvider([Answer("x", cost_usd=0.4)]), Agent("thinker").prompt
    )
    loop.containment = context
    anyio.run(loop.run, "go")
    spent = len(ledger_of(session))
    assert spent >= 2
    session.rollback(before)
    assert len(ledger_of(session)) == spent
    again = contain(session, Limits(max_cost_usd=1.0)).get_snapshot()
    assert again.cost_usd_accumulated == pytest.approx(0.4)


def test_a_prune_forgets_the_conversation_and_not_what_it_cost(tmp_path: Path) -> None:
    """Also after the session was opened again from what the prune left."""
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    costly = ScriptedProvider([Answer("hm", [("ponder", {})], cost_usd=0.2), Answer("done", cost_usd=0.2)])
    loop = InnerLoop(ExecutionState(session), costly, THINKER.prompt)
    loop.containment = contain(session, Limits(max_cost_usd=1.0))
    anyio.run(loop.run, "go")
    assert session.prune(keep_last=1) > 5
    assert contain(session, Limits(max_cost_usd=1.0)).get_snapshot().cost_usd_accumulated == pytest.approx(
        0.4
    )
    session.close()
    with Session.open(log, session.session_id) as later:
        spent = contain(later, Limits(max_cost_usd=1.0)).get_snapshot()
        assert spent.cost_usd_accumulated == pytest.approx(0.4)
        assert spent.step_count == 3
    log.close()

"""What a turn's model calls cost is booked however they end, and every stop reaches the call in flight."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest

from treenail import Agent, Limits, TurnState, tool
from treenail.clock import Clock
from treenail.containment import (
    CancellationToken,
    CircuitBreaker,
    CircuitBreakers,
    ExecutionContext,
    LoopPolicy,
    Price,
    Reserved,
    SafeModeHook,
    SafetyEvent,
    ShieldPipeline,
    StaticPrices,
    threads,
)
from treenail.conversation import InnerMessage, ProviderUsage
from treenail.errors import ModelCallError
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelEvent, ModelRequest, Stopped, TextDelta, UsageReported
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Deadline, ExecutionState, Session, TokenUsage
from treenail.testing import FakeClock
from treenail.turns import InnerLoop, LiveEvent, StatusChanged, TurnEnded, TurnResult, contain, turn_state
from treenail.turns.ledger import ledger_of

CHILD = Path(__file__).with_name("signalled_child.py")
TOKENS = TokenUsage(input_tokens=1000, output_tokens=100)
WAIT_S = 60.0


class Model:
    """A model that yields what it is given: events, an error to raise, or something to do and then hang."""

    name = "model"
    model = "a-model"

    def __init__(
        self, *script: ModelEvent | Exception | Callable[[], object], estimate: float | None = None
    ) -> None:
        self._script = script
        self._estimate = estimate
        self.is_closed = False

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return self._estimate

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        try:
            for each in self._script:
                if callable(each):
                    each()
                    await anyio.sleep_forever()
                elif isinstance(each, Exception):
                    raise each
                else:
                    yield each
            yield Stopped("end")
        finally:
            self.is_closed = True


def loop_of(
    model: Model,
    containment: Callable[[Session], ExecutionContext] | None = None,
    clock: Clock | None = None,
) -> InnerLoop:
    session = Session(clock=clock)
    loop = InnerLoop(ExecutionState(session), model, Agent("agent").prompt)
    loop.containment = containment(session) if containment else None
    return loop


def spent(loop: InnerLoop) -> float:
    assert loop.containment is not None
    return loop.containment.get_snapshot().cost_usd_accumulated


# --- what calls cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["fails", "times out"])
def test_what_a_call_reported_before_it_was_cut_off_is_booked_and_logged(fate: str) -> None:
    """Usage that was reported before the stream broke is the cost; the reservation is not kept for it."""
    clock = FakeClock()
    end = ModelCallError("cut") if fate == "fails" else partial(clock.advance, 2.0)
    model = Model(
        TextDelta("half"), UsageReported(TOKENS, 0.25), UsageReported(TOKENS, 0.3), end, estimate=0.5
    )
    loop = loop_of(model, lambda s: contain(s, Limits(max_cost_usd=1.0, timeout=1.0)), clock)
    result = anyio.run(loop.run, "go")
    assert result.state is (TurnState.PARTIAL_FAILED if fate == "fails" else TurnState.TIMED_OUT)
    assert spent(loop) == 0.3
    (usage,) = loop.state.session[ProviderUsage].all()
    assert (usage.usage, usage.cost_usd, usage.stop_reason) == (TOKENS, 0.3, "cut_off")


def test_usage_without_a_cost_is_priced_by_the_table() -> None:
    """A provider that reports tokens and knows no prices is not free: the run's price table knows."""
    prices = StaticPrices({"a-model": Price(input_per_mtok=10.0, output_per_mtok=100.0)})
    model = Model(TextDelta("hi"), UsageReported(TOKENS))
    loop = loop_of(model, lambda s: contain(s, Limits(max_cost_usd=1.0), prices=prices))
    assert anyio.run(loop.run, "go").state is TurnState.COMPLETED
    assert spent(loop) == pytest.approx((1000 * 10.0 + 100 * 100.0) / 1_000_000)


def test_a_call_that_reports_nothing_costs_what_was_reserved() -> None:
    """Nobody knows what it cost, so it cost the most that it may have."""
    prices = StaticPrices({"a-model": Price(input_per_mtok=10.0, output_per_mtok=100.0)})
    loop = loop_of(Model(TextDelta("hi")), lambda s: contain(s, Limits(max_cost_usd=1.0), prices=prices))
    assert anyio.run(loop.run, "go").state is TurnState.COMPLETED
    (reserved,) = (each for each in ledger_of(loop.state.session) if isinstance(each, Reserved))
    assert spent(loop) == reserved.cost_usd > 0


def test_a_longer_conversation_reserves_more() -> None:
    """The estimate grows with what is sent, tools included."""

    def reserved(task: str, **tools: object) -> float:
        prices = StaticPrices({"a-model": Price(input_per_mtok=10.0, output_per_mtok=0.0)})
        loop = loop_of(Model(TextDelta("hi")), lambda s: contain(s, Limits(max_cost_usd=1.0), prices=prices))
        loop.prompt = Agent("agent", tools=tuple(tools.values())).prompt
        anyio.run(loop.run, task)
        return spent(loop)

    short = reserved("go")
    assert reserved("go " * 1000) - short == pytest.approx(1000 * 10.0 / 1_000_000, rel=0.01)
    assert reserved("go", ponder=ponder) > short


def test_a_provider_that_says_it_is_free_needs_no_price() -> None:
    """A local model has no price in any table; what it says itself is enough."""
    loop = loop_of(Model(TextDelta("hi"), estimate=0.0), lambda s: contain(s, Limits(max_cost_usd=1.0)))
    assert anyio.run(loop.run, "go").state is TurnState.COMPLETED
    assert spent(loop) == 0


def test_each_model_has_a_breaker_of_its_own() -> None:
    """One model that is down does not stop another, whoever knows the prices."""
    breakers = CircuitBreakers(failure_threshold=1)

    def contained(session: Session) -> ExecutionContext:
        return contain(session, Limits(max_steps=9), circuit_breaker=breakers)

    down = Model(ModelCallError("down"), estimate=0.5)
    assert anyio.run(loop_of(down, contained).run, "go").state is TurnState.FAILED
    other = Model(TextDelta("hi"), estimate=0.5)
    other.model = "another-model"
    assert anyio.run(loop_of(other, contained).run, "go").state is TurnState.COMPLETED
    assert anyio.run(loop_of(down, contained).run, "go").error_kind == "circuit_open"


# --- stops and endings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_contained", [True, False])
@pytest.mark.parametrize("stop", ["token", "deadline"])
def test_the_turns_own_token_and_deadline_reach_the_model_call(stop: str, is_contained: bool) -> None:
    """With a containment or without: the call in flight is closed, and the turn ends as what it is."""
    model = Model(TextDelta("half"), lambda: None)
    loop = loop_of(model, (lambda s: contain(s, Limits(max_steps=5))) if is_contained else None)
    if stop == "deadline":
        # On a clock that stands still, so that its time is that of the model call.
        loop.deadline = Deadline.after(timedelta(seconds=0.5), clock=FakeClock())
    results: list[TurnResult] = []

    async def both() -> None:
        async def run() -> None:
            results.append(await loop.run("go"))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            if stop == "token":
                await anyio.wait_all_tasks_blocked()
                loop.cancellation.cancel(detail="enough")

    anyio.run(both)
    expected = (TurnState.INTERRUPTED, "aborted") if stop == "token" else (TurnState.TIMED_OUT, "deadline")
    assert (results[0].state, results[0].error_kind) == expected
    assert model.is_closed
    assert turn_state(loop.state.session) is expected[0]


@tool(effects="none")
def ponder() -> str:
    """Think."""
    return "hm"


@pytest.mark.parametrize("is_contained", [True, False])
def test_the_turns_own_token_stops_a_tool_and_the_turn(is_contained: bool) -> None:
    """A sync tool hears of it, and the turn is interrupted, not failed."""
    token = CancellationToken()

    @tool(effects="none")
    def stop_everything(*, context: object) -> str:
        """Stop the turn that this is part of."""
        token.cancel(detail="from within")
        assert context.cancellation.wait(WAIT_S)  # type: ignore[attr-defined]  # a ToolContext
        return "too late"

    session = Session()
    loop = InnerLoop(
        ExecutionState(session),
        ScriptedProvider([Answer("", [("stop_everything", {})]), "done"]),
        Agent("agent", tools=(stop_everything,)).prompt,
        cancellation=token,
        containment=contain(session, Limits(max_steps=9)) if is_contained else None,
    )
    result = anyio.run(loop.run, "go")
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")


@pytest.mark.parametrize("guard", ["price", "shield", "loop"])
def test_a_refusal_that_is_no_ceiling_is_an_ending_with_its_reason(guard: str) -> None:
    """The kind is one word, and the details say what was refused and why."""
    session = Session()
    script = ScriptedProvider([Answer("x", [("ponder", {})])], repeat=True)
    shield = ShieldPipeline(hooks=[SafeModeHook()]) if guard == "shield" else None
    loops = LoopPolicy(halt_cycle_turns=3) if guard == "loop" else None
    loop = InnerLoop(ExecutionState(session), script, Agent("agent", tools=(ponder,)).prompt)
    if guard == "price":
        loop.provider = Model(TextDelta("hi"))
    loop.containment = contain(session, Limits(max_cost_usd=1.0), pipeline=shield, loops=loops)
    result = anyio.run(loop.run, "go")
    assert (result.state, result.error_kind) == (TurnState.FAILED, "halted")
    told = {"price": "no price is known", "shield": "safe mode is on", "loop": "tool ponder, 3 times"}
    assert told[guard] in result.details


def test_the_failure_that_uses_the_last_retry_ends_the_turn_as_provider_error() -> None:
    """The stop's own reason is the ending's kind, whatever kind of failure it was."""
    breaker = CircuitBreaker()
    loop = loop_of(
        Model(ModelCallError("down", kind="connection")),
        lambda s: contain(s, Limits(max_retries=1), circuit_breaker=breaker),
    )
    assert anyio.run(loop.run, "go").error_kind == "provider_error"
    assert [each.event_type for each in loop.state.session[SafetyEvent].all()] == ["provider_error"]


def test_turns_under_one_containment_log_its_incidents_once() -> None:
    """The second turn does not tell again what the first has told."""
    session = Session()
    containment = contain(session, Limits(max_steps=1))
    for _ in range(3):
        loop = InnerLoop(
            ExecutionState(session), Model(TextDelta("hi")), Agent("agent").prompt, containment=containment
        )
        anyio.run(loop.run, "go")
    assert [each.event_type for each in session[SafetyEvent].all()] == ["step_limit_exceeded"]


def test_a_screen_that_breaks_does_not_break_the_turn() -> None:
    """Watching is for display only: a closed pipe is no failure of the model."""
    loop = loop_of(Model(TextDelta("one"), TextDelta("two")))
    seen: list[LiveEvent] = []

    def watch(event: LiveEvent) -> None:
        seen.append(event)
        raise BrokenPipeError

    loop.watch = watch
    result = anyio.run(loop.run, "go")
    assert (result.state, result.text) == (TurnState.COMPLETED, "onetwo")
    assert seen == [StatusChanged("thinking", loop.state.session[TurnEnded].all()[0].turn_id, 1)]


def test_a_run_that_is_over_does_not_time_out_afterwards() -> None:
    """The timer of a finished run is disarmed: nothing is written into its log any more."""
    before = armed_timers()
    armed: set[object] = set()

    def answer(request: ModelRequest) -> str:
        armed.update(armed_timers() - before)
        return "done"

    run = Agent("agent").run("go", provider=ScriptedProvider([answer]), limits=Limits(timeout=3600.0))
    assert run.state is TurnState.COMPLETED
    assert armed
    assert armed & armed_timers() == set()


def armed_timers() -> set[object]:
    """Return the timers of this process that will still fire."""
    return {timer for _, _, timer in tuple(threads._timers._heap) if timer.callback is not None}


def test_parallel_tools_at_the_step_limit_are_run_by_the_resume() -> None:
    """Those that fitted are finished, the others are pending, and a resume with more room runs just them."""
    calls = 8
    log = MemoryLog()
    agent = Agent("agent", tools=(ponder,))
    script = ScriptedProvider([Answer("", [("ponder", {})] * calls), "done"])
    first = agent.run("go", provider=script, limits=Limits(max_steps=4), store=log)
    assert first.result.error_kind == "step_limit_exceeded"
    answered = [each for each in first.messages if each.role == "tool"]
    assert len(answered) == 3
    first.execution_state.session.close()
    with agent.resume(log, first.id, provider=script, limits=Limits(max_steps=20)) as second:
        assert second.state is TurnState.COMPLETED
        results = [each.tool_call_id for each in second.messages if each.role == "tool"]
        assert sorted(results) == [f"call_1_{number}" for number in range(1, calls + 1)]
        steps = contain(second.execution_state.session, Limits()).get_snapshot().step_count
        assert steps == 1 + calls + 1


# --- signals, seen from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("at_work", ["model", "sync_tool", "async_tool"])
@pytest.mark.parametrize(
    ("signum", "ignored"),
    [
        pytest.param(signal.SIGINT, "", id="SIGINT"),
        pytest.param(signal.SIGTERM, "", id="SIGTERM"),
        pytest.param(signal.SIGTERM, "INT", id="SIGTERM in a script's background"),
    ],
)
def test_a_signal_ends_the_process_and_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, at_work: str, signum: signal.Signals, ignored: str
) -> None:
    """Both are interrupted turns in the log, each with its own kind. Neither waits for a tool."""
    (tmp_path / "work").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, str(CHILD), at_work, str(tmp_path), port]
        if ignored:
            command = ["bash", "-c", f"trap '' {ignored}; exec \"$@\"", "-", *command]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            server.settimeout(WAIT_S)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(WAIT_S)
                assert connection.recv(16) == b"at work"
                process.send_signal(signum)
                assert connection.recv(16) == b""
            _, errors = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == -signum, errors
    log = SqliteLog(tmp_path / "runs.db")
    session = Session.open(log, log.sessions()[0].session_id)
    assert turn_state(session) is TurnState.INTERRUPTED
    (ended,) = session[TurnEnded].all()
    assert ended.error_kind == {signal.SIGINT: "interrupt", signal.SIGTERM: "terminated"}[signum]
    assert not list((tmp_path / "work").iterdir()), "what the tool had written is rolled back"
    # Dispatched and never settled, or settled as stopped: the model call counts either way.
    containment = contain(session, Limits())
    assert containment.get_snapshot().cost_usd_accumulated == pytest.approx(0.01)
    assert session[InnerMessage].all()[1].content == "go"
    session.close()
    log.close()

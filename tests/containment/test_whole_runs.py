"""The containment inside whole runs: agents, subagents, workflows, real connections, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.containment.fleet_child import CHILDREN, PRICE, boss_in

from treenail import Agent, Limits, TurnState, tool
from treenail.containment import (
    CancellationToken,
    ChainMetadata,
    CircuitBreaker,
    DegradePlan,
    ExecutionContext,
    NodeRecord,
    Price,
    Reserved,
    ShieldPipeline,
    StaticPrices,
    ToolCallContext,
)
from treenail.conversation import CompactionSettings, ProviderUsage, SubagentEvent
from treenail.errors import ModelCallError
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelEvent, ModelRequest, Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, Scripted, ScriptedProvider
from treenail.sandbox import Grants, Sandbox
from treenail.state import Deadline, ExecutionState, ResourceRegistry, Session, TokenUsage
from treenail.subagents import LoopRunner, SubagentLimits, Subagents, with_subagents
from treenail.testing import FakeClock
from treenail.testing.wire import Broken, WireServer
from treenail.tools import shell_tool
from treenail.turns import InnerLoop, RetryPolicy, TurnResult, contain
from treenail.turns.ledger import ledger_of
from treenail.workflows import StepSpec, Workflow, WorkflowSpec
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

# --- one dollar ----------------------------------------------------------------------------------------

FLEET = Path(__file__).with_name("fleet_child.py")


def fleet(directory: Path, die_at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FLEET), str(directory), str(die_at)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def made(directory: Path) -> int:
    return len((directory / "tally.txt").read_text().splitlines())


def test_a_run_with_eight_subagents_stops_at_one_dollar_over_three_kills(tmp_path: Path) -> None:
    """Killed three times with subagents in the middle of calls: 33 calls of $0.03 are made in all.

    Every subagent, and the run itself, ends with a record of its own.
    """
    for die_at in (9, 4, 3):
        killed = fleet(tmp_path, die_at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert made(tmp_path) < 33
    last = fleet(tmp_path, 0)
    assert last.stdout.split() == ["failed", "budget_exceeded"], last.stderr
    assert made(tmp_path) == int(1.0 / PRICE) == 33
    store = tmp_path / "runs.db"
    with SqliteLog(store) as log, Session.open(log, boss_in(store)) as root:
        snapshot = contain(root, Limits(max_cost_usd=1.0)).get_snapshot()
        assert snapshot.cost_usd_accumulated == pytest.approx(33 * PRICE)
        llm = [each for each in ledger_of(root) if isinstance(each, Reserved) and each.kind == "llm"]
        assert len(llm) == 33
        endings = {each.subagent_id: each.event for each in root[SubagentEvent].all()}
        assert len(endings) == CHILDREN
        assert set(endings.values()) <= {"failed", "cancelled"}


class Counted(ScriptedProvider):
    """Counts the calls that are really made."""

    calls = 0

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.calls += 1
        return super().stream(request)


async def test_a_subagent_cannot_be_sent_past_its_own_ceiling() -> None:
    """Four steps are all that it may make: not four for each thing that it is sent."""
    model = Counted([Answer("hm", [("ponder", {})]), "done"], repeat=True)

    @tool(effects="none")
    def ponder() -> str:
        """Think."""
        return "hm"

    state = ExecutionState(Session())
    agent = Agent("worker", "You work.", tools=(ponder,), retry=None)
    limits = SubagentLimits(budget=Limits(max_steps=4))
    async with Subagents(state, [agent], runner=LoopRunner(model), limits=limits) as subagents:
        child = subagents.spawn("worker", "one")
        await subagents.wait()
        assert child.error_kind is None
        for _ in range(3):
            subagents.send(child.id, "more")
            await subagents.wait()
            assert child.error_kind == "step_limit_exceeded"
    # Two calls and a tool between them for the task; one call for all that was sent later.
    assert model.calls == 3


async def test_a_subagents_calls_hang_below_the_call_that_asked_for_it() -> None:
    """From the newest call of a subagent, parents lead to the tool call of the run that spawned it."""
    nodes: dict[str, NodeRecord] = {}

    class Heard:
        def record_call(self, node: NodeRecord) -> None:
            nodes[node.node_id] = node

    session = Session()
    metadata = ChainMetadata(str(session.session_id), str(session.session_id))
    run = ExecutionContext(Limits(max_steps=50), metadata=metadata, metrics=Heard())
    model = ScriptedProvider([_boss_or_worker], repeat=True)
    agent = Agent("boss", "You hand work on.", extensions=(with_subagents([Agent("worker", "You work.")]),))
    loop = InnerLoop(ExecutionState(session), model, agent.prompt, containment=run)
    async with agent.extensions[0](loop):
        assert (await loop.run("go")).state is TurnState.COMPLETED
    spawned = next(each for each in nodes.values() if each.operation_name == "spawn_agent")
    below = [each for each in nodes.values() if each.chain_id != run.chain_id]
    assert [each.parent_id for each in below] == [spawned.node_id]


def _boss_or_worker(request: ModelRequest) -> Answer:
    if "You work" in request.items[0].text:
        return Answer("done")
    script = [
        Answer("", [("spawn_agent", {"agent": "worker", "task": "work"})]),
        Answer("", [("wait_agent", {})]),
    ]
    return script[request.answers_so_far] if request.answers_so_far < 2 else Answer("done")


class Stuck(Counted):
    """Does the first step at once; the second one hangs until somebody loses patience."""

    is_stuck = True

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.calls += 1
        if self.is_stuck and any(each.text.startswith("two") for each in request.items):
            await anyio.sleep_forever()
        async for each in ScriptedProvider.stream(self, request):
            yield each


async def test_a_workflow_inside_a_run_keeps_its_ceiling_over_a_restart() -> None:
    """Of its ten cents, nine are spent when it is cut off; whoever takes it up has one left, and not ten."""
    session, own = Session(), Session()
    first = StepSpec(id="one", task="one", agent="worker")
    second = StepSpec(id="two", task="two", agent="worker", depends_on=("one",))
    spec = WorkflowSpec(id="w", steps=(first, second), max_cost_usd=0.10)
    ready = Answer('{"status": "checkpoint_ready", "summary": "done"}', cost_usd=0.045)
    model = Stuck([ready], repeat=True)
    run = contain(session, Limits(max_cost_usd=1.0))

    def workflow() -> Workflow:
        worker = Agent("worker", retry=None)
        return Workflow(ExecutionState(own), [worker], LoopRunner(model), containment=run)

    async with anyio.create_task_group() as group:
        group.start_soon(workflow().run, spec)
        while model.calls < 2:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    model.is_stuck = False
    run = contain(session, Limits(max_cost_usd=1.0))
    result = await workflow().resume()
    assert not result.ok
    assert model.calls == 2
    assert run.get_snapshot().cost_usd_accumulated == pytest.approx(0.09)


# --- real connections ------------------------------------------------------------------------------------


def vendor(name: str, server: WireServer) -> Provider:
    if name == "openai":
        return OpenAI("m", base_url=server.openai_url, api_key="k")
    return Anthropic("m", base_url=server.anthropic_url, api_key="k")


def loop_of(
    session: Session,
    provider: Provider,
    containment: ExecutionContext | None,
    tools: Sequence[Any] = (),
    **more: Any,
) -> InnerLoop:
    prompt = Agent("worker", tools=tools).prompt
    return InnerLoop(ExecutionState(session), provider, prompt, containment=containment, **more)


HANGING = Broken(Answer("one\ntwo\n"), "hang")


@pytest.mark.parametrize("name", ["openai", "anthropic"])
@pytest.mark.parametrize("cause", ["timeout", "abort", "token", "deadline"])
def test_whatever_stops_a_run_closes_the_connection_to_the_model(
    name: str, cause: str, clock: FakeClock
) -> None:
    """In the middle of an answer: the server sees the client leave, and the call is charged."""
    session = Session(clock=clock)
    # The deadline is in real time, which a vendor's library takes when it is first used.
    with WireServer(["warm"]) as server:
        anyio.run(loop_of(Session(), vendor(name, server), None).run, "go")
    with WireServer([HANGING]) as server:
        limits = Limits(max_cost_usd=1.0, timeout=60.0 if cause == "timeout" else None)
        context = contain(session, limits, prices=StaticPrices({"m": Price(1.0, 1.0)}))
        loop = loop_of(session, vendor(name, server), context)
        if cause == "deadline":
            loop.deadline = Deadline.after(timedelta(seconds=4))

        def stop() -> None:
            server.wait_for_requests(1, 60.0)
            if cause == "timeout":
                clock.advance(60.0)
            elif cause == "abort":
                context.abort("enough")
            elif cause == "token":
                loop.cancellation.cancel(detail="enough")

        stopping = threading.Thread(target=stop)
        stopping.start()
        result = anyio.run(loop.run, "go")
        stopping.join(60)
        assert server.requests[0].wait_closed()
    expected = TurnState.TIMED_OUT if cause in ("timeout", "deadline") else TurnState.INTERRUPTED
    assert result.state is expected
    snapshot = context.get_snapshot()
    assert snapshot.cost_usd_accumulated > 0.0
    assert snapshot.cost_usd_reserved == 0.0


CTRL_C = """
import sys
from treenail import Agent, Limits
from treenail.providers.openai import OpenAI

try:
    provider = OpenAI("m", base_url=sys.argv[1], api_key="k")
    Agent("worker").run("go", provider=provider, limits=Limits(max_steps=9))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # Stay, so that it is the cancellation that closes the connection and not the end of the process.
    sys.stdin.read()
"""


def test_ctrl_c_in_a_run_closes_the_connection_to_the_model() -> None:
    """While the process lives on."""
    with WireServer([HANGING]) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", CTRL_C, server.openai_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            server.wait_for_requests(1, 30.0)
            process.send_signal(signal.SIGINT)
            assert server.requests[0].wait_closed()
            assert process.stdout is not None
            assert process.stdout.readline() == "interrupted\n"
            assert process.poll() is None
        finally:
            process.communicate(timeout=60)


@pytest.mark.parametrize("cause", ["timeout", "abort"])
def test_a_stopped_run_leaves_no_process_of_its_command(cause: str, tmp_path: Path, clock: FakeClock) -> None:
    """The command, its child in the background and one that has left its process group are gone."""
    (tmp_path / "work").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("told", "held"):
        os.mkfifo(outside / name)
    command = f"exec 3> {outside}/held; sleep 300 & setsid sleep 300 & echo > {outside}/told; wait"
    script: list[Scripted] = [Answer("", [("run_command", {"command": command})]), "done"]
    session = Session(clock=clock)
    context = contain(session, Limits(max_steps=9, timeout=60.0))
    token = CancellationToken()
    ends: list[str] = []

    def stop() -> None:
        with (outside / "held").open() as held:
            (outside / "told").read_text()
            if cause == "abort":
                token.cancel(detail="enough")
            else:
                clock.advance(60.0)
            ends.append(held.read())

    stopping = threading.Thread(target=stop)
    stopping.start()
    sandbox = Sandbox(grants=Grants(write=(outside,)))
    with HostFilesystem(tmp_path / "work", store=tmp_path / "files", sandbox=sandbox) as filesystem:
        state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}))
        prompt = Agent("worker", tools=(shell_tool(),)).prompt
        loop = InnerLoop(state, ScriptedProvider(script), prompt, containment=context, cancellation=token)
        result = anyio.run(loop.run, "go")
    assert result.state is (TurnState.TIMED_OUT if cause == "timeout" else TurnState.INTERRUPTED)
    stopping.join(60)
    assert ends == [""], "the last process that held the pipe has ended"


# --- a model call, cut at every point --------------------------------------------------------------------


@pytest.mark.parametrize("seen", range(6))
def test_a_stream_that_is_stopped_anywhere_is_booked_once(seen: int) -> None:
    """Before its usage was reported it costs its reservation, and after it what was reported."""
    session = Session()
    context = contain(session, Limits(max_cost_usd=1.0))

    class Priced(ScriptedProvider):
        def estimate_usd(self, request: ModelRequest) -> float | None:
            return 0.5

    answer = Answer("one\ntwo\n", [("ponder", {})], cost_usd=0.2)
    told: list[object] = []

    def watch(event: object) -> None:
        told.append(event)
        if len([each for each in told if type(each).__module__.endswith("providers.base")]) == seen:
            context.abort("enough")

    if seen == 0:
        context.abort("enough")
    loop = loop_of(session, Priced([answer, "done"]), context, watch=watch)
    result = anyio.run(loop.run, "go")
    assert result.state is TurnState.INTERRUPTED
    snapshot = context.get_snapshot()
    names = [type(each).__name__ for each in told]
    expected = 0.0 if seen == 0 else 0.2 if "UsageReported" in names else 0.5
    assert (snapshot.cost_usd_accumulated, snapshot.cost_usd_reserved) == (expected, 0.0)
    assert contain(session, Limits(max_cost_usd=1.0)).get_snapshot().cost_usd_accumulated == expected


def failing(times: int, then: str = "done") -> Callable[[ModelRequest], Answer]:
    calls = 0

    def answer(request: ModelRequest) -> Answer:
        nonlocal calls
        calls += 1
        if calls <= times:
            return Answer(error=ModelCallError("busy", kind="transient", retryable=True))
        return Answer(then, usage=TokenUsage(1000, 1000))

    return answer


class Unpriced(ScriptedProvider):
    """Leaves prices to the containment's table."""

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return None


async def test_an_abort_between_two_attempts_ends_the_turn_at_once() -> None:
    """Nobody waits for the end of a wait of a thousand seconds, and the second attempt is not made."""
    session = Session()
    context = contain(session, Limits(max_steps=9))
    patient = RetryPolicy(attempts=3, base_s=1000.0, cap_s=1000.0, total_s=1e6)
    loop = loop_of(session, Unpriced([failing(9)]), context, retry=patient)
    results: list[TurnResult] = []

    async def go() -> None:
        results.append(await loop.run("go"))

    async with anyio.create_task_group() as group:
        group.start_soon(go)
        await anyio.wait_all_tasks_blocked()
        context.abort("enough")
    assert (results[0].state, results[0].error_kind) == (TurnState.INTERRUPTED, "aborted")
    assert context.get_snapshot().step_count == 1


def test_a_circuit_that_a_failure_opens_ends_the_turn_without_a_wait() -> None:
    """The next attempt would be due in a thousand seconds, and the circuit stays open for longer."""
    session = Session()
    breaker = CircuitBreaker(1, recovery_timeout=1e6)
    context = contain(session, Limits(max_steps=9), circuit_breaker=breaker)
    patient = RetryPolicy(attempts=3, base_s=1000.0, cap_s=1000.0, total_s=1e6)
    result = anyio.run(loop_of(session, Unpriced([failing(9)]), context, retry=patient).run, "go")
    assert (result.state, result.error_kind) == (TurnState.FAILED, "circuit_open")
    assert "busy" in result.details


# --- plans in the loop -----------------------------------------------------------------------------------

PRICES = StaticPrices({"big": Price(10.0, 10.0), "small": Price(1.0, 1.0)})


class SmallerAfter:
    """Wants a smaller model once it has been asked that often."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def before_llm_call(self, ctx: ToolCallContext) -> DegradePlan | None:
        self.left -= 1
        return DegradePlan(model="small") if self.left < 0 else None


def test_a_plan_that_first_appears_on_a_retry_is_noted() -> None:
    """The log says that another model was asked, whichever attempt it was that it was asked in."""
    session = Session()
    shield = ShieldPipeline(SmallerAfter(1))
    context = contain(session, Limits(max_cost_usd=100.0), pipeline=shield, prices=PRICES)
    at_once = RetryPolicy(attempts=5, base_s=0.0, cap_s=0.0)
    loop = loop_of(session, Unpriced([failing(3)], model="big"), context, retry=at_once)
    assert anyio.run(loop.run, "go").state is TurnState.COMPLETED
    (usage,) = session[ProviderUsage].all()
    assert usage.notes == ("degraded: small was asked instead of big",)


def test_a_summary_is_written_by_the_model_that_its_money_is_reserved_for() -> None:
    """The shield wants the small model: the summary is asked of it too, not only paid at its price."""
    session = Session()
    shield = ShieldPipeline(SmallerAfter(0))
    context = contain(session, Limits(max_cost_usd=100.0), pipeline=shield, prices=PRICES)
    asked: list[str | None] = []

    @tool(effects="none")
    def dig() -> str:
        """Dig."""
        return "earth " * 400

    def answer(request: ModelRequest) -> Answer:
        asked.append(request.model)
        if not request.tools:
            return Answer("We dig.")
        used = TokenUsage(input_tokens=sum(len(each.text) for each in request.items) // 3)
        return Answer("", [("dig", {})], used) if request.answers_so_far < 12 else Answer("done")

    settings = CompactionSettings(window_tokens=5_000, model_written=True)
    provider = Unpriced([answer], model="big", repeat=True)
    loop = loop_of(session, provider, context, [dig], compaction=settings)
    assert anyio.run(loop.run, "Dig.").state is TurnState.COMPLETED
    assert any(each.purpose == "summary" for each in session[ProviderUsage].all())
    assert set(asked) == {"small"}

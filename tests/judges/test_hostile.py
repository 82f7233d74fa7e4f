"""Judges that behave as badly as they can: the run goes on, in time, and what happened is on record."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from judges_kit import ScriptedAdapter, Seen, Verdict, answering, judge_prompt

from treenail import Agent, Session, tool
from treenail.containment import Limits, fold
from treenail.conversation import InnerMessage
from treenail.errors import BudgetExceededError, DeadlineExceededError
from treenail.judges import (
    CompletionChecked,
    Feedback,
    FeedbackProviderConfig,
    FeedbackTrigger,
    JudgeEvent,
    LLMCompletionVerifier,
    NestedEvaluator,
    NestedExecutionConfig,
    NestedExecutionContext,
    TaskCompletionResult,
    derive_nested_deadline,
)
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Budget, BudgetTracker, Deadline, TokenUsage
from treenail.testing import FakeClock
from treenail.turns import ModelAdapter, TurnState
from treenail.turns.ledger import ledger_of

SOON = NestedExecutionConfig(max_nested_duration=timedelta(milliseconds=50))


@tool(effects="none")
def look() -> str:
    """Look."""
    return "seen"


class Provides:
    """A feedback provider that does what a function does."""

    name = "hostile"

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def should_run(self, *, context: Any) -> bool:
        return True

    def provide(self, *, context: Any) -> Any:
        return self._work(context)


def judged_by(work: Callable[..., Any], **more: Any) -> Any:
    """A run of one tool call with such a provider; it must complete."""
    watch = FeedbackProviderConfig(Provides(work), FeedbackTrigger(every_n_calls=1))
    agent = Agent("worker", tools=(look,), feedback=[watch], nested=more.pop("nested", SOON))
    return agent.run("go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"]), **more)


def outcome(run: Any) -> tuple[TurnState, list[tuple[str, str]]]:
    events = run.execution_state.session[JudgeEvent].all()
    return run.state, [(each.outcome, each.reason) for each in events]


# --- what they raise and answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        BaseExceptionGroup("many", [SystemExit(3), ValueError("x")]),
        BaseExceptionGroup("many", [KeyboardInterrupt(), asyncio.CancelledError()]),
        ExceptionGroup("many", [DeadlineExceededError("not the run's")]),
        GeneratorExit(),
        StopIteration("odd"),
        StopAsyncIteration("odd"),
        RecursionError("deep"),
        MemoryError("much"),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("where", ["plain", "async", "adapter"])
def test_whatever_is_raised_is_the_judges_failure(where: str, error: BaseException) -> None:
    def plain(context: Any) -> Any:
        raise error

    async def later(context: Any) -> Any:
        raise error

    async def step(seen: Seen) -> Any:
        raise error

    async def asks(context: Any) -> Any:
        nested = NestedEvaluator(
            ScriptedAdapter(step), prompt=judge_prompt(), context=context.create_nested_context()
        )
        result = await nested.aevaluate()
        assert result.error is not None
        raise result.error

    run = judged_by({"plain": plain, "async": later, "adapter": asks}[where], nested=NestedExecutionConfig())
    assert outcome(run) == (TurnState.COMPLETED, [("failed", "crashed")])
    run.close()


def test_an_answer_of_ten_megabytes_reaches_the_model_as_a_few_kilobytes() -> None:
    huge = "word " * 2_000_000

    def says(context: Any) -> Feedback:
        return Feedback(summary=huge, suggestions=(huge, "short"))

    run = judged_by(says, nested=NestedExecutionConfig())
    told = [each.content for each in run.messages if each.role == "user"]
    assert len(told[-1]) < 20_000
    assert "characters left out" in told[-1]
    run.close()


def test_a_judgement_of_ten_megabytes_is_not_kept_whole_either(tmp_path: Path) -> None:
    """Neither in the run's log nor in its memory: what the model is told is what is recorded."""
    huge = "word " * 2_000_000
    store = tmp_path / "runs.db"

    def says(context: Any) -> Feedback:
        return Feedback(summary=huge)

    run = judged_by(says, nested=NestedExecutionConfig(), store=store)
    run.close()
    log = SqliteLog(store)
    with Session.open(log, run.id, read_only=True) as session:
        assert sum(len(each.summary) for each in session[Feedback].all()) < 20_000
    log.close()
    assert sum(each.stat().st_size for each in tmp_path.iterdir() if each.is_file()) < 2_000_000


# --- how long they take --------------------------------------------------------------------------------


def test_a_plain_judge_that_never_returns_does_not_keep_the_process(
    tmp_path: Path,
) -> None:
    """Its thread is a daemon: the run ends in time, and so does the interpreter."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, threading\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_hostile import judged_by, outcome\n"
        "never = threading.Event()\n"
        "run = judged_by(lambda context: never.wait())\n"
        "print(*outcome(run)[1])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "('failed', 'timeout')" in done.stdout


def test_threads_that_a_judge_starts_and_leaves_do_not_hold_up_the_run() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    def leaves(context: Any) -> Feedback:
        threads.append(threading.Thread(target=release.wait, daemon=True))
        threads[0].start()
        return Feedback(summary="fine")

    run = judged_by(leaves, nested=NestedExecutionConfig())
    assert run.state is TurnState.COMPLETED
    assert threads[0].is_alive()
    release.set()
    threads[0].join()
    run.close()


def test_what_a_left_judge_does_later_changes_nothing() -> None:
    """It answers, and evaluates, when the run is over: nobody listens any more."""
    release, tried = threading.Event(), threading.Event()
    results: list[object] = []
    adapter = answering(Verdict(True))

    def late(context: Any) -> Feedback:
        release.wait()
        try:
            nested = NestedEvaluator(adapter, prompt=judge_prompt(), context=context.create_nested_context())
            results.append(nested.evaluate())
        except BaseException as error:  # noqa: BLE001 - whatever it is, is looked at below
            results.append(error)
        finally:
            tried.set()
        return Feedback(summary="too late")

    run = judged_by(late)
    session = run.execution_state.session
    assert outcome(run) == (TurnState.COMPLETED, [("failed", "timeout")])
    head = session.head
    release.set()
    assert tried.wait(60)
    (result,) = results
    assert isinstance(result, BaseException)
    assert not adapter.seen
    assert session.head == head
    assert session[Feedback].all() == ()
    run.close()


@pytest.mark.anyio
async def test_an_adapter_that_ignores_its_cancellation_is_left_when_it_lets_go() -> None:
    """A task cannot be killed: the time limit holds as soon as it lets go, and is not forgotten."""
    clock = FakeClock()
    swallowed = 0

    async def step(seen: Seen) -> Any:
        nonlocal swallowed
        clock.advance(1)
        for _ in range(3):
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                swallowed += 1
        return Verdict(True)

    nested = NestedEvaluator(
        ScriptedAdapter(step),
        prompt=judge_prompt(),
        context=NestedExecutionContext(parent_session=Session(clock=clock), config=SOON),
    )
    with anyio.fail_after(60), pytest.raises(DeadlineExceededError):
        await nested.aevaluate()
    assert swallowed == 3


def test_a_judge_that_blocks_the_loop_is_late_and_its_answer_does_not_count() -> None:
    """Nothing can interrupt it; when it lets go, its time was over."""

    async def blocks(context: Any) -> Feedback:
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            pass
        await anyio.lowlevel.checkpoint()
        return Feedback(summary="late")

    run = judged_by(blocks)
    assert outcome(run) == (TurnState.COMPLETED, [("failed", "timeout")])
    run.close()


def test_a_judge_that_ignores_its_cancellation_and_answers_late_is_not_heard() -> None:
    async def stubborn(context: Any) -> Feedback:
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            return Feedback(summary="late")
        raise AssertionError("it sleeps for ever")

    run = judged_by(stubborn)
    assert outcome(run) == (TurnState.COMPLETED, [("failed", "timeout")])
    assert run.execution_state.session[Feedback].all() == ()
    run.close()


# --- next to nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("left_s", [0.0, -5.0])
def test_no_time_at_all_is_no_evaluation_and_no_error_of_the_derivation(left_s: float) -> None:
    session = Session()
    now = session.clock.now()
    none_left = Deadline(now + timedelta(seconds=left_s), now, session.clock)
    derived = derive_nested_deadline(none_left, timedelta(0))
    assert derived.at <= none_left.at
    adapter = answering(Verdict(True))
    context = NestedExecutionContext(parent_session=session, deadline=derived)
    with pytest.raises(DeadlineExceededError):
        NestedEvaluator(adapter, prompt=judge_prompt(), context=context).evaluate()
    assert not adapter.seen


def test_a_budget_of_one_token_is_overspent_once_and_known_to_be(tmp_path: Path) -> None:
    """The model is asked once, for its use is not known before; the answer is not taken."""
    judge = ModelAdapter(ScriptedProvider([Answer('{"good": true}', usage=TokenUsage(20, 4))] * 3))
    session = Session()
    context = NestedExecutionContext(parent_session=session, budget=Budget(max_total_tokens=1))
    with pytest.raises(BudgetExceededError):
        NestedEvaluator(judge, prompt=judge_prompt(), context=context).evaluate()
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    shared = NestedEvaluator(
        judge, prompt=judge_prompt(), context=NestedExecutionContext(parent_session=session)
    )
    with pytest.raises(BudgetExceededError):
        shared.evaluate(budget_tracker=tracker)
    assert tracker.consumed.total == 24
    with pytest.raises(BudgetExceededError):
        shared.evaluate(budget_tracker=tracker)
    assert tracker.consumed.total == 24


def test_two_judges_at_once_on_one_shared_budget_count_both() -> None:
    """Also if both find the budget open: what they used is there, and the third finds it spent."""
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    session = Session()

    async def go() -> list[Any]:
        arrived: list[Any] = []
        gate = anyio.Event()

        async def step(seen: Seen) -> Any:
            arrived.append(seen)
            if len(arrived) == 2:
                gate.set()
            await gate.wait()
            seen.use(total=60, as_evaluation=f"judge-{len(arrived)}-{id(seen)}")
            return Verdict(True)

        results: list[Any] = []

        async def one() -> None:
            nested = NestedEvaluator(
                ScriptedAdapter(step),
                prompt=judge_prompt(),
                context=NestedExecutionContext(parent_session=session),
            )
            try:
                results.append(await nested.aevaluate(budget_tracker=tracker))
            except BudgetExceededError as error:
                results.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            group.start_soon(one)
        return results

    results = anyio.run(go)
    assert tracker.consumed.total == 120
    assert sum(isinstance(each, BudgetExceededError) for each in results) >= 1
    assert session[InnerMessage].all() == ()


# --- killed --------------------------------------------------------------------------------------------


class Dies:
    """Asks a model, and lets the process die after the answer or before it."""

    name = "dies"

    def __init__(self, adapter: ModelAdapter, *, dies: bool) -> None:
        self._verifier = LLMCompletionVerifier(adapter=adapter)
        self._dies = dies

    def check(self, context: Any) -> TaskCompletionResult:
        raise AssertionError("acheck is asked")

    async def acheck(self, context: Any) -> TaskCompletionResult:
        answer = await self._verifier.acheck(context)
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


LIMITS = Limits(max_cost_usd=10.0, on_unknown_price="warn")

VERDICT = '{"complete": true, "explanation": "all there"}'


def killed_agent(*, dies: bool) -> Agent:
    judge = ModelAdapter(ScriptedProvider([Answer(VERDICT, usage=TokenUsage(30, 3), cost_usd=0.5)] * 2))
    return Agent("worker", tools=(look,), completion=Dies(judge, dies=dies))


def test_a_run_that_is_killed_during_a_judge_is_judged_when_it_is_resumed(tmp_path: Path) -> None:
    """The answer is not asked for again, the tool is not run again, and the judge's money stays spent."""
    store = tmp_path / "runs.db"
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_hostile import LIMITS, Answer, ScriptedProvider, killed_agent\n"
        "provider = ScriptedProvider([Answer('', [('look', {})]), 'done'])\n"
        "killed_agent(dies=True).run('go', provider=provider, store=sys.argv[1], limits=LIMITS)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    log = SqliteLog(store)
    (run_id,) = [each.session_id for each in log.sessions() if each.parent_id is None]
    assert len(log.sessions(parent_id=run_id)) == 1
    log.close()
    run = killed_agent(dies=False).resume(
        store,
        run_id,
        provider=ScriptedProvider([]),
        limits=LIMITS,
    )
    assert (run.state, run.output) == (TurnState.COMPLETED, "done")
    session = run.execution_state.session
    assert [each.role for each in run.messages].count("tool") == 1
    assert [each.complete for each in session[CompletionChecked].all()] == [True]
    # Two judgements were paid for; the log of the run knows of both.
    assert fold(ledger_of(session))[str(run_id)].cost_pico == 10**12
    assert len(session.log.sessions(parent_id=run_id)) == 2
    run.close()

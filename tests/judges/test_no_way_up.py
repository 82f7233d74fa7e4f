"""What a judge is handed has no way up: it cannot stop its run, charge it, or leave its limits."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import anyio
import pytest
from judges_kit import ScriptedAdapter, Seen, Verdict, judge_prompt, work_prompt

from treenail import Agent, Session, tool
from treenail.containment import CancellationToken, Decision, ExecutionContext, Limits, WrapOptions
from treenail.containment.ledger import fold
from treenail.errors import TreenailError, UsageError
from treenail.judges import (
    FeedbackProviderConfig,
    FeedbackTrigger,
    JudgedRun,
    JudgeEvent,
    Judges,
    NestedEvaluator,
    NestedExecutionConfig,
    TaskCompletionResult,
)
from treenail.providers import ModelEvent, ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Budget, BudgetTracker, ExecutionState, TokenUsage, nested_session
from treenail.turns import ModelAdapter, TurnState, contain
from treenail.turns.ledger import ledger_of
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

Attack = Callable[[Any], object]


@tool(effects="none")
def look() -> str:
    """Look."""
    return "seen"


class Judge:
    """Both kinds of judge at once: does its worst, whenever it is asked."""

    name = "judge"

    def __init__(self, attack: Attack) -> None:
        self._attack = attack

    def should_run(self, *, context: Any) -> bool:
        return True

    def provide(self, *, context: Any) -> None:
        self._attack(context)

    def check(self, context: Any) -> TaskCompletionResult:
        self._attack(context)
        return TaskCompletionResult.ok()


def judged(attack: Attack, **more: Any) -> Agent:
    judge = Judge(attack)
    watch = FeedbackProviderConfig(judge, FeedbackTrigger(every_n_calls=1))
    return Agent("worker", tools=(look,), feedback=[watch], completion=judge, **more)


PRICED = Answer("", [("look", {})], usage=TokenUsage(10, 1), cost_usd=0.2)
GOOD = Answer('{"good": true}', usage=TokenUsage(30, 3), cost_usd=0.2)


class Counts(ScriptedProvider):
    """Counts the calls that really reach the model. Each conversation is answered by what it asks for."""

    calls = 0

    def __init__(self, first: Answer) -> None:
        def answers(request: ModelRequest) -> Answer:
            return GOOD if "Judge it." in str(request.items) else first

        super().__init__([answers, Answer("done", usage=TokenUsage(10, 1), cost_usd=0.2)])

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.calls += 1
        async for each in super().stream(request):
            yield each


# --- the attacks, each in a real run -------------------------------------------------------------------


def charges_its_containment(context: Any) -> None:
    for _ in range(22):
        context.containment.call_llm(lambda: "mine", WrapOptions("judge", cost_estimate_hint=1.0))
        context.containment.call_tool(lambda: "mine", WrapOptions("judge", cost_estimate_hint=0.2))


def climbs(context: Any) -> None:
    above = context.containment
    while getattr(above, "parent", None) is not None:
        above = above.parent
        above.abort("the judge says so")
        above.cancellation_token.cancel(detail="the judge says so")


def stops_its_own(context: Any) -> None:
    context.containment.abort("the judge says so")
    context.containment.cancellation_token.cancel()
    context.containment.close()
    context.cancellation.cancel(detail="the judge says so")


def charges_its_tracker(context: Any) -> None:
    for each in ("run", "nested:run", str(context.session.session_id)):
        context.budget_tracker.record_cumulative(each, TokenUsage(10**6, 10**6), 10.0)
    context.budget_tracker.restore(context.budget_tracker.snapshot())


@pytest.mark.parametrize(
    "attack",
    [charges_its_containment, climbs, stops_its_own, charges_its_tracker],
    ids=lambda each: str(each.__name__),
)
def test_a_judge_can_neither_stop_nor_charge_its_run(attack: Attack) -> None:
    """The run ends as it would without the judge, and the log says that it spent what its own calls cost."""
    attacked: list[object] = []

    def does(context: Any) -> None:
        attacked.append(context)
        attack(context)

    tracker = BudgetTracker(Budget(max_total_tokens=1000, max_cost_usd=1.0))
    agent = judged(does)
    script = [PRICED, PRICED, Answer("done", usage=TokenUsage(10, 1), cost_usd=0.2)]
    state = ExecutionState(Session())
    with contain(state.session, Limits(max_cost_usd=1.0, max_steps=6)) as limits:
        answer = ModelAdapter(ScriptedProvider(script)).evaluate(
            agent.prompt, state=state, containment=limits, budget_tracker=tracker, request="go"
        )
        assert limits.stop_reason is None
    assert answer.text == "done"
    assert len(attacked) == 3
    spent = fold(ledger_of(state.session))[limits.chain_id]
    assert (spent.steps, spent.cost_pico) == (5, 6 * 10**11)
    assert (tracker.consumed.total, tracker.consumed_cost_usd) == (33, pytest.approx(0.6))


# --- the adapter ---------------------------------------------------------------------------------------


def asked_in(way: str, context: Any) -> None:
    """Ask the run's model for 22 judgements, without a nested evaluation."""
    for _ in range(22):
        try:
            if way == "session":
                context.adapter.evaluate(judge_prompt(), session=Session())
            elif way == "state":
                context.adapter.evaluate(judge_prompt(), state=ExecutionState(Session()))
            elif way == "own limits":
                wide = ExecutionContext(Limits(max_cost_usd=100.0))
                context.adapter.evaluate(judge_prompt(), session=Session(), containment=wide)
            elif way == "own token":
                context.adapter.evaluate(judge_prompt(), session=Session(), cancellation=CancellationToken())
            elif way == "configuration":
                context.config.adapter.evaluate(judge_prompt(), session=Session())
            elif way == "child session":
                context.adapter.evaluate(judge_prompt(), session=nested_session(context.session))
            elif way == "nested":
                nested = context.create_nested_context()
                NestedEvaluator(context.adapter, prompt=judge_prompt(), context=nested).evaluate()
            elif way == "thread":
                on_thread(lambda: context.adapter.evaluate(judge_prompt(), session=Session()))
            else:
                nested = context.create_nested_context()
                evaluator = NestedEvaluator(context.adapter, prompt=judge_prompt(), context=nested)
                on_thread(evaluator.evaluate)
        except TreenailError:
            pass


def on_thread(work: Callable[[], object]) -> None:
    """Run it on a thread that inherits nothing, not even context variables."""

    def quietly() -> None:
        try:
            work()
        except TreenailError:
            pass

    thread = threading.Thread(target=quietly)
    thread.start()
    thread.join()


WAYS = (
    "session", "state", "own limits", "own token", "configuration", "child session", "nested", "thread",
    "nested on a thread",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_judges_adapter_is_inside_the_runs_limits_whatever_it_is_given(way: str) -> None:
    """Under 1 USD and 6 steps the model is asked at most 5 times and 6 steps are made, judges included."""
    model = Counts(PRICED)
    adapter = ModelAdapter(model, retry=None)
    config = NestedExecutionConfig(adapter=adapter, default_nested_budget=None)
    agent = judged(lambda context: asked_in(way, context), nested=config)
    state = ExecutionState(Session())
    with contain(state.session, Limits(max_cost_usd=1.0, max_steps=6)) as limits:
        try:
            adapter.evaluate(agent.prompt, state=state, containment=limits, request="go")
        except TreenailError:
            pass  # The judges used up what the run had, and that is how it ended.
    spent = fold(ledger_of(state.session))[limits.chain_id]
    assert spent.cost_pico <= 10**12
    assert spent.steps <= 6
    assert spent.cost_pico == model.calls * 2 * 10**11
    assert model.calls > 1


def test_what_a_judge_asks_directly_is_booked_to_the_tracker_that_it_shares() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    model = Counts(Answer("done", usage=TokenUsage(10, 1)))

    def asks(context: Any) -> TaskCompletionResult:
        assert context.adapter.evaluate(judge_prompt(), session=Session()).output == Verdict(True)
        assert context.budget_tracker.consumed.total == 44
        return TaskCompletionResult.ok()

    agent = Agent("worker", completion=Judge(asks))
    ModelAdapter(model).evaluate(agent.prompt, session=Session(), budget_tracker=tracker, request="go")
    assert tracker.consumed.total == 44


def test_a_judge_may_not_use_tools_through_its_adapter_either() -> None:
    refused: list[BaseException] = []

    def asks(context: Any) -> None:
        with pytest.raises(UsageError, match="has tools") as raised:
            context.adapter.evaluate(Agent("x", tools=(look,)).prompt, session=Session())
        refused.append(raised.value)

    agent = Agent("worker", completion=Judge(asks))
    ModelAdapter(ScriptedProvider(["done"])).evaluate(agent.prompt, session=Session(), request="go")
    assert len(refused) == 1


def test_an_adapter_that_a_judge_keeps_asks_nothing_when_the_judge_is_over() -> None:
    kept: list[Any] = []
    model = Counts(Answer("done"))
    agent = Agent("worker", completion=Judge(kept.append))
    ModelAdapter(model).evaluate(agent.prompt, session=Session(), request="go")
    with pytest.raises(TreenailError):
        kept[0].adapter.evaluate(judge_prompt(), session=Session())
    assert model.calls == 1


# --- the walk ------------------------------------------------------------------------------------------


def reachable(start: object) -> Iterator[tuple[str, object]]:
    """Yield all that attributes lead to, private ones too, with the way; and into containers, and methods.

    What is not walked is what Python shows of itself: classes, modules, and a function's own insides.
    """
    seen: dict[int, object] = {}
    todo: list[tuple[str, object]] = [("context", start)]
    while todo:
        way, value = todo.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | None.__class__):
            continue
        seen[id(value)] = value
        yield way, value
        if isinstance(value, MethodType):
            todo.append((f"{way}.__self__", value.__self__))
            continue
        if type(value).__module__ in ("builtins", "functools") and callable(value):
            continue
        if isinstance(value, Mapping):
            todo += [(f"{way}[{key!r}]", each) for key, each in list(value.items())]
        elif isinstance(value, tuple | list | set | frozenset):
            todo += [(f"{way}[{index}]", each) for index, each in enumerate(value)]
        if type(value).__module__.split(".")[0] not in ("treenail", __name__.split(".")[0]):
            continue
        for name in dir(value):
            if not name.startswith("__"):
                try:
                    todo.append((f"{way}.{name}", getattr(value, name)))
                except Exception:  # noqa: BLE001 - a property that refuses leads nowhere
                    continue


def test_nothing_that_a_judge_is_handed_leads_to_something_that_can_change_the_run(tmp_path: Path) -> None:
    """Every attribute of both contexts and of all that those lead to, to the end, without an exception."""
    session, root = Session(), HostFilesystem(tmp_path)
    limits = ExecutionContext(Limits(max_cost_usd=1.0))
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("run", TokenUsage(10, 0))
    handed: list[Any] = []
    looks = Judge(handed.append)
    provider = ScriptedProvider([])
    adapter, cheap = ModelAdapter(provider), ModelAdapter(ScriptedProvider([]))
    prompt = work_prompt(
        feedback_providers=[FeedbackProviderConfig(looks, FeedbackTrigger(every_n_seconds=1))],
        task_completion_checker=looks,
        resources={Filesystem: root},
        nested_execution_config=NestedExecutionConfig(adapter=cheap),
    )
    token = CancellationToken()
    run = JudgedRun(
        prompt=prompt,
        session=session,
        adapter=adapter,
        containment=limits,
        budget_tracker=tracker,
        filesystem=root,
        cancellation=token,
    )
    run.adapter = adapter
    mine = Judges(run)
    anyio.run(mine.after_tools)
    anyio.run(mine.before_stop, "done", None, "stop")
    assert len(handed) == 2
    run_s = (
        session, session._core, session.log, root, limits, limits.chain, limits.chain.account,
        limits.chain.ledger, limits.cancellation_token, tracker, token, adapter, cheap, provider, run,
        prompt, prompt.resources, prompt.template, looks,
    )  # fmt: skip
    own = {id(each): each for each in run_s}
    found = 0
    for context in handed:
        assert context.budget_tracker.consumed.total == 10
        for start in (context, context.create_nested_context()):
            for way, value in reachable(start):
                found += 1
                assert id(value) not in own, way
                assert not isinstance(value, Session | ModelAdapter | ScriptedProvider), way
    assert found > 100
    assert limits.call_tool(lambda: "still there").value == "still there"


def test_an_adapter_that_a_judge_brings_along_is_handed_no_way_up_either() -> None:
    """It makes its calls inside the run's limits, through a containment that leads to no other."""
    limits = ExecutionContext(Limits(max_cost_usd=1.0, max_steps=3))
    token, tracker = CancellationToken(), BudgetTracker(Budget(max_total_tokens=100))
    made: list[str] = []

    async def climbs_from_inside(seen: Seen) -> Verdict:
        given: Any = seen.containment
        own = {id(each) for each in (limits, limits.chain, limits.chain.account, token, tracker)}
        for start in (given, given.spawn_child(), seen.cancellation, seen.budget_tracker):
            for way, value in reachable(start):
                assert id(value) not in own, way
                assert not isinstance(value, ExecutionContext), way
        while (await given.acall_llm(lambda: made.append("asked"))).decision is Decision.ALLOW:
            pass
        given.abort("enough")
        return Verdict(True)

    def asks(context: Any) -> None:
        brought = ScriptedAdapter(climbs_from_inside)
        nested = NestedEvaluator(brought, prompt=judge_prompt(), context=context.create_nested_context())
        nested.evaluate()

    run = JudgedRun(
        prompt=work_prompt(task_completion_checker=Judge(asks)),
        session=Session(),
        containment=limits,
        budget_tracker=tracker,
        cancellation=token,
    )
    assert anyio.run(Judges(run).before_stop, "done", None, "stop") is None
    assert [each.outcome for each in run.session[JudgeEvent].all()] == []
    assert len(made) == 3
    assert limits.get_snapshot().step_count == 3
    assert not limits.cancellation_token.is_cancelled


def test_the_walk_finds_a_way_up_where_there_is_one() -> None:
    """The same walk, from a chain below another: it would have found each of the ways."""
    above = ExecutionContext(Limits(max_cost_usd=1.0))
    ways = {id(value) for _, value in reachable(above.spawn_child(onlooker=True))}
    assert {id(above), id(above.chain), id(above.cancellation_token), id(above.chain.account)} <= ways


# --- what still goes down ------------------------------------------------------------------------------


def test_a_run_that_is_stopped_stops_what_a_judge_is_handed() -> None:
    token, heard = CancellationToken(), threading.Event()

    def waits(context: Any) -> None:
        token.cancel(detail="a person says so")
        assert context.cancellation.wait(60)
        assert context.containment.cancellation_token.wait(60)
        assert context.containment.stop_reason == "aborted"
        heard.set()

    agent = judged(waits)
    state = ExecutionState(Session())
    with contain(state.session, Limits(max_steps=9)) as limits, pytest.raises(TreenailError):
        ModelAdapter(ScriptedProvider([PRICED, "done"])).evaluate(
            agent.prompt, state=state, containment=limits, cancellation=token, request="go"
        )
    # The run does not wait for a judge on a thread; the judge hears of the stop all the same.
    assert heard.wait(60)


def test_the_limits_of_a_judge_are_what_its_run_has_left() -> None:
    seen: list[Any] = []

    def reads(context: Any) -> None:
        kept = context.containment
        seen.append((kept.remaining_usd, kept.config.max_steps, kept.remaining_s is not None))

    agent = judged(reads)
    run = agent.run(
        "go",
        provider=ScriptedProvider([PRICED, Answer("done", cost_usd=0.2)]),
        limits=Limits(max_cost_usd=1.0, max_steps=6, timeout=600),
    )
    assert run.state is TurnState.COMPLETED
    assert seen == [(pytest.approx(0.8), 4, True), (pytest.approx(0.6), 3, True)]
    run.close()

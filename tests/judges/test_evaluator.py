"""One evaluation inside a run: isolated, in time, within its budget, and harmless whatever it does."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges_kit import (
    Note,
    ScriptedAdapter,
    Seen,
    Verdict,
    answering,
    judge_prompt,
    raising,
)

from treenail.clock import Clock, new_id
from treenail.containment import CancellationToken, ChainMetadata, ExecutionContext, Limits, WrapOptions
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    NestedEvaluationError,
    OutputParseError,
    PromptEvaluationError,
    ReadOnlyError,
    ThrottleError,
    UsageError,
)
from treenail.judges import (
    NestedEvaluationResult,
    NestedEvaluator,
    NestedExecutionConfig,
    NestedExecutionContext,
    derive_nested_deadline,
)
from treenail.log.sqlite import SqliteLog
from treenail.prompt import MarkdownSection, Prompt
from treenail.state import (
    Binding,
    Budget,
    BudgetTracker,
    Deadline,
    RunContext,
    Session,
    SessionView,
    TokenUsage,
)
from treenail.testing.clock import FakeClock
from treenail.tools import tool
from treenail.workspace import Filesystem, InMemoryFilesystem

GOOD = Verdict(good=True, why="it works")


def evaluator(
    adapter: ScriptedAdapter,
    session: Session | None = None,
    *,
    prompt: Prompt[Any] | None = None,
    **more: Any,
) -> NestedEvaluator[Any]:
    return NestedEvaluator(
        adapter,
        prompt=prompt or judge_prompt(),
        context=NestedExecutionContext(session or Session(), **more),
    )


# --- the round trip ------------------------------------------------------------------------------------


def test_an_evaluation_returns_its_answer_its_use_and_its_trace() -> None:
    parent, run = Session(), RunContext.new()
    adapter = answering(GOOD, total=40)
    result = evaluator(adapter, parent, parent_run_context=run).evaluate()
    assert (result.success, result.output, result.error) == (True, GOOD, None)
    assert result.usage == TokenUsage(input_tokens=40, output_tokens=0)
    assert result.child_run_context is not None
    assert result.child_run_context.trace_id == run.trace_id
    assert result.child_run_context.parent_span_id == run.span_id
    (seen,) = adapter.seen
    assert seen.run_context == result.child_run_context
    assert seen.session.session_id == result.child_run_context.session_id


async def test_the_sync_face_is_refused_inside_a_loop_and_the_async_one_works_there() -> None:
    nested = evaluator(answering(GOOD))
    with pytest.raises(UsageError, match="aevaluate"):
        nested.evaluate()
    assert (await nested.aevaluate()).output == GOOD


def test_the_answer_of_a_prompt_without_a_type_is_its_text() -> None:
    async def step(seen: Seen) -> Any:
        return None

    prompt: Prompt[str] = Prompt(ns="t", key="free", sections=[MarkdownSection("A", template="Say it.")])
    assert evaluator(ScriptedAdapter(step), prompt=prompt).evaluate().output == "None"


# --- isolation -----------------------------------------------------------------------------------------


def test_the_child_works_in_a_session_of_its_own_that_can_be_inspected_afterwards(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "runs.db")
    parent = Session(log=log)
    parent.dispatch(Note("parent"))
    head = parent.head

    async def step(seen: Seen) -> Any:
        assert isinstance(seen.session.parent, SessionView)
        assert seen.session.parent[Note].all() == (Note("parent"),)
        with pytest.raises(ReadOnlyError):
            seen.session.parent.dispatch(Note("no"))
        seen.session.dispatch(Note("child"))
        return GOOD

    result = evaluator(ScriptedAdapter(step), parent).evaluate()
    assert (parent.head, parent[Note].all()) == (head, (Note("parent"),))
    assert result.child_run_context is not None
    child_id = result.child_run_context.session_id
    assert child_id is not None
    assert [each.session_id for each in parent.children] == [child_id]
    # The lease was given up: anybody may open it, for writing even.
    again = Session.open(log, child_id)
    assert again[Note].all() == (Note("child"),)
    assert again.parent_id == parent.session_id
    assert again.tags["nested"] == "judge"
    again.close()
    log.close()


def test_resources_follow_the_table() -> None:
    """Clock inherited, files read-only, budget its own, everything else only by name."""
    clock = FakeClock()
    files = InMemoryFilesystem()
    files.write("a.txt", "text")
    client = object()
    adapter = answering(GOOD)
    evaluator(
        adapter,
        Session(clock=clock),
        filesystem=files,
        budget=Budget(max_total_tokens=7),
        resource_overrides={object: client},
    ).evaluate()
    registry = adapter.seen[0].state.resources.registry  # type: ignore[union-attr]  # it is open
    assert registry.get(Clock) is clock  # type: ignore[type-abstract]  # a protocol
    assert registry.get(object) is client
    held = registry.get(Filesystem)  # type: ignore[type-abstract]  # a protocol
    assert held is not None
    assert held.read("a.txt").content == "text"
    with pytest.raises(ReadOnlyError):
        held.write("a.txt", "other")
    tracker = registry.get(BudgetTracker)
    assert tracker is adapter.seen[0].budget_tracker
    assert set(registry) == {Clock, Filesystem, BudgetTracker, object}


@dataclass
class Handle:
    """A resource that must be given back."""

    closed: list[str]

    def close(self) -> None:
        self.closed.append("closed")


@pytest.mark.parametrize(
    "error", [None, RuntimeError("no"), SystemExit(3), DeadlineExceededError("late"), GeneratorExit()]
)
def test_whatever_happens_resources_session_and_chain_are_closed(error: BaseException | None) -> None:
    closed: list[str] = []
    adapter = answering(GOOD) if error is None else raising(error)
    parent = Session()
    limits = ExecutionContext(Limits(timeout=60))
    token = CancellationToken()
    nested = evaluator(
        adapter,
        parent,
        containment=limits,
        cancellation=token,
        resource_overrides={Handle: Binding(Handle, lambda _: Handle(closed), eager=True)},
    )
    try:
        nested.evaluate()
    except DeadlineExceededError:
        assert isinstance(error, DeadlineExceededError)
    assert closed == ["closed"]
    (child,) = parent.children
    with pytest.raises(UsageError, match="closed"):
        child.dispatch(Note("late"))
    seen = adapter.seen[0]
    assert seen.containment is not None
    assert seen.containment.parent is limits
    token.cancel()
    assert seen.cancellation is not None
    assert not seen.cancellation.is_cancelled, "a finished evaluation no longer follows the run"
    limits.close()


def test_a_resource_that_cannot_be_built_is_a_captured_failure() -> None:
    def broken(_: Any) -> Handle:
        raise OSError("no route")

    nested = evaluator(answering(GOOD), resource_overrides={Handle: Binding(Handle, broken, eager=True)})
    result = nested.evaluate()
    assert result.error is not None
    assert result.error.kind == "crashed"
    assert "no route" in str(result.error)


def test_a_prompts_own_resources_are_opened_and_closed_with_it() -> None:
    closed: list[str] = []
    adapter = answering(GOOD)
    prompt = judge_prompt(resources={Handle: Binding(Handle, lambda _: Handle(closed), eager=True)})
    evaluator(adapter, prompt=prompt).evaluate()
    assert closed == ["closed"]


async def test_evaluations_at_the_same_time_do_not_see_each_other() -> None:
    """Each works in its own session, whatever the others do, and the parent stays as it is."""
    parent = Session()
    parent.dispatch(Note("parent"))
    gate = anyio.Event()

    async def step(seen: Seen) -> Any:
        mine = str(seen.session.session_id)
        seen.session.dispatch(Note(mine))
        if len(adapter.seen) == 8:
            gate.set()
        await gate.wait()
        seen.use(total=1)
        assert seen.session[Note].all() == (Note(mine),)
        return Verdict(good=True, why=mine)

    adapter = ScriptedAdapter(step)
    nested = evaluator(adapter, parent)
    results: list[NestedEvaluationResult[Any]] = []

    async def one() -> None:
        results.append(await nested.aevaluate())

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(one)
    assert len({result.output and result.output.why for result in results}) == 8
    assert all(result.usage == TokenUsage(input_tokens=1, output_tokens=0) for result in results)
    assert parent[Note].all() == (Note("parent"),)


@given(writes=st.lists(st.text(max_size=5), max_size=6), fails=st.booleans())
def test_whatever_a_child_writes_the_parent_is_as_it_was(writes: list[str], fails: bool) -> None:
    parent = Session()
    parent.dispatch(Note("parent"))
    head = parent.head

    async def step(seen: Seen) -> Any:
        for each in writes:
            seen.session.dispatch(Note(each))
        seen.session.reset()
        if fails:
            raise RuntimeError("no")
        return GOOD

    assert evaluator(ScriptedAdapter(step), parent).evaluate().success is not fails
    assert (parent.head, parent[Note].all()) == (head, (Note("parent"),))


# --- tools ---------------------------------------------------------------------------------------------


@tool
def look(path: str) -> str:
    """Look at a file."""
    return path


def test_a_judges_prompt_has_no_tools_unless_they_are_allowed() -> None:
    prompt = Prompt[Verdict](ns="t", key="j", sections=[MarkdownSection("J", template="J", tools=[look])])
    adapter = answering(GOOD)
    with pytest.raises(UsageError, match="allow_nested_tools"):
        evaluator(adapter, prompt=prompt).evaluate()
    assert adapter.seen == []
    allowed = NestedExecutionConfig(allow_nested_tools=True)
    assert evaluator(adapter, prompt=prompt, config=allowed).evaluate().success


# --- time ----------------------------------------------------------------------------------------------


async def test_an_adapter_that_hangs_is_stopped_when_its_time_is_over() -> None:
    clock = FakeClock()
    began = anyio.Event()

    async def step(seen: Seen) -> Any:
        began.set()
        await anyio.sleep_forever()

    nested = evaluator(ScriptedAdapter(step), Session(clock=clock))
    async with anyio.create_task_group() as group:

        async def one() -> None:
            with pytest.raises(DeadlineExceededError):
                await nested.aevaluate()

        group.start_soon(one)
        await began.wait()
        clock.advance(30.1)


@pytest.mark.parametrize("left_s", [-5.0, 0.0])
def test_no_time_left_means_no_evaluation(left_s: float) -> None:
    clock = FakeClock()
    adapter = answering(GOOD)
    deadline = Deadline(clock.now() + timedelta(seconds=left_s), clock=clock)
    nested = evaluator(adapter, Session(clock=clock), deadline=derive_nested_deadline(deadline))
    with pytest.raises(DeadlineExceededError):
        nested.evaluate()
    assert adapter.seen == []


def test_less_than_a_second_left_is_time_enough_to_try() -> None:
    clock = FakeClock()
    adapter = answering(GOOD)
    deadline = Deadline(clock.now() + timedelta(seconds=0.2), clock=clock)
    assert evaluator(adapter, Session(clock=clock), deadline=deadline).evaluate().success
    assert adapter.seen[0].deadline == deadline


def test_the_parents_deadline_alone_does_not_make_an_evaluation_long() -> None:
    """The configuration's longest time holds, also for a context that just passes the run's deadline."""
    clock = FakeClock()
    adapter = answering(GOOD)
    config = NestedExecutionConfig(max_nested_duration=timedelta(seconds=4))
    deadline = Deadline(clock.now() + timedelta(hours=1), clock=clock)
    evaluator(adapter, Session(clock=clock), deadline=deadline, config=config).evaluate()
    assert adapter.seen[0].deadline is not None
    assert adapter.seen[0].deadline.remaining() == timedelta(seconds=4)


def test_a_budgets_deadline_counts_as_well() -> None:
    clock = FakeClock()
    soon = Deadline(clock.now() + timedelta(seconds=2), clock=clock)
    adapter = answering(GOOD)
    evaluator(adapter, Session(clock=clock), budget=Budget(deadline=soon)).evaluate()
    assert adapter.seen[0].deadline == soon


# --- budgets -------------------------------------------------------------------------------------------


def test_a_shared_budget_counts_what_the_judge_uses_apart_but_together() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("run", TokenUsage(input_tokens=30, output_tokens=0))
    evaluator(answering(GOOD, total=50)).evaluate(budget_tracker=tracker)
    assert tracker.consumed.total == 80
    assert tracker.snapshot().usage["run"].total == 30
    assert tracker.snapshot().usage["nested:one"].total == 50


def test_a_judge_cannot_spend_what_the_parent_no_longer_has() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("run", TokenUsage(input_tokens=100, output_tokens=0))
    adapter = answering(GOOD, total=1)
    with pytest.raises(BudgetExceededError, match="nothing left"):
        evaluator(adapter).evaluate(budget_tracker=tracker)
    assert adapter.seen == []


def test_a_shared_budget_that_runs_out_in_the_middle_is_raised_and_what_was_used_is_kept() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))

    async def step(seen: Seen) -> Any:
        seen.use(total=60)
        seen.use(total=60)
        raise AssertionError("the tracker lets nobody come here")

    with pytest.raises(BudgetExceededError):
        evaluator(ScriptedAdapter(step)).evaluate(budget_tracker=tracker)
    assert tracker.consumed.total == 120


def test_two_judges_that_share_see_each_others_spending_at_once() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    evaluator(answering(GOOD, total=90)).evaluate(budget_tracker=tracker)

    async def step(seen: Seen) -> Any:
        assert seen.budget_tracker is not None
        assert seen.budget_tracker.remaining().total_tokens == 10
        seen.use(total=20, as_evaluation="two")

    with pytest.raises(BudgetExceededError):
        evaluator(ScriptedAdapter(step)).evaluate(budget_tracker=tracker)


def test_an_own_budget_cannot_be_overspent_and_does_not_touch_the_parents() -> None:
    parents = BudgetTracker(Budget(max_total_tokens=1))
    result = evaluator(answering(GOOD, total=9), budget=Budget(max_total_tokens=10)).evaluate()
    assert result.success
    with pytest.raises(BudgetExceededError):
        evaluator(answering(GOOD, total=11), budget=Budget(max_total_tokens=10)).evaluate()
    assert parents.consumed.total is None


def test_an_own_budget_holds_for_an_adapter_that_knows_of_no_trackers() -> None:
    from treenail.conversation import ProviderUsage

    async def step(seen: Seen) -> Any:
        seen.session.dispatch(ProviderUsage("p", "m", 1, TokenUsage(input_tokens=8, output_tokens=4)))
        return GOOD

    assert evaluator(ScriptedAdapter(step), budget=Budget(max_total_tokens=12)).evaluate().success
    with pytest.raises(BudgetExceededError):
        evaluator(ScriptedAdapter(step), budget=Budget(max_total_tokens=11)).evaluate()


def test_an_own_budget_on_top_of_a_shared_one_is_the_narrower_of_both() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    with pytest.raises(BudgetExceededError):
        evaluator(answering(GOOD, total=20), budget=Budget(max_total_tokens=10)).evaluate(
            budget_tracker=tracker
        )
    assert tracker.consumed.total == 20


def test_without_any_budget_the_configurations_default_holds() -> None:
    with pytest.raises(BudgetExceededError):
        evaluator(answering(GOOD, total=1001)).evaluate()
    free = NestedExecutionConfig(default_nested_budget=None)
    assert evaluator(answering(GOOD, total=1001), config=free).evaluate().success


# --- containment ---------------------------------------------------------------------------------------


def test_a_judges_calls_are_paid_from_the_runs_limits_on_a_chain_of_their_own() -> None:
    limits = ExecutionContext(Limits(max_cost_usd=1.0, max_steps=10))

    async def step(seen: Seen) -> Any:
        assert seen.containment is not None
        outcome = await seen.containment.acall_llm(lambda: None, WrapOptions(cost_estimate_hint=0.25))
        assert outcome.ok
        return GOOD

    adapter = ScriptedAdapter(step)
    evaluator(adapter, containment=limits).evaluate()
    assert limits.get_snapshot().cost_usd_accumulated == 0.25
    assert adapter.seen[0].containment is not None
    assert adapter.seen[0].containment.get_snapshot().cost_usd_accumulated == 0.25
    assert adapter.seen[0].containment.get_snapshot().parent_chain_id == limits.chain_id


def test_a_refusal_by_the_runs_money_is_raised_as_a_spent_budget() -> None:
    limits = ExecutionContext(Limits(max_cost_usd=0.1))

    async def step(seen: Seen) -> Any:
        assert seen.containment is not None
        outcome = await seen.containment.acall_llm(lambda: None, WrapOptions(cost_estimate_hint=0.25))
        raise CallRefused(outcome.detail, stop_reason=outcome.stop_reason)

    with pytest.raises(BudgetExceededError, match="USD"):
        evaluator(ScriptedAdapter(step), containment=limits).evaluate()


# --- depth ---------------------------------------------------------------------------------------------


def nesting(
    levels: int, config: NestedExecutionConfig | None, between: Callable[[ExecutionContext], Any]
) -> int:
    """Nest evaluations in each other, and return how many were let through."""
    reached = 0

    async def step(seen: Seen) -> Any:
        nonlocal reached
        reached += 1
        if reached < levels:
            assert seen.containment is not None
            inner = evaluator(adapter, seen.session, containment=between(seen.containment), config=config)
            # Where nothing but the containment is handed on, as to a worker elsewhere.
            await asyncio.create_task(inner.aevaluate(), context=contextvars.Context())
        return GOOD

    adapter = ScriptedAdapter(step)
    evaluator(adapter, config=config).evaluate()
    return reached


@given(levels=st.integers(1, 5), allowed=st.integers(0, 5), through_subagents=st.booleans())
def test_evaluations_nest_as_deep_as_is_allowed_and_no_deeper(
    levels: int, allowed: int, through_subagents: bool
) -> None:
    """A subagent between two of them, with a chain of its own, does not begin the count anew."""

    def between(chain: ExecutionContext) -> ExecutionContext:
        if not through_subagents:
            return chain
        return chain.spawn_child(Limits(), metadata=ChainMetadata(request_id="r", chain_id=str(new_id())))

    config = NestedExecutionConfig(max_nesting_depth=allowed)
    assert nesting(levels, config, between) == min(levels, allowed)


def test_what_is_too_deep_is_a_captured_failure_that_says_so() -> None:
    inner: list[NestedEvaluationResult[Any]] = []

    async def step(seen: Seen) -> Any:
        inner.append(await evaluator(adapter, seen.session).aevaluate())
        return GOOD

    adapter = ScriptedAdapter(step)
    assert evaluator(adapter).evaluate().success
    (refused,) = inner
    assert refused.error is not None
    assert refused.error.kind == "depth"
    assert len(adapter.seen) == 1


def test_an_inner_configuration_cannot_raise_the_outer_ceiling() -> None:
    outcomes: list[bool] = []

    async def step(seen: Seen) -> Any:
        inner = evaluator(
            adapter,
            seen.session,
            containment=seen.containment,
            config=NestedExecutionConfig(max_nesting_depth=9),
        )
        outcomes.append((await inner.aevaluate()).success)
        return GOOD

    adapter = ScriptedAdapter(step)
    evaluator(adapter, config=NestedExecutionConfig(max_nesting_depth=2)).evaluate()
    assert outcomes == [False, True]


# --- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ThrottleError("slow down", kind="rate_limit"), "throttled"),
        (OutputParseError("not JSON"), "output"),
        (PromptEvaluationError("broke"), "evaluation"),
        (CallRefused("a loop"), "refused"),
        (RuntimeError("boom"), "crashed"),
        (SystemExit(1), "crashed"),
        (GeneratorExit(), "crashed"),
        (asyncio.CancelledError(), "crashed"),
        (NestedEvaluationError("mine", kind="depth"), "depth"),
    ],
)
def test_what_the_table_says_is_captured_is_captured(error: BaseException, kind: str) -> None:
    result = evaluator(raising(error)).evaluate()
    assert (result.success, result.output) == (False, None)
    assert result.error is not None
    assert result.error.kind == kind
    assert result.error is error or result.error.__cause__ is error


@pytest.mark.parametrize(
    "error", [DeadlineExceededError("late"), BudgetExceededError("spent"), KeyboardInterrupt()]
)
def test_what_the_table_says_propagates_propagates(error: BaseException) -> None:
    async def one() -> None:
        with pytest.raises(type(error)) as raised:
            await evaluator(raising(error)).aevaluate()
        assert raised.value is error

    anyio.run(one)


def test_what_was_used_by_an_evaluation_that_failed_is_known() -> None:
    async def step(seen: Seen) -> Any:
        seen.use(total=12)
        raise RuntimeError("boom")

    assert evaluator(ScriptedAdapter(step)).evaluate().usage == TokenUsage(input_tokens=12, output_tokens=0)


# --- stopping the run ----------------------------------------------------------------------------------


async def test_the_runs_token_stops_the_evaluation_and_passes_through() -> None:
    token = CancellationToken()

    async def step(seen: Seen) -> Any:
        token.cancel(detail="a person said stop")
        await anyio.sleep_forever()

    with pytest.raises(CancelledByToken, match="a person said stop"):
        await evaluator(ScriptedAdapter(step), cancellation=token).aevaluate()


async def test_the_cancellation_of_the_task_passes_through_and_everything_is_closed() -> None:
    parent = Session()
    began = anyio.Event()

    async def step(seen: Seen) -> Any:
        began.set()
        await anyio.sleep_forever()

    ended: list[str] = []

    async def one() -> None:
        try:
            await evaluator(ScriptedAdapter(step), parent).aevaluate()
        finally:
            ended.append("ended")

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await began.wait()
        group.cancel_scope.cancel()
    assert ended == ["ended"]
    with pytest.raises(UsageError, match="closed"):
        parent.children[0].dispatch(Note("late"))


def test_a_run_that_is_stopped_already_begins_no_evaluation() -> None:
    token = CancellationToken()
    token.cancel(detail="over")
    adapter = answering(GOOD)
    with pytest.raises(CancelledByToken):
        evaluator(adapter, cancellation=token).evaluate()
    assert adapter.seen == []

"""Feedback while the work goes on: when it is due, what is said, and what becomes of providers that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges_kit import Note, Verdict, answering, called, judge_prompt, raising, work_prompt

from treenail.containment import CancellationToken, ExecutionContext, Limits, WrapOptions
from treenail.conversation import InnerMessage, enable_inner_message_recording
from treenail.errors import (
    BudgetExceededError,
    CancelledByToken,
    DeadlineExceededError,
    NestedEvaluationError,
    ReadOnlyError,
    ThrottleError,
    UsageError,
)
from treenail.judges import (
    DeadlineFeedback,
    Feedback,
    FeedbackContext,
    FeedbackProvider,
    FeedbackProviderConfig,
    FeedbackTrigger,
    JudgedRun,
    JudgeEvent,
    Judges,
    NestedEvaluated,
    NestedEvaluator,
    NestedExecutionConfig,
    Observation,
    StaticFeedback,
    StaticFeedbackProvider,
    nested_usage,
)
from treenail.judges.events import FileTriggerFired
from treenail.log.sqlite import SqliteLog
from treenail.state import Budget, BudgetTracker, Deadline, Session, TokenUsage
from treenail.testing.clock import FakeClock
from treenail.workspace import InMemoryFilesystem

EVERY_CALL = FeedbackTrigger(every_n_calls=1)


@dataclass
class Provider:
    """A provider that does what a function says."""

    act: Callable[[FeedbackContext], Any]
    name: str = "Provider"
    ready: bool = True
    asked: int = 0

    def should_run(self, *, context: FeedbackContext) -> bool:
        return self.ready

    def provide(self, *, context: FeedbackContext) -> Any:
        self.asked += 1
        return self.act(context)


def saying(text: str, name: str = "Provider") -> Provider:
    return Provider(lambda _: Feedback(summary=text), name=name)


def judges(
    session: Session,
    *providers: FeedbackProvider | FeedbackProviderConfig,
    config: NestedExecutionConfig | None = None,
    **more: Any,
) -> Judges:
    configs = [
        each if isinstance(each, FeedbackProviderConfig) else FeedbackProviderConfig(each, EVERY_CALL)
        for each in providers
    ]
    prompt = work_prompt(feedback_providers=configs, nested_execution_config=config)
    return Judges(JudgedRun(prompt=prompt, session=session, **more))


def round_of(judges: Judges) -> str | None:
    return anyio.run(judges.after_tools)


# --- triggers ------------------------------------------------------------------------------------------


@given(every=st.integers(1, 5), calls=st.integers(0, 20))
def test_a_provider_is_asked_after_every_n_calls(every: int, calls: int) -> None:
    session = Session()
    provider = saying("look")
    mine = judges(session, FeedbackProviderConfig(provider, FeedbackTrigger(every_n_calls=every)))

    async def work() -> None:
        for _ in range(calls):
            called(session)
            await mine.after_tools()

    anyio.run(work)
    assert provider.asked == calls // every
    assert [each.call_index for each in session[Feedback].all()] == [
        every * (number + 1) for number in range(calls // every)
    ]


def test_a_provider_is_asked_after_every_n_seconds_and_at_the_first_opportunity() -> None:
    clock = FakeClock()
    session = Session(clock=clock)
    provider = saying("look")
    mine = judges(session, FeedbackProviderConfig(provider, FeedbackTrigger(every_n_seconds=10)))
    for advance, asked in ((0, 1), (9, 1), (1, 2), (5, 2), (30, 3)):
        clock.advance(advance)
        round_of(mine)
        assert provider.asked == asked


def test_a_file_wakes_a_provider_once_in_the_life_of_the_session(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "runs.db")
    session, files, provider = Session(log=log), InMemoryFilesystem(), saying("a report!")
    config = FeedbackProviderConfig(provider, FeedbackTrigger(on_file_created="out/report.md"))
    mine = judges(session, config, filesystem=files)
    assert round_of(mine) is None
    files.write("out/report.md", "text")
    assert "a report!" in (round_of(mine) or "")
    assert round_of(mine) is None
    files.delete("out/report.md")
    assert round_of(mine) is None
    files.write("out/report.md", "again")
    assert round_of(mine) is None
    session.close()
    again = Session.open(log, session.session_id)
    assert round_of(judges(again, config, filesystem=files)) is None
    assert provider.asked == 1
    assert again[FileTriggerFired].all() == (FileTriggerFired("Provider", "work", "out/report.md"),)
    again.close()
    log.close()


def test_one_trigger_is_enough_and_none_is_never() -> None:
    session, files = Session(), InMemoryFilesystem()
    files.write("a", "")
    either, never = saying("either", "Either"), saying("never", "Never")
    mine = judges(
        session,
        FeedbackProviderConfig(either, FeedbackTrigger(every_n_calls=100, on_file_created="a")),
        FeedbackProviderConfig(never, FeedbackTrigger()),
        filesystem=files,
    )
    called(session, 50)
    assert "either" in (round_of(mine) or "")
    assert (either.asked, never.asked) == (1, 0)


def test_counters_are_per_provider_and_per_prompt() -> None:
    session = Session()
    often, seldom = saying("often", "Often"), saying("seldom", "Seldom")
    mine = judges(
        session,
        FeedbackProviderConfig(often, FeedbackTrigger(every_n_calls=1)),
        FeedbackProviderConfig(seldom, FeedbackTrigger(every_n_calls=2)),
    )
    called(session, 5, prompt="another prompt")
    assert round_of(mine) is None
    called(session)
    assert round_of(mine) == Feedback("Often", "often").render()
    called(session)
    both = round_of(mine)
    assert both == f"{Feedback('Often', 'often').render()}\n\n{Feedback('Seldom', 'seldom').render()}"


def test_two_providers_of_one_name_do_not_share_a_counter() -> None:
    session = Session()
    first, second = saying("first"), saying("second")
    mine = judges(session, first, FeedbackProviderConfig(second, FeedbackTrigger(every_n_calls=2)))
    called(session)
    assert "second" not in (round_of(mine) or "")
    called(session)
    assert "second" in (round_of(mine) or "")
    assert [each.provider_name for each in session[Feedback].all()] == ["Provider", "Provider", "Provider#2"]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    config = FeedbackProviderConfig(saying("look"), FeedbackTrigger(every_n_calls=3))
    called(session, 3)
    assert round_of(judges(session, config)) is not None
    called(session, 2)
    assert round_of(judges(session, config)) is None
    session.close()
    again = Session.open(log, session.session_id)
    called(again, 1)
    assert round_of(judges(again, config)) is not None
    again.close()
    log.close()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_prune_does_not_change_what_counts_since_the_last_feedback(keep: int) -> None:
    """Whether the feedback itself, or only the calls before it, were forgotten."""
    session = Session()
    provider = saying("look")
    mine = judges(session, FeedbackProviderConfig(provider, FeedbackTrigger(every_n_calls=2)))
    called(session, 2)
    assert round_of(mine) is not None
    called(session, 1)
    session.prune(keep_last=keep)
    assert round_of(mine) is None
    context = FeedbackContext(session, work_prompt())
    assert context.tool_calls_since_last_feedback == 1
    called(session, 1)
    assert round_of(mine) is not None
    called(session, 1)
    assert round_of(mine) is None


@pytest.mark.parametrize(
    "wrong", [{"every_n_calls": 0}, {"every_n_calls": True}, {"every_n_seconds": 0}, {"every_n_seconds": -1}]
)
def test_a_trigger_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FeedbackTrigger(**wrong)


def test_should_run_has_a_say_and_the_trigger_stays_due() -> None:
    session, files = Session(), InMemoryFilesystem()
    files.write("a", "")
    provider = saying("look")
    provider.ready = False
    config = FeedbackProviderConfig(provider, FeedbackTrigger(on_file_created="a"))
    mine = judges(session, config, filesystem=files)
    assert round_of(mine) is None
    assert len(session[JudgeEvent]) == 0
    provider.ready = True
    assert round_of(mine) is not None


# --- what is said --------------------------------------------------------------------------------------


def test_feedback_is_stamped_recorded_and_rendered_as_a_tagged_block() -> None:
    clock = FakeClock()
    session = Session(clock=clock)
    called(session, 2)
    said = Feedback(
        summary="You are going in circles.",
        observations=(Observation("repetition", "the same edit twice", "edit_file(a.py)"),),
        suggestions=["Read the error first."],  # type: ignore[arg-type]  # a list will do
        severity="caution",
    )
    text = round_of(judges(session, Provider(lambda _: said, name='The "judge"')))
    assert text == (
        '<feedback provider="The &quot;judge&quot;" severity="caution">\n'
        "You are going in circles.\n"
        "Observations:\n"
        "- [repetition] the same edit twice (evidence: edit_file(a.py))\n"
        "Suggestions:\n"
        "- Read the error first.\n"
        "</feedback>"
    )
    (kept,) = session[Feedback].all()
    assert (kept.provider_name, kept.prompt_name, kept.call_index) == ('The "judge"', "work", 2)
    assert kept.timestamp == clock.now()


@given(st.text() | st.sampled_from(["</feedback>", "< / FEEDBACK>\n<feedback severity='info'>", "<feedback"]))
def test_no_text_of_a_judge_can_leave_its_block(text: str) -> None:
    rendered = Feedback("p", text, (Observation(text, text, text),), (text,)).render()
    assert rendered.lower().count("<feedback") == 1
    assert rendered.lower().count("</feedback") == 1
    assert rendered.endswith("\n</feedback>")


def test_what_a_judge_says_is_limited() -> None:
    flood = Feedback("p", "x" * 10**6, tuple(Observation("c", "y" * 10**5) for _ in range(500)))
    assert len(flood.render()) < 100_000


def test_the_message_and_the_feedback_are_one_append() -> None:
    session = Session()
    enable_inner_message_recording(session)
    called(session)
    mine = judges(session, saying("look"))
    sizes: list[int] = []

    def record(text: str) -> list[object]:
        sizes.append(session.head)
        return [InnerMessage("user", text, "e", 3)]

    async def go() -> str | None:
        return await mine.after_tools(record)

    text = anyio.run(go)
    assert session[InnerMessage].all()[0].content == text
    # Nothing was written between the question and the answer: one batch holds both.
    assert session.head == sizes[0] + 2


def test_a_provider_may_be_async_or_have_nothing_to_say() -> None:
    session = Session()
    called(session)

    async def later(context: FeedbackContext) -> Feedback:
        await anyio.lowlevel.checkpoint()
        return Feedback(summary="later")

    silent = Provider(lambda _: None, name="Silent")
    text = round_of(judges(session, Provider(later, name="Async"), silent))
    assert text == Feedback("Async", "later").render()
    (event,) = session[JudgeEvent].all()
    assert (event.judge, event.outcome) == ("Silent", "silent")
    # It was asked, so its counter begins anew.
    assert round_of(judges(session, silent)) is None
    assert silent.asked == 1


def test_a_context_knows_the_run_so_far() -> None:
    session = Session()
    called(session, 3)
    seen: list[Any] = []

    def look(context: FeedbackContext) -> Feedback:
        seen.append(
            (
                context.tool_call_count,
                context.tool_calls_since_last_feedback,
                context.tool_calls_since_last_feedback_for_provider("Provider"),
                context.last_feedback and context.last_feedback.summary,
                [each.params["path"] for each in context.recent_tool_calls(2)],
                context.recent_tool_calls(0),
                context.task,
            )
        )
        return Feedback(summary="seen")

    mine = judges(session, Provider(look), task="do it")
    round_of(mine)
    session.dispatch(Feedback("Other", "other", prompt_name="work", call_index=3))
    called(session, 2)
    round_of(mine)
    assert seen == [
        (3, 3, 3, None, ["file-1.py", "file-2.py"], (), "do it"),
        (5, 2, 2, "other", ["file-0.py", "file-1.py"], (), "do it"),
    ]


# --- the built-in ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "severity", "says"),
    [
        (7260, "info", "2 h 1 min"),
        (125, "info", "2 min 5 s"),
        (59, "warning", "59 s"),
        (0.5, "warning", "less"),
    ],
)
def test_deadline_feedback_says_how_much_time_is_left(left_s: float, severity: str, says: str) -> None:
    clock = FakeClock()
    context = FeedbackContext(
        Session(clock=clock), work_prompt(), Deadline(clock.now() + timedelta(seconds=left_s), clock=clock)
    )
    provider = DeadlineFeedback()
    assert provider.should_run(context=context)
    feedback = provider.provide(context=context)
    assert feedback is not None
    assert feedback.severity == severity
    assert says in feedback.summary
    clock.advance(left_s)
    over = provider.provide(context=context)
    assert over is not None
    assert "passed" in over.summary


def test_deadline_feedback_has_nothing_to_say_without_a_deadline() -> None:
    context = FeedbackContext(Session(), work_prompt())
    assert not DeadlineFeedback().should_run(context=context)
    assert DeadlineFeedback().provide(context=context) is None


def test_static_feedback_says_the_same_each_time() -> None:
    assert StaticFeedbackProvider is StaticFeedback
    assert isinstance(StaticFeedback("x"), FeedbackProvider)
    assert isinstance(DeadlineFeedback(), FeedbackProvider)
    session = Session()
    mine = judges(session, StaticFeedback("Run the tests.", severity="caution"))
    for _ in range(2):
        called(session)
        assert round_of(mine) == Feedback("StaticFeedback", "Run the tests.", severity="caution").render()


# --- providers that fail -------------------------------------------------------------------------------


def throw(error: BaseException) -> Callable[[FeedbackContext], Any]:
    def act(context: FeedbackContext) -> Any:
        raise error

    return act


def athrow(error: BaseException) -> Callable[[FeedbackContext], Any]:
    async def act(context: FeedbackContext) -> Any:
        raise error

    return act


@pytest.mark.parametrize("face", [throw, athrow], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("boom"), "crashed"),
        (SystemExit(2), "crashed"),
        (GeneratorExit(), "crashed"),
        (asyncio.CancelledError(), "crashed"),
        (RecursionError("deep"), "crashed"),
        (UsageError("wrong"), "configuration"),
        (NestedEvaluationError("x", kind="throttled"), "throttled"),
        (DeadlineExceededError("its own"), "timeout"),
        (BudgetExceededError("its own"), "budget"),
        (CancelledByToken("not the run's"), "crashed"),
    ],
)
def test_a_provider_that_fails_is_an_event_and_harms_nobody(
    face: Callable[[BaseException], Callable[[FeedbackContext], Any]], error: BaseException, reason: str
) -> None:
    session = Session()
    called(session)
    mine = judges(session, Provider(face(error), name="Broken"), saying("fine", "Fine"))
    assert round_of(mine) == Feedback("Fine", "fine").render()
    (event,) = session[JudgeEvent].all()
    assert (event.judge, event.kind, event.outcome, event.reason) == ("Broken", "feedback", "failed", reason)
    assert not event.failed_closed
    # It is not asked again before its trigger fires again.
    assert round_of(mine) is None
    assert len(session[JudgeEvent]) == 1


def test_an_interrupt_on_a_worker_thread_is_nobodys_and_one_in_the_loop_is_a_persons() -> None:
    session = Session()
    called(session)
    assert round_of(judges(session, Provider(throw(KeyboardInterrupt())))) is None
    assert session[JudgeEvent].all()[0].reason == "crashed"

    async def loop() -> None:
        called(session)
        with pytest.raises(KeyboardInterrupt):
            await judges(session, Provider(athrow(KeyboardInterrupt()), name="Loop")).after_tools()

    anyio.run(loop)


@pytest.mark.parametrize("nonsense", [42, "text", object(), ["a"]])
def test_a_provider_that_answers_nonsense_is_a_failure(nonsense: object) -> None:
    session = Session()
    called(session)
    assert round_of(judges(session, Provider(lambda _: nonsense))) is None
    assert session[JudgeEvent].all()[0].reason == "configuration"


async def test_a_provider_that_hangs_is_left_behind_when_its_time_is_over() -> None:
    clock = FakeClock()
    session = Session(clock=clock)
    called(session)
    hanging, release = threading.Event(), threading.Event()
    tokens: list[CancellationToken | None] = []

    def hang(context: FeedbackContext) -> Feedback:
        tokens.append(context.cancellation)
        hanging.set()
        release.wait()
        return Feedback(summary="too late")

    mine = judges(session, Provider(hang))
    texts: list[str | None] = []

    async def one() -> None:
        texts.append(await mine.after_tools())

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.to_thread.run_sync(hanging.wait)
        clock.advance(40)
    release.set()
    assert texts == [None]
    assert session[JudgeEvent].all()[0].reason == "timeout"
    assert tokens[0] is not None
    assert tokens[0].is_cancelled, "whoever is left behind hears that nobody waits"
    assert len(session[Feedback]) == 0


async def test_a_judge_never_outlives_the_runs_deadline() -> None:
    clock = FakeClock()
    session = Session(clock=clock)
    called(session)
    began = anyio.Event()

    async def hang(context: FeedbackContext) -> Feedback:
        began.set()
        await anyio.sleep_forever()
        raise AssertionError

    deadline = Deadline(clock.now() + timedelta(seconds=0.5), clock=clock)
    mine = judges(session, Provider(hang), deadline=deadline)
    async with anyio.create_task_group() as group:
        group.start_soon(mine.after_tools)
        await began.wait()
        clock.advance(0.5)
    (event,) = session[JudgeEvent].all()
    assert (event.outcome, event.reason) == ("skipped", "deadline")


def test_feedback_that_fails_closed_stops_the_run() -> None:
    session = Session()
    called(session)
    config = NestedExecutionConfig(on_feedback_failure="closed")
    with pytest.raises(NestedEvaluationError, match="must not continue"):
        round_of(judges(session, Provider(throw(RuntimeError("boom"))), config=config))
    (event,) = session[JudgeEvent].all()
    assert event.failed_closed


# --- when there is nothing left ------------------------------------------------------------------------


def spent_tracker() -> BudgetTracker:
    tracker = BudgetTracker(Budget(max_total_tokens=10))
    tracker.record_cumulative("run", TokenUsage(input_tokens=10, output_tokens=0))
    return tracker


def spent_limits() -> ExecutionContext:
    limits = ExecutionContext(Limits(max_cost_usd=0.1))
    limits.call_llm(lambda: None, WrapOptions(cost_estimate_hint=0.1))
    return limits


def spent_steps() -> ExecutionContext:
    limits = ExecutionContext(Limits(max_steps=1))
    limits.call_llm(lambda: None)
    return limits


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"deadline": Deadline.after(timedelta(seconds=-1))}, "deadline"),
        ({"budget_tracker": spent_tracker()}, "budget"),
        ({"containment": spent_limits()}, "budget"),
        ({"containment": spent_steps()}, "budget"),
    ],
    ids=["deadline", "tokens", "money", "steps"],
)
def test_a_run_with_nothing_left_skips_its_judges_and_says_so(more: dict[str, Any], reason: str) -> None:
    session = Session()
    called(session)
    provider = saying("look")
    assert round_of(judges(session, provider, **more)) is None
    assert provider.asked == 0
    (event,) = session[JudgeEvent].all()
    assert (event.outcome, event.reason) == ("skipped", reason)


# --- stopping the run ----------------------------------------------------------------------------------


async def test_the_cancellation_of_the_run_passes_through_a_judge() -> None:
    session, token = Session(), CancellationToken()
    called(session)

    def stop(context: FeedbackContext) -> Feedback:
        token.cancel(detail="a person said stop")
        assert context.cancellation is not None
        context.cancellation.wait()
        raise AssertionError("nobody waits for this")

    with pytest.raises(CancelledByToken, match="a person said stop"):
        await judges(session, Provider(stop), cancellation=token).after_tools()
    assert len(session[JudgeEvent]) == 0


async def test_the_cancellation_of_the_task_passes_through_a_judge() -> None:
    session = Session()
    called(session)
    began = anyio.Event()

    async def hang(context: FeedbackContext) -> Feedback:
        began.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as group:
        group.start_soon(judges(session, Provider(hang)).after_tools)
        await began.wait()
        group.cancel_scope.cancel()
    assert len(session[JudgeEvent]) == 0


# --- asking a model ------------------------------------------------------------------------------------


@dataclass
class Asking:
    """A provider that asks a model as the seed's reference provider does."""

    results: list[Any] = field(default_factory=list)
    budget: Budget | None = None
    name: str = "Asking"

    def should_run(self, *, context: FeedbackContext) -> bool:
        return True

    def provide(self, *, context: FeedbackContext) -> Feedback:
        assert context.adapter is not None
        nested = NestedEvaluator(
            context.adapter,
            prompt=judge_prompt(),
            context=context.create_nested_context(budget=self.budget),
        )
        result = nested.evaluate()
        self.results.append(result)
        if result.success and result.output:
            return Feedback(summary=result.output.why)
        return Feedback(summary="unavailable")


def test_a_plain_provider_can_ask_a_model_and_the_run_knows_what_that_used() -> None:
    session = Session()
    called(session)
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("run", TokenUsage(input_tokens=30, output_tokens=0))
    adapter = answering(Verdict(good=False, why="not yet"), total=40)
    text = round_of(judges(session, Asking(), adapter=adapter, budget_tracker=tracker))
    assert text == Feedback("Asking", "not yet").render()
    (done,) = session[NestedEvaluated].all()
    assert (done.judge, done.prompt_name, done.success, done.budget) == ("Asking", "judge", True, "own")
    assert done.child_session_id == adapter.seen[0].session.session_id
    # Kept apart from what the run used, and added up when somebody asks.
    assert tracker.consumed.total == 30
    usage = nested_usage(session)
    assert (usage.own.total, usage.shared.total) == (40, None)
    assert usage.consolidated(tracker.consumed).total == 70


def test_feedback_shares_the_runs_budget_if_the_configuration_says_so() -> None:
    session = Session()
    called(session)
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    config = NestedExecutionConfig(share_budget=True)
    adapter = answering(Verdict(good=True, why="fine"), total=40)
    round_of(judges(session, Asking(), adapter=adapter, budget_tracker=tracker, config=config))
    assert tracker.consumed.total == 40
    usage = nested_usage(session)
    assert (usage.own.total, usage.shared.total) == (None, 40)
    assert usage.consolidated(tracker.consumed).total == 40


def test_a_judge_that_is_rate_limited_harms_nobody_and_is_on_record() -> None:
    session = Session()
    called(session)
    adapter = raising(ThrottleError("slow down", kind="rate_limit"))
    assert "unavailable" in (round_of(judges(session, Asking(), adapter=adapter)) or "")
    (done,) = session[NestedEvaluated].all()
    assert (done.success, done.error_kind) == (False, "throttled")


def test_a_configured_adapter_judges_in_place_of_the_runs() -> None:
    session = Session()
    called(session)
    cheap = answering(Verdict(good=True, why="cheap"))
    runs = answering(Verdict(good=True, why="dear"))
    config = NestedExecutionConfig(adapter=cheap)
    assert "cheap" in (round_of(judges(session, Asking(), adapter=runs, config=config)) or "")
    assert runs.seen == []


def test_a_judges_prompt_cannot_bring_the_runs_own_workspace() -> None:
    session, files = Session(), InMemoryFilesystem()
    called(session)
    prompt = judge_prompt(resources={InMemoryFilesystem: files})

    async def act(context: FeedbackContext) -> Feedback:
        assert context.adapter is not None
        nested = NestedEvaluator(context.adapter, prompt=prompt, context=context.create_nested_context())
        result = await nested.aevaluate()
        return Feedback(summary=str(result.error))

    text = round_of(judges(session, Provider(act), adapter=answering(1), filesystem=files))
    assert "cannot be given" in (text or "")


def test_a_judge_cannot_write_to_the_run_it_looks_at() -> None:
    session, files = Session(), InMemoryFilesystem()
    called(session)
    head = session.head

    def act(context: FeedbackContext) -> Feedback:
        with pytest.raises(ReadOnlyError):
            context.session.dispatch(Note("no"))  # type: ignore[attr-defined]  # that is the point
        assert context.filesystem is not None
        with pytest.raises(ReadOnlyError):
            context.filesystem.write("a", "b")
        return Feedback(summary="could not")

    assert "could not" in (round_of(judges(session, Provider(act), filesystem=files)) or "")
    assert session.head == head + 1


def test_a_run_without_judges_is_left_alone() -> None:
    session = Session()
    called(session, 3)
    head = session.head
    mine = Judges(JudgedRun(prompt=work_prompt(), session=session))
    assert (mine.has_feedback, mine.has_completion) == (False, False)
    assert round_of(mine) is None
    assert session.head == head

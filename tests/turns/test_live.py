"""Watching harms nothing: publishing never waits, and who is slow or dead is told, or dropped."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import get_args

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent, tool
from treenail.errors import ModelCallError, UsageError
from treenail.judges import Feedback, FeedbackContext, FeedbackProviderConfig, FeedbackTrigger
from treenail.log import Channel, MemoryLog
from treenail.providers import (
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import InProcessDispatcher, Session, spec_of
from treenail.tools import PLAN_TOOLS
from treenail.turns import (
    FeedbackGiven,
    Lagged,
    LiveEvent,
    LiveFeed,
    PlanChanged,
    PlanEntry,
    RetryPolicy,
    StatusChanged,
    ToolCallFinished,
    TurnEnded,
    TurnFinished,
    TurnState,
    UsageChanged,
)
from treenail.turns.live import status_of

WAIT_S = 60
THINKING = StatusChanged("thinking", "t", 1)


@tool(effects="none")
def look() -> str:
    """Look."""
    return "seen"


def drain(subscription) -> list[object]:
    found = []
    while (each := subscription.get_nowait()) is not None:
        found.append(each)
    return found


def test_every_live_event_is_of_the_live_channel_and_is_never_logged() -> None:
    """Dispatched to a session it reaches the subscribers, and the log stays empty."""
    live = [each for each in get_args(LiveEvent) if each not in get_args(ModelEvent)]
    assert {spec_of(each).channel for each in live} == {Channel.LIVE}
    bus, told = InProcessDispatcher(), []
    bus.subscribe(StatusChanged, told.append)
    session = Session(bus=bus)
    session.dispatch(THINKING)
    assert session.head == 0
    assert told == [THINKING]


def test_subscribers_see_everything_in_order_from_when_they_came() -> None:
    """Deltas and other events keep their order among each other."""
    feed = LiveFeed()
    feed.publish(TextDelta("before"))
    watching = feed.subscribe()
    sent = [THINKING, TextDelta("a"), ReasoningDelta("b"), UsageChanged(steps=1), TextDelta("c")]
    for each in sent:
        feed.publish(each)
    assert drain(watching) == sent


@given(
    published=st.lists(st.booleans(), max_size=40),
    reads=st.lists(st.integers(0, 39), max_size=6),
    capacity=st.integers(1, 8),
)
def test_a_slow_subscriber_loses_the_oldest_and_is_told_how_many(
    published: list[bool], reads: list[int], capacity: int
) -> None:
    """Nothing is invented, repeated or reordered, and what was read and what was lost add up."""
    feed = LiveFeed()
    watching = feed.subscribe(capacity=capacity)
    seen: list[object] = []
    for number, is_delta in enumerate(published):
        feed.publish(TextDelta(str(number)) if is_delta else UsageChanged(steps=number))
        if number in reads:
            seen += drain(watching)
    seen += drain(watching)
    numbers = [
        int(each.text) if isinstance(each, TextDelta) else each.steps
        for each in seen
        if isinstance(each, TextDelta | UsageChanged)
    ]
    lost = sum(each.count for each in seen if isinstance(each, Lagged))
    assert numbers == sorted(set(numbers))
    assert len(numbers) + lost == len(published)
    if published:
        assert numbers[-1] == len(published) - 1


def test_a_flood_of_text_hides_no_other_event() -> None:
    """Deltas push out deltas only."""
    feed = LiveFeed()
    watching = feed.subscribe(capacity=10)
    feed.publish(THINKING)
    for _ in range(1000):
        feed.publish(TextDelta("x"))
    assert drain(watching) == [Lagged(990), THINKING, *[TextDelta("x")] * 10]


def test_a_reader_that_hangs_delays_neither_the_turn_nor_the_others() -> None:
    """It gets what is left when it comes back; meanwhile everything else continued."""
    feed, stuck, released = LiveFeed(), threading.Event(), threading.Event()
    slow, quick = feed.subscribe(capacity=5), feed.subscribe()
    told: list[object] = []

    def read() -> None:
        for each in slow:
            stuck.set()
            released.wait(WAIT_S)
            told.append(each)

    reader = threading.Thread(target=read)
    reader.start()
    feed.publish(THINKING)
    assert stuck.wait(WAIT_S)
    for number in range(100):
        feed.publish(TextDelta(str(number)))
    assert len(drain(quick)) == 101
    released.set()
    slow.close()
    reader.join(WAIT_S)
    assert told == [THINKING, Lagged(95), *(TextDelta(str(each)) for each in range(95, 100))]


def test_a_subscription_that_is_dropped_is_forgotten() -> None:
    """Nobody has to unsubscribe for the feed to stay small."""
    feed = LiveFeed()
    kept, gone = feed.subscribe(), feed.subscribe()
    dropped = weakref.ref(gone)
    del gone
    gc.collect()
    assert dropped() is None
    feed.publish(THINKING)
    assert drain(kept) == [THINKING]


@pytest.mark.parametrize("backend", ["asyncio"])
def test_an_event_loop_is_woken_by_other_threads_and_ends_with_the_feed(backend: str) -> None:
    """Everything that was published arrives, then the iteration ends."""
    feed = LiveFeed()
    sent = [TextDelta(str(number)) for number in range(500)]

    def work() -> None:
        for each in sent:
            feed.publish(each)
        feed.close()

    async def watch() -> list[object]:
        watching = feed.subscribe()
        threading.Thread(target=work).start()
        with anyio.fail_after(WAIT_S):
            return [each async for each in watching]

    assert anyio.run(watch, backend=backend) == sent


def test_many_threads_publish_without_losing_anything() -> None:
    """The feed is used from wherever tools run."""
    feed = LiveFeed()
    watching = feed.subscribe(capacity=5000)
    threads = [
        threading.Thread(
            target=lambda name=name: [
                feed.publish(UsageChanged(steps=each, tokens=name)) for each in range(500)
            ]
        )
        for name in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    seen = drain(watching)
    for name in range(4):
        assert [each.steps for each in seen if each.tokens == name] == list(range(500))


def test_a_closed_feed_ends_at_once_for_who_comes_late() -> None:
    """Nobody waits for a turn that is over."""
    feed = LiveFeed()
    feed.close()
    assert list(feed.subscribe()) == []
    with pytest.raises(UsageError, match="at least one"):
        feed.subscribe(capacity=0)


def test_only_a_completed_turn_is_shown_as_done() -> None:
    """Every other state has a status that says otherwise."""
    assert [each for each in TurnState if status_of(each) == "done"] == [TurnState.COMPLETED]
    assert ToolCallFinished("c", "look", success=False).success is False


# --- what a turn shows --------------------------------------------------------------------------------------


def test_a_turn_shows_what_it_does_as_it_does_it() -> None:
    """Thinking, tools, usage and the ending, in the order in which they happen."""
    script = ScriptedProvider([Answer("I look.", [("look", {})], cost_usd=0.25), "done"])
    seen: list[object] = []
    with Agent("tester", tools=(look,)).run("go", provider=script, watch=seen.append) as run:
        (ended,) = run.execution_state.session[TurnEnded].all()
    turn = ended.turn_id
    shown = [each for each in seen if not isinstance(each, UsageReported | Stopped | ToolCallRequested)]
    kinds = [each.status if isinstance(each, StatusChanged) else type(each).__name__ for each in shown]
    text = [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]]
    assert text == [
        "thinking",
        "TextDelta",
        "UsageChanged",
        "running_tools",
        "ToolCallBegan",
        "ToolCallFinished",
        "thinking",
        "TextDelta",
        "UsageChanged",
        "done",
        "TurnFinished",
    ]
    steps = [(each.turn_id, each.step) for each in shown if isinstance(each, StatusChanged)]
    assert steps == [(turn, 1), (turn, 1), (turn, 2), (turn, 2)]
    finished = next(each for each in shown if isinstance(each, ToolCallFinished))
    assert (finished.name, finished.success, finished.summary) == ("look", True, "seen")
    assert shown[-1] == TurnFinished(turn, TurnState.COMPLETED)


def test_a_turn_that_fails_shows_an_error_and_its_cause() -> None:
    """A screen never has to guess from silence."""
    script = ScriptedProvider([Answer("half", error=ModelCallError("cut", kind="connection"))])
    seen: list[object] = []
    with Agent("tester").run("go", provider=script, watch=seen.append) as run:
        assert run.state is TurnState.PARTIAL_FAILED
    *_, status, finished = seen
    assert isinstance(status, StatusChanged)
    assert isinstance(finished, TurnFinished)
    assert (status.status, finished.state, finished.error_kind) == ("error", run.state, "connection")
    assert finished.next_actions == run.next_actions


def statuses(seen: list[object]) -> list[str]:
    return [each.status for each in seen if isinstance(each, StatusChanged)]


def test_a_wait_for_another_attempt_is_shown_and_ends_with_the_first_word() -> None:
    """A screen does not show a provider's bad moment as thinking."""

    class Shaky(ScriptedProvider):
        failures = 1

        async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
            if self.failures:
                self.failures -= 1
                raise ModelCallError("busy", kind="transient", retryable=True)
            async with aclosing(super().stream(request)) as events:
                async for each in events:
                    yield each

    seen: list[object] = []
    agent = Agent("tester", retry=RetryPolicy(base_s=0.01))
    with agent.run("go", provider=Shaky(["done"]), watch=seen.append) as run:
        assert run.state is TurnState.COMPLETED
    assert statuses(seen) == ["thinking", "waiting", "thinking", "done"]
    waiting = next(each for each in seen if isinstance(each, StatusChanged) and each.status == "waiting")
    assert "busy" in waiting.detail
    assert waiting.step == 1
    said = next(place for place, each in enumerate(seen) if isinstance(each, TextDelta))
    assert statuses(seen[:said]) == ["thinking", "waiting", "thinking"]


def test_a_plan_is_shown_whenever_it_has_changed_and_when_a_run_goes_on() -> None:
    """As it stands after each call that changed it, and at once to whoever watches a resumed run."""
    setup = ("setup_plan", {"objective": "tidy", "steps": ["look", "clean"]})
    done = ("update_step", {"step": 1, "status": "done"})
    cut = Answer(error=ModelCallError("cut", kind="connection"))
    script = ScriptedProvider([Answer("", [setup]), Answer("", [("look", {})]), Answer("", [done]), cut])
    agent = Agent("tester", tools=(look, *PLAN_TOOLS), retry=None)
    seen: list[object] = []
    log = MemoryLog()
    with agent.run("go", provider=script, watch=seen.append, store=log) as run:
        assert run.result.error_kind == "connection"
    plans = [each for each in seen if isinstance(each, PlanChanged)]
    first = PlanChanged((PlanEntry("look", "pending"), PlanEntry("clean", "pending")))
    second = PlanChanged((PlanEntry("look", "done"), PlanEntry("clean", "pending")))
    assert plans == [first, second]
    later: list[object] = []
    provider = ScriptedProvider(["", "", "", "done"])
    with agent.resume(log, run.id, provider=provider, watch=later.append) as resumed:
        assert resumed.state is TurnState.COMPLETED
    assert [each for each in later if isinstance(each, PlanChanged)] == [second]


def test_feedback_is_shown_with_who_gave_it() -> None:
    """A screen names the judge, and how much it matters."""

    class Frowning:
        name = "frown"

        def should_run(self, *, context: FeedbackContext) -> bool:
            return True

        def provide(self, *, context: FeedbackContext) -> Feedback:
            return Feedback(summary="too slow", severity="caution")

    seen: list[object] = []
    frowning = FeedbackProviderConfig(Frowning(), FeedbackTrigger(every_n_calls=1))
    agent = Agent("tester", tools=(look,), feedback=(frowning,))
    with agent.run("go", provider=ScriptedProvider([Answer("", [("look", {})]), "done"]), watch=seen.append):
        pass
    assert [each for each in seen if isinstance(each, FeedbackGiven)] == [
        FeedbackGiven("frown", "too slow", "caution")
    ]


def test_a_watch_that_raises_does_not_change_how_a_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged and not called again; the run continues."""
    calls: list[object] = []

    def watch(each: object) -> None:
        calls.append(each)
        raise RuntimeError("the screen is gone")

    provider = ScriptedProvider([Answer("I look.", [("look", {})]), "done"])
    with Agent("tester", tools=(look,)).run("go", provider=provider, watch=watch) as run:
        assert (run.state, run.output) == (TurnState.COMPLETED, "done")
    assert len(calls) == 1
    assert "the turn continues without it" in caplog.text

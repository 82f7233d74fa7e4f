"""What every provider promises, as a suite that any provider can be run through.

Subclass `ProviderConformance` in your own tests and say how your provider is made for a
server; pytest finds the rest:

    class TestMyProvider(ProviderConformance):
        def make_provider(self, server):
            return MyProvider(base_url=server.openai_url)

The server is a `treenail.testing.wire.WireServer`, so a provider that speaks one of its
interfaces needs no more. One that speaks another overrides `open` and plays the steps itself,
as the scripted provider does in Treenail's own tests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
import pytest

from treenail.agent import Agent
from treenail.clock import Clock, SystemClock
from treenail.conversation import ImagePart, InnerMessage, ProviderUsage, ToolCallRecord, replay_events
from treenail.errors import ModelCallError, ThrottleError
from treenail.providers import (
    MAX_TEXT_CHARS,
    CollectedAnswer,
    Collector,
    ModelEvent,
    ModelRequest,
    Provider,
    ReasoningBlock,
    Stopped,
    TextDelta,
    ToolCallRequested,
)
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, Session, TokenUsage
from treenail.testing.clock import FakeClock
from treenail.testing.wire import Broken, Fault, Step, WireServer
from treenail.tools import ToolCall, tool
from treenail.turns import InnerLoop, PartialText, RetryPolicy, TurnResult, TurnState, Watch

CUT_KINDS = ("connection", "transient")
"""How a stream that breaks may be classified: as a broken connection, or as the server's failure."""


PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
"""A picture of one red dot: some look into it before they send it."""


class ProviderBench:
    """A provider, and what can be seen of it from the other side."""

    provider: Provider

    @property
    def calls(self) -> int:
        """How many calls have arrived."""
        raise NotImplementedError

    def saw(self, text: str) -> bool:
        """Whether the newest call carried a text, anywhere."""
        raise NotImplementedError

    def wait_closed(self) -> bool:
        """Wait until the newest call is over on the other side, and say whether we left before its end."""
        raise NotImplementedError


@dataclass
class WireBench(ProviderBench):
    """A provider that talks to a wire server."""

    provider: Provider
    server: WireServer

    @property
    def calls(self) -> int:
        """How many requests have arrived."""
        return len(self.server.requests)

    def saw(self, text: str) -> bool:
        """Whether the newest request's body holds a text."""
        return text in json.dumps(self.server.requests[-1].body, ensure_ascii=False)

    def wait_closed(self) -> bool:
        """Whether the server saw the client leave."""
        return self.server.requests[-1].wait_closed()


@dataclass
class _Outcome:
    events: list[ModelEvent] = field(default_factory=list)
    error: ModelCallError | None = None

    @property
    def answer(self) -> CollectedAnswer:
        collector = Collector()
        for each in self.events:
            collector.add(each)
        return collector.answer()


class _HastyClock(FakeClock):
    """A fake clock on which sleeping takes no time but counts; `slept` says how long each sleep was."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def async_sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await anyio.lowlevel.checkpoint()


@tool(effects="none")
def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


@tool
def write_and_fail(path: str, *, context: Any) -> str:
    """Write a file, and fail."""
    context.filesystem.write(path, "never to be seen")
    raise ValueError("the disk is on fire")


CALCULATOR = Agent("calculator", instructions="You calculate.", tools=(double, write_and_fail))


def request_of(*messages: InnerMessage, provider: Provider, **fields: Any) -> ModelRequest:
    """Make the request that a conversation amounts to, as the loop would."""
    folded = replay_events(
        ((seq, message, "") for seq, message in enumerate(messages, 1)),
        model=provider.model,
        dialect=provider.name,
    )
    answers = sum(message.role == "assistant" for message in messages)
    return ModelRequest(folded.items, answers_so_far=answers, **fields)


def said(role: Literal["system", "user", "assistant", "tool"], text: str = "", **fields: Any) -> InnerMessage:
    """Make a message."""
    return InnerMessage(role=role, content=text, evaluation_id="e", sequence=0, **fields)


def outcome_of(provider: Provider, request: ModelRequest | None = None) -> _Outcome:
    """Make one call, and return what came of it."""
    outcome = _Outcome()
    asked = request or request_of(said("system", "Be brief."), said("user", "Hello"), provider=provider)

    async def call() -> None:
        try:
            async with aclosing(provider.stream(asked)) as events:
                async for each in events:
                    outcome.events.append(each)
        except ModelCallError as error:
            outcome.error = error

    anyio.run(call)
    return outcome


def turn_of(
    provider: Provider, retry: RetryPolicy, clock: Clock | None = None, watch: Watch | None = None
) -> TurnResult:
    """Make one turn, which asks the provider again as the policy says."""
    clock = clock or SystemClock()
    state = ExecutionState(Session(clock=clock), clock=clock)
    loop = InnerLoop(state, provider, CALCULATOR.prompt, retry=retry, watch=watch)
    return anyio.run(loop.run, "Hello")


class ProviderConformance:
    """The promises of the provider seam. Subclass it, and say how a provider is made."""

    many_calls = 1000
    """How many calls an answer may ask for; fewer where each one takes long."""

    def make_provider(self, server: WireServer) -> Provider:
        """Make the provider under test, talking to a server."""
        raise NotImplementedError

    def open(self, steps: Sequence[Step]) -> AbstractContextManager[ProviderBench]:
        """Set up a provider that meets these steps, one per call."""
        return self._open_wire(steps)

    @contextmanager
    def _open_wire(self, steps: Sequence[Step]) -> Iterator[ProviderBench]:
        with WireServer(steps) as server:
            yield WireBench(self.make_provider(server), server)

    # --- answers ---------------------------------------------------------------------------------------

    def test_a_plain_answer_comes_in_pieces_and_ends(self) -> None:
        """Text as it is said, usage in the provider's numbers, one end, and nothing after it."""
        usage = TokenUsage(input_tokens=120, output_tokens=30, cached_tokens=50, reasoning_tokens=7)
        with self.open([Answer("Hello,\nworld\n", usage=usage)]) as bench:
            outcome = outcome_of(bench.provider)
        assert outcome.error is None
        assert [each.text for each in outcome.events if isinstance(each, TextDelta)] == [
            "Hello,\n",
            "world\n",
        ]
        assert [each for each in outcome.events if isinstance(each, Stopped)] == [Stopped("end")]
        assert isinstance(outcome.events[-1], Stopped)
        assert outcome.answer.usage == usage

    def test_parallel_calls_come_whole_and_in_order(self) -> None:
        """Each with its own id, its name, and its arguments as the model wrote them."""
        calls: list[tuple[str, dict[str, Any]]] = [
            ("double", {"number": 1}),
            ("double", {"number": 2}),
            ("write_and_fail", {"path": "ä/ö"}),
        ]
        with self.open([Answer("Let me see.", calls)]) as bench:
            outcome = outcome_of(bench.provider)
        got = [each.call for each in outcome.events if isinstance(each, ToolCallRequested)]
        assert [(call.name, json.loads(call.arguments_json)) for call in got] == calls
        assert len({call.id for call in got}) == 3
        assert outcome.events[-1] == Stopped("tools")
        assert outcome.answer.text == "Let me see."

    def test_results_and_failures_go_back_and_the_run_is_completed(self) -> None:
        """Two calls at once, one that fails, one of a tool that is not there: the other side takes it all."""
        steps = [
            Answer("", [("double", {"number": 21}), ("double", {"number": 4})]),
            Answer("Now this.", [("write_and_fail", {"path": "a.txt"}), ("nosuch", {})]),
            Answer("42 and 8."),
        ]
        with self.open(steps) as bench:
            run = CALCULATOR.run("Double 21 and 4", provider=bench.provider)
            assert bench.calls == 3
            assert bench.saw("disk is on fire")
        assert (run.state, run.output) == (TurnState.COMPLETED, "42 and 8.")
        assert [call.success for call in run.tool_calls if call.name == "double"] == [True, True]
        assert [each.content for each in run.messages if each.role == "tool"][:2] == ["42", "8"]

    def test_a_schema_for_the_output_reaches_the_model(self) -> None:
        """The provider's own way to structured output is used, and the text is the document."""
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "what the ship is called"}},
            "required": ["name"],
            "additionalProperties": False,
        }
        with self.open([Answer('{"name": "Kelp"}')]) as bench:
            asked = request_of(said("user", "A ship"), provider=bench.provider, output_schema=schema)
            outcome = outcome_of(bench.provider, asked)
            assert bench.saw("what the ship is called")
        assert json.loads(outcome.answer.text) == {"name": "Kelp"}

    @pytest.mark.parametrize("writer", ["the same", "another"])
    def test_blocks_of_thought_go_back_unchanged(self, writer: str) -> None:
        """To the model and interface that wrote them, and to no other; the other side checks them."""
        steps = [Answer("", [("double", {"number": 3})], thoughts=["Twice three, hm."]), Answer("6")]
        with self.open(steps) as bench:
            first = outcome_of(bench.provider)
            (part,) = [each.part for each in first.events if isinstance(each, ReasoningBlock)]
            assert (part.model, part.dialect) == (bench.provider.model, bench.provider.name)
            if writer == "another":
                part = replace(part, model="another")
            (call,) = first.answer.calls
            record = ToolCallRecord(call.id, call.name, call.arguments_json)
            asked = request_of(
                said("user", "Double 3"),
                said("assistant", first.answer.text, tool_calls=(record,), parts=(part,)),
                said("tool", "6", tool_call_id=call.id, tool_name=call.name),
                provider=bench.provider,
            )
            second = outcome_of(bench.provider, asked)
            assert second.error is None, second.error
            assert second.answer.text == "6"
            assert bench.saw("Twice three, hm.") == (writer == "the same")

    def test_a_picture_in_a_result_reaches_the_model(self) -> None:
        """As the interface takes one: inside of the result, or behind all results of the answer."""
        picture = ImagePart("image/png", PICTURE)
        calls = (ToolCallRecord("a", "look", "{}"), ToolCallRecord("b", "look", "{}"))
        with self.open([Answer("A cat.")]) as bench:
            asked = request_of(
                said("user", "What is there?"),
                said("assistant", tool_calls=calls),
                said("tool", "seen", tool_call_id="a", tool_name="look", parts=(picture,)),
                said("tool", "nothing", tool_call_id="b", tool_name="look"),
                said("user", "Well?"),
                provider=bench.provider,
            )
            outcome = outcome_of(bench.provider, asked)
            assert outcome.error is None, outcome.error
            assert bench.saw("image/png")
        assert outcome.answer.text == "A cat."

    def test_one_provider_serves_several_event_loops(self) -> None:
        """The sync face runs a loop per call; a provider outlives them."""
        with self.open(["one", "two", "three"]) as bench:
            texts = [outcome_of(bench.provider).answer.text for _ in range(3)]
        assert texts == ["one", "two", "three"]

    # --- answers that are none -------------------------------------------------------------------------

    @pytest.mark.parametrize("stop", ["length", "refused", "filtered"])
    def test_an_answer_that_is_none_says_so(self, stop: Literal["length", "refused", "filtered"]) -> None:
        """Cut at the length limit, refused or filtered: the reason is told, and no run calls it done."""
        with self.open([Answer("I will not\n", stop=stop), Answer("I will not\n", stop=stop)]) as bench:
            outcome = outcome_of(bench.provider)
            run = CALCULATOR.run("Do it", provider=bench.provider)
        end = outcome.events[-1]
        assert isinstance(end, Stopped)
        # An interface that has no filter of its own says that the model refused.
        assert end.reason == stop or (stop, end.reason) == ("filtered", "refused")
        assert outcome.answer.text == "I will not\n"
        assert run.state is TurnState.PARTIAL_FAILED
        kinds = {"length": {"truncated"}, "refused": {"refused"}, "filtered": {"content_filtered", "refused"}}
        assert run.result.error_kind in kinds[stop]

    def test_an_empty_answer_is_noted(self) -> None:
        """It is not a failure: the run is completed, and its log says that there was nothing."""
        with self.open([Answer(""), Answer("")]) as bench:
            outcome = outcome_of(bench.provider)
            run = CALCULATOR.run("?", provider=bench.provider)
        assert outcome.error is None
        assert outcome.answer.is_empty
        assert outcome.answer.notes == ("the answer is empty",)
        assert (run.state, run.output) == (TurnState.COMPLETED, "")
        assert run.execution_state.session[ProviderUsage].all()[-1].notes == ("the answer is empty",)

    # --- failures --------------------------------------------------------------------------------------

    def test_a_throttled_call_says_how_long_to_wait(self) -> None:
        """As the provider's Retry-After header has it."""
        with self.open([Fault("throttled", retry_after="7")]) as bench:
            error = outcome_of(bench.provider).error
        assert isinstance(error, ThrottleError)
        assert error.retry_after is not None
        assert (error.kind, error.retryable, error.retry_after.total_seconds()) == ("rate_limit", True, 7.0)

    @pytest.mark.parametrize(
        ("fault", "kind", "retryable"),
        [
            (Fault("quota"), "quota_exhausted", False),
            (Fault("server_error"), "transient", True),
            (Fault("overloaded"), "transient", True),
            (Fault("server_error", status=502, message="Bad gateway"), "transient", True),
            (Fault("drop"), "connection", True),
            (Fault("context_too_long"), "context_too_long", False),
            (Fault("content_filtered"), "content_filtered", False),
            (Fault("unauthorized"), "authentication", False),
            (Fault("bad_request"), "bad_request", False),
        ],
        ids=lambda value: getattr(value, "kind", None),
    )
    def test_failures_have_one_classification(self, fault: Fault, kind: str, retryable: bool) -> None:
        """Whatever the interface calls them. A failed call has said nothing."""
        with self.open([fault]) as bench:
            outcome = outcome_of(bench.provider)
        assert outcome.error is not None
        assert (outcome.error.kind, outcome.error.retryable, outcome.error.partial) == (kind, retryable, "")
        assert outcome.events == []
        assert bench.provider.model in str(outcome.error)

    @pytest.mark.parametrize("how", ["cut", "ended", "error", "garbage"])
    def test_a_broken_stream_keeps_what_was_said(
        self, how: Literal["cut", "ended", "error", "garbage"]
    ) -> None:
        """The text so far is in the error, as evidence; the end is never mistaken for the answer's."""
        with self.open([Broken(Answer("one\ntwo\nthree\n"), how, after=2)]) as bench:
            outcome = outcome_of(bench.provider)
        assert outcome.error is not None
        assert outcome.error.partial == "one\ntwo\n"
        assert outcome.error.kind in CUT_KINDS
        assert outcome.error.retryable
        assert not any(isinstance(each, Stopped) for each in outcome.events)

    def test_a_run_with_a_broken_stream_keeps_the_partial_text(self) -> None:
        """In the log, as evidence: the run is not completed, and resuming it asks again without that text."""
        steps: list[Step] = [Broken(Answer("The answer\nis 42\n"), "cut", after=1), Answer("42")]
        with self.open(steps) as bench:
            run = CALCULATOR.run("?", provider=bench.provider)
            assert run.state is TurnState.PARTIAL_FAILED
            assert run.execution_state.session[PartialText].all()[-1].text == "The answer\n"
            store = run.execution_state.session.log
            run.close()
            again = CALCULATOR.resume(store, run.id, provider=bench.provider)
            assert (again.state, again.output) == (TurnState.COMPLETED, "42")
            assert not bench.saw("The answer")

    # --- leaving ---------------------------------------------------------------------------------------

    def _leaves(self, *, by_cancelling: bool) -> bool:
        """Leave an answer after its first piece, and return whether the other side saw it."""
        with self.open([Broken(Answer("one\ntwo\n"), "hang", after=1)]) as bench:
            seen: list[str] = []

            async def listen() -> bool:
                asked = request_of(said("user", "Hello"), provider=bench.provider)
                with anyio.CancelScope() as scope:
                    async with aclosing(bench.provider.stream(asked)) as events:
                        async for each in events:
                            if isinstance(each, TextDelta):
                                seen.append(each.text)
                                if not by_cancelling:
                                    break
                                scope.cancel()
                return await anyio.to_thread.run_sync(bench.wait_closed)

            was_closed = anyio.run(listen)
            assert seen == ["one\n"]
        return was_closed

    def test_cancelling_closes_the_connection(self) -> None:
        """The other side sees it at once, while the answer is still under way and our loop runs."""
        assert self._leaves(by_cancelling=True)

    def test_closing_the_stream_closes_the_connection(self) -> None:
        """Without any cancellation: a client that stops listening hangs up."""
        assert self._leaves(by_cancelling=False)

    # --- trying again ----------------------------------------------------------------------------------

    def test_what_fails_for_the_moment_is_tried_again(self) -> None:
        """After a pause of at least what the provider asked for; the caller sees one clean answer."""
        clock = _HastyClock()
        steps: list[Step] = [
            Fault("throttled", retry_after="7"),
            Fault("server_error"),
            Fault("drop"),
            "there",
        ]
        with self.open(steps) as bench:
            turn = turn_of(bench.provider, RetryPolicy(), clock)
            assert bench.calls == 4
        assert (turn.state, turn.text) == (TurnState.COMPLETED, "there"), turn.details
        assert clock.slept[0] >= 7.0
        assert len(clock.slept) == 3

    def test_what_will_fail_again_is_not_tried_again(self) -> None:
        """One call, no pause, and the error as it came."""
        clock = _HastyClock()
        with self.open([Fault("context_too_long"), Answer("never")]) as bench:
            turn = turn_of(bench.provider, RetryPolicy(), clock)
            assert bench.calls == 1
        assert isinstance(turn.error, ModelCallError)
        assert (turn.error.kind, clock.slept) == ("context_too_long", [])

    def test_an_answer_that_has_begun_is_not_started_over(self) -> None:
        """What was shown cannot be unsaid: the partial text comes with the error."""
        with self.open([Broken(Answer("one\ntwo\n"), "cut", after=1), Answer("never")]) as bench:
            turn = turn_of(bench.provider, RetryPolicy(), _HastyClock())
            assert bench.calls == 1
        assert isinstance(turn.error, ModelCallError)
        assert turn.error.partial == "one\n"

    def test_an_answer_that_broke_before_it_began_is_tried_again(self) -> None:
        """Nothing was seen of it, so nothing is contradicted."""
        with self.open([Broken(Answer("one\n"), "cut", after=0), Answer("two")]) as bench:
            turn = turn_of(bench.provider, RetryPolicy(attempts=2), _HastyClock())
        assert turn.text == "two"

    # --- whatever a model does -------------------------------------------------------------------------

    def test_odd_calls_do_no_harm(self) -> None:
        """Arguments that are no JSON, a name that is none, an id used twice: the model is told of each."""
        odd = [
            ToolCall("x", "double", '{"number": 1'),
            ToolCall("x", "double", '{"number": 2}'),
            ToolCall("y:1/ä", "no such tool!", "{}"),
            ToolCall("z", "double", '{"number": NaN}'),
            ToolCall("", "", "[]"),
        ]
        with self.open([Answer("", odd), Answer("Sorry.")]) as bench:
            run = CALCULATOR.run("?", provider=bench.provider)
        assert (run.state, run.output) == (TurnState.COMPLETED, "Sorry."), run.result.details
        results = [each.content for each in run.messages if each.role == "tool"]
        assert len(results) == 5
        assert results[1] == "4"
        (calls,) = [each.tool_calls for each in run.messages if each.tool_calls]
        assert len({call.call_id for call in calls}) == 5

    def test_a_thousand_calls_in_one_answer_arrive_and_go_back(self) -> None:
        """Each once and in order, and the other side takes a thousand results."""
        calls = [("double", {"number": each}) for each in range(self.many_calls)]
        with self.open([Answer("", calls), Answer("Done.")]) as bench:
            run = CALCULATOR.run("?", provider=bench.provider)
            assert bench.calls == 2
        assert (run.state, run.output) == (TurnState.COMPLETED, "Done."), run.result.details
        results = [each.content for each in run.messages if each.role == "tool"]
        assert results == [str(2 * each) for each in range(self.many_calls)]

    def test_an_answer_of_ten_megabytes_is_cut_and_noted(self) -> None:
        """The run ends as truncated, and the log says what was dropped."""
        text = ("x" * 99_999 + "\n") * 100
        with self.open([Answer(text)]) as bench:
            run = CALCULATOR.run("?", provider=bench.provider)
        session = run.execution_state.session
        assert run.result.error_kind == "truncated"
        assert session[PartialText].all()[-1].text == text[:MAX_TEXT_CHARS]
        (note,) = session[ProviderUsage].all()[-1].notes
        assert str(len(text) - MAX_TEXT_CHARS) in note

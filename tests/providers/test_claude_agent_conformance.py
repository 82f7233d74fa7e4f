"""The vendor's loop keeps the promises of the provider seam: the whole suite, with its real CLI.

Where a test of the suite is replaced here, its docstring says what the CLI keeps for itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from treenail import TurnState
from treenail.conversation import ProviderUsage
from treenail.errors import ModelCallError, ThrottleError
from treenail.providers import ModelEvent, ModelRequest, TextDelta
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.scripted import Answer
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.provider import (
    CALCULATOR,
    ProviderBench,
    ProviderConformance,
    WireBench,
    outcome_of,
    turn_of,
)
from treenail.testing.wire import Broken, Fault, Step, WireServer
from treenail.turns import PartialText, RetryPolicy

SUITE = ProviderConformance
IMPATIENT = RetryPolicy(attempts=4, base_s=0.001)


class HeardAgent(ClaudeAgent):
    """Lets the server break a stream once its text has been heard.

    Of a connection that is reset the CLI drops what it has not passed on yet, and on loopback that is all.
    """

    server: WireServer
    last_line = ""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        async with aclosing(super().stream(request)) as events:
            async for each in events:
                self.hear(each)
                yield each

    def hear(self, event: Any) -> None:
        if isinstance(event, TextDelta) and event.text == self.last_line:
            self.server.release()


class TestClaudeAgent(ProviderConformance):
    many_calls = 200  # Each one passes through the CLI three times.

    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path) -> None:
        self.home = tmp_path

    @contextmanager
    def open(self, steps: Sequence[Step]) -> Iterator[ProviderBench]:
        cuts = [each for each in steps if isinstance(each, Broken) and each.how == "cut" and each.after]
        script = [replace(each, waits=True) if each in cuts else each for each in steps]
        with ClaudeWireServer(script) as server:
            agent = HeardAgent(
                "a-model", base_url=server.url, api_key="a-key", env=claude_environment(self.home)
            )
            agent.server = server
            for cut in cuts:
                agent.last_line = cut.answer.text.splitlines(keepends=True)[cut.after - 1]
            yield WireBench(agent, server)

    def test_a_run_with_a_broken_stream_keeps_the_partial_text(self) -> None:
        """In the log, as evidence: the run is not completed, and resuming it asks again without that text."""
        steps: list[Step] = [Broken(Answer("The answer\nis 42\n"), "cut", after=1), Answer("42")]
        with self.open(steps) as bench:
            agent = bench.provider
            assert isinstance(agent, HeardAgent)
            run = CALCULATOR.run("?", provider=agent, watch=agent.hear)
            assert run.state is TurnState.PARTIAL_FAILED
            assert run.execution_state.session[PartialText].all()[-1].text == "The answer\n"
            store = run.execution_state.session.log
            run.close()
            again = CALCULATOR.resume(store, run.id, provider=agent)
            assert (again.state, again.output) == (TurnState.COMPLETED, "42")
            assert not bench.saw("The answer")

    def test_an_answer_that_has_begun_is_not_started_over(self) -> None:
        """What was shown cannot be unsaid: the partial text comes with the error."""
        with self.open([Broken(Answer("one\ntwo\n"), "cut", after=1), Answer("never")]) as bench:
            agent = bench.provider
            assert isinstance(agent, HeardAgent)
            turn = turn_of(agent, IMPATIENT, watch=agent.hear)
            assert bench.calls == 1
        assert isinstance(turn.error, ModelCallError)
        assert turn.error.partial == "one\n"

    @pytest.mark.parametrize("stop", ["length", "refused", "filtered"])
    def test_an_answer_that_is_none_says_so(self, stop: Literal["length", "refused", "filtered"]) -> None:
        """The reason is told, and no run calls it done; the CLI may ask its model again before it is gone."""
        step = Answer("I will not\n", stop=stop)
        with self.open([step] * 4) as bench:
            outcome = outcome_of(bench.provider)
            run = CALCULATOR.run("Do it", provider=bench.provider)
        assert outcome.answer.text == "I will not\n"
        assert outcome.answer.stop == ("length" if stop == "length" else "refused")
        assert run.state is TurnState.PARTIAL_FAILED
        assert run.result.error_kind == ("truncated" if stop == "length" else "refused")

    def test_an_empty_answer_is_noted(self) -> None:
        """As by every provider; the CLI may ask its model again before it is gone, once for each answer."""
        with self.open([Answer("")] * 5) as bench:
            outcome = outcome_of(bench.provider)
            run = CALCULATOR.run("?", provider=bench.provider)
            assert 2 <= bench.calls <= 4
        assert outcome.error is None
        assert outcome.answer.notes == ("the answer is empty",)
        assert (run.state, run.output) == (TurnState.COMPLETED, "")
        assert run.execution_state.session[ProviderUsage].all()[-1].notes == ("the answer is empty",)

    def test_blocks_of_thought_go_back_unchanged(self) -> None:
        """In the CLI's own conversation, which a turn is; one that is told to it is told as text, without."""
        steps = [Answer("", [("double", {"number": 3})], thoughts=["Twice three, hm."]), Answer("6")]
        with self.open(steps) as bench:
            run = CALCULATOR.run("Double 3", provider=bench.provider)
            # The server refuses one that was changed.
            assert (run.state, run.output) == (TurnState.COMPLETED, "6"), run.result.details
            assert bench.saw("Twice three, hm.")

    def test_a_throttled_call_says_how_long_to_wait(self) -> None:
        """It can be tried again; how long to wait is not known, because the CLI keeps that for itself."""
        with self.open([Fault("throttled", retry_after="7")]) as bench:
            error = outcome_of(bench.provider).error
        assert isinstance(error, ThrottleError)
        assert (error.kind, error.retryable, error.retry_after) == ("rate_limit", True, None)

    def test_what_fails_for_the_moment_is_tried_again(self) -> None:
        """By our patience and not by the CLI's own; it does not say what pause was asked for."""
        steps: list[Step] = [
            Fault("throttled", retry_after="7"),
            Fault("server_error"),
            Fault("drop"),
            "there",
        ]
        with self.open(steps) as bench:
            turn = turn_of(bench.provider, IMPATIENT)
            assert bench.calls == 4
        assert turn.text == "there"

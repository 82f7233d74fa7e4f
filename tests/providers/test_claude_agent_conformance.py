"""The vendor's loop keeps the promises of the provider seam, with its real CLI.

Starting the CLI takes most of a second, so that of the suite's scenarios those are played here that a loop in
another process could get wrong; `test_claude_agent.py` has the rest of what matters, inside of turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from holdfast.errors import ThrottleError
from holdfast.providers.claude_agent import ClaudeAgent
from holdfast.testing.claude_wire import ClaudeWireServer, claude_environment
from holdfast.testing.provider import ProviderBench, ProviderConformance, WireBench, outcome_of
from holdfast.testing.wire import Fault, Step

SUITE = ProviderConformance


class TestClaudeAgent:
    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path) -> None:
        self.home = tmp_path

    @contextmanager
    def open(self, steps: Sequence[Step]) -> Iterator[ProviderBench]:
        with ClaudeWireServer(steps) as server:
            agent = ClaudeAgent(
                "a-model", base_url=server.url, api_key="a-key", env=claude_environment(self.home)
            )
            yield WireBench(agent, server)

    test_plain = SUITE.test_a_plain_answer_comes_in_pieces_and_ends
    test_parallel_calls = SUITE.test_parallel_calls_come_whole_and_in_order
    test_schema = SUITE.test_a_schema_for_the_output_reaches_the_model
    test_empty = SUITE.test_an_empty_answer_is_noted
    test_cancelling = SUITE.test_cancelling_closes_the_connection
    test_closing = SUITE.test_closing_the_stream_closes_the_connection
    test_odd_calls = SUITE.test_odd_calls_do_no_harm
    test_not_tried_again = SUITE.test_what_will_fail_again_is_not_tried_again
    test_ten_megabytes = SUITE.test_an_answer_of_ten_megabytes_is_cut_and_noted

    @pytest.mark.parametrize("how", ["ended", "error"])
    def test_a_broken_stream_keeps_what_was_said(self, how: Literal["ended", "error"]) -> None:
        """As the CLI passes it on: of a connection that is reset it keeps nothing."""
        SUITE.test_a_broken_stream_keeps_what_was_said(self, how)  # type: ignore[arg-type]  # it has what is used

    def test_a_refusal_is_no_answer(self) -> None:
        """The reason is told, and no run calls it done."""
        SUITE.test_an_answer_that_is_none_says_so(self, "refused")  # type: ignore[arg-type]  # the same

    def test_a_throttled_call_can_be_tried_again(self) -> None:
        """How long to wait is not known: the CLI keeps that for itself."""
        with self.open([Fault("throttled", retry_after="7")]) as bench:
            error = outcome_of(bench.provider).error
        assert isinstance(error, ThrottleError)
        assert (error.kind, error.retryable, error.retry_after) == ("rate_limit", True, None)

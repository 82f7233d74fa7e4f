"""A provider that is down, or that falls silent, does not end a run that has another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from treenail import Agent, Limits, TurnState, tool
from treenail.conversation import ProviderUsage
from treenail.errors import ModelCallError, UsageError
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import Broken, WireServer
from treenail.turns import ModelSwitched, RetryPolicy, spent_usd_of

ran: list[str] = []


@tool(effects="none")
def look() -> str:
    """Look."""
    ran.append("look")
    return "seen"


AGENT = Agent("tester", tools=[look], retry=None)


def down(kind: str = "connection", text: str = "") -> Answer:
    return Answer(text, error=ModelCallError("no route", kind=kind, retryable=kind == "connection"))


def test_another_provider_continues_where_one_went_down() -> None:
    """Finished tools are not run again; the switch and what each cost are in the log."""
    ran.clear()
    first = ScriptedProvider([Answer(calls=[("look", {})], cost_usd=0.5), down()], model="first")
    second = ScriptedProvider(["unused", Answer("done", cost_usd=0.25)], model="second")
    with AGENT.run("go", provider=first, fallback=[second], limits=Limits(max_cost_usd=5)) as run:
        session = run.execution_state.session
        assert (run.state, run.output, ran) == (TurnState.COMPLETED, "done", ["look"])
        assert [(e.from_model, e.model) for e in session[ModelSwitched].all()] == [("first", "second")]
        assert [(e.model, e.cost_usd) for e in session[ProviderUsage].all()] == [
            ("first", 0.5),
            ("second", 0.25),
        ]
        assert spent_usd_of(session) == 0.75


def test_each_fallback_is_tried_in_turn_and_the_last_failure_counts() -> None:
    models = [ScriptedProvider([down()], model=name) for name in ("a", "b", "c")]
    with AGENT.run("go", provider=models[0], fallback=models[1:]) as run:
        assert run.state is TurnState.FAILED
        assert [e.model for e in run.execution_state.session[ModelSwitched].all()] == ["b", "c"]


def test_half_an_answer_is_not_part_of_the_next_one() -> None:
    with AGENT.run(
        "go", provider=ScriptedProvider([down(text="half an ")]), fallback=[ScriptedProvider(["whole"])]
    ) as run:
        assert run.output == "whole"


@pytest.mark.parametrize("kind", ["authentication", "bad_request", "content_filtered"])
def test_what_another_provider_cannot_mend_is_not_taken_there(kind: str) -> None:
    unused = ScriptedProvider(["done"], model="second")
    with AGENT.run("go", provider=ScriptedProvider([down(kind)]), fallback=[unused]) as run:
        assert run.state is TurnState.FAILED
        assert not run.execution_state.session[ModelSwitched].all()


def test_a_fallback_that_is_not_a_provider_is_refused_before_the_run() -> None:
    with pytest.raises(UsageError, match="provider must be"):
        AGENT.run("go", provider=ScriptedProvider(["x"]), fallback=[3])  # type: ignore[list-item]


@pytest.mark.parametrize("make", [OpenAI, Anthropic], ids=["openai", "anthropic"])
def test_a_stream_that_sends_nothing_is_given_up_after_the_idle_timeout(
    make: type[OpenAI | Anthropic], tmp_path: Path
) -> None:
    agent = Agent("tester", retry=None, idle_timeout_s=0.2)
    with WireServer([Broken(Answer("one\ntwo\n"), "hang", after=1)]) as server:
        base = server.url if make is Anthropic else f"{server.url}/v1"
        silent = make("m", base_url=base, api_key="k")
        with agent.run("go", provider=silent, fallback=[ScriptedProvider(["whole"])]) as run:
            assert run.output == "whole"
        assert server.requests[0].wait_closed()


def test_an_answer_in_time_is_read_to_its_end() -> None:
    agent = Agent("tester", idle_timeout_s=30, retry=RetryPolicy(attempts=1))
    with WireServer([Answer("one\ntwo\n")]) as server:
        run = agent.run("go", provider=OpenAI("m", base_url=server.openai_url, api_key="k"))
    with run:
        assert run.output == "one\ntwo\n"

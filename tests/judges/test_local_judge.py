"""A real model, on this machine, as the judge: asked with a schema, and whatever it says, the run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from treenail import Agent, TurnState
from treenail.judges import (
    CompletionChecked,
    CompletionVerdict,
    JudgeEvent,
    LLMCompletionVerifier,
    NestedEvaluated,
    NestedExecutionConfig,
)
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import ScriptedProvider
from treenail.turns import ModelAdapter

SERVER = Path(__file__).parent.parent / "providers" / "local_model.py"
LONG_ENOUGH = timedelta(seconds=180)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of a model that is really there."""
    with subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            try:
                server.wait(60)
            finally:
                server.kill()


def test_a_real_model_judges_and_whatever_it_says_the_run_ends_as_the_log_has_it(served: str) -> None:
    """A model of this size may say anything, or lose itself; that its word is a verdict, or none, is ours."""
    provider = OpenAI(
        "smollm2",
        api="chat",
        base_url=f"{served}/v1",
        temperature=0.0,
        max_output_tokens=120,
        extra={"repeat_penalty": 1.15, "frequency_penalty": 0.5},
    )
    verifier = LLMCompletionVerifier(adapter=ModelAdapter(provider), max_duration=LONG_ENOUGH)
    agent = Agent(
        "writer",
        completion=verifier,
        nested=NestedExecutionConfig(max_completion_checks=1, max_nested_duration=LONG_ENOUGH),
    )
    run = agent.run("Say in one word which colour the sky has.", provider=ScriptedProvider(["Blue."]))
    session = run.execution_state.session
    (asked,) = session[NestedEvaluated].all()
    assert asked.usage is not None
    assert asked.usage.input_tokens
    assert asked.usage.output_tokens
    (checked,) = session[CompletionChecked].all()
    (child,) = session.children
    verdict = child[CompletionVerdict].latest()
    if verdict is None:
        # It reached its length before its verdict was whole: nobody looked, and that is on record.
        (failed,) = session[JudgeEvent].all()
        assert (failed.outcome, asked.error_kind) == ("failed", "evaluation")
        assert (checked.verified, run.state) == (False, TurnState.COMPLETED)
    else:
        assert asked.success
        assert (checked.verified, checked.complete) == (True, verdict.complete)
        ended = TurnState.COMPLETED if verdict.complete else TurnState.PARTIAL_FAILED
        assert run.state is ended
        assert session[JudgeEvent].all() == ()
    run.close()

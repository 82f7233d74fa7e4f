"""A real model, on this machine: one whole turn with a tool call, through the provider on OpenAI's SDK."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from treenail import Agent, TurnState, tool
from treenail.conversation import ProviderUsage
from treenail.providers import ModelEvent, ModelRequest
from treenail.providers.openai import OpenAI

SERVER = Path(__file__).with_name("local_model.py")


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


class CallsOnce(OpenAI):
    """Makes a model of this size call a tool first and say something then: it would not choose by itself."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self._extra = (
            {"tool_choice": "none", "stop": ["\n"]}
            if request.answers_so_far
            else {"tool_choice": "required", "parallel_tool_calls": False}
        )
        async for each in super().stream(request):
            yield each


def test_a_real_model_makes_a_whole_turn_with_a_tool(served: str, tmp_path: Path) -> None:
    """It asks for the tool with arguments that fit, sees the result, and answers; the log has it all."""
    asked: list[str] = []

    @tool(effects="none")
    def weather(city: str) -> str:
        """Say the weather in a city."""
        asked.append(city)
        return f"It is raining in {city}."

    agent = Agent("forecaster", instructions="You answer in one short sentence.", tools=(weather,))
    provider = CallsOnce(
        "smollm2", api="chat", base_url=f"{served}/v1", temperature=0.0, max_output_tokens=120
    )
    run = agent.run("What is the weather in Oslo?", provider=provider, store=tmp_path / "runs.db")
    with run:
        assert run.state is TurnState.COMPLETED, run.result.details
        assert asked == ["Oslo"], [each.content for each in run.messages]
        assert [each.role for each in run.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert run.messages[3].content == "It is raining in Oslo."
        # What so small a model says is its own affair; that it answered the result is ours.
        assert run.output.strip()
        usages = run.execution_state.session[ProviderUsage].all()
        assert [bool(each.usage.input_tokens and each.usage.output_tokens) for each in usages] == [True, True]

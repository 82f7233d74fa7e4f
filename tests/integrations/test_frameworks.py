"""What each framework does with a call beside making it, and what that means for the transaction."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import RunContextWrapper, function_tool
from agents.tool_context import ToolContext
from tests.integrations.loops import langchain_agent, pydantic_ai_agent

from treenail.integrations import Transactions
from treenail.integrations.openai_agents import in_transaction
from treenail.tools import ToolInvoked


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def transactions(tmp_path: Path, work: Path) -> Iterator[Transactions]:
    with Transactions(work, store=tmp_path / "runs.db", run="1") as made:
        yield made


def outcomes(transactions: Transactions) -> list[tuple[str | None, str]]:
    return [(each.call_id, each.outcome) for each in transactions.state.session[ToolInvoked].all()]


def test_langgraph_an_error_that_is_told_to_the_model_is_undone(
    transactions: Transactions, work: Path
) -> None:
    """A tool that turns its exceptions into messages with the status `error` has failed all the same."""
    from langchain_core.tools import tool

    from treenail.integrations.langchain import TransactionMiddleware

    @tool
    def write() -> str:
        """Write."""
        from langchain_core.tools import ToolException

        (work / "half.txt").write_text("half")
        raise ToolException("no")

    write.handle_tool_error = True
    agent = langchain_agent([write], [[("c1", "write", {})]], [TransactionMiddleware(transactions)])
    said = agent.invoke({"messages": [("user", "Go")]})
    assert [each.status for each in said["messages"] if each.type == "tool"] == ["error"]
    assert list(work.iterdir()) == [] and outcomes(transactions) == [("c1", "failed")]


def test_langgraph_a_tool_that_asks_a_person_begins_again_with_nothing_done(
    transactions: Transactions, work: Path
) -> None:
    """LangGraph runs such a tool from its beginning when the person has answered."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    from treenail.integrations.langchain import TransactionMiddleware

    found: list[list[str]] = []

    def write() -> str:
        """Write."""
        found.append([each.name for each in work.iterdir()])
        (work / "first.txt").write_text("first")
        answer = interrupt("May I?")
        (work / "second.txt").write_text(answer)
        return "done"

    agent = langchain_agent(
        [write],
        [[("c1", "write", {})]],
        [TransactionMiddleware(transactions)],
        checkpointer=InMemorySaver(),
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [("user", "Go")]}, config)
    assert list(work.iterdir()) == []
    agent.invoke(Command(resume="yes"), config)
    assert found == [[], []]
    assert sorted(each.name for each in work.iterdir()) == ["first.txt", "second.txt"]


def test_langgraph_parallel_calls_are_each_kept_or_undone(transactions: Transactions, work: Path) -> None:
    """Three calls of one answer: the one that fails takes nothing of the others along."""
    from treenail.integrations.langchain import TransactionMiddleware

    async def write(name: str) -> str:
        """Write."""
        (work / name).write_text(name)
        await asyncio.sleep(0)
        if name == "bad":
            raise ValueError("no")
        return name

    script = [[(f"c-{name}", "write", {"name": name}) for name in ("one", "bad", "two")]]
    agent = langchain_agent([write], script, [TransactionMiddleware(transactions)])
    with pytest.raises(ValueError, match="no"):
        asyncio.run(agent.ainvoke({"messages": [("user", "Go")]}))
    kept = {call for call, outcome in outcomes(transactions) if outcome == "ok"}
    assert {f"c-{each.name}" for each in work.iterdir()} == kept
    assert ("c-bad", "failed") in outcomes(transactions)


def test_pydantic_ai_an_error_that_a_capability_answers_for_is_undone(
    transactions: Transactions, work: Path
) -> None:
    """The loop continues with that answer; what the tool had half done is gone."""
    from pydantic_ai.capabilities import AbstractCapability

    from treenail.integrations.pydantic_ai import TransactionCapability

    class Soothing(AbstractCapability[Any]):
        async def on_tool_execute_error(self, ctx: Any, **_: Any) -> Any:
            return "never mind"

    def write() -> str:
        """Write."""
        (work / "half.txt").write_text("half")
        raise ValueError("no")

    capabilities = [TransactionCapability(transactions), Soothing()]
    agent = pydantic_ai_agent([write], [[("c1", "write", {})]], capabilities)
    result = asyncio.run(agent.run("Go"))
    assert "never mind" in str(result.all_messages())
    assert list(work.iterdir()) == [] and outcomes(transactions) == [("c1", "failed")]


def test_pydantic_ai_a_call_that_is_to_be_retried_is_undone(transactions: Transactions, work: Path) -> None:
    from pydantic_ai import ModelRetry

    from treenail.integrations.pydantic_ai import TransactionCapability

    def write(text: str) -> str:
        """Write."""
        (work / f"{text}.txt").write_text(text)
        if text == "bad":
            raise ModelRetry("say it better")
        return "done"

    script = [[("c1", "write", {"text": "bad"})], [("c2", "write", {"text": "good"})]]
    agent = pydantic_ai_agent([write], script, [TransactionCapability(transactions)])
    asyncio.run(agent.run("Go"))
    assert [each.name for each in work.iterdir()] == ["good.txt"]
    assert outcomes(transactions) == [("c1", "failed"), ("c2", "ok")]


def test_openai_agents_a_decorated_function_is_described_as_before(transactions: Transactions) -> None:
    """Its name, its description and its parameters, with a context of the SDK's or without."""

    def plain(path: str, times: int = 1) -> str:
        """Write a file.

        Args:
            path: Where to.
        """
        return path * times

    def with_context(ctx: RunContextWrapper[Any], path: str) -> str:
        """Write a file."""
        return path

    for function in (plain, with_context):
        before, after = function_tool(function), function_tool(in_transaction(transactions)(function))
        assert (after.name, after.description) == (before.name, before.description)
        assert after.params_json_schema == before.params_json_schema


def test_openai_agents_a_function_with_a_context_gets_it(transactions: Transactions, work: Path) -> None:
    @function_tool
    @in_transaction(transactions)
    async def write(ctx: ToolContext[Any], text: str) -> str:
        """Write a file."""
        (work / "a.txt").write_text(text)
        return f"{ctx.tool_call_id} {text}"

    arguments = json.dumps({"text": "hello"})
    context: Any = ToolContext(
        context=None, tool_name="write", tool_call_id="call-1", tool_arguments=arguments
    )
    assert asyncio.run(write.on_invoke_tool(context, arguments)) == "call-1 hello"
    assert outcomes(transactions) == [("call-1", "ok")]
    (ended,) = transactions.state.session[ToolInvoked].all()
    assert dict(ended.params) == {"text": "hello"}

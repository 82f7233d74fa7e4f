"""The loops of other frameworks, each with a model of its own that follows a script, and our transactions.

A script is a list of answers; an answer is a list of calls: an id, a name and arguments. After the last
answer the model says that it is done. A model counts its own answers in the conversation, so a resumed one
continues.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treenail.integrations import Transactions

Call = tuple[str, str, Mapping[str, Any]]
Script = Sequence[Sequence[Call]]
Functions = Sequence[Callable[..., Any]]

DONE = "Done."


def langchain_agent(
    functions: Functions, script: Script, middleware: Sequence[Any] = (), **options: Any
) -> Any:
    from langchain.agents import create_agent
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            said = sum(each.type == "ai" for each in messages)
            calls = [{"name": name, "args": dict(args), "id": call} for call, name, args in _at(script, said)]
            answer = AIMessage("" if calls else DONE, tool_calls=calls)
            return ChatResult(generations=[ChatGeneration(message=answer)])

    return create_agent(Fake(), tools=list(functions), middleware=list(middleware), **options)


def langchain(transactions: Transactions, functions: Functions, script: Script, place: Path) -> str:
    """LangGraph with its own `SqliteSaver`; a thread that is stored already is resumed."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    from treenail.integrations.langchain import TransactionMiddleware

    is_new = not (place / "graph.db").exists()
    saver = SqliteSaver(sqlite3.connect(place / "graph.db", check_same_thread=False))
    agent = langchain_agent(functions, script, [TransactionMiddleware(transactions)], checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "1"}}
    try:
        said = agent.invoke({"messages": [("user", "Go")]} if is_new else None, config, durability="sync")
    finally:
        saver.conn.close()
    return str(said["messages"][-1].content)


def langchain_async(transactions: Transactions, functions: Functions, script: Script, place: Path) -> str:
    """The same loop in an event loop, with `AsyncSqliteSaver`."""
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    from treenail.integrations.langchain import TransactionMiddleware

    is_new = not (place / "graph.db").exists()
    config: Any = {"configurable": {"thread_id": "1"}}

    async def go() -> str:
        async with AsyncSqliteSaver.from_conn_string(str(place / "graph.db")) as saver:
            agent = langchain_agent(
                functions, script, [TransactionMiddleware(transactions)], checkpointer=saver
            )
            task = {"messages": [("user", "Go")]} if is_new else None
            said = await agent.ainvoke(task, config, durability="sync")
        return str(said["messages"][-1].content)

    return asyncio.run(go())


def pydantic_ai_agent(
    functions: Functions, script: Script, capabilities: Sequence[Any] = (), **more: Any
) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    def model(messages: Any, info: Any) -> ModelResponse:
        said = sum(each.kind == "response" for each in messages)
        calls = [ToolCallPart(name, dict(args), tool_call_id=call) for call, name, args in _at(script, said)]
        return ModelResponse(parts=calls or [TextPart(DONE)])

    return Agent(FunctionModel(model), tools=list(functions), capabilities=list(capabilities), **more)


def pydantic_ai(transactions: Transactions, functions: Functions, script: Script, place: Path) -> str:
    """pydantic-ai has no store in its loop: a program keeps the messages. A resume passes them in."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    from treenail.integrations.pydantic_ai import TransactionCapability

    agent = pydantic_ai_agent(functions, script, [TransactionCapability(transactions)])
    kept = place / "messages.json"

    async def go() -> str:
        known = ModelMessagesTypeAdapter.validate_json(kept.read_bytes()) if kept.exists() else None
        async with agent.iter("Go" if known is None else None, message_history=known) as run:
            async for _ in run:
                kept.write_bytes(ModelMessagesTypeAdapter.dump_json(run.ctx.state.message_history))
        return str(run.result.output)

    return asyncio.run(go())


def openai_agents(transactions: Transactions, functions: Functions, script: Script, place: Path) -> str:
    """OpenAI Agents with its `SQLiteSession`; to resume is to give the task again."""
    from agents import (
        Agent,
        Model,
        ModelResponse,
        Runner,
        SQLiteSession,
        Usage,
        function_tool,
        set_tracing_disabled,
    )
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    from treenail.integrations.openai_agents import in_transaction

    set_tracing_disabled(True)

    class Fake(Model):
        async def get_response(self, *_: Any, **given: Any) -> ModelResponse:
            items = [] if isinstance(given["input"], str) else given["input"]
            said = sum(each.get("type") == "function_call_output" for each in items)
            calls: list[Any] = [
                ResponseFunctionToolCall(
                    arguments=json.dumps(args), call_id=call, name=name, type="function_call"
                )
                for call, name, args in _at(script, said)
            ]
            text = ResponseOutputText(text=DONE, type="output_text", annotations=[])
            done = ResponseOutputMessage(
                id="m", content=[text], role="assistant", status="completed", type="message"
            )
            return ModelResponse(output=calls or [done], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    tools: list[Any] = [function_tool(in_transaction(transactions)(each)) for each in functions]
    agent = Agent(name="writer", tools=tools, model=Fake())
    session = SQLiteSession("1", place / "messages.db")
    try:
        return str(asyncio.run(Runner.run(agent, "Go", session=session)).final_output)
    finally:
        session.close()


def _at(script: Script, place: int) -> Sequence[Call]:
    return script[place] if place < len(script) else ()


LOOPS: dict[str, Callable[[Transactions, Functions, Script, Path], str]] = {
    "langchain": langchain,
    "langchain_async": langchain_async,
    "pydantic_ai": pydantic_ai,
    "openai_agents": openai_agents,
}
"""Each loop, by name. A loop that is run again in the same directory resumes."""

"""What is left when things go wrong: counted, not timed, and for every framework in its usual way.

Two misfortunes, each in a process of its own, with a fake model and real files:

- a tool writes a file and raises. How many files are left behind?
- a first tool finishes, a second one writes half a file and its process is killed with SIGKILL; another
  process goes on with the run from whatever was stored. How often did the finished tool run, and how many
  half-written files did the second tool find when it ran again?

LangGraph keeps its state with `SqliteSaver` and `durability="sync"` and goes on with `invoke(None)`; OpenAI
Agents keeps its conversation in an `SQLiteSession` and is given the task again. LangGraph is also run with
our middleware: the same loop, model, tools and saver, and three lines more.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.loop import find_peers
from bench.report import Row, Size

Run = Callable[[str, Path], None]
"""Run one misfortune in a directory, or go on with it there."""


def write_and_raise(place: Path) -> str:
    (place / "work" / "left.txt").write_text("half")
    raise RuntimeError("no")


def first(place: Path) -> str:
    with (place / "first.txt").open("a") as file:
        file.write("ran\n")
    return "done"


def second(place: Path) -> str:
    half = place / "work" / "half.txt"
    if (place / "killed").exists():
        with (place / "found.txt").open("a") as file:
            file.write("found\n" if half.exists() else "")
        return "done"
    half.write_text("half")
    (place / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


BODIES = {"write_and_raise": write_and_raise, "first": first, "second": second}
PLANS = {"raise": ("write_and_raise",), "kill": ("first", "second")}


def treenail(plan: str, place: Path) -> None:
    from treenail import Agent, tool
    from treenail.log.sqlite import SqliteLog
    from treenail.providers.scripted import Answer, ScriptedProvider

    def made(name: str) -> Any:
        def body(*, context: Any) -> str:
            return BODIES[name](place)

        body.__name__, body.__doc__ = name, "Do it."
        # The tools write with plain Python, as those of the others do: what they write is found by a scan.
        return tool(effects="workspace", files="any")(body)

    agent = Agent("bench", tools=[made(each) for each in PLANS[plan]])
    model = ScriptedProvider([*(Answer(calls=[(each, {})]) for each in PLANS[plan]), "Done."])
    store = place / "runs.db"
    if store.exists():
        log = SqliteLog(store)
        run_id = log.sessions()[0].session_id
        log.close()
        agent.resume(store, run_id, provider=model).close()
    else:
        agent.run("Go", provider=model, workspace=place / "work", store=store).close()


def langgraph_with_us(plan: str, place: Path) -> None:
    from treenail.integrations.langchain import TransactionMiddleware, Transactions

    with Transactions(place / "work", store=place / "calls.db", run="1") as transactions:
        langgraph(plan, place, [TransactionMiddleware(transactions)])


def langgraph(plan: str, place: Path, middleware: Sequence[Any] = ()) -> None:
    from langchain.agents import create_agent
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langgraph.checkpoint.sqlite import SqliteSaver

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            said = sum(each.type == "ai" for each in messages)
            names = PLANS[plan]
            calls = [{"name": names[said], "args": {}, "id": f"c{said}"}] if said < len(names) else []
            return ChatResult(generations=[ChatGeneration(message=AIMessage("Go.", tool_calls=calls))])

    def made(name: str) -> Any:
        def body() -> str:
            return BODIES[name](place)

        body.__name__, body.__doc__ = name, "Do it."
        return body

    is_new = not (place / "runs.db").exists()
    saver = SqliteSaver(sqlite3.connect(place / "runs.db", check_same_thread=False))
    tools = [made(each) for each in PLANS[plan]]
    agent = create_agent(Fake(), tools=tools, checkpointer=saver, middleware=middleware)
    config: Any = {"configurable": {"thread_id": "1"}}
    task: Any = {"messages": [("user", "Go")]} if is_new else None
    agent.invoke(task, config, durability="sync")


def openai_agents(plan: str, place: Path) -> None:
    from agents import (
        Agent,
        FunctionTool,
        Model,
        ModelResponse,
        Runner,
        SQLiteSession,
        Usage,
        set_tracing_disabled,
    )
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    set_tracing_disabled(True)

    class Fake(Model):
        async def get_response(self, *_: Any, **given: Any) -> ModelResponse:
            items = [] if isinstance(given["input"], str) else given["input"]
            said = sum(each.get("type") == "function_call_output" for each in items)
            answer: Any
            if said < len(PLANS[plan]):
                name = PLANS[plan][said]
                answer = ResponseFunctionToolCall(
                    arguments="{}", call_id=f"c{said}", name=name, type="function_call"
                )
            else:
                text = ResponseOutputText(text="Done.", type="output_text", annotations=[])
                answer = ResponseOutputMessage(
                    id="m", content=[text], role="assistant", status="completed", type="message"
                )
            return ModelResponse(output=[answer], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    def made(name: str) -> Any:
        async def body(_: Any, __: str) -> str:
            return BODIES[name](place)

        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        return FunctionTool(name=name, description="Do it.", params_json_schema=schema, on_invoke_tool=body)

    agent = Agent(name="bench", tools=[made(each) for each in PLANS[plan]], model=Fake())
    session = SQLiteSession("1", place / "runs.db")
    asyncio.run(Runner.run(agent, "Go", session=session))


PEERS: dict[str, tuple[str, Run]] = {
    "LangGraph": ("langgraph", langgraph),
    "LangGraph with TransactionMiddleware": ("langgraph", langgraph_with_us),
    "OpenAI Agents": ("agents", openai_agents),
}


def suffered(name: str) -> tuple[int, int, int]:
    """Return the files that were left, the runs of the finished tool, the half-written files found."""
    with tempfile.TemporaryDirectory() as scratch:
        for plan in PLANS:
            place = Path(scratch, plan)
            (place / "work").mkdir(parents=True)
            for _ in range(2 if plan == "kill" else 1):
                subprocess.run(
                    [sys.executable, "-m", "bench.failures", name, plan, str(place)],
                    check=False,
                    capture_output=True,
                    timeout=120,
                )
        killed = Path(scratch, "kill")
        assert (killed / "killed").exists(), f"{name} never came to its second tool"
        assert (killed / "found.txt").exists(), f"{name} did not go on"
        return (
            len(list(Path(scratch, "raise", "work").iterdir())),
            len((killed / "first.txt").read_text().splitlines()),
            len((killed / "found.txt").read_text().splitlines()),
        )


def rows(size: Size) -> Iterator[Row]:
    """Count what is left, ours against each peer that is installed."""
    find_peers()
    ours = suffered("treenail")
    assert ours == (0, 1, 0)
    titles = (
        "files left by a tool that raised",
        "runs of a finished tool, after kill -9",
        "half-written files that a resumed tool finds",
    )
    for name, (module, _) in PEERS.items():
        if size is not Size.LEAST and importlib.util.find_spec(module):
            for title, mine, theirs in zip(titles, ours, suffered(name), strict=True):
                yield Row(f"{title}: {name}", mine, theirs)
    for title, mine in zip(titles, ours, strict=True):
        yield Row(title, mine)


if __name__ == "__main__":
    find_peers()
    chosen = treenail if sys.argv[1] == "treenail" else PEERS[sys.argv[1]][1]
    chosen(sys.argv[2], Path(sys.argv[3]))

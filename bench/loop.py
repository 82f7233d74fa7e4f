"""The whole loop with a fake model, against other frameworks that do the same work in the same run.

The work is one conversation: a model that asks for one tool per answer, so many times, and is done then. The
model answers at once from memory and the tool returns its text at once, so that what is measured is the loop:
requests, messages, tool calls, and what is stored of them. Each framework is given a fake model and a tool of
its own kind, and is started in its usual way. In memory the tools are coroutines, for all sides; durable they
are plain functions, as LangGraph's saver is made for.

Durable means that a step is on disk before the next one begins. LangGraph's saver writes in the background
unless it is told `durability="sync"`, which is what it is told here.

A peer whose cost per call grows with the calls before it would take hours for the largest size: what would
take longer than the cap, judged by the size before, is not run and is said to be cut off.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from bench.report import CALL_IN_MEMORY, DURABLE_CALL, GROWTH, STORED_BYTES, Row, Size
from treenail import Agent, TurnState, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelEvent, ModelRequest, Stopped, TextDelta, ToolCallRequested, UsageReported
from treenail.state import TokenUsage
from treenail.tools import ToolCall

ARGUMENT_CHARS, RESULT_CHARS = 146, 1_020
"""How much the model writes into each call, and how much the tool returns each time."""


def passages(size: int, count: int = 997) -> list[str]:
    """Cut passages of one size out of this project's own pages: texts that differ as much as texts do."""
    pages = sorted(Path(__file__).resolve().parent.parent.glob("docs/*.md"))
    prose = "".join(each.read_text() for each in pages).encode("ascii", "ignore").decode()
    begin = random.Random(size)
    return [prose[at : at + size] for at in (begin.randrange(len(prose) - size) for _ in range(count))]


ARGUMENTS = itertools.cycle([{"place": each} for each in passages(ARGUMENT_CHARS)])
"""What the model writes into each call."""
ARGUMENTS_JSON = itertools.cycle([json.dumps({"place": each}) for each in passages(ARGUMENT_CHARS)])
"""The same, as the interfaces of models spell it. Each framework's fake model says it as its kind does."""
RESULTS = itertools.cycle(passages(RESULT_CHARS))
"""What the tool returns each time."""
USAGE = TokenUsage(input_tokens=100, output_tokens=20)
PAYLOAD_BYTES = ARGUMENT_CHARS + RESULT_CHARS
"""What a call has to be stored for: all else is overhead."""

CAP_S = 60.0
QUICK_CAP_S = 20.0
TRIES = 7
"""How often what takes less than `SHORT_S` is tried, because it is easily disturbed."""
SHORT_S = 2.0
TRIES_OF_LONG = 3
"""How often what takes less than `LONG_S` is tried. What takes longer is run once."""
LONG_S = 10.0
FIRST, WINDOW = 10, 200
"""Growth is judged by the calls from the tenth on, beside as many at the end."""
OURS = "Treenail"

Work = Callable[[int, Path | None], "Measured"]
"""Make so many tool calls, durably if there is a directory for it."""


@dataclass
class Measured:
    """What a run took."""

    seconds: float
    marks: list[float] = field(default_factory=list)
    """When each answer was asked for."""
    stored: int = 0

    def per_call_us(self, calls: int) -> float:
        return self.seconds / calls * 1e6

    def growth(self) -> float:
        """How much longer a call takes at the end than at the tenth call."""
        steps = [after - before for before, after in pairwise(self.marks)]
        return median(steps[-WINDOW:]) / median(steps[FIRST : FIRST + WINDOW])


def clock_of(directory: Path | None) -> Callable[[], float]:
    """Choose the clock: what is only computed is measured in CPU time, what waits for the disk is not."""
    return time.process_time if directory is None else time.perf_counter


def size_of(directory: Path | None) -> int:
    """How many bytes a run has left on disk, when everything is in its place."""
    if directory is None:
        return 0
    for store in directory.glob("*.db"):
        with sqlite3.connect(store) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
    return sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())


# --- ours ----------------------------------------------------------------------------------------------


@tool(effects="none", name="look")
def look(place: str) -> str:
    """Look at a place."""
    return next(RESULTS)


@tool(effects="none", name="look")
async def look_async(place: str) -> str:
    """Look at a place."""
    return next(RESULTS)


TOOLS = {True: look_async, False: look}


class Fake:
    """Our fake model: it answers at once, like the others', and tells its usage, as ours must."""

    name = model = "fake"

    def __init__(self, calls: int, clock: Callable[[], float]) -> None:
        self.calls = calls
        self.clock = clock
        self.marks: list[float] = []

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        self.marks.append(self.clock())
        number = len(self.marks)
        if number <= self.calls:
            yield ToolCallRequested(ToolCall(f"c{number}", "look", next(ARGUMENTS_JSON)))
        else:
            yield TextDelta("Done.")
        yield UsageReported(USAGE, 0.0)
        yield Stopped("tools" if number <= self.calls else "end")


def treenail(calls: int, directory: Path | None) -> Measured:
    clock = clock_of(directory)
    agent = Agent(
        "bench", instructions="You look.", tools=(TOOLS[directory is None],), max_iterations=calls + 2
    )
    log = None if directory is None else SqliteLog(directory / "runs.db", heartbeat=False)
    provider = Fake(calls, clock)
    # What an agent is, is worked out when it is first asked for: before the clock starts, as for the peers.
    assert agent.prompt.template.descriptor.tools
    began = clock()
    run = agent.run("Look", provider=provider, store=log)
    spent = clock() - began
    assert run.state is TurnState.COMPLETED, run.result.details
    run.close()
    if log is not None:
        log.close()
    return Measured(spent, provider.marks, size_of(directory))


# --- the peers -----------------------------------------------------------------------------------------


def langgraph(calls: int, directory: Path | None, *, delta: bool = False, saver: Any = None) -> Measured:
    """Run LangGraph's loop: in memory, on SQLite in a directory, or on a saver that the caller brings."""
    is_durable = directory is not None or saver is not None
    clock = time.perf_counter if is_durable else time.process_time
    from langchain.agents import AgentState, create_agent
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, AnyMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langgraph.channels import DeltaChannel
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph.message import _messages_delta_reducer

    class DeltaState(AgentState):  # type: ignore[type-arg] # nothing structured is asked for
        pass

    # Said so, and not in the class, because this module's annotations are texts.
    channel = DeltaChannel(_messages_delta_reducer)
    DeltaState.__annotations__["messages"] = Annotated[list[AnyMessage], channel]

    marks: list[float] = []

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

        async def _agenerate(self, *arguments: Any, **more: Any) -> ChatResult:
            return self._generate(*arguments, **more)

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            marks.append(clock())
            number = len(marks)
            said = (
                AIMessage("", tool_calls=[{"name": "look", "args": next(ARGUMENTS), "id": f"c{number}"}])
                if number <= calls
                else AIMessage("Done.")
            )
            return ChatResult(generations=[ChatGeneration(message=said)])

    def look(place: str) -> str:
        """Look at a place."""
        return next(RESULTS)

    async def look_async(place: str) -> str:
        """Look at a place."""
        return next(RESULTS)

    look_async.__name__ = "look"
    connection = None
    if directory is not None:
        connection = sqlite3.connect(directory / "runs.db", check_same_thread=False)
        saver = SqliteSaver(connection)
    agent = create_agent(
        Fake(),
        tools=[look if is_durable else look_async],
        system_prompt="You look.",
        checkpointer=saver,
        **({"state_schema": DeltaState} if delta else {}),
    )
    config: Any = {"recursion_limit": 2 * calls + 10, "configurable": {"thread_id": "1"}}
    task: Any = {"messages": [("user", "Look")]}
    began = clock()
    if saver is None:
        ended = asyncio.run(agent.ainvoke(task, config))
    else:
        ended = agent.invoke(task, config, durability="sync")
    spent = clock() - began
    assert ended["messages"][-1].content == "Done."
    if connection is not None:
        connection.close()
    return Measured(spent, marks, size_of(directory))


def langgraph_delta(calls: int, directory: Path | None) -> Measured:
    return langgraph(calls, directory, delta=True)


def pydantic_ai(calls: int, directory: Path | None) -> Measured:
    clock = clock_of(directory)
    from pydantic_ai import Agent as PydanticAgent
    from pydantic_ai import UsageLimits
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    marks: list[float] = []

    def answer(messages: Any, info: Any) -> Any:
        marks.append(clock())
        if len(marks) <= calls:
            return ModelResponse(parts=[ToolCallPart("look", next(ARGUMENTS), f"c{len(marks)}")])
        return ModelResponse(parts=[TextPart("Done.")])

    agent = PydanticAgent(FunctionModel(answer), system_prompt="You look.")

    @agent.tool_plain
    async def look(place: str) -> str:
        """Look at a place."""
        return next(RESULTS)

    began = clock()
    ended = agent.run_sync("Look", usage_limits=UsageLimits(request_limit=None))
    spent = clock() - began
    assert ended.output == "Done."
    return Measured(spent, marks)


def openai_agents(calls: int, directory: Path | None) -> Measured:
    clock = clock_of(directory)
    from agents import Agent as OpenAIAgent
    from agents import Model, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseOutputMessage,
        ResponseOutputText,
    )

    set_tracing_disabled(True)
    marks: list[float] = []

    class Fake(Model):
        async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
            marks.append(clock())
            said: Any
            if len(marks) <= calls:
                said = ResponseFunctionToolCall(
                    arguments=next(ARGUMENTS_JSON),
                    call_id=f"c{len(marks)}",
                    name="look",
                    type="function_call",
                )
            else:
                text = ResponseOutputText(text="Done.", type="output_text", annotations=[])
                said = ResponseOutputMessage(
                    id="m", content=[text], role="assistant", status="completed", type="message"
                )
            return ModelResponse(output=[said], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    @function_tool
    async def look(place: str) -> str:
        """Look at a place."""
        return next(RESULTS)

    agent = OpenAIAgent(name="bench", instructions="You look.", tools=[look], model=Fake())
    began = clock()
    ended = asyncio.run(Runner.run(agent, "Look", max_turns=calls + 2))
    spent = clock() - began
    assert ended.final_output == "Done."
    return Measured(spent, marks)


IN_MEMORY: dict[str, tuple[str, Work]] = {
    "LangGraph": ("langgraph", langgraph),
    "pydantic-ai": ("pydantic_ai", pydantic_ai),
    "OpenAI Agents": ("agents", openai_agents),
}
DURABLE: dict[str, tuple[str, Work]] = {
    "LangGraph, SqliteSaver": ("langgraph", langgraph),
    "LangGraph, SqliteSaver with delta channels": ("langgraph", langgraph_delta),
}
DELTA = "LangGraph, SqliteSaver with delta channels"
DECIDING = (OURS, "LangGraph", DELTA)
"""Those that a line is about: they are never cut off."""


class Contest:
    """Runs everybody at growing sizes, and leaves out what would take too long."""

    def __init__(self, cap_s: float, scratch: Path | None) -> None:
        self._cap_s = cap_s
        self._scratch = scratch
        self._last: dict[str, tuple[int, float]] = {}

    def run(self, works: dict[str, Work], calls: int) -> dict[str, Measured | None]:
        """Return what came of each; None for one that was cut off.

        What is over quickly is easily disturbed. So everybody has several tries, in turns, so that nobody
        has the quiet moments alone, and the best one counts.
        """
        best: dict[str, Measured | None] = {}
        for attempt in range(TRIES):
            for name, work in works.items():
                if attempt == 0:
                    best[name] = None if self._takes_too_long(name, calls) else self._once(work, calls)
                    continue
                before = best[name]
                if before is None or before.seconds > (SHORT_S if attempt >= TRIES_OF_LONG else LONG_S):
                    continue
                best[name] = min(before, self._once(work, calls), key=lambda each: each.seconds)
        self._last.update({name: (calls, each.seconds) for name, each in best.items() if each is not None})
        return best

    def _takes_too_long(self, name: str, calls: int) -> bool:
        if name not in self._last or name in DECIDING:
            return False
        before, seconds = self._last[name]
        # Between a cost per call that stays the same and one that grows as the calls do.
        growth: float = (calls / before) ** 1.5
        return seconds * growth > self._cap_s

    def _once(self, work: Work, calls: int) -> Measured:
        if self._scratch is None:
            return work(calls, None)
        with tempfile.TemporaryDirectory(dir=self._scratch) as place:
            return work(calls, Path(place))


def find_peers() -> None:
    """Let the peers be somewhere else than in this environment, as `TREENAIL_BENCH_PEER` says."""
    folder = os.environ.get("TREENAIL_BENCH_PEER")
    if folder and folder not in sys.path:
        sys.path.append(folder)


def installed(peers: dict[str, tuple[str, Work]]) -> dict[str, Work]:
    return {name: work for name, (module, work) in peers.items() if importlib.util.find_spec(module)}


@dataclass(frozen=True)
class Line:
    """Beside whom and at how many calls a time is one of the lines."""

    name: str
    peer: str
    calls: int
    limit: float


IN_MEMORY_LINE = Line(CALL_IN_MEMORY, "LangGraph", 100, 0.15)
DURABLE_LINE = Line(DURABLE_CALL, DELTA, 1_000, 0.3)


def compare(
    where: str, contest: Contest, peers: dict[str, Work], sizes: Sequence[int], line: Line
) -> Iterator[Row]:
    """Compare us with every peer at every size."""
    for calls in sizes:
        measured = contest.run({OURS: treenail, **peers}, calls)
        ours = measured.pop(OURS)
        assert ours is not None
        mine = ours.per_call_us(calls)
        if not peers:
            yield Row(f"{where}, {calls:,} calls (us per call)", mine)
        for name, got in measured.items():
            title = f"{where}, {calls:,} calls (us per call) vs {name}"
            if got is None:
                yield Row(title, mine, "cut off")
                continue
            row = Row(title, mine, got.per_call_us(calls), mine / got.per_call_us(calls))
            is_line = (name, calls) == (line.peer, line.calls)
            yield row._replace(limit=line.limit, line=line.name) if is_line else row
        if ours.stored:
            payload = calls * PAYLOAD_BYTES
            row = Row(f"bytes stored, {calls:,} calls", ours.stored, payload, ours.stored / payload)
            yield row._replace(limit=2.5, line=STORED_BYTES) if calls == line.calls else row
            for name, got in measured.items():
                if got is not None:
                    title = f"bytes stored, {calls:,} calls, by {name}"
                    yield Row(title, got.stored, payload, got.stored / payload)


def growth(where: str, contest: Contest, calls: int, line: str = "") -> Row:
    """Compare the calls at the end of a long run with those at its beginning."""
    ours = contest.run({OURS: treenail}, calls)[OURS]
    assert ours is not None
    name = f"{where}: call {calls:,} (us) beside call {FIRST}"
    return Row(name, "", "", ours.growth(), 1.2 if line else None, line)


def rows(size: Size) -> Iterator[Row]:
    """Measure the loop in memory and on SQLite."""
    find_peers()
    sizes = {Size.FULL: (10, 100, 1_000), Size.QUICK: (10, 100), Size.LEAST: (3,)}[size]
    long = {Size.FULL: 10_000, Size.QUICK: 1_000, Size.LEAST: 0}[size]
    line = GROWTH if size is Size.FULL else ""
    cap_s = QUICK_CAP_S if size.is_small else CAP_S
    in_memory = {} if size is Size.LEAST else installed(IN_MEMORY)
    durable = {} if size is Size.LEAST else installed(DURABLE)
    treenail(3, None)  # What is imported and compiled late is not a call's.
    for work in in_memory.values():
        work(2, None)
    contest = Contest(cap_s, None)
    yield from compare("in memory", contest, in_memory, sizes, IN_MEMORY_LINE)
    if long:
        yield growth("in memory", contest, long, line)
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as place:
        contest = Contest(cap_s, Path(place))
        yield from compare("durable on SQLite", contest, durable, sizes, DURABLE_LINE)
        if long:
            yield growth("durable on SQLite", contest, long, line)

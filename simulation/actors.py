"""Who acts in the simulation: the model, the tools, and the people."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import anyio

from simulation.disk import Disk
from simulation.world import Life, World
from treenail import Agent, SlicePolicy, event, tool
from treenail.containment import CancellationToken
from treenail.errors import ModelCallError, ThrottleError
from treenail.judges import LLMCompletionVerifier
from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.state import TokenUsage
from treenail.tools import ToolCall, ToolContext

PATHS = ("a.txt", "b.txt", "notes/c.txt")
ASKED_TOOLS = ("write", "write_two", "remove", "pay", "order", "mail")
"""The tools with effects: a person is asked about them in a run that asks."""

PRICE_USD = 0.01
"""What a call of the model costs at most; the vendor charges a part of it."""


@event(name="simulation.Counted", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class Counted:
    """State that a call changes: it must go back with the call."""

    call_id: str


class SimulatedModel:
    """A model that asks for random tools, and a vendor that fails in the ways vendors fail."""

    name = "simulated"
    model = "simulated"
    takes_output_schema = True

    def __init__(self, world: World, life: Life, run: str) -> None:
        self._world = world
        self._life = life
        self._run = run

    def estimate_usd(self, request: ModelRequest) -> float:
        """Return the most that a call costs."""
        return PRICE_USD

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer once."""
        world, life = self._world, self._life
        life.may_die("request")
        number = world.requests[self._run] = world.requests[self._run] + 1
        rng = world.rng("model", self._run, number)
        cost_usd = PRICE_USD * rng.uniform(0.2, 1.0)
        world.note(f"{life.name} asks the model, request {number}")
        world.spent_usd[self._run] += (
            cost_usd  # The vendor charges from here on, whatever becomes of the answer.
        )
        await life.pause("request", rng.uniform(0.1, 4.0))
        if world.strikes_now("throttled", "request", 0.02):
            raise ThrottleError("slow down", kind="rate_limit", retry_after=timedelta(seconds=3))
        if world.strikes_now("connection lost", "request", 0.02):
            raise ModelCallError("the connection was lost", kind="connection", retryable=True)
        verdict = _verdict(rng, request)
        asked = (
            []
            if verdict or request.answers_so_far > rng.randint(3, 14)
            else self._calls(rng, request, number)
        )
        text = verdict or f"answer {number}"
        yield TextDelta(text)
        await life.pause("stream", rng.uniform(0.0, 1.0))
        if world.strikes_now("cut off", "stream", 0.02):
            raise ModelCallError("the stream broke", kind="connection", retryable=True, partial=text)
        for each in asked:
            yield ToolCallRequested(each)
        yield UsageReported(TokenUsage(input_tokens=100, output_tokens=20), cost_usd)
        if world.strikes_now("unknown stop", "stream", 0.01):
            world.stops[self._run, text] = "a_new_word"
            yield Stopped("broken_off", "a_new_word")
            return
        if world.strikes_now("too long", "stream", 0.01):
            world.stops[self._run, text] = "length"
            yield Stopped("length")
            return
        world.stops[self._run, text] = "end"
        yield Stopped("tools" if asked else "end")

    def _calls(self, rng: Random, request: ModelRequest, number: int) -> list[ToolCall]:
        if not request.tools or rng.random() < 0.04:
            return []
        names = [each.name for each in request.tools]
        calls = []
        for place in range(rng.choice((1, 1, 1, 2, 3))):
            name = rng.choice(names)
            call_id = f"call_{self._run}_{number}_{place}"
            calls.append(ToolCall(call_id, name, _arguments(rng, name, call_id)))
        return calls


def _verdict(rng: Random, request: ModelRequest) -> str:
    """Return what the model says as a judge, which is sometimes nonsense; empty if it is not asked as one."""
    if request.output_schema is None:
        return ""
    if rng.random() < 0.2:
        return "nonsense"
    return json.dumps({"complete": rng.random() < 0.6, "explanation": "so it seems", "missing": []})


def _arguments(rng: Random, name: str, call_id: str) -> dict[str, Any]:
    if rng.random() < 0.03:
        return {"nonsense": 1}
    if name in ("write", "write_two", "remove"):
        return {"path": rng.choice(PATHS)}
    if name == "spawn_agent":
        return {"agent": "child", "task": f"help {call_id}"}
    return {}


LIFE: ContextVar[Life] = ContextVar("simulated_life")
"""The process that the running code belongs to."""


async def _work(place: str, context: ToolContext) -> None:
    """Take some time, in which anything may happen."""
    life = LIFE.get()
    await life.pause(f"tool {place}", life.world.rng("work", place, context.call_id).uniform(0.0, 3.0))


def _may_fail(place: str) -> None:
    if LIFE.get().world.strikes_now("tool raises", place, 0.08):
        raise RuntimeError("the tool failed")


@tool(effects="workspace")
async def write(path: str, *, context: ToolContext) -> str:
    """Write a file."""
    await _work("write", context)
    context.filesystem.write(path, f"{context.call_id} wrote this")
    context.session.dispatch(Counted(context.call_id))
    await _work("written", context)
    _may_fail("write")
    return "written"


@tool(effects="workspace")
async def write_two(path: str, *, context: ToolContext) -> str:
    """Write two files: both or none."""
    context.filesystem.write(path, f"{context.call_id} wrote the first")
    await _work("between", context)
    _may_fail("write_two")
    context.filesystem.write("second.txt", f"{context.call_id} wrote the second")
    context.session.dispatch(Counted(context.call_id))
    return "written"


@tool(effects="workspace")
async def remove(path: str, *, context: ToolContext) -> str:
    """Remove a file."""
    context.filesystem.delete(path)
    await _work("remove", context)
    _may_fail("remove")
    return "removed"


@tool(effects="external")
async def pay(*, context: ToolContext) -> str:
    """Act outside, in a way that must not be repeated."""
    await _work("pay", context)
    life = LIFE.get()
    life.world.effects[f"pay {context.call_id}"] += 1
    life.world.note(f"{life.name} pays for {context.call_id}")
    life.may_die("paid", 0.05)
    await _work("paid", context)
    return "paid"


@tool(effects="external", idempotent=True)
async def order(*, context: ToolContext) -> str:
    """Act outside, in a way that the receiver recognises when it is repeated."""
    await _work("order", context)
    LIFE.get().world.effects[f"order {context.call_id}"] = 1
    LIFE.get().may_die("ordered", 0.05)
    return "ordered"


@tool(effects="workspace")
async def mail(*, context: ToolContext) -> str:
    """Put a message into the outbox."""
    context.outbox.put("mail", {"to": context.call_id})
    await _work("mail", context)
    _may_fail("mail")
    return "queued"


@tool(effects="none")
async def look(*, context: ToolContext) -> str:
    """Look at the files."""
    await _work("look", context)
    return ", ".join(each.path for each in context.filesystem.glob("**/*"))


AGENT = Agent("simulated", instructions="Do it.", tools=[write, write_two, remove, pay, order, mail, look])
"""The agent of every run, and of every child."""

JUDGED = replace(AGENT, completion=LLMCompletionVerifier())
"""The same, with a judge that must agree before it may stop."""


async def edit_files(world: World, run: str, disk: Disk, is_over: Callable[[], bool]) -> None:
    """Be a person who saves files meanwhile, whatever the agents do."""
    rng = world.rng("person", run)
    for number in range(rng.randint(0, 6)):
        await anyio.sleep(rng.uniform(0.5, 25.0))
        if is_over():
            return
        if world.strikes_now("person edits", "person", 0.6):
            disk.put(rng.choice(PATHS), f"edit {number} of a person".encode(), f"person of {run}")


async def interrupt(world: World, run: str, token: CancellationToken) -> None:
    """Be a person who presses Ctrl-C at some time."""
    rng = world.rng("interrupt", run)
    await anyio.sleep(rng.uniform(1.0, 60.0))
    if world.strikes_now("interrupt", "person", 0.15):
        token.cancel()

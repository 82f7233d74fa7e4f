"""Parents, agents and models for the tests of subagents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from treenail import Agent, tool
from treenail.clock import Clock
from treenail.conversation import SubagentEvent
from treenail.log import Log, MemoryLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Scripted, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, Subagents
from treenail.workspace import Filesystem, InMemoryFilesystem


@tool
def write_note(path: str, text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool(effects="none")
def read_note(path: str, *, context) -> str:
    """Read a note."""
    return context.filesystem.read(path).content


class Doors:
    """Lets a test hold a child's model until it is told to answer."""

    def __init__(self) -> None:
        self._doors: dict[str, anyio.Event] = {}
        self.waiting: list[str] = []

    def _door(self, name: str) -> anyio.Event:
        return self._doors.setdefault(name, anyio.Event())

    def open(self, *names: str) -> None:
        for name in names:
            self._door(name).set()

    async def pass_through(self, name: str) -> None:
        self.waiting.append(name)
        await self._door(name).wait()


class WaitingProvider(ScriptedProvider):
    """A scripted model that waits at a door before each answer; the door is the task's first word."""

    def __init__(self, doors: Doors, script: Sequence[Scripted]) -> None:
        super().__init__(script)
        self._waits = doors

    async def stream(self, request: ModelRequest):
        task = next(each.text for each in reversed(request.items) if each.role == "user")
        await self._waits.pass_through(task.split()[0])
        async for each in super().stream(request):
            yield each


def parent(
    log: Log | None = None, filesystem: Filesystem | None = None, clock: Clock | None = None
) -> ExecutionState:
    log = log or MemoryLog(clock=clock, heartbeat=False)
    session = Session(log=log, clock=clock)
    bound: Mapping[Any, Any] = {Filesystem: filesystem if filesystem is not None else InMemoryFilesystem()}
    return ExecutionState(session, ResourceRegistry.build(bound), session.clock)


WORKER = Agent("worker", "You work. Do it well.", tools=(write_note, read_note), retry=None)
ASSISTANT = Agent("assistant", "You assist.", retry=None)


def saying(*answers: Scripted) -> ScriptedProvider:
    return ScriptedProvider(answers)


def subagents(state: ExecutionState, provider: Any, **options: Any) -> Subagents:
    agents = options.pop("agents", (WORKER, ASSISTANT))
    return Subagents(state, agents, runner=LoopRunner(provider), **options)


def told(state: ExecutionState, subagent_id: str | None = None) -> list[str]:
    """The names of the events in the parent's log, read from the log itself."""
    return [each.event for each in evidence(state, subagent_id)]


def evidence(state: ExecutionState, subagent_id: str | None = None) -> list[SubagentEvent]:
    return [
        value
        for _, value in state.session.events()
        if isinstance(value, SubagentEvent) and subagent_id in (None, value.subagent_id)
    ]


async def until(holds: Callable[[], bool]) -> None:
    """Let the others run until something holds; a test that waits in vain fails."""
    with anyio.fail_after(60):
        while not holds():
            await anyio.lowlevel.checkpoint()

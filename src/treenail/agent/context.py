"""What depends on the run: instructions and tools that functions make, and what these functions are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from treenail.errors import UsageError
from treenail.log import SlicePolicy
from treenail.state import SessionView, event
from treenail.tools import DepsT, Tool, filesystem_of, listed
from treenail.turns import InnerLoop, TurnStarted, first_section
from treenail.workspace import Filesystem

T = TypeVar("T")


# No slots: Python 3.11 cannot construct a frozen generic with slots through `AgentContext[Deps](...)`.
@dataclass(frozen=True)
class AgentContext(Generic[DepsT]):
    """A run that is about to begin or to resume, as instructions and toolsets see it."""

    deps: DepsT
    """What the caller passed as `deps`."""
    run_id: UUID
    task: str
    """What the run was asked to do last."""
    model: str
    session: SessionView
    filesystem: Filesystem | None
    """The workspace, read-only."""


Instructions = str | Callable[[AgentContext[DepsT]], str | Awaitable[str]]
"""What an agent is told about itself: a text, or a function that makes it for a run, sync or async."""

Tools = Iterable[Tool[Any, Any] | Callable[..., Any]]
"""Tools, and functions that become tools."""

ToolsOfRun = Callable[[AgentContext[DepsT]], Tools | Awaitable[Tools]]
"""A function that chooses the tools of a run, sync or async."""


@event(name="treenail.InstructionsGiven", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class InstructionsGiven:
    """What a function made as the instructions of this run. Later turns and resumes use the same text."""

    text: str


def context_of(loop: InnerLoop) -> AgentContext[Any]:
    """Return a loop as instructions and toolsets see it."""
    session, filesystem = loop.state.session, filesystem_of(loop.state)
    task = loop.task
    if task is None:
        started = session[TurnStarted].latest()
        task = "" if started is None else started.task
    return AgentContext(
        loop.deps,
        session.session_id,
        task,
        loop.provider.model,
        session.read_only_view(),
        None if filesystem is None else filesystem.read_only_view(),
    )


async def instructions_for(
    given: Callable[[AgentContext[Any]], str | Awaitable[str]], loop: InnerLoop
) -> str:
    """Return the text that a function made for a run: once, and from then on what the log has of it."""
    session = loop.state.session
    known = session[InstructionsGiven].latest()
    if known is not None:
        return known.text
    text = await _awaited(given(context_of(loop)))
    if not isinstance(text, str):
        raise UsageError(f"the function that makes the instructions must return text, not {text!r}")
    loop.opening.events.append(InstructionsGiven(text))
    return text


def extended(given: Instructions[Any], text: str) -> Instructions[Any]:
    """Return instructions that are followed by a text."""
    if isinstance(given, str):
        return given + text

    async def both(context: AgentContext[Any]) -> str:
        return await _awaited(given(context)) + text

    return functools.wraps(given)(both)


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class Toolset(Generic[DepsT]):
    """Tools that a function chooses for each run. It stands in the list of an agent's tools."""

    choose: ToolsOfRun[DepsT]

    def attached(self, loop: InnerLoop) -> AbstractAsyncContextManager[object]:
        """Add the tools to a loop: entered before its turn runs, left when the turn has ended."""
        return self._attached(loop)

    @asynccontextmanager
    async def _attached(self, loop: InnerLoop) -> AsyncIterator[None]:
        chosen = listed(list(await _awaited(self.choose(context_of(loop)))))
        with first_section(loop, tools=(*loop.prompt.template.sections[0].tools, *chosen)):
            yield


def toolset(function: ToolsOfRun[DepsT], /) -> Toolset[DepsT]:
    """Choose tools anew for each run: `tools=[read, toolset(lambda context: [...])]`, or as a decorator.

    The function is called when a run begins and when it resumes. Tools that the model has been offered keep
    their order; one that is missing on a resume can no longer be called.
    """
    return Toolset(function)

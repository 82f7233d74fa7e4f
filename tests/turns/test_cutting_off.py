"""Whatever cuts a turn off is heard at the next moment, on asyncio and on trio, and has its ending."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any

import anyio
import pytest

from treenail import Agent, TurnState, tool
from treenail.containment import CancellationToken, threadsafe
from treenail.judges import TaskCompletionContext, TaskCompletionResult
from treenail.log import MemoryLog
from treenail.providers import ModelEvent, ModelRequest, Stopped, TextDelta, VendorSeat
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolContext, ToolInvoked, ToolResult
from treenail.turns import InnerLoop, LiveEvent, TurnEnded, turn_state
from treenail.workspace import Filesystem, InMemoryFilesystem

pytestmark = [pytest.mark.timeout(240), pytest.mark.parametrize("backend", ["asyncio", "trio"])]

CALLS = 50


def loop_of(
    script: Sequence[Answer | str], *tools: Tool[Any, Any], log: MemoryLog | None = None
) -> InnerLoop:
    session = Session(log=log or MemoryLog(heartbeat=False))
    return InnerLoop(ExecutionState(session), ScriptedProvider(script), Agent("agent", tools=tools).prompt)


def kinds(loop: InnerLoop) -> list[str | None]:
    return [each.error_kind for each in loop.state.session[TurnEnded].all()]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("stop", ["outer scope", "ctrl-c"])
def test_no_call_of_an_answer_begins_after_the_turn_was_cut_off(
    backend: str, stop: str, is_async: bool
) -> None:
    """Calls that end at once leave room in between for whoever stops the turn; a resume runs the others."""
    ran: list[int] = []
    act: list[Callable[[], None]] = []

    def body() -> str:
        ran.append(1)
        if len(ran) == 3:
            act[0]()
        return "done"

    if is_async:

        @tool
        async def step() -> str:
            """Do a step."""
            return body()
    else:

        @tool
        def step() -> str:
            """Do a step."""
            return body()

    loop = loop_of([Answer("", [("step", {})] * CALLS), "done"], step)

    async def main() -> None:
        with anyio.CancelScope() as scope:
            outer = threadsafe(scope.cancel)
            act.append(outer if stop == "outer scope" else lambda: signal.raise_signal(signal.SIGINT))
            await loop.run("go")

    if stop == "outer scope":
        anyio.run(main, backend=backend)
    else:
        with pytest.raises(KeyboardInterrupt):
            anyio.run(main, backend=backend)
    assert len(ran) <= 4
    assert kinds(loop) == ["cancelled" if stop == "outer scope" else "interrupt"]
    assert anyio.run(loop.resume, backend=backend).state is TurnState.COMPLETED
    assert CALLS <= len(ran) <= CALLS + 1, "only the one that was cut off, if any, is run again"


@pytest.mark.parametrize(("idempotent", "told"), [(False, "unknown"), (True, "interrupted")])
def test_a_call_that_was_stopped_while_it_acted_outside_is_not_said_to_be_undone(
    backend: str, idempotent: bool, told: str
) -> None:
    """Nobody knows what it did; only one that may run again is merely interrupted."""

    @tool(effects="external", idempotent=idempotent)
    async def pay() -> str:
        """Pay."""
        loop.cancellation.cancel("cancelled")
        await anyio.sleep_forever()
        return "paid"

    loop = loop_of([Answer("", [("pay", {})]), "done"], pay)
    anyio.run(loop.run, "go", backend=backend)
    (end,) = loop.state.session[ToolInvoked].all()
    assert end.outcome == told
    assert told in end.result.message and "rolled back" not in end.result.message
    assert kinds(loop) == ["cancelled"]


def test_an_interrupt_among_calls_side_by_side_is_raised_as_itself(backend: str) -> None:
    """Not in a group of exceptions, which nobody who waits for Ctrl-C would notice."""
    ran: list[int] = []

    @tool(effects="none")
    async def look() -> str:
        """Look."""
        ran.append(1)
        if len(ran) == 2:
            raise KeyboardInterrupt
        await anyio.sleep_forever()
        return ""

    loop = loop_of([Answer("", [("look", {})] * 4)], look)
    with pytest.raises(KeyboardInterrupt):
        anyio.run(loop.run, "go", backend=backend)
    assert turn_state(loop.state.session) is TurnState.INTERRUPTED
    assert kinds(loop) == ["interrupt"]


class Nursing:
    """A model whose stream has tasks of its own, one of which is interrupted."""

    name = "model"
    model = "a-model"

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        for each in ("one", "two"):
            yield TextDelta(each)
            if each == "two":
                raise BaseExceptionGroup("tasks", [BaseExceptionGroup("inner", [KeyboardInterrupt()])])
        yield Stopped("end")


def test_an_interrupt_in_a_group_has_the_ending_of_an_interrupt(backend: str) -> None:
    """A provider's own tasks wrap what a person wants; the log says it plainly, and so does the exception."""
    loop = loop_of([])
    loop = InnerLoop(loop.state, Nursing(), loop.prompt)
    with pytest.raises(KeyboardInterrupt):
        anyio.run(loop.run, "go", backend=backend)
    assert kinds(loop) == ["interrupt"]


def test_a_handler_that_swallows_its_cancellation_is_rolled_back_when_the_token_is_set(backend: str) -> None:
    """Also while the token is still telling those that follow it: the call's own token may be the last."""
    token, is_over = CancellationToken(), threading.Event()
    ran: list[int] = []

    @tool
    async def stubborn(*, context: ToolContext) -> str:
        """Change something, and return whatever happens."""
        context.filesystem.write("half.txt", "half")
        ran.append(1)
        if len(ran) == 1:
            threading.Thread(target=token.cancel).start()
            with suppress(BaseException):
                await anyio.sleep_forever()
        return "done"

    def call(request: ModelRequest) -> Answer:
        token.on_cancel(lambda: is_over.wait(60))  # Told after the turn, and before the call.
        return Answer("", [("stubborn", {})])

    session, filesystem = Session(log=MemoryLog(heartbeat=False)), InMemoryFilesystem()
    loop = InnerLoop(
        ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem})),
        ScriptedProvider([call, "done"]),
        Agent("agent", tools=(stubborn,)).prompt,
        cancellation=token,
    )
    try:
        result = anyio.run(loop.run, "go", backend=backend)
    finally:
        is_over.set()
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")
    assert [each.outcome for each in session[ToolInvoked].all()] == ["interrupted"]
    assert not filesystem.exists("half.txt")


def test_a_judge_that_swallows_its_cancellation_cannot_complete_a_stopped_turn(backend: str) -> None:
    """What it answers after the token was set does not count, also while the token still tells the others."""
    token, is_over = CancellationToken(), threading.Event()

    class Stubborn:
        async def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
            threading.Thread(target=token.cancel).start()
            with suppress(BaseException):
                await anyio.sleep_forever()
            return TaskCompletionResult.ok()

    def answer(request: ModelRequest) -> str:
        token.on_cancel(lambda: is_over.wait(60))  # Told after the turn, and before the judge.
        return "done"

    loop = InnerLoop(
        ExecutionState(Session(log=MemoryLog(heartbeat=False))),
        ScriptedProvider([answer]),
        Agent("agent", completion=Stubborn()).prompt,
        cancellation=token,
    )
    try:
        result = anyio.run(loop.run, "go", backend=backend)
    finally:
        is_over.set()
    assert (result.state, result.error_kind) == (TurnState.INTERRUPTED, "aborted")


@pytest.fixture
def collector_off() -> Iterator[None]:
    """What other tests have left is not finalised in the middle of a test that interrupts at every moment."""
    gc.disable()
    yield
    gc.enable()


class Interrupter:
    """Raises `KeyboardInterrupt` at the nth moment in a file at which the interpreter looks for a signal."""

    def __init__(self, at: int, file: str) -> None:
        self.left = at
        self.file = file

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # A coroutine that goes on looks for signals in its innermost frame only.
        if not code.co_filename.endswith(self.file) or code.co_flags & inspect.CO_COROUTINE:
            return
        if event in ("call", "c_return") and code.co_name != "<genexpr>":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


# Between making a coroutine and awaiting it there is a moment, too.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("file", ["turns/states.py", "turns/live.py"])
@pytest.mark.usefixtures("collector_off")
def test_an_interrupt_while_the_turn_is_followed_spoils_neither_its_ending_nor_a_resume(
    backend: str, file: str
) -> None:
    """Whoever was interrupted within an event folds the turn anew; an ending that is logged stands."""

    @tool
    def step() -> str:
        """Do a step."""
        return "done"

    seen: list[LiveEvent] = []
    at = 0
    while True:
        at += 1
        loop = loop_of([Answer("", [("step", {})]), "done"], step)
        loop.watch = seen.append
        interrupter = Interrupter(at, file)
        sys.setprofile(interrupter)
        try:
            anyio.run(loop.run, "go", backend=backend)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if interrupter.left > 0:
            break
        if turn_state(loop.state.session) is not TurnState.COMPLETED:
            assert kinds(loop) in ([], ["interrupt"]), at
            result = anyio.run(loop.resume if loop.state.session.head else loop.run, backend=backend)
            assert result.state is TurnState.COMPLETED, at
    assert at > 2


class Seated(ScriptedProvider):
    """A model that brings a loop of its own, which cannot be closed as it should."""

    native_tools: Mapping[str, Tool[Any, Any]] = {}

    async def asked(self, call: ToolCall) -> str | None:
        return None

    async def deliver(self, call: ToolCall, result: ToolResult[Any]) -> None:
        return

    @asynccontextmanager
    async def open(self, seat: VendorSeat) -> AsyncIterator[Seated]:
        yield self
        raise OSError("the pipe is gone")


def test_a_vendors_loop_that_fails_to_close_changes_no_ending(backend: str) -> None:
    """The turn has ended by then, and its caller hears how."""
    loop = loop_of([])
    loop = InnerLoop(loop.state, Seated(["done"]), loop.prompt)
    result = anyio.run(loop.run, "go", backend=backend)
    assert (result.state, result.text) == (TurnState.COMPLETED, "done")
    assert turn_state(loop.state.session) is TurnState.COMPLETED

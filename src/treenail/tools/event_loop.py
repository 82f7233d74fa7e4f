"""Where async code meets threads: the sync faces, slow work beside an event loop, and lost cancellations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel

from treenail.containment import wait_finished, workers
from treenail.errors import UsageError

try:
    import sniffio
except ImportError:
    sniffio = None  # type: ignore[assignment]  # it comes with other libraries, or not at all

P = ParamSpec("P")
T = TypeVar("T")


def is_in_event_loop() -> bool:
    """Say whether this thread runs an event loop right now, which blocking would stop."""
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return False
    return True


def refuse_in_event_loop(face: str, instead: str) -> None:
    """Raise `UsageError` if a sync face is called where it would block an event loop."""
    if is_in_event_loop():
        raise UsageError(f"{face} would block the event loop that runs here; `await` {instead} instead")


def run_blocking(start: Callable[[], Awaitable[T]], *, face: str, instead: str) -> T:
    """Run async code from sync code, in an event loop of its own.

    Inside an event loop it raises `UsageError`, which says what to await instead.
    """
    refuse_in_event_loop(face, instead)

    def run() -> T:
        # A thread may have been handed the context of a task, as pools of other libraries do.
        leave_event_loop()
        return anyio.run(start)

    return copy_context().run(run)


def leave_event_loop() -> None:
    """Say in a thread that runs in the context of a task that it has no event loop.

    Else nothing could run one there: with `sniffio` installed, anyio believes the context.
    """
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)


async def run_beside(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run slow sync code on a worker thread, and wait for it. A cancellation waits until it is done."""
    future = workers.start(partial(work, *arguments, **keywords))
    with anyio.CancelScope(shield=True):
        await wait_finished(future)
    return future.result()


def cancellations() -> int:
    """Count how often the current task was cancelled without anybody taking it back.

    Ctrl-C cancels a task of asyncio once. If foreign code catches that and continues, only this number still
    shows it. On other backends a cancellation is delivered again until it is heeded: 0.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()


def heed_cancellations(before: int) -> None:
    """Cancel the task if foreign code has swallowed a cancellation since `cancellations()` was `before`."""
    # A cancelled scope around us cancels again and again: only a cancellation of the task itself can be lost.
    if cancellations() > before and anyio.current_effective_deadline() != -math.inf:
        raise asyncio.CancelledError("a cancellation was caught, and not passed on")


def foremost(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception of a group to raise: the first that is not a cancellation, if there is one."""
    cancelled = anyio.get_cancelled_exc_class()
    counting = several.subgroup(lambda each: not isinstance(each, BaseExceptionGroup | cancelled)) or several
    found: BaseException = counting
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found

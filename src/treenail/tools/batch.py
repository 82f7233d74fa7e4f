"""Several calls of one answer: those without effects side by side, the others in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import anyio.lowlevel

from treenail.tools.event_loop import foremost

C = TypeVar("C")
R = TypeVar("R")

MAX_PARALLEL = 16
"""How many calls without effects run at once."""


async def run_batch(
    calls: Sequence[C], run: Callable[[C], Awaitable[R]], *, is_free: Callable[[C], bool]
) -> Sequence[R]:
    """Run calls in order; neighbours that are free of effects run side by side.

    If a call raises, those beside it still come to their end, and those after it are not run.
    """
    results: list[R] = []
    while len(results) < len(calls):
        first = len(results)
        end = first + 1
        if end < len(calls) and is_free(calls[first]):
            while end < len(calls) and is_free(calls[end]):
                end += 1
        if first:
            # A call may end without the event loop having run: a cancellation is noticed here.
            await anyio.lowlevel.checkpoint()
        if end == first + 1:
            results.append(await run(calls[first]))
        else:
            results += await _side_by_side(calls[first:end], run)
    return results


async def _side_by_side(calls: Sequence[C], run: Callable[[C], Awaitable[R]]) -> Sequence[R]:
    """Run calls at the same time. The error of the first one that failed is raised when all are done."""
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    interrupts: list[BaseException] = []
    limit = anyio.CapacityLimiter(MAX_PARALLEL)
    cancelled = anyio.get_cancelled_exc_class()

    async def one(index: int, call: C) -> None:
        async with limit:
            try:
                results[index] = await run(call)
            except Exception as error:  # noqa: BLE001  # raised when those beside it are done
                errors[index] = error
            except BaseException as error:
                if isinstance(error, cancelled):
                    raise
                # A task that ends with an interrupt wraps it in a group, or tears the event loop down.
                interrupts.append(error)
                group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(one, index, call)
    except BaseExceptionGroup as several:  # an interrupt that came between the calls
        raise foremost(several) from None
    finally:
        if interrupts:
            raise interrupts[0]
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(calls))]

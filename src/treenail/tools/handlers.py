"""Running a call's handler: an async one in the event loop, a sync one on a worker thread."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from treenail.containment import StopReason, threadsafe, wait_finished, workers
from treenail.errors import DeadlineExceededError, ToolError
from treenail.tools.event_loop import leave_event_loop
from treenail.tools.exits import failed_exit
from treenail.tools.tool import ToolResult
from treenail.tools.transaction import OpenCall
from treenail.tools.values import acollect, collect, is_stream

GRACE_S = 5.0
"""How long the rollback of a function that cannot be told to stop waits for it to end."""


async def run_handler(opened: OpenCall) -> Any:
    """Run the handler of a call until it is done, the deadline passes or the call's token is set."""
    given, tool = opened.plan.context, opened.tool
    # Only a handler that knows the call's own token, or has a thread to stop, needs one.
    token = given.cancellation if tool.is_async and not tool.takes_context else opened.cancellation
    deadline = given.deadline
    seconds = None if deadline is None else max(deadline.remaining().total_seconds(), 0)
    with anyio.move_on_after(seconds) as scope:
        forget = token.on_cancel(threadsafe(scope.cancel))
        try:
            with opened.entered():
                outcome = await (opened.call_handler() if tool.is_async else _on_worker(opened))
                if inspect.isawaitable(outcome):
                    outcome = await outcome
                value = outcome.value if isinstance(outcome, ToolResult) else outcome
                if value is None or isinstance(value, str) or not is_stream(value):
                    return outcome
                items = await _collected(opened, value)
                return replace(outcome, value=items) if isinstance(outcome, ToolResult) else items
        except SystemExit as error:
            raise failed_exit(opened.tool.name, error) from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            raise ToolError(f"{opened.tool.name} waited for something that was cancelled") from error
        finally:
            forget()
    if not opened.is_cut_off:
        token.raise_if_cancelled()
    raise DeadlineExceededError(f"the deadline passed while {opened.tool.name} was running")


async def _on_worker(opened: OpenCall) -> Any:
    """Run a sync handler on a worker thread.

    When it is cut off, its token is set. A thread that continues all the same is left behind: its handles
    refuse once the call is over. A handler that changes the tree past its handles is waited for, because
    the tree cannot be put back meanwhile; one that has no token to look at, for `GRACE_S` at most.
    """
    # The worker runs it in a copy of this context, so it is part of the call as well.
    handler = workers.start(partial(_call, opened))
    try:
        await wait_finished(handler)
    except BaseException:
        token = opened.cancellation
        opened.is_cut_off = token.cancel(StopReason.ABORTED, detail="the call was cut off")
        if opened.is_foreign:
            patience_s = None if opened.tool.takes_context else GRACE_S
            with anyio.move_on_after(patience_s, shield=True) as scope:
                await wait_finished(handler)
            opened.is_left_behind = scope.cancelled_caught
        raise
    return handler.result()


def _call(opened: OpenCall) -> Any:
    leave_event_loop()
    outcome = opened.call_handler()
    if inspect.isgenerator(outcome):
        # Its code is the handler's: it runs here, as part of the call.
        return collect(opened.tool.name, outcome, opened.context.cancellation.raise_if_cancelled)
    return outcome


def _is_cancelled() -> bool:
    """Say whether the call itself is cancelled, and not only something that its handler waited for."""
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        return False  # Another event loop's call, which asyncio cannot cancel.
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _collected(opened: OpenCall, items: Any) -> list[Any]:
    """Return what a generator or iterator yields that a handler has returned."""
    if hasattr(items, "__anext__"):
        return await acollect(opened.tool.name, items)
    return collect(opened.tool.name, items, opened.context.cancellation.raise_if_cancelled)

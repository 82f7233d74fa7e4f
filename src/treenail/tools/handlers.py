"""Running a call's handler: an async one in the event loop, a sync one on a worker thread."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import anyio

from treenail.containment import StopReason, threadsafe, wait_finished, workers
from treenail.errors import DeadlineExceededError
from treenail.tools.event_loop import leave_event_loop
from treenail.tools.transaction import OpenCall

GRACE_S = 5.0
"""How long the rollback of a function that cannot be told to stop waits for it to end."""


async def run_handler(opened: OpenCall) -> Any:
    """Run the handler of a call until it is done, the deadline passes or the call's token is set."""
    token, deadline = opened.cancellation, opened.plan.context.deadline
    seconds = None if deadline is None else max(deadline.remaining().total_seconds(), 0)
    with anyio.move_on_after(seconds) as scope:
        forget = token.on_cancel(threadsafe(scope.cancel))
        try:
            with opened.entered():
                if opened.tool.is_async:
                    return await opened.call_handler()
                outcome = await _on_worker(opened)
                return await outcome if inspect.isawaitable(outcome) else outcome
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
    return opened.call_handler()

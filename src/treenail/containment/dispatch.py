"""The two ways to wait for an attempt: blocking a thread, and awaiting in a task.

Both end in one of three: a value, the function's own exception, or `STOPPED` if the attempt's token was
cancelled before the function came back.

An async function is awaited in a cancel scope that its token cancels. A plain function runs on its caller's
thread, or, if it must be stoppable, on a worker. A synchronous caller with a coroutine drives it to its end
in an event loop of its own; within a running loop that would block the loop, so it is refused.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable
from types import AsyncGeneratorType, GeneratorType
from typing import cast

import anyio
import anyio.lowlevel

from treenail.clock import Clock
from treenail.containment.attempts import Attempt, current
from treenail.containment.cancel import CancellationToken
from treenail.containment.limits import StopReason
from treenail.containment.threads import call_later, threadsafe, wait_finished, workers
from treenail.errors import UsageError

STOPPED = object()
"""What a dispatch returns if the attempt's token was cancelled before its function came back."""


def dispatch(attempt: Attempt) -> object:
    """Run the function on this thread, or on a worker if it must be stoppable, and block until it is over."""
    call = attempt.call
    fn = attempt.fn
    if call.context.cancellation_token.reason is not None:
        return _not_begun(attempt)
    if call.context.must_be_stoppable(attempt.options) and not is_async(fn):
        value = _on_worker(attempt, fn)
    else:
        if attempt.options.timeout_ms is not None:
            # Its caller cannot be released, but it hears of the timeout, and so does its node.
            _open_token(attempt)
        before = current.set(attempt)
        try:
            value = fn()
        finally:
            current.reset(before)
    if value is None or not _is_unfinished(attempt, value):
        return value
    if _loop_is_running():
        _close(value)
        attempt.is_misused, attempt.reported = True, 0
        raise UsageError(
            f"{call.name} returned a coroutine inside a running event loop; use "
            f"`await context.acall_{call.kind}(...)` there. It was not run"
        )
    return anyio.run(_in_scope, attempt, value)


async def adispatch(attempt: Attempt) -> object:
    """Run the function in a scope that its token cancels; a plain one runs on a worker, not on the loop."""
    return await _in_scope(attempt, None)


async def apause(clock: Clock, seconds: float, token: CancellationToken) -> None:
    """Wait for that long on `clock`, or until the token is cancelled."""
    with anyio.CancelScope() as scope:
        forget = token.on_cancel(threadsafe(scope.cancel))
        try:
            await clock.async_sleep(seconds)
        finally:
            forget()


def _not_begun(attempt: Attempt) -> object:
    """End an attempt whose chain was stopped after it was booked: its function is not even called."""
    attempt.reported = 0
    return STOPPED


def _open_token(attempt: Attempt) -> CancellationToken:
    """Give the attempt a token of its own, and a timer if it has a time of its own."""
    context, timeout_ms = attempt.call.context, attempt.options.timeout_ms
    context.chain.keep_time()
    token = attempt.token = CancellationToken(context.cancellation_token)
    if timeout_ms is not None:
        detail = f"the call took longer than {timeout_ms} ms"

        def expire() -> None:
            token.cancel(StopReason.TIMEOUT, detail=detail)

        attempt.timer = call_later(context.clock, timeout_ms / 1000, expire)
    return token


def _on_worker(attempt: Attempt, fn: Callable[[], object]) -> object:
    token = _open_token(attempt)
    woken = threading.Event()
    before = current.set(attempt)
    forget = token.on_cancel(woken.set)
    try:
        work = attempt.work = workers.start(fn)
        work.add_done_callback(lambda _: woken.set())
        woken.wait()
    except BaseException:
        # Ctrl-C while waiting: the function must hear that its caller is gone.
        token.cancel(StopReason.ABORTED, detail="the caller was interrupted")
        raise
    finally:
        forget()
        current.reset(before)
    return work.result() if work.done() else STOPPED


async def _in_scope(attempt: Attempt, unfinished: object) -> object:
    """Await what the attempt's function returns, or what it returned already, in a scope of its token's."""
    token = _open_token(attempt)
    before = current.set(attempt)
    try:
        with anyio.CancelScope() as scope:
            forget = token.on_cancel(threadsafe(scope.cancel))
            try:
                if unfinished is not None:
                    return await cast("Awaitable[object]", unfinished)
                if token.reason is not None:
                    return _not_begun(attempt)
                fn = attempt.fn
                value = fn() if is_async(fn) else await _on_worker_async(attempt, fn)
                if _is_unfinished(attempt, value):
                    return await cast("Awaitable[object]", value)
                return value
            finally:
                forget()
    finally:
        current.reset(before)
    return STOPPED


async def _on_worker_async(attempt: Attempt, fn: Callable[[], object]) -> object:
    work = attempt.work = workers.start(fn)
    try:
        await wait_finished(work)
    except BaseException:
        attempt.stop_token.cancel(StopReason.ABORTED, detail="the caller was cancelled")
        raise
    return work.result()


def _is_unfinished(attempt: Attempt, value: object) -> bool:
    """Say whether a returned value still has to be awaited; refuse one whose work cannot be contained."""
    if isinstance(value, GeneratorType | AsyncGeneratorType):
        _close(value)
        attempt.is_misused = True
        raise UsageError(
            f"{attempt.call.name} returned a generator, whose work would be done after the call, outside of "
            f"every ceiling. Go through it within the call and return what it yields"
        )
    return getattr(type(value), "__await__", None) is not None


def _close(unfinished: object) -> None:
    close = getattr(unfinished, "close", None)
    if close is not None:
        close()


def is_async(fn: Callable[[], object]) -> bool:
    """Say whether calling `fn` only makes a coroutine, so that it can be called where the loop runs."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _loop_is_running() -> bool:
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return False
    return True

"""The two ways to wait for a call: in a thread and in a task.

Everything else about a call is decided elsewhere, once. Both ways end in one of three: a value, the call's
own exception, or `STOPPED` when the call's token was cancelled before it came back.

An async call is awaited in a cancel scope that its token cancels. A synchronous function runs on its caller's
thread, or, if it must be stoppable, on a worker while the caller waits for "done or cancelled". A
synchronous caller with a coroutine drives it to its end in an event loop of its own; within a running loop
that would block the loop, so it is refused.
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
from treenail.containment.call import Call, current
from treenail.containment.cancel import CancellationToken
from treenail.containment.limits import StopReason
from treenail.containment.threads import call_later, threadsafe, wait_finished, workers
from treenail.errors import UsageError

_UNFINISHED = (GeneratorType, AsyncGeneratorType)

STOPPED = object()
"""What a dispatch returns if the call's token was cancelled before the call came back."""


def dispatch(call: Call, *, stoppable: bool) -> object:
    """Make the call and block until it is over."""
    fn = cast("Callable[[], object]", call.fn)
    if call.context.cancellation_token.reason is not None:
        return _not_begun(call)
    if stoppable and not is_async(fn):
        value = _on_worker(call, fn)
    else:
        if call.options.timeout_ms is not None:
            # Nobody can release its caller, but it hears of the time's end, and so does its node.
            _open_token(call)
        before = current.set(call)
        try:
            value = fn()
        finally:
            current.reset(before)
    # A coroutine has not done anything yet; counting it as done would be a lie.
    if value is not None and getattr(type(value), "__await__", None) is not None:
        return _drive(call, cast("Awaitable[object]", value))
    if type(value) in _UNFINISHED:
        raise _refuse_generator(call, value)
    return value


def _not_begun(call: Call) -> object:
    """End an attempt whose chain was stopped after it was booked: its function is not even called."""
    call.reported = 0
    return STOPPED


def _refuse_generator(call: Call, generator: object) -> UsageError:
    """Refuse what yields its work bit by bit: outside of the call, none of it would be contained."""
    if isinstance(generator, GeneratorType):
        generator.close()
    call.is_misused = True
    return UsageError(
        f"{call.name} returned a generator, whose work is still to be done and would be done outside of the "
        f"call. Go through it within the call and return what it yields"
    )


async def adispatch(call: Call) -> object:
    """Make the call and wait until it is over; a plain function runs on a worker, so the loop goes on."""
    return await _in_scope(call, None)


async def apause(clock: Clock, seconds: float, token: CancellationToken) -> None:
    """Wait for that long on `clock`, or until the token is cancelled."""
    with anyio.CancelScope() as scope:
        forget = token.on_cancel(threadsafe(scope.cancel))
        try:
            await clock.async_sleep(seconds)
        finally:
            forget()


def close_token(call: Call) -> None:
    """Disarm the attempt's timer and let its token go from the chain's."""
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None
    if call.token is not None:
        call.token.unlink()


def _open_token(call: Call) -> CancellationToken:
    """Give the attempt a token of its own, and a timer if it has a time of its own."""
    close_token(call)
    call.context.keep_time()
    token = call.token = CancellationToken(call.context.cancellation_token)
    timeout_ms = call.options.timeout_ms
    if timeout_ms is not None:
        detail = f"the call took longer than {timeout_ms} ms"

        def expire() -> None:
            token.cancel(StopReason.TIMEOUT, detail=detail)

        call.due_at = call.context.clock.monotonic() + timeout_ms / 1000
        call.timer = call_later(call.context.clock, timeout_ms / 1000, expire)
    return token


def _on_worker(call: Call, fn: Callable[[], object]) -> object:
    token = _open_token(call)
    woken = threading.Event()
    before = current.set(call)
    forget = token.on_cancel(woken.set)
    try:
        work = call.work = workers.start(fn)
        work.add_done_callback(lambda _: woken.set())
        woken.wait()
    except BaseException:
        # Ctrl-C while waiting: the handler must hear of it, since nobody waits for it any more.
        token.cancel(StopReason.ABORTED, detail="the caller was interrupted")
        raise
    finally:
        forget()
        current.reset(before)
    return work.result() if work.done() else STOPPED


async def _on_worker_async(call: Call, fn: Callable[[], object]) -> object:
    work = call.work = workers.start(fn)
    try:
        await wait_finished(work)
    except BaseException:
        if call.token is not None:
            call.token.cancel(StopReason.ABORTED, detail="the caller was cancelled")
        raise
    return work.result()


def _drive(call: Call, awaitable: Awaitable[object]) -> object:
    if _loop_is_running():
        close = getattr(awaitable, "close", None)
        if close is not None:
            close()
        call.is_misused = True
        call.reported = 0
        raise UsageError(
            f"{call.name} returned a coroutine inside a running event loop; use "
            f"`await context.acall_{call.kind}(...)` there. It was not run"
        )
    return anyio.run(_in_scope, call, awaitable)


async def _in_scope(call: Call, awaitable: Awaitable[object] | None) -> object:
    """Await the call in a scope that its token cancels."""
    token = _open_token(call)
    before = current.set(call)
    try:
        with anyio.CancelScope() as scope:
            forget = token.on_cancel(threadsafe(scope.cancel))
            try:
                if token.reason is not None and awaitable is None:
                    return _not_begun(call)
                if awaitable is None:
                    fn = cast("Callable[[], object]", call.fn)
                    value = fn() if is_async(fn) else await _on_worker_async(call, fn)
                    if getattr(type(value), "__await__", None) is None:
                        if type(value) in _UNFINISHED:
                            raise _refuse_generator(call, value)
                        return value
                    awaitable = cast("Awaitable[object]", value)
                return await awaitable
            finally:
                forget()
    finally:
        current.reset(before)
    return STOPPED


def is_async(fn: Callable[[], object]) -> bool:
    """Say whether calling `fn` only makes a coroutine, so that it can be called where the loop runs."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _loop_is_running() -> bool:
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return False
    return True

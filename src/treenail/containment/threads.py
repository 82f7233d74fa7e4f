"""Work on other threads: wake an event loop from outside, run a function elsewhere, fire a timer.

*Waking a loop.* `threadsafe(callback)` binds a callback to the event loop that runs now, so that a timer or
an aborting thread can cancel a scope that lives in it.

*Workers.* A synchronous function cannot be interrupted, but its caller can be released. So a call that must
be stoppable runs on a worker thread while its caller waits for "done or cancelled". Workers are daemons and
are reused; one that is stuck in an abandoned function does not keep the process alive.

*Timers.* One shared daemon thread fires them, soonest first, each on a worker, so that none waits for
another's listeners. A clock may bring its own `call_later`, as the fake clock does.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

import anyio
import anyio.lowlevel

from treenail.clock import Clock

T = TypeVar("T")

logger = logging.getLogger("treenail.containment")


def describe(error: BaseException) -> str:
    """Return an error's class and text; the class alone if its text cannot be had."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - a foreign __str__ failed; the error still has to be dealt with
        return name


def _running_loop() -> Any:
    """Return the event loop that runs in this thread, asyncio's or trio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return anyio.lowlevel.current_token().native_token


def threadsafe(callback: Callable[[], object]) -> Callable[[], None]:
    """Return a function that any thread may call to run `callback` in the event loop that runs now.

    It never blocks, and calling it after that loop has ended does nothing.
    """
    loop = _running_loop()
    # asyncio and trio each have exactly one way to do this, and anyio has none that does not block.
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def call() -> None:
        try:
            post(callback)
        except RuntimeError:
            # The loop is closed (asyncio) or finished (trio), so there is nothing to wake.
            pass

    return call


class Workers:
    """Daemon threads that run one function at a time and wait for the next."""

    def __init__(self, max_idle: int = 32) -> None:
        self._max_idle = max_idle
        self.forget_all()

    def forget_all(self) -> None:
        """Start over in a forked process: it has the list of workers, but none of their threads."""
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], Callable[[], None]]]] = []

    def start(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on a worker at once, in the caller's context variables."""
        future: Future[T] = Future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="treenail-worker", daemon=True).start()
        inbox.put(partial(_run, contextvars.copy_context(), fn, future))
        return future

    def _serve(self, inbox: SimpleQueue[Callable[[], Callable[[], None]]]) -> None:
        is_kept = True
        while is_kept:
            report = inbox.get()()
            # Idle before its caller is woken, so that the caller's next call finds this worker again.
            with self._lock:
                is_kept = len(self._idle) < self._max_idle
                if is_kept:
                    self._idle.append(inbox)
            report()
            # A waiting worker must not keep the last call's arguments and result alive.
            del report


def _run(context: contextvars.Context, fn: Callable[[], T], future: Future[T]) -> Callable[[], None]:
    """Run a function and return how to report what came of it."""
    try:
        return partial(future.set_result, context.run(fn))
    except BaseException as error:  # noqa: BLE001 - carried to whoever waits for the future
        return partial(future.set_exception, error)


workers = Workers()
"""The worker threads of this process."""


async def wait_finished(future: Future[Any]) -> None:
    """Wait until a function on a worker has ended, however it ended, letting other tasks run."""
    done = anyio.Event()
    wake = threadsafe(done.set)
    future.add_done_callback(lambda _: wake())
    await done.wait()


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Bind a method without keeping its object alive: timers and a parent's token outlive it."""
    bound = WeakMethod(method)

    def call() -> None:
        alive = bound()
        if alive is not None:
            alive()

    return call


class Timer(Protocol):
    """A callback that will be called unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from firing. Cancelling twice, or after it has fired, does nothing."""
        ...


def fire(callback: Callable[[], object]) -> None:
    """Call a timer's callback; an error in it is logged and keeps no other timer from firing."""
    try:
        callback()
    except Exception:
        logger.exception("a timer's callback failed")


def call_later(clock: Clock, seconds: float, callback: Callable[[], object]) -> Timer:
    """Call `callback` from some thread when that much time has passed.

    A clock that has a `call_later` of its own decides when that is; for any other, real time counts.
    """
    # Asked for by name: `isinstance` does not see the methods of a clock that delegates to another.
    later: Callable[[float, Callable[[], object]], Timer] | None = getattr(clock, "call_later", None)
    if later is not None:
        return later(seconds, callback)
    return _timers.call_later(seconds, callback)


class _PendingTimer:
    """A timer that has not fired. Its callback is dropped when it is cancelled."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Keep it from firing."""
        self.callback = None


class _TimerThread:
    """Fires the timers of this process, soonest first. The thread starts with the first timer."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Start over in a forked process, which has no timers of its own yet."""
        self._heap: list[tuple[float, int, _PendingTimer]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], object]) -> _PendingTimer:
        """Call `callback` on a worker when that much time has passed."""
        timer = _PendingTimer(callback)
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._number), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="treenail-timers", daemon=True)
                self._thread.start()
            self._changed.notify()
        return timer

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._heap and self._heap[0][2].callback is None:
                    heapq.heappop(self._heap)
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))
                    continue
                callback = heapq.heappop(self._heap)[2].callback
            if callback is not None:
                workers.start(partial(fire, callback))


_timers = _TimerThread()


def _after_fork() -> None:
    """Start a forked process without the threads and timers that it inherited."""
    workers.forget_all()
    _timers.forget_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

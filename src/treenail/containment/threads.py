"""Work on other threads: wake an event loop from outside, run a function elsewhere, fire a timer.

*Waking a loop.* `threadsafe(callback)` binds a callback to the event loop that runs now, so that a timer or
an aborting thread can cancel a scope that lives in it.

*Workers.* A synchronous function cannot be interrupted, but its caller can be released. So a call that must
be stoppable runs on a worker thread while its caller waits for "done or cancelled". Workers are daemons and
are reused; one that is stuck in an abandoned function does not keep the process alive.

*Timers.* One daemon thread serves every timeout. Workers call the timers that are due, so that none waits for
another's listeners. A clock may bring its own `call_later`, as the fake clock does.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

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


def threadsafe(callback: Callable[[], object]) -> Callable[[], None]:
    """Return a function that any thread may call to run `callback` in the event loop that runs now.

    It never blocks, and calling it after that loop has ended does nothing.
    """
    loop: Any = anyio.lowlevel.current_token().native_token
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


class Timer(Protocol):
    """A callback that will be called unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from firing. Cancelling twice, or after it has fired, does nothing."""
        ...


class Timers:
    """Callbacks, by the time when they are due. It holds no thread and reads no clock."""

    def __init__(self) -> None:
        self.unlock()
        self._due: dict[_Timer, float] = {}

    def unlock(self) -> None:
        """Make a new lock in a forked process, where the thread that held the old one does not exist."""
        self._lock = threading.Lock()

    def add(self, when: float, callback: Callable[[], object]) -> Timer:
        """Add a timer that is due at `when`."""
        timer = _Timer(self, callback)
        with self._lock:
            self._due[timer] = when
        return timer

    def remove(self, timer: _Timer) -> None:
        """Remove a timer, if it is still there."""
        with self._lock:
            self._due.pop(timer, None)

    def pop_due(self, now: float) -> Callable[[], object] | None:
        """Remove the earliest timer that is due by `now` and return its callback, or None."""
        with self._lock:
            timer = min(self._due, key=self._due.__getitem__, default=None)
            if timer is None or self._due[timer] > now:
                return None
            del self._due[timer]
            return timer.callback

    def next_due(self) -> float | None:
        """Return when the earliest timer is due, or None."""
        with self._lock:
            return min(self._due.values(), default=None)

    def __len__(self) -> int:
        return len(self._due)


class _Timer:
    def __init__(self, timers: Timers, callback: Callable[[], object]) -> None:
        self._timers = timers
        self.callback = callback

    def cancel(self) -> None:
        self._timers.remove(self)


class _TimerThread:
    """Fires timers on the system's monotonic clock; it starts with the first timer."""

    def __init__(self) -> None:
        self._timers = Timers()
        self.start_anew()

    def start_anew(self) -> None:
        """Serve the timers that a forked process has inherited, from its next timer on."""
        self._timers.unlock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = self._timers.add(time.monotonic() + seconds, callback)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="treenail-timer", daemon=True)
                self._thread.start()
            self._changed.notify()
        return timer

    def _serve(self) -> None:
        while True:
            callback = self._timers.pop_due(time.monotonic())
            if callback is not None:
                _fire_elsewhere(callback)
                continue
            with self._changed:
                due = self._timers.next_due()
                left = None if due is None else max(0.0, due - time.monotonic())
                self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))


_timer_thread = _TimerThread()


def _after_fork() -> None:
    workers.forget_all()
    _timer_thread.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def fire(callback: Callable[[], object]) -> None:
    """Call a timer's callback; an error in it is logged and keeps no other timer from firing."""
    try:
        callback()
    except Exception:
        logger.exception("a timer's callback failed")


def _fire_elsewhere(callback: Callable[[], object]) -> None:
    """Call a timer's callback on a worker: a listener or a journal that blocks holds up no other timer."""
    try:
        workers.start(partial(fire, callback))
    except RuntimeError:
        # No thread can be started any more; late is better than never.
        fire(callback)


def call_later(clock: Clock, seconds: float, callback: Callable[[], object]) -> Timer:
    """Call `callback` from some thread when that much time has passed.

    A clock that has a `call_later` of its own decides when that is; for any other, real time counts.
    """
    # Asked for by name: `isinstance` does not see the methods of a clock that delegates to another.
    later: Callable[[float, Callable[[], object]], Timer] | None = getattr(clock, "call_later", None)
    return _timer_thread.call_later(seconds, callback) if later is None else later(seconds, callback)

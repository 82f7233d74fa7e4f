"""Three small parts that cross threads: wake an event loop from outside, run work elsewhere, fire later.

*Waking a loop.* `threadsafe(callback)` binds a callback to the event loop that runs now, so that a timer or
an aborting thread can cancel a scope that lives in it.

*Workers.* A synchronous function cannot be interrupted, but whoever waits for it can be released. So a call
that must be stoppable runs on a worker thread while its caller waits for "done or cancelled". Workers are
daemons and are reused; one that is stuck in an abandoned handler is simply not idle, and does not keep the
process alive. An event loop can wait for a job in two steps, `is_finished_within` a moment and then
`wait_finished`: many jobs take less time than it takes to put a loop to sleep and to wake it again.

*Timers.* One daemon thread with a heap serves every timeout on the system clock, and has workers call those
that are due, so that none waits for another's listeners. A clock may bring its own
`call_later` (the fake clock does, so that advancing it fires timeouts); any other clock is asked to sleep on
a thread of its own.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import anyio
import anyio.lowlevel

from treenail.clock import Clock, SystemClock

logger = logging.getLogger("treenail.containment")


def describe(error: BaseException) -> str:
    """Return an error's class and text; the class alone if its text cannot be had."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - somebody else's __str__; what it describes still has to be dealt with
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
            # The loop is closed (asyncio) or finished (trio): nobody is left to be woken.
            pass

    return call


class Job:
    """One function handed to a worker: its result or its error, once it has run."""

    __slots__ = ("_context", "_fn", "_on_done", "error", "value")

    def __init__(self, fn: Callable[[], object], on_done: Callable[[Job], None]) -> None:
        self._fn: Callable[[], object] | None = fn
        # These are let go once they were used: whoever hears of a job's end holds it and would be held.
        self._on_done: Callable[[Job], None] | None = on_done
        self._context: contextvars.Context | None = contextvars.copy_context()
        self.value: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the function in the context of whoever made this job."""
        fn, self._fn = self._fn, None
        context, self._context = self._context, None
        if fn is not None and context is not None:
            try:
                self.value = context.run(fn)
            except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises or records it
                self.error = error

    def report(self) -> None:
        """Say that it is over, once."""
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)


class Workers:
    """Daemon threads that run one job each at a time and wait for the next."""

    def __init__(self, max_idle: int = 32) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._max_idle = max_idle

    def submit(self, fn: Callable[[], object], on_done: Callable[[Job], None]) -> Job:
        """Run `fn` on a worker at once; `on_done` is called on that worker when it has ended."""
        job = Job(fn, on_done)
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
        worker.give(job)
        return job

    def forget_all(self) -> None:
        """Begin anew in a process that was forked: it has the list of workers, but none of their threads."""
        self._lock = threading.Lock()
        self._idle = []

    def offer(self, worker: _Worker) -> bool:
        """Take a worker back that has nothing to do; False if enough are idle already."""
        with self._lock:
            if len(self._idle) >= self._max_idle:
                return False
            self._idle.append(worker)
            return True


class _Worker:
    __slots__ = ("_go", "_job", "_pool")

    def __init__(self, pool: Workers) -> None:
        self._pool = pool
        self._go = threading.Lock()
        self._go.acquire()
        self._job: Job | None = None
        threading.Thread(target=self._serve, name="treenail-worker", daemon=True).start()

    def give(self, job: Job) -> None:
        self._job = job
        self._go.release()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            job.run()
            # Idle before its caller is woken, so that the caller's next call finds this worker again.
            is_kept = self._pool.offer(self)
            try:
                job.report()
            except Exception:
                logger.exception("the end of a contained call could not be reported")
            # A waiting worker must not keep the last call's arguments and result alive.
            del job
            if not is_kept:
                return


workers = Workers()


class Handover:
    """A job between its worker and its waiter, who may leave first and hear of its end later."""

    __slots__ = ("_at_work", "_job", "_listener", "_lock", "_wake")

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._at_work = threading.Lock()
        self._at_work.acquire()
        self._wake = wake
        self._job: Job | None = None
        self._listener: Callable[[Job], None] | None = None

    def submit(self, fn: Callable[[], object]) -> None:
        """Give `fn` to a worker; `wake`, if there is one, is called when it has ended."""
        workers.submit(fn, self._finish)

    def _finish(self, job: Job) -> None:
        with self._lock:
            self._job = job
            listener = self._listener
        self._at_work.release()
        if self._wake is not None:
            self._wake()
        if listener is not None:
            listener(job)

    def listen(self, listener: Callable[[Job], None]) -> None:
        """Hear of the end of a job that was left behind.

        One whose result was taken has nothing more to tell.
        """
        with self._lock:
            if self._job is None:
                self._listener = listener
                return
            job = self._job
        listener(job)

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended."""
        with self._lock:
            return self._job is not None

    def is_finished_within(self, seconds: float) -> bool:
        """Block this thread for at most that long, and say whether the job has ended."""
        if not self._at_work.acquire(timeout=seconds):
            return False
        self._at_work.release()
        return True

    async def wait_finished(self) -> None:
        """Wait until the job has ended, letting other tasks run. One that was listening hears nothing."""
        done = anyio.Event()
        wake = threadsafe(done.set)
        self.listen(lambda _: wake())
        await done.wait()

    def result(self) -> object:
        """Return or raise what the job did; only once it is finished."""
        assert self._job is not None
        if self._job.error is not None:
            raise self._job.error
        return self._job.value


class Gate:
    """A wait for the first of several things; an `Event` at a tenth of the cost, for one waiter."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let the waiter go; opening an open gate does nothing."""
        try:
            self._lock.release()
        except RuntimeError:
            # Somebody else has opened it.
            pass

    def wait(self) -> None:
        """Block until the gate is open; an interrupt gets through."""
        self._lock.acquire()


class Timer(Protocol):
    """Something that will fire unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from firing. Cancelling twice, or after it has fired, does nothing."""
        ...


@runtime_checkable
class TimerClock(Protocol):
    """A clock that fires timers by itself, as the fake clock does when it is advanced."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` when that much time has passed on this clock."""
        ...


class _HeapTimer:
    __slots__ = ("_heap", "callback", "when")

    def __init__(self, heap: TimerHeap, when: float, callback: Callable[[], None]) -> None:
        self._heap = heap
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._heap.forget_one()


class TimerHeap:
    """Timers on one clock, in the order in which they are due. It holds no thread and reads no clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, _HeapTimer]] = []
        self._serial = itertools.count()
        self._cancelled = 0

    def add(self, when: float, callback: Callable[[], None]) -> Timer:
        """Add a timer that is due at `when`."""
        timer = _HeapTimer(self, when, callback)
        with self._lock:
            heapq.heappush(self._heap, (when, next(self._serial), timer))
        return timer

    def forget_one(self) -> None:
        """Note that a timer was cancelled; cancelled ones are swept out before they outnumber the others."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled > 64 and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if entry[2].callback is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def pop_due(self, now: float) -> Callable[[], None] | None:
        """Take out the earliest timer that is due by `now`, or None."""
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                timer = heapq.heappop(self._heap)[2]
                callback, timer.callback = timer.callback, None
                if callback is not None:
                    return callback
                self._cancelled = max(0, self._cancelled - 1)
        return None

    def next_due(self) -> float | None:
        """Return when the earliest timer that still counts is due, or None."""
        with self._lock:
            while self._heap and self._heap[0][2].callback is None:
                heapq.heappop(self._heap)
                self._cancelled = max(0, self._cancelled - 1)
            return self._heap[0][0] if self._heap else None

    def unlock(self) -> None:
        """Make a lock of its own for a process that was forked, where whoever held it does not exist."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(1 for entry in self._heap if entry[2].callback is not None)


class _TimerThread:
    """Fires a heap's timers on the system clock; starts with the first timer."""

    def __init__(self) -> None:
        self._heap = TimerHeap()
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._sleeping_until: float | None = None
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        when = self._clock.monotonic() + seconds
        timer = self._heap.add(when, callback)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="treenail-timer", daemon=True)
                self._thread.start()
            elif self._sleeping_until is None or when < self._sleeping_until:
                self._changed.notify()
        return timer

    def start_anew(self) -> None:
        """Serve the timers that a forked process has inherited, from its next timer on."""
        self._heap.unlock()
        self._changed = threading.Condition()
        self._thread = None

    def _serve(self) -> None:
        while True:
            callback = self._heap.pop_due(self._clock.monotonic())
            if callback is not None:
                _fire_elsewhere(callback)
                continue
            with self._changed:
                due = self._heap.next_due()
                self._sleeping_until = due
                # No platform can wait for longer than some maximum; after it, look again.
                left = None if due is None else min(max(0.0, due - self._clock.monotonic()), _LONGEST_WAIT_S)
                self._changed.wait(left)


_timer_thread = _TimerThread()

_LONGEST_WAIT_S = 86_400.0


def _after_fork() -> None:
    workers.forget_all()
    _timer_thread.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def fire(callback: Callable[[], None]) -> None:
    """Call a timer's callback; an error in it is logged and keeps no other timer from firing."""
    try:
        callback()
    except Exception:
        logger.exception("a containment timer's callback failed")


def _fire_elsewhere(callback: Callable[[], None]) -> None:
    """Call a timer's callback on a worker: a listener or a journal that blocks holds up no other timer."""
    try:
        workers.submit(callback, _report_timer)
    except RuntimeError:
        # No thread can be started any more; late is better than never.
        fire(callback)


def _report_timer(job: Job) -> None:
    if job.error is not None:
        logger.error("a containment timer's callback failed", exc_info=job.error)


class _SleepTimer:
    """A timer on a clock that can only sleep: one thread that asks the clock to."""

    def __init__(self, clock: Clock, seconds: float, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        self._clock = clock
        self._due = clock.monotonic() + seconds
        threading.Thread(target=self._serve, name="treenail-sleep-timer", daemon=True).start()

    def cancel(self) -> None:
        self._callback = None

    def _serve(self) -> None:
        while self._callback is not None:
            before = self._clock.monotonic()
            remaining = self._due - before
            if remaining <= 0:
                fire(self._callback)
                return
            self._clock.sleep(remaining)
            if self._clock.monotonic() <= before:
                # The clock stands still, so the time never comes.
                return


def call_later(clock: Clock, seconds: float, callback: Callable[[], None]) -> Timer:
    """Call `callback` from some thread when that much time has passed on `clock`."""
    if isinstance(clock, SystemClock):
        return _timer_thread.call_later(seconds, callback)
    # Asked for by name: `isinstance` does not see the methods of a clock that passes requests on to another.
    later: Callable[[float, Callable[[], None]], Timer] | None = getattr(clock, "call_later", None)
    if later is not None:
        return later(seconds, callback)
    return _SleepTimer(clock, seconds, callback)

"""A clock that stands still until a test advances it, and then wakes everybody who is due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import anyio

from treenail.containment import Timer, fire, threadsafe
from treenail.errors import UsageError

_DEFAULT_START = datetime(2026, 1, 1, tzinfo=UTC)


class Timers:
    """Callbacks, by the time when they are due. It holds no thread and reads no clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[_Timer, float] = {}

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


class FakeClock:
    """Time under the test's control.

    `advance(seconds)` moves both kinds of time and wakes, in the order in which they are due, the threads in
    `sleep`, the tasks in `async_sleep` and the timers set with `call_later`. Nothing ever waits for real
    time. Threads and tasks may share one clock.
    """

    def __init__(self, start: datetime = _DEFAULT_START) -> None:
        if start.tzinfo is None:
            raise UsageError("FakeClock needs an aware start time; pass one with tzinfo, for instance UTC")
        self._start = start.astimezone(UTC)
        self._elapsed = 0.0
        self._timers = Timers()
        self._changed = threading.Condition()
        self._sleepers = 0

    def now(self) -> datetime:
        """Return the current fake time, in UTC."""
        return self._start + timedelta(seconds=self._elapsed)

    def utcnow(self) -> datetime:
        """Return the current fake time; the same as `now()`."""
        return self.now()

    def monotonic(self) -> float:
        """Return how many seconds this clock has been advanced."""
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Block this thread until the clock has been advanced that far."""
        if seconds <= 0:
            return
        gate = threading.Event()
        timer = self.call_later(seconds, gate.set)
        try:
            with self._sleeping():
                gate.wait()
        finally:
            timer.cancel()

    async def async_sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced that far, letting other tasks run."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        gate = anyio.Event()
        timer = self.call_later(seconds, threadsafe(gate.set))
        try:
            with self._sleeping():
                await gate.wait()
        finally:
            timer.cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` from `advance` when the clock has been advanced that far."""
        timer = self._timers.add(self._elapsed + seconds, callback)
        with self._changed:
            self._changed.notify_all()
        return timer

    def advance(self, seconds: float) -> None:
        """Let that much time pass and wake everybody who became due.

        A timer sees the time that it asked for.
        """
        if seconds < 0:
            raise UsageError(f"time never goes back; advance by zero or more seconds, not {seconds!r}")
        target = self._elapsed + seconds
        while True:
            due = self._timers.next_due()
            if due is None or due > target:
                break
            self._elapsed = max(self._elapsed, due)
            callback = self._timers.pop_due(self._elapsed)
            if callback is not None:
                fire(callback)
        self._elapsed = max(self._elapsed, target)

    @property
    def sleepers(self) -> int:
        """How many threads and tasks sleep on this clock now."""
        return self._sleepers

    @property
    def timers(self) -> int:
        """How many timers are set, those of sleepers included."""
        return len(self._timers)

    def wait_for_timers(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until at least `count` timers are set, sleepers included; a thread's way to meet another one.

        `timeout_s` is real time and only guards against a test that would hang.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._timers) >= count, timeout_s):
                raise UsageError(
                    f"{len(self._timers)} timers were set on the fake clock after {timeout_s} real seconds; "
                    f"{count} were expected"
                )

    @contextmanager
    def _sleeping(self) -> Iterator[None]:
        """Count one sleeper for as long as the block lasts."""
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._sleepers += change
            self._changed.notify_all()

"""Calls with effects run one at a time per session, whether they come from threads or from tasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

import anyio
from anyio.from_thread import run_sync
from anyio.lowlevel import current_token


class Gate:
    """A lock with a fair queue, for threads and tasks alike."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[Callable[[], None]] = deque()

    def _enter(self, wake: Callable[[], None]) -> bool:
        """Take the gate if it is free, else queue up."""
        with self._lock:
            if not self._held:
                self._held = True
                return True
            self._waiting.append(wake)
            return False

    def acquire(self) -> None:
        """Wait for the gate, blocking this thread."""
        turn = threading.Event()
        if self._enter(turn.set):
            return
        try:
            turn.wait()
        except BaseException:
            self._give_up(turn.set, turn.is_set())
            raise

    async def acquire_async(self) -> None:
        """Wait for the gate, letting other tasks run."""
        turn = anyio.Event()
        token = current_token()
        granted = threading.Event()

        def wake() -> None:
            granted.set()
            run_sync(turn.set, token=token)

        if self._enter(wake):
            return
        try:
            await turn.wait()
        except BaseException:
            self._give_up(wake, granted.is_set())
            raise

    def _give_up(self, wake: Callable[[], None], granted: bool) -> None:
        with self._lock:
            if wake in self._waiting:
                self._waiting.remove(wake)
                return
        if granted:
            self.release()

    def release(self) -> None:
        """Let the next one in."""
        with self._lock:
            if not self._waiting:
                self._held = False
                return
            wake = self._waiting.popleft()
        wake()


_gates: WeakValueDictionary[Hashable, Gate] = WeakValueDictionary()
_gates_lock = threading.Lock()


def gate_of(key: Hashable) -> Gate:
    """Return the gate that everybody who works on the same thing shares."""
    with _gates_lock:
        found = _gates.get(key)
        if found is None:
            found = _gates[key] = Gate()
        return found

"""Calls with effects run one at a time, whether they come from threads or from tasks.

A `Gate` stands before something that one call at a time may change: a session, a
workspace. Whoever wants in takes a `Turn`. Who holds the gate is written in one place
(`Gate._holder`), and giving a turn back can be repeated, so that an interrupt at any
moment leaves nothing half taken: whoever catches it gives the turn back again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import anyio
import anyio.lowlevel

from treenail.containment.cancel import CancellationToken
from treenail.containment.threads import call_later, threadsafe
from treenail.errors import UsageError
from treenail.state.budget import Deadline
from treenail.workspace.base import FilesystemSnapshot


class Gate:
    """Lets one in at a time, in the order in which they came."""

    __slots__ = ("__weakref__", "_holder", "_lock", "_waiting", "boundary", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.boundary: FilesystemSnapshot | None = None
        """Where the workspace behind this gate was when the call inside began."""
        # Re-entrant, because a turn may be forgotten, and then leave, at any moment.
        self._lock = threading.RLock()
        # A weak reference: a call that was begun and forgotten does not keep the others out for ever.
        self._holder: weakref.ref[Turn] | None = None
        self._waiting: deque[Turn] = deque()

    def _inside(self) -> Turn | None:
        holder = self._holder  # Forgetting a turn, which may happen at any moment, sets it.
        return None if holder is None else holder()

    def _enter(self, turn: Turn, *, queue: bool) -> bool:
        """Let a turn in if the gate is free; else, if it wants to, let it queue up."""
        with self._lock:
            # Whoever is inside cannot be forgotten while this variable holds it.
            holder = self._holder
            inside = None if holder is None else holder()
            if inside is None:
                self._holder = weakref.ref(turn, self._forget)
                return True
            if queue and inside is not turn:
                self._waiting.append(turn)
            return inside is turn

    def _forget(self, holder: weakref.ref[Turn]) -> None:
        """Let the next one in after a turn that was forgotten."""
        with self._lock:
            if self._holder is holder:
                self._pass_on()
        self._wake()

    def _leave(self, turn: Turn) -> None:
        """Let a turn go, from inside or from the queue. Calling it again does nothing."""
        with self._lock:
            holder = self._holder
            if holder is not None and holder() is turn:
                if self._waiting:
                    self._pass_on()
                else:
                    self._holder = None
            elif turn in self._waiting:
                self._waiting.remove(turn)
        if self._holder is not None:
            self._wake()

    def _pass_on(self) -> None:
        self._holder = weakref.ref(self._waiting.popleft(), self._forget) if self._waiting else None

    def _wake(self) -> None:
        # Whoever is inside is woken each time: the one that let it in may have been interrupted right here.
        holder = self._holder
        inside = None if holder is None else holder()
        if inside is not None:
            inside.wake()


class Turn:
    """One caller's way through a gate."""

    __slots__ = ("__weakref__", "gate", "wake")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.wake: Callable[[], object] = _nothing

    @property
    def is_held(self) -> bool:
        """Whether this turn is the one inside."""
        return self.gate._inside() is self

    def take_nowait(self) -> bool:
        """Go in if the gate is free. Says whether it was."""
        return self.gate._enter(self, queue=False)

    def take(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Wait until it is this turn, blocking the thread.

        Raises `CancelledByToken` or `DeadlineExceededError` if that comes first, and `UsageError`
        where waiting would block an event loop.
        """
        if self.take_nowait():
            return
        if is_in_event_loop():
            raise UsageError(
                f"{self.gate.name} is held by another call, and waiting for it here would block the event "
                "loop; use the async face (await aexecute, await abegin)"
            )
        woken = threading.Event()
        self.wake = woken.set
        if self.gate._enter(self, queue=True):
            return
        forget = token.on_cancel(woken.set)
        timer = None
        if deadline is not None:
            timer = call_later(deadline.clock, max(deadline.remaining().total_seconds(), 0), woken.set)
        try:
            woken.wait()
        finally:
            forget()
            if timer is not None:
                timer.cancel()
        self._check(token, deadline)

    async def take_async(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Wait until it is this turn, letting other tasks run. Raises what `take` raises."""
        if self.take_nowait():
            return
        woken = anyio.Event()
        wake = threadsafe(woken.set)
        self.wake = wake
        if self.gate._enter(self, queue=True):
            return
        forget = token.on_cancel(wake)
        timer = None
        if deadline is not None:
            timer = call_later(deadline.clock, max(deadline.remaining().total_seconds(), 0), wake)
        try:
            await woken.wait()
        finally:
            forget()
            if timer is not None:
                timer.cancel()
        self._check(token, deadline)

    def _check(self, token: CancellationToken, deadline: Deadline | None) -> None:
        if self.is_held:
            return
        token.raise_if_cancelled()
        if deadline is not None:
            deadline.raise_if_passed(f"waiting for {self.gate.name}")
        raise AssertionError("a turn was woken without a reason")

    def give_back(self) -> None:
        """Let the next one in. Calling it again, or without having come in, does nothing."""
        self.gate._leave(self)


class Turns:
    """Ways through several gates, taken in one order by everybody, so that nobody waits in a circle."""

    __slots__ = ("_turns",)

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._turns = list(map(Turn, gates))

    def take(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Go through all gates, blocking the thread."""
        for each in self._turns:
            if not each.gate._enter(each, queue=False):
                each.take(token, deadline)

    async def take_async(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Go through all gates, letting other tasks run."""
        for each in self._turns:
            if not each.gate._enter(each, queue=False):
                await each.take_async(token, deadline)

    def give_back(self) -> None:
        """Leave all gates. Calling it again does nothing."""
        for each in reversed(self._turns):
            each.gate._leave(each)


def _nothing() -> None:
    return


def is_in_event_loop() -> bool:
    """Say whether this thread runs an event loop right now, which blocking would stop."""
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return False
    return True


def cancellations() -> int:
    """Count how often the task that runs here was cancelled and nobody took it back.

    Ctrl-C cancels a task of asyncio once. One that catches this and goes on as if nothing had happened has
    lost it, but for this number. Elsewhere a cancellation comes again until it is heeded: 0.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()


def heed_cancellations(before: int) -> None:
    """Cancel the task if that was done since `cancellations()` was `before`, and foreign code kept it."""
    # Whoever cancels a scope around us cancels it again and again: only a task's own can be lost.
    if cancellations() > before and anyio.current_effective_deadline() != -math.inf:
        raise asyncio.CancelledError("a cancellation was caught, and not passed on")


_gates: weakref.WeakValueDictionary[Hashable, Gate] = weakref.WeakValueDictionary()
_gates_lock = threading.Lock()


def gate_of(key: Hashable, name: str) -> Gate:
    """Return the gate that everybody who works on the same thing shares."""
    with _gates_lock:
        found = _gates.get(key)
        if found is None:
            found = _gates[key] = Gate(name)
        return found


def foremost(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception of a group that counts: the first that is no cancellation, if there is one."""
    cancelled = anyio.get_cancelled_exc_class()
    counting = several.subgroup(lambda each: not isinstance(each, BaseExceptionGroup | cancelled)) or several
    found: BaseException = counting
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found

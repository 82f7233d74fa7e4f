"""Calls with effects run one at a time, whether they come from threads or from tasks.

A `Gate` guards something that one call at a time may change: a session, a workspace. A caller
enters with a `Ticket`. Who is inside is written in one place (`Gate.holder`), and giving a ticket
back can be repeated, so that an interrupt at any moment leaves nothing half taken: the code that
catches the interrupt gives the ticket back again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import anyio

from treenail.containment import CancellationToken, call_later, threadsafe
from treenail.state import Deadline
from treenail.workspace import FilesystemSnapshot


class Gate:
    """Lets one ticket in at a time, in the order in which they came."""

    __slots__ = ("__weakref__", "_holder", "_lock", "_waiting", "boundary", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.boundary: FilesystemSnapshot | None = None
        """Where the workspace behind this gate was when the call inside began."""
        # Re-entrant, because a ticket may be garbage collected, and then leave, at any moment.
        self._lock = threading.RLock()
        # A weak reference: a call that was begun and forgotten does not lock the others out for ever.
        self._holder: weakref.ref[Ticket] | None = None
        self._waiting: deque[Ticket] = deque()

    @property
    def holder(self) -> Ticket | None:
        """The ticket that is inside."""
        holder = self._holder  # It is set when a ticket is collected, which may happen at any moment.
        return None if holder is None else holder()

    def enter(self, ticket: Ticket, *, queue: bool) -> bool:
        """Admit a ticket if the gate is free, else queue it if wanted. Return whether it was admitted."""
        with self._lock:
            inside = self.holder  # It cannot be collected while this variable holds it.
            if inside is None:
                self._holder = weakref.ref(ticket, self._forget)
                return True
            if queue and inside is not ticket:
                self._waiting.append(ticket)
            return inside is ticket

    def _forget(self, holder: weakref.ref[Ticket]) -> None:
        """Let the next ticket in after one that was collected."""
        with self._lock:
            if self._holder is holder:
                self._admit_next()
        self._wake()

    def leave(self, ticket: Ticket) -> None:
        """Let a ticket go, from inside or from the queue. Calling it again does nothing."""
        with self._lock:
            if self.holder is ticket:
                self._admit_next()
            elif ticket in self._waiting:
                self._waiting.remove(ticket)
        self._wake()

    def _admit_next(self) -> None:
        self._holder = weakref.ref(self._waiting.popleft(), self._forget) if self._waiting else None

    def _wake(self) -> None:
        # The holder is woken each time: the call that let it in may have been interrupted right here.
        inside = self.holder
        if inside is not None:
            inside.wake()


class Ticket:
    """One caller's way through a gate."""

    __slots__ = ("__weakref__", "gate", "wake")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.wake: Callable[[], object] = _nothing

    def take_nowait(self) -> bool:
        """Enter if the gate is free. Says whether it was."""
        return self.gate.enter(self, queue=False)

    async def take(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Wait until the gate lets this ticket in.

        Raises `CancelledByToken` or `DeadlineExceededError` if that comes first.
        """
        if self.take_nowait():
            return
        woken = anyio.Event()
        self.wake = threadsafe(woken.set)
        if self.gate.enter(self, queue=True):
            return
        forget = token.on_cancel(self.wake)
        timer = None
        if deadline is not None:
            timer = call_later(deadline.clock, max(deadline.remaining().total_seconds(), 0), self.wake)
        try:
            await woken.wait()
        finally:
            forget()
            if timer is not None:
                timer.cancel()
        if self.gate.holder is self:
            return
        token.raise_if_cancelled()
        if deadline is not None:
            deadline.raise_if_passed(f"waiting for {self.gate.name}")
        raise AssertionError("a ticket was woken without a reason")

    def give_back(self) -> None:
        """Let the next ticket in. Calling it again, or without having entered, does nothing."""
        self.gate.leave(self)


class Tickets:
    """Tickets for several gates, taken in the same order by every call, so that no two wait in a circle."""

    __slots__ = ("_tickets",)

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._tickets = [Ticket(each) for each in gates]

    def take_nowait(self) -> bool:
        """Enter all gates if they are free. Says whether they were; `give_back` leaves those entered."""
        return all(each.take_nowait() for each in self._tickets)

    async def take(self, token: CancellationToken, deadline: Deadline | None) -> None:
        """Enter all gates, waiting for each."""
        for each in self._tickets:
            await each.take(token, deadline)

    def give_back(self) -> None:
        """Leave all gates. Calling it again does nothing."""
        for each in reversed(self._tickets):
            each.give_back()


def _nothing() -> None:
    return


_gates: weakref.WeakValueDictionary[Hashable, Gate] = weakref.WeakValueDictionary()
_gates_lock = threading.Lock()


def gate_of(key: Hashable, name: str) -> Gate:
    """Return the gate that all calls which change the same thing share."""
    with _gates_lock:
        found = _gates.get(key)
        if found is None:
            found = _gates[key] = Gate(name)
        return found

"""The seam to an engine, which wakes workers for runs.

Theory of operation
-------------------
An engine carries ids and nothing else. It calls a worker's handler with the id of a run, **at least once**:
after a crash, a lost answer or a restart of the engine it may call it again, also while another worker is at
work on the same run. The run's log says whether there is anything to do, and its lease decides who does it.

The handler says what is next by what it returns: nothing more (`Done`), again at a certain time (`WakeAt`),
or again when an event was announced (`WakeOn`). If it raises, it is called again after a while.

A lost wake-up is the sweeper's affair: it finds unfinished runs in the log that nobody holds, and submits
them again (`treenail.engine.sweeper`).

`treenail.testing.dispatcher.DispatcherConformance` checks an implementation against these promises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol
from uuid import UUID

from treenail.containment import CancellationToken


@dataclass(frozen=True, slots=True)
class Done:
    """There is nothing more to do, until the run is submitted again."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call the handler again at this time, or soon after."""

    at: datetime


@dataclass(frozen=True, slots=True)
class WakeOn:
    """Call the handler again when this event is announced, at once if it already was.

    Each wait has an event of its own: one that was announced stays announced.
    """

    event: str


Outcome = Done | WakeAt | WakeOn
"""What a handler wants next."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of the handler."""

    run_id: UUID
    queue: str
    attempt: int = 1
    """How often the engine has tried, failures and lost workers included."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    """Is cancelled when the engine is told to cancel the run."""


Handler = Callable[[Job], Outcome]


@dataclass(frozen=True, slots=True)
class Serving:
    """How a worker serves."""

    worker: str
    """The worker's name, for people who look at the engine."""
    queues: Sequence[str] = ("default",)
    concurrency: int = 4
    """How many handlers run at the same time."""
    lease_s: float = 10.0
    """After how long without a sign of life another worker gets its runs."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set it to take no more runs."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Is set once runs are taken."""


class Dispatcher(Protocol):
    """Wakes workers for runs, at least once."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    @property
    def is_transactional(self) -> bool:
        """Whether `submit` and `wake` become part of the log's transaction (`PostgresLog.together`)."""
        ...

    def submit(self, queue: str, run_ids: Sequence[UUID]) -> None:
        """Have the handler called for each of these runs."""
        ...

    def wake(self, queue: str, event: str) -> None:
        """Announce an event: handlers that wait for it, or will wait for it, are called again."""
        ...

    def cancel(self, queue: str, run_id: UUID) -> None:
        """Tell the handler that is at work on a run, and drop what would have it called later."""
        ...

    def serve(self, handler: Handler, serving: Serving) -> None:
        """Call the handler for submitted runs until `serving.stop` is set and all handlers have returned.

        What was not begun by then is left to others.
        """
        ...

"""The live channel: what a turn shows while it runs. None of it is ever logged.

Theory of operation
-------------------
A turn publishes to a `LiveFeed`; screens subscribe to it. Publishing never waits and never raises. Each
subscriber has its own bounded queue, so a slow, stuck or dead subscriber costs memory up to that bound and
harms neither the turn nor the other subscribers.

A full queue drops its oldest entry of the same sort: text deltas push out text deltas, other events push out
other events, so a flood of deltas never hides that a tool finished. The subscriber gets a count of what it
missed (`Lagged`) before the next entry. Nothing is lost: the log has the whole text, and a screen that fell
behind reads it there.

A subscription is read by an event loop (`async for`) or by a thread (`for`). It ends when it is closed, when
the feed is closed, or when nothing refers to it any more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

import anyio

from treenail.containment import threadsafe
from treenail.conversation import ContextPressure
from treenail.errors import UsageError
from treenail.log import Channel
from treenail.providers import ModelEvent, ReasoningDelta, TextDelta
from treenail.state import event
from treenail.turns.states import TurnState

_logger = logging.getLogger("treenail.turns")

DEFAULT_CAPACITY = 1024
"""How many deltas, and how many other events, wait for a subscriber at most."""

Status = Literal[
    "thinking",
    "running_tools",
    "judging",
    "compacting",
    "waiting",
    "done",
    "error",
    "interrupted",
    "held",
]
"""What a turn is doing. The last four mean that it is over."""


@event(name="treenail.live.StatusChanged", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The turn's status changed. Later events in the feed belong to this turn and step."""

    status: Status
    turn_id: str = ""
    step: int = 0
    """Which answer of the model in this turn is being made, or was made last: 1, 2, 3 ..."""
    detail: str = ""


@event(name="treenail.live.ToolCallBegan", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """A tool is being run."""

    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@event(name="treenail.live.ToolProgressed", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class ToolProgressed:
    """A tool that runs elsewhere says how far it is."""

    call_id: str
    done: float
    total: float | None = None
    message: str = ""


@event(name="treenail.live.ToolCallOutput", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class ToolCallOutput:
    """A tool that is being run has written something."""

    call_id: str
    text: str


@event(name="treenail.live.ToolCallFinished", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """A tool has ended, and what it changed was kept or undone. The log has it already."""

    call_id: str
    name: str
    success: bool
    summary: str = ""
    elapsed_ms: float = 0.0
    outcome: str = ""
    """As `ToolInvoked.outcome`; `held` if it waits for a person; `interrupted` if it was cut off."""
    exit_code: int | None = None
    """Of the command that it ran."""
    added: int | None = None
    """How many lines it added to files; None if that was not looked at."""
    removed: int | None = None
    tail: str = ""
    """The last lines of what it said, if it failed or its command did."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One step of a plan, for display."""

    content: str
    status: str = "pending"
    priority: str = ""


@event(name="treenail.live.PlanChanged", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The agent's plan changed to this."""

    entries: tuple[PlanEntry, ...] = ()


@event(name="treenail.live.UsageChanged", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class UsageChanged:
    """What the turn has used so far, and what its run may use."""

    steps: int = 0
    tokens: int = 0
    cost_usd: float | None = None
    elapsed_s: float = 0.0
    model: str = ""
    spent_usd: float | None = None
    """What the whole run has cost, with its earlier turns, judges and children."""
    max_cost_usd: float | None = None
    max_steps: int | None = None


@event(name="treenail.live.FeedbackGiven", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class FeedbackGiven:
    """A judge gave feedback; the log has it in full."""

    source: str
    summary: str
    severity: str = "info"


@event(name="treenail.live.TurnFinished", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class TurnFinished:
    """The turn has an ending, and it is in the log."""

    turn_id: str
    state: TurnState
    error_kind: str | None = None
    next_actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lagged:
    """The number of events dropped here because the subscriber was too slow."""

    count: int


LiveEvent = (
    ModelEvent
    | StatusChanged
    | ToolCallBegan
    | ToolProgressed
    | ToolCallOutput
    | ToolCallFinished
    | PlanChanged
    | ContextPressure
    | UsageChanged
    | FeedbackGiven
    | TurnFinished
)
"""What a feed carries: what the model says as it says it, and what the turn does."""

_ENDED: dict[TurnState, Status] = {
    TurnState.COMPLETED: "done",
    TurnState.INTERRUPTED: "interrupted",
    TurnState.HELD: "held",
}


def status_of(state: TurnState) -> Status:
    """Return the status that a turn's ending is shown as: only a clean answer is `done`."""
    return _ENDED.get(state, "error")


class Subscription:
    """One subscriber's end of a feed. Iterate over it, from an event loop or from a thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._deltas: deque[tuple[int, LiveEvent]] = deque()
        self._others: deque[tuple[int, LiveEvent]] = deque()
        self._count = 0
        self._lost = 0
        self._closed = False
        self._is_idle = False
        """Whether a thread has read everything, and waits for more."""
        self._wake: Callable[[], None] | None = None

    def close(self) -> None:
        """Accept no more events. A reader that waits is woken."""
        with self._changed:
            self._closed = True
            self._tell()

    def _put(self, published: LiveEvent) -> None:
        with self._changed:
            if self._closed:
                return
            is_delta = isinstance(published, TextDelta | ReasoningDelta | ToolCallOutput)
            queue = self._deltas if is_delta else self._others
            if len(queue) >= self._capacity:
                queue.popleft()
                self._lost += 1
            self._count += 1
            queue.append((self._count, published))
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _pop(self) -> LiveEvent | Lagged | None:
        if self._lost:
            lost, self._lost = self._lost, 0
            return Lagged(lost)
        queues = [each for each in (self._deltas, self._others) if each]
        if not queues:
            return None
        return min(queues, key=lambda queue: queue[0][0]).popleft()[1]

    def get_nowait(self) -> LiveEvent | Lagged | None:
        """Return the next event, or None if there is none right now."""
        with self._changed:
            return self._pop()

    def __iter__(self) -> Iterator[LiveEvent | Lagged]:
        """Yield each event, waiting in this thread, until the subscription is closed."""
        while True:
            with self._changed:
                found = self._pop()
                while found is None:
                    if self._closed:
                        return
                    self._is_idle = True
                    self._changed.notify_all()
                    self._changed.wait()
                    found = self._pop()
                self._is_idle = False
            yield found

    def wait_read(self, timeout_s: float) -> bool:
        """Wait until the thread that iterates has dealt with everything so far; say whether it has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (self._is_idle and not self._deltas and not self._others), timeout_s
            )

    async def get(self) -> LiveEvent | Lagged | None:
        """Return the next event, waiting for it in this event loop; None when the subscription is closed."""
        while True:
            arrived = anyio.Event()
            with self._changed:
                found = self._pop()
                if found is not None or self._closed:
                    return found
                self._wake = threadsafe(arrived.set)
            await arrived.wait()

    async def __aiter__(self) -> AsyncIterator[LiveEvent | Lagged]:
        """Yield each event, waiting in this event loop, until the subscription is closed."""
        while (found := await self.get()) is not None:
            yield found


class LiveFeed:
    """Carries a turn's events to its subscribers. Any thread may publish and subscribe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: a subscription that nothing refers to any more ends.
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._closed = False

    def publish(self, published: LiveEvent) -> None:
        """Send an event to every subscriber. It never waits and never raises: it can be a turn's `watch`."""
        try:
            with self._lock:
                subscriptions = list(self._subscriptions)
            for each in subscriptions:
                each._put(published)
        except Exception:
            # A screen is not worth a turn, whatever is wrong with it.
            _logger.exception("a live event could not be shown")

    def subscribe(self, *, capacity: int = DEFAULT_CAPACITY) -> Subscription:
        """Subscribe to what is published from now on. Keep the subscription: it ends when it is dropped."""
        if capacity < 1:
            raise UsageError(f"a subscription needs room for at least one event, not {capacity}")
        made = Subscription(capacity)
        with self._lock:
            if self._closed:
                made.close()
            self._subscriptions.add(made)
        return made

    def close(self) -> None:
        """End every subscription after what waits in it was read."""
        with self._lock:
            self._closed = True
            subscriptions = list(self._subscriptions)
        for each in subscriptions:
            each.close()

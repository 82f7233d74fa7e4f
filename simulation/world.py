"""The simulated world: time, chance, faults, processes, and the trace of what happened."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio

_START = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """The process was killed; nothing of it reaches the world any more."""


class Stop(Exception):
    """The simulation cannot go on, or took too long."""


class _Selector(selectors.SelectSelector):
    """Waits in simulated time: what an event loop would sleep is added to its clock at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Stop("every task waits, and no timer is set: the run would hang for ever")
        self.now_s += max(timeout, 0.0)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the simulation's."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self._waits.now_s


@dataclass(frozen=True, slots=True)
class SimulatedClock:
    """A `Clock` on the event loop's time."""

    loop: SimulatedLoop

    def now(self) -> datetime:
        """Return the simulated time of day."""
        return _START + timedelta(seconds=self.loop.time())

    def utcnow(self) -> datetime:
        """Return the simulated time of day."""
        return self.now()

    def monotonic(self) -> float:
        """Return the simulated time in seconds."""
        return self.loop.time()

    def sleep(self, seconds: float) -> None:
        """Refuse: a thread that sleeps would stop the world."""
        raise Stop(f"something wants to sleep {seconds} s in a thread")

    async def async_sleep(self, seconds: float) -> None:
        """Let simulated time pass."""
        await anyio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call back when simulated time has passed."""
        return self.loop.call_later(seconds, callback)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that struck: which kind, where, and the how-many-eth chance at that place it was."""

    fault: str
    place: str
    number: int

    def __str__(self) -> str:
        return f"{self.fault}@{self.place}#{self.number}"


@dataclass
class World:
    """Everything outside the real code, and the record of what happened to it."""

    seed: int
    spared: frozenset[str] = frozenset()
    """Faults that do not strike, although the seed says so: what shrinking leaves out."""
    loop: SimulatedLoop = field(default_factory=SimulatedLoop)
    trace: list[str] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Which fault struck in which place."""
    effects: Counter[str] = field(default_factory=Counter)
    """How often each effect outside happened, by the key of its call."""
    delivered: Counter[str] = field(default_factory=Counter)
    spent_usd: Counter[str] = field(default_factory=Counter)
    """What the models' vendor has charged, by run."""
    requests: Counter[str] = field(default_factory=Counter)
    stops: dict[tuple[str, str], str] = field(default_factory=dict)
    """How each answer of the model ended, by run and text."""
    problems: list[str] = field(default_factory=list)
    _chances: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.clock = SimulatedClock(self.loop)

    def rng(self, *names: object) -> random.Random:
        """Return random numbers of their own for a place: what happens elsewhere does not change them."""
        return random.Random(":".join(map(str, (self.seed, *names))))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.time():10.3f}  {text}")

    def strikes_now(self, fault: str, place: str, chance: float) -> bool:
        """Say whether a fault strikes here and now."""
        number = self._chances[fault, place] = self._chances[fault, place] + 1
        if self.rng("fault", fault, place, number).random() >= chance:
            return False
        strike = Strike(fault, place, number)
        if str(strike) in self.spared:
            return False
        self.strikes.append(strike)
        self.met[fault, place.partition("/")[0]] += 1
        self.note(f"FAULT {strike}")
        return True


@dataclass
class Life:
    """One process: it is under way, stopped, or dead."""

    world: World
    name: str
    task: asyncio.Task[Any] | None = None
    is_dead: bool = False
    was_stopped: bool = False
    wakes: asyncio.Event | None = None
    """Set while it is stopped; whoever waits for it goes on when it is woken."""

    def check(self) -> None:
        """Raise `Killed` if this process is dead."""
        if self.is_dead:
            raise Killed(self.name)

    def kill(self) -> None:
        """End the process where it is."""
        if not self.is_dead:
            self.world.note(f"{self.name} is killed")
            self.is_dead = True
            if self.task is not None and self.task is not _current():
                self.task.cancel()

    def may_die(self, place: str, chance: float = 0.015) -> None:
        """Be killed here, if the seed says so."""
        self.check()
        if self.world.strikes_now("kill", place, chance):
            self.kill()
            raise Killed(self.name)

    async def pause(self, place: str, seconds: float, chance: float = 0.02) -> None:
        """Wait; perhaps be stopped meanwhile for so long that another process takes over."""
        await anyio.sleep(seconds)
        self.check()
        if self.world.strikes_now("stop", place, chance):
            self.wakes, self.was_stopped = asyncio.Event(), True
            try:
                await anyio.sleep(self.world.rng("stopped", self.name, place).uniform(5, 60))
            finally:
                self.wakes.set()
                self.wakes = None
            self.world.note(f"{self.name} wakes up")
            self.check()

    @property
    def is_stopped(self) -> bool:
        """Whether it does nothing, not even renew its leases."""
        return self.wakes is not None


def _current() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None

"""Time and identity, injected.

Nothing in Treenail reads the wall clock or makes an id on its own: a `Clock` is
passed in, so that tests never sleep and a run can be repeated. The clock that
tests advance by hand is `treenail.testing.FakeClock`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Protocol, cast, runtime_checkable
from uuid import UUID, uuid4

import anyio


@runtime_checkable
class WallClock(Protocol):
    """A clock that says what time it is, which is all that most parts need."""

    def now(self) -> datetime:
        """Return the current UTC time, aware of its zone."""
        ...


@runtime_checkable
class Clock(WallClock, Protocol):
    """A source of time. Wall time is always UTC and aware; monotonic time never goes back."""

    def utcnow(self) -> datetime:
        """Return the current UTC time; the same as `now()`."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread for that long."""
        ...

    async def async_sleep(self, seconds: float) -> None:
        """Wait for that long, letting other tasks run."""
        ...


@dataclass(slots=True, frozen=True)
class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """Return the current UTC time."""
        return datetime.now(UTC)

    def utcnow(self) -> datetime:
        """Return the current UTC time; the same as `now()`."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block this thread for that long."""
        time.sleep(seconds)

    async def async_sleep(self, seconds: float) -> None:
        """Wait for that long, letting other tasks run."""
        await anyio.sleep(seconds)


@dataclass(slots=True, frozen=True)
class FixedClock:
    """A clock that stands still; sleeping on it returns at once."""

    time: datetime

    def now(self) -> datetime:
        """Return the fixed time."""
        return self.time

    def utcnow(self) -> datetime:
        """Return the fixed time."""
        return self.time

    def monotonic(self) -> float:
        """Return the fixed time in seconds."""
        return self.time.timestamp()

    def sleep(self, seconds: float) -> None:
        """Return at once: time stands still."""

    async def async_sleep(self, seconds: float) -> None:
        """Return at once, after letting other tasks run."""
        await anyio.lowlevel.checkpoint()


@dataclass(slots=True, frozen=True)
class _CompletedClock(SystemClock):
    """A clock of the caller's for the time of day, and the machine's own for everything else."""

    wall: WallClock

    def now(self) -> datetime:
        """Return the caller's time."""
        return self.wall.now()

    def utcnow(self) -> datetime:
        """Return the caller's time."""
        return self.wall.now()


def whole_clock(clock: WallClock) -> Clock:
    """Return a clock as it is, or with the machine's own monotonic time and sleep if it has only `now`."""
    return cast(Clock, clock) if hasattr(clock, "monotonic") else _CompletedClock(clock)


_ids: ContextVar[Random | None] = ContextVar("treenail_ids", default=None)


@contextmanager
def ids_from(source: Random) -> Iterator[None]:
    """Draw all ids from these random numbers inside the block: a simulation or a test can be repeated."""
    token = _ids.set(source)
    try:
        yield
    finally:
        _ids.reset(token)


def new_id() -> UUID:
    """Make a random id (a UUID of version 4) for a session, a run or a snapshot."""
    source = _ids.get()
    return uuid4() if source is None else UUID(int=source.getrandbits(128), version=4)


def new_token(size_bytes: int) -> str:
    """Make a random text of hexadecimal digits, two for each byte."""
    source = _ids.get()
    return secrets.token_hex(size_bytes) if source is None else source.randbytes(size_bytes).hex()


def new_span_id() -> str:
    """Make a span id: 16 hexadecimal digits, as traces use them."""
    return new_token(8)


def new_trace_id() -> str:
    """Make a trace id: 32 hexadecimal digits."""
    return new_token(16)

"""Things that somebody waits for, one after the other."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Queue(Generic[T]):
    """An unbounded line in front of one taker. Putting never waits."""

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._arrived = anyio.Event()

    def put(self, thing: T) -> None:
        """Add a thing to the end of the line."""
        self._things.append(thing)
        self._arrived.set()

    async def take(self) -> T:
        """Return the first thing, and wait until there is one."""
        while not self._things:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._things.popleft()

    def clear(self) -> None:
        """Forget what nobody has taken."""
        self._things.clear()

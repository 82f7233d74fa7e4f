"""A queue with one consumer."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Queue(Generic[T]):
    """An unbounded queue for one consumer. `put` never waits."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = anyio.Event()

    def put(self, item: T) -> None:
        """Add an item at the end."""
        self._items.append(item)
        self._arrived.set()

    async def take(self) -> T:
        """Wait for the first item and return it."""
        while not self._items:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._items.popleft()

    def clear(self) -> None:
        """Drop all items."""
        self._items.clear()

"""Watching a session that another process writes: every event, as soon as it is in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Protocol
from uuid import UUID

from treenail.clock import SystemClock
from treenail.log.base import Log
from treenail.log.event import Envelope

ASK_EVERY_S = 0.05
"""How often a store is asked that cannot tell by itself."""
_LOOK_EVERY_S = 0.5
"""How often `is_over` is asked while nothing happens."""
_REAL_TIME = SystemClock()


class Watcher(Protocol):
    """Waits for new events of one session."""

    def wait(self, after: int, timeout_s: float) -> int:
        """Wait until there is an event behind `after`, or until the time is over; return the head."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class PollingWatcher:
    """Asks the log again and again, which every log allows."""

    def __init__(self, log: Log, session_id: UUID) -> None:
        self._log = log
        self._session_id = session_id

    def wait(self, after: int, timeout_s: float) -> int:
        """Wait until there is an event behind `after`, or until the time is over; return the head."""
        deadline = _REAL_TIME.monotonic() + timeout_s
        while True:
            head = self._log.info(self._session_id).head
            left = deadline - _REAL_TIME.monotonic()
            if head > after or left <= 0:
                return head
            _REAL_TIME.sleep(min(left, ASK_EVERY_S))

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


def watcher_of(log: Log, session_id: UUID) -> Watcher:
    """Return what waits for new events of a session: the store's own watcher, or one that asks."""
    own: Callable[[UUID], Watcher] | None = getattr(log, "watcher", None)
    return PollingWatcher(log, session_id) if own is None else own(session_id)


def watch(
    log: Log, session_id: UUID, *, after: int = 0, is_over: Callable[[], bool] = lambda: False
) -> Iterator[Envelope]:
    """Yield the events of a session behind `after`, and each new one within a tenth of a second.

    It ends when `is_over` says so, which is asked twice a second while nothing happens, and after every
    batch. A Postgres server tells of new events by itself; other stores are asked. Raises
    `SessionNotFoundError` if the session is not there or was erased.
    """
    with closing(watcher_of(log, session_id)) as watcher:
        seq = after
        while True:
            if watcher.wait(seq, _LOOK_EVERY_S) > seq:
                for event in log.read(session_id, after=seq):
                    seq = event.seq
                    yield event
            if is_over():
                return

"""The heartbeat of a run: while it is under way, the time that it has used is noted again and again.

It beats in real time, whatever clock the run has: it is there for the process that comes after a kill. It
beats twice in each `HEARTBEAT_S`, so that a beat that is late on a busy machine is still in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from treenail.clock import SystemClock
from treenail.containment.ledger import HEARTBEAT_S, UsedTime
from treenail.containment.threads import Timer, call_later, logger, weakly

_LAST_WORD_S = 2.0
"""How long `stop` waits for a beat that is being written: where it is written may hang."""

_REAL_TIME = SystemClock()

NoteTime = Callable[[UsedTime], object]
"""Keeps the used time of a run where it lasts, in place of what was there before."""


class Heartbeat:
    """Calls `note` with what `read` says, at once and until `stop`. An error is logged and tried again."""

    def __init__(self, read: Callable[[], UsedTime], note: NoteTime) -> None:
        self._read = read
        self._note = note
        self._timer: Timer | None = None
        self._is_on = False
        self._has_failed = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Beat from now on."""
        self._is_on = True
        self._beat()

    def stop(self) -> None:
        """Note the time a last time, and beat no more."""
        if not self._is_on:
            return
        self._is_on = False
        if self._timer is not None:
            self._timer.cancel()
        if self._lock.acquire(timeout=_LAST_WORD_S):
            try:
                self._write()
            finally:
                self._lock.release()

    def _beat(self) -> None:
        with self._lock:
            if not self._is_on:
                return
            self._timer = call_later(_REAL_TIME, HEARTBEAT_S / 2, weakly(self._beat))
            self._write()

    def _write(self) -> None:
        try:
            self._note(self._read())
            self._has_failed = False
        except Exception:  # noqa: BLE001 - a run does not end because its time could not be noted
            if not self._has_failed:
                logger.exception("the time that a run has used could not be noted; it is tried again")
            self._has_failed = True

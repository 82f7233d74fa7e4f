"""What a command writes, shown while it runs."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable

from treenail.containment import threadsafe

MAX_SHOWN_BYTES = 200_000
"""How much of a command's output is shown while it runs; its result has the end of a longer one."""


class LiveOutput:
    """Passes on what a command writes, from the thread that reads it to the event loop that makes this.

    Whatever arrives before the loop has time for it is shown as one piece.
    """

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._wake = threadsafe(self._pass_on)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._left = MAX_SHOWN_BYTES

    def __call__(self, data: bytes) -> None:
        """Take what was read."""
        with self._lock:
            taken = data[: self._left]
            is_first = not self._waiting
            self._left -= len(taken)
            self._waiting += taken
        if taken and is_first:
            self._wake()

    def _pass_on(self) -> None:
        with self._lock:
            data = bytes(self._waiting)
            self._waiting.clear()
        self._show(self._decoder.decode(data))

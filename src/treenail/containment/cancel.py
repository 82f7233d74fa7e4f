"""Cancellation that reaches the work, and the partial results that survive it.

A `CancellationToken` is set once, with a reason, and stays set. Tokens form a tree: cancelling one cancels
all below it and none above. The token itself stops nothing; those who can stop something (an async scope, a
waiting caller, a subprocess's owner) register with `on_cancel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from treenail.clock import Clock
from treenail.containment.limits import StopReason, integer
from treenail.containment.threads import call_later, logger
from treenail.errors import CancelledByToken, UsageError


class CancellationToken:
    """A flag that is raised once and that waiters and callbacks hear of.

    `reason` is the stop reason ("aborted" or "timeout" when the containment raised it); `detail` is for
    people.
    """

    __slots__ = ("_callbacks", "_event", "_lock", "_parent", "detail", "reason")

    def __init__(self, parent: CancellationToken | None = None) -> None:
        # Reentrant, because a signal handler may cancel while its own thread registers.
        self._lock = threading.RLock()
        self._callbacks: dict[object, Callable[[], object]] = {}
        self._event: threading.Event | None = None
        self._parent = parent
        self.reason: str | None = None
        self.detail = ""
        if parent is not None and not parent._register(self, self._follow):
            self._follow()

    @property
    def is_cancelled(self) -> bool:
        """Whether the token has been cancelled."""
        return self.reason is not None

    def cancel(self, reason: str = StopReason.ABORTED, *, detail: str = "") -> bool:
        """Raise the flag and tell everybody who registered.

        Only the first call does anything: it returns True.
        """
        try:
            with self._lock:
                if self.reason is not None:
                    return False
                self.detail = detail
                self.reason = str(reason)
                if self._event is not None:
                    self._event.set()
            self._tell()
        except BaseException:
            # An interrupt came in between, such as a second Ctrl-C: the other listeners are still told.
            if self.reason is not None:
                self._tell()
            raise
        return True

    def _tell(self) -> None:
        """Call each listener, and forget it afterwards."""
        while True:
            with self._lock:
                if not self._callbacks:
                    return
                key, callback = next(iter(self._callbacks.items()))
            try:
                callback()
            except Exception:  # noqa: BLE001 - logged, see below
                # One listener's error must not leave the others running.
                logger.exception("a cancellation callback failed")
            self._forget(key)

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once when the token is cancelled, at once if it already is.

        Return how to unregister.
        """
        key = object()
        if not self._register(key, callback):
            callback()
        return partial(self._forget, key)

    def _register(self, key: object, callback: Callable[[], object]) -> bool:
        """Keep a callback for the cancellation; False if that has come already."""
        with self._lock:
            if self.reason is not None:
                return False
            self._callbacks[key] = callback
            return True

    def _follow(self) -> None:
        """Do as the parent did."""
        parent = self._parent
        if parent is not None:
            self.cancel(parent.reason or StopReason.ABORTED, detail=parent.detail)

    def _forget(self, key: object) -> None:
        with self._lock:
            self._callbacks.pop(key, None)

    def unlink(self) -> None:
        """Stop following the parent; a finished call does this, so that a long chain's token stays small."""
        parent, self._parent = self._parent, None
        if parent is not None:
            parent._forget(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the token is cancelled or the time is over; say whether it is cancelled."""
        with self._lock:
            if self.reason is not None:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout_s)

    def raise_if_cancelled(self) -> None:
        """Raise `CancelledByToken` if the token is cancelled; a long handler calls this between its steps."""
        if self.reason is not None:
            raise self.error()

    def error(self) -> CancelledByToken:
        """Return what a piece of work ends with that the token has stopped."""
        return CancelledByToken(f"the work was stopped: {self.detail or self.reason}")


def pause(clock: Clock, seconds: float, token: CancellationToken) -> None:
    """Block for that long on `clock`, or until the token is cancelled."""
    woken = threading.Event()
    timer = call_later(clock, seconds, woken.set)
    forget = token.on_cancel(woken.set)
    try:
        woken.wait()
    finally:
        forget()
        timer.cancel()


class PartialResultBuffer:
    """What a call has produced so far, kept when the call is stopped.

    Thread-safe. It refuses to grow beyond `max_chunks` or `max_bytes`, and is closed by `mark_complete()`.
    """

    def __init__(self, *, max_chunks: int = 10_000, max_bytes: int = 10 * 1024 * 1024) -> None:
        self._max_chunks = integer("PartialResultBuffer", "max_chunks", max_chunks)
        self._max_bytes = integer("PartialResultBuffer", "max_bytes", max_bytes)
        self._lock = threading.Lock()
        self._chunks: list[str] = []
        self._bytes = 0
        self._is_complete = False
        self.metadata: dict[str, object] = {}
        """Notes about the result, such as the model that made it."""

    def append(self, chunk: str) -> None:
        """Keep one more piece.

        `UsageError` if the buffer is full or complete, and then nothing is kept of it.
        """
        size = len(chunk.encode("utf-8", "surrogatepass"))
        with self._lock:
            if self._is_complete:
                raise UsageError("the partial result is complete; append to a new buffer instead")
            if len(self._chunks) >= self._max_chunks or self._bytes + size > self._max_bytes:
                raise UsageError(
                    f"the partial result is full: {len(self._chunks)} chunks and {self._bytes} bytes are "
                    f"kept of at most {self._max_chunks} and {self._max_bytes}; raise these or append less"
                )
            self._chunks.append(chunk)
            self._bytes += size

    def mark_complete(self) -> None:
        """Say that nothing more will come."""
        with self._lock:
            self._is_complete = True

    def get_partial(self) -> str:
        """Return everything kept so far as one text."""
        with self._lock:
            return "".join(self._chunks)

    @property
    def is_complete(self) -> bool:
        """Whether `mark_complete()` was called."""
        return self._is_complete

    @property
    def is_partial(self) -> bool:
        """Whether something is kept that was never completed."""
        with self._lock:
            return bool(self._chunks) and not self._is_complete

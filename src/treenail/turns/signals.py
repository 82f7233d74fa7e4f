"""Ctrl-C and SIGTERM as causes: a turn that they stop knows which one it was.

Inside an event loop both arrive as the same cancellation. While a turn runs in the main thread, the handlers
here note which signal came. Then the previous handler of Ctrl-C runs; SIGTERM, unless the program handles it
itself, stops the turn as Ctrl-C does, and ends the process when the turn's ending is in the log. While no
turn runs, nothing is installed.

A second Ctrl-C is raised wherever the main thread happens to be. If that is the event loop itself, which has
just taken a callback from its queue, the callback is lost: the task that it would have woken waits for ever,
and the loop cannot even be closed. So an interrupt that meets the loop's own code is raised by a callback of
the loop instead; one that meets a program's code is raised there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import anyio


@dataclass(slots=True, eq=False)
class SignalNote:
    """Which signal came while a turn ran, as a kind of cause; None if none did."""

    reason: str | None = None


# Handlers are installed and run in the main thread: no lock is needed.
_active: list[SignalNote] = []
_before: dict[int, Any] = {}
_terminated = False


def _note(reason: str) -> None:
    for each in _active:
        each.reason = each.reason or reason


# The code of event loops: it never waits for anything but events, so a callback is served soon.
_LOOPS = tuple(os.path.join(each.__path__[0], "") for each in (asyncio, anyio))


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    _note("interrupt")
    _pass_on(signum, frame)


def _pass_on(signum: int, frame: FrameType | None) -> None:
    """Call the previous handler of Ctrl-C."""
    # Without a handler of Ctrl-C (it is ignored in a script's background), SIGTERM stops as Ctrl-C would.
    before = _before.get(signal.SIGINT, signal.default_int_handler)
    try:
        before(signum, frame)
    except KeyboardInterrupt:
        if isinstance(getattr(getattr(before, "func", None), "__self__", None), asyncio.Runner):
            # From here on it does what the default one does, and its loop may be gone before the turn is:
            # put back then, it would keep the next loop from handling Ctrl-C.
            _before[signal.SIGINT] = signal.default_int_handler
        loop = _loop_at_work(frame)
        if loop is None:
            raise
        loop.call_soon_threadsafe(_interrupt)


def _loop_at_work(frame: FrameType | None) -> asyncio.AbstractEventLoop | None:
    """Return the event loop whose own code a signal has met; None if it has met anything else."""
    if frame is None or not frame.f_code.co_filename.startswith(_LOOPS):
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _interrupt() -> None:
    raise KeyboardInterrupt


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    global _terminated  # noqa: PLW0603  # a process is told to end once, whatever runs in it
    _terminated = True
    _note("terminated")
    _pass_on(signal.SIGINT, frame)


def _install() -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    if callable(interrupt):
        _before[signal.SIGINT] = interrupt
        signal.signal(signal.SIGINT, _on_interrupt)
    terminate = signal.getsignal(signal.SIGTERM)
    if terminate == signal.SIG_DFL:
        _before[signal.SIGTERM] = terminate
        signal.signal(signal.SIGTERM, _on_terminate)


def _uninstall() -> None:
    for signum, ours in ((signal.SIGINT, _on_interrupt), (signal.SIGTERM, _on_terminate)):
        before = _before.pop(signum, None)
        # A handler that the program has installed since then stays.
        if before is not None and signal.getsignal(signum) is ours:
            signal.signal(signum, before)
    if _terminated:
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def noted_signals() -> Iterator[SignalNote]:
    """Note Ctrl-C and SIGTERM while the block runs. Outside the main thread it does nothing."""
    note = SignalNote()
    if threading.current_thread() is not threading.main_thread():
        yield note
        return
    if not _active:
        _install()
    _active.append(note)
    try:
        yield note
    finally:
        _active.remove(note)
        if not _active:
            _uninstall()

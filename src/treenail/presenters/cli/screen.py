"""The live screens of a run: for pipes and for machines (`terminal_screen.py` is the one for people).

A screen is fed on its own thread, so that a slow terminal, a pager or a closed pipe never delays the run. It
only shows: whatever it misses is in the log.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TextIO

from treenail.history import live_text
from treenail.presenters.cli.output import json_text
from treenail.printable import printable
from treenail.providers import ReasoningDelta, TextDelta
from treenail.tools import Approval, PermissionRequest
from treenail.turns import Lagged, LiveEvent, LiveFeed, ToolCallOutput

_DRAIN_S = 5.0
"""How long to wait for a screen to show the rest after a run has ended."""


class Screen(Protocol):
    """Shows the events of a run."""

    caught_up: Callable[[], object] = staticmethod(lambda: None)
    """Waits until everything that has happened is shown: a question comes after what led to it."""

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show one event."""
        ...

    def ask(self, request: PermissionRequest) -> Approval | None:
        """Ask a person whether a call may run; None if nobody can be asked: then the call waits durably."""
        return None

    def close(self) -> None:
        """Remove what is shown only during the run."""
        return


@contextmanager
def watching(screen: Screen) -> Iterator[LiveFeed]:
    """Feed a screen during a run."""
    feed = LiveFeed()
    subscription = feed.subscribe(capacity=100_000)
    screen.caught_up = partial(subscription.wait_read, _DRAIN_S)

    def run() -> None:
        for each in subscription:
            try:
                screen.show(each)
            except (OSError, ValueError):
                subscription.close()  # The pipe or the terminal is gone; the run continues.
                return

    thread = threading.Thread(target=run, name="treenail-screen", daemon=True)
    thread.start()
    try:
        yield feed
    finally:
        feed.close()
        thread.join(_DRAIN_S)
        try:
            screen.close()
        except (OSError, ValueError):
            pass


class PlainScreen(Screen):
    """For pipes and files: the answer goes to the output, everything else to the error stream."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._in_line = False

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Write an event as text."""
        if isinstance(seen, TextDelta):
            self._out.write(printable(seen.text))
            self._out.flush()
            self._in_line = not seen.text.endswith("\n")
            return
        line = live_text(seen)
        if line is not None:
            self._end_line()
            self._err.write(printable(line) + "\n")
            self._err.flush()

    def close(self) -> None:
        """End the line."""
        self._end_line()

    def _end_line(self) -> None:
        if self._in_line:
            self._out.write("\n")
            self._out.flush()
            self._in_line = False


class JsonScreen(Screen):
    """For machines: one JSON object a line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Write an event as a line of JSON."""
        # What a command writes is in its result, too.
        if not isinstance(seen, ToolCallOutput):
            self.write({"event": _snake(type(seen).__name__), **_data(seen)})

    def write(self, data: dict[str, Any]) -> None:
        """Write one line."""
        self._out.write(json_text(data) + "\n")
        self._out.flush()


def _data(seen: Any) -> dict[str, Any]:
    if isinstance(seen, TextDelta | ReasoningDelta):
        return {"text": seen.text}
    return dataclasses.asdict(seen)


def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")

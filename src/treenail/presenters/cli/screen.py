"""The live screens of a run: for pipes, for machines, and for people at a terminal.

A screen is fed on its own thread, so that a slow terminal, a pager or a closed pipe never delays the run. It
only shows: whatever it misses is in the log.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from treenail.conversation import ContextPressure
from treenail.history import LiveView, counted, live_text, short, with_event
from treenail.providers import ReasoningDelta, TextDelta
from treenail.tools import PermissionRequest
from treenail.turns import (
    FeedbackGiven,
    Lagged,
    LiveEvent,
    LiveFeed,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    UsageChanged,
)

_DRAIN_S = 5.0
"""How long to wait for a screen to show the rest after a run has ended."""


class Screen(Protocol):
    """Shows the events of a run."""

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show one event."""
        ...

    def ask(self, request: PermissionRequest) -> bool | None:
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
            self._out.write(seen.text)
            self._out.flush()
            self._in_line = not seen.text.endswith("\n")
            return
        line = live_text(seen)
        if line is not None:
            self._end_line()
            self._err.write(line + "\n")
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
        if dataclasses.is_dataclass(seen):
            self.write({"event": _snake(type(seen).__name__), **_data(seen)})

    def write(self, data: dict[str, Any]) -> None:
        """Write one line."""
        self._out.write(json.dumps(data, ensure_ascii=False, default=str) + "\n")
        self._out.flush()


class TerminalScreen(Screen):
    """For people: text as it arrives, tools with their outcomes, and a status line."""

    def __init__(self, console: Console, *, asks: bool = False) -> None:
        self._console = console
        self._asks = asks
        self._lock = threading.RLock()
        self._text = ""
        self._view = LiveView(status="starting")
        self._usage_at = monotonic()
        self._live = Live(get_renderable=self._bottom, console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show an event above the status line."""
        with self._lock:
            if isinstance(seen, TextDelta):
                self._add(seen.text)
                return
            self._view = with_event(self._view, seen)
            line = live_text(seen)
            if isinstance(seen, UsageChanged):
                self._usage_at = monotonic()
            if isinstance(seen, StatusChanged) or line is not None:
                self._flush()
            if line is not None:
                self._console.print(line, markup=False, highlight=False, style=_style(seen))

    def ask(self, request: PermissionRequest) -> bool | None:
        """Ask on the terminal. Anything but a yes is a no; an interrupt propagates."""
        if not self._asks:
            return None
        with self._lock:
            self._flush()
            self._live.stop()
            try:
                self._console.print(
                    f"? {request.tool_name} {short(str(request.arguments), 400)}",
                    markup=False,
                    highlight=False,
                )
                said = self._console.input("  run it? [y/N] ", markup=False)
            except EOFError:
                return None
            finally:
                self._live.start()
        return said.strip().lower() in ("y", "yes")

    def close(self) -> None:
        """Remove the status line."""
        with self._lock:
            self._flush()
            self._live.stop()

    def _add(self, text: str) -> None:
        self._text += text
        whole, newline, rest = self._text.rpartition("\n")
        if newline:
            # A line that is printed above must not stay in the status area as well.
            self._text = rest
            self._console.print(whole, markup=False, highlight=False)

    def _flush(self) -> None:
        if self._text:
            whole, self._text = self._text, ""
            self._console.print(whole, markup=False, highlight=False)

    def _bottom(self) -> Text:
        live, used = self._view, self._view.usage or UsageChanged()
        # Between two reports the screen counts seconds itself: a line that stands still looks dead.
        seconds = int(used.elapsed_s + monotonic() - self._usage_at)
        tools = ", ".join(dict.fromkeys(each.name for each in live.running))
        doing = tools or live.detail or live.status.replace("_", " ")
        parts = [doing, counted(used.steps, "step"), counted(used.tokens, "token")]
        if used.cost_usd is not None:
            parts.append(f"${used.cost_usd:.4f}")
        parts += [f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60} s", "Ctrl-C stops"]
        line = " · ".join(parts)
        shown = Text(self._text + "\n" if self._text else "")
        shown.append(line, style="dim")
        shown.no_wrap, shown.overflow = not self._text, "ellipsis"
        return shown


def screen_for(*, as_json: bool, asks: bool) -> Screen:
    """Choose the screen for this terminal, pipe or machine."""
    if as_json:
        return JsonScreen(sys.stdout)
    console = Console()
    if not console.is_terminal:
        return PlainScreen(sys.stdout, sys.stderr)
    return TerminalScreen(console, asks=asks and sys.stdin.isatty())


def _style(seen: object) -> str:
    if isinstance(seen, ToolCallFinished):
        return "green" if seen.success else "red"
    if isinstance(seen, FeedbackGiven | ContextPressure):
        return "yellow"
    return "cyan" if isinstance(seen, ToolCallBegan) else "dim"


def _data(seen: Any) -> dict[str, Any]:
    if isinstance(seen, TextDelta | ReasoningDelta):
        return {"text": seen.text}
    return dataclasses.asdict(seen)


def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")

"""What a person sees of a run while it goes on. It only shows: nothing depends on it.

A screen is fed on a thread of its own, so that a slow terminal, a pager or a closed pipe never holds up
the run. What it could not show stands in the log.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from treenail.conversation.events import ContextPressure
from treenail.providers.base import ReasoningDelta, TextDelta
from treenail.tools.policies import PermissionRequest
from treenail.turns.live import (
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
"""How long to wait for a screen to show the rest, when a run is over."""


_MARKUP = re.compile(r"</?(completion_check|feedback)\b[^>]*>?")
"""What stands around a judge's words for the model, and is nothing to a person."""


class Screen(Protocol):
    """Shows the events of a run."""

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show one event."""
        ...

    def ask(self, request: PermissionRequest) -> bool | None:
        """Ask a person whether a call may run; None if nobody can be asked."""
        ...

    def close(self) -> None:
        """Clear away what is only there while the run goes on."""
        ...


@contextmanager
def watching(screen: Screen) -> Iterator[LiveFeed]:
    """Feed a screen for the length of a run."""
    feed = LiveFeed()
    subscription = feed.subscribe(capacity=100_000)

    def run() -> None:
        for each in subscription:
            try:
                screen.show(each)
            except (OSError, ValueError):
                subscription.close()  # The pipe or the terminal is gone; the run goes on without.
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


class PlainScreen:
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
        line = _line(seen)
        if line is not None:
            self._end_line()
            self._err.write(line + "\n")
            self._err.flush()

    def ask(self, request: PermissionRequest) -> bool | None:
        """Nobody can be asked: the call waits durably."""
        return None

    def close(self) -> None:
        """End the line."""
        self._end_line()

    def _end_line(self) -> None:
        if self._in_line:
            self._out.write("\n")
            self._out.flush()
            self._in_line = False


class JsonScreen:
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

    def ask(self, request: PermissionRequest) -> bool | None:
        """Nobody can be asked: the call waits durably."""
        return None

    def close(self) -> None:
        """Nothing is left to clear away."""


class TerminalScreen:
    """For people: text as it comes, tools with their outcome, and a line that says what goes on."""

    def __init__(self, console: Console, *, asks: bool = False) -> None:
        self._console = console
        self._asks = asks
        self._lock = threading.RLock()
        self._text = ""
        self._status = "starting"
        self._usage = UsageChanged()
        self._usage_at = monotonic()
        self._tools: dict[str, str] = {}
        self._live = Live(get_renderable=self._bottom, console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show an event above the status line."""
        with self._lock:
            if isinstance(seen, TextDelta):
                self._add(seen.text)
            elif isinstance(seen, StatusChanged):
                self._status = seen.detail or seen.status.replace("_", " ")
                self._flush()
            elif isinstance(seen, UsageChanged):
                self._usage, self._usage_at = seen, monotonic()
            else:
                if isinstance(seen, ToolCallBegan):
                    self._tools[seen.call_id] = seen.name
                elif isinstance(seen, ToolCallFinished):
                    self._tools.pop(seen.call_id, None)
                line = _line(seen)
                if line is not None:
                    self._flush()
                    self._console.print(line, markup=False, highlight=False, style=_style(seen))

    def ask(self, request: PermissionRequest) -> bool | None:
        """Ask on the terminal. Anything but a yes is a no; an interrupt goes on as one."""
        if not self._asks:
            return None
        with self._lock:
            self._flush()
            self._live.stop()
            try:
                self._console.print(
                    f"? {request.tool_name} {_short(str(request.arguments), 400)}",
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
        """Take the status line away."""
        with self._lock:
            self._flush()
            self._live.stop()

    def _add(self, text: str) -> None:
        self._text += text
        whole, newline, rest = self._text.rpartition("\n")
        if newline:
            # What is printed for good is no longer below, or it would flicker there.
            self._text = rest
            self._console.print(whole, markup=False, highlight=False)

    def _flush(self) -> None:
        if self._text:
            whole, self._text = self._text, ""
            self._console.print(whole, markup=False, highlight=False)

    def _bottom(self) -> Text:
        used = self._usage
        # Between two reports of the run, the screen's own clock goes on: a line that stands still looks dead.
        seconds = int(used.elapsed_s + monotonic() - self._usage_at)
        doing = ", ".join(dict.fromkeys(self._tools.values())) or self._status
        parts = [doing, _counted(used.steps, "step"), _counted(used.tokens, "token")]
        if used.cost_usd is not None:
            parts.append(f"${used.cost_usd:.4f}")
        parts += [f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60} s", "Ctrl-C stops"]
        line = " · ".join(parts)
        shown = Text(self._text + "\n" if self._text else "")
        shown.append(line, style="dim")
        shown.no_wrap, shown.overflow = not self._text, "ellipsis"
        return shown


def screen_for(*, as_json: bool, asks: bool) -> Screen:
    """Choose how a run is shown here."""
    if as_json:
        return JsonScreen(sys.stdout)
    console = Console()
    if not console.is_terminal:
        return PlainScreen(sys.stdout, sys.stderr)
    return TerminalScreen(console, asks=asks and sys.stdin.isatty())


def _line(seen: object) -> str | None:
    match seen:
        case ToolCallBegan():
            return f"● {seen.name} {_short(seen.arguments, 160)}"
        case ToolCallFinished(success=True):
            return f"  ✓ {_short(seen.summary, 160)}"
        case ToolCallFinished():
            return f"  ✗ undone: {_short(seen.summary, 240) or 'it was stopped'}"
        case FeedbackGiven():
            said = _MARKUP.sub(" ", seen.summary)
            return f"  ⚖ {seen.severity}: {_short(said, 240)}"
        case ContextPressure(tier="warning" | "critical"):
            return f"  ! the conversation fills {seen.ratio:.0%} of what the model can read"
        case Lagged():
            return f"  … {seen.count} updates were left out here; the log has them"
    return None


def _style(seen: object) -> str:
    if isinstance(seen, ToolCallFinished):
        return "green" if seen.success else "red"
    if isinstance(seen, FeedbackGiven | ContextPressure):
        return "yellow"
    return "cyan" if isinstance(seen, ToolCallBegan) else "dim"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _data(seen: Any) -> dict[str, Any]:
    if isinstance(seen, TextDelta | ReasoningDelta):
        return {"text": seen.text}
    return dataclasses.asdict(seen)


def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")

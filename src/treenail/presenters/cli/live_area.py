"""The last lines of a terminal, drawn again and again while text is printed above them.

Theory of operation
-------------------
What is finished is printed once and belongs to the terminal from then on. What is under way is in the area: a
few lines, never more than the screen has, that are written over in place. Each change of the screen is one
write, from the top of the area down, so that nothing flickers; all it needs is a terminal that can move up
and erase.

Lines are kept shorter than the screen, so that the terminal never wraps one itself. If the window becomes
narrower it does wrap those that stand there; how many rows they take then is counted, and all are erased.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from treenail.printable import printable

_REFRESH_S = 0.1
"""The shortest time between two drawings."""

_LOOK_S = 0.25
"""How often to look whether the window has another size."""

_UP, _ERASE_LINE, _ERASE_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
_TOGETHER, _AT_ONCE = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these draw what is between them in one step; others ignore them."""

Draw = Callable[[int, int], Sequence[str]]
"""Makes the lines of an area, at most so wide and so high."""


class Area(Protocol):
    """Where a screen shows what is finished, above what is under way."""

    def above(self, lines: Sequence[str]) -> None:
        """Print lines for good."""
        ...

    def changed(self) -> None:
        """Draw what is under way anew, soon."""
        ...

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to a question for a while."""
        yield

    def typed(self) -> str | None:
        """Return what stands in a line that a person types into; None if there is no line."""
        return None

    def close(self) -> None:
        """Remove what is under way."""
        ...


class LiveArea(Area):
    """An area at the bottom of a terminal. `lock` is that of whoever draws, which is asked under it."""

    def __init__(self, console: Console, draw: Draw, lock: AbstractContextManager[object]) -> None:
        self._console, self._draw, self._lock = console, draw, lock
        self._shown: list[str] = []
        self._width = 0
        self._is_paused = False
        self._wake, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="treenail-area", daemon=True)
        self._thread.start()

    def above(self, lines: Sequence[str]) -> None:
        """Print lines for good, and the area below them."""
        with self._lock:
            if self._is_paused:
                self._write("".join(f"{each}\n" for each in lines))
                return
            self._show(lines)

    def changed(self) -> None:
        """Draw the area anew, soon."""
        self._wake.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the area for a while."""
        with self._lock:
            self._remove()
            self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._wake.set()

    def close(self) -> None:
        """Remove the area for good."""
        self._is_over.set()
        self._wake.set()
        self._thread.join(1.0)
        with self._lock:
            self._remove()
            self._is_paused = True

    def _run(self) -> None:
        ticks = 0
        while not self._is_over.is_set():
            asked = self._wake.wait(_LOOK_S)
            self._wake.clear()
            ticks += 1
            try:
                with self._lock:
                    if not self._is_paused and (asked or ticks % 4 == 0 or self._columns != self._width):
                        self._show(())
            except (OSError, ValueError):
                return  # The terminal is gone; the run continues.
            self._is_over.wait(_REFRESH_S)

    @property
    def _columns(self) -> int:
        return self._console.width

    def _show(self, lines: Sequence[str]) -> None:
        """Print lines where the area is, and the area below them."""
        width, height = self._columns, self._console.height
        area = list(self._draw(width - 1, max(height - 2, 1)))
        if not lines and area == self._shown and width == self._width:
            return
        written = [f"{each}{_ERASE_LINE}" for each in (*lines, *area)]
        self._write(_TOGETHER + self._to_top() + "\n".join(written) + ("" if area or not lines else "\n"))
        self._write(_ERASE_BELOW + _AT_ONCE)
        self._shown, self._width = area, width

    def _remove(self) -> None:
        if self._shown:
            self._write(self._to_top() + _ERASE_BELOW)
            self._shown = []

    def _to_top(self) -> str:
        """Go from the end of the area to its beginning, however the terminal has wrapped its lines since."""
        columns = max(self._columns, 1)
        rows = sum(max(-(-width_of(each) // columns), 1) for each in self._shown)
        return "\r" + (_UP.format(rows - 1) if rows > 1 else "")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class PlainArea(Area):
    """For terminals that cannot move the cursor: only what is finished is printed."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def above(self, lines: Sequence[str]) -> None:
        """Print lines."""
        self._file.write("".join(f"{each}\n" for each in lines))
        self._file.flush()

    def changed(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def rendered(console: Console, shown: RenderableType, width: int) -> list[str]:
    """Render as lines with the terminal's own colours, of which none is longer than `width`.

    Nothing in the text itself reaches the terminal as a command, whatever the renderer made of it.
    """
    lines = console.render_lines(shown, console.options.update(width=max(width, 1)), pad=False)
    return [_ansi(console, line) for line in lines]


def _ansi(console: Console, line: Sequence[Segment]) -> str:
    clean = [Segment(printable(each.text), each.style) for each in line if not each.control]
    while clean and (clean[-1].style is None or not clean[-1].style.bgcolor):
        last = clean.pop()
        if last.text.rstrip():
            clean.append(Segment(last.text.rstrip(), last.style))
            break
    with console.capture() as captured:
        console.print(Segments(clean), end="", crop=False, soft_wrap=True)
    return captured.get().rstrip("\n")


def width_of(line: str) -> int:
    """Return how many cells a line with colours takes."""
    return cell_len(Text.from_ansi(line).plain) if "\x1b" in line else cell_len(line)

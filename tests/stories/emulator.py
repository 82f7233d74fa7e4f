"""A terminal that obeys escape sequences: what a person sees of the chat, line by line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

import pyte
from tests.stories.terminal import LIMIT_S, Terminal

ENTER, ESC, CTRL_C, UP, TAB = "\r", "\x1b", "\x03", "\x1b[A", "\t"


def pasted(text: str) -> str:
    """Return what a terminal sends for a pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


class Emulated(Terminal):
    """Runs `treenail` in a pty with a terminal emulator behind it, which answers as a real one does."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        columns: int = 100,
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, 40, history=10_000, ratio=0.1)
        self._stream = pyte.Stream(self._screen)
        super().__init__(*arguments, cwd=cwd, env=env, columns=columns)
        self._screen.write_process_input = lambda data: os.write(self._master, data.encode())

    def _read(self, seconds: float) -> bool:
        known = len(self._seen)
        is_open = super()._read(min(max(seconds, 0.001), 0.2))
        self._stream.feed(self._seen[known:])
        return is_open

    @property
    def shown(self) -> str:
        """What stands on the screen, and what was scrolled out of it at the top."""
        above = [
            "".join(row[at].data for at in range(self._screen.columns)) for row in self._screen.history.top
        ]
        lines = [each.rstrip() for each in (*above, *self._screen.display)]
        return "\n".join(lines).rstrip()

    def until(self, is_so: Callable[[], object], what: str = "it") -> None:
        """Read until something is so."""
        until = monotonic() + LIMIT_S
        while not is_so():
            if monotonic() > until or not self._read(until - monotonic()):
                raise AssertionError(f"{what} never came; the screen has:\n{self.shown}")

    def see(self, pattern: str) -> str:
        """Read until the screen shows something."""
        self.until(lambda: re.search(pattern, self.shown), repr(pattern))
        return self.shown

    def see_line(self, text: str = "") -> None:
        """Read until the line that is typed into has this text, and nothing is under way."""
        self.see(rf"(?m)^{re.escape(f'> {text}'.rstrip())}\n[^\n]*/help$")

    def send(self, line: str) -> None:
        """Type a line and Enter."""
        self.type(line + ENTER)

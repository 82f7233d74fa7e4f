"""Single keys of a terminal, for a question.

A letter of a sentence is not an answer. The keys are offered when nothing was typed for a moment; what comes
before that is dropped, and so is a key with more keys right behind it.
"""

from __future__ import annotations

import os
import select
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console

CTRL_C, ESCAPE, ENTER = "\x03", "\x1b", "\r"

_QUIET_S = 0.7
"""How long nothing has to be typed before a key is an answer."""

_ALONE_S = 0.15
"""How soon another key comes behind one that is part of a word or a paste."""


class Keys:
    """Reads single keys of a terminal; where there is none, lines of the input."""

    def __init__(
        self,
        descriptor: int = 0,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        pressed_at: float = float("-inf"),
        is_typing: bool = False,
    ) -> None:
        self._descriptor = descriptor
        self._is_stopped = is_stopped
        self.pressed_at = pressed_at
        """When the last key came."""
        self.is_typing = is_typing
        """Whether the person is in the middle of writing something else."""
        self._before: list[Any] | None = None

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Read keys as they are pressed, without echo and signals, and drop what was typed before."""
        try:
            self._before = termios.tcgetattr(self._descriptor)
        except termios.error:
            yield  # Not a terminal: lines are read.
            return
        changed = termios.tcgetattr(self._descriptor)
        changed[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
        changed[0] &= ~termios.ICRNL
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, changed)
        if select.select([self._descriptor], [], [], 0)[0]:
            self.pressed_at = monotonic()
        termios.tcflush(self._descriptor, termios.TCIFLUSH)
        try:
            yield
        finally:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            self._before = None

    @contextmanager
    def cooked(self) -> Iterator[None]:
        """Give the terminal to another program for a while."""
        if self._before is None:
            yield
            return
        now = termios.tcgetattr(self._descriptor)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        try:
            yield
        finally:
            termios.tcsetattr(self._descriptor, termios.TCSAFLUSH, now)

    def settled(self, console: Console) -> str | None:
        """Wait until nothing was typed for a moment, and drop what is; returns a Ctrl-C or an Escape."""
        if self._before is None:
            return None
        is_told = False
        if select.select([self._descriptor], [], [], 0)[0]:
            termios.tcflush(self._descriptor, termios.TCIFLUSH)
            self.pressed_at = monotonic()
        while (left_s := self.pressed_at + _QUIET_S - monotonic()) > 0:
            if self._is_stopped():
                raise EOFError
            if not select.select([self._descriptor], [], [], min(left_s, 0.2))[0]:
                continue
            pressed = self.key()
            if pressed in (CTRL_C, ESCAPE):
                return pressed
            self.is_typing = True
            if not is_told:
                say(console, "  you were typing: to answer, stop for a moment\n")
                is_told = True
        return None

    def answer(self) -> str:
        """Wait for a key; empty if it is a yes with more right behind it, as in a word or a paste.

        An Enter behind it is a habit, and means the same.
        """
        pressed = self.key()
        if self._before is None or pressed.lower() not in ("y", "a", "e"):
            return pressed
        if not self._drop_rest(_ALONE_S).strip(b"\r\n"):
            return pressed
        self.is_typing = True
        return ""

    def key(self) -> str:
        """Wait for a key. Raises `EOFError` if there is nobody, or the turn was stopped meanwhile."""
        pressed = self._byte()
        if pressed == b"\x04":
            raise EOFError
        if pressed == b"\x1b":
            # An arrow key or the like is an escape with more right behind it, and means nothing here.
            return "" if self._drop_rest() else ESCAPE
        if pressed[0] >= 0xC0:
            for _ in range(1 + (pressed[0] >= 0xE0) + (pressed[0] >= 0xF0)):
                pressed += self._byte()
        return pressed.decode("utf-8", "replace")

    def line(self, console: Console) -> str:
        """Read a line of text; Ctrl-C and Escape end it without any."""
        typed = ""
        while True:
            pressed = self.key()
            if pressed in (ENTER, "\n"):
                say(console, "\n")
                return typed.strip()
            if pressed in (CTRL_C, ESCAPE):
                say(console, "\n")
                return ""
            if pressed in ("\x7f", "\b"):
                typed = typed[:-1]
                say(console, "\b \b")
            elif pressed.isprintable() and pressed:
                typed += pressed
                say(console, pressed)

    def _byte(self) -> bytes:
        while not select.select([self._descriptor], [], [], 0.2)[0]:
            if self._is_stopped():
                raise EOFError
        try:
            read = os.read(self._descriptor, 1)
        except OSError:
            read = b""
        if not read:
            raise EOFError
        self.pressed_at = monotonic()
        return read

    def _drop_rest(self, within_s: float = 0.02) -> bytes:
        """Drop what comes right behind a key, and return it."""
        dropped = b""
        while select.select([self._descriptor], [], [], within_s)[0]:
            self.pressed_at = monotonic()
            if not (read := os.read(self._descriptor, 64)):
                break
            dropped += read
        return dropped


def say(console: Console, text: str) -> None:
    """Write on the line of a question."""
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

"""A list in a terminal from which a person chooses one line. Only what shows one imports it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prompt_toolkit.application import Application
from prompt_toolkit.data_structures import Point
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Dimension, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.output import create_output

HELP = "arrows move · Enter or a number chooses · Esc leaves"


def choice(title: str, lines: Sequence[str], *, start: int = 0) -> Application[int | None]:
    """Make an application that returns the number of the chosen line, from 0, or None."""
    at = start
    keys = KeyBindings()

    def shown() -> StyleAndTextTuples:
        return [
            (
                "reverse" if number == at else "",
                f"{'>' if number == at else ' '} {number + 1 if number < 9 else ' '} {line}\n",
            )
            for number, line in enumerate(lines)
        ]

    def move(by: int) -> None:
        nonlocal at
        at = min(max(at + by, 0), len(lines) - 1)

    @keys.add("up")
    @keys.add("k")
    @keys.add("c-p")
    def _(event: KeyPressEvent) -> None:
        move(-1)

    @keys.add("down")
    @keys.add("j")
    @keys.add("c-n")
    def _(event: KeyPressEvent) -> None:
        move(1)

    @keys.add("pageup")
    def _(event: KeyPressEvent) -> None:
        move(-10)

    @keys.add("pagedown")
    def _(event: KeyPressEvent) -> None:
        move(10)

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result=at)

    for digit in range(1, min(len(lines), 9) + 1):

        @keys.add(str(digit))
        def _(event: KeyPressEvent, number: int = digit - 1) -> None:
            event.app.exit(result=number)

    @keys.add("escape", eager=True)
    @keys.add("q")
    @keys.add("c-c")
    @keys.add("c-d")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result=None)

    control = FormattedTextControl(shown, get_cursor_position=lambda: Point(0, at), show_cursor=False)
    layout = HSplit(
        [
            Window(FormattedTextControl(title), height=1),
            Window(control, height=Dimension(max=15), wrap_lines=False),
            Window(FormattedTextControl(HELP), height=1, style="fg:ansibrightblack"),
        ]
    )
    made: Application[int | None] = Application(
        Layout(layout), key_bindings=keys, erase_when_done=True, output=create_output(sys.__stdout__)
    )
    made.ttimeoutlen = 0.05
    return made

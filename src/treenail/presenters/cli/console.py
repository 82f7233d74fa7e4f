"""The console that commands print with, where they print in colours, and diffs in colours."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from treenail.presenters.cli.output import with_colours
from treenail.printable import printable
from treenail.workspace import diff_lines


class GuardedConsole(Console):
    """A console whose colours are ours: a text that it is given cannot bring its own to a terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(file=with_colours(sys.stderr if stderr else sys.stdout))

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string; what would command a terminal is shown."""
        return super().render_str(printable(text) if self.is_terminal else text, **options)


_DIFF_STYLES = {"head": "bold", "hunk": "cyan", "added": "green", "removed": "red", "same": "dim"}


def drawn_diff(diff: str, *, indent: str = "") -> Text:
    """Colour a unified diff."""
    shown = Text()
    for part, line in diff_lines(diff):
        shown.append(f"{indent}{printable(line)}\n", style=_DIFF_STYLES[part])
    return shown


def print_diff(diff: str) -> None:
    """Print a diff: in colours at a terminal, elsewhere as it is."""
    console = GuardedConsole()
    if console.is_terminal:
        console.print(drawn_diff(diff), end="", soft_wrap=True)
    else:
        print(diff)

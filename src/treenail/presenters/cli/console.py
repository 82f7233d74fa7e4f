"""The console that commands print with, where they print in colours."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from treenail.presenters.cli.output import with_colours
from treenail.printable import printable


class GuardedConsole(Console):
    """A console whose colours are ours: a text that it is given cannot bring its own to a terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(file=with_colours(sys.stderr if stderr else sys.stdout))

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string; what would command a terminal is shown."""
        return super().render_str(printable(text) if self.is_terminal else text, **options)

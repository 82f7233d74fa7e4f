"""How commands print: JSON for machines, text for people.

What a model, a file or a server wrote reaches a terminal only through `guarded` streams, which no control or
escape sequence passes. So no command has to remember it. Colours are ours alone: they pass in a stream
`with_colours`, which is written to by consoles that have made the text harmless before (`GuardedConsole`).
"""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TextIO, cast

from treenail.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


def json_text(data: object, *, indent: int | None = None) -> str:
    """Return data as JSON, in the one vocabulary of `docs/json-schema.json`."""
    return json.dumps(data, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: object) -> object:
    """Write what JSON has no word for: a state by its name, a time in ISO 8601, a path as text."""
    if isinstance(value, Enum):
        return value.value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def print_json(data: object) -> None:
    """Print one JSON document."""
    print(json_text(data, indent=2))


def print_result(as_json: bool, data: object, text: str) -> None:
    """Print a result: as JSON, or as text."""
    if as_json:
        print_json(data)
    else:
        print(printable(text) if sys.stdout.isatty() else text)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text of any origin: nothing in it is markup, and no control character is sent."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


_CONTROLS = (
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
    "|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NOT_TEXT = re.compile(r"\x1b|" + _CONTROLS)
_NOT_OURS = re.compile(r"\x1b(?!\[[0-9;]*m)|" + _CONTROLS)


class _Guard:
    """A stream to a terminal on which only text can be written, or text and colours."""

    def __init__(self, stream: TextIO, *, colours: bool = False) -> None:
        self.unguarded = stream
        self._shown = _NOT_OURS if colours else _NOT_TEXT

    def write(self, text: str) -> int:
        """Write a text; other control characters are shown, in a form that is good in JSON as well."""
        if not text.isprintable():
            text = self._shown.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        return self.unguarded.write(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


_SHOWN = "treenail.shown"
_IN_ASCII = {
    "●": "*",
    "○": "o",
    "✓": "+",
    "✗": "x",
    "·": "-",
    "…": "~",
    "\u2212": "-",
    "\u2013": "-",
    "▸": ">",
    "•": "*",
    "│": "|",
    "─": "-",
    "└": "`",
    "⚖": "!",
    "→": ">",
}


def _shown(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write what an encoding does not have: our own signs in ASCII, anything else as its number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = _IN_ASCII.get(error.object[error.start])
    return codecs.backslashreplace_errors(error) if sign is None else (sign, error.start + 1)


codecs.register_error(_SHOWN, _shown)


@contextmanager
def guarded() -> Iterator[None]:
    """Guard the output and the error stream, where they lead to a terminal.

    On any stream a character that its encoding does not have is shown, and is not an error.
    """
    before = sys.stdout, sys.stderr
    for each in before:
        if isinstance(each, io.TextIOWrapper):
            each.reconfigure(errors=_SHOWN)
    sys.stdout, sys.stderr = (guard(each) if each.isatty() else each for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard(stream: TextIO | io.TextIOBase) -> TextIO:
    """Return a stream that leads to a terminal, guarded."""
    return cast(TextIO, _Guard(cast(TextIO, stream)))


def with_colours(stream: TextIO) -> TextIO:
    """Return a guarded stream that colours pass, for a console; any other stream as it is."""
    return cast(TextIO, _Guard(stream.unguarded, colours=True)) if isinstance(stream, _Guard) else stream


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one, for what moves the cursor and guards its text itself."""
    return stream.unguarded if isinstance(stream, _Guard) else stream

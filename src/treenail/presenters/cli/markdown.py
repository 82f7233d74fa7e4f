"""Markdown that arrives in pieces: which blocks are finished, and how they look in a terminal.

A block is finished when the next one has begun: only the last one can still become something else (a line
with `---` below it becomes a heading, an item continues a list). So a block is printed once, when final.
"""

from __future__ import annotations

import re
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text

from treenail.presenters.cli.live_area import rendered
from treenail.printable import printable

# HTML is text here: a terminal shows none, and a tag must not hide what stands in it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

_SHORT_CHARS = 2_000
"""Up to which length a block is parsed anew with each of its lines."""

_SHOWN_CHARS = 8_000
_SHOWN_LINES = 100
"""How much of the block under way is rendered each time it is drawn."""


class MarkdownStream:
    """Splits a text that arrives in pieces into finished blocks and the one under way."""

    def __init__(self) -> None:
        self.pending = ""
        """The block under way."""
        self._parse_at = 0
        """From which length on it is parsed again: a long block is not parsed for each of its lines."""

    def add(self, text: str) -> str:
        """Take a piece. Returns the blocks that are finished now, as text, or an empty one."""
        self.pending += text
        if "\n" not in text or len(self.pending) < self._parse_at:
            return ""
        lines = re.split(r"(?<=\n)", self.pending)
        cut = _last_block(self.pending, lines)
        finished, self.pending = "".join(lines[:cut]), "".join(lines[cut:])
        self._parse_at = len(self.pending) + max(len(self.pending) - _SHORT_CHARS, 0) // 2
        return finished if finished.strip() else ""

    def rest(self) -> str:
        """Return the block under way, as finished as it will be."""
        rest, self.pending, self._parse_at = self.pending, "", 0
        return rest if rest.strip() else ""

    def lines(self, console: Console, width: int, text: str | None = None) -> list[str]:
        """Render the block under way, of a long one the end, or finished ones; without blank lines around."""
        shown = printable(_end_of(self.pending) if text is None else text)
        lines = rendered(console, _Markdown(shown), width) if shown.strip() else []
        while lines and not lines[0].strip():
            lines.pop(0)
        while lines and not lines[-1].strip():
            lines.pop()
        return lines


def _end_of(block: str) -> str:
    """Return the end of a long block, which is all that a screen has room for; of code, as code."""
    end = "\n".join(block[-_SHOWN_CHARS:].split("\n")[-_SHOWN_LINES:])
    if len(end) == len(block):
        return block
    first, _, _ = block.partition("\n")
    return f"{first}\n{end}" if first.lstrip().startswith(("```", "~~~")) else end


def _last_block(text: str, lines: list[str]) -> int:
    """Return the line at which the block that is not finished begins."""
    blocks = [each for each in _PARSER.parse(text) if each.level == 0 and each.map and each.nesting >= 0]
    if not blocks:
        return 0
    last = blocks[-1]
    assert last.map is not None
    start, end = last.map
    ended = last.type == "paragraph_open" and end < len(lines) and not lines[end].strip()
    return end if ended and lines[end].endswith("\n") else start


class _Heading(Heading):
    """A heading at the left, without a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        text.justify = "left"
        if self.tag == "h1":
            text.stylize("bold underline")
        yield text


class _CodeBlock(CodeBlock):
    """Code with the terminal's own colours, indented."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        if console.no_color or console.color_system is None:
            yield Text("\n".join(f"  {line}" for line in code.split("\n")))
            return
        yield Syntax(
            code,
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class _Markdown(Markdown):
    """Markdown whose lines end where the model ended them."""

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for block in self.parsed:
            for each in block.children or ():
                if each.type == "softbreak":
                    each.type = "hardbreak"

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

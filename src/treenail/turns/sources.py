"""Tools that come from elsewhere for the length of a run, such as those of an MCP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from treenail.prompt import MarkdownSection
from treenail.turns.turn import InnerLoop


@runtime_checkable
class ToolSource(Protocol):
    """Brings tools along for the length of a run. It stands in the list of an agent's tools."""

    def attached(self, loop: InnerLoop) -> AbstractAsyncContextManager[object]:
        """Add the tools to a loop: entered before its turn runs, left when the turn has ended."""
        ...


@contextmanager
def prompt_extended(loop: InnerLoop, section: MarkdownSection[Any]) -> Iterator[None]:
    """Add a section to a loop's prompt for the length of the block."""
    before = loop.prompt
    template = before.template
    loop.prompt = type(before)(replace(template, sections=(*template.sections, section)))
    try:
        yield
    finally:
        loop.prompt = before

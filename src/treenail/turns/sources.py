"""Tools that come from elsewhere for the length of a run, such as those of an MCP server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from treenail.prompt import MarkdownSection, Section
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
    with _sections(loop, (*loop.prompt.template.sections, section)):
        yield


@contextmanager
def first_section(loop: InnerLoop, **changes: Any) -> Iterator[None]:
    """Change fields of the first section of a loop's prompt for the length of the block."""
    first, *others = loop.prompt.template.sections
    with _sections(loop, (replace(first, **changes), *others)):
        yield


@contextmanager
def _sections(loop: InnerLoop, sections: Sequence[Section[Any]]) -> Iterator[None]:
    before = loop.prompt
    loop.prompt = type(before)(replace(before.template, sections=tuple(sections)))
    try:
        yield
    finally:
        loop.prompt = before

"""How much of a section the model sees, who changes that, and the two tools by which it asks for more.

Theory of operation
-------------------
A section is shown whole or as its summary. What applies is, in this order: what the caller
of `render` says, what the session's `VisibilityOverrides` say for the section's path, and
what the section says itself. Overrides are working state: a rollback takes them back.

A summarised section hides its subsections and their tools. If there are tools in it, the
model is given `open_sections`; calling it raises `VisibilityExpansionRequired`, which rolls
the call back and reaches the loop. The loop dispatches the events that `expand` makes of it
and renders again, at most `MAX_EXPANSIONS` times. If there are no tools in it, reading is
enough: `read_section` returns the text and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from treenail.errors import PromptEvaluationError, ToolValidationError, VisibilityExpansionRequired
from treenail.log import SlicePolicy
from treenail.state import Session, SessionProtocol, event, reducer
from treenail.tools import Tool, ToolContext, ToolResult

MAX_EXPANSIONS = 10
"""How often one evaluation opens sections and begins again, at most."""

OPEN_SECTIONS = "open_sections"
READ_SECTION = "read_section"
READ_RESULT = "read_result"
"""The tool that reads on in a long result, which the loop adds."""

RESERVED_TOOLS = frozenset({OPEN_SECTIONS, READ_SECTION, READ_RESULT})
"""The names of the tools that are added to a prompt's own."""

SectionPath = tuple[str, ...]
"""Where a section stands: the keys of its ancestors, and its own."""


class SectionVisibility(Enum):
    """How much of a section the model sees."""

    FULL = "full"
    """Its whole body, its subsections and its tools."""
    SUMMARY = "summary"
    """Its summary, and how to ask for the rest."""


def dotted(path: Iterable[str]) -> str:
    """Write a path as the model sees it: `guide.details`."""
    return ".".join(path)


# --- the slice -------------------------------------------------------------------------------------


@event(name="treenail.SetVisibilityOverride", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class SetVisibilityOverride:
    """From now on the section at this path is shown so, whatever it says itself."""

    path: SectionPath
    visibility: SectionVisibility


@event(name="treenail.ClearVisibilityOverride", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class ClearVisibilityOverride:
    """From now on the section at this path decides for itself again."""

    path: SectionPath


@event(name="treenail.ClearAllVisibilityOverrides", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class ClearAllVisibilityOverrides:
    """From now on every section decides for itself again."""


@event(name="treenail.VisibilityOverrides", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class VisibilityOverrides:
    """The overrides of a session, by path. Working state: a failed call takes its own ones back."""

    overrides: Mapping[SectionPath, SectionVisibility] = field(default_factory=dict)

    def get(self, path: SectionPath) -> SectionVisibility | None:
        """Return the override of a path, or None."""
        return self.overrides.get(path)

    @reducer(on=SetVisibilityOverride)
    def _set(self, event: SetVisibilityOverride) -> VisibilityOverrides:
        return VisibilityOverrides({**self.overrides, event.path: event.visibility})

    @reducer(on=ClearVisibilityOverride)
    def _clear(self, event: ClearVisibilityOverride) -> VisibilityOverrides:
        return VisibilityOverrides(
            {path: kept for path, kept in self.overrides.items() if path != event.path}
        )

    @reducer(on=ClearAllVisibilityOverrides)
    def _clear_all(self, event: ClearAllVisibilityOverrides) -> VisibilityOverrides:
        return VisibilityOverrides()


def register_visibility(session: Session) -> None:
    """Let a session keep `VisibilityOverrides`. Calling it again changes nothing."""
    session.install(VisibilityOverrides, initial=VisibilityOverrides)


def overrides_of(session: SessionProtocol | None) -> Mapping[SectionPath, SectionVisibility]:
    """Return the overrides that a session holds; none without a session."""
    held = None if session is None else session[VisibilityOverrides].latest()
    return {} if held is None else held.overrides


def expand(
    required: VisibilityExpansionRequired, *, expansions: int, prompt_name: str = ""
) -> tuple[SetVisibilityOverride, ...]:
    """Say what a loop has to dispatch before it renders again.

    `expansions` is how often this evaluation has been expanded already. One too many, or a request
    that would change nothing, is a `PromptEvaluationError` with `phase="request"`.
    """
    if expansions >= MAX_EXPANSIONS:
        raise PromptEvaluationError(
            f"the model opened sections {expansions} times in one evaluation and asks for more "
            f"({', '.join(required.section_keys) or 'no section named'}); the limit is {MAX_EXPANSIONS}. "
            "Show the sections that it needs in full from the start",
            prompt_name=prompt_name,
            phase="request",
        )
    if not required.requested_overrides:
        raise PromptEvaluationError(
            "a tool asked for sections to be opened but named none; raise VisibilityExpansionRequired "
            "with requested_overrides={path: SectionVisibility.FULL}",
            prompt_name=prompt_name,
            phase="request",
        )
    return tuple(
        SetVisibilityOverride(path, SectionVisibility(wanted))
        for path, wanted in sorted(required.requested_overrides.items())
    )


# --- the tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSectionsParams:
    """Which sections to open, and why."""

    section_keys: tuple[str, ...] = field(
        metadata={"description": "The sections to open, by the names in parentheses after their titles."}
    )
    reason: str = field(metadata={"description": "What they are needed for, in one sentence."})


@dataclass(frozen=True, slots=True)
class ReadSectionParams:
    """Which section to read."""

    section_key: str = field(
        metadata={"description": "The section to read, by the name in parentheses after its title."}
    )


@dataclass(frozen=True, slots=True)
class Closed:
    """A section that the model sees only the summary of, or one below it."""

    opens: tuple[SectionPath, ...]
    """The paths that must be shown in full for it to be seen; empty if one of them cannot be."""
    has_tools: bool
    """Whether there are tools in it, so that reading is not enough."""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """What one rendering hides and shows, and how to read what it hides."""

    closed: Mapping[SectionPath, Closed]
    shown: frozenset[SectionPath]
    read: Callable[[SectionPath, SessionProtocol | None], str]

    def tools(self) -> tuple[Tool[Any, Any], ...]:
        """Return the tools that this rendering needs: those for which there is something to do."""
        roots = [each for path, each in self.closed.items() if path in self.shown and each.opens]
        made: list[Tool[Any, Any]] = []
        if any(each.has_tools for each in roots):
            made.append(
                Tool[OpenSectionsParams, None](
                    name=OPEN_SECTIONS,
                    description="Open summarised sections: their full text and their tools become available.",
                    handler=self.open_sections,
                    effects="none",
                )
            )
        if any(not each.has_tools for each in roots):
            made.append(
                Tool[ReadSectionParams, None](
                    name=READ_SECTION,
                    description="Read the full text of a summarised section. It changes nothing.",
                    handler=self.read_section,
                    effects="none",
                )
            )
        return tuple(made)

    def open_sections(self, params: OpenSectionsParams, *, context: ToolContext) -> ToolResult[None]:
        """Ask the loop to show these sections in full. Never returns."""
        wanted: dict[SectionPath, SectionVisibility] = {}
        opened: list[str] = []
        for key in dict.fromkeys(params.section_keys):
            path = self._known(key)
            closed = self.closed.get(path)
            if closed is None:
                continue
            self._check_can_open(key, closed)
            opened.append(key)
            wanted.update(dict.fromkeys(closed.opens, SectionVisibility.FULL))
        if not wanted:
            asked = ", ".join(params.section_keys) or "none"
            raise ToolValidationError(
                f"Nothing to open: these sections are shown in full already: {asked}. "
                f"Summarised are: {self._choices()}."
            )
        raise VisibilityExpansionRequired(
            f"the sections {', '.join(opened)} must be opened: {params.reason}",
            requested_overrides=wanted,
            reason=params.reason,
            section_keys=tuple(opened),
        )

    def read_section(self, params: ReadSectionParams, *, context: ToolContext) -> ToolResult[None]:
        """Return the full text of a section. The prompt stays as it is."""
        key = params.section_key
        path = self._known(key)
        closed = self.closed.get(path)
        if closed is None:
            raise ToolValidationError(
                f"The section {key} is shown in full already. Summarised are: {self._choices()}."
            )
        self._check_can_open(key, closed)
        if closed.has_tools:
            raise ToolValidationError(
                f"The section {key} has tools; open it: {OPEN_SECTIONS} with section_keys [{key!r}]."
            )
        return ToolResult.ok(message=self.read(path, context.session))

    def _known(self, key: str) -> SectionPath:
        path = tuple(key.strip().split("."))
        if path not in self.shown and path not in self.closed:
            raise ToolValidationError(f"There is no section {key!r}. Summarised are: {self._choices()}.")
        return path

    def _check_can_open(self, key: str, closed: Closed) -> None:
        if not closed.opens:
            raise ToolValidationError(f"The section {key} is only available as its summary.")

    def _choices(self) -> str:
        return ", ".join(dotted(path) for path, each in self.closed.items() if each.opens) or "none"

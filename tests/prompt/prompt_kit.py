"""What the tests of prompts share: types, small prompts, and trees of sections to draw from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st

from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, Section, SectionVisibility
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.tools import Tool, ToolCall, ToolResult, ToolRunner


@dataclass(frozen=True)
class Task:
    path: str
    times: int = 2


@dataclass(frozen=True)
class Review:
    score: int
    notes: list[str] = field(default_factory=list)


def look(path: str) -> str:
    """Look at a file."""
    return f"looked at {path}"


@cache
def named_tool(name: str) -> Tool[Any, Any]:
    return Tool.wrap(look, name=name, effects="none")


def template_of(*sections: Section[Any], **fields: Any) -> PromptTemplate[str]:
    return PromptTemplate(ns="tests", key="case", sections=sections, **fields)


def prompt_of(*sections: Section[Any], **fields: Any) -> Prompt[str]:
    return Prompt(template_of(*sections, **fields))


def call(prompt: Prompt[Any], session: Session, name: str, **arguments: Any) -> ToolResult[Any]:
    """Call a tool of a prompt, as it is rendered now, under the tool transaction."""
    rendered = prompt.render(session)
    state = ExecutionState(session=session, resources=ResourceRegistry())
    runner = ToolRunner(state, rendered.tool_registry, prompt.name, policies=rendered.policies)
    return runner.execute(ToolCall("call-1", name, arguments))


# --- trees -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A section to be made: what it says is a mark that stands nowhere else."""

    path: tuple[str, ...]
    enabled: bool
    summarised: bool
    has_tool: bool
    children: tuple[Plan, ...]

    @property
    def mark(self) -> str:
        return f"<body of {'/'.join(self.path)}>"

    @property
    def tool_name(self) -> str:
        return "tool_" + "_".join(self.path)

    def walk(self) -> Iterator[Plan]:
        yield self
        for each in self.children:
            yield from each.walk()

    def section(self, *, by_function: bool = False) -> MarkdownSection[Any]:
        visibility = SectionVisibility.SUMMARY if self.summarised else SectionVisibility.FULL
        return MarkdownSection(
            f"Section {self.path[-1]}",
            self.mark,
            key=self.path[-1],
            enabled=(lambda: self.enabled) if by_function else self.enabled,
            summary=f"<summary of {'/'.join(self.path)}>",
            visibility=(lambda: visibility) if by_function else visibility,
            tools=[named_tool(self.tool_name)] if self.has_tool else [],
            children=[each.section(by_function=by_function) for each in self.children],
        )


@st.composite
def plans(draw: st.DrawFn, *, above: tuple[str, ...] = (), depth: int = 3) -> tuple[Plan, ...]:
    """Draw the sections of a prompt, and all below them."""
    count = draw(st.integers(0 if above else 1, 3))
    made = []
    for index in range(count):
        path = (*above, f"s{index}")
        children = draw(plans(above=path, depth=depth - 1)) if depth > 1 else ()
        flags = [draw(st.integers(0, 9)) for _ in range(3)]
        made.append(Plan(path, flags[0] < 8, flags[1] < 3, flags[2] < 4, children))
    return tuple(made)


def everything(made: tuple[Plan, ...]) -> list[Plan]:
    return [plan for each in made for plan in each.walk()]


def above(plan: Plan, all_plans: list[Plan]) -> list[Plan]:
    """Return the plans strictly above one."""
    return [each for each in all_plans if each.path != plan.path and plan.path[: len(each.path)] == each.path]

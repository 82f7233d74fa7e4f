"""Rendering: from sections and what is bound to them to the text and the tools that a model is given.

Theory of operation
-------------------
A template is a tree of nodes. Rendering walks it depth first and decides for each section
whether it is there and how much of it is shown; only then is any text made. A section that
is not enabled takes its subtree along and gets no number, so the numbers that the model sees
have no gaps. A summarised section hides its subtree, but the walk continues below it, to know
whether there are tools in it.

Rendering reads and never writes: it is given a read-only view of the session, and gives the
same text for the same template, bindings and state.

Whatever has no value is found before the first piece of text is made, in every section that
could be there: also in those that are summarised now and opened later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Generic

from treenail.errors import PromptRenderError, PromptValidationError
from treenail.prompt.capture import name_of
from treenail.prompt.output import Container, OutputT, StructuredOutput
from treenail.prompt.sections import Section
from treenail.prompt.values import as_data, as_text, fields_of, values_of
from treenail.prompt.visibility import (
    OPEN_SECTIONS,
    READ_SECTION,
    Closed,
    Disclosure,
    SectionPath,
    SectionVisibility,
    dotted,
    overrides_of,
)
from treenail.state import Deadline, SessionProtocol
from treenail.tools import Tool, ToolExample, ToolPolicy

_MAX_HEADING = 6
"""Markdown has no deeper headings; the numbers continue."""


# --- what a prompt is ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SectionDescriptor:
    """A section's place, and a hash of what was written there."""

    path: SectionPath
    content_hash: str


@dataclass(frozen=True, slots=True)
class ToolDescriptor:
    """A tool, the section it lives in, and a hash of what the model is told about it."""

    path: SectionPath
    name: str
    contract_hash: str


@dataclass(frozen=True, slots=True)
class PromptDescriptor:
    """What a template is, apart from all that is bound to it: the same in every process.

    `hash` changes if a section, a tool's contract or the output type changes, and not otherwise.
    """

    ns: str
    key: str
    sections: tuple[SectionDescriptor, ...]
    tools: tuple[ToolDescriptor, ...]
    hash: str


@dataclass(frozen=True, slots=True)
class Node:
    """A section in its place."""

    path: SectionPath
    section: Section[Any]
    children: tuple[Node, ...]

    @classmethod
    def tree(cls, sections: Iterable[Section[Any]], above: SectionPath = ()) -> tuple[Node, ...]:
        """Make the nodes of sections and of all below them."""
        return tuple(
            cls((*above, each.key), each, cls.tree(each.children, (*above, each.key))) for each in sections
        )

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, depth first."""
        yield self
        for each in self.children:
            yield from each.walk()


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes and all below them, depth first."""
    for each in nodes:
        yield from each.walk()


def possible(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that could be there: all but the subtrees that are never enabled."""
    for each in nodes:
        if each.section.enabled is not False:
            yield each
            yield from possible(each.children)


def describe(
    ns: str, key: str, nodes: Sequence[Node], output: StructuredOutput[Any] | None
) -> PromptDescriptor:
    """Describe a template."""
    sections = tuple(
        SectionDescriptor(node.path, _hash([node.section.title, node.section.source(), node.section.summary]))
        for node in walk(nodes)
    )
    tools = tuple(
        ToolDescriptor(node.path, tool.name, _digest(tool.contract))
        for node in walk(nodes)
        for tool in node.section.own_tools
    )
    whole = _hash([ns, key, as_data(sections), as_data(tools), None if output is None else output.schema])
    return PromptDescriptor(ns, key, sections, tools, whole)


def _hash(data: object) -> str:
    return _digest(json.dumps(as_data(data), sort_keys=True, separators=(",", ":")))


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# --- what is bound to it ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bindings:
    """The values that a prompt was given: parameters by type, variables by name."""

    params: Mapping[type, object] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)

    def missing(self, section: Section[Any]) -> tuple[str, ...]:
        """Return the names that the section has no value for."""
        kind = section.params_type
        if kind is None:
            return tuple(sorted(section.placeholders() - self.variables.keys()))
        if kind in self.params or section.default_params is not None:
            return ()
        return tuple(
            name
            for name, is_required in fields_of(kind).items()
            if is_required and name not in self.variables
        )

    def params_for(self, section: Section[Any], path: SectionPath) -> Any:
        """Return the section's parameters, variables of the same names put in; or just its variables.

        Raises `PromptValidationError` if the parameter type does not take the values.
        """
        kind = section.params_type
        if kind is None:
            return MappingProxyType({name: self.variables[name] for name in sorted(section.placeholders())})
        given = self.params.get(kind, section.default_params)
        fields = fields_of(kind)
        over = {name: value for name, value in self.variables.items() if name in fields}
        if given is not None and not over:
            return given
        values = {} if given is None else {k: v for k, v in values_of(given).items() if k in fields}
        try:
            return kind(**{**values, **over})
        except Exception as error:
            raise PromptValidationError(
                f"its parameters {name_of(kind)} cannot be made of {', '.join(over) or 'their defaults'}: "
                f"{type(error).__name__}: {error}",
                section_path=path,
            ) from error

    def as_data(self) -> dict[str, Any]:
        """Return everything that was bound, as JSON data."""
        made = {name_of(kind): as_data(value) for kind, value in self.params.items()}
        return {**({"variables": as_data(self.variables)} if self.variables else {}), "params": made}


# --- what comes out --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RenderedSection:
    """A section as it was shown."""

    path: SectionPath
    number: str
    """Its place among those that are shown: `1`, `1.2`."""
    title: str
    visibility: SectionVisibility


@dataclass(frozen=True)
class RenderedPrompt(Generic[OutputT]):
    """What a model is given: the text, the tools, and what its answer must look like."""

    text: str
    tools: tuple[Tool[Any, Any], ...] = ()
    """In the order of their sections; those that open and read sections come last."""
    structured_output: StructuredOutput[OutputT] | None = None
    """None if the answer is plain text."""
    deadline: Deadline | None = None
    descriptor: PromptDescriptor | None = None
    tool_param_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What the model is told about each parameter, by tool and parameter."""
    policies: Mapping[str, tuple[ToolPolicy, ...]] = field(default_factory=dict)
    """The policies of each tool, by its name."""
    sections: tuple[RenderedSection, ...] = ()
    prompt_name: str = ""

    @property
    def output_type(self) -> Any:
        """The record type of the answer or of its items; None for text."""
        return None if self.structured_output is None else self.structured_output.output_type

    @property
    def container(self) -> Container | None:
        """Whether the answer is an object or an array; None for text."""
        return None if self.structured_output is None else self.structured_output.container

    @property
    def allow_extra_keys(self) -> bool:
        """Whether the answer may have keys that the type does not have."""
        return self.structured_output is not None and self.structured_output.allow_extra_keys

    @property
    def tool_registry(self) -> Mapping[str, Tool[Any, Any]]:
        """The tools by name."""
        return {each.name: each for each in self.tools}

    def with_output_format(self) -> RenderedPrompt[OutputT]:
        """Return the prompt with the schema of the answer in its text: for providers that take none."""
        output = self.structured_output
        if output is None:
            return self
        schema = json.dumps(output.schema, ensure_ascii=False, indent=2)
        added = (
            "## Response format\n\nAnswer with one JSON object that fits this JSON schema, and with nothing "
            f"else:\n\n```json\n{schema}\n```"
        )
        return replace(self, text=f"{self.text}\n\n{added}" if self.text else added)


def parse_output(text: str, rendered: RenderedPrompt[OutputT]) -> OutputT:
    """Read a model's answer as the prompt's output type; plain text is returned as it is.

    Raises `OutputParseError`, whose text says what to put right.
    """
    output = rendered.structured_output
    if output is None:
        return text  # type: ignore[return-value]  # without a structured output the type is str
    return output.parse(text, prompt_name=rendered.prompt_name)


# --- the walk --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shown:
    """A section that is there: with its number, its parameters, and what covers it."""

    node: Node
    number: str
    params: Any
    visibility: SectionVisibility
    covered_by: tuple[_Shown, ...]
    """The summarised sections above it, outermost first; empty if it is seen."""

    @property
    def path(self) -> SectionPath:
        return self.node.path

    @property
    def is_closed(self) -> bool:
        return self.visibility is SectionVisibility.SUMMARY


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders one tree with one set of bindings."""

    nodes: tuple[Node, ...]
    bindings: Bindings

    def check_bound(self) -> None:
        """Raise `PromptRenderError` if a section that could be there has no value for something."""
        lacking = [
            (node, name) for node in possible(self.nodes) for name in self.bindings.missing(node.section)
        ]
        if not lacking:
            return
        node, name = lacking[0]
        kind = node.section.params_type
        how = f"with_variables({name}=...)" if kind is None else f"bind({name_of(kind)}(...))"
        others = [f"{dotted(each.path)}: ${{{other}}}" for each, other in lacking[1:]]
        raise PromptRenderError(
            f"the placeholder ${{{name}}} has no value; give it one with {how}"
            + (f". Also without a value: {', '.join(others)}" if others else ""),
            section_path=node.path,
            placeholder=name,
        )

    def show(
        self,
        session: SessionProtocol | None,
        explicit: Mapping[SectionPath, SectionVisibility],
    ) -> tuple[_Shown, ...]:
        """Decide what is there and how much of it is shown, depth first; what is covered is included."""
        self.check_bound()
        overrides = {**overrides_of(session), **explicit}
        return tuple(self._show(self.nodes, "", (), session, overrides))

    def _show(
        self,
        nodes: Iterable[Node],
        above: str,
        covered_by: tuple[_Shown, ...],
        session: SessionProtocol | None,
        overrides: Mapping[SectionPath, SectionVisibility],
    ) -> Iterator[_Shown]:
        count = 0
        for node in nodes:
            section, path = node.section, node.path
            params = self.bindings.params_for(section, path) if section.enabled is not False else None
            if not section.is_enabled(params, session=session, path=path):
                continue
            count += 1
            override = overrides.get(path) if section.accepts_overrides else None
            visibility = override or section.chosen_visibility(params, session=session, path=path)
            if visibility is SectionVisibility.SUMMARY and not section.summary:
                raise PromptRenderError(
                    "an override wants its summary, but it has none; give it summary=..., or dispatch "
                    f"ClearVisibilityOverride({path!r})",
                    section_path=path,
                )
            number = f"{above}{count}"
            shown = _Shown(node, number, params, visibility, covered_by)
            yield shown
            covers = (*covered_by, shown) if shown.is_closed else covered_by
            yield from self._show(node.children, f"{number}.", covers, session, overrides)

    # .. text ..

    def write(
        self,
        everything: Sequence[_Shown],
        closed: Mapping[SectionPath, Closed],
        session: SessionProtocol | None,
    ) -> str:
        """Make the text of what is not covered."""
        parts = [
            part
            for shown in everything
            if not shown.covered_by
            for part in self._parts(shown, closed.get(shown.path), session)
        ]
        return "\n\n".join(parts)

    def _parts(self, shown: _Shown, closed: Closed | None, session: SessionProtocol | None) -> Iterator[str]:
        section, path = shown.node.section, shown.path
        marks = "#" * min(len(path) + 1, _MAX_HEADING)
        yield f"{marks} {shown.number}. {section.title} ({dotted(path)})"
        try:
            if shown.is_closed:
                body = section.render_summary(shown.params)
            else:
                body = section.render_body(shown.params, session=session)
        except Exception as error:
            raise PromptRenderError(
                f"its text could not be made: {type(error).__name__}: {error}", section_path=path
            ) from error
        if body.strip():
            yield body.strip("\n").rstrip()
        if closed is not None:
            if closed.opens:
                yield _how_to_see(path, closed)
        else:
            for tool in section.own_tools:
                if tool.examples:
                    yield _examples(tool)

    # .. what is hidden ..

    def disclosure(self, everything: Sequence[_Shown], closed: Mapping[SectionPath, Closed]) -> Disclosure:
        """Say what this rendering hides, and how to read it."""
        return Disclosure(
            closed=closed,
            shown=frozenset(each.path for each in everything if not each.covered_by),
            read=self.read,
        )

    def read(self, path: SectionPath, session: SessionProtocol | None) -> str:
        """Return the whole text of one section and of all below it, as it is now."""
        around = [
            node.path
            for node in walk(self.nodes)
            if _is_prefix(path, node.path) or _is_prefix(node.path, path)
        ]
        full = dict.fromkeys(around, SectionVisibility.FULL)
        view = read_only(session)
        everything = [each for each in self.show(view, full) if _is_prefix(path, each.path)]
        if not everything:
            raise PromptRenderError("it is not enabled any more", section_path=path)
        return self.write(everything, closed_sections(everything), view)


def _is_prefix(short: SectionPath, long: SectionPath) -> bool:
    return long[: len(short)] == short


def closed_sections(everything: Sequence[_Shown]) -> dict[SectionPath, Closed]:
    """Return the sections of which only a summary is seen, or nothing, and how to see them."""
    with_tools = [each.path for each in everything if each.node.section.own_tools]
    made: dict[SectionPath, Closed] = {}
    for each in everything:
        covers = (*each.covered_by, each) if each.is_closed else each.covered_by
        if not covers:
            continue
        can_open = all(cover.node.section.accepts_overrides for cover in covers)
        made[each.path] = Closed(
            opens=tuple(cover.path for cover in covers) if can_open else (),
            has_tools=any(_is_prefix(each.path, path) for path in with_tools),
        )
    return made


def _how_to_see(path: SectionPath, closed: Closed) -> str:
    name = json.dumps(dotted(path))
    if closed.has_tools:
        return (
            f"[This is a summary. Call {OPEN_SECTIONS} with section_keys [{name}] to see and use all of it.]"
        )
    return f"[This is a summary. Call {READ_SECTION} with section_key {name} for the whole text.]"


def _examples(tool: Tool[Any, Any]) -> str:
    lines = [f"Examples of `{tool.name}`:"]
    for each in tool.examples:
        lines.extend(_example(each))
    return "\n\n".join((lines[0], "\n".join(lines[1:])))


def _example(example: ToolExample[Any, Any]) -> Iterator[str]:
    yield f"- {example.description}"
    yield f"  - input: {_inline({} if example.input is None else example.input)}"
    yield f"  - output: {_inline(example.output)}"


def _inline(value: Any) -> str:
    if isinstance(value, str) or callable(getattr(value, "render", None)):
        return as_text(value)
    return json.dumps(as_data(value), ensure_ascii=False)


def read_only(session: SessionProtocol | None) -> SessionProtocol | None:
    """Return a read-only view of a session."""
    view = getattr(session, "read_only_view", None)
    return session if view is None else view()

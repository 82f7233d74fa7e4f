"""Prompts: a template, and a template with values.

`PromptTemplate[Out]` says what a prompt is: sections, tools and rules, and the type of the
answer. It is frozen, and it is checked when it is made: keys, paths, tool names, placeholders,
summaries, the output type. `Prompt[Out]` is a template with what is bound to it. It is a value
too: `bind` and `with_variables` return another prompt and leave the one at hand as it was, so
that one prompt can serve several evaluations at the same time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypedDict, Unpack, cast

from treenail.errors import PromptValidationError
from treenail.prompt.capture import Captures, name_of
from treenail.prompt.output import OutputT, StructuredOutput, structured_output
from treenail.prompt.render import (
    Bindings,
    Node,
    PromptDescriptor,
    RenderedPrompt,
    RenderedSection,
    Renderer,
    closed_sections,
    describe,
    possible,
    read_only,
    walk,
)
from treenail.prompt.sections import Section
from treenail.prompt.values import fields_of, is_record
from treenail.prompt.visibility import (
    RESERVED_TOOLS,
    SectionPath,
    SectionVisibility,
    dotted,
)
from treenail.state import Deadline, ResourceRegistry, SessionProtocol
from treenail.tools import Tool, ToolPolicy

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

Resources = ResourceRegistry | Mapping[type[Any], object]
"""What tools work with: a registry, or types with their instances or bindings."""


@dataclass(frozen=True)
class PromptTemplate(Captures, Generic[OutputT]):
    """What a prompt is, apart from the values that are bound to it. Mistakes are found when it is made.

    `PromptTemplate[Review](...)` expects answers of that type: a dataclass, a pydantic model, a list
    of one of them, or `str`, which is also what it is without a type.
    """

    ns: str
    """Whose prompt it is: keys like those below, separated by slashes."""
    key: str
    """Which one it is; lower case, `[a-z0-9][a-z0-9._-]*`, at most 64 characters."""
    name: str | None = None
    """What people call it; the key if it is left out."""
    sections: Sequence[Section[Any]] = ()
    policies: Sequence[ToolPolicy] = ()
    """Rules for all tools."""
    feedback_providers: Sequence[Any] = ()
    """Judges that give feedback during the work, each with its trigger."""
    task_completion_checker: Any = None
    """The judge that is asked before the agent may stop."""
    nested_execution_config: Any = None
    """The limits of the judges."""
    allow_extra_keys: bool = False
    """Whether an answer may have keys that the output type does not have."""
    resources: Resources = field(default_factory=ResourceRegistry)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "ns", "/".join(_normal_key("ns", part) for part in self.ns.split("/")))
        put(self, "key", _normal_key("key", self.key))
        for each in ("sections", "policies", "feedback_providers"):
            put(self, each, tuple(getattr(self, each)))
        put(self, "resources", _registry(self.resources))
        self._check_sections()
        _ = self._owners  # Two tools of one name are found now,
        self._check_judges()
        _ = self.structured_output  # and so is an output type that cannot be described.

    # .. what it says ..

    @property
    def output_type(self) -> Any:
        """The type of the answer, as it was written in brackets; `str` for text."""
        return str if self.captured in (None, type(None)) else self.captured

    @functools.cached_property
    def structured_output(self) -> StructuredOutput[OutputT] | None:
        """What an answer must look like; None for text."""
        return structured_output(self.captured, allow_extra_keys=self.allow_extra_keys)

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The sections in their places."""
        return Node.tree(self.sections)

    @functools.cached_property
    def descriptor(self) -> PromptDescriptor:
        """What the template is, with a hash that is the same in every process."""
        return describe(self.ns, self.key, self.nodes, self.structured_output)

    @functools.cached_property
    def tools(self) -> tuple[Tool[Any, Any], ...]:
        """Every tool of every section, whether it is shown now or not."""
        return tuple(tool for node in walk(self.nodes) for tool in node.section.own_tools)

    def find_section(self, selector: str | SectionPath | type[Section[Any]]) -> Section[Any]:
        """Return the section with that dotted path, path, key or class. Raises if there is not just one."""
        found = [node for node in walk(self.nodes) if _is_meant(node, selector)]
        exact = [node for node in found if not isinstance(selector, str) or dotted(node.path) == selector]
        chosen = exact if len(found) > 1 else found
        if len(chosen) != 1:
            shown = name_of(selector) if isinstance(selector, type) else repr(selector)
            paths = ", ".join(dotted(node.path) for node in found or walk(self.nodes)) or "none"
            raise PromptValidationError(
                f"{'several sections are' if found else 'no section is'} meant by {shown} in the prompt "
                f"{self.key!r}; use one of these paths: {paths}"
            )
        return chosen[0].section

    def policies_for_tool(self, name: str) -> tuple[ToolPolicy, ...]:
        """Return the policies of a tool: its section's, those of the sections above, the template's."""
        owner = self._owners.get(name)
        if owner is None and name not in RESERVED_TOOLS:
            known = ", ".join(self._owners) or "none"
            raise PromptValidationError(f"the prompt {self.key!r} has no tool {name!r} (it has: {known})")
        found: list[ToolPolicy] = []
        for length in range(len(owner or ()), 0, -1):
            found.extend(self._by_path[(owner or ())[:length]].policies)
        return (*found, *self.policies)

    # .. checks ..

    def _check_sections(self) -> None:
        for each in self.sections:
            _check_kind(each, (), self.key)
        for path, section in self._by_path.items():
            section.check(path)

    @functools.cached_property
    def _by_path(self) -> Mapping[SectionPath, Section[Any]]:
        """The sections by their paths. Raises if two have the same."""
        found: dict[SectionPath, Section[Any]] = {}
        for node in walk(self.nodes):
            if node.path in found:
                raise PromptValidationError(
                    "two sections have this path; give one of them another key", section_path=node.path
                )
            found[node.path] = node.section
        return found

    @functools.cached_property
    def _owners(self) -> Mapping[str, SectionPath]:
        """Where each tool lives, by its name. Raises if that is not in one place."""
        owners: dict[str, SectionPath] = {}
        for path, section in self._by_path.items():
            for tool in section.own_tools:
                if tool.name in RESERVED_TOOLS:
                    raise PromptValidationError(
                        f"its tool has the name {tool.name!r}, which prompts use themselves; rename it",
                        section_path=path,
                    )
                if tool.name in owners:
                    raise PromptValidationError(
                        f"its tool {tool.name!r} is also one of the section {dotted(owners[tool.name])!r}; "
                        "tool names are unique in a prompt, so rename or remove one",
                        section_path=path,
                    )
                owners[tool.name] = path
        return owners

    def _check_judges(self) -> None:
        for each in self.feedback_providers:
            if not (hasattr(each, "provider") and hasattr(each, "trigger")):
                raise PromptValidationError(
                    f"feedback_providers of the prompt {self.key!r} has a {type(each).__qualname__}; "
                    "use FeedbackProviderConfig(provider=..., trigger=...)"
                )
        checker = self.task_completion_checker
        if checker is not None and not callable(getattr(checker, "check", None)):
            raise PromptValidationError(
                f"the task_completion_checker of the prompt {self.key!r} is a {type(checker).__qualname__} "
                "and has no method check(context)"
            )


class TemplateFields(TypedDict, total=False):
    """The fields of a `PromptTemplate`, as keyword arguments of a `Prompt`."""

    ns: str
    key: str
    name: str | None
    sections: Sequence[Section[Any]]
    policies: Sequence[ToolPolicy]
    feedback_providers: Sequence[Any]
    task_completion_checker: Any
    nested_execution_config: Any
    allow_extra_keys: bool
    resources: Resources


class Prompt(Captures, Generic[OutputT]):
    """A template with what is bound to it: `Prompt(template)`, or `Prompt[Out](ns=..., key=..., ...)`.

    `bind` and `with_variables` return another prompt; this one stays as it is.
    """

    def __init__(
        self,
        template: PromptTemplate[OutputT] | None = None,
        **given: Unpack[TemplateFields],
    ) -> None:
        self._template = self._resolved(template, given)
        self._bindings = Bindings()
        self._bound_resources = ResourceRegistry()

    def _resolved(
        self, template: PromptTemplate[OutputT] | None, given: Mapping[str, Any]
    ) -> PromptTemplate[OutputT]:
        """Take the template, with this prompt's output type if it has none; or make one."""
        kind = cast("type[PromptTemplate[OutputT]]", PromptTemplate)
        if self.captured is not None:
            kind = PromptTemplate[self.captured]  # type: ignore[name-defined]  # a class made at run time
        if template is None:
            for needed in ("ns", "key"):
                if needed not in given:
                    raise PromptValidationError(
                        f"a prompt without a template needs {needed}=...; or write Prompt(template)"
                    )
            return kind(**given)
        if given:
            raise PromptValidationError(
                f"a prompt of a template takes nothing else, but got {', '.join(given)}; "
                "put it into the template"
            )
        if self.captured in (None, template.captured):
            return template
        if template.captured is not None:
            raise PromptValidationError(
                f"this is a prompt for {name_of(self.captured)}, but its template {template.key!r} is one "
                f"for {name_of(template.captured)}; make the two the same"
            )
        return kind(**{each.name: getattr(template, each.name) for each in fields(template)})

    # .. what it is ..

    @property
    def template(self) -> PromptTemplate[OutputT]:
        """What it is a prompt of."""
        return self._template

    @property
    def ns(self) -> str:
        """Whose prompt it is."""
        return self._template.ns

    @property
    def key(self) -> str:
        """Which one it is."""
        return self._template.key

    @property
    def name(self) -> str:
        """What people call it."""
        return self._template.name or self._template.key

    @property
    def output_type(self) -> Any:
        """The type of the answer; `str` for text."""
        return self._template.output_type

    @property
    def tools(self) -> tuple[Tool[Any, Any], ...]:
        """Every tool of every section, whether it is shown now or not."""
        return self._template.tools

    @property
    def feedback_providers(self) -> tuple[Any, ...]:
        """Judges that give feedback during the work."""
        return tuple(self._template.feedback_providers)

    @property
    def task_completion_checker(self) -> Any:
        """The judge that is asked before the agent may stop."""
        return self._template.task_completion_checker

    @property
    def nested_execution_config(self) -> Any:
        """The limits of the judges."""
        return self._template.nested_execution_config

    @functools.cached_property
    def resources(self) -> ResourceRegistry:
        """What the tools work with: the template's, the sections' in order, and what was bound; later wins.

        Each prompt asks its sections once, so two prompts of one template share no resource that a
        section makes.
        """
        merged = cast(ResourceRegistry, self._template.resources)
        for node in walk(self._template.nodes):
            merged = merged.merge(node.section.resources(), strict=False)
        return merged.merge(self._bound_resources, strict=False)

    @property
    def render_inputs(self) -> Mapping[str, Any]:
        """What is bound, as JSON data."""
        return self._bindings.as_data()

    def find_section(self, selector: str | SectionPath | type[Section[Any]]) -> Section[Any]:
        """Return the section with that dotted path, path, key or class. Raises if there is not just one."""
        return self._template.find_section(selector)

    def policies_for_tool(self, name: str) -> tuple[ToolPolicy, ...]:
        """Return the policies of a tool: its section's, those of the sections above, the template's."""
        return self._template.policies_for_tool(name)

    # .. binding ..

    def bind(self, *params: object, resources: Resources | None = None) -> Prompt[OutputT]:
        """Return this prompt with parameters for its sections: one object per type, a newer one replaces.

        What no section takes, or a type that is given twice, is a `PromptValidationError`.
        """
        bound = dict(self._bindings.params)
        taken = {each.section.params_type for each in walk(self._template.nodes)} - {None}
        new: set[type] = set()
        for each in params:
            kind = type(each)
            if kind not in taken:
                raise self._not_taken(each, taken)
            if kind in new:
                raise PromptValidationError(
                    f"two {name_of(kind)} were bound to the prompt {self.key!r} at once; give one"
                )
            new.add(kind)
            bound[kind] = each
        registry = self._bound_resources
        if resources is not None:
            registry = registry.merge(_registry(resources), strict=False)
        return self._with(Bindings(bound, self._bindings.variables), registry)

    def with_variables(self, **values: object) -> Prompt[OutputT]:
        """Return this prompt with values for placeholders by name, wherever they stand.

        In a section with a parameter type the variable takes the place of the field of that name. A
        name that no section uses is a `PromptValidationError`.
        """
        known = self._variables()
        unknown = sorted(values.keys() - known)
        if unknown:
            raise PromptValidationError(
                f"the prompt {self.key!r} has no placeholder for {', '.join(unknown)} "
                f"(it has: {', '.join(sorted(known)) or 'none'}); correct the name, or leave it out",
                placeholder=unknown[0],
            )
        variables = {**self._bindings.variables, **values}
        return self._with(Bindings(self._bindings.params, variables), self._bound_resources)

    def _variables(self) -> set[str]:
        names: set[str] = set()
        for node in walk(self._template.nodes):
            kind = node.section.params_type
            names.update(node.section.placeholders() if kind is None else fields_of(kind))
        return names

    def _not_taken(self, given: object, taken: Iterable[Any]) -> PromptValidationError:
        known = ", ".join(sorted(name_of(each) for each in taken)) or "none"
        if isinstance(given, type):
            return PromptValidationError(
                f"{name_of(given)} is a class; bind an object: {name_of(given)}(...)"
            )
        what = name_of(type(given))
        if not is_record(type(given)):
            return PromptValidationError(
                f"a {what} cannot be bound to the prompt {self.key!r}; bind a dataclass or a pydantic model"
            )
        return PromptValidationError(
            f"no section of the prompt {self.key!r} takes {what} (its sections take: {known}); bind one of "
            "those, or write MarkdownSection[" + what + "](...)"
        )

    def _with(self, bindings: Bindings, resources: ResourceRegistry) -> Prompt[OutputT]:
        for node in possible(self._template.nodes):
            if not bindings.missing(node.section):
                bindings.params_for(node.section, node.path)  # What a type does not take is found now.
        new = object.__new__(type(self))
        new._template, new._bindings, new._bound_resources = self._template, bindings, resources
        return new

    # .. rendering ..

    def render(
        self,
        session: SessionProtocol | None = None,
        *,
        visibility: Mapping[str | SectionPath, SectionVisibility] | None = None,
        deadline: Deadline | None = None,
    ) -> RenderedPrompt[OutputT]:
        """Make the text and the tools that a model is given. Raises `PromptRenderError`.

        `visibility` says for single sections how they are shown, whatever the session and the sections
        say. The session is only read.
        """
        template = self._template
        renderer = Renderer(template.nodes, self._bindings)
        view = read_only(session)
        everything = renderer.show(view, self._explicit(visibility or {}))
        visible = [each for each in everything if not each.covered_by]
        tools = tuple(tool for each in visible if not each.is_closed for tool in each.node.section.own_tools)
        closed = closed_sections(everything)
        if closed:
            tools += renderer.disclosure(everything, closed).tools()
        return RenderedPrompt(
            text=renderer.write(everything, closed, view),
            tools=tools,
            structured_output=template.structured_output,
            deadline=deadline,
            descriptor=template.descriptor,
            tool_param_descriptions={tool.name: _param_descriptions(tool) for tool in tools},
            policies={tool.name: template.policies_for_tool(tool.name) for tool in tools},
            sections=tuple(
                RenderedSection(each.path, each.number, each.node.section.title, each.visibility)
                for each in visible
            ),
            prompt_name=self.name,
        )

    def _explicit(
        self, visibility: Mapping[str | SectionPath, SectionVisibility]
    ) -> dict[SectionPath, SectionVisibility]:
        known = self._template._by_path
        made: dict[SectionPath, SectionVisibility] = {}
        for selector, wanted in visibility.items():
            path = tuple(selector.split(".")) if isinstance(selector, str) else tuple(selector)
            if path not in known:
                raise PromptValidationError(
                    f"the prompt {self.key!r} has no section {dotted(path)!r} whose visibility could be set "
                    f"(it has: {', '.join(map(dotted, sorted(known))) or 'none'})"
                )
            made[path] = wanted
        return made

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} {self.ns}:{self.key}>"


def _normal_key(what: str, key: str) -> str:
    normal = key.strip().lower()
    if not _KEY.fullmatch(normal):
        raise PromptValidationError(
            f"{key!r} is not a prompt's {what}: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a "
            "letter or digit"
        )
    return normal


def _registry(resources: Resources) -> ResourceRegistry:
    return resources if isinstance(resources, ResourceRegistry) else ResourceRegistry.build(resources)


def _check_kind(section: object, above: SectionPath, key: str) -> None:
    if not isinstance(section, Section):
        raise PromptValidationError(
            f"the prompt {key!r} has a {type(section).__qualname__} among its sections; wrap it: "
            "MarkdownSection(title, text)",
            section_path=above,
        )
    for each in section.children:
        _check_kind(each, (*above, section.key), key)


def _is_meant(node: Node, selector: str | SectionPath | type[Section[Any]]) -> bool:
    if isinstance(selector, str):
        return selector in (node.section.key, dotted(node.path))
    if isinstance(selector, tuple):
        return node.path == selector
    return isinstance(node.section, selector)


def _param_descriptions(tool: Tool[Any, Any]) -> dict[str, str]:
    return {
        name: each["description"]
        for name, each in tool.parameters_schema.get("properties", {}).items()
        if "description" in each
    }

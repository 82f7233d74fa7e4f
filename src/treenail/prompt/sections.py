"""Sections: the pieces that a prompt is made of.

A section has a title, a key, a body, and whatever belongs to the subject: its subsections,
its tools, and the policies for them. `MarkdownSection` takes its body from a text with
placeholders; a class of your own derives from `Section[Params]` and says what its body is.

Where placeholders get their values: `Section[Params]` takes them from the fields of the
`Params` that is bound to the prompt, or else from `default_params`. A section without a
parameter type takes them from the prompt's variables (`with_variables`).

A section is a value: it is made once, checked when it becomes part of a prompt, and the same
one may stand in several prompts.
"""

from __future__ import annotations

import inspect
import re
import string
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, cast

from treenail.errors import PromptRenderError, PromptValidationError
from treenail.prompt.capture import Captures, name_of
from treenail.prompt.values import as_text, is_record, names_of, values_of
from treenail.prompt.visibility import SectionPath, SectionVisibility
from treenail.state import ResourceRegistry, SessionProtocol
from treenail.tools import Tool, ToolPolicy, listed

if TYPE_CHECKING:
    # At run time typing's own will do: only a type checker reads the default.
    from typing_extensions import TypeVar

    ParamsT = TypeVar("ParamsT", default=Mapping[str, object])
else:
    from typing import TypeVar

    ParamsT = TypeVar("ParamsT")

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

Enabled = bool | Callable[..., bool]
"""Whether a section is there: a constant, or a function of nothing or of its parameters."""

Visibility = SectionVisibility | Callable[..., SectionVisibility]
"""How much of a section is shown: a constant, or a function of nothing or of its parameters."""


@dataclass(frozen=True, eq=False)
class Section(Captures, ABC, Generic[ParamsT]):
    """A piece of a prompt. Derive from `Section[Params]` and say what its body is.

    `enabled` and `visibility` may be functions: of nothing, or of the section's parameters, and with
    a keyword-only `session` if they want to look at the state. A subclass that needs fields of its own
    is a frozen dataclass too.
    """

    title: str
    key: str = field(default="", kw_only=True)
    """What the section is called by; derived from the title if it is left out."""
    default_params: ParamsT | None = field(default=None, kw_only=True)
    """The parameters that apply as long as none are bound."""
    children: Sequence[Section[Any]] = field(default=(), kw_only=True)
    enabled: Enabled = field(default=True, kw_only=True)
    """A section that is not enabled is not there, and neither is anything below it."""
    tools: Sequence[Tool[Any, Any] | Callable[..., Any]] = field(default=(), kw_only=True)
    """What the model may call while it sees the section in full; functions are wrapped. A list keeps its
    order; a set or a mapping is sorted by name.
    """
    policies: Sequence[ToolPolicy] = field(default=(), kw_only=True)
    """Rules for the tools of this section and of those below it."""
    summary: str | None = field(default=None, kw_only=True)
    """What is shown instead of all this while the section is summarised; placeholders are allowed."""
    visibility: Visibility = field(default=SectionVisibility.FULL, kw_only=True)
    accepts_overrides: bool = field(default=True, kw_only=True)
    """Whether a session's overrides reach it; if not, neither they nor the model open or close it."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        title = self.title.strip()
        if not title or len(title.splitlines()) > 1:
            raise PromptValidationError(
                f"a section's title is one line of text, not {self.title!r}",
                section_path=(self.key,) if self.key else (),
            )
        put(self, "title", title)
        put(self, "key", _section_key(self.key, title))
        put(self, "children", tuple(self.children))
        put(self, "policies", tuple(self.policies))
        put(self, "tools", listed(self.tools))
        if self.summary is not None:
            put(self, "summary", trimmed(self.summary))

    # .. what a section of your own says ..

    @abstractmethod
    def render_body(self, params: ParamsT, *, session: SessionProtocol | None = None) -> str:
        """Return the body. `params` are the section's parameters; without a type, its variables by name.

        `session` is a read-only view, or None. The same arguments must give the same text.
        """

    def placeholders(self) -> frozenset[str]:
        """Return the names that the section needs values for: fields of its parameters, or variables."""
        return _names_in(self.summary or "")

    def source(self) -> str:
        """Return what makes this section what it is; the prompt's descriptor changes with it."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def resources(self) -> ResourceRegistry:
        """Return what the section's tools work with; it becomes part of the prompt's resources."""
        return ResourceRegistry()

    def check(self, path: SectionPath) -> None:
        """Raise `PromptValidationError` if the section cannot be part of a prompt. Extend it as you need."""
        _check_text("summary", self.summary or "", path)
        self._check_params(path)
        self._check_placeholders(path)
        self._check_visibility(path)
        if not isinstance(self.enabled, bool):
            _check_function("enabled", self.enabled, path, has_params=self.params_type is not None)

    # .. what the renderer asks ..

    @property
    def params_type(self) -> Any:
        """The type of the section's parameters; None if it takes variables."""
        return None if self.captured is type(None) else self.captured

    @property
    def own_tools(self) -> tuple[Tool[Any, Any], ...]:
        """The section's tools, functions wrapped."""
        return cast("tuple[Tool[Any, Any], ...]", self.tools)

    def is_enabled(self, params: Any, *, session: SessionProtocol | None, path: SectionPath) -> bool:
        """Say whether the section is there. A function that fails is a `PromptRenderError`."""
        if isinstance(self.enabled, bool):
            return self.enabled
        return cast(bool, _answer("enabled", self.enabled, bool, params, session, path))

    def chosen_visibility(
        self, params: Any, *, session: SessionProtocol | None, path: SectionPath
    ) -> SectionVisibility:
        """Return what the section says about itself. A function that fails is a `PromptRenderError`."""
        if isinstance(self.visibility, SectionVisibility):
            return self.visibility
        answer = _answer("visibility", self.visibility, SectionVisibility, params, session, path)
        return cast(SectionVisibility, answer)

    def render_summary(self, params: Any) -> str:
        """Return the summary with its values in place."""
        return _filled(self.summary or "", params)

    # .. checks ..

    def _check_params(self, path: SectionPath) -> None:
        kind = self.params_type
        if kind is not None and not is_record(kind):
            raise PromptValidationError(
                f"its parameters are {name_of(kind)}; use a dataclass or a pydantic model", section_path=path
            )
        if self.default_params is None or type(self.default_params) is kind:
            return
        given = name_of(type(self.default_params))
        expected = "takes variables and has no parameter type" if kind is None else f"takes {name_of(kind)}"
        raise PromptValidationError(
            f"default_params is of type {given}, but the section {expected}; make the two the same",
            section_path=path,
        )

    def _check_placeholders(self, path: SectionPath) -> None:
        if self.params_type is None:
            return
        known = names_of(self.params_type)
        for name in sorted(self.placeholders()):
            if name not in known:
                raise PromptValidationError(
                    f"the placeholder ${{{name}}} has no field in {name_of(self.params_type)} "
                    f"(fields: {', '.join(known) or 'none'}); correct its name, add the field, or write $$ "
                    "for a dollar sign",
                    section_path=path,
                    placeholder=name,
                )

    def _check_visibility(self, path: SectionPath) -> None:
        if self.visibility is SectionVisibility.FULL:
            return
        if not self.summary:
            raise PromptValidationError(
                "it may be shown as its summary, but has none; give it summary=..., or visibility=FULL",
                section_path=path,
            )
        if not isinstance(self.visibility, SectionVisibility):
            _check_function("visibility", self.visibility, path, has_params=self.params_type is not None)


@dataclass(frozen=True, eq=False)
class MarkdownSection(Section[ParamsT]):
    """A section whose body is a text with placeholders: `$name` or `${name}`, and `$$` for a dollar sign.

    The text may be indented with the code around it. Values are put in as they are: a dollar sign in
    a value is never a placeholder.
    """

    template: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "template", trimmed(self.template))

    def placeholders(self) -> frozenset[str]:
        """Return the names in the text and in the summary."""
        return super().placeholders() | _names_in(self.template)

    def source(self) -> str:
        """Return the text as it was written."""
        return self.template

    def check(self, path: SectionPath) -> None:
        """Check the text as well: every dollar sign must begin a placeholder or be doubled."""
        _check_text("template", self.template, path)
        super().check(path)

    def render_body(self, params: ParamsT, *, session: SessionProtocol | None = None) -> str:
        """Return the text with its values in place."""
        return _filled(self.template, params)


def trimmed(text: str) -> str:
    """Take off the margin that all lines share, the blank lines around, and trailing space."""
    return textwrap.dedent(text).strip("\n").rstrip()


def _section_key(key: str, title: str) -> str:
    chosen = (
        key.strip().lower() if key else re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:64].rstrip("-")
    )
    if not _KEY.fullmatch(chosen):
        raise PromptValidationError(
            f"{key or title!r} gives no section key: use 1 to 64 of a-z, 0-9, '_' and '-', beginning with a "
            "letter or digit. A dot separates the keys of a path and cannot stand in one",
            section_path=(key,) if key else (),
        )
    return chosen


def _names_in(text: str) -> frozenset[str]:
    return frozenset(string.Template(text).get_identifiers()) if "$" in text else frozenset()


def _filled(text: str, params: Any) -> str:
    if "$" not in text:
        return text
    values = params if isinstance(params, Mapping) else values_of(params)
    template = string.Template(text)
    return template.substitute({name: as_text(values[name]) for name in template.get_identifiers()})


def _check_text(what: str, text: str, path: SectionPath) -> None:
    if string.Template(text).is_valid():
        return
    pattern = string.Template.pattern
    assert isinstance(pattern, re.Pattern)
    stray = next(each.start() for each in pattern.finditer(text) if each.group("invalid") is not None)
    line = text.count("\n", 0, stray) + 1
    raise PromptValidationError(
        f"line {line} of its {what} has a dollar sign that begins no placeholder: "
        f"{text[stray : stray + 20]!r}; write $$ for a dollar sign",
        section_path=path,
    )


# --- functions that decide -------------------------------------------------------------------------


def _wants(function: Callable[..., Any]) -> tuple[int, bool, list[str]]:
    """Return how many positional arguments it needs, whether it takes `session`, and what else it needs."""
    parameters = inspect.signature(function).parameters.values()
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = [each.name for each in named if each.name != "session" and each.default is each.empty]
    return len(positional), any(each.name == "session" for each in named), others


def _check_function(what: str, function: Any, path: SectionPath, *, has_params: bool) -> None:
    rule = "write a function of nothing or of the parameters, with a keyword-only session if it is wanted"
    if not callable(function):
        raise PromptValidationError(f"{what} is {function!r}; {rule}", section_path=path)
    try:
        positional, _, others = _wants(function)
    except (TypeError, ValueError) as error:
        raise PromptValidationError(
            f"the signature of {what} cannot be read ({error}); {rule}", section_path=path
        ) from error
    if positional > 1 or others:
        raise PromptValidationError(
            f"{what} needs more arguments than it is given; {rule}", section_path=path
        )
    if positional and not has_params:
        raise PromptValidationError(
            f"{what} is a function of the parameters, but the section has no parameter type; "
            "write MarkdownSection[Params](...), or a function of nothing",
            section_path=path,
        )


def _answer(
    what: str,
    function: Callable[..., Any],
    kind: type,
    params: Any,
    session: SessionProtocol | None,
    path: SectionPath,
) -> Any:
    positional, takes_session, _ = _wants(function)
    keywords = {"session": session} if takes_session else {}
    try:
        answer = function(*(params,) * positional, **keywords)
    except Exception as error:
        raise PromptRenderError(
            f"its function for {what} failed: {type(error).__name__}: {error}", section_path=path
        ) from error
    if not isinstance(answer, kind):
        raise PromptRenderError(
            f"its function for {what} returned {answer!r}; return a {kind.__name__}", section_path=path
        )
    return answer

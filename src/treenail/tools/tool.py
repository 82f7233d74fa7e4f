"""Tools that a model may call, and their results.

A tool is a function with a name, a description, a parameter type and a declaration of its effects.
Parameters are parsed strictly: values are not coerced, unknown names are refused, and the error for the
model names the field, the expected type and the value that came.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

import pydantic  # Not `from pydantic import`: it loads each name at its first use.
from pydantic_core import ValidationError, to_jsonable_python

from treenail.codec import is_model, sparse
from treenail.containment import estimate_tokens
from treenail.errors import ToolDefinitionError, ToolValidationError, UsageError
from treenail.tools.schema import tidied
from treenail.tools.values import as_text, pictures

P = TypeVar("P")
R = TypeVar("R")

Effects = Literal["none", "workspace", "external"]
"""What a tool changes: nothing; state and files, which can be rolled back; or the world outside."""

FileAccess = Literal["context", "commands", "any"]
"""How a handler changes files: only through its context; also by commands that it runs with
`run_in_workspace`; or in any way, such as `open` or a program of its own."""

_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_MAX_DESCRIPTION = 1_024
_SHOWN_INPUT = 120
_SHOWN_ERRORS = 8


@sparse
@dataclass(frozen=True, slots=True)
class ToolResult(Generic[R]):
    """The result of a tool call."""

    message: str
    value: R | None = None
    success: bool = True
    exclude_value_from_context: bool = False
    """Show the model the message only, and keep the value for the program."""

    @classmethod
    def ok(cls, value: R | None = None, message: str = "OK") -> ToolResult[R]:
        """Make the result of a successful call."""
        return cls(message=message, value=value)

    @classmethod
    def error(cls, message: str) -> ToolResult[R]:
        """Make the result of a failed call, whose changes are rolled back."""
        return cls(message=message, success=False)

    def render(self) -> str:
        """Return the text that the model reads: the value if there is one to show, else the message."""
        if self.value is None or self.exclude_value_from_context or not self.success:
            return self.message
        return as_text(self.value, self.message)

    def pictures(self) -> tuple[tuple[str, bytes], ...]:
        """Return the pictures that the model is shown beside the text, each with its media type."""
        if self.value is None or self.exclude_value_from_context or not self.success:
            return ()
        return pictures(self.value)


@dataclass(frozen=True, slots=True)
class ToolExample(Generic[P, R]):
    """One good call of a tool, shown to the model."""

    description: str
    input: P
    output: R


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to run a tool. `arguments` is JSON text or an object, as the model sent it."""

    id: str
    name: str
    arguments: str | Mapping[str, Any] = "{}"

    @property
    def function(self) -> ToolCall:
        """The call itself: some providers nest name and arguments under `function`."""
        return self

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(to_jsonable_python(dict(self.arguments)), ensure_ascii=False)


ProviderToolCall = ToolCall
"""Another name for `ToolCall`, which adapters use."""

Handler = Callable[..., Any]
"""The function behind a tool, sync or async."""


class InjectedContext:
    """What a handler gets from the runner and not from the model: the base of `ToolContext`."""

    __slots__ = ()


class ToolOptions(TypedDict, total=False):
    """Options of `@tool` and `Tool.wrap`: fields of `Tool` that a function does not say of itself."""

    name: str | None
    description: str | None
    effects: Effects
    examples: Sequence[ToolExample[Any, Any]]
    files: FileAccess | None
    idempotent: bool
    on_unknown: Literal["tell", "hold"]
    prepare: Callable[[Any], object] | None


@dataclass(frozen=True)
class Tool(Generic[P, R]):
    """A function that a model may call.

    `Tool[Params, Result](name=..., description=..., handler=...)` takes a handler of the shape
    `handler(params, *, context) -> ToolResult[Result]`, sync or async. `Tool.wrap(function)` makes
    one of any annotated function.
    """

    name: str
    description: str
    handler: Handler | None = None
    examples: tuple[ToolExample[P, R], ...] = ()
    effects: Effects = "workspace"
    files: FileAccess | None = None
    """How the handler changes files. By default through its context if it takes one, else in any way."""
    idempotent: bool = False
    """Whether it is safe to run again with the same `call_id`, outside effects included."""
    on_unknown: Literal["tell", "hold"] = "tell"
    """What to do after a crash during an external call: tell the model, or wait for a person."""
    asks: bool = False
    """Whether a person is asked before it runs, unless the operator's permissions name the tool."""
    is_question: bool = False
    """Whether each call is a question to a person, and waits until it is answered."""
    is_note: bool = False
    """Whether it changes only what the agent notes for itself, such as its plan: nobody is asked, it runs in
    a read-only run too, and it has no hooks."""
    accepts_overrides: bool = True
    prepare: Callable[[Any], object] | None = field(default=None, repr=False)
    """Registers the reducers of the tool's events; called with the session when a runner is made."""
    params_type: Any = field(default=None, repr=False)
    result_type: Any = field(default=None, repr=False)
    spread: bool = field(default=False, repr=False)
    """Whether the handler takes the parameters one by one instead of as one object."""
    wraps: Tool[Any, Any] | None = field(default=None, repr=False)
    """The tool without its hooks, if it has some."""

    def __class_getitem__(cls, item: Any) -> Any:
        """Bind parameter and result types: `Tool[Params, Result](...)`."""
        alias = super().__class_getitem__(item)  # type: ignore[misc]  # typing.Generic provides it
        arguments = item if isinstance(item, tuple) else (item,)
        if len(arguments) != 2 or any(each is Any or isinstance(each, TypeVar) for each in arguments):
            return alias
        return functools.partial(_bound, cls, *arguments)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ToolDefinitionError(
                f"{self.name!r} is not a tool name: use 1 to 64 of a-z, 0-9, '_' and '-'"
            )
        if not 1 <= len(self.description.strip()) <= _MAX_DESCRIPTION:
            raise ToolDefinitionError(
                f"the tool {self.name!r} needs a description of 1 to {_MAX_DESCRIPTION} characters: "
                "it is what the model decides by"
            )
        if self.effects not in ("none", "workspace", "external"):
            raise ToolDefinitionError(
                f"the tool {self.name!r} has effects {self.effects!r}; say 'none', 'workspace' or 'external'"
            )
        if self.files not in (None, "context", "commands", "any"):
            raise ToolDefinitionError(
                f"the tool {self.name!r} has files {self.files!r}; say 'context', 'commands' or 'any', or "
                "leave it out"
            )
        if self.files in ("any", "commands") and self.effects == "none":
            raise ToolDefinitionError(
                f"the tool {self.name!r} may change files in any way, so its effects are not 'none'; "
                "say effects='workspace'"
            )
        if self.handler is not None and self.params_type is None and not self.spread:
            params, result = _types_of_handler(self.name, self.handler)
            object.__setattr__(self, "params_type", params)
            if self.result_type is None:
                object.__setattr__(self, "result_type", result)
        self._check_examples()
        self._check_parameters()

    def _check_examples(self) -> None:
        for each in self.examples:
            expected = self.params_type
            if isinstance(expected, type) and type(each.input) is not expected:
                raise ToolDefinitionError(
                    f"an example of the tool {self.name!r} has an input of type "
                    f"{type(each.input).__qualname__}, not {expected.__qualname__}"
                )

    def _check_parameters(self) -> None:
        _ = self._adapter  # Raises now, not at the first call, if the type cannot be parsed.

    @classmethod
    def wrap(cls, function: Handler, **options: Unpack[ToolOptions]) -> Tool[Any, Any]:
        """Make a tool of a function; its name, docstring and annotations describe it unless options do.

        The function takes one dataclass or model, or any number of annotated parameters. If it needs the
        call's context, it has a parameter `context`, or one of another name that is annotated as a
        `ToolContext`. It returns a `ToolResult`, or just a value.
        """
        written = _written(function)
        doc = inspect.getdoc(written) or ""
        if not doc and not inspect.isroutine(written):
            doc = inspect.getdoc(type(written).__call__) or ""
        called = getattr(written, "__name__", "") or type(written).__name__
        name = options.get("name") or called.strip("_").lower()
        description = options.get("description") or doc.split("\n\n", 1)[0].replace("\n", " ").strip()
        if not description:
            raise ToolDefinitionError(
                f"the function {called} has no docstring; write one: its first paragraph tells "
                "the model when to use the tool"
            )
        parameters, result = _signature(name, function)
        params_type: Any = None
        single = len(parameters) == 1 and _is_record(parameters[0].annotation)
        if single:
            params_type = parameters[0].annotation
        elif parameters:
            params_type = _params_model(name, parameters, _argument_texts(doc))
        fields: dict[str, Any] = {
            **options,
            "name": name,
            "description": description[:_MAX_DESCRIPTION],
            "examples": tuple(options.get("examples", ())),
        }
        return cls(handler=function, params_type=params_type, result_type=result, spread=not single, **fields)

    @functools.cached_property
    def _adapter(self) -> pydantic.TypeAdapter[Any] | None:
        if self.params_type is None or self.params_type is type(None):
            return None
        try:
            return pydantic.TypeAdapter(self.params_type)
        except (pydantic.PydanticSchemaGenerationError, pydantic.PydanticUserError) as error:
            raise _indescribable(self.name, error) from error

    @functools.cached_property
    def parameters_schema(self) -> Mapping[str, Any]:
        """The JSON schema of the parameters, as providers want it."""
        if self._adapter is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        try:
            schema = self._adapter.json_schema()
        except pydantic.PydanticUserError as error:
            raise ToolDefinitionError(
                f"the parameters of the tool {self.name!r} have no JSON schema: {error}"
            ) from error
        return cast("Mapping[str, Any]", tidied(schema))

    @functools.cached_property
    def contract(self) -> str:
        """The tool's description and schema as JSON text, the same in every process."""
        said = [self.description, self.parameters_schema]
        return json.dumps(said, sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def tokens(self) -> int:
        """An estimate of the tokens that the tool takes in each request, rather too high than too low."""
        return estimate_tokens((self.name, self.description, self.parameters_schema))

    def parse(self, arguments: str | Mapping[str, Any]) -> Any:
        """Parse a call's arguments strictly. Raises `ToolValidationError`, written for the model."""
        text = arguments if isinstance(arguments, str) else json.dumps(to_jsonable_python(dict(arguments)))
        if self._adapter is None:
            data = _parse_object(self.name, text)
            if data:
                raise ToolValidationError(
                    f"The tool {self.name} takes no arguments, but got: {', '.join(sorted(data))}. "
                    "Call it with {}."
                )
            return None
        try:
            # JSON mode accepts ISO dates, UUIDs and enum values as text, and tuples as arrays.
            return self._adapter.validator.validate_json(text.strip() or "{}", strict=True, extra="forbid")
        except ValidationError as error:
            _parse_object(self.name, text)  # Text that is not a JSON object has its own explanation.
            raise ToolValidationError(_explain(self.name, error)) from None

    def call(self, params: Any, context: Any) -> Any:
        """Call the handler. An async handler returns an awaitable."""
        if self.handler is None:
            raise ToolDefinitionError(
                f"the tool {self.name!r} has no handler, so it cannot run here; give it one"
            )
        injected = {} if self._context_name is None else {self._context_name: context}
        if not self.spread:
            return self.handler(params, **injected)
        keywords = {} if params is None else {each: getattr(params, each) for each in self._spread_names}
        return self.handler(**keywords, **injected)

    @functools.cached_property
    def _spread_names(self) -> tuple[str, ...]:
        return tuple(self.params_type.model_fields)

    @functools.cached_property
    def _context_name(self) -> str | None:
        return None if self.handler is None else _context_parameter(self.handler)

    @property
    def takes_context(self) -> bool:
        """Whether the handler takes the call's context."""
        return self._context_name is not None

    @functools.cached_property
    def is_foreign(self) -> bool:
        """Whether files may change past the context, so that the workspace must be scanned.

        A function without a context has no other way to change files than one that nobody sees.
        """
        if self.files is not None or self.effects != "workspace" or self.handler is None:
            return self.files in ("any", "commands")
        return not self.takes_context

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(
            getattr(self.handler, "__call__", None)  # noqa: B004  # asks about the method, not whether it is callable
        )


class ReadyTool(Tool[P, R]):
    """A tool of this package. Its parameters are described at first use; tests check them instead.

    Describing the parameters of all of them takes 70 ms, which every start of the command line would pay.
    """

    def _check_parameters(self) -> None: ...


def _bound(cls: type[Tool[Any, Any]], params: Any, result: Any, **fields: Any) -> Tool[Any, Any]:
    """Make a tool with these types: the call in `Tool[Params, Result](...)`."""
    for label, given in (("params", params), ("result", result)):
        if given is not None and not _is_allowed(given):
            raise ToolDefinitionError(
                f"the {label} type of the tool {fields.get('name')!r} is {given!r}; use a dataclass, a "
                "pydantic model, a list or tuple of them, or None"
            )
    if fields.get("handler") is not None:
        _check_shape(str(fields.get("name")), fields["handler"])
    return cls(**{"params_type": type(None) if params is None else params, "result_type": result, **fields})


@overload
def tool(function: Handler, /) -> Tool[Any, Any]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Handler], Tool[Any, Any]]: ...
def tool(
    function: Handler | None = None, /, **options: Unpack[ToolOptions]
) -> Tool[Any, Any] | Callable[[Handler], Tool[Any, Any]]:
    """Turn a function into a tool: `@tool` or `@tool(effects="none")`."""
    if function is not None:
        return Tool.wrap(function, **options)
    return lambda wrapped: Tool.wrap(wrapped, **options)


def described(text: str, **default: Any) -> Any:
    """Make a dataclass field whose description the model is shown."""
    return field(metadata={"description": text}, **default)


def as_result(outcome: Any) -> ToolResult[Any]:
    """Turn the return value of a handler into a `ToolResult`."""
    if isinstance(outcome, ToolResult):
        said: object = outcome.message
        if type(said) is str or not isinstance(said, str):
            return outcome
        return dataclasses.replace(outcome, message=str.__str__(said))
    if isinstance(outcome, str):
        return ToolResult(str.__str__(outcome))  # Of a subclass too, which a log does not take.
    return ToolResult.ok(outcome)


# --- reading functions -----------------------------------------------------------------------------


def _is_record(annotation: Any) -> bool:
    plain = typing.get_origin(annotation) or annotation
    return isinstance(plain, type) and (dataclasses.is_dataclass(plain) or is_model(plain))


def _is_allowed(annotation: Any) -> bool:
    if _is_record(annotation) or annotation in (str, type(None)):
        return True
    origin = typing.get_origin(annotation)
    arguments = [each for each in typing.get_args(annotation) if each is not Ellipsis]
    return origin in (list, tuple, Sequence) and all(_is_record(each) for each in arguments)


def _hints(name: str, function: Handler) -> dict[str, Any]:
    target = inspect.unwrap(function)
    if not inspect.isroutine(target) and callable(target):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            f"the annotations of the tool {name!r} cannot be resolved: {error}; "
            "define the types at module level"
        ) from error


def _written(function: Handler) -> Any:
    """Return what a person wrote: the function of a partial, or the object whose instances are called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _context_parameter(function: Handler) -> str | None:
    """Return the name of the parameter that takes the call's context; None if there is none."""
    parameters = inspect.signature(function).parameters
    if "context" in parameters:
        return "context"
    # Most annotations are text: only those that may name a context are worth resolving.
    annotated = [each.name for each in parameters.values() if "Context" in str(each.annotation)]
    hints = _hints(getattr(function, "__name__", "tool"), _written(function)) if annotated else {}
    kinds = {each: typing.get_origin(hints.get(each)) or hints.get(each) for each in annotated}
    for each, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, InjectedContext):
            return each
    return None


def _signature(name: str, function: Handler) -> tuple[list[inspect.Parameter], Any]:
    """Return the parameters that the model fills in, and the type of the result's value."""
    hints = _hints(name, _written(function))
    given = function.keywords if isinstance(function, functools.partial) else {}
    context = _context_parameter(function)
    parameters = []
    for each in inspect.signature(function).parameters.values():
        if each.name == context or each.name in given:
            continue
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ToolDefinitionError(
                f"the tool {name!r} takes *{each.name}: a model needs named parameters, so name each of them"
            )
        if each.name not in hints:
            raise ToolDefinitionError(
                f"the parameter {each.name!r} of the tool {name!r} has no annotation: "
                "the model cannot know what it is"
            )
        parameters.append(each.replace(annotation=hints[each.name]))
    return parameters, _value_type(hints.get("return"))


def _value_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is Awaitable:
        (annotation,) = typing.get_args(annotation)
    if annotation is ToolResult:
        return None
    if typing.get_origin(annotation) is ToolResult:
        (inner,) = typing.get_args(annotation)
        return None if inner is type(None) else inner
    return None if annotation is type(None) else annotation


def _types_of_handler(name: str, handler: Handler) -> tuple[Any, Any]:
    _check_shape(name, handler)
    parameters, result = _signature(name, handler)
    params = parameters[0].annotation
    return (type(None) if params is None else params), result


def _check_shape(name: str, handler: Handler) -> None:
    context = _context_parameter(handler)
    taken = [each for each in inspect.signature(handler).parameters.values() if each.name != context]
    required = [each for each in taken if each.default is each.empty or each.kind is not each.KEYWORD_ONLY]
    if len(required) != 1 or required[0].kind is required[0].KEYWORD_ONLY:
        raise ToolDefinitionError(
            f"the handler of the tool {name!r} must take its parameters as one object: "
            "handler(params, *, context). Use Tool.wrap or @tool for a function with several parameters."
        )


def _params_model(
    name: str, parameters: list[inspect.Parameter], texts: Mapping[str, str]
) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {}
    for each in parameters:
        default = ... if each.default is each.empty else each.default
        annotation = each.annotation
        if each.name in texts:
            annotation = typing.Annotated[annotation, pydantic.Field(description=texts[each.name])]
        fields[each.name] = (annotation, default)
    title = "".join(part.capitalize() for part in re.split(r"[_-]", name)) + "Params"
    try:
        model: type[pydantic.BaseModel] = pydantic.create_model(
            title, __config__=pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=False), **fields
        )
    except (pydantic.PydanticSchemaGenerationError, pydantic.PydanticUserError, ValueError) as error:
        raise _indescribable(name, error) from error
    if lost := fields.keys() - model.model_fields.keys():
        raise ToolDefinitionError(
            f"the tool {name!r} cannot have a parameter called {' or '.join(sorted(lost))}, which a model "
            "cannot fill in; rename it so that it does not begin with an underscore"
        )
    return model


def _indescribable(name: str, error: Exception) -> ToolDefinitionError:
    return ToolDefinitionError(f"the parameters of the tool {name!r} cannot be described to a model: {error}")


def _argument_texts(doc: str) -> dict[str, str]:
    """Read the descriptions of parameters from an `Args:` section."""
    texts: dict[str, str] = {}
    current = None
    inside = False
    for line in doc.splitlines():
        if line.strip() in ("Args:", "Arguments:", "Parameters:"):
            inside = True
            continue
        if inside and line.strip() and not line.startswith((" ", "\t")):
            break
        if not inside:
            continue
        found = re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)", line)
        if found:
            current = found.group(1)
            texts[current] = found.group(2).strip()
        elif current and line.strip():
            texts[current] += " " + line.strip()
    return texts


# --- schemas and errors ----------------------------------------------------------------------------


def _parse_object(name: str, text: str) -> dict[str, Any]:
    if text == "{}" or not text.strip():
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ToolValidationError(
            f"The arguments of {name} are not valid JSON: {error}. They began with {text[:_SHOWN_INPUT]!r}. "
            "Send one JSON object."
        ) from None
    except RecursionError:
        raise ToolValidationError(f"The arguments of {name} are nested too deeply.") from None
    if not isinstance(data, dict):
        raise ToolValidationError(
            f"The arguments of {name} must be one JSON object, but came as {_kind(data)}. Send {{...}}."
        )
    return data


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def _explain(name: str, error: ValidationError) -> str:
    """Write, per field, what was expected and what came."""
    lines = []
    errors = error.errors(include_url=False)
    for each in errors[:_SHOWN_ERRORS]:
        where = _location(each["loc"])
        came = _shorten(each.get("input"))
        if each["type"] == "missing":
            lines.append(f"- {where}: required, but missing")
        elif each["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"- {where}: not a parameter of this tool; leave it out")
        else:
            lines.append(f"- {where}: {each['msg']}; got {came} ({_kind(each.get('input'))})")
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"- and {len(errors) - _SHOWN_ERRORS} more")
    return f"The arguments of {name} do not fit. Correct these and call it again:\n" + "\n".join(lines)


def listed(tools: Iterable[Tool[Any, Any] | Callable[..., Any]]) -> tuple[Tool[Any, Any], ...]:
    """Return tools in an order that is the same in every process: as a list has them, or else by name.

    Functions are wrapped. Of a mapping, the values are taken.
    """
    check_is_list(tools)
    given = tools.values() if isinstance(tools, Mapping) else tools
    made = tuple(each if isinstance(each, Tool) else Tool.wrap(_function(each)) for each in given)
    return made if isinstance(tools, list | tuple) else tuple(sorted(made, key=lambda tool: tool.name))


def check_is_list(tools: object) -> None:
    """Raise `UsageError` unless tools are several: a function or a name alone is a slip."""
    if isinstance(tools, str | Tool) or not isinstance(tools, Iterable):
        raise UsageError(f"tools must be a list of tools and functions, not {tools!r}; write tools=[...]")


def _function(given: object) -> Handler:
    if not callable(given):
        raise UsageError(f"{given!r} is not a tool; pass a function with a docstring, or what @tool makes")
    return given


def _location(loc: tuple[int | str, ...]) -> str:
    text = ""
    for each in loc:
        text += f"[{each}]" if isinstance(each, int) else f".{each}" if text else str(each)
    return text or "arguments"


def _shorten(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_INPUT else text[: _SHOWN_INPUT - 3] + "..."

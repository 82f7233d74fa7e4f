"""Structured output: from a type to a schema, and from a model's text back to a value of the type.

Theory of operation
-------------------
Models that are given a schema by their provider answer with JSON; others answer with JSON
somewhere in a text. `StructuredOutput.parse` finds it, in this order:

1. the whole text, if it is JSON;
2. the first fence marked `json`, if there is one;
3. the first `{` or `[` from which a value can be read that fits.

The JSON of 1 or 2 is the answer, and it fits or is refused; only in prose, where a bracket may
be anything, does the search continue. It ends at the first value that may have been the answer
and cannot be read, or does not fit: a part of a broken answer is not the answer.

Nothing is repaired, completed or coerced: an answer that was cut off, a key that occurs twice and
`"3"` for a number are refused with an `OutputParseError` that says what to fix, and the loop sends
that text back to the model.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

import pydantic  # Each of its names is loaded when it is first used, and not all programs use one.
from pydantic_core import ValidationError

from treenail.errors import OutputParseError, PromptValidationError
from treenail.prompt.capture import name_of
from treenail.prompt.values import is_record
from treenail.tools import tidied

if TYPE_CHECKING:
    # At run time typing's own will do: only a type checker reads the default.
    from typing_extensions import TypeVar

    OutputT = TypeVar("OutputT", default=str)
else:
    from typing import TypeVar

    OutputT = TypeVar("OutputT")

Container = Literal["object", "array", "value"]
"""Whether the answer is one record, a list, or something else: a number, a union, a mapping."""

_KEYS = {"array": "items", "value": "value"}
"""Providers want an object at the root, so everything else travels under a key."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*json[ \t]*$", re.IGNORECASE | re.MULTILINE)
_FENCE_END = re.compile(r"\s*(```|\Z)")
_BRACKET = re.compile(r"[{\[]")
_ASIDE = re.compile(r"[{\[](?:[^{}\[\]\"']|(?<=\w)')*[}\]]")
"""A pair of brackets around words: nothing that could be an answer, or a part of one, is in it."""

_MAX_STARTS = 10_000
_SHOWN_ERRORS = 8
_SHOWN_INPUT = 120


@dataclass(frozen=True)
class StructuredOutput(Generic[OutputT]):
    """What an answer must look like: a type, alone or in a list."""

    output_type: Any
    """The type of the answer, or of each item of an array."""
    container: Container = "object"
    allow_extra_keys: bool = False

    @functools.cached_property
    def adapter(self) -> pydantic.TypeAdapter[Any]:
        """What validates an answer."""
        kind: Any = self.output_type
        if self.container == "array":
            kind = list[kind]
        try:
            return pydantic.TypeAdapter(kind)
        except (pydantic.PydanticSchemaGenerationError, pydantic.PydanticUserError, NameError) as error:
            raise _unsupported(self.output_type, str(error)) from error

    @functools.cached_property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema, with an object at its root: under `items` is an array, under `value` a value."""
        try:
            made = self.adapter.json_schema()
        except pydantic.PydanticUserError as error:
            raise _unsupported(self.output_type, str(error)) from error
        definitions = made.pop("$defs", {})
        key = _KEYS.get(self.container)
        if key is not None:
            made = {"type": "object", "properties": {key: made}, "required": [key]}
        elif "$ref" in made:
            # A type that refers to itself: providers want to see the object, not a pointer to it.
            made = copy.deepcopy(definitions[made["$ref"].rpartition("/")[2]])
        if definitions:
            made["$defs"] = definitions
        return cast("Mapping[str, Any]", tidied(made, closed=not self.allow_extra_keys))

    def parse(self, text: str, *, prompt_name: str = "") -> OutputT:
        """Read the answer in a model's text. Raises `OutputParseError`, whose text a model can act on."""
        problems = _Problems()
        for data in _readings(text, problems):
            try:
                return self._fit(data.value)
            except _Unfit as unfit:
                was_meant = self._was_meant(data.value)
                problems.add(str(unfit), _Telling.ANSWER if was_meant else data.otherwise)
                if data.final or was_meant:
                    break
        raise OutputParseError(
            f"{problems.worst or 'There is no JSON in the answer.'} {self._advice()}",
            self.output_type,
            prompt_name=prompt_name,
            raw_text=text,
        )

    def _advice(self) -> str:
        key = _KEYS.get(self.container)
        shown = "" if key is None else f' {{"{key}": {"[...]" if key == "items" else "..."}}}'
        what = f"one JSON object{shown}"
        return f"Answer with {what} that fits the schema of {name_of(self.output_type)}, and nothing else."

    def _fit(self, data: Any) -> OutputT:
        data = self._unwrapped(data)
        wanted = {"array": list, "object": dict}.get(self.container, object)
        if not isinstance(data, wanted):
            raise _Unfit(f"The answer must be an {self.container}, but is {_kind(data)}: {_shorten(data)}.")
        try:
            # JSON mode: dates, enum members, tuples and the like are written as text and lists there.
            made = self.adapter.validate_json(
                json.dumps(data), strict=True, extra=None if self.allow_extra_keys else "forbid"
            )
        except ValidationError as error:
            raise _Unfit(_explain(error)) from error
        except Exception as error:  # the type's own checks are foreign code
            raise _Unfit(f"The answer was refused: {type(error).__name__}: {error}.") from error
        return cast(OutputT, made)

    def _was_meant(self, data: Any) -> bool:
        """Say whether data that does not fit is an attempt at the answer, and not just something in it."""
        if self.container == "array":
            items = self._unwrapped(data)
            return isinstance(items, list) and any(isinstance(each, dict) for each in items)
        return isinstance(data, dict) and not data.keys().isdisjoint(self.schema.get("properties", ()))

    def _unwrapped(self, data: Any) -> Any:
        key = _KEYS.get(self.container)
        if key is None or not isinstance(data, dict) or key not in data:
            return data
        if self.container == "array" and not isinstance(data[key], list):
            return data
        return data[key] if len(data) == 1 or self.allow_extra_keys else data


def structured_output(kind: Any, *, allow_extra_keys: bool = False) -> StructuredOutput[Any] | None:
    """Return what answers of this type must look like; None for text. Raises `PromptValidationError`.

    Supported is what pydantic can describe; `str` (or None) is plain text.
    """
    if kind in (None, str, type(None)):
        return None
    container: Container = "value"
    if typing.get_origin(kind) is list:
        container = "array"
        (kind,) = typing.get_args(kind)
    elif is_record(typing.get_origin(kind) or kind) or typing.is_typeddict(kind):
        container = "object"
    made: StructuredOutput[Any] = StructuredOutput(kind, container, allow_extra_keys)
    _ = made.schema  # A type that cannot be described or validated is found now.
    return made


def output_json(value: Any) -> str:
    """Write an output as JSON text, the way a model would answer with it; `parse` reads it back.

    A list is written as the array that it is. Text is returned as it is.
    """
    if isinstance(value, str):
        return value
    kind: Any = type(value)
    if isinstance(value, list) and value:
        kind = list[type(value[0])]  # type: ignore[misc]  # a type that is known at run time
    return pydantic.TypeAdapter(kind).dump_json(value, by_alias=True).decode("utf-8")


def _unsupported(kind: Any, why: str) -> PromptValidationError:
    return PromptValidationError(
        f"a prompt cannot have the output type {name_of(kind)}: {why}. Use a type that pydantic can describe "
        "by a JSON schema, or str for text"
    )


# --- finding the answer ----------------------------------------------------------------------------


class _Unfit(Exception):
    """Data that is not the answer, and why."""


class _Telling(IntEnum):
    """How much a problem says about the answer that was meant."""

    NOTHING = 0
    A_BRACKET = 1
    """A bracket in prose that begins nothing."""
    ANOTHER_KIND = 2
    """A value in prose, but not of the kind that is wanted."""
    UNREADABLE = 3
    """What was meant as JSON and cannot be read."""
    ANSWER = 4
    """An answer that can be read and does not fit."""


class _Problems:
    """What went wrong, of which the most telling is reported, and the first of several."""

    def __init__(self) -> None:
        self.worst = ""
        self._telling = _Telling.NOTHING

    def add(self, message: str, telling: _Telling) -> None:
        if telling > self._telling:
            self.worst, self._telling = message, telling


@dataclass(frozen=True, slots=True)
class _Reading:
    """JSON that was found, and whether it must be the answer."""

    value: Any
    final: bool = False
    otherwise: _Telling = _Telling.ANSWER
    """How telling it is if it is of another kind than the answer."""


def _readings(text: str, problems: _Problems) -> Iterator[_Reading]:
    whole = text.lstrip("\ufeff").strip()
    if not whole:
        problems.add("The answer is empty.", _Telling.ANSWER)
        return
    found = _decode(whole, 0)
    if found.ok and found.end == len(whole):
        yield _Reading(found.value, final=True)
        return
    fence = _FENCE.search(whole)
    if fence is None:
        yield from _in_prose(whole, problems)
        return
    fenced = _decode(whole, fence.end())
    if fenced.ok and _FENCE_END.match(whole, fenced.end) is None:
        fenced = _Found(problem="There is more in the fence than one JSON value.")
    if fenced.ok:
        yield _Reading(fenced.value, final=True)
    else:
        problems.add(fenced.problem, fenced.telling)


def _in_prose(text: str, problems: _Problems) -> Iterator[_Reading]:
    position = 0
    for _ in range(_MAX_STARTS):
        bracket = _BRACKET.search(text, position)
        if bracket is None:
            return
        found = _decode(text, bracket.start())
        if found.ok:
            yield _Reading(found.value, otherwise=_Telling.ANOTHER_KIND)
            position = found.end
            continue
        aside = _ASIDE.match(text, bracket.start())
        if aside is None:
            # It may have been the answer, and its end is unknown: what follows may be a part of it.
            problems.add(found.problem, found.telling)
            return
        problems.add(found.problem, _Telling.A_BRACKET)
        position = aside.end()


@dataclass(frozen=True, slots=True)
class _Found:
    """A value that was read out of a text, or why there is none."""

    value: Any = None
    end: int = 0
    problem: str = ""
    telling: _Telling = _Telling.UNREADABLE

    @property
    def ok(self) -> bool:
        return not self.problem


class _Ambiguous(ValueError):
    """JSON that can be read, but not in one way only."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _Ambiguous(f"The key {_shorten(key)} occurs twice in one object.")
        made[key] = value
    return made


def _refuse_constant(name: str) -> Any:
    raise _Ambiguous(f"{name} is not JSON.")


_decoder = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def _decode(text: str, start: int) -> _Found:
    """Read one JSON value at a position, or say why there is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return _Found(
            end=error.pos, problem=f"The JSON cannot be read: {error.msg}, {_around(text, error.pos)}."
        )
    except _Ambiguous as error:
        return _Found(end=len(text), problem=str(error), telling=_Telling.ANSWER)
    except RecursionError:
        return _Found(end=len(text), problem="The JSON is nested too deeply.")
    except ValueError as error:  # an integer of thousands of digits
        return _Found(end=len(text), problem=f"The JSON cannot be read: {error}.")
    return _Found(value, end)


def _around(text: str, position: int) -> str:
    shown = text[max(0, position - 20) : position + 20]
    return f"character {position} (near {shown!r})" if shown else f"character {position}, where it ends"


# --- saying what is wrong --------------------------------------------------------------------------


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def _explain(error: ValidationError) -> str:
    lines = []
    errors = error.errors(include_url=False)
    for each in errors[:_SHOWN_ERRORS]:
        where = _location(each["loc"])
        if each["type"] == "missing":
            lines.append(f"- {where}: required, but missing")
        elif each["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"- {where}: not a key of this type; leave it out")
        else:
            lines.append(f"- {where}: {each['msg']}; got {_shorten(each.get('input'))}")
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"- and {len(errors) - _SHOWN_ERRORS} more")
    return "The answer does not fit:\n" + "\n".join(lines) + "\n"


def _location(loc: tuple[int | str, ...]) -> str:
    text = ""
    for each in loc:
        text += f"[{each}]" if isinstance(each, int) else f".{each}" if text else str(each)
    return text or "the answer"


def _shorten(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        return "something that is nested deeply"
    return text if len(text) <= _SHOWN_INPUT else text[: _SHOWN_INPUT - 3] + "..."

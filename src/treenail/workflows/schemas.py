"""JSON schemas for the values of steps: what of them is understood, and whether a value fits.

A part of JSON Schema is understood (`KEYWORDS`), and all of what is understood is checked, on every machine
alike. A schema that says anything else is refused when the workflow is read: a rule that nobody checks would
be worse than none. References lead to `$defs` of the same schema, as they do in schemas made from types.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pydantic  # Each of its names is loaded when it is first used, and not all programs use one.

from treenail.errors import UsageError

MAX_SCHEMA_NODES = 5_000
MAX_DEPTH = 50
"""How deep a schema, and a value that is checked, may go."""

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}

_ONE = ("additionalProperties", "items", "not")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SAID = ("title", "description", "default", "examples", "format", "deprecated", "$schema", "$id", "$comment")
KEYWORDS = frozenset(
    ("type", "enum", "const", "required", "$ref", *_ONE, *_LISTED, *_NAMED, *_COUNTS, *_BOUNDS, *_SAID)
)
"""What a schema may say. The last ones (`title` to `$comment`) are for readers and promise nothing."""


def schema_of(output: object, where: str) -> dict[str, Any]:
    """Return the schema for a step's value: of a type, or the one that was given, checked.

    Raises `UsageError` with the place if it is neither, or says something that cannot be checked.
    """
    if isinstance(output, Mapping):
        made: Any = dict(output)
    else:
        try:
            made = pydantic.TypeAdapter(cast("Any", output)).json_schema()
        except (
            pydantic.PydanticSchemaGenerationError,
            pydantic.PydanticUserError,
            TypeError,
            ValueError,
        ) as error:
            raise UsageError(
                f"{where}: {output!r:.80} is no JSON schema, and no type that has one"
            ) from error
    _Checker(made, where).check()
    return cast("dict[str, Any]", made)


class _Checker:
    """Walks a schema once. Data may come from anywhere, so that it counts what it sees."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._root, self._where, self._left = root, where, MAX_SCHEMA_NODES

    def check(self) -> None:
        self._plain(self._root, self._where, 0)
        self._schema(self._root, self._where)

    def _plain(self, value: object, where: str, depth: int) -> None:
        """See that it is JSON, and of a size that can be kept."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise UsageError(
                f"{self._where}: the schema is too large; say less, or {MAX_DEPTH} levels at most"
            )
        if isinstance(value, Mapping):
            for name, each in value.items():
                if not isinstance(name, str):
                    raise UsageError(f"{where}: the key {name!r:.40} is no text")
                self._plain(each, f"{where}.{name}", depth + 1)
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                self._plain(each, f"{where}[{number}]", depth + 1)
        elif isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{where}: {value!r} is no JSON number")
        elif value is not None and not isinstance(value, str | int | float | bool):
            raise UsageError(f"{where}: {value!r:.80} is no JSON; put it into quotes")

    def _schema(self, schema: object, where: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where} must be a schema, not {schema!r:.80}")
        for name, value in schema.items():
            self._keyword(name, value, f"{where}.{name}")

    def _keyword(self, name: str, value: Any, where: str) -> None:
        if name not in KEYWORDS:
            raise UsageError(
                f"{where}: this cannot be checked; a schema may say: {', '.join(sorted(KEYWORDS))}"
            )
        if name in _ONE:
            self._schema(value, where)
        elif name in _LISTED:
            if not isinstance(value, list) or not value:
                raise UsageError(f"{where} must be a list of schemas")
            for number, each in enumerate(value):
                self._schema(each, f"{where}[{number}]")
        elif name in _NAMED:
            if not isinstance(value, Mapping):
                raise UsageError(f"{where} must be schemas by name")
            for key, each in value.items():
                self._schema(each, f"{where}.{key}")
        elif name == "type":
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, list) or not names or not all(each in TYPES for each in names):
                raise UsageError(f"{where}: {value!r:.80} is none of {', '.join(TYPES)}")
        elif name == "required":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise UsageError(f"{where} must be a list of names")
        elif name == "enum" and not isinstance(value, list):
            raise UsageError(f"{where} must be a list of values")
        elif name == "$ref":
            _target(self._root, value, where)
        elif name in (*_COUNTS, *_BOUNDS) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{where} must be a number, not {value!r:.80}")


def _target(root: Mapping[str, Any], reference: object, where: str) -> Any:
    parts = reference.split("/") if isinstance(reference, str) else []
    found: Any = None
    if len(parts) == 3 and parts[0] == "#" and parts[1] in ("$defs", "definitions"):
        found = root.get(parts[1])
        found = (
            found.get(parts[2].replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        )
    if found is None:
        raise UsageError(f"{where}: {reference!r:.80} leads nowhere; write #/$defs/NAME, and define it")
    return found


def payload_problem(text: str, schema: Mapping[str, Any]) -> str | None:
    """Say how a JSON text does not fit a schema; None if it does."""
    if not text.strip():
        return "the step's value is missing: payload_json is empty"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"the step's value is no JSON: {error}"
    return schema_problem(value, schema)


def schema_problem(value: object, schema: Mapping[str, Any]) -> str | None:
    """Say how a value does not fit a schema that `schema_of` has accepted; None if it does."""
    return _problem(value, schema, schema, "value", 0)


def _problem(value: Any, schema: Any, root: Mapping[str, Any], place: str, depth: int) -> str | None:
    if schema is True:
        return None
    if schema is False:
        return f"{place}: nothing is expected here"
    if depth > 2 * MAX_DEPTH:
        return f"{place}: it goes deeper than {MAX_DEPTH} levels"
    for check in (_kind_problem, _size_problem, _inside_problem):
        problem = check(value, schema, root, place, depth + 1)
        if problem is not None:
            return problem
    return _choice_problem(value, schema, root, place, depth + 1)


def _kind_problem(value: Any, schema: Mapping[str, Any], *given: Any) -> str | None:
    place = given[1]
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if names and not any(_is_a(value, name) for name in names):
        return f"{place}: {value!r:.80} is no {' or '.join(names)}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return f"{place}: {value!r:.80} is none of {schema['enum']!r:.200}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{place}: {value!r:.80} is not {schema['const']!r:.80}"
    return None


def _size_problem(value: Any, schema: Mapping[str, Any], *given: Any) -> str | None:
    place = given[1]
    if isinstance(value, int | float) and not isinstance(value, bool):
        rules = (
            ("minimum", operator.ge),
            ("maximum", operator.le),
            ("exclusiveMinimum", operator.gt),
            ("exclusiveMaximum", operator.lt),
        )
        for name, holds in rules:
            if name in schema and not holds(value, schema[name]):
                return f"{place}: {value!r} breaks {name} {schema[name]!r}"
    for kind, unit in ((str, "Length"), (list, "Items"), (dict, "Properties")):
        if isinstance(value, kind):
            if len(value) < schema.get(f"min{unit}", 0):
                return f"{place}: it has {len(value)}, fewer than min{unit} {schema[f'min{unit}']}"
            if len(value) > schema.get(f"max{unit}", math.inf):
                return f"{place}: it has {len(value)}, more than max{unit} {schema[f'max{unit}']}"
    return None


def _inside_problem(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str, depth: int
) -> str | None:
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                return f"{place}: {name!r} is missing"
        known = schema.get("properties", {})
        for name, each in value.items():
            if name in known:
                parts.append((each, known[name], f"{place}[{name!r}]"))
            elif schema.get("additionalProperties", True) is False:
                return f"{place}: {name!r:.80} is not expected"
            else:
                parts.append((each, schema.get("additionalProperties", True), f"{place}[{name!r:.80}]"))
    elif isinstance(value, list):
        first: Sequence[Any] = schema.get("prefixItems", ())
        for number, each in enumerate(value):
            rule = first[number] if number < len(first) else schema.get("items", True)
            parts.append((each, rule, f"{place}[{number}]"))
    for each, rule, where in parts:
        problem = _problem(each, rule, root, where, depth)
        if problem is not None:
            return problem
    return None


def _choice_problem(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], place: str, depth: int
) -> str | None:
    def fits(rule: Any) -> str | None:
        return _problem(value, rule, root, place, depth)

    if "$ref" in schema and (problem := fits(_target(root, schema["$ref"], place))):
        return problem
    for each in schema.get("allOf", ()):
        if problem := fits(each):
            return problem
    if "anyOf" in schema:
        problems = [fits(each) for each in schema["anyOf"]]
        if None not in problems:
            return f"{place}: it is none of what it may be ({'; '.join(str(each) for each in problems)})"
    if "oneOf" in schema:
        good = sum(fits(each) is None for each in schema["oneOf"])
        if good != 1:
            return f"{place}: it must be one of {len(schema['oneOf'])} things, and is {good} of them"
    if "not" in schema and fits(schema["not"]) is None:
        return f"{place}: it is what it must not be"
    return None


def _is_a(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _same(one: object, other: object) -> bool:
    """Compare as JSON does: true is not 1, and 1.0 is 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one == other

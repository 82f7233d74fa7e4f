"""JSON schemas for the values of steps.

A schema may use the keywords in `KEYWORDS`, which `jsonschema` checks by the 2020-12 draft. A schema with any
other keyword is refused when the workflow is read: a rule that is not checked would be worse than none.
References lead to `$defs` of the same schema, as they do in schemas made from types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

import pydantic  # Each of its names is loaded when it is first used, and not all programs use one.

from treenail.errors import UsageError

MAX_SCHEMA_NODES = 5_000
MAX_DEPTH = 50
"""How many levels a schema may have."""

_ONE = ("additionalProperties", "items", "not")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NOTES = ("title", "description", "default", "examples", "format", "deprecated", "$schema", "$comment")
KEYWORDS = frozenset(
    ("type", "enum", "const", "required", "$ref", *_ONE, *_LISTED, *_NAMED, *_COUNTS, *_BOUNDS, *_NOTES)
)
"""The keywords that a schema may use. The last ones (`title` to `$comment`) are for readers only."""


def schema_of(output: object, where: str) -> dict[str, Any]:
    """Return the schema of a step's value: of a type, or the one that was given, checked.

    Raises `UsageError` with the place if it is neither, or uses something that is not checked.
    """
    if isinstance(output, Mapping):
        schema: Any = dict(output)
    else:
        try:
            schema = pydantic.TypeAdapter(cast("Any", output)).json_schema()
        except (
            pydantic.PydanticSchemaGenerationError,
            pydantic.PydanticUserError,
            TypeError,
            ValueError,
        ) as error:
            raise UsageError(
                f"{where}: {output!r:.80} is neither a JSON schema nor a type that has one"
            ) from error
    _check_plain(schema, where, where, [MAX_SCHEMA_NODES], 0)
    jsonschema = _jsonschema()
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in error.absolute_path)
        raise UsageError(f"{where}{place}: {error.message:.300}") from error
    _check_keywords(schema, schema, where)
    return cast("dict[str, Any]", schema)


def _jsonschema() -> Any:
    """Import jsonschema when a step has a schema: it takes a tenth of a second, and most steps have none."""
    import jsonschema  # type: ignore[import-untyped]  # it ships no types

    return jsonschema


def _check_plain(value: object, whole: str, where: str, left: list[int], depth: int) -> None:
    """Check that a schema is JSON, and not too large: a few lines of YAML can stand for a billion values."""
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise UsageError(f"{whole}: the schema is too large; {MAX_DEPTH} levels are the most")
    if isinstance(value, Mapping):
        for name, each in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{where}: the key {name!r:.40} is not a text")
            _check_plain(each, whole, f"{where}.{name}", left, depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _check_plain(each, whole, f"{where}[{number}]", left, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: {value!r} is not a JSON number")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise UsageError(f"{where}: {value!r:.80} is not JSON; put it into quotes")


def _check_keywords(schema: Any, root: Mapping[str, Any], where: str) -> None:
    """Refuse keywords that are not checked, and references that lead out of the schema."""
    if isinstance(schema, bool):
        return
    for name, value in schema.items():
        place = f"{where}.{name}"
        if name not in KEYWORDS:
            raise UsageError(
                f"{place}: this keyword is not supported; a schema may use: {', '.join(sorted(KEYWORDS))}"
            )
        if name in _ONE:
            _check_keywords(value, root, place)
        elif name in _LISTED:
            for number, each in enumerate(value):
                _check_keywords(each, root, f"{place}[{number}]")
        elif name in _NAMED:
            for key, each in value.items():
                _check_keywords(each, root, f"{place}.{key}")
        elif name == "$ref":
            _, _, path = value.partition("#/")
            home, _, key = path.partition("/")
            defined = root.get(home, {}) if home in ("$defs", "definitions") else {}
            if not value.startswith("#/") or key.replace("~1", "/").replace("~0", "~") not in defined:
                raise UsageError(f"{place}: {value!r:.80} leads nowhere; write #/$defs/NAME, and define it")


def payload_problem(text: str, schema: Mapping[str, Any]) -> str | None:
    """Say how a JSON text does not fit a schema that `schema_of` has accepted; None if it fits."""
    if not text.strip():
        return "the step's value is missing: payload_json is empty"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"the step's value is not JSON: {error}"
    return first_problem(value, schema, "value")


def first_problem(value: object, schema: Mapping[str, Any], name: str = "") -> str | None:
    """Return the most telling way in which a value does not fit a schema, with its place; None if it fits."""
    jsonschema = _jsonschema()
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    try:
        error = jsonschema.exceptions.best_match(errors)
    except RecursionError:
        return f"{name or 'the data'} is nested too deeply to be checked"
    if error is None:
        return None
    place = f"{name}{error.json_path[1:]}".lstrip(".")
    return f"{place}: {error.message:.500}" if place else f"{error.message:.500}"

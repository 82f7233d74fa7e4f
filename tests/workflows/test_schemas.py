"""A schema is checked whole, or refused; and a value fits exactly if a reference implementation says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from treenail.errors import UsageError
from treenail.workflows.schemas import payload_problem, schema_of, schema_problem

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, -2.0])
    | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
        | st.just(["string", "null"]),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "maxLength": st.integers(0, 1),
        "minItems": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        "title": st.just("a title"),
    },
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    LEAVES | st.booleans() | st.just({"$ref": "#/$defs/d"}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
        },
    ),
    max_leaves=5,
)


@settings(max_examples=200)
@given(SCHEMAS, LEAVES, VALUES)
def test_a_value_fits_exactly_if_the_reference_says_so(schema: Any, definition: Any, value: Any) -> None:
    whole = {"allOf": [schema], "$defs": {"d": definition}}
    assert schema_of(whole, "here") == whole
    expected = jsonschema.Draft202012Validator(whole).is_valid(value)
    assert (schema_problem(value, whole) is None) == expected


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "text"}, "here.type"),
        ({"properties": {"a": {"pattern": "x"}}}, "here.properties.a.pattern: this cannot be checked"),
        ({"items": 3}, "here.items must be a schema"),
        ({"anyOf": []}, "here.anyOf must be a list of schemas"),
        ({"required": "a"}, "here.required"),
        ({"enum": "a"}, "here.enum"),
        ({"minimum": True}, "here.minimum"),
        ({"$ref": "https://example.org/x"}, "here.$ref"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"default": date(2026, 1, 1)}, "here.default"),
        ({"default": float("nan")}, "no JSON number"),
        ({1: 2}, "the key 1 is no text"),
        (3, "no type that has one"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(UsageError) as refused:
        schema_of(schema, "here")
    assert place in str(refused.value)


def test_a_schema_that_would_never_end_is_refused() -> None:
    """YAML can make a few lines stand for a billion values, or for themselves."""
    circle: dict[str, Any] = {}
    circle["not"] = circle
    bomb: Any = {}
    for _ in range(40):
        bomb = {"allOf": [bomb, bomb]}
    for each in (circle, bomb):
        with pytest.raises(UsageError, match="too large"):
            schema_of(each, "here")


def test_a_value_deeper_than_any_schema_is_refused_and_ends() -> None:
    schema = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    deep = "[" * 500 + "]" * 500
    assert "deeper" in (payload_problem(deep, schema) or "")
    assert payload_problem("[[], [[]]]", schema) is None
    assert "no JSON" in (payload_problem("[" * 100_000, schema) or "")
    endless = {"$defs": {"t": {"$ref": "#/$defs/t"}}, "$ref": "#/$defs/t"}
    assert "deeper" in (payload_problem("1", endless) or "")


class Point(BaseModel):
    x: int
    kind: Literal["a", "b"] = "a"


@dataclass
class Shape:
    points: list[Point]
    name: str | None = None


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('{"points": [{"x": 1}]}', True),
        ('{"points": [{"x": 1, "kind": "b"}], "name": null}', True),
        ('{"points": [{"x": "1"}]}', False),
        ('{"points": [{"x": 1, "kind": "c"}]}', False),
        ('{"name": "n"}', False),
        ("", False),
        ("{", False),
    ],
)
def test_a_type_is_kept_as_its_schema(text: str, is_good: bool) -> None:
    schema = json.loads(json.dumps(schema_of(Shape, "here")))
    assert (payload_problem(text, schema) is None) == is_good

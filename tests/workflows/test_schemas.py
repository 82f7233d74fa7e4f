"""Every rule of a schema is checked, or the schema is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from treenail.errors import UsageError
from treenail.workflows.schemas import payload_problem, schema_of


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "text"}, "here.type"),
        ({"properties": {"a": {"pattern": "x"}}}, "here.properties.a.pattern: this keyword is not supported"),
        ({"items": 3}, "here.items"),
        ({"anyOf": []}, "here.anyOf"),
        ({"anyOf": [{}, {"type": 3}]}, "here.anyOf[1].type"),
        ({"required": "a"}, "here.required"),
        ({"enum": "a"}, "here.enum"),
        ({"minimum": True}, "here.minimum"),
        ({"$ref": "https://example.org/x"}, "here.$ref"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"default": date(2026, 1, 1)}, "here.default"),
        ({"default": float("nan")}, "not a JSON number"),
        ({1: 2}, "the key 1 is not a text"),
        (3, "nor a type that has one"),
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
    assert "too deeply" in (payload_problem(deep, schema) or "")
    assert payload_problem("[[], [[]]]", schema) is None
    assert "not JSON" in (payload_problem("[" * 100_000, schema) or "")
    endless = {"$defs": {"t": {"$ref": "#/$defs/t"}}, "$ref": "#/$defs/t"}
    assert "too deeply" in (payload_problem("1", endless) or "")


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


@pytest.mark.parametrize(
    ("schema", "good", "bad", "said"),
    [
        ({"type": "integer", "minimum": 1}, "1.0", "0", "value: 0 is less than the minimum of 1"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "1", "4", "value: 4 is valid under each of"),
        ({"items": {"enum": ["a"]}}, '["a"]', '["a", "b"]', "value[1]: 'b' is not one of ['a']"),
        ({"const": 1}, "1", "true", "value: 1 was expected"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    schema: Any, good: str, bad: str, said: str
) -> None:
    assert payload_problem(good, schema) is None
    assert (payload_problem(bad, schema) or "").startswith(said)

"""What a tool is: made early or refused early, described to models, parsed strictly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from threading import Event
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from treenail.errors import ToolDefinitionError, ToolValidationError
from treenail.tools import FILE_TOOLS, PLAN_TOOLS, Tool, ToolCall, ToolContext, ToolExample, ToolResult, tool
from treenail.tools.shell import run_command
from treenail.tools.tool import ReadyTool


@dataclass(frozen=True)
class Point:
    x: int
    y: int = field(default=0, metadata={"description": "Upwards."})


@dataclass(frozen=True)
class Draw:
    points: list[Point]
    label: str | None = None


class Query(BaseModel):
    text: str = Field(description="What to look for.")
    limit: int = 10


class Color(Enum):
    RED = "red"
    BLUE = "blue"


# --- making tools ------------------------------------------------------------------------------------


def test_a_function_describes_itself() -> None:
    """Name, description, parameters and their descriptions come from the function."""

    @tool(effects="none")
    def find_files(pattern: str, limit: Annotated[int, Field(ge=1)] = 10, *, context: ToolContext) -> str:
        """Find files whose name fits
        a pattern.

        Not shown to the model.

        Args:
            pattern: A glob, such as
                `*.py`.
            limit: How many at most.
        """
        return pattern

    assert (find_files.name, find_files.effects) == ("find_files", "none")
    assert find_files.description == "Find files whose name fits a pattern."
    assert find_files.parameters_schema == {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "description": "A glob, such as `*.py`."},
            "limit": {"type": "integer", "minimum": 1, "default": 10, "description": "How many at most."},
        },
        "required": ["pattern"],
        "additionalProperties": False,
    }


def test_schemas_are_closed_at_every_level_and_keep_descriptions() -> None:
    drawing = Tool[Draw, None](name="draw", description="Draw.", handler=lambda params, *, context: None)
    schema = drawing.parameters_schema
    assert schema["additionalProperties"] is False
    point = schema["$defs"]["Point"]
    assert point["additionalProperties"] is False
    assert point["required"] == ["x"]
    assert "title" not in json.dumps(schema)
    searching = Tool[Query, None](name="search", description="S.", handler=lambda params, *, context: None)
    assert searching.parameters_schema["properties"]["text"]["description"] == "What to look for."


def test_a_field_may_be_called_title() -> None:
    """Only the titles that a schema gives itself are dropped."""

    @tool
    def rename(title: str) -> str:
        """Rename it."""
        return title

    assert rename.parameters_schema["properties"] == {"title": {"type": "string"}}


def test_descriptions_in_the_metadata_of_a_dataclass_reach_the_model() -> None:
    """Also from records inside of records, and inside of the parameters of a function."""
    moving = Tool[Point, None](name="move", description="Move.")
    assert moving.parameters_schema["properties"]["y"]["description"] == "Upwards."
    drawing = Tool[Draw, None](name="draw", description="Draw.")
    for each in (drawing, everything):
        schema = each.parameters_schema["$defs"]["Point"]
        assert schema["properties"]["y"]["description"] == "Upwards."


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    @tool
    def ping() -> str:
        """Ping."""
        return "pong"

    assert ping.parameters_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert ping.parse("{}") is None
    assert ping.parse("") is None
    with pytest.raises(ToolValidationError, match="takes no arguments, but got: x"):
        ping.parse('{"x": 1}')


def test_a_decorated_tool_is_the_handler_with_its_types() -> None:
    """`Tool[Params, Result]` and `Tool.wrap` of a one-object handler see the same types."""

    def handler(params: Point, *, context: ToolContext) -> ToolResult[Query]:
        """Do it."""
        return ToolResult.ok()

    wrapped = Tool.wrap(handler, name="do-it")
    assert (wrapped.params_type, wrapped.result_type) == (Point, Query)
    inferred: Tool[Any, Any] = Tool(name="do_it", description="Do it.", handler=handler)
    assert (inferred.params_type, inferred.result_type) == (Point, Query)
    assert inferred.parse('{"x": 1}') == Point(1)


async def _async(params: Point, *, context: ToolContext) -> ToolResult[None]:
    """Do it."""
    return ToolResult.ok()


class _Callable:
    """A handler that is an object."""

    async def __call__(self, params: Point, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()


def test_async_handlers_are_recognised() -> None:
    assert Tool.wrap(_async, name="a").is_async
    assert Tool[Point, None](name="b", description="B.", handler=_Callable()).is_async
    assert not Tool[Point, None](name="c", description="C.", handler=lambda params, *, context: None).is_async


def _no_doc(x: int) -> str:
    return str(x)


def _no_annotation(x, *, context):  # type: ignore[no-untyped-def]  # what is wrong is the point
    """Do it."""


def _star(*xs: int) -> str:
    """Do it."""
    return ""


def _stars(**xs: int) -> str:
    """Do it."""
    return ""


class Opaque:
    """A type that pydantic knows nothing of."""


def _unsupported(x: Opaque) -> str:
    """Do it."""
    return ""


def _unresolved(x: Nowhere) -> str:  # type: ignore[name-defined] # noqa: F821  # what is wrong is the point
    """Do it."""
    return ""


def _stranger(x: Event) -> str:
    """Do it."""
    return ""


def _private(_x: int) -> str:
    """Do it."""
    return ""


def _configured(model_config: int) -> str:
    """Do it."""
    return ""


def _clashing(model_dump: int) -> str:
    """Do it."""
    return ""


@pytest.mark.parametrize(
    ("function", "name", "problem"),
    [
        (_no_doc, "x", "has no docstring"),
        (_stranger, "x", "'x' cannot be described to a model"),
        (_private, "x", "'x' cannot have a parameter called _x"),
        (_configured, "x", "'x' cannot have a parameter called model_config"),
        (_clashing, "x", "'x' cannot be described to a model"),
        (_no_annotation, "x", "'x' of the tool 'x' has no annotation"),
        (_star, "x", r"takes \*xs"),
        (_stars, "x", r"takes \*xs"),
        (_unsupported, "x", "cannot be described to a model"),
        (_unresolved, "x", "cannot be resolved"),
        (_async, "Bad Name", "is not a tool name"),
        (_async, "x" * 65, "is not a tool name"),
        (_async, "", None),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_made(
    function: Any, name: str, problem: str | None
) -> None:
    """Not in production, when a model first calls it."""
    if problem is None:
        assert Tool.wrap(function, name=name).name == "async"
        return
    with pytest.raises(ToolDefinitionError, match=problem):
        Tool.wrap(function, name=name)


READY = (*FILE_TOOLS, *PLAN_TOOLS, run_command)


@pytest.mark.parametrize("ready", READY, ids=lambda each: each.name)
def test_the_parameters_of_a_tool_of_the_package_can_be_described(ready: Tool[Any, Any]) -> None:
    """They are described at their first use, so this is where a mistake in them would show."""
    assert isinstance(ready, ReadyTool)
    assert ready.parameters_schema["type"] == "object"
    assert ready.parameters_schema["additionalProperties"] is False


def test_a_tool_of_the_package_is_changed_like_any_other() -> None:
    renamed = replace(run_command, name="sh")
    assert (renamed.name, type(renamed)) == ("sh", type(run_command))
    assert renamed.parse('{"command": "ls"}') == run_command.parse('{"command": "ls"}')


def _two(first: Point, second: Point, *, context: Any) -> None:
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Tool(name="x", description=" "), "needs a description"),
        (lambda: Tool(name="x", description="d" * 1_025), "needs a description"),
        (lambda: Tool(name="x", description="d", effects="some"), "has effects 'some'"),  # type: ignore[arg-type]  # what is wrong is the point
        (lambda: Tool(name="x", description="d", effects="none", files="any"), "effects are not 'none'"),
        (lambda: Tool[int, None](name="x", description="d"), "the params type of the tool 'x'"),
        (lambda: Tool[Point, int](name="x", description="d"), "the result type of the tool 'x'"),
        (lambda: Tool[Point, None](name="x", description="d", handler=_two), "as one object"),
        (
            lambda: Tool[Point, None](
                name="x", description="d", examples=(ToolExample("e", Query(text="t"), None),)
            ),
            "input of type Query, not Point",
        ),
    ],
)
def test_a_description_that_cannot_be_a_tool_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ToolDefinitionError, match=problem):
        make()


@pytest.mark.parametrize("result", [None, Point, Query, list[Point], tuple[Point, ...], Sequence[Query]])
def test_results_may_be_records_and_sequences_of_them(result: Any) -> None:
    made = Tool[Point, result](name="x", description="d")
    assert made.result_type is result or made.result_type == result


def test_examples_are_kept_and_checked() -> None:
    example = ToolExample("Up", Point(0, 1), None)
    made = Tool[Point, None](name="move", description="Move.", examples=(example,))
    assert made.examples == (example,)


# --- parsing -----------------------------------------------------------------------------------------


@tool
def everything(
    text: str,
    number: int,
    share: float,
    flag: bool,
    when: datetime,
    who: UUID,
    color: Color,
    mode: Literal["a", "b"],
    point: Point,
    names: tuple[str, ...] = (),
    table: dict[str, int] = {},  # noqa: B006 # a default of a schema, never changed
    *,
    context: ToolContext,
) -> str:
    """Take everything."""
    return text


GOOD = {
    "text": "t",
    "number": 1,
    "share": 0.5,
    "flag": True,
    "when": "2026-01-01T00:00:00Z",
    "who": "00000000-0000-0000-0000-000000000001",
    "color": "red",
    "mode": "a",
    "point": {"x": 1},
}


def test_json_becomes_typed_values() -> None:
    """Dates, ids, enums and tuples are written as JSON can write them; text and object are parsed alike."""
    params = everything.parse(json.dumps(GOOD))
    assert params == everything.parse(GOOD)
    assert (params.when, params.who) == (datetime(2026, 1, 1, tzinfo=UTC), UUID(int=1))
    assert (params.color, params.point, params.names) == (Color.RED, Point(1), ())


@pytest.mark.parametrize(
    ("change", "field_name", "expected", "came"),
    [
        ({"number": "1"}, "number", "integer", '"1" (text)'),
        ({"number": 1.5}, "number", "integer", "1.5 (a number)"),
        ({"flag": 1}, "flag", "boolean", "1 (a number)"),
        ({"flag": "yes"}, "flag", "boolean", '"yes" (text)'),
        ({"text": 5}, "text", "string", "5 (a number)"),
        ({"text": None}, "text", "string", "null (null)"),
        ({"when": "yesterday"}, "when", "datetime", '"yesterday" (text)'),
        ({"who": "me"}, "who", "UUID", '"me" (text)'),
        ({"color": "green"}, "color", "'red' or 'blue'", '"green" (text)'),
        ({"mode": "c"}, "mode", "'a' or 'b'", '"c" (text)'),
        ({"point": {"x": "left"}}, "point.x", "integer", '"left" (text)'),
        ({"point": []}, "point", "object", "[] (an array)"),
        ({"names": ["a", 2]}, "names[1]", "string", "2 (a number)"),
        ({"table": {"k": "v"}}, "table.k", "integer", '"v" (text)'),
    ],
)
def test_errors_name_the_field_what_was_expected_and_what_came(
    change: dict[str, Any], field_name: str, expected: str, came: str
) -> None:
    """Nothing is coerced."""
    with pytest.raises(ToolValidationError) as caught:
        everything.parse(json.dumps({**GOOD, **change}))
    (line,) = [each for each in str(caught.value).splitlines() if each.startswith("- ")]
    assert line.startswith(f"- {field_name}: ")
    assert expected.lower() in line.lower()
    assert line.endswith(f"got {came}")
    assert "everything" in str(caught.value)


def test_missing_and_unknown_fields_are_named() -> None:
    arguments = {key: value for key, value in GOOD.items() if key != "number"} | {"numbr": 1}
    with pytest.raises(ToolValidationError) as caught:
        everything.parse(arguments)
    assert "- number: required, but missing" in str(caught.value)
    assert "- numbr: not a parameter of this tool; leave it out" in str(caught.value)
    with pytest.raises(ToolValidationError, match=r"- point\.z: not a parameter"):
        everything.parse({**GOOD, "point": {"x": 1, "z": 2}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{not json", "not valid JSON"),
        ('{"x": 1', "not valid JSON"),
        ("[1]", "one JSON object, but came as an array"),
        ('"x"', "one JSON object, but came as text"),
        ("null", "one JSON object, but came as null"),
        ("[" * 100_000, "not valid JSON|nested too deeply"),
    ],
)
def test_what_is_no_object_is_explained(text: str, problem: str) -> None:
    moving = Tool[Point, None](name="move", description="Move.")
    with pytest.raises(ToolValidationError, match=problem):
        moving.parse(text)


def test_many_errors_are_cut_short() -> None:
    with pytest.raises(ToolValidationError, match="and 1 more"):
        everything.parse({})


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_no_text_from_a_model_breaks_the_parser(text: str) -> None:
    """What is no good call is refused with a `ToolValidationError`, and with nothing else."""
    with pytest.raises(ToolValidationError, match="everything"):
        everything.parse(text)


# --- results -----------------------------------------------------------------------------------------


class Rendered:
    def render(self) -> str:
        return "drawn by itself"


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ToolResult.ok(message="fine"), "fine"),
        (ToolResult.ok(), "OK"),
        (ToolResult.error("broken"), "broken"),
        (ToolResult.ok(Point(1, 2)), '{"x": 1, "y": 2}'),
        (ToolResult.ok([Point(1)]), '[{"x": 1, "y": 0}]'),
        (ToolResult.ok(Query(text="ä")), '{"text": "ä", "limit": 10}'),
        (ToolResult.ok(Rendered()), "drawn by itself"),
        (ToolResult.ok("plain text"), "plain text"),
        (ToolResult("said", value=Point(1), exclude_value_from_context=True), "said"),
        (ToolResult("failed", value=Point(1), success=False), "failed"),
        (ToolResult.ok(object(), message="something odd"), "something odd"),
    ],
)
def test_what_the_model_reads_of_a_result(result: ToolResult[Any], shown: str) -> None:
    """The value if there is one to show, else the message."""
    assert result.render() == shown


def test_a_call_is_its_own_function() -> None:
    """Some providers nest name and arguments; either way of reading a call works."""
    call = ToolCall("c1", "move", {"x": 1})
    assert (call.function.name, json.loads(call.function.arguments_json)) == ("move", {"x": 1})
    assert ToolCall("c2", "ping").arguments_json == "{}"

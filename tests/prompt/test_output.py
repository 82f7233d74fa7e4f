"""Structured output: what is accepted, and what is refused with which words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from prompt_kit import Review, template_of
from pydantic import BaseModel, ConfigDict, Field

from treenail.errors import OutputParseError, PromptEvaluationError
from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, RenderedPrompt, parse_output
from treenail.prompt.output import output_json


def rendered(kind: Any, **fields: Any) -> RenderedPrompt[Any]:
    return Prompt(PromptTemplate[kind](ns="tests", key="judge", name="Judge", **fields)).render()


def parse(text: str, kind: Any = Review, **fields: Any) -> Any:
    return parse_output(text, rendered(kind, **fields))


def refusal(text: str, kind: Any = Review, **fields: Any) -> OutputParseError:
    with pytest.raises(OutputParseError) as caught:
        parse(text, kind, **fields)
    return caught.value


GOOD = '{"score": 3, "notes": ["a"]}'
THREE = Review(3, ["a"])


# --- where the answer is found ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\ufeff \n{GOOD}\n ",
        f"```json\n{GOOD}\n```",
        f"Here it is:\n\n```JSON\n{GOOD}\n```\nWas it helpful?",
        f"  ``` json  \n{GOOD}",
        f"```\n{GOOD}\n```",
        f"```json {GOOD} ```",
        f"My answer is {GOOD}. I hope that helps.",
        f"See [1] and {{this}}, {{}} or [x]: {GOOD}",
        f'Like {{"other": 1}}, but: {GOOD}',
        f"I set [score to 3], which isn't [what's meant, 2026-11-05]. {GOOD}",
        f"At [2026-11-05, 12:00] with \\frac{{a}}{{b}} [-] [ ]: {GOOD}",
    ],
)
def test_the_answer_is_found_wherever_it_stands(text: str) -> None:
    assert parse(text) == THREE


def test_the_first_fence_marked_json_is_the_answer() -> None:
    other = '{"score": 1, "notes": []}'
    assert parse(f"{other}\n```\n{other}\n```\n```json\n{GOOD}\n```\n```json\n{other}\n```") == THREE


def test_a_fence_inside_a_string_is_not_a_fence() -> None:
    note = "```json\n{}\n```"
    assert parse(json.dumps({"score": 1, "notes": [note]})) == Review(1, [note])
    fenced = f"```json\n{json.dumps({'score': 1, 'notes': ['a ``` b']})}\n```"
    assert parse(fenced) == Review(1, ["a ``` b"])


@pytest.mark.parametrize(
    "text",
    [
        f'```json\n{{"score": 3}} or so\n```\n{GOOD}',
        f"```json\n{GOOD}\n{GOOD}\n```",
        f"Like {GOOD}:\n```json\n{{broken}}\n```",
        f"Like {GOOD}:\n```json\n```",
        f"Like {GOOD}:\n```json\n[]\n```",
    ],
)
def test_what_stands_in_the_fence_is_the_answer_or_there_is_none(text: str) -> None:
    """An example beside a broken answer is not the answer."""
    assert refusal(text).raw_text == text


def test_an_array_may_come_bare_or_under_items() -> None:
    items = [{"score": 1, "notes": []}, {"score": 2, "notes": []}]
    expected = [Review(1), Review(2)]
    assert parse(json.dumps(items), list[Review]) == expected
    assert parse(json.dumps({"items": items}), list[Review]) == expected
    assert parse("none: []", list[Review]) == []
    assert parse(json.dumps({"items": [], "n": 0}), list[Review], allow_extra_keys=True) == []


def test_an_array_under_another_name_or_beside_others_is_refused() -> None:
    assert "must be an array, but is an object" in str(refusal('{"reviews": []}', list[Review]))
    assert "must be an array" in str(refusal('{"items": [], "n": 0}', list[Review]))


def test_an_object_with_items_of_its_own_is_not_unwrapped() -> None:
    @dataclass
    class Basket:
        items: list[int]

    assert parse('{"items": [1]}', Basket) == Basket([1])


def test_plain_text_is_returned_as_it_is() -> None:
    result = Prompt(template_of(MarkdownSection("A", "x"))).render()
    assert parse_output(' {"a": 1} ', result) == ' {"a": 1} '
    assert (result.output_type, result.container, result.allow_extra_keys) == (None, None, False)


# --- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{'score': 3, 'notes': ['a']}",
        '{"score": 3, "notes": ["a",],}',
        "{score: 3, notes: []}",
        '{"score": 3,, "notes": []}',
        '{,"score": 3, "notes": []}',
        '{"score": 3 "notes": []}',
        '{"score": , "notes": []}',
        '{"score": 3, "notes": [,]}',
        '{"score": 3, "notes": ["a"}',
        '{"score": 3, "notes": ["a"]',
        '{"score": NaN, "notes": []}',
        '{"score": 3, "notes": "a" "b"}',
        '{"score": 3, "notes": ["say "hi""]}',
        "{“score”: 3, “notes”: []}",
        '{"score": 3, /* why */ "notes": []}',
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    assert refusal(text).dataclass_type is Review


def test_a_repeated_key_is_refused() -> None:
    assert 'The key "score" occurs twice' in str(refusal('{"score": 1, "score": 2, "notes": []}'))


@dataclass
class Tree:
    value: int
    child: Tree | None = None


def test_a_part_of_a_broken_answer_is_not_the_answer() -> None:
    """The inner tree would fit."""
    for text in (
        '{"value": 1, "child": {"value": 2, "child": null}',
        '{"value": 1,, "child": {"value": 2, "child": null}}',
        "{'value': 1, 'child': {\"value\": 2, \"child\": null}",
        '[1, {"value": 2, "child": null}',
        '{value: 1, child: {"value": 2, "child": null}}',
        '{"value": "x}", "child": {"value": 2, "child": null}',
        "{'value': '\\x1f}', 'child': {'value': 2, 'child': None}}",
        '{"value": "say "}" here", "child": {"value": 2, "child": null}}',
        '{"value": "say "}, and so", "child": {"value": 2, "child": null}}',
        'First {"value": "?"}, then {"value": 2, "child": null}',
        '{"value" 1, "child": {"value": 2, "child": null}}',
    ):
        assert refusal(text, Tree).raw_text == text


# --- what fits -------------------------------------------------------------------------------------


def test_nothing_is_coerced() -> None:
    said = str(refusal('{"score": "3", "notes": []}'))
    assert "- score: Input should be a valid integer" in said
    assert 'got "3"' in said
    assert "- score:" in str(refusal('{"score": true, "notes": []}'))
    assert "- notes[1]:" in str(refusal('{"score": 3, "notes": ["a", 1]}'))


def test_what_is_missing_or_too_much_is_named() -> None:
    said = str(refusal('{"notes": [], "grade": 1}'))
    assert "- score: required, but missing" in said
    assert "- grade: not a key of this type; leave it out" in said
    assert said.endswith("Answer with one JSON object that fits the schema of Review, and nothing else.")


@dataclass
class Outer:
    inner: Review


def test_extra_keys_are_refused_at_every_depth_unless_they_are_allowed() -> None:
    text = '{"inner": {"score": 1, "notes": [], "why": "x"}, "more": 1}'
    said = str(refusal(text, Outer))
    assert "- inner.why:" in said
    assert "- more:" in said
    assert parse(text, Outer, allow_extra_keys=True) == Outer(Review(1))


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True)
    level: Annotated[int, Field(ge=1, le=5, description="From 1 to 5.")]
    label: str = Field(alias="theLabel")


def test_models_bring_their_own_rules_and_aliases() -> None:
    assert parse('{"level": 5, "theLabel": "x"}', Strict) == Strict(level=5, theLabel="x")
    assert "- level: Input should be less than or equal to 5" in str(
        refusal('{"level": 6, "theLabel": "x"}', Strict)
    )
    assert "- label: not a key" in str(refusal('{"level": 5, "theLabel": "x", "label": "y"}', Strict))


def test_a_type_that_refuses_a_value_itself_is_heard() -> None:
    @dataclass
    class Picky:
        n: int

        def __post_init__(self) -> None:
            if self.n > 1:
                raise LookupError("too many")

    assert parse('{"n": 1}', Picky) == Picky(1)
    assert "LookupError: too many" in str(refusal('{"n": 2}', Picky))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "The answer is empty."),
        (" \n", "The answer is empty."),
        ("I would say three.", "There is no JSON in the answer."),
        ("3", "must be an object, but is a number"),
        ("null", "must be an object, but is null"),
        ('"text"', "must be an object, but is text"),
        ("[]", "must be an object, but is an array"),
        ('{"score": 3', "The JSON cannot be read: Expecting ',' delimiter"),
        ("[" * 100_000, "nested too deeply"),
        ('{"score": ' + "1" * 5_000 + "}", "The JSON cannot be read"),
        ('{"score": "\\ud800", "notes": []}', "The answer does not fit"),
    ],
    ids=lambda each: each[:20],
)
def test_a_refusal_says_what_is_wrong(text: str, says: str) -> None:
    assert says in str(refusal(text))


@pytest.mark.parametrize("depth", [200, 300, 480, 700, 900, 950, 980, 990, 995, 2_000])
@pytest.mark.parametrize("kind", [Review, list[Review]])
def test_an_answer_may_be_nested_as_deeply_as_it_likes(depth: int, kind: Any) -> None:
    """Wherever the limits of reading, writing and checking lie, it is a refusal."""
    assert str(refusal("[" * depth + "]" * depth, kind))
    assert str(refusal('{"score":' * depth + "1" + "}" * depth, kind))
    assert str(refusal("{'score':" * depth + "1,}" + "}" * depth, kind))


def test_a_refusal_is_an_evaluation_error_with_its_place() -> None:
    error = refusal("nothing")
    assert isinstance(error, PromptEvaluationError)
    assert (error.phase, error.prompt_name, error.dataclass_type) == ("response", "Judge", Review)
    assert OutputParseError("m", Review).dataclass_type is Review


@pytest.mark.parametrize(
    "text",
    [
        '{"score":' * 1_000_000,
        "{" * 10_000_000,
        '{"' * 5_000_000,
        '{"notes": ["' + "y" * 10_000_000,
        "[1,," + "{}," * 1_000_000,
        "{'notes': ['" + "a'b" * 300_000,
        "x {y} " * 1_000_000,
    ],
    ids=["objects", "braces", "quotes", "string", "items", "apostrophes", "prose"],
)
def test_an_answer_of_megabytes_is_refused_and_not_choked_on(text: str) -> None:
    assert len(str(refusal(text))) < 1_000


def test_a_long_answer_is_an_answer() -> None:
    assert parse(json.dumps({"score": 1, "notes": ["y" * 10_000_000]})).score == 1


# --- schemas ---------------------------------------------------------------------------------------


@dataclass
class Described:
    score: int = field(metadata={"description": "How good it is."})
    inner: list[Review] = field(default_factory=list, metadata={"description": "The parts."})


def test_a_schema_is_closed_described_and_without_titles() -> None:
    assert rendered(Described).structured_output.schema == {
        "type": "object",
        "properties": {
            "score": {"type": "integer", "description": "How good it is."},
            "inner": {"type": "array", "items": {"$ref": "#/$defs/Review"}, "description": "The parts."},
        },
        "required": ["score"],
        "additionalProperties": False,
        "$defs": {
            "Review": {
                "type": "object",
                "properties": {
                    "score": {"type": "integer"},
                    "notes": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["score"],
                "additionalProperties": False,
            }
        },
    }


def test_an_array_stands_under_items_and_the_definitions_at_the_root() -> None:
    schema = rendered(list[Review]).structured_output.schema
    assert schema["type"] == "object"
    assert schema["required"] == ["items"]
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {"items": {"type": "array", "items": {"$ref": "#/$defs/Review"}}}
    assert schema["$defs"]["Review"]["required"] == ["score"]


def test_a_type_that_refers_to_itself_has_an_object_at_the_root() -> None:
    schema = rendered(Tree).structured_output.schema
    assert schema["type"] == "object"
    assert schema["properties"]["value"] == {"type": "integer"}
    assert schema["$defs"]["Tree"]["type"] == "object"


def test_a_field_may_be_called_title_and_a_default_may_hold_one() -> None:
    class Book(BaseModel):
        title: str
        properties: dict[str, str] = {"title": "x"}

    schema = rendered(Book).structured_output.schema
    assert schema["properties"]["title"] == {"type": "string"}
    assert schema["properties"]["properties"]["default"] == {"title": "x"}


def test_a_schema_is_left_open_where_extra_keys_are_allowed() -> None:
    assert "additionalProperties" not in rendered(Review, allow_extra_keys=True).structured_output.schema


def test_a_provider_without_schemas_gets_it_as_text() -> None:
    result = Prompt(
        PromptTemplate[Review](ns="tests", key="judge", sections=[MarkdownSection("A", "x")])
    ).render()
    told = result.with_output_format()
    head, _, fence = told.text.partition("```json\n")
    assert head.startswith(result.text)
    assert json.loads(fence.removesuffix("```")) == result.structured_output.schema
    assert "Response format" not in result.text
    assert (told.tools, told.structured_output) == (result.tools, result.structured_output)


def test_text_needs_no_format() -> None:
    result = Prompt(template_of(MarkdownSection("A", "x"))).render()
    assert result.with_output_format() is result


def test_an_output_is_written_as_a_model_would_write_it() -> None:
    assert json.loads(output_json(THREE)) == {"score": 3, "notes": ["a"]}
    assert json.loads(output_json([THREE])) == [{"score": 3, "notes": ["a"]}]
    assert json.loads(output_json(Strict(level=1, theLabel="x"))) == {"level": 1, "theLabel": "x"}
    assert output_json([]) == "[]"
    assert output_json("text") == "text"

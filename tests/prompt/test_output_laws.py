"""The laws of structured output: what is written can be read, and what is read is what was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from enum import Enum
from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.errors import OutputParseError
from treenail.prompt.output import output_json, structured_output


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Leaf:
    text: str
    number: float
    mood: Mood | None = None


@dataclass(frozen=True)
class Answer:
    count: int
    flag: bool
    when: datetime | None
    day: date
    id: UUID
    pair: tuple[int, str]
    tags: frozenset[str]
    leaves: list[Leaf] = field(default_factory=list)
    table: dict[str, Leaf] = field(default_factory=dict)
    child: Answer | None = None


texts = st.text(max_size=12)
leaves = st.builds(
    Leaf,
    text=texts,
    number=st.floats(allow_nan=False, allow_infinity=False),
    mood=st.none() | st.sampled_from(Mood),
)


def answers(children: st.SearchStrategy[Answer | None]) -> st.SearchStrategy[Answer]:
    return st.builds(
        Answer,
        count=st.integers(-(2**63), 2**63),
        flag=st.booleans(),
        when=st.none() | st.datetimes(),
        day=st.dates(),
        id=st.uuids(),
        pair=st.tuples(st.integers(0, 9), texts),
        tags=st.frozensets(texts, max_size=3),
        leaves=st.lists(leaves, max_size=2),
        table=st.dictionaries(texts, leaves, max_size=2),
        child=children,
    )


some_answers = answers(st.none() | answers(st.none()))
prose = st.text(
    alphabet=st.characters(exclude_characters="{}[]`\ufeff", exclude_categories=["Cs"]), max_size=20
)

one = structured_output(Answer)
many = structured_output(list[Answer])
assert one is not None
assert many is not None


def read(output: Any, text: str) -> Any:
    """Return what was read, or the refusal."""
    try:
        return output.parse(text)
    except OutputParseError as refusal:
        return refusal


@settings(max_examples=60, deadline=None)
@given(some_answers)
def test_what_is_written_can_be_read(value: Answer) -> None:
    assert one.parse(output_json(value)) == value


@settings(max_examples=40, deadline=None)
@given(st.lists(some_answers, max_size=2), st.booleans())
def test_lists_can_be_read_bare_and_wrapped(values: list[Answer], is_wrapped: bool) -> None:
    text = output_json(values)
    assert many.parse(f'{{"items": {text}}}' if is_wrapped else text) == values


@settings(max_examples=60, deadline=None)
@given(some_answers, prose, prose, st.booleans())
def test_text_around_an_answer_does_not_change_it(
    value: Answer, before: str, after: str, is_fenced: bool
) -> None:
    text = output_json(value)
    text = f"\n```json\n{text}\n```\n" if is_fenced else text
    assert one.parse(f"{before}{text}{after}") == value


@settings(max_examples=40, deadline=None)
@given(some_answers.filter(lambda value: value.child is not None), st.data())
def test_an_answer_that_was_cut_off_is_refused(value: Answer, data: st.DataObject) -> None:
    """Also where a whole answer is left inside it."""
    text = output_json(value)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    for spelled in (cut, f"Here: {cut}", f"```json\n{cut}", f"```json\n{cut}\n```"):
        assert isinstance(read(one, spelled), OutputParseError)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="{}[]\"'`:,\\json 1aTn\n-", max_size=60) | st.text(max_size=60))
def test_whatever_a_model_writes_is_read_or_refused(text: str) -> None:
    """An object of ten fields is not written by chance; an empty list may be."""
    assert isinstance(read(one, text), OutputParseError)
    found = read(many, text)
    assert found == [] or isinstance(found, OutputParseError)


@settings(max_examples=60, deadline=None)
@given(some_answers, st.data())
def test_a_character_too_few_is_another_answer_or_refused(value: Answer, data: st.DataObject) -> None:
    """A lost digit or letter makes another answer; no lost character makes a crash."""
    text = output_json(value)
    lost = data.draw(st.integers(0, len(text) - 1))
    assert isinstance(read(one, text[:lost] + text[lost + 1 :]), Answer | OutputParseError)

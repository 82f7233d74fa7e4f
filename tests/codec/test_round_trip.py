"""Decoding what was encoded gives back the very same value, type by type and bit by bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from codec_zoo import (
    Bits,
    Box,
    Cat,
    Colour,
    Dog,
    Everything,
    Level,
    Made,
    Node,
    Pair,
    Puppy,
    Rights,
    Shelf,
    Slotted,
    Word,
    everything,
    keys,
    law,
    same,
    unannounced,
    values,
)
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.errors import EncodeError

CODEC = Codec(TypeRegistry())


def through_payload(value: Any) -> Any:
    return CODEC.decode(type(value), CODEC.encode(value))


def through_data(value: Any) -> Any:
    return CODEC.from_data(parse_json(json.dumps(CODEC.to_data(value))))


@law
@given(values)
def test_any_value_comes_back_as_it_was(value: object) -> None:
    """What `to_data` accepts comes back the same through any JSON printer."""
    assert same(through_data(value), value)


@law
@given(everything)
def test_announced_values_come_back_as_they_were(value: Everything) -> None:
    """A record comes back the same whatever its fields are annotated with."""
    assert same(through_payload(value), value)
    assert same(through_data(value), value)


@law
@given(unannounced)
def test_a_field_may_hold_what_it_did_not_announce(value: Everything) -> None:
    """A value that does not match its annotation still comes back the same."""
    assert same(through_payload(value), value)


@law
@given(everything)
def test_a_record_comes_back_from_its_plain_object(value: Everything) -> None:
    """`record_from_data` undoes `record_to_data`, through any JSON printer."""
    data = json.loads(json.dumps(CODEC.record_to_data(value)))
    assert same(CODEC.record_from_data(Everything, data), value)


@law
@given(values)
def test_data_shares_nothing_with_the_value(value: object) -> None:
    """Emptying what `to_data` returned leaves the value as it was."""
    data = CODEC.to_data(value)
    before = json.dumps(data)
    _empty(data)
    assert json.dumps(CODEC.to_data(value)) == before


@law
@given(everything)
def test_a_value_shares_nothing_with_the_data_it_was_made_from(value: Everything) -> None:
    """Emptying the data after it was loaded leaves what was loaded as it is."""
    data = CODEC.record_to_data(value)
    back = CODEC.record_from_data(Everything, data)
    _empty(data)
    assert same(back, value)


def _empty(data: Any) -> None:
    if isinstance(data, (dict, list)):
        for each in list(data.values() if isinstance(data, dict) else data):
            _empty(each)
        data.clear()


@law
@given(st.lists(keys, max_size=6), st.randoms())
def test_equal_sets_are_equal_bytes(items: list[Any], random: Any) -> None:
    """The order in which a set was filled does not show in its stored form."""
    shuffled = list(items)
    random.shuffle(shuffled)
    # Of items that are equal and yet not the same, such as 1 and True, a set keeps the first.
    first, second = frozenset(items), frozenset(shuffled)
    if same(first, second):
        assert CODEC.encode(Box(first)) == CODEC.encode(Box(second))
        assert CODEC.encode(Box((first, set(first)))) == CODEC.encode(Box((second, set(second))))


@law
@given(everything)
def test_the_stored_form_is_utf8_json(value: Everything) -> None:
    """A payload is JSON that any parser reads, in UTF-8 that any store takes."""
    payload = CODEC.encode(value)
    assert type(json.loads(payload.decode("utf-8"))) is dict


@law
@given(everything)
def test_encoding_is_repeatable(value: Everything) -> None:
    """A value that came back is stored in the same bytes as the first time."""
    payload = CODEC.encode(value)
    assert CODEC.encode(CODEC.decode(Everything, payload)) == payload


@pytest.mark.parametrize(
    "value",
    [
        [1, True, 1.0, None, "1"],
        [(1,), [1], {1}, frozenset({1})],
        {"$": "tuple", "v": [1]},
        {"$": {"$": {"$": "obj"}}},
        {(1, "a"): [2], None: 3, 1.5: 4, True: 5},
        {Cat("a"): Dog("a")},
        [Cat("x"), Dog("x"), Puppy("x", 2)],
        [Colour.RED, Colour.GREEN, Word.YES, Level.HIGH, Rights.READ | Rights.RUN, Rights(0), Bits(3)],
        ["\ud83d\ude00", "\U0001f600", "\ud83d", "\ude00\ud83d", "\x00"],
        [math.inf, -math.inf, -0.0, 5e-324, 10**4000],
        [Decimal("sNaN"), Decimal("NaN12"), Decimal("-0.00")],
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2026, 10, 25, 2, 30, fold=1),
        Pair(Pair(1), right=(2,)),
        Node(1, [Node(2, [Node(3)])], Node(0)),
        Slotted(1, (Slotted(2), Slotted(3))),
        Shelf((Box(1),), Box([2]), {("k", 1): Box(3)}),
        Box(Box(Box([Box(None)]))),
        Made(1, 2, second="x"),
        [int, type(None), Cat, Colour],
    ],
)
def test_known_traps(value: object) -> None:
    """These were, or could have been, confused with something else."""
    assert same(through_data(value), value)
    assert same(through_payload(Box(value)), Box(value))


@dataclass
class Timed:
    at: datetime


def test_moments_made_by_pydantic_are_kept() -> None:
    """The zone that pydantic's own validator makes is stored, and comes back as such."""
    moment = TypeAdapter(datetime).validate_json('"2026-03-14T15:09:26Z"')
    assert moment.tzinfo is not None
    assert same(through_payload(Timed(moment)), Timed(moment))
    assert moment == datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC)


@law
@given(st.text("abc.:/\\ ", max_size=8).map(PureWindowsPath))
@example(PureWindowsPath("//a/"))
@example(PureWindowsPath("./c:", "a"))
def test_a_windows_path_comes_back_or_is_refused(path: PureWindowsPath) -> None:
    """A path whose text reads as another path is never stored as that text."""
    if PureWindowsPath(str(path)) == path:
        assert same(through_data(path), path)
    else:
        with pytest.raises(EncodeError, match="reads as another one"):
            through_data(path)

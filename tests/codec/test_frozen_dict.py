"""A FrozenDict is a dict in every way but one: it never changes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from codec_zoo import keys, law, values
from hypothesis import given
from hypothesis import strategies as st

from treenail.codec import Codec, FrozenDict, TypeRegistry

CODEC = Codec(TypeRegistry())

dicts = st.dictionaries(keys, values, max_size=4)


def change(given: Any, how: str) -> None:
    match how:
        case "set":
            given["a"] = 2
        case "delete":
            del given["a"]
        case "join":
            given |= {"b": 2}


CHANGES: dict[str, Callable[[Any], object]] = {
    "set": lambda given: change(given, "set"),
    "delete": lambda given: change(given, "delete"),
    "join": lambda given: change(given, "join"),
    "clear": lambda given: given.clear(),
    "pop": lambda given: given.pop("a"),
    "pop what is not there": lambda given: given.pop("b", None),
    "popitem": lambda given: given.popitem(),
    "setdefault": lambda given: given.setdefault("b", 2),
    "update": lambda given: given.update(b=2),
    "an attribute": lambda given: setattr(given, "note", 1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_it_refuses_every_change(how: str) -> None:
    """Each way in which a dict can change is refused, and nothing has changed."""
    frozen = FrozenDict(a=1)
    with pytest.raises((TypeError, AttributeError), match="FrozenDict"):
        CHANGES[how](frozen)
    assert frozen == {"a": 1}


@pytest.mark.parametrize("full", [{}, {"a": 1}])
def test_it_is_filled_once(full: dict[str, int]) -> None:
    """To initialise it a second time changes nothing, also if it is empty."""
    frozen = FrozenDict(full)
    frozen.__init__({"a": 2}, b=3)  # type: ignore[misc]  # as a copy of its state would
    assert frozen == full


@law
@given(dicts, st.dictionaries(st.text(), st.integers(), max_size=3))
def test_it_is_made_of_whatever_a_dict_is_made_of(items: dict[Any, Any], named: dict[str, int]) -> None:
    """Of a mapping, of pairs, of names, of nothing."""
    assert FrozenDict() == {}
    assert FrozenDict(items) == FrozenDict(list(items.items())) == FrozenDict(FrozenDict(items)) == items
    assert FrozenDict(items, **named) == dict(items, **named)
    assert list(FrozenDict(**named)) == list(named)


@law
@given(dicts)
def test_it_equals_the_dict_with_the_same_items(items: dict[Any, Any]) -> None:
    """It is read, compared and joined as the dict that it was made of, and does not follow its changes."""
    frozen = FrozenDict(items)
    assert list(frozen.items()) == list(items.items())
    assert type(frozen | {}) is dict
    items["one more"] = 1
    assert "one more" not in frozen or frozen == items


def test_copies_are_frozen_dicts() -> None:
    """Copying, deep copying and pickling keep what it is."""
    frozen = FrozenDict(a=(1, 2))
    for twin in (copy.copy(frozen), copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert type(twin) is FrozenDict
        assert twin == frozen
    assert repr(frozen) == "FrozenDict({'a': (1, 2)})"
    assert json.dumps(FrozenDict(a=1)) == '{"a": 1}'


@dataclass(frozen=True)
class Labelled:
    labels: FrozenDict[str, object]


def test_declared_it_is_stored_as_a_plain_object() -> None:
    """Where it is declared, its stored form is that of a dict: data from before the declaration are read."""
    assert CODEC.encode(Labelled(FrozenDict(a="x", b=[1]))) == b'{"labels":{"a":"x","b":[1]}}'
    read = CODEC.decode(Labelled, b'{"labels":{"a":"x","b":[1]}}')
    assert read == Labelled(FrozenDict(a="x", b=[1]))
    assert type(read.labels) is FrozenDict


def test_a_dict_in_its_place_comes_back_as_a_dict() -> None:
    """The round trip keeps a value that is something else than announced."""
    given = Labelled({"a": 1})  # type: ignore[arg-type]  # what is wrong is the point
    read = CODEC.decode(Labelled, CODEC.encode(given))
    assert read == given
    assert type(read.labels) is dict

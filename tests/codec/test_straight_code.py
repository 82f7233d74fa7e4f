"""Straight code for records: it stores and makes exactly what the plain way does."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID, uuid4

import pydantic
import pytest

from treenail.codec import Codec, TypeRegistry, quick
from treenail.errors import EncodeError


@dataclass
class Many:
    """One field for each kind of value that needs no encoding."""

    text: Any
    number: int = 0
    ratio: float = 0.0
    flag: bool = False
    nothing: None = None
    key: UUID | None = None
    word: Literal["on", "off"] = "on"
    maybe: int | None = None


ODD = [
    {"text": "half \ud800", "key": uuid4()},
    {"number": 10**4000, "ratio": math.inf},
    {"number": -(2**30), "ratio": 10**20},
    {"number": True, "flag": 1, "word": "neither", "maybe": False},
    {"ratio": math.nan, "key": "not one", "nothing": 0},
    {"number": 2**64, "maybe": 2**30 - 1, "key": UUID(int=0)},
]


@pytest.mark.parametrize("values", ODD)
def test_a_value_is_stored_as_it_is_or_says_what_it_is(values: dict[str, Any]) -> None:
    """Whatever stands in a field comes back equal and of the same type, and UUIDs are stored as text."""
    codec = Codec(TypeRegistry())
    many = Many(**{"text": "", **values})
    back = codec.decode(Many, codec.encode(many))
    assert [type(each) for each in vars(back).values()] == [type(each) for each in vars(many).values()]
    assert repr(back) == repr(many)
    if type(many.key) is UUID:
        assert json.loads(codec.encode(many))["key"] == str(many.key)


def test_what_cannot_be_stored_is_refused_with_its_field() -> None:
    """A refusal names the field, also one that straight code would have met first."""
    codec = Codec(TypeRegistry())
    with pytest.raises(EncodeError, match=r"Many\.number: an integer of more"):
        codec.encode(Many("", number=10**5000))
    with pytest.raises(EncodeError, match=r"Many\.text: a value of type .*\.object"):
        codec.encode(Many(text=object()))
    unset = Many("")
    del unset.text
    with pytest.raises(EncodeError, match=r"Many\.text: this field was never set"):
        codec.encode(unset)


def test_field_names_are_never_read_as_code() -> None:
    """A model's field may have any name; it is only ever a name."""
    odd: Any = {"class": (int, 1), "a b": (int, 2), "x); import os; (": (int, 3), "\ufb01": (int, 4)}
    model = pydantic.create_model("Odd", **odd)
    codec = Codec(TypeRegistry())
    assert json.loads(codec.encode(model(**dict.fromkeys(odd, 7)))) == dict.fromkeys(odd, 7)


@dataclass(frozen=True, slots=True)
class Plain:
    """A record that is made in the usual way."""

    name: str
    size: int = 3
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("too small")


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """The same record, made quickly."""

    name: str
    size: int = 3
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("too small")


def test_a_quick_record_is_like_any_other() -> None:
    """It has the same signature, defaults, checks and copies, and it is frozen."""
    assert inspect.signature(Quick) == inspect.signature(Plain)
    assert str(inspect.signature(Quick)) == str(inspect.signature(Plain))
    made = Quick("a")
    assert repr(made) == repr(Plain("a")).replace("Plain", "Quick")
    assert made == Quick("a", 3, []) == Quick(name="a", tags=[]) == copy.deepcopy(made)
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, size=4) == Quick("a", 4)
    assert made.tags is not Quick("a").tags
    with pytest.raises(ValueError, match="too small"):
        Quick("a", -1)
    with pytest.raises(TypeError, match="name"):
        Quick()  # type: ignore[call-arg]  # that is what is tested
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.size = 5  # type: ignore[misc]  # that is what is tested

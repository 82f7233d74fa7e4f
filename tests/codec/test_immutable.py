"""`is_immutable` may be too careful, and is never too trusting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Union

import pytest
from codec_zoo import Address, Box, Cat, Everything, Model, Node, Puppy, Slotted, everything, law, values
from hypothesis import given
from pydantic import BaseModel, ConfigDict, PrivateAttr

from treenail.codec import Codec, FrozenDict, TypeRegistry, is_immutable

CODEC = Codec(TypeRegistry())


def claimed(value: Any) -> bool:
    CODEC.encode(value)  # The question is asked of values that can be stored.
    return is_immutable(value)


def can_change(value: Any) -> bool:
    """Find anything that can change in place, by looking at the value alone."""
    if type(value) is FrozenDict:
        return any(can_change(each) for each in (*value, *value.values()))
    if isinstance(value, (list, dict, set, bytearray)):
        return True
    if isinstance(value, (Enum, type)):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(can_change(each) for each in value)
    if isinstance(value, BaseModel):
        frozen = value.model_config.get("frozen", False)
        rest = (value.__pydantic_extra__ or value.__pydantic_private__) is not None
        return not frozen or rest or any(can_change(each) for each in vars(value).values())
    if dataclasses.is_dataclass(value):
        fields = [each.name for each in dataclasses.fields(value)]
        try:
            setattr(value, fields[0], getattr(value, fields[0]))
        except AttributeError:
            return any(can_change(getattr(value, name)) for name in fields)
        return True
    return type(value).__name__ == "mappingproxy"


@law
@given(values)
def test_nothing_reachable_from_an_immutable_value_can_change(value: object) -> None:
    """What is claimed to be immutable holds no list, dict, set or assignable object anywhere."""
    for record in (Box(value), Puppy(value, value), Slotted(value, (Slotted(1), value))):  # type: ignore[arg-type]  # any value at all
        if claimed(record):
            assert not can_change(record)


@law
@given(everything)
def test_a_mutable_record_is_never_immutable(value: Everything) -> None:
    """A dataclass that is not frozen can change whatever its fields hold."""
    assert not claimed(value)


@dataclass(frozen=True)
class Frozen:
    name: str
    cat: Cat | None = None
    cats: tuple[Cat | Puppy, ...] = ()
    below: Frozen | None = None


def test_what_cannot_change_is_recognised() -> None:
    """The claim is made where it matters: frozen records of immutable values, however nested."""
    assert claimed(Frozen("a", Cat("b"), (Cat("c"), Puppy("d", 1)), Frozen("e")))
    assert claimed(Slotted(1, (Slotted(2),)))
    assert claimed(Box((1, frozenset({"a"}), Cat("x"))))
    assert claimed(Address(street="a"))
    assert claimed(Ping())


@dataclass(frozen=True)
class Labelled:
    labels: FrozenDict[str, object]
    below: Labelled | None = None
    cats: FrozenDict[Cat, Cat] | None = None


def test_a_frozen_dict_is_as_immutable_as_what_it_holds() -> None:
    """Declared or not, and however deep: a FrozenDict of immutable values does not make a record mutable."""
    assert claimed(Labelled(FrozenDict()))
    assert claimed(Labelled(FrozenDict(a="x", b=(1, None)), Labelled(FrozenDict(c=FrozenDict(d=1)))))
    assert claimed(Labelled(FrozenDict(), cats=FrozenDict({Cat("a"): Cat("b")})))
    assert claimed(Box(FrozenDict({1: "x"})))


class Bag(NamedTuple):
    items: list[int]


@dataclass(frozen=True)
class Ping:
    pong: Pong | None = None


@dataclass(frozen=True)
class Pong:
    ping: Ping | None = None
    log: list[int] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Either:
    it: Union[str, list[int], Pong]  # noqa: UP007  # both spellings of a union are read


class Loose(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    x: int = 0


class Secretive(BaseModel):
    model_config = ConfigDict(frozen=True)

    x: int = 0
    _seen: list[int] = PrivateAttr(default_factory=list)


class Undecorated(Frozen):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Box([1]),
        Box(([],)),
        Box(Bag([])),
        Box({"k": 1}),
        Box(FrozenDict({"k": []})),
        Labelled(FrozenDict(a=[1])),
        Labelled(FrozenDict(a="x", b={})),
        Labelled(FrozenDict(a=FrozenDict(b=[]))),
        Labelled(FrozenDict(), Labelled(FrozenDict(a=[1]))),
        Labelled(FrozenDict(), cats=FrozenDict({Cat("a"): Cat([])})),  # type: ignore[arg-type]  # what is wrong is the point
        Labelled({"a": "x"}),  # type: ignore[arg-type]  # what is wrong is the point
        Box(Node(1)),
        Box(Model()),
        Cat([]),  # type: ignore[arg-type]  # what is wrong is the point
        Frozen("a", below=Frozen("b", cat=Cat({}))),  # type: ignore[arg-type]  # what is wrong is the point
        Ping(Pong()),
        Pong(),
        Either([1]),
        Loose(more=[1]),
        Secretive(),
        Undecorated("x"),
        Box(Undecorated("x")),
    ],
)
def test_what_can_change_is_never_called_immutable(value: Any) -> None:
    """Neither a value's wrapping nor a type that refers back to its holder hides what can change."""
    assert not claimed(value)

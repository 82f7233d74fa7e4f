"""Dataclasses of every make: what is stored of them, and how they survive a change of their code."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

import pytest
from codec_zoo import Box, Cat, Checked, Colour, Dog, Made, Pair, Puppy, Shelf, Slotted, SlottedChild, same
from typing_extensions import TypeAliasType

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.errors import DecodeError, EncodeError, UsageError

T = TypeVar("T")


@pytest.fixture
def codec() -> Codec:
    return Codec(TypeRegistry())


def there_and_back(codec: Codec, value: Any) -> Any:
    return codec.decode(type(value), codec.encode(value))


def test_plain_values_are_plain_json(codec: Codec) -> None:
    """A record whose values are as announced is stored as a bare object of its fields."""
    shelf: Shelf[str, date] = Shelf((Box(1),), Box([2]), {"k": Box(3)})
    assert json.loads(codec.encode(Cat("Tom"))) == {"name": "Tom"}
    assert json.loads(codec.encode(Slotted(1, (Slotted(2),)))) == {"x": 1, "y": [{"x": 2, "y": []}]}
    assert json.loads(codec.encode(shelf))["boxes"] == [{"item": 1}]


def test_a_subclass_in_a_base_field_says_what_it_is(codec: Codec) -> None:
    """Where a base class was announced, a subclass comes back as the subclass."""

    @dataclass
    class Kennel:
        dogs: list[Dog]

    kennel = Kennel([Dog("a"), Puppy("b", 3)])
    assert same(there_and_back(codec, kennel), kennel)
    assert json.loads(codec.encode(kennel))["dogs"][0] == {"name": "a"}


def test_members_of_a_union_with_the_same_fields_are_told_apart(codec: Codec) -> None:
    """Two classes with equal fields in one union do not turn into each other."""

    @dataclass
    class Owner:
        pets: tuple[Cat | Dog, ...]

    owner = Owner((Cat("x"), Dog("x")))
    assert same(there_and_back(codec, owner), owner)


def test_what_the_constructor_takes_and_does_not_keep_is_not_needed(codec: Codec) -> None:
    """`InitVar`, `KW_ONLY`, `ClassVar` and `init=False` fields load without the constructor."""
    made = Made(1, 10, second="x")
    assert json.loads(codec.encode(made)) == {"first": 1, "second": "x", "derived": 11}
    assert same(there_and_back(codec, made), made)


@dataclass
class WithDict:
    a: int = 1


@dataclass(slots=True)
class SlotsOverDict(WithDict):
    b: int = 2


@dataclass
class DictOverSlots(SlottedChild):
    b: int = 2
    z: str = "other"


@pytest.mark.parametrize("value", [SlotsOverDict(5, 6), DictOverSlots("q", 7), SlottedChild("x")])
def test_slots_and_dicts_mix(codec: Codec, value: Any) -> None:
    """Fields in slots, in the instance's dict, or in both come back in their places."""
    assert same(there_and_back(codec, value), value)
    assert there_and_back(codec, value) == value


def test_a_checking_post_init_does_not_stand_in_the_way(codec: Codec) -> None:
    """A stored value that today's `__post_init__` would reject can still be read."""

    @dataclass
    class Positive:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError(self.x)

    made = codec.decode(Positive, '{"x": -1}')
    assert (type(made), made.x) == (Positive, -1)


def test_properties_and_caches_are_not_stored(codec: Codec) -> None:
    """Only fields are; a cached property is computed again."""

    @dataclass(frozen=True)
    class Area:
        side: int

        @property
        def double(self) -> int:
            return self.side * 2

        @cached_property
        def square(self) -> int:
            return self.side**2

    area = Area(3)
    assert (area.double, area.square) == (6, 9)
    assert json.loads(codec.encode(area)) == {"side": 3}
    assert there_and_back(codec, area).square == 9


def test_local_classes_may_name_themselves_and_each_other(codec: Codec) -> None:
    """Annotations that cannot all be resolved announce nothing, and every value is stored exactly."""

    @dataclass
    class Leaf:
        day: date

    @dataclass
    class Tree:
        leaves: list[Leaf]
        below: Tree | None = None
        when: date | None = None

    tree = Tree([Leaf(date(2026, 1, 2))], Tree([], None), date(2026, 1, 1))
    assert same(there_and_back(codec, tree), tree)
    assert json.loads(codec.encode(Leaf(date(2026, 1, 2)))) == {"day": "2026-01-02"}


def test_generic_parameters_reach_the_fields(codec: Codec) -> None:
    """A generic class inside another is coded with the outer one's parameters."""

    @dataclass
    class Store:
        shelf: Shelf[tuple[int, int], date]

    store = Store(Shelf((Box(date(2026, 1, 1)),), Box([date(2026, 1, 2)]), {(1, 2): Box(date(2026, 1, 3))}))
    assert same(there_and_back(codec, store), store)
    assert json.loads(codec.encode(store))["shelf"] == {
        "boxes": [{"item": "2026-01-01"}],
        "nested": {"item": ["2026-01-02"]},
        "by_key": [[[1, 2], {"item": "2026-01-03"}]],
    }


@dataclass(frozen=True)
class Weight:
    grams: int


class Coin(Weight, Enum):
    CENT = 2
    EURO = 8


@dataclass
class Purse:
    coin: Coin
    other: Any


def test_an_enum_whose_members_are_records_is_an_enum(codec: Codec) -> None:
    """Its members come back as themselves, not as copies of their fields."""
    back = there_and_back(codec, Purse(Coin.EURO, [Coin.CENT]))
    assert back.coin is Coin.EURO
    assert back.other[0] is Coin.CENT


class Open(Enum):
    KNOWN = "known"

    @classmethod
    def _missing_(cls, value: object) -> Open:
        member = object.__new__(cls)
        member._name_, member._value_ = str(value), value
        return member


def test_an_enum_member_that_was_made_up_is_refused(codec: Codec) -> None:
    """A member that is not declared would not be found again when it is loaded."""
    for value in (Box(Open("other")), Box([Open("other")])):
        with pytest.raises(EncodeError, match="not a declared member"):
            codec.encode(value)
    assert there_and_back(codec, Box(Open.KNOWN)).item is Open.KNOWN


Tree = TypeAliasType("Tree", "dict[str, Tree] | date")
Pile = TypeAliasType("Pile", list[T], type_params=(T,))


@dataclass
class Aliased:
    tree: Tree
    pile: Pile[date]


def test_type_aliases_are_looked_through(codec: Codec) -> None:
    """An alias stands for what it names, also if it names itself or takes a parameter."""
    value = Aliased({"a": {"b": date(2026, 1, 1)}}, [date(2026, 1, 2)])
    assert same(there_and_back(codec, value), value)
    assert json.loads(codec.encode(value))["pile"] == ["2026-01-02"]


def test_annotations_that_make_no_sense_are_coded_by_value(codec: Codec) -> None:
    """An annotation may be any object; the value is stored exactly all the same."""
    odd = dataclasses.make_dataclass(
        "Odd", [("a", [1, 2]), ("b", {"x": int}), ("c", "no such name"), ("d", 7)]
    )
    value = odd((1,), {2}, date(2026, 1, 1), Pair(1))
    assert same(there_and_back(codec, value), value)


# --- code that changed since -----------------------------------------------------------------------


@dataclass
class Grown:
    old: int
    new: str = "default"
    items: list[int] = field(default_factory=lambda: [1])


def test_missing_fields_take_their_defaults(codec: Codec) -> None:
    """A field that was added later takes its default, made anew for each value."""
    first, second = codec.decode(Grown, '{"old": 1}'), codec.decode(Grown, '{"old": 1}')
    assert first == Grown(1, "default", [1])
    assert first.items is not second.items


def test_fields_that_are_gone_are_left_out(codec: Codec) -> None:
    """A field that was removed since is ignored, whatever it held."""
    assert codec.decode(Cat, '{"name": "x", "age": {"$": "obj", "t": "gone:Type", "v": 1}}') == Cat("x")


def test_a_missing_field_without_default_is_named(codec: Codec) -> None:
    """Without a default there is no value to take, and the error says for which field."""
    with pytest.raises(DecodeError, match="missing") as caught:
        codec.decode(Grown, "{}")
    assert caught.value.path == "Grown.old"


def test_named_tuples_grow_too(codec: Codec) -> None:
    """A named tuple is stored by its names, so a new field takes its default."""
    codec.registry.register(Pair, name="Pair")
    assert codec.from_data({"$": "namedtuple", "t": "Pair", "v": {"left": 1, "gone": 2}}) == Pair(1, None)
    with pytest.raises(DecodeError, match="'left'"):
        codec.from_data({"$": "namedtuple", "t": "Pair", "v": {"right": 2}})


def test_pydantic_dataclasses_are_dataclasses(codec: Codec) -> None:
    """Their fields are stored, and their defaults are the values, not the descriptions."""
    checked = Checked(3, ["a"])
    assert same(there_and_back(codec, checked), checked)
    assert codec.decode(Checked, '{"amount": 1}').labels == []


# --- what is refused -------------------------------------------------------------------------------


class Unknown:
    pass


class Odd(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Box(Unknown()), "Box.item"),
        (Box([1, {"k": (2, Unknown())}]), "Box.item[1]['k'][1]"),
        (Box({(1, 2): Unknown()}), "Box.item[(1, 2)]"),
        (Box({Pair(1): {Odd("x")}}), "Box.item[Pair(left=1, right=None)][0]"),
        (Box(Pair(1, lambda: 1)), "Box.item.right"),
        (Box(10**5000), "Box.item"),
        (Box({10**5000: 1}), "Box.item[<int>]"),
        (Box({"k": bytearray(b"x")}), "Box.item['k']"),
        (Cat(Unknown()), "Cat.name"),  # type: ignore[arg-type]  # what is wrong is the point
        (Shelf((Box(Unknown()),), Box([]), {}), "Shelf.boxes[0].item"),
        (Slotted(1, (Slotted(2, (Slotted(Unknown()),)),)), "Slotted.y[0].y[0].x"),  # type: ignore[arg-type]  # what is wrong is the point
    ],
)
def test_a_refusal_names_the_path(codec: Codec, value: Any, path: str) -> None:
    """What cannot be stored is refused with the way to it, from the outside in."""
    with pytest.raises(EncodeError) as caught:
        codec.encode(value)
    assert caught.value.path == path
    with pytest.raises(EncodeError):
        codec.to_data(value)


def test_a_key_with_both_halves_of_a_pair_is_refused(codec: Codec) -> None:
    """JSON would join them into one character, and two keys could become one."""
    with pytest.raises(EncodeError, match=r"'\\ud83d\\ude00'"):
        codec.encode(Box({"\ud83d\ude00": 1}))


def test_a_field_that_was_never_set_is_named(codec: Codec) -> None:
    """An `init=False` field without a value cannot be stored."""
    made = Made(1, 2)
    del made.derived
    with pytest.raises(EncodeError, match="never set") as caught:
        codec.encode([made][0])
    assert caught.value.path == "Made.derived"


def test_only_records_are_events(codec: Codec) -> None:
    """A bare value has no fields; the error says to wrap it."""
    for value in (1, "x", [Cat("a")], Pair(1), Colour.RED):
        with pytest.raises(EncodeError, match="wrap"):
            codec.encode(value)
    with pytest.raises(UsageError):
        codec.record(int)


@dataclass
class Failure(Exception):
    code: int


@dataclass
class Names(list[str]):
    title: str


@dataclass
class Guarded:
    x: int

    @property  # type: ignore[no-redef]  # as people guard a field
    def x(self) -> int:
        return 1

    @x.setter
    def x(self, value: int) -> None:
        pass


@pytest.mark.parametrize("value", [Failure(1), Names("t"), Guarded(2)])
def test_records_that_are_more_than_their_fields_are_refused(codec: Codec, value: Any) -> None:
    """A dataclass that is also an exception or a list, or whose field is a property, would not come back."""
    with pytest.raises(EncodeError, match="cannot be stored"):
        codec.encode(value)
    with pytest.raises(EncodeError) as caught:
        codec.encode(Box([value]))
    assert caught.value.path == "Box.item[0]"
    with pytest.raises(DecodeError, match="cannot be stored"):
        codec.decode(type(value), '{"code": 1, "title": "t", "x": 2}')


@dataclass
class Shape(ABC):
    name: str

    @abstractmethod
    def area(self) -> float: ...


@dataclass
class Square(Shape):
    side: float = 1.0

    def area(self) -> float:
        return self.side**2


@dataclass
class Drawing:
    shapes: list[Shape]


def test_an_abstract_base_may_be_announced(codec: Codec) -> None:
    """A field of an abstract class holds its subclasses; the class itself cannot be loaded."""
    drawing = Drawing([Square("a", 2.0)])
    assert same(there_and_back(codec, drawing), drawing)
    with pytest.raises(DecodeError, match="abstract"):
        codec.decode(Drawing, '{"shapes": [{"name": "x"}]}')


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_a_key_that_cannot_be_shown_is_still_refused_cleanly(codec: Codec) -> None:
    """A failing `__repr__` of a key does not hide the refusal."""
    with pytest.raises(EncodeError) as caught:
        codec.encode(Box({Loud(): 1}))
    assert caught.value.path == "Box.item[<Loud>]"


def test_nothing_is_stored_by_a_refused_call(codec: Codec) -> None:
    """After a refusal the same codec stores and loads as if it had never been asked."""
    with pytest.raises(EncodeError):
        codec.encode(Box(Unknown()))
    assert parse_json(codec.encode(Box(1))) == {"item": 1}

"""Records that are made quickly are what they were: the same arguments, the same values, as frozen."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.records import quick

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usual:
    """Every kind of field."""

    first: int
    second: str = "second"
    many: list[int] = field(default_factory=list)
    constant: int = field(default=7, init=False)
    own: list[str] = field(default_factory=list, init=False)
    doubled: int = field(init=False)
    named: int = field(default=1, kw_only=True)
    hidden: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.first)


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """Every kind of field."""

    first: int
    second: str = "second"
    many: list[int] = field(default_factory=list)
    constant: int = field(default=7, init=False)
    own: list[str] = field(default_factory=list, init=False)
    doubled: int = field(init=False)
    named: int = field(default=1, kw_only=True)
    hidden: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.first)


ARGUMENTS = st.fixed_dictionaries(
    {"first": st.integers()},
    optional={
        "second": st.text(),
        "many": st.lists(st.integers()),
        "named": st.integers(),
        "hidden": st.integers(),
    },
)


@given(ARGUMENTS)
def test_a_quick_record_has_the_values_of_the_usual_one(arguments: dict[str, Any]) -> None:
    usual, made = Usual(**arguments), Quick(**arguments)
    assert dataclasses.asdict(made) == dataclasses.asdict(usual)
    assert repr(made) == repr(usual).replace("Usual", "Quick")
    assert type(made) is Quick


@given(ARGUMENTS)
def test_a_quick_record_can_be_compared_copied_pickled_and_replaced(arguments: dict[str, Any]) -> None:
    made = Quick(**arguments)
    assert made == Quick(**arguments)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, first=made.first + 1).doubled == 2 * made.first + 2


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Quick)])
def test_no_field_of_a_quick_record_can_be_set_or_deleted(name: str) -> None:
    made = Quick(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(made, name)


def test_the_defaults_that_are_made_anew_are_not_shared() -> None:
    assert Quick(1).many is not Quick(1).many
    assert Quick(1).own is not Quick(1).own


def test_the_signature_stays() -> None:
    usual = inspect.signature(Usual).parameters
    made = inspect.signature(Quick).parameters
    assert [(each.name, each.kind) for each in made.values()] == [
        (each.name, each.kind) for each in usual.values()
    ]
    assert {name for name, each in made.items() if each.default is each.empty} == {"first"}


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {}), ((1, "a", [], 4, 5), {}), ((1,), {"unknown": 1}), ((1,), {"first": 2})],
)
def test_wrong_arguments_are_refused(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Quick(*positional, **named)


def test_a_subclass_is_made_in_the_usual_way() -> None:
    @dataclass(frozen=True)
    class More(Quick):
        extra: int = 0

    class Same(Quick):
        """Without fields of its own."""

    assert (More(1, extra=2).extra, More(1).first, Same(3).doubled) == (2, 1, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Same(3).first = 4  # type: ignore[misc]  # what is wrong is the point


def test_a_generic_record_can_be_quick() -> None:
    @quick
    @dataclass(frozen=True, slots=True)
    class Box(Generic[T]):
        content: T
        label: str = ""

    made = Box([1], label="a")
    assert (made.content, made.label, type(made)) == ([1], "a", Box)
    assert dataclasses.replace(made, label="b") == Box([1], "b") != made
    assert typing.get_args(Box[int]) == (int,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.label = "c"  # type: ignore[misc]  # what is wrong is the point


def test_only_a_frozen_dataclass_with_slots_can_be_made_quick() -> None:
    with pytest.raises(TypeError, match=r"Loose must be a dataclass with frozen=True, slots=True"):

        @quick
        @dataclass
        class Loose:
            first: int


def test_a_class_variable_is_no_argument() -> None:
    """It stays the class's, as in any other dataclass."""

    @quick
    @dataclass(frozen=True, slots=True)
    class Sized:
        size: int
        LARGEST: ClassVar[int] = 9

    assert Sized(3).LARGEST == 9
    with pytest.raises(TypeError):
        Sized(3, 4)  # type: ignore[call-arg]  # what is wrong is the point

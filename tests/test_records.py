"""Records that cost little are what they would be anyway: the same arguments, the same values, as frozen."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treenail
from treenail import records
from treenail.records import quick

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


@records.dataclass(frozen=True, slots=True)
class Later:
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
@records.dataclass(frozen=True, slots=True)
class QuickLater:
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


COSTING_LITTLE = pytest.mark.parametrize("kind", [Quick, Later, QuickLater], ids=lambda kind: kind.__name__)

ARGUMENTS = st.fixed_dictionaries(
    {"first": st.integers()},
    optional={
        "second": st.text(),
        "many": st.lists(st.integers()),
        "named": st.integers(),
        "hidden": st.integers(),
    },
)


@COSTING_LITTLE
@given(ARGUMENTS)
def test_a_record_has_the_values_of_the_usual_one(kind: Any, arguments: dict[str, Any]) -> None:
    usual, made = Usual(**arguments), kind(**arguments)
    assert dataclasses.asdict(made) == dataclasses.asdict(usual)
    assert repr(made) == repr(usual).replace("Usual", kind.__name__)
    assert type(made) is kind


@COSTING_LITTLE
@given(ARGUMENTS)
def test_a_record_can_be_compared_copied_pickled_and_replaced(kind: Any, arguments: dict[str, Any]) -> None:
    made = kind(**arguments)
    assert made == kind(**arguments)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, first=made.first + 1).doubled == 2 * made.first + 2


@COSTING_LITTLE
@given(ARGUMENTS, ARGUMENTS)
def test_records_are_equal_when_the_usual_ones_are(
    kind: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (kind(**one) == kind(**other)) == (Usual(**one) == Usual(**other))
    assert kind(**one) != Usual(**one)


@COSTING_LITTLE
@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Quick)])
def test_no_field_of_a_record_can_be_set_or_deleted(kind: Any, name: str) -> None:
    made = kind(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(made, name)


@COSTING_LITTLE
def test_a_record_without_a_hash_or_with_one_is_as_the_usual_one(kind: Any) -> None:
    """One with a list in it cannot be hashed; its message is the list's."""
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        hash(kind(1))


@COSTING_LITTLE
def test_the_defaults_that_are_made_anew_are_not_shared(kind: Any) -> None:
    assert kind(1).many is not kind(1).many
    assert kind(1).own is not kind(1).own


@COSTING_LITTLE
def test_the_signature_stays(kind: Any) -> None:
    assert str(inspect.signature(kind)) == str(inspect.signature(Usual))
    assert inspect.get_annotations(kind.__init__) == inspect.get_annotations(Usual.__init__)
    assert typing.get_type_hints(kind.__init__) == typing.get_type_hints(Usual.__init__)
    assert kind.__match_args__ == Usual.__match_args__


@pytest.mark.parametrize(
    ("positional", "named"),
    [((), {}), ((1, "a", [], 4, 5), {}), ((1,), {"unknown": 1}), ((1,), {"first": 2})],
)
@COSTING_LITTLE
def test_wrong_arguments_are_refused(kind: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(*positional, **named)


@COSTING_LITTLE
def test_a_subclass_is_made_in_the_usual_way(kind: Any) -> None:
    @dataclass(frozen=True)
    class More(kind):  # type: ignore[misc]  # one of three classes
        extra: int = 0

    class Same(kind):  # type: ignore[misc]  # the same
        """Without fields of its own."""

    assert (More(1, extra=2).extra, More(1).first, Same(3).doubled) == (2, 1, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Same(3).first = 4
    assert (Same(3).many, Same(3).own, More(1, many=[2]).many) == ([], [], [2])


def test_what_makes_the_objects_of_a_subclass_is_written_once() -> None:
    """Not for each of them: writing takes a hundred times longer than making one."""
    seen: list[object] = []

    class Below(QuickLater):
        """Says by which code it is made."""

        def __post_init__(self) -> None:
            super().__post_init__()
            seen.append(cast(Any, inspect.currentframe()).f_back.f_code)

    assert Below(1) == Below(1)
    assert seen[0] is seen[1]


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


# --- methods that are written when they are used -----------------------------------------------------------


def test_a_method_is_written_when_somebody_first_asks_for_it() -> None:
    """Defining a class compiles nothing; that is what keeps imports short."""

    @records.dataclass(frozen=True, slots=True)
    class Point:
        """Two numbers."""

        x: int
        y: int = 0

    def written() -> set[str]:
        return {
            name for name in ("__init__", "__repr__", "__eq__", "__hash__") if callable(vars(Point)[name])
        }

    assert written() == set()
    one = Point(1)
    assert written() == {"__init__"}
    assert one == Point(1, 0)
    assert written() == {"__init__", "__eq__"}
    assert {one: "found"}[Point(1)] == "found"
    assert repr(one).endswith("Point(x=1, y=0)")
    assert written() == {"__init__", "__eq__", "__hash__", "__repr__"}


def test_threads_that_ask_at_the_same_time_get_the_same_answers() -> None:
    for _ in range(20):

        @records.dataclass(frozen=True, slots=True)
        class Point:
            """Two numbers."""

            x: int
            y: int = 0

        with ThreadPoolExecutor(8) as pool:
            made = set(pool.map(Point, range(8)))
        assert made == {Point(each) for each in range(8)}


def both(**options: Any) -> Any:
    """Run a test with the standard library's decorator and with ours: what holds for one, holds for both."""
    return pytest.mark.parametrize(
        "define", [dataclass(**options), records.dataclass(**options)], ids=["usual", "ours"]
    )


@both(frozen=True)
def test_an_object_below_a_frozen_record_can_have_more_attributes(define: Any) -> None:
    @define
    class Above:
        """One field."""

        first: int

    class Below(Above):
        """More than fields."""

    one = Below(1)
    one.note = "not a field"
    assert one.note == "not a field"
    del one.note
    assert not hasattr(one, "note")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
        one.first = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
        del one.first


@both()
def test_an_unfrozen_record_can_be_changed_and_not_hashed(define: Any) -> None:
    @define
    class Loose:
        """Without slots."""

        first: int
        counted: int = field(default=3, init=False)
        many: list[int] = field(default_factory=list)

    one = Loose(1)
    one.first, one.extra = 2, "anything"
    assert one == Loose(2)
    assert one != Loose(1)
    assert Loose.counted == one.counted == 3
    assert "counted" not in vars(one)
    with pytest.raises(TypeError, match="unhashable type: 'Loose'"):
        hash(one)


@both(eq=False)
def test_a_record_without_equality_is_only_itself(define: Any) -> None:
    @define
    class Alone:
        """Equal to nothing else."""

        first: int

    one = Alone(1)
    assert one == one
    assert one != Alone(1)
    assert {one: 1}[one] == 1


@both(frozen=True, slots=True, kw_only=True)
def test_a_record_may_take_its_fields_by_name_only(define: Any) -> None:
    @define
    class Named:
        """By name."""

        second: int = 2
        first: int

    assert repr(Named(first=1)).endswith("Named(second=2, first=1)")
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        Named(1)


@both(frozen=True)
def test_methods_of_ones_own_are_kept(define: Any) -> None:
    @define
    class Own:
        """With methods of its own."""

        first: int = 1

        def __init__(self) -> None:
            object.__setattr__(self, "first", 5)

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 9

    assert (Own().first, repr(Own()), Own() == 3, hash(Own())) == (5, "mine", True, 9)


@both(frozen=True, slots=True)
def test_equality_of_ones_own_leaves_the_hash_to_the_fields(define: Any) -> None:
    @define
    class Close:  # noqa: PLW1641  # it is the decorator that gives it one
        """Equal when close."""

        first: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Close) and abs(self.first - other.first) < 2

    assert Close(1) == Close(2)
    assert hash(Close(1)) == hash(Close(1)) != hash(Close(2))


@both(frozen=True, slots=True)
def test_the_hash_is_of_the_fields_that_are_compared_or_say_so(define: Any) -> None:
    @define
    class Seen:
        """Three kinds of fields."""

        first: int
        note: list[str] = field(default_factory=list, compare=False)
        unhashed: list[str] = field(default_factory=list, hash=False)
        only_hashed: int = field(default=0, compare=False, hash=True)

    assert hash(Seen(1, ["a"], ["b"])) == hash(Seen(1, ["c"], ["d"]))
    assert hash(Seen(1)) != hash(Seen(2))
    assert hash(Seen(1)) != hash(Seen(1, only_hashed=5))


@both(frozen=True)
def test_a_frozen_record_cannot_set_attributes_in_its_own_way(define: Any) -> None:
    with pytest.raises(TypeError, match="__setattr__"):

        @define
        class Own:
            """With a method of its own."""

            first: int

            def __setattr__(self, name: str, value: object) -> None: ...


@both(frozen=True, slots=True)
def test_a_record_without_fields_is_a_record(define: Any) -> None:
    @define
    class Empty:
        """Nothing."""

    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
    assert repr(Empty()).endswith("Empty()")


@both(slots=True)
def test_a_record_that_holds_itself_can_be_shown(define: Any) -> None:
    @define
    class Ring:
        """Its own next."""

        following: Any = None

    one = Ring()
    one.following = one
    assert repr(one).endswith("Ring(following=...)")


@both(frozen=True)
def test_a_record_below_another_one_has_the_fields_of_both(define: Any) -> None:
    @define
    class Above:
        """One field."""

        first: int

    @define
    class Below(Above):
        """Another."""

        second: int = 2

    assert repr(Below(1)).endswith("Below(first=1, second=2)")
    assert Below(1) == Below(1, 2)
    assert Below(1) != Above(1)


@both(order=True)
def test_an_option_that_is_rare_does_what_it_does(define: Any) -> None:
    @define
    class Ordered:
        """With an order."""

        first: int
        doubled: dataclasses.InitVar[int] = 0

    assert Ordered(1) < Ordered(2)


@both()
def test_an_argument_that_is_no_field_reaches_the_end_of_the_making(define: Any) -> None:
    @define
    class Made:
        """From more than it keeps."""

        total: int
        more: dataclasses.InitVar[int] = 0

        def __post_init__(self, more: int) -> None:
            self.total += more

    assert Made(1, 2).total == 3


@both()
def test_a_record_without_a_docstring_is_described_by_its_signature(define: Any) -> None:
    @define
    class Undocumented:
        first: int = 3

    assert Undocumented.__doc__ == "Undocumented(first: 'int' = 3)"


def test_a_field_cannot_have_a_name_that_the_making_needs() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Odd:
        """With an odd field."""

        _record_set: int

    with pytest.raises(TypeError, match=r"a field of .*Odd cannot be called _record_set"):
        Odd(1)


def test_the_methods_of_every_record_in_the_package_can_be_written() -> None:
    """What is wrong with a class shows when its methods are written, so all of them are written here."""
    for module in pkgutil.walk_packages(treenail.__path__, "treenail."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = [each for each in _below(object) if str(each.__module__).startswith("treenail.")]
    found = [each for each in kinds if "__dataclass_fields__" in vars(each)]
    for kind in found:
        assert "self" in inspect.signature(cast(Any, kind).__init__).parameters
        assert all(hasattr(kind, name) for name in ("__repr__", "__eq__", "__hash__"))
    assert len(found) > 300


def _below(kind: type) -> set[type]:
    direct = set(type.__subclasses__(kind))
    return direct.union(*(_below(each) for each in direct if each is not type))

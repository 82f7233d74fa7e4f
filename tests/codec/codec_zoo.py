"""The values that the codec's tests are afraid of: types, strategies, and what "the same" means."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum, auto
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NewType, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, RootModel, computed_field
from pydantic import dataclasses as pydantic_dataclasses
from pydantic_core import TzInfo

from treenail.codec import FrozenDict

law = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How often each law is tried; the strategies are wide, and many laws share them."""

T = TypeVar("T")
K = TypeVar("K")


# --- what "the same" means -------------------------------------------------------------------------


def same(left: Any, right: Any) -> bool:
    """Say whether two values are alike in every type, every bit and every order, all the way down."""
    if type(left) is not type(right):
        return False
    kind = type(left)
    if isinstance(left, (Enum, type)):
        return left is right
    if kind is float:
        return (math.isnan(left) and math.isnan(right)) or left.hex() == right.hex()
    if kind is Decimal:
        return left.as_tuple() == right.as_tuple()
    if kind in (datetime, time):
        return (
            left.replace(tzinfo=None) == right.replace(tzinfo=None)
            and left.fold == right.fold
            and same_zone(left.tzinfo, right.tzinfo)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (dict, types.MappingProxyType)):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)):
        rest = list(right)
        for each in left:
            twin = next((index for index, other in enumerate(rest) if same(each, other)), None)
            if twin is None:
                return False
            del rest[twin]
        return not rest
    if isinstance(left, BaseModel):
        parts = ("__dict__", "__pydantic_extra__", "__pydantic_private__", "__pydantic_fields_set__")
        return all(same(getattr(left, part), getattr(right, part)) for part in parts)
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, each.name, ...), getattr(right, each.name, ...))
            for each in dataclasses.fields(left)
        )
    return bool(left == right)


def same_zone(left: tzinfo | None, right: tzinfo | None) -> bool:
    if left is None or right is None or isinstance(left, ZoneInfo):
        return left is right
    return type(left) is type(right) and left == right and left.tzname(None) == right.tzname(None)


# --- types -----------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1
    GREEN = "green"
    ALSO_RED = 1  # noqa: PIE796  # an alias of the first
    MIXED = ("a", 2)


class Word(StrEnum):
    YES = "yes"
    NO = "no"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Rights(Flag):
    READ = auto()
    WRITE = auto()
    RUN = auto()


class Bits(IntFlag):
    ONE = 1
    TWO = 2


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclass(frozen=True)
class Cat:
    name: str


@dataclass(frozen=True)
class Dog:
    name: str


@dataclass(frozen=True)
class Puppy(Dog):
    weeks: int = 0


@dataclass
class Node:
    value: Any
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None


@dataclass(frozen=True, slots=True)
class Slotted:
    x: int
    y: tuple[Slotted, ...] = ()


@dataclass(slots=True)
class SlottedChild:
    z: str = "z"


@dataclass(frozen=True)
class Box(Generic[T]):
    item: T


@dataclass(frozen=True)
class Shelf(Generic[K, T]):
    boxes: tuple[Box[T], ...]
    nested: Box[list[T]]
    by_key: dict[K, Box[T]]


UserId = NewType("UserId", str)


@dataclass
class Everything:
    """Every kind of annotation, each of which may hold a value that it did not announce."""

    any: Any = None
    text: str = ""
    whole: int = 0
    number: float = 0.0
    truth: bool = False
    nothing: None = None
    data: bytes = b""
    uuid: UUID | None = None
    moment: datetime | None = None
    day: date | None = None
    clock: time | None = None
    span: timedelta | None = None
    exact: Decimal | None = None
    path: Path | None = None
    posix: PurePosixPath | None = None
    windows: PureWindowsPath | None = None
    colour: Colour | None = None
    word: Word | None = None
    level: Level | None = None
    rights: Rights | None = None
    literal: Literal["a", 1, True, None, Word.YES, b"x"] = "a"
    pair: Pair | None = None
    pet: Cat | Dog | None = None
    dog: Dog | None = None
    node: Node | None = None
    box: Box[int] | None = None
    shelf: Shelf[tuple[int, str], date] | None = None
    scalars: str | int | float | bool | None = None
    containers: list[int] | dict[str, int] | tuple[str, ...] | None = None
    json: JsonValue = None
    names: list[str] = field(default_factory=list)
    triple: tuple[int, str, Colour] | None = None
    empty: tuple[()] = ()
    days: tuple[date, ...] = ()
    grid: list[list[float]] = field(default_factory=list)
    tags: frozenset[str] = frozenset()
    mixed: set[int | str] = field(default_factory=set)
    by_name: dict[str, date] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    by_pair: dict[tuple[int, str], Cat | Dog] = field(default_factory=dict)
    plain_dict: dict = field(default_factory=dict)  # type: ignore[type-arg]  # bare, as people write it
    plain_list: list = field(default_factory=list)  # type: ignore[type-arg]  # bare, as people write it
    mapping: Mapping[str, int] = field(default_factory=dict)
    frozen: FrozenDict[str, object] = field(default_factory=FrozenDict)
    frozen_days: FrozenDict[str, date] = field(default_factory=FrozenDict)
    frozen_pairs: FrozenDict[tuple[int, str], Cat | Dog] = field(default_factory=FrozenDict)
    sequence: Sequence[int] = ()
    annotated: Annotated[int | None, "units"] = None
    user: UserId = UserId("")
    model: Model | None = None
    maker: type[Any] | None = None
    counter: ClassVar[int] = 0


@dataclass
class Made:
    """A dataclass whose constructor takes what it does not keep, and keeps what it does not take."""

    first: int
    given: InitVar[int]
    _: KW_ONLY
    second: str = "s"
    derived: int = field(init=False)

    def __post_init__(self, given: int) -> None:
        self.derived = self.first + given


class Address(BaseModel):
    model_config = ConfigDict(frozen=True)

    street: str
    number: int | None = None


class Model(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)

    name: str = Field(alias="fullName", default="")
    addresses: list[Address] = []
    pet: Cat | Dog | None = None
    _secret: int = PrivateAttr(default=7)
    _unset: str = PrivateAttr()

    @computed_field  # type: ignore[prop-decorator]  # how pydantic wants it
    @property
    def shout(self) -> str:
        return self.name.upper()


class Numbers(RootModel[list[int]]):
    pass


class Crate(BaseModel, Generic[T]):
    content: T


@pydantic_dataclasses.dataclass
class Checked:
    amount: int
    labels: list[str] = Field(default_factory=list)


# --- strategies ------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", "$", "\x00", "\ud800", "\udfff x", "\ud83d\ude00", "\U0001f600", '"\\/\n', '{"$":1}', "v", "t"]
)
# JSON's escapes would join both halves of a surrogate pair; as the key of an object that is refused.
names = texts.filter(lambda text: not re.search("[\ud800-\udbff][\udc00-\udfff]", text))
integers = st.integers() | st.sampled_from(
    [0, 1, -1, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**64), 10**4000, -(10**4000)]
)
floats = st.floats() | st.sampled_from([0.0, -0.0, 1.0, 1e16, 5e-324, math.inf, -math.inf, math.nan])
zones = st.sampled_from(
    [
        None,
        UTC,
        timezone(timedelta(hours=5, minutes=30)),
        timezone(timedelta(hours=-3, seconds=7, microseconds=5)),
        timezone(timedelta(hours=1), "CET"),
        timezone(timedelta(0), "Zulu"),
        TzInfo(5400),
        TzInfo(0),
        ZoneInfo("Europe/Berlin"),
        ZoneInfo("UTC"),
    ]
)
moments = st.builds(
    lambda moment, zone, fold: moment.replace(tzinfo=zone, fold=fold),
    st.datetimes(),
    zones,
    st.sampled_from([0, 1]),
)
clocks = st.builds(
    lambda moment, zone, fold: moment.replace(tzinfo=zone, fold=fold),
    st.times(),
    zones,
    st.sampled_from([0, 1]),
)
decimals = st.decimals() | st.sampled_from(
    [Decimal(each) for each in ("NaN", "sNaN", "-sNaN123", "Infinity", "-0", "1E+5", "1.00", "0E-10")]
)
paths = st.sampled_from(
    [
        Path(),
        Path("/a/b"),
        Path("//x"),
        Path("a\x00b"),
        Path("a\udc80"),
        PurePosixPath("../up"),
        PurePosixPath("\ud83d\ude00"),
        PureWindowsPath("C:/x"),
        PureWindowsPath("//host/share/x"),
    ]
)
enums = st.sampled_from(
    [*Colour, *Word, *Level, Rights(0), Rights.READ, Rights.READ | Rights.RUN, ~Rights.READ, Bits(3), Bits(8)]
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    floats,
    texts,
    st.binary(max_size=8),
    st.uuids(),
    moments,
    st.dates(),
    clocks,
    st.timedeltas(),
    decimals,
    paths,
    enums,
    st.sampled_from([int, str, Cat, Word, type(None)]),
)


def _can_be_hashed(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


keys = st.recursive(
    leaves.filter(_can_be_hashed).filter(lambda leaf: type(leaf) is not str) | names,
    lambda inner: (
        st.lists(inner, max_size=2).map(tuple)
        | st.frozensets(inner, max_size=2)
        | st.builds(Box, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=3,
)


def _extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(names, inner, max_size=3),
        st.dictionaries(names, inner, max_size=2).map(types.MappingProxyType),
        st.dictionaries(keys, inner, max_size=2).map(FrozenDict),
        st.builds(Box, inner),
        st.builds(Pair, inner, inner),
        st.builds(Node, inner, st.lists(st.builds(Node, inner), max_size=2)),
        st.builds(Slotted, inner, inner),
        st.builds(SlottedChild, inner),
        st.builds(Puppy, inner, inner),
        st.builds(lambda content: Crate[int].model_construct(content=content), inner),
        st.builds(Crate, content=inner),
        st.builds(lambda **given: Model.model_construct(None, **given), addresses=inner, another=inner),
        st.builds(Numbers.model_construct, inner),
    )


values = st.recursive(leaves, _extend, max_leaves=8)

pets = st.builds(Cat, texts) | st.builds(Dog, texts) | st.builds(Puppy, texts, integers)
fitting: dict[str, st.SearchStrategy[Any]] = {
    "text": texts,
    "whole": integers,
    "number": floats | integers,
    "truth": st.booleans(),
    "data": st.binary(max_size=20),
    "uuid": st.uuids(),
    "moment": moments,
    "day": st.dates(),
    "clock": clocks,
    "span": st.timedeltas(),
    "exact": decimals,
    "path": paths,
    "colour": st.sampled_from(Colour),
    "word": st.sampled_from(Word),
    "level": st.sampled_from(Level),
    "rights": st.sampled_from(Rights) | st.just(Rights.READ | Rights.WRITE),
    "literal": st.sampled_from(["a", 1, True, None, Word.YES, b"x"]),
    "pair": st.builds(Pair, leaves, leaves),
    "pet": pets,
    "dog": pets,
    "node": st.builds(Node, leaves, st.lists(st.builds(Node, leaves), max_size=2)),
    "box": st.builds(Box, integers),
    "shelf": st.builds(
        Shelf,
        st.lists(st.builds(Box, st.dates()), max_size=2).map(tuple),
        st.builds(Box, st.lists(st.dates(), max_size=2)),
        st.dictionaries(st.tuples(integers, texts), st.builds(Box, st.dates()), max_size=2),
    ),
    "scalars": texts | integers | floats | st.booleans(),
    "containers": st.lists(integers, max_size=2)
    | st.dictionaries(names, integers, max_size=2)
    | st.lists(texts, max_size=2).map(tuple),
    "json": st.recursive(
        texts | integers | floats | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
        max_leaves=4,
    ),
    "names": st.lists(texts, max_size=3),
    "triple": st.tuples(integers, texts, st.sampled_from(Colour)),
    "days": st.lists(st.dates(), max_size=3).map(tuple),
    "grid": st.lists(st.lists(floats, max_size=2), max_size=2),
    "tags": st.frozensets(texts, max_size=3),
    "mixed": st.sets(integers | texts, max_size=3),
    "by_name": st.dictionaries(names, st.dates(), max_size=3),
    "counts": st.dictionaries(names, integers, min_size=1, max_size=3),
    "by_pair": st.dictionaries(st.tuples(integers, texts), pets, max_size=2),
    "plain_dict": st.dictionaries(keys, leaves, max_size=2),
    "mapping": st.dictionaries(names, integers, max_size=2).map(types.MappingProxyType),
    "frozen": st.dictionaries(names, leaves | st.lists(integers, max_size=2), max_size=3).map(FrozenDict),
    "frozen_days": st.dictionaries(names, st.dates(), max_size=3).map(FrozenDict),
    "frozen_pairs": st.dictionaries(st.tuples(integers, texts), pets, max_size=2).map(FrozenDict),
    "sequence": st.lists(integers, max_size=2) | texts,
    "annotated": integers,
    "user": texts.map(UserId),
    "model": st.builds(Model, name=texts.filter(lambda each: each.isascii()), pet=pets, more=leaves),
    "maker": st.sampled_from([int, Cat, Colour]),
}


@st.composite
def _some_fields(draw: st.DrawFn) -> Everything:
    names = draw(st.lists(st.sampled_from(sorted(fitting)), max_size=4, unique=True))
    return Everything(**{name: draw(fitting[name]) for name in names})


everything = _some_fields()
field_names = st.sampled_from([each.name for each in dataclasses.fields(Everything)])
unannounced = st.builds(lambda name, value: Everything(**{name: value}), field_names, values)

json_data = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names, inner, max_size=4)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        "str",
                        "utf8",
                        "int",
                        "bool",
                        "NoneType",
                        "float",
                        "bytes",
                        "uuid",
                        "datetime",
                        "date",
                        "time",
                        "timedelta",
                        "decimal",
                        "path",
                        "posixpath",
                        "windowspath",
                        "list",
                        "tuple",
                        "set",
                        "frozenset",
                        "dict",
                        "mappingproxy",
                        "frozendict",
                        "class",
                        "enum",
                        "namedtuple",
                        "obj",
                        "nonsense",
                    ]
                )
                | inner,
                "v": inner,
            },
            optional={
                "t": inner
                | st.sampled_from(
                    [
                        f"codec_zoo:{each}"
                        for each in (
                            "Everything",
                            "Made",
                            "Node",
                            "Pair",
                            "Colour",
                            "Rights",
                            "Model",
                            "Numbers",
                            "Slotted",
                            "Checked",
                            "Address",
                            "NoSuchType",
                        )
                    ]
                    + ["builtins:int", "os:system", "antigravity:fly"]
                ),
                "fold": inner,
                "zone": inner | st.sampled_from(["UTC", "Mars/Base", "../../etc/passwd", "this", ""]),
                "name": inner,
            },
        )
    ),
    max_leaves=12,
)

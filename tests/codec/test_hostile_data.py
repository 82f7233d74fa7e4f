"""Whatever is fed to the decoder loads or is refused with our error, and nothing of it is run."""

from __future__ import annotations

import copy
import json
import sys
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Any, NamedTuple

import codec_zoo
import pytest
from codec_zoo import Everything, Model, Node, Slotted, everything, json_data, law, texts, values
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator, model_validator

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.errors import CodecError, DecodeError, UnknownTypeError

zoneinfo.available_timezones()  # Imports what the standard library needs to list its own zones.
CODEC = Codec(TypeRegistry())
for each in vars(codec_zoo).values():
    if isinstance(each, type) and each.__module__ == "codec_zoo":
        CODEC.registry.register(each)
RECORDS = [Everything, Model, Node, Slotted, codec_zoo.Made, codec_zoo.Numbers, codec_zoo.Checked]


def loads_or_is_refused(decode: Any, *arguments: Any) -> bool:
    """Say whether it loaded; any other exception than ours goes through and fails the test."""
    before = set(sys.modules)
    try:
        decode(*arguments)
    except CodecError:
        loaded = False
    else:
        loaded = True
    assert set(sys.modules) == before
    return loaded


@law
@given(json_data)
def test_arbitrary_json_loads_or_is_refused(data: Any) -> None:
    """Any JSON at all, tagged or not, gives a value or a CodecError, and imports nothing."""
    loads_or_is_refused(CODEC.from_data, data)
    loads_or_is_refused(CODEC.from_data, {"$": "obj", "t": "codec_zoo:Everything", "v": data})
    for record in RECORDS:
        loads_or_is_refused(CODEC.record_from_data, record, data)
        loads_or_is_refused(CODEC.decode, record, json.dumps(data))


@law
@given(st.dictionaries(codec_zoo.field_names, json_data, max_size=3))
def test_arbitrary_json_in_a_field_loads_or_is_refused(data: dict[str, Any]) -> None:
    """So does any JSON in the place of a field of any annotation."""
    loads_or_is_refused(CODEC.record_from_data, Everything, data)


@law
@given(st.binary(max_size=40) | texts | st.text('{}[]",:$v0123456789.eE-tfnul \\', max_size=30))
def test_arbitrary_bytes_load_or_are_refused(payload: bytes | str) -> None:
    """So does any byte string, JSON or not, UTF-8 or not."""
    loads_or_is_refused(parse_json, payload)
    loads_or_is_refused(CODEC.decode, Everything, payload)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Return every container in a piece of JSON with every key in it."""
    if isinstance(data, dict | list):
        for key, inner in list(data.items() if isinstance(data, dict) else enumerate(data)):
            yield data, key
            yield from places(inner)


@law
@given(everything | values.map(lambda value: Everything(any=value)), json_data, st.data())
def test_mutated_json_loads_or_is_refused(value: Everything, other: Any, data: st.DataObject) -> None:
    """A stored value in which one place was changed, removed or renamed loads or is refused."""
    stored = parse_json(CODEC.encode(value))
    container, key = data.draw(st.sampled_from(list(places(stored))))
    change = data.draw(st.sampled_from(["replace", "remove", "rename", "repeat"]))
    if change == "replace":
        container[key] = other
    elif change == "remove":
        del container[key]
    elif change == "rename" and isinstance(container, dict):
        container[data.draw(texts)] = container.pop(key)
    elif isinstance(container, list):
        container.insert(0, copy.deepcopy(container[key]))
    loads_or_is_refused(CODEC.record_from_data, Everything, stored)


@law
@given(everything, st.data())
def test_mutated_bytes_load_or_are_refused(value: Everything, data: st.DataObject) -> None:
    """A payload with a flipped byte, or cut short, loads or is refused."""
    payload = bytearray(CODEC.encode(value))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    loads_or_is_refused(CODEC.decode, Everything, bytes(payload))
    loads_or_is_refused(CODEC.decode, Everything, bytes(payload[: data.draw(st.integers(0, len(payload)))]))


class Ran(BaseException):
    """Raised by code that must not run; no handler of ordinary errors can hide it."""


@dataclass
class Trapped:
    x: int
    y: list[int] = field(default_factory=list)

    def __new__(cls, *_: object) -> Trapped:
        raise Ran

    def __init__(self, *_: object) -> None:
        raise Ran

    def __post_init__(self) -> None:
        raise Ran

    def __setattr__(self, name: str, value: object) -> None:
        raise Ran


class TrappedModel(BaseModel):
    x: int
    _hidden: int = 0

    def __init__(self, **_: object) -> None:
        raise Ran

    def model_post_init(self, context: object) -> None:
        raise Ran

    @field_validator("x")
    @classmethod
    def check(cls, value: int) -> int:
        raise Ran

    @model_validator(mode="after")
    def check_all(self) -> TrappedModel:
        raise Ran

    def __setattr__(self, name: str, value: object) -> None:
        raise Ran


class TrappedPair(NamedTuple("Pair", [("x", int)])):
    def __new__(cls, *_: object) -> TrappedPair:
        raise Ran


class TrappedFlag(Flag):
    ONE = auto()
    TWO = auto()

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise Ran


@pytest.fixture
def trapped() -> Codec:
    codec = Codec(TypeRegistry())
    for cls in (Trapped, TrappedModel, TrappedPair, TrappedFlag):
        codec.registry.register(cls, name=cls.__name__)
    return codec


@pytest.mark.parametrize(
    "data",
    [
        {"$": "obj", "t": "Trapped", "v": {"x": 1, "y": [2]}},
        {"$": "obj", "t": "Trapped", "v": {"x": "not a number"}},
        {"$": "obj", "t": "TrappedModel", "v": {"x": 1, "$private": [["_hidden", 3]]}},
        {"$": "obj", "t": "TrappedModel", "v": {"x": None}},
        {"$": "namedtuple", "t": "TrappedPair", "v": {"x": 1}},
        {"$": "enum", "t": "TrappedFlag", "v": 3},
        {"$": "enum", "t": "TrappedFlag", "v": 1024},
    ],
)
def test_loading_runs_no_code_of_the_type(trapped: Codec, data: Any) -> None:
    """No constructor, `__post_init__`, `__setattr__`, validator or enum hook is called."""
    loads_or_is_refused(trapped.from_data, data)


def test_objects_are_put_together_from_their_fields(trapped: Codec) -> None:
    """What loads without its constructor has its fields all the same."""
    made: Any = trapped.from_data({"$": "obj", "t": "Trapped", "v": {"x": 1, "y": [2]}})
    assert (type(made), made.x, made.y) == (Trapped, 1, [2])
    model: Any = trapped.from_data(
        {"$": "obj", "t": "TrappedModel", "v": {"x": 1, "$private": [["_hidden", 3]]}}
    )
    assert (type(model), model.x, model._hidden) == (TrappedModel, 1, 3)
    pair: Any = trapped.from_data({"$": "namedtuple", "t": "TrappedPair", "v": {"x": 1}})
    assert (type(pair), tuple(pair)) == (TrappedPair, (1,))
    assert trapped.from_data({"$": "enum", "t": "TrappedFlag", "v": 3}) is TrappedFlag.ONE | TrappedFlag.TWO


def test_an_unknown_type_is_named_and_not_imported() -> None:
    """A stored name that is not registered is reported with its path; its module stays unloaded."""
    with pytest.raises(UnknownTypeError, match="antigravity:fly") as caught:
        CODEC.from_data([{"a": {"$": "obj", "t": "antigravity:fly", "v": {}}}], root="snapshot")
    assert caught.value.path == "snapshot[0]['a']"
    assert caught.value.type_name == "antigravity:fly"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "zone", ["../../etc/passwd", "/etc/localtime", "this/s", "Europe", "zone.tab", "\x00", "."]
)
def test_a_time_zone_is_only_looked_up_among_time_zones(zone: str) -> None:
    """A stored zone name opens no other file and imports no package."""
    data = {"$": "datetime", "v": "2026-01-01T00:00:00", "zone": zone}
    assert not loads_or_is_refused(CODEC.from_data, data)


def test_a_time_zone_names_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone that this machine does not have is not looked for by importing a package of its name."""
    package = tmp_path / "tzdata" / "zoneinfo" / "Mars"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "tzdata" / "zones").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [each for each in sys.modules if each.split(".")[0] == "tzdata"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DecodeError, match="install tzdata"):
        CODEC.from_data({"$": "datetime", "v": "2026-01-01T00:00:00", "zone": "Mars/Olympus"})
    imported = [each for each in sys.modules if each.startswith("tzdata.zoneinfo")]
    for name in [each for each in sys.modules if each.split(".")[0] == "tzdata"]:
        del sys.modules[name]
    assert imported == []


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"text": 1}, "Everything.text"),
        ({"names": ["a", 2]}, "Everything.names[1]"),
        ({"by_name": {"k": "2026-01-01", "l": "never"}}, "Everything.by_name['l']"),
        ({"triple": [1, "a", "BLUE"]}, "Everything.triple[2]"),
        ({"grid": [[1.0], [2.0, None]]}, "Everything.grid[1][1]"),
        ({"node": {"value": 1, "children": [{"value": 2}, {}]}}, "Everything.node.children[1].value"),
        ({"by_pair": [[[1, "a"], {"$": "what"}]]}, "Everything.by_pair[0]"),
        ({"pet": {"$": "obj", "t": "codec_zoo:Cat", "v": {"name": 3}}}, "Everything.pet.name"),
        ({"any": {"$": "tuple", "v": [1, {"$": "uuid", "v": "x"}]}}, "Everything.any[1]"),
        (
            {"any": {"$": "namedtuple", "t": "codec_zoo:Pair", "v": {"left": {"$": "int", "v": "1"}}}},
            "Everything.any.left",
        ),
        ({"model": {"addresses": [{"street": 1}]}}, "Everything.model.addresses[0].street"),
    ],
)
def test_a_refusal_names_the_path(data: Any, path: str) -> None:
    """The error leads from the outside in to the place that does not fit."""
    with pytest.raises(DecodeError) as caught:
        CODEC.record_from_data(Everything, data)
    assert caught.value.path == path


def test_a_payload_cannot_turn_into_another_type() -> None:
    """Asked for one class, decoding never returns a value of another that the payload names."""
    for payload in ('{"$":"int","v":1}', '{"$":"obj","t":"codec_zoo:Cat","v":{"name":"x"}}'):
        with pytest.raises(DecodeError):
            CODEC.decode(codec_zoo.Dog, payload)
    inner = {"$": "obj", "t": "codec_zoo:Cat", "v": {"name": "x"}}
    with pytest.raises(DecodeError):
        CODEC.from_data({"$": "obj", "t": "codec_zoo:Dog", "v": inner})


def test_a_class_that_is_no_record_is_refused_as_data() -> None:
    """A stored name that leads to an enum or another class is bad data, not a crash."""
    with pytest.raises(DecodeError):
        CODEC.decode(codec_zoo.Colour, "{}")
    with pytest.raises(DecodeError):
        CODEC.from_data({"$": "enum", "t": "codec_zoo:Cat", "v": "RED"})


@dataclass(frozen=True)
class Touchy:
    x: int

    def __hash__(self) -> int:
        raise RuntimeError("not today")


@pytest.mark.parametrize("tag", ["set", "frozenset", "dict"])
def test_a_failing_hash_is_bad_data(tag: str) -> None:
    """A type whose own `__hash__` raises something odd makes the data bad, not the loading crash."""
    CODEC.registry.register(Touchy)
    item = {"$": "obj", "t": f"{Touchy.__module__}:Touchy", "v": {"x": 1}}
    with pytest.raises(DecodeError):
        CODEC.from_data({"$": tag, "v": [[item, 1]] if tag == "dict" else [item]})


@dataclass
class Unlucky:
    x: int = field(default_factory=lambda: 1 // 0)


def test_a_failing_default_is_bad_data() -> None:
    """A default factory that raises is reported with the field that lacks its value."""
    with pytest.raises(DecodeError, match="ZeroDivisionError") as caught:
        CODEC.decode(Unlucky, "{}")
    assert caught.value.path == "Unlucky.x"

"""Stored data names types, and the registry says which of these names mean something here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from codec_zoo import Box, Cat, Dog, same

from treenail.codec import Codec, TypeRegistry, register_type, type_registry
from treenail.errors import DecodeError, UnknownTypeError, UsageError


@pytest.fixture
def registry() -> TypeRegistry:
    return TypeRegistry()


def twin_of(name: str) -> type:
    """Return a new class of that name, as a reloaded module has one."""

    @dataclass
    class Twin:
        x: int = 0

    Twin.__name__ = Twin.__qualname__ = name
    return Twin


def test_a_type_is_known_by_module_and_name(registry: TypeRegistry) -> None:
    """Asking for a type's name registers it under that name."""
    assert not registry.knows("codec_zoo:Cat")
    assert registry.name_of(Cat) == "codec_zoo:Cat"
    assert registry.resolve("codec_zoo:Cat") is Cat
    assert registry.types() == (Cat,)


def test_an_unknown_name_says_what_to_do(registry: TypeRegistry) -> None:
    """The error names the type and how to make it known."""
    with pytest.raises(UnknownTypeError, match=r"'app:Gone'.*register"):
        registry.resolve("app:Gone")


def test_a_given_name_outlives_a_rename(registry: TypeRegistry) -> None:
    """What was stored under an old name loads as the type that has it as an alias."""
    codec = Codec(registry)
    old = codec.to_data(Cat("Tom"))
    renamed = Codec(TypeRegistry())
    renamed.registry.register(Dog, name="pets.dog", aliases=["codec_zoo:Cat", "older:Cat"])
    assert renamed.from_data(old) == Dog("Tom")
    assert renamed.from_data({**old, "t": "older:Cat"}) == Dog("Tom")
    assert renamed.to_data(Dog("Tom"))["t"] == "pets.dog"


def test_a_rename_keeps_the_former_name_readable(registry: TypeRegistry) -> None:
    """A type that gets a name after it was used under its derived one answers to both."""
    registry.name_of(Cat)
    registry.register(Cat, name="pets.cat")
    assert registry.name_of(Cat) == "pets.cat"
    assert registry.resolve("codec_zoo:Cat") is registry.resolve("pets.cat") is Cat


def test_a_given_name_belongs_to_one_type(registry: TypeRegistry) -> None:
    """Taking a name or alias that somebody gave to another type is an error, and changes nothing."""
    registry.register(Cat, name="pet", aliases=["animal"])
    for name in ("pet", "animal", "codec_zoo:Dog"):
        registry.register(Box, name="box")
        if name == "codec_zoo:Dog":
            registry.register(Dog)
        with pytest.raises(UsageError, match="already belongs"):
            registry.register(Box, name=name)
        with pytest.raises(UsageError, match="already belongs"):
            registry.register(Box, aliases=[name])
    assert registry.resolve("pet") is registry.resolve("animal") is Cat
    assert registry.name_of(Box) == "box"


def test_an_alias_is_not_taken_by_a_derived_name(registry: TypeRegistry) -> None:
    """An alias was given on purpose; a type whose derived name is the same does not get it."""
    registry.register(Dog, aliases=["codec_zoo:Cat"])
    with pytest.raises(UsageError, match="already belongs"):
        registry.name_of(Cat)
    assert registry.resolve("codec_zoo:Cat") is Dog


def test_a_derived_name_belongs_to_the_newest_type(registry: TypeRegistry) -> None:
    """After a module was reloaded, stored data loads as the new class; the old one does not return."""
    old, new = twin_of("Reloaded"), twin_of("Reloaded")
    registry.register(old)
    name = registry.name_of(new)
    assert registry.resolve(name) is new
    registry.register(old)
    assert registry.name_of(old) == name
    assert registry.resolve(name) is new


def test_a_reloaded_type_may_take_its_own_given_name(registry: TypeRegistry) -> None:
    """A module that registers its type by name can be loaded again."""
    old, new = twin_of("Named"), twin_of("Named")
    registry.register(old, name="n", aliases=["m"])
    registry.register(new, name="n", aliases=["m"])
    assert registry.resolve("n") is registry.resolve("m") is new


class Mood(Enum):
    GOOD = 1


@dataclass
class Deep:
    mood: Mood | str


@dataclass
class Middle:
    deep: list[Deep]


@dataclass
class Top:
    anything: Any
    middle: Middle | None = None


@pytest.mark.parametrize("value", [Mood.GOOD, Deep("x"), [Middle([])]])
def test_types_named_in_fields_are_known(value: object) -> None:
    """Registering a type makes loadable what its fields name, however deep, and in any order."""
    stored = Codec(TypeRegistry()).to_data(value)
    fresh = Codec(TypeRegistry())
    fresh.registry.register(Top)
    assert same(fresh.from_data(stored), value)
    other = Codec(TypeRegistry())
    assert same(other.record_from_data(Top, {"anything": stored}), Top(value))
    with pytest.raises(UnknownTypeError):
        Codec(TypeRegistry()).from_data(stored)


def test_built_in_classes_need_no_registration() -> None:
    """A stored class of the language itself loads anywhere; another must be registered."""
    stored = Codec(TypeRegistry()).to_data([int, dict, type(None), Cat])
    fresh = Codec(TypeRegistry())
    assert fresh.from_data(stored[:3]) == [int, dict, type(None)]
    with pytest.raises(UnknownTypeError):
        fresh.from_data(stored)
    with pytest.raises(DecodeError):
        fresh.from_data({"$": "class", "v": ["int"]})


def test_the_shared_registry() -> None:
    """`register_type` can decorate; sessions without a codec of their own see the type."""

    @dataclass
    class Shared:
        pass

    assert register_type(Shared, name="tests.shared") is Shared
    assert type_registry.resolve("tests.shared") is Shared

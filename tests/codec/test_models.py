"""Pydantic models come back with everything that pydantic keeps beside their fields."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Generic, TypeVar

import codec_zoo
import pytest
from codec_zoo import Address, Box, Cat, Crate, Dog, Model, Numbers, same
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, create_model

from treenail.codec import Codec, TypeRegistry
from treenail.errors import DecodeError, EncodeError

T = TypeVar("T")


@pytest.fixture
def codec() -> Codec:
    return Codec(TypeRegistry())


def there_and_back(codec: Codec, value: Any) -> Any:
    return codec.decode(type(value), codec.encode(value))


def full() -> Model:
    model = Model(fullName="Ann", addresses=[Address(street="a"), Address(street="b", number=2)], more=(1, 2))
    model._secret = 99
    return model


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        full(),
        Model(name="by name"),
        Model(pet=Dog("x"), extra_pet=Cat("y")),
        Address(street="x"),
        Numbers([1, 2]),
        RootModel[dict[str, Cat]]({"a": Cat("b")}),
        Crate[int](content=1),
        Crate[list[Cat]](content=[Cat("a")]),
        Crate(content=("untyped",)),
    ],
)
def test_a_model_comes_back_whole(codec: Codec, model: BaseModel) -> None:
    """Fields, extra fields, private attributes and the set of given fields are as they were."""
    back = there_and_back(codec, model)
    assert same(back, model)
    assert back == model
    assert back.model_dump() == model.model_dump()
    assert back.model_dump(exclude_unset=True) == model.model_dump(exclude_unset=True)
    assert same(codec.from_data(codec.to_data(model)), model)


def test_a_model_may_hold_what_its_validator_never_saw(codec: Codec) -> None:
    """What `model_construct` put into a field comes back as it was."""
    model = Model.model_construct(addresses=("not", "a list"), pet=None)
    assert same(there_and_back(codec, model), model)


def test_fields_are_stored_by_name(codec: Codec) -> None:
    """Aliases and computed fields are pydantic's matter; the stored form has the fields' own names."""
    stored = json.loads(codec.encode(Model(fullName="Ann")))
    assert stored["name"] == "Ann"
    assert "fullName" not in stored
    assert "shout" not in stored
    assert there_and_back(codec, Model(fullName="Ann")).shout == "ANN"


def test_given_fields_are_told_from_defaults_beside_extra_ones(codec: Codec) -> None:
    """One field left to its default and one extra field do not cancel each other out."""
    model = Model(name="a", addresses=[], other=1)
    back = there_and_back(codec, model)
    assert back.model_fields_set == {"name", "addresses", "other"}


def test_new_fields_and_private_attributes_take_defaults(codec: Codec) -> None:
    """A model that grew since loads with its defaults, and says that they were not given."""
    back = codec.decode(Model, '{"name": "a"}')
    assert back.addresses == []
    assert back._secret == 7
    assert back.model_fields_set == {"name"}
    assert codec.decode(Model, "{}").addresses is not back.addresses


class Growing(BaseModel):
    first: int = 1
    second: int = Field(default_factory=lambda data: data["first"] + 1)
    _log: list[str] = PrivateAttr(default_factory=list)


def test_a_default_that_needs_other_fields(codec: Codec) -> None:
    """A default factory that takes the other fields gets them, as from pydantic itself."""
    assert codec.decode(Growing, '{"first": 4}').second == 5
    assert codec.decode(Growing, "{}")._log == []


def test_a_frozen_model_stays_frozen(codec: Codec) -> None:
    """What came back refuses assignment as before."""
    back = there_and_back(codec, Address(street="x"))
    with pytest.raises(ValueError, match="frozen"):
        back.street = "y"


def test_what_came_back_is_a_working_model(codec: Codec) -> None:
    """It can be copied, compared, assigned and validated again."""
    back = there_and_back(codec, full())
    copy = back.model_copy(deep=True)
    assert copy == back
    back.name = "other"
    assert Model.model_validate(back.model_dump(by_alias=True)).name == "other"
    back.yet_another = 1
    assert back.model_extra == {"more": (1, 2), "yet_another": 1}


def test_a_refusal_names_extra_and_private_places(codec: Codec) -> None:
    """What cannot be stored is found beside the fields, too."""
    model = Model(other=object())
    with pytest.raises(EncodeError) as caught:
        codec.encode(Box([model]))
    assert caught.value.path == "Box.item[0].extra['other']"
    model = Model()
    model._secret = object()  # type: ignore[assignment]  # what is wrong is the point
    with pytest.raises(EncodeError) as caught:
        codec.encode(model)
    assert caught.value.path == "Model.private['_secret']"


@pytest.mark.parametrize("rest", [{"$extra": 1}, {"$private": [[1, 2]]}, {"$set": "name"}, {"$set": [1]}])
def test_broken_rests_are_refused(codec: Codec, rest: dict[str, Any]) -> None:
    """What stands beside the fields is checked as they are."""
    with pytest.raises(DecodeError):
        codec.record_from_data(Model, {"name": "a", **rest})


def test_fields_with_odd_names(codec: Codec) -> None:
    """A field may be called as Python's words are; one that looks like a tag is refused."""
    odd = create_model("Odd", **{"class": (int, 1), "not": (str, "x")})  # type: ignore[call-overload]  # names that cannot be written as arguments
    value = odd(**{"class": 2})
    assert same(there_and_back(codec, value), value)


class Part(BaseModel):
    name: str
    parts: list[Part] = []
    made: datetime | None = None


def test_models_may_hold_themselves(codec: Codec) -> None:
    """A recursive model comes back at every level, with the moments that its validator made."""
    part = Part.model_validate_json(
        '{"name": "a", "parts": [{"name": "b", "made": "2026-01-01T00:00:00Z", "parts": [{"name": "c"}]}]}'
    )
    assert same(there_and_back(codec, part), part)


class Boxed(BaseModel, Generic[T]):
    model_config = ConfigDict(frozen=True)

    item: T


def test_generic_models_of_different_types_are_different_types() -> None:
    """The parameter is part of the stable name, with its module."""

    class Cat(BaseModel):  # Another one than codec_zoo's.
        name: str

    registry = TypeRegistry()
    names = {
        registry.name_of(Boxed[Cat]),
        registry.name_of(Boxed[codec_zoo.Cat]),
        registry.name_of(Boxed[int]),
    }
    assert len(names) == 3
    codec = Codec(registry)
    value = [Boxed[Cat](item=Cat(name="a")), Boxed[codec_zoo.Cat](item=codec_zoo.Cat("a"))]
    assert same(codec.from_data(codec.to_data(value)), value)

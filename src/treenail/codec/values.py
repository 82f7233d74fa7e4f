"""Values without an annotation: each is coded by what it is.

What JSON has itself is stored as it is: texts, numbers, null, lists, and dicts whose keys are text. Any
other value is stored as an object that names its type under `$`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Protocol, cast

from treenail.codec.base import TAG, Decode, Encode, Json, at, expect, show, step, why_not
from treenail.codec.immutability import FrozenDict
from treenail.codec.registry import TypeRegistry, is_named_tuple, is_record
from treenail.codec.scalars import DECODE_TAGGED, NATIVE, SCALARS, Scalar, decode_member, encode_member
from treenail.codec.text import print_json
from treenail.errors import CodecError

_BUILT_IN_TYPES: dict[str, type] = {
    f"{each.__module__}:{each.__qualname__}": each
    for each in (
        *(*NATIVE, list, dict, tuple, set, frozenset, object),
        *(scalar.kind for scalar in SCALARS.values()),
    )
}
"""Classes that a stored value may name without being registered."""


class RecordCoder(Protocol):
    """Codes the fields of one dataclass or model."""

    @property
    def fields(self) -> tuple[Any, ...]:
        """The fields; finding them registers the types that they name."""
        ...

    def encode_fields(self, value: Any) -> Json:
        """Encode a value of exactly this class as the object of its fields."""
        ...

    def decode_fields(self, data: Json) -> Any:
        """Decode an object of fields to a value of this class."""
        ...


class ValueCoder:
    """Codes values by what they are."""

    def __init__(self, registry: TypeRegistry, record_of: Callable[[Any], RecordCoder]) -> None:
        self._registry = registry
        self._record_of = record_of
        self._types_searched = 0
        self._by_type: dict[type, Encode] = {
            **NATIVE,
            **{each.kind: _tagging(each) for each in SCALARS.values()},
            list: lambda value: code_items(value, self.encode),
            tuple: lambda value: {TAG: "tuple", "v": code_items(value, self.encode)},
            set: lambda value: {TAG: "set", "v": in_order(code_items(value, self.encode))},
            frozenset: lambda value: {TAG: "frozenset", "v": in_order(code_items(value, self.encode))},
            dict: self._encode_dict,
            types.MappingProxyType: lambda value: {TAG: "mappingproxy", "v": self.encode_pairs(value)},
            FrozenDict: lambda value: {TAG: "frozendict", "v": self.encode_pairs(value)},
        }
        self._by_tag: dict[str, Callable[[dict[str, Json]], Any]] = {
            **DECODE_TAGGED,
            "list": self._decode_items,
            "tuple": lambda data: tuple(self._decode_items(data)),
            "set": lambda data: as_set(set, self._decode_items(data)),
            "frozenset": lambda data: as_set(frozenset, self._decode_items(data)),
            "dict": self._decode_pairs,
            "mappingproxy": lambda data: types.MappingProxyType(self._decode_pairs(data)),
            "frozendict": lambda data: FrozenDict(self._decode_pairs(data)),
            "class": self._decode_class,
            "enum": self._decode_enum,
            "namedtuple": self._decode_named_tuple,
            "obj": self._decode_object,
        }

    # .. encoding ..

    def encode(self, value: object) -> Json:
        """Encode a value where any could stand."""
        encode = self._by_type.get(type(value))
        return self._encode_declared(value) if encode is None else encode(value)

    def encode_tagged(self, value: object) -> Json:
        """Encode a value where another type was announced: it names its type, whatever it is."""
        kind = type(value)
        if kind is dict:
            return {TAG: "dict", "v": self.encode_pairs(cast("dict[object, object]", value))}
        encoded = self.encode(value)
        if kind is list or (kind in NATIVE and type(encoded) is not dict):
            return {TAG: kind.__name__, "v": encoded}
        return encoded

    def encode_pairs(self, mapping: Mapping[Any, object]) -> list[Json]:
        """Encode a mapping as an array of pairs."""
        return encode_pairs(mapping, self.encode, self.encode)

    def _encode_dict(self, mapping: dict[object, object]) -> Json:
        # An object, if every key is text and none could be mistaken for a tag.
        if TAG in mapping or any(type(key) is not str for key in mapping):
            return {TAG: "dict", "v": self.encode_pairs(mapping)}
        return code_values(cast("dict[str, object]", mapping), self.encode)

    def _encode_declared(self, value: object) -> Json:
        """Encode a value of a class that the program declared."""
        cls: Any = type(value)
        if isinstance(value, Enum):
            return {TAG: "enum", "t": self._registry.name_of(cls), "v": encode_member(value)}
        if is_record(cls):
            name = self._registry.name_of(cls)
            return {TAG: "obj", "t": name, "v": self._record_of(cls).encode_fields(value)}
        if is_named_tuple(cls):
            return self._encode_named_tuple(cast("tuple[object, ...]", value))
        if isinstance(value, type):
            return {TAG: "class", "v": self._registry.name_of(value)}
        raise CodecError(why_not(value))

    def _encode_named_tuple(self, value: tuple[object, ...]) -> Json:
        cls: Any = type(value)
        if len(value) != len(cls._fields):
            raise CodecError(f"a {cls.__qualname__} of {len(value)} items instead of {len(cls._fields)}")
        fields = {}
        for name, item in zip(cls._fields, value, strict=True):
            try:
                fields[name] = self.encode(item)
            except CodecError as error:
                raise at(f".{name}", error) from None
        return {TAG: "namedtuple", "t": self._registry.name_of(cls), "v": fields}

    # .. decoding ..

    def decode(self, data: Json) -> Any:
        """Decode what `encode` or `encode_tagged` made."""
        kind = type(data)
        if kind is dict:
            return self.decode_tagged(data) if TAG in data else code_values(data, self.decode)
        return code_items(data, self.decode) if kind is list else data

    def decode_tagged(self, data: dict[str, Json]) -> Any:
        """Decode an object that names its type."""
        tag = data[TAG]
        decode = self._by_tag.get(tag) if type(tag) is str else None
        if decode is None:
            raise CodecError(f"{show(tag)} is not a known tag")
        if "v" not in data:
            raise CodecError("a tagged value needs its content under 'v'")
        return decode(data)

    def _decode_items(self, data: dict[str, Json]) -> list[Any]:
        return code_items(expect(data["v"], list, "an array"), self.decode)

    def _decode_pairs(self, data: dict[str, Json]) -> dict[Any, Any]:
        return decode_pairs(data["v"], self.decode, self.decode)

    def _decode_class(self, data: dict[str, Json]) -> type:
        name = data["v"]
        return (_BUILT_IN_TYPES.get(name) if type(name) is str else None) or self._resolve(name)

    def _decode_enum(self, data: dict[str, Json]) -> Enum:
        cls = self._resolve(data.get("t"))
        if not issubclass(cls, Enum):
            raise CodecError(f"{cls.__qualname__} is not an enum")
        return decode_member(cls, data["v"])

    def _decode_named_tuple(self, data: dict[str, Json]) -> Any:
        cls: Any = self._resolve(data.get("t"))
        if not is_named_tuple(cls):
            raise CodecError(f"{cls.__qualname__} is not a named tuple")
        fields = expect(data["v"], dict, "an object")
        items = []
        for name in cls._fields:
            if name in fields:
                try:
                    items.append(self.decode(fields[name]))
                except CodecError as error:
                    raise at(f".{name}", error) from None
            elif name in cls._field_defaults:
                items.append(cls._field_defaults[name])
            else:
                raise CodecError(f"the field {name!r} of {cls.__qualname__} is missing")
        return tuple.__new__(cls, items)

    def _decode_object(self, data: dict[str, Json]) -> Any:
        cls = self._resolve(data.get("t"))
        if not is_record(cls):
            raise CodecError(f"{cls.__qualname__} is not a dataclass or a pydantic model")
        return self._record_of(cls).decode_fields(data["v"])

    def _resolve(self, name: Json) -> type:
        if type(name) is not str:
            raise CodecError(f"a type name must be text, not {show(name)}")
        if not self._registry.knows(name):
            self._register_field_types()
        return self._registry.resolve(name)

    def _register_field_types(self) -> None:
        """Register the types that the fields of registered types name."""
        while len(known := self._registry.types()) != self._types_searched:
            self._types_searched = len(known)
            for each in known:
                if is_record(each):
                    self._record_of(each).fields  # noqa: B018  # finding them registers their types


# --- containers ------------------------------------------------------------------------------------


def code_items(items: Iterable[Any], code: Encode | Decode) -> list[Any]:
    """Encode or decode each item; a refusal names its place."""
    out: list[Any] = []
    try:
        for item in items:
            out.append(code(item))
    except CodecError as error:
        raise at(f"[{len(out)}]", error) from None
    return out


def code_values(mapping: Mapping[str, Any], code: Encode | Decode) -> dict[str, Any]:
    """Encode or decode the values of a mapping with text keys; a refusal names its key."""
    out: dict[str, Any] = {}
    key = ""
    try:
        for key, item in mapping.items():
            out[key] = code(item)
    except CodecError as error:
        raise at(step(key), error) from None
    return out


def encode_pairs(mapping: Mapping[Any, Any], key_coder: Encode, item_coder: Encode) -> list[Json]:
    """Encode a mapping as an array of pairs; a refusal names its key."""
    out = []
    for key, item in mapping.items():
        try:
            out.append([key_coder(key), item_coder(item)])
        except CodecError as error:
            raise at(step(key), error) from None
    return out


def decode_pairs(data: Json, key_coder: Decode, item_coder: Decode) -> dict[Any, Any]:
    """Decode an array of pairs; a refusal names its place."""
    out: dict[Any, Any] = {}
    for index, pair in enumerate(expect(data, list, "an array of pairs")):
        if type(pair) is not list or len(pair) != 2:
            raise CodecError(f"entry {index} is not a pair")
        try:
            key, item = key_coder(pair[0]), item_coder(pair[1])
        except CodecError as error:
            raise at(f"[{index}]", error) from None
        try:
            out[key] = item
        except Exception:  # noqa: BLE001  # a key's own __hash__ or __eq__ may raise anything
            raise CodecError(f"entry {index} has a key that cannot be one") from None
    return out


def in_order(encoded: list[Json]) -> list[Json]:
    """Sort the encoded items of a set, which has no order, so that equal sets are equal bytes."""
    return sorted(encoded, key=print_json)


def as_set(kind: Any, items: list[Any]) -> Any:
    """Make a set of decoded items."""
    try:
        return kind(items)
    except Exception:  # noqa: BLE001  # an item's own __hash__ or __eq__ may raise anything
        raise CodecError("a set cannot hold a value that can change") from None


def _tagging(scalar: Scalar) -> Encode:
    def encode(value: Any) -> Json:
        encoded = scalar.encode(value)
        return encoded if type(encoded) is dict else {TAG: scalar.tag, "v": encoded}

    return encode

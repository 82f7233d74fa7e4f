"""Values to JSON and back, and the registry of types that may come back.

Theory of operation
-------------------
A value is encoded along its declared types. Where the value is exactly what the
annotation says, its plain JSON form is stored (`UUID` as text, `tuple[int, ...]`
as an array, a dataclass as an object). Where the annotation leaves a choice
(`A | B`, `Any`, a base class) or the value is something else than announced, the
stored form says itself what it is: `{"$": "tuple", "v": [...]}`,
`{"$": "obj", "t": "app.models:Step", "v": {...}}`. So the round trip is the
identity for everything that is accepted, and whatever is not accepted is refused
with the path to the offending field before anything has changed.

Decoding resolves type names through a `TypeRegistry` and through nothing else:
it never imports a module, never looks one up, and never runs a constructor, a
`__post_init__` or a validator; objects are put together from their fields. A
field that is missing takes its default (a default factory is called); a field
that the type no longer has is left out. Anything else that does not fit is a
`DecodeError` with its path.

A dataclass marked as `sparse` leaves out of its stored form what is empty and is so
by default: None, False, 0, and empty texts and collections. The mark is a promise: what
was left out comes back as the default, so these defaults must never change.

A value that can never change in place may be handed to everybody; any other has to be decoded anew
for each reader. `is_immutable` tells which it is. Along the declared types nearly all of that is known
beforehand, so that only the fields in doubt are looked at. A mapping is immutable if it is a
`FrozenDict` of what is immutable; declared as one, its stored form is that of a dict.

A type's stable name is `module:qualname` unless it was registered with another.
Types are registered when they are used as a slice, dispatched, or named in a
registered type's fields, and explicitly with `register_type`.

How it is made fast: on first use a record's annotations are compiled into two
Python functions, as `dataclasses` does for `__init__`. Each annotation becomes a
`_Coder`. Most fields of most records are text, numbers and None, which JSON holds
as they are; for these the coder states a condition, and the generated code tests
it in place instead of making a call. The conditions, and the types that refer to
each other in circles, are why the functions are generated and linked in two steps
(`_Record._generate`, `Codec.compile`).

The text itself is printed and parsed by pydantic-core, which does it faster than
the standard library; what that cannot do (halves of surrogate pairs) or has to
explain (errors) is left to the standard library. What a coder's `encode` returns
goes to the printer and nowhere else: it may hold a container of the value itself,
and UUIDs, dates and moments that the printer writes as text.

What bounds it: the stored form may nest 255 levels, which is where the printer
stops. That is little enough that what was accepted once can be read again: should
the caller's own stack be nearly full, the work is done on a fresh one
(`_on_free_stack`).
"""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import functools
import inspect
import json
import keyword
import math
import os
import re
import sys
import threading
import types
import typing
import zoneinfo
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from enum import Enum, Flag
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, Self, TypeVar, cast
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic_core import PydanticSerializationError, PydanticUndefined, TzInfo, from_json, to_json

from treenail.errors import DecodeError, EncodeError, UnknownTypeError, UsageError

Json = Any
"""What `json.loads` returns. JSON is where static types end; `Any` says so once."""

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

MAX_DEPTH: Final = 255
"""How deep arrays and objects may nest in the stored form of a value."""

_MAX_INT_BITS = 14_000
"""Python refuses to print or parse integers of more than about 4,300 digits."""

_TAG = "$"

_V = "\0"
"""The variable in a condition of generated code; no text that Python's `repr` writes contains it."""


class _Refused(Exception):
    """Why a value cannot be coded; its path grows as the exception travels outwards."""

    def __init__(self, reason: str, *, unknown: str | None = None) -> None:
        self.reason = reason
        self.unknown = unknown
        self.parts: list[str] = []
        super().__init__(reason)

    def path(self, root: str) -> str:
        return root + "".join(reversed(self.parts))


Encode = Callable[[Any], Json]
Decode = Callable[[Json], Any]


@dataclass(slots=True)
class _Coder:
    """How one annotation is coded.

    `as_is` and `back_as_is` are Python conditions on a variable written `_V`: where they hold, the
    value is its own stored form (and the form its own value), and the function is not called.
    """

    encode: Encode
    decode: Decode
    as_is: str = ""
    back_as_is: str = ""
    # Whether a value in its declared form cannot change in place, the records in it left aside.
    immutable: bool = False
    # The records that such a value may hold in declared form.
    records: tuple[_Record, ...] = ()
    # How to see whether such a value cannot change, if that depends on the value.
    never_changes: Callable[[Any], bool] | None = None
    # Set if `encode` and `decode` are this record's own functions, which it gets when it is compiled.
    stands_for: _Record | None = None


# --- a mapping that cannot change ------------------------------------------------------------------


class FrozenDict(dict[K, V]):
    """A dict that refuses to be changed: for the fields of records that are kept as they are.

    A record whose mappings are such, and hold nothing that can change, need not be decoded anew for
    everybody who looks at it. It equals the dict with the same items; `dict(it)` is one to change.
    """

    __slots__ = ()

    def __new__(cls, given: Mapping[K, V] | Iterable[tuple[K, V]] = (), /, **named: V) -> Self:
        """Make a mapping like a dict of the same arguments."""
        made = dict.__new__(cls)
        dict.update(made, given, **named)
        return made

    if not TYPE_CHECKING:
        # A dict is filled by its own, and could be filled again.
        __init__ = object.__init__

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a FrozenDict cannot be changed; change a copy of it, which dict() makes")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    def __repr__(self) -> str:
        return f"FrozenDict({dict(self)!r})"


# --- the registry ----------------------------------------------------------------------------------


class TypeRegistry:
    """Which types stored data may name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_name: dict[str, type] = {}
        self._names: dict[type, str] = {}
        self._given: set[str] = set()

    def register(self, cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
        """Make a type loadable under a stable name; further names are read but not written.

        Registering the same type again changes nothing. A derived name belongs to the newest type
        that bears it (a reloaded module); a given name or alias belongs to one type only.
        """
        given = (*((name,) if name else ()), *aliases)
        with self._lock:
            known = self._names.get(cls)
            if known is not None and not given:
                return cls
            chosen = name or known or _derived_name(cls)
            for each in (chosen, *given):
                holder = self._by_name.get(each)
                if (
                    holder is not None
                    and holder is not cls
                    and (each in self._given or each in given)
                    and _derived_name(holder) != _derived_name(cls)
                ):
                    raise UsageError(
                        f"the type name {each!r} already belongs to {_derived_name(holder)}; "
                        f"register {_derived_name(cls)} under another"
                    )
            for each in (chosen, *given):
                self._by_name[each] = cls
            self._names[cls] = chosen
            self._given.update(given)
        return cls

    def name_of(self, cls: type) -> str:
        """Return the stable name of a type, registering it if it is new."""
        name = self._names.get(cls)
        if name is None:
            self.register(cls)
            name = self._names[cls]
        return name

    def resolve(self, name: str) -> type:
        """Return the type of that name. Raises `UnknownTypeError`; never imports anything."""
        cls = self._by_name.get(name)
        if cls is None:
            raise UnknownTypeError(name)
        return cls

    def knows(self, name: str) -> bool:
        """Say whether a stored type name can be resolved here."""
        return name in self._by_name

    def types(self) -> tuple[type, ...]:
        """Return every registered type, oldest first."""
        with self._lock:
            return tuple(self._names)


def _derived_name(cls: type) -> str:
    generic = getattr(cls, "__pydantic_generic_metadata__", None)
    if generic and generic["origin"] and generic["args"]:
        # The class that pydantic makes for Box[Item] names Item without its module.
        inner = ", ".join(
            _derived_name(each) if isinstance(each, type) else repr(each) for each in generic["args"]
        )
        return f"{_derived_name(generic['origin'])}[{inner}]"
    return f"{cls.__module__}:{cls.__qualname__}"


def is_model(kind: type) -> bool:
    """Say whether a class is a pydantic model, without importing pydantic for it."""
    # Pydantic's dataclasses have the fields and the validator too, but are not models.
    return hasattr(kind, "__pydantic_root_model__") and hasattr(kind, "__pydantic_fields__")


def _is_record(cls: object) -> bool:
    return (
        isinstance(cls, type)
        and (dataclasses.is_dataclass(cls) or is_model(cls))
        and not issubclass(cls, Enum)
    )


def _is_named_tuple(cls: type) -> bool:
    names = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and type(names) is tuple and all(type(each) is str for each in names)


_SPARSE: set[type] = set()


def sparse(cls: type[T]) -> type[T]:
    """Mark a dataclass whose stored form leaves out what is empty and empty by default.

    It is for types that are stored often and are mostly empty. The default of such a field must never
    change: it is what older data mean.
    """
    _SPARSE.add(cls)
    return cls


def left_out(cls: type) -> dict[str, object]:
    """Return the fields that a sparse type leaves out, each with the value that it then has."""
    return {
        each.name: each.default
        for each in dataclasses.fields(cast(Any, cls))
        if cls in _SPARSE and _is_empty(each.default)
    }


def _is_empty(value: object) -> bool:
    # No floats: -0.0 is equal to 0.0 and is not the same.
    return value is None or (type(value) in (bool, int, str, bytes, tuple, frozenset) and not value)


# --- the codec -------------------------------------------------------------------------------------


class Codec:
    """Encodes and decodes values whose types stand in one registry."""

    def __init__(self, registry: TypeRegistry) -> None:
        self.registry = registry
        self._lock = threading.RLock()
        self._records: dict[Any, _Record] = {}
        self._open_aliases: list[Any] = []
        self._unlinked: list[tuple[dict[str, Any], str, _Record]] = []
        self._types_searched = 0
        # By the exact type of a value: how it is encoded where nothing was declared.
        self._by_value: dict[type, Encode] = {
            **_ENCODE_NATIVE,
            **{each.kind: _tagging(each) for each in _SCALARS.values()},
            list: self._encode_list,
            dict: self._encode_dict,
            tuple: self._encode_tuple,
            set: self._encode_set,
            frozenset: self._encode_set,
            types.MappingProxyType: self._encode_proxy,
            FrozenDict: self._encode_frozen,
        }
        # By tag: how an object that says itself what it is gets decoded.
        self._by_tag: dict[str, Callable[[dict[str, Json]], Any]] = {
            **_DECODE_TAGGED,
            "list": self._decode_tagged_list,
            "tuple": lambda data: tuple(self._decode_tagged_list(data)),
            "set": lambda data: _as_set(set, self._decode_tagged_list(data)),
            "frozenset": lambda data: _as_set(frozenset, self._decode_tagged_list(data)),
            "dict": self._decode_tagged_dict,
            "mappingproxy": lambda data: types.MappingProxyType(self._decode_tagged_dict(data)),
            "frozendict": lambda data: FrozenDict(self._decode_tagged_dict(data)),
            "class": self._decode_class,
            "enum": self._decode_enum,
            "namedtuple": self._decode_named_tuple,
            "obj": self._decode_object,
        }

    # .. events: the type's name travels beside the payload ..

    def encode(self, value: object) -> bytes:
        """Encode a dataclass or pydantic model. Raises `EncodeError` with the path to the field."""
        cls = type(value)
        record = self._records.get(cls)
        if record is None:
            if not _is_record(cls):
                raise EncodeError(
                    f"{cls.__qualname__} is not a dataclass or a pydantic model; wrap the value in one",
                    path=cls.__qualname__,
                )
            record = self.record(cls)
        try:
            return to_json(record.encode(value))
        except (_Refused, RecursionError, PydanticSerializationError):
            return self._to_json(record.encode, value)  # Once more, at leisure.

    def decode(self, cls: type[T], payload: bytes | str) -> T:
        """Decode what `encode` made of a value of that very class. Raises `DecodeError`."""
        return self.record_from_data(cls, parse_json(payload))

    # .. data: the stored form says itself what it is ..

    def to_data(self, value: object) -> Json:
        """Turn any supported value into JSON data that says itself what it is."""
        return parse_json(self._to_json(self.encode_any, value))

    def from_data(self, data: Json, *, root: str = "value") -> object:
        """Turn such data back into the value it stands for. Raises `DecodeError`."""
        return self._from_json(self.decode_any, data, root)

    def record_to_data(self, value: object) -> Json:
        """Turn a record into the plain JSON object of its fields, without its name."""
        return parse_json(self.encode(value))

    def record_from_data(self, cls: type[T], data: Json) -> T:
        """Turn such an object back into a record of that class. Raises `DecodeError`."""
        record = self._records.get(cls)
        if record is None:
            if not _is_record(typing.get_origin(cls) or cls):
                raise DecodeError("it is not a dataclass or a pydantic model", path=_name(cls))
            record = self.record(cls)
        try:
            return cast(T, record.decode(data, True))
        except (_Refused, RecursionError):
            return cast(T, self._from_json(record.decode_exactly, data, _name(cls)))  # Once more, at leisure.

    def is_immutable(self, value: object, payload: bytes) -> bool:
        """Say whether a value that encoded to `payload` can never change in place."""
        cls = type(value)
        record = self._records.get(cls) or self.record(cls)
        # One character is found much faster than several, and most payloads do not have it.
        if b"$" in payload and b'{"$":' in payload:
            return _deeply_immutable(value)
        # Without a tag in it, everything is of the declared types: only some fields need a look.
        doubtful = record.doubtful
        return record.never_changes(value) if doubtful or doubtful is None else True

    def _to_json(self, encode: Encode, value: object) -> bytes:
        try:
            return _on_free_stack(_encode_and_print, encode, value)
        except _Refused as refused:
            raise EncodeError(refused.reason, path=refused.path(_name(type(value)))) from None
        except RecursionError:
            raise EncodeError(_TOO_DEEP, path=_name(type(value))) from None

    def _from_json(self, decode: Decode, data: Json, root: str) -> object:
        try:
            return _on_free_stack(decode, data)
        except _Refused as refused:
            if refused.unknown is not None:
                raise UnknownTypeError(refused.unknown, path=refused.path(root)) from None
            raise DecodeError(refused.reason, path=refused.path(root)) from None
        except RecursionError:
            raise DecodeError("nested too deeply", path=root) from None

    # .. records ..

    def record(self, cls: Any) -> _Record:
        """Return the coder of a dataclass or model, or of a parametrised generic one."""
        found = self._records.get(cls)
        if found is None:
            with self._lock:
                found = self._records.get(cls)
                if found is None:
                    origin = typing.get_origin(cls) or cls
                    if not _is_record(origin):
                        raise UsageError(f"{_name(cls)} is not a dataclass or a pydantic model")
                    self.registry.name_of(origin)
                    found = _Record(self, cls, origin)
                    self._records[cls] = found
        return found

    def compile(self, record: _Record) -> None:
        """Generate the functions of a record and of every record that it may hold, and link them."""
        with self._lock:
            waiting = [record]
            while waiting:
                each = waiting.pop()
                if not each.compiled:
                    each.compile()
                    waiting.extend(each.holds)
            # Now that every function exists, the calls from one into another can be direct.
            while self._unlinked:
                namespace, name, callee = self._unlinked.pop()
                namespace[f"encode_{name}"] = callee.encode
                namespace[f"decode_{name}"] = callee.decode

    def bind(self, namespace: dict[str, Any], name: str, coder: _Coder) -> None:
        """Let generated code reach a coder's functions as `encode_<name>` and `decode_<name>`."""
        namespace[f"encode_{name}"] = coder.encode
        namespace[f"decode_{name}"] = coder.decode
        if coder.stands_for is not None:
            self._unlinked.append((namespace, name, coder.stands_for))

    # .. values without an annotation ..

    def encode_any(self, value: object) -> Json:
        """Encode a value by what it is. Arrays stand for lists, objects for dicts with text keys."""
        encode = self._by_value.get(type(value))
        if encode is None:
            encode = self._encoder_for(value)
        return encode(value)

    def encode_tagged(self, value: object) -> Json:
        """Encode a value so that it says itself what it is, wherever it stands."""
        kind = type(value)
        if kind is dict:
            return {_TAG: "dict", "v": self._encode_pairs(cast("dict[object, object]", value))}
        encoded = self.encode_any(value)
        if kind is list or (kind in _ENCODE_NATIVE and type(encoded) is not dict):
            return {_TAG: kind.__name__, "v": encoded}
        return encoded

    def _encoder_for(self, value: object) -> Encode:
        kind = type(value)
        encode: Encode
        if isinstance(value, Enum):
            encode = self._encode_enum
        elif _is_record(kind):
            encode = self._encode_object
        elif _is_named_tuple(kind):
            encode = self._encode_named_tuple
        elif isinstance(value, type):
            encode = self._encode_class
        else:
            raise _Refused(_why_not(value))
        self._by_value[kind] = encode
        return encode

    def _encode_list(self, items: Iterable[object]) -> list[Json]:
        encode = self.encode_any
        out: list[Json] = []
        try:
            for item in items:
                out.append(item if type(item) is str else encode(item))
        except _Refused as refused:
            refused.parts.append(f"[{len(out)}]")
            raise
        return out

    def _encode_tuple(self, items: Iterable[object]) -> Json:
        return {_TAG: "tuple", "v": self._encode_list(items)}

    def _encode_set(self, items: Collection[object]) -> Json:
        return {_TAG: type(items).__name__, "v": _in_order(self._encode_list(items))}

    def _encode_dict(self, mapping: Mapping[object, object]) -> Json:
        # An object, if every key is text and none could be mistaken for a tag.
        encode = self.encode_any
        out: dict[str, Json] = {}
        key: object = None
        try:
            for key, item in mapping.items():
                if type(key) is not str or key == _TAG:
                    break
                out[key] = item if type(item) is str else encode(item)
            else:
                return out
        except _Refused as refused:
            refused.parts.append(_step(key))
            raise
        return {_TAG: "dict", "v": self._encode_pairs(mapping)}

    def _encode_pairs(self, mapping: Mapping[Any, object]) -> list[Json]:
        out = []
        key: object = None
        try:
            for key, item in mapping.items():
                out.append([self.encode_any(key), self.encode_any(item)])
        except _Refused as refused:
            refused.parts.append(_step(key))
            raise
        return out

    def _encode_proxy(self, mapping: Mapping[object, object]) -> Json:
        return {_TAG: "mappingproxy", "v": self._encode_pairs(mapping)}

    def _encode_frozen(self, mapping: Mapping[object, object]) -> Json:
        return {_TAG: "frozendict", "v": self._encode_pairs(mapping)}

    def _encode_enum(self, value: Enum) -> Json:
        return {_TAG: "enum", "t": self.registry.name_of(type(value)), "v": _encode_member(value)}

    def _encode_object(self, value: object) -> Json:
        cls = type(value)
        record = self._records.get(cls) or self.record(cls)
        return {_TAG: "obj", "t": self.registry.name_of(cls), "v": record.encode(value)}

    def _encode_named_tuple(self, value: tuple[object, ...]) -> Json:
        cls: Any = type(value)
        if len(value) != len(cls._fields):
            raise _Refused(f"a {cls.__qualname__} of {len(value)} items instead of {len(cls._fields)}")
        fields = {}
        name = ""
        try:
            for name, item in zip(cls._fields, value, strict=True):
                fields[name] = self.encode_any(item)
        except _Refused as refused:
            refused.parts.append(f".{name}")
            raise
        return {_TAG: "namedtuple", "t": self.registry.name_of(cls), "v": fields}

    def _encode_class(self, value: type) -> Json:
        return {_TAG: "class", "v": self.registry.name_of(value)}

    def decode_any(self, data: Json) -> Any:
        """Decode what `encode_any` or `encode_tagged` made."""
        kind = type(data)
        if kind is dict:
            if _TAG in data:
                return self.decode_tagged(data)
            out = {}
            key = ""
            try:
                for key, item in data.items():
                    out[key] = item if type(item) is str else self.decode_any(item)
            except _Refused as refused:
                refused.parts.append(_step(key))
                raise
            return out
        if kind is list:
            return self._decode_list(data)
        return data

    def decode_tagged(self, data: dict[str, Json]) -> Any:
        """Decode an object that says itself what it is."""
        tag = data[_TAG]
        decode = self._by_tag.get(tag) if type(tag) is str else None
        if decode is None:
            raise _Refused(f"{_show(tag)} is not a known tag")
        if "v" not in data:
            raise _Refused("a tagged value needs its content under 'v'")
        return decode(data)

    def _decode_list(self, data: list[Json]) -> list[Any]:
        out: list[Any] = []
        try:
            for item in data:
                out.append(item if type(item) is str else self.decode_any(item))
        except _Refused as refused:
            refused.parts.append(f"[{len(out)}]")
            raise
        return out

    def _decode_tagged_list(self, data: dict[str, Json]) -> list[Any]:
        return self._decode_list(_expect(data["v"], list, "an array"))

    def _decode_tagged_dict(self, data: dict[str, Json]) -> dict[Any, Any]:
        return _decode_pairs(data["v"], self.decode_any, self.decode_any)

    def _decode_class(self, data: dict[str, Json]) -> type:
        name = data["v"]
        built_in = _BUILT_IN_TYPES.get(name) if type(name) is str else None
        return built_in or self._resolve(name)

    def _decode_enum(self, data: dict[str, Json]) -> Enum:
        cls = self._resolve(data.get("t"))
        if not issubclass(cls, Enum):
            raise _Refused(f"{cls.__qualname__} is not an enum")
        return _decode_member(cls, data["v"])

    def _decode_named_tuple(self, data: dict[str, Json]) -> Any:
        cls: Any = self._resolve(data.get("t"))
        if not _is_named_tuple(cls):
            raise _Refused(f"{cls.__qualname__} is not a named tuple")
        fields = _expect(data["v"], dict, "an object")
        items = []
        for name in cls._fields:
            if name in fields:
                try:
                    items.append(self.decode_any(fields[name]))
                except _Refused as refused:
                    refused.parts.append(f".{name}")
                    raise
            elif name in cls._field_defaults:
                items.append(cls._field_defaults[name])
            else:
                raise _Refused(f"the field {name!r} of {cls.__qualname__} is missing")
        return tuple.__new__(cls, items)

    def _decode_object(self, data: dict[str, Json]) -> Any:
        cls = self._resolve(data.get("t"))
        record = self._records.get(cls)
        if record is None:
            if not _is_record(cls):
                raise _Refused(f"{cls.__qualname__} is not a dataclass or a pydantic model")
            record = self.record(cls)
        return record.decode_exactly(data["v"])

    def _resolve(self, name: Json) -> type:
        if type(name) is not str:
            raise _Refused(f"a type name must be text, not {_show(name)}")
        if not self.registry.knows(name):
            self._register_field_types()
            if not self.registry.knows(name):
                raise _Refused("unknown type", unknown=name)
        return self.registry.resolve(name)

    def _register_field_types(self) -> None:
        """Register what the registered types name in their fields; compiling a record does that."""
        while len(known := self.registry.types()) != self._types_searched:
            self._types_searched = len(known)
            for each in known:
                if _is_record(each):
                    self.compile(self.record(each))

    # .. annotations ..

    def coder(self, annotation: Any) -> _Coder:
        """Compile an annotation. What cannot be understood is coded by value, which always works."""
        annotation = _bare(annotation)
        origin = typing.get_origin(annotation)
        arguments = typing.get_args(annotation)
        alias = _alias_of(annotation)
        if alias is not None:
            return self._alias_coder(alias, arguments)
        if origin is Literal:
            return self._literal_coder(arguments)
        if origin in _UNIONS:
            return self._union_coder(annotation)
        if annotation in _NATIVE_CONDITIONS:
            return self._native_coder(annotation)
        if annotation in _SCALARS:
            return self._scalar_coder(_SCALARS[annotation])
        plain = origin or annotation
        if plain is tuple and arguments and Ellipsis not in arguments:
            return self._fixed_tuple_coder(arguments)
        if plain in _COLLECTION_TARGETS:
            return self._collection_coder(_COLLECTION_TARGETS[plain], arguments)
        if plain in (dict, Mapping, FrozenDict) and len(arguments) == 2:
            return self._mapping_coder(*arguments, target=FrozenDict if plain is FrozenDict else dict)
        if isinstance(plain, type):
            if issubclass(plain, Enum):
                return self._enum_coder(plain)
            if _is_record(plain):
                return self._record_coder(annotation, plain)
        return self._any_coder()

    def _any_coder(self) -> _Coder:
        text = _NATIVE_CONDITIONS[str].as_is
        return _Coder(self.encode_any, self.decode_any, text, text)

    def _alias_coder(self, alias: Any, arguments: tuple[Any, ...]) -> _Coder:
        if alias in self._open_aliases:
            return self._any_coder()  # An alias that names itself, as the type of all JSON does.
        self._open_aliases.append(alias)
        try:
            return self.coder(alias.__value__[arguments] if arguments else alias.__value__)
        finally:
            self._open_aliases.pop()

    def _native_coder(self, kind: Any) -> _Coder:
        as_is, back_as_is, what = _NATIVE_CONDITIONS[kind]

        def decode(data: Json) -> Any:
            if type(data) is dict and _TAG in data:
                return self.decode_tagged(data)
            raise _Refused(f"expected {what}, found {_show(data)}")

        # Only what fails the condition arrives: another type, a huge integer, an infinite float.
        if kind in (int, float):

            def encode(value: Any) -> Json:
                found = type(value)
                if found is kind or (found is int and kind is float):
                    return _ENCODE_NATIVE[found](value)
                return self.encode_tagged(value)

            return _Coder(encode, decode, as_is, back_as_is, immutable=True)
        return _Coder(self.encode_tagged, decode, as_is, back_as_is, immutable=True)

    def _scalar_coder(self, scalar: _Scalar) -> _Coder:
        kind, encode_exact, decode_exact, tagged = (
            scalar.kind,
            scalar.encode,
            scalar.decode,
            self.encode_tagged,
        )

        def encode(value: Any) -> Json:
            return encode_exact(value) if type(value) is kind else tagged(value)

        def decode(data: Json) -> Any:
            if type(data) is dict and _TAG in data:
                return self.decode_tagged(data)
            return decode_exact(data)

        return _Coder(encode, decode, _PRINTED_CONDITIONS.get(kind, ""), immutable=True)

    def _enum_coder(self, cls: type[Enum]) -> _Coder:
        self.registry.name_of(cls)
        # The quick answers; whatever else arrives is a flag, tagged, or to be refused.
        members: dict[str, Enum] = {} if issubclass(cls, Flag) else dict(cls.__members__)

        def encode(value: Any) -> Json:
            if type(value) is not cls:
                return self.encode_tagged(value)
            name = value._name_
            return name if members.get(name) is value else _encode_member(value)

        def decode(data: Json) -> Any:
            if type(data) is str and data in members:
                return members[data]
            if type(data) is dict and _TAG in data:
                return self.decode_tagged(data)
            return _decode_member(cls, data)

        return _Coder(encode, decode, immutable=True)

    def _literal_coder(self, allowed: tuple[Any, ...]) -> _Coder:
        plain = [each for each in allowed if type(each) in (str, int, bool, type(None))]
        known = {(type(each), each) for each in plain}
        choices = ", ".join(repr(each) for each in plain)

        def encode(value: Any) -> Json:
            kind = type(value)
            if kind in (str, int, bool, type(None)) and (kind, value) in known:
                return value
            return self.encode_tagged(value)

        def decode(data: Json) -> Any:
            kind = type(data)
            if kind in (str, int, bool, type(None)) and (kind, data) in known:
                return data
            if kind is dict and _TAG in data:
                return self.decode_tagged(data)
            raise _Refused(f"expected one of {choices}, found {_show(data)}")

        texts = ", ".join(repr(each) for each in plain if type(each) is str)
        is_text = f"type({_V}) is str and {_V} in {{{texts}}}" if texts else ""
        return _Coder(encode, decode, is_text, is_text, immutable=True)

    def _union_coder(self, annotation: Any) -> _Coder:
        members = list(_union_members(annotation))
        others = [each for each in members if each is not type(None)]
        coders = [self.coder(each) for each in others]
        immutable = all(each.immutable for each in coders)
        records = tuple(record for each in coders for record in each.records)
        if len(coders) == 1 and len(members) == 2:
            # One type or None: the type's own form, and null.
            (inner,) = coders
            return dataclasses.replace(
                inner,
                as_is=_either(f"{_V} is None", inner.as_is),
                back_as_is=_either(f"{_V} is None", inner.back_as_is),
            )
        # Otherwise a value says itself what it is, unless JSON's own types already tell.
        native = {kind for each in members for kind in _native_kinds(each)}
        expected = " | ".join(_name(each) for each in members)

        def encode(value: Any) -> Json:
            return self.encode_any(value) if type(value) in native else self.encode_tagged(value)

        def decode(data: Json) -> Any:
            if type(data) in native or (type(data) is dict and _TAG in data):
                return self.decode_any(data)
            raise _Refused(f"expected {expected} or a tagged value, found {_show(data)}")

        conditions = [_NATIVE_CONDITIONS[each] for each in _NATIVE_CONDITIONS if each in native]
        as_is = _either(*(each.as_is for each in conditions))
        back_as_is = _either(*(each.back_as_is for each in conditions))
        return _Coder(encode, decode, as_is, back_as_is, immutable, records)

    def _collection_coder(self, target: type, arguments: tuple[Any, ...]) -> _Coder:
        item = self.coder(arguments[0] if arguments else Any)
        finish = f"{target.__name__}({{}})" if target in (list, tuple) else "as_set(target, {})"
        is_set = target in (set, frozenset)
        source = [
            "def encode(value):",
            "    if type(value) is not target:",
            "        return encode_tagged(value)",
            *_indented(1, [] if is_set else _whole("item in value", item.as_is, "value")),
            "    out = []",
            "    try:",
            "        for item in value:",
            *_indented(3, _applying(item.as_is, "item", "encode_item")),
            "            out.append(item)",
            "    except Refused as refused:",
            "        refused.parts.append(f'[{len(out)}]')",
            "        raise",
            f"    return {'in_order(out)' if is_set else 'out'}",
            "def decode(data):",
            "    if type(data) is not list:",
            "        return decode_other(data)",
            *_indented(1, _whole("item in data", item.back_as_is, finish.format("data"))),
            "    out = []",
            "    try:",
            "        for item in data:",
            *_indented(3, _applying(item.back_as_is, "item", "decode_item")),
            "            out.append(item)",
            "    except Refused as refused:",
            "        refused.parts.append(f'[{len(out)}]')",
            "        raise",
            f"    return {finish.format('out')}",
        ]
        namespace = self._namespace("an array", target=target, in_order=_in_order, as_set=_as_set)
        self.bind(namespace, "item", item)
        _define(source, namespace, f"{target.__name__} of items")
        immutable = item.immutable and target in (tuple, frozenset)
        return _Coder(namespace["encode"], namespace["decode"], immutable=immutable, records=item.records)

    def _fixed_tuple_coder(self, arguments: tuple[Any, ...]) -> _Coder:
        coders = [] if arguments == ((),) else [self.coder(each) for each in arguments]
        namespace = self._namespace(f"an array of {len(coders)}")
        names = [f"v{index}" for index in range(len(coders))]
        encoding, decoding = [], []
        for index, (name, coder) in enumerate(zip(names, coders, strict=True)):
            self.bind(namespace, str(index), coder)
            encoding += [f"at = {index}", *_applying(coder.as_is, name, f"encode_{index}")]
            decoding += [f"at = {index}", *_applying(coder.back_as_is, name, f"decode_{index}")]
        unpack = f"[{', '.join(names)}]"
        packed = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
        path = [
            "    except Refused as refused:",
            "        refused.parts.append(f'[{at}]')",
            "        raise",
        ]
        source = [
            "def encode(value):",
            f"    if type(value) is not tuple or len(value) != {len(coders)}:",
            "        return encode_tagged(value)",
            f"    {unpack} = value",
            "    try:",
            *_indented(2, encoding or ["pass"]),
            *path,
            f"    return {unpack}",
            "def decode(data):",
            f"    if type(data) is not list or len(data) != {len(coders)}:",
            "        return decode_other(data)",
            f"    {unpack} = data",
            "    try:",
            *_indented(2, decoding or ["pass"]),
            *path,
            f"    return {packed}",
        ]
        _define(source, namespace, "fixed tuple")
        return _Coder(
            namespace["encode"],
            namespace["decode"],
            immutable=all(each.immutable for each in coders),
            records=tuple(record for each in coders for record in each.records),
        )

    def _mapping_coder(self, key_type: Any, item_type: Any, target: type) -> _Coder:
        item = self.coder(item_type)
        if _bare(key_type) is not str:
            return self._pairs_coder(self.coder(key_type), item, target)
        itself = "value" if target is dict else "dict(value)"
        source = [
            "def encode(value):",
            "    if type(value) is not target or '$' in value:",
            "        return encode_tagged(value)",
            *_indented(1, _whole("key, item in value.items()", item.as_is, itself, "type(key) is str")),
            "    out = {}",
            "    try:",
            "        for key, item in value.items():",
            "            if type(key) is not str:",
            "                break",
            *_indented(3, _applying(item.as_is, "item", "encode_item")),
            "            out[key] = item",
            "        else:",
            "            return out",
            "    except Refused as refused:",
            "        refused.parts.append(step(key))",
            "        raise",
            "    return encode_tagged(value)",
            "def decode(data):",
            "    if type(data) is not dict or '$' in data:",
            "        return decode_other(data)",
            *_indented(1, _whole("item in data.values()", item.back_as_is, "target(data)")),
            "    out = {}",
            "    try:",
            "        for key, item in data.items():",
            *_indented(3, _applying(item.back_as_is, "item", "decode_item")),
            "            out[key] = item",
            "    except Refused as refused:",
            "        refused.parts.append(step(key))",
            "        raise",
            f"    return {'out' if target is dict else 'target(out)'}",
        ]
        namespace = self._namespace("an object", step=_step, target=target)
        self.bind(namespace, "item", item)
        _define(source, namespace, "dict with text keys")
        never_changes = _no_value_changes if target is FrozenDict else None
        return _Coder(
            namespace["encode"], namespace["decode"], records=item.records, never_changes=never_changes
        )

    def _pairs_coder(self, key: _Coder, item: _Coder, target: type) -> _Coder:
        source = [
            "def encode(value):",
            "    if type(value) is not target:",
            "        return encode_tagged(value)",
            "    out = []",
            "    try:",
            "        for original, item in value.items():",
            "            key = original",
            *_indented(3, _applying(key.as_is, "key", "encode_key")),
            *_indented(3, _applying(item.as_is, "item", "encode_item")),
            "            out.append([key, item])",
            "    except Refused as refused:",
            "        refused.parts.append(step(original))",
            "        raise",
            "    return out",
            "def key_back(key):",
            *_indented(1, _applying(key.back_as_is, "key", "decode_key")),
            "    return key",
            "def item_back(item):",
            *_indented(1, _applying(item.back_as_is, "item", "decode_item")),
            "    return item",
            "def decode(data):",
            "    if type(data) is not list:",
            "        return decode_other(data)",
            "    return target(decode_pairs(data, key_back, item_back))",
        ]
        namespace = self._namespace(
            "an array of pairs", step=_step, decode_pairs=_decode_pairs, target=target
        )
        self.bind(namespace, "key", key)
        self.bind(namespace, "item", item)
        _define(source, namespace, "dict")
        return _Coder(namespace["encode"], namespace["decode"], records=(*key.records, *item.records))

    def _record_coder(self, annotation: Any, plain: type) -> _Coder:
        try:
            record = self.record(annotation)
        except TypeError:  # Parameters that cannot be hashed; without them its fields go by value.
            record = self.record(plain)
        return _Coder(
            record.encode,
            record.decode,
            immutable=True,
            records=(record,),
            never_changes=record.never_changes,
            stands_for=record,
        )

    def _namespace(self, what: str, **names: Any) -> dict[str, Any]:
        """Return what the code generated for a container may use."""

        def decode_other(data: Json) -> Any:
            if type(data) is dict and _TAG in data:
                return self.decode_tagged(data)
            raise _Refused(f"expected {what}, found {_show(data)}")

        return {
            **_LEAF_NAMES,
            "Refused": _Refused,
            "encode_tagged": self.encode_tagged,
            "decode_other": decode_other,
            **names,
        }


# --- generated code --------------------------------------------------------------------------------


def _applying(condition: str, variable: str, function: str) -> list[str]:
    """Return lines that code a variable: nothing where it is its own form, else a call."""
    call = f"{variable} = {function}({variable})"
    if not condition:
        return [call]
    return [f"if not ({condition.replace(_V, variable)}):", f"    {call}"]


def _whole(items: str, condition: str, result: str, also: str = "True") -> list[str]:
    """Return lines that answer for a whole container if each of its items is its own form."""
    if not condition:
        return []
    return [
        f"for {items}:",
        f"    if not ({also} and ({condition.replace(_V, 'item')})):",
        "        break",
        "else:",
        f"    return {result}",
    ]


def _coding(condition: str, index: int, name: str, direction: str) -> list[str]:
    """Return lines that code a record's field, and say which one it is before a call may refuse it."""
    call = [f"at = {name!r}", f"v{index} = {direction}_{index}(v{index})"]
    if not condition:
        return call
    return [f"if not ({condition.replace(_V, f'v{index}')}):", *_indented(1, call)]


def _differs(index: int, empty: object) -> str:
    """Return the condition that a field's value is another one than this empty one, type and all."""
    if empty is None:
        return f"v{index} is not None"
    return f"type(v{index}) is not {type(empty).__name__} or v{index}"


def _either(*conditions: str) -> str:
    return " or ".join(f"({each})" for each in conditions if each)


def _indented(levels: int, lines: Iterable[str]) -> list[str]:
    return ["    " * levels + line for line in lines]


def _define(lines: Iterable[str], namespace: dict[str, Any], what: str) -> None:
    exec(_compiled("\n".join(lines), f"<treenail codec: {what}>"), namespace)


@functools.lru_cache(maxsize=512)
def _compiled(source: str, name: str) -> types.CodeType:
    # Many containers differ only in what their namespace holds.
    return compile(source, name, "exec")


# --- records ---------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """A stored field: `default` makes its value from the earlier ones where the stored form lacks it."""

    name: str
    default: Callable[[dict[str, Any]], Any] | None


class _Record:
    """A dataclass or pydantic model, compiled on first use (so that types may refer to themselves)."""

    def __init__(self, codec: Codec, annotation: Any, cls: type) -> None:
        self.codec = codec
        self.cls = cls
        self.is_model = is_model(cls)
        parameters = getattr(cls, "__parameters__", ())
        self.variables = dict(zip(parameters, typing.get_args(annotation), strict=False))
        self.compiled = False
        self.holds: tuple[_Record, ...] = ()
        # Until it is compiled, a call compiles it first.
        self.encode: Encode = self._encode_first
        self.decode: Callable[..., Any] = self._decode_first
        self._names: tuple[str, ...] = ()
        self._coders: list[_Coder] = []
        self._immutable: bool | None = None

    def _encode_first(self, value: Any) -> Json:
        self.codec.compile(self)
        return self.encode(value)

    def _decode_first(self, data: Json, exactly: bool = False) -> Any:
        self.codec.compile(self)
        return self.decode(data, exactly)

    def decode_exactly(self, data: Json) -> Any:
        """Decode an object of fields to this very class, and to no other that it may name."""
        return self.decode(data, True)

    @property
    def immutable(self) -> bool:
        """Whether a value of exactly this type, with fields of exactly their types, never changes."""
        if self._immutable is None:
            self.codec.compile(self)
            reached = {self: None}
            for each in (walk := [self]):
                for held in each.holds:
                    if held not in reached:
                        reached[held] = None
                        walk.append(held)
            self._immutable = all(
                _is_frozen(each.cls) and all(coder.immutable for coder in each._coders) for each in reached
            )
        return self._immutable

    @functools.cached_property
    def doubtful(self) -> tuple[tuple[str, Callable[[Any], bool]], ...] | None:
        """The fields that may hold what can change although they are of their types, and how to see it.

        None if the record itself can change.
        """
        self.codec.compile(self)
        if not _is_frozen(self.cls):
            return None
        return tuple(
            (name, coder.never_changes or _deeply_immutable)
            for name, coder in zip(self._names, self._coders, strict=True)
            if not coder.immutable or not all(each.immutable for each in coder.records)
        )

    def never_changes(self, value: Any) -> bool:
        """Say whether a value of exactly this type, with all fields of their types, cannot change."""
        doubtful = self.doubtful
        if doubtful is None:
            return False
        for name, never_changes in doubtful:
            held = getattr(value, name)
            if held is not None and held is not _EMPTY and not never_changes(held):
                return False
        return True

    def compile(self) -> None:
        """Generate this record's functions. The codec calls it, under its lock."""
        reason = _why_unbuildable(self.cls)
        fields = list(_model_fields(self.cls) if self.is_model else _dataclass_fields(self.cls))
        coders = [self._field_coder(hint) for hint in _hints(self.cls, [each.name for each in fields])]
        if reason is None:
            encode, decode = self._generate(fields, coders)
        else:
            encode, decode = _refusing(f"{self.cls.__qualname__} cannot be stored: {reason}", self)
        self._names = tuple(each.name for each in fields)
        self._coders = coders
        self.holds = tuple(record for each in coders for record in each.records)
        self.encode, self.decode = encode, decode
        self.compiled = True

    def _field_coder(self, hint: Any) -> _Coder:
        try:
            return self.codec.coder(_with_variables(hint, self.variables))
        except RecursionError:
            raise  # The caller's stack is full, which says nothing about the annotation.
        except Exception:  # noqa: BLE001  # an annotation may be any object; by value it works
            return self.codec._any_coder()

    def _generate(self, fields: list[_Field], coders: list[_Coder]) -> tuple[Encode, Callable[..., Any]]:
        cls = self.cls
        namespace: dict[str, Any] = {
            **_LEAF_NAMES,
            "cls": cls,
            "new": object.__new__,
            "Refused": _Refused,
            "encode_tagged": self.codec.encode_tagged,
            "decode_tagged": self.codec.decode_tagged,
            "not_an_object": self._not_an_object,
            "never_set": self._never_set,
            "encode_rest": self._encode_rest,
            "decode_rest": self._decode_rest,
        }
        empty = left_out(cls) if cls in _SPARSE else {}
        namespace["nothing"] = object()
        encoding: list[str] = []
        # The fields up to the first that may be left out are put into the object when it is made.
        first_empty = next((index for index, each in enumerate(fields) if each.name in empty), len(fields))
        at_once = ", ".join(f"{each.name!r}: v{index}" for index, each in enumerate(fields[:first_empty]))
        decoding: list[str] = ["get = data.get"] if empty else []
        for index, (field, coder) in enumerate(zip(fields, coders, strict=True)):
            name = repr(field.name)
            reading = f"fields[{name}]" if self.is_model else _reading(field.name)
            self.codec.bind(namespace, str(index), coder)
            namespace[f"default_{index}"] = self._default(fields, index)
            encoding += [f"v{index} = {reading}"]
            coding = _coding(coder.as_is, index, field.name, "encode")
            if index == first_empty:
                encoding += [f"out = {{{at_once}}}"]
            if index >= first_empty:
                coding += [f"out[{name}] = v{index}"]
            if field.name in empty:
                namespace[f"empty_{index}"] = empty[field.name]
                encoding += [f"if {_differs(index, empty[field.name])}:", *_indented(1, coding)]
                decoding += [
                    f"v{index} = get({name}, nothing)",
                    f"if v{index} is nothing:",
                    f"    v{index} = empty_{index}",
                    "else:",
                ]
            else:
                encoding += coding
                decoding += [
                    "try:",
                    f"    v{index} = data[{name}]",
                    "except KeyError:",
                    f"    at = {name}",
                    f"    v{index} = default_{index}(locals())",
                    "else:",
                ]
            decoding += _indented(1, _coding(coder.back_as_is, index, field.name, "decode") or ["pass"])
        values = ", ".join(f"{field.name!r}: v{index}" for index, field in enumerate(fields))
        source = [
            "def encode(value):",
            "    if type(value) is not cls:",
            "        return encode_tagged(value)",
            "    at = ''",
            "    try:",
            *_indented(2, ["fields = value.__dict__"] if self.is_model else []),
            *_indented(2, encoding or ["pass"]),
            "    except Refused as refused:",
            "        refused.parts.append('.' + at)",
            "        raise",
            "    except (AttributeError, KeyError):",
            "        raise never_set(value) from None",
            *([f"    return encode_rest(value, {{{values}}})"] if self.is_model else []),
            f"    return {'out' if empty else f'{{{values}}}'}",
            "def decode(data, exactly=False):",
            "    if type(data) is not dict:",
            "        raise not_an_object(data)",
            "    if '$' in data and not exactly:",
            "        return decode_tagged(data)",
            "    at = ''",
            "    try:",
            *_indented(2, decoding or ["pass"]),
            "    except Refused as refused:",
            "        refused.parts.append('.' + at)",
            "        raise",
            "    built = new(cls)",
            *_indented(1, self._building(fields, values, namespace)),
            "    return built",
        ]
        _define(source, namespace, cls.__qualname__)
        return namespace["encode"], namespace["decode"]

    def _building(self, fields: list[_Field], values: str, namespace: dict[str, Any]) -> list[str]:
        """Return lines that put the decoded values into a new object, past any `__setattr__`."""
        if self.is_model:
            namespace["set_fields"] = object.__setattr__
            return [f"set_fields(built, '__dict__', {{{values}}})", "decode_rest(built, data)"]
        lines = []
        in_dict = False
        for index, field in enumerate(fields):
            slot = inspect.getattr_static(self.cls, field.name, None)
            if isinstance(slot, types.MemberDescriptorType):
                namespace[f"set_{index}"] = slot.__set__
                lines.append(f"set_{index}(built, v{index})")
            else:
                in_dict = True
                lines.append(f"fields[{field.name!r}] = v{index}")
        return ["fields = built.__dict__", *lines] if in_dict else lines

    def _default(self, fields: list[_Field], index: int) -> Callable[[dict[str, Any]], Any]:
        """Return a function of the generated code's variables that answers for a missing field."""
        field, earlier = fields[index], fields[:index]

        def missing(variables: dict[str, Any]) -> Any:
            if field.default is None:
                raise _Refused(f"the field {field.name!r} of {self.cls.__qualname__} is missing")
            so_far = {each.name: variables[f"v{place}"] for place, each in enumerate(earlier)}
            try:
                return field.default(so_far)
            except Exception as error:  # a default factory may raise anything
                raise _Refused(f"it is missing, and its default cannot be made: {error!r}") from error

        return missing

    def _not_an_object(self, data: Json) -> _Refused:
        return _Refused(f"expected an object with the fields of {self.cls.__qualname__}, found {_show(data)}")

    def _never_set(self, value: Any) -> _Refused:
        refused = _Refused("this field was never set")
        names = self._model_names if self.is_model else (each.name for each in dataclasses.fields(value))
        refused.parts += [f".{name}" for name in names if not hasattr(value, name)][:1]
        return refused

    # A pydantic model has more than its fields: extra ones, private attributes, and the set of those
    # that were given. Each is stored only where it says something.

    def _encode_rest(self, value: Any, out: dict[str, Json]) -> Json:
        for key in ("extra", "private"):
            rest = getattr(value, f"__pydantic_{key}__", None)
            if rest:
                try:
                    out[f"${key}"] = self.codec._encode_pairs(rest)
                except _Refused as refused:
                    refused.parts.append(f".{key}")
                    raise
        chosen = value.__pydantic_fields_set__
        if chosen != self._model_names:
            out["$set"] = sorted(chosen)
        return out

    @functools.cached_property
    def _model_names(self) -> frozenset[str]:
        return frozenset(cast(Any, self.cls).__pydantic_fields__)

    def _decode_rest(self, built: Any, data: dict[str, Json]) -> None:
        chosen = data.get("$set")
        if chosen is None:
            chosen = self._model_names & data.keys()
        elif type(chosen) is not list or not all(type(each) is str for each in chosen):
            raise _Refused("'$set' must be an array of field names")
        extra, private = self._rest(data, "$extra"), self._rest(data, "$private")
        if extra is None and self._allows_extra:
            extra = {}
        for name, attribute in self._private_attributes.items():
            private = {} if private is None else private
            if name not in private:
                try:
                    default = _private_default(attribute, {**vars(built), **private})
                except Exception as error:  # a default factory may raise anything
                    raise _Refused(f"the default of {name!r} cannot be made: {error!r}") from error
                if default is not PydanticUndefined:
                    private[name] = default
        for name, fill in self._model_slots.items():
            fill(built, {"fields_set": set(chosen), "extra": extra, "private": private}[name])

    @functools.cached_property
    def _model_slots(self) -> dict[str, Callable[[Any, Any], None]]:
        """How to set what a model has beside its fields; a root model has no slot for extra ones."""
        slots = {
            name: inspect.getattr_static(self.cls, f"__pydantic_{name}__", None)
            for name in ("fields_set", "extra", "private")
        }
        return {
            name: slot.__set__ for name, slot in slots.items() if isinstance(slot, types.MemberDescriptorType)
        }

    def _rest(self, data: dict[str, Json], key: str) -> dict[str, Any] | None:
        if key not in data:
            return None
        decode = self.codec.decode_any
        found = _decode_pairs(data[key], decode, decode)
        if not all(type(each) is str for each in found):
            raise _Refused(f"{key!r} must have names as keys")
        return found

    @functools.cached_property
    def _allows_extra(self) -> bool:
        return getattr(self.cls, "model_config", {}).get("extra") == "allow"

    @functools.cached_property
    def _private_attributes(self) -> dict[str, Any]:
        return dict(getattr(self.cls, "__private_attributes__", {}))


def _reading(name: str) -> str:
    if name.isidentifier() and not keyword.iskeyword(name):
        return f"value.{name}"
    return f"getattr(value, {name!r})"


def _refusing(reason: str, record: _Record) -> tuple[Encode, Callable[..., Any]]:
    def encode(value: Any) -> Json:
        if type(value) is not record.cls:
            return record.codec.encode_tagged(value)
        raise _Refused(reason)

    def decode(data: Json, exactly: bool = False) -> Any:
        if type(data) is dict and _TAG in data and not exactly:
            return record.codec.decode_tagged(data)
        raise _Refused(reason)

    return encode, decode


def _why_unbuildable(cls: Any) -> str | None:
    """Say why objects of a class cannot be put together from their fields alone, if so."""
    try:
        object.__new__(cls)
    except TypeError:
        if inspect.isabstract(cls):
            return "it is abstract"
        return "it is built on a class whose own content is not in its fields; hold that in a field"
    if is_model(cls):
        names = list(cls.__pydantic_fields__)
    else:
        names = [each.name for each in dataclasses.fields(cls)]
        if (getattr(cls, "__pydantic_config__", None) or {}).get("extra") == "allow":
            return "it is a dataclass that keeps extra fields; use a pydantic model"
    for name in names:
        if name.startswith(_TAG):
            return f"the name of its field {name!r} begins with '$'"
        attribute = inspect.getattr_static(cls, name, None)
        if hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType):
            # Setting it would run the program's code on stored data.
            return f"its field {name!r} is a property or another descriptor; store a plain field"
    return None


def _dataclass_fields(cls: Any) -> Iterator[_Field]:
    described = getattr(cls, "__pydantic_fields__", {})  # Of pydantic's dataclasses.
    for field in dataclasses.fields(cls):
        if field.name in described:
            yield _Field(field.name, _model_default(described[field.name]))
        elif field.default is not dataclasses.MISSING:
            yield _Field(field.name, _giving(field.default))
        elif field.default_factory is not dataclasses.MISSING:
            yield _Field(field.name, _making(field.default_factory))
        else:
            yield _Field(field.name, None)


def _private_default(attribute: Any, earlier: dict[str, Any]) -> Any:
    if attribute.default_factory is None:
        return copy.deepcopy(attribute.default)
    if getattr(attribute, "default_factory_takes_validated_data", False):
        return attribute.default_factory(earlier)
    return attribute.default_factory()


def _giving(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda earlier: value


def _making(factory: Callable[[], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda earlier: factory()


def _model_fields(cls: Any) -> Iterator[_Field]:
    for name, field in cls.__pydantic_fields__.items():
        yield _Field(name, _model_default(field))


def _model_default(field: Any) -> Callable[[dict[str, Any]], Any] | None:
    if field.is_required():
        return None
    return lambda earlier: field.get_default(call_default_factory=True, validated_data=earlier)


# --- annotations -----------------------------------------------------------------------------------

_UNIONS = (typing.Union, types.UnionType)
_WRAPPERS = (typing.Annotated, typing.Final, typing.ClassVar)

# Where a sequence of any kind is announced, a tuple is the plain form.
_COLLECTION_TARGETS: dict[Any, type] = {
    tuple: tuple,
    list: list,
    set: set,
    frozenset: frozenset,
    Sequence: tuple,
    Iterable: tuple,
    Collection: tuple,
}


def _hints(cls: Any, names: list[str]) -> list[Any]:
    """Resolve the annotations of fields; one that cannot be resolved becomes `Any`, coded by value."""
    if is_model(cls):
        return [cls.__pydantic_fields__[name].annotation for name in names]
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001  # an annotation may be any expression; below, one at a time
        hints = _hints_one_by_one(cls)
    return [hints.get(name, Any) for name in names]


def _hints_one_by_one(cls: Any) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        # A class defined in a function is in no module, but its fields may be of its own type.
        names = {**(vars(module) if module else {}), base.__name__: base}
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if not isinstance(annotation, str):
                hints[name] = annotation
                continue
            try:
                hints[name] = eval(annotation, names, dict(vars(base)))  # the class's own source text
            except Exception:  # noqa: BLE001  # a name of an enclosing function; coded by value
                hints.pop(name, None)
    return hints


def _with_variables(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Put the parameters of a generic class into an annotation; those that are open become `Any`."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, Any)
    wanted = () if isinstance(annotation, type) else getattr(annotation, "__parameters__", ())
    if not wanted:
        return annotation
    return annotation[tuple(variables.get(each, Any) for each in wanted)]


def _bare(annotation: Any) -> Any:
    """Take off what says nothing about the stored form."""
    while True:
        if typing.get_origin(annotation) in _WRAPPERS:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return type(None) if annotation is None else annotation


def _alias_of(annotation: Any) -> Any:
    """Return the `type X = ...` that an annotation is, or is a parametrised use of."""
    for each in (annotation, typing.get_origin(annotation)):
        if type(each).__name__ == "TypeAliasType":
            return each
    return None


def _union_members(annotation: Any) -> Iterator[Any]:
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in _UNIONS:
        for each in typing.get_args(annotation):
            yield from _union_members(each)
    else:
        yield annotation


def _native_kinds(annotation: Any) -> Iterator[type]:
    """Return the types of a union's member that JSON tells apart by itself."""
    origin = typing.get_origin(annotation)
    if annotation in (str, int, bool, type(None), float):
        yield annotation
        if annotation is float:
            yield int
    elif origin is Literal:
        yield from (type(each) for each in typing.get_args(annotation) if type(each) in _ENCODE_NATIVE)
    elif (origin or annotation) in (list, dict):
        yield origin or annotation


# --- scalars ---------------------------------------------------------------------------------------


def _as_it_is(value: Any) -> Json:
    return value


def _encode_int(value: int) -> Json:
    if value.bit_length() > _MAX_INT_BITS:
        raise _Refused("an integer of more than 4,200 digits; store it as text or bytes")
    return value


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value
    return {_TAG: "float", "v": repr(value)}


_ENCODE_NATIVE: dict[type, Encode] = {
    str: _as_it_is,
    bool: _as_it_is,
    type(None): _as_it_is,
    int: _encode_int,
    float: _encode_float,
}


class _Condition(NamedTuple):
    """When a value of a native type is its own JSON form, and the JSON its own value."""

    as_is: str
    back_as_is: str
    what: str


# An integer below the bound is certain to be printable; an infinity or NaN minus itself is NaN.
_SMALL_INT = f"type({_V}) is int and -0x7fffffffffffffff <= {_V} <= 0x7fffffffffffffff"
_FINITE = f"type({_V}) is float and {_V} - {_V} == 0.0"
_TRUTH = f"{_V} is True or {_V} is False"

_NATIVE_CONDITIONS: dict[Any, _Condition] = {
    str: _Condition(f"type({_V}) is str", f"type({_V}) is str", "text"),
    type(None): _Condition(f"{_V} is None", f"{_V} is None", "null"),
    int: _Condition(_SMALL_INT, f"type({_V}) is int", "a whole number"),
    float: _Condition(_FINITE, f"type({_V}) is float or type({_V}) is int", "a number"),
    bool: _Condition(_TRUTH, _TRUTH, "true or false"),
}

# The printer writes these leaves itself, which is faster.
_PRINTED_CONDITIONS: dict[Any, str] = {
    UUID: f"type({_V}) is UUID",
    date: f"type({_V}) is date",
    datetime: f"type({_V}) is datetime and ({_V}.tzinfo is UTC or {_V}.tzinfo is None) and not {_V}.fold",
}
_LEAF_NAMES: dict[str, Any] = {"UUID": UUID, "date": date, "datetime": datetime, "UTC": UTC}


class _Scalar(NamedTuple):
    """A type whose values JSON holds as text or as a number; `encode` may answer a tagged object."""

    kind: type
    tag: str
    encode: Encode
    decode: Decode


def _tagging(scalar: _Scalar) -> Encode:
    tag, encode = scalar.tag, scalar.encode

    def encode_tagged(value: Any) -> Json:
        encoded = encode(value)
        return encoded if type(encoded) is dict else {_TAG: tag, "v": encoded}

    return encode_tagged


def _decode_text(data: Json) -> str:
    if type(data) is dict and data.get(_TAG) == "utf8":
        return _decode_utf8(data)
    return cast(str, _expect(data, str, "text"))


def _parsing(parse: Callable[[str], Any], what: str) -> Decode:
    def decode(data: Json) -> Any:
        text = data if type(data) is str else _decode_text(data)
        try:
            return parse(text)
        except (ValueError, InvalidOperation, OverflowError):
            raise _Refused(f"{_show(text)} is not {what}") from None

    return decode


def _encode_bytes(value: bytes) -> Json:
    return base64.b64encode(value).decode()


def _decode_bytes(data: Json) -> bytes:
    try:
        return base64.b64decode(_decode_text(data), validate=True)
    except (binascii.Error, ValueError):
        raise _Refused("expected base64") from None


def _encode_timedelta(value: timedelta) -> Json:
    return value // timedelta(microseconds=1)


def _decode_timedelta(data: Json) -> timedelta:
    try:
        return timedelta(microseconds=_expect(data, int, "a whole number of microseconds"))
    except OverflowError:
        raise _Refused("the duration is too long") from None


def _encode_windows_path(value: PureWindowsPath) -> Json:
    text = str(value)
    if PureWindowsPath(text) != value:
        raise _Refused(f"the path {text!r} reads as another one when it is loaded; spell it otherwise")
    return text


# .. moments: ISO text, and beside it what ISO has no word for ..


def _encode_moment(value: Any) -> Json:
    zone = value.tzinfo
    if (zone is None or zone is UTC) and not value.fold:
        return value if type(value) is datetime else value.isoformat()
    beside: dict[str, Json] = {}
    if value.fold:
        beside["fold"] = 1
    if type(zone) is timezone:
        if zone.tzname(None) != timezone(zone.utcoffset(None)).tzname(None):
            beside["name"] = zone.tzname(None)
    elif type(zone) is ZoneInfo and _find_zone(zone.key) is zone:
        beside["zone"] = zone.key
        value = value.replace(tzinfo=None)
    elif type(zone) is TzInfo:
        beside["zone"] = ""  # As pydantic's validators make them: an offset of a class of its own.
    elif zone is not None:
        raise _Refused(
            f"a time zone of class {type(zone).__qualname__} ({zone}); use datetime.UTC, "
            "a timezone or a ZoneInfo made by name"
        )
    text = value.isoformat()
    return {_TAG: type(value).__name__, "v": text, **beside} if beside else text


def _decode_moment(parse: Decode) -> Callable[[dict[str, Json]], Any]:
    def decode(data: dict[str, Json]) -> Any:
        moment = parse(data["v"])
        if data.get("fold") == 1:
            moment = moment.replace(fold=1)
        zone: tzinfo | None = moment.tzinfo
        if "zone" in data:
            zone = _decode_zone(data["zone"], zone)
        elif "name" in data and type(zone) is timezone:
            zone = timezone(zone.utcoffset(None), _decode_text(data["name"]))
        return moment.replace(tzinfo=zone)

    return decode


def _decode_zone(key: Json, offset: tzinfo | None) -> tzinfo | None:
    if key == "":
        if type(offset) is not timezone:
            raise _Refused("a time without an offset cannot have pydantic's zone")
        return TzInfo(int(offset.utcoffset(None).total_seconds()))
    zone = _find_zone(_decode_text(key))
    if zone is None:
        raise _Refused(f"the time zone {_show(key)} is not known here; install tzdata")
    return zone


@functools.lru_cache(maxsize=1024)
def _find_zone(key: str | None) -> ZoneInfo | None:
    """Return the zone of that name from the closed list of zones that this machine has.

    `ZoneInfo` imports a package named after the zone if no file bears the name, so only names that
    are known to be zones may reach it.
    """
    if not key or not re.fullmatch(r"[\w+-]+(/[\w+-]+)*", key, re.ASCII):
        return None
    on_disk = any(os.path.isfile(os.path.join(each, key)) for each in zoneinfo.TZPATH)
    if not on_disk and key not in zoneinfo.available_timezones():
        return None
    try:
        return ZoneInfo(key)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


# .. enums ..


def _encode_member(value: Enum) -> Json:
    # Members travel by name, which outlives a change of value; combined flags have no name.
    if isinstance(value, Flag):
        return _encode_int(value.value)
    name = value._name_
    if type(value).__members__.get(name) is not value:
        raise _Refused(f"{value!r} is not a declared member of {type(value).__qualname__}")
    return name


def _decode_member(cls: type[Enum], data: Json) -> Enum:
    if issubclass(cls, Flag):
        return _decode_flags(cls, _expect(data, int, f"the number of a {cls.__qualname__}"))
    member = cls.__members__.get(data) if type(data) is str else None
    if member is None:
        raise _Refused(f"expected a member of {cls.__qualname__}, found {_show(data)}")
    return member


def _decode_flags(cls: type[Flag], number: int) -> Flag:
    found = cls._value2member_map_.get(number)
    if found is None:
        try:
            # Flag's own way to combine members; the class may have put other code in its place.
            found = Flag._missing_.__func__(cls, number)  # type: ignore[attr-defined]  # a classmethod
        except ValueError:
            found = None
    if type(found) is not cls:
        raise _Refused(f"{_show(number)} is not a {cls.__qualname__}")
    return found


_parse_datetime = _parsing(datetime.fromisoformat, "a date and time")
_parse_time = _parsing(time.fromisoformat, "a time")

# By annotation.
_SCALARS: dict[Any, _Scalar] = {
    bytes: _Scalar(bytes, "bytes", _encode_bytes, _decode_bytes),
    UUID: _Scalar(UUID, "uuid", _as_it_is, _parsing(UUID, "a UUID")),
    datetime: _Scalar(datetime, "datetime", _encode_moment, _parse_datetime),
    date: _Scalar(date, "date", _as_it_is, _parsing(date.fromisoformat, "a date")),
    time: _Scalar(time, "time", _encode_moment, _parse_time),
    timedelta: _Scalar(timedelta, "timedelta", _encode_timedelta, _decode_timedelta),
    Decimal: _Scalar(Decimal, "decimal", str, _parsing(Decimal, "a decimal number")),
    Path: _Scalar(type(Path()), "path", str, _parsing(Path, "a path")),
    PurePosixPath: _Scalar(PurePosixPath, "posixpath", str, _parsing(PurePosixPath, "a path")),
    PureWindowsPath: _Scalar(
        PureWindowsPath, "windowspath", _encode_windows_path, _parsing(PureWindowsPath, "a path")
    ),
}


def _decode_tagged_float(data: dict[str, Json]) -> float:
    inner = data["v"]
    if type(inner) is float:
        return inner
    if type(inner) is str and inner in ("nan", "inf", "-inf"):
        return float(inner)
    raise _Refused(f"{_show(inner)} is not a float")


def _on_content(decode: Decode) -> Callable[[dict[str, Json]], Any]:
    return lambda data: decode(data["v"])


def _expecting(kind: type, what: str) -> Callable[[dict[str, Json]], Any]:
    return lambda data: _expect(data["v"], kind, what)


def _decode_utf8(data: dict[str, Json]) -> str:
    try:
        return _decode_bytes(data.get("v")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _Refused("expected the UTF-8 form of a text") from None


_DECODE_TAGGED: dict[str, Callable[[dict[str, Json]], Any]] = {
    "str": _on_content(_decode_text),
    "utf8": _decode_utf8,
    "int": _expecting(int, "a whole number"),
    "bool": _expecting(bool, "true or false"),
    "NoneType": _expecting(type(None), "null"),
    "float": _decode_tagged_float,
    **{each.tag: _on_content(each.decode) for each in _SCALARS.values()},
    "datetime": _decode_moment(_parse_datetime),
    "time": _decode_moment(_parse_time),
}

_BUILT_IN_TYPES: dict[str, type] = {
    f"{each.__module__}:{each.__qualname__}": each
    for each in (
        *(kind for kind in (*_ENCODE_NATIVE, list, dict, tuple, set, frozenset, object)),
        *(scalar.kind for scalar in _SCALARS.values()),
    )
}
"""Classes that a stored value may name without being registered."""


# --- containers ------------------------------------------------------------------------------------


def _in_order(encoded: list[Json]) -> list[Json]:
    """Sort the encoded items of a set, which has no order, so that equal sets are equal bytes."""
    return sorted(encoded, key=_print)


def _as_set(kind: Any, items: list[Any]) -> Any:
    try:
        return kind(items)
    except Exception:  # noqa: BLE001  # an item's own __hash__ or __eq__ may raise anything
        raise _Refused("a set cannot hold a value that can change") from None


def _decode_pairs(data: Json, key: Decode, item: Decode) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for index, pair in enumerate(_expect(data, list, "an array of pairs")):
        if type(pair) is not list or len(pair) != 2:
            raise _Refused(f"entry {index} is not a pair")
        try:
            decoded_key, decoded_item = key(pair[0]), item(pair[1])
        except _Refused as refused:
            refused.parts.append(f"[{index}]")
            raise
        try:
            out[decoded_key] = decoded_item
        except Exception:  # noqa: BLE001  # a key's own __hash__ or __eq__ may raise anything
            raise _Refused(f"entry {index} has a key that cannot be one") from None
    return out


# --- what can change -------------------------------------------------------------------------------

_IMMUTABLE_LEAVES = frozenset(
    (*_ENCODE_NATIVE, *(each.kind for each in _SCALARS.values()), PosixPath, WindowsPath)
)


def _is_frozen(cls: Any) -> bool:
    """Say whether the fields of a record cannot be assigned, and it has nothing beside them that can."""
    if is_model(cls):
        config = cls.model_config
        return (
            bool(config.get("frozen")) and config.get("extra") != "allow" and not cls.__private_attributes__
        )
    # Only what the decorator made: a plain subclass of a frozen dataclass has attributes of its own.
    return "__dataclass_params__" in vars(cls) and bool(cls.__dataclass_params__.frozen)


_EMPTY: Final[tuple[object, ...]] = ()


def _deeply_immutable(value: object) -> bool:
    kind = type(value)
    if kind in _IMMUTABLE_LEAVES:
        return True
    parts_of = _parts_of(cast(Any, kind))
    if parts_of is None:
        return False
    for each in parts_of(value):  # noqa: SIM110  # a generator takes longer than the look
        if not _deeply_immutable(each):
            return False
    return True


def _no_value_changes(mapping: FrozenDict[str, Any]) -> bool:
    for each in mapping.values():  # noqa: SIM110  # a generator takes longer than the look
        if type(each) is not str and not _deeply_immutable(each):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _parts_of(kind: Any) -> Callable[[Any], Iterable[object]] | None:
    """Return what gives the parts of a value that cannot itself change, or None for a kind that can."""
    if issubclass(kind, (Enum, type)):
        return lambda value: ()
    if kind is tuple or kind is frozenset or _is_named_tuple(kind):
        return iter
    if kind is FrozenDict:
        return lambda value: (*value, *value.values())
    if not _is_record(kind) or not _is_frozen(kind):
        return None
    if is_model(kind):
        return lambda value: vars(value).values()
    names = tuple(each.name for each in dataclasses.fields(kind))
    return lambda value: [getattr(value, name, None) for name in names]


# --- JSON text -------------------------------------------------------------------------------------

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels, or contains itself"

# JSON's escapes would join the two halves into one character.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def parse_json(payload: bytes | str) -> Json:
    """Parse JSON text. Raises `DecodeError` for whatever is not JSON."""
    try:
        return from_json(payload, allow_inf_nan=False)
    except (ValueError, TypeError):
        pass  # Not JSON; or a lone surrogate, or more than 200 levels, which it does not take.
    try:
        data = _on_free_stack(_parse_slowly, payload if isinstance(payload, str) else payload.decode())
    except ValueError as error:
        raise DecodeError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise DecodeError("not valid here: nested too deeply") from None
    # How deep the parser itself goes differs between versions of Python; ours does not.
    if not _is_shallow(data):
        raise DecodeError("not valid here: nested too deeply")
    return data


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Made once: json.dumps and json.loads with options make a new encoder or decoder for each call.
_parse_slowly = json.JSONDecoder(parse_constant=_no_constant).decode
_print_escaped = json.JSONEncoder(
    separators=(",", ":"),
    check_circular=False,
    default=lambda leaf: leaf.isoformat() if isinstance(leaf, date) else str(leaf),
).encode


def _encode_and_print(encode: Encode, value: object) -> bytes:
    return _print(encode(value))


def _print(data: Json) -> bytes:
    try:
        return to_json(data)
    except PydanticSerializationError:
        # Too deep; or a lone surrogate, as models do emit them: the escaped form keeps it exactly.
        if not _is_shallow(data):
            raise _Refused(_TOO_DEEP) from None
        return _print_escaped(_without_pairs(data)).encode()


def _is_shallow(data: Json) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each)
            if type(inner) in (dict, list, tuple)
        ]
        if not level:
            return True
    return False


def _without_pairs(data: Json) -> Json:
    """Put texts that hold both halves of a surrogate pair into a form that keeps them apart."""
    if type(data) is str and _PAIR.search(data):
        return {_TAG: "utf8", "v": _encode_bytes(data.encode("utf-8", "surrogatepass"))}
    if type(data) not in (dict, list, tuple):
        return data
    out: Any = {} if type(data) is dict else [None] * len(data)
    for key, item in data.items() if type(data) is dict else enumerate(data):
        try:
            if type(key) is str and _PAIR.search(key):
                raise _Refused("a key with both halves of a surrogate pair; join them to one character")
            out[key] = _without_pairs(item)
        except _Refused as refused:
            refused.parts.append(_step(key))
            raise
    return out


def _on_free_stack(work: Callable[..., T], *arguments: Any) -> T:
    """Do the work; if the caller's stack is too full for it, do it on the fresh one of a thread."""
    try:
        return work(*arguments)
    except RecursionError:
        pass
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*arguments))
        except BaseException as error:  # noqa: BLE001  # carried over to the caller
            failures.append(error)

    thread = threading.Thread(target=run, name="treenail-codec")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


# --- words -----------------------------------------------------------------------------------------


def _expect(data: Json, kind: type, what: str) -> Json:
    if type(data) is not kind:
        raise _Refused(f"expected {what}, found {_show(data)}")
    return data


def _name(annotation: Any) -> str:
    return getattr(annotation, "__qualname__", None) or str(annotation)


def _show(data: Json) -> str:
    if type(data) is dict:
        return "an object"
    if type(data) is list:
        return "an array"
    if type(data) is int and data.bit_length() > _MAX_INT_BITS:
        return "a huge number"
    text = ascii(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _step(key: object) -> str:
    """Return the step of a path that leads into a mapping."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001  # the program's own __repr__ may raise anything
        text = f"<{type(key).__qualname__}>"
    return f"[{text if len(text) <= 80 else text[:77] + '...'}]"


def _why_not(value: object) -> str:
    kind = type(value)
    hint = ""
    for base in (dict, list, tuple, set, frozenset, str, int, float, bytes):
        if isinstance(value, base):
            hint = f"; it is a kind of {base.__name__}: convert it to a plain {base.__name__} first"
            break
    else:
        if callable(value):
            hint = "; functions and other code are never stored"
        elif kind is bytearray or kind is memoryview:
            hint = "; convert it to bytes first"
    return f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored{hint}"


# --- the shared registry ---------------------------------------------------------------------------

type_registry = TypeRegistry()
"""The registry that sessions use unless they are given another."""

codec = Codec(type_registry)
"""The codec on the shared registry."""


def register_type(cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
    """Make a type loadable from stored data, under its own or a given stable name."""
    return type_registry.register(cls, name=name, aliases=aliases)

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
`__post_init__` or a validator. Fields that are missing take their default; a
field that the type no longer has is left out. Anything else that does not fit is
a `DecodeError` with its path.

A type's stable name is `module:qualname` unless it was registered with another.
Types are registered when they are used as a slice, dispatched, or named in a
registered type's fields, and explicitly with `register_type`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import sys
import threading
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from enum import Enum, Flag
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Literal, NoReturn, TypeVar, cast
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.errors import DecodeError, EncodeError, UnknownTypeError, UsageError

Json = Any
"""What `json.loads` returns. JSON is where static types end; `Any` says so once."""

T = TypeVar("T")

_MAX_INT_BITS = 14_000
"""Python refuses to print or parse integers of more than about 4,300 digits."""

_TAG = "$"


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


class _Coder:
    """How one annotation is coded. `immutable` says that a value of it cannot change in place."""

    __slots__ = ("decode", "encode", "immutable")

    def __init__(self, encode: Encode, decode: Decode, *, immutable: bool) -> None:
        self.encode = encode
        self.decode = decode
        self.immutable = immutable


# --- the registry ----------------------------------------------------------------------------------


class TypeRegistry:
    """Which types stored data may name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_name: dict[str, type] = {}
        self._names: dict[type, str] = {}
        self._explicit: set[str] = set()

    def register(self, cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
        """Make a type loadable under a stable name; further names are read but not written.

        Registering the same type again changes nothing. A derived name belongs to the newest type
        that bears it (a reloaded module); a given name belongs to one type only.
        """
        with self._lock:
            known = self._names.get(cls)
            chosen = name or known or f"{cls.__module__}:{cls.__qualname__}"
            for each in (chosen, *aliases):
                holder = self._by_name.get(each)
                if (
                    holder is not None
                    and holder is not cls
                    and (each in self._explicit or name is not None)
                    and (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__)
                ):
                    raise UsageError(
                        f"the type name {each!r} already belongs to {holder.__module__}:"
                        f"{holder.__qualname__}; register {cls.__module__}:{cls.__qualname__} under another"
                    )
            for each in (chosen, *aliases):
                self._by_name[each] = cls
            self._names[cls] = chosen
            if name is not None:
                self._explicit.update((name, *aliases))
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


def _is_model(cls: type) -> bool:
    """Say whether a class is a pydantic model, without importing pydantic for it."""
    return hasattr(cls, "__pydantic_fields__") and hasattr(cls, "__pydantic_validator__")


def _is_record(cls: object) -> bool:
    return isinstance(cls, type) and (dataclasses.is_dataclass(cls) or _is_model(cls))


# --- the codec -------------------------------------------------------------------------------------


class Codec:
    """Encodes and decodes values whose types stand in one registry."""

    def __init__(self, registry: TypeRegistry) -> None:
        self.registry = registry
        self._records: dict[Any, _Record] = {}
        self._lock = threading.RLock()

    # .. events: the type's name travels beside the payload ..

    def encode(self, value: object) -> bytes:
        """Encode a dataclass or pydantic model. Raises `EncodeError` with the path to the field."""
        cls = type(value)
        if not _is_record(cls):
            raise EncodeError(
                f"{cls.__qualname__} is not a dataclass or a pydantic model; wrap the value in one",
                path=cls.__qualname__,
            )
        return self._dump(self.record(cls).encode_fields, value)

    def decode(self, cls: type[T], payload: bytes | str) -> T:
        """Decode what `encode` made of a value of that very class. Raises `DecodeError`."""
        return cast(T, self._load(self.record(cls).decode_fields, payload, cls.__qualname__))

    # .. data: the stored form says itself what it is ..

    def to_data(self, value: object) -> Json:
        """Turn any supported value into JSON data that says itself what it is."""
        try:
            return self.encode_any(value)
        except _Refused as refused:
            raise EncodeError(refused.reason, path=refused.path(type(value).__qualname__)) from None
        except RecursionError:
            raise EncodeError(
                "nested too deeply, or contains itself", path=type(value).__qualname__
            ) from None

    def from_data(self, data: Json, *, root: str = "value") -> object:
        """Turn such data back into the value it stands for."""
        try:
            return self.decode_any(data)
        except _Refused as refused:
            raise _as_decode_error(refused, root) from None
        except RecursionError:
            raise DecodeError("nested too deeply", path=root) from None

    def record_to_data(self, value: object) -> Json:
        """Turn a record into the plain JSON object of its fields, without its name."""
        return json.loads(self.encode(value))

    def record_from_data(self, cls: type[T], data: Json) -> T:
        """Turn such an object back into a record of that class."""
        try:
            return cast(T, self.record(cls).decode_fields(data))
        except _Refused as refused:
            raise _as_decode_error(refused, cls.__qualname__) from None
        except RecursionError:
            raise DecodeError("nested too deeply", path=cls.__qualname__) from None

    def is_immutable(self, value: object, payload: bytes) -> bool:
        """Say whether a value that encoded to `payload` can never change in place."""
        if self.record(type(value)).immutable and b'{"$":' not in payload:
            return True
        return _deeply_immutable(value)

    def _dump(self, encode: Encode, value: object) -> bytes:
        root = type(value).__qualname__
        try:
            data = encode(value)
            text = _print_json(data)
        except _Refused as refused:
            raise EncodeError(refused.reason, path=refused.path(root)) from None
        except RecursionError:
            raise EncodeError("nested too deeply, or contains itself", path=root) from None
        try:
            return text.encode()
        except UnicodeEncodeError:
            # A lone surrogate, as models do emit them: the escaped form keeps it exactly.
            return _print_ascii_json(data).encode()

    def _load(self, decode: Decode, payload: bytes | str, root: str) -> object:
        try:
            return decode(parse_json(payload))
        except _Refused as refused:
            raise _as_decode_error(refused, root) from None
        except RecursionError:
            raise DecodeError("nested too deeply", path=root) from None

    # .. records ..

    def record(self, cls: Any) -> _Record:
        """Return the compiled form of a dataclass or model, or of a parametrised generic one."""
        found = self._records.get(cls)
        if found is None:
            with self._lock:
                found = self._records.get(cls)
                if found is None:
                    origin = typing.get_origin(cls) or cls
                    self.registry.name_of(origin)
                    found = _Record(self, cls, origin)
                    self._records[cls] = found
        return found

    # .. values without an annotation ..

    def encode_any(self, value: object) -> Json:
        """Encode a value by what it is. Arrays stand for lists, objects for dicts with text keys."""
        kind = type(value)
        simple = _ENCODE_NATIVE.get(kind)
        if simple is not None:
            return simple(value)
        if kind is list:
            return self._encode_items(cast("list[object]", value))
        if kind is dict:
            return self._encode_dict(cast("dict[object, object]", value), self.encode_any, self.encode_any)
        return self.encode_tagged(value)

    def encode_tagged(self, value: object) -> Json:
        """Encode a value so that it says itself what it is, wherever it stands."""
        kind = type(value)
        simple = _ENCODE_NATIVE.get(kind)
        if simple is not None:
            native = simple(value)
            return native if type(native) is dict else {_TAG: kind.__name__, "v": native}
        coder = _TAGGED_SCALARS.get(kind)
        if coder is not None:
            tag, encode = coder
            encoded = encode(value)
            return encoded if type(encoded) is dict else {_TAG: tag, "v": encoded}
        if kind in _COLLECTIONS:
            return {_TAG: kind.__name__, "v": self._encode_items(cast("Iterable[object]", value))}
        if kind is frozenset or kind is set:
            return {
                _TAG: kind.__name__,
                "v": self._encode_set(cast("Iterable[object]", value), self.encode_any),
            }
        if kind is dict:
            pairs = self._encode_pairs(cast("dict[object, object]", value), self.encode_any, self.encode_any)
            return {_TAG: "dict", "v": pairs}
        if kind is types.MappingProxyType:
            mapping = cast("Mapping[object, object]", value)
            return {_TAG: "mappingproxy", "v": self._encode_pairs(mapping, self.encode_any, self.encode_any)}
        if isinstance(value, Enum):
            self.registry.name_of(kind)
            return {_TAG: "enum", "t": self.registry.name_of(kind), "v": _encode_member(value)}
        if _is_record(kind):
            fields = self.record(kind).encode_fields(value)
            return {_TAG: "obj", "t": self.registry.name_of(kind), "v": fields}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {_TAG: "namedtuple", "t": self.registry.name_of(kind), "v": self._encode_items(value)}
        if isinstance(value, type):
            return {_TAG: "class", "v": self.registry.name_of(value)}
        raise _Refused(_why_not(value))

    def decode_any(self, data: Json) -> Any:
        """Decode what `encode_any` or `encode_tagged` made."""
        kind = type(data)
        if kind is list:
            return self._decode_items(data, self.decode_any)
        if kind is not dict:
            return data
        if _TAG in data:
            return self._decode_tagged(data)
        out = {}
        for key, item in data.items():
            try:
                out[key] = self.decode_any(item)
            except _Refused as refused:
                refused.parts.append(f"[{key!r}]")
                raise
        return out

    def _decode_tagged(self, data: dict[str, Json]) -> Any:
        tag = data[_TAG]
        if "v" not in data:
            raise _Refused("a tagged value needs its content under 'v'")
        inner = data["v"]
        if tag in _DECODE_TAGGED:
            return _DECODE_TAGGED[tag](data)
        if tag in ("tuple", "list", "set", "frozenset"):
            items = self._decode_items(_expect(inner, list, "an array"), self.decode_any)
            return _build_collection(tag, items)
        if tag in ("dict", "mappingproxy"):
            mapping = self._decode_pairs(inner, self.decode_any, self.decode_any)
            return mapping if tag == "dict" else types.MappingProxyType(mapping)
        if tag == "class":
            return self._resolve(inner)
        if tag in ("obj", "enum", "namedtuple"):
            cls = self._resolve(data.get("t"))
            if tag == "enum" and issubclass(cls, Enum):
                return _decode_member(cls, inner)
            if tag == "namedtuple" and issubclass(cls, tuple) and hasattr(cls, "_fields"):
                items = self._decode_items(_expect(inner, list, "an array"), self.decode_any)
                if len(items) != len(cls._fields):
                    raise _Refused(f"{cls.__qualname__} has {len(cls._fields)} fields, not {len(items)}")
                return tuple.__new__(cls, items)
            if tag == "obj" and _is_record(cls):
                return self.record(cls).decode_fields(inner)
            raise _Refused(f"{data.get('t')!r} is not stored as {tag!r}")
        raise _Refused(f"{tag!r} is not a known tag")

    def _resolve(self, name: Json) -> type:
        if not isinstance(name, str):
            raise _Refused("a type name must be text")
        if not self.registry.knows(name):
            raise _Refused("unknown type", unknown=name)
        return self.registry.resolve(name)

    # .. collections ..

    def _encode_items(self, items: Iterable[object], encode: Encode | None = None) -> list[Json]:
        encode = encode or self.encode_any
        out = []
        for index, item in enumerate(items):
            try:
                out.append(encode(item))
            except _Refused as refused:
                refused.parts.append(f"[{index}]")
                raise
        return out

    def _encode_set(self, items: Iterable[object], encode: Encode) -> list[Json]:
        # Sets have no order; sorting the encoded form makes equal sets equal bytes.
        encoded = self._encode_items(items, encode)
        return sorted(encoded, key=lambda each: json.dumps(each, sort_keys=True))

    def _decode_items(self, data: Json, decode: Decode) -> list[Any]:
        out = []
        for index, item in enumerate(data):
            try:
                out.append(decode(item))
            except _Refused as refused:
                refused.parts.append(f"[{index}]")
                raise
        return out

    def _encode_dict(self, mapping: Mapping[Any, Any], key: Encode, value: Encode) -> Json:
        """Encode as an object if every key is text and none could be mistaken for a tag."""
        if all(type(each) is str for each in mapping) and _TAG not in mapping:
            out = {}
            for each, item in mapping.items():
                try:
                    out[each] = value(item)
                except _Refused as refused:
                    refused.parts.append(f"[{each!r}]")
                    raise
            return out
        return {_TAG: "dict", "v": self._encode_pairs(mapping, key, value)}

    def _encode_pairs(self, mapping: Mapping[Any, Any], key: Encode, value: Encode) -> list[Json]:
        out = []
        for each, item in mapping.items():
            try:
                out.append([key(each), value(item)])
            except _Refused as refused:
                refused.parts.append(f"[{each!r}]")
                raise
        return out

    def _decode_pairs(self, data: Json, key: Decode, value: Decode) -> dict[Any, Any]:
        out = {}
        for index, pair in enumerate(_expect(data, list, "an array of pairs")):
            if type(pair) is not list or len(pair) != 2:
                raise _Refused(f"entry {index} is not a pair")
            try:
                decoded = key(pair[0])
                hash(decoded)
                out[decoded] = value(pair[1])
            except _Refused as refused:
                refused.parts.append(f"[{index}]")
                raise
            except TypeError:
                raise _Refused(f"entry {index} has a key that cannot be one") from None
        return out

    # .. annotations ..

    def coder(self, annotation: Any, variables: Mapping[Any, Any]) -> _Coder:
        """Compile an annotation. What cannot be understood is coded by value, which always works."""
        if isinstance(annotation, TypeVar):
            annotation = variables.get(annotation, Any)
        while True:
            origin = typing.get_origin(annotation)
            if origin in (typing.Annotated, typing.Final, typing.ClassVar):
                annotation = typing.get_args(annotation)[0]
            elif hasattr(annotation, "__supertype__"):
                annotation = annotation.__supertype__
            elif type(annotation).__name__ == "TypeAliasType":
                annotation = annotation.__value__
            else:
                break
        if annotation is None:
            annotation = type(None)
        arguments = typing.get_args(annotation)
        if origin is Literal:
            return self._literal_coder(arguments)
        if origin is typing.Union or origin is types.UnionType:
            return self._union_coder(arguments, variables)
        plain = origin or annotation
        if annotation in _SCALARS:
            return self._scalar_coder(annotation)
        if plain in (tuple, list, set, frozenset) or plain in _ABSTRACT_SEQUENCES:
            return self._collection_coder(plain, arguments, variables)
        if plain in (dict, Mapping):
            return self._mapping_coder(plain, arguments, variables)
        if isinstance(plain, type):
            if issubclass(plain, Enum):
                return self._enum_coder(plain)
            if _is_record(plain):
                return self._record_coder(annotation, plain, arguments, variables)
        return self._any_coder

    @property
    def _any_coder(self) -> _Coder:
        return _Coder(self.encode_any, self.decode_any, immutable=False)

    def _or_tagged(self, decode: Decode) -> Decode:
        """Let a stored value that says itself what it is stand in for the declared form."""

        def either(data: Json) -> Any:
            if type(data) is dict and _TAG in data:
                return self._decode_tagged(data)
            return decode(data)

        return either

    def _scalar_coder(self, kind: Any) -> _Coder:
        accepted, encode_exact, decode_exact = _SCALARS[kind]
        tagged = self.encode_tagged
        if encode_exact is None:

            def encode(value: Any) -> Json:
                return value if type(value) in accepted else tagged(value)
        else:
            exact = encode_exact

            def encode(value: Any) -> Json:
                return exact(value) if type(value) in accepted else tagged(value)

        return _Coder(encode, self._or_tagged(decode_exact), immutable=True)

    def _literal_coder(self, allowed: tuple[Any, ...]) -> _Coder:
        plain = [each for each in allowed if type(each) in (str, int, bool, type(None))]
        known = {(type(each), each) for each in plain}

        def encode(value: Any) -> Json:
            kind = type(value)
            if kind in (str, int, bool) or value is None:
                return value if (kind, value) in known else self.encode_tagged(value)
            return self.encode_tagged(value)

        def decode(data: Json) -> Any:
            if (type(data) is str or type(data) in (int, bool) or data is None) and (
                type(data),
                data,
            ) in known:
                return data
            choices = ", ".join(repr(each) for each in plain)
            raise _Refused(f"expected one of {choices}, found {_show(data)}")

        return _Coder(encode, self._or_tagged(decode), immutable=True)

    def _union_coder(self, members: tuple[Any, ...], variables: Mapping[Any, Any]) -> _Coder:
        others = [each for each in members if each is not type(None) and each is not None]
        optional = len(others) != len(members)
        coders = [self.coder(each, variables) for each in others]
        immutable = all(each.immutable for each in coders)
        if optional and len(others) == 1:
            inner_encode, inner_decode = coders[0].encode, coders[0].decode

            def encode_optional(value: Any) -> Json:
                return None if value is None else inner_encode(value)

            def decode_optional(data: Json) -> Any:
                return None if data is None else inner_decode(data)

            # A member that itself stores null, such as Any, decodes null to None as well.
            return _Coder(encode_optional, decode_optional, immutable=immutable)
        native = {each for each in members if each in (str, int, float, bool)}
        if float in native:
            native.add(int)
        if optional:
            native.add(type(None))

        def encode(value: Any) -> Json:
            kind = type(value)
            if kind in native and (kind is not float or math.isfinite(value)):
                return _ENCODE_NATIVE[kind](value)
            return self.encode_tagged(value)

        def decode(data: Json) -> Any:
            if type(data) in native:
                return data
            raise _Refused(f"expected {_union_text(members)} or a tagged value, found {_show(data)}")

        return _Coder(encode, self._or_tagged(decode), immutable=immutable)

    def _collection_coder(
        self, plain: Any, arguments: tuple[Any, ...], variables: Mapping[Any, Any]
    ) -> _Coder:
        target: type = plain if plain in (tuple, list, set, frozenset) else tuple
        if target is tuple and plain is tuple and arguments and Ellipsis not in arguments:
            return self._fixed_tuple_coder(arguments, variables)
        item = self.coder(arguments[0] if arguments else Any, variables)
        tagged = self.encode_tagged
        inner_encode, inner_decode = item.encode, item.decode

        def encode(value: Any) -> Json:
            if type(value) is not target:
                return tagged(value)
            items = cast("Iterable[object]", value)
            if target in (set, frozenset):
                return self._encode_set(items, inner_encode)
            return self._encode_items(items, inner_encode)

        def decode(data: Json) -> Any:
            items = self._decode_items(_expect(data, list, "an array"), inner_decode)
            return _build_collection(target.__name__, items)

        immutable = item.immutable and target in (tuple, frozenset)
        return _Coder(encode, self._or_tagged(decode), immutable=immutable)

    def _fixed_tuple_coder(self, arguments: tuple[Any, ...], variables: Mapping[Any, Any]) -> _Coder:
        coders = [] if arguments == ((),) else [self.coder(each, variables) for each in arguments]

        def encode(value: Any) -> Json:
            if type(value) is not tuple or len(value) != len(coders):
                return self.encode_tagged(value)
            out = []
            for index, (item, coder) in enumerate(zip(value, coders, strict=True)):
                try:
                    out.append(coder.encode(item))
                except _Refused as refused:
                    refused.parts.append(f"[{index}]")
                    raise
            return out

        def decode(data: Json) -> Any:
            _expect(data, list, "an array")
            if len(data) != len(coders):
                raise _Refused(f"expected {len(coders)} items, found {len(data)}")
            out = []
            for index, (item, coder) in enumerate(zip(data, coders, strict=True)):
                try:
                    out.append(coder.decode(item))
                except _Refused as refused:
                    refused.parts.append(f"[{index}]")
                    raise
            return tuple(out)

        immutable = all(each.immutable for each in coders)
        return _Coder(encode, self._or_tagged(decode), immutable=immutable)

    def _mapping_coder(self, plain: Any, arguments: tuple[Any, ...], variables: Mapping[Any, Any]) -> _Coder:
        key = self.coder(arguments[0] if arguments else Any, variables)
        item = self.coder(arguments[1] if len(arguments) > 1 else Any, variables)
        text_keys = bool(arguments) and arguments[0] is str

        def encode(value: Any) -> Json:
            if type(value) is not dict:
                return self.encode_tagged(value)
            if text_keys:
                if all(type(each) is str for each in value) and _TAG not in value:
                    return self._encode_dict(value, key.encode, item.encode)
                return self.encode_tagged(value)
            return self._encode_pairs(value, key.encode, item.encode)

        def decode(data: Json) -> Any:
            if not text_keys:
                return self._decode_pairs(data, key.decode, item.decode)
            out = {}
            for each, inner in _expect(data, dict, "an object").items():
                try:
                    out[each] = item.decode(inner)
                except _Refused as refused:
                    refused.parts.append(f"[{each!r}]")
                    raise
            return out

        return _Coder(encode, self._or_tagged(decode), immutable=False)

    def _enum_coder(self, cls: type[Enum]) -> _Coder:
        self.registry.name_of(cls)

        def encode(value: Any) -> Json:
            return _encode_member(value) if type(value) is cls else self.encode_tagged(value)

        return _Coder(encode, self._or_tagged(lambda data: _decode_member(cls, data)), immutable=True)

    def _record_coder(
        self, annotation: Any, plain: type, arguments: tuple[Any, ...], variables: Mapping[Any, Any]
    ) -> _Coder:
        if arguments and any(isinstance(each, TypeVar) for each in arguments):
            bound = tuple(
                variables.get(each, Any) if isinstance(each, TypeVar) else each for each in arguments
            )
            try:
                annotation = cast(Any, plain)[bound]
            except TypeError:
                annotation = plain
        record = self.record(annotation)

        def encode(value: Any) -> Json:
            return record.encode_fields(value) if type(value) is plain else self.encode_tagged(value)

        def decode(data: Json) -> Any:
            if type(data) is dict and _TAG in data:
                return self._decode_tagged(data)
            return record.decode_fields(data)

        # A record may hold itself, so whether it is immutable is known only once it is compiled;
        # the owner asks the record, see _Record.immutable.
        return _RecordCoder(encode, decode, record)


class _RecordCoder(_Coder):
    __slots__ = ("record",)

    def __init__(self, encode: Encode, decode: Decode, record: _Record) -> None:
        super().__init__(encode, decode, immutable=False)
        self.record = record


class _Record:
    """A dataclass or pydantic model, compiled on first use (so that types may refer to themselves)."""

    def __init__(self, codec: Codec, annotation: Any, cls: type) -> None:
        self.codec = codec
        self.cls = cls
        self.is_model = _is_model(cls)
        parameters = getattr(cls, "__parameters__", ())
        self.variables = dict(zip(parameters, typing.get_args(annotation), strict=False))
        self._fields: list[tuple[str, Encode, Decode, Callable[[], Any] | None]] | None = None
        self._coders: list[_Coder] = []
        self._immutable: bool | None = None

    @property
    def fields(self) -> list[tuple[str, Encode, Decode, Callable[[], Any] | None]]:
        """Each field's name, coder and default."""
        if self._fields is None:
            self._fields = self._compile()
        return self._fields

    def _compile(self) -> list[tuple[str, Encode, Decode, Callable[[], Any] | None]]:
        hints = _annotations(self.cls)
        out: list[tuple[str, Encode, Decode, Callable[[], Any] | None]] = []
        for name, default in _model_fields(self.cls) if self.is_model else _dataclass_fields(self.cls):
            coder = self.codec.coder(hints.get(name, Any), self.variables)
            self._coders.append(coder)
            out.append((name, coder.encode, coder.decode, default))
        return out

    @property
    def immutable(self) -> bool:
        """Whether every value of exactly this type can never change in place."""
        if self._immutable is None:
            frozen = (
                bool(getattr(self.cls, "model_config", {}).get("frozen"))
                if self.is_model
                else bool(self.cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # a dataclass
            )
            self._immutable = frozen  # Assumed while members that refer back to this type are asked.
            self.fields  # noqa: B018  # compiles
            self._immutable = frozen and all(
                each.record.immutable if isinstance(each, _RecordCoder) else each.immutable
                for each in self._coders
            )
        return self._immutable

    def encode_fields(self, value: Any) -> Json:
        out: dict[str, Json] = {}
        try:
            for name, encode, _, _ in self.fields:
                out[name] = encode(getattr(value, name))
        except _Refused as refused:
            refused.parts.append(f".{name}")
            raise
        except AttributeError:
            raise _Refused(f"the field {name!r} was never set") from None
        if self.is_model:
            self._encode_model_rest(value, out)
        return out

    def _encode_model_rest(self, value: Any, out: dict[str, Json]) -> None:
        extra, private = value.__pydantic_extra__, value.__pydantic_private__
        for key, rest in (("$extra", extra), ("$private", private)):
            if rest:
                try:
                    out[key] = self.codec._encode_pairs(rest, self.codec.encode_any, self.codec.encode_any)
                except _Refused as refused:
                    refused.parts.append(f".{key[1:]}")
                    raise
        chosen = value.__pydantic_fields_set__
        if len(chosen) != len(self.fields):
            out["$set"] = sorted(chosen)

    def decode_fields(self, data: Json) -> Any:
        if type(data) is not dict:
            raise _Refused(
                f"expected an object with the fields of {self.cls.__qualname__}, found {_show(data)}"
            )
        values: dict[str, Any] = {}
        for name, _, decode, default in self.fields:
            if name in data:
                try:
                    values[name] = decode(data[name])
                except _Refused as refused:
                    refused.parts.append(f".{name}")
                    raise
            elif default is not None:
                values[name] = default()
            else:
                raise _Refused(f"the field {name!r} of {self.cls.__qualname__} is missing")
        if self.is_model:
            return self._build_model(values, data)
        built: Any = object.__new__(self.cls)
        for name, item in values.items():
            object.__setattr__(built, name, item)
        return built

    def _build_model(self, values: dict[str, Any], data: dict[str, Json]) -> Any:
        rest: dict[str, Any] = {}
        for key in ("$extra", "$private"):
            decode_any = self.codec.decode_any
            rest[key] = self.codec._decode_pairs(data[key], decode_any, decode_any) if key in data else None
        chosen = data.get("$set")
        if chosen is not None and not (type(chosen) is list and all(type(each) is str for each in chosen)):
            raise _Refused("'$set' must be an array of field names")
        built: Any = object.__new__(self.cls)
        object.__setattr__(built, "__dict__", values)
        allows_extra = getattr(self.cls, "model_config", {}).get("extra") == "allow"
        object.__setattr__(built, "__pydantic_extra__", rest["$extra"] or ({} if allows_extra else None))
        object.__setattr__(built, "__pydantic_fields_set__", set(values if chosen is None else chosen))
        has_private = bool(getattr(self.cls, "__private_attributes__", None))
        object.__setattr__(built, "__pydantic_private__", rest["$private"] or ({} if has_private else None))
        return built


def _dataclass_fields(cls: Any) -> Iterable[tuple[str, Callable[[], Any] | None]]:
    for field in dataclasses.fields(cls):
        default: Callable[[], Any] | None = None
        if field.default is not dataclasses.MISSING:
            default = _constant(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory
        yield field.name, default


def _model_fields(cls: Any) -> Iterable[tuple[str, Callable[[], Any] | None]]:
    for name, field in cls.__pydantic_fields__.items():
        required = field.is_required()
        yield name, None if required else _model_default(field)


def _model_default(field: Any) -> Callable[[], Any]:
    return lambda: field.get_default(call_default_factory=True, validated_data={})


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _annotations(cls: Any) -> dict[str, Any]:
    """Resolve a class's annotations; one that cannot be resolved is left out and coded by value."""
    if _is_model(cls):
        return {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # noqa: BLE001  # an annotation may be any expression; below, one at a time
        pass
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if not isinstance(annotation, str):
                hints[name] = annotation
                continue
            try:
                hints[name] = eval(annotation, dict(names), dict(vars(base)))  # the class's own source text
            except Exception:  # noqa: BLE001  # a name of an enclosing function; coded by value
                hints.pop(name, None)
    return hints


# --- scalars ---------------------------------------------------------------------------------------


def _encode_int(value: int) -> Json:
    if value.bit_length() > _MAX_INT_BITS:
        raise _Refused("an integer of more than 4,300 digits; store it as text or bytes")
    return value


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value
    return {_TAG: "float", "v": repr(value)}


_ENCODE_NATIVE: dict[type, Encode] = {
    str: lambda value: value,
    bool: lambda value: value,
    type(None): lambda value: value,
    int: _encode_int,
    float: _encode_float,
}


def _encode_datetime(value: datetime) -> Json:
    zone = value.tzinfo
    if (zone is None or type(zone) is timezone) and not value.fold:
        return value.isoformat()
    if zone is None or type(zone) is timezone:
        return {_TAG: "datetime", "v": value.isoformat(), "fold": 1}
    if isinstance(zone, ZoneInfo) and zone.key:
        plain = value.replace(tzinfo=None).isoformat()
        return {_TAG: "datetime", "v": plain, "zone": zone.key, "fold": value.fold}
    raise _Refused(
        f"a datetime with a time zone of class {type(zone).__qualname__}; "
        "use datetime.UTC, timezone or ZoneInfo"
    )


def _encode_time(value: time) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise _Refused("a time with a named zone; use datetime.UTC or a fixed offset")
    if value.fold:
        return {_TAG: "time", "v": value.isoformat(), "fold": 1}
    return value.isoformat()


def _encode_member(value: Enum) -> Json:
    # Members travel by name, which outlives a change of value; combined flags have no name.
    if isinstance(value, Flag):
        return value.value
    return value.name


def _decode_member(cls: type[Enum], data: Json) -> Enum:
    if issubclass(cls, Flag):
        if type(data) is not int:
            raise _Refused(f"expected the number of a {cls.__qualname__}, found {_show(data)}")
        try:
            return cls(data)
        except ValueError:
            raise _Refused(f"{data} is not a {cls.__qualname__}") from None
    if type(data) is str and data in cls.__members__:
        return cls.__members__[data]
    raise _Refused(f"expected a member of {cls.__qualname__}, found {_show(data)}")


def _decode_text(data: Json) -> str:
    return cast(str, _expect(data, str, "text"))


def _decode_whole(data: Json) -> int:
    return cast(int, _expect(data, int, "a whole number"))


def _decode_number(data: Json) -> float:
    if type(data) in (int, float):
        return cast(float, data)
    raise _Refused(f"expected a number, found {_show(data)}")


def _decode_flag(data: Json) -> bool:
    return cast(bool, _expect(data, bool, "true or false"))


def _decode_nothing(data: Json) -> None:
    if data is not None:
        raise _Refused(f"expected null, found {_show(data)}")


def _decode_bytes(data: Json) -> bytes:
    try:
        return base64.b64decode(_decode_text(data), validate=True)
    except (binascii.Error, ValueError):
        raise _Refused("expected base64") from None


def _parsing(parse: Callable[[str], Any], what: str) -> Decode:
    def decode(data: Json) -> Any:
        text = _decode_text(data)
        try:
            return parse(text)
        except (ValueError, InvalidOperation, OverflowError):
            raise _Refused(f"{text[:60]!r} is not {what}") from None

    return decode


def _decode_timedelta(data: Json) -> timedelta:
    try:
        return timedelta(microseconds=_decode_whole(data))
    except OverflowError:
        raise _Refused("the duration is too long") from None


_decode_uuid = _parsing(UUID, "a UUID")
_decode_datetime = _parsing(datetime.fromisoformat, "a date and time")
_decode_date = _parsing(date.fromisoformat, "a date")
_decode_time = _parsing(time.fromisoformat, "a time")
_decode_decimal = _parsing(Decimal, "a decimal number")


def _decode_path(kind: type[PurePath]) -> Decode:
    return _parsing(kind, "a path")


def _encode_bytes(value: bytes) -> Json:
    return base64.b64encode(value).decode()


def _encode_timedelta(value: timedelta) -> Json:
    return value // timedelta(microseconds=1)


# Annotation -> (accepted exact types, encoder or None for "as it is", decoder).
_SCALARS: dict[Any, tuple[tuple[type, ...], Encode | None, Decode]] = {
    str: ((str,), None, _decode_text),
    bool: ((bool,), None, _decode_flag),
    int: ((int,), _encode_int, _decode_whole),
    float: ((float, int), lambda v: _ENCODE_NATIVE[type(v)](v), _decode_number),
    type(None): ((type(None),), None, _decode_nothing),
    bytes: ((bytes,), _encode_bytes, _decode_bytes),
    UUID: ((UUID,), str, _decode_uuid),
    datetime: ((datetime,), _encode_datetime, _decode_datetime),
    date: ((date,), lambda v: v.isoformat(), _decode_date),
    time: ((time,), _encode_time, _decode_time),
    timedelta: ((timedelta,), _encode_timedelta, _decode_timedelta),
    Decimal: ((Decimal,), str, _decode_decimal),
    Path: ((type(Path()),), str, _decode_path(Path)),
    PurePosixPath: ((PurePosixPath,), str, _decode_path(PurePosixPath)),
    PureWindowsPath: ((PureWindowsPath,), str, _decode_path(PureWindowsPath)),
}

_TAGGED_SCALARS: dict[type, tuple[str, Encode]] = {
    bytes: ("bytes", _encode_bytes),
    UUID: ("uuid", str),
    datetime: ("datetime", _encode_datetime),
    date: ("date", lambda v: v.isoformat()),
    time: ("time", _encode_time),
    timedelta: ("timedelta", _encode_timedelta),
    Decimal: ("decimal", str),
    type(Path()): ("path", str),
    PurePosixPath: ("posixpath", str),
    PureWindowsPath: ("windowspath", str),
}


def _decode_tagged_datetime(data: dict[str, Json]) -> datetime:
    moment = cast(datetime, _decode_datetime(data["v"]))
    zone = data.get("zone")
    if zone is not None:
        try:
            moment = moment.replace(tzinfo=ZoneInfo(_decode_text(zone)))
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise _Refused(f"the time zone {zone!r} is not known here; install tzdata") from None
    return moment.replace(fold=1) if data.get("fold") == 1 else moment


def _decode_tagged_time(data: dict[str, Json]) -> time:
    moment = cast(time, _decode_time(data["v"]))
    return moment.replace(fold=1) if data.get("fold") == 1 else moment


def _decode_tagged_float(data: dict[str, Json]) -> float:
    inner = data["v"]
    if type(inner) is float:
        return inner
    if inner in ("nan", "inf", "-inf"):
        return float(inner)
    raise _Refused(f"{_show(inner)} is not a float")


def _on_content(decode: Decode) -> Callable[[dict[str, Json]], Any]:
    return lambda data: decode(data["v"])


_DECODE_TAGGED: dict[str, Callable[[dict[str, Json]], Any]] = {
    "str": _on_content(_decode_text),
    "int": _on_content(_decode_whole),
    "bool": _on_content(_decode_flag),
    "NoneType": _on_content(_decode_nothing),
    "float": _decode_tagged_float,
    "bytes": _on_content(_decode_bytes),
    "uuid": _on_content(_decode_uuid),
    "datetime": _decode_tagged_datetime,
    "date": _on_content(_decode_date),
    "time": _decode_tagged_time,
    "timedelta": _on_content(_decode_timedelta),
    "decimal": _on_content(_decode_decimal),
    "path": _on_content(_decode_path(Path)),
    "posixpath": _on_content(_decode_path(PurePosixPath)),
    "windowspath": _on_content(_decode_path(PureWindowsPath)),
}

_COLLECTIONS = (tuple, list)
_ABSTRACT_SEQUENCES = (Sequence, Iterable, Collection)


def _build_collection(name: str, items: list[Any]) -> Any:
    if name == "list":
        return items
    if name == "tuple":
        return tuple(items)
    try:
        return set(items) if name == "set" else frozenset(items)
    except TypeError:
        raise _Refused("a set cannot hold a value that can change") from None


_IMMUTABLE_LEAVES = (
    str,
    int,
    float,
    bool,
    type(None),
    bytes,
    UUID,
    datetime,
    date,
    time,
    timedelta,
    Decimal,
    PosixPath,
    WindowsPath,
    PurePosixPath,
    PureWindowsPath,
)


def _deeply_immutable(value: object) -> bool:
    kind = type(value)
    if kind in _IMMUTABLE_LEAVES or isinstance(value, (Enum, type)):
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(_deeply_immutable(each) for each in value)
    if dataclasses.is_dataclass(kind):
        frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # a dataclass
        fields = dataclasses.fields(kind)
        return bool(frozen) and all(_deeply_immutable(getattr(value, each.name, None)) for each in fields)
    if _is_model(kind):
        frozen = getattr(kind, "model_config", {}).get("frozen")
        rest = getattr(value, "__pydantic_private__", None) or getattr(value, "__pydantic_extra__", None)
        return bool(frozen) and not rest and all(_deeply_immutable(each) for each in vars(value).values())
    return False


# --- words -----------------------------------------------------------------------------------------


def parse_json(payload: bytes | str) -> Json:
    """Parse JSON text. Raises `DecodeError` for whatever is not JSON."""
    try:
        return _parse_text(payload if isinstance(payload, str) else payload.decode())
    except (ValueError, UnicodeDecodeError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise DecodeError("not valid here: nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Made once: json.dumps and json.loads with options build a new encoder and decoder for each call.
_print_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_print_ascii_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_parse_text = json.JSONDecoder(parse_constant=_no_constant).decode


def _expect(data: Json, kind: type, what: str) -> Json:
    if type(data) is not kind:
        raise _Refused(f"expected {what}, found {_show(data)}")
    return data


def _show(data: Json) -> str:
    text = json.dumps(data, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."


def _union_text(members: tuple[Any, ...]) -> str:
    return " | ".join(getattr(each, "__qualname__", None) or str(each) for each in members)


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


def _as_decode_error(refused: _Refused, root: str) -> DecodeError | UnknownTypeError:
    if refused.unknown is not None:
        return UnknownTypeError(refused.unknown, path=refused.path(root))
    return DecodeError(refused.reason, path=refused.path(root))


# --- the shared registry ---------------------------------------------------------------------------

type_registry = TypeRegistry()
"""The registry that sessions use unless they are given another."""

codec = Codec(type_registry)
"""The codec on the shared registry."""


def register_type(cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
    """Make a type loadable from stored data, under its own or a given stable name."""
    return type_registry.register(cls, name=name, aliases=aliases)

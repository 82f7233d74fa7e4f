"""Annotations: how a value is coded where its type was announced.

A value that is exactly what its annotation says is stored in the plain form of that type. Any other names
its type. An annotation that is not understood announces nothing: its values are coded by what they are.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar
from uuid import UUID

from treenail.codec.base import TAG, Coder, Decode, Encode, Json, expect, is_tagged, name_of, show
from treenail.codec.immutability import FrozenDict
from treenail.codec.registry import TypeRegistry, is_model, is_record
from treenail.codec.scalars import NATIVE, SCALARS, decode_member, encode_int, encode_member
from treenail.codec.values import (
    ValueCoder,
    as_set,
    code_items,
    code_values,
    decode_pairs,
    encode_pairs,
    in_order,
)
from treenail.errors import CodecError

_UNIONS = (typing.Union, types.UnionType)
_TEXT = frozenset((str,))
_WRAPPERS = (typing.Annotated, typing.Final, typing.ClassVar)

_NATIVE_WORDS: dict[Any, str] = {
    str: "text",
    type(None): "null",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}

# Where a sequence of any kind is announced, a tuple is the plain form.
_COLLECTIONS: dict[Any, type] = {
    tuple: tuple,
    list: list,
    set: set,
    frozenset: frozenset,
    Sequence: tuple,
    Iterable: tuple,
    Collection: tuple,
}


class AnnotationCoder:
    """Makes the coders of annotations."""

    def __init__(
        self, registry: TypeRegistry, values: ValueCoder, record_coder: Callable[[Any, type], Coder]
    ) -> None:
        self._registry = registry
        self._values = values
        self._record_coder = record_coder
        self.any = Coder(values.encode, values.decode)
        """The coder of an annotation that announces nothing."""

    def coder(self, annotation: Any) -> Coder:
        """Return the coder of an annotation."""
        annotation = _bare(annotation)
        origin = typing.get_origin(annotation)
        arguments = typing.get_args(annotation)
        alias = _alias_of(annotation)
        if alias is not None:
            return self._alias(alias, arguments)
        if origin is Literal:
            return self._literal(arguments)
        if origin in _UNIONS:
            return self._union(annotation)
        if annotation in _NATIVE_WORDS:
            return self._native(annotation)
        if annotation in SCALARS:
            scalar = SCALARS[annotation]
            coder = self._exactly(scalar.kind, scalar.encode, scalar.decode)
            # The printer itself knows UUIDs.
            return coder._replace(plain=frozenset((UUID,))) if annotation is UUID else coder
        plain = origin or annotation
        if plain is tuple and arguments and Ellipsis not in arguments:
            return self._fixed_tuple(arguments)
        if plain in _COLLECTIONS:
            return self._collection(_COLLECTIONS[plain], arguments)
        if plain in (dict, Mapping, FrozenDict) and len(arguments) == 2:
            return self._mapping(*arguments, target=FrozenDict if plain is FrozenDict else dict)
        if isinstance(plain, type):
            if issubclass(plain, Enum):
                return self._enum(plain)
            if is_record(plain):
                return self._record_coder(annotation, plain)
        return self.any

    def _otherwise(self, what: str) -> Callable[[Json], Any]:
        """Return the decoder of data that is not in its announced form: it is tagged, or refused."""

        def decode(data: Json) -> Any:
            if is_tagged(data):
                return self._values.decode_tagged(data)
            raise CodecError(f"expected {what}, found {show(data)}")

        return decode

    def _alias(self, alias: Any, arguments: tuple[Any, ...]) -> Coder:
        @functools.cache
        def named() -> Coder:  # Looked up on use: an alias may name itself, as the type of all JSON does.
            return self.coder(alias.__value__[arguments] if arguments else alias.__value__)

        return Coder(lambda value: named().encode(value), lambda data: named().decode(data))

    def _native(self, kind: Any) -> Coder:
        tagged, otherwise = self._values.encode_tagged, self._otherwise(_NATIVE_WORDS[kind])
        if kind is int:
            return Coder(
                lambda value: encode_int(value) if type(value) is int else tagged(value),
                lambda data: data if type(data) is int else otherwise(data),
            )
        if kind is float:  # An integer may stand for a float.
            return Coder(
                lambda value: NATIVE[type(value)](value) if type(value) in (float, int) else tagged(value),
                lambda data: data if type(data) in (float, int) else otherwise(data),
            )
        return Coder(
            lambda value: value if type(value) is kind else tagged(value),
            lambda data: data if type(data) is kind else otherwise(data),
            frozenset((kind,)),
        )

    def _exactly(self, kind: type, encode: Encode, decode: Decode) -> Coder:
        """Return a coder for the values of exactly one type; any other value names its type."""
        values = self._values
        return Coder(
            lambda value: encode(value) if type(value) is kind else values.encode_tagged(value),
            lambda data: values.decode_tagged(data) if is_tagged(data) else decode(data),
        )

    def _enum(self, cls: type[Enum]) -> Coder:
        self._registry.name_of(cls)
        return self._exactly(cls, encode_member, lambda data: decode_member(cls, data))

    def _literal(self, allowed: tuple[Any, ...]) -> Coder:
        plain = [each for each in allowed if type(each) in (str, int, bool, type(None))]
        known = {kind: {each for each in plain if type(each) is kind} for kind in map(type, plain)}
        otherwise = self._otherwise(f"one of {', '.join(repr(each) for each in plain)}")

        def encode(value: Any) -> Json:
            return value if value in known.get(type(value), ()) else self._values.encode_tagged(value)

        def decode(data: Json) -> Any:
            return data if data in known.get(type(data), ()) else otherwise(data)

        return Coder(encode, decode)

    def _union(self, annotation: Any) -> Coder:
        members = list(_union_members(annotation))
        others = [each for each in members if each is not type(None)]
        if len(others) == 1 and len(members) == 2:
            # One type or None: the type's own form, and null.
            encode_it, decode_it, plain = self.coder(others[0])
            return Coder(
                lambda value: None if value is None else encode_it(value),
                lambda data: None if data is None else decode_it(data),
                plain | {type(None)},
            )
        # Otherwise a value names its type, unless JSON's own types already tell.
        for each in others:
            self.coder(each)  # Which registers what it names.
        native = {kind for each in members for kind in _native_kinds(each)}
        otherwise = self._otherwise(" | ".join(name_of(each) for each in members))
        values = self._values

        def encode(value: Any) -> Json:
            return values.encode(value) if type(value) in native else values.encode_tagged(value)

        def decode(data: Json) -> Any:
            return values.decode(data) if type(data) in native else otherwise(data)

        return Coder(encode, decode)

    def _collection(self, target: Any, arguments: tuple[Any, ...]) -> Coder:
        encode_item, decode_item, _ = self.coder(arguments[0] if arguments else Any)

        def decode(data: Json) -> list[Any]:
            return code_items(expect(data, list, "an array"), decode_item)

        if target in (set, frozenset):
            return self._exactly(
                target,
                lambda value: in_order(code_items(value, encode_item)),
                lambda data: as_set(target, decode(data)),
            )
        return self._exactly(
            target, lambda value: code_items(value, encode_item), lambda data: target(decode(data))
        )

    def _fixed_tuple(self, arguments: tuple[Any, ...]) -> Coder:
        coders = [] if arguments == ((),) else [self.coder(each) for each in arguments]

        def encode(value: tuple[Any, ...]) -> Json:
            if len(value) != len(coders):
                return self._values.encode_tagged(value)
            return code_items(zip(coders, value, strict=True), lambda pair: pair[0].encode(pair[1]))

        def decode(data: Json) -> tuple[Any, ...]:
            if type(data) is not list or len(data) != len(coders):
                raise CodecError(f"expected an array of {len(coders)}, found {show(data)}")
            return tuple(code_items(zip(coders, data, strict=True), lambda pair: pair[0].decode(pair[1])))

        return self._exactly(tuple, encode, decode)

    def _mapping(self, key_type: Any, item_type: Any, target: Any) -> Coder:
        item = self.coder(item_type)
        if _bare(key_type) is not str:
            key = self.coder(key_type)
            return self._exactly(
                target,
                lambda value: encode_pairs(value, key.encode, item.encode),
                lambda data: target(decode_pairs(data, key.decode, item.decode)),
            )

        def encode(value: dict[Any, Any]) -> Json:
            if TAG in value or not _TEXT.issuperset(map(type, value)):
                return self._values.encode_tagged(value)
            return code_values(value, item.encode)

        return self._exactly(
            target, encode, lambda data: target(code_values(expect(data, dict, "an object"), item.decode))
        )


# --- reading annotations ---------------------------------------------------------------------------


def field_hints(cls: Any, names: list[str]) -> list[Any]:
    """Resolve the annotations of fields; where they cannot all be resolved, each becomes `Any`."""
    if is_model(cls):
        return [cls.__pydantic_fields__[name].annotation for name in names]
    try:
        # A class that is declared in a function is in no module, but its fields may be of its own type.
        hints = typing.get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
    except Exception:  # noqa: BLE001  # an annotation may be any expression
        hints = {}
    return [hints.get(name, Any) for name in names]


def with_parameters(annotation: Any, parameters: Mapping[Any, Any]) -> Any:
    """Put the parameters of a generic class into an annotation; those that are open become `Any`."""
    if isinstance(annotation, TypeVar):
        return parameters.get(annotation, Any)
    wanted = () if isinstance(annotation, type) else getattr(annotation, "__parameters__", ())
    return annotation[tuple(parameters.get(each, Any) for each in wanted)] if wanted else annotation


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
    if annotation in NATIVE:
        yield annotation
        if annotation is float:
            yield int
    elif origin is Literal:
        yield from (type(each) for each in typing.get_args(annotation) if type(each) in NATIVE)
    elif (origin or annotation) in (list, dict):
        yield origin or annotation

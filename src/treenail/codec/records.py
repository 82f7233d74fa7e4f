"""Records: dataclasses and pydantic models, stored as the objects of their fields.

An object is put together from its fields: no constructor, `__post_init__`, `__setattr__` or validator
runs. A field that is missing takes its default; a field that the type no longer has is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from pydantic_core import PydanticUndefined

from treenail.codec.annotations import AnnotationCoder, field_hints, with_parameters
from treenail.codec.base import TAG, Coder, Decode, Encode, Json, at, expect, is_tagged
from treenail.codec.registry import is_model
from treenail.codec.values import ValueCoder, decode_pairs
from treenail.errors import CodecError

T = TypeVar("T")

_MISSING = object()
_SPARSE: set[type] = set()


def sparse(cls: type[T]) -> type[T]:
    """Mark a dataclass whose stored form leaves out the fields that are empty, and empty by default.

    Empty are None, False, 0, and empty texts and tuples. It is for types that are stored often and are
    mostly empty. Such a default must never change: it is what older data mean.
    """
    _SPARSE.add(cls)
    return cls


def _left_out(cls: Any) -> dict[str, object]:
    if cls not in _SPARSE:
        return {}
    return {
        each.name: each.default
        for each in dataclasses.fields(cls)
        if type(each.default) in (type(None), bool, int, str, tuple) and not each.default
    }


class Field(NamedTuple):
    """A stored field."""

    name: str
    encode: Encode
    decode: Decode
    plain: frozenset[type]
    """The types whose values are stored as they are."""
    default: Callable[[dict[str, Any]], Any] | None
    """Makes its value from the earlier ones where the stored form lacks it."""
    empty: object
    """The value that is left out of the stored form; `_MISSING` if none is."""


class Record:
    """The coder of one dataclass or model, or of a generic one with its parameters."""

    def __init__(
        self, values: ValueCoder, annotations: AnnotationCoder, cls: type, parameters: tuple[Any, ...]
    ) -> None:
        self.cls = cls
        self._values = values
        self._annotations = annotations
        self._parameters = dict(zip(getattr(cls, "__parameters__", ()), parameters, strict=False))
        reason = _why_unbuildable(cls)
        self._refusal = f"{cls.__qualname__} cannot be stored: {reason}" if reason else None
        self._model = _ModelParts(cls, values) if is_model(cls) else None

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields, found on first use: types may refer to themselves and to each other."""
        cls: Any = self.cls
        defaults = dict(_model_defaults(cls) if self._model else _dataclass_defaults(cls))
        hints = field_hints(cls, list(defaults))
        empty = _left_out(cls)
        return tuple(
            Field(name, *self._field_coder(hint), default, empty.get(name, _MISSING))
            for (name, default), hint in zip(defaults.items(), hints, strict=True)
        )

    def _field_coder(self, hint: Any) -> Coder:
        try:
            return self._annotations.coder(with_parameters(hint, self._parameters))
        except RecursionError:
            raise  # The caller's stack is full, which says nothing about the annotation.
        except Exception:  # noqa: BLE001  # an annotation may be any object
            return self._annotations.any

    # .. where the record was announced ..

    def encode(self, value: Any) -> Json:
        """Encode a value where this class was announced."""
        return self.encode_fields(value) if type(value) is self.cls else self._values.encode_tagged(value)

    def decode(self, data: Json) -> Any:
        """Decode a value where this class was announced; it may name another one."""
        return self._values.decode_tagged(data) if is_tagged(data) else self.decode_fields(data)

    # .. the object of its fields ..

    def encode_fields(self, value: Any) -> Json:
        """Encode a value of exactly this class as the object of its fields."""
        if self._refusal is not None:
            raise CodecError(self._refusal)
        out: dict[str, Json] = {}
        name = ""
        try:
            for name, encode, _, plain, _, empty in self.fields:
                item = getattr(value, name)
                if item is not empty:  # Python has one None, one False, one 0, one "" and one ().
                    out[name] = item if type(item) in plain else encode(item)
        except CodecError as error:
            raise at(f".{name}", error) from None
        except AttributeError:
            if hasattr(value, name):
                raise
            raise CodecError("this field was never set", path=f".{name}") from None
        if self._model is not None:
            self._model.encode(value, out)
        return out

    def decode_fields(self, data: Json) -> Any:
        """Decode an object of fields to a value of this class."""
        if self._refusal is not None:
            raise CodecError(self._refusal)
        expect(data, dict, f"an object with the fields of {self.cls.__qualname__}")
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, _, decode, _, default, _ in self.fields:
                found[name] = decode(data[name]) if name in data else self._missing(name, default, found)
        except CodecError as error:
            raise at(f".{name}", error) from None
        built: Any = object.__new__(self.cls)
        if self._model is not None:
            self._model.decode(built, found, data)
        else:
            for name, item in found.items():
                object.__setattr__(built, name, item)
        return built

    def _missing(
        self, name: str, default: Callable[[dict[str, Any]], Any] | None, earlier: dict[str, Any]
    ) -> Any:
        if default is None:
            raise CodecError(f"the field {name!r} of {self.cls.__qualname__} is missing")
        try:
            return default(earlier)
        except Exception as error:  # a default factory may raise anything
            raise CodecError(f"it is missing, and its default cannot be made: {error!r}") from error


class _ModelParts:
    """What a pydantic model has beside its fields: extra ones, private attributes, the set of given fields.

    Each is stored only where it says something.
    """

    def __init__(self, cls: Any, values: ValueCoder) -> None:
        self._cls = cls
        self._values = values
        self._names = frozenset(cls.__pydantic_fields__)
        # Pydantic's own, past one that the program may have put in its place.
        self._set_state = next(
            vars(base)["__setstate__"]
            for base in cls.__mro__
            if base.__module__.startswith("pydantic.") and "__setstate__" in vars(base)
        )

    def encode(self, value: Any, out: dict[str, Json]) -> None:
        """Add to the object of a model's fields what it has beside them."""
        for key in ("extra", "private"):
            rest = getattr(value, f"__pydantic_{key}__", None)
            if rest:
                try:
                    out[f"${key}"] = self._values.encode_pairs(rest)
                except CodecError as error:
                    raise at(f".{key}", error) from None
        chosen = value.__pydantic_fields_set__
        if chosen != self._names:
            out["$set"] = sorted(chosen)

    def decode(self, built: Any, fields: dict[str, Any], data: dict[str, Json]) -> None:
        """Fill a new model with its fields and with what it has beside them."""
        chosen = data.get("$set")
        if chosen is None:
            chosen = self._names & data.keys()
        elif type(chosen) is not list or not all(type(each) is str for each in chosen):
            raise CodecError("'$set' must be an array of field names")
        extra = self._rest(data, "$extra")
        if extra is None and self._cls.model_config.get("extra") == "allow":
            extra = {}
        private = self._rest(data, "$private")
        for name, attribute in self._cls.__private_attributes__.items():
            private = {} if private is None else private
            if name not in private:
                try:
                    make = attribute.default_factory
                    default = copy.deepcopy(attribute.default) if make is None else make()
                except Exception as error:  # a default factory may raise anything
                    raise CodecError(f"the default of {name!r} cannot be made: {error!r}") from error
                if default is not PydanticUndefined:
                    private[name] = default
        self._set_state(
            built,
            {
                "__dict__": fields,
                "__pydantic_fields_set__": set(chosen),
                "__pydantic_extra__": extra,
                "__pydantic_private__": private,
            },
        )

    def _rest(self, data: dict[str, Json], key: str) -> dict[str, Any] | None:
        if key not in data:
            return None
        found = decode_pairs(data[key], self._values.decode, self._values.decode)
        if not all(type(each) is str for each in found):
            raise CodecError(f"{key!r} must have names as keys")
        return found


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
        if name.startswith(TAG):
            return f"the name of its field {name!r} begins with '$'"
        attribute = inspect.getattr_static(cls, name, None)
        if hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType):
            # Setting it would run the program's code on stored data.
            return f"its field {name!r} is a property or another descriptor; store a plain field"
    return None


_Defaults = Iterator[tuple[str, Callable[[dict[str, Any]], Any] | None]]


def _dataclass_defaults(cls: Any) -> _Defaults:
    described = getattr(cls, "__pydantic_fields__", {})  # Of pydantic's dataclasses.
    for each in dataclasses.fields(cls):
        if each.name in described:
            yield each.name, _model_default(described[each.name])
        elif each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING:
            yield each.name, functools.partial(_default_of, each)
        else:
            yield each.name, None


def _default_of(field: dataclasses.Field[Any], earlier: dict[str, Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _model_defaults(cls: Any) -> _Defaults:
    for name, field in cls.__pydantic_fields__.items():
        yield name, _model_default(field)


def _model_default(field: Any) -> Callable[[dict[str, Any]], Any] | None:
    if field.is_required():
        return None
    return lambda earlier: field.get_default(call_default_factory=True, validated_data=earlier)


def generic_of(annotation: Any) -> tuple[type, tuple[Any, ...]]:
    """Return the class of an annotation, and the parameters that it is given."""
    return typing.get_origin(annotation) or annotation, typing.get_args(annotation)

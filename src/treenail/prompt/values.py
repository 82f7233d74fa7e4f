"""Values as text that a model reads, and as JSON data: the same for the same value, in every process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from treenail.codec import is_model

_PLAIN = frozenset((str, int, bool, type(None)))
"""What is JSON data as it is."""


def is_record(kind: object) -> bool:
    """Say whether a type is a dataclass or a pydantic model."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or is_model(kind))


def fields_of(kind: Any) -> Mapping[str, bool]:
    """Return the constructor's fields of a record type, and whether each one must be given."""
    if is_model(kind):
        return {name: each.is_required() for name, each in kind.model_fields.items()}
    return {
        each.name: each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        for each in dataclasses.fields(kind)
        if each.init
    }


def names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of all fields of a record type, computed ones included."""
    return (
        tuple(kind.model_fields) if is_model(kind) else tuple(each.name for each in dataclasses.fields(kind))
    )


def values_of(record: Any) -> dict[str, object]:
    """Return a record's field values by name, as they are."""
    if is_model(type(record)):
        return {name: getattr(record, name) for name in type(record).model_fields}
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


def as_data(value: Any) -> Any:
    """Turn a value into JSON data. What JSON has no form for becomes its `str`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if is_model(kind):
        return value.model_dump(mode="json", by_alias=True, fallback=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_data(each) for name, each in values_of(value).items()}
    if isinstance(value, Mapping):
        return {_as_key(key): as_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(each) for each in value]
    if isinstance(value, Set):
        # A set has no order of its own, and that of its hashes differs from process to process.
        return sorted((as_data(each) for each in value), key=_as_json)
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError):
        return str(value)


def as_text(value: Any) -> str:
    """Turn a value into the text that stands for it in a prompt.

    Text is itself, an enum member its value; what has a `render()` says it itself; records, lists
    and mappings are JSON; everything else is its `str`.
    """
    if isinstance(value, Enum):
        return as_text(value.value)
    if isinstance(value, str):
        return str(value)
    render = getattr(value, "render", None)
    if callable(render) and not isinstance(value, type):
        return str(render())
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_object or is_model(type(value)) or isinstance(value, (Mapping, list, tuple, Set)):
        return json.dumps(as_data(value), ensure_ascii=False, indent=2)
    return str(value)


def _as_key(key: object) -> str:
    return key if isinstance(key, str) else as_text(key)


def _as_json(data: Any) -> str:
    return json.dumps(data, sort_keys=True)

"""What all parts of the codec use: refusals with their paths, and the tag of a value that names its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from treenail.errors import CodecError

Json = Any
"""What `json.loads` returns. JSON is where static types end; `Any` says so once."""

Encode = Callable[[Any], Json]
Decode = Callable[[Json], Any]

TAG: Final = "$"
"""The key that tells a value that names its own type from an ordinary object."""

MAX_INT_BITS: Final = 14_000
"""Python refuses to print or parse integers of more than about 4,300 digits."""


class Coder(NamedTuple):
    """How the values of one annotation are encoded and decoded."""

    encode: Encode
    decode: Decode
    plain: frozenset[type] = frozenset()
    """The types whose values `encode` returns as they are."""


def at(part: str, error: CodecError) -> CodecError:
    """Put a step in front of an error's path, which grows as the error travels outwards."""
    error.path = part + error.path
    return error


def is_tagged(data: Json) -> bool:
    """Say whether stored data is an object that names its own type."""
    return type(data) is dict and TAG in data


def expect(data: Json, kind: type, what: str) -> Json:
    """Return data of that type, or refuse it."""
    if type(data) is not kind:
        raise CodecError(f"expected {what}, found {show(data)}")
    return data


def name_of(annotation: Any) -> str:
    """Return how an annotation is called in messages."""
    return getattr(annotation, "__qualname__", None) or str(annotation)


def show(data: Json) -> str:
    """Return stored data as a message shows it: in short."""
    if type(data) is dict:
        return "an object"
    if type(data) is list:
        return "an array"
    if type(data) is int and data.bit_length() > MAX_INT_BITS:
        return "a huge number"
    text = ascii(data)
    return text if len(text) <= 60 else text[:57] + "..."


def step(key: object) -> str:
    """Return the step of a path that leads into a mapping."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001  # the program's own __repr__ may raise anything
        text = f"<{type(key).__qualname__}>"
    return f"[{text if len(text) <= 80 else text[:77] + '...'}]"


def why_not(value: object) -> str:
    """Say why a value of an unsupported type cannot be stored, and what to do about it."""
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

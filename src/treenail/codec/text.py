"""JSON text: printed and parsed by pydantic-core, which is several times faster than the standard library.

The standard library does what pydantic-core refuses: halves of surrogate pairs, which models do emit, and
more than 200 levels.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Final, NoReturn

from pydantic_core import PydanticSerializationError, from_json, to_json

from treenail.codec.base import TAG, Json
from treenail.errors import CodecError, DecodeError

MAX_DEPTH: Final = 255
"""How deep arrays and objects may nest in the stored form of a value: as deep as the printer goes."""

TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels, or contains itself"

# JSON's escapes would join the two halves into one character.
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def parse_json(payload: bytes | str) -> Json:
    """Parse JSON text. Raises `DecodeError` for whatever is not JSON."""
    try:
        return from_json(payload, allow_inf_nan=False)
    except (ValueError, TypeError):
        pass
    try:
        text = payload if isinstance(payload, str) else payload.decode()
        data = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DecodeError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise DecodeError("not valid here: nested too deeply") from None
    if _is_too_deep(data):
        raise DecodeError("not valid here: nested too deeply")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def print_json(data: Json) -> bytes:
    """Print JSON data, UUIDs in it as text, as UTF-8. Raises `CodecError` for what is too deep."""
    try:
        return to_json(data)
    except PydanticSerializationError:
        if _is_too_deep(data):
            raise CodecError(TOO_DEEP) from None
        # Half of a surrogate pair: its escaped form keeps it exactly.
        return json.dumps(_without_pairs(data), separators=(",", ":"), default=str).encode()


def _is_too_deep(data: Json) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each)
            if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True


def _without_pairs(data: Json) -> Json:
    """Tag the texts that hold both halves of a surrogate pair, so that they stay apart."""
    if type(data) is str and _PAIR.search(data):
        return {TAG: "utf8", "v": base64.b64encode(data.encode("utf-8", "surrogatepass")).decode()}
    if type(data) is list:
        return [_without_pairs(item) for item in data]
    if type(data) is dict:
        for key in data:
            if _PAIR.search(key):
                raise CodecError(
                    f"the key {key!a} holds both halves of a surrogate pair; join them to one character"
                )
        return {key: _without_pairs(item) for key, item in data.items()}
    return data

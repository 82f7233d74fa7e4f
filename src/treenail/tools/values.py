"""What a tool's return value becomes for the model: text, pictures, or a file. Nothing is dropped in silence.

text                              as it is
a dataclass, model, mapping, ...  JSON; `render()` of the value if it has one
bytes of text                     text
bytes of a picture                a picture in the message
other bytes                       a file in the workspace
a generator or iterator           the list of what it yields, collected as part of the call
anything else                     its own `str()`, or a sentence that says what cannot be shown
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from typing import Any, Final

from pydantic_core import to_jsonable_python

from treenail.errors import ToolError
from treenail.tools.exits import failed_exit

MAX_COLLECTED: Final = 100_000
"""How many items of a generator are collected; one that yields more is a failed call."""

MAX_PICTURES: Final = 20
"""How many pictures of one result are sent to a model."""

MAX_PICTURE_BYTES: Final = 3_500_000
"""The largest picture that is sent to a model; a larger one becomes a file."""

_PICTURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

_ENDINGS: Final = (
    (b"%PDF", ".pdf"),
    (b"PK\x03\x04", ".zip"),
    (b"\x1f\x8b", ".gz"),
    (b"\x89PNG", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
)

_ADVICE: Final = "return text, a dataclass, a model or a mapping, or give it a render() method"

Binary = bytes | bytearray | memoryview


# --- text ----------------------------------------------------------------------------------------------


def as_text(value: object, message: str) -> str:
    """Write a value for the model; `message` is what its tool says about it."""
    try:
        return _as_text(value, message)
    except SystemExit as error:
        raise failed_exit(f"the returned {type(value).__qualname__}", error) from error


def _as_text(value: object, message: str) -> str:
    render = getattr(value, "render", None)
    if callable(render):
        return str(render())
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Binary):
        return _about_bytes(bytes(value), message)
    shown = pictures(value)
    if shown:
        return "\n".join(_about_picture(*each) for each in shown)
    unknown = False

    def other(each: object) -> object:
        nonlocal unknown
        unknown = unknown or each is value
        return _as_data(each)

    try:
        try:
            data = to_jsonable_python(value, fallback=other)
        except UnicodeDecodeError:
            data = to_jsonable_python(value, fallback=other, bytes_mode="base64")
        text = data if unknown and isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        text, unknown = _cannot_be_shown(value), True
    return message if unknown and message != "OK" else text


def _as_data(value: object) -> object:
    """Turn a value that JSON does not know into one that it knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | Set):
        return list(value)
    kind = type(value)
    if kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__:
        return str(value)
    return _cannot_be_shown(value)


def _cannot_be_shown(value: object) -> str:
    return f"(a {type(value).__qualname__}, which cannot be shown: {_ADVICE})"


# --- bytes ---------------------------------------------------------------------------------------------


def pictures(value: object) -> tuple[tuple[str, bytes], ...]:
    """Return the pictures that a value is, each with its media type: bytes, or a sequence of them."""
    if isinstance(value, Binary):
        value = (value,)
    elif not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_PICTURES:
        return ()
    found: list[tuple[str, bytes]] = []
    for each in value:
        if not isinstance(each, Binary):
            return ()
        data = bytes(each)
        kind = _picture_type(data)
        if kind is None:
            return ()
        found.append((kind, data))
    return tuple(found)


def _picture_type(data: bytes) -> str | None:
    if len(data) > MAX_PICTURE_BYTES:
        return None
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _PICTURES if data.startswith(start)), None)


def _about_picture(kind: str, data: bytes) -> str:
    return f"(a picture, {kind}, {len(data):,} bytes)"


def _text_of(data: bytes) -> str | None:
    """Return bytes as text; None if they are not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _about_bytes(data: bytes, message: str) -> str:
    kind = _picture_type(data)
    if kind is not None:
        return _about_picture(kind, data) if message == "OK" else f"{message} {_about_picture(kind, data)}"
    text = _text_of(data)
    if text is not None:
        return text
    return (
        f"({len(data):,} bytes, which cannot be shown and had no place to be kept: a tool with "
        'effects="workspace" and a workspace has one)'
    )


def file_for(value: object, name: str) -> tuple[str, bytes] | None:
    """Return the file that a value has to be kept in, a path and its content; None if it can be shown."""
    if not isinstance(value, Binary):
        return None
    data = bytes(value)
    if _picture_type(data) is not None or _text_of(data) is not None:
        return None
    ending = next((each for start, each in _ENDINGS if data.startswith(start)), ".bin")
    safe = "".join(each if each.isascii() and (each.isalnum() or each in "_-") else "_" for each in name)
    return f"tool-results/{safe[:100]}{ending}", data


# --- generators ----------------------------------------------------------------------------------------


def is_stream(value: object) -> bool:
    """Say whether a value is a generator or another iterator, so that its items have to be collected."""
    kind = type(value)
    return hasattr(kind, "__anext__") or (hasattr(kind, "__next__") and not isinstance(value, io.IOBase))


def collect(name: str, items: Iterator[Any], check: Callable[[], object]) -> list[Any]:
    """Return what an iterator yields. `check` raises when it is time to stop."""
    found: list[Any] = []
    for each in items:
        check()
        _add(name, found, each)
    return found


async def acollect(name: str, items: AsyncIterator[Any]) -> list[Any]:
    """Return what an async iterator yields."""
    found: list[Any] = []
    if not hasattr(items, "aclose"):
        async for each in items:
            _add(name, found, each)
        return found
    async with aclosing(items) as closing:  # type: ignore[type-var]  # it has `aclose`
        async for each in closing:
            _add(name, found, each)
    return found


def _add(name: str, found: list[Any], item: Any) -> None:
    if len(found) == MAX_COLLECTED:
        raise ToolError(
            f"{name} yields more than {MAX_COLLECTED:,} items, which are too many to collect; let it stop "
            "earlier"
        )
    found.append(item)

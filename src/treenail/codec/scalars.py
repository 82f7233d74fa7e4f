"""Values without parts: numbers, texts, moments, paths and members of enums."""

from __future__ import annotations

import base64
import binascii
import functools
import math
import os
import re
import zoneinfo
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from enum import Enum, Flag
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, cast
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic_core import TzInfo

from treenail.codec.base import MAX_INT_BITS, TAG, Decode, Encode, Json, expect, show
from treenail.errors import CodecError

# --- what JSON has itself --------------------------------------------------------------------------


def _itself(value: Any) -> Json:
    return value


def encode_int(value: int) -> Json:
    """Encode an integer that can be printed and parsed again."""
    if value.bit_length() > MAX_INT_BITS:
        raise CodecError("an integer of more than 4,200 digits; store it as text or bytes")
    return value


def _encode_float(value: float) -> Json:
    return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}


NATIVE: dict[type, Encode] = {
    str: _itself,
    bool: _itself,
    type(None): _itself,
    int: encode_int,
    float: _encode_float,
}
"""How the types that JSON has are encoded."""


def decode_text(data: Json) -> str:
    """Decode a text, in either of its two forms."""
    if type(data) is dict and data.get(TAG) == "utf8":
        return _decode_utf8(data)
    return cast(str, expect(data, str, "text"))


def _decode_utf8(data: dict[str, Json]) -> str:
    try:
        return _decode_bytes(data.get("v")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CodecError("expected the UTF-8 form of a text") from None


def _decode_float(data: Json) -> float:
    if type(data) is str and data in ("nan", "inf", "-inf"):
        return float(data)
    return cast(float, expect(data, float, "a float"))


# --- what JSON holds as text or as a number --------------------------------------------------------


class Scalar(NamedTuple):
    """How a type is stored as text or as a number; `encode` may return a tagged object instead."""

    kind: type
    tag: str
    encode: Encode
    decode: Decode


def _parsing(parse: Callable[[str], Any], what: str) -> Decode:
    def decode(data: Json) -> Any:
        text = decode_text(data)
        try:
            return parse(text)
        except (ValueError, InvalidOperation, OverflowError):
            raise CodecError(f"{show(text)} is not {what}") from None

    return decode


def _encode_bytes(value: bytes) -> Json:
    return base64.b64encode(value).decode()


def _decode_bytes(data: Json) -> bytes:
    try:
        return base64.b64decode(decode_text(data), validate=True)
    except (binascii.Error, ValueError):
        raise CodecError("expected base64") from None


def _encode_timedelta(value: timedelta) -> Json:
    return value // timedelta(microseconds=1)


def _decode_timedelta(data: Json) -> timedelta:
    try:
        return timedelta(microseconds=expect(data, int, "a whole number of microseconds"))
    except OverflowError:
        raise CodecError("the duration is too long") from None


def _encode_windows_path(value: PureWindowsPath) -> Json:
    text = str(value)
    if PureWindowsPath(text) != value:
        raise CodecError(f"the path {text!r} reads as another one when it is loaded; spell it otherwise")
    return text


def _encode_moment(value: Any) -> Json:
    """Encode a time as ISO text, and beside it what ISO has no word for."""
    zone = value.tzinfo
    if (zone is None or zone is UTC) and not value.fold:
        return value.isoformat()
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
        raise CodecError(
            f"a time zone of class {type(zone).__qualname__} ({zone}); use datetime.UTC, "
            "a timezone or a ZoneInfo made by name"
        )
    text = value.isoformat()
    return {TAG: type(value).__name__, "v": text, **beside} if beside else text


def _decode_moment(parse: Decode) -> Callable[[dict[str, Json]], Any]:
    def decode(data: dict[str, Json]) -> Any:
        moment = parse(data["v"])
        zone: tzinfo | None = moment.tzinfo
        if "zone" in data:
            zone = _decode_zone(data["zone"], zone)
        elif "name" in data and type(zone) is timezone:
            zone = timezone(zone.utcoffset(None), decode_text(data["name"]))
        return moment.replace(tzinfo=zone, fold=1 if data.get("fold") == 1 else 0)

    return decode


def _decode_zone(key: Json, offset: tzinfo | None) -> tzinfo | None:
    if key == "":
        if type(offset) is not timezone:
            raise CodecError("a time without an offset cannot have pydantic's zone")
        return TzInfo(int(offset.utcoffset(None).total_seconds()))
    zone = _find_zone(decode_text(key))
    if zone is None:
        raise CodecError(f"the time zone {show(key)} is not known here; install tzdata")
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


_parse_datetime = _parsing(datetime.fromisoformat, "a date and time")
_parse_time = _parsing(time.fromisoformat, "a time")

SCALARS: dict[Any, Scalar] = {
    bytes: Scalar(bytes, "bytes", _encode_bytes, _decode_bytes),
    UUID: Scalar(UUID, "uuid", str, _parsing(UUID, "a UUID")),
    datetime: Scalar(datetime, "datetime", _encode_moment, _parse_datetime),
    date: Scalar(date, "date", date.isoformat, _parsing(date.fromisoformat, "a date")),
    time: Scalar(time, "time", _encode_moment, _parse_time),
    timedelta: Scalar(timedelta, "timedelta", _encode_timedelta, _decode_timedelta),
    Decimal: Scalar(Decimal, "decimal", str, _parsing(Decimal, "a decimal number")),
    Path: Scalar(type(Path()), "path", str, _parsing(Path, "a path")),
    PurePosixPath: Scalar(PurePosixPath, "posixpath", str, _parsing(PurePosixPath, "a path")),
    PureWindowsPath: Scalar(
        PureWindowsPath, "windowspath", _encode_windows_path, _parsing(PureWindowsPath, "a path")
    ),
}
"""The types that are stored as text or as a number, by annotation."""


def _on_content(decode: Decode) -> Callable[[dict[str, Json]], Any]:
    return lambda data: decode(data["v"])


DECODE_TAGGED: dict[str, Callable[[dict[str, Json]], Any]] = {
    "str": _on_content(decode_text),
    "utf8": _decode_utf8,
    "int": lambda data: expect(data["v"], int, "a whole number"),
    "bool": lambda data: expect(data["v"], bool, "true or false"),
    "NoneType": lambda data: expect(data["v"], type(None), "null"),
    "float": _on_content(_decode_float),
    **{each.tag: _on_content(each.decode) for each in SCALARS.values()},
    "datetime": _decode_moment(_parse_datetime),
    "time": _decode_moment(_parse_time),
}
"""How a tagged value of these types is decoded, by its tag."""


# --- enums -----------------------------------------------------------------------------------------


def encode_member(value: Enum) -> Json:
    """Encode a member by its name, which outlives a change of its value; combined flags have none."""
    if isinstance(value, Flag):
        return encode_int(value.value)
    name = value._name_
    if type(value).__members__.get(name) is not value:
        raise CodecError(f"{value!r} is not a declared member of {type(value).__qualname__}")
    return name


def decode_member(cls: type[Enum], data: Json) -> Enum:
    """Decode a member of an enum, without running code of the enum."""
    if not issubclass(cls, Flag):
        member = cls.__members__.get(data) if type(data) is str else None
        if member is None:
            raise CodecError(f"expected a member of {cls.__qualname__}, found {show(data)}")
        return member
    number = expect(data, int, f"the number of a {cls.__qualname__}")
    try:
        # Flag's own way to combine members: the class may have put other code in its place.
        found = Flag._missing_.__func__(cls, number)  # type: ignore[attr-defined]  # a classmethod
    except ValueError:
        found = None
    if type(found) is not cls:
        raise CodecError(f"{show(number)} is not a {cls.__qualname__}")
    return cast(Enum, found)

"""JSON schemas as models get them: closed to unknown keys, without titles."""

from __future__ import annotations

from typing import Any

_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords that hold values, not schemas."""


def tidied(schema: Any, *, closed: bool = True, is_map: bool = False) -> Any:
    """Close objects to unknown keys, and drop the titles, which cost tokens and say nothing.

    `is_map` says that the keys of `schema` are names of properties or definitions, not keywords.
    """
    if isinstance(schema, list):
        return [tidied(each, closed=closed) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value
        if key in _VALUES and not is_map
        else tidied(value, closed=closed, is_map=key in ("properties", "$defs") and not is_map)
        for key, value in schema.items()
        if is_map or key != "title"
    }
    if closed and not is_map and out.get("type") == "object" and "properties" in out:
        out["additionalProperties"] = False
    return out

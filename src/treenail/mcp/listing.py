"""A server's list of tools, checked: which of them can be offered to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
from mcp_types import Tool as ServerTool

from treenail.mcp.names import shown_name
from treenail.mcp.pins import PinnedTool

MAX_TOOLS = 500
"""How many tools of one server are taken."""
MAX_SCHEMA_CHARS = 100_000
"""How long the schema of a tool may be, as JSON."""
MAX_DESCRIPTION_CHARS = 10_000
"""How much of a description is taken."""


def pinned(server: str, listed: Sequence[ServerTool]) -> tuple[tuple[PinnedTool, ...], tuple[str, ...]]:
    """Return the tools of a list that can be used, and why the others cannot."""
    found: dict[str, PinnedTool] = {}
    refused: list[str] = []
    for each in listed:
        tool = _pin(server, each)
        problem = _problem(tool, found)
        if problem:
            refused.append(f"{each.name[:128]}: {problem}")
        else:
            found[tool.shown_as] = tool
    return tuple(found.values()), tuple(refused)


def _pin(server: str, tool: ServerTool) -> PinnedTool:
    hints = tool.annotations
    text = (tool.description or tool.title or "").strip() or f"The tool {tool.name} of the server {server}."
    return PinnedTool(
        name=tool.name,
        shown_as=shown_name(server, tool.name),
        description=text[:MAX_DESCRIPTION_CHARS],
        schema=json.dumps(tool.input_schema, sort_keys=True),
        read_only=None if hints is None else hints.read_only_hint,
        destructive=None if hints is None else hints.destructive_hint,
        idempotent=None if hints is None else hints.idempotent_hint,
        open_world=None if hints is None else hints.open_world_hint,
    )


def _problem(tool: PinnedTool, found: Mapping[str, PinnedTool]) -> str:
    """Say why a tool cannot be used; empty if it can."""
    schema = tool.parameters()
    if len(found) >= MAX_TOOLS:
        return f"the server lists more than {MAX_TOOLS} tools"
    if tool.shown_as in found:
        return "the server lists it twice"
    if len(tool.schema) > MAX_SCHEMA_CHARS:
        return f"its schema has {len(tool.schema):,} characters, and at most {MAX_SCHEMA_CHARS:,} are taken"
    if schema.get("type", "object") != "object":
        return f"its schema describes {schema.get('type')!r}, and parameters are an object"
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"its schema is not a JSON schema: {error.message[:200]}"
    except RecursionError:
        return "its schema is nested too deeply"
    return ""


def without_patterns(schema: Any) -> Any:
    """Return a schema without regular expressions: a hostile one takes for ever. The server checks."""
    if isinstance(schema, dict):
        return {
            key: without_patterns(each)
            for key, each in schema.items()
            if not (key == "pattern" and isinstance(each, str)) and key != "patternProperties"
        }
    return [without_patterns(each) for each in schema] if isinstance(schema, list) else schema

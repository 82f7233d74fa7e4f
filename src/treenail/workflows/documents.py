"""Specifications as JSON data and as YAML or JSON files, and the schema of these files."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any, cast

from treenail.errors import UsageError
from treenail.subagents import WORKSPACE_MODES
from treenail.workflows.schemas import first_problem
from treenail.workflows.spec import POSTURES, WorkflowSpec

yaml: Any = importlib.import_module("yaml")  # It comes without types.

MAX_FILE_BYTES = 4_000_000

_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_FLAG: dict[str, Any] = {"type": "boolean"}
_NUMBER: dict[str, Any] = {"type": "number"}
_WHOLE: dict[str, Any] = {"type": "integer"}


def _object(needed: tuple[str, ...], /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(needed),
        "additionalProperties": False,
    }


_STEP = _object(
    ("id",),
    id=_TEXT,
    task=_TEXT,
    agent=_TEXT,
    depends_on=_TEXTS,
    posture={**_TEXT, "enum": list(POSTURES)},
    read_set=_TEXTS,
    write_set=_TEXTS,
    workspace={**_TEXT, "enum": list(WORKSPACE_MODES)},
    apply_from=_TEXTS,
    auto_apply=_FLAG,
    required=_FLAG,
    timeout_s=_NUMBER,
    retries=_WHOLE,
    max_cost_usd=_NUMBER,
    max_steps=_WHOLE,
    output={"type": "object"},
)
_AGENT = _object(
    ("name", "instructions"), name=_TEXT, instructions=_TEXT, tools=_TEXTS, max_iterations=_WHOLE
)
_WORKFLOW = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Treenail workflow",
    **_object(
        ("id", "steps"),
        id=_TEXT,
        name=_TEXT,
        max_concurrency=_WHOLE,
        timeout_s=_NUMBER,
        max_cost_usd=_NUMBER,
        steps={"type": "array", "minItems": 1, "items": _STEP},
        agents={
            "description": "Agents of this file: a list, or a mapping from their names.",
            "anyOf": [{"type": "array", "items": _AGENT}, {"type": "object"}],
        },
    ),
}


def spec_schema() -> dict[str, Any]:
    """Return the JSON schema of a specification, for editors and for models."""
    return copy.deepcopy(_WORKFLOW)


def spec_from_data(data: object, *, where: str = "the workflow") -> WorkflowSpec:
    """Make a specification from JSON data. Raises `UsageError` with the place of the first mistake."""
    if isinstance(data, dict) and isinstance(data.get("agents"), dict):
        named = [
            {"name": name, **each} if isinstance(each, dict) else each
            for name, each in data["agents"].items()
        ]
        data = {**data, "agents": named}
    problem = first_problem(data, _WORKFLOW)
    if problem is not None:
        raise UsageError(f"{where}: {problem}")
    try:
        return WorkflowSpec.from_data(cast("dict[str, Any]", data))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def load_spec(path: str | Path) -> WorkflowSpec:
    """Read a specification from a YAML or JSON file. Raises `UsageError` with the place of a mistake.

    YAML is read as plain data; no object that it names is created.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes; that is not a workflow")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        data = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid {kind}: {error}") from error
    return spec_from_data(data, where=str(path))

"""What the model is given besides the conversation: prompt, tools, and a tool for a structured answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mcp import types as mcp

from treenail.tools import Tool, ToolCall

SERVER = "treenail"
"""The name under which the CLI knows our tools: `mcp__treenail__...`."""

PREFIX = f"mcp__{SERVER}__"
"""What the CLI puts before the names of our tools."""

OUTPUT_TOOL = "structured_output"
"""The tool whose arguments are the structured answer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the model is given besides the conversation; if it changes, the CLI is started anew."""

    system: str
    tools: tuple[Tool[Any, Any], ...]
    schema: str | None
    model: str | None = None
    """Another model than the agent's, if the request names one."""
    max_output_tokens: int | None = None

    @property
    def system_text(self) -> str:
        """The prompt, with a word about how a structured answer is given."""
        if self.schema is None:
            return self.system
        return (
            f"{self.system}\n\nWhen your work is done, give your answer by calling the tool "
            f"{PREFIX}{OUTPUT_TOOL} once, with the answer as its arguments. Do not write it as text."
        )

    @property
    def _is_wrapped(self) -> bool:
        """Whether the answer is wrapped in one argument, because it is not an object itself."""
        return self.schema is not None and json.loads(self.schema).get("type") != "object"

    def has_tool(self, name: str) -> bool:
        """Say whether one of our tools has a name."""
        return any(name == each.name for each in self.tools)

    def listed(self) -> list[mcp.Tool]:
        """Describe our tools to the CLI."""
        found = [
            _listed(each.name, each.description, dict(each.parameters_schema), free=each.effects == "none")
            for each in self.tools
        ]
        if self.schema is not None:
            schema = json.loads(self.schema)
            if self._is_wrapped:
                schema = {"type": "object", "properties": {"answer": schema}, "required": ["answer"]}
            found.append(_listed(OUTPUT_TOOL, "Gives the answer.", schema, free=False))
        return found

    def output_of(self, call: ToolCall) -> str | None:
        """Return the structured answer that a call is, as text; None if it is a call like any other."""
        if self.schema is None or call.name != PREFIX + OUTPUT_TOOL:
            return None
        text = call.arguments_json
        if not self._is_wrapped:
            return text
        try:
            return json.dumps(json.loads(text)["answer"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return text


def _listed(name: str, description: str, schema: dict[str, Any], *, free: bool) -> mcp.Tool:
    data = {
        "name": name,
        "description": description,
        "inputSchema": schema,
        "annotations": {"readOnlyHint": free},
        "_meta": {"anthropic/maxResultSizeChars": 500_000},
    }
    return mcp.Tool.model_validate(data)

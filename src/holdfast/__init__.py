"""Holdfast: a runtime for LLM agents whose runs can be trusted.

These are the quickstart's names; each is loaded when it is first used, so that
`import holdfast` costs next to nothing. Stores and providers are imported by path, such
as `holdfast.log.sqlite.SqliteLog` and `holdfast.providers.scripted.ScriptedProvider`;
the rooms' doors (`holdfast.state`, `holdfast.tools`, ...) list the rest.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from holdfast.agent import Agent, Run
    from holdfast.codec import register_type
    from holdfast.containment import Limits
    from holdfast.errors import HoldfastError
    from holdfast.log import SlicePolicy
    from holdfast.loop import MainLoop
    from holdfast.prompt import MarkdownSection, Prompt
    from holdfast.state import (
        Budget,
        CheckpointStore,
        Deadline,
        ExecutionState,
        ResourceRegistry,
        Session,
        Snapshot,
        event,
        reducer,
    )
    from holdfast.tools.context import ToolContext
    from holdfast.tools.tool import Tool, ToolResult, tool
    from holdfast.turns import ModelAdapter, TurnState
    from holdfast.workspace import Filesystem

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Budget",
    "CheckpointStore",
    "Deadline",
    "ExecutionState",
    "Filesystem",
    "HoldfastError",
    "Limits",
    "MainLoop",
    "MarkdownSection",
    "ModelAdapter",
    "Prompt",
    "ResourceRegistry",
    "Run",
    "Session",
    "SlicePolicy",
    "Snapshot",
    "Tool",
    "ToolContext",
    "ToolResult",
    "TurnState",
    "event",
    "reducer",
    "register_type",
    "tool",
]

_HOMES = {
    "Agent": "holdfast.agent",
    "Budget": "holdfast.state",
    "CheckpointStore": "holdfast.state",
    "Deadline": "holdfast.state",
    "ExecutionState": "holdfast.state",
    "Filesystem": "holdfast.workspace",
    "HoldfastError": "holdfast.errors",
    "Limits": "holdfast.containment",
    "MainLoop": "holdfast.loop",
    "MarkdownSection": "holdfast.prompt",
    "ModelAdapter": "holdfast.turns",
    "Prompt": "holdfast.prompt",
    "ResourceRegistry": "holdfast.state",
    "Run": "holdfast.agent",
    "Session": "holdfast.state",
    "SlicePolicy": "holdfast.log",
    "Snapshot": "holdfast.state",
    "Tool": "holdfast.tools.tool",
    "ToolContext": "holdfast.tools.context",
    "ToolResult": "holdfast.tools.tool",
    "TurnState": "holdfast.turns",
    "event": "holdfast.state",
    "reducer": "holdfast.state",
    "register_type": "holdfast.codec",
    "tool": "holdfast.tools.tool",
}


def __getattr__(name: str) -> _typing.Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

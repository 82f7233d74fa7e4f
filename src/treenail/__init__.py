"""Treenail: a runtime for LLM agents whose runs can be trusted.

These are the quickstart's names; each is loaded when it is first used, so that
`import treenail` costs next to nothing. Stores and providers are imported by path, such
as `treenail.log.sqlite.SqliteLog` and `treenail.providers.scripted.ScriptedProvider`;
the rooms' doors (`treenail.state`, `treenail.tools`, ...) list the rest.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from treenail.agent import Agent, Run
    from treenail.codec import register_type
    from treenail.containment import Limits
    from treenail.errors import TreenailError
    from treenail.log import SlicePolicy
    from treenail.loop import MainLoop
    from treenail.prompt import MarkdownSection, Prompt
    from treenail.state import (
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
    from treenail.tools.context import ToolContext
    from treenail.tools.tool import Tool, ToolResult, tool
    from treenail.turns import ModelAdapter, TurnState
    from treenail.workspace import Filesystem

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Budget",
    "CheckpointStore",
    "Deadline",
    "ExecutionState",
    "Filesystem",
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
    "TreenailError",
    "TurnState",
    "event",
    "reducer",
    "register_type",
    "tool",
]

_HOMES = {
    "Agent": "treenail.agent",
    "Budget": "treenail.state",
    "CheckpointStore": "treenail.state",
    "Deadline": "treenail.state",
    "ExecutionState": "treenail.state",
    "Filesystem": "treenail.workspace",
    "TreenailError": "treenail.errors",
    "Limits": "treenail.containment",
    "MainLoop": "treenail.loop",
    "MarkdownSection": "treenail.prompt",
    "ModelAdapter": "treenail.turns",
    "Prompt": "treenail.prompt",
    "ResourceRegistry": "treenail.state",
    "Run": "treenail.agent",
    "Session": "treenail.state",
    "SlicePolicy": "treenail.log",
    "Snapshot": "treenail.state",
    "Tool": "treenail.tools.tool",
    "ToolContext": "treenail.tools.context",
    "ToolResult": "treenail.tools.tool",
    "TurnState": "treenail.turns",
    "event": "treenail.state",
    "reducer": "treenail.state",
    "register_type": "treenail.codec",
    "tool": "treenail.tools.tool",
}


def __getattr__(name: str) -> _typing.Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'treenail' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

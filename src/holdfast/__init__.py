"""Holdfast: a runtime for LLM agents whose runs can be trusted.

These are the quickstart's names. Stores and providers are imported by path, such as
`holdfast.log.sqlite.SqliteLog` and `holdfast.providers.scripted.ScriptedProvider`; the
rooms' doors (`holdfast.state`, `holdfast.tools`, ...) list the rest.
"""

from holdfast.agent import Agent, Run
from holdfast.codec import register_type
from holdfast.containment import Limits
from holdfast.errors import HoldfastError
from holdfast.log import SlicePolicy
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
from holdfast.turns import TurnState
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

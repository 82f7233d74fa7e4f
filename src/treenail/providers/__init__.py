"""Providers: ways to call a model. Each is imported by path, so that no vendor's SDK is pulled in."""

from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    Provider,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)

__all__ = [
    "ModelEvent",
    "ModelRequest",
    "Provider",
    "ReasoningBlock",
    "ReasoningDelta",
    "Stopped",
    "TextDelta",
    "ToolCallRequested",
    "UsageReported",
]

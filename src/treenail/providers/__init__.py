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
from treenail.providers.retrying import Retrying, RetryPolicy

__all__ = [
    "ModelEvent",
    "ModelRequest",
    "Provider",
    "ReasoningBlock",
    "ReasoningDelta",
    "RetryPolicy",
    "Retrying",
    "Stopped",
    "TextDelta",
    "ToolCallRequested",
    "UsageReported",
]

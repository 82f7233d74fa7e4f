"""The conversation: messages that survive, and the pure function from a log to a provider's input."""

from holdfast.conversation.events import (
    BranchSummary,
    HistoryCompacted,
    ProviderUsage,
    SubagentEvent,
    subagent_event_text,
)
from holdfast.conversation.messages import (
    ContentPart,
    ImagePart,
    InnerMessage,
    ReasoningPart,
    ToolCallRecord,
    enable_inner_message_recording,
    get_inner_messages,
    get_latest_evaluation_id,
    get_pending_tool_calls,
    inner_message_append,
)
from holdfast.conversation.replay import LeftOut, Replay, ReplayCall, Replayer, ReplayItem, replay

__all__ = [
    "BranchSummary",
    "ContentPart",
    "HistoryCompacted",
    "ImagePart",
    "InnerMessage",
    "LeftOut",
    "ProviderUsage",
    "ReasoningPart",
    "Replay",
    "ReplayCall",
    "ReplayItem",
    "Replayer",
    "SubagentEvent",
    "ToolCallRecord",
    "enable_inner_message_recording",
    "get_inner_messages",
    "get_latest_evaluation_id",
    "get_pending_tool_calls",
    "inner_message_append",
    "replay",
    "subagent_event_text",
]

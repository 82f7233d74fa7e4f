"""The conversation: messages that survive, and what a resume needs of them."""

from holdfast.conversation.messages import (
    InnerMessage,
    ToolCallRecord,
    enable_inner_message_recording,
    get_inner_messages,
    get_latest_evaluation_id,
    get_pending_tool_calls,
    inner_message_append,
)

__all__ = [
    "InnerMessage",
    "ToolCallRecord",
    "enable_inner_message_recording",
    "get_inner_messages",
    "get_latest_evaluation_id",
    "get_pending_tool_calls",
    "inner_message_append",
]

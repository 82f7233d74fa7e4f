"""The conversation: messages that survive, and the pure function from a log to a provider's input."""

from treenail.conversation.branches import branch_summary
from treenail.conversation.compaction import (
    CompactionPlan,
    CompactionSettings,
    Compactor,
    compact,
    compacted,
    plan_compaction,
    plan_session,
)
from treenail.conversation.events import (
    BranchSummary,
    ContextPressure,
    HistoryCompacted,
    ProviderUsage,
    SubagentEvent,
    subagent_event_text,
)
from treenail.conversation.excerpts import trimmed
from treenail.conversation.inspection import ReplayInspection, inspect_replay
from treenail.conversation.messages import (
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
from treenail.conversation.pressure import known_window, pressure
from treenail.conversation.replay import LeftOut, Replay, ReplayCall, Replayer, ReplayItem, replay

__all__ = [
    "BranchSummary",
    "CompactionPlan",
    "CompactionSettings",
    "Compactor",
    "ContentPart",
    "ContextPressure",
    "HistoryCompacted",
    "ImagePart",
    "InnerMessage",
    "LeftOut",
    "ProviderUsage",
    "ReasoningPart",
    "Replay",
    "ReplayCall",
    "ReplayInspection",
    "ReplayItem",
    "Replayer",
    "SubagentEvent",
    "ToolCallRecord",
    "branch_summary",
    "compact",
    "compacted",
    "enable_inner_message_recording",
    "get_inner_messages",
    "get_latest_evaluation_id",
    "get_pending_tool_calls",
    "inner_message_append",
    "inspect_replay",
    "known_window",
    "plan_compaction",
    "plan_session",
    "pressure",
    "replay",
    "subagent_event_text",
    "trimmed",
]

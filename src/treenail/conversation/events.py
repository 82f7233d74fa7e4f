"""The events of a conversation besides its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from treenail.codec import sparse
from treenail.log import Channel, SlicePolicy
from treenail.state import TokenUsage, event
from treenail.tools import EndedCall, RolledBack

CompactionTrigger = Literal["manual", "pressure", "overflow"]
"""Why a conversation was compacted: on request, because the context was nearly full, or after a refusal."""

SummaryStrategy = Literal["deterministic", "model", "deterministic_fallback"]
"""Who wrote a summary: this code, the model, or this code because the model's was unusable."""


@event(name="treenail.HistoryCompacted", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class HistoryCompacted:
    """Everything up to `to_seq` is from now on told to the model as this summary.

    The log keeps it all; only what is sent becomes shorter. The newest compaction counts.
    """

    summary: str
    from_seq: int
    to_seq: int
    strategy: SummaryStrategy
    trigger: CompactionTrigger
    source_event_count: int = 0
    """How many events of the conversation the summary stands for, those of earlier summaries included."""
    tail_event_count: int = 0
    """How many events of the conversation are still told as they are."""
    event_counts: tuple[tuple[str, int], ...] = ()
    """How many events of each kind lie in the range, audit included."""
    tool_calls: tuple[tuple[str, int], ...] = ()
    files_touched: tuple[str, ...] = ()
    open_tasks: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()
    """What the summary does not carry, and what went wrong while it was made."""


@event(name="treenail.BranchSummary", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class BranchSummary:
    """What was tried in the branch that a fork left behind, told to the model that continues."""

    summary: str
    from_session: str
    from_seq: int
    to_seq: int
    strategy: SummaryStrategy = "deterministic"
    limitations: tuple[str, ...] = ()


@event(name="treenail.SubagentEvent", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class SubagentEvent:
    """Something happened to a child session: it was queued, it started, it ended.

    The parent's model is told about endings that it has to reason about (`TOLD_SUBAGENT_EVENTS`);
    everything else is kept for audit.
    """

    event: str
    """What happened: `queued`, `started`, `finished`, `failed`, `timed_out`, `cancelled`, `detached` ..."""
    subagent_id: str
    child_session_id: str
    agent: str
    task: str
    status: str
    """How the child stands after it."""
    depth: int = 1
    max_depth: int = 1
    timeout_ms: int | None = None
    workspace_mode: str = ""
    workspace: str | None = None
    summary: str = ""
    """What the child has to say for itself, if it ended with something usable."""
    log_paths: tuple[str, ...] = ()
    """Where the child's own log is."""
    reason: str = ""
    """Why it ended, if it did not end by itself."""
    elapsed_ms: int | None = None
    """How long it ran; at least so long, if its process died before it could say; None if that is unknown."""
    deadline_at: datetime | None = None
    next_actions: tuple[str, ...] = ()
    retry_of: str | None = None
    """The subagent that this one is another attempt of."""
    attempt: int = 1
    artifacts: tuple[str, ...] = ()
    """What the child left behind for the parent to look at, such as the id of a diff."""
    call_id: str | None = None
    """The parent's tool call that asked for it, so that a call that is run again asks for nothing twice."""
    max_steps: int | None = None
    """How many calls it may make."""
    max_cost_usd: float | None = None
    """What it may spend."""


TOLD_SUBAGENT_EVENTS = ("finished", "failed", "cancelled", "timed_out")
"""The endings of a child that its parent's model is told about."""

MAX_TOLD_CHARS = 8_000
"""How much of a child's summary its parent's model is told."""


MAX_TOLD_CALLS = 50
"""How many undone calls the model is told by name."""


def subagent_event_text(event: SubagentEvent) -> str | None:
    """Write what the parent's model is told about a child, or None if the event is for audit only."""
    if event.event not in TOLD_SUBAGENT_EVENTS:
        return None
    lines = [
        f"Subagent {event.subagent_id} ({event.agent}): {event.event.replace('_', ' ')}.",
        f"Task: {_shortened(event.task, 500)}",
    ]
    if event.attempt > 1 or event.retry_of:
        lines.append(f"Attempt: {event.attempt}" + (f", after {event.retry_of}" if event.retry_of else ""))
    if event.reason:
        lines.append(f"Reason: {_shortened(event.reason, 1_000)}")
    if event.timeout_ms is not None and event.event == "timed_out":
        lines.append(f"Time limit: {event.timeout_ms} ms")
    if event.summary:
        lines.append(f"Summary:\n{_shortened(event.summary, MAX_TOLD_CHARS)}")
    if event.artifacts:
        lines.append(f"Left behind: {', '.join(event.artifacts[:20])}")
    if event.next_actions:
        lines.append("Next: " + "; ".join(event.next_actions[:10]))
    return "\n".join(lines)


def rollback_text(event: RolledBack) -> str | None:
    """Write what the model is told about calls that were undone or stand again; None if there are none."""
    who = f"A person ({event.by})" if event.by else "A person"
    lines = []
    if event.undone:
        lines.append(
            f"{who} undid these calls: {_listed(event.undone)}. Files and state are as they were before "
            "them, whatever their results say."
        )
    if event.redone:
        lines.append(f"{who} took an undo back: these calls stand again: {_listed(event.redone)}.")
    return "\n".join(lines) or None


def _listed(calls: Sequence[EndedCall]) -> str:
    shown = ", ".join(f"{each.tool_name} ({each.call_id})" for each in calls[-MAX_TOLD_CALLS:])
    more = len(calls) - MAX_TOLD_CALLS
    return f"{more} earlier ones, {shown}" if more > 0 else shown


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} characters left out)"


@event(name="treenail.ProviderUsage", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class ProviderUsage:
    """One model call: what it used, and which input it was sent. Never replayed."""

    provider: str
    model: str
    call_index: int
    usage: TokenUsage
    cost_usd: float | None = None
    stop_reason: str = ""
    input_items: int = 0
    prefix_hash: str = ""
    """The beginning of the hash of the input that was sent."""
    extends_previous: bool = True
    """Whether the previous call's input is a prefix of this one: if not, the provider's cache was missed."""
    output_truncated: bool = False
    notes: tuple[str, ...] = ()
    """What was cut or mended in the answer before it was recorded."""
    purpose: Literal["answer", "summary"] = "answer"
    """What the model was asked for: an answer in the conversation, or a summary of it."""
    context_tier: str = ""
    """How full the model's context was, by the estimate before the call; empty if its size is not known."""
    context_ratio: float | None = None


PressureTier = Literal["none", "advisory", "warning", "critical"]
"""How full a model's context is: under 70 %, under 80 %, under 90 %, more."""


@event(name="treenail.ContextPressure", channel=Channel.LIVE)
@dataclass(frozen=True, slots=True)
class ContextPressure:
    """How full the model's context is. Published while a turn runs, never logged."""

    tier: PressureTier
    ratio: float
    tokens: int
    window: int
    next_actions: tuple[str, ...] = ()

"""What the log keeps of a conversation besides its messages."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.log.event import Channel, SlicePolicy
from holdfast.state.budget import TokenUsage
from holdfast.state.events import event


@event(name="holdfast.HistoryCompacted", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class HistoryCompacted:
    """Everything up to `to_seq` is from now on told to the model as this summary.

    The log keeps it all; only what is sent becomes shorter. The newest compaction counts.
    """

    summary: str
    from_seq: int
    to_seq: int
    strategy: str
    """How the summary was made: `deterministic` or `model`."""
    trigger: str
    """Why: `manual`, `pressure` or `overflow`."""
    source_event_count: int = 0
    tail_event_count: int = 0
    tool_calls: tuple[tuple[str, int], ...] = ()
    files_touched: tuple[str, ...] = ()
    open_tasks: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()


@event(name="holdfast.BranchSummary", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class BranchSummary:
    """What was tried in the branch that a fork left behind, told to the model that goes on."""

    summary: str
    from_session: str
    from_seq: int
    to_seq: int
    strategy: str = "deterministic"
    limitations: tuple[str, ...] = ()


@event(name="holdfast.ProviderUsage", policy=SlicePolicy.LOG)
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
    """The hash of the input that was sent."""
    extends_previous: bool = True
    """Whether the previous call's input is a prefix of this one: if not, the provider's cache was missed."""
    output_truncated: bool = False
    notes: tuple[str, ...] = ()
    """What was cut or mended in the answer before it was recorded."""

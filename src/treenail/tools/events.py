"""What the log keeps of tool calls. All of it is history: no rollback removes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from uuid import UUID

from treenail.clock import new_id
from treenail.codec import FrozenDict, sparse
from treenail.log import Channel, SlicePolicy
from treenail.sandbox import Refusal
from treenail.state import RunContext, TokenUsage, event
from treenail.tools.tool import Effects, ToolResult
from treenail.workspace import FilesystemSnapshot

Way = Literal["layer", "scan"]
"""How a command's changes are told from others': it works on a layer, or the tree is scanned around it."""

Outcome = Literal["ok", "failed", "invalid", "denied", "timed_out", "interrupted", "conflict", "unknown"]
"""How a call ended: kept; failed by itself; bad arguments; refused by a policy or a person; out of time;
cut off by a cancellation or a crash and rolled back; not applied, because somebody else changed the same
files meanwhile; cut off outside, so that nobody knows."""


@event(name="treenail.ToolStarted", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A call with effects is about to run. From here on a crash can be undone."""

    call_id: str
    attempt_id: str
    """Which attempt at the call this is; `ToolInvoked` with the same one ends it."""
    tool_name: str
    effects: Effects
    foreign: bool = False
    idempotent: bool = False
    on_unknown: Literal["tell", "hold"] = "tell"
    workspace: FilesystemSnapshot | None = None
    """The workspace before the call."""


@event(name="treenail.ToolInvoked", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class ToolInvoked:
    """A call has ended, one way or another."""

    prompt_name: str
    adapter: str
    name: str
    params: FrozenDict[str, object]
    """The arguments as the model sent them, long texts shortened; empty if they could not be read."""
    result: ToolResult[object]
    """Message and success. The value is not repeated here: a kept one stands in its own slice."""
    session_id: UUID
    created_at: datetime
    usage: TokenUsage | None = None
    call_id: str | None = None
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_id)
    attempt_id: str = ""
    """The attempt whose `ToolStarted` this ends; empty for a call that had none."""
    outcome: Outcome = "ok"
    elapsed_ms: float = 0.0
    workspace: FilesystemSnapshot | None = None
    """The workspace after the call, if the call has changed it; else it is where the call began."""
    conflicts: tuple[str, ...] = ()
    """Paths that a rollback left alone because somebody else had changed them."""
    kept: tuple[str, ...] = ()
    """Paths that a rollback took away without knowing whose they were: `treenail recover` has them."""
    hold_id: str = ""
    """The hold that a person had to answer before the call ran."""
    batch_events: int = 0
    """How many events right before this one belong to the same append: what the call changed and said."""

    @property
    def rendered_output(self) -> str:
        """What the model was told, shortened."""
        return self.result.message

    @property
    def success(self) -> bool:
        """Whether the call was kept."""
        return self.result.success


@event(name="treenail.CommandRan", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CommandRan:
    """A command of a call has ended; its call may still fail."""

    call_id: str
    confinement: str
    """What held it: `none`, or for example `bubblewrap, no network`."""
    refused: tuple[Refusal, ...] = ()
    """What the sandbox refused, as far as the command's output tells."""
    way: Way = "scan"
    """How its changes were told from others': on a layer of its own, or by scans of the workspace."""
    because: str = ""
    """Why it did not work on a layer, or was run again without one."""
    exit_code: int | None = None
    """How it ended; None if it was stopped, or in a log of an older version."""


@event(name="treenail.ToolHeld", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ToolHeld:
    """A call waits for a person, and nothing of it was kept. It has begun only if an MCP server asks."""

    call_id: str
    tool_name: str
    arguments: str
    reason: str
    created_at: datetime
    attempt_id: str = ""
    """The attempt whose outcome nobody knows, if that is what is asked about; else the question is whether
    the call may run at all."""
    hold_id: str = field(default_factory=lambda: new_id().hex)
    is_question: bool = False
    """Whether the model or an MCP server wants an answer in words, and not a permission."""

    @property
    def is_of_server(self) -> bool:
        """Whether an MCP server asks something in the middle of the call."""
        return self.attempt_id.startswith("mcp:")

    @property
    def wants_fields(self) -> bool:
        """Whether it asks for the fields of a form: a yes has them as its note."""
        return self.attempt_id.startswith("mcp:form:")


@event(name="treenail.HoldAnswered", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class HoldAnswered:
    """A person answered a hold."""

    call_id: str
    approved: bool
    note: str = ""
    answered_by: str = ""
    hold_id: str = ""
    """The hold that it answers."""
    arguments: str | None = None
    """JSON text that the call runs with instead of its own; None to leave them as they are."""


@event(name="treenail.OutboxPut", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class OutboxPut:
    """A committed call wants this delivered outside. It stands in the log only if the call was kept."""

    key: str
    """The same for every attempt at the call and every delivery: what a receiver deduplicates by."""
    topic: str
    payload: object
    call_id: str


@event(name="treenail.OutboxDelivered", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class OutboxDelivered:
    """A message was handed over; it is not delivered again."""

    key: str


@event(name="treenail.OutboxFailed", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class OutboxFailed:
    """A delivery failed; it will be tried again."""

    key: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class EndedCall:
    """One call that has ended: its id, its tool, and the event that ended it (an id may be used again)."""

    call_id: str
    tool_name: str
    seq: int


@event(name="treenail.RolledBack", channel=Channel.REPLAY, policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class RolledBack:
    """Files and state went to where they were after an earlier event: calls were undone, or stand again."""

    rollback_id: str
    action: Literal["rollback", "undo", "redo"]
    to_seq: int
    """Everything after this event no longer counts."""
    from_seq: int
    """The newest event before it: where a redo goes back to."""
    at: datetime
    by: str = ""
    undone: tuple[EndedCall, ...] = ()
    """The calls that no longer stand, oldest first."""
    redone: tuple[EndedCall, ...] = ()
    """The calls that were undone and stand again."""
    paths: tuple[str, ...] = ()
    """The files that were changed by it."""
    kept: tuple[str, ...] = ()
    """Those of them that somebody else may have written: they were kept (`treenail recover`)."""
    notes: tuple[str, ...] = ()
    """What was left as it is, and why."""
    workspace: FilesystemSnapshot | None = None
    """The workspace before it."""
    after: FilesystemSnapshot | None = None
    """The workspace after it."""
    takes_back: str = ""
    """The rollback that a redo takes back."""


@event(name="treenail.ForkMade", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class ForkMade:
    """Another session began as a copy of this one, up to a tool call."""

    to_session: str
    call_id: str
    side: Literal["before", "after"]
    workspace: str | None = None
    by: str = ""


@event(name="treenail.SessionForked", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class SessionForked:
    """This session began as a copy of another one, up to an event. Its workspace is its own."""

    from_session: str
    at_seq: int
    """The last event that both have in common."""
    call_id: str
    """The tool call at whose boundary they part."""
    side: Literal["before", "after"]
    workspace: str | None = None
    """The directory of its workspace, so that a resume finds it; None for one in memory."""
    by: str = ""

"""The one view of a run that every presenter draws: frozen values, made by `treenail.history.projection`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from typing import Any, Literal

from treenail.conversation import ContextPressure, SubagentEvent
from treenail.turns import PlanEntry, ToolCallBegan, TurnState, UsageChanged

ItemKind = Literal[
    "user",
    "notice",
    "text",
    "answer",
    "draft",
    "partial",
    "model",
    "tool",
    "hold",
    "feedback",
    "check",
    "judge",
    "compaction",
    "branch",
    "fork",
    "subagent",
    "workflow",
    "ceilings",
    "limit",
    "attention",
    "restored",
    "undo",
    "ending",
    "unknown",
]
"""The kind of an item. Only `answer` is a clean answer."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that happened in a turn."""

    kind: ItemKind
    seq: int
    """The event that it comes from; the newest one, if several made it."""
    text: str = ""
    title: str = ""
    """A name: the tool's, the judge's, the kind of an ending."""
    status: str = ""
    """Its state: for a tool `pending`, `running`, `kept`, `failed` ...; for an ending the derived state."""
    is_good: bool = True
    """False for whatever a screen must not show as a success."""
    call_id: str = ""
    arguments: str = ""
    elapsed_ms: float | None = None
    diff: str | None = None
    """The call whose diff can be shown, if it may have changed files."""
    undone: str = ""
    """By whom and when the call was undone, if it no longer stands; its status is `undone` then."""
    next_actions: tuple[str, ...] = ()
    first_seq: int = 0
    """The event that it began with."""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    """None while it is under way; the same as `started_at` for what takes no time."""
    usage: Usage | None = None
    """For a model call, what it used; None if it never said."""

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls have used."""

    model_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    """None while no call has reported its cost."""

    def __add__(self, other: Usage) -> Usage:
        costs = [each.cost_usd for each in (self, other) if each.cost_usd is not None]
        return Usage(
            self.model_calls + other.model_calls,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(costs) if costs else None,
        )


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn: its derived state, and what happened in it."""

    turn_id: str
    state: TurnState
    items: tuple[Item, ...]
    seq: int | None = None
    """The event that started it; None for a conversation that came with a snapshot."""
    agent: str = ""
    task: str = ""
    provider: str = ""
    model: str = ""
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    usage: Usage = Usage()
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def answer(self) -> str | None:
        """The clean answer, if the turn is completed; else None."""
        return next((each.text for each in reversed(self.items) if each.kind == "answer"), None)

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a run over time: a turn, or one of its items."""

    index: int
    changed: int
    """The newest event that changed it."""
    turn: int
    """Which turn it belongs to, counted from 0."""
    item: Item | None = None
    """None for the turn itself."""

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        about = {"index": self.index, "changed": self.changed, "turn": self.turn}
        return about if self.item is None else about | self.item.to_data()


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is happening now and is not in the log yet."""

    status: str = ""
    detail: str = ""
    text: str = ""
    """The answer that is being written: neither whole nor clean."""
    reasoning: str = ""
    running: tuple[ToolCallBegan, ...] = ()
    plan: tuple[PlanEntry, ...] = ()
    pressure: ContextPressure | None = None
    usage: UsageChanged | None = None
    missed: int = 0
    """How many live events this screen was too slow to receive."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a screen shows it."""

    session_id: str
    seq: int
    """The newest event that was folded."""
    turns: tuple[TurnView, ...] = ()
    subagents: tuple[SubagentEvent, ...] = ()
    """The newest event of each child."""
    usage: Usage = Usage()
    judges_usage: Usage = Usage()
    """What judges used; it is not part of `usage`."""
    live: LiveView | None = None
    damage: str | None = None
    """Why the log could not be read further, if it could not."""

    @property
    def state(self) -> TurnState:
        """The state of the newest turn."""
        return self.turns[-1].state if self.turns else TurnState.UNFINISHED

    @property
    def answer(self) -> str | None:
        """The newest turn's clean answer, if it is completed; else None."""
        return self.turns[-1].answer if self.turns else None

    def to_data(self) -> dict[str, Any]:
        """Return the view as plain values for JSON."""
        return {**_plain_fields(self), "state": self.state.value, "answer": self.answer}


def _plain(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case datetime():
            return value.isoformat()
        case tuple():
            return [_plain(each) for each in value]
        case None | str() | int() | float():
            return value
    return _plain_fields(value)


def _plain_fields(record: object) -> dict[str, Any]:
    return {each.name: _plain(getattr(record, each.name)) for each in fields(record)}  # type: ignore[arg-type]  # a dataclass

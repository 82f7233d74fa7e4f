"""What a turn shows while it runs: its status, its plan, its usage, its tool calls and its ending.

A display is for people. Nothing depends on it, and an error in it does not reach the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treenail.providers import ModelEvent
from treenail.state import Session
from treenail.tools import Plan, ToolCall, ToolResult
from treenail.turns.live import (
    FeedbackGiven,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    Status,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    TurnFinished,
    UsageChanged,
    status_of,
)
from treenail.turns.record import TurnRecord
from treenail.turns.states import TurnEnded

_logger = logging.getLogger("treenail.turns")

_SUMMARY_CHARS = 200
"""How much of a tool's result or a judge's feedback is shown while the turn runs."""

Watch = Callable[[LiveEvent], object]
"""Receives the live events of a turn, such as `LiveFeed.publish` does.

It is for display only: nothing depends on it. It is called in the turn's own event loop, which it must not
hold up: anything slow belongs behind a `LiveFeed`. A watch that raises is not called again.
"""


@dataclass(slots=True)
class TurnDisplay:
    """Shows one turn to a `Watch`, if there is one."""

    watch: Watch | None
    session: Session
    record: TurnRecord
    began: float
    """When the turn began, on the session's monotonic clock."""
    _is_waiting: bool = False
    _plan: Plan | None = None

    def show(self, event: LiveEvent) -> None:
        """Show one event. An error of the watch does not reach the turn."""
        if self.watch is not None:
            try:
                self.watch(event)
            except Exception:
                _logger.exception("the watch failed; the turn continues without it")
                self.watch = None

    def status(self, status: Status, *, ahead: int = 0, detail: str = "") -> None:
        """Show what the turn does now; `ahead` is 1 while the next answer is being made."""
        self._is_waiting = status == "waiting"
        if self.watch is None:
            return
        self.show(StatusChanged(status, self.record.turn_id, ahead + self._steps, detail))

    @property
    def _steps(self) -> int:
        last = self.record.last
        return 0 if last is None else last.turn

    def model(self, event: ModelEvent) -> None:
        """Show what the model says."""
        if self._is_waiting:
            self.status("thinking", ahead=1)
        self.show(event)

    def plan(self) -> None:
        """Show the agent's plan, if it has changed since it was last shown."""
        if self.watch is None:
            return
        plan = self.session[Plan].latest()
        if plan is not None and plan != self._plan:
            self._plan = plan
            self.show(PlanChanged(tuple(PlanEntry(each.title, each.status) for each in plan.steps)))

    def usage(self) -> None:
        """Show what the turn has used so far."""
        if self.watch is None:
            return
        elapsed_s = self.session.clock.monotonic() - self.began
        tokens = self.record.usage.total or 0
        self.show(UsageChanged(self._steps, tokens, self.record.cost_usd, elapsed_s))

    def feedback(self, source: str, text: str, severity: str) -> None:
        """Show what a judge has said."""
        self.show(FeedbackGiven(source, text[:_SUMMARY_CHARS], severity))

    def call_began(self, call: ToolCall) -> None:
        """Show that a tool call begins."""
        if self.watch is None:
            return
        self.show(ToolCallBegan(call.id, call.name, call.arguments_json))

    def call_ended(self, call: ToolCall, result: ToolResult[Any] | None, elapsed_s: float) -> None:
        """Show how a tool call ended; without a result, it was refused, held or cut off."""
        if self.watch is None:
            return
        success, summary = (False, "") if result is None else (result.success, result.message)
        self.show(ToolCallFinished(call.id, call.name, success, summary[:_SUMMARY_CHARS], 1000 * elapsed_s))
        self.plan()

    def ending(self, ended: TurnEnded) -> None:
        """Show how the turn ended."""
        self.status(status_of(ended.state))
        self.show(TurnFinished(ended.turn_id, ended.state, ended.error_kind, ended.next_actions))

"""What a turn shows while it runs: its status, its plan, its usage, its tool calls and its ending.

A display is for people. Nothing depends on it, and an error in it does not reach the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from treenail.containment import ExecutionContext
from treenail.providers import ModelEvent
from treenail.state import ExecutionState, Session
from treenail.tools import (
    CommandRan,
    Plan,
    ToolCall,
    ToolInvoked,
    ToolResult,
    ToolStarted,
    filesystem_of,
    last_end,
)
from treenail.turns.live import (
    FeedbackGiven,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    Status,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    ToolCallOutput,
    TurnFinished,
    UsageChanged,
    status_of,
)
from treenail.turns.record import TurnRecord
from treenail.turns.states import TurnEnded
from treenail.workspace import changed_lines

_logger = logging.getLogger("treenail.turns")

_SUMMARY_CHARS = 200
"""How much of a tool's result or a judge's feedback is shown while the turn runs."""

_TAIL_CHARS = 2_000
"""How much of the end of a failure is shown."""

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
    containment: ExecutionContext | None = None
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
        record, tokens = self.record, self.record.usage.total or 0
        used = UsageChanged(self._steps, tokens, record.cost_usd, elapsed_s, record.model, record.cost_usd)
        if self.containment is not None:
            config, chain = self.containment.config, self.containment.get_snapshot()
            is_unknown = tokens > 0 and record.cost_usd is None and config.on_unknown_price == "warn"
            used = replace(
                used,
                spent_usd=None if is_unknown else chain.cost_usd_accumulated,
                max_cost_usd=config.max_cost_usd,
                max_steps=config.max_steps,
            )
        self.show(used)

    def feedback(self, source: str, text: str, severity: str) -> None:
        """Show what a judge has said."""
        self.show(FeedbackGiven(source, text[:_SUMMARY_CHARS], severity))

    def call_began(self, call: ToolCall) -> None:
        """Show that a tool call begins."""
        if self.watch is None:
            return
        self.show(ToolCallBegan(call.id, call.name, call.arguments_json))

    def call_output(self, call_id: str, text: str) -> None:
        """Show what a tool call writes while it runs."""
        self.show(ToolCallOutput(call_id, text))

    def call_ended(
        self,
        call: ToolCall,
        result: ToolResult[Any] | None,
        elapsed_s: float,
        outcome: str,
        state: ExecutionState,
    ) -> None:
        """Show how a tool call ended; without a result, it is held or was cut off, as `outcome` says."""
        if self.watch is None:
            return
        success, said = (False, "") if result is None else (result.success, result.message)
        shown = ToolCallFinished(
            call.id, call.name, success, said[:_SUMMARY_CHARS], 1000 * elapsed_s, outcome
        )
        end = None if result is None else last_end(self.session, call.id)
        if end is not None:
            ran = self.session[CommandRan].latest()
            exit_code = ran.exit_code if ran is not None and ran.call_id == call.id else None
            shown = replace(shown, outcome=end.outcome, exit_code=exit_code)
            if not success or exit_code:
                shown = replace(shown, tail=said[-_TAIL_CHARS:])
            if ran is None or ran.call_id != call.id:
                # What a command changes may be much; it is counted when the turn has ended.
                added, removed = _lines_changed(state, end)
                shown = replace(shown, added=added, removed=removed)
        self.show(shown)
        self.plan()

    def ending(self, ended: TurnEnded) -> None:
        """Show how the turn ended."""
        self.status(status_of(ended.state))
        self.show(TurnFinished(ended.turn_id, ended.state, ended.error_kind, ended.next_actions))


def _lines_changed(state: ExecutionState, end: ToolInvoked) -> tuple[int, int] | tuple[None, None]:
    """Count the lines that a call added to files and removed from them; None if it changed no file."""
    start, filesystem = state.session[ToolStarted].latest(), filesystem_of(state)
    if end.workspace is None or filesystem is None or start is None or start.attempt_id != end.attempt_id:
        return None, None
    try:
        assert start.workspace is not None
        return changed_lines(filesystem.diff(start.workspace, end.workspace).text)
    except Exception as error:  # noqa: BLE001  # a number on a screen is not worth a turn
        _logger.info("the lines that %s changed could not be counted: %s", end.call_id, error)
        return None, None

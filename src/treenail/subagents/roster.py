"""The subagents of one parent session: a fold of its log, and the only place that writes to it.

A move is logged before it takes effect. The events are history, so a failing tool call of the parent does
not roll them back.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from treenail.conversation import SubagentEvent
from treenail.errors import UsageError
from treenail.log import place_of
from treenail.state import Session, stamped
from treenail.subagents.endings import next_actions
from treenail.subagents.events import WORKSPACE_MODES
from treenail.subagents.limits import Allowance, SubagentLimits, narrow
from treenail.subagents.states import EVENT_NAMES, SubagentStatus, apply_event
from treenail.subagents.subagent import Subagent
from treenail.turns import TurnStarted


class Roster:
    """Every subagent that a session ever had, by id, oldest first."""

    def __init__(self, session: Session, limits: SubagentLimits) -> None:
        self.session = session
        self._limits = limits
        self._children: dict[str, Subagent] = {}
        self._sending_calls: set[str] = set()

    # .. reading ..

    @property
    def children(self) -> tuple[Subagent, ...]:
        """Every subagent, oldest first."""
        return tuple(self._children.values())

    def get(self, subagent_id: str) -> Subagent:
        """Return a subagent. Raises `UsageError` for an unknown id."""
        found = self._children.get(subagent_id)
        if found is None:
            known = ", ".join(self._children) or "none"
            raise UsageError(f"there is no subagent {subagent_id!r}; there are: {known}")
        return found

    def spawned_by(self, call_id: str) -> Subagent | None:
        """Return the subagent that a tool call of the parent has already spawned, or None."""
        return next((each for each in self._children.values() if each.call_id == call_id), None)

    def was_sent_by(self, call_id: str) -> bool:
        """Say whether a tool call of the parent has already sent its message."""
        return call_id in self._sending_calls

    def new_id(self, agent: str) -> str:
        """Return an unused id for a subagent."""
        number = len(self._children) + 1
        while f"{agent}-{number}" in self._children:
            number += 1
        return f"{agent}-{number}"

    # .. writing ..

    def add(self, child: Subagent) -> None:
        """Record a new subagent as queued."""
        self.move(child, SubagentStatus.QUEUED)
        self._children[child.id] = child

    def move(self, child: Subagent, status: SubagentStatus, **facts: Any) -> None:
        """Log a move, then make it. An illegal move, or one without evidence, changes nothing."""
        event = self._event(child, EVENT_NAMES[status], status, facts)
        apply_event(None if status is SubagentStatus.QUEUED else child.status, event)
        self._log(event)
        _take_ending(child, event)

    def remark(self, child: Subagent, name: str, **facts: Any) -> None:
        """Log an event that does not change the subagent's state."""
        event = self._event(child, name, child.status, facts)
        apply_event(child.status, event)
        self._log(event)

    def send(self, child: Subagent, message: str, call_id: str | None) -> None:
        """Log a message to a subagent and add it to its inputs."""
        self.remark(child, "input", task=message, call_id=call_id)
        if call_id is not None:
            self._sending_calls.add(call_id)
        child.inputs.append(message)
        child.is_pending = True

    def detach(self, child: Subagent, reason: str) -> None:
        """Record that a subagent is out of this process's reach."""
        child.is_pending = False
        actions = next_actions(child, SubagentStatus.DETACHED, None)
        self.move(child, SubagentStatus.DETACHED, reason=reason, next_actions=actions)

    def _event(
        self, child: Subagent, name: str, status: SubagentStatus, facts: dict[str, Any]
    ) -> SubagentEvent:
        timeout_s = child.allowance.timeout_s
        path = place_of(self.session.log)
        known: dict[str, Any] = {
            "task": child.task,
            "depth": child.depth,
            "max_depth": self._limits.max_depth,
            "timeout_ms": None if timeout_s is None else round(timeout_s * 1000),
            "workspace_mode": child.workspace_mode,
            "log_paths": () if path is None else (str(path),),
            "attempt": child.attempt,
            "retry_of": child.retry_of,
            "call_id": child.call_id,
            "max_steps": child.allowance.max_steps,
            "max_cost_usd": child.allowance.max_cost_usd,
        }
        return SubagentEvent(
            name, child.id, str(child.session_id), child.agent, status=status.value, **known | facts
        )

    def _log(self, event: SubagentEvent) -> None:
        started = self.session[TurnStarted].latest()
        with stamped(turn_id=None if started is None else started.turn_id):
            self.session.dispatch(event)

    # .. folding ..

    def load(self) -> None:
        """Read every subagent from the session's log."""
        self._children.clear()
        self._sending_calls.clear()
        for event in self.session[SubagentEvent].all():
            self._fold(event)
        forked_at = int(self.session.tags.get("forked_at", 0))
        if forked_at:
            for _, value in self.session.events(upto=forked_at):
                if isinstance(value, SubagentEvent):
                    self._children[value.subagent_id].is_inherited = True

    def _fold(self, event: SubagentEvent) -> None:
        child = self._children.get(event.subagent_id)
        if child is None:
            child = self._children[event.subagent_id] = self._subagent_of(event)
        if event.event == "input":
            child.inputs.append(event.task)
            if event.call_id is not None:
                self._sending_calls.add(event.call_id)
        child.cancel_reason = event.reason if event.event == "cancel_requested" else ""
        child.status = SubagentStatus(event.status)
        child.attempt = event.attempt
        child.is_pending = event.event in ("queued", "input") or not child.status.is_terminal
        if event.event == EVENT_NAMES[child.status]:
            _take_ending(child, event)

    def _subagent_of(self, event: SubagentEvent) -> Subagent:
        asked = Allowance(
            timeout_s=None if event.timeout_ms is None else event.timeout_ms / 1000,
            max_steps=event.max_steps,
            max_cost_usd=event.max_cost_usd,
        )
        modes = [mode for mode in WORKSPACE_MODES if mode == event.workspace_mode]
        return Subagent(
            id=event.subagent_id,
            session_id=UUID(event.child_session_id),
            agent=event.agent,
            task=event.task,
            depth=event.depth,
            workspace_mode=modes[0] if modes else "shared",
            # The operator may allow less now than when it was spawned.
            allowance=narrow(self._limits, asked)[0],
            retry_of=event.retry_of,
            call_id=event.call_id,
            inputs=[event.task],
        )


def _take_ending(child: Subagent, event: SubagentEvent) -> None:
    child.status = SubagentStatus(event.status)
    child.summary, child.reason = event.summary, event.reason
    child.next_actions, child.artifacts = event.next_actions, event.artifacts
    child.elapsed_ms = event.elapsed_ms

"""May this call begin? Deadlines, unknown outcomes, policies and permissions, in this order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treenail.errors import HoldRequired
from treenail.state import Session
from treenail.tools.environment import CallEnvironment
from treenail.tools.events import Outcome, ToolHeld, ToolInvoked, ToolStarted
from treenail.tools.policies import (
    PermissionMode,
    PermissionRequest,
    Permissions,
    ToolPolicy,
    answer_of,
    hold_of,
)
from treenail.tools.tool import Tool, ToolCall
from treenail.tools.transaction import PlannedCall, describe
from treenail.workspace import rest_writer

_logger = logging.getLogger("treenail.tools")

Refusal = tuple[Outcome, str]
"""How a call ends that may not begin, and what the model is told."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether a call may begin."""

    environment: CallEnvironment
    permissions: Permissions
    policies: Mapping[str, Sequence[ToolPolicy]] | Sequence[ToolPolicy]

    @property
    def _session(self) -> Session:
        return self.environment.state.session

    def policies_for(self, name: str) -> Sequence[ToolPolicy]:
        """Return the policies that apply to a tool."""
        policies = self.policies
        return policies.get(name, ()) if isinstance(policies, Mapping) else policies

    def refusal(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Return why a call may not begin, or None. Raises `HoldRequired` if a person has to answer first."""
        if tool.effects == "none" and not plan.policies:
            return None
        refused = self._unknown(plan, tool) or self._denied(plan, tool)
        if refused is not None or tool.effects == "none":
            return refused
        mode = self.permissions.mode_for(tool)
        if mode is PermissionMode.READ_ONLY:
            return "denied", f"This run is read-only: {tool.name} would change something. Go on without it."
        if mode is PermissionMode.ASK:
            return self._ask(plan, tool, "the operator wants to be asked before this tool runs")
        return None

    def _denied(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Ask the policies."""
        if not plan.policies:
            return None
        context = replace(
            plan.context,
            session=self._session,
            call_id=plan.call.id,
            held_filesystem=self.environment.read_only,
        )
        for policy in plan.policies:
            try:
                decision = policy.check(tool, plan.params, context=context)
            except Exception as error:  # a policy that cannot decide has not allowed it
                _logger.warning("the policy %s failed", policy.name, exc_info=error)
                return "denied", f"The policy {policy.name} could not decide about it: {describe(error)}"
            if not decision.allowed:
                reason = decision.reason or f"The policy {policy.name} does not allow {tool.name} now."
                return "denied", reason
        return None

    def _unknown(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Refuse to repeat a call that acted outside and was cut off, unless repeating it does no harm."""
        if tool.effects != "external" or tool.idempotent:
            return None
        last = _last_end(self._session, plan.call.id)
        start = _last_start(self._session, plan.call.id)
        if last is None or last.outcome != "unknown" or start is None:
            return None
        if start.attempt_id != last.attempt_id:
            return None  # The model was told already, so this is another call with the same id.
        if tool.on_unknown == "hold":
            reason = "a crash cut this call off; it is unknown whether it took effect outside"
            return self._ask(plan, tool, reason, attempt_id=last.attempt_id)
        return "unknown", last.result.message

    def _ask(
        self, plan: PlannedCall, tool: Tool[Any, Any], reason: str, *, attempt_id: str = ""
    ) -> Refusal | None:
        """Ask a person, or take the answer that was given already."""
        session, call = self._session, plan.call
        held = hold_of(session, call.id, attempt_id=attempt_id)
        if held is not None and not self._is_about(held, call):
            held = None
        answer = None if held is None else answer_of(session, held)
        if held is not None and answer is not None:
            if answer.approved:
                plan.hold_id = held.hold_id
                return None
            return "denied", f"A person refused this call of {tool.name}. {answer.note}".strip()
        said = self._approver_says(PermissionRequest(call.id, tool.name, call.arguments_json, tool.effects))
        if said is not None:
            return None if said else ("denied", f"A person refused this call of {tool.name}.")
        if held is None:
            now = self.environment.state.clock.now()
            session.dispatch(ToolHeld(call.id, tool.name, call.arguments_json, reason, now, attempt_id))
        raise HoldRequired(call.id, tool.name, reason=reason)

    def _approver_says(self, request: PermissionRequest) -> bool | None:
        if self.permissions.approver is None:
            return None
        rest_writer(self.environment.filesystem)
        try:
            return self.permissions.approver(request)
        except Exception as error:  # neither yes nor no: the call waits
            _logger.warning("the approver failed on %s; the call is held", request.call_id, exc_info=error)
            return None

    def _is_about(self, held: ToolHeld, call: ToolCall) -> bool:
        """Say whether a hold is about this very call. Some providers use an id again for another one."""
        if (held.tool_name, held.arguments) != (call.name, call.arguments_json):
            return False
        last = _last_end(self._session, call.id)
        return last is None or last.hold_id != held.hold_id or last.outcome == "interrupted"


def _ended_call(end: ToolInvoked) -> object:
    return end.call_id


def _last_end(session: Session, call_id: str) -> ToolInvoked | None:
    ends = session[ToolInvoked].view()
    position = ends.find(_ended_call, call_id)
    return None if position is None else ends[position]


def _started_call(start: ToolStarted) -> object:
    return start.call_id


def _last_start(session: Session, call_id: str) -> ToolStarted | None:
    starts = session[ToolStarted].view()
    position = starts.find(_started_call, call_id)
    return None if position is None else starts[position]

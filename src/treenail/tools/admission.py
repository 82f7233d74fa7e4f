"""May this call begin? Deadlines, unknown outcomes, policies and permissions, in this order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from treenail.errors import HoldRequired, ToolValidationError
from treenail.state import Session
from treenail.tools.boundaries import last_end
from treenail.tools.context import ToolContext
from treenail.tools.environment import CallEnvironment
from treenail.tools.events import HoldAnswered, Outcome, ToolHeld, ToolStarted
from treenail.tools.policies import (
    Approval,
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
        if tool.is_question:
            return self._denied(plan, tool) or self._ask_in_words(plan, tool)
        rules = self.permissions.rules
        if tool.effects == "none" and not plan.policies and not rules.narrows:
            return None
        refused = self._unknown(plan, tool) or self._denied(plan, tool)
        if refused is not None:
            return refused
        mode = self.permissions.mode_for(tool) if tool.effects != "none" else PermissionMode.AUTO
        if mode is PermissionMode.READ_ONLY:
            return "denied", f"This run is read-only: {tool.name} would change something. Go on without it."
        verdict, rule = None, ""
        if not rules.is_empty:
            arguments = _fields_of(plan.params, plan.call)
            verdict, rule = rules.verdict(tool.name, arguments, self.environment.filesystem)
        if verdict == "deny":
            return "denied", f"The operator's rule {rule!r} refuses this call. Go on without it."
        if verdict == "unclear" and mode is PermissionMode.AUTO:
            return "denied", (
                f"It cannot be told whether the operator's rule {rule!r} refuses this call. Write it as "
                "plain commands without expansions, substitutions or here-documents."
            )
        if verdict == "ask":
            return self._ask(plan, tool, f"the rule {rule!r} wants a person to be asked")
        if mode is PermissionMode.ASK and verdict != "allow":
            return self._ask(plan, tool, "the operator wants to be asked before this tool runs")
        return None

    def _denied(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Ask the policies."""
        if not plan.policies:
            return None
        context = self._context(plan)
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

    def _context(self, plan: PlannedCall) -> ToolContext:
        """Return what a call would be given, with the workspace read-only."""
        return replace(
            plan.context,
            session=self._session,
            call_id=plan.call.id,
            held_filesystem=self.environment.read_only,
        )

    def _unknown(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Refuse to repeat a call that acted outside and was cut off, unless repeating it does no harm."""
        if tool.effects != "external" or tool.idempotent:
            return None
        last = last_end(self._session, plan.call.id)
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
                return self._edited(plan, tool, answer.arguments)
            return _refused(tool, answer.note)
        said = self._approver_says(
            PermissionRequest(
                call.id, tool.name, call.arguments_json, tool.effects, tool, self._context(plan)
            )
        )
        now = self.environment.state.clock.now()
        waits = ToolHeld(call.id, tool.name, call.arguments_json, reason, now, attempt_id)
        if said is None:
            if held is None:
                session.dispatch(waits)
            raise HoldRequired(call.id, tool.name, reason=reason)
        if not said.approved:
            return _refused(tool, said.note)
        if said.arguments is None:
            return None
        # Durable before it runs, and as a hold with its answer: a resume after a crash finds it there.
        asked = held or waits
        answered = HoldAnswered(call.id, True, said.note, "person", asked.hold_id, said.arguments)
        session.dispatch_all([answered] if held is not None else [waits, answered])
        plan.hold_id = asked.hold_id
        return self._edited(plan, tool, said.arguments)

    def _ask_in_words(self, plan: PlannedCall, tool: Tool[Any, Any]) -> Refusal | None:
        """Ask a person a question, or find the answer in the log, where the handler reads it."""
        session, call = self._session, plan.call
        held = hold_of(session, call.id)
        if held is not None and not self._is_about(held, call):
            held = None
        answer = None if held is None else answer_of(session, held)
        if held is None or answer is None:
            reason = "the model asks a question"
            now = self.environment.state.clock.now()
            asked = held or ToolHeld(call.id, tool.name, call.arguments_json, reason, now, is_question=True)
            said = self._approver_says(
                PermissionRequest(call.id, tool.name, call.arguments_json, tool.effects, tool)
            )
            unlogged = [] if held is not None else [asked]
            if said is None or (said.approved and not said.note.strip()):
                session.dispatch_all(unlogged)  # A yes without words is not an answer.
                raise HoldRequired(call.id, tool.name, reason=reason, is_question=True)
            answer = HoldAnswered(call.id, said.approved, said.note, "person", asked.hold_id)
            session.dispatch_all([*unlogged, answer])
            held = asked
        if not answer.approved:
            return "denied", f"The person did not answer the question. {answer.note}".strip()
        plan.hold_id = held.hold_id
        return None

    def _edited(self, plan: PlannedCall, tool: Tool[Any, Any], arguments: str | None) -> Refusal | None:
        """Let the call run with the arguments that a person gave it, which the model is told."""
        if arguments is None:
            return None
        try:
            plan.params = tool.parse(arguments)
        except ToolValidationError as error:
            return "invalid", f"A person changed the arguments to {arguments}, and these do not fit: {error}"
        plan.call = replace(plan.call, arguments=arguments)
        plan.told = f"A person changed the arguments before this call of {tool.name} ran, to {arguments}."
        changed = _fields_of(plan.params, plan.call)
        verdict, rule = self.permissions.rules.verdict(tool.name, changed, self.environment.filesystem)
        if verdict == "deny":
            return "denied", f"The operator's rule {rule!r} refuses this call as a person changed it."
        return self._denied(plan, tool)

    def _approver_says(self, request: PermissionRequest) -> Approval | None:
        if self.permissions.approver is None:
            return None
        rest_writer(self.environment.filesystem)
        try:
            said = self.permissions.approver(request)
        except Exception as error:  # neither yes nor no: the call waits
            _logger.warning("the approver failed on %s; the call is held", request.call_id, exc_info=error)
            return None
        return Approval(said) if isinstance(said, bool) else said

    def _is_about(self, held: ToolHeld, call: ToolCall) -> bool:
        """Say whether a hold is about this very call. Some providers use an id again for another one."""
        if (held.tool_name, held.arguments) != (call.name, call.arguments_json):
            return False
        last = last_end(self._session, call.id)
        return last is None or last.hold_id != held.hold_id or last.outcome == "interrupted"


def _fields_of(params: Any, call: ToolCall) -> Mapping[str, Any] | str:
    """Return what the handler will be given: a text can be read in more than one way."""
    if is_dataclass(params):
        return {each.name: getattr(params, each.name) for each in fields(params)}
    if isinstance(params, Mapping):
        return params
    return getattr(params, "__dict__", None) or call.arguments_json


def _refused(tool: Tool[Any, Any], note: str) -> Refusal:
    return "denied", f"A person refused this call of {tool.name}. {note}".strip()


def _started_call(start: ToolStarted) -> object:
    return start.call_id


def _last_start(session: Session, call_id: str) -> ToolStarted | None:
    starts = session[ToolStarted].view()
    position = starts.find(_started_call, call_id)
    return None if position is None else starts[position]

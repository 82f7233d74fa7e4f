"""Policies and permissions: whether a call may run.

A policy decides by the state. If it denies a call, the handler does not run and the model gets the reason
as an error. Permissions belong to the operator: `auto` lets tools run, `read_only` refuses tools with
effects, and `ask` waits for a person. The wait is durable: the hold is an event, the run stops, and the
answer resumes that one call, in this process or another. Rules decide about single calls before that.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from treenail.errors import ToolValidationError, UsageError
from treenail.log import SlicePolicy
from treenail.state import Append, Replace, Session, Slice, SliceOp, event
from treenail.tools.context import ToolContext
from treenail.tools.events import HoldAnswered, ToolHeld
from treenail.tools.preview import preview
from treenail.tools.rules import Rules
from treenail.tools.tool import Tool, ToolResult
from treenail.workspace import WorkspaceDiff


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may run; if not, the reason, which the model is told."""

    allowed: bool
    reason: str | None = None

    @classmethod
    def allow(cls) -> PolicyDecision:
        """Let the call run."""
        return cls(True)

    @classmethod
    def deny(cls, reason: str) -> PolicyDecision:
        """Refuse the call; the reason says what to do instead."""
        return cls(False, reason)


@runtime_checkable
class ToolPolicy(Protocol):
    """A rule about calls. A call runs only if all policies of its tool allow it."""

    @property
    def name(self) -> str:
        """The policy's name."""
        ...

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Decide before the handler runs."""
        ...

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Learn from a successful call; events dispatched here are committed with it."""
        ...


@event(name="treenail.PolicyState", policy=SlicePolicy.STATE)
@dataclass(frozen=True, slots=True)
class PolicyState:
    """A policy's memory. It is rolled back like all other state."""

    policy_name: str
    invoked_tools: frozenset[str] = frozenset()
    invoked_keys: frozenset[str] = frozenset()


def _join(states: Slice[PolicyState], learned: PolicyState) -> SliceOp[PolicyState]:
    """Keep one item per policy and only add to it, so that parallel calls keep each other's entries."""
    known = states.all()
    for position, each in enumerate(known):
        if each.policy_name == learned.policy_name:
            joined = PolicyState(
                each.policy_name,
                each.invoked_tools | learned.invoked_tools,
                each.invoked_keys | learned.invoked_keys,
            )
            return Replace((*known[:position], joined, *known[position + 1 :]))
    return Append(learned)


def register_policy_state(session: Session) -> None:
    """Keep one `PolicyState` per policy in a session."""
    session[PolicyState].register(PolicyState, _join)


def _remembered(name: str, session: Session) -> PolicyState:
    for state in session[PolicyState].all():
        if state.policy_name == name:
            return state
    return PolicyState(name)


@dataclass(frozen=True, slots=True)
class SequentialDependencyPolicy:
    """A tool may run only after others have succeeded."""

    dependencies: Mapping[str, frozenset[str]]
    """For each tool, the tools that must have succeeded before it."""
    name: str = "sequential_dependency"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Allow a tool if all tools that it depends on have succeeded."""
        required = frozenset(self.dependencies.get(tool.name, frozenset()))
        missing = required - _remembered(self.name, context.session).invoked_tools
        if missing:
            return PolicyDecision.deny(
                f"{tool.name} needs these to succeed first: {', '.join(sorted(missing))}."
            )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Remember that a tool has succeeded."""
        known = _remembered(self.name, context.session)
        if tool.name not in known.invoked_tools:
            context.session.dispatch(PolicyState(self.name, invoked_tools=frozenset({tool.name})))


@dataclass(frozen=True, slots=True)
class ReadBeforeWritePolicy:
    """An existing file must be read before it is written; a new file need not be."""

    read_tools: frozenset[str]
    write_tools: frozenset[str]
    mount_point: str | None = None
    """A prefix under which tools see the workspace; it is removed from their paths."""
    path_field: str = "path"
    name: str = "read_before_write"

    def _path(self, params: Any) -> str | None:
        raw = getattr(params, self.path_field, None)
        if not isinstance(raw, str):
            return None
        if self.mount_point and raw.startswith(self.mount_point):
            raw = raw[len(self.mount_point) :].lstrip("/")
        return posixpath.normpath(raw)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Allow a write to a file that was read in this session, or that does not exist."""
        path = self._path(params)
        if tool.name not in self.write_tools or path is None:
            return PolicyDecision.allow()
        if path in _remembered(self.name, context.session).invoked_keys:
            return PolicyDecision.allow()
        if not context.filesystem.exists(path):
            return PolicyDecision.allow()
        readers = " or ".join(sorted(self.read_tools))
        return PolicyDecision.deny(f"{path} exists and was not read yet. Read it first with {readers}.")

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Remember which files were read or written."""
        path = self._path(params)
        if path is None or tool.name not in self.read_tools | self.write_tools:
            return
        known = _remembered(self.name, context.session)
        if path not in known.invoked_keys:
            context.session.dispatch(PolicyState(self.name, invoked_keys=frozenset({path})))


# --- permissions -----------------------------------------------------------------------------------


class PermissionMode(Enum):
    """What happens when a tool with effects is called."""

    AUTO = "auto"
    ASK = "ask"
    READ_ONLY = "read_only"


@event(name="treenail.PermissionModeChosen", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class PermissionModeChosen:
    """A person has chosen this mode for a run, until they choose another."""

    mode: str


def chosen_mode(session: Session) -> PermissionMode | None:
    """Return the mode that a person has chosen for a run; None if they have not."""
    newest = session[PermissionModeChosen].latest()
    return None if newest is None else PermissionMode(newest.mode)


Approver = Callable[["PermissionRequest"], "bool | Approval | None"]
"""Answers a request at once: yes, no, more than that (`Approval`), or None to ask a person later."""


@dataclass(frozen=True, slots=True)
class Approval:
    """What a person says about a call."""

    approved: bool
    note: str = ""
    """A reason for the model, with a refusal."""
    arguments: str | None = None
    """JSON text that the call runs with instead of its own. It is in the log before the call begins."""


@dataclass(frozen=True, slots=True)
class PermissionRequest:
    """The call that a person is asked to allow."""

    call_id: str
    tool_name: str
    arguments: str
    effects: str
    tool: Tool[Any, Any] | None = field(default=None, repr=False, compare=False)
    context: ToolContext | None = field(default=None, repr=False, compare=False)
    """What the tool would be given, with the workspace read-only."""

    def problem_with(self, arguments: str) -> str | None:
        """Say why the tool would not take these arguments, or None if it would."""
        try:
            if self.tool is not None:
                self.tool.parse(arguments)
        except ToolValidationError as error:
            return str(error)
        return None

    def preview(self, arguments: str | None = None) -> WorkspaceDiff | None:
        """Return what the call would change in the files; None if that cannot be known before it runs."""
        if self.tool is None or self.context is None:
            return None
        return preview(self.tool, self.arguments if arguments is None else arguments, self.context)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The operator's permissions for tools with effects. Tools without effects always run."""

    mode: PermissionMode = PermissionMode.AUTO
    tools: Mapping[str, PermissionMode] = field(default_factory=dict)
    """Modes for single tools, which override `mode`."""
    approver: Approver | None = None
    """Answers requests at once, such as a prompt in a terminal; without one, `ask` holds the call."""
    rules: Rules = field(default_factory=Rules)
    """What is allowed, asked about and refused, call by call; `read_only` comes before `allow`."""

    def mode_for(self, tool: Tool[Any, Any]) -> PermissionMode:
        """Return the mode of a tool. If the general mode is `read_only`, it applies to every tool, but for
        those that only note something."""
        if tool.is_note:
            return self.tools.get(tool.name, PermissionMode.AUTO)
        if self.mode is PermissionMode.READ_ONLY:
            return self.mode
        named = self.tools.get(tool.name)
        if named is None and tool.asks:
            return PermissionMode.ASK
        return named or self.mode


def _held_call(held: ToolHeld) -> object:
    return held.call_id, held.attempt_id


def _answered_hold(answer: HoldAnswered) -> object:
    return answer.hold_id


def pending_holds(session: Session) -> tuple[ToolHeld, ...]:
    """Return the calls that wait for a person, oldest first."""
    newest = {_held_call(each): each for each in session[ToolHeld].all()}
    return tuple(each for each in newest.values() if answer_of(session, each) is None)


def hold_of(session: Session, call_id: str, *, attempt_id: str = "") -> ToolHeld | None:
    """Return the newest hold of a call, answered or not, or None."""
    holds = session[ToolHeld].view()
    position = holds.find(_held_call, (call_id, attempt_id))
    return None if position is None else holds[position]


def answer_of(session: Session, held: ToolHeld) -> HoldAnswered | None:
    """Return the answer that a person gave to a hold, or None."""
    answers = session[HoldAnswered].view()
    position = answers.find(_answered_hold, held.hold_id)
    return None if position is None else answers[position]


def answer_hold(
    session: Session,
    call_id: str,
    *,
    approved: bool,
    note: str = "",
    answered_by: str = "",
    arguments: str | None = None,
) -> None:
    """Answer a held call. Resuming the run then runs it, or tells the model that it was refused.

    With `arguments` (JSON text) it runs with these instead of its own, and the model is told.
    """
    waiting = {each.call_id: each for each in pending_holds(session)}
    if call_id not in waiting:
        known = ", ".join(sorted(waiting)) or "none"
        raise UsageError(f"no call {call_id!r} waits for an answer in this session; calls that wait: {known}")
    if waiting[call_id].is_question and approved and not note.strip():
        raise UsageError(f"the call {call_id!r} asks a question; answer it in words, as the note")
    session.dispatch(HoldAnswered(call_id, approved, note, answered_by, waiting[call_id].hold_id, arguments))

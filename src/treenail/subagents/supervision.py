"""Subagents under supervision: many at once, each of them accounted for in its parent's log.

Theory of operation
-------------------
A subagent is a child session: its own log, linked to its parent's session, its work inside the
parent's containment (one ledger, so that nobody spends the same money twice; the deadline and
an abort of the parent reach it). `Subagents` is the parent's side. It keeps nothing that is not
in the logs, except for the tasks that run right now.

- **Recorded, then done.** A move of `treenail.subagents.states` is logged in the parent's session
  before it has an effect: `queued` before anything exists, `started` before the first model call,
  and an ending before anybody who waits is told. These events are history, so that a tool call of
  the parent that fails takes none of them back, whatever it was doing at the time.
- **A clean context.** Tasks inherit the context of whoever starts them, and inside a tool call that
  context says "this belongs to the call". So a call only puts a subagent into the queue; one task,
  started when the supervision began, takes it from there. Its children outlive the call.
- **First come, first served.** `max_threads` run at once. Whoever waits for a slot holds nothing but
  a line in the queue: no session, no lease, no task.
- **Endings are read, not reported.** When a turn returns, its ending is derived from the child's
  log. A task that died, or that returned without evidence, is `failed`.
- **After a crash** the parent's log says who was there. What had ended stays as it ended; if only the
  child's log knows, it is believed. What was queued is queued again. What was running goes on as a
  session does: finished tools are not run again, the time that it had used counts. What cannot go on
  (its agent is not known here, somebody else is writing its log, its workspace is gone) is `detached`,
  with what to do about it.

Everything here is called in the event loop that the supervision was entered in. Do not wait for a
subagent that shares the workspace from inside a tool call that holds it: give that tool
`effects="none"`, as the tools of `subagent_tools` have.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from treenail import telemetry
from treenail.agent import Agent
from treenail.clock import new_id
from treenail.containment import (
    ActiveCall,
    CancellationToken,
    ChainMetadata,
    ExecutionContext,
    current_call,
)
from treenail.containment.limits import UNLIMITED
from treenail.containment.threads import call_later, threadsafe
from treenail.conversation.events import SubagentEvent
from treenail.conversation.messages import InnerMessage
from treenail.errors import LeaseHeldError, SessionNotFoundError, TreenailError, UsageError
from treenail.state.execution import ExecutionState
from treenail.state.resources import ResourceRegistry
from treenail.state.session import Session, family_tags, stamped
from treenail.subagents.limits import Allowance, SubagentLimits, config_of, narrow
from treenail.subagents.outcomes import WaitOutcome, wait_outcome
from treenail.subagents.records import WORKSPACE_MODES, SubagentCharter, WorkspaceMode
from treenail.subagents.runner import ChildRun, ChildRunner
from treenail.subagents.states import EVENT_NAMES, SubagentStatus, apply_event, check_move
from treenail.subagents.tools import subagent_tools
from treenail.subagents.workspaces import ChildWorkspace, Copy, open_workspace
from treenail.tools.boundaries import recover
from treenail.tools.context import filesystem_of
from treenail.tools.policies import PermissionMode, Permissions
from treenail.tools.runner import ToolRunner, enclosing_calls
from treenail.tools.tool import ToolCall, ToolResult
from treenail.turns.derivation import turn_state
from treenail.turns.ledger import contain
from treenail.turns.states import TurnStarted, TurnState
from treenail.turns.turn import TurnResult
from treenail.workspace.base import Filesystem

_logger = logging.getLogger("treenail.subagents")

GRACE_S = 5.0
"""How long a child that was told to stop may take before its task is cancelled."""

RETRY_JITTER_S = 0.25
"""The longest pause before another attempt; it is chosen by chance, so that many do not come at once."""

TRANSPORT_FAILURES = frozenset({"connection", "transient", "throttled", "rate_limit"})
"""Failures of the way to the model, after which the same request may go well."""

_ENDINGS: Mapping[TurnState, SubagentStatus] = {
    TurnState.COMPLETED: SubagentStatus.COMPLETED,
    TurnState.TIMED_OUT: SubagentStatus.TIMED_OUT,
    TurnState.INTERRUPTED: SubagentStatus.CANCELLED,
    TurnState.FAILED: SubagentStatus.FAILED,
    TurnState.PARTIAL_FAILED: SubagentStatus.FAILED,
    TurnState.HELD: SubagentStatus.FAILED,
    TurnState.UNFINISHED: SubagentStatus.FAILED,
}
"""What a turn's ending, as the child's log has it, makes of the subagent."""

_STRICTEST_LAST = (PermissionMode.AUTO, PermissionMode.ASK, PermissionMode.READ_ONLY)

_FINISHED_WITHOUT_A_WORD = "(it ended without a word)"


@dataclass(slots=True, eq=False)
class Subagent:
    """One subagent, as the log tells it. Read it; only its supervision changes it."""

    id: str
    session_id: UUID
    agent: str
    task: str
    depth: int
    workspace_mode: WorkspaceMode
    allowance: Allowance
    status: SubagentStatus = SubagentStatus.QUEUED
    summary: str = ""
    """What it answered, if it completed."""
    reason: str = ""
    """Why it ended, if it did not end by itself."""
    next_actions: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    turn_state: TurnState | None = None
    """How its newest turn ended, as its own log has it."""
    error_kind: str | None = None
    output: Any = None
    """Its answer as a value, if its turn ran in this process and its agent declares a type."""
    elapsed_ms: int | None = None
    attempt: int = 1
    retry_of: str | None = None
    call_id: str | None = None
    notes: tuple[str, ...] = ()
    """What was narrowed when it was asked for."""
    inputs: list[str] = field(default_factory=list)
    """Everything it was sent, its task first; each is a turn of its session."""
    is_pending: bool = False
    """Whether it was sent something that it has not answered yet."""
    _work: _Work | None = field(default=None, repr=False)
    _workspace: ChildWorkspace | None = field(default=None, repr=False)
    _goes_on: bool = field(default=False, repr=False)
    _cancel_reason: str = field(default="", repr=False)
    _posture: PermissionMode = field(default=PermissionMode.AUTO, repr=False)
    """What its charter allows its tools; who goes on with it may only allow less."""
    _asked_in: ActiveCall | None = field(default=None, repr=False)
    """The contained call that it was asked for in, in this process: its own calls are below it."""
    _is_inherited: bool = field(default=False, repr=False)
    """Whether it belongs to the session that this one was forked from."""
    _place: object = field(default=None, repr=False)
    """Where in the trace its work was asked for: it runs in a context that knows nothing of that."""

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and was sent nothing since."""
        return self.status.is_terminal and not self.is_pending

    def describe(self) -> dict[str, object]:
        """Return what a list of subagents shows."""
        shown: dict[str, object] = {"id": self.id, "agent": self.agent, "status": self.status.value}
        for name in ("summary", "reason", "elapsed_ms", "next_actions", "notes"):
            value = getattr(self, name)
            if value:
                shown[name] = value
        shown["task"] = self.task if len(self.task) <= 200 else self.task[:200] + " ..."
        shown["workspace"] = self.workspace_mode
        shown["session_id"] = str(self.session_id)
        if self.is_pending:
            shown["has_unread_input"] = True
        return shown


@dataclass(slots=True, eq=False)
class _Work:
    """What exists only while a subagent is at work."""

    scope: anyio.CancelScope
    token: CancellationToken
    containment: ExecutionContext
    session: Session
    is_overdue: bool = False


class Subagents:
    """The subagents of one parent session. Enter it (`async with`) for as long as they may run.

    `agents` are those that may be asked for by name, `runner` runs their turns (`LoopRunner(provider)`
    for our own loop), and `limits` is the operator's word. Leaving cancels what still runs and closes
    what still waits, with evidence.

    `containment` is the parent's; children spend from it. `depth` is the parent's own depth.
    `isolated_in` is the directory for isolated copies of a workspace on disk; left out, they are
    in the workspace's private store.
    """

    def __init__(
        self,
        state: ExecutionState,
        agents: Sequence[Agent] | Mapping[str, Agent],
        *,
        runner: ChildRunner,
        limits: SubagentLimits | None = None,
        containment: ExecutionContext | None = None,
        permissions: Permissions | None = None,
        depth: int = 0,
        isolated_in: str | Path | None = None,
        rng: Random | None = None,
    ) -> None:
        given = agents.values() if isinstance(agents, Mapping) else agents
        self.agents: dict[str, Agent] = {}
        for each in given:
            if each.name in self.agents:
                raise UsageError(f"two agents are named {each.name!r}; a subagent is asked for by its name")
            self.agents[each.name] = each
        self.state = state
        self.limits = limits or SubagentLimits()
        self.permissions = permissions or Permissions()
        self.depth = depth
        self.isolated_in = None if isolated_in is None else Path(isolated_in)
        self._runner = runner
        self._given_containment = containment
        self._containment: ExecutionContext | None = containment
        self._rng = rng or state.rng or Random()
        self._session = state.session
        self._clock = state.clock
        self._children: dict[str, Subagent] = {}
        self._sent_by: set[str] = set()
        self._queue: deque[Subagent] = deque()
        self._running = 0
        self._group: TaskGroup | None = None
        self._wake: anyio.Event = anyio.Event()
        self._changed: anyio.Event = anyio.Event()
        self._is_closing = False

    # .. its life ..

    async def __aenter__(self) -> Subagents:
        if self._group is not None:
            raise UsageError("these subagents are under supervision already")
        self._is_closing = False
        if self._containment is None:
            self._containment = contain(self._session, UNLIMITED)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        try:
            self._take_up()
            self._group.start_soon(self._serve)
        except BaseException:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(None, None, None)
            self._group = None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group = self._group
        assert group is not None
        try:
            with anyio.CancelScope(shield=True):
                await self.close_all("the parent's run is over")
        finally:
            self._is_closing = True
            self._wake.set()
            group.cancel_scope.cancel()
            # What the block raised goes on as it is: a group would wrap it.
            await group.__aexit__(None, None, None)
            self._group = None
            if self._given_containment is None and self._containment is not None:
                self._containment.close()
                self._containment = None

    # .. asking for one ..

    def spawn(
        self,
        agent: str,
        task: str,
        *,
        workspace: WorkspaceMode = "shared",
        allowance: Allowance | None = None,
        retry_of: str | None = None,
        call_id: str | None = None,
    ) -> Subagent:
        """Ask for a subagent. It starts when a slot is free; `wait` says what came of it.

        What is asked for beyond the operator's limits is narrowed, and `notes` says so. Raises
        `UsageError` for an agent that is not known, a workspace that does not exist, a depth or a
        number of children beyond the limits; then nothing was recorded.
        """
        self._require_open()
        if agent not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise UsageError(f"there is no agent {agent!r} to ask for; there are: {known}")
        if not task.strip():
            raise UsageError("a subagent needs a task: say what it should do and what to report")
        if workspace not in WORKSPACE_MODES:
            raise UsageError(f"{workspace!r} is no workspace mode; say {', '.join(WORKSPACE_MODES)}")
        if self.depth + 1 > self.limits.max_depth:
            raise UsageError(
                f"this session is at depth {self.depth}, and subagents may go {self.limits.max_depth} deep; "
                "do the work here"
            )
        if len(self._children) >= self.limits.max_children:
            raise UsageError(
                f"this session has had {len(self._children)} subagents, as many as it may; "
                "send one of them something new, or do the work here"
            )
        granted, notes = narrow(self.limits, allowance or Allowance())
        child = Subagent(
            id=self._new_name(agent),
            session_id=new_id(),
            agent=agent,
            task=task,
            depth=self.depth + 1,
            workspace_mode=workspace,
            allowance=granted,
            retry_of=retry_of,
            call_id=call_id,
            notes=notes,
            inputs=[task],
            is_pending=True,
        )
        child._asked_in = current_call()
        if retry_of is not None:
            child.attempt = self.get(retry_of).attempt + 1
        self._record(child, SubagentStatus.QUEUED)
        self._children[child.id] = child
        self._enqueue(child)
        return child

    def send(self, subagent_id: str, message: str, *, call_id: str | None = None) -> Subagent:
        """Send a subagent something more: its next turn, in the same session.

        One that works reads it after what it is doing; one that has ended starts again. Raises
        `IllegalMoveError` for one that is detached or closed.
        """
        self._require_open()
        child = self.get(subagent_id)
        if not message.strip():
            raise UsageError("the message is empty; say what the subagent should do now")
        self._require_own(child)
        if child.status.is_terminal:
            check_move(child.id, child.status, SubagentStatus.RUNNING)
        was_settled = child.is_settled
        self._remark(child, "input", task=message, call_id=call_id)
        if call_id is not None:
            self._sent_by.add(call_id)
        child.inputs.append(message)
        child.is_pending = True
        if was_settled:
            self._enqueue(child)
        return child

    def resume(self, subagent_id: str) -> Subagent:
        """Go on with the turn in which a subagent failed, timed out or was cancelled.

        For one whose call waited for a person, answer the call first.
        """
        self._require_open()
        child = self.get(subagent_id)
        if child.status in (SubagentStatus.QUEUED, SubagentStatus.RUNNING):
            return child
        self._require_own(child)
        check_move(child.id, child.status, SubagentStatus.RUNNING)
        if child.is_settled:
            child.is_pending = True
            child._goes_on = True
            self._enqueue(child)
        return child

    async def cancel(self, subagent_id: str, reason: str = "cancelled by its parent") -> Subagent:
        """Stop a subagent and wait until it has stopped. One that has ended stays as it is."""
        self._require_open()
        child = self.get(subagent_id)
        self._stop(child, reason)
        while child.status is SubagentStatus.RUNNING:
            await self._changed.wait()
        return child

    def close(self, subagent_id: str, reason: str = "closed by its parent") -> Subagent:
        """Say that a subagent that has ended, or has not begun, is not needed any more. It is final."""
        child = self.get(subagent_id)
        check_move(child.id, child.status, SubagentStatus.CLOSED)
        if child in self._queue:
            self._queue.remove(child)
        before_start = child.status is SubagentStatus.QUEUED
        child.is_pending = False
        self._record(
            child, SubagentStatus.CLOSED, reason=f"closed_before_start: {reason}" if before_start else reason
        )
        self._tell()
        return child

    async def close_all(self, reason: str) -> None:
        """Close what waits and cancel what runs, and return when all of it has ended."""
        for child in list(self._queue):
            if child.status is SubagentStatus.QUEUED:
                self.close(child.id, reason)
            else:
                child.is_pending = False
        self._queue.clear()
        for child in self._children.values():
            self._stop(child, reason)
        while self._running:
            await self._changed.wait()

    # .. looking ..

    @property
    def children(self) -> tuple[Subagent, ...]:
        """Every subagent that this session ever had, oldest first."""
        return tuple(self._children.values())

    def get(self, subagent_id: str) -> Subagent:
        """Return a subagent. Raises `UsageError` if there is none with that id."""
        found = self._children.get(subagent_id)
        if found is None:
            known = ", ".join(self._children) or "none"
            raise UsageError(f"there is no subagent {subagent_id!r}; there are: {known}")
        return found

    def asked_for_by(self, call_id: str) -> Subagent | None:
        """Return the subagent that a tool call of the parent has asked for already, or None."""
        return next((each for each in self._children.values() if each.call_id == call_id), None)

    def was_sent_by(self, call_id: str) -> bool:
        """Say whether a tool call of the parent has sent a subagent something already."""
        return call_id in self._sent_by

    @contextmanager
    def copy_of(self, subagent_id: str) -> Iterator[Copy]:
        """Open an isolated subagent's copy of the workspace, to see or to apply what it has changed.

        Raises `UsageError` for a subagent that has none, that is still at work, or whose copy is gone.
        """
        child = self.get(subagent_id)
        if child.workspace_mode != "isolated":
            raise UsageError(
                f"{child.id} works in a {child.workspace_mode} workspace; "
                "only an isolated one has changes of its own"
            )
        if not child.is_settled:
            raise UsageError(f"{child.id} is still at work; wait for it first")
        charter = None
        if child._workspace is None:
            with Session.open(self._session.log, child.session_id, read_only=True) as session:
                charter = session[SubagentCharter].latest()
            if charter is None:
                raise UsageError(f"{child.id} never started, so there is no copy of the workspace")
            # An empty one in its place would look as if nothing had been changed.
            if charter.fork_place is not None and not Path(charter.fork_place).exists():
                raise UsageError(
                    f"the copy of the workspace that {child.id} worked in, {charter.fork_place}, is gone"
                )
        workspace = open_workspace(
            self.state,
            "isolated",
            session_id=child.session_id,
            charter=charter,
            held=child._workspace,
            isolated_in=self.isolated_in,
        )
        assert workspace.copy is not None
        try:
            yield workspace.copy
        finally:
            workspace.rest()

    async def apply(self, subagent_id: str) -> ToolResult[Any]:
        """Bring what an isolated subagent has changed into the parent's workspace: in one tool call.

        The result says what was applied, or which paths are in conflict.
        """
        tools = {each.name: each for each in subagent_tools(self)}
        runner = ToolRunner(self.state, tools, "subagents", permissions=self.permissions)
        call = ToolCall(f"apply-{new_id().hex}", "apply_agent", {"id": subagent_id})
        return await runner.aexecute(call)

    def poll(self, subagent_ids: Iterable[str] | None = None) -> WaitOutcome:
        """Say what is known now about some subagents, or about all."""
        chosen = self.children if subagent_ids is None else [self.get(each) for each in subagent_ids]
        return wait_outcome(chosen, self._clock.now())

    async def wait(
        self,
        subagent_ids: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
        until: Literal["all", "any"] = "all",
    ) -> WaitOutcome:
        """Wait until subagents have ended, all or any of them, and say what is known then.

        When `timeout_s` is over it returns what is known by then; 0 only looks. It reports; it raises
        nothing for a subagent that went wrong.
        """
        ids = tuple(self._children if subagent_ids is None else subagent_ids)
        chosen = [self.get(each) for each in ids]
        if timeout_s is not None and timeout_s < 0:
            raise UsageError(f"timeout_s is {timeout_s}; say 0 to look without waiting, or more to wait")
        self._refuse_a_wait_for_itself(chosen)
        enough = all if until == "all" else any
        timer, is_over = None, [timeout_s == 0]
        if timeout_s:

            def ring() -> None:
                is_over[0] = True
                self._tell()

            timer = call_later(self._clock, timeout_s, threadsafe(ring))
        try:
            while (
                chosen
                and self._group is not None
                and not is_over[0]
                and not enough(each.is_settled for each in chosen)
            ):
                await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
        return self.poll(ids)

    def _refuse_a_wait_for_itself(self, chosen: Sequence[Subagent]) -> None:
        """A call that holds the workspace would wait for children that wait for the workspace."""
        shared = filesystem_of(self.state)
        waiting = [each.id for each in chosen if each.workspace_mode == "shared" and not each.is_settled]
        for call in enclosing_calls():
            if waiting and call.workspace is not None and call.base is shared:
                raise UsageError(
                    f"the call {call.call.id} of {call.tool.name} holds the workspace that {waiting[0]} "
                    'shares, and would wait for ever; give the tool effects="none", or the subagent a copy'
                )

    # .. recording ..

    def _record(self, child: Subagent, status: SubagentStatus, **facts: Any) -> None:
        """Log a move, and then make it."""
        event = self._event(child, EVENT_NAMES[status], status, **facts)
        apply_event(None if event.event == "queued" else child.status, event)
        self._log(event)
        child.status = status
        child.summary, child.reason = event.summary, event.reason
        child.next_actions, child.artifacts = event.next_actions, event.artifacts
        child.elapsed_ms = event.elapsed_ms

    def _remark(self, child: Subagent, name: str, **facts: Any) -> None:
        event = self._event(child, name, child.status, **facts)
        apply_event(child.status, event)
        self._log(event)

    def _event(self, child: Subagent, name: str, status: SubagentStatus, **facts: Any) -> SubagentEvent:
        timeout_s = child.allowance.timeout_s
        known: dict[str, Any] = {
            "task": child.task,
            "depth": child.depth,
            "max_depth": self.limits.max_depth,
            "timeout_ms": None if timeout_s is None else round(timeout_s * 1000),
            "workspace_mode": child.workspace_mode,
            "log_paths": _log_paths(self._session),
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
        started = self._session[TurnStarted].latest()
        with stamped(turn_id=None if started is None else started.turn_id):
            self._session.dispatch(event)

    def _tell(self) -> None:
        """Wake whoever waits for something to change."""
        self._changed.set()
        self._changed = anyio.Event()

    def _new_name(self, agent: str) -> str:
        number = len(self._children) + 1
        while f"{agent}-{number}" in self._children:
            number += 1
        return f"{agent}-{number}"

    def _require_open(self) -> None:
        if self._group is None or self._is_closing:
            raise UsageError("subagents need supervision: use them inside `async with Subagents(...)`")

    def _require_own(self, child: Subagent) -> None:
        if child._is_inherited:
            raise UsageError(
                f"{child.id} belongs to the session that this one was forked from; "
                "start another subagent here"
            )

    # .. starting ..

    def _enqueue(self, child: Subagent) -> None:
        child._place = telemetry.here()
        self._queue.append(child)
        self._wake.set()

    async def _serve(self) -> None:
        """Start whoever comes first while there is a slot. The only place where children are started."""
        assert self._group is not None
        while True:
            while self._queue and self._running < self.limits.max_threads and not self._is_closing:
                child = self._queue.popleft()
                self._running += 1
                self._group.start_soon(self._supervise, child)
            await self._wake.wait()
            self._wake = anyio.Event()

    async def _supervise(self, child: Subagent) -> None:
        """See a child through until it has nothing more to do, and record how that ended."""
        try:
            with anyio.CancelScope() as scope, telemetry.under(child._place), self._traced(child):
                await self._work(child, scope)
        finally:
            self._running -= 1
            self._wake.set()
            self._tell()

    @contextmanager
    def _traced(self, child: Subagent) -> Iterator[None]:
        """Let telemetry watch a child's work; its turns are below it, and it below whoever asked for it."""
        if not telemetry.is_on():
            yield
            return
        began = self._clock.monotonic()
        about = {
            "gen_ai__agent__name": child.agent,
            "treenail__subagent__workspace_mode": child.workspace_mode,
        }
        with (
            telemetry.span(
                f"subagent {child.agent}",
                **about,
                gen_ai__conversation__id=str(child.session_id),
                treenail__subagent__id=child.id,
                treenail__subagent__depth=child.depth,
            ) as span,
            telemetry.bind(subagent_id=child.id),
        ):
            try:
                yield
            finally:
                ended = child.status.value
                span.set("treenail.subagent.status", ended)
                if child.status is not SubagentStatus.COMPLETED:
                    span.fail(child.error_kind or ended)
                elapsed = self._clock.monotonic() - began
                telemetry.record("treenail.subagents", 1, **about, treenail__subagent__status=ended)
                telemetry.record(
                    "treenail.subagent.duration", elapsed, **about, treenail__subagent__status=ended
                )

    async def _work(self, child: Subagent, scope: anyio.CancelScope) -> None:
        try:
            work, workspace = self._prepare(child, scope)
        except (TreenailError, OSError) as error:
            child.is_pending = False
            self._record_failure(child, f"it could not be started: {_described(error)}")
            return
        ended: TurnResult | None = None
        timers: list[Callable[[], object]] = []
        try:
            if child.status is not SubagentStatus.RUNNING:
                self._record(child, SubagentStatus.RUNNING, **self._starting(child, workspace))
            timers.append(self._watch_over(child, work))
            if child._cancel_reason:
                self._abort(work, child._cancel_reason)
            ended = await self._turns(child, work, workspace)
        except Exception as error:
            _logger.exception("the subagent %s died of an error of its own", child.id)
            self._settle(child, work, None, _described(error))
        except BaseException:
            # Whoever cancels the task, or interrupts it, has no patience left: the evidence is written first.
            self._settle(child, work, None, "")
            raise
        else:
            self._settle(child, work, ended, "", self._artifacts(child, workspace))
        finally:
            for disarm in timers:
                disarm()
            child._work = None
            work.containment.close()
            work.session.close()
            workspace.rest()

    def _starting(self, child: Subagent, workspace: ChildWorkspace) -> dict[str, Any]:
        timeout_s = child.allowance.timeout_s
        return {
            "workspace": workspace.root,
            "deadline_at": None if timeout_s is None else self._clock.now() + timedelta(seconds=timeout_s),
        }

    def _prepare(self, child: Subagent, scope: anyio.CancelScope) -> tuple[_Work, ChildWorkspace]:
        """Open what a child works with. If that fails, nothing stays open."""
        if child.agent not in self.agents:
            raise UsageError(f"the agent {child.agent!r} is not known here")
        assert self._containment is not None
        session = self._open_session(child)
        try:
            workspace = self._open_workspace(child, session)
            containment = self._containment.spawn_child(
                config_of(child.allowance, self.limits.budget),
                metadata=ChainMetadata(request_id=str(child.session_id), chain_id=str(child.session_id)),
                below=child._asked_in,
            )
        except BaseException:
            session.close()
            raise
        work = _Work(scope, CancellationToken(), containment, session)
        child._work = work
        return work, workspace

    def _open_session(self, child: Subagent) -> Session:
        log = self._session.log
        try:
            log.info(child.session_id)
        except SessionNotFoundError:
            tags = {
                **family_tags(self._session.tags),
                "session_id": str(child.session_id),
                "parent_session_id": str(self._session.session_id),
                "agent": child.agent,
                "subagent_id": child.id,
            }
            log.create(
                child.session_id,
                created_at=self._clock.now(),
                parent_id=self._session.session_id,
                tags=tags,
            )
        return Session.open(log, child.session_id, clock=self._clock, codec=self._session.codec)

    def _open_workspace(self, child: Subagent, session: Session) -> ChildWorkspace:
        charter = session[SubagentCharter].latest()
        if charter is not None:
            child._posture = PermissionMode(charter.permission_mode)
        workspace = open_workspace(
            self.state,
            child.workspace_mode,
            session_id=child.session_id,
            charter=charter,
            held=child._workspace,
            isolated_in=self.isolated_in,
        )
        if charter is None:
            session.dispatch(
                SubagentCharter(
                    subagent_id=child.id,
                    agent=child.agent,
                    task=child.task,
                    parent_session_id=str(self._session.session_id),
                    depth=child.depth,
                    workspace_mode=child.workspace_mode,
                    timeout_s=child.allowance.timeout_s,
                    max_steps=child.allowance.max_steps,
                    max_cost_usd=child.allowance.max_cost_usd,
                    permission_mode=self._permissions_of(child).mode.value,
                    fork_base=workspace.fork_base,
                    fork_place=None if workspace.fork_place is None else str(workspace.fork_place),
                )
            )
        child._workspace = workspace if workspace.must_be_held else None
        return workspace

    def _permissions_of(self, child: Subagent) -> Permissions:
        wanted = [self.permissions.mode, child._posture]
        if child.workspace_mode == "read_only":
            wanted.append(PermissionMode.READ_ONLY)
        return replace(self.permissions, mode=max(wanted, key=_STRICTEST_LAST.index))

    # .. working ..

    async def _turns(self, child: Subagent, work: _Work, workspace: ChildWorkspace) -> TurnResult | None:
        """Run the turns that a child has to do: the one that was begun, and one for each input."""
        state = ExecutionState(
            work.session,
            ResourceRegistry.build({})
            if workspace.filesystem is None
            else ResourceRegistry.build({Filesystem: workspace.filesystem}),
            self._clock,
            self.state.rng,
        )
        ended: TurnResult | None = None
        while True:
            begun = len(work.session[TurnStarted].all())
            if begun and (child._goes_on or turn_state(work.session) is TurnState.UNFINISHED):
                task = None
            elif begun < len(child.inputs):
                task = child.inputs[begun]
            else:
                return ended
            child._goes_on = False
            run = ChildRun(
                agent=self.agents[child.agent],
                state=state,
                task=task,
                containment=work.containment,
                cancellation=work.token,
                permissions=self._permissions_of(child),
                depth=child.depth,
                workspace=workspace.root,
            )
            ended = await self._run(run)
            if await self._tries_again(child, work, ended):
                continue
            if turn_state(work.session) is not TurnState.COMPLETED:
                return ended

    async def _run(self, run: ChildRun) -> TurnResult:
        """Run a turn, with subagents of its own if it may have any."""
        if run.depth >= self.limits.max_depth:
            return await self._runner.run(run)
        async with Subagents(
            run.state,
            self.agents,
            runner=self._runner,
            limits=self.limits,
            containment=run.containment,
            permissions=run.permissions,
            depth=run.depth,
            rng=self._rng,
        ) as below:
            return await self._runner.run(replace(run, extra_tools=subagent_tools(below)))

    async def _tries_again(self, child: Subagent, work: _Work, ended: TurnResult) -> bool:
        """Go on after a failure of transport, for a child that can have done no harm."""
        if (
            ended.error_kind not in TRANSPORT_FAILURES
            or child.workspace_mode != "read_only"
            or child.attempt > self.limits.retries
            or work.token.is_cancelled
        ):
            return False
        child.attempt += 1
        child._goes_on = True
        self._remark(child, "retrying", reason=f"{ended.error_kind}: {ended.details}")
        await self._clock.async_sleep(self._rng.random() * RETRY_JITTER_S)
        return True

    # .. stopping ..

    def _stop(self, child: Subagent, reason: str) -> None:
        if child.status is SubagentStatus.QUEUED:
            # Nothing has begun: there is nothing to cancel.
            if child._work is None and child in self._queue:
                self.close(child.id, reason)
            else:
                child._cancel_reason = child._cancel_reason or reason
            return
        if child.status is not SubagentStatus.RUNNING or child._cancel_reason:
            return
        self._remark(child, "cancel_requested", reason=reason)
        child._cancel_reason = reason
        if child._work is not None:
            self._abort(child._work, reason)

    def _abort(self, work: _Work, reason: str) -> None:
        work.containment.abort(reason)
        work.token.cancel(detail=reason)
        call_later(self._clock, GRACE_S, threadsafe(work.scope.cancel))

    def _watch_over(self, child: Subagent, work: _Work) -> Callable[[], object]:
        """Cancel the task of a child that does not heed its containment's deadline."""
        left = work.containment.remaining_s
        if left is None:
            return lambda: None

        def overdue() -> None:
            work.is_overdue = True
            work.scope.cancel()

        return call_later(self._clock, left + GRACE_S, threadsafe(overdue)).cancel

    # .. endings ..

    def _artifacts(self, child: Subagent, workspace: ChildWorkspace) -> tuple[str, ...]:
        try:
            return workspace.artifacts(child.id)
        except (TreenailError, OSError) as error:
            _logger.warning("what %s has changed cannot be told", child.id, exc_info=error)
            return ()

    def _settle(
        self,
        child: Subagent,
        work: _Work,
        ended: TurnResult | None,
        died_of: str,
        artifacts: tuple[str, ...] = (),
    ) -> None:
        """Record how a child ended, as its own log has it."""
        child.is_pending = False
        reason, child._cancel_reason = child._cancel_reason, ""
        seen = turn_state(work.session)
        child.turn_state = seen
        child.error_kind = None if ended is None else ended.error_kind
        child.output = None if ended is None else ended.output
        snapshot = work.containment.get_snapshot()
        facts: dict[str, Any] = {
            "elapsed_ms": max(0, round(snapshot.elapsed_ms)),
            "artifacts": artifacts,
        }
        details = "" if ended is None else ended.details
        status = _ENDINGS[seen]
        if died_of:
            status, details = SubagentStatus.FAILED, f"it died: {died_of}"
        elif work.is_overdue:
            status, details = SubagentStatus.TIMED_OUT, "it did not stop when its time was over"
        elif ended is None and status is not SubagentStatus.COMPLETED:
            status, details = SubagentStatus.CANCELLED, reason or "its parent's run was cancelled"
        elif status is SubagentStatus.CANCELLED:
            details = reason or details or "its parent's run was stopped"
        if status is SubagentStatus.COMPLETED:
            text = "" if ended is None else ended.text
            self._record(
                child, status, summary=text or _last_words(work.session) or _FINISHED_WITHOUT_A_WORD, **facts
            )
            return
        if seen is TurnState.HELD:
            details = f"held: {details or 'a call waits for a person'}"
        if seen is TurnState.UNFINISHED and status is SubagentStatus.FAILED and not died_of:
            details = details or "its log has no ending"
        if status is SubagentStatus.TIMED_OUT:
            details = details or "its time was over"
        self._record(
            child,
            status,
            reason=details or (child.error_kind or "it failed and did not say why"),
            next_actions=_advice(child, status, seen),
            **facts,
        )

    def _record_failure(self, child: Subagent, reason: str) -> None:
        if child.status in (SubagentStatus.QUEUED, SubagentStatus.RUNNING):
            self._record(
                child,
                SubagentStatus.FAILED,
                reason=reason,
                next_actions=_advice(child, SubagentStatus.FAILED, None),
            )
        else:
            # It had ended before and was asked for more, which it did not begin: it stays as it ended.
            _logger.warning("the subagent %s could not go on: %s", child.id, reason)

    # .. after a crash ..

    def _take_up(self) -> None:
        """Learn from the log who was there, and put whoever can go on into the queue."""
        self._children.clear()
        self._sent_by.clear()
        self._queue.clear()
        for event in self._session[SubagentEvent].all():
            self._learn(event)
        for name in self._inherited():
            self._children[name]._is_inherited = True
        for child in self.children:
            if child._is_inherited:
                child.is_pending = False
                if not child.status.is_terminal:
                    self._detach(child, "it belongs to the session that this one was forked from")
            elif child.status is SubagentStatus.RUNNING:
                self._reattach(child)
            elif child.status is SubagentStatus.QUEUED or child.is_pending:
                if child.agent in self.agents:
                    self._enqueue(child)
                elif child.status is SubagentStatus.QUEUED:
                    self._detach(child, f"the agent {child.agent!r} is not known here")

    def _inherited(self) -> set[str]:
        """Name the subagents that this session has only heard of: those from before it was forked."""
        forked_at = int(self._session.tags.get("forked_at", 0))
        if not forked_at:
            return set()
        events = (value for _, value in self._session.events(upto=forked_at))
        return {each.subagent_id for each in events if isinstance(each, SubagentEvent)}

    def _learn(self, event: SubagentEvent) -> None:
        child = self._children.get(event.subagent_id)
        if child is None:
            child = self._children[event.subagent_id] = Subagent(
                id=event.subagent_id,
                session_id=UUID(event.child_session_id),
                agent=event.agent,
                task=event.task,
                depth=event.depth,
                workspace_mode=_mode(event.workspace_mode),
                allowance=self._still_allowed(
                    Allowance(
                        timeout_s=None if event.timeout_ms is None else event.timeout_ms / 1000,
                        max_steps=event.max_steps,
                        max_cost_usd=event.max_cost_usd,
                    )
                ),
                retry_of=event.retry_of,
                call_id=event.call_id,
                inputs=[event.task],
            )
        if event.event == "input":
            child.inputs.append(event.task)
            if event.call_id is not None:
                self._sent_by.add(event.call_id)
        child._cancel_reason = event.reason if event.event == "cancel_requested" else ""
        child.status = SubagentStatus(event.status)
        child.attempt = event.attempt
        child.is_pending = event.event in ("queued", "input") or not child.status.is_terminal
        if event.event == EVENT_NAMES[child.status]:
            child.summary, child.reason = event.summary, event.reason
            child.next_actions, child.artifacts = event.next_actions, event.artifacts
            child.elapsed_ms = event.elapsed_ms

    def _reattach(self, child: Subagent) -> None:
        """Go on with a child that ran when the process died, or say why not."""
        try:
            session = Session.open(
                self._session.log, child.session_id, clock=self._clock, codec=self._session.codec
            )
        except LeaseHeldError as error:
            self._detach(child, f"somebody else is writing its log: {error}")
            return
        except TreenailError as error:
            self._detach(child, f"its log cannot be opened: {_described(error)}")
            return
        try:
            self._reattach_open(child, session)
        finally:
            session.close()

    def _reattach_open(self, child: Subagent, session: Session) -> None:
        charter = session[SubagentCharter].latest()
        if child.workspace_mode == "shared":
            # Whatever becomes of it: a call that was cut off must not hold the workspace that others share.
            recover(ExecutionState(session, self.state.resources, self._clock))
        seen = turn_state(session)
        begun = len(session[TurnStarted].all())
        if begun and seen is not TurnState.UNFINISHED and begun >= len(child.inputs):
            # It had ended; only the parent's log did not know yet.
            self._settle_from_log(child, session, seen)
            return
        if child._cancel_reason:
            reason, child._cancel_reason = child._cancel_reason, ""
            child.is_pending = False
            self._record(child, SubagentStatus.CANCELLED, reason=reason, elapsed_ms=0)
            return
        if child.agent not in self.agents:
            self._detach(child, f"the agent {child.agent!r} is not known here")
            return
        if child.workspace_mode == "isolated" and (charter is None or charter.fork_place is None):
            self._detach(child, "its isolated workspace was in the memory of the process that died")
            return
        self._remark(child, "reattached", reason="the process that ran it is gone")
        self._enqueue(child)

    def _still_allowed(self, granted: Allowance) -> Allowance:
        """What it was allowed, narrowed to what the operator allows now."""
        return narrow(self.limits, granted)[0]

    def _settle_from_log(self, child: Subagent, session: Session, seen: TurnState) -> None:
        child.turn_state = seen
        child.is_pending = False
        status = _ENDINGS[seen]
        if status is SubagentStatus.COMPLETED:
            self._record(
                child, status, summary=_last_words(session) or _FINISHED_WITHOUT_A_WORD, elapsed_ms=0
            )
            return
        self._record(
            child,
            status,
            reason=f"its log says that its turn was {seen.value}",
            next_actions=_advice(child, status, seen),
            elapsed_ms=0,
        )

    def _detach(self, child: Subagent, reason: str) -> None:
        child.is_pending = False
        self._record(
            child,
            SubagentStatus.DETACHED,
            reason=reason,
            next_actions=_ways_on(child),
        )


def _ways_on(child: Subagent) -> tuple[str, ...]:
    """Say what can be done about a child that is out of reach."""
    look = f"look at its log: treenail show {child.session_id}"
    again = "start another subagent for the task"
    if child.workspace_mode == "shared":
        return (look, f"go on with it as a run of its own: treenail resume {child.session_id}", again)
    return (look, again)


def _advice(child: Subagent, status: SubagentStatus, seen: TurnState | None) -> tuple[str, ...]:
    if seen is TurnState.HELD:
        return (f"answer the call that waits in session {child.session_id}", f"resume {child.id}")
    if status is SubagentStatus.TIMED_OUT:
        return (
            f"send {child.id} a smaller task, or start another one with more time",
            f"use what it has done so far: session {child.session_id}",
        )
    if status is SubagentStatus.CANCELLED:
        return (f"resume {child.id}, or send it something else",)
    return (f"look at the log of session {child.session_id}", f"send {child.id} a corrected task")


def _mode(name: str) -> WorkspaceMode:
    return name if name in WORKSPACE_MODES else "shared"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _last_words(session: Session) -> str:
    last = session[InnerMessage].latest()
    return last.content if last is not None and last.role == "assistant" else ""


def _log_paths(session: Session) -> tuple[str, ...]:
    path = getattr(session.log, "path", None)
    return () if path is None else (str(path),)

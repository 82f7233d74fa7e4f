"""The subagents of one parent session, under supervision: many at once, each recorded in the parent's log.

Theory of operation
-------------------
A subagent is a child session: it has its own log, linked to its parent's session, and works inside the
parent's containment. All subagents share one ledger, so no money is spent twice; the parent's deadline and
cancellation reach them. `Subagents` is the parent's side. Apart from the tasks that run right now, it keeps
nothing that is not in the logs.

- **Record first.** Each move of `treenail.subagents.states` is in the parent's log before it takes effect:
  `queued` before anything exists, `started` before the first model call, an ending before a waiter hears
  of it. A failing tool call of the parent does not roll these events back.
- **First come, first served.** `max_threads` run at once. A subagent in the queue has no session, no lease
  and no task.
- **Endings are read.** When a turn returns, its ending is derived from the child's log (`endings`). A task
  that crashed, or that returned without evidence, has `failed`.
- **After a crash** the logs decide what becomes of each subagent (`recovery`).

Call everything here in the event loop in which the supervision was entered. A tool call that holds the
workspace must not wait for a subagent that shares it: give that tool `effects="none"`, as the tools of
`subagent_tools` have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import anyio

from treenail import telemetry
from treenail.agent import AnyAgent
from treenail.children import stopped_by
from treenail.clock import new_id
from treenail.containment import UNLIMITED, ExecutionContext, current_call
from treenail.errors import UsageError
from treenail.state import ExecutionState
from treenail.subagents.background import BackgroundTasks
from treenail.subagents.events import WORKSPACE_MODES, WorkspaceMode
from treenail.subagents.limits import Allowance, SubagentLimits, narrow
from treenail.subagents.outcomes import WaitOutcome, wait_outcome
from treenail.subagents.recovery import recover_subagents
from treenail.subagents.roster import Roster
from treenail.subagents.runner import ChildRun, ChildRunner
from treenail.subagents.states import SubagentStatus, check_move
from treenail.subagents.subagent import Subagent
from treenail.subagents.tools import subagent_tools
from treenail.subagents.work import SubagentWork
from treenail.subagents.workspaces import WorkspaceCopy, open_copy
from treenail.tools import Permissions, ToolCall, ToolResult, ToolRunner, enclosing_calls, filesystem_of
from treenail.turns import TurnResult, contain


class Subagents:
    """The subagents of one parent session. Enter it (`async with`) for as long as they may run.

    `agents` are the ones that can be spawned by name, `runner` runs their turns (`LoopRunner(provider)` for
    our own loop), and `limits` are the operator's ceilings. Leaving cancels the running subagents and closes
    the queued ones, with evidence; one that was detached is interrupted in its own log.

    Subagents spend from `containment`, the parent's. `depth` is the parent's own depth. Isolated copies of a
    workspace on disk are in its private store.
    """

    def __init__(
        self,
        state: ExecutionState,
        agents: Sequence[AnyAgent] | Mapping[str, AnyAgent],
        *,
        runner: ChildRunner,
        limits: SubagentLimits | None = None,
        containment: ExecutionContext | None = None,
        permissions: Permissions | None = None,
        depth: int = 0,
    ) -> None:
        self.agents: dict[str, AnyAgent] = {}
        for each in agents.values() if isinstance(agents, Mapping) else agents:
            if each.name in self.agents:
                raise UsageError(f"two agents are named {each.name!r}; subagents are spawned by name")
            self.agents[each.name] = each
        self.state = state
        self.limits = limits or SubagentLimits()
        self.permissions = permissions or Permissions()
        self.depth = depth
        self._runner = runner
        self._containment = containment
        self._chain: ExecutionContext | None = None
        self._clock = state.clock
        self._roster = Roster(state.session, self.limits)
        self._queue: deque[Subagent] = deque()
        self._at_work: dict[str, SubagentWork] = {}
        self._tasks: BackgroundTasks | None = None
        self._resources = AsyncExitStack()
        self._changed = anyio.Event()

    # .. entering and leaving ..

    async def __aenter__(self) -> Subagents:
        if self._tasks is not None:
            raise UsageError("these subagents are under supervision already")
        async with AsyncExitStack() as stack:
            self._chain = self._containment
            if self._chain is None:
                self._chain = contain(self.state.session, UNLIMITED)
                stack.callback(self._chain.close)
            self._tasks = await stack.enter_async_context(BackgroundTasks())
            stack.callback(self._forget_tasks)
            self._queue.clear()
            for child in recover_subagents(self._roster, self.state, self.agents, self._chain.seen_ms):
                self._enqueue(child)
            self._resources = stack.pop_all()
        return self

    def _forget_tasks(self) -> None:
        self._tasks = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async with self._resources:
            with anyio.CancelScope(shield=True):
                await self.close_all("the parent's run is over")

    # .. starting and steering ..

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
        """Queue a new subagent. It starts when a slot is free; `wait` reports its outcome.

        Limits beyond the operator's are narrowed, and `notes` says so. Raises `UsageError`, and records
        nothing, for an unknown agent or workspace mode, an empty task, and too many or too deep children.
        """
        self._require_open()
        self._check_spawn(agent, task, workspace)
        granted, notes = narrow(self.limits, allowance or Allowance())
        child = Subagent(
            id=self._roster.new_id(agent),
            session_id=new_id(),
            agent=agent,
            task=task,
            depth=self.depth + 1,
            workspace_mode=workspace,
            allowance=granted,
            attempt=1 if retry_of is None else self.get(retry_of).attempt + 1,
            retry_of=retry_of,
            call_id=call_id,
            notes=notes,
            inputs=[task],
            is_pending=True,
            asked_in=current_call(),
        )
        self._roster.add(child)
        self._enqueue(child)
        return child

    def _check_spawn(self, agent: str, task: str, workspace: WorkspaceMode) -> None:
        if agent not in self.agents:
            known = ", ".join(sorted(self.agents)) or "none"
            raise UsageError(f"there is no agent {agent!r}; there are: {known}")
        if not task.strip():
            raise UsageError("a subagent needs a task: say what it should do and what to report")
        if workspace not in WORKSPACE_MODES:
            raise UsageError(f"{workspace!r} is not a workspace mode; use {', '.join(WORKSPACE_MODES)}")
        if self.depth + 1 > self.limits.max_depth:
            raise UsageError(
                f"this session is at depth {self.depth}, and subagents may go {self.limits.max_depth} deep; "
                "do the work here"
            )
        if len(self.children) >= self.limits.max_children:
            raise UsageError(
                f"this session has had {len(self.children)} subagents, which is the limit; "
                "send one of them a new message, or do the work here"
            )

    def send(self, subagent_id: str, message: str, *, call_id: str | None = None) -> Subagent:
        """Send a subagent a message: its next turn, in the same session.

        A running subagent reads it after its present turn; one that has ended starts again. Raises
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
        self._roster.send(child, message, call_id)
        if was_settled:
            self._enqueue(child)
        return child

    def resume(self, subagent_id: str) -> Subagent:
        """Resume the turn in which a subagent failed, timed out or was cancelled.

        If a tool call of that turn waits for a person, answer the call first.
        """
        self._require_open()
        child = self.get(subagent_id)
        if not child.status.is_terminal:
            return child
        self._require_own(child)
        check_move(child.id, child.status, SubagentStatus.RUNNING)
        if child.is_settled:
            child.is_pending = child.resumes_turn = True
            self._enqueue(child)
        return child

    async def cancel(self, subagent_id: str, reason: str = "cancelled by its parent") -> Subagent:
        """Stop a subagent and wait until it has stopped. One that has ended stays as it is."""
        self._require_open()
        child = self.get(subagent_id)
        if child.status is SubagentStatus.DETACHED:
            return child
        self._stop(child, reason)
        while child.status is SubagentStatus.RUNNING or child.id in self._at_work:
            await self._changed.wait()
        return child

    def detach(self, subagent_id: str, reason: str = "detached by its parent") -> Subagent:
        """Let a running subagent continue by itself: it is no longer waited for, and cannot be steered.

        It works in its own session, inside the same limits, for as long as this supervision is open; how it
        ends is in its own log only. When the supervision is left before that, its turn is interrupted there,
        and can be resumed as a run of its own. Raises `UsageError` for one that has not begun its work, and
        `IllegalMoveError` for one that has ended.
        """
        self._require_open()
        child = self.get(subagent_id)
        if child.status is SubagentStatus.QUEUED:
            raise UsageError(f"{child.id} has not begun its work; wait until it is running, or close it")
        self._roster.detach(child, reason)
        self._notify()
        return child

    def close(self, subagent_id: str, reason: str = "closed by its parent") -> Subagent:
        """Close a subagent that has ended or has not started. This is final."""
        child = self.get(subagent_id)
        check_move(child.id, child.status, SubagentStatus.CLOSED)
        if child in self._queue:
            self._queue.remove(child)
        if child.status is SubagentStatus.QUEUED:
            reason = f"closed_before_start: {reason}"
        child.is_pending = False
        self._roster.move(child, SubagentStatus.CLOSED, reason=reason)
        self._notify()
        return child

    async def close_all(self, reason: str) -> None:
        """Close every queued subagent, cancel every running one, and return when all have ended."""
        for child in list(self._queue):
            if child.status is SubagentStatus.QUEUED:
                self.close(child.id, reason)
            else:
                child.is_pending = False
        self._queue.clear()
        for child in self.children:
            self._stop(child, reason)
        for work in self._at_work.values():
            if work.child.status is SubagentStatus.DETACHED:
                work.abort(reason)
        while self._at_work:
            await self._changed.wait()

    def _stop(self, child: Subagent, reason: str) -> None:
        if child in self._queue and child.status is SubagentStatus.QUEUED:
            self.close(child.id, reason)
        elif child.status is SubagentStatus.RUNNING:
            if not child.cancel_reason:
                self._roster.remark(child, "cancel_requested", reason=reason)
                child.cancel_reason = reason
                if child.id in self._at_work:
                    self._at_work[child.id].abort(reason)
        elif child.id in self._at_work:
            # Its task is about to start, and looks at this first.
            child.cancel_reason = child.cancel_reason or reason

    def _require_open(self) -> None:
        if self._tasks is None:
            raise UsageError("subagents need supervision: use them inside `async with Subagents(...)`")

    def _require_own(self, child: Subagent) -> None:
        if child.is_inherited:
            raise UsageError(
                f"{child.id} belongs to the session that this one was forked from; "
                "start another subagent here"
            )

    # .. the queue ..

    def _enqueue(self, child: Subagent) -> None:
        child.trace_parent = telemetry.here()
        self._queue.append(child)
        self._start_next()

    def _start_next(self) -> None:
        """Start queued subagents, oldest first, while there are free slots."""
        while self._tasks is not None and self._queue and len(self._at_work) < self.limits.max_threads:
            assert self._chain is not None
            child = self._queue.popleft()
            work = self._at_work[child.id] = SubagentWork(
                child,
                self._roster,
                self.state,
                self.agents,
                self.limits,
                self.permissions,
                self._chain,
                self._run_turn,
            )
            self._tasks.start(self._supervise, work)

    async def _supervise(self, work: SubagentWork) -> None:
        try:
            await work.run()
        finally:
            del self._at_work[work.child.id]
            self._start_next()
            self._notify()

    async def _run_turn(self, run: ChildRun) -> TurnResult:
        """Run a turn of a subagent, with subagents of its own if its depth allows any."""
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
        ) as below:
            return await self._runner.run(replace(run, extra_tools=subagent_tools(below)))

    def _notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    # .. looking and waiting ..

    @property
    def children(self) -> tuple[Subagent, ...]:
        """Every subagent that this session ever had, oldest first."""
        return self._roster.children

    def get(self, subagent_id: str) -> Subagent:
        """Return a subagent. Raises `UsageError` for an unknown id."""
        return self._roster.get(subagent_id)

    def spawned_by(self, call_id: str) -> Subagent | None:
        """Return the subagent that a tool call of the parent has already spawned, or None."""
        return self._roster.spawned_by(call_id)

    def was_sent_by(self, call_id: str) -> bool:
        """Say whether a tool call of the parent has already sent its message."""
        return self._roster.was_sent_by(call_id)

    def poll(self, subagent_ids: Iterable[str] | None = None) -> WaitOutcome:
        """Return what is known now about some subagents, or about all."""
        chosen = self.children if subagent_ids is None else [self.get(each) for each in subagent_ids]
        return wait_outcome(chosen, self._clock.now())

    async def wait(
        self,
        subagent_ids: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
        until: Literal["all", "any"] = "all",
    ) -> WaitOutcome:
        """Wait until all or any of some subagents have ended, and return what is known then.

        After `timeout_s` it returns what is known by then; 0 returns at once. A subagent that went wrong is
        reported in the outcome, not raised.
        """
        chosen = self.children if subagent_ids is None else [self.get(each) for each in subagent_ids]
        if timeout_s is not None and timeout_s < 0:
            raise UsageError(f"timeout_s is {timeout_s}; use 0 to look without waiting, or more to wait")
        self._refuse_deadlock(chosen)
        enough = all if until == "all" else any
        if chosen and timeout_s != 0:
            with stopped_by(self._clock, timeout_s):
                while self._tasks is not None and not enough(each.is_settled for each in chosen):
                    await self._changed.wait()
        return wait_outcome(chosen, self._clock.now())

    def _refuse_deadlock(self, chosen: Sequence[Subagent]) -> None:
        """Refuse a wait in a call that holds the workspace for subagents that need the workspace."""
        shared = filesystem_of(self.state)
        waiting = [each.id for each in chosen if each.workspace_mode == "shared" and not each.is_settled]
        for call in enclosing_calls():
            if waiting and call.workspace is not None and call.base is shared:
                raise UsageError(
                    f"the call {call.call.id} of {call.tool.name} holds the workspace that {waiting[0]} "
                    'shares, and would wait for ever; give the tool effects="none", or the subagent a copy'
                )

    # .. copies ..

    @contextmanager
    def copy_of(self, subagent_id: str) -> Iterator[WorkspaceCopy]:
        """Open an isolated subagent's copy of the workspace, to inspect or apply its changes.

        Raises `UsageError` for a subagent without a copy, one that is still running, or a deleted copy.
        """
        child = self.get(subagent_id)
        if not child.is_settled or child.id in self._at_work:
            what = "continues by itself" if child.is_settled else "is still running; wait for it first"
            raise UsageError(f"{child.id} {what}")
        if child.copy_in_memory is not None and child.copy_in_memory.copy is not None:
            yield child.copy_in_memory.copy
            return
        with open_copy(self.state, child.id, child.session_id, child.workspace_mode) as copy:
            yield copy

    async def apply(self, subagent_id: str) -> ToolResult[Any]:
        """Apply an isolated subagent's changes to the parent's workspace, in one tool call.

        The result lists what was applied, or which paths are in conflict.
        """
        tools = {each.name: each for each in subagent_tools(self)}
        runner = ToolRunner(self.state, tools, "subagents", permissions=self.permissions)
        call = ToolCall(f"apply-{new_id().hex}", "apply_agent", {"id": subagent_id})
        return await runner.aexecute(call)

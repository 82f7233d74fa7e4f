"""The tool transaction: a call changes state and files together, or not at all.

Theory of operation
-------------------
A call goes through one sequence, whoever waits in the middle of it:

    plan     look the tool up and parse its arguments; nothing has happened yet
    gate     a call with effects waits for its turn: one at a time per session
    begin    ask policies and permissions; hold the workspace; log `ToolStarted`
             (from here a crash can be undone); stage what the session is told
    handler  sync in this thread or a worker, async in the event loop, or elsewhere
             between two hooks (a native tool)
    end      success: write the workspace's boundary, then log everything that was
             staged, the outbox, `ToolInvoked` and the caller's message in *one* append.
             That append is the commit. failure: put the files back, forget what was
             staged, log `ToolInvoked` and the message as history.

`begin` and `end` are plain functions; `execute` and `aexecute` differ only in how they
wait. A call without effects needs no undo, so it skips the gate and `ToolStarted`, and
costs one append.

After a crash the log says which calls had begun and not ended. `recover` undoes them
before anything else runs, and says of each whether it can be run again. A call that
acted outside and is not idempotent cannot: nobody knows what came of it, and that is
recorded, not guessed.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import anyio
import anyio.from_thread
import anyio.to_thread

from holdfast.clock import new_id
from holdfast.containment.cancel import CancellationToken
from holdfast.errors import (
    CancelledByToken,
    DeadlineExceededError,
    HoldRequired,
    PromptEvaluationError,
    RestoreFailedError,
    ToolCommitError,
    ToolError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from holdfast.log.event import SlicePolicy
from holdfast.state.events import AttentionNeeded
from holdfast.state.execution import ExecutionState
from holdfast.state.resources import Snapshotable
from holdfast.state.session import Session, Transaction
from holdfast.state.snapshot import CompositeSnapshot, SnapshotMetadata
from holdfast.tools.context import CallFilesystem, CallOutbox, ToolContext, filesystem_of
from holdfast.tools.events import OutboxPut, Outcome, ToolHeld, ToolInvoked, ToolStarted
from holdfast.tools.gate import gate_of
from holdfast.tools.outbox import Outbox
from holdfast.tools.policies import (
    PermissionMode,
    PermissionRequest,
    Permissions,
    ToolPolicy,
    answer_of,
    register_policy_state,
)
from holdfast.tools.tool import Effects, Tool, ToolCall, ToolResult, as_result
from holdfast.workspace.base import Filesystem, FilesystemSnapshot, WorkspaceCall

_logger = logging.getLogger("holdfast.tools")

_KEPT_MESSAGE = 1_000
"""How much of a result's text `ToolInvoked` keeps; the model's copy is whole, in its message."""

MAX_PARALLEL = 16
"""How many calls without effects run at once."""

Record = Callable[[ToolResult[Any]], Sequence[object]]
"""Makes the events that belong to a call's end, such as the tool's message; logged with it."""


Around = Callable[[ToolCall, Callable[[], Awaitable[ToolResult[Any]]]], Awaitable[ToolResult[Any]]]
"""Is given a call and a function that runs it, and returns its result."""


def _no_record(result: ToolResult[Any]) -> Sequence[object]:
    return ()


@dataclass(slots=True)
class _Plan:
    """A call that can be tried: the tool is known and the arguments fit, or it is known why not."""

    call: ToolCall
    tool: Tool[Any, Any] | None
    params: Any
    refusal: tuple[Outcome, str] | None
    context: ToolContext
    record: Record

    @property
    def effects(self) -> Effects:
        return "none" if self.tool is None or self.refusal is not None else self.tool.effects


@dataclass(slots=True)
class OpenCall:
    """A call that has begun and not ended."""

    call: ToolCall
    tool: Tool[Any, Any]
    params: Any
    context: ToolContext
    attempt_id: str
    started_at: float
    transaction: Transaction
    record: Record
    workspace: WorkspaceCall | None = None
    filesystem: CallFilesystem | None = None
    saved: Mapping[type, tuple[Snapshotable[object], object]] = field(default_factory=dict)
    pre: CompositeSnapshot | None = None


@dataclass(slots=True)
class ToolExecutionOutcome:
    """What `tool_execution` hands to its block: set `result`, or raise."""

    result: ToolResult[Any] | None = None
    tool: Tool[Any, Any] | None = None
    params: Any = None
    context: ToolContext | None = None


@dataclass(slots=True)
class ToolRunner:
    """Runs tools under one transaction, the same for every adapter."""

    execution_state: ExecutionState
    tool_registry: Mapping[str, Tool[Any, Any]]
    prompt_name: str = ""
    adapter: str = ""
    policies: Mapping[str, Sequence[ToolPolicy]] | Sequence[ToolPolicy] = ()
    """Policies for all tools, or per tool name."""
    permissions: Permissions = field(default_factory=Permissions)
    outbox: Outbox = field(default_factory=Outbox)

    def __post_init__(self) -> None:
        register_policy_state(self.execution_state.session)

    # .. the two faces ..

    def execute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = _no_record
    ) -> ToolResult[Any]:
        """Run a call to its end, blocking.

        Whatever goes wrong in the tool is a failed result. Raised are only what the loop must act
        on: `VisibilityExpansionRequired`, `PromptEvaluationError` (a passed deadline is one, with
        `phase="tool"`), `HoldRequired`, cancellation and `KeyboardInterrupt`; always after the
        rollback.
        """
        plan = self._plan(tool_call, context or ToolContext(self.execution_state), record)
        gate = self._gate() if plan.effects != "none" else None
        if gate is not None:
            gate.acquire()
        try:
            begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                return begun
            try:
                with begun.transaction.active():
                    outcome = begun.tool.call(begun.params, begun.context)
                    if inspect.isawaitable(outcome):
                        outcome = _drive(outcome)
            except BaseException as error:  # noqa: BLE001  # classified, and raised again where it must be
                return self._fail(begun, error)
            return self._end(begun, outcome)
        finally:
            if gate is not None:
                gate.release()

    async def aexecute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = _no_record
    ) -> ToolResult[Any]:
        """Run a call to its end. A sync handler runs in a worker thread; a deadline really cancels."""
        plan = self._plan(tool_call, context or ToolContext(self.execution_state), record)
        gate = self._gate() if plan.effects != "none" else None
        if gate is not None:
            await gate.acquire_async()
        try:
            begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                return begun
            try:
                outcome = await self._await_handler(begun)
            except BaseException as error:  # noqa: BLE001  # classified, and raised again where it must be
                return self._fail(begun, error)
            return self._end(begun, outcome)
        finally:
            if gate is not None:
                gate.release()

    async def aexecute_all(
        self,
        tool_calls: Sequence[ToolCall],
        *,
        context: ToolContext | None = None,
        record: Callable[[ToolCall], Record] = lambda call: _no_record,
        around: Around | None = None,
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer: those without effects side by side, the others in order.

        `around` is put around each call, such as a containment that must allow it first.
        """
        results: dict[int, ToolResult[Any]] = {}
        limit = anyio.CapacityLimiter(MAX_PARALLEL)

        async def one(index: int, call: ToolCall) -> None:
            async def execute() -> ToolResult[Any]:
                return await self.aexecute(call, context=context, record=record(call))

            async with limit:
                results[index] = await (execute() if around is None else around(call, execute))

        index = 0
        while index < len(tool_calls):
            run = index
            while run < len(tool_calls) and self._is_free(tool_calls[run]):
                run += 1
            if run == index:
                await one(index, tool_calls[index])
                index += 1
                continue
            try:
                async with anyio.create_task_group() as group:
                    for position in range(index, run):
                        group.start_soon(one, position, tool_calls[position])
            except BaseExceptionGroup as errors:
                if len(errors.exceptions) == 1:
                    raise errors.exceptions[0] from None
                raise
            index = run
        return [results[position] for position in range(len(tool_calls))]

    def execute_all(
        self, tool_calls: Sequence[ToolCall], *, context: ToolContext | None = None
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer, blocking."""

        async def run() -> Sequence[ToolResult[Any]]:
            return await self.aexecute_all(tool_calls, context=context)

        return cast("Sequence[ToolResult[Any]]", _drive(run()))

    def _is_free(self, call: ToolCall) -> bool:
        tool = self.tool_registry.get(call.name)
        return tool is None or tool.effects == "none"

    def _gate(self) -> Any:
        return gate_of(self.execution_state.session.session_id)

    async def _await_handler(self, begun: OpenCall) -> Any:
        deadline = begun.context.deadline
        seconds = None if deadline is None else max(deadline.remaining().total_seconds(), 0)
        with anyio.move_on_after(seconds) as scope, begun.transaction.active():
            unlink = _cancel_on(begun.context.cancellation, scope)
            try:
                if begun.tool.is_async:
                    outcome = await begun.tool.call(begun.params, begun.context)
                else:
                    # The thread may be left behind: its handles refuse once the call is over.
                    outcome = await anyio.to_thread.run_sync(
                        begun.tool.call, begun.params, begun.context, abandon_on_cancel=True
                    )
                    if inspect.isawaitable(outcome):
                        outcome = await outcome
            finally:
                unlink()
        if scope.cancelled_caught:
            if begun.context.cancellation.is_cancelled:
                begun.context.cancellation.raise_if_cancelled()
            begun.context.cancellation.cancel("timeout", detail="the deadline passed")
            raise DeadlineExceededError(f"the deadline passed while {begun.tool.name} was running")
        return outcome

    # .. native tools: the body runs elsewhere, between two hooks ..

    def begin(
        self,
        tool_call: ToolCall,
        *,
        tool: Tool[Any, Any] | None = None,
        context: ToolContext | None = None,
        record: Record = _no_record,
    ) -> OpenCall | ToolResult[Any]:
        """Begin a call whose body runs elsewhere. End it with `end`, or undo it with `abort`.

        Returns the open call, or the result if it may not run at all. The session's turn is taken
        until then.
        """
        plan = self._plan(tool_call, context or ToolContext(self.execution_state), record, native=tool)
        gate = self._gate() if plan.effects != "none" else None
        if gate is not None:
            gate.acquire()
        try:
            begun = self._begin(plan)
        except BaseException:
            if gate is not None:
                gate.release()
            raise
        if isinstance(begun, ToolResult) and gate is not None:
            gate.release()
        return begun

    def end(self, begun: OpenCall, outcome: Any) -> ToolResult[Any]:
        """End a call that was begun with `begin`."""
        try:
            return self._end(begun, outcome)
        finally:
            if begun.tool.effects != "none":
                self._gate().release()

    def abort(self, begun: OpenCall, error: BaseException) -> ToolResult[Any]:
        """Undo a call that was begun with `begin`. Raises what `execute` would raise."""
        try:
            return self._fail(begun, error)
        finally:
            if begun.tool.effects != "none":
                self._gate().release()

    # .. plan ..

    def _plan(
        self, call: ToolCall, context: ToolContext, record: Record, native: Tool[Any, Any] | None = None
    ) -> _Plan:
        tool = native or self.tool_registry.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self.tool_registry)) or "none"
            message = f"There is no tool {call.name!r}. There are: {known}."
            return _Plan(call, None, None, ("invalid", message), context, record)
        if native is not None and native.params_type is None:
            return _Plan(call, tool, None, None, context, record)
        try:
            params = tool.parse(call.arguments)
        except ToolValidationError as error:
            return _Plan(call, tool, None, ("invalid", str(error)), context, record)
        return _Plan(call, tool, params, None, context, record)

    # .. begin ..

    def _begin(self, plan: _Plan) -> OpenCall | ToolResult[Any]:
        session = self.execution_state.session
        outbox = CallOutbox(session.session_id, plan.call.id)
        plan.context = replace(plan.context, session=session, call_id=plan.call.id, outbox=outbox)
        if plan.tool is None or plan.refusal is not None:
            return self._refuse(plan, *(plan.refusal or ("invalid", "")))
        deadline = plan.context.deadline
        if deadline is not None and deadline.passed():
            message = f"the deadline had passed before {plan.tool.name} began"
            self._refuse(plan, "timed_out", message)
            raise PromptEvaluationError(message, prompt_name=self.prompt_name, phase="tool")
        plan.context.cancellation.raise_if_cancelled()
        denial = (
            self._unknown(plan, plan.tool)
            or self._denied(plan, plan.tool)
            or self._forbidden(plan, plan.tool)
        )
        if denial is not None:
            return self._refuse(plan, *denial)
        return self._open(plan, plan.tool)

    def _denied(self, plan: _Plan, tool: Tool[Any, Any]) -> tuple[Outcome, str] | None:
        for policy in self._policies_for(tool.name):
            decision = policy.check(tool, plan.params, context=plan.context)
            if not decision.allowed:
                return (
                    "denied",
                    decision.reason or f"The policy {policy.name} does not allow {tool.name} now.",
                )
        return None

    def _policies_for(self, name: str) -> Sequence[ToolPolicy]:
        if isinstance(self.policies, Mapping):
            return self.policies.get(name, ())
        return self.policies

    def _forbidden(self, plan: _Plan, tool: Tool[Any, Any]) -> tuple[Outcome, str] | None:
        """Ask the permissions. Raises `HoldRequired` if a person has to answer first."""
        mode = self.permissions.mode_for(tool)
        if tool.effects == "none" or mode is PermissionMode.AUTO:
            return None
        if mode is PermissionMode.READ_ONLY:
            return "denied", f"This run is read-only: {tool.name} would change something. Go on without it."
        return self._ask(plan, tool, "the operator wants to be asked before this tool runs")

    def _ask(self, plan: _Plan, tool: Tool[Any, Any], reason: str) -> tuple[Outcome, str] | None:
        session, call = self.execution_state.session, plan.call
        answer = answer_of(session, call.id)
        if answer is not None:
            if answer.approved:
                return None
            return "denied", f"A person refused this call of {tool.name}." + (
                f" {answer.note}" if answer.note else ""
            )
        if self.permissions.approver is not None:
            said = self.permissions.approver(
                PermissionRequest(call.id, tool.name, call.arguments_json, tool.effects)
            )
            if said is not None:
                return None if said else ("denied", f"A person refused this call of {tool.name}.")
        if all(held.call_id != call.id for held in session[ToolHeld].all()):
            now = self.execution_state.clock.now()
            session.dispatch(ToolHeld(call.id, tool.name, call.arguments_json, reason, now))
        raise HoldRequired(call.id, tool.name, reason=reason)

    def _unknown(self, plan: _Plan, tool: Tool[Any, Any]) -> tuple[Outcome, str] | None:
        """A call that acted outside and was cut off is not run again unless that does no harm."""
        if not plan.context.is_resume or tool.effects != "external" or tool.idempotent:
            return None
        last = _last_attempt(self.execution_state.session, plan.call.id)
        if last is None or last.outcome != "unknown":
            return None
        if tool.on_unknown == "hold":
            return self._ask(
                plan, tool, "a crash cut this call off; nobody knows whether it took effect outside"
            )
        return "unknown", last.result.message

    def _refuse(self, plan: _Plan, outcome: Outcome, message: str) -> ToolResult[Any]:
        """End a call that did not begin: nothing to undo, one append."""
        result: ToolResult[Any] = ToolResult.error(message)
        invoked = self._invoked(plan.call, plan.context, result, outcome, attempt_id=new_id().hex)
        self.execution_state.session.dispatch_all([invoked, *plan.record(result)])
        return result

    def _open(self, plan: _Plan, tool: Tool[Any, Any]) -> OpenCall | ToolResult[Any]:
        state, session = self.execution_state, self.execution_state.session
        begun = OpenCall(
            call=plan.call,
            tool=tool,
            params=plan.params,
            context=plan.context,
            attempt_id=new_id().hex,
            started_at=state.clock.monotonic(),
            transaction=session.begin(),
            record=plan.record,
        )
        begun.context = replace(plan.context, session=begun.transaction.session)
        filesystem = filesystem_of(state)
        try:
            # Every participant is captured before the first change: whoever cannot be captured fails here.
            if filesystem is not None:
                begun.filesystem = self._hold(begun, filesystem)
                begun.context = replace(begun.context, held_filesystem=cast(Filesystem, begun.filesystem))
            if tool.effects != "none":
                begun.saved = self._save_others(filesystem)
            if state.checkpoints is not None:
                begun.pre = self._boundary(
                    begun, "pre_tool", None if begun.workspace is None else begun.workspace.base
                )
        except Exception as error:  # noqa: BLE001  # whatever it is, the call cannot begin
            self._let_go(begun)
            return self._refuse(
                plan, "failed", f"{tool.name} could not begin: {type(error).__name__}: {error}"
            )
        if tool.effects != "none":
            try:
                session.dispatch(
                    ToolStarted(
                        call_id=plan.call.id,
                        attempt_id=begun.attempt_id,
                        tool_name=tool.name,
                        effects=tool.effects,
                        foreign=tool.foreign,
                        idempotent=tool.idempotent,
                        on_unknown=tool.on_unknown,
                        workspace=None if begun.workspace is None else begun.workspace.base,
                    )
                )
            except BaseException:
                self._let_go(begun)
                raise
        return begun

    def _hold(self, begun: OpenCall, filesystem: Filesystem) -> CallFilesystem:
        if begun.tool.effects == "none":
            return CallFilesystem(filesystem.read_only_view(), begun.call.id)
        begun.workspace = filesystem.begin(
            begun.call.id, tool_name=begun.tool.name, foreign=begun.tool.foreign
        )
        return CallFilesystem(filesystem, begun.call.id)

    def _save_others(self, filesystem: Filesystem | None) -> dict[type, tuple[Snapshotable[object], object]]:
        """Capture the resources that are not the workspace and that a failed call must not change."""
        resources = self.execution_state.resources
        return {
            each: (resource, resource.snapshot(tag="pre"))
            for each, resource in resources.snapshotable_resources().items()
            if cast(object, resource) is not filesystem and resources.policy_of(each) is not SlicePolicy.LOG
        }

    def _let_go(self, begun: OpenCall) -> None:
        if begun.filesystem is not None:
            begun.filesystem.end()
        if begun.workspace is not None:
            begun.workspace.rollback()
        begun.transaction.rollback()

    def _boundary(
        self, begun: OpenCall, phase: Literal["pre_tool", "post_tool"], workspace: FilesystemSnapshot | None
    ) -> CompositeSnapshot:
        known: dict[type, object] = {}
        if workspace is not None:
            known[cast("type[Any]", Filesystem)] = workspace
        return self.execution_state.snapshot(
            tag=f"{phase.removesuffix('_tool')}:{begun.call.id}",
            metadata=SnapshotMetadata(
                tag=f"{phase.removesuffix('_tool')}:{begun.call.id}",
                tool_call_id=begun.call.id,
                tool_name=begun.tool.name,
                phase=phase,
            ),
            known=known,
        )

    # .. end ..

    def _end(self, begun: OpenCall, outcome: Any) -> ToolResult[Any]:
        """Commit a call that succeeded; roll back one that did not."""
        try:
            result = as_result(outcome)
            begun.context.cancellation.raise_if_cancelled()
            if begun.context.deadline is not None:
                begun.context.deadline.raise_if_passed(f"the tool call {begun.call.id}")
            if result.success:
                with begun.transaction.active():
                    for policy in self._policies_for(begun.tool.name):
                        policy.on_result(begun.tool, begun.params, result, context=begun.context)
                    for value in _typed_values(result):
                        begun.transaction.session.dispatch(value)
        except BaseException as error:  # noqa: BLE001  # classified and raised again where it must be
            return self._fail(begun, error)
        if not result.success:
            return self._roll_back(begun, result, "failed")
        try:
            messages = self._commit(begun, result)
        except BaseException as error:
            if not self._was_committed(begun):
                return self._fail(begun, _as_commit_error(begun, error))
            # The log has it: the call stands, whatever came after. Only the undo information is left over.
            self._finish(begun)
            raise
        self._finish(begun)
        self._deliver(messages)
        return result

    def _commit(self, begun: OpenCall, result: ToolResult[Any]) -> tuple[OutboxPut, ...]:
        if begun.filesystem is not None:
            begun.filesystem.end()
        workspace = None if begun.workspace is None else begun.workspace.prepare()
        messages = begun.context.outbox.close()
        invoked = self._invoked(
            begun.call,
            begun.context,
            result,
            "ok",
            attempt_id=begun.attempt_id,
            elapsed=self._elapsed(begun),
            workspace=workspace,
        )
        begun.transaction.commit(*messages, invoked, *begun.record(result))
        if self.execution_state.checkpoints is not None and begun.pre is not None:
            post = self._boundary(begun, "post_tool", workspace)
            self.execution_state.checkpoints.record(
                begun.call.id, pre=begun.pre, post=post, result=result, elapsed=self._elapsed(begun)
            )
        return messages

    def _finish(self, begun: OpenCall) -> None:
        if begun.workspace is None:
            return
        try:
            begun.workspace.finish()
        except Exception as error:  # noqa: BLE001  # left for the next recovery, which knows that it is committed
            _logger.warning("undo information of call %s could not be removed yet: %s", begun.call.id, error)

    def _deliver(self, messages: tuple[OutboxPut, ...]) -> None:
        if messages and self.outbox.handlers:
            self.outbox.flush(self.execution_state.session, messages)

    def _was_committed(self, begun: OpenCall) -> bool:
        """Ask the log whether the call's end is in it: an interrupt may come just after the append."""
        session = self.execution_state.session
        for _, value in session.events(after=max(0, session.head - 64)):
            if isinstance(value, ToolInvoked) and value.attempt_id == begun.attempt_id:
                return True
        return False

    def _fail(self, begun: OpenCall, error: BaseException) -> ToolResult[Any]:
        """Roll back, and return the failed result or raise what the loop must act on."""
        name = begun.tool.name
        if isinstance(error, VisibilityExpansionRequired):
            self._roll_back(begun, ToolResult.error(str(error)), "failed", tell=False)
            raise error
        if isinstance(error, DeadlineExceededError):
            self._roll_back(begun, ToolResult.error(f"{name} ran out of time: {error}"), "timed_out")
            raise PromptEvaluationError(str(error), prompt_name=self.prompt_name, phase="tool") from error
        if isinstance(error, PromptEvaluationError):
            self._roll_back(begun, ToolResult.error(f"{name} failed: {error}"), "failed")
            raise error
        if isinstance(error, CancelledByToken) or not isinstance(error, Exception):
            message = f"{name} was interrupted; everything it had changed was rolled back"
            self._roll_back(begun, ToolResult.error(message), "interrupted")
            raise error
        if isinstance(error, ToolError):
            return self._roll_back(begun, ToolResult.error(str(error)), "failed")
        _logger.info("the tool %s failed", name, exc_info=error)
        return self._roll_back(begun, ToolResult.error(f"{name} failed: {_describe(error)}"), "failed")

    def _roll_back(
        self, begun: OpenCall, result: ToolResult[Any], outcome: Outcome, *, tell: bool = True
    ) -> ToolResult[Any]:
        begun.context.outbox.close()
        problems: list[str] = []
        conflicts: tuple[str, ...] = ()
        if begun.filesystem is not None:
            _attempt(problems, "the workspace handle", begun.filesystem.end)
        for each, (resource, saved) in reversed(tuple(begun.saved.items())):
            _attempt(problems, each.__qualname__, partial(resource.restore, saved))
        if begun.workspace is not None:
            report = _attempt(problems, "the workspace", begun.workspace.rollback)
            conflicts = report.conflicts if report is not None else ()
        if conflicts:
            shown = ", ".join(conflicts[:10])
            result = replace(
                result, message=f"{result.message} (left as somebody else changed them: {shown})"
            )
        result = replace(result, value=None)
        events: list[object] = [
            self._invoked(
                begun.call,
                begun.context,
                result,
                outcome,
                attempt_id=begun.attempt_id,
                elapsed=self._elapsed(begun),
                conflicts=conflicts,
            )
        ]
        if problems:
            events.append(
                AttentionNeeded(
                    reason=f"the call {begun.call.id} of {begun.tool.name} could not be rolled back whole",
                    details=tuple(problems),
                    next_actions=("compare the workspace with its last boundary", "roll back by hand"),
                )
            )
        if tell:
            events.extend(begun.record(result))
        begun.transaction.rollback(*events)
        if self.execution_state.checkpoints is not None and begun.pre is not None:
            self.execution_state.checkpoints.record(
                begun.call.id, pre=begun.pre, result=result, elapsed=self._elapsed(begun)
            )
        if problems:
            raise RestoreFailedError(
                f"the call {begun.call.id} of {begun.tool.name} failed and could not be rolled back whole: "
                f"{'; '.join(problems)}. The session needs attention.",
                failed=problems,
                undone=False,
            )
        return result

    def _elapsed(self, begun: OpenCall) -> timedelta:
        return timedelta(seconds=max(0.0, self.execution_state.clock.monotonic() - begun.started_at))

    def _invoked(
        self,
        call: ToolCall,
        context: ToolContext,
        result: ToolResult[Any],
        outcome: Outcome,
        *,
        attempt_id: str,
        elapsed: timedelta = timedelta(0),
        workspace: FilesystemSnapshot | None = None,
        conflicts: tuple[str, ...] = (),
    ) -> ToolInvoked:
        return ToolInvoked(
            prompt_name=self.prompt_name,
            adapter=self.adapter,
            name=call.name,
            params=_as_object(call),
            result=ToolResult(result.render()[:_KEPT_MESSAGE], success=result.success),
            session_id=self.execution_state.session.session_id,
            created_at=self.execution_state.clock.now(),
            call_id=call.id,
            run_context=context.run_context,
            attempt_id=attempt_id,
            outcome=outcome,
            elapsed_ms=round(elapsed.total_seconds() * 1000, 3),
            workspace=workspace,
            conflicts=conflicts,
        )


# --- the seed's context manager, and hooks ---------------------------------------------------------


@contextmanager
def tool_execution(
    *,
    context: ToolContext,
    tool_call: ToolCall,
    execution_state: ExecutionState,
    tool: Tool[Any, Any] | None = None,
) -> Iterator[ToolExecutionOutcome]:
    """Run a block as the body of a tool call: kept if it sets a successful result, else rolled back.

    The block sets `outcome.result`, or raises. An exception becomes a failed `outcome.result`,
    except for those that the loop must act on (see `ToolRunner.execute`).
    """
    runner = ToolRunner(execution_state, {})
    body = tool or Tool(name=_tool_name(tool_call.name), description="A call whose body is a block of code.")
    begun = runner.begin(tool_call, tool=body, context=context)
    outcome = ToolExecutionOutcome(tool=body)
    if isinstance(begun, ToolResult):
        outcome.result = begun
        yield outcome
        return
    outcome.params, outcome.context = begun.params, begun.context
    try:
        with begun.transaction.active():
            yield outcome
    except BaseException as error:  # noqa: BLE001  # abort raises it again where it must be
        outcome.result = runner.abort(begun, error)
        return
    outcome.result = runner.end(begun, outcome.result)


def _tool_name(name: str) -> str:
    return "".join(each if each.isalnum() and each.isascii() else "_" for each in name.lower())[:64] or "tool"


class PendingToolTracker:
    """Tools whose body runs outside this process, between two hooks: begin, then end or abort."""

    def __init__(self, runner: ToolRunner, *, effects: Effects = "workspace", foreign: bool = True) -> None:
        self._runner = runner
        self._effects: Effects = effects
        self._foreign = foreign
        self._open: dict[str, OpenCall] = {}

    def begin(
        self, call_id: str, name: str, *, arguments: str | Mapping[str, Any] = "{}"
    ) -> ToolResult[Any] | None:
        """A native tool is about to run. Returns a result if it must not."""
        body: Tool[Any, Any] = Tool(
            name=_tool_name(name),
            description="A tool that runs elsewhere.",
            effects=self._effects,
            foreign=self._foreign,
        )
        begun = self._runner.begin(ToolCall(call_id, name, arguments), tool=body)
        if isinstance(begun, ToolResult):
            return begun
        self._open[call_id] = begun
        return None

    def end(self, call_id: str, success: bool, message: str = "") -> bool:
        """A native tool has ended. Says whether its changes were rolled back."""
        begun = self._open.pop(call_id, None)
        if begun is None:
            return False
        outcome: ToolResult[Any] = ToolResult(message or ("OK" if success else "failed"), success=success)
        return not self._runner.end(begun, outcome).success

    def abort(self, call_id: str, reason: str = "aborted") -> bool:
        """A native tool was given up. Its changes are rolled back; says whether there was such a call."""
        begun = self._open.pop(call_id, None)
        if begun is None:
            return False
        self._runner.abort(begun, ToolError(reason))
        return True

    def abort_all(self, reason: str = "aborted") -> None:
        """Give up every call that is open."""
        for call_id in tuple(self._open):
            self.abort(call_id, reason)


# --- small things ----------------------------------------------------------------------------------


def _attempt(problems: list[str], what: str, action: Callable[[], Any]) -> Any:
    """Do one part of a rollback; if it fails, go on with the others and say so."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001  # each part is tried, whatever the others do
        problems.append(f"{what}: {type(error).__name__}: {error}")
        return None


def _cancel_on(token: CancellationToken, scope: anyio.CancelScope) -> Callable[[], None]:
    """Let a token, set from any thread, cancel a scope of this event loop."""
    loop = anyio.lowlevel.current_token()

    def cancel() -> None:
        try:
            anyio.from_thread.run_sync(scope.cancel, token=loop)
        except RuntimeError:
            # Set from the event loop's own thread, where no hand-over is needed.
            scope.cancel()

    return token.on_cancel(cancel)


def _drive(awaitable: Awaitable[Any]) -> Any:
    """Run an async handler from sync code."""

    async def run() -> Any:
        return await awaitable

    try:
        return anyio.from_thread.run(run)
    except RuntimeError:
        pass  # Not in a worker thread of an event loop: start one.
    return anyio.run(run)


def _typed_values(result: ToolResult[Any]) -> Sequence[object]:
    """The parts of a result that populate slices: a record, or a sequence of records."""
    value = result.value
    if _is_record(value):
        return (value,)
    if isinstance(value, (list, tuple)) and value and all(_is_record(each) for each in value):
        return tuple(value)
    return ()


def _is_record(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__pydantic_fields__")


def _as_object(call: ToolCall) -> Mapping[str, object]:
    try:
        data = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _last_attempt(session: Session, call_id: str) -> ToolInvoked | None:
    for each in reversed(session[ToolInvoked].all()):
        if each.call_id == call_id:
            return each
    return None


def _as_commit_error(begun: OpenCall, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    wrapped = ToolCommitError(
        f"{begun.tool.name} ran, but its changes could not be committed ({_describe(error)}); "
        "they were rolled back"
    )
    wrapped.__cause__ = error
    return wrapped

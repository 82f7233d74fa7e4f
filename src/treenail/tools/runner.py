"""The tool transaction: a call changes state and files together, or not at all.

Theory of operation
-------------------
A call goes through one sequence, whoever waits in the middle of it:

    plan     look the tool up and parse its arguments; nothing has happened yet
    gates    a call with effects waits for its turn: one at a time per session, and one
             at a time per workspace where sessions share one
    begin    ask policies and permissions; hold the workspace; log `ToolStarted`
             (from here a crash can be undone); stage what the session is told
    handler  sync in this thread or a worker, async in the event loop, or elsewhere
             between two hooks (a native tool)
    end      success: close the call's own resources, write the workspace's boundary,
             then log everything that was staged, the outbox, the caller's message and
             `ToolInvoked` in *one* append. That append is the commit.
             failure: put the files back, forget what was staged, log the message and
             `ToolInvoked` as history.

`begin` and `end` are plain functions; `execute` and `aexecute` differ only in how they
wait. A call without effects needs no undo, so it skips the gates and `ToolStarted`, and
costs one append.

An interrupt may come between any two steps, also in the middle of a rollback. Each part
of a rollback can be repeated, so the part that was interrupted is done again and the
interrupt raised afterwards; giving a turn back is repeated for the same reason. Should
even that be cut short, the call is still open in the workspace and in the log, and the
next call finds it there and ends it the way the log says.

After a crash the log says which calls had begun and not ended. `recover` undoes them
before anything else runs, and says of each whether it can be run again. A call that
acted outside and is not idempotent cannot: nobody knows what came of it, and that is
recorded, not guessed.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast
from uuid import UUID

import anyio
import anyio.from_thread
import anyio.lowlevel
from pydantic_core import from_json

from treenail.clock import new_id, new_ids
from treenail.codec import FrozenDict
from treenail.containment.cancel import CancellationToken
from treenail.containment.limits import StopReason
from treenail.containment.threads import threadsafe, wait_finished, workers
from treenail.errors import (
    CancelledByToken,
    DeadlineExceededError,
    HoldRequired,
    PromptEvaluationError,
    RestoreFailedError,
    ToolCommitError,
    ToolError,
    ToolValidationError,
    UsageError,
    VisibilityExpansionRequired,
    WorkspaceError,
)
from treenail.log.event import SlicePolicy
from treenail.state.events import AttentionNeeded
from treenail.state.execution import ExecutionState
from treenail.state.resources import ResourceContext, ResourceRegistry, Snapshotable, ToolScope
from treenail.state.session import Session
from treenail.state.snapshot import CompositeSnapshot, SnapshotMetadata
from treenail.state.transaction import Transaction
from treenail.tools.boundaries import recover, workspace_call_id
from treenail.tools.context import (
    CallFilesystem,
    CallOutbox,
    CallResources,
    ToolContext,
    context_of,
    filesystem_of,
)
from treenail.tools.events import OutboxPut, Outcome, ToolHeld, ToolInvoked, ToolStarted
from treenail.tools.gate import (
    Gate,
    Turn,
    Turns,
    cancellations,
    foremost,
    gate_of,
    heed_cancellations,
    is_in_event_loop,
)
from treenail.tools.outbox import Outbox
from treenail.tools.policies import (
    PermissionMode,
    PermissionRequest,
    Permissions,
    ToolPolicy,
    answer_of,
    hold_of,
    register_policy_state,
)
from treenail.tools.tool import Effects, Tool, ToolCall, ToolResult, as_result
from treenail.workspace.base import Filesystem, FilesystemSnapshot, WorkspaceCall

_logger = logging.getLogger("treenail.tools")

P = ParamSpec("P")
T = TypeVar("T")

_KEPT_MESSAGE = 1_000
"""How much of a result's text `ToolInvoked` keeps; the model's copy is whole, in its message."""

_KEPT_ARGUMENT = 2_000
"""How much of a text in the arguments `ToolInvoked` keeps; the model's own message has it whole."""

_Lock = type(threading.RLock())
"""The lock itself: `threading.RLock` is a function that makes one."""

_AT_ONCE_S = 0.0002
"""How long an event loop stands still for a sync handler: less than putting the loop to sleep and waking it
again takes on many machines, and more than most handlers take. From then on others are served."""

MAX_PARALLEL = 16
"""How many calls without effects run at once."""

Record = Callable[[ToolResult[Any]], Sequence[object]]
"""Makes the events that belong to a call's end, such as the tool's message; logged with it.

If the commit fails it is called again, with the failed result: only what it returned last is logged.
"""

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
    policies: Sequence[ToolPolicy] = ()
    """What has a say over the tool."""
    turns: Turns | None = None
    """The ways through the gates; None for a call that passes none."""
    hold_id: str = ""
    begun: OpenCall | None = None


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has begun and not ended."""

    runner: ToolRunner = field(repr=False)
    call: ToolCall
    tool: Tool[Any, Any]
    params: Any
    given: ToolContext
    """The caller's context, with what all calls share."""
    event_id: UUID
    """The id of the event that ends the call."""
    started_at: float
    transaction: Transaction
    record: Record
    policies: Sequence[ToolPolicy] = ()
    turns: Turns | None = None
    hold_id: str = ""
    attempt_id: str = ""
    """Which attempt at the call this is; empty for a call without effects, which has no start in the log."""
    base: Filesystem | None = None
    """The workspace itself, which the handler does not get to see."""
    workspace: WorkspaceCall | None = None
    making: threading.RLock = field(default_factory=_Lock, repr=False)
    """Held while a part of the handler's context is made: a handler may have threads of its own."""
    # What the context has of its own, once it was asked for. It ends with the call.
    filesystem: CallFilesystem | None = None
    outbox: CallOutbox | None = None
    token: CancellationToken | None = None
    state: ExecutionState | None = None
    scope: AbstractContextManager[ToolScope] | None = None
    is_closed: bool = False
    """Whether what is asked for from now on comes too late."""
    saved: Sequence[tuple[type, Snapshotable[object], object]] = ()
    """What the other resources were when the call began."""
    pre: CompositeSnapshot | None = None
    messages: tuple[OutboxPut, ...] = ()
    is_cut_off: bool = False
    """Whether the handler's token was set because of a cancellation or a deadline, and not the reverse."""
    is_committing: bool = False
    is_over: bool = False

    @property
    def context(self) -> ToolContext:
        """What the handler is given. Its parts are made when they are asked for, and end with the call."""
        return context_of(self)

    @property
    def cancellation(self) -> CancellationToken:
        """What stops the handler: the call's own token, or the caller's if nobody was given one."""
        return self.token or self.given.cancellation

    def part(self, name: str) -> Any:
        """Return a part of the handler's context: one of the call's own, or one that all calls share."""
        match name:
            case "session":
                return self.transaction.session
            case "call_id":
                return self.call.id
            case "held_filesystem":
                return self.own_filesystem()
            case "outbox":
                return self.own_outbox()
            case "cancellation":
                return self.own_token()
            case "state":
                return self.own_state()
        return getattr(self.given, name)

    def own_filesystem(self) -> CallFilesystem | None:
        """Return the workspace as the handler may use it: the one it holds, or read-only."""
        seen = self.runner._read_only if self.workspace is None else self.base
        if seen is None:
            return None
        with self.making:
            if self.filesystem is None:
                self.filesystem = CallFilesystem(seen, self.call.id)
                if self.is_closed:
                    self.filesystem.end()
            return self.filesystem

    def own_outbox(self) -> CallOutbox:
        """Return where the handler puts what is to be delivered if the call is kept."""
        session = self.runner.execution_state.session
        with self.making:
            if self.outbox is None:
                earlier = partial(_times_sent, session, self.call.id)
                self.outbox = CallOutbox(session.session_id, self.call.id, earlier=earlier)
                if self.is_closed:
                    self.outbox.close()
            return self.outbox

    def own_token(self) -> CancellationToken:
        """Return a token below the caller's that stops this call only."""
        with self.making:
            if self.token is None:
                self.token = CancellationToken(None if self.is_closed else self.given.cancellation)
            return self.token

    def own_state(self) -> ExecutionState:
        """Return the whole state as this call may use it: through its own session handle and filesystem."""
        with self.making:
            if self.state is None:
                state, scope = self.runner.execution_state, None
                if isinstance(state.resources, ResourceContext):
                    self.scope = state.resources.tool_scope()
                    scope = self.scope.__enter__()
                    if self.is_closed:
                        _close_scope(self)
                handle: Any = self.own_filesystem()
                resources: Any = CallResources(state.resources, scope, self.base, handle)
                self.state = ExecutionState(
                    self.transaction.session, resources, state.clock, state.rng, state.checkpoints
                )
            return self.state

    def close(self) -> None:
        """Let everything that the handler asks for from now on refuse."""
        with self.making:
            self.is_closed = True

    def enter(self) -> None:
        """Let what the present context does from now on be part of the call.

        For a context that is thrown away (`copy_context().run(...)`), so that an interrupt leaves none of it.
        """
        _inside.set((*_inside.get(), self))
        self.transaction.enter()

    def call_handler(self) -> Any:
        """Call the handler as part of the call, in a context that is thrown away."""
        self.enter()
        return self.tool.call(self.params, context_of(self) if self.tool.takes_context else None)


_inside: ContextVar[tuple[OpenCall, ...]] = ContextVar("treenail_inside_calls", default=())
"""The calls whose handlers the running code is part of."""


def enclosing_calls() -> tuple[OpenCall, ...]:
    """Return the calls that the running code is part of, the outermost first."""
    return tuple(each for each in _inside.get() if not each.is_over)


class _Running:
    """A block that is part of a call. A cancellation that it catches and keeps is heeded at its end."""

    __slots__ = ("_begun", "_cancellations", "_staging", "_token")

    _token: Token[tuple[OpenCall, ...]]
    _staging: Token[tuple[Transaction, ...]]

    def __init__(self, begun: OpenCall) -> None:
        self._begun = begun
        self._cancellations = cancellations()

    def __enter__(self) -> None:
        self._token = _inside.set((*_inside.get(), self._begun))
        self._staging = self._begun.transaction.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begun.transaction.leave(self._staging)
        _inside.reset(self._token)
        if error is None or isinstance(error, Exception):
            heed_cancellations(self._cancellations)


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
    watches_token: bool = True
    """Whether a call that is awaited watches its caller's token itself.

    False for a caller who is cancelled when that token is set: its calls are cut off with it.
    """
    _gates: tuple[Gate, ...] = field(default=(), init=False, repr=False)
    """The session's gate, and the workspace's if there is one that can be changed."""
    _own_context: ToolContext | None = field(default=None, init=False, repr=False)
    """What the calls share that come without a context."""
    _ids: Iterator[UUID] = field(default_factory=new_ids, init=False, repr=False)
    """The ids of the attempts at calls."""
    _session_id: UUID = field(init=False, repr=False)
    _workspace_suffix: str = field(default="", init=False, repr=False)
    """How the names end that this session's calls have towards the workspace."""
    _filesystem: Filesystem | None = field(default=None, init=False, repr=False)
    _held: Filesystem | None = field(default=None, init=False, repr=False)
    """The workspace, if it can be changed: a call with effects holds it."""
    _read_only: Filesystem | None = field(default=None, init=False, repr=False)
    """The workspace as a call without effects sees it."""
    _rolled_back: Mapping[type, Snapshotable[object]] | None = field(default=None, init=False, repr=False)
    """The resources of a registry, which is frozen, that a failed call must not change."""

    def __post_init__(self) -> None:
        state, session = self.execution_state, self.execution_state.session
        filesystem = self._filesystem = filesystem_of(state)
        self._session_id = session.session_id
        self._workspace_suffix = workspace_call_id(self._session_id, "")
        gates = [gate_of(self._session_id, "the session")]
        if filesystem is not None:
            self._read_only = filesystem.read_only_view()
            if not filesystem.read_only:
                self._held = filesystem
                gates.append(gate_of(("workspace", id(filesystem)), "the workspace"))
        self._gates = tuple(gates)
        if isinstance(state.resources, ResourceRegistry):
            self._rolled_back = _rolled_back(state.resources, filesystem)
        register_policy_state(session)
        for prepare in dict.fromkeys(each.prepare for each in self.tool_registry.values()):
            if prepare is not None:
                prepare(session)

    # .. the two faces ..

    def execute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = _no_record
    ) -> ToolResult[Any]:
        """Run a call to its end, blocking.

        Whatever goes wrong in the tool is a failed result. Raised are only what the loop must act
        on: `VisibilityExpansionRequired`, `PromptEvaluationError` (a passed deadline is one, with
        `phase="tool"`), `HoldRequired`, cancellation and `KeyboardInterrupt`; always after the
        rollback. And what is wrong with the caller or the store: `UsageError` for a call from inside
        another, `RestoreFailedError`, and the log's own error if it can record nothing any more.
        """
        plan = self._plan(tool_call, context, record)
        if plan.tool is not None and plan.tool.is_async and is_in_event_loop():
            raise UsageError(
                f"{plan.tool.name} has an async handler, and execute would block the event loop that it "
                "needs; use `await runner.aexecute(...)` here"
            )
        try:
            if plan.turns is not None:
                self._take_turns(plan)
            begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                return begun
            try:
                outcome = copy_context().run(self._call_handler, begun)
            except BaseException as error:  # noqa: BLE001  # classified, and raised again where it must be
                return self._fail(begun, error)
            result = self._end(begun, outcome)
            if begun.messages:
                self._deliver(begun)
            return result
        except BaseException:
            self._leave_nothing(plan)
            raise
        finally:
            if plan.turns is not None:
                _give_back(plan.turns)

    def _call_handler(self, begun: OpenCall) -> Any:
        """Run the handler in this thread; one that is async, in an event loop."""
        tool = begun.tool
        begun.enter()
        if tool.is_async:
            return _drive(partial(self._await_handler, begun))
        outcome = tool.call(begun.params, context_of(begun) if tool.takes_context else None)
        if not isinstance(outcome, str) and _is_awaitable(outcome):
            return _drive(partial(_awaited, outcome))
        return outcome

    async def aexecute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = _no_record
    ) -> ToolResult[Any]:
        """Run a call to its end. A sync handler runs in a worker thread; a deadline really cancels."""
        plan = self._plan(tool_call, context, record)
        try:
            if plan.turns is not None:
                await self._take_turns_async(plan)
            if plan.tool is not None and (plan.tool.foreign or self.permissions.approver is not None):
                begun = await _off_loop(self._begin, plan)
            else:
                begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                return begun
            slow = begun.tool.foreign
            try:
                if begun.tool.is_async:
                    with _Running(begun):
                        outcome = await self._await_handler(begun)
                else:
                    outcome = await self._in_worker(begun)
            except BaseException as error:  # noqa: BLE001  # classified, and raised again where it must be
                return await _off_loop(self._fail, begun, error) if slow else self._fail(begun, error)
            result = await _off_loop(self._end, begun, outcome) if slow else self._end(begun, outcome)
            if begun.messages:
                await _off_loop(self._deliver, begun)
            return result
        except BaseException:
            self._leave_nothing(plan)
            raise
        finally:
            if plan.turns is not None:
                # Not left to a function: an interrupt may come before its first line, and the task's own
                # error keeps the turn alive, so that the gate would not forget it.
                try:
                    plan.turns.give_back()
                except BaseException:
                    plan.turns.give_back()
                    raise

    async def aexecute_all(
        self,
        tool_calls: Sequence[ToolCall],
        *,
        context: ToolContext | None = None,
        record: Callable[[ToolCall], Record] = lambda call: _no_record,
        around: Around | None = None,
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer: those without effects side by side, the others in order.

        `around` is put around each call, such as a containment that must allow it first. If a call
        raises, those beside it still come to their end, and those after it are not run.
        """
        results: list[ToolResult[Any]] = []
        while len(results) < len(tool_calls):
            first = len(results)
            end = first + 1
            if self._is_free(tool_calls[first]):
                while end < len(tool_calls) and self._is_free(tool_calls[end]):
                    end += 1
            if first:
                # Calls may end without the event loop having run: whoever wants to stop them is heard here.
                await anyio.lowlevel.checkpoint()
            if end == first + 1:
                results.append(await self._one(tool_calls[first], context, record, around))
            else:
                results += await self._side_by_side(tool_calls[first:end], context, record, around)
        return results

    def _one(
        self,
        call: ToolCall,
        context: ToolContext | None,
        record: Callable[[ToolCall], Record],
        around: Around | None,
    ) -> Awaitable[ToolResult[Any]]:
        if around is None:
            return self.aexecute(call, context=context, record=record(call))
        return around(call, lambda: self.aexecute(call, context=context, record=record(call)))

    async def _side_by_side(
        self,
        calls: Sequence[ToolCall],
        context: ToolContext | None,
        record: Callable[[ToolCall], Record],
        around: Around | None,
    ) -> Sequence[ToolResult[Any]]:
        """Run calls without effects at the same time. The first one's error is raised when all are done."""
        results: dict[int, ToolResult[Any]] = {}
        errors: dict[int, Exception] = {}
        interrupts: list[BaseException] = []
        limit = anyio.CapacityLimiter(MAX_PARALLEL)
        cancelled = anyio.get_cancelled_exc_class()

        async def one(index: int, call: ToolCall) -> None:
            async with limit:
                try:
                    results[index] = await self._one(call, context, record, around)
                except Exception as error:  # noqa: BLE001  # raised when those beside it are done
                    errors[index] = error
                except BaseException as error:
                    if isinstance(error, cancelled):
                        raise
                    # A task that ends with an interrupt wraps it in a group, or tears the event loop down.
                    interrupts.append(error)
                    group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                for index, call in enumerate(calls):
                    group.start_soon(one, index, call)
        except BaseExceptionGroup as several:  # an interrupt that came between the calls
            raise foremost(several) from None
        finally:
            if interrupts:
                raise interrupts[0]
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(calls))]

    def execute_all(
        self,
        tool_calls: Sequence[ToolCall],
        *,
        context: ToolContext | None = None,
        record: Callable[[ToolCall], Record] = lambda call: _no_record,
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer, blocking."""
        return _drive(partial(self.aexecute_all, tool_calls, context=context, record=record))

    def _is_free(self, call: ToolCall) -> bool:
        tool = self.tool_registry.get(call.name)
        return tool is None or tool.effects == "none"

    def _await_handler(self, begun: OpenCall) -> Awaitable[Any]:
        """Run an async handler; the deadline and the token cut it off."""
        context = begun.context if begun.tool.takes_context else None
        return self._cut_short(begun, begun.tool.call(begun.params, context))

    async def _cut_short(self, begun: OpenCall, work: Awaitable[T]) -> T:
        """Wait for something until it is done, the deadline passes or the token is set."""
        # A handler without a context cannot cancel its own call, so the caller's token will do.
        token = begun.own_token() if begun.tool.takes_context else begun.cancellation
        deadline = begun.given.deadline
        if deadline is None and not begun.tool.takes_context and not self.watches_token:
            return await work
        until = math.inf
        if deadline is not None:
            until = anyio.current_time() + max(deadline.remaining().total_seconds(), 0)
        with anyio.CancelScope(deadline=until) as scope:
            forget = token.on_cancel(threadsafe(scope.cancel))
            try:
                return await work
            finally:
                forget()
        if not begun.is_cut_off:
            token.raise_if_cancelled()
        raise DeadlineExceededError(f"the deadline passed while {begun.tool.name} was running")

    async def _in_worker(self, begun: OpenCall) -> Any:
        """Run a sync handler on a worker thread.

        When it is cut off, its token says so. A thread that goes on all the same is left behind: its
        handles refuse once the call is over. One that works on the tree past them (`foreign`) is
        waited for, because the tree cannot be put back while it does.
        """
        handler = workers.start(begun.call_handler)
        try:
            is_finished = bool(futures.wait([handler], _AT_ONCE_S).done)
        except BaseException:
            await self._stop(begun, handler)
            raise
        if not is_finished:
            await self._cut_short(begun, self._finished(begun, handler))
        outcome: Any = handler.result()
        if not isinstance(outcome, str) and _is_awaitable(outcome):
            with _Running(begun):
                return await self._cut_short(begun, outcome)
        return outcome

    async def _finished(self, begun: OpenCall, handler: futures.Future[Any]) -> None:
        try:
            await wait_finished(handler)
        except BaseException:
            await self._stop(begun, handler)
            raise

    async def _stop(self, begun: OpenCall, handler: futures.Future[Any]) -> None:
        """Tell a handler on its worker thread that nobody waits for it any more."""
        begun.is_cut_off = begun.own_token().cancel(StopReason.ABORTED, detail="the call was cut off")
        if begun.tool.foreign:
            with anyio.CancelScope(shield=True):
                await wait_finished(handler)

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
        plan = self._plan(tool_call, context, record, native=tool)
        try:
            self._take_turns(plan)
            begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                _give_back(plan.turns)
            return begun
        except BaseException:
            self._leave_nothing(plan)
            _give_back(plan.turns)
            raise

    async def abegin(
        self,
        tool_call: ToolCall,
        *,
        tool: Tool[Any, Any] | None = None,
        context: ToolContext | None = None,
        record: Record = _no_record,
    ) -> OpenCall | ToolResult[Any]:
        """Begin a call whose body runs elsewhere, waiting for its turn without blocking the event loop."""
        plan = self._plan(tool_call, context, record, native=tool)
        try:
            await self._take_turns_async(plan)
            if plan.tool is not None and plan.tool.foreign:
                begun = await _off_loop(self._begin, plan)
            else:
                begun = self._begin(plan)
            if isinstance(begun, ToolResult):
                _give_back(plan.turns)
            return begun
        except BaseException:
            self._leave_nothing(plan)
            _give_back(plan.turns)
            raise

    def end(self, begun: OpenCall, outcome: Any) -> ToolResult[Any]:
        """End a call that was begun with `begin`."""
        _check_open(begun)
        try:
            result = self._end(begun, outcome)
            self._deliver(begun)
            return result
        finally:
            _give_back(begun.turns)

    def abort(self, begun: OpenCall, error: BaseException) -> ToolResult[Any]:
        """Undo a call that was begun with `begin`. Raises what `execute` would raise."""
        _check_open(begun)
        try:
            return self._fail(begun, error)
        finally:
            _give_back(begun.turns)

    # .. plan ..

    def _plan(
        self,
        call: ToolCall,
        context: ToolContext | None,
        record: Record,
        native: Tool[Any, Any] | None = None,
    ) -> _Plan:
        if context is None:
            context = self._own_context
            if context is None:
                context = self._own_context = ToolContext(self.execution_state)
        elif (
            context.state is not self.execution_state
            and context.state.session != self.execution_state.session
        ):
            raise UsageError(
                f"the context of the call {call.id} belongs to another session than this runner; "
                "make it of the runner's own state: ToolContext(runner.execution_state)"
            )
        tool = native or self.tool_registry.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self.tool_registry)) or "none"
            message = f"There is no tool {call.name!r}. There are: {known}."
            plan = _Plan(call, None, None, ("invalid", message), context, record)
        elif native is not None and native.handler is None and native.params_type is None:
            plan = _Plan(call, tool, None, None, context, record)
        else:
            try:
                plan = _Plan(call, tool, tool.parse(call.arguments), None, context, record)
            except ToolValidationError as error:
                plan = _Plan(call, tool, None, ("invalid", str(error)), context, record)
        with_effects = plan.refusal is None and tool is not None and tool.effects != "none"
        enclosing = _inside.get()
        if enclosing:
            self._refuse_inside(call, enclosing, with_effects=with_effects)
        if with_effects:
            plan.turns = Turns(self._gates)
        if self.policies and tool is not None:
            plan.policies = self._policies_for(tool.name)
        return plan

    def _refuse_inside(self, call: ToolCall, enclosing: Sequence[OpenCall], *, with_effects: bool) -> None:
        """Raise `UsageError` if the call would wait for one that it is part of."""
        session = self.execution_state.session
        for outer in enclosing:
            if outer.is_over:
                continue
            if outer.transaction.session == session:
                raise UsageError(
                    f"{call.name} was called from inside the call {outer.call.id} of {outer.tool.name}: "
                    "one call is one transaction. Call the tool's function directly, and let the model make "
                    "the other call"
                )
            if with_effects and outer.workspace is not None and outer.base is self._filesystem:
                raise UsageError(
                    f"{call.name} would wait for the workspace that the call {outer.call.id} of "
                    f"{outer.tool.name} holds while it runs; give the inner session a workspace of its own, "
                    'or let the outer tool have effects="none"'
                )

    def _take_turns(self, plan: _Plan) -> None:
        if plan.turns is None:
            return
        try:
            plan.turns.take(plan.context.cancellation, plan.context.deadline)
        except DeadlineExceededError as error:
            raise self._too_late(plan, str(error)) from error

    async def _take_turns_async(self, plan: _Plan) -> None:
        if plan.turns is None:
            return
        try:
            await plan.turns.take_async(plan.context.cancellation, plan.context.deadline)
        except DeadlineExceededError as error:
            raise self._too_late(plan, str(error)) from error

    # .. begin ..

    def _begin(self, plan: _Plan) -> OpenCall | ToolResult[Any]:
        if plan.tool is None or plan.refusal is not None:
            return self._refuse(plan, *(plan.refusal or ("invalid", "")))
        deadline = plan.context.deadline
        if deadline is not None and deadline.passed():
            raise self._too_late(plan, f"the deadline had passed before {plan.tool.name} began")
        plan.context.cancellation.raise_if_cancelled()
        tool, denial = plan.tool, None
        if tool.effects == "external":
            denial = self._unknown(plan, tool)
        if denial is None and plan.policies:
            denial = self._denied(plan, tool)
        if denial is None and tool.effects != "none":
            mode = self.permissions.mode_for(tool)
            if mode is not PermissionMode.AUTO:
                denial = self._forbidden(plan, tool, mode)
        if denial is not None:
            return self._refuse(plan, *denial)
        return self._open(plan, tool)

    def _too_late(self, plan: _Plan, message: str) -> PromptEvaluationError:
        self._refuse(plan, "timed_out", message)
        return PromptEvaluationError(message, prompt_name=self.prompt_name, phase="tool")

    def _denied(self, plan: _Plan, tool: Tool[Any, Any]) -> tuple[Outcome, str] | None:
        context = replace(
            plan.context,
            session=self.execution_state.session,
            call_id=plan.call.id,
            held_filesystem=self._read_only,
        )
        for policy in plan.policies:
            try:
                decision = policy.check(tool, plan.params, context=context)
            except Exception as error:  # a policy that cannot decide has not allowed it
                _logger.warning("the policy %s failed", policy.name, exc_info=error)
                return "denied", f"The policy {policy.name} could not decide about it: {_describe(error)}"
            if not decision.allowed:
                return (
                    "denied",
                    decision.reason or f"The policy {policy.name} does not allow {tool.name} now.",
                )
        return None

    def _policies_for(self, name: str) -> Sequence[ToolPolicy]:
        policies = self.policies
        return policies.get(name, ()) if isinstance(policies, dict | Mapping) else policies

    def _forbidden(
        self, plan: _Plan, tool: Tool[Any, Any], mode: PermissionMode
    ) -> tuple[Outcome, str] | None:
        """Say what a mode has against a call. Raises `HoldRequired` if a person has to answer first."""
        if mode is PermissionMode.READ_ONLY:
            return "denied", f"This run is read-only: {tool.name} would change something. Go on without it."
        return self._ask(plan, tool, "the operator wants to be asked before this tool runs")

    def _ask(
        self, plan: _Plan, tool: Tool[Any, Any], reason: str, *, attempt_id: str = ""
    ) -> tuple[Outcome, str] | None:
        session, call = self.execution_state.session, plan.call
        held = hold_of(session, call.id, attempt_id=attempt_id)
        if held is not None and not self._is_about(held, call):
            held = None
        answer = None if held is None else answer_of(session, held)
        if held is not None and answer is not None:
            if answer.approved:
                plan.hold_id = held.hold_id
                return None
            return "denied", f"A person refused this call of {tool.name}." + (
                f" {answer.note}" if answer.note else ""
            )
        said = self._approver_says(PermissionRequest(call.id, tool.name, call.arguments_json, tool.effects))
        if said is not None:
            return None if said else ("denied", f"A person refused this call of {tool.name}.")
        if held is None:
            now = self.execution_state.clock.now()
            session.dispatch(ToolHeld(call.id, tool.name, call.arguments_json, reason, now, attempt_id))
        raise HoldRequired(call.id, tool.name, reason=reason)

    def _approver_says(self, request: PermissionRequest) -> bool | None:
        if self.permissions.approver is None:
            return None
        try:
            return self.permissions.approver(request)
        except Exception as error:  # nobody said yes, and nobody said no: the call waits
            _logger.warning("the approver failed on %s; the call is held", request.call_id, exc_info=error)
            return None

    def _is_about(self, held: ToolHeld, call: ToolCall) -> bool:
        """Say whether a hold is about this very call. Some providers use an id again for another one."""
        if (held.tool_name, held.arguments) != (call.name, call.arguments_json):
            return False
        last = _last_end(self.execution_state.session, call.id)
        return last is None or last.hold_id != held.hold_id or last.outcome == "interrupted"

    def _unknown(self, plan: _Plan, tool: Tool[Any, Any]) -> tuple[Outcome, str] | None:
        """A call that acted outside and was cut off is not run again unless that does no harm."""
        if tool.idempotent:
            return None
        session = self.execution_state.session
        last, start = _last_end(session, plan.call.id), _last_start(session, plan.call.id)
        if last is None or last.outcome != "unknown" or start is None:
            return None
        if start.attempt_id != last.attempt_id:
            return None  # The model was told already, so this is another call with the same id.
        if tool.on_unknown == "hold":
            return self._ask(
                plan,
                tool,
                "a crash cut this call off; nobody knows whether it took effect outside",
                attempt_id=last.attempt_id,
            )
        return "unknown", last.result.message

    def _refuse(self, plan: _Plan, outcome: Outcome, message: str) -> ToolResult[Any]:
        """End a call that did not begin: nothing to undo, one append."""
        result: ToolResult[Any] = ToolResult.error(message)
        recorded, problem = _recorded(plan.record, result)
        invoked = ToolInvoked(
            prompt_name=self.prompt_name,
            adapter=self.adapter,
            name=plan.call.name,
            params=_kept_arguments(plan.call),
            result=_kept_result(result),
            session_id=self.execution_state.session.session_id,
            created_at=self.execution_state.clock.now(),
            call_id=plan.call.id,
            run_context=plan.context.run_context,
            outcome=outcome,
            batch_events=len(recorded),
        )
        self.execution_state.session.dispatch_all([*recorded, invoked])
        if problem is not None:
            raise problem
        return result

    def _open(self, plan: _Plan, tool: Tool[Any, Any]) -> OpenCall | ToolResult[Any]:
        state, session = self.execution_state, self.execution_state.session
        with_effects = tool.effects != "none"
        event_id = next(self._ids)
        begun = OpenCall(
            self,
            plan.call,
            tool,
            plan.params,
            plan.context,
            event_id,
            state.clock.monotonic(),
            session.begin(),
            plan.record,
            plan.policies,
            plan.turns,
            plan.hold_id,
            event_id.hex if with_effects else "",
            self._filesystem,
        )
        plan.begun = begun
        try:
            # Every participant is captured before the first change: whoever cannot be captured fails here.
            if with_effects:
                if self._held is not None:
                    self._hold(begun, self._held)
                if self._rolled_back != {}:
                    begun.saved = self._save_others(self._filesystem)
            if state.checkpoints is not None:
                begun.pre = self._boundary(
                    begun, "pre_tool", None if begun.workspace is None else begun.workspace.base
                )
        except Exception as error:  # noqa: BLE001  # whatever it is, the call cannot begin
            message = f"{tool.name} could not begin: {_describe(error)}"
            return self._roll_back(begun, ToolResult.error(message), "failed")
        except BaseException as error:  # noqa: BLE001  # raised again when nothing is left of the call
            return self._fail(begun, error)
        if not with_effects:
            return begun
        started = ToolStarted(
            call_id=plan.call.id,
            attempt_id=begun.attempt_id,
            tool_name=tool.name,
            effects=tool.effects,
            foreign=tool.foreign,
            idempotent=tool.idempotent,
            on_unknown=tool.on_unknown,
            workspace=None if begun.workspace is None else begun.workspace.base,
        )
        try:
            # After a crash it tells which call was cut off.
            session.dispatch(started)
        except BaseException as error:
            self._fail(begun, error)
            raise
        return begun

    def _hold(self, begun: OpenCall, filesystem: Filesystem) -> None:
        name, tool = f"{begun.call.id}{self._workspace_suffix}", begun.tool
        try:
            begun.workspace = filesystem.begin(name, tool_name=tool.name, foreign=tool.foreign)
        except WorkspaceError:
            # This call has the gate, so whatever holds the workspace is no longer at work. If it is a call of
            # this session that an interrupt or a crash cut off, the log says how it ended.
            if not recover(self.execution_state):
                raise
            begun.workspace = filesystem.begin(name, tool_name=tool.name, foreign=tool.foreign)
        self._gates[-1].boundary = begun.workspace.base

    def _save_others(
        self, filesystem: Filesystem | None
    ) -> Sequence[tuple[type, Snapshotable[object], object]]:
        """Capture the resources that are not the workspace and that a failed call must not change."""
        chosen = self._rolled_back
        if chosen is None:
            chosen = _rolled_back(self.execution_state.resources, filesystem)
        return [(each, resource, resource.snapshot(tag="pre")) for each, resource in chosen.items()]

    def _boundary(
        self, begun: OpenCall, phase: Literal["pre_tool", "post_tool"], workspace: FilesystemSnapshot | None
    ) -> CompositeSnapshot:
        """Capture everything at one side of a call, for the checkpoints."""
        state = self.execution_state
        tag = f"{phase.removesuffix('_tool')}:{begun.call.id}"
        workspace = workspace or self._quiet_workspace(begun, tag)
        taken: dict[type, object] = {}
        for each, resource in state.resources.snapshotable_resources().items():
            if cast(object, resource) is not begun.base:
                taken[each] = resource.snapshot(tag=tag)
            elif workspace is not None:
                taken[each] = workspace
        return CompositeSnapshot(
            snapshot_id=new_id(),
            created_at=state.clock.now(),
            session=state.session.snapshot(),
            resources=taken,
            metadata=SnapshotMetadata(
                tag=tag, tool_call_id=begun.call.id, tool_name=begun.tool.name, phase=phase
            ),
        )

    def _quiet_workspace(self, begun: OpenCall, tag: str) -> FilesystemSnapshot | None:
        """Return where the workspace is, for a call that does not hold it.

        If another call is at work on it, that is where it was before: what the other one does is not a
        fact yet.
        """
        if begun.base is None or len(self._gates) == 1:
            return None
        gate = self._gates[-1]
        turn = Turn(gate)
        try:
            return begun.base.snapshot(tag=tag) if turn.take_nowait() else gate.boundary
        finally:
            turn.give_back()

    # .. end ..

    def _end(self, begun: OpenCall, outcome: Any) -> ToolResult[Any]:
        """Commit a call that succeeded; roll back one that did not."""
        try:
            result = as_result(outcome)
            # The caller's token is set before those below it follow.
            begun.given.cancellation.raise_if_cancelled()
            if begun.token is not None:
                begun.token.raise_if_cancelled()
            if begun.given.deadline is not None:
                begun.given.deadline.raise_if_passed(f"the tool call {begun.call.id}")
            if result.success and (result.value is not None or begun.scope is not None or begun.policies):
                copy_context().run(self._learn, begun, result)
        except BaseException as error:  # noqa: BLE001  # classified and raised again where it must be
            return self._fail(begun, error)
        if not result.success:
            return self._roll_back(begun, result, "failed")
        try:
            workspace = self._commit(begun, result)
        except BaseException as error:  # noqa: BLE001  # classified and raised again where it must be
            return self._after_commit_failed(begun, result, error)
        self._finish(begun)
        if begun.pre is not None:
            self._note_checkpoint(begun, result, workspace)
        return result

    def _learn(self, begun: OpenCall, result: ToolResult[Any]) -> None:
        """Stage what follows from a success: what policies remember, the typed result, what resources say."""
        begun.enter()
        for policy in begun.policies:
            policy.on_result(begun.tool, begun.params, result, context=begun.context)
        for value in _typed_values(result):
            begun.transaction.session.dispatch(value)
        _close_scope(begun)

    def _commit(self, begun: OpenCall, result: ToolResult[Any]) -> FilesystemSnapshot | None:
        begun.close()
        if begun.scope is not None:
            _close_scope(begun)
        if begun.filesystem is not None:
            begun.filesystem.end()
        workspace = None if begun.workspace is None else begun.workspace.prepare()
        messages = () if begun.outbox is None else begun.outbox.close()
        recorded = tuple(begun.record(result))
        before = len(begun.transaction.staged) + len(messages) + len(recorded)
        changed = None if begun.workspace is None or workspace is begun.workspace.base else workspace
        invoked = self._ended(begun, result, "ok", before, workspace=changed)
        begun.is_committing = True
        begun.transaction.commit(*messages, *recorded, invoked)
        begun.messages = messages
        return workspace

    def _after_commit_failed(
        self, begun: OpenCall, result: ToolResult[Any], error: BaseException
    ) -> ToolResult[Any]:
        """Ask the log whether the call's end is in it: an interrupt may come just after the append."""
        committed = self._is_committed(begun)
        if committed is False:
            return self._fail(begun, _as_commit_error(begun, error))
        if committed is None:
            # Neither kept nor undone: the workspace keeps the undo information until the log can be asked.
            begun.is_over = True
            raise ToolCommitError(
                f"{begun.tool.name} ran, but the log failed ({_describe(error)}) and cannot be read: nobody "
                f"knows whether the call {begun.call.id} was committed. recover() settles it when the log is "
                "back"
            ) from error
        # The log has it: the call stands, whatever came after.
        self._finish(begun)
        if not isinstance(error, Exception):
            raise error
        _logger.warning("the call %s was committed, and then: %s", begun.call.id, error, exc_info=error)
        return result

    def _is_committed(self, begun: OpenCall) -> bool | None:
        if not begun.is_committing:
            return False
        if begun.transaction.is_committed:
            return True
        try:
            return self._is_logged(begun)
        except Exception as error:  # then nobody knows, and that is said
            _logger.warning("the log cannot be read: %s", error, exc_info=error)
            return None

    def _is_logged(self, begun: OpenCall) -> bool:
        event_id = begun.event_id
        return any(
            isinstance(value, ToolInvoked) and value.event_id == event_id
            for _, value in self.execution_state.session.events(after=begun.transaction.began_after)
        )

    def _finish(self, begun: OpenCall) -> None:
        """Let go of a call that is in the log. What cannot be cleared up now is left for a recovery."""
        begun.is_over = True
        if begun.token is not None:
            begun.token.unlink()
        if begun.workspace is None:
            return
        try:
            begun.workspace.finish()
        except Exception as error:  # noqa: BLE001  # the call stands; its undo information is only left over
            _logger.warning("undo information of call %s could not be removed yet: %s", begun.call.id, error)

    def _note_checkpoint(
        self, begun: OpenCall, result: ToolResult[Any], workspace: FilesystemSnapshot | None = None
    ) -> None:
        checkpoints = self.execution_state.checkpoints
        if checkpoints is None or begun.pre is None:
            return
        try:
            post = self._boundary(begun, "post_tool", workspace) if result.success else None
            elapsed = timedelta(milliseconds=self._elapsed_ms(begun))
            checkpoints.record(begun.call.id, pre=begun.pre, post=post, result=result, elapsed=elapsed)
        except Exception as error:  # a convenience: the call has ended whatever becomes of it
            _logger.warning("no checkpoint was recorded for %s: %s", begun.call.id, error, exc_info=error)

    def _deliver(self, begun: OpenCall) -> None:
        if not begun.messages or not self.outbox.handlers:
            return
        try:
            self.outbox.flush(self.execution_state.session)
        except Exception as error:  # the call stands, and what was not delivered waits
            _logger.warning("delivering for %s stopped: %s", begun.call.id, error, exc_info=error)

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
            self._roll_back(begun, _interrupted(name), "interrupted")
            raise error
        if isinstance(error, ToolError):
            return self._roll_back(begun, ToolResult.error(str(error)), "failed")
        _logger.info("the tool %s failed", name, exc_info=error)
        return self._roll_back(begun, ToolResult.error(f"{name} failed: {_describe(error)}"), "failed")

    def _leave_nothing(self, plan: _Plan) -> None:
        """End a call that an interrupt left between two steps."""
        begun = plan.begun
        if begun is None or begun.is_over:
            return
        if self._is_committed(begun):
            self._finish(begun)
        else:
            self._roll_back(begun, _interrupted(begun.tool.name), "interrupted")

    def _roll_back(
        self, begun: OpenCall, result: ToolResult[Any], outcome: Outcome, *, tell: bool = True
    ) -> ToolResult[Any]:
        undo = _Undoing()
        undo.part("the context", begun.close)
        if begun.outbox is not None:
            undo.part("the outbox", begun.outbox.close)
        if begun.token is not None:
            undo.part("the cancellation token", begun.token.unlink)
        if begun.filesystem is not None:
            undo.part("the workspace handle", begun.filesystem.end)
        undo.part("the resources of the call", partial(_close_scope, begun))
        for each, resource, saved in reversed(begun.saved):
            undo.part(each.__qualname__, partial(resource.restore, saved))
        conflicts: tuple[str, ...] = ()
        if begun.workspace is not None:
            report = undo.part("the workspace", begun.workspace.rollback)
            conflicts = report.conflicts if report is not None else ()
        if conflicts:
            shown = ", ".join(conflicts[:10])
            result = replace(
                result, message=f"{result.message} (left as somebody else changed them: {shown})"
            )
        result = replace(result, value=None)
        recorded, record_problem = _recorded(begun.record, result) if tell else ((), None)
        events: list[object] = list(recorded)
        if undo.problems:
            events.append(
                AttentionNeeded(
                    reason=f"the call {begun.call.id} of {begun.tool.name} could not be rolled back whole",
                    details=tuple(undo.problems),
                    next_actions=("compare the workspace with its last boundary", "roll back by hand"),
                )
            )
        events.append(self._ended(begun, result, outcome, len(events), conflicts=conflicts))
        begun.is_over = True
        undo.log(partial(self._log_rollback, begun, events))
        self._note_checkpoint(begun, result)
        if undo.interrupt is not None:
            raise undo.interrupt
        if undo.problems:
            raise RestoreFailedError(
                f"the call {begun.call.id} of {begun.tool.name} failed and could not be rolled back whole: "
                f"{'; '.join(undo.problems)}. The session needs attention.",
                failed=undo.problems,
                undone=False,
            )
        if record_problem is not None:
            raise record_problem
        return result

    def _log_rollback(self, begun: OpenCall, events: Sequence[object]) -> None:
        if begun.transaction.is_open:
            begun.transaction.rollback(*events)
        elif not self._is_logged(begun):
            self.execution_state.session.dispatch_all(events)

    def _elapsed_ms(self, begun: OpenCall) -> float:
        """How long the call has taken so far, in milliseconds with three digits behind the point."""
        elapsed_us = int((self.execution_state.clock.monotonic() - begun.started_at) * 1_000_000)
        return elapsed_us / 1000 if elapsed_us > 0 else 0.0

    def _ended(
        self,
        begun: OpenCall,
        result: ToolResult[Any],
        outcome: Outcome,
        batch_events: int,
        *,
        workspace: FilesystemSnapshot | None = None,
        conflicts: tuple[str, ...] = (),
    ) -> ToolInvoked:
        """Make the event that ends a call that had begun."""
        call = begun.call
        # By place, because naming this many arguments takes longer than making the event.
        return ToolInvoked(
            self.prompt_name,
            self.adapter,
            call.name,
            _kept_arguments(call),
            _kept_result(result),
            self._session_id,
            self.execution_state.clock.now(),
            None,  # A tool uses no tokens.
            call.id,
            begun.given.run_context,
            begun.event_id,
            begun.attempt_id,
            outcome,
            self._elapsed_ms(begun),
            workspace,
            conflicts,
            begun.hold_id,
            batch_events,
        )


class _Undoing:
    """A rollback under way: each part is tried, whatever becomes of the others, and an interrupt waits."""

    __slots__ = ("interrupt", "problems")

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.interrupt: BaseException | None = None

    def part(self, what: str, action: Callable[[], T]) -> T | None:
        """Do one part. One that is interrupted is done again: each can be repeated."""
        try:
            try:
                return action()
            except Exception as error:  # noqa: BLE001  # the other parts are tried all the same
                self.problems.append(f"{what}: {_describe(error)}")
            except BaseException as error:  # noqa: BLE001  # raised when everything is put back
                self.interrupt = self.interrupt or error
                return action()
        except Exception as error:  # noqa: BLE001  # the second try failed
            self.problems.append(f"{what}: {_describe(error)}")
        return None

    def log(self, action: Callable[[], None]) -> None:
        """Do the part that tells the log. If the log refuses, that is what is raised."""
        try:
            action()
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001  # raised when everything is put back
            self.interrupt = self.interrupt or error
            action()


# --- the context manager, and hooks ----------------------------------------------------------------


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
    except for those that the loop must act on (see `ToolRunner.execute`). A call that cannot begin
    raises `ToolValidationError` or `ToolError`, recorded like any other end, and the block is not run.
    """
    runner = ToolRunner(execution_state, {})
    body = tool or Tool(name=_tool_name(tool_call.name), description="A call whose body is a block of code.")
    begun = runner.begin(tool_call, tool=body, context=context)
    if isinstance(begun, ToolResult):
        last = _last_end(execution_state.session, tool_call.id)
        if last is not None and last.outcome == "invalid":
            raise ToolValidationError(begun.message)
        raise ToolError(begun.message)
    outcome = ToolExecutionOutcome(tool=body, params=begun.params, context=begun.context)
    try:
        with _Running(begun):
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

    def _body(self, name: str, effects: Effects | None) -> Tool[Any, Any]:
        effects = effects or self._effects
        return Tool(
            name=_tool_name(name),
            description="A tool that runs elsewhere.",
            effects=effects,
            foreign=self._foreign and effects != "none",
        )

    def _note(self, call_id: str, begun: OpenCall | ToolResult[Any]) -> ToolResult[Any] | None:
        if isinstance(begun, ToolResult):
            return begun
        self._open[call_id] = begun
        return None

    def begin(
        self,
        call_id: str,
        name: str,
        *,
        arguments: str | Mapping[str, Any] = "{}",
        effects: Effects | None = None,
        record: Record = _no_record,
    ) -> ToolResult[Any] | None:
        """A native tool is about to run. Returns a result if it must not.

        `effects` says what this tool does, if it is not what the tracker was made for.
        """
        call = ToolCall(call_id, name, arguments)
        return self._note(call_id, self._runner.begin(call, tool=self._body(name, effects), record=record))

    async def abegin(
        self,
        call_id: str,
        name: str,
        *,
        arguments: str | Mapping[str, Any] = "{}",
        effects: Effects | None = None,
        record: Record = _no_record,
    ) -> ToolResult[Any] | None:
        """As `begin`, waiting for its turn without blocking the event loop."""
        call = ToolCall(call_id, name, arguments)
        begun = await self._runner.abegin(call, tool=self._body(name, effects), record=record)
        return self._note(call_id, begun)

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


def _rolled_back(
    resources: ResourceRegistry | ResourceContext, filesystem: Filesystem | None
) -> Mapping[type, Snapshotable[object]]:
    """Return the resources that a rollback takes back, besides the workspace."""
    return {
        each: resource
        for each, resource in resources.snapshotable_resources().items()
        if cast(object, resource) is not filesystem and resources.policy_of(each) is not SlicePolicy.LOG
    }


def _check_open(begun: OpenCall) -> None:
    if begun.is_over:
        raise UsageError(f"the call {begun.call.id} of {begun.tool.name} has ended already")


def _close_scope(begun: OpenCall) -> None:
    """Close the resources that live as long as the call."""
    scope, begun.scope = begun.scope, None
    if scope is not None:
        scope.__exit__(None, None, None)


def _give_back(turns: Turns | None) -> None:
    """Let the next call in. An interrupt in the middle of that is raised when it is done."""
    if turns is not None:
        try:
            turns.give_back()
        except BaseException:
            turns.give_back()
            raise


def _interrupted(name: str) -> ToolResult[Any]:
    return ToolResult.error(f"{name} was interrupted; everything it had changed was rolled back")


def _recorded(record: Record, result: ToolResult[Any]) -> tuple[tuple[object, ...], Exception | None]:
    """Make the caller's events for a call's end. If that fails the call ends without them."""
    try:
        return tuple(record(result)), None
    except Exception as error:  # noqa: BLE001  # raised when the call's end is in the log
        return (), error


async def _off_loop(work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Do something that may take long without stopping the event loop. It is not cut off."""
    future = workers.start(partial(work, *arguments, **keywords))
    with anyio.CancelScope(shield=True):
        await wait_finished(future)
    return future.result()


def _is_awaitable(outcome: object) -> bool:
    # What many handlers return is known not to be; asking about anything else takes longer.
    return not isinstance(outcome, ToolResult) and inspect.isawaitable(outcome)


async def _awaited(outcome: Awaitable[T]) -> T:
    return await outcome


def _drive(start: Callable[[], Awaitable[T]]) -> T:
    """Run something async from sync code."""
    if is_in_event_loop():
        raise UsageError("this would block the event loop that it needs; use the async face here")
    started = False

    async def run() -> T:
        nonlocal started
        started = True
        return await start()

    try:
        return anyio.from_thread.run(run)
    except RuntimeError:
        if started:
            raise
    return anyio.run(run)  # Not in a worker thread of an event loop: start one.


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


def _kept_result(result: ToolResult[Any]) -> ToolResult[Any]:
    """Return what `ToolInvoked` keeps of a result; a short one is kept as it is."""
    is_plain = result.value is None and not result.exclude_value_from_context
    if is_plain and len(result.message) <= _KEPT_MESSAGE:
        return result
    return ToolResult(result.render()[:_KEPT_MESSAGE], success=result.success)


_NO_ARGUMENTS: FrozenDict[str, object] = FrozenDict()


def _kept_arguments(call: ToolCall) -> FrozenDict[str, object]:
    text = call.arguments_json
    if text in ("", "{}"):
        return _NO_ARGUMENTS
    try:
        data = from_json(text)  # The parser that the tool's own parameters went through.
    except ValueError:
        return _NO_ARGUMENTS
    if not isinstance(data, dict):
        return _NO_ARGUMENTS
    return FrozenDict(_shortened(data) if len(text) > _KEPT_ARGUMENT else data)


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _KEPT_ARGUMENT:
        return f"{value[:_KEPT_ARGUMENT]}[{len(value) - _KEPT_ARGUMENT} more characters]"
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return value


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


def _sending_call(message: OutboxPut) -> object:
    return message.call_id


def _times_sent(session: Session, call_id: str) -> int:
    """Say how many committed calls with this id have put something into the outbox."""
    messages = session[OutboxPut].view()
    position = messages.find(_sending_call, call_id)
    if position is None:
        return 0
    rest = messages[position].key.removeprefix(f"{session.session_id}:{call_id}")
    return int(rest[1:].partition(":")[0]) if rest.startswith("#") else 1


def _as_commit_error(begun: OpenCall, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    wrapped = ToolCommitError(
        f"{begun.tool.name} ran, but its changes could not be committed ({_describe(error)}); "
        "they were rolled back"
    )
    wrapped.__cause__ = error
    return wrapped

"""One call as a transaction: it changes state and files together, or not at all.

Theory of operation
-------------------
    open     capture the workspace and the other resources; log `ToolStarted` (from here a crash can be
             undone); stage the events that the handler dispatches
    end      success: close the call's own resources, write the workspace's boundary, then log the staged
             events, the outbox, the caller's message and `ToolInvoked` in *one* append. That append is
             the commit.
             failure: put the files back, drop the staged events, log the message and `ToolInvoked` as
             history.

A call without effects has nothing to undo, so it logs no `ToolStarted` and costs one append.

An interrupt may come between any two steps, also in the middle of a rollback. Each part of a rollback can
be repeated, so the interrupted part is done again and the interrupt raised afterwards. Should even that be
cut short, the call is still open in the workspace and in the log, and the next call finds it there and ends
it the way the log says.

Everything here is plain sync code; waiting is the runner's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID

from treenail.clock import new_id
from treenail.containment import CancellationToken
from treenail.errors import (
    CancelledByToken,
    DeadlineExceededError,
    HoldRequired,
    OutcomeUnknownError,
    PromptEvaluationError,
    RestoreFailedError,
    ToolCommitError,
    ToolError,
    VisibilityExpansionRequired,
    WorkspaceBusyError,
    WorkspaceConflictError,
    WorkspaceError,
)
from treenail.log import SlicePolicy
from treenail.state import (
    AttentionNeeded,
    CompositeSnapshot,
    ExecutionState,
    RandomState,
    ResourceContext,
    Snapshotable,
    ToolScope,
    Transaction,
    random_state,
)
from treenail.tools.boundaries import recover, told_of_undo, unknown_outcome, workspace_call_id
from treenail.tools.context import CallFilesystem, CallOutbox, CallResources, ToolContext
from treenail.tools.environment import CallEnvironment
from treenail.tools.event_loop import cancellations, heed_cancellations
from treenail.tools.events import OutboxPut, Outcome, ToolInvoked, ToolStarted
from treenail.tools.gate import Tickets
from treenail.tools.outbox import times_sent
from treenail.tools.policies import ToolPolicy
from treenail.tools.tool import Tool, ToolCall, ToolResult, as_result
from treenail.tools.values import file_for
from treenail.workspace import Filesystem, FilesystemSnapshot, WorkspaceCall

_logger = logging.getLogger("treenail.tools")

_LEFT_BEHIND = "(the function did not stop when its call was cut off; what it still writes is not undone)"

T = TypeVar("T")

Record = Callable[[ToolResult[Any]], Sequence[object]]
"""Makes the events that belong to a call's end, such as the tool's message; they are logged with it.

If the commit fails it is called again, with the failed result: only the events it returned last are logged.
"""


@dataclass(slots=True)
class PlannedCall:
    """A call that can be tried: the tool is known and the arguments fit, or `refusal` says why not."""

    call: ToolCall
    tool: Tool[Any, Any] | None
    params: Any
    context: ToolContext
    """The caller's context, with the parts that all calls share."""
    record: Record
    refusal: tuple[Outcome, str] | None = None
    policies: Sequence[ToolPolicy] = ()
    """The policies that apply to the tool."""
    tickets: Tickets | None = None
    """The way through the gates; None for a call without effects."""
    hold_id: str = ""
    """The hold that a person approved."""
    told: str = ""
    """What the model is told before the result: that a person changed the arguments."""

    def refuse(self, environment: CallEnvironment, outcome: Outcome, message: str) -> ToolResult[Any]:
        """End a call that did not begin: there is nothing to undo, so it is one append."""
        result: ToolResult[Any] = ToolResult.error(message)
        recorded, problem = _recorded(self.record, result)
        invoked = environment.invoked(
            self.call, result, outcome, run_context=self.context.run_context, batch_events=len(recorded)
        )
        environment.state.session.dispatch_all([*recorded, invoked])
        if problem is not None:
            raise problem
        return result


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has begun and not ended. Open one with `open_call`; end it with `end` or `fail`."""

    environment: CallEnvironment = field(repr=False)
    plan: PlannedCall
    tool: Tool[Any, Any]
    event_id: UUID
    """The id of the event that ends the call."""
    started_at: float
    transaction: Transaction
    made_cancellation: CancellationToken | None = field(default=None, repr=False)
    """The call's own token, once something has asked for it."""
    made_context: ToolContext | None = field(default=None, repr=False)
    """The handler's context, once something has asked for it."""
    filesystem: CallFilesystem | None = None
    workspace: WorkspaceCall | None = None
    """The call's hold on the workspace; None for a call without effects, or without a workspace."""
    scope: AbstractContextManager[ToolScope] | None = None
    """The resources that live as long as the call."""
    scoped: ToolScope | None = None
    """What is open of them."""
    saved: Sequence[tuple[type, Snapshotable[object], object]] = ()
    """The other resources as they were when the call began."""
    saved_rng: RandomState | None = None
    """Where the injected random numbers were when the call began."""
    before: CompositeSnapshot | None = None
    """The state before the call, if checkpoints are kept."""
    messages: tuple[OutboxPut, ...] = ()
    is_foreign: bool = False
    """Whether files may change past the handler's context, so that the workspace is scanned."""
    is_left_behind: bool = False
    """Whether the handler's thread still runs, although it was told to stop."""
    is_cut_off: bool = False
    """Whether the handler's token was set because of a cancellation or a deadline, and not the reverse."""
    is_committing: bool = False
    is_over: bool = False

    @property
    def call(self) -> ToolCall:
        """The model's request."""
        return self.plan.call

    @property
    def cancellation(self) -> CancellationToken:
        """The call's own token, below the caller's."""
        if self.made_cancellation is None:
            self.made_cancellation = CancellationToken(self.plan.context.cancellation)
        return self.made_cancellation

    @property
    def base(self) -> Filesystem | None:
        """The workspace itself, which the handler does not get to see."""
        return self.environment.filesystem

    @property
    def attempt_id(self) -> str:
        """Which attempt at the call this is; empty for a call without effects, which logs no start."""
        return self.event_id.hex if self.tool.effects != "none" else ""

    # .. begin ..

    def open(self) -> ToolResult[Any] | None:
        """Capture every participant, and log the start. Returns the failed result if that is impossible."""
        environment, tool = self.environment, self.tool
        with_effects = tool.effects != "none"
        try:
            self._make_parts()
            # Every participant is captured before the first change: one that cannot be captured fails here.
            if with_effects:
                self._hold_workspace()
                self.saved = environment.save_others()
                self.saved_rng = random_state(environment.state.rng)
            if environment.state.checkpoints is not None:
                base = None if self.workspace is None else self.workspace.base
                self.before = environment.boundary(self.call.id, tool.name, "pre_tool", base)
        except WorkspaceBusyError as error:
            return self.fail(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the call cannot begin
            message = f"{tool.name} could not begin: {describe(error)}"
            return self._roll_back(ToolResult.error(message), "failed")
        except BaseException as error:  # noqa: BLE001  # raised again when nothing is left of the call
            return self.fail(error)
        if not with_effects:
            return None
        started = ToolStarted(
            call_id=self.call.id,
            attempt_id=self.attempt_id,
            tool_name=tool.name,
            effects=tool.effects,
            foreign=self.is_foreign,
            idempotent=tool.idempotent,
            on_unknown=tool.on_unknown,
            workspace=None if self.workspace is None else self.workspace.base,
        )
        try:
            environment.state.session.dispatch(started)
        except BaseException as error:
            self.fail(error)
            raise
        return None

    def _make_parts(self) -> None:
        """Make the parts of the context that belong to this call alone."""
        seen = self.environment.read_only if self.tool.effects == "none" else self.environment.filesystem
        self.filesystem = None if seen is None else CallFilesystem(seen, self.call.id)
        resources = self.environment.state.resources
        if isinstance(resources, ResourceContext):
            self.scope = resources.tool_scope()
            self.scoped = self.scope.__enter__()

    @property
    def context(self) -> ToolContext:
        """The handler's context: the caller's parts, and the call's own, which refuse once it has ended."""
        if self.made_context is None:
            self.made_context = self._make_context()
        return self.made_context

    def _make_context(self) -> ToolContext:
        state = self.environment.state
        handle: Any = self.filesystem
        resources: Any = CallResources(state.resources, self.scoped, self.base, handle)
        session = self.transaction.session
        return replace(
            self.plan.context,
            state=ExecutionState(session, resources, state.clock, state.rng, state.checkpoints),
            session=session,
            call_id=self.call.id,
            cancellation=self.cancellation,
            outbox=CallOutbox(
                session.session_id,
                self.call.id,
                earlier=partial(times_sent, state.session, self.call.id),
            ),
            held_filesystem=handle,
        )

    def _hold_workspace(self) -> None:
        filesystem = self.environment.filesystem
        if filesystem is None or filesystem.read_only:
            return
        name = workspace_call_id(self.environment.state.session.session_id, self.call.id)
        self.is_foreign = self.environment.scans_for(self.tool)
        begin = partial(filesystem.begin, name, tool_name=self.tool.name, foreign=self.is_foreign)
        try:
            self.workspace = begin()
        except WorkspaceBusyError:
            raise
        except WorkspaceError:
            # This call has the gate, so the call that holds the workspace is no longer at work. If it is a
            # call of this session that an interrupt or a crash cut off, the log says how it ended.
            if not recover(self.environment.state):
                raise
            self.workspace = begin()
        self.environment.gates[-1].boundary = self.workspace.base

    # .. run ..

    def call_handler(self) -> Any:
        """Call the tool's function, with a context if it takes one."""
        return self.tool.call(self.plan.params, self.context if self.tool.takes_context else None)

    def enter(self) -> None:
        """Make everything that the current context does from now on part of the call.

        For a context that is thrown away (`copy_context().run(...)`), so that an interrupt leaves none of it.
        """
        _inside.set((*_inside.get(), self))
        self.transaction.enter()

    def entered(self) -> Entered:
        """Make the block part of the call. A cancellation that the block swallows is raised at its end."""
        return Entered(self)

    # .. end ..

    def end(self, outcome: Any) -> ToolResult[Any]:
        """Commit a call that succeeded; roll back one that did not."""
        try:
            result = as_result(outcome)
            if result.value is not None:
                result = self._with_file(result)
            if self.plan.told:
                result = _with_note(self.plan.told, result)
            given = self.plan.context
            given.cancellation.raise_if_cancelled()  # It is set before those below it follow.
            if self.made_cancellation is not None:
                self.made_cancellation.raise_if_cancelled()
            if given.deadline is not None:
                given.deadline.raise_if_passed(f"the tool call {self.call.id}")
            typed = _typed_values(result) if result.success else ()
            if result.success and (typed or self.plan.policies or self.scope is not None):
                copy_context().run(self._stage_result, result, typed)
        except BaseException as error:  # noqa: BLE001  # classified and raised again where it must be
            return self.fail(error)
        if not result.success:
            return self._roll_back(result, "failed")
        try:
            workspace = self._commit(result)
        except BaseException as error:  # noqa: BLE001  # classified and raised again where it must be
            return self._after_commit_failed(result, error)
        self._finish()
        self._note_checkpoint(result, workspace)
        return result

    def _with_file(self, result: ToolResult[Any]) -> ToolResult[Any]:
        """Keep bytes that a model cannot be shown in a file of the workspace, as part of the call."""
        files = self.filesystem
        if files is None or files.read_only or not result.success or result.exclude_value_from_context:
            return result
        file = file_for(result.value, f"{self.tool.name}-{self.call.id}")
        if file is None:
            return result
        path, content = file
        name, dot, ending = path.rpartition(".")
        number = 1
        while files.exists(path):
            # A call id may come again, and what is there is somebody's.
            number += 1
            path = f"{name}-{number}{dot}{ending}"
        files.write_bytes(path, content)
        said = "" if result.message == "OK" else f"{result.message} "
        return replace(result, value=None, message=f"{said}({len(content):,} bytes, kept as {path})")

    def _stage_result(self, result: ToolResult[Any], typed: Sequence[object]) -> None:
        """Stage what follows from a success: policy state, the typed result, events of closing resources."""
        self.enter()
        for policy in self.plan.policies:
            policy.on_result(self.tool, self.plan.params, result, context=self.context)
        for value in typed:
            self.transaction.session.dispatch(value)
        self._close_scope()

    def _commit(self, result: ToolResult[Any]) -> FilesystemSnapshot | None:
        self._close_scope()
        if self.filesystem is not None:
            self.filesystem.end()
        workspace = None if self.workspace is None else self.workspace.prepare()
        messages = self._close_outbox()
        recorded = tuple(self.plan.record(result))
        before = self.transaction.count + len(messages) + len(recorded)
        changed = None if self.workspace is None or workspace is self.workspace.base else workspace
        invoked = self._invoked(result, "ok", before, workspace=changed)
        self.is_committing = True
        self.transaction.commit(*messages, *recorded, invoked)
        self.messages = messages
        return workspace

    def _after_commit_failed(self, result: ToolResult[Any], error: BaseException) -> ToolResult[Any]:
        """Ask the log whether it has the call's end: an interrupt may come just after the append."""
        committed = self._is_committed()
        if isinstance(error, WorkspaceConflictError):
            return self._roll_back(_conflicting(self.tool.name, result, error), "conflict", paths=error.paths)
        if committed is False:
            return self.fail(_as_commit_error(self.tool.name, error))
        if committed is None:
            # Neither kept nor undone: the workspace keeps the undo information until the log can be read.
            self.is_over = True
            raise ToolCommitError(
                f"{self.tool.name} ran, but the log failed ({describe(error)}) and cannot be read, so it is "
                f"unknown whether the call {self.call.id} was committed. recover() settles it when the log "
                "is back"
            ) from error
        # The log has it: the call stands, whatever came after.
        self._finish()
        if not isinstance(error, Exception):
            raise error
        _logger.warning("the call %s was committed, and then: %s", self.call.id, error, exc_info=error)
        return result

    def _is_committed(self) -> bool | None:
        if not self.is_committing:
            return False
        if self.transaction.is_committed:
            return True
        try:
            return self._is_logged()
        except Exception as error:  # it is unknown then, and that is said
            _logger.warning("the log cannot be read: %s", error, exc_info=error)
            return None

    def _is_logged(self) -> bool:
        return any(
            isinstance(value, ToolInvoked) and value.event_id == self.event_id
            for _, value in self.environment.state.session.events(after=self.transaction.began_after)
        )

    def _finish(self) -> None:
        """Let go of a call that is in the log. What cannot be cleared up now is left for a recovery."""
        self.is_over = True
        if self.made_cancellation is not None:
            self.made_cancellation.unlink()
        if self.workspace is None:
            return
        try:
            self.workspace.finish()
        except Exception as error:  # noqa: BLE001  # the call stands; its undo information is only left over
            _logger.warning("undo information of call %s could not be removed yet: %s", self.call.id, error)

    def _note_checkpoint(self, result: ToolResult[Any], workspace: FilesystemSnapshot | None = None) -> None:
        if self.before is None:
            return
        try:
            after = None
            if result.success:
                after = self.environment.boundary(self.call.id, self.tool.name, "post_tool", workspace)
            self.environment.note_checkpoint(self.call.id, self.before, after, result, self._elapsed_s())
        except Exception as error:  # a convenience: the call has ended whatever becomes of it
            _logger.warning("no checkpoint was recorded for %s: %s", self.call.id, error, exc_info=error)

    # .. undo ..

    def fail(self, error: BaseException) -> ToolResult[Any]:
        """Roll back, and return the failed result or raise what the loop must act on."""
        name = self.tool.name
        if isinstance(error, VisibilityExpansionRequired | WorkspaceBusyError):
            # Not the model's business: the call is still to be answered.
            self._roll_back(ToolResult.error(str(error)), "failed", tell=False)
            raise error
        if isinstance(error, DeadlineExceededError):
            self._cut_off(f"{name} ran out of time: {error}", "timed_out")
            raise PromptEvaluationError(
                str(error), prompt_name=self.environment.prompt_name, phase="tool"
            ) from error
        if isinstance(error, PromptEvaluationError):
            self._roll_back(ToolResult.error(f"{name} failed: {error}"), "failed")
            raise error
        if isinstance(error, CancelledByToken) or not isinstance(error, Exception):
            self._cut_off(_interrupted(name), "interrupted")
            raise error
        if isinstance(error, HoldRequired):
            # Not answered yet: the call runs again when a person has answered.
            self._roll_back(ToolResult.error(str(error)), "interrupted", tell=False)
            raise error
        if isinstance(error, ToolError):
            outcome: Outcome = "unknown" if isinstance(error, OutcomeUnknownError) else "failed"
            return self._roll_back(ToolResult.error(str(error)), outcome)
        _logger.info("the tool %s failed", name, exc_info=error)
        return self._roll_back(ToolResult.error(f"{name} failed: {describe(error)}"), "failed")

    def leave_nothing(self) -> None:
        """End a call that an interrupt left between two steps."""
        if self.is_over:
            return
        if self._is_committed():
            self._finish()
        else:
            self._cut_off(_interrupted(self.tool.name), "interrupted")

    def _cut_off(self, why: str, outcome: Outcome) -> None:
        """End a call that was stopped in the middle. What it did outside is unknown."""
        name = self.tool.name
        if self.tool.effects == "external" and not self.tool.idempotent:
            why, outcome = unknown_outcome(name, "it was stopped while it acted outside"), "unknown"
        elif self.tool.effects == "external" and outcome == "interrupted":
            why = f"{name} was interrupted. It may be called again."
        self._roll_back(ToolResult.error(why), outcome)

    def _roll_back(
        self, result: ToolResult[Any], outcome: Outcome, *, tell: bool = True, paths: Sequence[str] = ()
    ) -> ToolResult[Any]:
        """Undo the call and log its end. `paths` are those that somebody else changed meanwhile."""
        undo = _Rollback()
        undo.part("the handler's context", self._close_context)
        undo.part("the resources of the call", self._close_scope)
        for each, resource, saved in reversed((*self.saved, *self._built())):
            undo.part(each.__qualname__, partial(resource.restore, saved))
        rng = self.environment.state.rng
        if rng is not None and self.saved_rng is not None:
            undo.part("the random numbers", partial(rng.setstate, self.saved_rng))
        report = None
        if self.workspace is not None:
            report = undo.part("the workspace", self.workspace.rollback)
        if self.is_left_behind:
            result = replace(result, message=f"{result.message} {_LEFT_BEHIND}")
        conflicts, kept = (report.conflicts, report.kept) if report is not None else ((), ())
        if report is not None and (conflicts or kept or report.lost):
            told = told_of_undo(conflicts, kept, report.lost)
            result = replace(result, message=f"{result.message} {told}".strip())
        result = replace(result, value=None)
        if self.plan.told and not result.message.startswith(self.plan.told):
            result = _with_note(self.plan.told, result)
        recorded, record_problem = _recorded(self.plan.record, result) if tell else ((), None)
        events: list[object] = list(recorded)
        if undo.problems:
            events.append(
                AttentionNeeded(
                    reason=f"the call {self.call.id} of {self.tool.name} could not be rolled back whole",
                    details=tuple(undo.problems),
                    next_actions=("compare the workspace with its last boundary", "roll back by hand"),
                )
            )
        conflicts = tuple(sorted({*conflicts, *paths}))
        events.append(self._invoked(result, outcome, len(events), conflicts=conflicts, kept=kept))
        self.is_over = True
        undo.log(partial(self._log_rollback, events))
        self._note_checkpoint(result)
        if undo.interrupt is not None:
            raise undo.interrupt
        if undo.problems:
            raise RestoreFailedError(
                f"the call {self.call.id} of {self.tool.name} failed and could not be rolled back whole: "
                f"{'; '.join(undo.problems)}. The session needs attention.",
                failed=undo.problems,
                undone=False,
            )
        if record_problem is not None:
            raise record_problem
        return result

    def _close_context(self) -> None:
        """Make the handler's parts refuse. A call that was interrupted early may not have them yet."""
        self._close_outbox()
        if self.made_cancellation is not None:
            self.made_cancellation.unlink()
        if self.filesystem is not None:
            self.filesystem.end()

    def _close_outbox(self) -> tuple[OutboxPut, ...]:
        return () if self.made_context is None else self.made_context.outbox.close()

    def _built(self) -> Sequence[tuple[type, Snapshotable[object], object]]:
        """Return the resources that were built since the call began, and how they were then."""
        if self.scoped is None or self.tool.effects == "none":
            return ()
        policy_of = self.environment.state.resources.policy_of
        return [each for each in self.scoped.built if policy_of(each[0]) is not SlicePolicy.LOG]

    def _close_scope(self) -> None:
        """Close the resources that live as long as the call."""
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def _log_rollback(self, events: Sequence[object]) -> None:
        if self.transaction.is_open:
            self.transaction.rollback(*events)
        elif not self._is_logged():
            self.environment.state.session.dispatch_all(events)

    # .. what is logged ..

    def _elapsed_s(self) -> float:
        return max(self.environment.state.clock.monotonic() - self.started_at, 0.0)

    def _invoked(
        self,
        result: ToolResult[Any],
        outcome: Outcome,
        batch_events: int,
        *,
        workspace: FilesystemSnapshot | None = None,
        conflicts: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
    ) -> ToolInvoked:
        return self.environment.invoked(
            self.call,
            result,
            outcome,
            run_context=self.plan.context.run_context,
            event_id=self.event_id,
            attempt_id=self.attempt_id,
            elapsed_ms=round(1000 * self._elapsed_s(), 3),
            workspace=workspace,
            conflicts=conflicts,
            kept=kept,
            hold_id=self.plan.hold_id,
            batch_events=batch_events,
        )


def open_call(
    environment: CallEnvironment, plan: PlannedCall, begun: list[OpenCall]
) -> OpenCall | ToolResult[Any]:
    """Begin a call that may run. Returns the failed result if it could not begin.

    The call is put into `begun` first, so that it can be ended if an interrupt comes before this returns.
    """
    tool = cast("Tool[Any, Any]", plan.tool)
    state = environment.state
    opened = OpenCall(environment, plan, tool, new_id(), state.clock.monotonic(), state.session.begin())
    begun.append(opened)
    failed = opened.open()
    return opened if failed is None else failed


_inside: ContextVar[tuple[OpenCall, ...]] = ContextVar("treenail_inside_calls", default=())
"""The calls whose handlers the running code is part of."""


def enclosing_calls() -> tuple[OpenCall, ...]:
    """Return the calls that the running code is part of, the outermost first."""
    inside = _inside.get()
    return tuple(each for each in inside if not each.is_over) if inside else inside


class Entered:
    """A block that is part of a call; see `OpenCall.entered`."""

    __slots__ = ("_before", "_inside", "_opened", "_staging")

    def __init__(self, opened: OpenCall) -> None:
        self._opened = opened

    def __enter__(self) -> None:
        self._before = cancellations()
        self._inside = _inside.set((*_inside.get(), self._opened))
        self._staging = self._opened.transaction.enter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._opened.transaction.leave(self._staging)
        _inside.reset(self._inside)
        if error is None or isinstance(error, Exception):
            heed_cancellations(self._before)


class _Rollback:
    """A rollback under way: each part is tried, whatever becomes of the others, and an interrupt waits."""

    __slots__ = ("interrupt", "problems")

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.interrupt: BaseException | None = None

    def part(self, what: str, action: Callable[[], T]) -> T | None:
        """Do one part. An interrupted one is done again: each can be repeated."""
        try:
            try:
                return action()
            except Exception as error:  # noqa: BLE001  # the other parts are tried all the same
                self.problems.append(f"{what}: {describe(error)}")
            except BaseException as error:  # noqa: BLE001  # raised when everything is put back
                self.interrupt = self.interrupt or error
                return action()
        except Exception as error:  # noqa: BLE001  # the second try failed
            self.problems.append(f"{what}: {describe(error)}")
        return None

    def log(self, action: Callable[[], None]) -> None:
        """Do the part that writes to the log. If the log refuses, its error is raised."""
        try:
            action()
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001  # raised when everything is put back
            self.interrupt = self.interrupt or error
            action()


def _with_note(note: str, result: ToolResult[Any]) -> ToolResult[Any]:
    """Put a note before what the model reads of a result."""
    if result.pictures():
        return replace(result, message=f"{note}\n{result.message}")
    return replace(result, message=f"{note}\n{result.render()}", exclude_value_from_context=True)


def _conflicting(name: str, result: ToolResult[Any], error: WorkspaceConflictError) -> ToolResult[Any]:
    return ToolResult.error(
        f"{name} ran, but {error}. Its files are kept for a person (treenail recover). Read those paths "
        f"again before you repeat it.\nWhat it said, of the files as they were before:\n{result.render()}"
    )


def _interrupted(name: str) -> str:
    return f"{name} was interrupted; everything it had changed was rolled back"


def _recorded(record: Record, result: ToolResult[Any]) -> tuple[tuple[object, ...], Exception | None]:
    """Make the caller's events for a call's end. If that fails the call ends without them."""
    try:
        return tuple(record(result)), None
    except Exception as error:  # noqa: BLE001  # raised when the call's end is in the log
        return (), error


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


def describe(error: BaseException) -> str:
    """Return an error's class and text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _as_commit_error(name: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    wrapped = ToolCommitError(
        f"{name} ran, but its changes could not be committed ({describe(error)}); they were rolled back"
    )
    wrapped.__cause__ = error
    return wrapped

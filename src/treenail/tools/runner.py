"""The runner: the path of one call, from the model's request to its end in the log.

    plan         look the tool up and parse its arguments; nothing has happened yet
    gates        a call with effects waits for its ticket: one call at a time per session, and one at a
                 time per workspace where sessions share one
    admission    ask policies and permissions (`admission.py`)
    transaction  open the call; run its body; commit, or roll back (`transaction.py`)
    handler      the body of an ordinary call (`handlers.py`)

After a crash the log says which calls had begun and not ended. `recover` undoes them before anything else
runs, and says of each whether it can run again. A call that acted outside and is not idempotent cannot: its
outcome is recorded as unknown, not guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from treenail.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    ToolError,
    ToolValidationError,
    UsageError,
)
from treenail.state import ExecutionState
from treenail.tools.admission import Admission
from treenail.tools.batch import run_batch
from treenail.tools.context import ToolContext
from treenail.tools.environment import CallEnvironment
from treenail.tools.event_loop import run_beside, run_blocking
from treenail.tools.gate import Tickets
from treenail.tools.handlers import run_handler
from treenail.tools.outbox import Outbox
from treenail.tools.policies import Permissions, ToolPolicy, register_policy_state
from treenail.tools.tool import Tool, ToolCall, ToolResult
from treenail.tools.transaction import OpenCall, PlannedCall, Record, enclosing_calls, open_call
from treenail.workspace import sandbox_of

_logger = logging.getLogger("treenail.tools")

Body = Callable[[OpenCall], Awaitable[Any]]
"""Does what a call is for, and returns its outcome."""


def no_record(result: ToolResult[Any]) -> Sequence[object]:
    """Record nothing beside a call's end."""
    return ()


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
    environment: CallEnvironment = field(init=False, repr=False)
    _admission: Admission = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.environment = CallEnvironment.of(self.execution_state, self.prompt_name, self.adapter)
        workspace = self.environment.filesystem
        if workspace is not None and sandbox_of(workspace).grants.reach_outside:
            # A command that may use a socket can act outside, where nothing is rolled back.
            self.tool_registry = {
                name: replace(each, effects="external") if each.files == "commands" else each
                for name, each in self.tool_registry.items()
            }
        self._admission = Admission(self.environment, self.permissions, self.policies)
        register_policy_state(self.execution_state.session)
        for prepare in dict.fromkeys(each.prepare for each in self.tool_registry.values()):
            if prepare is not None:
                prepare(self.execution_state.session)

    # .. the faces ..

    def execute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = no_record
    ) -> ToolResult[Any]:
        """Run a call to its end, blocking. See `aexecute`."""
        run = partial(self.aexecute, tool_call, context=context, record=record)
        return run_blocking(run, face="ToolRunner.execute", instead="aexecute")

    async def aexecute(
        self, tool_call: ToolCall, *, context: ToolContext | None = None, record: Record = no_record
    ) -> ToolResult[Any]:
        """Run a call to its end. A sync handler runs on a worker thread; a deadline really cancels.

        If the tool goes wrong, the result says so. Raised is only what the loop must act on:
        `VisibilityExpansionRequired`, `PromptEvaluationError` (a passed deadline is one, with
        `phase="tool"`), `HoldRequired`, cancellation and `KeyboardInterrupt`; always after the
        rollback. And errors of the caller or the store: `UsageError` for a call from inside another,
        `RestoreFailedError`, and the log's own error if it can no longer record anything.
        """
        return await self.transaction(tool_call, run_handler, context=context, record=record)

    def execute_all(
        self,
        tool_calls: Sequence[ToolCall],
        *,
        context: ToolContext | None = None,
        record: Callable[[ToolCall], Record] = lambda call: no_record,
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer, blocking. See `aexecute_all`."""
        run = partial(self.aexecute_all, tool_calls, context=context, record=record)
        return run_blocking(run, face="ToolRunner.execute_all", instead="aexecute_all")

    async def aexecute_all(
        self,
        tool_calls: Sequence[ToolCall],
        *,
        context: ToolContext | None = None,
        record: Callable[[ToolCall], Record] = lambda call: no_record,
    ) -> Sequence[ToolResult[Any]]:
        """Run several calls of one answer: those without effects side by side, the others in order.

        If a call raises, those beside it still come to their end, and those after it are not run.
        """

        async def run(call: ToolCall) -> ToolResult[Any]:
            return await self.aexecute(call, context=context, record=record(call))

        return await run_batch(tool_calls, run, is_free=self.is_free)

    def is_free(self, call: ToolCall) -> bool:
        """Say whether a call has no effects, so that it may run beside others."""
        tool = self.tool_registry.get(call.name)
        return tool is None or tool.effects == "none"

    # .. the transaction ..

    async def transaction(
        self,
        tool_call: ToolCall,
        body: Body,
        *,
        context: ToolContext | None = None,
        record: Record = no_record,
        tool: Tool[Any, Any] | None = None,
    ) -> ToolResult[Any]:
        """Begin a call, run its body, and commit its outcome or roll everything back.

        `tool` replaces the registry's.
        """
        plan = self.plan(tool_call, context=context, record=record, tool=tool)
        is_slow = plan.tool is not None and self.environment.scans_for(plan.tool)
        begun: list[OpenCall] = []
        try:
            if plan.tickets is not None:
                await self.take_tickets(plan)
            if is_slow or self.permissions.approver is not None:
                opened = await run_beside(self.begin, plan, begun)
            else:
                opened = self.begin(plan, begun)
            if isinstance(opened, ToolResult):
                return opened
            try:
                outcome = await body(opened)
            except BaseException as error:  # noqa: BLE001  # classified, and raised again where it must be
                return await run_beside(opened.fail, error) if is_slow else opened.fail(error)
            result = await run_beside(opened.end, outcome) if is_slow else opened.end(outcome)
            if opened.messages and self.outbox.handlers:
                await run_beside(self._deliver, opened)
            return result
        except BaseException:
            for each in begun:
                each.leave_nothing()
            raise
        finally:
            if plan.tickets is not None:
                # Not left to a function: an interrupt may come before its first line, and the task's own
                # error keeps the ticket alive, so that the gate would not forget it.
                try:
                    plan.tickets.give_back()
                except BaseException:
                    plan.tickets.give_back()
                    raise

    def plan(
        self,
        call: ToolCall,
        *,
        context: ToolContext | None = None,
        record: Record = no_record,
        tool: Tool[Any, Any] | None = None,
    ) -> PlannedCall:
        """Look the tool up and parse its arguments. Nothing happens yet; `tool` replaces the registry's."""
        state = self.execution_state
        if context is None:
            context = ToolContext(state)
        elif context.state is not state and context.state.session != state.session:
            raise UsageError(
                f"the context of the call {call.id} belongs to another session than this runner; "
                "make it of the runner's own state: ToolContext(runner.execution_state)"
            )
        is_block = tool is not None and tool.handler is None and tool.params_type is None
        tool = tool or self.tool_registry.get(call.name)
        plan = PlannedCall(call, tool, None, context, record)
        if tool is None:
            known = ", ".join(sorted(self.tool_registry)) or "none"
            plan.refusal = "invalid", f"There is no tool {call.name!r}. There are: {known}."
        elif not is_block:
            try:
                plan.params = tool.parse(call.arguments)
            except ToolValidationError as error:
                plan.refusal = "invalid", str(error)
        with_effects = plan.refusal is None and tool is not None and tool.effects != "none"
        self._refuse_inside(call, with_effects=with_effects)
        if with_effects:
            plan.tickets = Tickets(self.environment.gates)
        if tool is not None:
            plan.policies = self._admission.policies_for(tool.name)
        return plan

    def _refuse_inside(self, call: ToolCall, *, with_effects: bool) -> None:
        """Raise `UsageError` if the call would wait for one that it is part of."""
        for outer in enclosing_calls():
            if outer.transaction.session == self.execution_state.session:
                raise UsageError(
                    f"{call.name} was called from inside the call {outer.call.id} of {outer.tool.name}: "
                    "one call is one transaction. Call the tool's function directly, and let the model make "
                    "the other call"
                )
            if with_effects and outer.workspace is not None and outer.base is self.environment.filesystem:
                raise UsageError(
                    f"{call.name} would wait for the workspace that the call {outer.call.id} of "
                    f"{outer.tool.name} holds while it runs; give the inner session a workspace of its own, "
                    'or let the outer tool have effects="none"'
                )

    async def take_tickets(self, plan: PlannedCall) -> None:
        """Wait until the gates let a call in."""
        if plan.tickets is not None:
            try:
                await plan.tickets.take(plan.context.cancellation, plan.context.deadline)
            except DeadlineExceededError as error:
                raise self._too_late(plan, str(error)) from error

    def begin(self, plan: PlannedCall, begun: list[OpenCall]) -> OpenCall | ToolResult[Any]:
        """Open a call whose tickets are taken, or end it if it may not run; see `open_call`."""
        if plan.tool is None or plan.refusal is not None:
            return plan.refuse(self.environment, *(plan.refusal or ("invalid", "")))
        deadline = plan.context.deadline
        if deadline is not None and deadline.passed():
            raise self._too_late(plan, f"the deadline had passed before {plan.tool.name} began")
        plan.context.cancellation.raise_if_cancelled()
        refusal = self._admission.refusal(plan, plan.tool)
        if refusal is not None:
            return plan.refuse(self.environment, *refusal)
        return open_call(self.environment, plan, begun)

    def _too_late(self, plan: PlannedCall, message: str) -> PromptEvaluationError:
        plan.refuse(self.environment, "timed_out", message)
        return PromptEvaluationError(message, prompt_name=self.prompt_name, phase="tool")

    def _deliver(self, opened: OpenCall) -> None:
        if not opened.messages or not self.outbox.handlers:
            return
        try:
            self.outbox.flush(self.execution_state.session)
        except Exception as error:  # the call stands, and what was not delivered waits
            _logger.warning("delivering for %s stopped: %s", opened.call.id, error, exc_info=error)

    # .. a call whose body is a block of code ..

    @contextmanager
    def block(
        self, tool_call: ToolCall, *, tool: Tool[Any, Any], context: ToolContext
    ) -> Iterator[ToolExecutionOutcome]:
        """Run a block as the body of a call. See `tool_execution`."""
        plan = self.plan(tool_call, context=context, tool=tool)
        begun: list[OpenCall] = []
        try:
            if plan.tickets is not None and not plan.tickets.take_nowait():
                take = partial(self.take_tickets, plan)
                run_blocking(take, face="tool_execution", instead="ToolRunner.aexecute")
            opened = self.begin(plan, begun)
            if isinstance(opened, ToolResult):
                raise ToolValidationError(opened.message) if plan.refusal else ToolError(opened.message)
            outcome = ToolExecutionOutcome(tool=tool, params=plan.params, context=opened.context)
            try:
                with opened.entered():
                    yield outcome
            except BaseException as error:  # noqa: BLE001  # `fail` raises it again where it must be
                outcome.result = opened.fail(error)
            else:
                outcome.result = opened.end(outcome.result)
                self._deliver(opened)
        except BaseException:
            for each in begun:
                each.leave_nothing()
            raise
        finally:
            if plan.tickets is not None:
                plan.tickets.give_back()


@dataclass(slots=True)
class ToolExecutionOutcome:
    """What `tool_execution` hands to its block: set `result`, or raise."""

    result: ToolResult[Any] | None = None
    tool: Tool[Any, Any] | None = None
    params: Any = None
    context: ToolContext | None = None


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
    except for those that the loop must act on (see `ToolRunner.aexecute`). A call that cannot begin
    raises `ToolValidationError` or `ToolError`, recorded like any other end, and the block is not run.
    """
    body = tool or Tool(name=tool_name(tool_call.name), description="A call whose body is a block of code.")
    with ToolRunner(execution_state, {}).block(tool_call, tool=body, context=context) as outcome:
        yield outcome


def tool_name(name: str) -> str:
    """Return a name like the given one that a tool may have."""
    return "".join(each if each.isalnum() and each.isascii() else "_" for each in name.lower())[:64] or "tool"

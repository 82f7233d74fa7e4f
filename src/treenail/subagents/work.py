"""One subagent at work: what is opened for it, its turns, its deadline, and how its ending is recorded."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import anyio

from treenail import telemetry
from treenail.agent import AnyAgent
from treenail.children import open_child_session
from treenail.containment import (
    CancellationToken,
    ChainMetadata,
    ExecutionContext,
    call_later,
    describe,
    threadsafe,
)
from treenail.errors import TreenailError, UsageError
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents.endings import ending_of, next_actions
from treenail.subagents.events import SubagentCharter
from treenail.subagents.limits import SubagentLimits, config_of
from treenail.subagents.recovery import last_answer
from treenail.subagents.roster import Roster
from treenail.subagents.runner import ChildRun
from treenail.subagents.states import SubagentStatus
from treenail.subagents.subagent import Subagent
from treenail.subagents.workspaces import ChildWorkspace, open_workspace
from treenail.tools import PermissionMode, Permissions
from treenail.turns import TurnResult, TurnStarted, TurnState, turn_state
from treenail.workspace import Filesystem

_logger = logging.getLogger("treenail.subagents")

GRACE_S = 5.0
"""How long a subagent that was told to stop may take before its task is cancelled."""

_STRICTEST_LAST = (PermissionMode.AUTO, PermissionMode.ASK, PermissionMode.READ_ONLY)


@dataclass(slots=True, eq=False)
class SubagentWork:
    """Runs a subagent until it has answered all its inputs, then records how it ended."""

    child: Subagent
    roster: Roster
    parent: ExecutionState
    agents: Mapping[str, AnyAgent]
    limits: SubagentLimits
    permissions: Permissions
    containment: ExecutionContext
    """The parent's chain; the subagent gets one below it."""
    run_turn: Callable[[ChildRun], Awaitable[TurnResult]]
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _token: CancellationToken = field(default_factory=CancellationToken)
    _chain: ExecutionContext | None = None
    _is_overdue: bool = False

    async def run(self) -> None:
        """Do the work. Whatever happens, the ending is recorded and everything is closed."""
        child = self.child
        with self._scope, telemetry.under(child.trace_parent), self._traced(), ExitStack() as stack:
            try:
                session, workspace, chain = self._open(stack)
            except (TreenailError, OSError) as error:
                self._record_no_start(error)
                return
            ended: TurnResult | None = None
            crashed_with = ""
            try:
                if child.status is not SubagentStatus.RUNNING:
                    self._record_start(workspace)
                stack.callback(self._enforce_deadline(chain))
                if child.cancel_reason:
                    self.abort(child.cancel_reason)
                ended = await self._turns(session, workspace, chain)
            except Exception as error:
                _logger.exception("the subagent %s crashed", child.id)
                crashed_with = describe(error)
            finally:
                # Also when the task is cancelled: the evidence is written before anything else happens.
                self._settle(session, workspace, chain, ended, crashed_with)

    def abort(self, reason: str) -> None:
        """Stop the work: by its containment and its token, and by force after a grace period."""
        if self._chain is not None:
            self._chain.abort(reason)
        self._token.cancel(detail=reason)
        call_later(self.parent.clock, GRACE_S, threadsafe(self._scope.cancel))

    # .. opening ..

    def _open(self, stack: ExitStack) -> tuple[Session, ChildWorkspace, ExecutionContext]:
        child = self.child
        if child.agent not in self.agents:
            raise UsageError(f"the agent {child.agent!r} is not known here")
        tags = {"agent": child.agent, "subagent_id": child.id}
        session = stack.enter_context(open_child_session(self.roster.session, child.session_id, tags))
        charter = session[SubagentCharter].latest()
        workspace = child.copy_in_memory or open_workspace(
            self.parent,
            child.workspace_mode,
            session_id=child.session_id,
            charter=charter,
        )
        stack.callback(workspace.release)
        self.permissions = replace(self.permissions, mode=self._permission_mode(charter))
        if charter is None:
            session.dispatch(
                SubagentCharter(
                    subagent_id=child.id,
                    permission_mode=self.permissions.mode.value,
                    fork_base=workspace.fork_base,
                    fork_place=None if workspace.fork_place is None else str(workspace.fork_place),
                )
            )
        child.copy_in_memory = workspace if workspace.is_in_memory else None
        self._chain = self.containment.spawn_child(
            config_of(child.allowance, self.limits.budget),
            metadata=ChainMetadata(request_id=str(child.session_id), chain_id=str(child.session_id)),
            below=child.asked_in,
        )
        stack.callback(self._chain.close)
        return session, workspace, self._chain

    def _permission_mode(self, charter: SubagentCharter | None) -> PermissionMode:
        """Return the strictest of what the parent, the charter and the workspace allow."""
        modes = [self.permissions.mode]
        if charter is not None:
            modes.append(PermissionMode(charter.permission_mode))
        if self.child.workspace_mode == "read_only":
            modes.append(PermissionMode.READ_ONLY)
        return max(modes, key=_STRICTEST_LAST.index)

    def _record_start(self, workspace: ChildWorkspace) -> None:
        timeout_s = self.child.allowance.timeout_s
        deadline = None if timeout_s is None else self.parent.clock.now() + timedelta(seconds=timeout_s)
        self.roster.move(self.child, SubagentStatus.RUNNING, workspace=workspace.root, deadline_at=deadline)

    def _record_no_start(self, error: Exception) -> None:
        child, reason = self.child, f"it could not be started: {describe(error)}"
        child.is_pending = False
        if child.status.is_terminal:
            # It had ended before and was sent something new, which it did not begin: it stays as it ended.
            _logger.warning("the subagent %s could not resume: %s", child.id, reason)
            return
        actions = next_actions(child, SubagentStatus.FAILED, None)
        self.roster.move(child, SubagentStatus.FAILED, reason=reason, next_actions=actions)

    def _enforce_deadline(self, chain: ExecutionContext) -> Callable[[], object]:
        """Cancel the task if it ignores its containment's deadline. Returns how to call that off."""
        left = chain.remaining_s
        if left is None:
            return lambda: None

        def overdue() -> None:
            self._is_overdue = True
            self._scope.cancel()

        return call_later(self.parent.clock, left + GRACE_S, threadsafe(overdue)).cancel

    # .. working ..

    async def _turns(
        self, session: Session, workspace: ChildWorkspace, chain: ExecutionContext
    ) -> TurnResult | None:
        """Run the turns that are left: the unfinished one, then one for each unanswered input."""
        child = self.child
        resources: dict[type[object], object] = {}
        if workspace.filesystem is not None:
            resources[Filesystem] = workspace.filesystem
        state = ExecutionState(session, ResourceRegistry.build(resources), self.parent.clock, self.parent.rng)
        ended: TurnResult | None = None
        while True:
            begun = len(session[TurnStarted].all())
            if begun and (child.resumes_turn or turn_state(session) is TurnState.UNFINISHED):
                task = None
            elif begun < len(child.inputs):
                task = child.inputs[begun]
            else:
                return ended
            child.resumes_turn = False
            ended = await self.run_turn(
                ChildRun(
                    agent=self.agents[child.agent],
                    state=state,
                    task=task,
                    containment=chain,
                    cancellation=self._token,
                    permissions=self.permissions,
                    depth=child.depth,
                    workspace=workspace.root,
                )
            )
            if turn_state(session) is not TurnState.COMPLETED:
                return ended

    # .. ending ..

    def _settle(
        self,
        session: Session,
        workspace: ChildWorkspace,
        chain: ExecutionContext,
        ended: TurnResult | None,
        crashed_with: str,
    ) -> None:
        """Record how the subagent ended, as its own log has it."""
        child = self.child
        turn = turn_state(session)
        answer = (ended.text if ended is not None else "") or last_answer(session)
        status, reason = ending_of(
            turn,
            ended,
            answer=answer,
            crashed_with=crashed_with,
            is_overdue=self._is_overdue,
            cancel_reason=child.cancel_reason,
        )
        child.is_pending, child.cancel_reason = False, ""
        child.turn_state = turn
        child.error_kind = None if ended is None else ended.error_kind
        child.output = None if ended is None else ended.output
        if child.status is SubagentStatus.DETACHED:
            return  # Its parent is done with it; how it ended is in its own log.
        facts: dict[str, Any] = {"elapsed_ms": max(0, round(chain.get_snapshot().elapsed_ms))}
        if ended is not None:
            facts["artifacts"] = self._artifacts(workspace)
        if status is SubagentStatus.COMPLETED:
            facts["summary"] = answer
        else:
            facts["reason"] = reason or child.error_kind or "it failed without giving a reason"
            facts["next_actions"] = next_actions(child, status, turn)
        self.roster.move(child, status, **facts)

    def _artifacts(self, workspace: ChildWorkspace) -> tuple[str, ...]:
        try:
            return workspace.artifacts(self.child.id)
        except (TreenailError, OSError) as error:
            _logger.warning("the changes of %s cannot be listed", self.child.id, exc_info=error)
            return ()

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Open a span for the work, below the span that asked for it."""
        child, clock = self.child, self.parent.clock
        began = clock.monotonic()
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
                status = child.status.value
                span.set("treenail.subagent.status", status)
                if child.status not in (SubagentStatus.COMPLETED, SubagentStatus.DETACHED):
                    span.fail(child.error_kind or status)
                about["treenail__subagent__status"] = status
                telemetry.record("treenail.subagents", 1, **about)
                telemetry.record("treenail.subagent.duration", clock.monotonic() - began, **about)

"""Running a workflow: steps over subagents, in the order that their dependencies and their files allow.

Theory of operation
-------------------
A workflow has a session. Its log holds the specification (`workflow_started`), which subagent does which step
(`step_scheduled`, beside the `SubagentEvent`s), and what was decided (`checkpoint_decided`). The state of a
workflow is the fold of that log, so another process can take over at any time.

One loop does everything: decide about the steps whose subagents have ended, start the steps that may start,
wait.

- **A step starts when every step that it depends on is `checkpoint_ready`**, and for no other reason.
- **Readiness is verified.** The agent's answer is a claim; `checkpoints` holds it against the evidence.
- **An isolated step's changes are applied in one transaction**, right before its checkpoint is recorded, and
  not while another step reads those files. If the process dies in between, the record of the transaction
  shows that they are applied, and they are not applied again. After a conflict nothing is applied, and a
  person decides. If a person decides that the step is ready, its changes are applied before other steps
  build on it.
- **Exactly once.** A subagent is spawned under a name made of the workflow, the step and the attempt. A
  process that died between spawning and recording finds the subagent by that name.
- **Stopped is not ended.** A cancelled workflow is `interrupted`, and its steps resume where they were. The
  time used before a crash or an interrupt counts. A workflow that had ended gets its whole time again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import anyio

from treenail.agent import AnyAgent, extended
from treenail.containment import UNLIMITED, ChainMetadata, ExecutionContext, Limits, describe
from treenail.errors import TreenailError, UsageError
from treenail.state import ExecutionState, Session
from treenail.subagents import Allowance, ChildRunner, Subagent, SubagentLimits, Subagents, SubagentStatus
from treenail.tools import Permissions, filesystem_of
from treenail.turns import ceilings_of, contain, newly_set, pasteable, used_time_of
from treenail.workflows.checkpoints import Checkpoints, checkpoint_maker
from treenail.workflows.copies import is_applied
from treenail.workflows.events import (
    WorkflowEvent,
    WorkflowEventKind,
    WorkflowRecord,
    has_workflow,
    log_event,
    record_of,
)
from treenail.workflows.globs import overlaps
from treenail.workflows.outcomes import Checkpoint, StepAnswer
from treenail.workflows.prompts import GUIDE, task_text
from treenail.workflows.schedule import conflict, waves
from treenail.workflows.spec import StepSpec, WorkflowSpec
from treenail.workflows.states import StepState, StepView, WorkflowResult, WorkflowState, derive_workflow
from treenail.workflows.traces import WorkflowTrace

_TIME_IS_OVER = "the workflow's time is over"


@dataclass(slots=True)
class Workflow:
    """One workflow on one session. `run` begins it; `resume` continues it, in any process.

    `agents` are those that steps may name, `runner` runs their turns. The limits are the operator's; a
    specification can only ask for less. Without limits, the specification's own limits hold.
    """

    state: ExecutionState
    agents: Sequence[AnyAgent] | Mapping[str, AnyAgent]
    runner: ChildRunner
    limits: SubagentLimits | None = None
    containment: ExecutionContext | None = None
    """The chain that the steps spend from. Without one, `ceiling` is the limit."""
    ceiling: Limits | None = None
    """What all steps together may use, besides what the specification says."""
    permissions: Permissions = field(default_factory=Permissions)
    depth: int = 0
    workspace: str | None = None
    """The directory that it works in, recorded so that a resume finds it."""
    watch: Callable[[WorkflowEvent], object] | None = None
    """Called with each event after it was logged. For display only."""
    _record: WorkflowRecord = field(init=False, repr=False)
    _subagents: Subagents = field(init=False, repr=False)
    _checkpoints: Checkpoints = field(init=False, repr=False)
    _began: float = 0.0
    _trace: WorkflowTrace = field(default_factory=WorkflowTrace, repr=False)

    # .. beginning and resuming ..

    async def run(self, spec: WorkflowSpec) -> WorkflowResult:
        """Begin a workflow. Raises `UsageError` if the session has one already, or for an unknown agent."""
        if has_workflow(self._session):
            raise UsageError(f"the session {self._session.session_id} has a workflow already; resume it")
        self._check(spec)
        started = WorkflowEvent(
            "workflow_started",
            spec.id,
            spec.title,
            self.state.clock.now(),
            spec_json=json.dumps(spec.to_data()),
            workspace=self.workspace or "",
        )
        self._session.dispatch(started)
        self._record = record_of(self._session)
        self._show(started)
        return await self._drive()

    async def resume(self) -> WorkflowResult:
        """Resume the session's workflow. Finished steps are not run again; a complete one stays complete."""
        self._record = record_of(self._session)
        if self._record.state is WorkflowState.COMPLETED:
            return self._result()
        self._check(self._record.spec)
        return await self._drive(is_resumed=True)

    @property
    def _session(self) -> Session:
        return self.state.session

    def _check(self, spec: WorkflowSpec) -> None:
        """Refuse what cannot succeed, before anything is recorded."""
        check_agents(spec, self.agents)
        limits = self.limits
        if limits is None:
            return
        if self.depth + 1 > limits.max_depth:
            raise UsageError(
                f"this session is at depth {self.depth}, and the operator allows {limits.max_depth}; "
                "do the work here"
            )
        working = [each for each in spec.steps if each.posture != "apply"]
        if len(working) > limits.max_children:
            raise UsageError(
                f"the workflow has {len(working)} steps for agents, and the operator allows "
                f"{limits.max_children} subagents; make it smaller"
            )

    # .. the loop ..

    async def _drive(self, *, is_resumed: bool = False) -> WorkflowResult:
        with self._trace.whole(self._record.spec, self._session.session_id) as ended:
            result = await self._run_steps(is_resumed)
            ended(result.state.value)
            return result

    def _used_s(self, chain: ExecutionContext) -> float:
        """Return how much of its time the workflow has used: what its chain is charged since it was resumed.

        One that was finished has all of its time again.
        """
        record = self._record
        if record.finished_at is not None and not record.interrupted:
            return 0.0
        return record.used_s + max(0.0, _ran_s(chain) - record.chain_s)

    async def _run_steps(self, is_resumed: bool) -> WorkflowResult:
        spec = self._record.spec
        self._began = self.state.clock.monotonic()
        agents = [
            replace(each, output_type=StepAnswer, instructions=extended(each.instructions, GUIDE))
            for each in by_name(self.agents).values()
        ]
        chain = self._contain(spec)
        if is_resumed:
            self._log("workflow_resumed", used_s=self._used_s(chain), chain_s=_ran_s(chain))
        try:
            async with Subagents(
                self.state,
                agents,
                runner=self.runner,
                limits=self._subagent_limits(spec),
                containment=chain,
                permissions=self.permissions,
                depth=self.depth,
            ) as self._subagents:
                self._checkpoints = Checkpoints(self.state, self._subagents, self.permissions, self._record)
                await self._resume_steps()
                timed_out, stopped = await self._loop()
        except BaseException as error:
            # The subagents have been stopped, with evidence. If the log fails too, this is left as a crash.
            with suppress(TreenailError):
                self._interrupt(describe(error))
            raise
        finally:
            chain.close()
        if stopped:
            self._interrupt(stopped)
            return self._result()
        return self._finish(timed_out=timed_out)

    async def _loop(self) -> tuple[bool, str]:
        """Run until nothing more can be done. Returns whether time ran out, and why it was stopped."""
        while True:
            stopped = await self._decide_ended()
            if stopped:
                return False, stopped
            if self._left_s() <= 0 and self._has_more_to_do():
                await self._run_out_of_time()
                return True, ""
            await self._start_ready()
            at_work = [each.subagent_id for each in self._running() if not self._child(each).is_settled]
            if at_work:
                await self._subagents.wait(at_work, timeout_s=max(0.001, self._left_s()), until="any")
            elif not self._running():
                return False, ""

    def _has_more_to_do(self) -> bool:
        ready = self._ready_ids()
        return any(
            each.state is StepState.RUNNING
            or (
                each.state is StepState.PENDING
                and set(self._record.spec.step(each.step_id).depends_on) <= ready
            )
            for each in self._views()
        )

    def _contain(self, spec: WorkflowSpec) -> ExecutionContext:
        """Return the chain that the steps spend from."""
        limits = UNLIMITED if spec.max_cost_usd is None else Limits(max_cost_usd=spec.max_cost_usd)
        if self.containment is not None:
            # The same name after a restart: the chain continues with what it had spent.
            name = f"workflow-{self._session.session_id}"
            return self.containment.spawn_child(limits, metadata=ChainMetadata(name, name))
        ceiling = self.ceiling or ceilings_of(self._session)
        if ceiling is None:
            return contain(self._session, limits)
        costs = [each for each in (ceiling.max_cost_usd, spec.max_cost_usd) if each is not None]
        chain = contain(self._session, replace(ceiling, max_cost_usd=min(costs, default=None)))
        self._session.dispatch_all(newly_set(self._session, chain))
        return chain

    def _subagent_limits(self, spec: WorkflowSpec) -> SubagentLimits:
        given = self.limits or SubagentLimits(
            timeout_s=spec.timeout_s,
            max_threads=spec.max_concurrency,
            max_children=sum(1 + each.retries for each in spec.steps),
            max_depth=self.depth + 1,
        )
        return replace(
            given,
            max_threads=min(given.max_threads, spec.max_concurrency),
            # A person who asks for more attempts is allowed them.
            max_children=given.max_children + sum(each.attempt for each in self._views()),
        )

    def _left_s(self) -> float:
        used = self._record.used_s + self.state.clock.monotonic() - self._began
        return self._record.spec.timeout_s - used

    def _views(self) -> tuple[StepView, ...]:
        return tuple(self._record.steps[each.id] for each in self._record.spec.steps)

    def _ready_ids(self) -> set[str]:
        return {each.step_id for each in self._views() if each.state is StepState.READY}

    def _running(self) -> list[StepView]:
        return [each for each in self._views() if each.state is StepState.RUNNING and each.subagent_id]

    def _child(self, view: StepView) -> Subagent:
        return self._subagents.get(view.subagent_id)

    # .. starting steps ..

    async def _resume_steps(self) -> None:
        """Resume steps that were stopped or answered, and apply the steps that a person called ready."""
        for view in self._views():
            if view.state is StepState.READY:
                await self._apply_answered(view)
                continue
            if view.state not in (StepState.HELD, StepState.RUNNING) or not view.subagent_id:
                continue
            child = self._child(view)
            is_running = view.state is StepState.RUNNING
            if not child.is_settled:
                continue
            if child.status is SubagentStatus.CLOSED and is_running:
                self._spawn(self._record.spec.step(view.step_id), view.attempt)
            elif (child.status is SubagentStatus.CANCELLED and is_running) or self._checkpoints.was_answered(
                child
            ):
                if not is_running:
                    self._log(
                        "step_scheduled", step_id=view.step_id, attempt=view.attempt, subagent_id=child.id
                    )
                self._subagents.resume(child.id)

    async def _apply_answered(self, view: StepView) -> None:
        """Apply the changes of a step that a person called ready."""
        checkpoint = view.checkpoint
        if checkpoint is None or not checkpoint.changes_wanted or is_applied(self._session, view.subagent_id):
            return
        claim = await self._checkpoints.apply((view.subagent_id,), checkpoint)
        if not claim.dependent_safe:
            self._decide(replace(claim, changes_wanted=False))

    async def _start_ready(self) -> None:
        """Start every step that may start now."""
        while (step := self._next_step()) is not None:
            attempt = self._record.steps[step.id].attempt + 1
            if step.posture == "apply":
                self._log("step_scheduled", step_id=step.id, attempt=attempt)
                self._decide(await self._checkpoints.of_apply_step(step))
            else:
                self._spawn(step, attempt)

    def _next_step(self) -> StepSpec | None:
        """Return a step that may start now: it is ready to, and in conflict with no running step."""
        spec, ready = self._record.spec, self._ready_ids()
        running = [spec.step(each.step_id) for each in self._running()]
        if len(running) >= spec.max_concurrency:
            return None
        for step in spec.steps:
            view = self._record.steps[step.id]
            # A step with posture apply has no subagent; if it was cut off, it is begun again.
            is_waiting = view.state is StepState.PENDING or (
                view.state is StepState.RUNNING and not view.subagent_id
            )
            if (
                is_waiting
                and set(step.depends_on) <= ready
                and all(conflict(step, each) is None for each in running)
            ):
                return step
        return None

    def _spawn(self, step: StepSpec, attempt: int, *, retry_of: str | None = None, reason: str = "") -> None:
        child = self._subagents.spawned_by(self._name(step, attempt))
        while child is not None and child.status is SubagentStatus.CLOSED:
            # It was closed before it had started. That is final, and nothing was done.
            attempt += 1
            child = self._subagents.spawned_by(self._name(step, attempt))
        if child is None:
            done = {each.step_id: each.checkpoint for each in self._views() if each.checkpoint is not None}
            with self._trace.attempt(step, attempt):
                child = self._subagents.spawn(
                    step.agent,
                    task_text(step, done),
                    workspace=step.mode if filesystem_of(self.state) is not None else "shared",
                    allowance=Allowance(
                        timeout_s=step.timeout_s, max_steps=step.max_steps, max_cost_usd=step.max_cost_usd
                    ),
                    call_id=self._name(step, attempt),
                    retry_of=retry_of,
                )
        self._log("step_scheduled", step_id=step.id, attempt=attempt, subagent_id=child.id, reason=reason)

    def _name(self, step: StepSpec, attempt: int) -> str:
        return f"workflow:{self._record.spec.id}:{step.id}:{attempt}"

    # .. deciding about steps ..

    async def _decide_ended(self) -> str:
        """Decide about every step whose subagent has ended. Returns why the workflow was stopped, or ''."""
        for view in self._running():
            child = self._child(view)
            if not child.is_settled:
                continue
            if child.status is SubagentStatus.CANCELLED:
                return child.reason or "it was cancelled"
            step = self._record.spec.step(view.step_id)
            if self._is_being_read(step):
                continue
            checkpoint = await self._checkpoints.of_step(step, child)
            failed = checkpoint.status == "failed" or checkpoint.timed_out
            if failed and self._may_retry(step, view):
                why = checkpoint.summary or checkpoint.reason
                self._spawn(step, view.attempt + 1, retry_of=child.id, reason=f"retried: {why}")
            else:
                self._decide(checkpoint)
        return ""

    def _is_being_read(self, step: StepSpec) -> bool:
        """Say whether a running step reads files in the workspace that this step's changes may replace."""
        if not step.has_copy or not step.auto_apply:
            return False
        at_work = [each for each in self._running() if not self._child(each).is_settled]
        readers = [self._record.spec.step(each.step_id) for each in at_work]
        return any(
            overlaps(one, other)
            for reader in readers
            if not reader.has_copy
            for one in reader.read_set
            for other in step.writes
        )

    def _may_retry(self, step: StepSpec, view: StepView) -> bool:
        tried = [each for each in view.tries if self._subagents.get(each).status is not SubagentStatus.CLOSED]
        return (
            len(tried) <= step.retries
            and self._left_s() > 0
            and len(self._subagents.children) < self._subagents.limits.max_children
        )

    def _decide(self, checkpoint: Checkpoint) -> None:
        self._log("checkpoint_decided", step_id=checkpoint.step_id, checkpoint=checkpoint)
        self._trace.decided(checkpoint.step_id, checkpoint.status)

    async def _run_out_of_time(self) -> None:
        late = [each for each in self._running() if not self._child(each).is_settled]
        async with anyio.create_task_group() as group:
            for view in late:
                group.start_soon(self._subagents.cancel, view.subagent_id, _TIME_IS_OVER)
        for view in self._running():
            child, step = self._child(view), self._record.spec.step(view.step_id)
            if child.status in (SubagentStatus.CANCELLED, SubagentStatus.CLOSED):
                self._decide(checkpoint_maker(step, child)("failed", _TIME_IS_OVER, timed_out=True))
            else:
                self._decide(await self._checkpoints.of_step(step, child))

    # .. ending ..

    @property
    def _resume_command(self) -> str:
        return f"treenail workflow resume {str(self._session.session_id)[:8]}"

    def _interrupt(self, reason: str) -> None:
        self._log("workflow_interrupted", reason=reason, next_actions=(self._resume_command,))

    def _finish(self, *, timed_out: bool) -> WorkflowResult:
        for view in self._views():
            if view.state is StepState.PENDING:
                reason = "workflow_timeout" if timed_out else "dependency_not_checkpoint_ready"
                self._log("step_held", step_id=view.step_id, reason=reason)
        state = derive_workflow(self._record.spec, self._record.steps, is_over=True, timed_out=timed_out)
        self._log("workflow_finished", state=state.value, next_actions=self._next_actions(state))
        return self._result()

    def _next_actions(self, state: WorkflowState) -> tuple[str, ...]:
        """Return what can be done now, as commands."""
        if state is WorkflowState.COMPLETED:
            return ()
        resume = self._resume_command
        found: list[str] = []
        for view in self._views():
            if view.reason:
                continue
            is_held = view.state is StepState.HELD
            if is_held and view.subagent_id and self._checkpoints.waits_for_person(self._child(view)):
                child = str(self._child(view).session_id)[:8]
                found += [f"treenail hold list {child}", f"treenail hold answer {child} --yes", resume]
                continue
            if is_held or view.state in (StepState.NEEDS_ORCHESTRATOR, StepState.PARTIAL):
                found.append(f"{resume} --ready {view.step_id}")
            if view.state.is_ended and view.state is not StepState.READY:
                found.append(f"{resume} --rerun {view.step_id}")
        if state is WorkflowState.TIMED_OUT and not found:
            found.append(resume)
        return tuple(dict.fromkeys(found))

    def _result(self) -> WorkflowResult:
        return _result_of(self._record, self._session)

    # .. recording ..

    def _log(self, kind: WorkflowEventKind, **facts: Any) -> None:
        """Log an event, then let it take effect."""
        self._show(log_event(self._session, self._record, kind, **facts))

    def _show(self, event: WorkflowEvent) -> None:
        if self.watch is not None:
            try:
                self.watch(event)
            except Exception:  # noqa: BLE001  # a broken screen must not break the workflow
                self.watch = None


def workflow_result(session: Session) -> WorkflowResult:
    """Return the result of a session's workflow, as its log has it. Raises `UsageError` if it has none."""
    return _result_of(record_of(session), session)


def _ran_s(chain: ExecutionContext) -> float:
    return chain.get_snapshot().elapsed_ms / 1000


def _result_of(record: WorkflowRecord, session: Session) -> WorkflowResult:
    began = record.resumed_at or record.started_at
    # One that has not ended, or was killed, was last seen by its newest event or by its heartbeat.
    ended = record.finished_at or _last_event(session) or began
    ran_s = (ended - began).total_seconds()
    used = None if record.finished_at else used_time_of(session)
    if used is not None:
        seen_ms = {**used.ended, **used.running}.get(str(session.session_id), 0.0)
        ran_s = max(ran_s, seen_ms / 1000 - record.chain_s)
    return WorkflowResult(
        workflow_id=record.spec.id,
        name=record.spec.title,
        session_id=str(session.session_id),
        state=record.state,
        steps=tuple(record.steps[each.id] for each in record.spec.steps),
        waves=waves(record.spec),
        next_actions=pasteable(record.next_actions, session.log),
        elapsed_s=record.used_s + max(0.0, ran_s),
        reason=record.interrupted,
    )


def by_name(agents: Sequence[AnyAgent] | Mapping[str, AnyAgent]) -> dict[str, AnyAgent]:
    """Return agents by their names."""
    given = agents.values() if isinstance(agents, Mapping) else agents
    return {each.name: each for each in given}


def check_agents(spec: WorkflowSpec, agents: Sequence[AnyAgent] | Mapping[str, AnyAgent]) -> None:
    """Raise `UsageError` if a step names an agent that is not among these."""
    known = by_name(agents)
    for each in spec.steps:
        if each.posture != "apply" and each.agent not in known:
            raise UsageError(
                f"the step {each.id!r} wants the agent {each.agent!r}; there are: "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def _last_event(session: Session) -> datetime | None:
    """Return the time of a session's last event; None if it has none."""
    found = [each.at for each in session.log.read(session.session_id, after=max(0, session.head - 1))]
    return found[-1] if found else None

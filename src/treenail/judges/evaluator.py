"""One evaluation inside a run, isolated from it.

Theory of operation
-------------------
`NestedEvaluator` works out what the evaluation may use (`_Frame`, see `context`). Then it opens a child
session of the run's, a chain and a cancellation token below the run's, and a resource context, and lets the
adapter evaluate the prompt with them. All four are always closed again, in the opposite order.

A passed deadline and a spent budget are raised: they concern the run, too. Every other failure is captured in
the result, even an adapter that exits: a judge never ends the run. Two things are not the judge's and pass
through: the run's own cancellation, and a person's interrupt.

The time limit does not depend on the adapter: the whole evaluation is cancelled by the run's clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import anyio
import anyio.from_thread
import anyio.lowlevel

from treenail import telemetry
from treenail.children import stopped_by
from treenail.clock import Clock, SystemClock, new_id
from treenail.containment import CancellationToken, ExecutionContext, Limits, describe
from treenail.conversation import ProviderUsage
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    NestedEvaluationError,
    OutputParseError,
    PromptEvaluationError,
    ThrottleError,
    UsageError,
)
from treenail.judges.budgets import SharedBudgetTracker, refuse_exhausted
from treenail.judges.context import (
    JudgeScope,
    NestedEvaluationResult,
    NestedExecutionConfig,
    NestedExecutionContext,
    current_scope,
    derive_child_run_context,
    derive_nested_deadline,
    earliest,
    inner_scope,
    nested_chain,
    nesting_of,
    nesting_tags,
    refuse_mutable,
    scoped,
)
from treenail.judges.events import NestedEvaluated, shortened
from treenail.prompt import OutputT, Prompt, PromptExecuted, PromptResponse
from treenail.providers import ProviderAdapter
from treenail.state import (
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    RunContext,
    Session,
    SessionView,
    TokenUsage,
    nested_session,
    stamped,
)
from treenail.workspace import Filesystem

_logger = logging.getLogger("treenail.judges")

T = TypeVar("T")

_DEFAULTS = NestedExecutionConfig()


class NestedEvaluator(Generic[OutputT]):
    """Evaluates one prompt inside a run, isolated from it. See the module's theory of operation.

    An evaluator holds no state: it may evaluate several times, also at once, each time in a session
    of its own.
    """

    def __init__(
        self, adapter: ProviderAdapter, *, prompt: Prompt[OutputT], context: NestedExecutionContext
    ) -> None:
        self._adapter = adapter
        self._prompt = prompt
        self._context = context

    def evaluate(self, *, budget_tracker: BudgetTracker | None = None) -> NestedEvaluationResult[OutputT]:
        """Evaluate the prompt, blocking. Inside an event loop, use `aevaluate`.

        Raises `DeadlineExceededError` and `BudgetExceededError`, and `UsageError` for a mistake of the caller
        (a prompt with tools where none are allowed). Every other failure is captured in the result.
        """
        return run_blocking(partial(self.aevaluate, budget_tracker=budget_tracker))

    async def aevaluate(
        self, *, budget_tracker: BudgetTracker | None = None
    ) -> NestedEvaluationResult[OutputT]:
        """Do the same as `evaluate` from async code."""
        frame = self._frame(budget_tracker)
        began = frame.clock.monotonic()
        name, kind = self._prompt.name, ""
        error: BaseException | None = None
        response: PromptResponse[OutputT] | None = None
        try:
            if frame.depth > frame.ceiling:
                raise NestedEvaluationError(
                    f"the nested evaluation of {name!r} would be at depth {frame.depth}, and the limit is "
                    f"{frame.ceiling}; remove the judges from the judge's prompt, or raise max_nesting_depth",
                    prompt_name=name,
                    kind="depth",
                )
            with self._opened(frame) as state:
                response = await self._in_time(frame, state)
            if frame.tracker is not None:
                frame.tracker.check()
        except BaseException as raised:  # noqa: BLE001 - sorted, and raised again below if it is not ours
            kind, error = _sorted(raised, frame, name)
        frame.report(self._adapter.name, name, kind, error, frame.clock.monotonic() - began)
        if error is not None and not isinstance(error, NestedEvaluationError):
            raise error
        return NestedEvaluationResult(
            success=error is None,
            output=None if response is None or error is not None else self._output(response),
            error=error,
            usage=frame.usage,
            child_run_context=frame.run_context,
            cost_usd=frame.cost_usd,
        )

    def _output(self, response: PromptResponse[OutputT]) -> OutputT | None:
        """Return the answer; for a prompt without an output type, its text."""
        if response.output is None and self._prompt.output_type is str:
            return cast("OutputT | None", response.text)
        return response.output

    # .. the frame ..

    def _frame(self, budget_tracker: BudgetTracker | None) -> _Frame:
        """Work out what the evaluation may use. Raises if nothing is left."""
        context, scope = self._context, current_scope()
        config = context.config or scope.config or _DEFAULTS
        if self._prompt.tools and not config.allow_nested_tools:
            names = ", ".join(each.name for each in self._prompt.tools)
            raise UsageError(
                f"the prompt {self._prompt.name!r} has tools ({names}), which judges may not use here; "
                f"remove them, or set NestedExecutionConfig(allow_nested_tools=True)"
            )
        cancellation = context.cancellation or scope.cancellation
        if cancellation is not None:
            cancellation.raise_if_cancelled()
        clock = getattr(context.parent_session, "clock", None) or SystemClock()
        budget = context.budget
        deadline = derive_nested_deadline(
            earliest(context.deadline, scope.deadline, None if budget is None else budget.deadline),
            config.max_nested_duration,
            clock=clock,
        )
        deadline.raise_if_passed(f"the nested evaluation of {self._prompt.name!r}")
        containment = context.containment or scope.containment
        depth, ceiling = nesting_of(containment, context.parent_session)
        ceiling = config.max_nesting_depth if ceiling is None else min(ceiling, config.max_nesting_depth)
        run_context = context.parent_run_context or scope.run_context
        tracker, kind = self._tracker(budget_tracker, scope, config)
        return _Frame(
            context=context,
            scope=scope,
            config=config,
            clock=clock,
            deadline=deadline,
            containment=containment,
            cancellation=cancellation,
            depth=max(depth, scope.depth) + 1,
            ceiling=ceiling,
            tracker=tracker,
            tracker_kind=kind,
            run_context=derive_child_run_context(run_context, new_id()),
        )

    def _tracker(
        self, given: BudgetTracker | None, scope: JudgeScope, config: NestedExecutionConfig
    ) -> tuple[BudgetTracker | None, Literal["shared", "own", "none"]]:
        own = self._context.budget
        shared = given or self._context.resource_overrides.get(BudgetTracker)
        if shared is None and own is None:
            shared = scope.budget_tracker
        if shared is not None:
            refuse_exhausted(shared)
            return SharedBudgetTracker(shared, own), "shared"
        own = own or config.default_nested_budget
        return (None, "none") if own is None else (BudgetTracker(own), "own")

    # .. what is opened for it, and closed again ..

    @contextmanager
    def _opened(self, frame: _Frame) -> Iterator[ExecutionState]:
        with ExitStack() as stack:
            parent = frame.context.parent_session
            session_id = frame.run_context.session_id
            tags = {
                **nesting_tags(frame.depth, frame.ceiling),
                "nested": self._prompt.name,
                **({"judge": frame.scope.judge} if frame.scope.judge else {}),
            }
            session = (
                nested_session(parent, session_id=session_id, tags=tags)
                if isinstance(parent, SessionView)
                else Session(session_id=session_id, tags=tags, clock=frame.clock)
            )
            # Closed in the opposite order; the usage is read before the session is closed.
            stack.callback(session.close)
            stack.callback(frame.read_usage, session)
            limits = frame.limits()
            frame.chain = nested_chain(
                frame.containment, limits, depth=frame.depth, ceiling=frame.ceiling, clock=frame.clock
            )
            stack.callback(frame.chain.close)
            frame.token = CancellationToken(frame.cancellation)
            stack.callback(frame.token.unlink)
            resources = stack.enter_context(frame.registry(self._prompt.resources).open())
            yield ExecutionState(session=session, resources=resources, clock=frame.clock)

    async def _in_time(self, frame: _Frame, state: ExecutionState) -> PromptResponse[OutputT]:
        """Let the adapter evaluate until the time is over or the run is stopped."""
        assert frame.token is not None
        inside = inner_scope(
            frame.scope,
            depth=frame.depth,
            containment=frame.chain,
            deadline=frame.deadline,
            cancellation=frame.token,
            budget_tracker=frame.tracker,
            run_context=frame.run_context,
            config=frame.config,
        )
        run, trace = frame.run_context.run_id.hex, frame.run_context.trace_id
        left_s = max(frame.deadline.remaining().total_seconds(), 0.0)
        with (
            scoped(inside),
            stamped(run_id=run, trace_id=trace),
            stopped_by(frame.clock, left_s, frame.token) as limit,
        ):
            response = await self._adapter.aevaluate(
                self._prompt,
                state=state,
                deadline=frame.deadline,
                budget_tracker=frame.tracker,
                run_context=frame.run_context,
                containment=frame.chain,
                cancellation=frame.token,
            )
        if limit.cancel_called:
            # An answer that comes too late does not count.
            frame.token.raise_if_cancelled()
            raise DeadlineExceededError(
                f"the nested evaluation of {self._prompt.name!r} was stopped: its time was over"
            )
        return response


@dataclass(slots=True)
class _Frame:
    """What one nested evaluation may use, and what it has used."""

    context: NestedExecutionContext
    scope: JudgeScope
    config: NestedExecutionConfig
    clock: Clock
    deadline: Deadline
    containment: ExecutionContext | None
    cancellation: CancellationToken | None
    depth: int
    ceiling: int
    tracker: BudgetTracker | None
    tracker_kind: Literal["shared", "own", "none"]
    run_context: RunContext
    chain: ExecutionContext | None = None
    token: CancellationToken | None = None
    usage: TokenUsage | None = None
    cost_usd: float | None = None

    def is_run_stopped(self) -> bool:
        """Say whether the run itself was stopped, and not only this evaluation."""
        if self.cancellation is not None and self.cancellation.is_cancelled:
            return True
        return self.containment is not None and self.containment.cancellation_token.reason == "aborted"

    def limits(self) -> Limits:
        """Return the ceilings of its chain, besides the run's."""
        budget = self.context.budget
        return Limits(
            timeout=max(self.deadline.remaining().total_seconds(), 0.001),
            max_cost_usd=None if budget is None else budget.max_cost_usd,
        )

    def registry(self, of_prompt: ResourceRegistry) -> ResourceRegistry:
        """Return the resources: the clock, read-only files, the prompt's own, and the named overrides."""
        workspace = self.scope.workspace
        for each in of_prompt:
            # A judge's prompt may have resources of its own, but not the run's workspace.
            if workspace is not None and of_prompt.get(each, None) is workspace:
                refuse_mutable(each, workspace)
        filesystem = self.context.filesystem or self.scope.filesystem
        inherited: dict[type[Any], object] = {Clock: self.clock}
        if filesystem is not None:
            inherited[Filesystem] = filesystem.read_only_view()
        named: dict[type[Any], object] = dict(self.context.resource_overrides)
        if self.tracker is not None:
            named[BudgetTracker] = self.tracker
        both = ResourceRegistry.build(inherited).merge(of_prompt, strict=False)
        return both.merge(ResourceRegistry.build(named), strict=False)

    def read_usage(self, session: Session) -> None:
        """Read what was used, and record what the tracker has not counted yet."""
        calls = session[ProviderUsage].all()
        executed = session[PromptExecuted].latest()
        if calls:
            self.usage = sum((each.usage for each in calls), start=TokenUsage())
            costs = [each.cost_usd for each in calls if each.cost_usd is not None]
            self.cost_usd = math.fsum(costs) if costs else None
        elif executed is not None:
            self.usage = executed.usage
        if self.tracker is None:
            return
        counted = self.tracker.consumed
        if self.usage is None:
            self.usage = None if counted.total is None else counted
            return
        # An adapter may not use trackers, or not have recorded its last call.
        uncounted = TokenUsage(
            max((self.usage.input_tokens or 0) - (counted.input_tokens or 0), 0),
            max((self.usage.output_tokens or 0) - (counted.output_tokens or 0), 0),
        )
        cost = max((self.cost_usd or 0.0) - self.tracker.consumed_cost_usd, 0.0)
        if uncounted.total or cost:
            self.tracker.record_cumulative(self.run_context.run_id.hex, uncounted, cost or None)

    def report(
        self, adapter: str, prompt_name: str, kind: str, error: BaseException | None, elapsed_s: float
    ) -> None:
        """Leave the evaluation's event for the run's log, write a log line and record measurements."""
        done = NestedEvaluated(
            judge=self.scope.judge,
            prompt_name=prompt_name,
            adapter=adapter,
            child_session_id=self.run_context.session_id if self.chain is not None else None,
            success=error is None,
            error_kind=kind,
            detail="" if error is None else shortened(describe(error), 1_000),
            usage=self.usage,
            cost_usd=self.cost_usd,
            budget=self.tracker_kind,
            depth=self.depth,
            run_context=self.run_context,
            elapsed_ms=elapsed_s * 1000,
        )
        self.scope.evaluations.append(done)
        used = self.usage or TokenUsage()
        _logger.log(
            logging.WARNING if kind else logging.INFO,
            "the nested evaluation of %s %s after %.3f s",
            prompt_name,
            f"failed ({kind})" if kind else "succeeded",
            elapsed_s,
            extra={
                "judge": done.judge,
                "prompt_name": prompt_name,
                "adapter": adapter,
                "nested_error_kind": kind,
                "nested_session_id": str(self.run_context.session_id),
                "nested_depth": done.depth,
                "nested_budget": done.budget,
                "nested_input_tokens": used.input_tokens,
                "nested_output_tokens": used.output_tokens,
                "nested_cost_usd": done.cost_usd,
                "nested_elapsed_ms": round(done.elapsed_ms, 3),
            },
        )
        about = {
            "gen_ai__evaluation__name": done.judge or None,
            "gen_ai__prompt__name": prompt_name,
            "treenail__nested__budget": done.budget,
        }
        telemetry.record("treenail.nested.duration", elapsed_s, **about, error__type=kind or None)
        for token_type, tokens in (("input", used.input_tokens), ("output", used.output_tokens)):
            if tokens is not None:
                telemetry.record(
                    "treenail.nested.token.usage", tokens, **about, gen_ai__token__type=token_type
                )
        if done.cost_usd is not None:
            telemetry.record("treenail.nested.cost", done.cost_usd, **about)


# --- failures ------------------------------------------------------------------------------------------

_LIMITS: dict[str, type[DeadlineExceededError | BudgetExceededError]] = {
    "timeout": DeadlineExceededError,
    "budget_exceeded": BudgetExceededError,
}

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (ThrottleError, "throttled"),
    (OutputParseError, "output"),
    (PromptEvaluationError, "evaluation"),
    (CallRefused, "refused"),
)


def _sorted(error: BaseException, frame: _Frame, prompt_name: str) -> tuple[str, BaseException]:
    """Return a word for a failure, and its error: a `NestedEvaluationError` if it is captured in the result.

    Any other error is raised: a limit that was reached, a person's interrupt, the run's own cancellation.
    """
    cause = error
    if isinstance(error, CallRefused) and error.stop_reason in _LIMITS:
        error = _LIMITS[error.stop_reason](str(error))
    elif isinstance(error, CancelledByToken) and not frame.is_run_stopped():
        error = DeadlineExceededError(f"the nested evaluation was stopped: {error}")
    elif not isinstance(error, NestedEvaluationError) and not _is_raised(error):
        error = NestedEvaluationError(
            f"the nested evaluation of {prompt_name!r} failed: {describe(error)}",
            prompt_name=prompt_name,
            kind=next((word for kind, word in _KINDS if isinstance(error, kind)), "crashed"),
        )
    if error is not cause:
        error.__cause__ = cause
    if isinstance(error, NestedEvaluationError):
        return error.kind, error
    if isinstance(error, DeadlineExceededError):
        return "deadline", error
    return "budget" if isinstance(error, BudgetExceededError) else "cancelled", error


def _is_raised(error: BaseException) -> bool:
    if isinstance(error, DeadlineExceededError | BudgetExceededError | KeyboardInterrupt | CancelledByToken):
        return True
    return isinstance(error, anyio.get_cancelled_exc_class()) and is_being_cancelled()


def is_being_cancelled() -> bool:
    """Say whether this task is really being cancelled, and did not just raise a cancellation itself."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # Another event loop, where only a real cancellation raises so.
        return True
    return task is None or task.cancelling() > 0


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run async code to its end from synchronous code: in the run's event loop, or in a new one.

    Raises `UsageError` inside an event loop, which it would block.
    """
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        loop = current_scope().loop
        # A judge on a worker thread goes back to the run's loop: the provider's connections belong to it.
        return anyio.run(work) if loop is None else anyio.from_thread.run(work, token=loop)
    raise UsageError(
        "this would block the event loop that runs here; use the async method: aevaluate, aprovide or acheck"
    )

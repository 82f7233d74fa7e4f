"""One evaluation inside a run, isolated from it.

Theory of operation
-------------------
`NestedEvaluator` works out what the evaluation may use (`_Frame`, see `context`). Then it opens a child
session of the run's, a chain and a cancellation token below the run's, and a resource context, and lets the
adapter evaluate the prompt with them. All four are always closed again, in the opposite order.

The adapter that a judge is handed, `JudgeAdapter`, takes the same way with the session that it is given. It
carries the scope of its judge along, so that an evaluation with it is inside the run's limits wherever the
judge makes it, also on a thread of its own.

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
from typing import Any, Generic, Literal, TypeVar, Unpack, cast

import anyio
import anyio.from_thread
import anyio.lowlevel

from treenail import telemetry
from treenail.children import stopped_by
from treenail.clock import Clock, SystemClock, new_id
from treenail.containment import CancellationToken, ExecutionConfig, ExecutionContext, Limits, describe
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
from treenail.judges.budgets import SharedBudgetTracker, booked_to, refuse_exhausted
from treenail.judges.context import (
    JudgeScope,
    NestedEvaluationResult,
    NestedExecutionConfig,
    NestedExecutionContext,
    SealedContext,
    current_scope,
    derive_child_run_context,
    derive_nested_deadline,
    earliest,
    inner_scope,
    is_below,
    nested_chain,
    nesting_of,
    nesting_tags,
    refuse_mutable,
    scoped,
)
from treenail.judges.events import NestedEvaluated, shortened
from treenail.prompt import OutputT, Prompt, PromptExecuted, PromptResponse
from treenail.providers import EvaluationOptions, ProviderAdapter
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
        self._adapter, self._lent = _opened_up(adapter)
        self._prompt = prompt
        self._context = context

    @property
    def _scope(self) -> JudgeScope:
        return current_scope() if self._lent is None else self._lent

    def evaluate(self, *, budget_tracker: BudgetTracker | None = None) -> NestedEvaluationResult[OutputT]:
        """Evaluate the prompt, blocking. Inside an event loop, use `aevaluate`.

        Raises `DeadlineExceededError` and `BudgetExceededError`, and `UsageError` for a mistake of the caller
        (a prompt with tools where none are allowed). Every other failure is captured in the result.
        """
        return run_blocking(partial(self.aevaluate, budget_tracker=budget_tracker), self._scope)

    async def aevaluate(
        self, *, budget_tracker: BudgetTracker | None = None
    ) -> NestedEvaluationResult[OutputT]:
        """Do the same as `evaluate` from async code."""
        frame = self._frame(budget_tracker)
        response, error = await self._evaluate(frame)
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

    async def _respond(
        self, state: ExecutionState, budget_tracker: BudgetTracker | None, asked: EvaluationOptions
    ) -> PromptResponse[OutputT]:
        """Evaluate the prompt in a session of the caller's, and raise whatever goes wrong."""
        frame = self._frame(budget_tracker, state)
        response, error = await self._evaluate(frame, asked)
        if isinstance(error, NestedEvaluationError) and isinstance(error.__cause__, Exception):
            raise error.__cause__
        if error is not None:
            raise error
        assert response is not None
        return response

    async def _evaluate(
        self, frame: _Frame, asked: EvaluationOptions | None = None
    ) -> tuple[PromptResponse[OutputT] | None, BaseException | None]:
        """Evaluate the prompt in a frame, and report it: what came back, and what went wrong."""
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
                response = await self._in_time(frame, state, asked or {})
            if frame.tracker is not None:
                frame.tracker.check()
        except BaseException as raised:  # noqa: BLE001 - sorted, and raised again below if it is not ours
            kind, error = _sorted(raised, frame, name)
        frame.report(self._adapter.name, name, kind, error, frame.clock.monotonic() - began)
        return response, error

    def _output(self, response: PromptResponse[OutputT]) -> OutputT | None:
        """Return the answer; for a prompt without an output type, its text."""
        if response.output is None and self._prompt.output_type is str:
            return cast("OutputT | None", response.text)
        return response.output

    # .. the frame ..

    def _frame(self, budget_tracker: BudgetTracker | None, state: ExecutionState | None = None) -> _Frame:
        """Work out what the evaluation may use. Raises if nothing is left."""
        context, scope = self._context, self._scope
        config = context.config or scope.config or _DEFAULTS
        if self._prompt.tools and not config.allow_nested_tools:
            names = ", ".join(each.name for each in self._prompt.tools)
            raise UsageError(
                f"the prompt {self._prompt.name!r} has tools ({names}), which judges may not use here; "
                f"remove them, or set NestedExecutionConfig(allow_nested_tools=True)"
            )
        containment, beside = scope.containment, context.containment
        if containment is None or (beside is not None and is_below(beside, containment)):
            containment, beside = beside or containment, None
        tokens = [each for each in (scope.cancellation, context.cancellation) if each is not None]
        for each in tokens:
            each.raise_if_cancelled()
        if beside is not None:
            tokens.append(beside.cancellation_token)
        clock = getattr(context.parent_session, "clock", None) or SystemClock()
        budget = context.budget
        deadline = derive_nested_deadline(
            earliest(context.deadline, scope.deadline, None if budget is None else budget.deadline),
            config.max_nested_duration,
            clock=clock,
        )
        deadline.raise_if_passed(f"the nested evaluation of {self._prompt.name!r}")
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
            beside=beside,
            tokens=tuple(tokens),
            depth=max(depth, scope.depth, current_scope().depth) + 1,
            ceiling=ceiling,
            tracker=tracker,
            tracker_kind=kind,
            run_context=derive_child_run_context(
                run_context, new_id() if state is None else state.session.session_id
            ),
            state=state,
        )

    def _tracker(
        self, given: BudgetTracker | None, scope: JudgeScope, config: NestedExecutionConfig
    ) -> tuple[BudgetTracker | None, Literal["shared", "own", "none"]]:
        own = self._context.budget
        shared = given or self._context.resource_overrides.get(BudgetTracker)
        if shared is None and own is None:
            shared = scope.budget_tracker
        if shared is not None:
            shared = booked_to(shared)
            refuse_exhausted(shared)
            return SharedBudgetTracker(shared, own), "shared"
        own = own or config.default_nested_budget
        return (None, "none") if own is None else (BudgetTracker(own), "own")

    # .. what is opened for it, and closed again ..

    @contextmanager
    def _opened(self, frame: _Frame) -> Iterator[ExecutionState]:
        with ExitStack() as stack:
            session = self._session(frame) if frame.state is None else frame.state.session
            # Closed in the opposite order; the usage is read before the session is closed.
            if frame.state is None:
                stack.callback(session.close)
            stack.callback(frame.read_usage, session, len(session[ProviderUsage].all()))
            frame.chain = nested_chain(
                frame.containment,
                *frame.limits(),
                depth=frame.depth,
                ceiling=frame.ceiling,
                clock=frame.clock,
            )
            stack.callback(frame.chain.close)
            token = frame.token = CancellationToken()
            for each in frame.tokens:
                stack.callback(each.on_cancel(partial(_follow, token, each)))
            if frame.state is not None:
                yield frame.state
                return
            resources = stack.enter_context(frame.registry(self._prompt.resources).open())
            yield ExecutionState(session=session, resources=resources, clock=frame.clock)

    def _session(self, frame: _Frame) -> Session:
        """Open the evaluation's session: a child of the run's, if there is a run."""
        parent, session_id = frame.context.parent_session, frame.run_context.session_id
        tags = {
            **nesting_tags(frame.depth, frame.ceiling),
            "nested": self._prompt.name,
            **({"judge": frame.scope.judge} if frame.scope.judge else {}),
        }
        if isinstance(parent, SessionView):
            return nested_session(parent, session_id=session_id, tags=tags)
        return Session(session_id=session_id, tags=tags, clock=frame.clock)

    def _handed(self, frame: _Frame) -> ExecutionContext | None:
        """Return the chain for the adapter. One that a judge brings along gets it sealed."""
        if frame.chain is None or self._lent is not None or frame.scope.containment is None:
            return frame.chain
        return cast("ExecutionContext", SealedContext(frame.chain))

    async def _in_time(
        self, frame: _Frame, state: ExecutionState, asked: EvaluationOptions
    ) -> PromptResponse[OutputT]:
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
            options: EvaluationOptions = {
                **asked,
                "state": state,
                "deadline": frame.deadline,
                "budget_tracker": frame.tracker,
                "run_context": frame.run_context,
                "containment": self._handed(frame),
                "cancellation": frame.token,
            }
            response = await self._adapter.aevaluate(self._prompt, **options)
        if limit.cancel_called:
            # An answer that comes too late does not count.
            frame.token.raise_if_cancelled()
            raise DeadlineExceededError(
                f"the nested evaluation of {self._prompt.name!r} was stopped: its time was over"
            )
        return response


def _follow(token: CancellationToken, stopped: CancellationToken) -> None:
    token.cancel(stopped.reason or "aborted", detail=stopped.detail)


class JudgeAdapter:
    """An adapter as a judge is handed it: inside the run's limits, whatever session and options it is given.

    What it evaluates is paid by the run and recorded there, as a nested evaluation is. It holds what it needs
    behind a function, so that no attribute leads to the run.
    """

    def __init__(self, adapter: ProviderAdapter, scope: JudgeScope) -> None:
        self.name = adapter.name
        self._behind: Callable[[], tuple[ProviderAdapter, JudgeScope]] = lambda: (adapter, scope)

    def __repr__(self) -> str:
        return f"JudgeAdapter({self.name!r})"

    def evaluate(
        self, prompt: Prompt[OutputT], **options: Unpack[EvaluationOptions]
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer. Not for use inside an event loop."""
        _, scope = self._behind()
        return run_blocking(partial(self.aevaluate, prompt, **options), scope)

    async def aevaluate(
        self, prompt: Prompt[OutputT], **options: Unpack[EvaluationOptions]
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer."""
        state, session = options.pop("state", None), options.pop("session", None)
        if (session is None) == (state is None):
            raise UsageError("evaluate takes a session or a state, one of the two")
        own = state if state is not None else ExecutionState(session)  # type: ignore[arg-type]  # one is given
        context = NestedExecutionContext(
            parent_session=own.session,
            parent_run_context=options.pop("run_context", None),
            deadline=options.pop("deadline", None),
            budget=options.pop("budget", None),
            containment=options.pop("containment", None),
            cancellation=options.pop("cancellation", None),
        )
        tracker = options.pop("budget_tracker", None)
        return await NestedEvaluator(self, prompt=prompt, context=context)._respond(own, tracker, options)


def _opened_up(adapter: ProviderAdapter) -> tuple[ProviderAdapter, JudgeScope | None]:
    """Return the adapter that does the work, and the scope that it must be used in, if it has one."""
    return adapter._behind() if isinstance(adapter, JudgeAdapter) else (adapter, None)


@dataclass(slots=True)
class _Frame:
    """What one nested evaluation may use, and what it has used."""

    context: NestedExecutionContext
    scope: JudgeScope
    config: NestedExecutionConfig
    clock: Clock
    deadline: Deadline
    containment: ExecutionContext | None
    beside: ExecutionContext | None
    """Limits that the caller has given it besides those of the run."""
    tokens: tuple[CancellationToken, ...]
    """Those that stop it: the judge's, and what the caller has given it."""
    depth: int
    ceiling: int
    tracker: BudgetTracker | None
    tracker_kind: Literal["shared", "own", "none"]
    run_context: RunContext
    state: ExecutionState | None = None
    """The caller's own session to evaluate in; None for a child session of the run's."""
    chain: ExecutionContext | None = None
    token: CancellationToken | None = None
    usage: TokenUsage | None = None
    cost_usd: float | None = None

    def is_run_stopped(self) -> bool:
        """Say whether the run itself was stopped, and not only this evaluation."""
        if any(each.is_cancelled for each in self.tokens):
            return True
        return self.containment is not None and self.containment.cancellation_token.reason == "aborted"

    def limits(self) -> tuple[ExecutionConfig | Limits, ...]:
        """Return the ceilings of its chain, besides the run's."""
        budget = self.context.budget
        own = Limits(
            timeout=max(self.deadline.remaining().total_seconds(), 0.001),
            max_cost_usd=None if budget is None else budget.max_cost_usd,
        )
        if self.beside is None:
            return (own,)
        given = self.beside.left()
        if given is None:
            raise BudgetExceededError(
                "nothing is left of the limits that the nested evaluation was given; leave containment out, "
                "and it has what the run has left"
            )
        return given, own

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

    def read_usage(self, session: Session, calls_before: int) -> None:
        """Read what was used, and record what the tracker has not counted yet."""
        calls = session[ProviderUsage].all()[calls_before:]
        executed = session[PromptExecuted].latest() if self.state is None else None
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


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]], scope: JudgeScope | None = None) -> T:
    """Run async code to its end from synchronous code: in the run's event loop, or in a new one.

    Raises `UsageError` inside an event loop, which it would block.
    """
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        scope = scope or current_scope()
        if scope.cancellation is not None:
            # The run, and its event loop, may be over.
            scope.cancellation.raise_if_cancelled()
        loop = scope.loop
        # A judge on a worker thread goes back to the run's loop: the provider's connections belong to it.
        return anyio.run(work) if loop is None else anyio.from_thread.run(work, token=loop)
    raise UsageError(
        "this would block the event loop that runs here; use the async method: aevaluate, aprovide or acheck"
    )

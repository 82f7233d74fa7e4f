"""The run that judges look at: what it has left for them, and how one of them is called.

Each judge is called under a time limit by the run's clock. Its evaluations are made in a chain below the
run's containment. What it is handed has no way up: a token and a containment of its own, which stop when the
run stops, and nothing that the judge does to them reaches the run. What it does ends as an answer, a silence
or a failure. Three things are not the judge's and pass through: the run's cancellation by its token, the
task's cancellation, and a person's interrupt.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel

from treenail import telemetry
from treenail.children import stopped_by
from treenail.clock import Clock
from treenail.containment import CancellationToken, ExecutionContext, describe
from treenail.conversation import get_latest_evaluation_id
from treenail.errors import (
    BudgetExceededError,
    CancelledByToken,
    DeadlineExceededError,
    NestedEvaluationError,
    UsageError,
)
from treenail.judges.budgets import LentBudgetTracker, refuse_exhausted
from treenail.judges.context import JudgeScope, NestedExecutionConfig, PromptView, current_scope, scoped
from treenail.judges.evaluator import JudgeAdapter, is_being_cancelled
from treenail.judges.events import JudgeEvent, JudgeKind, JudgeOutcome, shortened
from treenail.prompt import Prompt
from treenail.providers import ProviderAdapter
from treenail.state import BudgetTracker, Deadline, RunContext, Session
from treenail.tools import cancellations, heed_cancellations
from treenail.workspace import Filesystem

_logger = logging.getLogger("treenail.judges")

T = TypeVar("T")

_GRACE: Final = timedelta(seconds=1)
"""What a judge may take beyond its time, so that its nested evaluation can report the timeout itself."""


@dataclass(slots=True)
class Asked(Generic[T]):
    """The outcome of calling a judge: an answer or an error."""

    answer: T | None = None
    error: BaseException | None = None
    elapsed_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class JudgedRun:
    """One evaluation of a prompt, as its judges are told about it."""

    prompt: Prompt[Any]
    session: Session
    adapter: ProviderAdapter | None = None
    containment: ExecutionContext | None = None
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    run_context: RunContext | None = None
    filesystem: Filesystem | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    task: str = ""
    given_evaluation_id: str = ""
    config: NestedExecutionConfig = field(init=False)

    def __post_init__(self) -> None:
        config = self.prompt.nested_execution_config
        if config is not None and not isinstance(config, NestedExecutionConfig):
            raise UsageError(
                f"nested_execution_config of the prompt {self.prompt.name!r} is a "
                f"{type(config).__qualname__}; use NestedExecutionConfig(...)"
            )
        self.config = config or NestedExecutionConfig()
        self.adapter = self.config.adapter or self.adapter

    @property
    def clock(self) -> Clock:
        """The session's clock."""
        return self.session.clock

    @property
    def evaluation_id(self) -> str:
        """The id of the evaluation that is judged."""
        return self.given_evaluation_id or get_latest_evaluation_id(self.session) or ""

    def context_fields(self, token: CancellationToken) -> dict[str, Any]:
        """Return the fields that the contexts of all judges have in common. None of them leads to the run."""
        tracker, scope, config = self.budget_tracker, current_scope(), self.config
        adapter = None if self.adapter is None else JudgeAdapter(self.adapter, scope)
        return {
            "session": self.session,
            "prompt": PromptView(self.prompt),
            "deadline": self.deadline,
            "adapter": adapter,
            "run_context": self.run_context,
            "filesystem": self.filesystem,
            "budget_tracker": None if tracker is None else LentBudgetTracker(tracker),
            "containment": scope.own,
            "cancellation": token,
            "config": config if config.adapter is None else replace(config, adapter=adapter),
            "task": self.task,
        }

    # .. what the run has left ..

    def nothing_left(self) -> tuple[str, str] | None:
        """Return what the run has run out of, as a word and a sentence; None if it can afford a judge."""
        if self.deadline is not None and self.deadline.passed():
            return "deadline", "the run's deadline has passed"
        if self.budget_tracker is not None:
            try:
                refuse_exhausted(self.budget_tracker)
            except BudgetExceededError as error:
                return ("deadline" if error.exceeded_dimension == "deadline" else "budget"), str(error)
        if self.containment is not None:
            if self.containment.remaining_s == 0:
                return "deadline", "the time of the run's limits is over"
            if self.containment.remaining_usd == 0:
                return "budget", "the money of the run's limits is spent"
            most = self.containment.config.max_steps
            if most is not None and self.containment.get_snapshot().step_count >= most:
                return "budget", f"the {most} steps of the run's limits are used"
        return None

    def sort(self, error: BaseException) -> tuple[JudgeOutcome, str, str]:
        """Return what a judge's error means: skipped (the run had nothing left) or failed, reason, detail."""
        detail = describe(error)
        if isinstance(error, DeadlineExceededError | BudgetExceededError):
            left = self.nothing_left()
            if left is not None:
                return "skipped", left[0], detail
            return "failed", "timeout" if isinstance(error, DeadlineExceededError) else "budget", detail
        if isinstance(error, NestedEvaluationError):
            return "failed", error.kind, str(error)
        return "failed", "configuration" if isinstance(error, UsageError) else "crashed", detail

    def record_silence(
        self,
        judge: str,
        kind: JudgeKind,
        outcome: JudgeOutcome,
        reason: str,
        detail: str,
        *,
        failed_closed: bool,
        call_index: int,
        elapsed_ms: float,
    ) -> None:
        """Record that a judge gave no answer, in the run's log and, unless it was silent, as a log line."""
        silence = JudgeEvent(
            judge=judge,
            kind=kind,
            outcome=outcome,
            reason=reason,
            detail=shortened(detail, 2_000),
            failed_closed=failed_closed,
            prompt_name=self.prompt.name,
            evaluation_id=self.evaluation_id,
            call_index=call_index,
            created_at=self.clock.now(),
            elapsed_ms=elapsed_ms,
        )
        if outcome != "silent":
            about = {f"judge_{name}": getattr(silence, name) for name in ("kind", "outcome", "reason")}
            _logger.log(
                logging.INFO if kind == "feedback" and outcome == "skipped" else logging.WARNING,
                "the %s judge %s %s (%s): %s",
                kind,
                judge,
                "failed" if outcome == "failed" else "was skipped",
                reason,
                detail,
                extra={
                    **about,
                    "judge": judge,
                    "judge_elapsed_ms": round(elapsed_ms, 3),
                    "judged_session_id": str(self.session.session_id),
                    "prompt_name": self.prompt.name,
                },
            )
        self.session.dispatch(silence)

    # .. calling a judge ..

    async def call(
        self,
        name: str,
        kind: JudgeKind,
        time_limit: timedelta | None,
        work: Callable[[CancellationToken], Awaitable[T]],
        label: Callable[[T], str],
    ) -> Asked[T]:
        """Call a judge, and measure it. Raises only what is the run's own; see the module's text."""
        about = {"gen_ai__evaluation__name": name, "treenail__judge__kind": kind}
        with telemetry.span(f"judge {name}", **about) as span:
            asked = await self._call(name, kind, time_limit, work)
            failed = None if asked.error is None else type(asked.error).__qualname__
            found = None if asked.answer is None else label(asked.answer)
            if failed is not None:
                span.fail(failed)
            span.set("gen_ai.evaluation.score.label", found)
        telemetry.record(
            "treenail.judgements", 1, **about, gen_ai__evaluation__score__label=found, error__type=failed
        )
        telemetry.record("treenail.judge.duration", asked.elapsed_ms / 1000, **about, error__type=failed)
        return asked

    async def _call(
        self,
        name: str,
        kind: JudgeKind,
        time_limit: timedelta | None,
        work: Callable[[CancellationToken], Awaitable[T]],
    ) -> Asked[T]:
        limit_s = self._limit_s(time_limit)
        token = CancellationToken()
        chain = None if self.containment is None else self.containment.spawn_child(onlooker=True)
        scope = self._scope(name, kind, chain, token)
        began = self.clock.monotonic()
        before = cancellations()
        asked: Asked[T] = Asked()
        try:
            with (
                self._stopping(token, scope.own),
                scoped(scope),
                stopped_by(self.clock, limit_s, token) as limit,
            ):
                asked.answer = await work(token)
            # The run's own token first: those below it, which stopped the judge, follow a moment later.
            self.cancellation.raise_if_cancelled()
            heed_cancellations(before)
            if limit.cancel_called:
                # An answer that comes too late does not count.
                asked.answer = None
                asked.error = DeadlineExceededError(f"{name} did not answer within {limit_s:.3g} s")
        except BaseException as error:
            if self._is_the_runs(error):
                raise
            heed_cancellations(before)
            asked.error = error
        finally:
            # A judge that still runs on a thread learns that nothing waits for it.
            over = f"the time of the judge {name} is over"
            token.cancel("timeout", detail=over)
            if chain is not None and scope.own is not None:
                scope.own.abort(over)
                scope.own.close()
                chain.close()
            if scope.evaluations:
                self.session.dispatch_all(scope.evaluations)
        asked.elapsed_ms = (self.clock.monotonic() - began) * 1000
        return asked

    @contextmanager
    def _stopping(self, token: CancellationToken, own: ExecutionContext | None) -> Iterator[None]:
        """Let what a judge is handed stop when the run stops. It does not know the run; the run knows it."""
        run = self.cancellation
        with ExitStack() as stack:
            stack.callback(run.on_cancel(lambda: token.cancel(run.reason or "aborted", detail=run.detail)))
            if own is not None:
                stop = partial(own.abort, "the run was stopped")
                stack.callback(run.on_cancel(stop))
                assert self.containment is not None
                stack.callback(self.containment.cancellation_token.on_cancel(stop))
            yield

    def _limit_s(self, time_limit: timedelta | None) -> float:
        own = max(time_limit or timedelta(0), self.config.max_nested_duration) + _GRACE
        limits = [own.total_seconds()]
        if self.deadline is not None:
            limits.append(max(self.deadline.remaining().total_seconds(), 0.0))
        left_s = None if self.containment is None else self.containment.remaining_s
        if left_s is not None:
            limits.append(left_s)
        return min(limits)

    def _scope(
        self, name: str, kind: JudgeKind, chain: ExecutionContext | None, token: CancellationToken
    ) -> JudgeScope:
        shares = self.config.share_budget
        if shares is None:
            shares = kind == "completion"
        return JudgeScope(
            judge=name,
            deadline=self.deadline,
            budget_tracker=self.budget_tracker if shares else None,
            run_context=self.run_context,
            filesystem=None if self.filesystem is None else self.filesystem.read_only_view(),
            workspace=self.filesystem,
            containment=chain,
            own=None if chain is None else chain.apart(),
            cancellation=token,
            config=self.config,
            loop=anyio.lowlevel.current_token(),
        )

    def _is_the_runs(self, error: BaseException) -> bool:
        if isinstance(error, KeyboardInterrupt):
            return True
        if isinstance(error, CancelledByToken):
            return self.cancellation.is_cancelled
        return isinstance(error, anyio.get_cancelled_exc_class()) and is_being_cancelled()

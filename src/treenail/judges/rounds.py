"""The judges of one evaluation, as the loop asks them: after tools, and before it may stop.

Theory of operation
-------------------
`after_tools()` asks the feedback providers that are due and returns what they say as text for the next input.
The loop puts it behind the tool results as a message of its own, so that everything sent before stays a
prefix of what is sent next. `before_stop()` asks the completion checker and returns None if the run may stop,
or what is missing, which goes back to the model.

Nothing is remembered here that the session's log does not know. How often a provider was asked, which file
has woken it, how often the evaluation was refused: all of it is read from events, so that a resumed run goes
on counting. What a round decided, and the message by which the model hears of it, are one append if the loop
passes `record`.

Judges are asked one after the other, each on a leash: a time limit by the run's clock, a cancellation token
of its own below the run's, and for plain functions a worker thread that can be left behind. Whatever a judge
does is sorted into an answer, a silence or a failure. Three things are not the judge's and pass through: the
cancellation of the run by its token, that of the task, and a person's interrupt.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar, cast

import anyio
import anyio.lowlevel

from treenail import telemetry
from treenail.clock import Clock
from treenail.containment import CancellationToken, ExecutionContext
from treenail.containment.dispatch import is_async
from treenail.containment.threads import call_later, describe, threadsafe
from treenail.conversation.messages import get_latest_evaluation_id
from treenail.errors import (
    BudgetExceededError,
    CancelledByToken,
    DeadlineExceededError,
    NestedEvaluationError,
    UsageError,
)
from treenail.judges.asking import on_worker
from treenail.judges.completion import (
    TaskCompletionChecker,
    TaskCompletionContext,
    TaskCompletionResult,
    ask,
    name_of_checker,
)
from treenail.judges.context import NestedExecutionConfig, Scope, current_scope, scoped
from treenail.judges.evaluator import LentBudgetTracker, is_being_cancelled, refuse_exhausted
from treenail.judges.events import (
    CompletionChecked,
    Feedback,
    FileTriggerFired,
    JudgeEvent,
    JudgeKind,
    NestedEvaluated,
    NestedUsage,
    block,
    shortened,
)
from treenail.judges.feedback import FeedbackContext, FeedbackProvider, FeedbackProviderConfig, placed
from treenail.prompt.template import Prompt
from treenail.providers.adapter import ProviderAdapter
from treenail.state.budget import BudgetTracker, Deadline, TokenUsage
from treenail.state.run_context import RunContext
from treenail.state.session import Session
from treenail.state.slices import entry_at, opened
from treenail.state.views import SessionProtocol
from treenail.tools.events import ToolInvoked
from treenail.tools.gate import cancellations, heed_cancellations
from treenail.workspace.base import Filesystem

_logger = logging.getLogger("treenail.judges")

T = TypeVar("T")

Record = Callable[[str], Sequence[object]]
"""Makes the events by which the model hears of a text: they are appended together with the judgement."""

_GRACE: Final = timedelta(seconds=1)
"""What a judge may take beyond its time, so that its own nested evaluation can say that its time is over."""

_MAX_REFUSAL_CHARS: Final = 20_000

_DEFAULT_CONFIG: Final = NestedExecutionConfig()


class Judges:
    """Everybody who judges one evaluation: the prompt's feedback providers and its completion checker.

    After a refusal, `exhausted` says whether it was the last one that the configuration allows: then
    the turn ends as incomplete, with `last_reason`. Refusals are counted from the log: those of the
    evaluation that stand behind the place `refusals_after`, so that whoever takes up a turn that ended
    incomplete can give it another round.
    """

    def __init__(
        self,
        *,
        prompt: Prompt[Any],
        session: Session,
        adapter: ProviderAdapter | None = None,
        containment: ExecutionContext | None = None,
        deadline: Deadline | None = None,
        budget_tracker: BudgetTracker | None = None,
        run_context: RunContext | None = None,
        filesystem: Filesystem | None = None,
        cancellation: CancellationToken | None = None,
        clock: Clock | None = None,
        task: str = "",
        evaluation_id: str = "",
        refusals_after: int = 0,
    ) -> None:
        config = prompt.nested_execution_config
        if config is not None and not isinstance(config, NestedExecutionConfig):
            raise UsageError(
                f"nested_execution_config of the prompt {prompt.name!r} is a {type(config).__qualname__}; "
                "use NestedExecutionConfig(...)"
            )
        self.config: Final = config or _DEFAULT_CONFIG
        self.exhausted = False
        """Whether the last refusal was one too many, or the work cannot be verified and must be."""
        self.last_reason = ""
        """Why the run was last not allowed to stop."""
        self._prompt = prompt
        self._session = session
        self._adapter = self.config.adapter or adapter
        self._containment = containment
        self._deadline = deadline
        self._tracker = budget_tracker
        self._run_context = run_context
        self._workspace = filesystem
        self._cancellation = cancellation or CancellationToken()
        self._clock = clock or session.clock
        self._task = task
        self._evaluation_id = evaluation_id
        self._refusals_after = refusals_after
        self._providers = _named(cast("tuple[FeedbackProviderConfig, ...]", prompt.feedback_providers))
        self._checker = cast("TaskCompletionChecker | None", prompt.task_completion_checker)
        self._seen = 0
        self._calls: list[int] = []

    @property
    def has_feedback(self) -> bool:
        """Whether anybody looks at the work while it goes on."""
        return bool(self._providers)

    @property
    def has_completion(self) -> bool:
        """Whether anybody is asked before the run may stop."""
        return self._checker is not None

    # .. while the work goes on ..

    async def after_tools(self, record: Record | None = None) -> str | None:
        """Ask the feedback providers that are due. Returns what the model is to be told, or None.

        The text goes behind the tool results, as a message of its own. With `record`, the events that it
        makes of the text are appended together with the feedback; without, the caller records it.
        Raises `NestedEvaluationError` only if a provider failed and feedback fails closed.
        """
        if not self._providers:
            return None
        due = self._due()
        if not due:
            return None
        self._cancellation.raise_if_cancelled()
        nothing_left = self._nothing_left()
        given: list[Feedback] = []
        for each in due:
            if nothing_left is not None:
                self._note(each, "skipped", *nothing_left)
                continue
            feedback = await self._ask_provider(each)
            if feedback is not None:
                given.append(feedback)
        if not given:
            return None
        text = "\n\n".join(each.render() for each in given)
        self._session.dispatch_all((*given, *(() if record is None else record(text))))
        return text

    def _due(self) -> list[_Provider]:
        """Return the providers whose triggers fire, all judged at the same moment."""
        self._count_calls()
        now = self._clock.now()
        asked = self._last_asked()
        due: list[_Provider] = []
        for each in self._providers:
            place, last = asked.get(each.name, (0, None))
            since = len(self._calls) - bisect_right(self._calls, place)
            trigger = each.config.trigger
            file = self._waking_file(each)
            if file is not None or trigger.is_due(calls=since, last=last, now=now):
                due.append(replace(each, woken_by=file))
        return due

    def _count_calls(self) -> int:
        """Count the prompt's tool calls by their places in the log; only the new ones are looked at."""
        calls = self._session[ToolInvoked].view()
        if not len(calls):
            self._calls.clear()
            return 0
        new: list[int] = []
        for index in range(len(calls) - 1, -1, -1):
            kept, place = entry_at(calls, index)
            if abs(place) <= self._seen:
                break
            if opened(kept).prompt_name == self._prompt.name:
                new.append(abs(place))
        self._calls.extend(reversed(new))
        self._seen = abs(entry_at(calls, -1)[1])
        # What a prune has forgotten no longer counts, here as in a process that opens the session anew.
        del self._calls[: bisect_left(self._calls, abs(entry_at(calls, 0)[1]))]
        return len(self._calls)

    def _last_asked(self) -> dict[str, tuple[int, datetime | None]]:
        """Return when each provider was asked last: its place in the log, and the time."""
        name = self._prompt.name
        asked: dict[str, tuple[int, datetime | None]] = {}
        # An attempt that came to nothing counts, too: or a judge that is down would be asked at every call.
        attempts = [
            *(
                (place, each.judge, each.created_at)
                for each, place in placed(self._session, JudgeEvent)
                if each.kind == "feedback" and each.prompt_name == name
            ),
            *(
                (place, each.provider_name, each.timestamp)
                for each, place in placed(self._session, Feedback)
                if each.prompt_name == name
            ),
        ]
        for place, judge, moment in sorted(attempts, key=itemgetter(0)):
            asked[judge] = (place, moment)
        return asked

    def _waking_file(self, provider: _Provider) -> str | None:
        wanted = provider.config.trigger.on_file_created
        if wanted is None or self._workspace is None:
            return None
        fired = self._session[FileTriggerFired].all()
        mark = FileTriggerFired(provider.name, self._prompt.name, wanted)
        try:
            return wanted if mark not in fired and self._workspace.exists(wanted) else None
        except (OSError, ValueError):
            return None

    async def _ask_provider(self, judge: _Provider) -> Feedback | None:
        provider = judge.config.provider

        async def work(token: CancellationToken) -> tuple[bool, Feedback | None]:
            context = self._feedback_context(token)
            if not await on_worker(lambda: provider.should_run(context=context)):
                return False, None
            answer = await _provided(provider, context)
            if answer is not None and not isinstance(answer, Feedback):
                raise UsageError(f"{judge.name}.provide returned {answer!r:.200}; return a Feedback or None")
            return True, answer

        asked = await self._on_a_leash(judge.name, "feedback", getattr(provider, "time_limit", None), work)
        if asked.error is not None:
            reason, detail, is_skipped = self._sorted(asked.error)
            self._note(judge, "skipped" if is_skipped else "failed", reason, detail, asked.elapsed_ms)
            if self.config.on_feedback_failure == "closed":
                raise NestedEvaluationError(
                    f"the run must not go on without the feedback of {judge.name}, which failed: {detail}",
                    prompt_name=self._prompt.name,
                    kind=reason,
                ) from asked.error
            return None
        assert asked.answer is not None
        has_run, feedback = asked.answer
        if not has_run:
            return None
        if feedback is None:
            self._note(judge, "silent", "nothing_to_say", "", asked.elapsed_ms)
            return None
        self._woken(judge)
        return replace(
            feedback.shortened(),
            provider_name=judge.name,
            prompt_name=self._prompt.name,
            call_index=len(self._calls),
            timestamp=self._clock.now(),
        )

    def _note(
        self, judge: _Provider, outcome: Any, reason: str, detail: str = "", elapsed_ms: float = 0.0
    ) -> None:
        """Record that a provider that was due said nothing."""
        closed = self.config.on_feedback_failure == "closed" and outcome == "failed"
        if outcome != "silent":
            _logger.log(
                logging.WARNING if outcome == "failed" else logging.INFO,
                "the feedback provider %s %s (%s): %s",
                judge.name,
                "failed" if outcome == "failed" else "was skipped",
                reason,
                detail,
                extra=self._fields(judge.name, "feedback", outcome, reason, elapsed_ms),
            )
        if outcome != "skipped":
            self._woken(judge)
        self._session.dispatch(
            JudgeEvent(
                judge=judge.name,
                kind="feedback",
                outcome=outcome,
                reason=reason,
                detail=shortened(detail, 2_000),
                failed_closed=closed,
                prompt_name=self._prompt.name,
                evaluation_id=self._evaluation(),
                call_index=len(self._calls),
                created_at=self._clock.now(),
                elapsed_ms=elapsed_ms,
            )
        )

    def _woken(self, judge: _Provider) -> None:
        if judge.woken_by is not None:
            self._session.dispatch(FileTriggerFired(judge.name, self._prompt.name, judge.woken_by))

    def _feedback_context(self, token: CancellationToken) -> FeedbackContext:
        return FeedbackContext(
            session=self._session,
            prompt=self._prompt,
            deadline=self._deadline,
            adapter=self._adapter,
            run_context=self._run_context,
            filesystem=self._workspace,
            budget_tracker=None if self._tracker is None else LentBudgetTracker(self._tracker),
            containment=current_scope().containment,
            cancellation=token,
            config=self.config,
            task=self._task,
        )

    # .. before it may stop ..

    async def before_stop(
        self, text: str, output: object | None, stop_reason: str, record: Record | None = None
    ) -> str | None:
        """Ask whether the run may stop. Returns None if it may, else what the model is to be told.

        Look at `exhausted` first: if it is set, the turn ends as incomplete with `last_reason`, and the
        text is not sent. With `record`, the events that it makes of the text are appended together with
        the verdict, unless the turn ends.
        """
        checker = self._checker
        self.exhausted = False
        if checker is None:
            return None
        self._cancellation.raise_if_cancelled()
        name = name_of_checker(checker)
        is_closed = self.config.on_completion_failure == "closed"
        nothing_left = self._nothing_left()
        if nothing_left is not None:
            reason, detail = nothing_left
            self._unverified(name, "skipped", reason, detail, is_closed=is_closed)
            if not is_closed:
                self._checked(name, TaskCompletionResult.ok(f"not verified: {detail}"), stop_reason, False)
                return None
            return self._refuse(
                name, f"The work could not be verified: {detail}", stop_reason, False, 0, None
            )

        async def work(token: CancellationToken) -> TaskCompletionResult:
            return await ask(checker, self._completion_context(text, output, stop_reason, token))

        asked = await self._on_a_leash(name, "completion", getattr(checker, "time_limit", None), work)
        if asked.error is not None:
            reason, detail, is_skipped = self._sorted(asked.error)
            outcome = "skipped" if is_skipped else "failed"
            self._unverified(name, outcome, reason, detail, is_closed=is_closed, elapsed_ms=asked.elapsed_ms)
            if not is_closed:
                answer = TaskCompletionResult.ok(f"not verified: {detail}")
                self._checked(name, answer, stop_reason, False, asked.elapsed_ms)
                return None
            why = (
                f"The work could not be verified ({reason}): {detail}\n"
                "Make sure that it is complete, and say again that it is done."
            )
            return self._refuse(name, why, stop_reason, False, asked.elapsed_ms, record)
        assert asked.answer is not None
        if asked.answer.complete:
            self._checked(name, asked.answer, stop_reason, True, asked.elapsed_ms)
            return None
        why = asked.answer.feedback or f"{name} says that the work is not complete, and not why."
        return self._refuse(name, why, stop_reason, True, asked.elapsed_ms, record)

    def _refuse(
        self, name: str, why: str, stop_reason: str, verified: bool, elapsed_ms: float, record: Record | None
    ) -> str:
        """Record a refusal, and return what the model is to be told of it."""
        attempt = self._refusals() + 1
        most = self.config.max_completion_checks
        why = shortened(why, _MAX_REFUSAL_CHARS)
        self.last_reason = why
        self.exhausted = attempt >= most or (not verified and self._nothing_left() is not None)
        text = block(
            "completion_check",
            f"The work is not complete, so you cannot stop yet:\n{why}",
            checker=name,
            attempt=f"{attempt} of {most}",
        )
        beside = () if record is None or self.exhausted else record(text)
        answer = TaskCompletionResult.incomplete(why)
        checked = self._as_checked(name, answer, stop_reason, verified, elapsed_ms, attempt)
        self._session.dispatch_all((checked, *beside))
        return text

    def _checked(
        self,
        name: str,
        answer: TaskCompletionResult,
        stop_reason: str,
        verified: bool,
        elapsed_ms: float = 0.0,
    ) -> None:
        attempt = self._refusals() + 1
        self._session.dispatch(self._as_checked(name, answer, stop_reason, verified, elapsed_ms, attempt))

    def _as_checked(
        self,
        name: str,
        answer: TaskCompletionResult,
        stop_reason: str,
        verified: bool,
        elapsed_ms: float,
        attempt: int,
    ) -> CompletionChecked:
        return CompletionChecked(
            checker=name,
            complete=answer.complete,
            feedback=shortened(answer.feedback or "", _MAX_REFUSAL_CHARS),
            attempt=attempt,
            verified=verified,
            evaluation_id=self._evaluation(),
            prompt_name=self._prompt.name,
            stop_reason=stop_reason,
            created_at=self._clock.now(),
            elapsed_ms=elapsed_ms,
        )

    def _unverified(
        self,
        name: str,
        outcome: Any,
        reason: str,
        detail: str,
        *,
        is_closed: bool,
        elapsed_ms: float = 0.0,
    ) -> None:
        _logger.warning(
            "the completion check %s was %s (%s): %s",
            name,
            outcome,
            reason,
            detail,
            extra=self._fields(name, "completion", outcome, reason, elapsed_ms),
        )
        self._session.dispatch(
            JudgeEvent(
                judge=name,
                kind="completion",
                outcome=outcome,
                reason=reason,
                detail=shortened(detail, 2_000),
                failed_closed=is_closed,
                prompt_name=self._prompt.name,
                evaluation_id=self._evaluation(),
                call_index=self._count_calls(),
                created_at=self._clock.now(),
                elapsed_ms=elapsed_ms,
            )
        )

    def _fields(
        self, name: str, kind: str, outcome: str, reason: str, elapsed_ms: float
    ) -> dict[str, object]:
        """Return what a log line about a judge carries for machines."""
        return {
            "judge": name,
            "judge_kind": kind,
            "judge_outcome": outcome,
            "judge_reason": reason,
            "judge_elapsed_ms": round(elapsed_ms, 3),
            "judged_session_id": str(self._session.session_id),
            "prompt_name": self._prompt.name,
        }

    def _refusals(self) -> int:
        """Count how often this evaluation was refused in this round, in this process and those before it."""
        mine = (self._evaluation(), self._prompt.name)
        return sum(
            place > self._refusals_after
            and not each.complete
            and (each.evaluation_id, each.prompt_name) == mine
            for each, place in placed(self._session, CompletionChecked)
        )

    def _evaluation(self) -> str:
        return self._evaluation_id or get_latest_evaluation_id(self._session) or ""

    def _completion_context(
        self, text: str, output: object | None, stop_reason: str, token: CancellationToken
    ) -> TaskCompletionContext:
        return TaskCompletionContext(
            session=self._session,
            tentative_output=text if output is None else output,
            filesystem=self._workspace,
            adapter=self._adapter,
            stop_reason=stop_reason,
            prompt=self._prompt,
            deadline=self._deadline,
            run_context=self._run_context,
            budget_tracker=None if self._tracker is None else LentBudgetTracker(self._tracker),
            containment=current_scope().containment,
            cancellation=token,
            config=self.config,
            task=self._task,
            text=text,
        )

    # .. the leash ..

    async def _on_a_leash(
        self,
        name: str,
        kind: JudgeKind,
        time_limit: timedelta | None,
        work: Callable[[CancellationToken], Awaitable[T]],
    ) -> _Asked[T]:
        about = {"gen_ai__evaluation__name": name, "treenail__judge__kind": kind}
        with telemetry.span(f"judge {name}", **about) as span:
            asked = await self._until_it_answers(name, kind, time_limit, work)
            failed = None if asked.error is None else type(asked.error).__qualname__
            label = None if asked.error is not None else _label(asked.answer)
            if failed is not None:
                span.fail(failed)
            span.set("gen_ai.evaluation.score.label", label)
        if telemetry.is_on():
            telemetry.record(
                "treenail.judgements", 1, **about, gen_ai__evaluation__score__label=label, error__type=failed
            )
            telemetry.record("treenail.judge.duration", asked.elapsed_ms / 1000, **about, error__type=failed)
        return asked

    async def _until_it_answers(
        self,
        name: str,
        kind: JudgeKind,
        time_limit: timedelta | None,
        work: Callable[[CancellationToken], Awaitable[T]],
    ) -> _Asked[T]:
        """Let a judge work until it answers, fails or runs out of time. Only what is the run's is raised."""
        own = max(time_limit or timedelta(0), self.config.max_nested_duration) + _GRACE
        limit_s = own.total_seconds()
        if self._deadline is not None:
            limit_s = max(min(limit_s, self._deadline.remaining().total_seconds()), 0.0)
        left_s = None if self._containment is None else self._containment.remaining_s
        if left_s is not None:
            limit_s = min(limit_s, left_s)
        token = CancellationToken(self._cancellation)
        # A judge is handed a chain of its own: what it does to that, it does not do to the run.
        chain = None if self._containment is None else self._containment.spawn_child(onlooker=True)
        scope = Scope(
            judge=name,
            deadline=self._deadline,
            budget_tracker=self._tracker if self._shares(kind) else None,
            run_context=self._run_context,
            filesystem=None if self._workspace is None else self._workspace.read_only_view(),
            workspace=self._workspace,
            containment=chain,
            cancellation=token,
            config=self.config,
            loop=anyio.lowlevel.current_token(),
        )
        began = self._clock.monotonic()
        before = cancellations()
        asked: _Asked[T] = _Asked()
        try:
            with anyio.CancelScope() as limit, scoped(scope):
                stop = threadsafe(limit.cancel)
                timer = call_later(self._clock, limit_s, stop)
                forget = token.on_cancel(stop)
                try:
                    asked.answer = await work(token)
                finally:
                    forget()
                    timer.cancel()
            # The run's own token first: those below it, which cut the judge off, follow a moment later.
            self._cancellation.raise_if_cancelled()
            heed_cancellations(before)
            if limit.cancel_called:
                # Also if it answered after all: what comes too late does not count.
                asked.answer = None
                asked.error = DeadlineExceededError(f"{name} did not answer within {limit_s:.3g} s")
        except BaseException as error:
            if self._is_the_runs(error):
                raise
            heed_cancellations(before)
            asked.error = error
        finally:
            # Whoever was left behind hears that nobody waits any more.
            token.cancel("timeout", detail=f"the time of the judge {name} is over")
            token.unlink()
            if chain is not None:
                chain.close()
            if scope.evaluations:
                self._session.dispatch_all(scope.evaluations)
        asked.elapsed_ms = (self._clock.monotonic() - began) * 1000
        return asked

    def _shares(self, kind: JudgeKind) -> bool:
        said = self.config.share_budget
        return kind == "completion" if said is None else said

    def _is_the_runs(self, error: BaseException) -> bool:
        if isinstance(error, KeyboardInterrupt):
            return True
        if isinstance(error, CancelledByToken):
            return self._cancellation.is_cancelled
        return isinstance(error, anyio.get_cancelled_exc_class()) and is_being_cancelled()

    def _nothing_left(self) -> tuple[str, str] | None:
        """Say what the run has run out of, in a word and in a sentence; None if it can afford a judge."""
        if self._deadline is not None and self._deadline.passed():
            return "deadline", "the run's deadline has passed"
        if self._tracker is not None:
            try:
                refuse_exhausted(self._tracker)
            except BudgetExceededError as error:
                return ("deadline" if error.exceeded_dimension == "deadline" else "budget"), str(error)
        if self._containment is not None:
            if self._containment.remaining_s == 0:
                return "deadline", "the time of the run's limits is over"
            if self._containment.remaining_usd == 0:
                return "budget", "the money of the run's limits is spent"
            most = self._containment.config.max_steps
            if most is not None and self._containment.get_snapshot().step_count >= most:
                return "budget", f"the {most} steps of the run's limits are used"
        return None

    def _sorted(self, error: BaseException) -> tuple[str, str, bool]:
        """Return a failure's reason in a word, its text, and whether it only means that nothing was left."""
        detail = describe(error)
        if isinstance(error, DeadlineExceededError | BudgetExceededError):
            left = self._nothing_left()
            if left is not None:
                return left[0], detail, True
            return ("timeout" if isinstance(error, DeadlineExceededError) else "budget"), detail, False
        if isinstance(error, NestedEvaluationError):
            return error.kind, str(error), False
        return ("configuration" if isinstance(error, UsageError) else "crashed"), detail, False


@dataclass(slots=True)
class _Asked(Generic[T]):
    """What came of asking a judge."""

    answer: T | None = None
    error: BaseException | None = None
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Provider:
    """A feedback provider under the name that it is counted by."""

    name: str
    config: FeedbackProviderConfig
    woken_by: str | None = None


def _label(answer: object) -> str | None:
    """Return what a judge found, in a word, for whoever counts."""
    if isinstance(answer, TaskCompletionResult):
        return "complete" if answer.complete else "incomplete"
    if not isinstance(answer, tuple):
        return None
    has_run, feedback = answer
    if isinstance(feedback, Feedback):
        return feedback.severity
    return "silent" if has_run else "not_due"


def _named(configs: Sequence[FeedbackProviderConfig]) -> tuple[_Provider, ...]:
    """Give every provider a name of its own: two of one name would share their counters."""
    taken: dict[str, int] = {}
    named = []
    for each in configs:
        name = str(each.provider.name)
        taken[name] = taken.get(name, 0) + 1
        named.append(_Provider(name if taken[name] == 1 else f"{name}#{taken[name]}", each))
    return tuple(named)


async def _provided(provider: FeedbackProvider, context: FeedbackContext) -> object:
    """Ask a provider in whichever way it answers."""
    aprovide = getattr(provider, "aprovide", None)
    if aprovide is not None:
        return await aprovide(context=context)
    if is_async(cast("Callable[[], object]", provider.provide)):
        return await cast("Awaitable[object]", provider.provide(context=context))
    answer: object = await on_worker(lambda: provider.provide(context=context))
    return await answer if inspect.isawaitable(answer) else answer


def nested_usage(session: SessionProtocol) -> NestedUsage:
    """Return what the judges of a run have used, apart from the run's own use."""
    done = session[NestedEvaluated].all()
    used: dict[bool, TokenUsage] = {True: TokenUsage(), False: TokenUsage()}
    for each in done:
        used[each.budget == "shared"] += each.usage or TokenUsage()
    return NestedUsage(
        shared=used[True],
        own=used[False],
        cost_usd=sum(each.cost_usd or 0.0 for each in done),
        evaluations=done,
    )

"""Judges that ask a model: how the work goes, and whether it is done.

Both are frames around one nested evaluation. What they cannot find out they raise: whether the run goes on
then is for `NestedExecutionConfig` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from treenail.errors import NestedEvaluationError
from treenail.judges.completion import TaskCompletionContext, TaskCompletionResult
from treenail.judges.context import MAX_NESTED_DURATION, NestedEvaluationResult
from treenail.judges.evaluator import NestedEvaluator
from treenail.judges.events import Feedback, Observation
from treenail.judges.feedback import FeedbackContext
from treenail.judges.prompts import (
    CompletionVerdict,
    TrajectoryAssessment,
    completion_prompt,
    fill,
    quoted,
    shown_calls,
    shown_files,
    shown_output,
    shown_plan,
    trajectory_prompt,
)
from treenail.prompt.template import Prompt
from treenail.providers.adapter import ProviderAdapter
from treenail.state.budget import Budget, BudgetTracker

T = TypeVar("T")

DEFAULT_JUDGE_TOKENS = 16_000
"""What one judgement by a model may use at most, if it has a budget of its own."""


def _own_budget() -> Budget:
    return Budget(max_total_tokens=DEFAULT_JUDGE_TOKENS)


@dataclass(frozen=True)
class LLMTrajectoryFeedback:
    """Lets a model judge the latest tool calls, and tells the agent what it found.

    It needs an adapter: its own, or the run's. With `quiet_when_on_track` it says nothing while all
    goes well.
    """

    adapter: ProviderAdapter | None = None
    evaluation_prompt: Prompt[TrajectoryAssessment] = field(default_factory=trajectory_prompt)
    min_tool_calls: int = 5
    """How many calls there must be before there is anything to judge."""
    shown_tool_calls: int = 12
    """How many of the latest calls the model is shown."""
    budget: Budget | None = field(default_factory=_own_budget)
    """What one judgement may use. None: it draws on the run's own budget."""
    max_duration: timedelta = MAX_NESTED_DURATION
    quiet_when_on_track: bool = True
    name: str = "LLMTrajectoryFeedback"

    @property
    def time_limit(self) -> timedelta:
        """How long it may take."""
        return self.max_duration

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether there are enough calls to judge."""
        return context.tool_call_count >= self.min_tool_calls

    def provide(self, *, context: FeedbackContext) -> Feedback | None:
        """Ask the model. Not for use inside an event loop: `aprovide` is."""
        evaluator, tracker = self._prepared(context)
        return self._as_feedback(answer_of(evaluator.evaluate(budget_tracker=tracker)))

    async def aprovide(self, *, context: FeedbackContext) -> Feedback | None:
        """Ask the model."""
        evaluator, tracker = self._prepared(context)
        return self._as_feedback(answer_of(await evaluator.aevaluate(budget_tracker=tracker)))

    def _prepared(
        self, context: FeedbackContext
    ) -> tuple[NestedEvaluator[TrajectoryAssessment], BudgetTracker | None]:
        evidence: Mapping[str, Callable[[], str]] = {
            "task_description": lambda: shown_task(context.task),
            "current_plan": lambda: shown_plan(context.session),
            "recent_actions": lambda: shown_calls(context.recent_tool_calls(self.shown_tool_calls)),
            "files": lambda: shown_files(context.filesystem),
        }
        share = context.config.share_budget
        shares = self.budget is None if share is None else share
        evaluator = NestedEvaluator(
            needed(self.adapter or context.adapter, self.name),
            prompt=fill(self.evaluation_prompt, evidence),
            context=context.create_nested_context(budget=self.budget, max_duration=self.max_duration),
        )
        return evaluator, context.budget_tracker if shares else None

    def _as_feedback(self, assessment: TrajectoryAssessment) -> Feedback | None:
        if assessment.on_track and assessment.severity == "info" and self.quiet_when_on_track:
            return None
        return Feedback(
            provider_name=self.name,
            summary=assessment.summary,
            observations=tuple(
                Observation(each.category, each.description, each.evidence or None)
                for each in assessment.observations
            ),
            suggestions=assessment.suggestions,
            severity=assessment.severity,
        )


@dataclass(frozen=True)
class LLMCompletionVerifier:
    """Lets a model decide whether the work is done. It needs an adapter: its own, or the run's."""

    verification_prompt: Prompt[CompletionVerdict] = field(default_factory=completion_prompt)
    share_budget: bool = True
    """Whether it draws on the run's own budget; else `budget` is all that it has."""
    adapter: ProviderAdapter | None = None
    budget: Budget | None = field(default_factory=_own_budget)
    max_duration: timedelta = MAX_NESTED_DURATION
    shown_tool_calls: int = 30
    name: str = "LLMCompletionVerifier"

    @property
    def time_limit(self) -> timedelta:
        """How long it may take."""
        return self.max_duration

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Ask the model. Not for use inside an event loop: `acheck` is."""
        evaluator, tracker = self._prepared(context)
        return self._as_result(answer_of(evaluator.evaluate(budget_tracker=tracker)))

    async def acheck(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Ask the model."""
        evaluator, tracker = self._prepared(context)
        return self._as_result(answer_of(await evaluator.aevaluate(budget_tracker=tracker)))

    def _prepared(
        self, context: TaskCompletionContext
    ) -> tuple[NestedEvaluator[CompletionVerdict], BudgetTracker | None]:
        output = context.text if context.tentative_output is None else context.tentative_output
        evidence: Mapping[str, Callable[[], str]] = {
            "task_description": lambda: shown_task(context.task),
            "current_plan": lambda: shown_plan(context.session),
            "recent_actions": lambda: shown_calls(context.recent_tool_calls(self.shown_tool_calls)),
            "files": lambda: shown_files(context.filesystem),
            "tentative_output": lambda: shown_output(output),
            "stop_reason": lambda: context.stop_reason or "no reason given",
        }
        share = context.config.share_budget
        shares = self.share_budget if share is None else share
        tracker = context.budget_tracker if shares else None
        evaluator = NestedEvaluator(
            needed(self.adapter or context.adapter, self.name),
            prompt=fill(self.verification_prompt, evidence),
            # A run without a budget has none to share.
            context=context.create_nested_context(
                budget=None if tracker is not None else self.budget, max_duration=self.max_duration
            ),
        )
        return evaluator, tracker

    def _as_result(self, verdict: CompletionVerdict) -> TaskCompletionResult:
        if verdict.complete:
            return TaskCompletionResult.ok(verdict.explanation)
        missing = "".join(f"\n- {each}" for each in verdict.missing)
        return TaskCompletionResult.incomplete(verdict.explanation + missing)


def shown_task(task: str) -> str:
    """Write the task for a judge, quoted so that it ends where it ends."""
    return quoted("task", task) if task.strip() else "The task was not handed over; judge by the evidence."


def needed(adapter: ProviderAdapter | None, judge: str) -> ProviderAdapter:
    """Return an adapter, or say what is missing."""
    if adapter is None:
        raise NestedEvaluationError(
            f"{judge} has no adapter to ask a model with; give it one, or set NestedExecutionConfig.adapter",
            kind="adapter",
        )
    return adapter


def answer_of(result: NestedEvaluationResult[T]) -> T:
    """Return a judge's answer, or raise why there is none."""
    if result.error is not None:
        raise result.error
    if result.output is None:
        raise NestedEvaluationError("the judge gave no answer", kind="output")
    return result.output

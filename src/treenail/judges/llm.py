"""Judges that ask a model: whether the work is on track, and whether it is done.

Each makes one nested evaluation, and raises if that fails. What a failure means for the run is configured in
`NestedExecutionConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

from treenail.errors import NestedEvaluationError
from treenail.judges.completion import TaskCompletionContext, TaskCompletionResult
from treenail.judges.context import MAX_NESTED_DURATION, JudgeContext
from treenail.judges.evaluator import NestedEvaluator, run_blocking
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
from treenail.prompt import Prompt
from treenail.providers import ProviderAdapter
from treenail.state import Budget, BudgetTracker

T = TypeVar("T")

DEFAULT_JUDGE_TOKENS = 16_000
"""The most tokens that one judgement may use, if it has a budget of its own."""


def _own_budget() -> Budget:
    return Budget(max_total_tokens=DEFAULT_JUDGE_TOKENS)


@dataclass(frozen=True)
class LLMTrajectoryFeedback:
    """Lets a model judge the latest tool calls, and gives the agent its feedback.

    It needs an adapter: its own, or the run's. With `quiet_when_on_track` it gives no feedback while the
    work is on track.
    """

    adapter: ProviderAdapter | None = None
    evaluation_prompt: Prompt[TrajectoryAssessment] = field(default_factory=trajectory_prompt)
    min_tool_calls: int = 5
    """How many tool calls there must be before it judges."""
    shown_tool_calls: int = 12
    """How many of the latest calls the model is shown."""
    budget: Budget | None = field(default_factory=_own_budget)
    """The budget of one judgement. None: it draws on the run's own budget."""
    max_duration: timedelta = MAX_NESTED_DURATION
    quiet_when_on_track: bool = True
    name: str = "LLMTrajectoryFeedback"

    @property
    def time_limit(self) -> timedelta:
        """How long it may take."""
        return self.max_duration

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether there are enough tool calls to judge."""
        return context.tool_call_count >= self.min_tool_calls

    def provide(self, *, context: FeedbackContext) -> Feedback | None:
        """Ask the model. Inside an event loop, use `aprovide`."""
        return run_blocking(partial(self.aprovide, context=context))

    async def aprovide(self, *, context: FeedbackContext) -> Feedback | None:
        """Ask the model."""
        share = context.config.share_budget
        shares = self.budget is None if share is None else share
        evidence = evidence_of(context, self.shown_tool_calls)
        tracker = context.budget_tracker if shares else None
        prompt = fill(self.evaluation_prompt, evidence)
        return self._as_feedback(await _asked(self, context, prompt, self.budget, tracker))

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
    """Whether it draws on the run's own budget; otherwise it has `budget`."""
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
        """Ask the model. Inside an event loop, use `acheck`."""
        return run_blocking(partial(self.acheck, context))

    async def acheck(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Ask the model."""
        output = context.text if context.tentative_output is None else context.tentative_output
        evidence = {
            **evidence_of(context, self.shown_tool_calls),
            "tentative_output": lambda: shown_output(output),
            "stop_reason": lambda: context.stop_reason or "no reason given",
        }
        share = context.config.share_budget
        shares = self.share_budget if share is None else share
        tracker = context.budget_tracker if shares else None
        # A run without a budget has none to share.
        budget = None if tracker is not None else self.budget
        prompt = fill(self.verification_prompt, evidence)
        return self._as_result(await _asked(self, context, prompt, budget, tracker))

    def _as_result(self, verdict: CompletionVerdict) -> TaskCompletionResult:
        if verdict.complete:
            return TaskCompletionResult.ok(verdict.explanation)
        missing = "".join(f"\n- {each}" for each in verdict.missing)
        return TaskCompletionResult.incomplete(verdict.explanation + missing)


def evidence_of(context: JudgeContext, shown_tool_calls: int) -> dict[str, Callable[[], str]]:
    """Return the evidence that every judge may ask for, by the name of its variable."""
    return {
        "task_description": lambda: shown_task(context.task),
        "current_plan": lambda: shown_plan(context.session),
        "recent_actions": lambda: shown_calls(context.recent_tool_calls(shown_tool_calls)),
        "files": lambda: shown_files(context.filesystem),
    }


def shown_task(task: str) -> str:
    """Write the task for a judge, quoted."""
    return quoted("task", task) if task.strip() else "The task is not known; judge by the evidence."


async def _asked(
    judge: LLMTrajectoryFeedback | LLMCompletionVerifier,
    context: JudgeContext,
    prompt: Prompt[T],
    budget: Budget | None,
    tracker: BudgetTracker | None,
) -> T:
    """Ask a judge's model, and return its answer. Raises `NestedEvaluationError` if there is none."""
    adapter = judge.adapter or context.adapter
    if adapter is None:
        raise NestedEvaluationError(
            f"{judge.name} has no adapter to ask a model with; give it one, or set "
            "NestedExecutionConfig.adapter",
            kind="adapter",
        )
    nested = context.create_nested_context(budget=budget, max_duration=judge.max_duration)
    evaluator = NestedEvaluator(adapter, prompt=prompt, context=nested)
    result = await evaluator.aevaluate(budget_tracker=tracker)
    if result.error is not None:
        raise result.error
    if result.output is None:
        raise NestedEvaluationError("the judge gave no answer", kind="output")
    return result.output

"""Judges: feedback while a run goes on and verification before it may stop, by rules and by a model."""

from treenail.errors import NestedEvaluationError
from treenail.judges.completion import (
    CommandChecker,
    CompositeChecker,
    FileOutputChecker,
    TaskCompletionChecker,
    TaskCompletionContext,
    TaskCompletionResult,
)
from treenail.judges.context import (
    NestedEvaluationResult,
    NestedExecutionConfig,
    NestedExecutionContext,
    derive_child_run_context,
    derive_nested_deadline,
)
from treenail.judges.evaluator import NestedEvaluator
from treenail.judges.events import (
    CompletionChecked,
    Feedback,
    FileTriggerFired,
    JudgeEvent,
    NestedEvaluated,
    NestedUsage,
    Observation,
)
from treenail.judges.feedback import (
    DeadlineFeedback,
    FeedbackContext,
    FeedbackProvider,
    FeedbackProviderConfig,
    FeedbackTrigger,
    StaticFeedback,
    StaticFeedbackProvider,
)
from treenail.judges.judged_run import JudgedRun
from treenail.judges.judges import Judges, nested_usage
from treenail.judges.llm import LLMCompletionVerifier, LLMTrajectoryFeedback
from treenail.judges.prompts import (
    AssessedPoint,
    CompletionVerdict,
    TrajectoryAssessment,
    completion_prompt,
    quoted,
    trajectory_prompt,
)

__all__ = [
    "AssessedPoint",
    "CommandChecker",
    "CompletionChecked",
    "CompletionVerdict",
    "CompositeChecker",
    "DeadlineFeedback",
    "Feedback",
    "FeedbackContext",
    "FeedbackProvider",
    "FeedbackProviderConfig",
    "FeedbackTrigger",
    "FileOutputChecker",
    "FileTriggerFired",
    "JudgeEvent",
    "JudgedRun",
    "Judges",
    "LLMCompletionVerifier",
    "LLMTrajectoryFeedback",
    "NestedEvaluated",
    "NestedEvaluationError",
    "NestedEvaluationResult",
    "NestedEvaluator",
    "NestedExecutionConfig",
    "NestedExecutionContext",
    "NestedUsage",
    "Observation",
    "StaticFeedback",
    "StaticFeedbackProvider",
    "TaskCompletionChecker",
    "TaskCompletionContext",
    "TaskCompletionResult",
    "TrajectoryAssessment",
    "completion_prompt",
    "derive_child_run_context",
    "derive_nested_deadline",
    "nested_usage",
    "quoted",
    "trajectory_prompt",
]

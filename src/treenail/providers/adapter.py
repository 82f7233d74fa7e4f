"""The evaluation seam: a prompt in, a typed answer out.

A `Provider` makes one model call. An adapter evaluates a whole prompt: it asks the model,
runs the tools, records every step in the session and ends the turn. There are two kinds, one
around any `Provider` and one around a vendor's own loop, and callers cannot tell them apart.
"""

from __future__ import annotations

from typing import Protocol, TypedDict, Unpack, runtime_checkable

from treenail.containment import CancellationToken, ExecutionContext
from treenail.prompt import OutputT, Prompt, PromptResponse
from treenail.state import Budget, BudgetTracker, Deadline, ExecutionState, RunContext, Session
from treenail.tools import Heartbeat


class EvaluationOptions(TypedDict, total=False):
    """The keyword arguments of an evaluation.

    Give it a `session`, or a `state` if the evaluation has resources beside the prompt's own; one of
    the two. A deadline, a budget and a containment are ceilings, and the tightest one counts; a
    `budget_tracker` takes precedence over `budget`. `request` is the person's message; without it the
    prompt is sent alone. With `resume=True` the session's newest evaluation resumes where it stopped.
    """

    session: Session | None
    state: ExecutionState | None
    request: str | None
    resume: bool
    deadline: Deadline | None
    budget: Budget | None
    budget_tracker: BudgetTracker | None
    heartbeat: Heartbeat | None
    run_context: RunContext | None
    containment: ExecutionContext | None
    cancellation: CancellationToken | None


@runtime_checkable
class ProviderAdapter(Protocol):
    """Evaluates prompts.

    Both methods raise `PromptEvaluationError` and its kinds, `DeadlineExceededError`,
    `BudgetExceededError`, `OutputParseError`, and for a resume `ConversationNotFound`,
    `PromptMismatch` or `SnapshotRestoreError`. Everything up to the failure is in the session.
    """

    @property
    def name(self) -> str:
        """The name under which its evaluations stand in the log."""
        ...

    def evaluate(
        self, prompt: Prompt[OutputT], **options: Unpack[EvaluationOptions]
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer. Not for use inside an event loop."""
        ...

    async def aevaluate(
        self, prompt: Prompt[OutputT], **options: Unpack[EvaluationOptions]
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer."""
        ...

"""Evaluating a prompt with any provider: the adapter around our own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from treenail.containment import CancellationToken, ExecutionConfig, ExecutionContext, Limits
from treenail.conversation import CompactionSettings
from treenail.errors import PromptEvaluationError, UsageError
from treenail.prompt import OutputT, Prompt, PromptResponse
from treenail.providers import EvaluationOptions, Provider
from treenail.state import (
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    RunContext,
    Session,
)
from treenail.tools import Heartbeat, Permissions, run_blocking
from treenail.turns.display import Watch
from treenail.turns.ledger import contain
from treenail.turns.retries import RetryPolicy
from treenail.turns.states import TurnState
from treenail.turns.turn import DEFAULT_MAX_ITERATIONS, InnerLoop, TurnResult

DEFAULT_RETRY = RetryPolicy()
"""How failed model calls are tried again, unless an adapter is told otherwise."""


class ModelAdapter:
    """Evaluates prompts with a provider, in our own loop. See `ProviderAdapter` for what it promises.

    `limits` put every evaluation under ceilings of its own, counting what the session's log says was
    spent; an evaluation that is given a containment uses that one instead. `retry=None` makes
    every failure of a model call final. `compaction` says when a conversation that grows too long is told
    to the model as a summary.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        limits: ExecutionConfig | Limits | None = None,
        permissions: Permissions | None = None,
        max_iterations: int = DEFAULT_MAX_ITERATIONS,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        watch: Watch | None = None,
        compaction: CompactionSettings | None = None,
    ) -> None:
        self.provider = provider
        self._limits = limits
        self._permissions = permissions or Permissions()
        self._max_iterations = max_iterations
        self._retry = retry
        self._watch = watch
        self._compaction = compaction or CompactionSettings()

    @property
    def name(self) -> str:
        """The provider's name."""
        return self.provider.name

    def __repr__(self) -> str:
        return f"ModelAdapter({self.provider!r})"

    def evaluate(
        self, prompt: Prompt[OutputT], **options: Unpack[EvaluationOptions]
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer. Not for use inside an event loop."""
        call = partial(self.aevaluate, prompt, **options)
        return run_blocking(call, face="evaluate", instead="aevaluate")

    async def aevaluate(
        self,
        prompt: Prompt[OutputT],
        *,
        session: Session | None = None,
        state: ExecutionState | None = None,
        request: str | None = None,
        resume: bool = False,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
        containment: ExecutionContext | None = None,
        cancellation: CancellationToken | None = None,
    ) -> PromptResponse[OutputT]:
        """Evaluate a prompt and return its answer."""
        if (session is None) == (state is None):
            raise UsageError("evaluate takes a session or a state, one of the two")
        if resume and request is not None:
            raise UsageError("a resumed evaluation has its request already; leave request or resume out")
        tracker = budget_tracker
        if tracker is None and budget is not None:
            tracker = BudgetTracker(budget)
        own = state if state is not None else ExecutionState(session)  # type: ignore[arg-type]  # one is given
        ceiling = containment
        if ceiling is None and self._limits is not None:
            ceiling = contain(own.session, self._limits)
        with _with_resources_of(prompt, own) as working:
            loop = InnerLoop(
                state=working,
                provider=self.provider,
                prompt=prompt,
                containment=ceiling,
                permissions=self._permissions,
                deadline=_earlier(deadline, tracker),
                budget_tracker=tracker,
                max_iterations=self._max_iterations,
                retry=self._retry,
                watch=self._watch,
                compaction=self._compaction,
                cancellation=cancellation or CancellationToken(),
                run_context=run_context,
                heartbeat=heartbeat,
                adapter=self,
            )
            try:
                result = await (loop.resume() if resume else loop.run(request or ""))
            finally:
                if ceiling is not None and containment is None:
                    ceiling.close()
        return response_of(prompt, result)


def response_of(prompt: Prompt[OutputT], result: TurnResult) -> PromptResponse[OutputT]:
    """Return what a turn came to, or raise what ended it."""
    if result.state is TurnState.COMPLETED:
        output: Any = result.output if prompt.template.structured_output is not None else None
        return PromptResponse(prompt.name, result.text, output)
    if result.error is not None:
        raise result.error
    raise PromptEvaluationError(
        f"the evaluation of {prompt.name} ended {result.state.value} ({result.error_kind}): {result.details}",
        prompt_name=prompt.name,
        phase="response",
    )


@contextmanager
def _with_resources_of(prompt: Prompt[Any], state: ExecutionState) -> Iterator[ExecutionState]:
    """Open the prompt's resources for the length of an evaluation; the state's own win over them."""
    if not len(prompt.resources):
        yield state
        return
    if not isinstance(state.resources, ResourceRegistry):
        missing = [each.__qualname__ for each in prompt.resources if each not in state.resources]
        if missing:
            raise UsageError(
                f"the prompt {prompt.key!r} needs resources that the state's open context does not have: "
                f"{', '.join(missing)}; bind them there"
            )
        yield state
        return
    with prompt.resources.merge(state.resources, strict=False).open() as context:
        yield replace(state, resources=context)


def _earlier(deadline: Deadline | None, tracker: BudgetTracker | None) -> Deadline | None:
    """Return the deadline that comes first: the evaluation's or its budget's."""
    of_budget = None if tracker is None else tracker.budget.deadline
    if deadline is None or of_budget is None:
        return deadline or of_budget
    return min(deadline, of_budget, key=lambda each: each.expires_at)

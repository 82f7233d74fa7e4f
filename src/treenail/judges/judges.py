"""The judges of one evaluation, as the loop asks them: after tools, and before it may stop.

`after_tools()` asks the feedback providers that are due and returns their feedback as text for the next
input. The loop puts it behind the tool results as a separate message, so that everything sent before stays a
prefix of what is sent next. `before_stop()` asks the completion checker and returns None if the run may stop,
or what is missing, which goes back to the model.

The session's log is the only memory: how often a provider was asked, which file has woken it, how often the
evaluation was refused. So a resumed run continues to count. With `record`, a judgement and the message by
which the model hears of it are one append.
"""

from __future__ import annotations

from typing import cast

from treenail.judges.completion import TaskCompletionChecker
from treenail.judges.completion_round import CompletionRound
from treenail.judges.events import NestedEvaluated, NestedUsage
from treenail.judges.feedback import FeedbackProviderConfig
from treenail.judges.feedback_round import EventsOfText, FeedbackRound
from treenail.judges.judged_run import JudgedRun
from treenail.state import SessionProtocol, TokenUsage


class Judges:
    """The judges of one evaluation: its prompt's feedback providers and completion checker.

    After a refusal, `exhausted` says whether it was the last one that the configuration allows. Then the
    turn ends as incomplete, with `last_reason`. Refusals count from the place `refusals_after` in the log.
    """

    def __init__(self, run: JudgedRun, *, refusals_after: int = 0) -> None:
        providers = cast("tuple[FeedbackProviderConfig, ...]", run.prompt.feedback_providers)
        checker = cast("TaskCompletionChecker | None", run.prompt.task_completion_checker)
        self.config = run.config
        self._feedback = FeedbackRound(run, providers)
        self._completion = (
            None
            if checker is None
            else CompletionRound(run, checker, refusals_after, self._feedback.call_index)
        )

    @property
    def has_feedback(self) -> bool:
        """Whether the prompt has feedback providers."""
        return bool(self._feedback.providers)

    @property
    def has_completion(self) -> bool:
        """Whether the prompt has a completion checker."""
        return self._completion is not None

    @property
    def exhausted(self) -> bool:
        """Whether the last refusal was one too many, or the work cannot be verified and must be."""
        return self._completion is not None and self._completion.exhausted

    @property
    def last_reason(self) -> str:
        """Why the run was last not allowed to stop."""
        return "" if self._completion is None else self._completion.last_reason

    async def after_tools(self, record: EventsOfText | None = None) -> str | None:
        """Ask the feedback providers that are due. Returns what the model is to be told, or None.

        The text goes behind the tool results, as a separate message. With `record`, the events that it makes
        of the text are appended together with the feedback; without, the caller records the text. Raises
        `NestedEvaluationError` only if a provider failed and feedback fails closed.
        """
        return await self._feedback.ask(record) if self.has_feedback else None

    async def before_stop(
        self, text: str, output: object | None, stop_reason: str, record: EventsOfText | None = None
    ) -> str | None:
        """Ask whether the run may stop. Returns None if it may, else what the model is to be told.

        Check `exhausted` first: if it is set, the turn ends as incomplete with `last_reason`, and the text is
        not sent. With `record`, the events that it makes of the text are appended together with the verdict,
        unless the turn ends.
        """
        return (
            None
            if self._completion is None
            else await self._completion.ask(text, output, stop_reason, record)
        )


def nested_usage(session: SessionProtocol) -> NestedUsage:
    """Return what the judges of a run have used, apart from the run's own usage."""
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

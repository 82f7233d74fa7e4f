"""Feedback during a run: providers, their triggers, and two providers that need no model.

A provider is due when its trigger fires. A trigger counts per provider and per prompt, from the last time
that the provider was asked, even if it failed then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

from treenail.containment import integer, number
from treenail.judges.context import JudgeContext
from treenail.judges.events import Feedback, Severity
from treenail.prompt import Prompt
from treenail.state import SessionProtocol, entries_of, entry_at, opened
from treenail.tools import ToolInvoked

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FeedbackTrigger:
    """When a provider is due: as soon as one of these conditions holds. With none of them, never."""

    every_n_calls: int | None = None
    """After this many tool calls since it was last asked."""
    every_n_seconds: float | None = None
    """After this many seconds since it was last asked; at once if it never was."""
    on_file_created: str | None = None
    """When this file is in the workspace; once in the life of the session."""

    def __post_init__(self) -> None:
        if self.every_n_calls is not None:
            integer("FeedbackTrigger", "every_n_calls", self.every_n_calls)
        if self.every_n_seconds is not None:
            number("FeedbackTrigger", "every_n_seconds", self.every_n_seconds)

    def is_due(self, *, calls: int, last: datetime | None, now: datetime) -> bool:
        """Say whether it is due, by the calls since it was last asked and the time of that."""
        if self.every_n_calls is not None and calls >= self.every_n_calls:
            return True
        if self.every_n_seconds is None:
            return False
        return last is None or now - last >= timedelta(seconds=self.every_n_seconds)


@dataclass(frozen=True, slots=True)
class FeedbackContext(JudgeContext):
    """What a feedback provider may read, and what it needs to ask a model."""

    prompt: Prompt[Any]

    @property
    def tool_call_count(self) -> int:
        """How many tool calls of the prompt have finished."""
        return len(self.tool_calls())

    @property
    def last_feedback(self) -> Feedback | None:
        """The newest feedback on the prompt, by any provider."""
        return self._newest(None)

    def last_feedback_for_provider(self, name: str) -> Feedback | None:
        """Return the newest feedback on the prompt by this provider."""
        return self._newest(name)

    @property
    def tool_calls_since_last_feedback(self) -> int:
        """How many tool calls there were since the last feedback of any provider, or at all."""
        return self._calls_since(None)

    def tool_calls_since_last_feedback_for_provider(self, name: str) -> int:
        """Return how many tool calls there were since this provider's last feedback, or at all."""
        return self._calls_since(name)

    def _newest(self, provider: str | None) -> Feedback | None:
        given = self.session[Feedback].where(lambda each: self._is_from(each, provider))
        return given[-1] if given else None

    def _calls_since(self, provider: str | None) -> int:
        given = [place for each, place in placed(self.session, Feedback) if self._is_from(each, provider)]
        after = given[-1] if given else 0
        calls = placed(self.session, ToolInvoked)
        return sum(place > after and each.prompt_name == self.prompt.name for each, place in calls)

    def _is_from(self, feedback: Feedback, provider: str | None) -> bool:
        return feedback.prompt_name == self.prompt.name and provider in (None, feedback.provider_name)


@runtime_checkable
class FeedbackProvider(Protocol):
    """Gives feedback on a run while it is running.

    `provide` may be `async`; if there is an `aprovide` as well, that is used. Either may return None for no
    feedback. An attribute `time_limit` (a timedelta) says how long it may take, if that is longer than the
    configuration's `max_nested_duration`.
    """

    @property
    def name(self) -> str:
        """Its name; its trigger counts under this name."""
        ...

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether there is anything to judge yet. Called when the trigger fires; must be cheap."""
        ...

    def provide(self, *, context: FeedbackContext) -> Feedback | Awaitable[Feedback | None] | None:
        """Return the feedback."""
        ...


@dataclass(frozen=True, slots=True)
class FeedbackProviderConfig:
    """A provider and its trigger."""

    provider: FeedbackProvider
    trigger: FeedbackTrigger


# --- providers without a model -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadlineFeedback:
    """Tells the model how much time is left, and warns when it is little."""

    warn_threshold_seconds: float = 120.0

    @property
    def name(self) -> str:
        """Its name."""
        return "DeadlineFeedback"

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether the run has a deadline."""
        return context.deadline is not None

    def provide(self, *, context: FeedbackContext) -> Feedback | None:
        """Return how much time is left."""
        if context.deadline is None:
            return None
        left = context.deadline.remaining().total_seconds()
        if left <= 0:
            return Feedback(
                summary="The deadline has passed.",
                suggestions=("Stop here and say what is done and what is not.",),
                severity="warning",
            )
        if left > self.warn_threshold_seconds:
            return Feedback(summary=f"{_duration(left)} left before the deadline.")
        return Feedback(
            summary=f"Only {_duration(left)} left before the deadline.",
            suggestions=(
                "Finish what you are doing now.",
                "Leave out what is not essential, and say what you left out.",
            ),
            severity="warning",
        )


@dataclass(frozen=True, slots=True)
class StaticFeedback:
    """Gives the same feedback each time: a reminder."""

    feedback: str
    name: str = "StaticFeedback"
    severity: Severity = "info"

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Return True: the trigger decides."""
        return True

    def provide(self, *, context: FeedbackContext) -> Feedback:
        """Return the reminder."""
        return Feedback(summary=self.feedback, severity=self.severity)


StaticFeedbackProvider = StaticFeedback
"""The longer name of `StaticFeedback`."""


def placed(session: SessionProtocol, kind: type[T]) -> Iterator[tuple[T, int]]:
    """Yield the events of a kind, oldest first, with their places in the log."""
    for kept, place in entries_of(session[kind].view()):
        yield opened(kept), abs(place)


def newest_first(session: SessionProtocol, kind: type[T]) -> Iterator[tuple[T, int]]:
    """Yield the same as `placed`, newest first, so that a reader can stop early."""
    entries = session[kind].view()
    for index in range(len(entries) - 1, -1, -1):
        kept, place = entry_at(entries, index)
        yield opened(kept), abs(place)


def _duration(seconds: float) -> str:
    """Write a time for a model: the two largest units."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s" if whole else "less than a second"

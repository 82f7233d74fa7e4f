"""Feedback while the work goes on: who gives it, when it is due, and two who need no model.

A provider is due when its trigger says so. What a trigger counts, it counts per provider and per prompt, from
the last time that the provider was asked: also if it failed then, or else a judge that is down would be asked
after every call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

from treenail.containment import CancellationToken, ExecutionContext
from treenail.errors import UsageError
from treenail.judges.context import JudgeContext, NestedExecutionConfig, as_view
from treenail.judges.events import Feedback, Severity
from treenail.prompt.template import Prompt
from treenail.providers.adapter import ProviderAdapter
from treenail.state.budget import BudgetTracker, Deadline
from treenail.state.run_context import RunContext
from treenail.state.slices import entries_of, opened
from treenail.state.views import SessionProtocol
from treenail.tools.events import ToolInvoked
from treenail.workspace.base import Filesystem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FeedbackTrigger:
    """When a provider is due: as soon as one of these holds. With none of them, never."""

    every_n_calls: int | None = None
    """After so many tool calls since it was asked last."""
    every_n_seconds: float | None = None
    """After so much time since it was asked last; at the first opportunity, if it never was."""
    on_file_created: str | None = None
    """When this file is in the workspace: once in the life of the session."""

    def __post_init__(self) -> None:
        calls: object = self.every_n_calls
        if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 1):
            raise UsageError(f"FeedbackTrigger.every_n_calls counts from 1, so it cannot be {calls!r}")
        seconds: object = self.every_n_seconds
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0
        ):
            raise UsageError(f"FeedbackTrigger.every_n_seconds must be more than 0, not {seconds!r}")

    def is_due(self, *, calls: int, last: datetime | None, now: datetime) -> bool:
        """Say whether calls or time make it due: `calls` and `last` count from when it was asked last."""
        if self.every_n_calls is not None and calls >= self.every_n_calls:
            return True
        if self.every_n_seconds is None:
            return False
        return last is None or now - last >= timedelta(seconds=self.every_n_seconds)


@dataclass(frozen=True, slots=True)
class FeedbackContext(JudgeContext):
    """What a feedback provider may look at, and what it needs to ask a model."""

    session: SessionProtocol
    """The run, read-only."""
    prompt: Prompt[Any]
    deadline: Deadline | None = None
    """The run's."""
    adapter: ProviderAdapter | None = None
    """Who can evaluate a prompt for a judge."""
    run_context: RunContext | None = None
    filesystem: Filesystem | None = None
    """The workspace, read-only."""
    budget_tracker: BudgetTracker | None = None
    containment: ExecutionContext | None = None
    cancellation: CancellationToken | None = None
    """Set when the judge's time is over or the run is stopped."""
    config: NestedExecutionConfig = field(default_factory=NestedExecutionConfig)
    task: str = ""
    """What the agent was asked to do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session", as_view(self.session))
        if self.filesystem is not None:
            object.__setattr__(self, "filesystem", self.filesystem.read_only_view())

    @property
    def tool_call_count(self) -> int:
        """How many tool calls of the prompt have ended."""
        return len(calls_of(self.session, self.prompt.name))

    @property
    def last_feedback(self) -> Feedback | None:
        """The newest feedback that the prompt was given by anybody."""
        return self._newest(None)

    def last_feedback_for_provider(self, name: str) -> Feedback | None:
        """Return the newest feedback that the prompt was given by that provider."""
        return self._newest(name)

    @property
    def tool_calls_since_last_feedback(self) -> int:
        """How many tool calls there were since anybody's feedback; all of them, if there was none."""
        return self._calls_since(None)

    def tool_calls_since_last_feedback_for_provider(self, name: str) -> int:
        """Return how many tool calls there were since that provider's feedback."""
        return self._calls_since(name)

    def recent_tool_calls(self, n: int) -> tuple[ToolInvoked, ...]:
        """Return the last `n` tool calls of the prompt, oldest first."""
        return recent_calls(self.session, self.prompt.name, n)

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
    """Looks at a run while it goes on.

    `provide` may also be `async`, or there may be an `aprovide` beside it, which is then used. It may
    return None: nothing to say. An attribute `time_limit` (a timedelta) says how long it may take, if
    that is longer than the configuration's `max_nested_duration`.
    """

    @property
    def name(self) -> str:
        """Who it is; what its trigger counts is counted under this name."""
        ...

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether there is anything to look at yet. Asked when the trigger fires; cheap."""
        ...

    def provide(self, *, context: FeedbackContext) -> Feedback | Awaitable[Feedback | None] | None:
        """Look, and say what there is to say."""
        ...


@dataclass(frozen=True, slots=True)
class FeedbackProviderConfig:
    """A provider, and when it is due."""

    provider: FeedbackProvider
    trigger: FeedbackTrigger


# --- two who need no model -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadlineFeedback:
    """Tells the model how much time is left; a warning when it becomes little."""

    warn_threshold_seconds: float = 120.0

    @property
    def name(self) -> str:
        """Who it is."""
        return "DeadlineFeedback"

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say whether there is a deadline at all."""
        return context.deadline is not None

    def provide(self, *, context: FeedbackContext) -> Feedback | None:
        """Say how much time is left."""
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
                "Bring what you are doing to a good end now.",
                "Leave out what is not essential, and say what you left out.",
            ),
            severity="warning",
        )


@dataclass(frozen=True, slots=True)
class StaticFeedback:
    """Says the same each time: a reminder."""

    feedback: str
    name: str = "StaticFeedback"
    severity: Severity = "info"

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Say yes: the trigger decides."""
        return True

    def provide(self, *, context: FeedbackContext) -> Feedback:
        """Say it."""
        return Feedback(summary=self.feedback, severity=self.severity)


StaticFeedbackProvider = StaticFeedback
"""The longer name of `StaticFeedback`."""


def calls_of(session: SessionProtocol, prompt_name: str) -> tuple[ToolInvoked, ...]:
    """Return the ended tool calls of a prompt, oldest first."""
    return session[ToolInvoked].where(lambda each: each.prompt_name == prompt_name)


def recent_calls(session: SessionProtocol, prompt_name: str, n: int) -> tuple[ToolInvoked, ...]:
    """Return the last `n` tool calls of a prompt, oldest first."""
    return calls_of(session, prompt_name)[-n:] if n > 0 else ()


def placed(session: SessionProtocol, kind: type[T]) -> Iterator[tuple[T, int]]:
    """Yield the events of a kind with their places in the log: what came after what, also after a prune."""
    for kept, place in entries_of(session[kind].view()):
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

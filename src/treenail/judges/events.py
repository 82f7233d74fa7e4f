"""What a run's log keeps of its judges. All of it is history: a rollback makes no judgement unsaid."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal
from uuid import UUID

from treenail.log.event import SlicePolicy
from treenail.state.budget import TokenUsage
from treenail.state.events import event
from treenail.state.run_context import RunContext

Severity = Literal["info", "caution", "warning"]
"""How much a feedback matters."""

JudgeKind = Literal["feedback", "completion"]
"""What a judge is asked: how the work goes, or whether it is done."""

JudgeOutcome = Literal["silent", "skipped", "failed"]
"""Why a judge said nothing: it had nothing to say, it was not asked, or it could not answer."""

MAX_TEXT_CHARS = 4_000
"""How much of one text of a judge reaches the model."""

MAX_ITEMS = 20
"""How many observations, suggestions or missing pieces of one judgement reach the model."""

_LEFT_OUT_CHARS = 48
"""Room for the words that say how much of a text is missing."""

_CLOSING = re.compile(r"<(?=\s*/?\s*(?:feedback|completion_check)\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that a judge noticed."""

    category: str
    description: str
    evidence: str | None = None


@event(name="treenail.Feedback", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Feedback:
    """What a judge has to say while the work goes on.

    A provider fills in the upper half; who said it, when and after how many calls is stamped by
    `Judges`. The model is told `render()`, as part of its next input.
    """

    provider_name: str = ""
    summary: str = ""
    observations: tuple[Observation, ...] = ()
    suggestions: tuple[str, ...] = ()
    severity: Severity = "info"
    timestamp: datetime | None = None
    call_index: int = 0
    """How many tool calls of the prompt there had been."""
    prompt_name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "observations", tuple(self.observations))
        object.__setattr__(self, "suggestions", tuple(self.suggestions))

    def shortened(self) -> Feedback:
        """Return it as the model is told it: of what is longer than that, nothing more is kept."""
        return replace(
            self,
            summary=shortened(self.summary),
            observations=tuple(
                Observation(
                    shortened(each.category),
                    shortened(each.description),
                    None if each.evidence is None else shortened(each.evidence),
                )
                for each in self.observations[:MAX_ITEMS]
            ),
            suggestions=tuple(shortened(each) for each in self.suggestions[:MAX_ITEMS]),
        )

    def render(self) -> str:
        """Write it as a tagged block. Whatever the texts hold, they cannot end the block or begin another."""
        lines = [shortened(self.summary)]
        if self.observations:
            lines.append("Observations:")
            for each in self.observations[:MAX_ITEMS]:
                evidence = f" (evidence: {shortened(each.evidence)})" if each.evidence else ""
                lines.append(f"- [{shortened(each.category)}] {shortened(each.description)}{evidence}")
        if self.suggestions:
            lines.append("Suggestions:")
            lines.extend(f"- {shortened(each)}" for each in self.suggestions[:MAX_ITEMS])
        return block("feedback", "\n".join(lines), provider=self.provider_name, severity=self.severity)


@event(name="treenail.CompletionChecked", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CompletionChecked:
    """The agent wanted to stop, and a judge said whether it may."""

    checker: str
    complete: bool
    feedback: str = ""
    """Why; if it is not complete, the model was told so."""
    attempt: int = 1
    """Which refusal of the evaluation this is, or which it would have been."""
    verified: bool = True
    """False if nobody looked: the judge was skipped or failed, and the configuration decided."""
    evaluation_id: str = ""
    prompt_name: str = ""
    stop_reason: str = ""
    created_at: datetime | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.JudgeEvent", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class JudgeEvent:
    """A judge that was due said nothing."""

    judge: str
    kind: JudgeKind
    outcome: JudgeOutcome
    reason: str
    """In one word: `deadline`, `budget`, `timeout`, `crashed`, `throttled`, `output`, `depth` ..."""
    detail: str = ""
    failed_closed: bool = False
    """Whether the run was held back because of it; else it went on as if nothing were wrong."""
    prompt_name: str = ""
    evaluation_id: str = ""
    call_index: int = 0
    created_at: datetime | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.NestedEvaluated", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class NestedEvaluated:
    """A judge asked a model, in a session of its own. What that used is kept apart from the run's own use."""

    judge: str
    prompt_name: str
    adapter: str
    child_session_id: UUID | None
    """The session to look into."""
    success: bool
    error_kind: str = ""
    detail: str = ""
    usage: TokenUsage | None = None
    cost_usd: float | None = None
    budget: Literal["shared", "own", "none"] = "none"
    """Whether it drew on the run's tokens, had its own, or nobody counted them."""
    depth: int = 1
    run_context: RunContext | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.FileTriggerFired", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class FileTriggerFired:
    """A feedback provider was woken by a file. It is not woken by that file again."""

    provider_name: str
    prompt_name: str
    filename: str


# --- texts that models read ----------------------------------------------------------------------------


def shortened(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Keep the beginning and the end of a text, so much that it fits, and say how much is missing."""
    if len(text) <= limit:
        return text
    half = max((limit - _LEFT_OUT_CHARS) // 2, 1)
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def block(tag: str, body: str, **attributes: str) -> str:
    """Write a tagged block whose body cannot leave it."""
    said = "".join(
        f' {name}="{html.escape(" ".join(value.split()))}"' for name, value in attributes.items() if value
    )
    return f"<{tag}{said}>\n{_CLOSING.sub('&lt;', body)}\n</{tag}>"


@dataclass(frozen=True, slots=True)
class NestedUsage:
    """What a run's judges have used: `shared` is part of what the run's tracker counts, `own` is not."""

    shared: TokenUsage = field(default_factory=TokenUsage)
    own: TokenUsage = field(default_factory=TokenUsage)
    cost_usd: float = 0.0
    evaluations: tuple[NestedEvaluated, ...] = ()

    def consolidated(self, run: TokenUsage) -> TokenUsage:
        """Add what judges used on budgets of their own to what the run's tracker has consumed."""
        return run + self.own

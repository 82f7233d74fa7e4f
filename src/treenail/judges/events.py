"""The events of judges in a run's log. They are history: a rollback does not remove them."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal
from uuid import UUID

from treenail.log import SlicePolicy
from treenail.state import RunContext, TokenUsage, event

Severity = Literal["info", "caution", "warning"]
"""How serious a feedback is."""

JudgeKind = Literal["feedback", "completion"]
"""What a judge is asked: whether the work is on track, or whether it is done."""

JudgeOutcome = Literal["silent", "skipped", "failed"]
"""Why a judge gave no answer: it had nothing to say, it was not asked, or it failed."""

MAX_TEXT_CHARS = 4_000
"""How much of one text of a judge reaches the model."""

MAX_ITEMS = 20
"""How many observations or suggestions of one judgement reach the model."""

_LEFT_OUT_CHARS = 48
"""Room for the note that says how much of a text was left out."""

_CLOSING = re.compile(r"<(?=\s*/?\s*(?:feedback|completion_check)\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of a judge."""

    category: str
    description: str
    evidence: str | None = None


@event(name="treenail.Feedback", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Feedback:
    """The feedback of a provider during a run.

    A provider fills in summary, observations, suggestions and severity; `Judges` sets the other fields. The
    model is told `render()`, as part of its next input.
    """

    provider_name: str = ""
    summary: str = ""
    observations: tuple[Observation, ...] = ()
    suggestions: tuple[str, ...] = ()
    severity: Severity = "info"
    timestamp: datetime | None = None
    call_index: int = 0
    """How many tool calls of the prompt came before it."""
    prompt_name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "observations", tuple(self.observations))
        object.__setattr__(self, "suggestions", tuple(self.suggestions))

    def shortened(self) -> Feedback:
        """Return it cut to the lengths that the model is told."""
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
        """Write it as a tagged block, which no text in it can end."""
        told = self.shortened()
        lines = [told.summary]
        if told.observations:
            lines.append("Observations:")
            for each in told.observations:
                evidence = f" (evidence: {each.evidence})" if each.evidence else ""
                lines.append(f"- [{each.category}] {each.description}{evidence}")
        if told.suggestions:
            lines += ["Suggestions:", *(f"- {each}" for each in told.suggestions)]
        return block("feedback", "\n".join(lines), provider=self.provider_name, severity=self.severity)


@event(name="treenail.CompletionChecked", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CompletionChecked:
    """The agent wanted to stop, and its completion checker decided whether it may."""

    checker: str
    complete: bool
    feedback: str = ""
    """The reason; the model was told it if the work is not complete."""
    attempt: int = 1
    """The number of this refusal in the evaluation, or of the refusal that it would have been."""
    verified: bool = True
    """False if the checker was skipped or failed, and the configuration decided."""
    evaluation_id: str = ""
    prompt_name: str = ""
    stop_reason: str = ""
    created_at: datetime | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.JudgeEvent", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class JudgeEvent:
    """A judge that was due gave no answer."""

    judge: str
    kind: JudgeKind
    outcome: JudgeOutcome
    reason: str
    """One word: `deadline`, `budget`, `timeout`, `crashed`, `throttled`, `output`, `depth` ..."""
    detail: str = ""
    failed_closed: bool = False
    """Whether the run was held back because of it; otherwise it continued."""
    prompt_name: str = ""
    evaluation_id: str = ""
    call_index: int = 0
    created_at: datetime | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.NestedEvaluated", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class NestedEvaluated:
    """A judge asked a model, in its own session. Its usage is kept apart from the run's own."""

    judge: str
    prompt_name: str
    adapter: str
    child_session_id: UUID | None
    """The session of the evaluation."""
    success: bool
    error_kind: str = ""
    detail: str = ""
    usage: TokenUsage | None = None
    cost_usd: float | None = None
    budget: Literal["shared", "own", "none"] = "none"
    """Whether it drew on the run's budget, had its own, or none."""
    depth: int = 1
    run_context: RunContext | None = None
    elapsed_ms: float = 0.0


@event(name="treenail.FileTriggerFired", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class FileTriggerFired:
    """A file triggered a feedback provider. The same file does not trigger it again."""

    provider_name: str
    prompt_name: str
    filename: str


# --- texts that models read ----------------------------------------------------------------------------


def shortened(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Cut a long text to its beginning and its end, and say how much was left out."""
    if len(text) <= limit:
        return text
    half = max((limit - _LEFT_OUT_CHARS) // 2, 1)
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def block(tag: str, body: str, **attributes: str) -> str:
    """Write a tagged block that its body cannot end."""
    said = "".join(
        f' {name}="{html.escape(" ".join(value.split()))}"' for name, value in attributes.items() if value
    )
    return f"<{tag}{said}>\n{_CLOSING.sub('&lt;', body)}\n</{tag}>"


@dataclass(frozen=True, slots=True)
class NestedUsage:
    """What a run's judges have used: the run's tracker counts `shared`, but not `own`."""

    shared: TokenUsage = field(default_factory=TokenUsage)
    own: TokenUsage = field(default_factory=TokenUsage)
    cost_usd: float = 0.0
    evaluations: tuple[NestedEvaluated, ...] = ()

    def consolidated(self, run: TokenUsage) -> TokenUsage:
        """Add what judges used from budgets of their own to what the run's tracker counts."""
        return run + self.own

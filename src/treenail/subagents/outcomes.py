"""The outcome of a wait: which subagents ended and how, which have not, and what to do next.

A wait reports what the log says. It is `completed` only if every subagent that it waited for completed; a
subagent that merely exists, runs, or has ended otherwise does not count as success.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

from treenail.subagents.states import SubagentStatus
from treenail.subagents.subagent import Subagent

WaitStatus = Literal["completed", "partial", "incomplete"]
"""All completed; all ended, but not all completed; or some have not ended."""

BUCKETS = ("completed", "failed", "timed_out", "cancelled", "detached", "incomplete")
"""How subagents are counted. `closed` counts as cancelled; one that has not ended counts as incomplete."""

MAX_SHOWN_SUMMARY = 2_000
"""How many characters of each answer a wait shows; the whole answer is in the subagent's log."""


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """What was known when a wait ended."""

    status: WaitStatus
    counts: Mapping[str, int]
    """How many subagents are in each bucket."""
    buckets: Mapping[str, tuple[str, ...]]
    """The ids in each bucket; see `BUCKETS`."""
    next_actions: tuple[str, ...]
    summary: str
    observed_at: datetime
    results: Mapping[str, str]
    """The answers of those that completed, by id."""

    @property
    def complete(self) -> bool:
        """Whether all of them completed."""
        return self.status == "completed"

    @property
    def partial(self) -> bool:
        """Whether all have ended, but not all completed."""
        return self.status == "partial"

    def render(self) -> str:
        """Write it as JSON for a model."""
        results = {
            each: text if len(text) <= MAX_SHOWN_SUMMARY else text[:MAX_SHOWN_SUMMARY] + " ... (cut)"
            for each, text in self.results.items()
        }
        shown = {
            **asdict(self),
            "complete": self.complete,
            "partial": self.partial,
            "buckets": {name: ids for name, ids in self.buckets.items() if ids},
            "results": results,
            "observed_at": self.observed_at.isoformat(),
        }
        return json.dumps(shown, ensure_ascii=False)


def bucket_of(child: Subagent) -> str:
    """Return the bucket that a subagent is counted in. One with an unanswered input has not ended."""
    if not child.is_settled:
        return "incomplete"
    return "cancelled" if child.status is SubagentStatus.CLOSED else child.status.value


def wait_outcome(children: Sequence[Subagent], observed_at: datetime) -> WaitOutcome:
    """Sum up what is known about some subagents."""
    buckets: dict[str, list[str]] = {name: [] for name in BUCKETS}
    for each in children:
        buckets[bucket_of(each)].append(each.id)
    counts = {name: len(ids) for name, ids in buckets.items()}
    if not children or counts["incomplete"]:
        status: WaitStatus = "incomplete"
    elif counts["completed"] == len(children):
        status = "completed"
    else:
        status = "partial"
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    return WaitOutcome(
        status=status,
        counts=counts,
        buckets={name: tuple(ids) for name, ids in buckets.items()},
        next_actions=_next_actions(children, counts),
        summary=f"{len(children)} subagents: {told}" if children else "there are no subagents",
        observed_at=observed_at,
        results={each.id: each.summary for each in children if bucket_of(each) == "completed"},
    )


def _next_actions(children: Sequence[Subagent], counts: Mapping[str, int]) -> tuple[str, ...]:
    if not children:
        return ("start a subagent first",)
    actions = []
    if counts["incomplete"]:
        actions.append("wait again for those that are incomplete, or cancel them")
    for each in children:
        if bucket_of(each) not in ("incomplete", "completed"):
            why = f" ({each.reason})" if each.reason else ""
            advice = "; ".join(each.next_actions) or "decide whether to continue without it"
            actions.append(f"{each.id} {each.status.value}{why}: {advice}")
    return tuple(actions)

"""What a wait knows: which subagents ended how, which have not, and what to do about it.

A wait reports facts of the log. It is `completed` only if every subagent that was waited for
is; that one exists, runs, or has ended somehow, is no success.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from treenail.subagents.states import SubagentStatus

WaitStatus = Literal["completed", "partial", "incomplete"]
"""Everything completed; everything ended, but not everything well; or something has not ended."""

BUCKETS = ("completed", "failed", "timed_out", "cancelled", "detached", "incomplete")
"""Where each subagent is counted; `closed` counts as cancelled, what has not ended as incomplete."""

MAX_SHOWN_SUMMARY = 2_000
"""How much of each subagent's answer a wait shows; the rest is in its log."""


class Ended(Protocol):
    """What a wait looks at."""

    @property
    def id(self) -> str:
        """The subagent's id."""
        ...

    @property
    def status(self) -> SubagentStatus:
        """How it stands."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and was sent nothing since."""
        ...

    @property
    def summary(self) -> str:
        """What it answered."""
        ...

    @property
    def reason(self) -> str:
        """Why it ended, if it did not end by itself."""
        ...

    @property
    def next_actions(self) -> tuple[str, ...]:
        """What can be done about it."""
        ...


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
    """What those that completed have answered, by id."""

    @property
    def complete(self) -> bool:
        """Whether every one of them completed."""
        return self.status == "completed"

    @property
    def partial(self) -> bool:
        """Whether all have ended, and not all of them well."""
        return self.status == "partial"

    def render(self) -> str:
        """Write it for a model."""
        return json.dumps(
            {
                "status": self.status,
                "complete": self.complete,
                "partial": self.partial,
                "counts": dict(self.counts),
                "buckets": {name: list(ids) for name, ids in self.buckets.items() if ids},
                "results": {
                    each: text if len(text) <= MAX_SHOWN_SUMMARY else text[:MAX_SHOWN_SUMMARY] + " ... (cut)"
                    for each, text in self.results.items()
                },
                "next_actions": list(self.next_actions),
                "summary": self.summary,
                "observed_at": self.observed_at.isoformat(),
            },
            ensure_ascii=False,
        )


def bucket_of(child: Ended) -> str:
    """Say in which bucket a subagent is counted. One that was sent something new has not ended."""
    if not child.is_settled:
        return "incomplete"
    return "cancelled" if child.status is SubagentStatus.CLOSED else child.status.value


def wait_outcome(children: Sequence[Ended], observed_at: datetime) -> WaitOutcome:
    """Say what is known about some subagents."""
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


def _next_actions(children: Sequence[Ended], counts: Mapping[str, int]) -> tuple[str, ...]:
    if not children:
        return ("start a subagent first",)
    actions = []
    if counts["incomplete"]:
        actions.append("wait again for those that are incomplete, or cancel them")
    for each in children:
        if bucket_of(each) not in ("incomplete", "completed"):
            why = f" ({each.reason})" if each.reason else ""
            advice = "; ".join(each.next_actions) or "decide whether to go on without it"
            actions.append(f"{each.id} {each.status.value}{why}: {advice}")
    return tuple(actions)

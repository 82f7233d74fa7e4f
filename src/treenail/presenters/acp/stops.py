"""How a turn's ending is told to an editor: one stop reason, or an error that says what happened.

Only a clean answer is `end_turn`. The protocol has four other stop reasons; whatever fits none of them is an
error of the request, with the state, the kind and what to do next. A held turn is neither: its question is
open, and the turn has not stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treenail.turns import TurnState

StopReason = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
"""The stop reasons of the protocol."""

AUTH_REQUIRED = -32000
"""The protocol's error for credentials that are missing or were not accepted."""

FAILED = -32603
"""The error of a turn that ended in a way for which there is no stop reason."""

_REASONS: Mapping[str, StopReason] = {
    "cancelled": "cancelled",
    "interrupt": "cancelled",
    "iteration_cap": "max_turn_requests",
    "step_limit_exceeded": "max_turn_requests",
    "budget_exceeded": "max_turn_requests",
    "truncated": "max_tokens",
    "refused": "refusal",
    "content_filtered": "refusal",
}
"""The kinds of endings that the protocol has a stop reason for."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a turn ended, as its log tells it."""

    state: TurnState
    kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop reason; None for an ending that is an error, or a question."""
        if self.state is TurnState.COMPLETED:
            return "end_turn"
        if self.state in (TurnState.HELD, TurnState.UNFINISHED):
            return None
        return _REASONS.get(self.kind or "")

    @property
    def error_code(self) -> int:
        """The code of the error, for an ending without a stop reason."""
        return AUTH_REQUIRED if self.kind == "authentication" else FAILED

    @property
    def sentence(self) -> str:
        """What happened and what to do next, for a person."""
        kind = f" ({self.kind})" if self.kind else ""
        happened = f"the turn ended as {self.state.value}{kind}"
        if self.state is TurnState.HELD:
            happened = "a call waits for an answer"
        elif self.state is TurnState.UNFINISHED:
            happened = "the turn has no ending"
        why = f": {self.details}" if self.details else ""
        here = ("/resume",) if any(each.startswith("treenail resume") for each in self.next_actions) else ()
        then = f"; next: {', or '.join((*here, *self.next_actions))}" if self.next_actions else ""
        return happened + why + then

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "state": self.state.value,
            "kind": self.kind,
            "details": self.details,
            "next_actions": list(self.next_actions),
        }

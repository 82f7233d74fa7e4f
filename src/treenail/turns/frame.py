"""What the parts of one turn share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treenail.containment import CallOutcome, CancellationToken, ExecutionContext
from treenail.errors import CallRefused
from treenail.prompt import RenderedPrompt
from treenail.state import Deadline, ExecutionState
from treenail.tools import ToolContext, ToolRunner
from treenail.turns.display import TurnDisplay
from treenail.turns.record import TurnRecord
from treenail.turns.vendor import Seat


@dataclass(slots=True)
class TurnFrame:
    """One turn under way: what it works on, what holds it, and what it offers the model now."""

    state: ExecutionState
    record: TurnRecord
    display: TurnDisplay
    containment: ExecutionContext | None
    deadline: Deadline | None
    cancellation: CancellationToken
    seat: Seat
    rendered: RenderedPrompt[Any] = field(init=False)
    """The prompt's text and tools, as the session wants them now."""
    output_schema: Mapping[str, Any] | None = None
    """The schema that the provider makes the model follow, if it can do that."""
    tool_tokens: int = 0
    """What the tools' descriptions take of each request."""
    runner: ToolRunner = field(init=False)
    context: ToolContext[Any] = field(init=False)
    """What every tool call of the turn receives."""


def refused(outcome: CallOutcome[Any], containment: ExecutionContext) -> CallRefused:
    """Make the error that ends the turn when the containment has refused or stopped a call."""
    snapshot = containment.get_snapshot()
    spent = f"{snapshot.step_count} steps, ${snapshot.cost_usd_accumulated:.4f}"
    why = f": {outcome.detail}" if outcome.detail else ""
    return CallRefused(
        f"the run's limits stopped it after {spent}{why}",
        stop_reason=str(outcome.stop_reason or containment.stop_reason or "halted"),
    )

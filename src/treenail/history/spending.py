"""What a run used up over time: money against its ceilings, by model and by child, and its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treenail.containment import Limits, Reserved, RetryTaken, Settled
from treenail.conversation import HistoryCompacted, ProviderUsage, SubagentEvent, known_window
from treenail.judges import NestedEvaluated
from treenail.log import Envelope
from treenail.turns import CeilingsSet

MAX_POINTS = 400
"""How many points of a curve are shown; a longer one is thinned out."""


@dataclass(slots=True)
class ModelUse:
    """What one model was used for."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None


@dataclass(slots=True)
class Spending:
    """Folds the ledger of a log, and what its model calls report, into curves and sums."""

    limits: Limits | None = None
    spent_usd: float = 0.0
    steps: int = 0
    retries: int = 0
    elapsed_ms: float = 0.0
    models: dict[str, ModelUse] = field(default_factory=dict)
    judges_usd: float = 0.0
    _costs: dict[str, float] = field(default_factory=dict)
    """What each reservation counts for."""
    _settled: dict[str, float] = field(default_factory=dict)
    _children: dict[str, float] = field(default_factory=dict)
    """What the chains below the run's own have cost."""
    _names: dict[str, str] = field(default_factory=dict)
    _curve: list[tuple[int, float, int]] = field(default_factory=list)
    """Time, money and steps after each change."""
    _context: list[tuple[int, int, int, float | None]] = field(default_factory=list)
    """Time, event, tokens and fill of each model call."""
    _compactions: list[tuple[int, int]] = field(default_factory=list)
    _is_booked: bool = False
    """Whether the log has a ledger: then money is counted there, and not by what calls report."""

    def add(self, envelope: Envelope, value: object | None) -> None:
        """Fold the next event of the log."""
        match value:
            case Reserved():
                self._is_booked = True
                self.steps += 1
                self._book(envelope, value, value.cost_usd)
            case Settled():
                # A later one for the same reservation corrects it upwards.
                cost_usd = max(self._settled.get(value.reservation_id, 0.0), value.cost_usd)
                self._settled[value.reservation_id] = cost_usd
                self._book(envelope, value, cost_usd)
            case RetryTaken():
                self.retries += 1
            case CeilingsSet():
                self.limits = value.limits
            case ProviderUsage():
                self._count(envelope, value)
            case NestedEvaluated():
                self.judges_usd += value.cost_usd or 0.0
                if value.child_session_id is not None:
                    self._names[str(value.child_session_id)] = f"judge {value.judge}"
            case SubagentEvent():
                self._names[value.child_session_id] = f"{value.agent} {value.subagent_id}"
            case HistoryCompacted():
                self._compactions.append((envelope.at_us, envelope.seq))

    def _book(self, envelope: Envelope, value: Reserved | Settled, cost_usd: float) -> None:
        added = cost_usd - self._costs.get(value.reservation_id, 0.0)
        self._costs[value.reservation_id] = cost_usd
        self.spent_usd += added
        self.elapsed_ms = max(self.elapsed_ms, *value.elapsed_above_ms[:1], value.elapsed_ms)
        if len(value.lineage) > 1:
            child = value.lineage[1]
            self._children[child] = self._children.get(child, 0.0) + added
        self._curve.append((envelope.at_us, self.spent_usd, self.steps))

    def _count(self, envelope: Envelope, value: ProviderUsage) -> None:
        used, use = value.usage, self.models.setdefault(value.model, ModelUse())
        use.calls += 1
        use.input_tokens += used.input_tokens or 0
        use.output_tokens += used.output_tokens or 0
        use.cached_tokens += used.cached_tokens or 0
        if value.cost_usd is not None:
            use.cost_usd = (use.cost_usd or 0.0) + value.cost_usd
        if not self._is_booked:
            self.steps += 1
            self.spent_usd += value.cost_usd or 0.0
            self._curve.append((envelope.at_us, self.spent_usd, self.steps))
        if value.purpose == "answer":
            tokens = used.input_tokens or 0
            ratio = value.context_ratio
            if ratio is None and (window := known_window(value.model)):
                ratio = tokens / window
            self._context.append((envelope.at_us, envelope.seq, tokens, ratio))

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON; times in milliseconds since 1970."""
        limits = self.limits
        return {
            "spent_usd": self.spent_usd,
            "steps": self.steps,
            "retries": self.retries,
            "elapsed_s": self.elapsed_ms / 1000,
            "ceilings": {
                "cost_usd": None if limits is None else limits.max_cost_usd,
                "steps": None if limits is None else limits.max_steps,
                "retries": None if limits is None else limits.max_retries,
                "time_s": None if limits is None else limits.timeout,
            },
            "curve": [[at_us / 1000, usd, steps] for at_us, usd, steps in thinned(self._curve)],
            "models": [
                {
                    "model": name,
                    "calls": use.calls,
                    "input_tokens": use.input_tokens,
                    "output_tokens": use.output_tokens,
                    "cached_tokens": use.cached_tokens,
                    "cost_usd": use.cost_usd,
                }
                for name, use in self.models.items()
            ],
            "children": [
                {"chain": chain, "name": self._names.get(chain, chain[:8]), "cost_usd": cost}
                for chain, cost in self._children.items()
            ],
            "judges_usd": self.judges_usd,
            "context": [
                [at_us / 1000, seq, tokens, ratio] for at_us, seq, tokens, ratio in thinned(self._context)
            ],
            "compactions": [[at_us / 1000, seq] for at_us, seq in self._compactions],
        }


def thinned(points: Sequence[Any]) -> Sequence[Any]:
    """Return at most about `MAX_POINTS` of a curve's points: the first and last one, and every so many."""
    every = -(-len(points) // MAX_POINTS)
    if every <= 1:
        return points
    kept = list(points[::every])
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]

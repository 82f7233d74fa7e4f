"""Budgets of nested evaluations that draw on the run's own budget."""

from __future__ import annotations

from typing import Any

from treenail.errors import BudgetExceededError
from treenail.state import Budget, BudgetRemaining, BudgetTracker, TokenUsage


class SharedBudgetTracker(BudgetTracker):
    """Counts a nested evaluation against the run's tracker, and against a budget of its own if it has one.

    The run's tracker records this usage under separate ids (`nested:...`), apart from the run's own.
    """

    def __init__(self, run: BudgetTracker, own: Budget | None = None) -> None:
        super().__init__(own or run.budget)
        self._run = run

    def record_cumulative(self, evaluation_id: str, usage: TokenUsage, cost_usd: float | None = None) -> None:
        """Record what an evaluation has used so far, here and in the run's tracker."""
        super().record_cumulative(evaluation_id, usage, cost_usd)
        self._run.record_cumulative(f"nested:{evaluation_id}", usage, cost_usd)

    def check(self) -> None:
        """Raise `BudgetExceededError` if a ceiling was passed, its own or the run's."""
        super().check()
        self._run.check()

    def remaining(self) -> BudgetRemaining:
        """Return what is left of each ceiling: the smaller of its own and the run's."""
        mine, theirs = super().remaining(), self._run.remaining()

        def less(name: str) -> Any:
            both = (getattr(mine, name), getattr(theirs, name))
            return min((each for each in both if each is not None), default=None)

        names = ("time", "total_tokens", "input_tokens", "output_tokens", "cost_usd")
        return BudgetRemaining(**{name: less(name) for name in names})


class LentBudgetTracker(SharedBudgetTracker):
    """The run's tracker as a judge gets it: the judge can read all usage and add to it, not reset it."""

    @property
    def consumed(self) -> TokenUsage:
        """The tokens that the run has used, its judges included."""
        return self._run.consumed

    @property
    def consumed_cost_usd(self) -> float:
        """The money that the run has spent, its judges included."""
        return self._run.consumed_cost_usd


def refuse_exhausted(tracker: BudgetTracker) -> None:
    """Raise `BudgetExceededError` if nothing is left of a ceiling. Reaching it is enough."""
    tracker.check()
    left = tracker.remaining()
    names = {"deadline": "time", "input": "input_tokens", "output": "output_tokens", "total": "total_tokens"}
    for dimension, name in {**names, "cost": "cost_usd"}.items():
        amount = getattr(left, name)
        if amount is not None and amount <= type(amount)(0):
            raise BudgetExceededError(
                f"the run's budget has nothing left for a judge ({dimension}); raise the ceiling, or give "
                f"the judge a budget of its own",
                budget=tracker.budget,
                consumed=tracker.consumed,
                exceeded_dimension=dimension,
            )

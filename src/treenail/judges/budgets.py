"""Budgets of nested evaluations that draw on the run's own budget.

The run's tracker is behind a function in each of them, so that no attribute leads to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treenail.errors import BudgetExceededError
from treenail.state import Budget, BudgetRemaining, BudgetSnapshot, BudgetTracker, TokenUsage


class SharedBudgetTracker(BudgetTracker):
    """Counts a nested evaluation against the run's tracker, and against a budget of its own if it has one.

    The run's tracker records this usage under separate ids (`nested:...`), apart from the run's own.
    """

    def __init__(self, run: BudgetTracker, own: Budget | None = None) -> None:
        super().__init__(own or run.budget)
        self._run: Callable[[], BudgetTracker] = lambda: run

    def record_cumulative(self, evaluation_id: str, usage: TokenUsage, cost_usd: float | None = None) -> None:
        """Record what an evaluation has used so far, here and in the run's tracker."""
        super().record_cumulative(evaluation_id, usage, cost_usd)
        self._run().record_cumulative(f"nested:{evaluation_id}", usage, cost_usd)

    def check(self) -> None:
        """Raise `BudgetExceededError` if a ceiling was passed, its own or the run's."""
        super().check()
        self._run().check()

    def remaining(self) -> BudgetRemaining:
        """Return what is left of each ceiling: the smaller of its own and the run's."""
        mine, theirs = super().remaining(), self._run().remaining()

        def less(name: str) -> Any:
            both = (getattr(mine, name), getattr(theirs, name))
            return min((each for each in both if each is not None), default=None)

        names = ("time", "total_tokens", "input_tokens", "output_tokens", "cost_usd")
        return BudgetRemaining(**{name: less(name) for name in names})


class LentBudgetTracker(BudgetTracker):
    """The run's tracker as a judge gets it: it shows the run's usage; what is recorded in it stays in it.

    A nested evaluation that is given one is booked to the run, by the evaluator.
    """

    def __init__(self, run: BudgetTracker) -> None:
        super().__init__(run.budget)
        self._run: Callable[[], BudgetTracker] = lambda: run

    def snapshot(self, *, tag: str | None = None) -> BudgetSnapshot:
        """Return what the run has spent so far, its judges included, and what was recorded here."""
        return BudgetSnapshot((*self._run().snapshot().entries, *super().snapshot().entries))


def booked_to(tracker: BudgetTracker) -> BudgetTracker:
    """Return the tracker that a nested evaluation is booked to: the run's, if this one is lent to a judge."""
    return tracker._run() if isinstance(tracker, LentBudgetTracker) else tracker


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

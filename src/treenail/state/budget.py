"""Tokens, money and time: what may be spent, and what was.

A `Budget` is a set of ceilings, a `BudgetTracker` counts against it. Spend is a
fact: nothing here takes it back. Providers report usage per evaluation as a
running total, so a report replaces the earlier one of the same evaluation, and
what was consumed is the sum over evaluations.

The tracker can be snapshotted, so that a restarted process knows what was
spent. Restoring joins the snapshot with what is known already, taking the
larger figure of each: after a restart that brings the counts back, and in a
rollback it changes nothing. The join is commutative, associative and
idempotent, so that it does not matter how often or in which order snapshots
arrive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NoReturn, TypeVar

from treenail.clock import Clock, SystemClock, WallClock, whole_clock
from treenail.codec import sparse
from treenail.errors import BudgetExceededError, DeadlineExceededError, UsageError
from treenail.log import SlicePolicy

MIN_DEADLINE_AHEAD: Final = timedelta(seconds=1)
"""How far ahead a deadline made by `Deadline.create` must at least be."""

COST_TOLERANCE_USD: Final = 1e-9
"""How far the cost may pass its ceiling unnoticed: three times 0.1 is a little more than 0.3 in floats."""

N = TypeVar("N", int, float)

Dimension = Literal["deadline", "input", "output", "total", "cost"]
"""What a budget can run out of, in the order in which `BudgetTracker.check` checks it."""


@sparse
@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens that were used; None stands for "the provider did not say".

    Cached tokens are part of the input and reasoning tokens are part of the output: neither is
    added to the total again.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 0):
                _check_count(f"TokenUsage.{name}", count, least=0)

    @property
    def total(self) -> int | None:
        """Input and output together; None if neither is known."""
        return _add(self.input_tokens, self.output_tokens)

    @property
    def total_tokens(self) -> int | None:
        """The same as `total`."""
        return self.total

    def __add__(self, other: TokenUsage) -> TokenUsage:
        """Add two usages; what is unknown on one side counts as nothing, on both sides it stays unknown."""
        if not isinstance(other, TokenUsage):
            return NotImplemented
        return TokenUsage(
            _add(self.input_tokens, other.input_tokens),
            _add(self.output_tokens, other.output_tokens),
            _add(self.cached_tokens, other.cached_tokens),
            _add(self.reasoning_tokens, other.reasoning_tokens),
        )

    def __or__(self, other: TokenUsage) -> TokenUsage:
        """Join two reports about the same spend: the larger figure of each kind."""
        if not isinstance(other, TokenUsage):
            return NotImplemented
        return TokenUsage(
            _larger(self.input_tokens, other.input_tokens),
            _larger(self.output_tokens, other.output_tokens),
            _larger(self.cached_tokens, other.cached_tokens),
            _larger(self.reasoning_tokens, other.reasoning_tokens),
        )


@dataclass(frozen=True, slots=True, init=False)
class Deadline:
    """A point in time after which work must stop.

    `Deadline(when)` takes any aware time, past ones included, so that a deadline can be derived
    from one that is almost over. `Deadline.create` is for people: it refuses what is not at least
    a second ahead.
    """

    expires_at: datetime
    started_at: datetime
    """When the time began to run; now, if it is not given."""
    clock: Clock = field(compare=False, repr=False)

    def __init__(
        self, expires_at: datetime, started_at: datetime | None = None, clock: WallClock | None = None
    ) -> None:
        clock = clock or SystemClock()
        _check_aware("Deadline.expires_at", expires_at)
        if started_at is None:
            started_at = clock.now()
        _check_aware("Deadline.started_at", started_at)
        object.__setattr__(self, "expires_at", expires_at)
        object.__setattr__(self, "started_at", started_at)
        object.__setattr__(self, "clock", whole_clock(clock))

    @classmethod
    def create(
        cls, expires_at: datetime, *, started_at: datetime | None = None, clock: WallClock | None = None
    ) -> Deadline:
        """Make a deadline that leaves time to work: at least one second from now."""
        deadline = cls(expires_at, started_at, clock)
        if deadline.remaining() < MIN_DEADLINE_AHEAD:
            raise UsageError(
                f"Deadline.expires_at must be at least {MIN_DEADLINE_AHEAD.total_seconds():g} s ahead; "
                f"{expires_at.isoformat()} is {deadline.remaining().total_seconds():g} s from now"
            )
        return deadline

    @classmethod
    def after(cls, duration: timedelta, *, clock: WallClock | None = None) -> Deadline:
        """Make a deadline that is this long from now."""
        clock = clock or SystemClock()
        now = clock.now()
        return cls(now + duration, now, clock)

    @property
    def at(self) -> datetime:
        """The same as `expires_at`."""
        return self.expires_at

    def remaining(self) -> timedelta:
        """Return the time left; negative once the deadline has passed."""
        return self.expires_at - self.clock.now()

    def elapsed(self) -> timedelta:
        """Return the time since `started_at`."""
        return self.clock.now() - self.started_at

    def passed(self) -> bool:
        """Tell whether no time is left."""
        return self.remaining() <= timedelta(0)

    def raise_if_passed(self, what: str) -> None:
        """Raise `DeadlineExceededError`, naming what was to be done, if no time is left."""
        remaining = self.remaining()
        if remaining <= timedelta(0):
            raise DeadlineExceededError(
                f"{what}: the deadline {self.expires_at.isoformat()} passed "
                f"{-remaining.total_seconds():g} s ago; give it more time, or resume with a new deadline"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """Ceilings for a run. At least one is set; each is positive; reaching one exactly is allowed."""

    deadline: Deadline | None = None
    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost_usd: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_total_tokens", "max_input_tokens", "max_output_tokens"):
            _check_count(f"Budget.{name}", getattr(self, name), least=1)
        _check_cost("Budget.max_cost_usd", self.max_cost_usd)
        if self.max_cost_usd is not None and self.max_cost_usd <= 0:
            raise UsageError(f"Budget.max_cost_usd must be more than 0, not {self.max_cost_usd!r}")
        ceilings = (self.max_total_tokens, self.max_input_tokens, self.max_output_tokens, self.max_cost_usd)
        if self.deadline is None and all(ceiling is None for ceiling in ceilings):
            raise UsageError(
                "a Budget needs at least one ceiling: deadline, max_total_tokens, max_input_tokens, "
                "max_output_tokens or max_cost_usd"
            )


@dataclass(frozen=True, slots=True)
class BudgetRemaining:
    """What is left of each ceiling: None where there is none, negative where it was passed."""

    time: timedelta | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """What one evaluation has spent."""

    evaluation_id: str
    usage: TokenUsage
    cost_usd: float | None = None
    """None if no price was known."""

    def __post_init__(self) -> None:
        _check_cost("BudgetEntry.cost_usd", self.cost_usd)

    def __or__(self, other: BudgetEntry) -> BudgetEntry:
        """Join two reports about the same evaluation: the larger figure of each kind."""
        if not isinstance(other, BudgetEntry):
            return NotImplemented
        return BudgetEntry(
            self.evaluation_id, self.usage | other.usage, _larger(self.cost_usd, other.cost_usd)
        )


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """What was spent up to a moment, evaluation by evaluation, in the order of their first reports."""

    entries: tuple[BudgetEntry, ...] = ()

    @property
    def usage(self) -> Mapping[str, TokenUsage]:
        """The tokens by evaluation id."""
        return MappingProxyType({entry.evaluation_id: entry.usage for entry in self.entries})


class BudgetTracker:
    """Counts what is spent against a budget. Safe to use from many threads.

    A tracker belongs in the resources of a run. Its policy is LOG: a rollback does not refund.
    """

    snapshot_policy: ClassVar[SlicePolicy] = SlicePolicy.LOG

    def __init__(self, budget: Budget) -> None:
        self.budget: Final = budget
        self._lock = threading.Lock()
        self._entries: dict[str, BudgetEntry] = {}

    def record_cumulative(self, evaluation_id: str, usage: TokenUsage, cost_usd: float | None = None) -> None:
        """Record what an evaluation has used so far, in place of its earlier report.

        An unknown cost (None) leaves the cost that is known already.
        """
        _check_cost("cost_usd", cost_usd)
        with self._lock:
            earlier = self._entries.get(evaluation_id)
            if cost_usd is None and earlier is not None:
                cost_usd = earlier.cost_usd
            self._entries[evaluation_id] = BudgetEntry(evaluation_id, usage, cost_usd)

    @property
    def consumed(self) -> TokenUsage:
        """The tokens used, over all evaluations."""
        return _sum_usage(self.snapshot())

    @property
    def consumed_cost_usd(self) -> float:
        """The money spent, over all evaluations; those without a known price count as nothing."""
        return _sum_cost(self.snapshot())

    def check(self) -> None:
        """Raise `BudgetExceededError` if a ceiling was passed.

        The first of these decides: deadline, input, output, total, cost. A token or cost ceiling
        is passed when more than it was spent; the deadline, when no time is left.
        """
        # One snapshot, so that all dimensions are judged at the same moment.
        spent = self.snapshot()
        consumed = _sum_usage(spent)
        budget = self.budget
        if budget.deadline is not None and budget.deadline.passed():
            late = -budget.deadline.remaining().total_seconds()
            self._exceeded("deadline", consumed, f"its deadline passed {late:g} s ago")
        counts: tuple[tuple[Dimension, int | None, int | None], ...] = (
            ("input", consumed.input_tokens, budget.max_input_tokens),
            ("output", consumed.output_tokens, budget.max_output_tokens),
            ("total", consumed.total, budget.max_total_tokens),
        )
        for dimension, used, ceiling in counts:
            if ceiling is not None and (used or 0) > ceiling:
                self._exceeded(dimension, consumed, f"{used} {dimension} tokens of {ceiling} were used")
        if budget.max_cost_usd is not None:
            cost = _sum_cost(spent)
            if cost > budget.max_cost_usd + COST_TOLERANCE_USD:
                self._exceeded("cost", consumed, f"{cost:.6f} USD of {budget.max_cost_usd:g} were spent")

    def remaining(self) -> BudgetRemaining:
        """Return what is left of each ceiling."""
        spent = self.snapshot()
        consumed = _sum_usage(spent)
        budget = self.budget
        return BudgetRemaining(
            time=None if budget.deadline is None else budget.deadline.remaining(),
            total_tokens=_left(budget.max_total_tokens, consumed.total),
            input_tokens=_left(budget.max_input_tokens, consumed.input_tokens),
            output_tokens=_left(budget.max_output_tokens, consumed.output_tokens),
            cost_usd=None if budget.max_cost_usd is None else budget.max_cost_usd - _sum_cost(spent),
        )

    def snapshot(self, *, tag: str | None = None) -> BudgetSnapshot:
        """Return what was spent so far. The tag is the caller's; a budget snapshot carries none."""
        with self._lock:
            return BudgetSnapshot(tuple(self._entries.values()))

    def restore(self, snapshot: BudgetSnapshot) -> None:
        """Learn of spend that a snapshot knows. Nothing that is known already is refunded.

        A snapshot with an impossible figure, such as a negative one, is refused whole.
        """
        with self._lock:
            joined = dict(self._entries)
            for entry in snapshot.entries:
                # Joined even with nothing: decoding runs no constructor, so this is where a figure
                # from a damaged file is checked.
                known = joined.get(entry.evaluation_id, BudgetEntry(entry.evaluation_id, TokenUsage()))
                joined[entry.evaluation_id] = known | entry
            self._entries = joined

    def _exceeded(self, dimension: Dimension, consumed: TokenUsage, what: str) -> NoReturn:
        raise BudgetExceededError(
            f"the budget is spent: {what}; raise the ceiling to continue",
            budget=self.budget,
            consumed=consumed,
            exceeded_dimension=dimension,
        )


def _sum_usage(snapshot: BudgetSnapshot) -> TokenUsage:
    return sum((entry.usage for entry in snapshot.entries), start=TokenUsage())


def _sum_cost(snapshot: BudgetSnapshot) -> float:
    return math.fsum(entry.cost_usd for entry in snapshot.entries if entry.cost_usd is not None)


def _add(left: int | None, right: int | None) -> int | None:
    if left is None and right is None:
        return None
    return (left or 0) + (right or 0)


def _left(ceiling: int | None, used: int | None) -> int | None:
    return None if ceiling is None else ceiling - (used or 0)


def _larger(left: N | None, right: N | None) -> N | None:
    if left is None:
        return right
    return left if right is None else max(left, right)


def _check_aware(name: str, moment: datetime) -> None:
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise UsageError(f"{name} needs a timezone, but {moment.isoformat()} has none; use datetime.now(UTC)")


def _check_count(name: str, value: object, *, least: int) -> None:
    # A bool is an int to Python, and never what somebody means by a number of tokens.
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least} or None, not {value!r}")


def _check_cost(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} must be a finite number of dollars, 0 or more, or None, not {value!r}")

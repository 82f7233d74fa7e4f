"""Ceilings, the reasons for stopping, and the checks of numbers that both and the hooks use.

Money is counted in whole pico-dollars (1e-12 USD), so that adding a price a hundred times gives a hundred
times the price, and "exactly N calls fit" does not depend on how binary fractions round. Dollars appear only
at the edge, as floats.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from treenail.errors import UsageError

if TYPE_CHECKING:
    from treenail.containment.pots import BudgetBackend

PICO = 1_000_000_000_000

OnUnknownPrice = Literal["halt", "warn", "estimate"]
"""What becomes of a call to a model without a known price under a ceiling in USD."""


class StopReason(StrEnum):
    """Why containment stopped a call or a chain; the `event_type` of the `SafetyEvent` that tells of it."""

    BUDGET_EXCEEDED = "budget_exceeded"
    RETRY_BUDGET_EXCEEDED = "retry_budget_exceeded"
    CIRCUIT_OPEN = "circuit_open"
    STEP_LIMIT_EXCEEDED = "step_limit_exceeded"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    PROVIDER_RATE_LIMIT = "provider_rate_limit"
    PROVIDER_ERROR = "provider_error"


def to_pico(usd: float) -> int:
    """Return that many dollars in whole pico-dollars."""
    pico = usd * PICO
    # Beyond what a float holds in pico-dollars, cents do not matter.
    return round(pico) if math.isfinite(pico) else int(usd) * PICO


def to_ms(seconds: float) -> int:
    """Return that many seconds in whole milliseconds."""
    ms = seconds * 1000
    return round(ms) if math.isfinite(ms) else int(sys.float_info.max)


def to_usd(pico: int) -> float:
    """Return that many pico-dollars in dollars."""
    return pico / PICO


def number(owner: str, field: str, value: object, *, zero_ok: bool = False) -> float:
    """Return `value` if it is a positive finite number; else refuse it, naming the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{owner}.{field} must be a number, not {value!r} ({type(value).__name__})")
    if not abs(value) <= sys.float_info.max or value < 0 or (value == 0 and not zero_ok):
        least = "zero or more" if zero_ok else "greater than zero"
        raise UsageError(f"{owner}.{field} must be finite and {least}, not {value!r:.40}")
    return value


def integer(owner: str, field: str, value: object, *, zero_ok: bool = False) -> int:
    """Return `value` if it is a positive whole number; else refuse it, naming the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{owner}.{field} must be a whole number, not {value!r} ({type(value).__name__})")
    number(owner, field, value, zero_ok=zero_ok)
    return value


def fraction(owner: str, field: str, value: object, *, zero_ok: bool = False) -> float:
    """Return `value` if it is a positive number of at most 1; else refuse it, naming the field."""
    checked = number(owner, field, value, zero_ok=zero_ok)
    if checked > 1:
        raise UsageError(f"{owner}.{field} must be at most 1, not {value!r}")
    return checked


class Check(Protocol):
    """`number`, `integer` or `fraction`."""

    def __call__(self, owner: str, field: str, value: object, *, zero_ok: bool = False) -> object:
        """Refuse a value that is not one."""
        ...


def check_fields(
    record: object, check: Check, *fields: str, zero_ok: bool = False, none_ok: bool = False
) -> None:
    """Check some fields of a record; None passes if `none_ok`."""
    for field in fields:
        value = getattr(record, field)
        if value is not None or not none_ok:
            check(type(record).__name__, field, value, zero_ok=zero_ok)


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Hard ceilings for one chain. `None` says on purpose that there is no such ceiling.

    Zero, negative, infinite and NaN values are refused, and so are booleans and strings; only
    `timeout_ms` may be 0, which means that there is no timeout.
    """

    max_cost_usd: float | None
    """USD that the whole chain may spend, its children included."""
    max_steps: int | None
    """Calls that the chain may dispatch; a failed attempt is a step."""
    max_retries_total: int | None
    """Failures that the chain may answer with another attempt."""
    timeout_ms: int
    """Wall-clock time for the whole chain in milliseconds; 0 means none."""
    on_unknown_price: OnUnknownPrice = "halt"
    """What becomes of a call to a model without a known price while `max_cost_usd` is set."""
    budget_backend: BudgetBackend | None = None
    """A pot of money shared with other chains; `max_cost_usd` is then its ceiling too."""
    max_depth: int | None = None
    """How many levels of children may be below the chain; 0 for none at all."""
    pots: tuple[tuple[BudgetBackend, float], ...] = ()
    """Further pots of shared money, each with its own ceiling in USD: such as a tenant's, or a day's."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_fields(self, number, "max_cost_usd", none_ok=True)
        check_fields(self, integer, "max_steps", "max_retries_total", none_ok=True)
        check_fields(self, integer, "max_depth", zero_ok=True, none_ok=True)
        check_fields(self, integer, "timeout_ms", zero_ok=True)
        if self.on_unknown_price not in ("halt", "warn", "estimate"):
            raise UsageError(
                f'{owner}.on_unknown_price must be "halt", "warn" or "estimate", '
                f"not {self.on_unknown_price!r}"
            )
        if self.budget_backend is not None and self.max_cost_usd is None:
            raise UsageError(f"{owner}.budget_backend needs {owner}.max_cost_usd, which is its ceiling")
        for _, ceiling in self.pots:
            number(owner, "pots", ceiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The short form of `ExecutionConfig`: say only what you want limited.

    `timeout` is in seconds. What is left out has no ceiling.
    """

    max_cost_usd: float | None = None
    max_steps: int | None = None
    max_retries: int | None = None
    timeout: float | None = None
    on_unknown_price: OnUnknownPrice = "halt"
    max_depth: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, number, "max_cost_usd", "timeout", none_ok=True)
        check_fields(self, integer, "max_steps", "max_retries", none_ok=True)
        check_fields(self, integer, "max_depth", zero_ok=True, none_ok=True)
        self.to_config()

    def to_config(self) -> ExecutionConfig:
        """Return the same ceilings as an `ExecutionConfig`."""
        # A timeout below a millisecond is still a timeout: rounding it to 0 would lift it.
        timeout_ms = 0 if self.timeout is None else max(1, to_ms(self.timeout))
        return ExecutionConfig(
            max_cost_usd=self.max_cost_usd,
            max_steps=self.max_steps,
            max_retries_total=self.max_retries,
            timeout_ms=timeout_ms,
            on_unknown_price=self.on_unknown_price,
            max_depth=self.max_depth,
        )


UNLIMITED = ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=None, timeout_ms=0)
"""No ceiling at all."""


def as_config(limits: ExecutionConfig | Limits) -> ExecutionConfig:
    """Return the ceilings in their long form, whichever form they were given in."""
    if isinstance(limits, Limits):
        return limits.to_config()
    if not isinstance(limits, ExecutionConfig):
        raise UsageError(
            f"ExecutionContext.config must be an ExecutionConfig or Limits, not {limits!r} "
            f"({type(limits).__name__})"
        )
    return limits

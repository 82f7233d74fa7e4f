"""Ceilings over all workers: money that the runs of a tenant, and all runs of a day, may spend together.

A run's own ceiling is in its log. These are pots in the log's database (`SharedPot`), named after the tenant
and the day: each call reserves from all of them before it is made, on whichever worker that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

from treenail.containment import BudgetBackend, HasPots, SharedPot, number
from treenail.engine.submission import TENANT, SharedLog


@dataclass(frozen=True, slots=True)
class SharedCeilings:
    """What runs may spend together, in USD. None for no ceiling."""

    per_day: float | None = None
    """All runs, in a day (UTC)."""
    per_tenant_day: float | None = None
    """The runs with the same tag `tenant`, in a day (UTC)."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Another `per_tenant_day` for some tenants."""

    def __post_init__(self) -> None:
        for name in ("per_day", "per_tenant_day"):
            if getattr(self, name) is not None:
                number("SharedCeilings", name, getattr(self, name))
        for tenant, ceiling in self.tenants.items():
            number("SharedCeilings", f"tenants[{tenant!r}]", ceiling)

    def pots(
        self, log: SharedLog, tags: Mapping[str, str], now: datetime
    ) -> Sequence[tuple[BudgetBackend, float]]:
        """Return the pots that a run draws from, with their ceilings.

        A turn draws from the pots of the day on which it began, or was resumed.
        """
        tenant, day = tags.get(TENANT), f"{now:%Y-%m-%d}"
        wanted = [(f"day/{day}", self.per_day)]
        if tenant is not None:
            wanted.append((f"tenant/{tenant}/{day}", self.tenants.get(tenant, self.per_tenant_day)))
        counted = cast(HasPots, log)
        return [(SharedPot(counted, name), ceiling) for name, ceiling in wanted if ceiling is not None]

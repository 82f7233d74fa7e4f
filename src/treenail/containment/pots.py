"""Money shared between chains, and ways to divide a parent's money among children."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from treenail.clock import new_id
from treenail.containment.limits import fraction, number, to_pico, to_usd
from treenail.errors import UsageError


class BudgetBackend(Protocol):
    """A pot of money that several chains draw from, in this process or beyond it.

    `reserve` checks and takes in one step. A reservation never expires by itself: a call that was
    dispatched and of which nothing more was heard counts in full.
    """

    def reserve(self, amount: float, ceiling: float) -> str | None:
        """Set `amount` USD aside if spent and reserved money stays within `ceiling`.

        Return an id, or None.
        """
        ...

    def commit(self, reservation_id: str, amount: float) -> None:
        """Replace a reservation by what was really spent, also if that is more."""
        ...

    def rollback(self, reservation_id: str) -> None:
        """Drop the reservation of a call that was never dispatched."""
        ...

    def add(self, amount: float) -> float:
        """Record money spent without a reservation; return the total."""
        ...

    def get(self) -> float:
        """Return what is spent."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...

    def close(self) -> None:
        """Let go of connections, if there are any."""
        ...


class PotStore(Protocol):
    """Where the money of shared pots is counted, in pico-dollars by the pot's name; each move is one step."""

    def reserve(self, name: str, amount: int, ceiling: int) -> str | None:
        """Set an amount aside if the pot stays within the ceiling. Return the reservation's id, or None."""
        ...

    def settle(self, name: str, reservation_id: str, amount: int) -> None:
        """Replace a reservation by what was spent. Raises `UsageError` if it is not open."""
        ...

    def add(self, name: str, amount: int) -> int:
        """Record money that was spent without a reservation. Return all that is spent."""
        ...

    def sums(self, name: str) -> tuple[int, int]:
        """Return what is spent of a pot and what is reserved."""
        ...

    def reset(self, name: str) -> None:
        """Forget what was spent of a pot and what is reserved."""
        ...


class HasPots(Protocol):
    """A log that also counts shared pots, as a `SqliteLog` does."""

    @property
    def pots(self) -> PotStore:
        """Its pots."""
        ...


class SharedPot:
    """A pot for the chains of many processes, counted in a log that all of them open.

    A call is made only when its reservation is in the store, so that no two processes spend the same money.
    If a process is killed, what it had reserved stays reserved: its call may have been made. Every process
    names the same log file and the same pot, and sets the ceiling itself.
    """

    def __init__(self, log: HasPots, name: str) -> None:
        if not name:
            raise UsageError("a shared pot needs a name; processes that name the same pot share it")
        self.name = name
        self._pots = log.pots

    def reserve(self, amount: float, ceiling: float) -> str | None:
        """Set `amount` USD aside if spent and reserved money stays within `ceiling`.

        Return an id, or None.
        """
        return self._pots.reserve(self.name, _pico(amount), to_pico(ceiling))

    def commit(self, reservation_id: str, amount: float) -> None:
        """Replace a reservation by what was really spent, also if that is more."""
        self._pots.settle(self.name, reservation_id, _pico(amount))

    def rollback(self, reservation_id: str) -> None:
        """Drop the reservation of a call that was never dispatched."""
        self._pots.settle(self.name, reservation_id, 0)

    def add(self, amount: float) -> float:
        """Record money spent without a reservation; return the total."""
        return to_usd(self._pots.add(self.name, _pico(amount)))

    def get(self) -> float:
        """Return what is spent."""
        return to_usd(self._pots.sums(self.name)[0])

    def get_reserved(self) -> float:
        """Return what is set aside, for calls under way and for those whose process died."""
        return to_usd(self._pots.sums(self.name)[1])

    def reset(self) -> None:
        """Forget everything, for all processes."""
        self._pots.reset(self.name)

    def close(self) -> None:
        """Do nothing: the log is its owner's."""


class LocalBudgetBackend:
    """A pot for the chains of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = 0
        self._reserved: dict[str, int] = {}

    def reserve(self, amount: float, ceiling: float) -> str | None:
        """Set `amount` USD aside if spent and reserved money stays within `ceiling`.

        Return an id, or None.
        """
        wanted, most = _pico(amount), to_pico(ceiling)
        with self._lock:
            committed = self._spent + sum(self._reserved.values())
            if committed >= most or committed + wanted > most:
                return None
            reservation_id = new_id().hex
            self._reserved[reservation_id] = wanted
            return reservation_id

    def commit(self, reservation_id: str, amount: float) -> None:
        """Replace a reservation by what was really spent, also if that is more."""
        spent = _pico(amount)
        with self._lock:
            self._take(reservation_id)
            self._spent += spent

    def rollback(self, reservation_id: str) -> None:
        """Drop the reservation of a call that was never dispatched."""
        with self._lock:
            self._take(reservation_id)

    def add(self, amount: float) -> float:
        """Record money spent without a reservation; return the total."""
        spent = _pico(amount)
        with self._lock:
            self._spent += spent
            return to_usd(self._spent)

    def get(self) -> float:
        """Return what is spent."""
        with self._lock:
            return to_usd(self._spent)

    def get_reserved(self) -> float:
        """Return what is set aside."""
        with self._lock:
            return to_usd(sum(self._reserved.values()))

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._spent = 0
            self._reserved.clear()

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _take(self, reservation_id: str) -> None:
        if self._reserved.pop(reservation_id, None) is None:
            raise UsageError(f"there is no open reservation {reservation_id!r}; it was settled before")


def _pico(amount: float) -> int:
    return to_pico(number("BudgetBackend", "amount", amount, zero_ok=True))


class Allocator(Protocol):
    """A way to divide what is left among children."""

    def allocate(self, remaining_usd: float, children: Sequence[str]) -> Mapping[str, float]:
        """Return each child's share; together they are at most `remaining_usd`."""
        ...


class FairShareAllocator:
    """The same for each child."""

    def allocate(self, remaining_usd: float, children: Sequence[str]) -> Mapping[str, float]:
        """Return each child's share."""
        return _divide(remaining_usd, dict.fromkeys(children, 1.0))


class WeightedAllocator:
    """Shares in proportion to weights; a child without a weight counts as 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {
            child: number("WeightedAllocator", child, weight) for child, weight in weights.items()
        }

    def allocate(self, remaining_usd: float, children: Sequence[str]) -> Mapping[str, float]:
        """Return each child's share."""
        return _divide(remaining_usd, {child: self._weights.get(child, 1.0) for child in children})


class DynamicAllocator:
    """Shares in proportion to what each child was seen to spend.

    `least_share` of an equal part is certain.
    """

    def __init__(self, least_share: float = 0.25) -> None:
        self._least = fraction("DynamicAllocator", "least_share", least_share, zero_ok=True)
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def observe(self, child: str, cost_usd: float) -> None:
        """Take note of what a child spent."""
        number("DynamicAllocator", "cost_usd", cost_usd, zero_ok=True)
        with self._lock:
            self._seen[child] = self._seen.get(child, 0.0) + cost_usd

    def allocate(self, remaining_usd: float, children: Sequence[str]) -> Mapping[str, float]:
        """Return each child's share."""
        if not children:
            return {}
        with self._lock:
            seen = {child: self._seen.get(child, 0.0) for child in children}
        total = sum(seen.values())
        if total <= 0:
            return _divide(remaining_usd, dict.fromkeys(children, 1.0))
        even = 1.0 / len(children)
        weights = {
            child: self._least * even + (1 - self._least) * spent / total for child, spent in seen.items()
        }
        return _divide(remaining_usd, weights)


def _divide(remaining_usd: float, weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    whole = max(0, to_pico(remaining_usd))
    # Rounded down, so that the shares never add up to more than there is.
    return {child: to_usd(int(whole * weight / total)) for child, weight in weights.items()}

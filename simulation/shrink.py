"""Find a small set of faults that still breaks the promise: the others are left out."""

from __future__ import annotations

from simulation.run import Outcome, simulate

MAX_TRIES = 200


def shrunk(outcome: Outcome) -> tuple[Outcome, str]:
    """Return the outcome with as few faults as can be found, and the faults that it leaves out.

    A world's other decisions do not change when a fault is left out, so it can be left out alone.
    """
    spared: set[str] = set()
    shortest, tries = outcome, 0
    size = max(len(outcome.strikes) // 2, 1)
    while size and tries < MAX_TRIES:
        for chunk in _chunks(shortest.strikes, size):
            tries += 1
            found = simulate(outcome.seed, frozenset(spared.union(chunk)))
            if found.problems:
                spared.update(chunk)
                shortest = found
                break
        else:
            size //= 2
    return shortest, ",".join(sorted(spared))


def _chunks(strikes: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    return [strikes[start : start + size] for start in range(0, len(strikes), size)]

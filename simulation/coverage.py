"""Which fault met which place, and which faults never struck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

FAULTS = (
    "kill",
    "stop",
    "disk full",
    "answer lost",
    "torn write",
    "tool raises",
    "throttled",
    "connection lost",
    "cut off",
    "unknown stop",
    "too long",
    "person edits",
    "interrupt",
)
"""Every fault there is: one that never strikes tests nothing."""

EXPECTED = 100
"""After how many worlds each of them must have struck."""


def missing(met: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the faults that never struck."""
    struck = {fault for fault, _ in met}
    return [each for each in FAULTS if each not in struck]


def table(met: Mapping[tuple[str, str], int]) -> str:
    """Show how often each fault struck, and where."""
    lines = []
    for fault in FAULTS:
        places = Counter({place: count for (struck, place), count in met.items() if struck == fault})
        shown = ", ".join(f"{place} {count}" for place, count in places.most_common())
        lines.append(f"  {fault:16}{places.total():7}  {shown}")
    return "\n".join(lines)

"""The footer of a run under way: model, context used, money of its ceiling, step, elapsed time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from treenail.printable import printable_line

if TYPE_CHECKING:
    # `treenail list` writes sums and times as well, and must start quickly.
    from treenail.history import LiveView, TurnCounts

_DOING = ("starting", "thinking", "judging", "compacting", "waiting")
"""What is worth saying of a run; that tools run shows itself."""


Part = tuple[int, str]
"""A part of the footer: how much it matters, and what it says."""


def footer(view: LiveView, width: int, *, elapsed_s: float | None = None) -> str:
    """Write the footer of a turn on one line of at most `width` cells.

    `elapsed_s` is the time until now; by default that of the last report.
    """
    used = view.usage
    parts: list[Part] = []
    if view.status in _DOING:
        parts.append((6, printable_line(view.detail) or view.status))
    if used is not None and used.model:
        parts.append((2, printable_line(used.model)))
    parts += _used(view)
    if used is not None:
        steps = f"step {used.steps}" if used.max_steps is None else f"step {used.steps} of {used.max_steps}"
        parts.append((1, steps))
        parts.append((4, seconds_text(used.elapsed_s if elapsed_s is None else elapsed_s)))
    return _fitting(parts, width)


def idle_footer(model: str, asks: str, view: LiveView | None, width: int) -> str:
    """Write the footer between two turns: the model, what the run has used, and what is asked about."""
    used = () if view is None else _used(view)
    return _fitting([(4, printable_line(model)), *used, (1, asks), (6, "/help")], width)


def _used(view: LiveView) -> list[Part]:
    """Write the context and the money that a run has used."""
    parts: list[Part] = []
    if view.pressure is not None:
        parts.append((3, f"{view.pressure.ratio:.0%} context"))
    if view.usage is not None and (money := money_text(view.usage.spent_usd, view.usage.max_cost_usd)):
        parts.append((5, money))
    return parts


def _fitting(parts: Sequence[Part], width: int) -> str:
    """Join the parts; what matters least is left out if they are too long."""
    kept = list(parts)
    while len(kept) > 1 and cell_len(" · ".join(text for _, text in kept)) > width:
        kept.remove(min(kept))
    line = " · ".join(text for _, text in kept)
    return line if cell_len(line) <= width else set_cell_size(line, width)


def lines_text(added: int, removed: int) -> str:
    """Write how many lines were added and removed."""
    return f"+{added} \u2212{removed}"


def end_text(counts: TurnCounts, undo: str, width: int, how: str = "") -> str:
    """Write what a turn came to, with the command that undoes it: one line, or more in a narrow window.

    `how` it ended comes first, if that is not clear.
    """
    parts = [how] if how else []
    if counts.files:
        parts.append(f"{_counted(counts.files, 'file')} {lines_text(counts.added, counts.removed)}")
    parts.append(_counted(counts.calls, "call"))
    money = money_text(counts.spent_usd, counts.max_cost_usd)
    if money:
        parts.append(money)
    parts.append(seconds_text(counts.elapsed_s))
    if counts.paths != 0:
        parts.append(f"undo: {undo}")
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(lines[-1]) + cell_len(part) + 3 > width - 2:
            lines.append(f"  {part}")
        else:
            lines[-1] += f" · {part}"
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def money_text(spent_usd: float | None, ceiling_usd: float | None) -> str:
    """Write what was spent, of what ceiling; small sums with as many digits as they need."""
    if spent_usd is None and ceiling_usd is None:
        return ""
    spent = "unknown cost" if spent_usd is None else dollars(spent_usd)
    return spent if ceiling_usd is None else f"{spent} of {dollars(ceiling_usd)}"


def dollars(usd: float) -> str:
    """Write a sum of money: cents, and more digits for less than a cent."""
    return f"${usd:.2f}" if usd == 0 or usd >= 0.01 else f"${usd:.4f}"


def seconds_text(seconds: float) -> str:
    """Write a time span for people."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

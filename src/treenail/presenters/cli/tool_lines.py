"""Tool calls as lines: what each is about, how it ended, and the end of what a failed one said."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from treenail.history import about_call, end_of_call, mark_of
from treenail.presenters.cli.footer import lines_text, seconds_text
from treenail.printable import printable, printable_line
from treenail.tools import PLAN_TOOLS
from treenail.turns import PlanEntry, ToolCallBegan, ToolCallFinished

FOLDED_LINES = 6
"""How many lines of a failure are shown."""

_QUIET = frozenset(each.name for each in PLAN_TOOLS)
"""Tools whose success shows itself: the plan is a checklist."""

_NOISE = ("--- output ---", "--- errors ---")
_STYLES = {"●": "green", "✗": "red", "○": "yellow"}
_STEPS = {"done": "✓", "in_progress": "▸", "blocked": "!", "skipped": "–"}  # noqa: RUF001  # a dash


def running_line(call: ToolCallBegan, seconds: float, width: int) -> Text:
    """Draw a call that is under way."""
    end = Text(f" · {seconds_text(seconds)}" if seconds >= 1 else "", style="dim")
    return _line("●", "cyan", call.name, call.arguments, end, width)


def _line(mark: str, style: str, name: str, arguments: str, end: Text, width: int) -> Text:
    """Draw a call on one line; if it is too long, what it is about is cut, and not how it ended."""
    start = Text.assemble((f"{mark} ", style), (printable_line(name), "bold"))
    about = Text(f" {about_call(arguments)}".rstrip())
    about.truncate(max(width - start.cell_len - end.cell_len, 12), overflow="ellipsis")
    return Text.assemble(start, about, end, no_wrap=True, overflow="ellipsis")


def ended_lines(ended: ToolCallFinished, arguments: str, width: int) -> Sequence[RenderableType]:
    """Draw a call that has ended: one line, and the end of what it said if it failed."""
    if ended.success and ended.name in _QUIET:
        return ()
    mark, how = mark_of(ended), end_of_call(ended)
    style = _STYLES[mark]
    end = Text()
    if ended.added is not None and ended.removed is not None:
        end.append(f" {lines_text(ended.added, ended.removed)}", style="dim")
    if how:
        end.append(" · ", style="dim").append(how, style=style)
    if ended.elapsed_ms >= 1_000 and ended.outcome != "held":
        end.append(f" · {seconds_text(ended.elapsed_ms / 1000)}", style="dim")
    return [_line(mark, style, ended.name, arguments, end, width), *_folded(ended)]


def _folded(ended: ToolCallFinished) -> Sequence[RenderableType]:
    """Draw the last lines of what a failed call said."""
    if not ended.tail:
        return ()
    said = [line.rstrip() for line in printable(ended.tail).split("\n")]
    said = [line for line in said if line and line not in _NOISE and not line.startswith("Exit code ")]
    lines = [Text(line, style="red") for line in said[-FOLDED_LINES:]]
    if len(said) > FOLDED_LINES:
        lines.insert(0, Text("…", style="dim"))
    return [Padding(line, (0, 0, 0, 4)) for line in lines]


def plan_lines(entries: Sequence[PlanEntry], height: int) -> Sequence[Text]:
    """Draw a plan as a checklist; of one with more than `height` steps, those around the current one."""
    current = next((at for at, each in enumerate(entries) if each.status in ("in_progress", "pending")), 0)
    first = max(0, min(current - height // 2, len(entries) - height))
    return [
        Text(
            f"  {_STEPS.get(each.status, '○')} {printable_line(each.content)}",
            style="dim" if each.status in ("done", "skipped") else "",
        )
        for each in entries[first : first + height]
    ]

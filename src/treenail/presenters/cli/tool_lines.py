"""Tool calls as lines: what each is about, how it ended, and the end of what a failed one said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
_KEPT_CHARS = 1_000
_OVER = ("done", "skipped")
_STEPS = {"done": "✓", "in_progress": "▸", "blocked": "!", "skipped": "–"}  # noqa: RUF001  # a dash


@dataclass(slots=True)
class Running:
    """A call that is under way."""

    call: ToolCallBegan
    since: float
    waited_s: float = 0.0
    """How long it has waited for a person: that is not its own time."""
    output: str = ""
    """The end of what it has written so far."""

    def add(self, text: str) -> None:
        """Take more of what it writes."""
        self.output = (self.output + text)[-_KEPT_CHARS:]


def running_lines(running: Running, now: float, width: int) -> Sequence[Text]:
    """Draw a call that is under way: one line, and the last line that it has written."""
    call, seconds = running.call, now - running.since - running.waited_s
    end = Text(f" · {seconds_text(seconds)}" if seconds >= 1 else "", style="dim")
    line = _line("●", "cyan", call.name, call.arguments, end, width)
    written = [each for each in running.output.splitlines() if each.strip()]
    if not written:
        return [line]
    last = Text(f"    {printable_line(written[-1].strip())}", style="dim", no_wrap=True, overflow="ellipsis")
    return [line, last]


def _line(mark: str, style: str, name: str, arguments: str, end: Text, width: int) -> Text:
    """Draw a call on one line; if it is too long, what it is about is cut, and not how it ended."""
    start = Text.assemble((f"{mark} ", style), (printable_line(name), "bold"))
    about = Text(f" {about_call(arguments)}".rstrip())
    about.truncate(max(width - start.cell_len - end.cell_len, 12), overflow="ellipsis")
    return Text.assemble(start, about, end, no_wrap=True, overflow="ellipsis")


def ended_lines(ended: ToolCallFinished, ran: Running | None, width: int) -> Sequence[RenderableType]:
    """Draw a call that has ended: one line, and the end of what it said if it failed."""
    if ended.success and ended.name in _QUIET:
        return ()
    arguments = "{}" if ran is None else ran.call.arguments
    seconds = ended.elapsed_ms / 1000 - (0.0 if ran is None else ran.waited_s)
    mark, how = mark_of(ended), end_of_call(ended)
    style = _STYLES[mark]
    end = Text()
    if ended.added is not None and ended.removed is not None:
        end.append(f" {lines_text(ended.added, ended.removed)}", style="dim")
    if how:
        end.append(" · ", style="dim").append(how, style=style)
    if seconds >= 1 and ended.outcome not in ("held", "denied"):
        end.append(f" · {seconds_text(seconds)}", style="dim")
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


def is_over(plan: Sequence[PlanEntry]) -> bool:
    """Whether a plan has no open step."""
    return all(each.status in _OVER for each in plan)


def plan_lines(entries: Sequence[PlanEntry], height: int) -> Sequence[Text]:
    """Draw a plan as a checklist; of one with more than `height` steps, those around the current one."""
    current = next((at for at, each in enumerate(entries) if each.status in ("in_progress", "pending")), 0)
    first = max(0, min(current - height // 2, len(entries) - height))
    return [
        Text(
            f"  {_STEPS.get(each.status, '○')} {printable_line(each.content)}",
            style="dim" if each.status in _OVER else "",
        )
        for each in entries[first : first + height]
    ]

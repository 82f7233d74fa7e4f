"""What a person at a terminal sees of a run.

Text is printed as Markdown, block by block, each once. A tool call is one line when it has ended; until then
it stands in the live area, with the plan, the text under way, and the footer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from treenail.conversation import ContextPressure
from treenail.errors import TreenailError
from treenail.history import LiveView, live_text, with_event
from treenail.presenters.cli.approval import Answer, Asker, Question, ask_at_terminal, question_for
from treenail.presenters.cli.footer import footer
from treenail.presenters.cli.keys import Keys
from treenail.presenters.cli.live_area import Area, LiveArea, PlainArea, rendered
from treenail.presenters.cli.output import unguarded
from treenail.presenters.cli.screen import JsonScreen, PlainScreen, Screen
from treenail.presenters.cli.tool_lines import Running, ended_lines, is_over, plan_lines, running_lines
from treenail.printable import printable
from treenail.providers import TextDelta
from treenail.tools import Approval, PermissionRequest
from treenail.turns import (
    FeedbackGiven,
    Lagged,
    LiveEvent,
    PlanChanged,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    ToolCallOutput,
    TurnFinished,
    UsageChanged,
)

if TYPE_CHECKING:
    from treenail.presenters.cli.markdown import MarkdownStream

_STOPS = " · Ctrl-C stops"
_PLAN_LINES = 8
_WIDE = 70
"""From how many columns on the footer has room for a hint."""


class Always(Protocol):
    """What "always" means: the rule for a call, and a way to keep it for this project."""

    def rule_for(self, tool: str, arguments: str) -> str:
        """Return the rule that would allow a call; empty if there is none, or it could not be kept."""
        ...

    def allow_always(self, rule: str) -> None:
        """Allow what a rule says, from now on and in later runs. Raises `UsageError`."""
        ...


class TerminalScreen(Screen):
    """For people: text as it arrives, tools with their outcomes, and a footer."""

    def __init__(
        self,
        console: Console,
        *,
        asks: bool = False,
        area: Area | None = None,
        asker: Asker | None = None,
        always: Always | None = None,
        is_first: bool = True,
    ) -> None:
        """Show a run on `console`.

        `area` is where it is shown: by default the bottom of this terminal; a program that has its own prompt
        there gives one that prints above it, and shows `under_way()` and `footer()` itself. `asker` asks a
        person, by default here. Unless this `is_first` on the screen, an empty line comes before it.
        """
        self._console, self._asks, self._asker, self._always = console, asks, asker, always
        self._pressed_at = float("-inf")
        self._lock = threading.RLock()
        self._stream: MarkdownStream | None = None
        self._last: Literal["", "text", "line"] = "" if is_first else "text"
        self._view = LiveView(status="starting")
        self._usage_at = monotonic()
        self._began: dict[str, Running] = {}
        self._has_new_plan = False
        """Whether the plan has changed in this turn."""
        self._has_calls = False
        if area is None:
            is_plain = console.is_dumb_terminal or not console.encoding.startswith("utf")
            area = PlainArea(console) if is_plain else LiveArea(console, self.bottom, self._lock)
        self._area = area

    # .. what is shown ..

    def show(self, seen: LiveEvent | Lagged) -> None:
        """Show an event: above, if it is finished; else below."""
        with self._lock:
            if isinstance(seen, TextDelta):
                self._add(seen.text)
                self._area.changed()
                return
            self._view = with_event(self._view, seen)
            if isinstance(seen, UsageChanged):
                self._usage_at = monotonic()
            if isinstance(seen, ToolCallBegan):
                self._has_calls = True
                self._began[seen.call_id] = Running(seen, monotonic())
            elif isinstance(seen, ToolCallOutput):
                if seen.call_id in self._began:
                    self._began[seen.call_id].add(seen.text)
            elif isinstance(seen, ToolCallFinished):
                self._flush()
                ran = self._began.pop(seen.call_id, None)
                self._print(*ended_lines(seen, ran, self._console.width - 1))
            elif isinstance(seen, PlanChanged):
                # A plan that comes before any call is that of an earlier turn.
                self._has_new_plan = self._has_calls
            elif isinstance(seen, TurnFinished):
                self._flush()
                plan, self._view = self._view.plan, replace(self._view, plan=())
                if self._has_new_plan:
                    self._print(*plan_lines(plan, len(plan)))
            else:
                line = live_text(seen)
                if isinstance(seen, StatusChanged) or line is not None:
                    self._flush()
                if line is not None:
                    style = "yellow" if isinstance(seen, FeedbackGiven | ContextPressure) else "dim"
                    self._print(Text(printable(line), style=style))
            self._area.changed()

    def close(self) -> None:
        """Print what is left, and remove what is shown only during the run."""
        with self._lock:
            self._flush()
            if self._last:
                self._area.above([""])
        self._area.close()

    def bottom(self, width: int, height: int) -> Sequence[str]:
        """Return what is under way: the text, the running calls, the footer; at most so wide and so high."""
        foot = self.footer(width - cell_len(_STOPS)) + _STOPS if width > _WIDE else self.footer(width)
        foot = foot.removeprefix(" · ")
        under_way = self.under_way(width, height - 1)
        return [*under_way, *rendered(self._console, Text(foot, style="dim"), width)]

    def under_way(self, width: int, height: int) -> Sequence[str]:
        """Return what is under way, without the footer: the end of it, if it is more than fits."""
        with self._lock:
            text = [] if self._stream is None else self._stream.lines(self._console, width)
            now = monotonic()
            shown = [line for each in self._began.values() for line in running_lines(each, now, width)]
            if self._has_new_plan or not is_over(self._view.plan):
                shown += plan_lines(self._view.plan, min(_PLAN_LINES, height // 3))
        below = [line for each in shown for line in rendered(self._console, each, width)]
        lines = [*text, *below]
        return lines[-height:] if height > 0 else []

    @property
    def view(self) -> LiveView:
        """What is known of the run."""
        return self._view

    def footer(self, width: int) -> str:
        """Return the footer, with the seconds counted until now."""
        with self._lock:
            view, used = self._view, self._view.usage
            # Between two reports the screen counts seconds itself: a line that stands still looks dead.
            elapsed_s = (used.elapsed_s if used is not None else 0.0) + monotonic() - self._usage_at
        return footer(view, width, elapsed_s=elapsed_s)

    # .. questions ..

    def ask(self, request: PermissionRequest) -> Approval | None:
        """Ask a person. None if nobody can be asked."""
        if not self._asks:
            return None
        rule = "" if self._always is None else self._always.rule_for(request.tool_name, request.arguments)
        question = question_for(request, rule=rule)
        self.caught_up()
        with self._lock:
            self._flush()
            if self._last == "text":
                self._area.above([""])
            self._last = "line"
            asked_at = monotonic()
            with self._area.paused():
                said = self._answer(question, request)
            if request.call_id in self._began:
                self._began[request.call_id].waited_s += monotonic() - asked_at
        if said is not None and said.kind == "always" and self._always is not None:
            try:
                self._always.allow_always(rule)
            except (TreenailError, OSError) as error:
                why = f"the rule is not kept, and the call runs this once: {error}"
                with self._lock:
                    self._print(Text(printable(why), style="red"))
        return approval_of(said)

    def _answer(self, question: Question, request: PermissionRequest) -> Answer | None:
        if self._asker is not None:
            return self._asker(question, request)
        context = request.context
        is_stopped = (lambda: False) if context is None else lambda: context.cancellation.is_cancelled
        typed = self._area.typed()
        if typed is not None:
            self._pressed_at = monotonic()  # Where there is a line, the next key may be meant for it.
        keys = Keys(is_stopped=is_stopped, pressed_at=self._pressed_at, is_typing=bool(typed))
        said = ask_at_terminal(question, request, console=self._console, keys=keys)
        self._pressed_at = keys.pressed_at
        return said

    # .. inside ..

    def _add(self, text: str) -> None:
        if self._stream is None:
            self._stream = _stream()
        self._print_text(self._stream.add(text), self._stream)

    def _flush(self) -> None:
        if self._stream is not None:
            self._print_text(self._stream.rest(), self._stream)

    def _print_text(self, text: str, stream: MarkdownStream) -> None:
        if not text:
            return
        lines = stream.lines(self._console, self._console.width - 1, text)
        self._area.above(["", *lines] if self._last else lines)
        self._last = "text"

    def _print(self, *shown: RenderableType) -> None:
        if not shown:
            return
        lines = [line for each in shown for line in rendered(self._console, each, self._console.width - 1)]
        self._area.above(["", *lines] if self._last == "text" else lines)
        self._last = "line"


def _stream() -> MarkdownStream:
    # Imported with the first word of an answer: a request does not wait for it.
    from treenail.presenters.cli.markdown import MarkdownStream

    return MarkdownStream()


def approval_of(answer: Answer | None) -> Approval | None:
    """Return what an answer means for the call."""
    if answer is None:
        return None
    if answer.kind == "edited":
        return Approval(True, arguments=answer.arguments)
    return Approval(answer.kind != "no", answer.reason)


def screen_for(*, as_json: bool, asks: bool, always: Always | None = None) -> Screen:
    """Choose the screen for this terminal, pipe or machine."""
    if as_json:
        return JsonScreen(sys.stdout)
    console = Console(file=unguarded(sys.stdout))
    if not console.is_terminal:
        return PlainScreen(sys.stdout, sys.stderr)
    return TerminalScreen(console, asks=asks and sys.stdin.isatty(), always=always)

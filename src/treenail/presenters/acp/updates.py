"""What happens in a run, as one stream of updates that no version of the protocol has shaped.

The stream comes from two places: `history_updates` reads the view of a run, for an editor that opens it, and
`LiveUpdates` follows a turn while it runs. `wire.py` writes the stream in version 1 of the protocol, where a
turn's ending is the answer to the editor's request. Version 2 sends the ending as an update: `Ending` is all
that it needs, and `requires_action` is a held turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

from treenail.conversation import ContextPressure
from treenail.errors import TreenailError
from treenail.history import Item, Projection, RunView, TurnView, diff_run, opened_run
from treenail.log import Store
from treenail.presenters.acp.stops import Ending
from treenail.providers import ReasoningDelta, TextDelta
from treenail.tools import Plan
from treenail.turns import (
    Lagged,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    ToolCallBegan,
    ToolCallFinished,
    ToolCallOutput,
    TurnState,
    UsageChanged,
)

_OPEN = ("pending", "running")

_MAX_WRITTEN = 8_000
"""How many characters of what a call has written so far are shown: the last ones."""

CallStatus = Literal["pending", "running", "kept", "failed"]
"""How a call stands: a call that failed, was refused or was undone has left nothing behind."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text of a person, of the agent, or of the agent's reasoning."""

    who: Literal["person", "agent", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place of a file that a call changed."""

    path: str
    before: str | None
    """The old lines; None for a new file."""
    after: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class CallShown:
    """A tool call, when it appears and whenever it changes."""

    call_id: str
    """Unique in its run, unlike a provider's ids."""
    name: str
    arguments: str
    status: CallStatus
    text: str | None = None
    """What it answered, or what it has written so far."""
    hunks: tuple[Hunk, ...] = ()
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class PlanShown:
    """The agent's plan."""

    entries: tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class UsageShown:
    """How full the model's context is, and what the run has cost."""

    tokens: int
    window: int
    cost_usd: float | None = None


Update = Said | CallShown | PlanShown | UsageShown
"""One thing that an editor shows."""


# --- the log -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunReader:
    """Reads the view of a run; it folds only what is new since the last time."""

    store: Store
    run_id: UUID
    projection: Projection

    def read(self) -> RunView:
        """Return the run as its log shows it now."""
        with opened_run(self.store, self.run_id, must_be_whole=False) as session:
            return self.projection.catch_up(session).view()

    def plan(self) -> tuple[PlanEntry, ...]:
        """Return the agent's plan."""
        with opened_run(self.store, self.run_id, must_be_whole=False) as session:
            found = session[Plan].latest()
        return () if found is None else tuple(PlanEntry(each.title, each.status) for each in found.steps)

    def hunks(self, item: Item) -> tuple[Hunk, ...]:
        """Return what a call changed in the files."""
        if item.diff is None or item.status != "kept":
            return ()
        try:
            return tuple(hunks_of(diff_run(self.store, self.run_id, item.diff).diff.text))
        except (TreenailError, OSError):
            return ()  # The files' history may have been pruned; the answer is shown all the same.


def ending_of(turn: TurnView) -> Ending:
    """Return how a turn ended."""
    return Ending(turn.state, turn.error_kind, turn.details, turn.next_actions)


def call_ids(view: RunView) -> dict[int, str]:
    """Name the calls of a view so that no two have the same name; by the identity of their items."""
    seen: dict[str, int] = {}
    named: dict[int, str] = {}
    for turn in view.turns:
        for item in turn.items:
            if item.kind == "tool":
                count = seen[item.call_id] = seen.get(item.call_id, 0) + 1
                named[id(item)] = item.call_id if count == 1 else f"{item.call_id}#{count}"
    return named


def history_updates(view: RunView, hunks: Callable[[Item], tuple[Hunk, ...]]) -> Iterator[Update]:
    """Tell a run from its beginning. Text that is not a clean answer is left out; an ending says why."""
    names = call_ids(view)
    for turn in view.turns:
        for item in turn.items:
            if item.kind == "user":
                yield Said("person", item.text)
            elif item.kind in ("text", "answer"):
                yield Said("agent", item.text)
            elif item.kind == "tool":
                yield _call(item, names[id(item)], hunks(item), is_over=turn.state is not TurnState.HELD)
        if turn.state not in (TurnState.COMPLETED, TurnState.HELD):
            yield Said("agent", note(ending_of(turn)))


def note(ending: Ending) -> str:
    """Write an ending as a line that nobody takes for the model's."""
    return f"\n\n*[Treenail: {ending.sentence}]*\n\n"


def _call(item: Item, name: str, hunks: tuple[Hunk, ...], *, is_over: bool, is_new: bool = True) -> CallShown:
    status: CallStatus = "failed"
    if item.status in ("kept", "answered"):
        status = "kept"
    elif item.status in _OPEN and not is_over:
        status = "pending" if item.status == "pending" else "running"
    text = f"Undone {item.undone}.\n{item.text}" if item.undone else item.text
    return CallShown(name, item.title, item.arguments, status, text or None, hunks, is_new)


# --- live --------------------------------------------------------------------------------------------


class LiveUpdates:
    """Turns the events of a running turn into updates; results and changes are read from the log."""

    def __init__(self, reader: RunReader, shown: set[str]) -> None:
        self._reader = reader
        self._shown = shown
        """The calls that the editor knows."""
        self._running: dict[str, CallShown] = {}
        self._cost_usd: float | None = None
        self._pressure: ContextPressure | None = None

    def take(self, seen: LiveEvent | Lagged) -> Sequence[Update]:
        """Return what one event shows. It reads the log, so it belongs on a worker thread."""
        match seen:
            case TextDelta():
                return [Said("agent", seen.text)]
            case ReasoningDelta():
                return [Said("reasoning", seen.text)]
            case ToolCallBegan() | ToolCallFinished():
                return self._call(seen)
            case ToolCallOutput():
                return self._output(seen)
            case PlanChanged():
                return [PlanShown(seen.entries)]
            case ContextPressure():
                self._pressure = seen
                return self._usage()
            case UsageChanged():
                self._cost_usd = seen.cost_usd
                return self._usage()
            case Lagged():
                return [Said("reasoning", f"\n[{seen.count} updates were skipped here; the log has them]\n")]
        return []

    def _output(self, seen: ToolCallOutput) -> list[Update]:
        known = self._running.get(seen.call_id)
        if known is None:
            return []
        written = ((known.text or "") + seen.text)[-_MAX_WRITTEN:]
        self._running[seen.call_id] = replace(known, text=written, is_new=False)
        return [self._running[seen.call_id]]

    def left_open(self) -> list[Update]:
        """Return the calls that the end of a turn has left without an end: they have done nothing."""
        view = self._reader.read()
        if not view.turns or view.state is TurnState.HELD:
            return []
        names = call_ids(view)
        return [
            _call(each, names[id(each)], (), is_over=True, is_new=False)
            for each in view.turns[-1].items
            if each.kind == "tool" and each.status in _OPEN and names[id(each)] in self._shown
        ]

    def _usage(self) -> list[Update]:
        if self._pressure is None:
            return []
        return [UsageShown(self._pressure.tokens, self._pressure.window, self._cost_usd)]

    def _call(self, seen: ToolCallBegan | ToolCallFinished) -> list[Update]:
        view = self._reader.read()
        items = [
            each
            for turn in view.turns
            for each in turn.items
            if each.kind == "tool" and each.call_id == seen.call_id
        ]
        if not items:
            return []
        item = items[-1]
        name = call_ids(view)[id(item)]
        is_new = name not in self._shown
        self._shown.add(name)
        if isinstance(seen, ToolCallBegan):
            begun = CallShown(name, item.title, item.arguments, "running", is_new=is_new)
            self._running[seen.call_id] = begun
            return [begun]
        # A call without an end in the log waits for a person, or was cut off with the turn.
        return [_call(item, name, self._reader.hunks(item), is_over=False, is_new=is_new)]


# --- diffs -------------------------------------------------------------------------------------------

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def hunks_of(diff: str) -> Iterator[Hunk]:
    """Take a unified diff apart; what is not shown as text there has no hunks."""
    # A mark after a line says that it has no line break; no other line of a diff begins with a backslash.
    lines = iter(re.sub(r"\n\\ No newline[^\n]*", "\0", diff).split("\n"))
    path, is_new = "", False
    for line in lines:
        if line.startswith("--- "):
            path, is_new = line.removeprefix("--- ").removeprefix("a/"), line == "--- /dev/null"
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif found := _HUNK.match(line):
            # The counts say where it ends: a removed line may look like a header.
            left = [1 if each is None else int(each) for each in found.group(1, 3)]
            before, after = _sides(lines, *left)
            yield Hunk(path, None if is_new else before, after, max(int(found[2]), 1))


def _sides(lines: Iterator[str], old: int, new: int) -> tuple[str, str]:
    before, after = "", ""
    while old > 0 or new > 0:
        line = next(lines, None)
        if line is None:
            break
        mark, text = line[:1], line[1:-1] if line.endswith("\0") else line[1:] + "\n"
        if mark in " -":
            before, old = before + text, old - 1
        if mark in " +":
            after, new = after + text, new - 1
    return before, after


def before(text: str, path: str, hunks: Sequence[Hunk]) -> str:
    """Return what was in a file before these hunks were applied to it."""
    lines = text.split("\n")
    for each in sorted((each for each in hunks if each.path == path), key=lambda each: -(each.line or 1)):
        start = (each.line or 1) - 1
        count, old = each.after.count("\n"), (each.before or "").split("\n")
        lines[start : start + count] = old[:-1] if old[-1] == "" else old
    return "\n".join(lines)

"""Choosing a run to resume: what a list of runs shows, and which of them wait to be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from treenail.errors import SessionNotFoundError, UsageError
from treenail.history import RunSummary, is_workflow, opened_log, short, summarize
from treenail.log import Store
from treenail.presenters.cli.stores import flag_for
from treenail.printable import printable_line

MAX_RUNS = 100
"""How many of the newest runs are shown."""

_OVER = ("completed", "empty", "foreign")
"""The states of a run that there is nothing to resume in. One that is damaged, or that another process
writes, is named all the same: the resume says what is in its way."""


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run as a list shows it."""

    summary: RunSummary

    @property
    def run_id(self) -> UUID:
        """The run's id."""
        return self.summary.info.session_id

    @property
    def waits(self) -> bool:
        """Whether a resume would continue it."""
        return self.summary.state not in _OVER

    def line(self, now: datetime) -> str:
        """Write it on one line: id, age, state, cost, task."""
        cost = "" if self.summary.cost_usd is None else f"${self.summary.cost_usd:.2f}"
        age = ago(now - self.summary.info.created_at)
        task = short(printable_line(self.summary.task), 60)
        return f"{str(self.run_id)[:8]}  {age:>9}  {self.summary.state:<14} {cost:>6}  {task}"


def known_runs(store: Store) -> list[KnownRun]:
    """Return the newest runs of a store, the newest first; workflows and children are not among them."""
    found: list[KnownRun] = []
    with opened_log(store) as log:
        for info in reversed(log.sessions()):
            if info.parent_id is not None or is_workflow(info):
                continue
            with suppress(SessionNotFoundError):  # It is being erased.
                found.append(KnownRun(summarize(log, info)))
            if len(found) == MAX_RUNS:
                break
    return found


def lines_of(runs: Sequence[KnownRun]) -> list[str]:
    """Write runs, one a line."""
    now = datetime.now(UTC)
    return [each.line(now) for each in runs]


def pick(runs: Sequence[KnownRun]) -> KnownRun | None:
    """Let a person choose a run at the terminal; None if they leave."""
    # Most commands never show a list, and prompt_toolkit takes a while to import.
    from treenail.presenters.cli.picker import choice

    start = next((number for number, each in enumerate(runs) if each.waits), 0)
    chosen = choice("Which run?", lines_of(runs), start=start).run()
    return None if chosen is None else runs[chosen]


def the_one_that_waits(store: Store, runs: Sequence[KnownRun]) -> KnownRun:
    """Return the only run that waits to be resumed. Raises `UsageError` if it is not one."""
    waiting = [each for each in runs if each.waits]
    if len(waiting) == 1:
        return waiting[0]
    shown = "\n".join(f"  {line}" for line in lines_of(waiting or runs[:10]))
    which = f"{len(waiting)} runs can be resumed" if waiting else "every run of this project is finished"
    flag = flag_for(store)
    what = (
        f"name one: treenail resume {str(waiting[0].run_id)[:8]}{flag}"
        if waiting
        else f'follow up on the newest with: treenail run --continue "task"{flag}'
    )
    raise UsageError(f"{which}; {what}\n{shown}")


def ago(span: timedelta) -> str:
    """Write how long ago something was."""
    seconds = int(span.total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "just now"

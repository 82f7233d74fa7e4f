"""The list of runs."""

from __future__ import annotations

import sys
from contextlib import suppress

import click
from rich.table import Table
from rich.text import Text

from treenail.errors import SessionNotFoundError
from treenail.history import RunSummary, opened_log, short_id, summarize
from treenail.log import Store
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.footer import dollars, seconds_text
from treenail.presenters.cli.options import json_option, store_named, store_option
from treenail.presenters.cli.output import print_json
from treenail.presenters.cli.stores import salvage_command
from treenail.printable import printable_line

_PIPE_WIDTH = 160
"""How wide a table is where there is no terminal."""

STYLES = {
    "completed": "green",
    "running": "cyan",
    "held": "yellow",
    "unfinished": "yellow",
    "interrupted": "yellow",
    "submitted": "cyan",
    "cancelled": "yellow",
    "empty": "dim",
    "foreign": "dim",
}
"""The colours of states; all others are red."""


@click.command("list")
@click.option("--all", "everything", is_flag=True, help="Child sessions as well.")
@store_option
@json_option
def list_runs(store: str | None, as_json: bool, everything: bool) -> int:
    """List the runs of this project, oldest first.

    Exits 1 if one of them is damaged.

    Example: treenail list --json
    """
    place = store_named(store)
    found = []
    with opened_log(place) as log:
        for info in log.sessions():
            # A run without events is an editor's session in which nothing was said.
            if everything or (info.parent_id is None and info.head):
                with suppress(SessionNotFoundError):  # It is being erased.
                    found.append(summarize(log, info))
    if as_json:
        print_json([each.to_data() for each in found])
    elif found:
        _print_table(found)
    else:
        print("no runs yet")
    return warn_of_damage(place, sum(each.is_damaged for each in found))


_LEFT_OUT_FIRST = ("agent", "tokens", "began", "time", "cost")
"""The columns that a narrow window does without."""

_TASK_WIDTH = 16
"""How much of a task is shown at least."""


def _print_table(found: list[RunSummary]) -> None:
    console = GuardedConsole()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    ids = [each.info.session_id for each in found]
    rows = [_row(each, short_id(each.info.session_id, ids)) for each in found]
    # Everything but the task is shown whole or not at all: an id that is cut names no run.
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]}
    widths["task"] = _TASK_WIDTH
    for name in _LEFT_OUT_FIRST:
        if sum(widths.values()) + 2 * len(widths) > console.width:
            del widths[name]
    widths["task"] += max(console.width - sum(widths.values()) - 2 * len(widths), 0)
    table = Table(box=None, pad_edge=False)
    for name, width in widths.items():
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=width)
    for row in rows:
        table.add_row(*(row[name] for name in widths))
    console.print(table)


def used_text(summary: RunSummary) -> tuple[str, str, str]:
    """Write what a run has cost, its tokens, and how long it took; a dash for what is not known."""
    tokens = summary.input_tokens + summary.output_tokens
    return (
        "-" if summary.cost_usd is None else dollars(summary.cost_usd),
        "-" if not tokens else f"{tokens / 1000:.1f}k" if tokens >= 1000 else str(tokens),
        "-" if summary.elapsed_s is None else seconds_text(summary.elapsed_s),
    )


def _row(run: RunSummary, short: str) -> dict[str, Text]:
    reason = f" ({run.reason})" if run.reason and not run.is_damaged else ""
    return {
        "run": Text(short),
        "began": Text(f"{run.info.created_at:%Y-%m-%d %H:%M}"),
        "state": Text.assemble((run.state, STYLES.get(run.state, "red")), printable_line(reason)),
        **{name: Text(text) for name, text in zip(("cost", "tokens", "time"), used_text(run), strict=True)},
        "agent": Text(printable_line(run.agent)),
        "task": Text(printable_line(" ".join(run.task.split())[:60])),
    }


def warn_of_damage(store: Store, damaged: int) -> int:
    """Say what to do about damaged runs, if there are any. Returns the exit code."""
    if not damaged:
        return 0
    print(
        f"treenail: {'1 run is' if damaged == 1 else f'{damaged} runs are'} damaged; nothing was changed or "
        f"deleted; copy the readable part with `{salvage_command(store)}`, and continue in the copy",
        file=sys.stderr,
    )
    return 1

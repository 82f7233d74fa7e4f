"""The list of runs."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from treenail.errors import SessionNotFoundError
from treenail.history import RunSummary, opened_log, summarize
from treenail.presenters.cli.options import json_option, store_named, store_option
from treenail.presenters.cli.output import print_json
from treenail.presenters.cli.stores import salvage_command

_PIPE_WIDTH = 160
"""How wide a table is where there is no terminal."""

STYLES = {
    "completed": "green",
    "running": "cyan",
    "held": "yellow",
    "unfinished": "yellow",
    "interrupted": "yellow",
    "empty": "dim",
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
            if everything or info.parent_id is None:
                with suppress(SessionNotFoundError):  # It is being erased.
                    found.append(summarize(log, info))
    if as_json:
        print_json([each.to_data() for each in found])
    elif found:
        _print_table(found)
    else:
        print("no runs yet")
    return warn_of_damage(place, sum(each.is_damaged for each in found))


def _print_table(found: list[RunSummary]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "began", "state", "events", "agent", "task"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for each in found:
        reason = f" ({each.reason})" if each.reason and not each.is_damaged else ""
        table.add_row(
            str(each.info.session_id)[:8],
            f"{each.info.created_at:%Y-%m-%d %H:%M}",
            f"[{STYLES.get(each.state, 'red')}]{each.state}[/]{reason}",
            str(each.info.head),
            each.agent,
            " ".join(each.task.split())[:60],
        )
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


def warn_of_damage(store: Path, damaged: int) -> int:
    """Say what to do about damaged runs, if there are any. Returns the exit code."""
    if not damaged:
        return 0
    print(
        f"treenail: {'1 run is' if damaged == 1 else f'{damaged} runs are'} damaged; nothing was changed or "
        f"deleted; copy the readable part with `{salvage_command(store)}`, and continue in the copy",
        file=sys.stderr,
    )
    return 1

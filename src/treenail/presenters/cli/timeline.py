"""The timeline of a run and its children, as the history room tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import click
from rich.console import Console

from treenail.history.projection import Projection
from treenail.history.stores import opened_log
from treenail.history.summary import RunSummary, damage_text, summarize
from treenail.history.text import lines
from treenail.history.view import RunView
from treenail.log.base import Log
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_json
from treenail.presenters.cli.runs import STYLES, warn_of_damage
from treenail.presenters.cli.stores import salvage_command
from treenail.state.session import Session


@click.command
@run_argument
@store_option
@json_option
def show(run: str, store: str | None, as_json: bool) -> int:
    """Show what happened in a run, with its children.

    RUN is a run's id, the beginning of it, or @last. A damaged run is shown as far as it is readable, and the
    command exits 1.

    Example: treenail show 3f2a
    """
    place, run_id = run_named(store, run)
    with opened_log(place) as log:
        if as_json:
            data, damaged = _tree_data(log, place, run_id)
            print_json(data)
        else:
            damaged = _print_tree(Console(), log, run_id, "")
    return warn_of_damage(place, damaged)


def _read(log: Log, run_id: UUID) -> tuple[RunSummary, RunView, str]:
    """Return a run's summary, its view, and its damage, if it has any."""
    summary = summarize(log, log.info(run_id))
    with Session.open(log, run_id, read_only=True) as session:
        view = Projection().catch_up(session).view()
    return summary, view, damage_text(view.damage or "") or (summary.reason if summary.is_damaged else "")


def _tree_data(log: Log, store: Path, run_id: UUID) -> tuple[dict[str, Any], int]:
    """Return a run and its children as JSON data, and how many of them are damaged."""
    summary, view, damage = _read(log, run_id)
    children = [_tree_data(log, store, each.session_id) for each in log.sessions(parent_id=run_id)]
    data = {**view.to_data(), **summary.to_data(), "children": [each for each, _ in children]}
    if damage:
        data |= {"damage": damage, "next_actions": [salvage_command(store)]}
    return data, bool(damage) + sum(each for _, each in children)


def _print_tree(console: Console, log: Log, run_id: UUID, indent: str) -> int:
    """Print a run and its children. Returns how many of them are damaged."""
    summary, view, damage = _read(log, run_id)
    style = STYLES.get(summary.state, "red")
    title = f"{indent}[bold]{'└ child' if indent else 'run'} {str(run_id)[:8]}[/] [{style}]{summary.state}[/]"
    console.print(title, end="", highlight=False)
    about = f" · {summary.agent or 'no agent'} · {summary.info.created_at:%Y-%m-%d %H:%M} UTC"
    console.print(about, markup=False, highlight=False)
    print_lines(console, view, indent)
    if damage:
        console.print(f"{indent}[red]the log is damaged from here on:[/]", end=" ", highlight=False)
        console.print(damage, markup=False, highlight=False, soft_wrap=True)
    children = [each.session_id for each in log.sessions(parent_id=run_id)]
    return bool(damage) + sum(_print_tree(console, log, each, indent + "    ") for each in children)


def print_lines(console: Console, view: RunView, indent: str = "") -> None:
    """Print the lines of a view with marks: what is not good is red."""
    for line in lines(view):
        if line.label == "damage":
            continue
        mark = "[green]✓[/]" if line.is_good else "[red]✗[/]"
        place = f"{line.seq:>4}  {mark}" if line.seq is not None else " " * 7
        console.print(f"{indent}{place} [bold]{line.label:<8}[/]", end="", highlight=False)
        console.print(line.text, markup=False, highlight=False, soft_wrap=True)

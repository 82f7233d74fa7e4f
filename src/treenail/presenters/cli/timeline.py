"""The timeline of a run and its children, as the history room tells it."""

from __future__ import annotations

import click
from rich.console import Console

from treenail.history import RunTree, RunView, kept_by_runs, lines, opened_log, read_tree
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_json
from treenail.presenters.cli.recover import print_kept
from treenail.presenters.cli.run_list import STYLES, used_text, warn_of_damage
from treenail.presenters.cli.stores import salvage_command


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
        tree = read_tree(log, run_id)
    kept = kept_by_runs(place, run_id)
    if as_json:
        actions = {"next_actions": [salvage_command(place)]} if tree.damaged else {}
        print_json(tree.to_data() | {"kept": [each.to_data() for each in kept]} | actions)
    else:
        _print_tree(GuardedConsole(), tree, "")
        known = kept_by_runs(place) if kept else ()
        for each in kept:
            print_kept(GuardedConsole(), each, known)
    return warn_of_damage(place, tree.damaged)


def _print_tree(console: Console, tree: RunTree, indent: str) -> None:
    summary, short = tree.summary, str(tree.summary.info.session_id)[:8]
    style = STYLES.get(summary.state, "red")
    title = f"{indent}[bold]{'└ child' if indent else 'run'} {short}[/] [{style}]{summary.state}[/]"
    console.print(title, end="", highlight=False)
    cost, _, time = used_text(summary)
    used = "".join(f" · {each}" for each in (time, cost) if each != "-")
    about = f" · {summary.agent or 'no agent'} · {summary.info.created_at:%Y-%m-%d %H:%M} UTC{used}"
    console.print(about, markup=False, highlight=False)
    print_lines(console, tree.view, indent)
    if tree.damage:
        console.print(f"{indent}[red]the log is damaged from here on:[/]", end=" ", highlight=False)
        console.print(tree.damage, markup=False, highlight=False, soft_wrap=True)
    for each in tree.children:
        _print_tree(console, each, indent + "    ")


def print_lines(console: Console, view: RunView, indent: str = "") -> None:
    """Print the lines of a view with marks: what is not good is red."""
    for line in lines(view):
        if line.label == "damage":
            continue
        mark = "[green]✓[/]" if line.is_good else "[red]✗[/]"
        place = f"{line.seq:>4}  {mark}" if line.seq is not None else " " * 7
        console.print(f"{indent}{place} [bold]{line.label:<8}[/]", end="", highlight=False)
        console.print(line.text, markup=False, highlight=False, soft_wrap=True)

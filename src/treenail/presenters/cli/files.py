"""The commands about a run's files: diff, rollback, fork."""

from __future__ import annotations

from pathlib import Path

import click

from treenail.history import diff_run, fork_run, rollback_run
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_result
from treenail.presenters.cli.stores import flag_for


@click.command
@run_argument
@click.option("--call", help="One call, or the first of several.")
@click.option("--upto", help="The last of several calls.")
@store_option
@json_option
def diff(run: str, call: str | None, upto: str | None, store: str | None, as_json: bool) -> None:
    """Show what a run changed in the files, as a diff.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail diff @last --call call_3_1
    """
    first, last, found = diff_run(*run_named(store, run), call, upto)
    changes = [{"path": each.path, "kind": each.kind} for each in found.changes]
    data = {"from": first, "to": last, "changes": changes, "text": found.text}
    print_result(as_json, data, found.text or "nothing changed")


@click.command
@run_argument
@click.option("--call", help="The call to undo, with all later ones. By default the newest one.")
@store_option
@json_option
def rollback(run: str, call: str | None, store: str | None, as_json: bool) -> None:
    """Restore files and state to before a tool call.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail rollback @last --call call_2_1
    """
    place, run_id = run_named(store, run)
    undone = rollback_run(place, run_id, call)
    print_result(
        as_json,
        {"run": str(run_id), "rolled_back_to": undone.call_id, "side": "before"},
        f"files and state are as they were before {undone.tool_name} ({undone.call_id})",
    )


@click.command
@click.argument("into", type=click.Path(path_type=Path))
@click.option("--run", default="@last", help="The run: its id, the beginning of it, or @last.")
@click.option("--call", help="The call to fork at. By default the newest one.")
@click.option("--after", is_flag=True, help="Fork after the call instead of before it.")
@store_option
@json_option
def fork(into: Path, run: str, call: str | None, after: bool, store: str | None, as_json: bool) -> None:
    """Try another way from a tool call, in a new workspace.

    INTO is a new directory for the fork's files.

    Example: treenail fork ../try-2 --call call_2_1
    """
    place, run_id = run_named(store, run)
    made, at = fork_run(place, run_id, into, call, after=after)
    side = "after" if after else "before"
    print_result(
        as_json,
        {"run": str(made), "from": str(run_id), "call": at.call_id, "workspace": str(into)},
        f"run {str(made)[:8]} starts {side} {at.tool_name} ({at.call_id}) in {into}\n"
        f"resume it with: treenail resume {str(made)[:8]}{flag_for(place)}",
    )

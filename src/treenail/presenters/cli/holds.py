"""The commands about calls that wait for a person: hold list, hold answer."""

from __future__ import annotations

import click

from treenail.errors import UsageError
from treenail.history import answer_run, list_holds
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_result
from treenail.presenters.cli.stores import flag_for


@click.command("list")
@run_argument
@store_option
@json_option
def list_waiting(run: str, store: str | None, as_json: bool) -> None:
    """List the calls of a run that wait for a person.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail hold list @last
    """
    holds = list_holds(*run_named(store, run))
    data = [
        {
            "call": each.call_id,
            "tool": each.tool_name,
            "arguments": each.arguments,
            "reason": each.reason,
            "since": each.created_at.isoformat(),
        }
        for each in holds
    ]
    lines = [f"{each.call_id}  {each.tool_name}  {each.arguments}\n    {each.reason}" for each in holds]
    print_result(as_json, data, "\n".join(lines) or "no call waits for an answer")


@click.command
@run_argument
@click.option("--call", help="Which call, if several wait.")
@click.option("--yes", is_flag=True, help="Let the call run.")
@click.option("--no", is_flag=True, help="Refuse the call.")
@click.option("--note", default="", help="A reason for the model, with a refusal.")
@store_option
@json_option
def answer(
    run: str, call: str | None, yes: bool, no: bool, note: str, store: str | None, as_json: bool
) -> None:
    """Answer a call that waits for a person.

    `treenail resume` then continues the run. RUN is a run's id, the beginning of it, or @last.

    Example: treenail hold answer @last --no --note "not in this file"
    """
    if yes == no:
        raise UsageError("answer with --yes or --no")
    place, run_id = run_named(store, run)
    held = answer_run(place, run_id, call, approved=yes, note=note, by="cli")
    print_result(
        as_json,
        {"run": str(run_id), "call": held.call_id, "approved": yes},
        f"{'approved' if yes else 'refused'}: {held.tool_name} ({held.call_id})\n"
        f"resume it with: treenail resume {str(run_id)[:8]}{flag_for(place)}",
    )

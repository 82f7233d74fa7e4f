"""The commands about calls that wait for a person: hold list, hold answer."""

from __future__ import annotations

from collections.abc import Sequence

import click

from treenail.errors import UsageError
from treenail.history import answer_run, list_holds
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_result
from treenail.presenters.cli.stores import flag_for
from treenail.tools import ToolHeld


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
@click.option("--answer", "text", help="The answer to a model's question; or the number of an option.")
@click.option("--note", default="", help="A reason for the model, with a refusal.")
@store_option
@json_option
def answer(
    run: str,
    call: str | None,
    yes: bool,
    no: bool,
    text: str | None,
    note: str,
    store: str | None,
    as_json: bool,
) -> None:
    """Answer a call that waits for a person.

    `treenail resume` then continues the run. RUN is a run's id, the beginning of it, or @last.

    Example: treenail hold answer @last --no --note "not in this file"
    """
    if yes + no + (text is not None) != 1:
        raise UsageError("answer with --yes or --no, or a model's question with --answer TEXT")
    place, run_id = run_named(store, run)
    if text is not None or yes:
        _check_kind(list_holds(place, run_id), call, in_words=text is not None)
    approved = not no
    held = answer_run(place, run_id, call, approved=approved, note=note if text is None else text, by="cli")
    word = "refused" if no else "approved" if text is None else "answered"
    print_result(
        as_json,
        {"run": str(run_id), "call": held.call_id, "approved": approved},
        f"{word}: {held.tool_name} ({held.call_id})\n"
        f"resume it with: treenail resume {str(run_id)[:8]}{flag_for(place)}",
    )


def _check_kind(holds: Sequence[ToolHeld], call: str | None, *, in_words: bool) -> None:
    """Refuse a yes to a question, and words as a permission."""
    for each in holds:
        if (call is None or each.call_id.startswith(call)) and each.is_question != in_words:
            wanted = "--answer TEXT" if each.is_question else "--yes or --no"
            raise UsageError(f"{each.tool_name} ({each.call_id}) is answered with {wanted}")

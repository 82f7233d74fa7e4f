"""The commands about calls that wait for a person: hold list, hold answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from treenail.errors import UsageError
from treenail.history import answer_run, list_holds
from treenail.presenters.cli import settings
from treenail.presenters.cli.engines import woken
from treenail.presenters.cli.options import json_option, run_argument, run_named, store_option
from treenail.presenters.cli.output import print_result
from treenail.presenters.cli.stores import flag_for
from treenail.tools import Rules, ToolHeld


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
@click.option(
    "--always", is_flag=True, help="Let it run, and allow such calls in this directory from now on."
)
@click.option("--arguments", metavar="JSON", help="Let it run with these arguments instead of its own.")
@click.option("--answer", "text", help="The answer to a model's question; or the number of an option.")
@click.option("--note", default="", help="A reason for the model, with a refusal.")
@store_option
@json_option
def answer(
    run: str,
    call: str | None,
    yes: bool,
    no: bool,
    always: bool,
    arguments: str | None,
    text: str | None,
    note: str,
    store: str | None,
    as_json: bool,
) -> None:
    """Answer a call that waits for a person.

    `treenail resume` then continues the run. RUN is a run's id, the beginning of it, or @last.

    Example: treenail hold answer @last --no --note "not in this file"
    """
    if yes + no + always + (arguments is not None) + (text is not None) != 1:
        raise UsageError(
            "answer with one of --yes, --no, --always and --arguments JSON, or a model's question with "
            "--answer TEXT"
        )
    place, run_id = run_named(store, run)
    holds = list_holds(place, run_id)
    if not no:
        _check_kind(holds, call, in_words=text is not None)
    if arguments is not None:
        _check_arguments(arguments)
    rule = _rule_for(holds, call) if always else ""
    held = answer_run(
        place,
        run_id,
        call,
        approved=not no,
        note=note if text is None else text,
        by="cli",
        arguments=arguments,
    )
    if rule:
        settings.remember(rule, Path.cwd())
    word = "refused" if no else "approved" if text is None else "answered"
    kept = f"allowed in this directory from now on: {rule}\n" if rule else ""
    data = {"run": str(run_id), "call": held.call_id, "approved": not no, "rule": rule}
    goes_on = (
        "a worker continues it"
        if woken(place, run_id)
        else f"resume it with: treenail resume {str(run_id)[:8]}{flag_for(place)}"
    )
    print_result(as_json, data, f"{word}: {held.tool_name} ({held.call_id})\n{kept}{goes_on}")


def _named(holds: Sequence[ToolHeld], call: str | None) -> list[ToolHeld]:
    return [each for each in holds if call is None or each.call_id.startswith(call)]


def _check_kind(holds: Sequence[ToolHeld], call: str | None, *, in_words: bool) -> None:
    """Refuse a yes to a question, and words as a permission."""
    for each in _named(holds, call):
        if each.is_question != in_words:
            wanted = "--answer TEXT" if each.is_question else "--yes, --no, --always or --arguments JSON"
            raise UsageError(f"{each.tool_name} ({each.call_id}) is answered with {wanted}")


def _check_arguments(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise UsageError(
            f'--arguments must be a JSON object such as \'{{"path": "a.txt"}}\', not {text!r}; '
            "`treenail hold list` shows the call's own"
        )


def _rule_for(holds: Sequence[ToolHeld], call: str | None) -> str:
    """Return the rule that "always" keeps for the call that is meant; empty if it is not clear which."""
    named = _named(holds, call)
    if len(named) != 1:
        return ""  # `answer_run` says so.
    directory = Path.cwd()
    rule = Rules(root=directory).rule_for(named[0].tool_name, named[0].arguments)
    if not rule or not settings.can_remember(directory):
        raise UsageError(
            f"no rule can be kept for {named[0].tool_name} ({named[0].call_id}); answer it with --yes, or "
            'write one: treenail permissions --allow "TOOL: PATTERN"'
        )
    return rule

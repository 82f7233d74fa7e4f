"""The commands about a run's log: replay, diagnose, attend, export, prune, erase, salvage."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import TextIO
from uuid import UUID

import click

from treenail.conversation import inspect_replay
from treenail.errors import LogDamagedError, UsageError
from treenail.history import (
    attend_run,
    diagnose_store,
    erase_run,
    find_run,
    opened_log,
    opened_run,
    prune_run,
    salvage_store,
)
from treenail.log import Log
from treenail.presenters.cli.options import (
    json_option,
    required_run,
    run_argument,
    run_named,
    store_named,
    store_option,
)
from treenail.presenters.cli.output import print_json, print_result


@click.command
@run_argument
@click.option("--at", type=int, help="After this event instead of now.")
@store_option
@json_option
def replay(run: str, at: int | None, store: str | None, as_json: bool) -> None:
    """Show what the model would be sent next.

    It also shows what was left out, and why. RUN is a run's id, the beginning of it, or @last.

    Example: treenail replay @last --at 12
    """
    place, run_id = run_named(store, run)
    with opened_run(place, run_id, must_be_whole=at is None) as session:
        found = inspect_replay(session, at)
    print_result(as_json, {"run": str(run_id), **found.to_data()}, found.render())


@click.command
@run_argument
@store_option
@json_option
def diagnose(run: str, store: str | None, as_json: bool) -> int:
    """Check a run's log and say what can be done.

    It says whether the log is complete, how the run ended, and what to do next. Exits 1 if something blocks
    the run. RUN is a run's id, the beginning of it, or @last.

    Example: treenail diagnose @last
    """
    place = store_named(store)
    try:
        run_id = find_run(place, run)
    except LogDamagedError:
        run_id = None  # Whatever is readable is checked.
    reports = diagnose_store(place, run_id)
    data = [{"run": each.session_id, **each.to_data()} for each in reports]
    text = "\n\n".join(each.render() for each in reports)
    print_result(as_json, data[0] if len(data) == 1 else data, text)
    return 0 if all(each.ok for each in reports) else 1


@click.command
@required_run
@click.option("--note", required=True, help="What was done about it.")
@store_option
@json_option
def attend(run: str, note: str, store: str | None, as_json: bool) -> None:
    """Mark a run's problem as fixed by hand.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail attend 3f2a --note "restored data.txt by hand"
    """
    place, run_id = run_named(store, run)
    attend_run(place, run_id, note, by="cli")
    print_result(as_json, {"run": str(run_id), "note": note}, "recorded; the run can be resumed")


@click.command
@run_argument
@click.option("--out", type=click.Path(path_type=Path), help="A new file, instead of the output.")
@store_option
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="The output is always JSON.")
def export(run: str, out: Path | None, store: str | None) -> None:
    """Write every event of a run as a line of JSON.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail export @last --out run.jsonl
    """
    place, run_id = run_named(store, run)
    with opened_log(place) as log:
        if out is None:
            _export_to(sys.stdout, log, run_id)
            return
        try:
            with out.open("x", encoding="utf-8") as file:
                _export_to(file, log, run_id)
        except FileExistsError as error:
            raise UsageError(f"{out} exists already; name another file") from error


def _export_to(file: TextIO, log: Log, run_id: UUID) -> None:
    info = log.info(run_id)
    about = {"session": str(run_id), "created_at": info.created_at.isoformat(), "tags": dict(info.tags)}
    print(json.dumps({"format": "treenail-export-1", **about}), file=file)
    for each in log.read(run_id, after=info.first - 1):
        line = {
            "seq": each.seq,
            "at": each.at.isoformat(),
            "type": each.type,
            "turn_id": each.turn_id,
            "payload": _payload(each.payload),
            "checksum": each.checksum.hex(),
        }
        print(json.dumps(line, ensure_ascii=False), file=file)


def _payload(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except ValueError:
        return {"base64": base64.b64encode(payload).decode()}


@click.command
@required_run
@click.option("--keep-last", default=1000, show_default=True, help="How many of the newest events to keep.")
@store_option
@json_option
def prune(run: str, keep_last: int, store: str | None, as_json: bool) -> None:
    """Delete the oldest events of a run.

    The record of what it spent stays. RUN is a run's id, the beginning of it, or @last.

    Example: treenail prune 3f2a --keep-last 200
    """
    place, run_id = run_named(store, run)
    gone = prune_run(place, run_id, keep_last=keep_last)
    print_result(as_json, {"run": str(run_id), "forgotten_events": gone}, f"deleted {gone} events")


@click.command
@required_run
@click.option("--yes", "sure", is_flag=True, help="Do not ask.")
@click.option("--abandon", is_flag=True, help="Keep what a call that was cut off has changed.")
@store_option
@json_option
def erase(run: str, sure: bool, abandon: bool, store: str | None, as_json: bool) -> None:
    """Delete a run for good. Your files stay as they are.

    Its log, its child runs and the file contents kept for it are deleted. If a crash cut off one of its
    calls, resume or roll back the run first, or use --abandon. RUN is a run's id, the beginning of it, or
    @last.

    Example: treenail erase 3f2a --yes
    """
    place, run_id = run_named(store, run)
    short = str(run_id)[:8]
    if not sure:
        if not sys.stdin.isatty():
            raise UsageError("erasing cannot be undone; confirm it with --yes")
        click.confirm(f"Delete run {short} for good?", abort=True)
    erase_run(place, run_id, abandon=abandon)
    print_result(
        as_json,
        {"run": str(run_id), "erased": str(run_id)},
        f"deleted run {short} and its children; your files are untouched",
    )


@click.command
@click.argument("into", type=click.Path(path_type=Path))
@store_option
@json_option
def salvage(into: Path, store: str | None, as_json: bool) -> None:
    """Copy the readable part of a damaged store.

    INTO is a new file. The damaged file stays as it is.

    Example: treenail salvage whole.db --store runs.db
    """
    reports = salvage_store(store_named(store), into)
    data = [
        {
            "run": str(each.session_id),
            "whole": each.ok,
            "last_event": each.last_good_seq,
            "damage": [damage.message for damage in each.damage],
        }
        for each in reports
    ]
    if as_json:
        print_json({"into": str(into), "sessions": data})
        return
    print(f"copied {len(reports)} sessions into {into}, {sum(each.ok for each in reports)} of them complete")
    for each in reports:
        if not each.ok:
            found = each.damage[0].message
            print(f"  {str(each.session_id)[:8]} up to event {each.last_good_seq}: {found}")
    if not all(each.ok for each in reports):
        print("later events are not in the copy, but the files are as the run left them")
    print(f"list them with: treenail list --store {into}")

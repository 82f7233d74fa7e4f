"""The commands that look: list, show, diff, replay, export. None of them changes a run."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

from rich.console import Console
from rich.table import Table

from treenail.agent import workspace_of, workspace_store
from treenail.conversation.inspection import inspect_replay
from treenail.errors import LogDamagedError, SessionNotFoundError, UsageError
from treenail.presenters.cli import models, places, settings
from treenail.presenters.cli.stored import describe, in_words, opened_log, reading, way_out
from treenail.presenters.cli.timeline import show_timeline, timeline
from treenail.state.execution import ExecutionState
from treenail.state.resources import ResourceRegistry
from treenail.state.session import Session
from treenail.tools.boundaries import boundaries, diff_calls
from treenail.workspace.base import Filesystem
from treenail.workspace.host import HostFilesystem

_PIPE_WIDTH = 160
"""How wide a table is where no terminal says it."""

_MARKS = {
    "completed": "green",
    "running": "cyan",
    "held": "yellow",
    "unfinished": "yellow",
    "interrupted": "yellow",
    "empty": "dim",
}


def print_json(data: object) -> None:
    """Print one JSON document."""
    print(json.dumps(data, ensure_ascii=False, indent=2))


def list_runs(store: Path, *, as_json: bool, everything: bool = False) -> int:
    """List the runs of a store, oldest first; children only if they are asked for.

    Returns 1 if one of them is damaged, else 0.
    """
    with opened_log(store) as log:
        infos = [each for each in log.sessions() if everything or each.parent_id is None]
        known = []
        for info in infos:
            with suppress(SessionNotFoundError):  # Somebody erases it just now.
                known.append(describe(log, info))
    if as_json:
        print_json([each.as_data() for each in known])
        return _told(store, sum(each.is_damaged for each in known))
    if not known:
        print("no runs yet")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "began", "state", "events", "agent", "task"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for each in known:
        data = each.as_data()
        style = _MARKS.get(each.state, "red")
        state = f"[{style}]{each.state}[/]" + (
            f" ({each.reason})" if each.reason and not each.is_damaged else ""
        )
        table.add_row(
            str(data["id"])[:8],
            f"{each.info.created_at:%Y-%m-%d %H:%M}",
            state,
            str(data["events"]),
            str(data["agent"]),
            " ".join(each.task.split())[:60],
        )
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)
    return _told(store, sum(each.is_damaged for each in known))


def _told(store: Path, damaged: int) -> int:
    """Say what to do about damaged runs, if there are any. Returns the exit code."""
    if not damaged:
        return 0
    print(
        f"treenail: {'1 run is' if damaged == 1 else f'{damaged} runs are'} damaged; nothing was changed or "
        f"deleted; copy what is whole with `{way_out(store)}`, and go on in the copy",
        file=sys.stderr,
    )
    return 1


def show(store: Path, run_id: UUID, *, as_json: bool) -> int:
    """Show what happened in a run, and in its children, as far as it can be read.

    Returns 1 if one of them is damaged, else 0.
    """
    console = Console()
    with opened_log(store) as log:
        if as_json:
            data, damaged = _tree_data(log, store, run_id)
            print_json(data)
        else:
            damaged = _show_tree(console, log, run_id, "")
    return _told(store, damaged)


def _show_tree(console: Console, log: Any, run_id: UUID, indent: str) -> int:
    """Show a run and its children. Returns how many of them are damaged."""
    info = log.info(run_id)
    known = describe(log, info)
    mark = _MARKS.get(known.state, "red")
    name = known.agent or "no agent"
    console.print(
        f"{indent}[bold]{'└ child' if indent else 'run'} {str(run_id)[:8]}[/] ", end="", highlight=False
    )
    console.print(f"[{mark}]{known.state}[/]", end="", highlight=False)
    console.print(f" · {name} · {info.created_at:%Y-%m-%d %H:%M} UTC", markup=False, highlight=False)
    damage = known.reason if known.is_damaged else ""
    with Session.open(log, run_id, read_only=True) as session:
        try:
            show_timeline(console, session, indent)
        except LogDamagedError as error:
            damage = in_words(str(error))
    if damage:
        console.print(f"{indent}[red]the log is damaged from here on:[/]", end=" ", highlight=False)
        console.print(damage, markup=False, highlight=False, soft_wrap=True)
    children = [each.session_id for each in log.sessions(parent_id=run_id)]
    return bool(damage) + sum(_show_tree(console, log, each, indent + "    ") for each in children)


def _tree_data(log: Any, store: Path, run_id: UUID) -> tuple[dict[str, object], int]:
    """Return a run and its children as JSON data, and how many of them are damaged."""
    known = describe(log, log.info(run_id))
    damage = known.reason if known.is_damaged else ""
    lines: list[dict[str, object]] = []
    with Session.open(log, run_id, read_only=True) as session:
        try:
            for line in timeline(session):
                lines.append(
                    {
                        "seq": line.seq,
                        "at": line.at.isoformat(),
                        "kind": line.kind,
                        "text": line.text,
                        "good": line.good,
                    }
                )
        except LogDamagedError as error:
            damage = in_words(str(error))
    below = [_tree_data(log, store, each.session_id) for each in log.sessions(parent_id=run_id)]
    data = known.as_data()
    if damage:
        data |= {"damage": damage, "next_actions": [way_out(store)]}
    data |= {"timeline": lines, "children": [each for each, _ in below]}
    return data, bool(damage) + sum(each for _, each in below)


def diff(store: Path, run_id: UUID, *, first: str | None, last: str | None, as_json: bool) -> None:
    """Show what a run changed in the files: all of it, one call, or from one call to another."""
    with reading(store, run_id) as session:
        calls = [each for each in boundaries(session) if each.success]
        place = workspace_of(session)
        if place is None:
            raise UsageError("this run worked in memory; there are no files to compare")
        if not calls:
            raise UsageError("this run has no finished tool call, so it changed nothing")
        filesystem = HostFilesystem(
            place, store=workspace_store(store), line=f"session-{run_id}", read_only=True
        )
        try:
            state = ExecutionState(
                session, ResourceRegistry.build({Filesystem: filesystem}), clock=session.clock
            )
            start = first or calls[0].call_id
            end = last or (first if first is not None else calls[-1].call_id)
            found = diff_calls(state, start, end)
        finally:
            filesystem.close()
    if as_json:
        changes = [{"path": each.path, "kind": each.kind} for each in found.changes]
        print_json({"from": start, "to": end, "changes": changes, "text": found.text})
        return
    print(found.text or "nothing changed")


def replay(store: Path, run_id: UUID, *, at: int | None, as_json: bool) -> None:
    """Show what the model would see next, and what was left out and why."""
    with reading(store, run_id, must_be_whole=at is None) as session:
        found = inspect_replay(session, at)
    if as_json:
        print_json(found.to_data())
        return
    print(found.render())


def show_config(directory: Path, environ: Mapping[str, str], *, as_json: bool) -> None:
    """Print every setting with its value and its source; also what stands in for a value that nobody set."""
    found = settings.load({}, environ, directory)
    shown = {name: (each.value, each.source) for name, each in found.chosen.items()}
    if found["store"] is None:
        shown["store"] = (str(places.store_for(directory, None, environ)), settings.DEFAULT)
    if found["model"] is None:
        for key, model in models.DEFAULTS:
            if environ.get(key) and found["base_url"] is None:
                shown["model"] = (model, f"{settings.DEFAULT}, as {key} is set")
                break
    if as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in shown.items()})
        return
    width = max(len(str(value)) for value, _ in shown.values())
    for name, (value, source) in shown.items():
        print(f"{name:<14} {'-' if value is None else value!s:<{width}}  {source}")


def export(store: Path, run_id: UUID, out: Path | None) -> None:
    """Write every event of a run as a line of JSON: its place, its time, its type, its payload."""
    with opened_log(store) as log:
        if out is None:
            _export_to(sys.stdout, log, run_id)
            return
        try:
            with out.open("x", encoding="utf-8") as file:
                _export_to(file, log, run_id)
        except FileExistsError as error:
            raise UsageError(f"{out} exists already; name another file") from error


def _export_to(file: TextIO, log: Any, run_id: UUID) -> None:
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

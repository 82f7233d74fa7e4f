"""The commands about a run's files: diff, rollback, undo, redo, fork, fetch."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Any

import click

from treenail.errors import UsageError
from treenail.history import (
    branch_run,
    counted,
    diff_run,
    fetch_run,
    fork_run,
    patch_run,
    preview_undo,
    redo_run,
    rollback_run,
    undo_run,
    undone_text,
)
from treenail.presenters.cli.console import print_diff
from treenail.presenters.cli.options import (
    json_option,
    run_argument,
    run_named,
    store_option,
    take_over_option,
)
from treenail.presenters.cli.output import print_json, print_result
from treenail.presenters.cli.stores import flag_for
from treenail.tools import EndedCall, RolledBack
from treenail.workspace import shown_path


@click.command
@run_argument
@click.option("--call", help="One call, or the first of several.")
@click.option("--upto", help="The last of several calls.")
@store_option
@json_option
def diff(run: str, call: str | None, upto: str | None, store: str | None, as_json: bool) -> None:
    """Show what a run changed in the files, as a diff.

    A call that was undone is named, and is not in the diff unless it is asked for with --call. RUN is a run's
    id, the beginning of it, or @last.

    Example: treenail diff @last --call call_3_1
    """
    found = diff_run(*run_named(store, run), call, upto)
    undone = [
        {"call": each.call_id, "tool": each.tool_name, "by": each.undone.by, "at": each.undone.at.isoformat()}
        for each in found.undone
        if each.undone is not None
    ]
    data = {
        "from": found.first,
        "to": found.last,
        "changes": [{"path": each.path, "kind": each.kind} for each in found.diff.changes],
        "text": found.diff.text,
        "undone": undone,
    }
    if as_json:
        print_json(data)
        return
    for each in found.undone:
        print(f"# {undone_text(each)}")
    print_diff(found.diff.text or "nothing changed")


@click.command
@run_argument
@click.option("--call", help="The call to undo, with all later ones. By default the newest one that stands.")
@take_over_option
@store_option
@json_option
def rollback(run: str, call: str | None, take_over: bool, store: str | None, as_json: bool) -> None:
    """Restore files and state to before a tool call.

    A second rollback undoes the call before. What you have edited since is left alone; if it is in the way,
    nothing is changed. RUN is a run's id, the beginning of it, or @last.

    Example: treenail rollback @last --call call_2_1
    """
    place, run_id = run_named(store, run)
    boundary, done = rollback_run(place, run_id, call, by=_person(), take_over=take_over)
    data = {"run": str(run_id), "rolled_back_to": boundary.call_id, "side": "before"}
    print_result(
        as_json,
        data | _rolled_back(done),
        f"files and state are as they were before {boundary.tool_name} ({boundary.call_id})\n"
        f"undone: {_listed(done.undone)}\n{_kept(done)}"
        f"take that back with: treenail redo {str(run_id)[:8]}{flag_for(place)}",
    )


@click.command
@run_argument
@click.option("--turn", is_flag=True, help="Undo only the newest turn that changed files.")
@click.option("--yes", is_flag=True, help="Undo without asking.")
@take_over_option
@store_option
@json_option
def undo(run: str, turn: bool, yes: bool, take_over: bool, store: str | None, as_json: bool) -> int:
    """Undo everything that a run did to the files, or that its newest turn did.

    Shows what would change and asks first; without a terminal it needs --yes. If you have edited one of these
    files since, nothing is undone. RUN is a run's id, the beginning of it, or @last.

    Example: treenail undo @last
    """
    place, run_id = run_named(store, run)
    found = preview_undo(place, run_id, last_turn=turn, take_over=take_over)
    changes = [{"path": each.path, "kind": each.kind} for each in found.changes]
    data: dict[str, Any] = {"run": str(run_id), "changes": changes, "text": found.text}
    asks = not yes and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if not as_json:
        print_diff(found.text or "no file would change")
    if asks and not click.confirm(f"undo {counted(len(found.changes), 'change')} of run {str(run_id)[:8]}?"):
        print("nothing was undone")
        return 1
    if not yes and not asks:
        if as_json:
            print_json({**data, "is_undone": False})
            return 2
        raise UsageError("nothing was undone; that is what would change: add --yes to undo it")
    done = undo_run(place, run_id, last_turn=turn, by=_person())
    again = f"treenail redo {str(run_id)[:8]}{flag_for(place)}"
    text = f"undone: {_listed(done.undone)}\n{_kept(done)}take that back with: {again}"
    print_result(as_json, {**data, "is_undone": True} | _rolled_back(done), text)
    return 0


@click.command
@run_argument
@take_over_option
@store_option
@json_option
def redo(run: str, take_over: bool, store: str | None, as_json: bool) -> None:
    """Take the last undo or rollback of a run back.

    RUN is a run's id, the beginning of it, or @last.

    Example: treenail redo @last
    """
    place, run_id = run_named(store, run)
    done = redo_run(place, run_id, by=_person(), take_over=take_over)
    data = {"run": str(run_id)} | _rolled_back(done)
    print_result(as_json, data, f"these calls stand again: {_listed(done.redone)}\n{_kept(done)}".rstrip())


def _rolled_back(done: RolledBack) -> dict[str, Any]:
    return {
        "undone": [each.call_id for each in done.undone],
        "redone": [each.call_id for each in done.redone],
        "paths": list(done.paths),
        "kept": list(done.kept),
        "notes": list(done.notes),
        "by": done.by,
    }


def _listed(calls: tuple[EndedCall, ...]) -> str:
    return ", ".join(f"{each.tool_name} ({each.call_id})" for each in calls) or "nothing"


def _kept(done: RolledBack) -> str:
    """Say what was left as it is, and what was taken away without knowing whose it was, and is kept."""
    told = "".join(f"note: {each}\n" for each in done.notes)
    if not done.kept:
        return told
    names = ", ".join(map(shown_path, done.kept))
    return f"{told}kept, because you may have written them yourself: {names}; see: treenail recover\n"


def _person() -> str:
    """Return the name of whoever types the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


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
    made, at = fork_run(place, run_id, into, call, after=after, by=_person())
    side = "after" if after else "before"
    print_result(
        as_json,
        {"run": str(made), "from": str(run_id), "call": at.call_id, "workspace": str(into)},
        f"run {str(made)[:8]} starts {side} {at.tool_name} ({at.call_id}) in {into}\n"
        f"resume it with: treenail resume {str(made)[:8]}{flag_for(place)}",
    )


@click.command
@run_argument
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option(
    "--patch", type=click.Path(path_type=Path, allow_dash=True), help="Write a patch here; - prints."
)
@click.option("--branch", help="Make this branch, a commit for each call, in the repository --repo.")
@click.option("--repo", type=click.Path(path_type=Path), default=Path(), help="A git repository.")
@store_option
@json_option
def fetch(
    run: str,
    directory: Path | None,
    patch: Path | None,
    branch: str | None,
    repo: Path,
    store: str | None,
    as_json: bool,
) -> None:
    """Get the files of a run that workers worked on.

    DIRECTORY is a new one, or an empty one. RUN is a run's id, the beginning of it, or @last. The files are
    those of the last boundary in the run's log, whichever machine has worked on it.

    Example: treenail fetch @last result
    """
    if sum(each is not None for each in (directory, patch, branch)) != 1:
        raise UsageError("say where the files go: a directory, --patch FILE or --branch NAME")
    if as_json and str(patch) == "-":
        raise UsageError("--patch - prints the patch itself; name a file to have --json")
    place, run_id = run_named(store, run)
    data: dict[str, Any] = {"run": str(run_id)}
    if directory is not None:
        fetch_run(place, run_id, directory)
        told = f"the files of run {str(run_id)[:8]} are in {directory}"
        print_result(as_json, {**data, "directory": str(directory)}, told)
    elif patch is not None:
        content = patch_run(place, run_id)
        if str(patch) == "-":
            sys.stdout.buffer.write(content)
        else:
            patch.write_bytes(content)
            told = f"the changes of run {str(run_id)[:8]} are in {patch}; apply them with: git apply {patch}"
            print_result(as_json, {**data, "patch": str(patch)}, told)
    elif branch is not None:
        commit = branch_run(place, run_id, repo, branch)
        told = f"the branch {branch} of {repo} ends with {commit[:12]}; look at it with: git log -p {branch}"
        print_result(as_json, {**data, "branch": branch, "commit": commit}, told)

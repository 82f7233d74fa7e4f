"""Files that an undo took away without knowing whose they were: listing them and bringing them back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from treenail.history import KeptByRun, kept_by_runs, name_to_recover, recover_files
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.options import json_option, store_named, store_option
from treenail.presenters.cli.output import print_json, print_result
from treenail.workspace import shown_path

MAX_SHOWN = 20
"""How many paths of one undo are named."""


@click.command
@click.argument("what", required=False)
@click.option(
    "--into", type=click.Path(path_type=Path), help="Write it there, and leave the workspace alone."
)
@store_option
@json_option
def recover(what: str | None, into: Path | None, store: str | None, as_json: bool) -> None:
    """Bring back a file that an undo took away.

    WHAT is a path, or the id of an undone call for all of its files. What is there now is kept in its turn:
    recover it again to have it back. Without WHAT, everything that can be brought back is listed; an older
    version of a path is named by its commit there.

    Example: treenail recover notes.txt
    """
    place = store_named(store)
    if what is None:
        known = kept_by_runs(place)
        if as_json:
            print_json([each.to_data() for each in known])
            return
        for each in known:
            print_kept(GuardedConsole(), each, known)
        if not known:
            print("no undo has taken a file away")
        return
    kept, back, replaced = recover_files(place, what, directory=Path.cwd(), into=into)
    where = f" in {into}" if into is not None else ""
    text = f"brought back{where}: {_listed(back)}" if back else "the files are as they were kept already"
    if replaced:
        text += f"\nwhat was there instead is kept as well: {_listed(replaced)}"
    data = {"kept": kept.to_data(), "recovered": list(back), "replaced": list(replaced)}
    print_result(as_json, data, text)


def print_kept(console: Console, kept: KeptByRun, known: Sequence[KeptByRun]) -> None:
    """Print what one undo took away, and how to bring it back; `known` is all that the store's undos kept."""
    console.print("        [bold]kept    [/]", end="", highlight=False)
    paths = kept.files.paths
    console.print(
        f"{_listed(paths)}: {kept.sentence}; bring back with: treenail recover "
        f"{shown_path(name_to_recover(kept, known))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _listed(paths: Sequence[str]) -> str:
    names = [shown_path(each) for each in paths]
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more

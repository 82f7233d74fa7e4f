"""`holdfast`: the commands. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from holdfast.errors import HoldfastError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Agents whose runs can be trusted.",
)

Store = Annotated[Path, typer.Option("--store", help="The file that holds the runs.")]
_DEFAULT_STORE = Path(".holdfast/runs.db")


@app.command()
def demo(
    work_in: Annotated[Path | None, typer.Option(hidden=True, help="The demo's own worker process.")] = None,
) -> None:
    """See what no other agent does: failed tools leave no trace, killed runs go on, budgets hold."""
    from rich.console import Console

    from holdfast.presenters.cli import demo as show

    if work_in is not None:
        show.work(work_in)
        return
    raise typer.Exit(show.demo(Console()))


@app.command(name="list")
def list_runs(store: Store = _DEFAULT_STORE) -> None:
    """List the runs in a store, oldest first."""
    from holdfast.log.sqlite import SqliteLog

    log = SqliteLog(_existing(store))
    try:
        for info in log.sessions():
            agent = dict(info.tags).get("agent", "")
            print(f"{info.session_id}  {info.created_at:%Y-%m-%d %H:%M:%S}  {info.head:>6} events  {agent}")
    finally:
        log.close()


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="The run's id, or as much of its beginning as is unique.")],
    store: Store = _DEFAULT_STORE,
) -> None:
    """Show what happened in a run, event by event.

    Example: holdfast show 3f2a --store runs.db
    """
    from rich.console import Console

    from holdfast.presenters.cli import demo as shown

    shown.show(Console(), _existing(store), _find(_existing(store), run))


def _existing(store: Path) -> Path:
    if not store.exists():
        raise typer.BadParameter(f"there is no store at {store}; say where it is with --store")
    return store


def _find(store: Path, prefix: str) -> UUID:
    from holdfast.log.sqlite import SqliteLog

    log = SqliteLog(store)
    try:
        found = [
            each.session_id for each in log.sessions() if str(each.session_id).startswith(prefix.lower())
        ]
    finally:
        log.close()
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise typer.BadParameter(
            f"{what} in {store} begin with {prefix!r}; see `holdfast list --store {store}`"
        )
    return found[0]


def main() -> None:
    """Run the command line; an error that we raise on purpose is one sentence, not a traceback."""
    try:
        app()
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        raise SystemExit(1) from None

"""The options and arguments that several commands share, and how they name a store and a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import click

from treenail.errors import TreenailError, UsageError
from treenail.history import LAST, find_run, run_ids
from treenail.log import Store
from treenail.presenters.cli import settings, stores

F = TypeVar("F", bound=Callable[..., Any])


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the id of a run in a shell."""
    try:
        known = run_ids(store_named(None))
    except (TreenailError, OSError):
        return []
    return [each for each in (LAST, *known) if each.startswith(incomplete)]


run_argument = click.argument("run", default=LAST, shell_complete=complete_run)
"""A run: its id, the beginning of it, or `@last`, which is the default."""

required_run = click.argument("run", shell_complete=complete_run)
"""A run that must be named: for commands that delete."""

store_option = click.option("--store", help="The file that holds the runs, or a postgresql:// URL.")
take_over_option = click.option(
    "--take-over", is_flag=True, help="Kill the process that writes this run or its files now, and continue."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
image_option = click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="A PNG, JPEG, GIF or WebP file to show the model; may be repeated.",
)
directory_option = click.option(
    "--directory", "-C", type=click.Path(path_type=Path), help="The working directory, instead of this one."
)


_MODES = {
    "--read-only": "Refuse each call with effects.",
    "--auto": "Run each call without asking (the default).",
    "--ask": "Ask before each call with effects.",
}


def agent_options(command: F) -> F:
    """Add one option for each setting of a run."""
    return options_but()(command)


def options_but(*left_out: str) -> Callable[[F], F]:
    """Return what adds one option for each setting of a run, except for some."""
    return lambda command: _with_options(command, left_out)


def _with_options(command: F, left_out: Collection[str]) -> F:
    for each in reversed(settings.SETTINGS):
        if each.name in left_out:
            continue
        if each.name == "permissions":
            for flag, text in _MODES.items():
                command = click.option(flag, is_flag=True, help=text)(command)
        elif isinstance(each.default, bool):
            command = click.option(each.flag, each.name, is_flag=True, default=None, help=each.help)(command)
        elif each.name in settings.REPEATED:
            takes = settings.REPEATED[each.name]
            option = click.option(each.flag, each.name, metavar=takes, multiple=True, help=each.help)
            command = option(command)
        else:
            kind = "TEXT" if each.default is None or isinstance(each.default, str) else "NUMBER"
            command = click.option(each.flag, each.name, metavar=kind, help=each.help)(command)
    return command


def flags_of(given: dict[str, Any]) -> dict[str, object | None]:
    """Return what the options of `agent_options` say, by the names of the settings. Raises `UsageError`."""
    modes = [name for name in ("ask", "auto", "read_only") if given.pop(name)]
    if len(modes) > 1:
        raise UsageError("use only one of --ask, --auto and --read-only")
    given |= {name: given[name] or None for name in settings.REPEATED}
    return {**given, "permissions": modes[0] if modes else None}


def store_named(given: str | None) -> Store:
    """Return the store that a command reads. Raises `UsageError` if there is none."""
    directory = Path.cwd()
    said = settings.load({"store": given}, os.environ, directory).text("store")
    return stores.existing(stores.store_for(directory, said, os.environ))


def run_named(given: str | None, run: str) -> tuple[Store, UUID]:
    """Return the store and the run that a command is about. Raises `UsageError`."""
    store = store_named(given)
    return store, find_run(store, run)

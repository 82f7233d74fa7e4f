"""Where runs are stored: outside the directory that an agent works in, one store for each project."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from treenail.errors import TreenailError, UsageError
from treenail.log import PostgresUrl, Store, is_postgres, state_directory, store_named
from treenail.presenters.cli import settings

STORE_NAME = "runs.db"


def store_for(directory: Path, given: str | None, environ: Mapping[str, str]) -> Store:
    """Return the store of a project: `given`, or one under the user's state directory.

    By default it lies outside the project, where no tool of an agent can reach it.
    """
    if given is None:
        return own_directory(directory, environ) / STORE_NAME
    if is_postgres(given):
        return store_named(given)
    return Path(os.path.normpath(directory / Path(given).expanduser()))


def own_directory(directory: Path, environ: Mapping[str, str]) -> Path:
    """Return the directory under the user's state directory that belongs to a project."""
    return state_directory(environ) / settings.project_name(directory)


def flag_for(store: Store) -> str:
    """Return the flag that a command needs here to find a store; empty if it is the default one."""
    try:
        said = settings.load({}, os.environ, Path.cwd()).text("store")
        is_found = _same(store_for(Path.cwd(), said, os.environ), store)
    except (TreenailError, OSError):
        is_found = False
    return "" if is_found else f" --store {shlex.quote(str(store))}"


def _same(one: Store, other: Store) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return str(one) == str(other)


def salvage_command(store: Store) -> str:
    """Return the command that copies the readable part of a damaged store."""
    return f"treenail salvage whole.db{flag_for(store)}"


def ready(store: Store) -> Store:
    """Make the store's directory, which git ignores. Raises `UsageError` if it cannot be written."""
    if isinstance(store, PostgresUrl):
        return store
    directory = store.parent
    try:
        new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if new:
            (directory / ".gitignore").write_text("*\n", encoding="utf-8")
        probe = directory / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"runs cannot be stored in {directory} ({error.strerror or error}); name another file with "
            "--store or TREENAIL_STORE"
        ) from error
    return store


def existing(store: Store) -> Store:
    """Return a store that exists. Raises `UsageError` if it does not; a database says so when opened."""
    if isinstance(store, Path) and not store.is_file():
        raise UsageError(
            f'there are no runs yet: {store} does not exist; start one with `treenail run "task"`, or name '
            "another store with --store"
        )
    return store

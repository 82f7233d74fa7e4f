"""Where runs are stored: outside the directory that an agent works in, one store for each project."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from treenail.errors import TreenailError, UsageError
from treenail.presenters.cli import settings

STORE_NAME = "runs.db"


def project_of(directory: Path) -> Path:
    """Return the project of a directory: the nearest parent with a settings file or a repository."""
    for each in (directory, *directory.parents):
        if (each / "treenail.toml").is_file() or (each / ".git").exists():
            return each
    return directory


def store_for(directory: Path, given: str | None, environ: Mapping[str, str]) -> Path:
    """Return the store of a project: `given`, or one under the user's state directory.

    By default it lies outside the project, where no tool of an agent can reach it.
    """
    if given is not None:
        path = Path(given).expanduser()
        return Path(os.path.normpath(directory / path))
    project = project_of(directory.resolve())
    base = environ.get("XDG_STATE_HOME") or os.path.join(
        environ.get("HOME") or str(Path.home()), ".local/state"
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", project.name) or "root"
    digest = hashlib.sha256(os.fsencode(project)).hexdigest()[:12]
    return Path(base) / "treenail" / f"{name}-{digest}" / STORE_NAME


def flag_for(store: Path) -> str:
    """Return the flag that a command needs here to find a store; empty if it is the default one."""
    try:
        said = settings.load({}, os.environ, Path.cwd()).text("store")
        is_found = store_for(Path.cwd(), said, os.environ).resolve() == store.resolve()
    except (TreenailError, OSError):
        is_found = False
    return "" if is_found else f" --store {shlex.quote(str(store))}"


def salvage_command(store: Path) -> str:
    """Return the command that copies the readable part of a damaged store."""
    return f"treenail salvage whole.db{flag_for(store)}"


def ready(store: Path) -> Path:
    """Make the store's directory, which git ignores. Raises `UsageError` if it cannot be written."""
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


def existing(store: Path) -> Path:
    """Return a store that exists. Raises `UsageError` if it does not."""
    if not store.is_file():
        raise UsageError(
            f'there are no runs yet: {store} does not exist; start one with `treenail run "task"`, or name '
            "another store with --store"
        )
    return store

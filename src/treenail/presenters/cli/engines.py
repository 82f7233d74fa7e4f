"""The engines that wake workers, by name. An engine's module is imported when it is used."""

from __future__ import annotations

import getpass
import importlib
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID

import click

from treenail.containment import Limits
from treenail.engine import Dispatcher, resume_run, shared, wake_run
from treenail.errors import UsageError
from treenail.log import Log, PostgresUrl, Store, open_log
from treenail.presenters.cli import settings
from treenail.state import Session
from treenail.turns import ceilings_of, submission_of

F = TypeVar("F", bound=Callable[..., Any])

ABSURD = "absurd"
ENGINES = (ABSURD,)
_CEILINGS = {
    "max_cost_usd": "max_cost",
    "max_steps": "max_steps",
    "max_retries": "max_retries",
    "timeout": "timeout",
}
"""The ceilings of a run, and the settings that they come from."""


def engine_options(command: F) -> F:
    """Add the option that says which engine wakes workers."""
    return click.option(
        "--engine",
        type=click.Choice(ENGINES),
        envvar="TREENAIL_ENGINE",
        default=ABSURD,
        show_default=True,
        help="What wakes workers: absurd, in the same database.",
    )(command)


queue_option = click.option("--queue", default="default", show_default=True, help="The queue of the run.")


def opened_shared(store: Store, *, create: bool = False, max_connections: int = 4) -> closing[Log]:
    """Open a store that workers share. Raises `UsageError` for one that they cannot."""
    if not isinstance(store, PostgresUrl):
        raise UsageError(
            f"workers share a database, and {store} is a file; name one with --store postgresql://... or "
            "TREENAIL_STORE"
        )
    if create or max_connections != 4:
        postgres = importlib.import_module("treenail.log.postgres")
        log: Log = postgres.PostgresLog(store, create=create, max_connections=max_connections)
    else:
        log = open_log(store, must_exist=True)
    shared(log)
    return closing(log)


def woken(store: Store, run_id: UUID) -> bool:
    """Wake workers for a run that was changed; say whether they look after it.

    If its engine cannot be told from here, a worker's sweeper finds the run, within a lease.
    """
    if not isinstance(store, PostgresUrl):
        return False
    with opened_shared(store) as log:
        found = shared(log).agenda.entry(run_id)
        if found is None:
            return False
        try:
            dispatcher: Dispatcher | None = dispatcher_for(found.engine, log)
        except UsageError:
            dispatcher = None
        return wake_run(log, dispatcher, run_id)


def resumed_by_workers(store: PostgresUrl, run_id: UUID, flags: Mapping[str, object | None]) -> bool:
    """Have workers resume a run, with the ceilings of the flags; False if it was never submitted to them.

    Raises `UsageError` if it cannot be resumed.
    """
    with opened_shared(store) as log:
        with Session.open(log, run_id, read_only=True) as session:
            if submission_of(session) is None:
                return False
            before = ceilings_of(session) or Limits()
        given = settings.load(flags, os.environ, Path.cwd())
        wanted: dict[str, Any] = {
            name: given[setting] for name, setting in _CEILINGS.items() if flags.get(setting) is not None
        }
        limits = replace(before, **wanted) if wanted else None
        engine = os.environ.get("TREENAIL_ENGINE", ABSURD)
        resume_run(log, dispatcher_for(engine, log), run_id, limits=limits, by=who())
    return True


def who() -> str:
    """Say who acts, for the log: a user and a machine."""
    with suppress(KeyError, OSError):
        return f"{getpass.getuser()}@{socket.gethostname()}"
    return socket.gethostname()


def dispatcher_for(engine: str, log: Log) -> Dispatcher:
    """Return the way to an engine. Raises `UsageError` if there is none, or its extra is not installed."""
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}; choose {' or '.join(ENGINES)}")
    try:
        module = importlib.import_module(f"treenail.engine.{engine}")
    except ImportError as error:
        raise UsageError(
            f"the extra {engine!r} is not installed (there is no {error.name}); in a checkout of Treenail, "
            f"install it with `pip install '.[{engine}]'`"
        ) from error
    return cast(Dispatcher, module.AbsurdDispatcher(log))

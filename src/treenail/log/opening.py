"""Opening a store, whichever kind it is. A driver is imported when its kind of store is opened."""

from __future__ import annotations

import importlib
from pathlib import Path

from treenail.errors import SessionNotFoundError, UsageError
from treenail.log.base import Log
from treenail.log.memory import MemoryLog
from treenail.log.stores import PostgresUrl, store_named


def open_log(store: str | Path | PostgresUrl | Log | None, *, must_exist: bool = False) -> Log:
    """Open a store: None is a log in memory, a path is SQLite, a `postgresql://` URL is Postgres.

    A log is returned as it is.
    """
    if store is None:
        return MemoryLog()
    if not isinstance(store, (str, Path, PostgresUrl)):
        return store
    place = store_named(store)
    if isinstance(place, PostgresUrl):
        return _postgres_log(place, create=not must_exist)
    if must_exist and not place.exists():
        raise SessionNotFoundError(f"there is no store at {store}; check the path")
    # Imported here so that `import treenail` does not load the driver.
    from treenail.log.sqlite import SqliteLog

    return SqliteLog(place)


def _postgres_log(url: PostgresUrl, *, create: bool) -> Log:
    try:
        postgres = importlib.import_module("treenail.log.postgres")
    except ImportError as error:
        raise UsageError(
            f"the extra 'postgres' is not installed (there is no {error.name or error}); in a checkout of "
            f"Treenail, install it with `pip install '.[postgres]'`"
        ) from error
    log: Log = postgres.PostgresLog(url, create=create)
    return log

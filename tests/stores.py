"""The durable stores that tests run on, by name, and how a test's directory leads to its store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treenail.log.sqlite import SqliteLog

if TYPE_CHECKING:
    from treenail.log.postgres import PostgresLog

STORES = ("sqlite", "postgres")


def store_in(kind: str, directory: Path) -> str:
    """Name the store of a test's directory: a file in it, or a schema of its own."""
    if kind != "postgres":
        return str(directory / "log.db")
    from tests.postgres import shared  # A child process that uses SQLite does not need it.

    return shared().url(directory)


def open_store(store: str | Path, *, synchronous: Any = "FULL", **options: Any) -> SqliteLog | PostgresLog:
    """Open a store by its name."""
    if str(store).startswith("postgresql://"):
        from treenail.log.postgres import PostgresLog

        return PostgresLog(str(store), **options)
    return SqliteLog(store, synchronous=synchronous, **options)

"""What SQLite's errors mean here, and the errors that a user gets in their place.

Code that finds damage by itself raises a plain `sqlite3.DatabaseError`, as SQLite does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treenail.errors import LogBusyError, LogDamagedError, LogError

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_NOT_DAMAGE = _BUSY | {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_NOMEM,
}
_DAMAGED_IO = frozenset({sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS})


def code_of(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0 for an error that came from its Python side."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: BaseException) -> bool:
    """Return whether it failed because others use the file."""
    return isinstance(error, LogBusyError) or (isinstance(error, sqlite3.Error) and code_of(error) in _BUSY)


def is_damage(error: BaseException) -> bool:
    """Return whether an error means that the file is damaged."""
    if isinstance(error, UnicodeDecodeError):
        # SQLite quotes damaged text in its messages, and Python then fails to read them.
        return True
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return False
    return code_of(error) not in _NOT_DAMAGE or getattr(error, "sqlite_errorcode", 0) in _DAMAGED_IO


def readable(connection: sqlite3.Connection, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
    """Yield what a query finds up to the first damage."""
    try:
        yield from connection.execute(query, values)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise


def _damaged(path: Path, what: str) -> LogDamagedError:
    """Make the error that says what is damaged and what can be done."""
    return LogDamagedError(
        f"{path}: {what}; nothing was changed or deleted; what is whole can be read with "
        f"SqliteLog(path, read_only=True), and SqliteLog.salvage(damaged, into) copies it into a new file"
    )


def translated(path: Path, doing: str, error: BaseException) -> BaseException:
    """Return the error that a user gets: ours for what SQLite or the system said, else the error itself."""
    if is_damage(error):
        return _damaged(path, f"could not {doing} ({error})")
    if isinstance(error, OSError) and error.errno is not None:
        return LogError(
            f"could not {doing}: the system does not let {path} be used ({error}); nothing was written; "
            f"check its directory and how many files may be open"
        )
    if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.ProgrammingError):
        return error
    code = code_of(error)
    if code == sqlite3.SQLITE_FULL:
        return LogError(
            f"could not {doing}: no room left for {path} ({error}); nothing was written and nothing was "
            f"lost; make room and try again"
        )
    if code == sqlite3.SQLITE_IOERR:
        return LogError(
            f"could not {doing}: the system failed to read or write {path} ({error}); nothing was written; "
            f"check the disk and its free space, and try again"
        )
    return LogError(
        f"could not {doing}: {path} cannot be used ({error}); check that its directory exists and that it "
        f"may be written"
    )

"""The SQLite file's schema, as numbered migrations.

`PRAGMA user_version` holds the number of the newest migration that a file has
seen. Each migration is one transaction, so that one that was cut off has not
happened and is repeated. A migration that was released is never edited; the
next change gets the next number.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from treenail.errors import LogError, LogVersionError

APPLICATION_ID = 0x54724E6C
"""Marks a SQLite file as a Treenail log (`PRAGMA application_id`): the letters "TrNl"."""

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    1: (
        """
        CREATE TABLE sessions (
            key INTEGER PRIMARY KEY,
            session_id BLOB NOT NULL UNIQUE,
            created_us INTEGER NOT NULL,
            parent_id BLOB,
            tags TEXT NOT NULL,
            first_seq INTEGER NOT NULL,
            anchor BLOB NOT NULL,
            checksum BLOB NOT NULL
        )
        """,
        # Positions are handed out in the order of appending, whatever the session: pages fill up
        # completely, and a file that lost its end lost only its newest events. `rows.py` says what a
        # row holds; seq, at_us and checksum are those of its last event.
        """
        CREATE TABLE events (
            position INTEGER PRIMARY KEY,
            session_key INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            at_us INTEGER NOT NULL,
            checksum BLOB NOT NULL,
            payload BLOB NOT NULL
        )
        """,
        "CREATE UNIQUE INDEX events_by_session ON events (session_key, seq)",
        # head_seq is where the session was at the last heartbeat: a second witness of its length.
        """
        CREATE TABLE leases (
            session_key INTEGER PRIMARY KEY,
            epoch INTEGER NOT NULL,
            owner TEXT,
            ttl_us INTEGER NOT NULL,
            expires_us INTEGER NOT NULL,
            head_seq INTEGER NOT NULL,
            checksum BLOB NOT NULL
        )
        """,
        """
        CREATE TABLE snapshots (
            session_key INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            checksum BLOB NOT NULL,
            payload BLOB NOT NULL,
            PRIMARY KEY (session_key, seq)
        )
        """,
        # A row says that something was deleted whose bytes have not yet been overwritten for sure.
        "CREATE TABLE scrubs (digest BLOB NOT NULL)",
    ),
    2: (
        """
        CREATE TABLE notes (
            session_key INTEGER PRIMARY KEY,
            epoch INTEGER NOT NULL,
            checksum BLOB NOT NULL,
            payload BLOB NOT NULL
        )
        """,
        # Money that processes share, in pico-dollars: the sums of a pot, and what is reserved of it.
        """
        CREATE TABLE pots (
            name TEXT PRIMARY KEY,
            spent INTEGER NOT NULL,
            reserved INTEGER NOT NULL,
            checksum BLOB NOT NULL
        )
        """,
        """
        CREATE TABLE reservations (
            id TEXT PRIMARY KEY,
            pot TEXT NOT NULL,
            amount INTEGER NOT NULL,
            checksum BLOB NOT NULL
        )
        """,
    ),
}

LATEST = max(MIGRATIONS)
"""The schema version that this Treenail writes."""


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, 0 for an empty database. Refuse what is not ours or not known here."""
    application, version, schema = _identity(connection)
    if application == version == 0 and not schema:
        return 0
    if application != APPLICATION_ID:
        raise LogError(
            f"{path} is a SQLite file of another application (application_id {application:#x}); "
            f"it was left untouched; choose another path for the log"
        )
    if version > LATEST:
        raise LogVersionError(
            f"{path} has schema version {version}, and this Treenail knows versions up to {LATEST}; "
            f"the file was left untouched; open it with a newer Treenail"
        )
    expected = {each.strip() for number in range(1, version + 1) for each in MIGRATIONS[number]}
    if version < 1 or not expected <= schema:
        raise sqlite3.DatabaseError(f"its tables are not those of schema version {version}")
    return version


def _identity(connection: sqlite3.Connection) -> tuple[int, int, set[str]]:
    """Return application, version and tables as of one moment: another process may migrate meanwhile."""
    within = connection.in_transaction
    if not within:
        connection.execute("BEGIN")
    try:
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        found = connection.execute("SELECT sql FROM sqlite_schema").fetchall()
    finally:
        if not within:
            connection.execute("ROLLBACK")
    return application, version, {sql.strip() for (sql,) in found if type(sql) is str}


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file up to the latest version, one transaction for each migration."""
    while version_of(connection, path) < LATEST:
        connection.execute("BEGIN IMMEDIATE")
        # Another process may have been faster.
        version = version_of(connection, path)
        if version < LATEST:
            for statement in MIGRATIONS[version + 1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")

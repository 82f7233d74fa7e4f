"""The SQLite file's schema, as numbered migrations.

`PRAGMA user_version` holds the number of the newest migration that a file has
seen. Each migration is one transaction, so that one that was cut off has not
happened and is repeated. A migration that was released is never edited; the
next change gets the next number.
"""

from __future__ import annotations

from collections.abc import Mapping

APPLICATION_ID = 0x486F6C64
"""Marks a SQLite file as a Treenail log (`PRAGMA application_id`): the letters "Hold"."""

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    # Positions are handed out in the order of appending, whatever the session: pages fill up
    # completely, and a file that lost its end lost only its newest events. The payload comes last,
    # so that the other columns of a big event are read without walking through it.
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
        """
        CREATE TABLE events (
            position INTEGER PRIMARY KEY,
            session_key INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            at_us INTEGER NOT NULL,
            type TEXT NOT NULL,
            turn_id TEXT,
            run_id TEXT,
            trace_id TEXT,
            rolled_back INTEGER NOT NULL,
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
        # A row says that something was deleted whose bytes have not yet been overwritten for sure.
        "CREATE TABLE scrubs (digest BLOB NOT NULL)",
    ),
    2: (
        """
        CREATE TABLE snapshots (
            session_key INTEGER NOT NULL,
            seq INTEGER NOT NULL,
            checksum BLOB NOT NULL,
            payload BLOB NOT NULL,
            PRIMARY KEY (session_key, seq)
        )
        """,
    ),
    # The tables stay as they are. From here on an event's payload may be stored without a text that
    # an event shortly before it has, see `repeats.py`; who does not know that must not read the file.
    3: (),
    # The tables stay as they are again. A row of `events` may now hold several events of one append, and
    # be deflated, see `rows.py`; its columns are those of the last one.
    4: (),
}

LATEST = max(MIGRATIONS)
"""The schema version that this Treenail writes."""


def expected_schema(version: int) -> frozenset[str]:
    """Return the statements that a file of that version must hold, word for word."""
    return frozenset(
        statement.strip()
        for number, statements in MIGRATIONS.items()
        if number <= version
        for statement in statements
    )

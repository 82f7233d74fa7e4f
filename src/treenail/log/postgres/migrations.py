"""The schema of a deployment, as numbered migrations.

The table `migrations` lists those that a schema has seen. They run in one transaction, under an advisory
lock that is named after the schema: of many processes that start at once, one migrates and the others wait.
A migration that was released is never edited; the next change gets the next number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from treenail.errors import LogError, LogVersionError
from treenail.log.stores import PostgresUrl

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    1: (
        """
        CREATE TABLE {schema}.sessions (
            session_id uuid PRIMARY KEY,
            -- Tells a session from one with the same id that was erased.
            incarnation bigint GENERATED ALWAYS AS IDENTITY,
            created_us bigint NOT NULL,
            parent_id uuid,
            tags text NOT NULL,
            first_seq bigint NOT NULL,
            anchor bytea NOT NULL
        )
        """,
        "CREATE INDEX sessions_by_parent ON {schema}.sessions (parent_id) WHERE parent_id IS NOT NULL",
        # The one row of a session that every append changes: narrow, and with room on its page for the next
        # version of it, so that no index is touched.
        """
        CREATE TABLE {schema}.writers (
            session_id uuid PRIMARY KEY,
            epoch bigint NOT NULL DEFAULT 0,
            owner text,
            ttl_us bigint NOT NULL DEFAULT 0,
            expires_us bigint NOT NULL DEFAULT 0,
            -- Which request was granted the lease: tells a writer whose answer was lost that it has it.
            grant_id uuid,
            head_seq bigint NOT NULL DEFAULT 0,
            head_us bigint,
            head_checksum bytea NOT NULL
        ) WITH (fillfactor = 50)
        """,
        # `treenail.log.rows` says what a row holds; seq, at_us and checksum are those of its last event.
        """
        CREATE TABLE {schema}.events (
            session_id uuid NOT NULL,
            seq bigint NOT NULL,
            at_us bigint NOT NULL,
            checksum bytea NOT NULL,
            payload bytea NOT NULL,
            PRIMARY KEY (session_id, seq)
        )
        """,
        # Rows are deflated already.
        "ALTER TABLE {schema}.events ALTER COLUMN payload SET STORAGE EXTERNAL",
        """
        CREATE TABLE {schema}.snapshots (
            session_id uuid NOT NULL,
            seq bigint NOT NULL,
            checksum bytea NOT NULL,
            payload bytea NOT NULL,
            PRIMARY KEY (session_id, seq)
        )
        """,
        """
        CREATE TABLE {schema}.notes (
            session_id uuid PRIMARY KEY,
            epoch bigint NOT NULL,
            checksum bytea NOT NULL,
            payload bytea NOT NULL
        ) WITH (fillfactor = 50)
        """,
        # Who listens for events, and until when: an append notifies only if somebody does, because the
        # commits of notifying transactions wait for one another.
        """
        CREATE TABLE {schema}.watchers (
            session_id uuid NOT NULL,
            watcher uuid NOT NULL,
            until_us bigint NOT NULL,
            PRIMARY KEY (session_id, watcher)
        )
        """,
        # Money that processes share, in pico-dollars: the sums of a pot, and what is reserved of it.
        """
        CREATE TABLE {schema}.pots (
            name text PRIMARY KEY,
            spent bigint NOT NULL DEFAULT 0,
            reserved bigint NOT NULL DEFAULT 0,
            CHECK (spent >= 0 AND reserved >= 0 AND spent + reserved <= 2305843009213693952)
        ) WITH (fillfactor = 50)
        """,
        """
        CREATE TABLE {schema}.reservations (
            id text PRIMARY KEY,
            pot text NOT NULL,
            amount bigint NOT NULL
        )
        """,
    ),
    # Files that travel: objects by name, each once in each depot. The payload is null where a bucket has it.
    2: (
        """
        CREATE TABLE {schema}.objects (
            depot text NOT NULL,
            oid bytea NOT NULL,
            payload bytea,
            PRIMARY KEY (oid, depot)
        )
        """,
        "ALTER TABLE {schema}.objects ALTER COLUMN payload SET STORAGE EXTERNAL",
        # Who needs an object: a run, or a beginning that several runs share.
        """
        CREATE TABLE {schema}.object_uses (
            holder uuid NOT NULL,
            depot text NOT NULL,
            oid bytea NOT NULL,
            PRIMARY KEY (holder, oid)
        )
        """,
        "CREATE INDEX object_uses_by_object ON {schema}.object_uses (oid, depot)",
        """
        CREATE TABLE {schema}.object_shares (
            holder uuid NOT NULL,
            shared uuid NOT NULL,
            PRIMARY KEY (holder, shared)
        )
        """,
        "CREATE INDEX object_shares_by_shared ON {schema}.object_shares (shared)",
        # What nobody needs any more and is still to be deleted from a bucket.
        """
        CREATE TABLE {schema}.object_leftovers (
            depot text NOT NULL,
            oid bytea NOT NULL,
            PRIMARY KEY (depot, oid)
        )
        """,
    ),
    3: (
        # The runs that workers look after, until one of them has found nothing left to do. It saves reading
        # every log, and is never the truth: see `treenail.log.agenda`.
        """
        CREATE TABLE {schema}.agenda (
            session_id uuid PRIMARY KEY,
            engine text NOT NULL,
            queue text NOT NULL,
            -- The newest event by which work was asked for.
            asked_seq bigint NOT NULL,
            -- Up to here the log was read, and the run waits for a person.
            parked_seq bigint NOT NULL DEFAULT 0,
            -- When the engine was last told.
            told_us bigint NOT NULL,
            cancelled_by text
        ) WITH (fillfactor = 70)
        """,
    ),
}

LATEST = max(MIGRATIONS)
"""The schema version that this Treenail writes."""

_LOCK = b"SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
# By the catalogue's tables, in one statement: another process may be making them at this moment.
_TABLES = b"""
SELECT count(*) FILTER (WHERE tablename = 'migrations') * 1000 + count(*)
FROM pg_catalog.pg_tables WHERE schemaname = %s
"""
_HAS_SCHEMA = b"SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = %s"


def version_of(connection: psycopg.Connection[Any], url: PostgresUrl) -> int:
    """Return the schema's version, 0 if it has none. Refuse one that is not ours or not known here."""
    schema = url.schema
    tables = _one(connection, _TABLES, schema)
    if tables < 1000:
        if tables:
            raise LogError(
                f"the schema {schema} of {url} has tables of another application; it was left untouched; "
                f"name another schema with ?schema=NAME"
            )
        return 0
    version = _one(connection, f"SELECT coalesce(max(version), 0) FROM {schema}.migrations".encode())
    if version > LATEST:
        raise LogVersionError(
            f"{url} has schema version {version}, and this Treenail knows versions up to {LATEST}; "
            f"it was left untouched; open it with a newer Treenail"
        )
    return version


def migrate(connection: psycopg.Connection[Any], url: PostgresUrl) -> None:
    """Bring a schema up to the latest version, making it if it does not exist: all of it, or nothing."""
    schema = url.schema
    with connection.transaction():
        connection.execute(_LOCK, (f"treenail/{schema}",))
        version = version_of(connection, url)  # Another process may have been faster.
        if version >= LATEST:
            return
        if not _one(connection, _HAS_SCHEMA, schema):
            connection.execute(f"CREATE SCHEMA {schema}".encode())
        if version == 0:
            connection.execute(
                f"CREATE TABLE {schema}.migrations (version int PRIMARY KEY, "
                f"applied_at timestamptz NOT NULL DEFAULT clock_timestamp())".encode()
            )
        for number in range(version + 1, LATEST + 1):
            for statement in MIGRATIONS[number]:
                connection.execute(statement.replace("{schema}", schema).encode())
            connection.execute(f"INSERT INTO {schema}.migrations VALUES ({number})".encode())


def _one(connection: psycopg.Connection[Any], query: bytes, *values: object) -> int:
    row = connection.execute(query, values or None).fetchone()
    assert row is not None
    return int(row[0])

"""Every statement of the log, by what it does.

`{now}` is the time of leases in microseconds: the database's own clock, unless the caller has another one.
"""

from __future__ import annotations

from collections.abc import Mapping

_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_ROW = """
SELECT s.session_id, s.incarnation, s.created_us, s.parent_id, s.tags, s.first_seq, s.anchor,
    w.epoch, w.owner, w.ttl_us, w.expires_us, w.grant_id, w.head_seq, w.head_us, w.head_checksum, {now}
FROM {schema}.sessions AS s JOIN {schema}.writers AS w USING (session_id)
"""

_STATEMENTS: Mapping[str, str] = {
    # The fence and the rows are one statement: the head moves only for the writer whose epoch counts and
    # that has seen all events, and only what moved the head is inserted.
    "append": """
        WITH fence AS (
            UPDATE {schema}.writers
            SET head_seq = %(last)s, head_us = %(at_us)s, head_checksum = %(checksum)b
            WHERE session_id = %(id)s AND epoch = %(epoch)s AND owner = %(owner)s
                AND head_seq = %(expected)s AND head_checksum = %(previous)b
            RETURNING head_seq
        ), put AS (
            INSERT INTO {schema}.events (session_id, seq, at_us, checksum, payload)
            SELECT %(id)s, each.* FROM fence, unnest(
                %(seqs)s::bigint[], %(times)s::bigint[], %(checksums)b::bytea[], %(payloads)b::bytea[]
            ) AS each
        )
        SELECT head_seq, (
            SELECT pg_notify(%(channel)s, fence.head_seq::text) WHERE EXISTS (
                SELECT FROM {schema}.watchers WHERE session_id = %(id)s AND until_us > {clock}
            )
        ) FROM fence
    """,
    "insert_session": """
        WITH made AS (
            INSERT INTO {schema}.sessions (session_id, created_us, parent_id, tags, first_seq, anchor)
            VALUES (%(id)s, %(created_us)s, %(parent_id)s, %(tags)s, 1, %(anchor)b)
            ON CONFLICT DO NOTHING RETURNING session_id
        )
        INSERT INTO {schema}.writers (session_id, head_checksum) SELECT session_id, %(anchor)b FROM made
        RETURNING 1
    """,
    "find": _ROW + "WHERE session_id = %(id)s",
    "find_for_writing": _ROW + "WHERE session_id = %(id)s FOR UPDATE",
    "all": _ROW + "ORDER BY created_us, incarnation",
    "all_for_writing": _ROW + "ORDER BY created_us, incarnation FOR UPDATE",
    "children": _ROW + "WHERE parent_id = %(parent_id)s ORDER BY created_us, incarnation",
    # The lease is given to whoever saw it as it still is.
    "grant": """
        UPDATE {schema}.writers
        SET epoch = %(epoch)s, owner = %(owner)s, ttl_us = %(ttl_us)s, grant_id = %(grant_id)s,
            expires_us = {now} + %(ttl_us)s
        WHERE session_id = %(id)s AND epoch = %(old_epoch)s AND owner IS NOT DISTINCT FROM %(old_owner)s
            AND expires_us = %(old_expires_us)s
        RETURNING expires_us, head_seq, head_checksum
    """,
    "renew": """
        UPDATE {schema}.writers SET expires_us = {now} + ttl_us
        WHERE session_id = %(id)s AND epoch = %(epoch)s AND owner = %(owner)s RETURNING ttl_us, expires_us
    """,
    "release": """
        UPDATE {schema}.writers SET owner = NULL, ttl_us = 0, expires_us = 0, grant_id = NULL
        WHERE session_id = %(id)s AND epoch = %(epoch)s AND owner = %(owner)s
    """,
    "checksum_at": "SELECT checksum FROM {schema}.events WHERE session_id = %(id)s AND seq = %(seq)s",
    "last_upto": """
        SELECT seq, checksum FROM {schema}.events WHERE session_id = %(id)s AND seq <= %(seq)s
        ORDER BY seq DESC LIMIT 1
    """,
    "read": """
        SELECT seq, at_us, checksum, payload FROM {schema}.events
        WHERE session_id = %(id)s AND seq > %(after)s ORDER BY seq LIMIT %(count)s
    """,
    "put_snapshot": """
        INSERT INTO {schema}.snapshots VALUES (%(id)s, %(seq)s, %(checksum)b, %(payload)b)
        ON CONFLICT (session_id, seq) DO UPDATE SET checksum = excluded.checksum, payload = excluded.payload
    """,
    "forget_snapshots": """
        DELETE FROM {schema}.snapshots WHERE session_id = %(id)s AND seq NOT IN
            (SELECT seq FROM {schema}.snapshots WHERE session_id = %(id)s ORDER BY seq DESC LIMIT %(kept)s)
    """,
    "snapshots": """
        SELECT seq, checksum, payload FROM {schema}.snapshots WHERE session_id = %(id)s ORDER BY seq DESC
    """,
    "put_note": """
        WITH fence AS (
            SELECT session_id FROM {schema}.writers
            WHERE session_id = %(id)s AND epoch = %(epoch)s AND owner = %(owner)s FOR SHARE
        )
        INSERT INTO {schema}.notes SELECT session_id, %(epoch)s, %(checksum)b, %(payload)b FROM fence
        ON CONFLICT (session_id) DO UPDATE
            SET epoch = excluded.epoch, checksum = excluded.checksum, payload = excluded.payload
        RETURNING 1
    """,
    "note": "SELECT epoch, checksum, payload FROM {schema}.notes WHERE session_id = %(id)s",
    "replace_payload": """
        UPDATE {schema}.events SET payload = %(payload)b WHERE session_id = %(id)s AND seq = %(seq)s
    """,
    "prune_events": "DELETE FROM {schema}.events WHERE session_id = %(id)s AND seq <= %(upto)s",
    "prune_snapshots": "DELETE FROM {schema}.snapshots WHERE session_id = %(id)s AND seq < %(upto)s",
    "move_first": """
        UPDATE {schema}.sessions SET first_seq = %(first)s, anchor = %(anchor)b WHERE session_id = %(id)s
    """,
    "erase": """
        WITH a AS (DELETE FROM {schema}.events WHERE session_id = ANY(%(ids)s)),
            b AS (DELETE FROM {schema}.snapshots WHERE session_id = ANY(%(ids)s)),
            c AS (DELETE FROM {schema}.notes WHERE session_id = ANY(%(ids)s)),
            d AS (DELETE FROM {schema}.watchers WHERE session_id = ANY(%(ids)s)),
            f AS (DELETE FROM {schema}.agenda WHERE session_id = ANY(%(ids)s)),
            e AS (DELETE FROM {schema}.writers WHERE session_id = ANY(%(ids)s))
        DELETE FROM {schema}.sessions WHERE session_id = ANY(%(ids)s)
    """,
    "head": "SELECT head_seq FROM {schema}.writers WHERE session_id = %(id)s",
    "watch": """
        INSERT INTO {schema}.watchers VALUES (%(id)s, %(watcher)s, {clock} + %(ttl_us)s)
        ON CONFLICT (session_id, watcher) DO UPDATE SET until_us = excluded.until_us
    """,
    "unwatch": "DELETE FROM {schema}.watchers WHERE watcher = %(watcher)s OR until_us < {clock}",
    "ask": """
        INSERT INTO {schema}.agenda AS a (session_id, engine, queue, asked_seq, told_us)
        VALUES (%(id)s, %(engine)s, %(queue)s, %(seq)s, {clock})
        ON CONFLICT (session_id) DO UPDATE SET engine = excluded.engine, queue = excluded.queue,
            asked_seq = greatest(a.asked_seq, excluded.asked_seq), told_us = excluded.told_us,
            cancelled_by = NULL
    """,
    "agenda_entry": """
        SELECT session_id, engine, queue, parked_seq, cancelled_by FROM {schema}.agenda
        WHERE session_id = %(id)s
    """,
    "park": "UPDATE {schema}.agenda SET parked_seq = %(seq)s WHERE session_id = %(id)s",
    # What was asked for meanwhile stays.
    "strike": "DELETE FROM {schema}.agenda WHERE session_id = %(id)s AND asked_seq <= %(seq)s",
    "ask_to_cancel": """
        UPDATE {schema}.agenda SET cancelled_by = %(by)s WHERE session_id = %(id)s RETURNING 1
    """,
    "cancelled": """
        SELECT session_id, cancelled_by FROM {schema}.agenda
        WHERE session_id = ANY(%(ids)s) AND cancelled_by IS NOT NULL
    """,
    # Runs that somebody has begun come first: those that were only submitted wait in the engine's queue.
    "due": """
        WITH due AS (
            SELECT a.session_id FROM {schema}.agenda AS a JOIN {schema}.writers AS w USING (session_id)
            WHERE a.engine = %(engine)s AND a.told_us < {clock} - %(age_us)s
                AND (w.owner IS NULL OR w.expires_us <= {clock})
                AND (w.head_seq > a.parked_seq OR a.cancelled_by IS NOT NULL)
            ORDER BY w.head_seq > a.asked_seq DESC, a.told_us LIMIT %(count)s FOR UPDATE OF a SKIP LOCKED
        )
        UPDATE {schema}.agenda AS a SET told_us = {clock} FROM due WHERE a.session_id = due.session_id
        RETURNING a.session_id, a.engine, a.queue, a.parked_seq, a.cancelled_by
    """,
    "agenda_counts": """
        SELECT queue,
            count(*) FILTER (WHERE NOT is_held AND head_seq > parked_seq),
            count(*) FILTER (WHERE is_held),
            count(*) FILTER (WHERE NOT is_held AND head_seq <= parked_seq)
        FROM (
            SELECT a.queue, a.parked_seq, w.head_seq,
                w.owner IS NOT NULL AND w.expires_us > {clock} AS is_held
            FROM {schema}.agenda AS a JOIN {schema}.writers AS w USING (session_id)
        ) AS each GROUP BY queue ORDER BY queue
    """,
    # The row of a pot is locked while its sums are compared and changed.
    "reserve": """
        WITH pot AS (
            INSERT INTO {schema}.pots AS p (name, reserved) VALUES (%(name)s, %(amount)s)
            ON CONFLICT (name) DO UPDATE SET reserved = p.reserved + %(amount)s
                WHERE p.spent + p.reserved < %(ceiling)s AND p.spent + p.reserved <= %(ceiling)s - %(amount)s
            RETURNING name
        )
        INSERT INTO {schema}.reservations SELECT %(id)s, name, %(amount)s FROM pot RETURNING 1
    """,
    "reservation": "SELECT amount FROM {schema}.reservations WHERE id = %(id)s AND pot = %(name)s",
    "settle": """
        WITH gone AS (DELETE FROM {schema}.reservations WHERE id = %(id)s AND pot = %(name)s RETURNING amount)
        UPDATE {schema}.pots AS p SET spent = p.spent + %(spent)s, reserved = p.reserved - gone.amount
        FROM gone WHERE p.name = %(name)s RETURNING p.spent
    """,
    "sums": "SELECT spent, reserved FROM {schema}.pots WHERE name = %(name)s",
    "lock_pot": "SELECT 1 FROM {schema}.pots WHERE name = %(name)s FOR UPDATE",
    "reset": """
        WITH gone AS (DELETE FROM {schema}.reservations WHERE pot = %(name)s)
        UPDATE {schema}.pots SET spent = 0, reserved = 0 WHERE name = %(name)s
    """,
    # Objects; `objects.py` says what the two locks are for.
    "share_objects": "SELECT pg_advisory_xact_lock_shared(hashtextextended('treenail objects/{schema}', 0))",
    "delete_objects_alone": "SELECT pg_advisory_xact_lock(hashtextextended('treenail objects/{schema}', 0))",
    "claim_objects": """
        WITH used AS (
            INSERT INTO {schema}.object_uses SELECT %(holder)s, %(depot)s, unnest(%(ids)b::bytea[])
            ON CONFLICT DO NOTHING
        )
        SELECT oid FROM {schema}.objects WHERE depot = %(depot)s AND oid = ANY(%(ids)b::bytea[])
    """,
    # One statement: its rows come through the lock, and what is there is seen when a row is inserted.
    "put_objects": """
        WITH alone AS MATERIALIZED (
            SELECT pg_advisory_xact_lock_shared(hashtextextended('treenail objects/{schema}', 0))
        ), given AS MATERIALIZED (
            SELECT each.* FROM alone, unnest(%(ids)b::bytea[], %(payloads)b::bytea[]) AS each (oid, payload)
        ), used AS (
            INSERT INTO {schema}.object_uses SELECT %(holder)s, %(depot)s, oid FROM given ORDER BY oid
            ON CONFLICT DO NOTHING
        )
        INSERT INTO {schema}.objects SELECT %(depot)s, oid, payload FROM given ORDER BY oid
        ON CONFLICT DO NOTHING
    """,
    "get_objects": """
        SELECT oid, payload FROM {schema}.objects
        WHERE depot = %(depot)s AND oid = ANY(%(ids)b::bytea[]) AND payload IS NOT NULL
    """,
    "add_share": """
        INSERT INTO {schema}.object_shares VALUES (%(holder)s, %(shared)s) ON CONFLICT DO NOTHING
    """,
    "any_held": """
        SELECT 1 FROM {schema}.object_uses WHERE holder = ANY(%(holders)s)
        UNION ALL SELECT 1 FROM {schema}.object_shares WHERE holder = ANY(%(holders)s) LIMIT 1
    """,
    "drop_shares": """
        DELETE FROM {schema}.object_shares
        WHERE holder = ANY(%(holders)s) AND shared IS DISTINCT FROM %(keep)s::uuid RETURNING shared
    """,
    "unshared": """
        SELECT DISTINCT each FROM unnest(%(shared)s::uuid[]) AS each
        WHERE NOT EXISTS (SELECT FROM {schema}.object_shares WHERE shared = each)
    """,
    "drop_uses": "DELETE FROM {schema}.object_uses WHERE holder = ANY(%(holders)s) RETURNING depot, oid",
    "delete_unused": """
        WITH unused AS (
            SELECT DISTINCT each.* FROM unnest(%(depots)s::text[], %(ids)b::bytea[]) AS each (depot, oid)
            WHERE NOT EXISTS (
                SELECT FROM {schema}.object_uses AS u WHERE u.oid = each.oid AND u.depot = each.depot
            )
        ), gone AS (
            DELETE FROM {schema}.objects AS o USING unused WHERE o.oid = unused.oid AND o.depot = unused.depot
        )
        INSERT INTO {schema}.object_leftovers SELECT depot, oid FROM unused WHERE depot <> ''
        ON CONFLICT DO NOTHING
    """,
    "any_leftovers": "SELECT 1 FROM {schema}.object_leftovers WHERE depot = %(depot)s LIMIT 1",
    "leftovers": """
        SELECT oid FROM {schema}.object_leftovers AS l WHERE depot = %(depot)s AND NOT EXISTS (
            SELECT FROM {schema}.object_uses AS u WHERE u.oid = l.oid AND u.depot = l.depot
        ) LIMIT %(count)s
    """,
    "drop_leftovers": """
        DELETE FROM {schema}.object_leftovers AS l WHERE depot = %(depot)s AND (
            oid = ANY(%(ids)b::bytea[]) OR EXISTS (
                SELECT FROM {schema}.object_uses AS u WHERE u.oid = l.oid AND u.depot = l.depot
            )
        )
    """,
}


def statements(schema: str) -> Mapping[str, bytes]:
    """Return the statements for a schema, by what they do."""
    now = f"coalesce(%(now)s::bigint, {_CLOCK})"
    return {
        name: text.replace("{schema}", schema).replace("{now}", now).replace("{clock}", _CLOCK).encode()
        for name, text in _STATEMENTS.items()
    }

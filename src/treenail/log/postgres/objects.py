"""The tables of objects: files that travel, by name, and who needs them.

Theory of operation
-------------------
An object has a name that says what it contains, so there is one of each, and writing one that is there
already changes nothing. A *holder* (a run, or a beginning that several runs share) has a row for each
object that it needs. What no holder needs any more is deleted together with its last holder.

Holding and deleting exclude one another by an advisory lock: whoever holds something takes it shared, so
that many can at once, and whoever deletes takes it alone. So nothing is deleted that somebody has just been
told is there.

The content is in this table, or in a bucket: then the table says what is in the bucket, and what of it is
still to be deleted (`object_leftovers`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from treenail.errors import DepotError
from treenail.log.postgres.database import Connection, Database

_AT_ONCE = 64
"""How many objects are read or written by one statement; each has up to a megabyte."""
_NAMES_AT_ONCE = 20_000
_DELETED_AT_ONCE = 1_000
"""How many are deleted from a bucket while everybody else waits."""

T = TypeVar("T")


class ObjectTable:
    """The objects of one depot, in a schema: with their content, or only who needs what in a bucket."""

    def __init__(self, database: Database, sql: Mapping[str, bytes], depot: str = "") -> None:
        self._database = database
        self._sql = sql
        self.name = depot
        """Where the content is, as the log records it; empty for this table itself."""

    def __str__(self) -> str:
        return self.name or str(self._database.url)

    def in_bucket(self, name: str) -> ObjectTable:
        """Return the books of a bucket: who needs which of its objects."""
        return ObjectTable(self._database, self._sql, name)

    def claim(self, holder: UUID, ids: Collection[bytes]) -> set[bytes]:
        """Hold objects, and return the names of those that are not there yet: they are to be put."""
        missing: set[bytes] = set()
        for names in _batches(sorted(ids), _NAMES_AT_ONCE):
            values = {"holder": holder, "depot": self.name, "ids": names}

            def work(connection: Connection, doubt: bool, values: dict[str, object] = values) -> set[bytes]:
                connection.execute(self._sql["share_objects"])
                found = connection.execute(self._sql["claim_objects"], values).fetchall()
                return {bytes(each) for (each,) in found}

            missing |= set(names) - self._database.transaction("look for objects", work)
        return missing

    def put(self, holder: UUID, objects: Mapping[bytes, bytes | None]) -> None:
        """Keep objects for a holder. One that is there already stays as it is."""
        for names in _batches(sorted(objects), _AT_ONCE):
            payloads = [objects[each] for each in names]
            values = {"holder": holder, "depot": self.name, "ids": names, "payloads": payloads}
            self._fetch("keep objects", "put_objects", values)

    def get(self, ids: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield objects with their names, in any order. Raises `DepotError` if one is not there."""
        for names in _batches(ids, _AT_ONCE):
            found = self._fetch("read objects", "get_objects", {"depot": self.name, "ids": names})
            missing = set(names) - {bytes(oid) for oid, _ in found}
            if missing:
                raise DepotError(
                    f"the object {min(missing).hex()} is missing from {self}; what needs it cannot be read: "
                    f"restore the database from a backup, or begin the run again"
                )
            for oid, payload in found:
                yield bytes(oid), bytes(payload)

    def share(self, holder: UUID, shared: UUID) -> None:
        """Let a holder need everything that another one holds, now and later."""
        values = {"holder": holder, "shared": shared}

        def work(connection: Connection, doubt: bool) -> None:
            connection.execute(self._sql["share_objects"])
            connection.execute(self._sql["add_share"], values)

        self._database.transaction("share objects", work)

    def release(self, holder: UUID, *, keep: UUID | None = None) -> None:
        """Forget what a holder holds and shares, and delete what nobody else does; `keep` it still shares."""
        self._database.transaction(
            "delete objects", lambda connection, _: self.release_all(connection, [holder], keep=keep)
        )

    def release_all(
        self, connection: Connection, holders: Sequence[UUID], *, keep: UUID | None = None
    ) -> None:
        """Forget holders, in a transaction of the caller's."""
        values: dict[str, object] = {"holders": list(holders), "keep": keep}
        if connection.execute(self._sql["any_held"], values).fetchone() is None:
            return
        connection.execute(self._sql["delete_objects_alone"])
        shared = [each for (each,) in connection.execute(self._sql["drop_shares"], values).fetchall()]
        if shared:
            found = connection.execute(self._sql["unshared"], {"shared": shared}).fetchall()
            values = {"holders": [*holders, *(each for (each,) in found)]}
        freed = connection.execute(self._sql["drop_uses"], values).fetchall()
        for some in _batches(freed, _NAMES_AT_ONCE):
            names = {"depots": [depot for depot, _ in some], "ids": [oid for _, oid in some]}
            connection.execute(self._sql["delete_unused"], names)

    def sweep(self) -> None:
        """Do nothing: a deletion here is one transaction."""

    def clear_leftovers(self, delete: Callable[[Collection[bytes]], object]) -> int:
        """Delete from a bucket what nobody needs; `delete` does it. Return how many there were."""

        def work(connection: Connection, doubt: bool) -> int:
            values = {"depot": self.name, "count": _DELETED_AT_ONCE}
            if connection.execute(self._sql["any_leftovers"], values).fetchone() is None:
                return 0
            connection.execute(self._sql["delete_objects_alone"])
            found = [bytes(each) for (each,) in connection.execute(self._sql["leftovers"], values).fetchall()]
            if found:
                # Before they are forgotten: what a crash interrupts is done again.
                delete(found)
            connection.execute(self._sql["drop_leftovers"], {"depot": self.name, "ids": found})
            return len(found)

        return self._database.transaction("delete objects from a bucket", work)

    def _fetch(self, doing: str, name: str, values: Mapping[str, object]) -> list[Any]:
        def work(connection: Connection, doubt: bool) -> list[Any]:
            cursor = connection.execute(self._sql[name], values)
            return cursor.fetchall() if cursor.description else []

        return self._database.run(doing, work)


def _batches(items: Collection[T], count: int) -> Iterator[list[T]]:
    """Yield items in lists of at most so many."""
    left = iter(items)
    while batch := list(islice(left, count)):
        yield batch

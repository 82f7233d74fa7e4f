"""Putting the boundaries of a line into a depot, before anybody is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from treenail.workspace.history import History
from treenail.workspace.line import LineEntry
from treenail.workspace.objects import EMPTY_TREE, LARGE_BYTES, ObjectStore
from treenail.workspace.travel.depot import Depot, packed, packed_stream
from treenail.workspace.travel.records import dump_record

_SENT_AT_ONCE_BYTES = 8 * 1024 * 1024
_ASKED_FROM = 32
"""From so many objects on the depot is asked first which of them it lacks."""


class Publisher:
    """Keeps a line's boundaries in a depot, for a holder. `records` are those that are there already."""

    def __init__(self, depot: Depot, holder: UUID, records: Iterable[tuple[str, bytes]] = ()) -> None:
        self.depot = depot
        self.holder = holder
        self._records = list(records)
        """The commit and the record of each boundary that is in the depot."""

    def publish(self, history: History, entries: Sequence[LineEntry], upto: LineEntry) -> str:
        """Put the boundaries of a line into the depot, up to one of them; return its record's id."""
        last = next(
            number for number in range(len(entries) - 1, -1, -1) if entries[number].commit == upto.commit
        )
        known = self._records
        while known and (len(known) > len(entries) or entries[len(known) - 1].commit != known[-1][0]):
            # It was taken inside a call that was rolled back. A commit names those before it.
            known.pop()
        for entry in entries[len(known) : last + 1]:
            since = bytes.fromhex(known[-1][0]) if known else None
            added = history.objects.added(bytes.fromhex(entry.commit), since)
            record = history.objects.write("blob", dump_record(entry, [each for _, each in known]))
            send(self.depot, self.holder, history.objects, [*dict.fromkeys(added), record])
            known.append((entry.commit, record))
        return known[last][1].hex()


def send(depot: Depot, holder: UUID, objects: ObjectStore, ids: Sequence[bytes]) -> None:
    """Put objects of a store into a depot."""
    wanted = depot.claim(holder, ids) if len(ids) >= _ASKED_FROM else set(ids)
    batch: dict[bytes, bytes] = {}
    size = 0
    for oid in ids:
        for name, payload in _packed(objects, oid) if oid in wanted else ():
            batch[name] = payload
            size += len(payload)
            if size >= _SENT_AT_ONCE_BYTES:
                depot.put(holder, batch)
                batch, size = {}, 0
    depot.put(holder, batch)


def _packed(objects: ObjectStore, oid: bytes) -> Iterable[tuple[bytes, bytes]]:
    if oid == EMPTY_TREE:
        return packed("tree", b"")[1].items()
    size = objects.large_size(oid)
    if size is not None and size >= LARGE_BYTES:
        return packed_stream(objects.stream_blob(oid, size), size)
    kind, data = objects.read(oid)
    return packed(kind, data)[1].items()

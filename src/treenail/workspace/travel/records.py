"""Records: what changed at each boundary of a line, in a depot, each with the name of the one before.

A snapshot in the log names a record, and so everything before it. Every `_STRIDE`th record is also named by
the one `_STRIDE` boundaries later, so that the line of a long run is read in few requests: from stride to
stride first, and then the records between all strides side by side.

Owners do not travel: on another machine the same number is somebody else. Neither do set-id bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from treenail.errors import DepotError
from treenail.workspace.line import LineEntry, dump_entry, load_entry
from treenail.workspace.manifest import ANY, PathChange, State
from treenail.workspace.travel.depot import Depot, read_object

_STRIDE = 32
_PERMISSIONS = 0o1777


class Record(NamedTuple):
    """A boundary of a line, as a depot has it."""

    number: int
    """How many boundaries the line has before it."""
    before: bytes
    """The record of the boundary before; empty for an origin's."""
    far: bytes
    """The record `_STRIDE` boundaries before, where the number is a multiple of it; else empty."""
    entry: LineEntry


Reading = Callable[[Iterable[bytes]], Mapping[bytes, bytes]]
"""Returns the content of blobs by their ids."""


def dump_record(entry: LineEntry, ids: Sequence[bytes]) -> bytes:
    """Return the content of the record of a line's next boundary; `ids` are the records before."""
    number = len(ids)
    changes = tuple(PathChange(path, _bare(before), _bare(after)) for path, before, after in entry.changes)
    raw = {
        "number": number,
        "before": ids[-1].hex() if ids else "",
        "far": ids[number - _STRIDE].hex() if number and number % _STRIDE == 0 else "",
        "entry": dump_entry(entry._replace(changes=changes)),
    }
    return json.dumps(raw, separators=(",", ":")).encode("ascii")


def _bare(state: State) -> State:
    mode = state.mode if state.mode == ANY else state.mode & _PERMISSIONS
    return state._replace(mode=mode, uid=ANY, gid=ANY)


def _load(data: bytes) -> Record:
    raw = json.loads(data)
    before, far = bytes.fromhex(raw["before"]), bytes.fromhex(raw["far"])
    return Record(raw["number"], before, far, load_entry(raw["entry"]))


def read_line(newest: bytes, read: Reading) -> list[tuple[bytes, LineEntry]]:
    """Return the records of a line up to one of them, oldest first, with their ids."""
    found: dict[int, tuple[bytes, Record]] = {}

    def take(ids: Iterable[bytes]) -> list[Record]:
        wanted = {each for each in ids if each}
        taken = [(oid, _load(data)) for oid, data in read(wanted).items()] if wanted else []
        found.update((record.number, (oid, record)) for oid, record in taken)
        return [record for _, record in taken]

    open_ends = take([newest])
    # Down to a stride, then from stride to stride, then between all of them at once.
    while open_ends and open_ends[0].number % _STRIDE:
        open_ends = take([open_ends[0].before])
    strides = []
    while open_ends:
        strides += open_ends
        open_ends = take([open_ends[0].far])
    while strides:
        ids = {each.before for each in strides if each.number - 1 not in found}
        strides = take(ids)
    if sorted(found) != list(range(len(found))):
        raise DepotError(
            f"the records before {newest.hex()} do not fit together; restore the depot from a backup, or "
            f"begin the run again"
        )
    return [(found[number][0], found[number][1].entry) for number in range(len(found))]


def number_of(depot: Depot, record: str) -> int:
    """Return how many boundaries a line has before one of its records."""
    return _load(read_object(depot, bytes.fromhex(record))[1]).number


def tree_of(entries: Iterable[LineEntry]) -> dict[str, State]:
    """Return what every path is after the last of these entries, which begin with an origin's."""
    tree: dict[str, State] = {}
    for entry in entries:
        for path, _, after in entry.changes:
            if after.kind == "absent":
                tree.pop(path, None)
            else:
                tree[path] = after
    return tree

"""The line of boundaries: the history of one workspace, one entry per boundary.

A line is a file of checksummed records that is only ever appended to. An entry has the boundary's commit
and the path changes since the entry before. Going back to a boundary is folding the changes after it: the
first `before` of each path is the goal, the last `after` is what should be there now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from treenail.workspace.disk import (
    decode_records,
    encode_record,
    read_file,
    replace_file,
    sync_directory,
    write_all,
)
from treenail.workspace.manifest import PathChange, State, is_same_thing

EntryKind = Literal["open", "call", "restore", "ambient", "scan"]
"""`open` starts a line; `scan` holds what somebody else changed and a scan found."""


class LineEntry(NamedTuple):
    """One boundary in a line."""

    kind: EntryKind
    commit: str
    changes: tuple[PathChange, ...] = ()
    journal: str = ""
    """The journal it was made from, so that a repeated finish does not record it twice."""
    edited: tuple[str, ...] = ()
    """Paths that somebody else had changed again before the boundary was taken."""
    baseline: bool = False
    """Whether a scan looked at the whole tree for the first time here."""
    scanned: bool = False
    """Whether the whole tree was looked at for this boundary."""
    uncovered: tuple[tuple[str, str], ...] = ()
    """What a scan could not keep, and why."""


def dump_state(state: State) -> list[object]:
    """Return a state as JSON values."""
    return [*state[:2], state.oid.hex(), *state[3:]]


def load_state(raw: list[Any]) -> State:
    """Read what `dump_state` returned."""
    kind, mode, oid, *rest = raw
    return State(kind, mode, bytes.fromhex(oid), *rest)


def dump_entry(entry: LineEntry) -> dict[str, object]:
    """Return an entry as JSON values."""
    changes = [[path, dump_state(before), dump_state(after)] for path, before, after in entry.changes]
    return {**entry._asdict(), "changes": changes}


def load_entry(raw: dict[str, Any]) -> LineEntry:
    """Read what `dump_entry` returned."""
    changes = tuple(
        PathChange(path, load_state(before), load_state(after)) for path, before, after in raw["changes"]
    )
    uncovered = tuple((path, reason) for path, reason in raw["uncovered"])
    return LineEntry(
        **{**raw, "changes": changes, "uncovered": uncovered, "edited": tuple(raw["edited"])},
    )


class LineFile:
    """The boundaries of one workspace, oldest first, in one file."""

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._entries: list[LineEntry] | None = None
        self._positions: dict[str, int] = {}
        self._end = 0

    @property
    def entries(self) -> list[LineEntry]:
        """Every entry; read from disk at first use."""
        if self._entries is None:
            self._entries = []
            for end, payload in decode_records(read_file(self._path) or b""):
                self._remember(load_entry(json.loads(payload)))
                self._end = end
        return self._entries

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> LineEntry | None:
        """The newest entry."""
        return self.entries[-1] if self.entries else None

    def position(self, commit: str) -> int | None:
        """Return the place of the newest entry with that commit, or None."""
        return self._positions.get(commit) if self.entries else None

    def append(self, entry: LineEntry) -> None:
        """Add an entry, unless the same journal has already left it here."""
        position = self.position(entry.commit)
        if position is not None and self.entries[position].journal == entry.journal:
            return
        payload = encode_record(json.dumps(dump_entry(entry), separators=(",", ":")).encode("ascii"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size != self._end:
                # A crash tore the last append; it did not count, and the next one takes its place.
                os.ftruncate(descriptor, self._end)
            os.lseek(descriptor, self._end, os.SEEK_SET)
            write_all(descriptor, payload)
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self._durable and self._end == 0:
            sync_directory(os.path.dirname(self._path))
        self._end += len(payload)
        self._remember(entry)

    def replace(self, entries: Iterable[LineEntry]) -> None:
        """Let the line consist of these entries."""
        payload = b"".join(
            encode_record(json.dumps(dump_entry(each), separators=(",", ":")).encode("ascii"))
            for each in entries
        )
        replace_file(self._path, payload, durable=self._durable, mode=0o600)
        self._entries, self._positions, self._end = None, {}, 0

    def _remember(self, entry: LineEntry) -> None:
        self._positions[entry.commit] = len(self.entries)
        self.entries.append(entry)


@dataclass(slots=True)
class Step:
    """The way of a path through several entries."""

    first: State
    last: State
    broken: bool = False
    """Whether somebody else changed it between two of our changes."""


def fold(entries: Iterable[LineEntry], *, outside: bool) -> dict[str, Step]:
    """Sum up the changes of neighbouring entries; `outside` includes what others changed."""
    steps: dict[str, Step] = {}
    for entry in entries:
        if entry.kind == "scan" and not outside:
            continue
        for path, before, after in entry.changes:
            step = steps.get(path)
            if step is None:
                steps[path] = Step(before, after)
            else:
                step.broken = step.broken or not is_same_thing(step.last, before)
                step.last = after
        for path in entry.edited:
            steps[path].broken = True
    return steps

"""The undo journal of a call, and the line of boundaries that calls leave behind.

Theory of operation
-------------------
Both are files of checksummed records that are only ever appended to. A record that a crash cut off does
not count; since what it describes is done only after it is written, nothing is lost with it.

A **journal** belongs to one call. Before a path is changed, a record says what was there (`before`) and
what will be there (`after`); content that is not in the object store yet is kept in the journal, too. So
a path that the call has touched is, at any moment, in its first `before` or in one of its `after` states.
Anything else was put there by somebody else. Undoing a call means putting every touched path back into
its first `before`.
A journal with records is an open call: emptying it is what ends the call. The file itself stays, because
making a file costs more than all that is written into it.

A **line** is the history of one workspace: a record per boundary, with the commit and the path changes
since the boundary before. Going back to a boundary is folding the changes after it: the first `before`
of each path is the goal, the last `after` is what should be there now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from treenail.errors import WorkspaceError
from treenail.workspace.manifest import State
from treenail.workspace.spool import frame, frames, sync_directory, write_all

JournalKind = Literal["call", "restore", "ambient"]
"""`ambient` collects what is written outside of calls, from one boundary to the next."""

BoundaryKind = Literal["open", "call", "restore", "ambient", "scan"]
"""`open` starts a line; `scan` holds what somebody else changed and a scan found."""

_MAGIC = b"treenail journal 1\n"
_BLOB = b"\0"
"""The first byte of a record that holds content; other records are JSON objects."""


class PathChange(NamedTuple):
    """A path that differs between two neighbouring boundaries."""

    path: str
    before: State
    after: State


class Boundary(NamedTuple):
    """One record of a line."""

    kind: BoundaryKind
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


def _dump_state(state: State) -> list[object]:
    return [state.kind, state.mode, state.oid.hex(), state.size, state.mtime_ns, state.uid, state.gid]


def _load_state(raw: list[object]) -> State:
    kind, mode, oid, size, mtime_ns, uid, gid = raw
    return State(kind, mode, bytes.fromhex(oid), size, mtime_ns, uid, gid)  # type: ignore[arg-type]  # from JSON


def _dump_boundary(boundary: Boundary) -> dict[str, object]:
    return {
        "kind": boundary.kind,
        "commit": boundary.commit,
        "journal": boundary.journal,
        "edited": list(boundary.edited),
        "baseline": boundary.baseline,
        "scanned": boundary.scanned,
        "uncovered": [list(pair) for pair in boundary.uncovered],
        "changes": [
            [change.path, _dump_state(change.before), _dump_state(change.after)]
            for change in boundary.changes
        ],
    }


def _load_boundary(raw: dict[str, object]) -> Boundary:
    changes = tuple(
        PathChange(path, _load_state(before), _load_state(after))
        for path, before, after in raw["changes"]  # type: ignore[attr-defined]  # from JSON
    )
    listed = raw["uncovered"]
    uncovered = tuple((path, reason) for path, reason in listed)  # type: ignore[attr-defined]  # from JSON
    return Boundary(
        kind=raw["kind"],  # type: ignore[arg-type]  # from JSON
        commit=str(raw["commit"]),
        changes=changes,
        journal=str(raw["journal"]),
        edited=tuple(raw["edited"]),  # type: ignore[arg-type]  # from JSON
        baseline=bool(raw["baseline"]),
        scanned=bool(raw["scanned"]),
        uncovered=uncovered,
    )


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@dataclass(slots=True)
class Journal:
    """The undo information of one call, on disk and in memory alike.

    `create` starts one, `load` finds one that a crash left. Changing operations call `intend` first.
    """

    path: str
    id: str
    kind: JournalKind
    call_id: str
    tool_name: str
    base: str
    """The commit of the boundary before the call."""
    foreign: bool
    durable: bool = False
    intents: list[PathChange] = field(default_factory=list)
    """In the order of intention: what was there, and what will be."""
    temporaries: list[str] = field(default_factory=list)
    segments: list[Boundary] = field(default_factory=list)
    """Boundaries taken inside the call; the last one ends it once it is prepared."""
    segment_start: int = 0
    """Where the intents after the last inner boundary begin."""
    prepared: bool = False
    undoing: bool = False
    """Whether undoing the call has begun, so that a path may be half way back."""
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    """Content that was read back from disk: what the object store may not have."""
    _kept: set[bytes] = field(default_factory=set)
    _descriptor: int = -1
    _unwritten: bool = False
    """Whether nothing is in the file yet, not even its beginning."""
    _last: dict[str, State] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        path: str,
        *,
        id: str,
        kind: JournalKind,
        call_id: str,
        tool_name: str,
        base: str,
        foreign: bool,
        durable: bool,
    ) -> Journal:
        """Start a journal. A plain call's is written with its first record: before, nothing is to undo."""
        journal = cls(path, id, kind, call_id, tool_name, base, foreign, durable, _unwritten=True)
        if foreign or kind != "call":
            journal._start()
        return journal

    def _start(self) -> None:
        """Put the journal's header on disk: from here on the call exists for whoever comes after a crash."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size > len(_MAGIC):
            self.close()
            raise WorkspaceError(
                f"the journal {self.path} belongs to a call that is not over; recover it first"
            )
        if size < len(_MAGIC):
            os.ftruncate(self._descriptor, 0)
        header = {
            "type": "begin",
            "version": 1,
            "id": self.id,
            "kind": self.kind,
            "call_id": self.call_id,
            "tool_name": self.tool_name,
            "base": self.base,
            "foreign": self.foreign,
        }
        record = frame(json.dumps(header, separators=(",", ":")).encode("ascii"))
        write_all(self._descriptor, (b"" if size == len(_MAGIC) else _MAGIC) + record)
        self._unwritten = False
        if self.durable:
            os.fsync(self._descriptor)
            sync_directory(os.path.dirname(self.path))

    @classmethod
    def load(cls, path: str, *, durable: bool) -> Journal | None:
        """Read a journal that a crash left, or None if there is no call in it."""
        if not os.access(path, os.F_OK):
            return None  # As good as always, and much quicker than an exception.
        try:
            if os.stat(path).st_size <= len(_MAGIC):
                return None
            data = _read_file(path)
        except FileNotFoundError:
            return None
        journal: Journal | None = None
        end = len(_MAGIC)
        for offset, payload in frames(data, end):
            end = offset
            if payload[:1] == _BLOB:
                if journal is not None:
                    journal.blobs[payload[1:21]] = payload[21:]
                    journal._kept.add(payload[1:21])
                continue
            record = json.loads(payload)
            kind = record["type"]
            if kind == "begin":
                if record["version"] != 1:
                    raise WorkspaceError(
                        f"{path} was written by a newer Treenail; recover this workspace with that one"
                    )
                journal = cls(
                    path,
                    record["id"],
                    record["kind"],
                    record["call_id"],
                    record["tool_name"],
                    record["base"],
                    record["foreign"],
                    durable,
                )
            elif journal is None:
                return None
            elif kind == "intend":
                for name, before, after in record["changes"]:
                    change = PathChange(name, _load_state(before), _load_state(after))
                    journal.intents.append(change)
                    journal._last[name] = change.after
            elif kind == "temporary":
                journal.temporaries.append(record["path"])
            elif kind == "undo":
                journal.undoing = True
            elif kind == "boundary":
                journal._take_boundary(_load_boundary(record["boundary"]), prepared=record["prepared"])
        if end < len(data):
            # What is appended next must not hide behind a torn record.
            os.truncate(path, end)
        return journal

    @property
    def touched(self) -> bool:
        """Whether anything was intended since the last boundary."""
        return len(self.intents) > self.segment_start

    def intend(self, changes: Iterable[PathChange], content: Callable[[bytes], bytes | None]) -> None:
        """Write down what is about to be changed, before it is.

        `content` gives what an object id stands for if that is not in the object store.
        """
        batch = list(changes)
        if not batch:
            return
        parts: list[bytes] = []
        for change in batch:
            oid = change.before.oid
            data = content(oid) if oid and oid not in self._kept else None
            if data is not None:
                self._kept.add(oid)
                parts.append(frame(b"".join((_BLOB, oid, data))))
        raw = [[path, _dump_state(before), _dump_state(after)] for path, before, after in batch]
        self._append({"type": "intend", "changes": raw}, b"".join(parts))
        self.intents.extend(batch)
        for change in batch:
            self._last[change.path] = change.after

    def intend_temporary(self, path: str) -> None:
        """Write down a temporary file that is about to be made and has no intent of its own yet."""
        self._append({"type": "temporary", "path": path})
        self.temporaries.append(path)

    def begin_undo(self) -> None:
        """Write down that the call is being undone."""
        if not self.undoing:
            if not self._unwritten:
                self._append({"type": "undo"})
            self.undoing = True

    def mark(self, boundary: Boundary, *, prepared: bool) -> None:
        """Write down a boundary taken inside the call, or at its end."""
        self._append({"type": "boundary", "boundary": _dump_boundary(boundary), "prepared": prepared})
        self._take_boundary(boundary, prepared=prepared)

    def _take_boundary(self, boundary: Boundary, *, prepared: bool) -> None:
        self.segments.append(boundary)
        self._last.clear()
        self.segment_start = len(self.intents)
        self.prepared = prepared

    def last_state(self, path: str) -> State | None:
        """Return what the call has last made of a path since its last boundary, or None."""
        return self._last.get(path)

    def first_states(self, start: int = 0) -> dict[str, State]:
        """Return what was at each touched path before the call, or before its intent number `start`."""
        firsts: dict[str, State] = {}
        for path, before, _ in self.intents[start:]:
            firsts.setdefault(path, before)
        return firsts

    def own_states(self) -> dict[str, list[State]]:
        """Return every state that the call itself gave to each path, its first one included."""
        states: dict[str, list[State]] = {}
        for path, before, after in self.intents:
            states.setdefault(path, [before]).append(after)
        return states

    def _append(self, record: dict[str, object], before: bytes = b"") -> None:
        if self._unwritten:
            self._start()
        elif self._descriptor == -1:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        write_all(self._descriptor, before + frame(json.dumps(record, separators=(",", ":")).encode("ascii")))
        if self.durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file; it stays."""
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1

    def end(self) -> None:
        """End the call: without its records it is over. Safe to repeat."""
        self.close()
        if self._unwritten:
            return
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            # Not to nothing: a file that is emptied is flushed to disk when it is closed next time.
            if os.fstat(descriptor).st_size > len(_MAGIC):
                os.ftruncate(descriptor, len(_MAGIC))
            if self.durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Line:
    """The boundaries of one workspace, oldest first, in one file."""

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._boundaries: list[Boundary] | None = None
        self._positions: dict[str, int] = {}
        self._end = 0

    @property
    def boundaries(self) -> list[Boundary]:
        """Every boundary; read from disk at first use."""
        if self._boundaries is None:
            self._boundaries = []
            try:
                data = _read_file(self._path)
            except FileNotFoundError:
                data = b""
            for end, payload in frames(data):
                self._remember(_load_boundary(json.loads(payload)))
                self._end = end
        return self._boundaries

    def __len__(self) -> int:
        return len(self.boundaries)

    @property
    def head(self) -> Boundary | None:
        """The newest boundary."""
        boundaries = self._boundaries
        if boundaries is None:
            boundaries = self.boundaries
        return boundaries[-1] if boundaries else None

    def position(self, commit: str) -> int | None:
        """Return the place of the newest boundary with that commit, or None."""
        if self._boundaries is None:
            _ = self.boundaries
        return self._positions.get(commit)

    def append(self, boundary: Boundary) -> None:
        """Add a boundary, unless the same journal has already left it here."""
        position = self.position(boundary.commit)
        if position is not None and self.boundaries[position].journal == boundary.journal:
            return
        payload = frame(json.dumps(_dump_boundary(boundary), separators=(",", ":")).encode("ascii"))
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
        self._remember(boundary)

    def _remember(self, boundary: Boundary) -> None:
        assert self._boundaries is not None
        self._positions[boundary.commit] = len(self._boundaries)
        self._boundaries.append(boundary)

"""The undo journal of a call.

Theory of operation
-------------------
A journal is a file of checksummed records that is only ever appended to. A record that a crash cut off does
not count; since what it describes is done only after it is written, nothing is lost with it.

A journal belongs to one call. Before a path is changed, a record says what was there (`before`) and what
will be there (`after`); the content of `before` is in the object store by then. So a path that the call has
touched is, at any moment, in its first `before` or in one of its `after` states. Anything else was put there
by somebody else. Undoing a call means putting every touched path back into its first `before`.

A journal with records is an open call: emptying it is what ends the call. The file itself stays, because
making a file costs more than all that is written into it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from treenail.errors import WorkspaceError
from treenail.workspace.disk import FULL, decode_records, encode_record, read_file, sync_directory, write_all
from treenail.workspace.line import LineEntry, dump_entry, dump_state, load_entry, load_state
from treenail.workspace.manifest import PathChange, State

JournalKind = Literal["call", "restore", "ambient"]
"""`ambient` collects what is written outside of calls, from one boundary to the next."""

_MAGIC = b"treenail journal 2\n"
_HEADER = ("id", "kind", "base", "call_id", "tool_name", "foreign", "started_ns")
"""The fields that the first record of a journal holds."""


@dataclass(slots=True)
class Journal:
    """The undo information of one call, on disk and in memory alike.

    A new one is on disk after `start`, or with its first record; `load` finds one that a crash left.
    Changing operations call `intend` first.
    """

    path: str
    id: str
    kind: JournalKind
    base: str
    """The commit of the boundary before the call."""
    call_id: str = ""
    tool_name: str = ""
    foreign: bool = False
    durable: bool = False
    started_ns: int = 0
    """When its header was written, on the machine's clock."""
    intents: list[PathChange] = field(default_factory=list)
    """In the order of intention: what was there, and what will be."""
    temporaries: list[str] = field(default_factory=list)
    segments: list[LineEntry] = field(default_factory=list)
    """Boundaries taken inside the call; the last one ends it once it is prepared."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    """How far the application of a layer has come; see `applying.py`."""
    segment_start: int = 0
    """Where the intents after the last inner boundary begin."""
    prepared: bool = False
    undoing: bool = False
    """Whether undoing the call has begun, so that a path may be half way back."""
    _descriptor: int = -1
    _unwritten: bool = True
    """Whether nothing is in the file yet, not even its beginning."""
    _last: dict[str, State] = field(default_factory=dict)
    _end: int = -1
    """Where the whole records of a loaded journal end: what is appended must not hide behind a torn one."""

    def start(self) -> None:
        """Put the journal's header on disk: from here on, a process after a crash finds the call."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size > len(_MAGIC) and Journal.load(self.path, durable=False) is not None:
            self.close()
            raise WorkspaceError(
                f"the journal {self.path} belongs to a call that is not over; recover it first"
            )
        if size != len(_MAGIC):
            # A crash tore the header.
            os.ftruncate(self._descriptor, 0)
        self.started_ns = time.time_ns()
        header = {"type": "begin", **{name: getattr(self, name) for name in _HEADER}}
        record = encode_record(json.dumps(header, separators=(",", ":")).encode("ascii"))
        write_all(self._descriptor, (b"" if size == len(_MAGIC) else _MAGIC) + record)
        self._unwritten = False
        if self.durable:
            os.fsync(self._descriptor)
            sync_directory(os.path.dirname(self.path))

    @classmethod
    def load(cls, path: str, *, durable: bool) -> Journal | None:
        """Read a journal that a crash left, or None if there is no call in it. Nothing is written."""
        data = read_file(path)
        if data is None:
            return None
        journal: Journal | None = None
        end = len(_MAGIC)
        for offset, payload in decode_records(data, end):
            end = offset
            record = json.loads(payload)
            kind = record["type"]
            if kind == "begin":
                fields = {name: record[name] for name in _HEADER if name in record}
                journal = cls(path, durable=durable, _unwritten=False, **fields)
            elif journal is None:
                return None
            elif kind == "intend":
                for name, before, after in record["changes"]:
                    change = PathChange(name, load_state(before), load_state(after))
                    journal.intents.append(change)
                    journal._last[name] = change.after
            elif kind == "temporary":
                journal.temporaries.append(record["path"])
            elif kind == "unchanged":
                journal.prepared = True
            elif kind == "undo":
                journal.undoing = True
            elif kind in ("layer", "moved"):
                journal.notes.append(record)
            elif kind == "boundary":
                journal._take_entry(load_entry(record["boundary"]), prepared=record["prepared"])
        if journal is not None:
            journal._end = end
        return journal

    @property
    def touched(self) -> bool:
        """Whether anything was intended since the last boundary."""
        return len(self.intents) > self.segment_start

    def intend(self, changes: Iterable[PathChange]) -> None:
        """Write down what is about to be changed, before it is. What was there is in the object store."""
        batch = list(changes)
        if not batch:
            return
        raw = [[path, dump_state(before), dump_state(after)] for path, before, after in batch]
        self._append({"type": "intend", "changes": raw})
        self.intents.extend(batch)
        for change in batch:
            self._last[change.path] = change.after

    def intend_temporary(self, path: str) -> None:
        """Write down a temporary file that is about to be made and has no intent of its own yet."""
        # Not synced: a power cut that takes this away leaves at worst an unused file.
        self._append({"type": "temporary", "path": path}, sync=False)
        self.temporaries.append(path)

    def note(self, record: dict[str, Any], *, sync: bool = True) -> None:
        """Write down how far the application of a layer has come."""
        self._append(record, sync=sync)
        self.notes.append(record)

    def begin_undo(self) -> None:
        """Write down that the call is being undone. On a full disk it is undone without that.

        The record tells a recovery of the undo what half-restored paths are; nothing is lost without it.
        """
        if not self.undoing:
            self.undoing = True
            if not self._unwritten:
                try:
                    self._append({"type": "undo"})
                except OSError as error:
                    if error.errno not in FULL:
                        raise

    def mark_unchanged(self) -> None:
        """Write down that a scan found no change at the end of the call."""
        self._append({"type": "unchanged"})
        self.prepared = True

    def mark(self, entry: LineEntry, *, prepared: bool) -> None:
        """Write down a boundary taken inside the call, or at its end."""
        self._append({"type": "boundary", "boundary": dump_entry(entry), "prepared": prepared})
        self._take_entry(entry, prepared=prepared)

    def _take_entry(self, entry: LineEntry, *, prepared: bool) -> None:
        self.segments.append(entry)
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

    def _append(self, record: dict[str, object], *, sync: bool = True) -> None:
        if self._unwritten:
            self.start()
        elif self._descriptor == -1:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if self._end != -1:
                os.ftruncate(self._descriptor, self._end)
                self._end = -1
        write_all(self._descriptor, encode_record(json.dumps(record, separators=(",", ":")).encode("ascii")))
        if self.durable and sync:
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

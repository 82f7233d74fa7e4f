"""The files of a stored run: what a call changed, and the workspace as it was at a boundary."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treenail.agent import named_boundaries, workspace_line, workspace_of, workspace_store
from treenail.errors import UsageError
from treenail.log import PostgresUrl, Store
from treenail.state import Session
from treenail.tools import Boundary
from treenail.workspace import (
    Change,
    FilesystemSnapshot,
    WorkspaceDiff,
    check_host,
    depot_of,
    diff_lines,
    is_binary,
    newest_of,
    open_history,
    origin_of,
    shown_path,
)
from treenail.workspace.host import HostFilesystem

MAX_SHOWN_BYTES = 512 * 1024
"""A larger file is named, not shown."""


@contextmanager
def stored_files(store: Store, session: Session) -> Iterator[HostFilesystem]:
    """Open the stored files of a run to read them. Raises `UsageError` if it worked in memory.

    A workspace that is gone does not matter: what the run changed in it is in the store.
    """
    place = workspace_of(session)
    origin = origin_of(session)
    if origin is not None:
        depot = depot_of(session.log, origin.depot)
        with open_history(depot, newest_of(depot, named_boundaries(session, origin))) as filesystem:
            yield filesystem
        return
    if place is None:
        raise UsageError("this run worked in memory; it has no files")
    if isinstance(store, PostgresUrl):
        check_host(session, workspace_store(store))
    with ExitStack() as stack:
        if not Path(place).is_dir():
            place = stack.enter_context(tempfile.TemporaryDirectory())
        line = workspace_line(session.session_id)
        yield stack.enter_context(
            HostFilesystem(place, store=workspace_store(store), line=line, read_only=True)
        )


@dataclass(frozen=True, slots=True)
class Hunk:
    """A few lines of a file that differ, with those around them."""

    old_line: int
    new_line: int
    lines: tuple[tuple[str, str], ...]
    """Each with its mark: `+`, `-`, a space, or a backslash for a remark about the line before."""


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What differs in one file."""

    change: Change
    hunks: tuple[Hunk, ...]
    notes: tuple[str, ...] = ()
    """What is said instead of lines: that it is binary, very large, a link, or has another mode."""

    def count(self, mark: str) -> int:
        """Return how many lines have a mark."""
        return sum(each == mark for hunk in self.hunks for each, _ in hunk.lines)

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "path": self.change.path,
            "kind": self.change.kind,
            "is_directory": self.change.is_directory,
            "added": self.count("+"),
            "removed": self.count("-"),
            "notes": list(self.notes),
            "hunks": [
                {"old": each.old_line, "new": each.new_line, "lines": each.lines} for each in self.hunks
            ],
        }


def file_diffs(diff: WorkspaceDiff) -> Sequence[FileDiff]:
    """Take a diff apart by files, in order."""
    hunks: dict[str, list[Hunk]] = {}
    notes: list[str] = []
    name, lines = "", list[tuple[str, str]]()

    for part, line in diff_lines(diff.text):
        if part == "head":
            if line.startswith(("--- a/", "+++ b/")):
                name = line[6:]
            elif line and line not in ("--- /dev/null", "+++ /dev/null"):
                notes.append(line)
        elif part == "hunk":
            lines = []
            old, new = (abs(int(each.partition(",")[0])) for each in line.split(" ")[1:3])
            hunks.setdefault(name, []).append(Hunk(old, new, ()))
        else:
            lines.append((line[:1] or " ", line[1:]))
            hunks[name][-1] = Hunk(hunks[name][-1].old_line, hunks[name][-1].new_line, tuple(lines))
    found = []
    for each in diff.changes:
        shown = shown_path(each.path)
        said = tuple(note for note in notes if shown in note)
        found.append(FileDiff(each, tuple(hunks.get(shown, ())), said))
    return found


def call_at(known: Sequence[Boundary], seq: int) -> Boundary:
    """Return the call that an event ended, or the newest one that had ended by then. Raises `UsageError`."""
    found = [each for each in known if each.seq_after <= seq]
    if not found:
        raise UsageError(f"no call had ended by event {seq}")
    return found[-1]


def diff_of_call(filesystem: HostFilesystem, call: Boundary) -> WorkspaceDiff:
    """Return what one call changed; nothing, if it was rolled back when it ended."""
    if call.before is None or not call.success:
        return WorkspaceDiff((), "")
    return filesystem.diff(call.before, call.after)


def last_changes(filesystem: HostFilesystem, known: Sequence[Boundary]) -> dict[str, Boundary]:
    """Return the call that touched each path last, among those that stand."""
    found: dict[str, Boundary] = {}
    for each in known:
        if each.stands and each.before is not None and each.after is not None:
            found |= dict.fromkeys(filesystem.changed_paths(each.before, each.after), each)
    return found


def boundary_at(known: Sequence[Boundary], seq: int) -> FilesystemSnapshot | None:
    """Return the workspace as it was after an event; None if nothing is known of it."""
    for each in reversed(known):
        if each.seq_after <= seq and each.after is not None:
            return each.after
    return next((each.before for each in known if each.before is not None), None)


def content_data(content: bytes) -> dict[str, Any]:
    """Return a file's content as plain values for JSON; binary or very large content by its size alone."""
    if len(content) > MAX_SHOWN_BYTES or is_binary(content):
        return {"size": len(content), "text": None}
    return {"size": len(content), "text": content.decode("utf-8", "replace")}

"""What an undo took away without knowing whose it was: kept, so that nothing of a person's is lost.

A file of checksummed records, one for each undo. The record and the content it names are on disk before the
undo removes or replaces anything; see `History.keep`.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Literal, NamedTuple

from treenail.workspace.disk import append_record, decode_records, read_file
from treenail.workspace.line import dump_state, load_state
from treenail.workspace.manifest import State

KeptReason = Literal["undone", "conflict", "restored", "recovered"]
"""Why files were kept: a call was undone; a call's own files could not be applied; the workspace went
back to a boundary; another version was brought back over them."""


class KeptFiles(NamedTuple):
    """The files that one undo took away."""

    at: datetime
    reason: KeptReason
    call_id: str
    """The call in the workspace's journal: the tool call's id, `@`, and the session's id."""
    tool_name: str
    root: str
    """The workspace's directory."""
    commit: str
    """A commit of the private store that holds them, for git."""
    files: tuple[tuple[str, State], ...]
    """Each path and what was there. `absent` means that bringing it back is to delete the path."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, without directories that hold one of the others."""
        above = {path.rpartition("/")[0] for path, _ in self.files}
        return tuple(path for path, state in self.files if state.kind != "directory" or path not in above)


def load_kept(path: str) -> list[KeptFiles]:
    """Return what a line's undos have kept, oldest first."""
    found = []
    for _, payload in decode_records(read_file(path) or b""):
        raw = json.loads(payload)
        files = tuple((name, load_state(state)) for name, state in raw["files"])
        found.append(KeptFiles(**{**raw, "at": datetime.fromisoformat(raw["at"]), "files": files}))
    return found


def append_kept(path: str, kept: KeptFiles, *, durable: bool) -> None:
    """Add a record; one that a crash tore is overwritten."""
    files = [[name, dump_state(state)] for name, state in kept.files]
    record = {**kept._asdict(), "at": kept.at.isoformat(), "files": files}
    append_record(path, json.dumps(record, separators=(",", ":")).encode("ascii"), durable=durable)


def kept_path(directory: str) -> str:
    """Return the file of a line's directory that lists what was kept."""
    return os.path.join(directory, "kept")

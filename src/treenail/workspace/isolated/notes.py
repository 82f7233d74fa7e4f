"""What the layer of a copy knows about the paths that it has changed.

A note says what was at a path when the copy began, and whether the past is hidden at the path and below it:
because something was deleted there, or a directory was made anew. Notes are files in a directory of the
layer, so that whatever undoes a change of the layer undoes its note as well. They are kept in memory, too,
and read again after the layer went back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.fingerprints import Fingerprint
from treenail.workspace.paths import ROOT, encode, parent

NOTES = ".treenail-isolated"
"""The directory of the layer that holds the notes; it is not part of the workspace."""

_BELOW = f"{NOTES}/"

FOREIGN = f"{_BELOW}foreign"
"""Is there while a foreign call is open, so that a crash in it is noticed whatever it has changed."""


class Note(NamedTuple):
    """What the layer knows about a path that it has changed."""

    before: Fingerprint
    hides: bool
    """Whether the past does not show at the path and below it."""


def is_note(path: str) -> bool:
    """Say whether a path of the layer is a note's file."""
    return path.startswith(_BELOW) and path != FOREIGN


def is_private(path: str) -> bool:
    """Say whether a path of the layer is not part of the workspace."""
    return path == NOTES or path.startswith(_BELOW)


def own_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave out of a report what is not part of the workspace."""
    return tuple(sorted({each for each in paths if not is_private(each)}))


def parse(content: bytes) -> tuple[str, Note]:
    """Read a note's file: the path that it is about, and what it says."""
    raw = json.loads(content)
    return raw["path"], Note(Fingerprint(*raw["before"]), raw["hides"])


def is_hiding(note: Note | None) -> bool:
    """Say whether there is a note that hides the past."""
    return note is not None and note.hides


def is_hidden(path: str, note_on: Callable[[str], Note | None]) -> bool:
    """Say whether a note on a path, or on one above it, hides the past there."""
    while True:
        note = note_on(path)
        if note is not None and note.hides:
            return True
        if path == ROOT:
            return False
        path = parent(path)


def read_notes(layer: HostFilesystem) -> dict[str, Note]:
    """Return the notes of a layer, by the paths that they are about."""
    if not layer.exists(NOTES):
        return {}
    files = (entry.path for entry in layer.list(NOTES) if is_note(entry.path))
    return dict(parse(layer.read_bytes(path).content) for path in files)


def write_note(layer: HostFilesystem, path: str, note: Note) -> None:
    """Keep a note in a layer."""
    text = json.dumps({"path": path, "before": note.before, "hides": note.hides})
    layer.write(_BELOW + hashlib.sha256(encode(path)).hexdigest(), text)

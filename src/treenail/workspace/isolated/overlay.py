"""The past with a layer over it: a tree that can be changed while what is below it stays.

Theory of operation
-------------------
What the layer has at a path is what is there. Where it has nothing, the past shows through, unless a note on
the path or on one above it hides the past (`treenail.workspace.isolated.notes`).

So a change is made in the layer alone, in three steps: the directories that lead to the path are brought up
into the layer, a note keeps what the past has at the path, and then the layer is changed. A directory that is
brought up still shows what the past has in it; one that is made anew hides it.

Paths are walked by `VirtualTree`, because a link of the layer may lead to what only the past has, and the
other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from treenail.errors import PathEscapeError
from treenail.workspace.base import FileEntry, FileStat, FilesystemSnapshot, RestoreReport
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.fingerprints import Fingerprint
from treenail.workspace.isolated.notes import (
    NOTES,
    Note,
    is_hidden,
    is_hiding,
    is_private,
    own_paths,
    read_notes,
    write_note,
)
from treenail.workspace.isolated.past import Past
from treenail.workspace.isolated.trees import set_permissions, target_of
from treenail.workspace.paths import ROOT, join, parent
from treenail.workspace.virtual import VirtualTree


class Overlay(VirtualTree):
    """The past with a layer over it. Its operations are those of `Filesystem`."""

    def __init__(self, past: Past, layer: HostFilesystem) -> None:
        super().__init__()
        self.past = past
        self.layer = layer
        self.notes: dict[str, Note] = {}
        self.changed: set[str] = set()
        """What was written here since somebody last asked."""
        self.load_notes()

    # --- notes ---

    def load_notes(self) -> None:
        """Read the notes again, after a rollback or a restore of the layer."""
        self.notes = read_notes(self.layer)

    def _note(self, path: str, *, hides: bool) -> None:
        """Keep what is at a path of the past before it is changed here for the first time."""
        known = self.notes.get(path)
        self.changed.add(path)
        if known is not None and (known.hides or not hides):
            return
        note = Note(self.before(path), hides)
        write_note(self.layer, path, note)
        self.notes[path] = note

    # --- looking: at paths without links ---

    def status(self, path: str) -> FileStat | None:
        """Describe what is at a path without links; None if nothing is."""
        if is_private(path):
            raise PathEscapeError(f"the path {path!r} is Treenail's own, and not part of the workspace")
        if path != ROOT:
            try:
                return self.layer.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                pass
        return None if is_hidden(path, self.notes.get) else self.past.stat(path)

    def entries(self, path: str) -> dict[str, FileEntry]:
        """Return what is in a directory, by name."""
        found = {} if is_hidden(path, self.notes.get) else self.past.entries(path)
        if self.notes:
            notes = self.notes
            found = {name: each for name, each in found.items() if not is_hiding(notes.get(join(path, name)))}
        with suppress(FileNotFoundError, NotADirectoryError):
            found.update((entry.name, entry) for entry in self.layer.list(path))
        if path == ROOT:
            found.pop(NOTES, None)
        return found

    def open(self, path: str) -> BinaryIO:
        """Open a file at a path without links."""
        try:
            return self.layer.open_read(path)
        except (FileNotFoundError, NotADirectoryError):
            return self.past.open(path)

    def is_as_found(self, path: str, since_ns: int) -> bool:
        """Say whether a path shows what the other workspace has there, unchanged since a time."""
        return not self.is_mine(path) and self.past.is_as_found(path, since_ns)

    def is_mine(self, path: str) -> bool:
        """Say whether the layer has something at a path."""
        return path == ROOT or self.layer.exists(path)

    # --- changing: at paths without links ---

    def put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        """Write a file, with the directories that lead to it."""
        self._parents(path)
        self._note(path, hides=False)
        self.layer.write_bytes(path, content)
        if permissions is not None:
            set_permissions(self.layer, path, permissions)

    def put_directory(self, path: str) -> None:
        """Make a directory, with those that lead to it."""
        self._parents(path)
        # It was not there: whatever the past had at the path must not show in it.
        self._note(path, hides=True)
        self.layer.mkdir(path)

    def put_link(self, path: str, target: str) -> None:
        """Make a link, with the directories that lead to it."""
        self._parents(path)
        self._note(path, hides=False)
        self.layer.symlink(path, target)

    def remove(self, path: str) -> None:
        """Remove what is at a path, with everything below it."""
        self._note(path, hides=True)
        if self.layer.exists(path):
            self.layer.delete(path, recursive=True)

    def rename(self, path: str, to: str) -> None:
        """Copy what is to be moved, and remove it where it was: the past cannot be renamed."""
        if self.status(to) is not None:
            self.remove(to)
        self._copy(path, to)
        self.remove(path)

    def _copy(self, path: str, to: str) -> None:
        status = self.status(path)
        if status is None:
            return
        if status.is_link:
            self.put_link(to, status.link_target or "")
        elif status.is_directory:
            self.put_directory(to)
            set_permissions(self.layer, to, status.permissions)
            for name in self.entries(path):
                self._copy(join(path, name), join(to, name))
        else:
            with self.open(path) as stream:
                self.put_file(to, stream.read(), status.permissions)

    def set_permissions(self, path: str, permissions: int) -> None:
        """Change the permission bits of a file or directory."""
        if path == ROOT:
            raise ValueError("the bits of an isolated workspace's root cannot be changed")
        self._note(path, hides=False)
        status = self.status(path)
        if status is not None and not self.is_mine(path):
            if status.is_directory:
                self._raise_directory(path, status)
            else:
                with self.open(path) as stream:
                    self.put_file(path, stream.read(), status.permissions)
        self.layer.chmod(path, permissions)

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open."""
        return self.layer.unfinished()

    def _parents(self, path: str) -> None:
        """Have the layer hold the directories that lead to a path."""
        above = parent(path)
        if above == ROOT or self.is_mine(above):
            return
        status = self.status(above)
        if status is None:
            self.put_directory(above)
        else:
            self._raise_directory(above, status)

    def _raise_directory(self, path: str, status: FileStat) -> None:
        """Bring a directory of the past into the layer; what is in it still shows."""
        self._parents(path)
        self.layer.mkdir(path)
        set_permissions(self.layer, path, status.permissions)

    # --- what has changed ---

    def changed_paths(self) -> set[str]:
        """Return every path that may differ from the past."""
        found: set[str] = set()
        for path, note in self.notes.items():
            found.add(path)
            if note.before.kind == "directory" and note.hides:
                found.update(self.past.below(path))
        return found

    def unlike_host(self) -> set[str] | None:
        """Return every path that may differ from the other workspace's directory; None if that is unknown."""
        since = self.past.changed_paths()
        return None if since is None else since | self.changed_paths()

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary of the layer."""
        notes = self.notes
        report = self.layer.restore(snapshot)
        self.load_notes()
        touched = set(own_paths(report.restored))
        # A note that came or went shows or hides what the past has there.
        for path in {*notes, *self.notes}:
            if notes.get(path) != self.notes.get(path):
                touched.update((path, *self.past.below(path)))
        self.changed.update(touched)
        return RestoreReport(tuple(sorted(touched)), report.conflicts, report.notes)

    def before(self, path: str) -> Fingerprint:
        """Say what a path was at the boundary, as the layer has noted it or as the past knows it."""
        note = self.notes.get(path)
        return note.before if note is not None else self.past.fingerprint(path)

    def content_before(self, path: str) -> bytes | None:
        """Return what a file or a link held at the boundary."""
        status = self.past.stat(path)
        if status is None or status.is_directory:
            return None
        if status.is_link:
            return target_of(status)
        with self.past.open(path) as stream:
            return stream.read()

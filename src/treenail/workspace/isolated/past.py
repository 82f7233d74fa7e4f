"""Another workspace on disk, as it was at a boundary.

Theory of operation
-------------------
Nothing is copied. A path that nobody has changed since the boundary is read where it is. For one that was
changed, the other workspace's own history knows what was there, from three sources:

- its line of boundaries: each names the paths that it changed and what they were before;
- the journal of the call that is open right now, or of the changes between calls;
- while a foreign process is loose on it, the manifest from before that process.

They are read again before each answer, under the other workspace's lock, so that its later changes, committed
or under way, do not show. (A change that somebody makes past both of them, with an editor, say, shows until
the copy writes the path itself: it is not recorded.)
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from treenail.errors import PathEscapeError
from treenail.workspace.base import FileEntry, FileStat, FilesystemSnapshot
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.fingerprints import Fingerprint, fingerprint, fingerprint_of
from treenail.workspace.line import LineEntry, fold
from treenail.workspace.manifest import ABSENT, Manifest, State, state_of
from treenail.workspace.paths import ROOT, join, parent
from treenail.workspace.paths import name as name_of

_PERMISSIONS = {"file": 0o644, "directory": 0o755, "link": 0o777}
"""What is shown where the history does not know the bits."""


class Past:
    """Another workspace on disk, as it was at a boundary. Reads only."""

    def __init__(self, host: HostFilesystem, snapshot: FilesystemSnapshot) -> None:
        self.host = host
        self._position = host.undo.position(snapshot) + 1
        """Up to where the line of boundaries has been read."""
        self._firsts: dict[str, State] = {}
        """What was at each path before the first boundary that changed it."""
        self._names: dict[str, set[str]] = {}
        """The names of those paths, by directory."""
        self._open: dict[str, State] = {}
        """What was at each path before the open journal's first change of it."""
        self._seen: object = None
        """How much of that journal has been read."""

    def _refresh(self) -> Manifest | None:
        """Take in what the other workspace has done since. Its lock is held.

        Returns the manifest to go by while a foreign process is at work there.
        """
        undo = self.host.undo
        if undo.history is None:
            return None
        entries = undo.history.line.entries
        for entry in entries[self._position :]:
            self._take(entry)
        self._position = max(self._position, len(entries))
        journal = undo.open_journal()
        seen = None if journal is None else (journal.id, len(journal.intents), len(journal.segments))
        if seen != self._seen:
            self._seen = seen
            self._open = {}
            if journal is not None:
                self._open = journal.first_states()
                for path, step in fold(journal.segments, outside=True).items():
                    self._open.setdefault(path, step.first)
        return undo.survey().manifest() if journal is not None and journal.foreign else None

    def _take(self, entry: LineEntry) -> None:
        """Note what a boundary changed that none before it had."""
        for path, before, _ in entry.changes:
            if path not in self._firsts:
                self._firsts[path] = before
                self._names.setdefault(parent(path), set()).add(name_of(path))

    def _known(self, path: str, manifest: Manifest | None) -> State | None:
        """Return what was at a path if that is known not to be what is there now."""
        state = self._firsts.get(path) or self._open.get(path)
        if state is not None:
            return state
        above = path
        while above != ROOT:
            above = parent(above)
            there = self._firsts.get(above) or self._open.get(above)
            if there is not None and there.kind != "directory":
                return ABSENT  # Nothing was below what was not a directory.
        if manifest is not None and path != ROOT and not self.host.undo.survey().is_beyond(manifest, path):
            return state_of(manifest.get(path))
        return None

    def stat(self, path: str) -> FileStat | None:
        """Describe what was at a path; None if nothing was."""
        host = self.host
        with host.undo.lock:
            state = self._known(path, self._refresh())
            if state is None:
                try:
                    return host.stat(path)
                except (FileNotFoundError, NotADirectoryError, PathEscapeError):
                    return None
            return self._status(path, state)

    def _status(self, path: str, state: State) -> FileStat | None:
        """Describe a recorded state."""
        if state.kind in ("absent", "other"):
            return None
        target = None
        if state.kind == "link":
            target = os.fsdecode(self.host.undo.opened().objects.read_blob(state.oid))
        return FileStat(
            path=path,
            is_file=state.kind == "file",
            is_directory=state.kind == "directory",
            size_bytes=state.size if state.kind != "directory" else 0,
            is_link=state.kind == "link",
            link_target=target,
            permissions=_PERMISSIONS[state.kind] if state.mode < 0 else state.mode & 0o777,
            modified_at=datetime.fromtimestamp(state.mtime_ns / 1e9, UTC),
        )

    def entries(self, path: str) -> dict[str, FileEntry]:
        """Return what was in a directory, by name."""
        host = self.host
        found: dict[str, FileEntry] = {}
        with host.undo.lock:
            manifest = self._refresh()
            names = set(self._names.get(path, ()))
            names.update(name_of(each) for each in self._open if parent(each) == path)
            if manifest is not None:
                names.update(manifest.directories.get("" if path == ROOT else path, {}))
            try:
                live = host.list(path)
            except OSError:
                live = []
            for entry in live:
                if self._known(join(path, entry.name), manifest) is None:
                    found[entry.name] = entry
                else:
                    names.add(entry.name)
            for name in names:
                whole = join(path, name)
                state = self._known(whole, manifest)
                if state is not None and state.kind not in ("absent", "other"):
                    found[name] = FileEntry(
                        name, whole, state.kind == "file", state.kind == "directory", state.kind == "link"
                    )
        return found

    def changed_paths(self) -> set[str] | None:
        """Return every path that was changed since the boundary; None while a foreign process works there."""
        with self.host.undo.lock:
            return None if self._refresh() is not None else {*self._firsts, *self._open} - {ROOT}

    def below(self, path: str) -> Iterator[str]:
        """Yield every path that was below a directory."""
        for name, entry in self.entries(path).items():
            yield join(path, name)
            if entry.is_directory:
                yield from self.below(join(path, name))

    def open(self, path: str) -> BinaryIO:
        """Open a file as it was. What is written to it later does not disturb the stream."""
        host = self.host
        with host.undo.lock:
            state = self._known(path, self._refresh())
            if state is None:
                return host.open_read(path)
            return io.BufferedReader(io.BytesIO(host.undo.opened().objects.read_blob(state.oid)))

    def copy_out(self, directory: Path) -> None:
        """Copy the other workspace, as it is now, into an empty directory.

        What somebody changes meanwhile may be missing there.
        """
        with suppress(OSError):
            self.host.copy_out(directory)

    def is_as_found(self, path: str, since_ns: int) -> bool:
        """Say whether a path is still what it was, and was not touched since a time either."""
        host = self.host
        with host.undo.lock:
            if self._known(path, self._refresh()) is not None:
                return False
        try:
            touched_ns = os.lstat(os.path.join(host.root, path)).st_ctime_ns
        except OSError:
            return False
        return touched_ns < since_ns

    def fingerprint(self, path: str) -> Fingerprint:
        """Say what was at a path."""
        with self.host.undo.lock:
            state = self._known(path, self._refresh())
            return fingerprint(self.host, path) if state is None else fingerprint_of(state)

"""A copy of a workspace that costs nothing until it is changed, and what differs from the original.

Theory of operation
-------------------
An `IsolatedFilesystem` begins at a boundary of a workspace on disk and goes its own way from there. It
has three parts:

- **The past** (`_Past`): the other workspace as it was at the boundary. A path that nobody has changed since
  is read where it is. For one that was changed, the other workspace's own history knows what was there:
  its line of boundaries, the journal of the call that is open right now, and, while a foreign process is
  loose on it, the manifest from before that process. So making a copy of 50,000 files copies none of them,
  and later changes of the original, committed or under way, do not show. (What somebody changes past
  both of them, with an editor, say, shows until the child writes the path itself: nobody keeps that.)
- **The layer**: a directory of its own with what the copy has changed. It is a `HostFilesystem`, so that
  calls, crashes, boundaries and restores work in here as they do anywhere. A path that was changed or
  deleted has a *note* in the layer: what was there at the boundary, and whether the past is hidden below it.
- **The scratch tree**: a process needs a real directory. When the first foreign call begins, the whole tree
  is written out, once; afterwards only what has changed is brought up to date. During such a call every
  operation goes to the scratch tree, and at its end what differs is taken into the layer. The scratch tree
  is a cache: it may be thrown away at any time between calls, and is after a restart.

What the copy has changed comes back as `ForkChange`s. `apply_changes` brings them into a workspace inside a
tool call, whose transaction makes it all or nothing. A path that is not there what it was at the boundary was
changed by somebody else since: that is a conflict, it is reported, and nothing is applied.

Memory needs none of this: there, two filesystems share what neither has changed
(`InMemoryFilesystem.fork`).
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, TextIO

from holdfast.clock import Clock
from holdfast.errors import PathEscapeError, UsageError, WorkspaceConflictError, WorkspaceError
from holdfast.workspace.base import (
    MAX_GREP_MATCHES,
    MAX_READ_LINES,
    FileEntry,
    FileStat,
    Filesystem,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
    WriteMode,
    WriteResult,
)
from holdfast.workspace.diffs import MAX_SHOWN_BYTES, Version, describe
from holdfast.workspace.host import HostFilesystem
from holdfast.workspace.journal import Boundary
from holdfast.workspace.lines import check_loadable, check_range, read_lines
from holdfast.workspace.manifest import ABSENT, RACY_NS, Manifest, State, state_of
from holdfast.workspace.memory import MAX_TOTAL_BYTES, InMemoryFilesystem, WriteStream
from holdfast.workspace.objects import CHUNK_BYTES, object_id
from holdfast.workspace.paths import MAX_DEPTH, ROOT, is_below, join, normalize, parent, split
from holdfast.workspace.restoring import fold
from holdfast.workspace.rooted import copy_tree
from holdfast.workspace.search import glob_tree, grep_tree
from holdfast.workspace.views import ReadOnlyFilesystem

NOTES = ".holdfast-isolated"
"""The directory of the layer that holds the notes; it is not part of the workspace."""

_FOREIGN = f"{NOTES}/foreign"
"""Is there while a foreign call is open, so that a crash in it is noticed whatever it has changed."""

_MAX_LINKS = 40
_PERMISSIONS = {"file": 0o644, "directory": 0o755, "link": 0o777}


# --- what is at a path, in a form that can be compared and kept --------------------------------------


class Fingerprint(NamedTuple):
    """What is at a path: its kind, its permission bits and an id of its content."""

    kind: str
    """`absent`, `file`, `directory`, `link`, or `other` for what cannot be kept."""
    permissions: int = 0
    content: str = ""
    """The id that git gives to a file's content or a link's target, in hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.permissions:o}:{self.content}"


NOTHING = Fingerprint("absent")


def fingerprint(filesystem: Filesystem, path: str) -> Fingerprint:
    """Say what is at a path of a workspace now."""
    try:
        status = filesystem.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING
    if status.is_link:
        target = (status.link_target or "").encode("utf-8", "surrogateescape")
        return Fingerprint("link", 0, object_id("blob", target).hex())
    if status.is_directory:
        return Fingerprint("directory", status.permissions)
    if not status.is_file:
        return Fingerprint("other")
    with filesystem.open_read(path) as stream:
        return Fingerprint("file", status.permissions, _blob_id(stream, status.size_bytes))


def _blob_id(stream: BinaryIO, size: int) -> str:
    """Return git's id of a stream's content without loading it."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _fingerprint_of(state: State) -> Fingerprint:
    if state.kind == "absent":
        return NOTHING
    if state.kind == "link":
        return Fingerprint("link", 0, state.oid.hex())
    if state.kind == "directory":
        return Fingerprint("directory", state.mode & 0o777)
    if state.kind == "file":
        return Fingerprint("file", state.mode & 0o777, state.oid.hex())
    return Fingerprint("other")


# --- changes that come back ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkChange:
    """One path that a copy has changed since its boundary."""

    path: str
    before: Fingerprint
    after: Fingerprint
    source: Filesystem = field(repr=False, compare=False)
    """Where the new content is."""


def conflicts_with(
    target: Filesystem,
    changes: Sequence[ForkChange],
    applied: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Name the paths of a workspace that are no longer what the copy began with.

    A path that is already what it should become is no conflict, and neither is one that is as an
    earlier application has left it (`applied`: the texts of those fingerprints).
    """
    known = applied or {}
    found = []
    going = {each.path for each in changes if each.after.kind != "directory"}
    for each in changes:
        now = fingerprint(target, each.path)
        if now not in (each.before, each.after) and str(now) != known.get(each.path):
            found.append(each.path)
        elif now.kind == "directory" and each.after.kind != "directory":
            # What somebody else put into a directory that is to go would go with it.
            found += [path for path in _below(target, each.path) if path not in going]
    return tuple(sorted(set(found)))


def _below(filesystem: Filesystem, directory: str) -> Iterator[str]:
    for entry in filesystem.list(directory):
        yield entry.path
        if entry.is_directory:
            yield from _below(filesystem, entry.path)


def apply_changes(
    target: Filesystem, changes: Sequence[ForkChange], applied: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Bring a copy's changes into a workspace; return the paths that were changed there.

    Call it inside a tool call: if it raises, that call's rollback undoes what was done. Raises
    `WorkspaceConflictError`, before anything is changed, if paths are no longer what they were.
    """
    conflicts = conflicts_with(target, changes, applied)
    if conflicts:
        shown = ", ".join(conflicts[:10]) + (f" and {len(conflicts) - 10} more" if conflicts[10:] else "")
        raise WorkspaceConflictError(
            f"{len(conflicts)} paths have been changed since the copy was made: {shown}; nothing was applied",
            paths=conflicts,
        )
    todo = [each for each in changes if fingerprint(target, each.path) != each.after]
    for each in sorted(todo, key=lambda change: change.path.count("/"), reverse=True):
        if fingerprint(target, each.path).kind not in ("absent", each.after.kind):
            target.delete(each.path)
    inward = sorted(todo, key=lambda change: change.path.count("/"))
    for each in inward:
        _bring(target, each)
    for each in reversed(inward):
        # Last, because the bits of a directory may forbid what comes before.
        if each.after.kind == "directory" and target.stat(each.path).permissions != each.after.permissions:
            target.chmod(each.path, each.after.permissions)
    return tuple(sorted(each.path for each in todo))


def _bring(target: Filesystem, change: ForkChange) -> None:
    """Make one path what it should become. What was in its way is gone."""
    if change.after.kind == "directory":
        target.mkdir(change.path)
    elif change.after.kind == "link":
        if target.exists(change.path):
            target.delete(change.path)
        _symlink(target, change.path, change.source.stat(change.path).link_target or "")
    elif change.after.kind == "file":
        copy_file(change.source, target, change.path)
        if target.stat(change.path).permissions != change.after.permissions:
            target.chmod(change.path, change.after.permissions)


def _symlink(target: Filesystem, path: str, leads_to: str) -> None:
    make: Callable[[str, str], None] | None = getattr(target, "symlink", None)
    if make is None:
        raise WorkspaceError(f"{target!r} cannot hold links, and {path!r} is one; nothing was applied")
    make(path, leads_to)


def copy_file(source: Filesystem, target: Filesystem, path: str) -> None:
    """Copy a file's content from one workspace to the same path of another, in parts."""
    with source.open_read(path) as reading, target.open_write(path) as writing:
        while chunk := reading.read(CHUNK_BYTES):
            writing.write(chunk)


def diff_of(changes: Sequence[ForkChange], before: Callable[[str], bytes | None]) -> WorkspaceDiff:
    """Show changes as text. `before` gives what a file held at the boundary."""
    return describe(
        (
            each.path,
            _version(each.before, partial(before, each.path)),
            _version(each.after, partial(_content, each.source, each.path)),
        )
        for each in changes
    )


def _version(mark: Fingerprint, content: Callable[[], bytes | None]) -> Version | None:
    if mark.kind in ("absent", "other"):
        return None
    if mark.kind == "directory":
        return Version("directory", mark.permissions)
    data = content()
    size = 0 if data is None else len(data)
    if data is not None and mark.kind == "file" and size > MAX_SHOWN_BYTES:
        data = None
    kind = "link" if mark.kind == "link" else "file"
    return Version(kind, mark.permissions, size, data, mark.content)  # type: ignore[arg-type]  # one of both


def _content(filesystem: Filesystem, path: str) -> bytes | None:
    status = filesystem.stat(path)
    if status.is_link:
        return (status.link_target or "").encode("utf-8", "surrogateescape")
    with filesystem.open_read(path) as stream:
        return stream.read()


def quiet_boundary(filesystem: Filesystem, *, tag: str | None = None) -> FilesystemSnapshot:
    """Return a boundary of a workspace that no open call is part of: where it was before that call."""
    call = getattr(filesystem, "_call", None)
    if call is not None:
        base = call.base
        assert isinstance(base, FilesystemSnapshot)
        return base
    return filesystem.snapshot(tag=tag)


# --- the past -----------------------------------------------------------------------------------------


class _Past:
    """Another workspace on disk, as it was at a boundary. Reads only."""

    def __init__(self, host: HostFilesystem, snapshot: FilesystemSnapshot) -> None:
        self._host = host
        self._position = host._position(snapshot) + 1
        self._firsts: dict[str, State] = {}
        self._names: dict[str, set[str]] = {}
        self._open: dict[str, State] = {}
        self._seen: object = None

    def _refresh(self) -> Manifest | None:
        """Take in what the other workspace has done since. Its lock is held.

        Returns the manifest to go by while a foreign process is at work there.
        """
        host = self._host
        history = host._history
        if history is None:
            return None
        boundaries = history.line.boundaries
        for boundary in boundaries[self._position :]:
            self._take(boundary)
        self._position = max(self._position, len(boundaries))
        call = host._call
        journal = call.journal if call is not None else host._ambient
        seen = None if journal is None else (journal.id, len(journal.intents), len(journal.segments))
        if seen != self._seen:
            self._seen = seen
            self._open = {}
            if journal is not None:
                self._open = journal.first_states()
                for path, step in fold(journal.segments, outside=True).items():
                    self._open.setdefault(path, step.first)
        if call is not None and call.journal.foreign:
            return host._manifest()
        return None

    def _take(self, boundary: Boundary) -> None:
        for path, before, _ in boundary.changes:
            if path not in self._firsts:
                self._firsts[path] = before
                self._names.setdefault(parent(path), set()).add(path.rpartition("/")[2])

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
                return ABSENT
        if manifest is not None and path != ROOT and not self._host._is_beyond_scans(manifest, path):
            return state_of(manifest.get(path))
        return None

    def stat(self, path: str) -> FileStat | None:
        """Describe what was at a path; None if nothing was."""
        host = self._host
        with host._lock:
            state = self._known(path, self._refresh())
            if state is None:
                try:
                    return host.stat(path)
                except (FileNotFoundError, NotADirectoryError, PathEscapeError):
                    return None
            return self._status(path, state)

    def _status(self, path: str, state: State) -> FileStat | None:
        if state.kind in ("absent", "other"):
            return None
        target = None
        if state.kind == "link":
            target = os.fsdecode(self._host._opened().objects.read_blob(state.oid))
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
        host = self._host
        found: dict[str, FileEntry] = {}
        with host._lock:
            manifest = self._refresh()
            names = set(self._names.get(path, ()))
            names.update(each.rpartition("/")[2] for each in self._open if parent(each) == path)
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

    def open(self, path: str) -> BinaryIO:
        """Open a file as it was. What is written to it later does not disturb the stream."""
        host = self._host
        with host._lock:
            state = self._known(path, self._refresh())
            if state is None:
                return host.open_read(path)
            return io.BufferedReader(io.BytesIO(host._opened().objects.read_blob(state.oid)))

    def is_as_found(self, path: str, since_ns: int) -> bool:
        """Say whether a path is still what it was, and was not touched since a time either."""
        host = self._host
        with host._lock:
            if self._known(path, self._refresh()) is not None:
                return False
        try:
            touched_ns = os.lstat(os.path.join(host.root, path)).st_ctime_ns
        except OSError:
            return False
        return touched_ns < since_ns

    def fingerprint(self, path: str) -> Fingerprint:
        """Say what was at a path."""
        with self._host._lock:
            state = self._known(path, self._refresh())
            return fingerprint(self._host, path) if state is None else _fingerprint_of(state)


# --- the layer over the past ----------------------------------------------------------------------------


class _Note(NamedTuple):
    """What the layer knows about a path that it has changed."""

    before: Fingerprint
    hides: bool
    """Whether the past does not show at the path and below it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a path leads: its one spelling without links, what is there, and how much of it is missing."""

    path: str
    status: FileStat | None
    missing: int = 0


class _Overlay:
    """The past with a layer over it. Its operations are those of `Filesystem`."""

    def __init__(self, past: _Past, layer: HostFilesystem) -> None:
        self.past = past
        self.layer = layer
        self.lock = threading.RLock()
        self.notes: dict[str, _Note] = {}
        self.changed: set[str] = set()
        """What was written here since somebody last asked."""
        self.load_notes()

    # .. notes ..

    def load_notes(self) -> None:
        """Read the notes again, after a rollback or a restore of the layer."""
        notes: dict[str, _Note] = {}
        if self.layer.exists(NOTES):
            for entry in self.layer.list(NOTES):
                if entry.path == _FOREIGN:
                    continue
                raw = json.loads(self.layer.read_bytes(entry.path).content)
                notes[raw["path"]] = _Note(Fingerprint(*raw["before"]), raw["hides"])
        self.notes = notes

    def _note(self, path: str, *, hides: bool) -> None:
        """Keep what is at a path of the past before it is changed here for the first time."""
        known = self.notes.get(path)
        self.changed.add(path)
        if known is not None and (known.hides or not hides):
            return
        note = _Note(known.before if known is not None else self._base(path), hides)
        text = json.dumps({"path": path, "before": note.before, "hides": note.hides})
        name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
        self.layer.write(f"{NOTES}/{name}", text)
        self.notes[path] = note

    def _base(self, path: str) -> Fingerprint:
        """Say what the past shows at a path, hidden or not."""
        return self.past.fingerprint(path)

    def _is_hidden(self, path: str) -> bool:
        while True:
            note = self.notes.get(path)
            if note is not None and note.hides:
                return True
            if path == ROOT:
                return False
            path = parent(path)

    # .. looking ..

    def status(self, path: str) -> FileStat | None:
        """Describe what is at a path without links; None if nothing is."""
        if path == NOTES or is_below(path, NOTES):
            raise PathEscapeError(f"the path {path!r} is Holdfast's own, and not part of the workspace")
        if path != ROOT:
            try:
                return self.layer.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                pass
        return None if self._is_hidden(path) else self.past.stat(path)

    def entries(self, path: str) -> dict[str, FileEntry]:
        """Return what is in a directory, by name."""
        found = {} if self._is_hidden(path) else self.past.entries(path)
        if self.notes:
            found = {name: each for name, each in found.items() if not self._hides(join(path, name))}
        try:
            mine = self.layer.list(path)
        except (FileNotFoundError, NotADirectoryError):
            mine = []
        for entry in mine:
            found[entry.name] = entry
        if path == ROOT:
            found.pop(NOTES, None)
        return found

    def _hides(self, path: str) -> bool:
        note = self.notes.get(path)
        return note is not None and note.hides

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

    def locate(self, path: str, *, follow: bool) -> _Place:
        """Walk a normalised path; links on the way are followed, one at its end if `follow`."""
        pending = list(reversed(split(path)))
        done: builtins.list[str] = []
        here = self.status(ROOT)
        links = 0
        while pending:
            if here is not None and not here.is_directory:
                _fail(errno.ENOTDIR, f"{'/'.join(done)!r} is not a directory", path)
            name = pending.pop()
            if name == "..":
                if not done:
                    raise PathEscapeError(
                        f"the path {path!r} leads out of the workspace through a link; "
                        f"use paths that stay below the workspace root"
                    )
                done.pop()
                here = self.status("/".join(done) or ROOT)
                continue
            child = self.status("/".join((*done, name)))
            if child is None:
                rest = (name, *reversed(pending))
                if ".." in rest:
                    _fail(errno.ENOENT, "no such file or directory", path)
                return _Place("/".join((*done, *rest)), None, missing=len(rest))
            if child.is_link and (pending or follow):
                links += 1
                target = child.link_target or ""
                if links > _MAX_LINKS:
                    _fail(errno.ELOOP, "the links on this path lead in a circle", path)
                if target.startswith("/"):
                    raise PathEscapeError(
                        f"the path {path!r} leads through a link to {target!r}, out of the workspace; "
                        f"use paths that stay below the workspace root"
                    )
                pending.extend(each for each in reversed(target.split("/")) if each not in ("", "."))
                continue
            done.append(name)
            here = child
        return _Place("/".join(done) or ROOT, here)

    def existing(self, path: str, *, follow: bool) -> tuple[str, FileStat]:
        place = self.locate(path, follow=follow)
        if place.status is None:
            _fail(errno.ENOENT, "no such file or directory", path)
        return place.path, place.status

    def file(self, path: str) -> tuple[str, FileStat]:
        where, status = self.existing(path, follow=True)
        if status.is_directory:
            _fail(errno.EISDIR, "this is a directory, not a file", path)
        return where, status

    # .. the reading half of a filesystem ..

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        path = normalize(path)
        check_range(offset, limit)
        with self.lock:
            where, status = self.file(path)
            check_loadable(path, status.size_bytes)
            stream = self.open(where)
        with stream:
            return read_lines(path, stream.read(), offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        path = normalize(path)
        check_range(offset, limit)
        with self.lock:
            where, status = self.file(path)
            size = status.size_bytes
            end = size if limit == -1 else min(size, offset + limit)
            wanted = max(0, end - offset)
            check_loadable(path, wanted)
            stream = self.open(where)
        with stream:
            stream.seek(offset)
            content = stream.read(wanted)
        return ReadBytesResult(content, path, size, offset, limit, truncated=offset + len(content) < size)

    def exists(self, path: str) -> bool:
        try:
            return self.locate(normalize(path), follow=False).status is not None
        except PathEscapeError:
            raise
        except OSError:
            return False

    def stat(self, path: str) -> FileStat:
        path = normalize(path)
        with self.lock:
            _, found = self.existing(path, follow=False)
        return FileStat(
            path=path,
            is_file=found.is_file,
            is_directory=found.is_directory,
            size_bytes=found.size_bytes,
            is_link=found.is_link,
            link_target=found.link_target,
            permissions=found.permissions,
            modified_at=found.modified_at,
        )

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        path = normalize(path)
        with self.lock:
            where, status = self.existing(path, follow=True)
            if not status.is_directory:
                _fail(errno.ENOTDIR, "this is not a directory", path)
            found = self.entries(where)
        return [
            FileEntry(name, join(path, name), each.is_file, each.is_directory, each.is_link)
            for name, each in sorted(found.items())
        ]

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        return glob_tree(self.list, pattern, path=normalize(path))

    def grep(
        self,
        pattern: str,
        *,
        path: str = ROOT,
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        path = normalize(path)
        with self.lock:
            _, status = self.existing(path, follow=True)
        return grep_tree(
            self.list,
            self.open_read,
            pattern,
            path=path,
            is_file=status.is_file,
            glob=glob,
            max_matches=max_matches,
        )

    def open_read(self, path: str) -> BinaryIO:
        with self.lock:
            where, _ = self.file(normalize(path))
            return self.open(where)

    def open_text(self, path: str) -> TextIO:
        return io.TextIOWrapper(self.open_read(path), encoding="utf-8", newline="\n")

    # .. the changing half ..

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        try:
            data = content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text for {path!r} cannot be written as UTF-8: "
                f"character {error.start} is a lone surrogate"
            ) from None
        return self.write_bytes(path, data, mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        path = normalize(path)
        data = bytes(content)
        with self.lock:
            place = self._writable(path, mode, create_parents)
            if mode == "append" and place.status is not None:
                with self.open(place.path) as stream:
                    whole = stream.read() + data
            else:
                whole = data
            self._put_file(place.path, whole, None if place.status is None else place.status.permissions)
        return WriteResult(path=path, bytes_written=len(data), mode=mode)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        path = normalize(path)
        with self.lock:
            self._writable(path, mode, create_parents)
            call = self.layer.unfinished()

        def publish(content: bytes) -> None:
            with self.lock:
                if self.layer.unfinished() != call:
                    raise WorkspaceError(
                        f"the stream for {path!r} was closed after the tool call that opened it had ended; "
                        f"its content was discarded: close streams before the call returns"
                    )
                self.write_bytes(path, content, mode=mode, create_parents=create_parents)

        return WriteStream(path, publish, MAX_TOTAL_BYTES)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        path = normalize(path)
        with self.lock:
            where, status = self.existing(path, follow=False)
            _refuse_root(where, path, "deleted")
            if status.is_directory and not recursive and self.entries(where):
                _fail(errno.ENOTEMPTY, "the directory is not empty; delete it with recursive=True", path)
            self._remove(where)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        source, target = normalize(source), normalize(target)
        with self.lock:
            origin, status = self.existing(source, follow=False)
            goal = self.locate(target, follow=False)
            there = goal.status
            _refuse_root(origin, source, "moved")
            _refuse_root(goal.path, target, "replaced")
            if goal.missing > 1:
                _fail(errno.ENOENT, "the directory to move to does not exist; make it first", target)
            if there is not None and not overwrite:
                _fail(errno.EEXIST, "something is there already; pass overwrite=True to replace it", target)
            if goal.path == origin:
                return
            if is_below(goal.path, origin):
                _fail(errno.EINVAL, f"cannot move the directory {source!r} into itself", target)
            if there is not None and there.is_directory and not status.is_directory:
                _fail(errno.EISDIR, "a directory is there; delete it first", target)
            if status.is_directory and there is not None and not there.is_directory:
                _fail(errno.ENOTDIR, "a directory cannot replace what is there; delete it first", target)
            if there is not None and there.is_directory and self.entries(goal.path):
                _fail(errno.ENOTEMPTY, "the directory to replace is not empty; delete it first", target)
            self._check_depth(len(split(goal.path)) + self._height(origin, status), target)
            if there is not None:
                self._remove(goal.path)
            self._copy(origin, status, goal.path)
            self._remove(origin)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        path = normalize(path)
        with self.lock:
            place = self.locate(path, follow=False)
            there = place.status
            if there is not None and there.is_link:
                there = self.locate(path, follow=True).status or there
            if there is not None:
                if exist_ok and there.is_directory:
                    return
                _fail(errno.EEXIST, "something is there already", path)
            if place.missing > 1 and not parents:
                _fail(errno.ENOENT, "the parent directory does not exist; pass parents=True to make it", path)
            self._check_depth(len(split(place.path)), path)
            self._put_directory(place.path, None)

    def chmod(self, path: str, permissions: int) -> None:
        path = normalize(path)
        if not 0 <= permissions <= 0o777:
            raise ValueError(f"the permissions {permissions:#o} are not between 0 and 0o777")
        with self.lock:
            where, status = self.existing(path, follow=True)
            if where == ROOT:
                raise ValueError("the bits of an isolated workspace's root cannot be changed")
            self._note(where, hides=False)
            if not self.is_mine(where):
                if status.is_directory:
                    self._raise_directory(where, status)
                else:
                    with self.open(where) as stream:
                        self._put_file(where, stream.read(), status.permissions)
            self.layer.chmod(where, permissions)

    def symlink(self, path: str, target: str) -> None:
        path = normalize(path)
        if not target or "\0" in target:
            raise ValueError(f"the link target {target!r} is empty or holds a NUL character")
        with self.lock:
            place = self.locate(path, follow=False)
            if place.status is not None:
                _fail(errno.EEXIST, "something is there already", path)
            self._check_depth(len(split(place.path)), path)
            self._put_link(place.path, target)

    def _writable(self, path: str, mode: WriteMode, create_parents: bool) -> _Place:
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"the mode is {mode!r}; it must be 'create', 'overwrite' or 'append'")
        place = self.locate(path, follow=mode != "create")
        if place.status is not None and place.status.is_directory:
            _fail(errno.EISDIR, "this is a directory; choose a file name below it", path)
        if place.status is not None and mode == "create":
            _fail(errno.EEXIST, "the file exists; write with mode='overwrite' to replace it", path)
        if place.missing > 1 and not create_parents:
            _fail(errno.ENOENT, "the parent directory does not exist; pass create_parents=True", path)
        self._check_depth(len(split(place.path)), path)
        return place

    def _check_depth(self, depth: int, path: str) -> None:
        if depth > MAX_DEPTH:
            _fail(errno.ENAMETOOLONG, f"the tree would be {depth} levels deep; at most {MAX_DEPTH} fit", path)

    def _height(self, path: str, status: FileStat) -> int:
        if not status.is_directory:
            return 0
        below = [
            self._height(join(path, name), self.status(join(path, name)) or status)
            for name, entry in self.entries(path).items()
            if entry.is_directory
        ]
        return 1 + max(below, default=0) if self.entries(path) else 0

    def _parents(self, path: str) -> None:
        """Have the layer hold the directories that lead to a path."""
        above = parent(path)
        if above == ROOT or self.is_mine(above):
            return
        status = self.status(above)
        if status is None:
            self._put_directory(above, None)
        else:
            self._raise_directory(above, status)

    def _raise_directory(self, path: str, status: FileStat) -> None:
        """Bring a directory of the past into the layer; what is in it still shows."""
        self._parents(path)
        self.layer.mkdir(path)
        if self.layer.stat(path).permissions != status.permissions:
            self.layer.chmod(path, status.permissions)

    def _put_directory(self, path: str, permissions: int | None) -> None:
        self._parents(path)
        # It was not there: whatever the past had at the path must not show in it.
        self._note(path, hides=True)
        self.layer.mkdir(path)
        if permissions is not None and self.layer.stat(path).permissions != permissions:
            self.layer.chmod(path, permissions)

    def _put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        self._parents(path)
        self._note(path, hides=False)
        self.layer.write_bytes(path, content)
        if permissions is not None and self.layer.stat(path).permissions != permissions:
            self.layer.chmod(path, permissions)

    def _put_link(self, path: str, target: str) -> None:
        self._parents(path)
        self._note(path, hides=False)
        self.layer.symlink(path, target)

    def _remove(self, path: str) -> None:
        self._note(path, hides=True)
        if self.layer.exists(path):
            self.layer.delete(path, recursive=True)

    def _copy(self, path: str, status: FileStat, to: str) -> None:
        if status.is_link:
            self._put_link(to, status.link_target or "")
        elif status.is_directory:
            self._put_directory(to, status.permissions)
            for name in self.entries(path):
                child = self.status(join(path, name))
                if child is not None:
                    self._copy(join(path, name), child, join(to, name))
        else:
            with self.open(path) as stream:
                self._put_file(to, stream.read(), status.permissions)

    # .. what has changed ..

    def changed_paths(self) -> set[str]:
        """Return every path that may differ from the past."""
        found: set[str] = set()
        for path, note in self.notes.items():
            found.add(path)
            if note.before.kind == "directory" and note.hides:
                found.update(self._past_below(path))
        return found

    def _past_below(self, path: str) -> Iterator[str]:
        for name, entry in self.past.entries(path).items():
            yield join(path, name)
            if entry.is_directory:
                yield from self._past_below(join(path, name))

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
            return (status.link_target or "").encode("utf-8", "surrogateescape")
        with self.past.open(path) as stream:
            return stream.read()


def _fail(number: int, reason: str, path: str) -> NoReturn:
    raise OSError(number, reason, path)


def _refuse_root(canonical: str, path: str, verb: str) -> None:
    if canonical == ROOT:
        raise ValueError(f"the workspace root {path!r} cannot be {verb}; name something below it")


# --- the whole ------------------------------------------------------------------------------------------


class IsolatedFilesystem:
    """A workspace of its own that began at a boundary of another one, on disk.

    `base` is the other workspace, `snapshot` a boundary of its history, and `place` the directory for what
    belongs to this one alone: it is made if it is not there, and found again after a restart. Nothing of
    `base` is ever changed through this object.
    """

    def __init__(
        self,
        base: HostFilesystem,
        snapshot: FilesystemSnapshot,
        place: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._place = Path(place)
        self.snapshot_at_fork = snapshot
        """The boundary of the other workspace at which this one began."""
        (self._place / "layer").mkdir(parents=True, exist_ok=True)
        layer = HostFilesystem(self._place / "layer", store=self._place / "store", clock=clock)
        self._clock = clock
        self._overlay = _Overlay(_Past(base, snapshot), layer)
        self._scratch: HostFilesystem | None = None
        self._stale: set[str] = set()
        """What the scratch tree, if there is one, does not have yet."""
        self._foreign: FilesystemSnapshot | None = None
        """The scratch tree as the layer last knew it, while a foreign call is open."""
        self._foreign_start: FilesystemSnapshot | None = None
        """The scratch tree as it was when that call began."""

    def __repr__(self) -> str:
        return f"<IsolatedFilesystem {str(self._place)!r}>"

    def close(self) -> None:
        """Let go of files. The copy stays where it is."""
        self._overlay.layer.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def discard(self) -> None:
        """Remove everything that belongs to this copy alone."""
        self.close()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _here(self) -> _Overlay | HostFilesystem:
        """Where operations go: to the scratch tree while a foreign call is open, else to the layer."""
        return self._scratch if self._foreign is not None and self._scratch is not None else self._overlay

    @property
    def root(self) -> str:
        """The root as shown to people and tools: the scratch tree if a process can be there, else `/`."""
        return self._scratch.root if self._foreign is not None and self._scratch is not None else "/"

    @property
    def read_only(self) -> bool:
        """False."""
        return False

    @property
    def host_root(self) -> Path | None:
        """The directory where a process can work, during a foreign call; otherwise None."""
        return self._scratch.host_root if self._foreign is not None and self._scratch is not None else None

    # --- reading and changing: see `Filesystem` ---

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all. Line endings are kept as they are."""
        return self._here.read(path, offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        return self._here.read_bytes(path, offset=offset, limit=limit)

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        return self._here.exists(path)

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        return self._here.stat(path)

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        return self._here.list(path)

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted. `**` crosses directories; links are not followed."""
        return self._here.glob(pattern, path=path)

    def grep(
        self,
        pattern: str,
        *,
        path: str = ROOT,
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        return self._here.grep(pattern, path=path, glob=glob, max_matches=max_matches)

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        return self._here.write(path, content, mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""
        return self._here.write_bytes(path, content, mode=mode, create_parents=create_parents)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        self._here.delete(path, recursive=recursive)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory. Outside of foreign calls, what is moved is copied."""
        self._here.move(source, target, overwrite=overwrite)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        self._here.mkdir(path, parents=parents, exist_ok=exist_ok)

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        self._here.chmod(path, permissions)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link, as a process on disk could. The target is checked when it is followed."""
        self._here.symlink(path, target)

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads."""
        return self._here.open_read(path)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed."""
        return self._here.open_write(path, mode=mode, create_parents=create_parents)

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads; line endings are kept as they are."""
        return self._here.open_text(path)

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        return ReadOnlyFilesystem(self)

    # --- boundaries ---

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary. It always covers the whole tree: nobody can change this one past this object."""
        with self._overlay.lock:
            self._absorb()
            return self._overlay.layer.snapshot(tag=tag, scan=scan)

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary of this copy."""
        with self._overlay.lock:
            self._absorb()
            notes = self._overlay.notes
            report = self._overlay.layer.restore(snapshot)
            self._overlay.load_notes()
            touched = set(_own_paths(report.restored))
            # A note that came or went shows or hides what the past has there.
            for path in {*notes, *self._overlay.notes}:
                if notes.get(path) != self._overlay.notes.get(path):
                    touched.update((path, *self._overlay._past_below(path)))
            self._mark(touched)
            if self._foreign is not None:
                self._bring_up()
            return RestoreReport(tuple(sorted(touched)), report.conflicts, report.notes)

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries of this copy, or between one and now."""
        with self._overlay.lock:
            self._absorb()
            return describe(self._pairs(before, after))

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call. A foreign one has the tree written out first."""
        with self._overlay.lock:
            call = self._overlay.layer.begin(call_id, tool_name=tool_name, foreign=False)
            try:
                if foreign:
                    self._begin_foreign()
            except BaseException:
                call.rollback()
                raise
            return _IsolatedCall(self, call)

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open, oldest first: those that a crash left, and this object's own."""
        return self._overlay.layer.unfinished()

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended."""
        with self._overlay.lock:
            report = self._overlay.layer.recover(call_id, committed=committed)
            self._ended(undone=not committed)
            return RestoreReport(_own_paths(report.restored), report.conflicts, report.notes)

    # --- what comes back ---

    def changes(self) -> tuple[ForkChange, ...]:
        """Return what this copy has changed since it began, by path."""
        with self._overlay.lock:
            self._absorb()
            found = []
            for path in sorted(self._overlay.changed_paths()):
                before = self._overlay.before(path)
                after = self._fingerprint(path)
                if before != after:
                    found.append(ForkChange(path, before, after, self))
            return tuple(found)

    def diff_since_fork(self) -> WorkspaceDiff:
        """Show what this copy has changed since it began."""
        with self._overlay.lock:
            return diff_of(self.changes(), self._overlay.content_before)

    # --- inside ---

    def _fingerprint(self, path: str) -> Fingerprint:
        try:
            return fingerprint(self, path)
        except PathEscapeError:
            return NOTHING

    def _pairs(
        self, before: FilesystemSnapshot, after: FilesystemSnapshot | None
    ) -> Iterator[tuple[str, Version | None, Version | None]]:
        """Yield each path that the layer has touched between two boundaries, with what it was and is."""
        layer = self._overlay.layer
        with layer._lock:
            start = layer._position(before)
            if after is None:
                found = layer._differences_now(before, start)
            else:
                end = layer._position(after)
                low, high = min(start, end), max(start, end)
                steps = fold(layer._boundaries()[low + 1 : high + 1], outside=True)
                found = {path: (step.first, step.last) for path, step in steps.items()}
                if start > end:
                    found = {path: (last, first) for path, (first, last) in found.items()}
            sides = [_Side(self._overlay, found, number) for number in (0, 1)]
            touched = {path for path in found if path != NOTES and not is_below(path, NOTES)}
            touched.update(*(side.noted for side in sides))
            for path in sorted(touched):
                yield path, sides[0].version(path), sides[1].version(path)
            for path in sorted(touched):
                hidden = [path in side.noted and side.noted[path].hides for side in sides]
                if hidden[0] != hidden[1]:
                    for below in self._overlay._past_below(path):
                        if below not in touched:
                            yield below, sides[0].version(below), sides[1].version(below)

    # .. the scratch tree ..

    def _begin_foreign(self) -> None:
        if self._scratch is None:
            for left in self._place.glob("scratch-*"):
                shutil.rmtree(left, ignore_errors=True)
            # Under a name of its own: what a process that was cut off still does to an old one is lost there.
            scratch = self._place / f"scratch-{secrets.token_hex(4)}"
            (scratch / "tree").mkdir(parents=True)
            _write_out(self._overlay, scratch / "tree")
            self._scratch = HostFilesystem(scratch / "tree", store=scratch / "store", clock=self._clock)
            self._stale = set()
            self._overlay.changed.clear()
        self._bring_up()
        self._overlay.layer.write(_FOREIGN, "")
        self._foreign = self._foreign_start = self._scratch.snapshot(scan=True)

    def _bring_up(self) -> None:
        """Make the scratch tree what the layer and the past show."""
        assert self._scratch is not None
        self._mark(self._overlay.changed)
        self._overlay.changed.clear()
        changes = [
            ForkChange(path, NOTHING, self._merged(path), _Frozen(self._overlay))
            for path in sorted(self._stale)
        ]
        _mirror(self._scratch, changes)
        self._stale.clear()
        if self._foreign is not None:
            self._foreign = self._scratch.snapshot(scan=True)

    def _merged(self, path: str) -> Fingerprint:
        return fingerprint(_Frozen(self._overlay), path)

    def _absorb(self) -> None:
        """Take what a foreign call has changed in the scratch tree into the layer."""
        if self._foreign is None or self._scratch is None:
            return
        scratch = self._scratch
        differs = scratch.diff(self._foreign).changes
        marks = [ForkChange(each.path, NOTHING, fingerprint(scratch, each.path), scratch) for each in differs]
        _mirror(_Frozen(self._overlay), [each for each in marks if each.path != ROOT])
        self._overlay.changed.clear()
        self._foreign = scratch.snapshot(scan=True)

    def _mark(self, paths: Iterable[str]) -> None:
        if self._scratch is not None:
            self._stale.update(paths)

    def _settle(self) -> None:
        """Take what a foreign call has done into the layer, for good."""
        self._absorb()
        if self._foreign is not None and self._overlay.layer.exists(_FOREIGN):
            self._overlay.layer.delete(_FOREIGN)

    def _ended(self, *, undone: bool) -> tuple[str, ...]:
        """A call is over: the layer is what counts, and the scratch tree follows it.

        Returns what was put back in the scratch tree.
        """
        start, self._foreign, self._foreign_start = self._foreign_start, None, None
        if not undone:
            return ()
        self._overlay.load_notes()
        if start is None or self._scratch is None:
            return ()
        return self._scratch.restore(start).restored


class _IsolatedCall:
    """One tool call's hold on an isolated workspace."""

    def __init__(self, filesystem: IsolatedFilesystem, call: WorkspaceCall) -> None:
        self._filesystem = filesystem
        self._call = call

    @property
    def call_id(self) -> str:
        """The tool call that holds the workspace."""
        return self._call.call_id

    @property
    def base(self) -> FilesystemSnapshot:
        """The boundary before the call."""
        return self._call.base

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call; the call can still be rolled back."""
        with self._filesystem._overlay.lock:
            self._filesystem._settle()
            return self._call.prepare()

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        with self._filesystem._overlay.lock:
            self._filesystem._settle()
            self._call.finish()
            self._filesystem._ended(undone=False)

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        with self._filesystem._overlay.lock:
            is_open = self.call_id in self._filesystem.unfinished()
            report = self._call.rollback()
            undone = self._filesystem._ended(undone=True) if is_open else ()
            return RestoreReport(_own_paths((*report.restored, *undone)), report.conflicts, report.notes)


class _Side:
    """One of the two boundaries of a diff: what the layer, its notes and the past show there."""

    def __init__(self, overlay: _Overlay, found: Mapping[str, tuple[State, State]], number: int) -> None:
        self._overlay = overlay
        self._states = {path: pair[number] for path, pair in found.items()}
        self.noted: dict[str, _Note] = {}
        self._unnoted: set[str] = set()
        objects = overlay.layer._opened().objects
        for path, pair in found.items():
            if not is_below(path, NOTES) or path == _FOREIGN:
                continue
            for state, is_mine in ((pair[number], True), (pair[1 - number], False)):
                if state.kind == "file":
                    raw = json.loads(objects.read_blob(state.oid))
                    if is_mine:
                        self.noted[raw["path"]] = _Note(Fingerprint(*raw["before"]), raw["hides"])
                        break
                    self._unnoted.add(raw["path"])

    def _hides(self, path: str) -> bool:
        while True:
            note = self.noted.get(path)
            if note is None and path not in self._unnoted:
                note = self._overlay.notes.get(path)
            if note is not None and note.hides:
                return True
            if path == ROOT:
                return False
            path = parent(path)

    def version(self, path: str) -> Version | None:
        """Return what is at a path here."""
        layer = self._overlay.layer
        state = self._states.get(path)
        if state is None:
            state = layer._look(path, layer._opened().objects)
        if state.kind != "absent":
            return layer._version(state)
        if self._hides(path):
            return None
        mark = self._overlay.past.fingerprint(path)
        return _version(mark, lambda: self._overlay.content_before(path))


class _Frozen(IsolatedFilesystem):
    """The layer and the past alone, whatever the scratch tree holds: for copying between them."""

    def __init__(self, overlay: _Overlay) -> None:
        self._overlay = overlay
        self._scratch = self._foreign = None


def _own_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave the notes out of a report."""
    return tuple(sorted({each for each in paths if each != NOTES and not is_below(each, NOTES)}))


def _write_out(overlay: _Overlay, target: Path) -> None:
    """Write a whole tree into an empty directory, where a process can work on it.

    Most of it is as it is in the other workspace, so that all of that is copied first, and then whatever is
    not what it should be is written again: what the layer has, what is known to have changed, and what was
    changed while it was copied.
    """
    since_ns = time.time_ns() - RACY_NS
    host = overlay.past._host
    source = host._tree.open_for_listing()
    destination = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        copy_tree(source, destination, skip=host._private)
    except OSError:
        # Somebody changed it under our hands; what is missing is written below.
        pass
    finally:
        os.close(source)
        os.close(destination)
    _correct(overlay, target, ROOT, since_ns)


def _correct(overlay: _Overlay, target: Path, directory: str, since_ns: int) -> None:
    """Make a directory that was copied what it should be."""
    wanted = overlay.entries(directory)
    here = target / directory
    with os.scandir(here) as listing:
        found = {each.name: each for each in listing}
        for name, each in found.items():
            if name not in wanted:
                _clear(target / directory / name, is_directory=each.is_dir(follow_symlinks=False))
    for name, entry in wanted.items():
        path, place = join(directory, name), here / name
        copied = found.get(name)
        if entry.is_directory:
            if copied is None or not copied.is_dir(follow_symlinks=False):
                if copied is not None:
                    _clear(place, is_directory=False)
                place.mkdir()
            _correct(overlay, target, path, since_ns)
            status = overlay.status(path)
            if status is not None and stat.S_IMODE(place.stat().st_mode) & 0o777 != status.permissions:
                place.chmod(status.permissions)
        elif copied is None or not overlay.is_as_found(path, since_ns):
            if copied is not None:
                _clear(place, is_directory=copied.is_dir(follow_symlinks=False))
            _write_one(overlay, path, place)


def _clear(place: Path, *, is_directory: bool) -> None:
    if is_directory:
        shutil.rmtree(place)
    else:
        place.unlink()


def _write_one(overlay: _Overlay, path: str, place: Path) -> None:
    status = overlay.status(path)
    if status is None:
        return
    if status.is_link:
        place.symlink_to(status.link_target or "")
        return
    with overlay.open(path) as stream, place.open("xb") as writing:
        shutil.copyfileobj(stream, writing, CHUNK_BYTES)
    place.chmod(status.permissions)


def _mirror(target: Filesystem, changes: Sequence[ForkChange]) -> None:
    """Make paths of one tree what they are in another, whatever they were."""
    for each in sorted(changes, key=lambda change: change.path.count("/"), reverse=True):
        now = fingerprint(target, each.path)
        if now.kind not in ("absent", each.after.kind):
            target.delete(each.path, recursive=True)
    inward = sorted(changes, key=lambda change: change.path.count("/"))
    for each in inward:
        if fingerprint(target, each.path) == each.after or each.after.kind in ("absent", "other"):
            continue
        if each.after.kind == "directory" and not target.exists(each.path):
            target.mkdir(each.path)
            # What the source has below it comes along, whether it is named or not.
            below = list(_below(each.source, each.path))
            _mirror(
                target,
                [ForkChange(path, NOTHING, fingerprint(each.source, path), each.source) for path in below],
            )
        else:
            _bring(target, each)
    for each in reversed(inward):
        if each.after.kind == "directory" and target.stat(each.path).permissions != each.after.permissions:
            target.chmod(each.path, each.after.permissions)


# --- one door for both kinds ----------------------------------------------------------------------------


class IsolatedMemory(InMemoryFilesystem):
    """A copy of a workspace in memory that knows where it began."""

    def __init__(self, base: InMemoryFilesystem, snapshot: FilesystemSnapshot) -> None:
        super().__init__(
            clock=base._clock,
            max_total_bytes=base._max_total_bytes,
            max_entries=base._max_entries,
            max_snapshots=base._max_snapshots,
        )
        self.snapshot_at_fork = snapshot
        """The boundary of the other workspace at which this one began."""
        self._root = self._held[snapshot.snapshot_id] = base._held_root(snapshot)

    def changes(self) -> tuple[ForkChange, ...]:
        """Return what this copy has changed since it began, by path."""
        then = self.fork(self.snapshot_at_fork)
        found = []
        for each in self.diff(self.snapshot_at_fork).changes:
            before, after = fingerprint(then, each.path), fingerprint(self, each.path)
            if before != after:
                found.append(ForkChange(each.path, before, after, self))
        return tuple(found)

    def diff_since_fork(self) -> WorkspaceDiff:
        """Show what this copy has changed since it began."""
        return self.diff(self.snapshot_at_fork)

    def discard(self) -> None:
        """Do nothing: memory is given back when nobody holds the copy."""


def isolate(
    base: Filesystem,
    *,
    snapshot: FilesystemSnapshot | None = None,
    place: str | os.PathLike[str] | None = None,
) -> IsolatedFilesystem | IsolatedMemory:
    """Make a copy of a workspace that goes its own way from a boundary on; by default, from now.

    A workspace on disk needs a `place` for what the copy will change; the same place, with the same
    boundary, is the same copy again. Raises `UsageError` for a workspace that cannot be copied.
    """
    if isinstance(base, InMemoryFilesystem):
        return IsolatedMemory(base, snapshot or quiet_boundary(base, tag="fork"))
    if isinstance(base, HostFilesystem):
        if place is None:
            raise UsageError("a copy of a workspace on disk needs a place for what it changes")
        return IsolatedFilesystem(base, snapshot or quiet_boundary(base, tag="fork"), place)
    raise UsageError(f"{base!r} cannot be copied: only workspaces in memory and on disk can, not their views")

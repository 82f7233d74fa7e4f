"""The past with a layer over it: a tree that can be changed while what is below it stays.

Theory of operation
-------------------
What the layer has at a path is what is there. Where it has nothing, the past shows through, unless a note on
the path or on one above it hides the past (`treenail.workspace.isolated.notes`).

So a change is made in the layer alone, in three steps: the directories that lead to the path are brought up
into the layer, a note keeps what the past has at the path, and then the layer is changed. A directory that is
brought up still shows what the past has in it; one that is made anew hides it.

Paths are walked here, segment by segment, because a link of the layer may lead to what only the past has, and
the other way round. After the walk a path has no links in it, and every method without `normalize` expects
such a path.
"""

from __future__ import annotations

import builtins
import errno
import io
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO, TextIO

from treenail.errors import PathEscapeError, WorkspaceError
from treenail.workspace.base import (
    MAX_GREP_MATCHES,
    MAX_READ_LINES,
    FileEntry,
    FileStat,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    RestoreReport,
    WriteMode,
    WriteResult,
)
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
from treenail.workspace.lines import check_loadable, check_range, read_lines
from treenail.workspace.memory import MAX_TOTAL_BYTES, WriteStream
from treenail.workspace.paths import MAX_DEPTH, ROOT, encode_content, is_below, join, normalize, parent, split
from treenail.workspace.rooted import MAX_LINKS, fail
from treenail.workspace.search import glob_tree, grep_tree


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a path leads: its one spelling without links, what is there, and how much of it is missing."""

    path: str
    status: FileStat | None
    missing: int = 0


class Overlay:
    """The past with a layer over it. Its operations are those of `Filesystem`."""

    def __init__(self, past: Past, layer: HostFilesystem) -> None:
        self.past = past
        self.layer = layer
        self.lock = threading.RLock()
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

    def _locate(self, path: str, *, follow: bool) -> _Place:
        """Walk a normalised path; links on the way are followed, one at its end if `follow`."""
        pending = list(reversed(split(path)))
        done: builtins.list[str] = []
        here = self.status(ROOT)
        links = 0
        while pending:
            if here is not None and not here.is_directory:
                fail(errno.ENOTDIR, f"{'/'.join(done)!r} is not a directory", path)
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
                    fail(errno.ENOENT, "no such file or directory", path)
                return _Place("/".join((*done, *rest)), None, missing=len(rest))
            if child.is_link and (pending or follow):
                links += 1
                target = child.link_target or ""
                if links > MAX_LINKS:
                    fail(errno.ELOOP, "the links on this path lead in a circle", path)
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

    def _existing(self, path: str, *, follow: bool) -> tuple[str, FileStat]:
        place = self._locate(path, follow=follow)
        if place.status is None:
            fail(errno.ENOENT, "no such file or directory", path)
        return place.path, place.status

    def _file(self, path: str) -> tuple[str, FileStat]:
        where, status = self._existing(path, follow=True)
        if status.is_directory:
            fail(errno.EISDIR, "this is a directory, not a file", path)
        return where, status

    # --- reading: see `Filesystem` ---

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all."""
        path = normalize(path)
        check_range(offset, limit)
        with self.lock:
            where, status = self._file(path)
            check_loadable(path, status.size_bytes)
            stream = self.open(where)
        with stream:
            return read_lines(path, stream.read(), offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        path = normalize(path)
        check_range(offset, limit)
        with self.lock:
            where, status = self._file(path)
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
        """Say whether something is at the path. A dangling link exists."""
        try:
            return self._locate(normalize(path), follow=False).status is not None
        except PathEscapeError:
            raise
        except OSError:
            return False

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        path = normalize(path)
        with self.lock:
            _, found = self._existing(path, follow=False)
        return found if found.path == path else replace(found, path=path)

    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        path = normalize(path)
        with self.lock:
            where, status = self._existing(path, follow=True)
            if not status.is_directory:
                fail(errno.ENOTDIR, "this is not a directory", path)
            found = self.entries(where)
        return [
            FileEntry(name, join(path, name), each.is_file, each.is_directory, each.is_link)
            for name, each in sorted(found.items())
        ]

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted."""
        return glob_tree(self.list, pattern, path=normalize(path))

    def grep(
        self,
        pattern: str,
        *,
        path: str = ROOT,
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        path = normalize(path)
        with self.lock:
            _, status = self._existing(path, follow=True)
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
        """Open a file for streaming reads."""
        with self.lock:
            where, _ = self._file(normalize(path))
            return self.open(where)

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads."""
        return io.TextIOWrapper(self.open_read(path), encoding="utf-8", newline="\n")

    # --- changing: see `Filesystem` ---

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        data = encode_content(path, content)
        return self.write_bytes(path, data, mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""
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
        """Open a file for streaming writes; its content appears when the stream is closed."""
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
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        path = normalize(path)
        with self.lock:
            where, status = self._existing(path, follow=False)
            _refuse_root(where, path, "deleted")
            if status.is_directory and not recursive and self.entries(where):
                fail(errno.ENOTEMPTY, "the directory is not empty; delete it with recursive=True", path)
            self._remove(where)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Copy what is to be moved, and delete it where it was: the past cannot be renamed."""
        source, target = normalize(source), normalize(target)
        with self.lock:
            origin, status = self._existing(source, follow=False)
            goal = self._locate(target, follow=False)
            there = goal.status
            _refuse_root(origin, source, "moved")
            _refuse_root(goal.path, target, "replaced")
            if goal.missing > 1:
                fail(errno.ENOENT, "the directory to move to does not exist; make it first", target)
            if there is not None and not overwrite:
                fail(errno.EEXIST, "something is there already; pass overwrite=True to replace it", target)
            if goal.path == origin:
                return
            if is_below(goal.path, origin):
                fail(errno.EINVAL, f"cannot move the directory {source!r} into itself", target)
            if there is not None and there.is_directory and not status.is_directory:
                fail(errno.EISDIR, "a directory is there; delete it first", target)
            if status.is_directory and there is not None and not there.is_directory:
                fail(errno.ENOTDIR, "a directory cannot replace what is there; delete it first", target)
            if there is not None and there.is_directory and self.entries(goal.path):
                fail(errno.ENOTEMPTY, "the directory to replace is not empty; delete it first", target)
            self._check_depth(
                len(split(goal.path)) + self._height(origin, is_directory=status.is_directory), target
            )
            if there is not None:
                self._remove(goal.path)
            self._copy(origin, status, goal.path)
            self._remove(origin)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        path = normalize(path)
        with self.lock:
            place = self._locate(path, follow=False)
            there = place.status
            if there is not None and there.is_link:
                there = self._locate(path, follow=True).status or there
            if there is not None:
                if exist_ok and there.is_directory:
                    return
                fail(errno.EEXIST, "something is there already", path)
            if place.missing > 1 and not parents:
                fail(errno.ENOENT, "the parent directory does not exist; pass parents=True to make it", path)
            self._check_depth(len(split(place.path)), path)
            self._put_directory(place.path, None)

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        path = normalize(path)
        if not 0 <= permissions <= 0o777:
            raise ValueError(f"the permissions {permissions:#o} are not between 0 and 0o777")
        with self.lock:
            where, status = self._existing(path, follow=True)
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
        """Make a symbolic link. The target is checked when it is followed."""
        path = normalize(path)
        if not target or "\0" in target:
            raise ValueError(f"the link target {target!r} is empty or holds a NUL character")
        with self.lock:
            place = self._locate(path, follow=False)
            if place.status is not None:
                fail(errno.EEXIST, "something is there already", path)
            self._check_depth(len(split(place.path)), path)
            self._put_link(place.path, target)

    def _writable(self, path: str, mode: WriteMode, create_parents: bool) -> _Place:
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"the mode is {mode!r}; it must be 'create', 'overwrite' or 'append'")
        place = self._locate(path, follow=mode != "create")
        if place.status is not None and place.status.is_directory:
            fail(errno.EISDIR, "this is a directory; choose a file name below it", path)
        if place.status is not None and mode == "create":
            fail(errno.EEXIST, "the file exists; write with mode='overwrite' to replace it", path)
        if place.missing > 1 and not create_parents:
            fail(errno.ENOENT, "the parent directory does not exist; pass create_parents=True", path)
        self._check_depth(len(split(place.path)), path)
        return place

    def _check_depth(self, depth: int, path: str) -> None:
        if depth > MAX_DEPTH:
            fail(errno.ENAMETOOLONG, f"the tree would be {depth} levels deep; at most {MAX_DEPTH} fit", path)

    def _height(self, path: str, *, is_directory: bool) -> int:
        """Say how many levels there are below a path."""
        below = self.entries(path).items() if is_directory else ()
        heights = (1 + self._height(join(path, name), is_directory=each.is_directory) for name, each in below)
        return max(heights, default=0)

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
        set_permissions(self.layer, path, status.permissions)

    def _put_directory(self, path: str, permissions: int | None) -> None:
        self._parents(path)
        # It was not there: whatever the past had at the path must not show in it.
        self._note(path, hides=True)
        self.layer.mkdir(path)
        if permissions is not None:
            set_permissions(self.layer, path, permissions)

    def _put_file(self, path: str, content: bytes, permissions: int | None) -> None:
        self._parents(path)
        self._note(path, hides=False)
        self.layer.write_bytes(path, content)
        if permissions is not None:
            set_permissions(self.layer, path, permissions)

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

    # --- what has changed ---

    def changed_paths(self) -> set[str]:
        """Return every path that may differ from the past."""
        found: set[str] = set()
        for path, note in self.notes.items():
            found.add(path)
            if note.before.kind == "directory" and note.hides:
                found.update(self.past.below(path))
        return found

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


def _refuse_root(canonical: str, path: str, verb: str) -> None:
    if canonical == ROOT:
        raise ValueError(f"the workspace root {path!r} cannot be {verb}; name something below it")

"""A workspace on disk whose every change can be undone.

Theory of operation
-------------------
Three things work together, each with its own theory in its own file:

- `rooted.py` goes to a path without ever leaving the root.
- `journal.py` keeps, before a path is changed, what was there. A call's journal undoes the call; the line
  of boundaries undoes and redoes whole stretches of history.
- `manifest.py` knows the whole tree and finds what a foreign process changed.

The content and the trees of every boundary are git objects in a private store (`objects.py`), one commit
per tool call. Git's index and work tree are never used; the workspace's own `.git` is content like any
other.

**Two speeds.** Writes through this object are journalled, so a boundary costs what was changed and not
what is there: only the trees on the changed paths are written again. The tree of a commit then holds the
paths *known so far*. When a call touches a file for the first time, what was there before is recorded in a
commit of its own, below the call's commit, so that the difference of the call is right. A scan
(`snapshot(scan=True)`, `begin(foreign=True)`) looks at everything, and from then on everything is known.

**What survives a crash.** A SIGKILL between any two system calls leaves either no journal (the call has
not begun or is over) or a journal that `recover` can end either way; ending is repeatable. With
`durable=True` the same holds for a power cut: journal, objects and files are synced in order.

**Whose change is it?** In a plain call, what the journal says. A path that holds neither what was there
before nor what the call wrote was changed by somebody else: it is left alone and reported. In a foreign
call every difference between the two scans belongs to the call.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO

from treenail.clock import Clock, SystemClock, new_id
from treenail.errors import (
    ObjectStoreError,
    PathEscapeError,
    ReadOnlyError,
    SnapshotMismatchError,
    UsageError,
    WorkspaceConflictError,
    WorkspaceError,
)
from treenail.workspace.base import (
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
from treenail.workspace.diffs import MAX_SHOWN_BYTES, Version, describe
from treenail.workspace.history import History, check_line_name, erase_line, lines, sweep
from treenail.workspace.journal import Boundary, BoundaryKind, Journal, JournalKind, PathChange
from treenail.workspace.lines import check_loadable, check_range, read_lines
from treenail.workspace.manifest import (
    ABSENT,
    ANY,
    TEMPORARY_PREFIX,
    TEMPORARY_SUFFIX,
    Exclusions,
    Kind,
    Manifest,
    Scan,
    SnapshotLimits,
    State,
    is_temporary,
    is_within,
    patch_tree,
    same,
    tree_entry,
    write_trees,
)
from treenail.workspace.objects import (
    CHUNK_BYTES,
    MODE_TREE,
    ObjectStore,
    object_id,
)
from treenail.workspace.originals import Originals
from treenail.workspace.paths import MAX_DEPTH, ROOT, encode_content, join, normalize, split
from treenail.workspace.restoring import Outcome, apply, fold
from treenail.workspace.rooted import (
    Place,
    RootedDirectory,
    change_mode,
    copy_tree,
    create_temporary,
    discard,
    dress,
    fail,
    look,
    naming,
    open_directory,
    open_file,
    put_file,
    take_place,
)
from treenail.workspace.search import glob_tree, grep_tree
from treenail.workspace.spool import sync_directory
from treenail.workspace.views import ReadOnlyFilesystem

_logger = logging.getLogger("treenail.workspace")

MAX_NAMED_UNCOVERED = 100
"""How many uncovered paths a snapshot names one by one; the rest are counted."""

_MAX_SUBJECT_CHARS = 200


class HostFilesystem:
    """A directory on disk as a workspace.

    `root` must exist. `store` is the directory of the private store; it is made when first needed. Without
    one, a temporary store is used and removed on `close()`: then nothing outlives the process. `line` names
    this workspace's history in the store, so that several can share one. `exclude` are patterns of paths
    that scans neither capture nor delete (see `Exclusions`); what is written through this object is
    undone wherever it is. `limits` bound a scan. `durable` makes calls survive a power cut, not only the
    end of the process. `_root` is another spelling of `root`.

    All operations may be used from several threads; one writer at a time per workspace is the caller's to
    ensure across processes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        _root: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        line: str = "main",
        read_only: bool = False,
        exclude: Iterable[str] = (),
        limits: SnapshotLimits | None = None,
        durable: bool = False,
        clock: Clock | None = None,
    ) -> None:
        given = root if root is not None else _root
        if given is None:
            raise UsageError("a HostFilesystem needs the directory to work in: HostFilesystem(root)")
        check_line_name(line)
        self._tree = RootedDirectory(os.fspath(given))
        if not os.path.isdir(self._tree.path):
            kind = errno.ENOTDIR if os.path.exists(self._tree.path) else errno.ENOENT
            fail(kind, "the workspace root is not an existing directory; make it first", os.fspath(given))
        self._read_only = read_only
        self._exclusions = Exclusions(exclude)
        self._limits = limits if limits is not None else SnapshotLimits()
        self._durable = durable
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._line_name = line
        self._lock = threading.RLock()
        self._instance = secrets.token_hex(8)
        self._serial = 0
        self._call: _HostCall | None = None
        self._last_base: FilesystemSnapshot | None = None
        """Where the last call began: also where the next one does, if nothing has changed."""
        self._ambient: Journal | None = None
        self._history: History | None = None
        self._originals: Originals | None = None
        self._cleanup: Callable[[], object] | None = None
        self._store_path = None if store is None else os.path.realpath(os.fspath(store))
        self._private = self._private_paths()
        if self._store_path is not None and os.path.exists(os.path.join(self._store_path, "HEAD")):
            self._attach()

    def __repr__(self) -> str:
        return f"<HostFilesystem {self._tree.path!r}{', read-only' if self._read_only else ''}>"

    def __enter__(self) -> HostFilesystem:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files, and remove the store if it is a temporary one. A call that is open stays open."""
        with self._lock:
            if self._ambient is not None:
                self._ambient.close()
            if self._call is not None:
                self._call.journal.close()
            if self._history is not None:
                if self._cleanup is None and not self._read_only:
                    try:
                        self.pack()
                    except (OSError, ObjectStoreError) as error:
                        # Nothing is lost: what is not packed is found in the spool by whoever comes next.
                        _logger.warning("%s could not be packed: %s", self._store_path, error)
                self._history.close()
            if self._originals is not None:
                self._originals.clear()
            self._ambient = self._call = self._history = self._originals = None
            if self._cleanup is not None:
                self._cleanup()
                self._cleanup = None
                self._store_path = None

    @property
    def root(self) -> str:
        """The directory on disk, as an absolute path."""
        return self._tree.path

    @property
    def read_only(self) -> bool:
        """Whether every changing operation is refused with `ReadOnlyError`."""
        return self._read_only

    @property
    def host_root(self) -> Path | None:
        """The directory where a process can work, or None if this filesystem is read-only."""
        return None if self._read_only else Path(self._tree.path)

    @property
    def store_path(self) -> Path | None:
        """The private store, a bare git repository, or None if none was needed yet."""
        return None if self._store_path is None else Path(self._store_path)

    def pack(self) -> Path | None:
        """Let git see the history up to the newest boundary, and return the store.

        That happens by itself from time to time and when this object is closed; in between, git's view may
        be some boundaries old. Nothing else depends on it.
        """
        with self._lock:
            if self._history is not None and not self._read_only:
                with self._history.held():
                    self._history.pack()
            return self.store_path

    # --- reading -----------------------------------------------------------------------------------

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all. Line endings are kept as they are."""
        path = normalize(path)
        check_range(offset, limit)
        with self._open(path) as stream:
            check_loadable(path, os.fstat(stream.fileno()).st_size)
            return read_lines(path, stream.read(), offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        path = normalize(path)
        check_range(offset, limit)
        with self._open(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            end = size if limit == -1 else min(size, offset + limit)
            wanted = max(0, end - offset)
            check_loadable(path, wanted)
            stream.seek(offset)
            content = stream.read(wanted)
        return ReadBytesResult(
            content=content,
            path=path,
            size_bytes=size,
            offset=offset,
            limit=limit,
            truncated=offset + len(content) < size,
        )

    def exists(self, path: str) -> bool:
        """Say whether something is at the path. A dangling link exists."""
        try:
            with self._walk(normalize(path), follow=False) as place:
                return place.lstat() is not None
        except PathEscapeError:
            raise
        except OSError:  # a file in the way, or links in a circle: nothing can be there
            return False

    def stat(self, path: str) -> FileStat:
        """Describe what is at the path, without following a link at its end."""
        path = normalize(path)
        with self._walk(path, follow=False) as place, naming(path):
            status = _existing(place, path)
            is_link = stat.S_ISLNK(status.st_mode)
            is_directory = stat.S_ISDIR(status.st_mode)
            return FileStat(
                path=path,
                is_file=stat.S_ISREG(status.st_mode),
                is_directory=is_directory,
                size_bytes=0 if is_directory else status.st_size,
                is_link=is_link,
                link_target=os.readlink(place.name, dir_fd=place.descriptor) if is_link else None,
                permissions=status.st_mode & 0o777,
                modified_at=datetime.fromtimestamp(status.st_mtime, UTC),
            )

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """List a directory, sorted by name."""
        path = normalize(path)
        with self._walk(path, follow=True) as place:
            _existing(place, path)
            hidden = self._private.get("" if place.path == ROOT else place.path, frozenset())
            descriptor = open_directory(place, path)
            try:
                with os.scandir(descriptor) as listing:
                    entries = [
                        FileEntry(
                            name=item.name,
                            path=join(path, item.name),
                            is_file=item.is_file(follow_symlinks=False),
                            is_directory=item.is_dir(follow_symlinks=False),
                            is_link=item.is_symlink(),
                        )
                        for item in listing
                        if item.name not in hidden and not is_temporary(item.name)
                    ]
            finally:
                os.close(descriptor)
        entries.sort(key=lambda entry: entry.name)
        return entries

    def glob(self, pattern: str, *, path: str = ".") -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted. `**` crosses directories; links are not followed."""
        return glob_tree(self.list, pattern, path=normalize(path))

    def grep(
        self,
        pattern: str,
        *,
        path: str = ".",
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        path = normalize(path)
        with self._walk(path, follow=True) as place:
            is_file = stat.S_ISREG(_existing(place, path).st_mode)
        return grep_tree(
            self.list,
            self.open_read,
            pattern,
            path=path,
            is_file=is_file,
            glob=glob,
            max_matches=max_matches,
        )

    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads; a later write does not disturb the stream."""
        return self._open(normalize(path))

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads; line endings are kept as they are."""
        return io.TextIOWrapper(self._open(normalize(path)), encoding="utf-8", newline="\n")

    def read_only_view(self) -> Filesystem:
        """Return a view of the same tree that cannot change it."""
        return ReadOnlyFilesystem(self)

    def _open(self, path: str) -> io.BufferedReader:
        with self._walk(path, follow=True) as place:
            return open(open_file(place, path), "rb")

    def _walk(self, path: str, *, follow: bool) -> Place:
        place = self._tree.walk(path, follow=follow)
        if self._private and self._is_private(join(place.path, "/".join(place.rest) or ROOT)):
            place.__exit__()
            raise PathEscapeError(
                f"the path {path!r} is in Treenail's own store, which is not part of the workspace"
            )
        return place

    # --- changing ----------------------------------------------------------------------------------

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        data = encode_content(path, content)
        return self.write_bytes(path, data, mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part.

        The file is replaced, not written into: another hard link to it keeps the old content.
        """
        path = normalize(path)
        with self._lock, self._destination(path, mode, create_parents) as (place, status):
            if mode == "append" and status is not None:
                with _Draft(self, place, path, status) as draft:
                    draft.copy_from(open_file(place, path))
                    draft.write(content)
                    draft.publish()
            else:
                journal = self._journal()
                original: State | None = None
                if journal is not None:
                    is_first = journal.last_state(place.path) is None
                    before = self._before(journal, place)
                    permissions = ANY if status is None else stat.S_IMODE(status.st_mode)
                    after = State("file", permissions, object_id("blob", content), len(content))
                    self._intend(journal, [PathChange(place.path, before, after)])
                    original = before if is_first else None
                with naming(path), self._keeping(place, original, status):
                    temporary = self._temporary(journal)
                    put_file(place, temporary, (content,), like=status, sync=self._durable)
        return WriteResult(path=path, bytes_written=len(content), mode=mode)

    def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> BinaryIO:
        """Open a file for streaming writes; its content appears when the stream is closed.

        A stream that is left by an exception, or never closed, changes nothing. One that was opened
        in a tool call cannot be closed after it: the call has ended, and would be changed afterwards.
        """
        path = normalize(path)
        with self._lock:
            with self._destination(path, mode, create_parents) as (place, status):
                # The draft outlives this block, so it gets a descriptor of its own.
                kept = Place(os.dup(place.descriptor), place.name, place.path)
            draft = _Draft(self, kept, path, status)
            try:
                draft.open()
                if mode == "append" and status is not None:
                    draft.copy_from(open_file(kept, path))
            except BaseException:
                draft.discard()
                raise
        return _WriteStream(draft)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or a link, or a directory (with its content if `recursive`)."""
        path = normalize(path)
        with self._lock, self._walk(path, follow=False) as place, naming(path):
            self._require_writable()
            self._refuse_root(place, path, "deleted")
            _existing(place, path)
            self._refuse_holding_store(place.path, path)
            journal = self._journal()
            found = self._collect(place, journal, recursive=recursive)
            if journal is not None:
                self._intend(
                    journal,
                    [PathChange(name, before, ABSENT) for name, before in found if before is not None],
                )
            for name, before in found:
                with self._tree.strict(name) as item:
                    if before is not None and before.kind == "directory":
                        os.rmdir(item.name, dir_fd=item.descriptor)
                    else:
                        os.unlink(item.name, dir_fd=item.descriptor)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, a link or a directory, with the rules of POSIX `rename` about what may replace what.

        The target's directory must exist. What is at the target is replaced only if `overwrite`.
        """
        source, target = normalize(source), normalize(target)
        with self._lock, self._walk(source, follow=False) as origin, self._walk(target, follow=False) as goal:
            self._require_writable()
            self._refuse_root(origin, source, "moved")
            self._refuse_root(goal, target, "replaced")
            with naming(source):
                moved = _existing(origin, source)
                self._refuse_holding_store(origin.path, source)
            with naming(target):
                there = goal.lstat()
                if goal.rest:
                    fail(errno.ENOENT, "the directory to move to does not exist; make it first", target)
                if there is not None and not overwrite:
                    fail(
                        errno.EEXIST, "something is there already; pass overwrite=True to replace it", target
                    )
                if goal.path == origin.path:
                    return
                if goal.path.startswith(origin.path + "/"):
                    fail(errno.EINVAL, f"cannot move the directory {source!r} into itself", target)
                self._check_replaceable(goal, moved, there, target)
            with naming(source):
                self._intend_move(origin, goal)
            with naming(target):
                os.rename(origin.name, goal.name, src_dir_fd=origin.descriptor, dst_dir_fd=goal.descriptor)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory."""
        path = normalize(path)
        with self._lock, self._walk(path, follow=False) as place:
            self._require_writable()
            status = place.lstat()
            if status is not None:
                if stat.S_ISLNK(status.st_mode):
                    # A link to a directory will do as one; a link to anything else is in the way.
                    with self._walk(path, follow=True) as behind:
                        status = behind.lstat() or status
                if exist_ok and stat.S_ISDIR(status.st_mode):
                    return
                fail(errno.EEXIST, "something is there already", path)
            if place.rest and not parents:
                fail(errno.ENOENT, "the parent directory does not exist; pass parents=True to make it", path)
            self._make_directories(place, (place.name, *place.rest), path).__exit__()

    def chmod(self, path: str, permissions: int) -> None:
        """Set the permission bits of a file or directory; a link is followed."""
        path = normalize(path)
        if not 0 <= permissions <= 0o777:
            raise ValueError(f"the permissions {permissions:#o} are not between 0 and 0o777")
        with self._lock, self._walk(path, follow=True) as place, naming(path):
            self._require_writable()
            _existing(place, path)
            journal = self._journal()
            if journal is not None:
                before = self._before(journal, place)
                self._intend(journal, [PathChange(place.path, before, before._replace(mode=permissions))])
            change_mode(place, permissions)

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link. The target is checked when it is followed."""
        path = normalize(path)
        if not target or "\0" in target:
            raise ValueError(f"the link target {target!r} is empty or holds a NUL character")
        with self._lock, self._destination(path, "create", True) as (place, _), naming(path):
            journal = self._journal()
            raw = os.fsencode(target)
            if journal is not None:
                after = State("link", 0o777, object_id("blob", raw), len(raw))
                self._intend(journal, [PathChange(place.path, self._before(journal, place), after)])
            os.symlink(target, place.name, dir_fd=place.descriptor)

    # --- inside: writing ---------------------------------------------------------------------------

    def _require_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyError(f"the workspace {self._tree.path} is read-only; nothing was changed")

    def _refuse_root(self, place: Place, path: str, verb: str) -> None:
        if place.path == ROOT:
            raise ValueError(f"the workspace root {path!r} cannot be {verb}; name something below it")

    def _refuse_holding_store(self, canonical: str, path: str) -> None:
        if any(is_within(directory, {canonical: ""}) for directory in self._private):
            fail(errno.EACCES, "the directory holds Treenail's own store and stays where it is", path)

    @staticmethod
    def _check_replaceable(
        goal: Place, moved: os.stat_result, there: os.stat_result | None, target: str
    ) -> None:
        if there is None:
            return
        from_directory, to_directory = stat.S_ISDIR(moved.st_mode), stat.S_ISDIR(there.st_mode)
        if to_directory and not from_directory:
            fail(errno.EISDIR, "a directory is there; delete it first", target)
        if from_directory and not to_directory:
            fail(errno.ENOTDIR, "a directory cannot replace what is there; delete it first", target)
        if to_directory:
            descriptor = open_directory(goal, target)
            try:
                if os.listdir(descriptor):
                    fail(errno.ENOTEMPTY, "the directory to replace is not empty; delete it first", target)
            finally:
                os.close(descriptor)

    @contextmanager
    def _destination(
        self, path: str, mode: WriteMode, create_parents: bool
    ) -> Iterator[tuple[Place, os.stat_result | None]]:
        """Yield where a file will be put, its parents made, and what is there now."""
        self._require_writable()
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"the mode is {mode!r}; it must be 'create', 'overwrite' or 'append'")
        # A new file must not appear at the end of a link: `create` looks at the link itself.
        place = self._walk(path, follow=mode != "create")
        try:
            with naming(path):
                if is_temporary(place.rest[-1] if place.rest else place.name):
                    raise ValueError(
                        f"names like {TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX} are reserved for files that are "
                        f"being written; choose another name than {path!r}"
                    )
                if place.rest:
                    if not create_parents:
                        fail(
                            errno.ENOENT,
                            "the parent directory does not exist; pass create_parents=True",
                            path,
                        )
                    *parents, name = (place.name, *place.rest)
                    inner = self._make_directories(place, parents, path)
                    place.__exit__()
                    place = Place(inner.descriptor, name, join(inner.path, name))
                status = place.lstat()
                if status is not None:
                    if stat.S_ISDIR(status.st_mode):
                        fail(errno.EISDIR, "this is a directory; choose a file name below it", path)
                    if mode == "create":
                        fail(errno.EEXIST, "the file exists; write with mode='overwrite' to replace it", path)
                    if not stat.S_ISREG(status.st_mode):
                        fail(errno.EACCES, "this is not a regular file; devices and pipes are refused", path)
            yield place, status
        finally:
            place.__exit__()

    def _make_directories(self, place: Place, names: Sequence[str], path: str) -> Place:
        """Make nested directories from a place on; return the innermost as an open place."""
        if len(split(place.path)) + len(names) > MAX_DEPTH + 1:
            fail(errno.ENAMETOOLONG, f"the tree would be more than {MAX_DEPTH} levels deep", path)
        parent = "/".join(split(place.path)[:-1]) or ROOT
        journal = self._journal()
        full, changes = parent, []
        for name in names:
            full = join(full, name)
            changes.append(PathChange(full, ABSENT, State("directory")))
        if journal is not None:
            self._intend(journal, changes)
        descriptor = os.dup(place.descriptor)
        try:
            with naming(path):
                for name in names:
                    try:
                        os.mkdir(name, dir_fd=descriptor)
                    except FileExistsError:
                        # Somebody else made it a moment ago; a link in its place is refused below.
                        pass
                    below = os.open(
                        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor
                    )
                    os.close(descriptor)
                    descriptor = below
        except BaseException:
            os.close(descriptor)
            raise
        return Place(descriptor, ROOT, full)

    def _before(self, journal: Journal, place: Place) -> State:
        """Return what is at a place before it is changed; at the first change its content is kept."""
        last = journal.last_state(place.path)
        if last is not None and last.kind == _kind(place.lstat()):
            return last
        # Not touched yet, or an intended change failed: look, and keep what is there.
        state = look(place, self._opened().objects)
        if state.kind == "other":
            fail(
                errno.EACCES,
                "this is neither a file nor a directory nor a link, and cannot be kept",
                place.path,
            )
        return state

    def _intend(self, journal: Journal, changes: Iterable[PathChange]) -> None:
        """Write down what is about to be changed, with what was there."""
        journal.intend(changes, self._opened().objects.staged)

    @contextmanager
    def _keeping(self, place: Place, original: State | None, status: os.stat_result | None) -> Iterator[None]:
        """Keep the very file that is replaced in the block, so that it can be put back."""
        originals = self._originals
        if originals is None or original is None or status is None:
            yield
            return
        originals.keep(place, original, status)
        try:
            yield
        except BaseException:
            originals.drop(place, original)
            raise

    def _collect(
        self, place: Place, journal: Journal | None, *, recursive: bool
    ) -> builtins.list[tuple[str, State | None]]:
        """Return everything at and below a place, deepest first, with its state (kept, if journalled)."""
        if journal is not None:
            state = self._before(journal, place)
        else:
            status = place.lstat()
            is_directory = status is not None and stat.S_ISDIR(status.st_mode)
            state = State("directory" if is_directory else "file")
        found: builtins.list[tuple[str, State | None]] = []
        if state.kind == "directory":
            descriptor = open_directory(place, place.path)
            try:
                names = sorted(os.listdir(descriptor))
                if names and not recursive:
                    fail(
                        errno.ENOTEMPTY,
                        "the directory is not empty; delete it with recursive=True",
                        place.path,
                    )
                for name in names:
                    child = Place(descriptor, name, join(place.path, name))
                    if is_temporary(name):
                        found.append((child.path, None))
                    else:
                        found += self._collect(child, journal, recursive=True)
            finally:
                os.close(descriptor)
        found.append((place.path, state))
        return found

    def _intend_move(self, origin: Place, goal: Place) -> None:
        journal = self._journal()
        if journal is None:
            return
        changes: builtins.list[PathChange] = []
        replaced = self._before(journal, goal)
        for path, before in self._collect(origin, journal, recursive=True):
            if before is None:
                continue
            there = goal.path + path[len(origin.path) :]
            changes.append(PathChange(path, before, ABSENT))
            changes.append(PathChange(there, replaced if there == goal.path else ABSENT, before))
        self._intend(journal, changes)

    def _temporary(self, journal: Journal | None) -> str:
        """Return a name for a file that is being written; `recover` knows it by the journal's id."""
        self._serial += 1
        owner = self._instance if journal is None else journal.id
        return f"{TEMPORARY_PREFIX}{owner}-{self._serial:x}{TEMPORARY_SUFFIX}"

    def _journal(self) -> Journal | None:
        """Return the journal that a change belongs to.

        That is the open call's, or else the one that collects changes since the last boundary. Before
        the first boundary there is nothing to go back to, and nothing is kept.
        """
        if self._call is not None:
            return self._call.journal
        history = self._history
        head = None if history is None else history.line.head
        if self._ambient is None and history is not None and head is not None:
            self._ambient = Journal.create(
                history.ambient_path,
                id=secrets.token_hex(8),
                kind="ambient",
                call_id="",
                tool_name="",
                base=head.commit,
                foreign=False,
                durable=self._durable,
            )
        return self._ambient

    # --- boundaries --------------------------------------------------------------------------------

    def snapshot(self, *, tag: str | None = None, scan: bool = False) -> FilesystemSnapshot:
        """Take a boundary. With `scan`, it covers changes made past this object, too."""
        with self._lock:
            self._require_writable()
            history = self._opened()
            with history.held():
                if self._call is not None:
                    return self._inner_snapshot(self._call, tag, scan=scan)
                self._flush_ambient()
                manifest = self._scan_boundary() if scan else None
                return self._snapshot_at(self._head(), tag, manifest)

    def restore(self, snapshot: FilesystemSnapshot) -> RestoreReport:
        """Go back to a boundary, forward ones included. A `scanned` one brings the whole tree back.

        Raises `SnapshotMismatchError` if the boundary is not in this workspace's history, and
        `WorkspaceConflictError` before anything is changed if somebody else's edits are in the way of a
        restore that is not scanned.
        """
        with self._lock:
            self._require_writable()
            self._position(snapshot)
            history = self._opened()
            with history.held():
                fresh: dict[str, State] = {}
                if self._call is not None:
                    self._inner_snapshot(self._call, None, scan=snapshot.scanned)
                else:
                    fresh = self._flush_ambient()
                    if snapshot.scanned:
                        self._scan_boundary()
                plan, current, notes = self._way_back(snapshot, fresh)
                if not plan:
                    return RestoreReport(notes=tuple(notes))
                if self._call is not None:
                    journal = self._call.journal
                    self._intend_plan(journal, plan, current)
                    outcome = self._apply(plan, current, journal.id)
                else:
                    outcome = self._apply_as_restore(snapshot, plan, current)
        return outcome.report(notes)

    def diff(self, before: FilesystemSnapshot, after: FilesystemSnapshot | None = None) -> WorkspaceDiff:
        """Say what differs between two boundaries, or between one and now."""
        with self._lock:
            start = self._position(before)
            if after is not None:
                end = self._position(after)
                low, high = min(start, end), max(start, end)
                pairs = fold(self._boundaries()[low + 1 : high + 1], outside=before.scanned or after.scanned)
                found = {path: (step.first, step.last) for path, step in pairs.items()}
                if start > end:
                    found = {path: (last, first) for path, (first, last) in found.items()}
            else:
                found = self._differences_now(before, start)
            return describe(
                (path, self._version(first), self._version(last)) for path, (first, last) in found.items()
            )

    def begin(self, call_id: str, *, tool_name: str = "", foreign: bool = False) -> WorkspaceCall:
        """Hold the workspace for one tool call.

        Raises `WorkspaceError` while another call holds it, or one that a crash left open is not recovered.
        """
        if not call_id:
            raise UsageError("a call needs an id; pass the tool call's own")
        with self._lock:
            if self._read_only:
                self._require_writable()
            if self._call is not None:
                raise WorkspaceError(
                    f"the call {self._call.call_id!r} holds the workspace, so {call_id!r} cannot begin; "
                    f"finish it or roll it back first"
                )
            history = self._history or self._opened()
            left = Journal.load(history.call_path, durable=self._durable)
            if left is not None and left.kind == "call":
                raise WorkspaceError(
                    f"the call {left.call_id!r} was left open by a crash, so {call_id!r} cannot begin; "
                    f"recover({left.call_id!r}, committed=...) first"
                )
            history.hold()
            try:
                if self._ambient is not None:
                    self._flush_ambient()
                manifest = self._scan_boundary() if foreign else None
                head = history.line.head or self._head()
                tag = tool_name or None
                base = self._last_base
                if base is None or foreign or base.commit_ref != head.commit or base.tag != tag:
                    base = self._snapshot_at(head, tag, manifest)
                    self._last_base = None if foreign else base
                journal = self._start_journal("call", call_id, base, foreign=True) if foreign else None
            except BaseException:
                history.release()
                raise
            self._call = _HostCall(self, call_id, base, journal)
            return self._call

    def unfinished(self) -> Sequence[str]:
        """List the calls that are open, oldest first: those that a crash left, and this object's own."""
        with self._lock:
            journal = self._open_journal()
            return [] if journal is None or journal.kind != "call" else [journal.call_id]

    def recover(self, call_id: str, *, committed: bool) -> RestoreReport:
        """End a call that a crash left open, the way the log says it ended.

        A call that is already over needs nothing and says so in the report's notes: recovering may itself be
        cut off by a crash, and is then repeated.
        """
        with self._lock:
            self._require_writable()
            call = self._call
            if call is None:
                journal = self._open_journal()
                if journal is not None and journal.call_id == call_id:
                    call = self._adopt(journal)
            if call is None or call.call_id != call_id:
                return RestoreReport(
                    notes=(f"the call {call_id!r} is not open here; there was nothing to do",)
                )
            if committed:
                call.finish()
                return RestoreReport()
            return call.rollback()

    def fork(
        self,
        snapshot: FilesystemSnapshot,
        into: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        line: str | None = None,
    ) -> HostFilesystem:
        """Make a workspace of its own, in a new directory, that begins at a boundary of this one.

        `into` must not exist yet, or be an empty directory; it appears complete or not at all. With a
        `line`, the fork shares this store and its history begins at the boundary; with a `store` it has
        that one; with neither, a temporary one. Files that are outside of what was kept (excluded ones,
        those of an unscanned boundary that nobody touched) are copied as they are now; pipes, sockets and
        devices are left out.
        """
        if line is not None:
            check_line_name(line)
        with self._lock:
            self._require_writable()
            if self._call is not None:
                raise WorkspaceError(
                    f"the call {self._call.call_id!r} holds the workspace; fork it when the call is over"
                )
            self._position(snapshot)
            history = self._opened()
            shares = line is not None and store is None
            if shares and line in lines(history.store_path):
                raise UsageError(f"there is a line {line!r} in the store already; choose another name")
            with history.held():
                self._flush_ambient()
                if snapshot.scanned:
                    self._scan_boundary()
                plan, current, _ = self._way_back(snapshot, {}, strict=False)
                target = self._copy_into(os.path.realpath(os.fspath(into)), plan, current)
                if shares and line is not None:
                    # The other line's objects are looked for in packs, not in this one's spool.
                    history.pack()
                    History(history.store_path, line, durable=self._durable).append(
                        Boundary("open", snapshot.commit_ref)
                    )
            return HostFilesystem(
                target,
                store=history.store_path if shares else store,
                line=line if line is not None else "main",
                exclude=self._exclusions.patterns,
                limits=self._limits,
                durable=self._durable,
                clock=self._clock,
            )

    def erase_line(self, line: str | None = None) -> int:
        """Erase a line (this workspace's own, if none is named) with what no other line needs.

        Returns how many objects went. The files of the workspace stay.
        """
        with self._lock:
            if self._history is None:
                return 0
            store = self._history.store_path
            if line in (None, self._line_name):
                self._detach()
            removed = erase_line(store, self._line_name if line is None else line)
            if self._history is not None:
                self._history.objects.forget()
            return removed

    def sweep(self, keep_lines: Iterable[str] | None = None) -> int:
        """Remove the objects of this store that no line needs; with `keep_lines`, erase the others first."""
        with self._lock:
            if self._history is None:
                return 0
            store = self._history.store_path
            kept = None if keep_lines is None else list(keep_lines)
            if kept is not None and self._line_name not in kept:
                self._detach()
            removed = sweep(store, kept)
            if self._history is not None:
                self._history.objects.forget()
            return removed

    def _detach(self) -> None:
        if self._call is not None:
            raise WorkspaceError(
                f"the call {self._call.call_id!r} is open; end it before erasing its history"
            )
        if self._ambient is not None:
            self._ambient.close()
        if self._history is not None:
            self._history.close()
        self._ambient = self._history = self._originals = None

    def _copy_into(self, target: str, plan: Mapping[str, State], current: Mapping[str, State]) -> str:
        """Copy the tree beside a target, bring the copy to a plan's goals, and move it into place."""
        inside = os.path.commonpath((target, self._tree.path))
        if inside in (target, self._tree.path):
            raise UsageError(f"the fork {target} and the workspace {self._tree.path} would hold one another")
        beside = os.path.join(os.path.dirname(target), f"{TEMPORARY_PREFIX}{new_id().hex}{TEMPORARY_SUFFIX}")
        os.mkdir(beside, 0o700)
        try:
            source = self._tree.open_for_listing()
            copy = RootedDirectory(beside)
            destination = copy.open_for_listing()
            try:
                copy_tree(source, destination, skip=self._private)
            finally:
                os.close(source)
                os.close(destination)
            history = self._opened()
            apply(copy, history.objects, plan, current, self._instance, Outcome(), sync=self._durable)
            os.chmod(beside, stat.S_IMODE(os.stat(self._tree.path).st_mode))
            # Onto an empty directory or onto nothing; anything else is refused.
            os.rename(beside, target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return target

    # --- inside: the store ---------------------------------------------------------------------------

    def _private_paths(self) -> dict[str, frozenset[str]]:
        """Return the store's place in the workspace, if it is in there: directory to hidden names."""
        if self._store_path is None:
            return {}
        relative = os.path.relpath(self._store_path, self._tree.path)
        if relative == ROOT or self._tree.path.startswith(self._store_path + "/"):
            raise UsageError(
                f"the store {self._store_path} holds the workspace {self._tree.path}; "
                f"put it beside the workspace, or into a directory of its own below it"
            )
        if relative.startswith("../"):
            return {}
        directory, _, name = relative.rpartition("/")
        return {directory: frozenset((name,))}

    def _is_private(self, path: str) -> bool:
        return any(
            is_within(path, {f"{directory}/{name}" if directory else name: ""})
            for directory, names in self._private.items()
            for name in names
        )

    def _opened(self) -> History:
        """Return the store, made if need be."""
        if self._history is None:
            if self._store_path is None:
                self._store_path = os.path.realpath(tempfile.mkdtemp(prefix="treenail-workspace-"))
                self._private = self._private_paths()
                self._cleanup = weakref.finalize(self, _remove_store, self._store_path, os.getpid())
            self._attach()
        assert self._history is not None
        return self._history

    def _attach(self) -> None:
        """Open the store, and clear up what a crash left that is not a call."""
        assert self._store_path is not None
        self._history = History(self._store_path, self._line_name, durable=self._durable)
        if self._read_only:
            return
        if not self._durable:
            # With a power cut in mind a file that is put back is written and synced, not renamed.
            self._originals = Originals(self._history.originals_path, self._instance)
            self._originals.clear()
        ambient = self._history.load_ambient()
        self._ambient = ambient
        journal = self._open_journal()
        if journal is not None and journal.kind == "restore":
            call = self._adopt(journal)
            if journal.prepared:
                call.finish()
            else:
                call.rollback()

    def _open_journal(self) -> Journal | None:
        """Return the journal of the call that is open here or that a crash left, if any."""
        if self._call is not None:
            return self._call.journal
        history = self._history
        return None if history is None else Journal.load(history.call_path, durable=self._durable)

    def _adopt(self, journal: Journal) -> _HostCall:
        """Take over a call that a crash left."""
        history = self._opened()
        history.hold()
        history.stage(journal)
        base = history.line.position(journal.base)
        boundary = history.line.boundaries[base] if base is not None else self._head()
        base_snapshot = self._snapshot_at(boundary, journal.tool_name or None, None)
        self._call = _HostCall(self, journal.call_id, base_snapshot, journal)
        return self._call

    def _start_journal(
        self, kind: JournalKind, call_id: str, base: FilesystemSnapshot, *, foreign: bool
    ) -> Journal:
        """Start the journal of what begins at a boundary; the boundary's tag is the tool's name."""
        history = self._opened()
        return Journal.create(
            history.call_path,
            id=new_id().hex[:16],
            kind=kind,
            call_id=call_id,
            tool_name=base.tag or "",
            base=base.commit_ref,
            foreign=foreign,
            durable=self._durable,
        )

    # --- inside: boundaries --------------------------------------------------------------------------

    def _head(self) -> Boundary:
        """Return the newest boundary; a line that has none gets its first, where nothing is known yet."""
        history = self._opened()
        head = history.line.head
        if head is None:
            objects = history.objects
            tree = objects.write_tree({})
            commit = objects.write_commit(tree, (), f"Workspace {self._tree.path}", timestamp=self._now())
            objects.flush()
            head = Boundary("open", commit.hex())
            history.append(head)
        return head

    def _boundaries(self) -> builtins.list[Boundary]:
        """Return the whole history, with the boundaries taken inside an open call at its end."""
        history = self._history
        if history is None:
            return []
        if self._call is None:
            return history.line.boundaries
        return [*history.line.boundaries, *self._call.journal.segments]

    def _last_commit(self) -> str:
        if self._call is not None and self._call.journal.segments:
            return self._call.journal.segments[-1].commit
        return self._head().commit

    def _position(self, snapshot: FilesystemSnapshot) -> int:
        history = self._history
        if history is not None:
            position = history.line.position(snapshot.commit_ref)
            if position is not None:
                return position
            if self._call is not None:
                for number, segment in enumerate(self._call.journal.segments):
                    if segment.commit == snapshot.commit_ref:
                        return len(history.line) + number
        raise SnapshotMismatchError(
            f"the snapshot {snapshot.snapshot_id} ({snapshot.root_path}, "
            f"{snapshot.created_at.isoformat()}) is not in the history {self._line_name!r} of this "
            f"workspace: it was taken elsewhere, or inside a call that was rolled back; nothing was changed"
        )

    def _snapshot_at(
        self, boundary: Boundary, tag: str | None, manifest: Manifest | None
    ) -> FilesystemSnapshot:
        return FilesystemSnapshot(
            snapshot_id=new_id(),
            created_at=self._clock.now(),
            commit_ref=boundary.commit,
            root_path=self._tree.path,
            git_dir=self._store_path,
            tag=tag,
            scanned=manifest is not None,
            uncovered=() if manifest is None else _sentences(manifest.uncovered),
        )

    def _inner_snapshot(self, call: _HostCall, tag: str | None, *, scan: bool) -> FilesystemSnapshot:
        """Take a boundary inside a call. It counts when the call does."""
        journal = call.journal
        manifest: Manifest | None = None
        if journal.foreign:
            manifest = self._foreign_segment(call, prepared=False)
        else:
            if journal.touched:
                self._plain_segment(call, self._changes(journal), prepared=False)
            if scan:
                manifest = self._scan_segment(call)
        boundaries = self._boundaries()
        return self._snapshot_at(boundaries[-1] if boundaries else self._head(), tag, manifest)

    def _changes(self, journal: Journal) -> builtins.list[PathChange]:
        """Return what the journal's paths have become since its last boundary; new content is kept."""
        objects = self._opened().objects
        changes: builtins.list[PathChange] = []
        for path, before in journal.first_states(journal.segment_start).items():
            after = self._look(path, objects)
            if not same(before, after):
                changes.append(PathChange(path, before, after))
        if self._durable:
            for directory in {path.rpartition("/")[0] for path, _, _ in changes}:
                try:
                    sync_directory(os.path.join(self._tree.path, directory))
                except (FileNotFoundError, NotADirectoryError):
                    pass
        return changes

    def _look(self, path: str, objects: ObjectStore | None) -> State:
        try:
            with self._tree.strict(path) as place:
                return look(place, objects)
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        except OSError as error:
            if error.errno == errno.ELOOP:
                return ABSENT
            raise

    def _commit(
        self,
        changes: Sequence[PathChange],
        subject: str,
        *,
        parent: str,
        body: str = "",
        seen: Sequence[PathChange] = (),
    ) -> str:
        """Store a commit for changes, and one below it for what was there and not known yet (`seen` too)."""
        objects = self._opened().objects
        tip = bytes.fromhex(parent)
        tree = objects.commit_tree(tip)
        known = patch_tree(
            objects,
            tree,
            [(path, tree_entry(before)) for path, before, _ in changes if path != ROOT]
            + [(path, tree_entry(after)) for path, _, after in seen],
        )
        subject = _one_line(subject)
        if known != tree:
            message = f"Before {subject}: what was there"
            tip = objects.write_commit(known, (tip,), message, timestamp=self._now())
        after_tree = patch_tree(
            objects, known, [(path, tree_entry(after)) for path, _, after in changes if path != ROOT]
        )
        message = f"{subject}\n\n{body}" if body else subject
        commit = objects.write_commit(after_tree, (tip,), message, timestamp=self._now())
        # Everything that the boundary refers to is on disk before anything refers to the boundary.
        objects.flush()
        return commit.hex()

    def _now(self) -> int:
        return max(0, int(self._clock.now().timestamp()))

    def _flush_ambient(self) -> dict[str, State]:
        """Make a boundary of what was written outside of calls since the last one.

        Returns what was found at the paths that changed.
        """
        journal = self._ambient
        if journal is None or not journal.touched:
            return {}
        history = self._opened()
        changes = self._changes(journal)
        if changes:
            commit = self._commit(changes, "Written outside of tool calls", parent=self._head().commit)
            edited = self._edited(journal, changes)
            history.append(Boundary("ambient", commit, tuple(changes), journal.id, edited))
        journal.end()
        self._ambient = None
        return {path: after for path, _, after in changes}

    @staticmethod
    def _edited(journal: Journal, changes: Iterable[PathChange]) -> tuple[str, ...]:
        """Return the changed paths that are not as the journal's call has last made them."""
        found = []
        for path, _, after in changes:
            last = journal.last_state(path)
            if last is not None and not same(last, after):
                found.append(path)
        return tuple(found)

    def _plain_segment(self, call: _HostCall, changes: Sequence[PathChange], *, prepared: bool) -> None:
        journal = call.journal
        edited = self._edited(journal, changes)
        commit = self._call_commit(journal, changes)
        boundary = Boundary(call.boundary_kind, commit, tuple(changes), journal.id, edited)
        journal.mark(boundary, prepared=prepared)

    def _call_commit(
        self, journal: Journal, changes: Sequence[PathChange], seen: Sequence[PathChange] = ()
    ) -> str:
        name = _one_line(journal.tool_name)
        call_id = _one_line(journal.call_id)
        subject = f"{name} ({call_id})" if name else call_id
        body = f"Tool: {name or '-'}\nCall: {call_id}"
        return self._commit(changes, subject, parent=self._last_commit(), body=body, seen=seen)

    # --- inside: scans -------------------------------------------------------------------------------

    def _scan(self, manifest: Manifest, *, keep: bool) -> Scan:
        scan = self._new_scan(manifest, keep=keep)
        descriptor = self._tree.open_for_listing()
        try:
            scan.run(descriptor)
        finally:
            os.close(descriptor)
        return scan

    def _new_scan(self, manifest: Manifest, *, keep: bool) -> Scan:
        return Scan(
            manifest,
            store=self._opened().objects if keep else None,
            exclusions=self._exclusions,
            private=self._private,
            limits=self._limits,
            repair=not keep,
        )

    def _manifest(self) -> Manifest:
        """Return what is known about the tree at the newest boundary."""
        history = self._opened()
        manifest = history.load_manifest()
        if manifest.baseline_missing:
            return manifest
        self._catch_up(manifest, history.line.boundaries, history.dirty)
        return manifest

    def _catch_up(self, manifest: Manifest, boundaries: Sequence[Boundary], dirty: set[str]) -> None:
        """Take in what boundaries say that were made since the manifest was last brought up to date."""
        for boundary in boundaries[manifest.position :]:
            for path, _, after in boundary.changes:
                if path == ROOT:
                    manifest.root_mode = after.mode
                elif not self._exclusions.covers(path, directory=after.kind == "directory"):
                    dirty.add(manifest.learn(path, after))
                    dirty.add(path)
        manifest.position = max(manifest.position, len(boundaries))

    def _scan_boundary(self) -> Manifest:
        """Look at the whole tree and make a boundary of what somebody else changed."""
        history = self._opened()
        head = history.line.head
        try:
            manifest = self._manifest()
            boundary = self._found(manifest, None if head is None else head.commit, history.dirty)
            if boundary is not None:
                history.append(boundary)
                manifest.position = len(history.line)
            history.save_manifest(manifest)
        except BaseException:
            # Knowledge that did not become a boundary does not count: the disk may be full.
            history.forget_manifest()
            raise
        return manifest

    def _scan_segment(self, call: _HostCall) -> Manifest:
        """Do the same inside a plain call, where it counts only when the call does."""
        with call.learning():
            manifest = call.working_manifest(self)
            self._catch_up(manifest, self._boundaries(), call.dirty)
            boundary = self._found(manifest, self._last_commit(), call.dirty)
            if boundary is not None:
                call.journal.mark(boundary, prepared=False)
                manifest.position = len(self._boundaries())
        return manifest

    def _found(self, manifest: Manifest, parent: str | None, dirty: set[str]) -> Boundary | None:
        """Scan, bring the manifest up to date, and return a boundary if anything is worth one."""
        if manifest.baseline_missing:
            return self._baseline(manifest, parent, dirty)
        uncovered = manifest.uncovered
        scan = self._scan(manifest, keep=True)
        changes, seen = self._sort_out(manifest, scan)
        manifest.apply(scan.updates, scan.uncovered)
        manifest.root_mode = scan.root_mode
        dirty.update(scan.updates)
        if not changes and not seen and uncovered == manifest.uncovered:
            return None
        commit = self._commit(
            changes, "Changed outside of tool calls", parent=parent or self._head().commit, seen=seen
        )
        uncovered_now = tuple(manifest.uncovered.items())
        return Boundary("scan", commit, tuple(changes), scanned=True, uncovered=uncovered_now)

    def _baseline(self, manifest: Manifest, parent: str | None, dirty: set[str]) -> Boundary:
        """Look at a tree for the first time: all content goes into one pack."""
        scan = self._new_scan(manifest, keep=True)
        objects = self._opened().objects
        commit = b""

        def conclude() -> None:
            nonlocal commit
            manifest.apply(scan.updates, scan.uncovered)
            tree = write_trees(manifest, objects.write)
            parents = () if parent is None else (bytes.fromhex(parent),)
            message = f"The whole workspace {self._tree.path}, as found"
            commit = objects.write_commit(tree, parents, message, timestamp=self._now())

        descriptor = self._tree.open_for_listing()
        try:
            scan.run(descriptor, conclude)
        finally:
            os.close(descriptor)
        # Everything that the boundary refers to is on disk before anything refers to the boundary.
        objects.flush()
        manifest.root_mode = scan.root_mode
        manifest.baseline_missing = False
        dirty.update(scan.updates)
        return Boundary(
            "scan",
            commit.hex(),
            baseline=True,
            scanned=True,
            uncovered=tuple(manifest.uncovered.items()),
        )

    def _sort_out(
        self, manifest: Manifest, scan: Scan
    ) -> tuple[builtins.list[PathChange], builtins.list[PathChange]]:
        """Part a scan's differences into changes, and what was only seen for the first time."""
        changes: builtins.list[PathChange] = []
        seen: builtins.list[PathChange] = []
        for path, before, after in scan.differences:
            first_sight = before.kind == "absent" and manifest.is_uncovered(path)
            (seen if first_sight else changes).append(PathChange(path, before, after))
        if scan.root_mode != manifest.root_mode:
            changes.append(
                PathChange(ROOT, State("directory", manifest.root_mode), State("directory", scan.root_mode))
            )
        return changes, seen

    def _foreign_segment(self, call: _HostCall, *, prepared: bool) -> Manifest:
        """Make a boundary of everything that a foreign call changed since the last one."""
        journal = call.journal
        with call.learning():
            manifest = call.working_manifest(self)
            scan = self._scan(manifest, keep=True)
            changes, seen = self._sort_out(manifest, scan)
            manifest.apply(scan.updates, scan.uncovered)
            manifest.root_mode = scan.root_mode
            call.dirty.update(scan.updates)
            found = {change.path for change in changes}
            # What was written through this object where scans do not look belongs to the call as well.
            changes += [
                change
                for change in self._changes(journal)
                if change.path not in found and self._is_beyond_scans(manifest, change.path)
            ]
            commit = self._call_commit(journal, changes, seen)
            boundary = Boundary(
                "call",
                commit,
                tuple(changes),
                journal.id,
                scanned=True,
                uncovered=tuple(manifest.uncovered.items()),
            )
            journal.mark(boundary, prepared=prepared)
            manifest.position = len(self._boundaries())
        return manifest

    def _is_beyond_scans(self, manifest: Manifest, path: str) -> bool:
        return manifest.is_uncovered(path) or self._exclusions.covers(path, directory=False)

    # --- inside: going back --------------------------------------------------------------------------

    def _way_back(
        self, snapshot: FilesystemSnapshot, fresh: Mapping[str, State], *, strict: bool = True
    ) -> tuple[dict[str, State], dict[str, State], builtins.list[str]]:
        """Return the goal of each path that differs from a boundary, what is there now, and remarks.

        `fresh` has what was found at paths a moment ago.

        Raises `WorkspaceConflictError` if somebody else's edits are in the way, unless it is not `strict`.
        """
        history = self._opened()
        boundaries = self._boundaries()
        after = boundaries[self._position(snapshot) + 1 :]
        if snapshot.scanned and any(boundary.baseline for boundary in after):
            raise SnapshotMismatchError(
                f"the manifest that belongs to the snapshot {snapshot.snapshot_id} was lost from "
                f"{self._store_path}, so the whole tree cannot be brought back to it; its files are still in "
                f"commit {snapshot.commit_ref[:12]} there"
            )
        steps = fold(after, outside=snapshot.scanned)
        uncovered = self._uncovered_at(snapshot) if snapshot.scanned else {}
        plan: dict[str, State] = {}
        current: dict[str, State] = {}
        conflicts: builtins.list[str] = []
        notes: builtins.list[str] = []
        for path, step in steps.items():
            if is_within(path, uncovered) and not self._is_known(snapshot.commit_ref, path):
                continue
            if snapshot.scanned:
                now = step.last
            else:
                now = fresh[path] if path in fresh else self._look(path, history.objects)
            if same(now, step.first):
                continue
            if step.first.kind == "other":
                notes.append(f"{path} was not kept at that boundary and was left as it is")
                continue
            if not snapshot.scanned and (step.broken or not same(now, step.last)):
                conflicts.append(path)
            plan[path] = step.first
            current[path] = now
        if conflicts and strict:
            raise WorkspaceConflictError(
                f"somebody else changed {', '.join(sorted(conflicts)[:10])}"
                f"{' and more' if len(conflicts) > 10 else ''} since that boundary; nothing was restored: "
                f"put those paths back, or restore a scanned snapshot, which overwrites them",
                paths=sorted(conflicts),
            )
        return plan, current, notes

    def _uncovered_at(self, snapshot: FilesystemSnapshot) -> dict[str, str]:
        """Return what the scan of a boundary could not keep; one that found nothing new left no boundary."""
        for boundary in reversed(self._boundaries()[: self._position(snapshot) + 1]):
            if boundary.scanned:
                return dict(boundary.uncovered)
        return {}

    def _is_known(self, commit: str, path: str) -> bool:
        objects = self._opened().objects
        tree = objects.commit_tree(bytes.fromhex(commit))
        for part in os.fsencode(path).split(b"/"):
            entry = objects.read_tree(tree).get(part) if tree else None
            if entry is None:
                return False
            tree = entry.oid if entry.mode == MODE_TREE else b""
        return True

    def _apply_as_restore(
        self, snapshot: FilesystemSnapshot, plan: Mapping[str, State], current: Mapping[str, State]
    ) -> Outcome:
        """Restore under a journal of its own, so that a crash or an error leaves all or nothing."""
        base = self._snapshot_at(self._head(), "restore", None)
        journal = self._start_journal("restore", f"to {snapshot.commit_ref[:12]}", base, foreign=False)
        call = _HostCall(self, journal.call_id, base, journal)
        self._opened().hold()
        self._call = call
        try:
            self._intend_plan(journal, plan, current)
            outcome = self._apply(plan, current, journal.id)
            missed = set(outcome.conflicts)
            changes = [PathChange(path, current[path], goal) for path, goal in plan.items()]
            self._plain_segment(
                call, [change for change in changes if change.path not in missed], prepared=True
            )
        except BaseException:
            call.rollback()
            raise
        call.finish()
        return outcome

    def _intend_plan(self, journal: Journal, plan: Mapping[str, State], current: Mapping[str, State]) -> None:
        """Write down that paths will be brought to their goals.

        A path on its way there may have the goal's content without its bits and owner, and where a
        directory and something else take turns there is nothing in between.
        """
        changes: builtins.list[PathChange] = []
        for path, goal in plan.items():
            before = current[path]
            if "directory" in (before.kind, goal.kind) and before.kind != goal.kind:
                changes.append(PathChange(path, before, ABSENT))
                before = ABSENT
            changes.append(PathChange(path, before, goal._replace(mode=ANY, uid=ANY, gid=ANY)))
        self._intend(journal, changes)

    def _differences_now(self, before: FilesystemSnapshot, start: int) -> dict[str, tuple[State, State]]:
        history = self._opened()
        boundaries = self._boundaries()[start + 1 :]
        steps = {
            path: (step.first, step.last) for path, step in fold(boundaries, outside=before.scanned).items()
        }
        journal = self._call.journal if self._call is not None else self._ambient
        if journal is not None:
            for path, first in journal.first_states(journal.segment_start).items():
                steps.setdefault(path, (first, ABSENT))
        found = {path: (first, self._look(path, history.objects)) for path, (first, _) in steps.items()}
        if before.scanned:
            manifest = self._call.working_manifest(self) if self._call is not None else self._manifest()
            for path, known, after in self._sort_out(manifest, self._scan(manifest, keep=True))[0]:
                first = steps[path][0] if path in steps else known
                found[path] = (first, after)
        return found

    def _version(self, state: State) -> Version | None:
        if state.kind == "absent":
            return None
        if state.kind == "directory":
            return Version("directory", state.mode & 0o777)
        if state.kind == "other":
            return Version("file", 0, identity=object())
        content = None
        if state.kind == "link" or state.size <= MAX_SHOWN_BYTES:
            content = self._opened().objects.read_blob(state.oid)
        return Version(
            "link" if state.kind == "link" else "file", state.mode & 0o777, state.size, content, state.oid
        )

    def _undo(self, journal: Journal, paths: Iterable[str] | None = None) -> Outcome:
        """Put back what a journal says, where what is there is what the call left."""
        plan: dict[str, State] = {}
        current: dict[str, State] = {}
        outcome = Outcome()
        wanted = None if paths is None else set(paths)
        half_way = journal.undoing
        journal.begin_undo()
        own_states = journal.own_states()
        for path, states in own_states.items():
            if wanted is not None and path not in wanted:
                continue
            now = self._look(path, None)
            if not any(same(now, state) or (half_way and _is_half_way(now, state)) for state in states):
                outcome.conflicts.append(path)
            elif not same(now, states[0]) or now.mtime_ns != states[0].mtime_ns:
                plan[path] = states[0]
                current[path] = now
        self._discard_temporaries(journal, own_states)
        return self._apply(plan, current, journal.id, outcome)

    def _discard_temporaries(self, journal: Journal, paths: Iterable[str]) -> None:
        """Remove half-written files of a call from the directories that it has worked in."""
        prefix = f"{TEMPORARY_PREFIX}{journal.id}-"
        directories = {path.rpartition("/")[0] for path in (*paths, *journal.temporaries)}
        for directory in directories:
            try:
                with self._tree.strict(f"{directory}/{ROOT}" if directory else ROOT) as place:
                    descriptor = open_directory(place, directory)
                    try:
                        names = [name for name in os.listdir(descriptor) if name.startswith(prefix)]
                        for name in names:
                            os.unlink(name, dir_fd=descriptor)
                    finally:
                        os.close(descriptor)
            except (FileNotFoundError, NotADirectoryError):
                continue

    def _undo_foreign(self, call: _HostCall) -> Outcome:
        """Put back every difference between the tree and what it was when a foreign call began."""
        journal = call.journal
        manifest = self._manifest()
        self._restore_root(manifest.root_mode)
        scan = self._scan(manifest, keep=False)
        for path in scan.temporaries:
            if path.rpartition("/")[2].startswith(f"{TEMPORARY_PREFIX}{journal.id}-"):
                with self._tree.strict(path) as place:
                    discard(place, place.name)
        plan: dict[str, State] = {}
        current: dict[str, State] = {}
        for path, before, after in (*scan.differences, *scan.touched):
            plan[path] = before
            current[path] = after
        beyond = [path for path in journal.own_states() if self._is_beyond_scans(manifest, path)]
        outcome = self._undo(journal, [path for path in beyond if path not in plan])
        self._apply(plan, current, journal.id, outcome)
        if scan.root_mode != manifest.root_mode:
            os.chmod(self._tree.path, manifest.root_mode)
        history = self._opened()
        for path in plan:
            entry = manifest.get(path)
            if entry is not None:
                # It is a new file with the old content: the next scan has to look at it.
                history.dirty.add(manifest.learn_again(path, entry))
        return outcome

    def _restore_root(self, mode: int) -> None:
        """Make the root a directory again if a foreign process removed or replaced it."""
        try:
            status = os.lstat(self._tree.path)
        except FileNotFoundError:
            os.makedirs(self._tree.path)
        else:
            if stat.S_ISDIR(status.st_mode):
                return
            os.unlink(self._tree.path)
            os.mkdir(self._tree.path)
        os.chmod(self._tree.path, mode)

    def _apply(
        self,
        plan: Mapping[str, State],
        current: Mapping[str, State],
        owner: str,
        outcome: Outcome | None = None,
    ) -> Outcome:
        """Bring each path to its goal; see `restoring.py`."""
        outcome = Outcome() if outcome is None else outcome
        objects = self._opened().objects
        apply(
            self._tree,
            objects,
            plan,
            current,
            owner,
            outcome,
            sync=self._durable,
            originals=self._originals,
        )
        return outcome


class _HostCall:
    """One tool call's hold on a workspace on disk."""

    __slots__ = ("_filesystem", "_finished", "_journal", "_working", "base", "call_id", "dirty")

    def __init__(
        self, filesystem: HostFilesystem, call_id: str, base: FilesystemSnapshot, journal: Journal | None
    ) -> None:
        self.dirty: set[str] = set()
        self._filesystem = filesystem
        self.call_id = call_id
        """The tool call that holds the workspace."""
        self.base = base
        """The boundary before the call."""
        self._journal = journal
        self._finished = False
        self._working: Manifest | None = None

    @property
    def journal(self) -> Journal:
        """How to undo the call; a plain one has no journal until somebody asks for it."""
        if self._journal is None:
            filesystem = self._filesystem
            self._journal = filesystem._start_journal("call", self.call_id, self.base, foreign=False)
        return self._journal

    @property
    def boundary_kind(self) -> BoundaryKind:
        """What the boundary at the end of the call is called."""
        return "call" if self.journal.kind == "call" else "restore"

    def working_manifest(self, filesystem: HostFilesystem) -> Manifest:
        """Return the manifest that grows inside the call; the one before it is kept for a rollback."""
        if self._working is None:
            self._working = filesystem._manifest().copy()
        return self._working

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Forget what was learned in the block if it did not become a boundary."""
        try:
            yield
        except BaseException:
            self._working = None
            self.dirty.clear()
            raise

    def prepare(self) -> FilesystemSnapshot:
        """Write the boundary after the call; the call can still be rolled back."""
        filesystem = self._filesystem
        with filesystem._lock:
            if filesystem._call is not self:
                raise self._too_late("prepared")
            manifest: Manifest | None = None
            if self._journal is None or self._is_idle(self._journal):
                return self.base
            if self.journal.foreign:
                manifest = filesystem._foreign_segment(self, prepared=True)
            else:
                filesystem._plain_segment(self, filesystem._changes(self.journal), prepared=True)
            return filesystem._snapshot_at(self.journal.segments[-1], self.base.tag, manifest)

    @staticmethod
    def _is_idle(journal: Journal) -> bool:
        """Whether the call has not touched anything, so that its boundary is the one before it."""
        return journal.kind == "call" and not (journal.foreign or journal.touched or journal.segments)

    def finish(self) -> None:
        """Forget how to undo the call. Only after the log has committed it."""
        filesystem = self._filesystem
        with filesystem._lock:
            if self._finished:
                return
            if filesystem._call is not self:
                raise self._too_late("finished")
            history = filesystem._history or filesystem._opened()
            journal = self._journal
            if journal is not None:
                if not self._is_idle(journal) and (not journal.prepared or journal.touched):
                    self.prepare()
                for boundary in journal.segments:
                    history.append(boundary)
                journal.end()
            if self._working is not None:
                history.adopt_manifest(self._working, self.dirty)
            self._finished = True
            filesystem._call = None
            history.release()

    def rollback(self) -> RestoreReport:
        """Put back exactly what the call changed. Calling it again does nothing."""
        filesystem = self._filesystem
        with filesystem._lock:
            if filesystem._call is not self:
                if self._finished:
                    raise WorkspaceError(
                        f"the call {self.call_id!r} is finished and cannot be rolled back; "
                        f"restore its base snapshot instead"
                    )
                return RestoreReport()
            if self.journal.foreign:
                outcome = filesystem._undo_foreign(self)
            else:
                outcome = filesystem._undo(self.journal)
            history = filesystem._opened()
            if outcome.conflicts:
                outcome.notes.append(self._keep_conflicts(outcome.conflicts))
            self.journal.end()
            history.objects.unstage()
            filesystem._call = None
            history.release()
            return outcome.report()

    def _keep_conflicts(self, conflicts: Sequence[str]) -> str:
        """Make what was there before the call reachable, since it was not put back."""
        filesystem = self._filesystem
        firsts = self.journal.first_states()
        seen = [PathChange(path, ABSENT, firsts[path]) for path in conflicts if path in firsts]
        commit = filesystem._commit(
            (),
            f"Not put back by the rollback of {self.call_id}",
            parent=filesystem._head().commit,
            seen=seen,
        )
        filesystem._opened().append(Boundary("call", commit, (), self.journal.id))
        return f"what was there before the call is in commit {commit[:12]} of {filesystem.store_path}"

    def _too_late(self, verb: str) -> WorkspaceError:
        return WorkspaceError(f"the call {self.call_id!r} has ended and cannot be {verb}")


class _Draft:
    """A file that is being written beside its place, and takes it when it is published."""

    def __init__(
        self, filesystem: HostFilesystem, place: Place, path: str, status: os.stat_result | None
    ) -> None:
        self.path = path
        self.descriptor = -1
        self._filesystem = filesystem
        self._place = place
        self._status = status
        self._call = filesystem._call
        self._journal = filesystem._journal()
        self._temporary = filesystem._temporary(self._journal)
        self._owns_place = False

    def __enter__(self) -> _Draft:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self) -> None:
        """Start a draft that owns its place and outlives the block in which it was made."""
        self._owns_place = True
        self._start()

    def _start(self) -> None:
        if self._journal is not None:
            self._journal.intend_temporary(self._place.path)
        mode = 0o666 if self._status is None else 0o600
        with naming(self.path):
            self.descriptor = create_temporary(self._place, self._temporary, mode)

    def write(self, data: bytes | memoryview) -> None:
        """Add to the end."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def copy_from(self, source: int) -> None:
        """Add another file's content, and close that file."""
        try:
            while chunk := os.read(source, CHUNK_BYTES):
                self.write(chunk)
        finally:
            os.close(source)

    def publish(self) -> None:
        """Let the file take its place."""
        filesystem = self._filesystem
        with filesystem._lock:
            if filesystem._call is not self._call:
                self.discard()
                raise WorkspaceError(
                    f"the stream for {self.path!r} was closed after the tool call that opened it had ended; "
                    f"its content was discarded: close streams before the call returns"
                )
            journal = filesystem._journal()
            with naming(self.path):
                if self._status is not None:
                    dress(self.descriptor, self._status)
                if filesystem._durable:
                    os.fsync(self.descriptor)
                original: State | None = None
                if journal is not None:
                    is_first = journal.last_state(self._place.path) is None
                    before = filesystem._before(journal, self._place)
                    original = before if is_first else None
                    os.lseek(self.descriptor, 0, os.SEEK_SET)
                    with Place(os.dup(self._place.descriptor), self._temporary, self.path) as written:
                        after = look(written, None)
                    permissions = ANY if self._status is None else after.mode
                    after = State("file", permissions, after.oid, after.size)
                    filesystem._intend(journal, [PathChange(self._place.path, before, after)])
                with filesystem._keeping(self._place, original, self._status):
                    take_place(self._place, self._temporary)
            self._close()

    def discard(self) -> None:
        """Remove the draft, unless it was published."""
        if self.descriptor != -1:
            discard(self._place, self._temporary)
        self._close()

    def _close(self) -> None:
        if self.descriptor != -1:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._owns_place:
            self._owns_place = False
            self._place.__exit__()


class _DraftIO(io.RawIOBase):
    """The raw side of a write stream."""

    def __init__(self, draft: _Draft) -> None:
        self._draft = draft

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer
        self._draft.write(view)
        return len(view)


class _WriteStream(io.BufferedWriter):
    """Collects what is written in a draft and publishes it when closed, unless an exception came first."""

    def __init__(self, draft: _Draft) -> None:
        super().__init__(_DraftIO(draft), CHUNK_BYTES)
        self._draft: _Draft | None = draft

    @property
    def name(self) -> str:
        """The path in the workspace."""
        return "" if self._draft is None else self._draft.path

    def close(self) -> None:
        """Let the content appear. Closing again does nothing."""
        draft, self._draft = self._draft, None
        if draft is None:
            return
        try:
            super().close()
        except BaseException:
            draft.discard()
            raise
        draft.publish()

    def _abandon(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            super().close()
            draft.discard()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()
        self.close()

    def __del__(self) -> None:
        draft = getattr(self, "_draft", None)
        if draft is not None:
            # Whoever lost the stream may have been in the middle of writing: a part must not appear.
            path = draft.path
            self._abandon()
            warnings.warn(
                f"the stream for {path!r} was never closed; its content was discarded",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )


def _existing(place: Place, path: str) -> os.stat_result:
    status = place.lstat()
    if status is None:
        fail(errno.ENOENT, "no such file or directory", path)
    return status


def _kind(status: os.stat_result | None) -> Kind:
    if status is None:
        return "absent"
    if stat.S_ISDIR(status.st_mode):
        return "directory"
    if stat.S_ISLNK(status.st_mode):
        return "link"
    return "file" if stat.S_ISREG(status.st_mode) else "other"


def _is_half_way(now: State, goal: State) -> bool:
    """Say whether a path may be on its way back: nothing there yet, or bits and owner still to come."""
    return now.kind == "absent" or (now.kind == goal.kind and now.oid == goal.oid)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_SUBJECT_CHARS]


def _sentences(uncovered: Mapping[str, str]) -> tuple[str, ...]:
    named = [
        f"{path or ROOT} is not covered: {reason}"
        for path, reason in sorted(uncovered.items())[:MAX_NAMED_UNCOVERED]
    ]
    if len(uncovered) > len(named):
        named.append(f"{len(uncovered) - len(named)} more paths are not covered")
    return tuple(named)


def _remove_store(path: str, owner: int) -> None:
    # A forked child must not take its parent's store away when it ends.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)

"""The private history of workspaces: where the boundaries of each are, and how long they are kept.

One store is a bare git repository with a directory of our own in it:

```
HEAD config objects/ refs/heads/<line>     what git knows
treenail/lock                              held by users of objects, exclusively by a sweep
treenail/<line>/line                       the boundaries
treenail/<line>/spool                      objects that are not in a pack yet
treenail/<line>/call.journal               how to undo the open call
treenail/<line>/ambient.journal            how to undo what was written outside of calls
treenail/<line>/manifest                   everything known about the tree
treenail/<line>/kept                       what undos took away (git: `refs/kept/<line>`)
treenail/<line>/layers/                    what commands that run right now have done
```

A line is the history of one workspace. Lines share objects; erasing a line and sweeping the store removes
what no other line needs.

A boundary's objects are in the line's spool before the boundary is in the line. Git knows neither, so a
branch stands for the newest boundary whose objects are in *packs*.

The tree of a boundary's commit holds the paths *known so far*: those that were written through the
workspace, and after a scan, all of them. When a call touches a file for the first time, what was there before
is recorded in a commit of its own, below the call's commit, so that the difference of the call is right.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from treenail.clock import SystemClock, WallClock
from treenail.errors import UsageError, WorkspaceError
from treenail.workspace.diffs import MAX_SHOWN_BYTES, Version
from treenail.workspace.disk import make_directory, unlink_if_there
from treenail.workspace.journal import Journal
from treenail.workspace.kept import KeptFiles, KeptReason, append_kept, kept_path, load_kept
from treenail.workspace.line import LineEntry, LineFile
from treenail.workspace.manifest import Manifest, PathChange, State, load_manifest, save_manifest
from treenail.workspace.objects import MODE_TREE, ObjectStore
from treenail.workspace.paths import ROOT, fail
from treenail.workspace.travel.depot import Depot
from treenail.workspace.trees import patch_tree, tree_entry, write_trees
from treenail.workspace.writer import writer_lock

_OWN_DIRECTORY = "treenail"
_LINE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_SUBJECT_CHARS = 200
_MAX_TREE_DEPTH = 200


class History:
    """The boundaries of one line in the private store, and the objects that they need."""

    def __init__(
        self,
        store_path: str,
        line: str,
        *,
        durable: bool,
        clock: WallClock | None = None,
        depot: Depot | None = None,
    ) -> None:
        self.store_path = store_path
        self.directory = os.path.join(store_path, _OWN_DIRECTORY, line)
        spool = os.path.join(self.directory, "spool")
        self.objects = ObjectStore(store_path, durable=durable, spool=spool, depot=depot)
        self.objects.create(head=line)
        self._durable = durable
        self._clock: WallClock = clock if clock is not None else SystemClock()
        self._ref = f"refs/heads/{line}"
        self._kept_ref = f"refs/kept/{line}"
        make_directory(os.path.dirname(self.directory))
        make_directory(self.directory)
        self.call_path = os.path.join(self.directory, "call.journal")
        self.ambient_path = os.path.join(self.directory, "ambient.journal")
        self.layers_path = os.path.join(self.directory, "layers")
        self.line = LineFile(os.path.join(self.directory, "line"), durable=durable)
        self.manifest_path = os.path.join(self.directory, "manifest")
        self._manifest: Manifest | None = None
        self._lock_path = os.path.join(store_path, _OWN_DIRECTORY, "lock")
        self._lock_descriptor = -1
        self._holders = 0
        self._sweeps = -1
        """How often the store had been swept when this history last held it; the lock's length counts it."""

    def close(self) -> None:
        """Let go of the store."""
        if self._lock_descriptor != -1:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def hold(self) -> None:
        """Keep others from sweeping objects away that this history is about to need."""
        if self._lock_descriptor == -1:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock_descriptor = os.open(self._lock_path, flags, 0o600)
        if self._holders == 0:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_SH)
            sweeps = os.lseek(self._lock_descriptor, 0, os.SEEK_END)
            if sweeps != self._sweeps:
                # Somebody swept since: what was there may be gone.
                self.objects.forget()
                self._sweeps = sweeps
        self._holders += 1

    def release(self) -> None:
        """End one `hold`."""
        self._holders -= 1
        if self._holders == 0 and self._lock_descriptor != -1:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_UN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold for a block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    # --- boundaries --------------------------------------------------------------------------------

    def head(self, root_path: str) -> LineEntry:
        """Return the newest boundary; a line that has none gets its first, where nothing is known yet."""
        head = self.line.head
        if head is None:
            tree = self.objects.write_tree({})
            head = LineEntry("open", self._write_commit(tree, (), f"Workspace {root_path}"))
            self.append(head)
        return head

    def append(self, entry: LineEntry) -> None:
        """Make a boundary the newest one. Repeating it does nothing."""
        self.line.append(entry)
        if self.objects.is_due:
            self.pack()

    def pack(self) -> None:
        """Let git see everything up to the newest boundary."""
        head = self.line.head
        if not self.objects.pack():
            return
        kept = self.kept()
        newest = (self._ref, head and head.commit), (self._kept_ref, kept[-1].commit if kept else None)
        for ref, commit in newest:
            if commit is not None and self.objects.read_ref(ref) != commit:
                self.objects.write_ref(ref, commit)

    def commit(
        self,
        changes: Sequence[PathChange],
        subject: str,
        *,
        parent: str,
        body: str = "",
        seen: Sequence[PathChange] = (),
    ) -> str:
        """Store a commit for changes, and one below it for what was there and not known yet (`seen` too)."""
        tip = bytes.fromhex(parent)
        tree = self.objects.commit_tree(tip)
        known = patch_tree(
            self.objects,
            tree,
            [(path, tree_entry(before)) for path, before, _ in changes if path != ROOT]
            + [(path, tree_entry(after)) for path, _, after in seen],
        )
        subject = one_line(subject)
        if known != tree:
            tip = bytes.fromhex(self._write_commit(known, (tip,), f"Before {subject}: what was there"))
        after_tree = patch_tree(
            self.objects, known, [(path, tree_entry(after)) for path, _, after in changes if path != ROOT]
        )
        return self._write_commit(after_tree, (tip,), f"{subject}\n\n{body}" if body else subject)

    def commit_whole(self, manifest: Manifest, message: str, *, parent: str | None) -> str:
        """Store a commit for a whole tree."""
        parents = () if parent is None else (bytes.fromhex(parent),)
        return self._write_commit(write_trees(self.objects, manifest), parents, message)

    def _write_commit(self, tree: bytes, parents: Iterable[bytes], message: str) -> str:
        timestamp = max(0, int(self._clock.now().timestamp()))
        commit = self.objects.write_commit(tree, parents, message, timestamp=timestamp)
        # Everything that the boundary refers to is on disk before anything refers to the boundary.
        self.objects.flush()
        return commit.hex()

    def is_known(self, commit: str, path: str) -> bool:
        """Say whether a path is in the tree of a commit."""
        tree = self.objects.commit_tree(bytes.fromhex(commit))
        for part in os.fsencode(path).split(b"/"):
            entry = self.objects.read_tree(tree).get(part) if tree else None
            if entry is None:
                return False
            tree = entry.oid if entry.mode == MODE_TREE else b""
        return True

    def files_of(self, commit: str) -> Iterator[str]:
        """Yield the paths of the files and links in the tree of a commit."""
        waiting = [(b"", self.objects.commit_tree(bytes.fromhex(commit)))]
        while waiting:
            above, tree = waiting.pop()
            for name, entry in self.objects.read_tree(tree).items():
                path = above + b"/" + name if above else name
                if entry.mode == MODE_TREE:
                    waiting.append((path, entry.oid))
                else:
                    yield os.fsdecode(path)

    def read_of(self, commit: str, path: str) -> bytes:
        """Return the content of a file in the tree of a commit, or a link's target."""
        oid = self.objects.commit_tree(bytes.fromhex(commit))
        *above, last = os.fsencode(path).split(b"/")
        for part in above:
            entry = self.objects.read_tree(oid).get(part)
            if entry is None or entry.mode != MODE_TREE:
                fail(errno.ENOENT, "it is not known at this boundary", path)
            oid = entry.oid
        entry = self.objects.read_tree(oid).get(last)
        if entry is None or entry.mode == MODE_TREE:
            fail(errno.ENOENT, "it is not known at this boundary", path)
        return self.objects.read_blob(entry.oid)

    def version(self, state: State) -> Version | None:
        """Return a state with its content, to be shown in a diff."""
        if state.kind == "absent":
            return None
        if state.kind == "directory":
            return Version("directory", state.mode & 0o777)
        if state.kind == "other":
            return Version("file", 0, identity=object())
        content = None
        if state.kind == "link" or state.size <= MAX_SHOWN_BYTES:
            content = self.objects.read_blob(state.oid)
        return Version(
            "link" if state.kind == "link" else "file", state.mode & 0o777, state.size, content, state.oid
        )

    # --- what undos have taken away ----------------------------------------------------------------

    def kept(self) -> list[KeptFiles]:
        """Return what undos have taken away, oldest first."""
        return load_kept(kept_path(self.directory))

    def keep(
        self,
        files: Sequence[tuple[str, State]],
        *,
        root: str,
        call_id: str,
        tool_name: str = "",
        reason: KeptReason = "undone",
    ) -> KeptFiles:
        """Keep files for a person before an undo takes them away; their content is in the object store.

        When this returns, content and record are on disk. `treenail recover` brings them back.
        """
        earlier = self.kept()
        parents = (bytes.fromhex(earlier[-1].commit),) if earlier else ()
        edits = [(_git_path(path, number), tree_entry(state)) for number, (path, state) in enumerate(files)]
        tree = patch_tree(self.objects, self.objects.write_tree({}), edits)
        subject = one_line(f"Kept when {tool_name or 'a call'} ({call_id}) was {reason}")
        kept = KeptFiles(
            self._clock.now(),
            reason,
            call_id,
            tool_name,
            root,
            self._write_commit(tree, parents, subject),
            tuple(files),
        )
        append_kept(kept_path(self.directory), kept, durable=self._durable)
        return kept

    # --- journals and the manifest -----------------------------------------------------------------

    def load_ambient(self) -> Journal | None:
        """Return the journal of writes outside of calls that an earlier process left, if any."""
        journal = Journal.load(self.ambient_path, durable=self._durable)
        return None if journal is not None and self._is_recorded(journal) else journal

    def end_recorded_ambient(self) -> None:
        """End the journal of writes outside of calls if a crash left it after its boundary was taken."""
        journal = Journal.load(self.ambient_path, durable=self._durable)
        if journal is not None and self._is_recorded(journal):
            journal.end()

    def _is_recorded(self, journal: Journal) -> bool:
        return any(entry.journal == journal.id for entry in self.line.entries[-2:])

    def load_manifest(self) -> Manifest:
        """Return the manifest, from memory or from disk; a new one is `baseline_missing`."""
        if self._manifest is None:
            self._manifest = load_manifest(self.manifest_path)
            if self._manifest is None or self._manifest.position > len(self.line):
                self._manifest = Manifest()
                self._manifest.baseline_missing = True
        return self._manifest

    def forget_manifest(self) -> None:
        """Drop what is in memory; the manifest on disk and the boundaries since are what counts."""
        self._manifest = None

    def adopt_manifest(self, manifest: Manifest) -> None:
        """Make a call's manifest the present one."""
        self._manifest = manifest

    def replace(self, entries: Sequence[LineEntry], manifest: Manifest) -> None:
        """Make the history one that was read elsewhere, for a tree that is as its newest boundary says."""
        for path in (self.call_path, self.ambient_path):
            unlink_if_there(path)
        self.line.replace(entries)
        manifest.position = len(entries)
        manifest.unsaved = True
        self.adopt_manifest(manifest)
        self.save_manifest(manifest)

    def save_manifest(self, manifest: Manifest) -> None:
        """Keep the manifest on disk, if it has changed."""
        if manifest.unsaved:
            save_manifest(self.manifest_path, manifest, durable=self._durable)


def one_line(text: str) -> str:
    """Return text as it may stand in the subject of a commit."""
    return " ".join(text.split())[:_MAX_SUBJECT_CHARS]


def _git_path(path: str, number: int) -> str:
    """Return a path for a tree in git; one that is nested very deeply is flattened."""
    return path if path.count("/") < _MAX_TREE_DEPTH else f"deep/{number}/{path.rpartition('/')[2]}"


def check_line_name(line: str) -> None:
    """Refuse a name that cannot be a git branch and a directory."""
    if not _LINE_NAME.fullmatch(line) or line.endswith((".lock", ".")) or ".." in line:
        raise UsageError(
            f"the line name {line!r} cannot be used; it takes letters, digits, '_', '-' and '.', "
            f"begins with a letter, a digit or '_', and is at most 100 characters long"
        )


def line_names(store: str | os.PathLike[str]) -> list[str]:
    """Return the names of the lines in a store, sorted."""
    try:
        with os.scandir(os.path.join(store, _OWN_DIRECTORY)) as listing:
            return sorted(entry.name for entry in listing if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def writer_path(store: str, root: str) -> str:
    """Return the file in a store that says which process writes to a workspace."""
    return os.path.join(store, _OWN_DIRECTORY, f"writer-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}")


def end_other_writer(store: str | os.PathLike[str], root: str | os.PathLike[str]) -> bool:
    """Kill the other process that writes to a workspace, and wait for its end. Says whether there was one.

    Raises `WorkspaceBusyError` if it cannot be ended from here.
    """
    place = os.path.realpath(root)
    path = writer_path(os.path.realpath(store), place)
    return os.path.exists(path) and writer_lock(path, place).end_other()


def left_open(store: str | os.PathLike[str], line: str) -> str | None:
    """Return the call whose changes in a line's workspace are neither kept nor undone yet, or None."""
    journal = Journal.load(os.path.join(store, _OWN_DIRECTORY, line, "call.journal"), durable=False)
    if journal is None or not (journal.foreign or journal.touched or journal.segments):
        return None
    return journal.call_id


def kept_files(store: str | os.PathLike[str], line: str) -> list[KeptFiles]:
    """Return what the undos of a line have taken away, oldest first."""
    return load_kept(kept_path(os.path.join(store, _OWN_DIRECTORY, line)))


def sweep(store: str | os.PathLike[str], keep_lines: Iterable[str] | None = None) -> int:
    """Remove every object that no line needs; return how many. With `keep_lines`, erase the others first.

    Afterwards the content is in no file of the store. Sweeping may be repeated after a crash. Close the
    workspaces of the lines that are erased first. Raises `WorkspaceError` while a call is open on any line
    of the store: then nothing is removed.
    """
    objects = ObjectStore(store)
    if not objects.exists:
        return 0
    own = os.path.join(store, _OWN_DIRECTORY)
    os.makedirs(own, mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(own, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkspaceError(
                f"the store {os.fspath(store)} is in use by an open call; sweep it when the call is over"
            ) from None
        # The next user of the store sees by the lock's length that what it remembers may be gone.
        os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_END) + 1)
        keep = None if keep_lines is None else set(keep_lines)
        for line in line_names(store):
            if keep is not None and line not in keep:
                objects.delete_ref(f"refs/heads/{line}")
                objects.delete_ref(f"refs/kept/{line}")
                shutil.rmtree(os.path.join(own, line))
            else:
                # What is needed of it is found in packs, and what is not is swept from there.
                History(os.fspath(store), line, durable=False).pack()
        roots = {bytes.fromhex(commit) for commit in objects.refs().values()}
        for line in line_names(store):
            roots |= _roots(objects, os.path.join(own, line))
        return objects.sweep(roots)
    finally:
        os.close(descriptor)


def _roots(objects: ObjectStore, directory: str) -> set[bytes]:
    """Return what a line needs: its boundaries, and what its open journals would put back."""
    line = LineFile(os.path.join(directory, "line"), durable=False)
    needed = {bytes.fromhex(entry.commit) for entry in line.entries}
    needed |= {bytes.fromhex(kept.commit) for kept in load_kept(kept_path(directory))}
    for name in ("call.journal", "ambient.journal"):
        journal = Journal.load(os.path.join(directory, name), durable=False)
        if journal is not None:
            needed |= {bytes.fromhex(segment.commit) for segment in journal.segments}
            needed |= {change.before.oid for change in journal.intents if change.before.oid}
    return {oid for oid in needed if objects.contains(oid)}

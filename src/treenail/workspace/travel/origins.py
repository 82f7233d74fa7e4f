"""Where a workspace that travels begins: an origin is put into a depot whole, once, whoever uses it.

The name of an origin follows from its content, so that a second run from the same directory, commit or tar
sends nothing. Its objects are held by the origin itself, which its runs share.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid5

from treenail.clock import SystemClock, WallClock, new_id
from treenail.errors import UsageError
from treenail.log import SlicePolicy
from treenail.state import Session, event
from treenail.workspace.base import FilesystemSnapshot
from treenail.workspace.diffs import shown_path
from treenail.workspace.line import LineEntry
from treenail.workspace.manifest import ABSENT, Manifest, PathChange, State, state_of
from treenail.workspace.objects import ObjectStore
from treenail.workspace.packs import hash_object
from treenail.workspace.paths import ROOT
from treenail.workspace.rooted import RootedDirectory
from treenail.workspace.scan import Exclusions, Scan, SnapshotLimits
from treenail.workspace.travel.depot import Depot
from treenail.workspace.travel.imports import read_commit, read_tar, shown_url
from treenail.workspace.travel.publishing import send
from treenail.workspace.travel.records import dump_record, read_line, tree_of
from treenail.workspace.trees import patch_tree, tree_entry

_ORIGINS = UUID("6f1e7f7e-3c55-4a53-9a9e-6a2f3c1c8a11")
_TIMESTAMP = 0
"""The same content is the same origin, whenever it is put into a depot."""


@event(name="treenail.WorkspaceOrigin", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class WorkspaceOrigin:
    """The run's workspace travels: it began here, and each machine that works on the run has its own copy."""

    snapshot: FilesystemSnapshot
    source: str
    """Where the files came from, for people."""
    depot: str = ""
    """Where they are kept: empty for the log's own database."""
    commit: str = ""
    """The commit of somebody's repository that it began with, if it did."""


def origin_of(session: Session) -> WorkspaceOrigin | None:
    """Return where a run's workspace began; None if it does not travel."""
    return session[WorkspaceOrigin].latest()


def begin_with_directory(
    depot: Depot,
    run_id: UUID,
    directory: str | os.PathLike[str],
    *,
    exclude: Iterable[str] = (),
    limits: SnapshotLimits | None = None,
    clock: WallClock | None = None,
) -> WorkspaceOrigin:
    """Put a directory into a depot for a run to begin with; the directory itself is never changed.

    Raises `UsageError` if it holds something that cannot travel. Dispatch what is returned to the run's
    session: from then on the run's workspace is this one.
    """
    tree = RootedDirectory(os.fspath(directory))
    if not os.path.isdir(tree.path):
        raise UsageError(f"{directory} is not a directory; name one for the run to begin with")
    with tempfile.TemporaryDirectory(prefix="treenail-origin-") as name:
        objects = ObjectStore(name)
        objects.create()
        scan = Scan(
            Manifest(),
            store=objects,
            exclusions=Exclusions(exclude),
            private=None,
            limits=limits or SnapshotLimits(),
            is_temporary=lambda _: False,
        )
        descriptor = tree.open_for_listing()
        try:
            scan.run(descriptor)
        finally:
            os.close(descriptor)
        if scan.uncovered:
            path, reason = min(scan.uncovered.items())
            raise UsageError(
                f"{shown_path(path or ROOT)} in {directory} cannot travel: {reason}; remove it, or exclude it"
            )
        states = {
            f"{below}/{name}" if below else name: state_of(entry)
            for below, entries in scan.updates.items()
            for name, entry in (entries or {}).items()
        }
        states[ROOT] = State("directory", scan.root_mode)
        return _put(depot, run_id, objects, states, os.fspath(Path(tree.path)), clock)


def begin_with_commit(depot: Depot, run_id: UUID, url: str, commit: str) -> WorkspaceOrigin:
    """Put a commit of a git repository into a depot for a run to begin with. See `begin_with_directory`.

    `url` is whatever `git fetch` takes, `commit` a whole id, a branch or a tag. Nothing is checked out, so
    neither hooks nor filters nor the configuration of that repository are run. Raises `UsageError`.
    """
    with tempfile.TemporaryDirectory(prefix="treenail-origin-") as name:
        objects = ObjectStore(os.path.join(name, "own"))
        objects.create()
        found, states = read_commit(url, commit, Path(name, "git"), objects)
        return _put(depot, run_id, objects, states, f"{shown_url(url)} at {found}", None, found)


def begin_with_tar(
    depot: Depot, run_id: UUID, tar: str | os.PathLike[str], *, limits: SnapshotLimits | None = None
) -> WorkspaceOrigin:
    """Put the content of a tar, compressed or not, into a depot for a run to begin with.

    See `begin_with_directory`. Nothing of it is written to a disk by its own names. Raises `UsageError` for a
    path or a link that would leave the workspace, and for what is neither a file nor a directory nor a link.
    """
    with tempfile.TemporaryDirectory(prefix="treenail-origin-") as name:
        objects = ObjectStore(name)
        objects.create()
        states = read_tar(Path(tar), objects, limits or SnapshotLimits())
        return _put(depot, run_id, objects, states, os.path.abspath(tar), None)


def begin_with_boundary(
    depot: Depot, run_id: UUID, boundary: FilesystemSnapshot, source: str
) -> WorkspaceOrigin:
    """Let a run begin, or begin again, with the tree of a boundary that is in the depot.

    See `begin_with_directory`. What came before the boundary is not part of it.
    """
    with tempfile.TemporaryDirectory(prefix="treenail-origin-") as name:
        objects = ObjectStore(name, depot=depot)
        objects.create()
        line = read_line(bytes.fromhex(boundary.record), objects.read_blobs)
        return _put(depot, run_id, objects, tree_of(entry for _, entry in line), source, None)


def origin_holder(depot: Depot, record: str) -> UUID:
    """Return who holds the objects of an origin."""
    return uuid5(_ORIGINS, f"{depot.name} {record}")


def _put(
    depot: Depot,
    run_id: UUID,
    objects: ObjectStore,
    states: Mapping[str, State],
    source: str,
    clock: WallClock | None,
    from_commit: str = "",
) -> WorkspaceOrigin:
    """Put a tree into a depot as the first boundary of a line."""
    edits = [(path, tree_entry(state)) for path, state in states.items() if path != ROOT]
    tree = patch_tree(objects, objects.write_tree({}), edits)
    commit = objects.write_commit(tree, (), "Origin", timestamp=_TIMESTAMP)
    objects.flush()
    changes = tuple(PathChange(path, ABSENT, state) for path, state in sorted(states.items()))
    entry = LineEntry("open", commit.hex(), changes)
    data = dump_record(entry, ())
    record = hash_object("blob", data)
    holder = origin_holder(depot, record.hex())
    # The run shares it first: an origin that no run shares may be deleted.
    depot.share(run_id, holder)
    if depot.claim(holder, [record]):
        objects.write("blob", data)
        ids = list(dict.fromkeys(objects.added(commit, None)))
        send(depot, holder, objects, ids)
        # When the record is there, everything is.
        send(depot, holder, objects, [record])
    now = (clock or SystemClock()).now()
    snapshot = FilesystemSnapshot(new_id(), now, commit.hex(), "", scanned=True, record=record.hex())
    return WorkspaceOrigin(snapshot, source, depot.name, from_commit)

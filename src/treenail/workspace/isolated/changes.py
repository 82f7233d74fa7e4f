"""What a copy has changed, and how that is brought into another workspace.

Theory of operation
-------------------
A `ForkChange` says what a path was when the copy began and what it has become. Whether it can be brought home
is decided before anything is changed: a path that is neither what it was nor what it is to become is a
conflict.

Then paths are made what they should be in three passes. What is of the wrong kind goes first, from the
deepest path upwards, so that a directory is empty before it goes. What is to come follows from the top
downwards, so that a directory is there before what is in it. The bits of directories come last, from the
deepest upwards, because they may forbid what comes before.

`mirror` does the same between two trees that are to be alike, whatever they were: there are no conflicts,
and what is below a directory goes and comes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from treenail.errors import WorkspaceConflictError, WorkspaceError
from treenail.workspace.base import WorkspaceDiff
from treenail.workspace.diffs import MAX_SHOWN_BYTES, Version, describe
from treenail.workspace.isolated.fingerprints import NOTHING, Fingerprint, fingerprint, kind_at
from treenail.workspace.isolated.trees import Tree, below, set_permissions, target_of
from treenail.workspace.packs import CHUNK_BYTES
from treenail.workspace.paths import ROOT, parent

_MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class ForkChange:
    """One path that a copy has changed since its boundary."""

    path: str
    before: Fingerprint
    after: Fingerprint
    source: Tree = field(repr=False, compare=False)
    """Where the new content is."""


def conflicts_with(
    target: Tree,
    changes: Sequence[ForkChange],
    applied: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Name the paths of a workspace that are no longer what the copy began with.

    A path that is already what it should become is not a conflict, and neither is one that is as an
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
            found += [path for path in below(target, each.path) if path not in going]
    staying = {above for each in changes if each.after.kind != "absent" for above in _above(each.path)}
    for path in staying - {each.path for each in changes}:
        # The copy has a directory here: whatever somebody else put in its place is in the way.
        if kind_at(target, path) not in ("directory", "absent"):
            found.append(path)
    return tuple(sorted(set(found)))


def _above(path: str) -> Iterator[str]:
    while (path := parent(path)) != ROOT:
        yield path


def apply_changes(
    target: Tree, changes: Sequence[ForkChange], applied: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Bring a copy's changes into a workspace; return the paths that were changed there.

    Call it inside a tool call: if it raises, that call's rollback undoes what was done. Raises
    `WorkspaceConflictError`, before anything is changed, if paths are no longer what they were.
    """
    conflicts = conflicts_with(target, changes, applied)
    if conflicts:
        more = len(conflicts) - _MAX_NAMED
        shown = ", ".join(conflicts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise WorkspaceConflictError(
            f"{len(conflicts)} paths have been changed since the copy was made: {shown}; nothing was applied",
            paths=conflicts,
        )
    return _make(target, changes, recursive=False)


def mirror(source: Tree, target: Tree, paths: Iterable[str]) -> None:
    """Make paths of one tree what they are in another, whatever they were."""
    wanted = set(paths)
    for path in tuple(wanted):
        if kind_at(source, path) != "directory":
            continue
        if kind_at(target, path) != "directory":
            # Everything below it in the source is copied, whether it is named or not.
            wanted.update(below(source, path))
        else:
            # One that was made anew may have lost what is still in the other.
            kept = {entry.name for entry in source.list(path)}
            wanted.update(entry.path for entry in target.list(path) if entry.name not in kept)
    changes = [ForkChange(path, NOTHING, fingerprint(source, path), source) for path in wanted]
    _make(target, changes, recursive=True)


def _make(target: Tree, changes: Iterable[ForkChange], *, recursive: bool) -> tuple[str, ...]:
    """Make paths what they should become; return those that were not. See the theory of operation."""
    todo = [each for each in changes if fingerprint(target, each.path) != each.after]
    inward = sorted(todo, key=lambda change: change.path.count("/"))
    outward = inward[::-1]
    for each in outward:
        if kind_at(target, each.path) not in ("absent", each.after.kind):
            target.delete(each.path, recursive=recursive)
    for each in inward:
        _bring(target, each)
    for each in outward:
        if each.after.kind == "directory":
            set_permissions(target, each.path, each.after.permissions)
    return tuple(sorted(each.path for each in todo))


def _bring(target: Tree, change: ForkChange) -> None:
    """Make one path what it should become. What was in its way is gone."""
    if change.after.kind == "directory":
        target.mkdir(change.path)
    elif change.after.kind == "link":
        if target.exists(change.path):
            target.delete(change.path)
        _symlink(target, change.path, change.source.stat(change.path).link_target or "")
    elif change.after.kind == "file":
        copy_file(change.source, target, change.path)
        set_permissions(target, change.path, change.after.permissions)


def _symlink(target: Tree, path: str, leads_to: str) -> None:
    make: Callable[[str, str], None] | None = getattr(target, "symlink", None)
    if make is None:
        raise WorkspaceError(f"{target!r} cannot hold links, and {path!r} is one; nothing was applied")
    make(path, leads_to)


def copy_file(source: Tree, target: Tree, path: str) -> None:
    """Copy a file's content from one workspace to the same path of another, in parts."""
    with source.open_read(path) as reading, target.open_write(path) as writing:
        while chunk := reading.read(CHUNK_BYTES):
            writing.write(chunk)


def diff_of(changes: Sequence[ForkChange], before: Callable[[str], bytes | None]) -> WorkspaceDiff:
    """Show changes as text. `before` gives what a file held at the boundary."""
    return describe(
        (
            each.path,
            version_of(each.before, partial(before, each.path)),
            version_of(each.after, partial(_content, each.source, each.path)),
        )
        for each in changes
    )


def version_of(mark: Fingerprint, content: Callable[[], bytes | None]) -> Version | None:
    """Return what a fingerprint stands for, to be shown. `content` is asked only if there is any."""
    if mark.kind in ("absent", "other"):
        return None
    if mark.kind == "directory":
        return Version("directory", mark.permissions)
    kind: Literal["file", "link"] = "link" if mark.kind == "link" else "file"
    data = content()
    size = 0 if data is None else len(data)
    shown = None if kind == "file" and size > MAX_SHOWN_BYTES else data
    return Version(kind, mark.permissions, size, shown, mark.content)


def _content(tree: Tree, path: str) -> bytes:
    status = tree.stat(path)
    if status.is_link:
        return target_of(status)
    with tree.open_read(path) as stream:
        return stream.read()

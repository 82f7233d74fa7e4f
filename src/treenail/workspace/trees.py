"""Git trees for a workspace: a whole one from a manifest, or one that is patched along changed paths."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from treenail.workspace.manifest import Manifest, State, state_of
from treenail.workspace.objects import (
    EMPTY_TREE,
    MODE_EXECUTABLE,
    MODE_FILE,
    MODE_LINK,
    MODE_TREE,
    ObjectStore,
    TreeEntry,
)


def tree_entry(state: State) -> TreeEntry | None:
    """Return how git spells a state; a directory has no id of its own yet."""
    if state.kind == "directory":
        return TreeEntry(MODE_TREE, b"")
    if state.kind == "link":
        return TreeEntry(MODE_LINK, state.oid)
    if state.kind == "file":
        return TreeEntry(MODE_EXECUTABLE if state.mode & stat.S_IXUSR else MODE_FILE, state.oid)
    return None


def write_trees(store: ObjectStore, manifest: Manifest) -> bytes:
    """Store every directory of a manifest as a tree and return the root's id."""
    edits = [
        (f"{directory}/{name}" if directory else name, tree_entry(state_of(known)))
        for directory, entries in manifest.directories.items()
        for name, known in entries.items()
    ]
    return patch_tree(store, store.write_tree({}), edits)


def patch_tree(store: ObjectStore, root: bytes, edits: Sequence[tuple[str, TreeEntry | None]]) -> bytes:
    """Return the tree that has the edits made; only the directories on their paths are written.

    An edit with `MODE_TREE` says that there is a directory, whatever is in it; None removes a name
    with everything below it.
    """
    # A trie of directories: each node holds the edits of its own names and the nodes below.
    top: _Node = ({}, {})
    for path, entry in edits:
        *parents, name = os.fsencode(path).split(b"/")
        node = top
        for part in parents:
            node = node[1].setdefault(part, ({}, {}))
        node[0][name] = entry
    return _patch(store, root, top)


_Node = tuple[dict[bytes, TreeEntry | None], dict[bytes, "_Node"]]


def _patch(store: ObjectStore, tree: bytes, node: _Node) -> bytes:
    entries = store.read_tree(tree)
    changed: dict[bytes, TreeEntry] | None = None
    names, below = node
    for name in names.keys() | below.keys():
        present = entries.get(name)
        wanted = names[name] if name in names else TreeEntry(MODE_TREE, b"")
        if wanted is not None and wanted.mode == MODE_TREE:
            start = present.oid if present is not None and present.mode == MODE_TREE else EMPTY_TREE
            if name in below:
                oid = _patch(store, start, below[name])
            else:
                oid = start if start != EMPTY_TREE else store.write("tree", b"")
            if name not in names and present is None and not _adds(below[name]):
                # Something was removed below a directory that was never known: there is nothing to say.
                continue
            wanted = TreeEntry(MODE_TREE, oid)
        if wanted != present:
            if changed is None:
                changed = dict(entries)
            if wanted is None:
                changed.pop(name, None)
            else:
                changed[name] = wanted
    return tree if changed is None else store.write_tree(changed)


def _adds(node: _Node) -> bool:
    """Say whether any edit in a trie puts something there."""
    return any(entry is not None for entry in node[0].values()) or any(map(_adds, node[1].values()))

"""Whether two boundaries have the same tree, whichever commits stand for them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from treenail.errors import ObjectStoreError
from treenail.workspace.line import LineFile, fold
from treenail.workspace.manifest import same
from treenail.workspace.objects import ObjectStore


@dataclass(frozen=True, slots=True, eq=False)
class TreeKey:
    """Stands for the tree of a boundary; equal to another if the trees are equal.

    Two boundaries of one history are compared by what changed between them: a path that is back where it
    was does not count. Others are compared by the trees of their commits, which hold the paths known so
    far; after a scan, all of them. If a store is gone, only the same boundary is equal.
    """

    commit: str
    """The commit; for a filesystem in memory, the digest of the tree."""
    store: str | None = None

    __hash__ = None  # type: ignore[assignment]  # equal keys may have different commits

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeKey):
            return NotImplemented
        if self.commit == other.commit:
            return True
        mine, theirs = self._line(), other._line()
        if mine is None or theirs is None:
            return False
        if mine == theirs:
            line = LineFile(os.path.join(mine, "line"), durable=False)
            low, high = sorted((line.position(self.commit) or 0, line.position(other.commit) or 0))
            between = fold(line.entries[low + 1 : high + 1], outside=True)
            return all(same(step.first, step.last) for step in between.values())
        try:
            return self._tree(mine) == other._tree(theirs)
        except ObjectStoreError:
            return False

    def _line(self) -> str | None:
        """Return the directory of the line that has the boundary."""
        if self.store is None:
            return None
        lines = os.path.join(self.store, "treenail")
        for name in sorted(os.listdir(lines)) if os.path.isdir(lines) else ():
            path = os.path.join(lines, name)
            if os.path.isdir(path):
                line = LineFile(os.path.join(path, "line"), durable=False)
                if line.position(self.commit) is not None:
                    return path
        return None

    def _tree(self, line: str) -> bytes:
        assert self.store is not None
        objects = ObjectStore(self.store, spool=os.path.join(line, "spool"))
        return objects.commit_tree(bytes.fromhex(self.commit))

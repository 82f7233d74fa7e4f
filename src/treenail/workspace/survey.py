"""What scans of a workspace find, as boundaries of its history."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from treenail.workspace.history import History
from treenail.workspace.line import LineEntry
from treenail.workspace.manifest import Manifest, PathChange, State
from treenail.workspace.paths import ROOT
from treenail.workspace.rooted import RootedDirectory
from treenail.workspace.scan import Exclusions, Scan, SnapshotLimits

_logger = logging.getLogger("treenail.workspace")


class Survey:
    """Looks at a whole workspace and compares it with its manifest.

    `private` is a path that is not part of the workspace; `is_temporary` knows our half-written files.
    """

    def __init__(
        self,
        tree: RootedDirectory,
        history: History,
        exclusions: Exclusions,
        limits: SnapshotLimits,
        private: str | None,
        is_temporary: Callable[[str], bool],
    ) -> None:
        self._tree = tree
        self._history = history
        self._exclusions = exclusions
        self._limits = limits
        self._private = private
        self._is_temporary = is_temporary

    def scan(self, manifest: Manifest, *, keep: bool) -> Scan:
        """Walk the tree; with `keep`, new content is stored."""
        scan = Scan(
            manifest,
            store=self._history.objects if keep else None,
            exclusions=self._exclusions,
            private=self._private,
            limits=self._limits,
            is_temporary=self._is_temporary,
        )
        descriptor = self._tree.open_for_listing()
        try:
            scan.run(descriptor)
        finally:
            os.close(descriptor)
        return scan

    def manifest(self) -> Manifest:
        """Return what is known about the tree at the newest boundary."""
        manifest = self._history.load_manifest()
        if not manifest.baseline_missing:
            self.catch_up(manifest, self._history.line.entries)
        return manifest

    def catch_up(self, manifest: Manifest, entries: Sequence[LineEntry]) -> None:
        """Take in the boundaries that were made since the manifest was last brought up to date."""
        for entry in entries[manifest.position :]:
            for path, _, after in entry.changes:
                if path == ROOT:
                    manifest.root_mode = after.mode
                elif not self._exclusions.covers(path, directory=after.kind == "directory"):
                    manifest.learn(path, after)
        manifest.position = max(manifest.position, len(entries))

    def take(self, manifest: Manifest) -> tuple[list[PathChange], list[PathChange]]:
        """Scan and bring the manifest up to date.

        Returns what changed, and what a scan could keep for the first time.
        """
        scan = self.scan(manifest, keep=True)
        changes, seen = self.sort_out(manifest, scan)
        for path in scan.uncovered.keys() - manifest.uncovered.keys():
            _logger.info("%s in %s is not covered: %s", path or ROOT, self._tree.path, scan.uncovered[path])
        manifest.apply(scan.updates, scan.uncovered)
        manifest.root_mode = scan.root_mode
        return changes, seen

    def find(self, manifest: Manifest, parent: str | None) -> LineEntry | None:
        """Scan, bring the manifest up to date, and return a boundary if anything is worth one."""
        history = self._history
        baseline = manifest.baseline_missing
        uncovered = manifest.uncovered
        changes, seen = self.take(manifest)
        manifest.baseline_missing = False
        if baseline:
            changes = []
            message = f"The whole workspace {self._tree.path}, as found"
            commit = history.commit_whole(manifest, message, parent=parent)
        elif not changes and not seen and uncovered == manifest.uncovered:
            return None
        else:
            parent = parent or history.head(self._tree.path).commit
            commit = history.commit(changes, "Changed outside of tool calls", parent=parent, seen=seen)
        return LineEntry(
            "scan",
            commit,
            tuple(changes),
            baseline=baseline,
            scanned=True,
            uncovered=tuple(manifest.uncovered.items()),
        )

    def boundary(self) -> Manifest:
        """Look at the whole tree and make a boundary of what somebody else changed."""
        history = self._history
        head = history.line.head
        try:
            manifest = self.manifest()
            entry = self.find(manifest, None if head is None else head.commit)
            if entry is not None:
                history.append(entry)
                manifest.position = len(history.line)
            history.save_manifest(manifest)
        except BaseException:
            # Knowledge that did not become a boundary does not count: the disk may be full.
            history.forget_manifest()
            raise
        return manifest

    def sort_out(self, manifest: Manifest, scan: Scan) -> tuple[list[PathChange], list[PathChange]]:
        """Part a scan's differences into changes, and what was only seen for the first time."""
        changes: list[PathChange] = []
        seen: list[PathChange] = []
        for change in scan.differences:
            first_sight = change.before.kind == "absent" and manifest.is_uncovered(change.path)
            (seen if first_sight else changes).append(change)
        if scan.root_mode != manifest.root_mode:
            changes.append(
                PathChange(ROOT, State("directory", manifest.root_mode), State("directory", scan.root_mode))
            )
        return changes, seen

    def is_beyond(self, manifest: Manifest, path: str) -> bool:
        """Say whether scans do not look at a path."""
        return manifest.is_uncovered(path) or self._exclusions.covers(path, directory=False)

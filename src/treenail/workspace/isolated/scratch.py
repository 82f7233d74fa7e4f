"""The real directory in which the processes of a copy's foreign calls work.

Theory of operation
-------------------
When the first foreign call begins, the whole tree is written out, once; afterwards only what has changed is
brought up to date. During such a call every operation goes to the scratch tree, and what differs is taken
into the layer at the call's end, or earlier if somebody asks for a boundary. The layer is what counts: the
scratch tree is a cache, which may be thrown away at any time between calls, and is after a restart.

Most of the tree is as it is in the other workspace. So all of that is copied first, and then whatever is not
what it should be is written again: what the layer has, what is known to have changed, and what was changed
while it was copied.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from pathlib import Path

from treenail.clock import WallClock
from treenail.workspace.base import FilesystemSnapshot
from treenail.workspace.host import HostFilesystem
from treenail.workspace.isolated.changes import mirror
from treenail.workspace.isolated.notes import FOREIGN
from treenail.workspace.isolated.overlay import Overlay
from treenail.workspace.packs import CHUNK_BYTES
from treenail.workspace.paths import ROOT, join
from treenail.workspace.scan import RACY_NS


class ScratchTree:
    """What an overlay shows, on disk. The overlay's lock is held around every method."""

    def __init__(self, overlay: Overlay, place: Path, clock: WallClock | None) -> None:
        self._overlay = overlay
        self._place = place
        self._clock = clock
        self._tree: HostFilesystem | None = None
        self._known: FilesystemSnapshot | None = None
        """The tree as the layer last knew it, while a foreign call is open."""
        self._start: FilesystemSnapshot | None = None
        """The tree as it was when that call began."""

    @property
    def in_use(self) -> HostFilesystem | None:
        """The tree, while a foreign call is open."""
        return self._tree if self._known is not None else None

    def close(self) -> None:
        """Let go of the tree; the next foreign call writes a new one."""
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    def begin(self) -> None:
        """Have the tree ready for a foreign call."""
        if self._tree is None:
            self._tree = self._write_out()
            self._overlay.changed.clear()
        self.bring_up()
        self._overlay.layer.write(FOREIGN, "")
        self._known = self._start = self._tree.snapshot(scan=True)

    def bring_up(self) -> None:
        """Make the tree, if there is one, what the layer and the past show."""
        if self._tree is None:
            return
        mirror(self._overlay, self._tree, self._overlay.changed)
        self._overlay.changed.clear()
        if self._known is not None:
            self._known = self._tree.snapshot(scan=True)

    def absorb(self) -> None:
        """Take what a foreign call has changed so far into the layer."""
        if self._tree is None or self._known is None:
            return
        differs = self._tree.diff(self._known).changes
        mirror(self._tree, self._overlay, (each.path for each in differs if each.path != ROOT))
        self._overlay.changed.clear()
        self._known = self._tree.snapshot(scan=True)

    def settle(self) -> None:
        """Take what a foreign call has done into the layer, for good."""
        self.absorb()
        if self._known is not None and self._overlay.layer.exists(FOREIGN):
            self._overlay.layer.delete(FOREIGN)

    def end(self, *, undone: bool) -> tuple[str, ...]:
        """Follow the layer, in which a call is over; return what was put back in the tree."""
        start, self._known, self._start = self._start, None, None
        if not undone or start is None or self._tree is None:
            return ()
        return self._tree.restore(start).restored

    def _write_out(self) -> HostFilesystem:
        for left in self._place.glob("scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        # Under a name of its own: what a process that was cut off still does to an old one is lost there.
        scratch = self._place / f"scratch-{secrets.token_hex(4)}"
        (scratch / "tree").mkdir(parents=True)
        since_ns = time.time_ns() - RACY_NS
        self._overlay.past.copy_out(scratch / "tree")
        _correct(self._overlay, scratch / "tree", ROOT, since_ns)
        return HostFilesystem(scratch / "tree", store=scratch / "store", clock=self._clock)


def _correct(overlay: Overlay, target: Path, directory: str, since_ns: int) -> None:
    """Make a directory that was copied what it should be."""
    wanted = overlay.entries(directory)
    here = target / directory
    with os.scandir(here) as listing:
        found = {each.name: each.is_dir(follow_symlinks=False) for each in listing}
    for name in found.keys() - wanted.keys():
        _clear(here / name, is_directory=found.pop(name))
    for name, entry in wanted.items():
        path, place = join(directory, name), here / name
        if entry.is_directory:
            if not found.get(name):
                if name in found:
                    _clear(place, is_directory=False)
                place.mkdir()
            _correct(overlay, target, path, since_ns)
            status = overlay.status(path)
            if status is not None and stat.S_IMODE(place.stat().st_mode) & 0o777 != status.permissions:
                place.chmod(status.permissions)
        elif name not in found or not overlay.is_as_found(path, since_ns):
            if name in found:
                _clear(place, is_directory=found[name])
            _write_one(overlay, path, place)


def _clear(place: Path, *, is_directory: bool) -> None:
    if is_directory:
        shutil.rmtree(place)
    else:
        place.unlink()


def _write_one(overlay: Overlay, path: str, place: Path) -> None:
    status = overlay.status(path)
    if status is None:
        return
    if status.is_link:
        place.symlink_to(status.link_target or "")
        return
    with overlay.open(path) as stream, place.open("xb") as writing:
        shutil.copyfileobj(stream, writing, CHUNK_BYTES)
    place.chmod(status.permissions)

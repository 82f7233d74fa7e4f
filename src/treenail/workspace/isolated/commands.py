"""A command in a copy, on a layer over the other workspace: nothing is written out for it.

Theory of operation
-------------------
The layer begins with what the copy shows otherwise than the other workspace's directory does: what the copy
has changed, and what the other workspace has changed since the boundary. That is written into the upper
directory, in the overlay's own terms, before the command starts. When its call is prepared, every path of
the layer is made in the copy what it is there.

What somebody changes in the other workspace while the command runs may show to it, as on any layer.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

from treenail.workspace.base import FileEntry, FileStat
from treenail.workspace.isolated.changes import mirror
from treenail.workspace.isolated.overlay import Overlay
from treenail.workspace.isolated.trees import Tree
from treenail.workspace.layers import CommandLayer
from treenail.workspace.packs import CHUNK_BYTES
from treenail.workspace.paths import ROOT, join

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


class CopyLayer:
    """The layer of one command in a copy."""

    def __init__(self, overlay: Overlay, layer: CommandLayer, unlike: Iterable[str]) -> None:
        self._overlay = overlay
        self.layer = layer
        self._begun = sorted(unlike, key=lambda path: path.count("/"))
        """The paths at which the copy differs from the other workspace's directory."""
        for path in self._begun:
            self._show(path)

    def _show(self, path: str) -> None:
        """Make a path of the layer what the copy has there."""
        upper, lower = Path(self.layer.upper, path), Path(self.layer.lower, path)
        if not self._lead_to(path):
            return
        status = self._overlay.status(path)
        if upper.is_dir() and not upper.is_symlink() and (status is None or not status.is_directory):
            shutil.rmtree(upper)
        if status is None:
            if os.path.lexists(lower):
                os.mknod(upper, stat.S_IFCHR, 0)
        elif status.is_directory:
            if not upper.is_dir():
                upper.mkdir()
            if not lower.is_dir() or lower.is_symlink():
                os.setxattr(upper, _OPAQUE[os.geteuid() != 0], b"y")
            upper.chmod(status.permissions)
        elif status.is_link:
            upper.symlink_to(status.link_target or "")
        else:
            with self._overlay.open(path) as stream, upper.open("xb") as writing:
                shutil.copyfileobj(stream, writing, CHUNK_BYTES)
            upper.chmod(status.permissions)

    def _lead_to(self, path: str) -> bool:
        """Have the directories that lead to a path in the layer; False if the copy does not show them."""
        above = ""
        for name in path.split("/")[:-1]:
            above = f"{above}/{name}" if above else name
            status = self._overlay.status(above)
            if status is None or not status.is_directory:
                return False
            place = Path(self.layer.upper, above)
            if not place.is_dir():
                place.mkdir()
                place.chmod(status.permissions)
        return True

    def absorb(self) -> None:
        """Make the copy what the command has left."""
        paths = set(self._begun)
        for move in self.layer.read().moves:
            paths.add(move.path)
            place = Path(self.layer.upper, move.path)
            if move.after is not None and place.is_dir() and not place.is_symlink():
                paths.update(os.path.relpath(each, self.layer.upper) for each in place.rglob("*"))
        mirror(cast("Tree", _Shown(self.layer)), self._overlay, paths - {ROOT})


class _Shown:
    """What the command saw: the upper directory over the other workspace's, as far as `mirror` looks."""

    def __init__(self, layer: CommandLayer) -> None:
        self._upper = Path(layer.upper)
        self._lower = Path(layer.lower)

    def _find(self, path: str) -> Path | None:
        """Return where what is shown at a path is, or None if nothing is."""
        place, is_merged = self._upper, True
        for name in () if path == ROOT else path.split("/"):
            place = place / name
            if not os.path.lexists(place):
                below = self._lower / path
                return below if is_merged and os.path.lexists(below) else None
            status = place.lstat()
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                return None
            is_merged = stat.S_ISDIR(status.st_mode) and not set(_OPAQUE) & set(os.listxattr(place))
        return place

    def stat(self, path: str) -> FileStat:
        place = self._find(path)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        status = place.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        return FileStat(
            path=path,
            is_file=stat.S_ISREG(status.st_mode),
            is_directory=stat.S_ISDIR(status.st_mode),
            size_bytes=status.st_size,
            is_link=is_link,
            link_target=os.readlink(place) if is_link else None,
            permissions=0o777 if is_link else status.st_mode & 0o777,
            modified_at=datetime.fromtimestamp(status.st_mtime, UTC),
        )

    def list(self, path: str) -> Iterable[FileEntry]:
        names: set[str] = set()
        for root in (self._upper, self._lower):
            with suppress(FileNotFoundError, NotADirectoryError):
                names.update(os.listdir(root / path))
        for name in sorted(names):
            with suppress(FileNotFoundError):
                status = self.stat(join(path, name))
                yield FileEntry(name, status.path, status.is_file, status.is_directory, status.is_link)

    def open_read(self, path: str) -> BinaryIO:
        place = self._find(path)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        return place.open("rb")

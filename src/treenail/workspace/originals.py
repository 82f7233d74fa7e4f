"""The files that writes have replaced, kept under a second name.

Theory of operation
-------------------
Putting a file back means making a new one, and making a file is by far the slowest step of a restore. The
file that a write is about to replace is still there, though, so it gets a second name in the store before
the first one is taken from it. Putting it back is then one rename, and it is the same file that comes
back: with its inode, its times and whatever else is attached to it.

This is a shortcut and nothing depends on it. The content is in the object store as well; what is here is
known to one process alone, is cleared up by the next one, and is used only if it is proven to be what is
wanted: a regular file with no other name, whose content has the right id. A file that somebody has written
to in the meantime through a descriptor is not. Whatever fails here, the caller makes a new file.

A file with several names is not kept, because its other names are none of ours. Nor is a large one: what is
here takes space on the disk.
"""

from __future__ import annotations

import os
import stat

from treenail.workspace.manifest import ANY, State
from treenail.workspace.objects import LARGE_BYTES, hash_descriptor
from treenail.workspace.rooted import Place, dress

MAX_ORIGINALS = 32
"""How many replaced files are kept; the oldest goes first."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Originals:
    """Replaced files of one workspace, in a directory of their own that is made when first needed."""

    def __init__(self, directory: str, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._serial = 0
        self._names: dict[tuple[str, bytes], str] = {}
        """The second name of each file, by the path that it was at and the id of its content."""

    def keep(self, place: Place, state: State, status: os.stat_result) -> None:
        """Give the file at a place a second name, if that can be done; it is about to be replaced."""
        if status.st_nlink != 1 or status.st_size >= LARGE_BYTES or state.kind != "file":
            return
        self.drop(place, state)
        self._serial += 1
        name = os.path.join(self._directory, f"{self._owner}-{self._serial:x}")
        try:
            self._link(place, name)
        except OSError:
            # Another device, a filesystem without links, a file that others own: there are many reasons.
            return
        self._names[place.path, state.oid] = name
        if len(self._names) > MAX_ORIGINALS:
            oldest = next(iter(self._names))
            _remove(self._names.pop(oldest))

    def _link(self, place: Place, name: str) -> None:
        try:
            os.link(place.name, name, src_dir_fd=place.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(self._directory, 0o700)
            os.link(place.name, name, src_dir_fd=place.descriptor, follow_symlinks=False)

    def drop(self, place: Place, state: State) -> None:
        """Take the second name away again, because the file was not replaced."""
        name = self._names.pop((place.path, state.oid), None)
        if name is not None:
            _remove(name)

    def put_back(self, place: Place, goal: State, current: State) -> bool:
        """Bring a place to its goal with the very file that was there; say whether that could be done.

        What is there now is kept in turn.
        """
        name = self._names.pop((place.path, goal.oid), None)
        if name is None:
            return False
        try:
            descriptor = os.open(name, _READ_FLAGS)
            try:
                status = os.fstat(descriptor)
                is_it = (
                    stat.S_ISREG(status.st_mode)
                    and status.st_nlink == 1
                    and status.st_size == goal.size
                    and hash_descriptor(descriptor, goal.size) == goal.oid
                )
                if is_it and not _is_dressed(status, goal):
                    dress(descriptor, goal)
            finally:
                os.close(descriptor)
            if is_it:
                # A file that was just written may be on its way to the disk, and removing it would wait
                # for that. It goes later.
                status_now = place.lstat()
                if status_now is not None:
                    self.keep(place, current, status_now)
                os.rename(name, place.name, dst_dir_fd=place.descriptor)
                return True
        except OSError:
            # The caller's own way says better than this one what is wrong, if anything is.
            self.drop(place, current)
        _remove(name)
        return False

    def clear(self) -> None:
        """Forget everything, and remove what is left here, by a process that was killed as well."""
        self._names.clear()
        clear(self._directory)


def clear(directory: str) -> None:
    """Remove every file that is kept in a directory. One that is not there is fine."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        _remove(os.path.join(directory, name))


def _is_dressed(status: os.stat_result, goal: State) -> bool:
    return (
        status.st_mtime_ns == goal.mtime_ns
        and goal.mode in (ANY, stat.S_IMODE(status.st_mode))
        and goal.uid in (ANY, status.st_uid)
        and goal.gid in (ANY, status.st_gid)
    )


def _remove(name: str) -> None:
    try:
        os.unlink(name)
    except OSError:
        # It was not kept after all, or another process has cleared up.
        pass

"""A directory on disk that no path can leave.

Theory of operation
-------------------
Checking a path and then using it is a race: a process that can make a link can swap one in between. So
nothing here hands a path of several segments to the operating system. A walk starts at a descriptor of the
root and opens one segment at a time with O_NOFOLLOW. What the walk arrives at is a `Place`: an open directory
and one name in it; every operation on it is relative to that descriptor and does not follow the name.

A link on the way is read and walked by the same rules, so a link that stays inside may be used and one
that leaves is refused; `..` in a link's target climbs our own stack of descriptors and stops at the root.
A link that appears after the walk makes the operation fail. Links that are more than text, like those in
/proc, are only ever read as text.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from treenail.errors import PathEscapeError
from treenail.workspace.disk import write_all
from treenail.workspace.manifest import ABSENT, OTHER, State
from treenail.workspace.objects import ObjectStore, hash_descriptor
from treenail.workspace.packs import CHUNK_BYTES, hash_object
from treenail.workspace.paths import MAX_LINKS, ROOT, fail, split

NOREPLACE, EXCHANGE = 1, 2
"""How `rename_at` treats what is at the target: it is in the way, or changes places with the source."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_READ_ATTEMPTS = 5
_WALK_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an error of the operating system name the workspace path that it is about."""
    try:
        yield
    except PathEscapeError:
        raise
    except OSError as error:
        error.filename = path
        raise


class Place:
    """A name in an open directory. Use it as a context manager: it owns the descriptor.

    `path` is where it is, free of links. `rest` are the segments below `name` that a walk could
    not reach because `name` does not exist.
    """

    __slots__ = ("descriptor", "name", "path", "rest")

    def __init__(self, descriptor: int, name: str, path: str, rest: tuple[str, ...] = ()) -> None:
        self.descriptor = descriptor
        self.name = name
        self.path = path
        self.rest = rest

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def lstat(self) -> os.stat_result | None:
        """Return what is at the place, a link undisturbed, or None if nothing is."""
        if self.rest:
            return None
        try:
            return os.stat(self.name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None


class RootedDirectory:
    """Access to everything below one directory, and to nothing else."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._prefix = self.path.rstrip("/") + "/"

    def open(self) -> int:
        """Return a descriptor of the root itself."""
        return os.open(self.path, _WALK_FLAGS)

    def open_for_listing(self) -> int:
        """Return a descriptor of the root that can be listed."""
        return os.open(self.path, _LIST_FLAGS)

    def walk(self, path: str, *, follow: bool) -> Place:
        """Go to a normalised path. Links on the way are followed, one at its end if `follow`.

        Raises `PathEscapeError` if a link leads out of the root, and the `OSError` that fits if a
        file is in the way or links lead in a circle. What is missing is the place's to say.
        """
        pending = list(reversed(split(path)))
        if not pending:
            return Place(self.open(), ROOT, ROOT)
        names: list[str] = []
        descriptors = [self.open()]
        links = 0
        try:
            while pending:
                name = pending.pop()
                if name == "..":
                    if not names:
                        self._escape(path)
                    names.pop()
                    os.close(descriptors.pop())
                    continue
                here = descriptors[-1]
                target: str | None = None
                if pending:
                    try:
                        descriptors.append(os.open(name, _WALK_FLAGS, dir_fd=here))
                    except FileNotFoundError:
                        if ".." in pending:
                            fail(errno.ENOENT, "no such file or directory", path)
                        return Place(
                            descriptors.pop(), name, "/".join((*names, name)), tuple(reversed(pending))
                        )
                    except OSError as error:
                        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                            raise
                        target = self._link_target(here, name)
                        if target is None:
                            fail(errno.ENOTDIR, f"{'/'.join((*names, name))!r} is not a directory", path)
                    else:
                        names.append(name)
                        continue
                elif follow:
                    target = self._link_target(here, name)
                if target is None:
                    return Place(descriptors.pop(), name, "/".join((*names, name)))
                links += 1
                if links > MAX_LINKS:
                    fail(errno.ELOOP, "the links on this path lead in a circle", path)
                if target.startswith("/"):
                    if not (target + "/").startswith(self._prefix):
                        self._escape(path)
                    target = target[len(self._prefix) :]
                    while names:
                        names.pop()
                        os.close(descriptors.pop())
                pending.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
            # A link led to a directory that the walk has already been to, such as the root.
            return self.walk("/".join(names) or ROOT, follow=False)
        except OSError as error:
            if not isinstance(error, PathEscapeError):
                error.filename = path
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def strict(self, path: str) -> Place:
        """Go to a normalised path on which there is no link, as paths in a journal are.

        Raises `FileNotFoundError` or `NotADirectoryError` if the directories are not as they were.
        """
        segments = split(path)
        if not segments:
            return Place(self.open(), ROOT, ROOT)
        descriptor = self.open()
        try:
            for segment in segments[:-1]:
                below = os.open(segment, _WALK_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
        except OSError as error:
            os.close(descriptor)
            error.filename = path
            raise
        return Place(descriptor, segments[-1], path)

    @staticmethod
    def _link_target(directory: int, name: str) -> str | None:
        try:
            return os.readlink(name, dir_fd=directory)
        except OSError as error:
            # EINVAL: it is there and is not a link.
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def _escape(self, path: str) -> NoReturn:
        raise PathEscapeError(
            f"the path {path!r} leads out of the workspace through a link; "
            f"use paths that stay below the workspace root"
        )


def open_file(place: Place, path: str) -> int:
    """Open a regular file for reading; anything else is refused. `path` is for the messages."""
    with naming(path):
        status = place.lstat()
        if status is None:
            fail(errno.ENOENT, "no such file or directory", path)
        # Before opening: opening a device may already do something.
        _require_file(status, path)
        descriptor = os.open(place.name, _READ_FLAGS, dir_fd=place.descriptor)
        try:
            _require_file(os.fstat(descriptor), path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _require_file(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        fail(errno.EISDIR, "this is a directory, not a file", path)
    if not stat.S_ISREG(status.st_mode):
        fail(
            errno.EACCES,
            "this is neither a file nor a directory; devices, pipes and sockets are refused",
            path,
        )


def open_directory(place: Place, path: str) -> int:
    """Open a directory for listing. `path` is for the messages."""
    with naming(path):
        return os.open(place.name, _LIST_FLAGS, dir_fd=place.descriptor)


def look(place: Place, store: ObjectStore | None) -> State:
    """Return the state of a place; with a store, its content is kept there."""
    for _ in range(_READ_ATTEMPTS):
        status = place.lstat()
        if status is None:
            return ABSENT
        if stat.S_ISDIR(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            return State("directory", mode, uid=status.st_uid, gid=status.st_gid)
        try:
            if stat.S_ISLNK(status.st_mode):
                target = os.fsencode(os.readlink(place.name, dir_fd=place.descriptor))
                oid = hash_object("blob", target) if store is None else store.write("blob", target)
                return State(
                    "link", 0o777, oid, len(target), status.st_mtime_ns, status.st_uid, status.st_gid
                )
            if not stat.S_ISREG(status.st_mode):
                return OTHER
            descriptor = os.open(place.name, _READ_FLAGS, dir_fd=place.descriptor)
        except FileNotFoundError:
            continue
        except OSError as error:
            # It was swapped for something else since the look at it.
            if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
                continue
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                continue
            if store is None:
                content = hash_descriptor(descriptor, status.st_size)
            else:
                content = store.write_descriptor(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if content is not None:
            return State(
                "file",
                stat.S_IMODE(status.st_mode),
                content,
                status.st_size,
                status.st_mtime_ns,
                status.st_uid,
                status.st_gid,
            )
    raise OSError(
        errno.EBUSY, "the file keeps changing while it is read; try again when its writer is done", place.path
    )


def create_temporary(place: Place, temporary: str, mode: int) -> int:
    """Make the temporary file that will take a place, beside it."""
    return os.open(temporary, _CREATE_FLAGS, mode, dir_fd=place.descriptor)


def take_place(place: Place, temporary: str) -> None:
    """Let a temporary file take its place, in one step."""
    os.rename(temporary, place.name, src_dir_fd=place.descriptor, dst_dir_fd=place.descriptor)


def rename_at(source: Place, target: Place, flags: int) -> None:
    """Rename with flags. Raises `OSError` with one of `_UNSUPPORTED` where the system cannot."""
    names = os.fsencode(source.name), os.fsencode(target.name)
    rename = getattr(_LIBC, "renameat2", None)
    if rename is None or rename(source.descriptor, names[0], target.descriptor, names[1], flags):
        number = errno.ENOSYS if rename is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), target.path)


def replace_seen(source: Place, target: Place, seen: State) -> bool:
    """Let a file take another place, in one step, unless that does not hold what was seen there any more.

    Returns whether it did: what somebody else has put there since is back in its place, untouched.
    """
    try:
        ours = source.lstat()
        rename_at(source, target, NOREPLACE if seen.kind == "absent" else EXCHANGE)
    except FileExistsError:
        return False
    except FileNotFoundError:
        # Somebody else removed what was there, and the source waits in its place.
        if ours is None or source.lstat() is None:
            raise
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not _holds(target, seen):
            return False
        os.rename(source.name, target.name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
        return True
    if seen.kind == "absent":
        return True
    if _holds(source, seen):
        os.unlink(source.name, dir_fd=source.descriptor)
        return True
    rename_at(source, target, EXCHANGE)
    back = source.lstat()
    if back is not None and ours is not None and not os.path.samestat(back, ours):
        # They have saved once more meanwhile: that is the newest, and not ours to take away.
        rename_at(source, target, EXCHANGE)
    return False


def remove_seen(place: Place, temporary: str, seen: State) -> bool:
    """Remove a file or a link, and say so, unless it is not what was seen any more: then it stays."""
    aside = Place(place.descriptor, temporary, place.path)
    os.rename(place.name, temporary, src_dir_fd=place.descriptor, dst_dir_fd=place.descriptor)
    if _holds(aside, seen):
        os.unlink(temporary, dir_fd=place.descriptor)
        return True
    try:
        rename_at(aside, place, NOREPLACE)
    except FileExistsError:
        # They have saved once more meanwhile: that is the newest.
        os.unlink(temporary, dir_fd=place.descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.rename(temporary, place.name, src_dir_fd=place.descriptor, dst_dir_fd=place.descriptor)
    return False


def _holds(place: Place, seen: State) -> bool:
    """Say whether the bytes at a place are those of a state."""
    now = look(place, None)
    return now.kind == seen.kind and now.oid == seen.oid


def discard(place: Place, temporary: str) -> None:
    """Remove a temporary file beside a place; one that is not there is fine."""
    try:
        os.unlink(temporary, dir_fd=place.descriptor)
    except FileNotFoundError:
        pass


def put_file(
    place: Place,
    temporary: str,
    chunks: Iterable[bytes],
    *,
    like: os.stat_result | State | None,
    sync: bool,
    seen: State,
) -> bool:
    """Put a file in place with new content. `like` gives permission bits, owner and (a state) its time.

    Returns whether it did: if the place does not hold what was seen any more, nothing is done.
    """
    descriptor = create_temporary(place, temporary, 0o666 if like is None else 0o600)
    try:
        try:
            for chunk in chunks:
                write_all(descriptor, chunk)
            if like is not None:
                dress(descriptor, like)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _take_place_seen(place, temporary, seen)
    except BaseException:
        discard(place, temporary)
        raise


def put_link(place: Place, temporary: str, target: bytes, *, seen: State) -> bool:
    """Put a link in place, replacing a file or a link, unless it does not hold what was seen any more."""
    os.symlink(os.fsdecode(target), temporary, dir_fd=place.descriptor)
    try:
        return _take_place_seen(place, temporary, seen)
    except BaseException:
        discard(place, temporary)
        raise


def _take_place_seen(place: Place, temporary: str, seen: State) -> bool:
    is_done = replace_seen(Place(place.descriptor, temporary, place.path), place, seen)
    if not is_done:
        discard(place, temporary)
    return is_done


def dress(descriptor: int, like: os.stat_result | State) -> None:
    """Give an open file the permission bits and owner of another, and a state's time."""
    if isinstance(like, State):
        uid, gid, mode = like.uid, like.gid, like.mode
    else:
        uid, gid, mode = like.st_uid, like.st_gid, stat.S_IMODE(like.st_mode)
    own(descriptor, uid, gid)
    if mode >= 0:
        # After the owner: changing that takes set-user-id bits away.
        os.fchmod(descriptor, mode)
    if isinstance(like, State) and like.kind == "file":
        os.utime(descriptor, ns=(like.mtime_ns, like.mtime_ns))


def own(descriptor: int, uid: int, gid: int) -> None:
    """Give an open file its owner, as far as this process may."""
    status = os.fstat(descriptor)
    if (uid >= 0 and uid != status.st_uid) or (gid >= 0 and gid != status.st_gid):
        try:
            os.fchown(descriptor, uid, gid)
        except PermissionError:
            # Without privileges a file that is put back belongs to this process.
            pass


def change_mode(place: Place, mode: int) -> None:
    """Set the permission bits of a file or directory; a link is left alone."""
    chmod_at(place.descriptor, place.name, mode)


def chmod_at(directory: int, name: str, mode: int) -> None:
    """Set permission bits without following a link and without needing to read the file."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            return
        if hasattr(os, "O_PATH"):
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        else:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def copy_tree(
    source: int,
    destination: int,
    *,
    skip: str | None,
    is_temporary: Callable[[str], bool],
    path: str = "",
) -> None:
    """Copy everything below one open directory into another: content, links, bits, owners and times.

    The path `skip` is left out. Half-written files, pipes, sockets, devices and what may not be read are
    left out, too.
    """
    for name in os.listdir(source):
        below = f"{path}/{name}" if path else name
        if below == skip or is_temporary(name):
            continue
        try:
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
        except PermissionError:
            continue
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=destination)
        elif stat.S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=destination)
            try:
                inner_source = os.open(name, _LIST_FLAGS, dir_fd=source)
            except PermissionError:
                chmod_at(destination, name, stat.S_IMODE(status.st_mode))
                continue
            inner_destination = os.open(name, _LIST_FLAGS, dir_fd=destination)
            try:
                copy_tree(inner_source, inner_destination, skip=skip, is_temporary=is_temporary, path=below)
                dress(inner_destination, status)
            finally:
                os.close(inner_source)
                os.close(inner_destination)
        elif stat.S_ISREG(status.st_mode):
            _copy_file(source, destination, name)


def _copy_file(source: int, destination: int, name: str) -> None:
    try:
        reading = os.open(name, _READ_FLAGS, dir_fd=source)
    except PermissionError:
        return
    try:
        status = os.fstat(reading)
        writing = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=destination)
        try:
            while chunk := os.read(reading, CHUNK_BYTES):
                write_all(writing, chunk)
            dress(writing, status)
            os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)

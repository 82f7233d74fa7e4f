"""One workspace, one writing process: a lock that only a living process keeps, and an epoch.

Theory of operation
-------------------
A log is fenced by its lease, the files of a workspace by this. The private store has one file for each
workspace directory. Its record says which process writes there, since when, and how often the writer has
changed: the epoch.

The writer has a POSIX lock on that file. Such a lock belongs to a process: the kernel drops it when the
process ends, however it ends; a process that is stopped keeps it; a forked child never has it, and neither
does a program that is executed, since the descriptor is closed on exec. Whoever finds it taken is refused
and told who has it. All objects of one process share it: subagents, parallel calls, several runs.

Becoming the writer raises the epoch. Before each change the writer reads the record again. If it is not the
one that it wrote, the lock was lost (another program closed the descriptor, a network filesystem forgot it)
and somebody else may have become the writer: every further change is refused, an undo included.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import NamedTuple
from weakref import WeakValueDictionary

from treenail.errors import StaleWorkspaceError, WorkspaceBusyError
from treenail.log import end_owner, owner_is_alive, owner_of, owner_process, this_process_owner

_MAX_RECORD_BYTES = 4096


class Writer(NamedTuple):
    """What the record says: who writes, or wrote last."""

    epoch: int = 0
    owner: str = ""
    """The process that writes, as `this_process_owner` names it; empty if none does."""
    since: str = ""

    @property
    def is_other(self) -> bool:
        """Whether it is a process that lives, and not this one."""
        return owner_process(self.owner) != os.getpid() and owner_is_alive(self.owner) is True


class WriterLock:
    """This process's way to become the writer of one workspace. Get it with `writer_lock`."""

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        self.root = root
        self._descriptor = -1
        self._record = b""
        """What the file says while this process is the writer."""
        self._users = 0
        self._mutex = threading.Lock()

    def take(self) -> tuple[int, int]:
        """Become the writer, once more if this process is it already. Return the epochs before and now.

        Raises `WorkspaceBusyError` while another process is the writer.
        """
        with self._mutex:
            if self._users == 0:
                before = self._become()
            else:
                self._check()
                before = _parsed(self._record)
            self._users += 1
            return before.epoch, _parsed(self._record).epoch

    def check(self) -> None:
        """Raise `StaleWorkspaceError` if this process is not the writer any more."""
        with self._mutex:
            self._check()

    def give_back(self) -> None:
        """Take back one `take`; after the last one another process may become the writer."""
        with self._mutex:
            if self._users > 1:
                self._users -= 1
                return
            self._users = 0
            if self._descriptor != -1:
                try:
                    if self._is_mine():
                        self._write(_parsed(self._record)._replace(owner="", since=""))
                finally:
                    self._let_go()

    def other(self) -> Writer | None:
        """Return the process that is the writer, if it is another one that lives."""
        with self._mutex:
            if self._users:
                return None
            # Closing the file would drop the lock of a process that has it; this one does not.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                return _other(descriptor)
            finally:
                os.close(descriptor)

    def end_other(self) -> bool:
        """End the other process that is the writer, and wait until it is gone. Says whether there was one.

        Raises `WorkspaceBusyError` if it cannot be ended from here; then nothing has changed.
        """
        found = self.other()
        if found is None:
            return False
        try:
            is_gone = end_owner(found.owner)
        except OSError as error:
            raise self._busy(found, f"it could not be ended ({error.strerror}); end it yourself") from error
        if not is_gone:
            raise self._busy(found, "it cannot be ended from here; end it where it runs")
        return True

    def forget(self) -> None:
        """Forget the lock, in a child that was forked from the writer."""
        self._mutex = threading.Lock()
        self._users = 0
        self._record = b""
        self._let_go()

    def _become(self) -> Writer:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_locked = _lock(self._descriptor)
            other = _other(self._descriptor)
            if other is not None or not is_locked:
                advice = "wait until its turn is over, or end it with --take-over"
                raise self._busy(other or Writer(), advice)
            before = _read(self._descriptor)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._write(Writer(before.epoch + 1, this_process_owner(), now))
        except BaseException:
            self._let_go()
            raise
        return before

    def _check(self) -> None:
        if not self._is_mine():
            found = _parsed(b"") if self._descriptor == -1 else _read(self._descriptor)
            who = f"; {_named(found)} has become its writer" if found.owner else ""
            raise StaleWorkspaceError(
                f"this process is not the writer of the workspace {self.root} any more{who}; nothing was "
                "changed: open the run again to continue it"
            )

    def _is_mine(self) -> bool:
        if self._descriptor == -1 or not self._record:
            return False
        try:
            found = os.pread(self._descriptor, _MAX_RECORD_BYTES, 0)
            return found == self._record and os.fstat(self._descriptor).st_nlink > 0
        except OSError:
            return False

    def _write(self, writer: Writer) -> None:
        self._record = json.dumps(writer._asdict()).encode("utf-8") + b"\n"
        os.pwrite(self._descriptor, self._record, 0)
        os.ftruncate(self._descriptor, len(self._record))

    def _let_go(self) -> None:
        descriptor, self._descriptor, self._record = self._descriptor, -1, b""
        if descriptor != -1:
            try:
                os.close(descriptor)
            except OSError:  # another program closed it
                pass

    def _busy(self, found: Writer, advice: str) -> WorkspaceBusyError:
        return WorkspaceBusyError(
            f"{_named(found)} is writing to the workspace {self.root}"
            f"{f', since {found.since}' if found.since else ''}; {advice}",
            owner=found.owner,
            since=found.since,
        )


def _named(found: Writer) -> str:
    pid = owner_process(found.owner)
    if pid is None:
        return "a process of another container or machine"
    return f"process {pid}{' (which is stopped)' if _is_stopped(pid) else ''}"


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _other(descriptor: int) -> Writer | None:
    """Return the other living process that is the writer, if there is one.

    The record alone counts: a lock can be lost while its process lives. So does the lock alone: its process
    may have been stopped before it wrote the record.
    """
    found = _read(descriptor)
    if found.is_other:
        return found
    pid = _locked_by(descriptor)
    return None if pid is None else Writer(found.epoch, owner_of(pid) if pid > 0 else found.owner)


def _locked_by(descriptor: int) -> int | None:
    """Return the other process that has the lock, or None; 0 if its number is unknown here."""
    if sys.platform != "linux":
        return None if _lock(descriptor) else 0
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _read(descriptor: int) -> Writer:
    return _parsed(os.pread(descriptor, _MAX_RECORD_BYTES, 0))


def _parsed(record: bytes) -> Writer:
    """Read a record; a new or a torn one means that there is no writer."""
    try:
        return Writer(**json.loads(record.partition(b"\n")[0])) if record else Writer()
    except (ValueError, TypeError):
        return Writer()


_locks: WeakValueDictionary[str, WriterLock] = WeakValueDictionary()
_locks_mutex = threading.Lock()


def writer_lock(path: str, root: str) -> WriterLock:
    """Return the lock that all objects of this process on a workspace share."""
    with _locks_mutex:
        return _locks.setdefault(path, WriterLock(path, root))


def _forget_in_child() -> None:
    _locks_mutex.release()
    for each in list(_locks.values()):
        each.forget()


os.register_at_fork(
    before=_locks_mutex.acquire, after_in_parent=_locks_mutex.release, after_in_child=_forget_in_child
)


def writer_for_turn(filesystem: object) -> AbstractContextManager[object]:
    """Span a turn: release the workspace, which the turn's first effect takes, when the block ends."""
    turn = getattr(filesystem, "turn", None)
    return nullcontext() if turn is None else turn()


def rest_writer(filesystem: object) -> None:
    """Let another process write while a person is waited for; the next effect takes the workspace again."""
    rest = getattr(filesystem, "rest", None)
    if rest is not None:
        rest()

"""One SQLite file that several threads and processes use: opening, transactions, forks.

Theory of operation
-------------------
**Transactions.** Every change is one `BEGIN IMMEDIATE` transaction, and every look is one read
transaction. Whatever goes wrong in it (a full disk, an interrupt between two statements) rolls it back
and leaves the connection usable. A file that others have locked is tried again until the wait is over,
also while it is being made for the first time.

A signal handler or a finalizer may run between any two steps of a thread, and the lock does not keep it
out. It is refused: its own transaction would end the one that it interrupted.

**Opening.** A file is first looked at through a read-only connection, which changes nothing, not even on
closing: a file of another application or of a newer Treenail is left byte for byte as it was. A file
whose structure is damaged stays on that connection and can only be read.

**Locks.** POSIX drops all locks that a process holds on a file when it closes *any* descriptor of that
file. Hence the database file is never opened by hand: everything is asked through SQLite or `stat`. For
the same family of reasons a connection must not cross a `fork`: SQLite in the child would believe in
locks that only the parent holds, and the parent's `close` would delete a WAL that the child still writes
to. So connections are closed just before a fork and opened again, by each side, when next needed.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakSet

from treenail.clock import SystemClock
from treenail.errors import LogBusyError, LogDamagedError, LogError, ReadOnlyError, UsageError
from treenail.log.base import Damage
from treenail.log.sqlite.failures import code_of, is_busy, is_damage, translated
from treenail.log.sqlite.migrations import migrate, version_of

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_PAGE_BYTES = 4096
_WAL_KEEP_BYTES = 16 * 1024 * 1024
_SQLITE_WAIT_S = 0.2
"""How long SQLite itself waits for a lock; the rest of the wait is ours, so that it can be interrupted."""
_FORK_WAIT_S = 60.0
_REAL_TIME = SystemClock()
"""Waiting for other processes takes real time, whatever clock the leases use."""


def size_of(path: Path) -> int | None:
    """Return a file's size without opening it, or None if there is no such file."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


class Database:
    """The file `path`, opened when first needed, for any thread of any process that asks."""

    def __init__(
        self,
        path: Path,
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        busy_timeout_s: float = 30.0,
        read_only: bool = False,
    ) -> None:
        self.path = path
        # Beside the file itself, if the path is a link to it.
        self.wal_path = Path(f"{os.path.realpath(path)}-wal")
        self.damage: Damage | None = None
        """Why the file can only be read, if it is damaged as a whole."""
        self._synchronous = synchronous
        self._busy_timeout_s = busy_timeout_s
        self._read_only = read_only
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._in_use = False
        """Whether the thread that has the lock is using the connection."""
        self._lock = threading.RLock()
        _DATABASES.add(self)

    def __del__(self) -> None:
        self._disconnect()

    def close(self) -> None:
        """Close the file for good."""
        with self._lock:
            self._closed = True
            self._disconnect()

    # --- transactions ----------------------------------------------------------------------------------

    def read(self, doing: str, work: Work[T]) -> T:
        """Do the work on one state of the file. An error says that it was not possible to do `doing`."""
        return self._run(doing, work, "BEGIN")

    def write(self, doing: str, work: Work[T]) -> T:
        """Do the work in one transaction: all of it, or nothing."""
        return self._run(doing, work, "BEGIN IMMEDIATE")

    def maintain(self, doing: str, work: Work[T]) -> T:
        """Do the work outside of a transaction, as SQLite's own upkeep needs it."""
        return self._run(doing, work, None)

    def _run(self, doing: str, work: Work[T], begin: str | None) -> T:
        with self._lock:
            if self._in_use:
                raise LogBusyError(
                    f"could not {doing}: this thread is itself in a transaction on {self.path}, which a "
                    f"signal handler or a finalizer has interrupted; do it afterwards"
                )
            self._in_use = True
            try:
                return self._try_until_free(doing, work, begin)
            finally:
                self._in_use = False

    def _try_until_free(self, doing: str, work: Work[T], begin: str | None) -> T:
        deadline: float | None = None
        while True:
            try:
                return self._attempt(work, begin)
            except BaseException as error:
                self._roll_back()
                if not is_busy(error):
                    ours = translated(self.path, doing, error)
                    if ours is error:
                        raise
                    raise ours from error
                now = _REAL_TIME.monotonic()
                # SQLite itself has waited before it said so for the first time.
                deadline = now + self._busy_timeout_s - _SQLITE_WAIT_S if deadline is None else deadline
                if now >= deadline:
                    raise LogBusyError(
                        f"could not {doing}: {self.path} stayed in use by others for "
                        f"{self._busy_timeout_s:g} s; try again, or find out who holds it"
                    ) from error
            # Not in step with the others who wait.
            _REAL_TIME.sleep(random.uniform(0.002, 0.02))

    def _attempt(self, work: Work[T], begin: str | None) -> T:
        writes = begin != "BEGIN"
        connection = self._connected(writes)
        if begin is not None:
            connection.execute(begin)
        if writes:
            self._refuse_if_replaced()
        result = work(connection)
        if begin is not None:
            # A damaged file refuses to commit even what has only been read.
            connection.execute("COMMIT" if writes else "ROLLBACK")
        return result

    def _roll_back(self) -> None:
        """Leave no transaction open behind a failure."""
        connection = self._connection
        if connection is not None and connection.in_transaction:
            try:
                connection.rollback()
            except sqlite3.Error:
                # A connection that cannot even roll back is thrown away; closing it rolls back.
                self._disconnect()

    def _connected(self, writes: bool) -> sqlite3.Connection:
        if self._closed:
            raise UsageError(f"the log in {self.path} was closed; open it again")
        if self._pid != os.getpid():
            raise LogError(
                f"this process was forked, not by Python, while {self.path} was open; its connection must "
                f"not be used on both sides; fork with os.fork or multiprocessing, or open it after the fork"
            )
        if writes and self._read_only:
            raise ReadOnlyError(f"{self.path} was opened with read_only=True; open it without to change it")
        self._roll_back()  # An interrupt may have hit the clean-up of an earlier failure.
        if self._connection is None:
            self._connection = self._open()
        if writes and self.damage is not None:
            raise sqlite3.DatabaseError(self.damage.message)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _refuse_if_replaced(self) -> None:
        """Refuse to write into a file that is no longer at its path."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise LogError(
                f"{self.path} was removed or replaced while it was open; nothing was written; "
                f"put it back or open the log anew"
            )

    # --- opening ---------------------------------------------------------------------------------------

    def _connect(self, mode: Literal["ro", "rwc"]) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}",
            uri=True,
            timeout=_SQLITE_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
        )

    def _open(self) -> sqlite3.Connection:
        """Look at the file without changing it, then open it for good."""
        # In this order: a process that makes a new file writes to the file before it writes to the WAL.
        wal_size = size_of(self.wal_path)
        size = size_of(self.path)
        if not size and wal_size:
            raise LogDamagedError(
                f"{self.path} is {'missing' if size is None else 'empty'}, but {self.wal_path.name} beside "
                f"it holds data that belongs to it; opening it would destroy that data, so nothing was "
                f"touched; restore the file, or move both away to begin anew"
            )
        self._pid = os.getpid()
        if self._identity is not None:
            # Opened before, and closed for a fork or after a failure: it must be the same file.
            self._refuse_if_replaced()
        if not size:
            if self._read_only:
                raise LogError(f"there is no log in {self.path} ({'empty' if size == 0 else 'no such file'})")
            return self._open_for_writing()
        if size < _PAGE_BYTES:
            # SQLite would take this for a new database and write over it.
            raise sqlite3.DatabaseError(f"it has only {size} bytes, less than the first page of a database")
        return self._open_for_reading() or self._open_for_writing()

    def _open_for_reading(self) -> sqlite3.Connection | None:
        """Return a connection if the file may only be read, damaged or by request."""
        connection = self._connect("ro")
        try:
            version = self._look(connection)
            if version == 0 and self._read_only:
                raise LogError(f"there is no log in {self.path}: the database is empty")
            if self.damage is not None or self._read_only:
                connection.execute("PRAGMA writable_schema = ON")
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA cell_size_check = ON")
                return connection
        except BaseException as error:
            connection.close()
            if code_of(error) == sqlite3.SQLITE_READONLY and not self._read_only:
                # A journal from a crash at the very first start must be played back, which needs writing.
                return None
            raise
        connection.close()
        return None

    def _look(self, connection: sqlite3.Connection) -> int:
        """Return the schema's version, and note whether the file is damaged as a whole."""
        try:
            return version_of(connection, self.path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            if code_of(error) == sqlite3.SQLITE_NOTADB:
                raise sqlite3.DatabaseError(
                    "it is not a SQLite database, or its first page was overwritten"
                ) from error
            # With this setting SQLite reads what there is of a file that is shorter than it says.
            connection.execute("PRAGMA writable_schema = ON")
            version = version_of(connection, self.path)
            self.damage = Damage("unreadable", f"it is cut off or its structure is damaged ({error})")
            return version

    def _open_for_writing(self) -> sqlite3.Connection:
        connection = self._connect("rwc")
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA fullfsync = ON")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_KEEP_BYTES}")
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise LogError(
                    f"{self.path} cannot be used in WAL mode (SQLite says {mode!r}); use a local disk"
                )
            migrate(connection, self.path)
            found = os.stat(self.path)
            self._identity = (found.st_dev, found.st_ino)
        except BaseException:
            connection.close()
            raise
        return connection

    # --- forks -----------------------------------------------------------------------------------------

    def pause(self) -> bool:
        """Close the connection before this process forks, when a transaction under way is over.

        Returns False if a transaction did not end in time. If True, call `resume` after the fork.
        """
        if not self._lock.acquire(timeout=_FORK_WAIT_S):
            return False
        if not self._in_use:  # Else a signal handler forks in the middle of this thread's own transaction.
            self._disconnect()
        return True

    def resume(self) -> None:
        """Let the parent of a fork use the file again."""
        self._lock.release()

    def adopt(self) -> None:
        """Make the child of a fork a user of its own, unless it has a connection of its parent's."""
        self._lock = threading.RLock()
        self._in_use = False
        if self._connection is None:
            self._pid = os.getpid()


_DATABASES: WeakSet[Database] = WeakSet()
_paused: dict[int, list[Database]] = {}
"""What each thread that is about to fork has paused."""


def _before_fork() -> None:
    _paused[threading.get_ident()] = [each for each in list(_DATABASES) if each.pause()]


def _after_fork_in_parent() -> None:
    for database in _paused.pop(threading.get_ident(), ()):
        database.resume()


def _after_fork_in_child() -> None:
    _paused.clear()
    for database in list(_DATABASES):
        database.adopt()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)

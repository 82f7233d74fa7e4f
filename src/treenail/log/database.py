"""One SQLite file that several threads and processes use: opening, transactions, errors.

Theory of operation
-------------------
**Transactions.** Every change is one `BEGIN IMMEDIATE` transaction, or one statement,
which is a transaction by itself. Whatever goes wrong in it (a full disk, an interrupt
between two statements) rolls it back and leaves the connection usable. A file that
others have locked is tried again until the wait is over, also while it is being made
for the first time.

A signal handler or a finalizer may run between any two steps of a thread, and the
lock does not keep it out. It must not use the connection while there is a transaction
on it: its own would end that one, and zeros (below) could fall on what it has written.

**The WAL's room.** Syncing a file that has grown takes a file system about twice as
long as syncing one that was only written to, because its new length must be made
durable as well. So whoever waits for the disk at each commit writes zeros behind what
is in the `-wal`, a piece at a time, before SQLite gets there. SQLite takes nothing for a
frame that does not have its checksum. It is done inside a transaction, where nobody
else writes to that file, and only up to the length from which SQLite begins anew at
its start.

**Opening.** A file is first looked at through a read-only connection, which
changes nothing, not even on closing: a file of another application or of a newer
Treenail is left byte for byte as it was. A file whose structure is damaged stays
on that connection and can only be read. `wal.py` tells a torn last write, which
is passed over, from lost commits, which are damage.

**Locks.** POSIX drops all locks that a process holds on a file when it closes
*any* descriptor of that file. Hence neither the database file nor its `-shm` may
ever be opened by hand while a connection is open: everything is asked through
SQLite or `stat`. For the same family of reasons a connection must not cross a
`fork`: SQLite in the child would believe in locks that only the parent holds,
and the parent's `close` would delete a WAL that the child still writes to. So
connections are closed just before a fork and opened again, by each side, when
next needed.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar
from uuid import UUID
from weakref import WeakSet, finalize

from treenail.clock import SystemClock
from treenail.errors import (
    LogBusyError,
    LogDamagedError,
    LogError,
    LogVersionError,
    ReadOnlyError,
    UsageError,
)
from treenail.log import wal
from treenail.log.base import Finding
from treenail.log.migrations import APPLICATION_ID, LATEST, MIGRATIONS, expected_schema

T = TypeVar("T")

_PAGE_BYTES = 4096
_WAL_KEEP_BYTES = 16 * 1024 * 1024
_WAL_LEAST_ROOM, _WAL_MOST_ROOM = 64 * 1024, 512 * 1024
"""How many zeros are written behind the WAL at once: as many bytes as it has, within these bounds."""
_WAL_FULL_BYTES = 1024 * (_PAGE_BYTES + 24)
"""SQLite begins anew at a WAL's start when it has 1000 frames, each a page with 24 bytes in front."""
_SQLITE_WAIT_S = 0.2
"""How long SQLite itself waits for a lock; the rest of the wait is ours, so that it can be interrupted."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_NOT_DAMAGE = _BUSY | {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_NOMEM,
}
_DAMAGED_IO = frozenset({sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS})
_REAL_TIME = SystemClock()
"""Waiting for other processes takes real time, whatever clock the leases use."""


def _code(error: BaseException) -> int:
    """Return SQLite's primary result code, or 0 for an error that came from its Python side."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def still_in_use(message: str) -> sqlite3.OperationalError:
    """Make the error with which SQLite says that it must be tried again, for what it says in other ways."""
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


def _named(doing: str, session_id: UUID | None) -> str:
    return doing if session_id is None else f"{doing} {session_id}"


def _running(statement: str, values: tuple[object, ...]) -> Callable[[sqlite3.Connection], bool]:
    return lambda connection: connection.execute(statement, values).rowcount > 0


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
        self._path_text = os.fspath(path)
        # Beside the file itself, if the path is a link to it.
        self.wal_path = Path(f"{os.path.realpath(path)}-wal")
        self.findings: tuple[Finding, ...] = ()
        """What was found wrong with the file as a whole when it was opened."""
        self.version = 0
        """The schema version of the file."""
        self._synchronous = synchronous
        self._busy_timeout_s = busy_timeout_s
        self._read_only = read_only
        self.damage: str | None = None
        """Why the file can only be read, if it is damaged as a whole."""
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._pid = os.getpid()
        self._let_go: finalize[..., Database] | None = None
        """Closes the connection and the `-wal` file, at the latest when nobody has this any more."""
        self._wal_descriptor: int | None = None
        """The `-wal` file, if it may be written. It carries no locks, so it may be opened by hand."""
        self._wal_bytes = 0
        """How long that file was when it was last given room."""
        self._wal_length = 0
        """How long it was when it was last looked at, which is before everything that is written."""
        self._closed = False
        self._in_use = False
        """Whether the thread that has the lock is in `run`."""
        self.lock = threading.RLock()
        """Held while the connection is used; by a caller, so that nobody comes between two uses."""
        _DATABASES.add(self)

    def close(self) -> None:
        """Close the file for good."""
        with self.lock:
            self._closed = True
            self._disconnect()

    def write(self, doing: str, work: Callable[[sqlite3.Connection], T], session_id: UUID | None = None) -> T:
        """Do the work in one transaction: all of it, or nothing."""
        return self.run(doing, work, session_id, writes=True, transaction=True)

    def write_at_once(self, doing: str, statement: str, values: tuple[object, ...], session_id: UUID) -> bool:
        """Run one statement, which is a transaction by itself. Says whether it changed anything."""
        if self._in_use:
            self._refuse_in_between(doing, session_id)
        try:
            connection = self._connected(True)
            self._refuse_if_replaced()
            if not self._lacks_room():
                return connection.execute(statement, values).rowcount > 0
        except BaseException as error:  # noqa: BLE001  # raised again, unless it is worth another try
            self._settle()
            self._raise_unless_busy(error, doing, session_id)
        return self.write(doing, _running(statement, values), session_id)

    def run(
        self,
        doing: str,
        work: Callable[[sqlite3.Connection], T],
        session_id: UUID | None = None,
        *,
        writes: bool = False,
        transaction: bool = False,
    ) -> T:
        """Do the work on the connection, again while others hold the file, and with our own errors.

        What `writes` is done only if the file is still in its place, and with `transaction=True` in a
        transaction. An error says that it was not possible to do `doing`, followed by the session's id.
        """
        deadline: float | None = None
        with self.lock:
            self._refuse_in_between(doing, session_id)
            was_in_use, self._in_use = self._in_use, True
            try:
                while True:
                    try:
                        connection = self._connected(writes)
                        if transaction:
                            connection.execute("BEGIN IMMEDIATE")
                        if writes:
                            self._refuse_if_replaced()
                        if not transaction:
                            return work(connection)
                        self._make_room()
                        result = work(connection)
                        connection.execute("COMMIT")
                        return result
                    except BaseException as error:
                        self._settle()
                        self._raise_unless_busy(error, doing, session_id)
                        now = _REAL_TIME.monotonic()
                        # SQLite itself has waited before it said so for the first time.
                        deadline = (
                            now + self._busy_timeout_s - _SQLITE_WAIT_S if deadline is None else deadline
                        )
                        if now >= deadline:
                            raise LogBusyError(
                                f"could not {_named(doing, session_id)}: {self.path} stayed in use by others "
                                f"for {self._busy_timeout_s:g} s; try again, or find out who holds it"
                            ) from error
                    # Not in step with the others who wait.
                    _REAL_TIME.sleep(random.uniform(0.002, 0.02))
            finally:
                self._in_use = was_in_use

    def _refuse_in_between(self, doing: str, session_id: UUID | None) -> None:
        """Refuse what comes in between two steps of a transaction, in the thread whose transaction it is."""
        if self._in_use and self._connection is not None and self._connection.in_transaction:
            raise LogBusyError(
                f"could not {_named(doing, session_id)}: this thread is itself in a transaction "
                f"on {self.path}, which a signal handler or a finalizer has interrupted; do it afterwards"
            )

    def _raise_unless_busy(self, error: BaseException, doing: str, session_id: UUID | None) -> None:
        """Raise what the caller is to know of a failure, unless it was that others hold the file."""
        if isinstance(error, UnicodeDecodeError):
            # SQLite quotes damaged text in its messages, and Python then fails to read them.
            raise self.damaged(
                f"could not {_named(doing, session_id)} (unreadable text in the file)"
            ) from error
        # One without a number is no word of the system, but of somebody's signal handler.
        if isinstance(error, OSError) and error.errno is not None:
            raise LogError(
                f"could not {_named(doing, session_id)}: the system does not let {self.path} be used "
                f"({error}); nothing was written; check its directory and how many files may be open"
            ) from error
        if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.ProgrammingError):
            raise error
        if _code(error) not in _BUSY:
            raise self._translated(_named(doing, session_id), error) from error

    def _lacks_room(self) -> bool:
        """Say whether the WAL has grown since it was given room, and may be given more."""
        return (
            self._wal_length != self._wal_bytes
            and self._wal_length < _WAL_FULL_BYTES
            and self._synchronous == "FULL"
        )

    def _make_room(self) -> None:
        """Write zeros behind what is in the WAL, if it is time. To be asked inside a transaction."""
        if self._wal_descriptor is None or not self._lacks_room():
            return
        # Looked at again: an older length may be one at which others have written events since.
        length = os.lseek(self._wal_descriptor, 0, os.SEEK_END)
        if 0 < length < _WAL_FULL_BYTES:  # An empty one has no header yet, and gets one from SQLite.
            room = min(max(length, _WAL_LEAST_ROOM), _WAL_MOST_ROOM, _WAL_FULL_BYTES - length)
            try:
                is_made = os.pwrite(self._wal_descriptor, bytes(room), length) == room
            except OSError:
                is_made = False
            if not is_made:
                # The disk is full: what there is of it belongs to the events.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._wal_descriptor, length)
        self._wal_bytes = os.lseek(self._wal_descriptor, 0, os.SEEK_END)

    def _settle(self) -> None:
        """Leave no transaction open behind a failure."""
        connection = self._connection
        if connection is not None and connection.in_transaction:
            try:
                connection.rollback()
            except sqlite3.Error:
                # A connection that cannot even roll back is thrown away; closing it rolls back.
                self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection, self._wal_descriptor = self._connection, None, None
        try:
            if self._let_go is not None:
                self._let_go()
        finally:
            if connection is not None:
                connection.close()  # Once more does no harm, if an interrupt came first.

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
        connection = self._connection
        if connection is None:
            connection = self._open()
            # A connection belongs to a cycle of its own: without this it would wait for the collector.
            self._let_go = finalize(self, _close_both, connection, self._wal_descriptor)
            self._let_go.atexit = False
            self._connection = connection
        elif connection.in_transaction:
            # An interrupt hit the clean-up of an earlier failure.
            connection.rollback()
        if writes and self.damage is not None:
            raise self.damaged(self.damage)
        return connection

    # --- opening -------------------------------------------------------------------------------------

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
        # In this order: whoever makes a new file writes to it before there is anything in its WAL.
        wal_bytes = size_of(self.wal_path)
        bytes_now = size_of(self.path)
        if not bytes_now and wal_bytes:
            state = "missing" if bytes_now is None else "empty"
            raise LogDamagedError(
                f"{self.path} is {state}, but {self.wal_path.name} beside it holds data that belongs to "
                f"it; opening it would destroy that data, so nothing was touched; restore the file, or move "
                f"both away to begin anew"
            )
        self._pid = os.getpid()
        if self._identity is not None:
            # Opened before, and closed for a fork or after a failure: it must be the same file.
            self._refuse_if_replaced()
        if bytes_now and bytes_now < _PAGE_BYTES:
            # SQLite would take this for a new database and write over it.
            raise self.damaged(f"it has only {bytes_now} bytes, less than the first page of a database")
        if not bytes_now:
            if self._read_only:
                raise LogError(
                    f"there is no log in {self.path} ({'empty' if bytes_now == 0 else 'no such file'})"
                )
            return self._open_for_writing()
        return self._inspected() or self._open_for_writing()

    def _inspected(self) -> sqlite3.Connection | None:
        """Look at what is in the file; return a connection if it may only be read, damaged or by request."""
        findings: list[Finding] = []
        report = wal.examine(self.wal_path)
        if report is not None and report.is_damaged:
            findings.append(
                Finding(
                    "unreadable",
                    f"{self.wal_path.name} is damaged after frame {report.frames}: at least "
                    f"{report.rejected_commits} completed writes behind that point cannot be read",
                )
            )
        damage = findings[0].message if findings else None
        connection = self._connect("ro")
        try:
            try:
                self.version = self._look(connection)
            except sqlite3.DatabaseError as error:
                self.raise_unless_damage(error)
                if _code(error) == sqlite3.SQLITE_NOTADB:
                    raise self.damaged(
                        "it is not a SQLite database, or its first page was overwritten"
                    ) from error
                # With this setting SQLite reads what there is of a file that is shorter than it says.
                connection.execute("PRAGMA writable_schema = ON")
                self.version = self._look(connection)
                damage = damage or f"it is cut off or its structure is damaged ({error})"
                findings.append(Finding("unreadable", damage))
            if report is not None and report.is_torn:
                findings.append(
                    Finding(
                        "unreadable",
                        f"{self.wal_path.name} ends in a write of {report.rejected} pages that is not "
                        f"whole, as a crash in the middle of it leaves it; it was passed over",
                    )
                )
            self.findings = tuple(findings)
            self.damage = damage
            if damage is None and not self._read_only:
                connection.close()
                return None
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA cell_size_check = ON")
        except sqlite3.DatabaseError as error:
            connection.close()
            if _code(error) == sqlite3.SQLITE_READONLY and not self._read_only:
                # A journal from a crash at the very first start must be played back, which needs writing.
                return None
            raise
        except BaseException:
            connection.close()
            raise
        return connection

    def _look(self, connection: sqlite3.Connection) -> int:
        """Return the schema's version, 0 for a new file. Refuse what is not ours or not known here."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        schema = frozenset(
            sql.strip()
            for (sql,) in connection.execute("SELECT sql FROM sqlite_schema").fetchall()
            if type(sql) is str
        )
        if application == version == 0 and not schema:
            if self._read_only:
                raise LogError(f"there is no log in {self.path}: the database is empty")
            return 0
        if application != APPLICATION_ID:
            raise LogError(
                f"{self.path} is a SQLite file of another application (application_id {application:#x}); "
                f"it was left untouched; choose another path for the log"
            )
        if version > LATEST:
            raise LogVersionError(
                f"{self.path} has schema version {version}, and this Treenail knows versions up to {LATEST}; "
                f"the file was left untouched; open it with a newer Treenail"
            )
        if version < 1 or not expected_schema(version) <= schema:
            raise self.damaged(f"its tables are not those of schema version {version}")
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
            self._migrate(connection)
            stat = os.stat(self.path)
            self._identity = (stat.st_dev, stat.st_ino)
            # A file whose WAL may only be read is still read.
            with contextlib.suppress(OSError):
                self._wal_descriptor = os.open(self.wal_path, os.O_RDWR)
            self._wal_bytes = self._wal_length = 0
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        self.version = self._look(connection)
        while self.version < LATEST:
            connection.execute("BEGIN IMMEDIATE")
            # Somebody else may have been faster.
            self.version = self._look(connection)
            if self.version < LATEST:
                self.version += 1
                for statement in MIGRATIONS[self.version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self.version}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("COMMIT")

    def _refuse_if_replaced(self) -> None:
        """Refuse to write into a file that nobody will find again."""
        try:
            # Asked at every append; a Path would be turned into text each time.
            stat = os.stat(self._path_text)
        except FileNotFoundError:
            stat = None
        if stat is None or (stat.st_dev, stat.st_ino) != self._identity:
            raise LogError(
                f"{self.path} was removed or replaced while it was open; nothing was written; "
                f"put it back or open the log anew"
            )
        if self._wal_descriptor is None:
            return
        found = os.fstat(self._wal_descriptor)
        self._wal_length = found.st_size
        # Where a file system counts no links, the path decides.
        if found.st_nlink == 0 and not (
            self.wal_path.exists() and os.path.samestat(found, self.wal_path.stat())
        ):
            raise LogError(
                f"{self.wal_path} was removed while it was open: nobody would find what is written to it; "
                f"nothing was written; close every log in {self.path} and open it anew"
            )

    # --- errors --------------------------------------------------------------------------------------

    def damaged(self, what: str) -> LogDamagedError:
        """Make the error that says what is damaged and what can be done."""
        return LogDamagedError(
            f"{self.path}: {what}; nothing was changed or deleted; what is whole can be read with "
            f"SqliteLog(path, read_only=True), and SqliteLog.salvage(damaged, into) copies it into a new file"
        )

    def raise_unless_damage(self, error: Exception) -> None:
        """Raise the error again if it says something else than that the file is damaged."""
        if _code(error) in _NOT_DAMAGE or isinstance(error, sqlite3.ProgrammingError):
            raise error

    def _translated(self, doing: str, error: BaseException) -> LogError:
        code = _code(error)
        if code == sqlite3.SQLITE_FULL:
            return LogError(
                f"could not {doing}: no room left for {self.path} ({error}); nothing was written and nothing "
                f"was lost; make room and try again"
            )
        if code == sqlite3.SQLITE_IOERR and getattr(error, "sqlite_errorcode", 0) not in _DAMAGED_IO:
            return LogError(
                f"could not {doing}: the system failed to read or write {self.path} ({error}); nothing was "
                f"written; check the disk and its free space, and try again"
            )
        if code in _NOT_DAMAGE:
            return LogError(
                f"could not {doing}: {self.path} cannot be used ({error}); check that its directory exists "
                f"and that it may be written"
            )
        return self.damaged(f"could not {doing} ({error})")


def _close_both(connection: sqlite3.Connection, wal_descriptor: int | None) -> None:
    if wal_descriptor is not None:
        os.close(wal_descriptor)
    connection.close()


def refuse_if_open_here(path: Path) -> None:
    """Refuse to go near a file by hand that this process has open: that would drop its locks."""
    if any(database.path == path and database._connection is not None for database in list(_DATABASES)):
        raise UsageError(f"{path} is open in this process; close it first")


# --- forks -------------------------------------------------------------------------------------------

_DATABASES: WeakSet[Database] = WeakSet()
_paused: dict[int, list[Database]] = {}
"""What each thread that is about to fork has locked."""
_FORK_WAIT_S = 60.0


def _before_fork() -> None:
    mine = _paused.setdefault(threading.get_ident(), [])
    for database in list(_DATABASES):
        # A signal handler may have come in between two steps of this very thread.
        is_in_use = database.lock._is_owned()  # type: ignore[attr-defined] # typeshed leaves it out
        # Waits for a transaction under way. Whoever cannot be waited for is refused in the child.
        if database.lock.acquire(timeout=_FORK_WAIT_S):
            mine.append(database)
            if not is_in_use:
                database._disconnect()


def _after_fork_in_parent() -> None:
    for database in _paused.pop(threading.get_ident(), ()):
        database.lock.release()


def _after_fork_in_child() -> None:
    _paused.clear()
    for database in list(_DATABASES):
        database.lock = threading.RLock()
        if database._connection is None:
            database._pid = os.getpid()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)

"""Connections to one Postgres database: a small pool, attempts that are repeated, answers that are lost.

Theory of operation
-------------------
**A request is one transaction**, mostly one statement. It is repeated when the server says that it was not
done and that another attempt may succeed (a deadlock, too many connections, a server that starts). When the
connection breaks before the answer, nobody knows: then the next attempt is told that it is in `doubt`, and
the request itself finds out, by what is in the tables, whether it had been done. A request must therefore
be one that the server refuses the second time, or for which the second time changes nothing.

**Poolers.** The number of the server's process that a direct connection was told when it began is the number
that the server gives when asked. If it is another one, a pooler such as PgBouncer stands in between,
perhaps in transaction mode. Then nothing that belongs to a server's session is used: neither prepared
statements nor LISTEN. All tables are named with their schema, so no `search_path` is needed.

**Together.** Requests that belong together share a transaction (`together`): those that the work makes in its
thread meanwhile become part of it. It is repeated as a whole, and it is told of doubt as a request is.

**Forks.** A child forgets the connections of its parent and makes its own.
"""

from __future__ import annotations

import os
import random
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.pq import TransactionStatus

from treenail.clock import SystemClock
from treenail.errors import LogBusyError, LogError, UsageError
from treenail.log.postgres.failures import Failure, is_passing, meaning, translated, undecided, unreachable
from treenail.log.postgres.migrations import LATEST, migrate, version_of
from treenail.log.stores import PostgresUrl

T = TypeVar("T")

_REAL_TIME = SystemClock()
"""Waiting for a server takes real time, whatever clock the leases use."""
_PREPARE_AFTER = 2
"""How often a statement is sent before a direct connection prepares it."""
_END_WHEN_IDLE = b"SELECT set_config('idle_in_transaction_session_timeout', %s, true)"
_DEFAULTS = {
    "application_name": "treenail",
    "connect_timeout": "10",
    "client_encoding": "utf8",
    # A server whose machine is gone is noticed by the network's means.
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}


class Connection(psycopg.Connection[Any]):
    """A connection whose answers are waited for only so long."""

    answer_timeout_s: float = 30.0
    is_direct: bool = True
    """Whether no pooler stands between us and the server."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for an answer, with a limit."""
        try:
            return super().wait(gen, interval, self.answer_timeout_s if timeout is None else timeout)
        except psycopg.OperationalError as error:
            if error.sqlstate is None:
                self.close()  # An answer that comes later must not be taken for the next one's.
            raise


Work = Callable[[Connection, bool], T]
"""What is to be done on a connection, told whether an earlier attempt may have been carried out."""


class Database:
    """The database of a URL, for any thread of any process that asks."""

    def __init__(
        self,
        url: PostgresUrl,
        *,
        max_connections: int = 8,
        retry_s: float = 30.0,
        answer_timeout_s: float = 30.0,
        create: bool = True,
    ) -> None:
        self._most = max_connections
        self._start()
        if max_connections < 1:
            raise UsageError(f"max_connections must be 1 or more, not {max_connections}")
        self.url = url
        self._retry_s = retry_s
        self._answer_timeout_s = answer_timeout_s
        self._create = create
        self._closed = False
        self._is_ready = False
        """Whether the schema was found to be ours; a server that was reached once is waited for."""
        _DATABASES.add(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._joined = threading.local()
        self._idle: list[Connection] = []
        self._free = threading.BoundedSemaphore(max(self._most, 1))

    def __del__(self) -> None:
        self._forget_idle()

    def close(self) -> None:
        """Close the connections for good."""
        self._closed = True
        self._forget_idle()

    # --- requests --------------------------------------------------------------------------------------

    def run(
        self, doing: str, work: Work[T], *, retry_s: float | None = None, answer_s: float | None = None
    ) -> T:
        """Do the work in one request. An error says that it was not possible to do `doing`.

        `answer_s` is how long to wait for a connection and for its answer, if that is less than usual.
        """
        joined: Connection | None = getattr(self._joined, "connection", None)
        if joined is not None:
            return work(joined, False)  # Part of a transaction, which is repeated as a whole.
        patience = self._retry_s if retry_s is None else retry_s
        deadline: float | None = None
        doubt = False
        while True:
            try:
                with self._borrowed(answer_s) as connection:
                    return work(connection, doubt)
            except _NotConnected as error:
                trouble: LogError = unreachable(self.url, error.cause)
                if not (self._is_ready or is_passing(error.cause)):
                    raise trouble from error.cause
                cause: psycopg.Error = error.cause
            except psycopg.Error as error:
                failure, cause = meaning(error), error
                trouble = translated(self.url, doing, error)
                if failure is Failure.REFUSED:
                    raise trouble from error
                doubt = doubt or failure is Failure.LOST
            now = _REAL_TIME.monotonic()
            deadline = now + patience if deadline is None else deadline
            if now >= deadline:
                raise (undecided(self.url, doing, cause, patience) if doubt else trouble) from cause
            # Not in step with the others who wait.
            _REAL_TIME.sleep(random.uniform(0.01, 0.1))

    def transaction(self, doing: str, work: Work[T]) -> T:
        """Do work of several statements in one transaction: all of it, or nothing."""

        # If we are cut off in the middle, the server does not keep what it has locked for us.
        limit = f"{max(round(self._answer_timeout_s / 6 * 1000), 1)}ms"

        def whole(connection: Connection, doubt: bool) -> T:
            with connection.transaction():
                connection.execute(_END_WHEN_IDLE, (limit,))
                return work(connection, doubt)

        return self.run(doing, whole)

    def together(self, doing: str, work: Callable[[bool], T]) -> T:
        """Do work whose requests, in this thread, are one transaction: all of them, or none.

        It may be done again from its beginning. It is told whether an earlier attempt may have been carried
        out, and must find out whether it was, by what is in the tables.
        """

        def whole(connection: Connection, doubt: bool) -> T:
            self._joined.connection = connection
            try:
                return work(doubt)
            finally:
                self._joined.connection = None

        return self.transaction(doing, whole)

    # --- connections -----------------------------------------------------------------------------------

    @contextmanager
    def _borrowed(self, answer_s: float | None = None) -> Iterator[Connection]:
        free = self._free
        wait_s = self._retry_s if answer_s is None else min(answer_s, self._retry_s)
        if not free.acquire(timeout=wait_s):
            raise LogBusyError(
                f"all {self._most} connections of this process to {self.url} stayed in use for "
                f"{wait_s:g} s; raise max_connections of PostgresLog"
            )
        try:
            connection = self._idle_one() or self._connect(answer_s)
            connection.answer_timeout_s = min(answer_s or self._answer_timeout_s, self._answer_timeout_s)
            try:
                yield connection
            except BaseException:
                # An interrupt may have come in the middle of anything.
                if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
                    connection.close()
                    self._forget_idle()
                raise
            finally:
                self._give_back(connection, free)
        finally:
            free.release()

    def _idle_one(self) -> Connection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise UsageError(f"the log in {self.url} was closed; open it again")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            connection.close()

    def _give_back(self, connection: Connection, free: threading.BoundedSemaphore) -> None:
        with self._lock:
            # After a fork this may be the child, and the connection its parent's.
            if not connection.closed and not self._closed and free is self._free:
                self._idle.append(connection)
                return
        connection.close()

    def _forget_idle(self) -> None:
        """Close the connections that wait; the server that one of them has lost is gone for all."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def connect(self) -> Connection:
        """Make a connection for the caller alone. Raises `LogError`."""
        try:
            return self._connect()
        except _NotConnected as error:
            raise unreachable(self.url, error.cause) from error.cause

    def _connect(self, answer_s: float | None = None) -> Connection:
        """Make a connection, and look at the schema with the first one."""
        options: dict[str, Any] = dict(_DEFAULTS)
        if answer_s is not None:
            options["connect_timeout"] = str(max(2, min(10, int(answer_s))))  # libpq waits no less.
        for key, _ in self.url.options:
            options.pop(key, None)
        if "," in self.url.hosts and "target_session_attrs" not in dict(self.url.options):
            options["target_session_attrs"] = "read-write"
        try:
            connection = Connection.connect(
                self.url.conninfo(), autocommit=True, prepare_threshold=None, **options
            )
        except psycopg.Error as error:
            raise _NotConnected(error) from None
        try:
            connection.answer_timeout_s = min(answer_s or self._answer_timeout_s, self._answer_timeout_s)
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: Connection) -> None:
        found = connection.execute(b"SELECT pg_backend_pid()").fetchone()
        assert found is not None
        connection.is_direct = found[0] == connection.info.backend_pid
        if connection.is_direct:
            connection.prepare_threshold = _PREPARE_AFTER
        if self._is_ready:
            return
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in (None, "UTF8"):
            raise LogError(f"{self.url} keeps text as {encoding}; make the database with ENCODING 'UTF8'")
        version = version_of(connection, self.url)
        if version < LATEST:
            if version == 0 and not self._create:
                raise LogError(
                    f"there are no runs in {self.url}: its schema {self.url.schema} was not made yet; "
                    f"start a run there, or check the URL"
                )
            migrate(connection, self.url)
        self._is_ready = True

    # --- forks -----------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Make the child of a fork a user of its own: what it has was its parent's."""
        _ABANDONED.extend(self._idle)
        self._start()


class _NotConnected(Exception):
    """No connection could be made, so nothing was asked for."""

    def __init__(self, cause: psycopg.Error) -> None:
        self.cause = cause


def _is_quiet(connection: Connection) -> bool:
    """Return whether an idle connection seems alive: a server that ends one says so, or closes it."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)


_DATABASES: WeakSet[Database] = WeakSet()
_ABANDONED: list[Connection] = []
"""Connections of a parent process; they are kept so that nothing closes them here."""


def _after_fork_in_child() -> None:
    for database in list(_DATABASES):
        database.adopt()


os.register_at_fork(after_in_child=_after_fork_in_child)

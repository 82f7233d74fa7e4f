"""Waiting for new events of a session: the server tells (LISTEN), and is asked where it cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

import psycopg

from treenail.clock import SystemClock
from treenail.errors import LogError
from treenail.log import rules
from treenail.log.postgres.database import Connection, Database

ASK_EVERY_S = 0.05
"""How often the server is asked where it cannot tell: behind a pooler, and on a standby."""
_ASK_ALSO_EVERY_S = 1.0
"""How often it is asked although it tells: a notification can be lost with its connection."""
_SETTLING_S = 2.0
"""For how long it is asked often at first: an append that began before we registered tells nobody."""
_REGISTERED_S = 60.0
_REAL_TIME = SystemClock()


class PostgresWatcher:
    """Waits for new events of one session, on a connection of its own."""

    def __init__(self, database: Database, sql: Mapping[str, bytes], session_id: UUID) -> None:
        self._database = database
        self._sql = sql
        self._session_id = session_id
        self._watcher = uuid4()
        self._connection: Connection | None = None
        self._registered_at = self._listening_since = float("-inf")
        self.listens = False
        """Whether the server tells; else it is asked every `ASK_EVERY_S`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self.listens:
            try:
                self._database.run(
                    "stop watching",
                    lambda connection, _: connection.execute(
                        self._sql["unwatch"], {"watcher": self._watcher}
                    ),
                    retry_s=0,
                )
            except LogError:
                pass  # The row expires by itself.
        self._disconnect()

    def wait(self, after: int, timeout_s: float) -> int:
        """Wait until the session has an event behind `after`, or until the time is over; return its head.

        Raises `SessionNotFoundError` if it is not there or was erased.
        """
        deadline = _REAL_TIME.monotonic() + timeout_s
        while True:
            self._listen()
            head = self._head()
            left = deadline - _REAL_TIME.monotonic()
            if head > after or left <= 0:
                return head
            self._pause(min(left, self._interval()))

    def _interval(self) -> float:
        is_settled = _REAL_TIME.monotonic() - self._listening_since > _SETTLING_S
        return _ASK_ALSO_EVERY_S if self.listens and is_settled else ASK_EVERY_S

    def _head(self) -> int:
        def work(connection: Connection, doubt: bool) -> int:
            found = connection.execute(self._sql["head"], {"id": self._session_id}).fetchone()
            if found is None:
                rules.not_found(self._session_id, str(self._database.url))
            return int(found[0])

        return self._database.run(f"watch session {self._session_id}", work)

    def _pause(self, timeout_s: float) -> None:
        """Wait for a notification, or for this long."""
        if self._connection is None:
            _REAL_TIME.sleep(timeout_s)
            return
        try:
            for _ in self._connection.notifies(timeout=timeout_s, stop_after=1):
                pass
        except psycopg.Error:
            self._disconnect()

    def _listen(self) -> None:
        """Register, and listen if the server can tell; renew both when it is time."""
        now = _REAL_TIME.monotonic()
        if now - self._registered_at < _REGISTERED_S / 3 and (
            self._connection is not None or not self.listens
        ):
            return
        self._registered_at = now
        try:
            if self._connection is None:
                self._connection = self._database.connect()
                self._listening_since = now
            if not self._connection.is_direct:
                raise psycopg.NotSupportedError("a pooler stands in between")
            values = {"id": self._session_id, "watcher": self._watcher, "ttl_us": int(_REGISTERED_S * 1e6)}
            self._connection.execute(f"LISTEN treenail_{self._session_id.hex}".encode())
            self._connection.execute(self._sql["watch"], values)
            self.listens = True
        except (psycopg.Error, LogError):
            # A pooler, a standby, a server that is gone right now: ask instead.
            self._disconnect()
            self.listens = False

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

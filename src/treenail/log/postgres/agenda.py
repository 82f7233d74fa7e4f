"""The table `agenda`: which runs workers look after. See `treenail.log.agenda`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from psycopg.types.numeric import Int8

from treenail.log.agenda import AgendaCounts, AgendaEntry
from treenail.log.postgres.database import Connection, Database


class PostgresAgenda:
    """The agenda of a schema. Each of its moves can be made twice without harm."""

    def __init__(self, database: Database, sql: Mapping[str, bytes]) -> None:
        self._database = database
        self._sql = sql

    def ask(self, run_id: UUID, *, engine: str, queue: str, seq: int) -> None:
        """Put a run on the agenda because of the event `seq`, and drop a wish to cancel it."""
        self._do("ask", {"id": run_id, "engine": engine, "queue": queue, "seq": Int8(seq)})

    def entry(self, run_id: UUID) -> AgendaEntry | None:
        """Return the entry of a run; None if it is not on the agenda."""
        found = self._do("agenda_entry", {"id": run_id})
        return AgendaEntry(*found[0]) if found else None

    def park(self, run_id: UUID, seq: int) -> None:
        """Note that a run waits for a person, whose answer will be behind `seq`."""
        self._do("park", {"id": run_id, "seq": Int8(seq)})

    def strike(self, run_id: UUID, seq: int) -> None:
        """Take a run off the agenda, unless work was asked for behind `seq`."""
        self._do("strike", {"id": run_id, "seq": Int8(seq)})

    def cancel(self, run_id: UUID, by: str) -> bool:
        """Note who wants a run cancelled; False if it is not on the agenda."""
        return bool(self._do("ask_to_cancel", {"id": run_id, "by": by}))

    def cancelled(self, run_ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Return which of these runs are to be cancelled, and who wants it."""
        return dict(self._do("cancelled", {"ids": list(run_ids)})) if run_ids else {}

    def due(self, *, engine: str, age_s: float, count: int) -> Sequence[AgendaEntry]:
        """Return the unfinished runs that nobody writes, and note that the engine is told now."""
        values = {"engine": engine, "age_us": Int8(int(age_s * 1e6)), "count": Int8(count)}
        return [AgendaEntry(*each) for each in self._do("due", values)]

    def counts(self) -> Sequence[AgendaCounts]:
        """Count the runs of each queue."""
        return [AgendaCounts(*each) for each in self._do("agenda_counts", {})]

    def _do(self, name: str, values: Mapping[str, Any]) -> list[Any]:
        def work(connection: Connection, doubt: bool) -> list[Any]:
            cursor = connection.execute(self._sql[name], values)
            return cursor.fetchall() if cursor.description else []

        return self._database.run("use the agenda of workers", work)

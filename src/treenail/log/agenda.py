"""The protocol of an agenda: which runs of a store workers look after.

Whether a run is finished is in its log, and reading all logs to find the few that are not would take too
long. So a store that workers share keeps an index of them. It may list a run too many, and never one too few:

- a run is put on it in the transaction that asks for work (`ask`), together with the event that says so;
- it is struck off by the worker that holds the run's lease and has found nothing left to do, unless work was
  asked for behind the event up to which the worker has read (`strike`);
- a run that waits for a person stays on it. It is parked at its newest event, and due again as soon as there
  is another one.

Nobody but the writer of a run may append to its log. Whoever wants a run cancelled while a worker writes it
says so here (`cancel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from uuid import UUID


@dataclass(frozen=True, slots=True)
class AgendaEntry:
    """A run that workers look after."""

    run_id: UUID
    engine: str
    """Which engine wakes workers for it."""
    queue: str
    parked_seq: int = 0
    """The event at which it was found to wait for a person; 0 if it never was."""
    cancelled_by: str | None = None
    """Who wants it cancelled."""


@dataclass(frozen=True, slots=True)
class AgendaCounts:
    """How the runs of a queue stand."""

    queue: str
    waiting: int
    """They wait for a worker."""
    running: int
    """Somebody writes them."""
    parked: int
    """They wait for a person."""


class Agenda(Protocol):
    """The runs of a store that workers look after."""

    def ask(self, run_id: UUID, *, engine: str, queue: str, seq: int) -> None:
        """Put a run on the agenda because of the event `seq`, and drop a wish to cancel it."""
        ...

    def entry(self, run_id: UUID) -> AgendaEntry | None:
        """Return the entry of a run; None if it is not on the agenda."""
        ...

    def park(self, run_id: UUID, seq: int) -> None:
        """Note that a run waits for a person, whose answer will be behind `seq`."""
        ...

    def strike(self, run_id: UUID, seq: int) -> None:
        """Take a run off the agenda, unless work was asked for behind `seq`."""
        ...

    def cancel(self, run_id: UUID, by: str) -> bool:
        """Note who wants a run cancelled; False if it is not on the agenda."""
        ...

    def cancelled(self, run_ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Return which of these runs are to be cancelled, and who wants it."""
        ...

    def due(self, *, engine: str, age_s: float, count: int) -> Sequence[AgendaEntry]:
        """Return the runs that are unfinished and that nobody writes, and note that the engine is told now.

        Left out are those of which the engine was told in the last `age_s`. Two callers are never given the
        same run.
        """
        ...

    def counts(self) -> Sequence[AgendaCounts]:
        """Count the runs of each queue."""
        ...


@runtime_checkable
class HasAgenda(Protocol):
    """A log with an agenda."""

    @property
    def agenda(self) -> Agenda:
        """Its agenda."""
        ...

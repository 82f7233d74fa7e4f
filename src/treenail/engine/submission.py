"""What can be asked of workers, from any machine that reaches the log.

What is asked is in the log before anybody is told: the engine only wakes. Where the engine shares the log's
database, both are one transaction. Elsewhere the engine is told afterwards, and if that fails the sweeper of
any worker does it, within a lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar, runtime_checkable
from uuid import UUID

from treenail.clock import new_id
from treenail.containment import Limits
from treenail.engine.dispatcher import Dispatcher
from treenail.errors import EngineError, LeaseHeldError, SessionNotFoundError, UsageError
from treenail.log import Agenda, Log, place_of
from treenail.state import Session
from treenail.turns import (
    CeilingsSet,
    Left,
    RunSubmitted,
    TurnState,
    cancel_submitted,
    ceilings_of,
    stopped_before_turn,
    submission_of,
    turn_state,
    work_left,
)
from treenail.workspace import begin_with_directory, depot_of

T = TypeVar("T")

DEFAULT_QUEUE = "default"
"""The queue of a run that names none."""
TENANT = "tenant"
"""The tag that says whose run it is."""

_logger = logging.getLogger("treenail.engine")


@runtime_checkable
class SharedLog(Log, Protocol):
    """A log that workers of several machines share: `PostgresLog`."""

    @property
    def agenda(self) -> Agenda:
        """The runs that workers look after."""
        ...

    def together(self, doing: str, work: Callable[[bool], T]) -> T:
        """Do work whose requests, in this thread, are one transaction: all of them, or none."""
        ...


def shared(log: Log) -> SharedLog:
    """Return a log that workers can share. Raises `UsageError` for any other."""
    if isinstance(log, SharedLog):
        return log
    raise UsageError(
        f"workers need a store that machines share, and {place_of(log) or 'a log in memory'} is not one; "
        f"name a database: --store postgresql://..."
    )


def submit_run(
    log: Log,
    dispatcher: Dispatcher,
    task: str,
    *,
    agent: str,
    limits: Limits | None = None,
    tags: Mapping[str, str] | None = None,
    queue: str = DEFAULT_QUEUE,
    by: str = "",
    run_id: UUID | None = None,
    files: str | Path | None = None,
) -> UUID:
    """Have workers work on a task, and return the id of the new run.

    `agent` is a name that workers know. `limits` are the run's ceilings; a worker may allow less. The run
    begins with a copy of the directory `files`, or with no files. A `run_id` that exists is refused.
    """
    if not task.strip():
        raise UsageError("the task is empty; write what to do")
    place, made = shared(log), run_id or new_id()
    ceilings = () if limits is None else (CeilingsSet(limits, by),)

    depot = depot_of(place, "")
    with ExitStack() as stack:
        begins = files or stack.enter_context(TemporaryDirectory(prefix="treenail-empty-"))
        origin = begin_with_directory(depot, made, begins)

    def work(doubt: bool) -> None:
        if doubt and _is_there(place, made):
            return  # The attempt whose answer was lost has done it.
        with closing(Session(session_id=made, log=place, tags={**(tags or {}), "agent": agent})) as session:
            session.dispatch_all((origin, *ceilings, RunSubmitted(agent, task, by)))
            _put_on_agenda(place, dispatcher, session, queue)

    place.together(f"submit run {made}", work)
    _tell(dispatcher, lambda: dispatcher.submit(queue, [made]))
    return made


def resume_run(
    log: Log,
    dispatcher: Dispatcher,
    run_id: UUID,
    *,
    task: str = "",
    limits: Limits | None = None,
    queue: str | None = None,
    by: str = "",
) -> None:
    """Have workers resume the newest turn of a run, or begin another one on a task.

    Raises `UsageError` if it was never submitted, if it has ended well and there is no task, or if it waits
    already; `LeaseHeldError` while a worker writes it.
    """
    place = shared(log)
    entry = place.agenda.entry(run_id)
    chosen = queue or (DEFAULT_QUEUE if entry is None else entry.queue)

    def work(doubt: bool) -> None:
        with closing(Session.open(place, run_id)) as session:
            submitted = submission_of(session)
            if submitted is None:
                raise UsageError(
                    f"run {run_id} was not submitted to workers; resume it with `treenail resume`"
                )
            left = work_left(session)
            if left in (Left.BEGIN, Left.RESUME) and entry is not None:
                if doubt:
                    return
                raise UsageError(f"run {run_id} waits for a worker already; see `treenail status {run_id}`")
            if left is Left.WAIT:
                raise UsageError(
                    f"run {run_id} waits for an answer; give it with `treenail hold answer {run_id}`"
                )
            if not task and turn_state(session) is TurnState.COMPLETED:
                raise UsageError(f"run {run_id} is completed; there is nothing to resume")
            # One that was stopped before it began begins now.
            what = task or (submitted.task if stopped_before_turn(session) is not None else "")
            raised = limits is not None and limits != ceilings_of(session)
            ceilings = (CeilingsSet(limits, by),) if limits is not None and raised else ()
            session.dispatch_all((*ceilings, RunSubmitted(submitted.agent, what, by)))
            _put_on_agenda(place, dispatcher, session, chosen)

    place.together(f"resume run {run_id}", work)
    _tell(dispatcher, lambda: dispatcher.submit(chosen, [run_id]))


def cancel_run(log: Log, dispatcher: Dispatcher | None, run_id: UUID, *, by: str = "") -> bool:
    """Cancel a run. Returns whether that is in its log; else a worker is at work on it, and has been told.

    Raises `UsageError` if it is neither waiting nor at work.
    """
    place = shared(log)
    entry = place.agenda.entry(run_id)
    try:
        with closing(Session.open(place, run_id)) as session:
            cancel_submitted(session, by)
            place.agenda.strike(run_id, session.head)
            is_over = True
    except LeaseHeldError:
        if not place.agenda.cancel(run_id, by):
            raise
        is_over = False
    if entry is not None and dispatcher is not None and dispatcher.name == entry.engine:
        queue = entry.queue
        _tell(dispatcher, lambda: dispatcher.cancel(queue, run_id), always=True)
    return is_over


def wake_run(log: Log, dispatcher: Dispatcher | None, run_id: UUID) -> bool:
    """Wake workers for a run after something was appended to its log. Returns whether they look after it.

    Without a dispatcher, the next sweep of any worker finds it.
    """
    if not isinstance(log, SharedLog) or (entry := log.agenda.entry(run_id)) is None:
        return False
    if dispatcher is not None and dispatcher.name == entry.engine:
        event = parked_event(run_id, entry.parked_seq)
        _tell(dispatcher, lambda: dispatcher.wake(entry.queue, event), always=True)
    return True


def parked_event(run_id: UUID, seq: int) -> str:
    """Name what wakes a run that waits for a person since the event `seq`."""
    return f"{run_id}@{seq}"


def _put_on_agenda(log: SharedLog, dispatcher: Dispatcher, session: Session, queue: str) -> None:
    log.agenda.ask(session.session_id, engine=dispatcher.name, queue=queue, seq=session.head)
    if dispatcher.is_transactional:
        dispatcher.submit(queue, [session.session_id])


def _tell(dispatcher: Dispatcher, telling: Callable[[], None], *, always: bool = False) -> None:
    """Tell an engine, unless the log's transaction did. If it cannot be told, a sweeper does it."""
    if dispatcher.is_transactional and not always:
        return
    try:
        telling()
    except EngineError as error:
        _logger.warning("%s; a worker's sweeper will tell it", error)


def _is_there(log: Log, run_id: UUID) -> bool:
    try:
        log.info(run_id)
    except SessionNotFoundError:
        return False
    return True

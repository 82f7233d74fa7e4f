"""A worker: does the runs that an engine wakes it for, one turn after the other.

Theory of operation
-------------------
A call of the handler opens the run for writing, which only one worker can, and reads from its log what is
left to do (`work_left`). It runs that turn, as any program would, and reads the log again. Decision and work
are under one lease, so nothing is done twice, whatever happened before and wherever. What the engine is told
follows from what is left: nothing (`Done`), a person's answer (`WakeOn`), or more, if the worker is about to
end (`WakeAt` now: another one continues).

A watching thread asks twice per lease whether one of the runs at work is to be cancelled.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

from treenail import telemetry
from treenail.agent import Agent, RunOptions
from treenail.clock import SystemClock
from treenail.containment import CancellationToken, ExecutionContext, Limits
from treenail.engine.dispatcher import Dispatcher, Done, Job, Outcome, Serving, WakeAt, WakeOn
from treenail.engine.pots import SharedCeilings
from treenail.engine.submission import DEFAULT_QUEUE, SharedLog, parked_event, shared
from treenail.engine.sweeper import Sweeper
from treenail.errors import LeaseHeldError, LogError, SessionNotFoundError, StaleWriterError, TreenailError
from treenail.log import DEFAULT_LEASE_SECONDS, Log
from treenail.state import Session
from treenail.tools import run_blocking
from treenail.turns import (
    Left,
    RunRefused,
    RunSubmitted,
    cancel_submitted,
    ceilings_of,
    contain,
    newest_turn,
    spent_usd_of,
    submission_of,
    work_left,
)

_REAL_TIME = SystemClock()
_SOON_S = 1.0
"""How long to wait at most until a run that somebody writes is looked at again."""
_ELSEWHERE_S = 15.0
"""How long to leave a run alone whose agent this worker does not have."""

_logger = logging.getLogger("treenail.engine")


@dataclass(frozen=True, slots=True)
class WorkerAgent:
    """An agent that a worker runs, and how."""

    agent: Agent
    options: Callable[[], RunOptions]
    """Makes the options of each run: a provider, a sandbox, permissions. What a run shares with others is
    made here anew."""
    limits: Limits = field(default_factory=Limits)
    """The most that any of its runs may use; a run's own ceilings may be lower."""


@dataclass(slots=True, eq=False)
class _AtWork:
    """A run that is being worked on here."""

    run_id: UUID
    token: CancellationToken
    cancelled_by: str | None = None


class Worker:
    """Works on runs of a shared log until it is told to stop.

    `agents` are the agents that it has, by the names that submissions use; a name leads nowhere else, so no
    submission can make a worker run code of its choice. `checkouts` is where this machine keeps its copies of
    workspaces.
    """

    def __init__(
        self,
        log: Log,
        dispatcher: Dispatcher,
        agents: Mapping[str, WorkerAgent],
        *,
        queues: Sequence[str] = (DEFAULT_QUEUE,),
        concurrency: int = 4,
        lease_s: float = DEFAULT_LEASE_SECONDS,
        drain_s: float = 30.0,
        ceilings: SharedCeilings | None = None,
        checkouts: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.log: SharedLog = shared(log)
        self.dispatcher = dispatcher
        self.agents = agents
        self.drain_s = drain_s
        self.serving = Serving(self.name, queues, concurrency, lease_s)
        self._ceilings = ceilings or SharedCeilings()
        self._checkouts = checkouts
        self._lock = threading.Lock()
        self._at_work: dict[UUID, _AtWork] = {}
        self._draining = threading.Event()

    # --- the life of a worker --------------------------------------------------------------------------

    def serve(self) -> None:
        """Work until `stop` is called and every run at work has ended or is handed on."""
        lease_s = self.serving.lease_s
        self._tell("worker_started", queues=list(self.serving.queues), agents=sorted(self.agents))
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), name="treenail-cancels", daemon=True)
        watcher.start()
        try:
            with Sweeper(self.log, self.dispatcher, lease_s=lease_s):
                self.dispatcher.serve(self.work, self.serving)
        finally:
            over.set()
            watcher.join()
            self._tell("worker_stopped")

    def stop(self) -> None:
        """Take no more runs, and give those at work `drain_s` to end; then they are handed on.

        Called once more, it hands them on at once. It returns immediately.
        """
        if self.serving.stop.is_set():
            self._hand_on()
            return
        self.serving.stop.set()
        self._tell("worker_draining", runs=len(self._at_work))
        timer = threading.Timer(self.drain_s, self._hand_on)
        timer.daemon = True
        timer.start()

    def _hand_on(self) -> None:
        self._draining.set()
        with self._lock:
            working = list(self._at_work.values())
        for each in working:
            each.token.cancel("terminated")

    @property
    def at_work(self) -> Sequence[UUID]:
        """The runs that are being worked on here."""
        with self._lock:
            return tuple(self._at_work)

    def _watch(self, over: threading.Event) -> None:
        """Cancel the runs at work here that somebody wants cancelled."""
        while not (over.is_set() or self.serving.ready.wait(0.1)):
            continue
        self._tell("worker_ready")
        while not over.wait(self.serving.lease_s / 2):
            try:
                wanted = self.log.agenda.cancelled(self.at_work)
            except LogError:
                continue  # The server is away; the runs wait for it, too.
            with self._lock:
                found = [(self._at_work.get(run_id), by) for run_id, by in wanted.items()]
            for each, by in found:
                if each is not None:
                    each.cancelled_by = by
                    each.token.cancel("cancelled", detail=f"cancelled by {by}" if by else "")

    # --- one call of the handler -----------------------------------------------------------------------

    def work(self, job: Job) -> Outcome:
        """Do what is left to do on a run, and say what is next."""
        with telemetry.bind(run=str(job.run_id)):
            try:
                session = Session.open(self.log, job.run_id, lease_ttl_s=self.serving.lease_s)
            except SessionNotFoundError:
                return Done()  # It was erased.
            except LeaseHeldError as error:
                self._tell("run_held_elsewhere", holder=error.holder)
                return self._soon(min(_SOON_S, self.serving.lease_s / 5))
            try:
                with closing(session):
                    return self._do_all(job, session)
            except StaleWriterError as error:
                # Another worker has it: what this one had begun since then counts for nothing.
                self._tell("run_lost", reason=str(error))
                telemetry.record("treenail.worker.lost", 1)
                return self._soon(_SOON_S)

    def _do_all(self, job: Job, session: Session) -> Outcome:
        asked = self.log.agenda.entry(job.run_id)
        if asked is not None and asked.cancelled_by is not None and work_left(session) is not Left.NOTHING:
            cancel_submitted(session, asked.cancelled_by)
            self._tell("run_cancelled", by=asked.cancelled_by)
        submitted, left = submission_of(session), work_left(session)
        if left in (Left.BEGIN, Left.RESUME) and submitted is not None:
            found = self.agents.get(submitted.agent)
            if found is None:
                self._tell("agent_unknown", agent=submitted.agent, known=sorted(self.agents))
                return self._soon(_ELSEWHERE_S)
            if self._draining.is_set():
                return self._soon(0)
            left = self._turn(job, session, found, submitted, left)
        if left is Left.WAIT:
            self.log.agenda.park(job.run_id, session.head)
            return WakeOn(parked_event(job.run_id, session.head))
        if left is Left.NOTHING:
            self.log.agenda.strike(job.run_id, session.head)
            return Done()
        return self._soon(0)

    def _turn(
        self, job: Job, session: Session, found: WorkerAgent, submitted: RunSubmitted, left: Left
    ) -> Left:
        """Run one turn, and return what is left after it."""
        at_work = _AtWork(job.run_id, CancellationToken(job.cancellation))
        with self._lock:
            self._at_work[job.run_id] = at_work
        began = _REAL_TIME.monotonic()
        self._tell(
            "turn_began",
            agent=submitted.agent,
            resumed=left is Left.RESUME,
            attempt=job.attempt,
            queue=job.queue,
        )
        try:
            self._run(session, found, None if left is Left.RESUME else submitted.task, at_work.token)
        except LogError:
            raise
        except TreenailError as error:
            # Before the turn had begun: inside of it every failure is an ending.
            session.dispatch(RunRefused(str(error)))
            self._tell("run_refused", reason=str(error))
        finally:
            with self._lock:
                del self._at_work[job.run_id]
            at_work.token.unlink()
        if at_work.token.reason == "cancelled":
            self._record_cancel(session, at_work.cancelled_by or "")
        ended = newest_turn(session)
        left = work_left(session)
        self._tell(
            "turn_ended",
            state="unfinished" if ended is None else ended.state.value,
            kind=None if ended is None or ended.ended is None else ended.ended.error_kind,
            left=left.value,
            seconds=round(_REAL_TIME.monotonic() - began, 3),
            cost_usd=spent_usd_of(session),
        )
        return left

    def _run(self, session: Session, found: WorkerAgent, task: str | None, token: CancellationToken) -> None:
        options = found.options()
        options["checkouts"] = self._checkouts
        options["cancellation"] = token
        options["limits"] = partial(self._contained, found.limits)
        run_blocking(
            lambda: found.agent.arun_in(session, task, **options), face="Worker.work", instead="arun_in"
        )

    def _contained(self, most: Limits, session: Session) -> ExecutionContext:
        """Put a run under its own ceilings, those of this worker, and those that runs share."""
        limits = lower(ceilings_of(session), most)
        pots = self._ceilings.pots(self.log, session.tags, _REAL_TIME.now())
        return contain(session, limits, pots=pots)

    def _record_cancel(self, session: Session, by: str) -> None:
        if work_left(session) is not Left.NOTHING:
            cancel_submitted(session, by)
        self._tell("run_cancelled", by=by)

    def _soon(self, delay_s: float) -> WakeAt:
        return WakeAt(_REAL_TIME.now() + timedelta(seconds=delay_s))

    def _tell(self, what: str, **fields: object) -> None:
        """Write one line about something that happened."""
        _logger.info(what.replace("_", " "), extra={"event": what, "worker": self.name, **fields})


def lower(own: Limits | None, most: Limits) -> Limits:
    """Return a run's ceilings, none of them above what a worker allows."""
    if own is None:
        return most
    chosen = {
        name: min(each for each in (getattr(own, name), getattr(most, name)) if each is not None)
        for name in ("max_cost_usd", "max_steps", "max_retries", "timeout", "max_depth")
        if getattr(own, name) is not None or getattr(most, name) is not None
    }
    return replace(own, **chosen)

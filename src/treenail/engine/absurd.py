"""Absurd as the engine: durable tasks in the same Postgres database as the log.

Theory of operation
-------------------
A run is a task of Absurd whose parameters are the run's id. Everything goes through the functions of
Absurd's schema, on the connections of the log. So a submission is part of the log's transaction, and a
restart of the server is waited for as the log waits. Absurd's Python client has one connection for all its
threads, and does not make it again when it is lost.

**One task per run.** A task is known by the run's id as its idempotency key. While it lives, submitting the
run again changes nothing, so the sweeper may submit thousands of waiting runs. A task that has ended keeps
its key: then the next key is tried, `id/2`, `id/3` and so on.

**A claim** lasts as long as a lease of the log, and a thread extends it. A worker that is stopped or killed
loses it, and Absurd gives the task to another one. Whatever the old one says about its attempt afterwards
is refused by Absurd (AB002), so its books stay right.

**Events** are remembered from their first announcement on, so one that comes before the wait wakes it too.
"""

from __future__ import annotations

import importlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any
from uuid import UUID

import psycopg

from treenail.clock import SystemClock
from treenail.containment import CancellationToken
from treenail.engine.dispatcher import Done, Handler, Job, Outcome, Serving, WakeAt, WakeOn
from treenail.errors import EngineError, LogError
from treenail.log.postgres import PostgresLog

VERSION = "0.5.1"
"""The version of Absurd's schema that is used here."""
_TASK = "treenail.run"
_POLL_S = 0.25
"""How often it is asked for tasks while there are none."""
_TIDY_EVERY_S = 600.0
_KEPT_S = 86_400
"""How long ended tasks and announced events are kept, in seconds."""
_TIDY_AT_ONCE = 5000
_MAX_RETRY_S = 60.0
_MAX_QUEUE_BYTES = 57
_REAL_TIME = SystemClock()
_logger = getLogger("treenail.engine")

_CANCELLED, _LOST = "AB001", "AB002"
_LIVE = ("pending", "running", "sleeping")

_SQL: Mapping[str, bytes] = {
    "version": b"SELECT to_regproc('absurd.get_schema_version') IS NOT NULL",
    "schema_version": b"SELECT absurd.get_schema_version()",
    "lock": b"SELECT pg_advisory_xact_lock(hashtextextended('treenail/absurd', 0))",
    "queues": b"SELECT queue_name FROM absurd.list_queues()",
    "create_queue": b"SELECT absurd.create_queue(%(queue)s)",
    # A key that belongs to a living task changes nothing; the state says whether it lives.
    "spawn": b"""
        SELECT run, task.task_id, now.state FROM unnest(%(runs)s::text[]) AS run,
            LATERAL absurd.spawn_task(
                %(queue)s, %(name)s, jsonb_build_object('run', run),
                jsonb_build_object('idempotency_key', run || %(suffix)s)
            ) AS task,
            LATERAL absurd.get_task_result(%(queue)s, task.task_id) AS now
    """,
    "claim": b"""
        SELECT run_id, task_id, attempt, params ->> 'run'
        FROM absurd.claim_task(%(queue)s, %(worker)s, %(seconds)s, %(count)s)
    """,
    "extend": b"SELECT absurd.extend_claim(%(queue)s, %(attempt)s, %(seconds)s)",
    "complete": b"SELECT absurd.complete_run(%(queue)s, %(attempt)s, 'null'::jsonb)",
    "sleep": b"""
        SELECT absurd.schedule_run(
            %(queue)s, %(attempt)s, absurd.current_time() + make_interval(secs => %(delay_s)s)
        )
    """,
    "fail": b"""
        SELECT absurd.fail_run(
            %(queue)s, %(attempt)s, %(reason)s::jsonb,
            absurd.current_time() + make_interval(secs => %(delay_s)s)
        )
    """,
    "await": b"""
        SELECT should_suspend
        FROM absurd.await_event(%(queue)s, %(task)s, %(attempt)s, %(event)s, %(event)s)
    """,
    "emit": b"SELECT absurd.emit_event(%(queue)s, %(event)s)",
    "cancel": b"SELECT absurd.cancel_task(%(queue)s, %(task)s)",
    "tidy": b"""
        SELECT absurd.cleanup_tasks(%(queue)s, %(kept_s)s, %(count)s),
            absurd.cleanup_events(%(queue)s, %(kept_s)s, %(count)s)
    """,
}


def install(log: PostgresLog, queues: Sequence[str]) -> None:
    """Install Absurd's schema and make queues, as far as they are not there: all of it, or nothing.

    Raises `EngineError` if the extra is not installed, or if the database has another version of Absurd.
    """

    def work(connection: psycopg.Connection[Any], doubt: bool) -> None:
        connection.execute(_SQL["lock"])
        if not _one(connection, "version"):
            connection.execute(_schema().encode())
        _check_version(connection)
        known = {each for (each,) in connection.execute(_SQL["queues"])}
        for queue in queues:
            if _named(log, queue) not in known:
                connection.execute(_SQL["create_queue"], {"queue": _named(log, queue)})

    log.database.transaction("install Absurd", work)


def _schema() -> str:
    try:
        found = importlib.import_module("absurdctl")
    except ImportError as error:
        raise EngineError(
            "Absurd's schema is not installed in this database, and the extra 'absurd', which has it, is not "
            "installed here; in a checkout of Treenail, install it with `pip install '.[absurd]'`"
        ) from error
    return str(found.BUNDLED_SCHEMA_SQL)


def _check_version(connection: psycopg.Connection[Any]) -> None:
    found = _one(connection, "schema_version")
    if found != VERSION:
        raise EngineError(
            f"the database has Absurd {found}, and this Treenail uses {VERSION}; nothing was changed; bring "
            f"it to that version with absurdctl, or use another database"
        )


def _one(connection: psycopg.Connection[Any], name: str) -> Any:
    row = connection.execute(_SQL[name]).fetchone()
    assert row is not None
    return row[0]


def _named(log: PostgresLog, queue: str) -> str:
    """Return Absurd's name of a queue: deployments in one database do not share queues."""
    name = f"{log.url.schema}_{queue}"
    if not queue or len(name.encode()) > _MAX_QUEUE_BYTES:
        raise EngineError(f"the name of a queue must have 1 to {_MAX_QUEUE_BYTES} bytes, not {queue!r}")
    return name


@dataclass(slots=True)
class _Claim:
    """A task that this worker handles."""

    queue: str
    attempt_id: UUID
    task_id: UUID
    job: Job
    is_lost: bool = False


class AbsurdDispatcher:
    """Wakes workers by tasks of Absurd, in the database of the log."""

    name = "absurd"
    is_transactional = True

    def __init__(self, log: PostgresLog) -> None:
        self._log = log
        self._claims: dict[UUID, _Claim] = {}
        self._lock = threading.Lock()

    # --- from anywhere ---------------------------------------------------------------------------------

    def submit(self, queue: str, run_ids: Sequence[UUID]) -> None:
        """Have the handler called for each of these runs. One that waits for it already waits once."""
        if run_ids:
            self._log.database.transaction(
                "submit runs to Absurd", lambda connection, _: self._spawn(connection, queue, run_ids)
            )

    def wake(self, queue: str, event: str) -> None:
        """Announce an event: handlers that wait for it, or will wait for it, are called again."""
        self._do("emit", queue, {"event": event})

    def cancel(self, queue: str, run_id: UUID) -> None:
        """Tell the handler that is at work on a run, and drop what would have it called later.

        It is told within a third of the lease.
        """

        def work(connection: psycopg.Connection[Any], doubt: bool) -> None:
            # The task that lives is the one that another submission finds, or makes.
            for task in self._spawn(connection, queue, [run_id]):
                values = {"queue": _named(self._log, queue), "task": task}
                connection.execute(_SQL["cancel"], values)

        self._log.database.transaction(f"cancel run {run_id}", work)

    def _spawn(
        self, connection: psycopg.Connection[Any], queue: str, run_ids: Sequence[UUID]
    ) -> Sequence[UUID]:
        """Return the living task of each run; it is made where there is none."""
        runs, found = [str(each) for each in run_ids], []
        for number in range(1, 1_000_000):
            values = {
                "runs": runs,
                "queue": _named(self._log, queue),
                "name": _TASK,
                "suffix": "" if number == 1 else f"/{number}",
            }
            with _explained(queue):
                spawned = connection.execute(_SQL["spawn"], values).fetchall()
            found += [task for _, task, state in spawned if state in _LIVE]
            runs = [run for run, _, state in spawned if state not in _LIVE]
            if not runs:
                break
        return found

    # --- in a worker -----------------------------------------------------------------------------------

    def serve(self, handler: Handler, serving: Serving) -> None:
        """Call the handler for submitted runs until `serving.stop` is set and all handlers have returned.

        Raises `EngineError` if Absurd or a queue is not installed: see `install`.
        """
        self._log.database.run("look at Absurd's version", lambda connection, _: _check(connection))
        over = threading.Event()
        free = threading.Semaphore(serving.concurrency)
        keeper = threading.Thread(
            target=self._keep, args=(serving, over), name="treenail-claims", daemon=True
        )
        keeper.start()
        try:
            with ThreadPoolExecutor(serving.concurrency, thread_name_prefix="treenail-run") as pool:
                self._claim_until_stopped(handler, serving, free, pool)
        finally:
            over.set()
            keeper.join()

    def _claim_until_stopped(
        self, handler: Handler, serving: Serving, free: threading.Semaphore, pool: ThreadPoolExecutor
    ) -> None:
        tidied = float("-inf")
        queues = list(serving.queues)
        while not serving.stop.is_set():
            if not free.acquire(timeout=_POLL_S):
                continue
            if serving.stop.is_set():
                return
            count = 1
            while count < serving.concurrency and free.acquire(blocking=False):
                count += 1
            try:
                claimed = self._claim(queues, serving, count)
            except LogError:
                # The server is away for longer than the log waits: the log's own words say so.
                _logger.exception("no runs can be taken", extra={"event": "engine_away"})
                claimed = []
            serving.ready.set()
            for _ in range(count - len(claimed)):
                free.release()
            for each in claimed:
                pool.submit(self._work, handler, each, serving).add_done_callback(lambda _: free.release())
            queues.append(queues.pop(0))  # No queue keeps the others waiting.
            if not claimed:
                if _REAL_TIME.monotonic() - tidied > _TIDY_EVERY_S:
                    tidied = _REAL_TIME.monotonic()
                    self._tidy(queues)
                serving.stop.wait(_POLL_S)

    def _claim(self, queues: Sequence[str], serving: Serving, count: int) -> list[_Claim]:
        claimed: list[_Claim] = []
        for queue in queues:
            if len(claimed) == count:
                break
            values = {
                "worker": serving.worker,
                "seconds": _whole(serving.lease_s),
                "count": count - len(claimed),
            }
            for attempt_id, task_id, attempt, run in self._do("claim", queue, values):
                job = Job(UUID(run), queue, attempt, CancellationToken())
                claimed.append(_Claim(queue, attempt_id, task_id, job))
        with self._lock:
            self._claims |= {each.attempt_id: each for each in claimed}
        return claimed

    def _work(self, handler: Handler, claim: _Claim, serving: Serving) -> None:
        try:
            while True:
                try:
                    outcome: Outcome | Exception = handler(claim.job)
                except Exception as error:  # noqa: BLE001  # whatever it is, the handler is called again
                    outcome = error
                if not self._settle(claim, outcome):
                    return
        except LogError:
            # The claim expires, and another worker reads in the log how the run stands.
            _logger.exception("a run's task could not be settled", extra={"run": str(claim.job.run_id)})
        finally:
            with self._lock:
                self._claims.pop(claim.attempt_id, None)

    def _settle(self, claim: _Claim, outcome: Outcome | Exception) -> bool:
        """Tell Absurd what is next. Returns whether the handler is to be called again at once."""
        ours: dict[str, Any] = {"attempt": claim.attempt_id, "task": claim.task_id}
        match outcome:
            case Done():
                self._do("complete", claim.queue, ours)
            case WakeAt(at):
                delay_s = max((at - _REAL_TIME.now()).total_seconds(), 0)
                self._do("sleep", claim.queue, {**ours, "delay_s": delay_s})
            case WakeOn(event):
                found = self._do("await", claim.queue, {**ours, "event": event})
                return found == [(False,)]
            case Exception():
                attempt = claim.job.attempt
                delay_s = min(0.25 * 2 ** min(attempt, 16), _MAX_RETRY_S)
                reason = json.dumps({"name": type(outcome).__name__})
                _logger.error(
                    "a run could not be handled", exc_info=outcome, extra={"run": str(claim.job.run_id)}
                )
                self._do("fail", claim.queue, {**ours, "reason": reason, "delay_s": delay_s})
        return False

    def _keep(self, serving: Serving, over: threading.Event) -> None:
        """Extend the claims until serving is over."""
        while not over.wait(serving.lease_s / 3):
            with self._lock:
                claims = [each for each in self._claims.values() if not each.is_lost]
            for each in claims:
                values = {"attempt": each.attempt_id, "seconds": _whole(serving.lease_s)}
                try:
                    found = self._do("extend", each.queue, values, retry_s=serving.lease_s / 6)
                except LogError:
                    continue  # The next time, or the claim expires and the log's lease decides.
                if found == [(_CANCELLED,)]:
                    each.job.cancellation.cancel("cancelled")
                each.is_lost = bool(found) and found[0][0] in (_CANCELLED, _LOST)

    def _tidy(self, queues: Sequence[str]) -> None:
        for queue in queues:
            try:
                self._do("tidy", queue, {"kept_s": _KEPT_S, "count": _TIDY_AT_ONCE})
            except LogError:
                _logger.exception("Absurd's ended tasks could not be deleted")

    def _do(
        self, name: str, queue: str, values: Mapping[str, Any], *, retry_s: float | None = None
    ) -> list[tuple[Any, ...]]:
        """Call a function of Absurd's. A task that is not ours any more is answered by its code."""
        given = {"queue": _named(self._log, queue), **values}

        def work(connection: psycopg.Connection[Any], doubt: bool) -> list[tuple[Any, ...]]:
            try:
                with _explained(queue):
                    return connection.execute(_SQL[name], given).fetchall()
            except psycopg.Error as error:
                if error.sqlstate in (_CANCELLED, _LOST):
                    return [(error.sqlstate,)]
                if error.sqlstate == psycopg.errors.RaiseException.sqlstate:
                    return [(_LOST,)]  # "is not currently running": an attempt whose answer was lost.
                raise

        return self._log.database.run(f"call Absurd ({name})", work, retry_s=retry_s)


def _check(connection: psycopg.Connection[Any]) -> None:
    if not _one(connection, "version"):
        raise EngineError("Absurd is not installed in this database; install it with `treenail migrate`")
    _check_version(connection)


@contextmanager
def _explained(queue: str) -> Iterator[None]:
    try:
        yield
    except (
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.InvalidSchemaName,
    ):
        raise EngineError(
            f"Absurd has no queue {queue!r} in this database; make it with `treenail migrate --queue {queue}`"
        ) from None


def _whole(seconds: float) -> int:
    """Return whole seconds: Absurd counts in them."""
    return max(math.ceil(seconds), 1)

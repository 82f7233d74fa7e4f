"""The sweeper: submits again what the log says is unfinished and nobody holds.

An engine only wakes. It may have lost a run: it was restored from an old backup, it could not be reached
when the run was submitted, a task was deleted by hand. Every worker has a sweeper, which asks the log's
agenda twice per lease. A run that is unfinished, that nobody writes, and of which the engine was last told a
lease ago is submitted again. If the engine had not lost it, that does no harm: the log's lease lets one
worker write.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from uuid import UUID

from treenail import telemetry
from treenail.engine.dispatcher import Dispatcher
from treenail.engine.submission import SharedLog, parked_event
from treenail.errors import EngineError, LogError

_AT_ONCE = 1000
"""How many runs one sweep submits at most; the others follow in the next one."""

_logger = logging.getLogger("treenail.engine")


class Sweeper:
    """Submits lost runs again, from a thread, while the block runs."""

    def __init__(self, log: SharedLog, dispatcher: Dispatcher, *, lease_s: float) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._lease_s = lease_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treenail-sweeper", daemon=True)

    def __enter__(self) -> Sweeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def sweep(self) -> int:
        """Submit again what is due, and return how many runs that were."""
        found: dict[str, list[UUID]] = defaultdict(list)
        for each in self._log.agenda.due(engine=self._dispatcher.name, age_s=self._lease_s, count=_AT_ONCE):
            found[each.queue].append(each.run_id)
            if each.parked_seq:
                self._dispatcher.wake(each.queue, parked_event(each.run_id, each.parked_seq))
        for queue, run_ids in found.items():
            self._dispatcher.submit(queue, run_ids)
        return sum(map(len, found.values()))

    def _run(self) -> None:
        # Often enough that a run is found within a lease of being lost, whenever that was.
        while not self._over.wait(self._lease_s / 2):
            try:
                count = self.sweep()
            except (LogError, EngineError) as error:
                _logger.warning("the sweep failed: %s", error, extra={"event": "sweep_failed"})
                continue
            if count:
                telemetry.record("treenail.worker.swept", count)
                _logger.info("runs submitted again", extra={"event": "swept", "runs": count})

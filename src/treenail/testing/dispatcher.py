"""The seam to engines, for tests: a dispatcher in memory, and the suite that every dispatcher passes.

```python
class TestMine(DispatcherConformance):
    @pytest.fixture
    def dispatcher(self) -> Dispatcher:
        return MyDispatcher(...)
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from treenail.clock import SystemClock
from treenail.containment import CancellationToken
from treenail.engine import Dispatcher, Done, Handler, Job, Outcome, Serving, WakeAt, WakeOn

PATIENCE_S = 60.0
"""How long the suite waits for something that must happen."""
_RETRY_S = 0.05
_REAL_TIME = SystemClock()


@dataclass(slots=True)
class _Ticket:
    """A run that is to be handled, or is being handled."""

    run_id: UUID
    queue: str
    attempt: int = 0
    due: float = 0.0
    event: str | None = None
    token: CancellationToken = field(default_factory=CancellationToken)


class InMemoryDispatcher:
    """Wakes workers of this process. Nothing outlives it."""

    name = "memory"
    is_transactional = False

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._working: list[_Ticket] = []
        self._announced: set[tuple[str, str]] = set()

    def submit(self, queue: str, run_ids: Sequence[UUID]) -> None:
        """Have the handler called for each of these runs."""
        with self._changed:
            self._waiting += [_Ticket(each, queue) for each in run_ids]
            self._changed.notify_all()

    def wake(self, queue: str, event: str) -> None:
        """Announce an event."""
        with self._changed:
            self._announced.add((queue, event))
            self._changed.notify_all()

    def cancel(self, queue: str, run_id: UUID) -> None:
        """Tell the handler that is at work on a run, and drop what would have it called later."""
        with self._changed:
            self._waiting = [each for each in self._waiting if (each.queue, each.run_id) != (queue, run_id)]
            told = [each for each in self._working if (each.queue, each.run_id) == (queue, run_id)]
        for each in told:
            each.token.cancel("cancelled")

    def serve(self, handler: Handler, serving: Serving) -> None:
        """Call the handler for submitted runs until `serving.stop` is set and all handlers have returned."""
        free = threading.Semaphore(serving.concurrency)
        with ThreadPoolExecutor(serving.concurrency) as pool:
            serving.ready.set()
            while not serving.stop.is_set():
                if not free.acquire(timeout=0.01):
                    continue
                ticket = None if serving.stop.is_set() else self._take(serving)
                if ticket is None:
                    free.release()
                    continue
                work = pool.submit(self._work, handler, ticket)
                work.add_done_callback(lambda _: free.release())

    def _take(self, serving: Serving) -> _Ticket | None:
        with self._changed:
            now = _REAL_TIME.monotonic()
            for place, each in enumerate(self._waiting):
                is_announced = each.event is None or (each.queue, each.event) in self._announced
                if each.queue in serving.queues and each.due <= now and is_announced:
                    self._working.append(each)
                    return self._waiting.pop(place)
            self._changed.wait(0.01)
            return None

    def _work(self, handler: Handler, ticket: _Ticket) -> None:
        ticket.attempt, ticket.event = ticket.attempt + 1, None
        job = Job(ticket.run_id, ticket.queue, ticket.attempt, ticket.token)
        try:
            outcome: Outcome | None = handler(job)
        except Exception:  # noqa: BLE001  # whatever it is, the handler is called again
            outcome = None
        with self._changed:
            self._working.remove(ticket)
            if isinstance(outcome, Done) or ticket.token.is_cancelled:
                return
            delay_s = _RETRY_S
            if isinstance(outcome, WakeAt):
                delay_s = (outcome.at - _REAL_TIME.now()).total_seconds()
            ticket.due = _REAL_TIME.monotonic() + delay_s
            if isinstance(outcome, WakeOn):
                ticket.due, ticket.event = 0.0, outcome.event
            self._waiting.append(ticket)
            self._changed.notify_all()


class Calls:
    """A handler that notes its calls; `then` decides what it returns."""

    def __init__(self, then: Callable[[Job], Outcome] = lambda job: Done()) -> None:
        self._then = then
        self._noted = threading.Condition()
        self.jobs: list[Job] = []

    def __call__(self, job: Job) -> Outcome:
        """Note a call."""
        with self._noted:
            self.jobs.append(job)
            self._noted.notify_all()
        return self._then(job)

    def count(self, run_id: UUID) -> int:
        """Return how often a run was handled."""
        return sum(each.run_id == run_id for each in self.jobs)

    def wait(self, run_id: UUID, count: int = 1) -> None:
        """Wait until a run was handled that often."""
        with self._noted:
            came = self._noted.wait_for(lambda: self.count(run_id) >= count, PATIENCE_S)
        assert came, f"the handler was called {self.count(run_id)} times for {run_id}, not {count}"


@contextmanager
def serving(dispatcher: Dispatcher, handler: Handler, **options: object) -> Iterator[Serving]:
    """Serve in a thread while the block runs."""
    given = Serving("conformance", **{"lease_s": 2.0, **options})  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        served: Future[None] = pool.submit(dispatcher.serve, handler, given)
        try:
            assert given.ready.wait(PATIENCE_S), "the dispatcher did not get ready"
            yield given
        finally:
            given.stop.set()
            served.result(PATIENCE_S)


class DispatcherConformance:
    """What every dispatcher promises. Subclass it, and provide the fixture `dispatcher`."""

    @pytest.fixture
    def queue(self) -> str:
        """Name a queue that no other test uses; one that needs to be made is made here."""
        return f"q{uuid4().hex[:12]}"

    def test_a_submitted_run_is_handled(self, dispatcher: Dispatcher, queue: str) -> None:
        """Also if it was submitted while nobody served."""
        calls, first, second = Calls(), uuid4(), uuid4()
        dispatcher.submit(queue, [first])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(first)
            dispatcher.submit(queue, [second])
            calls.wait(second)
        assert {each.queue for each in calls.jobs} == {queue}

    def test_many_runs_are_handled(self, dispatcher: Dispatcher, queue: str) -> None:
        """Every one of them."""
        calls, runs = Calls(), [uuid4() for _ in range(20)]
        dispatcher.submit(queue, runs)
        with serving(dispatcher, calls, queues=[queue]):
            for each in runs:
                calls.wait(each)

    def test_a_run_that_is_done_can_be_submitted_again(self, dispatcher: Dispatcher, queue: str) -> None:
        """As often as it is asked for."""
        calls, run = Calls(), uuid4()
        with serving(dispatcher, calls, queues=[queue]):
            for count in (1, 2, 3):
                dispatcher.submit(queue, [run])
                calls.wait(run, count)

    def test_a_worker_takes_only_its_queues(self, dispatcher: Dispatcher, queue: str) -> None:
        """The others wait for a worker that serves their queue."""
        calls, elsewhere, here = Calls(), uuid4(), uuid4()
        dispatcher.submit(f"{queue}x", [elsewhere])
        dispatcher.submit(queue, [here])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(here)
        assert calls.count(elsewhere) == 0
        with serving(dispatcher, calls, queues=[queue, f"{queue}x"]):
            calls.wait(elsewhere)

    def test_no_more_than_so_many_are_handled_at_once(self, dispatcher: Dispatcher, queue: str) -> None:
        """And as many as may be."""
        together, most, lock = 0, 0, threading.Lock()
        barrier = threading.Barrier(2)

        def work(job: Job) -> Outcome:
            nonlocal together, most
            with lock:
                together += 1
                most = max(most, together)
            barrier.wait(PATIENCE_S)  # Two are at work at the same time, or nobody gets past this.
            with lock:
                together -= 1
            return Done()

        calls, runs = Calls(work), [uuid4() for _ in range(6)]
        dispatcher.submit(queue, runs)
        with serving(dispatcher, calls, queues=[queue], concurrency=2):
            for each in runs:
                calls.wait(each)
        assert most == 2

    def test_a_run_is_woken_at_its_time(self, dispatcher: Dispatcher, queue: str) -> None:
        """Not before it."""
        run, called = uuid4(), list[datetime]()
        wanted = datetime.now(UTC)

        def work(job: Job) -> Outcome:
            nonlocal wanted
            called.append(datetime.now(UTC))
            if len(called) > 1:
                return Done()
            wanted = datetime.now(UTC) + timedelta(seconds=0.7)
            return WakeAt(wanted)

        calls = Calls(work)
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run, 2)
        # Its clock and ours are those of the same machine, or nearly.
        assert called[1] >= wanted - timedelta(seconds=0.1)

    def test_a_run_is_woken_by_its_event(self, dispatcher: Dispatcher, queue: str) -> None:
        """And by no other."""
        run, other, event = uuid4(), uuid4(), f"answer/{uuid4()}"
        waits: list[Outcome] = [WakeOn(event), Done()]
        calls = Calls(lambda job: waits.pop(0) if job.run_id == run else Done())
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run)
            dispatcher.wake(queue, f"answer/{uuid4()}")
            dispatcher.submit(queue, [other])
            calls.wait(other)
            assert calls.count(run) == 1
            dispatcher.wake(queue, event)
            calls.wait(run, 2)

    def test_an_event_that_comes_before_the_wait_is_not_lost(
        self, dispatcher: Dispatcher, queue: str
    ) -> None:
        """It may come between the decision to wait and the wait."""
        run, event = uuid4(), f"answer/{uuid4()}"
        waits: list[Outcome] = [WakeOn(event), Done()]

        def work(job: Job) -> Outcome:
            dispatcher.wake(queue, event)
            return waits.pop(0)

        calls = Calls(work)
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run, 2)

    def test_a_handler_that_fails_is_called_again(self, dispatcher: Dispatcher, queue: str) -> None:
        """Until it returns."""
        run, failures = uuid4(), [OSError("the disk is full"), ValueError("no")]

        def work(job: Job) -> Outcome:
            if failures:
                raise failures.pop()
            return Done()

        calls = Calls(work)
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run, 3)

    def test_a_handler_at_work_is_told_that_its_run_is_cancelled(
        self, dispatcher: Dispatcher, queue: str
    ) -> None:
        """By the token of its job."""
        run, was_told = uuid4(), list[bool]()

        def work(job: Job) -> Outcome:
            was_told.append(job.cancellation.wait(PATIENCE_S))
            return Done()

        calls = Calls(work)
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run)
            dispatcher.cancel(queue, run)
        assert was_told == [True]

    def test_a_cancelled_run_is_not_woken(self, dispatcher: Dispatcher, queue: str) -> None:
        """It can be submitted again."""
        run, other, event = uuid4(), uuid4(), f"answer/{uuid4()}"
        calls = Calls(lambda job: WakeOn(event) if job.run_id == run and calls.count(run) == 1 else Done())
        dispatcher.submit(queue, [run])
        with serving(dispatcher, calls, queues=[queue]):
            calls.wait(run)
            dispatcher.cancel(queue, run)
            dispatcher.wake(queue, event)
            dispatcher.submit(queue, [other])
            calls.wait(other)
            assert calls.count(run) == 1
            dispatcher.submit(queue, [run])
            calls.wait(run, 2)

    def test_a_worker_that_stops_waits_for_its_handlers_and_leaves_the_rest(
        self, dispatcher: Dispatcher, queue: str
    ) -> None:
        """Another worker takes what is left."""
        begun, may_end = threading.Event(), threading.Event()
        runs = [uuid4(), uuid4()]
        ended = list[UUID]()

        def work(job: Job) -> Outcome:
            begun.set()
            assert may_end.wait(PATIENCE_S)
            ended.append(job.run_id)
            return Done()

        calls = Calls(work)
        dispatcher.submit(queue, runs)
        with serving(dispatcher, calls, queues=[queue], concurrency=1) as given:
            assert begun.wait(PATIENCE_S)
            given.stop.set()
            may_end.set()
        assert len(ended) == 1
        with serving(dispatcher, calls, queues=[queue], concurrency=1):
            for each in runs:
                calls.wait(each)

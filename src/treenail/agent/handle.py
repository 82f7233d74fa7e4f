"""A run that is under way: its id, its events, answers to its questions, its end."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from contextvars import copy_context
from types import TracebackType
from typing import Any, Generic, Self
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from treenail.agent.events import Reading, RunEvent
from treenail.agent.run import Run
from treenail.containment import CancellationToken, wait_finished
from treenail.conversation import enable_inner_message_recording
from treenail.errors import UsageError
from treenail.log import Log
from treenail.prompt import OutputT
from treenail.providers import TextDelta
from treenail.state import Session
from treenail.tools import ToolStarted, answer_hold, pending_holds, refuse_in_event_loop
from treenail.turns import (
    InnerLoop,
    Lagged,
    LiveEvent,
    LiveFeed,
    StatusChanged,
    Subscription,
    TurnResult,
    TurnState,
)

Begun = tuple[InnerLoop, Callable[[], Awaitable[TurnResult]]]
"""A loop, and how its turn is run: as a new one, or resumed."""


class Tick:
    """Is published when the log has something new and nothing else says so."""


class Idle:
    """Is published when the work has stopped."""


class RunHandle(Generic[OutputT]):
    """A run that was started: `agent.start(...)` and `async with agent.stream(...)` make one.

    Any thread and any event loop may use it. Iterating over it gives its events from the first one on.
    """

    def __init__(
        self,
        log: Log,
        *,
        begin: Callable[[], Begun],
        resume: Callable[[UUID], Begun],
        drive: Callable[[InnerLoop, Callable[[], Awaitable[TurnResult]]], Awaitable[Run[OutputT]]],
        cancellation: CancellationToken,
        owns_log: bool,
    ) -> None:
        self.log = log
        self._begin, self._resume, self._drive = begin, resume, drive
        self._token = cancellation
        self._lock = threading.Lock()
        self._feed = LiveFeed()
        # The first reader gets what is published from the beginning on, however late it comes.
        self._first: Subscription | None = self._feed.subscribe()
        self._draft = ""
        self._draft_at = 0
        self._is_active = False
        self._answers: list[dict[str, Any]] = []
        self._ended: Future[Run[OutputT]] = Future()
        self._spawn: Callable[[Begun], object] = self._in_thread
        self.id: UUID
        """The run's id, which is known at once."""
        if owns_log:
            weakref.finalize(self, log.close)

    def __repr__(self) -> str:
        return f"RunHandle({self.id}, {'under way' if self._is_active else 'stopped'})"

    @property
    def is_under_way(self) -> bool:
        """Whether the turn is being worked on."""
        return self._is_active

    # .. starting ..

    def start_in_thread(self) -> Self:
        """Begin in a thread with an event loop of its own; return when the run has its id."""
        begun: Future[None] = Future()

        async def work() -> None:
            try:
                loop = self._opened(self._begin())
            except BaseException as error:  # noqa: BLE001  # it is the caller's
                begun.set_exception(error)
                return
            begun.set_result(None)
            await self._work(loop)

        self._thread(work)
        begun.result()
        return self

    def start_in(self, tasks: TaskGroup) -> Self:
        """Begin in a task of the event loop that runs here."""
        self._spawn = lambda begun: tasks.start_soon(self._work, begun)
        tasks.start_soon(self._work, self._opened(self._begin()))
        return self

    def _opened(self, begun: Begun) -> Begun:
        loop, _ = begun
        session, shown = loop.state.session, loop.watch
        self.id, self._is_active = session.session_id, True

        def watch(event: LiveEvent) -> None:
            if shown is not None:
                shown(event)
            self._publish(session.head, event)

        loop.watch = watch
        # Nothing is shown between a call's start and its end, which may be far apart.
        session.observe(ToolStarted, lambda *_: self._publish(session.head, Tick()))  # type: ignore[arg-type]
        return begun

    def _thread(self, work: Callable[[], Awaitable[None]]) -> None:
        # A program that ends takes its runs along, as a crash would: they can be resumed.
        context = copy_context()
        threading.Thread(
            target=lambda: context.run(anyio.run, work), name="treenail-run", daemon=True
        ).start()

    def _in_thread(self, begun: Begun) -> None:
        self._thread(lambda: self._work(begun))

    # .. working ..

    async def _work(self, begun: Begun) -> None:
        while True:
            loop, go = begun
            run, error = None, None
            try:
                run = await self._drive(loop, go)
                run.close()
            except BaseException as stopped:  # noqa: BLE001  # whoever waits for the result is told
                error = stopped
            with self._lock:
                if run is not None and run.state is TurnState.HELD and self._is_answered():
                    begun = self._opened(self._resume(self.id))
                    continue
                self._is_active, self._draft = False, ""
                ended = self._ended
            if run is not None:
                ended.set_result(run)
            elif error is not None:
                ended.set_exception(error)
            self._publish(0, Idle())  # type: ignore[arg-type]  # a mark for the readers here
            if error is not None and not isinstance(error, Exception):
                raise error
            return

    def _publish(self, head: int, event: LiveEvent) -> None:
        with self._lock:
            if isinstance(event, TextDelta):
                self._draft, self._draft_at = self._draft + event.text, head
            elif isinstance(event, StatusChanged):
                self._draft = ""
            self._feed.publish((head, event))  # type: ignore[arg-type]  # the feed carries what it is given

    # .. steering ..

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """Interrupt the run: the work in flight is cut off, and the turn ends in the log."""
        self._token.cancel(detail=reason)

    def answer(self, call_id: str | None = None, *, approved: bool, note: str = "", by: str = "") -> None:
        """Answer a call that waits for a person; when all are answered, the run continues.

        Without a `call_id` it is the only one that waits. The answer is recorded with `by`, who gave it.
        """
        with closing(Session.open(self.log, self.id, read_only=True)) as session:
            waiting = [each.call_id for each in pending_holds(session)]
        chosen = waiting if call_id is None else [each for each in waiting if each == call_id]
        if len(chosen) != 1:
            raise UsageError(f"name the call that is answered; these wait: {', '.join(waiting) or 'none'}")
        with self._lock:
            self._answers.append(
                {"call_id": chosen[0], "approved": approved, "note": note, "answered_by": by}
            )
            if self._is_active or not self._is_answered():
                return
            self._ended = Future()
            begun = self._opened(self._resume(self.id))
        self._spawn(begun)

    def _is_answered(self) -> bool:
        """Record the answers that were given; say whether there were some, and nothing waits any more."""
        given, self._answers = self._answers, []
        if not given:
            return False
        with closing(Session.open(self.log, self.id)) as session:
            enable_inner_message_recording(session)
            for each in given:
                answer_hold(session, **each)
            return not pending_holds(session)

    # .. the end ..

    def result(self, timeout_s: float | None = None) -> Run[OutputT]:
        """Wait for the turn's end, in this thread; raises `TimeoutError` if it takes longer than that.

        The run is closed: its files are free for others, and `run.output` and `run.messages` can be read.
        """
        refuse_in_event_loop("RunHandle.result", "aresult")
        return self._ended.result(timeout_s)

    async def aresult(self) -> Run[OutputT]:
        """Wait for the turn's end, inside an event loop. See `result`."""
        ended = self._ended
        await wait_finished(ended)
        return ended.result()

    # .. reading ..

    def subscribed(self) -> tuple[Subscription, str, int, bool]:
        """Return a subscription, the answer that is being written, and whether it is from the beginning."""
        with self._lock:
            first, self._first = self._first, None
            if first is not None:
                return first, "", 0, True
            feed = self._feed.subscribe()
            if not self._is_active:
                feed.close()
            return feed, self._draft, self._draft_at, False

    def events(self, *, after: int = 0) -> RunEvents:
        """Return the run's events behind number `after`; iterate with `for` or `async for`.

        They end when the run has stopped and nobody has answered what it was held for.
        """
        return RunEvents(self, after)

    def __iter__(self) -> Iterator[RunEvent]:
        return iter(self.events())

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self.events().__aiter__()


class RunEvents:
    """The events of a run, for one reader: iterate with `for` or `async for`."""

    def __init__(self, handle: RunHandle[Any], after: int) -> None:
        self._handle, self._after = handle, after
        self._found: deque[RunEvent] = deque()
        self._feed: Subscription | None = None
        self._is_idle = False

    def _join(self) -> Subscription:
        """Subscribe; a reader that joins later takes the log so far, and the answer that is being written."""
        if self._feed is None:
            self._feed, draft, at, is_first = self._handle.subscribed()
            session = Session.open(self._handle.log, self._handle.id, read_only=True)
            self._reading = Reading(session, self._after)
            if not is_first:
                self._found += self._reading.logged()
            if draft:
                self._found += self._reading.live(at, TextDelta(draft))
        return self._feed

    def _take(self, published: Any) -> None:
        """Take what was published; None if nothing will come any more."""
        if isinstance(published, tuple) and not isinstance(published[1], Idle):
            self._found += self._reading.live(*published)
        elif not isinstance(published, Lagged):
            self._found += self._reading.logged()
            self._is_idle = True

    def _is_over(self) -> bool:
        """Say whether nothing more comes: whoever was given the last event may have answered it by now."""
        return self._is_idle and not self._handle.is_under_way

    def __iter__(self) -> Iterator[RunEvent]:
        feed = self._join()
        return self._events(iter(feed))

    def _events(self, pieces: Iterator[Any]) -> Iterator[RunEvent]:
        while True:
            while self._found:
                yield self._found.popleft()
            if self._is_over():
                return
            self._is_idle = False
            self._take(next(pieces, None))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        feed = self._join()
        while not self._found:
            if self._is_over():
                raise StopAsyncIteration
            self._is_idle = False
            self._take(await feed.get())
        return self._found.popleft()


class RunStream(Generic[OutputT]):
    """A run for the length of a block: `async with agent.stream(...) as run`, or `with`.

    Leaving the block early interrupts the run; its turn ends in the log, and it can be resumed.
    """

    def __init__(self, handle: RunHandle[OutputT]) -> None:
        self._handle = handle
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> RunHandle[OutputT]:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            return self._handle.start_in(self._tasks)
        except BaseException as error:
            await self._tasks.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        if self._handle.is_under_way:
            self._handle.cancel("the block was left")
        # Not with the error: it is the caller's, and the turn is to come to its end in the log.
        await self._tasks.__aexit__(None, None, None)

    def __enter__(self) -> RunHandle[OutputT]:
        return self._handle.start_in_thread()

    def __exit__(self, *_: object) -> None:
        if self._handle.is_under_way:
            self._handle.cancel("the block was left")
            self._handle.result()

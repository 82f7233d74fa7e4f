"""Transactions: events that are staged until they are committed together, or forgotten.

Staged events are visible inside the transaction and nowhere else. A commit folds them on the state as it is
then and appends them, together with what the runtime adds, in one batch; a rollback forgets them. History
does not wait: an event that reaches LOG slices only is logged at once, also inside a transaction. An event
that reaches both kinds is staged, and a rollback logs it marked, so that it reaches only the LOG slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

from treenail.codec import is_immutable
from treenail.errors import CodecError, UsageError
from treenail.log import Channel, Draft, SlicePolicy, to_microseconds
from treenail.state.core import Core, SliceChange
from treenail.state.dispatch import DispatchResult
from treenail.state.events import spec_of
from treenail.state.fold import Staged, Working
from treenail.state.slices import Slice

if TYPE_CHECKING:
    from treenail.state.session import Session


class Stamp(NamedTuple):
    """What is written beside each event: which turn, run and trace it belongs to."""

    turn_id: str | None = None
    run_id: str | None = None
    trace_id: str | None = None


_stamp: ContextVar[Stamp] = ContextVar("treenail_stamp", default=Stamp())  # noqa: B039  # a tuple
_transactions: ContextVar[tuple[Transaction, ...]] = ContextVar("treenail_transactions", default=())


@contextmanager
def stamped(
    *, turn_id: str | None = None, run_id: str | None = None, trace_id: str | None = None
) -> Iterator[None]:
    """Write these ids beside every event that is dispatched in the block."""
    outer = _stamp.get()
    token = _stamp.set(Stamp(turn_id or outer.turn_id, run_id or outer.run_id, trace_id or outer.trace_id))
    try:
        yield
    finally:
        _stamp.reset(token)


def stage(core: Core, events: Iterable[object]) -> list[Staged]:
    """Encode events that are recorded together. Raises `EncodeError` for one that cannot be stored."""
    at_us = to_microseconds(core.clock.now())
    stamp = _stamp.get()
    staged = []
    for event in events:
        kind = type(event)
        if spec_of(kind).channel is Channel.LIVE:
            staged.append(Staged(event, None))
            continue
        payload = core.codec.encode(event)
        draft = Draft(core.fold.name_of(kind), payload, at_us, *stamp)
        staged.append(Staged(event, draft, is_immutable(event)))
    return staged


def transaction_of(core: Core) -> Transaction | None:
    """Return the session's transaction that the running call is part of."""
    for each in _transactions.get():
        if each.is_of(core):
            return each
    return None


class Transaction:
    """Events of one session that are staged until they are committed together, or forgotten.

    Work on it through `session` (a handle that stages, from any thread) or inside `active()`
    (where every handle of the session stages).
    """

    __slots__ = ("_core", "_handle", "_seen", "_staged", "_working", "began_after", "is_committed", "is_open")

    def __init__(self, core: Core, handle: Callable[[Core, Transaction], Session]) -> None:
        self._core = core
        self._handle = handle
        self.began_after = core.head
        """The session's newest event when the transaction began."""
        self.is_open = True
        """Whether it still waits for its commit or rollback."""
        self.is_committed = False
        """Whether its events are in the log; also when an interrupt came right after they were written."""
        self._staged: list[Staged] = []
        self._working: Working | None = None
        """The slices as this call sees them, made when they are read."""
        self._seen = 0
        """The version of the session's slices that these were made on."""

    @property
    def session(self) -> Session:
        """A handle of the session that stages what is dispatched through it."""
        # It is not kept: two that held each other would have to wait for the garbage collector.
        return self._handle(self._core, self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Stage everything that is dispatched to the session in the block."""
        token = self.enter()
        try:
            yield
        finally:
            self.leave(token)

    def enter(self) -> Token[tuple[Transaction, ...]]:
        """Stage everything that the present context dispatches to the session, until `leave`.

        A context of its own (`contextvars.copy_context().run(...)`) needs no way back.
        """
        return _transactions.set((self, *_transactions.get()))

    def leave(self, entered: Token[tuple[Transaction, ...]]) -> None:
        """End what that `enter` began."""
        _transactions.reset(entered)

    @property
    def staged(self) -> tuple[object, ...]:
        """The events that wait for the commit."""
        return tuple(each.event for each in self._staged)

    @property
    def count(self) -> int:
        """How many events wait for the commit."""
        return len(self._staged)

    def is_of(self, core: Core) -> bool:
        """Say whether it stages the events of that session."""
        return self._core is core

    def check_open(self) -> None:
        """Raise `UsageError` if it is over: what a call left running comes too late."""
        if not self.is_open:
            raise UsageError("this call is over; its handle of the session can no longer be used")

    def slices(self) -> dict[type, Slice[Any]]:
        """Return the slices that this call sees differently from the session. The lock is held."""
        return self._view().changes

    def _view(self) -> Working:
        core = self._core
        if self._working is None or self._seen != core.version:
            working = Working(core.slices)
            for each in self._staged:
                core.fold.apply(working, core.fold.choose(working, each), 0)
            self._working, self._seen = working, core.version
        return self._working

    def take(self, staged: Sequence[Staged]) -> Sequence[DispatchResult]:
        """Stage events, all or none. History among them does not wait: it is logged at once."""
        core = self._core
        with core.lock:
            self.check_open()
            core.check_writable()
            core.ensure_loaded()
            seen = self._view()
            ahead = Working(core.slices, seen.changes)
            results: dict[int, DispatchResult] = {}
            waiting: list[Staged] = []
            history: list[Staged] = []
            for index, each in enumerate(staged):
                if each.logged is None or core.fold.policies_of(each.event) <= {SlicePolicy.LOG}:
                    history.append(each)
                    continue
                mine = each
                if not each.immutable:
                    # The caller may change its object before the commit.
                    mine = each._replace(event=core.codec.decode(type(each.event), each.logged.payload))
                results[index] = core.fold.apply(ahead, core.fold.choose(ahead, mine), 0)
                waiting.append(mine)
            # All that can be refused was tried: from here on only the log can say no.
            changes, logged = core.append(history)
            self._staged.extend(waiting)
            self._working = None if history else ahead
        told = iter(self._notify(changes, logged))
        return [results[index] if index in results else next(told) for index in range(len(staged))]

    def _notify(
        self, changes: Sequence[SliceChange], results: Sequence[DispatchResult]
    ) -> Sequence[DispatchResult]:
        """Tell observers and subscribers, who stand outside this call wherever they are called from."""
        if not changes and self._core.dispatcher is None:
            return results
        token = _transactions.set(tuple(each for each in _transactions.get() if each is not self))
        try:
            return self._core.notify(changes, results)
        finally:
            _transactions.reset(token)

    def commit(self, *extra: object) -> Sequence[DispatchResult]:
        """Log everything that was staged, and `extra` after it, in one batch.

        If that fails, nothing is logged and the transaction is still open: roll it back.
        """
        core = self._core
        with core.lock:
            self.check_open()
            batch = [*self._staged, *stage(core, extra)]
            changes, results = core.append(batch, written=self._end)
        return self._notify(changes, results)

    def _end(self) -> None:
        self.is_open = False
        self.is_committed = True

    def rollback(self, *extra: object) -> Sequence[DispatchResult]:
        """Forget what was staged. History that it touched, and `extra`, are logged in one batch.

        Whatever happens, nothing stays staged; rolling back what is over does nothing. If an event of
        `extra` cannot be stored, that is raised after the history was logged without it.
        """
        core = self._core
        refused: CodecError | None = None
        with core.lock:
            if not self.is_open:
                return ()
            batch = [
                waiting._replace(logged=waiting.logged._replace(rolled_back=True))
                for waiting in self._staged
                if waiting.logged is not None and SlicePolicy.LOG in core.fold.policies_of(waiting.event)
            ]
            try:
                for each in extra:
                    batch += stage(core, (each,))
            except CodecError as error:
                refused = error
            self.is_open = False
            self._staged = []
            self._working = None
            changes, results = core.append(batch)
        told = self._notify(changes, results)
        if refused is not None:
            raise refused
        return told

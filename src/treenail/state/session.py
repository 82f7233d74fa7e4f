"""Sessions: typed slices, folded from one log.

Theory of operation
-------------------
`dispatch(event)` is the only way that state changes. The event is encoded (what
cannot be stored is refused here, while nothing has changed), its reducers are run
on the present slices, it is appended to the log, and only then do the new slices
take the place of the old. So the state in memory is at every moment the fold of
the events in the log, and opening a session is folding them again: from the newest
stored snapshot, if one fits the reducers registered here, and the events after it.

A **transaction** stages events instead of logging them. They are visible to
whoever works inside it and to nobody else. Its commit folds them on the state as
it is then and appends them, together with what the runtime adds, in one batch; its
rollback forgets them. History does not wait: an event that reaches LOG slices only
is logged at once, also inside a transaction. An event that reaches both kinds is
staged, and a rollback logs it marked, so that it reaches only the LOG slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import replace
from datetime import datetime
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, cast
from uuid import UUID

from treenail.clock import Clock, SystemClock, new_id
from treenail.codec import Codec, codec, is_immutable
from treenail.errors import CodecError, LogDamagedError, SnapshotMismatchError, UsageError
from treenail.log.base import DEFAULT_LEASE_SECONDS, Log
from treenail.log.event import Channel, Draft, Envelope, SlicePolicy, to_microseconds
from treenail.log.lease import this_process_owner
from treenail.log.memory import MemoryLog
from treenail.state import fold
from treenail.state.dispatch import Dispatcher, DispatchResult, Outcome, Outcomes
from treenail.state.events import (
    ClearSlice,
    InitializeSlice,
    RestoredItem,
    RestoredSlice,
    StateRestored,
    spec_of,
)
from treenail.state.fold import Change, Core, DeclaredReducer, OpenReport, Staged, Stamp, Working
from treenail.state.slices import EMPTY, Entry, Slice, declared_reducers, entries_of, opened
from treenail.state.snapshot import Snapshot, SnapshotState
from treenail.state.views import SessionView, SliceReader

T = TypeVar("T")

_COPIED_AT_ONCE = 1000
"""How many events a fork copies in one append."""

_new = tuple.__new__
"""Makes a named tuple of its fields in half the time that its own constructor takes."""

_NOTHING: Mapping[type, Slice[Any]] = MappingProxyType({})

_NO_STAMP = Stamp()
_stamp: ContextVar[Stamp] = ContextVar("treenail_stamp", default=_NO_STAMP)
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


class SliceAccessor(SliceReader[T]):
    """Access to one slice of a session: what `session[T]` returns."""

    __slots__ = ("_session", "_slice_type")

    def __init__(self, session: Session, slice_type: type[T]) -> None:
        super().__init__(lambda: session._slice(slice_type))
        self._session = session
        self._slice_type = slice_type

    def seed(self, values: T | Iterable[T]) -> DispatchResult:
        """Put one item, or these, in place of everything in the slice."""
        items = (values,) if isinstance(values, self._slice_type) else tuple(cast("Iterable[T]", values))
        return self._session._seed(self._slice_type, items)

    def append(self, value: T) -> DispatchResult:
        """Dispatch an item: its reducers decide, or it is added at the end."""
        if type(value) is not self._slice_type and not self._session._core.reducers.get(type(value)):
            raise UsageError(
                f"a {type(value).__qualname__} has a slice of its own; append it to "
                f"session[{type(value).__qualname__}], or register a reducer that brings it to "
                f"session[{self._slice_type.__qualname__}]"
            )
        return self._session.dispatch(value)

    def dispatch(self, event: object) -> DispatchResult:
        """Dispatch an event to the session."""
        return self._session.dispatch(event)

    def clear(self, predicate: Callable[[T], bool] | None = None) -> DispatchResult:
        """Take away the items for which the predicate holds, or all."""
        return self._session._clear(self._slice_type, predicate)

    def register(
        self, event_type: type, reducer: Callable[..., Any], *, policy: SlicePolicy | None = None
    ) -> None:
        """Let a reducer bring events of exactly that type into this slice."""
        if not isinstance(event_type, type):
            raise UsageError(f"{event_type!r} is not a class; reducers are registered for a class of events")
        self._session._core.register(self._slice_type, event_type, reducer, policy)


class _Mutation:
    """What `session.mutate()` returns: the changing half of a session."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot."""
        self._session.rollback(snapshot, preserve_logs=preserve_logs)

    def dispatch(self, event: object) -> DispatchResult:
        """Dispatch an event."""
        return self._session.dispatch(event)

    def reset(self) -> None:
        """Empty every slice that is not history."""
        self._session.reset()


class Session:
    """Typed slices, folded from one log.

    `Session()` makes a new session that lives in memory; `Session(log=...)` makes a durable one;
    `Session.open(log, session_id)` opens one that exists. A session is used from any thread.
    """

    __slots__ = ("__weakref__", "_core", "_transaction")

    _core: Core
    _transaction: Transaction | None

    def __init__(
        self,
        bus: Dispatcher | None = None,
        *,
        dispatcher: Dispatcher | None = None,
        parent: Session | SessionView | None = None,
        session_id: UUID | None = None,
        created_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        log: Log | None = None,
        clock: Clock | None = None,
        codec: Codec = codec,
        lease_ttl_s: float = DEFAULT_LEASE_SECONDS,
    ) -> None:
        dispatcher = _one_dispatcher(bus, dispatcher)
        clock = clock or (parent.clock if parent is not None else None) or SystemClock()
        session_id = session_id or new_id()
        created_at = created_at or clock.now()
        if created_at.tzinfo is None:
            raise UsageError("created_at has no time zone; use datetime.now(UTC)")
        parent_id = parent.session_id if parent is not None else None
        all_tags = {**(family_tags(parent.tags) if parent is not None else {}), **(tags or {})}
        all_tags["session_id"] = str(session_id)
        if parent_id is not None:
            all_tags["parent_session_id"] = str(parent_id)
        log = log if log is not None else MemoryLog(clock=clock)
        log.create(session_id, created_at=created_at, parent_id=parent_id, tags=all_tags)
        self._transaction = None
        self._core = Core(
            session_id=session_id,
            created_at=created_at,
            tags=all_tags,
            parent_id=parent_id,
            log=log,
            clock=clock,
            codec=codec,
            dispatcher=dispatcher,
        )
        self._core.lease = log.acquire(session_id, owner=this_process_owner(), ttl_s=lease_ttl_s)
        if parent is not None:
            self._adopt_by(parent)

    def _adopt_by(self, parent: Session | SessionView) -> None:
        # A child made under a view knows its parent only through that view.
        self._core.parent = parent
        parent._adopt(self)

    def _adopt(self, child: Session) -> None:
        self._core.adopt(child)

    @classmethod
    def open(
        cls,
        log: Log,
        session_id: UUID,
        *,
        read_only: bool = False,
        upto: int | None = None,
        bus: Dispatcher | None = None,
        dispatcher: Dispatcher | None = None,
        parent: Session | SessionView | None = None,
        clock: Clock | None = None,
        codec: Codec = codec,
        lease_ttl_s: float = DEFAULT_LEASE_SECONDS,
    ) -> Session:
        """Open a session that exists.

        Register its reducers before looking at its slices. With `read_only` no lease is taken, and
        a damaged log is read up to the damage. With `upto` (read-only) the session is shown as it
        was after that event. Raises `SessionNotFoundError`; `LeaseHeldError` while somebody else
        writes it; `LogDamagedError`, naming the last good event.
        """
        if upto is not None and not read_only:
            raise UsageError("upto shows the past, which cannot be changed: pass read_only=True as well")
        dispatcher = _one_dispatcher(bus, dispatcher)
        info = log.info(session_id)
        session = cls.__new__(cls)
        session._transaction = None
        session._core = core = Core(
            session_id=session_id,
            created_at=info.created_at,
            tags=dict(info.tags),
            parent_id=info.parent_id,
            log=log,
            clock=clock or SystemClock(),
            codec=codec,
            dispatcher=dispatcher,
        )
        core.read_only = read_only
        core.upto = upto
        core.loaded = False
        if not read_only:
            core.lease = log.acquire(session_id, owner=this_process_owner(), ttl_s=lease_ttl_s)
        if parent is not None:
            session._adopt_by(parent)
        return session

    # .. identity ..

    @property
    def session_id(self) -> UUID:
        """The session's id."""
        return self._core.session_id

    @property
    def created_at(self) -> datetime:
        """When the session was made."""
        return self._core.created_at

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels; the session's own id and its parent's are among them."""
        return self._core.tags

    @property
    def parent(self) -> Session | SessionView | None:
        """The session that this one was made under, or the view of it, if it is open in this process."""
        return self._core.parent

    @property
    def parent_id(self) -> UUID | None:
        """The id of the session that this one was made under."""
        return self._core.parent_id

    @property
    def children(self) -> tuple[Session, ...]:
        """The sessions made under this one, oldest first: those that are open, and the newest of the others.

        `session.log.sessions(parent_id=session.session_id)` lists all that there ever were.
        """
        with self._core.lock:
            return tuple(self._core.children)

    @property
    def clock(self) -> Clock:
        """The session's source of time."""
        return self._core.clock

    @property
    def log(self) -> Log:
        """The log that holds this session's events."""
        return self._core.log

    @property
    def codec(self) -> Codec:
        """How this session's values are stored."""
        return self._core.codec

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Who is told about each event."""
        return self._core.dispatcher

    @property
    def head(self) -> int:
        """The sequence number of the newest event that this session has folded."""
        core = self._core
        if not core.loaded or core.unknown:
            with core.lock:
                core.ensure_loaded()
        return core.head

    @property
    def report(self) -> OpenReport:
        """What was noticed when the session was folded from its log."""
        with self._core.lock:
            self._core.ensure_loaded()
            return self._core.report

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Session) and other._core is self._core

    def __hash__(self) -> int:
        return hash(self._core.session_id)

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"

    # .. reading ..

    def _slice(self, slice_type: type[T]) -> Slice[T]:
        core = self._core
        transaction = self._current()
        if (
            transaction is None
            and core.loaded
            and slice_type in core.known
            and not core.unknown
            and core.reducing is None
        ):
            return core.slices.get(slice_type, EMPTY)  # The slices are replaced, never changed: no lock.
        with core.lock:
            core.check_not_reducing()
            core.know(slice_type)
            core.ensure_loaded()
            if transaction is not None:
                return transaction._view().look(slice_type)
            return core.slices.get(slice_type, EMPTY)

    def _present(self) -> dict[type, Slice[Any]]:
        """Return every slice as this handle sees it. The lock is held."""
        self._core.check_not_reducing()
        self._core.ensure_loaded()
        transaction = self._current()
        if transaction is None:
            return dict(self._core.slices)
        return {**self._core.slices, **transaction._view().changes}

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        self._core.know(slice_type)
        return SliceAccessor(self, slice_type)

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice; the older spelling of `session[T].all()`."""
        return self._slice(slice_type).all()

    def query(self, slice_type: type[T]) -> SliceReader[T]:
        """Return read access to a slice; an older spelling of `session[T]`."""
        return self[slice_type]

    def mutate(self, slice_type: type | None = None) -> Any:
        """Return the changing half of a slice or of the session; the older spelling of `session[T]`."""
        return _Mutation(self) if slice_type is None else self[slice_type]

    def read_only_view(self) -> SessionView:
        """Return a view that can be read and not changed.

        Inside a transaction it shows what is staged there; when that is over, what was kept.
        """
        core = self._core
        transaction = self._current()

        def read(slice_type: type) -> Slice[Any]:
            with core.lock:
                core.check_not_reducing()
                core.know(slice_type)
                core.ensure_loaded()
                if transaction is not None and transaction.is_open:
                    return transaction._view().look(slice_type)
                return core.slices.get(slice_type, EMPTY)

        def snapshot(*, include_all: bool) -> Snapshot:
            handle = self if transaction is None or transaction.is_open else _handle(core)
            # Without a way back to the session that it was taken from.
            return replace(handle.snapshot(include_all=include_all), taken_by=None)

        def spawn(view: SessionView, **given: Any) -> Session:
            return Session(parent=view, log=core.log, codec=core.codec, **given)

        return SessionView(
            read,
            session_id=core.session_id,
            tags=core.tags,
            clock=core.clock,
            snapshot=snapshot,
            # Not the method itself, which would lead to the core.
            adopt=lambda child: core.adopt(child),
            spawn=spawn,
        )

    def events(self, *, after: int = 0, upto: int | None = None) -> Iterator[tuple[Envelope, object | None]]:
        """Yield the session's events with their values; None where the type is unknown or does not fit."""
        registry = self._core.codec.registry
        for envelope in self._core.log.read(self.session_id, after=after, upto=upto):
            value: object | None = None
            if registry.knows(envelope.type):
                try:
                    value = self._core.codec.decode(registry.resolve(envelope.type), envelope.payload)
                except CodecError:
                    value = None
            yield envelope, value

    def just_written(self, *, after: int) -> Sequence[tuple[int, Draft, object | None]] | None:
        """Return all events after `after`, if this session has written them a moment ago; else None.

        It saves whoever follows the log reading it. Each comes with its place, as it was given to the log.
        The value is that of the event if it cannot change in place, and None otherwise: decode the payload
        then.
        """
        core = self._core
        with core.lock:
            is_writer = core.lease is not None and not core.closed
            return core.recent.since(after, core.head) if is_writer and core.loaded else None

    def policy_of(self, slice_type: type) -> SlicePolicy:
        """Return what a rollback does with a slice."""
        return self._core.policy_of(slice_type)

    # .. changing ..

    def dispatch(self, event: object) -> DispatchResult:
        """Record an event: the only way that state changes.

        Raises `EncodeError`, naming the path to the field, if the event cannot be stored; then
        nothing has changed. A reducer, observer or subscriber that raises is reported in the
        result; the event stands. An event whose channel is LIVE is only published: it is not
        logged and reaches no slice.
        """
        return self.dispatch_all((event,))[0]

    def broadcast(self, event: object) -> DispatchResult:
        """Record an event; the older spelling of `dispatch`."""
        return self.dispatch(event)

    def dispatch_all(self, events: Iterable[object]) -> Sequence[DispatchResult]:
        """Record several events in one batch: all of them, or none."""
        return self._dispatch(_staged(self._core, events))

    def _dispatch(self, staged: list[Staged]) -> Sequence[DispatchResult]:
        transaction = self._current()
        if transaction is not None:
            return transaction._take(staged)
        core = self._core
        changes, outcomes = core.append(staged)
        return core.notify(changes, outcomes)

    def _seed(self, slice_type: type, items: tuple[Any, ...]) -> DispatchResult:
        for item in items:
            if not isinstance(item, slice_type):
                raise UsageError(
                    f"a {type(item).__qualname__} cannot stand in the slice of {slice_type.__qualname__}"
                )
            self._core.codec.encode(item)  # Refuse with the path inside the item, not inside the event.
        name = self._core.codec.registry.name_of(slice_type)
        return self.dispatch(InitializeSlice(name, items))

    def _clear(self, slice_type: type, predicate: Callable[[Any], bool] | None) -> DispatchResult:
        name = self._core.codec.registry.name_of(slice_type)
        (cleared,) = _staged(self._core, (ClearSlice(name, None if predicate is None else ()),))
        return self._dispatch([cleared._replace(predicate=predicate)])[0]

    def install(self, slice_type: type[T], *, initial: Callable[[], T] | None = None) -> None:
        """Register every method of a class that is marked with `@reducer(on=...)`.

        The methods see the slice's latest value as `self`. On an empty slice `initial` makes it;
        without `initial` an event does nothing to an empty slice.
        """
        declared = declared_reducers(slice_type)
        if not declared:
            raise UsageError(f"{slice_type.__qualname__} has no method marked with @reducer(on=...)")
        for event_type, method in declared.items():
            self._core.register(slice_type, event_type, DeclaredReducer(slice_type, method, initial), None)

    def observe(self, slice_type: type[T], observer: Callable[[Sequence[T], Sequence[T]], object]) -> Any:
        """Call `observer(old, new)` after each change of a slice. Returns a function that stops it."""
        core = self._core
        core.know(slice_type)
        with core.lock:
            core.observers.setdefault(slice_type, []).append(observer)

        def stop() -> None:
            with core.lock:
                if observer in core.observers.get(slice_type, ()):
                    core.observers[slice_type].remove(observer)

        return stop

    def drop_caches(self) -> None:
        """Empty every CACHE slice."""
        self._empty(lambda policy: policy is SlicePolicy.CACHE)

    def reset(self) -> None:
        """Empty every slice that is not history."""
        self._empty(lambda policy: policy is not SlicePolicy.LOG)

    def _empty(self, chosen: Callable[[SlicePolicy], bool]) -> None:
        core = self._core
        with core.lock:
            names = [
                core.codec.registry.name_of(each)
                for each, kept in self._present().items()
                if len(kept) and chosen(core.policy_of(each))
            ]
        self.dispatch_all([ClearSlice(name) for name in sorted(names)])

    # .. snapshots ..

    def snapshot(
        self,
        *,
        policies: frozenset[SlicePolicy] = frozenset({SlicePolicy.STATE}),
        include_all: bool = False,
        tag: str | None = None,
    ) -> Snapshot:
        """Capture the session's slices; the cost does not depend on how many items they hold.

        Captured are the slices whose policy is in `policies` (by default working state), every
        slice with `include_all`, and always those that a resume needs (the conversation).
        """
        core = self._core
        wanted = frozenset(SlicePolicy) if include_all else frozenset(policies)
        with core.lock:
            present = self._present()
            known = dict.fromkeys((*core.known, *present))
            slices = {
                each: kept
                for each, kept in present.items()
                if len(kept) and (core.policy_of(each) in wanted or spec_of(each).captured)
            }
            tags = dict(core.tags)
            if tag is not None:
                tags["snapshot_tag"] = tag
            return Snapshot(
                created_at=core.clock.now(),
                slices=SnapshotState(slices),
                policies=MappingProxyType({each: core.policy_of(each) for each in known}),
                parent_id=core.parent_id,
                children_ids=tuple(child.session_id for child in core.children),
                tags=MappingProxyType(tags),
                captured=wanted,
                session_id=core.session_id,
                seq=core.head,
                taken_by=core,
            )

    def rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True, reason: str = "rollback") -> None:
        """Go back to a snapshot, all slices together.

        Working state becomes what it was; a slice that was empty then, or not yet there, is empty
        again. History stays: a LOG slice is only ever extended by what the snapshot knows beyond it
        (as in a new session that takes over a conversation), unless `preserve_logs` is false. A
        CACHE slice that was not captured is left alone.

        Raises `SnapshotMismatchError`, before anything has changed, if the snapshot names a slice
        that this session does not know.
        """
        core = self._core
        with core.lock:
            self.check_fits(snapshot)
            transaction = self._current()
            present = self._present()
            # Inside a transaction nothing has its place in the log yet, so nothing can be referred to.
            own = snapshot.taken_by is core and transaction is None
            restored = []
            for slice_type in tuple(dict.fromkeys((*core.known, *present))):
                now = present.get(slice_type, EMPTY)
                target = self._rollback_target(snapshot, slice_type, now, preserve_logs)
                if target is not None:
                    restored.append(self._describe(slice_type, now, target, own))
            if not restored:
                return
            staged = _staged(core, (StateRestored(tuple(restored), reason),))
            if transaction is not None:
                transaction._take(staged)
                return
            changes, outcomes = core.append(staged)
        core.notify(changes, outcomes)

    def check_fits(self, snapshot: Snapshot) -> None:
        """Raise `SnapshotMismatchError` if a snapshot names a slice that this session does not know."""
        core = self._core
        with core.lock:
            core.check_not_reducing()
            core.ensure_loaded()
            strangers = [each.__qualname__ for each in snapshot.slices if each not in core.known]
        if strangers:
            raise SnapshotMismatchError(
                f"the snapshot has slices that this session does not know: {', '.join(strangers)}; "
                "register them (session[T].register(...) or session[T]) and try again; nothing was changed"
            )

    def restore(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot; another name of `rollback`."""
        self.rollback(snapshot, preserve_logs=preserve_logs)

    def _rollback_target(
        self, snapshot: Snapshot, slice_type: type, present: Slice[Any], preserve_logs: bool
    ) -> Slice[Any] | None:
        """Say what a slice must become, or None if it stays."""
        core = self._core
        policy = core.policy_of(slice_type)
        kept = snapshot.slices.captured(slice_type) if slice_type in snapshot.slices else None
        if policy is SlicePolicy.LOG and preserve_logs:
            # A log that has the snapshot's events has its history too, unless it was pruned on purpose.
            if snapshot.session_id == core.session_id and core.head >= snapshot.seq:
                return None
            if kept is None or len(kept) <= len(present):
                return None
            is_continued = all(map(self._is_same, entries_of(present), entries_of(kept)))
            return kept if is_continued else None
        if kept is None:
            was_captured = policy in snapshot.captured or spec_of(slice_type).captured
            return EMPTY if was_captured and len(present) else None
        if len(kept) == len(present) and all(map(self._is_same, entries_of(kept), entries_of(present))):
            return None
        return kept

    def _is_same(self, one: Entry, other: Entry) -> bool:
        """Say whether two entries hold the same item, to the byte: 1 is not True."""
        if one[0] is other[0]:
            return True
        mine, theirs = opened(one[0]), opened(other[0])
        encode = self._core.codec.encode
        return type(mine) is type(theirs) and encode(mine) == encode(theirs)

    def _describe(
        self, slice_type: type, present: Slice[Any], target: Slice[Any], own: bool
    ) -> RestoredSlice:
        """Write down a restored slice: as much as possible by reference to what is in the log."""
        core = self._core
        keep = 0
        if own:
            for (mine, _), (theirs, _) in zip(entries_of(present), entries_of(target), strict=False):
                if mine is not theirs:
                    break
                keep += 1
        items: list[RestoredItem] = []
        for kept, origin in islice(entries_of(target), keep, None):
            if not own or origin <= core.pruned_upto:
                items.append(RestoredItem(-abs(origin) if own else 0, item=opened(kept)))
            elif items and items[-1].origin > 0 and items[-1].upto == origin - 1:
                items[-1] = RestoredItem(items[-1].origin, origin)
            else:
                items.append(RestoredItem(origin, origin))
        return RestoredSlice(core.codec.registry.name_of(slice_type), keep, tuple(items))

    def clone(
        self,
        *,
        session_id: UUID | None = None,
        log: Log | None = None,
        bus: Dispatcher | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Session:
        """Make a new session with the same reducers, policies and state, and an own log."""
        core = self._core
        snapshot = self.snapshot(include_all=True)
        twin = Session(bus=bus, session_id=session_id, log=log, clock=core.clock, tags=tags, codec=core.codec)
        self._take_along(twin)
        twin._core.known.update(dict.fromkeys(snapshot.slices))
        twin.rollback(snapshot, preserve_logs=False, reason="clone")
        return twin

    def _take_along(self, twin: Session) -> None:
        """Give another session the reducers and policies of this one."""
        core = self._core
        with core.lock:
            for event_type, registrations in core.reducers.items():
                twin._core.reducers[event_type] = list(registrations)
            twin._core.policies.update(core.policies)
            twin._core.known.update(core.known)

    def fork(
        self, *, at: int | None = None, session_id: UUID | None = None, log: Log | None = None
    ) -> Session:
        """Make a new session that continues from event `at` of this one (by default from now).

        The events up to there are copied, so that the new session folds to the same state, and the
        two go their own ways after it. If the early ones were pruned, the state is copied instead.
        Reducers and policies are taken along. What is staged in a transaction is not.
        """
        core = self._core
        head = self.head
        at = head if at is None else at
        if not 0 <= at <= head:
            raise UsageError(f"there is no event {at} in session {self.session_id}: it has {head}")
        past = self.past(at) if core.pruned_upto else None
        log = log if log is not None else core.log
        twin = Session(
            session_id=session_id,
            log=log,
            clock=core.clock,
            codec=core.codec,
            tags={"forked_from": str(self.session_id), "forked_at": str(at)},
        )
        self._take_along(twin)
        try:
            if past is not None:
                twin._core.known.update(dict.fromkeys(past.slices))
                twin.rollback(past, preserve_logs=False, reason="fork")
            else:
                self._copy_events(twin, at)
        except BaseException:
            # Half a copy is worth nothing, and would look like a session.
            twin.close()
            log.erase(twin.session_id)
            raise
        return twin

    def past(self, at: int) -> Snapshot:
        """Capture everything as it was after event `at`, folded with the reducers registered now."""
        core = self._core
        then = Session.open(
            core.log, self.session_id, read_only=True, upto=at, clock=core.clock, codec=core.codec
        )
        self._take_along(then)
        try:
            return then.snapshot(include_all=True)
        except LogDamagedError as error:
            raise UsageError(
                f"session {self.session_id} can no longer be seen as it was after event {at}: its events "
                f"up to {core.pruned_upto} were pruned; fork it from now, or from a later event"
            ) from error

    def _copy_events(self, twin: Session, upto: int) -> None:
        lease = twin._core.lease
        assert lease is not None
        envelopes = self._core.log.read(self.session_id, upto=upto)
        done = 0
        while batch := list(islice(envelopes, _COPIED_AT_ONCE)):
            drafts = [
                Draft(
                    each.type,
                    each.payload,
                    each.at_us,
                    each.turn_id,
                    each.run_id,
                    each.trace_id,
                    each.rolled_back,
                )
                for each in batch
            ]
            twin.log.append(lease, drafts, expected_seq=done)
            done += len(drafts)
        twin._core.loaded = False

    # .. transactions ..

    def begin(self) -> Transaction:
        """Begin staging events. See `Transaction`."""
        if self._current() is not None:
            raise UsageError("a transaction is open here already; end it first")
        core = self._core
        if core.closed or core.read_only or core.reducing is not None:
            core.check_writable()
        if not core.loaded or core.unknown:
            with core.lock:
                core.ensure_loaded()
        return Transaction(self)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Keep every event dispatched in the block, or none of them if it raises."""
        begun = self.begin()
        with begun.active():
            try:
                yield begun.session
            except BaseException:
                begun.rollback()
                raise
        try:
            begun.commit()
        except BaseException:
            begun.rollback()
            raise

    def _current(self) -> Transaction | None:
        """Return the transaction that this handle, or the running call, is part of.

        Raises `UsageError` if it is over: whatever a call left running comes too late.
        """
        mine = self._transaction
        if mine is not None:
            mine._check_open()
            return mine
        for each in _transactions.get():
            if each._core is self._core:
                each._check_open()
                return each
        return None

    # .. upkeep ..

    def prune(self, *, upto: int | None = None, keep_last: int | None = None) -> int:
        """Forget the events up to `upto`, or all but the last `keep_last`. Returns how many went.

        Working state stays as it is, and so does history that is declared to outlive a prune (what was
        spent). Other history from before is gone: LOG slices lose the items that came from forgotten
        events, and the file keeps no byte of them.
        """
        if (upto is None) == (keep_last is None):
            raise UsageError("say either upto= or keep_last=")
        if min(upto or 0, keep_last or 0) < 0:
            raise UsageError("upto and keep_last count events: 0 or more")
        if self._current() is not None:
            raise UsageError("a transaction is open here; end it first")
        core = self._core
        with core.lock:
            limit = upto if upto is not None else self.head - cast(int, keep_last)
            count, changes = core.prune(limit)
        core.notify(changes, [])
        return count

    def close(self) -> None:
        """Give up the writer's lease. Closing again does nothing."""
        if self._transaction is not None:
            raise UsageError("a call cannot close the session that it is part of")
        core = self._core
        with core.lock:
            core.check_not_reducing()
            if core.closed:
                return
            core.closed = True
            if core.lease is None:
                return
            if core.loaded and core.head - core.stored_seq >= fold.SNAPSHOT_EVERY // 4:
                core.try_to_store()
            core.log.release(core.lease)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transaction:
    """Events that are staged until they are committed together, or forgotten.

    Work on it through `session` (a handle that stages, from any thread) or inside `active()`
    (where every handle of the session stages).
    """

    __slots__ = (
        "_committed",
        "_core",
        "_generation",
        "_open",
        "_staged",
        "_under",
        "_working",
        "began_after",
    )

    def __init__(self, session: Session) -> None:
        core = self._core = session._core
        self.began_after = core.head
        """The session's newest event when the transaction began."""
        self._open = True
        self._committed = False
        self._staged: list[Staged] = []
        self._working: Working | None = None
        """The slices as this call sees them, when somebody has looked."""
        self._generation = 0
        self._under: Mapping[type, Slice[Any]] = _NOTHING
        """What the slices that the view depends on were when it was made."""

    @property
    def session(self) -> Session:
        """A handle of the session that stages what is dispatched through it."""
        # It is not kept: two that held each other would have to wait for the collector of garbage.
        return _handle(self._core, self)

    def active(self) -> AbstractContextManager[None]:
        """Let everything that this call dispatches to the session be staged here."""
        return _Active(self)

    def enter(self) -> Token[tuple[Transaction, ...]]:
        """Let everything that the present context dispatches from now on be staged here, until `leave`.

        A context of its own (`contextvars.copy_context().run(...)`) needs no way back.
        """
        return _transactions.set((self, *_transactions.get()))

    def leave(self, entered: Token[tuple[Transaction, ...]]) -> None:
        """Go back to how things were before that `enter`."""
        _transactions.reset(entered)

    @property
    def staged(self) -> tuple[object, ...]:
        """The events that wait for the commit."""
        return tuple([each.event for each in self._staged]) if self._staged else ()

    @property
    def is_open(self) -> bool:
        """Whether it still waits for its commit or rollback."""
        return self._open

    @property
    def is_committed(self) -> bool:
        """Whether its events are in the log; also when an interrupt came right after they were written."""
        return self._committed

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(
                "this call is over; what its handle of the session is asked to do comes too late"
            )

    def _view(self) -> Working:
        """Return the slices as this call sees them. The lock is held."""
        core = self._core
        seen = self._working
        if (
            seen is None
            or self._generation != core.generation
            or any(core.slices.get(each, EMPTY) is not under for each, under in self._under.items())
        ):
            seen = Working(_LiveSlices(core))
            for each in self._staged:
                self._fold(seen, each)
            self._show(seen)
        return seen

    def _show(self, working: Working) -> None:
        """Let this be what the call sees, until somebody changes one of the slices below it."""
        core = self._core
        self._working = working
        self._generation = core.generation
        self._under = {each: core.slices.get(each, EMPTY) for each in (*working.looked_at, *working.changes)}

    def _fold(self, working: Working, staged: Staged) -> Outcome:
        core = self._core
        chosen = core.choose(working, staged)
        return core.fold(working, chosen.event, chosen.draft.payload, 0, immutable=chosen.immutable)

    def _take(self, staged: list[Staged]) -> Sequence[DispatchResult]:
        """Stage events, all or none. History among them does not wait: it is logged at once."""
        core = self._core
        with core.lock:
            self._check_open()
            core.check_writable()
            core.ensure_loaded()
            ahead = self._view().ahead()
            outcomes: dict[int, Outcome] = {}
            waiting: list[Staged] = []
            history: list[Staged] = []
            for index, each in enumerate(staged):
                if each.is_live or self._is_history(each.event):
                    history.append(each)
                    continue
                mine = each
                if not each.immutable:
                    # The caller may change its object before the commit.
                    mine = each._replace(event=core.codec.decode(type(each.event), each.draft.payload))
                outcomes[index] = self._fold(ahead, mine)
                waiting.append(mine)
            self._show(ahead)
            # All that can be refused was tried: from here on only the log can say no. If it does, the
            # view is made again without these; if it adds to a slice of the view, with that.
            self._generation = -1
            changes, logged = core.append(history)
            self._staged.extend(waiting)
            self._generation = core.generation
        told = iter(self._notify(changes, logged))
        return [
            DispatchResult(*outcomes[index]) if index in outcomes else next(told)
            for index in range(len(staged))
        ]

    def _is_history(self, event: object) -> bool:
        core = self._core
        return all(core.policy_of(target) is SlicePolicy.LOG for target in core.targets(event))

    def _notify(self, changes: Sequence[Change], outcomes: Sequence[Outcome]) -> Outcomes:
        """Tell the others. They stand outside this call, wherever it is that they are called from."""
        core = self._core
        if not changes and core.dispatcher is None:
            return Outcomes(outcomes)
        token = _transactions.set(tuple(each for each in _transactions.get() if each is not self))
        try:
            return core.notify(changes, outcomes)
        finally:
            _transactions.reset(token)

    def commit(self, *extra: object) -> Sequence[DispatchResult]:
        """Log everything that was staged, and `extra` after it, in one batch.

        If that fails, nothing is logged and the transaction is still open: roll it back.
        """
        core = self._core
        with core.lock:
            if not self._open:
                self._check_open()
            batch = self._staged + _staged(core, extra)
            changes, outcomes = core.append(batch, written=self._end)
        return self._notify(changes, outcomes)

    def _end(self) -> None:
        self._open = False
        self._committed = True

    def rollback(self, *extra: object) -> Sequence[DispatchResult]:
        """Forget what was staged. History that it touched, and `extra`, are logged in one batch.

        Whatever happens, nothing stays staged; rolling back what is over does nothing. If an event of
        `extra` cannot be stored, that is raised after the history was logged without it.
        """
        core = self._core
        refused: CodecError | None = None
        with core.lock:
            if not self._open:
                return ()
            added: list[Staged] = []
            try:
                for each in extra:
                    added += _staged(core, (each,))
            except CodecError as error:
                refused = error
            history = [
                waiting._replace(draft=waiting.draft._replace(rolled_back=True))
                for waiting in self._staged
                if any(core.policy_of(target) is SlicePolicy.LOG for target in core.targets(waiting.event))
            ]
            self._open = False
            self._staged = []
            self._working = None
            changes, outcomes = core.append([*history, *added])
        told = self._notify(changes, outcomes)
        if refused is not None:
            raise refused
        return told


class _Active:
    """A block in which every handle of a session stages in one transaction."""

    __slots__ = ("_token", "_transaction")

    _token: Token[tuple[Transaction, ...]]

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def __enter__(self) -> None:
        self._token = self._transaction.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.leave(self._token)


_NO_DRAFT = Draft("", b"", 0)


def _staged(core: Core, events: Iterable[object]) -> list[Staged]:
    """Encode events that are recorded together. Raises `EncodeError` for one that cannot be stored."""
    codec, names = core.codec, core.names
    at_us = to_microseconds(core.clock.now())
    turn_id, run_id, trace_id = _stamp.get()
    staged = []
    for event in events:
        kind = type(event)
        name = names.get(kind)
        if name is None and spec_of(kind).channel is Channel.LIVE:
            staged.append(Staged(event, _NO_DRAFT, immutable=False, is_live=True))
            continue
        payload = codec.encode(event)
        if name is None:
            name = names[kind] = core.name_of(kind)
        draft = _new(Draft, (name, payload, at_us, turn_id, run_id, trace_id, False))
        staged.append(_new(Staged, (event, draft, is_immutable(event), False, None)))
    return staged


def _handle(core: Core, transaction: Transaction | None = None) -> Session:
    """Make another handle of a session."""
    handle = Session.__new__(Session)
    handle._core = core
    handle._transaction = transaction
    return handle


def _one_dispatcher(bus: Dispatcher | None, dispatcher: Dispatcher | None) -> Dispatcher | None:
    if bus is not None and dispatcher is not None:
        raise UsageError("bus and dispatcher are two names of one thing; give one of them")
    return bus if bus is not None else dispatcher


class _LiveSlices(Mapping[type, Slice[Any]]):
    """The present slices of a session, whatever they are when they are asked for."""

    __slots__ = ("_core",)

    def __init__(self, core: Core) -> None:
        self._core = core

    def __getitem__(self, slice_type: type) -> Slice[Any]:
        return self._core.slices[slice_type]

    def get(self, slice_type: type, default: Any = EMPTY) -> Any:
        return self._core.slices.get(slice_type, default)

    def __iter__(self) -> Iterator[type]:
        return iter(self._core.slices)

    def __len__(self) -> int:
        return len(self._core.slices)


def nested_session(
    parent: Session | SessionView,
    *,
    session_id: UUID | None = None,
    dispatcher: Dispatcher | None = None,
    tags: Mapping[str, str] | None = None,
) -> Session:
    """Make a session under another one: own slices, own events, in the log that holds the parent's.

    The child knows its parent only as a read-only view, so that nothing done in the child reaches the
    parent, and it can be opened and looked at afterwards wherever the parent can.
    """
    view = parent.read_only_view()
    if view._spawn is None:
        raise UsageError(f"this view of the session {view.session_id} has no log in which a child could live")
    made: Session = view._spawn(view, session_id=session_id, dispatcher=dispatcher, tags=tags)
    return made


FAMILY = "family."
"""How the names of tags begin that a session hands on to the sessions made under it."""


def family_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return those of a session's tags that its children get as well, in whatever process they are made."""
    return {name: value for name, value in tags.items() if name.startswith(FAMILY)}


def iter_sessions_bottom_up(root: Session) -> Iterator[Session]:
    """Yield a session's descendants before the session itself, children first."""
    for child in root.children:
        yield from iter_sessions_bottom_up(child)
    yield root


class SessionSnapshotAdapter:
    """A session as a participant in composite snapshots."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def snapshot(self, *, tag: str | None = None) -> Snapshot:
        """Capture the session's working state."""
        return self._session.snapshot(tag=tag)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to it."""
        self._session.rollback(snapshot)

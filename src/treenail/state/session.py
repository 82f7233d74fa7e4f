"""Sessions: typed slices, folded from one log.

Theory of operation
-------------------
`dispatch(event)` is the only way that state changes. The event is encoded (what
cannot be stored is refused here, while nothing has changed), its reducers are run
on the present slices, it is appended to the log, and only then do the new slices
take the place of the old. So the state in memory is at every moment the fold of
the events in the log, and opening a session is folding them again: from the newest
stored snapshot, if one fits the reducers registered here, and the events after it.

A `Session` is a handle: what it shares with the other handles of the same session is
its core (`core`), and a handle of a transaction stages what is dispatched to it
(`transaction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, cast
from uuid import UUID

from treenail.clock import Clock, SystemClock, WallClock, new_id, whole_clock
from treenail.codec import Codec, codec
from treenail.errors import CodecError, LogDamagedError, SnapshotMismatchError, UsageError
from treenail.log import (
    DEFAULT_LEASE_SECONDS,
    Draft,
    Envelope,
    Log,
    MemoryLog,
    SlicePolicy,
    this_process_owner,
)
from treenail.state.core import Core, OpenReport
from treenail.state.dispatch import Dispatcher, DispatchResult
from treenail.state.events import ClearSlice, InitializeSlice, as_read, spec_of
from treenail.state.fold import Staged
from treenail.state.reducers import DeclaredReducer
from treenail.state.rollback import restoring_event
from treenail.state.slices import Slice, declared_reducers
from treenail.state.snapshot import Snapshot, SnapshotState
from treenail.state.transaction import Transaction, stage, transaction_of
from treenail.state.views import SessionView, SliceReader

T = TypeVar("T")

_COPIED_AT_ONCE = 1000
"""How many events a fork copies in one append."""


class SliceAccessor(SliceReader[T]):
    """Access to one slice of a session: what `session[T]` returns."""

    __slots__ = ("_session",)

    def __init__(self, session: Session, slice_type: type[T]) -> None:
        super().__init__(lambda: session._slice(slice_type), slice_type)
        self._session = session

    def seed(self, values: T | Iterable[T]) -> DispatchResult:
        """Put one item, or these, in place of everything in the slice."""
        items = (values,) if isinstance(values, self._slice_type) else tuple(cast("Iterable[T]", values))
        return self._session._seed(self._slice_type, items)

    def append(self, value: T) -> DispatchResult:
        """Dispatch an item: its reducers decide, or it is added at the end."""
        if type(value) is not self._slice_type and not self._session._core.fold.reducers.get(type(value)):
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
        """Remove the items for which the predicate holds, or all."""
        return self._session._clear(self._slice_type, predicate)

    def register(
        self, event_type: type, reducer: Callable[..., Any], *, policy: SlicePolicy | None = None
    ) -> None:
        """Let a reducer bring events of exactly that type into this slice."""
        if not isinstance(event_type, type):
            raise UsageError(f"{event_type!r} is not a class; reducers are registered for a class of events")
        self._session._core.register(self._slice_type, event_type, reducer, policy)


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
        clock: WallClock | None = None,
        codec: Codec = codec,
        lease_ttl_s: float = DEFAULT_LEASE_SECONDS,
    ) -> None:
        dispatcher = _one_dispatcher(bus, dispatcher)
        inherited = None if parent is None else parent.clock
        whole = whole_clock(clock or inherited or SystemClock())
        session_id = session_id or new_id()
        created_at = created_at or whole.now()
        if created_at.tzinfo is None:
            raise UsageError("created_at has no time zone; use datetime.now(UTC)")
        parent_id = parent.session_id if parent is not None else None
        all_tags = {**(family_tags(parent.tags) if parent is not None else {}), **(tags or {})}
        all_tags["session_id"] = str(session_id)
        if parent_id is not None:
            all_tags["parent_session_id"] = str(parent_id)
        log = log if log is not None else MemoryLog(clock=whole)
        log.create(session_id, created_at=created_at, parent_id=parent_id, tags=all_tags)
        self._transaction = None
        self._core = Core(
            session_id=session_id,
            created_at=created_at,
            tags=all_tags,
            parent_id=parent_id,
            log=log,
            clock=whole,
            codec=codec,
            dispatcher=dispatcher,
        )
        self._begin(parent, lease_ttl_s)

    def _begin(self, parent: Session | SessionView | None, lease_ttl_s: float) -> None:
        """Take the writer's lease, unless the session is only read, and join the parent."""
        core = self._core
        if not core.read_only:
            core.lease = core.log.acquire(core.session_id, owner=this_process_owner(), ttl_s=lease_ttl_s)
        if parent is not None:
            core.parent = parent
            parent.adopt(self)

    def adopt(self, child: Session) -> None:
        """Take a session in that was made under this one."""
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
        clock: WallClock | None = None,
        codec: Codec = codec,
        lease_ttl_s: float = DEFAULT_LEASE_SECONDS,
    ) -> Session:
        """Open a session that exists.

        Register its reducers before reading its slices. With `read_only` no lease is taken, and
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
            clock=whole_clock(clock or SystemClock()),
            codec=codec,
            dispatcher=dispatcher,
        )
        core.read_only = read_only
        core.upto = upto
        core.loaded = False
        session._begin(parent, lease_ttl_s)
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
        with self._core.lock:
            self._core.ensure_loaded()
            return self._core.head

    @property
    def is_closed(self) -> bool:
        """Whether the session was closed."""
        return self._core.closed

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
        core, transaction = self._core, self._current()
        with core.lock:
            present = core.present(slice_type)
            return present if transaction is None else transaction.slices().get(slice_type, present)

    def _present(self) -> dict[type, Slice[Any]]:
        """Return every slice as this handle sees it. The lock is held."""
        self._core.ensure_loaded()
        transaction = self._current()
        return {**self._core.slices, **({} if transaction is None else transaction.slices())}

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        self._core.fold.know(slice_type)
        return SliceAccessor(self, slice_type)

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice; the older spelling of `session[T].all()`."""
        return as_read(slice_type, self._slice(slice_type).all())

    def query(self, slice_type: type[T]) -> SliceReader[T]:
        """Return read access to a slice; an older spelling of `session[T]`."""
        return self[slice_type]

    def mutate(self, slice_type: type | None = None) -> Any:
        """Return what changes a slice, or the session; the older spelling of `session[T]`."""
        return self if slice_type is None else self[slice_type]

    def read_only_view(self) -> SessionView:
        """Return a view that can be read and not changed.

        Inside a transaction it shows what is staged there; when that is over, what was kept.
        """
        core, transaction = self._core, self._current()

        def read(slice_type: type) -> Slice[Any]:
            with core.lock:
                present = core.present(slice_type)
                staged = transaction.slices() if transaction is not None and transaction.is_open else {}
                return staged.get(slice_type, present)

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
        """Return all events after `after` if this session wrote them a moment ago, else None.

        It saves those who follow the log reading and decoding it. Each event comes with its place and
        as it was given to the log. The value is None if it could change in place: decode the payload then.
        """
        core = self._core
        with core.lock:
            if core.lease is None or core.closed or not core.loaded:
                return None
            count = max(core.head - max(after, 0), 0)
            if count > len(core.recent):
                return None
            return list(islice(reversed(core.recent), count))[::-1]

    def policy_of(self, slice_type: type) -> SlicePolicy:
        """Return what a rollback does with a slice."""
        return self._core.fold.policy_of(slice_type)

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
        return self._dispatch(stage(self._core, events))

    def _dispatch(self, staged: list[Staged]) -> Sequence[DispatchResult]:
        transaction = self._current()
        if transaction is not None:
            return transaction.take(staged)
        return self._core.notify(*self._core.append(staged))

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
        (cleared,) = stage(self._core, (ClearSlice(name, None if predicate is None else ()),))
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
        core.fold.know(slice_type)
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
                if len(kept) and chosen(core.fold.policy_of(each))
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
            known = dict.fromkeys((*core.fold.known, *present))
            slices = {
                each: kept
                for each, kept in present.items()
                if len(kept) and (core.fold.policy_of(each) in wanted or spec_of(each).captured)
            }
            tags = dict(core.tags)
            if tag is not None:
                tags["snapshot_tag"] = tag
            return Snapshot(
                created_at=core.clock.now(),
                slices=SnapshotState(slices),
                policies=MappingProxyType({each: core.fold.policy_of(each) for each in known}),
                parent_id=core.parent_id,
                children_ids=tuple(child.session_id for child in core.children),
                tags=MappingProxyType(tags),
                captured=wanted,
                session_id=core.session_id,
                seq=core.head,
                taken_by=core,
            )

    def rollback(
        self,
        snapshot: Snapshot,
        *,
        preserve_logs: bool = True,
        reason: str = "rollback",
        beside: Sequence[object] = (),
    ) -> None:
        """Go back to a snapshot, all slices together. The events `beside` are recorded in the same append.

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
            event = restoring_event(
                core,
                self._present(),
                snapshot,
                preserve_logs=preserve_logs,
                reason=reason,
                # Inside a transaction nothing has its place in the log yet.
                refers=snapshot.taken_by is core and transaction is None,
            )
            if event is None and not beside:
                return
            staged = stage(core, (*(() if event is None else (event,)), *beside))
            if transaction is not None:
                transaction.take(staged)
                return
            changes, results = core.append(staged)
        core.notify(changes, results)

    def check_fits(self, snapshot: Snapshot) -> None:
        """Raise `SnapshotMismatchError` if a snapshot names a slice that this session does not know."""
        core = self._core
        with core.lock:
            core.ensure_loaded()
            unknown = [each.__qualname__ for each in snapshot.slices if each not in core.fold.known]
        if unknown:
            raise SnapshotMismatchError(
                f"the snapshot has slices that this session does not know: {', '.join(unknown)}; "
                "register them (session[T].register(...) or session[T]) and try again; nothing was changed"
            )

    def restore(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot; another name of `rollback`."""
        self.rollback(snapshot, preserve_logs=preserve_logs)

    def clone(
        self,
        *,
        session_id: UUID | None = None,
        log: Log | None = None,
        bus: Dispatcher | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Session:
        """Make a new session with the same reducers, policies and state, and a log of its own."""
        core = self._core
        snapshot = self.snapshot(include_all=True)
        twin = Session(bus=bus, session_id=session_id, log=log, clock=core.clock, tags=tags, codec=core.codec)
        twin._become(self, snapshot, reason="clone")
        return twin

    def _become(self, other: Session, snapshot: Snapshot, *, reason: str) -> None:
        """Take over the reducers of another session, and what it held."""
        self._core.fold.take_over(other._core.fold)
        self._core.fold.known.update(dict.fromkeys(snapshot.slices))
        self.rollback(snapshot, preserve_logs=False, reason=reason)

    def fork(
        self, *, at: int | None = None, session_id: UUID | None = None, log: Log | None = None
    ) -> Session:
        """Make a new session that continues from event `at` of this one (by default from now).

        The events up to there are copied, so that the new session folds to the same state; after that
        the two are independent. If the early ones were pruned, the state is copied instead.
        Reducers and policies are copied. What is staged in a transaction is not.
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
        try:
            if past is not None:
                twin._become(self, past, reason="fork")
            else:
                twin._core.fold.take_over(core.fold)
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
        then._core.fold.take_over(core.fold)
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
            drafts = [Draft(each.type, each.payload, each.at_us, *each[-4:]) for each in batch]
            twin.log.append(lease, drafts, expected_seq=done)
            done += len(drafts)
        twin._core.loaded = False

    # .. transactions ..

    def begin(self) -> Transaction:
        """Begin staging events. See `Transaction`."""
        if self._current() is not None:
            raise UsageError("a transaction is open here already; end it first")
        core = self._core
        with core.lock:
            core.check_writable()
            core.ensure_loaded()
            return Transaction(core, _handle)

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
        found = self._transaction or transaction_of(self._core)
        if found is not None:
            found.check_open()
        return found

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

    def note(self, payload: bytes) -> None:
        """Keep a note beside the log, in place of the one before; see `Log.put_note`.

        A session that is closed, or that is only read, keeps none.
        """
        self._core.note(payload)

    def close(self) -> None:
        """Give up the writer's lease. Closing again does nothing."""
        if self._transaction is not None:
            raise UsageError("a call cannot close the session that it is part of")
        self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def nested_session(
    parent: Session | SessionView,
    *,
    session_id: UUID | None = None,
    dispatcher: Dispatcher | None = None,
    tags: Mapping[str, str] | None = None,
) -> Session:
    """Make a session under another one: own slices, own events, in the log that holds the parent's.

    The child knows its parent only as a read-only view, so that nothing done in the child reaches the
    parent, and it can be opened and read afterwards wherever the parent can.
    """
    view = parent.read_only_view()
    if view.spawn is None:
        raise UsageError(f"this view of the session {view.session_id} has no log in which a child could live")
    made: Session = view.spawn(view, session_id=session_id, dispatcher=dispatcher, tags=tags)
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

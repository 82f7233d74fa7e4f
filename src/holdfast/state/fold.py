"""Folding: how the slices of a session follow from the events in its log.

Theory of operation
-------------------
The state of a session is a fold of its log, and this file is the fold. `Core.fold`
runs one event's reducers over slices as they are and notes the slices as they will
be (`Working`). Whoever calls it decides what happens next: `load` does so for every
stored event, `append` logs the events first and then lets the new slices take the
place of the old, and a transaction keeps them to itself.

Because slices are folds, registering a reducer is a statement about the whole log:
a slice shows what its reducers make of every event, also of those from before the
registration. The fold is done when a slice is first looked at, so that a program
opens a session, registers its reducers, and pays once.

An event is `Staged` before anything else: encoded, so that what cannot be stored is
refused while nothing has changed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from holdfast.clock import Clock
from holdfast.codec import Codec
from holdfast.errors import (
    CodecError,
    LogDamagedError,
    ReadOnlyError,
    SnapshotRestoreError,
    UnknownTypeError,
    UsageError,
)
from holdfast.log.base import Lease, Log
from holdfast.log.event import Draft, Envelope, SlicePolicy
from holdfast.state.dispatch import Dispatcher, DispatchResult, HandlerFailure, call_isolated
from holdfast.state.events import (
    SYSTEM_EVENTS,
    ClearSlice,
    InitializeSlice,
    RestoredSlice,
    StateRestored,
    spec_of,
)
from holdfast.state.slices import EMPTY, Append, Clear, Entry, Extend, Replace, Slice
from holdfast.state.stored import export_state, import_state
from holdfast.state.views import SessionView

if TYPE_CHECKING:
    from holdfast.state.session import Session

_logger = logging.getLogger("holdfast.state")

SNAPSHOT_EVERY = 512
"""A stored snapshot is written when at least so many events, and half of all, came after the last."""

Observer = Callable[[Sequence[Any], Sequence[Any]], object]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is written beside each event: which turn, run and trace it belongs to."""

    turn_id: str | None = None
    run_id: str | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """An event that could not be folded. It stays in the log, untouched."""

    seq: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What was noticed while a session was folded from its log."""

    events: int = 0
    snapshot_seq: int = 0
    """The stored snapshot that the fold started from; 0 if it read every event."""
    unknown_types: Mapping[str, int] = field(default_factory=dict)
    """Types that are not registered in this process, and how many events have them."""
    problems: tuple[Problem, ...] = ()
    damage: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every event was understood."""
        return not (self.unknown_types or self.problems or self.damage)


@dataclass(slots=True)
class Registration:
    """A reducer that listens to an event type on behalf of a slice."""

    slice_type: type
    reducer: Callable[..., Any]
    call: Callable[[Slice[Any], Any, Any], Any]


class Working:
    """Slices as they will be, over slices as they are."""

    __slots__ = ("_context", "base", "changes")

    def __init__(self, base: Mapping[type, Slice[Any]]) -> None:
        self.base = base
        self.changes: dict[type, Slice[Any]] = {}
        self._context: Context | None = None

    def get(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it will be."""
        found = self.changes.get(slice_type)
        return found if found is not None else self.base.get(slice_type, EMPTY)

    def put(self, slice_type: type, value: Slice[Any]) -> None:
        """Note what a slice will be."""
        self.changes[slice_type] = value

    @property
    def context(self) -> Context:
        """What reducers are given as `context`."""
        if self._context is None:
            self._context = Context(SessionView(self.get))
        return self._context


class Context:
    """What reducers see besides their slice and event."""

    __slots__ = ("session",)

    def __init__(self, session: SessionView) -> None:
        self.session = session


class Core:
    """What all handles of one session share."""

    def __init__(
        self,
        *,
        session_id: UUID,
        created_at: datetime,
        tags: Mapping[str, str],
        parent_id: UUID | None,
        log: Log,
        clock: Clock,
        codec: Codec,
        dispatcher: Dispatcher | None,
    ) -> None:
        self.session_id = session_id
        self.created_at = created_at
        self.tags = MappingProxyType(dict(tags))
        self.parent_id = parent_id
        self.parent: Session | None = None
        self.children: list[Session] = []
        self.log = log
        self.clock = clock
        self.codec = codec
        self.dispatcher = dispatcher
        self.lock = threading.RLock()
        self.lease: Lease | None = None
        self.read_only = False
        self.upto: int | None = None
        self.closed = False
        # The fold.
        self.head = 0
        self.loaded = True
        self.slices: dict[type, Slice[Any]] = {}
        self.known: dict[type, None] = {}
        self.reducers: dict[type, list[Registration]] = {}
        self.policies: dict[type, SlicePolicy] = {}
        self.observers: dict[type, list[Observer]] = {}
        self.unknown: dict[str, int] = {}
        self.report = OpenReport()
        self.stored_seq = 0

    # .. knowing types ..

    def know(self, slice_type: type) -> None:
        """Note that this session uses a slice; if stored events waited for the type, fold again."""
        if slice_type in self.known:
            return
        if not isinstance(slice_type, type):
            raise UsageError(f"{slice_type!r} is not a class; a slice is named by the class of its items")
        self.known[slice_type] = None
        if self.codec.registry.name_of(slice_type) in self.unknown:
            self.loaded = False

    def pairs(self) -> list[list[str]]:
        """Which slices listen to which events: what a stored state must have been made with."""
        name_of = self.codec.registry.name_of
        return sorted(
            [name_of(each.slice_type), name_of(event_type)]
            for event_type, registrations in self.reducers.items()
            for each in registrations
        )

    def policy_of(self, slice_type: type) -> SlicePolicy:
        """Return what was registered for a slice, or what its type says about itself."""
        return self.policies.get(slice_type) or spec_of(slice_type).policy

    def targets(self, event: object) -> Iterable[type]:
        """Which slices an event reaches."""
        if isinstance(event, (InitializeSlice, ClearSlice)):
            return (self.codec.registry.resolve(event.slice_type),)
        if isinstance(event, StateRestored):
            return tuple(self.codec.registry.resolve(each.slice_type) for each in event.slices)
        registrations = self.reducers.get(type(event))
        if not registrations:
            return (type(event),)
        return tuple(each.slice_type for each in registrations)

    # .. folding ..

    def ensure_loaded(self) -> None:
        """Fold the log unless that was done."""
        if not self.loaded:
            self.load()

    def load(self) -> None:
        """Fold the log: the newest stored snapshot that fits, and the events after it."""
        self.slices = {}
        self.unknown = {}
        self.stored_seq = 0
        problems: list[Problem] = []
        damage = None
        self.head = self._import_snapshot(problems)
        start = self.head
        info = self.log.info(self.session_id)
        if start + 1 < info.first:
            raise LogDamagedError(
                f"session {self.session_id}: events up to {info.first - 1} were pruned and no stored "
                "snapshot covers them; open a copy of the store from before",
                last_good_seq=0,
            )
        working = Working({})
        working.changes = self.slices
        events = 0
        try:
            for envelope in self.log.read(self.session_id, after=start, upto=self.upto):
                self._fold_envelope(working, envelope, problems)
                self.head = envelope.seq
                events += 1
        except LogDamagedError as error:
            # For a writer damage is the end; a reader may look at everything before it.
            if not self.read_only:
                raise
            damage = str(error)
        self.slices = working.changes
        self.report = OpenReport(events, start, dict(self.unknown), tuple(problems), damage)
        self.loaded = True

    def _import_snapshot(self, problems: list[Problem]) -> int:
        stored = self.log.latest_snapshot(self.session_id)
        if stored is None or (self.upto is not None and stored.seq > self.upto):
            return 0
        first = self.log.info(self.session_id).first
        try:
            state = import_state(
                self.codec,
                stored.payload,
                self.pairs(),
                lambda after, upto: self.log.read(self.session_id, after=after, upto=upto),
                self.unknown,
                forced=first > 1,
            )
        except CodecError as error:
            if first > 1:
                raise SnapshotRestoreError(
                    f"session {self.session_id}: its early events were pruned, and its stored snapshot "
                    f"cannot be read here: {error}"
                ) from error
            problems.append(
                Problem(stored.seq, "stored snapshot", f"{error}; folded from the events instead")
            )
            return 0
        if state is None:
            return 0
        self.slices = state
        for slice_type in state:
            self.known.setdefault(slice_type, None)
        self.stored_seq = stored.seq
        return stored.seq

    def _fold_envelope(self, working: Working, envelope: Envelope, problems: list[Problem]) -> None:
        registry = self.codec.registry
        if not registry.knows(envelope.type):
            self.unknown[envelope.type] = self.unknown.get(envelope.type, 0) + 1
            return
        try:
            event: object = self.codec.decode(registry.resolve(envelope.type), envelope.payload)
        except UnknownTypeError as error:
            self.unknown[error.type_name] = self.unknown.get(error.type_name, 0) + 1
            return
        except CodecError as error:
            problems.append(Problem(envelope.seq, envelope.type, str(error)))
            return
        immutable = self.codec.is_immutable(event, envelope.payload)
        try:
            self.fold(working, event, envelope.seq, immutable=immutable, logs_only=envelope.rolled_back)
        except UnknownTypeError as error:
            self.unknown[error.type_name] = self.unknown.get(error.type_name, 0) + 1
        except CodecError as error:
            problems.append(Problem(envelope.seq, envelope.type, str(error)))

    def fold(
        self, working: Working, event: object, seq: int, *, immutable: bool, logs_only: bool = False
    ) -> tuple[list[Callable[..., object]], list[HandlerFailure]]:
        """Run an event's reducers. Raises `EncodeError` if one of them makes what cannot be stored."""
        kind = type(event)
        if kind in SYSTEM_EVENTS:
            self._fold_system(working, event, seq, logs_only=logs_only)
            return [], []
        if not immutable:
            event = copy.deepcopy(event)
        registrations = self.reducers.get(kind)
        if not registrations:
            if not logs_only or self.policy_of(kind) is SlicePolicy.LOG:
                self.known.setdefault(kind, None)
                working.put(kind, working.get(kind).append(event, seq, volatile=not immutable))
            return [], []
        ran: list[Callable[..., object]] = []
        failures = []
        for registration in registrations:
            slice_type = registration.slice_type
            if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                continue
            before = working.get(slice_type)
            ran.append(registration.reducer)
            try:
                outcome = registration.call(before, event, working.context)
                after = self._apply(slice_type, before, outcome, event, seq, immutable=immutable)
            except CodecError:
                raise
            except Exception as error:  # a reducer is foreign code: one that fails harms no other
                name = getattr(registration.reducer, "__qualname__", repr(registration.reducer))
                _logger.warning(
                    "the reducer %s failed on %s: %s", name, kind.__qualname__, error, exc_info=error
                )
                failures.append(HandlerFailure(registration.reducer, error))
                continue
            if after is not before:
                working.put(slice_type, after)
        return ran, failures

    def _apply(
        self, slice_type: type, before: Slice[Any], outcome: Any, event: object, seq: int, *, immutable: bool
    ) -> Slice[Any]:
        if isinstance(outcome, Append):
            return self._add(slice_type, before, (outcome.item,), event, seq, immutable=immutable)
        if isinstance(outcome, Extend):
            return self._add(slice_type, before, outcome.items, event, seq, immutable=immutable)
        if isinstance(outcome, Clear):
            if outcome.predicate is None:
                return EMPTY
            predicate = outcome.predicate
            kept = [entry for entry in before.entries() if not predicate(copy.copy(entry[0]))]
            return Slice.of(kept, volatile=before.volatile) if len(kept) != len(before) else before
        if isinstance(outcome, Slice):
            if outcome is before:
                return before
            outcome = Replace(outcome.all())
        elif isinstance(outcome, (tuple, list)):
            outcome = Replace(outcome)
        if isinstance(outcome, Replace):
            if before.volatile:
                entries: dict[int, Entry] = {}
            else:
                entries = {id(item): (item, origin) for item, origin in before.entries()}
            made = EMPTY
            for item in outcome.items:
                held = entries.get(id(item))
                if held is not None:
                    made = made.append(held[0], held[1])
                else:
                    made = self._add(slice_type, made, (item,), event, seq, immutable=immutable)
            return made
        raise TypeError(
            f"a reducer of {slice_type.__qualname__} returned {type(outcome).__qualname__}; "
            "return Append, Extend, Replace, Clear, or the new items as a tuple"
        )

    def _add(
        self,
        slice_type: type,
        to: Slice[Any],
        items: Iterable[Any],
        event: object,
        seq: int,
        *,
        immutable: bool,
    ) -> Slice[Any]:
        for item in items:
            if not isinstance(item, slice_type):
                raise TypeError(
                    f"a {type(item).__qualname__} cannot stand in the slice of {slice_type.__qualname__}"
                )
            if item is event:
                to = to.append(item, seq, volatile=not immutable)
                continue
            payload = self.codec.encode(item)
            fixed = self.codec.is_immutable(item, payload)
            to = to.append(item if fixed else copy.deepcopy(item), -seq, volatile=not fixed)
        return to

    def _fold_system(self, working: Working, event: object, seq: int, *, logs_only: bool) -> None:
        if isinstance(event, InitializeSlice):
            slice_type = self.codec.registry.resolve(event.slice_type)
            if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                return
            self.known.setdefault(slice_type, None)
            working.put(slice_type, self._add(slice_type, EMPTY, event.items, None, seq, immutable=True))
        elif isinstance(event, ClearSlice):
            slice_type = self.codec.registry.resolve(event.slice_type)
            if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                return
            before = working.get(slice_type)
            if event.removed is None:
                working.put(slice_type, EMPTY)
            else:
                gone = set(event.removed)
                kept = [entry for index, entry in enumerate(before.entries()) if index not in gone]
                working.put(slice_type, Slice.of(kept, volatile=before.volatile))
        elif isinstance(event, StateRestored):
            for each in event.slices:
                slice_type = self.codec.registry.resolve(each.slice_type)
                if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                    continue
                self.known.setdefault(slice_type, None)
                working.put(slice_type, self._restored(slice_type, working.get(slice_type), each, seq))

    def _restored(self, slice_type: type, before: Slice[Any], made: RestoredSlice, seq: int) -> Slice[Any]:
        entries: list[Entry] = []
        volatile = before.volatile
        for position, entry in enumerate(before.entries()):
            if position == made.keep:
                break
            entries.append(entry)
        by_origin = {origin: item for item, origin in before.entries() if origin > 0}
        for each in made.items:
            if each.origin <= 0:
                payload = self.codec.encode(each.item)
                volatile = volatile or not self.codec.is_immutable(each.item, payload)
                entries.append((each.item, each.origin or -seq))
                continue
            for origin in range(each.origin, (each.upto or each.origin) + 1):
                if origin in by_origin:
                    entries.append((by_origin[origin], origin))
                else:
                    value, fixed = self.event_at(origin)
                    volatile = volatile or not fixed
                    entries.append((value, origin))
        return Slice.of(entries, volatile=volatile)

    def event_at(self, seq: int) -> tuple[object, bool]:
        """Read one event again. Returns its value, and whether it is immutable."""
        for envelope in self.log.read(self.session_id, after=seq - 1, upto=seq):
            value: object = self.codec.decode(self.codec.registry.resolve(envelope.type), envelope.payload)
            return value, self.codec.is_immutable(value, envelope.payload)
        raise SnapshotRestoreError(f"session {self.session_id} no longer has its event {seq}")

    # .. writing ..

    def check_writable(self) -> None:
        """Raise `UsageError` or `ReadOnlyError` unless events can be appended."""
        if self.closed:
            raise UsageError(f"session {self.session_id} is closed; open it again with Session.open")
        if self.read_only:
            raise ReadOnlyError(
                f"session {self.session_id} was opened for reading; open it without read_only to change it"
            )

    def append(self, staged: Sequence[Staged]) -> tuple[list[Change], list[DispatchResult]]:
        """Fold events on the present state, log them in one batch, and make the new state the present.

        If anything goes wrong, neither the log nor the state has changed.
        """
        with self.lock:
            self.check_writable()
            self.ensure_loaded()
            working = Working(self.slices)
            results = []
            drafts = []
            for offset, each in enumerate(staged, start=1):
                ran, failures = self.fold(
                    working,
                    each.event,
                    self.head + offset,
                    immutable=each.immutable,
                    logs_only=each.rolled_back,
                )
                results.append(DispatchResult(each.event, tuple(ran), tuple(failures)))
                drafts.append(each.draft())
            assert self.lease is not None
            if drafts:
                try:
                    self.log.append(self.lease, drafts, expected_seq=self.head)
                except BaseException:
                    # An interrupt may come just after the events were stored: only the log knows.
                    self.loaded = False
                    raise
            self.head += len(drafts)
            changes = [
                Change(slice_type, self.slices.get(slice_type, EMPTY), after)
                for slice_type, after in working.changes.items()
            ]
            self.slices.update(working.changes)
            if self.head - self.stored_seq >= max(SNAPSHOT_EVERY, self.head // 2):
                self.store_snapshot()
            return changes, results

    def store_snapshot(self, *, inline_upto: int = 0) -> None:
        """Write the folded state beside the log, so that the next opening need not fold it all."""
        if self.unknown or self.lease is None:
            return  # Events wait for a type that this process does not know: the fold is not whole.
        payload = export_state(self.codec, self.slices, self.pairs(), inline_upto=inline_upto)
        self.log.put_snapshot(self.lease, self.head, payload)
        self.stored_seq = self.head

    def notify(self, changes: Sequence[Change], results: list[DispatchResult]) -> list[DispatchResult]:
        """Tell observers and subscribers, outside the lock, each isolated from the others."""
        observer_failures = []
        for change in changes:
            for observer in tuple(self.observers.get(change.slice_type, ())):
                failure = call_isolated(observer, change.before, change.after)
                if failure is not None:
                    observer_failures.append(failure)
        told = []
        for result in results:
            handlers, errors = result.handlers_invoked, result.errors + tuple(observer_failures)
            observer_failures = []
            if self.dispatcher is not None:
                try:
                    delivered = self.dispatcher.dispatch(result.event)
                except Exception as error:  # telemetry is best effort: the event stands
                    _logger.warning("the dispatcher failed: %s", error, exc_info=error)
                    errors += (HandlerFailure(self.dispatcher.dispatch, error),)
                else:
                    handlers += delivered.handlers_invoked
                    errors += delivered.errors
            told.append(DispatchResult(result.event, handlers, errors))
        return told


@dataclass(frozen=True, slots=True)
class Change:
    """A slice before and after a batch."""

    slice_type: type
    before: Slice[Any]
    after: Slice[Any]


@dataclass(slots=True)
class Staged:
    """An event on its way: encoded already, so that it is known to be storable."""

    event: object
    type_name: str
    payload: bytes
    at_us: int
    stamp: Stamp
    immutable: bool
    rolled_back: bool = False

    def draft(self) -> Draft:
        """Return what is handed to the log."""
        stamp = self.stamp
        return Draft(
            self.type_name,
            self.payload,
            self.at_us,
            stamp.turn_id,
            stamp.run_id,
            stamp.trace_id,
            self.rolled_back,
        )


class DeclaredReducer:
    """A method marked with `@reducer`, as a reducer of its slice."""

    def __init__(
        self, slice_type: type, method: Callable[..., Any], initial: Callable[[], Any] | None
    ) -> None:
        self.slice_type = slice_type
        self.method = method
        self.initial = initial
        self.__qualname__ = getattr(method, "__qualname__", repr(method))
        self._takes_context = _takes_context(method)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeclaredReducer)
            and other.method is self.method
            and other.slice_type is self.slice_type
        )

    def __hash__(self) -> int:
        return hash((self.slice_type, self.method))

    def __call__(self, slice_: Slice[Any], event: Any, *, context: Any) -> Any:
        """Let the method make a new value of the latest one, or of the initial one."""
        current = slice_.latest()
        if current is None:
            if self.initial is None:
                return slice_
            current = self.initial()
        made = (
            self.method(current, event, context=context)
            if self._takes_context
            else self.method(current, event)
        )
        return Replace((made,)) if isinstance(made, self.slice_type) else made


def _takes_context(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(each.name == "context" or each.kind is each.VAR_KEYWORD for each in parameters)


def calling(reducer: Callable[..., Any]) -> Callable[[Slice[Any], Any, Any], Any]:
    """Wrap a reducer so that it is called alike whether it takes `context` or not."""
    if _takes_context(reducer):
        return lambda slice_, event, context: reducer(slice_, event, context=context)
    return lambda slice_, event, context: reducer(slice_, event)

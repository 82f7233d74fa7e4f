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
opens a session, registers its reducers, and pays once. The same holds for types: an
event whose type is not known here waits in the log, and is folded in its place as
soon as the type is known.

The live state must equal what the log gives when it is read again. Therefore an
event is `Staged` before anything else: encoded, so that what cannot be stored is
refused while nothing has changed; and a value that could change in place is decoded
from those bytes for every reducer, never taken from the caller.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from weakref import WeakKeyDictionary

from treenail.clock import Clock
from treenail.codec import Codec, is_immutable, type_registry
from treenail.errors import (
    CodecError,
    EncodeError,
    LogDamagedError,
    ReadOnlyError,
    SnapshotRestoreError,
    StaleWriterError,
    TreenailError,
    UnknownTypeError,
    UsageError,
)
from treenail.log.base import Lease, Log
from treenail.log.event import Draft, Envelope, SlicePolicy
from treenail.state.dispatch import Dispatcher, HandlerFailure, Outcome, Outcomes, call_isolated
from treenail.state.events import (
    SYSTEM_EVENTS,
    ClearSlice,
    InitializeSlice,
    RestoredSlice,
    StateRestored,
    spec_of,
)
from treenail.state.slices import (
    EMPTY,
    Append,
    Clear,
    Entry,
    Extend,
    Kept,
    Replace,
    Slice,
    entries_of,
    opened,
    sealed,
)
from treenail.state.stored import Folding, StoredState, export_state, read_values
from treenail.state.views import SessionView

if TYPE_CHECKING:
    from treenail.state.session import Session

_logger = logging.getLogger("treenail.state")

SNAPSHOT_EVERY = 512
"""A stored snapshot is written when at least so many events, and half of all, came after the last."""

MAX_RECENT_EVENTS = 64
MAX_RECENT_BYTES = 1024 * 1024
"""How much of what was written last is kept at hand."""

_SYSTEM_EVENTS = frozenset(SYSTEM_EVENTS)

Observer = Callable[[Sequence[Any], Sequence[Any]], object]


class Stamp(NamedTuple):
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
    takes_context: bool


class Staged(NamedTuple):
    """An event on its way: encoded already, so that it is known to be storable."""

    event: object
    draft: Draft
    """What is handed to the log."""
    immutable: bool
    is_live: bool = False
    """Whether it is only published: it is not encoded, not logged, and reaches no slice."""
    predicate: Callable[[Any], bool] | None = None
    """For `ClearSlice`: chooses the items again on the state in which it is logged."""


@dataclass(frozen=True, slots=True)
class Change:
    """A slice before and after a batch."""

    slice_type: type
    before: Slice[Any]
    after: Slice[Any]


class Context:
    """What reducers see besides their slice and event."""

    __slots__ = ("_session", "_working")

    def __init__(self, working: Working) -> None:
        self._working = working
        self._session: SessionView | None = None

    @property
    def session(self) -> SessionView:
        """The session as it will be, to be read. Few reducers look: it is made for those that do."""
        if self._session is None:
            working = self._working
            self._session = SessionView(lambda slice_type: working.get(slice_type))
        return self._session


class Working:
    """Slices as they will be, over slices as they are."""

    __slots__ = ("base", "changes", "looked_at")

    def __init__(
        self, base: Mapping[type, Slice[Any]], changes: dict[type, Slice[Any]] | None = None
    ) -> None:
        self.base = base
        self.changes: dict[type, Slice[Any]] = {} if changes is None else changes
        self.looked_at: set[type] = set()
        """Which slices the fold depends on besides those that it changes."""

    def ahead(self) -> Working:
        """Return another one that can be thrown away."""
        copy = Working(self.base, dict(self.changes))
        copy.looked_at.update(self.looked_at)
        return copy

    def look(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it will be."""
        found = self.changes.get(slice_type)
        return found if found is not None else self.base.get(slice_type, EMPTY)

    def get(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it will be, and note that the fold depends on it."""
        self.looked_at.add(slice_type)
        found = self.changes.get(slice_type)
        return found if found is not None else self.base.get(slice_type, EMPTY)


class _Notes:
    """What a fold of the log notices on its way."""

    def __init__(self) -> None:
        self.unknown: dict[str, int] = {}
        self.problems: list[Problem] = []

    def count(self, type_name: str) -> None:
        self.unknown[type_name] = self.unknown.get(type_name, 0) + 1


class _Recent:
    """What this process wrote last, so that whoever follows the log need not read and decode it again."""

    __slots__ = ("_bytes", "_events", "_seq")

    def __init__(self) -> None:
        self._bytes = 0
        self._events: list[Staged] = []
        self._seq = 0
        """The place of the newest of them."""

    def add(self, seq: int, written: Sequence[Staged]) -> None:
        """Take a batch that is in the log after `seq`."""
        if self._seq != seq:
            self.clear()
        events = self._events
        events += written
        self._seq = seq + len(written)
        for each in written:
            self._bytes += len(each.draft.payload)
        while len(events) > MAX_RECENT_EVENTS or self._bytes > MAX_RECENT_BYTES:
            # By halves, so that it is not done for each batch.
            del events[: len(events) // 2 or 1]
            self._bytes = sum([len(each.draft.payload) for each in events])

    def clear(self) -> None:
        """Forget everything: it is not certain any more what the log has."""
        self._events.clear()
        self._bytes = 0

    def since(self, after: int, head: int) -> list[tuple[int, Draft, object | None]] | None:
        """Return everything behind `after` and up to the head, or None if that is not all at hand.

        A value that could change stays here.
        """
        if after >= head:
            return []
        count = head - max(after, 0)
        if self._seq != head or len(self._events) < count:
            return None
        return [
            (seq, each.draft, each.event if each.immutable else None)
            for seq, each in enumerate(self._events[-count:], start=head - count + 1)
        ]


MAX_CLOSED_CHILDREN = 32
"""How many children that are closed a session still holds in memory: their logs hold all of them."""


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
        self.parent: Session | SessionView | None = None
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
        self.recent = _Recent()
        self.names: dict[type, str] = {}
        """The names of the types that were dispatched here."""
        self.loaded = True
        self.generation = 0
        """Grows with every fold of the whole log."""
        self.slices: dict[type, Slice[Any]] = {}
        self.known: dict[type, None] = {}
        self.reducers: dict[type, list[Registration]] = {}
        self.policies: dict[type, SlicePolicy] = {}
        self.observers: dict[type, list[Observer]] = {}
        self.unknown: dict[str, int] = {}
        self.report = OpenReport()
        self.stored_seq = 0
        self.pruned_upto = 0
        """Events up to here are no longer in the log: items that came from them are stored as values."""
        self.missing: list[str] = []
        """Reducers that the stored state was made by and that are not registered here."""
        self.reducing: int | None = None
        """The thread in which a reducer runs."""

        for each in SYSTEM_EVENTS:
            self.name_of(each)

    def adopt(self, child: Session) -> None:
        """Take a child in. Of those that are closed only the newest stay, however many a run has had."""
        with self.lock:
            closed = [each for each in self.children if each._core.closed]
            gone = {id(each) for each in closed[: max(len(closed) - MAX_CLOSED_CHILDREN + 1, 0)]}
            self.children = [each for each in self.children if id(each) not in gone]
            self.children.append(child)

    # .. knowing types ..

    def name_of(self, cls: type) -> str:
        """Return a type's stable name, registering it under the one that it was declared with."""
        registry = self.codec.registry
        if registry is not type_registry:  # Where a type is registered as soon as it is declared.
            declared = spec_of(cls).name
            if declared is not None and not registry.knows(declared):
                registry.register(cls, name=declared)
        return registry.name_of(cls)

    def know(self, slice_type: type) -> None:
        """Note that this session uses a slice, and make its type loadable."""
        if slice_type in self.known:
            return
        if not isinstance(slice_type, type):
            raise UsageError(f"{slice_type!r} is not a class; a slice is named by the class of its items")
        self.name_of(slice_type)
        self.known[slice_type] = None

    def folding(self) -> Folding:
        """Describe the reducers that are registered: what a stored state must have been made by."""
        name_of = self.codec.registry.name_of
        by_event = sorted(
            ((name_of(event_type), each) for event_type, each in self.reducers.items()),
            key=lambda pair: pair[0],
        )
        return Folding(
            tuple(
                (event, name_of(each.slice_type), _reducer_name(each.reducer))
                for event, registrations in by_event
                for each in registrations
            ),
            tuple(sorted((name_of(each), policy.value) for each, policy in self.policies.items())),
        )

    def register(
        self,
        slice_type: type,
        event_type: type,
        reducer: Callable[..., Any],
        policy: SlicePolicy | None,
    ) -> None:
        """Let a reducer bring events of a type into a slice; the same one again changes nothing."""
        with self.lock:
            self.check_not_reducing()
            self.know(slice_type)
            self.name_of(event_type)
            registrations = self.reducers.setdefault(event_type, [])
            is_new = not registrations or not any(
                each.slice_type is slice_type and each.reducer == reducer for each in registrations
            )
            if is_new:
                registrations.append(Registration(slice_type, reducer, _takes_context(reducer)))
            is_other = policy is not None and policy is not self.policy_of(slice_type)
            if policy is not None:
                self.policies[slice_type] = policy
            if (is_new or is_other) and (self.head or not self.loaded):
                self.loaded = False  # The slice is a fold of the whole log: fold it again when looked at.

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

    # .. loading ..

    @property
    def is_current(self) -> bool:
        """Whether the slices are the fold of the log by all that is registered here."""
        if not self.loaded:
            return False
        return not self.unknown or not any(map(self.codec.registry.knows, self.unknown))

    def ensure_loaded(self) -> None:
        """Fold the log unless that was done, or if a type has become known that events waited for."""
        if not self.is_current:
            self.load()

    def load(self) -> None:
        """Fold the log: the newest stored snapshot that fits, and the events after it."""
        info = self.log.info(self.session_id)
        notes = _Notes()
        slices, start, pruned = self._import_snapshot(info.first, notes)
        if start + 1 < info.first:
            raise LogDamagedError(
                f"session {self.session_id}: events up to {info.first - 1} were pruned and no stored "
                "snapshot covers them; open a copy of the store from before",
                last_good_seq=0,
            )
        working = Working({}, slices)
        head, events, damage = start, 0, None
        try:
            for envelope in self.log.read(self.session_id, after=start, upto=self.upto):
                self._fold_envelope(working, envelope, notes)
                head = envelope.seq
                events += 1
        except LogDamagedError as error:
            # For a writer damage is the end; a reader may look at everything before it.
            if not self.read_only:
                raise
            damage = str(error)
        self.head = head
        self.recent.clear()
        self.stored_seq = start
        self.pruned_upto = max(pruned, info.first - 1)
        self.unknown = notes.unknown
        self.report = OpenReport(events, start, dict(notes.unknown), tuple(notes.problems), damage)
        self.known.update(dict.fromkeys(slices))
        # Whoever reads without the lock sees the old slices or the new ones, never some of each.
        self.slices = slices
        self.generation += 1
        self.loaded = True
        if pruned >= info.first and self.lease is not None:
            # Whoever pruned was cut off after it had stored what stays: finish it.
            self.log.prune(self.lease, upto=pruned)

    def _import_snapshot(self, first: int, notes: _Notes) -> tuple[dict[type, Slice[Any]], int, int]:
        """Return the stored slices, their place in the log, and up to where they need no events."""
        self.missing = []
        stored = self.log.latest_snapshot(self.session_id)
        if stored is None or (self.upto is not None and stored.seq > self.upto):
            return {}, 0, 0
        unknown: dict[str, int] = {}
        try:
            state = StoredState(stored.payload)
            mine = self.folding()
            self.missing = mine.lacks(state.folding)
            if state.folding != mine and first == 1:
                return {}, 0, 0
            slices = state.slices(self.codec, self._read, unknown)
        except (CodecError, LogDamagedError) as error:
            if first > 1:
                raise SnapshotRestoreError(
                    f"session {self.session_id}: its early events were pruned, and its stored snapshot "
                    f"cannot be read here: {error}"
                ) from error
            if isinstance(error, UnknownTypeError):
                notes.count(error.type_name)
            notes.problems.append(
                Problem(stored.seq, "stored snapshot", f"{error}; folded from the events instead")
            )
            return {}, 0, 0
        notes.unknown.update(unknown)
        return slices, stored.seq, state.pruned_upto

    def _read(self, after: int, upto: int) -> Iterable[Envelope]:
        return self.log.read(self.session_id, after=after, upto=upto)

    def _fold_envelope(self, working: Working, envelope: Envelope, notes: _Notes) -> None:
        registry = self.codec.registry
        if not registry.knows(envelope.type):
            notes.count(envelope.type)
            return
        payload = envelope.payload
        try:
            event: object = self.codec.decode(registry.resolve(envelope.type), payload)
            immutable = is_immutable(event)
            self.fold(
                working,
                event,
                payload,
                envelope.seq,
                immutable=immutable,
                logs_only=envelope.rolled_back,
                notes=notes,
            )
        except UnknownTypeError as error:
            notes.count(error.type_name)
        except (CodecError, SnapshotRestoreError, UsageError) as error:
            notes.problems.append(Problem(envelope.seq, envelope.type, str(error)))

    # .. folding ..

    def fold(
        self,
        working: Working,
        event: object,
        payload: bytes,
        seq: int,
        *,
        immutable: bool,
        logs_only: bool = False,
        notes: _Notes | None = None,
    ) -> Outcome:
        """Run an event's reducers. Raises `EncodeError` if one of them makes what cannot be stored."""
        kind = type(event)
        registrations = self.reducers.get(kind)
        if not registrations or kind in _SYSTEM_EVENTS:
            if kind in _SYSTEM_EVENTS:
                self._fold_system(working, event, seq, logs_only=logs_only, notes=notes)
            elif not logs_only or self.policy_of(kind) is SlicePolicy.LOG:
                if kind not in self.known:
                    self.known[kind] = None
                kept = event if immutable else Kept(self.codec, kind, payload)
                changes = working.changes
                present = changes[kind] if kind in changes else working.base.get(kind, EMPTY)
                changes[kind] = present.append(kept, seq)
            return event, (), ()
        ran: tuple[Callable[..., object], ...] = ()
        failures: tuple[HandlerFailure, ...] = ()
        for registration in registrations:
            slice_type, reducer = registration.slice_type, registration.reducer
            if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                continue
            before = working.get(slice_type)
            ran += (reducer,)
            given = event if immutable else self.codec.decode(kind, payload)
            self.reducing = threading.get_ident()
            try:
                outcome = (
                    reducer(before, given, context=Context(working))
                    if registration.takes_context
                    else reducer(before, given)
                )
                if immutable and type(outcome) is Append and outcome.item is given and kind is slice_type:
                    after = before.append(given, seq)  # What nearly every reducer does.
                else:
                    made = _Made(self, slice_type, given, payload, seq, immutable=immutable)
                    after = made.of(before, outcome)
            except _Unstorable as refused:
                raise EncodeError(
                    f"{refused.error.reason} (made by the reducer {_reducer_name(reducer)} "
                    f"of {kind.__qualname__}; nothing was changed)",
                    path=refused.error.path,
                ) from refused.error
            except Exception as error:  # a reducer is foreign code: one that fails harms no other
                name = _reducer_name(reducer)
                _logger.warning(
                    "the reducer %s failed on %s: %s", name, kind.__qualname__, error, exc_info=error
                )
                failures += (HandlerFailure(reducer, error),)
                continue
            finally:
                self.reducing = None
            if after is not before:
                working.changes[slice_type] = after
        return event, ran, failures

    def _fold_system(
        self, working: Working, event: object, seq: int, *, logs_only: bool, notes: _Notes | None
    ) -> None:
        if isinstance(event, StateRestored):
            for each in event.slices:
                try:
                    slice_type = self.codec.registry.resolve(each.slice_type)
                except UnknownTypeError as error:
                    if notes is None:
                        raise
                    notes.count(error.type_name)  # The other slices were restored all the same.
                    continue
                if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                    continue
                self.known.setdefault(slice_type, None)
                restored = self._restored(slice_type, working.get(slice_type), each, seq)
                working.changes[slice_type] = restored
            return
        assert isinstance(event, (InitializeSlice, ClearSlice))
        slice_type = self.codec.registry.resolve(event.slice_type)
        if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
            return
        self.known.setdefault(slice_type, None)
        if isinstance(event, InitializeSlice):
            working.changes[slice_type] = Slice.of(
                (self._seal(slice_type, each), -seq) for each in event.items
            )
        elif event.removed is None:
            working.changes[slice_type] = EMPTY
        elif event.removed:
            gone = set(event.removed)
            entries = enumerate(entries_of(working.get(slice_type)))
            working.changes[slice_type] = Slice.of(entry for index, entry in entries if index not in gone)

    def _seal(self, slice_type: type, item: Any) -> Any:
        if not isinstance(item, slice_type):
            raise UsageError(
                f"a {type(item).__qualname__} cannot stand in the slice of {slice_type.__qualname__}"
            )
        return sealed(self.codec, item, self.codec.encode(item))

    def _restored(self, slice_type: type, before: Slice[Any], made: RestoredSlice, seq: int) -> Slice[Any]:
        entries: list[Entry] = []
        for position, entry in enumerate(entries_of(before)):
            if position == made.keep:
                break
            entries.append(entry)
        wanted = {
            origin
            for each in made.items
            if each.origin > 0
            for origin in range(each.origin, (each.upto or each.origin) + 1)
        }
        found: dict[int, Any] = {}
        if wanted:
            found = {origin: kept for kept, origin in entries_of(before) if origin in wanted}
            found.update(read_values(self.codec, self._read, wanted - found.keys()))
        for each in made.items:
            if each.origin <= 0:
                entries.append((self._seal(slice_type, each.item), each.origin or -seq))
                continue
            for origin in range(each.origin, (each.upto or each.origin) + 1):
                if origin not in found:
                    raise SnapshotRestoreError(
                        f"session {self.session_id} no longer has its event {origin}, which its event "
                        f"{seq} brought back"
                    )
                entries.append((found[origin], origin))
        return Slice.of(entries)

    # .. writing ..

    def check_writable(self) -> None:
        """Raise `UsageError` or `ReadOnlyError` unless events can be appended."""
        if self.closed:
            raise UsageError(f"session {self.session_id} is closed; open it again with Session.open")
        if self.read_only:
            raise ReadOnlyError(
                f"session {self.session_id} was opened for reading; open it without read_only to change it"
            )
        if self.reducing is not None:
            self.check_not_reducing()

    def check_not_reducing(self) -> None:
        """Raise `UsageError` inside a reducer.

        A reducer is asked again whenever the log is folded. It says what becomes of its slice, from
        what it is given; the session itself is in the middle of a change.
        """
        if self.reducing is not None and self.reducing == threading.get_ident():
            raise UsageError(
                "a reducer used its session; read through context.session, return what the slice "
                "becomes, and dispatch from an observer or a subscriber"
            )

    def choose(self, working: Working, staged: Staged) -> Staged:
        """Let a `ClearSlice` name the items that its predicate chooses now."""
        event, predicate = staged.event, staged.predicate
        if predicate is None or not isinstance(event, ClearSlice):
            return staged
        items = working.get(self.codec.registry.resolve(event.slice_type)).all()
        removed = tuple(index for index, item in enumerate(items) if predicate(item))
        chosen = replace(event, removed=removed)
        draft = staged.draft._replace(payload=self.codec.encode(chosen))
        return staged._replace(event=chosen, draft=draft)

    def append(
        self, staged: Sequence[Staged], *, written: Callable[[], None] | None = None
    ) -> tuple[Sequence[Change], list[Outcome]]:
        """Fold events on the present state, log them in one batch, and make the new state the present.

        If anything goes wrong, neither the log nor the state has changed. `written` is called as soon
        as it is certain that the batch is in the log.
        """
        if not staged:
            if written is not None:
                written()
            return [], []
        with self.lock:
            if self.closed or self.read_only or self.reducing is not None:
                self.check_writable()
            if not self.loaded or self.unknown:
                self.ensure_loaded()
            working = Working(self.slices)
            outcomes: list[Outcome] = []
            batch: list[Staged] = []
            drafts: list[Draft] = []
            seq = self.head
            for each in staged:
                if each.is_live:
                    outcomes.append((each.event, (), ()))
                    continue
                if each.predicate is not None:
                    each = self.choose(working, each)  # noqa: PLW2901  # the chosen one takes its place
                seq += 1
                draft = each.draft
                outcomes.append(
                    self.fold(
                        working,
                        each.event,
                        draft.payload,
                        seq,
                        immutable=each.immutable,
                        logs_only=draft.rolled_back,
                    )
                )
                batch.append(each)
                drafts.append(draft)
            try:
                interrupted = self._write(batch, drafts) if batch else None
                self.head = seq
                changes = self._changes(working.changes) if self.observers else []
                self.slices.update(working.changes)
                if written is not None:
                    written()
            except BaseException as error:
                if not isinstance(error, Exception):
                    self.loaded = False  # Cut off between the log and the slices: only the log knows.
                raise
            if interrupted is not None:
                raise interrupted
            since = seq - self.stored_seq
            if since >= SNAPSHOT_EVERY and since >= seq // 2:
                self.try_to_store()
            return changes, outcomes

    def _write(self, batch: list[Staged], drafts: list[Draft]) -> BaseException | None:
        """Append to the log. Returns an interrupt that came when the batch was in the log already."""
        assert self.lease is not None
        try:
            self.log.append(self.lease, drafts, expected_seq=self.head)
            self.recent.add(self.head, batch)
        except (StaleWriterError, UsageError):
            raise  # Refused before anything was written.
        except BaseException as error:
            self.recent.clear()
            # A store may fail after its commit. Believe what it holds, not how it sounded.
            if not self._is_written(drafts):
                raise
            if not isinstance(error, Exception):
                return error
            _logger.warning("the log reported an error, but has the events: %s", error, exc_info=error)
        return None

    def _is_written(self, drafts: list[Draft]) -> bool:
        try:
            there = [
                (each.type, each.payload, each.at_us)
                for each in self._read(self.head, self.head + len(drafts))
            ]
        except Exception:  # noqa: BLE001  # the caller raises what went wrong first
            self.loaded = False  # Nobody knows now: fold again from whatever the log will say.
            return False
        return there == [(each.type, each.payload, each.at_us) for each in drafts]

    def _changes(self, slices: dict[type, Slice[Any]]) -> Sequence[Change]:
        """Return what observers are told when new slices take the place of the present ones."""
        changes = []
        for slice_type, after in slices.items():
            before = self.slices.get(slice_type, EMPTY)
            if slice_type in self.observers and after is not before and (len(before) or len(after)):
                changes.append(Change(slice_type, before, after))
        return changes

    # .. upkeep ..

    def try_to_store(self) -> None:
        """Store a snapshot if that works: an optimisation, and the log has everything."""
        try:
            self.store_snapshot()
        except (TreenailError, OSError) as error:
            _logger.warning("no snapshot was stored for session %s: %s", self.session_id, error)
        self.stored_seq = self.head  # Also after a failure, or each dispatch would try again.

    def store_snapshot(self) -> None:
        """Write the folded state beside the log, so that the next opening need not fold it all.

        Nothing is stored while events wait for a type or for reducers that this process does not
        have: the fold is not whole then.
        """
        if self.unknown or self.missing or self.lease is None:
            return
        payload = export_state(self.codec, self.slices, self.folding(), pruned_upto=self.pruned_upto)
        self.log.put_snapshot(self.lease, self.head, payload)
        self.stored_seq = self.head

    def prune(self, upto: int) -> tuple[int, Sequence[Change]]:
        """Forget the events up to `upto`, and the history that came from them."""
        with self.lock:
            self.check_writable()
            self.ensure_loaded()
            waiting = [*sorted(self.unknown), *self.missing]
            if waiting:
                raise UsageError(
                    "events would be lost for types or reducers that are not registered here: "
                    f"{', '.join(waiting)}; register them and prune again; nothing was changed"
                )
            upto = min(upto, self.head)
            if upto <= self.pruned_upto:
                return 0, []
            slices = {}
            for slice_type, kept in self.slices.items():
                if self.policy_of(slice_type) is SlicePolicy.LOG and not spec_of(slice_type).outlives_prune:
                    left = [entry for entry in entries_of(kept) if abs(entry[1]) > upto]
                    if len(left) != len(kept):
                        slices[slice_type] = Slice.of(left)
            assert self.lease is not None
            payload = export_state(self.codec, {**self.slices, **slices}, self.folding(), pruned_upto=upto)
            self.log.put_snapshot(self.lease, self.head, payload)
            self.stored_seq = self.head
            count = self.log.prune(self.lease, upto=upto)
            self.pruned_upto = upto
            changes = self._changes(slices)
            self.slices.update(slices)
            return count, changes

    # .. telling others ..

    def notify(self, changes: Sequence[Change], outcomes: Sequence[Outcome]) -> Outcomes:
        """Tell observers and subscribers, outside the lock, each isolated from the others.

        What observers did stands in the result of the batch's first event.
        """
        if not changes and self.dispatcher is None:
            return Outcomes(outcomes)
        observers: list[Callable[..., object]] = []
        failures: list[HandlerFailure] = []
        for change in changes:
            for observer in tuple(self.observers.get(change.slice_type, ())):
                observers.append(observer)
                failure = call_isolated(observer, change.before, change.after)
                if failure is not None:
                    failures.append(failure)
        told: list[Outcome] = []
        for event, ran, failed in outcomes:
            handlers = (*ran, *observers)
            errors = (*failed, *failures)
            observers, failures = [], []
            if self.dispatcher is not None:
                try:
                    delivered = self.dispatcher.dispatch(event)
                except Exception as error:  # telemetry is best effort: the event stands
                    _logger.warning("the dispatcher failed: %s", error, exc_info=error)
                    handlers += (self.dispatcher.dispatch,)
                    errors += (HandlerFailure(self.dispatcher.dispatch, error),)
                else:
                    handlers += delivered.handlers_invoked
                    errors += delivered.errors
            told.append((event, handlers, errors))
        return Outcomes(told)


# --- what reducers return --------------------------------------------------------------------------


class _Unstorable(Exception):
    """A reducer made an item that cannot be stored."""

    def __init__(self, error: EncodeError) -> None:
        self.error = error
        super().__init__(str(error))


class _Made:
    """Applies what a reducer returned to its slice."""

    __slots__ = ("core", "given", "immutable", "payload", "seq", "slice_type")

    def __init__(
        self, core: Core, slice_type: type, given: object, payload: bytes, seq: int, *, immutable: bool
    ) -> None:
        self.core = core
        self.slice_type = slice_type
        self.given = given
        self.payload = payload
        self.seq = seq
        self.immutable = immutable

    def of(self, before: Slice[Any], outcome: object) -> Slice[Any]:
        """Return what the slice becomes."""
        if isinstance(outcome, Append):
            return before.append(*self._entry(outcome.item))
        if isinstance(outcome, Extend):
            after = before
            for item in outcome.items:
                after = after.append(*self._entry(item))
            return after
        if isinstance(outcome, Clear):
            if outcome.predicate is None:
                return EMPTY
            predicate = outcome.predicate
            left = [entry for entry in entries_of(before) if not predicate(opened(entry[0]))]
            return Slice.of(left) if len(left) != len(before) else before
        if outcome is before:
            return before
        if isinstance(outcome, Slice):
            return Slice.of(self._replacing(before, outcome.all()))
        if isinstance(outcome, (tuple, list)):
            return Slice.of(self._replacing(before, outcome))
        if isinstance(outcome, Replace):
            return Slice.of(self._replacing(before, outcome.items))
        raise TypeError(
            f"a reducer of {self.slice_type.__qualname__} returned {type(outcome).__qualname__}; "
            "return Append, Extend, Replace, Clear, or the new items as a tuple"
        )

    def _replacing(self, before: Slice[Any], items: Iterable[Any]) -> list[Entry]:
        """Keep the origins of the items that were there already."""
        same: dict[int, Entry] = {}
        equal: dict[tuple[type, bytes], Entry] = {}
        for entry in entries_of(before):
            kept = entry[0]
            if type(kept) is Kept:
                equal[kept.cls, kept.payload] = entry
            else:
                same[id(kept)] = entry
        made = []
        for item in items:
            entry = same.get(id(item)) or self._entry(item)
            if type(entry[0]) is Kept:
                entry = equal.get((entry[0].cls, entry[0].payload), entry)
            made.append(entry)
        return made

    def _entry(self, item: Any) -> Entry:
        if not isinstance(item, self.slice_type):
            raise TypeError(
                f"a {type(item).__qualname__} cannot stand in the slice of {self.slice_type.__qualname__}"
            )
        if item is self.given and self.immutable:
            return item, self.seq
        codec = self.core.codec
        try:
            payload = codec.encode(item)
        except EncodeError as error:
            raise _Unstorable(error) from error
        # A reducer may have changed the event that it was given: then the item is its own making.
        is_event = item is self.given and payload == self.payload
        return sealed(codec, item, payload), self.seq if is_event else -self.seq


class DeclaredReducer:
    """A method marked with `@reducer`, as a reducer of its slice."""

    def __init__(
        self, slice_type: type, method: Callable[..., Any], initial: Callable[[], Any] | None
    ) -> None:
        self.slice_type = slice_type
        self.method = method
        self.initial = initial
        self.__qualname__ = getattr(method, "__qualname__", None) or repr(method)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeclaredReducer)
            and other.method is self.method
            and other.slice_type is self.slice_type
        )

    def __hash__(self) -> int:
        return hash((self.slice_type, self.method))

    @functools.cached_property
    def _takes_context(self) -> bool:
        return _takes_context(self.method)

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


def _reducer_name(reducer: Callable[..., Any]) -> str:
    name = getattr(reducer, "__qualname__", None) or type(reducer).__qualname__
    return f"{getattr(reducer, '__module__', None) or type(reducer).__module__}:{name}"


_TAKES_CONTEXT: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()
"""What is known of functions already: every session registers the same ones, and looking takes a while."""


def _takes_context(function: Callable[..., Any]) -> bool:
    if isinstance(function, DeclaredReducer):
        return True  # It knows itself what its method takes.
    if isinstance(function, FunctionType):
        known = _TAKES_CONTEXT.get(function)
        if known is None:
            known = _TAKES_CONTEXT[function] = _is_context_taken(function)
        return known
    return _is_context_taken(function)


def _is_context_taken(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(each.name == "context" or each.kind is each.VAR_KEYWORD for each in parameters)

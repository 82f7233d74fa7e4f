"""The core of a session: its log, its lease, and the slices that are the fold of the log.

All handles of a session share one core. It loads the fold when a slice is first read, so that a program
opens a session, registers its reducers, and pays once; it appends events; and it stores snapshots of the
fold beside the log, so that the next opening need not fold everything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from treenail.clock import Clock
from treenail.codec import Codec, is_immutable
from treenail.errors import (
    CodecError,
    LogDamagedError,
    ReadOnlyError,
    SnapshotRestoreError,
    StaleWriterError,
    TreenailError,
    UnknownTypeError,
    UsageError,
)
from treenail.log import Draft, Envelope, Lease, Log, SlicePolicy
from treenail.state.dispatch import Dispatcher, DispatchResult, HandlerFailure, call_isolated
from treenail.state.events import spec_of
from treenail.state.fold import Fold, Notes, Problem, Staged, Working
from treenail.state.slices import EMPTY, Slice, entries_of
from treenail.state.stored import export_state, import_slices, import_state

if TYPE_CHECKING:
    from treenail.state.session import Session
    from treenail.state.views import SessionView

_logger = logging.getLogger("treenail.state")

SNAPSHOT_EVERY = 512
"""A stored snapshot is written when at least so many events, and half of all, came after the last."""

MAX_RECENT_EVENTS = 64
"""How many of the events that were written last are kept at hand for those who follow the log."""

MAX_CLOSED_CHILDREN = 32
"""How many closed children a session still holds in memory: their logs hold all of them."""

Observer = Callable[[Sequence[Any], Sequence[Any]], object]


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


class SliceChange(NamedTuple):
    """A slice before and after a batch."""

    slice_type: type
    before: Slice[Any]
    after: Slice[Any]


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
        self.observers: dict[type, list[Observer]] = {}
        # The fold, and how far it has come.
        self.fold = Fold(codec, self._read)
        self.loaded = True
        self.head = 0
        self.version = 0
        """Grows with every change of the slices."""
        self.slices: dict[type, Slice[Any]] = {}
        self.report = OpenReport()
        self.recent: deque[tuple[int, Draft, object | None]] = deque(maxlen=MAX_RECENT_EVENTS)
        """What was written last: place, stored form, and the value if it cannot change in place."""
        self.unknown: dict[str, int] = {}
        self.missing: list[str] = []
        """Reducers that the stored state was made by and that are not registered here."""
        self.stored_seq = 0
        self.pruned_upto = 0
        """Events up to here are no longer in the log: items that came from them are stored as values."""

    def adopt(self, child: Session) -> None:
        """Take a child in. Of those that are closed only the newest stay."""
        with self.lock:
            closed = [each for each in self.children if each.is_closed]
            gone = {id(each) for each in closed[: max(len(closed) - MAX_CLOSED_CHILDREN + 1, 0)]}
            self.children = [each for each in self.children if id(each) not in gone]
            self.children.append(child)

    def register(
        self, slice_type: type, event_type: type, reducer: Callable[..., Any], policy: SlicePolicy | None
    ) -> None:
        """Let a reducer bring events of a type into a slice; the same one again changes nothing."""
        with self.lock:
            if self.fold.register(slice_type, event_type, reducer, policy) and self.head:
                self.loaded = False  # The slice is a fold of the whole log: fold it again when read.

    # .. loading ..

    def present(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it is now. The lock is held."""
        self.fold.know(slice_type)
        self.ensure_loaded()
        return self.slices.get(slice_type, EMPTY)

    def ensure_loaded(self) -> None:
        """Fold the log unless that was done, or if a type has become known that events waited for."""
        if self.fold.reducing is not None:
            self.fold.check_not_reducing()
        if not self.loaded or (self.unknown and any(map(self.codec.registry.knows, self.unknown))):
            self.load()

    def load(self) -> None:
        """Fold the log: the newest stored snapshot that fits, and the events after it."""
        info = self.log.info(self.session_id)
        notes = Notes()
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
            # A writer must not continue a damaged log; a reader may see everything before the damage.
            if not self.read_only:
                raise
            damage = str(error)
        self.head = head
        self.recent.clear()
        self.stored_seq = start
        self.pruned_upto = max(pruned, info.first - 1)
        self.unknown = notes.unknown
        self.report = OpenReport(events, start, dict(notes.unknown), tuple(notes.problems), damage)
        self.fold.known.update(dict.fromkeys(working.changes))
        self.slices = working.changes
        self.version += 1
        self.loaded = True
        if pruned >= info.first and self.lease is not None:
            # A prune was cut off after it had stored what stays: finish it.
            self.log.prune(self.lease, upto=pruned)

    def _import_snapshot(self, first: int, notes: Notes) -> tuple[dict[type, Slice[Any]], int, int]:
        """Return the stored slices, their place in the log, and up to where they need no events."""
        self.missing = []
        stored = self.log.latest_snapshot(self.session_id)
        if stored is None or (self.upto is not None and stored.seq > self.upto):
            return {}, 0, 0
        unknown: dict[str, int] = {}
        try:
            state = import_state(self.codec, stored.payload)
            mine = self.fold.describe()
            self.missing = mine.lacks(state.folding)
            if state.folding != mine and first == 1:
                return {}, 0, 0
            slices = import_slices(self.codec, state, self._read, unknown)
        except (CodecError, LogDamagedError, TypeError, AttributeError, ValueError) as error:
            # Damaged, or of another shape: data may name other types than the fields of a stored state.
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

    def _fold_envelope(self, working: Working, envelope: Envelope, notes: Notes) -> None:
        registry = self.codec.registry
        if not registry.knows(envelope.type):
            notes.count(envelope.type)
            return
        try:
            event: object = self.codec.decode(registry.resolve(envelope.type), envelope.payload)
            staged = Staged(event, envelope, is_immutable(event))
            self.fold.apply(working, staged, envelope.seq, notes=notes)
        except UnknownTypeError as error:
            notes.count(error.type_name)
        except (CodecError, SnapshotRestoreError, UsageError) as error:
            notes.problems.append(Problem(envelope.seq, envelope.type, str(error)))

    # .. writing ..

    def check_writable(self) -> None:
        """Raise `UsageError` or `ReadOnlyError` unless events can be appended."""
        if self.closed:
            raise UsageError(f"session {self.session_id} is closed; open it again with Session.open")
        if self.read_only:
            raise ReadOnlyError(
                f"session {self.session_id} was opened for reading; open it without read_only to change it"
            )
        if self.fold.reducing is not None:
            self.fold.check_not_reducing()

    def append(
        self, staged: Sequence[Staged], *, written: Callable[[], None] | None = None
    ) -> tuple[Sequence[SliceChange], Sequence[DispatchResult]]:
        """Fold events on the present state, log them in one batch, and make the new state the present.

        If anything goes wrong, neither the log nor the state has changed. `written` is called as soon
        as it is certain that the batch is in the log.
        """
        if not staged:
            if written is not None:
                written()
            return [], []
        with self.lock:
            self.check_writable()
            self.ensure_loaded()
            working = Working(self.slices)
            results: list[DispatchResult] = []
            batch: list[tuple[int, Draft, object | None]] = []
            for each in staged:
                chosen = each if each.predicate is None else self.fold.choose(working, each)
                if not isinstance(chosen.logged, Draft):
                    results.append(DispatchResult(chosen.event))
                    continue
                seq = self.head + len(batch) + 1
                results.append(self.fold.apply(working, chosen, seq))
                batch.append((seq, chosen.logged, chosen.event if chosen.immutable else None))
            try:
                interrupted = self._write(batch) if batch else None
                self.head += len(batch)
                changes = self._replace_slices(working.changes)
                if written is not None:
                    written()
            except BaseException as error:
                if not isinstance(error, Exception):
                    self.loaded = False  # Cut off between the log and the slices: only the log knows.
                raise
            if interrupted is not None:
                raise interrupted
            since = self.head - self.stored_seq
            if since >= SNAPSHOT_EVERY and since >= self.head // 2:
                self.try_to_store()
            return changes, results

    def _write(self, batch: list[tuple[int, Draft, object | None]]) -> BaseException | None:
        """Append to the log. Returns an interrupt that came when the batch was in the log already."""
        assert self.lease is not None
        drafts = [draft for _, draft, _ in batch]
        try:
            self.log.append(self.lease, drafts, expected_seq=self.head)
            self.recent.extend(batch)
        except (StaleWriterError, UsageError):
            raise  # Refused before anything was written.
        except BaseException as error:
            self.recent.clear()
            # A store may fail after its commit: ask what it holds.
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
            self.loaded = False  # Unknown: fold again from what the log will hold.
            return False
        return there == [(each.type, each.payload, each.at_us) for each in drafts]

    def _replace_slices(self, slices: dict[type, Slice[Any]]) -> Sequence[SliceChange]:
        """Put new slices in place of the present ones. Returns what observers are told."""
        changes = [
            SliceChange(slice_type, before, slices[slice_type])
            for slice_type in self.observers
            if slice_type in slices
            and slices[slice_type] is not (before := self.slices.get(slice_type, EMPTY))
            and (len(before) or len(slices[slice_type]))
        ]
        self.slices.update(slices)
        self.version += 1
        return changes

    # .. upkeep ..

    def try_to_store(self) -> None:
        """Store a snapshot if that works: an optimisation, and the log has everything."""
        try:
            self._store_snapshot()
        except (TreenailError, OSError) as error:
            _logger.warning("no snapshot was stored for session %s: %s", self.session_id, error)
        self.stored_seq = self.head  # Also after a failure, or each dispatch would try again.

    def _store_snapshot(self) -> None:
        """Write the folded state beside the log.

        Nothing is stored while events wait for a type or for reducers that this process does not
        have: the fold is not whole then.
        """
        if self.unknown or self.missing or self.lease is None:
            return
        payload = export_state(self.codec, self.slices, self.fold.describe(), pruned_upto=self.pruned_upto)
        self.log.put_snapshot(self.lease, self.head, payload)

    def prune(self, upto: int) -> tuple[int, Sequence[SliceChange]]:
        """Forget the events up to `upto`, and the history that came from them."""
        with self.lock:
            self.check_writable()
            self.ensure_loaded()
            assert self.lease is not None
            waiting = [*sorted(self.unknown), *self.missing]
            if waiting:
                raise UsageError(
                    "events would be lost for types or reducers that are not registered here: "
                    f"{', '.join(waiting)}; register them and prune again; nothing was changed"
                )
            upto = min(upto, self.head)
            if upto <= self.pruned_upto:
                return 0, []
            slices = {
                slice_type: _after(kept, upto)
                for slice_type, kept in self.slices.items()
                if self.fold.policy_of(slice_type) is SlicePolicy.LOG
                and not spec_of(slice_type).outlives_prune
            }
            everything = {**self.slices, **slices}
            payload = export_state(self.codec, everything, self.fold.describe(), pruned_upto=upto)
            self.log.put_snapshot(self.lease, self.head, payload)
            self.stored_seq = self.head
            count = self.log.prune(self.lease, upto=upto)
            self.pruned_upto = upto
            return count, self._replace_slices(slices)

    def note(self, payload: bytes) -> None:
        """Keep a note beside the log. Not under the lock: a heartbeat must not wait for a long reduction."""
        if self.lease is not None and not self.closed:
            self.log.put_note(self.lease, payload)

    def close(self) -> None:
        """Store a snapshot if much came after the last, and give up the lease."""
        with self.lock:
            self.fold.check_not_reducing()
            if self.closed:
                return
            self.closed = True
            if self.lease is None:
                return
            if self.loaded and self.head - self.stored_seq >= SNAPSHOT_EVERY // 4:
                self.try_to_store()
            self.log.release(self.lease)

    # .. telling others ..

    def notify(
        self, changes: Sequence[SliceChange], results: Sequence[DispatchResult]
    ) -> Sequence[DispatchResult]:
        """Tell observers and subscribers, outside the lock, each isolated from the others.

        What observers did stands in the result of the batch's first event.
        """
        told = list(results)
        for change in changes:
            for observer in tuple(self.observers.get(change.slice_type, ())):
                failure = call_isolated(observer, change.before, change.after)
                if told:
                    told[0] = told[0].with_handler(observer, failure)
        if self.dispatcher is None:
            return told
        for index, each in enumerate(told):
            try:
                delivered = self.dispatcher.dispatch(each.event)
            except Exception as error:  # telemetry is best effort: the event stands
                _logger.warning("the dispatcher failed: %s", error, exc_info=error)
                failure = HandlerFailure(self.dispatcher.dispatch, error)
                told[index] = each.with_handler(self.dispatcher.dispatch, failure)
            else:
                told[index] = each._replace(
                    handlers_invoked=each.handlers_invoked + delivered.handlers_invoked,
                    errors=each.errors + delivered.errors,
                )
        return told


def _after(kept: Slice[Any], upto: int) -> Slice[Any]:
    """Return a slice without the items that came from events up to there."""
    left = [entry for entry in entries_of(kept) if abs(entry[1]) > upto]
    return kept if len(left) == len(kept) else Slice.of(left)

"""Folding: what an event makes of the slices.

Theory of operation
-------------------
The state of a session is a fold of its log, and this file is the fold. `Fold.apply` runs
one event's reducers over slices as they are and notes the slices as they will be
(`Working`). The caller decides what happens next: loading does so for every stored
event, appending logs the events first and then puts the new slices in place of the old
(both in `core`), and a transaction keeps them to itself.

Because slices are folds, registering a reducer is a statement about the whole log: a
slice shows what its reducers make of every event, also of those from before the
registration. The same holds for types: an event whose type is not known here waits in
the log, and is folded in its place as soon as the type is known.

The live state must equal what the log gives when it is read again. Therefore an event is
`Staged` before anything else: encoded, so that what cannot be stored is refused while
nothing has changed; and a value that could change in place is decoded from those bytes
for every reducer, never taken from the caller.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from treenail.codec import Codec, type_registry
from treenail.errors import EncodeError, UnknownTypeError, UsageError
from treenail.log import Draft, Envelope, SlicePolicy
from treenail.state.dispatch import DispatchResult, HandlerFailure
from treenail.state.events import (
    SYSTEM_EVENTS,
    ClearSlice,
    InitializeSlice,
    RestoredSlice,
    StateRestored,
    spec_of,
)
from treenail.state.reducers import Made, Registration, reducer_name, takes_context
from treenail.state.slices import EMPTY, Append, Kept, Slice, entries_of
from treenail.state.stored import Folding, Read, read_values, rebuilt, seal
from treenail.state.views import SessionView

_logger = logging.getLogger("treenail.state")


@dataclass(frozen=True, slots=True)
class Problem:
    """An event that could not be folded. It stays in the log, untouched."""

    seq: int
    type: str
    message: str


@dataclass(slots=True)
class Notes:
    """What a fold of the whole log noticed."""

    unknown: dict[str, int] = field(default_factory=dict)
    """Types that are not registered in this process, and how many events have them."""
    problems: list[Problem] = field(default_factory=list)

    def count(self, type_name: str) -> None:
        """Count an event whose type is not known here."""
        self.unknown[type_name] = self.unknown.get(type_name, 0) + 1


class Staged(NamedTuple):
    """An event on its way into the log or out of it: encoded, so that it is known to be storable."""

    event: object
    logged: Draft | Envelope | None
    """Its stored form; None for a LIVE event, which is published, not logged, and reaches no slice."""
    immutable: bool = False
    predicate: Callable[[Any], bool] | None = None
    """For `ClearSlice`: chooses the items again on the state in which it is logged."""


class Working:
    """Slices as they will be, over slices as they are."""

    __slots__ = ("base", "changes")

    def __init__(
        self, base: Mapping[type, Slice[Any]], changes: Mapping[type, Slice[Any]] | None = None
    ) -> None:
        self.base = base
        self.changes: dict[type, Slice[Any]] = dict(changes or {})

    def get(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it will be."""
        found = self.changes.get(slice_type)
        return found if found is not None else self.base.get(slice_type, EMPTY)


class Context:
    """What reducers see besides their slice and event."""

    __slots__ = ("_working",)

    def __init__(self, working: Working) -> None:
        self._working = working

    @property
    def session(self) -> SessionView:
        """The session as it will be, read-only."""
        return SessionView(self._working.get)


class Fold:
    """The reducers and policies of one session, and what they make of an event."""

    def __init__(self, codec: Codec, read: Read) -> None:
        self.codec = codec
        self._read = read
        self.known: dict[type, None] = {}
        """The slices that this session uses, oldest first."""
        self.reducers: dict[type, list[Registration]] = {}
        self.policies: dict[type, SlicePolicy] = {}
        self.reducing: int | None = None
        """The thread in which a reducer runs."""
        for each in SYSTEM_EVENTS:
            self.name_of(each)

    # .. types, reducers, policies ..

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

    def register(
        self, slice_type: type, event_type: type, reducer: Callable[..., Any], policy: SlicePolicy | None
    ) -> bool:
        """Let a reducer bring events of a type into a slice. Says whether that changes anything."""
        self.check_not_reducing()
        self.know(slice_type)
        self.name_of(event_type)
        registrations = self.reducers.setdefault(event_type, [])
        is_new = all(each.slice_type is not slice_type or each.reducer != reducer for each in registrations)
        if is_new:
            registrations.append(Registration(slice_type, reducer, takes_context(reducer)))
        is_other = policy is not None and policy is not self.policy_of(slice_type)
        if policy is not None:
            self.policies[slice_type] = policy
        return is_new or is_other

    def take_over(self, other: Fold) -> None:
        """Register everything that another session's fold has."""
        for event_type, registrations in other.reducers.items():
            self.reducers[event_type] = list(registrations)
        self.policies.update(other.policies)
        self.known.update(other.known)

    def describe(self) -> Folding:
        """Describe the reducers that are registered: what a stored state must have been made by."""
        name_of = self.codec.registry.name_of
        by_event = sorted(
            ((name_of(event_type), each) for event_type, each in self.reducers.items()),
            key=lambda pair: pair[0],
        )
        return Folding(
            tuple(
                (event, name_of(each.slice_type), reducer_name(each.reducer))
                for event, registrations in by_event
                for each in registrations
            ),
            tuple(sorted((name_of(each), policy.value) for each, policy in self.policies.items())),
        )

    def policy_of(self, slice_type: type) -> SlicePolicy:
        """Return what was registered for a slice, or what its type says about itself."""
        return self.policies.get(slice_type) or spec_of(slice_type).policy

    def policies_of(self, event: object) -> set[SlicePolicy]:
        """Return the policies of the slices that an event reaches."""
        resolve = self.codec.registry.resolve
        if isinstance(event, (InitializeSlice, ClearSlice)):
            targets: Iterable[type] = (resolve(event.slice_type),)
        elif isinstance(event, StateRestored):
            targets = [resolve(each.slice_type) for each in event.slices]
        else:
            registrations = self.reducers.get(type(event))
            targets = [each.slice_type for each in registrations] if registrations else (type(event),)
        return {self.policy_of(each) for each in targets}

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

    # .. folding ..

    def apply(
        self, working: Working, staged: Staged, seq: int, *, notes: Notes | None = None
    ) -> DispatchResult:
        """Run an event's reducers. Raises `EncodeError` if one of them makes what cannot be stored.

        With `notes`, a slice of an unknown type in a `StateRestored` is counted there, not raised.
        """
        event, logged = staged.event, staged.logged
        assert logged is not None
        kind = type(event)
        if isinstance(event, (InitializeSlice, ClearSlice, StateRestored)):
            self._apply_system(working, event, seq, logs_only=logged.rolled_back, notes=notes)
            return DispatchResult(event)
        if kind not in self.reducers:
            if not logged.rolled_back or self.policy_of(kind) is SlicePolicy.LOG:
                self.know(kind)
                kept = event if staged.immutable else Kept(self.codec, kind, logged.payload)
                working.changes[kind] = working.get(kind).append(kept, seq)
            return DispatchResult(event)
        ran = []
        failures = []
        for each in self.reducers[kind]:
            if logged.rolled_back and self.policy_of(each.slice_type) is not SlicePolicy.LOG:
                continue
            ran.append(each.reducer)
            try:
                self._reduce(working, each, staged, seq)
            except EncodeError as error:
                raise EncodeError(
                    f"{error.reason} (made by the reducer {reducer_name(each.reducer)} "
                    f"of {kind.__qualname__}; nothing was changed)",
                    path=error.path,
                ) from error
            except Exception as error:  # a reducer is foreign code: one that fails harms no other
                name = reducer_name(each.reducer)
                _logger.warning(
                    "the reducer %s failed on %s: %s", name, kind.__qualname__, error, exc_info=error
                )
                failures.append(HandlerFailure(each.reducer, error))
        return DispatchResult(event, tuple(ran), tuple(failures))

    def _reduce(self, working: Working, registration: Registration, staged: Staged, seq: int) -> None:
        assert staged.logged is not None
        event, payload = staged.event, staged.logged.payload
        given = event if staged.immutable else self.codec.decode(type(event), payload)
        before = working.get(registration.slice_type)
        slice_type = registration.slice_type
        self.reducing = threading.get_ident()
        try:
            if registration.takes_context:
                outcome = registration.reducer(before, given, context=Context(working))
            else:
                outcome = registration.reducer(before, given)
            is_kept = type(outcome) is Append and outcome.item is event and type(event) is slice_type
            if is_kept and staged.immutable:  # Almost every event is.
                after = before.append(event, seq)
            else:
                made = Made(self.codec, slice_type, given, payload, seq, staged.immutable)
                after = made.of(before, outcome)
            working.changes[slice_type] = after
        finally:
            self.reducing = None

    def _apply_system(
        self,
        working: Working,
        event: InitializeSlice | ClearSlice | StateRestored,
        seq: int,
        *,
        logs_only: bool,
        notes: Notes | None,
    ) -> None:
        for each in event.slices if isinstance(event, StateRestored) else (event,):
            try:
                slice_type = self.codec.registry.resolve(each.slice_type)
            except UnknownTypeError as error:
                if notes is None or not isinstance(event, StateRestored):
                    raise
                notes.count(error.type_name)  # The other slices were restored all the same.
                continue
            if logs_only and self.policy_of(slice_type) is not SlicePolicy.LOG:
                continue
            self.know(slice_type)
            before = working.get(slice_type)
            if isinstance(each, RestoredSlice):
                after = self._restored(slice_type, before, each, seq)
            elif isinstance(each, InitializeSlice):
                after = Slice.of((seal(self.codec, slice_type, item), -seq) for item in each.items)
            elif each.removed is None:
                after = EMPTY
            else:
                gone = set(each.removed)
                entries = enumerate(entries_of(before))
                after = Slice.of(entry for index, entry in entries if index not in gone)
            working.changes[slice_type] = after

    def _restored(self, slice_type: type, before: Slice[Any], made: RestoredSlice, seq: int) -> Slice[Any]:
        wanted = {origin for each in made.items for origin in each.events()}
        found = {origin: kept for kept, origin in entries_of(before) if origin in wanted}
        found.update(read_values(self.codec, self._read, wanted - found.keys()))
        return rebuilt(self.codec, slice_type, before, made, found, seq=seq)

    def choose(self, working: Working, staged: Staged) -> Staged:
        """Let a `ClearSlice` name the items that its predicate chooses now."""
        event, predicate, logged = staged.event, staged.predicate, staged.logged
        if predicate is None or not isinstance(event, ClearSlice) or not isinstance(logged, Draft):
            return staged
        items = working.get(self.codec.registry.resolve(event.slice_type)).all()
        removed = tuple(index for index, item in enumerate(items) if predicate(item))
        chosen = replace(event, removed=removed)
        return staged._replace(event=chosen, logged=logged._replace(payload=self.codec.encode(chosen)))

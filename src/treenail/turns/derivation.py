"""How a turn stands, read from a log: events become facts, facts are folded, the table gives the state.

Most events are one fact: themselves. A session that was restored from a snapshot has its conversation in
one event that lists whole slices; `FactReader` unpacks that into the messages and turns that it holds, in
the order in which they happened. A `TurnFollower` folds the facts of one turn and remembers how far it has
read, so that asking again costs only what was logged since.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from treenail.conversation import InnerMessage, ProviderUsage, read_events
from treenail.log import Draft, Envelope
from treenail.state import InitializeSlice, Session, StateRestored, entry_at, opened
from treenail.tools import HoldAnswered, ToolHeld, ToolInvoked, ToolStarted
from treenail.turns.states import (
    PartialText,
    TurnDerivation,
    TurnEnded,
    TurnFold,
    TurnResumed,
    TurnStarted,
    TurnState,
)

TURN_KINDS = frozenset[type](
    (
        TurnStarted,
        TurnResumed,
        TurnEnded,
        PartialText,
        InnerMessage,
        ToolHeld,
        ToolStarted,
        StateRestored,
        InitializeSlice,
    )
)
"""The kinds of events that decide how a turn stands."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that an event of a log says happened."""

    value: object | None
    turn_id: str | None = None
    """The turn id of the event's envelope."""
    is_imported: bool = False
    """Whether it happened elsewhere and came with a snapshot."""


@dataclass(slots=True)
class FactReader:
    """Reads a log's events as facts, each fact once.

    A message that is dispatched again, with another status, is not a new fact.
    """

    _seen: set[object] = field(default_factory=set)

    def facts(self, envelope: Envelope, value: object | None) -> Sequence[Fact]:
        """Return the facts of an event, in order."""
        if isinstance(value, InnerMessage) and not self.is_new(value):
            return ()
        first = Fact(value, envelope.turn_id)
        return (first, *(Fact(each, None, is_imported=True) for each in self.imported(value)))

    def imported(self, value: object | None) -> Iterable[object]:
        """Return what an event takes over from a snapshot and this reader has not seen."""
        if isinstance(value, StateRestored):
            items = [
                item.item
                for each in value.slices
                for item in each.items
                if item.origin == 0 and item.item is not None
            ]
        elif isinstance(value, InitializeSlice):
            items = list(value.items)
        else:
            return ()
        return _in_order([each for each in items if self.is_new(each)])

    def is_new(self, value: object) -> bool:
        """Return whether a value was not seen before, and remember it."""
        key = value.message_id.int if isinstance(value, InnerMessage) else (type(value), repr(value))
        count = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > count


def _in_order(values: Sequence[object]) -> Iterator[object]:
    """Order what came slice by slice by turns; what belongs to no turn comes first."""
    messages = [each for each in values if isinstance(each, InnerMessage)]
    turns = [each for each in values if isinstance(each, TurnStarted)]
    known = {each.evaluation_id for each in turns}
    ends = {each.call_id: each for each in values if isinstance(each, ToolInvoked)}
    yield from _with_ends((each for each in messages if each.evaluation_id not in known), ends)
    for turn in turns:
        yield turn
        yield from _with_ends((each for each in messages if each.evaluation_id == turn.evaluation_id), ends)
        yield from (each for each in values if isinstance(each, PartialText) and each.turn_id == turn.turn_id)
        if turn is turns[-1]:
            # These do not name their turn; what is still open can only belong to the newest one.
            yield from (each for each in values if isinstance(each, ToolHeld))
            yield from (each for each in values if isinstance(each, HoldAnswered | ProviderUsage))
        endings = [each for each in values if isinstance(each, TurnEnded) and each.turn_id == turn.turn_id]
        yield from endings[-1:]


def _with_ends(messages: Iterable[InnerMessage], ends: Mapping[str | None, ToolInvoked]) -> Iterator[object]:
    for each in messages:
        if each.role == "tool" and each.tool_call_id in ends:
            yield ends[each.tool_call_id]
        yield each


@dataclass(slots=True)
class TurnFollower:
    """Folds one turn out of a log, event by event. Asking again costs what was logged since."""

    turn_id: str = ""
    fold: TurnFold = field(default_factory=lambda: TurnFold(""))
    seq: int = 0
    """The newest event that was folded."""
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    """Held while folding: a screen may ask from another thread."""
    _is_inside: bool = False
    _reader: FactReader = field(default_factory=FactReader)

    def __post_init__(self) -> None:
        self.fold = TurnFold(self.turn_id)

    def aim(self, session: Session, started: TurnStarted, *, after: int | None = None) -> None:
        """Follow this turn of a session from its first event; does nothing if it follows it already.

        The caller that began the turn passes `after`, the event before it; otherwise it is looked up.
        """
        with self.lock:
            if self.turn_id != started.turn_id:
                self.turn_id, self.fold = "", TurnFold(started.turn_id)
                self._is_inside, self._reader = False, FactReader()
                self.seq = _first_event(session, started) - 1 if after is None else after
                self.turn_id = started.turn_id

    def add(self, seq: int, logged: Envelope | Draft, value: object | None) -> None:
        """Fold the next event. One that was folded before is skipped."""
        if seq <= self.seq:
            return
        try:
            self.seq = seq
            if not isinstance(value, InnerMessage):
                self._add(seq, logged, value)
            elif self._reader.is_new(value) and self._is_inside:
                self.fold.take(seq, logged.turn_id, value)
        except BaseException:
            self.turn_id = ""  # Half folded: the next `aim` folds the turn again.
            raise

    def _add(self, seq: int, logged: Envelope | Draft, value: object | None) -> None:
        if type(value) not in TURN_KINDS:
            return
        if self._is_of_turn(value):
            self.fold.take(seq, logged.turn_id, value)
        for imported in self._reader.imported(value):
            if self._is_of_turn(imported):
                self.fold.take(seq, None, imported)
            else:
                self.fold.keep_loose(seq, imported)

    def _is_of_turn(self, value: object) -> bool:
        """Return whether this part of the log is the turn's; a start says which part begins."""
        if isinstance(value, TurnStarted):
            self._is_inside = value.turn_id == self.turn_id
        return self._is_inside

    def catch_up(self, session: Session, started: TurnStarted) -> TurnFold:
        """Fold what the log has of this turn by now, and return a copy of the fold."""
        with self.lock:
            self.aim(session, started)
            for seq, logged, value in read_events(session, TURN_KINDS, after=self.seq, upto=session.head):
                self.add(seq, logged, value)
            return self.fold.copy()


def _first_event(session: Session, started: TurnStarted) -> int:
    """Return the first event of a turn: its start, or the import of messages that it continues."""
    first = abs(entry_at(session[TurnStarted].view(), -1)[1])
    messages = session[InnerMessage].view()
    for place in range(len(messages) - 1, -1, -1):
        kept, origin = entry_at(messages, place)
        if opened(kept).evaluation_id != started.evaluation_id:
            break
        first = min(first, abs(origin))
    return max(first, 1)


_followers: WeakKeyDictionary[Session, TurnFollower] = WeakKeyDictionary()


def follower_of(session: Session) -> TurnFollower:
    """Return the follower of a session's newest turn, one for each session in this process."""
    found = _followers.get(session)
    # Two threads that ask for the first time get the same one.
    return _followers.setdefault(session, TurnFollower()) if found is None else found


Event = tuple[Envelope, object | None]
"""An event of a log with its value; None where the value cannot be read."""


def derive_turn(events: Iterable[Event], turn_id: str) -> TurnDerivation:
    """Derive a turn's state from the events of its log alone. It is a pure function."""
    follower = TurnFollower(turn_id)
    for envelope, value in events:
        follower.add(envelope.seq, envelope, value)
    return follower.fold.derive()


def newest_fold(session: Session) -> TurnFold | None:
    """Return the fold of a session's newest turn; None if it has no turn."""
    started = session[TurnStarted].latest()
    return None if started is None else follower_of(session).catch_up(session, started)


def newest_turn(session: Session) -> TurnDerivation | None:
    """Derive how a session's newest turn stands; None if it has no turn.

    It reads that turn's events once: asked again, it reads what was logged since.
    """
    fold = newest_fold(session)
    return None if fold is None else fold.derive()


def turn_state(session: Session) -> TurnState:
    """Derive the state of a session's newest turn from its log."""
    derived = newest_turn(session)
    return TurnState.UNFINISHED if derived is None else derived.state

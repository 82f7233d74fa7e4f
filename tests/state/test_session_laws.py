"""Laws of sessions: whatever is done, a session equals a small model of it, live and after every reopening.

The model is a dictionary of lists. Each item remembers the event that brought it, because pruning history is
defined by that. What a session does with stored snapshots, references into the log and structural sharing is
invisible in it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from state_kit import SLICES, Add, Box, Last, Note, Peeked, Said, Seen, Tally, Total, equip, opened_log

from treenail.codec import type_registry
from treenail.errors import LogDamagedError, UsageError
from treenail.log import SlicePolicy
from treenail.state import Session, Snapshot, Transaction, core

STATE, LOG, CACHE = SlicePolicy.STATE, SlicePolicy.LOG, SlicePolicy.CACHE

POLICIES = {
    Note: STATE,
    Said: LOG,
    Peeked: CACHE,
    Box: STATE,
    Total: STATE,
    Seen: LOG,
    Last: CACHE,
    Tally: STATE,
}

Item = tuple[Any, int]
State = dict[type, list[Item]]
Deed = Callable[[State, int, bool], None]
"""What an event does to a state, given its place in the log, and whether it reaches history only."""


def on_add(number: int) -> Deed:
    def deed(state: State, seq: int, logs_only: bool) -> None:
        state[Seen] = [*state[Seen], (Seen(number), seq)]
        if not logs_only:
            total = state[Total][-1][0].value if state[Total] else 0
            count = state[Tally][-1][0] if state[Tally] else Tally()
            state[Total] = [(Total(total + number), seq)]
            state[Last] = [(Last(number), seq)]
            state[Tally] = [(Tally(count.count + 1, count.boxes), seq)]

    return deed


def on_box(things: list[int]) -> Deed:
    def deed(state: State, seq: int, logs_only: bool) -> None:
        if not logs_only:
            state[Box] = [*state[Box], (Box(list(things)), seq)]
            tally = state[Tally][-1][0] if state[Tally] else Tally()
            state[Tally] = [(Tally(tally.count, tally.boxes + len(things)), seq)]

    return deed


def on_other(event: Any) -> Deed:
    def deed(state: State, seq: int, logs_only: bool) -> None:
        kind = type(event)
        if not logs_only or POLICIES[kind] is LOG:
            state[kind] = [*state[kind], (event, seq)]

    return deed


def setting(targets: dict[type, list[Item]], keeps_origins: bool) -> Deed:
    def deed(state: State, seq: int, logs_only: bool) -> None:
        for kind, items in targets.items():
            if not logs_only or POLICIES[kind] is LOG:
                state[kind] = [(value, (origin if keeps_origins else 0) or seq) for value, origin in items]

    return deed


def clearing(kind: type, predicate: Callable[[Any], bool]) -> Deed:
    def deed(state: State, seq: int, logs_only: bool) -> None:
        if not logs_only or POLICIES[kind] is LOG:
            state[kind] = [each for each in state[kind] if not predicate(each[0])]

    return deed


def deed_of(event: Any) -> Deed:
    if isinstance(event, Add):
        return on_add(event.number)
    if isinstance(event, Box):
        return on_box(list(event.things))
    return on_other(event)


def reach_of(event: Any) -> frozenset[type]:
    if isinstance(event, Add):
        return frozenset({Total, Seen, Last, Tally})
    if isinstance(event, Box):
        return frozenset({Box, Tally})
    return frozenset({type(event)})


@dataclass
class Taken:
    """A snapshot, and what the model held then."""

    snapshot: Snapshot
    state: State
    wanted: frozenset[SlicePolicy]
    own: bool


words = st.text("ab", max_size=2)
numbers = st.integers(0, 3)
events = st.one_of(
    words.map(Note),
    words.map(Said),
    numbers.map(Peeked),
    numbers.map(Add),
    st.lists(numbers, max_size=2).map(Box),
)
even = st.sampled_from([0, 1])


def values(kind: type) -> st.SearchStrategy[Any]:
    if kind is Box:
        return st.lists(numbers, max_size=2).map(Box)
    if kind in (Note, Said):
        return words.map(kind)
    return numbers.map(kind)


seeds = st.sampled_from(SLICES).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(values(kind), max_size=3))
)


class SessionMachine(RuleBasedStateMachine):
    """Does everything that can be done to a session, and to the model."""

    store = "memory"
    snapshot_every = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="treenail-laws-"))
        self.closing.callback(shutil.rmtree, self.folder)
        patch = pytest.MonkeyPatch()
        self.closing.callback(patch.undo)
        patch.setattr(core, "SNAPSHOT_EVERY", self.snapshot_every)
        self.log = self.closing.enter_context(opened_log(self.store, self.folder))
        self.committed: State = {kind: [] for kind in SLICES}
        self.past: list[State] = [self.copy(self.committed)]
        self.pruned = 0
        self.snapshots: list[Taken] = []
        self.transaction: Transaction | None = None
        self.staged: list[tuple[Deed, frozenset[type]]] = []
        self.handle = self.session = equip(Session(log=self.log))

    def teardown(self) -> None:
        self.session.close()
        self.closing.close()

    # .. the model ..

    @staticmethod
    def copy(state: State) -> State:
        return {kind: list(items) for kind, items in state.items()}

    def view(self) -> State:
        state = self.copy(self.committed)
        for deed, _ in self.staged:
            deed(state, 0, False)
        return state

    def log_now(self, deed: Deed, *, logs_only: bool = False) -> None:
        deed(self.committed, len(self.past), logs_only)
        self.past.append(self.copy(self.committed))

    def happen(self, deed: Deed, reach: frozenset[type]) -> None:
        if self.transaction is not None and any(POLICIES[kind] is not LOG for kind in reach):
            self.staged.append((deed, reach))
        else:
            self.log_now(deed)

    def compare(self, session: Session, state: State) -> None:
        for kind in SLICES:
            assert list(session[kind].all()) == [value for value, _ in state[kind]], kind.__name__

    # .. what is done ..

    @rule(event=events)
    def dispatch(self, event: Any) -> None:
        result = self.handle.dispatch(event)
        assert result.ok
        self.happen(deed_of(event), reach_of(event))
        if isinstance(event, Box):
            event.things.append(99)  # What the caller does to its own object is its own affair.

    @rule(batch=st.lists(events, max_size=3))
    def dispatch_together(self, batch: list[Any]) -> None:
        self.handle.dispatch_all(batch)
        if self.transaction is None:
            for event in batch:
                self.log_now(deed_of(event))
        else:
            for event in batch:
                self.happen(deed_of(event), reach_of(event))

    @precondition(lambda self: self.transaction is not None)
    @rule(event=events)
    def somebody_else_dispatches(self, event: Any) -> None:
        self.session.dispatch(event)
        self.log_now(deed_of(event))

    @rule(chosen=seeds)
    def seed(self, chosen: tuple[type, list[Any]]) -> None:
        kind, items = chosen
        self.handle[kind].seed(items)
        self.happen(setting({kind: [(each, 0) for each in items]}, False), frozenset({kind}))

    @rule(kind=st.sampled_from(SLICES))
    def clear(self, kind: type) -> None:
        self.handle[kind].clear()
        self.happen(clearing(kind, lambda item: True), frozenset({kind}))

    @rule(kind=st.sampled_from(SLICES), parity=even)
    def clear_some(self, kind: type, parity: int) -> None:
        def chosen(item: Any) -> bool:
            return len(repr(item)) % 2 == parity

        self.handle[kind].clear(chosen)
        self.happen(clearing(kind, chosen), frozenset({kind}))

    @rule(everything=st.booleans())
    def empty(self, everything: bool) -> None:
        view = self.view()
        if everything:
            self.handle.reset()
        else:
            self.handle.drop_caches()
        # In order of their names, so that the log of a run can be repeated.
        for kind in sorted(SLICES, key=type_registry.name_of):
            wanted = POLICIES[kind] is CACHE or (everything and POLICIES[kind] is STATE)
            if wanted and view[kind]:
                self.happen(clearing(kind, lambda item: True), frozenset({kind}))

    @rule(
        policies=st.sampled_from([frozenset({STATE}), frozenset({STATE, CACHE}), frozenset(SlicePolicy)]),
        through_json=st.booleans(),
    )
    def take_snapshot(self, policies: frozenset[SlicePolicy], through_json: bool) -> None:
        snapshot = self.handle.snapshot(policies=policies)
        state = self.view()
        again = Snapshot.from_json(snapshot.to_json())
        assert again == snapshot
        assert {kind: list(items) for kind, items in snapshot.slices.items()} == {
            kind: [value for value, _ in items]
            for kind, items in state.items()
            if items and POLICIES[kind] in policies
        }
        own = not through_json
        self.snapshots.append(Taken(snapshot if own else again, state, policies, own))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), preserve_logs=st.booleans())
    def roll_back(self, data: st.DataObject, preserve_logs: bool) -> None:
        taken = data.draw(st.sampled_from(self.snapshots))
        view = self.view()
        targets: dict[type, list[Item]] = {}
        for kind in SLICES:
            if POLICIES[kind] not in taken.wanted or (POLICIES[kind] is LOG and preserve_logs):
                continue
            if [value for value, _ in taken.state[kind]] != [value for value, _ in view[kind]]:
                targets[kind] = taken.state[kind]
        self.handle.rollback(taken.snapshot, preserve_logs=preserve_logs)
        if targets:
            own = taken.own and self.transaction is None
            self.happen(setting(targets, own), frozenset(targets))

    @precondition(lambda self: self.transaction is None)
    @rule()
    def begin(self) -> None:
        self.transaction = self.session.begin()
        self.handle = self.transaction.session
        self.staged = []

    @precondition(lambda self: self.transaction is not None)
    @rule(extra=st.lists(events, max_size=2))
    def commit(self, extra: list[Any]) -> None:
        assert self.transaction is not None
        self.transaction.commit(*extra)
        for deed, _ in self.staged:
            self.log_now(deed)
        for event in extra:
            self.log_now(deed_of(event))
        self.end()

    @precondition(lambda self: self.transaction is not None)
    @rule(extra=st.lists(events, max_size=2))
    def roll_back_transaction(self, extra: list[Any]) -> None:
        assert self.transaction is not None
        self.transaction.rollback(*extra)
        for deed, reach in self.staged:
            if any(POLICIES[kind] is LOG for kind in reach):
                self.log_now(deed, logs_only=True)
        for event in extra:
            self.log_now(deed_of(event))
        self.end()

    def end(self) -> None:
        with pytest.raises(UsageError, match="this call is over"):
            self.handle.dispatch(Note("late"))
        self.transaction, self.handle, self.staged = None, self.session, []

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.past) - 1))
        try:
            twin = self.session.fork(at=at)
        except UsageError:
            assert self.pruned and at < len(self.past) - 1
            return
        self.compare(twin, self.past[at])
        twin.dispatch(Add(1))
        twin.close()
        self.log.erase(twin.session_id)

    @rule()
    def clone(self) -> None:
        twin = self.handle.clone()
        self.compare(twin, self.view())
        twin.dispatch(Note("only here"))

    @precondition(lambda self: self.transaction is None)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        head = len(self.past) - 1
        upto = data.draw(st.integers(0, head))
        gone = self.session.prune(upto=upto)
        assert gone == max(upto - self.pruned, 0)
        if upto <= self.pruned:
            return
        self.pruned = upto
        for kind in SLICES:
            if POLICIES[kind] is LOG:
                self.committed[kind] = [each for each in self.committed[kind] if each[1] > upto]
        self.past[head] = self.copy(self.committed)

    @precondition(lambda self: self.transaction is None)
    @rule()
    def reopen(self) -> None:
        self.session.close()
        self.handle = self.session = equip(Session.open(self.log, self.session.session_id))
        assert self.session.report.ok
        # Another object opened the session: what was taken before it is as good as read from JSON.
        for taken in self.snapshots:
            taken.own = False

    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        upto = data.draw(st.integers(0, len(self.past) - 1))
        then = equip(Session.open(self.log, self.session.session_id, read_only=True, upto=upto))
        try:
            assert then.head == upto
        except LogDamagedError:
            assert self.pruned
            return
        self.compare(then, self.past[upto])

    # .. what holds ..

    @invariant()
    def the_session_equals_the_model(self) -> None:
        assert self.session.head == len(self.past) - 1
        self.compare(self.session, self.committed)
        if self.transaction is not None:
            self.compare(self.handle, self.view())

    @invariant()
    def a_fold_equals_the_live_session(self) -> None:
        folded = equip(Session.open(self.log, self.session.session_id, read_only=True))
        self.compare(folded, self.committed)


def machine(store: str, snapshot_every: int, examples: int) -> Any:
    chosen = type(f"On{store}Every{snapshot_every}", (SessionMachine,), {})
    chosen.store, chosen.snapshot_every = store, snapshot_every
    case = chosen.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return case


TestInMemoryWithoutStoredSnapshots = machine("memory", 10**9, 40)
TestInMemoryWithStoredSnapshots = machine("memory", 3, 60)
TestOnSqliteWithStoredSnapshots = machine("sqlite", 3, 15)
TestOnPostgresWithStoredSnapshots = machine("postgres", 3, 5)

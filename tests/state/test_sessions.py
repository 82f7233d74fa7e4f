"""Sessions: what can be done with slices, events and reducers, in every spelling."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from state_kit import Add, Box, CountingLog, Last, Note, Page, Peeked, Said, Seen, Tally, Total, equip

from treenail.clock import FixedClock
from treenail.errors import EncodeError, UsageError
from treenail.log import Channel, Log, MemoryLog, SlicePolicy
from treenail.state import (
    Append,
    AttentionNeeded,
    Clear,
    Extend,
    InProcessDispatcher,
    InProcessEventBus,
    Replace,
    Session,
    SessionView,
    append_all,
    event,
    iter_sessions_bottom_up,
    reducer,
    replace_latest,
    replace_latest_by,
    spec_of,
    stamped,
    upsert_by,
)

# --- reading and writing a slice ------------------------------------------------------------------------


def test_a_slice_is_read_whole_at_its_end_or_by_a_predicate(log: Log) -> None:
    session = Session(log=log)
    assert session[Note].all() == ()
    assert session[Note].latest() is None
    for text in ("a", "b", "ab"):
        session.dispatch(Note(text))
    assert session[Note].all() == (Note("a"), Note("b"), Note("ab"))
    assert session[Note].latest() == Note("ab")
    assert session[Note].where(lambda note: "a" in note.text) == (Note("a"), Note("ab"))
    assert list(session[Note]) == [Note("a"), Note("b"), Note("ab")]
    assert len(session[Note]) == 3


def test_seed_puts_one_item_or_several_in_place_of_all(log: Log) -> None:
    session = Session(log=log)
    session[Note].seed([Note("a"), Note("b")])
    assert session[Note].all() == (Note("a"), Note("b"))
    session[Note].seed(Note("c"))
    assert session[Note].all() == (Note("c"),)
    session[Note].seed([])
    assert session[Note].all() == ()


def test_seed_bypasses_reducers(log: Log) -> None:
    session = equip(Session(log=log))
    session[Total].seed(Total(40))
    session.dispatch(Add(2))
    assert session[Total].all() == (Total(42),)


def test_clear_takes_away_all_items_or_those_that_a_predicate_chooses(log: Log) -> None:
    session = Session(log=log)
    session[Note].seed([Note("a"), Note("b"), Note("a")])
    session[Note].clear(lambda note: note.text == "a")
    assert session[Note].all() == (Note("b"),)
    session[Note].clear()
    assert session[Note].all() == ()


def test_append_goes_through_the_reducers(log: Log) -> None:
    session = Session(log=log)
    session[Note].register(Note, replace_latest)
    session[Note].append(Note("a"))
    session[Note].append(Note("b"))
    assert session[Note].all() == (Note("b"),)


def test_an_item_is_not_appended_to_the_slice_of_another_type() -> None:
    session = Session()
    with pytest.raises(UsageError, match="slice of its own"):
        session[Note].append(Said("a"))  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(UsageError, match="cannot stand"):
        session[Note].seed([Said("a")])  # type: ignore[list-item]  # that is the mistake
    with pytest.raises(UsageError, match="not a class"):
        session["Note"]  # type: ignore[index]  # that is the mistake
    assert session.head == 0


def test_an_event_without_a_reducer_is_kept_in_the_slice_of_its_own_type(log: Log) -> None:
    session = Session(log=log)
    session.dispatch(Note("a"))
    session.dispatch(Said("b"))
    assert session[Note].all() == (Note("a"),)
    assert session[Said].all() == (Said("b"),)


def test_a_subclass_of_an_event_type_is_another_event_type() -> None:
    @dataclass(frozen=True)
    class LoudNote(Note):
        pass

    session = Session()
    session.dispatch(LoudNote("A"))
    assert session[Note].all() == ()
    assert session[LoudNote].all() == (LoudNote("A"),)


# --- reducers -------------------------------------------------------------------------------------------


def test_several_reducers_listen_to_one_event_each_for_its_slice(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch(Add(2))
    result = session.dispatch(Add(3))
    assert session[Total].all() == (Total(5),)
    assert session[Seen].all() == (Seen(2), Seen(3))
    assert session[Last].all() == (Last(3),)
    assert session[Tally].all() == (Tally(count=2),)
    assert session[Add].all() == (), "an event with reducers is in no ledger"
    assert result.handled_count == 4


def test_a_reducer_sees_what_earlier_reducers_made_of_the_same_event() -> None:
    seen: list[int] = []

    def look(slice_: Sequence[Seen], event: Add, *, context: Any) -> Append[Seen]:
        seen.append(context.session[Total].latest().value)
        return Append(Seen(event.number))

    session = equip(Session())
    session[Seen].register(Add, look)
    session.dispatch(Add(2))
    session.dispatch(Add(3))
    assert seen == [2, 5]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Append(Note("x")), ("a", "b", "x")),
        (Extend([Note("x"), Note("y")]), ("a", "b", "x", "y")),
        (Replace([Note("x")]), ("x",)),
        (Clear(), ()),
        (Clear(lambda note: note.text == "a"), ("b",)),
        ((Note("x"),), ("x",)),
        ([Note("x")], ("x",)),
    ],
    ids=["append", "extend", "replace", "clear", "clear-some", "tuple", "list"],
)
def test_a_reducer_returns_an_operation_or_the_new_items(
    log: Log, outcome: object, expected: tuple[str, ...]
) -> None:
    session = Session(log=log)
    session[Note].seed([Note("a"), Note("b")])
    session[Note].register(Add, lambda slice_, event, context: outcome)
    assert session.dispatch(Add(1)).ok
    assert tuple(note.text for note in session[Note].all()) == expected


def test_a_reducer_that_returns_its_slice_changes_nothing() -> None:
    session = Session()
    session[Note].seed(Note("a"))
    session[Note].register(Add, lambda slice_, event: slice_)
    told: list[object] = []
    session.observe(Note, lambda old, new: told.append(new))
    session.dispatch(Add(1))
    assert session[Note].all() == (Note("a"),)
    assert told == []


@dataclass(frozen=True)
class Pair:
    key: str
    value: int


def test_the_built_in_reducers() -> None:
    def after(reduce: Any) -> list[tuple[str, int]]:
        session = Session()
        session[Pair].register(Pair, reduce)
        for key, value in (("a", 1), ("b", 2), ("a", 3)):
            session.dispatch(Pair(key, value))
        return [(pair.key, pair.value) for pair in session[Pair].all()]

    assert after(append_all) == [("a", 1), ("b", 2), ("a", 3)]
    assert after(replace_latest) == [("a", 3)]
    assert after(upsert_by(lambda pair: pair.key)) == [("a", 3), ("b", 2)]
    assert after(replace_latest_by(lambda pair: pair.key)) == [("b", 2), ("a", 3)]


def test_a_reducer_registered_late_folds_the_whole_log(log: Log) -> None:
    session = Session(log=log)
    session.dispatch_all([Add(1), Add(2)])
    assert session[Add].all() == (Add(1), Add(2))
    equip(session)
    assert session[Total].all() == (Total(3),)
    assert session[Add].all() == ()


def test_registering_the_same_reducer_twice_is_registering_it_once() -> None:
    session = equip(equip(Session()))
    session.dispatch(Add(1))
    assert session[Total].all() == (Total(1),)


def test_a_raising_reducer_is_reported_and_the_others_still_run(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(slice_: Sequence[Note], event: Add, *, context: Any) -> Append[Note]:
        raise RuntimeError("no")

    session = Session(log=log)
    session[Note].register(Add, fail)
    equip(session)
    result = session.dispatch(Add(2))
    assert session[Total].all() == (Total(2),)
    assert session[Note].all() == ()
    assert [str(failure.error) for failure in result.errors] == ["no"]
    assert result.handled_count == 4
    assert not result.ok
    assert "fail" in caplog.text
    with pytest.raises(ExceptionGroup) as caught:
        result.raise_if_errors()
    assert caught.value.subgroup(RuntimeError) is not None
    assert session.head == 1, "the event stands"


@pytest.mark.parametrize("nonsense", [None, 3, "text", Said("x"), Append(Said("x")), (Said("x"),)])
def test_a_reducer_that_returns_nonsense_is_reported_and_changes_nothing(nonsense: object) -> None:
    session = Session()
    session[Note].seed(Note("a"))
    session[Note].register(Add, lambda slice_, event: nonsense)
    result = session.dispatch(Add(1))
    assert [type(failure.error) for failure in result.errors] == [TypeError]
    assert session[Note].all() == (Note("a"),)


def test_a_reducer_cannot_use_its_session(log: Log) -> None:
    """Neither to change it, nor to read past its context: on a fold of the log there is nothing to read."""
    session = Session(log=log)
    tried: list[str] = []

    def meddle(slice_: Sequence[Total], event: Add, *, context: Any) -> Append[Total]:
        for attempt in (
            lambda: session.dispatch(Note("x")),
            lambda: session[Note].seed(Note("x")),
            lambda: session.begin(),
            lambda: session[Note].all(),
            lambda: session.snapshot(),
            lambda: session[Note].register(Add, append_all),
            lambda: session.close(),
        ):
            with pytest.raises(UsageError, match="reducer"):
                attempt()
            tried.append("refused")
        return Append(Total(event.number))

    session[Total].register(Add, meddle)
    assert session.dispatch(Add(1)).ok
    assert len(tried) == 7
    assert session.head == 1
    assert session[Total].all() == (Total(1),)
    assert session[Note].all() == ()


# --- declarative slices ---------------------------------------------------------------------------------


def test_install_with_initial_starts_from_it_and_without_it_waits_for_a_value(log: Log) -> None:
    session = Session(log=log)
    session.install(Tally)
    session.dispatch(Add(1))
    assert session[Tally].all() == (), "an event does nothing to an empty slice without an initial value"
    session[Tally].seed(Tally(count=10))
    session.dispatch(Add(1))
    assert session[Tally].all() == (Tally(count=11),)

    other = Session(log=log)
    other.install(Tally, initial=lambda: Tally(count=100))
    other.dispatch(Add(1))
    other.dispatch(Box([1, 2]))
    assert other[Tally].all() == (Tally(count=101, boxes=2),)


def test_two_methods_for_one_event_are_refused() -> None:
    @dataclass(frozen=True)
    class Torn:
        @reducer(on=Add)
        def one(self, event: Add) -> Torn:
            return self

        @reducer(on=Add)
        def two(self, event: Add) -> Torn:
            return self

    session = Session()
    with pytest.raises(UsageError, match="two reducers for Add: one and two"):
        session.install(Torn)
    with pytest.raises(UsageError, match="no method marked"):
        session.install(Note)


# --- observers and subscribers --------------------------------------------------------------------------


def test_an_observer_is_told_old_and_new_after_each_change_until_it_stops(log: Log) -> None:
    session = Session(log=log)
    told: list[tuple[tuple[Note, ...], tuple[Note, ...]]] = []
    stop = session.observe(Note, lambda old, new: told.append((tuple(old), tuple(new))))
    session.dispatch(Note("a"))
    session.dispatch(Said("not a note"))
    session[Note].clear()
    stop()
    stop()
    session.dispatch(Note("b"))
    assert told == [((), (Note("a"),)), ((Note("a"),), ())]


def test_an_observer_sees_a_batch_as_one_change() -> None:
    session = Session()
    told: list[int] = []
    session.observe(Note, lambda old, new: told.append(len(new) - len(old)))
    session.dispatch_all([Note("a"), Note("b"), Said("c"), Note("d")])
    assert told == [3]


def test_raising_observers_and_subscribers_are_reported_and_harm_nobody(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    bus = InProcessDispatcher()
    session = Session(bus, log=log)
    heard: list[object] = []

    def fail(*arguments: object) -> None:
        raise RuntimeError("deaf")

    session.observe(Note, fail)
    session.observe(Note, lambda old, new: heard.append(tuple(new)))
    bus.subscribe(Note, fail)
    bus.subscribe(Note, heard.append)
    result = session.dispatch(Note("a"))
    assert heard == [(Note("a"),), Note("a")]
    assert session[Note].all() == (Note("a"),)
    assert len(result.errors) == 2
    assert result.handled_count == 2
    assert "deaf" in caplog.text


def test_a_dispatcher_that_breaks_does_not_undo_the_event(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(InProcessDispatcher):
        def dispatch(self, event: object) -> Any:
            raise RuntimeError("out of order")

    session = Session(bus=Broken())
    result = session.dispatch(Note("a"))
    assert session[Note].all() == (Note("a"),)
    assert [str(failure.error) for failure in result.errors] == ["out of order"]
    assert "out of order" in caplog.text


def test_subscribers_are_called_in_order_for_exactly_their_type() -> None:
    @dataclass(frozen=True)
    class LoudNote(Note):
        pass

    bus = InProcessEventBus()
    heard: list[str] = []

    def one(note: Note) -> None:
        heard.append("one")

    def two(note: Note) -> None:
        heard.append("two")

    bus.subscribe(Note, one)
    bus.subscribe(Note, two)
    session = Session(bus=bus)
    session.dispatch(LoudNote("A"))
    assert heard == []
    session.dispatch(Note("a"))
    assert heard == ["one", "two"]
    assert bus.unsubscribe(Note, one) is True
    assert bus.unsubscribe(Note, one) is False
    bus.publish(Note("b"))
    assert heard == ["one", "two", "two"]


def test_an_observer_may_dispatch() -> None:
    session = Session()
    session.observe(Note, lambda old, new: session.dispatch(Said(new[-1].text)))
    session.dispatch(Note("a"))
    assert session[Said].all() == (Said("a"),)


def test_a_live_event_is_published_and_never_logged(log: Log) -> None:
    """It need not even be storable."""

    @event(channel=Channel.LIVE)
    @dataclass(frozen=True)
    class Delta:
        chunk: object

    bus = InProcessDispatcher()
    heard: list[object] = []
    bus.subscribe(Delta, heard.append)
    session = Session(bus, log=log)
    delta = Delta(threading.Lock())
    assert session.dispatch(delta).ok
    with session.transaction() as inside:
        inside.dispatch_all([Note("a"), delta])
    assert heard == [delta, delta]
    assert session[Delta].all() == ()
    assert session.head == 1


# --- every spelling -------------------------------------------------------------------------------------


def test_all_three_generations_of_spellings_do_the_same(log: Log) -> None:
    told: list[int] = []
    session = Session(bus=InProcessEventBus(), log=log)
    session.mutate(Total).register(Add, lambda slice_, event, *, context: Replace((Total(event.number),)))
    session.observe(Total, lambda old, new: told.append(len(new)))
    session.broadcast(Add(1))
    session.mutate().dispatch(Add(2))
    session.mutate(Total).dispatch(Add(3))
    session[Total].dispatch(Add(4))
    session.mutate(Note).append(Note("a"))
    session.mutate(Note).seed([Note("b"), Note("c")])
    session.mutate(Note).clear(lambda note: note.text == "b")
    assert session.select_all(Total) == session[Total].all() == session.query(Total).all() == (Total(4),)
    assert session.select_all(Note) == (Note("c"),)
    snapshot = session.snapshot()
    for go_back in (session.rollback, session.restore, session.mutate().rollback):
        session.dispatch(Add(9))
        go_back(snapshot)
        assert session.select_all(Total) == (Total(4),)
    session.mutate().reset()
    assert session.select_all(Total) == session.select_all(Note) == ()
    assert told[:4] == [1, 1, 1, 1]


def test_bus_and_dispatcher_are_two_names_of_one_thing() -> None:
    bus = InProcessDispatcher()
    assert Session(bus).dispatcher is bus
    assert Session(bus=bus).dispatcher is bus
    assert Session(dispatcher=bus).dispatcher is bus
    with pytest.raises(UsageError, match="one thing"):
        Session(bus=bus, dispatcher=bus)
    log = MemoryLog(heartbeat=False)
    with Session(log=log) as session:
        session_id = session.session_id
    with pytest.raises(UsageError, match="one thing"):
        Session.open(log, session_id, bus=bus, dispatcher=bus)


# --- policies -------------------------------------------------------------------------------------------


def test_default_policies() -> None:
    """Custom slices are working state; a type may say otherwise of itself, and a session of its slice."""
    session = Session()
    assert session.policy_of(Note) is SlicePolicy.STATE
    assert session.policy_of(Said) is SlicePolicy.LOG
    assert session.policy_of(Peeked) is SlicePolicy.CACHE
    assert session.policy_of(AttentionNeeded) is SlicePolicy.LOG
    session[Note].register(Note, append_all, policy=SlicePolicy.CACHE)
    session[Said].register(Said, append_all)
    assert session.policy_of(Note) is SlicePolicy.CACHE
    assert session.policy_of(Said) is SlicePolicy.LOG
    assert spec_of(Note).channel is Channel.AUDIT


# --- values that are refused ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    run: object = None


@dataclass(frozen=True)
class Job:
    steps: tuple[Step, ...] = ()
    options: dict[str, Step] = field(default_factory=dict)


REFUSED = [
    (Job(steps=(Step(), Step(run=threading.Lock()))), "Job.steps[1].run"),
    (Job(options={"a": Step(run=lambda: None)}), "Job.options['a'].run"),
    (Job(steps=(Step(run=[1, {"deep": (object(),)}]),)), "Job.steps[0].run[1]['deep'][0]"),
]


@pytest.mark.parametrize(("job", "path"), REFUSED, ids=[path for _, path in REFUSED])
def test_a_value_that_cannot_be_stored_is_refused_with_its_path_and_changes_nothing(
    job: Job, path: str
) -> None:
    log = CountingLog()
    bus = InProcessDispatcher()
    session = Session(bus, log=log)
    session[Job].seed([])
    session.dispatch(Note("a"))
    heard: list[object] = []
    bus.subscribe(Job, heard.append)
    session.observe(Job, lambda old, new: heard.append(new))
    before = (session.head, list(log.batches), session.snapshot(include_all=True).slices)
    for attempt in (
        lambda: session.dispatch(job),
        lambda: session.dispatch_all([Note("b"), job]),
        lambda: session[Job].seed([Job(), job]),
        lambda: session[Job].append(job),
    ):
        with pytest.raises(EncodeError) as caught:
            attempt()
        assert caught.value.path == path
        assert (session.head, log.batches, session.snapshot(include_all=True).slices) == before
    assert heard == []


def test_a_value_made_by_a_reducer_is_refused_alike() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    heard: list[object] = []
    session.observe(Total, lambda old, new: heard.append(new))
    session[Job].register(Add, lambda slice_, event: Append(Job(steps=(Step(run=threading.Lock()),))))
    with pytest.raises(EncodeError, match="made by the reducer") as caught:
        session.dispatch(Add(1))
    assert caught.value.path == "Job.steps[0].run"
    transaction = session.begin()
    with pytest.raises(EncodeError):
        transaction.session.dispatch_all([Note("a"), Said("b"), Add(1)])
    assert transaction.staged == ()
    assert transaction.session[Note].all() == ()
    assert log.batches == []
    assert heard == []
    assert session[Total].all() == session[Said].all() == ()


def test_what_is_not_a_record_is_refused() -> None:
    session = Session()
    for value in ("text", 3, ["list"], object(), Note):
        with pytest.raises(EncodeError):
            session.dispatch(value)
    assert session.head == 0


# --- values that can change in place --------------------------------------------------------------------


def test_what_the_caller_does_to_its_object_later_does_not_reach_the_session(log: Log) -> None:
    session = Session(log=log)
    box, page = Box([1]), Page(title="a", lines=["x"])
    session.dispatch(box)
    session.dispatch(page)
    session[Box].seed([box, box])
    box.things.append(2)
    page.lines.clear()
    page.title = "b"
    assert session[Box].all() == (Box([1]), Box([1]))
    assert session[Page].all() == (Page(title="a", lines=["x"]),)


def test_what_a_reducer_does_to_its_event_stays_with_that_reducer(log: Log) -> None:
    @dataclass
    class Crate:
        things: list[int]

    kept: list[Box] = []

    def meddle(slice_: Sequence[Box], event: Box, *, context: Any) -> Append[Box]:
        event.things.append(99)
        kept.append(event)
        return Append(event)

    def honest(slice_: Sequence[Crate], event: Box, *, context: Any) -> Append[Crate]:
        return Append(Crate(event.things))

    session = Session(log=log)
    session[Box].register(Box, meddle)
    session[Crate].register(Box, honest)
    session.dispatch(Box([1]))
    kept[0].things.append(100)
    assert session[Box].all() == (Box([1, 99]),)
    assert session[Crate].all() == (Crate([1]),)
    session.close()
    again = Session.open(log, session.session_id)
    again[Box].register(Box, meddle)
    again[Crate].register(Box, honest)
    assert again[Box].all() == (Box([1, 99]),)
    assert again[Crate].all() == (Crate([1]),)


# --- identity, parents, children, clones, forks ---------------------------------------------------------


def test_a_session_knows_its_id_its_time_and_its_tags(log: Log) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    session_id = uuid4()
    session = Session(log=log, session_id=session_id, created_at=moment, tags={"team": "a"})
    assert session.session_id == session_id
    assert session.created_at == moment
    assert session.tags == {"team": "a", "session_id": str(session_id)}
    with pytest.raises(UsageError, match="time zone"):
        Session(created_at=datetime(2026, 1, 1))  # that is the mistake
    assert Session(clock=FixedClock(moment)).created_at == moment
    assert isinstance(Session().session_id, UUID)


def test_a_child_is_linked_to_its_parent_and_has_slices_of_its_own(log: Log) -> None:
    parent = Session(log=log)
    child = Session(parent=parent, log=log)
    grandchild = Session(parent=child, log=log)
    other = Session(parent=parent, log=log)
    child.dispatch(Note("child"))
    assert parent[Note].all() == ()
    assert parent.children == (child, other)
    assert child.parent is parent
    assert child.parent_id == parent.session_id
    assert child.tags["parent_session_id"] == str(parent.session_id)
    assert list(iter_sessions_bottom_up(parent)) == [grandchild, child, other, parent]
    assert [info.session_id for info in log.sessions(parent_id=parent.session_id)] == [
        child.session_id,
        other.session_id,
    ]


def test_a_child_may_be_made_under_a_view_and_then_sees_only_the_view(log: Log) -> None:
    parent = Session(log=log)
    parent.dispatch(Note("a"))
    child = Session(parent=parent.read_only_view(), log=log)
    assert parent.children == (child,)
    assert child.parent_id == parent.session_id
    assert isinstance(child.parent, SessionView)
    assert child.parent[Note].all() == (Note("a"),)


def test_a_clone_has_the_same_state_reducers_and_policies_and_goes_its_own_way(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch_all([Add(1), Note("a"), Said("b"), Peeked(3), Box([1])])
    twin = session.clone(log=log)
    assert twin.session_id != session.session_id
    assert twin.snapshot(include_all=True).slices == session.snapshot(include_all=True).slices
    assert twin.policy_of(Seen) is SlicePolicy.LOG
    twin.dispatch(Add(10))
    assert twin[Total].all() == (Total(11),)
    assert session[Total].all() == (Total(1),)
    twin.close()
    assert equip(Session.open(log, twin.session_id))[Total].all() == (Total(11),)


def test_a_fork_continues_from_any_event_and_leaves_the_original_alone(log: Log) -> None:
    session = equip(Session(log=log))
    for number in range(1, 5):
        session.dispatch(Add(number))
    twin = session.fork(at=2)
    assert twin[Total].all() == (Total(3),)
    assert twin.tags["forked_from"] == str(session.session_id)
    assert twin.tags["forked_at"] == "2"
    twin.dispatch(Add(100))
    assert twin[Total].all() == (Total(103),)
    assert session[Total].all() == (Total(10),)
    assert session.fork()[Total].all() == (Total(10),)
    for at in (-1, 5):
        with pytest.raises(UsageError, match=f"no event {at}"):
            session.fork(at=at)


def test_a_fork_that_fails_leaves_no_half_session_behind() -> None:
    log = CountingLog()
    session = Session(log=log)
    session.dispatch(Note("a"))
    log.refusal = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        session.fork()
    assert [info.session_id for info in log.sessions()] == [session.session_id]


def test_events_can_be_read_with_their_values_and_stamps(log: Log) -> None:
    session = Session(log=log)
    with stamped(turn_id="t", run_id="r"):
        session.dispatch(Note("a"))
        with stamped(trace_id="x", run_id="r2"):
            session.dispatch(Note("b"))
    session.dispatch(Note("c"))
    found = [(each.seq, value, each.turn_id, each.run_id, each.trace_id) for each, value in session.events()]
    assert found == [
        (1, Note("a"), "t", "r", None),
        (2, Note("b"), "t", "r2", "x"),
        (3, Note("c"), None, None, None),
    ]
    assert [value for _, value in session.events(after=1, upto=2)] == [Note("b")]


def test_what_was_just_written_is_at_hand(log: Log) -> None:
    """A follower of the log gets the newest events without reading them, or is told to read."""
    session = Session(log=log)
    session.dispatch_all([Note("a"), Box([1])])
    written = session.just_written(after=0)
    assert written is not None
    assert [(seq, draft.type, value) for seq, draft, value in written] == [
        (1, "state_kit:Note", Note("a")),
        (2, "state_kit:Box", None),  # It could change in place: whoever wants it decodes it.
    ]
    assert [seq for seq, _, _ in session.just_written(after=1) or ()] == [2]
    assert session.just_written(after=2) == session.just_written(after=9) == []
    session.dispatch_all([Note("b")] * 100)
    assert session.just_written(after=0) is None
    session.close()
    assert session.just_written(after=100) is None


def test_a_closed_session_can_be_read_and_not_changed(log: Log) -> None:
    with Session(log=log) as session:
        session.dispatch(Note("a"))
    session.close()
    assert session[Note].all() == (Note("a"),)
    with pytest.raises(UsageError, match="is closed"):
        session.dispatch(Note("b"))


# --- threads --------------------------------------------------------------------------------------------


def in_threads(count: int, work: Any) -> None:
    failures: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            gate.wait()
            work(index)
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_four_threads_with_fifty_increments_each_make_two_hundred(log: Log) -> None:
    session = equip(Session(log=log))
    in_threads(4, lambda index: [session.dispatch(Add(1)) for _ in range(50)])
    assert session[Total].all() == (Total(200),)
    assert len(session[Seen]) == 200
    session.close()
    assert equip(Session.open(log, session.session_id))[Total].all() == (Total(200),)


def test_transactions_in_parallel_threads_lose_nothing(log: Log) -> None:
    session = equip(Session(log=log))

    def work(index: int) -> None:
        for turn in range(10):
            begun = session.begin()
            with begun.active():
                session.dispatch(Add(1))
                session.dispatch(Add(1))
            if turn % 2:
                begun.commit(Said("kept"))
            else:
                begun.rollback(Said("dropped"))

    in_threads(4, work)
    assert session[Total].all() == (Total(40),)
    assert len(session[Said]) == 40
    assert len(session[Seen]) == 80, "history is kept of rolled back calls too"


def test_a_reader_never_sees_half_of_a_batch() -> None:
    session = equip(Session())
    stop = threading.Event()
    seen: set[int] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(len(session[Note]) % 2)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        session.dispatch_all([Note("a"), Note("b")])
    stop.set()
    reader.join()
    assert seen == {0}


def test_replaced_fields_make_new_items() -> None:
    session = Session()
    session[Tally].seed(Tally(1))
    session[Tally].register(Add, lambda slice_, event: Replace(replace(each, count=5) for each in slice_))
    session.dispatch(Add(1))
    assert session[Tally].all() == (Tally(5),)

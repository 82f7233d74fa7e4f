"""Snapshots: what they capture, what going back to one does, and their JSON form."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_kit import Add, Box, CountingLog, Last, Note, Page, Peeked, Said, Seen, Tally, Total, equip

from treenail.clock import FixedClock
from treenail.codec import Codec, TypeRegistry, type_registry
from treenail.errors import SnapshotMismatchError, SnapshotRestoreError, TreenailError
from treenail.log import Log, MemoryLog, SlicePolicy
from treenail.state import (
    Budget,
    BudgetSnapshot,
    BudgetTracker,
    CompositeSnapshot,
    ExecutionState,
    ResourceRegistry,
    Session,
    SessionSnapshotAdapter,
    Snapshot,
    SnapshotMetadata,
    TokenUsage,
    append_all,
    event,
    replace_latest,
)

STATE, LOG, CACHE = SlicePolicy.STATE, SlicePolicy.LOG, SlicePolicy.CACHE


@event(name="test.Message", policy=SlicePolicy.LOG, captured=True)
@dataclass(frozen=True)
class Message:
    """History that every snapshot captures, so that a conversation can be taken over."""

    text: str


def filled(log: Log | None = None) -> Session:
    session = equip(Session(log=log))
    session.dispatch_all([Note("a"), Said("a"), Peeked(1), Add(1)])
    return session


# --- what is captured -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "captured"),
    [
        ({}, {Note, Total, Tally}),
        ({"policies": frozenset({LOG})}, {Said, Seen}),
        ({"policies": frozenset({CACHE, STATE})}, {Note, Total, Tally, Peeked, Last}),
        ({"include_all": True}, {Note, Total, Tally, Peeked, Last, Said, Seen}),
    ],
)
def test_a_snapshot_captures_the_policies_that_were_asked_for(
    log: Log, arguments: dict[str, Any], captured: set[type]
) -> None:
    snapshot = filled(log).snapshot(**arguments)
    assert set(snapshot.slices) == captured
    assert snapshot.policies[Said] is LOG
    assert snapshot.policies[Box] is STATE, "also of slices that are empty"


def test_a_slice_that_is_declared_so_is_in_every_snapshot() -> None:
    session = Session()
    session.dispatch(Message("hello"))
    assert session.snapshot().slices[Message] == (Message("hello"),)


def test_a_snapshot_knows_where_it_comes_from() -> None:
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    parent = Session()
    session = Session(parent=parent, clock=FixedClock(moment), tags={"team": "a"})
    child = Session(parent=session)
    session.dispatch(Note("a"))
    snapshot = session.snapshot(tag="before lunch")
    assert snapshot.created_at == moment
    assert snapshot.parent_id == parent.session_id
    assert snapshot.children_ids == (child.session_id,)
    assert snapshot.tags["team"] == "a"
    assert snapshot.tags["snapshot_tag"] == "before lunch"
    assert snapshot.session_id == session.session_id
    assert snapshot.seq == 1


def test_a_snapshot_does_not_change_when_the_session_does() -> None:
    session = filled()
    session.dispatch(Box([1]))
    snapshot = session.snapshot()
    session.dispatch(Note("b"))
    session.dispatch(Box([2]))
    snapshot.slices[Box][0].things.append(99)
    assert snapshot.slices[Note] == (Note("a"),)
    assert snapshot.slices[Box] == (Box([1]),)


# --- going back -----------------------------------------------------------------------------------------


def test_a_rollback_restores_state_and_leaves_history_and_uncaptured_caches_alone(log: Log) -> None:
    session = filled(log)
    snapshot = session.snapshot()
    session.dispatch_all([Note("b"), Said("b"), Peeked(2), Add(2), Box([1])])
    session.rollback(snapshot)
    assert session[Note].all() == (Note("a"),)
    assert session[Total].all() == (Total(1),)
    assert session[Box].all() == ()
    assert session[Said].all() == (Said("a"), Said("b"))
    assert session[Seen].all() == (Seen(1), Seen(2))
    assert session[Peeked].all() == (Peeked(1), Peeked(2))
    assert session[Last].all() == (Last(2),)


def test_a_captured_cache_is_restored_and_drop_caches_empties_caches_only(log: Log) -> None:
    session = filled(log)
    snapshot = session.snapshot(policies=frozenset({STATE, CACHE}))
    session.dispatch_all([Peeked(2), Add(2)])
    session.rollback(snapshot)
    assert session[Peeked].all() == (Peeked(1),)
    assert session[Last].all() == (Last(1),)
    session.drop_caches()
    assert session[Peeked].all() == session[Last].all() == ()
    assert session[Note].all() == (Note("a"),)
    assert session[Said].all() == (Said("a"),)


def test_only_a_full_rollback_on_request_touches_history(log: Log) -> None:
    session = filled(log)
    full = session.snapshot(include_all=True)
    session.dispatch_all([Said("b"), Add(2)])
    session.rollback(full)
    assert session[Said].all() == (Said("a"), Said("b"))
    session.rollback(full, preserve_logs=False)
    assert session[Said].all() == (Said("a"),)
    assert session[Seen].all() == (Seen(1),)
    working = session.snapshot()
    session.dispatch(Said("c"))
    session.rollback(working, preserve_logs=False)
    assert session[Said].all() == (Said("a"), Said("c")), "what was not captured cannot be gone back to"


def test_a_slice_registered_after_the_snapshot_goes_back_to_its_initial_value(log: Log) -> None:
    session = Session(log=log)
    snapshot = session.snapshot()
    equip(session)
    session.dispatch_all([Add(1), Note("b")])
    session.rollback(snapshot)
    assert session[Total].all() == session[Tally].all() == session[Note].all() == ()
    session.dispatch(Add(1))
    assert session[Tally].all() == (Tally(count=1),), "its next event finds the initial value again"


def test_a_snapshot_with_a_slice_that_is_not_known_here_changes_nothing(log: Log) -> None:
    snapshot = filled().snapshot()
    session = Session(log=log)
    session.dispatch(Note("mine"))
    with pytest.raises(SnapshotMismatchError, match="Total"):
        session.rollback(snapshot)
    assert session[Note].all() == (Note("mine"),)
    assert session.head == 1
    equip(session).rollback(snapshot)
    assert session[Note].all() == (Note("a"),)
    assert session[Total].all() == (Total(1),)


def test_a_new_session_takes_over_the_conversation_of_a_snapshot(log: Log) -> None:
    first = Session()
    first.dispatch_all([Message("hello"), Message("world")])
    snapshot = Snapshot.from_json(first.snapshot().to_json())
    second = Session(log=log)
    second[Message].register(Message, append_all)
    second.rollback(snapshot)
    assert second[Message].all() == (Message("hello"), Message("world"))
    second.dispatch(Message("again"))
    second.rollback(snapshot)
    assert second[Message].all() == (Message("hello"), Message("world"), Message("again"))
    other = Session()
    other.dispatch(Message("something else"))
    other.rollback(snapshot)
    assert other[Message].all() == (Message("something else"),), "history is extended, never replaced"


def test_going_back_to_where_one_is_logs_nothing() -> None:
    log = CountingLog()
    session = filled(log)
    snapshot = session.snapshot(include_all=True)
    before = list(log.batches)
    session.rollback(snapshot)
    session.rollback(Snapshot.from_json(snapshot.to_json()))
    assert log.batches == before


def test_a_rollback_is_one_event_that_refers_to_what_is_in_the_log(log: Log) -> None:
    """A thousand messages that come back cost no more than one."""
    session = Session(log=log)
    session.dispatch_all([Note("x" * 100)] * 1000)
    snapshot = session.snapshot()
    session[Note].clear()
    session.rollback(snapshot)
    (envelope, _), *rest = session.events(after=1001)
    assert rest == []
    assert len(envelope.payload) < 300
    assert len(session[Note]) == 1000
    session.close()
    assert len(Session.open(log, session.session_id)[Note]) == 1000


def test_one_is_not_true_when_a_snapshot_is_compared() -> None:
    session = Session()
    session[Add].seed(Add(1))
    snapshot = session.snapshot()
    session[Add].seed(Add(True))
    session.rollback(snapshot)
    assert session[Add].all()[0].number is 1  # noqa: F632  # the very point


def test_a_snapshot_from_a_namesake_in_another_log_is_taken_by_value() -> None:
    """Its places in the log mean nothing here."""
    session_id = uuid4()
    first = Session(session_id=session_id)
    first.dispatch_all([Note("a"), Note("b")])
    snapshot = first.snapshot()
    second = Session(session_id=session_id)
    second.dispatch_all([Said("x"), Note("y"), Note("z")])
    second.rollback(snapshot)
    assert second[Note].all() == (Note("a"), Note("b"))


def test_the_adapter_makes_a_session_a_participant() -> None:
    session = filled()
    adapter = SessionSnapshotAdapter(session)
    snapshot = adapter.snapshot(tag="x")
    session.dispatch(Note("b"))
    adapter.restore(snapshot)
    assert session[Note].all() == (Note("a"),)


def test_history_that_was_pruned_does_not_come_back_with_a_snapshot(log: Log) -> None:
    session = Session(log=log)
    session.dispatch_all([Message("secret"), Note("a")])
    live = session.snapshot(include_all=True)
    read = Snapshot.from_json(live.to_json())
    session.prune(upto=2)
    for snapshot in (live, read):
        session[Note].clear()
        session.rollback(snapshot)
        assert session[Message].all() == ()
        assert session[Note].all() == (Note("a"),)
    session.close()
    assert Session.open(log, session.session_id)[Note].all() == (Note("a"),)


# --- JSON -----------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "r"
    BLUE = "b"


T = TypeVar("T")


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Square:
    side: int


@dataclass(frozen=True)
class Tree(Generic[T]):
    value: T
    children: tuple[Tree[T], ...] = ()


@dataclass(frozen=True)
class Everything:
    shape: Circle | Square
    colour: Colour
    id: UUID
    moment: datetime
    day: date
    span: timedelta
    price: Decimal
    path: Path
    data: bytes
    by_place: dict[tuple[int, str], Circle | Square]
    tree: Tree[Colour]
    page: Page
    loose: object = None


everything = st.builds(
    Everything,
    shape=st.builds(Circle, st.floats(allow_nan=False)) | st.builds(Square, st.integers()),
    colour=st.sampled_from(Colour),
    id=st.uuids(),
    moment=st.datetimes(timezones=st.just(UTC)),
    day=st.dates(),
    span=st.timedeltas(),
    price=st.decimals(allow_nan=False, allow_infinity=False),
    path=st.text("abc", min_size=1).map(Path),
    data=st.binary(),
    by_place=st.dictionaries(
        st.tuples(st.integers(), st.text()), st.builds(Square, st.integers()), max_size=3
    ),
    tree=st.builds(lambda colour: Tree(colour, (Tree(colour),)), st.sampled_from(Colour)),
    page=st.builds(Page, title=st.text(), lines=st.lists(st.text(), max_size=2)),
    loose=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.binary()
        | st.builds(Square, st.integers()),
        lambda inner: (
            st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=2)
        ),
        max_leaves=4,
    ),
)


@given(items=st.lists(everything, max_size=3), note=st.text())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_json_round_trip_is_the_identity(items: list[Everything], note: str) -> None:
    session = Session(tags={"length": str(len(note))})
    for item in items:
        session.dispatch(item)
    session.dispatch(Note(note))
    snapshot = session.snapshot()
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert Snapshot.from_json(snapshot.to_json().encode()) == snapshot
    twin = Session()
    twin[Everything], twin[Note]  # makes the slices known
    twin.rollback(Snapshot.from_json(snapshot.to_json()))
    assert twin.snapshot().slices == snapshot.slices
    assert [repr(item) for item in twin[Everything].all()] == [repr(item) for item in items]


def test_the_json_form_is_versioned_and_names_types_by_their_stable_names() -> None:
    session = filled()
    data = json.loads(session.snapshot(include_all=True).to_json())
    assert data["version"] == "1"
    assert {entry["slice_type"] for entry in data["slices"]} >= {"kit.Said", "state_kit:Note"}
    (said,) = (entry for entry in data["slices"] if entry["slice_type"] == "kit.Said")
    assert said == {"slice_type": "kit.Said", "item_type": "kit.Said", "items": [{"text": "a"}]}
    data["version"] = "2"
    with pytest.raises(SnapshotRestoreError, match=r"version '2'.*reads '1'"):
        Snapshot.from_json(json.dumps(data))


def test_a_slice_with_items_of_several_types_comes_back_as_it_was() -> None:
    @dataclass(frozen=True)
    class LoudNote(Note):
        pass

    session = Session()
    session[Note].seed([Note("a"), LoudNote("A")])
    snapshot = session.snapshot()
    again = Snapshot.from_json(snapshot.to_json())
    assert [type(each) for each in again.slices[Note]] == [Note, LoudNote]


def test_a_stranger_in_a_slice_is_refused() -> None:
    session = Session()
    session.dispatch(Note("a"))
    data = json.loads(session.snapshot().to_json())
    data["slices"][0]["item_type"] = "kit.Said"
    with pytest.raises(SnapshotRestoreError, match=r"slices\[0\]: a Said is not a Note"):
        Snapshot.from_json(json.dumps(data))
    data["slices"].append(json.loads(session.snapshot().to_json())["slices"][0])
    data["slices"][0]["item_type"] = "state_kit:Note"
    with pytest.raises(SnapshotRestoreError, match="twice"):
        Snapshot.from_json(json.dumps(data))


def test_a_session_with_a_registry_of_its_own_has_snapshots_of_its_own() -> None:
    own = Codec(TypeRegistry())
    own.registry.register(Note, name="mine.Note")
    session = Session(codec=own)
    session.dispatch(Note("a"))
    raw = session.snapshot().to_json(codec=own)
    assert "mine.Note" in raw
    assert Snapshot.from_json(raw, codec=own).slices[Note] == (Note("a"),)
    with pytest.raises(SnapshotRestoreError, match=r"mine\.Note"):
        Snapshot.from_json(raw)


# .. hostile text ..


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def composite() -> CompositeSnapshot:
    session = filled()
    session.dispatch_all([Box([1]), Page(title="t")])
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("e", TokenUsage(input_tokens=3, output_tokens=4))
    state = ExecutionState(session=session, resources=ResourceRegistry.build({BudgetTracker: tracker}))
    return state.snapshot(metadata=SnapshotMetadata(tag="t", tool_call_id="c", phase="pre_tool"))


VALID = composite()
VALID_JSON = [VALID.session.to_json(), VALID.to_json()]


def test_a_composite_snapshot_comes_back_as_it_was() -> None:
    again = CompositeSnapshot.from_json(VALID.to_json())
    assert again == VALID
    assert again.metadata == VALID.metadata
    assert isinstance(again.resources[BudgetTracker], BudgetSnapshot)


def loads_or_refuses(raw: str | bytes) -> None:
    for kind in (Snapshot, CompositeSnapshot):
        try:
            loaded = kind.from_json(raw)
        except SnapshotRestoreError:
            continue
        assert kind.from_json(loaded.to_json()) == loaded


@given(data=json_values)
@settings(max_examples=100, deadline=None)
def test_arbitrary_json_loads_or_is_refused(data: object) -> None:
    loads_or_refuses(json.dumps(data))


@given(raw=st.text() | st.binary())
@settings(max_examples=100, deadline=None)
def test_arbitrary_text_and_bytes_are_refused(raw: str | bytes) -> None:
    loads_or_refuses(raw)


def paths_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found.extend(paths_of(value, (*path, key)))
    return found


NAMES = [
    "kit.Said",
    "state_kit:Note",
    "state_kit:Box",
    "treenail.StateRestored",
    "os:system",
    "builtins:eval",
]
mutations = (
    json_values | st.sampled_from(NAMES) | st.sampled_from([{"$": "class", "v": name} for name in NAMES])
)


@given(data=st.data(), which=st.sampled_from(VALID_JSON))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_valid_json_loads_or_is_refused(data: st.DataObject, which: str) -> None:
    document = {"top": json.loads(which)}
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(paths_of(document)[1:]))
        place: Any = document
        try:
            for key in way:
                place = place[key]
            if data.draw(st.booleans()) and isinstance(place, dict):
                del place[last]
            else:
                place[last] = copy.deepcopy(data.draw(mutations))  # A later one may go inside it.
        except (KeyError, IndexError, TypeError):
            continue  # An earlier mutation took this place away.
        if "top" not in document:
            document["top"] = None
    loads_or_refuses(json.dumps(document["top"]))


@given(position=st.integers(0, 10**9), new=st.binary(max_size=3), which=st.sampled_from(VALID_JSON))
@settings(max_examples=150, deadline=None)
def test_valid_json_with_damaged_bytes_loads_or_is_refused(position: int, new: bytes, which: str) -> None:
    raw = which.encode()
    at = position % len(raw)
    loads_or_refuses(raw[:at] + new + raw[at + 1 :])


@pytest.mark.parametrize("depth", [500, 990, 5_000, 100_000])
def test_json_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for raw in (
        deep,
        '{"version":' + deep + "}",
        json.dumps(json.loads(VALID_JSON[0])).replace('"a"', deep, 1),
    ):
        for kind in (Snapshot, CompositeSnapshot):
            with pytest.raises(SnapshotRestoreError):
                kind.from_json(raw)


HOSTILE = """
import json, sys
from dataclasses import dataclass
from treenail.state import Session, Snapshot, CompositeSnapshot
from treenail.errors import SnapshotRestoreError

touched = []

@dataclass(frozen=True)
class Trap:
    text: str = ""
    def __post_init__(self):
        touched.append("post_init")
    def __setstate__(self, state):
        touched.append("setstate")

session = Session()
session.dispatch(Trap("x"))
touched.clear()
data = json.loads(session.snapshot().to_json())
Snapshot.from_json(json.dumps(data))
before = set(sys.modules)
for name in ("antigravity:x", "this:s", "os:system", "builtins:exec", "__main__:touched", "smtpd:SMTPServer"):
    for key in ("slice_type", "item_type"):
        changed = json.loads(json.dumps(data))
        changed["slices"][0][key] = name
        for reader in (Snapshot, CompositeSnapshot):
            try:
                reader.from_json(json.dumps(changed))
            except SnapshotRestoreError:
                continue
            touched.append(name)
    changed = json.loads(json.dumps(data))
    changed["slices"][0]["items"][0]["text"] = {"$": "obj", "t": name, "v": {}}
    try:
        Snapshot.from_json(json.dumps(changed))
    except SnapshotRestoreError:
        continue
    touched.append(name)
print(json.dumps([touched, sorted(set(sys.modules) - before)]))
"""


def test_loading_never_imports_or_runs_anything() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]


def test_equality_is_of_state_not_of_place() -> None:
    one, two = filled(), filled(MemoryLog(heartbeat=False))
    assert one.snapshot().slices == two.snapshot().slices
    two.dispatch(Note("b"))
    assert one.snapshot().slices != two.snapshot().slices


def test_the_errors_have_one_root() -> None:
    assert issubclass(SnapshotRestoreError, TreenailError)
    assert issubclass(SnapshotMismatchError, RuntimeError)
    assert type_registry.knows("kit.Said")


def test_snapshots_can_be_taken_while_others_write() -> None:
    session = equip(Session())
    session[Note].register(Note, replace_latest)
    stop = threading.Event()
    odd: list[object] = []

    def watch() -> None:
        while not stop.is_set():
            slices = session.snapshot(include_all=True).slices
            total, seen = slices.get(Total, (Total(0),)), slices.get(Seen, ())
            if total[0].value != len(seen):
                odd.append((total, len(seen)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(300):
        session.dispatch(Add(1))
    stop.set()
    watcher.join()
    assert odd == []

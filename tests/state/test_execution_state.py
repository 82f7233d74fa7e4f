"""ExecutionState: one root, one snapshot, and a restore that happens whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from state_kit import Add, CountingLog, Note, Said, Seen, Total, equip

from treenail.clock import FixedClock, SystemClock
from treenail.errors import ExecutionStateError, RestoreFailedError, SnapshotMismatchError, UsageError
from treenail.log import Log
from treenail.state import (
    AttentionNeeded,
    Budget,
    BudgetTracker,
    CheckpointStore,
    CompositeSnapshot,
    ExecutionState,
    ResourceRegistry,
    Session,
    SnapshotMetadata,
    TokenUsage,
    rollback_to_tool,
    snapshots_equivalent,
)
from treenail.workspace import Filesystem, InMemoryFilesystem


@dataclass(frozen=True)
class DialSnapshot:
    value: int


@dataclass
class Dial:
    """A participant that can be told to misbehave."""

    value: int = 0
    calls: list[str] = field(default_factory=list)
    refuses: int = 0
    """How many restores it refuses."""
    breaks: bool = False
    """Whether a refused restore leaves it changed."""
    interrupts: BaseException | None = None
    cannot_capture: bool = False

    def snapshot(self, *, tag: str | None = None) -> DialSnapshot:
        if self.cannot_capture:
            raise RuntimeError("no picture")
        self.calls.append("snapshot")
        return DialSnapshot(self.value)

    def restore(self, snapshot: DialSnapshot) -> None:
        self.calls.append(f"restore {snapshot.value}")
        if self.interrupts is not None:
            error, self.interrupts = self.interrupts, None
            raise error
        if self.refuses:
            self.refuses -= 1
            if self.breaks:
                self.value = -1
            raise OSError("stuck")
        self.value = snapshot.value


class Left(Dial):
    pass


class Middle(Dial):
    pass


class Right(Dial):
    pass


def build(log: Log | None = None) -> tuple[ExecutionState, Left, Middle, Right]:
    left, middle, right = Left(1), Middle(1), Right(1)
    resources = ResourceRegistry.build({Left: left, Middle: middle, Right: right})
    session = equip(Session(log=log))
    session.dispatch(Add(1))
    return ExecutionState(session=session, resources=resources), left, middle, right


def change(state: ExecutionState, *dials: Dial) -> None:
    for dial in dials:
        dial.value = 2
    state.session.dispatch_all([Add(1), Said("history")])


# --- capturing ------------------------------------------------------------------------------------------


def test_a_snapshot_takes_a_tag_and_metadata_and_captures_every_participant(log: Log) -> None:
    state, left, _, _ = build(log)
    tagged = state.snapshot(tag="pre:call")
    assert tagged.metadata == SnapshotMetadata(tag="pre:call")
    metadata = SnapshotMetadata(tag="t", tool_call_id="c", tool_name="n", phase="pre_tool")
    both = state.snapshot(tag="pre:call", metadata=metadata)
    assert both.metadata == metadata
    assert both.session.slices[Total] == (Total(1),)
    assert both.resources == dict.fromkeys((Left, Middle, Right), DialSnapshot(1))
    assert both.snapshot_id != tagged.snapshot_id
    taken = state.snapshot(known={Left: DialSnapshot(7)})
    assert taken.resources[Left] == DialSnapshot(7)
    assert left.calls == ["snapshot", "snapshot"], "what the caller has taken is not taken again"


def test_whoever_cannot_be_captured_fails_while_nothing_has_changed() -> None:
    state, left, middle, right = build()
    snapshot = state.snapshot()
    change(state, left, middle, right)
    right.cannot_capture = True
    for attempt in (state.snapshot, lambda: state.restore(snapshot)):
        with pytest.raises(RuntimeError, match="no picture"):
            attempt()
    assert (left.value, middle.value, right.value) == (2, 2, 2)
    assert state.session[Total].all() == (Total(2),)


def test_the_defaults_and_what_is_injected() -> None:
    state = ExecutionState(session=Session())
    assert isinstance(state.clock, SystemClock)
    assert state.rng is None
    assert state.checkpoints is None
    clock = FixedClock(SystemClock().now())
    state = ExecutionState(session=Session(), clock=clock, rng=Random(42))
    assert state.snapshot().created_at == clock.now()
    assert state.rng is not None
    assert state.rng.random() == Random(42).random()


# --- restoring ------------------------------------------------------------------------------------------


def test_a_restore_takes_every_participant_back_and_keeps_history(log: Log) -> None:
    state, left, middle, right = build(log)
    snapshot = state.snapshot()
    change(state, left, middle, right)
    state.restore(snapshot)
    assert (left.value, middle.value, right.value) == (1, 1, 1)
    assert state.session[Total].all() == (Total(1),)
    assert state.session[Said].all() == (Said("history"),)
    assert state.session[Seen].all() == (Seen(1), Seen(1))
    assert snapshots_equivalent(snapshot, state.snapshot())


def test_a_restore_works_from_json_too() -> None:
    state, left, middle, right = build()
    raw = state.snapshot().to_json()
    change(state, left, middle, right)
    state.restore(CompositeSnapshot.from_json(raw))
    assert (left.value, middle.value, right.value) == (1, 1, 1)
    assert state.session[Total].all() == (Total(1),)


def test_what_was_spent_stays_spent_unless_that_is_asked_for() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("one", TokenUsage(input_tokens=1, output_tokens=1))
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({BudgetTracker: tracker}))
    snapshot = state.snapshot()
    tracker.record_cumulative("two", TokenUsage(input_tokens=5, output_tokens=5))
    state.restore(snapshot)
    assert tracker.consumed.total_tokens == 12


def test_the_filesystem_goes_back_with_the_session() -> None:
    filesystem = InMemoryFilesystem()
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({Filesystem: filesystem}))
    filesystem.write("file.txt", "original")
    state.session.dispatch(Note("a"))
    before = state.snapshot()
    filesystem.write("file.txt", "changed")
    filesystem.write("new.txt", "new")
    state.session.dispatch(Note("b"))
    assert not snapshots_equivalent(before, state.snapshot())
    state.restore(before)
    assert filesystem.read("file.txt").content == "original"
    assert not filesystem.exists("new.txt")
    assert state.session[Note].all() == (Note("a"),)
    assert snapshots_equivalent(before, state.snapshot())


def test_a_participant_or_a_slice_that_is_not_here_is_a_mismatch_and_nothing_changes() -> None:
    state, left, middle, right = build()
    snapshot = state.snapshot()
    change(state, left, middle, right)
    elsewhere = ExecutionState(session=state.session, resources=ResourceRegistry.build({Left: left}))
    with pytest.raises(SnapshotMismatchError, match="Middle, Right"):
        elsewhere.restore(snapshot)
    other = ExecutionState(session=Session(), resources=state.resources)
    with pytest.raises(SnapshotMismatchError, match="Total"):
        other.restore(snapshot)
    assert (left.value, middle.value, right.value) == (2, 2, 2)
    assert "restore 1" not in left.calls
    assert state.session[Total].all() == (Total(2),)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("breaks", [False, True], ids=["unchanged", "half changed"])
def test_if_one_cannot_go_back_all_are_returned_to_where_they_were(
    log: Log, which: int, breaks: bool
) -> None:
    state, *dials = build(log)
    snapshot = state.snapshot()
    change(state, *dials)
    dials[which].refuses, dials[which].breaks = 1, breaks
    head = state.session.head
    with pytest.raises(RestoreFailedError, match="stuck") as caught:
        state.restore(snapshot)
    assert caught.value.undone
    assert caught.value.failed == (f"{type(dials[which]).__name__}: stuck",)
    assert isinstance(caught.value, ExecutionStateError)
    assert [dial.value for dial in dials] == [2, 2, 2]
    assert state.session[Total].all() == (Total(2),)
    assert state.session.head == head
    assert state.session[AttentionNeeded].all() == ()
    state.restore(snapshot)
    assert [dial.value for dial in dials] == [1, 1, 1]


def test_one_that_refuses_for_ever_but_did_not_change_is_as_it_was() -> None:
    state, left, middle, right = build()
    snapshot = state.snapshot()
    change(state, left, middle, right)
    middle.refuses = 99
    with pytest.raises(RestoreFailedError) as caught:
        state.restore(snapshot)
    assert caught.value.undone
    assert (left.value, middle.value, right.value) == (2, 2, 2)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_that_is_left_half_done_marks_the_session_and_says_so(log: Log, which: int) -> None:
    state, *dials = build(log)
    snapshot = state.snapshot()
    change(state, *dials)
    dials[which].refuses, dials[which].breaks = 99, True
    name = type(dials[which]).__name__
    with pytest.raises(RestoreFailedError, match="needs attention") as caught:
        state.restore(snapshot)
    assert not caught.value.undone
    assert caught.value.failed == (f"{name}: stuck", f"{name}: stuck")
    assert [dial.value for index, dial in enumerate(dials) if index != which] == [2, 2]
    assert state.session[Total].all() == (Total(2),)
    (mark,) = state.session[AttentionNeeded].all()
    assert name in mark.details[0]
    assert mark.next_actions
    state.session.close()
    assert Session.open(state.session.log, state.session.session_id)[AttentionNeeded].all() == (mark,)


def test_if_the_session_cannot_go_back_the_others_are_returned() -> None:
    log = CountingLog()
    state, left, middle, right = build(log)
    snapshot = state.snapshot()
    change(state, left, middle, right)
    log.refusal = OSError("disk full")
    with pytest.raises(RestoreFailedError, match="the session could not be restored") as caught:
        state.restore(snapshot)
    assert caught.value.undone
    assert (left.value, middle.value, right.value) == (2, 2, 2)
    log.refusal = None
    assert state.session[Total].all() == (Total(2),)


def test_an_interrupt_in_the_middle_returns_all_and_goes_on() -> None:
    state, left, middle, right = build()
    snapshot = state.snapshot()
    change(state, left, middle, right)
    middle.interrupts = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        state.restore(snapshot)
    assert (left.value, middle.value, right.value) == (2, 2, 2)
    assert state.session[Total].all() == (Total(2),)


def test_a_session_that_cannot_even_be_marked_still_gives_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, left, middle, right = build()
    snapshot = state.snapshot()
    change(state, left, middle, right)
    middle.refuses, middle.breaks = 99, True
    state.session.close()
    with pytest.raises(RestoreFailedError) as caught:
        state.restore(snapshot)
    assert not caught.value.undone
    assert "could not be marked" in caplog.text


# --- checkpoints ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    message: str
    success: bool = True


def recorded(count: int, keeping: int) -> tuple[ExecutionState, CheckpointStore]:
    store = CheckpointStore.keeping(keeping)
    state = ExecutionState(session=equip(Session()), checkpoints=store)
    for number in range(count):
        pre = state.snapshot(metadata=SnapshotMetadata(tool_call_id=f"call_{number}", tool_name="add"))
        state.session.dispatch(Add(1))
        store.record(f"call_{number}", pre=pre, post=state.snapshot(), result=Result(f"made {number}"))
    return state, store


def test_a_store_remembers_the_newest_boundaries_and_forgets_a_boundary_whole() -> None:
    state, store = recorded(5, keeping=3)
    assert [each.tool_call_id for each in store.list_checkpoints()] == ["call_2", "call_3", "call_4"]
    for forgotten in ("call_0", "call_1", "never"):
        assert store.get(forgotten) is None
        assert store.get_pre_snapshot(forgotten) is None
        assert store.get_post_snapshot(forgotten) is None
    checkpoint = store.list_checkpoints()[0]
    assert (checkpoint.tool_name, checkpoint.result_summary, checkpoint.success) == ("add", "made 2", True)
    assert checkpoint.pre_snapshot.session.slices[Total] == (Total(2),)
    assert checkpoint.post_snapshot is not None
    assert checkpoint.post_snapshot.session.slices[Total] == (Total(3),)
    assert state.checkpoints is store


def test_recording_a_call_again_replaces_it_and_makes_it_the_newest() -> None:
    state, store = recorded(3, keeping=3)
    store.record("call_0", pre=state.snapshot(), result=Result("x" * 1000, success=False))
    assert [each.tool_call_id for each in store.list_checkpoints()] == ["call_1", "call_2", "call_0"]
    again = store.get("call_0")
    assert again is not None
    assert not again.success
    assert again.post_snapshot is None
    assert again.result_summary is not None
    assert len(again.result_summary) <= 200


def test_the_default_ring_has_a_hundred_places() -> None:
    store = CheckpointStore()
    snapshot = ExecutionState(session=Session()).snapshot()
    for number in range(150):
        store.record(str(number), pre=snapshot)
    assert len(store.list_checkpoints()) == 100
    assert store.get_pre_snapshot("49") is None
    assert store.get_pre_snapshot("50") is snapshot
    with pytest.raises(UsageError, match="at least one"):
        CheckpointStore.keeping(0)


def test_state_can_be_taken_back_to_before_any_remembered_call() -> None:
    state, store = recorded(5, keeping=5)
    rollback_to_tool(state, store, "call_3")
    assert state.session[Total].all() == (Total(3),)
    rollback_to_tool(state, store, "call_1")
    assert state.session[Total].all() == (Total(1),)
    snapshot = store.get_post_snapshot("call_4")
    assert snapshot is not None
    state.restore(snapshot)
    assert state.session[Total].all() == (Total(5),)
    with pytest.raises(ValueError, match="No checkpoint for tool call: nope"):
        rollback_to_tool(state, store, "nope")

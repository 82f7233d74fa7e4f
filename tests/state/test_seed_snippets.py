"""The usage examples of the specifications, word for word: only their imports were changed.

What an example takes for granted (a plan, a message, a tool's result) is declared here as the
specification declares it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal
from uuid import UUID, uuid4

import pytest

from treenail.clock import FixedClock, SystemClock
from treenail.log import SlicePolicy
from treenail.state import (
    Budget,
    BudgetTracker,
    CheckpointStore,
    CompositeSnapshot,
    ExecutionState,
    InProcessDispatcher,
    InProcessEventBus,
    ReducerContext,
    ResourceRegistry,
    Session,
    SessionSnapshotAdapter,
    Snapshot,
    SnapshotMetadata,
    append_all,
    event,
    iter_sessions_bottom_up,
    replace_latest,
    snapshots_equivalent,
)
from treenail.workspace import Filesystem, InMemoryFilesystem

# --- what the examples take for granted -----------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    objective: str
    status: str = "active"
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class SetupPlan:
    objective: str


@dataclass(frozen=True)
class UpdateStep:
    step: str


@event(name="seed.ToolInvoked", policy=SlicePolicy.LOG)
@dataclass(frozen=True)
class ToolInvoked:
    name: str


def plan_reducer(slice_: Any, event: SetupPlan, *, context: ReducerContext) -> tuple[Plan, ...]:
    return (Plan(event.objective),)


def step_reducer(slice_: Any, event: UpdateStep, *, context: ReducerContext) -> tuple[Plan, ...]:
    return tuple(replace(plan, steps=(*plan.steps, event.step)) for plan in slice_)


@dataclass(frozen=True)
class ToolCallRecord:
    """Record of a tool call made by the assistant."""

    call_id: str
    name: str
    arguments: str  # JSON-encoded arguments
    status: Literal["pending", "completed", "failed"] = "pending"


@event(name="seed.InnerMessage", policy=SlicePolicy.LOG, captured=True)
@dataclass(frozen=True)
class InnerMessage:
    """A single message in a conversation, stored as a session slice item."""

    role: Literal["system", "assistant", "user", "tool"]
    content: str

    # Ordering fields
    evaluation_id: str
    sequence: int  # Global sequence within evaluation, starts at 0

    # Tool-related fields
    tool_calls: tuple[ToolCallRecord, ...] = ()
    tool_call_id: str | None = None  # For role="tool", references the call
    tool_name: str | None = None  # For role="tool"

    # Metadata
    turn: int = 0  # Provider round-trip number
    prompt_ns: str = ""
    prompt_key: str = ""
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    message_id: UUID = field(default_factory=uuid4)


def inner_message_append(
    slice_values: tuple[InnerMessage, ...],
    event: InnerMessage,
    *,
    context: ReducerContext,
) -> tuple[InnerMessage, ...]:
    """Append message maintaining sequence order within evaluation."""
    # Deduplicate by message_id
    existing_ids = {msg.message_id for msg in slice_values}
    if event.message_id in existing_ids:
        return slice_values

    # Find insertion point maintaining order
    result = list(slice_values)
    insert_idx = len(result)

    for i, msg in enumerate(result):
        if msg.evaluation_id == event.evaluation_id:
            if msg.sequence > event.sequence:
                insert_idx = i
                break
        elif msg.evaluation_id > event.evaluation_id:
            # Different evaluation, maintain evaluation order
            insert_idx = i
            break

    result.insert(insert_idx, event)
    return tuple(result)


@pytest.fixture
def bus() -> InProcessEventBus:
    return InProcessEventBus()


@pytest.fixture
def initial_plan() -> Plan:
    return Plan("write", steps=("outline",))


# --- execution state: sessions --------------------------------------------------------------------------


def test_current_behaviour(bus: InProcessEventBus, initial_plan: Plan) -> None:
    session = Session(bus=bus)
    session[Plan].register(UpdateStep, step_reducer)
    session[Plan].seed(initial_plan)

    # Capture state
    snapshot = session.snapshot()

    # Mutate state
    session.broadcast(UpdateStep("draft"))
    assert session[Plan].latest() == Plan("write", steps=("outline", "draft"))

    # Restore to captured state
    session.rollback(snapshot)
    assert session[Plan].latest() == initial_plan


def test_slice_registration_and_enhanced_behaviour(initial_plan: Plan) -> None:
    session = Session()
    # Register slice with explicit policy
    session[Plan].register(
        SetupPlan,
        plan_reducer,
        policy=SlicePolicy.STATE,
    )

    # Log slices are preserved during transactions
    session[ToolInvoked].register(
        ToolInvoked,
        append_all,
        policy=SlicePolicy.LOG,
    )
    session.dispatch(SetupPlan("write"))
    session.dispatch(ToolInvoked("before"))

    # Transaction snapshot: STATE slices only (default)
    tx_snapshot = session.snapshot()

    # Full snapshot: all slices including logs
    full_snapshot = session.snapshot(include_all=True)
    assert ToolInvoked not in tx_snapshot.slices
    assert full_snapshot.slices[ToolInvoked] == (ToolInvoked("before"),)

    session.dispatch(SetupPlan("something else"))
    session.dispatch(ToolInvoked("after"))

    # Rollback preserves LOG slices by default
    session.rollback(tx_snapshot)  # ToolInvoked entries preserved
    assert session[Plan].all() == (Plan("write"),)
    assert session[ToolInvoked].all() == (ToolInvoked("before"), ToolInvoked("after"))

    # Force full rollback (testing/debugging)
    session.rollback(full_snapshot, preserve_logs=False)
    assert session[ToolInvoked].all() == (ToolInvoked("before"),)


def test_snapshot_serialisation(initial_plan: Plan) -> None:
    session = Session()
    session[Plan].seed(initial_plan)
    session.dispatch(ToolInvoked("x"))
    snapshot = session.snapshot()
    assert Snapshot.from_json(snapshot.to_json()) == snapshot
    assert snapshot.policies[Plan] is SlicePolicy.STATE
    assert snapshot.policies[ToolInvoked] is SlicePolicy.LOG
    assert snapshot.parent_id is None
    assert snapshot.children_ids == ()
    by_hand = Snapshot(
        created_at=snapshot.created_at,
        slices=snapshot.slices,
        policies=snapshot.policies,
        tags=snapshot.tags,
    )
    assert by_hand == snapshot


def test_session_adapter(initial_plan: Plan) -> None:
    session = Session()
    session[Plan].seed(initial_plan)
    adapter = SessionSnapshotAdapter(session)
    taken = adapter.snapshot(tag="x")
    session[Plan].clear()
    adapter.restore(taken)
    assert session[Plan].latest() == initial_plan


# --- execution state: composite snapshots ---------------------------------------------------------------


@pytest.fixture
def fs() -> Filesystem:
    return InMemoryFilesystem()


@pytest.fixture
def execution_state(fs: Filesystem) -> ExecutionState:
    return ExecutionState(
        session=Session(),
        resources=ResourceRegistry.build({Filesystem: fs}),
        checkpoints=CheckpointStore(),
    )


def test_transaction_integration(fs: Filesystem) -> None:
    session = Session()
    tracker = BudgetTracker(Budget(max_total_tokens=10))
    fs.write("config.py", "DEBUG = True")

    # Filesystem registered as snapshotable resource
    resources = ResourceRegistry.build(
        {
            Filesystem: fs,
            BudgetTracker: tracker,
        }
    )
    state = ExecutionState(session=session, resources=resources)

    # Composite snapshot includes filesystem
    composite = state.snapshot(tag="pre:tool_call")
    assert set(composite.resources) == {Filesystem, BudgetTracker}
    fs.write("config.py", "DEBUG = False")

    # Restore includes filesystem
    state.restore(composite)
    assert fs.read("config.py").content == "DEBUG = True"


def test_composite_by_hand(execution_state: ExecutionState) -> None:
    taken = execution_state.snapshot()
    composite = CompositeSnapshot(
        snapshot_id=uuid4(),
        created_at=execution_state.clock.now(),
        session=execution_state.session.snapshot(),
        resources=types.MappingProxyType(dict(taken.resources)),
        metadata=SnapshotMetadata(tag="by hand"),
    )
    assert CompositeSnapshot.from_json(composite.to_json()) == composite
    assert snapshots_equivalent(composite, taken)


def test_tool_failure_rollback(execution_state: ExecutionState) -> None:
    fs = execution_state.resources.get(Filesystem)
    session = execution_state.session

    # Initial state
    fs.write("file.txt", "original")
    session[Plan].seed(Plan(objective="test", status="active"))

    # Tool fails after mutations
    pre_snapshot = execution_state.snapshot(
        tag="pre:call_1",
        metadata=SnapshotMetadata(
            tool_call_id="call_1",
            tool_name="mutating",
            phase="pre_tool",
        ),
    )
    fs.write("file.txt", "changed")
    session[Plan].seed(Plan(objective="hijacked"))
    execution_state.restore(pre_snapshot)

    assert fs.read("file.txt").content == "original"
    assert session[Plan].latest().objective == "test"


def test_visibility_expansion_rollback(execution_state: ExecutionState) -> None:
    fs = execution_state.resources.get(Filesystem)

    fs.write("data.txt", "before")
    snapshot_before = execution_state.snapshot()
    fs.write("data.txt", "after")
    execution_state.session.dispatch(Plan("new"))
    assert not snapshots_equivalent(snapshot_before, execution_state.snapshot())
    execution_state.restore(snapshot_before)

    snapshot_after = execution_state.snapshot()
    assert snapshots_equivalent(snapshot_before, snapshot_after)


# --- execution state: checkpoints -----------------------------------------------------------------------


@dataclass(frozen=True)
class ToolResult:
    message: str
    success: bool = True


def run_tool(state: ExecutionState, call_id: str, text: str) -> None:
    fs = state.resources.get(Filesystem)
    pre = state.snapshot(metadata=SnapshotMetadata(tool_call_id=call_id, tool_name="write", phase="pre_tool"))
    fs.write("file.txt", text)
    state.session[Plan].seed(Plan(text))
    assert state.checkpoints is not None
    state.checkpoints.record(
        call_id,
        pre=pre,
        post=state.snapshot(),
        result=ToolResult(f"wrote {text}"),
        elapsed=timedelta(seconds=1),
    )


def rollback_to_tool(
    execution_state: ExecutionState,
    checkpoints: CheckpointStore,
    tool_call_id: str,
) -> None:
    """Restore state to before a specific tool call."""
    snapshot = checkpoints.get_pre_snapshot(tool_call_id)
    if snapshot is None:
        raise ValueError(f"No checkpoint for tool call: {tool_call_id}")
    execution_state.restore(snapshot)


def test_checkpoint_usage(fs: Filesystem, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    resources = ResourceRegistry.build({Filesystem: fs})
    # Enable checkpointing
    checkpoints = CheckpointStore()
    state = ExecutionState(
        session=session,
        resources=resources,
        checkpoints=checkpoints,
    )
    fs.write("file.txt", "start")
    run_tool(state, "call_abc123", "one")
    run_tool(state, "call_def456", "two")

    # Query checkpoint history
    for checkpoint in checkpoints.list_checkpoints():
        print(f"{checkpoint.tool_name}: {checkpoint.result_summary}")
    assert capsys.readouterr().out == "write: wrote one\nwrite: wrote two\n"

    # Rollback to specific tool boundary
    state.restore(checkpoints.get_pre_snapshot("call_abc123"))
    assert fs.read("file.txt").content == "start"
    assert session[Plan].all() == ()
    with pytest.raises(ValueError, match="No checkpoint"):
        rollback_to_tool(state, checkpoints, "call_nope")


def test_rollback_to_tool_boundary(execution_state: ExecutionState) -> None:
    checkpoints = execution_state.checkpoints

    # Run several tools
    run_tool(execution_state, "call_a", "a")
    run_tool(execution_state, "call_b", "b")
    run_tool(execution_state, "call_c", "c")

    # Rollback to before tool_b
    pre_b = checkpoints.get_pre_snapshot("call_b")
    execution_state.restore(pre_b)

    # State matches exactly pre-tool_b
    assert execution_state.session[Plan].all() == (Plan("a"),)
    assert execution_state.resources.get(Filesystem).read("file.txt").content == "a"


def test_determinism_support() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    state = ExecutionState(
        session=Session(clock=FixedClock(moment)),
        resources=ResourceRegistry.build({}),
        clock=FixedClock(moment),
        rng=Random(42),  # Deterministic for replay
    )
    assert state.snapshot().created_at == moment
    assert state.session.snapshot().created_at == moment
    assert SystemClock().now().tzinfo is UTC


# --- inner messages: the session's part -----------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "checkpoint.json"


class InnerLoop:
    """Records messages as the specification's loop does."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._evaluation_id = str(uuid4())
        self._sequence = 0

    def _record_message(self, role: Any, content: str, **more: Any) -> InnerMessage:
        message = InnerMessage(
            role=role, content=content, evaluation_id=self._evaluation_id, sequence=self._sequence, **more
        )
        self._sequence += 1
        self.session.mutate(InnerMessage).append(message)
        return message


def test_basic_resume_and_resume_from_checkpoint(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Setup session with recording
    session = Session(bus=InProcessEventBus())
    session.mutate(InnerMessage).register(
        InnerMessage,
        inner_message_append,
    )

    # Save checkpoint after each message
    def save_on_change(old: Any, new: Any) -> None:
        if len(new) > len(old):
            checkpoint.write_text(session.snapshot().to_json())

    session.observe(InnerMessage, save_on_change)

    # Run evaluation
    loop = InnerLoop(session)
    loop._record_message("system", "Be brief.")
    loop._record_message("assistant", "", tool_calls=(ToolCallRecord("c1", "search", "{}"),))
    loop._record_message("tool", "found", tool_call_id="c1", tool_name="search")
    recorded = session.select_all(InnerMessage)
    assert [message.role for message in recorded] == ["system", "assistant", "tool"]

    # Load checkpoint
    snapshot = Snapshot.from_json(checkpoint.read_text())

    session = Session(bus=InProcessEventBus())
    session.mutate(InnerMessage).register(
        InnerMessage,
        inner_message_append,
    )
    session.mutate().rollback(snapshot)

    # Get all messages
    messages = session.select_all(InnerMessage)
    assert messages == recorded
    for msg in messages:
        print(f"[{msg.sequence}] {msg.role}: {msg.content[:50]}...")
    assert "[2] tool: found..." in capsys.readouterr().out


def test_messages_are_ordered_and_deduplicated() -> None:
    session = Session()
    session.mutate(InnerMessage).register(
        InnerMessage,
        inner_message_append,
    )
    first = InnerMessage("system", "a", "e", 0)
    third = InnerMessage("user", "c", "e", 2)
    second = InnerMessage("user", "b", "e", 1)
    for message in (first, third, second, third):
        session.mutate(InnerMessage).dispatch(message)
    assert session.select_all(InnerMessage) == (first, second, third)


def test_snapshot_json_lists_messages_one_by_one() -> None:
    session = Session()
    InnerLoop(session)._record_message("system", "Be brief.")
    json_str = session.snapshot().to_json()
    assert '"slice_type": "seed.InnerMessage"' in json_str
    assert '"item_type": "seed.InnerMessage"' in json_str
    assert '"role": "system"' in json_str


def test_a_rollback_does_not_delete_the_request_that_started_the_call() -> None:
    session = Session()
    snapshot = session.snapshot()
    message = InnerLoop(session)._record_message("user", "do it")
    session.dispatch(Plan("half done"))
    session.rollback(snapshot)
    assert session.select_all(InnerMessage) == (message,)
    assert session[Plan].all() == ()


# --- nested execution: the session's part ---------------------------------------------------------------


def test_child_session_creation() -> None:
    parent_session = Session()
    parent_session.dispatch(Plan("parent"))
    child_session = Session(
        parent=parent_session,
        session_id=uuid4(),
        dispatcher=InProcessDispatcher(),
    )
    child_session[Plan].register(Plan, replace_latest)
    child_session.dispatch(Plan("child"))
    assert list(iter_sessions_bottom_up(parent_session)) == [child_session, parent_session]
    assert parent_session[Plan].latest() == Plan("parent")

"""Snapshots that another process reads, and what they hold besides a session: random numbers, resources."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from treenail.errors import SnapshotMismatchError, SnapshotRestoreError, UsageError
from treenail.log import SlicePolicy
from treenail.state import (
    Binding,
    Budget,
    BudgetTracker,
    CheckpointStore,
    CompositeSnapshot,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    Session,
    TokenUsage,
    snapshots_equivalent,
)
from treenail.tools import Tool, ToolCall, ToolContext, ToolResult, ToolRunner, tool
from treenail.workspace import Filesystem, InMemoryFilesystem, memory
from treenail.workspace.host import HostFilesystem

FILESYSTEM: Any = Filesystem


def state_with(filesystem: Any, **fields: Any) -> ExecutionState:
    return ExecutionState(Session(), ResourceRegistry.build({FILESYSTEM: filesystem}), **fields)


# --- another process ----------------------------------------------------------------------------------

READ = """
import sys
from treenail.state import CompositeSnapshot
snapshot = CompositeSnapshot.from_json(open(sys.argv[1]).read())
from treenail.state import BudgetTracker, Budget, ExecutionState, ResourceRegistry, Session
from treenail.workspace import Filesystem, InMemoryFilesystem
fs = InMemoryFilesystem({"other.txt": "there"})
tracker = BudgetTracker(Budget(max_total_tokens=1000))
state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: fs, BudgetTracker: tracker}))
state.restore(snapshot, preserve_logs=False)
print(fs.read("d/a.txt").content, fs.read_bytes("raw").content)
print(fs.stat("d").permissions, fs.stat("link").link_target)
print(sorted(each.path for each in fs.glob("**")), tracker.consumed.total_tokens)
"""


def test_a_snapshot_of_our_own_resources_is_restored_by_a_fresh_process(tmp_path: Path) -> None:
    """It has imported nothing but the state room, and its filesystem in memory has never seen the files."""
    fs = InMemoryFilesystem({"d/a.txt": "text", "raw": bytes(range(200, 256))})
    fs.chmod("d", 0o700)
    fs.symlink("link", "d/a.txt")
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    tracker.record_cumulative("evaluation", TokenUsage(input_tokens=7, output_tokens=3))
    resources = ResourceRegistry.build({FILESYSTEM: fs, BudgetTracker: tracker})
    (tmp_path / "snapshot.json").write_text(ExecutionState(Session(), resources).snapshot().to_json())
    command = [sys.executable, "-c", READ, str(tmp_path / "snapshot.json")]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert read.stdout.splitlines() == [
        f"text {bytes(range(200, 256))!r}",
        f"{0o700} d/a.txt",
        "['d', 'd/a.txt', 'link', 'raw'] 10",
    ]


def test_an_event_of_a_call_does_not_carry_the_files() -> None:
    """Content travels only in a composite snapshot's own JSON: a log stays small."""
    fs = InMemoryFilesystem({"a.txt": "x" * 10_000})
    snapshot = state_with(fs).snapshot()
    assert not fs.snapshot().content
    assert CompositeSnapshot.from_json(snapshot.to_json()) == snapshot
    assert not snapshot.resources[FILESYSTEM].content  # type: ignore[attr-defined]


def test_more_than_a_snapshot_carries_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_PORTABLE_BYTES", 1000)
    state = state_with(InMemoryFilesystem({"a.txt": "x" * 1001}))
    with pytest.raises(UsageError, match=r"at most 1000 .*HostFilesystem"):
        state.snapshot().to_json()
    state_with(InMemoryFilesystem({"a.txt": "x" * 1000})).snapshot().to_json()


def test_content_that_is_not_the_snapshots_tree_changes_nothing() -> None:
    fs, other = InMemoryFilesystem({"a.txt": "a"}), InMemoryFilesystem({"b.txt": "b"})
    travels = fs.portable(fs.snapshot())
    for content in (other.portable(other.snapshot()).content, "not base 64!", "", travels.content[:40]):
        with pytest.raises(SnapshotMismatchError, match="nothing was changed"):
            other.restore(replace(travels, content=content))
    assert other.read("b.txt").content == "b"


# --- random numbers -----------------------------------------------------------------------------------


def test_random_numbers_go_back_with_a_restore_also_through_json() -> None:
    state = state_with(InMemoryFilesystem(), rng=Random(42))
    assert state.rng is not None
    state.rng.gauss(0, 1)
    snapshot = state.snapshot()
    drawn = [state.rng.random(), state.rng.gauss(0, 1)]
    assert not snapshots_equivalent(snapshot, state.snapshot())
    state.restore(CompositeSnapshot.from_json(snapshot.to_json()))
    assert snapshots_equivalent(snapshot, state.snapshot())
    assert [state.rng.random(), state.rng.gauss(0, 1)] == drawn


def test_random_numbers_that_cannot_be_repeated_are_left_alone() -> None:
    state = state_with(InMemoryFilesystem(), rng=SystemRandom())
    snapshot = state.snapshot()
    assert snapshot.rng is None
    state.restore(snapshot)
    with pytest.raises(SnapshotRestoreError, match="random"):
        CompositeSnapshot.from_json(snapshot.to_json().replace('"rng": null', '"rng": [3, [1, 2], null]'))


def test_a_failed_call_gives_its_random_numbers_back() -> None:
    """The next attempt draws the numbers that the failed one drew; a kept call's are spent."""
    state = state_with(InMemoryFilesystem(), rng=Random(7))
    drawn: list[float] = []

    @tool
    def draw(fails: bool, *, context: ToolContext) -> str:
        """Draw a number."""
        assert context.state.rng is not None
        drawn.append(context.state.rng.random())
        if fails:
            raise RuntimeError("no")
        return "drawn"

    runner = ToolRunner(state, {"draw": draw})
    for fails in ("true", "false", "false"):
        runner.execute(ToolCall(f"c{len(drawn)}", "draw", f'{{"fails": {fails}}}'))
    assert drawn[0] == drawn[1] != drawn[2]


# --- time ---------------------------------------------------------------------------------------------


@dataclass
class Wrist:
    """A clock that has nothing but `now`, as the specification asks for."""

    time: datetime = datetime(2030, 1, 2, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time


def test_checkpoints_take_their_time_from_the_states_clock() -> None:
    wrist, own = Wrist(), Wrist(datetime(2040, 1, 1, tzinfo=UTC))

    @tool
    def work(*, context: ToolContext) -> str:
        """Work."""
        return "done"

    for clock, checkpoints in ((wrist, CheckpointStore()), (own, CheckpointStore(clock=own))):
        state = state_with(InMemoryFilesystem(), clock=wrist, checkpoints=checkpoints)
        ToolRunner(state, {"work": work}).execute(ToolCall("c1", "work"))
        [checkpoint] = checkpoints.list_checkpoints()
        assert checkpoint.recorded_at == clock.now()


def test_a_clock_needs_no_more_than_now(tmp_path: Path) -> None:
    """Where time is only told and not measured; what is measured is the machine's."""
    wrist = Wrist()
    assert Session(clock=wrist).created_at == wrist.time
    assert InMemoryFilesystem(clock=wrist).snapshot().created_at == wrist.time
    (tmp_path / "root").mkdir()
    with HostFilesystem(tmp_path / "root", store=tmp_path / "s", clock=wrist) as fs:
        assert fs.snapshot().created_at == wrist.time
    assert Deadline.after(timedelta(hours=1), clock=wrist).remaining() == timedelta(hours=1)
    state = state_with(InMemoryFilesystem(), clock=wrist)
    assert state.snapshot().created_at == wrist.time
    assert state.clock.monotonic() <= state.clock.monotonic()


# --- trees, not refs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, True])
def test_equal_trees_are_equivalent_whatever_happened_between(tmp_path: Path, scan: bool) -> None:
    """A file was changed and put back, in one history and in another workspace with its own."""
    states = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("original")
        fs = HostFilesystem(tmp_path / name, store=tmp_path / f"{name}-store")
        states.append((state_with(fs), fs))
    (state, fs), (other, other_fs) = states
    before = state.snapshot(known={FILESYSTEM: fs.snapshot(scan=scan)})
    fs.write("a.txt", "changed")
    changed = state.snapshot(known={FILESYSTEM: fs.snapshot(scan=scan)})
    fs.write("a.txt", "original")
    after = state.snapshot(known={FILESYSTEM: fs.snapshot(scan=scan)})
    assert not snapshots_equivalent(before, changed)
    assert snapshots_equivalent(before, after)
    assert before.resources[FILESYSTEM] != after.resources[FILESYSTEM]
    other_fs.snapshot()
    other_fs.write("a.txt", "something else")
    other_fs.snapshot()
    other_fs.write("a.txt", "original")
    there = other.snapshot(known={FILESYSTEM: other_fs.snapshot(scan=scan)})
    assert snapshots_equivalent(after, there)
    assert not snapshots_equivalent(changed, there)
    for _, each in states:
        each.close()


# --- resources that are built in a call ---------------------------------------------------------------


@dataclass
class Counter:
    """A resource whose state a failed call must not change."""

    count: int = 0
    log: list[int] = field(default_factory=list)

    def snapshot(self, *, tag: str | None = None) -> CounterSnapshot:
        return CounterSnapshot(self.count)

    def restore(self, snapshot: CounterSnapshot) -> None:
        self.count = snapshot.count


@dataclass(frozen=True)
class CounterSnapshot:
    count: int


class Ledger(Counter):
    """What was spent stays spent."""

    snapshot_policy = SlicePolicy.LOG


@dataclass
class Outer:
    """Needs a counter, and can be captured itself."""

    inner: Counter


@pytest.mark.parametrize("how", ["raises", "fails", "passes"])
def test_a_resource_that_is_first_built_in_a_failing_call_goes_back(how: str) -> None:
    """Also one that another resource's provider needed; one whose policy is LOG does not."""
    registry = ResourceRegistry.of(
        Binding(Counter, lambda _: Counter(5)),
        Binding(Ledger, lambda _: Ledger(5)),
        Binding(Outer, lambda resources: Outer(resources.get(Counter))),
    )

    def work(*, context: ToolContext) -> ToolResult[None]:
        """Work."""
        outer, ledger = context.resources.get(Outer), context.resources.get(Ledger)
        assert outer is not None and ledger is not None
        outer.inner.count += 1
        ledger.count += 1
        if how == "raises":
            raise RuntimeError("no")
        return ToolResult.ok() if how == "passes" else ToolResult.error("no")

    with registry.open() as resources:
        state = ExecutionState(Session(), resources)
        ToolRunner(state, {"work": Tool.wrap(work)}).execute(ToolCall("c1", "work"))
        assert resources.get(Counter).count == (6 if how == "passes" else 5)
        assert resources.get(Ledger).count == 6

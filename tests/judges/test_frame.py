"""What a nested evaluation may see and use: time, trace, resources, the parent's state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges_kit import START, Note, called
from tests.delegates import PassesOn

from treenail.clock import FixedClock
from treenail.containment import ExecutionContext, Limits
from treenail.errors import ReadOnlyError, UsageError
from treenail.judges import (
    FeedbackContext,
    NestedExecutionConfig,
    NestedExecutionContext,
    TaskCompletionContext,
    derive_child_run_context,
    derive_nested_deadline,
)
from treenail.prompt import Prompt
from treenail.state import (
    Binding,
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    RunContext,
    Session,
    SessionView,
    iter_sessions_bottom_up,
    nested_session,
)
from treenail.tools.context import CallFilesystem
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

# --- deadlines -----------------------------------------------------------------------------------------


def test_without_a_parents_deadline_a_nested_one_is_the_longest_that_is_allowed() -> None:
    clock = FixedClock(START)
    assert derive_nested_deadline(None, timedelta(seconds=15), clock=clock).at == START + timedelta(
        seconds=15
    )


@given(
    left=st.none() | st.floats(-1e6, 1e6),
    longest=st.floats(-10, 1e9) | st.just(timedelta.max.total_seconds()),
)
def test_a_nested_deadline_never_raises_and_never_outlives_the_parent(
    left: float | None, longest: float
) -> None:
    """Also with less than a second left, with none left, and without a parent's deadline at all."""
    clock = FixedClock(START)
    parent = None if left is None else Deadline(START + timedelta(seconds=left), clock=clock)
    allowed = timedelta.max if longest > 1e12 else timedelta(seconds=longest)
    nested = derive_nested_deadline(parent, allowed, clock=clock)
    if parent is not None:
        assert nested.at <= parent.at
    if allowed < timedelta(days=300_000):
        assert nested.at <= START + allowed
    # It is one of the two, not something shorter.
    own = START + allowed if allowed < timedelta(days=300_000) else datetime.max.replace(tzinfo=UTC)
    assert nested.at == (own if parent is None else min(parent.at, own))


def test_a_nested_deadline_runs_on_its_parents_clock() -> None:
    clock = FixedClock(START)
    parent = Deadline(START + timedelta(hours=1), clock=clock)
    assert derive_nested_deadline(parent).clock is clock


# --- the trace -----------------------------------------------------------------------------------------


def test_a_nested_run_is_a_span_of_its_own_in_the_parents_trace() -> None:
    parent = RunContext.new(worker_id="w1")
    session = Session()
    child = derive_child_run_context(parent, session.session_id)
    assert (child.trace_id, child.parent_span_id) == (parent.trace_id, parent.span_id)
    assert (child.request_id, child.worker_id) == (parent.request_id, "w1")
    assert child.session_id == session.session_id
    assert child.run_id != parent.run_id
    assert child.span_id not in (None, parent.span_id)


def test_a_nested_run_without_a_parent_has_ids_of_its_own() -> None:
    session_id = Session().session_id
    child = derive_child_run_context(None, session_id)
    assert (child.session_id, child.worker_id, child.trace_id) == (session_id, "nested", None)
    assert child.span_id
    assert child.parent_span_id is None


# --- the parent's state --------------------------------------------------------------------------------

READERS = {
    "adopt", "clock", "query", "read_only_view", "select_all", "session_id", "snapshot", "tags",
}  # fmt: skip
"""What a view of a session can do."""

NOT_THERE = {
    "check_fits", "children", "codec", "created_at", "dispatcher", "events", "head", "is_closed",
    "just_written", "log", "open", "parent", "parent_id", "past", "policy_of", "report",
}  # fmt: skip
"""What a session can do without changing anything, and a view cannot: it leads further than a reader goes."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_public_way_to_change_a_session_is_refused_through_the_parents_view() -> None:
    """A method that is added to Session fails here until somebody says what a view does about it."""
    session = Session(clock=FixedClock(START))
    session.dispatch(Note("a"))
    before = session.snapshot(include_all=True)
    head = session.head
    view = NestedExecutionContext(session).parent_session
    for name in public(Session) - READERS - NOT_THERE:
        with pytest.raises(ReadOnlyError, match="read-only"):
            getattr(view, name)
    for name in NOT_THERE:
        with pytest.raises(AttributeError):
            getattr(view, name)
    accessor = view[Note]
    for name in public(type(session[Note])) - {"all", "latest", "where", "view"}:
        with pytest.raises(ReadOnlyError):
            getattr(accessor, name)
    with pytest.raises(ReadOnlyError):
        view.session_id = None  # type: ignore[attr-defined]  # a view's
    assert session.snapshot(include_all=True) == before
    assert session.head == head


def test_no_attribute_of_the_parents_view_is_the_session() -> None:
    session = Session()
    session.dispatch(Note("a"))
    view = session.read_only_view()
    for name in SessionView.__slots__:
        value = getattr(view, name)
        assert not isinstance(value, Session)
        assert not isinstance(getattr(value, "__self__", None), Session)
    assert view.snapshot(include_all=True).taken_by is None


def test_the_parents_state_can_be_read_as_it_is_now() -> None:
    session = Session()
    context = NestedExecutionContext(session)
    session.dispatch(Note("later"))
    assert context.parent_session[Note].all() == (Note("later"),)


@pytest.mark.parametrize("kind", ["feedback", "completion"])
def test_judges_see_the_run_and_its_files_read_only(kind: str) -> None:
    session, files = Session(), InMemoryFilesystem()
    prompt: Prompt[Any] = Prompt(ns="t", key="work")
    context: Any = (
        FeedbackContext(session, prompt, filesystem=files)
        if kind == "feedback"
        else TaskCompletionContext(session, filesystem=files)
    )
    with pytest.raises(ReadOnlyError):
        context.session.dispatch(Note("a"))
    with pytest.raises(ReadOnlyError):
        context.filesystem.write("a.txt", "a")
    assert session.head == 0
    assert not files.exists("a.txt")


# --- child sessions ------------------------------------------------------------------------------------


def test_a_nested_session_lives_in_its_parents_log_and_knows_it_only_as_a_view(tmp_path: Path) -> None:
    from treenail.log.sqlite import SqliteLog

    log = SqliteLog(tmp_path / "runs.db")
    parent = Session(log=log)
    parent.dispatch(Note("parent"))
    child = nested_session(parent.read_only_view(), tags={"judge": "me"})
    child.dispatch(Note("child"))
    assert isinstance(child.parent, SessionView)
    assert child.tags["judge"] == "me"
    child.close()
    parent.close()
    again = Session.open(log, child.session_id, read_only=True)
    assert again[Note].all() == (Note("child"),)
    assert again.parent_id == parent.session_id
    assert Session.open(log, parent.session_id, read_only=True)[Note].all() == (Note("parent"),)
    log.close()


def test_sessions_are_walked_from_the_bottom_up() -> None:
    root = Session()
    left, right = nested_session(root), nested_session(root.read_only_view())
    below = nested_session(left)
    assert list(iter_sessions_bottom_up(root)) == [below, left, right, root]


# --- resources -----------------------------------------------------------------------------------------


class Counter:
    """A resource that can be rolled back."""

    def __init__(self) -> None:
        self.count = 0

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.count

    def restore(self, snapshot: int) -> None:
        self.count = snapshot


class Client:
    """A resource without state of the run."""


def mutable(tmp_path: Path) -> Mapping[str, tuple[type, Any]]:
    session, files = Session(), InMemoryFilesystem()
    (tmp_path / "w").mkdir()
    return {
        "filesystem": (Filesystem, files),
        "host filesystem": (HostFilesystem, HostFilesystem(tmp_path / "w")),
        "bound filesystem": (Filesystem, Binding.instance(Filesystem, files)),
        "a tool's filesystem": (Filesystem, CallFilesystem(files, "call_1")),
        "session": (Session, session),
        "snapshotable": (Counter, Counter()),
        "what passes requests on to it": (Counter, PassesOn(Counter())),
        "state": (ExecutionState, ExecutionState(session)),
        "transaction": (object, session.begin()),
        "limits": (ExecutionContext, ExecutionContext(Limits())),
        "open resources": (object, ResourceRegistry().open()),
    }


def test_a_mutable_resource_that_is_passed_by_mistake_is_refused(tmp_path: Path) -> None:
    for what, (kind, value) in mutable(tmp_path).items():
        with pytest.raises(UsageError, match="a judge cannot be given") as refused:
            NestedExecutionContext(Session(), resource_overrides={kind: value})
        assert ("writable" if "filesystem" in what else "pass") in str(refused.value).lower(), what


def test_read_only_views_fresh_ones_and_stateless_ones_may_be_passed() -> None:
    files, client = InMemoryFilesystem(), Client()
    context = NestedExecutionContext(
        Session(),
        resource_overrides={
            Filesystem: files.read_only_view(),
            Client: client,
            Counter: Binding(Counter, lambda _: Counter()),
            SessionView: Session().read_only_view(),
            BudgetTracker: BudgetTracker(Budget(max_total_tokens=1)),
        },
    )
    assert context.resource_overrides[Client] is client
    with pytest.raises(TypeError):
        context.resource_overrides[Client] = Client()  # type: ignore[index]  # that is the point


def test_a_read_only_filesystem_takes_no_part_in_snapshots_and_rollbacks() -> None:
    """A judge with tools can be rolled back without the run's files being asked for a boundary."""
    files, counter = InMemoryFilesystem(), Counter()
    files.write("a.txt", "a")
    registry = ResourceRegistry.build({Filesystem: files.read_only_view(), Counter: counter})
    for resources in (registry, registry.open()):
        if not isinstance(resources, ResourceRegistry):
            resources.start()
        state = ExecutionState(Session(), resources)
        taken = state.snapshot()
        counter.count = 5
        state.restore(taken)
        assert counter.count == 0
        assert set(taken.resources) == {Counter}


# --- configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_nested_duration": timedelta(0)},
        {"max_nesting_depth": -1},
        {"max_nesting_depth": True},
        {"max_completion_checks": 0},
        {"on_feedback_failure": "ajar"},
        {"on_completion_failure": ""},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        NestedExecutionConfig(**wrong)


def test_the_seeds_fields_are_there_with_the_seeds_defaults() -> None:
    config = NestedExecutionConfig()
    assert config.max_nested_duration == timedelta(seconds=30)
    assert config.default_nested_budget == Budget(max_total_tokens=1000)
    assert (config.allow_nested_tools, config.max_nesting_depth) == (False, 1)
    assert list(inspect.signature(NestedExecutionContext).parameters)[:5] == [
        "parent_session",
        "parent_run_context",
        "deadline",
        "budget",
        "resource_overrides",
    ]


def test_a_feedback_context_makes_the_frame_of_a_nested_evaluation() -> None:
    session, run = Session(), RunContext.new()
    called(session)
    budget = Budget(max_total_tokens=5)
    deadline = Deadline.after(timedelta(seconds=3))
    context = FeedbackContext(session, Prompt(ns="t", key="work"), deadline, None, run)
    nested = context.create_nested_context(budget=budget, max_duration=timedelta(seconds=20))
    assert (nested.parent_run_context, nested.budget, nested.deadline) == (run, budget, deadline)
    assert nested.parent_session is context.session

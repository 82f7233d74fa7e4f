"""Laws of workflows: whatever the steps do, the ending is the table's, and nobody starts too early."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workflows_kit import Model, run, says, step, steps

from treenail.errors import UsageError
from treenail.providers import ModelRequest
from treenail.workflows import (
    Checkpoint,
    StepSpec,
    StepState,
    WorkflowEvent,
    WorkflowSpec,
    WorkflowState,
    dry_run,
    spec_schema,
    waves,
)
from treenail.workflows.documents import spec_from_data
from treenail.workflows.events import check_event, fold_workflow
from treenail.workflows.globs import check_glob, matches, overlaps
from treenail.workflows.schedule import conflict
from treenail.workflows.states import STEP_TRANSITIONS, StepView, derive_workflow

STATUSES = ("checkpoint_ready", "partial", "failed", "held", "needs_orchestrator")
GLOBS = ("**", "a/**", "b/**", "*.txt", "a/*.py", "?/x")


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> WorkflowSpec:
    """A workflow without circles: each step waits for some of those before it, and then they are shuffled."""
    names = [f"s{number}" for number in range(draw(st.integers(1, most)))]
    made = []
    for number, name in enumerate(names):
        posture = draw(st.sampled_from(("read", "write")))
        made.append(
            StepSpec(
                id=name,
                task=f"{name} it",
                depends_on=tuple(
                    draw(st.sets(st.sampled_from(names[:number])) if number else st.just(set()))
                ),
                posture=posture,
                workspace=draw(st.sampled_from(("shared", "isolated"))) if posture == "write" else None,
                read_set=tuple(draw(st.lists(st.sampled_from(GLOBS), max_size=2, unique=True))),
                write_set=tuple(draw(st.lists(st.sampled_from(GLOBS), max_size=2, unique=True))),
                required=draw(st.booleans()),
            )
        )
    shuffled = draw(st.permutations(made))
    return WorkflowSpec(id="w", steps=tuple(shuffled), max_concurrency=draw(st.integers(1, 4)))


def says_the_table(spec: WorkflowSpec, said: dict[str, str]) -> tuple[dict[str, str], str]:
    """What must come out, worked out by hand: who runs at all, how each stands, and how the whole ends."""
    by_id = {each.id: each for each in spec.steps}
    stands: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in stands:
            runs = all(of(each) == "checkpoint_ready" for each in by_id[name].depends_on)
            stands[name] = said[name] if runs else "unreachable"
        return stands[name]

    for each in spec.steps:
        of(each.id)

    def waits_for(name: str) -> set[str]:
        found = {name}
        for each in by_id[name].depends_on:
            found |= waits_for(each)
        return found

    lacking = [each.id for each in spec.steps if each.required and stands[each.id] != "checkpoint_ready"]
    if not lacking:
        return stands, "completed"
    counting = {stands[each] for name in lacking for each in waits_for(name)}
    if counting & {"held", "needs_orchestrator"}:
        return stands, "held"
    if set(stands.values()) & {"checkpoint_ready", "partial"}:
        return stands, "partial"
    return stands, "failed"


class Watching(Model):
    """Knows who is at work, and what was ready when somebody began."""

    def __init__(self, said: dict[str, str]) -> None:
        super().__init__(**{name: [says(status)] for name, status in said.items()})
        self.at_work: set[str] = set()
        self.together: set[tuple[str, str]] = set()
        self.most = 0
        self.order: list[str] = []

    async def stream(self, request: ModelRequest):
        name = next(each.text for each in request.items if each.role == "user").split()[0]
        self.order.append(name)
        self.at_work.add(name)
        self.most = max(self.most, len(self.at_work))
        self.together |= set(itertools.permutations(self.at_work, 2))
        await anyio.lowlevel.checkpoint()
        async for each in super().stream(request):
            yield each
        self.at_work.discard(name)


@settings(max_examples=40)
@given(data=st.data(), spec=graphs())
def test_any_workflow_ends_as_the_table_says(data: st.DataObject, spec: WorkflowSpec) -> None:
    """No dependent of an unready step ever starts, and writers in conflict never run side by side."""
    said = {each.id: data.draw(st.sampled_from(STATUSES), label=each.id) for each in spec.steps}
    model = Watching(said)
    decided: list[WorkflowEvent] = []
    result = run(spec, model, watch=decided.append)
    stands, ending = says_the_table(spec, said)
    assert result.state.value == ending, result.to_data()
    assert result.ok == (ending == "completed")
    found = {
        each.step_id: "unreachable" if each.reason == "dependency_not_checkpoint_ready" else each.state.value
        for each in result.steps
    }
    assert found == stands
    assert sorted(model.order) == sorted(name for name, state in stands.items() if state != "unreachable")
    assert model.most <= spec.max_concurrency
    for one, other in model.together:
        assert conflict(spec.step(one), spec.step(other)) is None
    ready: set[str] = set()
    for event in decided:
        if event.kind == "step_scheduled":
            assert set(spec.step(event.step_id).depends_on) <= ready
        elif event.kind == "checkpoint_decided" and event.checkpoint_status == "checkpoint_ready":
            ready.add(event.step_id)
    assert bool(result.next_actions) == (ending != "completed" and set(stands.values()) != "unreachable")


@settings(max_examples=40)
@given(spec=graphs(most=12))
def test_waves_are_an_order_in_which_the_steps_can_run(spec: WorkflowSpec) -> None:
    order = waves(spec)
    place = {name: number for number, wave in enumerate(order) for name in wave}
    assert sorted(place) == sorted(each.id for each in spec.steps)
    assert sum(map(len, order)) == len(spec.steps)
    for each in spec.steps:
        assert all(place[other] < place[each.id] for other in each.depends_on)
    for wave in order:
        assert 1 <= len(wave) <= spec.max_concurrency
        for one, other in itertools.combinations(wave, 2):
            assert conflict(spec.step(one), spec.step(other)) is None
    for one, other, why in dry_run(spec).conflicts:
        assert place[one] != place[other]
        assert why


@settings(max_examples=30)
@given(spec=graphs())
def test_a_specification_survives_being_data(spec: WorkflowSpec) -> None:
    assert spec_from_data(json.loads(json.dumps(spec.to_data()))) == spec


def test_every_field_of_a_specification_survives_being_data() -> None:
    full = StepSpec(
        id="a", task="t", agent="x", workspace="shared", required=False, timeout_s=1.5, retries=2,
        max_cost_usd=0.5, max_steps=3, output={}, read_set=(), write_set=("a/**",), auto_apply=False,
    )  # fmt: skip
    spec = WorkflowSpec(id="w", name="n", steps=(full,), max_concurrency=2, timeout_s=9.0, max_cost_usd=1.0)
    assert spec_from_data(json.loads(json.dumps(spec.to_data()))) == spec


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = tuple(spec_schema()["properties"]["steps"]["items"]["properties"])
LIKELY = st.sampled_from(
    ["a", "b", "write", "read", "apply", "shared", ["a"], ["**"], ["[", "a"], 1, 0, 2.5, True, {"type": "x"}]
)


@settings(max_examples=80)
@given(
    JSON
    | st.fixed_dictionaries(
        {
            "id": st.just("w") | JSON,
            "steps": st.lists(
                st.dictionaries(st.sampled_from(FIELDS), LIKELY | JSON, max_size=6) | JSON, max_size=3
            ),
        },
        optional={"agents": JSON, "timeout_s": JSON, "max_concurrency": JSON, "zzz": JSON},
    )
)
def test_any_data_is_a_specification_or_is_refused_with_its_place(data: Any) -> None:
    refused = ""
    try:
        spec = spec_from_data(data, where="here")
    except UsageError as error:
        refused = str(error)
    if refused:
        assert refused.startswith("here")
    else:
        assert spec_from_data(json.loads(json.dumps(spec.to_data()))) == spec


# --- globs -----------------------------------------------------------------------------------------

NAMES = ["a", "b", "aa", "ab", "ba", "bb"]
PATHS = ["/".join(parts) for depth in range(1, 6) for parts in itertools.product(NAMES, repeat=depth)]
"""Two patterns of three segments that share a path share one of these: names of two letters, five deep."""
SEGMENTS = ("**", "*", "a", "b", "ab", "?", "a*", "*b", "?a", "*a*", "?b")
PATTERNS = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map("/".join)


def stands_for(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Match segment by segment, the plainest way there is."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path)
        return stands_for(pattern[1:], path) or (bool(path) and stands_for(pattern, path[1:]))
    return bool(path) and name_fits(pattern[0], path[0]) and stands_for(pattern[1:], path[1:])


def name_fits(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return name_fits(pattern[1:], name) or (bool(name) and name_fits(pattern, name[1:]))
    return bool(name) and pattern[0] in ("?", name[0]) and name_fits(pattern[1:], name[1:])


@settings(max_examples=60)
@given(PATTERNS)
def test_a_path_matches_as_the_plainest_matcher_says(pattern: str) -> None:
    check_glob(pattern)
    for path in PATHS[:300]:
        assert matches(path, pattern) == stands_for(pattern.split("/"), path.split("/")), (pattern, path)


@settings(max_examples=80)
@given(PATTERNS, PATTERNS)
def test_two_patterns_overlap_if_and_only_if_a_path_matches_both(one: str, other: str) -> None:
    found = overlaps(one, other)
    assert found == overlaps(other, one)
    assert found == any(matches(path, one) and matches(path, other) for path in PATHS), (one, other)


@pytest.mark.parametrize("bad", ["", "/a", "a//b", "../x", "a/./b", "a**", "[ab]", "a\\b", "x" * 600, "a\0b"])
def test_a_bad_glob_is_refused_with_its_place(bad: str) -> None:
    with pytest.raises(UsageError, match=r"steps\[0\] \(a\)\.write_set\[1\]"):
        steps(step("a", write_set=("ok/**", bad)))


# --- folds -----------------------------------------------------------------------------------------

AT = datetime(2026, 1, 1, tzinfo=UTC)


@st.composite
def histories(draw: st.DrawFn) -> list[WorkflowEvent]:
    """A start, and then anything at all."""
    spec = draw(graphs(most=3))
    names = [each.id for each in spec.steps]
    events = [WorkflowEvent("workflow_started", "w", "w", AT, spec_json=json.dumps(spec.to_data()))]
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(
            st.sampled_from(
                ["workflow_resumed", "step_scheduled", "checkpoint_decided", "step_held", "step_reset",
                 "workflow_interrupted", "workflow_finished"]
            )
        )  # fmt: skip
        name = draw(st.sampled_from([*names, "nobody"]))
        status: Any = draw(st.sampled_from(STATUSES))
        events.append(
            WorkflowEvent(
                kind, "w", "w", AT,
                step_id="" if kind.startswith("workflow") else name,
                subagent_id="x-1",
                checkpoint=Checkpoint(name, status, "") if kind == "checkpoint_decided" else None,
                state=draw(st.sampled_from(["completed", "failed", "partial"])),
                reason=draw(st.sampled_from(["", "why"])),
            )
        )  # fmt: skip
    return events


@settings(max_examples=50)
@given(histories())
def test_no_prefix_of_any_log_reads_as_complete_unless_it_was_finished(events: list[WorkflowEvent]) -> None:
    """A process that looks at any moment never takes a workflow for done that nobody has called done."""
    for size in range(1, len(events) + 1):
        record = fold_workflow(events[:size])
        last = events[size - 1]
        told = [each for each in events[:size] if each.kind == "workflow_finished"]
        if record.state is WorkflowState.COMPLETED:
            assert told
            assert told[-1].state == "completed"
            assert last.kind == "workflow_finished" or last.step_id == "nobody", "and nothing came after it"
        assert set(record.steps) == {each.id for each in record.spec.steps}


@settings(max_examples=50)
@given(histories())
def test_what_the_table_refuses_is_refused_before_it_is_recorded(events: list[WorkflowEvent]) -> None:
    record = fold_workflow(events[:1])
    for event in events[1:]:
        before = dict(record.steps)
        try:
            check_event(record, event)
        except UsageError:
            assert record.steps == before
            continue
        record.take(event)
        for name, view in record.steps.items():
            if event.kind != "workflow_resumed" and view.state is not before[name].state:
                assert view.state in STEP_TRANSITIONS[before[name].state]


def test_a_held_optional_step_holds_whatever_required_step_waits_for_it() -> None:
    spec = steps(step("a", required=False), step("b", "a"), step("c", required=False))
    held = {"a": StepState.NEEDS_ORCHESTRATOR, "b": StepState.HELD, "c": StepState.READY}
    views = {
        name: StepView(name, state, reason="dependency_not_checkpoint_ready" if name == "b" else "")
        for name, state in held.items()
    }
    assert derive_workflow(spec, views, is_over=True) is WorkflowState.HELD
    views["c"], views["a"] = StepView("c", StepState.HELD), StepView("a", StepState.FAILED)
    assert derive_workflow(spec, views, is_over=True) is WorkflowState.FAILED, "nobody needs c"
    assert derive_workflow(spec, views, is_over=False) is WorkflowState.RUNNING

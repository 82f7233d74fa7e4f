"""The table of a subagent's states: what is in it happens, what is not is refused and changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.conversation import SubagentEvent
from treenail.conversation.events import TOLD_SUBAGENT_EVENTS
from treenail.errors import IllegalMoveError, UsageError
from treenail.subagents import SubagentStatus
from treenail.subagents import states as table
from treenail.subagents.states import TRANSITIONS

S = SubagentStatus
MOVES = [(here, to) for here, goals in TRANSITIONS.items() for to in sorted(goals, key=str)]
FULL = SubagentEvent(
    "",
    "worker-1",
    "a-session",
    "worker",
    "a task",
    "",
    timeout_ms=1_000,
    elapsed_ms=7,
    reason="a reason",
    next_actions=("do something",),
    summary="an answer",
)


def leading_to(status: SubagentStatus) -> SubagentEvent:
    return replace(FULL, event=table.EVENT_NAMES[status], status=status.value)


def test_every_state_has_a_row_and_a_name() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set(table.EVENT_NAMES) == set(S)
    assert set(table.EVIDENCE) == {each for each in S if each.is_terminal}


def test_the_table_is_the_one_that_the_file_opens_with() -> None:
    """The theory of operation shows the same moves as the data."""
    assert table.__doc__ is not None
    shown: dict[str, set[str]] = {}
    for line in table.__doc__.splitlines():
        row = re.fullmatch(r"    (\w+) +([a-z_, -]+?)( \(.*\).*)?", line)
        if row is not None and row.group(1) in set(S):
            rest = re.sub(r"\(.*?\)", "", line.strip().removeprefix(row.group(1)))
            shown[row.group(1)] = {each.strip() for each in rest.split(",") if each.strip() not in ("", "-")}
    assert shown == {here.value: {to.value for to in goals} for here, goals in TRANSITIONS.items()}


@pytest.mark.parametrize(("here", "to"), MOVES)
def test_a_move_of_the_table_is_made(here: SubagentStatus, to: SubagentStatus) -> None:
    assert table.apply_event(here, leading_to(to)) is to


@pytest.mark.parametrize(("here", "to"), [pair for pair in product(S, S) if pair not in MOVES])
def test_any_other_move_is_refused_and_says_what_is_possible(
    here: SubagentStatus, to: SubagentStatus
) -> None:
    with pytest.raises(IllegalMoveError) as refused:
        table.apply_event(here, leading_to(to))
    assert f"is {here} and cannot become {to}" in str(refused.value)
    for possible in TRANSITIONS[here]:
        assert possible in str(refused.value)


def test_a_subagent_begins_in_the_queue() -> None:
    assert table.apply_event(None, leading_to(S.QUEUED)) is S.QUEUED
    for other in set(S) - {S.QUEUED}:
        with pytest.raises(IllegalMoveError):
            table.apply_event(None, leading_to(other))


def test_detached_and_closed_are_final() -> None:
    assert {each for each in S if each.is_final} == {S.DETACHED, S.CLOSED}


@pytest.mark.parametrize(
    ("status", "lacks"), [(status, name) for status, names in table.EVIDENCE.items() for name in names]
)
def test_no_ending_is_recorded_without_its_evidence(status: SubagentStatus, lacks: str) -> None:
    event = leading_to(status)
    empty = replace(event, **{lacks: () if lacks == "next_actions" else None})
    here = S.QUEUED if status is S.CLOSED else S.RUNNING
    assert table.apply_event(here, event) is status
    with pytest.raises(UsageError, match=lacks):
        table.apply_event(here, empty)


def test_a_child_that_has_nothing_to_show_has_not_completed() -> None:
    with pytest.raises(UsageError, match="summary"):
        table.apply_event(S.RUNNING, replace(leading_to(S.COMPLETED), summary=""))
    left = replace(leading_to(S.COMPLETED), summary="", artifacts=("a-diff",))
    assert table.apply_event(S.RUNNING, left) is S.COMPLETED


@given(st.sampled_from(list(S)), st.sampled_from(sorted(table.REMARKS)))
def test_a_remark_changes_no_state(here: SubagentStatus, name: str) -> None:
    remark = replace(FULL, event=name, status=here.value)
    assert table.apply_event(here, remark) is here
    other = next(each for each in S if each is not here)
    with pytest.raises(UsageError):
        table.apply_event(other, remark)


def test_the_parent_s_model_is_told_of_four_endings_and_of_nothing_else() -> None:
    """Completed, failed, timed out and cancelled are told; queues, starts, detached and closed are audit."""
    told = {S.COMPLETED, S.FAILED, S.TIMED_OUT, S.CANCELLED}
    assert {each for each in S if table.EVENT_NAMES[each] in TOLD_SUBAGENT_EVENTS} == told
    assert not table.REMARKS & set(TOLD_SUBAGENT_EVENTS)

"""After a crash: what the logs say about a child decides what becomes of it."""

from __future__ import annotations

from uuid import UUID

import pytest
from subagents_kit import Doors, WaitingProvider, evidence, parent, saying, subagents, told, until

from treenail.clock import new_id
from treenail.conversation import SubagentEvent
from treenail.state import ExecutionState, Session
from treenail.subagents import Allowance, SubagentStatus
from treenail.subagents.events import SubagentCharter
from treenail.testing import FakeClock
from treenail.turns.ledger import ledger_of

pytestmark = pytest.mark.anyio
S = SubagentStatus


def left_running(state: ExecutionState, *, agent: str = "worker", mode: str = "shared") -> UUID:
    """Write what a process leaves behind that died while a child was at work."""
    child = new_id()
    for name, status in (("queued", "queued"), ("started", "running")):
        state.session.dispatch(
            SubagentEvent(
                name, f"{agent}-1", str(child), agent, "do it", status, workspace_mode=mode, timeout_ms=60_000
            )
        )
    return child


def make_session(state: ExecutionState, child: UUID) -> None:
    log = state.session.log
    log.create(child, created_at=state.clock.now(), parent_id=state.session.session_id)
    with Session.open(log, child) as session:
        session.dispatch(SubagentCharter("worker-1"))


async def test_one_that_was_cut_off_before_its_first_turn_takes_it_up_now() -> None:
    state = parent()
    make_session(state, left_running(state))
    async with subagents(state, saying("done")) as s:
        assert (await s.wait()).results == {"worker-1": "done"}
    assert told(state) == ["queued", "started", "reattached", "finished"]


async def test_one_that_somebody_else_is_writing_is_detached() -> None:
    state = parent()
    child = left_running(state)
    make_session(state, child)
    with Session.open(state.session.log, child):
        async with subagents(state, saying("done")) as s:
            outcome = await s.wait()
    assert outcome.buckets["detached"] == ("worker-1",)
    assert outcome.status == "partial"
    assert "somebody else is writing" in evidence(state)[-1].reason
    assert any(str(child) in each for each in evidence(state)[-1].next_actions)


async def test_one_whose_log_is_gone_is_detached() -> None:
    state = parent()
    left_running(state)
    async with subagents(state, saying("done")) as s:
        assert s.get("worker-1").status is S.DETACHED
    assert "cannot be opened" in evidence(state)[-1].reason


async def test_one_whose_copy_was_in_memory_is_detached() -> None:
    state = parent()
    make_session(state, left_running(state, mode="isolated"))
    async with subagents(state, saying("done")) as s:
        assert s.get("worker-1").status is S.DETACHED
    assert "in the memory of the process that died" in evidence(state)[-1].reason


async def test_one_that_was_to_be_cancelled_is_cancelled_now() -> None:
    state = parent()
    child = left_running(state)
    make_session(state, child)
    state.session.dispatch(
        SubagentEvent(
            "cancel_requested", "worker-1", str(child), "worker", "do it", "running", reason="not needed"
        )
    )
    async with subagents(state, saying("done")) as s:
        assert s.get("worker-1").status is S.CANCELLED
    assert evidence(state)[-1].reason == "not needed"


async def test_one_that_had_ended_is_believed_its_own_log_and_not_run_again() -> None:
    state = parent()
    first = parent(state.session.log)
    async with subagents(first, saying("the answer")) as s:
        child = s.spawn("worker", "do it")
        await s.wait()
    # The same child, in a log that does not know yet how it ended.
    for each in evidence(first)[:2]:
        state.session.dispatch(each)
    head = state.session.log.info(child.session_id).head
    async with subagents(state, saying("another answer")) as s:
        assert s.get(child.id).status is S.COMPLETED
        assert s.get(child.id).summary == "the answer"
    assert state.session.log.info(child.session_id).head == head
    assert told(state) == ["queued", "started", "finished"]


async def timed_out_before_a_crash(state: ExecutionState, *, knows_its_calls: bool) -> SubagentEvent:
    """Let a child run out of time elsewhere; return what a log says of it that does not know its end yet."""
    clock = FakeClock()
    first, doors = parent(state.session.log, clock=clock), Doors()
    async with subagents(first, WaitingProvider(doors, ["never"])) as s:
        s.spawn("worker", "slow", allowance=Allowance(timeout_s=30))
        await until(lambda: doors.waiting == ["slow"])
        clock.advance(30)
        await s.wait()
    for each in (*evidence(first)[:2], *(ledger_of(first.session) if knows_its_calls else ())):
        state.session.dispatch(each)
    async with subagents(state, saying("another answer")):
        return evidence(state)[-1]


async def test_how_long_one_ran_that_timed_out_before_a_crash_is_a_lower_bound() -> None:
    """The ledger saw it run for that long; the process that knew it better is gone."""
    end = await timed_out_before_a_crash(parent(), knows_its_calls=True)
    assert (end.status, end.elapsed_ms) == ("timed_out", 30_000)
    assert "at least 30000 ms" in end.reason


async def test_how_long_one_ran_that_nobody_saw_run_is_not_invented() -> None:
    end = await timed_out_before_a_crash(parent(), knows_its_calls=False)
    assert (end.status, end.elapsed_ms) == ("timed_out", None)
    assert "not known" in end.reason


async def test_one_that_waited_in_the_queue_keeps_what_it_was_allowed() -> None:
    state = parent()
    child = str(new_id())
    state.session.dispatch(
        SubagentEvent(
            "queued",
            "worker-1",
            child,
            "worker",
            "do it",
            "queued",
            timeout_ms=30_000,
            max_steps=3,
            max_cost_usd=0.25,
        )
    )
    async with subagents(state, saying("done")) as s:
        allowed = s.get("worker-1").allowance
        assert (allowed.timeout_s, allowed.max_steps, allowed.max_cost_usd) == (30, 3, 0.25)
        assert (await s.wait()).complete

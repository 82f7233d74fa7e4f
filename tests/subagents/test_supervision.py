"""Subagents under supervision: what is promised about them is read from the log."""

from __future__ import annotations

import anyio
import pytest
from subagents_kit import (
    ASSISTANT,
    WORKER,
    Doors,
    WaitingProvider,
    evidence,
    parent,
    saying,
    subagents,
    told,
    until,
    write_note,
)
from tests.delegates import PassesOn

from treenail import Agent, tool
from treenail.containment import ExecutionContext, Limits
from treenail.conversation import get_inner_messages, replay
from treenail.errors import IllegalMoveError, ModelCallError, SessionNotFoundError, UsageError
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, Session
from treenail.subagents import Allowance, SubagentLimits, Subagents, SubagentStatus
from treenail.subagents.limits import narrow
from treenail.subagents.runner import ChildRun
from treenail.testing.clock import FakeClock
from treenail.tools import PermissionMode, Permissions, ToolCall, ToolContext, ToolRunner, answer_hold
from treenail.turns import ModelAdapter, TurnResult, TurnState, contain, turn_state

pytestmark = pytest.mark.anyio
S = SubagentStatus


# --- the good case ------------------------------------------------------------------------------------


async def test_a_child_works_in_a_session_of_its_own_and_its_answer_comes_back() -> None:
    state = parent()
    async with subagents(
        state, saying(Answer("", [("write_note", {"path": "a", "text": "b"})]), "noted")
    ) as s:
        child = s.spawn("worker", "write a note")
        outcome = await s.wait()
    assert outcome.complete
    assert outcome.results == {child.id: "noted"}
    assert told(state) == ["queued", "started", "finished"]
    end = evidence(state)[-1]
    assert (end.summary, end.status, end.child_session_id) == ("noted", "completed", str(child.session_id))
    assert end.elapsed_ms is not None
    assert type(end.status) is str, "a log must not need the class that wrote it"
    own = Session.open(state.session.log, child.session_id, read_only=True)
    assert own.parent_id == state.session.session_id
    assert [each.role for each in get_inner_messages(own)] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert get_inner_messages(state.session) == ()


async def test_a_provider_that_passes_requests_on_works_like_the_one_behind_it() -> None:
    async with subagents(parent(), PassesOn(saying("noted"))) as s:
        child = s.spawn("worker", "say something")
        assert (await s.wait()).results == {child.id: "noted"}


async def test_nothing_exists_of_a_child_before_its_start_is_in_the_log() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["done"]), limits=SubagentLimits(max_threads=1)) as s:
        first = s.spawn("worker", "first")
        second = s.spawn("worker", "second")
        await until(lambda: doors.waiting == ["first"])
        assert told(state, second.id) == ["queued"]
        with pytest.raises(SessionNotFoundError):
            state.session.log.info(second.session_id)
        assert told(state, first.id) == ["queued", "started"]
        doors.open("first", "second")
        await s.wait()


async def test_children_start_in_the_order_in_which_they_came_and_never_too_many() -> None:
    state = parent()
    doors = Doors()
    names = [f"t{number}" for number in range(12)]
    async with subagents(state, WaitingProvider(doors, ["done"]), limits=SubagentLimits(max_threads=3)) as s:
        for name in names:
            s.spawn("worker", name)
        for step in range(12):
            await until(lambda step=step: len(doors.waiting) == min(step + 3, 12))
            running = [each for each in s.children if each.status is S.RUNNING]
            assert len(running) <= 3
            doors.open(names[step])
        outcome = await s.wait()
    assert outcome.counts["completed"] == 12
    assert doors.waiting == names


# --- waiting ------------------------------------------------------------------------------------------


async def test_a_wait_is_no_success_because_a_child_exists() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["done"])) as s:
        assert (await s.wait()).status == "incomplete"
        one, two = s.spawn("worker", "one"), s.spawn("worker", "two")
        seen = await s.wait(timeout_s=0)
        assert (seen.status, seen.complete, seen.partial) == ("incomplete", False, False)
        assert seen.buckets["incomplete"] == (one.id, two.id)
        assert seen.next_actions
        doors.open("one")
        first = await s.wait(until="any")
        assert first.status == "incomplete"
        assert first.results == {one.id: "done"}
        await s.cancel(two.id)
        last = await s.wait()
    assert (last.status, last.partial) == ("partial", True)
    assert last.buckets["cancelled"] == (two.id,)


async def test_a_wait_ends_with_its_time_and_says_what_is_known() -> None:
    clock = FakeClock()
    state = parent(clock=clock)
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["done"])) as s:
        child = s.spawn("worker", "slow")
        seen = []

        async def wait() -> None:
            seen.append(await s.wait(timeout_s=5))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: doors.waiting == ["slow"])
            clock.advance(5)
        assert seen[0].buckets["incomplete"] == (child.id,)
        assert seen[0].observed_at == clock.now()
        with pytest.raises(UsageError, match="no subagent 'nobody'"):
            await s.wait(["nobody"])


# --- endings ------------------------------------------------------------------------------------------


async def test_a_child_that_fails_leaves_its_reason() -> None:
    state = parent()
    broken = ModelCallError("the key is wrong", kind="authentication")
    async with subagents(state, saying(Answer("", error=broken))) as s:
        child = s.spawn("worker", "try")
        await s.wait()
    end = evidence(state)[-1]
    assert (end.event, end.status) == ("failed", "failed")
    assert "the key is wrong" in end.reason
    assert end.next_actions
    assert child.error_kind == "authentication"


@pytest.mark.parametrize("said", ["", "  \n"])
async def test_a_child_without_an_answer_has_not_completed(said: str) -> None:
    """Its turn may have ended well; there is nothing that its parent could use. It can be asked again."""
    state = parent()
    async with subagents(state, saying(said, "now I say it")) as children:
        child = children.spawn("worker", "be silent")
        outcome = await children.wait()
        assert (child.status, child.turn_state) == (S.FAILED, TurnState.COMPLETED)
        assert outcome.status == "partial"
        assert "without an answer" in child.reason
        assert "asks for its answer" in child.next_actions[0]
        children.send(child.id, "What came of it?")
        outcome = await children.wait()
        assert outcome.results == {child.id: "now I say it"}
    assert told(state, child.id) == ["queued", "started", "failed", "input", "started", "finished"]


# --- detached -----------------------------------------------------------------------------------------


async def test_a_detached_child_continues_by_itself_and_is_no_longer_waited_for() -> None:
    """Its parent's log says so; how it ends is in its own."""
    state, doors = parent(), Doors()
    async with subagents(state, WaitingProvider(doors, ["done alone"])) as children:
        child = children.spawn("worker", "slow work", workspace="isolated")
        other = children.spawn("worker", "fast work")
        await until(lambda: sorted(doors.waiting) == ["fast", "slow"])
        assert children.detach(child.id, "no longer needed here").status is S.DETACHED
        with pytest.raises(UsageError, match="by itself"), children.copy_of(child.id):
            pass
        doors.open("fast")
        outcome = await children.wait()
        assert outcome.buckets["detached"] == (child.id,)
        assert outcome.results == {other.id: "done alone"}
        for refused in (lambda: children.send(child.id, "more"), lambda: children.close(child.id)):
            with pytest.raises(IllegalMoveError):
                refused()
        with pytest.raises(IllegalMoveError):
            children.detach(child.id)
        assert (await children.cancel(child.id)).status is S.DETACHED
        doors.open("slow")
        await until(lambda: child.turn_state is TurnState.COMPLETED)
    assert told(state, child.id) == ["queued", "started", "detached"]
    ended = evidence(state, child.id)[-1]
    assert (ended.reason, bool(ended.next_actions)) == ("no longer needed here", True)
    with Session.open(state.session.log, child.session_id, read_only=True) as own:
        assert get_inner_messages(own)[-1].content == "done alone"


async def test_leaving_interrupts_a_detached_child_in_its_own_log_so_that_it_can_be_resumed() -> None:
    state, doors = parent(), Doors()
    async with subagents(state, WaitingProvider(doors, ["never"])) as children:
        child = children.spawn("worker", "slow work")
        await until(lambda: doors.waiting == ["slow"])
        children.detach(child.id)
    assert told(state, child.id) == ["queued", "started", "detached"]
    with Session.open(state.session.log, child.session_id) as own:
        assert turn_state(own) is TurnState.INTERRUPTED
        again = ModelAdapter(saying("finished later")).evaluate
        prompt = WORKER.prompt
        answer = await anyio.to_thread.run_sync(lambda: again(prompt, session=own, resume=True))
        assert answer.text == "finished later"


async def test_what_has_not_begun_cannot_be_detached() -> None:
    doors = Doors()
    limits = SubagentLimits(max_threads=1)
    async with subagents(parent(), WaitingProvider(doors, ["a"]), limits=limits) as children:
        children.spawn("worker", "first work")
        second = children.spawn("worker", "second work")
        with pytest.raises(UsageError, match="not begun"):
            children.detach(second.id)
        assert second.status is S.QUEUED


async def test_a_child_that_is_too_slow_times_out_with_the_seed_s_evidence() -> None:
    clock = FakeClock()
    state = parent(clock=clock)
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["never"])) as s:
        child = s.spawn("worker", "slow", allowance=Allowance(timeout_s=30))
        await until(lambda: doors.waiting == ["slow"])
        clock.advance(30)
        outcome = await s.wait()
    assert outcome.buckets["timed_out"] == (child.id,)
    end = evidence(state)[-1]
    assert (end.event, end.timeout_ms, end.child_session_id) == ("timed_out", 30_000, str(child.session_id))
    assert end.elapsed_ms is not None
    assert end.elapsed_ms >= 30_000
    assert end.reason
    assert end.next_actions
    assert child.turn_state is TurnState.TIMED_OUT


async def test_a_cancelled_child_says_who_wanted_it() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["never"])) as s:
        child = s.spawn("worker", "slow")
        await until(lambda: bool(doors.waiting))
        await s.cancel(child.id, "not needed any more")
        assert child.status is S.CANCELLED
        await s.cancel(child.id, "again")
    assert told(state) == ["queued", "started", "cancel_requested", "cancelled"]
    assert evidence(state)[-1].reason == "not needed any more"


async def test_cancelling_what_has_not_begun_closes_it() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["x"]), limits=SubagentLimits(max_threads=1)) as s:
        s.spawn("worker", "first")
        second = s.spawn("worker", "second")
        await until(lambda: bool(doors.waiting))
        await s.cancel(second.id, "changed my mind")
        assert second.status is S.CLOSED
        assert evidence(state, second.id)[-1].reason == "closed_before_start: changed my mind"
        with pytest.raises(IllegalMoveError):
            s.send(second.id, "come back")
        doors.open("first")
        await s.wait()
    assert doors.waiting == ["first"]


async def test_leaving_cancels_what_runs_and_closes_what_waits() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["x"]), limits=SubagentLimits(max_threads=1)) as s:
        first, second = s.spawn("worker", "first"), s.spawn("worker", "second")
        await until(lambda: bool(doors.waiting))
    assert told(state, first.id)[-1] == "cancelled"
    assert told(state, second.id) == ["queued", "closed"]
    with pytest.raises(UsageError, match="need supervision"):
        s.spawn("worker", "late")


async def test_a_cancelled_parent_leaves_evidence_of_its_children() -> None:
    state = parent()
    doors = Doors()
    with anyio.CancelScope() as scope:
        async with subagents(state, WaitingProvider(doors, ["x"])) as s:
            s.spawn("worker", "first")
            await until(lambda: bool(doors.waiting))
            scope.cancel()
            await anyio.sleep_forever()
    assert told(state)[-1] == "cancelled"


async def test_a_child_that_dies_of_a_bug_has_failed() -> None:
    class Broken:
        async def run(self, run: ChildRun) -> TurnResult:
            raise RuntimeError("a bug")

    class Lying:
        async def run(self, run: ChildRun) -> TurnResult:
            return TurnResult(TurnState.COMPLETED, "all done, believe me")

    for runner, said in ((Broken(), "a bug"), (Lying(), "no ending")):
        state = parent()
        async with Subagents(state, [WORKER], runner=runner) as s:
            child = s.spawn("worker", "try")
            assert (await s.wait()).status == "partial"
        assert child.status is S.FAILED
        assert said in evidence(state)[-1].reason


async def test_a_child_whose_call_waits_for_a_person_goes_on_when_it_is_answered() -> None:
    state = parent()
    script = saying(Answer("", [("write_note", {"path": "a", "text": "b"})]), "noted")
    async with subagents(state, script, permissions=Permissions(PermissionMode.ASK)) as s:
        child = s.spawn("worker", "write")
        await s.wait()
        assert (child.status, child.turn_state) == (S.FAILED, TurnState.HELD)
        assert child.reason.startswith("held")
        with Session.open(state.session.log, child.session_id) as own:
            answer_hold(own, "call_1_1", approved=True)
        s.resume(child.id)
        outcome = await s.wait()
    assert outcome.results == {child.id: "noted"}
    assert told(state) == ["queued", "started", "failed", "started", "finished"]


# --- a parent that is busy ----------------------------------------------------------------------------


async def test_what_children_do_is_recorded_while_the_parent_is_in_a_call_and_survives_its_rollback() -> None:
    """A tool call of the parent that fails takes back its own state and nothing of its children."""
    state = parent()
    seen: list[list[str]] = []
    async with subagents(state, saying("done")) as s:

        @tool
        async def busy(*, context) -> str:
            """Start a child, and fail when it has ended."""
            context.filesystem.write("mine", "x")
            s.spawn("assistant", "think", workspace="read_only")
            await s.wait()
            seen.append(told(state))
            raise RuntimeError("and now I fail")

        result = await ToolRunner(state, {"busy": busy}).aexecute(ToolCall("c1", "busy"))
    assert not result.success
    assert seen == [["queued", "started", "finished"]]
    assert told(state) == ["queued", "started", "finished"]
    assert not ToolContext(state).filesystem.exists("mine")


async def test_a_child_outlives_the_call_that_asked_for_it() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["done"])) as s:

        @tool(effects="none")
        async def start(*, context) -> str:
            """Start a child."""
            return s.spawn("worker", "later").id

        result = await ToolRunner(state, {"start": start}).aexecute(ToolCall("c1", "start"))
        doors.open("later")
        outcome = await s.wait([result.message])
    assert outcome.complete


async def test_shared_effects_come_one_after_the_other() -> None:
    """Two children and their parent never hold the workspace at once, and each call is whole."""
    state = parent()
    inside: list[str] = []
    most = [0]

    @tool
    async def count_up(name: str, *, context: ToolContext) -> str:
        """Add one to the number in the file."""
        inside.append(name)
        most[0] = max(most[0], len(inside))
        value = int(context.filesystem.read("n").content) if context.filesystem.exists("n") else 0
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        context.filesystem.write("n", str(value + 1))
        inside.remove(name)
        return "ok"

    counter = Agent("counter", tools=(count_up,), retry=None)
    calls = [("count_up", {"name": "child"})] * 5
    async with subagents(state, saying(Answer("", calls), "done"), agents=[counter]) as s:
        for _ in range(4):
            s.spawn("counter", "count")
        runner = ToolRunner(state, {"count_up": count_up})
        for number in range(5):
            await runner.aexecute(ToolCall(f"p{number}", "count_up", {"name": "parent"}))
        outcome = await s.wait()
        assert outcome.complete
        read = ToolContext(state).filesystem.read("n").content
    assert read == "25"
    assert most == [1]


# --- more than one turn -------------------------------------------------------------------------------


async def test_a_child_that_is_sent_more_goes_on_in_the_same_session() -> None:
    state = parent()
    async with subagents(state, saying("first answer", "second answer")) as s:
        child = s.spawn("worker", "first")
        await s.wait()
        s.send(child.id, "second")
        assert s.poll().status == "incomplete"
        outcome = await s.wait()
    assert outcome.results == {child.id: "second answer"}
    assert told(state) == ["queued", "started", "finished", "input", "started", "finished"]


async def test_a_child_at_work_reads_what_it_is_sent_when_it_is_done() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["one", "two"])) as s:
        child = s.spawn("worker", "first")
        await until(lambda: doors.waiting == ["first"])
        s.send(child.id, "second")
        doors.open("first", "second")
        outcome = await s.wait()
    assert outcome.results == {child.id: "two"}
    assert told(state) == ["queued", "started", "input", "finished"]


def test_a_wish_is_narrowed_to_the_operator_s_word_and_that_is_said() -> None:
    limits = SubagentLimits(timeout_s=60, budget=Limits(max_steps=10, max_cost_usd=0.5))
    granted, notes = narrow(limits, Allowance(timeout_s=600, max_steps=3, max_cost_usd=2))
    assert granted == Allowance(timeout_s=60, max_steps=3, max_cost_usd=0.5)
    assert len(notes) == 2
    assert "timeout_s was narrowed from 600 s to 60 s" in notes[0]
    assert "max_cost_usd was narrowed from 2 USD to 0.5 USD" in notes[1]
    assert narrow(limits, Allowance())[0] == Allowance(timeout_s=60, max_steps=10, max_cost_usd=0.5)


async def test_the_number_and_the_depth_of_children_are_limited() -> None:
    state = parent()
    async with subagents(state, saying("x"), limits=SubagentLimits(max_children=2)) as s:
        s.spawn("worker", "one")
        s.spawn("worker", "two")
        with pytest.raises(UsageError, match="which is the limit"):
            s.spawn("worker", "three")
        with pytest.raises(UsageError, match="there are: assistant, worker"):
            s.spawn("nobody", "x")
        await s.wait()
    async with subagents(parent(), saying("x"), depth=1) as s:
        with pytest.raises(UsageError, match="depth 1"):
            s.spawn("worker", "deeper")
        assert s.children == ()


async def test_children_may_have_children_as_deep_as_the_operator_allows() -> None:
    state = parent()
    depths: list[tuple[int, bool]] = []

    class Nesting:
        async def run(self, run: ChildRun) -> TurnResult:
            depths.append((run.depth, bool(run.extra_tools)))
            return TurnResult(TurnState.FAILED, "", "test", "no turn was run")

    async with Subagents(state, [WORKER], runner=Nesting(), limits=SubagentLimits(max_depth=2)) as s:
        s.spawn("worker", "x")
        await s.wait()
    async with Subagents(
        state, [WORKER], runner=Nesting(), limits=SubagentLimits(max_depth=2, max_children=9), depth=1
    ) as s:
        s.spawn("worker", "y")
        await s.wait()
    assert depths == [(1, True), (2, False)]


async def test_children_spend_from_their_parent_s_budget() -> None:
    state = parent()
    containment = contain(state.session, Limits(max_steps=3))
    async with subagents(state, saying("done"), containment=containment) as s:
        for _ in range(5):
            s.spawn("assistant", "think")
        outcome = await s.wait()
    assert outcome.counts["completed"] == 3
    assert outcome.counts["failed"] == 2
    assert containment.get_snapshot().step_count == 3
    reasons = [each.reason for each in evidence(state) if each.event == "failed"]
    assert all("limits" in each for each in reasons)


async def test_a_child_s_own_ceiling_ends_the_child_alone() -> None:
    state = parent()
    containment = contain(state.session, Limits(max_steps=100))
    calls = [Answer("", [("read_note", {"path": "x"})])] * 5
    async with subagents(state, saying(*calls, "done"), containment=containment) as s:
        child = s.spawn("worker", "look", allowance=Allowance(max_steps=2))
        await s.wait()
        other = s.spawn("assistant", "look")
        assert other.status is S.QUEUED
        await s.wait()
    assert child.status is S.FAILED
    assert child.error_kind == "step_limit_exceeded"
    assert containment.stop_reason is None


async def test_aborting_the_parent_s_containment_reaches_its_children() -> None:
    state = parent()
    containment = ExecutionContext(Limits(max_steps=100))
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["x"]), containment=containment) as s:
        child = s.spawn("worker", "slow")
        await until(lambda: bool(doors.waiting))
        containment.abort("the operator pulled the plug")
        await s.wait()
    assert child.status is S.CANCELLED
    assert "plug" in child.reason


# --- what the parent's model is told ------------------------------------------------------------------


async def test_endings_enter_the_parent_s_replay_and_the_rest_stays_audit() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["the answer"])) as s:
        s.spawn("worker", "first")
        before = replay(state.session).items
        doors.open("first")
        await s.wait()
        doors2 = s.spawn("worker", "second")
        await until(lambda: doors.waiting[-1] == "second")
        during = replay(state.session).items
        await s.cancel(doors2.id, "enough")
    after = replay(state.session).items
    assert before == ()
    assert len(during) == 1
    assert "the answer" in during[0].text
    assert after[: len(during)] == during
    assert len(after) == 2
    assert "enough" in after[1].text


def test_two_agents_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two agents"):
        subagents(parent(), saying(), agents=[WORKER, Agent("worker", tools=(write_note,))])
    assert ASSISTANT.name != WORKER.name


# --- going on -----------------------------------------------------------------------------------------


async def test_supervision_that_begins_again_knows_everybody_and_runs_nobody_twice() -> None:
    state = parent()
    async with subagents(state, saying("first", "second")) as s:
        child = s.spawn("worker", "one")
        await s.wait()
    before = state.session.log.info(child.session_id).head
    async with subagents(state, saying("first", "second")) as s:
        again = s.get(child.id)
        assert (again.status, again.summary, again.session_id) == (S.COMPLETED, "first", child.session_id)
        assert (await s.wait()).complete
        assert state.session.log.info(child.session_id).head == before
        s.send(child.id, "two")
        assert (await s.wait()).results == {child.id: "second"}
        assert s.spawn("worker", "three").id == "worker-2"
        await s.wait()


async def test_what_a_child_may_do_is_never_widened_later() -> None:
    """A child that had to ask goes on asking, also under supervision that would not."""
    state = parent()
    script = saying(Answer("", [("write_note", {"path": "a", "text": "b"})]), "noted")
    async with subagents(state, script, permissions=Permissions(PermissionMode.ASK)) as s:
        child = s.spawn("worker", "write")
        await s.wait()
    async with subagents(state, script) as s:
        s.resume(child.id)
        await s.wait()
        assert s.get(child.id).turn_state is TurnState.HELD
    assert not ToolContext(state).filesystem.exists("a")


async def test_a_fork_of_the_parent_leaves_the_children_to_the_original() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["done", "more"])) as s:
        done = s.spawn("worker", "quick")
        doors.open("quick")
        await s.wait()
        running = s.spawn("worker", "slow")
        await until(lambda: doors.waiting[-1] == "slow")
        twin = parent()
        fork = ExecutionState(state.session.fork(), twin.resources, twin.clock)
        async with subagents(fork, saying("x")) as other:
            assert other.get(running.id).status is S.DETACHED
            assert "forked from" in other.get(running.id).reason
            with pytest.raises(UsageError, match="forked from"):
                other.send(done.id, "more")
        doors.open("slow")
        assert (await s.wait()).complete
    assert told(state, running.id)[-1] == "finished"

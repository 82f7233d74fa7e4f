"""After a crash the log decides; and every boundary of a call can be gone back to, compared and forked from.

A crash is a process that stops: here the call is left where it was, and session and workspace are opened
again as another process would. `tests/crash` kills real processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from tools_kit import Note, World, begin, looks, mutate, succeeds

from treenail.codec import FrozenDict
from treenail.errors import HoldRequired, UsageError
from treenail.log import SlicePolicy
from treenail.state import Budget, BudgetTracker, ExecutionState, ResourceRegistry, Session, event
from treenail.tools import (
    PermissionMode,
    Permissions,
    ToolCall,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    answer_hold,
    boundaries,
    diff_calls,
    fork_at,
    pending_holds,
    recover,
    rollback_to_call,
    tool,
)
from treenail.tools.boundaries import RecoveredCall, boundary_of
from treenail.tools.events import OutboxPut
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

pytestmark = pytest.mark.timeout(120)


@event(name="tests.tools.Said", policy=SlicePolicy.LOG)
@dataclass(frozen=True)
class Said:
    """What stands for the tool's message: history, recorded with the call."""

    text: str


def crash_inside(world: World, one: Any, call_id: str = "c1") -> None:
    """Begin a call, do what it does, and stop there."""
    begun = begin(world.runner(one), one.name, call_id)
    with begun.transaction.active():
        mutate(begun.context)
    world.reopen()


# --- after a crash -----------------------------------------------------------------------------------


def test_a_call_that_was_cut_off_is_undone(world: World) -> None:
    before = world.facts()
    crash_inside(world, succeeds)
    assert recover(world.state) == (RecoveredCall("c1", "succeeds", "rolled_back"),)
    assert world.facts() == before
    assert world.session[OutboxPut].all() == ()
    (end,) = world.ends()
    assert (end.call_id, end.outcome, end.success) == ("c1", "interrupted", False)
    head = world.session.head
    assert recover(world.state) == (), "again is safe"
    assert world.session.head == head
    context = ToolContext(world.state, is_resume=True)
    assert world.runner(succeeds).execute(ToolCall("c1", "succeeds"), context=context).success
    assert world.files()["file.txt"] == "changed"


def test_a_call_that_was_committed_is_kept(world: World) -> None:
    """The crash came after the append and before the workspace let go of its undo information."""
    begun = begin(world.runner(succeeds), "succeeds")
    with begun.transaction.active():
        mutate(begun.context)
    assert begun.workspace is not None
    workspace = begun.workspace.prepare()
    begun.transaction.commit(
        ToolInvoked(
            prompt_name="",
            adapter="",
            name="succeeds",
            params=FrozenDict(),
            result=ToolResult.ok(message="done"),
            session_id=world.session.session_id,
            created_at=world.session.clock.now(),
            call_id="c1",
            attempt_id=begun.attempt_id,
            workspace=workspace,
        )
    )
    del begun
    world.reopen()
    assert recover(world.state) == (RecoveredCall("c1", "succeeds", "committed"),)
    assert world.files()["file.txt"] == "changed"
    assert world.notes() == ["before", "during"]
    assert recover(world.state) == ()


def test_the_next_call_recovers_by_itself(world: World) -> None:
    """Whoever forgets `recover` gets no half-done call either."""
    crash_inside(world, succeeds)
    assert world.run(looks, "c2").success
    assert world.run(succeeds, "c3").success
    assert [(each.call_id, each.outcome) for each in world.ends()] == [
        ("c2", "ok"),
        ("c1", "interrupted"),
        ("c3", "ok"),
    ]


def test_another_sessions_call_is_left_to_its_own_log(tmp_path: Path, world: World) -> None:
    """Only that log knows whether the call was committed."""
    crash_inside(world, succeeds)
    stranger = Session()
    state = ExecutionState(stranger, ResourceRegistry.build({Filesystem: world.filesystem}))
    assert recover(state) == ()
    refused = ToolRunner(state, {"succeeds": succeeds}).execute(ToolCall("c1", "succeeds"))
    assert not refused.success
    assert "could not begin: WorkspaceError" in refused.message
    assert [each.call_id for each in recover(world.state)] == ["c1"]
    assert ToolRunner(state, {"succeeds": succeeds}).execute(ToolCall("c2", "succeeds")).success


# --- outcome unknown ---------------------------------------------------------------------------------


def external(
    *, idempotent: bool = False, on_unknown: Literal["tell", "hold"] = "tell", ran: list[str]
) -> Any:
    @tool(effects="external", idempotent=idempotent, on_unknown=on_unknown)
    def pay(*, context: ToolContext) -> str:
        """Pay, outside."""
        ran.append(f"{context.call_id} {'again' if context.is_resume else 'first'}")
        return "paid"

    return pay


def resume(world: World, one: Any, **parts: Any) -> ToolResult[Any]:
    context = ToolContext(world.state, is_resume=True)
    return world.runner(one, **parts).execute(ToolCall("c1", "pay"), context=context)


def test_the_model_is_told_that_nobody_knows(world: World) -> None:
    """An external call that was cut off is not run again; the next call with that id is another one."""
    ran: list[str] = []
    pay = external(ran=ran)
    crash_inside(world, pay)
    assert recover(world.state) == (RecoveredCall("c1", "pay", "unknown"),)
    assert world.files() == {"file.txt": "original"}, "what was changed here is undone"
    result = resume(world, pay)
    assert not result.success
    assert "outcome of pay is unknown" in result.message
    assert (ran, world.outcomes()) == ([], ["unknown", "unknown"])
    assert resume(world, pay).success
    assert ran == ["c1 again"]


def test_an_idempotent_call_is_run_again(world: World) -> None:
    ran: list[str] = []
    pay = external(idempotent=True, ran=ran)
    crash_inside(world, pay)
    assert recover(world.state) == (RecoveredCall("c1", "pay", "rolled_back"),)
    assert resume(world, pay).success
    assert ran == ["c1 again"]


@pytest.mark.parametrize("approved", [True, False])
def test_a_person_decides_about_a_call_that_says_so(world: World, approved: bool) -> None:
    """Also if the call had been approved before it was cut off: that was another question."""
    ran: list[str] = []
    pay = external(on_unknown="hold", ran=ran)
    ask = Permissions(PermissionMode.ASK)
    with pytest.raises(HoldRequired):
        world.runner(pay, permissions=ask).execute(ToolCall("c1", "pay"))
    answer_hold(world.session, "c1", approved=True)
    begun = begin(world.runner(pay, permissions=ask), "pay")
    attempt_id = begun.attempt_id
    del begun
    world.reopen()
    recover(world.state)
    with pytest.raises(HoldRequired, match="it is unknown whether it took effect"):
        resume(world, pay)
    assert ran == []
    world.reopen()
    (held,) = pending_holds(world.session)
    assert held.attempt_id == attempt_id
    answer_hold(world.session, "c1", approved=approved)
    assert resume(world, pay).success is approved
    assert ran == (["c1 again"] if approved else [])


# --- boundaries --------------------------------------------------------------------------------------


@tool
def write(name: str, fail: bool = False, *, context: ToolContext) -> ToolResult[Note]:
    """Write a file and take a note."""
    context.filesystem.write(f"{name}.txt", f"{name}\n")
    if fail:
        raise ValueError("no")
    return ToolResult.ok(Note(name))


@tool(effects="none")
def learn(name: str, *, context: ToolContext) -> ToolResult[Note]:
    """Take a note."""
    return ToolResult.ok(Note(name))


def story(world: World) -> ToolRunner:
    """Five calls: a, a look that learns, a failure, b, c."""
    runner = world.runner(write, learn)
    runner.execute(ToolCall("call_a", "write", {"name": "a"}), record=lambda result: (Said("a"),))
    runner.execute(ToolCall("call_l", "learn", {"name": "l"}), record=lambda result: (Said("l"),))
    runner.execute(ToolCall("call_x", "write", {"name": "x", "fail": True}))
    runner.execute(ToolCall("call_b", "write", {"name": "b"}), record=lambda result: (Said("b"),))
    runner.execute(ToolCall("call_c", "write", {"name": "c"}))
    return runner


STATES = {
    ("call_a", "before"): (["before"], set()),
    ("call_a", "after"): (["before", "a"], {"a"}),
    ("call_l", "before"): (["before", "a"], {"a"}),
    ("call_l", "after"): (["before", "a", "l"], {"a"}),
    ("call_x", "before"): (["before", "a", "l"], {"a"}),
    ("call_x", "after"): (["before", "a", "l"], {"a"}),
    ("call_b", "before"): (["before", "a", "l"], {"a"}),
    ("call_b", "after"): (["before", "a", "l", "b"], {"a", "b"}),
    ("call_c", "after"): (["before", "a", "l", "b", "c"], {"a", "b", "c"}),
}


def look_at(state: ExecutionState) -> tuple[list[str], set[str]]:
    filesystem = state.resources.get(Filesystem)  # type: ignore[type-abstract] # bound by its protocol
    assert filesystem is not None
    names = {each.path.removesuffix(".txt") for each in filesystem.glob("*.txt")} - {"file"}
    return [each.text for each in state.session[Note].all()], names


@pytest.mark.parametrize(("call_id", "side"), STATES)
def test_state_and_files_go_back_to_either_side_of_any_call(world: World, call_id: str, side: Any) -> None:
    """Also of a call without effects, and of one that failed; also in another process."""
    story(world)
    world.reopen()
    rollback_to_call(world.state, call_id, side=side)
    assert look_at(world.state) == STATES[call_id, side]
    assert len(world.ends()) == 5, "history stays"
    assert look_at(world.reopen().state) == STATES[call_id, side]


@pytest.mark.parametrize(("call_id", "side"), STATES)
def test_a_fork_continues_from_either_side_of_any_call(
    world: World, tmp_path: Path, call_id: str, side: Any
) -> None:
    """In a session and a workspace of its own: neither sees what the other does from then on."""
    story(world)
    place = tmp_path / "fork" if isinstance(world.filesystem, HostFilesystem) else None
    fork = fork_at(world.state, call_id, side=side, workspace=place)
    assert look_at(fork) == STATES[call_id, side]
    said = [each.text for each in fork.session[Said].all()]
    ended = {str(each.call_id) for each in fork.session[ToolInvoked].all()}
    assert said == [each for each in ("a", "l", "b") if f"call_{each}" in ended], "a call and its message"
    assert (call_id in ended) is (side == "after")
    runner = ToolRunner(fork, {"write": write})
    assert runner.execute(ToolCall("call_z", "write", {"name": "z"})).success
    assert look_at(fork)[1] == STATES[call_id, side][1] | {"z"}
    assert look_at(world.state) == STATES["call_c", "after"]
    assert world.run(succeeds, "c9").success


def test_a_fork_shares_what_holds_no_state_and_what_was_spent(small_world: World) -> None:
    class Client:
        """Something to talk to."""

    class Counter:
        def snapshot(self, *, tag: str | None = None) -> int:
            return 0

        def restore(self, snapshot: int) -> None:
            raise AssertionError("nothing to restore here")

    client, tracker = Client(), BudgetTracker(Budget(max_total_tokens=5))
    small_world.extra = {Client: client, BudgetTracker: tracker, Counter: Counter()}
    small_world.run(succeeds)
    fork = fork_at(small_world.state, "c1")
    assert fork.resources.get(Client) is client
    assert fork.resources.get(BudgetTracker) is tracker
    assert fork.resources.get(Counter, None) is None
    own = Counter()
    fork = fork_at(small_world.state, "c1", resources=ResourceRegistry.build({Counter: own}))
    assert fork.resources.get(Counter) is own


def test_the_difference_of_one_call_and_of_several(world: World) -> None:
    story(world)
    world.reopen() if isinstance(world.filesystem, HostFilesystem) else None
    one = diff_calls(world.state, "call_b")
    assert [(each.path, each.kind) for each in one.changes] == [("b.txt", "added")]
    assert "+b" in one.text
    several = diff_calls(world.state, "call_a", "call_b")
    assert [each.path for each in several.changes] == ["a.txt", "b.txt"]
    assert diff_calls(world.state, "call_x").changes == (), "a failed call changed nothing"
    assert diff_calls(world.state, "call_l").changes == ()


def test_boundaries_are_read_from_the_log(world: World) -> None:
    story(world)
    found = boundaries(world.reopen().session)
    assert [(each.call_id, each.tool_name, each.success) for each in found] == [
        ("call_a", "write", True),
        ("call_l", "learn", True),
        ("call_x", "write", False),
        ("call_b", "write", True),
        ("call_c", "write", True),
    ]
    for one, following in pairwise(found):
        assert one.seq_before < one.seq_after <= following.seq_before
    assert boundary_of(world.session, "call_b") == found[3]
    with pytest.raises(UsageError, match=r"no ended tool call 'call_q'.*call_c"):
        boundary_of(world.session, "call_q")


def test_a_call_that_left_the_workspace_alone_ended_where_it_began(world: World) -> None:
    """Its boundary is the one before it, and the calls after it begin there, too."""

    @tool
    def idle() -> str:
        """Change nothing, with the right to."""
        return "done"

    world.run(idle, "c1")
    world.run(idle, "c2")
    world.run(succeeds, "c3")
    world.run(idle, "c4")
    one, two, three, four = boundaries(world.reopen().session)
    assert one.before is not None
    assert one.after == one.before
    assert two.before is not None
    assert two.after == two.before
    assert two.before.commit_ref == one.before.commit_ref
    assert three.before is not None
    assert three.after is not None
    assert three.before.commit_ref == one.before.commit_ref
    assert four.before is not None
    assert four.before.commit_ref == three.after.commit_ref != three.before.commit_ref
    assert diff_calls(world.state, "c1", "c2").changes == ()
    assert "file.txt" in {each.path for each in diff_calls(world.state, "c3").changes}

"""Calls with effects run one at a time, in order; those without run side by side; nobody waits for ever."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tools_kit import Note, World, begin, end, looks, make_world, succeeds

from treenail.containment import CancellationToken
from treenail.errors import CancelledByToken, PromptEvaluationError, UsageError, VisibilityExpansionRequired
from treenail.state import Deadline, ExecutionState, ResourceRegistry, Session
from treenail.testing import FakeClock
from treenail.tools import Tool, ToolCall, ToolContext, ToolResult, ToolRunner, tool
from treenail.tools.gate import Gate, Ticket
from treenail.workspace import Filesystem

pytestmark = pytest.mark.timeout(120)
NOW = datetime(2026, 5, 1, tzinfo=UTC)


class Meter:
    """Counts how many are inside at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0
        self.order: list[str] = []

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1


def writing(meter: Meter) -> Tool[Any, Any]:
    def write(name: str, *, context: ToolContext) -> str:
        """Write a file and a note, and look who else is there."""
        with meter:
            meter.order.append(name)
            context.filesystem.write(f"{name}.txt", name)
            context.session.dispatch(Note(name))
            context.cancellation.wait(0.001)
        if name.startswith("bad"):
            raise ValueError(name)
        return name

    return Tool.wrap(write)


def test_threads_and_tasks_take_turns(world: World) -> None:
    """Twelve calls from threads and tasks at once: one at a time, each kept or undone by itself."""
    meter = Meter()
    runner = world.runner(writing(meter))
    names = [f"{'bad' if number % 3 == 0 else 'good'}{number}" for number in range(12)]

    def in_thread(name: str) -> None:
        runner.execute(ToolCall(name, "write", {"name": name}))

    async def in_task(name: str) -> None:
        await runner.aexecute(ToolCall(name, "write", {"name": name}))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number, name in enumerate(names):
                if number % 2:
                    group.start_soon(anyio.to_thread.run_sync, in_thread, name)
                else:
                    group.start_soon(in_task, name)

    anyio.run(main)
    good = {name for name in names if name.startswith("good")}
    assert meter.most == 1
    assert set(world.files()) == {"file.txt"} | {f"{name}.txt" for name in good}
    assert set(world.notes()) == {"before"} | good
    assert sorted(each.call_id for each in world.ends() if each.success) == sorted(good)
    assert len(world.ends()) == 12


def test_a_failing_call_never_erases_what_another_committed(world: World) -> None:
    """A call fails after others, without effects, have been committed beside it."""
    other = threading.Event()

    @tool(effects="none")
    def learns(text: str, *, context: ToolContext) -> ToolResult[Note]:
        """Learn something."""
        return ToolResult.ok(Note(text))

    @tool
    def fails_late(*, context: ToolContext) -> str:
        """Fail when the other call is done."""
        context.session.dispatch(Note("doomed"))
        assert other.wait(30)
        raise ValueError("late")

    runner = world.runner(learns, fails_late)
    results: list[ToolResult[Any]] = []
    slow = threading.Thread(target=lambda: results.append(runner.execute(ToolCall("slow", "fails_late"))))
    slow.start()
    runner.execute(ToolCall("quick", "learns", {"text": "kept"}))
    other.set()
    slow.join(30)
    assert [each.success for each in results] == [False]
    assert world.notes() == ["before", "kept"]
    assert world.reopen().notes() == ["before", "kept"]


def test_calls_without_effects_run_side_by_side(world: World) -> None:
    """Three that wait for each other come to an end, sync and async ones."""
    barrier = threading.Barrier(3, timeout=30)

    @tool(effects="none")
    def meets(*, context: ToolContext) -> str:
        """Wait for the others."""
        barrier.wait()
        return str(context.filesystem.read("file.txt").content)

    runner = world.runner(meets)
    calls = [ToolCall(f"c{number}", "meets") for number in range(3)]
    results = runner.execute_all(calls)
    assert [each.message for each in results] == ["original"] * 3
    assert sorted(str(each.call_id) for each in world.ends()) == ["c0", "c1", "c2"]


def test_the_calls_of_an_answer_run_in_order_where_order_matters(small_world: World) -> None:
    """Reads before a write see the old file, reads after it the new one."""

    @tool
    def write(content: str, *, context: ToolContext) -> str:
        """Write the file."""
        context.filesystem.write("file.txt", content)
        return "written"

    runner = small_world.runner(looks, write)
    recorded: list[tuple[str, str]] = []
    calls = [
        ToolCall("r1", "looks"),
        ToolCall("r2", "looks"),
        ToolCall("w1", "write", {"content": "one"}),
        ToolCall("r3", "looks"),
        ToolCall("w2", "write", {"content": "two"}),
        ToolCall("no", "nothing"),
    ]

    def record(call: ToolCall) -> Any:
        def make(result: ToolResult[Any]) -> tuple[object, ...]:
            recorded.append((call.id, result.message))
            return ()

        return make

    results = runner.execute_all(calls, record=record)
    assert [each.message for each in results[:5]] == ["original", "original", "written", "one", "written"]
    assert dict(recorded) == {call.id: result.message for call, result in zip(calls, results, strict=True)}


def test_a_call_that_raises_does_not_cut_off_those_beside_it(small_world: World) -> None:
    """They come to their end; what comes after is not run."""
    begun, raised = threading.Event(), threading.Event()

    @tool(effects="none")
    def opens(*, context: ToolContext) -> str:
        """Ask for a section."""
        assert begun.wait(30)
        raised.set()
        raise VisibilityExpansionRequired

    @tool(effects="none")
    def reads(*, context: ToolContext) -> str:
        """Read while the other raises."""
        begun.set()
        assert raised.wait(30)
        return "read"

    runner = small_world.runner(opens, reads, succeeds)
    with pytest.raises(VisibilityExpansionRequired):
        runner.execute_all([ToolCall("o", "opens"), ToolCall("r", "reads"), ToolCall("s", "succeeds")])
    assert {each.call_id: each.outcome for each in small_world.ends()} == {"o": "failed", "r": "ok"}


def test_waiting_is_fair(small_world: World) -> None:
    """Those who wait come in in the order in which they came."""
    meter, runner = Meter(), None
    runner = small_world.runner(writing(meter), succeeds)
    begun = begin(runner, "succeeds", "first")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(6):
                call = ToolCall(f"c{number}", "write", {"name": f"n{number}"})
                group.start_soon(runner.aexecute, call)
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            end(begun)

    anyio.run(main)
    assert meter.order == [f"n{number}" for number in range(6)]


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("why", ["token", "deadline"])
def test_whoever_waits_can_be_stopped(small_world: World, face: str, why: str) -> None:
    """By its token or its deadline, while another call is open; and the turn goes to the next one."""
    clock, token = FakeClock(NOW), CancellationToken()
    runner = small_world.runner(succeeds)
    begun = begin(runner, "succeeds", "first")
    deadline = Deadline(NOW + timedelta(seconds=30), clock=clock) if why == "deadline" else None
    context = ToolContext(small_world.state, cancellation=token, deadline=deadline)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            if face == "sync":
                runner.execute(ToolCall("second", "succeeds"), context=context)
            else:
                anyio.run(lambda: runner.aexecute(ToolCall("second", "succeeds"), context=context))
        except (CancelledByToken, PromptEvaluationError) as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    if why == "deadline":
        clock.wait_for_timers(1)
        clock.advance(31)
    else:
        token.cancel()
    waiting.join(30)
    assert [type(each) for each in caught] == [CancelledByToken if why == "token" else PromptEvaluationError]
    end(begun)
    assert small_world.run(succeeds, "third").success
    second = [each.outcome for each in small_world.ends() if each.call_id == "second"]
    assert second == ([] if why == "token" else ["timed_out"])


def test_a_task_that_is_cancelled_while_it_waits_leaves_the_queue(small_world: World) -> None:
    runner = small_world.runner(succeeds)
    begun = begin(runner, "succeeds", "first")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(runner.aexecute, ToolCall("second", "succeeds"))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        end(begun)
        assert (await runner.aexecute(ToolCall("third", "succeeds"))).success

    anyio.run(main)
    assert [each.call_id for each in small_world.ends()] == ["first", "third"]


def test_a_ticket_that_is_given_back_twice_lets_one_in() -> None:
    """Giving back can be repeated, also by one that never came in."""
    gate = Gate("it")
    first, second, third = Ticket(gate), Ticket(gate), Ticket(gate)
    assert first.take_nowait()
    assert not second.take_nowait()
    second.give_back()
    first.give_back()
    first.give_back()
    assert third.take_nowait()
    first.give_back()
    assert gate.holder is third
    assert not second.take_nowait()


# --- calls inside of calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("inner", ["succeeds", "looks"])
def test_a_call_inside_a_call_is_refused_and_never_waits_for_itself(
    world: World, face: str, inner: str
) -> None:
    runner: ToolRunner

    @tool
    def nests(*, context: ToolContext) -> str:
        """Run another tool through the runner."""
        runner.execute(ToolCall("inner", inner))
        return "never"

    @tool
    async def nests_async(*, context: ToolContext) -> str:
        """Run another tool through the runner."""
        await runner.aexecute(ToolCall("inner", inner), context=context)
        return "never"

    runner = world.runner(nests, nests_async, succeeds, looks)
    if face == "sync":
        result = runner.execute(ToolCall("outer", "nests"))
    else:
        result = anyio.run(runner.aexecute, ToolCall("outer", "nests_async"))
    assert not result.success
    assert "from inside the call outer" in result.message
    assert [each.call_id for each in world.ends()] == ["outer"]
    assert world.files() == {"file.txt": "original"}


def test_another_session_may_run_inside_a_call_but_not_on_the_same_workspace(small_world: World) -> None:
    child = Session(parent=small_world.session)
    shared = ExecutionState(child, ResourceRegistry.build({Filesystem: small_world.filesystem}))
    own = make_world("memory", "memory", None)  # type: ignore[arg-type] # nothing is on disk
    child_runner = ToolRunner(shared, {"succeeds": succeeds, "looks": looks})

    @tool
    def delegates(to: str, *, context: ToolContext) -> str:
        """Let another session do it."""
        if to == "own":
            return str(own.run(succeeds).message)
        return str(child_runner.execute(ToolCall("inner", to)).message)

    assert small_world.run(delegates, "c1", to="own").message == "done"
    assert small_world.run(delegates, "c2", to="looks").message == "original"
    refused = small_world.run(delegates, "c3", to="succeeds")
    assert not refused.success
    assert "would wait for the workspace" in refused.message


def test_sessions_that_share_a_workspace_take_turns(world: World) -> None:
    meter = Meter()
    other = Session()
    runners = [
        world.runner(writing(meter)),
        ToolRunner(
            ExecutionState(other, ResourceRegistry.build({Filesystem: world.filesystem})),
            {"write": writing(meter)},
        ),
    ]

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(8):
                call = ToolCall(f"c{number}", "write", {"name": f"n{number}"})
                group.start_soon(runners[number % 2].aexecute, call)

    anyio.run(main)
    assert meter.most == 1
    assert set(world.files()) == {"file.txt"} | {f"n{number}.txt" for number in range(8)}


def test_the_sync_face_refuses_to_block_an_event_loop(small_world: World) -> None:

    @tool
    async def naps(*, context: ToolContext) -> str:
        """Let others run."""
        await anyio.lowlevel.checkpoint()
        return "rested"

    runner = small_world.runner(naps, succeeds)

    async def main() -> None:
        with pytest.raises(UsageError, match="aexecute"):
            runner.execute(ToolCall("c1", "naps"))
        with pytest.raises(UsageError, match="would block the event loop"):
            runner.execute(ToolCall("c2", "succeeds"))
        assert await anyio.to_thread.run_sync(runner.execute, ToolCall("c3", "naps"))

    anyio.run(main)
    assert [each.call_id for each in small_world.ends()] == ["c3"]


def test_a_runtime_error_of_an_async_handler_is_its_own(small_world: World) -> None:
    """Also when the sync face drives it from a worker thread of an event loop."""

    @tool
    async def breaks(*, context: ToolContext) -> str:
        """Raise what an event loop could raise."""
        raise RuntimeError("mine")

    runner = small_world.runner(breaks)
    assert "RuntimeError: mine" in runner.execute(ToolCall("c1", "breaks")).message

    async def main() -> ToolResult[Any]:
        return await anyio.to_thread.run_sync(runner.execute, ToolCall("c2", "breaks"))

    assert "RuntimeError: mine" in anyio.run(main).message

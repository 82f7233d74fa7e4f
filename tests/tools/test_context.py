"""What a handler is given, and that it ends with the call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tools_kit import Note, World, looks, mutate, succeeds

from treenail.containment import CancellationToken
from treenail.errors import CancelledByToken, PromptEvaluationError, UsageError
from treenail.state import (
    Binding,
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    RunContext,
    Scope,
    Session,
)
from treenail.tools import ToolCall, ToolContext, ToolRunner, tool
from treenail.tools.events import OutboxPut
from treenail.workspace import Filesystem, InMemoryFilesystem

pytestmark = pytest.mark.timeout(120)


def test_a_handler_finds_everything_in_its_context(world: World) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=10))
    world.extra = {BudgetTracker: tracker}
    seen: dict[str, Any] = {}

    @tool
    def looks_around(*, context: ToolContext) -> str:
        """Look at every part."""
        seen.update(
            call_id=context.call_id,
            session=context.session == world.session,
            same_state=context.execution_state is context.state,
            tracker=context.budget_tracker,
            bound=context.resources.get(BudgetTracker),
            contains=BudgetTracker in context.resources,  # type: ignore[operator] # every kind has it
            unbound=context.resources.get(Session, None),
            is_resume=context.is_resume,
            deadline=context.deadline,
            run=context.run_context,
            prompt=context.prompt,
            is_filesystem=isinstance(context.filesystem, Filesystem),
            root=context.filesystem.root,
            in_state=context.state.resources.get(Filesystem) is context.filesystem,  # type: ignore[type-abstract]  # a protocol is a key like a class
        )
        return "seen"

    deadline, run = Deadline.after(timedelta(hours=1)), RunContext()
    context = ToolContext(
        world.state,
        is_resume=True,
        deadline=deadline,
        run_context=run,
        prompt="p",
        cancellation=CancellationToken(),
    )
    assert world.runner(looks_around).execute(ToolCall("c1", "looks_around"), context=context).success
    assert seen == {
        "call_id": "c1",
        "session": True,
        "same_state": True,
        "tracker": tracker,
        "bound": tracker,
        "contains": True,
        "unbound": None,
        "is_resume": True,
        "deadline": deadline,
        "run": run,
        "prompt": "p",
        "is_filesystem": True,
        "root": world.filesystem.root,
        "in_state": True,
    }
    assert world.ends()[-1].run_context == run


def test_a_run_without_a_workspace_runs_tools(small_world: World) -> None:
    @tool
    def notes(*, context: ToolContext) -> str:
        """Take a note, or ask for files that are not there."""
        context.session.dispatch(Note("noted"))
        return "noted"

    @tool
    def reads(*, context: ToolContext) -> str:
        """Ask for files that are not there."""
        return str(context.filesystem.root)

    runner = ToolRunner(ExecutionState(small_world.session), {"notes": notes, "reads": reads})
    assert runner.execute(ToolCall("c1", "notes")).success
    assert small_world.notes() == ["before", "noted"]
    assert "this run has no workspace" in runner.execute(ToolCall("c2", "reads")).message


def test_a_context_of_another_session_is_refused(small_world: World) -> None:
    foreign = ToolContext(ExecutionState(Session()))
    with pytest.raises(UsageError, match="belongs to another session"):
        small_world.runner(looks).execute(ToolCall("c1", "looks"), context=foreign)
    assert small_world.ends() == []


def test_a_context_with_a_bound_session_is_only_a_source_of_parts(small_world: World) -> None:
    """A context that was made inside a call that is over can be passed on: the next call gets its own."""
    kept: list[ToolContext] = []

    @tool
    def keeps(*, context: ToolContext) -> str:
        """Keep the context."""
        kept.append(context)
        context.session.dispatch(Note(context.call_id))
        return "kept"

    runner = small_world.runner(keeps)
    runner.execute(ToolCall("c1", "keeps"))
    assert runner.execute(ToolCall("c2", "keeps"), context=kept[0]).success
    assert small_world.notes() == ["before", "c1", "c2"]


# --- too late ----------------------------------------------------------------------------------------

LATE: dict[str, Callable[[ToolContext], object]] = {
    "session": lambda context: context.session.dispatch(Note("late")),
    "seed": lambda context: context.session[Note].seed(Note("late")),
    "state": lambda context: context.state.session.dispatch(Note("late")),
    "write": lambda context: context.filesystem.write("late.txt", "late"),
    "delete": lambda context: context.filesystem.delete("file.txt"),
    "resources": lambda context: context.resources.get(Filesystem).write("late.txt", "late"),  # type: ignore[type-abstract, union-attr]  # a protocol is a key, and it is there
    "outbox": lambda context: context.outbox.put("mail", "late"),
}


@pytest.mark.parametrize("is_first", [False, True], ids=["asked before", "asked only then"])
@pytest.mark.parametrize("way", LATE)
def test_a_thread_that_was_left_behind_can_change_nothing(world: World, way: str, is_first: bool) -> None:
    """The call was cancelled while its handler went on; what it tries then is refused and leaves no trace.

    Also if it is the first thing that the handler asks its context for.
    """
    before = world.facts()
    running, over, tried = threading.Event(), threading.Event(), threading.Event()
    refused: list[Exception] = []

    @tool
    def lingers(*, context: ToolContext) -> str:
        """Go on after the call was cut off."""
        if not is_first:
            mutate(context)
        running.set()
        assert over.wait(30)
        try:
            LATE[way](context)
        except UsageError as error:
            refused.append(error)
        tried.set()
        return "never"

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(world.runner(lingers).aexecute, ToolCall("c1", "lingers"))
            await anyio.to_thread.run_sync(running.wait, 30)
            group.cancel_scope.cancel()

    anyio.run(main)
    over.set()
    assert tried.wait(30)
    assert [("is over" in str(each)) for each in refused] == [True]
    assert world.facts() == before
    assert world.session[OutboxPut].all() == ()
    assert world.reopen().facts() == before


def test_a_thread_that_is_left_behind_hears_of_it(small_world: World) -> None:
    """Its own token is set, and `beat` stops it; the token of the run is not."""
    running, stopped = threading.Event(), threading.Event()
    token = CancellationToken()

    @tool
    def works(*, context: ToolContext) -> str:
        """Work until told to stop."""
        running.set()
        assert context.cancellation.wait(30)
        with pytest.raises(CancelledByToken):
            context.beat()
        stopped.set()
        return "never"

    async def main() -> None:
        async with anyio.create_task_group() as group:
            context = ToolContext(small_world.state, cancellation=token)
            group.start_soon(
                lambda: small_world.runner(works).aexecute(ToolCall("c1", "works"), context=context)
            )
            await anyio.to_thread.run_sync(running.wait, 30)
            group.cancel_scope.cancel()

    anyio.run(main)
    assert stopped.wait(30)
    assert not token.is_cancelled


def test_a_handler_that_works_past_us_is_waited_for(world: World) -> None:
    """A tree cannot be put back while a thread still writes to it: it is told to stop, and awaited."""
    running = threading.Event()
    steps: list[str] = []

    @tool(files="any")
    def scribbles(*, context: ToolContext) -> str:
        """Write past the API until told to stop."""
        running.set()
        assert context.cancellation.wait(30)
        root = context.filesystem.host_root
        if root is not None:
            (root / "scribble.txt").write_text("late")
        steps.append("stopped")
        return "never"

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(world.runner(scribbles).aexecute, ToolCall("c1", "scribbles"))
            await anyio.to_thread.run_sync(running.wait, 30)
            group.cancel_scope.cancel()
        steps.append("over")

    anyio.run(main)
    assert steps == ["stopped", "over"]
    assert world.files() == {"file.txt": "original"}
    assert world.outcomes() == ["interrupted"]


def test_a_deadline_releases_whoever_waits_for_a_sync_handler(small_world: World) -> None:
    over = threading.Event()

    @tool
    def hangs(*, context: ToolContext) -> str:
        """Hang until the test is over."""
        context.filesystem.write("file.txt", "changed")
        over.wait(30)
        return "never"

    context = ToolContext(small_world.state, deadline=Deadline.after(timedelta(milliseconds=20)))
    with pytest.raises(PromptEvaluationError):
        anyio.run(lambda: small_world.runner(hangs).aexecute(ToolCall("c1", "hangs"), context=context))
    over.set()
    assert small_world.files() == {"file.txt": "original"}
    assert small_world.run(succeeds, "c2").success


def test_a_part_of_a_context_is_one_and_the_same_for_all_threads_of_a_handler(small_world: World) -> None:
    parts = ("state", "session", "cancellation", "outbox", "filesystem")
    seen: list[list[object]] = []

    @tool
    def asks_at_once(*, context: ToolContext) -> str:
        """Ask for everything from several threads at once."""
        start = threading.Barrier(8)

        def ask() -> None:
            start.wait(30)
            seen.append([getattr(context, each) for each in parts])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        return "asked"

    assert small_world.run(asks_at_once, "c1").success
    assert len(seen) == 8
    for answers in zip(*seen, strict=True):
        assert all(each is answers[0] for each in answers)


def test_a_handlers_context_can_be_copied_with_another_part(small_world: World) -> None:
    """Also before anybody has asked for its parts; what was not replaced is the call's own."""
    seen: list[bool] = []

    @tool
    def copies(*, context: ToolContext) -> str:
        """Make a context for somebody else out of its own."""
        made = replace(context, prompt="another")
        again = copy.copy(context)
        seen.append(made.prompt == "another" and made.call_id == again.call_id == "c1")
        seen.append(made.outbox is again.outbox is context.outbox)
        seen.append(made.filesystem is again.filesystem is context.filesystem)
        seen.append(not hasattr(context, "no_such_part") and not hasattr(made, "no_such_part"))
        return "copied"

    assert small_world.run(copies, "c1").success
    assert seen == [True] * 4


def test_a_call_that_its_handler_has_stopped_is_not_kept(small_world: World) -> None:
    """Also if the handler returns as if nothing had happened."""

    @tool
    def takes_it_back(*, context: ToolContext) -> str:
        """Stop the call and end well."""
        context.filesystem.write("file.txt", "changed")
        context.cancellation.cancel()
        return "done"

    with pytest.raises(CancelledByToken):
        small_world.run(takes_it_back)
    assert small_world.files() == {"file.txt": "original"}
    assert small_world.outcomes() == ["interrupted"]


def test_a_handler_that_stops_its_own_call_is_not_waited_for(small_world: World) -> None:
    """Whoever waits for the call is released, also if the handler asks for its token only later."""
    others_are_served, over = threading.Event(), threading.Event()

    @tool
    def gives_up(*, context: ToolContext) -> str:
        """Stop the call and hang."""
        context.filesystem.write("file.txt", "changed")
        assert others_are_served.wait(30)
        context.cancellation.cancel()
        over.wait(30)
        return "never"

    async def serve() -> None:
        others_are_served.set()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            with pytest.raises(CancelledByToken):
                await small_world.runner(gives_up).aexecute(ToolCall("c1", "gives_up"))

    anyio.run(main)
    over.set()
    assert small_world.files() == {"file.txt": "original"}
    assert small_world.outcomes() == ["interrupted"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_without_a_context_is_cut_off_by_the_callers_token(
    small_world: World, is_async: bool
) -> None:
    token, running, over = CancellationToken(), threading.Event(), threading.Event()

    @tool(name="hangs")
    def hangs() -> str:
        """Hang until the test is over."""
        running.set()
        over.wait(30)
        return "never"

    @tool(name="hangs")
    async def waits() -> str:
        """Wait for ever."""
        running.set()
        await anyio.sleep_forever()
        return "never"

    def stop() -> None:
        assert running.wait(30)
        token.cancel(detail="enough")

    async def main() -> None:
        context = ToolContext(small_world.state, cancellation=token)
        threading.Thread(target=stop).start()
        runner = small_world.runner(waits if is_async else hangs)
        await runner.aexecute(ToolCall("c1", "hangs"), context=context)

    with pytest.raises(CancelledByToken, match="enough"):
        anyio.run(main)
    over.set()
    assert small_world.outcomes() == ["interrupted"]


def test_an_event_loop_serves_others_while_a_sync_handler_runs(small_world: World) -> None:
    """The handler ends only when another task of the same loop lets it."""
    running, let_go = threading.Event(), threading.Event()

    @tool(effects="none")
    def depends_on_the_loop() -> str:
        """Wait for a task of the event loop that waits for this."""
        running.set()
        return "served" if let_go.wait(30) else "blocked"

    async def serve() -> None:
        while not running.is_set():
            await anyio.lowlevel.checkpoint()
        let_go.set()

    async def main() -> None:
        runner = small_world.runner(depends_on_the_loop)
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            result = await runner.aexecute(ToolCall("c1", "depends_on_the_loop"))
            assert result.message == "served"

    anyio.run(main)
    assert small_world.outcomes() == ["ok"]


def test_a_stream_that_a_handler_left_open_ends_with_the_call(world: World) -> None:
    """Its content is kept with a call that succeeds, and gone with one that fails."""
    streams: list[Any] = []

    @tool
    def leaves_open(fail: bool, *, context: ToolContext) -> str:
        """Open a file and forget it."""
        stream = context.filesystem.open_write("stream.txt")
        stream.write(b"kept")
        streams.append(stream)
        if fail:
            raise ValueError("no")
        return "done"

    assert not world.run(leaves_open, "c1", fail=True).success
    assert world.files() == {"file.txt": "original"}
    assert world.run(leaves_open, "c2", fail=False).success
    assert world.files()["stream.txt"] == "kept"
    assert all(each.closed for each in streams)


@pytest.mark.parametrize("operation", ["begin", "restore", "recover", "unfinished"])
def test_a_tool_cannot_end_or_undo_its_own_call(small_world: World, operation: str) -> None:
    @tool
    def meddles(*, context: ToolContext) -> str:
        """Reach for what belongs to the runner."""
        getattr(context.filesystem, operation)()
        return "never"

    result = small_world.run(meddles)
    assert not result.success
    assert "belongs to the runner" in result.message


# --- resources that live as long as a call -----------------------------------------------------------


class Connection:
    """A TOOL_CALL resource that tells when it is closed."""

    def __init__(self, trace: list[str], filesystem: Any) -> None:
        self.trace = trace
        self.filesystem = filesystem
        trace.append("opened")

    def close(self) -> None:
        self.filesystem.write("flushed.txt", "flushed")
        self.trace.append("closed")


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_calls_own_resources_are_made_for_it_and_closed_before_the_commit(
    small_world: World, face: str
) -> None:
    """What closing still writes is part of the call: kept with it, and undone with it."""
    trace: list[str] = []
    filesystem = InMemoryFilesystem()
    registry = ResourceRegistry.build(
        {
            Filesystem: filesystem,
            Connection: Binding(Connection, lambda _: Connection(trace, filesystem), scope=Scope.TOOL_CALL),
        }
    )

    @tool
    def connects(fail: bool, *, context: ToolContext) -> str:
        """Use a connection, twice the same."""
        first, second = context.resources.get(Connection), context.resources.get(Connection)
        trace.append("same" if first is second else "different")
        if fail:
            raise ValueError("no")
        return "done"

    with registry.open() as resources:
        state = ExecutionState(small_world.session, resources)
        runner = ToolRunner(state, {"connects": connects})

        def run(call_id: str, fail: bool) -> bool:
            call = ToolCall(call_id, "connects", {"fail": fail})
            made = runner.execute(call) if face == "sync" else anyio.run(runner.aexecute, call)
            return made.success

        small_world.log.after = lambda drafts: trace.append(drafts[-1].type)
        assert not run("c1", True)
        assert not filesystem.exists("flushed.txt")
        assert run("c2", False)
        assert filesystem.read("flushed.txt").content == "flushed"
    one = ["treenail.ToolStarted", "opened", "same", "closed", "treenail.ToolInvoked"]
    assert trace == one + one


def test_a_resource_of_a_call_is_gone_after_it(small_world: World) -> None:
    kept: list[ToolContext] = []
    registry = ResourceRegistry.build(
        {Connection: Binding(Connection, lambda _: None, scope=Scope.TOOL_CALL)}
    )

    @tool
    def keeps(*, context: ToolContext) -> str:
        """Keep the context."""
        kept.append(context)
        return "kept"

    with registry.open() as resources:
        ToolRunner(ExecutionState(small_world.session, resources), {"keeps": keeps}).execute(
            ToolCall("c1", "keeps")
        )
        with pytest.raises(Exception, match="after its tool call ended"):
            kept[0].resources.get(Connection)

"""A call changes state and files together, or not at all; and how it ended is always recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from tools_kit import Found, Note, World, looks, mutate, once, succeeds, succeeds_async

from treenail.containment import CancellationToken
from treenail.errors import (
    CancelledByToken,
    LogError,
    PromptEvaluationError,
    RestoreFailedError,
    StaleWriterError,
    ToolError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from treenail.state import (
    AttentionNeeded,
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    TokenUsage,
    rollback_to_tool,
    snapshots_equivalent,
)
from treenail.testing import FakeClock
from treenail.tools import (
    Plan,
    Tool,
    ToolCall,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    ToolStarted,
    tool,
    tool_execution,
)
from treenail.tools.events import OutboxPut
from treenail.workspace import Filesystem

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def failing(error: BaseException | ToolResult[Any], *, effects: str = "workspace") -> Tool[Any, Any]:
    """A tool that changes everything and then fails in the given way."""

    def handler(*, context: ToolContext) -> Any:
        """Change everything and fail."""
        if effects != "none":
            mutate(context)
        else:
            context.session.dispatch(Note("during"))
        if isinstance(error, ToolResult):
            return error
        raise error

    return Tool.wrap(handler, name="fails", effects=effects)  # type: ignore[arg-type] # a literal in each test


def failing_async(error: BaseException) -> Tool[Any, Any]:
    async def handler(*, context: ToolContext) -> Any:
        """Change everything and fail."""
        mutate(context)
        await anyio.lowlevel.checkpoint()
        raise error

    return Tool.wrap(handler, name="fails")


# --- the acceptance criteria -------------------------------------------------------------------------


def test_tool_failure_does_not_change_state(world: World) -> None:
    """A tool that writes, dispatches and returns success=False leaves everything as it was."""
    before = world.facts()
    result = world.run(failing(ToolResult.error("no luck")))
    assert (result.success, result.message, result.value) == (False, "no luck", None)
    assert world.facts() == before
    assert world.session[Plan].latest() == Plan(objective="test", status="active")
    assert world.session[OutboxPut].all() == ()


def test_visibility_expansion_is_clean(world: World) -> None:
    """State is as if the tool had never run, and the exception goes on to the loop."""
    before, facts = world.state.snapshot(), world.facts()
    told: list[object] = []

    def record(result: ToolResult[Any]) -> tuple[object, ...]:
        told.append(result)
        return ()

    runner = world.runner(failing(VisibilityExpansionRequired(section_keys=("a.b",))))
    with pytest.raises(VisibilityExpansionRequired) as caught:
        runner.execute(ToolCall("c1", "fails"), record=record)
    assert caught.value.section_keys == ("a.b",)
    assert world.facts() == facts
    assert snapshots_equivalent(before, world.state.snapshot())
    assert told == [], "the model is asked again; the attempt is none of its business"
    assert world.outcomes() == ["failed"]


def _sync_face(world: World, one: Tool[Any, Any], **parts: Any) -> ToolResult[Any]:
    return world.runner(one).execute(ToolCall("c1", one.name), context=ToolContext(world.state, **parts))


def _async_face(world: World, one: Tool[Any, Any], **parts: Any) -> ToolResult[Any]:
    async def main() -> ToolResult[Any]:
        context = ToolContext(world.state, **parts)
        return await world.runner(one).aexecute(ToolCall("c1", one.name), context=context)

    return anyio.run(main)


def _block(world: World, one: Tool[Any, Any]) -> ToolResult[Any]:
    state = world.state
    with tool_execution(
        context=ToolContext(state), tool_call=ToolCall("c1", one.name), execution_state=state, tool=one
    ) as outcome:
        made = one.call(outcome.params, outcome.context)
        outcome.result = anyio.run(lambda: made) if one.is_async else made
    assert outcome.result is not None
    return outcome.result


@pytest.mark.parametrize("face", [_sync_face, _async_face, _block])
@pytest.mark.parametrize("one", [succeeds, succeeds_async], ids=["sync", "async"])
def test_every_way_to_run_a_tool_ends_in_the_same_state(world: World, face: Any, one: Tool[Any, Any]) -> None:
    """The sync face, the async face and the context manager are one."""
    result = face(world, one)
    assert result.success
    files = {"file.txt": "changed", "new/deep.txt": "new"}
    assert world.facts() == (files, ["before", "during"], (Plan("other", "completed"),))
    assert [each.topic for each in world.session[OutboxPut].all()] == ["mail"]
    assert world.outcomes() == ["ok"]
    assert world.log.appends[-2] == ["ToolStarted"]
    assert world.log.appends[-1][-1] == "ToolInvoked"


@pytest.mark.parametrize("face", [_sync_face, _async_face, _block])
@pytest.mark.parametrize("make", [failing, failing_async], ids=["sync", "async"])
def test_every_way_to_run_a_tool_rolls_back_alike(world: World, face: Any, make: Any) -> None:
    before = world.facts()
    result = face(world, make(LookupError("nothing there")))
    assert not result.success
    assert "LookupError: nothing there" in result.message
    assert world.facts() == before
    assert world.outcomes() == ["failed"]


def test_rollback_to_a_tool_boundary(world: World) -> None:
    """Three calls, and back to before the second: session and files are where they were."""

    @tool
    def step(text: str, *, context: ToolContext) -> str:
        """Write a file and a note."""
        context.filesystem.write(f"{text}.txt", text)
        context.session.dispatch(Note(text))
        return text

    runner = world.runner(step)
    for name in ("a", "b", "c"):
        runner.execute(ToolCall(f"call_{name}", "step", {"text": name}))
    pre = world.checkpoints.get_pre_snapshot("call_b")
    assert pre is not None
    world.state.restore(pre)
    assert world.notes() == ["before", "a"]
    assert world.files() == {"file.txt": "original", "a.txt": "a"}
    assert [each.call_id for each in world.ends()] == ["call_a", "call_b", "call_c"], "history stays"
    rollback_to_tool(world.state, world.checkpoints, "call_a")
    assert (world.notes(), world.files()) == (["before"], {"file.txt": "original"})


# --- what makes a call roll back ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (ValueError("bad value"), "failed", "fails failed: ValueError: bad value"),
        (ToolError("asked too much"), "failed", "asked too much"),
        (ToolValidationError("the path is odd"), "failed", "the path is odd"),
        (TypeError("f() got an unexpected keyword"), "failed", "fails failed: TypeError: f() got"),
        (ToolResult.error("no"), "failed", "no"),
    ],
    ids=["exception", "tool error", "validation", "type error", "result"],
)
def test_a_failure_becomes_a_failed_result(world: World, error: Any, outcome: str, text: str) -> None:
    """Whatever the handler raises is told to the model; its own TypeError is a failure, not bad arguments."""
    before = world.facts()
    result = world.run(failing(error))
    assert not result.success
    assert result.message.startswith(text)
    assert world.outcomes() == [outcome]
    assert world.facts() == before


@pytest.mark.parametrize("face", [_sync_face, _async_face])
@pytest.mark.parametrize(
    ("error", "raised", "outcome"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
        (CancelledByToken("stop"), CancelledByToken, "interrupted"),
        (PromptEvaluationError("inner", phase="response"), PromptEvaluationError, "failed"),
    ],
)
def test_what_the_loop_must_act_on_is_raised_after_the_rollback(
    world: World, face: Any, error: BaseException, raised: type[BaseException], outcome: str
) -> None:
    before = world.facts()
    with pytest.raises(raised):
        face(world, failing(error))
    assert world.facts() == before
    assert world.outcomes() == [outcome]
    assert face(world, succeeds).success, "the next call runs"


def test_a_cancelled_task_rolls_back_and_stays_cancelled(world: World) -> None:
    before = world.facts()

    @tool
    async def waits(*, context: ToolContext) -> str:
        """Change everything and wait."""
        mutate(context)
        scope.cancel()
        await anyio.sleep_forever()
        return "never"

    async def main() -> bool:
        nonlocal scope
        with anyio.CancelScope() as scope:
            await world.runner(waits).aexecute(ToolCall("c1", "waits"))
        return scope.cancelled_caught

    scope: anyio.CancelScope
    assert anyio.run(main)
    assert world.facts() == before
    assert world.outcomes() == ["interrupted"]


@pytest.mark.parametrize("face", [_sync_face, _async_face])
def test_a_token_cuts_an_async_handler_off(world: World, face: Any) -> None:
    """The token stops the handler where it waits, on both faces."""
    before = world.facts()
    token = CancellationToken()

    @tool
    async def waits(*, context: ToolContext) -> str:
        """Change everything and wait."""
        mutate(context)
        token.cancel(detail="the user said stop")
        await anyio.sleep_forever()
        return "never"

    with pytest.raises(CancelledByToken, match="the user said stop"):
        face(world, waits, cancellation=token)
    assert world.facts() == before
    assert world.outcomes() == ["interrupted"]


def test_a_token_that_was_set_keeps_a_call_from_beginning(world: World) -> None:
    """Nothing is recorded: the call has not been tried, and a resume can run it."""
    token = CancellationToken()
    token.cancel()
    with pytest.raises(CancelledByToken):
        world.runner(succeeds).execute(
            ToolCall("c1", "succeeds"), context=ToolContext(world.state, cancellation=token)
        )
    assert world.ends() == []
    assert world.session[ToolStarted].all() == ()


# --- deadlines ---------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_keeps_a_call_from_beginning(world: World) -> None:
    before = world.facts()
    deadline = Deadline(NOW, clock=FakeClock(NOW + timedelta(seconds=1)))
    with pytest.raises(PromptEvaluationError) as caught:
        world.runner(succeeds).execute(
            ToolCall("c1", "succeeds"), context=ToolContext(world.state, deadline=deadline)
        )
    assert (caught.value.phase, caught.value.prompt_name) == ("tool", "a-prompt")
    assert world.facts() == before
    assert world.outcomes() == ["timed_out"]


def test_a_deadline_that_passes_meanwhile_undoes_what_succeeded(world: World) -> None:
    """A sync handler cannot be cut off, but what it did too late does not count."""
    before = world.facts()
    clock = FakeClock(NOW)

    @tool
    def slow(*, context: ToolContext) -> str:
        """Change everything, slowly."""
        mutate(context)
        clock.advance(60)
        return "done"

    context = ToolContext(world.state, deadline=Deadline(NOW + timedelta(seconds=30), clock=clock))
    with pytest.raises(PromptEvaluationError) as caught:
        world.runner(slow).execute(ToolCall("c1", "slow"), context=context)
    assert caught.value.phase == "tool"
    assert world.facts() == before
    assert world.outcomes() == ["timed_out"]


@pytest.mark.parametrize("face", [_sync_face, _async_face])
def test_a_deadline_cuts_an_async_handler_off(world: World, face: Any) -> None:
    before = world.facts()

    @tool
    async def waits(*, context: ToolContext) -> str:
        """Change everything and wait."""
        mutate(context)
        await anyio.sleep_forever()
        return "never"

    token = CancellationToken()
    with pytest.raises(PromptEvaluationError) as caught:
        face(world, waits, cancellation=token, deadline=Deadline.after(timedelta(milliseconds=20)))
    assert caught.value.phase == "tool"
    assert world.facts() == before
    assert world.outcomes() == ["timed_out"]
    assert not token.is_cancelled, "one call's deadline does not stop the run"


def test_beat_stops_a_handler_that_is_out_of_time(small_world: World) -> None:
    """And tells whoever waits that the work is alive."""
    clock, beats = FakeClock(NOW), []

    class Heart:
        def beat(self) -> None:
            beats.append(clock.monotonic())

    @tool
    def slow(*, context: ToolContext) -> str:
        """Beat, and then beat too late."""
        context.beat()
        clock.advance(60)
        context.beat()
        return "never"

    context = ToolContext(
        small_world.state, deadline=Deadline(NOW + timedelta(seconds=30), clock=clock), heartbeat=Heart()
    )
    with pytest.raises(PromptEvaluationError):
        small_world.runner(slow).execute(ToolCall("c1", "slow"), context=context)
    assert beats == [0, 60]


# --- failures while committing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [LogError("the disk is full"), OSError(28, "No space left on device")], ids=["log", "disk"]
)
def test_a_commit_that_the_log_refuses_is_a_failed_call(world: World, error: Exception) -> None:
    """What ran is rolled back, and the failure is what the log has of it."""
    before = world.facts()
    world.log.before = once(error)
    result = world.run(succeeds)
    assert not result.success
    assert "could not be committed" in result.message
    assert str(error) in result.message
    assert world.facts() == before
    assert world.outcomes() == ["failed"]
    assert world.run(succeeds, "c2").success


def test_a_log_that_refuses_everything_is_an_error_and_the_call_is_undone(world: World) -> None:
    before = world.facts()

    def refuse(drafts: Any) -> None:
        if any(each.type == "treenail.ToolInvoked" for each in drafts):
            raise StaleWriterError("another process writes this session now")

    world.log.before = refuse
    with pytest.raises(StaleWriterError, match="another process"):
        world.run(succeeds)
    world.log.before = None
    assert world.facts() == before
    assert world.run(succeeds, "c2").success, "nothing is stuck"


def test_a_call_that_cannot_be_started_in_the_log_is_undone(world: World) -> None:
    """No handler runs before the log has `ToolStarted`."""
    before, ran = world.facts(), []

    @tool
    def runs() -> str:
        """Say that it ran."""
        ran.append(1)
        return "done"

    def refuse(drafts: Any) -> None:
        if drafts[0].type == "treenail.ToolStarted":
            raise LogError("the disk is full")

    world.log.before = refuse
    with pytest.raises(LogError, match="the disk is full"):
        world.run(runs)
    world.log.before = None
    assert (world.facts(), ran) == (before, [])
    assert world.run(runs, "c2").success


class _CannotPrepare:
    """A workspace that cannot write its boundary, because the disk is full."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def begin(self, *arguments: Any, **keywords: Any) -> Any:
        return _CannotPrepareCall(self._behind.begin(*arguments, **keywords))


class _CannotPrepareCall:
    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def prepare(self) -> Any:
        raise OSError(28, "No space left on device")


def test_a_workspace_that_cannot_write_its_boundary_fails_the_call(world: World) -> None:
    before = world.facts()
    whole = world.filesystem
    world.filesystem = _CannotPrepare(whole)
    result = world.run(succeeds)
    world.filesystem = whole
    assert not result.success
    assert "No space left on device" in result.message
    assert world.facts() == before
    assert world.outcomes() == ["failed"]


def test_a_value_that_cannot_be_stored_fails_the_call(world: World) -> None:
    """The error names the field."""

    @dataclass(frozen=True)
    class Opaque:
        handle: object

    @tool
    def returns_opaque(*, context: ToolContext) -> ToolResult[Any]:
        """Return something that no log can keep."""
        mutate(context)
        return ToolResult.ok(Opaque(handle=lambda: None))

    before = world.facts()
    result = world.run(returns_opaque)
    assert not result.success
    assert "handle" in result.message
    assert world.facts() == before


def test_a_record_that_fails_fails_the_call_and_then_the_caller(world: World) -> None:
    """The caller's message is part of the commit; if it cannot be made, the caller hears of it."""
    before = world.facts()

    def record(result: ToolResult[Any]) -> tuple[object, ...]:
        raise RuntimeError("no message today")

    runner = world.runner(succeeds)
    with pytest.raises(RuntimeError, match="no message today"):
        runner.execute(ToolCall("c1", "succeeds"), record=record)
    assert world.facts() == before
    assert world.outcomes() == ["failed"]
    assert runner.execute(ToolCall("c2", "succeeds")).success


def test_what_is_recorded_with_a_call_is_in_the_same_append(world: World) -> None:
    """Staged events, the outbox, the caller's message and `ToolInvoked`, in one batch."""
    world.runner(succeeds).execute(
        ToolCall("c1", "succeeds"), record=lambda result: (Note(f"said {result.message}"),)
    )
    *_, last = world.log.appends
    assert [each.rpartition(":")[2] for each in last] == [
        "Note",
        "InitializeSlice",
        "OutboxPut",
        "Note",
        "ToolInvoked",
    ]
    assert world.ends()[-1].batch_events == 4
    assert world.notes() == ["before", "during", "said done"]


def test_a_commit_that_only_seemed_to_fail_stands(world: World) -> None:
    """The store failed after it had stored the events: the log is believed, not the noise."""
    world.log.after = once(OSError("late noise"))
    assert world.run(succeeds).success
    assert world.notes() == ["before", "during"]
    assert world.files()["file.txt"] == "changed"
    assert world.outcomes() == ["ok"]
    assert list(world.filesystem.unfinished()) == []


# --- results -----------------------------------------------------------------------------------------


def test_a_typed_value_populates_its_slice(world: World) -> None:
    @tool
    def finds(*, context: ToolContext) -> ToolResult[list[Found]]:
        """Find two."""
        return ToolResult.ok([Found("a"), Found("b", 2)])

    result = world.run(finds)
    assert world.session[Found].all() == (Found("a"), Found("b", 2))
    assert json.loads(result.render()) == [{"path": "a", "count": 0}, {"path": "b", "count": 2}]


def test_a_failed_calls_value_changes_no_slice(world: World) -> None:
    result = world.run(failing(ToolResult("found, but", value=Found("a"), success=False)))
    assert result.value is None
    assert world.session[Found].all() == ()
    assert world.reopen().session[Found].all() == ()


def test_every_outcome_is_recorded(world: World) -> None:
    """Success, failure, bad arguments, an unknown tool: one `ToolInvoked` each, which says how it went."""
    runner = world.runner(succeeds, failing(ValueError("x")), looks)
    for number, (name, arguments) in enumerate(
        [
            ("succeeds", "{}"),
            ("fails", "{}"),
            ("looks", '{"nope": 1}'),
            ("looks", "{not json"),
            ("missing", "{}"),
        ]
    ):
        runner.execute(ToolCall(f"c{number}", name, arguments))
    ends = world.ends()
    assert [(each.call_id, each.name, each.outcome, each.success) for each in ends] == [
        ("c0", "succeeds", "ok", True),
        ("c1", "fails", "failed", False),
        ("c2", "looks", "invalid", False),
        ("c3", "looks", "invalid", False),
        ("c4", "missing", "invalid", False),
    ]
    assert {(each.prompt_name, each.adapter, each.session_id) for each in ends} == {
        ("a-prompt", "an-adapter", world.session.session_id)
    }
    assert ends[2].params == {"nope": 1}
    assert ends[3].params == {}
    assert "There is no tool 'missing'. There are: fails, looks, succeeds." in ends[4].rendered_output
    assert world.reopen().ends() == ends, "and it is in the log"


def test_long_arguments_and_messages_are_kept_short(small_world: World) -> None:
    """The conversation has them whole; the record of the call does not repeat a file."""

    @tool(effects="none")
    def swallow(content: str, *, context: ToolContext) -> str:
        """Take a long text."""
        return content

    result = small_world.run(swallow, content="x" * 50_000)
    (end,) = small_world.ends()
    assert len(result.message) == 50_000
    assert len(end.rendered_output) == 1_000
    assert end.params["content"] == "x" * 2_000 + "[48000 more characters]"


def test_failing_telemetry_changes_nothing(world: World) -> None:
    """A subscriber that raises is its own problem: the call stays committed."""
    heard: list[ToolInvoked] = []

    def subscriber(event: ToolInvoked) -> None:
        heard.append(event)
        raise RuntimeError("the collector is down")

    world.bus.subscribe(ToolInvoked, subscriber)
    assert world.run(succeeds).success
    assert [each.outcome for each in heard] == ["ok"]
    assert world.files()["file.txt"] == "changed"
    assert world.run(failing(ValueError()), "c2").success is False
    assert [each.outcome for each in heard] == ["ok", "failed"]


# --- appends, and effects ----------------------------------------------------------------------------


def test_a_call_with_effects_costs_two_appends_and_one_without_costs_one(world: World) -> None:
    world.log.appends.clear()
    world.run(looks)
    assert world.log.appends == [["ToolInvoked"]]
    world.run(failing(ValueError(), effects="none"), "c2")
    assert world.log.appends[1:] == [["ToolInvoked"]]
    world.run(succeeds, "c3")
    assert [each[-1] for each in world.log.appends[2:]] == ["ToolStarted", "ToolInvoked"]


def test_a_tool_without_effects_cannot_write(world: World) -> None:
    """Its filesystem is read-only, however it is asked for."""

    @tool(effects="none")
    def sneaks(way: str, *, context: ToolContext) -> str:
        """Try to write."""
        filesystem = {
            "context": lambda: context.filesystem,
            "resources": lambda: context.resources.get(Filesystem),
            "state": lambda: context.state.resources.get(Filesystem),
        }[way]()
        assert filesystem.read("file.txt").content == "original"
        filesystem.write("file.txt", "sneaked")
        return "done"

    for way in ("context", "resources", "state"):
        result = world.run(sneaks, way, way=way)
        assert not result.success
        assert "ReadOnlyError" in result.message
    assert world.files() == {"file.txt": "original"}


def test_a_tool_without_effects_that_fails_takes_its_state_back(world: World) -> None:
    before = world.facts()
    assert not world.run(failing(ValueError("no"), effects="none")).success
    assert world.facts() == before


def test_a_call_in_a_read_only_workspace_can_still_change_state(world: World) -> None:
    """A plan can be made where no file can be written."""

    @tool
    def notes(*, context: ToolContext) -> str:
        """Take a note."""
        context.session.dispatch(Note("kept"))
        return "noted"

    whole, world.filesystem = world.filesystem, world.filesystem.read_only_view()
    assert world.run(notes).success
    assert world.notes() == ["before", "kept"]
    assert not world.run(succeeds, "c2").success
    world.filesystem = whole
    assert world.files() == {"file.txt": "original"}


# --- other participants ------------------------------------------------------------------------------


class Counter:
    """A resource of the user's own that can be snapshotted."""

    def __init__(self) -> None:
        self.value = 0
        self.is_stuck = False

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        if self.is_stuck:
            raise OSError("the counter is stuck")
        self.value = snapshot


@tool
def counts(fail: bool, *, context: ToolContext) -> str:
    """Count, write, and maybe fail."""
    counter = context.resources.get(Counter)
    assert counter is not None
    counter.value += 1
    context.filesystem.write("file.txt", "changed")
    assert context.budget_tracker is not None
    context.budget_tracker.record_cumulative(context.call_id, TokenUsage(input_tokens=10, output_tokens=1))
    if fail:
        raise ValueError("counted enough")
    return "counted"


def test_resources_of_the_users_own_are_rolled_back_and_spending_is_not(world: World) -> None:
    counter, tracker = Counter(), BudgetTracker(Budget(max_total_tokens=1_000))
    world.extra = {Counter: counter, BudgetTracker: tracker}
    assert world.run(counts, fail=False).success
    assert not world.run(counts, "c2", fail=True).success
    assert counter.value == 1
    assert tracker.consumed.total_tokens == 22, "what a failed call spent stays spent"


def test_resources_of_an_open_context_are_rolled_back_too(small_world: World) -> None:
    """It makes no difference whether the resources were built beforehand."""
    counter = Counter()
    small_world.extra = {Counter: counter, BudgetTracker: BudgetTracker(Budget(max_total_tokens=1_000))}
    registry = small_world.state.resources
    assert isinstance(registry, ResourceRegistry)
    with registry.open() as opened:
        runner = ToolRunner(ExecutionState(small_world.session, opened), {counts.name: counts})
        assert runner.execute(ToolCall("c1", "counts", {"fail": False})).success
        assert not runner.execute(ToolCall("c2", "counts", {"fail": True})).success
    assert counter.value == 1


def test_a_participant_that_cannot_go_back_is_reported_and_the_others_do(world: World) -> None:
    """Never silently half restored: the error says what is stuck, and the session is marked."""
    counter = Counter()
    counter.is_stuck = True
    world.extra = {Counter: counter, BudgetTracker: BudgetTracker(Budget(max_total_tokens=1_000))}
    with pytest.raises(RestoreFailedError, match="the counter is stuck") as caught:
        world.run(counts, fail=True)
    assert caught.value.failed == ("Counter: OSError: the counter is stuck",)
    assert caught.value.undone is False
    assert world.files() == {"file.txt": "original"}
    (attention,) = world.session[AttentionNeeded].all()
    assert "c1" in attention.reason
    assert world.outcomes() == ["failed"]


def test_a_participant_that_cannot_be_captured_keeps_the_call_from_beginning(world: World) -> None:
    """All snapshots come before the first write."""
    ran: list[int] = []

    class Blind:
        def snapshot(self, *, tag: str | None = None) -> int:
            raise OSError("cannot look")

        def restore(self, snapshot: int) -> None:
            raise AssertionError("nothing was captured")

    @tool
    def runs() -> str:
        """Say that it ran."""
        ran.append(1)
        return "done"

    world.extra = {Blind: Blind()}
    before = world.facts()
    world.checkpoints = None  # type: ignore[assignment] # the runner itself must notice
    result = world.run(runs)
    assert not result.success
    assert "could not begin: OSError: cannot look" in result.message
    assert (ran, world.facts(), world.outcomes()) == ([], before, ["failed"])
    world.extra = {}
    assert world.run(succeeds, "c2").success


# --- checkpoints -------------------------------------------------------------------------------------


def test_checkpoints_are_recorded_on_their_own(world: World) -> None:
    """Pre, post, a summary of the result and the time, for every call, in order."""
    runner = world.runner(succeeds, looks, failing(ValueError("no")))
    for number, name in enumerate(["looks", "succeeds", "fails"]):
        runner.execute(ToolCall(f"c{number}", name))
    first, second, third = world.checkpoints.list_checkpoints()
    assert [each.tool_name for each in (first, second, third)] == ["looks", "succeeds", "fails"]
    assert [each.success for each in (first, second, third)] == [True, True, False]
    assert first.result_summary == "original"
    assert second.post_snapshot is not None
    assert third.post_snapshot is None
    assert third.result_summary is not None
    assert "ValueError: no" in third.result_summary
    assert second.elapsed is not None
    assert second.pre_snapshot.metadata.phase == "pre_tool"
    assert second.post_snapshot.metadata.phase == "post_tool"
    assert second.pre_snapshot.metadata.tool_call_id == "c1"
    world.state.restore(second.pre_snapshot)
    assert world.files() == {"file.txt": "original"}
    world.state.restore(second.post_snapshot)
    assert world.files()["file.txt"] == "changed"
    assert world.notes() == ["before", "during"]


# --- blocks as calls ---------------------------------------------------------------------------------


def test_a_block_is_a_call(world: World) -> None:
    """`tool_execution`: what the block does is kept with a good result, and undone with anything else."""
    state = world.state

    def run(call_id: str, result: ToolResult[Any] | Exception) -> ToolResult[Any] | None:
        with tool_execution(
            context=ToolContext(state), tool_call=ToolCall(call_id, "Block"), execution_state=state
        ) as outcome:
            assert outcome.context is not None
            outcome.context.filesystem.write(f"{call_id}.txt", call_id)
            world.session.dispatch(Note(call_id))
            if isinstance(result, Exception):
                raise result
            outcome.result = result
        return outcome.result

    assert run("b1", ToolResult.ok(message="fine")) == ToolResult.ok(message="fine")
    assert run("b2", ToolResult.error("bad")) == ToolResult.error("bad")
    failed = run("b3", ValueError("worse"))
    assert failed is not None
    assert "ValueError: worse" in failed.message
    with pytest.raises(VisibilityExpansionRequired):
        run("b4", VisibilityExpansionRequired())
    assert world.files() == {"file.txt": "original", "b1.txt": "b1"}
    assert world.notes() == ["before", "b1"]
    assert world.outcomes() == ["ok", "failed", "failed", "failed"]


def test_a_block_whose_call_cannot_begin_is_not_run(small_world: World) -> None:
    ran: list[int] = []
    state = small_world.state
    with (
        pytest.raises(ToolValidationError, match="nope"),
        tool_execution(
            context=ToolContext(state),
            tool_call=ToolCall("c1", "looks", {"nope": 1}),
            execution_state=state,
            tool=looks,
        ),
    ):
        ran.append(1)
    assert ran == []
    assert small_world.outcomes() == ["invalid"]

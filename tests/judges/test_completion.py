"""Verification before a run may stop: by files, by commands, by several, and what becomes of failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges_kit import answering, work_prompt

from treenail.containment import CancellationToken, ExecutionContext, Limits, threadsafe
from treenail.conversation import InnerMessage, enable_inner_message_recording
from treenail.errors import CancelledByToken, DeadlineExceededError, NestedEvaluationError, UsageError
from treenail.judges import (
    CommandChecker,
    CompletionChecked,
    CompletionVerdict,
    CompositeChecker,
    FileOutputChecker,
    JudgedRun,
    JudgeEvent,
    Judges,
    LLMCompletionVerifier,
    NestedEvaluated,
    NestedExecutionConfig,
    TaskCompletionContext,
    TaskCompletionResult,
)
from treenail.judges.completion import TaskCompletionChecker
from treenail.judges.context import MAX_NESTED_DURATION
from treenail.log.sqlite import SqliteLog
from treenail.sandbox import Grants, Sandbox
from treenail.state import (
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceRegistry,
    Session,
    TokenUsage,
)
from treenail.testing.clock import FakeClock
from treenail.tools import recover, workspace_call_id
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

OK = TaskCompletionResult.ok("done")
NOT = TaskCompletionResult.incomplete("the tests are missing")


@dataclass
class Checker:
    """A checker that does what a function says."""

    act: Callable[[TaskCompletionContext], Any]
    asked: int = 0

    def check(self, context: TaskCompletionContext) -> Any:
        self.asked += 1
        return self.act(context)


def always(result: TaskCompletionResult) -> Checker:
    return Checker(lambda _: result)


def failing(error: BaseException) -> Checker:
    def act(context: TaskCompletionContext) -> Any:
        raise error

    return Checker(act)


def judges(
    session: Session, checker: Any, *, config: NestedExecutionConfig | None = None, **more: Any
) -> Judges:
    prompt = work_prompt(task_completion_checker=checker, nested_execution_config=config)
    return Judges(JudgedRun(prompt=prompt, session=session, given_evaluation_id="e1", **more))


def stop(judges: Judges, text: str = "all done", output: object = None) -> str | None:
    return anyio.run(judges.before_stop, text, output, "stop")


CLOSED = NestedExecutionConfig(on_completion_failure="closed")


# --- may it stop? --------------------------------------------------------------------------------------


def test_a_run_may_stop_when_the_checker_says_so_and_it_is_on_record() -> None:
    session = Session()
    mine = judges(session, always(OK))
    assert stop(mine) is None
    assert not mine.exhausted
    (checked,) = session[CompletionChecked].all()
    assert (checked.complete, checked.feedback, checked.verified) == (True, "done", True)
    assert (checked.checker, checked.stop_reason) == ("Checker", "stop")


def test_what_is_missing_goes_back_to_the_model() -> None:
    session = Session()
    mine = judges(session, always(NOT))
    text = stop(mine)
    assert text == (
        '<completion_check checker="Checker" attempt="1 of 3">\n'
        "The work is not complete, so you cannot stop yet:\n"
        "the tests are missing\n"
        "</completion_check>"
    )
    assert (mine.exhausted, mine.last_reason) == (False, "the tests are missing")


@given(most=st.integers(1, 5))
def test_a_run_is_refused_a_bounded_number_of_times_and_then_ends_incomplete(most: int) -> None:
    session = Session()
    mine = judges(session, always(NOT), config=NestedExecutionConfig(max_completion_checks=most))
    for attempt in range(1, most + 1):
        assert stop(mine) is not None
        assert mine.exhausted is (attempt == most)
    assert mine.last_reason == "the tests are missing"
    assert [each.attempt for each in session[CompletionChecked].all()] == list(range(1, most + 1))


def test_refusals_are_counted_across_a_resume_and_per_evaluation(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "runs.db")
    session = Session(log=log)
    stop(judges(session, always(NOT)))
    stop(judges(session, always(NOT)))
    session.close()
    again = Session.open(log, session.session_id)
    third = judges(again, always(NOT))
    stop(third)
    assert third.exhausted
    prompt = work_prompt(task_completion_checker=always(NOT))
    other = Judges(JudgedRun(prompt=prompt, session=again, given_evaluation_id="e2"))
    stop(other)
    assert not other.exhausted
    again.close()
    log.close()


def test_the_evaluation_is_found_in_the_conversation_if_nobody_names_it() -> None:
    session = Session()
    enable_inner_message_recording(session)
    session.dispatch(InnerMessage("user", "do it", "found", 0))
    mine = Judges(JudgedRun(prompt=work_prompt(task_completion_checker=always(NOT)), session=session))
    stop(mine)
    assert session[CompletionChecked].all()[0].evaluation_id == "found"


def test_a_run_that_mends_what_was_missing_may_stop() -> None:
    session, files = Session(), InMemoryFilesystem()
    mine = judges(session, FileOutputChecker(["out.txt"]), filesystem=files)
    assert "out.txt" in (stop(mine) or "")
    files.write("out.txt", "x")
    assert stop(mine) is None
    assert not mine.exhausted


def test_the_verdict_and_the_message_are_one_append_unless_the_turn_ends() -> None:
    session = Session()
    enable_inner_message_recording(session)
    mine = judges(session, always(NOT), config=NestedExecutionConfig(max_completion_checks=2))

    def record(text: str) -> list[object]:
        return [InnerMessage("user", text, "e1", session.head)]

    async def go() -> str | None:
        return await mine.before_stop("text", None, "stop", record)

    assert anyio.run(go) == session[InnerMessage].all()[0].content
    assert session.head == 2
    anyio.run(go)
    assert mine.exhausted
    assert session.head == 3


def test_a_checker_sees_the_output_the_text_and_the_task() -> None:
    seen: list[TaskCompletionContext] = []

    def act(context: TaskCompletionContext) -> TaskCompletionResult:
        seen.append(context)
        return OK

    session = Session()
    mine = judges(session, Checker(act), task="count to three")
    stop(mine, "one, two, three", {"count": 3})
    stop(mine, "words alone")
    assert [each.tentative_output for each in seen] == [{"count": 3}, "words alone"]
    assert [each.text for each in seen] == ["one, two, three", "words alone"]
    assert (seen[0].task, seen[0].stop_reason) == ("count to three", "stop")


def test_checkers_may_be_async() -> None:
    async def act(context: TaskCompletionContext) -> TaskCompletionResult:
        return NOT

    assert stop(judges(Session(), Checker(act))) is not None


# --- failures ------------------------------------------------------------------------------------------

FAILURES = [
    (RuntimeError("boom"), "crashed"),
    (SystemExit(2), "crashed"),
    (KeyboardInterrupt(), "crashed"),
    (NestedEvaluationError("slow", kind="throttled"), "throttled"),
    (DeadlineExceededError("its own"), "timeout"),
    (UsageError("wrong"), "configuration"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES)
def test_a_check_that_fails_open_lets_the_run_stop_and_says_that_nobody_looked(
    error: BaseException, reason: str
) -> None:
    session = Session()
    assert stop(judges(session, failing(error))) is None
    (event,) = session[JudgeEvent].all()
    assert (event.kind, event.outcome, event.reason, event.failed_closed) == (
        "completion",
        "failed",
        reason,
        False,
    )
    (checked,) = session[CompletionChecked].all()
    assert (checked.complete, checked.verified) == (True, False)


@pytest.mark.parametrize(("error", "reason"), FAILURES)
def test_a_check_that_fails_closed_never_lets_the_run_complete(error: BaseException, reason: str) -> None:
    session = Session()
    mine = judges(session, failing(error), config=CLOSED)
    for _ in range(3):
        assert reason in (stop(mine) or "")
    assert mine.exhausted
    assert not any(each.complete for each in session[CompletionChecked].all())
    assert all(each.failed_closed for each in session[JudgeEvent].all())


def test_a_checker_that_answers_nonsense_is_a_failure() -> None:
    session = Session()
    assert stop(judges(session, Checker(lambda _: "yes"))) is None
    assert session[JudgeEvent].all()[0].reason == "configuration"


def spent() -> BudgetTracker:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    tracker.record_cumulative("run", TokenUsage(input_tokens=1, output_tokens=0))
    return tracker


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"deadline": Deadline.after(timedelta(0))}, "deadline"), ({"budget_tracker": spent()}, "budget")],
    ids=["deadline", "budget"],
)
def test_a_run_with_nothing_left_is_not_verified_and_its_ending_depends_on_the_mode(
    more: dict[str, Any], reason: str
) -> None:
    session, checker = Session(), always(NOT)
    assert stop(judges(session, checker, **more)) is None
    closed = judges(session, checker, config=CLOSED, **more)
    assert stop(closed) is not None
    assert closed.exhausted, "there is nothing left to try again with"
    assert checker.asked == 0
    assert [(each.outcome, each.reason) for each in session[JudgeEvent].all()] == [("skipped", reason)] * 2


async def test_the_cancellation_of_the_run_passes_through_a_check() -> None:
    token = CancellationToken()

    async def act(context: TaskCompletionContext) -> TaskCompletionResult:
        token.cancel(detail="stop")
        await anyio.sleep_forever()
        return OK

    with pytest.raises(CancelledByToken):
        await judges(Session(), Checker(act), cancellation=token).before_stop("", None, "stop")


async def test_a_check_that_hangs_is_stopped_when_its_time_is_over() -> None:
    clock = FakeClock()
    session = Session(clock=clock)
    began = anyio.Event()

    async def act(context: TaskCompletionContext) -> TaskCompletionResult:
        began.set()
        await anyio.sleep_forever()
        return OK

    answers: list[str | None] = []

    async def one() -> None:
        answers.append(await judges(session, Checker(act)).before_stop("", None, "stop"))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await began.wait()
        clock.advance(31)
    assert answers == [None]
    assert session[JudgeEvent].all()[0].reason == "timeout"


@pytest.mark.parametrize("config", [None, CLOSED], ids=["open", "closed"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_the_time_of_the_runs_limits_cuts_a_check_off(
    config: NestedExecutionConfig | None, is_async: bool
) -> None:
    """Nobody has looked then, which an open run is told and a closed one does not survive."""
    clock = FakeClock()
    session = Session(clock=clock)
    began, release = anyio.Event(), threading.Event()
    tell = threadsafe(began.set)

    async def hang(context: TaskCompletionContext) -> TaskCompletionResult:
        tell()
        await anyio.sleep_forever()
        return OK

    def block(context: TaskCompletionContext) -> TaskCompletionResult:
        tell()
        release.wait(60)
        return OK

    with ExecutionContext(Limits(timeout=5.0), clock=clock) as limits:
        mine = judges(session, Checker(hang if is_async else block), config=config, containment=limits)
        async with anyio.create_task_group() as group:
            group.start_soon(mine.before_stop, "", None, "stop")
            await began.wait()
            clock.advance(5)
    release.set()
    (event,) = session[JudgeEvent].all()
    assert (event.outcome, event.reason) == ("skipped", "deadline")
    (checked,) = session[CompletionChecked].all()
    assert (checked.complete, checked.verified) == (config is None, False)
    assert mine.exhausted is (config is CLOSED)


# --- files ---------------------------------------------------------------------------------------------


def test_files_must_be_there_and_be_files() -> None:
    files = InMemoryFilesystem()
    files.mkdir("a")
    files.write("b", "")
    checker = FileOutputChecker(["a", "b", "c"])
    result = checker.check(TaskCompletionContext(Session(), filesystem=files))
    assert not result.complete
    assert ": a, c." in (result.feedback or "")
    strict = FileOutputChecker(["b"], allow_empty=False)
    assert not strict.check(TaskCompletionContext(Session(), filesystem=files)).complete
    assert FileOutputChecker(["b"]).check(TaskCompletionContext(Session(), filesystem=files)).complete
    assert FileOutputChecker([]).check(TaskCompletionContext(Session())).complete


def test_without_a_workspace_no_file_is_there() -> None:
    assert not FileOutputChecker(["a"]).check(TaskCompletionContext(Session())).complete


def test_one_path_is_not_a_list_of_letters() -> None:
    with pytest.raises(UsageError, match=r"\['out.txt'\]"):
        FileOutputChecker("out.txt")


# --- commands ------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Any:
    root = tmp_path / "work"
    root.mkdir()
    (root / "kept.txt").write_text("kept")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("told", "held"):
        os.mkfifo(outside / name)
    files = HostFilesystem(root, store=tmp_path / "store", sandbox=Sandbox(grants=Grants(write=(outside,))))
    yield files
    files.close()


def contents(files: HostFilesystem) -> dict[str, bytes]:
    root = files.host_root
    assert root is not None
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"<dir>"
        for path in sorted(root.rglob("*"))
    }


def check(checker: CommandChecker, files: Filesystem, **more: Any) -> TaskCompletionResult:
    return checker.check(TaskCompletionContext(Session(), filesystem=files, **more))


def test_a_command_must_exit_with_0(workspace: HostFilesystem) -> None:
    assert check(CommandChecker("test -f kept.txt"), workspace).complete
    assert check(CommandChecker(["test", "-f", "kept.txt"]), workspace).complete
    refused = check(CommandChecker("echo seen; echo wrong >&2; exit 3"), workspace)
    assert not refused.complete
    assert refused.feedback == (
        "`echo seen; echo wrong >&2; exit 3` exits with 3; it must exit with 0 before you stop."
        "\n--- output ---\nseen\n--- errors ---\nwrong"
    )


@pytest.mark.parametrize("code", [0, 1])
def test_a_check_does_not_change_the_workspace(workspace: HostFilesystem, code: int) -> None:
    before = contents(workspace)
    command = (
        "echo new > new.txt; mkdir -p cache/deep; echo x > cache/deep/x; echo changed > kept.txt; "
        f"rm -f gone; exit {code}"
    )
    check(CommandChecker(command), workspace)
    assert contents(workspace) == before
    assert not workspace.unfinished()
    # The workspace is free again for the next tool call.
    workspace.begin("next").rollback()


def test_a_command_that_does_not_end_is_killed_with_its_children(
    workspace: HostFilesystem, tmp_path: Path
) -> None:
    before = contents(workspace)
    outside = tmp_path / "outside"
    clock, ends = FakeClock(), list[str]()
    command = f"exec 3> {outside}/held; sleep 1000 & echo x > made; echo > {outside}/told; sleep 1000"

    def when_begun() -> None:
        with (outside / "held").open() as held:
            (outside / "told").read_text()
            clock.advance(0.5)
            ends.append(held.read())

    waiting = threading.Thread(target=when_begun)
    waiting.start()
    context = TaskCompletionContext(Session(clock=clock), filesystem=workspace)
    result = CommandChecker(command, timeout_s=0.5).check(context)
    waiting.join()
    assert not result.complete
    assert "was stopped after 0.5 s" in (result.feedback or "")
    assert ends == [""], "the last process that held the pipe has ended"
    assert contents(workspace) == before


def test_what_a_command_writes_is_limited(workspace: HostFilesystem) -> None:
    result = check(CommandChecker("yes | head -c 1000000; exit 1", max_output_bytes=1000), workspace)
    assert len(result.feedback or "") < 3000


def test_a_command_sees_no_secrets_unless_they_are_allowed(
    workspace: HostFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_API_KEY", "secret")
    assert not check(CommandChecker('test -n "$TEST_API_KEY"'), workspace).complete
    assert check(CommandChecker('test -n "$TEST_API_KEY"', allow_env=["TEST_API_KEY"]), workspace).complete


def test_a_check_runs_in_a_directory_of_the_workspace(workspace: HostFilesystem, tmp_path: Path) -> None:
    workspace.mkdir("sub")
    assert check(CommandChecker('test "$(basename "$PWD")" = sub', directory="sub"), workspace).complete
    for outside in ("..", "nowhere", str(tmp_path)):
        with pytest.raises(UsageError, match="not in the workspace"):
            check(CommandChecker("true", directory=outside), workspace)


def test_a_command_needs_a_workspace_on_disk(workspace: HostFilesystem) -> None:
    for files in (InMemoryFilesystem(), workspace.read_only_view()):
        with pytest.raises(UsageError, match="workspace on disk"):
            check(CommandChecker("true"), files)


def test_judges_can_run_commands_although_they_see_the_workspace_read_only(
    workspace: HostFilesystem,
) -> None:
    session = Session()
    before = contents(workspace)
    mine = judges(session, CommandChecker("echo x > made; test -f asked-for"), filesystem=workspace)
    assert "asked-for" in (stop(mine) or "")
    workspace.write("asked-for", "")
    assert stop(mine) is None
    assert contents(workspace) == {**before, "asked-for": b""}


async def test_a_check_that_is_cancelled_leaves_nothing_running_and_nothing_changed(
    workspace: HostFilesystem, tmp_path: Path
) -> None:
    before = contents(workspace)
    token = CancellationToken()
    told, held = tmp_path / "outside" / "told", tmp_path / "outside" / "held"
    command = CommandChecker(f"echo x > made; exec 3> {held}; echo > {told}; sleep 1000")
    mine = judges(Session(), command, filesystem=workspace, cancellation=token)
    async with anyio.create_task_group() as group:

        async def one() -> None:
            with pytest.raises(CancelledByToken):
                await mine.before_stop("", None, "stop")

        group.start_soon(one)
        with await anyio.to_thread.run_sync(held.open) as pipe:
            await anyio.to_thread.run_sync(told.read_text)
            token.cancel(detail="stop")
            assert await anyio.to_thread.run_sync(pipe.read) == "", "the last process has ended"
    assert contents(workspace) == before


def test_what_a_check_changed_before_the_process_died_is_put_back_by_whoever_opens_the_run(
    tmp_path: Path,
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "kept.txt").write_text("kept")
    session = Session()
    first = HostFilesystem(root, store=tmp_path / "store")
    # The check of a process that died here: it held the workspace and never let go.
    first.begin(workspace_call_id(session.session_id, "check-1"), tool_name="completion check", foreign=True)
    (root / "kept.txt").write_text("changed")
    (root / "new.txt").write_text("new")
    first.close()
    second = HostFilesystem(root, store=tmp_path / "store")
    resources = ResourceRegistry.build({Filesystem: second})
    recover(ExecutionState(session, resources))
    assert contents(second) == {"kept.txt": b"kept"}
    second.close()


@pytest.mark.parametrize("wrong", [{"command": ""}, {"timeout_s": 0}, {"timeout_s": float("inf")}])
def test_a_command_checker_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CommandChecker(**{"command": "true", **wrong})


# --- several -------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[], Checker]] = {
    "ok": lambda: always(OK),
    "not": lambda: always(NOT),
    "fails": lambda: failing(RuntimeError("boom")),
}


@given(
    parts=st.lists(st.sampled_from(sorted(RESULTS)), min_size=1, max_size=5),
    mode=st.sampled_from(["all", "any"]),
)
def test_several_checkers_are_joined_by_and_or_or_with_an_unknown_between(
    parts: list[str], mode: Any
) -> None:
    """Three-valued logic: one that cannot find out matters only if the others do not decide."""
    checker = CompositeChecker([RESULTS[each]() for each in parts], mode)
    context = TaskCompletionContext(Session())
    decisive = "not" if mode == "all" else "ok"
    if decisive not in parts and "fails" in parts:
        with pytest.raises(RuntimeError, match="boom"):
            checker.check(context)
    else:
        assert checker.check(context).complete is ((decisive == "ok") is (decisive in parts))


def test_no_more_checkers_are_asked_than_needed() -> None:
    later = always(OK)
    CompositeChecker([always(NOT), later]).check(TaskCompletionContext(Session()))
    CompositeChecker([always(OK), later], mode="any").check(TaskCompletionContext(Session()))
    assert later.asked == 0


def test_all_that_is_missing_is_said_when_none_of_several_agrees() -> None:
    other = TaskCompletionResult.incomplete("no docs")
    result = CompositeChecker([always(NOT), always(other)], mode="any").check(
        TaskCompletionContext(Session())
    )
    assert result.feedback == "the tests are missing\nno docs"


def test_a_composite_has_the_time_of_its_parts() -> None:
    both = CompositeChecker([CommandChecker("true", timeout_s=100), CommandChecker("true", timeout_s=200)])
    assert both.time_limit is not None
    assert both.time_limit >= timedelta(seconds=300)
    assert CompositeChecker([always(OK)]).time_limit is None
    one = CompositeChecker([CommandChecker("true", timeout_s=100), always(OK)])
    assert one.time_limit is not None
    assert one.time_limit >= timedelta(seconds=100) + MAX_NESTED_DURATION


def test_the_runs_cancellation_is_no_opinion_of_a_checker() -> None:
    with pytest.raises(CancelledByToken):
        CompositeChecker([failing(CancelledByToken("stop")), always(OK)], mode="any").check(
            TaskCompletionContext(Session())
        )


@pytest.mark.parametrize("wrong", [{"checkers": []}, {"checkers": [always(OK)], "mode": "some"}])
def test_a_composite_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompositeChecker(**wrong)


# --- by a model ----------------------------------------------------------------------------------------


def test_every_checker_here_is_a_checker() -> None:
    for each in (
        FileOutputChecker(["a"]),
        CommandChecker("true"),
        CompositeChecker([always(OK)]),
        LLMCompletionVerifier(),
    ):
        assert isinstance(each, TaskCompletionChecker)


def test_a_model_decides_and_its_tokens_are_the_runs() -> None:
    session = Session()
    tracker = BudgetTracker(Budget(max_total_tokens=1_000))
    adapter = answering(CompletionVerdict(False, "Not yet.", ("the tests", "the docs")), total=100)
    mine = judges(
        session,
        LLMCompletionVerifier(),
        adapter=adapter,
        budget_tracker=tracker,
        task="Write tests and docs.",
    )
    assert "Not yet.\n- the tests\n- the docs" in (stop(mine) or "")
    assert tracker.consumed.total == 100
    assert session[NestedEvaluated].all()[0].budget == "shared"
    rendered = adapter.seen[0].prompt.render().text
    assert "Write tests and docs." in rendered
    assert "all done" in rendered


def test_a_model_with_a_budget_of_its_own_leaves_the_runs_alone() -> None:
    session = Session()
    tracker = BudgetTracker(Budget(max_total_tokens=1_000))
    adapter = answering(CompletionVerdict(True, "Fine."), total=100)
    verifier = LLMCompletionVerifier(share_budget=False)
    assert stop(judges(session, verifier, adapter=adapter, budget_tracker=tracker)) is None
    assert tracker.consumed.total is None
    assert session[NestedEvaluated].all()[0].budget == "own"


def test_without_an_adapter_nobody_can_verify_and_that_is_on_record() -> None:
    session = Session()
    assert stop(judges(session, LLMCompletionVerifier())) is None
    assert session[JudgeEvent].all()[0].reason == "adapter"

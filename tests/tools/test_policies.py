"""May this call run? Policies, permissions, and a person's answer that survives the process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from tools_kit import Note, World, looks, succeeds

from treenail.errors import HoldRequired, UsageError
from treenail.tools import (
    PLAN_TOOLS,
    Approval,
    HoldAnswered,
    PermissionMode,
    PermissionRequest,
    Permissions,
    PolicyDecision,
    PolicyState,
    ReadBeforeWritePolicy,
    Rules,
    SequentialDependencyPolicy,
    Tool,
    ToolCall,
    ToolContext,
    ToolHeld,
    ToolPolicy,
    ToolResult,
    answer_hold,
    pending_holds,
    tool,
)
from treenail.tools.files import read_file, write_file

ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@tool
def build(*, context: ToolContext) -> str:
    """Build."""
    ran.append("build")
    return "built"


@tool
def breaks(*, context: ToolContext) -> str:
    """Fail."""
    raise ValueError("no")


@tool(effects="external")
def deploy(where: str = "test", *, context: ToolContext) -> str:
    """Deploy."""
    ran.append(f"deploy {where}")
    context.session.dispatch(Note("deployed"))
    return "deployed"


# --- policies ----------------------------------------------------------------------------------------


def test_a_tool_runs_only_after_those_that_it_depends_on(world: World) -> None:
    """A denial is an error result with a reason, and the handler does not run."""
    policy = SequentialDependencyPolicy({"deploy": frozenset({"build", "breaks"})})
    runner = world.runner(build, breaks, deploy, policies=[policy])
    assert isinstance(policy, ToolPolicy)
    denied = runner.execute(ToolCall("c1", "deploy"))
    assert not denied.success
    assert denied.message == "deploy needs these to succeed first: breaks, build."
    runner.execute(ToolCall("c2", "breaks"))
    runner.execute(ToolCall("c3", "build"))
    denied = runner.execute(ToolCall("c4", "deploy"))
    assert denied.message == "deploy needs these to succeed first: breaks.", "a failure does not count"
    assert (ran, world.outcomes()) == (["build"], ["denied", "failed", "ok", "denied"])
    world.reopen()
    policy = SequentialDependencyPolicy({"deploy": frozenset({"build"})})
    assert world.runner(deploy, policies=[policy]).execute(ToolCall("c5", "deploy")).success, "it is durable"


def test_a_file_that_exists_is_read_before_it_is_written(world: World) -> None:
    policy = ReadBeforeWritePolicy(frozenset({"read_file"}), frozenset({"write_file"}), mount_point="/ws")
    runner = world.runner(read_file, write_file, policies=[policy])

    def write(call_id: str, path: str) -> ToolResult[Any]:
        return runner.execute(ToolCall(call_id, "write_file", {"path": path, "content": "x"}))

    denied = write("c1", "file.txt")
    assert not denied.success
    assert denied.message == "file.txt exists and was not read yet. Read it first with read_file."
    assert write("c2", "new.txt").success, "a new file is free"
    assert write("c3", "new.txt").success, "and known once it was written"
    assert runner.execute(ToolCall("c4", "read_file", {"path": "./file.txt"})).success
    assert write("c5", "file.txt").success
    assert world.files() == {"file.txt": "x", "new.txt": "x"}


def test_reads_side_by_side_are_all_remembered(world: World) -> None:
    """What policies learn from calls that run at once is joined, not overwritten."""
    for number in range(6):
        world.filesystem.write(f"f{number}.txt", "old")
    policy = ReadBeforeWritePolicy(frozenset({"read_file"}), frozenset({"write_file"}))
    runner = world.runner(read_file, write_file, policies=[policy])
    runner.execute_all([ToolCall(f"r{n}", "read_file", {"path": f"f{n}.txt"}) for n in range(6)])
    results = runner.execute_all(
        [ToolCall(f"w{n}", "write_file", {"path": f"f{n}.txt", "content": "new"}) for n in range(6)]
    )
    assert [each.success for each in results] == [True] * 6
    (state,) = world.session[PolicyState].all()
    assert state.invoked_keys == {f"f{n}.txt" for n in range(6)}


@dataclass
class Moody:
    """A policy that does what the test says."""

    on_check: Any = None
    on_success: Any = None
    name: str = "moody"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return self.on_check(context) if self.on_check else PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if self.on_success:
            self.on_success(context)


def _raises(context: ToolContext) -> Any:
    raise RuntimeError("cannot decide")


def test_a_policy_that_fails_has_not_allowed_the_call(world: World) -> None:
    runner = world.runner(build, policies={"build": [Moody(on_check=_raises)]})
    result = runner.execute(ToolCall("c1", "build"))
    assert not result.success
    assert "moody could not decide" in result.message
    assert (ran, world.outcomes()) == ([], ["denied"])
    assert world.runner(build).execute(ToolCall("c2", "build")).success, "nothing is stuck"


def test_what_a_policy_learns_is_part_of_the_call(world: World) -> None:
    """Staged with it, committed with it, and rolled back with it."""

    def learns(context: ToolContext) -> None:
        context.session.dispatch(Note("learned"))

    def learns_and_fails(context: ToolContext) -> None:
        learns(context)
        raise RuntimeError("cannot learn")

    runner = world.runner(build, breaks, policies=[Moody(on_success=learns)])
    runner.execute(ToolCall("c1", "build"))
    runner.execute(ToolCall("c2", "breaks"))
    assert world.notes() == ["before", "learned"]
    failed = world.runner(build, policies=[Moody(on_success=learns_and_fails)]).execute(
        ToolCall("c3", "build")
    )
    assert not failed.success
    assert world.notes() == ["before", "learned"]
    assert world.outcomes() == ["ok", "failed", "failed"]


def test_a_policy_can_look_and_not_touch(world: World) -> None:
    def sneaks(context: ToolContext) -> PolicyDecision:
        assert context.filesystem.read("file.txt").content == "original"
        context.filesystem.write("file.txt", "sneaked")
        return PolicyDecision.allow()

    result = world.runner(build, policies=[Moody(on_check=sneaks)]).execute(ToolCall("c1", "build"))
    assert "ReadOnlyError" in result.message
    assert world.files() == {"file.txt": "original"}


def test_all_policies_must_allow_and_a_reason_is_made_up_if_none_is_given(small_world: World) -> None:
    policies = [Moody(), Moody(on_check=lambda context: PolicyDecision(False), name="strict")]
    result = small_world.runner(build, policies=policies).execute(ToolCall("c1", "build"))
    assert result.message == "The policy strict does not allow build now."


# --- permissions -------------------------------------------------------------------------------------

ASK = Permissions(PermissionMode.ASK)


@pytest.mark.parametrize("mode", [PermissionMode.ASK, PermissionMode.READ_ONLY])
def test_nobody_is_asked_about_a_plan(small_world: World, mode: PermissionMode) -> None:
    """An agent's notes for itself are no effect; the operator can name the tool all the same."""
    planned = ToolCall("c1", "setup_plan", {"objective": "o", "steps": ["a"]})
    assert small_world.runner(*PLAN_TOOLS, permissions=Permissions(mode)).execute(planned).success
    named = Permissions(mode, tools={"setup_plan": PermissionMode.ASK})
    with pytest.raises(HoldRequired):
        small_world.runner(*PLAN_TOOLS, permissions=named).execute(
            ToolCall("c2", planned.name, planned.arguments)
        )


def test_read_only_refuses_what_has_effects(world: World) -> None:
    permissions = Permissions(PermissionMode.READ_ONLY, tools={"succeeds": PermissionMode.AUTO})
    runner = world.runner(succeeds, looks, permissions=permissions)
    assert runner.execute(ToolCall("c1", "looks")).success
    refused = runner.execute(ToolCall("c2", "succeeds"))
    assert not refused.success
    assert "read-only" in refused.message
    assert world.outcomes() == ["ok", "denied"]
    assert world.files() == {"file.txt": "original"}


@pytest.mark.parametrize("approved", [True, False])
def test_a_hold_is_answered_in_another_process(world: World, approved: bool) -> None:
    """The call waits in the log; the answer, given elsewhere, is for that one call."""
    with pytest.raises(HoldRequired) as caught:
        world.runner(deploy, permissions=ASK).execute(ToolCall("c1", "deploy", {"where": "prod"}))
    assert (caught.value.call_id, caught.value.tool_name) == ("c1", "deploy")
    assert (ran, world.ends()) == ([], [])
    world.reopen()
    (held,) = pending_holds(world.session)
    assert (held.call_id, held.tool_name, held.arguments) == ("c1", "deploy", '{"where": "prod"}')
    answer_hold(world.session, "c1", approved=approved, note="Not on a Friday.", answered_by="ann")
    assert pending_holds(world.session) == ()
    world.reopen()
    context = ToolContext(world.state, is_resume=True)
    runner = world.runner(deploy, permissions=ASK)
    result = runner.execute(ToolCall("c1", "deploy", {"where": "prod"}), context=context)
    assert result.success is approved
    assert ran == (["deploy prod"] if approved else [])
    assert world.outcomes() == (["ok"] if approved else ["denied"])
    if not approved:
        assert result.message == "A person refused this call of deploy. Not on a Friday."
    with pytest.raises(HoldRequired):
        runner.execute(ToolCall("c2", "deploy", {"where": "prod"}))


def test_asking_again_holds_once(world: World) -> None:
    runner = world.runner(deploy, permissions=ASK)
    for _ in range(3):
        with pytest.raises(HoldRequired):
            runner.execute(ToolCall("c1", "deploy"))
    assert len(world.session[ToolHeld].all()) == 1


def test_an_answer_is_for_these_arguments_and_for_one_run(world: World) -> None:
    """A provider that uses an id again does not inherit an approval."""
    runner = world.runner(deploy, permissions=ASK)
    with pytest.raises(HoldRequired):
        runner.execute(ToolCall("call_0", "deploy", {"where": "test"}))
    answer_hold(world.session, "call_0", approved=True)
    with pytest.raises(HoldRequired):
        runner.execute(ToolCall("call_0", "deploy", {"where": "prod"}))
    answer_hold(world.session, "call_0", approved=True)
    assert runner.execute(ToolCall("call_0", "deploy", {"where": "prod"})).success
    with pytest.raises(HoldRequired):
        runner.execute(ToolCall("call_0", "deploy", {"where": "prod"}))
    assert ran == ["deploy prod"]


def test_answering_what_nobody_asked_is_an_error(small_world: World) -> None:
    with pytest.raises(UsageError, match="no call 'c9' waits"):
        answer_hold(small_world.session, "c9", approved=True)


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("face", ["sync", "async"])
def test_an_approver_answers_at_once_or_leaves_it_to_later(
    world: World, said: bool | None, face: str
) -> None:
    asked: list[PermissionRequest] = []

    def approver(request: PermissionRequest) -> bool | None:
        asked.append(request)
        return said

    permissions = Permissions(tools={"deploy": PermissionMode.ASK}, approver=approver)
    runner = world.runner(deploy, succeeds, permissions=permissions)

    def run(call: ToolCall) -> ToolResult[Any]:
        return runner.execute(call) if face == "sync" else anyio.run(runner.aexecute, call)

    if said is None:
        with pytest.raises(HoldRequired):
            run(ToolCall("c1", "deploy"))
    else:
        assert run(ToolCall("c1", "deploy")).success is said
    assert asked == [PermissionRequest("c1", "deploy", "{}", "external")]
    assert len(pending_holds(world.session)) == (1 if said is None else 0)
    assert run(ToolCall("c2", "succeeds")).success, "a tool under auto is not asked about"
    assert len(asked) == 1


def test_changed_arguments_are_durable_before_the_call_and_the_model_is_told(world: World) -> None:
    """A call that is cut off runs again as the person changed it, and nobody is asked a second time."""
    cuts = [True]

    @tool(effects="workspace")
    def put(path: str, *, context: ToolContext) -> str:
        """Write a file."""
        (answer,) = context.state.session[HoldAnswered].all()
        ran.append(f"put {path}, recorded as {answer.arguments}")
        context.filesystem.write(path, "x")
        if cuts.pop():
            cuts.append(False)
            raise KeyboardInterrupt
        return "written"

    once = [Approval(True, arguments='{"path": "b.txt"}')]
    call = ToolCall("c1", "put", {"path": "a.txt"})
    with pytest.raises(KeyboardInterrupt):
        world.runner(put, permissions=Permissions(PermissionMode.ASK, approver=lambda _: once.pop())).execute(
            call
        )
    world.reopen()
    again = world.runner(put, permissions=ASK).execute(call, context=ToolContext(world.state, is_resume=True))
    assert again.message == (
        'A person changed the arguments before this call of put ran, to {"path": "b.txt"}.\nwritten'
    )
    assert ran == ['put b.txt, recorded as {"path": "b.txt"}'] * 2
    assert world.files() == {"file.txt": "original", "b.txt": "x"}
    assert dict(world.ends()[-1].params) == {"path": "b.txt"}


def test_changed_arguments_must_fit_and_pass_the_rules(world: World) -> None:
    def run(arguments: str, **more: Any) -> str:
        asks = Permissions(PermissionMode.ASK, approver=lambda _: Approval(True, arguments=arguments), **more)
        first = json.dumps({"path": "file.txt", "content": "x"})
        call = ToolCall(f"c{len(world.ends())}", "write_file", first)
        return world.runner(write_file, permissions=asks).execute(call).message

    assert "do not fit" in run('{"nowhere": 1}')
    secret = json.dumps({"path": "secrets/key", "content": "x"})
    denied = run(secret, rules=Rules(deny=["write_file: secrets/**"]))
    assert denied == "The operator's rule 'write_file: secrets/**' refuses this call as a person changed it."
    assert world.files() == {"file.txt": "original"}


def test_a_refusal_tells_the_model_the_reason(world: World) -> None:
    asks = Permissions(PermissionMode.ASK, approver=lambda _: Approval(False, "Not on a Friday."))
    result = world.runner(deploy, permissions=asks).execute(ToolCall("c1", "deploy"))
    assert (result.success, result.message) == (
        False,
        "A person refused this call of deploy. Not on a Friday.",
    )


def test_a_preview_is_what_the_tool_would_do_and_changes_nothing(world: World) -> None:
    seen: list[str] = []

    def approver(request: PermissionRequest) -> bool:
        preview = request.preview()
        seen.append("" if preview is None else preview.text)
        return False

    runner = world.runner(write_file, permissions=Permissions(PermissionMode.ASK, approver=approver))
    runner.execute(ToolCall("c1", "write_file", {"path": "file.txt", "content": "new\n"}))
    assert "-original" in seen[0]
    assert "+new" in seen[0]
    assert world.files() == {"file.txt": "original"}


def test_an_approver_that_fails_leaves_it_to_a_person(world: World) -> None:
    def approver(request: PermissionRequest) -> bool | None:
        raise EOFError("no terminal")

    permissions = Permissions(PermissionMode.ASK, approver=approver)
    with pytest.raises(HoldRequired):
        world.runner(deploy, permissions=permissions).execute(ToolCall("c1", "deploy"))
    assert [each.call_id for each in pending_holds(world.session)] == ["c1"]
    assert world.runner(deploy).execute(ToolCall("c2", "deploy")).success, "nothing is stuck"


def test_policies_may_be_given_per_tool(small_world: World) -> None:
    never: Mapping[str, Any] = {"deploy": [Moody(on_check=lambda context: PolicyDecision.deny("Never."))]}
    runner = small_world.runner(build, deploy, policies=never)
    assert runner.execute(ToolCall("c1", "build")).success
    assert runner.execute(ToolCall("c2", "deploy")).message == "Never."

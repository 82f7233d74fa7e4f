"""Isolated and read-only subagents: what they change comes back whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from subagents_kit import WORKER, evidence, parent, read_note, saying, subagents, write_note

from treenail import Agent
from treenail.conversation import get_inner_messages
from treenail.errors import UsageError
from treenail.log.sqlite import SqliteLog
from treenail.presenters.acp.runs import ChangingPermissions
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, Session
from treenail.subagents import Subagent, SubagentChangesApplied, SubagentStatus
from treenail.subagents.events import SubagentCharter
from treenail.tools import FILE_TOOLS, PermissionMode, ToolContext, boundaries, rollback_to_call, tool
from treenail.tools.shell import run_command
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

pytestmark = pytest.mark.anyio

FILES = {"a.txt": "one\n", "b/c.txt": "two\n", "b/d.txt": "three\n"}


@pytest.fixture(params=["memory", "host"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> ExecutionState:
    filesystem: Filesystem
    if request.param == "memory":
        filesystem = InMemoryFilesystem(FILES)
    else:
        (tmp_path / "work").mkdir()
        filesystem = HostFilesystem(tmp_path / "work", store=tmp_path / "store")
        for path, text in FILES.items():
            filesystem.write(path, text)
    return parent(SqliteLog(tmp_path / "runs.db"), filesystem)


def files(state: ExecutionState) -> dict[str, str]:
    filesystem = ToolContext(state).filesystem
    return {each.path: filesystem.read(each.path).content for each in filesystem.glob("**/*") if each.is_file}


def results(state: ExecutionState, child: Subagent) -> list[str]:
    """What a child's tools have answered, as its own log has it."""
    own = Session.open(state.session.log, child.session_id, read_only=True)
    return [each.content for each in get_inner_messages(own) if each.role == "tool"]


EDITOR = Agent("editor", tools=FILE_TOOLS, retry=None)
EDITS = (
    Answer("", [("write_file", {"path": "a.txt", "content": "ONE\n"})]),
    Answer("", [("write_file", {"path": "new/e.txt", "content": "four\n"})]),
    Answer("", [("delete_file", {"path": "b/d.txt"})]),
    "edited",
)
EDITED = {"a.txt": "ONE\n", "b/c.txt": "two\n", "new/e.txt": "four\n"}


async def test_an_isolated_child_changes_nothing_until_it_is_applied(made: ExecutionState) -> None:
    async with subagents(made, saying(*EDITS), agents=[EDITOR]) as s:
        child = s.spawn("editor", "edit", workspace="isolated")
        outcome = await s.wait()
        assert outcome.complete, outcome.render()
        assert "4 paths (a.txt, b/d.txt, new, new/e.txt)" in evidence(made)[-1].artifacts[0]
        assert files(made) == FILES
        with s.copy_of(child.id) as copy:
            shown = copy.diff_since_fork()
        assert {each.path: each.kind for each in shown.changes} == {
            "a.txt": "modified",
            "b/d.txt": "deleted",
            "new": "added",
            "new/e.txt": "added",
        }
        assert "-one\n+ONE\n" in shown.text
        result = await s.apply(child.id)
        assert result.success, result.message
        assert files(made) == EDITED


async def test_applying_is_one_transaction_that_can_be_rolled_back(made: ExecutionState) -> None:
    async with subagents(made, saying(*EDITS), agents=[EDITOR]) as s:
        child = s.spawn("editor", "edit", workspace="isolated")
        await s.wait()
        await s.apply(child.id)
        assert len(made.session[SubagentChangesApplied].all()) == 1
        rollback_to_call(made, boundaries(made.session)[-1].call_id)
        assert files(made) == FILES
        assert made.session[SubagentChangesApplied].all() == ()
        again = await s.apply(child.id)
        assert again.success
    assert files(made) == EDITED


async def test_a_conflict_is_reported_and_nothing_is_half_applied(made: ExecutionState) -> None:
    async with subagents(made, saying(*EDITS), agents=[EDITOR]) as s:
        child = s.spawn("editor", "edit", workspace="isolated")
        await s.wait()
        ToolContext(made).filesystem.write("b/d.txt", "changed meanwhile\n")
        refused = await s.apply(child.id)
        assert not refused.success
        assert "b/d.txt" in refused.message
        assert files(made) == {**FILES, "b/d.txt": "changed meanwhile\n"}
        assert made.session[SubagentChangesApplied].all() == ()
        ToolContext(made).filesystem.write("b/d.txt", FILES["b/d.txt"])
        assert (await s.apply(child.id)).success
    assert files(made) == EDITED


async def test_what_a_child_changes_later_can_be_applied_after_what_it_changed_before(
    made: ExecutionState,
) -> None:
    more = (*EDITS, Answer("", [("write_file", {"path": "a.txt", "content": "UNO\n"})]), "edited again")
    async with subagents(made, saying(*more), agents=[EDITOR]) as s:
        child = s.spawn("editor", "edit", workspace="isolated")
        await s.wait()
        await s.apply(child.id)
        nothing = await s.apply(child.id)
        assert nothing.success
        assert "applied before" in nothing.message
        s.send(child.id, "once more")
        await s.wait()
        assert (await s.apply(child.id)).success
    assert files(made) == {**EDITED, "a.txt": "UNO\n"}


async def test_a_copy_begins_where_the_workspace_was_when_the_child_started(made: ExecutionState) -> None:
    """Neither what the parent writes later, nor what a call under way has written, shows in the copy."""
    script = saying(Answer("", [("read_note", {"path": "a.txt"})]), "done")
    async with subagents(made, script, agents=[WORKER]) as s:
        call = ToolContext(made).filesystem.begin("a call under way")
        ToolContext(made).filesystem.write("a.txt", "in flight\n")
        first = s.spawn("worker", "read", workspace="isolated")
        await s.wait()
        call.finish()
        second = s.spawn("worker", "read", workspace="isolated")
        await s.wait()
    assert results(made, first) == ["one\n"]
    assert results(made, second) == ["in flight\n"]


async def test_a_read_only_child_is_refused_every_change(made: ExecutionState) -> None:
    agent = Agent("reader", tools=(write_note, read_note), retry=None)
    script = saying(Answer("", [("write_note", {"path": "a.txt", "text": "x"})]), "ok")
    async with subagents(made, script, agents=[agent]) as s:
        child = s.spawn("reader", "try", workspace="read_only")
        await s.wait()
    assert child.status is SubagentStatus.COMPLETED
    assert "read-only" in results(made, child)[0]
    assert files(made) == FILES


async def test_a_read_only_child_is_refused_effects_outside_also_in_an_editor(made: ExecutionState) -> None:
    """The editor's mode is looked up at each call; what a child may do is never more than its own."""
    paid = []

    def pay() -> str:
        """Pay something."""
        paid.append(1)
        return "paid"

    agent = Agent("reader", tools=(tool(effects="external")(pay),), retry=None)
    permissions = ChangingPermissions(current=lambda: PermissionMode.AUTO)
    script = saying(Answer("", [("pay", {})]), "ok")
    async with subagents(made, script, agents=[agent], permissions=permissions) as s:
        child = s.spawn("reader", "try", workspace="read_only")
        await s.wait()
    assert "read-only" in results(made, child)[0]
    assert paid == []


async def test_a_command_works_in_the_copy_and_its_changes_come_back(tmp_path: Path) -> None:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "a.txt").write_text("one\n")
    (tmp_path / "work" / "sub" / "b.txt").write_text("two\n")
    filesystem = HostFilesystem(tmp_path / "work", store=tmp_path / "store")
    state = parent(SqliteLog(tmp_path / "runs.db"), filesystem)
    shell = Agent("shell", tools=(run_command, *FILE_TOOLS), retry=None)
    script = saying(
        Answer("", [("write_file", {"path": "c.txt", "content": "three\n"})]),
        Answer("", [("run_command", {"command": "cat a.txt c.txt > all.txt; rm a.txt; chmod +x c.txt"})]),
        Answer("", [("run_command", {"command": "rm -r sub; false"})]),
        "done",
    )
    async with subagents(state, script, agents=[shell]) as s:
        child = s.spawn("shell", "work", workspace="isolated")
        outcome = await s.wait()
        assert outcome.complete, outcome.render()
        assert sorted(files(state)) == ["a.txt", "sub/b.txt"]
        result = await s.apply(child.id)
    assert result.success, result.message
    assert files(state) == {"all.txt": "one\nthree\n", "c.txt": "three\n"}
    assert (tmp_path / "work" / "c.txt").stat().st_mode & 0o111


async def test_a_copy_that_is_gone_is_not_taken_for_one_without_changes(tmp_path: Path) -> None:
    """A later process that finds nothing where the copy was says so, and applies nothing."""
    (tmp_path / "work").mkdir()
    filesystem = HostFilesystem(tmp_path / "work", store=tmp_path / "store")
    state = parent(SqliteLog(tmp_path / "runs.db"), filesystem)
    async with subagents(state, saying(*EDITS[1::2]), agents=[EDITOR]) as s:
        child = s.spawn("editor", "edit", workspace="isolated")
        assert (await s.wait()).complete
    with Session.open(state.session.log, child.session_id, read_only=True) as own:
        charter = own[SubagentCharter].latest()
    assert charter is not None
    assert charter.fork_place is not None
    shutil.rmtree(charter.fork_place)
    async with subagents(state, saying("x"), agents=[EDITOR]) as later:
        with pytest.raises(UsageError, match=f"the copy .* {child.id} .* is gone"), later.copy_of(child.id):
            raise AssertionError("there is no copy")
        refused = await later.apply(child.id)
    assert not refused.success
    assert "is gone" in refused.message
    assert state.session[SubagentChangesApplied].all() == ()


async def test_a_copy_that_cannot_be_made_fails_the_child_and_says_why() -> None:
    state = parent(filesystem=InMemoryFilesystem().read_only_view())
    async with subagents(state, saying("x")) as s:
        child = s.spawn("worker", "edit", workspace="isolated")
        await s.wait()
    assert child.status is SubagentStatus.FAILED
    assert "cannot be copied" in evidence(state)[-1].reason

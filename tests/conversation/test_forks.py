"""A fork knows where it comes from, and may be told what the branch that it leaves behind did."""

from __future__ import annotations

import anyio
from conversation_kit import violations

from treenail import Agent, tool
from treenail.conversation import BranchSummary, branch_summary, replay
from treenail.conversation.branches import MAX_BRANCH_CHARS
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import SessionForked, fork_at
from treenail.turns import InnerLoop, TurnState
from treenail.workspace import InMemoryFilesystem


@tool(effects="workspace")
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("note.txt", text)
    return f"noted {text}"


AGENT = Agent("noter", instructions="You note.", tools=[note])


def a_run():
    script = [
        Answer("", [("note", {"text": "first"})]),
        Answer("", [("note", {"text": "second"})]),
        "It went wrong.",
    ]
    return AGENT.run("Note it.", provider=ScriptedProvider(script), workspace=InMemoryFilesystem())


def test_a_fork_has_its_lineage_in_the_log_and_the_model_does_not_see_it() -> None:
    run = a_run()
    session = run.execution_state.session
    fork = fork_at(run.execution_state, "call_2_1").session
    (lineage,) = fork[SessionForked].all()
    assert lineage.from_session == str(session.session_id)
    assert lineage.at_seq == fork.head - 1
    assert (lineage.call_id, lineage.side) == ("call_2_1", "before")
    then = replay(session, upto=lineage.at_seq)
    assert replay(fork).items == then.items
    assert fork[BranchSummary].all() == ()


def test_a_fork_that_is_told_knows_what_the_other_branch_did() -> None:
    """The call at which they part gets its own result first; the summary stands behind it."""
    run = a_run()
    forked = run.fork(before=run.tool_calls[1])
    seen: list[ModelRequest] = []

    def look(request: ModelRequest) -> str:
        seen.append(request)
        return "Done otherwise."

    going_on = ScriptedProvider(["never", "never", look])

    ended = anyio.run(InnerLoop(forked, going_on, AGENT.prompt).resume)
    assert ended.state is TurnState.COMPLETED
    (request,) = seen
    assert [each.role for each in request.items][-3:] == ["assistant", "tool", "user"]
    assert "noted second" in request.items[-2].text
    assert "It went wrong." in request.items[-1].text
    assert request.items[-1].text.startswith("<branch-summary>")
    assert violations(request.items) == []


def test_what_a_fork_is_told_is_bounded() -> None:
    script = [Answer("x" * 3_000, [("note", {"text": f"{place} " * 500})]) for place in range(30)]
    provider = ScriptedProvider([*script, "end"])
    run = AGENT.run("Note much.", provider=provider, workspace=InMemoryFilesystem())
    told = branch_summary(run.execution_state.session, 3)
    assert told is not None
    assert len(told.summary) <= MAX_BRANCH_CHARS
    assert told.strategy == "deterministic"

"""A parent that is killed at any event of any of its sessions goes on, and does nothing twice.

The lead starts three children at once: one that shares its workspace, one that works on a copy, one that
only reads. It waits for them and applies the copy's changes. The process is killed right after the n-th
append to the store, whoever made it. Another process then goes on with what it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from dying import DyingLog, Kind, dies_after, dying_in, keep_in, runs_in, worth_a_kill
from killing import EVERY_MOMENT
from tests.forks import ProcessKilled, in_child

from treenail import Agent, tool
from treenail.conversation import SubagentEvent
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, Subagents, SubagentStatus, subagent_tools
from treenail.subagents.states import apply_event
from treenail.turns import InnerLoop, TurnStarted, TurnState, turn_state
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem


@tool
def add_line(path: str, text: str, *, context) -> str:
    """Add a line to a file."""
    context.filesystem.write(path, text + "\n", mode="append")
    return "added"


AGENTS = [Agent(name, tools=(add_line,), retry=None) for name in ("sharer", "copier", "reader")]
SCRIPTS = {
    "sharer": ScriptedProvider([Answer("", [("add_line", {"path": "shared.txt", "text": "s"})]), "shared"]),
    "copier": ScriptedProvider(
        [
            Answer("", [("add_line", {"path": "copied.txt", "text": "c"})]),
            Answer("", [("add_line", {"path": "old.txt", "text": "more"})]),
            "copied",
        ]
    ),
    "reader": ScriptedProvider(["read"]),
}
LEAD = ScriptedProvider(
    [
        Answer(
            "",
            [
                ("spawn_agent", {"agent": "sharer", "task": "share"}),
                ("spawn_agent", {"agent": "copier", "task": "copy", "workspace": "isolated"}),
                ("spawn_agent", {"agent": "reader", "task": "read", "workspace": "read_only"}),
            ],
        ),
        Answer("", [("wait_agent", {})]),
        Answer("", [("apply_agent", {"id": "copier-2"})]),
        Answer("", [("add_line", {"path": "shared.txt", "text": "lead"})]),
        "all done",
    ]
)
RESULT = {"old.txt": "old\nmore\n", "copied.txt": "c\n", "shared.txt": "s\nlead\n"}
SHARES = 2
"""In how many tests the kills are done, so that they can run side by side."""
CHILDREN = ("sharer-1", "copier-2", "reader-3")


async def lead(directory: Path, log: Any, agents: Sequence[Agent] = AGENTS) -> TurnState:
    """Begin the lead's turn, or go on with it."""
    known = [each for each in log.sessions() if each.parent_id is None]
    session = Session.open(log, known[0].session_id) if known else Session(log=log)
    filesystem = HostFilesystem(directory / "work", store=directory / "files")
    state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}))
    runner = LoopRunner(lambda agent: SCRIPTS[agent.name])
    try:
        async with Subagents(state, agents, runner=runner) as subagents:
            agent = Agent("lead", tools=(add_line, *subagent_tools(subagents)), retry=None)
            loop = InnerLoop(state, LEAD, agent.prompt, agent="lead")
            begun = session[TurnStarted].latest() is not None
            return (await (loop.resume() if begun else loop.run("lead"))).state
    finally:
        session.close()
        filesystem.close()


def run(directory: Path, number: int) -> list[Kind]:
    dies_after(number)
    log = dying_in(directory)
    assert anyio.run(lead, directory, log) is TurnState.COMPLETED
    return DyingLog.kinds


def prepared(directory: Path, store: str = "sqlite") -> Path:
    (directory / "work").mkdir(parents=True)
    keep_in(directory, store)
    (directory / "work" / "old.txt").write_text("old\n")
    return directory


def ended(directory: Path) -> dict[str, tuple[str, int]]:
    """The children that the parent's log knows to have ended: their session, and how long its log is."""
    with runs_in(directory) as log:
        found = {}
        for event in history(log):
            if event.event == "finished":
                head = log.info(UUID(event.child_session_id)).head
                found[event.subagent_id] = (event.child_session_id, head)
        return found


def history(log: Any) -> list[SubagentEvent]:
    roots = [each for each in log.sessions() if each.parent_id is None]
    if not roots:
        return []
    session = Session.open(log, roots[0].session_id, read_only=True)
    return [value for _, value in session.events() if isinstance(value, SubagentEvent)]


def check(directory: Path) -> None:
    """Everything is there once, and the log tells a story that the table allows."""
    work = directory / "work"
    assert {each.name: each.read_text() for each in work.iterdir()} == RESULT
    with runs_in(directory) as log:
        events = history(log)
        stands: dict[str, SubagentStatus] = {}
        for event in events:
            stands[event.subagent_id] = apply_event(stands.get(event.subagent_id), event)
        assert stands == dict.fromkeys(CHILDREN, SubagentStatus.COMPLETED)
        names = Counter((each.subagent_id, each.event) for each in events)
        for child in CHILDREN:
            assert names[child, "queued"] == names[child, "finished"] == names[child, "started"] == 1
        for session_id in {each.child_session_id for each in events}:
            own = Session.open(log, UUID(session_id), read_only=True)
            assert turn_state(own) is TurnState.COMPLETED
            assert len(own[TurnStarted].all()) == 1


@pytest.mark.parametrize(
    ("store", "share", "shares"),
    [*(("sqlite", share, SHARES) for share in range(SHARES)), ("postgres", 0, 1 if EVERY_MOMENT else 12)],
)
def test_a_killed_parent_goes_on_wherever_it_was(base: Path, store: str, share: int, shares: int) -> None:
    """After a kill at every kind of append, the same workspace comes out and every child has worked once."""
    whole = prepared(base / "whole", store)
    kinds = in_child(lambda: run(whole, 0))
    check(base / "whole")
    survivors = 0
    for number in worth_a_kill(kinds)[share::shares]:
        directory = prepared(base / f"at-{number}", store)
        try:
            in_child(lambda directory=directory, number=number: run(directory, number))
        except ProcessKilled:
            pass
        else:
            # Children run side by side: another order may need an append less.
            survivors += 1
        before = ended(directory)
        in_child(lambda directory=directory: run(directory, 0))
        check(directory)
        with runs_in(directory) as log:
            for session_id, head in before.values():
                assert log.info(UUID(session_id)).head == head, "a finished child was touched again"
    assert survivors <= 2


def test_a_child_whose_agent_is_gone_is_detached_with_a_way_to_go_on(base: Path) -> None:
    """What cannot go on here is not forgotten and not called done: the lead is told, and so is the log."""
    directory = prepared(base / "killed")
    with pytest.raises(ProcessKilled):
        # Somewhere in the middle of the children's work.
        in_child(lambda: run(directory, 22))
    with runs_in(directory) as log:
        left = {each.subagent_id: each.status for each in history(log)}
    assert "running" in left.values()

    def go_on() -> None:
        with runs_in(directory) as log:
            anyio.run(lead, directory, log, [])

    in_child(go_on)
    with runs_in(directory) as log:
        last = {each.subagent_id: each for each in history(log)}
    for name, status in left.items():
        if status in ("running", "queued"):
            assert last[name].status == "detached"
            assert "is not known here" in last[name].reason
            assert any(last[name].child_session_id in each for each in last[name].next_actions)
        else:
            assert last[name].status == status

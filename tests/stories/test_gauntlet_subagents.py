"""The gauntlet, subagents: a completion and a timeout on the running system, judged by its logs alone.

A lead works on a SQLite store, asks for a subagent through its tools, and ends. Afterwards the store is
opened again, and what the contract wants as evidence is looked for there.
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import anyio

from treenail import Agent, tool
from treenail.containment import Limits
from treenail.conversation import SubagentEvent, replay
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import LoopRunner, SubagentLimits, Subagents, subagent_tools
from treenail.turns import InnerLoop, TurnState, contain, turn_state
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem


@tool
def write_report(text: str, *, context) -> str:
    """Write the report."""
    context.filesystem.write("report.txt", text)
    return "written"


REPORTER = Agent("reporter", "You report.", tools=(write_report,), retry=None)


class Listening(ScriptedProvider):
    """A scripted model that keeps what it was sent."""

    def __init__(self, script) -> None:
        super().__init__(script)
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest):
        self.requests.append(request)
        async for each in super().stream(request):
            yield each


class Silent(ScriptedProvider):
    """A model that never answers."""

    async def stream(self, request: ModelRequest):
        await anyio.sleep_forever()
        yield  # never reached; it makes this a generator


def lead(directory: Path, model: ScriptedProvider, childs_model: ScriptedProvider) -> UUID:
    """Let a lead work to its end, and close everything."""

    async def work() -> UUID:
        with SqliteLog(directory / "runs.db") as log, Session(log=log) as session:
            (directory / "work").mkdir()
            filesystem = HostFilesystem(directory / "work", store=directory / "files")
            state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}))
            containment = contain(session, Limits(max_steps=50, timeout=60))
            async with Subagents(
                state,
                [REPORTER],
                runner=LoopRunner(childs_model),
                limits=SubagentLimits(timeout_s=30),
                containment=containment,
            ) as subagents:
                agent = Agent("lead", tools=subagent_tools(subagents), retry=None)
                loop = InnerLoop(state, model, agent.prompt, agent="lead", containment=containment)
                result = await loop.run("have a report written")
            assert result.state is TurnState.COMPLETED
            containment.close()
            filesystem.close()
            return session.session_id

    return anyio.run(work)


def test_a_subagent_s_completion_is_in_the_log_and_in_what_the_lead_is_sent(tmp_path: Path) -> None:
    model = Listening(
        [
            Answer("", [("spawn_agent", {"agent": "reporter", "task": "Report on the weather."})]),
            Answer("", [("wait_agent", {})]),
            "there is a report",
        ]
    )
    child = ScriptedProvider([Answer("", [("write_report", {"text": "rain"})]), "It rains; see report.txt."])
    run_id = lead(tmp_path, model, child)

    assert (tmp_path / "work" / "report.txt").read_text() == "rain"
    with SqliteLog(tmp_path / "runs.db") as log:
        session = Session.open(log, run_id, read_only=True)
        events = [each for _, each in session.events() if isinstance(each, SubagentEvent)]
        assert [each.event for each in events] == ["queued", "started", "finished"]
        end = events[-1]
        assert (end.status, end.agent, end.summary) == ("completed", "reporter", "It rains; see report.txt.")
        assert end.elapsed_ms is not None
        own = Session.open(log, UUID(end.child_session_id), read_only=True)
        assert turn_state(own) is TurnState.COMPLETED
        assert own.parent_id == run_id
        sent = replay(session).items
    told = [each.text for each in sent if "Subagent reporter-1 (reporter): finished" in each.text]
    assert len(told) == 1
    assert not any("queued" in each.text and "Subagent" in each.text for each in sent if each.role == "user")
    # What was sent before is a prefix of what is sent next, also where endings come in between.
    for earlier, later in zip(model.requests, model.requests[1:], strict=False):
        assert tuple(later.items[: len(earlier.items)]) == tuple(earlier.items)
    assert tuple(sent[: len(model.requests[-1].items)]) == tuple(model.requests[-1].items)


def test_a_subagent_s_timeout_is_told_with_what_to_do_and_is_no_success(tmp_path: Path) -> None:
    model = Listening(
        [
            Answer("", [("spawn_agent", {"agent": "reporter", "task": "Report.", "timeout_seconds": 0.2})]),
            Answer("", [("wait_agent", {})]),
            "there is no report",
        ]
    )
    run_id = lead(tmp_path, model, Silent([]))

    with SqliteLog(tmp_path / "runs.db") as log:
        session = Session.open(log, run_id, read_only=True)
        assert turn_state(session) is TurnState.COMPLETED
        events = [each for _, each in session.events() if isinstance(each, SubagentEvent)]
        assert [each.event for each in events] == ["queued", "started", "timed_out"]
        end = events[-1]
        assert end.timeout_ms == 200
        assert end.elapsed_ms is not None
        assert end.elapsed_ms >= 200
        assert end.reason
        assert end.next_actions
        own = Session.open(log, UUID(end.child_session_id), read_only=True)
        assert turn_state(own) is TurnState.TIMED_OUT
        sent = replay(session).items
    waited = next(each.text for each in sent if each.role == "tool" and '"status": "partial"' in each.text)
    assert '"timed_out": ["reporter-1"]' in waited
    assert any("timed out" in each.text and "Next:" in each.text for each in sent)

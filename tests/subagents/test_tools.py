"""Subagents as a model uses them: through tools, in a run of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from subagents_kit import ASSISTANT, WORKER, Doors, WaitingProvider, parent, saying, subagents, told

from treenail import Agent, tool
from treenail.conversation import get_inner_messages, replay
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState
from treenail.subagents import SubagentLimits, subagent_tools, with_subagents
from treenail.tools import ToolCall, ToolContext, ToolResult, ToolRunner
from treenail.turns import InnerLoop, TurnState

pytestmark = pytest.mark.anyio


async def call(
    state: ExecutionState, tools: Any, name: str, *, call_id: str = "", resume: bool = False, **arguments: Any
) -> ToolResult[Any]:
    runner = ToolRunner(state, {each.name: each for each in tools})
    call = ToolCall(call_id or f"call-{name}-{len(told(state))}", name, arguments)
    return await runner.aexecute(call, context=ToolContext(state, is_resume=resume))


async def test_a_model_starts_children_waits_for_them_and_reads_their_answers(tmp_path: Path) -> None:
    """The tools' answers and the endings that the log tells are all in the parent's next request."""
    state = parent(SqliteLog(tmp_path / "runs.db"))
    script = saying(
        Answer(
            "",
            [
                ("spawn_agent", {"agent": "assistant", "task": "What is six times seven?"}),
                (
                    "spawn_agent",
                    {"agent": "assistant", "task": "And six times nine?", "workspace": "read_only"},
                ),
            ],
        ),
        Answer("", [("wait_agent", {}), ("list_agents", {})]),
        "42, and 42 again",
    )
    async with subagents(state, saying("it is 42")) as s:
        lead = Agent("lead", "You lead.", tools=subagent_tools(s), retry=None)
        loop = InnerLoop(state, script, lead.prompt, agent="lead")
        result = await loop.run("ask around")
    assert result.state is TurnState.COMPLETED
    texts = [each.content for each in get_inner_messages(state.session) if each.role == "tool"]
    assert [json.loads(each)["id"] for each in texts[:2]] == ["assistant-1", "assistant-2"]
    outcome = json.loads(texts[2])
    assert outcome["complete"] is True
    assert outcome["results"] == {"assistant-1": "it is 42", "assistant-2": "it is 42"}
    assert [each["status"] for each in json.loads(texts[3])] == ["completed", "completed"]
    said = [each.text for each in replay(state.session).items if "finished" in each.text]
    assert len(said) == 2


async def test_a_wish_beyond_the_limits_is_narrowed_and_the_model_is_told() -> None:
    state = parent()
    async with subagents(state, saying("x"), limits=SubagentLimits(timeout_s=60)) as s:
        tools = subagent_tools(s)
        answer = await call(state, tools, "spawn_agent", agent="worker", task="t", timeout_seconds=3600)
        shown = json.loads(answer.message)
        assert "narrowed from 3600 s to 60 s" in shown["notes"][0]
        assert s.get(shown["id"]).allowance.timeout_s == 60
        await s.wait()


async def test_a_refusal_is_an_answer_that_the_model_can_act_on() -> None:
    state = parent()
    async with subagents(state, saying("x")) as s:
        tools = subagent_tools(s)
        unknown = await call(state, tools, "spawn_agent", agent="plumber", task="t")
        assert not unknown.success
        assert "there are: assistant, worker" in unknown.message
        missing = await call(state, tools, "wait_agent", ids=["worker-9"])
        assert not missing.success
        assert "worker-9" in missing.message
        shared = json.loads((await call(state, tools, "spawn_agent", agent="worker", task="t")).message)["id"]
        await s.wait()
        apart = await call(state, tools, "apply_agent", id=shared)
        assert not apart.success
        assert "only an isolated one" in apart.message


async def test_a_call_that_is_run_again_after_a_crash_asks_for_nothing_twice() -> None:
    state = parent()
    async with subagents(state, saying("one", "two")) as s:
        tools = subagent_tools(s)
        first = await call(state, tools, "spawn_agent", call_id="c1", agent="worker", task="t")
        again = await call(state, tools, "spawn_agent", call_id="c1", resume=True, agent="worker", task="t")
        assert json.loads(again.message)["id"] == json.loads(first.message)["id"]
        await s.wait()
        await call(state, tools, "send_agent", call_id="c2", id="worker-1", message="more")
        await call(state, tools, "send_agent", call_id="c2", resume=True, id="worker-1", message="more")
        outcome = await s.wait()
    assert outcome.results == {"worker-1": "two"}
    assert told(state).count("queued") == 1
    assert told(state).count("input") == 1


async def test_a_model_can_stop_a_child() -> None:
    state = parent()
    doors = Doors()
    async with subagents(state, WaitingProvider(doors, ["x"])) as s:
        tools = subagent_tools(s)
        await call(state, tools, "spawn_agent", agent="worker", task="slow")
        poll = json.loads((await call(state, tools, "wait_agent", timeout_seconds=0)).message)
        assert poll["status"] == "incomplete"
        stopped = await call(state, tools, "cancel_agent", id="worker-1", reason="enough")
        assert json.loads(stopped.message)["status"] in ("cancelled", "closed")
    assert told(state)[-1] in ("cancelled", "closed")


def test_the_tools_say_what_they_do_and_describe_every_parameter() -> None:
    tools = {each.name: each for each in subagent_tools(subagents(parent(), saying()))}
    assert set(tools) == {
        "spawn_agent",
        "wait_agent",
        "send_agent",
        "cancel_agent",
        "detach_agent",
        "list_agents",
        "diff_agent",
        "apply_agent",
    }
    for agent in (WORKER, ASSISTANT):
        assert agent.name in tools["spawn_agent"].description
    for each in tools.values():
        # Only what changes the workspace may hold it: a tool that waits must not.
        assert each.effects == ("workspace" if each.name == "apply_agent" else "none")
        for name, field in each.parameters_schema["properties"].items():
            assert field.get("description"), (each.name, name)


async def test_a_loop_has_subagents_for_the_length_of_its_run(tmp_path: Path) -> None:
    """Entering the extension gives the model the tools; leaving it ends what is still at work."""
    state = parent(SqliteLog(tmp_path / "runs.db"))
    script = saying(
        Answer("", [("spawn_agent", {"agent": "assistant", "task": "slow and never waited for"})]),
        "done without it",
    )
    doors = Doors()
    lead = Agent("lead", "You lead.", retry=None)
    loop = InnerLoop(state, script, lead.prompt, agent="lead")
    async with with_subagents([ASSISTANT], provider=WaitingProvider(doors, ["x"]))(loop):
        assert "spawn_agent" in {each.name for each in loop.prompt.tools}
        result = await loop.run("lead")
    assert result.state is TurnState.COMPLETED
    assert loop.prompt is lead.prompt
    assert told(state)[-1] in ("cancelled", "closed")


async def test_a_call_that_holds_the_workspace_does_not_wait_for_a_child_that_shares_it() -> None:
    state = parent()
    async with subagents(state, saying("x")) as s:

        @tool
        async def wait_inside(*, context) -> str:
            """Wait for a child that may need the workspace."""
            s.spawn("worker", "t")
            return (await s.wait()).status

        refused = await ToolRunner(state, {"wait_inside": wait_inside}).aexecute(ToolCall("c", "wait_inside"))
        assert not refused.success
        assert "holds the workspace that worker-1 shares" in refused.message
        assert (await s.wait()).complete

"""Subagents and workflows in one trace with whoever asked for them, through the real SDK."""

from __future__ import annotations

import json
from typing import Any

import anyio
from telemetry_kit import Seen

from treenail import Agent, Session, TurnState, telemetry, tool
from treenail.judges import LLMCompletionVerifier
from treenail.log import MemoryLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState
from treenail.subagents import LoopRunner, Subagents, SubagentStatus, with_subagents
from treenail.turns import ModelAdapter
from treenail.workflows import StepSpec, WorkflowSpec, run_workflow, with_workflows

VERDICT = '{"complete": true, "explanation": "all there"}'


@tool(effects="none")
def look() -> str:
    """Look."""
    return "nothing"


def paths(seen: Seen) -> list[str]:
    """Each span with all that is above it; they are of one trace."""
    spans = {each.context.span_id: each for each in seen.spans}
    assert len({each.context.trace_id for each in seen.spans}) == 1

    def path(span: Any) -> str:
        above = spans.get(span.parent.span_id) if span.parent else None
        return span.name if above is None else f"{path(above)} > {span.name}"

    return sorted(map(path, seen.spans))


def test_a_subagent_hangs_below_the_call_that_asked_for_it(seen: Seen) -> None:
    """Its turn, its tools and its judge are below it, although it runs in a context of its own."""
    judge = ModelAdapter(ScriptedProvider([VERDICT], repeat=True, model="judge-model"))
    helper = Agent("helper", tools=(look,), completion=LLMCompletionVerifier(adapter=judge))
    helping = ScriptedProvider([Answer("", [("look", {})]), "helped"], model="helper-model")
    boss = Agent("boss", extensions=(with_subagents((helper,), provider=helping),))
    script = [
        Answer("", [("spawn_agent", {"agent": "helper", "task": "help", "workspace": "read_only"})]),
        Answer("", [("wait_agent", {})]),
        "done",
    ]
    run = boss.run("go", provider=ScriptedProvider(script, model="boss-model"))
    assert run.state is TurnState.COMPLETED
    run.close()
    turn, asked = "invoke_agent boss", "invoke_agent boss > execute_tool spawn_agent"
    helped = f"{asked} > subagent helper > invoke_agent helper"
    checked = f"{helped} > judge LLMCompletionVerifier"
    assert paths(seen) == sorted(
        [
            turn,
            *[f"{turn} > chat boss-model"] * 3,
            asked,
            f"{turn} > execute_tool wait_agent",
            f"{asked} > subagent helper",
            helped,
            *[f"{helped} > chat helper-model"] * 2,
            f"{helped} > execute_tool look",
            checked,
            f"{checked} > invoke_agent completion",
            f"{checked} > invoke_agent completion > chat judge-model",
        ]
    )
    (span,) = seen.named("subagent helper")
    said = span.attributes or {}
    assert span.status.is_ok
    assert (said["treenail.subagent.id"], said["treenail.subagent.status"]) == ("helper-1", "completed")
    (turn_of,) = seen.named("invoke_agent helper")
    assert said["gen_ai.conversation.id"] == (turn_of.attributes or {})["gen_ai.conversation.id"]
    assert seen.total("treenail.subagents", **{"treenail.subagent.status": "completed"}) == 1


def test_a_subagent_that_fails_is_a_failed_span(seen: Seen) -> None:
    async def go() -> None:
        state = ExecutionState(Session(log=MemoryLog()))
        broken = ScriptedProvider([Answer(error=ConnectionResetError("gone"))], repeat=True)
        agents = (Agent("helper", retry=None),)
        async with Subagents(state, agents, runner=LoopRunner(broken)) as many:
            child = many.spawn("helper", "help")
            await many.wait()
            assert child.status is SubagentStatus.FAILED

    with telemetry.span("whoever asks"):
        anyio.run(go)
    (span,) = seen.named("subagent helper")
    assert not span.status.is_ok
    assert dict(seen.tree())["subagent helper"] == "whoever asks"
    assert seen.total("treenail.subagents", **{"treenail.subagent.status": "failed"}) == 1


class Steps(ScriptedProvider):
    """Each step says that it is ready; one of them needs two attempts."""

    def __init__(self) -> None:
        super().__init__([], model="step-model")
        self.tried = 0

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    def _next(self, request: ModelRequest) -> Answer:
        task = next(each.text for each in request.items if each.role == "user")
        if task.startswith("test"):
            self.tried += 1
            if self.tried == 1:
                return Answer(error=ConnectionResetError("gone"))
        return Answer(json.dumps({"status": "checkpoint_ready", "summary": "done"}))


SPEC = WorkflowSpec(
    id="build",
    name="Build it",
    steps=(
        StepSpec(id="write", task="write it", agent="agent"),
        StepSpec(id="test", task="test it", agent="agent", depends_on=("write",), retries=1),
    ),
)


def test_a_workflow_is_a_span_with_a_span_for_each_attempt_at_a_step(seen: Seen) -> None:
    result = run_workflow(SPEC, (Agent("agent", retry=None),), provider=Steps())
    assert result.ok
    whole = "invoke_workflow Build it"
    worked = "subagent agent > invoke_agent agent"
    assert paths(seen) == sorted(
        [
            whole,
            f"{whole} > step write",
            *[f"{whole} > step test"] * 2,
            *[f"{whole} > step {name} > subagent agent" for name in ("write", "test", "test")],
            *[f"{whole} > step {name} > {worked}" for name in ("write", "test", "test")],
            *[f"{whole} > step {name} > {worked} > chat step-model" for name in ("write", "test", "test")],
        ]
    )
    first, second = seen.named("step test")
    assert (first.status.is_ok, second.status.is_ok) == (False, True)
    assert [(each.attributes or {})["treenail.workflow.attempt"] for each in (first, second)] == [1, 2]
    (span,) = seen.named(whole)
    assert (span.attributes or {})["gen_ai.operation.name"] == "invoke_workflow"
    assert (span.attributes or {})["gen_ai.workflow.name"] == "Build it"
    assert span.status.is_ok


def test_a_workflow_that_a_model_runs_hangs_below_its_call(seen: Seen) -> None:
    lead = Agent("lead", extensions=(with_workflows((Agent("agent", retry=None),), provider=Steps()),))
    call = Answer("", [("run_workflow", {"workflow": SPEC.to_data()})])
    run = lead.run("go", provider=ScriptedProvider([call, "done"]))
    assert run.state is TurnState.COMPLETED
    run.close()
    assert "invoke_agent lead > execute_tool run_workflow > invoke_workflow Build it" in paths(seen)


def test_a_workflow_that_does_not_complete_is_a_failed_span_and_leaves_none_open(seen: Seen) -> None:
    broken = ScriptedProvider([Answer(error=ConnectionResetError("gone"))], repeat=True)
    result = run_workflow(SPEC, (Agent("agent", retry=None),), provider=broken)
    assert not result.ok
    (whole,) = seen.named("invoke_workflow Build it")
    (step,) = seen.named("step write")
    assert not whole.status.is_ok
    assert not step.status.is_ok
    assert (step.attributes or {})["treenail.workflow.checkpoint_status"] == "failed"

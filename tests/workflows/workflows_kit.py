"""What the tests of workflows share: an agent, a model with a script for each step, and short names."""

from __future__ import annotations

import json
from typing import Any

from treenail import Agent, tool
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.workflows import StepSpec, WorkflowResult, WorkflowSpec, run_workflow
from treenail.workspace import InMemoryFilesystem


@tool(effects="workspace")
def put(path: str, text: str, *, context) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "ok"


@tool(effects="none")
def get(path: str, *, context) -> str:
    """Read a file."""
    return context.filesystem.read(path).content


WORKER = Agent("agent", "You work.", tools=(put, get))


def says(status: str = "checkpoint_ready", summary: str = "done", **more: Any) -> str:
    return json.dumps({"status": status, "summary": summary, **more})


def writes(path: str, text: str = "x", **more: Any) -> list[Any]:
    return [Answer("", [("put", {"path": path, "text": text})]), says(**more)]


class Model(ScriptedProvider):
    """Answers each step from a script of its own, which is found by the first word of the step's task."""

    def __init__(self, **scripts: Any) -> None:
        super().__init__([])
        self.scripts: dict[str, Any] = scripts
        self.asked: list[str] = []
        self.tasks: dict[str, str] = {}

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    def _next(self, request: ModelRequest) -> Answer:
        task = next(each.text for each in request.items if each.role == "user")
        step = task.split()[0]
        self.tasks[step] = task
        self.asked.append(step)
        script = self.scripts.get(step, [says()])
        answer = script[min(request.answers_so_far, len(script) - 1)]
        answer = answer(request) if callable(answer) else answer
        return Answer(answer) if isinstance(answer, str) else answer


def steps(*given: StepSpec, **more: Any) -> WorkflowSpec:
    return WorkflowSpec(id="w", steps=given, **more)


def step(name: str, *depends_on: str, **more: Any) -> StepSpec:
    return StepSpec(id=name, task=f"{name} it", depends_on=depends_on, **more)


def run(spec: WorkflowSpec, model: Model, **more: Any) -> WorkflowResult:
    more.setdefault("workspace", InMemoryFilesystem())
    return run_workflow(spec, [WORKER], provider=model, **more)


def states(result: WorkflowResult) -> dict[str, str]:
    return {each.step_id: each.state.value for each in result.steps}

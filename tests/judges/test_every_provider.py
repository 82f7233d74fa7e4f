"""Feedback and completion by a model, over the wire of every provider, a vendor's own loop included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from treenail import Agent, Run, TurnState, tool
from treenail.judges import (
    CompletionChecked,
    Feedback,
    FeedbackProviderConfig,
    FeedbackTrigger,
    JudgeEvent,
    LLMCompletionVerifier,
    LLMTrajectoryFeedback,
    NestedEvaluated,
    NestedExecutionConfig,
)
from treenail.prompt import PromptExecuted
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.claude_agent import ClaudeAgent
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer
from treenail.state import TokenUsage
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import Fault, Step, WireRequest, WireServer
from treenail.tools import ToolContext

PROVIDERS = ["openai.chat", "openai.responses", "anthropic.messages", "litellm.chat", "claude.agent"]

USAGE = TokenUsage(input_tokens=100, output_tokens=20)


@tool(effects="workspace")
def write(path: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "x")
    return f"wrote {path}"


@contextmanager
def opened(name: str, script: Callable[[WireRequest], Step], home: Path) -> Iterator[tuple[Provider, Any]]:
    if name == "claude.agent":
        with ClaudeWireServer(script) as server:
            env = claude_environment(home)
            yield ClaudeAgent("a-model", base_url=server.url, api_key="k", env=env), server
        return
    with WireServer(script) as server:
        if name == "anthropic.messages":
            yield Anthropic("a-model", base_url=server.anthropic_url, api_key="k"), server
        elif name == "litellm.chat":
            yield LiteLLM("openai/a-model", base_url=server.openai_url, api_key="k"), server
        else:
            api: Any = name.removeprefix("openai.")
            yield OpenAI("a-model", api=api, base_url=server.openai_url, api_key="k"), server


class Model:
    """The run's model, and its judges: who is asked is told from what is asked."""

    def __init__(self, name: str, *verdicts: dict[str, Any] | Fault) -> None:
        self.is_vendor_loop = name == "claude.agent"
        self.verdicts = list(verdicts)
        self.heard: list[str] = []
        self.judged: list[str] = []
        self._work = [("write", {"path": "a.txt"}), None, ("write", {"path": "b.txt"}), None]

    def __call__(self, request: WireRequest) -> Step:
        text = json.dumps(request.body, ensure_ascii=False)
        if "You review the work of an AI agent" in text:
            self.judged.append(text)
            return self.answer(
                {
                    "on_track": False,
                    "summary": "You forget the second file.",
                    "severity": "caution",
                    "observations": [],
                    "suggestions": ["Write b.txt."],
                }
            )
        if "says that its task is done" in text:
            self.judged.append(text)
            verdict = self.verdicts.pop(0)
            return verdict if isinstance(verdict, Fault) else self.answer(verdict)
        self.heard.append(text)
        call = self._work.pop(0)
        return Answer("It is done.", usage=USAGE) if call is None else Answer("", [call], USAGE)

    def answer(self, value: dict[str, Any]) -> Answer:
        if self.is_vendor_loop:
            return Answer("", [("structured_output", value)], USAGE)
        return Answer(json.dumps(value), usage=USAGE)


def agent(**nested: Any) -> Agent:
    watcher = FeedbackProviderConfig(
        LLMTrajectoryFeedback(min_tool_calls=1), FeedbackTrigger(every_n_calls=100, on_file_created="a.txt")
    )
    return Agent(
        "writer",
        tools=(write,),
        feedback=[watcher],
        completion=LLMCompletionVerifier(),
        nested=NestedExecutionConfig(**nested),
        retry=None,
    )


def judged(run: Run) -> tuple[list[str], list[bool]]:
    session = run.execution_state.session
    return (
        [each.summary for each in session[Feedback].all()],
        [each.complete for each in session[CompletionChecked].all()],
    )


@pytest.mark.parametrize("name", PROVIDERS)
def test_judges_ask_the_runs_own_provider_and_the_model_hears_them(name: str, tmp_path: Path) -> None:
    """Feedback behind the tool's result, a refusal behind the answer; each judge in a session of its own."""
    model = Model(
        name,
        {"complete": False, "explanation": "b.txt is not there.", "missing": ["b.txt"]},
        {"complete": True, "explanation": "Both are there.", "missing": []},
    )
    root = tmp_path / "files"
    root.mkdir()
    with opened(name, model, tmp_path) as (provider, server):
        run = agent().run("Write a.txt and b.txt", provider=provider, workspace=root, store=tmp_path / "r.db")
        assert [each.violations for each in server.requests if each.violations] == []
    assert (run.state, run.output) == (TurnState.COMPLETED, "It is done."), run.result
    assert sorted(each.name for each in root.iterdir()) == ["a.txt", "b.txt"]
    assert judged(run) == (["You forget the second file."], [False, True])
    # The run's model was asked four times, and heard the feedback and then the refusal.
    assert len(model.heard) == 4
    assert ["You forget the second file." in each for each in model.heard] == [False, True, True, True]
    assert ["b.txt is not there." in each for each in model.heard] == [False, False, True, True]
    # A judge saw what was done; it had no tools of the run, and nothing of its own came back as the run's.
    assert all("wrote a.txt" in each for each in model.judged)
    session = run.execution_state.session
    done = session[NestedEvaluated].all()
    assert [(each.success, each.adapter, each.budget) for each in done] == [
        (True, name, "own"), (True, name, "own"), (True, name, "own"),
    ]  # fmt: skip
    assert [each.usage.total for each in done if each.usage is not None] == [120] * 3
    assert session[JudgeEvent].all() == ()
    for each in session.children:
        assert each[PromptExecuted].latest() is not None
    run.close()


@pytest.mark.parametrize(
    ("name", "mode"), [*((each, "open") for each in PROVIDERS), (PROVIDERS[0], "closed")]
)
def test_a_judge_that_is_rate_limited_harms_nobody_on_any_provider(
    name: str, mode: Any, tmp_path: Path
) -> None:
    model = Model(name, *[Fault("throttled")] * 20)
    root = tmp_path / "files"
    root.mkdir()
    with opened(name, model, tmp_path) as (provider, _):
        run = agent(on_completion_failure=mode, max_completion_checks=1).run(
            "Write a.txt and b.txt", provider=provider, workspace=root
        )
    assert run.state is (TurnState.COMPLETED if mode == "open" else TurnState.PARTIAL_FAILED)
    (failed,) = run.execution_state.session[JudgeEvent].all()
    assert (failed.kind, failed.outcome, failed.reason) == ("completion", "failed", "throttled")
    run.close()

"""Prompts as feedback providers and completion checkers use them: shared, and filled in per evaluation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from prompt_kit import Review

from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, parse_output
from treenail.prompt.output import output_json
from treenail.state import Session


@dataclass(frozen=True)
class TrajectoryAssessment:
    on_track: bool
    summary: str
    concerns: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CompletionVerdict:
    complete: bool
    explanation: str


@dataclass(frozen=True)
class Trigger:
    every_n_calls: int


@dataclass(frozen=True)
class Configured:
    provider: object
    trigger: Trigger


@dataclass(frozen=True)
class NestedLimits:
    max_nested_duration: timedelta


trajectory = Prompt[TrajectoryAssessment](
    ns="judges",
    key="trajectory",
    sections=[
        MarkdownSection("Recent actions", "$recent_actions"),
        MarkdownSection("Plan", "$current_plan"),
    ],
)


@dataclass(frozen=True)
class TrajectoryFeedback:
    evaluation_prompt: Prompt[TrajectoryAssessment]

    def provide(self, actions: list[str], plan: str) -> str:
        prompt = self.evaluation_prompt.with_variables(recent_actions=actions, current_plan=plan)
        return prompt.render().text


def test_a_frozen_provider_fills_in_a_prompt_that_it_shares() -> None:
    """Many evaluations at a time, none of which sees the values of another."""
    provider = TrajectoryFeedback(trajectory)

    def one(number: int) -> bool:
        text = provider.provide([f"edit {number}"], f"plan {number}")
        return f'"edit {number}"' in text and text.endswith(f"plan {number}")

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(50)))


def test_a_verifier_passes_on_whatever_the_agent_came_up_with() -> None:
    """An output, no stop reason: both are text to the judge, and a dollar sign in them is harmless."""
    prompt = Prompt[CompletionVerdict](
        ns="judges",
        key="completion",
        sections=[
            MarkdownSection("Judge", "Task: $task_description\nOutput: $tentative_output\nStop: $stop_reason")
        ],
    ).with_variables(task_description="Review for $5", tentative_output=Review(3, ["$x"]), stop_reason=None)
    rendered = prompt.render(Session())
    assert "Task: Review for $5" in rendered.text
    assert '"$x"' in rendered.text
    assert rendered.text.endswith("Stop: None")
    verdict = CompletionVerdict(True, "All there.")
    assert parse_output(output_json(verdict), rendered) == verdict
    assert rendered.tools == ()


def test_a_template_carries_its_judges_and_their_limits() -> None:
    class Checker:
        def check(self, context: Any) -> bool:
            return True

    provider = Configured(TrajectoryFeedback(trajectory), Trigger(every_n_calls=10))
    checker = Checker()
    limits = NestedLimits(timedelta(seconds=15))
    template = PromptTemplate[str](
        ns="agents",
        key="worker",
        feedback_providers=(provider,),
        task_completion_checker=checker,
        nested_execution_config=limits,
    )
    prompt = Prompt(template)
    assert prompt.feedback_providers == (provider,)
    assert prompt.task_completion_checker is checker
    assert prompt.nested_execution_config is limits

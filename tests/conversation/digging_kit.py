"""An agent that digs: a turn that grows as long as one likes, with a model that may refuse it as too long."""

from __future__ import annotations

import json
from collections.abc import Callable

from treenail import Agent, tool
from treenail.conversation import CompactionSettings
from treenail.errors import ModelCallError
from treenail.providers import ModelRequest, Provider
from treenail.providers.scripted import Answer
from treenail.state import ExecutionState, ResourceRegistry, Session, TokenUsage
from treenail.turns import InnerLoop

SUMMARY = {
    "goal": "Dig",
    "progress": ["dug"],
    "decisions": [],
    "open_tasks": [],
    "files": [],
    "facts": ["THE KEY IS 42"],
}


@tool
def dig(depth: int) -> str:
    """Dig that deep."""
    return f"earth {depth} " + "e" * 600


AGENT = Agent("digger", instructions="You dig.", tools=[dig])
ROUNDS = 60


def is_summary(request: ModelRequest) -> bool:
    return request.items[0].text.startswith("You write the summary")


def digging(
    rounds: int = ROUNDS, seen: list[ModelRequest] | None = None, refuse_above: int | None = None
) -> list[Callable[[ModelRequest], Answer]]:
    """A model that digs so often and is then done; it may refuse conversations that are too long."""

    def answer(request: ModelRequest) -> Answer:
        if is_summary(request):
            return Answer(json.dumps(SUMMARY))
        if seen is not None:
            seen.append(request)
        if refuse_above is not None and len(request.items) > refuse_above:
            error = ModelCallError("too long", phase="request", kind="context_too_long")
            return Answer(error=error)
        done = request.answers_so_far
        size = sum(len(each.text) for each in request.items) // 3
        if done >= rounds:
            return Answer("Deep enough.")
        return Answer("", [("dig", {"depth": done})], usage=TokenUsage(input_tokens=size))

    return [answer] * (rounds + 1)


def loop_on(session: Session, provider: Provider, settings: CompactionSettings, **options) -> InnerLoop:
    state = ExecutionState(session, ResourceRegistry.build({}))
    return InnerLoop(state, provider, AGENT.prompt, compaction=settings, **options)

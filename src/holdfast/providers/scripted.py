"""A deterministic model that reads from a script: for demos, tests and rehearsals.

A script is a list of answers. An answer is text, tool calls, or both; or a function of
the request that returns one, for a model that reacts. Which answer comes next is read
from the conversation (how many assistant messages it has), not from a counter in
memory, so that a resumed run goes on where the script was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.lowlevel

from holdfast.errors import PromptEvaluationError
from holdfast.providers.base import (
    ModelEvent,
    ModelRequest,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from holdfast.state.budget import TokenUsage
from holdfast.tools.tool import ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer of the model."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """The tools to call: name and arguments."""
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(input_tokens=100, output_tokens=20))
    cost_usd: float | None = None
    error: Exception | None = None
    """Raised after the text, like a connection that breaks."""


Scripted = Answer | str | Callable[[ModelRequest], "Answer | str"]


class ScriptedProvider:
    """Answers from a script."""

    def __init__(self, script: Sequence[Scripted], *, model: str = "scripted", repeat: bool = False) -> None:
        self._script = tuple(script)
        self._model = model
        self._repeat = repeat

    @property
    def name(self) -> str:
        """The provider's name."""
        return "scripted"

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the scripted answer costs: the script knows."""
        try:
            return self._next(request).cost_usd or 0.0
        except PromptEvaluationError:
            return 0.0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Yield the answer that comes next in this conversation."""
        await anyio.lowlevel.checkpoint()
        answer = self._next(request)
        for line in answer.text.splitlines(keepends=True):
            yield TextDelta(line)
            await anyio.lowlevel.checkpoint()
        if answer.error is not None:
            raise answer.error
        turn = request.answers_so_far + 1
        for index, (name, arguments) in enumerate(answer.calls, start=1):
            yield ToolCallRequested(ToolCall(f"call_{turn}_{index}", name, arguments))
        yield UsageReported(answer.usage, answer.cost_usd)
        yield Stopped("tools" if answer.calls else "end")

    def _next(self, request: ModelRequest) -> Answer:
        position = request.answers_so_far
        if position >= len(self._script):
            if not self._repeat or not self._script:
                raise PromptEvaluationError(
                    f"the script has {len(self._script)} answers and the conversation asks for one more; "
                    "add an answer to the script",
                    phase="request",
                )
            position %= len(self._script)
        scripted = self._script[position]
        answer = scripted(request) if callable(scripted) else scripted
        return Answer(answer) if isinstance(answer, str) else answer

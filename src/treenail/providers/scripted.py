"""A deterministic model that reads from a script: for demos, tests and rehearsals.

A script is a list of answers. An answer is text, tool calls, or both; or a function of
the request that returns one, for a model that reacts. Which answer comes next is read
from the conversation (how many assistant messages it has), not from a counter in
memory, so that a resumed run continues in the script where it stopped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio.lowlevel

from treenail.conversation import ReasoningPart
from treenail.errors import PromptEvaluationError
from treenail.providers.base import (
    FinishReason,
    ModelEvent,
    ModelRequest,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.state import TokenUsage
from treenail.tools import ToolCall

_USUAL = TokenUsage(input_tokens=100, output_tokens=20)
"""The usage of an answer, unless the script gives another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer of the model."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]] | ToolCall] = ()
    """The tools to call: name and arguments, or a call with an id and arguments of its own."""
    usage: TokenUsage = _USUAL
    cost_usd: float | None = None
    error: Exception | None = None
    """Raised after the text, like a connection that breaks."""
    thoughts: Sequence[str] = ()
    """The model's reasoning before its answer: each is a block that it wants back."""
    stop: FinishReason | None = None
    """Why the model stops; None for what the calls say."""
    cache_write_tokens: int = 0
    stop_said: str = ""
    """The vendor's own word for why the model stops; empty for the usual one."""

    def tool_calls(self, turn: int) -> list[ToolCall]:
        """Return the calls with their ids, made of the answer's number and the call's place."""
        return [
            call if isinstance(call, ToolCall) else ToolCall(f"call_{turn}_{place}", call[0], call[1])
            for place, call in enumerate(self.calls, start=1)
        ]

    @property
    def stop_reason(self) -> FinishReason:
        """Why the model stops."""
        return self.stop or ("tools" if self.calls else "end")


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
        """Return the cost of the scripted answer."""
        try:
            return self._next(request).cost_usd or 0.0
        except PromptEvaluationError:
            return 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Yield the answer that comes next in this conversation."""
        await anyio.lowlevel.checkpoint()
        answer = self._next(request)
        for thought in answer.thoughts:
            yield ReasoningDelta(thought)
            yield ReasoningBlock(ReasoningPart(request.model or self._model, self.name, {"thought": thought}))
        for line in answer.text.splitlines(keepends=True):
            yield TextDelta(line)
            await anyio.lowlevel.checkpoint()
        if answer.error is not None:
            raise answer.error
        for call in answer.tool_calls(request.answers_so_far + 1):
            yield ToolCallRequested(call)
        yield UsageReported(
            answer.usage, answer.cost_usd, answer.cache_write_tokens, model=request.model or self._model
        )
        yield Stopped(answer.stop_reason, answer.stop_said)

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

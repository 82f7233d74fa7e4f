"""The provider seam: one model call, as a stream of events.

A provider turns a provider-neutral request into one call of a model and yields what
comes back. It decides nothing: the loop records, runs tools, retries and stops.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from treenail.conversation.messages import ReasoningPart
from treenail.conversation.replay import ReplayItem
from treenail.state.budget import TokenUsage
from treenail.tools.tool import Tool, ToolCall

StopReason = Literal["end", "tools", "length", "filtered", "refused"]
"""Why a model stopped: it was done, it wants tools, it ran out of room, or it would not."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What one model call is given."""

    items: Sequence[ReplayItem]
    """The conversation, as `treenail.conversation.replay` folded it."""
    tools: Sequence[Tool[Any, Any]] = ()
    output_schema: Mapping[str, Any] | None = None
    answers_so_far: int = 0
    """How many answers the model has given in this conversation, summarised ones included."""
    model: str | None = None
    """The model to ask instead of the provider's own; usage, price and thoughts are then that one's."""
    max_output_tokens: int | None = None
    """The most to ask for, if that is less than what the provider asks for by itself."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """A whole block of thought, which the provider wants back unchanged with the next request."""

    part: ReasoningPart


@dataclass(frozen=True, slots=True)
class ToolCallRequested:
    """The model wants a tool to be run."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class UsageReported:
    """What the call has used so far, in the provider's own numbers. The last one of a call counts."""

    usage: TokenUsage
    cost_usd: float | None = None
    """What that costs by the provider's price table; None if nobody knows."""
    cache_write_tokens: int = 0
    """How much of the input was written to the provider's cache; it may cost more than plain input."""
    model: str | None = field(default=None, compare=False)
    """The model that was asked, if the provider says so: a request may have named another than its own."""
    newest: UsageReported | None = field(default=None, compare=False, repr=False)
    """What of it the newest attempt has used, if those before it are counted in: they are booked already."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer is complete."""

    reason: StopReason


ModelEvent = TextDelta | ReasoningDelta | ReasoningBlock | ToolCallRequested | UsageReported | Stopped
"""What a model call yields."""


@runtime_checkable
class Provider(Protocol):
    """One way to call a model."""

    @property
    def name(self) -> str:
        """The interface's name, as it stands in the log; blocks of thought go back to it alone."""
        ...

    @property
    def model(self) -> str:
        """The model's name, as the price table knows it."""
        ...

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the call will cost at most, if the provider knows better than the price table."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once. Closing the generator closes the connection.

        What goes wrong is a `ModelCallError`, with what was said so far in `partial`. A call that went
        well ends with `Stopped`.
        """
        ...


def takes_output_schema(provider: Provider) -> bool:
    """Say whether a provider makes its model follow `ModelRequest.output_schema`.

    One that does says so with an attribute `takes_output_schema`. For the others the schema stands in
    the prompt's text.
    """
    return bool(getattr(provider, "takes_output_schema", False))

"""The provider seam: one model call, as a stream of events.

A provider turns a provider-neutral request into one call of a model and yields what
comes back. It decides nothing: the loop records, runs tools, retries and stops.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from treenail.conversation import ReasoningPart, ReplayItem
from treenail.errors import UsageError
from treenail.state import TokenUsage
from treenail.tools import Tool, ToolCall

FinishReason = Literal["end", "tools", "paused", "length", "filtered", "refused", "broken_off"]
"""Why a model stopped: it finished, wants tools, wants to be asked to continue, reached the length limit, was
filtered, refused, or stopped for a reason that its adapter does not list: then the answer is not finished."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The input of one model call."""

    items: Sequence[ReplayItem]
    """The conversation, as `treenail.conversation.replay` folded it."""
    tools: Sequence[Tool[Any, Any]] = ()
    output_schema: Mapping[str, Any] | None = None
    answers_so_far: int = 0
    """How many answers the model has given in this conversation, summarised ones included."""
    model: str | None = None
    """The model to call instead of the provider's own; usage, price and reasoning are then that model's."""
    max_output_tokens: int | None = None
    """The answer's length limit, if it is below the provider's own."""
    idle_timeout_s: float | None = None
    """How long the stream may send nothing before the call has failed; None for the provider's own limit."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """A whole reasoning block, which the provider expects back unchanged with the next request."""

    part: ReasoningPart


@dataclass(frozen=True, slots=True)
class ToolCallRequested:
    """The model wants a tool to be run."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class UsageReported:
    """The call's usage so far, in the provider's own numbers. The last report of a call counts."""

    usage: TokenUsage
    cost_usd: float | None = None
    """The cost by the provider's price table; None if it is not known."""
    cache_write_tokens: int = 0
    """How many input tokens were written to the provider's cache; they may cost more than plain input."""
    model: str | None = field(default=None, compare=False)
    """The model that was called, if the provider says so: a request may name another model."""
    is_final: bool = True
    """Whether the answer's tokens are counted to its end. Else the call costs what was reserved for it."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer is over."""

    reason: FinishReason
    said: str = field(default="", compare=False)
    """The vendor's own word for the reason."""


ModelEvent = TextDelta | ReasoningDelta | ReasoningBlock | ToolCallRequested | UsageReported | Stopped
"""What a model call yields."""


@runtime_checkable
class Provider(Protocol):
    """One way to call a model."""

    @property
    def name(self) -> str:
        """The interface's name in the log; reasoning blocks are sent back to this interface only."""
        ...

    @property
    def model(self) -> str:
        """The model's name, as the price table knows it."""
        ...

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Return the most the call can cost, if the provider knows better than the price table."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once. Closing the generator closes the connection.

        A failure is a `ModelCallError`, with the text so far in `partial`. A successful call ends
        with `Stopped`.
        """
        ...


def bounds_output(provider: Provider) -> bool:
    """Say whether a provider's interface can bound an answer.

    One that cannot has a false attribute `bounds_output`. Nobody knows what its call can cost, so a ceiling
    in USD refuses it unless the caller chose otherwise.
    """
    return bool(getattr(provider, "bounds_output", True))


def output_bound(provider: Provider, request: ModelRequest) -> int | None:
    """Return how many tokens an answer may have, reasoning included; None if the provider does not say.

    A provider that says it has a method `output_bound`, and sends the smaller one of that number and
    `ModelRequest.max_output_tokens` with the request.
    """
    says = getattr(provider, "output_bound", None)
    return None if says is None else says(request)


def takes_output_schema(provider: Provider, schema: Mapping[str, Any] | None = None) -> bool:
    """Say whether a provider makes its model follow `ModelRequest.output_schema`.

    Such a provider has a true attribute `takes_output_schema`. If its interface refuses some schemas, it has
    a method `can_follow(schema)`. Where it cannot, the schema is part of the prompt's text.
    """
    can_follow = getattr(provider, "can_follow", None)
    is_known = schema is None or can_follow is None or can_follow(schema)
    return is_known and bool(getattr(provider, "takes_output_schema", False))


_TEXT_ALONE = re.compile(
    r"gpt-3\.5|gpt-4(-0314|-0613|-32k.*)?$|gpt-oss|o1-mini|o1-preview|o3-mini|text-|davinci|babbage|claude-(2|instant)"
    r"|deepseek-(chat|coder|reasoner)|codestral|command-r|mixtral|mistral-7b|qwen[\d.]*-coder|llama-?3(\.[013])?-"
)
"""How the names of models begin that are known to take text alone."""


def takes_images(provider: Provider) -> bool:
    """Say whether a provider's model can be shown pictures, as far as that is known.

    A provider that knows has an attribute `takes_images`. Without one the model's name decides, and a
    name that nobody knows is let through: its server will say.
    """
    said = getattr(provider, "takes_images", None)
    return said if said is not None else _TEXT_ALONE.match(provider.model.rpartition("/")[2]) is None


def check_takes_images(provider: Provider) -> None:
    """Raise `UsageError` if a provider's model is known to take text alone."""
    if not takes_images(provider):
        raise UsageError(
            f"{provider.model} takes no images, only text; name a model that does, or leave the image out"
        )

"""What a `ClaudeAgent` was made with, and what follows from that alone: prices, errors, the endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from treenail.containment import (
    CallUsage,
    PriceTable,
    default_prices,
    estimate_usage,
    most_usd,
    usual_output_tokens,
)
from treenail.errors import ModelCallError
from treenail.providers.base import ModelRequest, UsageReported
from treenail.providers.claude_agent.environment import endpoint_in
from treenail.providers.errors import Facts, classify, environment_secrets, model_call_error
from treenail.providers.usage import request_tokens, usage_reported

NAME = "claude.agent"
"""The interface's name, as it stands in the log."""

_OWN_TOKENS = 2_000
"""About how much the CLI adds to each request of its own, and per native tool."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a `ClaudeAgent` was made with."""

    model: str
    native: tuple[str, ...]
    cli_path: Path | None
    thinking: Literal["adaptive", "disabled"] | int | None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
    env: Mapping[str, str] = field(repr=False)
    """What is added to the CLI's environment. It may hold a key."""
    allow_env: frozenset[str]
    """The names of secrets of this process that the CLI may know."""
    prices: PriceTable | None
    max_output_tokens: int | None
    secrets: tuple[str, ...] = field(repr=False)

    @property
    def endpoint(self) -> str:
        """Where the CLI's model calls go; nothing if that is not known: then no shield lets them leave."""
        return endpoint_in(self.env)

    def most_tokens(self, request: ModelRequest) -> int:
        """Say how many tokens an answer may have: the request can ask for fewer than the agent does."""
        most = self.max_output_tokens or usual_output_tokens(request.model or self.model)
        return most if request.max_output_tokens is None else min(most, request.max_output_tokens)

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what a call will cost at most; None if the model's price is not known."""
        tokens = request_tokens(request) + _OWN_TOKENS * (1 + len(self.native))
        usage = estimate_usage(input_tokens=tokens, max_output_tokens=self.most_tokens(request))
        return most_usd(partial(self._price, model=request.model or self.model), usage)

    def used(self, usage: CallUsage, model: str, *, is_final: bool) -> UsageReported:
        """Report what a model call has used, with its price."""
        return usage_reported(usage, self._price(usage, model), model, is_final=is_final)

    def _price(self, usage: CallUsage, model: str) -> float | None:
        table = self.prices if self.prices is not None else default_prices()
        return table.cost_usd(model, usage)

    def failed(self, facts: Facts, partial: str = "") -> ModelCallError:
        """Make the error of a failed model call; it holds no secrets."""
        return model_call_error(
            classify(facts, now=datetime.now(UTC)),
            provider=NAME,
            model=self.model,
            facts=facts,
            partial=partial,
            secrets=(*self.secrets, *environment_secrets({**os.environ, **self.env})),
        )

"""The usage of model calls: what a request takes at most, and what a call reported."""

from __future__ import annotations

import logging

from treenail.containment import ActiveCall, CallUsage, estimate_tokens
from treenail.conversation import ReasoningPart, ReplayItem
from treenail.errors import UsageError
from treenail.providers.base import ModelRequest, UsageReported
from treenail.state import TokenUsage

IMAGE_TOKENS = 5_000
"""What a picture is taken to take at most; vendors count by its size and their own settings."""

_logger = logging.getLogger("treenail.providers")


def request_tokens(request: ModelRequest) -> int:
    """Estimate the input tokens of a request: its items, its tools and its output schema."""
    items = sum(4 + estimate_tokens(item.text) + _beside_text(item) for item in request.items)
    tools = [[tool.name, tool.description, tool.parameters_schema] for tool in request.tools]
    return items + estimate_tokens(tools) + estimate_tokens(request.output_schema)


def _beside_text(item: ReplayItem) -> int:
    """Estimate the tokens of an item's calls, pictures and reasoning."""
    calls = sum(estimate_tokens(call.name) + estimate_tokens(call.arguments) + 4 for call in item.calls)
    parts = sum(
        estimate_tokens(part.payload) if isinstance(part, ReasoningPart) else IMAGE_TOKENS
        for part in item.parts
    )
    return calls + parts


def report_usage(call: ActiveCall, reported: UsageReported) -> None:
    """Book the usage that a provider reports, if it was counted to the answer's end.

    A call without such a report costs what was reserved. Impossible numbers are logged and count as
    no report.
    """
    if not reported.is_final:
        return
    usage = reported.usage
    try:
        if reported.cost_usd is not None:
            call.report(cost_usd=reported.cost_usd)
        elif usage.total is not None:
            into, out = usage.input_tokens or 0, usage.output_tokens or 0
            cached = min(usage.cached_tokens or 0, into)
            call.report(
                usage=CallUsage(
                    input_tokens=into,
                    output_tokens=out,
                    cached_input_tokens=cached,
                    cache_write_tokens=min(reported.cache_write_tokens, into - cached),
                    reasoning_tokens=min(usage.reasoning_tokens or 0, out),
                )
            )
    except UsageError:
        _logger.exception("the provider reported a usage that cannot be counted")


def usage_reported(
    usage: CallUsage, cost_usd: float | None, model: str, *, is_final: bool = True
) -> UsageReported:
    """Report what a call has used, for the stream of its events; the cost of an unfinished one is unknown."""
    tokens = TokenUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_input_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
    cost = cost_usd if is_final else None
    return UsageReported(tokens, cost, usage.cache_write_tokens, model=model, is_final=is_final)

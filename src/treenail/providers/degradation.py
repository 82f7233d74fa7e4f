"""Reduced requests: a model call made smaller by the shield's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treenail.containment import DegradePlan
from treenail.conversation import BYTES_PER_TOKEN, ReasoningPart, ReplayItem, trimmed
from treenail.providers.base import ModelRequest
from treenail.tools import Tool


def degraded(
    request: ModelRequest, plan: DegradePlan | None, *, model: str, other_tokens: int | None = None
) -> tuple[ModelRequest, tuple[str, ...]]:
    """Return the request as the plan wants it, and notes that say what was reduced.

    `model` is the one that the request would go to; `other_tokens` is what the request holds besides its
    items, by default its tools. Another model gets no reasoning but its own. The plan's delay is not
    applied here: the containment has waited already. A request that fits the plan is returned unchanged,
    without a note.
    """
    if plan is None:
        return request, ()
    notes: list[str] = []
    items = request.items
    asked = request.model or model
    if plan.model is not None and plan.model != asked:
        notes.append(f"degraded: {plan.model} was asked instead of {asked}")
        items = tuple(_without_foreign_reasoning(each, asked=plan.model) for each in items)
        asked = plan.model
    most = request.max_output_tokens
    if plan.max_output_tokens is not None and (most is None or plan.max_output_tokens < most):
        most = plan.max_output_tokens
        notes.append(f"degraded: at most {most} tokens were asked for")
    if plan.trim_to_tokens is not None:
        beside = tool_tokens(request.tools) if other_tokens is None else other_tokens
        room = max(plan.trim_to_tokens - beside, 0) * BYTES_PER_TOKEN
        kept = trimmed(items, room)
        if len(kept) < len(items):
            notes.append(f"degraded: {len(items) - len(kept)} of {len(items)} items were not sent")
            items = kept
    changed = replace(request, items=items, model=None if asked == model else asked, max_output_tokens=most)
    return changed, tuple(notes)


def tool_tokens(tools: Sequence[Tool[Any, Any]]) -> int:
    """Estimate the tokens that the descriptions of tools take."""
    return 4 + sum([each.tokens for each in tools]) if tools else 0


def _without_foreign_reasoning(item: ReplayItem, *, asked: str) -> ReplayItem:
    """Return an item without the reasoning of models other than `asked`."""
    parts = tuple(each for each in item.parts if not isinstance(each, ReasoningPart) or each.model == asked)
    return item if len(parts) == len(item.parts) else replace(item, parts=parts)

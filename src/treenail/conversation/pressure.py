"""Context pressure: how full a model's context is, in tiers, and the sizes of contexts."""

from __future__ import annotations

from collections.abc import Callable

from treenail.containment import default_prices
from treenail.conversation.events import ContextPressure, PressureTier
from treenail.errors import UsageError

ContextWindows = Callable[[str], int | None]
"""Says how many tokens fit into the context of a model, by its name; None if that is not known."""

_TIERS: tuple[tuple[float, PressureTier, tuple[str, ...]], ...] = (
    (0.70, "none", ()),
    (0.80, "advisory", ("finish what is open before you begin something new",)),
    (0.90, "warning", ("compact the conversation at the next good moment", "or begin a new session")),
)
_CRITICAL = ("compact the conversation now", "or resume with a model that has a larger context")


def pressure(tokens: int, window: int) -> ContextPressure:
    """Say how full a context of `window` tokens is with `tokens` in it."""
    if window <= 0 or tokens < 0:
        raise UsageError(f"a context of {window} tokens with {tokens} in it is impossible; check both")
    ratio = tokens / window
    for below, tier, advice in _TIERS:
        if ratio < below:
            return ContextPressure(tier, ratio, tokens, window, advice)
    return ContextPressure("critical", ratio, tokens, window, _CRITICAL)


def known_window(model: str) -> int | None:
    """Look up a model's context in the table that ships with the package; None if it is not known."""
    return default_prices().context_window(model)

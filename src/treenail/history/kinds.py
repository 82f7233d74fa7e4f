"""The kinds of events that Treenail itself writes, all of them known.

Doors load a module when one of its names is used, so a command knows only the kinds of events that it works
with. A prune has to know all kinds that a log may hold: what it does not know it could not keep.
"""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "agent.context",
    "conversation.events",
    "conversation.messages",
    "judges.events",
    "judges.prompts",
    "mcp.pins",
    "prompt.events",
    "prompt.project",
    "prompt.visibility",
    "providers.vendor_loop",
    "state.events",
    "subagents.events",
    "tools.background",
    "tools.events",
    "tools.plan",
    "tools.policies",
    "turns.ledger",
    "turns.loops",
    "turns.openings",
    "turns.results",
    "turns.states",
    "turns.submissions",
    "workflows.events",
    "workflows.outcomes",
    "workspace.belonging",
    "workspace.travel.origins",
)
"""Where events are declared. None of these needs a vendor's package."""


def know_all_kinds() -> None:
    """Register every kind of event that Treenail writes."""
    for each in MODULES:
        import_module(f"treenail.{each}")

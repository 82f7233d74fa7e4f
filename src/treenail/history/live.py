"""The live part of a view: what a turn publishes while it runs, folded into a `LiveView`."""

from __future__ import annotations

from dataclasses import replace

from treenail.conversation import ContextPressure
from treenail.history.view import LiveView
from treenail.providers import ReasoningDelta, TextDelta
from treenail.turns import (
    Lagged,
    LiveEvent,
    PlanChanged,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    UsageChanged,
)


def with_event(live: LiveView, event: LiveEvent | Lagged) -> LiveView:
    """Return a live view with one more event folded in."""
    match event:
        case StatusChanged():
            return replace(live, status=event.status, detail=event.detail)
        case TextDelta():
            return replace(live, text=live.text + event.text)
        case ReasoningDelta():
            return replace(live, reasoning=live.reasoning + event.text)
        case ToolCallBegan():
            return replace(live, running=(*live.running, event))
        case ToolCallFinished():
            return without_call(live, event.call_id)
        case PlanChanged():
            return replace(live, plan=event.entries)
        case ContextPressure():
            return replace(live, pressure=event)
        case UsageChanged():
            return replace(live, usage=event)
        case Lagged():
            return replace(live, missed=live.missed + event.count)
    return live


def without_call(live: LiveView, call_id: str) -> LiveView:
    """Return a live view in which a call no longer runs."""
    return replace(live, running=tuple(each for each in live.running if each.call_id != call_id))

"""What a turn begins with besides its request: events about the run, and notices to the model.

A notice tells the model what it cannot know: that a file with its instructions has changed, that a process
has ended. It becomes a message of the conversation right before the next request, in one append with the
events that say so: it is told once, also if the program is killed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.codec import FrozenDict
from treenail.judges import placed
from treenail.log import SlicePolicy
from treenail.providers import Provider
from treenail.state import Session, event
from treenail.turns.states import TurnResumed, TurnStarted


@dataclass(slots=True)
class Opening:
    """What is logged, and what the model is told, before the turn's first request."""

    events: list[object] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """What the person is told of it, a sentence each."""


@event(name="treenail.ModelSwitched", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ModelSwitched:
    """From here on another model answers, or the same one with other options."""

    from_provider: str
    from_model: str
    provider: str
    model: str
    settings: FrozenDict[str, str] = field(default_factory=FrozenDict)
    """How the caller names the model and its options, so that it can be named again."""


def switched(
    session: Session, provider: Provider, settings: Mapping[str, str] | None
) -> tuple[ModelSwitched, ...]:
    """Return the event that another model answers than before: nothing, if it is the same one, or the first.

    `settings` is how the caller names it, if that has changed.
    """
    begun: list[tuple[TurnStarted | TurnResumed, int]] = [*placed(session, TurnStarted)]
    begun += placed(session, TurnResumed)
    if not begun:
        return ()
    last, _ = max(begun, key=lambda pair: pair[1])
    if settings is None and (last.provider, last.model) == (provider.name, provider.model):
        return ()
    named = FrozenDict(settings or {})
    return (ModelSwitched(last.provider, last.model, provider.name, provider.model, named),)


def model_settings_of(session: Session) -> Mapping[str, str] | None:
    """Return how the newest model was named when it was switched to; None if it never was."""
    newest = session[ModelSwitched].latest()
    return None if newest is None else newest.settings

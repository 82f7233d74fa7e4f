"""Turns: the loop, and the one table of how a turn can end."""

from holdfast.turns.adapter import ModelAdapter
from holdfast.turns.states import PartialText, TurnEnded, TurnStarted, TurnState, turn_state
from holdfast.turns.turn import InnerLoop, TurnResult

__all__ = [
    "InnerLoop",
    "ModelAdapter",
    "PartialText",
    "TurnEnded",
    "TurnResult",
    "TurnStarted",
    "TurnState",
    "turn_state",
]

"""Loops that are not ours, whose tool calls are in a log of ours."""

from __future__ import annotations

from dataclasses import dataclass

from treenail.log import SlicePolicy
from treenail.state import event


@event(name="treenail.LoopAttached", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class LoopAttached:
    """Another program's loop makes its tool calls here. It has no turns: how it ends, that program knows."""

    run: str
    """What that program calls the run."""
    workspace: str | None = None
    """The directory that its tools change."""
